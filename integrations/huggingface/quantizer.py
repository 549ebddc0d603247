"""`MoeNvfp4Quantizer`: the hooks that transformers calls when it loads and saves a model."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from moe_nvfp4.integrations.huggingface.calibration import importance_for_load
from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config, check_for_dense, loading_fields, resolve
from moe_nvfp4.integrations.huggingface.consistent import leave_bad_scales, name_dense, say_scales, unname_dense
from moe_nvfp4.integrations.huggingface.converters import (
    Conversions,
    choose_linears,
    names_for_saving,
    published_names,
)
from moe_nvfp4.integrations.huggingface.dense import make_dense
from moe_nvfp4.integrations.huggingface.experts import (
    PACKED,
    HFExperts,
    experts_for,
    experts_modules,
    find_experts,
    refuse_assigned,
    refuse_tied,
    set_implementation,
    take_over,
    untie,
)
from moe_nvfp4.integrations.huggingface.files import (
    CheckpointLayout,
    MtpTensors,
    check_dense,
    check_reached,
    is_nvfp4,
    mtp_tensors,
    open_files,
    read_layout,
    report_unused,
)
from moe_nvfp4.integrations.huggingface.linears import (
    NOT_SPLIT,
    Known,
    LinearConverter,
    quantize_linears,
    replace_linears,
    to_linear,
)
from moe_nvfp4.integrations.huggingface.mapped import InFiles, check_mappable
from moe_nvfp4.integrations.huggingface.offload import describe_placement, keep_experts_on_cpu, layers_on_cpu
from moe_nvfp4.integrations.huggingface.packed import PackedConverter, ranks_of_a_row
from moe_nvfp4.integrations.huggingface.ready import prepare_model
from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout, describe
from moe_nvfp4.integrations.huggingface.savable import (
    activations_of,
    check_format,
    check_savable,
    pipeline_stages,
    refuse_part,
)
from moe_nvfp4.integrations.huggingface.unwritten import (
    UnwrittenConverter,
    ignore_list,
    open_unwritten,
    report_cast,
    where_to_quantize,
)
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize.dialects import DIALECTS
from moe_nvfp4.quantize.files import Checkpoint
from moe_nvfp4.quantize.importance import Importance
from moe_nvfp4.quantize.layouts import ExpertLayout
from moe_nvfp4.quantize.linears import Chosen
from moe_nvfp4.quantize.model import kept_in_fp32
from moe_nvfp4.quantize.names import PRE_QUANT_SCALE, projections
from moe_nvfp4.quantize.recipes import recipe_named
from moe_nvfp4.quantize.unwritten import Unwritten
from moe_nvfp4.weights import check_block_scales, check_global_scale

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class LoadPlan:
    """What is known of a load before any weights are read.

    source  the files
    model   on meta, with empty 4-bit modules in place
    found   what the files hold
    dtypes  of the model's parameters and buffers, by name
    coming  `source`, if it is one that is not written
    """

    source: Checkpoint
    model: nn.Module
    found: CheckpointLayout
    dtypes: dict[str, torch.dtype]
    coming: Unwritten | None = None


class MoeNvfp4Quantizer(HfQuantizer):
    """The hooks that transformers calls while it builds, shards, loads and saves a model."""

    requires_calibration = False
    quantization_config: MoeNvfp4Config

    def __init__(self, quantization_config: MoeNvfp4Config, **kwargs: Any):
        new = isinstance(quantization_config, MoeNvfp4Config) and not quantization_config.settled
        self._for_dense = quantization_config.chosen if new else {}  # what a user gave where no config.json says NVFP4
        quantization_config, converts = resolve(quantization_config)
        super().__init__(quantization_config, **kwargs)
        # Whether the files are of another format, and become 4-bit while they load. Then transformers, which takes
        # `pre_quantized` for a reason to read ahead, reads nothing before it is asked for
        self.converts = converts
        self.pre_quantized = self.pre_quantized and not converts
        self.four_bit = self.pre_quantized  # whether the files are NVFP4, or are read as such
        self.linears: LinearConverter | None = None  # converts quantized linears in files, for loading and saving
        self.chosen = Chosen()  # the linears of a dense model that become 4-bit, after it is loaded
        self.importance: Importance | None = None  # for a recipe that uses data, while it quantizes
        # The converters of experts, which `attach` replaces by the right ones
        self.conversions = Conversions({}, quantization_config.recipe, self.four_bit)
        self.mtp = MtpTensors()
        self._given: Mapping[str, Tensor] | None = None  # the argument state_dict, while a model is saved
        self._own_save: Any = None  # a user's function in place of the model's save_pretrained, assigned before
        self._model: weakref.ref | None = None
        self._plan: LoadPlan | None = None  # while a model loads
        self._of_source: UnwrittenConverter | None = None  # while a model loads from files that are not NVFP4
        self._gpu: torch.device | None = None  # where all goes after loading, but for experts that stay on the CPU
        self._in_files: InFiles | None = None  # while a model loads whose experts stay in their files

    # ------------------------------------------------------------ before loading
    def update_device_map(self, device_map: Any) -> Any:
        """Load a model with experts that stay on the CPU there first; afterwards all else goes to its one GPU."""
        config = self.quantization_config
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
        if (
            (config.cpu_experts is None and not config.map_files)
            or len(places) != 1
            or places & {"cpu", "meta", "disk"}
        ):
            return device_map
        (place,) = places
        self._gpu = torch.device(f"cuda:{place}" if place.isdecimal() else place)
        return {"": "cpu"}

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, device_map: Any = None, **kwargs: Any
    ) -> None:
        config = self.quantization_config
        places = device_map.values() if isinstance(device_map, dict) else {device_map} - {None}
        stays = "map_files" if config.map_files else "cpu_experts" if config.cpu_experts is not None else None
        # An attribute, since the weights are split only after this: there are no DTensors yet
        if stays is not None and getattr(model.config, "distributed_config", None) is not None:
            raise NotImplementedError(
                f"{stays} keeps whole experts beside one GPU, and this model is split over ranks (tp_plan, "
                f"distributed_config), of which each has a part: leave out one of the two"
            )
        if stays is not None and {str(place) for place in places} - {"cpu"}:
            raise ValueError(
                f"{stays} with device_map={device_map!r}: name the GPU that everything else goes to, "
                'device_map="cuda:0", or leave device_map out'
            )
        if model.dtype == torch.float64 and not config.dequantize:
            raise ValueError(
                "dtype=torch.float64: 4-bit experts take bfloat16, float16 and float32, and their sums are fp32 in any "
                "case: load in one of these; dequantize(torch.float64) of that model is dense and exact, and runs "
                "after set_experts_implementation('eager')"
            )
        model.config.quantization_config = config  # which names the source's format, where that is another
        source = open_files(checkpoint_files or [], model)
        tensors = in_files = source.tensors
        if not tensors:
            raise ValueError(
                "4-bit experts are read, and made while a model loads, from safetensors files, whose headers say if "
                "all is there; here are none (.bin, .gguf, state_dict=): load the dense model, then swap_experts(model)"
            )
        coming = None
        if self.converts:
            coming = open_unwritten(model, checkpoint_files or [], config, where_to_quantize(device_map, self._gpu))
            source, tensors = coming.checkpoint, coming.checkpoint.tensors
            config.ignore = ignore_list(source)
        else:
            packed = is_nvfp4(tensors)  # whatever config.json says
            if packed:
                loading_fields(self._for_dense)
            self.pre_quantized = self.pre_quantized or packed
        if not self.pre_quantized:
            check_for_dense(config)
        self.four_bit = self.pre_quantized or self.converts
        self.mtp = mtp_tensors(model, tensors, checkpoint_files or [], self.converts)
        modules = find_experts(model, config, required=not self.four_bit)
        found = CheckpointLayout()
        if self.four_bit:
            found = read_layout(source, model, [name for name, *_ in modules], config.activations, quantizing=True)
            modules = [(n, m, _layout_here(m, layout, found.experts.get(n))) for n, m, layout in modules]
            config.input_scale, config.dialect = found.input_scale, found.dialect.name
            in_linears = any(PRE_QUANT_SCALE in linear.also for linear in found.linears.values())
            config.pre_quant_scale = found.pre_quant_scale or in_linears
        else:
            check_dense(source, model, quantizing=True)
            self.chosen = choose_linears(model, config)
        if self.chosen.fused and getattr(model.config, "distributed_config", None) is not None:
            raise NotImplementedError(
                "quantized linears are not split over ranks yet, and this model is (tp_plan, distributed_config): "
                "leave out linears, or load in one process"
            )
        refuse_tied(model, (name for name, _, layout in modules if layout is not None and name not in found.experts))
        if recipe_named(config.recipe).model and not self.four_bit:
            self.importance = importance_for_load(
                source, model, config, [fused[0].model for fused in self.chosen.fused]
            )
            self.importance.check_model([name for name, *_ in modules], tensors, type(model).__name__)
            self.importance.check_config(model.config, type(model).__name__)
        made: dict[int, HFExperts] = {}  # by the module they replace, which layers may share
        experts = {}
        for name, module, layout in modules:
            if layout is not None:
                if id(module) not in made:
                    refuse_assigned(module, name)
                    made[id(module)] = self._empty_experts(module, layout, found.pre_quant_scale)
                experts[name] = made[id(module)]
                model.set_submodule(name, experts[name])
        if found.linears:
            if pipeline_stages(model) > 1:  # with tensor parallelism the converter says so
                raise NotImplementedError(NOT_SPLIT.format(next(iter(found.linears))))
            wanted = {} if config.linears == "dense" else found.linears
            linears = replace_linears(model, wanted, found.dialect, config.activations)
            by_source = {linear.source: linear for linear in found.linears.values()}
            self.linears = LinearConverter(by_source, set(linears), found.dialect)
        elif not experts:
            raise ValueError(f"{type(model).__name__}: the files hold no NVFP4 weights that this model has, although "
                             "their config says so: if they are dense (a model that from_config made of a 4-bit "
                             "folder's config was saved), remove its quantization_config, and hf_quant_config.json "
                             "(give a MoeNvfp4Config to from_pretrained, and not to a config); else download them "
                             "again")  # fmt: skip
        layouts = {found.experts.get(name, ExpertLayout.ONE_BY_ONE) for name in experts}
        if len(layouts) > 1:
            ways = ", ".join(sorted(layout.value for layout in layouts))
            raise ValueError(f"the files name experts in several ways ({ways}), one is expected")
        excluded = [n for n, _, layout in modules if layout is None]
        alone = (ExpertLayout.FP8, ExpertLayout.SINGLE)
        singles = {name: how for name, m, _ in modules if found.experts.get(name) in alone and (how := describe(m))}
        self.attach(model, experts, excluded, next(iter(layouts), ExpertLayout.ONE_BY_ONE), singles)
        set_implementation(model, loading=True)
        self._plan = LoadPlan(source, model, found, _dtypes(model), coming)
        if not hasattr(super(), "update_parallel_plan"):  # transformers before 5.21, which does not call it
            for plan in (model._tp_plan, model._ep_plan):
                self.update_parallel_plan(model, plan or {})
        report_unused(model, found, self.mtp, in_files)

    def _empty_experts(self, module: nn.Module, layout: ModuleLayout, pre_quant_scale: bool) -> HFExperts:
        """Empty 4-bit experts on meta that replace `module`. pre_quant_scale: with AWQ's scales."""
        experts = experts_for(module, layout, self.quantization_config, "meta")
        dense = next(module.parameters()).dtype
        if pre_quant_scale:
            experts.add_pre_quant_scales(dense)
        # transformers before 5.23 casts to the parameter's dtype before the converter quantizes. So the placeholder has
        # the dtype of the dense weights until the codes come.
        for key in (experts.up_name, "down_proj") if not self.four_bit else ():
            setattr(experts, key, nn.Parameter(getattr(experts, key).to(dense), requires_grad=False))
        take_over(experts, module)
        return experts

    def attach(
        self,
        model: nn.Module,
        experts: dict[str, HFExperts],
        excluded: list[str],
        layout: ExpertLayout = ExpertLayout.ONE_BY_ONE,
        singles: Mapping[str, ModuleLayout] | None = None,
    ) -> None:
        """Make the converters for the 4-bit `experts` of `model`, and put what stays dense on the config's ignore list.

        excluded  names of experts modules that stay dense
        layout    how the files keep 4-bit experts
        singles   excluded modules whose experts the files have one by one, by name, if transformers reads only stacks
        """
        config, dialect = self.quantization_config, DIALECTS[self.quantization_config.dialect]
        prefix = getattr(model, "base_model_prefix", "")
        untie(model, experts)
        self._model = weakref.ref(model)
        self.conversions = Conversions(
            experts, config.recipe, self.four_bit, dialect, self.importance, layout, prefix, singles
        )
        name_dense(model, config, experts, excluded, self.chosen, self.mtp)
        if isinstance(model, PreTrainedModel):
            model._get_resized_lm_head = self.resized_head
            own = vars(model).get("save_pretrained")
            if not isinstance(getattr(own, "__self__", None), MoeNvfp4Quantizer):
                self._own_save = own
            model.save_pretrained = self.save_pretrained
            for part in _models_inside(model):
                if any(isinstance(m, PACKED) for m in part.modules()):
                    part.save_pretrained = partial(refuse_part, type(part).__name__)

    def update_weight_conversions(self, weight_conversions: list, model: Any = None) -> list:
        assert self._plan is not None, "a model is being loaded"
        source, model = self._plan.source, self._plan.model  # transformers 5.17 does not pass the model
        conversions = self.conversions.build(weight_conversions)
        conversions = [self.linears, *conversions] if self.linears else conversions
        if self._plan.coming is not None:
            self._of_source = UnwrittenConverter(self._plan.coming, model, conversions, self._plan.dtypes)
        made, converted = set[str](), set[str]()
        for name, experts in self.conversions.experts.items() if not self.four_bit else ():
            made |= {f"{name}.{key}" for key in experts._parameters if key.endswith(("_sf", "_scale"))}
            bias = [f"{experts.up_name}_bias"] if experts.layout.interleaved else []
            converted |= {f"{name}.{key}" for key in (experts.up_name, "down_proj", *bias)}
        for name in self.linears.nvfp4 if self.linears else ():
            made |= {f"{name}.{key}" for key in model.get_submodule(name)._parameters if key not in ("weight", "bias")}
            converted.add(f"{name}.weight")
        check_reached(source, model, conversions, made, converted)
        if self.quantization_config.map_files:
            self._leave_in_files(conversions)
        return conversions if self._of_source is None else [self._of_source, *conversions]

    def _leave_in_files(self, conversions: list) -> None:
        """Have experts stay in their files, those of as many layers as stay on the CPU."""
        assert self._plan is not None, "a model is being loaded"
        config = self.quantization_config
        model: Any = self._plan.model
        check_mappable(self._plan.found.experts.values() if self.four_bit else None)
        config.cpu_experts = self._stay(model, "all" if config.cpu_experts is None else config.cpu_experts)
        stay = list(dict.fromkeys(m for m in model.modules() if isinstance(m, HFExperts)))[: config.cpu_experts]
        names = {name: experts for name, experts in self.conversions.experts.items() if experts in stay}
        self._in_files = InFiles(model, self._plan.source, conversions, names)

    def _stay(self, model: Any, layers: int | str) -> int:
        """The number of layers whose experts stay on the CPU."""
        memory = torch.cuda.mem_get_info(self._gpu)[0] if self._gpu is not None and layers == "auto" else None
        return layers_on_cpu(model, layers, memory=memory)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        module, _, name = param_name.rpartition(".")
        experts = self.conversions.experts.get(module)
        quantized = experts is not None and name in (experts.up_name, "down_proj")
        interleaved_bias = experts is not None and name.endswith("_bias") and experts.layout.interleaved
        return not self.four_bit and (quantized or interleaved_bias)

    def get_quantize_ops(self) -> None:
        return None  # QuantizingConverter quantizes, expert by expert

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype) -> torch.dtype | None:
        if isinstance(converter, (LinearConverter, PackedConverter)):
            return None  # keeps the stored dtype; dense experts next to 4-bit ones are cast
        return super().get_new_dtype(converter, param, dtype)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        module, _, _ = param_name.rpartition(".")
        return 1 if param.dtype == torch.uint8 or module in self.conversions.experts else param.element_size()

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Split scales like their weights. Global scales are one per expert, so only expert parallelism splits them."""
        names = {re.sub(r"\.\d+(?=\.)", ".*", n) for n, _ in model.named_parameters()}
        for key, style in list(plan.items()):
            stem, _, name = key.rpartition(".")
            if name not in ("gate_up_proj", "up_proj", "down_proj"):
                continue
            scales = [f"{p}_{kind}" for p in projections(name) for kind in ("global_scale", "input_scale")]
            by_expert = style == "grouped_gemm"
            for extra, wanted in [(f"{name}_sf", style), *((s, style if by_expert else None) for s in scales)]:
                full = f"{stem}.{extra}"
                if wanted is not None and full not in plan and any(n.endswith(full) for n in names):
                    plan[full] = wanted

    # ------------------------------------------------------------ after loading
    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self._plan is not None, "a model is being loaded"
        if self._in_files is not None:
            self._in_files.map()
        for name, t in _tensors(model):
            # transformers 5.17 leaves renamed tensors of quantized files in their stored dtype
            if t.is_floating_point() and t.device.type != "meta":
                t.data = t.data.to(self._plan.dtypes.get(name, t.dtype))
        if self.quantization_config.activations == "bf16":
            leave_bad_scales(self.quantization_config, self.conversions.experts)
        for name, experts in self.conversions.experts.items():
            if any(isinstance(p, DTensor) for p in experts.parameters()):
                experts.register_forward_pre_hook(_prepare_shards)
                if (group := ranks_of_a_row(experts.down_proj)) is not None:
                    experts.share_rows(group)
            for key, param in experts.named_parameters(recurse=False):
                param.requires_grad_(False)  # the loader makes every floating parameter trainable
                if param.device.type != "meta":
                    _check_scales(f"{name}.{key}", param.to_local() if isinstance(param, DTensor) else param)
                elif key in (experts.up_name, "down_proj"):  # on disk: it is read back in this dtype
                    setattr(experts, key, nn.Parameter(param.to(torch.uint8), requires_grad=False))
            experts.prepare(model.dtype)
        known = {}
        if self.importance is not None:
            firsts = (fused[0] for fused in self.chosen.fused)
            known = {linear.model: self.importance.of_linear(linear.model, linear.columns) for linear in firsts}
        self.quantize_linears(model, known)
        for name in self.linears.nvfp4 if self.linears else ():
            model.get_submodule(name).requires_grad_(False)
        used = [c for c in model._weight_conversions if c is not self._of_source]
        model._weight_conversions = self.for_saving(used)
        if self._plan.coming is not None:
            report_cast(self._plan.coming.cast)
        self._plan = self._of_source = self._in_files = None
        if self.quantization_config.cpu_experts is not None:
            keep_experts_on_cpu(model, self._stay(model, self.quantization_config.cpu_experts))
            logger.info(describe_placement(model))
            if self._gpu is not None:
                model.to(self._gpu)
        return self._dequantize(model) if self.quantization_config.dequantize else prepare_model(model)

    def quantize_linears(self, model: nn.Module, known: Known, progress: bool = False) -> None:
        """Replace the linears that were chosen by 4-bit ones. known: what the recipe needs to know of them."""
        if self.chosen.fused:
            config = self.quantization_config
            names = quantize_linears(model, self.chosen, config.recipe, config.activations, known, progress)
            self.linears, self.chosen = LinearConverter({}, set(names), DIALECTS[config.dialect]), Chosen()

    def for_saving(self, used: list) -> list:
        """The conversions for saving. used: those that were used for loading."""
        saving = [c for c in self.conversions.for_saving(used) if c is not self.linears]
        model = None if self._model is None else self._model()
        if saving and isinstance(model, PreTrainedModel):
            saving = [*published_names(model), *saving]
        return [*saving, self.linears] if self.linears and self.linears.nvfp4 else saving

    def resized_head(self, head: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's `_get_resized_lm_head`, which takes dense heads only: a 4-bit one becomes dense."""
        assert self._model is not None, "the model calls it"
        model: Any = self._model()
        if isinstance(head, NVFP4Linear) and new_num_tokens not in (None, head.out_features):
            logger.warning("the output head becomes dense, because new rows are added to it or taken away")
            head = to_linear(head, model.dtype)
        return type(model)._get_resized_lm_head(model, head, new_num_tokens, *args, **kwargs)

    # ------------------------------------------------------------ saving
    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """In place of the model's `save_pretrained`, which leaves its state_dict out if a model is quantized. Raises
        what `check_format` does."""
        assert self._model is not None, "the model calls it"
        model: Any = self._model()
        given = dict(zip(("is_main_process", "state_dict"), args, strict=False)) | kwargs
        check_format(model, given)
        self._given, here = given.get("state_dict"), self.mtp.lost(model) is None
        try:
            save = self._own_save or partial(type(model).save_pretrained, model)
            save(save_directory, *args, **kwargs)
        finally:
            self._given = None
        if here and given.get("is_main_process", True):
            self.mtp = self.mtp.written(save_directory)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict]:
        """What is saved: the state dict that was given, or the model's (None: it alone), with multi-token prediction
        layers of its files, which the model does not load. transformers has asked `is_serializable` before."""
        why = self.mtp.lost(model)
        self._look_again(model, MtpTensors() if why else self.mtp)
        alone = None if self._given is None else dict(self._given)
        state = model.state_dict() if alone is None else alone  # may raise, before transformers writes config.json
        if not self.mtp.names:
            return alone, {}
        keys = names_for_saving(model, self.mtp.names)
        if lost := [name for name, key in keys.items() if key is None]:
            logger.warning(
                f"{len(lost)} tensors of multi-token prediction layers are not saved ({lost[0]}, ...), because "
                "transformers would rename them: generate(use_mtp=True) needs the original"
            )
        if why:
            logger.warning(
                f"{len(self.mtp.names)} tensors of multi-token prediction layers are not saved ({self.mtp.names[0]}, "
                f"...), because {why}: generate(use_mtp=True) needs the original"
            )
            return alone, {}
        read = self.mtp.read()
        return state | {key: read[name] for name, key in keys.items() if key is not None}, {}

    def _look_again(self, model: Any, mtp: MtpTensors) -> None:
        """Find out what is 4-bit now, and how it is computed: a user may have replaced 4-bit modules by dense ones,
        added or removed layers, set the activations of all layers, or replaced the model's config.

        mtp  the layers for multi-token prediction that are saved, too
        """
        config = model.config.quantization_config = self.quantization_config
        for activations in activations_of(model):
            config.activations = activations
        modules = dict(model.named_modules(remove_duplicate=False))
        experts = {name: m for name, m in modules.items() if isinstance(m, HFExperts)}
        linears = {name: m for name, m in modules.items() if isinstance(m, NVFP4Linear)}
        before = self._convert(model, experts, set(linears))
        if new := {*experts, *linears} - before:  # where dense ones were, if layers changed places
            unname_dense(model, config, new)
        say_scales(config, experts, linears)
        name_dense(model, config, experts, [name for name, *_ in experts_modules(model)], self.chosen, mtp)

    def _convert(self, model: Any, experts: dict[str, HFExperts], linears: set[str]) -> set[str]:
        """Have the model's conversions save these experts and linears. Returns the names of those before."""
        before: set[str] = set()
        conversions = [*getattr(model, "_weight_conversions", ())]
        if linears and not any(isinstance(c, LinearConverter) for c in conversions):  # they are another model's
            self.linears = LinearConverter({}, set(), DIALECTS[self.quantization_config.dialect])
            conversions = model._weight_conversions = [*conversions, self.linears]
        for converter in conversions:
            if isinstance(converter, PackedConverter):
                before |= converter.experts.keys()
                converter.experts = experts
            elif isinstance(converter, LinearConverter):
                before |= converter.nvfp4
                converter.nvfp4 = linears
        return before

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """True. transformers asks before it makes the folder, so this raises what `check_savable` does."""
        model = self._model and self._model()
        if model is not None:
            check_savable(model, self._given)
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": self._model and self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy belongs to the copied model, of which it is a part."""
        model = state["_model"]
        vars(self).update(state, _model=None if model is None else weakref.ref(model))

    @property
    def is_trainable(self) -> bool:
        return True  # gradients pass through; adapters, routers and norms are trained

    @property
    def is_compileable(self) -> bool:
        return True

    def dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Replace 4-bit experts and linears by dense ones, in the model's dtype; with `dtype`, all parameters and saved
        buffers get that in place of the model's. What transformers keeps in fp32 stays so. What quantization lost stays
        lost. ValueError for a `dtype` that weights cannot have.
        """
        wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or model.dtype
        if wanted not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise ValueError(f"dequantize(dtype={dtype!r}): bfloat16, float16, float32 or float64 is expected")
        before = model.dtype
        # transformers would take the config's dtype, which saving turns into a string
        model = super().dequantize(model, wanted)
        kept = kept_in_fp32(model, wanted) if wanted in (torch.bfloat16, torch.float16) else None
        for name, t in model.state_dict(keep_vars=True).items() if wanted != before else ():
            if t.dtype == before:
                t.data = t.data.to(torch.float32 if kept is not None and kept.search(name) else wanted)
        return model

    def remove_quantization_config(self, model: Any) -> None:
        """Also for transformers 5.24, which takes the conversions away: `_dequantize` has put in those of a dense
        model, and loading needs them until then."""
        kept = getattr(model, "_weight_conversions", None)
        for module in (model, *_models_inside(model)):
            for name in ("_get_resized_lm_head", "save_pretrained"):
                function = vars(module).get(name)  # ours, or a user's that was assigned later
                if getattr(function, "__self__", None) is self or getattr(function, "func", None) is refuse_part:
                    del vars(module)[name]
        if self._own_save is not None and "save_pretrained" not in vars(model):
            model.save_pretrained = self._own_save
        super().remove_quantization_config(model)
        if kept is not None:
            model._weight_conversions = kept

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        make_dense(model, dtype or model.dtype)
        model._weight_conversions = self.conversions.for_dense()
        return model


def _models_inside(model: nn.Module) -> list[Any]:
    """The models of transformers inside `model`: its body, a language model, ..."""
    return [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model]


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return (*model.named_parameters(), *model.named_buffers())


def _dtypes(model: Any) -> dict[str, torch.dtype]:
    """The dtypes of the parameters and buffers of `model` after loading dense files: some families keep a few fp32."""
    kept = kept_in_fp32(model, model.dtype)
    found = {name: t.dtype for name, t in _tensors(model)}
    return {n: torch.float32 if kept and d.is_floating_point and kept.search(n) else d for n, d in found.items()}


def _check_scales(name: str, param: Tensor) -> None:
    """ValueError if the parameter `name` of experts has scales that are not valid."""
    if name.endswith(("global_scale", "input_scale")):
        check_global_scale(param, name)
    elif name.endswith(PRE_QUANT_SCALE) and not param.isfinite().all():
        raise ValueError(f"{name} has NaN or Inf: the file is damaged, download it again")
    elif name.endswith("_sf"):
        check_block_scales(param, name)


def _prepare_shards(experts: HFExperts, inputs: tuple[Tensor, ...]) -> None:
    """Prepare sharded experts before a call: during it transformers has plain tensors in place of the DTensors, and
    what is changed then does not last."""
    experts.prepare(inputs[0].dtype)


def _layout_here(module: nn.Module, layout: ModuleLayout | None, stored: ExpertLayout | None) -> ModuleLayout | None:
    """The layout of an experts module of 4-bit files; None if it is dense. What the files hold (`stored`) counts, not
    what their config excludes."""
    if stored in (ExpertLayout.DENSE, ExpertLayout.FP8, ExpertLayout.SINGLE):
        return None
    return layout or (None if stored is None else describe(module))
