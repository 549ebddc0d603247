"""Reads an NVFP4 checkpoint back: is every tensor there, whole and sensible, and how far from the original?"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_nvfp4.quantize.dialects import Dialect
from moe_nvfp4.quantize.files import TORCH_DTYPES, Checkpoint, TensorSlice, open_checkpoint
from moe_nvfp4.quantize.layouts import ErrorSums, ExpertLayout, Matrix, Source, nvfp4
from moe_nvfp4.quantize.layouts.fp8 import fp8_block, fp8_scale
from moe_nvfp4.quantize.model import Given, ModelTensors, UnknownModel
from moe_nvfp4.quantize.names import (
    DENSE,
    KV_SCALE,
    PER_EXPERT,
    PRE_QUANT_SCALE,
    SCALES,
    sub_configs,
)
from moe_nvfp4.quantize.plan import ConversionPlan, nvfp4_info, plan_of, separate_scales_warning
from moe_nvfp4.weights import check_block_scales, check_global_scale

PIECE = 1 << 22  # elements read at once


@dataclass
class VerificationReport:
    folder: str
    matrices: int = 0
    tensors: int = 0
    size: int = 0  # bytes read
    layers: dict[str, ErrorSums] = field(default_factory=dict)  # with a source to compare with
    warnings: list[str] = field(default_factory=list)  # what was not compared, or is misread elsewhere

    def lines(self) -> Iterator[str]:
        yield f"{self.folder}: {self.matrices} NVFP4 matrices, {self.tensors} other tensors, {self.size:,} bytes: good"
        yield from self.warnings
        if self.layers:
            yield f"{'':44s}{'matrices':>10s}{'relative error':>16s}{'SNR (dB)':>10s}"
        for name, layer in self.layers.items():
            yield f"{name:44s}{layer.matrices:10d}{layer.relative:16.5f}{layer.snr:10.2f}"


def verify_checkpoint(folder: str | os.PathLike, against: str | os.PathLike | None = None) -> VerificationReport:
    """Read every byte of the NVFP4 checkpoint in `folder` and check it; with `against`, compare it with
    the checkpoint that it was made from: dense, FP8, MXFP4, or NVFP4 in any dialect and layout.

    Checked: headers and index; dtypes and shapes of codes and scales; block scales not negative and not
    NaN, global scales positive and finite; dense and FP8 weights finite; every expert of a layer complete;
    no scale that nothing reads; all that the model needs, where transformers knows it, and all of `against`.
    Raises ValueError naming the first tensor that fails.
    """
    checkpoint = open_checkpoint(folder)
    info = nvfp4_info(checkpoint)
    if info is None:
        raise ValueError(f"{folder} is not an NVFP4 checkpoint: its config.json has no such quantization_config")
    report = VerificationReport(str(folder))
    left, fp8 = dict(checkpoint.tensors), set()
    source, dialect = Source(checkpoint), info.dialect
    shapes, stacks = {}, []  # of codes, by the module's name in new files; NVFP4Stack
    for name, layout in sorted(nvfp4.recognise({n: t.shape for n, t in left.items()}, dialect).items()):
        if layout in (ExpertLayout.STACKED_TRANSPOSED, ExpertLayout.STACKED_BY_PROJECTION):
            stacks.append(nvfp4.nvfp4_stack(source, name, layout, dialect))
            _check_stack(stacks[-1], dialect)
            read = stacks[-1].tensors
        else:
            read = _check_matrix(name, checkpoint, dialect)
            shapes[nvfp4.new_name(name)] = checkpoint.tensors[f"{name}.{dialect.weight}"].shape
        for part in read:
            del left[part]
    for name in [n for n, stored in left.items() if stored.dtype == "F8_E4M3" and n.endswith(".weight")]:
        fp8.add(name)
        for part in _check_fp8(name, checkpoint):
            left.pop(part, None)
    for name, stored in left.items():
        _check_other(name, stored)
    _check_experts(shapes, left)
    if not shapes and not stacks:
        raise ValueError(f"{folder} says NVFP4 in its config.json, but no tensor ends in .{dialect.global_scale}")
    _check_optional_scales(shapes, checkpoint, dialect)
    try:
        ModelTensors(source).check(_given(checkpoint, shapes, stacks, fp8, left))
    except UnknownModel as error:
        report.warnings.append(f"warning: not compared with the model's own list of tensors: {error}. Tensors that are "
                               "missing for the whole model or a whole layer were not noticed")  # fmt: skip
    report.matrices = len(shapes) + sum(stack.shape[0] for stack in stacks)
    report.tensors, report.size = len(left), sum(t.size for t in checkpoint.tensors.values())
    report.warnings += separate_scales_warning(checkpoint)
    if against is not None:
        report.layers = _compare(checkpoint, open_checkpoint(against), left)
    return report


def _check_matrix(stem: str, checkpoint: Checkpoint, dialect: Dialect) -> list[str]:
    """The names of `stem`'s tensors, checked and read."""
    parts = nvfp4.matrix_tensors(checkpoint.tensors, stem, dialect)
    for last, stored in parts.items():
        name = f"{stem}.{last}"
        if last in (dialect.global_scale, dialect.input_scale):
            check_global_scale(dialect.decode_scale(stored.tensor()), name)
        elif last == PRE_QUANT_SCALE:
            K = 2 * parts[dialect.weight].shape[1]
            if stored.dtype not in DENSE or stored.shape != (K,) or not stored.tensor().isfinite().all():
                raise ValueError(f"{name} {list(stored.shape)} must be finite, one for each column")
        elif last == dialect.sf:
            _read(stored, lambda piece, name=name: check_block_scales(piece, name))
        else:
            _read(stored)
    return [f"{stem}.{last}" for last in parts]


