"""Run a model layer by layer, each over all the data, with the weights of one decoder layer in memory.

    source = LayerFiles.open("Qwen3-30B-A3B", device="cuda")
    walk = LayerWalk(source.model, source.use_layers("model.layers"), batches, "cuda")
    for i in range(len(source.layers)):
        source.load(i)
        walk.run(i)       # all batches; hooks on the layer's modules see its inputs
        source.drop(i)

For each layer the model's own forward runs, so that masks, positions and whatever else a family passes to its layers
are right. The layers in front return at once, the last of them its output of the run before; behind the layer the run
ends. What a layer puts into a mapping that the model hands to all of them (Gemma 4's shared keys and values) is put
there again for the layers behind it.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import guard_torch_init_functions
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from moe_nvfp4.integrations.huggingface.converters import model_conversions
from moe_nvfp4.quantize.dense import dense_tensors
from moe_nvfp4.quantize.files import Checkpoint, identity_experts, open_checkpoint
from moe_nvfp4.quantize.layouts.base import Given
from moe_nvfp4.quantize.model import ModelTensors, class_of, own_code
from moe_nvfp4.quantize.settings import language_config
from moe_nvfp4.quantize.source import model_dtype, nvfp4_info


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


def layer_number(name: str, layers: str) -> int | None:
    """The number of the layer, in the list `layers`, that the module or tensor `name` is in; None: it is in none."""
    inside = name.removeprefix(f"{layers}.")
    return None if inside == name else int(inside.split(".")[0])


@contextmanager
def stand_in(functions: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    """Call functions in place of the forward methods of modules."""
    before = []
    try:
        for module, function in functions:
            whole: Any = module
            before.append((whole, vars(whole).get("forward")))  # accelerate's, which moves tensors to the module
            whole.forward = function
        yield
    finally:
        for whole, own in before:
            del whole.forward
            if own is not None:
                whole.forward = own


def positions(config: Any) -> int | None:
    """The number of tokens in a row that the model of `config` is made for; None: it does not say."""
    found = getattr(language_config(config), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def check_batches(batches: Sequence[Tensor], config: Any) -> None:
    """ValueError unless `batches` are tensors of token ids of the model of `config`, and there is one."""
    if not hasattr(batches, "__len__") or not len(batches):
        raise ValueError(f"batches are a list of token ids, int64 [B, T], and this {type(batches).__name__} has none")
    for ids in batches:
        check_ids(ids, config)


def check_ids(ids: Tensor, config: Any) -> None:
    """ValueError unless token ids [B, T] are of the vocabulary of the model of `config`, and T has positions in it."""
    if not isinstance(ids, Tensor):
        raise ValueError(f"a {type(ids).__name__} is given, where token ids are expected, int64 [B, T]")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        raise ValueError(f"token ids are int64 or int32 [B, T], not {ids.dtype} {list(ids.shape)}")
    vocabulary, most = language_config(config).vocab_size, positions(config)
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"token ids from {int(ids.min())} to {int(ids.max())}, the model has 0 to {vocabulary - 1}: "
                         "use its own tokenizer")  # fmt: skip
    if most is not None and ids.shape[1] > most:
        raise ValueError(f"{ids.shape[1]} tokens in a row, the model is made for {most} (max_position_embeddings): cut "
                         "the text into shorter windows")  # fmt: skip


def unwrapped(model: nn.Module) -> Any:
    """The transformers model inside `model`, which PEFT or torch.compile may have wrapped; `model` if there is none."""
    return next((m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)), model)


def reads_ids(model: nn.Module) -> nn.Module:
    """The module to call with token ids alone: the model, or the body of a decision model, whose head also wants to
    know where questions are. NotImplementedError for several models in one, such as Qwen3-Omni."""
    inside = unwrapped(model)
    if type(inside).forward is nn.Module.forward:
        parts = ", ".join(f"{name} ({type(part).__name__})" for name, part in inside.named_children())
        raise NotImplementedError(
            f"{type(inside).__name__} has no forward, as it is several models in one: {parts}. Load one of them by its "
            "class, from_pretrained(folder, quantization_config=checkpoint_config(folder).quantization_config)"
        )
    return inside.base_model if hasattr(inside, "decide") else model


class LayerWalk:
    """Runs the layers of `model` one by one over all `batches` of token ids, int64 [B, T]. ValueError for ids that the
    model does not take.

    states  by batch, on the host: the output of the last layer that ran, and what the layers so far have put into each
            mapping among their arguments; None before the first
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList, batches: Sequence[Tensor], device: torch.device | str):
        check_batches(batches, model.config)
        self.model, self.layers, self.batches, self.device = model, layers, batches, device
        self.states: list[tuple[Any, dict[str, dict]]] | None = None

    @torch.no_grad()
    def run(self, i: int) -> None:
        """Run layer i; the last that ran must be layer i - 1."""
        states = []
        for b in range(len(self.batches)):
            states.append(tree_map(_to("cpu"), self.run_batch(i, b)))
        self.states = states

    @torch.no_grad()
    def run_head(self, head: nn.Module) -> None:
        """Run what follows the last layer, which ran before, until `head`, a linear, is called: its hooks see its
        inputs, but it does not run."""
        assert self.states is not None, "all layers ran"

        def stop(*args: Any) -> None:
            raise _LayerDone

        outputs = [output for output, _ in self.states]
        handle = head.register_forward_pre_hook(stop)
        try:
            for ids, output in zip(self.batches, outputs, strict=True):
                self._replay_all(ids.to(self.device), output)
        finally:
            handle.remove()

    def _replay_all(self, ids: Tensor, output: Any) -> None:
        replay = lambda *args, **kwargs: tree_map(_to(self.device), output)
        with stand_in((module, replay) for module in self.layers), suppress(_LayerDone):
            reads_ids(self.model)(input_ids=ids, use_cache=False)

    @torch.no_grad()
    def run_batch(self, i: int, b: int) -> tuple[Any, dict[str, dict]]:
        """Run layer i over one batch: its state, on the device. `states` stay as they are."""
        done: list[tuple[Any, dict[str, dict]]] = []
        before_output, before_shared = (None, {}) if self.states is None else self.states[b]
        running = self.layers[: i + 1]
        forward = running[i].forward

        def replay(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Layers of GLM-5 return a tuple, which the model unpacks
            return hidden_states if isinstance(before_output, Tensor) else replay_last()

        def replay_last(*args: Any, **kwargs: Any) -> Any:
            return tree_map(_to(self.device), before_output)

        def run(*args: Any, **kwargs: Any) -> Any:
            mappings = {key: value for key, value in kwargs.items() if isinstance(value, MutableMapping)}
            given = {key: set(mapping) for key, mapping in mappings.items()}
            for key, own in before_shared.items():
                mappings[key].update(tree_map(_to(self.device), own))
            output = forward(*args, **kwargs)
            added = {key: {k: v for k, v in m.items() if k not in given[key]} for key, m in mappings.items()}
            done.append((output, {key: own for key, own in added.items() if own}))
            raise _LayerDone

        functions = [run if j == i else replay_last if j == i - 1 else replay for j in range(i + 1)]
        with stand_in(zip(running, functions, strict=True)), suppress(_LayerDone):
            reads_ids(self.model)(input_ids=self.batches[b].to(self.device), use_cache=False)
            raise NotImplementedError(
                f"{type(self.model).__name__} does not run its layers in order: use a recipe without data (mse)"
            )
        return done[0]


def _to(device: torch.device | str) -> Any:
    return lambda value: value.to(device) if isinstance(value, Tensor) else value


def on_meta(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """A dense model of the class `kind` on the meta device, with a copy of `config`."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return kind._from_config(config, dtype=dtype)


class LayerFiles:
    """A model whose layers are loaded from its files one at a time.

    checkpoint  what the files hold: dense weights, or FP8 in blocks or MXFP4, which are dequantized as they are read
    model       the model, given on meta; after `use_layers` everything but its layers is loaded
    names       how tensors in files are named in the model
    layers      the list of layers given to `use_layers`

    ValueError where the files lack a tensor of the model.
    """

    def __init__(self, checkpoint: Checkpoint, model: Any, device: torch.device | str, as_saved: bool = False):
        self.checkpoint, self.model, self.device = checkpoint, model.eval(), torch.device(device)
        self.dtype = model.dtype
        self._tensors = dense_tensors(checkpoint)
        self._conversions = model_conversions(model, loading=True)
        self.names = ModelTensors(model, self._conversions, as_saved)
        given = {name: Given(found.dtype, found.shape, found.file.name) for name, found in self._tensors.items()}
        self.names.check(given)
        for e in identity_experts(checkpoint.config):  # of which the module has rows that nothing reads
            for name, first in [*self._tensors.items()]:
                if re.search(r"\.experts\.0\.(gate|up)_proj\.weight$", name):
                    zeros = partial(torch.zeros, first.shape, dtype=self.dtype)
                    self._tensors[name.replace(".experts.0.", f".experts.{e}.")] = replace(first, read=zeros)

    @classmethod
    def open(cls, folder: str | os.PathLike, device: torch.device | str) -> LayerFiles:
        """The model that the config.json in `folder` describes."""
        checkpoint = open_checkpoint(folder)
        if nvfp4_info(checkpoint) is not None:
            raise ValueError(f"{folder} is quantized already (NVFP4): recipes that use data need the original")
        with own_code(folder):
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = class_of(config)
        if kind is None:
            raise ValueError(f"transformers {transformers.__version__} has no model {config.architectures}")
        return cls(checkpoint, on_meta(kind, config, model_dtype(checkpoint)), device, as_saved=True)

    @property
    def exact(self) -> bool:
        """Whether files hold weights that NVFP4 holds without a loss (MXFP4)."""
        return any(tensor.exact for tensor in self._tensors.values())

    def use_layers(self, name: str) -> nn.ModuleList:
        """Load everything except the layers of the list `name`. Returns that list."""
        self.name = name
        self._layer_of: dict[str, int | None] = {}
        for tensor in self._tensors:
            target, _ = self.names.place(tensor)
            self._layer_of[tensor] = layer_number(target, name)
        self._load(None)
        self._tie()
        self.layers = self.model.get_submodule(name)
        assert isinstance(self.layers, nn.ModuleList)
        self._initialize(set(self.model.modules()) - set(self.layers.modules()))
        return self.layers

    def load(self, i: int) -> None:
        """Load layer i onto the device."""
        self._load(i)
        missing = [name for name, t in self.layers[i].state_dict().items() if t.is_meta]
        if missing:
            raise ValueError(f"{self.name}.{i}.{missing[0]} cannot be read: download the checkpoint again")
        self._initialize(set(self.layers[i].modules()))

    def drop(self, i: int) -> None:
        """Free the memory of layer i."""
        self.layers[i].to("meta")

    def _load(self, i: int | None) -> None:
        names = [name for name, layer in self._layer_of.items() if layer == i]
        config = LoadStateDictConfig(
            device_map={"": self.device}, dtype=self.dtype, weight_mapping=self._conversions,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
        )  # fmt: skip
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            state = {name: self._tensors[name] for name in names}
            convert_and_load_state_dict_in_model(self.model, state, config)
        finally:
            if shown:
                logging.enable_progress_bar()

    def _tie(self) -> None:
        """Give a parameter that the files lack the one that it is tied to, whichever of the two they have."""
        there = {name: p for name, p in self.model.named_parameters(remove_duplicate=False) if not p.is_meta}
        for pair in self.names.tied.items():
            for absent, present in (pair, pair[::-1]):
                if absent not in there and present in there:
                    module, _, last = absent.rpartition(".")
                    setattr(self.model.get_submodule(module), last, there[present])

    def _initialize(self, modules: set[nn.Module]) -> None:
        """Have transformers compute what files do not have (the frequencies of RoPE), as after loading a whole model:
        it leaves alone what was loaded, but for the few buffers that a family always sets (ZAYA's router)."""
        for module in modules:
            empty = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
            module._buffers.update({name: torch.empty_like(b, device=self.device) for name, b in empty.items()})

        def visit(module: nn.Module, owner: Any) -> None:
            owner = module if isinstance(module, transformers.PreTrainedModel) else owner
            for child in module.children():
                visit(child, owner)
            if module in modules:
                owner._init_weights(module)

        with torch.no_grad(), guard_torch_init_functions():
            visit(self.model, self.model)
