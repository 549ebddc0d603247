"""The layers that PEFT's LoRA makes of 4-bit experts and linears.

The two small products of an adapter run between the stages of the 4-bit layer (`moe_nvfp4.stages`); the weights are
never made dense. A mergeable adapter is instead kept merged: a call merges it again if it has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from moe_nvfp4.backends import merge_packed, merged_codes
from moe_nvfp4.devices import capturing
from moe_nvfp4.format import dequantize
from moe_nvfp4.integrations.huggingface.experts import HFExperts, refuse_elsewhere
from moe_nvfp4.integrations.peft_versions import OTHER_ORDER
from moe_nvfp4.ops import Adapter, Adapters
from moe_nvfp4.prepared import before_weights, changing, in_fsdp
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, quantize_expert, quantize_matrix, recipe_named
from moe_nvfp4.stages import joined
from moe_nvfp4.weights import Matrices

logger = logging.get_logger(__name__)

WITHOUT_EXPERTS = ("leave the experts out of target_parameters, and name linears in target_modules in place of "
                   '"all-linear", which PEFT takes for experts, too')  # fmt: skip


# Ways to start that leave the model's weights as they are: an adapter that comes from a file does not start so
UNLIKE_FILES = ("eva", "orthogonal", "lora_ga")


class MergingLayer:
    """Merges into 4-bit weights, which are quantized again; unmerging restores the bytes from before."""

    merged_adapters: list[str]
    active_adapters: list[str]
    disable_adapters: bool
    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    scaling: dict[str, float]
    get_base_layer: Any
    mergeable: set[str] = set()  # adapters of a `MergeableLoraConfig`
    _merged_from: tuple[list[float], list[Tensor]] = ([], [])  # what was merged while it is trained
    _by_call = False  # whether a call merged them, and not the user
    _written: list[int] = []  # digests of what the user's merge wrote

    def update_layer(self, adapter_name: str, *args: Any, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter: the first one, which the layer is made with, and each later one."""
        if config.inference_mode and config.init_lora_weights in UNLIKE_FILES:
            config = copy(config)
            config.init_lora_weights = True
        _check(config, self)
        super().update_layer(adapter_name, *args, config=config, **kwargs)  # type: ignore[misc]

    def _merged(self, adapters: list[str]) -> dict[str, Tensor]:
        """The base layer's parameters, by name, with `adapters` added to their values."""
        raise NotImplementedError

    def _change(self, adapters: list[str]) -> tuple[Tensor, Tensor]:
        """What `adapters` add to the base layer's values: (a fp32 [E, r, K], b fp32 [E, N, r]) of b · a."""
        raise NotImplementedError

    def _matrices(self) -> tuple[str, Matrices]:
        """The base layer's codes, by their name, which mergeable adapters change, with the scales that they keep."""
        raise NotImplementedError

    def _forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with before_weights(self.get_base_layer(), self._merge_again) if self.mergeable else nullcontext():
            return self._forward(*args, **kwargs)

    def _merge_again(self) -> None:
        """Merge what a call has merged, if another thread that reads the weights has undone it since."""
        active = self._active()
        if self.mergeable.intersection(active) and not self.merged_adapters:
            self.merge(adapter_names=active, by_call=True)

    def _active(self) -> list[str]:
        return [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]

    def _learned(self, adapters: list[str]) -> tuple[list[float], list[Tensor]]:
        """What adds `adapters`: their scales and tensors."""
        sides = (self.lora_A, self.lora_B)
        tensors = [side[name].weight.detach() for name in adapters for side in sides]
        return [self.scaling[name] for name in adapters], tensors

    def _trained_merged(self) -> list[str]:
        """The active adapters if they are mergeable, else none; in place of these, as in PEFT's own layers, those that
        the user has merged. Brings the base layer's weights up to date with them.

        NotImplementedError if only some are and under FSDP2, RuntimeError while a CUDA graph is captured.
        """
        active = self._active()
        if not self.mergeable.intersection(active):
            return []
        self._check_alike(active)
        by_user = [] if self._by_call else [name for name in self.merged_adapters if name in self.lora_A]
        self._bring_up_to_date(by_user or active)
        return by_user or active

    @torch.compiler.disable  # it puts other memory into parameters, which compiled code cannot
    def _bring_up_to_date(self, active: list[str]) -> None:
        if capturing(self.lora_A[active[0]].weight.device):
            raise RuntimeError(
                "a CUDA graph would not see that an adapter that is trained to be merged (nvfp4_mergeable) changes: "
                "merge_and_unload() before, or run without graphs (another cache than the static one)"
            )
        with changing:  # another thread would merge on top
            (scales, now), (old_scales, before) = self._learned(active), self._merged_from
            same = self.merged_adapters == active and scales == old_scales
            if not (same and all(a.device == b.device and torch.equal(a, b) for a, b in zip(now, before, strict=True))):
                _refuse_gathered(self.get_base_layer())
                _refuse_between_processes(self.get_base_layer())
                if not self._merged_again(active):
                    self.merge(adapter_names=active, by_call=self._by_call or not self.merged_adapters)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.as_read()
        super()._save_to_state_dict(*args)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any) -> None:
        self.as_read()
        super()._load_from_state_dict(*args)  # type: ignore[misc]

    def as_read(self) -> None:
        """Undo what a call has merged, for all that reads the weights: after a state dict that has them merged, say, a
        call would merge again on top. The next call merges by itself."""
        with changing:
            if self._by_call:
                self.unmerge()

    @torch.no_grad()
    def _merged_again(self, adapters: list[str]) -> bool:
        """Bring packed weights, with which `adapters` were merged, up to date in place; False where that cannot be."""
        base = self.get_base_layer()
        if not (base.packed and self._by_call and self.merged_adapters == adapters):
            return False
        for p in base.parameters():
            refuse_elsewhere(p, "merged with adapters")
        (name, w), (a, b) = self._matrices(), self._finite_change(adapters)
        if self._before[name].device != getattr(base, name).device:  # the model has moved
            return False
        if not merge_packed(w, self._before[name].view(-1, w.N, self._before[name].shape[-1]), a, b):
            return False
        torch.autograd.graph.increment_version(getattr(base, name))  # as `copy_` does
        base._changed()
        self._remember(adapters)
        return True

    def _finite_change(self, adapters: list[str]) -> tuple[Tensor, Tensor]:
        """As `_change`. ValueError for NaN and Inf."""
        a, b = self._change(adapters)
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ValueError(
                f"{', '.join(adapters)}: the adapter has NaN or Inf, which 4-bit weights cannot hold: training went "
                "wrong, or the file is damaged. Nothing was merged here"
            )
        return a, b

    def _remember(self, adapters: list[str]) -> None:
        scales, tensors = self._learned(adapters)
        self._merged_from = scales, [t.clone() for t in tensors]

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """What PEFT's convert_to_lora asks, which makes plain adapters of others."""
        if adapter_name in self.mergeable:
            raise NotImplementedError(
                f"adapter {adapter_name!r} is trained to be merged (nvfp4_mergeable), and a plain one computes "
                "something else: merge_and_unload() keeps what was trained"
            )
        return super().supports_lora_conversion(adapter_name)  # type: ignore[misc]

    def _check_alike(self, adapters: list[str]) -> None:
        if 0 < len(self.mergeable.intersection(adapters)) < len(adapters):
            raise NotImplementedError(
                f"adapters {', '.join(adapters)}: some are trained to be merged (nvfp4_mergeable), others are not: use "
                "one kind at a time (set_adapter, adapter_names=[...])"
            )

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None, by_call: bool = False) -> None:
        """Dequantize, add, and quantize again by the layer's recipe, or by mse where that needs data. ValueError for
        NaN and Inf; nothing changes then.

        The sum is rounded to the same 4-bit grid as the weights. So an adapter that changes them by 3 % of their norm
        is lost, and of one that changes them by 10 %, three quarters are left (docs/training.md). Better keep the
        adapter apart, train it to be merged (`MergeableLoraConfig`), or merge it into the dense model.
        """
        if self.mergeable.intersection(self.merged_adapters):  # while they are trained
            self.unmerge()
        adapters = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not adapters:
            return
        self._check_alike(adapters)
        if self.merged_adapters:
            raise ValueError(
                f"{', '.join(self.merged_adapters)} is merged already, and merging on top would round twice: "
                "unmerge_adapter() first, then merge all at once (adapter_names=[...])"
            )
        base = self.get_base_layer()
        for p in base.parameters():
            refuse_elsewhere(p, "merged with adapters")
        base.unpack()
        exact = torch.autocast(next(base.parameters()).device.type, enabled=False)  # for a call that merges, too
        if self.mergeable.intersection(adapters):
            (name, w), (a, b) = self._matrices(), self._finite_change(adapters)
            with exact:
                codes = merged_codes(w.codes, w.block_scales(), w.row_scales(), a, b)
            merged = {name: codes.view_as(getattr(base, name))}
            self._remember(adapters)
        else:
            logger.warning_once(
                "adapters are merged into 4-bit weights: changes of less than about 3 % of the weights' norm are "
                "rounded away. Keep the adapter apart, train it to be merged (MergeableLoraConfig), or merge it into "
                "the dense model"
            )
            with exact:
                merged = self._merged(adapters)
        if by_call:  # in other memory: a state dict that was taken, or a thread that computes, keeps what it has
            self._before = {name: getattr(base, name).data for name in merged}
            with torch.inference_mode(False):  # whose tensors no later call could train with
                for name, tensor in merged.items():
                    getattr(base, name).data = torch.empty_like(self._before[name]).copy_(tensor)
        else:
            self._before = {name: getattr(base, name).data.clone() for name in merged}
            for name, tensor in merged.items():
                getattr(base, name).copy_(tensor)  # a backward pass that needs the bytes before will say so
        self.merged_adapters.extend(adapters)
        self._by_call, self._written = by_call, [] if by_call else self._digests(merged)
        if by_call:
            base._merged_by = (*base._merged_by, self)

    def _digests(self, names: Iterable[str]) -> list[int]:
        return [digest(getattr(self.get_base_layer(), name)) for name in names]

    def check_unmerging(self) -> None:
        """ValueError if the weights are not those that the user's merge wrote: unmerging would lose them."""
        if not self._written:
            return
        self.get_base_layer().unpack()
        if self._written != self._digests(self._before):
            raise ValueError(
                f"{', '.join(self.merged_adapters)}: the weights are not those that merging wrote, so others were "
                "loaded since, which unmerging would overwrite with those from before: unmerge_adapter(), load, "
                "merge_adapter() is the order. As it is, unload() returns the base model with the weights that were "
                "loaded"
            )

    @torch.compiler.disable
    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the bytes from before `merge`. ValueError as of `check_unmerging`."""
        self.check_unmerging()
        base = self.get_base_layer()
        if self.merged_adapters:
            base.unpack()
        by_call, self._by_call, self._written = self._by_call, False, []
        base._merged_by = tuple(layer for layer in base._merged_by if layer is not self)
        while self.merged_adapters:
            self.merged_adapters.pop()
        for name, tensor in self.__dict__.pop("_before", {}).items():
            p = getattr(base, name)
            moved = p.device != tensor.device or p.device.type == "cpu" and p.is_shared()  # since the call
            if by_call and not moved:
                p.data = tensor
            else:
                p.copy_(tensor)


class LoraLinear(MergingLayer, lora.Linear):
    """LoRA on an `NVFP4Linear`."""

    @property
    def lora_variants(self) -> dict:
        return {(): None}  # no variants (DoRA, ...): they work on dense weights, which are not here

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        base = self.get_base_layer()
        return base.in_features, base.out_features

    def _forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (adapters := self._trained_merged()):
            return lora.Linear.forward(self, x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        y = self.base_layer(x, *args, **kwargs)
        for name in adapters if torch.is_grad_enabled() else ():  # a zero that has the adapter's gradients
            A, B = self.lora_A[name], self.lora_B[name]
            added = B(A(x.detach().to(A.weight.dtype))) * self.scaling[name]
            y = y + (added - added.detach()).to(y.dtype)
        return y

    def _merged(self, adapters: list[str]) -> dict[str, Tensor]:
        codes, sf, scale = quantize_matrix(self._dense(adapters))
        return {"weight": codes, "weight_sf": sf.view(torch.uint8), "weight_global_scale": scale.reshape(1)}

    def _change(self, adapters: list[str]) -> tuple[Tensor, Tensor]:
        factor = self.get_base_layer().pre_quant_scale
        a = torch.cat([self.lora_A[name].weight.float() * self.scaling[name] for name in adapters])
        b = torch.cat([self.lora_B[name].weight.float() for name in adapters], dim=1)
        return (a if factor is None else a / factor.float())[None], b[None]

    def _matrices(self) -> tuple[str, Matrices]:
        return "weight", self.get_base_layer().weights.matrix.stacked()

    def _dense(self, adapters: list[str]) -> Tensor:
        """The values fp32 [N, K] with `adapters` added."""
        base = self.get_base_layer()
        dense = dequantize(base.weight, base.weight_sf, base.weight_global_scale.reshape(()))
        for name in adapters:
            delta = self.lora_B[name].weight.float() @ self.lora_A[name].weight.float()
            if base.pre_quant_scale is not None:  # the base layer multiplies x by it, the adapter does not
                delta = delta / base.pre_quant_scale.float()
            dense += self.scaling[name] * delta
        return dense


class ParamWrapper(MergingLayer, lora.ParamWrapper):
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
                f"in DDP or fully_shard; or {WITHOUT_EXPERTS}"
            )
        if getattr(getattr(inner, "layout", None), "call", "") == "identity":
            raise NotImplementedError(
                f"{inner.source_class.__name__} keeps rows for identity experts in its dense weights, and an adapter "
                f"would need them too: {WITHOUT_EXPERTS}"
            )
        super().__init__(base_layer, adapter_name, parameter_name, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """NotImplementedError for factors of which each has the other one's side."""
        for name, a in self.lora_A.items():
            found, (rank, side) = state_dict.get(f"{prefix}lora_A.{name}.weight"), a.weight.shape
            if found is not None and tuple(found.shape) == (rank, len(self.lora_B[name].weight)) != (rank, side):
                raise NotImplementedError(OTHER_ORDER.format(f"adapter {name!r} of experts", "before 0.19.1"))
        super()._load_from_state_dict(state_dict, prefix, *args)

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

    def _forward(self, x: Tensor, *args: Any, adapters: Adapters = ((), ()), **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        trained = self._trained_merged()
        if trained and torch.is_grad_enabled():  # two that are zero together, of which one has gradients
            added = [self.adapter(name) for name in trained]
            mine = (*added, *(Adapter(a.detach(), -b.detach()) for a, b in added))
        elif not (trained or self.disable_adapters or self.merged):
            mine = tuple(self.adapter(name) for name in self.active_adapters if name in self.lora_A)
        else:
            mine = ()
        if mine:
            up, down = adapters
            adapters = (up, (*down, *mine)) if self.parameter_name == "down_proj" else ((*up, *mine), down)
        return self.base_layer(x, *args, adapters=adapters, **kwargs)

    def _merged(self, adapters: list[str]) -> dict[str, Tensor]:
        base, name = self.get_base_layer(), self.parameter_name
        recipe = DEFAULT_RECIPE if recipe_named(base.recipe).model else base.recipe
        added = self._beside_the_experts(adapters)
        experts = [quantize_expert(self._dense(added, e), name, recipe) for e in range(self.num_experts)]
        return {key: torch.stack([expert[key] for expert in experts]) for key in experts[0]}

    def _change(self, adapters: list[str]) -> tuple[Tensor, Tensor]:
        a, b = joined(self._beside_the_experts(adapters), torch.float32)
        factor = self._factor()
        return (a if factor is None else a / factor.float().unsqueeze(1)), b

    def _beside_the_experts(self, adapters: list[str]) -> tuple[Adapter, ...]:
        """These adapters on the device of the experts, which may stay on the CPU beside a GPU."""
        device = self._matrices()[1].codes.device
        return tuple(Adapter(a.to(device), b.to(device)) for a, b in map(self.adapter, adapters))

    def _matrices(self) -> tuple[str, Matrices]:
        w = self.get_base_layer().weights
        return self.parameter_name, w.w2 if self.parameter_name == "down_proj" else w.w13

    def _factor(self) -> Tensor | None:
        """AWQ's scales [E, K]: the base layer multiplies x by them, the adapter does not."""
        return self.get_base_layer().pre_quant_scales[self.parameter_name == "down_proj"]

    def _dense(self, adapters: tuple[Adapter, ...], e: int) -> Tensor:
        """The values fp32 [N, K] of an expert with `adapters` added."""
        w, factor = self._matrices()[1].of(slice(e, e + 1)), self._factor()
        dense = dequantize(w.codes, w.sf, w.row_scales())[0, :, : w.K]
        for a, b in adapters:
            delta = b[e].float() @ a[e].float()
            dense += delta if factor is None else delta / factor[e].float()
        return dense


def digest(t: Tensor) -> int:
    """A number that other bytes would change, computed where they are: to bring them to the host would take longer than
    to merge."""
    data = t.detach().reshape(-1).view(torch.uint8)
    words = nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)
    at_once = 1 << (24 if t.is_cuda else 17)  # a CPU's caches hold this
    factors = torch.arange(1, 2 * at_once, 2, device=t.device)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for part in words.split(at_once):
        total = 3 * total + ((part ^ part >> 29) * factors[: len(part)]).sum()
    return int(total)


