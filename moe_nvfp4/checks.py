"""Checks of what a layer is given: device, dtype and shape of every tensor, before it reaches C or a kernel.

The torch.library ops call these, in their fake kernels too, so that nothing unchecked reaches a backend. They read
no values, so they wait for no device and cost a few microseconds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_nvfp4.format import grouped_sf_rows
from moe_nvfp4.routing import Groups, Rows, check_ids
from moe_nvfp4.weights import ACTIVATIONS, ExpertWeights, Gate, LinearWeights, is_quantized

ROWS = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of x, h, y and biases
ROUTER = (*ROWS, torch.float64)
_BYTES, _FP32, _INT32 = (torch.uint8,), (torch.float32,), (torch.int32,)
_WAYS_OUT = {
    _BYTES: "codes and block scales are bytes, which a cast has destroyed: load the layer again",
    _FP32: "scales are fp32, and a cast has rounded them: load the layer again, and under FSDP's mixed precision pass "
    "ignored_params=moe_nvfp4.scales.fp32_parameters(model), or load in bf16 without DistributedConfig's "
    "fsdp_mixed_precision",
    ROWS: "sums are fp32 in any case: convert it to one of these",
}


def check_layer(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, host_weights: bool = False
) -> None:
    """Check that x [T, H], top_k_index [T, top_k], top_k_weights [T, top_k] and `weights` fit each other and are on one
    device; with `host_weights`, the weights are on the CPU instead.

    Raises TypeError for a dtype, ValueError for a shape or a device; each names the tensor, the rule and the way out.
    """
    device = x.device
    check_weights(weights, torch.device("cpu") if host_weights else device)
    check_ids(top_k_index)
    if x.dim() != 2 or x.shape[1] != weights.hidden_size or x.shape[0] != top_k_index.shape[0]:
        raise ValueError(
            f"x must be [tokens, {weights.hidden_size}] with a row of top_k_index per token, got x "
            f"{tuple(x.shape)} and top_k_index {tuple(top_k_index.shape)}"
        )
    _check("x", x, x.shape, ROWS, device)
    _check("top_k_index", top_k_index, top_k_index.shape, (top_k_index.dtype,), device)
    _check("top_k_weights", top_k_weights, top_k_index.shape, ROUTER, device)


def check_weights(weights: ExpertWeights, device: torch.device) -> None:
    """Check the dtypes and shapes of all tensors of `weights` against each other, and that they are on `device`."""
    w = weights
    for name, codes in (("w13", w.w13), ("w2", w.w2)):
        if codes is None or codes.dim() != (3 if w.layout is None else 4):
            shape = None if codes is None else tuple(codes.shape)
            raise ValueError(f"{name} has shape {shape}, expected [experts, rows, bytes]: take NVFP4Experts.weights")
    E, H, I = w.num_experts, w.hidden_size, w.intermediate_size
    N13 = I * (2 if w.gate.gated else 1)
    if w.layout is None:
        for name, codes, sf, N, K in (("w13", w.w13, w.w13_sf, N13, H), ("w2", w.w2, w.w2_sf, H, I)):
            K16 = -(-K // 16)
            _check(name, codes, (E, N, 8 * K16), _BYTES, device)
            _check(f"{name}_sf", sf, (E, N, K16), _BYTES, device)
    else:
        _check("w13", w.w13, (E, *w.layout.w13), _BYTES, device)
        _check("w2", w.w2, (E, *w.layout.w2), _BYTES, device)
    if w.gate.gated:
        _check("gate_scale", w.gate_scale, (E,), _FP32, device)
    _check("up_scale", w.up_scale, (E,), _FP32, device)
    _check("w2_scale", w.w2_scale, (E,), _FP32, device)
    for name, scale in (("x_scale", w.x_scale), ("h_scale", w.h_scale)):
        if scale is not None:
            _check(name, scale, (E,), _FP32, device)
    for name, bias, N in (("b13", w.b13, N13), ("b2", w.b2, H)):
        if bias is not None:
            _check(name, bias, (E, N), ROWS, device)


def check_stage(
    name: str, rows: Rows, weights: ExpertWeights, order: Tensor, offsets: Tensor, dtype: torch.dtype, p: Tensor | None
) -> Groups:
    """Check what a GEMM is given: `gemm1_swiglu` rows "x"; `gemm2_combine` rows "h" and top_k_weights p [T, top_k]."""
    if p is not None and p.dim() != 2:
        raise ValueError(f"top_k_weights must be [tokens, top_k], got shape {tuple(p.shape)}")
    groups = Groups(order, offsets, 1 if p is None else p.shape[1])
    check_groups(groups)
    device, R = order.device, groups.num_rows
    check_weights(weights, device)
    if groups.num_experts != weights.num_experts:
        raise ValueError(f"offsets are for {groups.num_experts} experts, but the weights for {weights.num_experts}")
    if dtype not in ROWS:
        raise TypeError(f"the result's dtype is {dtype}, expected {_names(ROWS)}: {_WAYS_OUT[ROWS]}")
    K = weights.hidden_size if name == "x" else weights.intermediate_size
    _check_rows(name, rows, K, groups, weights.activations)
    if p is not None:
        _check("top_k_weights", p, p.shape, ROUTER, device)
        if p.shape[0] * p.shape[1] != R:
            raise ValueError(f"top_k_weights {tuple(p.shape)} must hold one weight for each of {R} rows")
    return groups


def _check_rows(name: str, rows: Rows, K: int, groups: Groups, activations: str) -> None:
    """Check the rows of a GEMM: [R, K], or [*, K] with an index; for W4A4, NVFP4 with K rounded up to 16."""
    R, device, values = groups.num_rows, groups.order.device, rows.values
    if (rows.sf is None) != (rows.scale is None) or rows.is_nvfp4 != is_quantized(activations):
        raise ValueError(
            f"{name}: activations={activations!r} take "
            + ("codes with block scales and a scale for each row" if is_quantized(activations) else "unquantized rows")
        )
    if rows.is_nvfp4:
        K16 = -(-K // 16)
        _check(name, values, (R, 8 * K16), _BYTES, device)
        _check(f"{name}'s sf", rows.sf, (grouped_sf_rows(R, groups.num_experts) * (-(-K16 // 4) * 4),), _BYTES, device)
        _check(f"{name}'s scale", rows.scale, (R,), _FP32, device)
        if rows.index is not None:
            raise ValueError(f"{name}: NVFP4 rows are gathered when they are quantized: an index is not taken")
        return
    _check_source(name, values, rows.index, K, R, device)


def check_quantize(x: Tensor, index: Tensor | None, scale: Tensor | None, order: Tensor, offsets: Tensor) -> Groups:
    """Check what `quantize_rows` is given: x [*, K] and index [R], or x [R, K]; scale [E]."""
    groups = Groups(order, offsets, 1)
    check_groups(groups)
    device = groups.order.device
    _check_source("x", x, index, None, groups.num_rows, device)
    if scale is not None:
        _check("scale", scale, (groups.num_experts,), _FP32, device)
    return groups


def check_groups(groups: Groups) -> None:
    """Check order int32 [R] and offsets int32 [E + 1], E at least 1, on one device."""
    order, offsets = groups.order, groups.offsets
    _check("order", order, (order.numel(),), _INT32, order.device)
    _check("offsets", offsets, (max(2, offsets.numel()),), _INT32, order.device)


def check_linear(x: Tensor, weights: LinearWeights) -> None:
    """Check that x [T, K] and the tensors of `weights` fit each other and are on one device."""
    codes, sf, scale, bias, x_scale, activations, sizes = weights
    device = x.device
    check_activations(activations)
    if codes.dim() != (2 if sizes is None else 4) or x.dim() != 2 or x.shape[1] != weights.shape[1]:
        raise ValueError(
            "x must be [tokens, in_features] and weight [out_features, in_features / 2] codes, got "
            f"{tuple(x.shape)} and {tuple(codes.shape)}" + ("" if sizes is None else f" for weights {sizes}")
        )
    N, K = weights.shape
    if K % 16:
        raise ValueError(f"in_features = {K} is not a multiple of 16, the NVFP4 block")
    if (sf is None) == (sizes is None):
        raise ValueError(
            "weight_sf goes with codes in the checkpoint's layout, sizes with codes in a backend's layout: give one"
        )
    _check("x", x, x.shape, ROWS, device)
    if sizes is None:
        _check("weight", codes, (N, K // 2), _BYTES, device)
        _check("weight_sf", weights.block_scales(), (N, K // 16), _BYTES, device)
    else:
        _check("weight", codes, codes.shape, _BYTES, device)
    _check("weight_global_scale", scale, (1,), _FP32, device)
    if bias is not None:
        _check("bias", bias, (N,), ROWS, device)
    if x_scale is not None:
        _check("input_scale", x_scale, (1,), _FP32, device)


def check_gate(gate: Gate) -> None:
    if not isinstance(gate, Gate):
        raise TypeError(f"gate must be a moe_nvfp4.Gate, such as Gate('silu'), got {gate!r}")


def check_activations(activations: str) -> None:
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {ACTIVATIONS}, got {activations!r}")


def check_bias_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in ROWS:
        raise TypeError(f"biases are {_names(ROWS)}, not {dtype}: {_WAYS_OUT[ROWS]}")


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _check_source(name: str, x: Tensor, index: Tensor | None, K: int | None, R: int, device: torch.device) -> None:
    """Check unquantized rows: x [R, K], or [*, K] with index int32 [R]."""
    if x.dim() != 2:
        raise ValueError(f"{name} must be [rows, K], got shape {tuple(x.shape)}")
    rows, width = x.shape
    _check(name, x, (R if index is None else rows, width if K is None else K), ROWS, device)
    if index is not None:
        _check(f"{name}'s index", index, (R,), _INT32, device)
        if R and not rows:
            raise ValueError(f"{name} has no rows for an index of {R}")


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
