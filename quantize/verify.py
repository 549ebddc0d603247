"""Check an NVFP4 checkpoint: whether every tensor is present and valid, and how far it is from the original."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from moe_nvfp4.quantize.dialects import EMBEDDING, QuantizationInfo
from moe_nvfp4.quantize.files import TORCH_DTYPES, Checkpoint, TensorSlice, TensorView, open_checkpoint, sub_configs
from moe_nvfp4.quantize.layouts import ErrorSums, Matrix, nvfp4
from moe_nvfp4.quantize.layouts.base import dense
from moe_nvfp4.quantize.model import ModelTensors, UnknownModel
from moe_nvfp4.quantize.names import DENSE, KV_SCALE, PRE_QUANT_SCALE, is_dense_linear, is_scale
from moe_nvfp4.quantize.plan import ConversionPlan, nothing_there, nvfp4_files, plan_of, scale_warnings
from moe_nvfp4.weights import check_block_scales, check_global_scale

PIECE = 1 << 22  # bytes read at once
STEP = 1 << 16  # elements compared at once: in a CPU's cache. With larger steps malloc's memory grew with every matrix
FAR = 0.5  # the largest relative error of an expert; gptq on a few tokens has 0.12, rounding to NVFP4 at most 0.2


@dataclass
class VerificationReport:
    folder: str
    matrices: int = 0
    tensors: int = 0
    size: int = 0  # bytes read
    layers: dict[str, ErrorSums] = field(default_factory=dict)  # with a source to compare with
    experts: dict[str, ErrorSums] = field(default_factory=dict)  # also with a source, by model.layers.0.mlp.experts.3
    warnings: list[str] = field(default_factory=list)  # what was not compared, and what other programs misread

    def lines(self) -> Iterator[str]:
        yield f"{self.folder}: {self.matrices} NVFP4 matrices, {self.tensors} other tensors, {self.size:,} bytes: good"
        yield from self.warnings
        if self.layers:
            yield f"{'':44s}{'matrices':>10s}{'relative error':>16s}{'SNR (dB)':>10s}"
        for name, layer in self.layers.items():
            yield f"{name:44s}{layer.matrices:10d}{layer.relative:16.5f}{layer.snr:10.2f}"


def verify_checkpoint(folder: str | os.PathLike, against: str | os.PathLike | None = None) -> VerificationReport:
    """Read every byte of the NVFP4 checkpoint in `folder` and check it. With `against`, also compare it with
    the checkpoint that it was made from: dense, FP8, MXFP4, or NVFP4 in any dialect and layout.

    Checked: headers and index; dtypes and shapes of codes and scales; block scales are neither negative nor NaN,
    global scales positive and finite, dense and FP8 weights finite; every expert of a layer is complete; every scale
    is read by something; no tensor that the model needs is missing, where transformers knows the model. With
    `against`: none of its tensors is missing, and no expert is farther from it than quantizing can explain.
    Raises ValueError naming the first tensor that fails.
    """
    checkpoint = open_checkpoint(folder)
    info, files = nvfp4_files(checkpoint)
    report, dialect = VerificationReport(str(folder)), info.dialect
    if not files.matrices:
        raise ValueError(nothing_there(str(folder), files, dialect))
    for _, matrix in sorted(files.matrices.items()):
        _check_matrix(matrix)
    for name, scale in files.fp8.items():
        _check_fp8(name, scale, checkpoint)
    for name, stored in (files.left | files.parameters).items():
        if is_scale(name, files.left):
            raise ValueError(nvfp4.UNREAD.format(name))
        _check_dense(name, stored)
    try:
        report.warnings += _surplus(ModelTensors.of(checkpoint), files)
    except UnknownModel as error:
        report.warnings.append(f"warning: not compared with the model's own list of tensors: {error}. Tensors that are "
                               "missing for the whole model or a whole layer were not noticed")  # fmt: skip
    report.matrices = len(files.matrices)
    report.tensors, report.size = len(files.left), sum(t.size for t in checkpoint.tensors.values())
    report.warnings += [*_unlisted(files, info), *_without_input_scales(files, info), *scale_warnings(checkpoint)]
    if against is not None:
        report.experts = _compare(checkpoint, open_checkpoint(against), files.left)
        for name, expert in report.experts.items():
            report.layers.setdefault(_layer_of(name), ErrorSums()).include(expert)
    return report


def _surplus(model: ModelTensors, files: nvfp4.NVFP4Files) -> Iterator[str]:
    """Yield a warning if the files have tensors that `model` lacks. ValueError if they lack tensors that it needs."""
    if surplus := model.check(files.given()):
        some = ", ".join(surplus[:3]) + (", ..." if len(surplus) > 3 else "")
        yield (f"warning: {len(surplus)} tensors are none of {model.name}'s, by config.json, and nothing reads them: "
               f"{some}")  # fmt: skip


def _unlisted(files: nvfp4.NVFP4Files, info: QuantizationInfo) -> Iterator[str]:
    """Yield a warning if layers are dense and the config's ignore list does not name them."""
    modules = dict.fromkeys(
        re.sub(r"(\bexperts)\..*", r"\1", name.removesuffix(".weight")) for name in files.dense_weights()
        if is_dense_linear(name, files.left[name]) or "experts." in name
    )  # fmt: skip
    inside = ("", ".0.down_proj", ".0.w2")
    found = [m for m in modules if not any(info.ignores(f"{m}{i}") for i in inside)]
    if info.whole and found:
        some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        yield (f"warning: {len(found)} layers are dense and not in the ignore list of config.json: {some}. This "
               "library reads what is there; a server may take them for NVFP4, and fail or misread them: add them to "
               "the list")  # fmt: skip


