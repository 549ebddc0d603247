"""cp.async.bulk and cp.async.bulk.tensor: copies of the async proxy, and the tensor maps that describe tiles.

PTX ISA: "Asynchronous copy", "Tensors" (tiled mode, swizzling modes). The bytes of a CUtensorMap are not documented;
the layout here was read off maps that CuTe DSL 4.8 and the driver encoded for known tensors, which tests repeat.
"""

import struct
from dataclasses import dataclass

import numpy as np

from tests.emulator.barriers import find
from tests.emulator.formats import bf16_decode, bf16_encode
from tests.emulator.machine import Operation
from tests.emulator.memory import GRANULE, OFFSET, RANK_SHIFT, WRITTEN, Violation
from tests.emulator.program import PARAMETERS, lanes_of, operation

# Element type code in a map -> bits of an element: uint8, uint16, uint32, float16, float32, bfloat16, e2m1.
ELEMENT_BITS = {0: 8, 1: 16, 2: 32, 6: 16, 7: 32, 10: 16, 11: 4}
# Bits without effect on values: how much goes to L2, and two bits in which maps by cuTensorMapEncodeTiled of CUDA 13.0
# and those by CuTe DSL differ; bit 21 is set for tensors of 128 KiB and more.
PROMOTION, OTHER_FLAGS = 3 << 17, 1 << 1 | 3 << 21
SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}


def swizzle(address, span):
    """16-byte pieces of a 128-byte line are XORed with the line's number; `span` is 0, 32, 64 or 128."""
    if span == 0:
        return address
    return address ^ (address >> 3 & (span - 16))


