"""The CPU kernels against the reference, stage by stage, on every path of this machine; how they are built and kept."""

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_nvfp4 import Gate, NVFP4Experts, cache, reference
from moe_nvfp4 import format as nvfp4
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ACTIVATIONS
from tests.common import ROOT, THRESHOLDS, python, python_with_sanitizers, random_layer, relative_error

GATES = [
    Gate(),
    Gate("silu", alpha=1.702, limit=1.5, up_offset=1.0),
    Gate("silu", limit=0.5, clamp_after=True),
    Gate("gelu_tanh"),
    Gate("relu2", gated=False),
    Gate("raw"),
    Gate("raw", gated=False),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_library = pytest.mark.skipif(not cpu.available(), reason="no C compiler")


EMULATED = "amx, its instructions emulated"
PATHS = cpu.paths() if cpu.available() else ()
if PATHS and "amx" not in PATHS and ctypes.CDLL(str(cpu.build("cpu_detect.c", "-DEMULATE_AMX"))).paths() >> 5:
    PATHS += (EMULATED,)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    name = request.param
    if name == EMULATED:
        library, name = cpu._library("amx", "-DEMULATE_AMX"), "amx"
        others = cpu._library
        monkeypatch.setattr(cpu, "_library", lambda name: library if name == "amx" else others(name))
    monkeypatch.setattr(cpu, "path", lambda: name)
    return name


problems = st.fixed_dictionaries(dict(
    E=st.sampled_from([1, 2, 5, 40]), H=st.sampled_from([8, 16, 24, 48, 72, 100, 264]),
    I=st.sampled_from([8, 16, 24, 40, 130]), T=st.sampled_from([0, 1, 2, 5, 7, 30, 70]), k=st.integers(1, 4),
    gate=st.sampled_from(GATES), bias=st.sampled_from([None, *DTYPES]), dtype=st.sampled_from(DTYPES),
    activations=st.sampled_from(ACTIVATIONS), static=st.booleans(), seed=st.integers(0, 999),
))  # fmt: skip


def make(E, H, I, T, k, gate, bias, dtype, activations, static, seed):
    w = random_layer(E, H, I, gate, activations, bias, static, seed).weights
    torch.manual_seed(seed)
    x, ids = torch.randn(T, H).to(dtype), torch.randint(-1, E + 1, (T, k))  # with sentinels and duplicates
    return w, x, ids, torch.rand(T, k).to(dtype), group_by_expert(ids, E)


def equal(a: Rows, b: Rows) -> bool:
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return all(u is v is None or (u.dtype == v.dtype and torch.equal(u, v)) for u, v in pairs)


def check(problem):
    """Run every stage on the same input as the reference, whose fp32 output is the next stage's input."""
    w, x, ids, p, groups = make(**problem)
    rows = Rows(x, index=groups.token)
    if w.quantized:
        args = (x, groups.token, w.x_scale, groups, w.four_over_six)
        rows = reference.quantize_rows(*args)
        assert equal(cpu.quantize_rows(*args), rows)
    live, limit = groups.offsets[-1], THRESHOLDS["integers" if cpu.path() == "amx" and not w.quantized else "fp32"]
    ours, h = (b.gemm1_swiglu(rows, w, groups, torch.float32) for b in (cpu, reference))
    if h.is_nvfp4:
        assert torch.equal(ours.scale, h.scale)  # a value near a boundary may land on its other side
        assert live == 0 or (ours.values != h.values).float().mean() < 0.02
    else:
        assert relative_error(ours.values, h.values) < limit
        assert not ours.values[live:].any()
    if w.gate.kind == "raw" and w.gate.gated:
        h = Rows(h.values.chunk(2, -1)[0].contiguous())
    if w.quantized and not h.is_nvfp4:
        h = reference.quantize_rows(h.values, None, w.h_scale, groups, w.four_over_six)
        assert equal(cpu.quantize_rows(reference_h(w, rows, groups), None, w.h_scale, groups, w.four_over_six), h)
    elif not h.is_nvfp4:
        h = Rows(h.values.to(x.dtype))
    ours, y = (b.gemm2_combine(h, w, groups, p, torch.float32) for b in (cpu, reference))
    assert relative_error(ours, y) < limit
    half = cpu.gemm2_combine(h, w, groups, p, x.dtype)
    assert half.dtype == x.dtype and relative_error(half, y) < THRESHOLDS["half"]
    if w.gate.kind != "raw":
        check_the_whole(w, x, ids, p, groups)


def check_the_whole(w, x, ids, p, groups):
    """One call for all stages, routing included, gives the bits of the single stages."""
    rows, rounding = Rows(x, index=groups.token), w.four_over_six
    if w.quantized:
        rows = cpu.quantize_rows(x, groups.token, w.x_scale, groups, rounding)
    h = cpu.gemm1_swiglu(rows, w, groups, x.dtype)
    if w.quantized and not h.is_nvfp4:
        h = cpu.quantize_rows(h.values, None, None, groups, rounding)
    assert torch.equal(cpu.experts(x, ids, p, w), cpu.gemm2_combine(h, w, groups, p, x.dtype))


def reference_h(w, rows, groups):
    h = reference.gemm1_swiglu(rows, w, groups, torch.float32).values
    return h.chunk(2, -1)[0].contiguous() if w.gate.kind == "raw" and w.gate.gated else h


@pytest.mark.slow_after(1)
@needs_library
def test_stages_match_the_reference(path):
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(problems)
    def any_problem(problem):
        check(problem)

    any_problem()


@pytest.mark.slow_after(8)
@needs_library
@pytest.mark.parametrize("T", [1, 3, 6, 7, 64])
def test_every_gate_and_row_type(path, T):
    for gate in GATES:
        for dtype in DTYPES:
            check(dict(E=2, H=80, I=48, T=T, k=1, gate=gate, bias=torch.bfloat16, dtype=dtype,
                       activations="bf16", static=False, seed=T))  # fmt: skip


@needs_library
@pytest.mark.parametrize("T", [1, 9, 16, 17, 18, 40, 300])
def test_special_block_scales(path, T):
    """NaN stays in its row, zero and subnormals are exact, however a number of tokens is multiplied."""
    w, x, _, p, _ = make(1, 320, 64, T, 1, Gate("raw"), None, torch.bfloat16, "bf16", False, T)
    w.w13.sf[0] = torch.arange(w.w13.sf[0].numel()).reshape(w.w13.sf[0].shape) % 12
    w.w13.sf[0, 5, 3], w.w13.sf[0, 70, 19] = 0x7F, 0x7F
    w.w13.sf[0, 9] = 0
    groups = group_by_expert(torch.zeros(T, 1, dtype=torch.long), 1)
    ours, y = (b.gemm1_swiglu(Rows(x), w, groups, torch.float32).values for b in (cpu, reference))
    assert torch.equal(ours.isnan(), y.isnan()) and ours[:, [5, 70]].isnan().all() and not ours[:, 9].any()
    limit = THRESHOLDS["integers" if path == "amx" else "fp32"]
    assert relative_error(ours.nan_to_num(), y.nan_to_num()) < limit


@needs_library
@pytest.mark.parametrize("tokens", [1 << 16, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits(path, dtype, tokens):
    """Each is read exactly, subnormals, infinities and NaN too, and results are rounded once, to nearest even, for
    experts with many tokens and with few."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.zeros(len(numbers), 16, dtype=dtype)
    x[:, 0] = numbers
    linear = NVFP4Linear(16, 8)
    linear.weight[:, 0] = torch.arange(8)  # codes 0, .5, 1, ... of the first column
    linear.get_parameter("weight_sf").fill_(0x38)  # 1
    linear.get_parameter("weight_global_scale").fill_(1 / 3)
    product = x[:, :1].float() * torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    matrix, order = linear.weights.matrix.stacked(), torch.arange(len(numbers), dtype=torch.int32)
    groups = Groups(order, order.new_tensor(range(0, len(numbers) + 1, tokens)), 1)
    codes, sf, scale = (t.expand(groups.num_experts, *t.shape[1:]) for t in matrix[:3])
    program = cpu._Program()
    matrix = matrix._replace(codes=codes, sf=sf, global_scale=scale)
    y = cpu._gemm2(program, Rows(x), matrix, groups, torch.ones(len(x), 1), dtype)
    assert program.run()
    want = (product * torch.tensor(1 / 3)).to(dtype)
    if path in ("avx512bf16", "amx") and dtype == torch.bfloat16:  # whose instructions take subnormals for 0
        normal = ~(torch.minimum(product.abs(), x[:, :1].float().abs()) < 2.0**-126)
        y, want = y.where(normal, 0), want.where(normal, 0)
    if path == "amx" and dtype == torch.bfloat16 and tokens == 4:  # infinity has no integers
        want = want.where(x[:, :1].isfinite(), torch.nan)
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y.nan_to_num(7), want.nan_to_num(7))


@needs_library
@pytest.mark.parametrize("T", [1, 4, 7, 8])
@pytest.mark.parametrize("exponents", [0, 6, 40])
def test_few_tokens_as_integers(path, exponents, T):
    """On the amx path each block of x has 16 bits, of which its largest number has 14 or more: a sum is off by at most
    2^-15 of that number for each weight. Blocks have other units, and numbers other sizes."""
    g = torch.Generator().manual_seed(exponents)
    x = torch.randn(T, 400, generator=g) * 2.0 ** torch.randint(-exponents, exponents + 1, (T, 400), generator=g)
    layer = random_layer(1, 400, 72).weights
    groups = group_by_expert(torch.zeros(T, 1, dtype=torch.long), 1)
    w = replace(layer, w13=layer.w13._replace(bias=None), gate=Gate("raw"))
    y = cpu.gemm1_swiglu(Rows(x.bfloat16()), w, groups, torch.float32).values.double()
    scale = torch.stack([w.w13.gate_scale, w.w13.global_scale]).repeat_interleave(72, 0)
    w, x = nvfp4.dequantize(w.w13.codes[0], w.w13.sf[0], None).double() * scale, x.bfloat16().double()
    largest = x.abs().unflatten(1, (-1, 16)).amax(-1, keepdim=True).expand(-1, -1, 16).flatten(1)
    bound = (largest @ w.abs().T) * (1.01 * 2**-15 if path == "amx" else 0) + x.abs() @ w.abs().T * 2**-18
    assert ((y - x @ w.T).abs() <= bound).all()


@needs_library
def test_quantize_edges(path):
    """Zeros, subnormals, the largest numbers, NaN and infinity give the bytes of `format.quantize`."""
    row = torch.tensor([0.0, -0.0, 6e-39, 1e-45, -1e-30, 1e-3, 0.25, -0.75, 1.25, 2.5, 3.5, 5.0, -5.0, 6.0, 7.0, 1e30])
    x = torch.stack([row, row * 1e-30, row * 0, row * 1e8, -row, row.roll(3)]).repeat(1, 35)[:, :552]
    x[:, 512:] *= 1.5  # beyond what is processed at once
    x[4, 17] = float("inf")
    groups = group_by_expert(torch.tensor([[0], [1], [1], [0], [2], [1]]), 2)
    for dtype in DTYPES:
        for scale, rounding in product((None, [1e-3, 5.0], [1e-31, 2.0**101]), (False, True)):
            scale = None if scale is None else torch.tensor(scale)
            a, b = (m.quantize_rows(x.to(dtype), groups.token, scale, groups, rounding) for m in (cpu, reference))
            finite = x.to(dtype).isfinite().all(-1)[groups.order]
            assert torch.equal(a.values[finite], b.values[finite])
            # NaN is 0x7f or 0xff
            assert torch.equal(a.sf.clamp(max=0x7F), b.sf.clamp(max=0x7F)) and torch.equal(a.scale, b.scale)
    x[0, 3] = float("nan")
    a, b = (m.quantize_rows(x, groups.token, None, groups) for m in (cpu, reference))
    assert torch.equal(a.scale.isnan(), b.scale.isnan()) and a.scale.isnan().any()
    assert torch.equal(a.sf.clamp(max=0x7F), b.sf.clamp(max=0x7F))


adapters = st.fixed_dictionaries(dict(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5), unrouted=st.integers(0, 2),
    K=st.sampled_from([8, 40, 520, 1100]), N=st.sampled_from([8, 40, 520, 1100]),
    rank=st.sampled_from([1, 8, 24, 520, 600]), slots=st.integers(1, 3), dtype=st.sampled_from(DTYPES),
    bare=st.booleans(), indexed=st.booleans(), seed=st.integers(0, 999),
))  # fmt: skip


def check_adapter(problem):
    """Against a loop over rows in float64; rows to which nothing is added keep their bits."""
    sizes, K, N, rank, slots, dtype = (problem[key] for key in ("sizes", "K", "N", "rank", "slots", "dtype"))
    torch.manual_seed(problem["seed"])
    G, R = len(sizes), sum(sizes) + problem["unrouted"]
    a, b = torch.randn(G, rank, K, dtype=dtype) / K**0.5, torch.randn(G, N, rank, dtype=dtype) / rank**0.5
    x, out = torch.randn(max(R, 1), K, dtype=dtype), torch.randn(R, N, dtype=dtype)
    bare = torch.rand(R) < 0.3 if problem["bare"] else None
    index = torch.randint(len(x) * slots, (R,), dtype=torch.int32) if problem["indexed"] else None
    target = torch.randperm(R).int() if problem["indexed"] else None
    offsets = torch.tensor([0, *sizes]).cumsum(0).int()
    want, changed = out.double(), torch.zeros(R, dtype=torch.bool)
    for r, g in enumerate(torch.arange(G).repeat_interleave(torch.tensor(sizes)).tolist()):
        if bare is None or not bare[r]:
            row, to = (r, r) if index is None else (index[r] // slots, target[r])
            want[to] += b[g].double() @ (a[g].double() @ x[row].double())
            changed[to] = True
    got = out.clone()
    cpu.add_low_rank(got, x, a, b, offsets, bare, index, slots, target)
    assert torch.equal(got[~changed], out[~changed])
    if changed.any():
        assert relative_error(got, want) < THRESHOLDS["fp32" if dtype == torch.float32 else "half"]


@needs_library
def test_adapters(path):
    @settings(max_examples=40, deadline=None)
    @given(adapters)
    def any_adapter(problem):
        check_adapter(problem)

    any_adapter()
    x, offsets, index = (
        torch.ones(2, 8),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([0, 4], dtype=torch.int32),
    )
    with pytest.raises(ValueError, match="each index must be that of a row"):
        cpu.add_low_rank(torch.ones(2, 8), x, x[None, :1], x.T[None, :, :1].contiguous(), offsets, None, index, 2, None)


@needs_library
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_same_bits_twice_and_for_any_number_of_threads(path, activations):
    w, x, ids, p, groups = make(
        6, 264, 130, 50, 2, GATES[0], torch.float32, torch.bfloat16, activations, False, 0
    )  # fmt: skip

    def run():
        rows = Rows(x, index=groups.token)
        if activations == "nvfp4":
            rows = cpu.quantize_rows(x, groups.token, None, groups)
        h = cpu.gemm1_swiglu(rows, w, groups, x.dtype)
        h = cpu.quantize_rows(h.values, None, None, groups) if activations == "nvfp4" else h
        return cpu.gemm2_combine(h, w, groups, p, x.dtype)

    threads, results = torch.get_num_threads(), []
    try:
        for n in (2, 2, 1, 3):
            torch.set_num_threads(n)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], r) for r in results[1:])


@needs_library
def test_threads_of_its_own(path, monkeypatch):
    """If there is no OpenMP runtime to share, cpu.c starts its own threads."""
    problem = dict(E=5, H=264, I=130, T=30, k=2, gate=GATES[0], bias=None, dtype=torch.float32,
                   activations="nvfp4", static=True, seed=1)  # fmt: skip
    monkeypatch.setattr(cpu, "_parallel", lambda: None)
    check(problem)


# ---------------------------------------------------------------- a layer without Python


def prepared(E=6, H=264, I=130, T=9, k=2, activations="bf16"):
    """(a Call, its x, ids, p and y, the layer's weights)"""
    w, x, ids, p, _ = make(E, H, I, T, k, GATES[0], None, torch.bfloat16, activations, False, 0)
    y = torch.zeros_like(x)
    return cpu.Call(x, ids, p, w, y), x, ids, p, y, w


@needs_library
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_a_call_reads_its_tensors_anew_each_time(path, activations):
    call, x, ids, p, y, w = prepared(activations=activations)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_(), p.uniform_(), ids.copy_(torch.randint(-1, 7, ids.shape))
        call()
        assert torch.equal(y, cpu.experts(x, ids, p, w)) and call.done == seed + 1
    assert not call.released


@needs_library
def test_a_call_that_fails_gives_nan_and_is_heard_of():
    call, x, ids, p, y, w = prepared()
    ids[3, 1] = 7
    call()
    assert y.isnan().all()
    with pytest.raises(ValueError, match=r"expert ids must lie in 0\.\.num_experts - 1"):
        cpu.raise_failure()
    cpu.raise_failure()  # once
    ids[3, 1] = 5
    call()
    assert torch.equal(y, cpu.experts(x, ids, p, w))


@pytest.mark.slow_after(1)
@needs_library
def test_calls_from_many_threads(path, monkeypatch):
    """The library's threads do one job at a time, whoever asks for it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    calls = [prepared(T=T) for T in (1, 5, 30, 61)]
    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(lambda call: [call[0]() for _ in range(25)], calls))
    for call, x, ids, p, y, w in calls:
        assert call.done == 25 and torch.equal(y, cpu.experts(x, ids, p, w))


FORKED = """
import os, torch
from tests.kernels.test_cpu import cpu, prepared
torch.set_num_threads(3)
call, x, ids, p, y, w = prepared(T=40)
call()
want = y.clone()
child = os.fork()
y.zero_()
call()
if child == 0:
    os._exit(not torch.equal(y, want))
assert torch.equal(y, want) and os.waitpid(child, 0)[1] == 0
print("well")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@needs_library
def test_a_forked_process_makes_threads_of_its_own():
    done = python(FORKED)
    assert "well" in done.stdout, done.stderr


@pytest.mark.slow_after(2)
@needs_library
def test_the_layer_uses_it_and_can_be_told_not_to(path, monkeypatch):
    torch.manual_seed(0)
    experts = NVFP4Experts.from_dense(torch.randn(4, 96, 64) / 8, torch.randn(4, 64, 48) / 7)
    x, ids, p = torch.randn(9, 64), torch.randint(-1, 5, (9, 3)), torch.rand(9, 3)
    ours = experts(x, ids, p)
    assert experts.backend(x.dtype).name == "cpu"
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "reference")
    assert experts.backend(x.dtype).name == "reference"
    assert relative_error(ours, experts(x, ids, p)) < THRESHOLDS["fp32"]


@needs_library
def test_strided_weights_and_rows():
    w, x, ids, p, groups = make(3, 64, 32, 9, 2, GATES[0], None, torch.float32, "bf16", False, 0)
    a = cpu.gemm1_swiglu(Rows(x, index=groups.token), w, groups, x.dtype).values
    strided, wide = (torch.stack([t, t], -1)[..., 0] for t in (w.w13.codes, x))
    b = cpu.gemm1_swiglu(
        Rows(wide, index=groups.token), replace(w, w13=w.w13._replace(codes=strided)), groups, x.dtype
    ).values
    assert torch.equal(a, b)


# ---------------------------------------------------------------- the build and its cache


# As if there were no wheel's library, and compiled quickly
COMPILED_HERE = """
from moe_nvfp4.kernels.cpu import backend as cpu
cpu._shipped = lambda: None
cpu.FLAGS = tuple(flag.replace("-O3", "-O0") for flag in cpu.FLAGS)
"""


def compiling_python(code, **env):
    """A fresh interpreter without the wheel's library, with only the CPU backend's cache in `MOE_NVFP4_CACHE`."""
    return python(COMPILED_HERE + code, **env)


LAYER = """
import torch
from moe_nvfp4 import NVFP4Experts
torch.manual_seed(0)
experts = NVFP4Experts.from_dense(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
for _ in range(2):
    y = experts(torch.ones(2, 32).bfloat16(), torch.tensor([[0], [1]]), torch.ones(2, 1))
print(experts.backend(y.dtype).name)
"""


@pytest.mark.slow
@needs_library
def test_two_processes_build_at_once(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MOE_NVFP4_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", COMPILED_HERE + LAYER]
    both = [subprocess.Popen(command, env=env, cwd=ROOT, stdout=-1, text=True) for _ in range(2)]
    assert [p.communicate()[0].strip() for p in both] == ["cpu"] * 2
    files = list((tmp_path / "cpu").iterdir())  # one library for what the machine can run, one with the path that does
    assert [file.suffix for file in files] == [".so"] * 2 and (tmp_path / "cpu").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@needs_library
def test_cache_is_used_repaired_and_keyed(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path))
    library = cpu.build("cpu_detect.c")
    built = library.stat().st_mtime_ns
    assert cpu.build("cpu_detect.c") == library and library.stat().st_mtime_ns == built
    whole = library.read_bytes()
    for damage in (whole[:5000], b"", whole[:-40] + b"\0" + whole[-39:]):
        library.write_bytes(damage)
        assert cpu.build("cpu_detect.c") == library and cache.is_whole(library)
    assert cpu.build("cpu_detect.c", "-DONLY=0") != library
    for file in cpu.SOURCES:
        shutil.copy(cpu.FOLDER / file, tmp_path)
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    assert cpu.build("cpu_detect.c") == library
    (tmp_path / "cpu_path.h").write_bytes((tmp_path / "cpu_path.h").read_bytes() + b"\n/* a later version */\n")
    assert cpu.build("cpu_detect.c") != library


@pytest.mark.slow
@needs_library
@torch.inference_mode()
def test_the_benchmark_calls_the_loops_as_they_are():
    """examples/benchmark_cpu.py calls `_gemm` directly: GB/s of 4-bit bytes for each number of threads."""
    threads = torch.get_num_threads()
    rate = runpy.run_path(str(ROOT / "examples" / "benchmark_cpu.py"))["issue_bound"](threads) / threads
    assert 0.01 < rate < 1000


@pytest.mark.slow
def test_without_a_compiler_the_reference_takes_over(tmp_path):
    done = compiling_python(LAYER, MOE_NVFP4_CACHE=tmp_path, CC="no-such-compiler")
    assert done.stdout.strip() == "reference", done.stderr
    warnings = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert len(warnings) == 1 and "no-such-compiler" in warnings[0] and "install a C compiler" in warnings[0]
    (tmp_path / "file").touch()  # a missing cache folder must not be reported as a missing compiler
    for folder in (tmp_path / "file", Path("/proc/none/of/these")):  # the latter names a folder above it
        done = compiling_python(LAYER, MOE_NVFP4_CACHE=folder)
        assert done.stdout.strip() == "reference" and "set MOE_NVFP4_CACHE to a folder" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_compiler_that_fails(tmp_path):
    fake = tmp_path / "cc"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "error: out of order" >&2\nexit 1\n')
    fake.chmod(0o755)
    done = compiling_python(LAYER, MOE_NVFP4_CACHE=tmp_path / "cache", CC=fake)
    assert done.stdout.strip() == "reference"
    assert done.stderr.count("Warning") == 1 and "error: out of order" in done.stderr
    assert list((tmp_path / "cache" / "cpu").iterdir()) == []


@pytest.mark.slow
def test_a_full_disk_is_not_a_missing_compiler(tmp_path):
    fake, said = tmp_path / "cc", ("ld: final link failed: No space left on device", "error: ld returned 1 exit status")
    says = "".join(f'echo "{line}" >&2\n' for line in said)
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{says}exit 1\n')
    fake.chmod(0o755)
    done = compiling_python(LAYER, MOE_NVFP4_CACHE=tmp_path / "cache", CC=fake)
    assert done.stdout.strip() == "reference" and "install a C compiler" not in done.stderr
    want = f"No space left on device): free some in {tmp_path / 'cache'}, or set MOE_NVFP4_CACHE"
    assert want in done.stderr, done.stderr


def test_files_of_the_cache_that_cannot_be_read_are_made_again(tmp_path):
    """As those that sudo left there."""
    assert not cache.is_whole(tmp_path) and not cache.is_whole(tmp_path / "file")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no Unix permissions")
def test_a_cache_that_others_can_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path))
    folder = tmp_path / "cpu"
    folder.mkdir()
    for mode in (0o777, 0o770):
        folder.chmod(mode)
        with pytest.raises(PermissionError, match="others could write"):
            cpu.build("cpu_detect.c")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.rmdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="others could write"):
        cpu.build("cpu_detect.c")


