"""4-bit linears besides the experts: which they are, their bytes, and what reads them."""

import importlib.util
import json
import re

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from moe_nvfp4.format import dequantize
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, checkpoint_config, swap_experts
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize import jobs
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import DIALECTS
from moe_nvfp4.quantize.files import ShardWriter
from moe_nvfp4.quantize.layouts.nvfp4 import recognise
from moe_nvfp4.quantize.linears import GROUPS, Linear, choose, group_of
from moe_nvfp4.quantize.names import fused_names
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import RECIPES, quantize_matrix, recipe_global_scale
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import config_of, converted, edit_config, experts, same_files
from tests.checkpoints import folder as by_hand
from tests.common import THRESHOLDS, relative_error
from tests.folders import as_published, qwen2_moe, value, write
from tests.integrations.test_checkpoint_forms import deepseek_v4
from tests.models import (
    IDS,
    SMALL,
    aria,
    as_bytes,
    dbrx,
    deepseek,
    folder,
    gemma4,
    gpt_oss,
    llama4,
    load,
    logits,
    make,
    mixtral,
    nemotron_h,
    qwen3_moe,
    same_tensors,
    step3p7,
    tensors,
)
from tests.quantize.test_convert import hy_v4, inkling, inkling2, loaded, loaded_and_saved, qwen3_5_moe, qwen3_next

both = pytest.mark.parametrize("dialect", DIALECTS)
# What vLLM 0.26 fuses (packed_modules_mapping of its models); q_proj stands alone where it is large enough
FUSED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"),
         ("in_proj_qkv", "in_proj_z")]  # fmt: skip


def made(path, dialect="modelopt"):
    """The linears of a folder that are NVFP4, without experts."""
    found = recognise({n: t.shape for n, t in tensors(path).items()}, DIALECTS[dialect])
    return {stem for stem in found if ".experts." not in stem}


def expected(files, recipe="mse", stems=()):
    """stem -> (codes, sf, global scale) of the linears `stems` of dense files, where fused ones share a scale."""
    found = {}
    for stem in stems:
        above, _, last = stem.rpartition(".")
        parts = next((parts for parts in FUSED if last in parts), (last,))
        group = [files[f"{above}.{part}.weight"] for part in parts if f"{above}.{part}.weight" in files]
        group = group if above else [files[f"{stem}.weight"]]
        amax = max(w.abs().max().float() for w in group)
        found[stem] = quantize_matrix(files[f"{stem}.weight"], recipe, recipe_global_scale(amax, recipe))
    return found


def check_bytes(path, source, recipe="mse", dialect="modelopt"):
    files, found = tensors(source), tensors(path)
    d, stems = DIALECTS[dialect], made(path, dialect)
    for stem, (codes, sf, scale) in expected(files, recipe, stems).items():
        assert as_bytes(found[f"{stem}.{d.weight}"]) == as_bytes(codes), stem
        assert as_bytes(found[f"{stem}.{d.sf}"]) == as_bytes(sf), stem
        assert as_bytes(found[f"{stem}.{d.global_scale}"]) == as_bytes(d.encode_scale(scale)), stem
    for name, tensor in files.items():
        if ".experts." not in name and name.removesuffix(".weight") not in stems:
            assert as_bytes(found[name]) == as_bytes(tensor), name
    return stems


# ---------------------------------------------------------------- bytes
@pytest.mark.slow_after(2)
@both
@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes(recipe, dialect, tmp_path):
    """q, k and v of different heights share a scale, and so do gate and up; biases are copied."""
    source = folder(tmp_path, qwen2_moe)
    report = convert_checkpoint(source, tmp_path / "b", Options(recipe, linears="all", dialect=dialect), progress=False)
    stems = check_bytes(tmp_path / "b", source, recipe, dialect)
    assert len(stems) == report.linears == 2 * 7 + 1 and report.quantized == 2 * 4 * 3
    found = tensors(tmp_path / "b")
    assert report.linears_after == sum(
        found[f"{stem}.{last}"].nbytes for stem in stems for last in DIALECTS[dialect].suffixes[:3]
    )
    assert report.linears_before == sum(tensors(source)[f"{stem}.weight"].nbytes for stem in stems)
    assert verify_checkpoint(tmp_path / "b", source).warnings == []


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64 * 5, 64 * 64, 64 * 97])
def test_pieces_end_anywhere_in_fused_linears(chunk, tmp_path, monkeypatch):
    source = folder(tmp_path, qwen2_moe)
    whole = converted(source, tmp_path / "whole", linears="attention")
    monkeypatch.setattr(jobs, "CHUNK", chunk)
    same_files(converted(source, tmp_path / "pieces", linears="attention"), whole)


