"""Hugging Face transformers: swap experts, quantize while loading, save and load again.

Importing this module registers the quantization methods `modelopt` and `moe_nvfp4` with transformers, and takes
the NVFP4 folders of `compressed-tensors` and of `fp8` (DeepSeek V4) from its own readers:

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=MoeNvfp4Config())
    model = swap_experts(model)                      # or: a model already in memory
    model.save_pretrained(folder)                    # 4-bit files
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, config=checkpoint_config(folder, linears="dense"))
    calibrate(model, batches)                        # static scales for activations="nvfp4"
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoConfig, PretrainedConfig
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils import cached_file, logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_nvfp4 import __version__
from moe_nvfp4.integrations.conversion import Conversions, ExpertsConverter
from moe_nvfp4.integrations.experts import HFExperts, Layout, dense_experts, describe
from moe_nvfp4.integrations.files import Survey, is_nvfp4, survey, verify_files
from moe_nvfp4.integrations.linears import FP8Experts, LinearConverter, pack_linears
from moe_nvfp4.layer import NVFP4Linear
from moe_nvfp4.quantize.calibrate import observe
from moe_nvfp4.quantize.checkpoint import read_headers
from moe_nvfp4.quantize.dialects import DIALECTS, matches, read_config, write_config
from moe_nvfp4.quantize.names import KV_SCALE, PRE_QUANT_SCALE, ignore_patterns
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, RECIPES
from moe_nvfp4.weights import ACTIVATIONS, check_block_scales, check_global_scale

logger = logging.get_logger(__name__)


LINEARS = ("packed", "dense")
# Read anew, or written anew, or about something that does not come along (KV cache scales)
REWRITTEN = {
    "quant_algo", "moe_quant_algo", "config_groups", "producer", "format", "quantization_status", "quantized_layers",
    "group_size", "exclude_modules", "global_compression_ratio", "kv_cache_scheme", "kv_cache_quant_algo",
}  # fmt: skip


@register_quantization_config("modelopt")
@register_quantization_config("moe_nvfp4")
class MoeNvfp4Config(QuantizationConfigMixin):
    """How to make a model's experts 4-bit, and what config.json says about it afterwards.

    activations  "bf16" (W4A16) or "nvfp4" (W4A4: rows quantized to NVFP4 before each GEMM, with the
                 file's `input_scale` where it has one, else one scale per token)
    recipe       how block scales are chosen when bf16 weights are quantized
                 (moe_nvfp4.quantize.recipes.RECIPES)
    exclude      experts modules to leave as they are: names or wildcards of the model's modules,
                 such as "model.layers.0.*"
    linears      what becomes of linears that 4-bit files hold quantized too (attention, shared experts, lm_head):
                 "packed", they stay NVFP4 (`NVFP4Linear`, the memory that the file promises), or "dense", they are
                 dequantized to the model's dtype as they are read (faster where no kernel is)
    dialect      whose names and config files have: "modelopt" or "compressed-tensors"

    In config.json this is the dialect's `quantization_config`, so that servers read the files too; our own fields
    travel in its key "moe_nvfp4". For files that are 4-bit already, transformers takes config.json's fields and
    not an argument's: `checkpoint_config` sets them.
    """

    def __init__(
        self,
        activations: str = "bf16",
        recipe: str = DEFAULT_RECIPE,
        exclude: list[str] | None = None,
        linears: str = "packed",
        dialect: str = "modelopt",
        **kwargs: Any,
    ):
        for value, known, what in ((activations, ACTIVATIONS, "activations"), (linears, LINEARS, "linears"),
                                   (dialect, tuple(DIALECTS), "dialect")):  # fmt: skip
            if value not in known:
                raise ValueError(f"{what} must be one of {known}, got {value!r}")
        if recipe not in RECIPES:
            raise ValueError(f"unknown recipe {recipe!r}: choose one of {', '.join(RECIPES)}")
        self.quant_method = "moe_nvfp4"  # who reads it; config.json has the dialect's
        self.activations, self.recipe, self.exclude = activations, recipe, list(exclude or [])
        self.linears, self.dialect = linears, dialect
        self.ignore: list[str] = list(kwargs.pop("ignore", None) or [])
        self.input_scale = bool(kwargs.pop("input_scale", False))  # the files hold input scales
        self.pre_quant_scale = bool(kwargs.pop("pre_quant_scale", False))  # and AWQ's
        self.unknown = kwargs  # carried through, whatever other tools wrote

    @classmethod
    def from_dict(cls, config_dict: dict, return_unused_kwargs: bool = False, **kwargs: Any):
        config = {key: value for key, value in config_dict.items() if key not in REWRITTEN}
        own = config.pop("moe_nvfp4", None) or {}
        if config.pop("quant_method", None) is not None:
            info = read_config(config_dict)
            own = {"activations": info.activations, "dialect": info.dialect.name, "ignore": list(info.ignore)} | own
        result = cls(**{**config, **own, **kwargs})
        return (result, {}) if return_unused_kwargs else result

    def to_dict(self) -> dict[str, Any]:
        own = {
            "activations": self.activations,
            "recipe": self.recipe,
            "exclude": self.exclude,
            "input_scale": self.input_scale,
        }
        if self.linears != "packed":
            own["linears"] = self.linears
        dialect = DIALECTS[self.dialect]
        written = write_config(dialect, self.ignore, self.input_scale, own, __version__, self.pre_quant_scale)
        return {**self.unknown, **written}

    def excludes(self, module_name: str) -> bool:
        """Whether the experts module `module_name` is to be left alone."""
        patterns = [*self.exclude, *(p for p in self.ignore if "expert" in p)]
        names = (module_name, f"{module_name}.0.down_proj", f"{module_name}.0.w2")
        return any(matches(p, name) for p in patterns for name in names)


def _dispatch(method: str) -> None:
    """Have NVFP4 configs of a `method` that transformers knows become ours; others stay transformers'.

    transformers asks its registry for the class that reads a quantization_config, and then the object that this
    class returns for its quantizer: so one entry of the registry decides, and no code of transformers is changed.
    """
    theirs = AUTO_QUANTIZATION_CONFIG_MAPPING[method]

    class Dispatcher(QuantizationConfigMixin):
        @classmethod
        def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
            reader = theirs if read_config(config_dict) is None else MoeNvfp4Config
            return reader.from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)

    AUTO_QUANTIZATION_CONFIG_MAPPING[method] = Dispatcher


for _method in ("compressed-tensors", "fp8"):
    _dispatch(_method)


def checkpoint_config(path: str | os.PathLike, **fields: Any) -> PretrainedConfig:
    """The config of a 4-bit checkpoint, for `from_pretrained(path, config=...)`, with fields of `MoeNvfp4Config`.

    Needed to choose `linears` or `activations`, and for folders whose config.json says nothing about quantization
    while hf_quant_config.json does. ValueError where neither says NVFP4.
    """
    config = AutoConfig.from_pretrained(path)
    file = cached_file(path, "hf_quant_config.json", _raise_exceptions_for_missing_entries=False)
    hf = None
    if file is not None:
        with open(file, encoding="utf-8") as f:
            hf = json.load(f)
    given = getattr(config, "quantization_config", None)
    info = read_config({"quantization_config": given}, hf)
    if info is None:
        raise ValueError(f"{path} is not an NVFP4 checkpoint: neither config.json nor hf_quant_config.json says so")
    said = {"activations": info.activations, "dialect": info.dialect.name, "ignore": list(info.ignore)}
    own = (given or {}).get("moe_nvfp4") or {}
    config.quantization_config = MoeNvfp4Config(**(said | own | fields)).to_dict()
    return config


@register_quantizer("modelopt")
@register_quantizer("moe_nvfp4")
class MoeNvfp4Quantizer(HfQuantizer):
    """The hooks that transformers calls while it builds, shards, loads and saves a model."""

    requires_calibration = False

    def __init__(self, quantization_config: MoeNvfp4Config, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.conversions: Conversions | None = None
        self.linears: LinearConverter | None = None
        self._found: Survey | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._model: nn.Module | None = None

    # ------------------------------------------------------------ before loading
    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        config = self.quantization_config
        headers = read_headers(checkpoint_files or [])
        self.pre_quantized = self.pre_quantized or is_nvfp4(headers)  # whatever config.json says
        modules = find_experts(model, config, required=not self.pre_quantized)
        found, smooth = Survey(headers), False
        if self.pre_quantized:
            found = survey(headers, model, _model_conversions(model, loading=True), [name for name, *_ in modules])
            modules = [(n, m, _layout(m, layout, found.experts.get(n))) for n, m, layout in modules]
            config.input_scale, config.dialect = found.expert_input_scales, found.dialect.name
            smooth = found.expert_pre_quant_scales
            config.pre_quant_scale = smooth or any(PRE_QUANT_SCALE in linear.also for linear in found.linears.values())
        packed = {n: self._empty_experts(model, n, m, layout, smooth) for n, m, layout in modules if layout is not None}
        if found.linears:
            wanted = found.linears if config.linears == "packed" else {}
            linears = pack_linears(model, wanted, found.dialect, config.activations)
            by_source = {linear.source: linear for linear in found.linears.values()}
            self.linears = LinearConverter(by_source, set(linears), found.dialect)
        elif not packed:
            raise ValueError(f"{type(model).__name__}: the files hold no NVFP4 weights that this model has")
        self._attach(model, packed, [n for n, _, layout in modules if layout is None], found)
        self._dtypes = {name: p.dtype for name, p in model.named_parameters()}
        _report(model, found)

    def _empty_experts(self, model, name, module, layout, smooth: bool) -> HFExperts:
        """What takes the place of the experts module `name`, on meta; smooth: with AWQ's scales."""
        experts = _replace(model, name, module, layout, self.quantization_config, "meta")
        dense = next(module.parameters()).dtype
        if smooth:
            experts.add_pre_quant_scales(dense)
        # A load that quantizes casts to the parameter's dtype first (transformers before 5.23):
        # until the codes come, the placeholder has the dtype of the dense weights.
        for key in (experts.up_name, "down_proj") if not self.pre_quantized else ():
            setattr(experts, key, nn.Parameter(getattr(experts, key).to(dense), requires_grad=False))
        return experts

    def _attach(self, model: nn.Module, packed: dict, excluded: list[str], found: Survey | None = None) -> None:
        config = self.quantization_config
        self._model, self._found = model, found
        styles = {found.experts.get(name, "each") for name in packed} if found else {"each"}
        if len(styles) > 1:
            raise ValueError(f"the files name experts in several ways ({', '.join(sorted(styles))}), one is expected")
        dialect = DIALECTS[config.dialect]
        style = min(styles, default="each")
        self.conversions = Conversions(packed, excluded, config.recipe, self.pre_quantized, dialect, style)
        linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        routers = {n for n, m in model.named_modules() if n.endswith((".gate", ".router"))}
        quantized = {f"{n}.0.down_proj" for n in packed} | (self.linears.packed if self.linears else set())
        theirs = ignore_patterns(linears | routers, quantized, set(excluded), dialect)
        config.ignore = sorted({*config.ignore, *theirs})

    def update_weight_conversions(self, weight_conversions, model=None):
        model = model if model is not None else self._model  # transformers 5.17 does not pass it
        conversions = self.conversions.build(weight_conversions)
        conversions = [self.linears, *conversions] if self.linears else conversions
        if self._found is not None and self._found.fp8:
            dense = next(m for n, m in model.named_modules() if self._found.experts.get(n) == "fp8")
            conversions = [FP8Experts(self._found.fp8, hasattr(dense, "gate_up_proj")), *conversions]
        if self._found is not None and self._found.headers:
            verify_files(self._found, model, conversions, self.conversions)
        return conversions

    def param_needs_quantization(self, model, param_name, **kwargs):
        module, _, name = param_name.rpartition(".")
        experts = self.conversions.packed.get(module)
        quantized = experts is not None and name in (experts.up_name, "down_proj")
        interleaved_bias = experts is not None and name.endswith("_bias") and experts.layout.interleaved
        return not self.pre_quantized and (quantized or interleaved_bias)

    def get_quantize_ops(self):
        return None  # ExpertsConverter quantizes, expert by expert

    def get_new_dtype(self, converter, param, dtype):
        if isinstance(converter, (LinearConverter, FP8Experts)) or (
            isinstance(converter, ExpertsConverter) and dtype == torch.uint8
        ):
            return None  # as it is stored; dense experts next to packed ones are cast
        return super().get_new_dtype(converter, param, dtype)

    def param_element_size(self, model, param_name, param):
        module, _, _ = param_name.rpartition(".")
        return 1 if param.dtype == torch.uint8 or module in self.conversions.packed else param.element_size()

    def update_parallel_plan(self, model, plan):
        """Scales follow their weights; global scales are per expert, so only experts split them."""
        names = {re.sub(r"\.\d+(?=\.)", ".*", n) for n, _ in model.named_parameters()}
        for key, style in list(plan.items()):
            stem, _, name = key.rpartition(".")
            if name not in ("gate_up_proj", "up_proj", "down_proj"):
                continue
            parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
            scales = [f"{p}_{kind}" for p in parts for kind in ("global_scale", "input_scale")]
            by_expert = style == "grouped_gemm"
            for extra, wanted in [(f"{name}_sf", style), *((s, style if by_expert else None) for s in scales)]:
                full = f"{stem}.{extra}"
                if wanted is not None and full not in plan and any(n.endswith(full) for n in names):
                    plan[full] = wanted

    # ------------------------------------------------------------ after loading
    def _process_model_after_weight_loading(self, model, **kwargs):
        for name, p in model.named_parameters():
            # transformers 5.17 leaves renamed tensors of quantized files in the dtype they are stored in
            if p.dtype in (torch.bfloat16, torch.float16) and p.device.type != "meta":
                p.data = p.data.to(self._dtypes.get(name, p.dtype))
        for name, experts in self.conversions.packed.items():
            if any(isinstance(p, DTensor) for p in experts.parameters()):
                experts.register_forward_pre_hook(_prepare_shards)
            for key, param in experts.named_parameters(recurse=False):
                param.requires_grad_(False)  # the loader makes every floating parameter trainable
                if param.device.type == "meta":  # offloaded to disk; comes back in the dtype it has here
                    if key in (experts.up_name, "down_proj"):
                        setattr(experts, key, nn.Parameter(param.to(torch.uint8), requires_grad=False))
                    continue
                local = param.to_local() if hasattr(param, "to_local") else param
                if key.endswith("_scale"):
                    check_global_scale(local, f"{name}.{key}")
                elif key.endswith("_sf"):
                    check_block_scales(local, f"{name}.{key}")
            experts.prepare(model.dtype)
        saving = [c for c in self.conversions.for_saving(model._weight_conversions) if c is not self.linears]
        if self.linears and self.linears.packed:
            for name in self.linears.packed:
                model.get_submodule(name).requires_grad_(False)
            saving.append(self.linears)
        model._weight_conversions = saving
        self._found = None
        return model

    def is_serializable(self, *args, **kwargs):
        return True

    @property
    def is_trainable(self):
        return False

    @property
    def is_compileable(self):
        return True

    def _dequantize(self, model, dtype=None):
        raise NotImplementedError(
            "4-bit experts are not turned back into dense ones: load the original checkpoint instead"
        )


def _prepare_shards(experts: HFExperts, inputs: tuple[Tensor, ...]) -> None:
    """For the call itself transformers puts plain tensors in the DTensors' place, where nothing would last."""
    experts.prepare(inputs[0].dtype)


# ---------------------------------------------------------------- models in memory
def swap_experts(
    model: nn.Module,
    activations: str = "bf16",
    recipe: str = DEFAULT_RECIPE,
    exclude: list[str] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Make the experts of a transformers `model` 4-bit, in place; returns the model.

    Walks the whole model, composite ones too. Layer by layer: the peak above the result is one
    layer's dense experts. The model then saves and loads like one quantized while loading.

    Raises NotImplementedError for experts in an unknown form (naming their class and the way out)
    and ValueError if the model has no experts, or weights that are NaN or Inf.
    """
    config = MoeNvfp4Config(activations=activations, recipe=recipe, exclude=exclude)
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            f"{type(model).__name__} is quantized already "
            f"({model.hf_quantizer.quantization_config.quant_method}): load the original checkpoint"
        )
    if (base := getattr(model, "_weight_conversions", None)) is None and hasattr(model, "config"):
        base = _model_conversions(model)
    quantizer = MoeNvfp4Quantizer(config, pre_quantized=False)
    found = find_experts(model, config)
    packed = {}
    swaps = [(name, module, layout) for name, module, layout in found if layout is not None]
    for name, module, layout in tqdm(swaps, desc="NVFP4 experts", unit="layer", disable=not progress):
        dense = next(module.parameters())
        experts = _replace(model, name, module, layout, config, dense.device)
        for e, (w13, w2) in enumerate(dense_experts(module, layout)):
            try:
                experts.load_expert(e, w13, w2, recipe)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        for key in (experts.up_name, "down_proj") if layout.bias is not None else ():
            bias = getattr(module, f"{key}_bias").detach()
            bias = torch.stack([layout.canonical(f"{key}_bias", b) for b in bias])
            getattr(experts, f"{key}_bias").data.copy_(bias)
        experts.prepare(dense.dtype)
        packed[name] = experts
    quantizer._attach(model, packed, [name for name, _, layout in found if layout is None])
    quantizer.conversions.build(list(base or []))
    model._weight_conversions = quantizer.conversions.for_saving(list(base or []))
    model.hf_quantizer, model.is_quantized = quantizer, True
    model.quantization_method = config.quant_method
    if hasattr(model, "config"):
        model.config.quantization_config = config
    return model


def set_activations(model: nn.Module, activations: str) -> nn.Module:
    """Switch the 4-bit experts and linears of `model` between "bf16" (W4A16) and "nvfp4" (W4A4), in place."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {ACTIVATIONS}, got {activations!r}")
    layers = [m for m in model.modules() if isinstance(m, (HFExperts, NVFP4Linear))]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no 4-bit experts: call swap_experts first")
    for module in layers:
        module.activations = activations
    model.hf_quantizer.quantization_config.activations = activations
    return model


def calibrate(model: nn.Module, batches: Iterable[Tensor | Mapping[str, Tensor]], progress: bool = True) -> nn.Module:
    """Give the 4-bit experts of `model` static activation scales (`input_scale`), in place; returns the model.

    batches: what the model is called with, token ids [B, T] or dictionaries of inputs; a few hundred tokens like
    those that the model is for. Every expert gets its layer's scale. The scales count for activations="nvfp4", and
    travel with `save_pretrained`. ValueError where a layer was not reached, or makes NaN or Inf.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, HFExperts)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no 4-bit experts: call swap_experts first")
    if any(isinstance(p, DTensor) for layer in layers.values() for p in layer.parameters()):
        raise NotImplementedError("a model that is split over ranks is not calibrated: do it in one process, and save")

    def run() -> None:
        for batch in tqdm(batches, desc="calibrate", unit="batch", disable=not progress):
            inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
            with torch.no_grad():
                model(**{key: value.to(model.device) for key, value in inputs.items()})

    for name, scales in observe(layers, run).items():
        layers[name].set_input_scales(*scales)
    model.hf_quantizer.quantization_config.input_scale = True
    model._weight_conversions = model.hf_quantizer.conversions.renew(model._weight_conversions)
    return model


def find_experts(model: nn.Module, config: MoeNvfp4Config, required: bool = True) -> list[tuple[str, nn.Module, Any]]:
    """(name, module, layout) of every experts module; layout None: excluded by `config`.

    Raises ValueError where there is none to quantize, if it is `required`.
    """
    found, inside = [], ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue  # parts of an experts module are not experts modules
        excluded = config.excludes(name)
        try:
            layout = describe(module)
        except NotImplementedError:
            if not excluded:
                raise
            layout = None
            found.append((name, module, None))
            continue
        if layout is not None:
            found.append((name, module, None if excluded else layout))
            inside = (f"{name}.",)
    if required and not any(layout is not None for _, _, layout in found):
        raise ValueError(
            f"{type(model).__name__} has no experts to quantize"
            + (f": {len(found)} experts modules are all excluded" if found else
               "; dense models are not what this library is for")
        )  # fmt: skip
    return found


def _layout(module: nn.Module, layout: Layout | None, style: str | None) -> Layout | None:
    """The layout of an experts module in 4-bit files: what they hold counts, and not what their config excludes."""
    if style in ("dense", "fp8"):
        return None
    return layout or (None if style is None else describe(module))


def _replace(model, name, module, layout, config, device) -> HFExperts:
    experts = HFExperts(module, layout, config.activations, config.input_scale, device)
    if experts.gate.kind == "raw":
        logger.warning_once(f"{type(module).__name__} has a gate of its own: it runs unfused, between the two GEMMs")
    experts.train(module.training)
    model.set_submodule(name, experts)
    return experts


def _report(model: nn.Module, found: Survey) -> None:
    """Say what the files hold that this model does not use."""
    if found.kv_scales:
        keys = found.kv_scales
        logger.warning(
            f"{len(keys)} scales of a quantized KV cache are left out ({keys[0]}, ...): transformers keeps its cache "
            "in the model's dtype, which needs none"
        )
        ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        model._keys_to_ignore_on_load_unexpected = ignored | {KV_SCALE.pattern}
    fp8 = [linear.module for linear in found.linears.values() if linear.kind == "fp8"]
    if fp8:
        logger.warning(f"{len(fp8)} FP8 linears are made dense ({fp8[0]}, ...); their inputs are not rounded to FP8")
    if found.fp8:
        logger.warning(f"the FP8 experts of {len(found.fp8)} layers are made dense ({next(iter(found.fp8))}, ...)")


def _model_conversions(model: nn.Module, loading: bool = False) -> list:
    """transformers' renamings and converters: to load with, or to save a model that was not loaded from files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    conversions = get_model_conversion_mapping(model, add_legacy=loading)
    return [c for c in conversions if loading or not isinstance(c, PrefixChange)]
