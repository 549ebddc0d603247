"""Copies, tensor maps, tensor cores and their hazards in the emulator, against the layouts of the PTX ISA.

Kernels here are PTX text: what one line does is visible, and a line can be left out.
"""

import struct

import numpy as np
import pytest

from tests.emulator import EmulatorError, Launch, emulate
from tests.emulator.launch import Tensor, address_of, device_memory, pack, programs, start

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
ALL = ("eager", "lazy", "reverse-lazy", "random:1", "random:2", "slow:1", "slow:2")
MISTAKES = ("lazy", "reverse-lazy", "random:1")
BAR, DATA = 1024, 2048  # the kernels here keep their mbarriers in the first KiB of dynamic shared memory
assert DATA % 1024 == 0


def kernel(body, parameters=()):
    """A kernel whose statements are `body`; %t is the thread's number, %p1 whether that is 0."""
    declared = ",\n".join(f".param {p}" for p in (".u64 out", *parameters))
    return f"""{HEAD}
.visible .entry test({declared})
{{
    .reg .pred %p<16>;
    .reg .b16 %h<16>;
    .reg .b32 %r<300>;
    .reg .b64 %x<64>;
    .reg .b32 %t;
    .reg .b32 %bar;
    .reg .b32 %data;
    .reg .b64 %out;
    mov.u32 %t, %tid.x;
    mov.b32 %bar, smem;
    add.u32 %data, %bar, {DATA - BAR};
    ld.param.u64 %out, [out];
    setp.eq.u32 %p1, %t, 0;
{body}
    ret;
}}
"""


def run(body, out, arguments=(), parameters=(), threads=32, schedule="eager", cluster=1, **options):
    ptx, size = kernel(body, parameters), (cluster, 1, 1)
    emulate(ptx, [out, *arguments], cluster, threads, 65536, size, schedule=schedule, **options)
    return out


def without(text, part, by=""):
    assert part in text
    return text.replace(part, by)


FENCE = "fence.mbarrier_init.release.cluster; "


def initialise(count=1, bars=1):
    return (
        "".join(f"@%p1 mbarrier.init.shared.b64 [%bar+{8 * i}], {count};\n" for i in range(bars))
        + FENCE
        + "bar.sync 0;\n"
    )


def wait(bar=0, parity=0):
    label = f"WAIT{bar}_{parity}"
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p2, [%bar+{8 * bar}], {parity};\n@!%p2 bra {label};\n"