def test_fp8_linears_are_quantized_from_their_values(tmp_path):
    from tests.quantize.test_convert import fp8

    files, dense = experts(E=3, I=48, H=64), {}
    for part in ("k_proj", "v_proj"):
        files[f"model.layers.0.self_attn.{part}.weight"] = torch.randn(32, 64).bfloat16()
    for name in [n for n in files if "layers" in n]:
        codes, scale, worth = fp8(files[name].float(), 32, torch.float32)
        files[name], files[f"{name}_scale_inv"], dense[name] = codes, scale, worth.bfloat16()
    q = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    source = by_hand(tmp_path / "a", files, {"quantization_config": q, "num_experts": 3}, shards=2)
    path = converted(source, tmp_path / "b", linears="attention")
    found, stems = tensors(path), {f"model.layers.0.self_attn.{part}_proj" for part in "qkv"}
    assert made(path) == stems
    for stem, (codes, sf, scale) in expected(dense, stems=stems).items():
        assert as_bytes(found[f"{stem}.weight"]) == as_bytes(codes) and found[f"{stem}.weight_scale_2"] == scale
        assert as_bytes(found[f"{stem}.weight_scale"]) == as_bytes(sf)
    verify_checkpoint(path, source)


# ---------------------------------------------------------------- which
def sarvam():
    """q, k and v are one tensor in its files, which loading splits."""
    from transformers import AutoModelForCausalLM, SarvamMoEConfig

    config = SarvamMoEConfig(**SMALL, intermediate_size=48, moe_intermediate_size=48, num_experts=4,
                             num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1)  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def deepseek_ocr2():
    """The names of its two towers are other ones in files: sam_model, and qwen2_model.model.model.layers."""
    config = transformers.DeepseekOcr2Config(
        text_config=dict(**SMALL | dict(num_key_value_heads=4), intermediate_size=48, moe_intermediate_size=48,
                         n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
                         mlp_layer_types=["dense", "sparse"]),
        vision_config=dict(
            encoder_config=dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                num_key_value_heads=2, vocab_size=96),
            sam_config=dict(hidden_size=32, mlp_dim=32, num_hidden_layers=1, num_attention_heads=2, output_channels=16,
                            downsample_channels=[16, 32], image_size=64, patch_size=16, global_attn_indexes=[0])),
    )  # fmt: skip
    return transformers.DeepseekOcr2ForConditionalGeneration(config)


ATTENTION = {f"self_attn.{part}_proj" for part in "qkvo"}
MLA = {f"self_attn.{part}" for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
SHARED = lambda where: {f"{where}.{part}_proj" for part in ("gate", "up", "down")}
MEANT = {
    qwen3_moe: {"attention": ATTENTION, "lm_head": {"lm_head"}},
    qwen2_moe: {"attention": ATTENTION, "shared": SHARED("mlp.shared_expert"), "lm_head": {"lm_head"}},
    deepseek: {"attention": MLA, "shared": SHARED("mlp.shared_experts"), "mlp": SHARED("mlp"), "lm_head": {"lm_head"}},
    gemma4: {"attention": ATTENTION, "mlp": SHARED("mlp")},
    llama4: {"attention": ATTENTION, "shared": SHARED("feed_forward.shared_expert"), "lm_head": {"lm_head"}},
    nemotron_h: {"attention": {f"mixer.{part}_proj" for part in "qkvo"},
                 "shared": {"mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"}, "lm_head": {"lm_head"}},
    mixtral: {"attention": ATTENTION, "lm_head": {"lm_head"}},
    gpt_oss: {"attention": ATTENTION, "lm_head": {"lm_head"}},
    dbrx: {"attention": {"norm_attn_norm.attn.Wqkv", "norm_attn_norm.attn.out_proj"}, "lm_head": {"lm_head"}},
    aria: {"attention": ATTENTION, "shared": SHARED("mlp.shared_experts"), "lm_head": {"lm_head"}},
    step3p7: {"attention": ATTENTION, "shared": SHARED("share_expert"), "lm_head": {"lm_head"}},
    qwen3_next: {"attention": {f"linear_attn.{part}" for part in ("in_proj_qkvz", "out_proj")},
                 "shared": SHARED("mlp.shared_expert"), "lm_head": {"lm_head"}},
    qwen3_5_moe: {"attention": {f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "out_proj")},
                  "shared": SHARED("mlp.shared_expert"), "lm_head": {"lm_head"}},
    hy_v4: {"attention": {*MLA, "self_attn.linear_gate"},
            "shared": SHARED("mlp.shared_experts"), "mlp": SHARED("mlp")},
    sarvam: {"attention": {"attention.dense"}, "shared": SHARED("mlp.shared_experts"), "mlp": SHARED("mlp"),
             "lm_head": {"lm_head"}},
    inkling: {"attention": {"attn.wq_du", "attn.wk_dv", "attn.wv_dv", "attn.wr_du", "attn.wo_ud"}},
    inkling2: {"attention": {"attn.wq_du", "attn.wk_dv", "attn.wv_dv", "attn.wo_ud", "attn.gate_attn"}},
    deepseek_v4: {"attention": {"attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b"},
                  "shared": {f"ffn.shared_experts.w{i}" for i in (1, 2, 3)}},
    deepseek_ocr2: {"attention": ATTENTION, "shared": SHARED("mlp.shared_experts"), "mlp": SHARED("mlp"),
                    "lm_head": {"lm_head"}},
}  # fmt: skip
for family, name in ((sarvam, "SarvamMoEConfig"), (deepseek_ocr2, "DeepseekOcr2Config"),
                     (deepseek_v4, "DeepseekV4Config")):  # fmt: skip
    if not hasattr(transformers, name):
        del MEANT[family]  # this transformers does not have it


