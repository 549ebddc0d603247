"""The layer: `moe_forward`, and the ops of a fused layer and of a linear.

    nothing of the model's own between the GEMMs   x ── experts ── y
    its own gate or norm, AWQ's scales, adapters   x ── up ── (gate) ── down ── (norm, combine) ── y

Where neither autograd nor a tracer looks on, `experts` is called without torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_nvfp4 import stages
from moe_nvfp4.backends import Problem, Selected, named_on, selected
from moe_nvfp4.checks import check_layer, check_linear, check_map
from moe_nvfp4.door import define, differentiate, layer_op, like, no_gradients, present, refuse_gradient, saved
from moe_nvfp4.routing import Groups, group_by_expert, local_ids
from moe_nvfp4.stages import Adapter, down, joined, scaled, up
from moe_nvfp4.weights import ExpertWeights, LinearWeights, read_spec

_OTHER_LAYOUT = (
    "x is {} on {}, but these weights are in the layout of {} kernels, which do not take it: call unpack() on the {} "
    "modules, or run the model in bf16"
)


# ---- the fused layer -----------------------------------------------------------------------------

_LAYER = "Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor? b13, Tensor? b2"


def _check_experts(w, x, top_k_index, top_k_weights, b13, b2):
    w.w13, w.w2 = w.w13._replace(bias=b13), w.w2._replace(bias=b2)
    check_layer(x, top_k_index, top_k_weights, w)


@layer_op(_LAYER, "Tensor", lambda w, x, *_: like(x), _check_experts)
def experts(backend, w, x, top_k_index, top_k_weights, b13, b2):
    return backend.experts(x, top_k_index, top_k_weights, w)


@layer_op(
    f"Tensor dy, {_LAYER}, bool biases", "Tensor[]",
    lambda w, dy, x, ids, p, b13, b2, biases: [like(t) for t in (x, p, *((b13, b2) if biases else ()))],
    lambda w, dy, *layer: _check_experts(w, *layer[:-1]),
)  # fmt: skip
def experts_backward(backend, w, dy, x, top_k_index, top_k_weights, b13, b2, biases):
    if not top_k_index.numel():
        return [torch.zeros_like(t) for t in (x, top_k_weights, *((b13, b2) if biases else ()))]
    dx, dp, *added = stages.gradients(dy, x, top_k_index, top_k_weights, w, backend, biases)
    return [dx, dp, *(d.to(b.dtype) for d, b in zip(added, (b13, b2), strict=False))]


def _remember_experts(ctx, inputs, output):
    *tensors, weights, ctx.spec = inputs
    ctx.save_for_backward(*tensors, *weights)


def _experts_gradients(ctx, dy):
    (*layer, weights), biases = saved(ctx, 5), any(ctx.needs_input_grad[3:5])
    dx, dp, *added = experts_backward(dy, *layer, biases, weights, ctx.spec)
    return dx, None, dp, *(added or (None, None)), no_gradients(ctx, 5), None


differentiate(experts, _remember_experts, _experts_gradients)
refuse_gradient(experts_backward)


# ---- a linear ------------------------------------------------------------------------------------

_MATRIX = "Tensor weight, Tensor? weight_sf, Tensor weight_global_scale"


def _linear(x, *tensors_and_spec):
    *tensors, spec = tensors_and_spec
    weights = LinearWeights.from_tensors(tensors, read_spec(spec))
    check_linear(x, weights)
    return weights


linear = define(
    f"linear(Tensor x, {_MATRIX}, Tensor? bias, Tensor? input_scale, str spec) -> Tensor",
    lambda x, *args: named_on(read_spec(args[-1]).backend, x.device).linear(x, _linear(x, *args)),
    lambda x, *args: x.new_empty(x.shape[0], _linear(x, *args).matrix.N),
)


def _linear_backward(dy, *matrix_and_spec):
    *matrix, spec = matrix_and_spec
    read = read_spec(spec)
    weights = LinearWeights.from_tensors((*matrix, None, None), read)
    return stages.times_weights(dy, weights.matrix.stacked(), None, named_on(read.backend, dy.device))


linear_backward = define(
    f"linear_backward(Tensor dy, {_MATRIX}, str spec) -> Tensor", _linear_backward,
    lambda dy, *args: dy.new_empty(dy.shape[0], read_spec(args[-1]).sizes[1]),
)  # fmt: skip


def _remember_linear(ctx, inputs, output):
    _, weight, weight_sf, weight_global_scale, bias, _, ctx.spec = inputs
    ctx.save_for_backward(weight, weight_sf, weight_global_scale)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_gradients(ctx, dy):
    dx = linear_backward(dy, *ctx.saved_tensors, ctx.spec) if ctx.needs_input_grad[0] else None
    d_bias = dy.float().sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[4] else None
    return dx, None, None, None, d_bias, None, None


differentiate(linear, _remember_linear, _linear_gradients)
refuse_gradient(linear_backward)


def _linears(x: Tensor, tensors: list[Tensor | None], spec: str) -> tuple[LinearWeights, ...]:
    read, each = read_spec(spec), iter(tensors)
    sizes = [read._replace(sizes=(N, read.sizes[1]), parts=()) for N in read.parts]
    found = tuple(LinearWeights.from_tensors([next(each) for _ in range(5)], size) for size in sizes)
    for weights in found:
        check_linear(x, weights)
    return found


def _run_linears(x: Tensor, tensors: list[Tensor | None], spec: str) -> Tensor:
    linears, backend = _linears(x, tensors, spec), named_on(read_spec(spec).backend, x.device)
    whole = LinearWeights.joined(linears)
    return backend.linear(x, whole) if whole else torch.cat([backend.linear(x, w) for w in linears], dim=1)


# For compiled code: whether the linears' tensors follow one another in memory is seen when it runs.
linears = define(
    "linears(Tensor x, Tensor?[] weights, str spec) -> Tensor", _run_linears,
    lambda x, tensors, spec: x.new_empty(x.shape[0], sum(w.matrix.N for w in _linears(x, tensors, spec))),
)  # fmt: skip
refuse_gradient(linears)


# ---- the layer -----------------------------------------------------------------------------------

Adapters = tuple[tuple[Adapter, ...], tuple[Adapter, ...]]  # of w13 and of w2


class Hooks(NamedTuple):
    """The model's own functions and factors that run between the stages; see `moe_forward`."""

    own_gate: Callable[[Tensor], Tensor] | None = None
    post_expert_norm: Callable[[Tensor], Tensor] | None = None
    x_factor: Tensor | None = None
    h_factor: Tensor | None = None
    observe: Callable[[Tensor, Tensor], None] | None = None
    largest: Callable[[Tensor], Tensor] | None = None
    adapters: Adapters = ((), ())
    adapter: Tensor | None = None

    @property
    def fused(self) -> bool:
        """Whether nothing runs between the stages, so that one call can do them all."""
        gate, norm, x_factor, h_factor, observe, largest, adapters, _ = self
        if gate is not None or norm is not None or observe is not None or largest is not None:
            return False
        return x_factor is None and h_factor is None and len(adapters[0]) + len(adapters[1]) == 0


