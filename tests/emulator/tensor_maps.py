"""Tensor maps that a kernel changes itself, and prefetches.

PTX ISA: "tensormap.replace" (9.7.9.28), "tensormap.cp_fenceproxy", "fence.proxy.tensormap", "cp.async.bulk.prefetch".
A changed map is used after fence.proxy.tensormap::generic.acquire of its address; here one warp's is enough for a CTA.
"""

import numpy as np

from tests.emulator.copies import TensorMap, lane_value, signed
from tests.emulator.copies import tensor_map as map_at
from tests.emulator.machine import Lanes
from tests.emulator.memory import OFFSET, Violation
from tests.emulator.program import lanes_of, operation

BYTES, USED = 128, 64  # CuTe DSL's kernels copy only the first half
# Field -> its place in the map, and the number to store; `ord` counts dimensions from 0 (for strides, from 1).
FIELDS = {
    "global_address": lambda ord, value: (0, np.uint64(value)),
    "global_stride": lambda ord, value: (12 + 4 * ord, np.uint32(value >> 4)),
    "global_dim": lambda ord, value: (32 + 4 * ord, np.uint32(value - 1)),
    "box_dim": lambda ord, value: (55 + ord, np.uint8(value - 1)),
}


@operation(r"tensormap\.replace\.tile\.(?P<field>\w+)(?P<space>\.shared::cta|\.global)\.b1024\.(?P<type>b32|b64)")
def build_replace(build, match, place, *more):
    field = match["field"]
    if field not in FIELDS:
        build.fail("this field of a tensor map is not modelled")
    of_dimension = field != "global_address"
    wide = field in ("global_address", "global_stride")
    if len(more) != 1 + of_dimension or wide != (match["type"] == "b64"):
        build.fail("operands of tensormap.replace")
    ord = more[0].bits if of_dimension else 0
    if not 0 <= ord < (4 if field == "global_stride" else 5):
        build.fail(f"dimension {ord} of a tensor map")
    index, offset = build.address(place)
    new = build.source(more[-1], "u64" if wide else "u32")
    shared = match["space"] == ".shared::cta"

    def run(warp, mask):
        for lane in lanes_of(mask):
            address, value = lane_value(warp, index, offset, lane), int(warp.R[new][lane])
            if address % BYTES:
                raise Violation(f"tensor map at {address:#x}: not aligned to {BYTES} bytes")
            if field == "global_address" and value % 16 or field == "global_stride" and (value % 16 or value >> 36):
                raise Violation(f"tensor map: {field} {value:#x}, not a multiple of 16, or of 2**36 and more")
            at, number = FIELDS[field](ord, value)
            where, size = np.array([address + at], np.uint64), number.itemsize
            if shared:
                where = where.astype(np.uint32) & np.uint32(OFFSET)
                warp.cta.history.store(warp, where, size)
                warp.cta.shared.store(where, size, np.array([number]))
            else:
                warp.cta.machine.memory.store(where, size, np.array([number]))
                changed(warp, address)

    return run


def changed(warp, address):
    """Note that the map at this address has changed, so nobody has acquired it."""
    warp.cta.machine.changed_maps[address] = set()


@operation(
    r"tensormap\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release\.\w+\.sync\.aligned", waits=True
)
def build_copy(build, match, target, source, size):
    to, start = build.address(target, "u64"), build.address(source)
    if size.bits != BYTES:
        build.fail(f"a tensor map has {BYTES} bytes")

    def run(warp, mask):
        if not warp.full(mask):
            return Lanes()
        address, begin = lane_value(warp, *to, 0), lane_value(warp, *start, 0) & OFFSET
        if address % BYTES or begin % BYTES:
            raise Violation(f"tensor map from {begin:#x} to {address:#x}: not aligned to {BYTES} bytes")
        words = np.arange(begin, begin + USED, 4, dtype=np.uint32)
        warp.cta.history.load(warp, words, 4)
        raw = np.concatenate([warp.cta.shared.load(words, 4), np.zeros((BYTES - USED) // 4, np.uint32)])
        warp.cta.machine.memory.write(address, raw.view(np.uint8))
        changed(warp, address)
        return None

    return run


@operation(r"fence\.proxy\.tensormap::generic\.acquire\.(?:cta|cluster|gpu|sys)")
def build_acquire(build, match, place, size):
    at = build.address(place, "u64")
    if size.bits != BYTES:
        build.fail(f"a tensor map has {BYTES} bytes")

    def run(warp, mask):
        maps = warp.cta.machine.changed_maps
        for lane in lanes_of(mask):
            maps.get(lane_value(warp, *at, lane), set()).add(warp.cta.number)

    return run


# ---- prefetches: they change nothing, but what they name must be there ----
@operation(r"cp\.async\.bulk\.prefetch\.L2\.global(?P<hint>\.L2::cache_hint)?")
def build_bulk_prefetch(build, match, source, size, *policy):
    if len(policy) != (match["hint"] is not None):
        build.fail("operands of the prefetch")
    start, count = build.address(source, "u64"), build.source(size, "u32")

    def run(warp, mask):
        memory = warp.cta.machine.memory
        for lane in lanes_of(mask):
            address, size = lane_value(warp, *start, lane), int(warp.R[count][lane])
            if address % 16 or size % 16:
                raise Violation(f"prefetch of {size} bytes at {address:#x}: not aligned to 16")
            memory.find(address).span(address, size)

    return run


@operation(r"cp\.async\.bulk\.prefetch\.tensor\.(?P<rank>[1-5])d\.L2\.global(?:\.tile)?(?P<hint>\.L2::cache_hint)?")
def build_tensor_prefetch(build, match, source, *policy):
    coordinates = [build.source(c, "u32") for c in source.coordinates]
    if len(policy) != (match["hint"] is not None) or len(coordinates) != int(match["rank"]) or source.offset:
        build.fail("operands of the prefetch")
    place = build.source(source.base, "u64")

    def run(warp, mask):
        for lane in lanes_of(mask):
            tile: TensorMap = map_at(warp, int(warp.R[place][lane]))
            where = tuple(signed(int(warp.R[c][lane])) for c in coordinates)
            if len(tile.dims) != len(where):
                raise Violation(f"{len(where)} coordinates for a tensor map of rank {len(tile.dims)}")
            tile.check(0, where)

    return run
