"""Which kernels run a layer: the one place that asks what a device is.

    device                                 W4A16                     W4A4                      linears
    CPU with a C compiler or our wheel     cpu                       cpu                       cpu
    Hopper (9.0: H100, H200)               sm90, x in bf16           sm90, x in bf16           sm90, x in bf16 (*)
    Blackwell (10.0, 10.3: B200, B300)     sm100, x in bf16          sm100                     sm100 (*)
    A100, RTX 30, 40, L40S (8.0, 8.6, 8.9) sm80, x in bf16           sm80, x in bf16           sm80, x in bf16 (**)
    RTX 50, RTX PRO 6000 (12.0)            sm80, x in bf16           portable                  sm80, W4A16 (**)
    any other GPU from 8.0, with Triton    portable                  portable                  portable
    any other                              reference                 reference                 reference

(*) x in fp16: portable (on Blackwell in W4A16). (**) The same for linears of less than 2^26 weights.

Each backend says what it cannot run (`Backend.unavailable`, `Backend.unsupported`), and the first of BACKENDS that has
no objection runs. If MOE_NVFP4_BACKEND names a backend, that one runs, or the call is an error with its reason. The
reference (plain torch operations, the same numbers) runs everything: where nobody asked for it, one warning for each
reason says why it runs and what to do.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_nvfp4 import format as nvfp4
from moe_nvfp4 import reference
from moe_nvfp4.checks import check_activations
from moe_nvfp4.kernels import cpu, portable, proof, sm80, sm90, sm100
from moe_nvfp4.kernels.backend import PACKAGES, Backend, Device, Gpu, Problem
from moe_nvfp4.weights import Matrices

__all__ = ["BACKENDS", "PACKAGES", "Backend", "Choice", "Device", "Gpu", "Problem", "Report",
           "explain", "named", "registered", "report", "select"]  # fmt: skip


class _Reference(Backend):
    name, functions = "reference", reference

    def unavailable(self, device: Device) -> None:
        return None


REFERENCE = _Reference()
# In order of preference: the first that can run a problem runs it.
BACKENDS: tuple[Backend, ...] = (sm90.BACKEND, sm100.BACKEND, sm80.BACKEND, portable.BACKEND, cpu.BACKEND, REFERENCE)


VARIABLES = ("MOE_NVFP4_BACKEND", "MOE_NVFP4_CACHE", "MOE_NVFP4_CHECK", "MOE_NVFP4_COMPILE", "MOE_NVFP4_CPU")
for _name in sorted(_name for _name in os.environ if _name.startswith("MOE_NVFP4_") and _name not in VARIABLES):
    warnings.warn(f"{_name} is set, and nothing reads it: the variables are {', '.join(VARIABLES)}", stacklevel=2)


class Choice(NamedTuple):
    """The backend that runs, and (name, reason) for each one before it that cannot."""

    backend: Backend
    rejected: tuple[tuple[str, str], ...] = ()


def select(problem: Problem, device: torch.device) -> Backend:
    """The backend that runs `problem` on `device`, decided once for each such pair.

    ValueError if MOE_NVFP4_BACKEND names an unknown backend, or one that cannot run the problem.
    """
    return _select(problem, device, _forced())


@lru_cache(maxsize=4096)
def _select(problem: Problem, device: torch.device, forced: str | None) -> Backend:
    found, objections = Device.of(device), dict[str, str]()
    while (choice := explain(problem, found, forced, objections)).backend is not REFERENCE:
        if (reason := proof.objection(choice.backend, problem, device)) is None:
            break
        objections[choice.backend.name] = reason
    what = "linears" if problem.kind == "linear" else "experts"
    complete = replace(found, packages=frozenset(PACKAGES), old=())
    if choice.backend is REFERENCE and not forced and device.type != "meta":
        mine = [(name, reason) for name, reason in choice.rejected if named(name).device_type == device.type]
        why = "; ".join(f"{name} {reason}" for name, reason in mine)
        _warn(
            f"4-bit {what} on {found} run as plain torch operations, with the same numbers but many times "
            f"slower: {why or 'no backend has kernels for it'}. MOE_NVFP4_BACKEND=reference silences this"
        )
    elif lacking := [r for r in choice.rejected if _refusal(named(r[0]), complete, problem) is None]:
        (name, reason), runs = lacking[0], choice.backend.name
        _warn(
            f"4-bit {what} on {found} run on the slower {runs} kernels: {name} {reason}. MOE_NVFP4_BACKEND={runs} "
            "silences this"
        )
    return choice.backend


def explain(
    problem: Problem, device: Device, forced: str | None = None, objections: Mapping[str, str] = MappingProxyType({})
) -> Choice:
    """What runs `problem` on a device like this one, and why the others do not; objections: why else some must not.

    ValueError if `forced` cannot run it, and for unknown activations.
    """
    check_activations(problem.activations)
    if forced:
        backend = named(forced)
        if reason := _refusal(backend, device, problem) or objections.get(forced):
            raise ValueError(f"MOE_NVFP4_BACKEND={forced} on {device}: {forced} {reason}; or unset the variable")
        return Choice(backend)
    rejected: list[tuple[str, str]] = []
    for backend in BACKENDS:
        reason = _refusal(backend, device, problem) or objections.get(backend.name)
        if reason is None:
            return Choice(backend, tuple(rejected))
        rejected.append((backend.name, reason))
    raise AssertionError("the reference runs everything")


def _refusal(backend: Backend, device: Device, problem: Problem) -> str | None:
    """Why `backend` does not run `problem` on `device`, or None."""
    return backend.unavailable(device) or backend.unsupported(device, problem)


class Selected(NamedTuple):
    """The attributes of a `Backend` under the same names; `layout` is the layout of the weights it is given."""

    name: str
    layout: str | None


def selected_now(problem: Problem, device: torch.device) -> Selected:
    """The result of `select`, outside torch.compile."""
    return _selected(problem, device, _forced())


def selected(problem: Problem, device: torch.device) -> Selected:
    """The result of `select`, as a constant for torch.compile."""
    p = problem  # its fields are passed one by one: torch 2.13 turns a NamedTuple into an empty constant
    sizes = p.num_experts, p.hidden_size, p.intermediate_size
    return _constant(p.kind, *sizes, p.gate, p.activations, p.dtype, p.fused, device)


def _constant(*problem_and_device: Any) -> Selected:
    *fields, device = problem_and_device
    return selected_now(Problem(*fields), device)


# torch.compiler.assume_constant_result does only this, but imports all of torch._dynamo first.
_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def _selected(problem: Problem, device: torch.device, forced: str | None) -> Selected:
    backend = _select(problem, device, forced)
    return Selected(backend.name, backend.layout)


def shown(problem: Problem, device: torch.device) -> str:
    """For the repr of a module: ", backend=...", or nothing for a module on meta."""
    if device.type == "meta":
        return ""
    try:
        return f", backend={explain(problem, Device.of(device), _forced()).backend.name!r}"
    except ValueError:  # the backend named by MOE_NVFP4_BACKEND cannot run it: calls say why
        return ", backend=None"


def _forced() -> str | None:
    return os.environ.get("MOE_NVFP4_BACKEND") or None


def backends_now() -> tuple:
    """What else than the problem and the device decides `select`."""
    return BACKENDS, _forced()


def named(name: str) -> Backend:
    """The backend of this name; ValueError with the list of them if there is none."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise ValueError(
        f"MOE_NVFP4_BACKEND={name} is unknown: the backends are {', '.join(backend.name for backend in BACKENDS)}"
    )


