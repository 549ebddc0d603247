"""Decoding by CUDA graphs, without a compiler: a decoding step of `generate` is captured once and replayed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from inspect import signature
from threading import Lock
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves, tree_map
from transformers import GenerationMixin, StaticCache
from transformers.cache_utils import Cache, StaticLayer
from transformers.utils import logging

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.prepared import weights_are_held

logger = logging.get_logger(__name__)
# What `generate` and models call their cache: "past_key_values" before transformers 5.24
_parameters = signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _parameters else "past_key_values"


def use_cuda_graphs(model: Any) -> Any:
    """Have `generate(cache_implementation="static")` run each step of `model` as one CUDA graph. Returns the model.

    4-bit models on a GPU do so by themselves where they can; this call says why where they cannot. transformers alone
    compiles the step, which takes a minute for 48 layers. Here each call of `generate` captures its second step, which
    takes about as long as a step; if that fails, it goes on without, and says why. With other caches nothing changes.

    A graph repeats kernels only, so NotImplementedError where a step does more: for caches that count in Python
    (sliding windows, linear attention), rotary embeddings that change with the length, models whose steps transformers
    cannot compile whole, experts on the CPU that wait for the GPU, hooks of yours (`generate` says so, if they came
    later), and models on several devices, or on a CPU.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT calls its `generate`
    if not _on_gpu(inner):  # where `generate` would not ask for a step
        raise NotImplementedError(
            f"{type(inner).__name__}: use_cuda_graphs takes a model on an NVIDIA GPU, this one is on {inner.device}: "
            "move it there first, or decode without it"
        )
    _check(inner)
    inner.get_compiled_call = StepMaker(inner, compile_too=False)
    return model


def decode_by_graphs(model: Any) -> None:
    """`use_cuda_graphs` without being asked: where graphs cannot be used, and where `generate` is given a
    compile_config, steps are transformers' own, which end in CUDA graphs too, so steps of experts that wait for the GPU
    run as they are. A hint says once in a process how to decode faster."""
    if hasattr(model, "get_compiled_call") and not isinstance(model.get_compiled_call, StepMaker):
        model.get_compiled_call = StepMaker(model, compile_too=True)
        model._valid_auto_compile_criteria = Hint(model)


class StepMaker:
    """Replaces transformers' `get_compiled_call`, which `generate` calls once: the step that it runs from then on."""

    def __init__(self, model: Any, compile_too: bool):
        self.model, self.compile_too = model, compile_too  # copied and pickled with the model

    def __call__(self, compile_config: Any = None) -> Any:
        if not self.compile_too:
            if compile_config is not None:
                raise ValueError(
                    "compile_config has no effect after use_cuda_graphs: leave it out, or load the model again"
                )
            _check(self.model)  # hooks may be new
            return GraphedStep(self.model)
        try:
            if compile_config is None and _on_gpu(self.model):
                _check(self.model)
                return GraphedStep(self.model)
        except NotImplementedError:
            if _waiting(self.model):
                return self.model
        return type(self.model).get_compiled_call(self.model, compile_config)


class Hint:
    """Replaces transformers' `_valid_auto_compile_criteria`, by which `generate` decides whether to call
    `get_compiled_call`: says once that a static cache would make decoding on this GPU faster."""

    said = False

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, kwargs: dict[str, Any], config: Any) -> bool:
        found: bool = type(self.model)._valid_auto_compile_criteria(self.model, kwargs, config)
        cache = kwargs.get(CACHE)
        if not (found or Hint.said or getattr(cache, "is_compileable", cache is None)) and _on_gpu(self.model):
            try:
                _check(self.model)
            except NotImplementedError:
                return found
            Hint.said = True
            logger.warning(
                'generate(cache_implementation="static") decodes this model several times faster: each step is then '
                "one CUDA graph (this is said once)"
            )
        return found


def _on_gpu(model: Any) -> bool:
    return bool(model.device.type == "cuda")


