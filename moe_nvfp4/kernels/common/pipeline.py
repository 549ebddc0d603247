"""Rings of mbarriers between producer and consumer warps: a place in one, and how it moves on."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute


class PipelineState(NamedTuple):
    """A warp's place in a ring: the stage (or slot), and the parity of the barrier phase it waits for there next."""

    index: Int32
    phase: Int32


def producer_state() -> PipelineState:
    """The first stage; in the first round a wait for an empty barrier passes at once."""
    return PipelineState(Int32(0), Int32(1))


def consumer_state() -> PipelineState:
    return PipelineState(Int32(0), Int32(0))


@cute.jit
def advance(state: PipelineState, count: cutlass.Constexpr) -> PipelineState:
    """The next of `count` stages."""
    index, phase = state.index + 1, state.phase
    if index == count:
        index = Int32(0)
        phase ^= 1
    return PipelineState(index, phase)


@cute.jit
def arrive(barriers: tuple, index: Int32):
    """A warp, once at each of these rings' barriers of stage `index`, when all its lanes are here."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(barriers)):
            cute.arch.mbarrier_arrive(barriers[i] + index)
