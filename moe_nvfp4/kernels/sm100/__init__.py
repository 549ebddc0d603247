"""The Blackwell backend: CuTe DSL kernels for sm_100a and sm_103a."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.kernels.backend import Device, Problem, dequantized, not_installed, other_gpu
from moe_nvfp4.kernels.portable import BesidePortable
from moe_nvfp4.weights import Matrices


class Blackwell(BesidePortable):
    name = "sm100"
    packages = ("cutlass", "tvm_ffi")
    layout = "sm100"

    def unavailable(self, device: Device) -> str | None:
        return other_gpu(device, ((10, 0), (10, 3)), "B200, B300") or not_installed(
            device, self.packages, "pip install moe-nvfp4[gpu] brings CuTe DSL"
        )

    def unsupported(self, device: Device, problem: Problem) -> str | None:
        p = problem
        if p.activations == "bf16" and p.dtype != torch.bfloat16:
            name = str(p.dtype).removeprefix("torch.")
            return f"takes x in bfloat16 where activations='bf16', not {name}: run the model in bfloat16"
        if p.hidden_size % 16 or p.intermediate_size % 16:
            return f"takes sizes that are multiples of 16, not H = {p.hidden_size} and I = {p.intermediate_size}"
        return None

    def pack(self, codes: Tensor, sf: Tensor, interleaved: bool) -> tuple[Tensor, Any]:
        from moe_nvfp4.kernels.sm100.pack import pack

        _, rows, K16 = sf.shape
        projections = 2 if interleaved else 1
        return pack(codes, sf, projections), (rows, K16, projections)

    def unpack(self, packed: Tensor, note: Any) -> tuple[Tensor, Tensor]:
        from moe_nvfp4.kernels.sm100.pack import unpack

        return unpack(packed, *note)

    def values(self, weights: Matrices) -> Matrices:
        from moe_nvfp4.kernels.sm100.pack import unpack

        w = weights
        codes, sf = unpack(w.codes, w.N, w.blocks, 2 if w.gated else 1)
        return w._replace(codes=codes, sf=sf, layout=None)

    def dequantize(self, weights: Matrices, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        if weights.layout is not None:
            from moe_nvfp4.kernels.sm100.pack import window

            weights = window(weights, experts, columns)
            experts, columns = slice(None), slice(0, weights.K)
        return dequantized(weights, experts, columns, dtype)


BACKEND = Blackwell()
