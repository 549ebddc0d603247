"""How a layer or a linear runs on Hopper: the shape of its tiles and the split of K, by number of tokens and sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from cutlass import BFloat16, Float32

from moe_nvfp4.kernels.sm90.config import GemmConfig, TileShape
from moe_nvfp4.kernels.sm90.pack import UNIT, UNIT_WORDS
from moe_nvfp4.weights import ExpertWeights, Gate

EXACT_BYTES = 1 << 24  # expert outputs up to this size are kept in fp32

# Measured on an H200. Up to 8 tokens: mma.sync, and a deep ring. Beyond: WGMMA, by four warpgroups of 64 rows
# or, where accumulators are large, two of 128. With three widths of WGMMA, or two widths above 96 tokens,
# ptxas runs out of registers and makes every WGMMA wait for the previous one. Three warpgroups of 64 rows have
# registers left: then 128 and a few more tokens per expert are one tile, 256 are two (7 to 19 % of the layer).
_WIDE = dict(NWG=2, MB=2, group=4, registers=(224, 56))
TILE_SHAPES = (
    TileShape(8),
    TileShape(24, small=16, KB=4, stages=4, group=4),
    TileShape(32, small=24, KB=4, stages=4, group=4),
    TileShape(48, small=40, KB=4, stages=3, **_WIDE),
    TileShape(64, small=48, KB=2, stages=6, **_WIDE),
    TileShape(80, small=64, KB=2, stages=5, **_WIDE),
    TileShape(96, KB=2, stages=5, **_WIDE),
    TileShape(128, KB=2, stages=4, **_WIDE),
    TileShape(144, small=128, NWG=3, KB=2, stages=4, group=4, registers=(152, 56)),
)
# For few tiles: fewer rows per tile, and the warpgroups split K into 4 or 2 parts.
K_IN_4, K_IN_2 = TileShape(8, KS=4, KB=8, stages=8), TileShape(8, KS=2, KB=8, stages=4)
# Two CTAs per multiprocessor: of two 64-row blocks, for sizes that tiles of four do not fill; of one, for few experts.
TWO_CTAS = TileShape(8, NWG=2, stages=4, registers=(96, 48), ctas=2)
TWO_IN_2 = TileShape(8, NWG=2, KS=2, KB=8, stages=3, registers=(96, 48), ctas=2)
TILE_COST = 64  # the fixed cost of a tile (dequantization, epilogue), in tokens


@dataclass(frozen=True)
class LaunchPlan:
    """tile, config: what the GEMM kernel is compiled for; split_k: parts of K in GEMM 2; rows: dtype of its output."""

    tile: TileShape
    config: GemmConfig
    split_k: int
    rows: torch.dtype


class LayerShape(NamedTuple):
    """The properties of a layer that a plan depends on. static_h: NVFP4 rows of h have a static scale."""

    gate: Gate
    bias: bool
    nvfp4: bool
    static_h: bool
    four_over_six: bool
    E: int
    H: int
    I: int


def choose_plan(w: ExpertWeights, T: int, top_k: int, multiprocessors: int) -> LaunchPlan:
    nvfp4 = w.quantized
    static_h = nvfp4 and w.h_scale is not None
    layer = LayerShape(
        w.gate, w.w13.bias is not None, nvfp4, static_h, w.four_over_six, w.num_experts, w.hidden_size,
        w.intermediate_size,
    )  # fmt: skip
    return plan_for(layer, T, top_k, multiprocessors)


@lru_cache(maxsize=4096)
def plan_for(layer: LayerShape, T: int, top_k: int, multiprocessors: int) -> LaunchPlan:
    R, E, H, I = T * top_k, layer.E, layer.H, layer.I
    hit = E * (1 - (1 - 1 / E) ** R)  # experts with tokens, under uniform routing
    tile = min(TILE_SHAPES, key=lambda t: expected(lambda n: _cost(t, n), R / hit))
    I_units = -(-I // (UNIT // 2 if layer.gate.gated else UNIT))
    if tile.BN == 8:
        tile = _decode_tile(hit, I_units, H, multiprocessors)
    split_k = _split_k(tile, hit, R, H, I, multiprocessors)
    if tile == TileShape(8) and split_k == 1 and (I_units % 4 or -(-H // UNIT) % 4):
        tile = TWO_CTAS
    rows = torch.float32 if split_k * R * H * 4 <= EXACT_BYTES else torch.bfloat16
    # Gathering rows itself costs GEMM 1 5 % where it is bound by arithmetic: if I is large, more than `gather` takes.
    gathered = tile.BN <= 32 or I <= 1024
    # With a static scale, h is quantized from fp32 values, as in the reference.
    h, out = (Float32 if exact else BFloat16 for exact in (layer.static_h, rows == torch.float32))
    config = GemmConfig(layer.gate, True, gathered, layer.bias, layer.nvfp4, layer.four_over_six, h, out)
    return LaunchPlan(tile, config, split_k, rows)


def _decode_tile(hit: float, I_units: int, H: int, multiprocessors: int) -> TileShape:
    """For up to 8 tokens per expert. Of seven shapes, for 12 layers and 1 to 8 tokens on an H200 (2026-11-28), the one
    that this chooses was 0.6 % slower than the fastest on average, and at most 5 %."""
    tiles = hit * I_units / multiprocessors  # of one 64-row block
    if tiles < (3.7 if H <= 4096 else 3):
        return K_IN_4
    if hit < 6.5:  # many tiles of few experts: short ones end at the same time
        return TWO_IN_2
    return K_IN_2 if tiles < 8 or H > 2048 else TileShape(8)


def _split_k(tile: TileShape, hit: float, R: int, H: int, I: int, multiprocessors: int) -> int:
    """How many parts of K for GEMM 2, which has few rows and a long K where experts are few. Parts have at least 1024
    columns, and none is empty."""
    tiles = hit * expected(lambda n: -(-n // tile.BN), R / hit) * -(-H // UNIT // tile.m_blocks)
    ctas = multiprocessors * tile.ctas
    split_k = 4 if tiles < 0.9 * ctas else 2 if tiles < 4 * ctas else 1
    blocks = -(-I // UNIT)
    while split_k > 1:
        all_but_last = tile.split_blocks(blocks, split_k.bit_length() - 1) * (split_k - 1)
        if I >= 1024 * split_k and all_but_last < blocks:
            break
        split_k //= 2
    return split_k


def token_tiles(R: int, E: int, tile: TileShape) -> int:
    """A bound on the number of token tiles that holds for every routing."""
    return R // tile.BN + min(E, R)


def _cost(tile: TileShape, n: int) -> int:
    """The cost of an expert with n tokens, in tokens."""
    full, rest = divmod(n - 1, tile.BN)
    return (full + 1) * TILE_COST + full * tile.BN + (tile.small if rest < tile.small else tile.BN)


def expected(f, mean: float) -> float:
    """The mean of f(n) over experts with tokens, for Poisson-distributed n, by the normal approximation."""
    deviation = math.sqrt(mean)
    first, last = max(1, round(mean - 4 * deviation)), round(mean + 4 * deviation)
    counts = range(first, last + 1, max(1, round(deviation / 8)))
    weights = [math.exp(-(((n - mean) / deviation) ** 2) / 2) for n in counts]
    return sum(w * f(n) for w, n in zip(weights, counts, strict=True)) / sum(weights)


# ---- linears -------------------------------------------------------------------------------------

# For matrices with few rows: tiles with fewer rows than those above, whose warpgroups split K. The first one's ring has
# a stage less than K_IN_4's, with which most linears took 2 % more time (2026-11-28).
NARROW = (
    TileShape(8, KS=4, KB=8, stages=7), K_IN_2,
    TileShape(16, KS=4, KB=8, stages=5, group=4), TileShape(16, KS=2, KB=8, stages=4, group=4),
    TileShape(32, small=24, KS=4, KB=8, stages=3, group=4), TileShape(32, small=24, KS=2, KB=4, stages=5, group=4),
)  # fmt: skip
# For more tokens: a linear has so few tiles that their size decides how evenly the multiprocessors share them. Two
# warpgroups of 64 rows, or three, have registers for up to 192 tokens, which dequantize each weight less often.
_TWO, _THREE = dict(NWG=2, group=4, registers=(224, 56)), dict(NWG=3, group=4, registers=(152, 56))
WIDE = (
    TileShape(64, stages=4, **_TWO), TileShape(80, stages=3, **_TWO), TileShape(96, stages=3, **_TWO),
    TileShape(128, KB=2, **_TWO), TileShape(160, KB=2, stages=4, **_TWO), TileShape(192, KB=2, stages=3, **_TWO),
    TileShape(64, stages=3, **_THREE), TileShape(96, KB=2, **_THREE), TileShape(128, KB=2, stages=4, **_THREE),
)  # fmt: skip
LINEAR_TILES = (*NARROW, *(tile for tile in TILE_SHAPES if tile.BN in (8, 32, 64, 128)), *WIDE)
DENSE_ELEMENTS = 1 << 28  # the most weights that are dequantized at once: 512 MiB


@lru_cache(maxsize=4096)
def plan_linear(N: int, K: int, T: int, multiprocessors: int) -> tuple[TileShape | None, int]:
    """(tile, parts of K) for x [T, K] · wᵀ with the least `_linear_time`. A tile of None: the weights are dequantized
    and torch multiplies, which pays for many tokens and a matrix of few tiles."""
    plans = [(tile, parts) for tile in LINEAR_TILES for parts in (1, 2, 4, 8)]
    times = {plan: _linear_time(*plan, N, K, T, multiprocessors) for plan in plans}
    best = min(times, key=times.__getitem__)
    dense = 8 + 1.05 * _roof(N, K, T) + 0.85e-6 * N * K if N * K <= DENSE_ELEMENTS else math.inf
    return (None, 1) if dense < times[best] else best


def _linear_time(tile: TileShape, parts: int, N: int, K: int, T: int, multiprocessors: int) -> float:
    """Microseconds, from a model of 1197 launches on an H200 (2026-11-27, eleven matrices, 32 to 2048 tokens). Among
    these, its choice was 0.3 % slower than the fastest on average, and at most 6 %.

    A multiprocessor reads 66 bytes per nanosecond, and multiplies 64 x 64 weights by n tokens in 52 + 0.77 n ns. Parts
    of K cost a launch that adds them up, and their traffic through L2.
    """
    rows64, k64 = -(-N // UNIT), -(-K // UNIT)
    each = tile.split_blocks(k64, parts.bit_length() - 1)
    tiles = -(-T // tile.BN) * -(-rows64 // tile.m_blocks) * parts
    if parts > 1 and (tiles > multiprocessors or each * (parts - 1) >= k64):
        return math.inf  # a part would be empty, or would have to wait
    n = tile.small if T <= tile.small else tile.BN
    unit = max(52 + 0.77 * n, (4 * UNIT_WORDS + 128 * tile.BN / tile.m_blocks) / 66)
    busiest = -(-tiles // multiprocessors) * (min(each, k64) * tile.m_blocks * unit + 300) / 1e3
    added = 1.6 + parts / 10 + parts * T * N * 8 / 6e6 if parts > 1 else 0
    return 5 + max(busiest, N * K * 9 / 16 / 4.3e6, _roof(N, K, T)) + busiest / 16 + added


def _roof(N: int, K: int, T: int) -> float:
    """Microseconds that the arithmetic takes at 790 TFLOP/s."""
    return 2 * N * K * T / 790e6
