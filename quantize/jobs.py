"""The work of a conversion in pieces: each job reads some tensors and writes others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from moe_nvfp4.format import pad_k
from moe_nvfp4.quantize.checkpoint import TORCH_DTYPES, Stored, tensor_bytes
from moe_nvfp4.quantize.dialects import Dialect
from moe_nvfp4.quantize.matrices import Matrix, NVFP4Stack
from moe_nvfp4.quantize.recipes import quantize_matrix, recipe_global_scale
from moe_nvfp4.weights import check_global_scale

CHUNK = 1 << 22  # elements of a matrix that are worked on together: 8 MiB in bf16, 16 MiB in fp32
CUDA_CHUNK = 1 << 24
# Elements of matrices of one shape that a job takes together. A small matrix costs a GPU's thread some hundred calls,
# which take longer than the work; a CPU takes one at a time.
TOGETHER = {"cuda": CUDA_CHUNK}
COPY = 1 << 23  # bytes copied at once
Write = Callable[[str, Tensor, int], None]  # name, data, byte offset in the tensor


@dataclass(frozen=True)
class Options:
    """What the caller asked for, checked, and the dtype of the config."""

    recipe: str
    exclude: tuple[str, ...]
    include: tuple[str, ...] | None
    dialect: Dialect
    activations: str
    device: str
    dtype: str | None  # of config.json, as safetensors writes it; None: it names none

    def cast(self, w: Tensor) -> Tensor:
        return w if self.dtype is None else w.to(TORCH_DTYPES[self.dtype])


@dataclass
class Job:
    """One piece of work: `run(write)` writes the `outputs` of file `shard`.

    size: source bytes, for the progress bar; memory: bytes it holds while it runs.
    """

    shard: str
    size: int
    memory: int
    outputs: dict[str, tuple[str, tuple[int, ...]]]
    run: Callable[[Write], None]


def copy_job(name: str, stored: Stored, new_name: str | None = None) -> Job:
    new_name = new_name or name

    def run(write: Write) -> None:
        for at in range(0, stored.size, COPY):
            write(new_name, stored.read(at, min(COPY, stored.size - at)), at)

    outputs = {new_name: (stored.dtype, stored.shape)}
    return Job(stored.file.name, stored.size, 2 * min(stored.size, COPY), outputs, run)


def scale_job(name: str, stored: Stored, new_name: str, source: Dialect, target: Dialect) -> Job:
    """A global scale from one dialect to the other."""
    if stored.dtype != "F32" or tensor_bytes("F32", stored.shape) != 4:
        raise ValueError(
            f"{name} is {stored.dtype} {list(stored.shape)}: one F32 number per matrix is expected; the file is damaged"
        )

    def run(write: Write) -> None:
        scale = source.decode_scale(stored.tensor()).reshape(())
        check_global_scale(scale, name)
        write(new_name, target.encode_scale(scale), 0)

    return Job(stored.file.name, 4, 64, {new_name: ("F32", target.scale_shape)}, run)


def quantize_jobs(matrices: Iterable[tuple[str, str, Matrix]], options: Options) -> Iterator[Job]:
    """Jobs for (shard, stem, matrix): `stem`.weight and its scales, in the options' dialect."""
    together: dict[tuple, dict[str, Matrix]] = {}
    for shard, stem, m in matrices:
        key = shard, m.rows, m.columns, m.global_scale is None
        group = together.setdefault(key, {})
        group[stem] = m
        if (len(group) + 1) * m.rows * m.columns > TOGETHER.get(torch.device(options.device).type, 1):
            yield _quantize_job(shard, together.pop(key), options)
    for (shard, *_), group in together.items():
        yield _quantize_job(shard, group, options)


