"""The CPU backend: the three stages of the reference as C loops over the 4-bit weights.

cpu.c has a path for every instruction set. The best one that the machine can run is used, or the one
that MOE_NVFP4_CPU names: amx, avx512bf16, avx512, avx2, neon or portable. A wheel that was built with a
C compiler contains all of them as a library. Otherwise the path in use is compiled on first use with
the system's C compiler (CC, else cc, gcc or clang; 1.5 to 2.3 s with gcc 12 on an EPYC, 2026-11-21)
into ``$MOE_NVFP4_CACHE/cpu``, else ``$XDG_CACHE_HOME/moe_nvfp4/cpu``, else ``~/.cache/moe_nvfp4/cpu``.
A machine with avx512bf16 or amx also compiles avx512, once it meets rows that are fp32 or fp16. Where
nothing can be built, `missing` says why, and the reference runs instead.

Numerics are the reference's, up to the order of fp32 sums and, on amx with up to 8 tokens for an expert,
up to 2^-15 of the largest number of each block of 16 of x. The number of threads is torch's, and results
do not depend on it.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from moe_nvfp4 import format as nvfp4
from moe_nvfp4 import mapped
from moe_nvfp4.cache import cache_folder, is_whole, keep, own_folder
from moe_nvfp4.kernels.common.tensors import floating
from moe_nvfp4.kernels.cpu.sources import FLAGS, FOLDER, SOURCES, checksum
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, Matrices

PATHS = ("portable", "avx2", "avx512", "avx512bf16", "neon", "amx")  # as in cpu.c; of several, the last is best

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NVFP4 = 3
_GATES = ("raw", "relu2", "silu", "gelu_tanh")


# The arguments of cpu.c's stages: those fields of its structs that Python fills in, with the same names and order.
# The library says how many bytes it expects (see `_library`).


def _fields(pointers: str, integers: str) -> list[tuple[str, type]]:
    return [(n, ctypes.c_void_p) for n in pointers.split()] + [(n, ctypes.c_int64) for n in integers.split()]


class _Group(ctypes.Structure):
    _fields_ = _fields("ids order token offsets", "R top_k E")


class _Quantize(ctypes.Structure):
    _fields_ = _fields("x index scale offsets codes sf row_scale", "x_type x_rows width K R E four_over_six")


class _Gemm(ctypes.Structure):
    _fields_ = (
        _fields(
            "x x_sf x_scale index offsets target codes sf first_scale rest_scale bias out",
            "x_type x_rows x_width R E N K split bias_type out_type paired width gate parts known",
        )
        + [(n, ctypes.c_float) for n in ("alpha", "limit", "up_offset")]
        + [("clamp_after", ctypes.c_int32)]
    )


class _Combine(ctypes.Structure):
    _fields_ = _fields("slots weights out", "T top_k H weights_type out_type")


class _LowRank(ctypes.Structure):
    _fields_ = _fields("x a b offsets bare index target low out", "type x_rows R G K N rank slots")


_STAGES = (_Group, _Quantize, _Gemm, _Combine, _LowRank)  # as cpu.c numbers them
# These pack a stage into bytes, a few microseconds faster than ctypes: its number, its 8-byte words, its fields.
_CODES = {ctypes.c_void_p: "Q", ctypes.c_int64: "q", ctypes.c_float: "f", ctypes.c_int32: "i"}
_PACK = {
    stage: partial(
        Struct("=2q" + "".join(_CODES[field[1]] for field in stage._fields_)).pack, i, ctypes.sizeof(stage) // 8
    )
    for i, stage in enumerate(_STAGES)
}


# ---- the stages ----------------------------------------------------------------------------------


class _Program:
    """Stages that run in one call of cpu.c, one after the other. It keeps their tensors alive meanwhile."""

    def __init__(self, empty: Callable[..., Tensor] = torch.empty, zeros: Callable[..., Tensor] = torch.zeros):
        self.code: list[bytes] = []
        self.tensors: list[Tensor | None] = []
        self.path, self.empty, self.zeros = path(), empty, zeros

    def add(self, stage: type[ctypes.Structure], tensors: list[Tensor | None], *numbers: float) -> None:
        pointers = []
        for t in tensors:
            if t is not None and not t.is_contiguous():
                t = t.contiguous()
            self.tensors.append(t)
            pointers.append(0 if t is None else t.data_ptr())
        self.code.append(_PACK[stage](*pointers, *numbers))

    def run(self) -> bool:
        """Run the stages. Returns False if the first one is a grouping that met an illegal id."""
        run, code = _library(self.path).run, b"".join(self.code)
        failed = run(code, len(self.code), PATHS.index(self.path), torch.get_num_threads(), _parallel())
        if failed not in (0, -2):
            raise _failure(failed)
        return not failed


def _failure(code: int) -> Exception:
    return OSError(mapped.loss()) if code == -4 else _FAILURES[code]


_FAILURES = {  # what cpu.c's run returns
    -1: MemoryError("no memory for the rows and the scratch of the CPU kernels"),
    -2: ValueError("expert ids must lie in 0..num_experts - 1, or be num_experts or -1 for 'not here'"),
    -3: ValueError(
        "order, offsets or index do not belong to one `Groups`: offsets must ascend from 0 to at most the "
        "number of rows, and each index must be that of a row: take them from routing.group_by_expert"
    ),
    -5: ValueError(mapped.EDITED),
}


def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> Tensor:
    """The whole layer in one call: x [T, H], [T, top_k], [T, top_k] -> [T, H] in x's dtype."""
    program = _Program()
    ids = top_k_index if top_k_index.dtype == torch.int64 else top_k_index.long()
    y = _layer(program, x, ids, top_k_weights, weights)
    if not program.run():
        group_by_expert(top_k_index, weights.num_experts)  # raises, and names the ids
    return y


