"""tcgen05: Tensor Memory, the MMAs of one or two CTAs that keep their sums in it, and what moves data there.

PTX ISA: "TensorCore 5th Generation Family Instructions", 9.7.16. Matrices are K-major. How the MMAs add is not
documented: here each sums its products in float64 and adds them to the float32 accumulator once, or as an H200's
would, with `cut_sums`.
"""

import numpy as np

from tests.emulator.barriers import find
from tests.emulator.copies import lane_value
from tests.emulator.formats import E4M3, ue8m0_decode
from tests.emulator.machine import Lanes, Operation, Wait
from tests.emulator.memory import OFFSET, RANK_SHIFT, Violation
from tests.emulator.parser import Address, Vector
from tests.emulator.program import first_lane, lanes_of, operation
from tests.emulator.races import TCGEN05, fence_after, fence_before
from tests.emulator.tensor_core import dequantized, matrix_granules, multiply_add, read_matrix, values_of

GROUP = r"\.cta_group::(?P<group>[12])"


# ---- Tensor Memory ----
def pair_of(warp, match):
    """The CTAs that a .cta_group works on, even rank first."""
    if match["group"] == "1":
        return [warp.cta]
    cluster, rank = warp.cta.cluster.ctas, warp.cta.rank & ~1
    if rank + 1 >= len(cluster):
        raise Violation("cta_group::2 in a cluster without the other CTA of the pair")
    return [cluster[rank], cluster[rank + 1]]


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


def order_of(warp, lane):
    """The order key: cp, mma and commit of one thread happen in the order of issue."""
    return ("tcgen05", warp, lane)


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
            # The ISA orders commits after what they wait for, not after each other.
            last = not warp.cta.machine.lenient
            one = Operation(warp, stages, signals=barriers, order=order_of(warp, lane), last=last)
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
                copy_scales(warp, cta, column, value, order_of(warp, lane))

    return run


def copy_scales(warp, cta, column, descriptor, order):
    """Copy 32 rows of 16 bytes to 32 lanes of 4 columns, the same in each quarter of the lanes."""
    shared, tmem = cta.shared, cta.tmem
    lanes, columns = slice(0, 128), slice(column, column + 4)
    tmem.check(lanes, columns, reads=False)
    tmem.history.use(warp, lanes, columns, writes=True)
    granules = matrix_granules(shared, descriptor, 32, pieces=1)
    cta.history.async_read(warp, granules)

    def copy():
        rows = read_matrix(shared, granules)
        tmem.words[:, columns] = np.tile(np.ascontiguousarray(rows).view(np.uint32), (4, 1))
        tmem.written[:, columns] = True

    one = Operation(warp, [copy], order=order, owner=cta)
    if not warp.cta.machine.eager:
        shared.check_fenced(granules.ravel())
        shared.claim(one, np.unique(granules), writes=False)
        tmem.claim(one, order, lanes, columns, writes=True)
    warp.cta.machine.issue(one)


