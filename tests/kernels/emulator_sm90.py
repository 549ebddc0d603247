"""The Hopper backend on the emulator, which replaces the GPU for its launches."""

from contextlib import contextmanager

from moe_nvfp4.kernels.common import launch
from moe_nvfp4.kernels.sm90 import backend as sm90
from tests.emulator import Emulated, compile_for
from tests.emulator.stream import Stream
from tests.kernels.hopper_layers import fresh_kernels, outputs_of

RUNS = {}  # kernel -> its emulated form


class OnEmulator:
    """Replaces `launch.compiled`: every launch runs under `schedule`. `kernels` are those that ran, `cubins` what ptxas
    made of them."""

    def __init__(self):
        self.schedule, self.multiprocessors, self.kernels, self.stream = "eager", 3, [], Stream()
        self.cubins = {}

    def compiled(self, kernel, arguments, architecture):
        key = repr(kernel), repr([str(a) for a in arguments])
        if key not in RUNS:
            function = compile_for(architecture, kernel, arguments)
            RUNS[key] = Emulated(function)
            RUNS[key].cubin = function.__cubin__
        self.cubins[repr(kernel)] = RUNS[key].cubin
        return lambda *values: self.run(kernel, RUNS[key], values)

    def run(self, kernel, emulated, values):
        self.kernels.append(kernel)
        # GEMM: it reads, and ignores, tokens beyond a group, and all words but one of the slot that ends the tiles.
        stale = type(kernel).__name__ == "GroupedGemm"
        outputs = outputs_of(kernel, values)
        self.stream.launch(emulated, *values, outputs=outputs, schedule=self.schedule, stale_shared=stale)


@contextmanager
def on_emulator():
    """A context in which `moe_nvfp4.kernels.sm90` runs CPU tensors on the OnEmulator that it yields."""
    runner, kept = OnEmulator(), (launch.compiled, sm90.multiprocessors)
    launch.compiled, sm90.multiprocessors = runner.compiled, lambda device: runner.multiprocessors
    try:
        with fresh_kernels(), runner.stream:
            yield runner
    finally:
        launch.compiled, sm90.multiprocessors = kept