def in_layer(stem):
    return re.sub(r"^.*?(layers|blocks)\.\d+\.", "", stem)


@pytest.mark.slow
@pytest.mark.parametrize("family", MEANT, ids=lambda f: f.__name__)
def test_groups_of_families(family, tmp_path):
    """The groups, and the same bytes by every way: converted, while loading, swapped, loaded and saved again."""
    source = folder(tmp_path, family)
    as_published(source)
    theirs = loaded_and_saved(source, tmp_path / "theirs", linears="all")
    ours = converted(source, tmp_path / "ours", linears="all")
    widened = [n for n, t in tensors(theirs).items() if t.dtype == torch.float32 and not n.endswith("weight_scale_2")]
    same_tensors(theirs, ours, but=widened)  # what transformers keeps in fp32 whatever the file says
    swapped = swap_experts(loaded(source), linears="all", progress=False)
    swapped.save_pretrained(tmp_path / "swapped")
    same_files(theirs, tmp_path / "swapped")
    same_tensors(theirs, loaded_and_saved(ours, tmp_path / "again"), but=widened)
    assert verify_checkpoint(ours, source).warnings == []
    found = made(ours)
    assert {in_layer(stem) for stem in found} == set().union(*MEANT[family].values())
    assert not any("qwen2_model" in stem for stem in found), "a tower whose layers have the names of the others"
    for group, meant in list(MEANT[family].items())[: 1 if family is not deepseek else 4]:
        one = made(converted(source, tmp_path / group, linears=group))
        assert {in_layer(stem) for stem in one} == meant and one <= found


@pytest.mark.parametrize("family", MEANT, ids=lambda f: f.__name__)
def test_what_is_fused_reads_the_same_rows(family):
    """Recipes measure the rows of the first for all. Inkling 2's q, k and v have norms of their own."""
    layers = ["hybrid_sliding", "hybrid"]  # Inkling 2's first two are sliding otherwise, in which rows are the same
    change = {"layer_types": layers} if family is inkling2 else {}
    model, rows = make(lambda: family(**change), torch.float32), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, args, name=name: rows.setdefault(name, args[0].clone()))
    with torch.no_grad():
        model(IDS, use_cache=False)
    groups = {tuple(n for n in fused_names(name) if n in rows) for name in rows}
    for first, *others in groups:
        for other in others:
            assert torch.equal(rows[first], rows[other]), (first, other)
    assert any(len(group) > 1 for group in groups) or family in (dbrx, sarvam, inkling2)
    if family is inkling2:
        q, k = (f"model.layers.1.self_attn.{part}_proj.linear" for part in "qk")
        assert rows[q].shape == rows[k].shape and not torch.equal(rows[q], rows[k])


def test_what_transformers_keeps_in_fp32(tmp_path):
    """In files of fp32, too: hy_v4 casts to its head's dtype."""
    source = folder(tmp_path, hy_v4, dtype=torch.float32)
    for ask in (lambda: converted(source, tmp_path / "b", linears="lm_head"),
                lambda: swap_experts(load(source, torch.float32), linears="lm_head", progress=False)):  # fmt: skip
        with pytest.raises(ValueError, match="lm_head stays dense: transformers keeps it in float32"):
            ask()


