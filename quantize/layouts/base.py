"""What all layouts share: matrices that are read in pieces, the experts of a layer, checks against the config."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from moe_nvfp4.quantize.files import TORCH_DTYPES, TensorSlice, TensorView
from moe_nvfp4.quantize.names import PER_EXPERT, PLAIN_NAMES


class ExpertLayout(Enum):
    """How files keep the experts of a layer."""

    ONE_BY_ONE = "one by one"  # a tensor per expert and projection, experts.3.gate_proj.weight
    PROJECTION_FIRST = "projection first"  # the same, named experts.gate_proj.3.weight
    STACKED_TRANSPOSED = "transposed stacks"  # ModelOpt's [E, in/2, out], with one global scale for all experts
    STACKED_BY_PROJECTION = "stacks by projection"  # ModelOpt's [E, out, in/2], one global scale per expert (Step-3)
    PARAMETERS = "parameters"  # the parameters of `NVFP4Experts`
    FP8 = "FP8"  # one by one, to be made dense
    SINGLE = "dense, one by one"  # of a family whose own files have stacks
    DENSE = "dense"


STACKED = (ExpertLayout.STACKED_TRANSPOSED, ExpertLayout.STACKED_BY_PROJECTION)


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns] in source files, of any format, read in pieces as floating point.

    open()        reads what must be read at once, and returns rows(a, b) -> floating point [b - a, columns]
    held          bytes that `open` keeps in memory
    size          bytes that the matrix takes in the source
    shard         the name of the file that it lies in
    global_scale  fp32 0-d: that of an NVFP4 matrix, for MXFP4 a better one than the recipe's, or 0 if all
                  elements are 0; None: dense or FP8
    packed(a, b)  of MXFP4: codes uint8 [b - a, columns/2] and e8m0 scales uint8 [b - a, columns/32] of these rows
    """

    rows: int
    columns: int
    size: int
    shard: str
    open: Callable[[], Callable[[int, int], Tensor]]
    held: int = 0
    global_scale: Callable[[], Tensor] | None = None
    packed: Callable[[int, int], tuple[Tensor, Tensor]] | None = None

    def known_scale(self) -> Tensor:
        """The `global_scale` of a matrix that has one, fp32 0-d."""
        assert self.global_scale is not None, "a dense matrix"
        return self.global_scale()


@dataclass
class ErrorSums:
    """Sums over matrices of squared errors and of the original's squares. Threads may add at the same time."""

    matrices: int = 0
    error: float = 0.0
    square: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, values: Tensor, original: Tensor) -> None:
        """Add the error of `values` against `original`, tensors of one shape."""
        original = original.double()  # float32 cannot hold the squares of 1e-25 or of 1e21
        self.add_squares((values.double() - original).square().sum().item(), original.square().sum().item())

    def add_squares(self, error: float, square: float) -> None:
        with self._lock:
            self.error += error
            self.square += square

    def include(self, other: ErrorSums) -> None:
        """Add the sums of `other`."""
        with self._lock:
            self.matrices += other.matrices
            self.error += other.error
            self.square += other.square

    @property
    def relative(self) -> float:
        """||values - original|| / ||original||"""
        return math.sqrt(self.error / self.square) if self.square else 0.0

    @property
    def snr(self) -> float:
        """Signal-to-noise ratio in dB."""
        return 10 * math.log10(self.square / self.error) if self.error and self.square else math.inf


@dataclass
class CastSums(ErrorSums):
    """What became of MXFP4 matrices. The sums are of those lots of rows that lost something. Threads may add at the
    same time.

    lost  how many of the `matrices` lost something
    """

    lost: int = 0

    def count(self, matrices: int, lost: int) -> None:
        with self._lock:
            self.matrices += matrices
            self.lost += lost


