"""Dense experts one by one: one tensor for each expert and projection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from moe_nvfp4.quantize.files import Checkpoint, TensorSlice
from moe_nvfp4.quantize.layouts.base import Experts, Matrix, dense, need
from moe_nvfp4.quantize.names import DENSE, PER_EXPERT


def recognise(source: Checkpoint, left: Mapping[str, TensorSlice]) -> Iterator[Experts]:
    modules: dict[str, list[str]] = {}  # -> stems
    for name, stored in left.items():
        match = PER_EXPERT.fullmatch(name.removesuffix(".weight"))
        if match is not None and name.endswith(".weight") and stored.dtype in DENSE:
            modules.setdefault(match["module"], []).append(name.removesuffix(".weight"))

    def matrices(module: str) -> dict[str, Matrix]:
        found = {}
        for stem in modules[module]:
            stored = left[f"{stem}.weight"]
            need(len(stored.shape) == 2, f"{stem}.weight", stored, "a matrix [out, in]")
            found[stem] = dense(stored)
        return found

    for module, stems in modules.items():
        yield Experts(module, tuple(f"{stem}.weight" for stem in stems), partial(matrices, module))
