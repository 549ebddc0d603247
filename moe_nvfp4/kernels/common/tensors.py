"""What kernels ask of the tensors they are given, and of the GPU."""

from functools import cache

import torch
from torch import Tensor


def aligned(x: Tensor) -> Tensor:
    """Contiguous, and at an address that TMA and 16-byte loads can read from."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def floating(x: Tensor) -> Tensor:
    """In a dtype that kernels read: what is not fp32, bf16 or fp16 as fp32."""
    return x if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else x.float()


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
