"""Experts on the CPU beside an NVIDIA GPU: the weights stay in host memory, and the CPU kernels multiply them there."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_nvfp4.kernels import cpu
from moe_nvfp4.kernels.backend import Backend, Device, Problem


class Offload(Backend):
    name = "offload"
    host_weights = maps = True

    def unavailable(self, device: Device) -> str | None:
        if device.capability is None:
            return "runs beside NVIDIA GPUs"
        reason = cpu.BACKEND.functions.missing()
        return f"computes with the CPU kernels, whose library {reason}" if reason else None

    def unsupported(self, device: Device, problem: Problem) -> str | None:
        if problem.kind == "linear":
            return "runs experts: linears stay on the GPU"
        if not problem.fused or problem.gate == "raw":
            return "runs fused layers only: the model must have nothing of its own between the stages"
        if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"takes bf16, fp16 and fp32 activations, not {problem.dtype}"
        return None

    def place(self, tensor: Tensor) -> Tensor:
        from moe_nvfp4.kernels.offload.pages import place

        return place(tensor)


BACKEND = Offload()
