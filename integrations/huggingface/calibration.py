"""Calibration data, and the importance of input columns that the recipe ``weighted`` learns from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from moe_nvfp4.devices import usable_device
from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.experts import ModuleLayout, find_experts
from moe_nvfp4.integrations.huggingface.layerwise import LayerFiles, LayerWalk, decoder_layers
from moe_nvfp4.integrations.huggingface.statistics import SquareSums, watch
from moe_nvfp4.progress import progress_bar
from moe_nvfp4.quantize.importance import Importance

# Token ids [n] or [B, T], or a text, or a list of either; None: random token ids.
Calibration: TypeAlias = "Tensor | Sequence[Tensor] | Sequence[str] | str | None"

TOGETHER = 16384  # tokens in a batch
RANDOM_WINDOWS, WINDOW = 8, 512  # random ids: 4096 tokens. More text changes nothing for `weighted`: docs/accuracy.md


def calibration_batches(calibration: Any, config: Any, tokenizer: str | os.PathLike | None = None) -> list[Tensor]:
    """Batches of token ids, int64 [B, T], from what a user gave.

    calibration  ids [T] or [B, T] or a list of them, a text or a list of texts, or None: random ids, always the same
    config       the model's config
    tokenizer    the folder or name of the tokenizer for texts

    ValueError for anything else, for no text, for the name of a file, and for ids that are not of this model.
    """
    vocabulary = config.get_text_config().vocab_size
    if calibration is None:
        return random_batches(config)
    one = isinstance(calibration, (str, Tensor, Mapping)) or not isinstance(calibration, Iterable)
    items: list[Any] = [calibration] if one else list(calibration)
    texts = [item for item in items if isinstance(item, str)]
    if others := [type(item).__name__ for item in items if not isinstance(item, str if texts else Tensor)]:
        raise ValueError(f"calibration: {others[0]} is given, where tensors of token ids, or texts, are expected")
    if files := [text for text in texts if text.endswith(".safetensors") or os.path.exists(text)]:
        raise ValueError(f"calibration: {files[0]!r} names a file, and would be read as a text: give the text in it, "
                         "or pathlib.Path(...) for a file of moe-nvfp4 importance")  # fmt: skip
    if texts:
        items = _windows(items, tokenizer)
    batches = [item[None] if item.dim() == 1 else item for item in items]
    for ids in batches:
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
            raise ValueError(f"calibration: token ids are int64 or int32 [B, T], not {ids.dtype} {list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(f"calibration: ids from {int(ids.min())} to {int(ids.max())}, the model has 0 to "
                             f"{vocabulary - 1}: use its own tokenizer")  # fmt: skip
    if not batches:
        raise ValueError("calibration: there is no text: give some, or None for random token ids")
    return batches


def random_batches(config: Any, windows: int = RANDOM_WINDOWS, window: int = WINDOW) -> list[Tensor]:
    """Batches of `windows` windows of `window` random token ids for the model of `config`; always the same ids."""
    generator = torch.Generator().manual_seed(0)
    return in_batches(torch.randint(config.get_text_config().vocab_size, (windows, window), generator=generator))


def in_batches(windows: Tensor) -> list[Tensor]:
    """Split token ids [n, T] into batches of at most `TOGETHER` tokens, but at least one window."""
    return list(windows.split(max(1, TOGETHER // windows.shape[1])))


def _windows(texts: Iterable[str], tokenizer: str | os.PathLike | None) -> list[Tensor]:
    """Tokenize texts into ids [1, at most 512]."""
    from transformers import AutoTokenizer

    if not tokenizer:
        raise ValueError("calibration: the model does not say where it came from, so texts need its tokenizer: give "
                         "token ids instead")  # fmt: skip
    encode = AutoTokenizer.from_pretrained(tokenizer)
    pieces = [encode(text, return_tensors="pt").input_ids for text in texts]
    return [window for ids in pieces for window in ids.split(WINDOW, dim=1) if window.numel()]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which `model` is in eval mode, without dropout. Afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def model_importance(
    model: nn.Module, batches: Sequence[Tensor], exclude: Iterable[str] = (), progress: bool = True
) -> Importance:
    """The importance of the dense experts of a `model` in memory, from a forward pass over batches of ids [B, T]."""
    modules = dense_modules(model, exclude)
    sums = SquareSums()
    whole: Any = model
    with evaluating(model), watch(modules, sums), torch.no_grad():
        for ids in progress_bar(batches, desc="importance", unit="batch", show=progress):
            whole(input_ids=ids.to(whole.device), use_cache=False)
    return sums.importance()


def files_importance(
    folder: str | os.PathLike,
    batches: Sequence[Tensor],
    exclude: Iterable[str] = (),
    device: str | None = None,
    progress: bool = True,
) -> Importance:
    """The importance of the experts of the dense checkpoint in `folder`, one decoder layer in memory at a time."""
    place = usable_device(device)
    files = LayerFiles(folder, place)
    modules = dense_modules(files.model, exclude)
    name, _ = decoder_layers(files.model, modules)
    layers = files.use_layers(name)
    walk, sums = LayerWalk(files.model, layers, batches, place), SquareSums()
    last = max(int(module.removeprefix(f"{name}.").split(".")[0]) for module in modules)
    with watch(modules, sums):
        for i in progress_bar(range(last + 1), desc="importance", unit="layer", show=progress):
            files.load(i)
            walk.run(i)
            files.drop(i)
    return sums.importance()


def dense_modules(model: nn.Module, exclude: Iterable[str] = ()) -> dict[str, tuple[nn.Module, ModuleLayout]]:
    """The dense experts of `model` that `exclude` does not match, by name, each once. ValueError if there are none."""
    found: dict[int, tuple[str, nn.Module, ModuleLayout]] = {}
    for name, module, layout in find_experts(model, MoeNvfp4Config(exclude=list(exclude)), required=False):
        if layout is not None:
            found.setdefault(id(module), (name, module, layout))
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts to quantize, or all of them are excluded")
    return {name: (module, layout) for name, module, layout in found.values()}
