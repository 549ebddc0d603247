"""tcgen05.mma of .kind::f16, and moves between Tensor Memory and registers, against the PTX ISA's layouts."""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.emulator import EmulatorError
from tests.emulator.ptx import DATA, initialise, laid_out, run, wait, without

B_AT, SIZE = 16384, 32768  # in what a CTA loads: rows of A, rows of B
A_COLUMN = 256  # of Tensor Memory; D is at 0


@dataclass(frozen=True)
class Case:
    """One MMA of K = 16. lane: where D and A start."""

    m: int
    n: int
    group: int = 1
    lane: int = 0
    kind: str = "bf16"
    a_in_tmem: bool = False

    @property
    def instruction(self):
        kind = {"f16": 0, "bf16": 1}[self.kind]
        return 1 << 4 | kind << 7 | kind << 10 | self.n // 8 << 17 | self.m // 16 << 24

    def place(self, row, column):
        """(CTA, lane, column) of D: figures 205, 207, 211 and 215 of the ISA, 9.7.16.10.5."""
        if (self.m, self.group) == (128, 2):
            half = self.n // 2
            return row // 64, row % 64 + 64 * (column // half), column % half
        if self.m == 64:
            return 0, row // 16 * 32 + row % 16 + self.lane, column
        return row // 128, row % 128, column


def bits(values, kind):
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def problem(case, spread=None):
    """(what each CTA loads, its image of A in Tensor Memory, the product) of small integers, whose sums are exact; or
    of numbers whose sizes spread over this many powers of two."""
    rng = np.random.default_rng(case.m + case.n)
    a, b = (rng.integers(-4, 5, (rows, 16)).astype(np.float64) for rows in (case.m, case.n))
    if spread is not None:
        a, b = (rng.integers(-255, 256, m.shape) * 2.0 ** rng.integers(-8 - spread, -7, m.shape) for m in (a, b))
    data, image = np.zeros((case.group, SIZE), np.uint8), np.zeros((case.group, 128, 16), np.uint16)
    rows, columns = case.m // case.group, case.n // case.group
    for cta in range(case.group):
        for at, part in ((0, a[rows * cta : rows * cta + rows]), (B_AT, b[columns * cta : columns * cta + columns])):
            raw = laid_out(bits(part, case.kind), 128)
            data[cta, at : at + len(raw)] = raw
    for row in range(case.m):
        cta, lane, _ = case.place(row, 0)
        image[cta, lane] = bits(a[row], case.kind)
        if (case.m, case.group) == (128, 2):
            image[cta, lane + 64] = image[cta, lane]  # A is in both halves of the lanes
    return data, image, a @ b.T


def descriptor(offset):
    return DATA + offset >> 4 | 1 << 16 | 1024 >> 4 << 32 | 2 << 61 | 1 << 46


def eight(at, first=100):
    return f"[{at}], {{{', '.join(f'%r{first + i}' for i in range(8))}}};\n"


def mma(case, accumulate="%p4", more="", after_idesc="", collector=""):
    a = "[%r22]" if case.a_in_tmem else "%x10"
    operands = f"[%r21], {a}, %x11, %r24, {after_idesc}{accumulate}{more}"
    return f"@%p6 tcgen05.mma.cta_group::{case.group}.kind::f16{collector} {operands};\n"


