"""LoRA on 4-bit experts and linears with PEFT, used as ever:

    LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=["q_proj", "v_proj"])
    get_peft_model(model, config)            # Trainer, save_pretrained, PeftModel.from_pretrained: all PEFT's own

An adapter has the names and shapes that PEFT gives it on transformers' dense experts, so it loads onto dense and 4-bit
models. Its two small products run between the stages of the 4-bit layer (`moe_nvfp4.training`); the weights are never
made dense.

`register` replaces PEFT's `LoraModel` in the registry PEFT_TYPE_TO_TUNER_MAPPING by a subclass. It gives every
LoraConfig the layers below for 4-bit layers, by `_register_custom_module`, PEFT's (experimental) interface for custom
layers. Nothing else of PEFT changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING, LoraConfig, PeftType
from peft.tuners import lora
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_adapters_to_merge
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.format import dequantize
from moe_nvfp4.integrations.huggingface.experts import HFExperts, refuse_elsewhere
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.ops import Adapter, Adapters
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, quantize_expert, quantize_matrix, recipe_named

logger = logging.get_logger(__name__)


class LoraModel(lora.LoraModel):
    """PEFT's `LoraModel`, which also knows 4-bit layers."""

    def _create_and_replace(self, lora_config: LoraConfig, *args: Any, **kwargs: Any) -> None:
        lora_config._register_custom_module({NVFP4Experts: ParamWrapper, NVFP4Linear: LoraLinear})
        super()._create_and_replace(lora_config, *args, **kwargs)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        wanted = self.peft_config[adapter_name].target_modules
        self._all_linear = isinstance(wanted, str) and wanted.lower() == "all-linear"
        _refuse_to_copy(self.peft_config[adapter_name].modules_to_save or (), model)
        return super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _prepare_model(self, peft_config: LoraConfig, model: nn.Module) -> None:
        """Make target_modules="all-linear" include packed linears, which PEFT does not recognise as linears."""
        super()._prepare_model(peft_config, model)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        packed = {n for n, m in model.named_modules() if isinstance(m, NVFP4Linear) and m is not head}
        if self._all_linear and packed:
            others = _maybe_include_all_linear_layers(peft_config, model).target_modules
            peft_config.target_modules = others | {n for n in packed if not n.endswith(".base_layer")}


def register() -> None:
    """Have PEFT make LoRA models with `LoraModel`, unless another package has replaced PEFT's class already."""
    if PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] is lora.LoraModel:
        PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = LoraModel


def unregister() -> None:
    if PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] is LoraModel:
        PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = lora.LoraModel


class _Merging:
    """Merges into 4-bit weights, which are quantized again; unmerging restores the bytes from before."""

    merged_adapters: list[str]
    lora_A: nn.ModuleDict
    get_base_layer: Any

    def _merged(self, adapters: list[str]) -> dict[str, Tensor]:
        """The base layer's parameters, by name, with `adapters` added to their values."""
        raise NotImplementedError

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Dequantize, add, and quantize again by the layer's recipe, or by mse where that needs data. ValueError for
        NaN and Inf; nothing changes then.

        The sum is rounded to the same 4-bit grid as the weights. So an adapter that changes them by 3 % of their norm
        is lost, and of one that changes them by 10 %, three quarters are left (docs/training.md). Better keep the
        adapter apart, or merge it into the dense model.
        """
        adapters = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not adapters:
            return
        if self.merged_adapters:
            raise ValueError(
                f"{', '.join(self.merged_adapters)} is merged already, and merging on top would round twice: "
                "unmerge_adapter() first, then merge all at once (adapter_names=[...])"
            )
        base = self.get_base_layer()
        for p in base.parameters():
            refuse_elsewhere(p, "merged with adapters")
        logger.warning_once(
            "adapters are merged into 4-bit weights: changes of less than about 3 % of the weights' norm are rounded "
            "away. Keep the adapter apart, or merge it into the dense model"
        )
        base.unpack()
        merged = self._merged(adapters)
        self._before = {name: getattr(base, name).data.clone() for name in merged}
        for name, tensor in merged.items():
            getattr(base, name).data.copy_(tensor)
        self.merged_adapters.extend(adapters)

    def unmerge(self) -> None:
        """Restore the bytes from before `merge`."""
        base = self.get_base_layer()
        if self.merged_adapters:
            base.unpack()
        while self.merged_adapters:
            self.merged_adapters.pop()
        for name, tensor in self.__dict__.pop("_before", {}).items():
            getattr(base, name).data.copy_(tensor)


class LoraLinear(_Merging, lora.Linear):
    """LoRA on an `NVFP4Linear`."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any):
        _check(config, lora_bias=False, fan_in_fan_out=False)
        super().__init__(base_layer, adapter_name, config=config, **kwargs)

    @property
    def lora_variants(self) -> dict:
        return {(): None}  # no variants (DoRA, ...): they work on dense weights, which are not here

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        base = self.get_base_layer()
        return base.in_features, base.out_features

    def _merged(self, adapters: list[str]) -> dict[str, Tensor]:
        base = self.get_base_layer()
        dense = dequantize(base.weight, base.weight_sf, base.weight_global_scale.reshape(()))
        for name in adapters:
            delta = self.lora_B[name].weight.float() @ self.lora_A[name].weight.float()
            if base.pre_quant_scale is not None:  # the base layer multiplies x by it, the adapter does not
                delta = delta / base.pre_quant_scale.float()
            dense += self.scaling[name] * delta
        codes, sf, scale = quantize_matrix(dense)
        return {"weight": codes, "weight_sf": sf.view(torch.uint8), "weight_global_scale": scale.reshape(1)}


