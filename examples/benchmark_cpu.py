"""4-bit experts on the CPU against transformers' bf16 experts: one layer, cold weights, a markdown table.

python examples/benchmark_cpu.py [--seconds 1.0] [--shapes smol,mixtral,qwen] [--tokens 1,4,16,64,256] [--threads N]

Every call uses another copy of the layer, so that its weights are not in a cache. Each number is the median over calls,
in time slices that alternate with those of the other numbers, so that a slow moment of the machine affects all. The
speedup is against the faster of transformers' two implementations, eager and grouped_mm. If the machine does other work
too, a call waits for its slowest thread: use --threads 1.
GB/s are of the touched 4-bit bytes; in brackets is their share of the lower of two bounds: the rate at which this
machine reads memory, and the rate of the loop for one token on weights in the cache. GFLOP/s have in brackets their
share of the highest rate of torch's bf16 `linear`. OMP_PROC_BIND=true in the environment binds each thread to a core.
"""

import argparse
import datetime
import os
import platform
import re
import time
from functools import partial

import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_nvfp4 import NVFP4Experts
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.routing import Groups, Rows

SHAPES = {  # name: (title, H, I, E, top_k)
    "smol": ("SmolLM2 demo", 576, 192, 8, 8),
    "mixtral": ("Mixtral slice", 4096, 3584, 8, 2),
    "qwen": ("Qwen3-30B-A3B", 2048, 768, 128, 8),
}
COLD = 200e6  # bytes of copies to rotate through: far more than a cache holds
SLICES = 5  # time slices for each number


def bf16_layers(name):
    """Copies of transformers' experts in bf16, with random weights."""
    _, H, I, E, top_k = SHAPES[name]
    if name == "qwen":
        config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=top_k)
    else:
        config = MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=top_k)
    layers = []
    for _ in range(1 + max(1, int(COLD / (6 * E * H * I)))):
        with torch.device("meta"):
            layer = (Qwen3MoeExperts if name == "qwen" else MixtralExperts)(config)
        layer = layer.bfloat16().to_empty(device="cpu")
        for parameter in layer.parameters():
            parameter.uniform_(-0.02, 0.02)
        layers.append(layer)
    return layers


def nvfp4_layers(name, sizes=None):
    """Copies of our experts, with random codes and scales; sizes: (E, H, I)."""
    E, H, I = sizes or (SHAPES[name][i] for i in (3, 1, 2))
    layers, size = [], 6 * E * H * I * 9 // 32
    for _ in range(1 + max(1, int(COLD / size)) if sizes is None else 1):
        layer = NVFP4Experts(E, H, I)
        for key, parameter in layer.named_parameters():
            if parameter.dtype == torch.float32:
                parameter.fill_(1e-2)
            else:
                parameter.random_(32, 64) if key.endswith("_sf") else parameter.random_(0, 256)
        layers.append(layer)
    return layers


def median_us(call, seconds):
    """Median microseconds of call(0), call(1), ..."""
    return medians_us({"": (lambda: None, call)}, seconds)[""]


