"""How fast a checkpoint is converted to NVFP4 files, beside the speed of the disk: MB/s of bf16 source, and memory.

python examples/benchmark_convert.py [--gb 6] [--device cuda] [--recipe mse] [--folder .]

Makes a checkpoint of random bf16 weights with Qwen3-30B-A3B's sizes and names in a temporary folder (which needs 1.6
times the size), converts it with a cold and with a warm page cache, and removes everything. With a GPU, it converts on
the GPU and on the CPU, and compares every byte of the two results.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch

from moe_nvfp4.quantize.files import INDEX, ShardWriter
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, RECIPES

H, I, E = 2048, 768, 128
CONVERT = """
import sys, torch
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.options import Options
source, destination, recipe, device = sys.argv[1:]
torch.empty(1, device=device)  # starts CUDA, which is not counted
print(convert_checkpoint(source, destination, Options(recipe, device=device), progress=False).seconds)
"""


def make(folder: Path, size: int) -> float:
    """Write about `size` bytes of experts in shards of about 4 GB; returns how many MB/s were written."""
    folder.mkdir()
    layers = max(1, round(size / (E * 3 * H * I * 2)))
    shards = -(-layers // 3)
    torch.manual_seed(0)
    pool = [(torch.randn(H * I) * 0.02).bfloat16() for _ in range(16)]
    places, begin = {}, time.perf_counter()
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        outputs = {
            f"model.layers.{layer}.mlp.experts.{e}.{part}.weight": ("BF16", (H, I) if part == "down_proj" else (I, H))
            for layer, e, part in product(range(shard, layers, shards), range(E), ("gate_proj", "up_proj", "down_proj"))
        }
        writer = ShardWriter(folder / file, outputs)
        for i, name in enumerate(outputs):
            writer.write(name, pool[i % len(pool)])
        writer.sync()
        places |= dict.fromkeys(outputs, file)
    rate = files_size(folder) / (time.perf_counter() - begin) / 1e6
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "dtype": "bfloat16", "num_experts": E}))
    return rate


def files_size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.iterdir():
        with open(path, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> float:
    """Read the files one after the other; returns MB/s."""
    begin, buffer = time.perf_counter(), bytearray(1 << 23)
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    return files_size(folder) / (time.perf_counter() - begin) / 1e6


def convert(source: Path, destination: Path, recipe: str, device: str) -> tuple[float, float]:
    """Convert in a separate process: (MB/s of the source, peak memory in MB)."""
    shutil.rmtree(destination, ignore_errors=True)
    command = [sys.executable, "-c", CONVERT, str(source), str(destination), recipe, device]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    seconds = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"the conversion on {device} failed: see above")
    return files_size(source) / float(seconds) / 1e6, usage.ru_maxrss / 1000


def same(a: Path, b: Path) -> int:
    """Check that two folders have the same bytes; returns how many."""
    names = sorted(p.name for p in a.iterdir())
    if names != sorted(p.name for p in b.iterdir()):
        sys.exit(f"{a} and {b} have different files")
    for name in names:
        with open(a / name, "rb") as first, open(b / name, "rb") as second:
            while piece := first.read(1 << 24):
                if piece != second.read(1 << 24):
                    sys.exit(f"{name} differs between {a.name} and {b.name}")
            if second.read(1):
                sys.exit(f"{name} is longer in {b.name}")
    return sum((a / name).stat().st_size for name in names)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--gb", type=float, default=6, help="size of the source in GB")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--recipe", choices=RECIPES, default=DEFAULT_RECIPE)
parser.add_argument("--folder", type=Path, default=Path.cwd(), help="a folder on the disk to use")
args = parser.parse_args()

with tempfile.TemporaryDirectory(dir=args.folder) as name:
    source, results = Path(name) / "source", {}
    written = make(source, int(args.gb * 1e9))
    forget(source)
    cold, warm = read(source), read(source)
    where = f"{torch.cuda.get_device_name()}, " if args.device != "cpu" else ""
    where += f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    print(f"{files_size(source) / 1e9:.1f} GB of bf16, {args.recipe}; {where}")
    print(f"the disk: written at {written:.0f} MB/s, read at {cold:.0f} MB/s (from the page cache {warm:.0f})\n")
    print("| on | source | MB/s of bf16 | memory, MB |\n|---|---|---|---|", flush=True)
    for device in dict.fromkeys((args.device, "cpu")):
        for state in ("cold", "warm"):
            if state == "cold":
                forget(source)
            destination = Path(name) / device.replace(":", "-")
            rate, memory = convert(source, destination, args.recipe, device)
            print(f"| {device} | {state} | {rate:.0f} | {memory:.0f} |", flush=True)
        results[device] = destination
    if len(results) > 1:
        print(f"\n{same(*results.values()):,} bytes of results are the same on both")