def test_groups_by_name():
    """Names decide where transformers does not know a model."""
    layer = "model.layers.3"
    for name, group in {
        "lm_head": "lm_head", "language_model.lm_head": "lm_head", f"{layer}.self_attn.q_proj": "attention",
        f"{layer}.attention.wqkv": "attention",
        f"{layer}.attention.dense": "attention", f"{layer}.self_attn.kv_b_proj": "attention",
        f"{layer}.linear_attn.out_proj": "attention", f"{layer}.linear_attn.in_proj_ba": None,
        f"{layer}.self_attn.indexer.wq_b": None, f"{layer}.mlp.gate_up_proj": "mlp", f"{layer}.feed_forward.w2": "mlp",
        f"{layer}.mlp.shared_experts.down_proj": "shared", f"{layer}.mlp.shared_expert_gate": None,
        f"{layer}.share_expert.up_proj": "shared", f"{layer}.shared_mlp.output_linear": "shared",
        f"{layer}.mlp.gate": None, f"{layer}.block_sparse_moe.gate": None, f"{layer}.router.proj": None,
        f"{layer}.mlp.router.layer": None, f"{layer}.mixer.in_proj": None, "model.embed_tokens": None,
        "model.visual.blocks.0.attn.qkv": None, "code2wav.pre_transformer.layers.0.mlp.up_proj": None,
        "vision_tower.layers.0.self_attn.q_proj": None, "score": None,
        "model.sam_model.blocks.0.attn.qkv": None,
    }.items():  # fmt: skip
        assert group_of(name) == group, name
    assert set(GROUPS) == {"attention", "shared", "mlp", "lm_head"}


def test_a_model_that_transformers_does_not_know(tmp_path):
    files = experts(layers=2) | {"model.layers.2.self_attn.q_proj.weight": torch.randn(64, 64).bfloat16()}
    source = by_hand(tmp_path / "a", files, {"num_hidden_layers": 2})
    report = convert_checkpoint(source, tmp_path / "b", Options(linears="all"), progress=False)
    assert made(tmp_path / "b") == {"lm_head", *(f"model.layers.{i}.self_attn.q_proj" for i in range(2))}
    assert "multi-token prediction" in report.skipped["model.layers.2.self_attn.q_proj"]
    for linears in ("mtp", ["attention", "mtp"]):
        with pytest.raises(ValueError, match="'mtp': model.layers.2.self_attn.q_proj stays dense: a multi-token"):
            converted(source, tmp_path / "c", linears=linears)
    check_bytes(tmp_path / "b", source)
    edit_config(source, tie_word_embeddings=True)
    with pytest.raises(
        ValueError, match="linears: 'lm_head': lm_head stays dense: config.json says that it is the embedding"
    ):
        converted(source, tmp_path / "c", linears="lm_head")


def test_a_tied_head(tmp_path):
    """It is an error to ask for it, and said where all are asked for; by files and in memory."""
    source = folder(tmp_path, gemma4)
    message = "linears: 'lm_head': .* says that it is the embedding .* one of its own .tie_word_embeddings"
    with pytest.raises(ValueError, match=message):
        converted(source, tmp_path / "b", linears="lm_head")
    with pytest.raises(ValueError, match=message):
        load(source, quantization_config=MoeNvfp4Config(linears=["attention", "lm_head"]))
    model = load(source)
    with pytest.raises(ValueError, match=message):
        swap_experts(model, linears="lm_head", progress=False)
    assert not hasattr(model, "hf_quantizer") or model.hf_quantizer is None, "the model is as it was"
    report = convert_checkpoint(source, tmp_path / "c", Options(linears="all"), progress=False)
    assert "it is the embedding" in report.skipped["lm_head"] and "lm_head" not in made(tmp_path / "c")


def odd():
    """The output of attention has 4 * 18 = 72 columns."""
    return qwen3_moe(head_dim=18)


