"""Copies, tensor maps, barriers of several CTAs, and races in the emulator, against the layouts of the PTX ISA."""

import numpy as np
import pytest

from tests.emulator import EmulatorError, Launch
from tests.emulator.launch import Tensor, address_of, device_memory, pack, programs, start
from tests.emulator.ptx import ALL, FENCE, MISTAKES, dump, initialise, kernel, place_of, run, tensor_map, wait, without

# ---- tensor maps ----
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%data], [%x9, {%r8, %r9}], [%bar];\n"
)


def load_tile(x, y, size):
    return (
        "ld.param.u64 %x9, [map];\n" + initialise()
        + f"@%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], {size};\n"
        + f"mov.b32 %r8, {x}; mov.b32 %r9, {y}; @%p1 " + LOAD + wait()
    )  # fmt: skip


def with_map(body, out, image, make_map, schedule="eager", cluster=1):
    """The kernel gets the address of a tensor map in memory, which is made for the image's address."""
    memory = device_memory([out, image])
    encoded = np.frombuffer(make_map(address_of(image, memory)), np.uint8).copy()
    Tensor.of(encoded).place(memory)
    program = programs(kernel(body, [".u64 map"]))["test"]
    parameters = pack(program, [out, encoded], memory)
    size = (cluster, 1, 1)
    start(program, Launch("test", size, (32, 1, 1), 65536, cluster=size, parameters=parameters), memory, schedule)
    return out


@pytest.mark.parametrize("schedule", ("eager", "lazy"))
@pytest.mark.parametrize("swizzle, span", list(enumerate((0, 32, 64, 128))))
def test_tensor_load_swizzles(swizzle, span, schedule):
    """16 rows as long as the swizzle; the tile reaches beyond the right and lower edge, where zeros are loaded."""
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
    """Coordinates and sizes count elements: 128 elements are 64 bytes."""
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


FENCE_MAP = "fence.proxy.tensormap::generic.acquire.gpu [%x9], 128;"
CHANGED_MAP = """ld.param.u64 %x9, [map]; mad.lo.u32 %r1, %t, 4, %data; mad.wide.u32 %x4, %t, 4, %x9;
    setp.lt.u32 %p5, %t, 16; @%p5 ld.global.b32 %r2, [%x4]; @%p5 st.shared.b32 [%r1+4096], %r2; bar.sync 0;
    ld.param.u64 %x5, [in]; add.u32 %r3, %data, 4096; mov.b32 %r4, 6; mov.b32 %r5, 4; mov.b64 %x6, 128;
    @%p1 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r3], %x5;
    @%p1 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r3], 1, %r4;
    @%p1 tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r3], 1, %r5;
    @%p1 tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r3], 0, %x6; bar.sync 0;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%x9], [%r3], 128;
    """ + FENCE_MAP  # fmt: skip


def load_with_changed_map(body, schedule="lazy"):
    """Change a map for a [4, 64] matrix into one for every second row of a [12, 64] matrix elsewhere."""
    small, image = np.zeros((4, 64), np.uint8), np.arange(768, dtype=np.uint16).astype(np.uint8).reshape(12, 64)
    out = np.zeros(64, np.uint32)
    memory = device_memory([out, image, small])
    encoded = np.frombuffer(tensor_map(address_of(small, memory), 0, (64, 4), (64,), (32, 1), 0), np.uint8).copy()
    Tensor.of(encoded).place(memory)
    program = programs(kernel(body, [".u64 map", ".u64 in"]))["test"]
    launch = Launch("test", (1, 1, 1), (32, 1, 1), 65536, parameters=pack(program, [out, encoded, image], memory))
    start(program, launch, memory, schedule)
    return out.view(np.uint8)[:128].reshape(4, 32), image[::2][4:, 32:]


def test_a_changed_tensor_map():
    body = CHANGED_MAP + load_tile(32, 4, 128) + dump(32)
    for schedule in ("eager", "lazy"):
        found, expected = load_with_changed_map(body, schedule)
        np.testing.assert_array_equal(found[:2], expected)  # its sixth row is the last
        assert not found[2:].any()
    for wrong, message in (
        (without(body, FENCE_MAP), "was changed, and no fence.proxy.tensormap"),
        (without(body, "%x6, 128", "%x6, 120"), "not a multiple of 16"),
        (body.replace("[%r3]", "[%r3+64]"), "not aligned to 128"),
    ):
        with pytest.raises(EmulatorError, match=message):
            load_with_changed_map(wrong)


