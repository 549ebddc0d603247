"""Check an NVFP4 checkpoint: whether every tensor is present and valid, and how far it is from the original."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from moe_nvfp4.quantize.against import compare, layer_of
from moe_nvfp4.quantize.dialects import EMBEDDING, QuantizationInfo
from moe_nvfp4.quantize.files import TORCH_DTYPES, Checkpoint, TensorSlice, open_checkpoint
from moe_nvfp4.quantize.layouts import ErrorSums, nvfp4
from moe_nvfp4.quantize.model import ModelTensors, UnknownModel, model_config
from moe_nvfp4.quantize.names import DENSE, PRE_QUANT_SCALE, by_number, is_dense_linear, is_scale, mtp_layer, up_of
from moe_nvfp4.quantize.plan import scale_warnings
from moe_nvfp4.quantize.settings import differences, settings
from moe_nvfp4.quantize.source import nothing_there, nvfp4_files
from moe_nvfp4.weights import check_block_scales, check_global_scale

PIECE = 1 << 22  # bytes read at once
BOUNDS = ("_min", "_max")  # of a clamp, infinite where nothing is clipped: Gemma 4's audio tower


@dataclass
class VerificationReport:
    folder: str
    matrices: int = 0
    tensors: int = 0
    size: int = 0  # bytes read
    layers: dict[str, ErrorSums] = field(default_factory=dict)  # with a source to compare with
    experts: dict[str, ErrorSums] = field(default_factory=dict)  # also with a source, by model.layers.0.mlp.experts.3
    warnings: list[str] = field(default_factory=list)  # what was not compared, and what other programs misread


def verify_checkpoint(folder: str | os.PathLike, against: str | os.PathLike | None = None) -> VerificationReport:
    """Read every byte of the NVFP4 checkpoint in `folder` and check it. With `against`, also compare it with
    the checkpoint that it was made from: dense, FP8, MXFP4, or NVFP4 in any dialect and layout.

    Checked: headers and index; dtypes and shapes of codes and scales; block scales are neither negative nor NaN,
    global scales positive and finite, dense and FP8 weights finite (bounds of a clamp may be infinite); every expert of
    a layer is complete; every scale is read by something; no tensor that the model needs is missing, where transformers
    knows the model. With `against`: none of its tensors is missing, and no expert is farther from it than quantizing
    can explain.
    Raises ValueError naming the first tensor that fails.
    """
    checkpoint = open_checkpoint(folder)
    info, files = nvfp4_files(checkpoint)
    report, dialect = VerificationReport(str(folder)), info.dialect
    if not files.matrices:
        raise ValueError(nothing_there(str(folder), files, dialect))
    names = sorted(files.matrices, key=by_number)
    zeros = [name for name in names if not _check_matrix(files.matrices[name])]
    _check_pre_quant_scales(files.matrices)
    for name, scale in files.fp8.items():
        _check_fp8(name, scale, checkpoint)
    for name, stored in files.left.items():
        if is_scale(name, files.left):
            raise ValueError(nvfp4.UNREAD.format(name))
        _check_dense(name, stored)
    try:
        report.warnings += _surplus(ModelTensors.of(checkpoint), files, checkpoint.layers)
    except UnknownModel as error:
        report.warnings.append(f"warning: not compared with the model's own list of tensors: {error}. Tensors that are "
                               "missing for the whole model or a whole layer were not noticed")  # fmt: skip
    report.warnings += _all_zero(zeros)
    report.matrices = len(files.matrices)
    report.tensors, report.size = len(files.left), sum(t.size for t in checkpoint.tensors.values())
    report.warnings += [*_unlisted(files, info), *_listed(files, info), *_without_input_scales(files, info)]
    report.warnings += scale_warnings(checkpoint)
    if against is not None:
        source = open_checkpoint(against)
        report.warnings += _other_settings(checkpoint, source)
        found, warnings = compare(checkpoint, source, info)
        report.warnings += warnings
        report.experts = {name: found[name] for name in sorted(found, key=by_number)}
        for name, expert in report.experts.items():
            report.layers.setdefault(layer_of(name), ErrorSums()).include(expert)
    return report


def _surplus(model: ModelTensors, files: nvfp4.NVFP4Files, layers: int | None) -> Iterator[str]:
    """Yield a warning if the files have tensors that `model` lacks, but for layers of multi-token prediction after the
    last of `layers`, which are named so or have an eh_proj. ValueError if they lack tensors that it needs."""
    given = files.given()
    predict = {mtp_layer(name, layers) for name in given if re.search(r"\.eh_proj\.|(^|\.)mtp(_\w+)?\.", name)}
    if surplus := [name for name in model.check(given) if (mtp_layer(name, layers) or "") not in predict]:
        some = ", ".join(surplus[:3]) + (", ..." if len(surplus) > 3 else "")
        yield (f"warning: {len(surplus)} tensors are none of {model.name}'s, by config.json, and nothing reads them: "
               f"{some}")  # fmt: skip


def _other_settings(checkpoint: Checkpoint, source: Checkpoint) -> Iterator[str]:
    """Yield a warning if config.json has other settings than that of the source, where transformers knows both."""
    try:
        mine, theirs = (settings(model_config(c.folder)) for c in (checkpoint, source))
    except UnknownModel:
        return
    if found := differences(mine, theirs):
        yield (f"warning: config.json has other settings than that of {source.folder}: {found}. The model computes "
               "something else with them")  # fmt: skip


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _unlisted(files: nvfp4.NVFP4Files, info: QuantizationInfo) -> Iterator[str]:
    """Yield a warning if layers are dense and the config's ignore list does not name them."""
    modules = dict.fromkeys(
        re.sub(r"(\bexperts)\..*", r"\1", name.removesuffix(".weight")) for name in files.dense_weights()
        if is_dense_linear(name, files.left[name]) or "experts." in name
    )  # fmt: skip
    inside = ("", ".0.down_proj", ".0.w2")
    found = [m for m in modules if not any(info.ignores(f"{m}{i}") for i in inside)]
    if info.whole and found:
        yield (f"warning: {len(found)} layers are dense and not in the ignore list of config.json: {_some(found)}. "
               "This library reads what is there; a server may take them for NVFP4, and fail or misread them: add "
               "them to the list")  # fmt: skip


