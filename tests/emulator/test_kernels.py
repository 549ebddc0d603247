"""Whole kernels on the emulator, compiled by CuTe DSL: compared with torch, then spoilt on purpose."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL compiles the kernels")
pytest.importorskip("tvm_ffi", reason="the kernels' host code is TVM-FFI's")
if shutil.which("cc") is None:
    pytest.skip("the emulator links the compiled host code with cc", allow_module_level=True)

from moe_nvfp4 import NVFP4Experts, reference  # noqa: E402
from moe_nvfp4.kernels.sm100 import backend as sm100  # noqa: E402
from moe_nvfp4.kernels.sm100.config import TileShape  # noqa: E402
from moe_nvfp4.routing import group_by_expert  # noqa: E402
from tests.emulator import PTX_ONLY, Emulated, EmulatorError, compiling_for  # noqa: E402
from tests.emulator import kernels as emulator_kernels  # noqa: E402
from tests.emulator.copies import TensorMap  # noqa: E402
from tests.emulator.launch import address_of, device_memory  # noqa: E402

pytestmark = pytest.mark.slow

SCHEDULES = ("eager", "lazy", "reverse", "reverse-lazy", "random:1", "random:2", "slow:1", "slow-eager:2")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@pytest.fixture(scope="module")
def hopper():
    with compiling_for("sm_90a"):
        compiled = emulator_kernels.hopper_gemm(n=32, k=64, stages=2)
    return compiled, Emulated(compiled)


@pytest.fixture(scope="module")
def blackwell():
    """{architecture: (compiled, emulated)}"""
    kernels = {}
    for architecture in ("sm_100a", "sm_103a"):
        with compiling_for(architecture):
            compiled = emulator_kernels.blackwell_gemm(n=128)
        kernels[architecture] = compiled, Emulated(compiled)
    return kernels


def integers(*shape):
    return torch.randint(-4, 5, shape).to(torch.bfloat16)


def hopper_problem():
    a, b, out = integers(128, 320), integers(64, 320), torch.zeros(128, 64)
    return (a, b, out), a.double() @ b.double().T


def swizzled(sf):
    """Bytes [rows, K / 16] in the 128x4 layout, by its formula."""
    rows, columns = sf.shape
    m, k = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    at = (m // 128 * (columns // 4) + k // 4) * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4
    out = torch.zeros(rows * columns, dtype=torch.uint8)
    out[at] = sf
    return out


def quantized(rows, k):
    codes = torch.randint(0, 16, (rows, k))
    sf = torch.tensor([0x30, 0x38, 0x40, 0x34], dtype=torch.uint8)[torch.randint(0, 4, (rows, k // 16))]
    values = E2M1[codes] * sf.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), swizzled(sf), values


def blackwell_problem(m=256, n=256, k=512):
    (a, sfa, x), (b, sfb, y) = quantized(m, k), quantized(n, k)
    out = torch.zeros(m, n)
    return (a, b, sfa, sfb, out), x @ y.T


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hopper_gemm(hopper, schedule):
    arguments, expected = hopper_problem()
    hopper[1](*arguments, unwritten=arguments[-1:], schedule=schedule)
    assert torch.equal(arguments[-1].double(), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("architecture", ("sm_100a", "sm_103a"))
def test_blackwell_gemm(blackwell, architecture, schedule):
    arguments, expected = blackwell_problem()
    (machine,) = blackwell[architecture][1](*arguments, unwritten=arguments[-1:], schedule=schedule)
    assert torch.equal(arguments[-1].double(), expected)
    assert machine.grid == (2, 2, 1) and machine.block == (128, 1, 1)


@pytest.mark.parametrize(
    "dtype, bits, swizzle",
    [("Uint8", 8, 0), ("Float8E4M3FN", 8, 1), ("BFloat16", 16, 2), ("Float16", 16, 3), ("Uint16", 16, 0),
     ("Float32", 32, 1), ("Uint32", 32, 3), ("Float4E2M1FN", 4, 0), ("Float4E2M1FN", 4, 3)],
)  # fmt: skip
def test_tensor_maps_as_cutlass_encodes_them(dtype, bits, swizzle):
    import cutlass

    span = (0, 32, 64, 128)[swizzle]
    columns = (span or 64) * 8 // bits
    with compiling_for("sm_100a"):
        emulated = Emulated(emulator_kernels.tile_copy(getattr(cutlass, dtype), columns, swizzle))
    data = torch.zeros(1 << 17, dtype=torch.uint8)
    memory = device_memory([data])
    (launch,) = emulated.launches(data, memory=memory)
    program = emulated.programs[launch.kernel]
    (at,) = (program.parameters[p.name] for p in program.kernel.parameters if p.size == 128)
    decoded = TensorMap.decode(launch.parameters[at : at + 128])
    pitch = (1024 * bits // 8,)
    assert decoded == TensorMap(address_of(data, memory), bits, span, (512, 24), pitch, (columns, 8))


def test_the_host_code_checks_its_arguments(hopper):
    (a, b, out), _ = hopper_problem()
    with pytest.raises(ValueError, match="Mismatched|expected"):
        hopper[1](a.float(), b, out)


def test_a_capture_runs_from_the_command_line(blackwell, tmp_path):
    arguments, _ = blackwell_problem(128, 128, 256)
    blackwell["sm_100a"][1].capture(tmp_path / "gemm.npz", *arguments, unwritten=arguments[-1:])
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "tests.emulator",
        str(tmp_path / "gemm.npz"),
        "--schedule",
        "lazy",
        "--timeline",
        "-",
    ]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "CTA 0 warp 3" in done.stdout and "% waiting" in done.stdout and "parity 0 of mbarrier" in done.stdout


def change(text, pattern, by, count=1):
    """Replace the first `count` matches of a regular expression in the text; there must be some."""
    changed, places = re.subn(pattern, by, text, count=count, flags=re.S)
    assert places, pattern
    return changed


TRY_WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[(%r\d+)\], (%r\d+), 10000000;"
HOPPER = {
    "every wait returns at once": lambda s: change(s, TRY_WAIT, "setp.eq.u32 P1, 0, 0;", 0),
    "loads do not wait for a free stage": lambda s: change(s, TRY_WAIT, "setp.eq.u32 P1, 0, 0;"),
    "wgmma.fence left out": lambda s: change(s, r"wgmma\.fence\.sync\.aligned;", ""),
    "a sum is changed after it": lambda s: change(s, r"(wgmma\.fence.*?)(wgmma\.mma_async[^{]*\{)(%r\d+)",
                                                  r"\1mov.b32 \3, 0; \2\3"),
    "sums are used too early": lambda s: change(s, r"(wgmma\.wait_group\.sync\.aligned\s+)0;", r"\g<1>1;"),
    "wgmma.wait_group left out": lambda s: change(s, r"wgmma\.wait_group\.sync\.aligned\s+0;", ""),
    "too many bytes": lambda s: change(s, r", 12288;", ", 12304;"),
    "too few bytes": lambda s: change(s, r", 12288;", ", 12272;"),
    "the wrong stage is read": lambda s: change(s, r"wgmma\.fence\.sync\.aligned;", "\\g<0> xor.b32 %r1, %r1, 8192;"),
    "barriers not initialised": lambda s: change(s, r"mbarrier\.init[^;]*;", ""),
    "arrives twice": lambda s: change(s, r"(mbarrier\.arrive\.shared\.b64[^;]*;)", r"\1 \1"),
    "never released": lambda s: change(s, r"mbarrier\.arrive\.shared\.b64[^;]*;", ""),
    "the other operand's rows": lambda s: change(s, r"(wgmma\.mma_async.*?\}, )(%rd\d+), (%rd\d+)", r"\1\3, \2"),
    "a step is skipped": lambda s: change(s, r"wgmma\.mma_async[^;]*;", ""),
    "products do not accumulate": lambda s: change(s, r"p, 1,  1, 0, 0;", "!p, 1,  1, 0, 0;"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOPPER)
def test_hopper_mistakes(hopper, name):
    caught(hopper[0], HOPPER[name], hopper_problem)


BLACKWELL = {
    "every wait returns at once": lambda s: change(s, TRY_WAIT, "setp.eq.u32 P1, 0, 0;", 0),
    "the first wait returns at once": lambda s: change(s, TRY_WAIT, "setp.eq.u32 P1, 0, 0;"),
    "the other parity": lambda s: change(s, TRY_WAIT, r"xor.b32 \2, \2, 1; \g<0>"),
    "too few bytes": lambda s: change(s, r", 36864;", ", 36352;"),
    "a load left out": lambda s: change(s, r"cp\.async\.bulk\.tensor[^;]*;", ""),
    "the next tile of K": lambda s: change(s, r"(cp\.async\.bulk\.tensor[^;]*\{)(%r\d+)", r"add.s32 \2, \2, 64; \1\2"),
    "scale factors not copied": lambda s: change(s, r"tcgen05\.cp[^;]*;", ""),
    "scale factors of another step": lambda s: change(s, r"(tcgen05\.mma.*?%r\d+, \[%r\d+)\]", r"\1+4]"),
    "scale factors swapped": lambda s: change(s, r"(tcgen05\.mma[^;]*, )(\[%r\d+\]), (\[%r\d+\])", r"\1\3, \2"),
    "a step is skipped": lambda s: change(s, r"tcgen05\.mma[^;]*;", ""),
    "a step twice": lambda s: change(s, r"(tcgen05\.mma[^;]*;)(?=.*tcgen05\.ld)", r"\1 \1", 0),
    "no commit": lambda s: change(s, r"tcgen05\.commit[^;]*;", ""),
    "no wait for the registers": lambda s: change(s, r"tcgen05\.wait::ld\.sync\.aligned;", ""),
    "another warp's lanes": lambda s: change(s, r"(tcgen05\.ld[^;]*\[)(%r\d+)", r"xor.b32 \2, \2, 2097152; \1\2"),
    "columns off by one": lambda s: change(s, r"(tcgen05\.ld[^;]*\[%r\d+)\]", r"\1+1]"),
    "TMEM kept": lambda s: change(s, r"tcgen05\.dealloc[^;]*;", ""),
    "TMEM freed early": lambda s: change(s, r"(tcgen05\.ld[^;]*;)(.*?)(tcgen05\.dealloc[^;]*;)", r"\1\2\3 \3"),
    "no tcgen05.fence": lambda s: change(s, r"tcgen05\.fence::after_thread_sync;", ""),
    "freed without tcgen05.fence": lambda s: change(s, r"tcgen05\.fence::before_thread_sync;", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BLACKWELL)
def test_blackwell_mistakes(blackwell, name):
    caught(blackwell["sm_100a"][0], BLACKWELL[name], lambda: blackwell_problem(128, 128, 512))


def caught(compiled, mistake, problem, output=-1):
    """Check that an error or a wrong result shows it, when asynchronous operations come late or some warps are slow."""
    arguments, expected = problem()
    spoilt = Emulated(compiled, mistake(compiled.__ptx__))
    for schedule in ("lazy", "slow:1"):
        try:
            spoilt(*arguments, unwritten=[arguments[output]], schedule=schedule, max_steps=100_000)
        except EmulatorError as error:
            assert "CTA" in str(error)
            return
        if not torch.equal(arguments[output].double(), expected):
            return
    pytest.fail("nobody noticed")


# ---- the backend's own GEMM, with pairs of CTAs ----
OUT = 9  # of the arguments


@pytest.fixture(scope="module")
def pair():
    """(compiled, (arguments, the right result)): one pair of CTAs, three tiles, so every stage of the ring is
    reused."""
    started = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sm100, "launch", lambda *launch: started.append(launch))
        monkeypatch.setattr(sm100, "multiprocessors", lambda device: 2)
        monkeypatch.setattr(sm100, "plan_gemm", lambda *_: (TileShape(128, 1, 2), 1))
        layer = NVFP4Experts(2, 16, 1040, activations="nvfp4")
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(0x30, 0x40, parameter.shape) if parameter.dtype == torch.uint8 else 1)
        groups = group_by_expert(torch.tensor([0] * 130 + [1] * 20)[:, None], 2)
        h = reference.quantize_rows(torch.randn(150, 1040), None, None, groups)
        sm100.gemm2_combine(h, layer.weights, groups, torch.ones(150, 1), torch.float32)
    config, arguments = started[0]
    with compiling_for("sm_100a"):
        compiled = sm100.compile_kernel(config, PTX_ONLY)
    arguments[OUT].fill_(0)
    Emulated(compiled)(*arguments, schedule="lazy")
    assert arguments[OUT].any() and config.tile.ctas == 2
    return compiled, (arguments, arguments[OUT].double())


def place(text, pattern, number, by):
    """The text with match `number` of a regular expression replaced."""
    match = list(re.finditer(pattern, text, re.S))[number]
    return text[: match.start()] + match.expand(by) + text[match.end() :]


MEET = r"barrier\.cluster\.arrive;\s*barrier\.cluster\.wait;"
AFTER, BEFORE = r"tcgen05\.fence::after_thread_sync;", r"tcgen05\.fence::before_thread_sync;"
ANSWERED = "setp.eq.u32 P1, 0, 0;"
PAIR_WAIT, PAIR_ANSWERED = r"mbarrier\.try_wait\.parity\.relaxed\.cluster\S+\s+(%p\d+),[^;]+;", r"setp.eq.u32 \1, 0, 0;"
PAIR_SCOPE = r"(mbarrier\.try_wait\.parity\.relaxed)\.cluster"
PAIR = {
    "no cluster barrier at the start": lambda s: place(s, MEET, 0, ""),
    "no cluster barrier at the end": lambda s: place(s, MEET, -1, ""),
    "weights do not wait for a free stage": lambda s: place(s, TRY_WAIT, 0, ANSWERED),
    "the last commits are not waited for": lambda s: place(s, TRY_WAIT, 1, ANSWERED),
    "tokens do not wait for a free stage": lambda s: place(s, TRY_WAIT, 2, ANSWERED),
    "sums are overwritten": lambda s: place(s, PAIR_WAIT, 0, PAIR_ANSWERED),
    "no wait for the operands": lambda s: place(s, TRY_WAIT, 3, ANSWERED),
    "one CTA's weights are enough": lambda s: change(s, r"(mov\.b32\s+%r\d+,) 36864;", r"\1 18432;"),
    "copies complete where they are": lambda s: change(s, r"(and\.b32\s+%r\d+, %r\d+,) -16777224;", r"\1 -8;", 0),
    "the second CTA's weights complete there": lambda s: change(s, r"(and\.b32\s+%r\d+, %r\d+,) -16777224;", r"\1 -8;"),
    "copies without a pair": lambda s: change(s, r"(cp\.async\.bulk\.tensor\S*)\.cta_group::2", r"\1"),
    "no wait for the sums": lambda s: place(s, TRY_WAIT, 4, ANSWERED),
    "stages are freed in one CTA": lambda s: change(s, r"(mov\.b16\s+%rs\d+, )3;(?=.*tcgen05\.commit)", r"\g<1>1;"),
    "one CTA's epilogue is enough": lambda s: change(s, r"(mov\.b32\s+%r\d+, )16;(\s*mbarrier\.init)", r"\g<1>8;\2"),
    "reports to itself": lambda s: change(s, r"mapa\.shared::cluster\.u32(\s+%r\d+, %r\d+), 0;", r"mov.b32 \1;"),
    "the sums are released to one CTA": lambda s: change(s, "arrive.relaxed.cluster", "arrive.relaxed.cta", 0),
    "waits acquire nothing": lambda s: change(s, r"(try_wait\.parity)(?=\.shared)", r"\1.relaxed.cluster", 0),
    "the wait for both epilogues is too narrow": lambda s: place(s, PAIR_SCOPE, 0, r"\1.cta"),
    "no order at the end": lambda s: place(s, MEET, -1, "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"),
    "no fence before sums are overwritten": lambda s: place(s, AFTER, 1, ""),
    "no fence before sums are read": lambda s: place(s, AFTER, 2, ""),
    "no fence after sums are read": lambda s: change(s, BEFORE + r"(.{,300}?mbarrier\.arrive\.relaxed)", r"\1", 0),
    "no fence before the end": lambda s: place(s, BEFORE, -1, ""),
    "no fence before TMEM is freed": lambda s: place(s, AFTER, -1, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIR)
def test_mistakes_of_a_pair(pair, name):
    caught(pair[0], PAIR[name], lambda: pair[1], OUT)
