"""DBRX: matrices [E * I, H], w1 (gate), v1 (up) and w2 (down); an expert's part of w2 is [in, out]."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.quantize.files import Checkpoint, TensorSlice, TensorView
from moe_nvfp4.quantize.layouts.base import Experts, Matrix, dense, need

NAME = re.compile(r"(?P<module>(?:.+\.)?experts)\.mlp\.(?P<part>w1|v1|w2)")
PARTS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}


def by_expert(matrix: Tensor, num_experts: int) -> Tensor:
    """[E * I, H] -> a view [E, I, H]"""
    return matrix.view(num_experts, -1, matrix.shape[-1])


def parameters(matrices: list[Tensor], num_experts: int) -> Tensor:
    """[w1, v1] -> gate and up [E, 2I, H], or [w2] -> down [E, H, I]"""
    parts = [by_expert(matrix, num_experts) for matrix in matrices]
    return torch.cat(parts, dim=1) if len(parts) == 2 else parts[0].transpose(1, 2)


def recognise(source: Checkpoint, left: Mapping[str, TensorSlice]) -> Iterator[Experts]:
    if "dbrx" not in source.types:
        return
    modules: dict[str, dict[str, str]] = {}
    for name in left:
        if match := NAME.fullmatch(name):
            modules.setdefault(match["module"], {})[match["part"]] = name
    E: Any = (source.config.get("ffn_config") or {}).get("moe_num_experts")

    def matrices(module: str) -> dict[str, Matrix]:
        found = {}
        for part, name in modules[module].items():
            stored = left[name]
            fits = type(E) is int and E > 0 and len(stored.shape) == 2 and stored.shape[0] % E == 0
            need(fits and stored.size > 0, name, stored, f"[{E} experts * I, H]")
            I = stored.shape[0] // E
            for e in range(E):
                rows = stored.rows(e * I, I)
                matrix = TensorView.of(rows, lambda t: t.T) if part == "w2" else rows
                found[f"{module}.{e}.{PARTS[part]}"] = dense(matrix)
        if missing := PARTS.keys() - modules[module].keys():
            raise ValueError(f"{module}.mlp.{min(missing)} is missing: download the checkpoint again")
        return found

    for module, names in modules.items():
        yield Experts(module, tuple(names.values()), partial(matrices, module))
