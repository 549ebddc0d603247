"""wgmma and tcgen05 in the emulator, against the layouts of the PTX ISA; and mistakes in kernels that use them."""

import numpy as np
import pytest

from tests.emulator import EmulatorError, PtxError
from tests.emulator.formats import E4M3
from tests.emulator.ptx import ALL, DATA, fill, initialise, laid_out, run, wait, without


# ---- mma and wgmma ----
def bf16(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def small_integers(rng, shape):
    """Numbers whose products and sums are exact in any order."""
    return rng.integers(-4, 5, shape).astype(np.float64)


def descriptor(start, stride, swizzle, wgmma, leading=16):
    mode = (
        {0: 0, 128: 1, 64: 2, 32: 3}[swizzle] << 62 if wgmma else {0: 0, 128: 2, 64: 4, 32: 6}[swizzle] << 61 | 1 << 46
    )
    return (start >> 4) | leading >> 4 << 16 | stride >> 4 << 32 | mode


@pytest.mark.slow_after(14)
@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("span", (0, 32, 64, 128))
@pytest.mark.parametrize("n", (8, 24))
def test_wgmma_from_shared_memory(n, span, schedule):
    rng = np.random.default_rng(n)
    a, b = small_integers(rng, (64, 16)), small_integers(rng, (n, 16))
    parts = [laid_out(bf16(m), span) for m in (a, b)]
    data = np.concatenate([np.resize(parts[0], 8192), parts[1], np.zeros(-len(parts[1]) % 16, np.uint8)])
    stride = 8 * span if span else 128
    at = lambda offset, rows: descriptor(DATA + offset, stride, span, True, leading=16 * rows)
    d = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    body = (
        fill(len(data)) + f"mov.b64 %x10, {at(0, 64)}; mov.b64 %x11, {at(8192, n)};\n"
        + "".join(f"mov.b32 %r{100 + i}, 0f3F800000;" for i in range(n // 2))
        + f"setp.eq.u32 %p3, 0, 0; setp.ne.u32 %p4, 0, 0; wgmma.fence.sync.aligned;"
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{d}}}, %x10, %x11, %p4, 1, 1, 0, 0;"
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{d}}}, %x10, %x11, %p3, 1, -1, 0, 0;"
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{d}}}, %x10, %x11, %p3, 1, 1, 0, 0;"
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n"
        + f"mad.wide.u32 %x1, %t, {2 * n}, %out;"
        + "".join(f"st.global.b32 [%x1+{4 * i}], %r{100 + i};" for i in range(n // 2))
    )  # fmt: skip
    got = run(body, np.zeros((128, n // 2), np.float32), [data], [".u64 in"], threads=128, schedule=schedule)
    result = np.zeros((64, n))
    for t, register in np.ndindex(128, n // 2):  # the D fragment of the PTX ISA
        row = 16 * (t // 32) + t % 32 // 4 + 8 * (register // 2 % 2)
        result[row, 8 * (register // 4) + t % 4 * 2 + register % 2] = got[t, register]
    np.testing.assert_array_equal(result, a @ b.T)


@pytest.mark.parametrize("schedule", ALL)
def test_wgmma_with_a_in_registers(schedule):
    rng = np.random.default_rng(3)
    a, b = small_integers(rng, (64, 16)), small_integers(rng, (8, 16))
    fragments = np.zeros((128, 4, 2), np.uint16)
    for t, register, i in np.ndindex(128, 4, 2):  # the A fragment
        row = 16 * (t // 32) + t % 32 // 4 + 8 * (register % 2)
        fragments[t, register, i] = bf16(a)[row, t % 4 * 2 + i + 8 * (register // 2)]
    body = (
        fill(8 * 128) + f"""ld.param.u64 %x3, [a]; mad.wide.u32 %x3, %t, 16, %x3;
        mov.b64 %x11, {descriptor(DATA, 1024, 128, True)};
        ld.global.v4.b32 {{%r50, %r51, %r52, %r53}}, [%x3]; setp.ne.u32 %p4, 0, 0; wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r100, %r101, %r102, %r103}},
            {{%r50, %r51, %r52, %r53}}, %x11, %p4, 1, 1, 0;
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        mad.wide.u32 %x1, %t, 16, %out; st.global.v4.b32 [%x1], {{%r100, %r101, %r102, %r103}};"""
    )  # fmt: skip
    arguments = [laid_out(bf16(b), 128), fragments]
    got = run(body, np.zeros((128, 4), np.float32), arguments, [".u64 in", ".u64 a"], threads=128, schedule=schedule)
    result = np.zeros((64, 8))
    for t, register in np.ndindex(128, 4):
        result[16 * (t // 32) + t % 32 // 4 + 8 * (register // 2), t % 4 * 2 + register % 2] = got[t, register]
    np.testing.assert_array_equal(result, a @ b.T)
    fence, commit = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
    adding = without(body, "setp.ne.u32 %p4", "setp.eq.u32 %p4")
    for wrong, message in (
        (without(body, fence), "no wgmma.fence"),
        (without(body, fence, fence + "mov.b32 %r50, 0;"), "of A were written since"),
        (without(adding, fence, fence + "mov.b32 %r100, 0;"), "of the accumulator were written since"),
        (without(body, commit, commit + "mov.b32 %r50, 0;"), "of A were written before wgmma.wait_group"),
        (without(body, commit, commit + "mov.b32 %r100, 0;"), "of the accumulator were written before wgmma.wait_g"),
    ):
        with pytest.raises(EmulatorError, match=message):
            run(wrong, got, arguments, [".u64 in", ".u64 a"], threads=128, schedule="lazy")
    early = without(body, "wgmma.wait_group.sync.aligned 0;") + "wgmma.wait_group.sync.aligned 0;"
    got = run(early, got, arguments, [".u64 in", ".u64 a"], threads=128, schedule="lazy")
    assert np.isnan(got).all()  # what is in flight is a NaN


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma(kind):
    rng = np.random.default_rng(5)
    a, b, c = small_integers(rng, (16, 16)), small_integers(rng, (16, 8)), small_integers(rng, (16, 8))
    bits = bf16 if kind == "bf16" else lambda m: m.astype(np.float16).view(np.uint16)
    left, right = np.zeros((32, 4, 2), np.uint16), np.zeros((32, 2, 2), np.uint16)
    for t, i in np.ndindex(32, 2):  # the fragments of mma.m16n8k16
        for r in range(4):
            left[t, r, i] = bits(a)[t // 4 + 8 * (r % 2), t % 4 * 2 + i + 8 * (r // 2)]
        for r in range(2):
            right[t, r, i] = bits(b)[t % 4 * 2 + i + 8 * r, t // 4]
    addend = np.zeros((32, 4), np.float32)
    for t, r in np.ndindex(32, 4):
        addend[t, r] = c[t // 4 + 8 * (r // 2), t % 4 * 2 + r % 2]
    body = f"""ld.param.u64 %x1, [a]; mad.wide.u32 %x1, %t, 16, %x1; ld.global.v4.b32 {{%r50, %r51, %r52, %r53}}, [%x1];
        ld.param.u64 %x2, [b]; mad.wide.u32 %x2, %t, 8, %x2; ld.global.v2.b32 {{%r60, %r61}}, [%x2];
        ld.param.u64 %x3, [c]; mad.wide.u32 %x3, %t, 16, %x3; ld.global.v4.b32 {{%r70, %r71, %r72, %r73}}, [%x3];
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r70, %r71, %r72, %r73}},
            {{%r50, %r51, %r52, %r53}}, {{%r60, %r61}}, {{%r70, %r71, %r72, %r73}};
        mad.wide.u32 %x4, %t, 16, %out; st.global.v4.b32 [%x4], {{%r70, %r71, %r72, %r73}};"""
    got = run(body, np.zeros((32, 4), np.float32), [left, right, addend], [".u64 a", ".u64 b", ".u64 c"])
    result = np.zeros((16, 8))
    for t, r in np.ndindex(32, 4):
        result[t // 4 + 8 * (r // 2), t % 4 * 2 + r % 2] = got[t, r]
    np.testing.assert_array_equal(result, a @ b + c)
    some = "setp.lt.u32 %p9, %t, 16; @%p9 bra END;" + body + "END:"
    with pytest.raises(EmulatorError, match="whole warp"):
        run(some, np.zeros((32, 4), np.float32), [left, right, addend], [".u64 a", ".u64 b", ".u64 c"])


# ---- tcgen05 ----
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCALES = {0x38: 1.0, 0x30: 0.5, 0x40: 2.0, 0x34: 0.75, 0x08: 2.0**-6}
EVERY_SCALE = {code: float(E4M3.table64[code]) for code in range(1, 0x7F)}


def block_scaled(rng, rows, scales=SCALES):
    """(codes packed, scale bytes, values) of a [rows, 64] matrix."""
    codes = rng.integers(0, 16, (rows, 64)).astype(np.uint8)
    bytes_of = np.array(list(scales), np.uint8)[rng.integers(0, len(scales), (rows, 4))]
    scale = np.vectorize(scales.get)(bytes_of)
    return codes[:, ::2] | codes[:, 1::2] << 4, bytes_of, E2M1[codes] * np.repeat(scale, 16, 1)


def scale_tile(scales):
    """128 x 4 bytes in the order of tcgen05.cp: row r, block j at 16 (r mod 32) + 4 (r / 32) + j."""
    tile = np.zeros(512, np.uint8)
    for r, j in np.ndindex(scales.shape):
        tile[16 * (r % 32) + 4 * (r // 32) + j] = scales[r, j]
    return tile


def instruction(n, m=128, negate_a=0):
    return 1 << 7 | 1 << 10 | negate_a << 13 | n // 8 << 17 | m // 128 << 27


def nvfp4(n, seed=0, scales=SCALES):
    rng = np.random.default_rng(seed)
    (a, sa, x), (b, sb, y) = block_scaled(rng, 128, scales), block_scaled(rng, n, scales)
    data = np.zeros(16384 + 32768 + 3 * 512, np.uint8)
    data[:16384] = laid_out(a, 128)
    data[16384 : 16384 + 128 * n] = laid_out(b, 128)
    data[49152 : 49152 + 512] = scale_tile(sa)
    for i in range(-(-n // 128)):
        data[49664 + 512 * i : 50176 + 512 * i] = scale_tile(sb[128 * i : 128 * i + 128])
    return data, x @ y.T


def mma(n, accumulate="%p4"):
    """One product of 64 codes: D in columns 0 .. n - 1, scale factors in 256 .. 259 and 260 ..."""
    operands = f"[%r20], %x10, %x11, %r24, [%r21], [%r22], {accumulate}"
    return f"@%p1 tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 {operands};\n"


def tcgen05(n, product=None, idesc=None):
    at = lambda offset: descriptor(DATA + offset, 1024, 128, False)
    scale = lambda offset: descriptor(DATA + offset, 128, 0, False)
    load = "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{', '.join(f'%r{100 + i + j}' for j in range(8))}}}, [%r31+{i}];\n"
        for i in range(0, n, 8)
    )
    copies = "".join(
        f"mov.b64 %x13, {scale(49664 + 512 * i)}; @%p1 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r22+{4 * i}], %x13;\n"
        for i in range(-(-n // 128))
    )
    return (
        initialise(bars=2) + f"setp.lt.u32 %p5, %t, 32; @!%p5 bra ALLOCATED; mov.b32 %r19, 512;"
        " tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%bar+64], %r19; ALLOCATED: bar.sync 0;"
        f" ld.shared.b32 %r20, [%bar+64]; add.u32 %r21, %r20, 256; add.u32 %r22, %r20, 260;"
        f" mov.b32 %r24, {idesc or instruction(n)};"
        " ld.param.u64 %x2, [in]; mov.b32 %r7, 50688; @%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], 50688;"
        " @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%data], [%x2], %r7, [%bar];\n"
        + wait(0) + f"mov.b64 %x12, {scale(49152)};"
        " @%p1 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r21], %x12;\n" + copies
        + f"mov.b64 %x10, {at(0)}; mov.b64 %x11, {at(16384)}; setp.ne.u32 %p4, 0, 0; setp.eq.u32 %p3, 0, 0;\n"
        + (product or mma(n))
        + "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar+8];\n" + wait(1)
        + "tcgen05.fence::after_thread_sync; shr.u32 %r30, %t, 5; shl.b32 %r30, %r30, 21; add.u32 %r31, %r20, %r30;\n"
        + load + "tcgen05.wait::ld.sync.aligned;\n"
        + "".join(f"mad.wide.u32 %x1, %t, {4 * n}, %out; st.global.b32 [%x1+{4 * i}], %r{100 + i};\n" for i in range(n))
        + "tcgen05.fence::before_thread_sync; bar.sync 0; @!%p5 bra FREED; tcgen05.fence::after_thread_sync;"
        " tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
        " tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512; FREED:\n"
    )  # fmt: skip


def product(n, body=None, schedule="eager", seed=0, **options):
    data, expected = nvfp4(n, seed)
    out = np.zeros((128, n), np.float32)
    got = run(body or tcgen05(n), out, [data], [".u64 in"], threads=128, schedule=schedule, **options)
    return got, expected


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("n", (8, 40, 128, 184))
def test_block_scaled_mma(n, schedule):
    got, expected = product(n, schedule=schedule)
    np.testing.assert_array_equal(got, expected)  # sums of few bits: exact


def test_mma_accumulates_and_negates():
    twice = mma(16) + mma(16, "%p3") + mma(16, "%p3")
    got, expected = product(16, tcgen05(16, twice))
    np.testing.assert_array_equal(got, 3 * expected)
    got, expected = product(16, tcgen05(16, idesc=instruction(16, negate_a=1)))
    np.testing.assert_array_equal(got, -expected)


NVFP4 = "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"


@pytest.mark.parametrize("a_thread, b_thread", [(0, 0), (1, 3)])
def test_block_scaled_mma_of_a_warp(a_thread, b_thread):
    """The fragments of mma.m16n8k64 with 4-bit types; scale factors come from the lanes that the ids name."""
    rng = np.random.default_rng(7)
    (a, sa, x), (b, sb, y) = block_scaled(rng, 16), block_scaled(rng, 8)
    addend = small_integers(rng, (16, 8))
    left, right = np.zeros((32, 4, 4), np.uint8), np.zeros((32, 2, 4), np.uint8)
    scales, start = rng.integers(0, 256, (2, 32, 4)).astype(np.uint8), np.zeros((32, 4), np.float32)
    for t in range(32):
        g, c = t // 4, t % 4
        for r in range(4):  # eight codes from column 8c on, or 8c + 32
            at = 4 * c + 16 * (r // 2)
            left[t, r] = a[g + 8 * (r % 2), at : at + 4]
            start[t, r] = addend[g + 8 * (r // 2), 2 * c + r % 2]
        for r in range(2):
            right[t, r] = b[g, 4 * c + 16 * r : 4 * c + 16 * r + 4]
        if c // 2 == a_thread:
            scales[0, t] = sa[g + 8 * (c % 2)]
        if c == b_thread:
            scales[1, t] = sb[g]
    body = f"""ld.param.u64 %x1, [a]; mad.wide.u32 %x1, %t, 16, %x1; ld.global.v4.b32 {{%r50, %r51, %r52, %r53}}, [%x1];
        ld.param.u64 %x2, [b]; mad.wide.u32 %x2, %t, 8, %x2; ld.global.v2.b32 {{%r60, %r61}}, [%x2];
        ld.param.u64 %x3, [c]; mad.wide.u32 %x3, %t, 16, %x3; ld.global.v4.b32 {{%r70, %r71, %r72, %r73}}, [%x3];
        ld.param.u64 %x4, [s]; mad.wide.u32 %x4, %t, 4, %x4; ld.global.b32 %r80, [%x4]; ld.global.b32 %r81, [%x4+128];
        mov.b16 %h1, 0; mov.b16 %h2, {a_thread}; mov.b16 %h3, {b_thread};
        {NVFP4} {{%r70, %r71, %r72, %r73}}, {{%r50, %r51, %r52, %r53}}, {{%r60, %r61}}, {{%r70, %r71, %r72, %r73}},
            %r80, {{%h1, %h2}}, %r81, {{%h1, %h3}};
        mad.wide.u32 %x5, %t, 16, %out; st.global.v4.b32 [%x5], {{%r70, %r71, %r72, %r73}};"""
    arguments = [left, right, start, scales], [".u64 a", ".u64 b", ".u64 c", ".u64 s"]
    got = run(body, np.zeros((32, 4), np.float32), *arguments)
    expected = x @ y.T + addend
    for t, r in np.ndindex(32, 4):
        assert got[t, r] == np.float32(expected[t // 4 + 8 * (r // 2), t % 4 * 2 + r % 2])
    with pytest.raises(EmulatorError, match="thread id of A 0 or 1"):
        run(without(body, f"%h2, {a_thread}", "%h2, 2"), got, *arguments)


MAJOR = str(descriptor(DATA, 1024, 128, False))
MUTATIONS = {
    "no wait for the operands": lambda s: without(s, wait(0)),
    "no wait for the product": lambda s: without(s, wait(1)),
    "the wrong parity": lambda s: without(s, wait(1), wait(1, 1)),
    "too many bytes expected": lambda s: without(s, "[%bar], 50688", "[%bar], 50704"),
    "too few bytes expected": lambda s: without(s, "[%bar], 50688", "[%bar], 50672"),
    "no commit": lambda s: without(s, "@%p1 tcgen05.commit", "@%p4 tcgen05.commit"),
    "no wait for the registers": lambda s: without(s, "tcgen05.wait::ld.sync.aligned;"),
    "no tcgen05.fence after the wait": lambda s: without(s, "tcgen05.fence::after_thread_sync; shr", "shr"),
    "no tcgen05.fence before the end": lambda s: without(s, "tcgen05.fence::before_thread_sync;"),
    "no tcgen05.fence before freeing": lambda s: without(s, "FREED; tcgen05.fence::after_thread_sync;", "FREED;"),
    "TMEM freed before it is read": lambda s: without(s, "shr.u32 %r30",
        "@!%p5 bra EARLY; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512; EARLY: shr.u32 %r30"),
    "TMEM never freed": lambda s: without(s, "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;"),
    "accumulates into nothing": lambda s: without(s, "[%r22], %p4", "[%r22], %p3"),
    "every lane multiplies": lambda s: without(s, "@%p1 tcgen05.mma", "tcgen05.mma").replace("], %p4;", "], %p3;"),
    "scale factors not copied": lambda s: without(s, "@%p1 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r21]",
                                                  "@%p4 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r21]"),
    "scale factors swapped": lambda s: without(s, "[%r21], [%r22]", "[%r22], [%r21]"),
    "another warp's lanes": lambda s: without(s, "shl.b32 %r30, %r30, 21;", "shl.b32 %r30, %r30, 22;"),
    "columns beyond the allocation": lambda s: without(s, "%r19, 512", "%r19, 256").replace("%r20, 512", "%r20, 256"),
    "scale factors in an odd column": lambda s: without(s, "%r22, %r20, 260", "%r22, %r20, 261"),
    "A and B swapped": lambda s: without(s, "%x10, %x11", "%x11, %x10"),
    "a swizzle of 64": lambda s: without(s, MAJOR, str(descriptor(DATA, 1024, 64, False))),
    "half of the stride": lambda s: without(s, MAJOR, str(descriptor(DATA, 512, 128, False))),
    "a reserved bit": lambda s: without(s, f"%r24, {instruction(16)}", f"%r24, {instruction(16) | 1 << 24}"),
    "N of 0": lambda s: without(s, f"%r24, {instruction(16)}", f"%r24, {instruction(0)}"),
    "used, and never kept": lambda s: without(s, "block16 [%r20]", "block16.collector::a::use [%r20]"),
    "no allocation": lambda s: without(s, "setp.lt.u32 %p5, %t, 32;", "setp.lt.u32 %p5, %t, 0;"),
}  # fmt: skip


LEFT_OUT = [name for name in MUTATIONS if "tcgen05.fence" in name or name == "no wait for the registers"]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_lenient_accepts_what_published_kernels_leave_out(name):
    for schedule in ALL:
        np.testing.assert_array_equal(*product(16, MUTATIONS[name](tcgen05(16)), schedule, lenient=True))


STRICT_OR_NOT = [(n, lenient) for lenient in (False, True) for n in MUTATIONS if not (lenient and n in LEFT_OUT)]


@pytest.mark.parametrize("name, lenient", STRICT_OR_NOT)
def test_mistakes_are_caught(name, lenient):
    """By an error or by a wrong result, in the lazy schedule."""
    body = MUTATIONS[name](tcgen05(16))
    try:
        got, expected = product(16, body, "lazy", lenient=lenient)
    except EmulatorError as error:
        assert "line " in str(error) or "CTA" in str(error)
    else:
        assert not np.array_equal(got, expected)


@pytest.mark.parametrize("schedule", ALL)
def test_mma_of_two_ctas(schedule):
    """Each CTA holds 128 of the 256 rows of A, half of the rows of B, and all of B's scale factors."""
    n, rng = 32, np.random.default_rng(5)
    (a, sa, x), (b, sb, y) = block_scaled(rng, 256), block_scaled(rng, n)
    data = np.zeros((2, 50688), np.uint8)
    for rank in range(2):
        data[rank, :16384] = laid_out(a[128 * rank : 128 * rank + 128], 128)
        data[rank, 16384 : 16384 + 128 * n // 2] = laid_out(b[n // 2 * rank : n // 2 * rank + n // 2], 128)
        data[rank, 49152:49664] = scale_tile(sa[128 * rank : 128 * rank + 128])
        data[rank, 49664:50176] = scale_tile(sb)
    body = tcgen05(n, idesc=instruction(n, m=256)).replace("cta_group::1", "cta_group::2")
    meet = "barrier.cluster.arrive; barrier.cluster.wait;\n"
    lead = "mov.u32 %r9, %cluster_ctarank; setp.eq.and.u32 %p6, %r9, 0, %p1; mov.b16 %h1, 3;\n"
    body = without(body, "ld.param.u64 %x2, [in];", "ld.param.u64 %x2, [in]; mad.wide.u32 %x2, %r9, 50688, %x2;")
    body = lead + without(body, wait(0), wait(0) + meet)  # the leader multiplies when both have loaded
    for issued in ("tcgen05.cp", "tcgen05.mma", "tcgen05.commit"):
        body = without(body, f"@%p1 {issued}", f"@%p6 {issued}")
    body = without(body, "shared::cluster.b64 [%bar+8];", "shared::cluster.multicast::cluster.b64 [%x8], %h1;")
    body = without(body, "@%p6 tcgen05.commit", "add.u32 %r10, %bar, 8; @%p6 tcgen05.commit").replace("[%x8]", "[%r10]")
    body = body.replace("mad.wide.u32 %x1, %t", "mad.lo.u32 %r11, %r9, 128, %t; mad.wide.u32 %x1, %r11") + meet
    got = run(body, np.zeros((256, n), np.float32), [data], [".u64 in"], 128, schedule, cluster=2)
    np.testing.assert_array_equal(got, x @ y.T)
    if schedule == "lazy":
        with pytest.raises(EmulatorError, match="still writing|never written|not allocated"):  # by the other CTA
            run(body.replace(wait(0) + meet, wait(0)), got, [data], [".u64 in"], 128, "slow:1", cluster=2)


@pytest.mark.parametrize("instruction", ["commit", "mma", "cp", "dealloc", "relinquish_alloc_permit"])
def test_cta_groups_are_not_mixed(instruction):
    body = without(tcgen05(16), f"tcgen05.{instruction}.cta_group::1", f"tcgen05.{instruction}.cta_group::2")
    with pytest.raises(PtxError, match="cta_group::. in a kernel that has cta_group::. too"):
        product(16, body)


@pytest.mark.parametrize("second, fine", [("use", True), ("lastuse", True), ("use.other", False)])
def test_the_collector(second, fine):
    """The next MMA may use a matrix that an MMA has kept."""
    other = "xor.b64 %x10, %x10, 64;\n" if second.endswith("other") else ""
    first = mma(16).replace("block16", "block16.collector::a::fill")
    again = mma(16).replace("block16", "block16.collector::a::" + second.split(".")[0])
    if fine:
        got, expected = product(16, tcgen05(16, first + again))
        assert np.array_equal(got, expected)
    else:
        with pytest.raises(EmulatorError, match="was not kept"):
            product(16, tcgen05(16, first + other + again))
