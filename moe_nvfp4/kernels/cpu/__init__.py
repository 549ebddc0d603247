"""The CPU backend: C loops over the 4-bit weights, in memory or in their files (`mapped`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_nvfp4 import mapped
from moe_nvfp4.kernels.backend import Backend, Device, dequantized
from moe_nvfp4.weights import Matrices


class CPU(Backend):
    name = device_type = "cpu"

    def unavailable(self, device: Device) -> str | None:
        return "runs on CPUs" if device.type != "cpu" else self.functions.missing()

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
