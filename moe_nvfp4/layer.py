"""The layers: `NVFP4Experts`, a drop-in for the experts module of a Hugging Face MoE model, and `NVFP4Linear`.

    x, top-k ids ── group_by_expert ── quantize_rows ── gemm1_swiglu ── gemm2_combine ── y

The stages are torch.library ops, opaque to torch.compile; each runs on the backend of its device.
On a Hopper GPU one op does it all, over weights that `NVFP4Experts.prepare` has brought into its layout.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from moe_nvfp4 import format as nvfp4
from moe_nvfp4 import reference
from moe_nvfp4.checks import ROWS, check_layer, check_linear, check_quantize, check_stage
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, quantize_expert
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ACTIVATIONS, SILU, ExpertWeights, Gate


def forced_reference() -> bool:
    """Whether the environment's MOE_NVFP4_BACKEND is "reference"; ValueError for a name that is none."""
    name = os.environ.get("MOE_NVFP4_BACKEND")
    if name and name != "reference":
        raise ValueError(f"MOE_NVFP4_BACKEND={name}: only 'reference' can be asked for; unset it for the others")
    return bool(name)


def backend(device: torch.device) -> ModuleType:
    """The module with the stage functions for `device`; the environment's MOE_NVFP4_BACKEND=reference forces that."""
    if not forced_reference() and device.type == "cpu":
        from moe_nvfp4.kernels.cpu import backend as cpu

        if cpu.available():
            return cpu
    return reference


def constant(function):
    """torch.compiler.assume_constant_result, which imports all of torch._dynamo only to set this."""
    function._dynamo_marked_constant = True
    return function


@constant
def on_cpu(device: torch.device) -> bool:
    """Whether `device` is a CPU whose kernels do a whole layer in one call."""
    return device.type == "cpu" and hasattr(backend(device), "experts")


@constant
def on_hopper(device: torch.device) -> bool:
    """Whether `device` has kernels of its own: a Hopper GPU, with CuTe DSL installed."""
    return _hopper(device) is not None


@cache
def _hopper(device: torch.device) -> ModuleType | None:
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    if forced_reference():
        return None
    try:
        from moe_nvfp4.kernels.sm90 import backend as sm90
    except ImportError as error:
        _warn_without_dsl("Hopper", error)
        return None
    return sm90


@cache
def _blackwell(device: torch.device) -> ModuleType | None:
    if device.type != "cuda" or torch.version.cuda is None or forced_reference():
        return None
    from moe_nvfp4.kernels.sm100 import backend as sm100

    if torch.cuda.get_device_capability(device) not in sm100.ARCHITECTURES:
        return None
    if find_spec("cutlass") is None or find_spec("tvm_ffi") is None:
        _warn_without_dsl("Blackwell", "nvidia-cutlass-dsl or apache-tvm-ffi is not installed")
        return None
    return sm100


def _warn_without_dsl(name: str, why: object) -> None:
    warnings.warn(
        f"the {name} kernels need CuTe DSL ({why}), so 4-bit experts run as plain torch operations: same "
        "numbers, many times slower. Install moe-nvfp4[gpu]; MOE_NVFP4_BACKEND=reference silences this",
        stacklevel=4,
    )


def _stages(weights: ExpertWeights, device: torch.device) -> ModuleType:
    """The module whose GEMM stages run `weights` on `device`."""
    if weights.packed:
        return _hopper(device)
    sixteens = weights.hidden_size % 16 == 0 and weights.intermediate_size % 16 == 0
    if weights.activations == "nvfp4" and sixteens and _blackwell(device) is not None:
        return _blackwell(device)
    return backend(device)


