"""Compare an NVFP4 checkpoint with the one that it was made from, tensor by tensor.

What a conversion copies must have the same bytes. What it quantizes is judged by its distance from the original: each
matrix, each block of 16 of its columns, and its global scale, which follows from the largest magnitude.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_nvfp4.format import E2M1_MAX, SF_VEC_SIZE, global_scale_for, pad_k
from moe_nvfp4.quantize.dialects import QuantizationInfo
from moe_nvfp4.quantize.files import TORCH_DTYPES, Checkpoint, TensorSlice, TensorView, sub_configs
from moe_nvfp4.quantize.layouts import ErrorSums, Matrix
from moe_nvfp4.quantize.layouts.base import dense
from moe_nvfp4.quantize.linears import fused_in_files
from moe_nvfp4.quantize.names import DENSE, KV_SCALE, PER_EXPERT, PLAIN_NAMES, PRE_QUANT_SCALE
from moe_nvfp4.quantize.plan import ConversionPlan, plan_of, separate_scales
from moe_nvfp4.quantize.recipes import REGISTRY

PIECE = 1 << 22  # bytes read at once
STEP = 1 << 16  # elements compared at once: in a CPU's cache. With larger steps malloc's memory grew with every matrix
WORKERS = 4  # matrices compared at once, at most: each may hold a part of a stack
ULP = 2.0**-22  # how far the reciprocal of a reciprocal may move a global scale
SMALLEST = 2.0**-10  # half of the smallest e4m3 number: block scales below it are rounded to 0


@dataclass(frozen=True)
class Limits:
    """How far a recipe may move a matrix, and a block of 16 columns in a row, relative to their norms; and how much
    longer or shorter it may make a row in the row's own direction."""

    matrix: float
    block: float
    length: float


# Rounding moves a block by at most 0.18 of its norm (searched for: midpoints of e2m1 below one large number), and a
# matrix by no more than its worst block. A wrong bit of a block scale's exponent moves a block by 0.4 or more.
ROUNDED = Limits(0.2, 0.25, math.inf)
# gptq compensates rounding errors in other columns. A few rows of inputs, with columns of very different size, moved
# blocks by up to 3.9 and matrices by 0.29, but nearly at right angles to the original: no row became longer or shorter
# by more than 0.14. So a row of zeros is found, and a single block scale that is twice too large is not. Limits for
# other tools, of which less is known, are the same.
LEARNED = Limits(0.5, math.inf, 0.3)


@dataclass
class _Judged:
    """What is known about a matrix.

    original      of what it was made
    errors        sums over its elements
    global_scale  as it multiplies; 0: it has none
    amax          the original's largest magnitude
    lost          the square of what a block loses where its scale is rounded to a multiple of e4m3's smallest number,
                  and its elements to multiples of the smallest of a dtype
    block         (relative error, row, first column) of the worst block
    length        (relative difference, row) of the row whose length differs most in its own direction
    """

    original: Matrix
    errors: ErrorSums
    global_scale: float
    amax: float
    lost: float
    block: tuple[float, int, int] = (0.0, 0, 0)
    length: tuple[float, int] = (0.0, 0)


def compare(
    checkpoint: Checkpoint, source: Checkpoint, info: QuantizationInfo
) -> tuple[dict[str, ErrorSums], list[str]]:
    """The error of every expert or other matrix of `checkpoint` against `source`, by name; and warnings.

    info: what the config of `checkpoint` says. ValueError, naming the tensor, where the two do not belong together.
    """
    source = _named_alike(source, checkpoint)
    ours, own = plan_of(checkpoint), checkpoint.own
    theirs = plan_of(source, {layer_of(stem) for stem in ours.matrices}, info.dialect)
    _Names(checkpoint, source, info, ours, theirs).check()
    judged = _judge_all(source, ours, theirs)
    warnings = _rounded(_check_bytes(source, ours, theirs), source)
    warnings += _check_errors(judged, source, str(own.get("recipe")), ours, theirs)
    for name, weight in ours.dequantized.items():
        _check_fp8(name, weight, source, theirs)
    experts: dict[str, ErrorSums] = {}
    for stem, found in judged.items():
        experts.setdefault(re.sub(r"(\bexperts\.\d+)\..*", r"\1", stem), ErrorSums()).include(found.errors)
    return experts, warnings


