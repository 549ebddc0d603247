"""What the tests share: one scalar for the error of a GEMM, and the one table of thresholds."""

import torch
from torch import Tensor

# Relative error ||a - b|| / ||b|| in float64 against an independent computation.
THRESHOLDS = {
    "fp32": 1e-6,  # fp32 sums in another order
    "half": 4e-3,  # bf16 or fp16 in and out: one rounding of h, one of y
    "w4a4": 2e-2,  # rows requantized to e2m1: a value at a rounding boundary moves by a step
}


def relative_error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, f"{tuple(a.shape)} is compared with {tuple(b.shape)}"
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return ((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()
