"""What vLLM and its compiler get wrong, put right in this process: its kernels for CPUs (0.32), a loader, and what it
makes of transformers' models. Each is put right once, however often it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform


def complete() -> None:
    """Mend all but adapters. Called before a model makes its layers."""
    complete_router()
    complete_rope()
    complete_loader()
    complete_fuser()
    complete_compiler()
    complete_names()


@cache
def complete_router() -> None:
    """Have vLLM's router for CPUs (0.32) use all that it is given: for experts without groups it leaves out the
    correction bias and the scaling factor, and fails with sigmoid scores."""
    try:
        from vllm.model_executor.layers.fused_moe.router import cpu_router
    except ImportError:
        return
    before = cpu_router.CPURouter._compute_routing

    def _compute_routing(self, hidden_states, router_logits, *others, **named):
        scaling, bias = self.routed_scaling_factor, self.e_score_correction_bias
        whole = self.scoring_func == "sqrtsoftplus" or self.scoring_func == "softmax" and bias is None and scaling == 1
        if whole or self.use_grouped_topk or self.custom_routing_function is not None:
            return before(self, hidden_states, router_logits, *others, **named)
        # all experts are one group
        return cpu_router._grouped_topk(
            router_logits, self.top_k, self.renormalize, 1, 1, self.scoring_func, scaling, bias
        )

    cpu_router.CPURouter._compute_routing = _compute_routing


@cache
def complete_rope() -> None:
    """Have vLLM's rotary embedding for CPUs (0.32) turn a query [T, heads, size] as it turns one [T, heads * size]. Its
    kernel turns other numbers, which is seen in latent attention without YaRN (GLM-4.7-Flash)."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    before = RotaryEmbedding.forward_cpu

    def forward_cpu(self, positions, query, key=None):
        if query.dim() < 3:
            return before(self, positions, query, key)
        found = self.forward_native(positions, query, key)
        for given, turned in zip((query, key), found, strict=True):  # in place, as the kernel
            if given is not None:
                given.copy_(turned)
        return query, key

    RotaryEmbedding.forward_cpu = forward_cpu


@cache
def complete_loader() -> None:
    """Have vLLM's loader of experts take the correction bias of their router where it is theirs (Laguna), over which it
    passes, and gate and up of one expert where a model's mapper calls both gate_up_proj, as of a dense MLP (Aria)."""
    before = RoutedExperts.load_weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        name, came = "e_score_correction_bias", []
        parts = self.ckpt_gate_proj_name, self.ckpt_up_proj_name

        def others() -> Iterator[tuple[str, Tensor]]:
            for key, tensor in weights:
                if key == name and getattr(self, name, None) is not None:
                    bias = self.get_parameter(name)
                    getattr(bias, "weight_loader", default_weight_loader)(bias, tensor)
                    came.append(name)
                    continue
                e, _, rest = key.partition(".gate_up_proj.")
                if e.isdecimal() and hasattr(tensor, "shard_id"):
                    key = f"{e}.{parts[tensor.shard_id]}.{rest}"
                yield key, tensor

        yield from before(self, others())
        yield from came

    RoutedExperts.load_weights = load_weights


@cache
def complete_fuser() -> None:
    """Have vLLM (0.32) route tokens by itself in a model of transformers (--model-impl transformers) only where the
    block that it replaces has no weights but in its modules. It leaves out others, as the correction bias of MiniMax-M2
    and HY-V3, and the latter's scaling. There the model's own router goes on."""
    try:
        from vllm.model_executor.models.transformers.fusers.moe import MoEBlockFuser
    except ImportError:
        return
    before = MoEBlockFuser.match

    def match(moe_block: nn.Module, experts_name: str) -> Any:
        own = [*moe_block.parameters(recurse=False), *moe_block.buffers(recurse=False)]
        return None if own else before(moe_block, experts_name)

    MoEBlockFuser.match = staticmethod(match)


@cache
def complete_compiler() -> None:
    """Have Inductor (torch 2.13) compute what reads a tensor that another kernel fills (vLLM's `onednn_mm`) after that
    kernel. On CPUs it gives fused nodes other loops, and then forgets the names that such tensors have once they are
    filled: DeepSeek's router with 4-bit `o_proj` read the scores of its gate before they were computed."""
    if not current_platform.is_cpu():
        return
    from torch._inductor.scheduler import SchedulerNode  # private: needed on CPUs only

    before = SchedulerNode.recompute_size_and_body

    def recompute_size_and_body(self, *arguments, **named):
        before(self, *arguments, **named)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_size_and_body
    torch.compiler.config.cache_key_tag += "moe_nvfp4"  # torch's caches of graphs that were compiled without this


@cache
def complete_names() -> None:
    """Have DeepSeek's attention without latents (DeepSeek-VL2 Tiny and Small, DeepSeek-OCR) name its linears. Without a
    name nobody can tell whether the files have a linear in 4-bit."""
    from vllm.model_executor.models import deepseek_v2

    before = deepseek_v2.DeepseekAttention.__init__
    linears = {"qkv_proj": "QKVParallelLinear", "o_proj": "RowParallelLinear"}

    def __init__(self, *arguments, prefix: str = "", **named):
        classes = {kind: getattr(deepseek_v2, kind) for kind in linears.values()}
        for name, kind in linears.items():
            setattr(deepseek_v2, kind, partial(classes[kind], prefix=f"{prefix}.{name}"))
        try:
            before(self, *arguments, prefix=prefix, **named)
        finally:
            for kind, made in classes.items():
                setattr(deepseek_v2, kind, made)

    deepseek_v2.DeepseekAttention.__init__ = __init__


@cache
def complete_adapters() -> None:
    """Have vLLM's LoRA for CPUs (0.32) add nothing for tokens without an adapter. Their slot is -1, with which it finds
    the last slot: they get the adapter that is there."""
    from vllm.lora.ops.torch_ops import lora_ops  # takes a second to import
    from vllm.lora.punica_wrapper import punica_cpu

    def whole(expand: Callable[..., None]) -> Callable[..., None]:
        def complete(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, *others: Any, **named) -> None:
            expand(inputs.masked_fill(slots[:, None] < 0, 0), weights, output, slots, *others, **named)

        return complete

    for name in ("bgmv_expand", "bgmv_expand_slice"):  # all others call them
        mended = whole(getattr(lora_ops, name))
        for module in lora_ops, punica_cpu:
            setattr(module, name, mended)
