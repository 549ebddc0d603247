"""The layer under autograd: its stages as torch.library ops with gradients, and `train_experts`, which makes a layer
of them.

    x ── gather_rows ── project w13 (+ adapters) ── gate ── project w2 (+ adapters) ── combine ── y

The 4-bit weights are frozen. Plain torch runs between the ops, so that adapters and the model's own gate or norm get
their gradients from autograd. The gradient of an op is an op too, opaque to torch.compile, but has no gradient itself:
second derivatives are refused by name.
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
from moe_nvfp4.backward import Adapter, Slots
from moe_nvfp4.checks import check_layer, check_stage
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ExpertWeights, read_spec

_WEIGHTS = "Tensor?[] weights, str spec"
_GROUPS = "Tensor order, Tensor offsets"


Adapters = tuple[tuple[Adapter, ...], tuple[Adapter, ...]]  # of w13 and of w2


class Hooks(NamedTuple):
    """The model's own functions and factors that run between the stages; see `ops.moe_forward`."""

    own_gate: Callable[[Tensor], Tensor] | None = None
    post_expert_norm: Callable[[Tensor], Tensor] | None = None
    x_factor: Tensor | None = None
    h_factor: Tensor | None = None
    observe: Callable[[Tensor, Tensor], None] | None = None
    adapters: Adapters = ((), ())

    @property
    def fused(self) -> bool:
        """Whether nothing runs between the stages, so that one call can do them all."""
        gate, norm, x_factor, h_factor, observe, adapters = self
        nothing = gate is None and norm is None and x_factor is None and h_factor is None and observe is None
        return nothing and len(adapters[0]) + len(adapters[1]) == 0


# ---- second derivatives: there are none ----------------------------------------------------------
# In place of a formula there is an op that raises: compiled code then works where nobody asks for such a derivative.


@torch.library.custom_op("moe_nvfp4::no_gradient", schema="(Tensor grad, Tensor like, str why) -> Tensor",
                         mutates_args=())  # fmt: skip
def no_gradient(grad, like, why):
    raise NotImplementedError(why)


@no_gradient.register_fake
def _(grad, like, why):
    return torch.empty_like(like)


def refuse_gradient(op: Any, why: str) -> None:
    """Make `op` a part of autograd's graph that raises, so that its inputs never silently get a gradient of zero."""

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
    """The missing gradient of input i of an op: None, or for what torch sees as a list of tensors, a list of None."""
    return tree_map(lambda _: None, ctx.needs_input_grad[i])


def refuse_scales(*scales: Tensor | None) -> None:
    """NotImplementedError if scales of 4-bit weights are to be trained: they would silently stay as they are."""
    if any(scale is not None and scale.requires_grad for scale in scales):
        raise NotImplementedError(
            "scales of 4-bit weights have requires_grad, but get no gradients: leave them out, with "
            "requires_grad_(False), and train biases, adapters or the modules around the experts"
        )


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
    slots = Slots(order, offsets, top_k)
    return slots.gather(x).masked_fill_(slots.unrouted, 0)


@gather_rows.register_fake
def _(x, order, offsets, top_k):
    return x.new_empty(order.shape[0], *x.shape[1:])


@torch.library.custom_op(
    "moe_nvfp4::sum_slots", schema=f"(Tensor rows, {_GROUPS}, int top_k) -> Tensor", mutates_args=()
)
def sum_slots(rows, order, offsets, top_k):
    return Slots(order, offsets, top_k).sum(rows)


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
    return Slots(order, offsets, top_k_weights.shape[1]).combine(rows, top_k_weights)


@combine.register_fake
def _(rows, top_k_weights, order, offsets):
    return rows.new_empty(top_k_weights.shape[0], rows.shape[1])


@torch.library.custom_op(
    "moe_nvfp4::combine_backward",
    schema=f"(Tensor dy, Tensor rows, Tensor top_k_weights, {_GROUPS}) -> Tensor[]",
    mutates_args=(),
)
def combine_backward(dy, rows, top_k_weights, order, offsets):
    slots = Slots(order, offsets, top_k_weights.shape[1])
    return list(slots.combine_gradients(dy, rows, top_k_weights))


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
    out = (backward.up_rows if name == "w13" else backward.down_rows)(rows, w, groups, backend)
    return out.masked_fill_(Slots(order, offsets, 1).unrouted, 0)


