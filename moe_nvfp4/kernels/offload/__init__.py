"""Experts on the CPU beside an NVIDIA GPU: the weights stay in host memory, and the CPU kernels multiply them there.

It is no `Backend`, as weights and x are in different places: `moe_nvfp4.experts` calls it.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from torch import Tensor

from moe_nvfp4.kernels import cpu
from moe_nvfp4.kernels.backend import Device


def unavailable(device: Device) -> str | None:
    """None if it runs beside `device`, else the reason, as that of `Backend.unavailable`."""
    if device.capability is None:
        return "runs beside NVIDIA GPUs"
    reason = cpu.BACKEND.functions.missing()
    return f"computes with the CPU kernels, whose library {reason}" if reason else None


def functions() -> ModuleType:
    """The module with `experts`, imported on first use."""
    return import_module(f"{__name__}.backend")


def place(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU, in memory that the kernels read well; itself or a copy."""
    from moe_nvfp4.kernels.offload.pages import place

    return place(tensor)