@lru_cache(maxsize=256)
def named_on(name: str, device: torch.device) -> Backend:
    """The backend of this name, checked to run on `device`; ValueError with its reason if it does not."""
    backend = named(name)
    if reason := backend.unavailable(Device.of(device)):
        raise ValueError(f"the {name} kernels were chosen for tensors on {device}: {name} {reason}")
    return backend


# ---- functions that only the portable kernels have -------------------------------------------------


def has_router(device: torch.device) -> bool:
    """Whether the functions below run on `device`: it has kernels, and they have given right results there."""
    return _has_router(device, _forced())


@lru_cache(maxsize=64)  # to read the version of Triton takes a third of a millisecond
def _has_router(device: torch.device, forced: str | None) -> bool:
    backend = portable.BACKEND
    if forced == REFERENCE.name or backend.unavailable(Device.of(device)):
        return False
    return proof.objection(backend, Problem("router", 128, 0, 0, "", "bf16", torch.float32), device) is None


has_router._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `_constant`


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores [..., N] of each row, and where they are, as `torch.topk`."""
    return portable.BACKEND.top_k(scores, k)


def router_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] of few tokens times weight [N, K] transposed, plus bias [N]: [T, N], as torch's linear."""
    return portable.BACKEND.router_linear(x, weight, bias)


