"""The Hopper backend: CuTe DSL kernels for sm_90a."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.kernels.backend import Device, Problem, dequantized, not_installed, other_gpu
from moe_nvfp4.kernels.portable import BACKEND as portable
from moe_nvfp4.kernels.portable import BesidePortable
from moe_nvfp4.weights import Matrices


class Hopper(BesidePortable):
    name = "sm90"
    packages = ("cutlass",)
    layout = "sm90"
    maps = True

    def unavailable(self, device: Device) -> str | None:
        return other_gpu(device, ((9, 0),), "H100, H200") or not_installed(
            device, self.packages, "pip install moe-nvfp4[gpu] brings CuTe DSL"
        )

    def unsupported(self, device: Device, problem: Problem) -> str | None:
        p = problem
        if p.dtype != torch.bfloat16:
            return f"takes bfloat16 activations, not {str(p.dtype).removeprefix('torch.')}: run the model in bfloat16"
        if p.hidden_size % 16 or p.intermediate_size % 16:
            return f"takes sizes that are multiples of 16, not H = {p.hidden_size} and I = {p.intermediate_size}"
        if p.num_experts > 1024:
            return f"takes up to 1024 experts, not {p.num_experts}"
        if p.activations != "bf16" and not p.fused:
            return (
                "keeps NVFP4 rows between its kernels, so the model's own gate or norm and AWQ's scales cannot run "
                "there: use activations='bf16'"
            )
        return None

    def pack(self, codes: Tensor, sf: Tensor, interleaved: bool) -> tuple[Tensor, Any]:
        from moe_nvfp4.kernels.sm90.pack import pack

        units, escapes = pack(codes, sf, interleaved)
        return units.view(torch.uint8), (escapes, codes.shape[1], 2 * codes.shape[2], interleaved)

    def unpack(self, packed: Tensor, note: Any) -> tuple[Tensor, Tensor]:
        from moe_nvfp4.kernels.sm90.pack import unpack

        return unpack(packed.view(torch.int32), *note)

    def joins(self, parts: tuple[int, ...]) -> bool:
        return all(N % 128 == 0 for N in parts[:-1])  # the rows of a warpgroup, 64 or 128, have one global scale

    def settle(self, device: torch.device) -> None:
        from moe_nvfp4.kernels.common.tensors import settle

        settle(device)

    def merge(self, weights: Matrices, codes: Tensor, a: Tensor, b: Tensor) -> bool:
        from moe_nvfp4.kernels.sm90.pack import merge_operands

        units = weights.codes.view(torch.int32)
        portable.merge_units(codes.contiguous(), *merge_operands(weights, a, b), units, weights.gated)
        self.settle(codes.device)
        return True

    def values(self, weights: Matrices) -> Matrices:
        from moe_nvfp4.kernels.sm90.pack import unpack

        w = weights
        codes, sf = unpack(w.codes.view(torch.int32), None, w.N, 16 * w.blocks, w.gated)
        return w._replace(codes=codes, sf=sf, layout=None)

    def dequantize(self, weights: Matrices, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        w = weights.of(experts)
        if w.layout is not None:
            if w.codes.is_cuda:
                from moe_nvfp4.kernels.sm90.dequantize import window

                return window(w, columns, dtype)
            w = self.values(w)
        return dequantized(w, slice(None), columns, dtype)


BACKEND = Hopper()