def _without_input_scales(files: nvfp4.NVFP4Files, info: QuantizationInfo) -> Iterator[str]:
    """Yield a warning if the config says that all layers quantize activations, and some have no scale for them."""
    last = info.dialect.input_scale
    found = [n for n, matrix in files.matrices.items() if last not in matrix.tensors and not EMBEDDING.search(n)]
    if info.activations == "nvfp4" and info.layers is None and not info.mixed and found:
        yield (f"warning: {len(found)} of {len(files.matrices)} matrices have no {last} ({found[0]}, ...), and "
               "config.json says that activations are quantized. This library computes a scale for each token; servers "
               "go on with a number that nobody wrote: moe-nvfp4 calibrate adds them")  # fmt: skip


def _check_matrix(matrix: nvfp4.NVFP4Matrix) -> None:
    """Check every number of a matrix. ValueError naming the tensor that fails."""
    dialect = matrix.dialect
    for last, stored in matrix.tensors.items():
        name = matrix.names[last]
        if last in (dialect.global_scale, dialect.input_scale):
            check_global_scale(dialect.decode_scale(stored.tensor()), name)
        elif last == PRE_QUANT_SCALE:
            if not stored.tensor().isfinite().all():
                raise ValueError(f"{name} {list(stored.shape)} must be finite, one for each column")
        elif last == dialect.sf:
            _read(stored, partial(check_block_scales, name=name))
        elif last == "bias":
            _check_dense(name, stored)
        else:
            _read(stored)


def _check_fp8(name: str, scale: str, checkpoint: Checkpoint) -> None:
    """ValueError unless the FP8 weight `name` and its scales, the tensor `scale`, are finite."""
    codes, scales = checkpoint.tensors[name], checkpoint.tensors[scale]

    def finite(piece: Tensor) -> None:
        if (piece & 0x7F == 0x7F).any():
            raise ValueError(f"{name} has NaN: the original has them too, or the file is damaged")

    _read(codes, finite)
    if scales.dtype in DENSE:  # else e8m0, whose NaN is byte 255
        _check_dense(scale, scales)
    elif (scales.read() == 255).any():
        raise ValueError(f"{scale} has NaN: the original has them too, or the file is damaged")


def _check_dense(name: str, stored: TensorSlice) -> None:
    def finite(piece: Tensor) -> None:
        if not piece.view(TORCH_DTYPES[stored.dtype]).isfinite().all():
            raise ValueError(f"{name} has NaN or Inf: the original has them too, or the file is damaged")

    _read(stored, finite if stored.dtype in DENSE else lambda piece: None)


def _read(stored: TensorSlice, check: Callable[[Tensor], None] = lambda piece: None) -> None:
    """Read every byte and call `check` with it, in pieces uint8 [n]."""
    read = stored.reader()
    for at in range(0, stored.size, PIECE):
        check(read(at, min(PIECE, stored.size - at)))


