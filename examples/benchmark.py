"""4-bit experts on a GPU against transformers' bf16 experts: one layer, cold L2, CUDA-graph replay.

python examples/benchmark.py [--shapes qwen,mixtral,deepseek,gptoss] [--tokens 1,4,16,64,256,1024,4096,16384]
                             [--backend portable] [--linears] [--adapters rank] [--peer module] [--json file]
                             [--plot file.png]

Each number is the median of replays of a captured call. Before each replay, L2 is filled by writing (so that
nothing of ours is in it) and then by reading (so that no dirty lines are left for the next kernel to
wait for). Each measurement begins with a rest and a few replays that are not counted: right after large batches, at the
GPU's power limit, small ones take up to a fifth longer. The roof is the time of the touched 4-bit bytes at --bandwidth
or of the arithmetic at --tflops, whichever is longer. The defaults of both were measured on an H200 (a large copy, a
bf16 matrix product).

--backend runs kernels that would not be chosen on this GPU (MOE_NVFP4_BACKEND). --linears measures `NVFP4Linear`
against torch's bf16 linear instead of experts, --adapters experts with LoRA adapters of a rank: one for all tokens, and
four of which each token has one.

A peer is a module with `make(w13 [E, 2I, H], w2 [E, H, I]) -> f(x [T, H], ids [T, top_k], weights) -> [T, H]`,
given dense bf16 weights.
"""

import argparse
import datetime
import importlib
import json
import os
from functools import partial

import torch

from moe_nvfp4 import ready
from moe_nvfp4.bench import CudaClock, Shape, dense_experts, random_experts
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.ops import moe_forward
from moe_nvfp4.stages import Adapter

DEVICE = torch.device("cuda")
SHAPES = {  # name: (title, H, I, E, top_k, dtype of its routing weights in transformers)
    "qwen": ("Qwen3-30B-A3B", 2048, 768, 128, 8, torch.bfloat16),
    "mixtral": ("Mixtral-8x7B", 4096, 14336, 8, 2, torch.float32),
    "deepseek": ("DeepSeek-R1, 32 of 256 experts", 7168, 2048, 32, 8, torch.float32),
    "gptoss": ("gpt-oss-120b", 2880, 2880, 128, 4, torch.bfloat16),
}
LINEARS = {"Qwen3-30B q": (4096, 2048), "Qwen3-30B k, v": (512, 2048), "Qwen3-30B o": (2048, 4096),
           "Llama-3.3-70B q, o": (8192, 8192), "Llama-3.3-70B k, v": (1024, 8192), "Llama-3.3-70B up": (28672, 8192),
           "DeepSeek-R1 q_a": (1536, 7168), "DeepSeek-R1 q_b": (24576, 1536), "DeepSeek-R1 kv_a": (576, 7168),
           "DeepSeek-R1 kv_b": (32768, 512), "DeepSeek-R1 o": (7168, 16384),
           "lm_head of Qwen3": (151936, 2048),
           "Qwen3-30B q, k, v": ((4096, 512, 512), 2048), "Mixtral q, k, v": ((4096, 1024, 1024), 4096),
           "gate, up": ((4096, 4096), 2048)}  # title: (N, K); several N: linears that read the same rows  # fmt: skip


def measure(name, token_counts, peers, clock):
    """Yield rows of numbers for one shape."""
    title, H, I, E, top_k, dtype = SHAPES[name]
    shape = Shape(H, I, E, top_k)
    layers = {
        "W4A16": partial(moe_forward, weights=random_experts(shape, DEVICE).weights),
        "W4A4": partial(moe_forward, weights=random_experts(shape, DEVICE, "nvfp4").weights),
        "bf16": dense_experts(shape, DEVICE),
    } | {peer: make_peer(peer, E, H, I) for peer in peers}
    for T in token_counts:
        torch.manual_seed(T)
        scores, ids = torch.rand(T, E, device="cuda").topk(top_k)
        batch = torch.randn(T, H, device="cuda").bfloat16(), ids, scores.to(dtype)
        yield {
            "shape": name, "title": title, "H": H, "I": I, "E": E, "top_k": top_k, "T": T,
            "bytes": ids.unique().numel() * 3 * H * I * 9 / 16, "flops": 6 * H * I * T * top_k,
            "us": {variant: 1e6 * clock(partial(layer, *batch)) for variant, layer in layers.items()},
        }  # fmt: skip


