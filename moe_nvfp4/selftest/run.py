"""The self-test: every backend that can run on a device, each group of cases in a process of its own with a time limit.

A hang, an illegal address or a crash is a finding, and the next group starts with a fresh process. The child is
`python -m moe_nvfp4.selftest BACKEND DEVICE GROUP`; it prints a JSON line for each finding.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from moe_nvfp4 import backends
from moe_nvfp4.kernels.backend import Backend, Device
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
    """Run all groups of all candidates on these devices, some at a time, since most of them wait for compilers; yield
    each in order when it is over."""
    names = cases.QUICK if quick else tuple(cases.GROUPS)
    plan = [(b.name, str(device), name) for device in devices for b in candidates(device) for name in names]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        over = pool.map(lambda one: run_group(one[0], one[1], one[2], quick, limit), plan)
        yield from progress_bar(over, total=len(plan), desc="selftest", unit="group", show=True)


def run_group(backend: str, device: str, name: str, quick: bool = False, limit: float = LIMIT) -> Group:
    """One group in a process of its own, which is killed after `limit` seconds."""
    start = time.monotonic()
    lines, crash = _run([backend, device, name, *["--quick"] * quick], backend, limit)
    found = [Finding(**line) for line in lines]
    if crash:
        after = f" (after {found[-1].case!r})" if found else ""
        found.append(Finding(f"{name}{after}", False, crash))
    return Group(backend, device, name, time.monotonic() - start, tuple(found))


def run_speed(backend: str, device: str, quick: bool = False, limit: float = LIMIT) -> tuple[list[dict], str]:
    """(the rows of `speed.measure`, how its process ended before its time, or "")."""
    return _run([backend, device, "speed", *["--quick"] * quick], backend, limit)


def _run(arguments: list[str], backend: str, limit: float) -> tuple[list[dict[str, Any]], str]:
    """Run a child; (the objects it printed, how it ended before its time, or "")."""
    env = {
        **os.environ, "MOE_NVFP4_BACKEND": backend, "MOE_NVFP4_COMPILE": "lazy",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }  # fmt: skip
    command = [sys.executable, "-m", "moe_nvfp4.selftest", *arguments]
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    late = threading.Timer(limit, _kill, (process,))
    late.start()
    try:
        out, err = process.communicate()
    finally:
        over = not late.is_alive()
        late.cancel()
        _kill(process)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return found, _ending(process.returncode, err, over, limit)


def _kill(process: subprocess.Popen) -> None:
    """End the process with all that it started."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _ending(code: int | None, err: str, over: bool, limit: float) -> str:
    if over:
        return f"not over after {limit:.0f} s: it hangs, or kernels compile very slowly"
    if code == 0:
        return ""
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    lines = [line for line in err.splitlines() if line.strip()]
    return f"the process ended with exit code {code}: {lines[-1].strip() if lines else 'it printed nothing'}"


def child(arguments: list[str]) -> None:
    """The process of a group."""
    backend, device, name, *rest = arguments
    quick = "--quick" in rest
    lines = (
        measure(backend, torch.device(device), quick) if name == "speed"
        else (finding._asdict() for finding in cases.GROUPS[name](cases.place(backend, device, quick)))
    )  # fmt: skip
    for line in lines:
        print(json.dumps(line), flush=True)
    if device.startswith("cuda"):
        torch.cuda.synchronize()  # an illegal address of the last launch


def summary(groups: list[Group]) -> dict[str, Any]:
    """Counts of cases: right, wrong, not run."""
    every = [finding for group in groups for finding in group.findings]
    return {key: sum(f.right is value for f in every) for key, value in
            (("right", True), ("wrong", False), ("not run", None))}  # fmt: skip
