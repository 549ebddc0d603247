"""The reference backend: the layer and its three stages in plain torch, on any device.

This is the oracle the kernels are tested against, so it is written to be read: one loop over the
experts that are hit, fp32 sums, no fusion. It reads the group offsets back to the host, and it
dequantizes at most `CHUNK` weights at a time, so it never holds a layer's weights in another form
than NVFP4.

Numerics, the same on every backend: a GEMM sums (code * sf) * x in fp32; the global scales (of
the weights, and of the rows when they are NVFP4) multiply the sum; bias and gate are fp32; h is
rounded once, to the rows' dtype or to NVFP4; the combine adds the weighted slots 0, 1, ... of a
token in fp32, in that order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ExpertWeights, LinearWeights

CHUNK = 1 << 21  # weights dequantized at a time: 8 MiB of fp32


def quantize_rows(
    x: Tensor, index: Tensor | None, scale: Tensor | None, groups: Groups, four_over_six: bool = False
) -> Rows:
    """bf16/fp16/fp32 x [*, K] -> NVFP4 rows: row r is x[index[r]] (x[r] without an index).

    scale fp32 [E]: the static global scale of each expert's rows (`input_scale` of a checkpoint);
    None: dynamic, `format.row_scales`. K is padded to a multiple of 16 with zeros. four_over_six: as `format.quantize`.
    """
    x = nvfp4.pad_k(x if index is None else x[index])
    if scale is None:
        row_scale = nvfp4.row_scales(x, four_over_six)
    else:
        row_scale = F.pad(scale, (0, 1), value=1.0)[groups.expert_of_row()]
    codes, sf, _ = nvfp4.quantize(x, row_scale, check=False, four_over_six=four_over_six)
    sf = nvfp4.swizzle_sf_grouped(sf.view(torch.uint8), groups.offsets)
    return Rows(codes, sf, row_scale)


def gemm1_swiglu(rows: Rows, weights: ExpertWeights, groups: Groups, dtype: torch.dtype) -> Rows:
    """h = gate(rows · w13ᵀ): `dtype` [R, I] (raw gate: [R, N13]), or NVFP4 where weights.h_scale is given.

    Unrouted rows come back as zeros.
    """
    w, I = weights, weights.intermediate_size
    width = w.w13.N if w.gate.kind == "raw" else I
    R, device = groups.num_rows, rows.values.device
    h_scale = w.h_scale if w.quantizes_h else None
    codes13, sf13 = w.w13.codes, w.w13.block_scales()
    if h_scale is not None:
        K2 = 16 * w.w2.blocks
        codes = torch.zeros(R, K2 // 2, dtype=torch.uint8, device=device)
        sf = torch.zeros(R, K2 // 16, dtype=torch.uint8, device=device)
    else:
        h = torch.zeros(R, width, dtype=dtype, device=device)
    for e, live, x in _rows_by_expert(rows, groups):
        out = _matmul(x, codes13[e], sf13[e])
        if w.w13.gate_scale is not None:
            out[:, :I] *= w.w13.gate_scale[e]
            out[:, I:] *= w.w13.global_scale[e]
        else:
            out *= w.w13.global_scale[e]
        if rows.scale is not None:
            out *= rows.scale[live, None]
        if w.w13.bias is not None:
            out += w.w13.bias[e].float()
        out = w.gate(out)
        if h_scale is not None:
            codes[live], sf_e, _ = nvfp4.quantize(nvfp4.pad_k(out), h_scale[e], False, w.four_over_six)
            sf[live] = sf_e.view(torch.uint8)
        else:
            h[live] = out.to(dtype)
    if h_scale is None:
        return Rows(h)
    scale = F.pad(h_scale, (0, 1), value=1.0)[groups.expert_of_row()]
    return Rows(codes, nvfp4.swizzle_sf_grouped(sf, groups.offsets), scale)


def gemm2_combine(h: Rows, weights: ExpertWeights, groups: Groups, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """y[t] = sum over slots j of top_k_weights[t, j] * (h · w2ᵀ), in `dtype` [T, H]."""
    w = weights
    T, top_k = top_k_weights.shape
    codes, sf = w.w2.codes, w.w2.block_scales()
    out = torch.zeros(T * top_k, w.hidden_size, dtype=torch.float32, device=h.values.device)
    for e, live, x in _rows_by_expert(h, groups):
        y = _matmul(x, codes[e], sf[e])
        y *= w.w2.global_scale[e]
        if h.scale is not None:
            y *= h.scale[live, None]
        if w.w2.bias is not None:
            y += w.w2.bias[e].float()
        out[groups.order[live]] = y
    out = out.view(T, top_k, w.hidden_size)
    total = torch.zeros(T, w.hidden_size, dtype=torch.float32, device=out.device)
    for j in range(top_k):
        total += top_k_weights[:, j, None].float() * out[:, j]
    return total.to(dtype)


def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> Tensor:
    """The whole layer: x [T, H], ids and weights [T, top_k] -> [T, H] in x's dtype."""
    w, groups = weights, group_by_expert(top_k_index, weights.num_experts)
    rows = Rows(x, index=groups.token)
    if w.quantized:
        rows = quantize_rows(x, groups.token, w.x_scale, groups, w.four_over_six)
    h = gemm1_swiglu(rows, w, groups, x.dtype)
    if w.quantized and not h.is_nvfp4:
        h = quantize_rows(h.values, None, None, groups, w.four_over_six)
    return gemm2_combine(h, w, groups, top_k_weights, x.dtype)


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """y = x · wᵀ + bias: x [T, K] -> [T, N] in x's dtype. Nothing is read back to the host."""
    w, m, scale = weights, weights.matrix, weights.matrix.global_scale
    if w.parts:
        scale = torch.cat([s.expand(N) for s, N in zip(scale.split(1), w.parts, strict=True)])
    rows = x.float()
    if w.quantized:
        four_over_six = w.four_over_six
        row_scale = nvfp4.row_scales(x, four_over_six) if w.input_scale is None else w.input_scale.expand(len(x))
        codes, sf, _ = nvfp4.quantize(x, row_scale, False, four_over_six)
        rows, scale = nvfp4.dequantize(codes, sf, None), scale * row_scale[:, None]
    y = _matmul(rows, m.codes, m.block_scales()) * scale
    return (y if m.bias is None else y + m.bias.float()).to(x.dtype)


