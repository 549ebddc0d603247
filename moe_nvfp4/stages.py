"""The two stages of the layer as torch.library ops, each with its gradient, on any backend.

    up    h = gate((x * factor) · w13ᵀ + b13 + x · Aᵀ · Bᵀ)            for each row: a token and its expert
    down  y = Σ_k weight_k · ((h * factor) · w2ᵀ + b2 + h · Aᵀ · Bᵀ)

A factor is AWQ's scale, A and B are an adapter (LoRA); both may be missing. The 4-bit weights are frozen, all else may
be trained. Rows without an expert may hold anything, even NaN.

The gradient of x · wᵀ is dy · w: the same weights, read along their other axis. A block scale spans 16 columns of one
row, so no kernel reads them well in that direction. Instead, a window of columns of all experts is dequantized into a
bounded scratch buffer, in the rows' dtype, and torch's grouped product multiplies by it. On CPUs, and for fp32 rows,
the experts are multiplied one after the other, in fp32.

Rows that W4A4 quantizes pass their gradient on as if they had not been quantized (the straight-through estimator).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.backends import Backend, Device, Problem, explain, named
from moe_nvfp4.checks import check_stage
from moe_nvfp4.door import differentiate, layer_op, like, no_gradients, present, refuse_gradient, saved, spread
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ExpertWeights, Gate, Matrices

SCRATCH = 1 << 29  # bytes of weights dequantized at a time; more only where 64 columns need more
MOST_GROUPS = 1023  # that torch's grouped product takes on a GPU (GroupMM.cu: one block prepares it, a thread for each)
MAX_ROWS = 1 << 16  # rows of a fused layer's gradient at a time: it holds several fp32 copies of GEMM 1's output


_EXTRAS = "Tensor? factor, Tensor? a, Tensor? b, Tensor? bias"
_GROUPS = "Tensor order, Tensor offsets, Tensor? position, Tensor? parts, Tensor? bare, int top_k"
_WAITS = (torch.Tag.cudagraph_unsafe,)  # the reference waits for the group offsets, which no CUDA graph can


class Adapter(NamedTuple):
    """A low-rank addition to one projection of every expert: y += x · Aᵀ · Bᵀ, with x as it is before AWQ's scales.

    a [E, r, K], b [E, N, r], floating; any factor on the addition is part of one of them.

    Or S of them, a [E, S, r, K] and b [E, S, N, r], of which each token has one or none: `Groups.parts` says which.
    """

    a: Tensor
    b: Tensor


class Extras(NamedTuple):
    """What a stage does besides the product with 4-bit weights.

    factor   AWQ's scales [E, K], which multiply the rows for that product
    adapter  an addition to that product
    amax     fp32 [R], for `down` of W4A4 with dynamic scales, where h is a part of the rows only (tensor parallelism):
             the largest magnitude of each whole row
    """

    factor: Tensor | None = None
    adapter: Adapter | None = None
    amax: Tensor | None = None


class Gradients(NamedTuple):
    """Of a stage: of its rows, its bias fp32 [E, N], its factor fp32 [E, K], and its adapter; None: there is none."""

    rows: Tensor
    bias: Tensor | None
    factor: Tensor | None
    a: Tensor | None
    b: Tensor | None


# ---- up ------------------------------------------------------------------------------------------


def up_rows(
    x: Tensor, extras: Extras, w: ExpertWeights, groups: Groups, backend: Backend, dtype: torch.dtype
) -> list[Tensor]:
    """x [T, H] -> [h `dtype` [R, I]], and with an adapter the sums before the gate [R, 2I], which the gradient needs.
    Where the gate is "raw", h is these sums."""
    if extras.adapter is None:
        return [_gemm1(x, extras.factor, w, groups, backend, dtype)]
    z = sums(x, extras, w, groups, backend)
    return [z] if w.gate.kind == "raw" else [backend.gate(w.gate, z), z]


def sums(x: Tensor, extras: Extras, w: ExpertWeights, groups: Groups, backend: Backend) -> Tensor:
    """`up_rows` before the gate: x [T, H] -> z [R, 2I] in x's dtype."""
    z = _gemm1(x, extras.factor, replace(w, gate=Gate("raw", gated=w.gate.gated)), groups, backend, x.dtype)
    if extras.adapter is not None:
        add_low_rank(z, x, extras.adapter, groups, backend, up=True)
    return z


