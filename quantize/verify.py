"""Reads an NVFP4 checkpoint back: is every tensor there, whole and sensible, and how far from the original?"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from moe_nvfp4.quantize.checkpoint import TORCH_DTYPES, Checkpoint, Stored, open_checkpoint
from moe_nvfp4.quantize.dialects import Dialect, read_config
from moe_nvfp4.quantize.matrices import Matrix, nvfp4_matrix
from moe_nvfp4.quantize.names import DENSE, KV_SCALE, PER_EXPERT, PRE_QUANT_SCALE, SCALES
from moe_nvfp4.quantize.plan import source_matrices
from moe_nvfp4.weights import check_block_scales, check_global_scale

PIECE = 1 << 22  # elements read at once


@dataclass
class LayerError:
    """Sums over the matrices of one layer: of squared errors and of squares of the original."""

    matrices: int = 0
    error: float = 0.0
    square: float = 0.0

    @property
    def relative(self) -> float:
        """||dequantized - original|| / ||original||"""
        return math.sqrt(self.error / self.square) if self.square else 0.0

    @property
    def snr(self) -> float:
        """Signal to noise in dB."""
        return 10 * math.log10(self.square / self.error) if self.error and self.square else math.inf


@dataclass
class VerificationReport:
    folder: str
    matrices: int = 0
    tensors: int = 0
    size: int = 0  # bytes read
    layers: dict[str, LayerError] = field(default_factory=dict)  # with a source to compare with

    def lines(self) -> Iterator[str]:
        yield f"{self.folder}: {self.matrices} NVFP4 matrices, {self.tensors} other tensors, {self.size:,} bytes: good"
        if self.layers:
            yield f"{'':44s}{'matrices':>10s}{'relative error':>16s}{'SNR (dB)':>10s}"
        for name, layer in self.layers.items():
            yield f"{name:44s}{layer.matrices:10d}{layer.relative:16.5f}{layer.snr:10.2f}"


def verify_checkpoint(folder: str | os.PathLike, against: str | os.PathLike | None = None) -> VerificationReport:
    """Read every byte of the NVFP4 checkpoint in `folder` and check it; with `against`, compare it with
    the checkpoint that it was made from.

    Checked: headers and index; dtypes and shapes of codes and scales; block scales not negative and not
    NaN, global scales positive and finite; dense weights finite; every expert of a layer complete; no
    scale that nothing reads. Raises ValueError naming the first tensor that fails.
    """
    checkpoint = open_checkpoint(folder)
    info = read_config(checkpoint.config)
    if info is None:
        raise ValueError(f"{folder} is not an NVFP4 checkpoint: its config.json has no such quantization_config")
    report = VerificationReport(str(folder))
    left = dict(checkpoint.tensors)
    marker = f".{info.dialect.global_scale}"
    stems = [n.removesuffix(marker) for n in left if n.endswith(marker)]
    for stem in stems:
        for name in _check_matrix(stem, checkpoint, info.dialect):
            del left[name]
    report.matrices, report.tensors = len(stems), len(left)
    report.size = sum(t.size for t in checkpoint.tensors.values())
    for name, stored in left.items():
        _check_other(name, stored)
    _check_experts(stems, checkpoint)
    if not stems:
        raise ValueError(f"{folder} says NVFP4 in its config.json, but no tensor ends in {marker}")
    if against is not None:
        report.layers = _compare(checkpoint, open_checkpoint(against), stems, left, info.dialect)
    return report


def _check_matrix(stem: str, checkpoint: Checkpoint, dialect: Dialect) -> list[str]:
    """The names of `stem`'s tensors, checked."""
    names = [f"{stem}.{s}" for s in dialect.suffixes]
    weight, sf, scale, _ = found = [checkpoint.tensors.get(n) for n in names]
    for name, stored, dtype in zip(names, found, ("U8", "F8_E4M3", "F32", "F32"), strict=True):
        if stored is None and name != names[3]:
            raise ValueError(f"{name} is missing: every NVFP4 matrix has codes, block scales and a global scale")
        if stored is not None and stored.dtype != dtype:
            raise ValueError(f"{name} has dtype {stored.dtype}, expected {dtype}")
    if len(weight.shape) != 2 or sf.shape != (weight.shape[0], weight.shape[1] / 8):
        raise ValueError(f"{names[1]} has shape {list(sf.shape)}, which does not fit codes of {list(weight.shape)}")
    for name, stored in ((names[2], scale), (names[3], found[3])):
        if stored is None:
            continue
        if stored.size != 4:
            raise ValueError(f"{name} has shape {list(stored.shape)}, expected one number")
        check_global_scale(dialect.decode_scale(stored.tensor()), name)
    for at in range(0, sf.size, PIECE):
        check_block_scales(sf.read(at, min(PIECE, sf.size - at)), names[1])
    for at in range(0, weight.size, PIECE):
        weight.read(at, min(PIECE, weight.size - at))
    smooth = checkpoint.tensors.get(f"{stem}.{PRE_QUANT_SCALE}")
    if smooth is not None:
        if smooth.dtype not in DENSE or smooth.shape != (2 * weight.shape[1],) or not smooth.tensor().isfinite().all():
            raise ValueError(f"{stem}.{PRE_QUANT_SCALE} {list(smooth.shape)} must be finite, one for each column")
        names, found = [*names, f"{stem}.{PRE_QUANT_SCALE}"], [*found, smooth]
    return [n for n, stored in zip(names, found, strict=True) if stored is not None]


