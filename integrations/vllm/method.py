"""One MoE layer of vLLM: parameters for vLLM's loader, and the forward. `NVFP4Experts` has the weights and computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.utils import set_weight_attrs

from moe_nvfp4.experts import NVFP4Experts, serve_beside
from moe_nvfp4.integrations.vllm import engine, reload
from moe_nvfp4.integrations.vllm.adapters import ExpertsAdapter, Share
from moe_nvfp4.integrations.vllm.hidden import hide, refuse_saving
from moe_nvfp4.integrations.vllm.loading import OTHER, OUTSIDE, ExpertLoader, check_rows, refresh
from moe_nvfp4.integrations.vllm.placement import Placement
from moe_nvfp4.integrations.vllm.unwritten import Converted
from moe_nvfp4.ops import Adapters
from moe_nvfp4.quantize.dialects import Dialect
from moe_nvfp4.ready import prepare
from moe_nvfp4.routing import local_ids
from moe_nvfp4.weights import is_quantized

KINDS = ("weight", "sf", "global_scale", "input_scale")


# Models of vLLM that look for a tensor's name elsewhere unless a loader says that it has taken it. (Others ask for each
# copy of an expert.)
TAKES_FALSE_FOR_ANOTHER_NAME = ("GraniteMoeHybridForCausalLM",)


class MoeNvfp4Method(FusedMoEMethodBase):
    """Runs the experts of `layer`, from NVFP4 files in `dialect`; if that is None, quantized as they are read."""

    def __init__(
        self,
        layer: RoutedExperts,
        dialect: Dialect | None,
        activations: str,
        recipe: str,
        adapter: ExpertsAdapter | None = None,
        placement: Placement | None = None,
        files: Converted | str | None = None,
        said: Mapping[str, Any] = MappingProxyType({}),
    ):
        super().__init__(layer.moe_config)
        engine.refuse(layer, dense=dialect is None, adapter=adapter is not None)
        self.adapter, self.placement = adapter, placement or Placement()
        self.files = files  # a conversion, or a folder, to read what vLLM's loader does not pass on
        self.gate, self.own_gate = engine.gate_of(layer, said)
        self.dialect, self.activations, self.recipe = dialect, activations, recipe
        self.lora: Any = None  # `lora.ExpertsWithLoRA`, where requests choose adapters
        self.drops = False  # whether vLLM's model drops a part of the experts
        self.dummy = False  # whether vLLM reads no files (`arrived.check_loads`)
        self.static = False  # whether the files have static activation scales

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        tp = (self.moe.tp_rank, self.moe.tp_size)
        self.device = torch.get_default_device()  # of x
        on_cpu = self.placement.next_on_cpu()

        def loader(device: torch.device) -> ExpertLoader:
            """An empty layer on this device, to be filled."""
            experts = NVFP4Experts(
                num_experts, hidden_size, intermediate_size_per_partition, self.gate, self.activations,
                params_dtype if self.moe.has_bias else None, device=device,
            )  # fmt: skip
            if self.own_gate is not None:
                experts.own_gate = self.own_gate
            if tp[1] > 1:
                experts.share_rows(engine.channels_group())
            return ExpertLoader(experts, layer.layer_name, self.dialect, tp, self.recipe, self.device)

        self.new_loader, self.loader = loader, loader(torch.device("cpu") if on_cpu else self.device)
        self.number = self.placement.add(sum(p.nbytes for p in self.loader.experts.parameters()))
        self.sizes, self.dtype = (hidden_size, intermediate_size_per_partition * tp[1], num_experts), params_dtype
        mine = engine.experts_here(layer, num_experts)
        interleaved = layer.activation.value == "swigluoai"  # gpt-oss
        sizes, transposed = (self.moe.num_experts, *self.sizes[:2]), engine.stored_transposed()
        self.share = Share(sizes, self.gate.gated, mine, tp, interleaved, transposed)
        self.adapters = tree_map(lambda t: t.to(self.device, params_dtype), self._adapters(layer.layer_name))
        by_request = engine.chosen_by_request()
        if by_request or self.adapters != ((), ()):
            channels = hidden_size, intermediate_size_per_partition
            engine.refuse_graphs(layer, self.device, params_dtype, channels, self.loader.experts.num_experts)
        if on_cpu:
            engine.refuse_on_cpu(layer, self.device, self.loader.experts._hooks(self.adapters).fused, by_request)
        self.model, self.room = engine.model_class(), partial(engine.room, engine.current(), self.moe)
        hide(layer, self.loader.experts)
        # Empty parameters under the names into which vLLM translates the files' names: their loaders are ours.
        suffixes = {"bias": "bias", "weight": "weight"}
        if self.dialect is not None:
            suffixes |= {getattr(self.dialect, kind): kind for kind in KINDS}
        for stack in ("w13", "w2"):
            for suffix, kind in suffixes.items():
                parameter = nn.Parameter(torch.empty(0), requires_grad=False)
                set_weight_attrs(parameter, {"weight_loader": self._loader(layer, kind, suffix)})
                reload.awaits(parameter, self._numbers(stack, suffix))
                layer.register_parameter(f"{stack}_{suffix}", parameter)

    def _adapters(self, name: str) -> Adapters:
        """What the one adapter for all requests has for the experts of this name, from its file."""
        return ((), ()) if self.adapter is None else self.adapter.of(name, self.share)

    def _numbers(self, stack: str, suffix: str) -> int:
        """How many numbers the files have under this name for this rank's experts, with all of their channels."""
        H, I, E = self.sizes
        projections = 2 if stack == "w13" and self.gate.gated else 1
        rows, columns = (H, I) if stack == "w2" else (I, H)
        matrix, d = E * projections * rows * columns, self.dialect
        found = {"bias": E * projections * rows * bool(self.moe.has_bias)}
        if d is None:
            return (found | {"weight": matrix})[suffix]
        found |= {d.weight: matrix // 2, d.sf: matrix // 16, d.global_scale: E * projections}
        return (found | {d.input_scale: E * projections * is_quantized(self.activations)}).get(suffix, 0)

    def _loader(self, layer: RoutedExperts, kind: str, suffix: str) -> Callable[..., bool | None]:
        """The function that vLLM calls with each expert's tensor of this kind."""
        parts = {"w1": "gate_proj" if self.gate.gated else "up_proj", "w2": "down_proj", "w3": "up_proj"}

        def load(param, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int, return_success=False):
            gpt_oss = shard_id.startswith("gpt_oss")  # only down comes: `ExpertLoader.read` loads all three
            self.drops |= gpt_oss
            e = -1 if gpt_oss else engine.local_expert(layer, expert_id)
            if e < 0 and not gpt_oss:  # of another rank; it may come when this one's layer is complete
                return self.model in TAKES_FALSE_FOR_ANOTHER_NAME if return_success else None
            again = reload.is_announced(param)
            if again and self.loader is None:
                self.loader = self.new_loader(layer.nvfp4.down_proj.device)
            if self.loader is None:
                raise NotImplementedError(f"{weight_name} {OUTSIDE}")
            if gpt_oss:
                return False if return_success else None
            stacked = loaded_weight.dim() == 3  # Llama 4's bf16 experts: all of this rank, in order
            if shard_id not in parts or stacked and len(loaded_weight) != layer.nvfp4.num_experts:
                raise NotImplementedError(
                    f"{layer.layer_name}: {weight_name} comes as {shard_id!r} {list(loaded_weight.shape)}, all experts "
                    "in one tensor: moe-nvfp4 quantize SRC DST writes them one by one"
                )
            matrix = f"{layer.layer_name}.{expert_id}.{parts[shard_id]}"
            if again:
                if kind == "weight" and self.dialect is not None and loaded_weight.is_floating_point():
                    raise ValueError(  # vLLM counts no numbers of it, and would keep the experts as they are
                        f"{matrix} comes as {loaded_weight.dtype}, and is NVFP4 of {self.dialect.name} in the files "
                        f"{OTHER}"
                    )
                reload.announce(loaded_weight)
            else:
                for i, tensor in enumerate(loaded_weight if stacked else [loaded_weight]):
                    self.loader.load(kind, parts[shard_id], e + i, tensor, f"{matrix}.{suffix}")
            return True if return_success else None

        load.supports_moe_loading = True  # vLLM's Llama 4 looks for this
        return load

    def begin(self) -> None:
        """Be ready for all weights once more. NotImplementedError, and nothing is changed, if they cannot come."""
        if self.drops:
            raise NotImplementedError("vLLM's gpt-oss drops gate and up of new weights: start the server again")
        self.loader = None  # with what came before, if that has failed

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        loader, self.loader = self.loader, None
        again = loader.experts is not layer.nvfp4
        if not again:
            self._place(layer.nvfp4)
        if self.dummy and not again:
            _randomize(layer.nvfp4, self.static and is_quantized(self.activations))
        else:
            if self.files is not None and not again:
                files = self.files if isinstance(self.files, str) else self.files.open()
                loader.read(files, partial(engine.local_expert, layer))
            loader.finish()
        beside = self.device if layer.nvfp4.on_cpu and self.device.type != "cpu" else None
        ranks = {a.shape[1] for pairs in self.adapters for a, _ in pairs}
        top_k, expert_map = self.moe.experts_per_token, layer.expert_map is not None
        for adapters in [(rank, 0) for rank in ranks] or [None]:
            prepare(loader.experts, top_k, self.moe.in_dtype, beside, adapters, expert_map)
        if again:
            refresh(layer.nvfp4, loader.experts, layer.layer_name)
            # sleep at level 2 has lost these, too
            tree_map(lambda t, read: t.copy_(read), self.adapters, self._adapters(layer.layer_name))
        else:
            refuse_saving(layer, layer.layer_name)

    def _place(self, experts: NVFP4Experts) -> None:
        """Keep the experts on the CPU, or bring them to the GPU if that is where they stay."""
        if self.placement.stays(self.number, self.model, self.room):
            experts.keep_on_cpu()
            if self.device.type != "cpu":
                serve_beside(self.device, torch.get_num_threads())
                self.adapters = tree_map(lambda t: t.cpu(), self.adapters)
        elif experts.down_proj.device != self.device:
            experts.to(self.device)
        if self.number == 0 and self.placement.count:
            engine.log(str(self.placement))

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None  # only vLLM's own kernels need one

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts=None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """x [T, H] -> [T, H], this rank's experts or channels only; vLLM's runner adds ranks and shared experts."""
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        expert_map = layer.expert_map  # -1 for experts of other ranks: their slots are skipped
        if self.lora is not None:
            return self.lora.routed(
                x, topk_ids if expert_map is None else local_ids(topk_ids, expert_map), topk_weights
            )
        return layer.nvfp4(x, topk_ids, topk_weights, self.adapters, expert_map=expert_map)


@register_weight_loader_v2_supported_method
class DenseLinearMethod(UnquantizedLinearMethod):
    """A linear that stays as it is, and refuses rows too many, and 4-bit weights, which vLLM may be given later.

    name   of vLLM's module, for messages
    check  called once the linear is loaded, when all layers exist
    """

    def __init__(self, name: str, check: Callable[[], None] | None = None):
        super().__init__()
        self.name, self.check = name, check

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        weight_loader: Callable[..., Any],
        **attributes: Any,
    ) -> None:
        def load(param: nn.Parameter, loaded_weight: Tensor, *shard: Any) -> Any:
            if not loaded_weight.is_floating_point():
                found = f"{loaded_weight.dtype} {list(loaded_weight.shape)}"
                raise ValueError(f"{self.name}.weight comes as {found}, and is dense in the files {OTHER}")
            one = shard[0] if shard else None
            check_rows(f"{self.name}.weight", loaded_weight, output_partition_sizes, one, getattr(layer, "tp_size", 1))
            return weight_loader(param, loaded_weight, *shard)

        sizes = input_size_per_partition, output_partition_sizes
        super().create_weights(layer, *sizes, *args, weight_loader=load, **attributes)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.check is not None:
            self.check()
        super().process_weights_after_loading(layer)


def _randomize(experts: NVFP4Experts, static: bool) -> None:
    """Fill in weights for measurements, or until real ones are loaded: random codes, block scales of 1, values of about
    1/64. static: with static activation scales, as real ones will have them."""
    if static:
        experts.set_input_scales(torch.ones(()), torch.ones(()))
    for name, parameter in experts.named_parameters():
        if name.endswith(("_global_scale", "_input_scale")):
            parameter.data.fill_(1 / 256)
        elif name.endswith("_sf"):
            parameter.data.fill_(0x38)
        elif parameter.dtype == torch.uint8:  # eight at a time: a CPU draws numbers one by one
            parameter.data.view(torch.int64).random_(-(1 << 63), None)
        else:
            parameter.data.zero_()
