"""Gradients through frozen 4-bit weights: with respect to x, to the routing weights and to the gate's input.

The gradient of x · wᵀ is dy · w: the same weights, read along their other axis. A block scale spans 16 columns of one
row, so no kernel reads them well in that direction. Instead, a window of columns of all experts is dequantized into a
bounded scratch buffer, in the rows' dtype, and torch's grouped product multiplies by it. On CPUs, and for fp32 rows,
the experts are multiplied one after the other, in fp32.

Rows that W4A4 quantizes pass their gradient on as if they had not been quantized (the straight-through estimator).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.backends import Backend, Device, Problem, explain, named
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, Projection

SCRATCH = 1 << 29  # bytes of weights dequantized at a time; more only where 64 columns need more
MAX_ROWS = 1 << 16  # rows of a fused layer at a time: its backward pass holds several fp32 copies of GEMM 1's output


# ---- rows and slots ------------------------------------------------------------------------------


class Slots:
    """The token and slot of each row of `Groups`. Rows without an expert may hold anything, even NaN."""

    def __init__(self, order: Tensor, offsets: Tensor, top_k: int):
        self.order, self.offsets, self.top_k = order, offsets, top_k

    @cached_property
    def token(self) -> Tensor:
        """int32 [R]"""
        return self.order // self.top_k

    @cached_property
    def unrouted(self) -> Tensor:
        """bool [R, 1]: the rows without an expert."""
        return torch.arange(self.order.shape[0], device=self.order.device)[:, None] >= self.offsets[-1]

    @cached_property
    def position(self) -> Tensor:
        """int32 [R]: the row of each slot, the inverse of `order`."""
        rows = torch.arange(self.order.shape[0], dtype=torch.int32, device=self.order.device)
        return torch.empty_like(rows).index_copy_(0, self.order.long(), rows)

    def gather(self, x: Tensor) -> Tensor:
        """x [T, *] -> [R, *]."""
        return x[self.token]

    def weight(self, top_k_weights: Tensor) -> Tensor:
        """top_k_weights [T, top_k] -> fp32 [R, 1]: the routing weight of each row."""
        return top_k_weights.reshape(-1, 1)[self.order].float()

    def slots(self, rows: Tensor) -> Tensor:
        """rows [R, *] -> [T, top_k, *], zeros where there is no expert."""
        slots = rows[self.position].masked_fill_(self.unrouted[self.position], 0)
        return slots.view(-1, self.top_k, *rows.shape[1:])

    def sum(self, rows: Tensor) -> Tensor:
        """The transpose of `gather`: [R, *] -> [T, *], in fp32 and in slot order, rounded once."""
        return self.slots(rows).sum(1, dtype=torch.float32).to(rows.dtype)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """rows [R, H], top_k_weights [T, top_k] -> [T, H]: in fp32 and in slot order, rounded once."""
        return (self.slots(rows) * weights[..., None].float()).sum(1).to(rows.dtype)

    def combine_gradients(self, dy: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """dy [T, H] of `combine` -> (d(rows), zero for rows without an expert; d(weights))."""
        dy = self.gather(dy)
        dp = self.slots((dy.float() * rows).sum(-1, keepdim=True))
        d_rows = (dy * self.weight(weights)).to(rows.dtype)
        return d_rows.masked_fill_(self.unrouted, 0), dp.view(weights.shape).to(weights.dtype)


def sums_by_expert(rows: Tensor, groups: Groups) -> Tensor:
    """rows [R, N] -> fp32 [E, N]: a product with ones, so that nothing waits for the offsets."""
    experts = torch.arange(groups.num_experts, device=rows.device)
    return (groups.expert_of_row() == experts[:, None]).float() @ rows.float()


# ---- products ------------------------------------------------------------------------------------


def up_rows(rows: Tensor, weights: ExpertWeights, groups: Groups, backend: Backend) -> Tensor:
    """GEMM 1 before the gate: rows [R, H] -> [R, 2I] in their dtype, W4A4 included."""
    w = replace(weights, gate=Gate("raw", gated=weights.gate.gated), h_scale=None)
    taken = _taken(rows, w.x_scale, w, groups, backend)
    return backend.gemm1_swiglu(taken, w, groups, rows.dtype).values


def down_rows(h: Tensor, weights: ExpertWeights, groups: Groups, backend: Backend) -> Tensor:
    """GEMM 2 before the combine: h [R, I] -> [R, H] in its dtype."""
    R = groups.num_rows
    alone = Groups(torch.arange(R, dtype=torch.int32, device=h.device), groups.offsets, 1)
    ones = torch.ones(R, 1, dtype=torch.float32, device=h.device)
    taken = _taken(h, weights.h_scale, weights, alone, backend)
    return backend.gemm2_combine(taken, weights, alone, ones, h.dtype)


def _taken(rows: Tensor, scale: Tensor | None, weights: ExpertWeights, groups: Groups, backend: Backend) -> Rows:
    """Rows in the form that a GEMM of this layer takes: quantized for W4A4, else as they are."""
    if not weights.quantized:
        return Rows(rows)
    return backend.quantize_rows(rows, None, scale, groups, weights.four_over_six)


def times_weights(rows: Tensor, weights: Projection, offsets: Tensor | None, backend: Backend) -> Tensor:
    """rows [R, N] times their expert's matrix [N, K] -> [R, K] in their dtype.

    Without offsets, all rows belong to a single expert.
    """
    R, N, K, E = rows.shape[0], weights.rows, weights.width, weights.scale.shape[0]
    if R and rows.is_cuda and rows.dtype != torch.float32 and (offsets is None or N % 8 == 0 == K % 8):
        return _times_windows(rows, weights, offsets, backend)
    ends = [0, R] if offsets is None else offsets.tolist()
    out = rows.new_zeros(R, K)
    for e in range(E):
        here = slice(ends[e], ends[e + 1])
        if here.start < here.stop:
            dense = backend.dequantize(weights, slice(e, e + 1), slice(0, K), torch.float32)[0]
            out[here] = (rows[here].float() @ dense).to(rows.dtype)
    return out


def _times_windows(rows: Tensor, weights: Projection, offsets: Tensor | None, backend: Backend) -> Tensor:
    """`times_weights` by windows of columns of all experts, one after the other: nothing waits for the offsets."""
    N, K, E = weights.rows, weights.width, weights.scale.shape[0]
    step = max(64, SCRATCH // (E * N * rows.element_size()) // 64 * 64)
    out = rows.new_empty(rows.shape[0], K)
    for first in range(0, K, step):
        columns = slice(first, min(first + step, K))
        dense = backend.dequantize(weights, slice(0, E), columns, rows.dtype)
        if offsets is None:
            out[:, columns] = rows @ dense[0]
        else:
            out[:, columns] = F.grouped_mm(rows.contiguous(), dense, offs=offsets[1:])
    return out


# ---- a layer, a linear ---------------------------------------------------------------------------


class Adapter(NamedTuple):
    """A low-rank addition to one projection of every expert: y += x · Aᵀ · Bᵀ, with x as it is before AWQ's scales.

    a [E, r, K], b [E, N, r], floating; any factor on the addition is part of one of them.
    """

    a: Tensor
    b: Tensor


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """a [R, K] times its expert's b [E, K, N] -> [R, N]; or, expert by expert, a [K, R] times b [R, N] -> [E, K, N].

    By torch's grouped product where sizes are multiples of 16 bytes, else one expert after the other.
    """
    unit, ends = 16 // a.element_size(), offsets[1:]
    if b.dim() == 3:
        if a.shape[1] % unit == 0 == b.shape[2] % unit and len(a):
            return F.grouped_mm(a.contiguous(), b, offs=ends)
        out = a.new_zeros(a.shape[0], b.shape[2])
        for e, (first, last) in enumerate(pairwise(offsets.tolist())):
            out[first:last] = a[first:last] @ b[e]
        return out
    if a.shape[0] % unit == 0 == b.shape[1] % unit and len(b):
        # for experts without rows it may leave the memory uninitialized
        return F.grouped_mm(a, b.contiguous(), offs=ends).masked_fill_((offsets.diff() == 0)[:, None, None], 0)
    return torch.stack([a[:, first:last] @ b[first:last] for first, last in pairwise(offsets.tolist())])


def adapted_layer(
    x: Tensor,
    groups: Groups,
    top_k_weights: Tensor,
    weights: ExpertWeights,
    adapters: list[Adapter | None],
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """A fused layer with an adapter, or none, for each projection -> (y [T, H], GEMM 1's sums [R, 2I])."""
    slots = Slots(groups.order, groups.offsets, groups.top_k)
    rows = slots.gather(x)
    z = up_rows(rows, weights, groups, backend)
    if adapters[0] is not None:
        z = z.add_(low_rank(rows, adapters[0], groups.offsets))
    h = backend.gate(weights.gate, z)
    y = down_rows(h, weights, groups, backend)
    if adapters[1] is not None:
        y = y.add_(low_rank(h, adapters[1], groups.offsets))
    return slots.combine(y, top_k_weights), z


def low_rank(rows: Tensor, adapter: Adapter, offsets: Tensor) -> Tensor:
    """What an adapter adds to a projection of rows [R, K]: [R, N]."""
    return grouped_mm(grouped_mm(rows, adapter.a.mT, offsets), adapter.b.mT, offsets)


def layer_gradients(
    dy: Tensor, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, backend: Backend
) -> tuple[Tensor, Tensor]:
    """dy [T, H] of a fused layer -> (dx [T, H], d(top_k_weights) [T, top_k]); GEMM 1 is computed again."""
    most = max(1, MAX_ROWS // max(1, top_k_index.shape[1]))
    if x.shape[0] > most:
        cuts = (t.split(most) for t in (dy, x, top_k_index, top_k_weights))
        parts = [layer_gradients(*cut, weights, backend) for cut in zip(*cuts, strict=True)]  # type: ignore[call-arg]
        return torch.cat([dx for dx, _ in parts]), torch.cat([dp for _, dp in parts])
    groups = group_by_expert(top_k_index, weights.num_experts)
    stages, w = _stages(weights, x, backend)
    slots = Slots(groups.order, groups.offsets, groups.top_k)
    rows = slots.gather(x)
    z = up_rows(rows, w, groups, stages)
    dx, dp, _ = adapted_gradients(dy, rows, z, slots, top_k_weights, weights, [None, None], backend)
    return dx, dp


def adapted_gradients(
    dy: Tensor,
    rows: Tensor,
    z: Tensor,
    slots: Slots,
    top_k_weights: Tensor,
    weights: ExpertWeights,
    adapters: list[Adapter | None],
    backend: Backend,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """dy [T, H] of `adapted_layer`, its rows of x, its sums z -> (dx [T, H], d(top_k_weights), [da13, db13, da2, db2]).

    GEMM 2 is not computed again: a slot's <dy, output> is <dy · w2, h>, and dy · w2 is needed anyway.
    """
    offsets, (up, down) = slots.offsets, adapters
    found: list[Tensor | None] = [None] * 4
    dy, weight = slots.gather(dy), slots.weight(top_k_weights)
    du = times_weights(dy, weights.projection("w2"), offsets, backend)  # of weight * h
    total, dp = du, torch.zeros_like(weight)
    if down is not None:
        low = grouped_mm(dy, down.b, offsets)
        added = grouped_mm(low, down.a, offsets)
        total = du + added
    h, dz = backend.gate_gradient(weights.gate, z, (total * weight).to(du.dtype))
    if down is not None:
        found[2] = grouped_mm((low * weight).to(h.dtype).T, h, offsets)
        found[3] = grouped_mm(dy.T, (grouped_mm(h, down.a.mT, offsets) * weight).to(dy.dtype), offsets)
        dp += (added.float() * h).sum(-1, keepdim=True)
        del added, total  # as large as h
    if weights.quantized:  # the weights were multiplied by the rounded h, the adapter by h itself
        groups = Groups(slots.order, offsets, slots.top_k)
        stages, w = _stages(weights, rows, backend)
        h = _straight(h, w, groups, stages)
    dp += (du.float() * h).sum(-1, keepdim=True)
    if weights.b2 is not None:
        expert = Groups(slots.order, offsets, slots.top_k).expert_of_row()
        dp += (dy.float() * F.pad(weights.b2, (0, 0, 0, 1))[expert]).sum(-1, keepdim=True)
    dp = slots.slots(dp).view(top_k_weights.shape)
    dx = times_weights(dz, weights.projection("w13"), offsets, backend)
    if up is not None:
        low = grouped_mm(dz, up.b, offsets)
        dx += grouped_mm(low, up.a, offsets)
        found[0] = grouped_mm(low.T, rows, offsets)
        found[1] = grouped_mm(dz.T, grouped_mm(rows, up.a.mT, offsets), offsets)
    return slots.sum(dx), dp.to(top_k_weights.dtype), found


def _stages(weights: ExpertWeights, x: Tensor, backend: Backend) -> tuple[Backend, ExpertWeights]:
    """A backend that can run GEMM 1 by itself, and the weights in the layout that it reads."""
    w = weights
    sizes = (w.num_experts, w.hidden_size, w.intermediate_size)
    problem = Problem("experts", *sizes, "raw", w.activations, x.dtype, fused=False)
    if backend.unsupported(Device.of(x.device), problem) is None:
        return backend, weights
    other = explain(problem, Device.of(x.device)).backend
    return other, weights if weights.layout is None else named(weights.layout.backend).unpacked(weights)


def _straight(h: Tensor, weights: ExpertWeights, groups: Groups, backend: Backend) -> Tensor:
    """Rows h as W4A4 rounds them: quantized and dequantized again."""
    rows = backend.quantize_rows(h, None, weights.h_scale, groups, weights.four_over_six)
    assert rows.sf is not None
    sf = nvfp4.unswizzle_sf_grouped(rows.sf, groups.offsets, groups.num_rows, rows.values.shape[1] // 8)
    return nvfp4.dequantize(rows.values, sf, rows.scale, h.dtype)[:, : h.shape[1]]


def linear_gradient(dy: Tensor, weights: LinearWeights, backend: Backend) -> Tensor:
    """dy [T, N] -> dx [T, K]."""
    return times_weights(dy, weights.projection(), None, backend)
