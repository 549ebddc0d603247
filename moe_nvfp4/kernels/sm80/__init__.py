"""The sm_80 backend: a CuTe DSL kernel for the GEMMs by sm_80 instructions, for Ampere, Ada and GeForce Blackwell GPUs.

Weights are in Hopper's layout, and everything but the GEMMs is done by the portable backend's Triton kernels.
"""

from __future__ import annotations

from moe_nvfp4.kernels.backend import Backend, Device, Problem, not_installed, other_gpu
from moe_nvfp4.kernels.sm90 import Hopper
from moe_nvfp4.weights import is_quantized

LEAST_WEIGHTS = 1 << 26  # of a linear: on an H200 one of 2^24 was up to 1.4 times as slow (2026-11-26)
GPUS = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))


class Ampere(Hopper):
    name = "sm80"
    maps = False
    packages = ("cutlass", "triton")
    layout = "sm90"

    def unavailable(self, device: Device) -> str | None:
        names = "A100, RTX 30 and 40, L40S, H200, RTX 50, RTX PRO 6000"
        return other_gpu(device, GPUS, names) or not_installed(
            device, self.packages, "pip install moe-nvfp4[gpu] triton brings CuTe DSL and Triton"
        )

    def unsupported(self, device: Device, problem: Problem) -> str | None:
        if problem.kind == "linear" and problem.hidden_size * problem.intermediate_size < LEAST_WEIGHTS:
            return "is no faster than the portable kernels for linears of less than 2^26 weights, which run there"
        if is_quantized(problem.activations) and device.capability == (12, 0):
            return "multiplies NVFP4 rows as bf16, where the portable kernels have an instruction for NVFP4 times NVFP4"
        return super().unsupported(device, problem)

    def joins(self, parts: tuple[int, ...]) -> bool:
        return False

    settle = Backend.settle  # no kernel begins before the one before has ended


BACKEND = Ampere()
