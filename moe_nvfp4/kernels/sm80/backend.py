"""The sm_80 backend: the experts and linears, with GEMMs in CuTe DSL.

    route ── (quantize) ── GEMM 1, with the gate ── (quantize) ── GEMM 2 ── combine

All but the GEMMs are the portable backend's kernels, as are the dequantized weights of gradients. Weights are in the
layout of `sm90.pack`. For a few tokens nothing is routed: the GEMMs search for the rows of their expert themselves.

Nothing waits for the device, no shape depends on data, and buffers are torch's, so a CUDA graph can capture everything.
Calls may run on any stream, and on several at once. The same input gives the same bits. NVFP4 rows (W4A4) are stored as
bf16 `code * sf`, which is exact, with their global scales beside them. Numerics are the reference's, up to the order of
fp32 sums; above `plan.EXACT_BYTES` of expert outputs (prefill), these are rounded to bf16 before the combine adds them
in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from cutlass import BFloat16, Float32, Int32
from torch import Tensor

from moe_nvfp4 import reference
from moe_nvfp4.kernels.backend import Gpu
from moe_nvfp4.kernels.common import launch
from moe_nvfp4.kernels.common.ahead import MAX_ROWS, planned_tokens
from moe_nvfp4.kernels.common.cute import CuteKernels
from moe_nvfp4.kernels.common.tensors import aligned, capability, expert_ids, floating, multiprocessors
from moe_nvfp4.kernels.portable import backend as portable
from moe_nvfp4.kernels.portable.backend import Routing, Unsorted, Values
from moe_nvfp4.kernels.sm80.config import FEW, GemmConfig
from moe_nvfp4.kernels.sm80.gemm import GroupedGemm
from moe_nvfp4.kernels.sm80.plan import Gemm, LayerPlan, plan_experts, plan_linear
from moe_nvfp4.kernels.sm90.pack import UNIT_WORDS, packed, packed_linear, words
from moe_nvfp4.routing import Groups, Rows
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, Matrices

quantize_rows = reference.quantize_rows


# ---- the layer -----------------------------------------------------------------------------------


def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> Tensor:
    """The whole layer: x bf16 [T, H], ids and weights [T, top_k] -> bf16 [T, H]."""
    w, (T, top_k) = packed(weights, "sm_80"), top_k_index.shape
    out = x.new_empty(T, w.hidden_size)
    if T == 0 or top_k == 0:
        return out.zero_()
    most = max(1, MAX_ROWS // top_k)
    if T > most:
        parts = (t.split(most) for t in (x, top_k_index, top_k_weights))
        return torch.cat([experts(a, ids, p, w) for a, ids, p in zip(*parts, strict=True)], out=out)
    ids, x, top_k_weights = aligned(expert_ids(top_k_index)), aligned(x), aligned(floating(top_k_weights))
    planned, R, H, I = planned_tokens(T, top_k) * top_k, T * top_k, w.hidden_size, w.intermediate_size
    with portable.on(x.device):
        plan = _plan(w, planned, x.device)
        static = w.quantized and (w.x_scale is not None or w.h_scale is not None)
        routing: Routing | Unsorted = (
            Unsorted(ids, FEW)
            if plan.few and not static
            else portable.route(ids, w.num_experts, plan.up.tile.BN, planned, row_expert=static)
        )
        rows = Values(x, index=routing.order, index_div=top_k)
        if w.quantized:
            rows = portable.quantize(rows, w.x_scale, routing, w.four_over_six)
        fp32 = w.quantized and w.h_scale is not None
        h = Values(x.new_empty(R, I, dtype=torch.float32 if fp32 else x.dtype))
        sync, sync2, cleared = _syncs(x, plan)
        _gemm(rows, w.w13, h.values, plan.up, routing, gate=w.gate, sync=sync, clear=cleared)
        if w.quantized:
            h = portable.quantize(h, w.h_scale, routing, w.four_over_six)
        y = x.new_empty(R, H, dtype=plan.rows)
        _gemm(h, w.w2, y, plan.down, routing, routing.order, sync=sync2)
        portable.combine(y[None], ids, top_k_weights, out, w.num_experts, check=routing.order is None)
    return out


def gemm1_swiglu(rows: Rows, weights: ExpertWeights, groups: Groups, dtype: torch.dtype) -> Rows:
    """As `reference.gemm1_swiglu`, for bf16 rows. Unrouted rows of the result hold arbitrary values."""
    w, R = packed(weights, "sm_80"), groups.num_rows
    h = rows.values.new_empty(R, w.w13.N if w.gate.kind == "raw" else w.intermediate_size)
    if R:
        with portable.on(h.device):
            gemm = _plan(w, planned_tokens(R), h.device).up
            found, routing = portable.values_of(rows, groups), Routing.of(groups, gemm.tile.BN)
            _gemm(found, w.w13, h, gemm, routing, gate=w.gate, sync=_zeros(h, gemm))
    return Rows(h)


def gemm2_combine(h: Rows, weights: ExpertWeights, groups: Groups, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """As `reference.gemm2_combine`, for bf16 rows."""
    w, R, (T, top_k) = packed(weights, "sm_80"), groups.num_rows, top_k_weights.shape
    out = h.values.new_empty(T, w.hidden_size, dtype=dtype)
    if R == 0:
        return out.zero_()
    with portable.on(out.device):
        plan = _plan(w, planned_tokens(T, top_k) * top_k, out.device)
        y = out.new_empty(R, w.hidden_size, dtype=plan.rows)
        found, routing = portable.values_of(h, groups), Routing.of(groups, plan.down.tile.BN)
        _gemm(found, w.w2, y, plan.down, routing, routing.order, sync=_zeros(out, plan.down))
        portable.combine(y[None], routing.ids, aligned(floating(top_k_weights)), out, w.num_experts)
    return out


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """y bf16 [T, N] = x bf16 [T, K] · wᵀ (+ bias)."""
    w, T = weights, x.shape[0]
    m = packed_linear(w.matrix, "sm_80").stacked()
    out = x.new_empty(T, m.N)
    if T:
        with portable.on(x.device):
            rows = Values(aligned(x))
            if w.quantized:
                rows = portable.quantize(rows, w.input_scale, None, w.four_over_six)
            gemm = plan_linear(m.N, m.K, planned_tokens(T), _gpu(x.device))
            _gemm(rows, m, out, gemm, sync=_zeros(x, gemm))
    return out


def _plan(w: ExpertWeights, R: int, device: torch.device) -> LayerPlan:
    return plan_experts(w.num_experts, w.hidden_size, w.intermediate_size, w.gate.gated, R, _gpu(device))


def _gpu(device: torch.device) -> Gpu:
    found = capability(device)
    assert found is not None, "the backend runs on NVIDIA GPUs"
    return Gpu(found, multiprocessors(device))


# ---- launches ------------------------------------------------------------------------------------


def _gemm(
    rows: Values, m: Matrices, out: Tensor, gemm: Gemm, routing: Routing | Unsorted | None = None,
    out_index: Tensor | None = None, gate: Gate | None = None, sync: Tensor | None = None, clear: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch a GEMM into out [R, N]; without routing, one matrix has all rows. sync: zeros, if CTAs share tiles; clear:
    those of the next launch, to be set to zero."""
    x, tile, gpu, R = rows.values, gemm.tile, _gpu(out.device), out.shape[0]
    units, r, kind, tiles = words(m), routing, "all", -(-R // tile.BN)
    found: tuple[Tensor | None, ...] = (None,) * 5
    if isinstance(r, Unsorted):
        kind, found, tiles = "few", (r.ids, None, None, None, None), R
    elif r is not None:
        kind, found = "sorted", (None, r.tile_expert, r.tile_row, r.tile_end, r.tile_count)
        tiles = portable.max_tiles(R, r.num_experts, tile.BN)
    grid, parts = gemm.grid(tiles * -(-units.shape[1] // tile.units), m.K, gpu), None
    if gemm.shares:
        parts = x.new_empty(grid * tile.rows * tile.BN, dtype=torch.float32)
    gate_scale = m.global_scale if m.gate_scale is None else m.gate_scale
    config = GemmConfig(kind, gate, m.bias is not None, rows.scale is not None, gemm.shares, launch.DTYPES[out.dtype])
    present = rows.index is not None, out_index is not None, clear is not None
    ids, bias = (None if t is None else t.dtype for t in (found[0], m.bias))
    _kernel(gpu.architecture, tile, config, present, ids, bias)(
        units, x, out, gate_scale, m.global_scale, m.bias, *found, rows.index, out_index, rows.scale, sync, parts,
        clear, R, rows.index_div, grid,
    )  # fmt: skip


@CuteKernels
def _kernel(
    architecture: str, tile: Any, config: GemmConfig, present: tuple[bool, bool, bool], ids: torch.dtype | None,
    bias: torch.dtype | None,
) -> Any:  # fmt: skip
    r, v, sorts = launch.rows, launch.vector, config.tiles == "sorted"
    index, out_index, clear = (v(Int32) if there else None for there in present)
    arguments = (
        r(Int32, UNIT_WORDS, 3), r(BFloat16, 16), r(config.out, 16), v(Float32), v(Float32),
        r(launch.DTYPES[bias]) if bias else None, v(launch.DTYPES[ids]) if ids else None,
        *(v(Int32) if sorts else None for _ in range(4)), index, out_index,
        v(Float32) if config.row_scale else None, v(Int32) if config.shares else None,
        v(Float32) if config.shares else None, clear, Int32(1), Int32(1), Int32(1),
    )  # fmt: skip
    return GroupedGemm(tile, config), arguments, architecture


def _syncs(x: Tensor, plan: LayerPlan) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What GEMM 1 and GEMM 2 need for sharing tiles (None: they don't), and what GEMM 1 clears of it."""
    most = 1 + _gpu(x.device).multiprocessors * max(plan.up.tile.ctas, plan.down.tile.ctas)
    if plan.up.shares:
        up, down = x.new_zeros(2, most, dtype=torch.int32)
        return up, down if plan.down.shares else None, None
    down = x.new_empty(most, dtype=torch.int32) if plan.down.shares else None
    return None, down, down


def _zeros(x: Tensor, gemm: Gemm) -> Tensor | None:
    """What a GEMM needs for sharing tiles."""
    if not gemm.shares:
        return None
    return x.new_zeros(1 + _gpu(x.device).multiprocessors * gemm.tile.ctas, dtype=torch.int32)