def _layer(
    program: _Program, x: Tensor, ids: Tensor, p: Tensor, weights: ExpertWeights, y: Tensor | None = None
) -> Tensor:
    """Add all stages of a layer to `program`. The result goes into y [T, H] if given, else into a new tensor."""
    R, E = ids.numel(), weights.num_experts
    order, token, offsets = (program.empty(n, dtype=torch.int32, device="cpu") for n in (R, R, E + 1))
    groups = Groups(order, offsets, ids.shape[1])
    program.add(_Group, [ids, order, token, offsets], R, groups.top_k, E)
    rows, rounding = Rows(x, index=token), weights.four_over_six
    if weights.quantized:
        rows = _quantize(program, x, token, weights.x_scale, groups, rounding)
    h = _gemm1(program, rows, weights, groups, x.dtype)
    if weights.quantized and not h.is_nvfp4:
        h = _quantize(program, h.values, None, None, groups, rounding)
    return _gemm2(program, h, weights.w2, groups, p, x.dtype, y)


class _Call(ctypes.Structure):
    _fields_ = _fields("call program", "count path threads") + _fields("out", "out_bytes")
    _fields_ += _fields("guess", "done released guessing")


class _Guess(ctypes.Structure):
    _fields_ = _fields("x router codes1 sf1 codes2 sf2 scores ids", "x_type E H top_k N K paired")


