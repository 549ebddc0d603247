"""Single linears by the Blackwell kernels, on the emulator, against float64. Bounds as in `test_sm100`."""

from copy import deepcopy

import pytest
import torch

from moe_nvfp4 import backends, reference
from moe_nvfp4 import format as nvfp4
from moe_nvfp4.kernels.backend import Device, Problem
from moe_nvfp4.kernels.sm100 import BACKEND
from moe_nvfp4.kernels.sm100 import backend as sm100
from moe_nvfp4.kernels.sm100.config import DenseTile, TileShape
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.routing import Groups
from tests.kernels.test_sm100 import UNIT, check_close, emulator, exact_sums  # noqa: F401

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def random_linear(N, K, activations="bf16", static=False, bias=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    linear = NVFP4Linear(K, N, bias, activations)
    linear.weight.copy_(torch.randint(256, linear.weight.shape, generator=g))
    linear.weight_sf.copy_(torch.randint(0x50, linear.weight_sf.shape, generator=g))
    linear.weight_global_scale.fill_(2e-3)
    if bias is not None:
        linear.bias.data.normal_(generator=g)
    if static:
        linear.set_input_scales(torch.tensor(4e-3))
    return linear


def prepared(linear):
    """A copy of a linear in the kernels' layout."""
    linear = deepcopy(linear)
    linear._prepare_for(backends.Selected("sm100", BACKEND.layout))
    assert linear.packed
    return linear


CASES = {  # N, K, T, dtype of x, of the bias, static scale, tile, parts of K
    "W4A16": ("bf16", 144, 80, 5, BF16, None, False, None, 1),
    "W4A16, three parts": ("bf16", 272, 592, 3, BF16, BF16, False, DenseTile(64, 1), 3),
    "W4A16, two parts, one token": ("bf16", 128, 512, 1, BF16, None, False, DenseTile(64, 2), 2),
    "W4A16, 133 tokens": ("bf16", 256, 272, 133, BF16, FP32, False, DenseTile(128, 2), 1),
    "W4A4, static": ("nvfp4", 144, 272, 5, BF16, BF16, True, TileShape(64, 1), 1),
    "W4A4, dynamic, a pair": ("nvfp4", 272, 144, 70, FP16, None, False, TileShape(64, 1, 2), 1),
    "W4A4, fp32": ("nvfp4", 128, 80, 3, FP32, FP32, False, TileShape(128, 2), 1),
    "four over six": ("nvfp4_four_over_six", 144, 80, 6, BF16, None, False, None, 1),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", CASES)
def test_linears(emulator, name):  # noqa: F811
    activations, N, K, T, dtype, bias, static, tile, parts = CASES[name]
    linear = random_linear(N, K, activations, static, bias)
    plain, packed = linear.weights, prepared(linear).weights
    x = torch.randn(T, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    emulator.tile, emulator.parts, emulator.schedule = tile, parts, "reverse-lazy"
    y = sm100.linear(x, packed)
    emulator.schedule, emulator.multiprocessors = "random:3", 2
    assert torch.equal(sm100.linear(x, packed), y)

    m = plain.matrix.stacked()
    if plain.quantized:
        groups = Groups(torch.arange(T, dtype=torch.int32), torch.tensor([0, T], dtype=torch.int32), 1)
        rows = reference.quantize_rows(x, None, plain.input_scale, groups, plain.four_over_six)
        exact, size = exact_sums(rows, m.codes, m.sf, groups)
        scale = rows.scale.double()[:, None]
    else:
        values = nvfp4.dequantize(m.codes[0], m.sf[0], None).double()
        exact, size, scale = x.double() @ values.T, x.double().abs() @ values.T.abs(), 1.0
    exact, size = exact * scale * 2e-3, size * scale * 2e-3
    if bias is not None:
        exact, size = exact + m.bias.double(), size + m.bias.double().abs()
    assert y.shape == (T, N) and y.dtype == dtype
    check_close(y, exact, size * ((K + 8) * UNIT), torch.ones(T, dtype=torch.bool))


def test_weights_come_back():
    plain = random_linear(144, 80)
    linear = prepared(plain)
    assert linear.weights.matrix.sf is None
    windows = [
        BACKEND.dequantize(w.weights.matrix.stacked(), slice(0, 1), slice(64, 80), FP32) for w in (plain, linear)
    ]
    assert torch.equal(*windows)
    linear.unpack()
    assert all(torch.equal(p, plain.state_dict()[name]) for name, p in linear.state_dict().items())


def test_no_tokens(monkeypatch):
    monkeypatch.setattr(sm100, "launch", lambda *arguments: pytest.fail("a launch"))
    assert sm100.linear(torch.empty(0, 80, dtype=BF16), prepared(random_linear(144, 80)).weights).shape == (0, 144)


def test_who_runs_them():
    blackwell = Device("cuda", "B200", (10, 0), frozenset({"cutlass", "tvm_ffi", "triton"}))
    for dtype, N, K, activations, runs in (
        (BF16, 4096, 2048, "bf16", "sm100"),
        (FP16, 4096, 2048, "bf16", "portable"),
        (FP16, 4096, 2048, "nvfp4", "sm100"),
        (BF16, 1000, 2048, "bf16", "portable"),
    ):
        problem = Problem("linear", 1, N, K, "", activations, dtype)
        assert backends.explain(problem, blackwell).backend.name == runs, problem
