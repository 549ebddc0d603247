"""The converter: the same bytes as the loader, every dialect and layout, other tools' readers, memory."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moe_nvfp4 import cli
from moe_nvfp4.format import decode, dequantize, pack
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
from moe_nvfp4.quantize import jobs
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import COMPRESSED_TENSORS, DIALECTS, MODELOPT, read_config
from moe_nvfp4.quantize.files import INDEX, ShardWriter, open_checkpoint, read_header
from moe_nvfp4.quantize.layouts.stacked import STACKS
from moe_nvfp4.quantize.plan import config_of_new_files
from moe_nvfp4.quantize.recipes import RECIPES, quantize_matrix
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import ENVIRONMENT, config_of, converted, edit_config, experts, folder, same_files
from tests.folders import as_published, expert_by_hand
from tests.models import (
    FAMILIES,
    SMALL,
    aria,
    as_bytes,
    dbrx,
    gpt_oss,
    granite,
    mixtral,
    qwen3_moe,
    same_tensors,
    step3p7,
    tensors,
)
from tests.models import folder as saved

slow_inputs = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def loaded(source, **options):
    (name,) = config_of(source)["architectures"]
    quantizing = {"quantization_config": MoeNvfp4Config(**options)} if options else {}
    return getattr(transformers, name).from_pretrained(source, **quantizing)


def loaded_and_saved(source, destination, **options):
    loaded(source, **options).save_pretrained(destination)
    return destination


# ---------------------------------------------------------------- the same as loading
# More families whose files are stacked, each with its own layout.
LINEAR_ATTENTION = dict(
    **SMALL, moe_intermediate_size=48, shared_expert_intermediate_size=48, num_experts=4, num_experts_per_tok=2,
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip


def qwen3_next():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(Qwen3NextConfig(**LINEAR_ATTENTION, intermediate_size=96))


def qwen3_5_moe():
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**LINEAR_ATTENTION))


def privacy_filter():
    from transformers import OpenAIPrivacyFilterConfig, OpenAIPrivacyFilterForTokenClassification

    return OpenAIPrivacyFilterForTokenClassification(OpenAIPrivacyFilterConfig(
        **SMALL, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2))  # fmt: skip


def inkling2(**change):
    """Interleaved rows, without being transposed."""
    from transformers import Inkling2ForCausalLM, Inkling2TextConfig

    return Inkling2ForCausalLM(Inkling2TextConfig(
        **SMALL, unpadded_vocab_size=96, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16,
        sliding_window_size=8, rel_extent=16, moe_intermediate_size=48, n_routed_experts=4,
        num_experts_per_tok=2, **change))  # fmt: skip


def inkling():
    """The same layout in files of the whole model, with stacks of shared experts beside it."""
    from transformers import InklingConfig, InklingForConditionalGeneration

    text = dict(
        **SMALL, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16, sliding_window_size=8,
        rel_extent=16, moe_intermediate_size=48, intermediate_size=48, n_routed_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    vision = dict(text_hidden_size=64, patch_size=4, hidden_size=32, n_layers=1, num_attention_heads=2)
    audio = dict(text_hidden_size=64, n_mel_bins=8, mel_vocab_size=16)
    return InklingForConditionalGeneration(InklingConfig(text_config=text, vision_config=vision, audio_config=audio))


def hy_v4():
    """Attention's gate_proj has another name in its files, and so has every gate_proj but those of experts."""
    from transformers import HYV4Config, HYV4ForCausalLM

    return HYV4ForCausalLM(HYV4Config(
        **SMALL | {"num_key_value_heads": 4}, intermediate_size=48, moe_intermediate_size=48, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, index_topk=8, index_head_dim=16, index_n_heads=2,
        mlp_layer_types=["dense", "sparse"]))  # fmt: skip


MORE = [qwen3_next, qwen3_5_moe, aria, privacy_filter, inkling2, step3p7, inkling, hy_v4]


