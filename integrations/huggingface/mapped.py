"""Experts that stay in their files while a model loads, and are computed from there: `map_files`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.files import EXPERT, leave_out
from moe_nvfp4.mapped import Matrix
from moe_nvfp4.quantize.files import Checkpoint, TensorSlice
from moe_nvfp4.quantize.layouts import ExpertLayout
from moe_nvfp4.quantize.model import ModelTensors
from moe_nvfp4.quantize.names import projections

MAPPABLE = (
    ExpertLayout.ONE_BY_ONE, ExpertLayout.PROJECTION_FIRST, ExpertLayout.FP8, ExpertLayout.SINGLE, ExpertLayout.DENSE,
)  # fmt: skip


def check_mappable(layouts: Iterable[ExpertLayout] | None) -> None:
    """NotImplementedError if experts that files have in these `layouts` cannot stay there. None: they are dense."""
    others = {layout.value for layout in layouts or ()} - {way.value for way in MAPPABLE}
    if layouts is None or others:
        what = "dense" if layouts is None else min(others)
        raise NotImplementedError(
            f"map_files: the experts of these files are {what}, and the kernels read 4-bit experts one by one, as "
            "in the files that moe-nvfp4 quantize SRC DST writes, from dense files and from every 4-bit layout"
        )


class InFiles:
    """The codes and block scales of `experts`, by name of their module, which transformers skips while it loads `model`
    from `source`: they are no parameters until `map`."""

    def __init__(self, model: Any, source: Checkpoint, conversions: list, experts: Mapping[str, HFExperts]):
        # of each module: its parameters on meta, and where the files have them
        self._left: dict[HFExperts, tuple[dict[str, Any], dict[str, list[list[Matrix]]]]] = {}
        wanted = {f"{name}.{key}": (m, key) for name, m in experts.items() for key in (m.up_name, "down_proj")}
        for parameter, matrices in _matrices_of(source, model, conversions, wanted).items():
            module, key = wanted[parameter]
            parameters, places = self._left.setdefault(module, ({}, {}))
            for k in [k for k in (key, f"{key}_sf") if k in module._parameters]:
                # Under its name it stays, because the blocks of Qwen3-Omni initialize weights of their experts by name
                parameters[k] = vars(module)[k] = module._parameters.pop(k)
                parameters[k]._is_hf_initialized = True
            places[key] = [[Matrix(*((t.file, t.start) for t in pair)) for pair in parts] for parts in matrices]
            leave_out(model, re.escape(parameter.removeprefix(f"{model.base_model_prefix}.")) + "(_sf)?$")

    def map(self) -> None:
        """Give the modules their parameters back, mapped from the files."""
        for module, (parameters, places) in self._left.items():
            for k in parameters:
                del vars(module)[k]
            module._parameters.update(parameters)
            module.map_files(places)


def _matrices_of(
    source: Checkpoint, model: nn.Module, conversions: list, parameters: Collection[str]
) -> dict[str, list[list[tuple[TensorSlice, TensorSlice]]]]:
    """Where the files have each expert's matrices: parameter -> for each expert, (codes, block scales) of each matrix,
    gate before up.

    parameters: names of experts' codes. ValueError if the files have another number of experts, or other shapes.
    """
    names, places = ModelTensors(model, conversions), dict[str, tuple[str, str | None]]()
    found: dict[str, dict[tuple[int, str], TensorSlice]] = {}
    for name, stored in source.tensors.items():
        match = EXPERT.search(name)
        if match is None:
            continue
        first = f"{name[: match.start('e')]}0{name[match.end('e') :]}"
        if first not in places:
            places[first] = names.place(first)
        target, pattern = places[first]
        if pattern is not None and target.removesuffix("_sf") in parameters:
            found.setdefault(target, {})[int(match["e"]), pattern.split()[0]] = stored
    result = {}
    for parameter in parameters:
        pairs = [found.get(parameter, {}), found.get(f"{parameter}_sf", {})]
        parts = projections(parameter.rpartition(".")[2])
        for matrices, suffix in zip(pairs, ("", "_sf"), strict=True):
            E, N, width = names.shapes[f"{parameter}{suffix}"]
            wanted = {(e, part): (N // len(parts), width) for e in range(E) for part in parts}
            if wanted != {at: t.shape for at, t in matrices.items()}:
                raise ValueError(
                    f"map_files: the files have {len(matrices)} matrices of {parameter}{suffix}, expected "
                    f"{len(wanted)} of {N // len(parts)} by {width} bytes: leave map_files out for these files"
                )
        codes, sf = pairs
        result[parameter] = [[(codes[e, part], sf[e, part]) for part in parts] for e in range(E)]
    return result
