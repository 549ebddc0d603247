"""What GPU kernels ask of the tensors they are given, and of the GPU."""

from functools import cache

import torch
from torch import Tensor


def aligned(x: Tensor) -> Tensor:
    """Contiguous, and at an address that TMA and 16-byte loads can read from."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
