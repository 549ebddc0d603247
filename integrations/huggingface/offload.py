"""Choose the layers whose experts stay on the CPU beside a GPU."""

from __future__ import annotations

import torch
from torch import nn

from moe_nvfp4.integrations.huggingface.config import check_cpu_experts
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.quantize.report import readable_size

CONTEXT = 8192  # tokens of the KV cache that "auto" leaves room for
SCRATCH = 3 << 30  # bytes that "auto" leaves free: activations, graphs, weights that are copied for long prompts


def keep_experts_on_cpu(
    model: nn.Module, layers: int | str, context: int = CONTEXT, memory: int | None = None
) -> list[HFExperts]:
    """Keep the 4-bit experts of the first `layers` layers on the CPU and compute them there: `model.to("cuda")` moves
    everything else. Returns these experts.

    layers   a number of layers with experts, "all", or "auto": as few as leave room on the GPU for the rest of the
             model, the KV cache of `context` tokens (batch 1) and SCRATCH
    memory   free bytes of the GPU; default: those of the current CUDA device

    ValueError if `model` has no 4-bit experts or fewer layers than `layers`, for "auto" without a GPU, and if the
    model does not fit on the GPU even with all experts on the CPU.
    """
    count = layers_on_cpu(model, layers, context, memory)
    experts = _layers(model)
    for i, layer in enumerate(experts):
        layer.keep_on_cpu(i < count)
    return experts[:count]


def layers_on_cpu(model: nn.Module, layers: int | str, context: int = CONTEXT, memory: int | None = None) -> int:
    """The number of layers whose experts `keep_experts_on_cpu` would keep; the model may be on meta."""
    check_cpu_experts(layers)
    experts = _layers(model)
    if not experts:
        raise ValueError(f"{type(model).__name__} has no 4-bit experts to keep on the CPU: call swap_experts first")
    if layers == "auto":
        return len(experts) - _fitting(model, experts, context, memory)
    check_cpu_experts(layers, model, len(experts))
    return len(experts) if layers == "all" else int(layers)


def _layers(model: nn.Module) -> list[HFExperts]:
    """The 4-bit experts of `model`, each once."""
    return list(dict.fromkeys(m for m in model.modules() if isinstance(m, HFExperts)))


def describe_placement(model: nn.Module) -> str:
    """One line that says where the experts of `model` are."""
    experts = _layers(model)
    here = [layer for layer in experts if layer.on_cpu]
    there = [layer for layer in experts if not layer.on_cpu]
    sizes = sum(map(_bytes, here)), sum(map(_bytes, there)), _bytes(model) - sum(map(_bytes, experts))
    on_cpu, others, rest = map(readable_size, sizes)
    where = "in their files" if any(layer.mapped for layer in here) else "on the CPU"
    return (
        f"experts of {len(here)} of {len(experts)} layers stay {where} ({on_cpu}); those of the others ({others}) "
        f"and all other weights ({rest}) go to the GPU"
    )


def cache_bytes(model: nn.Module) -> int:
    """Bytes of one token in transformers' KV cache: keys and values of every layer."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if getattr(config, "kv_lora_rank", None):  # latent attention: transformers caches the heads, not the latent vectors
        heads = config.num_attention_heads
        width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return int(config.num_hidden_layers * width * next(model.parameters()).element_size())


def _fitting(model: nn.Module, experts: list[HFExperts], context: int, memory: int | None) -> int:
    """The number of layers whose experts have room on the GPU."""
    if memory is None:
        if not torch.cuda.is_available():
            raise ValueError("cpu_experts='auto' asks the GPU for its memory, and there is none: say 'all' or a number")
        memory = torch.cuda.mem_get_info()[0]
    rest, cache = _bytes(model) - sum(map(_bytes, experts)), context * cache_bytes(model)
    room = memory - rest - cache - SCRATCH
    if room < 0:
        sizes = ", ".join(map(readable_size, (rest, cache, SCRATCH)))
        raise ValueError(
            f"{readable_size(memory)} of free GPU memory are too few even with all experts on the CPU: other weights, "
            f"a KV cache of {context} tokens and scratch take {sizes}; take a larger GPU, or quantize the linears too"
        )
    count = 0
    for layer in reversed(experts):  # the first ones stay
        room -= _bytes(layer)
        if room < 0:
            break
        count += 1
    return count


def _bytes(module: nn.Module) -> int:
    """The size of all weights and buffers of `module`, including those that stay in files."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}  # counts tied ones once
    in_files = sum(m.mapped_bytes for m in module.modules() if isinstance(m, HFExperts))
    return in_files + sum(t.numel() * t.element_size() for t in tensors.values())
