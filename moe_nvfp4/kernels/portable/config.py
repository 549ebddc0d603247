"""Tile shapes from the number of tokens: measured on an H200 by its sm_80 code, which all GPUs share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from moe_nvfp4.kernels.common import ahead

EXACT_BYTES = 1 << 24  # expert outputs up to this size are kept in fp32
# Up to so many assignments are not sorted: the GEMMs' programs look for their rows themselves. That saves 2 to 3 us,
# but every program pays: beyond 12 of GEMM 1's for each multiprocessor it costs more (H200, 2026-11-22).
FEW = 32
MAX_ROWS = ahead.MAX_ROWS  # assignments at a time: bounds the memory between the kernels
_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
GATED = ("silu", "gelu_tanh")  # kinds of gates whose two products one tile computes


@dataclass(frozen=True)
class Tile:
    """BN weight rows times BK columns, by `warps`, with `stages` of loads in flight."""

    BN: int
    BK: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """BM tokens a tile; GEMM 1's tile, GEMM 2's, parts of GEMM 2's K, token tiles that follow one another.

    most_ids: without a kernel that sorts assignments, of which there are at most so many; 0: sorted.
    """

    BM: int
    up: Tile
    down: Tile
    splits: int = 1
    group: int = 1
    most_ids: int = 0
    rows: torch.dtype = torch.float32  # of GEMM 2's output


# Up to so many rows of an expert that has any: BM, GEMM 1's tile, GEMM 2's tile, group. (Where the mean is 16, it is a
# little above 16.)
_TILES = (
    (6, 8, Tile(32, 256, 2, 3), Tile(64, 256, 4, 3), 1),
    (12.5, 16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3), 8),
    (16.5, 16, Tile(64, 128, 2, 3), Tile(128, 128, 4, 3), 8),
    (40, 32, Tile(64, 128, 2, 3), Tile(128, 128, 4, 3), 8),
    (float("inf"), 64, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3), 8),
)


# Likewise where tensor cores multiply NVFP4 by NVFP4. Not measured: as large as registers allow.
_NATIVE_TILES = (
    (6, 8, Tile(32, 256, 2, 3), Tile(64, 256, 4, 3), 1),
    (12, 16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3), 8),
    (40, 32, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3), 8),
    (100, 64, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3), 8),
    (float("inf"), 128, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), 8),
)


@lru_cache(maxsize=4096)
def plan_experts(E: int, H: int, I: int, rows: int, dtype: torch.dtype, sms: int, native: bool = False) -> Plan:
    """For `rows` assignments to E experts, were routing uniform."""
    hit = _experts_hit(E, rows)
    BM, up, down, group = _tiles(rows / hit, native)
    tiles = hit * max(1, round(rows / hit / BM)) * -(-H // down.BN)
    splits = split_k(I, down, tiles, sms)
    exact = splits > 1 or rows * H * 4 <= EXACT_BYTES
    few = rows <= min(E, FEW) and rows * -(-I // up.BN) <= 12 * sms
    return Plan(BM, up, down, splits, group, FEW if few else 0, torch.float32 if exact else dtype)


@lru_cache(maxsize=4096)
def plan_linear(N: int, K: int, rows: int, sms: int, native: bool = False) -> tuple[int, Tile, int]:
    """BM, tile, parts of K."""
    BM, _, tile, _ = _tiles(rows, native) if rows > 16 else (8 if rows <= 8 else 16, None, Tile(64, 256, 4, 3), None)
    return BM, tile, split_k(K, tile, -(-rows // BM) * -(-N // tile.BN), sms)


def dense_pays(E: int, rows: int, capability: tuple[int, int] | None) -> bool:
    """Whether torch's grouped product over dequantized weights is faster: where it has kernels, and for large batches.

    On an H200 (2026-11-22) from 200 (Mixtral) to 310 (gpt-oss) rows an expert. For NVFP4 rows too: with 256 of them
    2699 us against 2839 (Mixtral), with 1024 5874 against 10185.
    """
    return capability is not None and capability[0] in (9, 10) and rows >= 256 * _experts_hit(E, rows)


def multiplies_nvfp4(capability: tuple[int, int] | None) -> bool:
    """Whether Triton compiles NVFP4 times NVFP4 to the tensor cores' own instruction, `mma.sync` with block scales."""
    return capability == (12, 0) or capability == (12, 1) and _TRITON >= (3, 9)  # 3.6 fails for 12.1


def linear_limit(capability: tuple[int, int] | None) -> int:
    """Up to so many tokens a linear layer dequantizes in its loop; beyond, into a scratch that torch multiplies."""
    return 128 if capability is not None and capability[0] in (9, 10) else 512


def next_power_of_2(n: int) -> int:
    """The least one that is not below n > 0. (Triton's own takes 10 us.)"""
    return 1 << (n - 1).bit_length()


def _experts_hit(E: int, rows: int) -> float:
    """How many experts have rows, on average, were routing uniform."""
    return E * (1 - (1 - 1 / E) ** rows)


def _tiles(rows: float, native: bool) -> tuple[int, Tile, Tile, int]:
    """BM, GEMM 1's tile, GEMM 2's and the group for so many rows an expert."""
    return next(entry[1:] for entry in (_NATIVE_TILES if native else _TILES) if rows <= entry[0])


def split_k(K: int, tile: Tile, tiles: float, sms: int) -> int:
    """Parts of K, each with enough blocks to fill the stages, where tiles are too few for the GPU."""
    splits = 1
    while tiles * splits < 5 * sms and K >= 6 * splits * tile.BK and splits < 4:
        splits *= 2
    return splits


def part_of(K: int, splits: int, BK: int) -> int:
    """Columns of K in a part: whole blocks."""
    return -(-K // splits // BK) * BK
