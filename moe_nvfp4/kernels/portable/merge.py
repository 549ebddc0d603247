"""Weights with a low-rank change, rounded to 4 bits again at the scales that they have: in the checkpoint's layout, and
in Hopper's (see `sm90.pack`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_nvfp4.kernels.portable.launch import launch

BN, BYTES = 64, 32  # of a block
UNITS = 4  # of a block


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


def merge_units(codes: Tensor, scale: Tensor, a: Tensor, b: Tensor, units: Tensor, interleaved: bool) -> None:
    """Write the same codes into Hopper's layout, from where the block scales are read.

    codes        uint8 [E, N, K/2]: the values before, in the checkpoint's layout
    scale        fp32 [E, M64, 32, 2]: global scales of rows, in the order of the units: 32 pairs
    a            fp32 [E, r, K64, 16, 4]: columns in the order of a pair's 16 words, which have codes of four
    b            fp32 [E, M64, r, 32, 2]
    units        int32 [E, M64, K64, 576]
    interleaved  whether units have 32 gate rows and their up rows
    """
    E, M64, K64, _ = units.shape
    _, N, half = codes.shape
    if units.numel():
        grid = -(-K64 // UNITS), M64, E
        launch(merge_units_kernel, grid, codes, scale, a, b, units, N, half, a.shape[1], M64, K64, interleaved, UNITS,
               num_warps=4)  # fmt: skip


@triton.jit
def merge_units_kernel(
    codes, scale, a, b, units, N: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, M64: tl.constexpr,
    K64: tl.constexpr, INTERLEAVED: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Of expert program_id(2), 64 rows and UNITS units of 64 columns. A word has codes of two rows: one of 32 pairs."""
    m, e = tl.program_id(1), tl.program_id(2).to(tl.int64)
    pair = tl.arange(0, 32)[:, None]
    # A pair's 16 words in each unit. Neighbours lie apart, so that no loads or stores of several want another layout.
    column = tl.arange(0, 16 * UNITS)[None, :]
    unit, word = tl.program_id(0) * UNITS + column % UNITS, column // UNITS
    c, k16 = word // 4, word % 4
    here = unit < K64
    at = ((e * M64 + m) * K64 + unit) * 576
    scales = tl.load(units + at + 512 + pair * 2 + k16 // 2, mask=here, other=0)
    scales = tl.where(k16 % 2 == 0, scales, (scales << 8) | ((scales >> 24) & 0xFF))
    found = pair * 0 + word * 0
    for second in tl.static_range(2):
        row = second * (N // 2) + m * 32 + pair if INTERLEAVED else m * 64 + pair * 2 + second
        inside = here & (row < (N // 2 * (second + 1) if INTERLEAVED else N))
        e4m3 = (scales >> (4 + 16 * second)) & 0xFF
        block = tl.where(e4m3 == 0xF0, 0.0, ((e4m3 + 944) << 20).to(tl.float32, bitcast=True))
        global_scale = tl.load(scale + ((e * M64 + m) * 32 + pair) * 2 + second)
        for later in tl.static_range(2):
            j = unit * 32 + k16 * 8 + later * 4 + c
            byte = tl.load(codes + (e * N + row) * HALF + j, mask=inside & (j < HALF), other=0).to(tl.int32)
            evens = tl.zeros([32, 16 * UNITS], tl.float32)
            odds = tl.zeros([32, 16 * UNITS], tl.float32)
            for r in range(R):
                of_row = tl.load(b + (((e * M64 + m) * R + r) * 32 + pair) * 2 + second)
                of_columns = a + (((e * R + r) * K64 + unit) * 16 + word) * 4 + 2 * later
                evens += of_row * tl.load(of_columns, mask=here, other=0.0)
                odds += of_row * tl.load(of_columns + 1, mask=here, other=0.0)
            low = rounded(byte & 15, block, global_scale, evens)
            both = low | rounded(byte >> 4, block, global_scale, odds) << 16
            found |= ((both >> 3) & 0x00010001) << (14 - second if later else 15 - 3 * second)
            found |= (both & 0x00070007) << (9 * second if later else 6 - 3 * second)
    tl.store(units + at + pair * 16 + word, found, mask=here)


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
    column = 2 * j[None, :]
    evens, odds = tl.zeros([BN, BYTES], tl.float32), tl.zeros([BN, BYTES], tl.float32)
    for r in range(R):
        of_row, of_columns = tl.load(b + row * R + r, mask=(n < N)[:, None], other=0.0), a + (e * R + r) * COLUMNS
        evens += of_row * tl.load(of_columns + column, mask=column < COLUMNS, other=0.0)
        odds += of_row * tl.load(of_columns + column + 1, mask=column + 1 < COLUMNS, other=0.0)
    found = byte * 0
    for odd in tl.static_range(2):
        change = odds if odd else evens
        found |= rounded((byte >> (4 * odd)) & 15, block, global_scale, change) << (4 * odd)
    tl.store(out + row * HALF + j[None, :], found.to(tl.uint8), mask=inside)


@triton.jit
def rounded(code, block, global_scale, change):
    """The nearest code of the value of `code` plus `change`."""
    m = code & 7
    magnitude = tl.where(m < 2, m * 0.5, (((m >> 1) + 126 << 23) | ((m & 1) << 22)).to(tl.float32, bitcast=True))
    value = magnitude * block * global_scale  # rounded before the sum, as in torch: the choice is in between
    value = tl.where((code & 8) != 0, -value, value) + change
    q = tl.minimum(tl.div_rn(tl.abs(value), tl.where(block == 0, 1.0, block * global_scale)), 8.0)
    nearest = tl.minimum(tl.minimum(even(2 * q), even(q) + 2), tl.minimum(even(0.5 * q) + 4, 7))
    return tl.where(block == 0, 0, nearest | tl.where(value < 0, 8, 0))


@triton.jit
def even(x):
    """The nearest integer of x < 2^22, of two the even one: adding 1.5 * 2^23 rounds so. As int32, whose minima have
    the same code on every GPU."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)
