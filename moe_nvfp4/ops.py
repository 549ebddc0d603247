"""The torch.library ops, and `moe_forward`, which makes a layer of them.

    x, top-k ids ── group_by_expert ── quantize_rows ── gemm1_swiglu ── gemm2_combine ── y

Ops are opaque to torch.compile. They take tensors instead of dataclasses; everything else an op must know, such as the
backend that runs it, is in the string `spec`. A tensor that a caller may differentiate is an argument of its own, not
an item of a list, so that autograd sees it. `experts` does all stages in one call, on backends that can;
`experts_beside` finds weights in host memory by their layer's number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.backends import Problem, Selected, named_on, selected
from moe_nvfp4.backward import layer_gradients, linear_gradient
from moe_nvfp4.checks import check_layer, check_linear, check_quantize, check_stage
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.training import (
    Hooks,
    no_gradients,
    refuse_gradient,
    refuse_scales,
    refuse_twice,
    scaled,
    train_experts,
)
from moe_nvfp4.weights import ExpertWeights, LinearWeights, read_spec

# The reference's stages wait for the group offsets, which is impossible in a CUDA graph.
_STAGE: dict[str, Any] = dict(mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
_ROWS = "Tensor {0}, Tensor? {0}_sf, Tensor? {0}_scale, Tensor? {0}_index"
_WEIGHTS = "Tensor?[] weights, str spec"
_GROUPS = "Tensor order, Tensor offsets"
_OTHER_LAYOUT = (
    "x is {} on {}, but these weights are in the layout of {} kernels, which do not take it: call unpack() on the {} "
    "modules, or run the model in bf16"
)


# ---- the stages ----------------------------------------------------------------------------------


@torch.library.custom_op(
    "moe_nvfp4::quantize_rows",
    schema=f"(Tensor x, Tensor? index, Tensor? scale, {_GROUPS}, str backend, bool four_over_six=False) -> Tensor[]",
    **_STAGE,
)
def quantize_rows(x, index, scale, order, offsets, backend, four_over_six=False):
    groups = check_quantize(x, index, scale, order, offsets)
    rows = named_on(backend, x.device).quantize_rows(x, index, scale, groups, four_over_six)
    return [rows.values, rows.sf, rows.scale]


@quantize_rows.register_fake
def _(x, index, scale, order, offsets, backend, four_over_six=False):
    groups = check_quantize(x, index, scale, order, offsets)
    return _empty_nvfp4(x, groups.num_rows, groups.num_experts, -(-x.shape[1] // 16) * 16)


@torch.library.custom_op(
    "moe_nvfp4::gemm1_swiglu",
    schema=f"({_ROWS.format('x')}, {_WEIGHTS}, {_GROUPS}, ScalarType dtype) -> Tensor[]",
    **_STAGE,
)
def gemm1_swiglu(x, x_sf, x_scale, x_index, weights, spec, order, offsets, dtype):
    rows = Rows(x, x_sf, x_scale, x_index)
    w, groups = _stage("x", rows, weights, spec, order, offsets, dtype)
    h = named_on(read_spec(spec).backend, order.device).gemm1_swiglu(rows, w, groups, dtype)
    return [h.values, h.sf, h.scale] if h.is_nvfp4 else [h.values]


@gemm1_swiglu.register_fake
def _(x, x_sf, x_scale, x_index, weights, spec, order, offsets, dtype):
    w, groups = _stage("x", Rows(x, x_sf, x_scale, x_index), weights, spec, order, offsets, dtype)
    R, I = groups.num_rows, w.intermediate_size
    if w.quantizes_h:
        return _empty_nvfp4(order, R, w.num_experts, -(-I // 16) * 16)
    return [order.new_empty(R, I * (2 if w.gate.kind == "raw" and w.gate.gated else 1), dtype=dtype)]


@torch.library.custom_op(
    "moe_nvfp4::gemm2_combine",
    schema=f"({_ROWS.format('h')}, {_WEIGHTS}, {_GROUPS}, Tensor top_k_weights, ScalarType dtype) -> Tensor",
    **_STAGE,
)
def gemm2_combine(h, h_sf, h_scale, h_index, weights, spec, order, offsets, top_k_weights, dtype):
    rows = Rows(h, h_sf, h_scale, h_index)
    w, groups = _stage("h", rows, weights, spec, order, offsets, dtype, top_k_weights)
    backend = named_on(read_spec(spec).backend, order.device)
    return backend.gemm2_combine(rows, w, groups, top_k_weights, dtype)


@gemm2_combine.register_fake
def _(h, h_sf, h_scale, h_index, weights, spec, order, offsets, top_k_weights, dtype):
    rows = Rows(h, h_sf, h_scale, h_index)
    w, _ = _stage("h", rows, weights, spec, order, offsets, dtype, top_k_weights)
    return top_k_weights.new_empty(top_k_weights.shape[0], w.hidden_size, dtype=dtype)


def _stage(name, rows, weights, spec, order, offsets, dtype, top_k_weights=None) -> tuple[ExpertWeights, Groups]:
    w = ExpertWeights.from_tensors(weights, read_spec(spec))
    return w, check_stage(name, rows, w, order, offsets, dtype, top_k_weights)


def _empty_nvfp4(like: Tensor, R: int, E: int, K: int) -> list[Tensor]:
    sf_bytes = nvfp4.grouped_sf_rows(R, E) * (-(-K // 64) * 4)
    return [
        like.new_empty(R, K // 2, dtype=torch.uint8),
        like.new_empty(sf_bytes, dtype=torch.uint8),
        like.new_empty(R, dtype=torch.float32),
    ]


# ---- a layer, a linear ---------------------------------------------------------------------------


@torch.library.custom_op(
    "moe_nvfp4::experts",
    schema=f"(Tensor x, Tensor top_k_index, Tensor top_k_weights, {_WEIGHTS}) -> Tensor",
    mutates_args=(),
)
def experts(x, top_k_index, top_k_weights, weights, spec):
    read = read_spec(spec)
    w = ExpertWeights.from_tensors(weights, read)
    backend = named_on(read.backend, x.device)
    check_layer(x, top_k_index, top_k_weights, w)
    return backend.experts(x, top_k_index, top_k_weights, w)


@experts.register_fake
def _(x, top_k_index, top_k_weights, weights, spec):
    check_layer(x, top_k_index, top_k_weights, ExpertWeights.from_tensors(weights, read_spec(spec)))
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_experts = torch.ops.moe_nvfp4.experts.default  # one Python call less

_layers: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def numbered(layer: Any) -> int:
    """A new number by which `experts_beside` finds `layer.weights`, as long as `layer` lives."""
    number = next(_numbers)
    _layers[number] = layer
    return number


@torch.library.custom_op(
    "moe_nvfp4::experts_beside",
    schema="(Tensor x, Tensor top_k_index, Tensor top_k_weights, int layer) -> Tensor",
    mutates_args=(),
)
def experts_beside(x, top_k_index, top_k_weights, layer):
    """`experts` for weights on the CPU and all else on a GPU. The weights are named by their layer's number, because
    torch.compile makes no CUDA graphs of ops that take CPU tensors."""
    w = _beside(x, top_k_index, top_k_weights, layer)
    return named_on("offload", x.device).experts(x, top_k_index, top_k_weights, w)


@experts_beside.register_fake
def _(x, top_k_index, top_k_weights, layer):
    _beside(x, top_k_index, top_k_weights, layer)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _beside(x, top_k_index, top_k_weights, layer) -> ExpertWeights:
    w = _layers[layer].weights
    check_layer(x, top_k_index, top_k_weights, w, True)
    return w


@torch.library.custom_op(
    "moe_nvfp4::linear",
    schema="(Tensor x, Tensor weight, Tensor? weight_sf, Tensor weight_global_scale, Tensor? bias, "
    "Tensor? input_scale, str activations, int[]? sizes, str backend) -> Tensor",
    mutates_args=(),
)
def linear(x, weight, weight_sf, weight_global_scale, bias, input_scale, activations, sizes, backend):
    weights = LinearWeights(
        weight, weight_sf, weight_global_scale, bias, input_scale, activations, sizes and tuple(sizes)
    )
    check_linear(x, weights)
    return named_on(backend, x.device).linear(x, weights)


@linear.register_fake
def _(x, weight, weight_sf, weight_global_scale, bias, input_scale, activations, sizes, backend):
    weights = LinearWeights(
        weight, weight_sf, weight_global_scale, bias, input_scale, activations, sizes and tuple(sizes)
    )
    check_linear(x, weights)
    return x.new_empty(x.shape[0], weights.shape[0])


# ---- gradients -----------------------------------------------------------------------------------
# For a fused layer and for a linear; `training` has the layer whose stages each have their own gradient.


@torch.library.custom_op(
    "moe_nvfp4::experts_backward",
    schema=f"(Tensor dy, Tensor x, Tensor top_k_index, Tensor top_k_weights, {_WEIGHTS}) -> Tensor[]",
    mutates_args=(),
)
def experts_backward(dy, x, top_k_index, top_k_weights, weights, spec):
    read = read_spec(spec)
    w = ExpertWeights.from_tensors(weights, read)
    check_layer(x, top_k_index, top_k_weights, w)
    return list(layer_gradients(dy, x, top_k_index, top_k_weights, w, named_on(read.backend, x.device)))


@experts_backward.register_fake
def _(dy, x, top_k_index, top_k_weights, weights, spec):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, top_k_weights)]


def _remember_layer(ctx, inputs, output) -> None:
    x, top_k_index, top_k_weights, weights, ctx.spec = inputs
    ctx.save_for_backward(x, top_k_index, top_k_weights, *weights)


def _layer_gradients(ctx, dy):
    x, top_k_index, top_k_weights, *weights = ctx.saved_tensors
    dx, dp = experts_backward(dy, x, top_k_index, top_k_weights, weights, ctx.spec)
    return dx, None, dp, no_gradients(ctx, 3), None


experts.register_autograd(_layer_gradients, setup_context=_remember_layer)
refuse_twice(experts_backward)


@torch.library.custom_op(
    "moe_nvfp4::linear_backward",
    schema="(Tensor dy, Tensor weight, Tensor? weight_sf, Tensor weight_global_scale, int[]? sizes, str backend) "
    "-> Tensor",
    mutates_args=(),
)
def linear_backward(dy, weight, weight_sf, weight_global_scale, sizes, backend):
    weights = LinearWeights(weight, weight_sf, weight_global_scale, None, None, "bf16", sizes and tuple(sizes))
    return linear_gradient(dy, weights, named_on(backend, dy.device))


@linear_backward.register_fake
def _(dy, weight, weight_sf, weight_global_scale, sizes, backend):
    return dy.new_empty(dy.shape[0], sizes[1] if sizes else 2 * weight.shape[1])


def _remember_linear(ctx, inputs, output) -> None:
    _, weight, weight_sf, weight_global_scale, bias, _, _, ctx.sizes, ctx.backend = inputs
    ctx.save_for_backward(weight, weight_sf, weight_global_scale)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_gradients(ctx, dy):
    dx = linear_backward(dy, *ctx.saved_tensors, ctx.sizes, ctx.backend) if ctx.needs_input_grad[0] else None
    d_bias = dy.float().sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[4] else None
    return dx, None, None, None, d_bias, None, None, None, None


linear.register_autograd(_linear_gradients, setup_context=_remember_linear)
refuse_twice(linear_backward)
for _op in (quantize_rows, gemm1_swiglu, gemm2_combine):
    refuse_gradient(
        _op, "single stages of 4-bit experts have no gradients: call NVFP4Experts or moe_forward, which have them"
    )


def _exporting() -> bool:
    return torch.compiler.is_exporting()


# Evaluated outside the traced code: inside, torch 2.11 answers True whenever it compiles.
_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_transforms() -> None:
    """NotImplementedError inside torch.export, torch.jit, torch.func's transforms and forward-mode AD."""
    eager = not torch.compiler.is_compiling()
    if _exporting() or eager and torch._C._is_tracing():
        raise NotImplementedError(
            "torch.export and torch.jit of 4-bit layers are not supported: the exported program would depend on this "
            "machine's kernels and layout of weights; export the dense model, or use torch.compile"
        )
    if eager and (torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0):
        raise NotImplementedError(
            "torch.func's transforms (vmap, grad, jvp, ...) and forward-mode AD of 4-bit layers are not supported: "
            "flatten the batch into the tokens, x [batch * tokens, hidden], or transform the dense model"
        )


