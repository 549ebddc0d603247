"""The jobs of a conversion: each reads some tensors and writes others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_nvfp4.format import dequantize, pad_k
from moe_nvfp4.quantize.codes import CodesFolder
from moe_nvfp4.quantize.dialects import Dialect
from moe_nvfp4.quantize.exact import cast_exactly
from moe_nvfp4.quantize.files import TORCH_DTYPES, TensorSlice
from moe_nvfp4.quantize.layouts import CastSums, ErrorSums, Matrix
from moe_nvfp4.quantize.layouts.base import cast_finite, parts_of_expert
from moe_nvfp4.quantize.names import experts_module, gate_of, up_of
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import quantize_matrix, recipe_global_scale, recipe_named
from moe_nvfp4.weights import check_block_scales, check_global_scale

CHUNK = 1 << 22  # elements of a matrix that are quantized at once: 8 MiB in bf16, 16 MiB in fp32
CUDA_CHUNK = 1 << 24
# Elements of equally shaped matrices that one job quantizes at once, by device type. A small matrix costs the thread of
# a GPU some hundred calls, which take longer than the work itself. On a CPU a job has one matrix, or one pair.
TOGETHER = {"cuda": CUDA_CHUNK}
COPY = 1 << 23  # bytes copied at once
Write = Callable[[str, Tensor, int], None]  # name, data, byte offset in the tensor
Outputs = dict[str, tuple[str, tuple[int, ...]]]  # tensor name -> dtype, shape


@dataclass
class Job:
    """One piece of work: `run(write)` writes the `outputs`, which belong to file `shard`.

    size: source bytes, for the progress bar; memory: bytes that the job holds while it runs.
    """

    shard: str
    size: int
    memory: int
    outputs: Outputs
    run: Callable[[Write], None]


def copy_job(
    name: str, stored: TensorSlice, new_name: str | None = None, check: Callable[[Tensor, str], None] | None = None
) -> Job:
    """Copy a tensor, under a new name if given. check: raises ValueError for a bad piece, uint8 [n], of `name`."""
    new_name = new_name or name

    def run(write: Write) -> None:
        read = stored.reader()
        for at in range(0, stored.size, COPY):
            piece = read(at, min(COPY, stored.size - at))
            if check is not None:
                check(piece, name)
            write(new_name, piece, at)

    outputs = {new_name: (stored.dtype, stored.shape)}
    return Job(stored.file.name, stored.size, stored.held + 2 * min(stored.size, COPY), outputs, run)


def scale_job(name: str, stored: TensorSlice, new_name: str, source: Dialect, target: Dialect) -> Job:
    """Rewrite a global scale of one dialect in another."""

    def run(write: Write) -> None:
        check_global_scale(source.decode_scale(stored.tensor()), name)
        try:
            write(new_name, source.carry_scale(stored.tensor(), target), 0)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    return Job(stored.file.name, 4, 64, {new_name: ("F32", target.scale_shape)}, run)


def quantize_jobs(matrices: Mapping[str, Matrix], options: Options, cast: CastSums) -> Iterator[Job]:
    """Jobs that quantize matrices, by stem, to `stem`.weight and its scales in the options' dialect.

    cast: receives what becomes of MXFP4 matrices.

    Gate and up of an expert share a global scale, since servers read gate's for both. Both go into the file of gate.
    """
    if options.codes is not None:
        yield from (_ready_job(stem, m, options.codes, options.target) for stem, m in matrices.items())
        return
    waiting: dict[tuple, list[dict[str, Matrix]]] = {}
    for stem, m in matrices.items():
        gate, up = gate_of(stem), up_of(stem)
        if gate is not None and gate in matrices:
            continue
        sharing = {stem: m} if up is None or up not in matrices else {stem: m, up: matrices[up]}
        of = experts_module(stem)  # so that a model that is loaded is made layer by layer
        group = waiting.setdefault((m.shard, of, m.rows, m.columns, len(sharing), m.global_scale is None), [])
        group.append(sharing)
        room = TOGETHER.get(options.place.type, 1)
        if (len(group) + 1) * len(sharing) * m.rows * m.columns > room:
            yield _quantize_job(group[:], options, cast)
            group.clear()
    yield from (_quantize_job(group, options, cast) for group in waiting.values() if group)


def _outputs(stem: str, N: int, K: int, target: Dialect) -> Outputs:
    """The tensors of an NVFP4 matrix: codes, block scales, global scale."""
    shapes = ("U8", (N, K // 2)), ("F8_E4M3", (N, K // 16)), ("F32", target.scale_shape)
    return {f"{stem}.{last}": out for last, out in zip(target.suffixes, shapes, strict=False)}


def _quantize_job(
    groups: list[dict[str, Matrix]], options: Options, cast: CastSums, importance: Tensor | None = None
) -> Job:
    """Quantize groups of matrices, by stem; a group shares a global scale. All matrices have one shape, and several
    groups together are no larger than a chunk. A matrix gets the same bytes as in a job of its group alone.

    importance: fp32 [K] of a matrix that is no expert's, for a recipe that needs it."""
    batch = _Batch(groups, options, cast, importance)
    (N, K), matrices, target = batch.shape, batch.matrices, options.target

    def run(write: Write) -> None:
        try:
            batch.quantize(write)
        except ValueError:
            for group in groups if batch.stacked else ():  # again group by group, so that the error names the matrix
                _quantize_job([group], options, cast).run(write)
            raise

    outputs: Outputs = {}
    for stem in batch.stems:
        outputs |= _outputs(stem, N, K, target)
    # Bytes per element. On a CPU: fp32 and temporaries. For a GPU: the data read, its pinned copy, and the result.
    of_element = 2 * batch.dtype.itemsize + 1 if batch.cuda else 10
    memory = sum(m.held for m in matrices) + len(matrices) * min(N, batch.step) * K * of_element + 10_000_000
    return Job(matrices[0].shard, sum(m.size for m in matrices), memory, outputs, run)


