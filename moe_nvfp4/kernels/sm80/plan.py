"""How a layer or a linear runs by sm_80 instructions: the tiles of its GEMMs, by number of tokens, sizes and GPU."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch

from moe_nvfp4.kernels.backend import Gpu
from moe_nvfp4.kernels.sm80.config import FEW, TileShape
from moe_nvfp4.kernels.sm90.pack import UNIT
from moe_nvfp4.kernels.sm90.plan import EXACT_BYTES, expected

# Bytes of shared memory of a multiprocessor. Each CTA needs 1 KiB besides its own.
SHARED = {(8, 0): 164 << 10, (8, 6): 100 << 10, (8, 9): 100 << 10, (9, 0): 228 << 10, (12, 0): 100 << 10}

# By number of tokens, in order of preference: the first that fits into shared memory runs. Measured on an H200.
_SHAPES = {
    16: (
        TileShape(2, WM=1, WK=4, stages=3, ctas=4),
        TileShape(2, WM=1, WK=4, stages=3, ctas=3),
        TileShape(2, WM=1, WK=4, stages=2, ctas=2),
    ),
    32: (
        TileShape(4, WM=2, WK=2, KB=2, stages=4, ctas=3, small=2),
        TileShape(4, WM=2, WK=2, KB=2, stages=3, ctas=3, small=2),
        TileShape(4, WM=2, WK=2, KB=2, stages=2, ctas=2, small=2),
    ),
    48: (
        TileShape(6, WM=2, WK=2, KB=2, stages=5, ctas=2, small=4),
        TileShape(6, WM=2, WK=2, KB=2, stages=3, ctas=2, small=4),
        TileShape(6, WM=2, WK=2, KB=2, stages=2, ctas=2, small=4),
    ),
    96: (
        TileShape(12, WM=8, MF=2, KB=2, stages=4, small=8),
        TileShape(12, WM=8, MF=2, KB=2, stages=3, small=8),
        TileShape(12, WM=8, MF=2, KB=2, stages=2, small=8),
    ),
    128: (
        TileShape(16, WM=8, MF=2, KB=4, stages=2, small=4),
        TileShape(16, WM=8, MF=2, KB=2, stages=3, small=4),
        TileShape(16, WM=8, MF=2, KB=1, stages=3, small=4),
    ),
}
FEW_ROWS = 6  # per expert: up to here memory is the limit, and the smallest tiles have most CTAs
# For a linear that has fewer tiles than the GPU multiprocessors: more warps split K. For more columns, sharing tiles is
# faster.
_DEEP = tuple(TileShape(2, WM=1, WK=8, KB=8, stages=stages) for stages in (6, 4, 2))
DEEP_K = 8192
# Clocks that a quarter of a multiprocessor takes for a fragment of 16 x 16 weights in a tile of so many tokens, and in
# one of at most `small` tokens: what the times of layers on an H200 say.
_COST = {16: (35, 35), 32: (50, 33), 48: (70, 50), 96: (112, 80), 128: (146, 95)}
_CLOCK = 1755  # of an H200, MHz


class Gemm(NamedTuple):
    """A tile, and whether CTAs share the last tiles."""

    tile: TileShape
    shares: bool

    def grid(self, tiles: int, K: int, gpu: Gpu) -> int:
        """How many CTAs to launch for at most so many tiles."""
        pieces = tiles * -(-K // (64 * self.tile.KB)) if self.shares else tiles
        return min(gpu.multiprocessors * self.tile.ctas, pieces)


class LayerPlan(NamedTuple):
    """up, down: GEMM 1 and GEMM 2, with tiles of equal numbers of tokens; few: whether assignments stay unsorted;
    rows: dtype of GEMM 2's output."""

    up: Gemm
    down: Gemm
    few: bool
    rows: torch.dtype


@lru_cache(maxsize=4096)
def plan_experts(E: int, H: int, I: int, gated: bool, rows: int, gpu: Gpu) -> LayerPlan:
    """The plan for `rows` assignments to E experts, under the assumption of uniform routing."""
    hit = E * (1 - (1 - 1 / E) ** rows)
    BN = 16
    if rows > FEW_ROWS * hit:
        BN = min(_SHAPES, key=lambda BN: expected(lambda n: _cost(BN, n), rows / hit))
    few = rows <= min(E, FEW) and BN == 16
    tile, token_tiles = _fitting(_SHAPES[BN], gpu), hit * expected(lambda n: -(-n // BN), rows / hit)
    up = Gemm(tile, BN > 16 and _shares(tile, token_tiles, -(-I // (UNIT // 2 if gated else UNIT)), H, gpu))
    down = Gemm(tile, _shares(tile, token_tiles, -(-H // UNIT), I, gpu))
    exact = rows * H * 4 <= EXACT_BYTES
    return LayerPlan(up, down, few, torch.float32 if exact else torch.bfloat16)


@lru_cache(maxsize=4096)
def plan_linear(N: int, K: int, T: int, gpu: Gpu) -> Gemm:
    """The plan for x [T, K] · wᵀ."""
    BN = 16 if T <= 16 else min(_SHAPES, key=lambda BN: _cost(BN, T))
    if BN == 16 and -(-N // UNIT) <= gpu.multiprocessors and K <= DEEP_K:
        return Gemm(_fitting(_DEEP, gpu), False)
    tile = _fitting(_SHAPES[BN], gpu)
    return Gemm(tile, _shares(tile, -(-T // BN), -(-N // UNIT), K, gpu))


def _shares(tile: TileShape, token_tiles: float, units: int, K: int, gpu: Gpu) -> bool:
    """Whether CTAs share the last tiles. That costs some microseconds, and saves most of the time that multiprocessors
    would be idle while others compute a last tile; at least a quarter of a tile's time, as CTAs do not keep in step."""
    waves = token_tiles * -(-units // tile.units) / (gpu.multiprocessors * tile.ctas)
    time = _COST[tile.BN][0] * tile.rows * K / 1024 / _CLOCK
    return max(ceil(waves) - waves, 0.25) * time > (4 if tile.BN == 16 else 20)


def _fitting(shapes: tuple[TileShape, ...], gpu: Gpu) -> TileShape:
    return next(t for t in shapes if t.ctas * (t.shared_bytes + 1024) <= SHARED[gpu.capability])


def _cost(BN: int, n: int) -> int:
    """The cost of an expert with n tokens."""
    full, rest = divmod(n - 1, BN)
    whole, small = _COST[BN]
    return full * whole + (small if rest < 8 * _SHAPES[BN][0].small else whole)
