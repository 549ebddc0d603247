"""LoRA on 4-bit experts and linears with PEFT, used as ever:

    LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=["q_proj", "v_proj"])
    get_peft_model(model, config)            # Trainer, save_pretrained, PeftModel.from_pretrained: all PEFT's own

An adapter has the names and shapes that PEFT gives it on transformers' dense experts, so it loads onto dense and 4-bit
models. With `MergeableLoraConfig`, training computes with the 4-bit weights that merging gives, so that merging loses
nothing.

`register` replaces PEFT's `LoraModel` in the registry PEFT_TYPE_TO_TUNER_MAPPING by a subclass. It gives every
LoraConfig the layers of `lora_layers` for 4-bit layers, by `_register_custom_module`, PEFT's (experimental) interface
for custom layers. In PEFT_TYPE_TO_CONFIG_MAPPING, `NVFP4LoraConfig` takes the place of its base class, whose field it
would else lose when an adapter is loaded. Nothing else of PEFT changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING, LoraConfig, PeftType
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer, _maybe_include_all_linear_layers
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule

from moe_nvfp4.checks import check_flag
from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.lora_layers import LoraLinear, MergingLayer, ParamWrapper
from moe_nvfp4.integrations.peft_versions import check_order
from moe_nvfp4.linear import NVFP4Linear


@dataclass
class NVFP4LoraConfig(LoraConfig):
    """A LoraConfig of any adapter: what PEFT makes of the files of one.

    nvfp4_mergeable  whether it is trained to be merged, see `MergeableLoraConfig`
    nvfp4_layers     set by PEFT's models, for `save_pretrained`: the layers that were 4-bit, and so computed like that
    """

    nvfp4_mergeable: bool = False
    nvfp4_layers: list[str] | None = None

    def __post_init__(self) -> None:
        # PEFT saves adapters for inference; of one whose file has no version, it takes its own
        self.says_version = self.peft_version is not None or not self.inference_mode
        super().__post_init__()
        check_flag("nvfp4_mergeable", self.nvfp4_mergeable)

    def to_dict(self) -> dict[str, Any]:
        """As PEFT's; without our fields where they say nothing, as a PEFT without this library warns of them."""
        found: dict[str, Any] = super().to_dict()
        if not self.nvfp4_mergeable:
            found = {key: value for key, value in found.items() if not key.startswith("nvfp4_")}
        return found


@dataclass
class MergeableLoraConfig(NVFP4LoraConfig):
    """A LoraConfig of adapters that are trained to be merged into the 4-bit weights.

    The model computes with merged weights: `encode(value + B · A)` with the block scales and global scales that they
    have. The rounding passes gradients on unchanged (a straight-through estimator). So the model that was trained and
    the merged one are the same: `merge_and_unload()`, and `save_pretrained` of what it returns. Apart from the weights
    that it was trained on the adapter is worth nothing; here it cannot be used in another way.
    """

    nvfp4_mergeable: bool = True


