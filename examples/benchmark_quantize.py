"""How fast weights are quantized and dequantized: MB/s of bf16 input, millions of elements per second of output.

python examples/benchmark_quantize.py [cuda]
"""

import sys
import time

import torch

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.quantize.recipes import RECIPES, quantize_matrix

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
print(f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, median of 7\n")
print("| matrix | " + " | ".join(f"{r}, MB/s" for r in RECIPES) + " | dequantize, M elements/s |")
print("|---|" + "---|" * (len(RECIPES) + 1))


def seconds(f, *args):
    times = []
    for _ in range(8):  # the first warms up
        start = time.perf_counter()
        f(*args)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[3]


for N, K in ((768, 2048), (4096, 4096)):
    w = torch.randn(N, K, device=device, dtype=torch.bfloat16)
    rates = [w.numel() * 2 / seconds(quantize_matrix, w, recipe) / 1e6 for recipe in RECIPES]
    codes, sf, global_scale = quantize_matrix(w)
    rates.append(w.numel() / seconds(nvfp4.dequantize, codes, sf, global_scale) / 1e6)
    print(f"| {N} x {K} | " + " | ".join(f"{rate:.0f}" for rate in rates) + " |")