class Linears(torch.nn.Module):
    """Linears for the same rows; as_one: in one launch, where their kernels have it."""

    def __init__(self, sizes, K, activations, as_one):
        super().__init__()
        names = ("gate_proj", "up_proj") if len(sizes) == 2 else ("q_proj", "k_proj", "v_proj")
        for name, N in zip(names, sizes, strict=False):
            linear = NVFP4Linear(K, N, activations=activations, device="cuda")
            linear.weight.data.random_(0, 256)
            linear.weight_sf.data.random_(40, 72)
            linear.weight_global_scale.data.fill_(1e-2)
            ready.prepare(linear)
            self.add_module(name, linear)
        if as_one:
            ready.prepare(self)

    def forward(self, x):
        return [linear(x) for linear in self.children()]


def measure_linears(token_counts, clock, roof):
    """Print a table of linears. roof(bytes, FLOPs): the least us."""
    print("| linear (N, K) | T | W4A16 us | of the roof | W4A4 us | bf16 us | x bf16 |\n|---|--:|--:|--:|--:|--:|--:|")
    each = [(*of, as_one) for of in LINEARS.items() for as_one in (False, True)[: 1 if type(of[1][0]) is int else 2]]
    for title, (sizes, K), as_one in each:
        sizes = (sizes,) if type(sizes) is int else sizes
        N, title = sum(sizes), title + " as one" * as_one
        linears = [Linears(sizes, K, activations, as_one) for activations in ("bf16", "nvfp4")]
        bf16 = torch.randn(N, K, device="cuda").bfloat16() * 0.02
        for T in token_counts:
            x = torch.randn(T, K, device="cuda").bfloat16()
            calls = (*linears, partial(torch.nn.functional.linear, weight=bf16))
            ours, quantized, theirs = (1e6 * clock(partial(f, x)) for f in calls)
            share = roof(N * K * 9 / 16, 2 * N * K * T) / ours
            numbers = f"{ours:.1f} | {share:.0%} | {quantized:.1f} | {theirs:.1f} | {theirs / ours:.2f}"
            print(f"| {title} ({N}, {K}) | {T} | {numbers} |", flush=True)


def measure_adapters(names, token_counts, rank, clock):
    """Print a table of layers with adapters of experts, beside those without."""
    print("| layer (H, I, E, k) | T | without, us | one adapter, us | four, us | bf16 without, us |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in names:
        title, H, I, E, top_k, dtype = SHAPES[name]
        layer, bf16 = random_experts(shape := Shape(H, I, E, top_k), DEVICE), dense_experts(shape, DEVICE)
        adapters = {}
        for several in (0, 4):
            each = (E, several) if several else (E,)
            sizes = ((rank, H), (2 * I, rank)), ((rank, I), (H, rank))
            random = lambda *shape: torch.randn(shape, device="cuda").bfloat16() * 0.02
            adapters[several] = tuple((Adapter(*(random(*each, *shape) for shape in pair)),) for pair in sizes)
            ready.prepare(layer, top_k, adapters=(rank, several))
        for T in token_counts:
            torch.manual_seed(T)
            scores, ids = torch.rand(T, E, device="cuda").topk(top_k)
            batch = torch.randn(T, H, device="cuda").bfloat16(), ids, scores.to(dtype)
            calls = (
                partial(layer, *batch), partial(layer, *batch, adapters[0]),
                partial(layer, *batch, adapters[4], torch.arange(T, device="cuda") % 4), partial(bf16, *batch),
            )  # fmt: skip
            us = " | ".join(f"{1e6 * clock(call):.1f}" for call in calls)
            print(f"| {title} ({H}, {I}, {E}, {top_k}), rank {rank} | {T} | {us} |", flush=True)


def make_peer(module, E, H, I):
    w13 = torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16) * 0.02
    w2 = torch.randn(E, H, I, device="cuda", dtype=torch.bfloat16) * 0.02
    return importlib.import_module(module).make(w13, w2)