def _rows_by_expert(rows: Rows, groups: Groups) -> Iterator[tuple[int, slice, Tensor]]:
    """(expert, its rows as a slice, their values in fp32 without global scale) for experts hit."""
    sf = None
    if rows.sf is not None:
        R = groups.num_rows
        sf = nvfp4.unswizzle_sf_grouped(rows.sf, groups.offsets, R, rows.values.shape[-1] // 8)
    offsets = groups.offsets.tolist()
    for e, (first, last) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if first == last:
            continue
        live = slice(first, last)
        if sf is not None:
            x = nvfp4.dequantize(rows.values[live], sf[live], None)
        else:
            x = rows.values[live if rows.index is None else rows.index[live]].float()
        yield e, live, x


def _matmul(x: Tensor, codes: Tensor, sf: Tensor) -> Tensor:
    """fp32 [m, K] times one expert's (code * sf) [N, K]ᵀ -> fp32 [m, N]."""
    N, K = codes.shape[0], codes.shape[1] * 2
    out = torch.empty(x.shape[0], N, dtype=torch.float32, device=x.device)
    step = max(1, CHUNK // K)
    for n in range(0, N, step):
        w = nvfp4.dequantize(codes[n : n + step], sf[n : n + step], None)
        torch.mm(x, w[:, : x.shape[1]].T, out=out[:, n : n + step])
    return out
