"""Dense weights from Hopper's layout (`sm90.pack`), in Triton, for backward passes."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_nvfp4.kernels.portable.launch import launch
from moe_nvfp4.kernels.sm90.pack import UNIT, UNIT_WORDS
from moe_nvfp4.weights import Matrices


def window(w: Matrices, columns: slice, dtype: torch.dtype) -> Tensor:
    """[E, N, columns] of the weights' values in `dtype`; columns begin at a multiple of 64."""
    units = w.codes.view(torch.int32)
    E, M64, K64, _ = units.shape
    count = min(columns.stop, w.K) - columns.start
    group = 1 if count % 16 else 16
    out = units.new_empty(E, w.N, count, dtype=dtype)
    with torch.cuda.device(units.device) if units.is_cuda else nullcontext():
        launch(
            window_kernel, (-(-count // UNIT), M64, E), units, w.gate_scale if w.gated else w.global_scale,
            w.global_scale, out, columns.start // UNIT, w.N, M64, K64, count // group, group, w.gated, UNIT_WORDS,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["begin", "N", "M64", "K64", "groups"])
def window_kernel(
    units, first_scale, scale, out, begin, N, M64, K64, groups,
    GROUP: tl.constexpr, INTERLEAVED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A program dequantizes one unit: the 32 first rows of its pairs, then the 32 second rows.

    out [E, N, columns] = the values from column 64 * begin on. Every thread loads the word of its element. Up to 8
    elements share a word, which then comes from the cache. `columns` are groups of GROUP: with 16, the compiler knows
    that a thread can store several elements at once. One kernel is for all sizes, or each would be compiled.
    """
    columns = groups * GROUP
    e = tl.program_id(2).to(tl.int64)
    unit = units + ((e * M64 + tl.program_id(1)) * K64 + begin + tl.program_id(0)) * WORDS
    pair = tl.arange(0, 32)[:, None]  # 8 * warp + g
    column = tl.arange(0, 64)[None, :]
    k16, later, c, odd = column // 16, column // 8 % 2, column // 2 % 4, column % 2
    word = tl.load(unit + pair * 16 + c * 4 + k16)
    scales = tl.load(unit + 512 + pair * 2 + k16 // 2)
    scales = tl.where(k16 % 2 == 1, (scales << 8) | ((scales >> 24) & 0xFF), scales)
    for second in tl.static_range(2):
        sign = tl.where(later == 1, 14 - second, 15 - 3 * second) + 16 * odd
        magnitude = tl.where(later == 1, 9 * second, 6 - 3 * second) + 16 * odd
        m = (word >> magnitude) & 7
        bits = ((m >> 1) + 126 << 23) | ((m & 1) << 22)
        value = tl.where(m < 2, m.to(tl.float32) * 0.5, bits.to(tl.float32, bitcast=True))
        value = tl.where(((word >> sign) & 1) == 1, -value, value)
        byte = (scales >> (4 + 16 * second)) & 0xFF
        value *= ((byte << 20) + (118 << 23)).to(tl.float32, bitcast=True)
        if INTERLEAVED:
            inside = tl.program_id(1) * 32 + pair
            row, there = inside + second * (N // 2), inside < N // 2
        else:
            row = tl.program_id(1) * 64 + pair * 2 + second
            there = row < N
        value *= tl.load((first_scale if INTERLEAVED and second == 0 else scale) + e)
        at = tl.program_id(0) * 64 + column
        tl.store(out + (e * N + row) * columns + at, value.to(out.dtype.element_ty), mask=there & (at < columns))