def plot(rows, arguments, path):
    """Plot TFLOP/s over arithmetic intensity, log-log, under the roof."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    intensity = [1, arguments.tflops / arguments.bandwidth, 1e5]
    axes.plot(intensity, [min(i * arguments.bandwidth, arguments.tflops) for i in intensity], "k-", lw=1)
    for name in dict.fromkeys(row["shape"] for row in rows):
        mine = [row for row in rows if row["shape"] == name]
        x = [row["flops"] / row["bytes"] for row in mine]
        (line,) = axes.plot(x, [row["flops"] / row["us"]["W4A16"] / 1e6 for row in mine], "o-", label=mine[0]["title"])
        bf16 = [row["flops"] / row["us"]["bf16"] / 1e6 for row in mine]
        axes.plot(x, bf16, "x:", color=line.get_color(), alpha=0.6)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of touched 4-bit weights", ylabel="TFLOP/s")
    axes.set_title("4-bit experts (circles), bf16 experts (crosses), and the roof of 4-bit weights")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,4096,16384")
    parser.add_argument("--peer", action="append", default=[], help="a module, see above")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the roof")
    parser.add_argument("--tflops", type=float, default=790, help="TFLOP/s of the roof")
    parser.add_argument("--backend", help="one of moe_nvfp4.backends")
    parser.add_argument("--linears", action="store_true")
    parser.add_argument("--adapters", type=int, metavar="RANK", help="a multiple of 8")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    arguments = parser.parse_args()
    if arguments.backend:
        os.environ["MOE_NVFP4_BACKEND"] = arguments.backend
    torch.manual_seed(0)
    roof = lambda size, flops: max(size / arguments.bandwidth, flops / arguments.tflops) / 1e6
    if not torch.cuda.is_available():
        raise SystemExit("this needs an NVIDIA GPU; examples/benchmark_cpu.py measures a CPU")
    clock, counts = CudaClock(), [int(T) for T in arguments.tokens.split(",")]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}, ", end="")
    print(f"launching an empty graph is {1e6 * clock(torch.ones(1, device=DEVICE).zero_):.1f} us of every number\n")
    if arguments.linears:
        return measure_linears(counts, clock, roof)
    if arguments.adapters:
        return measure_adapters(arguments.shapes.split(","), counts, arguments.adapters, clock)
    peers = "".join(f" {peer} us |" for peer in arguments.peer)
    print(f"| layer (H, I, E, k) | T | W4A16 us | TB/s | TFLOP/s | of the roof | W4A4 us | bf16 us |{peers} x bf16 |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|" + "--:|" * (len(arguments.peer) + 1))
    rows = []
    for name in arguments.shapes.split(","):
        for row in measure(name, counts, arguments.peer, clock):
            rows.append(row)
            ours, bf16 = row["us"]["W4A16"], row["us"]["bf16"]
            least = roof(row["bytes"], row["flops"])
            peers = "".join(f" {row['us'][peer]:.0f} |" for peer in arguments.peer)
            print(
                f"| {row['title']} ({row['H']}, {row['I']}, {row['E']}, {row['top_k']}) | {row['T']} | {ours:.1f} "
                f"| {row['bytes'] / ours / 1e6:.2f} | {row['flops'] / ours / 1e6:.0f} | {least / ours:.0%} "
                f"| {row['us']['W4A4']:.1f} | {bf16:.0f} |{peers} {bf16 / ours:.1f} |",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)
    if arguments.plot:
        plot(rows, arguments, arguments.plot)


if __name__ == "__main__":
    main()
