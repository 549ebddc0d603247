"""NVFP4 files converted to another dialect or layout keep their codes, block scales and values."""

import re
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from moe_nvfp4.integrations.huggingface import set_activations
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import COMPRESSED_TENSORS, MODELOPT
from moe_nvfp4.quantize.layouts.fp8 import fp8_block, fp8_dense
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import config_of, converted, experts, folder, same_files
from tests.folders import (
    CONFIGS,
    change_config,
    fp8,
    fused,
    is_expert,
    is_linear,
    projection_first,
    quantized,
    qwen2_moe,
    stacked_by_projection,
    stored,
    write,
)
from tests.models import IDS, as_bytes, dbrx, gpt_oss, granite, llama4, make, qwen3_moe, step3p7, tensors

OTHER = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}


def carried(source, destination, dialect):
    report = convert_checkpoint(source, destination, Options(dialect=dialect), progress=False)
    assert report.carried and not report.quantized
    assert not any("experts" in line for line in list(report.lines())[1:])  # no sizes of what was not quantized
    found = verify_checkpoint(destination, source)
    assert sum(layer.matrices for layer in found.layers.values()) == report.carried
    # a reciprocal may move a scale by its last bit
    assert max(layer.relative for layer in found.layers.values()) < (1e-30 if dialect == "modelopt" else 2e-7)
    return destination


def same_model(a, b, ulp=0.0):
    """Check that both folders load into transformers: the same parameters (global scales up to `ulp`) and logits."""
    a, b = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (a, b))
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, p in ours.items():
        if "_scale" in name:
            torch.testing.assert_close(p, theirs[name], rtol=ulp, atol=0)
            theirs[name].data.copy_(p)
        assert torch.equal(p, theirs[name]), name
    for activations in ("bf16", "nvfp4"):
        with torch.no_grad():
            first, second = (set_activations(m, activations)(IDS).logits for m in (a, b))
        assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", CONFIGS)
def test_linears_are_carried_with_the_experts_and_back(dialect, tmp_path):
    source, _ = quantized(tmp_path, qwen2_moe, dialect, lambda k: is_expert(k) or is_linear(k), 0.003)
    there = carried(source, tmp_path / "there", OTHER[dialect])
    same_model(source, there, ulp=2**-23)
    back = carried(there, tmp_path / "back", dialect)
    files, again = tensors(source), tensors(back)
    assert files.keys() == again.keys()
    for name, tensor in files.items():
        if "scale_2" in name or "global_scale" in name or "input_scale" in name:
            torch.testing.assert_close(again[name], tensor, rtol=2**-23, atol=0)
        else:
            assert as_bytes(tensor) == as_bytes(again[name]), name


