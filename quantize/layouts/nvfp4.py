"""NVFP4 weights: a matrix for each expert (or any linear), or ModelOpt's stacks of all experts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_nvfp4.format import dequantize
from moe_nvfp4.quantize.dialects import Dialect
from moe_nvfp4.quantize.files import Checkpoint, TensorSlice
from moe_nvfp4.quantize.layouts.base import ExpertLayout, Matrix, Source
from moe_nvfp4.quantize.layouts.stacked import STACKS, STEP
from moe_nvfp4.quantize.names import FUSED, PRE_QUANT_SCALE, PROJECTION_FIRST, SEPARATE


def recognise(shapes: Mapping[str, Sequence[int]], dialect: Dialect) -> dict[str, ExpertLayout]:
    """The NVFP4 weights among tensors of these shapes: name without its last part (of fused ones the name) -> layout.

    Linears are ONE_BY_ONE too.
    """
    fused = [name for name in shapes if FUSED.search(name) and f"{name}_{dialect.sf}" in shapes]
    found = dict.fromkeys(fused, ExpertLayout.STACKED_TRANSPOSED)
    for stem in (n.removesuffix(f".{dialect.global_scale}") for n in shapes if n.endswith(f".{dialect.global_scale}")):
        if len(shapes.get(f"{stem}.{dialect.weight}", ())) == 3:
            found[stem] = ExpertLayout.STACKED_BY_PROJECTION
        else:
            projection_first = PROJECTION_FIRST.match(stem) is not None
            found[stem] = ExpertLayout.PROJECTION_FIRST if projection_first else ExpertLayout.ONE_BY_ONE
    return found


def new_name(stem: str) -> str:
    """A matrix's name in new files, where the expert's number precedes the projection."""
    return PROJECTION_FIRST.sub(r"\g<module>.\g<e>.\g<part>", stem)


def matrix_tensors(tensors: Mapping[str, TensorSlice], stem: str, dialect: Dialect) -> dict[str, TensorSlice]:
    """The tensors of an NVFP4 matrix by the last parts of their names; ValueError where they do not fit each other."""
    found = {s: tensors[f"{stem}.{s}"] for s in (*dialect.suffixes, PRE_QUANT_SCALE) if f"{stem}.{s}" in tensors}
    for suffix, dtype in zip(dialect.suffixes, ("U8", "F8_E4M3", "F32", "F32"), strict=True):
        stored, name = found.get(suffix), f"{stem}.{suffix}"
        if stored is None and suffix != dialect.input_scale:
            raise ValueError(f"{name} is missing: every NVFP4 matrix has codes, block scales and a global scale; a "
                             "shard is missing, or the checkpoint is damaged")  # fmt: skip
        if stored is not None and stored.dtype != dtype:
            raise ValueError(f"{name} has dtype {stored.dtype}, expected {dtype}: the checkpoint is damaged, or not "
                             "NVFP4")  # fmt: skip
        if stored is not None and dtype == "F32" and stored.size != 4:
            raise ValueError(f"{name} is {stored.dtype} {list(stored.shape)}: one F32 number per matrix is expected; "
                             "the file is damaged")  # fmt: skip
    codes, sf = found[dialect.weight].shape, found[dialect.sf].shape
    if len(codes) != 2 or sf != (codes[0], codes[1] / 8):
        raise ValueError(f"{stem}.{dialect.sf} has shape {list(sf)}, which does not fit codes of {list(codes)}: the "
                         "file is damaged, or belongs to another model")  # fmt: skip
    return found


def nvfp4_matrix(checkpoint: Checkpoint, stem: str, dialect: Dialect, pre_quant_scale: bool = True) -> Matrix:
    """Codes and scales -> fp32 [N, K]; `pre_quant_scale`: multiplied with AWQ's, where there is one, as x would be."""
    codes, sf, scale = (checkpoint.tensors[f"{stem}.{s}"] for s in dialect.suffixes[:3])
    of_x = checkpoint.tensors.get(f"{stem}.{PRE_QUANT_SCALE}") if pre_quant_scale else None
    N, half = codes.shape

    def rows(a: int, b: int) -> Tensor:
        part = codes.read(a * half, (b - a) * half).view(-1, half)
        part_sf = sf.read(a * half // 8, (b - a) * half // 8).view(-1, half // 8)
        dense = dequantize(part, part_sf, global_scale())
        return dense if of_x is None else dense * of_x.tensor().float()

    def global_scale() -> Tensor:
        return dialect.decode_scale(scale.tensor()).reshape(())

    return Matrix(N, 2 * half, codes.size + sf.size, codes.file.name, lambda: rows, global_scale=global_scale)


@dataclass(frozen=True)
class NVFP4Stack:
    """NVFP4 experts in one tensor: codes [E, in/2, out] and sf [E, in/16, out] (ModelOpt's for Llama 4 and gpt-oss),
    or, not transposed, [E, out, in/2] and [E, out, in/16] (its for Step-3).

    name         what its tensors' names begin with
    tensors      their names
    stems        the names of expert {e}'s matrices in new files, one for each projection in it
    scales       by the last part of a matrix's own name (weight_scale_2, input_scale): one for all, or [E]
    interleaved  rows of gate and up alternate
    """

    name: str
    tensors: tuple[str, ...]
    stems: tuple[str, ...]
    codes: TensorSlice
    sf: TensorSlice
    scales: dict[str, TensorSlice]
    transposed: bool
    interleaved: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, out, in / 2"""
        E, N, K = self.codes.shape
        return (E, K, N) if self.transposed else (E, N, K)

    def check(self) -> None:
        """ValueError unless the tensors fit each other."""
        name = self.name
        wanted: list[float] = [*self.codes.shape]  # with a fraction, no sf fits
        wanted[1 if self.transposed else -1] /= 8
        dtypes = (self.codes.dtype, self.sf.dtype)
        if len(wanted) != 3 or [*self.sf.shape] != wanted or dtypes != ("U8", "F8_E4M3") or not self.codes.size:
            raise ValueError(f"{name}: {self.codes.dtype} {list(self.codes.shape)} with block scales {self.sf.dtype} "
                             f"{list(self.sf.shape)} is no stack of NVFP4 matrices: the file is damaged, or not known "
                             "here; download it again")  # fmt: skip
        for last, stored in self.scales.items():
            if stored.dtype != "F32" or stored.size not in (4, 4 * wanted[0]):
                raise ValueError(f"{name}: {last} is {stored.dtype} {list(stored.shape)}, expected one F32 number, or "
                                 f"one for each of {wanted[0]} experts")  # fmt: skip

    def pieces(self, stored: TensorSlice, e: int) -> list[Tensor]:
        """uint8 [out, in'] of expert e, of each projection."""
        parts = len(self.stems)
        size = stored.size // stored.shape[0]
        rows = stored.read(e * size, size).view(stored.shape[1:])
        rows = rows.T if self.transposed else rows
        return [rows[i::parts] for i in range(parts)] if self.interleaved else list(rows.chunk(parts))

    def scale(self, last: str, e: int, source: Dialect) -> Tensor:
        """fp32 0-d: expert e's."""
        scales = source.decode_scale(self.scales[last].tensor()).reshape(-1)
        return scales[e if len(scales) > 1 else 0]

    def matrix(self, e: int, part: int, source: Dialect) -> Matrix:
        """Projection number `part` of expert e -> fp32 [out / projections, in]."""
        (E, out, half), parts = self.shape, len(self.stems)

        def open() -> Callable[[int, int], Tensor]:
            codes, sf = (self.pieces(stored, e)[part].contiguous() for stored in (self.codes, self.sf))
            scale = global_scale()
            return lambda a, b: dequantize(codes[a:b], sf[a:b], scale)

        def global_scale() -> Tensor:
            return self.scale(source.global_scale, e, source)

        size = (self.codes.size + self.sf.size) // E
        file = self.codes.file.name
        return Matrix(out // parts, 2 * half, size // parts, file, open, held=2 * size, global_scale=global_scale)


def nvfp4_stack(source: Source, name: str, layout: ExpertLayout, dialect: Dialect) -> NVFP4Stack:
    """The stack that `recognise` found as `name`. Not checked, but for what is missing."""
    tensors, fused = source.checkpoint.tensors, layout is ExpertLayout.STACKED_TRANSPOSED
    dot = "_" if fused else "."
    optional = (dialect.global_scale, dialect.input_scale)
    scales = {s: tensors[f"{name}{dot}{s}"] for s in optional if f"{name}{dot}{s}" in tensors}
    codes, sf = (name if fused else f"{name}.{dialect.weight}"), f"{name}{dot}{dialect.sf}"
    if missing := [n for n in (codes, sf, f"{name}{dot}{dialect.global_scale}") if n not in tensors]:
        raise ValueError(f"{missing[0]} is missing: NVFP4 matrices have codes, block scales and a global scale")
    names = (codes, sf, *(f"{name}{dot}{s}" for s in scales))
    if fused:
        module, _, last = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        stems = tuple(f"{module}.{{e}}.{part}" for part in parts)
    elif match := SEPARATE.search(name):
        stems = (f"{name[: match.start()]}{STEP.module}.{{e}}.{match['part']}",)
    else:
        raise ValueError(f"{codes} is a stack of NVFP4 matrices with a name that is not known here: quantize the "
                         "original checkpoint")  # fmt: skip
    interleaved = len(stems) == 2 and any(STACKS[t].interleaved for t in source.types if t in STACKS)
    return NVFP4Stack(name, names, stems, tensors[codes], tensors[sf], scales, fused, interleaved)
