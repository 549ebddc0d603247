"""NVFP4 weights: one matrix for each expert (or any linear), or ModelOpt's stacks of all experts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import Tensor

from moe_nvfp4.format import dequantize
from moe_nvfp4.quantize.dialects import DIALECTS, Dialect
from moe_nvfp4.quantize.files import Checkpoint, TensorSlice, expert_counts
from moe_nvfp4.quantize.layouts.base import STACKED, ExpertLayout, Given, Matrix, check_experts, need, parts_of_expert
from moe_nvfp4.quantize.layouts.fp8 import fp8_block, fp8_scale
from moe_nvfp4.quantize.layouts.stacked import STACKS, STEP
from moe_nvfp4.quantize.names import (
    DENSE,
    FUSED,
    KV_SCALE,
    PER_EXPERT,
    PRE_QUANT_SCALE,
    PROJECTION_FIRST,
    SEPARATE,
    projections,
)

UNREAD = (  # format with the tensor's name
    "{} is a scale that nothing reads: going on would give silently wrong numbers. A part of its matrix is missing, or "
    "the layer's name or its kind of quantization is not known here; use the original checkpoint, or the tool "
    "that wrote this one"
)


def recognise(shapes: Mapping[str, Sequence[int]], dialect: Dialect) -> dict[str, ExpertLayout]:
    """Find the NVFP4 weights among tensors of these shapes: name -> layout.

    The name is a stem, without the last part; for STACKED_TRANSPOSED the tensor's whole name. Linears are ONE_BY_ONE.
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


