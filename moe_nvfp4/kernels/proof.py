"""Whether a backend has been proven on a device. If not, the first layer that it would run there is checked, once.

    PROVEN      where the self-test has passed, with reports in docs/proven: nothing is checked
    the cache   what a check has found on this machine
    neither     a process of its own, in which a hang or a crash does no harm, compares the backend with the reference
                at the layer's sizes (`moe_nvfp4.selftest`)

A backend that gave wrong results does not run: the next one does, and a warning says why. MOE_NVFP4_CHECK=0 trusts
every backend; MOE_NVFP4_CHECK=always checks again in each process, where it is proven, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from contextlib import ExitStack, suppress
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from moe_nvfp4._version import __version__
from moe_nvfp4.cache import cache_folder, own_folder
from moe_nvfp4.child import run_child
from moe_nvfp4.kernels.backend import OLDEST, Backend, Device, Problem

# backend -> GPU's name, or path of the CPU kernels -> major and minor versions of the package that compiles the kernels
PROVEN: dict[str, dict[str, tuple[str, ...]]] = {
    "sm90": dict.fromkeys(("NVIDIA H200", "NVIDIA H100 80GB HBM3"), ("4.8",)),
    "portable": dict.fromkeys(("NVIDIA H200", "NVIDIA H100 80GB HBM3"), ("3.6",)),
    "cpu": dict.fromkeys(("portable", "avx2", "avx512", "avx512bf16", "amx"), ()),
}
LIMIT = 600.0  # seconds for a check, of which compilers take the most


def asked() -> str:
    """$MOE_NVFP4_CHECK, else "once". ValueError if it is unknown."""
    how = os.environ.get("MOE_NVFP4_CHECK") or "once"
    if how not in ("0", "once", "always"):
        raise ValueError(f"MOE_NVFP4_CHECK={how} is unknown: 0, once or always")
    return how


def objection(backend: Backend, problem: Problem, device: torch.device) -> str | None:
    """Why `backend`, which says that it runs `problem` on `device`, does not: a clause that follows its name; None if
    it is proven there, or passes the check. ValueError for an unknown MOE_NVFP4_CHECK."""
    how = asked()
    if how == "0" or device.type != backend.device_type or (how == "once" and proven(backend, device)):
        return None
    if problem.kind == "linear":  # one stands for all: a model has linears of many sizes
        subject = f"linears, {problem.activations}, {_name(problem.dtype)}"
    elif problem.kind == "router":
        subject = "routers"
    else:
        _, _, H, I, gate, activations, dtype, fused = problem
        subject = f"experts, H {H}, I {I}, {gate}, {activations}, {_name(dtype)}{'' if fused else ', in stages'}"
    key = backend.name, _where(backend.name, device), subject
    if key not in _verdicts:
        _verdicts[key] = _verdict(backend, problem, device, subject, how == "always")
    return _verdicts[key]


_verdicts: dict[tuple[str, str, str], str | None] = {}  # of this process


def forget() -> None:
    """Forget what this process knows: the cache folder is read again."""
    _verdicts.clear()


def _verdict(backend: Backend, problem: Problem, device: torch.device, subject: str, again: bool) -> str | None:
    note = _identity(backend, device) | {"subject": subject}
    try:
        name = hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()[:32]
        file = own_folder("checks") / f"{name}.json"
    except OSError:  # each process checks for itself
        file = None
    writable = file is not None and os.access(file.parent, os.W_OK)
    with ExitStack() as stack:
        if file and writable:
            with suppress(OSError):  # of another user
                stack.enter_context(FileLock(file.with_suffix(".lock")))  # ranks of a machine share it
        if file and not again and (known := _noted(file)):
            note = known
        else:
            kernels, where = f"the {backend.name} kernels", f"on {note['device']}"
            always = f"checking {kernels} {where} (MOE_NVFP4_CHECK=always)"
            once = f"{kernels} have not been proven {where}: checking them, once (MOE_NVFP4_CHECK=0 skips this)"
            print(f"moe_nvfp4: {always if again else once}", file=sys.stderr, flush=True)
            right, why = _check(backend.name, problem, device)
            if right is None:
                warnings.warn(
                    f"the {backend.name} kernels could not be checked on {note['device']} and run unchecked: {why}. "
                    "`moe-nvfp4 selftest` checks them, MOE_NVFP4_CHECK=0 silences this", stacklevel=2,
                )  # fmt: skip
                return None
            note |= {"date": str(date.today()), "right": right, "why": why}
            if file and writable:
                with suppress(OSError):  # a full disk: the next process checks again
                    _write(file, note)
    if note["right"]:
        return None
    return (
        f"gave wrong results in a check on this device on {note['date']} ({note['why']}). Please report it, with the "
        "page that `moe-nvfp4 selftest --report mine.json` writes. MOE_NVFP4_CHECK=always checks again, "
        "MOE_NVFP4_CHECK=0 runs it all the same"
    )


def _check(backend: str, problem: Problem, device: torch.device) -> tuple[bool | None, str]:
    """(whether the results are right, and what is wrong; None: why that could not be found out)."""
    asked = json.dumps([backend, str(device), problem._asdict() | {"dtype": _name(problem.dtype)}])
    env = {"MOE_NVFP4_BACKEND": backend, "MOE_NVFP4_COMPILE": "lazy", "MOE_NVFP4_CHECK": "0"}
    found, ended = run_child(f"{__name__.partition('.')[0]}.selftest", ["first", asked], env, LIMIT)
    cases = [one for one in found if "case" in one]
    if wrong := next((one for one in cases if one["right"] is False), None):
        return False, f"{wrong['case']}: {wrong['why']}"
    if ended and any("patience" in one for one in found):
        return False, f"{ended}, after {cases[-1]['case']!r}" if cases else ended
    unchecked = next((one["unchecked"] for one in found if "unchecked" in one), "")
    if ended or unchecked or not any(one["right"] for one in cases):
        return None, ended or unchecked or "it takes none of the cases"
    return True, ""


def _noted(file: Path) -> dict[str, Any] | None:
    """What a check has found; None if there is no note of one, or half a note."""
    try:
        note = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and {"right", "why", "date", "subject"} <= note.keys() else None


def _write(file: Path, note: dict[str, Any]) -> None:
    made = file.with_suffix(f".{os.getpid()}")
    made.write_text(json.dumps(note, indent=1) + "\n", "utf-8")
    os.replace(made, file)


def proven(backend: Backend, device: torch.device) -> bool:
    """Whether reports of self-tests say that this backend is right on this device, with the compiler that is here."""
    versions = PROVEN.get(backend.name, {}).get(_where(backend.name, device))
    found = [".".join(version.split(".")[:2]) for version in _compilers(backend).values()]
    return versions is not None and all(version in versions for version in found)


def state(backend: Backend, device: torch.device) -> str:
    """For `moe-nvfp4 env`: whether it is proven on this device, or what checks have found."""
    if proven(backend, device):
        return "proven"
    if os.environ.get("MOE_NVFP4_CHECK") == "0":
        return "not checked, as MOE_NVFP4_CHECK=0 is set"
    here = _identity(backend, device).items()
    found = map(_noted, sorted((cache_folder() / "checks").glob("*.json")))
    if not (notes := [note for note in found if note and here <= note.items()]):
        return "its first layer will be checked"
    return "; ".join(
        f"checked on {note['date']} ({note['subject']}): {'right' if note['right'] else 'WRONG: ' + note['why']}"
        for note in notes
    )


def _identity(backend: Backend, device: torch.device) -> dict[str, Any]:
    """All that a check's result holds for, but the problem."""
    compilers = ", ".join(f"{name} {version}" for name, version in _compilers(backend).items())
    return {
        "backend": backend.name, "device": _where(backend.name, device), "driver": _driver(device),
        "compilers": compilers, "torch": torch.__version__, "library": __version__, "sources": _sources(),
    }  # fmt: skip


def _where(backend: str, device: torch.device) -> str:
    """What a proof is for: a GPU's name, or a path of the CPU kernels."""
    if device.type == "cpu":
        from moe_nvfp4.kernels.cpu import backend as cpu

        return cpu.path() if backend == "cpu" else "CPU"
    return Device.of(device).name


def _compilers(backend: Backend) -> dict[str, str]:
    """The packages that compile its kernels, with their versions."""
    names = [OLDEST[name][0] if name in OLDEST else name for name in backend.packages if name != "tvm_ffi"]
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # importable, but not installed by pip
            found[name] = "unknown"
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _sources() -> str:
    """A hash of all that kernels are made of."""
    from moe_nvfp4.kernels.common.ahead import KERNELS, hash_of  # importing the package needs no kernels

    return hash_of(KERNELS, ".py", ".c", ".h")[:32]


@cache
def _driver(device: torch.device) -> str:
    """The version of NVIDIA's driver."""
    if device.type != "cuda":
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    return lines[0] if lines else "unknown"
