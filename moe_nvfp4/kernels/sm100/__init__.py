"""The Blackwell backend: CuTe DSL kernels for sm_100a and sm_103a."""

from __future__ import annotations

from moe_nvfp4.kernels.backend import Backend, Device, Problem, not_installed, other_gpu


class Blackwell(Backend):
    name = "sm100"
    packages = ("cutlass", "tvm_ffi")
    whole = False

    def unavailable(self, device: Device) -> str | None:
        return other_gpu(device, ((10, 0), (10, 3)), "B200, B300") or not_installed(
            device, self.packages, "pip install moe-nvfp4[gpu] brings CuTe DSL"
        )

    def unsupported(self, device: Device, problem: Problem) -> str | None:
        p = problem
        if p.kind == "linear":
            return "has no kernel for single linears yet: load them with linears='dense'"
        if p.activations != "nvfp4":
            return "takes NVFP4 activations only: use activations='nvfp4'"
        if p.hidden_size % 16 or p.intermediate_size % 16:
            return f"takes sizes that are multiples of 16, not H = {p.hidden_size} and I = {p.intermediate_size}"
        return None


BACKEND = Blackwell()