@dataclass(frozen=True)
class NVFP4Matrix:
    """An NVFP4 matrix: an expert's projection, or any linear's weight.

    stem     the name of its module; the names of its tensors begin with it, unless it is in a stack
    tensors  last part of the name -> tensor, or this matrix's part of a stack; checked against each other
    names    last part of the name -> whole name of the tensor, or of the stack
    """

    stem: str
    tensors: dict[str, TensorSlice]
    names: dict[str, str]
    dialect: Dialect
    layout: ExpertLayout

    @property
    def dense_name(self) -> str:
        """The name of its weight in a dense checkpoint, or of the stack that it is in."""
        return self.names[self.dialect.weight] if self.layout in STACKED else f"{self.stem}.weight"

    @property
    def file(self) -> str:
        return self.tensors[self.dialect.weight].file.name

    @property
    def shape(self) -> tuple[int, int]:
        """N, K, with K padded to whole blocks of 16"""
        N, half = self.tensors[self.dialect.weight].shape
        return N, 2 * half

    def matrix(self, pre_quant_scale: bool = True) -> Matrix:
        """The fp32 matrix [N, K]. pre_quant_scale: multiply its columns with AWQ's scale of x, where there is one."""
        codes, sf, scale = (self.tensors[s] for s in self.dialect.suffixes[:3])
        of_x = self.tensors.get(PRE_QUANT_SCALE) if pre_quant_scale else None
        N, half = codes.shape

        def open() -> Callable[[int, int], Tensor]:
            read, read_sf = codes.reader(), sf.reader()

            def rows(a: int, b: int) -> Tensor:
                part = read(a * half, (b - a) * half).view(-1, half)
                part_sf = read_sf(a * half // 8, (b - a) * half // 8).view(-1, half // 8)
                dense = dequantize(part, part_sf, global_scale())
                return dense if of_x is None else dense * of_x.tensor().float()

            return rows

        def global_scale() -> Tensor:
            return self.dialect.decode_scale(scale.tensor()).reshape(())

        size, held = codes.size + sf.size, codes.held + sf.held
        return Matrix(N, 2 * half, size, codes.file.name, open, held, global_scale)


def _matrix(tensors: Mapping[str, TensorSlice], stem: str, dialect: Dialect, layout: ExpertLayout) -> NVFP4Matrix:
    """The matrix `stem`. ValueError where its tensors are not all there, or do not fit each other."""
    found = {s: tensors[f"{stem}.{s}"] for s in (*dialect.suffixes, PRE_QUANT_SCALE) if f"{stem}.{s}" in tensors}
    for suffix, dtype in zip(dialect.suffixes, ("U8", "F8_E4M3", "F32", "F32"), strict=True):
        stored, name = found.get(suffix), f"{stem}.{suffix}"
        if stored is None and suffix != dialect.input_scale:
            raise ValueError(f"{name} is missing: every NVFP4 matrix has codes, block scales and a global scale; a "
                             "shard is missing, or the checkpoint is damaged")  # fmt: skip
        if stored is not None and stored.dtype != dtype:
            raise ValueError(f"{name} has dtype {stored.dtype}, expected {dtype}: the checkpoint is damaged, or not "
                             "NVFP4, or this layer belongs in the config's ignore list")  # fmt: skip
        if stored is not None and dtype == "F32" and stored.size != 4:
            raise ValueError(f"{name} is {stored.dtype} {list(stored.shape)}: one F32 number per matrix is expected; "
                             "the file is damaged")  # fmt: skip
    codes, sf, of_x = found[dialect.weight].shape, found[dialect.sf].shape, found.get(PRE_QUANT_SCALE)
    if len(codes) != 2 or sf != (codes[0], codes[1] / 8):
        raise ValueError(f"{stem}.{dialect.sf} has shape {list(sf)}, which does not fit codes of {list(codes)}: the "
                         "file is damaged, or belongs to another model")  # fmt: skip
    if of_x is not None and (of_x.dtype not in DENSE or of_x.shape != (2 * codes[1],)):
        raise ValueError(f"{stem}.{PRE_QUANT_SCALE} {of_x.dtype} {list(of_x.shape)} must be finite numbers, one for "
                         f"each of {2 * codes[1]} columns: the file is damaged")  # fmt: skip
    return NVFP4Matrix(stem, found, {last: f"{stem}.{last}" for last in found}, dialect, layout)


def _stack(source: Checkpoint, name: str, layout: ExpertLayout, dialect: Dialect) -> Iterator[NVFP4Matrix]:
    """The matrices of one of ModelOpt's stacks: codes [E, in/2, out] and sf [E, in/16, out] (Llama 4, gpt-oss), or
    [E, out, in/2] and [E, out, in/16] (Step-3); one global scale for all experts, or [E].

    ValueError where the tensors of `name` are not all there, or do not fit each other.
    """
    tensors, transposed = source.tensors, layout is ExpertLayout.STACKED_TRANSPOSED
    dot = "_" if transposed else "."
    names = {last: f"{name}{dot}{last}" for last in (*dialect.suffixes, "bias")}
    names[dialect.weight] = codes = name if transposed else f"{name}.{dialect.weight}"
    names = {last: n for last, n in names.items() if n in tensors}
    if missing := [last for last in dialect.suffixes[:3] if last not in names]:
        raise ValueError(
            f"{name}{dot}{missing[0]} is missing: NVFP4 matrices have codes, block scales and a global scale"
        )
    if transposed:
        module, _, last = name.rpartition(".")
        stems = [f"{module}.{{e}}.{part}" for part in projections(last)]
    elif match := SEPARATE.search(name):
        stems = [f"{name[: match.start()]}{STEP.module}.{{e}}.{match['part']}"]
    else:
        raise ValueError(f"{codes} is a stack of NVFP4 matrices with a name that is not known here: quantize the "
                         "original checkpoint")  # fmt: skip
    interleaved = any(STACKS[t].interleaved for t in source.types if t in STACKS)
    found = {last: tensors[n] for last, n in names.items()}
    _check_stack(name, found, dialect, transposed)
    for e in range(found[dialect.weight].shape[0]):
        parts: dict[str, list[TensorSlice]] = {}
        for last, t in found.items():
            if last in dialect.suffixes[2:]:
                scale = replace(t, shape=(), start=t.start + 4 * e, size=4) if t.size > 4 else t
                parts[last] = [scale] * len(stems)
            else:
                parts[last] = parts_of_expert(t, e, len(stems), transposed and last != "bias", interleaved)
        for i, stem in enumerate(stems):
            of_part = {last: t[i] for last, t in parts.items()}
            yield NVFP4Matrix(stem.format(e=e), of_part, names, dialect, layout)


def _check_stack(name: str, found: Mapping[str, TensorSlice], dialect: Dialect, transposed: bool) -> None:
    """ValueError unless the tensors of a stack fit each other."""
    codes, sf = found[dialect.weight], found[dialect.sf]
    wanted: list[float] = [*codes.shape]  # the shape of sf; where 8 does not divide, a fraction that no sf has
    if len(wanted) == 3:
        wanted[1 if transposed else 2] /= 8
    if len(wanted) != 3 or [*sf.shape] != wanted or (codes.dtype, sf.dtype) != ("U8", "F8_E4M3") or not codes.size:
        raise ValueError(f"{name}: {codes.dtype} {list(codes.shape)} with block scales {sf.dtype} {list(sf.shape)} is "
                         "no stack of NVFP4 matrices: the file is damaged, or not known here; download it again"
                         )  # fmt: skip
    E, out = codes.shape[0], codes.shape[2 if transposed else 1]
    for last in dialect.suffixes[2:]:
        stored = found.get(last)
        if stored is not None and (stored.dtype != "F32" or stored.size not in (4, 4 * E)):
            raise ValueError(f"{name}: {last} is {stored.dtype} {list(stored.shape)}, expected one F32 number, or "
                             f"one for each of {E} experts")  # fmt: skip
    if (bias := found.get("bias")) is not None:
        need(bias.shape == (E, out), f"{name}_bias", bias, "[E, out]")


@dataclass(frozen=True)
class NVFP4Files:
    """All that NVFP4 files hold.

    matrices    name in new files -> matrix
    fp8         FP8 weights next to them (mixed precision): name -> name of the scale
    parameters  the parameters of `NVFP4Experts` that were saved under their own names
    left        all other tensors
    tensors     all tensors of the files
    elsewhere   names of experts modules that are of another model, which the files hold, too
    """

    matrices: dict[str, NVFP4Matrix]
    fp8: dict[str, str]
    parameters: dict[str, TensorSlice]
    left: dict[str, TensorSlice]
    tensors: Mapping[str, TensorSlice]
    elsewhere: Set[str]

    def given(self) -> dict[str, Given]:
        """What the files hold, by its name in a dense checkpoint."""
        found = {f"{stem}.weight": Given("NVFP4", m.shape, m.file) for stem, m in self.matrices.items()}
        for stem, m in self.matrices.items():
            if (bias := m.tensors.get("bias")) is not None:
                found[f"{stem}.bias"] = Given(bias.dtype, bias.shape, bias.file.name)
        found |= {name: Given("FP8", self.tensors[name].shape, self.tensors[name].file.name) for name in self.fp8}
        found |= {name: Given("NVFP4", None, t.file.name) for name, t in self.parameters.items()}
        return found | dense_given(self.left)

    def dense_weights(self) -> Iterator[str]:
        """Names of dense matrices, and of dense stacks of experts."""
        for name, stored in self.left.items():
            stack = FUSED.search(name) or SEPARATE.search(name.removesuffix(".weight"))
            if stored.dtype in DENSE and len(stored.shape) >= 2 and (stack or name.endswith(".weight")):
                yield name

    def experts_have(self, last: str) -> bool:
        """Whether all matrices of experts have a tensor `last`, an input scale or AWQ's scale."""
        found = [last in lasts for _, lasts in self._of_experts()]
        return bool(found) and all(found)

    def of_experts(self, last: str) -> list[str]:
        """The names of the tensors `last` of experts."""
        return [names[last] for _, names in self._of_experts() if last in names]

    def _of_experts(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """(name, its tensors: last part -> name) of every matrix of experts, and of stacks under the parameters' own
        names, in any dialect's words."""
        for stem, m in self.matrices.items():
            if (match := PER_EXPERT.fullmatch(stem)) and match["module"] not in self.elsewhere:
                yield stem, m.names
        for name in self.parameters:
            if name.endswith("_proj_sf"):
                module, _, fused = name.removesuffix("_sf").rpartition(".")
                stem = f"{module}.{projections(fused)[-1]}"
                optional = {dialect.input_scale: f"{stem}_input_scale" for dialect in DIALECTS.values()}
                optional[PRE_QUANT_SCALE] = f"{stem}_{PRE_QUANT_SCALE}"
                yield stem, {last: own for last, own in optional.items() if own in self.parameters}

    def check_optional_scales(self, lasts: Iterable[str]) -> None:
        """ValueError if some experts, but not all, have a tensor of one of these names, an input scale or AWQ's."""
        for last in lasts:
            found = [(name, last in there) for name, there in self._of_experts()]
            without = [name for name, there in found if not there]
            if 0 < len(without) < len(found):
                raise ValueError(f"{without[0]} has no {last}, which {len(found) - len(without)} of {len(found)} "
                                 "matrices of experts have: all need one. Load with activations='bf16', which leaves "
                                 "them out, and then calibrate(model, batches); or quantize again")  # fmt: skip


def dense_given(tensors: Mapping[str, TensorSlice]) -> dict[str, Given]:
    return {name: Given(stored.dtype, stored.shape, stored.file.name) for name, stored in tensors.items()}


def _check_beside(matrices: Iterable[NVFP4Matrix], left: Iterable[str]) -> None:
    """ValueError if `left`, the names of tensors that are not read, has one that belongs to an NVFP4 matrix."""
    stems = {m.stem for m in matrices if m.layout is not ExpertLayout.STACKED_TRANSPOSED}
    stacks = tuple({f"{m.dense_name}_" for m in matrices if m.layout is ExpertLayout.STACKED_TRANSPOSED})
    for name in left:
        stem, _, last = name.rpartition(".")
        if (stem in stems and last != "bias" and not KV_SCALE.search(name)) or name.startswith(stacks):
            raise ValueError(UNREAD.format(name))


def read(
    source: Checkpoint, dialect: Dialect, input_scales: bool = True, has: Callable[[str], object] = bool
) -> NVFP4Files:
    """What the NVFP4 files of `source` hold, from their headers alone.

    input_scales  whether all experts need an input scale if one has it
    has           whether an experts module is a part of what the source's config describes (default: all are)

    ValueError, naming the tensor, for a matrix that lacks a part or whose parts do not fit each other, for FP8 weights
    without a scale, for experts that are incomplete or of several shapes, for scales that only some experts have, and
    for a stack of biases next to experts one by one.
    """
    tensors, left = source.tensors, dict(source.tensors)
    matrices: dict[str, NVFP4Matrix] = {}

    def take(names: Iterable[str]) -> None:
        for name in names:
            left.pop(name, None)

    for name, layout in recognise({n: t.shape for n, t in tensors.items()}, dialect).items():
        whole = layout in STACKED
        for matrix in _stack(source, name, layout, dialect) if whole else [_matrix(tensors, name, dialect, layout)]:
            if (new := new_name(matrix.stem)) in matrices:
                raise ValueError(f"{name} and {matrices[new].stem} are the same matrix under two names: two "
                                 "checkpoints are mixed; keep one of them")  # fmt: skip
            matrices[new] = matrix
            take(matrix.names.values())
    for stem in (n.removesuffix(f".{dialect.sf}") for n in left if n.endswith(f".{dialect.sf}")):
        if (codes := left.get(f"{stem}.{dialect.weight}")) is not None and codes.dtype == "U8":
            _matrix(tensors, stem, dialect, ExpertLayout.ONE_BY_ONE)  # raises: it has no global scale
    fp8 = {}
    for name in [n for n, stored in left.items() if stored.dtype == "F8_E4M3" and n.endswith(".weight")]:
        stem = name.removesuffix(".weight")
        scale = fp8_scale(stem, left)
        if scale is None or fp8_block(left[name].shape, left[scale].shape) is None:
            raise ValueError(f"{name} is FP8 {list(left[name].shape)} and has no scale, or none that fits, next to it: "
                             "a shard is missing, download it again")  # fmt: skip
        fp8[name] = scale
        take((name, scale, f"{stem}.input_scale"))
    _check_beside(matrices.values(), left)
    modules = {f"{name.rpartition('.')[0]}." for name in left if name.endswith("_proj_sf")}
    parameters = {n: t for n, t in left.items() if any(n.startswith(module) for module in modules)}
    take(parameters)
    experts = {stem: match["module"] for stem in matrices if (match := PER_EXPERT.fullmatch(stem))}
    elsewhere = {module for module in {*experts.values()} if not has(module)}
    shapes = {stem: matrices[stem].shape for stem, module in experts.items() if module not in elsewhere}
    check_experts(shapes, expert_counts(source.config), left)
    for name in left:
        first = f"{name.rpartition('.')[0]}.0.gate_proj"
        if name.endswith(".gate_up_proj_bias") and (first in matrices or f"{first}.weight" in tensors):
            raise ValueError(f"{name} is a stack next to experts one by one, so the order of gate and up in it is not "
                             "known: write a bias for each expert, experts.E.gate_proj.bias, or quantize the original "
                             "checkpoint")  # fmt: skip
    files = NVFP4Files(matrices, fp8, parameters, left, tensors, elsewhere)
    files.check_optional_scales((dialect.input_scale, PRE_QUANT_SCALE) if input_scales else (PRE_QUANT_SCALE,))
    return files