class Call:
    """A layer as a C function of one argument, to be a host function of a CUDA stream: see `call` in cpu_calls.h.

    x [T, H], ids int64 [T, top_k], p [T, top_k] and y [T, H] are contiguous and on the CPU; each run reads the first
    three and writes y. `empty` makes scratch tensors, as torch.empty does; threads: torch's number by default. The
    caller must keep the weights alive, and this object until it has run (`done`) or `release` was called; the object
    keeps all else.
    """

    def __init__(
        self,
        x: Tensor,
        ids: Tensor,
        p: Tensor,
        weights: ExpertWeights,
        y: Tensor,
        empty: Callable[..., Tensor] = torch.empty,
        threads: int | None = None,
    ):
        program = _Program(empty, empty)  # zeros are for the padding of block scales, which nothing here reads
        _layer(program, x, ids, p, weights, y)
        code, count = b"".join(program.code), len(program.code)
        library, self._code = _library(program.path), ctypes.create_string_buffer(code, len(code))
        own = {id(t) for t in weights.tensors()}
        self.tensors: object = [t for t in program.tensors if id(t) not in own]
        self._x, self._top_k = x, ids.shape[1]
        self._guess: tuple[_Guess, Tensor, Tensor, Tensor] | None = None
        self.function, self.release = (
            ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (library.call, library.release)
        )
        self._call = _Call(
            self.function, ctypes.addressof(self._code), count, PATHS.index(program.path),
            threads or torch.get_num_threads(), y.data_ptr(), y.numel() * y.element_size(), 0, 0, 0, 0,
        )  # fmt: skip
        self.argument = ctypes.addressof(self._call)
        _called[program.path] = library

    def __call__(self) -> None:
        """Run the layer now, on the library's own threads."""
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.function)(self.argument)

    def guess(self, router: Tensor, weights: ExpertWeights) -> None:
        """For one token: from now on, after each run that came by mail, fetch those of `weights`, which the stream
        needs next, that `router` (bf16 [E, H], contiguous) chooses for this layer's x. See Guess in cpu_calls.h."""
        w13, w2, (E, H) = weights.w13, weights.w2, router.shape
        scratch = torch.empty(E, dtype=torch.float32), torch.zeros(self._top_k, dtype=torch.int32)
        tensors = (self._x, router, w13.codes, w13.sf, w2.codes, w2.sf, *scratch)
        numbers = _TYPES[self._x.dtype], E, H, self._top_k, w13.N, 16 * w2.blocks, _paired(weights.gate)
        made = _Guess(*(0 if t is None else t.data_ptr() for t in tensors), *numbers)
        self._guess, self._call.guess = (made, router, *scratch), ctypes.addressof(made)

    @property
    def guessed(self) -> Tensor | None:
        """The latest guess: int32 [top_k]."""
        return None if self._guess is None else self._guess[-1]

    @property
    def done(self) -> int:
        """How many times it has run."""
        return self._call.done

    @property
    def released(self) -> bool:
        return bool(self._call.released) and not self._call.guessing


class Mailbox:
    """A mailbox of cpu_calls.h in `memory`, int64 [1] on the CPU, to which a stream can write: it writes
    `Call.argument` to `address` and waits until the int64 there is 0.

    OSError if there can be no more of them.
    """

    def __init__(self, memory: Tensor):
        self.memory = memory.zero_()
        self.address = memory.data_ptr()
        self.library = library = _library(path())
        if library.open_mailbox(ctypes.c_void_p(self.address)):
            raise OSError("no more mailboxes for calls on the CPU")
        if all(box.library is not library for box in _opened):
            atexit.register(_close_mailboxes, library, os.getpid())
        _opened.append(self)


_called: dict[str, ctypes.CDLL] = {}  # the libraries of all `Call`s, by path
_opened: list[Mailbox] = []  # kept, because the library looks into them as long as the process lives


def _close_mailboxes(library: ctypes.CDLL, process: int) -> None:
    """At exit: stop looking into the mailboxes before Python frees their memory."""
    if os.getpid() == process:  # a forked process has no thread that looks
        library.close_mailboxes()


def raise_failure() -> None:
    """Raise ValueError, MemoryError or OSError if a `Call` has failed since the last time this was asked."""
    for library in _called.values():
        if failed := library.failure():
            raise _failure(failed)


def quantize_rows(
    x: Tensor, index: Tensor | None, scale: Tensor | None, groups: Groups, four_over_six: bool = False
) -> Rows:
    """As `reference.quantize_rows`, to the bit."""
    program = _Program()
    rows = _quantize(program, x, index, scale, groups, four_over_six)
    program.run()
    return rows


