"""Choose the layers whose experts stay on the CPU beside a GPU, and what both do while the other computes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from moe_nvfp4.experts import RouterCopy
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.placement import SCRATCH, check_cpu_experts, fewest_on_cpu, no_gpu
from moe_nvfp4.quantize.report import readable_size
from moe_nvfp4.quantize.settings import language_config, layer_configs

CONTEXT = 8192  # tokens of the KV cache that "auto" leaves room for
SHARED = ("shared_experts", "shared_expert", "shared_mlp")  # the names that blocks have for their shared experts


def keep_experts_on_cpu(
    model: nn.Module, layers: int | str, context: int | None = None, memory: int | None = None
) -> list[HFExperts]:
    """Keep the 4-bit experts of the first `layers` layers on the CPU and compute them there: `model.to("cuda")` moves
    everything else. Returns these experts.

    layers   a number of layers with experts, "all", or "auto": as few as leave room on the GPU for the rest of the
             model, the KV cache of `context` tokens (batch 1, default: CONTEXT) and SCRATCH
    memory   for "auto": free bytes of the GPU; default: those of the current CUDA device

    ValueError if `model` has no 4-bit experts or fewer layers than `layers`, for "auto" without a GPU, for `context` or
    `memory` without "auto", and if the model does not fit on the GPU even with all experts on the CPU.
    NotImplementedError for experts that `device_map` has offloaded. Nothing is changed then.
    """
    if layers != "auto" and (context, memory) != (None, None):
        raise ValueError(f"context and memory have no effect on layers={layers!r}: they are for layers='auto'")
    count = layers_on_cpu(model, layers, CONTEXT if context is None else context, memory)
    experts = _layers(model)
    if any(p.is_meta for layer in experts[:count] for p in layer.parameters()):
        raise NotImplementedError(
            "experts that device_map has offloaded have no weights to keep: load without it, with "
            "MoeNvfp4Config(cpu_experts=...), and map_files=True if the memory is too small for them"
        )
    for i, layer in enumerate(experts):
        layer.keep_on_cpu(i < count)
    for block in model.modules():
        _overlap(block)
        _guess(block)
    return experts[:count]


def layers_on_cpu(model: nn.Module, layers: int | str, context: int = CONTEXT, memory: int | None = None) -> int:
    """The number of layers whose experts `keep_experts_on_cpu` would keep; the model may be on meta."""
    check_cpu_experts(layers)
    experts = _layers(model)
    if not experts:
        raise ValueError(f"{type(model).__name__} has no 4-bit experts to keep on the CPU: call swap_experts first")
    if layers == "auto":
        return _fewest(model, experts, context, memory)
    check_cpu_experts(layers, type(model).__name__, len(experts))
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


def cache_bytes(model: nn.Module, context: int) -> int:
    """Bytes of transformers' KV cache of `context` tokens. The small states of linear attention are not counted."""
    config = language_config(model.config)
    layers = DynamicCache(config=config).layers or [DynamicLayer()] * config.num_hidden_layers
    configs = layer_configs(config) or [config] * len(layers)  # the last may share another layer's cache
    numbers = sum(
        min(context, getattr(layer, "sliding_window", context)) * _width(own)
        for layer, own in zip(layers, configs, strict=False)
        if isinstance(layer, DynamicLayer)
    )
    return int(numbers * next(model.parameters()).element_size())


def _width(config: Any) -> int:
    """How many numbers a layer caches for each token."""
    if latent := getattr(config, "kv_lora_rank", None):  # it is cached, and expanded to heads a layer at a time
        return int(latent + config.qk_rope_head_dim + (getattr(config, "index_head_dim", None) or 0))
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads))


def _fewest(model: nn.Module, experts: list[HFExperts], context: int, memory: int | None) -> int:
    """The number of layers whose experts have no room on the GPU."""
    if memory is None:
        if not torch.cuda.is_available():
            raise no_gpu()
        memory = torch.cuda.mem_get_info()[0]
    sizes = list(map(_bytes, experts))
    needs = {"other weights": _bytes(model) - sum(sizes),
             f"a KV cache of {context} tokens": cache_bytes(model, context), "scratch": SCRATCH}  # fmt: skip
    return fewest_on_cpu(sizes, memory, needs)


