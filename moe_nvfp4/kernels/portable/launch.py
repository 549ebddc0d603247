"""Launching Triton's kernels, and compiling them ahead: which code is made for which GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache

import torch

from moe_nvfp4.progress import progress_bar

_NOTED: ContextVar[list | None] = ContextVar("noted", default=None)


def launch(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """On torch's current stream. `options` are Triton's: warps, stages."""
    if (noted := _NOTED.get()) is not None:
        noted.append((kernel, arguments, options))
    else:
        kernel[grid](*arguments, **options, **target())


@cache
def target() -> dict[str, object]:
    """Options of Triton's compiler.

    Every NVIDIA GPU gets the code of sm_80 (cp.async, ldmatrix, mma.sync), the same PTX but for its first lines: what
    runs on one and in the emulator runs on all. In decode it is faster on an H200 than what Triton makes for Hopper,
    which also lacks a fence in front of wgmma.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip:
        return {}
    return {"arch": "sm80", "enable_fp_fusion": True}


def compile_ahead(launches: Callable[[], None], device: torch.device) -> None:
    """Compile every kernel that `launches()`, run on meta tensors, would launch on `device`; several at a time.

    Triton keeps them on disk (TRITON_CACHE_DIR): the next process loads them.
    """
    token = _NOTED.set(noted := [])
    try:
        launches()
    finally:
        _NOTED.reset(token)
    distinct = {}
    for kernel, arguments, options in noted:
        known = [
            a.dtype if isinstance(a, torch.Tensor) else a if p.is_constexpr or a is None else int
            for p, a in zip(kernel.params, arguments, strict=True)
        ]
        distinct[repr((kernel, known, options))] = kernel, arguments, options

    def build(job):
        kernel, arguments, options = job
        with torch.cuda.device(device):
            kernel.warmup(*arguments, grid=(1,), **options, **target())

    jobs = list(distinct.values())
    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        for _ in progress_bar(pool.map(build, jobs), total=len(jobs), desc="moe_nvfp4: compiling", show=True, delay=3):
            pass
