"""Instructions across the lanes of a warp: elect, shfl, vote, match, redux.

PTX ISA: "Parallel Synchronization and Communication Instructions", and shfl in "Data Movement".
"""

import numpy as np

from tests.emulator.machine import Lanes
from tests.emulator.memory import Violation
from tests.emulator.parser import Pair
from tests.emulator.program import first_lane, operation
from tests.emulator.races import gather


def together(build, members, action, barrier=False):
    """Wait until all living lanes of the member mask are here. barrier: memory is ordered, too."""
    member = build.source(members, "u32")

    def run(warp, mask):
        if not warp.full(mask):
            here = np.ones(32, bool) if mask is True else mask
            bits = int(warp.R[member][first_lane(mask)])
            wanted = (bits >> np.arange(32) & 1).astype(bool) & warp.alive
            if (wanted & ~here).any():
                return Lanes()
        else:
            gather(warp, barrier)
        return action(warp, mask)

    return run


@operation(r"bar\.warp\.sync", waits=True)
def build_warp_sync(build, match, members):
    return together(build, members, lambda warp, mask: None, barrier=True)


@operation(r"elect\.sync", waits=True)
def build_elect(build, match, targets, members):
    lane_out = build.target(targets.first, "u32")
    chosen = build.target(targets.second, "pred")

    def elect(warp, mask):
        leader = first_lane(mask)
        np.copyto(warp.R[lane_out], np.uint32(leader), where=mask)
        np.copyto(warp.R[chosen], np.arange(32) == leader, where=mask)

    return together(build, members, elect)


@operation(r"shfl\.sync\.(?P<mode>idx|up|down|bfly)\.b32", waits=True)
def build_shuffle(build, match, target, source, lane, clamp, members):
    predicate = None
    if isinstance(target, Pair):
        predicate, target = build.target(target.second, "pred"), target.first
    out, a = build.target(target, "u32"), build.source(source, "u32")
    b, c = build.source(lane, "u32"), build.source(clamp, "u32")
    lanes = np.arange(32)
    mode = match["mode"]

    def shuffle(warp, mask):
        R = warp.R
        offset, control = (R[b] & 31).astype(np.int64), R[c].astype(np.int64)
        limit, segment = control & 31, control >> 8 & 31
        low = lanes & segment
        high = low | (limit & ~segment)
        if mode == "idx":
            at = low | (offset & ~segment)
            valid = at <= high
        elif mode == "up":
            at = lanes - offset
            valid = at >= high
        elif mode == "down":
            at = lanes + offset
            valid = at <= high
        else:
            at = lanes ^ offset
            valid = at <= high
        at = np.where(valid, at, lanes)
        here = np.ones(32, bool) if mask is True else mask
        if (here & ~here[at]).any():
            raise Violation("shfl.sync reads a lane that does not take part")
        np.copyto(R[out], R[a][at], where=mask)
        if predicate is not None:
            np.copyto(R[predicate], valid, where=mask)

    return together(build, members, shuffle)


@operation(r"vote\.sync\.(?P<mode>any|all|uni|ballot)\.(?:pred|b32)", waits=True)
def build_vote(build, match, target, source, members):
    mode = match["mode"]
    out = build.target(target, "u32" if mode == "ballot" else "pred")
    index, negated = build.predicate(source)

    def vote(warp, mask):
        value = ~warp.R[index] if negated else warp.R[index]
        here = value if mask is True else value[mask]
        if mode == "ballot":
            value = value if mask is True else value & mask
            result = np.uint32(int(np.packbits(value, bitorder="little").view(np.uint32)[0]))
        else:
            result = {"any": here.any(), "all": here.all(), "uni": here.all() or not here.any()}[mode]
        np.copyto(warp.R[out], result, where=mask)

    return together(build, members, vote)


@operation(r"match\.any\.sync\.b(?P<bits>32|64)", waits=True)
def build_match(build, match, target, source, members):
    """For each participating lane, the mask of those that hold the same value."""
    out, a = build.target(target, "u32"), build.source(source, "u" + match["bits"])

    def run(warp, mask):
        same = warp.R[a][:, None] == warp.R[a]
        if mask is not True:
            same = same & mask
        np.copyto(warp.R[out], np.packbits(same, axis=1, bitorder="little").view(np.uint32)[:, 0], where=mask)

    return together(build, members, run)


REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
          "xor": np.bitwise_xor}  # fmt: skip


@operation(r"redux\.sync\.(?P<what>add|min|max|and|or|xor)\.(?P<type>u32|s32|b32|f32)(?P<abs>)", waits=True)
def build_redux(build, match, target, source, members):
    kind = match["type"]
    if kind == "f32" and match["what"] not in ("min", "max"):
        build.fail("unknown reduction")
    f = {"min": np.fmin, "max": np.fmax}[match["what"]] if kind == "f32" else REDUCE[match["what"]]
    out, a = build.target(target, kind), build.source(source, kind)

    def reduce(warp, mask):
        values = warp.R[a] if mask is True else warp.R[a][mask]
        np.copyto(warp.R[out], f.reduce(values), where=mask)

    return together(build, members, reduce)


@operation(r"activemask\.b32")
def build_activemask(build, match, target):
    out = build.target(target, "u32")

    def run(warp, mask):
        here = np.ones(32, bool) if mask is True else mask
        np.copyto(warp.R[out], np.packbits(here, bitorder="little").view(np.uint32)[0], where=mask)

    return run
