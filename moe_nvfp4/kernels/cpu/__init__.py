"""The CPU backend: C loops over the 4-bit weights, in memory or in their files (`mapped`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_nvfp4 import mapped
from moe_nvfp4.kernels.backend import Backend, Device, dequantized
from moe_nvfp4.weights import Projection


class CPU(Backend):
    name = device_type = "cpu"

    def unavailable(self, device: Device) -> str | None:
        return "runs on CPUs" if device.type != "cpu" else self.functions.missing()

    # For weights that stay in their files.

    def restore(self, prepared: Tensor, note: Any) -> tuple[Tensor, Tensor]:
        return mapped.read(prepared, note.rows, note.columns)

    def dequantize(self, weights: Projection, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        if weights.sf is None:
            first, scale = weights.first_scale, weights.scale[experts]
            codes, sf = mapped.read(weights.codes[experts], weights.rows, -(-weights.width // 16) * 16)
            weights = weights._replace(
                codes=codes, sf=sf, scale=scale, first_scale=first if first is None else first[experts]
            )
            experts = slice(None)
        return dequantized(weights, experts, columns, dtype)


BACKEND = CPU()