@dataclass(frozen=True)
class Experts:
    """The experts of one layer of files that are not NVFP4.

    module    the module's name in new files, where a matrix is named `module`.E.gate_proj (or `w1`, as in the source)
    tensors   the names of the files' tensors that hold the matrices
    matrices  () -> all matrices by their names in new files; ValueError where the tensors do not fit each other
    biases    the files' biases [E, n]: name -> the modules that get a part of it, with {e} for the expert
    interleaved  whether rows of gate and up alternate in biases
    dense     how to leave quantized experts dense: () -> name -> a matrix, or E of one shape for a stack [E, K, N]
    """

    module: str
    tensors: tuple[str, ...]
    matrices: Callable[[], dict[str, Matrix]]
    biases: Mapping[str, list[str]] = field(default_factory=dict)
    interleaved: bool = False
    dense: Callable[[], Mapping[str, Matrix | list[Matrix]]] | None = None


@dataclass(frozen=True)
class Given:
    """What files hold for one tensor of a dense checkpoint.

    kind   "NVFP4", "FP8", or the dtype of a dense tensor
    shape  the dense tensor's shape, with `in` padded to whole blocks for NVFP4; None where only the kind counts
    file   the name of the file that holds it
    """

    kind: str
    shape: tuple[int, ...] | None
    file: str


def experts_of(weights: Mapping[str, tuple[Matrix, tuple[str, ...]]]) -> Iterator[Experts]:
    """The experts among quantized `weights`: stem -> matrix, its tensors' names."""
    modules: dict[str, dict[str, Matrix]] = {}
    names: dict[str, list[str]] = {}
    for stem, (matrix, pair) in weights.items():
        if match := PER_EXPERT.fullmatch(stem):
            modules.setdefault(match["module"], {})[stem] = matrix
            names.setdefault(match["module"], []).extend(pair)
    for module, matrices in modules.items():
        dense = {f"{stem}.weight": matrix for stem, matrix in matrices.items()}
        yield Experts(module, tuple(names[module]), partial(dict, matrices), dense=partial(dict, dense))


def check_experts(
    shapes: Mapping[str, tuple[int, int]], counts: Collection[int], others: Mapping[str, TensorSlice]
) -> None:
    """ValueError unless all experts of a module have the same projections, of shapes that fit each other, and there are
    as many experts as the config says.

    shapes  stem -> shape of each matrix
    counts  the numbers of experts that the config names
    others  the files' other tensors, where the error looks for a missing matrix in another dtype
    """
    modules: dict[str, dict[str, dict[int, tuple[int, int]]]] = {}
    for stem, shape in shapes.items():
        if match := PER_EXPERT.fullmatch(stem):
            modules.setdefault(match["module"], {}).setdefault(match["part"], {})[int(match["e"])] = shape
    for module, parts in modules.items():
        E = 1 + max(max(experts) for experts in parts.values())
        E = min((n for n in counts if n >= E), default=E)
        for part, experts in parts.items():
            missing = next((e for e in range(E) if e not in experts), None)
            if missing is not None:
                stem = f"{module}.{missing}.{part}"
                if stored := others.get(f"{stem}.weight"):
                    raise ValueError(f"{stem}.weight is {stored.dtype} and {len(experts)} of {E} experts have "
                                     "one that is read in another way: all must have one type, and quantized ones "
                                     "scales; download the checkpoint again, or quantize the original")  # fmt: skip
                raise ValueError(f"{stem} is missing: {len(experts)} of {E} experts have it; a shard or a tensor is "
                                 "missing, download the checkpoint again")  # fmt: skip
            if len(set(experts.values())) > 1:
                sizes = sorted(set(experts.values()))
                raise ValueError(f"{module}: the experts' {part} have different shapes {sizes}: either several "
                                 "modules share this name (ERNIE 4.5 VL), which is not known here: leave them as they "
                                 "are with --exclude; or the file is damaged: download it again")  # fmt: skip
            if counts and E > max(counts):
                raise one_too_many(f"{module}.{E - 1}.{part}", max(counts))
        if empty := [f"{part} {list(shape)}" for part, e in parts.items() for shape in e.values() if 0 in shape]:
            raise ValueError(f"{module} has {empty[0]}: a matrix without elements; the file is damaged, or belongs to "
                             "another model, download the checkpoint again")  # fmt: skip
        if set(parts) not in ({"gate_proj", "up_proj", "down_proj"}, {"up_proj", "down_proj"}, {"w1", "w2", "w3"}):
            raise ValueError(f"{module} has {', '.join(sorted(parts))} only: a projection is missing; download the "
                             "checkpoint again")  # fmt: skip
        first = {PLAIN_NAMES.get(part, part): next(iter(experts.values())) for part, experts in parts.items()}
        (I, H), down = first["up_proj"], first["down_proj"]
        if first.get("gate_proj", (I, H)) != (I, H) or _blocks(down) != _blocks((H, I)):
            said = ", ".join(f"{part} {list(size)}" for part, size in first.items())
            raise ValueError(f"{module} has experts of {said}: gate and up are [I, H], down is [H, I]; the file is "
                             "damaged or belongs to another model, download the checkpoint again")  # fmt: skip


