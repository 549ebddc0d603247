"""Weights with a low-rank change, rounded to 4 bits again at the scales that they have."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_nvfp4.kernels.portable.launch import launch

BN, BYTES = 64, 32  # of a block


def merged_codes(codes: Tensor, sf: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As `backends.merged_codes`: codes [E, N, K/2], sf [E, N, K/16], scale [E, N], a [E, r, columns], b [E, N, r]."""
    E, N, half = codes.shape
    tensors = [t.contiguous() for t in (codes, sf.view(torch.uint8), scale, a.float(), b.float())]
    out = torch.empty_like(tensors[0])
    if out.numel():
        grid = -(-half // BYTES), -(-N // BN), E
        sizes = N, half, a.shape[2], a.shape[1], BN, BYTES
        launch(merge_kernel, grid, *tensors, out, *sizes, num_warps=4)
    return out


@triton.jit
def merge_kernel(
    codes, sf, scale, a, b, out, N: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr,
    BN: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Of expert program_id(2), BN rows and BYTES bytes of codes: the even columns, and the odd ones."""
    e = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    j = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    row = (e * N + n)[:, None]
    inside = (n < N)[:, None] & (j < HALF)[None, :]
    byte = tl.load(codes + row * HALF + j[None, :], mask=inside, other=0).to(tl.int32)
    e4m3 = tl.load(sf + row * (HALF // 8) + j[None, :] // 8, mask=inside, other=0).to(tl.int32)
    block = ((e4m3 & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^(127 - 7), of the biases
    global_scale = tl.load(scale + row, mask=(n < N)[:, None], other=0.0)
    step = tl.where(block == 0, 1.0, block * global_scale)
    column = 2 * j[None, :]
    evens, odds = tl.zeros([BN, BYTES], tl.float32), tl.zeros([BN, BYTES], tl.float32)
    for r in range(R):
        of_row, of_columns = tl.load(b + row * R + r, mask=(n < N)[:, None], other=0.0), a + (e * R + r) * COLUMNS
        evens += of_row * tl.load(of_columns + column, mask=column < COLUMNS, other=0.0)
        odds += of_row * tl.load(of_columns + column + 1, mask=column + 1 < COLUMNS, other=0.0)
    found = byte * 0
    for odd in tl.static_range(2):
        change = odds if odd else evens
        m = (byte >> (4 * odd)) & 7
        magnitude = tl.where(m < 2, m * 0.5, (((m >> 1) + 126 << 23) | ((m & 1) << 22)).to(tl.float32, bitcast=True))
        value = magnitude * block * global_scale  # rounded before the sum, as in torch: the choice is in between
        value = tl.where(((byte >> (4 * odd)) & 8) != 0, -value, value) + change
        q = tl.minimum(tl.div_rn(tl.abs(value), step), 8.0)
        code = tl.minimum(tl.minimum(even(2 * q), even(q) + 2), tl.minimum(even(0.5 * q) + 4, 7))
        found |= tl.where(block == 0, 0, code | tl.where(value < 0, 8, 0)) << (4 * odd)
    tl.store(out + row * HALF + j[None, :], found.to(tl.uint8), mask=inside)


@triton.jit
def even(x):
    """The nearest integer of x < 2^22, of two the even one: adding 1.5 * 2^23 rounds so. As int32, whose minima have
    the same code on every GPU."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)
