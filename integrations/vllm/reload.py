"""Weights that are loaded again in a running server: by vLLM's `reload_weights`, or its weight transfer. vLLM does not
look at them: it ends in an assertion with half of the model on meta, or takes what did not come from memory as it was
allocated, and goes on.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import vllm
from torch import Tensor, nn
from vllm import envs
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from moe_nvfp4.integrations.vllm import NAME
from moe_nvfp4.integrations.vllm.config import told
from moe_nvfp4.integrations.vllm.loading import check_folder, check_others, checked, folder_of

PACKAGE = "vllm.model_executor.model_loader.reload"
RUNNERS = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
BEGIN, END = "initialize_layerwise_reload", "finalize_layerwise_reload"


@dataclass
class Mixed:
    """A model of which some weights may be new and others old.

    new     names of modules that may have new ones since vLLM loaded weights, which failed
    noting  whether vLLM notes what comes, and none of that is in `new` yet
    """

    new: set[str] = field(default_factory=set)
    noting: bool = False


_mixed: WeakKeyDictionary[nn.Module, Mixed] = WeakKeyDictionary()


def awaits(parameter: nn.Parameter, numbers: int) -> None:
    """Tell vLLM how many numbers of files come for a parameter. Loading weights again, it counts them, and prepares a
    layer when all have come, or at the end; till then the layer is on meta, and vLLM keeps what came."""
    parameter.weight_loader_numel = numbers


def _counts_what_is_awaited() -> bool:
    """Whether this vLLM looks at what `awaits` says."""
    from vllm.model_executor.model_loader.reload.utils import get_layer_size

    layer = nn.ParameterList([torch.empty(0)])
    awaits(layer[0], 1)
    return get_layer_size(layer) == 1


def is_announced(param: Tensor) -> bool:
    """Whether vLLM only counts the numbers of a tensor, and brings it again when the layer is complete."""
    return param.is_meta


def announce(tensor: Tensor) -> None:
    """Have vLLM count the numbers of `tensor`: it counts what is copied."""
    torch.empty(tensor.shape, device="meta").copy_(tensor)


def check_reloads() -> None:
    """Have weights that are loaded again checked in this process, a folder before anything is replaced; and have
    requests refused while a model has new and old ones."""
    for name in RUNNERS:
        runner = getattr(sys.modules.get(name), "GPUModelRunner", None)
        if hasattr(runner, "reload_weights") and not hasattr(runner.reload_weights, "checks"):
            runner.reload_weights = _checking(runner.reload_weights)
    worker = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)
    if worker is not None and not hasattr(worker.execute_model, "checks") and _counts_what_is_awaited():
        worker.execute_model = _refusing(worker.execute_model)
        worker.finish_weight_update = _closing(worker.finish_weight_update)
        for place in (sys.modules.get(name) for name in (PACKAGE, f"{PACKAGE}.inplace", *RUNNERS)):
            if hasattr(place, BEGIN):
                setattr(place, BEGIN, _beginning(getattr(place, BEGIN)))
                setattr(place, END, _ending(getattr(place, END)))


def _checking(reload: Callable[..., None]) -> Callable[..., None]:
    def reload_weights(self, weights_iterator=None, weights_path=None, is_checkpoint_format=True) -> None:
        config = self.vllm_config.quant_config
        if config is not None and config.get_name() == NAME:
            if not is_checkpoint_format:
                raise NotImplementedError(
                    "is_checkpoint_format=False: 4-bit layers keep their weights in a layout of their own, in which no "
                    "tensors come: leave it out, and send tensors as files have them"
                )
            if not _counts_what_is_awaited():
                raise NotImplementedError(
                    f"reload_weights: vLLM {vllm.__version__} prepares a layer as soon as its parameters are full, and "
                    "those of 4-bit experts are empty: serve with vLLM 0.31 or newer, or start the server again"
                )
            if weights_iterator is None and config.converted is not None:
                raise NotImplementedError(
                    f"reload_weights: the files were {config.form}, which is converted once, when the server starts: "
                    "serve the folder that moe-nvfp4 quantize SRC DST writes, or start the server again"
                )
            if weights_iterator is not None:
                weights_iterator = checked(weights_iterator, config.info)
            else:
                model, load = self.vllm_config.model_config, self.vllm_config.load_config
                where = (weights_path, None) if weights_path is not None else (model.model, model.revision)
                # the server's own may hold other files by now; what another hub has is not compared
                folder = where[0] if envs.VLLM_USE_MODELSCOPE else folder_of(*where, load.download_dir)
                check_others(folder, load.load_format)
                made_for = None
                if config.info is not None and "activations" not in told(model.hf_config):
                    made_for = config.activations or config.info.activations
                check_folder(folder, config.info, model.model, made_for)
        reload(self, weights_iterator, weights_path, is_checkpoint_format)

    reload_weights.checks = True  # type: ignore[attr-defined]
    return reload_weights


def _refusing(execute: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(self, scheduler_output: Any) -> Any:
        if _mixed and scheduler_output.total_num_scheduled_tokens:
            draft = getattr(self, "get_draft_model", lambda: None)()
            if any(model in _mixed for model in (self.get_model(), draft) if model is not None):
                raise RuntimeError(
                    "weights of this model are being loaded again, or that has failed: some may be new and others old, "
                    "which answers no request. Load all of them again, or start the server again"
                )
        return execute(self, scheduler_output)

    execute_model.checks = True  # type: ignore[attr-defined]
    return execute_model


def _closing(finish: Callable[..., None]) -> Callable[..., None]:
    def finish_weight_update(self) -> None:
        try:
            finish(self)
        except BaseException:  # as vLLM does where a part of a transfer fails: else it would never begin another one
            self._weight_update_active = False
            if self.weight_transfer_engine is not None:
                self.weight_transfer_engine.reset_weight_update_target()
            raise

    return finish_weight_update


def _beginning(begin: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def initialize_layerwise_reload(model: nn.Module) -> None:
        if not any(hasattr(layer, "nvfp4") for layer in model.modules()):
            return begin(model)
        for layer in model.modules():
            if hasattr(layer, "nvfp4"):
                layer.quant_method.begin()
        mixed = _mixed.setdefault(model, Mixed())
        _put_back(model, mixed)
        mixed.noting = True
        begin(model)

    return initialize_layerwise_reload


def _ending(end: Callable[..., None]) -> Callable[..., None]:
    def finalize_layerwise_reload(model: nn.Module, *others: Any, **named: Any) -> None:
        if (mixed := _mixed.get(model)) is None:
            return end(model, *others, **named)
        if not mixed.noting:
            raise ValueError("loading weights again failed before: begin once more, with all weights")
        for name, layer, info in _infos(model):
            _check(name, layer, info)
        came = _came(model)
        left = sorted(mixed.new - came)
        mixed.new, mixed.noting = mixed.new | came, False
        if left:
            raise ValueError(
                f"{left[0]}: it and {len(left) - 1} other modules had new weights when loading failed, and did not "
                "come now: load all weights, or start the server again"
            )
        end(model, *others, **named)
        for name, layer in model.named_modules():
            # a head that is tied to the embedding, of which vLLM has a packed copy on a CPU
            if name not in came and hasattr(layer, "cpu_linear") and isinstance(layer, VocabParallelEmbedding):
                layer.quant_method.process_weights_after_loading(layer)
        del _mixed[model]

    return finalize_layerwise_reload


def _infos(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """(name, module, what vLLM notes of its weights while they are loaded again)."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return ((name, layer, get_layerwise_info(layer)) for name, layer in model.named_modules())


