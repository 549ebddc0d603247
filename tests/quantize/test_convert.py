"""The converter: equal to the loader, any dialect, interrupted anywhere, sources that lie."""

import errno
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from moe_nvfp4 import cli
from moe_nvfp4.format import decode, dequantize, pack
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
from moe_nvfp4.quantize import jobs
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import COMPRESSED_TENSORS, DIALECTS, MODELOPT, read_config
from moe_nvfp4.quantize.files import INDEX, ShardWriter, open_checkpoint, read_header
from moe_nvfp4.quantize.layouts.stacked import STACKS
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import RECIPES, quantize_matrix
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.folders import expert_by_hand
from tests.models import (
    FAMILIES,
    SMALL,
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

ROOT = Path(__file__).parents[2]
slow_inputs = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def converted(source, destination, workers=None, dry_run=False, **options):
    convert_checkpoint(source, destination, Options(**options), workers, dry_run, progress=False)
    return destination


def loaded(source, **options):
    (name,) = config_of(source)["architectures"]
    quantizing = {"quantization_config": MoeNvfp4Config(**options)} if options else {}
    return getattr(transformers, name).from_pretrained(source, **quantizing)


def loaded_and_saved(source, destination, **options):
    loaded(source, **options).save_pretrained(destination)
    return destination


def config_of(path):
    return json.loads((path / "config.json").read_text())


def edit_config(path, **changes):
    (path / "config.json").write_text(json.dumps({**config_of(path), **changes}))


def same_files(a, b):
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    for path in a.iterdir():
        assert path.read_bytes() == (b / path.name).read_bytes(), path.name


# ---------------------------------------------------------------- the same as loading
# More families whose files are stacked, each with its own layout.
def qwen3_next():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(Qwen3NextConfig(
        **SMALL, intermediate_size=96, moe_intermediate_size=48, shared_expert_intermediate_size=48, num_experts=4,
        num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16))  # fmt: skip


def qwen3_5_moe():
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(
        **SMALL, moe_intermediate_size=48, shared_expert_intermediate_size=48, num_experts=4,
        num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16))  # fmt: skip


def aria():
    from transformers import AriaTextConfig, AriaTextForCausalLM

    return AriaTextForCausalLM(AriaTextConfig(
        **SMALL, intermediate_size=48, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1))  # fmt: skip


def privacy_filter():
    from transformers import OpenAIPrivacyFilterConfig, OpenAIPrivacyFilterForTokenClassification

    return OpenAIPrivacyFilterForTokenClassification(OpenAIPrivacyFilterConfig(
        **SMALL, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2))  # fmt: skip


def inkling2():
    """Interleaved rows, without being transposed."""
    from transformers import Inkling2ForCausalLM, Inkling2TextConfig

    return Inkling2ForCausalLM(Inkling2TextConfig(
        **SMALL, unpadded_vocab_size=96, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16,
        sliding_window_size=8, rel_extent=16, moe_intermediate_size=48, n_routed_experts=4,
        num_experts_per_tok=2))  # fmt: skip


MORE = [qwen3_next, qwen3_5_moe, aria, privacy_filter, inkling2, step3p7]


@pytest.fixture(scope="module")
def saved_families(tmp_path_factory):
    """family -> its bf16 folder, made once."""
    made = {}

    def folder(family):
        if family not in made:
            made[family] = saved(tmp_path_factory.mktemp("family"), family)
        return made[family]

    return folder


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE], ids=lambda f: f.__name__)
def test_equals_the_loader(family, saved_families, tmp_path):
    """Every file tensor has the bytes that loading with quantization and saving gives; so has config.json."""
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
    for sub in ("attn_config", "ffn_config", "text_config", "vision_config"):  # loading writes the dtype there too
        a.get(sub, {}).pop("dtype", None), b.get(sub, {}).pop("dtype", None)
    assert a == b
    same_tensors(theirs, loaded_and_saved(ours, tmp_path / "again"), but=widened)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, granite, gpt_oss, mixtral, dbrx], ids=lambda f: f.__name__)
def test_exclusions_equal_the_loader(family, saved_families, tmp_path):
    source, exclude = saved_families(family), ["transformer.blocks.0.*" if family is dbrx else "model.layers.0.*"]
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


