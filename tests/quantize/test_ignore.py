"""The `ignore` list of new files against the rules of the programs that read it, which are written down here."""

import re
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import DIALECTS, matches
from moe_nvfp4.quantize.files import TensorSlice
from moe_nvfp4.quantize.names import ignore_patterns, is_dense_linear, is_scale
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import config_of
from tests.folders import qwen2_moe
from tests.models import folder, gpt_oss, load, mixtral, qwen3_moe

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
         "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
         "in_proj_ba": ("in_proj_b", "in_proj_a")}  # fmt: skip


def vllm_excludes(ignore, module, mapped):
    """vLLM's rule for quant_method modelopt (layers/quantization/modelopt.py, is_layer_excluded).

    A fused module is excluded by the exact names of its parts, all or none; then every entry counts as a substring,
    then as a wildcard. mapped: the model's class renames modules, then "x*" becomes "x" and "x.*" first.
    """
    if mapped:
        split = ([p[:-1], f"{p[:-1]}.*"] if p.endswith("*") and not p.endswith(".*") else [p] for p in ignore)
        ignore = [p for ps in split for p in ps]
    stem, _, last = module.rpartition(".")
    parts = [f"{stem}.{part}" in ignore for part in FUSED.get(last, ())]
    assert len(set(parts)) < 2, f"vLLM refuses to load: some parts of {module} are excluded"
    if all(parts) and (parts or module in ignore):
        return True
    return any(p in module for p in ignore if p != module) or any(fnmatch(module, p) for p in ignore)


def compressed_tensors_ignores(ignore, module):
    """compressed-tensors' rule: each part of a fused module must match a name, or an expression at its start."""
    stem, _, last = module.rpartition(".")
    parts = [f"{stem}.{part}" for part in FUSED[last]] if last in FUSED else [module]
    hits = [any(re.match(p[3:], x) if p.startswith("re:") else p == x for p in ignore) for x in parts]
    assert len(set(hits)) == 1, f"some parts of {module} are ignored"
    return hits[0]


def vllm_renames(ignore):
    """vLLM's rule for compressed-tensors in models whose modules it names otherwise (apply_vllm_mapper): names get
    another beginning, while expressions and what has no dot stay."""
    return [f"language_model.{p}" if "." in p and not p.startswith("re:") else p for p in ignore]


def vllm_ignores(ignore, module):
    """What vLLM finds out for `module`, an experts module by its number 0 (CompressedTensorsMoEMethod)."""
    module = re.sub(r"experts\.\d+\.", "experts.0.", module)
    module += ".0.down_proj" if module.endswith(".experts") else ""
    name = module if module == "lm_head" else f"language_model.{module}"  # a head is only quantized if a target says so
    return compressed_tensors_ignores(vllm_renames(ignore), name)


def check(ignore, dialect, dense, quantized):
    if dialect == "modelopt":
        excludes = [lambda m, mapped=mapped: vllm_excludes(ignore, m, mapped) for mapped in (False, True)]
    else:
        excludes = [lambda m: compressed_tensors_ignores(ignore, m), lambda m: vllm_ignores(ignore, m)]
    for excluded in excludes:
        assert [m for m in dense if not excluded(m)] == []
        assert [m for m in quantized if excluded(m)] == []