@dataclass(frozen=True)
class TensorMap:
    address: int
    bits: int
    swizzle: int
    dims: tuple
    strides: tuple  # in bytes, of dimensions 1 and up
    box: tuple

    @classmethod
    def decode(cls, raw):
        address, flags = struct.unpack_from("<QI", raw, 0)
        rank = (flags >> 4 & 7) + 1
        code = flags >> 7 & 15
        rest = flags & ~(7 << 4 | 15 << 7 | 3 << 13 | PROMOTION | OTHER_FLAGS)
        if code not in ELEMENT_BITS or rank > 5 or rest or any(raw[28:32]) or any(raw[52:55]):
            raise Violation(f"tensor map: not one that is known (flags {flags:#x})")
        strides = struct.unpack_from("<4I", raw, 12)
        dims = struct.unpack_from("<5I", raw, 32)
        box = raw[55:60]
        return cls(address, ELEMENT_BITS[code], SWIZZLE_BYTES[flags >> 13 & 3],
                   tuple(d + 1 for d in dims[:rank]), tuple(16 * s for s in strides[: rank - 1]),
                   tuple(b + 1 for b in box[:rank]))  # fmt: skip

    @property
    def box_bytes(self):
        return int(np.prod(self.box)) * self.bits // 8

    def rows(self, coordinates):
        """The address of each innermost row of the box, whether it is inside, and which bytes of a row are inside."""
        inner = coordinates[0]
        first, last = max(0, -inner), min(self.box[0], self.dims[0] - inner)
        if (inner * self.bits) % 8 or (first * self.bits) % 8 or (max(first, last) * self.bits) % 8:
            raise Violation(f"tensor map: a tile at {coordinates} splits a byte")
        addresses = np.array([self.address + inner * self.bits // 8])
        inside = np.array([True])
        # The second dimension runs fastest among rows, so it goes last, on the right.
        for dim in range(len(self.dims) - 1, 0, -1):
            at = coordinates[dim] + np.arange(self.box[dim])
            addresses = (addresses[:, None] + at * self.strides[dim - 1]).ravel()
            inside = (inside[:, None] & (at >= 0) & (at < self.dims[dim])).ravel()
        return addresses, inside, first * self.bits // 8, max(first, last) * self.bits // 8

    def check(self, shared_address, coordinates):
        row = self.box[0] * self.bits // 8
        if (self.address + coordinates[0] * self.bits // 8) % 16:  # "illegal instruction" on an H200
            raise Violation(f"tensor map: a tile at {coordinates} does not begin at a multiple of 16 bytes")
        if row % 16:
            raise Violation(f"tensor map: rows of {row} bytes, not a multiple of 16")
        if self.swizzle and row > self.swizzle:
            raise Violation(f"tensor map: rows of {row} bytes do not fit the swizzle of {self.swizzle}")
        if shared_address % 128:
            raise Violation(f"tensor copy at {shared_address:#x}: not aligned to 128 bytes")

    def load(self, memory, coordinates):
        """The tile, row after row, with zeros where it is outside of the tensor."""
        addresses, inside, first, last = self.rows(coordinates)
        row = self.box[0] * self.bits // 8
        tile = np.zeros((len(addresses), row), np.uint8)
        if last > first and inside.any():
            buffer, index = self.index(memory, addresses[inside] + first, last - first)
            if (refusal := buffer.refusal(index)) is not None:
                raise Violation(f"the tensor map covers {refusal[0]:#x} of {buffer.name}: {refusal[1]}")
            tile[inside, first:last] = buffer.bytes[index]
        return tile.ravel()

    def store(self, memory, coordinates, tile, reduce=None):
        """A row's last 16 bytes are written even if only some of them are inside, as an H200 does."""
        addresses, inside, first, last = self.rows(coordinates)
        last = -(-last // 16) * 16
        tile = tile.reshape(len(addresses), -1)
        if last > first and inside.any():
            buffer, index = self.index(memory, addresses[inside] + first, last - first)
            if (refusal := buffer.refusal(index, writes=True)) is not None:
                raise Violation(f"the tensor map covers {refusal[0]:#x} of {buffer.name}: {refusal[1]}")
            new = tile[inside, first:last]
            if reduce is not None:
                new = reduce(np.ascontiguousarray(buffer.bytes[index]), np.ascontiguousarray(new))
            buffer.bytes[index] = new
            buffer.state[index] = WRITTEN

    def index(self, memory, starts, count):
        buffer = memory.find(int(starts.min()))
        low, high = int(starts.min()), int(starts.max()) + count
        if low < buffer.base or high > buffer.base + buffer.size:
            raise Violation(f"the tensor map covers [{low:#x}, {high:#x}), beyond {buffer.describe()}")
        return buffer, (starts - buffer.base)[:, None] + np.arange(count)


def write_shared(shared, address, data, span=0):
    """Place a tile; `span` is the swizzle."""
    shared.span(address, len(data))
    pieces = np.arange(len(data) // GRANULE) * GRANULE + address
    index = (swizzle(pieces, span) - shared.base) // GRANULE
    if int(index.max(initial=0)) >= shared.size // GRANULE:
        raise Violation(f"a swizzled tile at {address:#x} leaves {shared.describe()}")
    if (shared.state.reshape(-1, GRANULE)[index] > WRITTEN).any():
        raise Violation(f"a copy to {address:#x} in shared memory overwrites an mbarrier")
    shared.bytes.reshape(-1, GRANULE)[index] = data.reshape(-1, GRANULE)
    shared.state.reshape(-1, GRANULE)[index] = WRITTEN
    shared.unfenced.reshape(-1, GRANULE)[index] = 0


def read_shared(shared, address, size, span=0):
    shared.span(address, size)
    pieces = np.arange(size // GRANULE) * GRANULE + address
    index = (swizzle(pieces, span) - shared.base) // GRANULE
    state = shared.state.reshape(-1, GRANULE)[index]
    if (state != WRITTEN).any():
        piece = int(index[(state != WRITTEN).any(1).argmax()])
        raise Violation(f"reads {shared.base + piece * GRANULE:#x} in shared memory: never written, or an mbarrier")
    shared.check_fenced(index)
    return shared.bytes.reshape(-1, GRANULE)[index].ravel()


def placed(shared, address, size, span):
    """The granules of a tile: swizzling stays within the tile only if its address is aligned to the pattern."""
    shared.span(address, size)
    pieces = np.arange(size // GRANULE) * GRANULE + address
    return (swizzle(pieces, span) - shared.base) // GRANULE


def tensor_map(warp, address):
    machine = warp.cta.machine
    if address & PARAMETERS:
        at = address & (PARAMETERS - 1)
        raw = machine.parameters[at : at + 128]
        if at % 64 or len(raw) < 64:
            raise Violation(f"tensor map at parameter byte {at}")
        key = (at, raw[:64])
    else:
        if warp.cta.number not in machine.changed_maps.get(address, (warp.cta.number,)):
            raise Violation(
                f"the tensor map at {address:#x} was changed, and no fence.proxy.tensormap acquired it since"
            )
        raw = machine.memory.read(address, 128).tobytes()
        key = raw[:64]
    maps = machine.__dict__.setdefault("tensor_maps", {})
    if key not in maps:
        maps[key] = TensorMap.decode(raw)
    return maps[key]


def lane_value(warp, index, offset, lane):
    value = int(warp.R[index][lane]) + offset
    return value & (0xFFFFFFFF if warp.R[index].itemsize == 4 else (1 << 64) - 1)


def signed(value):
    return value - (1 << 32) if value >> 31 else value


def destinations(warp, to, bar, mask, pair):
    """[(cta, mbarrier)] of a load; multicast reaches the same offsets in every CTA of the mask.

    pair: .cta_group::2, with which the mbarrier may be the one of the other CTA of a pair.
    """
    cluster = warp.cta.cluster.ctas
    if to >> RANK_SHIFT >= len(cluster):
        raise Violation(f"shared address {to:#x} is in no CTA of the cluster")
    if mask is None:
        apart = (to ^ bar) >> RANK_SHIFT
        if apart and not (pair and apart == 1):
            raise Violation(
                f"copies to {to:#x}, signals {bar:#x}: another CTA's mbarrier, which takes .cta_group::2 and a pair"
            )
        return [(cluster[to >> RANK_SHIFT], find(warp, bar, asynchronous=True))]
    result = []
    for rank in range(16):
        if mask >> rank & 1:
            if rank >= len(cluster):
                raise Violation(f"multicast to CTA {rank} of a cluster of {len(cluster)}")
            # Of a pair's two mbarriers, the signal goes to the one with the parity of the given address.
            at = (rank & ~1) | (bar >> RANK_SHIFT & 1) if pair else rank
            result.append((cluster[rank], find(warp, (bar & OFFSET) | at << RANK_SHIFT, asynchronous=True)))
    return result


def issue_load(warp, to, targets, size, span, fetch):
    """Issue a copy to shared memory; `fetch` returns its bytes when it happens."""
    machine, offset = warp.cta.machine, to & OFFSET
    for cta, barrier in targets:
        granules = placed(cta.shared, offset, size, span)
        cta.history.async_write(warp, granules)

        def copy(cta=cta, barrier=barrier):
            write_shared(cta.shared, offset, fetch(), span)
            barrier.complete(size)

        one = Operation(warp, [copy], signals=(barrier,), owner=cta)
        if not machine.eager:
            cta.shared.claim(one, granules, writes=True)
        machine.issue(one)


LOAD = (r"\.mbarrier::complete_tx::bytes(?P<multicast>\.multicast::cluster)?(?P<hint>\.L2::cache_hint)?"
        r"(?P<pair>\.cta_group::[12])?(?P<hint2>\.L2::cache_hint)?")  # fmt: skip


def load_operands(build, match, more):
    """The source of the multicast mask, or None; also checks the other operands."""
    expected = (match["multicast"] is not None) + (match["hint"] is not None or match["hint2"] is not None)
    if len(more) != expected:
        build.fail(f"{len(more)} operands after the mbarrier, {expected} are known")
    return build.source(more[0], "u16") if match["multicast"] else None


@operation(r"cp\.async\.bulk\.tensor\.(?P<rank>[1-5])d\.shared::(?:cta|cluster)\.global(?:\.tile)?" + LOAD)
def build_tensor_load(build, match, target, source, bar, *more):
    to, to_offset = build.address(target)
    map_at = build.source(source.base, "u64")
    coordinates = [build.source(c, "u32") for c in source.coordinates]
    if len(coordinates) != int(match["rank"]) or source.offset:
        build.fail(f"{len(coordinates)} coordinates")
    at, at_offset = build.address(bar)
    cta_mask = load_operands(build, match, more)
    pair = match["pair"] == ".cta_group::2"

    def run(warp, mask):
        R, memory = warp.R, warp.cta.machine.memory
        for lane in lanes_of(mask):
            tile = tensor_map(warp, int(R[map_at][lane]))
            where = tuple(signed(int(R[c][lane])) for c in coordinates)
            if len(tile.dims) != len(where):
                raise Violation(f"{len(where)} coordinates for a tensor map of rank {len(tile.dims)}")
            address = lane_value(warp, to, to_offset, lane)
            tile.check(address & OFFSET, where)
            targets = destinations(warp, address, lane_value(warp, at, at_offset, lane),
                                   None if cta_mask is None else int(R[cta_mask][lane]), pair)  # fmt: skip
            fetch = lambda tile=tile, where=where: tile.load(memory, where)
            issue_load(warp, address, targets, tile.box_bytes, tile.swizzle, fetch)

    return run


@operation(r"cp\.async\.bulk\.shared::(?:cta|cluster)\.(?P<from>global|shared::cta)" + LOAD)
def build_bulk_load(build, match, target, source, size, bar, *more):
    to, to_offset = build.address(target)
    start, start_offset = build.address(source)
    count = build.source(size, "u32")
    at, at_offset = build.address(bar)
    cta_mask = load_operands(build, match, more)
    from_global = match["from"] == "global"

    def run(warp, mask):
        R, machine = warp.R, warp.cta.machine
        for lane in lanes_of(mask):
            address, begin = lane_value(warp, to, to_offset, lane), lane_value(warp, start, start_offset, lane)
            size = int(R[count][lane])
            if size % 16 or address % 16 or begin % 16:
                raise Violation(f"bulk copy of {size} bytes from {begin:#x} to {address:#x}: not aligned to 16")
            targets = destinations(warp, address, lane_value(warp, at, at_offset, lane),
                                   None if cta_mask is None else int(R[cta_mask][lane]), False)  # fmt: skip
            if from_global:
                fetch = lambda begin=begin, size=size: machine.memory.read(begin, size)
            else:
                if address >> RANK_SHIFT == warp.cta.rank:  # "illegal instruction" on an H200
                    raise Violation("a bulk copy from shared memory to the CTA's own shared memory")
                warp.cta.history.async_read(warp, placed(warp.cta.shared, begin & OFFSET, size, 0))
                fetch = lambda begin=begin, size=size: read_shared(warp.cta.shared, begin & OFFSET, size)
            issue_load(warp, address, targets, size, 0, fetch)

    return run


# ---- stores ----
def _reduction(name):
    kinds = {"f32": np.float32, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "f16": np.float16}
    what, _, kind = name.partition(".")
    if what != "add":
        return None
    if kind == "noftz.bf16":
        add = lambda old, new: bf16_encode(bf16_decode(old.view(np.uint16)) + bf16_decode(new.view(np.uint16)))
        return lambda old, new: add(old, new).view(np.uint8)
    T = kinds.get(kind.removeprefix("noftz."))
    return None if T is None else lambda old, new: (old.view(T) + new.view(T)).view(np.uint8)


REDUCE = r"(?P<reduce>\.(?:add|min|max|and|or|xor|inc|dec)(?:\.noftz)?(?:\.[a-z]+\d+)?)?"


def issue_store(warp, start, size, span, put):
    shared, machine = warp.cta.shared, warp.cta.machine
    granules, data = placed(shared, start, size, span), []
    warp.cta.history.async_read(warp, granules)

    def read():
        data.append(read_shared(shared, start, size, span))
        shared.unclaim(one)  # the source may be overwritten from here on

    one = Operation(warp, [read, lambda: put(data[0])])
    if not machine.eager:
        shared.check_fenced(granules)
        shared.claim(one, granules, writes=False)
    if not warp.bulk_groups:
        warp.bulk_groups.append([])
    warp.bulk_groups[-1].append(one)
    machine.issue(one)


@operation(r"cp\.(?P<what>async|reduce\.async)\.bulk\.tensor\.(?P<rank>[1-5])d\.global\.shared::cta"
           r"(?P<reduce>\.add)?(?:\.tile)?\.bulk_group(?P<hint>\.L2::cache_hint)?")  # fmt: skip
def build_tensor_store(build, match, target, source, *policy):
    if len(policy) != (match["hint"] is not None):
        build.fail("operands of the tensor store")
    if match["what"] != "async" or match["reduce"]:
        build.fail("reductions through a tensor map are not modelled")
    start, start_offset = build.address(source)
    map_at = build.source(target.base, "u64")
    coordinates = [build.source(c, "u32") for c in target.coordinates]

    def run(warp, mask):
        R, memory = warp.R, warp.cta.machine.memory
        for lane in lanes_of(mask):
            tile = tensor_map(warp, int(R[map_at][lane]))
            where = tuple(signed(int(R[c][lane])) for c in coordinates)
            if len(tile.dims) != len(where):
                raise Violation(f"{len(where)} coordinates for a tensor map of rank {len(tile.dims)}")
            begin = lane_value(warp, start, start_offset, lane) & OFFSET
            tile.check(begin, where)
            if min(where) < 0:  # "illegal instruction" on an H200; loads may
                raise Violation(f"tensor map: a store to {where}, which begins outside of the tensor")
            put = lambda data, tile=tile, where=where: tile.store(memory, where, data)
            issue_store(warp, begin, tile.box_bytes, tile.swizzle, put)

    return run


@operation(
    r"cp\.(?P<what>async|reduce\.async)\.bulk\.global\.shared::cta\.bulk_group(?P<hint>\.L2::cache_hint)?" + REDUCE
)
def build_bulk_store(build, match, target, source, size, *policy):
    if len(policy) != (match["hint"] is not None):
        build.fail("operands of the bulk store")
    reduce = None
    if match["what"] == "reduce.async":
        reduce = _reduction((match["reduce"] or "").removeprefix("."))
        if reduce is None:
            build.fail("unknown reduction")
    to, to_offset = build.address(target, "u64")
    start, start_offset = build.address(source)
    count = build.source(size, "u32")

    def run(warp, mask):
        R, memory = warp.R, warp.cta.machine.memory
        for lane in lanes_of(mask):
            address, begin = lane_value(warp, to, to_offset, lane), lane_value(warp, start, start_offset, lane) & OFFSET
            size = int(R[count][lane])
            if size % 16 or address % 16 or begin % 16:
                raise Violation(f"bulk copy of {size} bytes from {begin:#x} to {address:#x}: not aligned to 16")

            def put(data, address=address, size=size):
                memory.write(address, data if reduce is None else reduce(memory.read(address, size), data))

            issue_store(warp, begin, size, 0, put)

    return run


@operation(r"cp\.async\.bulk\.commit_group")
def build_bulk_commit(build, match):
    def run(warp, mask):
        warp.bulk_groups = warp.bulk_groups or [[]]
        warp.bulk_groups.append([])

    return run


@operation(r"cp\.async\.bulk\.wait_group(?P<read>\.read)?")
def build_bulk_wait(build, match, count):
    left = count.bits

    def run(warp, mask):
        closed = warp.bulk_groups[:-1]
        for group in closed if left == 0 else closed[:-left]:
            warp.cta.machine.finish(warp, group, keep=1 if match["read"] else 0)
        while len(warp.bulk_groups) > 1 and all(one.done for one in warp.bulk_groups[0]):
            warp.bulk_groups.pop(0)

    return run