def _check_other(name: str, stored: Stored) -> None:
    if SCALES.search(name) and not KV_SCALE.search(name):
        raise ValueError(f"{name} is a scale that nothing reads: a part of its matrix is missing, or it is not NVFP4")
    for at in range(0, stored.size, PIECE):
        piece = stored.read(at, min(PIECE, stored.size - at))
        if stored.dtype in DENSE and not piece.view(TORCH_DTYPES[stored.dtype]).isfinite().all():
            raise ValueError(f"{name} has NaN or Inf: the original has them too, or the file is damaged")


def _check_experts(stems: list[str], checkpoint: Checkpoint) -> None:
    """All experts of a layer have the same projections, with the same shapes, and none is left out."""
    layers: dict[str, dict[str, dict[int, tuple]]] = {}
    for stem in stems:
        if match := PER_EXPERT.fullmatch(stem):
            weight = checkpoint.tensors.get(f"{stem}.weight") or checkpoint.tensors[f"{stem}.weight_packed"]
            layers.setdefault(match["module"], {}).setdefault(match["part"], {})[int(match["e"])] = weight.shape
    for module, parts in layers.items():
        E = 1 + max(max(experts) for experts in parts.values())
        for part, shapes in parts.items():
            missing = sorted(set(range(E)) - shapes.keys())
            if missing:
                raise ValueError(f"{module}.{missing[0]}.{part} is missing: {len(shapes)} of {E} experts have it")
            if len(set(shapes.values())) > 1:
                raise ValueError(f"{module}: the experts' {part} have different shapes {sorted(set(shapes.values()))}")
        if len(parts) != 3 and set(parts) != {"up_proj", "down_proj"}:
            raise ValueError(f"{module} has {', '.join(parts)} only: a projection is missing")


# ---------------------------------------------------------------- against the original
def _compare(
    checkpoint: Checkpoint, source: Checkpoint, stems: list[str], left: Mapping[str, Stored], dialect: Dialect
) -> dict[str, LayerError]:
    matrices = source_matrices(source, {re.sub(r"(\bexperts)\..*", r"\1", stem) for stem in stems})
    layers: dict[str, LayerError] = {}
    for stem in stems:
        if stem not in matrices:
            raise ValueError(f"{stem} has no original in {source.folder}: it was made from another checkpoint")
        key = re.sub(r"(\bexperts)\..*", r"\1", stem)
        _add_error(layers.setdefault(key, LayerError()), checkpoint, stem, matrices[stem], dialect)
    for name, stored in left.items():
        original = source.tensors.get(name)
        if original is not None and original.dtype == stored.dtype and not _same(stored, original):
            raise ValueError(f"{name} is not what it is in {source.folder}: it should have been copied")
    return layers


def _add_error(layer: LayerError, checkpoint: Checkpoint, stem: str, matrix: Matrix, dialect: Dialect) -> None:
    packed = nvfp4_matrix(checkpoint, stem, dialect)
    if (packed.rows, packed.columns) != (matrix.rows, -(-matrix.columns // 16) * 16):
        raise ValueError(f"{stem} is [{packed.rows}, {packed.columns}], its original [{matrix.rows}, {matrix.columns}]")
    rows, packed_rows, step = matrix.open(), packed.open(), max(1, PIECE // packed.columns)
    for a in range(0, packed.rows, step):
        b = min(a + step, packed.rows)
        original = rows(a, b).float()
        error = packed_rows(a, b)[:, : matrix.columns] - original
        layer.error += error.square().sum(dtype=torch.float64).item()
        layer.square += original.square().sum(dtype=torch.float64).item()
    layer.matrices += 1


def _same(a: Stored, b: Stored) -> bool:
    if a.shape != b.shape:
        return False
    pieces = ((at, min(PIECE, a.size - at)) for at in range(0, a.size, PIECE))
    return all(torch.equal(a.read(*piece), b.read(*piece)) for piece in pieces)
