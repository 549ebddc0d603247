"""What routers do, in one launch each: a linear for few tokens, and `torch.topk` of its scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_nvfp4.kernels.portable.config import next_power_of_2
from moe_nvfp4.kernels.portable.launch import launch


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, from the largest on, and where they are: [..., N] bf16, fp16 or fp32 -> [..., k] in
    its dtype, int64 [..., k]. A warp has the row and what it takes of it in registers: for N up to some thousand.

    NaN is the largest number, and of equal ones the first come first. torch's kernels for GPUs take the same ones.
    """
    scores, N = scores.contiguous(), scores.shape[-1]
    values = scores.new_empty(*scores.shape[:-1], k)
    indices = torch.empty_like(values, dtype=torch.int64)
    if rows := values.numel() // k:
        sizes = N, k, next_power_of_2(N), next_power_of_2(k)
        launch(top_k_kernel, (rows,), scores, values, indices, *sizes, num_warps=1)
    return values, indices


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N], all bf16, fp16 or fp32: [T, N] in the same dtype. Sums
    are in fp32, in an order that depends on K alone. For few tokens, and K up to some ten thousand.
    """
    x, weight = x.contiguous(), weight.contiguous()
    (T, K), N = x.shape, weight.shape[0]
    y = x.new_empty(T, N)
    if y.numel():
        launch(linear_kernel, (N, T), x, weight, bias, y, N, K, next_power_of_2(K), num_warps=8)
    return y


@triton.jit
def top_k_kernel(
    scores, values, indices, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """Row program_id(0): K times the largest of what is left, as integers in the order of the numbers."""
    row = tl.program_id(0).to(tl.int64)
    n, kept = tl.arange(0, BLOCK), tl.arange(0, KEPT)
    x = tl.load(scores + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    left = tl.where(x == x, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)
    left = tl.where(n < N, left, -0x80000000)  # below -inf
    taken = tl.zeros([KEPT], tl.int32)
    for j in tl.static_range(K):
        first = tl.min(tl.where(left == tl.max(left, 0), n, BLOCK), 0)
        taken = tl.where(kept == j, first, taken)
        left = tl.where(n == first, -0x80000000, left)
    to, there = row * K + kept, kept < K
    tl.store(values + to, tl.load(scores + row * N + taken, mask=there), mask=there)
    tl.store(indices + to, taken.to(tl.int64), mask=there)


@triton.jit
def linear_kernel(x, w, bias, y, N, K: tl.constexpr, BLOCK: tl.constexpr):
    """y[t, n] of n, t = program_id. Both rows are loaded at once; for so few, tensor cores would be mostly idle."""
    n, t, k = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    rows = tl.load(x + t * K + k, mask=k < K, other=0.0).to(tl.float32)
    out = tl.sum(rows * tl.load(w + n * K + k, mask=k < K, other=0.0).to(tl.float32), 0)
    if bias is not None:
        out += tl.load(bias + n).to(tl.float32)
    tl.store(y + t * N + n, out.to(y.dtype.element_ty))