def _check_stack(stack: nvfp4.NVFP4Stack, dialect: Dialect) -> None:
    """A stack of experts, checked and read."""
    stack.check()
    codes, sf, *scales = stack.tensors
    for name, stored in zip(scales, stack.scales.values(), strict=True):
        check_global_scale(dialect.decode_scale(stored.tensor()), name)
    _read(stack.sf, lambda piece: check_block_scales(piece, sf))
    _read(stack.codes)


def _check_fp8(name: str, checkpoint: Checkpoint) -> list[str]:
    """The names of the FP8 weight `name` and its scales, checked."""
    stem, found = name.removesuffix(".weight"), checkpoint.tensors
    scale = fp8_scale(stem, found)
    if scale is None or fp8_block(found[name].shape, found[scale].shape) is None:
        raise ValueError(f"{name} is FP8 {list(found[name].shape)} and has no scale, or none that fits, next to it")

    def finite(piece: Tensor) -> None:
        if (piece & 0x7F == 0x7F).any():
            raise ValueError(f"{name} has NaN: the original has them too, or the file is damaged")

    _read(found[name], finite)
    if found[scale].dtype in DENSE:  # else e8m0, whose NaN is byte 255
        _check_finite(scale, found[scale])
    elif (found[scale].read() == 255).any():
        raise ValueError(f"{scale} has NaN: the original has them too, or the file is damaged")
    return [name, scale, f"{stem}.input_scale"]


def _check_other(name: str, stored: TensorSlice) -> None:
    if SCALES.search(name) and not KV_SCALE.search(name):
        raise ValueError(f"{name} is a scale that nothing reads: a part of its matrix is missing, or it is not NVFP4")
    if stored.dtype in DENSE:
        _check_finite(name, stored)
    else:
        _read(stored)


def _check_finite(name: str, stored: TensorSlice) -> None:
    def finite(piece: Tensor) -> None:
        if not piece.view(TORCH_DTYPES[stored.dtype]).isfinite().all():
            raise ValueError(f"{name} has NaN or Inf: the original has them too, or the file is damaged")

    _read(stored, finite)


def _read(stored: TensorSlice, check: Callable[[Tensor], None] = lambda piece: None) -> None:
    """Every byte, in pieces uint8 [n]."""
    for at in range(0, stored.size, PIECE):
        check(stored.read(at, min(PIECE, stored.size - at)))


def _check_experts(found: Mapping[str, tuple[int, ...]], left: Mapping[str, TensorSlice]) -> None:
    """All experts of a layer have the same projections, with the same shapes, and none is left out."""
    layers: dict[str, dict[str, dict[int, tuple]]] = {}
    for stem, shape in found.items():
        if match := PER_EXPERT.fullmatch(stem):
            layers.setdefault(match["module"], {}).setdefault(match["part"], {})[int(match["e"])] = shape
    for module, parts in layers.items():
        E = 1 + max(max(experts) for experts in parts.values())
        for part, shapes in parts.items():
            missing = sorted(set(range(E)) - shapes.keys())
            for stem in (f"{module}.{e}.{part}" for e in missing):
                if stored := left.get(f"{stem}.weight"):
                    raise ValueError(f"{stem}.weight is {stored.dtype} and {len(shapes)} of {E} experts have an NVFP4 "
                                     "one: all have the same type, quantize the original checkpoint again")  # fmt: skip
            if missing:
                raise ValueError(f"{module}.{missing[0]}.{part} is missing: {len(shapes)} of {E} experts have it")
            if len(set(shapes.values())) > 1:
                raise ValueError(f"{module}: the experts' {part} have different shapes {sorted(set(shapes.values()))}")
        if len(parts) != 3 and set(parts) != {"up_proj", "down_proj"}:
            raise ValueError(f"{module} has {', '.join(parts)} only: a projection is missing")


def _check_optional_scales(found: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint, dialect: Dialect) -> None:
    """input_scale and pre_quant_scale: all experts have one, or none has."""
    experts = [stem for stem in found if PER_EXPERT.fullmatch(stem)]
    names = {nvfp4.new_name(name) for name in checkpoint.tensors}
    for last in (dialect.input_scale, PRE_QUANT_SCALE):
        without = [stem for stem in experts if f"{stem}.{last}" not in names]
        if 0 < len(without) < len(experts):
            raise ValueError(f"{without[0]} has no {last}, which {len(experts) - len(without)} of {len(experts)} "
                             "matrices of experts have: all need one; calibrate or quantize again")  # fmt: skip


