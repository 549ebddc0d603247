"""Put the experts and linears of an NVFP4 checkpoint into a GGUF file, for llama.cpp.

llama.cpp computes with NVFP4, and cannot quantize to it. Here it gets a checkpoint's codes and scales as they are. All
else (settings, tokenizer, attention, ...) is that of another GGUF file of the same model, byte for byte.

A row of NVFP4 in GGUF (block_nvfp4 of ggml-common.h) is blocks of 36 bytes for 64 columns: four block scales (e4m3
without a sign), then eight bytes for each 16 columns, with the codes of columns 0 to 7 in their low halves and of 8 to
15 in their high ones. The experts' global scales are a tensor fp32 [E] of their own, a linear's is fp32 [1], named
`.scale` instead of `.weight`. As everywhere, value = code * sf * global_scale.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_nvfp4.progress import progress_bar
from moe_nvfp4.quantize.convert import check_space
from moe_nvfp4.quantize.files import open_checkpoint
from moe_nvfp4.quantize.layouts.nvfp4 import NVFP4Matrix
from moe_nvfp4.quantize.names import PER_EXPERT, PLAIN_NAMES, PRE_QUANT_SCALE, is_mtp
from moe_nvfp4.quantize.plan import nvfp4_files

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, GGUFWriter, ReaderTensor

BLOCK = 64  # columns of one block in GGUF
PARTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
GATE_UP = "ffn_gate_up_exps"
# Values of general.architecture whose graph multiplies with the experts' `.scale`, and the other tensors with whose it
# does, as seen by running llama.cpp 0c1e57098. Other scales it loads and does not use: it would compute with global
# scales of 1.
ATTENTION = frozenset({"attn_q", "attn_k", "attn_v", "attn_output", "output"})
USE_SCALES = {
    "llama": ATTENTION,
    "nemotron_h_moe": ATTENTION | {"ffn_up_shexp", "ffn_down_shexp", "ssm_in", "ssm_out"},
    "qwen3moe": ATTENTION,
    "qwen3next": ATTENTION | {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"},
}
# Rows of these may be in another order in the base: llama.cpp rotates neighbours, and transformers halves of a head
ROTATED = {"attn_q": ("head_count",), "attn_k": ("head_count_kv", "head_count")}
ROWS = 1024  # of a matrix that are compared at once
# NVFP4 moves a matrix by about 0.1 of its norm, and the types of GGUF files (Q8_0, Q4_K, ...) by less. The matrix of
# another expert or model, or one in another order, is off by more than 1.
FAR = 0.35
MOSTLY_NVFP4 = 39  # general.file_type (llama.h)
# Names of tensors, and whether each may be multiplied with 4-bit activations, as llama.cpp does on Blackwell GPUs
EXTRA = ("general.tensor_extra.name", "general.tensor_extra.prec_a4")


@dataclass
class ExportReport:
    """What `export_gguf` did. Sizes are bytes of what became NVFP4."""

    matrices: int = 0
    layers: int = 0
    before: int = 0
    after: int = 0
    error: float = 0.0  # the largest relative distance of a matrix from that of the base
    left: dict[str, str] = field(default_factory=dict)  # 4-bit matrices that stay as the base has them -> why


@dataclass(frozen=True)
class Place:
    """A tensor of the base that is replaced.

    parts  the matrices of each expert in it: one, or gate and up; of a linear [[it]]
    scale  the base's own factors of the outputs, fp32 [E], as Gemma 4's experts have them
    order  the rows of a linear as the base may have them instead, int64 [N]
    """

    stored: ReaderTensor
    parts: list[list[NVFP4Matrix]]
    scale: ReaderTensor | None
    order: Tensor | None = None

    @staticmethod
    def scale_of(name: str) -> str:
        return f"{name.removesuffix('.weight')}.scale"

    @property
    def shape(self) -> tuple[int, ...]:
        """E if it is a stack, rows, bytes of a row."""
        *rest, columns = _shape(self.stored)
        return (*rest, columns // BLOCK * 36)

    @property
    def size(self) -> int:
        """In bytes, with the global scales."""
        return math.prod(self.shape) + 4 * len(self.parts)


def export_gguf(
    folder: str | os.PathLike,
    base: str | os.PathLike,
    destination: str | os.PathLike,
    any_architecture: bool = False,
    progress: bool = True,
) -> ExportReport:
    """Write a GGUF file: the file `base`, with its experts and linears replaced by those of the NVFP4 checkpoint in
    `folder`. Linears with whose global scale llama.cpp does not multiply stay as the base has them.

    base              a GGUF file of the same model, in one piece, of any type (Q8_0, BF16, Q4_K, ...)
    any_architecture  also where llama.cpp was not seen to multiply with the experts' global scales

    Each matrix is compared with the one that it replaces. Memory holds one tensor at a time. The destination
    appears at the end, complete; an interrupted run leaves nothing. Raises ValueError for what does not fit, naming the
    tensor, the rule and the way out; ImportError without the package gguf.
    """
    gguf = _package()
    base, destination = Path(base), Path(os.path.abspath(destination))
    if destination.exists() or destination.is_symlink():
        raise ValueError(f"{destination} exists: name a file that does not, or remove it first")
    reader = _open(gguf, base, any_architecture)
    checkpoint = open_checkpoint(folder)
    info, files = nvfp4_files(checkpoint)
    # a file may allow 4-bit activations; where only some layers were made for them, all stay exact
    activations = checkpoint.own.get("activations", "bf16" if info.mixed else info.activations)
    report = ExportReport()
    found = _places(gguf, reader, files.matrices, checkpoint.layers, report)
    places = {place.stored.name: place for place in found}
    if not places:
        raise ValueError(f"{folder} has no NVFP4 matrices that are in {base}: nothing to do")
    kept = sum(int(t.n_bytes) for t in reader.tensors if t.name not in places)
    report.before = sum(int(place.stored.n_bytes) for place in places.values())
    report.after = sum(place.size for place in places.values())
    check_space(destination, kept + report.after)

    work = destination.with_name(f".{destination.name}.partial")
    work.unlink(missing_ok=True)  # a link would be followed
    writer = gguf.GGUFWriter(work, _field(reader, "general.architecture"))
    writer.data_alignment = int(reader.alignment)  # the setting that says so is copied
    try:
        _copy_fields(gguf, reader, writer, places if activations == "bf16" else ())
        writes = list(_writes(gguf, reader, writer, places, report))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with progress_bar(total=kept + report.after, desc="export", unit="B", unit_scale=True, show=progress) as bar:
            for data in writes:
                made = data()
                writer.write_tensor_data(made)
                bar.update(made.nbytes)
        writer.close()
        os.replace(work, destination)
    finally:
        writer.close()
        work.unlink(missing_ok=True)
    return report


# ---------------------------------------------------------------- what is written
def _copy_fields(gguf: Any, reader: GGUFReader, writer: GGUFWriter, only_16_bit: Iterable[str]) -> None:
    """Copy the settings of the base. only_16_bit: tensors that are not to be multiplied with 4-bit activations."""
    for name, stored in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", *EXTRA):
            continue  # the writer's own
        if stored.types[:2] == 2 * [gguf.GGUFValueType.ARRAY]:  # the reader has lost where the inner ones end
            raise ValueError(
                f"{name} of the base is an array of arrays, which cannot be copied: name a file without it"
            )
        value = MOSTLY_NVFP4 if name == "general.file_type" else stored.contents()
        inner = stored.types[-1] if stored.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, stored.types[0], sub_type=inner)
    names, values = (_field(reader, name) or [] for name in EXTRA)
    allowed = dict(zip(names, values, strict=True)) | dict.fromkeys(only_16_bit, False)
    if allowed:
        writer.add_array(EXTRA[0], list(allowed))
        writer.add_array(EXTRA[1], list(allowed.values()))


def _writes(
    gguf: Any, reader: GGUFReader, writer: GGUFWriter, places: Mapping[str, Place], report: ExportReport
) -> Iterator[Callable[[], np.ndarray]]:
    """Announce each tensor to the writer, and yield what makes its data."""
    import numpy as np

    nvfp4, scales = gguf.GGMLQuantizationType.NVFP4, set(map(Place.scale_of, places))
    for stored in reader.tensors:
        if stored.name in scales:
            continue
        if (place := places.get(stored.name)) is None:
            data = stored.data
            writer.add_tensor_info(stored.name, data.shape, data.dtype, data.nbytes, stored.tensor_type)
            yield partial(np.asarray, data)
            continue
        E = len(place.parts)
        writer.add_tensor_info(stored.name, place.shape, np.dtype(np.uint8), math.prod(place.shape), nvfp4)
        yield partial(_data, gguf, place, report)
        writer.add_tensor_info(Place.scale_of(stored.name), (E,), np.dtype(np.float32), 4 * E)
        yield partial(_scales, place)


def _data(gguf: Any, place: Place, report: ExportReport) -> np.ndarray:
    """uint8 of the place's shape, compared with what the base has."""
    stored, found = place.stored, []
    rows = stored.data.reshape(-1, stored.data.shape[-1])
    dequantize = partial(gguf.quants.dequantize, qtype=stored.tensor_type)
    for part in (part for expert in place.parts for part in expert):
        here, rows = rows[: part.shape[0]], rows[part.shape[0] :]
        orders = [None] if place.order is None else [None, place.order]
        errors = [_distance(part, order, here, dequantize) for order in orders]
        error = min(errors)
        if not error <= FAR:  # NaN is far
            share = "everything: it is zero there" if error == math.inf else f"{error:.2f} of its norm"
            raise ValueError(f"{part.stem} differs from its place in {stored.name} of the base by {share}, and 4-bit "
                             "weights by about 0.1: the two are of different models, or the base has the experts in "
                             "another order; name a GGUF file of the model that was quantized")  # fmt: skip
        report.error = max(report.error, error)
        report.matrices += 1
        order, blocks = orders[errors.index(error)], blocks_of(*_codes_and_sf(part))
        found.append(blocks if order is None else blocks[order])
    return torch.cat(found).view(place.shape).numpy()


