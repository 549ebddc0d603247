"""FP8 experts next to NVFP4 ones (mixed precision), which become dense in the model's dtype while they are read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_nvfp4.quantize.layouts.base import cast_finite
from moe_nvfp4.quantize.layouts.fp8 import fp8_block, fp8_dense, fp8_scale


def fp8_experts(name: str, parameter: Tensor, found: dict[str, list[Tensor]]) -> Tensor:
    """The value of the parameter `name` of a dense module. found: the files' tensors, one per expert, under
    "gate_proj FP8.weight" and the like."""
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"{name} is FP8 in the files, and such experts are not split over ranks as they are read: make them dense "
            "first (moe-nvfp4 quantize SRC DST)"
        )
    there = [part for part in ("gate_proj", "up_proj", "down_proj") if f"{part} FP8.weight" in found]
    dense = torch.cat([_dense(f"{name}: {part}", part, found, parameter) for part in there], dim=1)
    if dense.shape != parameter.shape:
        raise ValueError(
            f"{name}: the files have {list(dense.shape)} in FP8, the model {list(parameter.shape)}: a projection is "
            "missing, or this family stores its experts transposed, which is not supported in FP8"
        )
    return dense


def _dense(name: str, part: str, found: dict[str, list[Tensor]], like: Tensor) -> Tensor:
    """One projection of all experts, dequantized: [E, N, K] in the dtype of `like`."""
    codes, scale = found[f"{part} FP8.weight"], fp8_scale(f"{part} FP8", found)
    scales = [] if scale is None else found[scale]
    if not len(codes) == len(scales) == len(like):
        raise ValueError(
            f"{name}: the files have {len(codes)} FP8 weights and {len(scales)} scales for {len(like)} experts: a "
            "shard is missing or the file is damaged; download it again"
        )
    dense = []
    for w, s in zip(codes, scales, strict=True):
        block = fp8_block(w.shape, s.shape)
        if block is None:
            raise ValueError(f"{name}: scales {list(s.shape)} do not fit FP8 {list(w.shape)}: download the file again")
        dense.append(cast_finite(fp8_dense(w, s, block), like.dtype, name))
    return torch.stack(dense)
