"""FP8 experts next to NVFP4 ones (mixed precision): made dense as they are read, in the model's dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import WeightConverter

from moe_nvfp4.integrations.huggingface.linears import FP8_TENSORS, Nothing
from moe_nvfp4.quantize.layouts.fp8 import fp8_block, fp8_dense, fp8_scale
from moe_nvfp4.quantize.names import PER_EXPERT


class FP8Experts(WeightConverter):
    """Experts that the files hold in FP8, a tensor for each, -> the stacked parameters of a dense module.

    modules  `CheckpointLayout.fp8`
    gated    whether gate and up are one parameter
    """

    PARTS = {"gate_proj": "gate_up_proj", "w1": "gate_up_proj", "up_proj": "gate_up_proj", "w3": "gate_up_proj",
             "down_proj": "down_proj", "w2": "down_proj"}  # fmt: skip

    def __init__(self, modules: dict[str, str], gated: bool):
        self.modules, self.gated = modules, gated
        super().__init__([f"{part}.{last}" for part in self.PARTS for last in FP8_TENSORS], ["weight"], [Nothing()])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        stem, _, last = source_key.rpartition(".")
        match = PER_EXPERT.fullmatch(stem)
        if match is None or match["module"] not in self.modules or last not in FP8_TENSORS:
            return source_key, None
        self._was_used = True
        name = self.PARTS[match["part"]] if self.gated else match["part"]
        return f"{self.modules[match['module']]}.{name}", f"{match['part']}.{last}"

    def __deepcopy__(self, memo: dict) -> WeightConverter:
        return FP8Experts(self.modules, self.gated)

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Tensor]:
        module, _, name = layer_name.rpartition(".")
        parameter = getattr(model.get_submodule(module), name)
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"{layer_name} is FP8 in the files, and such experts are not split over ranks as they are read: make "
                "them dense first (moe-nvfp4 quantize SRC DST)"
            )
        found = self.materialize_tensors()
        there = [part for part in self.PARTS if f"{part}.weight" in found]  # gate before up
        parts = [_dense(f"{layer_name}: {part}", part, found, parameter) for part in there]
        dense = torch.cat(parts, dim=1)
        if dense.shape != parameter.shape:
            raise ValueError(
                f"{layer_name}: the files have {list(dense.shape)} in FP8, the model {list(parameter.shape)}: a "
                "projection is missing, or this family stores its experts transposed, which is not known in FP8"
            )
        return {layer_name: dense}


def _dense(name: str, part: str, found: dict[str, list[Tensor]], like: Tensor) -> Tensor:
    """The matrices of all experts of one projection: [E, N, K] in the dtype of `like`."""
    codes, scale = found[f"{part}.weight"], fp8_scale(part, found)
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
            raise ValueError(f"{name}: scales {list(s.shape)} do not fit FP8 {list(w.shape)}")
        dense.append(fp8_dense(w, s, block).to(like.dtype))
    return torch.stack(dense)
