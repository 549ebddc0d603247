"""Rings of mbarriers between producer and consumer warps: a warp's place in a ring, and how it advances."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute


class PipelineState(NamedTuple):
    """A warp's place in a ring: the stage (or slot), and the parity of the barrier phase that it waits for next."""

    index: Int32
    phase: Int32


def producer_state() -> PipelineState:
    """The first stage. In the first round, waiting for an empty barrier returns at once."""
    return PipelineState(Int32(0), Int32(1))


def consumer_state() -> PipelineState:
    return PipelineState(Int32(0), Int32(0))


@cute.jit
def advance(state: PipelineState, count: cutlass.Constexpr) -> PipelineState:
    """The place after `state` in a ring of `count` stages."""
    index, phase = state.index + 1, state.phase
    if index == count:
        index = Int32(0)
        phase ^= 1
    return PipelineState(index, phase)


@cute.jit
def arrive(barriers: tuple, index: Int32):
    """Let the warp arrive, once all its lanes are here, at the barrier of stage `index` of each of these rings."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(barriers)):
            cute.arch.mbarrier_arrive(barriers[i] + index)
