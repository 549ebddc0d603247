"""The layer under autograd: its stages as torch.library ops with gradients, and `train_experts`, which makes a layer
of them.

    x ── gather_rows ── project w13 (+ adapters) ── gate ── project w2 (+ adapters) ── combine ── y

The 4-bit weights are frozen. What runs between the ops is torch's, so that a gate or norm of the model's own and
adapters get their gradients from autograd; each op's gradient is an op too, opaque to torch.compile. None of those has
a gradient of its own: second derivatives are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from moe_nvfp4 import backward
from moe_nvfp4.backends import named_on
from moe_nvfp4.checks import check_stage
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ExpertWeights, read_spec

_WEIGHTS = "Tensor?[] weights, str spec"
_GROUPS = "Tensor order, Tensor offsets"


class Adapter(NamedTuple):
    """A low-rank addition to one projection of every expert: y += x · Aᵀ · Bᵀ, with x as it is before AWQ's scales.

    a [E, r, K], b [E, N, r], floating; whatever scales the addition is in one of them.
    """

    a: Tensor
    b: Tensor


Adapters = tuple[tuple[Adapter, ...], tuple[Adapter, ...]]  # of w13 and of w2


class Hooks(NamedTuple):
    """What of the model's own runs between the stages; see `ops.moe_forward`."""

    own_gate: Callable[[Tensor], Tensor] | None = None
    post_expert_norm: Callable[[Tensor], Tensor] | None = None
    x_factor: Tensor | None = None
    h_factor: Tensor | None = None
    observe: Callable[[Tensor, Tensor], None] | None = None
    adapters: Adapters = ((), ())

    @property
    def fused(self) -> bool:
        """Whether there is nothing."""
        gate, norm, x_factor, h_factor, observe, adapters = self
        nothing = gate is None and norm is None and x_factor is None and h_factor is None and observe is None
        return nothing and len(adapters[0]) + len(adapters[1]) == 0


# ---- second derivatives: there are none ----------------------------------------------------------
# What takes the place of a formula is an op itself: compiled code works where nobody asks for them.


@torch.library.custom_op("moe_nvfp4::no_gradient", schema="(Tensor grad, Tensor like, str why) -> Tensor",
                         mutates_args=())  # fmt: skip
def no_gradient(grad, like, why):
    raise NotImplementedError(why)


@no_gradient.register_fake
def _(grad, like, why):
    return torch.empty_like(like)


def refuse_gradient(op: Any, why: str) -> None:
    """Make `op` a part of the graph, so that nothing behind it gets a gradient of zero without a word."""

    def remember(ctx, inputs, output) -> None:
        ctx.set_materialize_grads(False)
        ctx.inputs = inputs

    def refuse(ctx, *grads):
        # an op that returns a list gets its gradients as a list
        grad = next(g for g in tree_leaves(grads) if g is not None)
        return tree_map(lambda needed, t: no_gradient(grad, t, why) if needed else None, ctx.needs_input_grad,
                        ctx.inputs)  # fmt: skip

    op.register_autograd(refuse, setup_context=remember)


def no_gradients(ctx, i: int) -> Any:
    """For input i of an op: None, or for a list of tensors (where none is missing torch takes it as one) a list."""
    return tree_map(lambda _: None, ctx.needs_input_grad[i])


def refuse_twice(op: Any) -> None:
    refuse_gradient(
        op, "second derivatives of 4-bit experts and linears are not implemented: call backward without create_graph, "
        "or differentiate the dense model",
    )  # fmt: skip


# ---- rows ----------------------------------------------------------------------------------------


@torch.library.custom_op(
    "moe_nvfp4::gather_rows", schema=f"(Tensor x, {_GROUPS}, int top_k) -> Tensor", mutates_args=()
)
def gather_rows(x, order, offsets, top_k):
    return backward.gather_rows(x, order, offsets, top_k)


@gather_rows.register_fake
def _(x, order, offsets, top_k):
    return x.new_empty(order.shape[0], *x.shape[1:])


@torch.library.custom_op(
    "moe_nvfp4::sum_slots", schema=f"(Tensor rows, {_GROUPS}, int top_k) -> Tensor", mutates_args=()
)
def sum_slots(rows, order, offsets, top_k):
    return backward.sum_slots(rows, order, offsets, top_k)