def _given(
    checkpoint: Checkpoint, matrices: Mapping[str, tuple[int, ...]], stacks: list[nvfp4.NVFP4Stack], fp8: set[str],
    left: Mapping[str, TensorSlice],
) -> dict[str, Given]:  # fmt: skip
    """Everything in the folder, by the names of a dense checkpoint."""
    given = {f"{stem}.weight": Given("NVFP4", (N, 2 * half)) for stem, (N, half) in matrices.items()}
    for stack in stacks:
        E, N, half = stack.shape
        given[stack.name if stack.transposed else f"{stack.name}.weight"] = Given("NVFP4", (E, N, 2 * half))
    given |= {name: Given("FP8", checkpoint.tensors[name].shape) for name in fp8}
    return given | {name: Given("dense", stored.shape) for name, stored in left.items()}


# ---------------------------------------------------------------- against the original
def _compare(checkpoint: Checkpoint, source: Checkpoint, left: Mapping[str, TensorSlice]) -> dict[str, ErrorSums]:
    """The error of every layer; `left`: the tensors of `checkpoint` that are not NVFP4 nor FP8."""
    layer_of = lambda stem: re.sub(r"(\bexperts)\..*", r"\1", stem)
    ours = plan_of(checkpoint)
    packed = ours.matrices
    plan = plan_of(source, {layer_of(stem) for stem in packed})
    layers: dict[str, ErrorSums] = {}
    for stem, matrix in packed.items():
        if stem not in plan.matrices:
            raise ValueError(f"{stem} has no original in {source.folder}: it was made from another checkpoint")
        _add_error(layers.setdefault(layer_of(stem), ErrorSums()), stem, matrix, plan.matrices[stem])
    for name in sorted(plan.matrices.keys() - packed.keys()):
        if name not in left and f"{name}.weight" not in left:
            raise ValueError(f"{name} is in {source.folder} and neither quantized nor dense in {checkpoint.folder}")
    for name in sorted(_others(plan) - _others(ours)):
        if name.removesuffix(".weight") not in packed and not _may_go(name, checkpoint):
            raise ValueError(f"{name} is in {source.folder} and not in {checkpoint.folder}: the conversion was not "
                             "complete, or a tensor was lost since; quantize again")  # fmt: skip
    for name, stored in left.items():
        original, fp8 = source.tensors.get(name), plan.dequantized.get(name)
        fp8 = fp8 if isinstance(fp8, Matrix) else None
        copied = original is not None and original.dtype == stored.dtype
        if (copied and not _same(stored, original)) or (fp8 is not None and not _is_dense(stored, fp8)):
            raise ValueError(f"{name} is not what it is in {source.folder}: it should have been "
                             + ("copied" if copied else "made dense exactly"))  # fmt: skip
    return layers


def _others(plan: ConversionPlan) -> set[str]:
    """The tensors that a plan writes besides those of quantized matrices."""
    suffixes = (*plan.options.target.suffixes, PRE_QUANT_SCALE)
    quantized = {f"{stem}.{suffix}" for stem in plan.matrices for suffix in suffixes}
    return {name for job in plan.jobs for name in job.outputs} - quantized


def _may_go(name: str, checkpoint: Checkpoint) -> bool:
    """Whether transformers' save_pretrained leaves `name` out on purpose."""
    tied = any(c.get("tie_word_embeddings") for c in sub_configs(checkpoint.config)) and "lm_head" in name
    return tied or KV_SCALE.search(name) is not None or name.endswith("rotary_emb.inv_freq")


def _add_error(layer: ErrorSums, stem: str, packed: Matrix, matrix: Matrix) -> None:
    padded = -(-matrix.columns // 16) * 16
    if (packed.rows, packed.columns) != (matrix.rows, padded):
        raise ValueError(f"{stem} is [{packed.rows}, {packed.columns}], its original [{matrix.rows}, {matrix.columns}]")
    rows, packed_rows, step = matrix.open(), packed.open(), max(1, PIECE // packed.columns)
    for a in range(0, packed.rows, step):
        b = min(a + step, packed.rows)
        original = rows(a, b).float()
        layer.add(packed_rows(a, b)[:, : matrix.columns], original)
    layer.matrices += 1


def _is_dense(stored: TensorSlice, matrix: Matrix) -> bool:
    """Whether `stored` is `matrix` in its own dtype, exactly."""
    if stored.shape != (matrix.rows, matrix.columns):
        return False
    dtype, rows, step = TORCH_DTYPES[stored.dtype], matrix.open(), max(1, PIECE // matrix.columns)
    width = matrix.columns * dtype.itemsize
    pieces = ((a, min(a + step, matrix.rows)) for a in range(0, matrix.rows, step))
    return all(
        torch.equal(stored.read(a * width, (b - a) * width), rows(a, b).to(dtype).view(torch.uint8).view(-1))
        for a, b in pieces
    )


def _same(a: TensorSlice, b: TensorSlice) -> bool:
    if a.shape != b.shape:
        return False
    pieces = ((at, min(PIECE, a.size - at)) for at in range(0, a.size, PIECE))
    return all(torch.equal(a.read(*piece), b.read(*piece)) for piece in pieces)