@project.register_fake
def _(rows, bias, weights, spec, order, offsets, name):
    w, _ = _projection(rows, bias, weights, spec, order, offsets, name)
    return rows.new_empty(rows.shape[0], w.projection(name).rows)


def _projection(rows, bias, weights, spec, order, offsets, name) -> tuple[ExpertWeights, Groups]:
    w = ExpertWeights.from_tensors(weights, read_spec(spec))
    if bias is not None:  # kernels take both or none
        other = bias.new_zeros(w.num_experts, w.hidden_size if name == "w13" else w.projection("w13").rows)
        w.b13, w.b2 = (bias, other) if name == "w13" else (other, bias)
    plain = ExpertWeights.from_tensors(w.tensors(), read_spec(spec)._replace(activations="bf16"))
    return w, check_stage("x" if name == "w13" else "h", Rows(rows), plain, order, offsets, rows.dtype, None)


@torch.library.custom_op(
    "moe_nvfp4::project_backward", schema=f"(Tensor dy, {_WEIGHTS}, Tensor offsets, str name) -> Tensor",
    mutates_args=(),
)  # fmt: skip
def project_backward(dy, weights, spec, offsets, name):
    w = ExpertWeights.from_tensors(weights, read_spec(spec)).projection(name)
    out = backward.times_weights(dy, w, offsets, named_on(read_spec(spec).backend, dy.device))
    return out.masked_fill_(torch.arange(len(out), device=out.device)[:, None] >= offsets[-1], 0)


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


def adapted(rows: Tensor, adapters: tuple[Adapter, ...], order: Tensor, offsets: Tensor) -> Tensor:
    """What `adapters` add to a projection of rows [R, K]: [R, N] in their dtype; unrouted rows are zeros."""
    a, b = joined(adapters, rows.dtype)
    high = grouped_mm(grouped_mm(rows, a.mT, offsets), b.mT, offsets)
    return high.masked_fill(Slots(order, offsets, 1).unrouted, 0)


def joined(adapters: tuple[Adapter, ...], dtype: torch.dtype) -> Adapter:
    """The adapters of one projection as a single one, in `dtype`, with a rank that torch's grouped product accepts: a
    multiple of 8."""
    a = torch.cat([adapter.a for adapter in adapters], dim=1) if len(adapters) > 1 else adapters[0].a
    b = torch.cat([adapter.b for adapter in adapters], dim=2) if len(adapters) > 1 else adapters[0].b
    missing = -a.shape[1] % 8
    if missing:
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    return Adapter(a.to(dtype).contiguous(), b.to(dtype).contiguous())


@torch.library.custom_op(
    "moe_nvfp4::grouped_mm", schema="(Tensor a, Tensor b, Tensor offsets) -> Tensor", mutates_args=()
)
def grouped_mm(a, b, offsets):
    return backward.grouped_mm(a, b, offsets)


@grouped_mm.register_fake
def _(a, b, offsets):
    return (
        a.new_empty(a.shape[0], b.shape[2]) if b.dim() == 3 else a.new_empty(len(offsets) - 1, a.shape[0], b.shape[1])
    )


def _grouped_mm_gradients(ctx, dy):
    a, b, offsets = ctx.saved_tensors
    da = grouped_mm(dy, b.mT, offsets) if ctx.needs_input_grad[0] else None
    return da, grouped_mm(a.mT, dy, offsets) if ctx.needs_input_grad[1] else None, None