def merged_codes(codes: Tensor, sf: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The codes of `value + b · a`, as `format.encode` chooses them for the scales that the weights have: uint8
    [E, N, K/2]. On devices without the kernel in torch.

    codes, sf  [E, N, K/2], [E, N, K/16]
    scale      the rows' global scales, fp32 [E, N]
    a, b       [E, r, columns], [E, N, r]; K may have more columns, as padding
    """
    if codes.is_cuda and has_router(codes.device):
        return portable.BACKEND.merged_codes(codes, sf, scale, a, b)
    found, each = [], max(1, _AT_ONCE // (2 * codes[:1].numel()))
    for some in (slice(e, e + each) for e in range(0, len(codes), each)):
        dense = nvfp4.dequantize(codes[some], sf[some], scale[some])
        dense[..., : a.shape[2]] += b[some].float() @ a[some].float()
        found.append(nvfp4.encode(dense, sf[some], scale[some]))
    return torch.cat(found)


def merge_packed(weights: Matrices, codes: Tensor, a: Tensor, b: Tensor) -> bool:
    """Write into `weights`, which are in a backend's layout, the codes that `merged_codes` chooses for their scales and
    for `codes`, which are in the checkpoint's layout: uint8 [E, N, K/2]. False where no kernel does that."""
    if weights.layout is None or not (codes.is_cuda and has_router(codes.device)):
        return False
    return named(weights.layout).merge(weights, codes, a, b)


_AT_ONCE = 1 << 26  # weights that are dense at a time


@cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=8)


class Report(NamedTuple):
    """One backend on one device: what it would run there, or why it runs nothing; whether it is proven there."""

    device: Device
    backend: str
    runs: tuple[str, ...]
    reason: str
    proof: str = ""


def report() -> list[Report]:
    """What each backend would run on each device of this machine, for usual sizes in bf16. Where MOE_NVFP4_BACKEND
    names a backend, the others run nothing."""
    problems = {
        "experts W4A16": Problem("experts", 8, 2048, 768, "silu", "bf16", torch.bfloat16),
        "experts W4A4": Problem("experts", 8, 2048, 768, "silu", "nvfp4", torch.bfloat16),
        "linears W4A16": Problem("linear", 1, 2048, 2048, "silu", "bf16", torch.bfloat16),
        "linears W4A4": Problem("linear", 1, 2048, 2048, "silu", "nvfp4", torch.bfloat16),
    }
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    forced = next((backend for backend in BACKENDS if backend.name == _forced()), None)
    rows = []
    for place, device in ((place, Device.of(place)) for place in devices):
        chosen = {name: explain(problem, device) for name, problem in problems.items()}
        for backend in BACKENDS:
            if forced is None:
                runs = tuple(name for name, choice in chosen.items() if choice.backend is backend)
                reasons = {dict(choice.rejected).get(backend.name, "") for choice in chosen.values()} - {""}
            elif backend is forced:
                refusals = {name: _refusal(backend, device, problem) or "" for name, problem in problems.items()}
                runs = tuple(name for name, refusal in refusals.items() if not refusal)
                reasons = set(refusals.values()) - {""}
            else:
                runs, reasons = (), {f"MOE_NVFP4_BACKEND={forced.name} is set"}
            reason = "; ".join(sorted(reasons)) or ("" if runs else "a faster one is there")
            known = proof.state(backend, place) if runs and backend is not REFERENCE else ""
            rows.append(Report(device, backend.name, runs, reason, known))
    return rows


def read_variables() -> Iterator[Callable[[], object]]:
    """For `moe-nvfp4 env`: functions that raise ValueError if MOE_NVFP4_BACKEND, _CPU or _CHECK is wrong."""
    yield lambda: named(_forced() or REFERENCE.name)
    yield cpu.BACKEND.functions.path
    yield proof.asked


@contextmanager
def registered(*backends: Backend) -> Iterator[None]:
    """For tests: put `backends` before all others, in place of those with the same names."""
    global BACKENDS
    before, names = BACKENDS, {backend.name for backend in backends}
    BACKENDS = (*backends, *(backend for backend in before if backend.name not in names))
    forget()
    try:
        yield
    finally:
        BACKENDS = before
        forget()


def forget() -> None:
    """Forget all choices and warnings: the next calls choose anew and warn again."""
    _select.cache_clear()
    _selected.cache_clear()
    named_on.cache_clear()
    _has_router.cache_clear()
    proof.forget()
    _warn.cache_clear()