class LoraModel(lora.LoraModel):
    """PEFT's `LoraModel`, which also knows 4-bit layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_post_hook(_refuse_left_out)

    def _create_and_replace(self, lora_config: LoraConfig, *args: Any, **kwargs: Any) -> None:
        lora_config._register_custom_module({NVFP4Experts: ParamWrapper, NVFP4Linear: LoraLinear})
        super()._create_and_replace(lora_config, *args, **kwargs)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        wanted = self.peft_config[adapter_name].target_modules
        self._all_linear = isinstance(wanted, str) and wanted.lower() == "all-linear"
        _refuse_to_copy(self.peft_config[adapter_name].modules_to_save or (), model)
        _refuse_biases(self.peft_config[adapter_name].bias, model)
        _refuse_other_order(adapter_name, self.peft_config[adapter_name], model)
        if not self.peft_config[adapter_name].inference_mode:
            _refuse_unsynchronised(model)
        found = super().inject_adapter(model, adapter_name, *args, **kwargs)
        self._let_merge(adapter_name, model)
        return found

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Any:
        mergeable = (layer.mergeable for layer in self.modules() if isinstance(layer, MergingLayer))
        if kwargs.get("adapter_names") is not None and any(mergeable):
            raise NotImplementedError(
                "adapter_names: adapters that are trained to be merged (nvfp4_mergeable) change the weights for a "
                "whole batch: set_adapter, and call once for each"
            )
        return super()._enable_peft_forward_hooks(*args, **kwargs)

    def add_weighted_adapter(self, adapters: list[str], *args: Any, **kwargs: Any) -> None:
        configs = [self.peft_config[name] for name in adapters if name in self.peft_config]
        if len({bool(getattr(config, "nvfp4_mergeable", False)) for config in configs}) > 1:
            raise NotImplementedError(
                f"adapters {', '.join(adapters)}: some are trained to be merged (nvfp4_mergeable), others are not, and "
                "their sum would be of one kind: combine adapters of one kind"
            )
        super().add_weighted_adapter(adapters, *args, **kwargs)

    def _let_merge(self, adapter: str, model: nn.Module) -> None:
        """Have the 4-bit layers compute with this adapter merged, if its config says so."""
        named = {n: m for n, m in model.named_modules() if isinstance(m, MergingLayer) and adapter in m.lora_A}
        layers = [*named.values()]
        for layer in layers:
            layer.mergeable = layer.mergeable - {adapter}  # of one of this name that was deleted
        config = self.peft_config[adapter]
        if not getattr(config, "nvfp4_mergeable", False):
            return
        if config.lora_dropout:
            raise NotImplementedError("nvfp4_mergeable: merged weights have no dropout: lora_dropout=0")
        if not layers:
            raise ValueError(
                f"adapter {adapter!r} is trained to be merged into 4-bit weights (nvfp4_mergeable), and changes none "
                "in this model: load the 4-bit model that it belongs to"
            )
        _refuse_replicas(named)
        # PEFT nests the wrappers of a module's parameters
        names = sorted({".".join(p for p in n.split(".") if p != "base_layer") for n in named})
        if (trained := config.nvfp4_layers) is None:
            self.peft_config[adapter] = config = copy(config)  # the caller's may serve for other models
            config.nvfp4_layers = names
        elif other := sorted({*trained} ^ {*names}):
            form = "4-bit" if other[0] in trained else "dense"
            many = f" ({len(other)} such layers)" if len(other) > 1 else ""
            raise ValueError(
                f"adapter {adapter!r} was trained to be merged (nvfp4_mergeable) with {other[0]} {form}, and here it "
                f"is the other way round{many}: that would be another model. Load the 4-bit model as it was in "
                "training (linears, exclude)"
            )
        for layer in layers:
            layer.mergeable = {*layer.mergeable, adapter}

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        if not merge:
            self._as_read()
        return super()._unload_and_optionally_merge(merge, *args, **kwargs)

    def unmerge_adapter(self) -> None:
        self._check_unmerging()
        super().unmerge_adapter()

    def disable_adapter_layers(self) -> None:
        self._check_unmerging()
        super().disable_adapter_layers()

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        self._check_unmerging()
        self._as_read()
        super().set_adapter(*args, **kwargs)

    def delete_adapter(self, *args: Any, **kwargs: Any) -> None:
        self._as_read()
        super().delete_adapter(*args, **kwargs)

    def _as_read(self) -> None:
        """Undo what calls have merged, which is for them only."""
        for layer in self._merging():
            layer.as_read()

    def _check_unmerging(self) -> None:
        """Raise what `unmerge` of any layer would, before the first of them does."""
        for layer in self._merging():
            layer.check_unmerging()

    def _merging(self) -> Iterator[MergingLayer]:
        return (module for module in self.model.modules() if isinstance(module, MergingLayer))

    def _prepare_model(self, peft_config: LoraConfig, model: nn.Module) -> None:
        """Make target_modules="all-linear" include packed linears, which PEFT does not recognise as linears."""
        super()._prepare_model(peft_config, model)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        packed = {n for n, m in model.named_modules() if isinstance(m, NVFP4Linear) and m is not head}
        if self._all_linear and packed:
            if not isinstance(peft_config.target_modules, str):
                packed = {n for n in packed if not _is_of_experts(n.rpartition(".")[2], peft_config, model)}
            others = _maybe_include_all_linear_layers(peft_config, model).target_modules
            peft_config.target_modules = others | {n for n in packed if not n.endswith(".base_layer")}


def _is_of_experts(name: str, peft_config: LoraConfig, model: nn.Module) -> bool:
    """Whether PEFT takes `name` in target_modules for the experts' projection of that name, in a model whose experts
    were linears once. In loading it would lose an adapter on another linear of that name, such as a shared expert's."""
    alone = copy(peft_config)
    alone.target_modules = {name}
    try:
        convert_peft_config_for_transformers(alone, model, None)
    except ValueError:  # gate_proj without up_proj
        return True
    return name not in (alone.target_modules or ())


def register() -> None:
    """Have PEFT make LoRA models with `LoraModel`, unless another package has replaced PEFT's class already."""
    if PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] is lora.LoraModel:
        PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = LoraModel
        if PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] is LoraConfig:
            PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] = NVFP4LoraConfig


def unregister() -> None:
    if PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] is LoraModel:
        PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = lora.LoraModel
        if PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] is NVFP4LoraConfig:
            PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] = LoraConfig