@pytest.mark.slow
@needs_library
def test_a_wheels_library_is_used_if_it_is_of_this_source(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path / "cache"))

    def installed(name, library):  # a folder each, since a loaded library is remembered by its name
        folder = tmp_path / name
        folder.mkdir()
        for file in cpu.SOURCES:
            shutil.copy(Path(cpu.__file__).parent / file, folder)
        (folder / "_cpu.so").write_bytes(library)
        monkeypatch.setattr(cpu, "FOLDER", folder)
        return folder

    unmarked = cpu.build("cpu_detect.c").read_bytes()
    monkeypatch.setattr(cpu, "FLAGS", (*(f for f in cpu.FLAGS if f != "-O3"), "-O0"))
    marked = cpu.build("cpu.c", f'-DSOURCES="{cpu.checksum()}"').read_bytes()  # as in a wheel, and with all paths
    for name, library in {"no library": b"text", "of unknown sources": unmarked}.items():
        installed(name, library)
        assert cpu._shipped() is None
    folder = installed("a wheel", marked)
    assert cpu._shipped().paths() == sum(1 << cpu.PATHS.index(name) for name in cpu.paths())
    for file in cpu.SOURCES:
        now = (folder / file).read_bytes()
        (folder / file).write_bytes(now + b"\n/* a later version */\n")
        assert cpu._shipped() is None
        (folder / file).write_bytes(now)
    assert cpu._shipped() is not None
    (installed("no file", b"") / "_cpu.so").unlink()
    assert cpu._shipped() is None


