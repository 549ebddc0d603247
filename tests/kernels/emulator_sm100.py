"""The Blackwell backend on the emulator, which replaces the GPU for its launches."""

from contextlib import contextmanager

import pytest

from moe_nvfp4.kernels.sm100 import backend as sm100
from moe_nvfp4.kernels.sm100.config import (
    BLOCK_K,
    SMEM,
    CombineConfig,
    GemmConfig,
    InterleaveConfig,
    QuantizeConfig,
    RouteConfig,
    SumConfig,
)
from tests.emulator import PTX_ONLY, Emulated, compiling_for
from tests.emulator.stream import Stream

RUNS = {}  # config of a kernel -> its emulated form
OUTPUTS = {
    RouteConfig: (2, 3, 4, 5, 6),
    QuantizeConfig: (4, 5, 6),
    InterleaveConfig: (2,),
    SumConfig: (1,),
    CombineConfig: (2,),
}  # which of a launch's arguments


def outputs_of(config, arguments):
    """The tensors that a launch writes."""
    of_gemm = (9, 10, 11) if getattr(config, "out", "") == "nvfp4" else (7 if getattr(config, "dense", False) else 9,)
    return [arguments[i] for i in OUTPUTS.get(type(config), of_gemm)]


class OnEmulator:
    """Replaces `sm100.launch`: every launch runs under `schedule`, on `multiprocessors` multiprocessors. GEMMs have
    `tile`, if it is not None, and `parts` of K."""

    def __init__(self):
        self.schedule, self.multiprocessors, self.tile, self.stream = "eager", 3, None, Stream()
        self.parts = 1
        self.cut_sums = False

    def plan(self, activations, rows, experts, weight_rows, k, *_):
        """(tile, parts of K), with no more parts than K has blocks; None if no tile is given."""
        return self.tile and (self.tile, min(self.parts, -(-k // BLOCK_K)))

    def launch(self, config, arguments):
        if config not in RUNS:
            with compiling_for("sm_100a"):
                RUNS[config] = Emulated(sm100.compile_kernel(config, PTX_ONLY))
        outputs = outputs_of(config, arguments)
        (machine,) = self.stream.launch(
            RUNS[config], *arguments, outputs=outputs, unwritten=outputs, schedule=self.schedule, cut_sums=self.cut_sums
        )
        if isinstance(config, GemmConfig):
            assert machine.dynamic_shared == config.shared_bytes <= SMEM, (machine.dynamic_shared, config)

    def before(self, rows):
        """Pretend that the preceding kernel has just written these rows."""
        self.stream.unsettled = [t for t in (rows.values, rows.sf, rows.scale) if t is not None]


@contextmanager
def in_place_of_launch(runner):
    """A context in which launches of `moe_nvfp4.kernels.sm100`, and its choice of sizes, go to `runner`."""
    plan_gemm = sm100.plan_gemm
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sm100, "launch", runner.launch)
        monkeypatch.setattr(sm100, "multiprocessors", lambda device: runner.multiprocessors)
        monkeypatch.setattr(sm100, "plan_gemm", lambda *problem: runner.plan(*problem) or plan_gemm(*problem))
        yield runner


@contextmanager
def on_emulator():
    """A context in which `moe_nvfp4.kernels.sm100` runs CPU tensors on the OnEmulator that it yields."""
    runner = OnEmulator()
    with in_place_of_launch(runner), runner.stream:
        yield runner
