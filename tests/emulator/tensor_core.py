"""mma, wgmma and tcgen05: descriptors, Tensor Memory, and the products themselves.

PTX ISA: "Warp Level Matrix Instructions", "Asynchronous Warpgroup Level Matrix Instructions" and "TensorCore 5th
Generation Family Instructions" (shared memory descriptor, instruction descriptor, scale factor layouts, data movement
shapes). How they add is not documented. mma and wgmma do here what an H200 does, to the bit: see `multiply_add`.
tcgen05.mma sums its products in float64 and adds them to the float32 accumulator once per instruction.
"""

import numpy as np

from tests.emulator.barriers import find
from tests.emulator.copies import lane_value, swizzle
from tests.emulator.formats import E2M1, E4M3, bf16_decode, ue8m0_decode
from tests.emulator.machine import POISON, Lanes, Operation, Wait
from tests.emulator.memory import GRANULE, OFFSET, RANK_SHIFT, WRITTEN, Violation
from tests.emulator.parser import Address
from tests.emulator.program import first_lane, lanes_of, operation
from tests.emulator.races import TCGEN05, fence_after, fence_before

PAIRS = np.stack([E2M1.table64[np.arange(256) & 15], E2M1.table64[np.arange(256) >> 4]], 1)  # byte -> two values
TCGEN05_SWIZZLE = {0: 0, 2: 128, 4: 64, 6: 32}
WGMMA_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}


# ---- matrices in shared memory ----
def matrix_granules(shared, descriptor, rows, wgmma=False, pieces=2):
    """Granule numbers (rows, pieces) of a K-major matrix of 32 bytes, or one piece, per row."""
    field = lambda bit, bits: descriptor >> bit & ((1 << bits) - 1)
    start, leading, stride = field(0, 14) << 4, field(16, 14) << 4, field(32, 14) << 4
    if wgmma:
        span = WGMMA_SWIZZLE[field(62, 2)]
        zeros = field(14, 2) | field(30, 2) | field(46, 3) | field(52, 10)
    else:
        if field(46, 3) != 1:
            raise Violation(f"shared memory descriptor {descriptor:#x}: bits 46 to 48 are not 0b001")
        if field(61, 3) not in TCGEN05_SWIZZLE:
            raise Violation(f"shared memory descriptor {descriptor:#x}: swizzle {field(61, 3)} is not modelled")
        span = TCGEN05_SWIZZLE[field(61, 3)]
        zeros = field(14, 2) | field(30, 2) | field(52, 9)
    if zeros or field(49, 3):
        raise Violation(
            f"shared memory descriptor {descriptor:#x}: a reserved bit, a base offset or an absolute address"
        )
    row = np.arange(rows)[:, None]
    piece = np.arange(pieces) * GRANULE
    if span:
        if start % span + pieces * GRANULE > span:
            raise Violation(f"shared memory descriptor {descriptor:#x}: a row crosses the swizzle of {span}")
        address = swizzle(start + row // 8 * stride + row % 8 * span + piece, span)
    else:
        address = start + row // 8 * stride + row % 8 * GRANULE + piece // GRANULE * leading
    low, high = int(address.min()), int(address.max())
    if low < shared.base or high + GRANULE > shared.base + shared.size:
        raise Violation(f"shared memory descriptor {descriptor:#x} covers [{low:#x}, {high + GRANULE:#x}), "
                        f"outside of {shared.describe()}")  # fmt: skip
    return (address - shared.base) // GRANULE


def read_matrix(shared, granules):
    """(rows, 32) bytes."""
    states = shared.state.reshape(-1, GRANULE)[granules]
    if (states != WRITTEN).any():
        row, piece = np.argwhere((states != WRITTEN).any(2))[0]
        raise Violation(f"reads {shared.base + int(granules[row, piece]) * GRANULE:#x} in shared memory, of matrix row "
                        f"{row}: never written, or an mbarrier")  # fmt: skip
    shared.check_fenced(granules.ravel())
    return shared.bytes.reshape(-1, GRANULE)[granules].reshape(len(granules), -1)


# ---- mma ----
def multiply_add(a, b, c):
    """c + a @ b.T; a (M, 16) and b (N, 16) float64 with values of bf16 or f16, c (M, N) float32.

    What an H200 does: the 16 products and c are cut to multiples of 2**-25 of the largest one's power of two (that of a
    product is the sum of its factors', so the product may be twice as large), added, and cut to float32.
    """
    exponent = lambda x: x.view(np.int64) >> 52 & 2047  # plus BIAS; that of 0 is the smallest
    wide = c.astype(np.float64)
    largest = (exponent(a)[:, None, :] + exponent(b)).max(2) - BIAS
    largest = np.maximum(np.maximum(largest, exponent(wide)), BIAS - 300)
    unit = (25 + 2 * BIAS - largest << 52).view(np.float64)  # 2**25 over the largest's
    total = np.trunc(a[:, None, :] * b * unit[..., None]).sum(2)
    total = (total + np.trunc(wide * unit)) / unit
    result = (total.view(np.uint64) & CUT).view(np.float64).astype(np.float32)
    tiny = (np.abs(total) < 2.0**-126) & (total != 0)
    if np.count_nonzero(tiny):  # subnormals keep fewer bits
        result = np.where(tiny, np.ldexp(np.trunc(np.ldexp(total, 149)), -149), result).astype(np.float32)
    wild = ~np.isfinite(total)
    if np.count_nonzero(wild):
        exact = (a @ b.T + c).astype(np.float32)
        result = np.where(wild, np.where(np.isnan(exact), NAN, exact), result)
    return result


BIAS = 1023  # of float64
CUT = np.uint64(-1 << 29 & (1 << 64) - 1)  # the bits of float64 that float32 has
NAN = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]