def test_columns_that_are_no_whole_blocks(tmp_path):
    """Left dense, with a word, where a group is asked for; an error where none of what is asked for can be 4-bit."""
    source = folder(tmp_path, odd)
    report = convert_checkpoint(source, tmp_path / "b", Options(linears="attention"), progress=False)
    assert report.skipped == {"model.layers.*.self_attn.o_proj": "K = 72 is no multiple of 16, the NVFP4 block"}
    assert {in_layer(stem) for stem in made(tmp_path / "b")} == ATTENTION - {"self_attn.o_proj"}
    loaded_and_saved(source, tmp_path / "c", linears="attention")
    same_tensors(tmp_path / "b", tmp_path / "c")
    for ask in (lambda **o: converted(source, tmp_path / "d", **o), lambda **o: load(source, quantization_config=(
            MoeNvfp4Config(**o))), lambda **o: swap_experts(load(source), progress=False, **o)):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"'\*.o_proj': model.layers.0.self_attn.o_proj .2 linears. stays dense: K"
        ):
            ask(linears="*.o_proj")
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
def test_patterns(tmp_path):
    """Names in files and in transformers, wildcards, modules, commas, exclusions."""
    source = folder(tmp_path, qwen2_moe)
    attention = {f"model.layers.{i}.{name}" for i in range(2) for name in ATTENTION}
    one = {stem for stem in attention if ".0." in stem}
    shared = {f"model.layers.{i}.{name}" for i in range(2) for name in SHARED("mlp.shared_expert")}
    for i, (linears, exclude, meant) in enumerate((
        ("model.layers.0.self_attn", (), one),
        ("model.layers.0.self_attn.o_proj, lm_head", (), {"model.layers.0.self_attn.o_proj", "lm_head"}),
        (["*.q_proj", "*.[kv]_proj"], (), {s for s in attention if "o_proj" not in s}),
        ("all", ["*.0.self_attn", "lm_head"], attention - one | shared),
        ("attention", ["model.layers.0"], attention - one),
        ("attention", ["model.layers.0."], attention - one),
        ("attention", [r"re:.*\.0\.(self_attn|mlp)"], attention - one),
        ("attention", ["*.layers.0"], attention - one),  # its experts, too
    )):  # fmt: skip
        path = converted(source, tmp_path / f"b{i}", linears=linears, exclude=exclude)
        assert made(path) == meant, linears
        loaded_and_saved(source, tmp_path / f"c{i}", linears=linears, exclude=exclude)
        same_tensors(path, tmp_path / f"c{i}")
        assert verify_checkpoint(path, source).warnings == []


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("linears, exclude, message", [
    ("o_proj", (), r"linears: 'o_proj' matches no linear of .*: did you mean '\*.o_proj'\?"),
    ("atention", (), "'atention' matches no linear of .*: did you mean 'attention'.*Groups are attention, shared, lm"),
    ("mlp", (), "'mlp' matches no linear of .*, which has attention, shared, lm_head"),
    ("*.gate", (), r"'\*.gate': model.layers.0.mlp.gate .2 linears. stays dense: a router or gate"),
    ("model.embed_tokens", (), "model.embed_tokens stays dense: an embedding"),
    ("*.q_proj", (), "servers fuse .*0.self_attn.q_proj and .*k_proj, of which .* .not asked for.: ask for both"),
    ("attention", "*.v_proj", "servers fuse .*_proj and .*v_proj, of which the second stays dense .excluded."),
    ("attention", "*.[qkvo]_proj", "of those that attention names in .*, none can be 4-bit: .*o_proj: excluded"),
    ("attention", "lm_head", "'lm_head' matches no experts module, and none of the linears that are asked for"),
    ("attention", "*.shared_expert", r"'\*.shared_expert' matches no experts module, and none of the linears"),
    ("attention", "re:.*lm_head", r"'re:\.\*lm_head' matches no experts module, and none of the linears"),
])  # fmt: skip
def test_what_cannot_be_is_refused(linears, exclude, message, tmp_path):
    source = folder(tmp_path, qwen2_moe)
    with pytest.raises(ValueError, match=message):
        converted(source, tmp_path / "b", linears=linears, exclude=exclude)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bf16"]
    with pytest.raises(ValueError, match=message):
        load(source, quantization_config=MoeNvfp4Config(linears=linears, exclude=exclude))
    with pytest.raises(ValueError, match=message):
        swap_experts(load(source), linears=linears, exclude=exclude, progress=False)


@pytest.mark.parametrize("family, one, other", [
    (inkling, "*.q_proj", "r_proj"), (deepseek_v4, "*.wq_a", "kv_proj"),
])  # fmt: skip
def test_other_names_that_servers_fuse(family, one, other, tmp_path):
    if not hasattr(transformers, "DeepseekV4Config") and family is deepseek_v4:
        pytest.skip("this transformers has no DeepSeek V4")
    with pytest.raises(ValueError, match=r"servers fuse .* and .*self_attn\.\w+.*: ask for both") as refusal:
        converted(folder(tmp_path, family), tmp_path / "b", linears=one)
    assert any(name.endswith(other) for name in fused_names(re.search(r"fuse (\S+)", str(refusal.value))[1]))


