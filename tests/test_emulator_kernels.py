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

from tests import emulator_kernels  # noqa: E402
from tests.emulator import Emulated, EmulatorError, compiling_for  # noqa: E402
from tests.emulator.copies import TensorMap  # noqa: E402
from tests.emulator.launch import address_of, device_memory  # noqa: E402

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
    """[rows, K / 16] bytes in the 128x4 layout, written as its formula."""
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
    root = Path(__file__).parent.parent
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
    """The text with `count` places of a regular expression replaced, which must exist."""
    changed, places = re.subn(pattern, by, text, count=count, flags=re.S)
    assert places, pattern
    return changed


TRY_WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[(%r\d+)\], (%r\d+), 10000000;"
HOPPER = {
    "every wait returns at once": lambda s: change(s, TRY_WAIT, "setp.eq.u32 P1, 0, 0;", 0),
    "loads do not wait for a free stage": lambda s: change(s, TRY_WAIT, "setp.eq.u32 P1, 0, 0;"),
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
}  # fmt: skip


@pytest.mark.parametrize("name", BLACKWELL)
def test_blackwell_mistakes(blackwell, name):
    caught(blackwell["sm_100a"][0], BLACKWELL[name], lambda: blackwell_problem(128, 128, 512))


def caught(compiled, mistake, problem):
    """By an error or by a wrong result, when what is asynchronous comes late or some warps are slow."""
    arguments, expected = problem()
    spoilt = Emulated(compiled, mistake(compiled.__ptx__))
    for schedule in ("lazy", "slow:1"):
        try:
            spoilt(*arguments, unwritten=arguments[-1:], schedule=schedule, max_steps=100_000)
        except EmulatorError as error:
            assert "CTA" in str(error)
            return
        if not torch.equal(arguments[-1].double(), expected):
            return
    pytest.fail("nobody noticed")