@pytest.mark.parametrize("transposed", [False, True])
def test_qwen3_vl_moe_in_both_orientations(transposed, tmp_path):
    up, down = torch.randn(4, 96, 64).bfloat16(), torch.randn(4, 64, 48).bfloat16()
    swap = lambda t: t.transpose(1, 2).contiguous() if transposed else t
    name = "model.language_model.layers.0.mlp.experts"
    text = {"model_type": "qwen3_vl_moe_text", "hidden_size": 64, "num_experts": 4, "num_hidden_layers": 1}
    source = folder(tmp_path / "a", {f"{name}.gate_up_proj": swap(up), f"{name}.down_proj": swap(down)},
                    {"model_type": "qwen3_vl_moe", "text_config": text})  # fmt: skip
    files = tensors(converted(source, tmp_path / "b"))
    for e in range(4):
        for part, (codes, _, scale) in expert_by_hand(up[e, :48], up[e, 48:], down[e]).items():
            assert torch.equal(files[f"{name}.{e}.{part}.weight"], codes)
            assert files[f"{name}.{e}.{part}.weight_scale_2"] == scale
    edit_config(source, text_config={**text, "hidden_size": 32})
    with pytest.raises(ValueError, match=r"whether this is \[E, 2I, H\] or \[E, H, 2I\] cannot be told"):
        converted(source, tmp_path / "c")