@pytest.fixture(scope="module")
def saved_families(tmp_path_factory):
    """family -> its bf16 folder, made once."""
    made = {}

    def folder(family):
        if family not in made:
            made[family] = saved(tmp_path_factory.mktemp("family"), family)
            as_published(made[family])
        return made[family]

    return folder


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE], ids=lambda f: f.__name__)
def test_equals_the_loader(family, saved_families, tmp_path):
    """All tensors, and config.json, have the bytes that quantizing while loading, then saving, gives."""
    try:
        source = saved_families(family)
    except (ImportError, TypeError) as error:
        pytest.skip(f"this transformers has no {family.__name__} with these settings: {error}")
    recipe = "mse" if family is gpt_oss else "max"
    try:
        theirs = loaded_and_saved(source, tmp_path / "theirs", recipe=recipe)
    except NotImplementedError as error:
        pytest.skip(f"this transformers has another form of {family.__name__}: {error}")
    ours = converted(source, tmp_path / "ours", recipe=recipe)
    # transformers keeps a few (router biases, sinks) in fp32 whatever the file says; a copy keeps the file's dtype
    widened = [n for n, t in tensors(theirs).items() if ".experts." not in n and t.dtype == torch.float32]
    same_tensors(theirs, ours, but=widened)
    assert all(torch.equal(tensors(theirs)[n], tensors(ours)[n].float()) for n in widened)
    a, b = config_of(theirs), config_of(ours)
    ignored, ours_ignored = (set(c["quantization_config"].pop("ignore")) for c in (a, b))
    # theirs has the names of transformers' modules, ours those of the files, which servers match;
    # and a module that is called `gate` or `router` but has no matrix needs no exception
    renamed = lambda n: n.replace(".block_sparse_moe.", ".mlp.").replace("backbone.", "model.").removesuffix(".layer")
    missing = {renamed(n) for n in ignored} - {renamed(n) for n in ours_ignored}
    assert not {n for n in missing if n.replace(".*.", ".1.") + ".weight" in tensors(ours)}
    for sub in ("attn", "ffn", "text", "vision", "audio"):  # loading writes the dtype there too
        a.get(f"{sub}_config", {}).pop("dtype", None), b.get(f"{sub}_config", {}).pop("dtype", None)
    assert a == b
    same_tensors(theirs, loaded_and_saved(ours, tmp_path / "again"), but=widened)
    if family is step3p7:  # the names that vLLM reads; earlier versions wrote others, which load, too
        files = tensors(ours)
        assert {n.split(".experts.")[0][-4:] for n in files if ".experts." in n} == {".moe"}
        earlier = {n.replace(".moe.experts.", ".mlp.experts."): t for n, t in files.items()}
        save_file(earlier, ours / "model.safetensors", metadata={"format": "pt"})
        same_tensors(theirs, loaded_and_saved(ours, tmp_path / "earlier"), but=widened)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, granite, gpt_oss, mixtral, dbrx, step3p7], ids=lambda f: f.__name__)