@operation(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(?P<a>bf16|f16)\.(?P<b>bf16|f16)\.f32")
def build_warp_mma(build, match, target, left, right, addend):
    """Fragments as in "Matrix Fragments for mma.m16n8k16 with floating point type"; lane 4g + c."""
    if match["a"] != match["b"]:
        build.fail("no such mma")
    outs, a, b = (build.register_rows(build.vector(*v)) for v in ((target, 4), (left, 4), (right, 2)))
    c = [build.source(r, "f32") for r in build.vector(addend, 4)]
    values = values_of(match["a"])

    def run(warp, mask):
        if not warp.full(mask):
            raise Violation("mma needs the whole warp")
        words = warp.words
        two = words[b].reshape(2, 8, 4)  # (row half, g, c): column g, rows 2c, 2c + 1 and those + 8
        start = matrix_of(np.array([warp.R[old] for old in c]))
        result = multiply_add(a_values(words[a], values), values(two.transpose(1, 0, 2).reshape(8, 8)), start)
        words[outs] = registers_of(result).view(np.uint32)

    return run


def values_of(kind):
    """Registers, or bytes, of bf16 or f16 -> float64."""
    decode = bf16_decode if kind == "bf16" else lambda bits: bits.view(np.float16)
    return lambda raw: decode(np.ascontiguousarray(raw).view(np.uint16)).astype(np.float64)


def a_values(registers, values):
    """A's 16 x 16 values, of mma and of wgmma. Lane 4g + c: rows g, g + 8 by columns 2c, 2c + 1 and those + 8."""
    four = registers.reshape(2, 2, 8, 4)  # (column half, row half, g, c)
    return values(four.transpose(1, 2, 0, 3).reshape(16, 8))


def registers_of(matrix):
    """(16, n) to (n / 2, 32). Register 4j + 2h + i of lane 4g + c: row g + 8h, column 8j + 2c + i."""
    n = matrix.shape[1]
    return matrix.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)


