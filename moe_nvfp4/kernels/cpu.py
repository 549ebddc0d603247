"""The CPU backend: the three stages of the reference as C loops over the 4-bit weights.

cpu.c, beside this file, is compiled on first use with the system's C compiler (CC, else cc, gcc or
clang; a few seconds) into ``$MOE_NVFP4_CACHE/cpu``, else ``$XDG_CACHE_HOME/moe_nvfp4/cpu``, else
``~/.cache/moe_nvfp4/cpu``. The library holds a path for every instruction set and picks one when it
is loaded, so it may move between machines; MOE_NVFP4_CPU=avx512bf16, avx512, avx2 or portable forces one.
Where it cannot be built, `available` warns once and says False.

Numerics are the reference's, up to the order of fp32 sums. Results do not depend on the number of
threads, which is torch's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.kernels.cache import is_whole, keep, own_folder
from moe_nvfp4.routing import Groups, Rows
from moe_nvfp4.weights import ExpertWeights

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread")
PATHS = ("portable", "avx2", "avx512", "avx512bf16")  # in the order of cpu.c: the best is last

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NVFP4 = 3
_GATES = ("raw", "relu2", "silu", "gelu_tanh")


# ---- the stages ----------------------------------------------------------------------------------


def quantize_rows(x: Tensor, index: Tensor | None, scale: Tensor | None, groups: Groups) -> Rows:
    """As `reference.quantize_rows`, to the bit."""
    x = _floating(x)
    R, E, width = groups.num_rows, groups.num_experts, x.shape[-1]
    K = -(-width // 16) * 16
    codes = torch.empty(R, K // 2, dtype=torch.uint8, device="cpu")
    sf = torch.zeros(nvfp4.grouped_sf_rows(R, E) * (-(-K // 64) * 4), dtype=torch.uint8, device="cpu")
    row_scale = torch.empty(R, device="cpu")
    tensors = [x, index, scale, groups.offsets, codes, sf, row_scale]
    _call("quantize", _Quantize, tensors, _TYPES[x.dtype], width, K, R, E)
    return Rows(codes, sf, row_scale)


def gemm1_swiglu(rows: Rows, weights: ExpertWeights, groups: Groups, dtype: torch.dtype) -> Rows:
    """As `reference.gemm1_swiglu`: `dtype` [R, I] (raw gate: [R, N13]), or NVFP4 where weights.h_scale is."""
    w, gate = weights, weights.gate
    paired = gate.kind in ("silu", "gelu_tanh")
    static = w.activations == "nvfp4" and w.h_scale is not None and gate.kind != "raw"
    h = torch.empty(
        groups.num_rows,
        w.intermediate_size if paired else w.w13.shape[1],
        dtype=torch.float32 if static else dtype,
        device="cpu",
    )
    split = 0 if w.gate_scale is None else w.intermediate_size
    tensors = [w.w13, w.w13_sf, w.gate_scale if split else w.up_scale, w.up_scale, w.b13, h]
    numbers = (_GATES.index(gate.kind), gate.alpha, gate.limit, gate.up_offset, gate.clamp_after)
    _gemm(rows, groups, None, tensors, split, paired, *numbers)
    return quantize_rows(h, None, w.h_scale, groups) if static else Rows(h)


def gemm2_combine(h: Rows, weights: ExpertWeights, groups: Groups, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """As `reference.gemm2_combine`: `dtype` [T, H]."""
    w, (T, top_k), H = weights, top_k_weights.shape, weights.hidden_size
    slots = torch.empty(T * top_k, H, device="cpu")
    _gemm(h, groups, groups.order, [w.w2, w.w2_sf, w.w2_scale, w.w2_scale, w.b2, slots], 0, False, 0, 1.0, 0.0, 0.0, 0)
    top_k_weights, y = _floating(top_k_weights), torch.empty(T, H, dtype=dtype, device="cpu")
    _call("combine", _Combine, [slots, top_k_weights, y], T, top_k, H, _TYPES[top_k_weights.dtype], _TYPES[dtype])
    return y


def _gemm(rows: Rows, groups: Groups, target: Tensor | None, tensors: list, split: int, paired: bool, *gate) -> None:
    codes, sf, first, rest, bias, out = tensors
    x = rows.values if rows.is_nvfp4 else _floating(rows.values)
    if not codes.dtype == sf.dtype == torch.uint8:
        raise TypeError(f"codes and sf are bytes (torch.uint8), got {codes.dtype} and {sf.dtype}: a loader cast them")
    first, rest, bias = first.float(), rest.float(), bias if bias is None else _floating(bias)
    tensors = [x, rows.sf, rows.scale, rows.index, groups.offsets, target, codes, sf, first, rest, bias, out]
    numbers = (
        *((_NVFP4, x.shape[0], x.shape[1] * 2) if rows.is_nvfp4 else (_TYPES[x.dtype], *x.shape)),
        *(groups.num_rows, groups.num_experts, codes.shape[1], codes.shape[2] * 2, split),
        *(0 if bias is None else _TYPES[bias.dtype], _TYPES[out.dtype], paired, out.shape[1]),
    )
    _call("gemm", _Gemm, tensors, *numbers, *gate)


def _floating(x: Tensor) -> Tensor:
    return x if x.dtype in _TYPES else x.float()


def _call(function: str, struct: type, tensors: list[Tensor | None], *numbers) -> None:
    library = _library()
    kept = [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]
    problem = struct(*(t if t is None else t.data_ptr() for t in kept), *numbers)
    failed = getattr(library, function)(
        ctypes.byref(problem), PATHS.index(path()), torch.get_num_threads(), _parallel()
    )
    if failed:
        raise MemoryError(f"no memory for the rows and scratch of {function}")


def _struct(name: str, pointers: int, *numbers) -> type:
    fields = [(f"p{i}", ctypes.c_void_p) for i in range(pointers)]
    fields += [(f"n{i}", kind) for i, kind in enumerate(numbers)]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


# The structs of cpu.c: pointers, then numbers, then what C fills in.
_int, _float = ctypes.c_int64, ctypes.c_float
_Gemm = _struct("_Gemm", 12, *[_int] * 13, *[_float] * 3, ctypes.c_int32, *[_int] * 10)
_Quantize = _struct("_Quantize", 7, *[_int] * 5)
_Combine = _struct("_Combine", 3, *[_int] * 5)


# ---- the library ---------------------------------------------------------------------------------


@cache
def available() -> bool:
    """Whether the library is there or can be built; if not, warns once and says how to get it."""
    try:
        _library()
        return True
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"the CPU kernels cannot be built ({_why(error)}), so 4-bit experts run as plain torch operations: same "
            "numbers, several times slower. Install a C compiler (apt install gcc, or set CC), then start again; "
            "MOE_NVFP4_BACKEND=reference silences this",
            stacklevel=2,
        )
        return False


def paths() -> tuple[str, ...]:
    """The paths of cpu.c that this machine can run, the best last."""
    can = _library().paths()
    return tuple(name for i, name in enumerate(PATHS) if can >> i & 1)


@cache
def path() -> str:
    """The path in use: $MOE_NVFP4_CPU, else the best. ValueError if this machine cannot run it."""
    chosen = os.environ.get("MOE_NVFP4_CPU") or paths()[-1]
    if chosen not in paths():
        raise ValueError(f"MOE_NVFP4_CPU={chosen}: this machine can run {', '.join(paths())}")
    return chosen


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(build())
    library.paths.restype = ctypes.c_int64
    for function in (library.gemm, library.quantize, library.combine):
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    return library


@cache
def _parallel() -> int | None:
    """GOMP_parallel of the OpenMP runtime that torch has loaded, else None: cpu.c then makes threads."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def build(flags: tuple[str, ...] = FLAGS) -> Path:
    """Compile cpu.c unless the cache has it; returns the library. OSError or CalledProcessError if it can't."""
    compiler = shlex.split(os.environ.get("CC", "")) or [
        next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "cc")
    ]
    folder = own_folder("cpu")
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True).stdout
    key = hashlib.sha256(SOURCE.read_bytes())
    for part in (version, platform.machine().encode(), *(flag.encode() for flag in (*compiler, *flags))):
        key.update(b"\0" + part)
    target = folder / f"{key.hexdigest()[:32]}.so"
    if not is_whole(target):
        command = [*compiler, *flags, str(SOURCE), "-o"]
        keep(target, lambda name: subprocess.run([*command, name], check=True, capture_output=True))
    return target


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.decode(errors="replace").splitlines() if "error" in line]
        return f"{error.cmd[0]} failed: {(lines or [f'exit status {error.returncode}'])[0].strip()}"
    if isinstance(error, FileNotFoundError) and error.filename and os.sep not in str(error.filename):
        return f"no C compiler: {error.filename} not found"
    return str(error)