def test_exclusions_equal_the_loader(family, saved_families, tmp_path):
    source, exclude = saved_families(family), ["transformer.blocks.0.*" if family is dbrx else "model.*layers.0.*"]
    theirs = loaded_and_saved(source, tmp_path / "theirs", recipe="max", exclude=exclude)
    ours = converted(source, tmp_path / "ours", recipe="max", exclude=exclude)
    same_tensors(theirs, ours)
    same_tensors(theirs, loaded_and_saved(ours, tmp_path / "again"))
    only = converted(source, tmp_path / "only", recipe="max", include=["*.1.*"])
    same_tensors(ours, only)
    same_tensors(theirs, loaded_and_saved(only, tmp_path / "again-2"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("named", ["bfloat16", "float32", "float16", None])
def test_dtypes_are_cast_as_the_loader_casts(stored, named, tmp_path):
    source = saved(tmp_path, qwen3_moe, dtype=stored)
    edit_config(source, dtype=named)
    theirs = loaded_and_saved(source, tmp_path / "theirs", recipe="max")
    ours = converted(source, tmp_path / "ours", recipe="max")
    others = [n for n in tensors(ours) if ".experts." not in n]  # copied, not cast
    same_tensors(theirs, ours, but=others)
    assert all(as_bytes(tensors(ours)[n]) == as_bytes(tensors(source)[n]) for n in others)


def test_parts_of_a_config_do_not_say_the_old_format():
    old, new = {"quant_method": "fp8"}, {"quant_method": "modelopt"}
    source = {"quantization_config": old, "text_config": {"quantization_config": old, "num_experts": 2}}
    config = config_of_new_files(source, new, "bfloat16")
    assert config == {"text_config": {"num_experts": 2}, "dtype": "bfloat16", "quantization_config": new}


@pytest.mark.parametrize("transposed", [False, True])
def test_qwen3_vl_moe_in_both_orientations(transposed, tmp_path):
    """Also if one of the two tensors is square, so that only the other one tells the orientation."""
    swap = lambda t: t.transpose(1, 2).contiguous() if transposed else t
    name = "model.language_model.layers.0.mlp.experts"
    text = {"model_type": "qwen3_vl_moe_text", "hidden_size": 64, "num_experts": 2, "num_hidden_layers": 1}
    for I in (32, 48, 64):
        up, down = torch.randn(2, 2 * I, 64).bfloat16(), torch.randn(2, 64, I).bfloat16()
        source = folder(tmp_path / f"a{I}", {f"{name}.gate_up_proj": swap(up), f"{name}.down_proj": swap(down)},
                        {"model_type": "qwen3_vl_moe", "text_config": text})  # fmt: skip
        files = tensors(converted(source, tmp_path / f"b{I}"))
        for e in range(2):
            for part, (codes, _, scale) in expert_by_hand(up[e, :I], up[e, I:], down[e]).items():
                assert torch.equal(files[f"{name}.{e}.{part}.weight"], codes)
                assert files[f"{name}.{e}.{part}.weight_scale_2"] == scale
    edit_config(source, text_config={**text, "hidden_size": 32})
    with pytest.raises(ValueError, match=r"whether this is \[E, 2I, H\] or \[E, H, 2I\] cannot be told"):
        converted(source, tmp_path / "c")


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("kind", sorted(STACKS))
def test_every_stacked_family_by_hand(kind, tmp_path):
    """Every entry of the table of layouts, against tensors that are laid out here."""
    stack = STACKS[kind]
    if stack.transposed is None:
        pytest.skip("has a test of its own")
    up, down = torch.randn(3, 96, 64).bfloat16(), torch.randn(3, 64, 48).bfloat16()
    gate_up = up.unflatten(1, (2, 48)).transpose(1, 2).flatten(1, 2) if stack.interleaved else up
    swap = lambda t: t.transpose(1, 2).contiguous() if stack.transposed else t.contiguous()
    files = {f"model.layers.0.{stack.up}": swap(gate_up), f"model.layers.0.{stack.down}": swap(down)}
    if stack.gate:
        files |= {f"model.layers.0.{stack.up}": up[:, 48:].clone(), f"model.layers.0.{stack.gate}": up[:, :48].clone()}
    if stack.bias:
        files |= {
            f"model.layers.0.{n}_bias": t[..., 0].contiguous() for n, t in ((stack.up, gate_up), (stack.down, down))
        }
    found = tensors(converted(folder(tmp_path / "a", files, {"model_type": kind}), tmp_path / "b", recipe="max"))
    for e in range(3):
        dense = {"gate_proj": up[e, :48], "up_proj": up[e, 48:], "down_proj": down[e]}
        for part, (codes, _, scale) in expert_by_hand(*dense.values(), "max").items():
            name = f"model.layers.0.{stack.module}.{e}.{part}"
            assert torch.equal(found[f"{name}.weight"], codes) and found[f"{name}.weight_scale_2"] == scale
            assert not stack.bias or torch.equal(found[f"{name}.bias"], dense[part][:, 0])
    assert len(found) == 3 * 3 * (4 if stack.bias else 3)


@pytest.mark.slow
def test_the_table_agrees_with_transformers():
    """Each stacked family's experts class says itself whether it is transposed or interleaved."""
    models = Path(transformers.__file__).parent / "models"
    seen = set()
    for path in models.glob("*/modeling_*.py"):
        for flags in re.findall(r"^@use_experts_implementation(.*)\nclass \w+", path.read_text(), re.M):
            for kind in (path.parent.name, f"{path.parent.name}_text"):
                stack = STACKS.get(kind)
                if stack is not None and stack.transposed is not None:
                    assert stack.transposed == ("is_transposed=True" in flags), kind
                    # Inkling 2's files interleave, its module does not
                    assert stack.interleaved == ("is_concatenated=False" in flags or kind == "inkling2_text"), kind
                    assert stack.bias == ("has_bias=True" in flags), kind
                    seen.add(kind)
    assert len(seen) >= 8


# ---------------------------------------------------------------- checkpoints made by hand
PER_EXPERT_LAYOUTS = {
    "gate/up/down": (("gate_proj", "up_proj", "down_proj"), "mlp.experts"),
    "w1/w3/w2": (("w1", "w3", "w2"), "block_sparse_moe.experts"),
    "no gate": (("up_proj", "down_proj"), "mixer.experts"),
}


@pytest.mark.slow
@slow_inputs
@given(
    layout=st.sampled_from(sorted(PER_EXPERT_LAYOUTS)), E=st.integers(1, 12), I=st.integers(1, 70), H=st.integers(1, 5),
    shards=st.integers(1, 4), recipe=st.sampled_from(RECIPES), first=st.sampled_from(sorted(DIALECTS)),
    special=st.sampled_from(["normal", "zeros", "-0.0", "denormal", "huge"]), inputs=st.booleans(),
)  # fmt: skip
def test_dialects_carry_the_same_bytes(layout, E, I, H, shards, recipe, first, special, inputs, tmp_path_factory):
    """bf16 -> one dialect -> the other -> back: codes and block scales are the same bytes, scales are equal."""
    values = {"normal": 1.0, "zeros": 0.0, "-0.0": -0.0, "denormal": 1e-39, "huge": 1e38}[special]
    make_matrix = lambda *shape: (torch.randn(shape).clamp(-3, 3).abs() * values).bfloat16()
    tmp_path = tmp_path_factory.mktemp("any")
    parts, stem = PER_EXPERT_LAYOUTS[layout]
    source = folder(tmp_path / "a", experts(E, I, 16 * H, parts=parts, stem=stem, make=make_matrix), shards=shards)
    other = next(d for d in DIALECTS if d != first)
    one = converted(source, tmp_path / "one", recipe=recipe, dialect=first)
    if inputs:
        add_input_scales(one, DIALECTS[first])
    two = converted(one, tmp_path / "two", dialect=other)
    three = converted(two, tmp_path / "three", dialect=first)
    a, b, c = (tensors(p) for p in (one, two, three))
    assert a.keys() == c.keys() and len(a) == len(b)
    old, new = DIALECTS[first], DIALECTS[other]
    for name in (n.removesuffix(f".{old.global_scale}") for n in a if n.endswith(old.global_scale)):
        for suffix, renamed in list(zip(old.suffixes, new.suffixes, strict=True))[:2]:
            assert (
                as_bytes(a[f"{name}.{suffix}"]) == as_bytes(b[f"{name}.{renamed}"]) == as_bytes(c[f"{name}.{suffix}"])
            )
        scale, again = (old.decode_scale(f[f"{name}.{old.global_scale}"]).item() for f in (a, c))
        there = new.decode_scale(b[f"{name}.{new.global_scale}"]).item()
        assert scale == pytest.approx(there, rel=2e-7) and scale == pytest.approx(again, rel=2e-7)
    for path, dialect in ((one, old), (two, new), (three, old)):
        info = read_config(config_of(path))
        assert info.dialect is dialect and (info.activations == "nvfp4") == inputs
        assert info.ignores("lm_head") and info.ignores("model.layers.0.self_attn.q_proj")
        assert not info.ignores(f"model.layers.0.{stem}.0.{parts[-1]}")
        verify_checkpoint(path, None if path is three else source)


def add_input_scales(path, dialect):
    """Add the input scales that a calibrated W4A4 checkpoint has."""
    for file in path.glob("*.safetensors"):
        files = {n: t for n, t in tensors(path).items() if n in read_header(file)[0]}
        for name in [n for n in files if n.endswith(dialect.global_scale)]:
            stem = name.removesuffix(dialect.global_scale)
            files[stem + dialect.input_scale] = dialect.encode_scale(torch.tensor(0.00173))
        if (path / INDEX).is_file():
            index = json.loads((path / INDEX).read_text())
            index["weight_map"].update({n: file.name for n in files})
            (path / INDEX).write_text(json.dumps(index))
        save_file(files, file, metadata={"format": "pt"})
    q = config_of(path)["quantization_config"]
    if dialect is MODELOPT:
        q["quant_algo"] = "NVFP4"
        q["moe_nvfp4"]["activations"] = "nvfp4"
    q["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4}
    edit_config(path, quantization_config=q)


def test_special_values(tmp_path):
    """-0.0 gets code 0, a zero block gets scale 0, denormals do not become NaN: the same as in quantize_matrix."""
    w = torch.zeros(16, 64)
    w[0], w[1, :16], w[2, 0], w[3] = -0.0, 1e-39, 3.0, torch.randn(64)
    files = experts(E=1, I=16, make=lambda *shape: w.reshape(shape).clone())
    source = folder(tmp_path / "a", files, {"dtype": "float32"})
    found = tensors(converted(source, tmp_path / "b"))
    codes, sf, scale = quantize_matrix(w)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert as_bytes(found[name]) == as_bytes(codes) and as_bytes(found[f"{name}_scale"]) == as_bytes(sf)
    assert found[f"{name}_scale_2"] == scale and (found[name][0] == 0).all()


@pytest.mark.slow
def test_matrices_larger_than_a_piece(tmp_path, monkeypatch):
    """Pieces of a matrix give the bytes of the whole, for every kind of source."""
    for i, family in enumerate((qwen3_moe, gpt_oss, dbrx)):
        source = saved(tmp_path, family, f"{i}")
        whole = converted(source, tmp_path / f"{i}-whole")
        with monkeypatch.context() as patch:
            patch.setattr(jobs, "CHUNK", 64 * 7)
            patch.setattr(jobs, "COPY", 100)
            same_files(whole, converted(source, tmp_path / f"{i}-pieces", workers=3))


def quantized_together(monkeypatch):
    """Batch matrices as on a GPU; records how many matrices each call takes."""
    found, quantize = [], jobs.quantize_matrix
    monkeypatch.setitem(jobs.TOGETHER, "cpu", 4 * 48 * 64)

    def counts(w, *args):
        found.append(len(w) if w.dim() == 3 else 1)
        return quantize(w, *args)

    monkeypatch.setattr(jobs, "quantize_matrix", counts)
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss, dbrx])
def test_several_matrices_in_a_job(family, recipe, tmp_path, monkeypatch):
    """A batch of matrices gives the bytes of one at a time; the last of a shard may be smaller."""
    source = saved(tmp_path, family)
    whole = converted(source, tmp_path / "one", recipe=recipe)
    found = quantized_together(monkeypatch)
    same_files(whole, converted(source, tmp_path / "batch", recipe=recipe))
    assert max(found) > 1


def test_several_matrices_in_a_job_of_odd_sources(tmp_path, monkeypatch):
    """FP8, MXFP4 (with its own global scales), padded columns, zeros and NaN."""
    files = experts(E=5, I=40, H=72)
    block, quantized = 32, {n: w for n, w in files.items() if ".experts." not in n}
    for i, name in enumerate(n for n in files if ".experts." in n):
        quantized[name], quantized[f"{name}_scale_inv"], _ = fp8(files[name] * 10.0 ** (i % 4), block)
        files[name] *= 10.0 ** (i % 4) if i != 4 else 0
    E, I, H, stem = 3, 32, 64, "model.layers.0.mlp.experts"
    codes = {f"{stem}.{part}": (torch.randint(256, (E, N, K // 32, 16), dtype=torch.uint8),
                                torch.randint(110, 124, (E, N, K // 32), dtype=torch.uint8))
             for part, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I))}  # fmt: skip
    packed = {f"{n}_{kind}": t for n, pair in codes.items() for kind, t in zip(("blocks", "scales"), pair, strict=True)}
    packed |= {f"{stem}.gate_up_proj_bias": torch.randn(E, 2 * I), f"{stem}.down_proj_bias": torch.randn(E, H)}
    sources = [
        folder(tmp_path / "dense", files),
        folder(tmp_path / "unnamed", files, {"dtype": None}),
        folder(tmp_path / "fp8", quantized, {"quantization_config": {"quant_method": "fp8",
                                                                     "weight_block_size": [block, block]}}),
        folder(tmp_path / "mxfp4", packed, {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}),
    ]  # fmt: skip
    wholes = [converted(source, source.with_suffix(".one")) for source in sources]
    found = quantized_together(monkeypatch)
    for source, whole in zip(sources, wholes, strict=True):
        found.clear()
        same_files(whole, converted(source, source.with_suffix(".batch")))
        if source.name == "mxfp4":
            assert not found, "becomes NVFP4 by table"
        else:
            assert max(found) > 1 and sum(found) == 15
    files["model.layers.0.mlp.experts.3.up_proj.weight"][3, 5] = float("nan")
    with pytest.raises(ValueError, match=r"^model.layers.0.mlp.experts.3.up_proj: 1 of 3200 weights are NaN or Inf"):
        converted(folder(tmp_path / "nan", files), tmp_path / "x")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_writes_the_same_bytes(recipe, split, tmp_path):
    same_files(converted(split[0], tmp_path / "cpu", recipe=recipe, device="cpu"),
               converted(split[0], tmp_path / "cuda", recipe=recipe, device="cuda"))  # fmt: skip


def test_layers_of_a_model_beside_a_tower(tmp_path):
    """As transformers saves Nemotron 3 Nano Omni, whose config has a list in place of num_hidden_layers: those beyond
    the tower's were taken for multi-token prediction, and stayed dense."""
    text = {"n_routed_experts": 4, "layers_block_type": ["moe", "attention", "moe"]}
    config = {"text_config": text, "vision_config": {"num_hidden_layers": 2}, "num_hidden_layers": None}
    files = {f"language_model.{name}": tensor for name, tensor in experts(layers=3).items()}
    report = convert_checkpoint(folder(tmp_path / "a", files, config), tmp_path / "b", progress=False)
    assert report.quantized == 3 * 4 * 3 and not report.skipped


# ---------------------------------------------------------------- FP8 and MXFP4
def fp8(dense, block, dtype=torch.float32):
    """e4m3 codes with one scale of a given dtype for each block, computed in the plainest way."""
    N, K = dense.shape
    scale = torch.zeros(-(-N // block), -(-K // block))
    codes = torch.zeros(N, K)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale[i, j] = (dense[part].abs().max() / 300).to(dtype).float()
            codes[part] = dense[part] / scale[i, j]
    codes = codes.to(torch.float8_e4m3fn)
    return codes, scale.to(dtype), codes.float() * scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:N, :K]


def test_fp8_blocks(tmp_path):
    block, files, dense = 32, {}, {}
    for i, (name, tensor) in enumerate(experts(E=3, I=48, H=80, layers=2).items()):
        if "embed" in name or "lm_head" in name:
            files[name] = tensor
        else:
            dtype = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)[i % 3]
            files[name], files[f"{name}_scale_inv"], dense[name] = fp8(tensor.float(), block, dtype)
    q = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    config = {"quantization_config": q, "num_hidden_layers": 1, "n_routed_experts": 3}
    source = folder(tmp_path / "a", files, config, shards=3)
    report = convert_checkpoint(source, tmp_path / "b", progress=False)
    assert report.quantized == 9 and report.dequantized == 2 + 9
    assert "multi-token prediction" in report.skipped["model.layers.1.mlp.experts"]
    found = tensors(tmp_path / "b")
    for e in range(3):  # what a dense checkpoint would hold
        stem = f"model.layers.0.mlp.experts.{e}"
        parts = (dense[f"{stem}.{part}.weight"].bfloat16() for part in ("gate_proj", "up_proj", "down_proj"))
        for part, (codes, sf, _) in expert_by_hand(*parts).items():
            name = f"{stem}.{part}.weight"
            assert as_bytes(found[name]) == as_bytes(codes) and as_bytes(found[f"{name}_scale"]) == as_bytes(sf)
    for name, tensor in dense.items():
        if "layers.0.mlp" not in name:
            assert torch.equal(found[name], tensor.bfloat16()), "not experts: dense, in the config's dtype"
    assert not any(n.endswith("_inv") for n in found)
    ignore = config_of(tmp_path / "b")["quantization_config"]["ignore"]
    assert "model.layers.0.self_attn.q_proj" in ignore and "model.layers.1.mlp.experts*" in ignore
    verify_checkpoint(tmp_path / "b", source)
    edit_config(source, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="FP8 without blocks"):
        converted(source, tmp_path / "c")


def test_fp8_forms_of_transformers(tmp_path):
    """Scales of another name, or as the bytes of e8m0; an embedding with one scale."""
    files, block, embedding = {}, 32, "model.embed_tokens.weight"
    for name, tensor in experts(E=3, I=48, H=80).items():
        if tensor.dim() == 2 and name != embedding:
            files[name], files[f"{name}_scale_inv"], _ = fp8(tensor.float(), block, torch.float8_e8m0fnu)
        else:
            files[name] = tensor
    files[embedding] = files[embedding].to(torch.float8_e4m3fn).bfloat16() * 0.5
    q = {"quant_method": "fp8", "weight_block_size": [block, block], "scale_fmt": "ue8m0"}
    want = tensors(converted(folder(tmp_path / "plain", files, {"quantization_config": q}), tmp_path / "want"))
    table = {embedding: (files[embedding] * 2).to(torch.float8_e4m3fn), f"{embedding}_scale": torch.tensor([0.5])}
    as_bytes = lambda t: t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t
    static = {name.replace("weight_scale_inv", "activation_scale"): torch.tensor(0.1) for name in files}
    q["activation_scheme"] = "static"
    forms = {
        "name": {name.replace("weight_scale_inv", "qscale_weight"): t for name, t in files.items()},
        "bytes": {name: as_bytes(t) for name, t in files.items()},
        "embedding": files | table,
        "static": static | files,
    }
    for form, changed in forms.items():
        source = folder(tmp_path / form, changed, {"quantization_config": q})
        found = tensors(converted(source, tmp_path / f"{form} made"))
        assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want), form
    edit_config(tmp_path / "bytes", quantization_config=q | {"scale_fmt": "float"})
    with pytest.raises(ValueError, match=r"weight_scale_inv U8, by scale_fmt 'float' .*Quantize the original"):
        converted(tmp_path / "bytes", tmp_path / "float")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_mxfp4(recipe, tmp_path):
    """gpt-oss, whose rows of gate and up alternate: a searching recipe reproduces every value exactly."""
    E, I, H = 3, 32, 64
    stem = "model.layers.0.mlp.experts"
    files, dense = {"lm_head.weight": torch.randn(32, H).bfloat16()}, {}
    for name, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        blocks = pack(torch.randint(0, 16, (E, N, K // 32, 32), dtype=torch.uint8))
        scales = torch.randint(112, 126, (E, N, K // 32), dtype=torch.uint8)
        files |= {f"{stem}.{name}_blocks": blocks, f"{stem}.{name}_scales": scales,
                  f"{stem}.{name}_bias": torch.randn(E, N).bfloat16()}  # fmt: skip
        dense[name] = (decode(blocks) * torch.exp2(scales.float() - 127)[..., None]).reshape(E, N, K)
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    source = folder(tmp_path / "a", files, config, shards=2)
    found = tensors(converted(source, tmp_path / "b", recipe=recipe))
    for e in range(E):
        for part, w in (("gate_proj", dense["gate_up_proj"][e, 0::2]), ("up_proj", dense["gate_up_proj"][e, 1::2]),
                        ("down_proj", dense["down_proj"][e])):  # fmt: skip
            key = f"{stem}.{e}.{part}.weight"
            back = dequantize(found[key], found[f"{key}_scale"], found[f"{key}_scale_2"])
            if recipe == "max":
                assert as_bytes(found[key]) == as_bytes(quantize_matrix(w, "max")[0])
            else:
                assert torch.equal(back, w), "the cast loses nothing"
        assert torch.equal(found[f"{stem}.{e}.up_proj.bias"], files[f"{stem}.gate_up_proj_bias"][e, 1::2])
        assert torch.equal(found[f"{stem}.{e}.down_proj.bias"], files[f"{stem}.down_proj_bias"][e])
    report = verify_checkpoint(tmp_path / "b", source)
    assert (report.layers[stem].relative == 0) == (recipe != "max")
    # excluded experts become dense as gpt-oss keeps them, [E, in, out], in the config's dtype
    config |= {"num_hidden_layers": 2, "dtype": "float32" if recipe == "max" else "bfloat16"}
    other = {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in files.items()}
    two = folder(tmp_path / "two", files | other, config)
    kept = tensors(converted(two, tmp_path / "c", recipe=recipe, exclude=["model.layers.0.*"]))
    for name, w in dense.items():
        assert torch.equal(kept[f"{stem}.{name}"].float(), w.transpose(1, 2)) and f"{stem}.{name}_bias" in kept
        assert kept[f"{stem}.{name}"].dtype == getattr(torch, config["dtype"])
    same = {n: t for n, t in found.items() if n.startswith(stem)}
    assert all(as_bytes(kept[n.replace("layers.0", "layers.1")]) == as_bytes(t) for n, t in same.items())
    assert [*verify_checkpoint(tmp_path / "c", two).layers] == [stem.replace("layers.0", "layers.1")]
    kept[f"{stem}.down_proj"][1, 3, 5] += 1
    save_file(kept, tmp_path / "c" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{stem}.down_proj is not what it is in .* made dense exactly"):
        verify_checkpoint(tmp_path / "c", two)


# ---------------------------------------------------------------- other people's readers
def exact_matrix(*shape):
    """A matrix whose global scale is a power of two, so that products do not round in any order."""
    w = (torch.randn(shape) * 0.3).clamp(-1.5, 1.5)
    w[0, 0] = 1.5  # 6 * 256 * 2^-10
    return w.bfloat16()


@pytest.mark.parametrize("make", [exact_matrix, None], ids=["exact", "any"])
def test_compressed_tensors_decompresses_to_our_weights(make, tmp_path):
    if importlib.util.find_spec("compressed_tensors") is None:
        pytest.skip("the compressed-tensors library is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    source = folder(tmp_path / "a", experts(make=make))
    found = tensors(converted(source, tmp_path / "b", dialect="compressed-tensors"))
    config = dict(config_of(tmp_path / "b")["quantization_config"])
    config.pop("moe_nvfp4")
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    for stem in [n.removesuffix(".weight_packed") for n in found if n.endswith("weight_packed")]:
        state = {s: found[f"{stem}.{s}"] for s in COMPRESSED_TENSORS.suffixes[:3]}
        scale = COMPRESSED_TENSORS.decode_scale(state["weight_global_scale"])
        ours = dequantize(state["weight_packed"], state["weight_scale"], scale)
        theirs = compressor.decompress(state, scheme)["weight"]
        if make is not None:
            assert torch.equal(theirs, ours.to(theirs.dtype)), stem
        # it divides the block scale first, and answers in bf16
        assert torch.allclose(theirs.float(), ours, rtol=2**-8, atol=0), stem


@pytest.mark.slow
@pytest.mark.parametrize("make", [exact_matrix, None], ids=["exact", "any"])
def test_modelopt_dequantizes_to_our_weights(make, tmp_path):
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed")
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    found = tensors(converted(folder(tmp_path / "a", experts(make=make)), tmp_path / "b"))
    for stem in [n.removesuffix(".weight_scale_2") for n in found if n.endswith("weight_scale_2")]:
        codes, sf, scale = (found[f"{stem}.{s}"] for s in MODELOPT.suffixes[:3])
        theirs = NVFP4QTensor(torch.Size((codes.shape[0], codes.shape[1] * 2)), torch.float32, codes)
        theirs = theirs.dequantize(dtype=torch.float32, scale=sf, double_scale=scale, block_sizes={-1: 16})
        ours = dequantize(codes, sf, scale)
        assert torch.equal(theirs, ours) if make is not None else torch.allclose(theirs, ours, rtol=3e-7, atol=0), stem


# ---------------------------------------------------------------- memory
MEMORY = """
import resource, sys
from moe_nvfp4.quantize import convert
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert.convert_checkpoint(sys.argv[1], sys.argv[2], convert.Options("max"), progress=False)
print(base, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak in KiB")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """A file of 400 MB, with an embedding of 100 MB and a stack of 200 MB in it: 150 MB of memory at most."""
    source = tmp_path / "a"
    source.mkdir()
    outputs = {"model.embed_tokens.weight": ("BF16", (50_000, 1000))}
    name = "model.layers.0.feed_forward.experts"
    outputs |= {f"{name}.gate_up_proj": ("BF16", (25, 1000, 4000)), f"{name}.down_proj": ("BF16", (25, 2000, 1000))}
    writer = ShardWriter(source / "model.safetensors", outputs)  # zeros: a sparse file
    assert writer.size == pytest.approx(400e6, rel=1e-3)
    (source / "config.json").write_text(json.dumps({"model_type": "llama4_text", "dtype": "bfloat16"}))
    process = subprocess.run([sys.executable, "-c", MEMORY, source, tmp_path / "b"], env=ENVIRONMENT,
                             capture_output=True, text=True)  # fmt: skip
    assert process.returncode == 0, process.stderr
    base, peak = map(int, process.stdout.split())
    assert peak - base < 150_000, f"{(peak - base) / 1000:.0f} MB above the {base / 1000:.0f} MB of the imports"


def test_dry_run_writes_nothing_and_is_right(split, tmp_path, capsys):
    source, whole = split
    assert cli.main(["quantize", str(source), str(tmp_path / "x"), "--dry-run", "--exclude", "model.layers.0.*"]) == 0
    said = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert f"{3 * 16 * 3} expert matrices quantized (mse)" in said.replace("     ", "")
    assert "left alone: model.layers.0.mlp.experts: excluded" in said
    report = convert_checkpoint(source, tmp_path / "x", dry_run=True)
    written = sum(s.size for s in open_checkpoint(whole).tensors.values())
    assert report.bytes_after == written
