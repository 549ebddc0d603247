"""Compile a CuTe DSL kernel once: in memory, and on disk (see `cache`) for the next process.

Objects are named by a hash of this package's kernel sources, the DSL's version, the GPU architecture
and the kernel's configuration. Where they cannot be kept, the next process compiles again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from moe_nvfp4.cache import is_whole, keep, own_folder

_OPTIONS = "--enable-tvm-ffi"
DTYPES = {
    torch.bfloat16: BFloat16, torch.float16: Float16, torch.float32: Float32, torch.int32: Int32, torch.int64: Int64,
}  # fmt: skip


def vector(dtype: type) -> cute.Tensor:
    """A placeholder for any contiguous 1-d tensor."""
    return make_fake_tensor(dtype, (cute.sym_int(),), (1,), assumed_align=dtype.width // 8)


def rows(dtype: type, divisibility: int = 1, dims: int = 2) -> cute.Tensor:
    """A placeholder for row-major tensors whose rows have a multiple of `divisibility` elements."""
    align = min(16, divisibility * dtype.width // 8)
    shape = (*(cute.sym_int() for _ in range(dims - 1)), cute.sym_int(divisibility=divisibility))
    strides = (*(cute.sym_int64(divisibility=divisibility) for _ in range(dims - 1)), 1)
    return make_fake_tensor(dtype, shape, strides, assumed_align=max(align, dtype.width // 8))


def compiled(kernel: object, arguments: tuple, architecture: str) -> Callable:
    """The compiled `kernel`, called with torch tensors and ints on torch's current stream.

    `kernel.__call__` takes `arguments` (placeholders) and a stream; repr(kernel) must tell its configuration.
    """
    key = hashlib.sha256(_sources())
    for part in (cutlass.__version__, architecture, repr(kernel), repr([str(a) for a in arguments])):
        key.update(b"\0" + part.encode())
    folder = _folder()
    target = None if folder is None else folder / f"{key.hexdigest()[:32]}.o"
    if target is not None and is_whole(target):
        return cutlass.runtime.load_module(str(target), enable_tvm_ffi=True).kernel
    print(f"moe_nvfp4: compiling {kernel!r} for {architecture}, a few seconds, once", file=sys.stderr)
    function = cute.compile(kernel, *arguments, make_fake_stream(use_tvm_ffi_env_stream=True), options=_OPTIONS)
    if target is not None:
        keep(target, lambda name: function.export_to_c(name, function_name="kernel"))
    return function


@cache
def _folder() -> Path | None:
    try:
        return own_folder("kernels")
    except OSError as error:
        print(f"moe_nvfp4: compiled kernels are not kept: {error}", file=sys.stderr)
        return None


@cache
def _sources() -> bytes:
    kernels = Path(__file__).parents[1]
    return b"".join(file.read_bytes() for file in [*sorted(kernels.rglob("*.py")), kernels.parent / "weights.py"])