def test_experts_that_are_stacks_are_excluded_by_either_name(tmp_path):
    """Step-3.7's files have no module `experts`: its stacks were taken for a layout that is not known."""
    source = folder(tmp_path, step3p7)
    for i, name in enumerate(("model.layers.0.moe.experts", "model.language_model.layers.0.mlp.experts")):
        path = converted(source, tmp_path / str(i), recipe="max", exclude=name)
        assert verify_checkpoint(path, source).warnings == []
        kept = [n for n, t in tensors(path).items() if ".moe." in n and t.dim() == 3 and t.dtype == torch.bfloat16]
        assert len(kept) == 3 and all(n.startswith("model.layers.0.moe.") for n in kept)


@pytest.mark.parametrize("family", [inkling, inkling2], ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", [{"include": "model.llm.layers.0.mlp.experts"},
                                   {"exclude": "model.llm.layers.1.mlp.experts"}], ids=lambda w: [*w][0])  # fmt: skip
def test_stacks_that_stay_dense_under_the_names_of_files(which, family, tmp_path):
    """The folder could not be loaded: its list names the module in files, which Inkling calls otherwise."""
    source = folder(tmp_path, family)
    path = converted(source, tmp_path / "b", recipe="max", **which)
    model = loaded(path)
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if name.endswith(".experts")}
    assert [kind == "HFExperts" for kind in kinds.values()] == [True, False], kinds
    assert verify_checkpoint(path, source).warnings == []


def test_what_stays_dense_is_named_by_its_layers():
    """* where that goes for all linears of such a name, for one reason; else the numbers for which it goes."""

    def of(stem, layers, columns=64, why=None):
        return [Linear(f"model.layers.{i}.self_attn.{stem}", f"model.layers.{i}.self_attn.{stem}", columns, why)
                for i in layers]  # fmt: skip

    linears = [*of("q_proj", range(13)), *of("o_proj", range(11)), *of("o_proj", [11, 12], why="72"),
               *of("kv_b_proj", range(13), why="odd"), Linear("lm_head", "lm_head", 64, "tied")]  # fmt: skip
    numbers = "[0-2]", "5", "10"
    chosen = choose(linears, ["all"], [f"model.layers.{n}.*" for n in numbers], "a model")
    at = "model.layers.{}.self_attn.{}".format
    assert chosen.left == {
        at("{0-2,5,10}", "q_proj"): "excluded", at("{0-2,5,10}", "o_proj"): "excluded", at("{11-12}", "o_proj"): "72",
        at("*", "kv_b_proj"): "odd", "lm_head": "tied",
    }  # fmt: skip
    assert {linear.name for fused in chosen.fused for linear in fused} == {
        at(i, stem) for i in range(13) if i not in (0, 1, 2, 5, 10) for stem in ("q_proj", "o_proj")
        if stem == "q_proj" or i < 11
    }  # fmt: skip
    assert choose(linears, ["*.layers.3.*"], [], "a model").left == {at("3", "kv_b_proj"): "odd"}


def test_options_without_effect(tmp_path):
    source = folder(tmp_path, qwen2_moe)
    path = converted(source, tmp_path / "b", linears="all")
    with pytest.raises(ValueError, match="--linears choose what is quantized, and these weights are NVFP4 already"):
        converted(path, tmp_path / "c", linears="all", dialect="compressed-tensors")
    with pytest.raises(ValueError, match=r"linears=.*attention.* would have no effect: the files are 4-bit already"):
        load(path, quantization_config=MoeNvfp4Config(linears="attention"))
    with pytest.raises(ValueError, match=r"linears='sparse' would have no effect: .* one of .'packed', 'dense'"):
        checkpoint_config(path, linears="sparse")


