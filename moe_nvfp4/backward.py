"""Gradients through frozen 4-bit weights: of x, of the routing weights, of what the gate is given.

A gradient goes back through a product x · wᵀ as dy · w: the same weights, read along their other axis. A block scale
spans 16 columns of one row, so no kernel reads them well that way: a window of columns of all experts is dequantized
into a bounded scratch, in the rows' dtype, and torch's grouped product multiplies it. On CPUs, and for fp32 rows, one
expert after the other, in fp32.

Rows that W4A4 quantizes pass their gradient on as if they had not been (the straight-through estimator).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.backends import Backend, Device, Problem, named, select
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, Projection

SCRATCH = 1 << 29  # bytes of dequantized weights at a time, if that is enough for 64 columns
MAX_ROWS = 1 << 16  # of a fused layer at a time: its backward pass has some fp32 copies of GEMM 1's output


# ---- rows and slots ------------------------------------------------------------------------------


def gather_rows(x: Tensor, order: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """x [T, *] -> [T * top_k, *] in the order of `Groups`; unrouted rows are zeros."""
    return x[order // top_k].masked_fill_(unrouted(order, offsets), 0)


def sum_slots(rows: Tensor, order: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """The transpose of `gather_rows`: rows [T * top_k, *] -> [T, *], sums in fp32 and in slot order."""
    slots = rows.masked_fill(unrouted(order, offsets), 0)[_position(order)]
    return slots.view(-1, top_k, *rows.shape[1:]).sum(1, dtype=torch.float32).to(rows.dtype)


def combine(rows: Tensor, weights: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """rows [T * top_k, H], top_k_weights [T, top_k] -> [T, H]: sums in fp32 and in slot order, rounded once."""
    slots = rows.masked_fill(unrouted(order, offsets), 0)[_position(order)].view(*weights.shape, rows.shape[1])
    return (slots * weights[..., None].float()).sum(1).to(rows.dtype)


def combine_gradients(
    dy: Tensor, rows: Tensor, weights: Tensor, order: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """dy [T, H] of `combine` -> (d(rows), d(weights))."""
    top_k, nowhere = weights.shape[1], unrouted(order, offsets)
    dy = gather_rows(dy, order, offsets, top_k)
    dp = (dy.float() * rows).sum(-1, keepdim=True).masked_fill_(nowhere, 0)[_position(order)]
    d_rows = dy * gather_rows(weights.reshape(-1, 1), order, offsets, 1).float()
    return d_rows.to(rows.dtype), dp.view(weights.shape).to(weights.dtype)


def _position(order: Tensor) -> Tensor:
    """The inverse of `order`."""
    return torch.empty_like(order).index_copy_(0, order.long(), torch.arange(len(order), device=order.device).to(order))


def unrouted(order: Tensor, offsets: Tensor) -> Tensor:
    """bool [R, 1]: the rows without an expert."""
    return torch.arange(order.shape[0], device=order.device)[:, None] >= offsets[-1]


def sums_by_expert(rows: Tensor, groups: Groups) -> Tensor:
    """rows [R, N] -> fp32 [E, N]: a product with ones, so that nothing waits for the offsets."""
    experts = torch.arange(groups.num_experts, device=rows.device)
    return (groups.expert_of_row() == experts[:, None]).float() @ rows.float()


# ---- products ------------------------------------------------------------------------------------


def up_rows(rows: Tensor, weights: ExpertWeights, groups: Groups, backend: Backend) -> Tensor:
    """GEMM 1 before the gate: rows [R, H] -> [R, 2I] in their dtype, W4A4 included; unrouted rows are zeros."""
    w = replace(weights, gate=Gate("raw", gated=weights.gate.gated), h_scale=None)
    taken = _taken(rows, w.x_scale, w, groups, backend)
    out = backend.gemm1_swiglu(taken, w, groups, rows.dtype).values
    return out.masked_fill_(unrouted(groups.order, groups.offsets), 0)


def down_rows(h: Tensor, weights: ExpertWeights, groups: Groups, backend: Backend) -> Tensor:
    """GEMM 2 before the combine: h [R, I] -> [R, H] in its dtype; unrouted rows are zeros."""
    R = groups.num_rows
    alone = Groups(torch.arange(R, dtype=torch.int32, device=h.device), groups.offsets, 1)
    ones = torch.ones(R, 1, dtype=torch.float32, device=h.device)
    taken = _taken(h, weights.h_scale, weights, alone, backend)
    return backend.gemm2_combine(taken, weights, alone, ones, h.dtype)


def _taken(rows: Tensor, scale: Tensor | None, weights: ExpertWeights, groups: Groups, backend: Backend) -> Rows:
    """Rows as a GEMM of this layer takes them."""
    return backend.quantize_rows(rows, None, scale, groups) if weights.activations == "nvfp4" else Rows(rows)


def times_weights(rows: Tensor, weights: Projection, offsets: Tensor | None, backend: Backend) -> Tensor:
    """rows [R, N] times their expert's matrix [N, K] -> [R, K] in their dtype; rows beyond the last offset are zeros.

    Without offsets there is one expert, with all rows.
    """
    R, N, K, E = rows.shape[0], weights.rows, weights.width, weights.scale.shape[0]
    if R == 0:
        return rows.new_zeros(0, K)
    every = slice(0, E)
    if rows.is_cuda and rows.dtype != torch.float32 and (offsets is None or N % 8 == 0 == K % 8):
        step = max(64, SCRATCH // (E * N * rows.element_size()) // 64 * 64)
        out = rows.new_empty(R, K)
        for first in range(0, K, step):
            columns = slice(first, min(first + step, K))
            dense = backend.dequantize(weights, every, columns, rows.dtype)
            if offsets is None:
                out[:, columns] = rows @ dense[0]
            else:
                out[:, columns] = F.grouped_mm(rows.contiguous(), dense, offs=offsets[1:])
        live = None if offsets is None else offsets[-1]
        return out if live is None else out.masked_fill_(torch.arange(R, device=out.device)[:, None] >= live, 0)
    ends = [0, R] if offsets is None else offsets.tolist()
    out = rows.new_zeros(R, K)
    for e in range(E):
        here = slice(ends[e], ends[e + 1])
        if here.start < here.stop:
            dense = backend.dequantize(weights, slice(e, e + 1), slice(0, K), torch.float32)[0]
            out[here] = (rows[here].float() @ dense).to(rows.dtype)
    return out


# ---- a layer, a linear ---------------------------------------------------------------------------


def layer_gradients(
    dy: Tensor, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, backend: Backend
) -> tuple[Tensor, Tensor]:
    """dy [T, H] of a fused layer -> (dx [T, H], d(top_k_weights) [T, top_k]).

    GEMM 1 is computed again; GEMM 2 is not: a slot's <dy, output> is <dy · w2, h>, and dy · w2 is needed anyway.
    """
    most = max(1, MAX_ROWS // max(1, top_k_index.shape[1]))
    if x.shape[0] > most:
        cuts = (t.split(most) for t in (dy, x, top_k_index, top_k_weights))
        parts = [layer_gradients(*cut, weights, backend) for cut in zip(*cuts, strict=True)]  # type: ignore[call-arg]
        return torch.cat([dx for dx, _ in parts]), torch.cat([dp for _, dp in parts])
    groups, top_k = group_by_expert(top_k_index, weights.num_experts), top_k_index.shape[1]
    order, offsets = groups.order, groups.offsets
    stages, w = _stages(weights, x, backend)
    z = up_rows(gather_rows(x, order, offsets, top_k), w, groups, stages)
    dy = gather_rows(dy, order, offsets, top_k)
    du = times_weights(dy, weights.projection("w2"), offsets, backend)
    weight = gather_rows(top_k_weights.reshape(-1, 1), order, offsets, 1).float()
    h, dz = backend.gate_gradient(weights.gate, z, (du * weight).to(du.dtype))
    if weights.activations == "nvfp4":
        h = _straight(h, w, groups, stages)
    dp = (du.float() * h).sum(-1, keepdim=True)
    if weights.b2 is not None:
        b2 = F.pad(weights.b2, (0, 0, 0, 1))[groups.expert_of_row()]
        dp += (dy.float() * b2).sum(-1, keepdim=True)
    dp = sum_slots(dp, order, offsets, 1).view(top_k_weights.shape).to(top_k_weights.dtype)
    dx = times_weights(dz, weights.projection("w13"), offsets, backend)
    return sum_slots(dx, order, offsets, top_k), dp


def _stages(weights: ExpertWeights, x: Tensor, backend: Backend) -> tuple[Backend, ExpertWeights]:
    """The backend that runs GEMM 1 by itself, and the weights as it reads them."""
    w = weights
    sizes = (w.num_experts, w.hidden_size, w.intermediate_size)
    problem = Problem("experts", *sizes, "raw", w.activations, x.dtype, fused=False)
    if backend.unsupported(Device.of(x.device), problem) is None:
        return backend, weights
    other = select(problem, x.device)
    return other, weights if weights.layout is None else named(weights.layout.backend).unpacked(weights)


def _straight(h: Tensor, weights: ExpertWeights, groups: Groups, backend: Backend) -> Tensor:
    """The values that W4A4 makes of rows h."""
    rows = backend.quantize_rows(h, None, weights.h_scale, groups)
    assert rows.sf is not None
    sf = nvfp4.unswizzle_sf_grouped(rows.sf, groups.offsets, groups.num_rows, rows.values.shape[1] // 8)
    return nvfp4.dequantize(rows.values, sf, rows.scale, h.dtype)[:, : h.shape[1]]


def linear_gradient(dy: Tensor, weights: LinearWeights, backend: Backend) -> Tensor:
    """dy [T, N] -> dx [T, K]."""
    return times_weights(dy, weights.projection(), None, backend)
