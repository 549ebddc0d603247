"""mma and wgmma: matrices in shared memory, and the products themselves. tcgen05.py has those of sm_100.

PTX ISA: "Warp Level Matrix Instructions", "Asynchronous Warpgroup Level Matrix Instructions" and, of shared memory
descriptors, "TensorCore 5th Generation Family Instructions". How they add is not documented; here they give the same
bits as an H200: see `multiply_add`.
"""

import numpy as np

from tests.emulator.copies import swizzle
from tests.emulator.formats import E2M1, E4M3, bf16_decode
from tests.emulator.machine import POISON, Lanes, Operation
from tests.emulator.memory import GRANULE, WRITTEN, Violation
from tests.emulator.program import operation
from tests.emulator.races import gather

PAIRS = np.stack([E2M1.table64[np.arange(256) & 15], E2M1.table64[np.arange(256) >> 4]], 1)  # byte -> two values
TCGEN05_SWIZZLE = {0: 0, 2: 128, 4: 64, 6: 32}
WGMMA_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}


# ---- matrices in shared memory ----
def matrix_granules(shared, descriptor, rows, wgmma=False, pieces=2):
    """Granule numbers (rows, pieces) of a K-major matrix with 32 bytes, or one piece, per row."""
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
    """The matrix's bytes (rows, 32)."""
    states = shared.state.reshape(-1, GRANULE)[granules]
    if (states != WRITTEN).any():
        row, piece = np.argwhere((states != WRITTEN).any(2))[0]
        raise Violation(f"reads {shared.base + int(granules[row, piece]) * GRANULE:#x} in shared memory, of matrix row "
                        f"{row}: never written, or an mbarrier")  # fmt: skip
    shared.check_fenced(granules.ravel())
    return shared.bytes.reshape(-1, GRANULE)[granules].reshape(len(granules), -1)


# ---- mma ----
def multiply_add(a, b, c):
    """c + a @ b.T; a (M, 16) and b (N, 16) float64 with values of bf16 or f16, c (M, N) float32 or (1, 1).

    As an H200 does: the products (16 of them, or 64 of tcgen05.mma's 4-bit ones) and c are truncated to multiples of
    2**-25 times the largest one's power of two (for a product, that of its factors multiplied, so the product may be
    twice as large), added, and truncated to float32.
    """
    exponent = lambda x: x.view(np.int64) >> 52 & 2047  # plus BIAS; that of 0 is the smallest
    wide = c.astype(np.float64)
    a_k, b_k = np.ascontiguousarray(a.T)[:, :, None], np.ascontiguousarray(b.T)[:, None, :]  # NumPy adds rows fastest
    largest = (exponent(a_k) + exponent(b_k)).max(0) - BIAS
    largest = np.maximum(np.maximum(largest, exponent(wide)), BIAS - 300)
    unit = (25 + 2 * BIAS - largest << 52).view(np.float64)  # 2**25 over the largest's
    total = np.trunc(a_k * b_k * unit).sum(0)
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
    """Registers or bytes of bf16 or f16 -> float64."""
    decode = bf16_decode if kind == "bf16" else lambda bits: bits.view(np.float16)
    return lambda raw: decode(np.ascontiguousarray(raw).view(np.uint16)).astype(np.float64)


def a_values(registers, values):
    """The 16 x 16 values of A, for mma and wgmma. Lane 4g + c: rows g, g + 8 by columns 2c, 2c + 1 and those + 8."""
    four = registers.reshape(2, 2, 8, 4)  # (column half, row half, g, c)
    return values(four.transpose(1, 2, 0, 3).reshape(16, 8))


def registers_of(matrix):
    """(16, n) to (n / 2, 32). Register 4j + 2h + i of lane 4g + c: row g + 8h, column 8j + 2c + i."""
    n = matrix.shape[1]
    return matrix.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)


def matrix_of(registers):
    """The inverse of `registers_of`."""
    n = 2 * len(registers)
    return registers.reshape(n // 8, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, n)


BLOCK_SCALED = (r"mma\.sync\.aligned(?P<before>\.m16n8k64\.row\.col)?\.kind::mxf4nvf4\.block_scale\.scale_vec::4X"
                r"(?P<after>\.m16n8k64\.row\.col)?\.f32\.e2m1\.e2m1\.f32\.ue4m3")  # fmt: skip


@operation(BLOCK_SCALED)
def build_block_scaled_mma(build, match, target, left, right, addend, a_scale, a_ids, b_scale, b_ids):
    """NVFP4 on sm_120, in one exact sum. A register has eight codes of a row of A or of a column of B: lane 4g + c has
    those of rows g and g + 8 from column 8c on, and from 8c + 32 on. Four scale factors of row g of A are in lane
    4g + 2i, of row g + 8 in the next one, of column g of B in lane 4g + i, where i is a thread id. PTX ISA: "Block
    Scaling for mma.sync", fragments of m16n8k64.
    """
    if (match["before"] is None) == (match["after"] is None):
        build.fail("no such mma")
    outs, a, b = (build.register_rows(build.vector(*v)) for v in ((target, 4), (left, 4), (right, 2)))
    c = [build.source(r, "f32") for r in build.vector(addend, 4)]
    scales = build.source(a_scale, "u32"), build.source(b_scale, "u32")
    ids = [[build.source(n, "u16") for n in build.vector(v, 2)] for v in (a_ids, b_ids)]

    def run(warp, mask):
        if not warp.full(mask):
            raise Violation("mma needs the whole warp")
        (a_byte, a_thread), (b_byte, b_thread) = [[warp.R[n] for n in pair] for pair in ids]
        if a_byte.any() or b_byte.any() or (a_thread > 1).any() or (b_thread > 3).any():
            raise Violation("scale_vec::4X: byte ids must be 0, the thread id of A 0 or 1, of B 0 to 3")
        if (a_thread != a_thread[0]).any() or (b_thread != b_thread[0]).any():
            raise Violation("the lanes give different thread ids")
        codes = lambda words: np.ascontiguousarray(words).view(np.uint8)
        x = codes(warp.words[a].reshape(2, 2, 8, 4).transpose(1, 2, 0, 3).reshape(16, 8))
        y = codes(warp.words[b].reshape(2, 8, 4).transpose(1, 0, 2).reshape(8, 8))
        g, second = np.arange(16) % 8, np.arange(16) // 8
        sa = codes(warp.R[scales[0]][4 * g + 2 * int(a_thread[0]) + second]).reshape(16, 4)
        sb = codes(warp.R[scales[1]][4 * np.arange(8) + int(b_thread[0])]).reshape(8, 4)
        start = matrix_of(np.array([warp.R[old] for old in c]))
        product = dequantized(x, E4M3.table64[sa]) @ dequantized(y, E4M3.table64[sb]).T
        warp.words[outs] = registers_of((product + start).astype(np.float32)).view(np.uint32)

    return run


def dequantized(raw, scale):
    """(rows, 64) from 32 bytes of e2m1 codes, low half first, and 4 scale factors per row."""
    return (PAIRS[raw].reshape(len(raw), 4, 16) * scale[:, :, None]).reshape(len(raw), 64)


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
        """Issue a wgmma that adds to these registers, or overwrites them."""
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
                warp.cta.history.async_read(warp, pieces)

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
        gather(warp)  # by then all lanes have read what their registers were loaded from

    return run
