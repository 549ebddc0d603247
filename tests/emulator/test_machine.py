"""What the emulator does besides instructions: lanes of a warp, memory, barriers, errors, its command line."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.emulator import EmulatorError, PtxError, Schedule, emulate
from tests.emulator.ptx import HEAD
from tests.emulator.snippets import kernel, run

ROOT = Path(__file__).parents[2]


# ---- control flow and the lanes of a warp ----
def test_divergent_lanes_meet_again():
    """Each lane loops its own number of times; then all lanes vote together."""
    body = """mov.b32 %r1, 0; mov.b32 %r2, 0;
    LOOP: setp.ge.u32 %p1, %r1, %t; @%p1 bra OUT;
        add.u32 %r1, %r1, 1; add.u32 %r2, %r2, %r1; bra LOOP;
    OUT: vote.sync.ballot.b32 %r3, 1, -1; setp.eq.u32 %p2, %r3, -1; selp.b32 %r4, 1000, 0, %p2;
        add.u32 %r2, %r2, %r4; st.global.b32 [%mine], %r2;"""
    body = body.replace("vote.sync.ballot.b32 %r3, 1, -1", "setp.eq.u32 %p3, 0, 0; vote.sync.ballot.b32 %r3, %p3, -1")
    expected = [1000 + t * (t + 1) // 2 for t in range(32)]
    for schedule in ("eager", "lazy", "random:1"):
        assert run(body, schedule=schedule).tolist() == expected


def test_elect_and_branch():
    body = """mov.b32 %r5, 7; setp.lt.u32 %p4, %t, 5; @%p4 bra SKIP;
        elect.sync %r1|%p1, 0xFFFFFFE0; selp.b32 %r5, %r1, 100, %p1; SKIP: st.global.b32 [%mine], %r5;"""
    assert run(body).tolist() == [7] * 5 + [5] + [100] * 26


def test_indexed_branch():
    body = """and.b32 %r1, %t, 3; TABLE: .branchtargets A, B, A, C;
        brx.idx %r1, TABLE; A: mov.b32 %r2, 10; bra END; B: mov.b32 %r2, 20; bra END; C: mov.b32 %r2, 30;
        END: st.global.b32 [%mine], %r2;"""
    assert run(body).tolist() == [10, 20, 10, 30] * 8


@pytest.mark.parametrize(
    "mode, argument, clamp, source",
    [
        ("idx", 3, 31, lambda t: 3),
        ("up", 1, 0, lambda t: max(t - 1, 0)),
        ("down", 4, 31, lambda t: t + 4 if t + 4 < 32 else t),
        ("bfly", 5, 31, lambda t: t ^ 5),
        ("idx", 2, 0x1C03, lambda t: (t & ~3) | 2),  # segments of four lanes
        ("down", 1, 0x1C03, lambda t: t + 1 if t % 4 < 3 else t),
        ("up", 1, 0x1C00, lambda t: t - 1 if t % 4 else t),
    ],
)
def test_shuffles(mode, argument, clamp, source):
    body = f"add.u32 %r1, %t, 100; shfl.sync.{mode}.b32 %r2, %r1, {argument}, {clamp}, -1; st.global.b32 [%mine], %r2;"
    assert run(body).tolist() == [100 + source(t) for t in range(32)]


def test_votes_and_reductions():
    body = """setp.lt.u32 %p1, %t, 3; vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, %p1, -1;
        vote.sync.ballot.b32 %r1, !%p1, -1; redux.sync.add.u32 %r2, %t, -1; redux.sync.max.u32 %r3, %t, -1;
        selp.b32 %r4, 1, 0, %p2; selp.b32 %r5, 1, 0, %p3;
        add.u32 %r6, %r2, %r3; add.u32 %r6, %r6, %r4; sub.u32 %r6, %r6, %r5; xor.b32 %r6, %r6, %r1;
        st.global.b32 [%mine], %r6;"""
    assert run(body)[0] == (496 + 31 + 1 - 0) ^ 0xFFFFFFF8


@pytest.mark.parametrize("schedule", ["eager", "random:1"])
def test_lanes_with_the_same_value(schedule):
    """match.any gives each lane the mask of the member lanes that hold its value."""
    body = """rem.u32 %r1, %t, 5; match.any.sync.b32 %r2, %r1, -1; mov.u32 %r3, %lanemask_lt;
        and.b32 %r3, %r3, %r2; shl.b32 %r3, %r3, 1; xor.b32 %r2, %r2, %r3; st.global.b32 [%mine], %r2;"""
    same = lambda t, lanes: sum(1 << i for i in lanes if i % 5 == t % 5)
    expected = [same(t, range(32)) ^ same(t, range(t)) << 1 for t in range(32)]
    assert run(body, schedule=schedule).tolist() == [e & 0xFFFFFFFF for e in expected]
    body = """mov.b32 %r2, 0; setp.lt.u32 %p1, %t, 9; @%p1 bra END; cvt.u64.u32 %x1, %t; shr.u64 %x1, %x1, 2;
        match.any.sync.b64 %r2, %x1, 0xFFFFFE00; END: st.global.b32 [%mine], %r2;"""
    expected = [0] * 9 + [sum(1 << i for i in range(9, 32) if i // 4 == t // 4) for t in range(9, 32)]
    assert run(body, schedule=schedule).tolist() == expected


def test_some_lanes_leave():
    body = "setp.lt.u32 %p1, %t, 4; @%p1 ret; bar.sync 0; mov.b32 %r1, 9; st.global.b32 [%mine], %r1;"
    assert run(body).tolist() == [0] * 4 + [9] * 28


# ---- memory ----
def test_vectors_and_bytes():
    out = np.zeros(512, np.uint8)
    body = """mov.b32 %r10, smem; mad.lo.u32 %r10, %t, 16, %r10;
        add.u32 %r1, %t, 1; add.u32 %r2, %t, 2; add.u32 %r3, %t, 3;
        st.shared.v4.b32 [%r10], {%t, %r1, %r2, %r3}; ld.shared.v2.b64 {%x1, %x2}, [%r10];
        ld.shared.u8 %h1, [%r10+4]; cvt.u32.u16 %r4, %h1; mov.b64 {%r5, %r6}, %x2;
        mad.wide.u32 %x3, %t, 16, %out; st.global.v4.b32 [%x3], {%r4, %r6, %r5, %t};"""
    words = run(body, out).view(np.uint32).reshape(32, 4)
    t = np.arange(32)
    np.testing.assert_array_equal(words, np.stack([t + 1, t + 3, t + 2, t], 1))


def test_signed_loads_extend():
    data = np.array([-5] * 32, np.int8)
    body = """ld.param.u64 %x1, [a]; cvt.u64.u32 %x2, %t; add.s64 %x1, %x1, %x2;
        ld.global.s8 %r1, [%x1]; st.global.b32 [%mine], %r1;"""
    assert run(body, arguments=[data], parameters=[".u64 a"]).view(np.int32).tolist() == [-5] * 32


def test_atomics():
    out = np.zeros(4, np.uint32)
    body = """atom.global.add.u32 %r1, [%out], 1; red.global.max.u32 [%out+4], %r1;
        mov.b32 %r2, 0f3F000000; red.relaxed.gpu.global.add.f32 [%out+8], %r2;
        atom.global.cas.b32 %r3, [%out+12], 0, 77;"""
    run(body, out, threads=64)
    ordered = """atom.global.release.add.u32 %r1, [%out], 1; atom.release.gpu.global.add.u32 %r1, [%out], 1;
        red.release.gpu.global.add.u32 [%out], 1; ld.acquire.gpu.global.b32 %r1, [%out]; mov.b32 %r10, smem;
        st.shared.b32 [%r10], 0; bar.sync 0; atom.shared.cta.add.u32 %r2, [%r10], 1; bar.sync 0;
        ld.shared.b32 %r3, [%r10]; st.global.b32 [%out+4], %r3;"""
    assert run(ordered, np.zeros(2, np.uint32)).tolist() == [96, 32]
    assert out[:2].tolist() == [64, 63] and out[2:3].view(np.float32)[0] == 32 and out[3] == 77


def test_matrix_transfers():
    """ldmatrix gives lane 4r + c columns 2c, 2c + 1 of row r, with .trans of the transpose; stmatrix is the inverse."""
    matrix = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros((2, 4, 32), np.uint32)
    fill = """ld.param.u64 %x1, [a]; mad.wide.u32 %x1, %t, 16, %x1; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%x1];
        mov.b32 %r10, smem; mad.lo.u32 %r10, %t, 16, %r10;
        st.shared.v4.b32 [%r10], {%r1, %r2, %r3, %r4}; bar.sync 0;\n"""
    store = "".join(f"st.global.b32 [%mine+{128 * i}], %r{5 + i};" for i in range(4))
    for k, trans in enumerate(("", ".trans")):
        half = np.zeros((4, 32), np.uint32)
        body = fill + f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r5, %r6, %r7, %r8}}, [%r10];" + store
        run(body, half, arguments=[matrix], parameters=[".u64 a"])
        out[k] = half
    pairs = out.view(np.uint16).reshape(2, 4, 8, 8)
    np.testing.assert_array_equal(pairs[0], matrix)
    np.testing.assert_array_equal(pairs[1], matrix.transpose(0, 2, 1))
    back = fill + """ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r5, %r6, %r7, %r8}, [%r10];
        stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r10+1024], {%r5, %r6, %r7, %r8};
        ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r10+1024]; mad.wide.u32 %x3, %t, 16, %out;
        st.global.v4.b32 [%x3], {%r5, %r6, %r7, %r8};"""  # fmt: skip
    half = np.zeros(256, np.uint16)
    run(back, half, arguments=[matrix], parameters=[".u64 a"])
    np.testing.assert_array_equal(half.reshape(4, 8, 8), matrix)


# ---- what must stop ----
def fails(match, body, error=EmulatorError, **options):
    with pytest.raises(error, match=match):
        run(body, **options)


def test_unknown_things_stop_with_their_line():
    fails("line 19.*\n.*unknown instruction", "frobnicate.b32 %r1, %r2;", PtxError)
    fails("unknown instruction", "add.sat.u32 %r1, %r2, %r3;", PtxError)
    fails("operands", "add.u32 %r1, %r2;", PtxError)
    fails("operands", "max.NaN.f32 %r1, %r2, %r3, %r4, %r5;", PtxError)
    fails("16 register", "add.u32 %r1, %r2, %h1;", PtxError)


PRINT = """
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 vprintf_param_0, .param .b64 vprintf_param_1);
.global .align 1 .b8 format[3] = {37, 100, 0};
"""
CALL = """.local .align 8 .b8 depot[8]; mov.b64 %x1, depot; cvta.local.u64 %x2, %x1;
    setp.ne.u32 %p1, %t, NUMBER; @%p1 bra END; st.local.v2.b32 [%x1], {%t, %t};
    { .param .b64 param0; .param .b64 param1; .param .b32 retval0; st.param.b64 [param1], %x2; mov.b64 %x3, format;
    cvta.global.u64 %x4, %x3; st.param.b64 [param0], %x4; call.uni (retval0), vprintf, (param0, param1); }
    END: st.global.b32 [%mine], %t;"""


def test_printing_stops():
    """printf as NVVM writes it. Constants and local memory have addresses, but cannot be read."""

    def start(body, text=PRINT):
        out = np.zeros(32, np.uint32)
        emulate(kernel(body).replace(HEAD, HEAD + text), [out], 1, 32)
        return out.tolist()

    assert start(CALL.replace("NUMBER", "99")) == list(range(32))
    with pytest.raises(EmulatorError, match="warp 0: the kernel calls vprintf"):
        start(CALL.replace("NUMBER", "7"))
    with pytest.raises(EmulatorError, match="in no buffer"):
        start("mov.b64 %x3, format; cvta.global.u64 %x4, %x3; ld.global.u8 %h1, [%x4];")
    with pytest.raises(PtxError, match="unknown instruction"):
        start(".local .align 8 .b8 depot[8]; mov.b64 %x1, depot; ld.local.b32 %r1, [%x1];")
    with pytest.raises(PtxError, match="only vprintf"):
        start(CALL.replace("vprintf", "malloc"))


def test_shared_memory_that_holds_anything():
    body = "mov.b32 %r1, smem; ld.shared.b32 %r2, [%r1]; st.global.b32 [%mine], %r2;"
    fails("never written", body)
    assert set(run(body, stale_shared=True).tolist()) == {0xFFFFFFFF}


def test_memory_violations():
    fails("CTA 0 warp 0: .*never written", "mov.b32 %r1, smem; ld.shared.b32 %r2, [%r1];")
    fails("outside of shared memory", "mov.b32 %r1, smem; st.shared.b32 [%r1+8192], %t;")
    fails("outside of shared memory", "mov.b32 %r1, 0; st.shared.b32 [%r1], %t;")
    fails("not aligned to 4", "mov.b32 %r1, smem; st.shared.b32 [%r1+2], %t;")
    fails("outside of|in no buffer", "st.global.b32 [%mine+128], %t;")
    fails("in no buffer", "mov.b64 %x1, 64; ld.global.b32 %r1, [%x1];")
    out = np.zeros(32, np.uint32)
    fails("never written", "ld.global.b32 %r1, [%mine];", out=out, unwritten=[out])


MBARRIER = "mov.b32 %r20, smem; setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [%r20], 1; bar.sync 0;\n"


def wait(parity, label="W"):
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p2, [%r20], {parity}; @!%p2 bra {label};\n"


def test_mbarrier_phases():
    """The parity of the phase before the first counts as complete."""
    arrive = "@%p1 mbarrier.arrive.shared.b64 %x1, [%r20]; "
    body = MBARRIER + wait(1) + "bar.sync 0; " + arrive + wait(0, "A") + "bar.sync 0; " + arrive + wait(1, "B")
    body += "mov.b32 %r1, 5; st.global.b32 [%mine], %r1;"
    for schedule in ("eager", "lazy", "reverse", "random:3"):
        assert (run(body, threads=128, schedule=schedule) == 5).all()


def test_mbarrier_misuse():
    fails("deadlock.*\n.*warp 0.*waits for parity 0 of mbarrier 0x400 .* phase 0, 1 of 1", MBARRIER + wait(0))
    fails("more often than its count", MBARRIER + "@%p1 mbarrier.arrive.shared.b64 %x1, [%r20], 2;")
    fails("no mbarrier was initialised", "mov.b32 %r20, smem;" + wait(0))
    fails("an mbarrier", MBARRIER + "ld.shared.b64 %x1, [%r20];")
    fails("an mbarrier", MBARRIER + "st.shared.b64 [%r20], %x1;")
    expect = MBARRIER + "@%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%r20], 64;"
    fails("deadlock(.*\n)*.*64 bytes did not come", expect + wait(0))
    fails("64 bytes still expected", expect)


def test_named_barriers():
    body = """mov.b32 %r10, smem; mad.lo.u32 %r10, %t, 4, %r10; setp.ge.u32 %p1, %t, 32; @%p1 bra CONSUMER;
        st.shared.b32 [%r10], %t; bar.arrive 3, 64; bra END;
        CONSUMER: bar.sync 3, 64; ld.shared.b32 %r1, [%r10+-128]; st.global.b32 [%mine], %r1; END:"""
    for schedule in ("eager", "reverse", "random:5"):
        assert run(body, threads=64, schedule=schedule)[32:].tolist() == list(range(32))
    fails("deadlock(.*\n)*.*barrier 3: 32 of 64", "setp.lt.u32 %p1, %t, 32; @%p1 bar.sync 3, 64;", threads=64)
    fails("for 64 threads, while others", "setp.lt.u32 %p1, %t, 32; @%p1 bar.sync 3, 96; bar.sync 3, 64;", threads=96)


def test_endless_loops_end():
    fails("not finished", "L: bra L;", max_steps=1000)


# ---- the command line ----
DOUBLE = kernel(
    """ld.param.u64 %x1, [a]; mad.wide.u32 %x2, %t, 4, %x1; ld.global.b32 %r1, [%x2]; ld.param.b32 %r2, [n];
    mov.b32 %r3, smem; mad.lo.u32 %r3, %t, 4, %r3; st.shared.b32 [%r3], %r1; bar.sync 0; ld.shared.b32 %r4, [%r3];
    mul.lo.u32 %r5, %r4, %r2; st.global.b32 [%mine], %r5;""",
    (".u64 out", ".u64 a", ".u32 n"),
)


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tests.emulator", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_command_line(tmp_path):
    (tmp_path / "double.ptx").write_text(DOUBLE)
    np.save(tmp_path / "a.npy", np.arange(64, dtype=np.uint32))
    given = "--block 64 --shared 256 --arg zeros:uint32:64 --arg".split() + [str(tmp_path / "a.npy"), "--arg", "3"]
    files = ["--out", str(tmp_path / "out.npz"), "--timeline", str(tmp_path / "picture.svg"), "--trace", "0:1:21-23"]
    code, out, err = command(str(tmp_path / "double.ptx"), *given, *files, "--schedule", "random:4")
    assert code == 0, err
    assert "block (64, 1, 1)" in out
    assert "ld.shared.b32" in out and "= 32 33 34 .. 63" in out
    assert np.load(tmp_path / "out.npz")["arg0"].tolist() == list(range(0, 192, 3))
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")
    code, out, err = command(str(tmp_path / "double.ptx"), *given, "--timeline", "-")
    assert "CTA 0 warp 1" in out and "####" in out
    code, out, err = command(str(tmp_path / "double.ptx"), *given[:2], *given[4:])
    assert code == 1 and "outside of shared memory" in err and "warp 0" in err


def test_schedules_have_names():
    assert Schedule.parse("reverse-lazy") == Schedule("reverse", "lazy")
    assert Schedule.parse("random:7") == Schedule("random", "random", 7)
    assert Schedule.parse("random-lazy:7") == Schedule("random", "lazy", 7)
    assert Schedule.parse("slow:7") == Schedule("slow", "lazy", 7)
    with pytest.raises(ValueError, match="late"):
        Schedule.parse("late")


def test_a_run_repeats():
    """The same seed gives the same interleaving; the timeline does not depend on it."""
    ends = []
    for schedule in ("eager", "random:5", "random:5", "reverse"):
        a, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
        machine = emulate(DOUBLE, [out, a, 2], 1, 64, 256, schedule=schedule)
        ends.append((machine.ends, len(machine.timeline.waits)))
        assert out.tolist() == list(range(0, 128, 2))
    assert ends[0][0] == ends[1][0] == ends[2][0] == ends[3][0]


@pytest.mark.slow
def test_the_package_stands_alone():
    """It needs neither moe_nvfp4 nor CuTe DSL, except for `kernels` and the tests."""
    folder = Path(__file__).parent
    names = [f.stem for f in folder.glob("*.py") if not f.stem.startswith(("test_", "__")) and f.stem != "kernels"]
    code = "import sys, importlib; sys.modules.update(dict.fromkeys(('moe_nvfp4', 'cutlass', 'triton')))\n"
    code += f"for name in {sorted(names)}: importlib.import_module('tests.emulator.' + name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