class _Batch:
    """The matrices of a job, [N, K] with K padded to whole blocks, quantized one after another in steps of `step` rows,
    or all stacked."""

    def __init__(
        self, groups: list[dict[str, Matrix]], options: Options, cast: CastSums, importance: Tensor | None
    ):  # fmt: skip
        self.cast = cast
        self.options, self.sharing, self.stacked = options, len(groups[0]), len(groups) > 1
        self.stems = [stem for group in groups for stem in group]
        self.matrices = [m for group in groups for m in group.values()]
        self.names = [[f"{stem}.{s}" for s in options.target.suffixes[:3]] for stem in self.stems]
        self.cuda, self.dtype = options.place.type == "cuda", TORCH_DTYPES[options.dtype or "F32"]
        N, K = self.shape = self.matrices[0].rows, -(-self.matrices[0].columns // 16) * 16
        self.step = N if self.stacked else max(1, (CUDA_CHUNK if self.cuda else CHUNK) // K)
        n = len(self.matrices)
        self.lots = [range(n)] if self.stacked else [range(i, i + 1) for i in range(n)]  # indices quantized at once
        self.importance = None if importance is None else pad_k(importance[None])  # or fp32 [matrices, K]
        if options.importance is not None and importance is None:
            sizes = zip(self.stems, self.matrices, strict=True)
            vectors = [options.importance.of_matrix(stem, m.columns) for stem, m in sizes]
            self.importance = pad_k(torch.stack(vectors))

    def quantize(self, write: Write) -> None:
        read, (N, K) = _Reader(self), self.shape
        given, exact = self.global_scales(read)
        lost: set[int] = set()  # matrices whose values change, although they should not
        for lot in self.lots:
            at = slice(lot.start, lot.stop)
            scale = None if given is None else given[at]
            importance = None if self.importance is None else self.importance[at]
            for a in range(0, N, self.step):
                made = self.by_table(lot, a, scale) if exact and scale is not None else None
                if made is None:
                    w = read(lot, a)
                    try:
                        made = quantize_matrix(w, self.options.recipe, scale, importance)
                    except ValueError as error:
                        raise ValueError(f"{self.stems[lot.start]}: {error}") from None
                    lost |= self.lost(lot, made, w) if exact else set()
                codes, sf, global_scale = made
                codes, sf = codes.cpu().view(len(lot), -1), sf.cpu().view(len(lot), -1)
                for i, of_weight, of_sf in zip(lot, codes, sf, strict=True):
                    write(self.names[i][0], of_weight, a * K // 2)
                    write(self.names[i][1], of_sf, a * K // 16)
            for i, number in zip(lot, global_scale.cpu(), strict=True):
                write(self.names[i][2], _encoded(self.names[i][2], number, self.options.target), 0)
            read.forget(lot)

        if exact:
            self.cast.count(len(self.stems), len(lost))

    def by_table(self, lot: range, a: int, scale: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Codes and block scales of rows of MXFP4 without a search, if that is known to find the same."""
        if self.importance is not None or self.options.dtype == "F16":
            return None
        found, b = [], min(a + self.step, self.shape[0])
        for i, of_matrix in zip(lot, scale, strict=True):
            packed = self.matrices[i].packed
            if packed is None:
                return None
            codes, exponents = (t.to(self.options.place) for t in packed(a, b))
            cast = cast_exactly(codes, exponents, of_matrix, self.options.recipe)
            if cast is None:
                return None
            found.append(cast)
        codes, sf = map(torch.stack, zip(*found, strict=True))
        return codes, sf, scale

    def lost(self, lot: range, made: tuple[Tensor, Tensor, Tensor], w: Tensor) -> set[int]:
        """Which of the matrices `lot`, w, are not what they were, with a warning; `cast` gets their errors."""
        codes, sf, global_scale = made
        values, w = dequantize(codes, sf, global_scale[:, None]), w.float()
        found = [i for i in range(len(w)) if not torch.equal(values[i], w[i])]
        for i in found:
            self.cast.add(values[i], w[i])
        if found:
            warnings.warn(
                f"{self.stems[lot.start]}: its MXFP4 scales, with those of the projection that shares its global "
                "scale, span more powers of two than an e4m3 scale holds: the smallest values are rounded",
                stacklevel=2,
            )
        return {lot[i] for i in found}

    def global_scales(self, read: _Reader) -> tuple[Tensor | None, bool]:
        """(Global scales, fp32 [matrices], or None where the recipe finds each from its matrix; whether the values must
        be kept exactly.) The source's scales, where it has them; else computed over all matrices that share one."""
        searches = recipe_named(self.options.recipe).candidates is not None
        exact = searches and self.matrices[0].global_scale is not None
        if exact:
            given = torch.stack([m.known_scale() for m in self.matrices]).view(-1, self.sharing).amax(dim=1)
            given = torch.where(given > 0, given, 1.0)
        elif self.step < self.shape[0] or self.sharing > 1:
            starts = range(0, self.shape[0], self.step)
            parts = [torch.stack([_amax(read(lot, a)) for a in starts]).amax(dim=0) for lot in self.lots]
            amax = torch.cat(parts).view(-1, self.sharing).amax(dim=1)
            if not amax.isfinite().all():  # quantizing raises the error, which names the matrix
                return None, False
            given = recipe_global_scale(amax, self.options.recipe)
        else:
            return None, False
        return given.repeat_interleave(self.sharing), exact


class _Reader:
    """Reads rows of a batch's matrices to the device that quantizes them. Whole matrices that are needed twice, for
    the global scale and for the codes, are kept in between."""

    def __init__(self, batch: _Batch):
        self.batch, self.opened = batch, [m.open() for m in batch.matrices]
        self.kept: dict[range, Tensor] = {}

    def __call__(self, lot: range, a: int) -> Tensor:
        """Rows a to a + step of the matrices `lot`: [matrices, rows, K]."""
        if lot in self.kept:
            return self.kept[lot]
        batch, options, (N, K) = self.batch, self.batch.options, self.batch.shape
        pieces = (pad_k(self.opened[i](a, min(a + batch.step, N))) for i in lot)
        if len(lot) == 1 and not batch.cuda:
            found = options.cast(next(pieces)).to(options.place)[None]
        else:
            shape = len(lot), min(batch.step, N - a), K
            host = torch.empty(shape, dtype=batch.dtype, device="cpu", pin_memory=batch.cuda)
            for place, piece in zip(host, pieces, strict=True):
                place.copy_(piece)
            found = host.to(options.place, non_blocking=True)
        if batch.step >= N and batch.sharing > 1:
            self.kept[lot] = found
        return found

    def forget(self, lot: range) -> None:
        self.kept.pop(lot, None)


def linear_jobs(
    fused: Mapping[str, Matrix], options: Options, cast: CastSums, importance: Tensor | None = None
) -> Iterator[Job]:
    """Jobs that quantize linears, by stem, which servers fuse into one and which so share a global scale.

    cast: as for `quantize_jobs`; importance: fp32 [K], for a recipe that needs it.
    """
    if options.codes is not None:
        yield from (_ready_job(stem, m, options.codes, options.target) for stem, m in fused.items())
    elif len(fused) == 1:
        yield _quantize_job([dict(fused)], options, cast, importance)
    else:
        yield _fused_job(fused, options, cast, importance)


def _fused_job(fused: Mapping[str, Matrix], options: Options, cast: CastSums, importance: Tensor | None) -> Job:
    """Quantize linears that read the same rows as one matrix, with the rows of all. All go into the first's file."""
    stems, matrices, target = list(fused), list(fused.values()), options.target
    together = ", ".join([stems[0], *(stem.rpartition(".")[2] for stem in stems[1:])])
    job = _quantize_job([{together: _stack_rows(matrices)}], options, cast, importance)
    outputs: Outputs = {}
    for stem, matrix in fused.items():
        outputs |= _outputs(stem, matrix.rows, -(-matrix.columns // 16) * 16, target)
    rows = sum(matrix.rows for matrix in matrices)

    def run(write: Write) -> None:
        def split(name: str, data: Tensor, at: int) -> None:
            """Pass a piece of the whole on to the linears that it belongs to."""
            last = name.removeprefix(f"{together}.")
            if last == target.global_scale:
                for stem in stems:
                    write(f"{stem}.{last}", data, 0)
                return
            data, start = data.flatten(), 0
            width = math.prod(job.outputs[name][1]) // rows
            for stem, matrix in fused.items():
                stop = start + matrix.rows * width
                if at < stop and start < at + len(data):
                    write(f"{stem}.{last}", data[max(start - at, 0) : stop - at], max(at - start, 0))
                start = stop

        job.run(split)

    return replace(job, outputs=outputs, run=run)


def _stack_rows(matrices: Sequence[Matrix]) -> Matrix:
    """Matrices with the same columns, one below the other."""

    def open() -> Callable[[int, int], Tensor]:
        opened = [matrix.open() for matrix in matrices]

        def rows(a: int, b: int) -> Tensor:
            found, start = [], 0
            for read, matrix in zip(opened, matrices, strict=True):
                first, last = max(a - start, 0), min(b - start, matrix.rows)
                if first < last:
                    found.append(read(first, last))
                start += matrix.rows
            return torch.cat(found)

        return rows

    first, sizes = matrices[0], [(m.rows, m.size, m.held) for m in matrices]
    rows, size, held = (sum(of) for of in zip(*sizes, strict=True))
    known = [m.global_scale for m in matrices if m.global_scale is not None]
    largest = (lambda: torch.stack([scale() for scale in known]).amax()) if len(known) == len(matrices) else None
    return Matrix(rows, first.columns, size, first.shard, open, held, largest)


def _ready_job(stem: str, matrix: Matrix, made: CodesFolder, target: Dialect) -> Job:
    """Write a matrix that a recipe for whole layers has quantized already."""
    N, K = matrix.rows, -(-matrix.columns // 16) * 16
    outputs = _outputs(stem, N, K, target)
    names = list(outputs)

    def run(write: Write) -> None:
        codes, sf, scale = made.matrix(stem, (N, matrix.columns))
        check_global_scale(scale, names[2])
        check_block_scales(sf, names[1])
        for name, tensor in zip(names, (codes, sf, _encoded(names[2], scale, target)), strict=True):
            write(name, tensor, 0)

    return Job(matrix.shard, matrix.size, 4 * N * K, outputs, run)


def _encoded(name: str, scale: Tensor, target: Dialect) -> Tensor:
    try:
        return target.encode_scale(scale)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _amax(w: Tensor) -> Tensor:
    """fp32 [n]: the largest magnitude of each of n matrices [n, N, K]."""
    low, high = w.flatten(1).aminmax(dim=1)
    return torch.maximum(-low, high).float()


def rescale_job(stem: str, matrix: Matrix, scale: Tensor, options: Options, errors: ErrorSums) -> Job:
    """Quantize an NVFP4 matrix again, from its exact values, for the global scale `scale` (fp32 0-d, on a CPU).

    errors: receives the error that this adds.
    """
    N, K = matrix.rows, matrix.columns
    step = max(1, CHUNK // K)
    outputs = _outputs(stem, N, K, options.target)
    weight, block_scale, global_scale = outputs

    def run(write: Write) -> None:
        rows, here = matrix.open(), scale.to(options.place)
        for a in range(0, N, step):
            w = rows(a, min(a + step, N)).to(options.place)
            codes, sf, _ = quantize_matrix(w, options.recipe, here)
            errors.add(dequantize(codes, sf, here), w)
            write(weight, codes, a * K // 2)
            write(block_scale, sf, a * K // 16)
        write(global_scale, _encoded(global_scale, scale, options.target), 0)

    memory = matrix.held + min(N, step) * K * 14 + 10_000_000
    return Job(matrix.shard, matrix.size, memory, outputs, run)


def without(job: Job, names: Container[str]) -> Job:
    """`job` without the outputs `names`."""

    def run(write: Write) -> None:
        job.run(lambda name, data, at: None if name in names else write(name, data, at))

    return replace(job, outputs={n: out for n, out in job.outputs.items() if n not in names}, run=run)


def dense_job(name: str, matrix: Matrix, dtype: str) -> Job:
    """Write an FP8 or MXFP4 matrix as a dense tensor."""
    N, K = matrix.rows, matrix.columns
    step = max(1, CHUNK // K)
    target = TORCH_DTYPES[dtype]

    def run(write: Write) -> None:
        rows = matrix.open()
        for a in range(0, N, step):
            write(name, cast_finite(rows(a, min(a + step, N)), target, name), a * K * target.itemsize)

    return Job(matrix.shard, matrix.size, matrix.held + min(N, step) * K * 10, {name: (dtype, (N, K))}, run)


def dense_stack_job(name: str, matrices: list[Matrix], dtype: str) -> Job:
    """Write the matrices [N, K] of all experts, which have one shape, as one dense tensor [E, K, N]."""
    N, K = matrices[0].rows, matrices[0].columns
    target = TORCH_DTYPES[dtype]

    def run(write: Write) -> None:
        for e, matrix in enumerate(matrices):
            write(name, cast_finite(matrix.open()(0, N), target, name).T, e * N * K * target.itemsize)

    outputs: Outputs = {name: (dtype, (len(matrices), K, N))}
    return Job(matrices[0].shard, sum(m.size for m in matrices), N * K * 12, outputs, run)


def bias_parts(stored: TensorSlice, stems: Sequence[str], interleaved: bool) -> Iterator[tuple[str, TensorSlice]]:
    """(name, part) for each expert and projection of biases [E, n]. stems: the projections, with {e} for the expert."""
    for e in range(stored.shape[0]):
        parts = parts_of_expert(stored, e, len(stems), interleaved=interleaved)
        yield from ((f"{stem.format(e=e)}.bias", part) for stem, part in zip(stems, parts, strict=True))
