"""Tensors of more than 2**31 elements: the last CTA of a launch that reaches their ends, against the same rows alone.

Hardly any part of the tensors is in memory, so an address that wraps around is an error.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
pytest.importorskip("tvm_ffi", reason="the kernels' host code is TVM-FFI's")
if shutil.which("cc") is None:
    pytest.skip("the emulator links the compiled host code with cc", allow_module_level=True)

from cutlass import Int32

from moe_nvfp4 import Gate
from moe_nvfp4.kernels.sm100 import backend as sm100
from moe_nvfp4.kernels.sm100 import epilogue, rows
from moe_nvfp4.kernels.sm100.config import (
    CombineConfig,
    DenseTile,
    GemmConfig,
    InterleaveConfig,
    QuantizeConfig,
    TileShape,
    interleaved_width,
)
from tests.emulator import PTX_ONLY, Emulated, EmulatorError, compiling_for
from tests.emulator.launch import Far

pytestmark = pytest.mark.slow
ROWS = 40  # rows that are in memory, at the end
TILE = TileShape(64, 1)


def compiled(config):
    with compiling_for("sm_100a"):
        return Emulated(sm100.compile_kernel(config, PTX_ONLY))


def random_bytes(*shape, low=0, high=256):
    return np.random.default_rng(0).integers(low, high, shape, np.uint8)


def at_end(shape, array):
    """A tensor of which only the last elements are in memory: those of `array`."""
    return Far(shape, {int(np.prod(shape, dtype=object)) - array.size: array})


class Problem:
    """The arguments of a GEMM whose last expert has ROWS rows, and whose first has `before`. Of the weights only what
    the last CTA reads is in memory."""

    def __init__(self, config, before):
        c, R = config, before + ROWS
        words = {"nvfp4": c.rows // 8, "assignments": c.width, "float32": c.width}.get(c.out, c.width // 2)
        sf_tiles, sf_columns = -(-before // 128), -(-c.rows // 64)
        self.out = np.full((ROWS, words), 0xFFFFFFFF, np.uint32)
        self.out_sf = np.zeros(sf_columns * 512, np.uint8)
        pad = 8  # rows, so that windows are multiples of 16 bytes
        N, of_expert = c.matrix_rows, c.sf_row_tiles * c.k_steps * 512
        codes, sf = random_bytes(N * c.k // 2), random_bytes(of_expert, low=0x30, high=0x40)
        weights = (
            Far((N, c.k // 2, c.experts), {(c.experts - 1) * codes.size: codes}, (c.k // 2, 1, codes.size)),
            at_end((c.experts * of_expert,), sf),
        )
        scale = torch.full((c.experts,), 0.01)
        offsets = torch.tensor([0] + [before] * (c.experts - 1) + [R], dtype=torch.int32)
        out, order = at_end((c.parts * R, words), self.out), at_end((R,), np.arange(before - pad, R, dtype=np.int32))
        grid = c.row_tiles * (-(-before // c.tile.tokens) + 1) * c.parts
        if c.dense:
            x = np.random.default_rng(1).integers(0x3C00, 0x4200, (ROWS, c.k)).astype(np.uint16).view(np.uint8)
            self.arguments = *weights, at_end((R, 2 * c.k), x), offsets, *[scale] * 3, out, order, grid
            return
        x_sf = random_bytes(c.k_steps * 512, low=0x30, high=0x40)
        self.arguments = (
            *weights,
            at_end((R, c.k // 2), random_bytes(ROWS, c.k // 2)),
            at_end(((sf_tiles + 1) * x_sf.size,), x_sf),
            at_end((R,), np.linspace(1, 2, ROWS + pad, dtype=np.float32)),
            offsets,
            *[scale] * 3,
            out,
            at_end(((sf_tiles + 1) * self.out_sf.size,), self.out_sf),
            at_end((R,), np.zeros(ROWS + pad, np.float32)),
            scale,
            order,
            grid,
        )

    def run(self, kernel):
        """Run the last CTA, and return what it stores."""
        kernel(*self.arguments, only=[self.arguments[-1] - 1], schedule="lazy")
        return self.out.copy(), self.out_sf.copy()


# (config, numbers of the arguments with more than 2**31 elements, rows before the last expert's)
GEMMS = {
    "rows": (GemmConfig(2, 1024, 8256, 1, "assignments", None, None, TILE), (2, 3, 9), 1 << 22),
    "nvfp4": (GemmConfig(2, 8320, 32, 2, "nvfp4", Gate(), None, TileShape(64, 2)), (9, 10), 1 << 22),
    "weights": (GemmConfig(1030, 16384, 2048, 1, "assignments", None, None, TILE), (0, 1), 0),
    "bf16 rows": (GemmConfig(2, 1024, 8256, 1, "assignments", None, None, DenseTile(64, 1)), (2, 7), 1 << 22),
    "bf16 h": (GemmConfig(2, 8320, 32, 2, "interleaved", Gate(), None, DenseTile(64, 2)), (7,), 1 << 22),
    "bf16 parts": (GemmConfig(2, 1024, 1024, 1, "assignments", None, None, DenseTile(64, 1), 2), (2, 7), 1 << 21),
    "bf16 weights": (GemmConfig(1030, 16384, 2048, 1, "assignments", None, None, DenseTile(64, 1)), (0, 1), 0),
}


@pytest.mark.parametrize("name", GEMMS)
def test_gemm(name, monkeypatch):
    config, numbers, before = GEMMS[name]
    large = Problem(config, before)
    assert all(np.prod(large.arguments[number].shape, dtype=object) > 1 << 31 for number in numbers)
    few, kernel = replace(config, experts=2), compiled(config)
    found = large.run(kernel)
    expected = Problem(few, 0).run(kernel if few == config else compiled(few))
    assert (expected[0] != 0xFFFFFFFF).any() and (config.out != "nvfp4" or expected[1].any())
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    if {7, 9} & {*numbers}:  # loads use TMA, which computes the addresses
        monkeypatch.setattr(epilogue, "Int64", Int32)
        with pytest.raises(EmulatorError, match="is in no buffer|outside of"):
            Problem(config, before).run(compiled(config))


def test_quantize_rows(monkeypatch):
    """x and its codes have more than 2**31 elements or words, and the scales as many bytes."""
    config = QuantizeConfig(2, 8208, "bfloat16", False, True)

    def run(before, kernel):
        R, columns = before + ROWS, -(-config.k // 64) * 4
        x = np.random.default_rng(1).integers(0x3C00, 0x4200, (ROWS, config.k)).astype(np.uint16)
        codes, sf = np.zeros((ROWS, config.k // 8), np.uint32), np.zeros(128 * columns, np.uint8)
        source = at_end((R, config.k), x)
        source.dtype = "bfloat16"
        arguments = (
            source,
            at_end((R,), np.zeros(ROWS + 8, np.int32)),
            torch.full((2,), 0.5),
            torch.tensor([0, before, R], dtype=torch.int32),
            at_end((R, config.k // 8), codes),
            at_end(((-(-before // 128) + 1) * sf.size,), sf),
            at_end((R,), np.zeros(ROWS + 8, np.float32)),
        )
        kernel(*arguments, only=[R - 1])
        return codes, sf

    kernel = compiled(config)
    found, expected = run(1 << 22, kernel), run(0, kernel)
    assert all(np.array_equal(a, b) and b.any() for a, b in zip(found, expected, strict=True))
    monkeypatch.setattr(rows, "Int64", Int32)
    with pytest.raises(EmulatorError, match="is in no buffer|outside of"):
        run(1 << 22, compiled(config))


def test_interleave_rows(monkeypatch):
    """x and its copy have more than 2**31 elements."""
    config = InterleaveConfig(4112, False)

    def run(before, kernel):
        R, width = before + ROWS, interleaved_width(config.k) // 2
        x = np.random.default_rng(1).integers(0, 1 << 32, (ROWS, config.k // 2), np.uint32)
        out = np.zeros((ROWS, width), np.uint32)
        index = at_end((R,), np.zeros(ROWS + 8, np.int32))
        kernel(at_end((R, config.k // 2), x), index, at_end((R, width), out), only=[R - 1])
        return out

    kernel = compiled(config)
    found, expected = run(1 << 21, kernel), run(0, kernel)
    assert np.array_equal(found, expected) and expected.any()
    monkeypatch.setattr(rows, "Int64", Int32)
    with pytest.raises(EmulatorError, match="is in no buffer|outside of"):
        run(1 << 21, compiled(config))


def test_combine(monkeypatch):
    config = CombineConfig(2, 1024, "float32", "bfloat16")

    def run(tokens, kernel):
        y = np.zeros((1, config.hidden), np.uint16)
        slots = np.random.default_rng(2).normal(size=(2, config.hidden)).astype(np.float32)
        out = at_end((tokens, config.hidden), y)
        out.dtype = "bfloat16"
        weights = at_end((tokens, 2), np.array([0, 0, 0.5, -2], np.float32))
        kernel(at_end((2 * tokens, config.hidden), slots), weights, out, only=[2 * tokens - 1, tokens - 1])
        return y

    kernel = compiled(config)
    found, expected = run(1 << 22, kernel), run(2, kernel)
    assert np.array_equal(found, expected) and expected.any()
    monkeypatch.setattr(rows, "Int64", Int32)
    with pytest.raises(EmulatorError, match="is in no buffer|outside of"):
        run(1 << 22, compiled(config))
