"""What `moe-nvfp4 env` prints, and an issue report needs: versions, devices, backends, caches, variables."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import date
from importlib import metadata
from itertools import groupby
from pathlib import Path

import torch

from moe_nvfp4 import backends
from moe_nvfp4._version import __version__
from moe_nvfp4.cache import cache_folder
from moe_nvfp4.quantize.report import readable_size

PACKAGES = ("torch", "transformers", "safetensors", "huggingface-hub", "accelerate", "triton", "nvidia-cutlass-dsl",
            "apache-tvm-ffi", "vllm", "peft", "compressed-tensors", "nvidia-modelopt", "gguf", "numpy")  # fmt: skip
# Variables that change what runs, by name or prefix. No others are shown: they may be secrets (HF_TOKEN).
VARIABLES = re.compile(
    r"MOE_NVFP4_.*|XDG_CACHE_HOME|CC|OMP_.*|GOMP_.*|KMP_.*|MKL_NUM_THREADS|CUDA_.*|TORCH_.*|PYTORCH_.*|TORCHINDUCTOR_.*"
    r"|TRITON_.*|CUTE_DSL_.*|NCCL_.*|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE|TOKENIZERS_PARALLELISM|TQDM_DISABLE"
)


def headline() -> str:
    """What a measurement ran on, in one line."""
    device = f"{cpu_name()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, {device}"
    return f"moe-nvfp4 {__version__}, torch {torch.__version__}, {device}, {date.today()}"


def describe() -> Iterator[str]:
    """Yield the report's lines. Nothing is downloaded for them, and no kernel runs."""
    yield f"moe-nvfp4 {__version__} in {Path(__file__).parent}"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    yield ""
    for package in PACKAGES:
        yield f"{package:20s} {_version(package)}"
    yield f"{'CUDA of torch':20s} {torch.version.cuda or 'none'}"
    if torch.version.hip:
        yield f"{'ROCm of torch':20s} {torch.version.hip}"
    yield f"{'NVIDIA driver':20s} {_first_line('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader')}"
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "cc")
    yield f"{'C compiler':20s} {_first_line(*compiler.split(), '--version')}"
    yield ""
    yield f"CPU: {cpu_name()}, {torch.get_num_threads()} threads of torch, {os.cpu_count()} in the machine"
    for device, rows in groupby(backends.report(), key=lambda row: row.device):
        yield f"{device}:"
        for row in rows:
            yield f"  {row.backend:10s} {'; '.join(filter(None, (', '.join(row.runs), row.reason)))}"
    if forced := os.environ.get("MOE_NVFP4_BACKEND"):
        try:
            backends.named(forced)
        except ValueError as error:
            yield f"error: {error}; nothing runs until it names one of them, or is unset"
    yield ""
    yield f"cache {cache_folder()}: {_size(cache_folder())}"
    for folder in sorted(cache_folder().glob("*/")):
        yield f"  {folder.name:18s} {_size(folder)}"
    yield ""
    found = {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)}
    yield from (f"{name}={value}" for name, value in found.items())
    if not found:
        yield "no environment variable that matters here is set"


def cpu_name() -> str:
    """The CPU's own name, such as "Intel(R) Xeon(R) Platinum 8480C"."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _first_line(*command: str) -> str:
    """The first line that a program prints, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "not found"
    return next(iter(done.stdout.splitlines()), "") or f"{command[0]} failed (exit code {done.returncode})"


def _size(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    if not files:
        return "empty"
    size = readable_size(sum(path.stat().st_size for path in files))
    return f"{size} in {len(files)} {'file' if len(files) == 1 else 'files'}"