# ---------------------------------------------------------------- against the original
def _compare(checkpoint: Checkpoint, source: Checkpoint, left: Mapping[str, TensorSlice]) -> dict[str, ErrorSums]:
    """The error of every expert or other matrix, by name. ValueError where the checkpoints do not belong together.

    left: the tensors of `checkpoint` that are neither NVFP4 nor FP8.
    """
    expert_of = lambda stem: re.sub(r"(\bexperts\.\d+)\..*", r"\1", stem)
    ours = plan_of(checkpoint)
    packed = ours.matrices
    plan = plan_of(source, {_layer_of(stem) for stem in packed})
    experts: dict[str, ErrorSums] = {}
    for stem, matrix in packed.items():
        if stem not in plan.matrices:
            raise ValueError(f"{stem} has no original in {source.folder}: it was made from another checkpoint")
        _add_error(experts.setdefault(expert_of(stem), ErrorSums()), stem, matrix, plan.matrices[stem])
    for name, expert in experts.items():
        if not expert.error <= FAR**2 * expert.square:
            raise ValueError(f"{name} is {expert.relative:.3g} times its norm away from its original in "
                             f"{source.folder}, and no recipe exceeds {FAR}: the file is damaged, or was made from "
                             "another checkpoint")  # fmt: skip
    for name in sorted(plan.matrices.keys() - packed.keys()):
        if name not in left and f"{name}.weight" not in left:
            raise ValueError(f"{name} is in {source.folder} and neither quantized nor dense in {checkpoint.folder}")
    for name in sorted(_others(plan) - _others(ours)):
        if name.removesuffix(".weight") not in packed and not _may_go(name, checkpoint):
            raise ValueError(f"{name} is in {source.folder} and not in {checkpoint.folder}: the conversion was not "
                             "complete, or a tensor was lost since; quantize again")  # fmt: skip
    for name, stored in left.items():
        original, found = source.tensors.get(name), plan.dequantized.get(name)
        if found is not None and not _is_dense(stored, found):
            raise ValueError(f"{name} is not what it is in {source.folder}: it should have been made dense exactly")
        if found is None and original is not None and not _same(stored, original):
            raise ValueError(f"{name} is not what it is in {source.folder}: it should have been copied"
                             + ("" if stored.dtype == original.dtype else f", rounded to {stored.dtype}"))  # fmt: skip
    return experts


def _layer_of(stem: str) -> str:
    return re.sub(r"(\bexperts)\..*", r"\1", stem)


def _others(plan: ConversionPlan) -> set[str]:
    """The names of the tensors that a plan writes, except those of NVFP4 matrices."""
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
    rows, packed_rows, step = matrix.open(), packed.open(), max(1, STEP // packed.columns)
    for a in range(0, packed.rows, step):
        b = min(a + step, packed.rows)
        original = rows(a, b).float()
        if not original.isfinite().all():
            raise ValueError(f"the original of {stem} has NaN or Inf: this was made from another checkpoint, or the "
                             "original has been damaged since: download it again")  # fmt: skip
        layer.add(packed_rows(a, b)[:, : matrix.columns], original)
    layer.matrices += 1


def _is_dense(stored: TensorSlice, found: Matrix | list[Matrix]) -> bool:
    """Whether `stored` is exactly the matrix `found`, or the stack [E, K, N] of matrices [N, K], cast to its dtype."""
    if isinstance(found, list):
        views = (TensorView.of(stored.expert(e), lambda t: t.T) for e in range(len(found)))
        return stored.shape[0] == len(found) and all(map(_is_dense, views, found))
    if stored.shape != (found.rows, found.columns):
        return False
    dtype, read, rows, step = TORCH_DTYPES[stored.dtype], stored.reader(), found.open(), max(1, STEP // found.columns)
    width = found.columns * dtype.itemsize
    pieces = ((a, min(a + step, found.rows)) for a in range(0, found.rows, step))
    return all(
        torch.equal(read(a * width, (b - a) * width), rows(a, b).to(dtype).view(torch.uint8).view(-1))
        for a, b in pieces
    )


def _same(stored: TensorSlice, original: TensorSlice) -> bool:
    """Whether `stored` has the values of `original`, in its dtype, or rounded to another floating-point one."""
    if stored.shape != original.shape:
        return False
    if stored.dtype != original.dtype:
        column = math.prod(stored.shape), 1
        floating = {stored.dtype, original.dtype} <= {*DENSE}
        return floating and _is_dense(replace(stored, shape=column), dense(replace(original, shape=column)))
    pieces = ((at, min(PIECE, stored.size - at)) for at in range(0, stored.size, PIECE))
    return all(torch.equal(stored.read(*piece), original.read(*piece)) for piece in pieces)
