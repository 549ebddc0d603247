"""Tensors in the form that kernels take, and facts about the GPU."""

import warnings
from collections.abc import Callable, Hashable
from functools import cache

import torch
from torch import Tensor

from moe_nvfp4.devices import capturing, finish
from moe_nvfp4.kernels.common.ahead import noted_gpu


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and at an address that TMA and 16-byte loads can read."""
    x = x.contiguous()
    if x.shape[0] == 1 and x.stride(0) != x.numel():  # contiguous for torch, whatever the stride of the only row
        x = x.view(-1).view(x.shape)
    return x.clone() if x.data_ptr() % 16 else x


def expert_ids(top_k_index: Tensor) -> Tensor:
    """[T, top_k] -> [T * top_k], contiguous, int32 or int64."""
    known = top_k_index.dtype in (torch.int32, torch.int64)
    return (top_k_index if known else top_k_index.to(torch.int64)).contiguous().view(-1)


def floating(x: Tensor) -> Tensor:
    """x in a dtype that kernels read: fp32, unless it is bf16 or fp16 already."""
    return x if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else x.float()


def settle(device: torch.device) -> None:
    """Make everything that torch's kernels have written so far visible to the next launch.

    Under programmatic dependent launch a kernel begins before its predecessor has ended, and sees what that one wrote
    only after griddepcontrol.wait. Our kernels read some tensors without waiting, because these are older: weights,
    offsets, positions, routing weights. Where torch has just written one of them, this launches a kernel in between.
    """
    torch.empty(1, device=device).fill_(0)


def lasting(make: Callable[..., Tensor], device: torch.device, key: Hashable) -> Tensor:
    """`make(key, device)`, made once: kernels may read it before they wait for the launch before."""
    if (make, device, key) in _lasting:
        return _lasting[make, device, key]
    made = make(key, device)
    settle(device)
    if not capturing(device):  # else it is a part of the graph, which fills it in each replay
        finish(device)  # other streams may read it next
        _lasting[make, device, key] = made
    return made


_lasting: dict[tuple[Callable[..., Tensor], torch.device, Hashable], Tensor] = {}  # for good: graphs may read them


@cache
def warn_unpacked(kernels: str) -> None:
    """Warn, once for each kind of kernels."""
    warnings.warn(
        f"4-bit weights are brought into the layout of the {kernels} kernels at every call, which may cost more than "
        "their products: call prepare_model(model), or prepare() on the 4-bit modules, before torch.compile and "
        "fully_shard, and keep them on the GPU (no offloading)",
        stacklevel=3,
    )


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; for meta, of the GPU that launches are noted for (`ahead`)."""
    gpu = noted_gpu() if device.type == "meta" else None
    return _multiprocessors(device) if gpu is None else gpu.multiprocessors


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, or of the one that launches are noted for (`ahead`); None: neither."""
    gpu = noted_gpu()
    return _capability(device) if gpu is None else gpu.capability


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return torch.cuda.get_device_capability(device) if nvidia else None


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