@pytest.mark.parametrize("dialect", CONFIGS)
@pytest.mark.parametrize("last", ["convert", "save"])
def test_input_scales_of_w4a16_files_are_not_used(last, dialect, tmp_path):
    """Files may have scales that their config does not use: that of mixed files has to be made W4A16. Servers would use
    them if new files said W4A4, and wait for those of other layers."""
    group = CONFIGS[dialect]["config_groups"]["group_0"] | {"input_activations": None}
    algo = {"quant_algo": "W4A16_NVFP4"} if dialect == "modelopt" else {}
    source, _ = quantized(tmp_path, qwen3_moe, dialect, input_scale=0.01, **algo, config_groups={"group_0": group})
    there = tmp_path / "there"
    if last == "convert":
        carried(source, there, OTHER[dialect])
    else:
        AutoModelForCausalLM.from_pretrained(source).save_pretrained(there)
    assert any(re.search(r"\.input_(global_)?scale$", name) for name in tensors(there))
    for step in (1, 2):
        config = config_of(there)["quantization_config"]
        assert config.get("quant_algo") in ("W4A16_NVFP4", None)
        assert not config["config_groups"]["group_0"].get("input_activations")
        model = AutoModelForCausalLM.from_pretrained(there)
        there = tmp_path / f"again{step}"
        model.save_pretrained(there)
    set_activations(model, "nvfp4").save_pretrained(tmp_path / "w4a4")
    assert config_of(tmp_path / "w4a4")["quantization_config"]["config_groups"]["group_0"]["input_activations"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dialect", CONFIGS)
@pytest.mark.parametrize("inputs", [None, 0.01], ids=["W4A16", "input scales"])
@pytest.mark.parametrize("family", [gpt_oss, llama4], ids=lambda f: f.__name__)
def test_fused_stacks_are_taken_apart(family, inputs, dialect, tmp_path):
    source, _ = fused(tmp_path, family, inputs)
    there = carried(source, tmp_path / "there", dialect)
    same_model(source, there, ulp=0.0 if dialect == "modelopt" else 2**-23)
    with pytest.raises(ValueError, match="quantized already"):
        convert_checkpoint(there, tmp_path / "again", Options(dialect=dialect), progress=False)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dialect", CONFIGS)
@pytest.mark.parametrize("inputs", [None, 0.01], ids=["W4A16", "input scales"])
def test_stacks_for_each_projection_are_taken_apart(inputs, dialect, tmp_path):
    """Step-3's stacks [E, out, in/2] become single experts with the same bytes."""
    source, twin = stacked_by_projection(tmp_path, step3p7, inputs)
    assert error_against(source, twin) == 0
    there, files = tensors(carried(source, tmp_path / "there", dialect)), tensors(source)
    last = {"modelopt": "weight", "compressed-tensors": "weight_packed"}[dialect]
    for e in range(4):
        for part in ("gate_proj", "up_proj", "down_proj"):
            old, new = f"model.layers.1.moe.{part}", f"model.layers.1.moe.experts.{e}.{part}"
            assert torch.equal(there[f"{new}.{last}"], files[f"{old}.weight"][e])
            assert as_bytes(there[f"{new}.weight_scale"]) == as_bytes(files[f"{old}.weight_scale"][e])
            assert dialect != "modelopt" or there[f"{new}.weight_scale_2"] == files[f"{old}.weight_scale_2"][e]
            assert (f"{new}.input_scale" in there or f"{new}.input_global_scale" in there) == bool(inputs)
    files["model.layers.1.moe.up_proj.weight_scale_2"] = torch.ones(3)
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    for check in (verify_checkpoint, lambda path: carried(path, tmp_path / "x", "modelopt")):
        with pytest.raises(ValueError, match=r"up_proj: weight_scale_2 is F32 \[3\], expected .* each of 4 experts"):
            check(source)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", CONFIGS)
def test_experts_numbered_after_the_projection_are_renamed(dialect, tmp_path):
    source, _ = quantized(
        tmp_path, lambda: qwen3_moe(experts=12), "modelopt", rename=projection_first, input_scale=0.002
    )
    there = carried(source, tmp_path / "there", dialect)
    assert any(".experts.11.up_proj." in name for name in tensors(there))
    same_model(source, there, ulp=0.0 if dialect == "modelopt" else 2**-23)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dialect", CONFIGS)
@pytest.mark.parametrize("kind", ["tensor", "row", "mx", "block"])
def test_fp8_layers_of_mixed_files_become_dense(kind, dialect, tmp_path):
    """Also in DeepSeek V4's form, whose config says fp8 and names the experts' format separately."""
    source, twin = quantized(tmp_path, qwen2_moe, "modelopt")
    files, worth = tensors(source), {}
    for key in [k for k in files if is_linear(k)]:
        files[key], scale, worth[key] = fp8(kind, files[key].float())
        stem = key.removesuffix(".weight")
        name = {"block": "weight_scale_inv", "mx": "scale"}.get(kind, "weight_scale")
        files[f"{stem}.{name}"] = scale
        if kind == "tensor":
            files[f"{stem}.input_scale"] = torch.tensor(0.01)
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    if kind in ("block", "mx"):
        deepseek = {"quant_method": "fp8", "moe_quant_algo": "NVFP4", "weight_block_size": [128, 128]}
        change_config(source, quantization_config=deepseek)
    else:
        layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}, "lm_head": {"quant_algo": "FP8"}}
        mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        change_config(source, quantization_config=mixed)
    there = carried(source, tmp_path / "there", dialect)
    found = tensors(there)
    for key, dense in worth.items():
        assert torch.equal(found[key], dense.bfloat16()), key
    again = AutoModelForCausalLM.from_pretrained(there, dtype=torch.bfloat16)
    direct = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with torch.no_grad():
        a, b = (set_activations(m, "bf16")(IDS).logits for m in (again, direct))
    assert torch.equal(a, b) or dialect != "modelopt"  # there, scales may move by their last bit
    assert error_against(source, twin) == 0  # of the experts; FP8 linears are near theirs
    files[f"{stem}.{name}"] = files[f"{stem}.{name}"].float().mul(2).to(files[f"{stem}.{name}"].dtype)
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{stem}.weight is .* times its norm away"):
        verify_checkpoint(source, twin)


