"""What `moe-nvfp4 env` prints, and an issue report needs: versions, devices, backends, caches, variables."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from moe_nvfp4 import backends
from moe_nvfp4._version import __version__
from moe_nvfp4.cache import cache_folder
from moe_nvfp4.experts import beside
from moe_nvfp4.quantize.report import readable_size
from moe_nvfp4.ready import compiles_ahead

PACKAGES = ("torch", "transformers", "safetensors", "huggingface-hub", "accelerate", "triton", "nvidia-cutlass-dsl",
            "apache-tvm-ffi", "vllm", "peft", "compressed-tensors", "nvidia-modelopt", "gguf", "numpy")  # fmt: skip
# Variables that change what runs, by name or prefix. No others are shown: they may be secrets (HF_TOKEN).
VARIABLES = re.compile(
    r"MOE_NVFP4_.*|XDG_CACHE_HOME|CC|OMP_.*|GOMP_.*|KMP_.*|MKL_NUM_THREADS|CUDA_.*|TORCH_.*|PYTORCH_.*|TORCHINDUCTOR_.*"
    r"|TRITON_.*|CUTE_DSL_.*|NCCL_.*|VLLM_PLUGINS|VLLM_CPU_.*|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE"
    r"|TOKENIZERS_PARALLELISM|TQDM_DISABLE"
)


def headline() -> str:
    """What a measurement ran on, in one line."""
    device = f"{cpu_name()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, {device}"
    return f"moe-nvfp4 {__version__}, torch {torch.__version__}, {device}, {date.today()}"


@dataclass(frozen=True)
class Environment:
    """What runs here, and why nothing else does. Nothing is downloaded to find out, and no kernel runs.

    packages   name -> version, or "not installed"; also of CUDA, the driver and the C compiler
    backends   device -> backend -> what it runs there, and why no more
    error      what is wrong with the values of this library's variables
    caches     folder of the cache -> its files and their bytes
    variables  name -> value, of those that matter here
    """

    version: str
    folder: str
    python: str
    platform: str
    packages: dict[str, str]
    cpu: str
    threads: int
    cores: int | None
    backends: dict[str, dict[str, dict[str, Any]]]
    error: str | None
    cache: str
    caches: dict[str, dict[str, int]]
    variables: dict[str, str]

    @classmethod
    def here(cls) -> Environment:
        packages = {package: _version(package) for package in PACKAGES} | {
            "CUDA of torch": torch.version.cuda or "none"
        }
        if torch.version.hip:
            packages["ROCm of torch"] = torch.version.hip
        driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "cc")
        packages |= {"NVIDIA driver": _first_line(*driver), "C compiler": _first_line(*compiler.split(), "--version")}
        found: dict[str, dict[str, dict[str, Any]]] = {}
        wrong = _wrong_variables()
        try:
            report = backends.report()
        except ValueError:  # of MOE_NVFP4_CPU
            report = []
        for row in report:
            rows = found.setdefault(
                str(row.device), {"offload": {"runs": [], "reason": beside(row.device), "proof": ""}}
            )
            rows[row.backend] = {"runs": list(row.runs), "reason": row.reason, "proof": row.proof}
        error = f"{'; '.join(wrong)}; nothing runs until each is set to what is named here, or unset" if wrong else None
        cache = cache_folder()
        return cls(
            __version__, str(Path(__file__).parent), platform.python_version(), platform.platform(), packages,
            cpu_name(), torch.get_num_threads(), os.cpu_count(), found, error, str(cache),
            {folder.name: _size(folder) for folder in sorted(cache.glob("*/"))},
            {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)},
        )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The same for people."""
        yield f"moe-nvfp4 {self.version} in {self.folder}"
        yield f"Python {self.python}, {self.platform}"
        yield ""
        yield from (f"{package:20s} {version}" for package, version in self.packages.items())
        yield ""
        yield f"CPU: {self.cpu}, {self.threads} threads of torch, {self.cores} in the machine"
        for device, rows in self.backends.items():
            yield f"{device}:"
            for name, row in rows.items():
                yield f"  {name:10s} {'; '.join(filter(None, (', '.join(row['runs']), row['reason'], row['proof'])))}"
        if self.error is not None:
            yield f"error: {self.error}"
        yield ""
        whole = {key: sum(size[key] for size in self.caches.values()) for key in ("files", "bytes")}
        yield f"cache {self.cache}: {_readable(whole)}"
        yield from (f"  {name:18s} {_readable(size)}" for name, size in self.caches.items())
        yield ""
        yield from (f"{name}={value}" for name, value in self.variables.items())
        if not self.variables:
            yield "no environment variable that matters here is set"


def cpu_name() -> str:
    """The CPU's own name, such as "Intel(R) Xeon(R) Platinum 8480C"."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _wrong_variables() -> list[str]:
    """What is wrong with the values of MOE_NVFP4_BACKEND, _CPU, _CHECK and _COMPILE."""
    wrong = []
    for read in (*backends.read_variables(), compiles_ahead):
        try:
            read()
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def _version(package: str) -> str:
    for name in (package, "vllm-cpu") if package == "vllm" else (package,):
        try:
            return metadata.version(name) + (f" ({name})" if name != package else "")
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _first_line(*command: str) -> str:
    """The first line that a program prints, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "not found"
    return next(iter(done.stdout.splitlines()), "") or f"{command[0]} failed (exit code {done.returncode})"


def _size(folder: Path) -> dict[str, int]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}


def _readable(size: dict[str, int]) -> str:
    if not size["files"]:
        return "empty"
    return f"{readable_size(size['bytes'])} in {size['files']} {'file' if size['files'] == 1 else 'files'}"
