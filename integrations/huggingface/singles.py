"""Experts that become dense while they are read, of files that have them one by one beside NVFP4 ones: in FP8 (mixed
precision), or dense in a family whose own files have stacks, from which transformers reads them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout
from moe_nvfp4.quantize.layouts.base import cast_finite
from moe_nvfp4.quantize.layouts.fp8 import fp8_block, fp8_dense, fp8_scale


def single_experts(name: str, parameter: Tensor, layout: ModuleLayout, found: dict[str, list[Tensor]]) -> Tensor:
    """The value of the parameter `name` of a dense module. found: the files' tensors, one per expert, under
    "gate_proj single.weight" and the like."""
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"{name} is in the files one expert after the other, in FP8 or dense, and such experts are not split over "
            "ranks as they are read: load them in one process, and save"
        )
    last = "bias" if name.endswith("_bias") else "weight"
    there = [part for part in ("gate_proj", "up_proj", "down_proj") if f"{part} single.{last}" in found]
    parts = [_dense(f"{name}: {part}", part, last, found, parameter) for part in there]
    own = name.rpartition(".")[2]
    whole = torch.stack([layout.stored(own, expert) for expert in torch.cat(parts, dim=1)])
    if whole.shape != parameter.shape:
        raise ValueError(
            f"{name}: the files have {list(whole.shape)}, the model {list(parameter.shape)}: a projection is missing, "
            "or they belong to another model"
        )
    return whole


def _dense(name: str, part: str, last: str, found: dict[str, list[Tensor]], like: Tensor) -> Tensor:
    """One projection of all experts, [E, N, K], or its bias, [E, N], dequantized, in the dtype of `like`."""
    tensors, scale = found[f"{part} single.{last}"], fp8_scale(f"{part} single", found)
    is_fp8 = tensors[0].dtype == torch.float8_e4m3fn
    scales = found[scale] if is_fp8 and scale is not None else []
    if len(tensors) != len(like) or is_fp8 and len(scales) != len(like):
        raise ValueError(
            f"{name}: the files have {len(tensors)} tensors and {len(scales)} scales for {len(like)} experts: a shard "
            "is missing or the file is damaged; download it again"
        )
    dense = []
    for e, w in enumerate(tensors):
        if is_fp8:
            block = fp8_block(w.shape, scales[e].shape)
            if block is None:
                raise ValueError(
                    f"{name}: scales {list(scales[e].shape)} do not fit FP8 {list(w.shape)}: download the file again"
                )
            w = fp8_dense(w, scales[e], block)
        dense.append(cast_finite(w, like.dtype, name))
    return torch.stack(dense)
