"""The matrices of a checkpoint, whatever holds them: dense files, stacks, FP8 blocks, MXFP4, NVFP4."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_nvfp4.format import decode, dequantize
from moe_nvfp4.quantize.dialects import Dialect
from moe_nvfp4.quantize.files import TORCH_DTYPES, Checkpoint, TensorSlice
from moe_nvfp4.quantize.names import PRE_QUANT_SCALE


@dataclass(frozen=True)
class Matrix:
    """A dense [rows, columns] matrix in source files, read in pieces.

    open()        reads what must be read at once, and returns rows(a, b) -> floating point [b - a, columns]
    held          bytes that `open` keeps in memory
    size          source bytes it stands for
    shard         the name of the file it lies in
    global_scale  of NVFP4 the one it has, of others a better one than the recipe's; or None
    """

    rows: int
    columns: int
    size: int
    shard: str
    open: Callable[[], Callable[[int, int], Tensor]]
    held: int = 0
    global_scale: Callable[[], Tensor] | None = None


@dataclass
class ErrorSums:
    """Sums over matrices: of squared errors and of squares of the original. Threads may add."""

    matrices: int = 0
    error: float = 0.0
    square: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, values: Tensor, original: Tensor) -> None:
        """fp32 tensors of one shape."""
        error = (values - original).square().sum(dtype=torch.float64).item()
        square = original.square().sum(dtype=torch.float64).item()
        with self._lock:
            self.error += error
            self.square += square

    @property
    def relative(self) -> float:
        """||values - original|| / ||original||"""
        return math.sqrt(self.error / self.square) if self.square else 0.0

    @property
    def snr(self) -> float:
        """Signal to noise in dB."""
        return 10 * math.log10(self.square / self.error) if self.error and self.square else math.inf


def row_major(stored: TensorSlice, rows: int, columns: int, first: int = 0) -> Matrix:
    """Rows `first` to `first + rows` of a tensor whose rows have `columns` elements."""
    dtype = TORCH_DTYPES[stored.dtype]
    width = columns * dtype.itemsize

    def read(a: int, b: int) -> Tensor:
        return stored.read((first + a) * width, (b - a) * width).view(dtype).view(-1, columns)

    return Matrix(rows, columns, rows * width, stored.file.name, lambda: read)


def slice_view(
    stored: TensorSlice, e: int, shape: tuple[int, int], view: Callable[[Tensor], Tensor], parts: int
) -> Matrix:
    """view([shape] number e of a stack): for layouts in which a matrix's rows are not in one piece."""
    dtype = TORCH_DTYPES[stored.dtype]
    size = shape[0] * shape[1] * dtype.itemsize

    def open() -> Callable[[int, int], Tensor]:
        matrix = view(stored.read(e * size, size).view(dtype).view(shape))
        return lambda a, b: matrix[a:b].contiguous()

    rows, columns = view(torch.empty(shape, device="meta")).shape
    return Matrix(rows, columns, size // parts, stored.file.name, open, held=size)


def fp8_block(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    """The block of weights [N, K] that shares a scale: one for all, for a row, for 32 of K, or for 128 x 128.

    None: scales of this shape are none of these.
    """
    if len(shape) != 2:
        return None
    N, K = shape
    if scales in ((), (1,), (1, 1)):
        return N, K
    if scales in ((N,), (N, 1)):
        return 1, K
    blocks = [b for b in ((1, 32), (128, 128)) if scales == (-(-N // b[0]), -(-K // b[1]))]
    return blocks[0] if blocks else None


def fp8_dense(codes: Tensor, scales: Tensor, block: tuple[int, int], first: int = 0) -> Tensor:
    """Rows `first`, ... of e4m3 weights, [n, K] -> fp32: code * scale.

    scales: of the whole matrix, with a scale for every `block`; floating, or uint8 as e8m0 (2^(byte - 127)).
    """
    n, K = codes.shape
    scales = scales.view(torch.float8_e8m0fnu).float() if scales.dtype == torch.uint8 else scales.float()
    scales = scales.reshape(-1, -(-K // block[1]))
    of_rows = scales[torch.arange(first, first + n, device=codes.device) // block[0]]
    return codes.float().mul_(of_rows.repeat_interleave(block[1], dim=1)[:, :K])


def fp8(weight: TensorSlice, scale: TensorSlice, block: tuple[int, int] | None, name: str) -> Matrix:
    """e4m3 [N, K] with a scale for every block (None: as `fp8_block` finds) -> fp32. ValueError for other shapes."""
    fits = block is None or scale.shape == tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=False))
    block = block or fp8_block(weight.shape, scale.shape)
    if len(weight.shape) != 2 or not fits or block is None:
        raise ValueError(
            f"{name}: scales {list(scale.shape)} do not fit weights {list(weight.shape)}"
            + (f" in blocks of {list(block)}" if block else "")
            + ": the file or weight_block_size in config.json is damaged; download them again"
        )
    N, K = weight.shape

    def open() -> Callable[[int, int], Tensor]:
        scales = scale.tensor()
        return lambda a, b: fp8_dense(
            weight.read(a * K, (b - a) * K).view(torch.float8_e4m3fn).view(-1, K), scales, block, a
        )

    return Matrix(N, K, weight.size + scale.size, weight.file.name, open, held=4 * scale.size)


def mxfp4(blocks: TensorSlice, scales: TensorSlice, e: int, first: int, step: int, name: str) -> Matrix:
    """Expert e's rows first, first + step, ... of [E, N, K/32, 16] codes with e8m0 [E, N, K/32] -> fp32.

    Its global scale is a power of two, so that a searching recipe finds every value again, exactly: MXFP4's scales
    are powers of two, and e4m3 holds 18 of them in a row. Gate and up share the larger of theirs. Where scales in
    use lie further apart than that, small values are rounded, with a warning.
    """
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3] or not blocks.size:
        raise ValueError(f"{name}: {list(blocks.shape)} and {list(scales.shape)} are not MXFP4 ([E, N, K/32, 16] codes "
                         "and [E, N, K/32] scales): the file is damaged; download it again")  # fmt: skip
    _, N, groups, _ = blocks.shape

    def scale_bytes(a: int, b: int) -> Tensor:
        rows = scales.read((e * N + a * step) * groups, (b - a) * step * groups).view(-1, groups)
        return rows[first::step]

    def rows(a: int, b: int) -> Tensor:
        width = groups * 16
        codes = blocks.read((e * N + a * step) * width, (b - a) * step * width).view(-1, groups, 16)[first::step]
        exponents = scale_bytes(a, b)
        if (exponents == 255).any():
            raise ValueError(f"{name}, expert {e}: an MXFP4 scale is NaN: download the checkpoint again")
        return torch.ldexp(decode(codes), exponents[..., None].to(torch.int32) - 127).flatten(1)

    def power_of_two() -> Tensor:
        return torch.ldexp(torch.ones(()), scale_bytes(0, N // step).max().to(torch.int32) - 127 - 8)

    size = (blocks.size + scales.size) // blocks.shape[0] // step
    return Matrix(N // step, groups * 32, size, blocks.file.name, lambda: rows, global_scale=power_of_two)


def nvfp4_matrix(checkpoint: Checkpoint, stem: str, dialect: Dialect, smooth: bool = True) -> Matrix:
    """Codes and scales -> fp32 [N, K]: what x is multiplied with, so AWQ's pre_quant_scale is in it, if `smooth`."""
    codes, sf, scale = (checkpoint.tensors[f"{stem}.{s}"] for s in dialect.suffixes[:3])
    pre_quant_scale = checkpoint.tensors.get(f"{stem}.{PRE_QUANT_SCALE}") if smooth else None
    N, half = codes.shape

    def rows(a: int, b: int) -> Tensor:
        part = codes.read(a * half, (b - a) * half).view(-1, half)
        part_sf = sf.read(a * half // 8, (b - a) * half // 8).view(-1, half // 8)
        dense = dequantize(part, part_sf, global_scale())
        return dense if pre_quant_scale is None else dense * pre_quant_scale.tensor().float()

    def global_scale() -> Tensor:
        return dialect.decode_scale(scale.tensor()).reshape(())

    return Matrix(N, 2 * half, codes.size + sf.size, codes.file.name, lambda: rows, global_scale=global_scale)


@dataclass(frozen=True)
class NVFP4Stack:
    """NVFP4 experts in one tensor: codes [E, in/2, out] and sf [E, in/16, out] (ModelOpt's for Llama 4 and gpt-oss),
    or, not transposed, [E, out, in/2] and [E, out, in/16] (its for Step-3).

    scales       by the last part of a matrix's own name (weight_scale_2, input_scale): one for all, or [E]
    interleaved  rows of gate and up alternate
    """

    codes: TensorSlice
    sf: TensorSlice
    scales: dict[str, TensorSlice]
    transposed: bool = True
    interleaved: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, out, in / 2"""
        E, N, K = self.codes.shape
        return (E, K, N) if self.transposed else (E, N, K)

    def check(self, name: str) -> None:
        """ValueError unless the tensors fit each other."""
        wanted = [*self.codes.shape]
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

    def pieces(self, stored: TensorSlice, e: int, parts: int) -> list[Tensor]:
        """uint8 [out, in'] of expert e, in `parts` projections."""
        size = stored.size // stored.shape[0]
        rows = stored.read(e * size, size).view(stored.shape[1:])
        rows = rows.T if self.transposed else rows
        return [rows[i::parts] for i in range(parts)] if self.interleaved else list(rows.chunk(parts))

    def scale(self, last: str, e: int, source: Dialect) -> Tensor:
        """fp32 0-d: expert e's."""
        scales = source.decode_scale(self.scales[last].tensor()).reshape(-1)
        return scales[e if len(scales) > 1 else 0]

    def matrix(self, e: int, part: int, parts: int, source: Dialect) -> Matrix:
        """Projection `part` of expert e -> fp32 [out / parts, in]."""
        E, out, half = self.shape

        def open() -> Callable[[int, int], Tensor]:
            codes, sf = (self.pieces(stored, e, parts)[part].contiguous() for stored in (self.codes, self.sf))
            scale = global_scale()
            return lambda a, b: dequantize(codes[a:b], sf[a:b], scale)

        def global_scale() -> Tensor:
            return self.scale(source.global_scale, e, source)

        size = (self.codes.size + self.sf.size) // E
        file = self.codes.file.name
        return Matrix(out // parts, 2 * half, size // parts, file, open, held=2 * size, global_scale=global_scale)


def nvfp4_stack(checkpoint: Checkpoint, name: str, dialect: Dialect, interleaved: bool = False) -> NVFP4Stack:
    """The stack `name`: transposed where that is a tensor (`name`_weight_scale), else `name`.weight. Not checked."""
    found, transposed = checkpoint.tensors, name in checkpoint.tensors
    dot = "_" if transposed else "."
    scales = {s: found[f"{name}{dot}{s}"] for s in (dialect.global_scale, dialect.input_scale)
              if f"{name}{dot}{s}" in found}  # fmt: skip
    codes, sf = (name if transposed else f"{name}.{dialect.weight}"), f"{name}{dot}{dialect.sf}"
    if missing := [n for n in (codes, sf, f"{name}{dot}{dialect.global_scale}") if n not in found]:
        raise ValueError(f"{missing[0]} is missing: NVFP4 matrices have codes, block scales and a global scale")
    return NVFP4Stack(found[codes], found[sf], scales, transposed, interleaved)