def _scales(place: Place) -> np.ndarray:
    """fp32 [E], [1] of a linear. Gate and up in one stack have one."""
    found = torch.stack([parts[0].matrix().known_scale() for parts in place.parts]).float().numpy()
    return found if place.scale is None else found * place.scale.data


def _codes_and_sf(matrix: NVFP4Matrix) -> tuple[Tensor, Tensor]:
    dialect = matrix.dialect
    return matrix.tensors[dialect.weight].tensor(), matrix.tensors[dialect.sf].tensor().view(torch.uint8)


def blocks_of(codes: Tensor, sf: Tensor) -> Tensor:
    """Codes uint8 [N, K/2], the even column in the low half of a byte, and sf uint8 [N, K/16] -> uint8 [N, K/64*36]."""
    N = codes.shape[0]
    of_block = torch.stack((codes & 15, codes >> 4), dim=-1).view(N, -1, 4, 2, 8)
    packed = of_block[..., 0, :] | of_block[..., 1, :] << 4
    return torch.cat((sf.view(N, -1, 4), packed.flatten(2)), dim=-1).flatten(1)


def _distance(
    part: NVFP4Matrix, order: Tensor | None, rows: np.ndarray, dequantize: Callable[[np.ndarray], np.ndarray]
) -> float:
    """||values - rows|| / ||rows||, where the values have their rows in this order. Infinite if only rows are zero."""
    values = part.matrix().open()
    if order is not None:
        whole = values(0, len(rows))[order]
        values = lambda a, b: whole[a:b]
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    square = of_rows = 0.0
    for a in range(0, len(rows), ROWS):
        before = torch.tensor(dequantize(rows[a : a + ROWS]))
        square += float(norm(values(a, a + len(before)) - before)) ** 2
        of_rows += float(norm(before)) ** 2
    if of_rows == 0:
        return math.inf if square else 0.0
    return math.sqrt(square / of_rows)