class ParamWrapper(_Merging, lora.ParamWrapper):
    """LoRA on one projection of 4-bit experts. PEFT nests two of these for two projections, and finds the inner one by
    the class name ParamWrapper."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, parameter_name: str | None, **kwargs: Any):
        inner = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
        names = (inner.up_name, "down_proj")
        if parameter_name not in names:
            wanted = ", ".join(repr(f"experts.{name}") for name in names)
            raise ValueError(
                f"4-bit experts have no LoRA for {parameter_name or 'the module as a whole'}: name their projections, "
                f"LoraConfig(target_parameters=[{wanted}])"
            )
        if any(isinstance(p, DTensor) for p in inner.parameters()) or getattr(inner, "_is_expert_parallel", False):
            raise NotImplementedError(
                "LoRA on experts that are split over ranks: give the whole model its adapters first, and then wrap it "
                "in DDP or fully_shard; or leave the experts out of target_parameters"
            )
        if getattr(getattr(inner, "layout", None), "call", "") == "identity":
            raise NotImplementedError(
                f"{inner.source_class.__name__} keeps rows for identity experts in its dense weights, and an adapter "
                "would need them too: leave its experts out of target_parameters"
            )
        _check(kwargs["config"])
        super().__init__(base_layer, adapter_name, parameter_name, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        """The features that PEFT expects of a dense parameter [E, in, out]; it swaps them if that is [E, out, in]."""
        base = self.get_base_layer()
        rows, columns = base.intermediate_size * (2 if base.gate.gated else 1), base.hidden_size
        if self.parameter_name == "down_proj":
            rows, columns = base.hidden_size, base.intermediate_size
        self.num_experts, self._param_ndim = base.num_experts, 3
        return (columns, rows) if self._transposed else (rows, columns)

    @property
    def _transposed(self) -> bool:
        """Whether the dense parameter is [E, in, out]."""
        return isinstance(base := self.get_base_layer(), HFExperts) and base.layout.transposed

    def adapter(self, name: str) -> Adapter:
        """The adapter `name` in the form of the 4-bit layer: rows [gate; up], with its scale in `a`."""
        A, B = self.lora_A[name].weight, self.lora_B[name].weight
        a = A.reshape(self.num_experts, -1, A.shape[1])  # [E, r, in_features]
        b = B.reshape(B.shape[0], -1, self.num_experts).permute(2, 0, 1)  # [E, out_features, r]
        # PEFT takes the order of in and out from the parameter, which may be stored the other way round (Llama 4)
        if self._transposed and self._did_swap_in_out_features:
            a, b = b.mT, a.mT
        base = self.get_base_layer()
        if isinstance(base, HFExperts) and base.layout.interleaved and self.parameter_name == base.up_name:
            b = torch.cat([b[:, 0::2], b[:, 1::2]], dim=1)
        return Adapter(a * self.scaling[name], b)

    def forward(self, x: Tensor, *args: Any, adapters: Adapters = ((), ()), **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        if not (self.disable_adapters or self.merged):
            mine = tuple(self.adapter(name) for name in self.active_adapters if name in self.lora_A)
            up, down = adapters
            adapters = (up, (*down, *mine)) if self.parameter_name == "down_proj" else ((*up, *mine), down)
        return self.base_layer(x, *args, adapters=adapters, **kwargs)

    def _merged(self, adapters: list[str]) -> dict[str, Tensor]:
        base, name = self.get_base_layer(), self.parameter_name
        w = base.weights.w2 if name == "down_proj" else base.weights.w13
        factor = base.pre_quant_scales[1 if name == "down_proj" else 0]
        added = [self.adapter(adapter) for adapter in adapters]
        recipe = DEFAULT_RECIPE if recipe_named(base.recipe).model else base.recipe
        experts = []
        for e in range(self.num_experts):
            halves = [s[e] for s in (w.gate_scale, w.global_scale) if s is not None]
            dense = dequantize(w.codes[e], w.sf[e], torch.cat([s.expand(w.N // len(halves)) for s in halves]))
            for a, b in added:
                delta = b[e].float() @ a[e].float()
                if factor is not None:  # the base layer multiplies x by it, the adapter does not
                    delta = delta / factor[e].float()
                dense[:, : w.K] += delta
            experts.append(quantize_expert(dense[:, : w.K], name, recipe))
        return {key: torch.stack([expert[key] for expert in experts]) for key in experts[0]}


def _refuse_to_copy(names: Iterable[str], model: nn.Module) -> None:
    """NotImplementedError if `names`, the modules_to_save of which PEFT would train copies, include 4-bit modules."""
    for name, module in model.named_modules():
        named = any(f".{name}".endswith(f".{wanted}") for wanted in names)
        if named and any(isinstance(m, NVFP4Experts | NVFP4Linear) for m in module.modules()):
            raise NotImplementedError(
                f"modules_to_save: {name} has 4-bit weights, which are not trained: give it an adapter instead "
                "(experts by target_parameters, linears by target_modules), or load it dense"
            )


def _check(config: LoraConfig, **fields: Any) -> None:
    """NotImplementedError for options that need the dense weights, and for `fields` with other values than these."""
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian":
        raise NotImplementedError(
            f"init_lora_weights={config.init_lora_weights!r} starts from dense weights, which 4-bit layers do not "
            "have: use True or 'gaussian'"
        )
    for field, only in fields.items():
        if getattr(config, field) != only:
            raise NotImplementedError(f"LoRA on 4-bit linears takes {field}={only!r} only")