def _gemm1(
    x: Tensor, factor: Tensor | None, w: ExpertWeights, groups: Groups, backend: Backend, dtype: torch.dtype
) -> Tensor:
    rows = Rows(x, index=groups.token) if factor is None else Rows(scaled(groups.gather(x), factor, groups))
    groups = replace(groups, top_k=1)  # GEMM 1 has rows, whatever token they are of
    if w.quantized:
        rows = backend.quantize_rows(rows.values, rows.index, w.x_scale, groups, w.four_over_six)
    return backend.gemm1_swiglu(rows, replace(w, h_scale=None), groups, dtype).values


def up_gradients(
    dh: Tensor, x: Tensor, z: Tensor, extras: Extras, w: ExpertWeights, groups: Groups, backend: Backend, bias: bool
) -> Gradients:
    """dh [R, I] of `up_rows`, whose `sums` were z -> the gradients of x [T, H] and all else (of the bias if asked)."""
    dz = dh if w.gate.kind == "raw" else backend.gate_gradient(w.gate, z, dh)[1]
    d_rows, d_factor, da, db = times_weights(dz, w.w13, groups.offsets, backend), None, None, None
    if extras.factor is not None:
        d_factor = groups.sum_by_expert(d_rows * groups.gather(x))
        d_rows = scaled(d_rows, extras.factor, groups)
    if extras.adapter is not None:
        added, da, db = _adapter_gradients(dz, groups.gather(x), extras.adapter, None, groups)
        d_rows += added
    d_bias = groups.sum_by_expert(dz) if bias else None
    return Gradients(groups.sum(d_rows), d_bias, d_factor, da, db)


def _groups(
    order: Tensor, offsets: Tensor, position: Tensor | None, parts: Tensor | None, bare: Tensor | None, top_k: int
) -> Groups:
    return Groups(order, offsets, top_k, position, parts, bare)


def _adapter(a: Tensor | None, b: Tensor | None) -> Adapter | None:
    return None if a is None or b is None else Adapter(a.contiguous(), b.contiguous())


def _check_up(w, x, factor, a, b, bias, order, offsets, position, parts, bare, top_k, dtype) -> None:
    assert w.w13.bias is None, "it is an argument of its own"
    w.w13 = w.w13._replace(bias=bias)
    check_stage("x", x, factor, _adapter(a, b), w, _groups(order, offsets, position, parts, bare, top_k), dtype)


def _fake_up(w, x, factor, a, b, bias, order, offsets, position, parts, bare, top_k, dtype):
    R, N13, I = order.shape[0], w.w13.N, w.intermediate_size
    raw = w.gate.kind == "raw"
    return [x.new_empty(R, N13 if raw else I, dtype=dtype), *([] if raw or a is None else [x.new_empty(R, N13)])]


@layer_op(f"Tensor x, {_EXTRAS}, {_GROUPS}, ScalarType dtype", "Tensor[]", _fake_up, _check_up, _WAITS)
def up(backend, w, x, factor, a, b, bias, order, offsets, position, parts, bare, top_k, dtype):
    groups, extras = _groups(order, offsets, position, parts, bare, top_k), Extras(factor, _adapter(a, b))
    return up_rows(x, extras, w, groups, backend, dtype)


@layer_op(
    f"Tensor dh, Tensor x, {_EXTRAS}, Tensor? z, bool d_bias, {_GROUPS}", "Tensor[]",
    lambda w, dh, x, factor, a, b, bias, z, d_bias, *_: [
        like(t) for t in present(x, factor, a, b, bias if d_bias else None)
    ],
    lambda w, dh, x, factor, a, b, bias, z, d_bias, *groups: _check_up(w, x, factor, a, b, bias, *(*groups, x.dtype)),
    _WAITS,
)  # fmt: skip
def up_backward(backend, w, dh, x, factor, a, b, bias, z, d_bias, order, offsets, position, parts, bare, top_k):
    if not len(order):
        return [torch.zeros_like(t) for t in present(x, factor, a, b, bias if d_bias else None)]
    groups = _groups(order, offsets, position, parts, bare, top_k).with_position()
    extras = Extras(factor, _adapter(a, b))
    if z is None and w.gate.kind != "raw":
        other, readable = staged(w, x.dtype, backend)
        z = sums(x, extras, readable, groups, other)
    found = up_gradients(dh, x, z, extras, w, groups, backend, d_bias)
    return [t.to(like.dtype) for t, like in zip(
        present(found.rows, found.factor, found.a, found.b, found.bias), present(x, factor, a, b, bias), strict=False
    )]  # fmt: skip