# ---------------------------------------------------------------- what belongs where
def _places(
    gguf: Any, reader: GGUFReader, matrices: Mapping[str, NVFP4Matrix], last: int | None, report: ExportReport
) -> Iterator[Place]:
    """The tensors of the base that are replaced. ValueError where matrices do not fit. last: layers of the model."""
    layers: dict[int, dict[tuple[int, str], NVFP4Matrix]] = {}
    linears = {}
    for stem, matrix in matrices.items():
        expert, layer = PER_EXPERT.fullmatch(stem), re.search(r"(?:^|\.)layers\.(\d+)\.", stem)
        if expert is None:
            linears[stem] = matrix
        elif layer is None or is_mtp(stem, None):
            report.left[stem] = "experts outside the layers"
        else:
            part = PLAIN_NAMES.get(expert["part"], expert["part"])
            layers.setdefault(int(layer[1]), {})[int(expert["e"]), part] = matrix
    there = {t.name: t for t in reader.tensors}
    for number, found in sorted(layers.items()):
        names = {part: f"blk.{number}.{name}.weight" for part, name in PARTS.items()}
        if (together := f"blk.{number}.{GATE_UP}.weight") in there:
            yield _stack(there, together, found, ("gate_proj", "up_proj"))
            names = {"down_proj": names["down_proj"]}
        for part in sorted({part for _, part in found} & set(names)):
            yield _stack(there, names[part], found, (part,))
        report.layers += 1
    name_of = _names(gguf, reader)
    for stem, matrix in linears.items():
        name = None if is_mtp(stem, last) else name_of(stem)
        if (why := _why_left(reader, there, name, matrix)) is not None:
            report.left[stem] = why
        elif name is not None:
            yield _linear(reader, there, name, matrix)


