"""Recipes that need a text (``gptq``), one decoder layer at a time: Hessians of the inputs of experts and linears, then
codes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn

from moe_nvfp4 import format as nvfp4
from moe_nvfp4._version import __version__
from moe_nvfp4.integrations.huggingface.calibration import dense_modules, evaluating, linears_by_layer
from moe_nvfp4.integrations.huggingface.experts import ModuleLayout, dense_experts
from moe_nvfp4.integrations.huggingface.layerwise import LayerFiles, LayerWalk, decoder_layers
from moe_nvfp4.integrations.huggingface.linears import quantize_fused
from moe_nvfp4.integrations.huggingface.statistics import watch, watch_linears
from moe_nvfp4.progress import progress_bar
from moe_nvfp4.quantize.codes import CodesFolder
from moe_nvfp4.quantize.convert import check_space, convert_checkpoint
from moe_nvfp4.quantize.files import StagingDir, lock, unlock
from moe_nvfp4.quantize.linears import Linear
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import better, quantize_matrix, recipe_named
from moe_nvfp4.quantize.report import ConversionReport
from moe_nvfp4.weights import is_four_over_six, is_quantized

ENOUGH = 8  # rows for each column of a Hessian; with fewer, gptq overfits to the calibration text
SAVE_EVERY = 60.0  # seconds between writes of the states that an interrupted run resumes from
HELD_OUT = 8  # one row of so many is kept from an expert's sums, to judge what was made from them
MOST_HELD = 256  # rows of an expert that are kept from its sums
TOGETHER = 1 << 29  # elements of experts that are quantized at once

Modules: TypeAlias = dict[str, tuple[nn.Module, ModuleLayout]]
Fused: TypeAlias = tuple[Linear, ...]  # linears that share a global scale, and read the same rows


@dataclass
class _Sums:
    x: Tensor  # fp32 [E, H, H]
    h: Tensor  # fp32 [E, I, I]
    rows: Tensor  # int64 [E], rows in the sums
    held_x: list[Tensor]  # of each expert: rows [n, H] that are not in the sums
    held_h: list[Tensor]  # rows [n, I]


@dataclass
class _LinearSums:
    x: Tensor  # fp32 [K, K]
    rows: int  # rows in the sum
    held: Tensor  # rows [n, K] that are not in the sum


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


class HessianSums:
    """A visitor (`statistics.watch`) that adds up x x^T and h h^T of every expert, and keeps the last rows of each
    call, an eighth, to judge by.

    activations: with those of W4A4, rows are quantized first, as the layer will quantize them.
    """

    def __init__(self, activations: str = "bf16"):
        self.activations = activations
        self.layers: dict[str, _Sums] = {}
        self.linears: dict[str, _LinearSums] = {}

    def __call__(self, name: str, layout: ModuleLayout, e: int, x: Tensor, h: Tensor) -> None:
        if name not in self.layers:
            self.layers[name] = _no_rows(layout, x.device)
        sums = self.layers[name]
        n = len(x) - min(len(x) // HELD_OUT, MOST_HELD - len(sums.held_x[e]))
        for total, held, rows in ((sums.x[e], sums.held_x, x), (sums.h[e], sums.held_h, h)):
            rows = self._as_multiplied(rows)
            total.addmm_(rows[:n].T, rows[:n])
            held[e] = torch.cat([held[e], rows[n:]])
        sums.rows[e] += n

    def linear(self, name: str, x: Tensor) -> None:
        """Add rows x [n, K] of the linear `name`."""
        rows, K = self._as_multiplied(x), x.shape[1]
        if name not in self.linears:
            self.linears[name] = _LinearSums(rows.new_zeros(K, K), 0, rows[:0])
        sums = self.linears[name]
        n = len(x) - min(len(x) // HELD_OUT, MOST_HELD - len(sums.held))
        sums.x.addmm_(rows[:n].T, rows[:n])
        sums.rows, sums.held = sums.rows + n, torch.cat([sums.held, rows[n:]])

    def _as_multiplied(self, rows: Tensor) -> Tensor:
        return _as_nvfp4(rows, self.activations) if is_quantized(self.activations) else rows.float()


def _as_nvfp4(rows: Tensor, activations: str) -> Tensor:
    """Rows [n, K], quantized with one scale each as in W4A4, and dequantized: fp32 [n, K]."""
    padded, four_over_six = nvfp4.pad_k(rows), is_four_over_six(activations)
    scale = nvfp4.row_scales(padded, four_over_six)
    codes, sf, _ = nvfp4.quantize(padded, scale, False, four_over_six)
    return nvfp4.dequantize(codes, sf, scale)[:, : rows.shape[1]]


def shrink(sums: _Sums) -> None:
    """Add rows to `sums`, in place, since few rows say little.

    First x gets H rows like the layer's average, since all experts read the same hidden states. Then x and h get
    `ENOUGH` rows for each column, in which columns are uncorrelated: the fewer rows were seen (for x by the layer, for
    h by the expert), the closer gptq comes to ``weighted``. If there were none, all columns of h count alike, as with
    ``mse``.
    """
    rows, H = sums.rows.to(sums.x.device), sums.x.shape[-1]
    sums.x += sums.x.sum(dim=0) * (H / rows.sum().clamp(min=1).float())
    for total, seen in ((sums.x, rows.max()), (sums.h, rows[:, None])):
        diagonal = total.diagonal(dim1=1, dim2=2)
        diagonal *= 1 + ENOUGH * total.shape[-1] / seen.clamp(min=1).float()


def quantize_experts(module: nn.Module, layout: ModuleLayout, sums: _Sums, recipe: str = "gptq") -> dict[str, Tensor]:
    """Quantize a dense experts `module` by a recipe that needs a text; matrices that are not better by it, on rows that
    it did not see, by the default recipe. Returns the parameters of `NVFP4Experts` by name, on its device, and `rows`,
    int64 [E]. ValueError naming the projection that cannot be quantized."""
    make = recipe_named(recipe).from_hessians
    assert make is not None, "the callers asked the recipe"
    shrink(sums)
    size = layout.hidden_size * layout.intermediate_size * (2 if layout.gated else 1)
    step = max(1, TOGETHER // size)
    parts: dict[str, list[Tensor]] = {}
    matrices = list(dense_experts(module, layout))  # views
    of_names = ((layout.up_name, sums.x, _of_layer(sums.held_x)), ("down_proj", sums.h, sums.held_h))
    for i, (name, hessian, held) in enumerate(of_names):
        for a in range(0, layout.num_experts, step):
            w = torch.stack([pair[i] for pair in matrices[a : a + step]])
            try:
                made = make(w, hessian[a : a + step])
                codes, sf, scale = better(w, made, quantize_matrix(nvfp4.pad_k(w)), held[a : a + step])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            tensors = {name: codes, f"{name}_sf": sf.view(torch.uint8)}
            shared = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
            tensors |= {f"{part}_global_scale": scale for part in shared}
            for key, tensor in tensors.items():
                parts.setdefault(key, []).append(tensor)
    return {key: torch.cat(tensors) for key, tensors in parts.items()} | {"rows": sums.rows}


def _of_layer(held: list[Tensor]) -> list[Tensor]:
    """Rows of x by expert. An expert without any gets those of all, since all experts read the same hidden states."""
    every = torch.cat(held)
    return [rows if len(rows) else every for rows in held]


def quantize_chosen(
    model: nn.Module, fused: Sequence[Fused], sums: HessianSums, recipe: str
) -> Iterator[tuple[Linear, dict[str, Tensor]]]:
    """Yield (linear, parameters of its `NVFP4Linear`) for every linear of `fused`.

    sums: of the first of each tuple. They are shrunk as those of h, and what is not better on rows that were not seen
    is quantized by the default recipe.
    """
    for linears in fused:
        weights = [model.get_parameter(f"{linear.model}.weight").detach() for linear in linears]
        seen = sums.linears.pop(linears[0].model, None)
        if seen is None:
            none = torch.zeros(0, weights[0].shape[1], dtype=torch.float32, device=weights[0].device)
            seen = _LinearSums(none.T @ none, 0, none)
        seen.x.diagonal().mul_(1 + ENOUGH * len(seen.x) / max(seen.rows, 1))
        try:
            yield from zip(linears, quantize_fused(weights, recipe, None, (seen.x, seen.held)), strict=True)
        except ValueError as error:
            raise ValueError(f"{', '.join(linear.model for linear in linears)}: {error}") from None


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

    batches: token ids int64 [B, T]. Each layer's inputs come from the dense layers in front of it; inputs from
    quantized layers made no measurable difference. Warns, with the numbers, where experts saw few tokens.
    """
    whole: Any = model
    modules = dense_modules(model, exclude)
    name, layers = decoder_layers(model, modules)
    walk = LayerWalk(model, layers, batches, whole.device)
    made: dict[str, dict[str, Tensor]] = {}
    at = _layers_of(model, modules, fused, name, len(layers))
    with evaluating(model, by_autocast=False):
        for i in progress_bar(range(max(at) + 1), desc=recipe, unit="layer", show=progress):
            for module, tensors in _quantize_layer(walk, i, at.get(i, _Work()), activations, recipe):
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
    """What `convert_gptq` will do."""
    return replace(convert_checkpoint(source, destination, options, workers, dry_run=True), recipe=recipe)


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
    place = options.place
    files = LayerFiles.open(source, place)
    if files.exact:
        raise ValueError(f"{source} is MXFP4, of which NVFP4 holds every value: recipe mse keeps them all, and "
                         f"{recipe} could only change them; use mse")  # fmt: skip
    state = files.checkpoint.state()
    name_in_files, fused = _names_in_files(files, chosen[0]), chosen[1]
    found = dense_modules(files.model).items()
    modules = {name: known for name, known in found if name in name_in_files}
    name, _ = decoder_layers(files.model, modules)
    layers = files.use_layers(name)
    walk = LayerWalk(files.model, layers, batches, place)
    versions = [__version__, transformers.__version__, str(files.dtype)]
    key = [str(Path(source).resolve()), state, options.activations, [*modules], _digest(batches), versions]
    name_in_files |= {linear.model: linear.name for linears in fused for linear in linears}
    key += [linear.name for linears in fused for linear in linears]
    begun = _Begun(codes, key)
    left = {module: known for module, known in modules.items() if name_in_files[module] not in codes.modules}
    still = [f for f in fused if any(linear.name not in codes.modules for linear in f)]
    first, at = begun.resume(walk), _layers_of(files.model, left, still, name, len(layers))
    last = max(at, default=-1)
    for i in progress_bar(
        range(first, last + 1), desc=recipe, unit="layer", show=progress, initial=first, total=last + 1
    ):
        if i < len(layers):
            files.load(i)
        for module, tensors in _quantize_layer(walk, i, at.get(i, _Work()), options.activations, recipe):
            codes.save(name_in_files[module], tensors)
        if i < len(layers):
            files.drop(i)
            begun.keep(i, walk)
    if files.checkpoint.state() != state:
        raise ValueError(f"{source} changed while it was read: run the same command again")
    begun.drop_states()
    return _report(batches, modules, {module: codes.rows(name_in_files[module]) for module in modules})


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
        layer = int(module.removeprefix(f"{name}.").split(".")[0])
        found.setdefault(layer, _Work()).modules[module] = known
    for linears in fused:
        placed = linears_by_layer(model, name, [linears[0].model])
        if not placed:
            raise ValueError(f"{linears[0].name} is in no decoder layer, so no text is followed to it: leave it out of "
                             "linears, or use another recipe (mse)")  # fmt: skip
        (at,) = placed
        found.setdefault(count if at is None else at, _Work()).fused.append(linears)
    return found


