"""The Hopper backend: the experts as CuTe DSL kernels over 4-bit weights.

    Route (beside it x is quantized, for W4A4) ── (Gather) ── GroupedGemm, both GEMMs ── Combine

or, for one token of some layers, OneToken ── SumChunks. Each launch depends on the one before and starts early.
Weights are in the layout of `sm90.pack`. Nothing waits for the device, no shape depends on data, and buffers are
torch's, so a CUDA graph can capture everything. Calls may run on any stream, and on several at once. The same input
gives the same bits.

NVFP4 rows are stored as bf16 `code * sf`, which is exact, with their global scales beside them: Hopper
multiplies bf16 in any case.

`gemm1_swiglu` and `gemm2_combine` are the single stages, for callers with their own gate. Numerics are the
reference's, up to the order of fp32 sums; above `plan.EXACT_BYTES` of expert outputs (prefill), these are
rounded to bf16 before the combine adds them in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from cutlass import BFloat16, Float32, Int32
from torch import Tensor

from moe_nvfp4.kernels.common import launch
from moe_nvfp4.kernels.common.ahead import MAX_ROWS, planned_tokens
from moe_nvfp4.kernels.common.cute import CuteKernels
from moe_nvfp4.kernels.common.route import Route, route_shape
from moe_nvfp4.kernels.common.rows import SumParts
from moe_nvfp4.kernels.common.tensors import aligned, expert_ids, floating, lasting, multiprocessors, settle
from moe_nvfp4.kernels.sm90.config import GemmConfig
from moe_nvfp4.kernels.sm90.gemm import GroupedGemm
from moe_nvfp4.kernels.sm90.one_token import OneToken, SumChunks, chunks, suits_one_token
from moe_nvfp4.kernels.sm90.pack import UNIT, UNIT_WORDS, packed, packed_linear, words
from moe_nvfp4.kernels.sm90.plan import LINEAR_TILES, LaunchPlan, choose_plan, plan_linear, token_tiles
from moe_nvfp4.kernels.sm90.quantize import Quantize
from moe_nvfp4.kernels.sm90.rows import Combine, Gather
from moe_nvfp4.routing import Groups, Rows
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, Matrices

ARCHITECTURE = "sm_90a"


# ---- the layer -----------------------------------------------------------------------------------


def experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, expert_map: Tensor | None = None
) -> Tensor:
    """The whole layer: x bf16 [T, H], ids and weights [T, top_k] -> bf16 [T, H]. expert_map: int32, of each id the
    number of the expert here, or -1."""
    w = packed(weights, "Hopper")
    (T, top_k), E = top_k_index.shape, w.num_experts
    out = torch.empty(T, w.hidden_size, dtype=x.dtype, device=x.device)
    if T == 0:
        return out
    most = max(1, MAX_ROWS // top_k)  # bounds the memory between the kernels; so large a call is bound by arithmetic
    if T > most:
        parts = (t.split(most) for t in (x, top_k_index, top_k_weights))
        return torch.cat([experts(a, ids, p, w, expert_map) for a, ids, p in zip(*parts, strict=True)], out=out)
    if T == 1 and suits_one_token(w, top_k, multiprocessors(x.device)):
        return _experts_of_one(aligned(x), top_k_index, top_k_weights, w, expert_map, out)
    plan = choose_plan(w, planned_tokens(T, top_k), top_k, multiprocessors(x.device))
    nvfp4 = plan.config.row_scale
    zeros = 1 + token_tiles(T * top_k, E, plan.tile) + (T * top_k if plan.config.tracks_amax else 0)
    x, top_k_weights = aligned(x), floating(top_k_weights).contiguous()
    quantized, scale = (x, w.x_scale) if nvfp4 else (None, None)
    groups, token, sync, rows = route(top_k_index, E, zeros, quantized, scale, w.four_over_six, expert_map)
    rows = rows or Rows(x, index=token)
    if not plan.config.gathered:
        rows = gather(rows, groups, early=not nvfp4, indexed=w.x_scale is not None and nvfp4)
    y = x.new_empty(plan.split_k * T * top_k, w.hidden_size, dtype=plan.rows)
    h = x.new_empty(T * top_k, w.intermediate_size, dtype=torch.float32 if plan.config.h is Float32 else x.dtype)
    _gemms(rows, groups, w, h, y, sync, plan)
    return _combine(y, groups, top_k_weights, out, plan.split_k)


def _experts_of_one(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, w: ExpertWeights, expert_map: Tensor | None, out: Tensor
) -> Tensor:
    """`experts` of one token."""
    ids, top_k, (H, I) = expert_ids(top_k_index), top_k_index.shape[1], (w.hidden_size, w.intermediate_size)
    weights = floating(top_k_weights).contiguous()
    expert_map = None if expert_map is None else expert_map.contiguous()
    y = x.new_empty(top_k * chunks(I), H, dtype=torch.float32)
    bias = None if w.w13.bias is None else w.w13.bias.dtype
    kernel = _one_token(ids.dtype, expert_map is not None, w.gate, H, I, bias)
    kernel(ids, expert_map, *_units_of(w), x, y, *_scales_of(w), *_biases_of(w, x), w.num_experts)
    _sum_chunks(top_k, chunks(I), weights.dtype)(y, weights, out)
    return out


def gemm1_swiglu(rows: Rows, weights: ExpertWeights, groups: Groups, dtype: torch.dtype) -> Rows:
    """As `reference.gemm1_swiglu`, for bf16 rows. Unrouted rows of the result hold arbitrary values."""
    w, x, R = packed(weights, "Hopper"), aligned(rows.values), groups.num_rows
    rows = replace(rows, values=x)
    h = x.new_empty(R, w.intermediate_size * (2 if w.gate.kind == "raw" and w.gate.gated else 1))
    if R:
        T = planned_tokens(R // groups.top_k, groups.top_k)
        plan = choose_plan(w, T, groups.top_k, multiprocessors(x.device))
        config = GemmConfig(w.gate, False, rows.index is not None, plan.config.bias)
        plan = replace(plan, config=config, split_k=1)
        _gemms(rows, groups, w, h, x[:1], groups.offsets, plan)
    return Rows(h)


def gemm2_combine(h: Rows, weights: ExpertWeights, groups: Groups, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """As `reference.gemm2_combine`, for bf16 rows."""
    w, x, (T, top_k) = packed(weights, "Hopper"), aligned(h.values), top_k_weights.shape
    out = x.new_empty(T, w.hidden_size)
    if T == 0:
        return out
    groups, top_k_weights = groups.with_position(), floating(top_k_weights).contiguous()
    settle(x.device)
    plan = choose_plan(w, planned_tokens(T, top_k), top_k, multiprocessors(x.device))
    plan = replace(plan, config=GemmConfig(None, True, False, plan.config.bias, out=plan.config.out))
    y = x.new_empty(plan.split_k * T * top_k, w.hidden_size, dtype=plan.rows)
    _gemms(Rows(x), groups, w, x, y, groups.offsets, plan)
    return _combine(y, groups, top_k_weights, out, plan.split_k)


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """As `reference.linear`: bf16 x [T, K] -> bf16 [T, N], as GEMM 2 of a single expert. Where `plan_linear` says so,
    torch multiplies weights dequantized to bf16; for NVFP4 rows these are exact code * sf, and the product is rounded
    twice. Several linears take one launch.
    """
    w, m, T = weights, packed_linear(weights.matrix, "Hopper"), x.shape[0]
    N, K, out = m.N, m.K, x.new_empty(T, m.N)
    if T == 0:
        return out
    x, row_scale = aligned(x), None
    tile, split_k = plan_linear(N, K, planned_tokens(T), multiprocessors(x.device))
    if w.quantized:
        x, row_scale = _quantize_rows(x, w.input_scale, w.four_over_six)
    if tile is None:
        for matrix, columns in m.split(w.parts, UNIT):
            _linear_dense(x, row_scale, matrix, out[:, columns])
        return out
    y = out if split_k == 1 else x.new_empty(split_k * T, N, dtype=torch.float32)
    config = GemmConfig(
        None, True, False, m.bias is not None, row_scale is not None, out=launch.DTYPES[y.dtype], grouped=False,
        joined=bool(w.parts),
    )  # fmt: skip
    units, scale = words(m.stacked()), m.global_scale
    unused, bias = units.view(-1)[:1], x if m.bias is None else m.bias[None]
    index = lasting(_part_of_block, x.device, w.parts) if w.parts else unused
    tiles = -(-T // tile.BN) * -(-units.shape[1] // tile.m_blocks) * split_k
    _kernel(tile, config, bias.dtype)(
        units, units, x, index, x, x, x, y, unused, scale, scale, scale, bias, bias, scale,
        scale if row_scale is None else row_scale, unused, split_k.bit_length() - 1,
        min(multiprocessors(x.device) * tile.ctas, tiles),
    )  # fmt: skip
    if split_k > 1:
        _sum_parts(split_k)(y, out, None)
    return out


def _part_of_block(parts: tuple[int, ...], device: torch.device) -> Tensor:
    """Which linear each 64-row block of joined linears belongs to, int32. A tile may reach beyond the last block."""
    blocks = -(-sum(parts) // UNIT) + max(tile.m_blocks for tile in LINEAR_TILES)
    part = torch.zeros(blocks, dtype=torch.int32, device=device)
    for end in accumulate(parts[:-1]):
        part[end // UNIT :] += 1
    return part


def _linear_dense(x: Tensor, row_scale: Tensor | None, w: Matrices, out: Tensor) -> Tensor:
    from moe_nvfp4.kernels.sm90.dequantize import window

    exact = w if row_scale is None else w._replace(global_scale=w.global_scale.new_ones(w.global_scale.shape))
    values = window(exact.stacked(), slice(0, w.K), x.dtype)[0].T
    if x.is_meta:  # launches are noted
        return out
    torch.mm(x, values, out=out)
    if row_scale is not None:
        out.mul_(row_scale[:, None] * w.global_scale)
    return out if w.bias is None else out.add_(w.bias)


def _quantize_rows(x: Tensor, scale: Tensor | None, four_over_six: bool) -> tuple[Tensor, Tensor]:
    """x bf16 [T, K], a static scale fp32 [1] or None -> bf16 code * sf, and fp32 [T]."""
    T, K = x.shape
    values, row_scale = x.new_empty(x.shape), x.new_empty(T, dtype=torch.float32)
    kernel = _quantize(scale is not None, *_quantize_shape(K, planned_tokens(T), Quantize.THREADS // 32), four_over_six)
    kernel(x, scale, values, row_scale)
    return values, row_scale


def _quantize_shape(K: int, rows: int, most: int) -> tuple[int, int]:
    """(warps per row of K values, at most `most`; half blocks per lane)."""
    warps = 1
    while warps < most and (K > 2048 * warps or rows * warps < 1024 and K > 256 * warps):
        warps *= 2  # so that a lane has at most 64 values, and every multiprocessor has work
    return warps, -(-K // (256 * warps))


@CuteKernels
def _quantize(static: bool, warps: int, each: int, four_over_six: bool) -> Any:
    r, v = launch.rows, launch.vector
    arguments = (r(BFloat16, 16), v(Float32) if static else None, r(BFloat16, 16), v(Float32))
    return Quantize(static, warps, each, four_over_six), arguments, ARCHITECTURE


@CuteKernels
def _sum_parts(parts: int) -> Any:
    return SumParts(parts), (launch.rows(Float32, 16), launch.rows(BFloat16, 16), None), ARCHITECTURE


# ---- launches ------------------------------------------------------------------------------------


def route(
    top_k_index: Tensor,
    num_experts: int,
    sync: int = 1,
    x: Tensor | None = None,
    scale: Tensor | None = None,
    four_over_six: bool = False,
    expert_map: Tensor | None = None,
) -> tuple[Groups, Tensor, Tensor, Rows | None]:
    """(groups as of `routing.group_by_expert`, the token of each row, `sync` zeros for the GEMMs, NVFP4 rows of x).

    If x [T, K] is given, its rows are bf16 code * sf [T, K] with fp32 scales [T]. With a static `scale` fp32 [E], each
    assignment has a row, and its number stands in place of the token, unless `Route.slots` lets a token's share one.
    Values and scales are those of `reference.quantize_rows`. expert_map: as in `experts`.

    An id outside the legal range prints the rule and traps, and the next synchronization raises.
    """
    T, top_k = top_k_index.shape
    ids = expert_ids(top_k_index)
    R, E = ids.shape[0], num_experts
    assert R <= MAX_ROWS
    sizes = (R, R, R, E + 1, sync)
    order, position, token, offsets, zeros = ids.new_empty(sum(sizes), dtype=torch.int32).split_with_sizes(sizes)
    planned = planned_tokens(T, top_k)
    shape = route_shape(planned * top_k)
    groups, rows = Groups(order, offsets, top_k, position), None
    quantize: tuple = ()
    if x is not None:
        K, n = x.shape[1], T if scale is None else R
        many = planned if scale is None else planned * top_k
        quantize = (x.dtype, scale is not None, *_quantize_shape(K, many, shape[1]), four_over_six)
        values, row_scale = x.new_empty(n, K, dtype=torch.bfloat16), x.new_empty(n, dtype=torch.float32)
        rows = Rows(values, None, row_scale, token)
    outputs = (None, None) if rows is None else (rows.values, rows.scale)
    expert_map = None if expert_map is None else expert_map.contiguous()
    _route(ids.dtype, expert_map is not None, *shape, *quantize)(
        ids, expert_map, order, position, token, offsets, zeros, x, scale, *outputs, E, top_k
    )
    return groups, token, zeros, rows


@CuteKernels
def _route(
    ids: torch.dtype, mapped: bool, ctas: int, warps: int, each: int, x: torch.dtype | None = None, *quantize: Any
) -> Any:
    r, v = launch.rows, launch.vector
    read = v(launch.DTYPES[ids]), v(Int32) if mapped else None
    arguments = [*read, *[v(Int32) for _ in range(5)], None, None, None, None, Int32(1), Int32(1)]
    if x is not None:
        arguments[7:11] = r(launch.DTYPES[x], 16), v(Float32) if quantize[0] else None, r(BFloat16, 16), v(Float32)
    route = Route(ctas, warps, each, Quantize(*quantize) if x is not None else None)
    return route, tuple(arguments), ARCHITECTURE


def gather(rows: Rows, groups: Groups, early: bool = True, indexed: bool = False) -> Rows:
    """Rows of tokens, or, if `indexed`, those that their index names -> [R, K] in grouped order, unrouted ones at the
    end. Scales are not moved. `early`: the rows were written before the previous kernel."""
    x, R = rows.values, groups.num_rows
    values = x.new_empty(R, x.shape[1])
    _gather(early, indexed)(x, rows.index if indexed else groups.position, values, R // x.shape[0])
    return replace(rows, values=values)


@CuteKernels
def _gather(early: bool, indexed: bool) -> Any:
    arguments = (launch.rows(BFloat16, 16), launch.vector(Int32), launch.rows(BFloat16, 16), Int32(1))
    return Gather(early, indexed), arguments, ARCHITECTURE


def _gemms(rows: Rows, groups: Groups, w: ExpertWeights, h: Tensor, y: Tensor, sync: Tensor, plan: LaunchPlan) -> None:
    """GEMM 1 from rows of x to h, GEMM 2 from h to y, or one of them. Unused tensors may be any of the right dtype."""
    x, R, tile, config = rows.values, groups.num_rows, plan.tile, plan.config
    index = groups.offsets if rows.index is None else rows.index
    units13, units2 = _units_of(w)
    b13, b2 = _biases_of(w, x)
    gate_scale, up_scale, down_scale = _scales_of(w)
    row_scale = up_scale if rows.scale is None else rows.scale
    h_scale, raw, quantized = up_scale, x, h
    if config.row_scale:
        h_scale = sync[-R:].view(torch.float32) if w.h_scale is None else w.h_scale
        raw = h.view(torch.bfloat16)
    if h.dtype != torch.bfloat16:
        quantized = x.new_empty(h.shape)
    weight_tiles = (-(-w.w13.codes.shape[1] // tile.m_blocks) if config.gate else 0) + (
        -(-w.w2.codes.shape[1] // tile.m_blocks) * plan.split_k if config.down else 0
    )
    tiles = token_tiles(R, w.num_experts, tile) * weight_tiles
    grid = min(multiprocessors(x.device) * tile.ctas, tiles)
    _kernel(tile, config, b13.dtype)(
        units13, units2, x, index, h, raw, quantized, y, groups.offsets, gate_scale, up_scale, down_scale,
        b13, b2, row_scale, h_scale, sync, plan.split_k.bit_length() - 1, grid,
    )  # fmt: skip


def _units_of(w: ExpertWeights) -> tuple[Tensor, Tensor]:
    """`words` of w13 and w2: made once for weights that many calls take."""
    kept = vars(w)
    if "units" not in kept:
        kept["units"] = words(w.w13), words(w.w2)
    units: tuple[Tensor, Tensor] = kept["units"]
    return units


def _scales_of(w: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """The global scales of gate, up and down."""
    up = w.w13.global_scale
    return up if w.w13.gate_scale is None else w.w13.gate_scale, up, w.w2.global_scale


def _biases_of(w: ExpertWeights, unused: Tensor) -> tuple[Tensor, Tensor]:
    """The biases of w13 and w2, or twice `unused`."""
    if w.w13.bias is None:
        return unused, unused
    assert w.w2.bias is not None  # a layer has both or none
    return w.w13.bias, w.w2.bias


@CuteKernels
def _kernel(tile: Any, config: GemmConfig, bias: torch.dtype) -> Any:
    r, v = launch.rows, launch.vector
    arguments = (
        r(Int32, UNIT_WORDS, 3), r(Int32, UNIT_WORDS, 3), r(BFloat16, 16), v(Int32),
        r(config.h, 16), r(BFloat16, 16), r(BFloat16, 16), r(config.out, 16), v(Int32),
        v(Float32), v(Float32), v(Float32), r(launch.DTYPES[bias]), r(launch.DTYPES[bias]), v(Float32), v(Float32),
        v(Int32), Int32(1), Int32(1),
    )  # fmt: skip
    return GroupedGemm(tile, config), arguments, ARCHITECTURE


@CuteKernels
def _one_token(ids: torch.dtype, mapped: bool, gate: Gate, H: int, I: int, bias: torch.dtype | None) -> Any:
    r, v = launch.rows, launch.vector
    biases = (r(launch.DTYPES[bias or torch.bfloat16]) for _ in range(2))
    arguments = (
        v(launch.DTYPES[ids]), v(Int32) if mapped else None, r(Int32, UNIT_WORDS, 3), r(Int32, UNIT_WORDS, 3),
        r(BFloat16, 16), r(Float32, 16), v(Float32), v(Float32), v(Float32), *biases, Int32(1),
    )  # fmt: skip
    return OneToken(gate, H, I, bias is not None), arguments, ARCHITECTURE


@CuteKernels
def _sum_chunks(top_k: int, chunks: int, weights: torch.dtype) -> Any:
    r = launch.rows
    arguments = (r(Float32, 16), r(launch.DTYPES[weights]), r(BFloat16, 16))
    return SumChunks(top_k, chunks), arguments, ARCHITECTURE


def _combine(y: Tensor, groups: Groups, top_k_weights: Tensor, out: Tensor, split_k: int) -> Tensor:
    combine = _combine_kernel(top_k_weights.shape[1], split_k, y.dtype, top_k_weights.dtype)
    combine(y, groups.position, groups.offsets, top_k_weights, out)
    return out


@CuteKernels
def _combine_kernel(top_k: int, split_k: int, rows: torch.dtype, weights: torch.dtype) -> Any:
    arguments = (
        launch.rows(launch.DTYPES[rows], 16), launch.vector(Int32), launch.vector(Int32),
        launch.rows(launch.DTYPES[weights]), launch.rows(BFloat16, 16),
    )  # fmt: skip
    return Combine(top_k, split_k), arguments, ARCHITECTURE
