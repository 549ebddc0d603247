"""The portable backend's compiled code: right on the emulator, equal for every NVIDIA GPU, within its resources."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common import THRESHOLDS

pytest.importorskip("triton", reason="the portable backend's kernels are Triton's")

CONSUMER_SHARED = 99 << 10  # bytes that a block can have on an RTX 3090, 4090, 5090 or a DGX Spark
FEW_TOKENS = 32  # tiles of up to so many tokens are for decoding


def run(what, tmp_path_factory):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1",
                   "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}  # fmt: skip
    command = [sys.executable, "-m", "tests.kernels.portable_code", what]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_compiled_kernels_on_the_emulator(tmp_path_factory):
    """Whole layers with all their kernels, and a linear; an illegal id ends in the assertion."""
    result = run("emulate", tmp_path_factory)
    assert len(result) == 22
    for case, error in result.items():
        assert isinstance(error, (int, float)) and error < THRESHOLDS["half"], (case, error)


@pytest.mark.slow
def test_every_gpu_runs_the_same_ptx(tmp_path_factory):
    """sm_80 to sm_121, so what the emulator and one GPU have shown holds for all."""
    kernels = (
        "route", "gemm", "combine", "top_k", "linear", "merge", "merge_units", "group", "tiles", "shrink", "expand",
    )  # fmt: skip
    same = run("same", tmp_path_factory)
    assert same == {name: [] for name in (*(f"{kernel}_kernel" for kernel in kernels), "NVFP4 times NVFP4")}


@pytest.mark.slow
def test_resources(tmp_path_factory):
    """GeForce has the shared memory; tiles for decoding spill nothing, those for prefill next to nothing."""
    table = run("tiles", tmp_path_factory)
    assert len(table) > 20
    for name, tile in table.items():
        assert tile["shared"] <= CONSUMER_SHARED, (name, tile)
        for numbers in tile["by GPU"].values():
            assert numbers["spills"] <= (0 if tile["tokens"] <= FEW_TOKENS else 68), (name, tile)