# ---------------------------------------------------------------- the stages as torch ops
# Tensors travel instead of the dataclasses; `spec` carries gate and activations. What a caller may differentiate
# comes by itself and not in a list, so that autograd sees it. The reference waits for the group offsets, which a
# CUDA graph can't.
_OP = dict(mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
_ROWS = "Tensor {0}, Tensor? {0}_sf, Tensor? {0}_scale, Tensor? {0}_index"
_WEIGHTS = "Tensor?[] weights, str spec"
_GROUPS = "Tensor order, Tensor offsets"


@torch.library.custom_op(
    "moe_nvfp4::quantize_rows",
    schema=f"(Tensor x, Tensor? index, Tensor? scale, {_GROUPS}) -> Tensor[]",
    **_OP,
)
def _quantize_rows(x, index, scale, order, offsets):
    groups = Groups(order, offsets, 1)
    check_quantize(x, index, scale, groups)
    blackwell = _blackwell(x.device) if x.shape[1] % 16 == 0 else None
    rows = (blackwell or backend(x.device)).quantize_rows(x, index, scale, groups)
    return [rows.values, rows.sf, rows.scale]


@_quantize_rows.register_fake
def _(x, index, scale, order, offsets):
    check_quantize(x, index, scale, Groups(order, offsets, 1))
    return _empty_nvfp4(x, order.shape[0], offsets.shape[0] - 1, -(-x.shape[1] // 16) * 16)


@torch.library.custom_op(
    "moe_nvfp4::gemm1_swiglu",
    schema=f"({_ROWS.format('x')}, {_WEIGHTS}, {_GROUPS}, ScalarType dtype) -> Tensor[]",
    **_OP,
)
def _gemm1_swiglu(x, x_sf, x_scale, x_index, weights, spec, order, offsets, dtype):
    rows = Rows(x, x_sf, x_scale, x_index)
    w, groups = _stage("x", rows, weights, spec, order, offsets, dtype)
    h = _stages(w, order.device).gemm1_swiglu(rows, w, groups, dtype)
    return [h.values, h.sf, h.scale] if h.is_nvfp4 else [h.values]


@_gemm1_swiglu.register_fake
def _(x, x_sf, x_scale, x_index, weights, spec, order, offsets, dtype):
    w, groups = _stage("x", Rows(x, x_sf, x_scale, x_index), weights, spec, order, offsets, dtype)
    R = groups.num_rows
    if w.activations == "nvfp4" and w.h_scale is not None and w.gate.kind != "raw":
        return _empty_nvfp4(order, R, w.num_experts, w.w2.shape[-1] * 2)
    width = w.intermediate_size * (2 if w.gate.kind == "raw" and w.gate.gated else 1)
    return [order.new_empty(R, width, dtype=dtype)]


@torch.library.custom_op(
    "moe_nvfp4::gemm2_combine",
    schema=f"({_ROWS.format('h')}, {_WEIGHTS}, {_GROUPS}, Tensor top_k_weights, ScalarType dtype) -> Tensor",
    **_OP,
)
def _gemm2_combine(h, h_sf, h_scale, h_index, weights, spec, order, offsets, top_k_weights, dtype):
    rows = Rows(h, h_sf, h_scale, h_index)
    w, groups = _stage("h", rows, weights, spec, order, offsets, dtype, top_k_weights)
    return _stages(w, order.device).gemm2_combine(rows, w, groups, top_k_weights, dtype)


@_gemm2_combine.register_fake
def _(h, h_sf, h_scale, h_index, weights, spec, order, offsets, top_k_weights, dtype):
    rows = Rows(h, h_sf, h_scale, h_index)
    w, _ = _stage("h", rows, weights, spec, order, offsets, dtype, top_k_weights)
    return top_k_weights.new_empty(top_k_weights.shape[0], w.hidden_size, dtype=dtype)


def _stage(name, rows, weights, spec, order, offsets, dtype, top_k_weights=None) -> tuple[ExpertWeights, Groups]:
    w = ExpertWeights.from_tensors(weights, spec)
    return w, check_stage(name, rows, w, order, offsets, dtype, top_k_weights)


@torch.library.custom_op(
    "moe_nvfp4::experts",
    schema=f"(Tensor x, Tensor top_k_index, Tensor top_k_weights, {_WEIGHTS}) -> Tensor",
    mutates_args=(),
)
def _experts(x, top_k_index, top_k_weights, weights, spec):
    w = ExpertWeights.from_tensors(weights, spec)
    check_layer(x, top_k_index, top_k_weights, w)
    return (_hopper(x.device) or backend(x.device)).experts(x, top_k_index, top_k_weights, w)


@_experts.register_fake
def _(x, top_k_index, top_k_weights, weights, spec):
    check_layer(x, top_k_index, top_k_weights, ExpertWeights.from_tensors(weights, spec))
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "moe_nvfp4::linear",
    schema="(Tensor x, Tensor weight, Tensor weight_sf, Tensor weight_global_scale, Tensor? bias, Tensor? input_scale, "
    "str activations) -> Tensor",
    **_OP,
)
def _linear(x, weight, weight_sf, weight_global_scale, bias, input_scale, activations):
    check_linear(x, weight, weight_sf, weight_global_scale, bias, input_scale, activations)
    T, device = x.shape[0], x.device
    stages = backend(device)
    # GEMM 2 of a layer with one expert: the stages read the second GEMM's weights, and count experts on the first's
    codes, sf, scale, bias = weight[None], weight_sf[None], weight_global_scale, None if bias is None else bias[None]
    w = ExpertWeights(SILU, activations, codes, sf, scale, scale, codes, sf, scale, None, bias)
    order = torch.arange(T, dtype=torch.int32, device=device)
    groups = Groups(order, torch.arange(2, dtype=torch.int32, device=device) * T, 1)
    rows = stages.quantize_rows(x, None, input_scale, groups) if activations == "nvfp4" else Rows(x)
    ones = torch.ones(T, 1, dtype=torch.float32, device=device)
    return stages.gemm2_combine(rows, w, groups, ones, x.dtype)


@_linear.register_fake
def _(x, weight, weight_sf, weight_global_scale, bias, input_scale, activations):
    check_linear(x, weight, weight_sf, weight_global_scale, bias, input_scale, activations)
    return x.new_empty(x.shape[0], weight.shape[0])


def _empty_nvfp4(like: Tensor, R: int, E: int, K: int) -> list[Tensor]:
    sf_bytes = nvfp4.grouped_sf_rows(R, E) * (-(-K // 64) * 4)
    return [
        like.new_empty(R, K // 2, dtype=torch.uint8),
        like.new_empty(sf_bytes, dtype=torch.uint8),
        like.new_empty(R, dtype=torch.float32),
    ]


# ---------------------------------------------------------------- gradients: there are none yet
# Every op is part of the graph, so that nothing behind it gets a gradient of zero without a word. What takes the
# place of a formula is an op itself: a compiled forward pass works where nobody asks for gradients.


@torch.library.custom_op("moe_nvfp4::no_gradient", schema="(Tensor grad, Tensor like) -> Tensor", mutates_args=())
def _no_gradient(grad, like):
    raise NotImplementedError(
        "4-bit experts and linears have no gradients yet: run the forward pass under torch.no_grad(), detach what goes "
        "into them, or train with dense ones"
    )


@_no_gradient.register_fake
def _(grad, like):
    return torch.empty_like(like)


def _remember(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.inputs = inputs


def _refuse(ctx, *grads):
    # an op that returns a list gets its gradients as a list
    grad = next(g for g in tree_leaves(grads) if g is not None)
    return tree_map(lambda needed, t: _no_gradient(grad, t) if needed else None, ctx.needs_input_grad, ctx.inputs)


for _op in (_quantize_rows, _gemm1_swiglu, _gemm2_combine, _experts, _linear):
    _op.register_autograd(_refuse, setup_context=_remember)


def moe_forward(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertWeights,
    own_gate: Callable[[Tensor], Tensor] | None = None,
    post_expert_norm: Callable[[Tensor], Tensor] | None = None,
    smooth: tuple[Tensor | None, Tensor | None] = (None, None),
    observe: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """The MoE experts: y[t] = sum_j top_k_weights[t, j] * expert[top_k_index[t, j]](x[t]).

    x [T, H] bf16, fp16 or fp32; top_k_index [T, top_k] integer (num_experts or -1: skip the slot);
    top_k_weights [T, top_k] floating; returns [T, H] in x's dtype. `own_gate` maps GEMM 1's output
    [R, 2I] to h [R, I] when the gate of `weights` is "raw"; `post_expert_norm` acts on every
    expert's output [T * top_k, H] before it is weighted. `smooth` (AWQ's pre_quant_scale): [E, H] and [E, I],
    which multiply an expert's rows of x and of h. `observe` is called with x and h as they enter the GEMMs
    (activations "bf16": before any quantization).
    """
    _refuse_transforms()
    if weights.packed and x.dtype != torch.bfloat16:
        raise TypeError(
            f"x is {x.dtype}, but these weights are in the layout of the Hopper kernels, which take bf16: "
            "call unpack() on the NVFP4Experts modules, or run the model in bf16"
        )
    plain = own_gate is None and post_expert_norm is None and weights.gate.kind != "raw"
    alone = plain and smooth[0] is None and smooth[1] is None and observe is None
    hopper = x.dtype == torch.bfloat16 and on_hopper(x.device) and supports_hopper(weights)
    if alone and (hopper or on_cpu(x.device)):
        return _experts(x, top_k_index, top_k_weights, weights.tensors(), weights.spec)
    check_layer(x, top_k_index, top_k_weights, weights)
    groups = group_by_expert(top_k_index, weights.num_experts)
    order, offsets = groups.order, groups.offsets
    tensors, spec = weights.tensors(), weights.spec
    quantized = weights.activations == "nvfp4"

    values, index = x, groups.token
    if smooth[0] is not None:
        values, index = _smooth(x[groups.token], smooth[0], groups), None
    rows = [values, None, None, index]
    if quantized:
        rows = [*_quantize_rows(values, index, weights.x_scale, order, offsets), None]
    # h that is to be smoothed comes back unquantized
    first = tensors if smooth[1] is None else replace(weights, h_scale=None).tensors()
    h = _gemm1_swiglu(*rows, first, spec, order, offsets, x.dtype)
    if own_gate is not None:
        h = [own_gate(h[0])]
    if smooth[1] is not None:
        h = [_smooth(h[0], smooth[1], groups)]
    if observe is not None:
        observe(values, h[0])
    if quantized and len(h) == 1:
        h = _quantize_rows(h[0], None, weights.h_scale, order, offsets)
    h = [*h, *[None] * (4 - len(h))]
    if post_expert_norm is None:
        return _gemm2_combine(*h, tensors, spec, order, offsets, top_k_weights, x.dtype)

    # The norm sits between the expert's output and its routing weight, so combine by hand.
    T, top_k = top_k_weights.shape
    ones = torch.ones_like(top_k_weights).reshape(-1, 1)
    y = _gemm2_combine(*h, tensors, spec, order, offsets, ones, x.dtype)
    y = post_expert_norm(y).view(T, top_k, x.shape[1]).float() * top_k_weights[..., None].float()
    here = (top_k_index >= 0) & (top_k_index < weights.num_experts)
    return y.masked_fill(~here[..., None], 0.0).sum(dim=1).to(x.dtype)


def _refuse_transforms() -> None:
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            "torch.export of 4-bit layers: the exported program would hold on to this machine's kernels and layout of "
            "weights; export the dense model, or use torch.compile"
        )
    if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None:
        raise NotImplementedError(
            "torch.func's transforms (vmap, grad, jvp, ...) of 4-bit layers: make the dimension part of the tokens, "
            "x [batch * tokens, hidden], or transform the dense model"
        )


def _smooth(rows: Tensor, scale: Tensor, groups: Groups) -> Tensor:
    """Rows [R, K] times their expert's scale [E, K]; rows of nobody times any."""
    expert = groups.expert_of_row().clamp(max=scale.shape[0] - 1)
    return rows * scale[expert].to(rows.dtype)


def supports_hopper(weights: ExpertWeights) -> bool:
    """What the Hopper kernels take: widths that are multiples of 16, up to 1024 experts, a gate of ours for W4A4."""
    widths = weights.hidden_size % 16 == 0 and weights.intermediate_size % 16 == 0
    gate = weights.activations == "bf16" or weights.gate.kind != "raw"
    return widths and gate and weights.num_experts <= 1024


def _sparing(fn: Callable[[Tensor], Tensor], scales: list[nn.Parameter]) -> Callable[[Tensor], Tensor]:
    """`fn`, which a module applies to its parameters, so that it moves fp32 `scales` and never rounds them.

    It sees their bits as integers, which casts to a floating dtype leave alone.
    """
    ids = {id(p) for p in scales if p is not None and p.dtype == torch.float32}

    def spared(t: Tensor) -> Tensor:
        if id(t) not in ids:
            return fn(t)
        moved = fn(t.view(torch.int32))
        return moved.view(torch.float32) if moved.dtype == torch.int32 else t.to(moved.device)

    return spared


def fp32_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The global scales of all 4-bit layers of `model`, which mixed precision must not round.

    Casts of the model leave them alone. FSDP2 casts what it gathers, so leave them out of it:
    fully_shard(block, mp_policy=..., ignored_params=fp32_parameters(model)).
    """
    layers = (m for m in model.modules() if isinstance(m, (NVFP4Experts, NVFP4Linear)))
    return {p for layer in layers for p in layer._fp32_parameters() if p is not None}


def _check_bias_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in ROWS:
        raise TypeError(f"biases are bfloat16, float16 or float32, not {dtype}: sums are fp32 in any case")


class NVFP4Experts(nn.Module):
    """The experts of one MoE layer with 4-bit weights.

    forward(hidden_states [T, H], top_k_index [T, top_k], top_k_weights [T, top_k]) -> [T, H]

    Parameters (all frozen; uint8 bytes so that every collective and every loader carries them),
    with the names Hugging Face's experts use, so that its tensor- and expert-parallel plans apply:

    gate_up_proj           uint8 [E, 2I, K/2]   codes, rows [gate; up]; `up_proj` [E, I, K/2] if not
                                                gated
    gate_up_proj_sf        uint8 [E, 2I, K/16]  e4m3 bytes
    gate_proj_global_scale fp32 [E]             and up_proj_global_scale
    down_proj, down_proj_sf, down_proj_global_scale
    gate_up_proj_bias, down_proj_bias           [E, 2I], [E, H], with `bias`
    up_proj_input_scale, down_proj_input_scale  fp32 [E], with `input_scale`: static activation
                                                scales for activations="nvfp4"
    up_proj_pre_quant_scale, down_proj_pre_quant_scale  [E, H], [E, I], after `add_pre_quant_scales`

    On a Hopper GPU the first call brings codes and block scales into the layout of its kernels (see
    `prepare`); `state_dict` and whatever moves or loads parameters finds them as above again.

    Build one with `NVFP4Experts.from_dense`, or `moe_nvfp4.integrations.huggingface.swap_experts`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        gate: Gate = SILU,
        activations: str = "bf16",
        bias: torch.dtype | None = None,
        input_scale: bool = False,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations must be one of {ACTIVATIONS}, got {activations!r}")
        _check_bias_dtype(bias)
        self.num_experts, self.gate, self.activations = num_experts, gate, activations
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.post_expert_norm: nn.Module | None = None
        self.observer: Callable[[Tensor, Tensor], None] | None = None  # while scales are calibrated
        self._packed: dict = {}  # what `unpack` needs to know about each projection
        self._packed_sizes: tuple[int, int] | None = None
        self._packed_for: tuple[torch.dtype, str] | None = None
        self.up_name = "gate_up_proj" if gate.gated else "up_proj"
        E, N13 = num_experts, intermediate_size * (2 if gate.gated else 1)

        def add(name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> None:
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
            self.register_parameter(name, parameter)

        for name, N, K in ((self.up_name, N13, hidden_size), ("down_proj", hidden_size, intermediate_size)):
            K = -(-K // 16) * 16
            add(name, E, N, K // 2)
            add(f"{name}_sf", E, N, K // 16)
            if bias is not None:
                add(f"{name}_bias", E, N, dtype=bias)
        for name in self.projections:
            add(f"{name}_global_scale", E, dtype=torch.float32)
        for name in ("up_proj", "down_proj") if input_scale else ():
            add(f"{name}_input_scale", E, dtype=torch.float32)

    @classmethod
    def from_dense(
        cls,
        w13: Tensor,
        w2: Tensor,
        gate: Gate = SILU,
        activations: str = "bf16",
        bias: tuple[Tensor, Tensor] | None = None,
        recipe: str = DEFAULT_RECIPE,
    ) -> NVFP4Experts:
        """Quantize dense experts: w13 [E, 2I, H] (rows [gate; up]; [E, I, H] if not gated) and
        w2 [E, H, I], floating; bias: ([E, 2I], [E, H])."""
        if w13.dim() != 3 or w2.dim() != 3:
            raise ValueError(
                f"w13 and w2 must be [experts, rows, columns], got {tuple(w13.shape)} and {tuple(w2.shape)}: "
                "stack the experts"
            )
        E, N13, H = w13.shape
        if gate.gated and N13 % 2:
            raise ValueError(
                f"w13 has {N13} rows per expert, but a gated layer has as many gate rows as up rows: pass [gate; up], "
                "or a gate with gated=False"
            )
        I = N13 // (2 if gate.gated else 1)
        if w2.shape != (E, H, I):
            raise ValueError(f"w2 must be {(E, H, I)} for w13 {tuple(w13.shape)}, got {tuple(w2.shape)}")
        for name, b, shape in (("w13", bias[0], (E, N13)), ("w2", bias[1], (E, H))) if bias is not None else ():
            if b.shape != shape:
                raise ValueError(f"the bias of {name} must be {shape}, got {tuple(b.shape)}")
        dtype = None if bias is None else bias[0].dtype
        layer = cls(E, H, I, gate, activations, dtype, device=w13.device)
        for e in range(E):
            layer.load_expert(e, w13[e], w2[e], recipe)
        if bias is not None:
            getattr(layer, f"{layer.up_name}_bias").data.copy_(bias[0])
            layer.down_proj_bias.data.copy_(bias[1])
        return layer

    def load_expert(self, e: int, w13: Tensor, w2: Tensor, recipe: str = DEFAULT_RECIPE) -> None:
        """Quantize one expert's dense w13 [N13, H] and w2 [H, I], floating, into place.

        ValueError for another shape, an expert that is none, NaN and Inf.
        """
        H, I = self.hidden_size, self.intermediate_size
        if not 0 <= e < self.num_experts:
            raise ValueError(f"expert {e} is none of this layer's: they are 0 to {self.num_experts - 1}")
        shapes = {self.up_name: (I * (2 if self.gate.gated else 1), H), "down_proj": (H, I)}
        for name, matrix in ((self.up_name, w13), ("down_proj", w2)):
            if matrix.shape != shapes[name]:
                raise ValueError(f"{name} of expert {e} must be {shapes[name]}, got {tuple(matrix.shape)}")
        self.unpack()
        for name, matrix in ((self.up_name, w13), ("down_proj", w2)):
            try:
                tensors = quantize_expert(matrix, name, recipe)
            except ValueError as error:
                raise ValueError(f"{name} of expert {e}: {error}") from None
            for key, tensor in tensors.items():
                getattr(self, key).data[e] = tensor

    def set_input_scales(self, x_scale: Tensor, h_scale: Tensor) -> None:
        """Static activation scales, fp32 0-d each, for all experts."""
        for name, scale in (("up_proj", x_scale), ("down_proj", h_scale)):
            scales = scale.detach().float().repeat(self.num_experts).to(self.down_proj.device)
            self.register_parameter(f"{name}_input_scale", nn.Parameter(scales, requires_grad=False))

    def add_pre_quant_scales(self, dtype: torch.dtype) -> None:
        """AWQ: parameters, ones at first, that multiply x and h before the GEMMs."""
        for name, K in (("up_proj", self.hidden_size), ("down_proj", self.intermediate_size)):
            ones = torch.ones(self.num_experts, K, dtype=dtype, device=self.down_proj.device)
            self.register_parameter(f"{name}_pre_quant_scale", nn.Parameter(ones, requires_grad=False))

    @property
    def smooth(self) -> tuple[Tensor | None, Tensor | None]:
        return tuple(self._parameters.get(f"{name}_pre_quant_scale") for name in ("up_proj", "down_proj"))

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections as checkpoints name them."""
        return ("gate_proj", "up_proj", "down_proj") if self.gate.gated else ("up_proj", "down_proj")

    @property
    def weights(self) -> ExpertWeights:
        """The parameters as they are now: read at every call, so sharding and offloading just work."""
        p, up = self._parameters, self.up_name  # by attributes they would take twice the time
        w13, w2, w13_sf, w2_sf = p[up], p["down_proj"], p[f"{up}_sf"], p["down_proj_sf"]
        if packed := self.packed:
            w13, w2, w13_sf, w2_sf = w13.view(torch.int32), w2.view(torch.int32), None, None
        return ExpertWeights(
            gate=self.gate,
            activations=self.activations,
            packed=packed,
            w13=w13,
            w13_sf=w13_sf,
            gate_scale=p.get("gate_proj_global_scale"),
            up_scale=p["up_proj_global_scale"],
            w2=w2,
            w2_sf=w2_sf,
            w2_scale=p["down_proj_global_scale"],
            b13=p.get(f"{up}_bias"),
            b2=p.get("down_proj_bias"),
            x_scale=p.get("up_proj_input_scale"),
            h_scale=p.get("down_proj_input_scale"),
        )

    @property
    def packed(self) -> tuple[int, int] | None:
        """(H, I) while the weights are in the layout of the Hopper kernels."""
        return self._packed_sizes if self._here(self.up_name).dim() == 4 else None

    def _here(self, name: str) -> Tensor:
        """A parameter; of one that is split over ranks (a DTensor), this rank's part, whatever its layout."""
        parameter = self._parameters[name]
        return getattr(parameter, "_local_tensor", parameter)

    def prepare(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Bring the weights into the layout of the kernels that activations of `dtype` run on.

        In place, one projection at a time, and lossless: `unpack` is its exact inverse. Loading a model or swapping
        its experts does it on a GPU, else the first call of the module; before torch.compile or a CUDA graph call it
        by hand then. Weights that a hook brings for a call and takes away are left alone.
        """
        if torch.compiler.is_compiling() or self.packed and (dtype, self.activations) == self._packed_for:
            return
        self.unpack()
        if not on_hopper(self._here(self.up_name).device):
            return
        weights = replace(self.weights, w13=self._here(self.up_name), w2=self._here("down_proj"))
        between = self.post_expert_norm is not None or any(s is not None for s in self.smooth)
        stages = self.activations == "nvfp4" and between  # NVFP4 rows go from stage to stage by themselves
        # Where transformers splits them over ranks, plain tensors stand for DTensors during a call.
        lent = self._offloaded or not isinstance(self.down_proj, nn.Parameter)
        if dtype != torch.bfloat16 or lent or stages or not supports_hopper(weights):
            return
        from moe_nvfp4.kernels.sm90 import pack as sm90_pack

        self._packed_sizes = (weights.hidden_size, weights.intermediate_size)
        self._packed_for = (dtype, self.activations)
        for name in (self.up_name, "down_proj"):
            codes, sf = self._here(name), self._here(f"{name}_sf")
            packed = sm90_pack.pack(codes.data, sf.data, self.gate.gated and name == self.up_name)
            self._packed[name] = replace(packed, units=None)
            codes.data, sf.data = packed.units.view(torch.uint8), sf.data.new_empty(0)

    @property
    def _offloaded(self) -> bool:
        """Whether a hook of accelerate's brings the parameters for each call; others bring the rows."""
        hook = getattr(self, "_hf_hook", None)
        hooks = getattr(hook, "hooks", (hook,))  # several are one
        return hook is not None and any(getattr(h, "offload", True) for h in hooks)

    def unpack(self) -> None:
        """The checkpoint's bytes again."""
        if self.packed:
            from moe_nvfp4.kernels.sm90 import pack as sm90_pack

            for name, packed in self._packed.items():
                codes, sf = self._here(name), self._here(f"{name}_sf")
                packed = replace(packed, units=codes.data.view(torch.int32))
                codes.data, sf.data = sm90_pack.unpack(packed)
            self._packed.clear()

    def _apply(self, fn, recurse=True):
        self.unpack()  # to another device, say
        return super()._apply(_sparing(fn, self._fp32_parameters()), recurse)

    def _fp32_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self._parameters.items() if name.endswith(("_global_scale", "_input_scale"))]

    def _save_to_state_dict(self, *args):
        self.unpack()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args):
        self.unpack()
        super()._load_from_state_dict(*args)

    def own_gate(self, w13_out: Tensor) -> Tensor:
        """The gate of a "raw" layer, [R, 2I] -> [R, I]; adapters replace it."""
        raise NotImplementedError(
            "this layer has gate kind 'raw': assign `own_gate`, a function from GEMM 1's output "
            "[rows, 2 * I] to h [rows, I]"
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.prepare(hidden_states.dtype)
        own_gate = self.own_gate if self.gate.kind == "raw" else None
        return moe_forward(
            hidden_states, top_k_index, top_k_weights, self.weights, own_gate, self.post_expert_norm, self.smooth,
            self.observer,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, gate={self.gate.kind}, "
            f"activations={self.activations!r}"
        )


class NVFP4Linear(nn.Module):
    """A linear layer with 4-bit weights: y = x · wᵀ + bias. It is GEMM 2 of a layer with one expert.

    forward(x [..., K]) -> [..., N] in x's dtype; sums in fp32, rounded once.

    Parameters (frozen): weight uint8 [N, K/2], weight_sf uint8 [N, K/16], weight_global_scale fp32 [1]; bias [N],
    with `bias`; input_scale fp32 [1], with `input_scale`: the static global scale of the rows for
    activations="nvfp4" (without it, one scale per row); pre_quant_scale [K], with `pre_quant_scale`: a dtype:
    x is multiplied by it first (AWQ).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: torch.dtype | None = None,
        activations: str = "bf16",
        input_scale: bool = False,
        pre_quant_scale: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations must be one of {ACTIVATIONS}, got {activations!r}")
        _check_bias_dtype(bias)
        if in_features % 16:
            raise ValueError(f"in_features = {in_features} is not a multiple of 16, the NVFP4 block")
        self.in_features, self.out_features, self.activations = in_features, out_features, activations
        K, N = in_features, out_features
        sizes = {
            "weight": ((N, K // 2), torch.uint8),
            "weight_sf": ((N, K // 16), torch.uint8),
            "weight_global_scale": ((1,), torch.float32),
            "bias": ((N,), bias),
            "input_scale": ((1,), torch.float32 if input_scale else None),
            "pre_quant_scale": ((K,), pre_quant_scale),
        }
        for name, (shape, dtype) in sizes.items():
            zeros = None if dtype is None else torch.zeros(shape, dtype=dtype, device=device)
            self.register_parameter(name, None if zeros is None else nn.Parameter(zeros, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        _refuse_transforms()
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must be [..., {self.in_features}], this linear's in_features, got {tuple(x.shape)}")
        rows = x.reshape(-1, self.in_features)
        if self.pre_quant_scale is not None:
            rows = rows * self.pre_quant_scale.to(rows.dtype)
        p = self._parameters
        y = _linear(
            rows, p["weight"], p["weight_sf"], p["weight_global_scale"], p["bias"], p["input_scale"], self.activations
        )
        return y.view(*x.shape[:-1], self.out_features)

    def _apply(self, fn, recurse=True):
        return super()._apply(_sparing(fn, self._fp32_parameters()), recurse)

    def _fp32_parameters(self) -> list[nn.Parameter | None]:
        return [self.weight_global_scale, self.input_scale]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activations={self.activations!r}"
        )
