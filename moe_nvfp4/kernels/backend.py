"""What a backend is: an object that says what it can run, or why it cannot, in a folder of its own.

`moe_nvfp4.backends` has the list of them and chooses. A new backend is a folder here whose `__init__.py` makes a
`Backend` named `BACKEND`, and a line in that list. The folder's `backend.py` holds the functions that run; it is
imported when they are first called, so that asking what runs needs no GPU and no kernel language.
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
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, Matrices

PACKAGES = ("cutlass", "tvm_ffi", "triton")
OLDEST = {"cutlass": ("nvidia-cutlass-dsl", (4, 8))}  # the kernels import modules that older versions lack


@dataclass(frozen=True)
class Device:
    """What backends need to know about a device; tests make up their own.

    capability  compute capability of an NVIDIA GPU, such as (9, 0)
    packages    those of PACKAGES that are installed and new enough
    old         (package, version) of those that are too old
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
    """The version of the package, if it is older than OLDEST."""
    if package not in OLDEST:
        return None
    distribution, oldest = OLDEST[package]
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:  # importable, but not installed by pip
        return None
    return version if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest else None


class Gpu(NamedTuple):
    """What compilers and plans need to know about an NVIDIA GPU. It need not be there; `ordinal` is set if it is."""

    capability: tuple[int, int]
    multiprocessors: int
    ordinal: int | None = None

    @property
    def architecture(self) -> str:
        """Its name for NVIDIA's compilers, with all instructions that it has."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @staticmethod
    def of(device: torch.device) -> Gpu:
        properties = torch.cuda.get_device_properties(device)
        return Gpu((properties.major, properties.minor), properties.multi_processor_count, device.index or 0)


class Problem(NamedTuple):
    """What is to be run: everything that the choice of a backend depends on.

    kind    "experts"; or "linear": then num_experts is 1, hidden_size is N and intermediate_size is K; or "router":
            its scores and its choice among num_experts, see `moe_nvfp4.router`
    gate    `Gate.kind`; "raw": the model's own gate runs between the stages
    dtype   of x
    fused   whether nothing of the model runs between the stages (its own gate or norm, AWQ's scales)
    """

    kind: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate: str
    activations: str
    dtype: torch.dtype
    fused: bool = True


class Backend:
    """The kernels of one kind of device.

    name         the name of its folder, and its value of MOE_NVFP4_BACKEND
    device_type  the type of the devices it is for
    packages     those of PACKAGES that compile its kernels, on first use or ahead (see `kernels.calls`)
    layout       the backend, its own or another's, into whose layout `pack` brings weights; None: its kernels read the
                 checkpoint's
    sorts        up to how many assignments `group` sorts by a kernel of its own
    adds         up to how many groups `add_low_rank` has a kernel for, for rows in 16 bits; 0: none
    maps         whether the kernels of `experts` read an expert_map
    """

    name: ClassVar[str]
    device_type: ClassVar[str] = "cuda"
    packages: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[str | None] = None
    sorts: ClassVar[int] = 0
    adds: ClassVar[int] = 0
    maps: ClassVar[bool] = False

    def unavailable(self, device: Device) -> str | None:
        """None if it runs on `device`, else the reason: a clause that follows its name and ends with the way out."""
        raise NotImplementedError

    def unsupported(self, device: Device, problem: Problem) -> str | None:
        """None if it runs `problem` on `device`, where it is available; else the reason, in the same form."""
        return None

    @property
    def functions(self) -> ModuleType:
        """The module with the functions below, imported on first use."""
        return import_module(f"{__package__}.{self.name}.backend")

    # The arguments have been checked (`moe_nvfp4.checks`). Tensors may be strided.

    def experts(
        self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, *expert_map: Tensor
    ) -> Tensor:
        """A fused layer: x [T, H], ids and router weights [T, top_k] -> [T, H] in x's dtype. Those that `maps` may be
        given an expert_map, int32 [G], where ids are of G experts: the number of each in `weights`, or -1."""
        return self.functions.experts(x, top_k_index, top_k_weights, weights, *expert_map)

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

    def dequantize(self, weights: Matrices, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """Dense weights [experts, N, columns] in `dtype`, also from this backend's own layout. Backward passes multiply
        by them, one window after the other. Columns begin at multiples of 64."""
        return dequantized(weights, experts, columns, dtype)

    def gate(self, gate: Gate, w13_out: Tensor) -> Tensor:
        """`Gate.__call__`: [R, 2I] in any dtype -> [R, I] in the same dtype."""
        return gate(w13_out.float()).to(w13_out.dtype)

    def gate_gradient(self, gate: Gate, w13_out: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        """As `Gate.gradient`."""
        return gate.gradient(w13_out, dh)

    # Between the stages of a layer that is not fused.

    def group(self, top_k_index: Tensor, num_experts: int, adapter: Tensor | None, num_adapters: int) -> Groups:
        """As `routing.group_by_expert`. On a GPU, an id outside the legal range is an error of a later call."""
        return group_by_expert(top_k_index, num_experts, adapter, num_adapters)

    def add_low_rank(
        self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, offsets: Tensor, bare: Tensor | None, index: Tensor | None,
        index_div: int, to: Tensor | None,
    ) -> bool:  # fmt: skip
        """Add an adapter's part to out [R, N] in place, as `stages.add_low_rank` does; False if there is no kernel."""
        return False

    def combine(self, slots: Tensor, top_k_weights: Tensor) -> Tensor:
        """The slots' outputs [T * top_k, H] times their weights -> [T, H]: in fp32, in slot order, rounded once."""
        (T, top_k), H = top_k_weights.shape, slots.shape[1]
        return (slots.view(T, top_k, H).float() * top_k_weights[..., None].float()).sum(1).to(slots.dtype)

    def joins(self, parts: tuple[int, ...]) -> bool:
        """Whether `linear` takes, in this backend's layout, `LinearWeights` of such parts: one launch for all."""
        return False

    def settle(self, device: torch.device) -> None:
        """To be called after torch has written to weights outside `pack`, for kernels that begin early."""

    # A backend's own layout. One matrix at a time, so that there are never two copies of all the weights.

    def pack(self, codes: Tensor, sf: Tensor, interleaved: bool) -> tuple[Tensor, Any]:
        """Codes [E, N, K/2] and block scales [E, N, K/16] -> (uint8 with four dimensions that holds both, a note of
        what else `unpack` needs); interleaved: the rows are [gate; up]."""
        raise NotImplementedError(f"{self.name} reads the checkpoint's layout")

    def unpack(self, packed: Tensor, note: Any) -> tuple[Tensor, Tensor]:
        """The exact inverse of `pack`: (codes, sf)."""
        raise NotImplementedError(f"{self.name} reads the checkpoint's layout")

    def merge(self, weights: Matrices, codes: Tensor, a: Tensor, b: Tensor) -> bool:
        """Write into packed `weights` what `backends.merged_codes` makes of `codes`, in the checkpoint's layout, with
        their scales. False if that is not known: unpack them then."""
        return False

    def values(self, weights: Matrices) -> Matrices:
        """Packed weights, with the same values in the checkpoint's layout, as new tensors."""
        raise NotImplementedError(f"{self.name} reads the checkpoint's layout")


def dequantized(weights: Matrices, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """`Backend.dequantize` for the checkpoint's layout, in torch."""
    w, (first, last) = weights.of(experts), (columns.start, min(columns.stop, weights.K))
    codes, sf = w.codes[..., first // 2 : -(-last // 16) * 8], w.block_scales()[..., first // 16 : -(-last // 16)]
    return nvfp4.dequantize(codes, sf, w.row_scales(), dtype)[..., : last - first]


def other_gpu(device: Device, capabilities: tuple[tuple[int, int], ...], gpus: str) -> str | None:
    """Why a backend for these compute capabilities (of `gpus`) does not run on `device`, or None."""
    if device.capability in capabilities:
        return None
    wanted = " or ".join(f"{major}.{minor}" for major, minor in capabilities)
    return f"runs on compute capability {wanted} ({gpus})"


def not_installed(device: Device, packages: tuple[str, ...], remedy: str) -> str | None:
    """Why a backend that needs these packages does not run (one is too old, or some are missing: `remedy`), or None."""
    for name, version in device.old:
        if name in packages:
            distribution, oldest = OLDEST[name]
            newer = ".".join(map(str, oldest))
            return f"needs {distribution} {newer} or newer, not {version}: pip install -U '{distribution}>={newer},<5'"
    missing = [name for name in packages if name not in device.packages]
    return f"needs {' and '.join(missing)}, not installed: {remedy}" if missing else None
