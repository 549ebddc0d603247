"""The dense tensors of a checkpoint that is not NVFP4: as its files hold them, or dequantized from FP8 and MXFP4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.quantize.files import Checkpoint
from moe_nvfp4.quantize.layouts import Matrix, fp8
from moe_nvfp4.quantize.layouts.base import Given
from moe_nvfp4.quantize.source import quantized_layouts, quantized_weights


@dataclass(frozen=True)
class DenseTensor:
    """A tensor that is read when it is indexed, as transformers does with the slices of safetensors.

    file   the file that it lies in
    dtype  in that file; of what is dequantized, F32
    exact  whether NVFP4 holds it without a loss (MXFP4)
    """

    shape: tuple[int, ...]
    file: Path
    dtype: str
    read: Callable[[], Tensor]
    exact: bool = False

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]


def dense_tensors(source: Checkpoint) -> dict[str, DenseTensor]:
    """The dense tensors of `source`, by name; those of FP8 and MXFP4 are fp32, named as in the family's dense files.

    ValueError for scales that are missing or do not fit, and for other forms of FP8.
    """
    found: dict[str, DenseTensor] = {}
    left = dict(source.tensors)
    layouts = quantized_layouts(source.config.get("quantization_config") or {})
    for experts in [experts for layout in layouts for experts in layout.recognise(source, left)]:
        assert experts.dense is not None, "quantized experts know their dense form"
        found |= {name: _dense(source, what) for name, what in experts.dense().items()}
        for name in experts.tensors:
            del left[name]
    for stem, (matrix, names) in quantized_weights(source, left).items():
        found[f"{stem}.weight"] = _dense(source, matrix)
        for name in names:
            del left[name]
    for name, stored in left.items():
        if stored.dtype.startswith("F8"):
            raise ValueError(fp8.UNREAD.format(name=name, dtype=stored.dtype))
        found[name] = DenseTensor(stored.shape, stored.file, stored.dtype, stored.tensor)
    return found


def dense_given(source: Checkpoint) -> dict[str, Given]:
    """What `dense_tensors` are, for a check against the model's own."""
    return {name: Given(t.dtype, t.shape, t.file.name) for name, t in dense_tensors(source).items()}


def _dense(source: Checkpoint, what: Matrix | list[Matrix]) -> DenseTensor:
    """A matrix [rows, columns], or the stack [E, columns, rows] of the matrices of all experts."""
    matrices = [what] if isinstance(what, Matrix) else what
    first = matrices[0]
    shape = (first.rows, first.columns) if isinstance(what, Matrix) else (len(matrices), first.columns, first.rows)
    exact = first.global_scale is not None
    return DenseTensor(shape, source.folder / first.shard, "F32", partial(_read, what), exact)


def _read(what: Matrix | list[Matrix]) -> Tensor:
    if isinstance(what, Matrix):
        return what.open()(0, what.rows)
    return torch.stack([matrix.open()(0, matrix.rows).T for matrix in what])
