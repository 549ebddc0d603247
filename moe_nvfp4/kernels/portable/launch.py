"""Launching Triton's kernels: which code is made for which GPU."""

from __future__ import annotations

import os
from functools import cache

import torch


def launch(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """On torch's current stream. `options` are Triton's: warps, stages."""
    kernel[grid](*arguments, **options, **target(arguments[0].device))


@cache
def target(device: torch.device) -> dict[str, object]:
    """Options of Triton's compiler.

    Every NVIDIA GPU gets the code of sm_80 (cp.async, ldmatrix, mma.sync), the same PTX but for its first lines: what
    runs on one and in the emulator runs on all. In decode it is faster on an H200 than what Triton makes for Hopper,
    which also lacks a fence in front of wgmma.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip:
        return {}
    return {"arch": "sm80", "enable_fp_fusion": True}