def _named_alike(source: Checkpoint, checkpoint: Checkpoint) -> Checkpoint:
    """`source` with its experts' projections named as in `checkpoint`, w1 or gate_proj: tools rename them."""
    style = lambda files: frozenset(m["part"] in PLAIN_NAMES for n in files.tensors if (m := PER_EXPERT.match(n)))
    if {style(source), style(checkpoint)} != {frozenset([True]), frozenset([False])}:
        return source
    others = PLAIN_NAMES | {plain: name for name, plain in PLAIN_NAMES.items()}

    def named(name: str) -> str:
        found = PER_EXPERT.match(name)
        return name if found is None else name[: found.start("part")] + others[found["part"]] + name[found.end() :]

    return replace(source, tensors={named(name): stored for name, stored in source.tensors.items()})


def _rescaled(ours: ConversionPlan, theirs: ConversionPlan) -> Iterator[str]:
    """The carried matrices that were quantized again for the global scale that gate and up share (--share-scales)."""
    for gate, up, scales in separate_scales(theirs.carried):
        if all(_equal(float(ours.matrices[stem].known_scale()), [float(max(scales))]) for stem in (gate, up)):
            yield gate if scales[0] < scales[1] else up


def layer_of(stem: str) -> str:
    return re.sub(r"(\bexperts)\..*", r"\1", stem)


def _original(name: str, source: Checkpoint, theirs: ConversionPlan) -> Matrix | None:
    """The source's matrix for the tensor `name` of a dense checkpoint; None: it has none."""
    for found in (theirs.matrices.get(name.removesuffix(".weight")), theirs.dequantized.get(name)):
        if found is not None:
            return found if isinstance(found, Matrix) else None
    stored = source.tensors.get(name)
    return dense(stored) if stored is not None and stored.dtype in DENSE and len(stored.shape) == 2 else None


# ---------------------------------------------------------------- names
@dataclass(frozen=True)
class _Names:
    """Which tensors the checkpoints have."""

    checkpoint: Checkpoint
    source: Checkpoint
    info: QuantizationInfo
    ours: ConversionPlan
    theirs: ConversionPlan

    def check(self) -> None:
        """ValueError if one of the checkpoints has a tensor that the other one lacks."""
        ours, theirs, here, there = self.ours, self.theirs, self.checkpoint.folder, self.source.folder
        for stem in ours.matrices:
            if _original(f"{stem}.weight", self.source, theirs) is None:
                raise ValueError(f"{stem} has no original in {there}: it was made from another checkpoint, or by an "
                                 "earlier version of this library under another name; quantize again")  # fmt: skip
        for stem in sorted(theirs.matrices.keys() - ours.matrices.keys()):
            if f"{stem}.weight" not in ours.copies.keys() | ours.dequantized.keys():
                raise ValueError(f"{stem} is in {there} and neither quantized nor dense in {here}")
        mine, others = self._names(ours), self._names(theirs)
        for name in sorted(others - mine):
            if not self._may_go(name, self.checkpoint):
                raise ValueError(f"{name} is in {there} and not in {here}: the conversion was not complete, or a "
                                 "tensor was lost since; quantize again")  # fmt: skip
        for name in sorted(mine - others):
            if not self._may_go(name, self.source) and name not in ours.scales:
                raise ValueError(f"{name} is in {here} and not in {there}: if a model was loaded from files that lack "
                                 "it, it is random numbers; find the whole original, and quantize that")  # fmt: skip

    def _names(self, plan: ConversionPlan) -> set[str]:
        """The names of the tensors that a plan writes, except codes and scales that only one checkpoint has."""
        one = (self.ours.matrices.keys() | self.theirs.matrices.keys()) - self.theirs.carried.keys()
        lasts = ("weight", *self.info.dialect.suffixes, PRE_QUANT_SCALE)
        of_matrices = {f"{stem}.{last}" for stem in one for last in lasts}
        return {*plan.copies, *plan.scales, *plan.dequantized} - of_matrices

    def _may_go(self, name: str, checkpoint: Checkpoint) -> bool:
        """Whether `checkpoint` may lack `name`: transformers' save_pretrained leaves it out on purpose, or the user."""
        tied = any(c.get("tie_word_embeddings") for c in sub_configs(checkpoint.config)) and "lm_head" in name
        there = (self.theirs if checkpoint is self.checkpoint else self.ours).copies
        if tied and (head := there.get(name)):  # transformers does not tie a head that differs from the embedding
            tied = any(re.search("emb|wte", n) and t.shape == head.shape and _same(head, t) for n, t in there.items())
        optional = KV_SCALE.search(name) is not None or name.endswith("rotary_emb.inv_freq")
        unused = self.info.activations == "bf16" and name.endswith(f".{self.info.dialect.input_scale}")
        return tied or optional or unused


