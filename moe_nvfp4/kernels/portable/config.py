"""TileShape shapes by number of tokens, measured on an H200 with the sm_80 code that all GPUs share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from moe_nvfp4.kernels.common import ahead

EXACT_BYTES = 1 << 24  # expert outputs up to this size are kept in fp32
# Up to this many assignments are not sorted: the GEMMs' programs search for their rows themselves. That saves 2 to 3
# us, but every program pays for it: beyond 12 programs of GEMM 1 per multiprocessor it costs more (H200, 2026-11-22).
FEW = 32
MAX_ROWS = ahead.MAX_ROWS  # assignments at a time: bounds the memory between the kernels
_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
GATED = ("silu", "gelu_tanh")  # gates for which one tile computes both products


@dataclass(frozen=True)
class TileShape:
    """BN weight rows times BK columns, computed by `warps` warps with `stages` stages of loads in flight."""

    BN: int
    BK: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """BM tokens per tile; the tiles of GEMM 1 and GEMM 2; parts of GEMM 2's K; token tiles that run in a row on the
    same weights.

    most_ids: 0 if a kernel sorts the assignments; else they stay unsorted, and there are at most this many.
    """

    BM: int
    up: TileShape
    down: TileShape
    splits: int = 1
    group: int = 1
    most_ids: int = 0
    rows: torch.dtype = torch.float32  # of GEMM 2's output


# For up to this many rows per expert with rows: BM, GEMM 1's tile, GEMM 2's tile, group. (16.5, because a mean of 16
# over all experts is a little more over those with rows.)
_TILES = (
    (6, 8, TileShape(32, 256, 2, 3), TileShape(64, 256, 4, 3), 1),
    (12.5, 16, TileShape(64, 128, 4, 3), TileShape(64, 128, 4, 3), 8),
    (16.5, 16, TileShape(64, 128, 2, 3), TileShape(128, 128, 4, 3), 8),
    (40, 32, TileShape(64, 128, 2, 3), TileShape(128, 128, 4, 3), 8),
    (float("inf"), 64, TileShape(64, 128, 4, 3), TileShape(128, 128, 4, 3), 8),
)


# The same where tensor cores multiply NVFP4 by NVFP4. Not measured: the tiles are as large as registers allow.
_NATIVE_TILES = (
    (6, 8, TileShape(32, 256, 2, 3), TileShape(64, 256, 4, 3), 1),
    (12, 16, TileShape(64, 128, 4, 3), TileShape(64, 128, 4, 3), 8),
    (40, 32, TileShape(64, 128, 4, 3), TileShape(128, 128, 4, 3), 8),
    (100, 64, TileShape(64, 128, 4, 3), TileShape(128, 128, 4, 3), 8),
    (float("inf"), 128, TileShape(128, 128, 8, 3), TileShape(128, 128, 8, 3), 8),
)


@lru_cache(maxsize=4096)
def plan_experts(E: int, H: int, I: int, rows: int, dtype: torch.dtype, sms: int, native: bool = False) -> Plan:
    """The plan for `rows` assignments to E experts, under the assumption of uniform routing."""
    hit = _experts_hit(E, rows)
    BM, up, down, group = _tiles(rows / hit, native)
    tiles = hit * max(1, round(rows / hit / BM)) * -(-H // down.BN)
    splits = split_k(I, down, tiles, sms)
    exact = splits > 1 or rows * H * 4 <= EXACT_BYTES
    few = rows <= min(E, FEW) and rows * -(-I // up.BN) <= 12 * sms
    return Plan(BM, up, down, splits, group, FEW if few else 0, torch.float32 if exact else dtype)


@lru_cache(maxsize=4096)
def plan_linear(N: int, K: int, rows: int, sms: int, native: bool = False) -> tuple[int, TileShape, int]:
    """(BM, tile, parts of K) for a linear."""
    BM, _, tile, _ = (
        _tiles(rows, native) if rows > 16 else (8 if rows <= 8 else 16, None, TileShape(64, 256, 4, 3), None)
    )
    return BM, tile, split_k(K, tile, -(-rows // BM) * -(-N // tile.BN), sms)


def dense_pays(E: int, rows: int, capability: tuple[int, int] | None) -> bool:
    """Whether torch's grouped product over dequantized weights is faster: for large batches, where torch has kernels.

    On an H200 (2026-11-22) it is from 200 (Mixtral) to 310 (gpt-oss) rows per expert on. So it is for NVFP4 rows: 2699
    us against 2839 for 256 rows per expert (Mixtral), 5874 against 10185 for 1024.
    """
    return capability is not None and capability[0] in (9, 10) and rows >= 256 * _experts_hit(E, rows)


def multiplies_nvfp4(capability: tuple[int, int] | None) -> bool:
    """Whether Triton compiles NVFP4 times NVFP4 to the tensor cores' own instruction, `mma.sync` with block scales."""
    return capability == (12, 0) or capability == (12, 1) and _TRITON >= (3, 9)  # 3.6 fails for 12.1


def linear_limit(capability: tuple[int, int] | None) -> int:
    """The most tokens for which a linear dequantizes in its loop; for more, torch multiplies dequantized weights."""
    return 128 if capability is not None and capability[0] in (9, 10) else 512


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n > 0. (Triton's own function takes 10 us.)"""
    return 1 << (n - 1).bit_length()


def _experts_hit(E: int, rows: int) -> float:
    """How many experts have rows, on average, under uniform routing."""
    return E * (1 - (1 - 1 / E) ** rows)


def _tiles(rows: float, native: bool) -> tuple[int, TileShape, TileShape, int]:
    """(BM, GEMM 1's tile, GEMM 2's tile, group) for this many rows per expert."""
    return next(entry[1:] for entry in (_NATIVE_TILES if native else _TILES) if rows <= entry[0])


def split_k(K: int, tile: TileShape, tiles: float, sms: int) -> int:
    """How many parts of K to use if tiles are too few for the GPU; each part has enough blocks to fill the stages."""
    splits = 1
    while tiles * splits < 5 * sms and K >= 6 * splits * tile.BK and splits < 4:
        splits *= 2
    return splits


def part_of(K: int, splits: int, BK: int) -> int:
    """How many columns of K a part has: whole blocks of BK."""
    return -(-K // splits // BK) * BK