def test_reciprocals_are_written_as_they_were_read():
    """Of neighbours with the same reciprocal, the one that was read is written; if none was read, any of them."""
    numbers = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)  # from 1 to 2, all of them
    assert torch.equal(1.0 / (1.0 / (1.0 / numbers)), 1.0 / numbers)
    for kept in torch.rand(300) * 4:
        scale = 1.0 / kept
        assert COMPRESSED_TENSORS.encode_scale(scale, kept[None]) == kept
        assert COMPRESSED_TENSORS.carry_scale(kept, COMPRESSED_TENSORS) == kept
        assert 1.0 / COMPRESSED_TENSORS.encode_scale(scale) == scale
        assert 1.0 / COMPRESSED_TENSORS.encode_scale(scale, kept[None] * 2) == scale


def test_reciprocals_keep_scales_where_float32_can():
    """From ModelOpt's scale x to compressed-tensors' c = 1/x and back: x where any float32 c has 1/c = x, else the next
    one. A second round changes nothing. In numpy, for all mantissas."""
    x = np.arange(0x3F800000, 0x40000000, dtype=np.int32).view(np.float32)
    one = np.float32(1)
    c = one / x
    back = one / c
    for other in (np.nextafter(c, np.float32(0)), np.nextafter(c, np.float32(2))):
        assert not np.any((back != x) & (one / other == x))
    moved = np.abs(back.view(np.int32) - x.view(np.int32))
    assert moved.max() == 1 and round(moved.mean(), 4) == 0.1716  # 3 - 2√2
    assert np.array_equal(one / (one / back), back)
    some = torch.from_numpy(x[::100_003])
    for scale, wanted in zip(some, torch.from_numpy(back[::100_003]), strict=True):
        there = MODELOPT.carry_scale(scale, COMPRESSED_TENSORS)
        assert COMPRESSED_TENSORS.carry_scale(there, MODELOPT) == wanted


