"""Compile a CuTe DSL kernel once, and keep it in memory and, for the next process, on disk (see `ahead`).

A file's name depends on the DSL's version, the GPU architecture, that of the host, whose code it has too, and the
kernel's configuration.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from moe_nvfp4.cache import is_whole, try_to_keep
from moe_nvfp4.kernels.common import ahead

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

    `kernel.__call__` takes `arguments` (placeholders) and a stream; repr(kernel) must tell its whole configuration.
    """
    target = file(kernel, arguments, architecture)
    if target is not None and is_whole(target):
        return cutlass.runtime.load_module(str(target), enable_tvm_ffi=True).kernel
    ahead.count_compilation(f"{kernel!r} for {architecture}")
    return _compile(kernel, arguments, target)


def file(kernel: object, arguments: tuple, architecture: str) -> Path | None:
    """The file where the compiled kernel is kept."""
    parts = cutlass.__version__, architecture, platform.machine(), repr(kernel), repr([str(a) for a in arguments])
    return ahead.kernel_file(".o", *parts)


def build(kernel: object, arguments: tuple, architecture: str) -> None:
    """Compile the kernel into its file. This needs no GPU, but CUTE_DSL_ARCH set to `architecture`."""
    assert os.environ["CUTE_DSL_ARCH"] == architecture
    target = file(kernel, arguments, architecture)
    if target is None or not is_whole(target):
        _compile(kernel, arguments, target)


def _compile(kernel: object, arguments: tuple, target: Path | None) -> Callable:
    function = cute.compile(kernel, *arguments, make_fake_stream(use_tvm_ffi_env_stream=True), options=_OPTIONS)
    if target is not None:
        try_to_keep(target, lambda name: function.export_to_c(name, function_name="kernel"))
    return function