def _bytes(module: nn.Module) -> int:
    """The size of all weights and buffers of `module`, including those that stay in files."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}  # counts tied ones once
    in_files = sum(m.mapped_bytes for m in module.modules() if isinstance(m, HFExperts))
    return in_files + sum(t.numel() * t.element_size() for t in tensors.values())


# ---------------------------------------------------------------- shared experts
@dataclass
class _BlockCall:
    """The call of a block that this thread is in: x is its input; output is that of the shared experts, once there."""

    owner: SharedAhead
    x: Tensor
    version: int
    started: bool = False
    output: Tensor | None = None


class _Latest(threading.local):
    call: _BlockCall | None = None


_latest = _Latest()


class SharedAhead:
    """Runs the shared experts of a block on the GPU while the CPU computes the routed experts.

    Most models call the routed experts first and the shared experts after them, with the input of the block. On the
    GPU's stream the shared experts then wait for the CPU too. This replaces `forward` of the shared experts: `start`,
    which the routed experts call once the CPU is at work, computes their output, and the model's own call returns it.

    `start` computes only if the model's latest call of the shared experts came after the routed experts, for the input
    of the block. The output is returned only for that same memory, unwritten since. Every other call computes as if
    this object were not there.
    """

    def __init__(self, block: nn.Module, shared: nn.Module):
        self.shared, self.before, self.useful = shared, vars(shared).get("forward"), False
        shared.forward = self
        block.register_forward_pre_hook(self.enter)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        # The class's method by its name: pickle would find this object in place of a bound method of the module.
        return (self.before or partial(type(self.shared).forward, self.shared))(*args, **kwargs)

    def enter(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        _latest.call = None
        if inputs and isinstance(x := inputs[0], Tensor) and not x.is_inference():  # those have no version
            _latest.call = _BlockCall(self, x, x._version)

    def start(self) -> None:
        """Called once the CPU is at work."""
        call = _latest.call
        if call is None or call.owner is not self:
            return
        # A hook that was put around `forward` since, such as accelerate's, must not be bypassed.
        if self.useful and self.shared.forward is self and call.x._version == call.version:
            call.output = self.compute(call.x)
        call.started, self.useful = True, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.compute(*args, **kwargs)
        call, _latest.call = _latest.call, None
        after = call is not None and call.owner is self and call.started and not kwargs and _is_input(args, call)
        if call is not None and after and call.output is not None:
            self.useful = True
            return call.output.reshape(args[0].shape)
        output = self.compute(*args, **kwargs)
        self.useful = after and isinstance(output, Tensor) and output.shape == args[0].shape
        return output


def _is_input(args: tuple[Any, ...], call: _BlockCall) -> bool:
    """Whether `args` is the input of the block alone, perhaps in another shape, and was not written to since."""
    if len(args) != 1 or not isinstance(given := args[0], Tensor) or given.is_inference():
        return False
    memory = lambda t: (t.data_ptr(), t.numel(), t.shape[-1:], t.dtype, t.is_contiguous())
    return memory(given) == memory(call.x) and given.is_contiguous() and given._version == call.version


def _overlap(block: nn.Module) -> None:
    """Have the experts of `block`, if it has any, start its shared experts if they stay on the CPU."""
    experts = getattr(block, "experts", None)
    if not isinstance(experts, HFExperts):
        return
    shared = next((m for name in SHARED if isinstance(m := getattr(block, name, None), nn.Module)), None)
    if not experts.on_cpu or shared is None or _layers(shared):
        experts.meanwhile = None
    else:
        before = vars(shared).get("forward")
        experts.meanwhile = (before if isinstance(before, SharedAhead) else SharedAhead(block, shared)).start


def _guess(block: nn.Module) -> None:
    """Tell the experts of `block`, if it has any that stay on the CPU, which matrix their router has."""
    experts = getattr(block, "experts", None)
    if not isinstance(experts, HFExperts):
        return
    others = [m for name, child in block.named_children() if name not in ("experts", *SHARED) for m in child.modules()]
    shape = experts.num_experts, experts.hidden_size
    found = [(m, name) for m in others for name, p in m.named_parameters(recurse=False) if p.shape == shape]
    experts.router = RouterCopy(*found[0]) if experts.on_cpu and len(found) == 1 else None
