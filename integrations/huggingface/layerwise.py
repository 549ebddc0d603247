"""Run a model layer by layer, each over all the data, with the weights of one decoder layer in memory.

    source = LayerFiles("Qwen3-30B-A3B", device="cuda")
    walk = LayerWalk(source.model, source.layers, batches)
    for i in range(len(source.layers)):
        source.load(i)
        walk.run(i)       # all batches; hooks on the layer's modules see its inputs
        source.drop(i)

For each layer the model's own forward runs, so that masks, positions and whatever else a family passes to its layers
are right. The layers in front return at once, the last of them its output of the run before; behind the layer the run
ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.core_model_loading import WeightConverter, convert_and_load_state_dict_in_model, rename_source_key
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from moe_nvfp4.integrations.huggingface.converters import model_conversions
from moe_nvfp4.quantize.files import open_checkpoint


class _LayerDone(Exception):
    pass


def decoder_layers(model: nn.Module, experts: Iterable[str]) -> tuple[str, nn.ModuleList]:
    """The name of the list of layers that contains the modules named `experts`, and the list."""
    found = {_first_list(model, name) for name in experts}
    if len(found) != 1 or None in found:
        raise NotImplementedError(
            f"{type(model).__name__} does not have all its experts in one list of layers, so it cannot be run layer "
            "by layer: use a recipe without data (mse)"
        )
    name = str(found.pop())
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    return name, layers


def _first_list(model: nn.Module, name: str) -> str | None:
    parts = name.split(".")
    above = (".".join(parts[:i]) for i in range(1, len(parts)))
    return next((a for a in above if isinstance(model.get_submodule(a), nn.ModuleList)), None)


class LayerWalk:
    """Runs the layers of `model` one by one over all `batches` of token ids, int64 [B, T].

    states  the outputs of the last layer that ran, by batch, on the host; None before the first
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList, batches: Sequence[Tensor], device: torch.device | str):
        self.model, self.layers, self.batches, self.device = model, layers, batches, device
        self.states: list[Any] | None = None

    @torch.no_grad()
    def run(self, i: int) -> None:
        """Run layer i; the last that ran must be layer i - 1."""
        states = []
        for b, ids in enumerate(self.batches):
            states.append(tree_map(_to("cpu"), self._run(i, b, ids.to(self.device))))
        self.states = states

    def _run(self, i: int, b: int, ids: Tensor) -> Any:
        output: list[Any] = []
        running = self.layers[: i + 1]
        forward = running[i].forward
        before = [vars(module).get("forward") for module in running]  # accelerate's, which moves tensors to the layer

        def replay(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Layers of GLM-5 return a tuple, which the model unpacks
            return hidden_states if self.states and isinstance(self.states[b], Tensor) else replay_last()

        def replay_last(*args: Any, **kwargs: Any) -> Any:
            assert self.states is not None
            return tree_map(_to(self.device), self.states[b])

        def run(*args: Any, **kwargs: Any) -> Any:
            output.append(forward(*args, **kwargs))
            raise _LayerDone

        for j, module in enumerate(running):
            module.forward = run if j == i else replay_last if j == i - 1 else replay
        try:
            self.model(input_ids=ids, use_cache=False)
        except _LayerDone:
            return output[0]
        finally:
            for module, own in zip(running, before, strict=True):
                del module.forward
                if own is not None:
                    module.forward = own
        raise NotImplementedError(
            f"{type(self.model).__name__} does not run its layers in order: use a recipe without data (mse)"
        )


def _to(device: torch.device | str) -> Any:
    return lambda value: value.to(device) if isinstance(value, Tensor) else value


class LayerFiles:
    """The model of a dense checkpoint folder, whose layers are loaded from the files one at a time.

    checkpoint  what the folder holds
    model       the model; after `use_layers` everything but its layers is loaded, and these are empty, on meta
    layers      the list of layers given to `use_layers`
    """

    def __init__(self, folder: str | os.PathLike, device: torch.device | str, dtype: torch.dtype | None = None):
        config = transformers.AutoConfig.from_pretrained(folder)
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(f"{folder} is quantized already: data-driven recipes need the dense original")
        known = [getattr(transformers, name, None) for name in config.architectures or ()]
        if not known or known[0] is None:
            raise ValueError(f"transformers {transformers.__version__} has no model {config.architectures}")
        dtype = dtype or config.dtype or torch.bfloat16
        with torch.device("meta"):
            self.model = known[0]._from_config(config, dtype=dtype).eval()
        self.device, self.dtype = torch.device(device), dtype
        self.checkpoint = open_checkpoint(folder)
        self._conversions = model_conversions(self.model, loading=True)

    def use_layers(self, name: str) -> nn.ModuleList:
        """Load everything except the layers of the list `name`. Returns that list."""
        self.name = name
        converters = [c for c in self._conversions if isinstance(c, WeightConverter)]
        renamings = [c for c in self._conversions if not isinstance(c, WeightConverter)]
        state, prefix = self.model.state_dict(), self.model.base_model_prefix
        self._layer_of: dict[str, int | None] = {}
        for tensor in self.checkpoint.tensors:
            target, _ = rename_source_key(tensor, renamings, converters, prefix, state)
            inside = target.removeprefix(f"{name}.") if target.startswith(f"{name}.") else ""
            self._layer_of[tensor] = int(inside.split(".")[0]) if inside else None
        self._load(None)
        self.layers = self.model.get_submodule(name)
        assert isinstance(self.layers, nn.ModuleList)
        in_layers = set(self.layers.modules())
        for module in self.model.modules():
            if module not in in_layers:
                self._fill_buffers(module)
        return self.layers

    def load(self, i: int) -> None:
        """Load layer i onto the device. ValueError where the files lack a part of it."""
        self._load(i)
        missing = [name for name, p in self.layers[i].named_parameters() if p.is_meta]
        if missing:
            raise ValueError(f"{self.name}.{i}.{missing[0]} is missing: download the checkpoint again")
        for module in self.layers[i].modules():
            self._fill_buffers(module)

    def drop(self, i: int) -> None:
        """Free the memory of layer i."""
        self.layers[i].to("meta")

    def _load(self, i: int | None) -> None:
        names = [name for name, layer in self._layer_of.items() if layer == i]
        stored = self.checkpoint.tensors
        opened = {file: safe_open(file, framework="pt") for file in {stored[name].file for name in names}}
        config = LoadStateDictConfig(
            device_map={"": self.device}, dtype=self.dtype, weight_mapping=self._conversions,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
        )  # fmt: skip
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            state = {name: opened[stored[name].file].get_slice(name) for name in names}
            convert_and_load_state_dict_in_model(self.model, state, config)
        finally:
            if shown:
                logging.enable_progress_bar()

    def _fill_buffers(self, module: nn.Module) -> None:
        """Have transformers compute the buffers that files do not have (the frequencies of RoPE)."""
        empty = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
        module._buffers.update({name: torch.empty_like(b, device=self.device) for name, b in empty.items()})
        if empty:
            self.model._init_weights(module)  # which leaves alone what was loaded