def medians_us(calls, seconds):
    """{name: (prepare, call)} -> {name: median microseconds of call(0), call(1), ...}, measured in time slices."""
    times = {name: [] for name in calls}
    for _ in range(SLICES):
        for name, (prepare, call) in calls.items():
            prepare()
            for i in range(2):
                call(i)
            enough, stop = 1 + len(times[name]), time.perf_counter() + seconds / SLICES
            while len(times[name]) < enough or time.perf_counter() < stop:
                start = time.perf_counter()
                call(len(times[name]))
                times[name].append(time.perf_counter() - start)
    return {name: sorted(found)[len(found) // 2] * 1e6 for name, found in times.items()}


def read_bandwidth():
    """GB/s of summing 512 MiB with all threads."""
    numbers = torch.ones(1 << 26, dtype=torch.int64)
    return numbers.nbytes / median_us(lambda i: numbers.sum(), 2.0) / 1e3


def issue_bound(threads):
    """GB/s of 4-bit bytes of the loop for one token on weights in L2: the rate of one thread times the threads."""

    def us(N, K=2048):
        w13 = nvfp4_layers("qwen", (1, K, N))[0].weights.w13
        rows = w13._replace(codes=w13.codes[:, :N], sf=w13.sf[:, :N], N=N, gate_scale=None)
        groups = Groups(torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), 1)
        x, out = Rows(torch.randn(1, K).bfloat16()), torch.empty(1, N)
        program = cpu._Program()
        for _ in range(8):
            cpu._gemm(program, x, groups, None, rows, out, False, 0, 1.0, 0.0, 0.0, 0)
        return median_us(lambda i: program.run(), 0.3) / 8, N * K * 9 / 16

    torch.set_num_threads(1)
    (short, few), (long, many) = us(128), us(512)
    torch.set_num_threads(threads)
    return threads * (many - few) / (long - short) / 1e3


def linear_rate():
    """GFLOP/s of torch's bf16 linear at its best, with all threads."""
    x, w = torch.randn(1024, 4096).bfloat16(), torch.randn(4096, 4096).bfloat16()
    return 2 * 1024 * 4096 * 4096 / median_us(lambda i: torch.nn.functional.linear(x, w), 1.0) / 1e3


def cpu_name():
    try:
        with open("/proc/cpuinfo") as file:
            return re.search(r"model name\s*: (.*)", file.read())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


def measure(name, token_counts, seconds):
    """({(variant, T): us}, {T: the share of the experts that is touched})."""
    _, H, _, E, top_k = SHAPES[name]
    batches = {}
    for T in token_counts:
        routings = [torch.rand(T, E).topk(top_k).indices for _ in range(16)]
        batches[T] = torch.randn(T, H).bfloat16(), routings, torch.full((T, top_k), 1 / top_k).bfloat16()
    ours, theirs = nvfp4_layers(name), bf16_layers(name)

    def activations(kind):
        for layer in ours:
            layer.activations = kind

    def implementation(kind):
        for layer in theirs:
            layer.config._experts_implementation = kind

    us = {}
    for T, (x, ids, p) in batches.items():
        call = lambda layers, i, x=x, ids=ids, p=p: layers[i % len(layers)](x, ids[i % 16], p)
        calls = {
            "W4A16": (partial(activations, "bf16"), partial(call, ours)),
            "W4A4": (partial(activations, "nvfp4"), partial(call, ours)),
            "eager": (partial(implementation, "eager"), partial(call, theirs)),
            "grouped_mm": (partial(implementation, "grouped_mm"), partial(call, theirs)),
        }
        us |= {(variant, T): found for variant, found in medians_us(calls, seconds).items()}
    return us, {T: sum(len(i.unique()) for i in ids) / len(ids) / E for T, (_, ids, _) in batches.items()}


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each number")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="some of these (default: all): " + ",".join(SHAPES))
    parser.add_argument("--tokens", default="1,4,16,64,256")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    if not cpu.available():
        raise SystemExit("no CPU kernels here; the line above says why")
    load = f"load before {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    bandwidth, issue, linear = read_bandwidth(), issue_bound(arguments.threads), linear_rate()
    bound = min(bandwidth, issue)
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, path {cpu.path()}, torch {torch.__version__},")
    print(f"{datetime.date.today()}, {load}, reads {bandwidth:.1f} GB/s, one token's loop on weights in L2")
    print(f"{issue:.1f} GB/s, bf16 linear {linear:.0f} GFLOP/s\n")
    print(
        "| layer (H, I, E, k) | T | W4A16 us | GB/s (of bound) | GFLOP/s (of linear) | W4A4 us | bf16 eager us "
        "| grouped_mm us | speedup |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name in arguments.shapes.split(","):
        title, H, I, E, top_k = SHAPES[name]
        us, touched = measure(name, [int(T) for T in arguments.tokens.split(",")], arguments.seconds)
        for T, part in touched.items():
            ours, w4a4, eager, grouped = (us[v, T] for v in ("W4A16", "W4A4", "eager", "grouped_mm"))
            rate, flops = part * 3 * E * H * I * 9 / 16 / ours / 1e3, 6 * T * top_k * H * I / ours / 1e3
            print(
                f"| {title} ({H}, {I}, {E}, {top_k}) | {T} | {ours:.0f} | {rate:.1f} ({rate / bound:.0%}) "
                f"| {flops:.0f} ({flops / linear:.0%}) | {w4a4:.0f} | {eager:.0f} | {grouped:.0f} "
                f"| {min(eager, grouped) / ours:.1f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