def test_prefetches():
    """They change nothing, but what they name must exist."""
    image, out = np.arange(512, dtype=np.uint16).view(np.uint8).reshape(16, 64), np.zeros(64, np.uint32)
    make = lambda address: tensor_map(address, 0, (64, 16), (64,), (64, 4), 0)
    body = """ld.param.u64 %x9, [map]; mov.b32 %r8, 0; mov.b32 %r9, 8; mov.b32 %r7, 128; ld.global.b64 %x7, [%x9];
        cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%x9, {%r8, %r9}];
        cp.async.bulk.prefetch.L2.global [%x7], %r7;\n"""
    with_map(body + load_tile(0, 8, 256) + dump(64), out, image, make)
    assert np.array_equal(out.view(np.uint8).reshape(4, 64), image[8:12])
    for wrong, message in (("%r7, 2048", "outside of"), ("%r7, 8", "not aligned to 16")):
        with pytest.raises(EmulatorError, match=message):
            with_map(without(body, "%r7, 128", wrong), out, image, make)
    with pytest.raises(EmulatorError, match="does not begin at a multiple of 16"):
        with_map(without(body, "%r8, 0", "%r8, 8"), out, image, make)


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
        with pytest.raises(EmulatorError, match="never written|still writing"):  # a missing wait
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
    """Its results may be used after griddepcontrol.wait, one's own or that of a warp that was waited for."""
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
RELAXED_WAIT = wait().replace(".parity.", ".parity.relaxed.cta.")
ONE_LANE = "elect.sync %r9|%p6, -1; @%p6 mbarrier.arrive.shared.b64 %x5, [%bar], 32;"
HANDOVERS = {
    "barrier": ("bar.arrive 1, 64;", "bar.sync 1, 64;"),
    "mbarrier": ("mbarrier.arrive.shared.b64 %x5, [%bar];", wait()),
    "mbarrier, one lane": ("bar.warp.sync -1;" + ONE_LANE, wait()),
    "atomic": ("atom.shared.add.u32 %r7, [%bar+512], 1;", POLL),
    "fence and relaxed arrival": ("fence.acq_rel.cta; mbarrier.arrive.relaxed.cta.shared.b64 %x5, [%bar];", wait()),
    "relaxed wait and fence": ("mbarrier.arrive.shared.b64 %x5, [%bar];", RELAXED_WAIT + "fence.acq_rel.cta;"),
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
    """A missing barrier is found even if the order of running makes the values right."""
    for schedule in ("eager", "lazy", "random:1", "random:2"):
        with pytest.raises(EmulatorError, match="no barrier between them|never written"):
            handover("", "", schedule)
        with pytest.raises(EmulatorError, match="no barrier between them|never written"):
            handover("mbarrier.arrive.relaxed.cta.shared.b64 %x5, [%bar];", wait(), schedule)
        with pytest.raises(EmulatorError, match="no barrier between them|never written"):
            handover("mbarrier.arrive.shared.b64 %x5, [%bar];", RELAXED_WAIT, schedule)
        with pytest.raises(EmulatorError, match=r"written by CTA 0 warp 0 with .* \(bar.warp.sync\)|never written"):
            handover(ONE_LANE, wait(), schedule)
    # Overwritten before the reader is known to have read.
    swap = """mad.lo.u32 %r1, %t, 4, %data; st.shared.b32 [%r1], %t; bar.sync 0; xor.b32 %r2, %t, 32;
        mad.lo.u32 %r3, %r2, 4, %data; ld.shared.b32 %r4, [%r3]; {} st.shared.b32 [%r1], %r4; bar.sync 0;"""
    run(swap.format("bar.sync 0;"), np.zeros(32, np.uint32), threads=64)
    with pytest.raises(EmulatorError, match="(read|written) by CTA 0 warp . with no barrier"):
        run(swap.format(""), np.zeros(32, np.uint32), threads=64)


def test_one_lane_arrives_for_what_it_did():
    """And for what it knows of others, but not for what other lanes read."""
    body = initialise(bars=2, count=32) + """mov.b32 %r4, 7; setp.ge.u32 %p5, %t, 32; @%p5 bra OTHER;
        @%p1 st.shared.b32 [%data], %r4; @%p1 mbarrier.arrive.shared.b64 %x5, [%bar], 32; bra END;
        OTHER: """ + wait() + """{} ld.shared.b32 %r2, [%data]; {} setp.eq.u32 %p6, %t, 32;
        @%p6 mbarrier.arrive.shared.b64 %x5, [%bar+8], 32; END:
        @!%p5 bra LAST; bra DONE; LAST: """ + wait(1) + "@%p1 st.shared.b32 [%data], %r4; DONE:"  # fmt: skip
    run(body.format("", "bar.warp.sync -1;"), np.zeros(32, np.uint32), threads=64, schedule="lazy")
    run(body.format("@%p6", ""), np.zeros(32, np.uint32), threads=64, schedule="lazy")
    with pytest.raises(EmulatorError, match=r"read by CTA 0 warp 1 with .* \(bar.warp.sync\)"):
        run(body.format("", ""), np.zeros(32, np.uint32), threads=64, schedule="lazy")


@pytest.mark.parametrize("bits", (8, 16))
def test_unordered_narrow_accesses(bits):
    """Warps may share a word, but no part of it that one of them writes; words are checked with their parts."""
    size = bits // 8
    body = f"""mad.lo.u32 %r1, %t, 4, %data; mov.b32 %r2, 0; st.shared.b32 [%r1], %r2; bar.sync 0;
        cvt.u16.u32 %h1, %t; add.u16 %h1, %h1, 7; and.b32 %r1, %t, 31; shr.u32 %r2, %t, 5;
        mad.lo.u32 %r1, %r1, 2, %r2; mad.lo.u32 %r1, %r1, {size}, %data; st.shared.u{bits} [%r1], %h1; {{}}
        mad.wide.u32 %x1, %t, 4, %out; cvt.u32.u16 %r3, %h2; st.global.b32 [%x1], %r3;"""
    own = f"ld.shared.u{bits} %h2, [%r1];"  # the warps take turns: each word is written by both
    others = f"{{}} xor.b32 %r1, %r1, {size}; " + own
    whole = "{} and.b32 %r2, %r1, -4; ld.shared.b32 %r3, [%r2]; cvt.u16.u32 %h2, %r3;"
    threads, low = np.arange(64), np.arange(64) % 32 // (3 - size) * (3 - size)
    in_word = (low + 7) | ((low + 39) << 8 if size == 1 else 0)
    for schedule in ("eager", "lazy", "reverse-lazy", "random:1"):

        def go(part, schedule=schedule):
            return run(body.format(part), np.zeros(64, np.uint32), threads=64, schedule=schedule)

        np.testing.assert_array_equal(go(own), threads + 7)
        np.testing.assert_array_equal(go(others.format("bar.sync 0;")), (threads ^ 32) + 7)
        np.testing.assert_array_equal(go(whole.format("bar.sync 0;")), in_word)
        for part in (others, whole):
            with pytest.raises(EmulatorError, match="(read|written) by CTA 0 warp . with no barrier"):
                go(part.format(""))


def test_unordered_copies_of_narrow_stores():
    """A bulk copy reads what another warp has written byte by byte."""
    body = """add.u32 %r1, %t, %data; cvt.u16.u32 %h1, %t; st.shared.u8 [%r1], %h1; fence.proxy.async.shared::cta; {}
        mov.b32 %r7, 64; setp.eq.u32 %p5, %t, 32;
        @%p5 cp.async.bulk.global.shared::cta.bulk_group [%out], [%data], %r7; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;"""
    for schedule in ("eager", "lazy"):
        out = run(body.format("bar.sync 0;"), np.zeros(64, np.uint8), threads=64, schedule=schedule)
        assert out.tolist() == list(range(64))
        with pytest.raises(EmulatorError, match="starts reading .* written by CTA 0 warp 0 with no barrier"):
            run(body.format(""), np.zeros(64, np.uint8), threads=64, schedule=schedule)


def test_copies_among_accesses():
    """A copy out needs a barrier after other warps' stores, a copy in one after their loads."""
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
    with pytest.raises(EmulatorError, match="still writing|written by CTA 0 warp 0 with no barrier"):
        run(twice.format(""), np.zeros(1, np.uint32), source, [".u64 in"], 64, "lazy")


# ---- clusters ----
@pytest.mark.parametrize("schedule", ALL)
def test_remote_arrival_and_shared_memory(schedule):
    """CTA 1 reads through mapa what CTA 0 wrote, between cluster barriers."""
    body = initialise() + """mov.u32 %r2, %cluster_ctarank; mad.lo.u32 %r3, %t, 4, %data; mad.lo.u32 %r4, %r2, 1000, %t;
        st.shared.b32 [%r3], %r4; barrier.cluster.arrive.release; barrier.cluster.wait.acquire; xor.b32 %r5, %r2, 1;
        mapa.shared::cluster.u32 %r6, %r3, %r5; ld.shared::cluster.b32 %r7, [%r6];
        mapa.shared::cluster.u32 %r8, %bar, %r5; @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
        """ + wait() + """mad.lo.u32 %r9, %r2, 32, %t; mad.wide.u32 %x1, %r9, 4, %out; st.global.b32 [%x1], %r7;
        barrier.cluster.arrive; barrier.cluster.wait;"""  # fmt: skip
    got = run(body, np.zeros(64, np.uint32), schedule=schedule, cluster=2)
    assert got.tolist() == [1000 + t for t in range(32)] + list(range(32))


# Each CTA writes into the other's memory; whether the waiting one sees that depends on the arrival and the wait.
MEET = """barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    mov.u32 %r2, %cluster_ctarank; xor.b32 %r5, %r2, 1; mad.lo.u32 %r3, %t, 4, %data;
    mad.lo.u32 %r4, %r2, 1000, %t; mapa.shared::cluster.u32 %r6, %r3, %r5;
    mapa.shared::cluster.u32 %r8, %bar, %r5; st.shared::cluster.b32 [%r6], %r4; bar.warp.sync -1;
    {} ld.shared.b32 %r7, [%r3];
    mad.lo.u32 %r9, %r2, 32, %t; mad.wide.u32 %x1, %r9, 4, %out; st.global.b32 [%x1], %r7;
    barrier.cluster.arrive; barrier.cluster.wait;"""
ACQUIRE = ".acquire.cluster"


def arrive_and_wait(arrival=".release.cluster", acquire=ACQUIRE, before="", after=""):
    arrive = f"@%p1 mbarrier.arrive{arrival}.shared::cluster.b64 _, [%r8];"
    return before + arrive + without(wait(), "parity.", f"parity{acquire}.") + after


def meet_and_check(meet, fine, **options):
    body, out = initialise() + MEET.format(meet), np.zeros(64, np.uint32)
    for schedule in ALL:
        if fine:
            run(body, out, schedule=schedule, cluster=2, **options)
            assert out.tolist() == [1000 + t for t in range(32)] + list(range(32))
            out[:] = 0
        else:
            with pytest.raises(EmulatorError, match="no barrier between them|never written"):
                run(body, out, schedule=schedule, cluster=2, **options)


@pytest.mark.parametrize("meet, fine", [
    (arrive_and_wait(), True),
    (arrive_and_wait(".relaxed.cluster"), False),
    (arrive_and_wait(".release.cta"), False),
    (arrive_and_wait(""), False),
    (arrive_and_wait(acquire=".relaxed.cluster"), False),
    (arrive_and_wait(acquire=".acquire.cta"), False),
    (arrive_and_wait(acquire=""), False),
    (arrive_and_wait(".relaxed.cluster", before="fence.acq_rel.cluster;"), True),
    (arrive_and_wait(".relaxed.cluster", before="fence.acq_rel.cta;"), False),
    (arrive_and_wait(acquire=".relaxed.cluster", after="fence.acq_rel.cluster;"), True),
    (arrive_and_wait(acquire=".relaxed.cluster", after="fence.acq_rel.cta;"), False),
    ("barrier.cluster.arrive; barrier.cluster.wait;", True),
    ("fence.acq_rel.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;", True),
    ("fence.acq_rel.cta; barrier.cluster.arrive.relaxed; barrier.cluster.wait;", False),
    ("barrier.cluster.arrive.relaxed; barrier.cluster.wait;", False),
])  # fmt: skip
def test_memory_order_between_ctas(meet, fine):
    meet_and_check(meet, fine)


@pytest.mark.parametrize("arrival, acquire, fine", [
    ("", "", True),  # CUTLASS's ClusterBarrier
    (".release.cta", ACQUIRE, False),
    (".release.cluster", ".acquire.cta", False),
    (".relaxed.cluster", "", False),
])  # fmt: skip
def test_lenient_takes_no_scope_as_the_cluster(arrival, acquire, fine):
    """A scope that is written counts as written."""
    meet_and_check(arrive_and_wait(arrival, acquire), fine, lenient=True)


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
    """One CTA's copy writes to both, and completes at both mbarriers."""
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


# Each CTA copies a row of 128 bytes to itself and completes at the mbarrier of the first, which waits for both.
TO_THE_FIRST = (
    "ld.param.u64 %x9, [map];\n" + initialise()
    + """barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p3, %r2, 0;
    setp.eq.and.u32 %p4, %r2, 0, %p1; and.b32 %r3, %bar, -16777217; mov.b32 %r8, 0;
    @%p4 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], 256;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2
        [%data], [%x9, {%r8, %r2}], [%r3];
    @!%p3 bra MEET;
    """ + wait() + """MEET: barrier.cluster.arrive; barrier.cluster.wait;
    mad.lo.u32 %r1, %t, 4, %data; ld.shared.b32 %r4, [%r1]; mad.lo.u32 %r9, %r2, 32, %t;
    mad.wide.u32 %x1, %r9, 4, %out; st.global.b32 [%x1], %r4;"""
)  # fmt: skip


def copy_to_the_first(body, schedule):
    image, out = np.random.default_rng(0).integers(1, 256, (2, 128), np.uint8), np.zeros((2, 128), np.uint8)
    make = lambda address: tensor_map(address, 0, (128, 2), (128,), (128, 1), 0)
    np.testing.assert_array_equal(with_map(body, out, image, make, schedule, cluster=2), image)


@pytest.mark.parametrize("schedule", ALL)
def test_copies_of_a_pair_complete_at_the_first_mbarrier(schedule):
    copy_to_the_first(TO_THE_FIRST, schedule)


@pytest.mark.parametrize(
    "part, by, why",
    [
        (".cta_group::2", "", "another CTA's mbarrier, which takes .cta_group::2"),
        (", 256;", ", 128;", "in shared memory|transaction|being written"),  # of the first CTA's copy only
        ("and.b32 %r3, %bar, -16777217;", "mov.b32 %r3, %bar;", "deadlock"),
    ],
)
def test_copies_of_a_pair_that_complete_elsewhere(part, by, why):
    for schedule in MISTAKES:
        with pytest.raises(EmulatorError, match=why):
            copy_to_the_first(without(TO_THE_FIRST, part, by), schedule)


def test_a_commit_to_a_cta_that_has_ended():
    """Commits reach the other CTA in any order: the second one's arrival does not imply the first one's."""
    body = initialise(bars=2) + """barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r2, %cluster_ctarank;
        setp.eq.and.u32 %p4, %r2, 0, %p1; mov.b16 %h1, 3;
        @%p4 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%bar], %h1;
        @%p4 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%bar+8], %h1;
        """ + wait(1) + "barrier.cluster.arrive; barrier.cluster.wait;"  # fmt: skip
    with pytest.raises(EmulatorError, match="signals an mbarrier of CTA 1, which may have ended"):
        run(body, np.zeros(64, np.uint32), schedule="lazy", cluster=2)
    run(without(body, wait(1), wait(1) + wait(0)), np.zeros(64, np.uint32), schedule="lazy", cluster=2)