def test_a_second_round_through_the_other_dialect_changes_no_byte(tmp_path):
    """And the first one changes nothing but the last bit of global scales."""
    torch.manual_seed(0)
    source = folder(tmp_path / "bf16", experts(E=24, I=16, H=32))
    places = [converted(source, tmp_path / "0")]
    for i, dialect in enumerate(["compressed-tensors", "modelopt"] * 2):
        places.append(converted(places[-1], tmp_path / f"{i + 1}", dialect=dialect))
    first, second, third = (tensors(places[i]) for i in (0, 2, 4))
    for name, value in first.items():
        if name.endswith("weight_scale_2"):
            assert abs(int(value.view(torch.int32)) - int(second[name].view(torch.int32))) <= 1
        else:
            assert as_bytes(value) == as_bytes(second[name]), name
    assert any(as_bytes(value) != as_bytes(second[name]) for name, value in first.items())
    same_files(places[2], places[4])
    assert tensors(places[1]).keys() == tensors(places[3]).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_fp8_scales_of_every_shape(dtype):
    """Scales for a matrix, a row, 32 of a row and 128 x 128, element by element, in all rows and in the last ones."""
    N, K = 130, 160
    codes = torch.randn(N, K).to(torch.float8_e4m3fn)
    for shape in ((), (1,), (1, 1), (N,), (N, 1), (N, K // 32), (2, 2)):
        stored = torch.randint(110, 130, shape, dtype=torch.uint8)
        scale = torch.exp2(stored.double() - 127)
        rows, columns = (N, K) if stored.numel() == 1 else (-(-N // shape[0]), -(-K // (*shape, 1)[1]))
        rows, columns = (128, 128) if shape == (2, 2) else (rows, columns)
        grid = scale.reshape(-(-N // rows), -1)
        want = [
            [codes[n, k].item() * grid[n // rows, k // columns].item() for k in range(0, K, 7)] for n in (0, 127, 129)
        ]
        scale = stored if dtype is torch.uint8 else scale.to(dtype)
        block = fp8_block((N, K), shape)
        assert fp8_dense(codes, scale, block)[[0, 127, 129], ::7].tolist() == want
        assert torch.equal(fp8_dense(codes[127:], scale, block, 127)[[0, 2], ::7], torch.tensor(want[1:]))
    for shape in ((2,), (N, 2), (1, K), (N, K // 32, 1)):
        assert fp8_block((N, K), shape) is None
    assert fp8_block((2, N, K), ()) is None


@pytest.mark.slow
def test_awq_is_carried_within_its_dialect(tmp_path):
    source, _ = quantized(
        tmp_path, qwen3_moe, "modelopt", rename=projection_first, input_scale=0.01, quant_algo="NVFP4_AWQ"
    )
    files = tensors(source)
    for name in [n for n in files if n.endswith("weight_scale_2")]:
        stem = name.removesuffix(".weight_scale_2")
        files[f"{stem}.pre_quant_scale"] = torch.full((2 * files[f"{stem}.weight"].shape[1],), 1.5).bfloat16()
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    same_model(source, carried(source, tmp_path / "there", "modelopt"))
    with pytest.raises(ValueError, match="AWQ. has no place in compressed-tensors files"):
        convert_checkpoint(source, tmp_path / "other", Options(dialect="compressed-tensors"), progress=False)
    files = tensors(tmp_path / "there")
    files["model.layers.0.mlp.experts.0.up_proj.pre_quant_scale"][3] = float("nan")
    save_file(files, tmp_path / "there" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="pre_quant_scale .64. must be finite"):
        verify_checkpoint(tmp_path / "there")


# ---------------------------------------------------------------- verify what other tools wrote
def error_against(folder, twin):
    """The largest relative error of a layer."""
    return max(layer.relative for layer in verify_checkpoint(folder, twin).layers.values())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [gpt_oss, llama4], ids=lambda f: f.__name__)
def test_verify_stacks(family, tmp_path):
    """Against their dequantized weights, against their original, and with damage, which the error names."""
    source, twin = fused(tmp_path, family, 0.01)
    assert error_against(source, twin) == 0
    assert 0.05 < error_against(source, tmp_path / "bf16") < 0.15
    stem = next(n for n in tensors(source) if re.search(r"layers\.1\..*experts\.down_proj$", n))
    for change, message in (
        (lambda f: f.pop(f"{stem}_weight_scale_2"), f"{stem}_weight_scale_2 is missing"),
        (lambda f: f.update({f"{stem}_weight_scale": f[f"{stem}_weight_scale"][:, :2]}), "is no stack of NVFP4"),
        (lambda f: f[f"{stem}_weight_scale"].view(torch.uint8).fill_(0x7F), "NaN or negative block scales"),
        (lambda f: f[f"{stem}_input_scale"].fill_(0), f"{stem}_input_scale of expert 0 is 0.0"),
    ):
        files = tensors(source)
        change(files)
        damaged = write(tmp_path / "damaged", files, {}, CONFIGS["modelopt"])
        with pytest.raises(ValueError, match=message):
            verify_checkpoint(damaged)
    files = tensors(source)  # beside linears that have a scale each, which are the majority
    for name in [n for n in files if is_linear(n)]:
        files |= stored("modelopt", name.removesuffix(".weight"), files.pop(name), 0.01)
    config = config_of(tmp_path / "bf16")
    both = write(tmp_path / "both", files, config, CONFIGS["modelopt"])
    assert 0.05 < error_against(both, tmp_path / "bf16") < 0.15
    files[f"{stem}_weight_scale_2"] *= 1.1
    write(tmp_path / "both", files, config, CONFIGS["modelopt"])
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj.weight_scale_2 stands for .*, but .* follows from"):
        verify_checkpoint(both, tmp_path / "bf16")


@pytest.mark.slow
def test_verify_awq_and_projection_first_names(tmp_path):
    """verify compares the weights multiplied with pre_quant_scale."""
    source, twin = quantized(
        tmp_path, qwen3_moe, "modelopt", rename=projection_first, input_scale=0.01, quant_algo="NVFP4_AWQ"
    )
    files, dense = tensors(source), tensors(twin)
    for name in [n for n in files if n.endswith("weight_scale_2")]:
        stem = name.removesuffix(".weight_scale_2")
        torch.manual_seed(zlib.crc32(stem.replace("gate_proj", "up_proj").encode()))  # gate and up have one input
        scale = torch.randint(1, 9, (2 * files[f"{stem}.weight"].shape[1],)) / 4
        files[f"{stem}.pre_quant_scale"] = scale.bfloat16()
        plain = re.sub(r"experts\.(\w+)\.(\d+)", r"experts.\2.\1", stem)
        dense[f"{plain}.weight"] = dense[f"{plain}.weight"] * scale
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="experts.0.down_proj is damaged in row"):
        verify_checkpoint(source, twin)
    save_file(dense, twin / "model.safetensors", metadata={"format": "pt"})
    assert error_against(source, twin) == 0
    assert error_against(carried(source, tmp_path / "there", "modelopt"), source) == 0


def test_verify_fp8_next_to_nvfp4(tmp_path):
    source, _ = quantized(tmp_path, qwen2_moe, "modelopt")
    files, key = tensors(source), "model.layers.1.self_attn.q_proj.weight"
    files[key], files[f"{key}_scale"], _ = fp8("tensor", files[key].float())
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    verify_checkpoint(source)
    there = carried(source, tmp_path / "there", "modelopt")
    dense = tensors(there)
    dense[key][3, 5] *= 2
    save_file(dense, there / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{key} is not what it is in .* made dense exactly"):
        verify_checkpoint(there, source)
    for change, message in (
        (lambda f: f[key].view(torch.uint8)[2, 3].fill_(0xFF), f"{key} has NaN"),
        (lambda f: f[f"{key}_scale"].fill_(float("inf")), f"{key}_scale has NaN or Inf"),
        (lambda f: f.update({f"{key}_scale": torch.tensor([255], dtype=torch.uint8)}), f"{key}_scale has NaN"),  # e8m0
        (
            lambda f: f.update({f"{key}_scale": torch.ones(2, 2)}),
            f"{key} is FP8 .* and has no scale, or none that fits",
        ),
        (lambda f: f.pop(f"{key}_scale"), f"{key} is FP8 .* and has no scale"),
    ):
        damaged = {n: t.clone() for n, t in files.items()}
        change(damaged)
        save_file(damaged, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            verify_checkpoint(source)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kept", ["quantized", "dense"])
def test_verify_misses_experts_that_are_gone(kept, tmp_path):
    """A layer is missing in a model that transformers does not know, so only the original tells."""
    make(qwen3_moe).save_pretrained(tmp_path / "bf16")
    exclude = ["model.layers.1.*"] if kept == "dense" else []
    convert_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4", Options(exclude=exclude), progress=False)
    verify_checkpoint(tmp_path / "nvfp4", tmp_path / "bf16")
    files = {n: t for n, t in tensors(tmp_path / "nvfp4").items() if "layers.1.mlp.experts" not in n}
    save_file(files, tmp_path / "nvfp4" / "model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path / "nvfp4", architectures=["SomethingNew"])
    verify_checkpoint(tmp_path / "nvfp4")
    with pytest.raises(ValueError, match="model.layers.1.mlp.experts.0.* is in .*bf16 and not in .*nvfp4"):
        verify_checkpoint(tmp_path / "nvfp4", tmp_path / "bf16")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.gate.weight", "model.norm.weight"])
def test_verify_misses_other_tensors_that_are_gone(name, tmp_path):
    make(qwen3_moe).save_pretrained(tmp_path / "bf16")
    change_config(tmp_path / "bf16", architectures=["SomethingNew"])  # so that only the original tells
    convert_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4", progress=False)
    files = {n: t for n, t in tensors(tmp_path / "nvfp4").items() if n != name}
    save_file(files, tmp_path / "nvfp4" / "model.safetensors", metadata={"format": "pt"})
    verify_checkpoint(tmp_path / "nvfp4")
    with pytest.raises(ValueError, match=f"{name} is in .*bf16 and not in .*nvfp4: the conversion was not complete"):
        verify_checkpoint(tmp_path / "nvfp4", tmp_path / "bf16")


@pytest.mark.parametrize(
    "layout",
    [
        lambda p: quantized(p, qwen3_moe, "modelopt"),
        lambda p: fused(p, llama4),
        lambda p: stacked_by_projection(p, step3p7),
    ],
    ids=["one by one", "fused", "stacks"],
)
def test_nan_block_scales_are_not_carried(layout, tmp_path):
    source, _ = layout(tmp_path)
    files = tensors(source)
    name = next(n for n in files if re.search(r"layers\.1.*(up_proj.weight_scale|up_proj_weight_scale)$", n))
    files[name].view(torch.uint8).flatten()[-1] = 0x7F
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="up_proj.weight_scale holds NaN or negative block scales"):
        convert_checkpoint(source, tmp_path / "x", Options(dialect="compressed-tensors"), progress=False)
    assert not (tmp_path / "x").exists()


def test_damaged_stacks_are_named(tmp_path):
    source, _ = fused(tmp_path, gpt_oss)
    stem = "model.layers.1.mlp.experts.down_proj"
    for change, message in (
        (lambda f: f.update({stem: f[stem].flatten()}), "is no stack of NVFP4 matrices"),
        (lambda f: f.update({f"{stem}_weight_scale": torch.zeros(4, 2, 2)}), "is no stack of NVFP4 matrices"),
        (lambda f: f.pop(f"{stem}_weight_scale_2"), f"{stem}_weight_scale_2 is missing"),
    ):
        files = tensors(source)
        change(files)
        save_file(files, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(source, tmp_path / "x", Options(dialect="modelopt"), progress=False)


@pytest.mark.parametrize("family", [dbrx, granite])
def test_experts_that_were_left_dense_are_named_again(family, tmp_path):
    """Whatever form their files have: else a loader takes the layer for NVFP4."""
    make(family).save_pretrained(tmp_path / "bf16")
    first = converted(tmp_path / "bf16", tmp_path / "a", include="*.0.*")
    second = converted(first, tmp_path / "b", dialect="compressed-tensors")
    third = converted(second, tmp_path / "c")
    named = [{p for p in config_of(path)["quantization_config"]["ignore"] if "experts" in p} for path in (first, third)]
    assert named[0] and named[0] == named[1]
    same_model(first, second, ulp=2e-7)