# ---------------------------------------------------------------- what is copied
def _check_bytes(source: Checkpoint, ours: ConversionPlan, theirs: ConversionPlan) -> list[str]:
    """ValueError where a tensor that is copied, or made dense exactly, is not what it is in the source. Returns the
    names of those that lost something by another dtype."""
    made = (ours.matrices.keys() - theirs.carried.keys()) | set(_rescaled(ours, theirs))
    again = {f"{stem}.{last}" for stem in made for last in ours.options.target.suffixes[:3]}
    rounded = []
    for name, stored in ours.copies.items():
        if name in again:
            continue
        found, original = theirs.dequantized.get(name), theirs.copies.get(name)
        if found is not None and not _is_dense(stored, found):
            raise ValueError(f"{name} is not what it is in {source.folder}: it should have been made dense exactly")
        if found is None and original is not None and not _same(stored, original):
            raise ValueError(f"{name} is not what it is in {source.folder}: it should have been copied"
                             + ("" if stored.dtype == original.dtype else f", rounded to {stored.dtype}"))  # fmt: skip
        if original is not None and stored.dtype != original.dtype and not _same(original, stored):
            rounded.append(name)
    for name in (ours.scales.keys() & theirs.scales.keys()) - again:
        here, there = float(ours.scales[name]()), float(theirs.scales[name]())
        if not abs(here - there) <= ULP * abs(there):
            raise ValueError(f"{name} is {here:.9g}, from {source.folder} it is {there:.9g}: the file is damaged, or "
                             "was calibrated since; compare it with what it was made from")  # fmt: skip
    return rounded


def _rounded(names: list[str], source: Checkpoint) -> list[str]:
    """A warning of the tensors `names` that were rounded."""
    if not names:
        return []
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return [
        f"warning: {len(names)} dense tensors are rounded to a smaller dtype than in {source.folder}: {some}. "
        "save_pretrained of a model in bf16 does so with what is float32 in files"
    ]


def _is_dense(stored: TensorSlice, found: Matrix | list[Matrix]) -> bool:
    """Whether `stored` is exactly the matrix `found`, or the stack [E, K, N] of matrices [N, K], cast to its dtype."""
    if isinstance(found, list):
        views = (TensorView.of(stored.expert(e), lambda t: t.T) for e in range(len(found)))
        return stored.shape[0] == len(found) and all(map(_is_dense, views, found))
    if stored.shape != (found.rows, found.columns):
        return False
    dtype, read, rows = TORCH_DTYPES[stored.dtype], stored.reader(), found.open()
    width = found.columns * dtype.itemsize
    return all(
        torch.equal(read(a * width, (b - a) * width), rows(a, b).to(dtype).view(torch.uint8).view(-1))
        for a, b in _steps(found)
    )


def _same(stored: TensorSlice, original: TensorSlice) -> bool:
    """Whether `stored` has the values of `original`, in its dtype, or rounded to another floating-point one."""
    if stored.shape != original.shape:
        return False
    if stored.dtype != original.dtype:
        column = math.prod(stored.shape), 1
        floating = {stored.dtype, original.dtype} <= {*DENSE}
        return floating and _is_dense(replace(stored, shape=column), dense(replace(original, shape=column)))
    a, b = stored.reader(), original.reader()
    pieces = ((at, min(PIECE, stored.size - at)) for at in range(0, stored.size, PIECE))
    return all(torch.equal(a(*piece), b(*piece)) for piece in pieces)


def _check_fp8(name: str, weight: Matrix | list[Matrix], source: Checkpoint, theirs: ConversionPlan) -> None:
    """ValueError where FP8 weights next to NVFP4 ones are far from the original, or not the source's FP8 weights."""
    original = _original(name, source, theirs)
    if isinstance(weight, Matrix) and original is not None:
        error = _judge(name, weight, original).errors.relative
        if not error <= (0 if name in theirs.dequantized else ROUNDED.matrix):
            raise ValueError(f"{name} is {error:.3g} times its norm away from its original in {source.folder}: the "
                             "file is damaged, or was made from another checkpoint")  # fmt: skip


