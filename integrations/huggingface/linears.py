"""4-bit linears besides experts: attention, shared experts, MLPs, lm_head.

They are in 4-bit checkpoints, or are made of the linears of a dense model (`quantize_linears`). A packed linear is an
`NVFP4Linear`; a dense one gets its weights dequantized while they are read, in the model's dtype. FP8 linears (mixed
precision) always become dense.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.utils import logging

from moe_nvfp4.format import dequantize
from moe_nvfp4.integrations.huggingface.experts import refuse_assigned, refuse_elsewhere, take_over
from moe_nvfp4.integrations.huggingface.files import QuantizedLinear
from moe_nvfp4.integrations.peft_versions import OLDEST, installed
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.progress import progress_bar
from moe_nvfp4.quantize.dialects import Dialect
from moe_nvfp4.quantize.layouts.base import cast_finite
from moe_nvfp4.quantize.layouts.fp8 import FP8_SCALES, fp8_block, fp8_dense
from moe_nvfp4.quantize.linears import Chosen
from moe_nvfp4.quantize.names import PRE_QUANT_SCALE
from moe_nvfp4.quantize.recipes import better, quantize_matrix, recipe_named
from moe_nvfp4.weights import check_block_scales, check_global_scale

logger = logging.get_logger(__name__)
FP8_TENSORS = ("weight", *FP8_SCALES, "input_scale")
PARAMETERS = ("weight", "weight_sf", "weight_global_scale", "input_scale", PRE_QUANT_SCALE)
NOT_SPLIT = (
    "{} is quantized in the files, and quantized linears are not split over ranks yet: load with linears='dense' in "
    "one process, save, and start from those files"
)


def replace_linears(
    model: nn.Module, linears: dict[str, QuantizedLinear], dialect: Dialect, activations: str
) -> dict[str, NVFP4Linear]:
    """Replace `linears`, name -> what the files hold, by empty NVFP4 linears on meta. Returns these by name.

    FP8 linears are not replaced, nor are modules other than nn.Linear, whose forward may do more than one product.
    """
    made = {}
    for name, linear in linears.items():
        module = model.get_submodule(name)
        if linear.kind != "nvfp4" or type(module) is not nn.Linear:
            continue
        refuse_assigned(module, name)
        bias = None if module.bias is None else module.bias.dtype
        pre_quant_scale = module.weight.dtype if PRE_QUANT_SCALE in linear.also else None
        made[name] = NVFP4Linear(
            module.in_features, module.out_features, bias, activations, dialect.input_scale in linear.also,
            pre_quant_scale, "meta",
        ).train(module.training)  # fmt: skip
        model.set_submodule(name, take_over(made[name], module))
    if made:
        _check_peft()
    return made


def _check_peft() -> None:
    """Warn of a PEFT that does not know 4-bit linears."""
    if (peft := installed()) is not None and peft < OLDEST:
        logger.warning_once(
            f"PEFT {peft} leaves 4-bit linears out of target_modules='all-linear': for adapters on them install 0.21.2"
        )


# What is known about linears, by name: importance fp32 [K], for fused ones under the first's name, or the parameters of
# an `NVFP4Linear`
Known: TypeAlias = Mapping[str, Any]


def quantize_linears(
    model: nn.Module, chosen: Chosen, recipe: str, activations: str, known: Known, progress: bool = False
) -> list[str]:
    """Replace the linears of `model` that were chosen by NVFP4 linears. Returns their names. known: what the recipe
    needs to know of them.

    Linears that are 4-bit already stay. NotImplementedError for weights that are split over ranks or not here,
    ValueError for NaN and Inf. Linears that servers fuse are all dense or all 4-bit, also after an error.
    """
    names: dict[nn.Module, list[str]] = {}  # layers may share a module
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for fused in progress_bar(chosen.fused, desc="NVFP4 linears", unit="linear", show=progress):
        modules: list[Any] = [model.get_submodule(linear.model) for linear in fused]
        if any(isinstance(module, NVFP4Linear) for module in modules):
            continue
        for linear, module in zip(fused, modules, strict=True):
            refuse_assigned(module, linear.model)
            refuse_elsewhere(module.weight, "quantized")
        ready = [known[linear.model] for linear in fused if isinstance(known.get(linear.model), Mapping)]
        try:
            parts = ready or quantize_fused([m.weight.detach() for m in modules], recipe, known.get(fused[0].model))
        except ValueError as error:
            raise ValueError(f"{', '.join(linear.model for linear in fused)}: {error}") from None
        made = [_with_parameters(m, parameters, activations) for m, parameters in zip(modules, parts, strict=True)]
        for module, new in zip(modules, made, strict=True):
            for name in names.pop(module):
                model.set_submodule(name, new)
    if chosen.fused:
        _check_peft()
    return [linear.model for fused in chosen.fused for linear in fused]


def quantize_fused(
    weights: Sequence[Tensor],
    recipe: str,
    importance: Tensor | None = None,
    of_text: tuple[Tensor, Tensor] | None = None,
) -> list[dict[str, Tensor]]:
    """Quantize dense weights [N, K] of linears that read the same rows, with one global scale. Returns the parameters
    of an `NVFP4Linear` for each.

    importance  fp32 [K]: of the rows' columns, for a recipe that needs it
    of_text     the Hessian of the rows, fp32 [K, K], and other rows [n, K] to judge by, for a recipe that needs a text

    ValueError for NaN and Inf.
    """
    whole = torch.cat([*weights]) if len(weights) > 1 else weights[0]
    make = recipe_named(recipe).from_hessians
    if make is None:
        codes, sf, scale = quantize_matrix(whole, recipe, None, importance)
    else:
        assert of_text is not None, "the callers asked the recipe"
        (hessian, held), w = of_text, whole[None]
        codes, sf, scale = (t[0] for t in better(w, make(w, hessian[None]), quantize_matrix(w), [held]))
    sizes = [len(w) for w in weights]
    return [
        {"weight": part, "weight_sf": part_sf.view(torch.uint8), "weight_global_scale": scale.reshape(1)}
        for part, part_sf in zip(codes.split(sizes), sf.split(sizes), strict=True)
    ]


def _with_parameters(linear: Any, parameters: Mapping[str, Tensor], activations: str) -> NVFP4Linear:
    """A 4-bit linear with these parameters, and the bias of the dense `linear`, on its device."""
    bias, place = linear.bias, linear.weight.device
    new = NVFP4Linear(
        linear.in_features, linear.out_features, None if bias is None else bias.dtype, activations, device=place
    )
    for name, tensor in {**parameters, **({} if bias is None else {"bias": bias.detach()})}.items():
        new.get_parameter(name).data.copy_(tensor)
    take_over(new, linear)
    return new.train(linear.training)


def to_linear(linear: NVFP4Linear, dtype: torch.dtype) -> nn.Linear:
    """The dense linear that `linear` replaced, with its weights dequantized exactly and rounded to `dtype`."""
    linear.unpack()
    dense = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, linear.weight.device, dtype)
    dense.weight.data.copy_(_dense({name: p for name, p in linear.named_parameters() if name != "bias"}))
    if isinstance(linear.bias, Tensor):
        dense.bias.data.copy_(linear.bias)
    take_over(dense, linear, vars(NVFP4Linear(16, 16, device="meta")))
    return dense.train(linear.training)


def _dense(found: dict[str, Tensor]) -> Tensor:
    """The weights fp32 [N, K], from the parameters of an `NVFP4Linear`, or from FP8 tensors by their names in files."""
    if "weight_sf" not in found:
        weight = found["weight"]
        scale = next(found[s] for s in FP8_SCALES if s in found)
        block = fp8_block(weight.shape, scale.shape)
        assert block is not None, "the reader of files looked"
        return fp8_dense(weight, scale, block)
    dense = dequantize(found["weight"], found["weight_sf"], found["weight_global_scale"].reshape(()))
    # AWQ: (x * s) · wᵀ = x · (w * s)ᵀ
    return dense * found[PRE_QUANT_SCALE].float() if PRE_QUANT_SCALE in found else dense


class Nothing(ConversionOps):
    """An operation that does nothing: WeightConverter requires one, but our converters do the work themselves."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> Any:
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return self


