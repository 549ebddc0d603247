"""Steps of transformers' weight converters: between tensors of 4-bit files and the parameters of `HFExperts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, MergeModulelist, SplitModulelist

from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.quantize.dialects import Dialect
from moe_nvfp4.quantize.layouts import dbrx
from moe_nvfp4.quantize.layouts.base import split_rows

Tensors = dict[str, Any]  # what is converted, by the pattern of its name: a tensor or a list of them


def _only(found: Tensors) -> Tensor:
    """The only tensor of `found`."""
    (tensor,) = found.values()
    return tensor[0] if isinstance(tensor, list) else tensor


class ViewDtype(ConversionOps):
    """The same bytes under another dtype: files have e4m3 scales, modules uint8 bytes."""

    def __init__(self, dtype: torch.dtype, stored: torch.dtype):
        self.dtype, self.stored = dtype, stored

    def convert(self, input_dict: Tensors, **kwargs: Any) -> Any:
        def view(value: Any) -> Any:
            return [v.view(self.dtype) for v in value] if isinstance(value, list) else value.view(self.dtype)

        return {key: view(value) for key, value in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return ViewDtype(self.stored, self.dtype)


class StackExperts(MergeModulelist):
    """One tensor per expert -> [E, ...]; the way back keeps every dimension, also those of size 1."""

    @property
    def reverse_op(self) -> ConversionOps:
        return _UnstackExperts(self.dim)


class _UnstackExperts(SplitModulelist):
    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Any:
        first = next(iter(input_dict.values()))
        shape = (first[0] if isinstance(first, list) else first).shape[1:]
        split: Any = super().convert
        tensors = split(input_dict, source_patterns, target_patterns, **kwargs)
        return {key: tensor.reshape(shape) for key, tensor in tensors.items()}  # 5.17 squeezes them all

    @property
    def reverse_op(self) -> ConversionOps:
        return StackExperts(self.dim)


class ScalePerExpert(ConversionOps):
    """Scales of E experts as a dialect stores them, scalars or one [E] -> fp32 [E]; of two projections that share
    one, the larger.

    stored: a dictionary that gets what was read, fp32 [projections, E] by the parameter's name.
    """

    def __init__(self, dialect: Dialect, stored: dict[str, Tensor]):
        self.dialect, self.stored = dialect, stored

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], full_layer_name: str = "",
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        columns = torch.stack([torch.cat([t.reshape(-1) for t in tensors]) for tensors in input_dict.values()])
        if self.dialect.reciprocal:
            self.stored[full_layer_name] = columns.cpu()
        return {target_patterns[0]: self.dialect.decode_scale(columns).amax(dim=0)}

    @property
    def reverse_op(self) -> ConversionOps:
        return _PerExpert(self, self.dialect.encode_scale)


class PreQuantScalePerExpert(StackExperts):
    """AWQ's vectors [K] of E experts -> [E, K]; two projections that read the same rows have the same."""

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], full_layer_name: str = "",
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        first, *others = (torch.stack(tensors) for tensors in input_dict.values())
        if any(not torch.equal(first, other) for other in others):
            raise ValueError(f"{full_layer_name}: gate and up have different pre_quant_scale, which no input can have")
        return {target_patterns[0]: first}

    @property
    def reverse_op(self) -> ConversionOps:
        return _PerExpert(self, lambda scale: scale)


class _PerExpert(ConversionOps):
    """The way back of `way`: [E, ...] -> a tensor for each expert, encoded, which its projections share."""

    supports_many_to_many = True

    def __init__(self, way: ConversionOps, encode: Callable[[Tensor], Tensor]):
        self.way, self.encode = way, encode

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Any:
        scale = _only(input_dict)
        names = {p.replace("*", str(e)): e for p in target_patterns for e in range(len(scale))}
        return {name: self.encode(scale[e]).clone() for name, e in names.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return self.way


class TransposedStack(ConversionOps):
    """ModelOpt's stacks of all experts -> our parameters, which have K last and rows [gate; up].

    Codes [E, in/2, out], block scales [E, in/16, out], biases [E, out], and one scale for the whole stack,
    which every expert of the result has for itself.
    """

    def __init__(self, experts: dict[str, HFExperts]):
        self.experts = experts

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], full_layer_name: str = "",
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        tensor = _only(input_dict)
        experts = self.experts[full_layer_name.rpartition(".")[0]]
        if tensor.numel() == 1:
            scales = tensor.float().reshape(1).expand(experts.layout.num_experts)
            return {target: scales.clone() for target in target_patterns}
        if tensor.dim() == 3:
            tensor = tensor.transpose(1, 2)
        if experts.layout.interleaved and "gate_up_proj" in target_patterns[0]:
            tensor = torch.cat(split_rows(tensor, 2, interleaved=True, dim=1), dim=1)
        return {target_patterns[0]: tensor.contiguous()}

    @property
    def reverse_op(self) -> NoReturn:
        raise NotImplementedError("experts are saved one by one")


class Stacked(ConversionOps):
    """A tensor that holds all experts already."""

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Any:
        return {target_patterns[0]: _only(input_dict)}

    @property
    def reverse_op(self) -> ConversionOps:
        return Stacked()


class DbrxStack(ConversionOps):
    """DBRX's [E * I, H] matrices -> [E, 2I, H] (w1, v1) or [E, H, I] (w2)."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def convert(
        self, input_dict: Tensors, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Any:
        parts = [_only({p: input_dict[p]}) for p in source_patterns]
        return {target_patterns[0]: dbrx.parameters(parts, self.num_experts)}
