"""The CPU backend: C loops over the 4-bit weights, in memory or in their files (`mapped`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_nvfp4 import mapped
from moe_nvfp4.kernels.backend import Backend, Device, dequantized
from moe_nvfp4.weights import Matrices

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FEW = 32  # rows of a group, on average, that `add_low_rank` takes


class CPU(Backend):
    name = device_type = "cpu"

    def unavailable(self, device: Device) -> str | None:
        return "runs on CPUs" if device.type != "cpu" else self.functions.missing()

    def add_low_rank(self, out: Tensor, x: Tensor, a: Tensor, *others: Any) -> bool:
        """For few rows in a group: torch's grouped product is the faster one for many. One dtype for all."""
        one_dtype = x.dtype in FLOATS and out.dtype == x.dtype == a.dtype
        if len(out) > FEW * len(a) or not (one_dtype and out.is_contiguous()):
            return False
        self.functions.add_low_rank(out, x, a, *others)
        return True

    # For weights that stay in their files.

    def unpack(self, packed: Tensor, note: Any) -> tuple[Tensor, Tensor]:
        return mapped.read(packed, note.rows, note.columns)

    def values(self, weights: Matrices) -> Matrices:
        codes, sf = mapped.read(weights.codes, weights.N, 16 * weights.blocks)
        return weights._replace(codes=codes, sf=sf, layout=None)

    def dequantize(self, weights: Matrices, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        if weights.layout is not None:
            weights, experts = self.values(weights.of(experts)), slice(None)
        return dequantized(weights, experts, columns, dtype)


BACKEND = CPU()