def matrix_of(registers):
    """The inverse."""
    n = 2 * len(registers)
    return registers.reshape(n // 8, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, n)


# ---- wgmma ----
class WgmmaRegisters:
    """A warp's registers as wgmma sees them: what it may use was written before the last wgmma.fence, or by wgmma.

    While accumulators are in flight their registers hold a NaN, so that it shows when they are used.
    """

    IN_FLIGHT = np.uint32(POISON["32"])

    def __init__(self, words):
        self.words, self.fenced = words, words.copy()
        self.accumulators = {}  # which registers -> [values (16, n) or None, how many wgmmas are under way]

    def check_fenced(self, rows, what):
        if (self.words[rows] != self.fenced[rows]).any():
            raise Violation(f"registers of {what} were written since the last wgmma.fence")

    def start(self, rows, accumulate):
        """A wgmma that adds to these registers, or overwrites them, is issued."""
        entry = self.accumulators.setdefault(rows.tobytes(), [None, 0])
        if not entry[1]:
            if accumulate:
                self.check_fenced(rows, "the accumulator")
                entry[0] = matrix_of(self.words[rows].view(np.float32))
            self.words[rows] = self.IN_FLIGHT
        entry[1] += 1
        return entry

    def end(self, rows, entry):
        entry[1] -= 1
        if not entry[1]:
            if (self.words[rows] != self.IN_FLIGHT).any():
                raise Violation("registers of the accumulator were written before wgmma.wait_group")
            self.words[rows] = self.fenced[rows] = registers_of(entry[0]).view(np.uint32)


@operation(r"wgmma\.fence\.sync\.aligned")
def build_wgmma_fence(build, match):
    def run(warp, mask):
        if warp.wgmma is None:
            warp.wgmma = WgmmaRegisters(warp.words)
        else:
            np.copyto(warp.wgmma.fenced, warp.words)

    return run


@operation(r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.f32\.(?P<a>bf16|f16)\.(?P<b>bf16|f16)", waits=True)
def build_wgmma(build, match, target, left, right, scale_d, scale_a, scale_b, *transposed):
    n = int(match["n"])
    if n % 8 or not 8 <= n <= 256 or match["a"] != match["b"]:
        build.fail("no such wgmma shape")
    registers = hasattr(left, "items")
    if len(transposed) != (1 if registers else 2) or any(t.bits for t in transposed):
        build.fail("only K-major operands are modelled")
    signs = scale_a.bits * scale_b.bits
    outs = build.register_rows(build.vector(target, n // 2))
    a = build.register_rows(build.vector(left, 4)) if registers else build.source(left, "u64")
    b, (use_d, negated) = build.source(right, "u64"), build.predicate(scale_d)
    values = values_of(match["a"])

    def run(warp, mask):
        if not warp.full(mask):
            return Lanes()
        R, shared, quarter, state = warp.R, warp.cta.shared, warp.index % 4, warp.wgmma
        if state is None:
            raise Violation("no wgmma.fence before the first wgmma.mma_async")
        for register in (b,) if registers else (a, b):
            if np.count_nonzero(R[register] != R[register][0]):
                raise Violation("the lanes give different matrix descriptors")
        b_pieces = matrix_granules(shared, int(R[b][0]), n, wgmma=True)
        a_pieces = None
        if not registers:
            a_pieces = matrix_granules(shared, int(R[a][0]), 64, wgmma=True)[16 * quarter : 16 * quarter + 16]
        accumulate = bool(R[use_d][0]) != negated
        for pieces in (a_pieces, b_pieces):
            if pieces is not None:
                warp.cta.history.async_read(warp.known, pieces)

        if registers:
            state.check_fenced(a, "A")
            left = warp.words[a]
        sums = state.start(outs, accumulate)

        def multiply():
            if registers and (warp.words[a] != left).any():
                raise Violation("registers of A were written before wgmma.wait_group")
            x = a_values(left, values) if registers else values(read_matrix(shared, a_pieces))
            old = sums[0] if accumulate else np.zeros((16, n), np.float32)
            sums[0] = multiply_add(signs * x, values(read_matrix(shared, b_pieces)), old)
            state.end(outs, sums)

        one = Operation(warp, [multiply], order=("wgmma", warp))
        if not warp.cta.machine.eager:
            granules = b_pieces if a_pieces is None else np.concatenate([a_pieces, b_pieces])
            shared.check_fenced(granules.ravel())
            shared.claim(one, np.unique(granules), writes=False)
        warp.wgmma_groups = warp.wgmma_groups or [[]]
        warp.wgmma_groups[-1].append(one)
        warp.cta.machine.issue(one)
        return None

    return run


@operation(r"wgmma\.commit_group\.sync\.aligned")
def build_wgmma_commit(build, match):
    def run(warp, mask):
        warp.wgmma_groups = (warp.wgmma_groups or [[]]) + [[]]

    return run


@operation(r"wgmma\.wait_group\.sync\.aligned")
def build_wgmma_wait(build, match, count):
    left = count.bits

    def run(warp, mask):
        closed = warp.wgmma_groups[:-1]
        for group in closed if left == 0 else closed[:-left]:
            warp.cta.machine.finish(warp, group)
        while len(warp.wgmma_groups) > 1 and all(one.done for one in warp.wgmma_groups[0]):
            warp.wgmma_groups.pop(0)

    return run


# ---- Tensor Memory ----
def pair_of(warp, match):
    """The CTAs a .cta_group works on, even rank first."""
    if match["group"] == "1":
        return [warp.cta]
    cluster, rank = warp.cta.cluster.ctas, warp.cta.rank & ~1
    if rank + 1 >= len(cluster):
        raise Violation("cta_group::2 in a cluster without the other CTA of the pair")
    return [cluster[rank], cluster[rank + 1]]


GROUP = r"\.cta_group::(?P<group>[12])"


@operation(rf"tcgen05\.alloc{GROUP}\.sync\.aligned(?:\.shared::cta)?\.b32", waits=True)
def build_alloc(build, match, place, count):
    index, offset = build.address(place)
    columns = build.source(count, "u32")

    def run(warp, mask):
        if not warp.full(mask):
            return Lanes()
        tmem = warp.cta.tmem
        wanted = int(warp.R[columns][first_lane(mask)])
        start = tmem.allocate(wanted)
        if start is None:
            return Wait(f"{wanted} columns of TMEM", lambda: tmem.has_room(wanted))
        pair_of(warp, match)
        at = np.array([lane_value(warp, index, offset, 0) & OFFSET], np.uint32)
        warp.cta.shared.store(at, 4, np.array([start], np.uint32))
        warp.cta.history.store(warp, at, 4)
        return None

    return run


@operation(rf"tcgen05\.dealloc{GROUP}\.sync\.aligned\.b32", waits=True)
def build_dealloc(build, match, address, count):
    at, columns = build.source(address, "u32"), build.source(count, "u32")

    def run(warp, mask):
        if not warp.full(mask):
            return Lanes()
        lane = first_lane(mask)
        start, count = int(warp.R[at][lane]), int(warp.R[columns][lane])
        warp.cta.tmem.free(start, count)
        warp.cta.tmem.history.free(warp, slice(start, start + count))
        warp.cta.machine.changed = True
        return None

    return run


@operation(rf"tcgen05\.relinquish_alloc_permit{GROUP}\.sync\.aligned")
def build_relinquish(build, match):
    def run(warp, mask):
        warp.cta.tmem.may_allocate = False

    return run


@operation(r"tcgen05\.fence::(?P<where>before|after)_thread_sync")
def build_tcgen05_fence(build, match):
    fence = fence_before if match["where"] == "before" else fence_after
    return lambda warp, mask: fence(warp)


def order_of(warp):
    """cp, mma and commit of one thread happen in the order it issued them."""
    return ("tcgen05", warp)


@operation(
    rf"tcgen05\.commit{GROUP}\.mbarrier::arrive::one(?:\.shared::cluster)?(?P<multicast>\.multicast::cluster)?\.b64"
)
def build_commit(build, match, place, *more):
    if len(more) != (match["multicast"] is not None):
        build.fail("operands of tcgen05.commit")
    index, offset = build.address(place)
    mask_index = build.source(more[0], "u16") if more else None

    def run(warp, mask):
        for lane in lanes_of(mask):
            at = lane_value(warp, index, offset, lane)
            places = [at]
            if mask_index is not None:
                bits = int(warp.R[mask_index][lane])
                places = [(at & OFFSET) | rank << RANK_SHIFT for rank in range(16) if bits >> rank & 1]
            barriers = tuple(find(warp, p, asynchronous=True) for p in places)
            stages = [lambda barriers=barriers: [b.arrive(1) for b in barriers]]
            one = Operation(warp, stages, signals=barriers, order=order_of(warp))
            one.clocks[TCGEN05, warp.slot] = one.clocks[0, warp.slot]  # it is a fence::before_thread_sync, too
            warp.cta.machine.issue(one)

    return run


@operation(rf"tcgen05\.cp{GROUP}\.32x128b\.warpx4")
def build_cp(build, match, target, descriptor):
    index, offset = build.address(target)
    source = build.source(descriptor, "u64")

    def run(warp, mask):
        for lane in lanes_of(mask):
            address = lane_value(warp, index, offset, lane)
            column = address & 0xFFFF
            if address >> 16 & 0x3FFF:
                raise Violation(f"tcgen05.cp to lane {address >> 16 & 0x3FFF}")
            value = int(warp.R[source][lane])
            for cta in pair_of(warp, match):
                copy_scales(warp, cta, column, value)

    return run


def copy_scales(warp, cta, column, descriptor):
    """32 rows of 16 bytes to 32 lanes of 4 columns, the same in each quarter of the lanes."""
    shared, tmem = cta.shared, cta.tmem
    lanes, columns = slice(0, 128), slice(column, column + 4)
    tmem.check(lanes, columns, reads=False)
    tmem.history.use(warp, lanes, columns, writes=True)
    granules = matrix_granules(shared, descriptor, 32, pieces=1)
    cta.history.async_read(warp.known, granules)

    def copy():
        rows = read_matrix(shared, granules)
        tmem.words[:, columns] = np.tile(np.ascontiguousarray(rows).view(np.uint32), (4, 1))
        tmem.written[:, columns] = True

    one = Operation(warp, [copy], order=order_of(warp), owner=cta)
    if not warp.cta.machine.eager:
        shared.check_fenced(granules.ravel())
        shared.claim(one, np.unique(granules), writes=False)
        tmem.claim(one, order_of(warp), lanes, columns, writes=True)
    warp.cta.machine.issue(one)


class BlockScaled:
    """The instruction descriptor of .kind::mxf4 and .kind::mxf4nvf4."""

    def __init__(self, bits, group):
        field = lambda bit, size: bits >> bit & ((1 << size) - 1)
        fixed = {
            "sparsity": field(0, 3),
            "bit 3": field(3, 1),
            "bit 6": field(6, 1),
            "A type - 1": field(7, 3) ^ 1,
            "B type - 1": field(10, 2) ^ 1,
            "bit 12": field(12, 1),
            "transposition": field(15, 2),
            "bits 24 to 26": field(24, 3),
            "the scale factor ids": field(29, 2) | field(4, 2),
            "K = 96": field(31, 1),
        }
        wrong = [name for name, value in fixed.items() if value]
        if wrong:
            raise Violation(f"instruction descriptor {bits:#010x}: {', '.join(wrong)} must be 0 here")
        self.n, self.m = field(17, 6) * 8, field(27, 2) * 128
        self.sign = (-1) ** (field(13, 1) + field(14, 1))
        self.scale = ue8m0_decode if field(23, 1) else lambda code: E4M3.table64[code]
        if self.m != 128 * group or not 8 * group <= self.n <= 256 or self.n % (8 * group):
            raise Violation(f"instruction descriptor {bits:#010x}: M = {self.m}, N = {self.n} with cta_group::{group}")


def scales(tmem, column, rows, decode):
    """(rows, 4): row r in lane r % 32, column r / 32, block j in byte j; each quarter of the lanes holds the same."""
    columns = slice(column, column + -(-rows // 32))
    tmem.check(slice(0, 128), columns, reads=False)
    lanes = np.arange(rows) % 32
    at = column + np.arange(rows) // 32
    for quarter in range(4):
        if not tmem.written[lanes + 32 * quarter, at].all():
            raise Violation(f"scale factors in TMEM columns {columns.start}..{columns.stop - 1}: never written")
    words = tmem.words[lanes, at]
    for quarter in range(1, 4):
        if (tmem.words[lanes + 32 * quarter, at] != words).any():
            raise Violation(
                f"scale factors in TMEM columns {columns.start}..{columns.stop - 1} differ between the warps"
            )
    return decode(np.ascontiguousarray(words).view(np.uint8).reshape(rows, 4))


def dequantize(raw, scale):
    """(rows, 64) from 32 bytes and 4 scale factors per row."""
    return (PAIRS[raw].reshape(len(raw), 4, 16) * scale[:, :, None]).reshape(len(raw), 64)


@operation(rf"tcgen05\.mma{GROUP}\.kind::mxf4nvf4\.block_scale\.(?:block16|scale_vec::4X)"
           r"(?:\.collector::a::(?:discard|lastuse|fill|use))?")  # fmt: skip
def build_mma(build, match, target, left, right, instruction, left_scale, right_scale, use_d):
    if isinstance(left, Address):
        build.fail("A in TMEM is not modelled")
    (d, d_offset), (sa, sa_offset), (sb, sb_offset) = map(build.address, (target, left_scale, right_scale))
    a, b, described = build.source(left, "u64"), build.source(right, "u64"), build.source(instruction, "u32")
    accumulate, negated = build.predicate(use_d)

    def run(warp, mask):
        R = warp.R
        for lane in lanes_of(mask):
            shape = BlockScaled(int(R[described][lane]), int(match["group"]))
            addresses = [lane_value(warp, *place, lane) for place in ((d, d_offset), (sa, sa_offset), (sb, sb_offset))]
            if any(address >> 16 for address in addresses):
                raise Violation(f"TMEM addresses {[hex(x) for x in addresses]}: lane 0 and no id are modelled")
            multiply(warp, pair_of(warp, match), shape, int(R[a][lane]), int(R[b][lane]), *addresses,
                     bool(R[accumulate][lane]) != negated)  # fmt: skip

    return run


def multiply(warp, ctas, shape, a, b, d, a_scale, b_scale, accumulate):
    """Each CTA holds its 128 rows of A, D and A's scales, its part of the rows of B, and all of B's scales."""
    machine, n = warp.cta.machine, shape.n
    a_pieces = [matrix_granules(cta.shared, a, 128) for cta in ctas]
    b_pieces = [matrix_granules(cta.shared, b, n // len(ctas)) for cta in ctas]
    columns, lanes = slice(d, d + n), slice(0, 128)
    for cta, *pieces in zip(ctas, a_pieces, b_pieces, strict=True):
        cta.tmem.check(lanes, columns, reads=False)
        cta.tmem.history.use(warp, lanes, columns, writes=True)
        for column, rows in ((a_scale, 128), (b_scale, n)):
            cta.tmem.history.use(warp, lanes, slice(column, column + -(-rows // 32)), writes=False)
        cta.history.async_read(warp.known, np.concatenate(pieces))

    def run():
        raw = np.concatenate([read_matrix(cta.shared, p) for cta, p in zip(ctas, b_pieces, strict=True)])
        for cta, pieces in zip(ctas, a_pieces, strict=True):
            tmem = cta.tmem
            y = dequantize(raw, scales(tmem, b_scale, n, shape.scale))
            x = dequantize(read_matrix(cta.shared, pieces), scales(tmem, a_scale, 128, shape.scale))
            product = shape.sign * (x @ y.T)
            if accumulate:
                tmem.check(lanes, columns, reads=True)
                product += tmem.words[lanes, columns].view(np.float32)
            tmem.words[lanes, columns] = product.astype(np.float32).view(np.uint32)
            tmem.written[lanes, columns] = True

    one = Operation(warp, [run], order=order_of(warp))
    one.owners = list(ctas)
    if not machine.eager:
        for cta, *pieces in zip(ctas, a_pieces, b_pieces, strict=True):
            granules = np.unique(np.concatenate(pieces))
            cta.shared.check_fenced(granules)
            cta.shared.claim(one, granules, writes=False)
            cta.tmem.claim(one, order_of(warp), lanes, columns, writes=True)
            for column, rows in ((a_scale, 128), (b_scale, n)):
                used = slice(column, column + -(-rows // 32))
                cta.tmem.claim(one, order_of(warp), lanes, used, writes=False)
    machine.issue(one)


# ---- between TMEM and registers ----
SHAPES = {"32x32b": 1, "16x128b": 2, "16x256b": 4}  # registers for .x1


def fragment(shape, count):
    """(lane, column) in the warp's part of TMEM, per register and thread: two arrays (registers, 32)."""
    thread = np.arange(32)
    register = np.arange(SHAPES[shape] * count)[:, None]
    if shape == "32x32b":
        return np.broadcast_to(thread, (len(register), 32)), np.broadcast_to(register, (len(register), 32))
    if shape == "16x128b":  # row by register, one column of four by thread
        return thread // 4 + 8 * (register % 2), register // 2 * 4 + thread % 4
    return thread // 4 + 8 * (register // 2 % 2), register // 4 * 8 + thread % 4 * 2 + register % 2


def tmem_access(build, match, registers, place, kind):
    index, offset = build.address(place)
    rows, places = fragment(match["shape"], int(match["count"]))
    items = [getattr(build, kind)(r, "u32") for r in build.vector(registers, len(rows))]
    height, width = (32 if match["shape"] == "32x32b" else 16), int(places.max()) + 1

    def locate(warp):
        address = lane_value(warp, index, offset, 0)
        if (warp.R[index] != warp.R[index][0]).any():
            raise Violation("the lanes give different TMEM addresses")
        lane, column = address >> 16, address & 0xFFFF
        if lane // 32 != warp.index % 4 or lane % 32 + height > 32 or lane % 16:
            first = 32 * (warp.index % 4)
            raise Violation(f"TMEM lanes {lane}..{lane + height - 1}: warp {warp.index} reaches {first}..{first + 31}")
        return slice(lane, lane + height), slice(column, column + width)

    return items, rows, places, locate


ACCESS = r"\.sync\.aligned\.(?P<shape>32x32b|16x128b|16x256b)\.x(?P<count>1|2|4|8|16|32|64|128)\.b32"


@operation(r"tcgen05\.ld" + ACCESS, waits=True)
def build_tmem_load(build, match, registers, place):
    outs, rows, places, locate = tmem_access(build, match, registers, place, "target")

    def run(warp, mask):
        if not warp.full(mask):
            return Lanes()
        R, tmem = warp.R, warp.cta.tmem
        lanes, columns = locate(warp)
        tmem.check(lanes, columns, reads=False)
        tmem.history.use(warp, lanes, columns, writes=False)

        def load():
            tmem.check(lanes, columns, reads=True)
            values = tmem.words[lanes.start + rows, columns.start + places]
            for out, value in zip(outs, values, strict=True):
                R[out][:] = value

        one = Operation(warp, [load], order=("tcgen05.ld", warp))
        if not warp.cta.machine.eager:
            tmem.claim(one, one.order, lanes, columns, writes=False)
            for out in outs:  # until tcgen05.wait::ld the registers hold nothing
                R[out][:] = 0x7FBADBAD
        warp.tmem_loads.append(one)
        warp.cta.machine.issue(one)
        if warp.cta.machine.lenient:
            warp.cta.machine.finish(warp, warp.tmem_loads)
        return None

    return run


@operation(r"tcgen05\.st" + ACCESS, waits=True)
def build_tmem_store(build, match, place, registers):
    ins, rows, places, locate = tmem_access(build, match, registers, place, "source")

    def run(warp, mask):
        if not warp.full(mask):
            return Lanes()
        R, tmem = warp.R, warp.cta.tmem
        lanes, columns = locate(warp)
        tmem.check(lanes, columns, reads=False)
        tmem.history.use(warp, lanes, columns, writes=True)
        values = np.stack([R[i] for i in ins])

        def store():
            tmem.words[lanes.start + rows, columns.start + places] = values
            tmem.written[lanes.start + rows, columns.start + places] = True

        one = Operation(warp, [store], order=("tcgen05.st", warp))
        if not warp.cta.machine.eager:
            tmem.claim(one, one.order, lanes, columns, writes=True)
        warp.tmem_stores.append(one)
        warp.cta.machine.issue(one)
        return None

    return run


@operation(r"tcgen05\.wait::(?P<what>ld|st)\.sync\.aligned")
def build_tmem_wait(build, match):
    name = "tmem_loads" if match["what"] == "ld" else "tmem_stores"

    def run(warp, mask):
        warp.cta.machine.finish(warp, getattr(warp, name))
        getattr(warp, name).clear()

    return run