@sum_slots.register_fake
def _(rows, order, offsets, top_k):
    return rows.new_empty(order.shape[0] // top_k, *rows.shape[1:])


def _transposed(other: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda ctx, grad: (other(grad, *ctx.saved_tensors, ctx.top_k), None, None, None)


def _remember_groups(ctx, inputs, output) -> None:
    _, order, offsets, ctx.top_k = inputs
    ctx.save_for_backward(order, offsets)


gather_rows.register_autograd(_transposed(sum_slots), setup_context=_remember_groups)
sum_slots.register_autograd(_transposed(gather_rows), setup_context=_remember_groups)


@torch.library.custom_op(
    "moe_nvfp4::combine", schema=f"(Tensor rows, Tensor top_k_weights, {_GROUPS}) -> Tensor", mutates_args=()
)
def combine(rows, top_k_weights, order, offsets):
    return backward.combine(rows, top_k_weights, order, offsets)


@combine.register_fake
def _(rows, top_k_weights, order, offsets):
    return rows.new_empty(top_k_weights.shape[0], rows.shape[1])


@torch.library.custom_op(
    "moe_nvfp4::combine_backward",
    schema=f"(Tensor dy, Tensor rows, Tensor top_k_weights, {_GROUPS}) -> Tensor[]",
    mutates_args=(),
)
def combine_backward(dy, rows, top_k_weights, order, offsets):
    return list(backward.combine_gradients(dy, rows, top_k_weights, order, offsets))


@combine_backward.register_fake
def _(dy, rows, top_k_weights, order, offsets):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (rows, top_k_weights)]


combine.register_autograd(
    lambda ctx, dy: (*combine_backward(dy, *ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
refuse_twice(combine_backward)


# ---- products with the weights -------------------------------------------------------------------


@torch.library.custom_op(
    "moe_nvfp4::project",
    schema=f"(Tensor rows, Tensor? bias, {_WEIGHTS}, {_GROUPS}, str name) -> Tensor",
    mutates_args=(),
)
def project(rows, bias, weights, spec, order, offsets, name):
    w, groups = _projection(rows, bias, weights, spec, order, offsets, name)
    backend = named_on(read_spec(spec).backend, rows.device)
    return (backward.up_rows if name == "w13" else backward.down_rows)(rows, w, groups, backend)


@project.register_fake
def _(rows, bias, weights, spec, order, offsets, name):
    w, _ = _projection(rows, bias, weights, spec, order, offsets, name)
    return rows.new_empty(rows.shape[0], w.projection(name).rows)


def _projection(rows, bias, weights, spec, order, offsets, name) -> tuple[ExpertWeights, Groups]:
    w = ExpertWeights.from_tensors(weights, read_spec(spec))
    w.b13, w.b2 = (bias, None) if name == "w13" else (None, bias)
    plain = ExpertWeights.from_tensors(w.tensors(), read_spec(spec)._replace(activations="bf16"))
    return w, check_stage("x" if name == "w13" else "h", Rows(rows), plain, order, offsets, rows.dtype, None)


@torch.library.custom_op(
    "moe_nvfp4::project_backward", schema=f"(Tensor dy, {_WEIGHTS}, Tensor offsets, str name) -> Tensor",
    mutates_args=(),
)  # fmt: skip
def project_backward(dy, weights, spec, offsets, name):
    w = ExpertWeights.from_tensors(weights, read_spec(spec)).projection(name)
    return backward.times_weights(dy, w, offsets, named_on(read_spec(spec).backend, dy.device))


@project_backward.register_fake
def _(dy, weights, spec, offsets, name):
    return dy.new_empty(dy.shape[0], ExpertWeights.from_tensors(weights, read_spec(spec)).projection(name).width)


def _remember_projection(ctx, inputs, output) -> None:
    _, bias, weights, ctx.spec, order, offsets, ctx.name = inputs
    ctx.save_for_backward(order, offsets, *weights)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _projection_gradients(ctx, dy):
    order, offsets, *weights = ctx.saved_tensors
    d_rows = d_bias = None
    if ctx.needs_input_grad[0]:
        d_rows = project_backward(dy, weights, ctx.spec, offsets, ctx.name)
    if ctx.needs_input_grad[1]:
        d_bias = backward.sums_by_expert(dy, Groups(order, offsets, 1)).to(ctx.bias_dtype)
    return d_rows, d_bias, no_gradients(ctx, 2), None, None, None, None


project.register_autograd(_projection_gradients, setup_context=_remember_projection)
refuse_twice(project_backward)


# ---- the gate ------------------------------------------------------------------------------------


@torch.library.custom_op("moe_nvfp4::gate", schema="(Tensor z, str spec) -> Tensor", mutates_args=())
def gate(z, spec):
    read = read_spec(spec)
    return named_on(read.backend, z.device).gate(read.gate, z)


@gate.register_fake
def _(z, spec):
    return z.new_empty(z.shape[0], z.shape[1] // (2 if read_spec(spec).gate.gated else 1))


@torch.library.custom_op("moe_nvfp4::gate_backward", schema="(Tensor dh, Tensor z, str spec) -> Tensor",
                         mutates_args=())  # fmt: skip
def gate_backward(dh, z, spec):
    read = read_spec(spec)
    return named_on(read.backend, z.device).gate_gradient(read.gate, z, dh)[1]


@gate_backward.register_fake
def _(dh, z, spec):
    return torch.empty_like(z)


def _remember_gate(ctx, inputs, output) -> None:
    z, ctx.spec = inputs
    ctx.save_for_backward(z)


gate.register_autograd(
    lambda ctx, dh: (gate_backward(dh, *ctx.saved_tensors, ctx.spec), None), setup_context=_remember_gate
)
refuse_twice(gate_backward)


# ---- adapters ------------------------------------------------------------------------------------


@torch.library.custom_op("moe_nvfp4::grouped_mm", schema="(Tensor a, Tensor b, Tensor offs) -> Tensor", mutates_args=())
def grouped_mm(a, b, offs):
    return F.grouped_mm(a, b, offs=offs)


@grouped_mm.register_fake
def _(a, b, offs):
    return a.new_empty(a.shape[0], b.shape[2]) if b.dim() == 3 else a.new_empty(len(offs), a.shape[0], b.shape[1])


def _grouped_mm_gradients(ctx, dy):
    a, b, offs = ctx.saved_tensors
    da = grouped_mm(dy.contiguous(), b.mT, offs) if ctx.needs_input_grad[0] else None
    return da, grouped_mm(a.mT, dy.contiguous(), offs) if ctx.needs_input_grad[1] else None, None


# torch's own, whose compiler takes bf16 only
grouped_mm.register_autograd(
    _grouped_mm_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def adapted(rows: Tensor, adapters: tuple[Adapter, ...], order: Tensor, offsets: Tensor) -> Tensor:
    """What `adapters` add to a projection of rows [R, K]: [R, N] in their dtype; unrouted rows are zeros.

    Two grouped products by torch, whose sizes are multiples of 8; several adapters of one projection are one.
    """
    a = torch.cat([adapter.a.to(rows.dtype) for adapter in adapters], dim=1)  # [E, r, K]
    b = torch.cat([adapter.b.to(rows.dtype) for adapter in adapters], dim=2)  # [E, N, r]
    r, (K, N) = -a.shape[1] % 8, (-rows.shape[1] % 8, -b.shape[1] % 8)
    low = grouped_mm(F.pad(rows, (0, K)), F.pad(a, (0, K, 0, r)).mT, offsets[1:])
    high = grouped_mm(low, F.pad(b, (0, r, 0, N)).mT, offsets[1:])[:, : b.shape[1]]
    return high.masked_fill(backward.unrouted(order, offsets), 0)


# ---- the layer -----------------------------------------------------------------------------------


def train_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, hooks: Hooks, backend: str
) -> Tensor:
    """`ops.moe_forward` with gradients of everything but the 4-bit weights. What is checked is checked already.

    GEMM 1's output is kept for the backward pass, and what of the caller's runs between the stages keeps.
    """
    own_gate, post_expert_norm, x_factor, h_factor, observe, adapters = hooks
    groups, top_k = group_by_expert(top_k_index, weights.num_experts), top_k_index.shape[1]
    order, offsets, spec = groups.order, groups.offsets, weights.spec(backend)
    frozen = replace(weights, b13=None, b2=None).tensors()

    rows = gather_rows(x, order, offsets, top_k)
    taken = rows if x_factor is None else scaled(rows, x_factor, groups)
    z = project(taken, weights.b13, frozen, spec, order, offsets, "w13")
    if adapters[0]:
        z = z + adapted(rows, adapters[0], order, offsets)
    h = gate(z, spec) if own_gate is None else own_gate(z)
    given = h if h_factor is None else scaled(h, h_factor, groups)
    if observe is not None:
        observe(taken, given)
    y = project(given, weights.b2, frozen, spec, order, offsets, "w2")
    if adapters[1]:
        y = y + adapted(h, adapters[1], order, offsets)
    if post_expert_norm is not None:
        y = post_expert_norm(y)
    return combine(y.to(x.dtype), top_k_weights, order, offsets)


# Asked once: torch.compile of torch 2.11 cannot trace the question.
_AUTOCAST = tuple(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu")))


def autocast(x: Tensor) -> Tensor:
    """x in the dtype that torch.autocast has chosen, as torch's own layers take it."""
    device = x.device.type
    enabled = device in _AUTOCAST and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if enabled else x


def scaled(rows: Tensor, factor: Tensor, groups: Groups) -> Tensor:
    """Rows [R, K] times their expert's factors [E, K]; unrouted rows times any."""
    expert = groups.expert_of_row().clamp(max=factor.shape[0] - 1)
    return rows * factor[expert].to(rows.dtype)