class GraphedStep:
    """Calls model(**inputs) in steps that differ only in the values of tensors: the first runs as usual, the second is
    captured, and all later ones replay it.
    """

    def __init__(self, model: Any):
        self.model = model
        self.kind: list[Any] = []  # names of the inputs, shapes of tensors, and all other values
        self.held: list[Any] = []  # the tensors that the graph reads, in the order of _leaves
        self.weights: list[Tensor] = []  # it reads these too, even after another thread has given the model others
        self.replay: Callable[[], Any] | None = None
        self.failed = False  # whether a capture ended in an error
        self.done: torch.cuda.Event | None = None  # for a host that must not spin

    def __call__(self, **inputs: Any) -> Any:
        leaves = _leaves(inputs)
        if any(getattr(v, "offloading", False) for v in leaves):  # a cache that moves its tensors in each step
            return self.model(**inputs)
        kind = [*inputs, *((v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v for v in leaves)]
        if kind != self.kind:
            if self.kind:
                logger.warning_once("steps have inputs of different shapes: the first of each runs without CUDA graphs")
            self.kind, self.replay = kind, None
            return self.model(**inputs)
        if self.failed:
            return self.model(**inputs)
        if self.replay is None:
            held = tree_map(_clone, inputs, is_leaf=_no_dict)
            self.weights = [t.detach() for t in (*self.model.parameters(), *self.model.buffers())]
            try:
                with weights_are_held():
                    self.held, self.replay = _leaves(held), record(lambda: self.model(**held), self.model.device)
            except RuntimeError as error:  # nothing was computed
                self.failed, why = True, str(error).partition("\n")[0]
                logger.warning(
                    f"slower, without CUDA graphs: a step of {type(self.model).__name__} has failed in one: {why}"
                )
                return self.model(**inputs)
            beside = any(isinstance(m, NVFP4Experts) and m.on_cpu for m in self.model.modules())
            self.done = torch.cuda.Event(blocking=True) if beside and self.model.device.type == "cuda" else None
        for old, new in zip(self.held, leaves, strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)
        made = self.replay()
        if self.done is not None:
            # Where `generate` waits next, the host would spin, on a core that the experts need: a token of
            # Qwen3-30B-A3B takes 22.5 to 24.5 ms so, and 25.6 to 26.4 otherwise (H200 and its 16 cores, 2026-11-23).
            self.done.record(torch.cuda.current_stream(self.model.device))
            self.done.synchronize()
        # Copies, since every replay writes to the same tensors, and `generate` may keep the outputs of all steps.
        return tree_map(_clone, made, is_leaf=lambda v: isinstance(v, Cache))


_recording = Lock()  # while a graph is captured, no other thread may start to capture one
_idle: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)  # streams whose graphs are gone


def record(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Capture `work` in a CUDA graph. Returns a function that repeats it and returns the same tensors, written anew.

    No two graphs share a stream: when one is freed, torch also frees the memory that cuBLAS uses in the other ones of
    its stream (https://github.com/pytorch/pytorch/issues/193402). torch's default stream for captures is shared by all
    graphs, and belongs to one GPU.
    """
    idle = _idle[device]
    # The outer context makes the caller's stream current again, even if the capture fails.
    with _recording, torch.cuda.stream(torch.cuda.current_stream(device)):
        graph, stream = torch.cuda.CUDAGraph(), idle.pop() if idle else torch.cuda.Stream()
        # thread_local: other threads may allocate memory meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            made = work()
    finalize(graph, idle.append, stream)

    def replay() -> Any:
        graph.replay()
        return made

    return replay


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _no_dict(value: Any) -> bool:
    return not isinstance(value, dict)


def _leaves(inputs: dict[str, Any]) -> list[Any]:
    """The arguments, with those in dicts (masks by the kind of layer) in place of the dicts."""
    return tree_leaves(inputs, is_leaf=_no_dict)


def _hooked(module: nn.Module) -> bool:
    """Whether `module` has hooks of the user. Those of these packages are such that a graph repeats what they do."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    functions = (hook.func if isinstance(hook, partial) else hook for hook in hooks)
    return any(str(f.__module__).partition(".")[0] not in ("accelerate", "moe_nvfp4", "peft", "torch", "transformers")
               for f in functions)  # fmt: skip


def _check(model: Any) -> None:
    what = f"{type(model).__name__}: use_cuda_graphs"
    way_out = "decode without it"
    config = model.config.get_text_config(decoder=True)
    try:
        kinds = {type(layer) for layer in StaticCache(config=config, max_cache_len=2).layers} - {StaticLayer}
    except KeyError as layer:
        raise NotImplementedError(f"{what} needs a static cache, which has no layers of {layer}: {way_out}") from None
    if kinds:
        raise NotImplementedError(f"{what} does not take the cache of {kinds.pop().__name__}: {way_out}")
    for name, module in model.named_modules():
        if _hooked(module) or _has_any_global_hook():
            raise NotImplementedError(
                f"{what} does not take the forward hooks of {name or 'the model'}: a graph would not call them again; "
                f"remove them, or {way_out}"
            )
        kind = getattr(module, "rope_type", "")
        for rope in kind.values() if isinstance(kind, dict) else [kind]:
            if rope == "longrope" or "dynamic" in str(rope):
                raise NotImplementedError(f"{what} does not take {name} of type {rope!r}: {way_out}")
    if reason := _waiting(model):
        raise NotImplementedError(f"{what} does not take {reason}")
    if not getattr(model, "_can_compile_fullgraph", False):
        raise NotImplementedError(f"{what} takes models whose steps transformers can compile whole: {way_out}")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise NotImplementedError(f"{what} takes a model on one GPU, this one is on several devices: {way_out}")


def _waiting(model: Any) -> str | None:
    """The name of experts that wait for the GPU in each step, why, and what to do; None if there are none."""
    autocast = torch.is_autocast_enabled(model.device.type)
    dtype = torch.get_autocast_dtype(model.device.type) if autocast else model.dtype
    for name, module in model.named_modules():
        if not isinstance(module, NVFP4Experts):
            continue
        if not module.on_cpu and module.backend(dtype).name == "reference":
            return f"{name}: it runs as plain torch operations, which wait for the GPU in each step; decode without it"
        if module.on_cpu and not module._hooks().fused:
            return (
                f"{name}: it is on the CPU, and waits for the GPU in each step, because a gate, a norm or AWQ scales "
                "of the model run between its stages; decode without it, or keep it on the GPU"
            )
    return None