# ---- the layer -----------------------------------------------------------------------------------


def run_linear(x: Tensor, weights: LinearWeights, chosen: Selected) -> Tensor:
    """`linear` on a backend that was chosen before."""
    backend, layout = chosen.name, chosen.layout
    if weights.sizes is not None and layout is None:
        raise TypeError(_OTHER_LAYOUT.format(x.dtype, x.device, "other", "NVFP4Linear"))
    if torch.is_grad_enabled():
        refuse_scales(weights.global_scale, weights.input_scale)
    return linear(x, *weights, backend)


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
    """The MoE experts: y[t] = sum_j top_k_weights[t, j] * expert[top_k_index[t, j]](x[t]).

    x [T, H] bf16, fp16 or fp32; top_k_index [T, top_k] integer (num_experts or -1: skip the slot);
    top_k_weights [T, top_k] floating; returns [T, H] in x's dtype. `own_gate` maps GEMM 1's output
    [R, 2I] to h [R, I] when the gate of `weights` is "raw"; `post_expert_norm` acts on every
    expert's output [T * top_k, H] before it is weighted. `pre_quant_scales` (AWQ): [E, H] and [E, I],
    which multiply an expert's rows of x and of h. `observe` is called with x and h as they enter the GEMMs
    (activations "bf16": before any quantization).

    Differentiable in x, top_k_weights, biases and the hooks' parameters; the 4-bit weights are frozen. W4A4 has the
    straight-through estimator.

    Raises TypeError and ValueError for tensors that do not fit each other (see `moe_nvfp4.checks`).
    """
    w, hooks = weights, Hooks(own_gate, post_expert_norm, *pre_quant_scales, observe)
    sizes = (w.num_experts, w.hidden_size, w.intermediate_size)
    problem = Problem("experts", *sizes, w.gate.kind, w.activations, x.dtype, hooks.fused, False)
    return run_experts(x, top_k_index, top_k_weights, weights, hooks, selected(problem, x.device))


