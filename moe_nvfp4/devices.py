"""Devices by name, looked up before any work begins; how many cores; and whether a graph is being captured."""

from __future__ import annotations

import os

import torch


def usable_device(name: str | torch.device | None = None) -> torch.device:
    """The device `name` ("cpu", "cuda", "cuda:1") of this machine; None: a GPU where there is one, else the CPU.

    ValueError for a name that torch does not know, and for a device that is not there or holds no data ("meta").
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is not a device: write cpu, cuda or cuda:1") from None
    if device.type == "meta":
        raise ValueError("the device 'meta' has shapes but no numbers, so nothing runs there: write cpu or cuda")
    if device.type != "cpu" and (device.index or 0) >= _count(device.type):
        found = ", ".join(device_names())
        raise ValueError(
            f"the device {str(name)!r} is not there: torch {torch.__version__} finds {found}; name one of these"
        )
    return device


def device_names() -> list[str]:
    """The devices of this machine: "cpu", and what torch can use besides."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator is not None else "cpu"
    return ["cpu", *(f"{kind}:{i}" for i in range(_count(kind) if kind != "cpu" else 0))]


def _count(kind: str) -> int:
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # this torch was built without support for such devices
        return 0
    return module.device_count() if module.is_available() else 0


def capturing(device: torch.device) -> bool:
    """Whether work on `device` is being captured into a CUDA graph, by the current stream; False on CPUs."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def finish(device: torch.device) -> None:
    """Wait for the current stream's work on a GPU: what it has written may then be read on any stream, and what it has
    read may be freed. In a capture there is nothing to wait for."""
    if device.type == "cuda" and not capturing(device):
        torch.cuda.current_stream(device).synchronize()


def cores() -> int:
    """How many of the machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