def _remember_up(ctx, inputs, output):
    *tensors, ctx.top_k, _, weights, ctx.spec = inputs
    ctx.save_for_backward(*tensors, output[1] if len(output) > 1 else None, *weights)


def _up_gradients(ctx, grads):
    x, factor, a, b, bias, *groups, z, weights = saved(ctx, 11)
    d_bias = ctx.needs_input_grad[4]
    found = up_backward(grads[0], x, factor, a, b, bias, z, d_bias, *groups, ctx.top_k, weights, ctx.spec)
    return *spread(found, x, factor, a, b, d_bias), *[None] * 7, no_gradients(ctx, 12), None


differentiate(up, _remember_up, _up_gradients)
refuse_gradient(up_backward)


# ---- down ----------------------------------------------------------------------------------------


def down_rows(
    h: Tensor, top_k_weights: Tensor | None, extras: Extras, w: ExpertWeights, groups: Groups, backend: Backend,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """h [R, I] -> y `dtype` [T, H]; without routing weights, the output of each slot [T * top_k, H]."""
    R, adapter, p = groups.num_rows, extras.adapter, top_k_weights
    given = h if extras.factor is None else scaled(h, extras.factor, groups)
    rows = _quantized(given, extras.amax, w, groups, backend) if w.quantized else Rows(given)
    if p is not None and adapter is None:
        return backend.gemm2_combine(rows, w, groups, p, dtype)
    alone = replace(groups, top_k=1)  # every slot by itself, as the only one of a token
    y = backend.gemm2_combine(rows, w, alone, torch.ones(R, 1, dtype=torch.float32, device=h.device), dtype)
    if adapter is not None:
        add_low_rank(y, h, adapter, groups, backend, up=False)
    return y if p is None else backend.combine(y, p)


def down_gradients(
    dy: Tensor, h: Tensor, top_k_weights: Tensor | None, extras: Extras, w: ExpertWeights, groups: Groups,
    backend: Backend, bias: bool,
) -> tuple[Gradients, Tensor | None]:  # fmt: skip
    """dy of `down_rows` -> (the gradients of h [R, I] and the rest, that of the bias if asked; that of top_k_weights).

    GEMM 2 is not computed again: a slot's <dy, output> is <dy · w2, h>, and dy · w2 is needed anyway.
    """
    (factor, adapter, amax), p, d_factor, da, db = extras, top_k_weights, None, None, None
    weight = None if p is None else p.reshape(-1, 1)[groups.order].float()
    dy = dy[groups.order] if p is None else groups.gather(dy)
    weighted = lambda t: t if weight is None else (t * weight).to(t.dtype)
    du = times_weights(dy, w.w2, groups.offsets, backend)  # of weight * given
    given = h if factor is None else scaled(h, factor, groups)
    dp = None if p is None else _dot(du, _straight(given, amax, w, groups, backend) if w.quantized else given)
    dh = weighted(du)
    if factor is not None:
        d_factor = groups.sum_by_expert(dh * h)
        dh = scaled(dh, factor, groups)
    if adapter is not None:
        added, da, db = _adapter_gradients(dy, h, adapter, weight, groups)
        dh = dh + weighted(added)
        dp = None if dp is None else dp + _dot(added, h)
    if dp is not None and w.w2.bias is not None:
        dp += _dot(dy, F.pad(w.w2.bias, (0, 0, 0, 1))[groups.expert_of_row()])
    d_bias = groups.sum_by_expert(weighted(dy)) if bias else None
    found = Gradients(dh.to(h.dtype).masked_fill_(groups.unrouted, 0), d_bias, d_factor, da, db)
    return found, None if dp is None or p is None else groups.slots(dp).view(p.shape).to(p.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner products of rows, fp32 [R, 1]."""
    return (a.float() * b).sum(-1, keepdim=True)


def _quantized(h: Tensor, amax: Tensor | None, w: ExpertWeights, groups: Groups, backend: Backend) -> Rows:
    """Rows h as W4A4 quantizes them."""
    if amax is None or w.h_scale is not None:
        return backend.quantize_rows(h, None, w.h_scale, groups, w.four_over_six)
    scale = nvfp4.global_scale_for(amax, nvfp4.sf_max(w.four_over_six))
    codes, sf, _ = nvfp4.quantize(nvfp4.pad_k(h), scale, check=False, four_over_six=w.four_over_six)
    return Rows(codes, nvfp4.swizzle_sf_grouped(sf.view(torch.uint8), groups.offsets), scale)


def _straight(h: Tensor, amax: Tensor | None, w: ExpertWeights, groups: Groups, backend: Backend) -> Tensor:
    """Rows h as W4A4 rounds them: quantized and dequantized again."""
    backend, _ = staged(w, h.dtype, backend)
    rows = _quantized(h, amax, w, groups, backend)
    assert rows.sf is not None
    sf = nvfp4.unswizzle_sf_grouped(rows.sf, groups.offsets, groups.num_rows, rows.values.shape[1] // 8)
    return nvfp4.dequantize(rows.values, sf, rows.scale, h.dtype)[:, : h.shape[1]]


_DOWN = f"Tensor h, Tensor? top_k_weights, Tensor? amax, {_EXTRAS}, {_GROUPS}"


def _check_down(w, h, p, amax, factor, a, b, bias, order, offsets, position, parts, bare, top_k, dtype):
    assert w.w2.bias is None, "it is an argument of its own"
    w.w2 = w.w2._replace(bias=bias)
    check_stage(
        "h", h, factor, _adapter(a, b), w, _groups(order, offsets, position, parts, bare, top_k), dtype, p, amax
    )


def _fake_down(w, h, p, amax, factor, a, b, bias, order, offsets, position, parts, bare, top_k, dtype):
    return h.new_empty(order.shape[0] if p is None else p.shape[0], w.hidden_size, dtype=dtype)


@layer_op(f"{_DOWN}, ScalarType dtype", "Tensor", _fake_down, _check_down, _WAITS)
def down(backend, w, h, top_k_weights, amax, factor, a, b, bias, order, offsets, position, parts, bare, top_k, dtype):
    groups, extras = _groups(order, offsets, position, parts, bare, top_k), Extras(factor, _adapter(a, b), amax)
    return down_rows(h, top_k_weights, extras, w, groups, backend, dtype)


@layer_op(
    f"Tensor dy, {_DOWN}, bool d_bias", "Tensor[]",
    lambda w, dy, h, p, amax, factor, a, b, bias, *rest: [
        like(t) for t in present(h, p, factor, a, b, bias if rest[-1] else None)
    ],
    lambda w, dy, *given: _check_down(w, *(*given[:-1], dy.dtype)),
    _WAITS,
)  # fmt: skip
def down_backward(
    backend, w, dy, h, top_k_weights, amax, factor, a, b, bias, order, offsets, position, parts, bare, top_k, d_bias
):  # fmt: skip
    if not len(order):
        return [torch.zeros_like(t) for t in present(h, top_k_weights, factor, a, b, bias if d_bias else None)]
    groups = _groups(order, offsets, position, parts, bare, top_k).with_position()
    extras = Extras(factor, _adapter(a, b), amax)
    found, dp = down_gradients(dy, h, top_k_weights, extras, w, groups, backend, d_bias)
    return [t.to(like.dtype) for t, like in zip(
        present(found.rows, dp, found.factor, found.a, found.b, found.bias),
        present(h, top_k_weights, factor, a, b, bias), strict=False,
    )]  # fmt: skip


def _remember_down(ctx, inputs, output):
    *tensors, ctx.top_k, _, weights, ctx.spec = inputs
    ctx.save_for_backward(*tensors, *weights)


def _down_gradients(ctx, dy):
    h, p, amax, factor, a, b, bias, *groups, weights = saved(ctx, 12)
    d_bias = ctx.needs_input_grad[6]
    found = down_backward(dy, h, p, amax, factor, a, b, bias, *groups, ctx.top_k, d_bias, weights, ctx.spec)
    dh, dp, *rest = spread(found, h, p, factor, a, b, d_bias)
    return dh, dp, None, *rest, *[None] * 7, no_gradients(ctx, 14), None


differentiate(down, _remember_down, _down_gradients)
refuse_gradient(down_backward)


# ---- both ----------------------------------------------------------------------------------------


def gradients(
    dy: Tensor, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, w: ExpertWeights, backend: Backend, biases: bool
) -> list[Tensor]:
    """dy [T, H] of a fused layer -> the gradients of x [T, H], of top_k_weights [T, top_k] and, if asked, of both
    biases in fp32. GEMM 1 is computed again."""
    most = max(1, MAX_ROWS // max(1, top_k_index.shape[1]))
    if x.shape[0] > most:
        cuts = (t.split(most) for t in (dy, x, top_k_index, top_k_weights))
        parts = [gradients(*cut, w, backend, biases) for cut in zip(*cuts, strict=True)]  # type: ignore[call-arg]
        dxs, dps, *added = zip(*parts, strict=True)
        return [torch.cat(dxs), torch.cat(dps), *(torch.stack(d).sum(0) for d in added)]
    groups = group_by_expert(top_k_index, w.num_experts).with_position()
    first, readable = staged(w, x.dtype, backend)
    z = sums(x, Extras(), readable, groups, first)
    h = backend.gate(w.gate, z)
    below, dp = down_gradients(dy, h, top_k_weights, Extras(), w, groups, backend, biases)
    above = up_gradients(below.rows, x, z, Extras(), w, groups, backend, biases)
    return [t for t in (above.rows, dp, above.bias, below.bias) if t is not None]


def staged(w: ExpertWeights, dtype: torch.dtype, backend: Backend) -> tuple[Backend, ExpertWeights]:
    """A backend that can run GEMM 1 by itself, and the weights in the layout that it reads."""
    device = Device.of(w.w13.codes.device)
    sizes = w.num_experts, w.hidden_size, w.intermediate_size
    problem = Problem("experts", *sizes, "raw", w.activations, dtype, fused=False)
    if backend.unsupported(device, problem) is None:
        return backend, w
    if w.layout is not None:
        values = named(w.layout).values
        w = replace(w, w13=values(w.w13), w2=values(w.w2))
    return explain(problem, device).backend, w


# ---- products ------------------------------------------------------------------------------------


def scaled(rows: Tensor, factor: Tensor, groups: Groups) -> Tensor:
    """Rows [R, K] times their expert's factors [E, K]; unrouted rows times some expert's."""
    expert = groups.expert_of_row().clamp(max=factor.shape[0] - 1)
    return rows * factor[expert].to(rows.dtype)


def times_weights(rows: Tensor, weights: Matrices, offsets: Tensor | None, backend: Backend) -> Tensor:
    """rows [R, N] times their expert's matrix [N, K] -> [R, K] in their dtype.

    Without offsets, all rows belong to a single expert.
    """
    R, N, K, E = rows.shape[0], weights.N, weights.K, len(weights.global_scale)
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


def _times_windows(rows: Tensor, weights: Matrices, offsets: Tensor | None, backend: Backend) -> Tensor:
    """`times_weights` by windows of columns of all experts, one after the other: nothing waits for the offsets."""
    N, K, E = weights.N, weights.K, len(weights.global_scale)
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


# ---- adapters ------------------------------------------------------------------------------------


def padded_rank(rank: int) -> int:
    """The rank that `joined` brings an adapter to: a multiple of 8, which torch's grouped product needs."""
    return -(-rank // 8) * 8


def joined(adapters: tuple[Adapter, ...], dtype: torch.dtype) -> Adapter | tuple[None, None]:
    """The adapters of one projection as a single one, in `dtype` and with a `padded_rank`. They are added; each may be
    several, of which a token has one."""
    if not adapters:
        return None, None
    a = torch.cat([adapter.a for adapter in adapters], dim=-2) if len(adapters) > 1 else adapters[0].a
    b = torch.cat([adapter.b for adapter in adapters], dim=-1) if len(adapters) > 1 else adapters[0].b
    if missing := padded_rank(a.shape[-2]) - a.shape[-2]:
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    return Adapter(a.to(dtype).contiguous(), b.to(dtype).contiguous())


class _Parts(NamedTuple):
    """An adapter by groups of rows that share its matrices: a [G, r, K], b [G, N, r], offsets [G + 1]; and the rows
    that have none, bool [R, 1]."""

    a: Tensor
    b: Tensor
    offsets: Tensor
    bare: Tensor | None

    @classmethod
    def of(cls, adapter: Adapter, groups: Groups) -> _Parts:
        if adapter.a.dim() == 3:
            return cls(*adapter, groups.offsets, None)
        assert groups.parts is not None and groups.bare is not None
        return cls(adapter.a.flatten(0, 1), adapter.b.flatten(0, 1), groups.parts, groups.bare[:, None])

    def only(self, low: Tensor) -> Tensor:
        """Rows [R, r] between the two products, zeros where there is no adapter."""
        return low if self.bare is None else low.masked_fill_(self.bare, 0)


def add_low_rank(out: Tensor, x: Tensor, adapter: Adapter, groups: Groups, backend: Backend, up: bool) -> None:
    """Add what an adapter adds to a projection, in place: to the sums [R, N] of tokens x [T, K] if `up`, else to the
    outputs of slots [T * top_k, N] of rows x [R, K]."""
    parts = _Parts.of(adapter, groups)
    rows = (groups.order, groups.top_k, None) if up else (None, 1, groups.order)
    if backend.add_low_rank(out, x, parts.a, parts.b, parts.offsets, groups.bare, *rows):
        return
    low = parts.only(grouped_mm(groups.gather(x) if up else x, parts.a.mT, parts.offsets))
    added = grouped_mm(low, parts.b.mT, parts.offsets)
    out.add_(added if up else groups.slots(added).view_as(out))


def _adapter_gradients(
    dy: Tensor, rows: Tensor, adapter: Adapter, weight: Tensor | None, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """dy [R, N] of an adapter's addition before it is weighted -> (that of the rows before it is weighted, da, db)."""
    parts = _Parts.of(adapter, groups)
    weighted = lambda t: t if weight is None else (t * weight).to(t.dtype)
    low = parts.only(grouped_mm(dy, parts.b, parts.offsets))
    da = grouped_mm(weighted(low).T, rows, parts.offsets)
    db = grouped_mm(dy.T, weighted(parts.only(grouped_mm(rows, parts.a.mT, parts.offsets))), parts.offsets)
    return grouped_mm(low, parts.a, parts.offsets), da.view_as(adapter.a), db.view_as(adapter.b)


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """a [R, K] times its expert's b [E, K, N] -> [R, N]; or, expert by expert, a [K, R] times b [R, N] -> [E, K, N].

    By torch's grouped product where sizes are multiples of 16 bytes, else one expert after the other, as on a CPU where
    there are fewer rows than experts.
    """
    unit, ends = 16 // a.element_size(), offsets[1:]
    if b.dim() == 3:
        few = a.device.type == "cpu" and len(a) < len(b)
        if a.shape[1] % unit == 0 == b.shape[2] % unit and len(a) and not few:
            return _by_torch(a.contiguous(), b, ends)
        out = a.new_zeros(a.shape[0], b.shape[2])
        for e, (first, last) in enumerate(pairwise(offsets.tolist())):
            if first < last:
                out[first:last] = a[first:last] @ b[e]
        return out
    if a.shape[0] % unit == 0 == b.shape[1] % unit and len(b):
        # for experts without rows it may leave the memory uninitialized
        return F.grouped_mm(a, b.contiguous(), offs=ends).masked_fill_((offsets.diff() == 0)[:, None, None], 0)
    return torch.stack([a[:, first:last] @ b[first:last] for first, last in pairwise(offsets.tolist())])


def _by_torch(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm` in calls that have no more groups than torch takes."""
    out = F.grouped_mm(a, b[:MOST_GROUPS], offs=ends[:MOST_GROUPS])
    for first in range(MOST_GROUPS, len(b), MOST_GROUPS - 1):
        # the first group of these stands for all rows before them, which have their products
        here = slice(first - 1, first - 1 + MOST_GROUPS)
        more, rows = F.grouped_mm(a, b[here], offs=ends[here]), torch.arange(len(a), device=a.device)
        out = torch.where(rows[:, None] < ends[first - 1], out, more)
    return out
