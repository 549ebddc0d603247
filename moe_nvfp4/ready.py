"""Models whose calls never wait for a compiler."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

from moe_nvfp4.backends import PACKAGES, Backend, Device, Gpu, Selected, explain
from moe_nvfp4.checks import check_dtype
from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.joined import as_one, join, joinable, siblings
from moe_nvfp4.kernels import offload
from moe_nvfp4.kernels.calls import Call, compile_ahead
from moe_nvfp4.kernels.common import ahead
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.stages import padded_rank


def prepare(
    model: nn.Module,
    top_k: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    beside: torch.device | None = None,
    adapters: tuple[int, int] | None = None,
    expert_map: bool = False,
) -> int:
    """Make the 4-bit experts and linears of `model` (or of a single layer) ready for activations of `dtype`: bring the
    weights into their kernels' layout and, on GPUs, compile and load every kernel that any number of tokens needs.

    top_k: experts per token; None leaves the experts' kernels to the first calls. Layers of equal sizes share kernels.
    beside: the GPU that multiplies many tokens by copies of experts that stay on the CPU: its kernels are compiled too,
    for layers that are copied whole.
    adapters: for calls with LoRA adapters of experts, (their rank, how many there are of which each token has one; 0:
    they are for all tokens).
    expert_map: for calls with one (see `NVFP4Experts`).
    Several processes compile, with a progress bar, for some seconds on 16 cores; the next start finds all kernels on
    disk. MOE_NVFP4_COMPILE=lazy leaves compiling to the calls. Returns how many kernels were compiled.

    ValueError for another top_k, TypeError for a dtype that activations cannot have.
    """
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k is a number of experts per token, got {top_k!r}")
    check_dtype(dtype)
    calls: dict[torch.device, list[tuple[Backend, Call]]] = defaultdict(list)
    if adapters is not None:
        adapters = padded_rank(adapters[0]), adapters[1]
    for module in model.modules():
        if isinstance(module, NVFP4Experts):
            module.prepare(dtype)
            if top_k is not None:
                fused = module._hooks().fused
                call = Call.of(module.weights, dtype, top_k, fused, adapters=adapters, expert_map=expert_map)
                calls[module.down_proj.device].append((module.backend(dtype), call))
                if beside is not None and module.on_cpu:
                    (problem, _), kernels = module._problem(dtype, fused), offload.functions()
                    if kernels.multiplies(Device.of(beside), problem):
                        calls[beside].append((kernels.PORTABLE, call))
        elif isinstance(module, NVFP4Linear):
            module.prepare(dtype)
            calls[module.weight.device].append((module.backend(dtype), Call.of(module.weights, dtype)))
    for linears in join(model, dtype):
        calls[linears[0].weight.device].append((linears[0].backend(dtype), Call.of(as_one(linears), dtype)))
    at_once = compiles_ahead()
    gpus = {device: these for device, these in calls.items() if device.type == "cuda" and at_once}
    return sum(compile_ahead(these, Gpu.of(device)) for device, these in gpus.items())


def compiles_ahead() -> bool:
    """What MOE_NVFP4_COMPILE says, else True. ValueError if it is unknown."""
    how = os.environ.get("MOE_NVFP4_COMPILE") or "ahead"
    if how not in ("ahead", "lazy"):
        raise ValueError(f"MOE_NVFP4_COMPILE={how} is unknown: ahead or lazy")
    return how == "ahead"


def compile_for(
    model: nn.Module, gpu: Gpu, top_k: int | None = None, dtype: torch.dtype = torch.bfloat16, expert_map: bool = False
) -> int:
    """Compile into the cache folder what `prepare` would compile on a machine with `gpu`, for calls without an
    `expert_map` and, if asked, with one; the 4-bit layers of `model` are on meta. Returns how many kernels were not
    there yet.

    This library, Triton and CuTe DSL need the same versions on both machines: they are part of a kernel's key.
    """
    device = Device("cuda", "a GPU", gpu.capability, frozenset(PACKAGES))
    forced, calls = os.environ.get("MOE_NVFP4_BACKEND"), []
    for module in model.modules():
        if isinstance(module, NVFP4Experts) and top_k is not None:
            problem, _ = module._problem(dtype, module._hooks().fused)
            backend = explain(problem, device, forced).backend
            module._prepare_for(Selected(backend.name, backend.layout))
            for mapped in {False, expert_map and backend.maps}:
                calls.append((backend, Call.of(module.weights, dtype, top_k, problem.fused, expert_map=mapped)))
        elif isinstance(module, NVFP4Linear):
            problem, _ = module._problem(dtype)
            backend = explain(problem, device, forced).backend
            module._prepare_for(Selected(backend.name, backend.layout))
            calls.append((backend, Call.of(module.weights, dtype)))
    each = lambda linear: explain(linear._problem(dtype)[0], device, forced).backend
    for _, linears in siblings(model):
        if some := joinable(linears, each):
            calls.append((each(some[0]), Call.of(as_one(some), dtype)))
    if (
        missing := {package for backend, _ in calls for package in backend.packages}
        - Device.of(torch.device("cpu")).packages
    ):
        install = ["'moe-nvfp4[gpu]'"] * bool(missing - {"triton"}) + ["triton"] * ("triton" in missing)
        raise ImportError(
            f"compiling for {device} needs {' and '.join(sorted(missing))}: pip install {' '.join(install)}, or choose "
            "other kernels with MOE_NVFP4_BACKEND, on both machines"
        )
    return compile_ahead(calls, gpu)


def share_kernels(kernels: Path, cuda: bool) -> None:
    """Let a copy of this package, in which only imports differ, use this one's compiled kernels: those in the cache
    folder and, if it is for `cuda`, those that this package brings. kernels: the folder of that name in the copy."""
    (kernels / ahead.ORIGIN).write_text(f"{ahead.hash_of(kernels, '.py')} {ahead.sources()}\n")
    if cuda and ahead.BROUGHT.exists():
        shutil.copy(ahead.BROUGHT, kernels)