def copy_of(converter: Any) -> Any:
    """A shallow copy of a converter, without collected tensors. transformers makes one for each tensor, so it must be
    quick and must not copy the model."""
    new = copy.copy(converter)
    new.collected_tensors, new.layer_targets = defaultdict(list), defaultdict(set)
    return new


class LinearConverter(WeightConverter):
    """All tensors of a quantized linear in the files -> the parameters of its module, and back.

    linears  name in the files, after the model's renamings -> what the files hold
    nvfp4    names of the modules that are NVFP4Linear; the others become dense
    saving   convert the parameters of `nvfp4` to files
    stored   parameter -> reciprocal of its global scale as it was read, to be written again
    """

    def __init__(
        self,
        linears: dict[str, QuantizedLinear],
        nvfp4: set[str],
        dialect: Dialect,
        saving: bool = False,
        stored: dict[str, Tensor] | None = None,
    ):
        self.linears, self.nvfp4, self.dialect, self.saving = linears, nvfp4, dialect, saving
        self.stored = {} if stored is None else stored
        sources = PARAMETERS if saving else dict.fromkeys((*dialect.suffixes, PRE_QUANT_SCALE, *FP8_TENSORS))
        super().__init__(list(sources), ["weight"], [Nothing()])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        module, _, last = source_key.rpartition(".")
        known = self.nvfp4 if self.saving else self.linears
        if module not in known or last not in self.source_patterns:
            return source_key, None
        self._was_used = True
        return f"{module}.weight", last

    def __deepcopy__(self, memo: dict) -> WeightConverter:
        return copy_of(self)

    def reverse_transform(self) -> WeightConverter:
        return LinearConverter(self.linears, self.nvfp4, self.dialect, True, self.stored)

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Tensor]:
        module = layer_name.rpartition(".")[0]
        if self.saving:  # transformers 5.17 gives the name in the files, by which the model may have no module
            tensors = {last: found[0] for last, found in self.materialize_tensors().items()}
            return {f"{module}.{last}": tensor for last, tensor in self._stored(module, tensors).items()}
        weight = model.get_submodule(module).weight
        if isinstance(weight, DTensor):  # before the tensors are read: a scale cannot be split as the weight is
            raise NotImplementedError(NOT_SPLIT.format(module))
        tensors = {last: found[0] for last, found in self.materialize_tensors().items()}
        found = self._parameters(module, tensors)
        if module not in self.nvfp4:
            found = {"weight": cast_finite(_dense(found), weight.dtype, f"{module}.weight")}
        return {f"{module}.{name}": tensor for name, tensor in found.items()}

    def _parameters(self, module: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of `NVFP4Linear` by name; FP8 tensors are returned as they are."""
        d = self.dialect
        if d.global_scale not in tensors:
            return tensors
        found = {
            "weight": tensors[d.weight],
            "weight_sf": tensors[d.sf].view(torch.uint8),
            "weight_global_scale": d.decode_scale(tensors[d.global_scale]).reshape(1),
        }
        if not d.exact:
            for last, name in ((d.global_scale, "weight_global_scale"), (d.input_scale, "input_scale")):
                if last in tensors:
                    self.stored[f"{module}.{name}"] = tensors[last].cpu().reshape(1)
        check_block_scales(found["weight_sf"], f"{module}.{d.sf}")
        check_global_scale(found["weight_global_scale"], f"{module}.{d.global_scale}")
        if d.input_scale in tensors:
            found["input_scale"] = d.decode_scale(tensors[d.input_scale]).reshape(1)
            check_global_scale(found["input_scale"], f"{module}.input_scale")
        if PRE_QUANT_SCALE in tensors:
            found[PRE_QUANT_SCALE] = tensors[PRE_QUANT_SCALE]
        return found

    def _stored(self, module: str, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the files for the parameters of an `NVFP4Linear`."""
        d, p = self.dialect, parameters

        def scale(name: str) -> Tensor:
            return d.encode_scale(p[name], self.stored.get(f"{module}.{name}")).clone()

        stored = {
            d.weight: p["weight"],
            d.sf: p["weight_sf"].view(torch.float8_e4m3fn),
            d.global_scale: scale("weight_global_scale"),
        }
        if "input_scale" in p:
            stored[d.input_scale] = scale("input_scale")
        if PRE_QUANT_SCALE in p:
            stored[PRE_QUANT_SCALE] = p[PRE_QUANT_SCALE]
        return stored