# ---------------------------------------------------------------- what is quantized
def _judge_all(source: Checkpoint, ours: ConversionPlan, theirs: ConversionPlan) -> dict[str, _Judged]:
    """Compare all matrices, some at the same time: each in one thread, which is faster than all threads on one."""
    kind = torch.finfo(TORCH_DTYPES[theirs.options.dtype or "F32"])  # to which quantize casts
    rounded = kind.tiny * kind.eps / 2  # half of the smallest number

    def judge(stem: str) -> _Judged:
        original = _original(f"{stem}.weight", source, theirs)
        assert original is not None, "checked with the names"
        return _judge(stem, ours.matrices[stem], original, rounded)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, WORKERS)) as pool:
            return dict(zip(ours.matrices, pool.map(judge, ours.matrices), strict=True))
    finally:
        torch.set_num_threads(threads)


def _judge(stem: str, packed: Matrix, original: Matrix, rounded: float = 0.0) -> _Judged:
    """Compare every element of two matrices. ValueError if they have other sizes, or the original is not finite.

    rounded  the most that a number near 0 loses by a cast of the original
    """
    padded = -(-original.columns // SF_VEC_SIZE) * SF_VEC_SIZE
    if (packed.rows, packed.columns) not in ((original.rows, original.columns), (original.rows, padded)):
        raise ValueError(
            f"{stem} is [{packed.rows}, {packed.columns}], its original [{original.rows}, {original.columns}]"
        )
    scale = float(packed.known_scale()) if packed.global_scale is not None else 0.0
    lost = SF_VEC_SIZE * ((E2M1_MAX * scale * SMALLEST) ** 2 + rounded**2)
    found = _Judged(original, ErrorSums(1), scale, 0.0, lost)
    rows, packed_rows = original.open(), packed.open()
    for a, b in _steps(packed):
        w = rows(a, b).float()
        if not math.isfinite(largest := float(w.abs().amax())):
            raise ValueError(f"the original of {stem} has NaN or Inf: this was made from another checkpoint, or the "
                             "original has been damaged since: download it again")  # fmt: skip
        found.amax = max(found.amax, largest)
        # Divided by a power of two, since float32 cannot hold the squares of 1e-25 or of 1e21
        unit = 2.0 ** max(math.frexp(largest)[1], -120)
        w = w / unit
        moved = (packed_rows(a, b)[:, : w.shape[1]] / unit).sub_(w)
        error, norm, along = (_of_blocks(t) for t in (moved * moved, w * w, moved.mul_(w)))
        found.errors.add_squares(*(float(t.sum(dtype=torch.float64)) * unit**2 for t in (error, norm)))
        # Twice what is lost, since norms of errors add up, and not their squares. Finite in float32, for rows of zeros
        lost = min(found.lost / unit**2, 1e30)
        at, worst = _worst((error - 2 * lost).clamp_(min=0), norm)
        columns, of_rows = norm.shape[1], norm.sum(dim=1)
        found.block = max(found.block, (math.sqrt(worst), a + at // columns, at % columns * SF_VEC_SIZE))
        at, worst = _worst((along.sum(dim=1).abs_() - (lost * columns * of_rows).sqrt_()).clamp_(min=0), of_rows)
        found.length = max(found.length, (worst, a + at))
    return found


def _steps(matrix: Matrix) -> Iterator[tuple[int, int]]:
    step = max(1, STEP // matrix.columns)
    return ((a, min(a + step, matrix.rows)) for a in range(0, matrix.rows, step))


def _of_blocks(w: Tensor) -> Tensor:
    """The sum of each block of 16 columns: [N, K/16]."""
    return pad_k(w).unflatten(1, (-1, SF_VEC_SIZE)).sum(dim=2)


def _worst(over: Tensor, norm: Tensor) -> tuple[int, float]:
    """Where over / norm is largest, and how large; Inf where only norm is 0."""
    relative = torch.where(over == 0, 0.0, over / norm).nan_to_num(nan=math.inf, posinf=math.inf)
    at = int(relative.argmax())
    return at, float(relative.view(-1)[at])


def _check_errors(
    judged: Mapping[str, _Judged], source: Checkpoint, recipe: str, ours: ConversionPlan, theirs: ConversionPlan
) -> list[str]:
    """ValueError where a matrix or one of its blocks is farther from its original than its recipe can move it, or its
    global scale does not follow from it. Returns a warning if matrices are too small for their global scale."""
    last = ours.options.target.global_scale
    fused, unified = fused_in_files(source, judged.keys()), _unified(judged)
    expected = {stem: _expected(stem, fused[stem], unified[stem], judged, theirs) for stem in judged}
    agree = Counter(rule for stem, rules in expected.items() for rule, values in rules.items()
                    if _equal(judged[stem].global_scale, values))  # fmt: skip
    rule, count = max(agree.items(), key=lambda item: item[1], default=("", 0))
    known = 2 * count > len(judged)  # else another tool chose the scales, in another way
    only_rounds = any(
        r.name == recipe and rule.split()[0] in (f"{r.sf_max:g}", "given") for r in REGISTRY if not r.model
    )
    limits = ROUNDED if known and only_rounds else LEARNED
    for stem, found in judged.items():
        if known and not any(_equal(found.global_scale, values) for values in expected[stem].values()):
            wanted = expected[stem].get(rule) or next(iter(expected[stem].values()))
            raise ValueError(f"{stem}.{last} stands for {found.global_scale:.9g}, but {wanted[0]:.9g} follows from "
                             f"{source.folder}, in the way of {count} of the {len(judged)} matrices: the file is "
                             "damaged, or was made from another checkpoint")  # fmt: skip
        relative, row, column = found.block
        if relative > limits.block:
            raise ValueError(f"{stem} is damaged in row {row}, columns {column} to {column + SF_VEC_SIZE - 1}, in its "
                             f"codes or its block scale: they are {relative:.3g} times their norm away from the "
                             f"original in {source.folder}, and quantizing moves them by less than {limits.block}"
                             )  # fmt: skip
        relative, row = found.length
        if relative > limits.length:
            raise ValueError(f"{stem} is damaged in row {row}, in its codes or its block scales: its length differs by "
                             f"{relative:.3g} of the original's in {source.folder}, and quantizing changes it by less "
                             f"than {limits.length}")  # fmt: skip
        lost = 2 * found.lost * found.original.rows * found.original.columns / SF_VEC_SIZE
        if not found.errors.error - lost <= limits.matrix**2 * found.errors.square:
            raise ValueError(f"{stem} is {found.errors.relative:.3g} times its norm away from its original in "
                             f"{source.folder}, and quantizing moves it by less than {limits.matrix}: the file is "
                             "damaged, or was made from another checkpoint")  # fmt: skip
    far = {stem: error for stem in judged if (error := judged[stem].errors.relative) > limits.matrix}
    if not far:
        return []
    worst = max(far, key=lambda stem: far[stem])
    return [f"warning: {len(far)} matrices are more than {limits.matrix} times their norm away from their originals "
            f"({worst}: {far[worst]:.3g}). Their elements are too small for their global scale, which goes by the "
            "largest of all that share it (gate and up; q, k and v): block scales become 0. Leave these layers dense "
            "(--exclude)"]  # fmt: skip


def _unified(judged: Mapping[str, _Judged]) -> dict[str, list[_Judged]]:
    """matrix -> those of its module, itself included, that have the same global scale: tools give one to all that read
    the same rows (ModelOpt: a gate beside q, k and v), or to a stack of experts."""
    groups: dict[tuple[str, float], list[_Judged]] = {}
    found = {}
    for stem, matrix in judged.items():
        module = layer_of(stem)  # of an expert
        if module == stem:
            module = stem.rpartition(".")[0]
        found[stem] = groups.setdefault((module, matrix.global_scale), [])
        found[stem].append(matrix)
    return found


def _expected(
    stem: str,
    fused: Iterable[str],
    unified: Iterable[_Judged],
    judged: Mapping[str, _Judged],
    theirs: ConversionPlan,
) -> dict[str, list[float]]:
    """The global scales that a matrix may have: rule -> values, one for each dtype that a loader may have cast to.

    Rules: that of an MXFP4 or NVFP4 source; of a recipe, for the largest magnitude of the matrices that servers fuse
    with it (`fused`), of those that have the same one (`unified`), or its own.
    """
    group = [judged[s] for s in fused]
    given = [float(found.original.known_scale()) for found in group if found.original.global_scale is not None]
    rules = {"given": [max(given) or 1.0]} if given else {}
    if stem in theirs.carried:
        return rules | {"its own": [float(judged[stem].original.known_scale())]}
    largest_of = lambda matrices: max(found.amax for found in matrices)
    for alone, amax in (("", largest_of(group)), (" alone", judged[stem].amax), (" unified", largest_of(unified))):
        largest = torch.tensor(amax, dtype=torch.float32)
        casts = [largest.to(dtype).float() for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        for sf_max in {r.sf_max: None for r in REGISTRY}:
            rules[f"{sf_max:g}{alone}"] = [float(global_scale_for(a, sf_max)) for a in casts]
    return rules


def _equal(scale: float, values: Iterable[float]) -> bool:
    return any(abs(scale - value) <= ULP * value for value in values if value < math.inf)