@pytest.mark.slow
@needs_library
def test_a_library_with_other_structs_is_refused(monkeypatch):
    class Longer(cpu._Combine):
        _fields_ = [("more", ctypes.c_int64)]

    stages = cpu._STAGES
    for mine in ((*stages[:3], Longer, *stages[4:]), stages[:4], (*stages, Longer)):
        monkeypatch.setattr(cpu, "_STAGES", mine)
        with pytest.raises(OSError, match=r"made from another cpu.c: its stages take \[56, 112, 232, 64, \d+\] bytes"):
            cpu._library.__wrapped__(cpu.path())


@pytest.mark.slow
@needs_library
def test_without_python(tmp_path):
    """cpu_standalone.c, for machines without torch; also with clang, and for ARM, if these are installed."""
    source, flags = Path(__file__).with_name("cpu_standalone.c"), ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    builds = [(["cc"], []), (["clang"], [])]
    builds.append((["zig", "cc", "-target", "aarch64-linux-musl"], ["qemu-aarch64-static"]))
    builds.append((["aarch64-linux-gnu-gcc", "-static"], ["qemu-aarch64-static"]))
    ran = 0
    for compiler, emulator in builds:
        if not all(map(shutil.which, (compiler[0], *emulator))):
            continue
        program = tmp_path / str(ran)
        subprocess.run([*compiler, *flags, "-pthread", "-I", cpu.FOLDER, source, "-o", program], check=True)
        done = subprocess.run([*emulator, program], capture_output=True, text=True)
        assert done.returncode == 0 and "portable: relative error" in done.stdout, done.stdout
        ran += 1
    if not ran:
        pytest.skip("neither cc nor clang nor an ARM compiler with an emulator")