def gemm1_swiglu(rows: Rows, weights: ExpertWeights, groups: Groups, dtype: torch.dtype) -> Rows:
    """As `reference.gemm1_swiglu`: `dtype` [R, I] (raw gate: [R, N13]), or NVFP4 where weights.h_scale is given."""
    program = _Program()
    h = _gemm1(program, rows, weights, groups, dtype)
    program.run()
    return h


def gemm2_combine(h: Rows, weights: ExpertWeights, groups: Groups, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """As `reference.gemm2_combine`: `dtype` [T, H]."""
    program = _Program()
    y = _gemm2(program, h, weights.w2, groups, top_k_weights, dtype)
    program.run()
    return y


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """As `reference.linear`; computed as GEMM 2 of a layer with one expert."""
    w, T = weights, x.shape[0]
    program = _Program()
    order = torch.arange(T, dtype=torch.int32, device="cpu")
    groups = Groups(order, torch.tensor([0, T], dtype=torch.int32, device="cpu"), 1)
    rows = _quantize(program, x, None, w.input_scale, groups, w.four_over_six) if w.quantized else Rows(x)
    y = _gemm2(program, rows, w.matrix.stacked(), groups, torch.ones(T, 1, dtype=torch.float32, device="cpu"), x.dtype)
    program.run()
    return y


def add_low_rank(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, offsets: Tensor, bare: Tensor | None, index: Tensor | None,
    slots: int, target: Tensor | None,
) -> None:  # fmt: skip
    """Add x · Aᵀ · Bᵀ to out [R, N], contiguous, in fp32 up to the end: row r, which is row index[r] // slots of x, to
    row target[r]. a [G, rank, K] and b [G, N, rank] are those of its group; nothing is added to rows that are bare, or
    beyond the last group. One dtype for all."""
    assert out.is_contiguous() and out.dtype == x.dtype == a.dtype == b.dtype
    program, R, (G, rank, K) = _Program(), len(out), a.shape
    low = program.empty(R, rank, dtype=torch.float32, device="cpu")
    tensors = [x, a, b, offsets, bare, index, target, low, out]
    program.add(_LowRank, tensors, _TYPES[x.dtype], x.shape[0], R, G, K, out.shape[1], rank, slots)
    program.run()


def gather(table: Tensor, kind: int, to: Tensor) -> None:
    """Copy the codes (kind 0) or block scales (kind 1) of matrices that stay in their files, one after the other, to
    `to`, uint8 of their total size. table: `mapped.table`, uint8 [E, parts, 2, 8]. OSError if a file lost one of them,
    ValueError if the table was edited.
    """
    count = table.shape[0] * table.shape[1]
    begin, threads = table.data_ptr() + 8 * kind, torch.get_num_threads()
    if not count:
        return
    if failed := _library(path()).gather(begin, count, to.numel() // count, to.data_ptr(), threads, _parallel()):
        raise _failure(failed)


def _quantize(
    program: _Program, x: Tensor, index: Tensor | None, scale: Tensor | None, groups: Groups, four_over_six: bool
) -> Rows:
    x = floating(x)
    R, E, width = groups.num_rows, groups.num_experts, x.shape[-1]
    K = -(-width // 16) * 16
    codes = program.empty(R, K // 2, dtype=torch.uint8, device="cpu")
    sf = program.zeros(nvfp4.grouped_sf_rows(R, E) * (-(-K // 64) * 4), dtype=torch.uint8, device="cpu")
    row_scale = program.empty(R, dtype=torch.float32, device="cpu")
    tensors = [x, index, scale, groups.offsets, codes, sf, row_scale]
    program.add(_Quantize, tensors, _TYPES[x.dtype], x.shape[0], width, K, R, E, four_over_six)
    return Rows(codes, sf, row_scale)


def _paired(gate: Gate) -> bool:
    """Whether GEMM 1 applies the gate to pairs of its rows."""
    return gate.kind in ("silu", "gelu_tanh")


def _gemm1(program: _Program, rows: Rows, weights: ExpertWeights, groups: Groups, dtype: torch.dtype) -> Rows:
    w, gate = weights, weights.gate
    paired = _paired(gate)
    static = w.quantizes_h
    width = w.intermediate_size * (2 if gate.gated and not paired else 1)
    h = program.empty(groups.num_rows, width, dtype=torch.float32 if static else dtype, device="cpu")
    numbers = (_GATES.index(gate.kind), gate.alpha, gate.limit, gate.up_offset, gate.clamp_after)
    _gemm(program, rows, groups, None, w.w13, h, paired, *numbers)
    return _quantize(program, h, None, w.h_scale, groups, w.four_over_six) if static else Rows(h)


def _gemm2(
    program: _Program,
    h: Rows,
    w2: Matrices,
    groups: Groups,
    top_k_weights: Tensor,
    dtype: torch.dtype,
    y: Tensor | None = None,
) -> Tensor:
    (T, top_k), H = top_k_weights.shape, w2.N
    slots = program.empty(T * top_k, H, dtype=torch.float32, device="cpu")
    _gemm(program, h, groups, groups.order, w2, slots, False, 0, 1.0, 0.0, 0.0, 0)
    top_k_weights, y = floating(top_k_weights), torch.empty(T, H, dtype=dtype, device="cpu") if y is None else y
    program.add(_Combine, [slots, top_k_weights, y], T, top_k, H, _TYPES[top_k_weights.dtype], _TYPES[dtype])
    return y


def _gemm(
    program: _Program,
    rows: Rows,
    groups: Groups,
    target: Tensor | None,
    w: Matrices,
    out: Tensor,
    paired: bool,
    *gate: float,
) -> None:
    """Add a GEMM to `program`. paired: the gate is applied to pairs of rows of [gate; up]."""
    first, split = (w.gate_scale, w.N // 2) if w.gate_scale is not None else (w.global_scale, 0)
    parts = 0 if w.layout is None else w.codes.shape[1]  # matrices of an expert in files, see `mapped`
    x = rows.values if rows.is_nvfp4 else floating(rows.values)
    if program.path in ("avx512bf16", "amx") and x.dtype not in (torch.bfloat16, torch.uint8):
        program.path = "avx512"  # those two take only rows that are bf16 or NVFP4
    tensors = [
        x,
        rows.sf,
        rows.scale,
        rows.index,
        groups.offsets,
        target,
        w.codes,
        w.sf,
        first,
        w.global_scale,
        w.bias,
        out,
    ]
    numbers = (
        *((_NVFP4, x.shape[0], x.shape[1] * 2) if rows.is_nvfp4 else (_TYPES[x.dtype], *x.shape)),
        *(groups.num_rows, groups.num_experts, w.N, 16 * w.blocks, split),
        *(0 if w.bias is None else _TYPES[w.bias.dtype], _TYPES[out.dtype], paired, out.shape[1]),
    )
    kind, *rest = gate
    program.add(_Gemm, tensors, *numbers, kind, parts, mapped.known(), *rest)


# ---- the library ---------------------------------------------------------------------------------

NO_SPACE = os.strerror(errno.ENOSPC)  # as compilers and linkers say it, too


@cache
def missing() -> str | None:
    """None if there is a library, else why there is none and none can be built, with the way out."""
    try:
        _library(path())
        return None
    except (OSError, subprocess.SubprocessError) as error:
        at, folder = Path(getattr(error, "filename", None) or "."), cache_folder()
        if isinstance(error, OSError) and (str(folder) in str(error) or at in folder.absolute().parents):
            return f"cannot be compiled ({error}): set MOE_NVFP4_CACHE to a folder that you can write to"
        if NO_SPACE in (why := _why(error)):
            return f"cannot be compiled ({why}): free some in {cache_folder()}, or set MOE_NVFP4_CACHE"
        return f"cannot be compiled ({why}): install a C compiler (apt install gcc, or set CC) and start again"


def available() -> bool:
    return missing() is None


@cache
def paths() -> tuple[str, ...]:
    """The paths of cpu.c that this machine can run; the last one is best."""
    can = (_shipped() or ctypes.CDLL(str(build("cpu_detect.c")))).paths()
    return tuple(name for i, name in enumerate(PATHS) if can >> i & 1)


@cache
def path() -> str:
    """The path in use: $MOE_NVFP4_CPU, else the best. ValueError if that is unknown or does not run here."""
    chosen = os.environ.get("MOE_NVFP4_CPU") or paths()[-1]
    if chosen not in PATHS:
        raise ValueError(f"MOE_NVFP4_CPU={chosen} is unknown: the paths are {', '.join(PATHS)}")
    if chosen not in paths():
        raise ValueError(f"MOE_NVFP4_CPU={chosen}: this machine can run {', '.join(paths())}")
    return chosen


@cache
def _library(name: str, *flags: str) -> ctypes.CDLL:
    """A library that contains this path; if there are `flags`, one compiled with them."""
    library = None if flags else _shipped()
    library = library or ctypes.CDLL(str(build("cpu.c", f"-DONLY={PATHS.index(name)}", *flags)))
    numbers = (ctypes.c_int64 * 64)()  # another cpu.c may have more stages, and writes a number for each
    library.stage_bytes(numbers)
    theirs = [number for number in numbers if number]
    if theirs != [ctypes.sizeof(stage) for stage in _STAGES]:
        raise OSError(f"{library._name} was made from another cpu.c: its stages take {theirs} bytes; delete it")
    library.run.restype = ctypes.c_int64
    library.failure.restype = library.open_mailbox.restype = ctypes.c_int64
    library.run.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    library.gather.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    library.gather.restype = ctypes.c_int64
    return library


def _shipped() -> ctypes.CDLL | None:
    """The library that came with the wheel, if it was made from the sources beside it."""
    try:
        library = ctypes.CDLL(str(FOLDER / "_cpu.so"))
        made_from = (ctypes.c_char * 65).in_dll(library, "sources").value.decode()
        return library if made_from == checksum(FOLDER) else None
    except (OSError, ValueError):  # no such file, or for another machine; it does not say what it was made from
        return None


@cache
def _parallel() -> int | None:
    """GOMP_parallel of the OpenMP runtime that torch has loaded, else None: cpu.c then makes its own threads."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def build(source: str, *flags: str) -> Path:
    """Compile a file of FOLDER with FLAGS and `flags`, unless the cache has it; returns the library.

    OSError or CalledProcessError if that fails.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or [
        next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "cc")
    ]
    folder = own_folder("cpu")
    command = [*compiler, *FLAGS, *flags, str(FOLDER / source), "-o"]
    key = hashlib.sha256(subprocess.run([*compiler, "--version"], check=True, capture_output=True).stdout)
    for part in ((FOLDER / file).read_bytes() for file in SOURCES):
        key.update(b"\0" + part)
    for word in (platform.machine(), *compiler, *FLAGS, *flags, source):
        key.update(b"\0" + word.encode())
    target = folder / f"{key.hexdigest()[:32]}.so"
    if not is_whole(target):
        if source == "cpu.c":
            print("moe_nvfp4: compiling the CPU kernels, about two seconds, once", file=sys.stderr)
        keep(target, lambda name: subprocess.run([*command, name], check=True, capture_output=True))
    return target


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.decode(errors="replace").splitlines()
        lines = [line for word in (NO_SPACE, "error") for line in said if word in line]
        return f"{error.cmd[0]} failed: {(lines or [f'exit status {error.returncode}'])[0].strip()}"
    if isinstance(error, FileNotFoundError) and error.filename and os.sep not in str(error.filename):
        return f"no C compiler: {error.filename} not found"
    return str(error)
