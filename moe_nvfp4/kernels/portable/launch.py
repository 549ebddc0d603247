"""Compiling and launching Triton kernels: which code is made for which GPU.

Triton makes the machine code, which is kept in a file (see `common.ahead`). The CUDA driver launches it, because
Triton's launcher binds arguments by name, specializes each and looks up a kernel by all of them, which takes some 60 us
per launch, and it builds a C extension first. Triton itself launches in its interpreter and on AMD GPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_nvfp4.cache import CHECKSUM, is_whole, try_to_keep
from moe_nvfp4.kernels.common import ahead
from moe_nvfp4.kernels.portable.driver import Function

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip
_ALIGNED = 16  # bytes
PACKAGE = __name__.removesuffix(".kernels.portable.launch")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, arch: str | None = None, **options: Any) -> None:
    """Launch `kernel` on torch's current stream of the current device, where the tensors must be. `options` are
    Triton's: warps, stages. `arch`: the architecture to compile for, if not the one of `target`.

    The parameters of `kernel` are tensors or None, then integers that it is not specialized for, then constants.
    """
    if not _by_driver() and ahead.noted_gpu() is None:  # launches that are noted are not made
        kernel[grid](*arguments, **options)
        return
    if arch is not None:
        options["arch"] = arch
    n = _runtime_parameters(kernel.fn)
    kinds, values = [], []
    for a in arguments[:n]:
        if a is None:
            kinds.append(None)
        elif type(a) is int:
            kinds.append(int)
            values.append(a)
        else:
            address = a.data_ptr() or a.storage_offset() * a.element_size()  # tensors on meta have no address
            wide = a.nbytes >= _ALIGNED  # else no load is wider than an element of it
            kinds.append((a.dtype, "anywhere") if wide and address % _ALIGNED else a.dtype)
            values.append(address)
    variant = kernel.fn.__module__, kernel.fn.__name__, tuple(kinds), arguments[n:], tuple(options.items())
    if (gpu := ahead.noted_gpu()) is not None:
        ahead.note(__name__, "cubins", gpu.capability, *variant)
        return
    index = arguments[0].device.index
    _function(index, *variant).launch(grid, values, torch._C._cuda_getCurrentRawStream(index))


@cache
def _runtime_parameters(function: Callable) -> int:
    """How many parameters of a kernel come before its constants."""
    return sum(p.annotation is not tl.constexpr for p in signature(function).parameters.values())


@cache
def _by_driver() -> bool:
    return os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None


@cache
def _function(index: int, *variant: Any) -> Function:
    """The kernel on a GPU, from its file or compiled now."""
    capability = torch.cuda.get_device_capability(index)
    file = cubins.file(capability, *variant)
    if file is None or not is_whole(file):
        ahead.count_compilation(f"{variant[1]}{variant[2:]} for compute capability {capability[0]}.{capability[1]}")
    header, _, cubin = cubins.code(capability, *variant).partition(b"\n")
    return Function(index, cubin, **json.loads(header))


def target() -> dict[str, object]:
    """Options of Triton's compiler.

    Every NVIDIA GPU gets the code of sm_80 (cp.async, ldmatrix, mma.sync), the same PTX except for its first lines: if
    it runs on one GPU and in the emulator, it runs on all. In decode this code is faster on an H200 than what Triton
    makes for Hopper, which also lacks a fence before wgmma.
    """
    if not _by_driver():
        return {}
    return {"arch": "sm80", "enable_fp_fusion": True}


class _Cubins(ahead.Variants):
    """The machine code of kernels, by GPU, kinds of tensors, constants and options. A file is a line of JSON, with what
    `driver.Function` needs, and the cubin."""

    def file(self, capability: tuple[int, int], *variant: Any) -> Path | None:
        inside = variant[0].removeprefix(PACKAGE), *variant[1:]  # a kernel of the Hub has another name
        return ahead.kernel_file(".cubin", triton.__version__, capability, target(), inside)

    def build(self, capability: tuple[int, int], *variant: Any) -> None:
        self.code(capability, *variant)

    def code(self, capability: tuple[int, int], *variant: Any) -> bytes:
        """The bytes of the file; if it is not there, compiles the kernel and keeps it."""
        file = self.file(capability, *variant)
        if file is not None and is_whole(file):
            return file.read_bytes()[:-CHECKSUM]
        code = compile_kernel(capability, *variant)
        if file is not None:
            try_to_keep(file, lambda name: Path(name).write_bytes(code))
        return code

    def load(self, gpu: ahead.Gpu, capability: tuple[int, int], *variant: Any) -> None:
        assert gpu.ordinal is not None and capability == gpu.capability
        _function(gpu.ordinal, *variant)


cubins = _Cubins()


def compile_kernel(
    capability: tuple[int, int], module: str, name: str, kinds: tuple, constants: tuple, options: tuple
) -> bytes:
    """The contents of a file of `_Cubins`."""
    compiled = compile_variant(capability, getattr(import_module(module), name), kinds, constants, options)
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    if metadata.global_scratch_size or getattr(metadata, "profile_scratch_size", 0):
        raise NotImplementedError(f"Triton {triton.__version__} gives {name} scratch memory: install another version")
    parameters = "".join("i" if kind is int else "Q" for kind in kinds if kind is not None)
    entry = ptx[ptx.index(".entry") :]
    hidden = entry[: entry.index("{")].count(".param") - len(parameters)  # pointers to scratch memory: null
    header = {
        "name": metadata.name, "parameters": f"{parameters}0Q{8 * hidden}x", "threads": 32 * metadata.num_warps,
        "shared": metadata.shared,
    }  # fmt: skip
    return json.dumps(header).encode() + b"\n" + compiled.asm["cubin"]


def compile_variant(capability: tuple[int, int], kernel: Any, kinds: tuple, constants: tuple, options: tuple) -> Any:
    """Triton's compiled kernel; no GPU is needed."""
    types, constant, attributes = {}, {}, {}
    for i, (parameter, kind) in enumerate(zip(kernel.params, (*kinds, *constants), strict=True)):
        if kind is None or parameter.is_constexpr:
            types[parameter.name], constant[parameter.name] = "constexpr", kind
        elif kind is int:
            types[parameter.name] = "i32"
        elif isinstance(kind, tuple):
            types[parameter.name] = _TYPES[kind[0]]
        else:
            types[parameter.name], attributes[(i,)] = _TYPES[kind], [["tt.divisibility", _ALIGNED]]
    source = ASTSource(kernel, types, constant, attributes)
    gpu = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    return triton.compile(source, target=gpu, options={**target(), **dict(options)})
