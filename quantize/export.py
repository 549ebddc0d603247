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
from moe_nvfp4.quantize.files import new_file, open_checkpoint
from moe_nvfp4.quantize.layouts.nvfp4 import NVFP4Matrix
from moe_nvfp4.quantize.linears import group_of
from moe_nvfp4.quantize.names import PER_EXPERT, PLAIN_NAMES, PRE_QUANT_SCALE, is_mtp
from moe_nvfp4.quantize.source import nvfp4_files
from moe_nvfp4.weights import check_block_scales

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, GGUFWriter, ReaderTensor

BLOCK = 64  # columns of one block in GGUF
PARTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
GATE_UP = "ffn_gate_up_exps"
OUTPUT = {"o_proj": "attn_output"}
ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"} | OUTPUT
MLP = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
SHARED = {part: f"{name}_shexp" for part, name in MLP.items()}
MAMBA = {"in_proj": "ssm_in", "out_proj": "ssm_out"}
HEAD = {"lm_head": "output"}
# Values of general.architecture whose graph multiplies with the experts' `.scale`, and the other tensors with whose it
# does, as seen by running llama.cpp 0c1e57098. Other scales it does not load, which makes it refuse the file, or loads
# and does not use: it would compute with global scales of 1.
USE_SCALES = {
    architecture: frozenset(name for group in groups for name in group.values())
    for architecture, groups in {
        "cohere2moe": (ATTENTION, SHARED, MLP),
        "deepseek32": (OUTPUT, SHARED, MLP),
        "gemma4": (ATTENTION, MLP),
        "glm-dsa": (OUTPUT, SHARED, MLP),
        "hy_v3": (ATTENTION, SHARED, MLP, HEAD),
        "llama": (ATTENTION, HEAD),
        "mellum": (ATTENTION, HEAD),
        "nemotron_h_moe": (ATTENTION, SHARED, MAMBA, HEAD),
        "qwen35moe": (ATTENTION, SHARED, HEAD),
        "qwen3moe": (ATTENTION, HEAD),
        "qwen3next": (ATTENTION, SHARED, HEAD),
    }.items()
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
    """A tensor that is made.

    name      of it
    stored    the tensor of the base that it replaces, or the stack of gate and up of which it is a half
    matrices  of the experts; of a linear [it]
    first     the row of `stored` that is its first, of each expert
    scale     the base's own factors of the outputs, fp32 [E], as Gemma 4's experts have them
    order     the rows of a linear as the base may have them instead, int64 [N]
    """

    name: str
    stored: ReaderTensor
    matrices: list[NVFP4Matrix]
    first: int = 0
    scale: ReaderTensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """E if it is a stack, rows, bytes of a row."""
        N, K = self.matrices[0].shape
        return (*_shape(self.stored)[:-2], N, K // BLOCK * 36)

    @property
    def size(self) -> int:
        """In bytes, with the global scales."""
        return math.prod(self.shape) + 4 * len(self.matrices)


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
    state = checkpoint.state()
    info, files = nvfp4_files(checkpoint)
    # a file may allow 4-bit activations; where only some layers were made for them, all stay exact
    activations = checkpoint.own.get("activations", "bf16" if info.mixed else info.activations)
    report = ExportReport()
    found = _places(reader, files.matrices, checkpoint.layers, report)
    places: dict[str, list[Place]] = {}
    for place in found:
        places.setdefault(place.stored.name, []).append(place)
    if not places:
        raise ValueError(f"{folder} has no NVFP4 matrices that are in {base}: nothing to do")
    kept = sum(int(t.n_bytes) for t in reader.tensors if t.name not in places)
    made = [place for of_tensor in places.values() for place in of_tensor]
    report.before = sum(int(of_tensor[0].stored.n_bytes) for of_tensor in places.values())
    report.after = sum(place.size for place in made)
    with new_file(destination) as work:
        check_space(destination, kept + report.after)
        writer = gguf.GGUFWriter(work, _field(reader, "general.architecture"))
        writer.data_alignment = int(reader.alignment)  # the setting that says so is copied
        try:
            _copy_fields(gguf, reader, writer, [place.name for place in made] if activations == "bf16" else ())
            writes = list(_writes(gguf, reader, writer, places, report))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            size = kept + report.after
            with progress_bar(total=size, desc="export", unit="B", unit_scale=True, show=progress) as bar:
                for write in writes:
                    data = write()
                    writer.write_tensor_data(data)
                    bar.update(data.nbytes)
        finally:
            writer.close()
        checkpoint.check_state(state)
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
    gguf: Any, reader: GGUFReader, writer: GGUFWriter, places: Mapping[str, list[Place]], report: ExportReport
) -> Iterator[Callable[[], np.ndarray]]:
    """Announce each tensor to the writer, and yield what makes its data."""
    import numpy as np

    nvfp4, scales = gguf.GGMLQuantizationType.NVFP4, set(map(_scale_of, places))
    for stored in reader.tensors:
        if stored.name not in places and stored.name not in scales:
            data = stored.data
            writer.add_tensor_info(stored.name, data.shape, data.dtype, data.nbytes, stored.tensor_type)
            yield partial(np.asarray, data)
        for place in places.get(stored.name, ()):
            E = len(place.matrices)
            writer.add_tensor_info(place.name, place.shape, np.dtype(np.uint8), math.prod(place.shape), nvfp4)
            yield partial(_data, gguf, place, report)
            writer.add_tensor_info(_scale_of(place.name), (E,), np.dtype(np.float32), 4 * E)
            yield partial(_scales, place)


def _scale_of(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"


def _data(gguf: Any, place: Place, report: ExportReport) -> np.ndarray:
    """uint8 of the place's shape, compared with what the base has."""
    stored, found = place.stored, []
    dequantize = partial(gguf.quants.dequantize, qtype=stored.tensor_type)
    orders = [None] if place.order is None else [None, place.order]
    of_experts = stored.data.reshape(len(place.matrices), -1, stored.data.shape[-1])
    for matrix, rows in zip(place.matrices, of_experts, strict=True):
        here = rows[place.first : place.first + matrix.shape[0]]
        errors = [_distance(matrix, order, here, dequantize) for order in orders]
        error = min(errors)
        if not error <= FAR:  # NaN is far
            share = "everything: it is zero there" if error == math.inf else f"{error:.2f} of its norm"
            raise ValueError(f"{matrix.stem} differs from its place in {stored.name} of the base by {share}, and 4-bit "
                             "weights by about 0.1: the two are of different models, or the base has the experts in "
                             "another order; name a GGUF file of the model that was quantized")  # fmt: skip
        report.error = max(report.error, error)
        report.matrices += 1
        order, blocks = orders[errors.index(error)], blocks_of(*_codes_and_sf(matrix))
        found.append(blocks if order is None else blocks[order])
    return torch.cat(found).view(place.shape).numpy()


def _scales(place: Place) -> np.ndarray:
    """fp32 [E], [1] of a linear."""
    found = torch.stack([matrix.matrix().known_scale() for matrix in place.matrices]).float().numpy()
    return found if place.scale is None else found * place.scale.data


def _codes_and_sf(matrix: NVFP4Matrix) -> tuple[Tensor, Tensor]:
    dialect = matrix.dialect
    sf = matrix.tensors[dialect.sf].tensor().view(torch.uint8)
    check_block_scales(sf, matrix.names[dialect.sf])  # llama.cpp would read a negative one as positive
    return matrix.tensors[dialect.weight].tensor(), sf


def blocks_of(codes: Tensor, sf: Tensor) -> Tensor:
    """Codes uint8 [N, K/2], the even column in the low half of a byte, and sf uint8 [N, K/16] -> uint8 [N, K/64*36]."""
    N = codes.shape[0]
    of_block = torch.stack((codes & 15, codes >> 4), dim=-1).view(N, -1, 4, 2, 8)
    packed = of_block[..., 0, :] | of_block[..., 1, :] << 4
    return torch.cat((sf.view(N, -1, 4), packed.flatten(2)), dim=-1).flatten(1)


def _distance(
    matrix: NVFP4Matrix, order: Tensor | None, rows: np.ndarray, dequantize: Callable[[np.ndarray], np.ndarray]
) -> float:
    """||values - rows|| / ||rows||, where the values have their rows in this order. Infinite if only rows are zero."""
    values = matrix.matrix().open()
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
    reader: GGUFReader, matrices: Mapping[str, NVFP4Matrix], last: int | None, report: ExportReport
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
        together = f"blk.{number}.{GATE_UP}.weight"
        for part in sorted({part for _, part in found}):
            one = f"blk.{number}.{PARTS[part]}.weight"
            # llama.cpp knows no scale of gate and up in one stack, and reads two stacks as well
            fused = part != "down_proj" and together in there
            yield _stack(there, one, together if fused else one, found, part)
        report.layers += 1
    for stem, matrix in linears.items():
        name = None if is_mtp(stem, last) else _name_of(stem)
        if (why := _why_left(reader, there, name, matrix)) is not None:
            report.left[stem] = why
        elif name is not None:
            yield _linear(reader, there, name, matrix)


def _name_of(stem: str) -> str | None:
    """The name of a linear's weight in GGUF; None where it has none that we know."""
    above, _, last = stem.rpartition(".")
    if (group := group_of(stem)) == "lm_head":
        return f"{HEAD[last]}.weight"
    layer, module = re.search(r"(?:^|\.)layers\.(\d+)\.", stem), above.rpartition(".")[2]
    names = {"attention": ATTENTION, "shared": SHARED, "mlp": MLP}.get(group or "", MAMBA if module == "mixer" else {})
    return f"blk.{layer[1]}.{names[last]}.weight" if layer and last in names else None


def _why_left(
    reader: GGUFReader, there: Mapping[str, ReaderTensor], name: str | None, matrix: NVFP4Matrix
) -> str | None:
    """Why a linear stays as the base has it; None: it is replaced. name: the place that it belongs to, if any."""
    architecture = _field(reader, "general.architecture")
    if name is None:
        return "their place in GGUF is not known"
    if name.split(".")[-2] not in USE_SCALES.get(architecture, ()):
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
    return Place(name, stored, [matrix], scale=there.get(_scale_of(name)), order=_rotated(reader, name, rows))


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
    there: Mapping[str, ReaderTensor], name: str, of_base: str, found: Mapping[tuple[int, str], NVFP4Matrix], part: str
) -> Place:
    """A stack of experts; of_base: the tensor that has them, gate and up perhaps. ValueError where they do not fit."""
    matrices = [found[e, part] for e in range(1 + max(e for e, _ in found))]
    first, stored, parts = matrices[0], there.get(of_base), 1 if of_base == name else 2
    if stored is None:
        raise ValueError(
            f"the base has no {name}, where {first.stem} belongs: it is of another model, or an old file "
            "with a tensor for each expert; convert the original with llama.cpp's convert_hf_to_gguf.py"
        )
    (N, K), have = first.shape, _shape(stored)
    if have != (len(matrices), N * parts, K):
        raise ValueError(f"{of_base} of the base is {list(have)}, and {first.stem} is one of {len(matrices)} experts "
                         f"of {[N * parts, K]}: name a GGUF file of the model that was quantized")  # fmt: skip
    _check_type(stored)
    if K % BLOCK:
        raise ValueError(f"{first.stem} has {K} columns: NVFP4 in GGUF is blocks of {BLOCK}, so this model has no such "
                         "file; quantize it with llama.cpp's llama-quantize to another type")  # fmt: skip
    for matrix in matrices:
        if PRE_QUANT_SCALE in matrix.tensors:
            raise ValueError(f"{matrix.names[PRE_QUANT_SCALE]}: AWQ's scales have no place in GGUF; quantize the "
                             "original model with moe-nvfp4")  # fmt: skip
    row = N if parts == 2 and part == "up_proj" else 0
    return Place(name, stored, matrices, row, there.get(_scale_of(name)))


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
