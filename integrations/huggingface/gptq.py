"""Recipes that need a text (``gptq``, ``distill``), one decoder layer at a time, of models in memory and of files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn

from moe_nvfp4._version import __version__
from moe_nvfp4.integrations.huggingface.calibration import dense_modules, evaluating, linears_by_layer
from moe_nvfp4.integrations.huggingface.distill import Distillation, check_learnable
from moe_nvfp4.integrations.huggingface.hessians import ENOUGH, Fused, HessianSums, Made, quantize_chosen
from moe_nvfp4.integrations.huggingface.layerwise import LayerFiles, LayerWalk, decoder_layers, layer_number
from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout
from moe_nvfp4.integrations.huggingface.statistics import watch, watch_linears
from moe_nvfp4.progress import progress_bar
from moe_nvfp4.quantize.codes import CodesFolder
from moe_nvfp4.quantize.convert import check_space, convert_checkpoint
from moe_nvfp4.quantize.files import StagingDir, lock, unlock
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import recipe_named
from moe_nvfp4.quantize.report import ConversionReport

SAVE_EVERY = 60.0  # seconds between writes of the states that an interrupted run resumes from

Modules: TypeAlias = dict[str, tuple[nn.Module, ModuleLayout]]


@dataclass(frozen=True)
class GptqReport:
    """What the experts saw.

    tokens   the tokens of all batches
    rows     module -> int64 [E], the rows that each expert learned from
    columns  module -> the columns of its widest matrix
    """

    tokens: int
    rows: dict[str, Tensor]
    columns: dict[str, int]

    def lines(self) -> Iterator[str]:
        """What to tell the user; nothing if every expert saw enough."""
        few = [(int(n), f"{module}.{e}") for module, rows in self.rows.items() for e, n in enumerate(rows)
               if n < ENOUGH * self.columns[module]]  # fmt: skip
        if not few:
            return
        few.sort()
        total, need = sum(map(len, self.rows.values())), ENOUGH * max(self.columns.values())
        yield (f"{len(few)} of {total} experts saw fewer than {ENOUGH} rows for each of their input columns "
               f"({need}); they lean on their layer's average, and on their columns alone: "
               + ", ".join(f"{name} ({n})" for n, name in few[:4]) + (", ..." if len(few) > 4 else ""))  # fmt: skip
        middle = max(1, few[len(few) // 2][0])
        yield f"{-(-self.tokens * need // middle):,} tokens of text, not {self.tokens:,}, would do for half of them"


def gptq_model(
    model: nn.Module,
    batches: Sequence[Tensor],
    activations: str = "bf16",
    exclude: Sequence[str] = (),
    progress: bool = True,
    recipe: str = "gptq",
    fused: Sequence[Fused] = (),
) -> dict[str, dict[str, Tensor]]:
    """`quantize_experts` for every dense experts module of a `model` in memory, and `quantize_chosen` for its linears
    `fused`: name -> its results, on the host.

    batches: token ids int64 [B, T]. For ``gptq``, each layer's inputs come from the dense layers in front of it; inputs
    from quantized layers made no measurable difference. Warns, with the numbers, where experts saw few tokens.
    """
    whole: Any = model
    modules = dense_modules(model, exclude)
    name, layers = decoder_layers(model, modules)
    quantizer = _quantizer(LayerWalk(model, layers, batches, whole.device), activations, recipe)
    made: dict[str, Made] = {}
    at = _layers_of(model, modules, fused, name, len(layers))
    with evaluating(model, by_autocast=False):
        for i in progress_bar(range(max(at) + 1), desc=recipe, unit="layer", show=progress):
            for module, tensors in _quantize_layer(quantizer, i, at.get(i, _Work()), {}):
                made[module] = {key: tensor.cpu() for key, tensor in tensors.items()}
    found = _report(batches, modules, {module: made[module]["rows"] for module in modules})
    if lines := list(found.lines()):
        warnings.warn(f"recipe {recipe}: " + "; ".join(lines), stacklevel=2)
    return made


def convert_gptq(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    batches: Sequence[Tensor],
    options: Options,
    workers: int | None = None,
    progress: bool = True,
    recipe: str = "gptq",
    card: str | None = None,
) -> tuple[ConversionReport, GptqReport]:
    """`convert_checkpoint` by a recipe that needs a text, from the checkpoint in folder `source`, dense or FP8.

    batches  token ids int64 [B, T], at least 8 for each expert and column; the report says where they were fewer
    options  with a recipe that needs nothing, which `recipe` replaces; its activations decide whether Hessians are
             those of quantized rows
    card     as for `convert_checkpoint`

    Finished work stays in `.NAME.RECIPE` next to the destination until the end; after an interruption or an error the
    same call resumes it.
    """
    began, destination = time.perf_counter(), Path(os.path.abspath(destination))
    planned = plan_gptq(source, destination, options, workers, recipe)  # raises now what it would later
    codes = CodesFolder(destination.parent / f".{destination.name}.{recipe}")
    begun = codes.folder, StagingDir(destination, {}).files
    twice = planned.experts_after + planned.linears_after  # codes are on disk twice
    check_space(destination, planned.bytes_after + twice, *begun)
    made = replace(options, recipe=recipe, codes=codes)
    codes.folder.mkdir(parents=True, exist_ok=True)
    held = lock(codes.folder / "lock", destination)
    try:
        with torch.autocast(options.place.type, enabled=False):
            chosen = planned.modules, planned.fused
            found = gptq_files(source, codes, batches, options, chosen, progress, recipe)
        report = convert_checkpoint(source, destination, made, workers, progress=progress, card=card)
        report.seconds = time.perf_counter() - began  # with all that the text took
        shutil.rmtree(codes.folder, ignore_errors=True)
    except BaseException:
        if not codes.modules:
            shutil.rmtree(codes.folder, ignore_errors=True)
        elif progress:
            print(f"{len(codes.modules)} layers of experts{' and linears' * bool(planned.fused)} are done, and lie in "
                  f"{codes.folder}: the same command goes on with them; remove that folder if you do not run it again",
                  file=sys.stderr)  # fmt: skip
        raise
    finally:
        unlock(held, codes.folder / "lock")
    return report, found


def plan_gptq(
    source: str | os.PathLike, destination: str | os.PathLike, options: Options, workers: int | None = None,
    recipe: str = "gptq",
) -> ConversionReport:  # fmt: skip
    """What `convert_gptq` will do. Raises what it would before it reads weights."""
    planned = replace(convert_checkpoint(source, destination, options, workers, dry_run=True), recipe=recipe)
    files, modules, *_ = _open(source, options.place, (planned.modules, planned.fused), recipe)
    name, layers = decoder_layers(files.model, modules)
    _layers_of(files.model, modules, planned.fused, name, len(layers))
    return planned


def gptq_files(
    source: str | os.PathLike,
    codes: CodesFolder,
    batches: Sequence[Tensor],
    options: Options,
    chosen: tuple[Sequence[str], Sequence[Fused]],
    progress: bool = True,
    recipe: str = "gptq",
) -> GptqReport:
    """Quantize experts and linears of the checkpoint in folder `source` into the folder `codes`.

    options: only activations and device matter; chosen: experts modules, as new files name them, and linears.
    One decoder layer at a time is on the device, with its experts' Hessians. The hidden states of all batches are on
    the host, and are written to disk from time to time. An interrupted run is resumed with the first layer that is not
    done, if `source` has not changed. ValueError if it changes meanwhile, and for a module that the model does not run.
    """
    place, fused = options.place, chosen[1]
    files, modules, name_in_files = _open(source, place, chosen, recipe)
    state = files.checkpoint.state()
    name, _ = decoder_layers(files.model, modules)
    layers = files.use_layers(name)
    quantizer = _quantizer(LayerWalk(files.model, layers, batches, place), options.activations, recipe)
    versions = [__version__, transformers.__version__, str(files.dtype)]
    key = [str(Path(source).resolve()), state, options.activations, [*modules], _digest(batches), versions]
    name_in_files |= {linear.model: linear.name for linears in fused for linear in linears}
    key += [linear.name for linears in fused for linear in linears]
    begun = _Begun(codes, key)
    left = {module: known for module, known in modules.items() if name_in_files[module] not in codes.modules}
    still = [f for f in fused if any(linear.name not in codes.modules for linear in f)]
    at, at_left = (_layers_of(files.model, m, still, name, len(layers)) for m in (modules, left))
    first, last = begun.resume(quantizer), max(at_left, default=-1)
    for i in progress_bar(
        range(first, last + 1), desc=recipe, unit="layer", show=progress, initial=first, total=last + 1
    ):
        if i < len(layers):
            files.load(i)
        work = at.get(i, _Work())
        done = {module: codes.load(name_in_files[module]) for module in work.modules if module not in left}
        for module, tensors in _quantize_layer(quantizer, i, work, done):
            codes.save(name_in_files[module], tensors)
        if i < len(layers):
            files.drop(i)
            begun.keep(i, quantizer)
    files.checkpoint.check_state(state)
    begun.drop_states()
    return _report(batches, modules, {module: codes.rows(name_in_files[module]) for module in modules})


def _open(
    source: str | os.PathLike, place: torch.device, chosen: tuple[Sequence[str], Sequence[Fused]], recipe: str
) -> tuple[LayerFiles, Modules, dict[str, str]]:
    """(The files of the model, its experts modules among those `chosen`, their names in files.)"""
    files = LayerFiles.open(source, place)
    if files.exact:
        raise ValueError(f"{source} is MXFP4, of which NVFP4 holds every value: recipe mse keeps them all, and "
                         f"{recipe} could only change them; use mse")  # fmt: skip
    name_in_files = _names_in_files(files, chosen[0])
    modules = {name: known for name, known in dense_modules(files.model).items() if name in name_in_files}
    if recipe_named(recipe).learned:
        for module, layout in modules.values():
            check_learnable(module, layout)
    return files, modules, name_in_files


def _names_in_files(files: LayerFiles, chosen: Sequence[str]) -> dict[str, str]:
    """Module of the model -> its name in files, for the modules `chosen`, which are named as in files."""
    found: dict[str, str] = {}
    for module in chosen:
        name = files.names.experts_module(module)
        if name is None:
            raise ValueError(f"{module} is not a part of {files.names.name}, so no text reaches it: leave it as it is "
                             f"(exclude {module}), or use a recipe without data (mse)")  # fmt: skip
        found[name] = module
    return found


def _report(batches: Sequence[Tensor], modules: Modules, rows: dict[str, Tensor]) -> GptqReport:
    widest = {module: max(layout.hidden_size, layout.intermediate_size) for module, (_, layout) in modules.items()}
    return GptqReport(sum(ids.numel() for ids in batches), rows, widest)


@dataclass
class _Work:
    """What is quantized after a layer ran; after the last layer, the output embedding is."""

    modules: Modules = field(default_factory=dict)
    fused: list[Fused] = field(default_factory=list)


def _layers_of(model: nn.Module, modules: Modules, fused: Sequence[Fused], name: str, count: int) -> dict[int, _Work]:
    """Group experts modules and linears by the number of their layer in the list `name` of `count` layers; the output
    embedding counts as one more. ValueError for linears elsewhere."""
    found: dict[int, _Work] = {}
    for module, known in modules.items():
        layer = layer_number(module, name)
        assert layer is not None, "decoder_layers looked"
        found.setdefault(layer, _Work()).modules[module] = known
    for linears in fused:
        placed = linears_by_layer(model, name, [linears[0].model])
        if not placed:
            raise ValueError(f"{linears[0].name} is in no decoder layer, so no text is followed to it: leave it out of "
                             "linears, or use another recipe (mse)")  # fmt: skip
        (at,) = placed
        found.setdefault(count if at is None else at, _Work()).fused.append(linears)
    return found


class _LayerByLayer:
    """Quantizes the experts of a model by a recipe for which each layer stands alone: `run` the layers in order."""

    def __init__(self, walk: LayerWalk, activations: str, recipe: str):
        self.walk, self.activations, self.recipe = walk, activations, recipe

    @property
    def states(self) -> Any:
        return self.walk.states

    @states.setter
    def states(self, states: Any) -> None:
        self.walk.states = states

    def run(
        self, i: int, modules: Modules, done: Mapping[str, Made], beside: AbstractContextManager
    ) -> Iterator[tuple[str, Made]]:
        """As `Distillation.run`."""
        left, sums = {name: known for name, known in modules.items() if name not in done}, HessianSums(self.activations)
        with watch(left, sums), beside:
            self.walk.run(i)
        for name, known in left.items():
            yield name, sums.quantize(name, *known, self.recipe, self.walk.device)


Quantizer: TypeAlias = "_LayerByLayer | Distillation"


def _quantizer(walk: LayerWalk, activations: str, recipe: str) -> Quantizer:
    return (Distillation if recipe_named(recipe).learned else _LayerByLayer)(walk, activations, recipe)


def _quantize_layer(quantizer: Quantizer, i: int, work: _Work, done: Mapping[str, Made]) -> Iterator[tuple[str, Made]]:
    """Run layer i, or what follows the last one, and quantize the experts and linears in it; not the experts `done`."""
    walk, sums = quantizer.walk, HessianSums(quantizer.activations)
    linears = {fused[0].model: walk.model.get_submodule(fused[0].model) for fused in work.fused}
    watching = watch_linears(linears, sums.linear)
    if i < len(walk.layers):
        yield from quantizer.run(i, work.modules, done, watching)
    else:
        (head,) = linears.values()
        with watching:
            walk.run_head(head)
    for linear, parameters in quantize_chosen(walk.model, work.fused, sums, quantizer.recipe):
        yield linear.model, parameters


def _digest(batches: Sequence[Tensor]) -> str:
    hashed = hashlib.sha256()
    for ids in batches:
        hashed.update(repr(list(ids.shape)).encode() + ids.contiguous().numpy().tobytes())
    return hashed.hexdigest()


class _Begun:
    """What an interrupted run left in the folder: key.json, which says what it worked on, and the states of a layer."""

    def __init__(self, codes: CodesFolder, key: list):
        self.folder, self.last_save = codes.folder, time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        text, file = json.dumps(key), self.folder / "key.json"
        if not file.is_file() or file.read_text() != text:
            for old in (*self.folder.glob("states-*"), *self.folder.glob("*.safetensors")):
                old.unlink()
            file.write_text(text)

    def resume(self, quantizer: Quantizer) -> int:
        """The number of the first layer that is left; `quantizer` gets the states of the one before."""
        saved = sorted(self.folder.glob("states-*"))
        if not saved:
            return 0
        quantizer.states = torch.load(saved[-1], weights_only=True)
        return int(saved[-1].name.removeprefix("states-")) + 1

    def keep(self, i: int, quantizer: Quantizer) -> None:
        if time.monotonic() - self.last_save >= SAVE_EVERY:
            part = self.folder / "partial"
            try:
                torch.save(quantizer.states, part)
            except RuntimeError as error:  # torch's, where the disk is full
                raise OSError(f"{part} cannot be written, as on a full disk: {error}") from None
            self.drop_states()
            os.replace(part, self.folder / f"states-{i:05d}")
            self.last_save = time.monotonic()

    def drop_states(self) -> None:
        for old in self.folder.glob("states-*"):
            old.unlink()