def _came(model: nn.Module) -> set[str]:
    """The names of modules whose weights have come, or a part of them."""
    return {name for name, _, info in _infos(model) if not info.can_load() or info.load_numel > 0}


def _put_back(model: nn.Module, mixed: Mixed) -> None:
    """Undo what vLLM did to load weights, which has failed: modules get the tensors that they had, where these were not
    replaced, and what was kept for them is dropped."""
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors

    if mixed.noting:
        mixed.new |= _came(model)
    for _, layer, info in _infos(model):
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def files_have(layer: nn.Module, name: str) -> bool:
    """Whether files have a parameter of this name for a layer of vLLM: a weight or a bias. Scales of caches, and those
    that vLLM's methods for other formats have, are optional."""
    method = getattr(layer, "quant_method", None)
    of_weights = name in ("bias", "weight") or name.endswith(("_bias", "_weight"))
    return (method is None or of_weights) and not isinstance(method, BaseKVCacheMethod)


def _check(name: str, layer: nn.Module, info: Any) -> None:
    """ValueError if some of a module's weights have come and others have not: vLLM would take these from memory as it
    was allocated. 4-bit layers look for theirs."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, get_numel_loaded
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    needed = {last: p for last, p in layer.named_parameters(recurse=False) if files_have(layer, last)}
    if not info.can_load() or not info.load_numel or hasattr(layer, "nvfp4") or not needed:
        return
    came: Counter[str] = Counter()
    for last, args in info.loaded_weights:
        came[last] += get_numel_loaded(_get_original_loader(getattr(layer, last)), args)[0]
    for last, p in needed.items():
        if last in SKIP_LOAD_TENSORS or not p.is_meta:
            continue
        # rows of an embedding are filled up to a number that kernels want
        whole = 1 if isinstance(layer, VocabParallelEmbedding) else get_tensor_load_numel(p)
        if came[last] < whole:
            raise ValueError(
                f"{name}.{last}: all or a part did not come with the new weights, and others of {name} did: send all "
                "of a layer, or start the server again with the new files"
            )