def _listed(files: nvfp4.NVFP4Files, info: QuantizationInfo) -> Iterator[str]:
    """Yield a warning if layers are 4-bit and the config's ignore list names them."""
    packed = {re.sub(r"(\bexperts)\..*", r"\1", stem): stem for stem in files.matrices}
    if named := sorted((module for module, stem in packed.items() if info.ignores(stem)), key=by_number):
        yield (f"warning: {len(named)} layers are 4-bit and in the ignore list of config.json: {_some(named)}. "
               "This library reads what is there; a server takes them for dense, and fails or misreads them: take them "
               "off the list")  # fmt: skip


def _without_input_scales(files: nvfp4.NVFP4Files, info: QuantizationInfo) -> Iterator[str]:
    """Yield a warning if the config says that all layers quantize activations, and some have no scale for them."""
    last = info.dialect.input_scale
    found = [n for n, matrix in files.matrices.items() if last not in matrix.tensors and not EMBEDDING.search(n)]
    if info.activations == "nvfp4" and info.layers is None and not info.mixed and found:
        yield (f"warning: {len(found)} of {len(files.matrices)} matrices have no {last} ({found[0]}, ...), and "
               "config.json says that activations are quantized. This library computes a scale for each token; servers "
               "go on with a number that nobody wrote: moe-nvfp4 calibrate adds them")  # fmt: skip


def _all_zero(names: list[str]) -> Iterator[str]:
    """Yield a warning if there are matrices whose elements are all 0."""
    if names:
        yield (f"warning: all elements of {len(names)} matrices are 0 ({_some(names)}): experts were pruned, "
               "or what was written is not what was read; --against SRC tells")  # fmt: skip


def _check_pre_quant_scales(matrices: Mapping[str, nvfp4.NVFP4Matrix]) -> None:
    """ValueError where AWQ's scales of gate and up differ, which have one input: loading refuses them."""
    for stem, matrix in matrices.items():
        up = matrices.get(up_of(stem) or "")
        scales = [m.tensors[PRE_QUANT_SCALE] for m in (matrix, up) if m is not None and PRE_QUANT_SCALE in m.tensors]
        if len(scales) == 2 and not torch.equal(*(t.tensor() for t in scales)):
            raise ValueError(f"{matrix.names[PRE_QUANT_SCALE]} differs from that of up_proj, but gate and up have one "
                             "input: use the tool that wrote these files")  # fmt: skip


def _check_matrix(matrix: nvfp4.NVFP4Matrix) -> bool:
    """Check every number of a matrix: whether any is not 0. ValueError naming the tensor that fails."""
    dialect, not_zero = matrix.dialect, set[str]()
    for last, stored in matrix.tensors.items():
        name = matrix.names[last]
        if last in (dialect.global_scale, dialect.input_scale):
            check_global_scale(dialect.decode_scale(stored.tensor()), name)
        elif last == PRE_QUANT_SCALE:
            if not stored.tensor().isfinite().all():
                raise ValueError(f"{name} {list(stored.shape)} must be finite, one for each column")
        elif last == dialect.sf:
            _read(stored, partial(_check_sf, name=name, seen=not_zero))
        elif last == "bias":
            _check_dense(name, stored)
        else:
            _read(stored, partial(_check_codes, name=name, seen=not_zero))
    return {matrix.names[dialect.weight], matrix.names[dialect.sf]} <= not_zero


def _check_codes(piece: Tensor, name: str, seen: set[str]) -> None:
    """seen: gets `name` if a code is neither 0 nor -0."""
    if (piece & 0x77).any():
        seen.add(name)


def _check_sf(piece: Tensor, name: str, seen: set[str]) -> None:
    """Check bytes of block scales. seen: gets `name` if one is not 0."""
    if (piece == 0x80).any():
        raise ValueError(f"{name} holds a block scale of -0.0 (byte 0x80), and block scales are not negative: the file "
                         "is damaged, or is not NVFP4; quantize again")  # fmt: skip
    check_block_scales(piece, name)
    if piece.any():
        seen.add(name)


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
    bound = name.endswith(BOUNDS)

    def finite(piece: Tensor) -> None:
        values = piece.view(TORCH_DTYPES[stored.dtype])
        if (values.isnan() if bound else ~values.isfinite()).any():
            what = "NaN" if bound else "NaN or Inf"
            raise ValueError(f"{name} has {what}: the original has them too, or the file is damaged")

    _read(stored, finite if stored.dtype in DENSE else lambda piece: None)


def _read(stored: TensorSlice, check: Callable[[Tensor], None] = lambda piece: None) -> None:
    """Read every byte and call `check` with it, in pieces uint8 [n]."""
    read = stored.reader()
    for at in range(0, stored.size, PIECE):
        check(read(at, min(PIECE, stored.size - at)))
