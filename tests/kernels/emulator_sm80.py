"""The sm_80 backend on the emulator, which replaces the GPU for its GEMMs; Triton interprets the other kernels."""

from contextlib import contextmanager

from moe_nvfp4.kernels.common import launch
from moe_nvfp4.kernels.sm80 import backend as sm80
from tests.emulator import PTX_ONLY, Emulated, compile_for
from tests.emulator.stream import blank

RUNS = {}  # kernel -> its emulated form


class OnEmulator:
    """Replaces `launch.compiled`: every launch runs under `schedule`. `kernels` are those that ran."""

    def __init__(self):
        self.schedule, self.multiprocessors, self.capability, self.kernels = "eager", 3, (8, 0), []

    def compiled(self, kernel, arguments, architecture):
        key = repr(kernel), repr([str(a) for a in arguments]), architecture
        if key not in RUNS:
            RUNS[key] = Emulated(compile_for(architecture, kernel, arguments, PTX_ONLY))
        return lambda *values: self.run(kernel, RUNS[key], values)

    def run(self, kernel, emulated, values):
        self.kernels.append(kernel)
        blank(values[2])
        emulated(*values, schedule=self.schedule, stale_shared=True)  # tokens beyond a group are read, and ignored


@contextmanager
def on_emulator():
    """A context in which `moe_nvfp4.kernels.sm80` runs CPU tensors on the OnEmulator that it yields."""
    runner, kept = OnEmulator(), (launch.compiled, sm80.multiprocessors, sm80.capability)
    launch.compiled = runner.compiled
    sm80.multiprocessors, sm80.capability = lambda device: runner.multiprocessors, lambda device: runner.capability
    sm80._kernel.cache_clear()
    try:
        yield runner
    finally:
        launch.compiled, sm80.multiprocessors, sm80.capability = kept
        sm80._kernel.cache_clear()
