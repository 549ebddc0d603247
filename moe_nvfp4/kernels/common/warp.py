"""Reductions and scans by the 32 lanes of a warp."""

from __future__ import annotations

from typing import TypeVar

import cutlass
from cutlass import Boolean, Float32, Int32, cute

Number = TypeVar("Number", Int32, Float32)


def largest_of_lanes(x: Float32, bits: range) -> Float32:
    """In every lane, the largest x of the lanes whose numbers differ from its own in these bits only; NaN if any is."""
    for bit in bits:
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 1 << bit), nan=True)
    return x


def sum_of_lanes(x: Number, bits: range = range(5)) -> Number:
    """In every lane, the sum of x over the lanes whose numbers differ from its own in these bits only."""
    for bit in bits:
        x = x + cute.arch.shuffle_sync_bfly(x, 1 << bit)
    return x


@cute.jit
def all_equal(mX: cute.Tensor) -> Boolean:
    """Whether all numbers of mX [N] are the same, for a whole warp."""
    same = Boolean(True)
    for i in cutlass.range(cute.arch.lane_idx(), mX.shape[0], 32, unroll=1):
        same = same and mX[i] == mX[0]
    return cute.arch.vote_all_sync(same)


@cute.jit
def sum_of_lanes_before(x: Int32) -> Int32:
    """The sum of x over the lanes below this one."""
    total, lane = x, cute.arch.lane_idx()
    for p in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, 1 << p, mask_and_clamp=0)
        if lane >= 1 << p:
            total += below
    return total - x