def _names(gguf: Any, reader: GGUFReader) -> Callable[[str], str | None]:
    """A function: the name of a linear's weight in the GGUF file."""
    architecture = _field(reader, "general.architecture")
    known = next((a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if known is None:
        return lambda stem: None
    names = gguf.get_tensor_name_map(known, int(_field(reader, f"{architecture}.block_count") or 0))

    def name_of(stem: str) -> str | None:
        if ".mixer." in stem:  # transformers' names of Nemotron-H; the package knows the original ones
            stem = re.sub(r"^model\.", "backbone.", stem)
        found = names.get_name(stem)
        return None if found is None else f"{found}.weight"

    return name_of


def _why_left(
    reader: GGUFReader, there: Mapping[str, ReaderTensor], name: str | None, matrix: NVFP4Matrix
) -> str | None:
    """Why a linear stays as the base has it; None: it is replaced. name: the place that it belongs to, if any."""
    architecture = _field(reader, "general.architecture")
    if name is None or name.split(".")[-2] not in USE_SCALES.get(architecture, ()):
        return f"llama.cpp's graph for {architecture} was not seen to multiply with their global scales"
    if name not in there:
        return "the base has no tensor for each of them: it has fused ones, or the embedding as the head"
    if PRE_QUANT_SCALE in matrix.tensors:
        return "AWQ's scales have no place in GGUF"
    return f"their columns are no multiple of {BLOCK}" if matrix.shape[1] % BLOCK else None


def _linear(reader: GGUFReader, there: Mapping[str, ReaderTensor], name: str, matrix: NVFP4Matrix) -> Place:
    """ValueError if the matrix does not fit its place."""
    stored, rows = there[name], matrix.shape[0]
    if _shape(stored) != matrix.shape:
        raise ValueError(f"{name} of the base is {list(_shape(stored))}, and {matrix.stem} is {list(matrix.shape)}: "
                         "name a GGUF file of the model that was quantized")  # fmt: skip
    _check_type(stored)
    return Place(stored, [[matrix]], there.get(Place.scale_of(name)), _rotated(reader, name, rows))


def _rotated(reader: GGUFReader, name: str, rows: int) -> Tensor | None:
    """The order of the rows of q and k that llama.cpp's converter makes for some architectures, int64 [rows]."""
    *_, layer, last, _ = ("", *name.split("."))
    architecture = _field(reader, "general.architecture")
    found = (_field(reader, f"{architecture}.attention.{key}") for key in ROTATED.get(last, ()))
    heads = next((number for number in found if number is not None), None)
    if isinstance(heads, list):  # one number for each layer
        heads = heads[int(layer)]
    if not heads or rows % (2 * heads):
        return None
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def _stack(
    there: Mapping[str, ReaderTensor], name: str, found: Mapping[tuple[int, str], NVFP4Matrix], parts: tuple[str, ...]
) -> Place:
    """A stack of experts. ValueError where they do not fit it."""
    of_experts = [[found[e, part] for part in parts] for e in range(1 + max(e for e, _ in found))]
    first, stored = of_experts[0][0], there.get(name)
    if stored is None:
        raise ValueError(
            f"the base has no {name}, where {first.stem} belongs: it is of another model, or an old file "
            "with a tensor for each expert; convert the original with llama.cpp's convert_hf_to_gguf.py"
        )
    (N, K), have = first.shape, _shape(stored)
    if have != (len(of_experts), N * len(parts), K):
        raise ValueError(f"{name} of the base is {list(have)}, and {first.stem} is one of {len(of_experts)} experts "
                         f"of {[N * len(parts), K]}: name a GGUF file of the model that was quantized")  # fmt: skip
    _check_type(stored)
    if K % BLOCK:
        raise ValueError(f"{first.stem} has {K} columns: NVFP4 in GGUF is blocks of {BLOCK}, so this model has no such "
                         "file; quantize it with llama.cpp's llama-quantize to another type")  # fmt: skip
    for matrix in (m for expert in of_experts for m in expert):
        if PRE_QUANT_SCALE in matrix.tensors:
            raise ValueError(f"{matrix.names[PRE_QUANT_SCALE]}: AWQ's scales have no place in GGUF; quantize the "
                             "original model with moe-nvfp4")  # fmt: skip
    for gate, up in (expert for expert in of_experts if len(expert) == 2):
        if gate.matrix().known_scale() != up.matrix().known_scale():
            raise ValueError(f"{gate.stem} and up have different global scales, and {name} of the base has one for "
                             "both: moe-nvfp4 quantize SRC DST --share-scales makes files with one")  # fmt: skip
    return Place(stored, of_experts, there.get(Place.scale_of(name)))


def _shape(stored: ReaderTensor) -> tuple[int, ...]:
    return tuple(map(int, reversed(stored.shape)))  # GGUF names the innermost dimension first


def _check_type(stored: ReaderTensor) -> None:
    if stored.tensor_type.name == "NVFP4":
        raise ValueError(f"{stored.name} of the base is NVFP4 already: name a file of another type")


# ---------------------------------------------------------------- the base
def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files are read and written by the package gguf: pip install 'gguf>=0.19'") from error
    if not hasattr(gguf.GGMLQuantizationType, "NVFP4"):
        raise ImportError("this version of the package gguf does not know NVFP4: pip install 'gguf>=0.19'")
    return gguf


def _open(gguf: Any, base: Path, any_architecture: bool) -> GGUFReader:
    """ValueError unless `base` is a GGUF file that experts can be put into."""
    if not base.is_file():
        raise ValueError(f"{base} is no file: name a GGUF file of the model, as llama.cpp's convert_hf_to_gguf.py "
                         "makes it of the original")  # fmt: skip
    try:
        reader = gguf.GGUFReader(base)
    except ValueError as error:
        raise ValueError(f"{base} is no GGUF file, or damaged ({error}): download it again") from error
    if (pieces := _field(reader, "split.count") or 1) > 1:
        raise ValueError(f"{base} is one of {pieces} pieces: put them together with llama.cpp's "
                         "llama-gguf-split --merge")  # fmt: skip
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise ValueError(f"{base} is big-endian: convert it with gguf-convert-endian")
    architecture = _field(reader, "general.architecture")
    if architecture not in USE_SCALES and not any_architecture:
        raise ValueError(f"llama.cpp's graph for {architecture!r} was not seen to multiply with the experts' global "
                         f"scales, and would compute something else without a word; it does for "
                         f"{', '.join(sorted(USE_SCALES))}. If yours does, add --any-architecture")  # fmt: skip
    return reader


def _field(reader: GGUFReader, name: str) -> Any:
    """A setting; None if it is not there."""
    found = reader.get_field(name)
    return None if found is None else found.contents()
