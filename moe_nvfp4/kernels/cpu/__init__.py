"""The CPU backend: C loops over the 4-bit weights."""

from __future__ import annotations

from moe_nvfp4.kernels.backend import Backend, Device


class CPU(Backend):
    name = device_type = "cpu"

    def unavailable(self, device: Device) -> str | None:
        return "runs on CPUs" if device.type != "cpu" else self.functions.missing()


BACKEND = CPU()
