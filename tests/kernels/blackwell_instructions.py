"""Small PTX kernels for sm_100a that run on a Blackwell and on the emulator: what `tests.record_b200` records.

Those of `hopper_instructions` that are not Hopper's own, and tcgen05. Products named "exact" come out alike however the
sums are rounded, so they show layouts; those named "spread" show how tcgen05.mma adds, which is not documented.
"""

from dataclasses import replace

import numpy as np

from tests.emulator import test_tcgen05 as of_16_bits
from tests.emulator import test_tensor_cores as of_4_bits
from tests.emulator.ptx import kernel
from tests.kernels import hopper_instructions
from tests.kernels.hopper_instructions import Case


def of_bf16():
    found = {}
    for case in of_16_bits.CASES:
        for spread in (None, 0, 6):
            data, image, _ = of_16_bits.problem(case, spread)
            out = np.zeros((case.group, 128, case.n), np.float32)
            a = "TMEM" if case.a_in_tmem else "shared"
            name = f"{case.kind} {case.m} x {case.n}, {case.group} CTAs, lane {case.lane}, A in {a}"
            ptx = kernel(of_16_bits.body(case), [".u64 in", ".u64 a"])
            found[f"{name}: {'exact' if spread is None else f'spread {spread}'}"] = Case(
                ptx, (out, data, image), grid=case.group, block=128, shared=65536, cluster=case.group
            )
    return found


def of_nvfp4():
    found = {}
    for n in (8, 40, 128, 184):
        for name, scales in (("exact", of_4_bits.SCALES), ("spread", of_4_bits.EVERY_SCALE)):
            data, _ = of_4_bits.nvfp4(n, scales=scales)
            twice = of_4_bits.mma(n) + of_4_bits.mma(n, "%p3")
            ptx = kernel(of_4_bits.tcgen05(n, twice), [".u64 in"])
            found[f"nvfp4 128 x {n}, twice: {name}"] = Case(
                ptx, (np.zeros((128, n), np.float32), data), block=128, shared=65536
            )
    return found


def of_loads():
    """Loads from Tensor Memory and stores to it; the epilogue reads gate and up with 16x32bx2."""
    found = {}
    for shape in of_16_bits.PLACES:
        for half in (0, 16):
            text, count = of_16_bits.moved(shape, half)
            out = np.zeros((32, count + 8), np.uint32)
            found[f"tcgen05.ld and st, {shape}, lane {half}"] = Case(kernel(text), (out,), block=32, shared=65536)
    return found


GROUPS = {"tcgen05, bf16": of_bf16(), "tcgen05, nvfp4": of_nvfp4(), "tcgen05, loads": of_loads()} | {
    group: {name: replace(case, ptx=case.ptx.replace("sm_90a", "sm_100a")) for name, case in cases.items()}
    for group, cases in hopper_instructions.GROUPS.items()
    if group != "wgmma"
}
