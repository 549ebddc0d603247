"""The numbers of `moe_nvfp4.kernels.sm100.model`, compared with counts from the emulator, for each kind of tile."""

import shutil

import pytest
import torch

from moe_nvfp4.kernels.sm100 import backend as sm100
from moe_nvfp4.kernels.sm100.config import SF_TILE, DenseTile, GemmConfig, TileShape
from moe_nvfp4.kernels.sm100.model import Launch, of_chunk, of_step
from moe_nvfp4.weights import Gate
from tests.emulator import PTX_ONLY, Emulated, compiling_for
from tests.emulator.counts import counting, cycles

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the emulator links compiled host code with cc")
KINDS = [  # activations, projections, what leaves, tile
    ("bf16", 1, "assignments", DenseTile(64, 1)),
    ("nvfp4", 2, "bfloat16", TileShape(128, 2)),
    ("bf16", 2, "interleaved", DenseTile(128, 1)),
    ("bf16", 1, "assignments bfloat16", DenseTile(128, 2)),
    ("nvfp4", 2, "nvfp4", TileShape(256, 1, 2)),
    ("nvfp4", 1, "bfloat16", TileShape(128, 1, 2)),
    ("nvfp4", 1, "assignments", TileShape(64, 1)),
    ("nvfp4", 1, "assignments bfloat16", TileShape(256, 1, 2)),
]


def counts(config, rows):
    """Counts of a tile with so many tokens, all zeros."""
    c, (E, R) = config, (1, rows)
    fields = {"nvfp4": c.rows // 8, "assignments": c.width, "float32": c.width}
    byte = lambda *shape: torch.zeros(shape, dtype=torch.uint8)
    weights = byte(E, c.rows * c.projections, c.k // 2).permute(1, 2, 0)
    weights_sf = byte(E * c.sf_row_tiles * c.k_steps * SF_TILE)
    offsets, one = torch.tensor([0, R], dtype=torch.int32), torch.ones(E)
    out = torch.zeros(R, fields.get(c.out, c.width // 2), dtype=torch.int32).view(torch.uint32)
    order, sf_tiles = torch.arange(R, dtype=torch.int32), -(-R // 128) + E
    if c.dense:
        arguments = (weights, weights_sf, byte(R, c.k * 2), offsets, one, one, one, out, order)
    else:
        rows_sf, out_sf = byte(sf_tiles * c.k_steps * SF_TILE), byte(sf_tiles * -(-c.rows // 64) * SF_TILE)
        arguments = (weights, weights_sf, byte(R, c.k // 2), rows_sf, torch.ones(R), offsets, one, one, one,
                     out, out_sf, torch.zeros(R), one, order)  # fmt: skip
    with compiling_for("sm_100a"):
        kernel = KERNELS.get(c) or Emulated(sm100.compile_kernel(c, PTX_ONLY))
    KERNELS[c] = kernel
    with counting() as found:
        kernel(*arguments, c.tile.ctas, trace=found)
    return found


KERNELS = {}


@pytest.mark.slow
@pytest.mark.parametrize("activations, projections, out, tile", KINDS)
def test_counts(activations, projections, out, tile):
    """Twice the K shows what a step takes, two more chunks what a chunk takes. Bytes equal the model's; instructions
    nearly do, as a compiler may arrange them otherwise from one size to the next."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    pytest.importorskip("tvm_ffi", reason="the kernels' host code is TVM-FFI's")
    rows = 128 * tile.ctas * tile.blocks // projections
    gate = Gate() if projections == 2 else None
    short, long = (GemmConfig(1, rows, k, projections, out, gate, None, tile) for k in (256, 512))
    width = tile.tokens  # whole boxes of tokens are copied
    launch = Launch((width,), rows, 512, projections, out, 2, tile, activations)
    step, chunk = of_step(tile, activations, width), of_chunk(launch)
    mma = 18 if activations == "bf16" else 10  # its warp
    one, two = counts(short, width), counts(long, width)
    per_step = lambda count: (count(two) - count(one)) / 4
    assert per_step(lambda c: sum(c.shared.values())) == step.shared * tile.ctas
    assert per_step(lambda c: c.of_warp(mma)) == pytest.approx(step.instructions, rel=0.1)
    if activations == "bf16":
        assert per_step(lambda c: sum(map(c.of_warp, range(8, 16)))) == pytest.approx(step.slots, rel=0.04)
    less = counts(long, width - 2 * long.chunk)
    exchanged = sum(two.shared[what] - less.shared[what] for what in ("loads", "stores")) / 2
    assert exchanged == chunk.shared * tile.ctas
    # two groups of four warps store chunks in turn
    assert 4 * (two.of_warp(2) - less.of_warp(2)) == pytest.approx(chunk.slots, rel=0.03)


def test_cycles_of_shared_memory():
    """Banks are words of 4 bytes; lanes that read the same word read it once."""
    import numpy as np

    lanes = np.arange(32)
    assert cycles(4 * lanes, 4) == 1
    assert cycles(8 * lanes, 4) == 2
    assert cycles(128 * lanes, 4) == 32
    assert cycles(0 * lanes, 16) == 1
    assert cycles(16 * lanes, 16) == 4
    assert cycles(16 * (lanes // 8), 4) == 1