# an op of our own, because torch's takes only bf16 when it is compiled
grouped_mm.register_autograd(
    _grouped_mm_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


# ---- a fused layer with adapters, as one op: calling one from Python takes longer than its kernels -

_ADAPTERS = "Tensor? a13, Tensor? b13, Tensor? a2, Tensor? b2"


def _adapted(a13, b13, a2, b2) -> list[Adapter | None]:
    return [None if a is None else Adapter(a, b) for a, b in ((a13, b13), (a2, b2))]


@torch.library.custom_op(
    "moe_nvfp4::adapted_experts",
    schema=f"(Tensor x, Tensor top_k_index, Tensor top_k_weights, {_ADAPTERS}, {_WEIGHTS}) -> Tensor[]",
    mutates_args=(),
)
def adapted_experts(x, top_k_index, top_k_weights, a13, b13, a2, b2, weights, spec):
    """y [T, H], and what its gradient needs: GEMM 1's sums [R, 2I], order and offsets of `Groups`."""
    read = read_spec(spec)
    w = ExpertWeights.from_tensors(weights, read)
    check_layer(x, top_k_index, top_k_weights, w)
    groups = group_by_expert(top_k_index, w.num_experts)
    backend = named_on(read.backend, x.device)
    y, z = backward.adapted_layer(x, groups, top_k_weights, w, _adapted(a13, b13, a2, b2), backend)
    return [y, z, groups.order, groups.offsets]


@adapted_experts.register_fake
def _(x, top_k_index, top_k_weights, a13, b13, a2, b2, weights, spec):
    w = ExpertWeights.from_tensors(weights, read_spec(spec))
    check_layer(x, top_k_index, top_k_weights, w)
    R, int32 = top_k_index.numel(), torch.int32
    rest = x.new_empty(R, w.projection("w13").rows), x.new_empty(R, dtype=int32)
    return [torch.empty_like(x, memory_format=torch.contiguous_format), *rest,
            x.new_empty(w.num_experts + 1, dtype=int32)]  # fmt: skip


@torch.library.custom_op(
    "moe_nvfp4::adapted_backward",
    schema=f"(Tensor dy, Tensor x, Tensor top_k_weights, {_ADAPTERS}, Tensor z, {_GROUPS}, {_WEIGHTS}) -> Tensor[]",
    mutates_args=(),
)
def adapted_backward(dy, x, top_k_weights, a13, b13, a2, b2, z, order, offsets, weights, spec):
    """dx, d(top_k_weights), and the gradients of those adapters that are given."""
    read = read_spec(spec)
    w = ExpertWeights.from_tensors(weights, read)
    slots = Slots(order, offsets, top_k_weights.shape[1])
    rows = slots.gather(x)
    dx, dp, found = backward.adapted_gradients(
        dy, rows, z, slots, top_k_weights, w, _adapted(a13, b13, a2, b2), named_on(read.backend, x.device)
    )
    return [dx, dp, *(t for t in found if t is not None)]


@adapted_backward.register_fake
def _(dy, x, top_k_weights, a13, b13, a2, b2, z, order, offsets, weights, spec):
    found = [x, top_k_weights, *(t for t in (a13, b13, a2, b2) if t is not None)]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in found]


def _remember_adapted(ctx, inputs, output) -> None:
    x, _, top_k_weights, *adapters, weights, ctx.spec = inputs
    ctx.save_for_backward(x, top_k_weights, *adapters, *output[1:], *weights)


def _adapted_gradients(ctx, grads):
    x, top_k_weights, a13, b13, a2, b2, z, order, offsets, *weights = ctx.saved_tensors
    adapters = (a13, b13, a2, b2)
    found = adapted_backward(grads[0], x, top_k_weights, *adapters, z, order, offsets, weights, ctx.spec)
    dx, dp, *found = found
    return dx, None, dp, *(None if t is None else found.pop(0) for t in adapters), no_gradients(ctx, 7), None


adapted_experts.register_autograd(_adapted_gradients, setup_context=_remember_adapted)
refuse_twice(adapted_backward)


# ---- the layer -----------------------------------------------------------------------------------


def train_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, hooks: Hooks, backend: str
) -> Tensor:
    """`ops.moe_forward` with gradients of everything but the 4-bit weights. Its caller has checked the arguments.

    GEMM 1's output is kept for the backward pass, and so is whatever the hooks save.
    """
    own_gate, post_expert_norm, x_factor, h_factor, observe, adapters = hooks
    plain = hooks._replace(adapters=((), ())).fused
    biases = any(b is not None and b.requires_grad for b in (weights.b13, weights.b2))
    if plain and not biases and len(adapters[0]) + len(adapters[1]):
        pairs = (joined(some, x.dtype) if some else (None, None) for some in adapters)
        both = [t for pair in pairs for t in pair]
        return adapted_experts(x, top_k_index, top_k_weights, *both, weights.tensors(), weights.spec(backend))[0]
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


# Evaluated once: torch.compile of torch 2.11 cannot trace is_autocast_available.
_AUTOCAST = tuple(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu")))


def autocast(x: Tensor) -> Tensor:
    """x in the dtype that torch.autocast has chosen, as torch's own layers take it."""
    device = x.device.type
    enabled = device in _AUTOCAST and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if enabled else x


def scaled(rows: Tensor, factor: Tensor, groups: Groups) -> Tensor:
    """Rows [R, K] times their expert's factors [E, K]; unrouted rows times some expert's."""
    expert = groups.expert_of_row().clamp(max=factor.shape[0] - 1)
    return rows * factor[expert].to(rows.dtype)