def _blocks(shape: tuple[int, int]) -> list[int]:
    """A shape in blocks of 16: NVFP4 files have K in whole blocks."""
    return [-(-n // 16) for n in shape]


def one_too_many(stem: str, E: int) -> ValueError:
    return ValueError(f"{stem} is an expert too many: by config.json there are {E}, 0 to {E - 1}; the files belong to "
                      "another model")  # fmt: skip


def split_rows(rows: Tensor, parts: int, interleaved: bool, dim: int = 0) -> tuple[Tensor, ...]:
    """Split rows of gate and up, parts * n along `dim`, into n each. They alternate if `interleaved`; else gate's come
    first."""
    return rows.unflatten(dim, (-1, parts)).unbind(dim + 1) if interleaved else rows.chunk(parts, dim)


def interleave_rows(rows: Tensor, parts: int, dim: int = 0) -> Tensor:
    """Rows along `dim`, gate's first -> the same, alternating: what `split_rows` takes apart if `interleaved`."""
    return torch.stack(rows.chunk(parts, dim), dim + 1).flatten(dim, dim + 1)


def need(condition: bool, name: str, stored: TensorSlice, expected: str) -> None:
    """ValueError unless `condition`: the shape of tensor `name` is not the `expected` one."""
    if not condition:
        raise ValueError(f"{name} has shape {list(stored.shape)}, expected {expected}: the file belongs to another "
                         "model, or this layout is not known here; leave it as it is with --exclude")  # fmt: skip


def parts_of_expert(
    stored: TensorSlice, e: int, parts: int, transposed: bool = False, interleaved: bool = False
) -> list[TensorSlice]:
    """Split expert e of a stack into its projections, each [out, in], or [out] for biases.

    stored: matrices [E, parts * out, in], or [E, in, parts * out] if `transposed`, or biases [E, parts * out].
    interleaved: rows of gate and up alternate.
    """
    whole = stored.expert(e)
    if not transposed and not interleaved:
        n = whole.shape[0] // parts
        return [whole.rows(i * n, n) for i in range(parts)]

    def part(i: int) -> Callable[[Tensor], Tensor]:
        return lambda t: split_rows(t.T if transposed else t, parts, interleaved)[i]

    return [TensorView.of(whole, part(i)) for i in range(parts)]


def cast_finite(w: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Dequantized weights in `dtype`. ValueError, naming the tensor `name`, where that makes them NaN or Inf."""
    cast = w.to(dtype)
    if not cast.isfinite().all():
        first = w[~cast.isfinite()][0].item()
        raise ValueError(f"{name} has the value {first:.6g}, which is not finite in {str(dtype).removeprefix('torch.')}"
                         ": its codes or scales are damaged, or config.json names another dtype than the model's; "
                         "download the checkpoint again")  # fmt: skip
    return cast


def dense(stored: TensorSlice) -> Matrix:
    """The matrix of a dense tensor."""
    rows, columns = stored.shape
    dtype = TORCH_DTYPES[stored.dtype]
    width = columns * dtype.itemsize

    def open() -> Callable[[int, int], Tensor]:
        read = stored.reader()
        return lambda a, b: read(a * width, (b - a) * width).view(dtype).view(-1, columns)

    return Matrix(rows, columns, stored.size, stored.file.name, open, stored.held)