@pytest.mark.slow
def test_a_path_this_machine_lacks(tmp_path):
    if not cpu.available():
        pytest.skip("no C compiler")
    lacking = next(name for name in cpu.PATHS if name not in cpu.paths())
    for name, why in ((lacking, "this machine can run portable"), ("avx1024", "unknown: the paths are portable, avx2")):
        done = compiling_python("from moe_nvfp4.kernels.cpu import backend as cpu; cpu.path()", MOE_NVFP4_CPU=name)
        assert f"MOE_NVFP4_CPU={name}" in done.stderr and why in done.stderr


EVERY_PATH = """
import torch
from tests.kernels import test_cpu as t
torch.set_num_threads(2)
count = 0
for parallel, seeds in ((cpu._parallel(), 10), (None, 3)):  # which threads run the loops says little of the loops
    cpu._parallel = lambda: parallel
    for name in cpu.paths():
        cpu.path = lambda: name
        for seed in range(seeds):
            pick = lambda options: options[(seed * 7 + len(options) * count) % len(options)]
            t.check(dict(E=pick([1, 5, 40]), H=pick([8, 24, 72, 100, 264]), I=pick([8, 24, 40, 130]),
                         T=pick([0, 1, 3, 7, 30]), k=pick([1, 2, 3]), gate=t.GATES[seed % len(t.GATES)],
                         bias=pick([None, *t.DTYPES]), dtype=t.DTYPES[count % 3],
                         activations=["bf16", "nvfp4"][seed // 2 % 2], static=seed % 2 == 0, seed=seed))
            t.check_adapter(dict(sizes=pick([[1], [0, 3, 2], [4, 0, 0, 1]]), unrouted=seed % 2, K=pick([8, 520, 1100]),
                                 N=pick([8, 520, 1100]), rank=pick([1, 24, 600]), slots=pick([1, 2]),
                                 dtype=t.DTYPES[count % 3], bare=seed % 2 == 0, indexed=seed % 3 > 0, seed=seed))
            count += 1
print("clean", count)
"""


@pytest.mark.slow
@needs_library
def test_address_and_undefined_behaviour_sanitizers(sanitized_cache):
    done = python_with_sanitizers(EVERY_PATH, sanitized_cache)
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]
    assert "runtime error" not in done.stderr
