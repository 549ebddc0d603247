"""The portable backend: Triton kernels for every GPU from compute capability 8.0."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_nvfp4.kernels.backend import Backend, Device, Problem, dequantized, not_installed
from moe_nvfp4.weights import Gate, Matrices


class Portable(Backend):
    name = "portable"
    packages = ("triton",)

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

    def gate(self, gate: Gate, w13_out: Tensor) -> Tensor:
        return self.functions.gate(gate, w13_out)[0]

    def gate_gradient(self, gate: Gate, w13_out: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        return self.functions.gate(gate, w13_out, dh)

    def dequantize(self, weights: Matrices, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float32 or experts != slice(0, len(weights.global_scale)):
            return dequantized(weights, experts, columns, dtype)
        return self.functions.dequantize(weights, columns, dtype)


BACKEND = Portable()
