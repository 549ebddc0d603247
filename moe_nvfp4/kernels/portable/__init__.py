"""The portable backend: Triton kernels for every GPU from compute capability 8.0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.kernels.backend import Backend, Device, Problem, dequantized, not_installed
from moe_nvfp4.routing import Groups
from moe_nvfp4.weights import Gate, LinearWeights, Matrices


class Portable(Backend):
    name = "portable"
    packages = ("triton",)
    sorts = 1 << 13  # each program reads all of them
    adds = 1 << 12  # each program reads where they begin

    def unavailable(self, device: Device) -> str | None:
        if device.type != "cuda":
            return "runs on GPUs"
        if device.capability is not None and device.capability < (8, 0):
            return "runs on compute capability 8.0 and above (A100, RTX 30 and newer)"
        return not_installed(device, self.packages, "pip install triton")

    def unsupported(self, device: Device, problem: Problem) -> str | None:
        if problem.dtype not in (torch.bfloat16, torch.float16):
            name = str(problem.dtype).removeprefix("torch.")
            return f"takes bfloat16 and float16 activations, not {name}: run the model in bfloat16"
        return None

    def joins(self, parts: tuple[int, ...]) -> bool:
        return len(parts) <= 3 and all(N % 16 == 0 for N in parts[:-1])  # so that each begins at a multiple of 16 bytes

    def top_k(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As torch.topk of each row, see `router.top_k`."""
        return self.functions.top_k(scores, k)

    def router_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As torch's linear of few rows x, see `router.linear`."""
        return self.functions.router_linear(x, weight, bias)

    def merged_codes(self, codes: Tensor, sf: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Codes of weights with a low-rank change, see `merge.merged_codes`."""
        return self.functions.merged_codes(codes, sf, scale, a, b)

    def merge_units(self, codes: Tensor, scale: Tensor, a: Tensor, b: Tensor, units: Tensor, interleaved: bool) -> None:
        """The same in Hopper's layout, see `merge.merge_units`."""
        self.functions.merge_units(codes, scale, a, b, units, interleaved)

    def group(self, top_k_index: Tensor, *others: Any) -> Groups:
        kernel = 0 < top_k_index.numel() <= self.sorts
        return self.functions.group(top_k_index, *others) if kernel else super().group(top_k_index, *others)

    def add_low_rank(self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, *rows: Any) -> bool:
        if x.dtype == torch.float32 or len(a) > self.adds:
            return False
        if out.numel() and a.numel():
            self.functions.add_low_rank(out, x, a, b, *rows)
        return True

    def combine(self, slots: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.functions.combine_slots(slots, top_k_weights)

    def gate(self, gate: Gate, w13_out: Tensor) -> Tensor:
        return self.functions.gate(gate, w13_out)[0]

    def gate_gradient(self, gate: Gate, w13_out: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        return self.functions.gate(gate, w13_out, dh)

    def dequantize(self, weights: Matrices, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float32 or experts != slice(0, len(weights.global_scale)):
            return dequantized(weights, experts, columns, dtype)
        return self.functions.dequantize(weights, columns, dtype)


BACKEND = Portable()


class BesidePortable(Backend):
    """A backend with GEMMs of its own, which leaves what is between them, and linears that are not in its layout, to
    Triton, where that is installed."""

    sorts, adds = Portable.sorts, Portable.adds

    def group(self, top_k_index: Tensor, *others: Any) -> Groups:
        return _steps(top_k_index, super()).group(top_k_index, *others)

    def add_low_rank(self, out: Tensor, *others: Any) -> bool:
        return _steps(out, super()).add_low_rank(out, *others)

    def combine(self, slots: Tensor, top_k_weights: Tensor) -> Tensor:
        return _steps(slots, super()).combine(slots, top_k_weights)

    def gate(self, gate: Gate, w13_out: Tensor) -> Tensor:
        return _steps(w13_out, super()).gate(gate, w13_out)

    def gate_gradient(self, gate: Gate, w13_out: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        return _steps(w13_out, super()).gate_gradient(gate, w13_out, dh)

    def linear(self, x: Tensor, weights: LinearWeights) -> Tensor:
        # Offloaded weights, which a hook brings for each call, cannot be prepared. Packing them each time would take
        # longer than the Triton kernels, which read the checkpoint's layout.
        unprepared = weights.matrix.layout is None and _has_triton(x)
        return (BACKEND if unprepared else super()).linear(x, weights)


def _steps(t: Tensor, otherwise: Any) -> Any:
    return BACKEND if t.device.type != "cpu" and _has_triton(t) else otherwise


def _has_triton(t: Tensor) -> bool:
    return "triton" in Device.of(t.device).packages