# ---- MMAs ----
class DataPath:
    """Where in Tensor Memory a CTA has its rows of D and of A: data path layouts A, B, D and F, 9.7.16.10.5.

    M = 64 of one CTA (F) has 16 rows in the lower or the upper half of each quarter of the lanes; where uses are
    compared the two halves count as one. Of M = 128 of two CTAs (B) each has 64 rows: D's right half of columns is in
    the upper lanes, and A is there twice.
    """

    def __init__(self, m, group, lane):
        row = np.arange(m // group)
        self.folded = (m, group) == (128, 2)
        self.rows, self.lane = len(row), lane
        self.lanes = row // 16 * 32 + row % 16 + lane if m == 64 else row
        if lane not in ((0, 16) if m == 64 else (0,)):
            raise Violation(f"D at TMEM lane {lane} with M = {m}")

    def of_d(self, column, n):
        """(lanes, columns) of D, row by column, as slices if possible."""
        if self.folded:
            right, at = np.divmod(np.arange(n), n // 2)
            return self.lanes[:, None] + 64 * right, column + at
        if self.rows < 128:
            return self.lanes[:, None], column + np.arange(n)
        return slice(0, 128), slice(column, column + n)

    def read_a(self, tmem, column, words):
        """(rows, 4 * words) bytes of A."""
        copies = []
        for lanes in (self.lanes, self.lanes + 64) if self.folded else (self.lanes,):
            at = lanes[:, None], column + np.arange(words)
            if not tmem.written[at].all():
                raise Violation(f"A in TMEM columns {column}..{column + words - 1}: never written")
            copies.append(tmem.words[at])
        if (copies[0] != copies[-1]).any():
            raise Violation("A in TMEM differs between lanes 0..63 and 64..127, with M = 128 of two CTAs")
        return np.ascontiguousarray(copies[0]).view(np.uint8)


class Half:
    """The instruction descriptor of .kind::f16 with a float32 D: 9.7.16.4.2."""

    def __init__(self, bits, group):
        field = lambda bit, size: bits >> bit & ((1 << size) - 1)
        fixed = {
            "sparsity": field(0, 3),
            "saturation": field(3, 1),
            "D type - 1": field(4, 2) ^ 1,
            "bit 6": field(6, 1),
            "A type, above 1,": field(8, 2),
            "B type - A type": field(10, 3) ^ field(7, 3),
            "transposition": field(15, 2),
            "bit 23": field(23, 1),
            "bits 29 to 31": field(29, 3),
        }
        refuse(bits, fixed)
        self.n, self.m = field(17, 6) * 8, field(24, 5) * 16
        self.sign = (-1) ** (field(13, 1) + field(14, 1))
        self.values = values_of("bf16" if field(7, 3) else "f16")
        # The ISA's table has N in steps of 8 for M = 128 of one CTA, too; CUTLASS wants 16.
        step = 8 if self.m == 64 else 16
        if self.m not in (64 * group, 128 * group) or not step <= self.n <= 256 or self.n % step:
            raise Violation(f"instruction descriptor {bits:#010x}: M = {self.m}, N = {self.n} with cta_group::{group}")


def refuse(bits, fixed):
    wrong = [name for name, value in fixed.items() if value]
    if wrong:
        raise Violation(f"instruction descriptor {bits:#010x}: {', '.join(wrong)} must be 0 here")


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
        refuse(bits, fixed)
        self.n, self.m = field(17, 6) * 8, field(27, 2) * 128
        self.sign = (-1) ** (field(13, 1) + field(14, 1))
        self.scale = ue8m0_decode if field(23, 1) else lambda code: E4M3.table64[code]
        if self.m != 128 * group or not 8 * group <= self.n <= 256 or self.n % (8 * group):
            raise Violation(f"instruction descriptor {bits:#010x}: M = {self.m}, N = {self.n} with cta_group::{group}")


def scales(tmem, column, rows, decode):
    """(rows, 4): row r is in lane r % 32, column r / 32, block j in byte j; all quarters of the lanes are the same."""
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


COLLECTOR = r"(?:\.collector::a::(?P<collector>discard|lastuse|fill|use))?"


class Product:
    """One MMA. Each CTA holds its rows of A and of D, its part of the rows of B and all scale factors of B.

    a: (TMEM address or descriptor, whether it is the former). scales: TMEM columns of the scale factors of A and of B.
    kept: lanes of D that stay as they are, a bool each, or None. down: D is divided by 2**down before the sum.
    """

    A_WORDS = 8  # 32 bytes of K in a row of TMEM

    def __init__(self, warp, ctas, shape, d, a, b, accumulate, scales=(), collector=None, kept=None, down=0):
        self.warp, self.ctas, self.shape, self.accumulate = warp, ctas, shape, accumulate
        self.scales, self.collector, self.kept, self.down = scales, collector, kept, down
        self.path = DataPath(shape.m, len(ctas), d >> 16)
        self.at = self.path.of_d(d & 0xFFFF, shape.n)
        self.a, self.a_in_tmem = a
        rows = shape.n // len(ctas)
        self.b_granules = [matrix_granules(cta.shared, b, rows) for cta in ctas]
        self.a_granules = [()] * len(ctas)
        width = shape.n // 2 if self.path.folded else shape.n
        self.columns = [(d & 0xFFFF, width, True)]  # of TMEM: first, how many, whether they are written
        for column, rows in zip(scales, (128, shape.n), strict=False):
            self.columns.append((column, -(-rows // 32), False))
        if self.a_in_tmem:
            if self.a >> 16 != self.path.lane:
                raise Violation(f"A at TMEM lane {self.a >> 16} and D at lane {self.path.lane}")
            self.columns.append((self.a & 0xFFFF, self.A_WORDS, False))
        for what, column, step in (
            ("D", d, 2), *(("scale factors", column, 2) for column in scales), *[("A", self.a, 4)] * self.a_in_tmem
        ):  # fmt: skip
            if (column & 0xFFFF) % step:
                raise Violation(f"{what} from TMEM column {column & 0xFFFF} on: it must be a multiple of {step}")
        if not self.a_in_tmem:
            self.a_granules = [matrix_granules(cta.shared, self.a, self.path.rows) for cta in ctas]

    def issue(self, lane):
        warp, lanes, order = self.warp, slice(0, 128), order_of(self.warp, lane)
        self.collect()
        one = Operation(warp, [self.run], order=order)
        one.owners = list(self.ctas)
        for cta, *pieces in zip(self.ctas, self.a_granules, self.b_granules, strict=True):
            granules = np.unique(np.concatenate([np.ravel(p) for p in pieces]).astype(np.intp))
            cta.history.async_read(warp, granules)
            if not warp.cta.machine.eager:
                cta.shared.check_fenced(granules)
                cta.shared.claim(one, granules, writes=False)
            for first, count, writes in self.columns:
                columns = slice(first, first + count)
                cta.tmem.check(lanes, columns, reads=False)
                cta.tmem.history.use(warp, lanes, columns, writes)
                if not warp.cta.machine.eager:
                    cta.tmem.claim(one, order, lanes, columns, writes)
        warp.cta.machine.issue(one)

    def collect(self):
        """The collector buffer keeps A after `fill` and `use`; only the matrix that it keeps may be used again."""
        tmem, this = self.warp.cta.tmem, (self.a, self.a_in_tmem)
        if self.collector in ("use", "lastuse") and tmem.collected != this:
            raise Violation(f"collector::a::{self.collector} of a matrix that was not kept: "
                            "no collector::a::fill of it before")  # fmt: skip
        tmem.collected = this if self.collector in ("fill", "use") else None

    def run(self):
        b = np.concatenate([read_matrix(cta.shared, p) for cta, p in zip(self.ctas, self.b_granules, strict=True)])
        for rank, (cta, granules) in enumerate(zip(self.ctas, self.a_granules, strict=True)):
            tmem = cta.tmem
            if self.a_in_tmem:
                a = self.path.read_a(tmem, self.a & 0xFFFF, self.A_WORDS)
            else:
                a = read_matrix(cta.shared, granules)
            if self.collector in ("use", "lastuse") and (tmem.collection != a).any():
                raise Violation("A has changed since collector::a::fill")
            tmem.collection = a.copy() if self.collector in ("fill", "use") else None
            x, y = (self.values(tmem, raw, i) for i, raw in enumerate((a, b)))
            sums = np.zeros((1, 1), np.float32)
            if self.accumulate:
                if not tmem.written[self.at].all():
                    raise Violation(f"adds to TMEM columns from {self.columns[0][0]} on: never written")
                sums = tmem.words[self.at].view(np.float32) * np.float32(2.0**-self.down)
            x = self.shape.sign * x
            result = multiply_add(x, y, sums) if self.warp.cta.machine.cut_sums else x @ y.T + sums
            result = result.astype(np.float32).view(np.uint32)
            if self.kept is None:
                tmem.words[self.at], tmem.written[self.at] = result, True
            else:
                kept = np.broadcast_to(self.kept[rank][:, None], (128, 512))[self.at]
                tmem.words[self.at] = np.where(kept, tmem.words[self.at], result)
                tmem.written[self.at] |= ~kept

    def values(self, tmem, raw, operand):
        if not self.scales:
            return self.shape.values(raw)
        return dequantized(raw, scales(tmem, self.scales[operand], len(raw), self.shape.scale))


@operation(rf"tcgen05\.mma{GROUP}\.kind::mxf4nvf4\.block_scale\.(?:block16|scale_vec::4X){COLLECTOR}")
def build_scaled_mma(build, match, target, left, right, instruction, left_scale, right_scale, use_d):
    if isinstance(left, Address):
        build.fail("A in TMEM is not modelled")
    places = [build.address(place) for place in (target, left_scale, right_scale)]
    a, b, described = build.source(left, "u64"), build.source(right, "u64"), build.source(instruction, "u32")
    accumulate, negated = build.predicate(use_d)

    def run(warp, mask):
        R = warp.R
        for lane in lanes_of(mask):
            shape = BlockScaled(int(R[described][lane]), int(match["group"]))
            d, *scales = (lane_value(warp, *place, lane) for place in places)
            if any(address >> 16 for address in (d, *scales)):
                raise Violation(f"TMEM addresses {[hex(x) for x in (d, *scales)]}: lane 0 and no id are modelled")
            Product(warp, pair_of(warp, match), shape, d, (int(R[a][lane]), False), int(R[b][lane]),
                    bool(R[accumulate][lane]) != negated, scales, match["collector"]).issue(lane)  # fmt: skip

    return run


@operation(rf"tcgen05\.mma{GROUP}\.kind::f16{COLLECTOR}")
def build_mma(build, match, target, left, right, instruction, *more):
    """[d], a or [a], b, description {, lanes of D that are kept}, whether D is added {, how often it is halved}."""
    group, more = int(match["group"]), list(more)
    d, in_tmem = build.address(target), isinstance(left, Address)
    a = build.address(left) if in_tmem else (build.source(left, "u64"), 0)
    b, described = build.source(right, "u64"), build.source(instruction, "u32")
    masks = None
    if more and isinstance(more[0], Vector):
        masks = [build.source(word, "u32") for word in build.vector(more.pop(0), 4 * group)]
    if not 1 <= len(more) <= 2:
        build.fail("operands of tcgen05.mma")
    accumulate, negated = build.predicate(more[0])
    down = more[1].bits if len(more) == 2 else 0
    if not 0 <= down <= 15:
        build.fail("scale-input-d: from 0 to 15")

    def run(warp, mask):
        R = warp.R
        for lane in lanes_of(mask):
            kept = None
            if masks is not None:
                words = np.array([R[word][lane] for word in masks], np.uint32)
                kept = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool).reshape(group, 128)
            Product(warp, pair_of(warp, match), Half(int(R[described][lane]), group), lane_value(warp, *d, lane),
                    (lane_value(warp, *a, lane), in_tmem), int(R[b][lane]), bool(R[accumulate][lane]) != negated,
                    (), match["collector"], kept, down).issue(lane)  # fmt: skip

    return run


# ---- between TMEM and registers ----
SHAPES = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}  # registers for .x1


def fragment(shape, count, split):
    """(lane, column) in the warp's part of TMEM, per register and thread: two arrays (registers, 32). 9.7.16.2.3.1."""
    thread = np.arange(32)
    register = np.arange(SHAPES[shape] * count)[:, None]
    lane, column = {
        "32x32b": (thread, register),
        "16x64b": (thread // 4 + 8 * (thread % 2), register * 2 + thread // 2 % 2),
        "16x128b": (thread // 4 + 8 * (register % 2), register // 2 * 4 + thread % 4),
        "16x256b": (thread // 4 + 8 * (register // 2 % 2), register // 4 * 8 + thread % 4 * 2 + register % 2),
        "16x32bx2": (thread % 16, register + thread // 16 * split),
    }[shape]
    return np.broadcast_arrays(lane, column, np.empty((len(register), 32)))[:2]


def tmem_access(build, match, registers, place, split, kind):
    if (match["shape"] == "16x32bx2") != (split is not None):
        build.fail("where the second half is: of 16x32bx2, and of no other shape")
    index, offset = build.address(place)
    rows, places = fragment(match["shape"], int(match["count"]), split.bits if split else 0)
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


ACCESS = r"\.sync\.aligned\.(?P<shape>32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x(?P<count>1|2|4|8|16|32|64|128)\.b32"


@operation(r"tcgen05\.ld" + ACCESS, waits=True)
def build_tmem_load(build, match, registers, place, split=None):
    outs, rows, places, locate = tmem_access(build, match, registers, place, split, "target")

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
            for out in outs:  # the registers are undefined until tcgen05.wait::ld
                R[out][:] = 0x7FBADBAD
        warp.tmem_loads.append(one)
        warp.cta.machine.issue(one)
        if warp.cta.machine.lenient:
            warp.cta.machine.finish(warp, warp.tmem_loads)
        return None

    return run


@operation(r"tcgen05\.st" + ACCESS, waits=True)
def build_tmem_store(build, match, place, *more):
    """[address] {, where the second half is}, registers"""
    *split, registers = more
    ins, rows, places, locate = tmem_access(build, match, registers, place, *(split or [None]), "source")

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