def body(case, products=None):
    """Every CTA fills its operands, and D with ones; the first one multiplies; 128 lanes by n columns of D go out."""
    meet = "barrier.cluster.arrive; barrier.cluster.wait;\n" if case.group == 2 else ""
    commit = f"@%p6 tcgen05.commit.cta_group::{case.group}.mbarrier::arrive::one.shared::cluster"
    commit += ".multicast::cluster.b64 [%r10], %h1;\n" if case.group == 2 else ".b64 [%r10];\n"
    load = "".join(
        "tcgen05.ld.sync.aligned.32x32b.x8.b32 " + "{" + ", ".join(f"%r{100 + i + j}" for j in range(8)) + "}"
        f", [%r31+{i}];\n"
        for i in range(0, case.n, 8)
    )  # fmt: skip
    return (
        "mov.u32 %r9, %cluster_ctarank; setp.eq.and.u32 %p6, %r9, 0, %p1; mov.b16 %h1, 3; add.u32 %r10, %bar, 8;\n"
        + initialise(bars=2) + "setp.lt.u32 %p5, %t, 32; @!%p5 bra ALLOCATED; mov.b32 %r19, 512;"
        f" tcgen05.alloc.cta_group::{case.group}.sync.aligned.shared::cta.b32 [%bar+64], %r19; ALLOCATED: bar.sync 0;"
        " ld.shared.b32 %r20, [%bar+64]; shr.u32 %r30, %t, 5; shl.b32 %r30, %r30, 21; add.u32 %r31, %r20, %r30;"
        f" add.u32 %r21, %r20, {case.lane << 16}; add.u32 %r22, %r21, {A_COLUMN}; add.u32 %r32, %r31, {A_COLUMN};"
        f" mov.b32 %r24, {case.instruction}; mov.b64 %x10, {descriptor(0)}; mov.b64 %x11, {descriptor(B_AT)};\n"
        f" ld.param.u64 %x2, [in]; mad.wide.u32 %x2, %r9, {SIZE}, %x2; mov.b32 %r7, {SIZE};"
        f" @%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], {SIZE};"
        " @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%data], [%x2], %r7, [%bar];\n"
        + wait(0)
        + "ld.param.u64 %x3, [a]; mad.lo.u32 %r11, %r9, 128, %t; mad.wide.u32 %x3, %r11, 32, %x3;\n"
        + "".join(f"ld.global.b32 %r{100 + i}, [%x3+{4 * i}]; mov.b32 %r{110 + i}, 0f3F800000;" for i in range(8))
        + "tcgen05.st.sync.aligned.32x32b.x8.b32 " + eight("%r32")
        + "".join("tcgen05.st.sync.aligned.32x32b.x8.b32 " + eight(f"%r31+{i}", 110) for i in range(0, case.n, 8))
        + "tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;\n" + meet
        + "tcgen05.fence::after_thread_sync; setp.ne.u32 %p4, 0, 0; setp.eq.u32 %p3, 0, 0;\n"
        + (products or mma(case)) + commit + wait(1) + "tcgen05.fence::after_thread_sync;\n"
        + load + f"tcgen05.wait::ld.sync.aligned; mad.wide.u32 %x1, %r11, {4 * case.n}, %out;\n"
        + "".join(f"st.global.b32 [%x1+{4 * i}], %r{100 + i};" for i in range(case.n))
        + "tcgen05.fence::before_thread_sync; bar.sync 0;\n" + meet
        + "@!%p5 bra FREED; tcgen05.fence::after_thread_sync;"
        f" tcgen05.dealloc.cta_group::{case.group}.sync.aligned.b32 %r20, 512; FREED:\n"
    )  # fmt: skip


def product(case, text=None, schedule="lazy"):
    """(D by rows, the other values in its columns, the product)"""
    data, image, expected = problem(case)
    out = np.zeros((case.group, 128, case.n), np.float32)
    run(text or body(case), out, [data, image], [".u64 in", ".u64 a"], 128, schedule, case.group)
    places = [case.place(row, column) for row in range(case.m) for column in range(case.n)]
    found = np.array([out[place] for place in places]).reshape(case.m, case.n)
    for place in places:
        out[place] = 1
    return found, out, expected


SHAPES = [
    Case(64, 8), Case(64, 24, lane=16), Case(128, 16), Case(128, 48, kind="f16"),
    Case(128, 32, group=2), Case(128, 48, group=2, kind="f16"), Case(256, 16, group=2), Case(256, 48, group=2),
]  # fmt: skip
CASES = [Case(c.m, c.n, c.group, c.lane, c.kind, in_tmem) for in_tmem in (False, True) for c in SHAPES]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mma_of_16_bits(case):
    for schedule in ("eager", "lazy", "random:1"):
        found, rest, expected = product(case, schedule=schedule)
        np.testing.assert_array_equal(found, expected)
        assert (rest == 1).all()  # nothing else was written


def test_accumulates_halves_and_keeps():
    case = Case(128, 16)
    found, _, expected = product(case, body(case, mma(case, "%p3")))
    np.testing.assert_array_equal(found, expected + 1)
    found, _, expected = product(case, body(case, mma(case, "%p3", ", 3")))
    np.testing.assert_array_equal(found, expected + 0.125)
    kept = "{%r40, %r41, %r42, %r43}, "
    masks = "mov.b32 %r40, 1; mov.b32 %r41, 0; mov.b32 %r42, 0x80000000; mov.b32 %r43, 6;\n"
    found, _, expected = product(case, body(case, masks + mma(case, after_idesc=kept)))
    expected[[0, 95, 97, 98]] = 1  # their lanes
    np.testing.assert_array_equal(found, expected)


IN_TMEM = Case(128, 32, group=2, a_in_tmem=True)
FROM_SHARED = Case(128, 16)
STORED, FENCE = "tcgen05.wait::st.sync.aligned;", " tcgen05.fence::before_thread_sync;"
NO_A_BELOW_64 = "".join(f"@%p7 mov.b32 %r{100 + i}, 0;" for i in range(8)) + "\n"