def moe_forward(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertWeights,
    own_gate: Callable[[Tensor], Tensor] | None = None,
    post_expert_norm: Callable[[Tensor], Tensor] | None = None,
    pre_quant_scales: tuple[Tensor | None, Tensor | None] = (None, None),
    observe: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """The MoE experts: `y[t] = sum_j top_k_weights[t, j] * expert[top_k_index[t, j]](x[t])`.

    x [T, H] bf16, fp16 or fp32; top_k_index [T, top_k] integer (num_experts or -1: skip the slot);
    top_k_weights [T, top_k] floating; returns [T, H] in x's dtype. `own_gate` maps GEMM 1's output
    [R, 2I] to h [R, I] when the gate of `weights` is "raw"; `post_expert_norm` acts on every
    expert's output [T * top_k, H] before it is weighted. `pre_quant_scales` (AWQ): [E, H] and [E, I],
    which multiply an expert's rows of x and of h. `observe` is called with x and h as they enter the GEMMs,
    before any quantization; rows of h without an expert are zeros.

    Differentiable in x, top_k_weights, biases and the hooks' parameters; the 4-bit weights are frozen. W4A4 has the
    straight-through estimator. The result has the same bits with gradients as without.

    Raises TypeError and ValueError for tensors that do not fit each other (see `moe_nvfp4.checks`).
    """
    w, hooks = weights, Hooks(own_gate, post_expert_norm, *pre_quant_scales, observe)
    sizes = (w.num_experts, w.hidden_size, w.intermediate_size)
    problem = Problem("experts", *sizes, w.gate.kind, w.activations, x.dtype, hooks.fused)
    return run_experts(x, top_k_index, top_k_weights, weights, hooks, selected(problem, x.device))


def run_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, hooks: Hooks, chosen: Selected,
    expert_map: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`moe_forward` on a backend that was chosen before. expert_map: as in `NVFP4Experts`."""
    refuse_transforms()
    if expert_map is not None:
        check_map(expert_map, top_k_index, x.device)
    w, ids, p, (backend, layout) = weights, top_k_index, top_k_weights, (chosen.name, chosen.layout)
    if w.layout not in (None, layout):
        raise TypeError(_OTHER_LAYOUT.format(x.dtype, x.device, f"the {w.layout}", "NVFP4Experts"))
    if w.gate.kind == "raw" and hooks.own_gate is None:
        raise ValueError(
            "the gate of these weights is 'raw', the model's own: pass own_gate, a function of GEMM 1's output"
        )
    if training := torch.is_grad_enabled():
        refuse_scales(w.w13.gate_scale, w.w13.global_scale, w.w2.global_scale, w.x_scale, w.h_scale)
    if training and (x.requires_grad or p.requires_grad or _trained(w.w13.bias) or _trained(w.w2.bias)):
        direct = False
    else:
        direct = not torch.compiler.is_compiling() and type(x) is Tensor and not (x.is_meta or _watched())
    b13, b2 = w.w13.bias, w.w2.bias
    maps = () if expert_map is None else (expert_map,)
    if expert_map is not None and not (hooks.fused and direct and named_on(backend, x.device).maps):
        ids, maps = local_ids(ids, expert_map), ()
    if hooks.fused and not direct:
        return experts(x, ids, p, b13, b2, w.biased(None, None).tensors(), w.spec(backend))
    check_layer(x, ids, p, w)
    if hooks.fused:
        return named_on(backend, x.device).experts(x, ids, p, w, *maps)

    own_gate, norm, x_factor, h_factor, observe, largest, adapters, adapter = hooks
    spec = w.spec(backend)
    several = next((a.shape[1] for some in adapters for a, _ in some if a.dim() == 4), 0)
    groups = _grouped(ids, w.num_experts, adapter, several, backend)
    sorted_ids = groups.order, groups.offsets, groups.position, groups.parts, groups.bare, groups.top_k
    # each stage gets its own bias as an argument, and the other's, since kernels take both or none
    first = w.biased(None, _frozen(b2)).tensors(), spec
    second = w.biased(_frozen(b13), None).tensors(), spec
    # h that is quantized with a static scale is not rounded before
    dtype = torch.float32 if w.quantizes_h and h_factor is None and not adapters[0] else x.dtype
    h = up(x, x_factor, *joined(adapters[0], x.dtype), b13, *sorted_ids, dtype, *first)[0]
    if (training and own_gate is not None) or observe is not None or largest is not None:
        h = h.masked_fill(groups.unrouted, 0)  # what the kernels left there may be NaN
    if own_gate is not None:
        h = own_gate(h)
    given = scaled(h, h_factor, groups) if h_factor is not None and (observe or largest) else h
    if observe is not None:
        observe(x if x_factor is None else scaled(groups.gather(x), x_factor, groups), given)
    amax = largest(given.detach().abs().amax(-1).float()) if largest is not None and w.quantized else None
    pair = joined(adapters[1], h.dtype)
    if norm is None:
        return down(h, p, amax, h_factor, *pair, b2, *sorted_ids, x.dtype, *second)
    # the norm sits between an expert's output and its routing weight
    y = norm(down(h, None, amax, h_factor, *pair, b2, *sorted_ids, x.dtype, *second))
    y = y.view(*ids.shape, w.hidden_size).float() * p[..., None].float()
    here = (ids >= 0) & (ids < w.num_experts)
    return y.masked_fill(~here[..., None], 0.0).sum(dim=1).to(x.dtype)


def _grouped(ids: Tensor, experts: int, adapter: Tensor | None, adapters: int, backend: str) -> Groups:
    if not ids.is_cuda:  # what torch.compile can fuse, and names illegal ids at once
        return group_by_expert(ids, experts, adapter, adapters)
    order, offsets, position, *rest = group(ids, adapter, experts, adapters, backend)
    return Groups(order, offsets, ids.shape[1], position, *rest)


def _group(ids: Tensor, adapter: Tensor | None, experts: int, adapters: int, backend: str) -> list[Tensor]:
    g = named_on(backend, ids.device).group(ids, experts, adapter, adapters).with_position()
    return present(g.order, g.offsets, g.position, g.parts, g.bare)


def _fake_group(ids: Tensor, adapter: Tensor | None, experts: int, adapters: int, backend: str) -> list[Tensor]:
    R, int32 = ids.numel(), lambda n: ids.new_empty(n, dtype=torch.int32)
    more = [] if adapter is None else [int32(experts * adapters + 1), ids.new_empty(R, dtype=torch.bool)]
    return [int32(R), int32(experts + 1), int32(R), *more]


group = define(
    "group(Tensor ids, Tensor? adapter, int experts, int adapters, str backend) -> Tensor[]", _group, _fake_group
)


def _frozen(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _trained(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


def _watched() -> bool:
    """Whether a dispatch mode (of fake tensors, of a profiler of operators, ...) wants to see ops."""
    return torch._C._len_torch_dispatch_stack() > 0


def run_linear(x: Tensor, weights: LinearWeights, chosen: Selected) -> Tensor:
    """`linear` on a backend that was chosen before."""
    layout = weights.matrix.layout
    if layout not in (None, chosen.layout):
        raise TypeError(_OTHER_LAYOUT.format(x.dtype, x.device, f"the {layout}", "NVFP4Linear"))
    if torch.is_grad_enabled():
        refuse_scales(weights.matrix.global_scale, weights.input_scale)
    return linear(x, *weights.tensors(), weights.spec(chosen.name))


def run_linears(
    x: Tensor, parts: Sequence[LinearWeights], chosen: Selected, whole: LinearWeights | None = None
) -> Tensor:
    """`run_linear` of several linears for the same x, without gradients: [T, sum of N]. whole: `LinearWeights.joined`
    of them, if it is known."""
    if whole is not None and not torch.compiler.is_compiling() and type(x) is Tensor and not (x.is_meta or _watched()):
        check_linear(x, whole)
        return named_on(chosen.name, x.device).linear(x, whole)
    rows = tuple(w.matrix.N for w in parts)
    one = parts[0]._replace(matrix=parts[0].matrix._replace(N=sum(rows)), parts=rows)
    return linears(x, [t for w in parts for t in w.tensors()], one.spec(chosen.name))


def refuse_scales(*scales: Tensor | None) -> None:
    """NotImplementedError if scales of 4-bit weights are to be trained: they would silently stay as they are."""
    if any(scale is not None and scale.requires_grad for scale in scales):
        raise NotImplementedError(
            "scales of 4-bit weights have requires_grad, but get no gradients: leave them out, with "
            "requires_grad_(False), and train biases, adapters or the modules around the experts"
        )


def _exporting() -> bool:
    return torch.compiler.is_exporting()


def _transformed() -> bool:
    """Whether a transform of torch.func or forward-mode AD is on, around this call or, in torch.compile, inside it."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


# Evaluated outside the traced code: inside, torch 2.11 answers True whenever it compiles. torch.compile enters the
# transforms that it traces, and traces anew under others.
_exporting._dynamo_marked_constant = _transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_transforms() -> None:
    """NotImplementedError inside torch.export, torch.jit, torch.func's transforms and forward-mode AD."""
    if _exporting() or not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise NotImplementedError(
            "torch.export and torch.jit of 4-bit layers are not supported: the exported program would depend on this "
            "machine's kernels and layout of weights; export the dense model, or use torch.compile"
        )
    if _transformed():
        raise NotImplementedError(
            "torch.func's transforms (vmap, grad, jvp, ...) and forward-mode AD of 4-bit layers are not supported: "
            "flatten the batch into the tokens, x [batch * tokens, hidden], or transform the dense model"
        )