@pytest.mark.parametrize("kind", sorted(STACKS))
def test_every_stacked_family_by_hand(kind, tmp_path):
    """The table of layouts, entry by entry, against tensors laid out here."""
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
def folder(path, files, config=None, shards=1):
    """A checkpoint of tensors, dealt out to shards in turn."""
    path.mkdir(parents=True)
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["MadeByHand"],  # without most of a model's tensors
        "dtype": "bfloat16",
        **(config or {}),
    }
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(files, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(files)}
    for name in set(names.values()):
        save_file({n: t for n, t in files.items() if names[n] == name}, path / name, metadata={"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


def experts(E=4, I=48, H=64, layers=1, parts=("gate_proj", "up_proj", "down_proj"), make=None, stem="mlp.experts"):
    make = make or (lambda *shape: torch.randn(shape).bfloat16())
    found = {
        "model.embed_tokens.weight": torch.randn(32, H).bfloat16(),
        "lm_head.weight": torch.randn(32, H).bfloat16(),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.self_attn.q_proj.weight"] = torch.randn(H, H).bfloat16()
        for e in range(E):
            for part in parts:
                shape = (H, I) if part in ("down_proj", "w2") else (I, H)
                found[f"{prefix}.{stem}.{e}.{part}.weight"] = make(*shape)
    return found


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
    """What a calibrated W4A4 checkpoint has besides."""
    for file in path.glob("*.safetensors"):
        files = {n: t for n, t in tensors(path).items() if n in read_header(file)}
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
    """-0.0 has code 0, a zero block scale 0, denormals do not become NaN: as quantize_matrix says."""
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
    """As on a GPU: how many matrices the calls take."""
    found, quantize = [], jobs.quantize_matrix
    monkeypatch.setitem(jobs.TOGETHER, "cpu", 4 * 48 * 64)

    def counts(w, *args):
        found.append(len(w) if w.dim() == 3 else 1)
        return quantize(w, *args)

    monkeypatch.setattr(jobs, "quantize_matrix", counts)
    return found


@pytest.mark.slow_after(3)
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
    """FP8 and MXFP4 (which brings its global scales), columns that are padded, zeros, NaN."""
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
        assert max(found) > 1 and sum(found) == (9 if source.name == "mxfp4" else 15)
    files["model.layers.0.mlp.experts.3.up_proj.weight"][3, 5] = float("nan")
    with pytest.raises(ValueError, match=r"^model.layers.0.mlp.experts.3.up_proj: 1 of 3200 weights are NaN or Inf"):
        converted(folder(tmp_path / "nan", files), tmp_path / "x")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_writes_the_same_bytes(recipe, split, tmp_path):
    same_files(converted(split[0], tmp_path / "cpu", recipe=recipe, device="cpu"),
               converted(split[0], tmp_path / "cuda", recipe=recipe, device="cuda"))  # fmt: skip


# ---------------------------------------------------------------- FP8 and MXFP4
def fp8(dense, block):
    """e4m3 codes with one scale for each block, made in the plain way."""
    N, K = dense.shape
    scale = torch.zeros(-(-N // block), -(-K // block))
    codes = torch.zeros(N, K)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale[i, j] = dense[part].abs().max() / 448
            codes[part] = dense[part] / scale[i, j]
    codes = codes.to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:N, :K]


def test_fp8_blocks(tmp_path):
    block, files, dense = 32, {}, {}
    for name, tensor in experts(E=3, I=48, H=80, layers=2).items():
        if "embed" in name or "lm_head" in name:
            files[name] = tensor
        else:
            files[name], files[f"{name}_scale_inv"], dense[name] = fp8(tensor.float(), block)
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
    assert "model.layers.*.self_attn.q_proj" in ignore and "model.layers.1.mlp.experts*" in ignore
    verify_checkpoint(tmp_path / "b", source)
    edit_config(source, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="FP8 without blocks"):
        converted(source, tmp_path / "c")


@pytest.mark.parametrize("recipe", RECIPES)
def test_mxfp4(recipe, tmp_path):
    """gpt-oss: rows of gate and up alternate. A searching recipe finds every value again, exactly."""
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
    # excluded experts become dense as gpt-oss keeps them, [E, in, out]
    config["num_hidden_layers"] = 2
    other = {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in files.items()}
    two = folder(tmp_path / "two", files | other, config)
    kept = tensors(converted(two, tmp_path / "c", recipe=recipe, exclude=["model.layers.0.*"]))
    for name, w in dense.items():
        assert torch.equal(kept[f"{stem}.{name}"].float(), w.transpose(1, 2)) and f"{stem}.{name}_bias" in kept
    same = {n: t for n, t in found.items() if n.startswith(stem)}
    assert all(as_bytes(kept[n.replace("layers.0", "layers.1")]) == as_bytes(t) for n, t in same.items())


# ---------------------------------------------------------------- other people's readers
def exact_matrix(*shape):
    """A matrix whose global scale is a power of two: then no order of multiplying rounds."""
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


# ---------------------------------------------------------------- interrupted
@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """A checkpoint in eight shards, and its conversion in one go."""
    path = tmp_path_factory.mktemp("split")
    source = folder(path / "a", experts(E=16, I=128, H=256, layers=4), shards=8)
    (source / "tokenizer.json").write_text("{}")
    return source, converted(source, path / "b")


def command(source, destination, *options):
    return [sys.executable, "-m", "moe_nvfp4", "quantize", str(source), str(destination), *options]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
SLOWED = """
import sys, time
from moe_nvfp4.quantize import convert, jobs
whole = jobs.quantize_matrix
def slow(*args):
    time.sleep(0.003)
    return whole(*args)
jobs.quantize_matrix = slow
convert.convert_checkpoint(sys.argv[1], sys.argv[2], convert.Options(device="cpu"), progress=False)
"""


@pytest.fixture(scope="module")
def single(split):
    """The same tensors in one file, and its conversion in one go."""
    path = split[0].parent
    source = folder(path / "single", tensors(split[0]))
    return source, converted(source, path / "single-b")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
@pytest.mark.parametrize("files", ["split", "single"])
def test_killed_at_random_points_it_goes_on(files, request, tmp_path):
    """Anywhere, also within a file: what the journal has is not done again. On a CPU: a GPU is done in a few jobs."""
    source, whole = request.getfixturevalue(files)
    rng, journal = random.Random(7), tmp_path / ".x.partial/journal.jsonl"
    digests = lambda: len(re.findall(rb'"[0-9a-f]{64}"', journal.read_bytes())) if journal.exists() else 0
    before = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SLOWED, source, tmp_path / "x"], env=ENVIRONMENT)
        wanted = before + rng.randint(30, 120)  # of 582
        while process.poll() is None and digests() < wanted:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
        assert not (tmp_path / "x").exists() and digests() >= wanted
        before = digests()
    report = convert_checkpoint(source, tmp_path / "x", Options(device="cpu"), progress=False)
    assert 90 / 582 * report.bytes_before < report.resumed < report.bytes_before
    same_files(whole, tmp_path / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def interrupted(monkeypatch, source, destination, after, error, **options):
    """Convert until `after` pieces were written, then fail; the error that came out."""
    write, count = ShardWriter.write, iter(range(10**9))

    def fails(self, *args):
        if next(count) >= after:
            raise error
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", fails)
        with pytest.raises(type(error)) as raised:
            converted(source, destination, **options)
    return raised.value


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 40, 200, 420])
def test_a_full_disk_loses_nothing(after, split, tmp_path, monkeypatch):
    source, whole = split
    interrupted(monkeypatch, source, tmp_path / "x", after, OSError(errno.ENOSPC, "No space left on device"))
    assert not (tmp_path / "x").exists()
    if after == 0:
        assert list(tmp_path.iterdir()) == [], "nothing was finished, so nothing stays"
    report = convert_checkpoint(source, tmp_path / "x", progress=False)
    assert (report.resumed > 0) == (after > 0)
    same_files(whole, tmp_path / "x")


def test_too_little_space_is_said_before_anything_is_written(split, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(ValueError, match="1.0 KB free, about .* MB are needed"):
        converted(split[0], tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_other_settings_or_another_source_start_again(split, tmp_path, monkeypatch, capsys):
    source, whole = split
    copy = shutil.copytree(source, tmp_path / "a")
    stop = OSError(errno.ENOSPC, "No space left on device")
    interrupted(monkeypatch, copy, tmp_path / "x", 300, stop, recipe="max")
    report = convert_checkpoint(copy, tmp_path / "x")
    assert "starting again: the settings changed" in capsys.readouterr().err and report.resumed == 0
    same_files(whole, tmp_path / "x")
    interrupted(monkeypatch, copy, tmp_path / "y", 300, stop)
    os.utime(next(copy.glob("model-00003*")), (1, 1))
    report = convert_checkpoint(copy, tmp_path / "y")
    assert "starting again: the source changed" in capsys.readouterr().err and report.resumed == 0


@pytest.mark.slow
def test_what_was_damaged_meanwhile_is_made_again(single, tmp_path, monkeypatch):
    """And only that: every tensor of an earlier run is looked at. So is a journal that ends in the middle of a line.

    On a CPU, whose jobs are single matrices: a GPU takes many together.
    """
    source, whole = single
    stop = OSError(errno.ENOSPC, "No space left on device")
    interrupted(monkeypatch, source, tmp_path / "z", 400, stop, device="cpu")
    journal, path = tmp_path / ".z.partial/journal.jsonl", tmp_path / ".z.partial/files/model.safetensors"
    lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    stored = open_checkpoint(source).tensors
    codes = next(name for line in lines[:-1] for name in line if name.endswith("down_proj.weight"))
    header, data = read_header(path), bytearray(path.read_bytes())
    data[len(data) - max(i["data_offsets"][1] for i in header.values()) + header[codes]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    journal.write_text(journal.read_text()[:-20])
    report = convert_checkpoint(source, tmp_path / "z", Options(device="cpu"), progress=False)
    kept = sum(stored[name].size for line in lines[:-1] for name in line if name in stored)
    assert report.resumed == kept - stored[codes].size > 0
    same_files(whole, tmp_path / "z")
    interrupted(monkeypatch, source, tmp_path / "y", 400, stop, device="cpu")
    (tmp_path / ".y.partial/journal.jsonl").write_text("{")
    assert convert_checkpoint(source, tmp_path / "y", Options(device="cpu"), progress=False).resumed == 0
    same_files(whole, tmp_path / "y")


@pytest.mark.slow
def test_two_converters_on_one_destination(split, tmp_path, monkeypatch):
    source, whole = split
    started, go_on = threading.Event(), threading.Event()
    quantize = jobs.quantize_matrix

    def waits(*args):
        started.set()
        assert go_on.wait(60)
        return quantize(*args)

    monkeypatch.setattr(jobs, "quantize_matrix", waits)
    first = threading.Thread(target=converted, args=(source, tmp_path / "x"))
    first.start()
    assert started.wait(60)
    second = subprocess.run(command(source, tmp_path / "x"), env=ENVIRONMENT, capture_output=True, text=True)
    go_on.set()
    first.join()
    assert second.returncode == 2
    assert "being written by another converter" in second.stderr and f"process {os.getpid()}" in second.stderr
    same_files(whole, tmp_path / "x")


def replaced(path):
    """Other weights of the same size, with the old time."""
    before, files = path.stat(), {n: t + 1 for n, t in tensors_of(path).items()}
    save_file(files, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def tensors_of(path):
    with safe_open(path, "pt") as f:
        return {name: f.get_tensor(name).clone() for name in f.keys()}


@pytest.mark.slow
def test_a_source_that_changed_between_two_runs(split, tmp_path, monkeypatch):
    """Size and time are as they were: the work of the first run is not mixed with that of the second."""
    source = shutil.copytree(split[0], tmp_path / "a")
    interrupted(monkeypatch, source, tmp_path / "x", 100, OSError(errno.ENOSPC, "No space left"), device="cpu")
    replaced(source / "model-00001-of-00008.safetensors")
    assert convert_checkpoint(source, tmp_path / "x", Options(device="cpu"), progress=False).resumed == 0
    same_files(converted(source, tmp_path / "y"), tmp_path / "x")


@pytest.mark.slow
def test_a_source_that_changes_or_vanishes(split, tmp_path, monkeypatch):
    quantize = jobs.quantize_matrix
    actions = {
        "vanishes": lambda p: p.unlink(),
        "shrinks": lambda p: p.write_bytes(p.read_bytes()[:5000]),
        "is touched": lambda p: os.utime(p, (1, 1)),
        "is replaced": replaced,
    }
    for name, action in actions.items():
        copy = shutil.copytree(split[0], tmp_path / name)
        last, once = copy / "model-00008-of-00008.safetensors", threading.Event()

        def acts(*args, once=once, action=action, last=last):
            if not once.is_set():
                once.set()
                action(last)
            return quantize(*args)

        monkeypatch.setattr(jobs, "quantize_matrix", acts)
        with pytest.raises((OSError, ValueError), match="model-00008|changed while it was read"):
            converted(copy, tmp_path / "x", workers=1)
        assert not (tmp_path / "x").exists()


def test_destinations_that_cannot_be_written(split, tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file/x", "file/y/x"):
        with pytest.raises(ValueError, match="file is a file, where the folder .* goes: move it away, or name another"):
            converted(split[0], tmp_path / path)
    (tmp_path / ".z.partial").write_text("mine")
    with pytest.raises(ValueError, match=r"\.z\.partial is a file, where the folder of the work in progress"):
        converted(split[0], tmp_path / "z")
    assert (tmp_path / ".z.partial").read_text() == "mine"
    with pytest.raises(ValueError, match="exists: name a folder that does not"):
        converted(split[0], tmp_path / "file")
    if os.name == "posix" and os.geteuid() != 0:
        (tmp_path / "read-only").mkdir(mode=0o555)
        with pytest.raises(PermissionError):
            converted(split[0], tmp_path / "read-only" / "x")


def test_the_source_is_only_read(tmp_path):
    source = saved(tmp_path, qwen3_moe, max_shard_size="40KB")
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()}
    converted(source, tmp_path / "b")
    assert before == {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", source.name]


def test_nan_is_named(tmp_path):
    files = experts()
    files["model.layers.0.mlp.experts.2.up_proj.weight"][3, 5] = float("nan")
    with pytest.raises(ValueError, match="experts.2.up_proj: 1 of 3072 weights are NaN or Inf"):
        converted(folder(tmp_path / "a", files), tmp_path / "b")


# ---------------------------------------------------------------- sources that lie
def raw(path, header, data=b"\0" * 64, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(begin, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HOSTILE = {
    "huge header": (dict(header={}, length=1 << 62), "its header alone needs"),
    "not JSON": (dict(header=b"{nonsense"), "is not JSON"),
    "deep JSON": (dict(header=b"[" * 200000), "is not"),
    "a list": (dict(header=[1, 2]), "not a JSON object"),
    "overlapping": (dict(header={"a": entry(0, 40), "b": entry(32, 64)}), "b at bytes 32 to 64 overlaps"),
    "a hole": (dict(header={"a": entry(0, 16), "b": entry(32, 64)}), "belong to no tensor"),
    "beyond the file": (dict(header={"a": entry(0, 1 << 40)}), "its header describes"),
    "negative": (dict(header={"a": entry(-8, 64)}), "not whole numbers"),
    "backwards": (dict(header={"a": entry(64, 0, [64])}), "needs 64 bytes"),
    "another size": (dict(header={"a": entry(0, 64, [4, 4], "F32"), "b": entry(64, 64, [3])}), "needs 3 bytes"),
    "shape overflow": (dict(header={"a": entry(0, 64, [1 << 61, 1 << 61, 0, 64])}), "needs 0 bytes"),
    "booleans": (dict(header={"a": entry(0, 64, [True])}), "not whole numbers"),
    "unknown dtype": (dict(header={"a": entry(0, 64, [64], "F9")}), "dtype 'F9', which is not known"),
    "no offsets": (dict(header={"a": {"dtype": "U8", "shape": [64]}}), "lacks data_offsets"),
    "twice": (dict(header=b'{"a": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}, "a": {}}'), "names a twice"),
    "an expert of 31 digits": (
        dict(header={f"model.layers.0.mlp.experts.{10**30}.up_proj.weight": entry(0, 64, [4, 8], "BF16")}),
        "no layer or expert has a number of 6 digits",
    ),
    "trailing bytes": (dict(header={"a": entry(0, 32)}), "its header describes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case, tmp_path):
    kwargs, message = HOSTILE[case]
    source = folder(tmp_path / "a", experts())
    raw(source / "model.safetensors", **kwargs)
    with pytest.raises(ValueError, match=message) as raised:
        converted(source, tmp_path / "b")
    assert "model.safetensors" in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.slow
@given(data=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    try:
        read_header(path)
    except ValueError as error:
        assert "any.safetensors" in str(error)


def index(change):
    def edit(path):
        found = json.loads((path / INDEX).read_text())
        change(found["weight_map"])
        (path / INDEX).write_text(json.dumps(found))

    return edit


def rename_first(weight_map, name):
    weight_map[next(iter(weight_map))] = name


WRONG = {
    "a path": (index(lambda m: rename_first(m, "../../etc/x.safetensors")), "shards must be .safetensors files in"),
    "absolute": (index(lambda m: rename_first(m, "/etc/x.safetensors")), "shards must be"),
    "another kind": (index(lambda m: rename_first(m, "config.json")), "shards must be"),
    "a missing shard": (lambda p: (p / "model-00002-of-00003.safetensors").unlink(), "names model-00002.* not in the"),
    "a tensor elsewhere": (index(lambda m: rename_first(m, "model-00002-of-00003.safetensors")), "and it is not"),
    "a tensor too many": (index(lambda m: m.update(ghost="model-00002-of-00003.safetensors")), "says that ghost is in"),
    "a tensor too few": (index(lambda m: m.pop(next(iter(m)))), "does not name model"),
    "a shard too few": (
        index(lambda m: [m.pop(k) for k in list(m) if "00003-" in m[k]]), "does not name the shard model-00003"),
    "no map": (lambda p: (p / INDEX).write_text("{}"), "has no weight_map"),
    "not JSON": (lambda p: (p / INDEX).write_text("{"), "is not JSON"),
    "no index": (lambda p: (p / INDEX).unlink(), "of a split checkpoint, but no model.safetensors.index.json"),
    "no config": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "two checkpoints": (
        lambda p: save_file({"a": torch.ones(1)}, p / "model.safetensors"), "two checkpoints are mixed"),
    "truncated": (lambda p: os.truncate(p / "model-00003-of-00003.safetensors", 3000), "model-00003.* is truncated"),
    "twice": (lambda p: shutil.copy(p / "model-00001-of-00003.safetensors", p / "model-00002-of-00003.safetensors"),
              "two checkpoints are mixed"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_indexes(case, tmp_path):
    change, message = WRONG[case]
    source = folder(tmp_path / "a", experts(), shards=3)
    change(source)
    with pytest.raises(ValueError, match=message):
        converted(source, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


E3 = "model.layers.0.mlp.experts.3"
UNKNOWN = {
    "an expert is missing": (
        lambda f: [f.pop(k) for k in list(f) if k.startswith(E3)], {"num_experts": 4}, "3 of 4 experts"),
    "a matrix is missing": (lambda f: f.pop(f"{E3}.up_proj.weight"), {}, f"{E3}.up_proj is missing: 3 of 4 experts"),
    "a projection is missing": (
        lambda f: [f.pop(k) for k in list(f) if k.endswith("down_proj.weight")], {}, "a projection is missing"),
    "a scale": (
        lambda f: f.update({"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(4)}), {}, "scale that nothing"),
    "a stack": (
        lambda f: f.update({"model.layers.1.moe.gate_proj.weight": torch.zeros(4, 8, 16)}), {}, "not known for model"),
    "another name": (
        lambda f: f.update({"encoder.mlp.experts.expert_0.wi.weight": torch.zeros(8, 16)}), {}, "not known for model"),
    "GPTQ": (lambda f: None, {"quantization_config": {"quant_method": "gptq"}}, "quantized with 'gptq'"),
    "SVD": (
        lambda f: None, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}}, "NVFP4_SVD"),
    "no experts": (lambda f: [f.pop(k) for k in list(f) if "experts" in k], {}, "MadeByHand has no experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_is_refused_by_name(case, tmp_path):
    change, config, message = UNKNOWN[case]
    files = experts()
    change(files)
    with pytest.raises(ValueError, match=message):
        converted(folder(tmp_path / "a", files, config), tmp_path / "b")


def test_unknown_settings(split, tmp_path):
    for options in (dict(recipe="best"), dict(dialect="gguf"), dict(activations="int4")):
        with pytest.raises(ValueError, match="unknown"):
            converted(split[0], tmp_path / "x", **options)
    with pytest.raises(ValueError, match="quantized already"):
        converted(split[1], tmp_path / "x")
    with pytest.raises(ValueError, match="are all excluded"):
        converted(split[0], tmp_path / "x", exclude=["*"])
    for option in ("exclude", "include"):
        patterns = {option: ["model.layers.1.*", "model.layer.0.*"]}
        message = r"'model.layer.0.\*' matches no experts module: there are model.layers.0.mlp.experts, "
        with pytest.raises(ValueError, match=message):
            converted(split[0], tmp_path / "x", **patterns)
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------- verify
DAMAGE = {
    "a scale is gone": (lambda f: f.pop(f"{E3}.up_proj.weight_scale"), "up_proj.weight_scale is missing"),
    "codes are gone": (lambda f: f.pop(f"{E3}.up_proj.weight"), "up_proj.weight is missing"),
    "an expert is gone": (lambda f: [f.pop(k) for k in list(f) if E3[:-1] + "2" in k], "2.down_proj is missing"),
    "a global scale is gone": (lambda f: f.pop(f"{E3}.up_proj.weight_scale_2"), "up_proj.weight_scale_2 is missing"),
    "an infinite scale": (lambda f: f[f"{E3}.up_proj.weight_scale_2"].fill_(float("inf")), "is inf: a global scale"),
    "NaN block scales": (lambda f: f[f"{E3}.up_proj.weight_scale"].view(torch.uint8).fill_(0x7F), "NaN or negative"),
    "NaN elsewhere": (lambda f: f["lm_head.weight"].fill_(float("nan")), "lm_head.weight has NaN or Inf"),
    "another dtype": (lambda f: f.update({f"{E3}.up_proj.weight_scale": torch.ones(48, 4)}), "F32, expected F8_E4M3"),
    "another shape": (
        lambda f: f.update({f"{E3}.up_proj.weight": torch.zeros(48, 16, dtype=torch.uint8)}), "does not fit codes"),
    "other codes": (None, None),
}  # fmt: skip


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("case", DAMAGE)
def test_verify_finds_damage(case, tmp_path, capsys):
    change, message = DAMAGE[case]
    source = folder(tmp_path / "a", experts())
    path = converted(source, tmp_path / "b")
    assert cli.main(["verify", str(path), "--against", str(source)]) == 0
    said = capsys.readouterr().out
    row = re.search(r"^model.layers.0.mlp.experts +12 +(0\.\d+) +(\d+\.\d+)$", said, re.M)
    assert 0.08 < float(row[1]) < 0.1 and 20 < float(row[2]) < 22
    files = tensors(path)
    if change is None:  # what only the original tells
        files["lm_head.weight"][0, 0] += 1
        message = "lm_head.weight is not what it is in"
    else:
        change(files)
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    assert cli.main(["verify", str(path), *(["--against", str(source)] if change is None else [])]) == 2
    assert message in capsys.readouterr().err


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
