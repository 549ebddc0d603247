"""MXFP4 files of any model: read exactly, and converted to NVFP4 without a loss where that is possible."""

import importlib.util
import re
import warnings

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_nvfp4.format import dequantize
from moe_nvfp4.quantize import jobs
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dense import dense_tensors
from moe_nvfp4.quantize.exact import cast_exactly
from moe_nvfp4.quantize.files import open_checkpoint
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import quantize_matrix
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import config_of, converted, edit_config, experts, folder, same_files
from tests.common import THRESHOLDS, relative_error
from tests.folders import fp8, write
from tests.integrations.test_checkpoint_forms import deepseek_v4
from tests.models import load, logits, make, tensors

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CONFIGS = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "format": "mxfp4-pack-quantized", "weights": {
            "num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}}}},
    "quark": {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}}},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MXFP4"},
    "deepseek": {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
}  # fmt: skip
tools = pytest.mark.parametrize("tool", CONFIGS)


def random(N, K, low=110, high=127):
    """(codes uint8 [N, K], e8m0 [N, K/32], their values fp32)"""
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    scales = torch.randint(low, high, (N, K // 32), dtype=torch.uint8)
    return codes, scales, E2M1[codes.long()] * 2.0 ** (scales.float() - 127).repeat_interleave(32, 1)


def stored(tool, stem, codes, scales):
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    if tool == "deepseek":
        return {f"{stem}.weight": packed.view(torch.int8), f"{stem}.scale": scales.view(torch.float8_e8m0fnu)}
    return {f"{stem}.{'weight_packed' if tool == 'compressed-tensors' else 'weight'}": packed,
            f"{stem}.weight_scale": scales}  # fmt: skip


def source(path, tool, layers=2, low=110, high=127):
    """A folder whose experts are MXFP4, and q_proj too; name -> its values."""
    files, values = {}, {}
    for name, tensor in experts(E=3, I=32, H=64, layers=layers).items():
        stem = name.removesuffix(".weight")
        if "layers" not in name:
            files[name] = tensor
            continue
        codes, scales, values[stem] = random(*tensor.shape, low, high)
        files |= stored(tool, stem, codes, scales)
    return folder(path, files, {"quantization_config": CONFIGS[tool], "num_experts": 3}), values


def value(found, stem):
    return dequantize(*(found[f"{stem}.{last}"] for last in ("weight", "weight_scale", "weight_scale_2")))


@tools
@pytest.mark.parametrize("options", [{}, {"linears": "attention", "exclude": ["model.layers.0.*experts"]}], ids=str)
def test_pieces_of_matrices_give_the_bytes_of_the_whole(options, tool, tmp_path, monkeypatch):
    """Of those that become dense, too."""
    path, _ = source(tmp_path / "a", tool)
    whole = converted(path, tmp_path / "whole", **options)
    monkeypatch.setattr(jobs, "CHUNK", 64 * 7)
    same_files(converted(path, tmp_path / "pieces", **options), whole)


def test_values_that_a_dtype_rounds_are_quantized_as_rounded(tmp_path, monkeypatch):
    """In fp16, as transformers would load them; the table of casts knows nothing of that."""
    path, values = source(tmp_path / "a", "modelopt", low=100, high=110)
    assert not all(torch.equal(w.half().float(), w) for w in values.values())
    edit_config(path, dtype="float16")
    found = converted(path, tmp_path / "found")
    monkeypatch.setattr(jobs, "cast_exactly", lambda *_: None)
    same_files(converted(path, tmp_path / "searched"), found)


def test_scales_of_zeros_and_of_fused_linears(tmp_path):
    """Blocks of zeros may have any scale. q, k and v share the largest of their global scales; here it is not q's."""
    path, values = source(tmp_path / "a", "modelopt", layers=1)
    files, stem = tensors(path), "model.layers.0.self_attn."
    for i, part in enumerate(("q_proj", "k_proj", "v_proj")):
        codes, scales, values[stem + part] = random(64, 64, 105 + 4 * i, 110 + 4 * i)
        files |= stored("modelopt", stem + part, codes, scales)
    for name in [n for n in files if n.endswith(".weight_scale")]:
        codes = files[name.removesuffix("_scale")]
        codes[3, :16], files[name][3, 0] = 0x80, 250  # 0 and -0
        values[name.removesuffix(".weight_scale")][3, :32] = 0
    new = folder(tmp_path / "b", files, {"quantization_config": CONFIGS["modelopt"], "num_experts": 3})
    found = tensors(converted(new, tmp_path / "c", linears="attention"))
    assert len({found[f"{stem}{part}.weight_scale_2"].item() for part in ("q_proj", "k_proj", "v_proj")}) == 1
    for name, want in values.items():
        assert torch.equal(value(found, name), want), name


@tools
def test_nothing_is_lost(tool, tmp_path):
    """Experts become NVFP4, linears dense, or NVFP4 where they are asked for; every value stays."""
    path, values = source(tmp_path / "a", tool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = convert_checkpoint(path, tmp_path / "b", Options(), progress=False)
        converted(path, tmp_path / "c", linears="attention", dialect="compressed-tensors")
    assert report.quantized == 2 * 3 * 3 and report.dequantized == 2
    found, packed = tensors(tmp_path / "b"), tensors(tmp_path / "c")
    for stem, want in values.items():
        if ".experts." in stem:
            assert torch.equal(value(found, stem), want), stem
        else:
            assert torch.equal(found[f"{stem}.weight"].float(), want), "dense, in bf16"
            scale = 1 / packed[f"{stem}.weight_global_scale"].reshape(())
            assert torch.equal(dequantize(packed[f"{stem}.weight_packed"], packed[f"{stem}.weight_scale"], scale), want)
    layers = verify_checkpoint(tmp_path / "b", path).layers
    assert layers and all(sums.error == 0 for sums in layers.values())
    verify_checkpoint(tmp_path / "c", path)
    dense = dense_tensors(open_checkpoint(path))  # what recipes that run the model read
    assert all(torch.equal(dense[f"{stem}.weight"].read(), want) for stem, want in values.items())
    kept = tensors(converted(path, tmp_path / "d", exclude=["model.layers.0.*"]))
    for stem in (s for s in values if "layers.0.mlp" in s):
        assert torch.equal(kept[f"{stem}.weight"].float(), values[stem]), "excluded experts are dense"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 20), low=st.integers(36, 200), span=st.integers(1, 24), more=st.integers(0, 3),
    zeros=st.sampled_from([0, 0.5, 0.9]), recipe=st.sampled_from(["mse", "four_over_six"]),
)  # fmt: skip
def test_the_table_gives_the_bytes_of_the_search(seed, low, span, zeros, recipe, more):
    """Where it gives any: for blocks with all and with few magnitudes, and scales at both ends of e4m3."""
    torch.manual_seed(seed)
    codes, scales, values = random(6, 96, low, low + span)
    codes[torch.rand(codes.shape) < zeros] = 0
    values = E2M1[codes.long()] * 2.0 ** (scales.float() - 127).repeat_interleave(32, 1)
    largest = torch.ldexp(torch.ones(()), scales.max().int() - 135 + more)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    found = cast_exactly(packed, scales, largest, recipe)
    assert (found is not None) or span > 8 or low < 40 or more > 0
    if found is not None:
        want = quantize_matrix(values, recipe, largest)
        assert torch.equal(found[0], want[0]) and torch.equal(found[1].view(torch.uint8), want[1].view(torch.uint8))
        assert torch.equal(dequantize(*found, largest), values)
    assert cast_exactly(packed, scales, largest * 1.5, recipe) is None, "no power of two"


@pytest.mark.parametrize("recipe", ["mse", "four_over_six"])
def test_the_table_at_its_bounds(recipe):
    """Blocks of every set of magnitudes, at powers of two beyond both ends of e4m3: as the search, or none."""
    codes = (torch.arange(128)[:, None] >> torch.arange(7) & 1) * torch.arange(1, 8)
    codes = torch.nn.functional.pad(codes, (0, 9)).repeat(1, 2).to(torch.uint8)  # [128, 32]
    codes[1::2] |= 8  # with signs, and -0
    packed, one = codes[:, ::2] | codes[:, 1::2] << 4, torch.ones(())
    for k in range(-8, 13):
        want = quantize_matrix(E2M1[codes.long()] * 2.0**k, recipe, one)
        for row in range(1, 128):
            found = cast_exactly(packed[row, None], torch.full((1, 1), 127 + k, dtype=torch.uint8), one, recipe)
            assert (found is not None) or not 2 <= k <= 8
            for mine, theirs in zip(found or (), want, strict=False):
                assert torch.equal(mine[0].view(torch.uint8), theirs[row].view(torch.uint8)), (k, row)
    exponents = torch.full((128, 1), 127, dtype=torch.uint8)
    assert cast_exactly(packed, exponents, one, "max") is None, "which loses something, and must be counted"


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(low=st.integers(20, 200), span=st.integers(1, 30), tool=st.sampled_from([*CONFIGS]))
def test_what_is_lost_is_counted(low, span, tool, tmp_path_factory):
    """e4m3 holds 18 consecutive powers of two, and `max`, whose 0 stays, the lowest three only where a block has large
    codes. Where the scales of a matrix, with those of the projection that shares its global scale, span more, the
    report counts the matrices that lost something, with the error."""
    path = tmp_path_factory.mktemp("a")
    files, values = source(path / "a", tool, layers=1, low=low, high=low + span)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = convert_checkpoint(files, path / "b", Options(dtype="F32"), progress=False)
    found, lost, error, square = tensors(path / "b"), 0, 0.0, 0.0
    for stem, want in values.items():
        if ".experts." in stem:
            change = (value(found, stem) - want).double()
            lost += bool((change != 0).any())
            error += float((change**2).sum())
            square += float((want.double() ** 2).sum()) * bool((change != 0).any())
    assert report.cast.matrices == 9 and report.cast.lost == lost
    assert (lost == 0) if span <= 15 else True
    assert report.cast.error == pytest.approx(error, rel=1e-6) and report.cast.square == pytest.approx(square, rel=1e-6)


def test_lines_of_the_report(tmp_path):
    path, _ = source(tmp_path / "a", "quark", layers=1)
    report = convert_checkpoint(path, tmp_path / "b", Options(), progress=False)
    assert any("9 MXFP4 matrices cast to NVFP4, none lost anything" in line for line in report.lines())
    path, _ = source(tmp_path / "c", "quark", layers=1, low=90)
    with pytest.warns(UserWarning, match="span more powers of two"):
        report = convert_checkpoint(path, tmp_path / "d", Options(), progress=False)
    said = r"9 MXFP4 matrices cast to NVFP4, \d of them with a relative error of at most \d.*e-\d+$"
    assert any(re.search(said, line) for line in report.lines())


@pytest.mark.slow
def test_files_of_the_tools_themselves(tmp_path):
    """Values are those that compressed-tensors and ModelOpt decompress."""
    if not all(map(importlib.util.find_spec, ("compressed_tensors", "modelopt"))):
        pytest.skip("compressed-tensors or nvidia-modelopt is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    scheme = QuantizationConfig.model_validate(CONFIGS["compressed-tensors"]).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    path, values = source(tmp_path / "ct", "compressed-tensors", layers=1)
    found = tensors(path)
    for stem, want in values.items():
        state = {last: found[f"{stem}.{last}"] for last in ("weight_packed", "weight_scale")}
        assert torch.equal(compressor.decompress(state, scheme)["weight"].float(), want), stem
    files, values = {"lm_head.weight": torch.randn(32, 64).bfloat16()}, {}
    for name, tensor in experts(E=2, I=32, H=64).items():
        if ".experts." in name:
            q, scale = MXFP4QTensor.quantize(tensor, 32)
            stem = name.removesuffix(".weight")
            values[stem] = q.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
            files |= {name: q._quantized_data, f"{name}_scale": scale.view(tensor.shape[0], -1)}
    made = folder(tmp_path / "a", files, {"quantization_config": CONFIGS["modelopt"]})
    found = tensors(converted(made, tmp_path / "b"))
    for stem, want in values.items():
        assert torch.equal(value(found, stem), want), stem


@tools
def test_damaged_files_are_named(tool, tmp_path):
    path, _ = source(tmp_path / "a", tool, layers=1)
    good, stem = tensors(path), "model.layers.0.mlp.experts.1.up_proj"
    scale = f"{stem}.{'scale' if tool == 'deepseek' else 'weight_scale'}"
    config = {"quantization_config": CONFIGS[tool], "num_experts": 3}
    nan = good[scale].view(torch.uint8).clone().fill_(255).view(good[scale].dtype)
    for i, (change, message) in enumerate((
        ({scale: good[scale][:, :1].contiguous()}, r"up_proj.* is no MXFP4 matrix \(\[N, K/2\] codes"),
        ({scale: good[scale].reshape(-1)[0].clone()}, "up_proj.* is no MXFP4 matrix"),
        ({scale: nan}, "up_proj: an MXFP4 scale is NaN"),
        ({scale: None}, "up_proj"),
    )):  # fmt: skip
        files = {n: t for n, t in {**good, **change}.items() if t is not None}
        with pytest.raises(ValueError, match=message):
            converted(folder(tmp_path / f"b{i}", files, config), tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has no DeepSeek V4")
def test_deepseek_v4_as_it_is_published(tmp_path):
    """Experts MXFP4 with codes as int8 and scales named `scale`, FP8 in blocks with `scale` elsewhere."""
    make(deepseek_v4).save_pretrained(tmp_path / "bf16")
    files, twin, count = {}, {}, 0
    for key, tensor in tensors(tmp_path / "bf16").items():
        twin[key], name = tensor.float(), key.removeprefix("model.")
        stem = name.removesuffix(".weight")
        if ".experts." in key:
            codes, scales, twin[key] = random(*tensor.shape, 121, 125)
            files |= stored("deepseek", stem, codes, scales)
            count += 1
        elif re.search(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123])\.weight$", key):
            files[name], scale, twin[key] = fp8("block", tensor.float(), power_of_two=True)
            files[f"{stem}.scale"] = scale.to(torch.float8_e8m0fnu)
        else:
            files[name] = tensor
    original = config_of(tmp_path / "bf16")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    path = write(tmp_path / "a", files, original, quantization)
    report = convert_checkpoint(path, tmp_path / "b", Options(), progress=False)
    assert report.quantized == report.cast.matrices == count and report.cast.lost == 0
    dense = load(write(tmp_path / "twin", twin, {**original, "dtype": "float32"}, None), torch.float32)
    assert relative_error(logits(load(tmp_path / "b", torch.float32)), logits(dense)) < 10 * THRESHOLDS["fp32"]
    assert verify_checkpoint(tmp_path / "b", path).warnings == []


def test_forms_that_are_not_read(tmp_path):
    files = tensors(source(tmp_path / "a", "quark", layers=1)[0])
    rotated = {**CONFIGS["compressed-tensors"], "transform_config": {"config_groups": {"R1": {}}}}
    with pytest.raises(ValueError, match="mxfp4-pack-quantized with transforms .rotations. is not read"):
        converted(folder(tmp_path / "b", files, {"quantization_config": rotated}), tmp_path / "c")
    for i, weight in enumerate(({"dtype": "int4", "group_size": 32}, ["fp4"], 4)):
        other = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
        with pytest.raises(ValueError, match="is quantized with 'quark'; this library reads fp8 .in blocks., MXFP4"):
            converted(folder(tmp_path / f"d{i}", files, {"quantization_config": other}), tmp_path / "c")


def test_steps_that_quark_took_before(tmp_path):
    """Those that are in the weights change nothing here; those that a model computes as it runs are refused."""
    files = tensors(source(tmp_path / "a", "quark", layers=1)[0])

    def of(*steps):
        settings = {"quantization_config": {**CONFIGS["quark"], "algo_config": [*steps]}, "num_experts": 3}
        return folder(tmp_path / f"{len(list(tmp_path.iterdir()))}", files, settings)

    rotation = {"name": "rotation", "r1": True, "r2": True, "r3": False, "r4": False, "online_r1_rotation": False}
    wanted = converted(tmp_path / "a", tmp_path / "plain")
    for i, steps in enumerate(([], [{"name": "awq"}], [{"name": "autosmoothquant"}, rotation])):
        same_files(converted(of(*steps), tmp_path / f"b{i}"), wanted)
    for step, said in (({"r4": True}, "rotation, r4"), ({"online_r1_rotation": True}, "rotation, online_r1_rotation"),
                       ({"name": "svdquant"}, "svdquant")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"Quark's algo_config \({said}\) needs more than weights"):
            converted(of({"name": "gptq"}, rotation | step), tmp_path / "c")
