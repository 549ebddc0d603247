"""Large batches: weights are dequantized into a bounded scratch buffer and multiplied by torch's grouped product.

From some hundreds of tokens per expert on, the tensor cores are the limit, and a grouped product of torch that uses
them fully beats a kernel that dequantizes in its loop. The buffer holds some rows of every expert at a time, and each
product covers all experts, so that no size depends on data and nothing waits for the device.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_nvfp4.kernels.common.tensors import aligned
from moe_nvfp4.kernels.portable.config import next_power_of_2
from moe_nvfp4.kernels.portable.dequantize import UNIT, dequantize, how, rounded
from moe_nvfp4.kernels.portable.gemm import gated
from moe_nvfp4.kernels.portable.launch import launch
from moe_nvfp4.weights import Matrices

SCRATCH = 1 << 29  # bytes of weights dequantized at a time; more only where ALIGNED rows of every expert need more
ALIGNED = 64  # rows


def products(x: Tensor, w: Matrices, offsets: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first row, number of rows, x [R, K] times these rows of its expert's code * sf: bf16 [R, rows]).

    Where the rows are [gate; up], they are taken from each half of N, and products are [R, 2 * rows].
    """
    codes, sf, count = aligned(w.codes), aligned(w.block_scales()), 2 if w.gated else 1
    E, N, K = codes.shape[0], w.N // count, w.K
    rows = min(N, max(ALIGNED, SCRATCH // (E * count * K * 2) // ALIGNED * ALIGNED))
    scratch = x.new_empty(E, count * rows, K)
    for first in range(0, N, rows):
        if N - first < rows:
            rows = N - first
            scratch = scratch.view(-1)[: E * count * rows * K].view(E, count * rows, K)
        _dequantize(codes, sf, None, scratch, first, N, K, rows, E * count)
        if x.is_meta:  # launches are noted
            yield first, rows, x.new_empty(len(x), count * rows)
        else:
            yield first, rows, torch._grouped_mm(x, scratch.transpose(1, 2), offs=offsets[1:])


def linear(x: Tensor, row_scale: Tensor | None, w: Matrices, out: Tensor) -> Tensor:
    """out [T, N] = x [T, K] times the weights' values in x's dtype.

    With `row_scale` fp32 [T] (NVFP4 rows), both operands are exact code * sf, and the product is rounded before it is
    scaled.
    """
    codes, sf, scale, N, K = aligned(w.codes), aligned(w.block_scales()), w.global_scale, w.N, w.K
    rows = min(N, max(ALIGNED, SCRATCH // (K * 2) // ALIGNED * ALIGNED))
    scratch = x.new_empty(rows, K)
    for first in range(0, N, rows):
        n = min(rows, N - first)
        _dequantize(codes, sf, scale if row_scale is None else None, scratch, first, N, K, n, 1)
        columns, values = out[:, first : first + n], scratch[:n].T
        if x.is_meta:  # launches are noted
            continue
        if row_scale is None:
            torch.mm(x, values, out=columns)
        else:
            torch.mul(x @ values, row_scale[:, None] * scale, out=columns)
    return out if w.bias is None or x.is_meta else out.add_(w.bias)


def _dequantize(codes, sf, scale, scratch, first, N, K, rows, matrices) -> None:
    BN, BK = 32, min(256, max(32, next_power_of_2(K)))
    grid = (-(-rows // BN), -(-K // BK), matrices)
    launch(dequantize_kernel, grid, codes, sf, scale, scratch, first, N, K, rows, BN, BK, how(), num_warps=4)


@triton.jit(do_not_specialize=["first"])
def dequantize_kernel(
    codes, sf, scale, out, first,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """out [E * halves, ROWS, K] = code * sf of rows first .. first + ROWS of codes [E * halves, N, K / 2].

    scale: None, or an fp32 number that multiplies the values before they are rounded.
    """
    half = tl.program_id(2).to(tl.int64)  # counted over all experts
    local = tl.program_id(0) * BN + tl.arange(0, BN)
    n = first + local
    k = tl.program_id(1) * (BK // 2) + tl.arange(0, BK // 2)
    ks = tl.program_id(1) * (BK // 16) + tl.arange(0, BK // 16)
    there = (local < ROWS)[:, None]
    c = tl.load(codes + half * N * (K // 2) + n[:, None] * (K // 2) + k[None, :], mask=there & (k < K // 2)[None, :],
                other=0)  # fmt: skip
    s = tl.load(sf + half * N * (K // 16) + n[:, None] * (K // 16) + ks[None, :], mask=there & (ks < K // 16)[None, :],
                other=0)  # fmt: skip
    even, odd = dequantize(c, s, out.dtype.element_ty, HOW)
    value = tl.reshape(tl.join(even, odd), (BN, BK)).to(tl.float32) * UNIT
    if scale is not None:
        value *= tl.load(scale)
    columns = tl.program_id(1) * BK + tl.arange(0, BK)
    to = out + (half * ROWS + local[:, None]) * K + columns[None, :]
    tl.store(to, rounded(value, out.dtype.element_ty, HOW), mask=(local < ROWS)[:, None] & (columns < K)[None, :])


def window(w: Matrices, columns: slice, dtype: torch.dtype) -> Tensor:
    """[E, N, columns] of the weights' values in 16-bit `dtype`; columns begin at a multiple of 64."""
    E, N, count = len(w.global_scale), w.N, min(columns.stop, w.K) - columns.start
    out = w.codes.new_empty(E, N, count, dtype=dtype)
    BN, BK = 32, min(256, max(32, next_power_of_2(count)))
    split = N // 2 if w.gated else N
    launch(
        window_kernel, (-(-N // BN), -(-count // BK), E), aligned(w.codes), aligned(w.block_scales()),
        w.gate_scale, w.global_scale, out, columns.start, N, 16 * w.blocks, count, split, BN, BK, how(), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["begin"])
def window_kernel(
    codes, sf, first_scale, scale, out, begin,
    N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """out [E, N, COLUMNS] = the values of columns begin .. begin + COLUMNS of codes [E, N, K / 2]. Global scales are
    `first_scale` [E] for the first SPLIT rows, if it is given, and `scale` [E] for the others."""
    e = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    there = (n < N)[:, None]
    k = begin // 2 + tl.program_id(1) * (BK // 2) + tl.arange(0, BK // 2)
    ks = begin // 16 + tl.program_id(1) * (BK // 16) + tl.arange(0, BK // 16)
    c = tl.load(codes + (e * N + n[:, None]) * (K // 2) + k[None, :], mask=there & (k < K // 2)[None, :], other=0)
    s = tl.load(sf + (e * N + n[:, None]) * (K // 16) + ks[None, :], mask=there & (ks < K // 16)[None, :], other=0)
    even, odd = dequantize(c, s, out.dtype.element_ty, HOW)
    weight_scale = tl.load(scale + e)
    if first_scale is not None:
        weight_scale = tl.where(n < SPLIT, tl.load(first_scale + e), weight_scale)[:, None]
    value = tl.reshape(tl.join(even, odd), (BN, BK)).to(tl.float32) * (weight_scale * UNIT)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    to = out + (e * N + n[:, None]) * COLUMNS + column[None, :]
    tl.store(to, rounded(value, out.dtype.element_ty, HOW), mask=there & (column < COLUMNS)[None, :])


@triton.jit(do_not_specialize=["first"])
def gate_kernel(
    both, row_expert, live, first_scale, scale, row_scale, bias, h, first,
    I: tl.constexpr, ROWS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, CLAMP_AFTER: tl.constexpr, BLOCK: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """h[r, first : first + ROWS] from the products `both` [R, 2 * ROWS], gates first ([R, ROWS] if not gated).

    row_scale: None, or fp32 [R].
    """
    PAIRED: tl.constexpr = GATE == "silu" or GATE == "gelu_tanh"
    r = tl.program_id(0)
    if r < tl.load(live):
        local = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        n = first + local
        there = (local < ROWS) & (n < I)
        e = tl.load(row_expert + r)
        row = both + r.to(tl.int64) * (2 * ROWS if PAIRED else ROWS) + local
        at = e.to(tl.int64) * (2 * I if PAIRED else I) + n
        of_row = 1.0
        if row_scale is not None:
            of_row = tl.load(row_scale + r)
        if PAIRED:
            g = tl.load(row, mask=there, other=0.0).to(tl.float32) * tl.load(first_scale + e) * of_row
            u = tl.load(row + ROWS, mask=there, other=0.0).to(tl.float32) * tl.load(scale + e) * of_row
            if bias is not None:
                g += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
                u += tl.load(bias + at + I, mask=there, other=0.0).to(tl.float32)
            value = gated(g, u, GATE, ALPHA, LIMIT, UP_OFFSET, CLAMP_AFTER)
        else:
            value = tl.load(row, mask=there, other=0.0).to(tl.float32) * tl.load(scale + e) * of_row
            if bias is not None:
                value += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
            if GATE == "relu2":
                value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
                value *= value
        tl.store(h + r.to(tl.int64) * I + n, rounded(value, h.dtype.element_ty, HOW), mask=there)