def run_beside(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    layer: int,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """`run_experts` for the fused layer with this number, whose weights are on the CPU while x is on a GPU.

    meanwhile() launches work for the GPU to do while the CPU computes: in eager mode, without gradients.
    """
    refuse_transforms()
    if meanwhile is None or torch.compiler.is_compiling() or torch.is_grad_enabled() or type(x) is not Tensor:
        return experts_beside(x, top_k_index, top_k_weights, layer)
    w = _beside(x, top_k_index, top_k_weights, layer)
    return named_on("offload", x.device).functions.experts(x, top_k_index, top_k_weights, w, meanwhile)


def run_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertWeights,
    hooks: Hooks,
    chosen: Selected,
    recompute: bool = True,
) -> Tensor:
    """`moe_forward` on a backend that was chosen before; recompute: a fused layer's backward pass runs GEMM 1 again."""
    refuse_transforms()
    backend, layout = chosen.name, chosen.layout  # torch 2.11 cannot compile unpacking the tuple
    if weights.layout is not None and weights.layout.backend != layout:
        raise TypeError(_OTHER_LAYOUT.format(x.dtype, x.device, f"the {weights.layout.backend}", "NVFP4Experts"))
    spec = weights.spec(backend)
    biases = any(b is not None and b.requires_grad for b in (weights.b13, weights.b2))
    training = torch.is_grad_enabled() and (x.requires_grad or top_k_weights.requires_grad or biases)
    if training:
        refuse_scales(weights.gate_scale, weights.up_scale, weights.w2_scale, weights.x_scale, weights.h_scale)
    if chosen.whole and hooks.fused and weights.gate.kind != "raw" and not (training and (biases or not recompute)):
        return _experts(x, top_k_index, top_k_weights, weights.tensors(), spec)

    own_gate, post_expert_norm, x_factor, h_factor, observe, adapters = hooks
    check_layer(x, top_k_index, top_k_weights, weights)
    # the gate and the norm may have parameters that are trained
    own = own_gate or post_expert_norm or any(s is not None and s.requires_grad for s in (x_factor, h_factor))
    if training or adapters[0] or adapters[1] or (torch.is_grad_enabled() and own):
        return train_experts(x, top_k_index, top_k_weights, weights, hooks, backend)
    groups = group_by_expert(top_k_index, weights.num_experts)
    order, offsets, tensors = groups.order, groups.offsets, weights.tensors()
    quantized, rounding = weights.quantized, weights.four_over_six

    values: Tensor = x
    index: Tensor | None = groups.token
    if x_factor is not None:
        values, index = scaled(x[groups.token], x_factor, groups), None
    rows = [values, None, None, index]
    if quantized:
        rows = [*quantize_rows(values, index, weights.x_scale, order, offsets, backend, rounding), None]
    # h must come back unquantized if h_factor multiplies it
    first = tensors if h_factor is None else replace(weights, h_scale=None).tensors()
    h = gemm1_swiglu(*rows, first, spec, order, offsets, x.dtype)
    if own_gate is not None:
        h = [own_gate(h[0])]
    if h_factor is not None:
        h = [scaled(h[0], h_factor, groups)]
    if observe is not None:
        observe(values, h[0])
    if quantized and len(h) == 1:
        h = quantize_rows(h[0], None, weights.h_scale, order, offsets, backend, rounding)
    h = [*h, *[None] * (4 - len(h))]
    if post_expert_norm is None:
        return gemm2_combine(*h, tensors, spec, order, offsets, top_k_weights, x.dtype)

    # The norm sits between the expert's output and its routing weight, so combine by hand.
    T, top_k = top_k_weights.shape
    ones = torch.ones_like(top_k_weights).reshape(-1, 1)
    y = gemm2_combine(*h, tensors, spec, order, offsets, ones, x.dtype)
    y = post_expert_norm(y).view(T, top_k, x.shape[1]).float() * top_k_weights[..., None].float()
    here = (top_k_index >= 0) & (top_k_index < weights.num_experts)
    return y.masked_fill(~here[..., None], 0.0).sum(dim=1).to(x.dtype)
