"""Checks of what a layer is given: device, dtype and shape of every tensor, before it reaches C or a kernel.

The torch.library ops call these, in their fake kernels too, so that nothing unchecked reaches a backend. They read
no values, so they wait for no device and cost a few microseconds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_nvfp4.routing import Groups, check_ids
from moe_nvfp4.weights import ACTIVATIONS, ExpertWeights, Gate, LinearWeights, Matrices

ROWS = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of x, h, y and biases
ROUTER = (*ROWS, torch.float64)
_BYTES, _FP32, _INT32 = (torch.uint8,), (torch.float32,), (torch.int32,)
_WAYS_OUT = {
    _BYTES: "codes and block scales are bytes, which a cast or tie_weights() has replaced: load the layer again",
    _FP32: "scales are fp32, and a cast has rounded them: load the layer again, and under FSDP's mixed precision pass "
    "ignored_params=moe_nvfp4.scales.fp32_parameters(model), or load in bf16 and leave that out (Trainer's bf16=True, "
    "DistributedConfig's fsdp_mixed_precision)",
    ROWS: "sums are fp32 in any case: convert it to one of these",
}


def check_layer(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> None:
    """Check that x [T, H], top_k_index [T, top_k], top_k_weights [T, top_k] and `weights` fit each other and are on one
    device.

    Raises TypeError for a dtype, ValueError for a shape or a device; each names the tensor, the rule and the way out.
    """
    if weights.checked_on != x.device:
        check_weights(weights, x.device)
        weights.checked_on = x.device
    check_rows(x, top_k_index, top_k_weights, weights)


def check_rows(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> None:
    """`check_layer` without the weights' own tensors, which may be on another device."""
    device = x.device
    check_ids(top_k_index)
    if x.dim() != 2 or x.shape[1] != weights.hidden_size or x.shape[0] != top_k_index.shape[0]:
        raise ValueError(
            f"x must be [tokens, {weights.hidden_size}] with a row of top_k_index per token, got x "
            f"{tuple(x.shape)} and top_k_index {tuple(top_k_index.shape)}"
        )
    _check("x", x, x.shape, ROWS, device)
    _check("top_k_index", top_k_index, top_k_index.shape, (top_k_index.dtype,), device)
    _check("top_k_weights", top_k_weights, top_k_index.shape, ROUTER, device)


def check_map(expert_map: Tensor, top_k_index: Tensor, device: torch.device) -> None:
    """Check an expert_map, int32 [G], and the ids to look up in it; their values are a kernel's to check."""
    check_ids(top_k_index)
    _check("expert_map", expert_map, (expert_map.numel(),), _INT32, device)


def check_weights(weights: ExpertWeights, device: torch.device) -> None:
    """Check the dtypes and shapes of all tensors of `weights` against each other, and that they are on `device`."""
    w = weights
    for name, codes in (("w13", w.w13.codes), ("w2", w.w2.codes)):
        if codes is None or codes.dim() != (3 if w.layout is None else 4):
            shape = None if codes is None else tuple(codes.shape)
            raise ValueError(f"{name} has shape {shape}, expected [experts, rows, bytes]: take NVFP4Experts.weights")
    E, H, I = w.num_experts, w.hidden_size, w.intermediate_size
    for name, m, N, K in (("w13", w.w13, I * (2 if w.gate.gated else 1), H), ("w2", w.w2, H, I)):
        if (m.N, m.K, m.layout) != (N, K, w.layout):
            raise ValueError(
                f"{name} is [{m.N}, {m.K}] in layout {m.layout}, expected {[N, K]} in {w.layout}: w13 is [2 I, H] "
                "([I, H] without a gate projection), w2 [H, I], both in one layout"
            )
        _check_matrices(name, m, (E,), device)
    if w.gate.gated and w.w13.gate_scale is None:
        raise ValueError(f"w13.gate_scale is missing: pass it, in {_names(_FP32)}")
    for name, scale in (("x_scale", w.x_scale), ("h_scale", w.h_scale)):
        if scale is not None:
            _check(name, scale, (E,), _FP32, device)


def _check_matrices(name: str, m: Matrices, E: tuple[int, ...], device: torch.device, linears: int = 1) -> None:
    """E: (E,), or () for the matrix of a linear, or of `linears`. A backend checks the shape of its own layout when it
    runs."""
    if m.layout is None:
        _check(f"{name}.codes", m.codes, (*E, m.N, 8 * m.blocks), _BYTES, device)
        _check(f"{name}.sf", m.sf, (*E, m.N, m.blocks), _BYTES, device)
    else:
        _check(f"{name}.codes", m.codes, (*(E or m.codes.shape[:1]), *m.codes.shape[1:]), _BYTES, device)
    _check(f"{name}.global_scale", m.global_scale, E or (linears,), _FP32, device)
    if m.gate_scale is not None:
        _check(f"{name}.gate_scale", m.gate_scale, E, _FP32, device)
    if m.bias is not None:
        _check(f"{name}.bias", m.bias, (*E, m.N), ROWS, device)