def described(flip):
    """The instruction descriptor with some bits flipped."""
    right = f"%r24, {FROM_SHARED.instruction};"
    return lambda s: without(s, right, f"%r24, {FROM_SHARED.instruction ^ flip};")


def small(text):
    """The kernel with 256 columns of Tensor Memory, which need not be the first ones."""
    text = without(text, "%r19, 512", "%r19, 256").replace("%r20, 512", "%r20, 256")
    return text.replace(f"%r21, {A_COLUMN};", "%r21, 0;").replace(f"%r31, {A_COLUMN};", "%r31, 128;")


SPOILT = {
    "no wait for the stores": (IN_TMEM, lambda s: without(s, STORED), "still writing|never written"),
    "no fence after the stores": (IN_TMEM, lambda s: without(s, STORED + FENCE, STORED), "without tcgen05.fence"),
    "no fence before the MMA": (
        IN_TMEM, lambda s: without(s, "tcgen05.fence::after_thread_sync; setp", "setp"), "without tcgen05.fence"),
    "A in half of the lanes": (
        IN_TMEM, lambda s: without(s, "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r32]", "setp.lt.u32 %p7, %t, 64;"
        + NO_A_BELOW_64 + "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r32]"), "differs between lanes"),
    "A in other lanes than D": (
        Case(64, 8, a_in_tmem=True), lambda s: without(s, "%r22, %r21, 256", f"%r22, %r21, {256 + (16 << 16)}"),
        "A at TMEM lane 16 and D at lane 0"),
    "D in the middle of the lanes": (
        FROM_SHARED, lambda s: without(s, "%r21, %r20, 0", f"%r21, %r20, {16 << 16}"), "lane 16 with M = 128"),
    "A of another type": (FROM_SHARED, described(1 << 7), "B type - A type must be 0"),
    "fp16 sums": (FROM_SHARED, described(1 << 4), "D type - 1 must be 0"),
    "transposed": (FROM_SHARED, described(1 << 16), "transposition must be 0"),
    "N of 24": (FROM_SHARED, described(1 << 17), "M = 128, N = 24"),
    "M of 256": (FROM_SHARED, described(24 << 24), "M = 256, N = 16"),
    "beyond the allocation": (
        FROM_SHARED, lambda s: without(s, "%r19, 512", "%r19, 256").replace("%r20, 512", "%r20, 256")
        .replace("@%p6 tcgen05.mma", "add.u32 %r21, %r21, 248; @%p6 tcgen05.mma"), "are outside of|not allocated"),
    "columns without the allocation's first": (
        FROM_SHARED, lambda s: small(s).replace("@%p6 tcgen05.mma", "mov.b32 %r21, 0; @%p6 tcgen05.mma"),
        "column 0 is not allocated"),
    "D in an odd column": (
        FROM_SHARED, lambda s: without(s, "%r21, %r20, 0", "%r21, %r20, 1"), "D from TMEM column .* multiple of 2"),
    "A in column 2": (
        IN_TMEM, lambda s: without(s, f"%r22, %r21, {A_COLUMN}", f"%r22, %r21, {A_COLUMN + 2}"),
        "A from TMEM column .* multiple of 4"),
    "another thread commits": (
        FROM_SHARED, lambda s: without(s, "@%p6 tcgen05.commit", "setp.eq.u32 %p7, %t, 1; @%p7 tcgen05.commit"),
        "still writing"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_mistakes(name):
    case, change, message = SPOILT[name]
    with pytest.raises(EmulatorError, match=message):
        product(case, change(body(case)))


# Warp 0 stores to Tensor Memory, warp 4, whose lanes are the same, reads it: a canonical synchronization pattern of the
# ISA, "Non-pipelined instructions, different thread".
RELAXED = (
    initialise() + """shr.u32 %r1, %t, 5; setp.eq.u32 %p3, %r1, 0; setp.eq.u32 %p4, %r1, 4;
    @%p3 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%data], 32; bar.sync 0; ld.shared.b32 %r20, [%data];
    add.u32 %r2, %t, 1000; @%p4 bra READ; @!%p3 bra END;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r2};
    tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.warp.sync -1;
    @%p1 mbarrier.arrive.relaxed.cta.shared.b64 %x5, [%bar]; bra END;
    READ: """ + wait().replace(".parity.", ".parity.relaxed.cta.") + """tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r20]; tcgen05.wait::ld.sync.aligned;
    and.b32 %r5, %t, 31; mad.wide.u32 %x1, %r5, 4, %out; st.global.b32 [%x1], %r4;
    END: tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    @%p3 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;"""
)  # fmt: skip


@pytest.mark.parametrize("schedule", ("eager", "lazy", "slow:1"))
def test_relaxed_arrivals_hand_over_tensor_memory(schedule):
    out = run(RELAXED, np.zeros(32, np.uint32), threads=160, schedule=schedule)
    assert out.tolist() == list(range(1000, 1032))
    for fence in ("tcgen05.fence::before_thread_sync; bar.warp", "tcgen05.fence::after_thread_sync;\n    tcgen05.ld"):
        with pytest.raises(EmulatorError, match="without tcgen05.fence::before_thread_sync"):
            body = without(RELAXED, fence, fence.split()[-1])
            run(body, np.zeros(32, np.uint32), threads=160, schedule=schedule)
    # The lane that arrives must have met the others after their waits; elect.sync would do.
    met, elected = "bar.warp.sync -1;\n    @%p1", "elect.sync %r9|%p1, -1;\n    @%p1"
    run(RELAXED.replace(met, elected), np.zeros(32, np.uint32), threads=160, schedule=schedule)
    with pytest.raises(EmulatorError, match=r"TMEM column (0|256), written by CTA 0 warp 0"):
        run(without(RELAXED, met, "@%p1"), np.zeros(32, np.uint32), threads=160, schedule=schedule)


# ---- registers and Tensor Memory: figures 183 to 187, 9.7.16.2.3.1 ----
# (lane, column) of register r in thread t
PLACES = {
    "16x64b.x2": lambda t, r: (t // 4 + t % 2 * 8, 2 * r + t % 4 // 2),
    "16x128b.x1": lambda t, r: (t // 4 + 8 * r, t % 4),
    "16x256b.x1": lambda t, r: (t // 4 + r // 2 * 8, t % 4 * 2 + r % 2),
    "16x32bx2.x2": lambda t, r: (t % 16, r + t // 16 * 6),
}


def moved(shape, half):
    """32 lanes of 8 columns hold their places' numbers. A warp loads those of `shape`, stores 1000 more there, and
    writes what it loaded and then its lane: (the kernel's statements, registers of a load)."""
    count = 4 if shape == "16x256b.x1" else 2
    registers = "{" + ", ".join(f"%r{40 + i}" for i in range(count)) + "}"
    split = "6" if "bx2" in shape else None
    load = ", ".join(filter(None, (registers, "[%r21]", split)))
    store = ", ".join(filter(None, ("[%r21]", split, registers)))
    return (
        initialise() + """mov.b32 %r19, 32; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%bar+64], %r19;
        ld.shared.b32 %r20, [%bar+64];\n"""
        + f"add.u32 %r21, %r20, {half << 16};"
        + "".join(f"mad.lo.u32 %r{100 + i}, %t, 8, {i};" for i in range(8))
        + "tcgen05.st.sync.aligned.32x32b.x8.b32 " + eight("%r20") + "tcgen05.wait::st.sync.aligned;\n"
        + f"tcgen05.ld.sync.aligned.{shape}.b32 {load}; tcgen05.wait::ld.sync.aligned;\n"
        + f"mad.wide.u32 %x1, %t, {4 * (count + 8)}, %out;\n"
        + "".join(f"st.global.b32 [%x1+{4 * i}], %r{40 + i};" for i in range(count))
        + "".join(f"add.u32 %r{40 + i}, %r{40 + i}, 1000;" for i in range(count))
        + f"tcgen05.st.sync.aligned.{shape}.b32 {store}; tcgen05.wait::st.sync.aligned;\n"
        "tcgen05.ld.sync.aligned.32x32b.x8.b32 {" + ", ".join(f"%r{100 + i}" for i in range(8)) + "}, [%r20];"
        "tcgen05.wait::ld.sync.aligned;\n"
        + "".join(f"st.global.b32 [%x1+{4 * (count + i)}], %r{100 + i};" for i in range(8))
        + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;"
    ), count  # fmt: skip


@pytest.mark.parametrize("half", (0, 16))
@pytest.mark.parametrize("shape", PLACES)
def test_shapes_of_loads_and_stores(shape, half):
    """What one shape stores, another one loads."""
    text, count = moved(shape, half)
    got = run(text, np.zeros((32, count + 8), np.uint32), schedule="lazy")
    expected = np.arange(256, dtype=np.uint32).reshape(32, 8)
    for t, r in np.ndindex(32, count):
        lane, column = PLACES[shape](t, r)
        assert got[t, r] == 8 * (half + lane) + column
        expected[half + lane, column] += 1000
    np.testing.assert_array_equal(got[:, count:], expected)
    with pytest.raises(EmulatorError, match="still writing"):
        run(without(text, "tcgen05.wait::st.sync.aligned;"), got, schedule="lazy")
