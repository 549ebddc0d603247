"""vLLM's own LoRA (--enable-lora) on experts: each request chooses an adapter. Uses vLLM's internals, of 0.32 and 0.33,
whose import takes a second: it is imported only where the option is given for experts.

vLLM keeps adapters in numbered slots, and says which one each token of a step has, or -1, in a tensor that stays where
it is: CUDA graphs see new numbers. The layer sorts an expert's rows by slot (`Groups.parts`) and multiplies each row by
its own adapter, so the work does not grow with the slots.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.lora import utils
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping, LoRAMappingType
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe import MoERunner

from moe_nvfp4.integrations.vllm.adapters import LAYER, Pair, adapters_of, adapters_of_linears, check_config
from moe_nvfp4.ops import Adapter
from moe_nvfp4.ready import prepare
from moe_nvfp4.stages import joined, padded_rank

OF_LAYER = re.compile(rf"(?P<layer>{LAYER.pattern})(?:.*\.)?experts(?P<rest>|\.base_layer|\.\d+\.\w+)")


class ExpertsWithLoRA(BaseLayerWithLoRA):
    """The experts module `base_layer`, with this rank's part of the adapters in all slots."""

    n_slices = 2  # of the adapters that vLLM makes for its measurements

    def __init__(self, base_layer: MoERunner):
        super().__init__()
        self.base_layer = base_layer
        self._shared_experts = base_layer._shared_experts  # under this name too vLLM looks for linears in it
        self.in_use = False  # whether a token of this step has an adapter
        self.method = base_layer.routed_experts.quant_method

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        experts, rank = self.base_layer.routed_experts.nvfp4, padded_rank(lora_config.max_lora_rank)
        E, H, I = experts.num_experts, experts.hidden_size, experts.intermediate_size

        def slots(N: int, K: int) -> Adapter:
            zeros = lambda *shape: torch.zeros(E, max_loras, *shape, dtype=self.method.dtype, device=self.method.device)
            return Adapter(zeros(rank, K), zeros(N, rank))

        self.slots = slots(2 * I if experts.gate.gated else I, H), slots(H, I)
        self.lora_a_stacked, self.lora_b_stacked = zip(*self.slots, strict=True)  # vLLM asks for shapes and dtype
        self.method.lora = self
        prepare(experts, self.method.moe.experts_per_token, self.method.dtype, adapters=(rank, max_loras))

    def reset_lora(self, index: int) -> None:
        for slots in self.slots:
            slots.a[:, index], slots.b[:, index] = 0, 0

    def set_lora(self, index: int, lora_a: list[Tensor | None], lora_b: list[Tensor | None]) -> None:
        """Put the adapters of up and down, as `take` makes them, into a slot."""
        self.reset_lora(index)
        for slots, a, b in zip(self.slots, lora_a, lora_b, strict=True):
            if a is not None and b is not None:
                slots.a[:, index, : a.shape[1]] = a
                slots.b[:, index, :, : b.shape[2]] = b

    def take(self, loras: dict[str, LoRALayerWeights], module: str, folder: str, peft: str | None = None) -> None:
        """Bring what PEFT, in this version, has for this module, under its name in `loras`, into the form of the slots:
        this rank's part.

        ValueError or NotImplementedError for what does not fit."""
        routed, name = self.base_layer.routed_experts, f"{folder}: the adapter of {module}"
        gate, up = ("gate", "up") if self.method.share.gated else ("up", None)
        parts = {routed.ckpt_gate_proj_name: gate, routed.ckpt_up_proj_name: up, routed.ckpt_down_proj_name: "down"}
        of_parameters, of_linears = [], {}
        for key in [key for key in loras if key == module or key.startswith(f"{module}.")]:
            e, _, part = key[len(module) + 1 :].partition(".")
            if e in ("", "base_layer"):
                of_parameters.append(_pair(loras.pop(key), key, folder, peft))
            elif e.isdecimal() and int(e) < self.method.share.sizes[0] and part in parts:
                of_linears[int(e), parts[part]] = _pair(loras.pop(key), key, folder, peft)
        if not of_parameters and not of_linears:
            return
        found = adapters_of(of_parameters, self.method.share, name)
        more = adapters_of_linears(of_linears, self.method.share, name)
        pairs = [joined((*some, *others), self.method.dtype) for some, others in zip(found, more, strict=True)]
        rank = max((a.shape[1] for a, _ in pairs if a is not None), default=0)
        if rank > (most := self.slots[0].a.shape[2]):
            raise ValueError(f"{name} has rank {rank} (those of gate and up of an expert's linears add up), more than "
                             f"{most}: raise --max-lora-rank")  # fmt: skip
        loras[module] = packed(module, *pairs)

    def routed(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts, with each token's adapter. This is never compiled: with --enable-lora vLLM compiles nothing on a
        CPU, and on a GPU what is around experts. CUDA graphs of steps without adapters are others."""
        inputs, experts = (x, top_k_index, top_k_weights), self.base_layer.routed_experts.nvfp4
        if not self.in_use:  # the kernels then compute the whole layer, as without --enable-lora
            return experts(*inputs)
        up, down = self.slots
        return experts(*inputs, ((up,), (down,)), self.punica_wrapper._token_lora_indices[: len(x)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)

    @classmethod
    def can_replace_layer(cls, source_layer: torch.nn.Module, *args: Any, **kwargs: Any) -> bool:
        return isinstance(source_layer, MoERunner) and hasattr(source_layer.routed_experts, "nvfp4")


def _pair(lora: LoRALayerWeights, name: str, folder: str, peft: str | None) -> Pair:
    if lora.lora_a is None or lora.lora_b is None:
        raise ValueError(f"{folder}: {name} has lora_A or lora_B only: save the adapter again")
    return Pair(lora.lora_a, lora.lora_b, lora.rank, lora.scaling, peft)


def _rename(loras: dict[str, LoRALayerWeights], experts: Iterable[str]) -> None:
    """Have the adapters of a layer's experts under the name that vLLM has for them: transformers' may be another (its
    layers.0.mlp.experts of Mixtral are layers.0.block_sparse_moe.experts), and that of a base model has no `model.`."""
    by_layer = {found[0]: name for name in experts if (found := LAYER.match(f"{name}."))}
    by_layer |= {layer.removeprefix("model."): name for layer, name in by_layer.items()}
    for key in list(loras):
        found = OF_LAYER.fullmatch(key)
        if found and (name := by_layer.get(found["layer"])) and name + found["rest"] not in loras:
            loras[name + found["rest"]] = loras.pop(key)


NOTHING = None, None


def packed(name: str, up: Any = NOTHING, down: Any = NOTHING) -> PackedLoRALayerWeights:
    """Adapters of one module as vLLM's manager keeps them."""
    a, b = map(list, zip(up, down, strict=True))
    return PackedLoRALayerWeights(name, 0, [None, None], a, b, scaling=[1, 1])


def install() -> None:
    """Have vLLM's managers of this process, which are made later, take adapters of 4-bit experts."""
    if ExpertsWithLoRA in utils._all_lora_classes:
        return
    utils._all_lora_classes = (ExpertsWithLoRA, *utils._all_lora_classes)

    class Manager(LRUCacheWorkerLoRAManager._manager_cls):  # type: ignore[name-defined,misc]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.model.lora_skip_prefixes = []  # tensors for drafting, which vLLM would leave out, are an error

        @property
        def experts(self) -> dict[str, ExpertsWithLoRA]:
            return {name: module for name, module in self.modules.items() if isinstance(module, ExpertsWithLoRA)}

        def create_dummy_lora(self, *args: Any, **kwargs: Any) -> LoRAModel:
            dummy = super().create_dummy_lora(*args, **kwargs)
            dummy.loras |= {name: packed(name) for name in self.experts}
            return dummy

        def _set_adapter_mapping(self, mapping: LoRAMapping) -> None:
            super()._set_adapter_mapping(mapping)
            if mapping.type is LoRAMappingType.LANGUAGE:
                in_use = any(number > 0 for number in mapping.index_mapping)
                for module in self.experts.values():
                    module.in_use = in_use

        def take(self, lora_model: LoRAModel, lora_request: LoRARequest) -> None:
            """Bring what the adapter of a request has for experts into the form of `ExpertsWithLoRA`."""
            folder = utils.get_adapter_absolute_path(lora_request.lora_path)
            said = json.loads(Path(folder, "adapter_config.json").read_text("utf-8"))
            check_config(said, folder)
            patterns = said.get("rank_pattern") or said.get("alpha_pattern")
            _rename(lora_model.loras, self.experts)
            for name, module in self.experts.items():
                both = module.method.share.gated and f"{name}.base_layer" in lora_model.loras
                if patterns and name in lora_model.loras and not both:
                    raise NotImplementedError(
                        f"adapter {folder!r}: {patterns}, and its tensors of {name} do not say which one of the "
                        "experts' parameters they are of (vLLM takes them for down_proj, and a second for "
                        "gate_up_proj): serve it with transformers (PEFT)"
                    )
                module.take(lora_model.loras, name, folder, said.get("peft_version"))

    LRUCacheWorkerLoRAManager._manager_cls = Manager
