"""The self-test: every backend that can run on a device, each group of cases in a process of its own with a time limit.

A hang, an illegal address or a crash is a finding, and the next group starts with a fresh process. The child is
`python -m moe_nvfp4.selftest BACKEND DEVICE GROUP`; it prints a JSON line for each finding.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from moe_nvfp4 import backends
from moe_nvfp4.child import run_child
from moe_nvfp4.devices import cores
from moe_nvfp4.kernels.backend import Backend, Device, Problem
from moe_nvfp4.progress import progress_bar
from moe_nvfp4.selftest import cases
from moe_nvfp4.selftest.compare import Finding
from moe_nvfp4.selftest.speed import measure

LIMIT = 300.0  # seconds for a group, of which kernels are compiled in most


class Group(NamedTuple):
    """What a group showed. If its process ended before its time, the last finding says how."""

    backend: str
    device: str
    name: str
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.right is False]


def candidates(device: torch.device) -> list[Backend]:
    """The backends that say they run on `device`, in order of preference; not the reference, which is the judge."""
    found = Device.of(device)
    return [b for b in backends.BACKENDS if b is not backends.REFERENCE and b.unavailable(found) is None]


def run(devices: list[torch.device], quick: bool = False, limit: float = LIMIT) -> Iterator[Group]:
    """Run all groups of all candidates on these devices, some at a time where there are cores for it, since imports and
    compilers take most of the time; yield each in order when it is over."""
    names = cases.QUICK if quick else tuple(cases.GROUPS)
    plan = [(b.name, str(device), name) for device in devices for b in candidates(device) for name in names]
    lanes = max(1, min(8, cores() // 2) if quick else min(4, cores() // 4))
    with ThreadPoolExecutor(lanes) as pool:
        over = pool.map(lambda one: run_group(one[0], one[1], one[2], quick, limit, cores() // lanes), plan)
        yield from progress_bar(over, total=len(plan), desc="selftest", unit="group", show=True)


def run_group(
    backend: str, device: str, name: str, quick: bool = False, limit: float = LIMIT, threads: int | None = None
) -> Group:
    """One group in a process of its own, which is killed after `limit` seconds."""
    start = time.monotonic()
    lines, crash = _run([backend, device, name, *["--quick"] * quick], backend, limit, threads)
    found = [Finding(**line) for line in lines]
    if crash:
        after = f" (after {found[-1].case!r})" if found else ""
        found.append(Finding(f"{name}{after}", False, crash))
    return Group(backend, device, name, time.monotonic() - start, tuple(found))


def run_speed(backend: str, device: str, quick: bool = False, limit: float = LIMIT) -> tuple[list[dict], str]:
    """(the rows of `speed.measure`, how its process ended before its time, or "")."""
    return _run([backend, device, "speed", *["--quick"] * quick], backend, limit)


def _run(
    arguments: list[str], backend: str, limit: float, threads: int | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Run a child; (the objects it printed, how it ended before its time, or "")."""
    env = {"MOE_NVFP4_BACKEND": backend, "MOE_NVFP4_COMPILE": "lazy", "MOE_NVFP4_CHECK": "0"}
    if threads is not None and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(threads)  # processes that run at once share the cores
    return run_child(__package__, arguments, env, limit)


def child(arguments: list[str]) -> None:
    """The process of a group."""
    backend, device, name, *rest = arguments
    quick = "--quick" in rest
    lines = (
        measure(torch.device(device), quick) if name == "speed"
        else (finding._asdict() for finding in cases.findings(cases.place(backend, device, quick), name))
    )  # fmt: skip
    for line in lines:
        print(json.dumps(line), flush=True)
    if device.startswith("cuda"):
        torch.cuda.synchronize()  # an illegal address of the last launch


def first(asked: str) -> None:
    """The process of `kernels.proof`: check a backend for a problem, both as JSON."""
    backend, device, fields = json.loads(asked)
    fields["dtype"] = getattr(torch, fields["dtype"])
    for line in cases.first(cases.place(backend, device, False), Problem(**fields)):
        print(json.dumps(line if isinstance(line, dict) else line._asdict()), flush=True)
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def summary(groups: list[Group]) -> dict[str, Any]:
    """Counts of cases: right, wrong, not run."""
    every = [finding for group in groups for finding in group.findings]
    return {key: sum(f.right is value for f in every) for key, value in
            (("right", True), ("wrong", False), ("not run", None))}  # fmt: skip