def _quantize_job(shard: str, matrices: Mapping[str, Matrix], options: Options) -> Job:
    """matrices: by stem, of one shape; several are no larger than a chunk. Each gets the bytes it gets alone."""
    stems, first, n = list(matrices), next(iter(matrices.values())), len(matrices)
    names = [[f"{stem}.{s}" for s in options.dialect.suffixes[:3]] for stem in stems]
    N, K = first.rows, -(-first.columns // 16) * 16
    cuda = torch.device(options.device).type == "cuda"
    step = N if n > 1 else max(1, (CUDA_CHUNK if cuda else CHUNK) // K)
    dtype = TORCH_DTYPES[options.dtype or "F32"]

    def work(write: Write) -> None:
        opened = [m.open() for m in matrices.values()]

        def read(a: int) -> Tensor:
            pieces = (pad_k(rows(a, min(a + step, N))) for rows in opened)
            if n == 1 and not cuda:
                return options.cast(next(pieces)).to(options.device)
            host = torch.empty((n, min(step, N - a), K), dtype=dtype, device="cpu", pin_memory=cuda)
            for place, piece in zip(host, pieces, strict=True):
                place.copy_(piece)
            return host.to(options.device, non_blocking=True)

        given = None
        if first.global_scale and options.recipe != "max":
            given = torch.stack([m.global_scale() for m in matrices.values()])
        elif step < N:
            amax = torch.stack([read(a).abs().amax().float() for a in range(0, N, step)]).amax()
            if amax.isfinite():  # else the part with NaN or Inf says so, below
                given = recipe_global_scale(amax, options.recipe)
        for a in range(0, N, step):
            codes, sf, global_scale = quantize_matrix(read(a), options.recipe, given)
            parts = zip(names, codes.cpu().view(n, -1), sf.cpu().view(n, -1), strict=True)
            for (weight, block_scale, _), of_weight, of_sf in parts:
                write(weight, of_weight, a * K // 2)
                write(block_scale, of_sf, a * K // 16)
        for (*_, scale), number in zip(names, global_scale.cpu().view(n), strict=True):
            write(scale, options.dialect.encode_scale(number), 0)

    def run(write: Write) -> None:
        try:
            work(write)
        except ValueError as error:
            if n == 1:
                raise ValueError(f"{stems[0]}: {error}") from None
            for stem, matrix in matrices.items():  # one by one, so that the error names its matrix
                _quantize_job(shard, {stem: matrix}, options).run(write)

    outputs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for weight, block_scale, scale in names:
        outputs |= {weight: ("U8", (N, K // 2)), block_scale: ("F8_E4M3", (N, K // 16))}
        outputs[scale] = ("F32", options.dialect.scale_shape)
    # On a CPU, fp32 and its temporaries; for a GPU what is read, that again in pinned memory, and what comes back.
    of_element = 2 * dtype.itemsize + 1 if cuda else 10
    memory = sum(m.held for m in matrices.values()) + n * min(N, step) * K * of_element + 10_000_000
    return Job(shard, sum(m.size for m in matrices.values()), memory, outputs, run)


def dense_job(name: str, shard: str, matrix: Matrix, dtype: str) -> Job:
    """A quantized matrix as a dense one."""
    N, K = matrix.rows, matrix.columns
    step = max(1, CHUNK // K)
    target = TORCH_DTYPES[dtype]

    def run(write: Write) -> None:
        rows = matrix.open()
        for a in range(0, N, step):
            write(name, rows(a, min(a + step, N)).to(target), a * K * target.itemsize)

    return Job(shard, matrix.size, matrix.held + min(N, step) * K * 10, {name: (dtype, (N, K))}, run)


def dense_stack_job(name: str, shard: str, matrices: list[Matrix], dtype: str) -> Job:
    """The matrices [N, K] of all experts as one dense tensor [E, K, N]. `matrices`: of one shape."""
    N, K = matrices[0].rows, matrices[0].columns
    target = TORCH_DTYPES[dtype]

    def run(write: Write) -> None:
        for e, matrix in enumerate(matrices):
            write(name, matrix.open()(0, N).to(target).T, e * N * K * target.itemsize)

    outputs = {name: (dtype, (len(matrices), K, N))}
    return Job(shard, sum(m.size for m in matrices), N * K * 12, outputs, run)


def stack_jobs(stack: NVFP4Stack, stems: list[str], source: Dialect, target: Dialect) -> Iterator[Job]:
    """A stack as one matrix per expert and projection, the same bytes. stems: with {e} for the expert."""
    E, out, half = stack.shape
    n = len(stems)

    def job(e: int) -> Job:
        names = [stem.format(e=e) for stem in stems]

        def run(write: Write) -> None:
            for stored, suffix in ((stack.codes, target.weight), (stack.sf, target.sf)):
                for name, piece in zip(names, stack.pieces(stored, e, n), strict=True):
                    write(f"{name}.{suffix}", piece, 0)
            for name, last in product(names, stack.scales):
                scale = stack.scale(last, e, source)
                check_global_scale(scale, f"{name}.{last}")
                write(f"{name}.{target.suffixes[source.suffixes.index(last)]}", target.encode_scale(scale), 0)

        outputs: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name in names:
            outputs[f"{name}.{target.weight}"] = ("U8", (out // n, half))
            outputs[f"{name}.{target.sf}"] = ("F8_E4M3", (out // n, half // 8))
            for last in stack.scales:
                outputs[f"{name}.{target.suffixes[source.suffixes.index(last)]}"] = ("F32", target.scale_shape)
        size = (stack.codes.size + stack.sf.size) // E
        return Job(stack.codes.file.name, size, 3 * size, outputs, run)

    return (job(e) for e in range(E))


def bias_jobs(name: str, stored: Stored, stems: list[str], interleaved: bool) -> Iterator[Job]:
    """[E, n] biases, as one tensor per expert and projection. stems: with {e} for the expert."""
    E, n = stored.shape
    parts = len(stems)

    def job(e: int) -> Job:
        names = [f"{stem.format(e=e)}.bias" for stem in stems]

        def run(write: Write) -> None:
            width = stored.size // E
            row = stored.read(e * width, width).view(TORCH_DTYPES[stored.dtype])
            pieces = [row[i::parts] for i in range(parts)] if interleaved else row.chunk(parts)
            for new_name, piece in zip(names, pieces, strict=True):
                write(new_name, piece, 0)

        outputs = {new_name: (stored.dtype, (n // parts,)) for new_name in names}
        return Job(stored.file.name, stored.size // E, 2 * stored.size // E, outputs, run)

    return (job(e) for e in range(E))
