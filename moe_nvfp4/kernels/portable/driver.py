"""Machine code launched through the CUDA driver, as torch and Triton do, but without binding arguments by name."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from struct import Struct

_MAX_DYNAMIC_SHARED, _PREFER_SHARED = 8, 1  # CU_FUNC_ATTRIBUTE_..., CU_FUNC_CACHE_...
_BUFFER, _BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_...
INVALID_CONTEXT = 201  # CUDA_ERROR_...


class _Extra(ctypes.Structure):
    """cuLaunchKernel's last argument: the kernel's arguments in one buffer."""

    _fields_ = [("a", c_size_t), ("buffer", c_char_p), ("b", c_size_t), ("size", c_void_p), ("end", c_size_t)]


class Function:
    """A kernel on the GPU `device`.

    parameters  its arguments as a format of `struct`: "Q" for an address, "i" for an int32, "x" for a zero byte
    shared      bytes of dynamic shared memory
    """

    def __init__(self, device: int, cubin: bytes, name: str, parameters: str, threads: int, shared: int):
        self.device, self.threads, self.shared = device, threads, shared
        self.packed = Struct(parameters)  # aligned as in C
        self.size = c_size_t(self.packed.size)
        self.address_of_size = ctypes.addressof(self.size)
        module, self.function = c_void_p(), c_void_p()
        use_context(device)
        _call("cuModuleLoadData", byref(module), cubin)
        _call("cuModuleGetFunction", byref(self.function), module, name.encode())
        if shared > 48 << 10:
            _call("cuFuncSetAttribute", self.function, _MAX_DYNAMIC_SHARED, shared)
            _call("cuFuncSetCacheConfig", self.function, _PREFER_SHARED)

    def launch(self, grid: tuple[int, ...], values: list[int], stream: int) -> None:
        """Launch on `stream`, a stream handle of this device, which must be torch's current one."""
        x, y, z = (*grid, 1, 1)[:3]
        extra = _Extra(_BUFFER, self.packed.pack(*values), _BUFFER_SIZE, self.address_of_size, _END)
        arguments = self.function, x, y, z, self.threads, 1, 1, self.shared, stream, None, byref(extra)
        error = _driver().cuLaunchKernel(*arguments)
        if error == INVALID_CONTEXT:  # a thread that has not used the GPU yet
            use_context(self.device)
            error = _driver().cuLaunchKernel(*arguments)
        if error:
            raise _failed("cuLaunchKernel", error)


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")
    driver.cuLaunchKernel.argtypes = (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)
    driver.cuFuncSetAttribute.argtypes = c_void_p, c_int, c_int
    driver.cuFuncSetCacheConfig.argtypes = c_void_p, c_int
    return driver


def use_context(device: int) -> None:
    """Make torch's context of the GPU current in this thread."""
    handle, context = c_int(), c_void_p()
    _call("cuDeviceGet", byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", byref(context), handle)
    _call("cuCtxSetCurrent", context)


def _call(name: str, *arguments: object) -> None:
    if error := getattr(_driver(), name)(*arguments):
        raise _failed(name, error)


def _failed(name: str, error: int) -> RuntimeError:
    text = c_char_p()
    _driver().cuGetErrorString(error, byref(text))
    return RuntimeError(f"{name}: CUDA error {error}, {(text.value or b'unknown').decode()}")