def _refuse_gathered(layer: nn.Module) -> None:
    """NotImplementedError if FSDP2 brings the weights of `layer` for each call: what is merged into them is gone with
    them, and a backward pass gets them as they were."""
    if in_fsdp(layer):
        raise NotImplementedError(
            "adapters that are trained to be merged (nvfp4_mergeable) are merged into the weights, and fully_shard "
            "takes these away after each call: use DDP, or train a plain LoraConfig"
        )


def _refuse_between_processes(layer: nn.Module) -> None:
    """NotImplementedError if other processes have the weights of `layer`, too: they would not know what is merged."""
    if any(p.device.type == "cpu" and p.is_shared() for p in layer.parameters()):
        raise NotImplementedError(
            "adapters that are trained to be merged (nvfp4_mergeable) are merged into the weights, and these are in "
            "memory that processes share (share_memory, torch.multiprocessing): merge_and_unload() before, or call a "
            "copy.deepcopy of the model"
        )


def _check(config: LoraConfig, layer: MergingLayer) -> None:
    """NotImplementedError for options that need the dense weights, or that merging would lose."""
    found = config.init_lora_weights
    on = "; an adapter of a file trains on with init_lora_weights: true in its adapter_config.json"
    if found == "eva" and not isinstance(layer, LoraLinear):
        raise NotImplementedError("init_lora_weights='eva' starts from a linear's inputs, and experts are several: use "
                                  f"True or 'gaussian' for them{on}")  # fmt: skip
    if isinstance(found, str) and found not in ("gaussian", "eva"):
        raise NotImplementedError(
            f"init_lora_weights={found!r} reads dense weights, which 4-bit layers do not have: use True or "
            f"'gaussian'{on * (found in UNLIKE_FILES)}"
        )
    for field in ("lora_bias", "fan_in_fan_out"):
        if getattr(config, field):
            raise NotImplementedError(f"LoRA on 4-bit layers takes {field}=False only")
