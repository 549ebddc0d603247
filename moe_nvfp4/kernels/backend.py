"""What a backend is: an object in a folder of its own that says what it can run, and why not.

`moe_nvfp4.backends` has the list of them and chooses. A new one is a folder here whose `__init__.py` makes a `Backend`
named `BACKEND`, and a line there. The folder's `backend.py` holds the functions that run; it is imported when they are
first called, so that asking needs no GPU and no kernel language.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.routing import Groups, Rows
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, Projection

PACKAGES = ("cutlass", "tvm_ffi", "triton")
OLDEST = {"cutlass": ("nvidia-cutlass-dsl", (4, 8))}  # the kernels import modules that older ones lack


@dataclass(frozen=True)
class Device:
    """What there is to know about a device; tests make up their own.

    capability  of an NVIDIA GPU, such as (9, 0)
    packages    those of PACKAGES that are installed, and new enough
    old         those that are too old, with their versions
    """

    type: str
    name: str = ""
    capability: tuple[int, int] | None = None
    packages: frozenset[str] = frozenset()
    old: tuple[tuple[str, str], ...] = ()

    @staticmethod
    @cache
    def of(device: torch.device) -> Device:
        installed = [name for name in PACKAGES if find_spec(name) is not None]
        old = tuple((name, version) for name in installed if (version := _too_old(name)))
        packages = frozenset(installed) - {name for name, _ in old}
        if device.type != "cuda":
            return Device(device.type, packages=packages, old=old)
        nvidia = torch.version.cuda is not None
        capability = torch.cuda.get_device_capability(device) if nvidia else None
        return Device("cuda", torch.cuda.get_device_name(device), capability, packages, old)

    def __str__(self) -> str:
        if self.capability is None:
            return self.name or self.type
        return f"{self.name or self.type} (compute capability {self.capability[0]}.{self.capability[1]})"


def _too_old(package: str) -> str | None:
    """Its version, if it is older than OLDEST."""
    if package not in OLDEST:
        return None
    distribution, oldest = OLDEST[package]
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:  # brought in some other way
        return None
    return version if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest else None


class Gpu(NamedTuple):
    """What compilers and plans ask of an NVIDIA GPU, which need not be there. `ordinal`: of the one that is."""

    capability: tuple[int, int]
    multiprocessors: int
    ordinal: int | None = None

    @staticmethod
    def of(device: torch.device) -> Gpu:
        properties = torch.cuda.get_device_properties(device)
        return Gpu((properties.major, properties.minor), properties.multi_processor_count, device.index or 0)


class Problem(NamedTuple):
    """What is to be run, as far as a choice depends on it.

    kind    "experts", or "linear": then num_experts is 1, hidden_size N and intermediate_size K
    gate    `Gate.kind`; "raw": a gate of the model's own runs between the stages
    dtype   of x
    fused   whether nothing of the model's runs between the stages (a gate or norm of its own, AWQ's scales)
    host_weights  whether the weights are on the CPU while x is on a GPU
    mapped  whether they stay in their files (`moe_nvfp4.mapped`)
    """

    kind: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate: str
    activations: str
    dtype: torch.dtype
    fused: bool = True
    host_weights: bool = False
    mapped: bool = False


class Backend:
    """The kernels of one kind of device.

    name         that of its folder, and what MOE_NVFP4_BACKEND calls it
    device_type  of the devices it is for
    whole        whether `experts` runs a layer in one call; if not, its stages run one after the other
    packages     of PACKAGES, what compiles its kernels, on first use or ahead (see `kernels.calls`)
    layout       its name, if `prepare` brings weights into a layout of its own; None: kernels read the checkpoint's
    host_weights whether it is for `Problem.host_weights`, and for nothing else
    maps         whether it runs `Problem.mapped` too: weights in the cpu backend's layout
    """

    name: ClassVar[str]
    device_type: ClassVar[str] = "cuda"
    whole: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[str | None] = None
    host_weights: ClassVar[bool] = False
    maps: ClassVar[bool] = False

    def unavailable(self, device: Device) -> str | None:
        """Why it does not run on `device`, a clause that follows its name and ends with the way out; None: it does."""
        raise NotImplementedError

    def unsupported(self, device: Device, problem: Problem) -> str | None:
        """Why it does not run `problem` on `device`, where it is available; None: it does."""
        return None

    @property
    def functions(self) -> ModuleType:
        """The module with the functions below, imported on first use."""
        return import_module(f"moe_nvfp4.kernels.{self.name}.backend")

    # What arrives is checked (`moe_nvfp4.checks`); it may be strided.

    def experts(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> Tensor:
        """A fused layer: x [T, H], ids and router weights [T, top_k] -> [T, H] in x's dtype."""
        return self.functions.experts(x, top_k_index, top_k_weights, weights)

    def quantize_rows(
        self, x: Tensor, index: Tensor | None, scale: Tensor | None, groups: Groups, four_over_six: bool = False
    ) -> Rows:
        """As `reference.quantize_rows`, to the bit."""
        return self.functions.quantize_rows(x, index, scale, groups, four_over_six)

    def gemm1_swiglu(self, rows: Rows, weights: ExpertWeights, groups: Groups, dtype: torch.dtype) -> Rows:
        """As `reference.gemm1_swiglu`, up to the order of fp32 sums."""
        return self.functions.gemm1_swiglu(rows, weights, groups, dtype)

    def gemm2_combine(
        self, h: Rows, weights: ExpertWeights, groups: Groups, top_k_weights: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """As `reference.gemm2_combine`, up to the order of fp32 sums."""
        return self.functions.gemm2_combine(h, weights, groups, top_k_weights, dtype)

    def linear(self, x: Tensor, weights: LinearWeights) -> Tensor:
        """As `reference.linear`, up to the order of fp32 sums: x [T, K] -> [T, N] in x's dtype."""
        return self.functions.linear(x, weights)

    def dequantize(self, weights: Projection, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """Dense weights [experts, N, columns] in `dtype`, from a layout of its own too: what backward passes multiply
        by, one window after the other. Columns begin at multiples of 64."""
        return dequantized(weights, experts, columns, dtype)

    def gate(self, gate: Gate, w13_out: Tensor) -> Tensor:
        """`Gate.__call__` of [R, 2I] in any dtype -> [R, I] in it."""
        return gate(w13_out.float()).to(w13_out.dtype)

    def gate_gradient(self, gate: Gate, w13_out: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        """As `Gate.gradient`."""
        return gate.gradient(w13_out, dh)

    def unpacked(self, weights: ExpertWeights) -> ExpertWeights:
        """The same values in the checkpoint's layout, as new tensors."""
        raise NotImplementedError(f"{self.name} reads the checkpoint's layout")

    def place(self, tensor: Tensor) -> Tensor:
        """`tensor`, on the CPU, in memory that this backend (`host_weights`) reads well; itself, or a copy."""
        return tensor

    # Weights in a layout of its own, one projection at a time, so that there are never two copies of all of them.

    def prepare(self, codes: Tensor, sf: Tensor, interleaved: bool) -> tuple[Tensor, Any]:
        """Codes [E, N, K/2] and block scales [E, N, K/16] -> (bytes uint8 with four dimensions that hold both, and
        what else `restore` needs); interleaved: rows are [gate; up]."""
        raise NotImplementedError(f"{self.name} reads the checkpoint's layout")

    def restore(self, prepared: Tensor, note: Any) -> tuple[Tensor, Tensor]:
        """The exact inverse of `prepare`: (codes, sf)."""
        raise NotImplementedError(f"{self.name} reads the checkpoint's layout")


def dequantized(weights: Projection, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """`Backend.dequantize` of the checkpoint's layout, by torch."""
    w, (first, last) = weights, (columns.start, min(columns.stop, weights.width))
    assert w.sf is not None
    scale = w.scale[experts, None].expand(-1, w.rows)
    if w.first_scale is not None:
        halves = [s[experts, None].expand(-1, w.rows // 2) for s in (w.first_scale, w.scale)]
        scale = torch.cat(halves, dim=1)
    codes, sf = w.codes[experts, :, first // 2 : -(-last // 16) * 8], w.sf[experts, :, first // 16 : -(-last // 16)]
    return nvfp4.dequantize(codes, sf, scale, dtype)[..., : last - first]


def other_gpu(device: Device, capabilities: tuple[tuple[int, int], ...], gpus: str) -> str | None:
    """Why a backend for GPUs of these compute capabilities, `gpus`, does not run on `device`."""
    if device.capability in capabilities:
        return None
    wanted = " or ".join(f"{major}.{minor}" for major, minor in capabilities)
    return f"runs on compute capability {wanted} ({gpus})"


def not_installed(device: Device, packages: tuple[str, ...], remedy: str) -> str | None:
    """Why a backend that needs these packages does not run: one is too old, or some are missing, and `remedy`."""
    for name, version in device.old:
        if name in packages:
            distribution, oldest = OLDEST[name]
            newer = ".".join(map(str, oldest))
            return f"needs {distribution} {newer} or newer, not {version}: pip install -U '{distribution}>={newer},<5'"
    missing = [name for name in packages if name not in device.packages]
    return f"needs {' and '.join(missing)}, not installed: {remedy}" if missing else None