ATTENTION = ("self_attn.qkv_proj", "self_attn.o_proj")


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("route", ["quantize", "from_pretrained"])
@pytest.mark.parametrize("family", [qwen3_moe, mixtral, qwen2_moe], ids=lambda f: f.__name__)
def test_servers_find_what_is_dense(family, route, dialect, tmp_path):
    source, path = folder(tmp_path, family), tmp_path / "nvfp4"
    if route == "quantize":
        convert_checkpoint(source, path, Options(dialect=dialect), progress=False)
    else:
        load(source, quantization_config=MoeNvfp4Config(dialect=dialect)).save_pretrained(path)
    block = "block_sparse_moe" if family is mixtral and route == "quantize" else "mlp"
    names = [*ATTENTION, f"{block}.gate"]
    if family is qwen2_moe:
        names += ["mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj", "mlp.shared_expert_gate"]
    dense = ["lm_head", *(f"model.layers.{i}.{name}" for i in range(2) for name in names)]
    experts = [f"model.layers.{i}.{block}.experts" for i in range(2)]
    experts += [f"{e}.3.{part}" for e in experts for part in ("w1", "w2", "gate_proj", "down_proj")]
    check(config_of(path)["quantization_config"]["ignore"], dialect, dense, experts)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_mamba_modules(dialect):
    """vLLM looks for those of Granite 4 and Jamba under another name than their weights have."""
    dense = {f"model.layers.{i}.mamba.{part}_proj" for i in range(2) for part in ("in", "out")}
    quantized = {f"model.layers.{i}.block_sparse_moe.experts.0.down_proj" for i in range(2)}
    ignore = ignore_patterns(dense, quantized, set(), DIALECTS[dialect])
    check(ignore, dialect, dense | {name.replace("mamba", "mixer") for name in dense}, quantized)
    mixers = {"backbone.layers.1.mixer.experts.0.down_proj"}  # Nemotron-H has experts in a module of that name
    check(ignore_patterns({"backbone.layers.0.mamba.in_proj"}, mixers, set(), DIALECTS[dialect]), dialect, [], mixers)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dense_layers_before_experts(dialect):
    """DeepSeek's first layers have an MLP where later ones have experts; Nemotron has mixers of several kinds."""
    dense, quantized, asked = {"lm_head"}, set(), ["lm_head"]
    for i in range(13):
        stem = f"model.layers.{i}"
        dense |= {f"{stem}.self_attn.{part}_proj" for part in "qkvo"}
        asked += [f"{stem}.{name}" for name in ATTENTION]
        if i in (0, 1):
            dense |= {f"{stem}.mlp.{part}_proj" for part in ("gate", "up", "down")}
            asked += [f"{stem}.mlp.gate_up_proj", f"{stem}.mlp.down_proj"]
        else:
            dense.add(f"{stem}.mlp.gate")
            dense |= {f"{stem}.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
            asked += [f"{stem}.mlp.gate", f"{stem}.mlp.shared_experts.gate_up_proj"]
            quantized |= {f"{stem}.mlp.experts.{e}.{part}_proj" for e in range(3) for part in ("gate", "up", "down")}
    ignore = ignore_patterns(dense, quantized, set(), DIALECTS[dialect])
    check(ignore, dialect, asked, {n.rpartition(".experts")[0] + ".experts" for n in quantized} | quantized)
    patterns = ignore if dialect == "modelopt" else [p for p in ignore if p.startswith("re:")]
    assert len(patterns) < 12, "layers are folded"

    mixers = {f"backbone.layers.{i}.mixer.{part}_proj" for i in (1, 11) for part in "qkvo"}
    experts = {f"backbone.layers.{i}.mixer.experts.0.up_proj" for i in (0, 10)}
    ignore = ignore_patterns(mixers, experts, set(), DIALECTS[dialect])
    check(ignore, dialect, [f"backbone.layers.{i}.mixer.qkv_proj" for i in (1, 11)], experts)

    stems = [f"model.layers.{i}" for i in range(12)]  # next to linears that are quantized
    dense = {f"{s}.linear_attn.in_proj_{part}" for s in stems for part in "ab"}
    dense |= {f"{s}.self_attn.{part}_proj" for s in stems for part in "qkv"}
    packed = {f"{s}.{name}" for s in stems for name in ("linear_attn.in_proj_qkv", "self_attn.o_proj")}
    asked = [f"{s}.{name}" for s in stems for name in ("linear_attn.in_proj_ba", "self_attn.qkv_proj")]
    check(ignore_patterns(dense, packed, set(), DIALECTS[dialect]), dialect, asked, packed)
    dense = {f"{s}.self_attn.{part}" for s in stems for part in ("q_a_proj", "kv_a_proj_with_mqa")}
    dense |= {f"{s}.linear_attn.in_proj_{part}" for s in stems for part in ("qkv", "z")}
    packed = {f"{s}.{name}.{part}_proj" for s in stems for name, part in (("self_attn", "o"), ("linear_attn", "out"))}
    asked = [f"{s}.{name}" for s in stems for name in ("self_attn.fused_qkv_a_proj", "linear_attn.in_proj_qkvz")]
    check(ignore_patterns(dense, packed, set(), DIALECTS[dialect]), dialect, asked, packed)
    first, *others = (f"{s}.self_attn.o_proj" for s in stems)  # dense in one layer, quantized in others
    check(ignore_patterns({first}, set(others), set(), DIALECTS[dialect]), dialect, [first], others)

    blocks = [f"transformer.blocks.{i}.ffn" for i in range(12)]  # DBRX's router is a linear inside of it
    experts = [f"{block}.experts.0.w1" for block in blocks]
    ignore = ignore_patterns({f"{block}.router.layer" for block in blocks}, set(experts), set(), DIALECTS[dialect])
    check(ignore, dialect, [f"{block}.{name}" for block in blocks for name in ("router", "router.layer")], experts)
    for excluded, names in (
        ("model.layers.1.block_sparse_moe.experts", ("model.layers.1.mlp.experts",)),
        ("layers.1.ffn.experts", ("layers.1.mlp.experts",)),
        ("backbone.layers.1.mixer.experts", ("model.layers.1.mixer.experts",)),
    ):
        others = {name.replace(".1.", ".11.") for name in (excluded, *names)}
        ignore = ignore_patterns(set(), set(), {excluded}, DIALECTS[dialect])
        check(ignore, dialect, [f"{name}{part}" for name in (excluded, *names) for part in ("", ".3.w1")], others)


def test_names_of_scales_and_linears():
    """The names of ModelOpt, compressed-tensors, DeepSeek, gpt-oss and vLLM's KV cache."""
    stored = lambda dtype, *shape: TensorSlice(Path(), dtype, shape, 0, 0)
    norms = {"a.norm.scale": stored("F32", 8), "a.norm.weight": stored("BF16", 8)}
    linear = {"a.wq.scale": stored("F8_E8M0", 1, 1), "a.wq.weight": stored("F8_E4M3", 8, 8)}
    for last in ("q_proj.weight_scale q_proj.weight_scale_2 q_proj.weight_scale_inv experts.gate_up_proj_scale_inv "
                 "experts.gate_up_proj_scales experts.gate_up_proj_blocks q_proj.input_scale q_proj.activation_scale "
                 "q_proj.weight_global_scale q_proj.input_global_scale q_proj.weight_packed q_proj.pre_quant_scale "
                 "q_proj.svdquant_lora_a q_proj.svdquant_lora_b wq.scale").split():  # fmt: skip
        assert is_scale(f"a.{last}", linear), last
    for last in ("norm.scale norm.weight attn.k_scale k_proj.v_scale attn.q_scale attn.kv_scale k_proj.k_global_scale "
                 "self_attn.q.scale self_attn.k_cache.scale "
                 "attn.v_zero_point layer_scale per_expert_scale router.scale").split():  # fmt: skip
        assert not is_scale(f"a.{last}", norms), last
    matrix = stored("BF16", 8, 8)
    for name in ("transformer.wte transformer.wpe model.embed_tokens text.Embedding wte visual.pos_embed "
                 "model.embed_tokens_per_layer embeddings.position_embedding").split():  # fmt: skip
        assert not is_dense_linear(f"{name}.weight", matrix), name
    for name in ("lm_head unembed unembedding model.layers.0.attn.swte embed_vision.embedding_projection "
                 "visual.patch_embed.proj patch_embedder.input_proj patch_embedding.linear").split():  # fmt: skip
        assert is_dense_linear(f"{name}.weight", matrix), name
    assert not is_dense_linear("lm_head.bias", matrix) and not is_dense_linear("a.weight", stored("BF16", 8))


@pytest.mark.slow
def test_excluded_experts(tmp_path):
    path = tmp_path / "nvfp4"
    convert_checkpoint(folder(tmp_path, mixtral), path, Options(exclude=["*layers.0.*"]), progress=False)
    ignore = config_of(path)["quantization_config"]["ignore"]
    for module in ("block_sparse_moe.experts", "mlp.experts"):
        check(ignore, "modelopt", [f"model.layers.0.{module}", f"model.layers.0.{module}.1.w3"],
              [f"model.layers.1.{module}"])  # fmt: skip
    assert torch.isfinite(load(path).lm_head.weight).all()


@pytest.mark.slow
def test_a_pattern_for_layer_0_does_not_name_expert_0_of_the_others(tmp_path):
    """Patterns are compared with the names of experts, too, of which each layer has a number 0."""
    source = folder(tmp_path, qwen3_moe)
    layers = [f"model.layers.{i}.mlp.experts" for i in range(2)]
    for pattern, chosen in (
        ("*.0.*", layers[:1]),
        ("*.1.*", layers[1:]),
        ("*.experts.*", layers),
        ("*.down_proj", layers),
        ("*.1.*.up_proj", layers[1:]),
    ):
        others = [name for name in layers if name not in chosen]
        for options, expected in ((Options(include=[pattern]), chosen), (Options(exclude=[pattern]), others)):
            if expected:
                path = tmp_path / f"{pattern.strip('*.')}{options.include is None}"
                convert_checkpoint(source, path, options, progress=False)
                assert [*verify_checkpoint(path, source).layers] == expected
        config = MoeNvfp4Config(exclude=[pattern])
        assert [name for name in layers if config.excludes(name)] == chosen
    with pytest.raises(ValueError, match="matches no experts module"):
        convert_checkpoint(source, tmp_path / "x", Options(exclude=["model.layers.1.mlp.experts.0.*"]), progress=False)
    # An ignore list may name experts one by one
    config = MoeNvfp4Config()
    config.ignore = [f"{layers[1]}.{e}.{part}" for e in range(8) for part in ("gate_proj", "up_proj", "down_proj")]
    assert [name for name in layers if config.excludes(name)] == layers[1:]


@pytest.mark.parametrize("family, experts", [(mixtral, "block_sparse_moe.experts"), (gpt_oss, "mlp.experts")])
def test_dense_experts_of_files_that_are_nvfp4_already(family, experts, tmp_path):
    """Converted to another dialect, or loaded and saved, they stay in the ignore list, under their name in files."""
    first, carried, saved = (tmp_path / name for name in ("first", "carried", "saved"))
    other = Options(exclude=["*layers.0.*"], dialect="compressed-tensors")
    convert_checkpoint(folder(tmp_path, family), first, other, progress=False)
    convert_checkpoint(first, carried, Options(), progress=False)
    load(first).save_pretrained(saved)
    for path, dialect in ((carried, "modelopt"), (saved, "compressed-tensors")):
        ignore, dense = config_of(path)["quantization_config"]["ignore"], f"model.layers.0.{experts}"
        check(ignore, dialect, [dense, f"{dense}.0.w1"], [f"model.layers.1.{experts}.0.w1"])
        assert verify_checkpoint(path).warnings == []


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("linears", ["attention", "shared", "all"])
def test_servers_find_which_linears_are_quantized(linears, dialect, tmp_path):
    path = tmp_path / "nvfp4"
    convert_checkpoint(folder(tmp_path, qwen2_moe), path, Options(dialect=dialect, linears=linears), progress=False)
    groups = {"attention": ATTENTION, "shared": ("mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj")}
    named = {f"model.layers.{i}.{name}": group for group in groups for name in groups[group] for i in range(2)}
    named |= {"lm_head": "lm_head", "model.layers.0.mlp.gate": None, "model.layers.1.mlp.shared_expert_gate": None}
    quantized = [name for name, group in named.items() if group and linears in (group, "all")]
    experts = [f"model.layers.{i}.mlp.experts" for i in range(2)]
    dense = [name for name in named if name not in quantized]
    check(config_of(path)["quantization_config"]["ignore"], dialect, dense, quantized + experts)


@pytest.mark.slow
def test_expressions_of_strangers():
    """An ignore list comes from strangers: no expression in it may run forever or raise an unexpected error."""
    began = time.perf_counter()
    with pytest.raises(ValueError, match="takes too long: name modules"):
        matches(r"re:(?:a|a|aa)+(?:a|aa)+\1$".replace(r"\1", "b"), "a" * 200)
    assert time.perf_counter() - began < 5
    with pytest.raises(ValueError, match=r"'re:\(', excluded or in the config's ignore list, is no regular expression"):
        matches("re:(", "model.layers.0")
    assert matches(r"re:.*mlp\.gate$", "model.layers.0.mlp.gate") and not matches(r"re:mlp", "model.mlp")
    assert not matches(r"re:(\w+\.?)*expert!", "model.layers.0.mlp.experts.0.down_proj" * 4)
