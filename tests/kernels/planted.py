"""Plant a mistake in every instruction of the Blackwell kernels that synchronizes, copies or multiplies: is it noticed?

    python -m tests.kernels.planted [one] [pair] ...      # about a minute each; prints what nobody noticed

What is not noticed should do no harm: see "How it was validated" in tests/emulator/README.md.
"""

import argparse
import time

import pytest
import torch

from moe_nvfp4 import Gate, reference
from moe_nvfp4.kernels.sm100 import backend as sm100
from moe_nvfp4.kernels.sm100.config import (
    BLOCK_K,
    CombineConfig,
    DenseTile,
    GemmConfig,
    InterleaveConfig,
    QuantizeConfig,
    SumConfig,
    TileShape,
)
from moe_nvfp4.routing import Rows, group_by_expert
from tests.common import random_ids, random_layer
from tests.emulator import PTX_ONLY, Emulated, compiling_for, mistakes
from tests.emulator.launch import programs
from tests.kernels.emulator_sm100 import outputs_of
from tests.kernels.test_sm100 import prepared, with_noise

# name -> (H, I, rows of each expert), tile (of the kind that these rows need), multiprocessors, and which launches to
# spoil. In a spoilt GEMM, rings go round more than once, and tiles are of every kind.
PROBLEMS = {
    "one": ((1040, 80, [70, 20]), TileShape(64, 2), 1, lambda c: getattr(c, "projections", 0) == 2),
    "two": ((272, 528, [70, 0, 20]), TileShape(64, 1), 2, lambda c: getattr(c, "projections", 0) == 1),
    "pair": ((64, 1040, [130, 20]), TileShape(128, 1, 2), 2, lambda c: getattr(c, "projections", 0) == 1),
    "pair of two": ((528, 144, [130, 20]), TileShape(128, 2, 2), 2, lambda c: getattr(c, "projections", 0) == 2),
    "quantize": ((80, 48, [3, 0, 130]), TileShape(64, 2), 1, lambda c: isinstance(c, QuantizeConfig)),
    "combine": ((80, 48, [3, 0, 5]), TileShape(64, 2), 1, lambda c: isinstance(c, CombineConfig)),
    "bf16": ((1040, 80, [70, 20]), DenseTile(64, 2), 1, lambda c: getattr(c, "projections", 0) == 2),
    "bf16, two": ((272, 784, [70, 0, 20]), DenseTile(64, 1), 2, lambda c: getattr(c, "projections", 0) == 1),
    "bf16, parts": ((528, 80, [70, 20]), DenseTile(64, 2), 1, lambda c: getattr(c, "parts", 0) == 2),
    "interleave": ((80, 48, [3, 0, 5]), DenseTile(64, 2), 1, lambda c: isinstance(c, InterleaveConfig)),
    "sum": ((272, 48, [3, 0, 5]), DenseTile(64, 2), 1, lambda c: isinstance(c, SumConfig)),
}
IN_PARTS = "bf16, parts", "sum"  # K is in two parts


def launches(problem, tile, multiprocessors, parts=1):
    """[(config, arguments)] of both GEMMs and the row kernels."""
    (H, I, sizes), dense = problem, isinstance(tile, DenseTile)
    activations = "bf16" if dense else "nvfp4"
    layer = random_layer(len(sizes), H, I, Gate(), activations, None, True, 0, scale=2e-3, input_scale=4e-3)
    w, packed = layer.weights, prepared(layer).weights
    ids = random_ids(sizes, 3, 1, 0)
    groups = group_by_expert(ids, len(sizes))
    x = torch.randn(len(ids), H, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows, h = Rows(x, index=groups.token), Rows(torch.randn(len(groups.order), I).bfloat16())
    if not dense:
        rows = with_noise(reference.quantize_rows(x, groups.token, w.x_scale, groups), groups)
        h = with_noise(reference.gemm1_swiglu(rows, w, groups, torch.bfloat16), groups)
    started = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm100, "launch", lambda *launch: started.append(launch))
        patch.setattr(sm100, "multiprocessors", lambda device: multiprocessors)
        patch.setattr(sm100, "plan_gemm", lambda *p: (tile, min(parts, -(-p[4] // BLOCK_K))))
        if not dense:
            sm100.quantize_rows(x, groups.token, w.x_scale, groups)
        sm100.gemm1_swiglu(rows, packed, groups, torch.bfloat16)
        sm100.gemm2_combine(h, packed, groups, torch.rand(ids.shape), torch.bfloat16)
    for config, arguments in started:  # what other kernels would have written
        if isinstance(config, (CombineConfig, SumConfig)):
            arguments[0].normal_()
        elif isinstance(config, GemmConfig) and dense:
            values = arguments[2].view(torch.bfloat16)
            values.copy_(torch.randn(values.shape))
    return started


def unnoticed(name):
    """(the number of mistakes, those that nothing noticed)"""
    problem, tile, multiprocessors, chosen = PROBLEMS[name]
    started = launches(problem, tile, multiprocessors, 2 if name in IN_PARTS else 1)
    config, arguments = next(launch for launch in started if chosen(launch[0]))
    with compiling_for("sm_100a"):
        kernel = Emulated(sm100.compile_kernel(config, PTX_ONLY))
    outputs = outputs_of(config, arguments)
    read = ((2,) if config.dense else (2, 3, 4)) if isinstance(config, GemmConfig) else (0,)
    late = [arguments[i] for i in read] + outputs

    def run(text, schedule):
        kernel.programs = programs(text)
        for tensor in outputs:
            tensor.view(torch.uint8).fill_(0xFF)
        kernel(*arguments, schedule=schedule, unwritten=outputs, after_wait=late, max_steps=400_000)
        return [tensor.clone() for tensor in outputs]

    return mistakes.unnoticed(kernel.ptx, run)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PROBLEMS), metavar="NAME", help=", ".join(PROBLEMS))
    for name in parser.parse_args().names:
        start = time.time()
        count, survivors = unnoticed(name)
        print(f"{name}: {count - len(survivors)} of {count} noticed, {time.time() - start:.0f} s", flush=True)
        for what in survivors:
            print(f"  {what}", flush=True)


if __name__ == "__main__":
    main()