def dump(words, source="%data"):
    """`words` 32-bit words from shared memory to out, by the first warp."""
    return "".join(
        f"mad.lo.u32 %r1, %t, 4, {source}; ld.shared.b32 %r2, [%r1+{128 * i}];"
        f"mad.wide.u32 %x1, %t, 4, %out; st.global.b32 [%x1+{128 * i}], %r2;\n"
        for i in range(words // 32)
    )


# ---- tensor maps ----
def tensor_map(address, bits_code, dims, strides, box, swizzle):
    """The map's bytes; strides in bytes, of dimensions 1 and up; swizzle 0 to 3 for 0, 32, 64, 128 bytes."""
    raw = bytearray(128)
    struct.pack_into("<QI", raw, 0, address, 0x40002 | (len(dims) - 1) << 4 | bits_code << 7 | swizzle << 13)
    struct.pack_into(f"<{len(strides)}I", raw, 12, *(s // 16 for s in strides))
    struct.pack_into(f"<{len(dims)}I", raw, 32, *(d - 1 for d in dims))
    raw[55 : 55 + len(box)] = bytes(b - 1 for b in box)
    return bytes(raw)


def place_of(address, span):
    """The swizzling figures of the PTX ISA: 16-byte piece c of 128-byte line l moves to c ^ (l mod span/16)."""
    if span == 0:
        return address
    line, piece, byte = address // 128, address // 16 % 8, address % 16
    return line * 128 + (piece ^ line % (span // 16)) * 16 + byte


LOAD = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%data], [%x9, {%r8, %r9}], [%bar];\n"
)


def load_tile(x, y, size):
    return (
        "ld.param.u64 %x9, [map];\n" + initialise()
        + f"@%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], {size};\n"
        + f"mov.b32 %r8, {x}; mov.b32 %r9, {y}; @%p1 " + LOAD + wait()
    )  # fmt: skip


def with_map(body, out, image, make_map, schedule="eager"):
    """The kernel gets the address of a tensor map in memory, made for where the image lies."""
    memory = device_memory([out, image])
    encoded = np.frombuffer(make_map(address_of(image, memory)), np.uint8).copy()
    Tensor.of(encoded).place(memory)
    program = programs(kernel(body, [".u64 map"]))["test"]
    parameters = pack(program, [out, encoded], memory)
    start(program, Launch("test", (1, 1, 1), (32, 1, 1), 65536, parameters=parameters), memory, schedule)
    return out


@pytest.mark.parametrize("schedule", ("eager", "lazy"))
@pytest.mark.parametrize("swizzle, span", enumerate((0, 32, 64, 128)))
def test_tensor_load_swizzles(swizzle, span, schedule):
    """Rows as long as the swizzle, 16 of them; the tile hangs over the right and lower edge, where zeros come in."""
    row = span or 128
    image = np.random.default_rng(0).integers(1, 256, (20, 256), np.uint8)
    x, y = 256 - row // 2, 9
    out = np.zeros((16, row), np.uint8)
    make = lambda address: tensor_map(address, 0, (256, 20), (256,), (row, 16), swizzle)
    with_map(load_tile(x, y, 16 * row) + dump(4 * row), out, image, make, schedule)
    tile = np.zeros((16, row), np.uint8)
    tile[:11, : row // 2] = image[9:, x:]
    expected = np.zeros(16 * row, np.uint8)
    for i in range(16 * row):
        expected[place_of(i, span)] = tile.ravel()[i]
    np.testing.assert_array_equal(out.ravel(), expected)


def test_tensor_store_skips_what_is_outside():
    image = np.zeros((4, 64), np.uint8)
    out = np.zeros(32, np.uint32)
    body = """ld.param.u64 %x9, [map]; mad.lo.u32 %r1, %t, 4, %data; add.u32 %r2, %t, 0x01010101;
        st.shared.b32 [%r1], %r2; fence.proxy.async.shared::cta; bar.sync 0;
        mov.b32 %r3, 48; mov.b32 %r4, 2;
        @%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%x9, {%r3, %r4}], [%data];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    for schedule in ALL:
        image[:] = 0
        make = lambda address: tensor_map(address, 0, (64, 4), (64,), (32, 4), 0)
        with_map(body, out, image, make, schedule)
        stored = np.arange(32, dtype=np.uint32) + 0x01010101
        expected = np.zeros((4, 64), np.uint8)
        expected[2:, 48:] = stored.view(np.uint8).reshape(4, 32)[:2, :16]
        np.testing.assert_array_equal(image, expected)


def test_tensor_load_outside_of_a_buffer():
    image, out = np.ones((8, 64), np.uint8), np.zeros(32, np.uint32)
    too_tall = lambda address: tensor_map(address, 0, (64, 9), (64,), (64, 16), 0)
    with pytest.raises(EmulatorError, match="never written or outside|beyond"):
        with_map(load_tile(0, 0, 1024), out, image, too_tall)


def test_four_bit_elements():
    """Coordinates and sizes count elements: 128 of them are 64 bytes."""
    image, out = (
        np.arange(1, 1 + 8 * 64, dtype=np.uint16).view(np.uint8)[::2].copy().reshape(8, 64),
        np.zeros(128, np.uint32),
    )
    make = lambda address: tensor_map(address, 11, (128, 8), (64,), (64, 8), 1)
    with_map(load_tile(64, 0, 256) + dump(64), out, image, make)
    tile, expected = image[:, 32:].ravel(), np.zeros(256, np.uint8)
    for i in range(256):
        expected[place_of(i, 32)] = tile[i]
    np.testing.assert_array_equal(out[:64].view(np.uint8), expected)


# ---- bulk copies ----
BULK = """@%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], 512;
    ld.param.u64 %x2, [in]; mov.b32 %r7, 512;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%data], [%x2], %r7, [%bar];\n"""


def bulk(body, schedule="eager", **options):
    source = np.arange(128, dtype=np.uint32)
    return run(initialise() + body, np.zeros(128, np.uint32), [source], [".u64 in"], schedule=schedule, **options)


@pytest.mark.parametrize("schedule", ALL)
def test_bulk_copy(schedule):
    assert bulk(BULK + wait() + dump(128), schedule).tolist() == list(range(128))


def test_bulk_copy_mistakes():
    for schedule in MISTAKES[:2]:
        with pytest.raises(EmulatorError, match="never written|still writing"):  # a dropped wait
            bulk(BULK + dump(128), schedule)
    assert bulk(BULK + dump(128), "eager").any()  # which an eager machine does not notice
    for schedule in ALL:
        with pytest.raises(EmulatorError, match="deadlock(.*\n)*.*16 bytes did not come"):
            bulk(BULK.replace("[%bar], 512", "[%bar], 528") + wait() + dump(128), schedule)
        with pytest.raises(
            EmulatorError, match="-496 bytes|deadlock|still writing|never written|-?\\d+ bytes still expected"
        ):
            bulk(BULK.replace("[%bar], 512", "[%bar], 16") + wait() + dump(128), schedule)
        with pytest.raises(EmulatorError, match="deadlock|still writing|never written|bytes still expected"):
            bulk(BULK.replace("@%p1 cp.async", "cp.async") + wait() + dump(128), schedule)  # 32 copies
    with pytest.raises(EmulatorError, match="not aligned to 16"):
        bulk(BULK.replace("[%x2]", "[%x2+8]") + wait())
    with pytest.raises(EmulatorError, match="outside of|beyond"):
        bulk(BULK.replace("[%x2]", "[%x2+16]") + wait())


def test_overwriting_what_is_being_read():
    """The source of a bulk store may change only after wait_group.read."""
    body = """mad.lo.u32 %r1, %t, 16, %data; st.shared.v4.b32 [%r1], {%t, %t, %t, %t}; fence.proxy.async.shared::cta;
        bar.sync 0; mov.b32 %r7, 512; @%p1 cp.async.bulk.global.shared::cta.bulk_group [%out], [%data], %r7;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; mov.b32 %r2, 0;
        st.shared.b32 [%r1], %r2;\n"""
    for schedule in ALL:
        assert run(body, np.zeros((32, 4), np.uint32), schedule=schedule)[:, 0].tolist() == list(range(32))
    wrong = body.replace("cp.async.bulk.wait_group.read 0;", "")
    with pytest.raises(EmulatorError, match="still reading"):
        run(wrong, np.zeros((32, 4), np.uint32), schedule="lazy")
    unfenced = body.replace("fence.proxy.async.shared::cta;", "")
    for schedule in ALL:
        with pytest.raises(EmulatorError, match="without a fence.proxy.async"):
            run(unfenced, np.zeros((32, 4), np.uint32), schedule=schedule)
    late = body.replace("fence.proxy.async.shared::cta;", "").replace("bar.sync 0;", "bar.sync 0; fence.proxy.async;")
    run(late, np.zeros((32, 4), np.uint32))  # the fence may come after the barrier, on the copying side


def test_cp_async_groups():
    body = """ld.param.u64 %x2, [in]; mad.wide.u32 %x2, %t, 16, %x2; mad.lo.u32 %r1, %t, 16, %data; mov.b32 %r5, 4;
        cp.async.cg.shared.global [%r1], [%x2], 16; cp.async.commit_group;
        cp.async.ca.shared.global [%r1+512], [%x2], 16, %r5; cp.async.commit_group;
        cp.async.wait_group 1; ld.shared.b32 %r2, [%r1+4]; cp.async.wait_group 0;
        ld.shared.v2.b32 {%r3, %r4}, [%r1+512];
        mad.wide.u32 %x3, %t, 16, %out; st.global.v4.b32 [%x3], {%r2, %r3, %r4, %r4};"""
    source, t = np.arange(128, dtype=np.uint32), np.arange(32)
    for schedule in ALL:
        got = run(body, np.zeros((32, 4), np.uint32), [source], [".u64 in"], schedule=schedule)
        np.testing.assert_array_equal(
            got[:, :3], np.stack([4 * t + 1, 4 * t, 0 * t], 1)
        )  # the rest is filled with zeros
    wrong = body.replace("wait_group 1", "wait_group 2")
    with pytest.raises(EmulatorError, match="still writing"):
        run(wrong, np.zeros((32, 4), np.uint32), [source], [".u64 in"], schedule="lazy")


def test_barriers_are_shown_to_the_async_proxy():
    source = np.zeros(128, np.uint32)
    body = without(initialise(), FENCE) + BULK + wait()
    with pytest.raises(EmulatorError, match="no fence.mbarrier_init"):
        run(body, np.zeros(128, np.uint32), [source], [".u64 in"])


def test_the_kernel_before():
    """Under programmatic dependent launch: what it wrote may be used after griddepcontrol.wait, own or waited for."""
    source, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    use = "ld.param.u64 %x2, [in]; mad.wide.u32 %x3, %t, 4, %x2; {} ld.global.b32 %r2, [%x3];"
    use += "mad.wide.u32 %x4, %t, 4, %out; st.global.b32 [%x4], %r2;"
    copy = initialise() + "{}" + BULK.replace("512;\n", "128;\n").replace("%r7, 512", "%r7, 128") + wait()

    def check(body, threads=32, fine=True):
        for schedule in ALL:
            if fine:
                run(body, out, [source], [".u64 in"], threads, schedule, after_wait=[source])
            else:
                with pytest.raises(EmulatorError, match="griddepcontrol.wait was not called"):
                    run(body, out, [source], [".u64 in"], threads, schedule, after_wait=[source])

    check(use.format("griddepcontrol.wait;"))
    check(use.format(""), fine=False)
    check(copy.format("griddepcontrol.wait;"))
    check(copy.format(""), fine=False)
    one_waits = (
        "setp.lt.u32 %p7, %t, 32; @%p7 griddepcontrol.wait; {} @%p7 bra END; sub.u32 %t, %t, 32; " + use + "END:"
    )
    check(one_waits.format("bar.sync 0;", ""), threads=64)
    with pytest.raises(EmulatorError, match="griddepcontrol.wait was not called"):
        run(one_waits.format("", ""), out, [source], [".u64 in"], 64, after_wait=[source])
    assert out.tolist() == list(range(32))


# ---- races ----
HANDOVER = """mad.lo.u32 %r1, %t, 4, %data; setp.ge.u32 %p5, %t, 32; @%p5 bra READ;
    st.shared.b32 [%r1], %t; {release} bra END;
    READ: {acquire} ld.shared.b32 %r2, [%r1+-128]; mad.wide.u32 %x1, %t, 4, %out; st.global.b32 [%x1+-128], %r2; END:"""
POLL = "mov.b32 %r5, smem; POLL: ld.acquire.cta.shared.b32 %r6, [%r5+512]; setp.ne.u32 %p6, %r6, 32; @%p6 bra POLL;"
HANDOVERS = {
    "barrier": ("bar.arrive 1, 64;", "bar.sync 1, 64;"),
    "mbarrier": ("mbarrier.arrive.shared.b64 %x5, [%bar];", wait()),
    "atomic": ("atom.shared.add.u32 %r7, [%bar+512], 1;", POLL),
    "fence and flag": ("bar.warp.sync -1; fence.acq_rel.cta; atom.shared.add.u32 %r7, [%bar+512], 1;", POLL),
}


def handover(release, acquire, schedule):
    zero = "mov.b32 %r4, 0; @%p1 st.shared.b32 [%bar+512], %r4; bar.sync 0;"
    body = initialise(count=32) + zero + HANDOVER.format(release=release, acquire=acquire)
    return run(body, np.zeros(32, np.uint32), threads=64, schedule=schedule)


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("name", HANDOVERS)
def test_ordered_accesses(name, schedule):
    assert handover(*HANDOVERS[name], schedule).tolist() == list(range(32))


def test_unordered_accesses():
    """A missing barrier is found even where the order of running makes the values right."""
    for schedule in ("eager", "lazy", "random:1", "random:2"):
        with pytest.raises(EmulatorError, match="no barrier between them|never written"):
            handover("", "", schedule)
    # Overwritten before who reads is known to have read.
    swap = """mad.lo.u32 %r1, %t, 4, %data; st.shared.b32 [%r1], %t; bar.sync 0; xor.b32 %r2, %t, 32;
        mad.lo.u32 %r3, %r2, 4, %data; ld.shared.b32 %r4, [%r3]; {} st.shared.b32 [%r1], %r4; bar.sync 0;"""
    run(swap.format("bar.sync 0;"), np.zeros(32, np.uint32), threads=64)
    with pytest.raises(EmulatorError, match="(read|written) by CTA 0 warp . with no barrier"):
        run(swap.format(""), np.zeros(32, np.uint32), threads=64)


def test_copies_among_accesses():
    """A copy out needs a barrier after the other warps' stores; a copy in, one after their loads."""
    out = """mad.lo.u32 %r1, %t, 4, %data; st.shared.b32 [%r1], %t; fence.proxy.async.shared::cta; {} mov.b32 %r7, 256;
        @%p1 cp.async.bulk.global.shared::cta.bulk_group [%out], [%data], %r7; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;"""
    for schedule in ALL:
        got = run(out.format("bar.sync 0;"), np.zeros(64, np.uint32), threads=64, schedule=schedule)
        assert got.tolist() == list(range(64))
        with pytest.raises(EmulatorError, match="no barrier between them|never written"):
            run(out.format(""), np.zeros(64, np.uint32), threads=64, schedule=schedule)
    second = BULK.replace("[%bar]", "[%bar+8]")
    twice = (
        initialise(bars=2)
        + BULK
        + wait()
        + "mad.lo.u32 %r1, %t, 4, %data; ld.shared.b32 %r2, [%r1]; {}"
        + second
        + wait(1)
    )
    source = [np.arange(128, dtype=np.uint32)]
    for schedule in ALL:
        run(twice.format("bar.sync 0;"), np.zeros(1, np.uint32), source, [".u64 in"], 64, schedule)
    with pytest.raises(EmulatorError, match="starts writing .* read by CTA 0 warp 1 with no barrier"):
        run(twice.format(""), np.zeros(1, np.uint32), source, [".u64 in"], 64, "reverse-lazy")
    with pytest.raises(EmulatorError, match="still writing"):
        run(twice.format(""), np.zeros(1, np.uint32), source, [".u64 in"], 64, "lazy")


# ---- wgmma ----
def bf16(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def small_integers(rng, shape):
    """Products and sums of these are exact in any order."""
    return rng.integers(-4, 5, shape).astype(np.float64)


def descriptor(start, stride, swizzle, wgmma, leading=16):
    mode = (
        {0: 0, 128: 1, 64: 2, 32: 3}[swizzle] << 62 if wgmma else {0: 0, 128: 2, 64: 4, 32: 6}[swizzle] << 61 | 1 << 46
    )
    return (start >> 4) | leading >> 4 << 16 | stride >> 4 << 32 | mode


def laid_out(matrix, span):
    """Rows of 32 bytes, K-major: groups of 8 rows; within a group rows are `span` apart, pieces swizzled."""
    raw = matrix.view(np.uint8).reshape(len(matrix), 32)
    if not span:  # 8 rows of 16 bytes are contiguous; the second piece of each row follows after all of the first
        return np.concatenate([raw[:, :16].ravel(), raw[:, 16:].ravel()])
    memory = np.zeros(len(matrix) * span, np.uint8)
    for row in range(len(matrix)):
        for byte in range(32):
            memory[place_of(row * span + byte, span)] = raw[row, byte]
    return memory


def fill(size, to=0):
    """A bulk copy of `size` bytes from parameter `in` to data + to."""
    return (
        initialise() + f"@%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], {size}; ld.param.u64 %x2, [in];"
        f" mov.b32 %r7, {size}; add.u32 %r8, %data, {to};"
        " @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%x2], %r7, [%bar];\n" + wait()
    )  # fmt: skip


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
    # Registers that are reused before the wait spoil the product when it is computed late.
    wrong = body.replace("wgmma.commit_group", "mov.b32 %r50, 0; wgmma.commit_group")
    got = run(wrong, np.zeros((128, 4), np.float32), arguments, [".u64 in", ".u64 a"], threads=128, schedule="lazy")
    assert (got != result.reshape(8, 8, 8)[0, 0, 0]).any()


# ---- tcgen05 ----
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCALES = {0x38: 1.0, 0x30: 0.5, 0x40: 2.0, 0x34: 0.75, 0x08: 2.0**-6}


def block_scaled(rng, rows):
    """(codes packed, scale bytes, values) of a [rows, 64] matrix."""
    codes = rng.integers(0, 16, (rows, 64)).astype(np.uint8)
    bytes_of = np.array(list(SCALES), np.uint8)[rng.integers(0, len(SCALES), (rows, 4))]
    scale = np.vectorize(SCALES.get)(bytes_of)
    return codes[:, ::2] | codes[:, 1::2] << 4, bytes_of, E2M1[codes] * np.repeat(scale, 16, 1)


def scale_tile(scales):
    """128 x 4 bytes as tcgen05.cp wants them: row r, block j at 16 (r mod 32) + 4 (r / 32) + j."""
    tile = np.zeros(512, np.uint8)
    for r, j in np.ndindex(scales.shape):
        tile[16 * (r % 32) + 4 * (r // 32) + j] = scales[r, j]
    return tile


def instruction(n, m=128, negate_a=0):
    return 1 << 7 | 1 << 10 | negate_a << 13 | n // 8 << 17 | m // 128 << 27


def nvfp4(n, seed=0):
    rng = np.random.default_rng(seed)
    (a, sa, x), (b, sb, y) = block_scaled(rng, 128), block_scaled(rng, n)
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
        + "bar.sync 0; @!%p5 bra FREED; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
        " tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512; FREED:\n"
    )  # fmt: skip


def product(n, body=None, schedule="eager", seed=0):
    data, expected = nvfp4(n, seed)
    got = run(body or tcgen05(n), np.zeros((128, n), np.float32), [data], [".u64 in"], threads=128, schedule=schedule)
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


MAJOR = str(descriptor(DATA, 1024, 128, False))
MUTATIONS = {
    "no wait for the operands": lambda s: without(s, wait(0)),
    "no wait for the product": lambda s: without(s, wait(1)),
    "the wrong parity": lambda s: without(s, wait(1), wait(1, 1)),
    "too many bytes expected": lambda s: without(s, "[%bar], 50688", "[%bar], 50704"),
    "too few bytes expected": lambda s: without(s, "[%bar], 50688", "[%bar], 50672"),
    "no commit": lambda s: without(s, "@%p1 tcgen05.commit", "@%p4 tcgen05.commit"),
    "no wait for the registers": lambda s: without(s, "tcgen05.wait::ld.sync.aligned;"),
    "TMEM freed before it is read": lambda s: without(s, "tcgen05.fence::after_thread_sync;",
        "@!%p5 bra EARLY; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512; EARLY:"),
    "TMEM never freed": lambda s: without(s, "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;"),
    "accumulates into nothing": lambda s: without(s, "[%r22], %p4", "[%r22], %p3"),
    "every lane multiplies": lambda s: without(s, "@%p1 tcgen05.mma", "tcgen05.mma").replace("], %p4;", "], %p3;"),
    "scale factors not copied": lambda s: without(s, "@%p1 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r21]",
                                                  "@%p4 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r21]"),
    "scale factors swapped": lambda s: without(s, "[%r21], [%r22]", "[%r22], [%r21]"),
    "another warp's lanes": lambda s: without(s, "shl.b32 %r30, %r30, 21;", "shl.b32 %r30, %r30, 22;"),
    "columns beyond the allocation": lambda s: without(s, "%r19, 512", "%r19, 256").replace("%r20, 512", "%r20, 256"),
    "A and B swapped": lambda s: without(s, "%x10, %x11", "%x11, %x10"),
    "a swizzle of 64": lambda s: without(s, MAJOR, str(descriptor(DATA, 1024, 64, False))),
    "half of the stride": lambda s: without(s, MAJOR, str(descriptor(DATA, 512, 128, False))),
    "a reserved bit": lambda s: without(s, f"%r24, {instruction(16)}", f"%r24, {instruction(16) | 1 << 24}"),
    "N of 0": lambda s: without(s, f"%r24, {instruction(16)}", f"%r24, {instruction(0)}"),
    "no allocation": lambda s: without(s, "setp.lt.u32 %p5, %t, 32;", "setp.lt.u32 %p5, %t, 0;"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_mistakes_are_caught(name):
    """By an error, or by a wrong result, in the lazy order."""
    body = MUTATIONS[name](tcgen05(16))
    try:
        got, expected = product(16, body, "lazy")
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


def test_tmem_stores_and_other_shapes():
    """What .32x32b stores, .16x256b reads as the accumulator fragment of an MMA."""
    body = (
        initialise() + """mov.b32 %r19, 32; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%bar+64], %r19;
        ld.shared.b32 %r20, [%bar+64];\n"""
        + "".join(f"mad.lo.u32 %r{100 + i}, %t, 8, {i};" for i in range(8))
        + "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r20], {%r100, %r101, %r102, %r103, %r104, %r105, %r106, %r107};\n"
        "tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r1, %r2, %r3, %r4}, [%r20];\n"
        "add.u32 %r21, %r20, 1048576; tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r5, %r6, %r7, %r8}, [%r21];\n"
        "tcgen05.wait::ld.sync.aligned; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;"
        "mad.wide.u32 %x1, %t, 32, %out;"
        "st.global.v4.b32 [%x1], {%r1, %r2, %r3, %r4}; st.global.v4.b32 [%x1+16], {%r5, %r6, %r7, %r8};"
    )  # fmt: skip
    for schedule in ALL:
        got = run(body, np.zeros((32, 8), np.uint32), schedule=schedule)
        for t, register in np.ndindex(32, 8):
            row, column = t // 4 + 8 * (register // 2), t % 4 * 2 + register % 2
            assert got[t, register] == 8 * row + column
    with pytest.raises(EmulatorError, match="still writing"):
        run(without(body, "tcgen05.wait::st.sync.aligned;"), np.zeros((32, 8), np.uint32), schedule="lazy")


# ---- clusters ----
@pytest.mark.parametrize("schedule", ALL)
def test_remote_arrival_and_shared_memory(schedule):
    """CTA 1 reads what CTA 0 wrote, through mapa, between cluster barriers."""
    body = initialise() + """mov.u32 %r2, %cluster_ctarank; mad.lo.u32 %r3, %t, 4, %data; mad.lo.u32 %r4, %r2, 1000, %t;
        st.shared.b32 [%r3], %r4; barrier.cluster.arrive.release; barrier.cluster.wait.acquire; xor.b32 %r5, %r2, 1;
        mapa.shared::cluster.u32 %r6, %r3, %r5; ld.shared::cluster.b32 %r7, [%r6];
        mapa.shared::cluster.u32 %r8, %bar, %r5; @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
        """ + wait() + """mad.lo.u32 %r9, %r2, 32, %t; mad.wide.u32 %x1, %r9, 4, %out; st.global.b32 [%x1], %r7;
        barrier.cluster.arrive; barrier.cluster.wait;"""  # fmt: skip
    got = run(body, np.zeros(64, np.uint32), schedule=schedule, cluster=2)
    assert got.tolist() == [1000 + t for t in range(32)] + list(range(32))


def test_a_cta_that_has_ended():
    body = (
        initialise()
        + """mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p3, %r2, 0; @%p3 bra END; mov.b32 %r5, 0;
        mapa.shared::cluster.u32 %r6, %data, %r5; st.shared::cluster.b32 [%r6], %r5; END:"""
    )
    with pytest.raises(EmulatorError, match="which has ended"):
        run(body, np.zeros(64, np.uint32), schedule="eager", cluster=2)


@pytest.mark.parametrize("schedule", ALL)
def test_multicast(schedule):
    """One CTA's copy lands in both, and completes at both mbarriers."""
    body = initialise() + """mov.u32 %r2, %cluster_ctarank; @%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], 128;
        barrier.cluster.arrive; barrier.cluster.wait; setp.eq.and.u32 %p3, %r2, 1, %p1;
        mov.b32 %r7, 128; mov.b16 %h1, 3; ld.param.u64 %x2, [in];
        @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%data], [%x2], %r7, [%bar], %h1;
        """ + wait() + """mad.lo.u32 %r1, %t, 4, %data; ld.shared.b32 %r3, [%r1]; mad.lo.u32 %r9, %r2, 32, %t;
        mad.wide.u32 %x1, %r9, 4, %out; st.global.b32 [%x1], %r3;"""  # fmt: skip
    source = np.arange(100, 132, dtype=np.uint32)
    got = run(body, np.zeros(64, np.uint32), [source], [".u64 in"], schedule=schedule, cluster=2)
    assert got.tolist() == [*range(100, 132)] * 2