def check_stage(
    name: str,
    rows: Tensor,
    factor: Tensor | None,
    adapter: tuple[Tensor, Tensor] | None,
    weights: ExpertWeights,
    groups: Groups,
    dtype: torch.dtype,
    top_k_weights: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """Check what a stage is given: `up` x [T, H] as "x"; `down` h [R, I] as "h", and routing weights [T, top_k].

    Of both: a factor [E, K], and an adapter [E, r, K] and [E, N, r], or S of them [E, S, r, K] and [E, S, N, r] where
    groups have parts. Raises as `check_layer`.
    """
    check_groups(groups)
    w, device, R, E = weights, groups.order.device, groups.num_rows, groups.num_experts
    check_weights(w, device)
    if E != w.num_experts:
        raise ValueError(f"offsets are for {E} experts, but the weights for {w.num_experts}")
    if dtype not in ROWS:
        raise TypeError(f"the result's dtype is {dtype}, expected {_names(ROWS)}: {_WAYS_OUT[ROWS]}")
    matrices, p = w.w13 if name == "x" else w.w2, top_k_weights
    N, K = matrices.N, matrices.K
    if rows.dim() != 2 or rows.shape[0] * (groups.top_k if name == "x" else 1) != R:
        raise ValueError(f"{name} has shape {tuple(rows.shape)}, but there are {R} assignments, {groups.top_k} a token")
    _check(name, rows, (rows.shape[0], K), ROWS, device)
    if factor is not None:
        _check(f"{name}'s factor", factor, (E, K), ROUTER, device)
    if adapter is not None:
        r = adapter[0].shape[-2] if adapter[0].dim() in (3, 4) else 0
        each = (E,) if groups.parts is None else (E, (len(groups.parts) - 1) // E)
        _check(f"{name}'s adapter a", adapter[0], (*each, r, K), (rows.dtype,), device)
        _check(f"{name}'s adapter b", adapter[1], (*each, N, r), (rows.dtype,), device)
    if p is not None:
        _check("top_k_weights", p, (R // groups.top_k if groups.top_k else len(p), groups.top_k), ROUTER, device)
    if amax is not None:
        _check("amax", amax, (R,), _FP32, device)


def check_groups(groups: Groups) -> None:
    """Check order int32 [R] and offsets int32 [E + 1], E at least 1, on one device."""
    order, offsets = groups.order, groups.offsets
    _check("order", order, (order.numel(),), _INT32, order.device)
    _check("offsets", offsets, (max(2, offsets.numel()),), _INT32, order.device)
    if groups.position is not None:
        _check("position", groups.position, (order.numel(),), _INT32, order.device)
    if groups.parts is not None and groups.bare is not None:
        several = max(1, (groups.parts.numel() - 1) // groups.num_experts)
        _check("parts", groups.parts, (groups.num_experts * several + 1,), _INT32, order.device)
        _check("bare", groups.bare, (order.numel(),), (torch.bool,), order.device)


def check_linear(x: Tensor, weights: LinearWeights) -> None:
    """Check that x [T, K] and the tensors of `weights` fit each other and are on one device."""
    m, device = weights.matrix, x.device
    check_activations(weights.activations)
    if m.codes.dim() != (2 if m.layout is None else 4) or x.dim() != 2 or x.shape[1] != m.K:
        raise ValueError(
            "x must be [tokens, in_features] and weight [out_features, in_features / 2] codes, got "
            f"{tuple(x.shape)} and {tuple(m.codes.shape)} for weights {(m.N, m.K)}"
        )
    if m.K % 16:
        raise ValueError(f"in_features = {m.K} is not a multiple of 16, the NVFP4 block")
    _check("x", x, x.shape, ROWS, device)
    _check_matrices("weight", m, (), device, len(weights.parts) or 1)
    if weights.input_scale is not None:
        _check("input_scale", weights.input_scale, (1,), _FP32, device)


def check_gate(gate: Gate) -> None:
    if not isinstance(gate, Gate):
        raise TypeError(f"gate must be a moe_nvfp4.Gate, such as Gate('silu'), got {gate!r}")


def check_activations(activations: str) -> None:
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {ACTIVATIONS}, got {activations!r}")


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is True or False, got {value!r}")


def check_bias_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in ROWS:
        raise TypeError(f"biases are {_names(ROWS)}, not {dtype}: {_WAYS_OUT[ROWS]}")


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in ROWS:
        raise TypeError(f"activations are {_names(ROWS)}, not {dtype}")


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _check(name: str, t: Tensor | None, shape: tuple[int, ...], dtypes: tuple, device: torch.device) -> None:
    if t is not None and t.dtype in dtypes and t.shape == shape and t.device == device:
        return
    if t is None:
        raise ValueError(f"{name} is missing: pass it, in {_names(dtypes)}")
    if t.dtype not in dtypes:
        way_out = _WAYS_OUT.get(dtypes)
        raise TypeError(f"{name} is {t.dtype}, expected {_names(dtypes)}" + (f": {way_out}" if way_out else ""))
    if t.shape != shape:
        raise ValueError(f"{name} has shape {tuple(t.shape)}, expected {tuple(shape)}: the layer's tensors disagree")
    raise ValueError(
        f"{name} is on {t.device}, but the layer's other tensors are on {device}: move them to one device "
        "(module.to(x.device)), or let experts compute on the CPU beside a GPU (experts.keep_on_cpu())"
    )


def _names(dtypes: tuple) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