def _quantize_layer(
    walk: LayerWalk, i: int, work: _Work, activations: str, recipe: str
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Run layer i, or what follows the last one, and quantize the experts and linears in it."""
    sums = HessianSums(activations)
    linears = {fused[0].model: walk.model.get_submodule(fused[0].model) for fused in work.fused}
    with watch(work.modules, sums), watch_linears(linears, sums.linear):
        if i < len(walk.layers):
            walk.run(i)
        else:
            (head,) = linears.values()
            walk.run_head(head)
    for name, (module, layout) in work.modules.items():
        try:
            seen = sums.layers.pop(name) if name in sums.layers else _no_rows(layout, walk.device)
            yield name, quantize_experts(module, layout, seen, recipe)
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from None
    for linear, parameters in quantize_chosen(walk.model, work.fused, sums, recipe):
        yield linear.model, parameters


def _no_rows(layout: ModuleLayout, device: torch.device | str) -> _Sums:
    E, H, I = layout.num_experts, layout.hidden_size, layout.intermediate_size
    new = lambda K: torch.zeros(E, K, K, dtype=torch.float32, device=device)
    none = lambda K: [torch.zeros(0, K, dtype=torch.float32, device=device) for _ in range(E)]
    return _Sums(new(H), new(I), torch.zeros(E, dtype=torch.int64), none(H), none(I))


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

    def resume(self, walk: LayerWalk) -> int:
        """The number of the first layer that is left; `walk` gets the states of the one before."""
        saved = sorted(self.folder.glob("states-*"))
        if not saved:
            return 0
        walk.states = torch.load(saved[-1], weights_only=True)
        return int(saved[-1].name.removeprefix("states-")) + 1

    def keep(self, i: int, walk: LayerWalk) -> None:
        if time.monotonic() - self.last_save >= SAVE_EVERY:
            part = self.folder / "partial"
            try:
                torch.save(walk.states, part)
            except RuntimeError as error:  # torch's, where the disk is full
                raise OSError(f"{part} cannot be written, as on a full disk: {error}") from None
            self.drop_states()
            os.replace(part, self.folder / f"states-{i:05d}")
            self.last_save = time.monotonic()

    def drop_states(self) -> None:
        for old in self.folder.glob("states-*"):
            old.unlink()