def _refuse_replicas(layers: Mapping[str, MergingLayer]) -> None:
    """NotImplementedError if two of these `layers` share their weights: one would merge on top of the other."""
    seen: dict[int, str] = {}
    for name, layer in layers.items():
        codes = getattr(layer.get_base_layer(), layer._matrices()[0])
        if (other := seen.setdefault(id(codes), name)) != name:
            raise NotImplementedError(
                f"{other} and {name} have the same weights (layer_replication), and adapters that are trained to be "
                "merged (nvfp4_mergeable) need weights of their own: copy.deepcopy the layers, or train a plain "
                "LoraConfig"
            )


def _refuse_unsynchronised(model: nn.Module) -> None:
    """NotImplementedError if FSDP2 has split a model with 4-bit layers: it would not know adapters that are added."""
    modules = [*model.modules()]
    four_bit = any(isinstance(m, NVFP4Experts | NVFP4Linear) for m in modules)
    if four_bit and any(isinstance(m, FSDPModule) for m in modules):
        raise NotImplementedError(
            "fully_shard (or DistributedConfig(fsdp_size=...)) has split this model over ranks already, so nothing "
            "would add up the gradients of new adapters, and each rank would train others: load without "
            "distributed_config, then get_peft_model, then fully_shard of what it returns"
        )


def _refuse_to_copy(names: Iterable[str], model: nn.Module) -> None:
    """NotImplementedError if `names`, the modules_to_save of which PEFT would train copies, include 4-bit modules."""
    for name, module in model.named_modules():
        named = any(f".{name}".endswith(f".{wanted}") for wanted in names)
        if named and any(isinstance(m, NVFP4Experts | NVFP4Linear) for m in module.modules()):
            raise NotImplementedError(
                f"modules_to_save: {name} has 4-bit weights, which are not trained: give it an adapter instead "
                "(experts by target_parameters, linears by target_modules), or load it dense"
            )


def _refuse_other_order(adapter: str, config: LoraConfig, model: nn.Module) -> None:
    """NotImplementedError for an adapter of experts' parameters by a PEFT that has the factors in another order, where
    sizes do not tell. (One of transformers 4, where each expert's linears are modules, names no parameters. PEFT keeps
    the version of an adapter that it loads, and saves it in its own order.)"""
    named = {name.rpartition(".")[2] for name in config.target_parameters or ()}
    for module in model.modules():
        if isinstance(module, NVFP4Experts):
            H, I = module.hidden_size, module.intermediate_size
            rows = {module.up_name: 2 * I if module.gate.gated else I, "down_proj": I}  # or columns
            if H in (rows[name] for name in named & rows.keys()):
                of_file = type(config) is NVFP4LoraConfig and not config.says_version
                name, version = f"adapter {adapter!r} of experts", None if of_file else config.peft_version
                if not check_order(name, version, getattr(module, "is_transposed", False)):
                    raise NotImplementedError(
                        f"{name} does not say what is in and what is out: neither by its sizes nor by the PEFT that "
                        "wrote it. Write peft_version into its adapter_config.json"
                    )


def _refuse_left_out(model: LoraModel, keys: Any) -> None:
    """ValueError if files of an adapter have tensors for 4-bit layers to which PEFT has given none by its config: it
    leaves these out. keys: what `load_state_dict` found, with `unexpected_keys`."""
    named: dict[str, Any] = dict(model.named_modules()) if keys.unexpected_keys else {}
    for key in keys.unexpected_keys:
        name, _, of_adapter = key.removeprefix("base_model.").partition(".lora_")
        module = named.get(name)
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module  # it has another adapter
        # PEFT's files name no adapter; a state dict does, and may have some that the model has not: A.second.weight
        mine = len(parts := of_adapter.split(".")) < 3 or parts[1] in model.peft_config
        if mine and isinstance(base, NVFP4Experts | NVFP4Linear):
            layer = name.removeprefix("model.").removesuffix(".base_layer")
            raise ValueError(
                f"the adapter's files have tensors for {layer}, which would be left out: by adapter_config.json PEFT "
                "gives this layer no adapter (it may take a name such as down_proj for the experts'). Name it there, "
                "or train the adapter again"
            )


def _refuse_biases(trained: str, model: nn.Module) -> None:
    """NotImplementedError if PEFT would train and save biases that dense experts have in another order (gpt-oss)."""
    layouts = [m.layout for m in model.modules() if isinstance(m, HFExperts)]
    if trained == "all" and any(layout.interleaved and layout.bias for layout in layouts):
        raise NotImplementedError(
            "bias='all' would save biases of experts whose rows are [gate; up], and alternate in the dense model: use "
            "bias='none' or 'lora_only'"
        )