# ---------------------------------------------------------------- what reads them
@pytest.mark.slow_after(1)
@both
@pytest.mark.parametrize("family", [qwen2_moe, deepseek], ids=lambda f: f.__name__)
def test_logits_are_those_of_dequantized_weights(family, dialect, tmp_path):
    source = folder(tmp_path, family)
    path = converted(source, tmp_path / "b", linears="all", dialect=dialect)
    found, twin = tensors(path), {}
    for name, tensor in tensors(source).items():
        stem = name.removesuffix(".weight")
        quantized = f"{stem}.{DIALECTS[dialect].global_scale}" in found
        twin[name] = value(dialect, found, stem) if quantized else tensor.float()
    dense = write(tmp_path / "twin", twin, {**config_of(source), "dtype": "float32"}, None)
    model = load(path, torch.float32)
    linears = [m for m in model.modules() if isinstance(m, NVFP4Linear)]
    assert len(linears) == len(made(path, dialect)) and not any(
        p.requires_grad for m in linears for p in m.parameters()
    )
    assert relative_error(logits(model), logits(load(dense, torch.float32))) < 10 * THRESHOLDS["fp32"]
    swapped = logits(swap_experts(load(source, torch.float32), linears="all", progress=False))
    exact = dialect == "modelopt"  # a scale whose reciprocal is stored may move by a bit
    assert torch.equal(swapped, logits(model)) if exact else relative_error(swapped, logits(model)) < 1e-5


@pytest.mark.slow
def test_readers_of_other_tools(tmp_path):
    """compressed-tensors decompresses linears to our weights, and so does ModelOpt."""
    if not all(map(importlib.util.find_spec, ("compressed_tensors", "modelopt"))):
        pytest.skip("compressed-tensors or nvidia-modelopt is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    source = folder(tmp_path, qwen2_moe)
    ours, theirs = (converted(source, tmp_path / d, linears="all", dialect=d) for d in DIALECTS)
    config = dict(config_of(theirs)["quantization_config"])
    config.pop("moe_nvfp4")
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    found, state = tensors(ours), tensors(theirs)
    for stem in made(ours):
        codes, sf, scale = (found[f"{stem}.{last}"] for last in ("weight", "weight_scale", "weight_scale_2"))
        w = dequantize(codes, sf, scale)
        of = {last: state[f"{stem}.{last}"] for last in ("weight_packed", "weight_scale", "weight_global_scale")}
        assert torch.allclose(compressor.decompress(of, scheme)["weight"].float(), w, rtol=2**-8, atol=0), stem
        q = NVFP4QTensor(torch.Size((codes.shape[0], codes.shape[1] * 2)), torch.float32, codes)
        assert torch.allclose(q.dequantize(dtype=torch.float32, scale=sf, double_scale=scale, block_sizes={-1: 16}), w,
                              rtol=3e-7, atol=0), stem  # fmt: skip


@pytest.mark.slow
def test_dialects_carry_them(tmp_path):
    source = folder(tmp_path, qwen2_moe)
    first = converted(source, tmp_path / "first", linears="all")
    second = converted(first, tmp_path / "second", dialect="compressed-tensors")
    same_tensors(converted(source, tmp_path / "third", linears="all", dialect="compressed-tensors"), second)
    verify_checkpoint(converted(second, tmp_path / "fourth"), first)


def test_verify_names_a_damaged_linear(tmp_path):
    source = folder(tmp_path, qwen2_moe)
    path = converted(source, tmp_path / "b", linears="all")
    layers = verify_checkpoint(path, source).layers
    assert {n for n in layers if "experts" not in n} == made(path)
    assert all(0.05 < sums.relative < 0.12 for sums in layers.values())
    good, stem = tensors(path), "model.layers.1.self_attn.k_proj"
    for last, change, message in (
        ("weight_scale_2", lambda t: t * 2, f"{stem}.weight_scale_2 stands for"),
        ("weight", lambda t: t.index_fill(0, torch.tensor([3]), 0x77), f"{stem} is damaged in row 3, columns"),
        ("weight_scale", None, f"{stem}.weight_scale"),
    ):
        files = {n: t for n, t in good.items() if change is not None or n != f"{stem}.{last}"}
        if change is not None:
            files[f"{stem}.{last}"] = change(good[f"{stem}.{last}"])
        save_file(files, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=re.escape(message)):
            verify_checkpoint(path, source)


# ---------------------------------------------------------------- interrupted
@pytest.mark.slow
def test_an_interrupted_conversion_goes_on(tmp_path, monkeypatch):
    source = folder(tmp_path, qwen2_moe)
    whole = converted(source, tmp_path / "whole", linears="all")
    write, count = ShardWriter.write, iter(range(10**9))
    with monkeypatch.context() as patch:

        def fails(self, *args):
            if next(count) >= 40:
                raise OSError("stopped")
            write(self, *args)

        patch.setattr(ShardWriter, "write", fails)
        with pytest.raises(OSError, match="stopped"):
            converted(source, tmp_path / "b", workers=1, linears="all")
    assert not (tmp_path / "b").exists()
    report = convert_checkpoint(source, tmp_path / "b", Options(linears="all"), progress=False)
    assert report.resumed > 0
    same_files(tmp_path / "b", whole)


@pytest.mark.slow
def test_an_interrupted_swap_goes_on(tmp_path, monkeypatch):
    from moe_nvfp4.integrations.huggingface import linears

    whole = swap_experts(make(qwen2_moe), linears="all", progress=False)
    model, real, count = make(qwen2_moe), linears.quantize_matrix, iter(range(99))

    def stops(*args):
        if next(count) == 3:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(linears, "quantize_matrix", stops)
        with pytest.raises(KeyboardInterrupt):
            swap_experts(model, linears="all", progress=False)
    kinds = {type(m) for m in model.modules() if isinstance(m, (nn.Linear, NVFP4Linear))}
    assert kinds == {nn.Linear, NVFP4Linear}
    with pytest.raises(RuntimeError):
        model.save_pretrained(tmp_path / "half")
    swap_experts(model, linears="all", progress=False)
    for path, of in ((tmp_path / "a", whole), (tmp_path / "b", model)):
        of.save_pretrained(path)
    same_files(tmp_path / "a", tmp_path / "b")


def test_nan_is_named_before_anything_changes():
    model = make(qwen2_moe)
    model.model.layers[1].self_attn.v_proj.weight.data[2, 3] = torch.nan
    with pytest.raises(ValueError, match="layers.1.self_attn.v_proj: 1 of 2048 weights are NaN or Inf"):
        swap_experts(model, linears="attention", progress=False)
    assert not any(isinstance(m, NVFP4Linear) for m in model.modules())


def test_what_commands_print(tmp_path, capsys):
    from moe_nvfp4 import cli

    source = folder(tmp_path, qwen2_moe)
    assert cli.main(["quantize", str(source), str(tmp_path / "b"), "--linears", "attention", "--linears", "lm_head",
                     "--dry-run"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "9 linears quantized (mse)" in said and re.search(r"linears 6\d\.\d KB -> 1\d\.\d KB", said)
    assert cli.main(["quantize", str(source), str(tmp_path / "b"), "--linears", "attention,lm_head", "--verify"]) == 0
    assert re.search(r"experts .* -> .*, linears .* -> .* \(mse\)", capsys.readouterr().out)
    card = (tmp_path / "b" / "README.md").read_text()
    assert "NVFP4 experts and linears" in card and "| linears | 9 in NVFP4, recipe `mse` |" in card
    assert "| `model.layers.1.self_attn.o_proj` |" in card
    assert cli.main(["quantize", str(tmp_path / "b"), str(tmp_path / "c"), "--dialect", "compressed-tensors"]) == 0
    carried = (tmp_path / "c" / "README.md").read_text()
    assert "NVFP4 experts and linears" in carried and "| linears | 9 NVFP4 matrices of the original, the" in carried
    assert f"| experts | {2 * 4 * 3} NVFP4 matrices of the original, the same codes and block scales |" in carried
    capsys.readouterr()
    assert cli.main(["info", str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    files, stems = tensors(tmp_path / "b"), made(tmp_path / "b")
    assert found["linears"] == len(stems) == 9
    assert found["bytes"]["linears_nvfp4"] == sum(
        files[f"{stem}.{last}"].nbytes for stem in stems for last in ("weight", "weight_scale", "weight_scale_2")
    )
    assert cli.main(["info", str(tmp_path / "b")]) == 0
    assert "9 linears: " in capsys.readouterr().out
    assert cli.main(["generate", str(tmp_path / "b"), "--linears", "all"]) == 2
    assert "--linears would have no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "family, class_name", [(qwen3_moe, "AutoModelForCausalLM"), (step3p7, "AutoModelForImageTextToText")]
)
def test_the_dtype_of_a_config_without_one(family, class_name, tmp_path):
    """transformers takes that of the first tensor in the files, which is here a global scale."""
    source = folder(tmp_path, family)
    text = config_of(source).get("text_config")
    edit_config(source, dtype=None, **({"text_config": {**text, "dtype": "bfloat16"}} if text else {}))
    convert_checkpoint(source, tmp_path / "new", Options(linears="lm_head"), progress=False)
    assert config_of(tmp_path / "new")["dtype"] == "bfloat16"
    model = getattr(transformers, class_name).from_pretrained(tmp_path / "new", dtype="auto")
    assert model.dtype == model.get_input_embeddings().weight.dtype == torch.bfloat16
