"""The offload backend: x, ids and routing weights go down, the CPU kernels run, y comes up, all on the caller's stream.

    stream:  x, ids, weights -> pinned memory ── host function ── y <- pinned memory

The host function is cpu.c's `call` (`moe_nvfp4.kernels.cpu.backend.Call`): it runs a layer in the pool of threads of
that library, without Python, so that it needs no GIL and works in a CUDA graph, replayed as often as one likes. Nothing
here waits: what follows on the stream does, and whatever runs on other streams goes on meanwhile.

Memory. Calls of one stream follow each other, so they share pinned buffers and scratch (`_Workspace`). So do those that
are captured into one graph; the graph keeps them (CUDA's user objects), because it may run at any time.

Errors. A call that fails on the CPU (no memory, ids that are none) gives NaN, in a graph too; the next call of any
layer raises, as does `check`.

Everything goes through the driver's library, which is there wherever a GPU is, and has the same functions in CUDA 12
and 13. Results are those of the CPU backend, bit for bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from moe_nvfp4.kernels.common.tensors import floating
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.weights import ExpertWeights

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: memory may be allocated while a stream is captured


def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights) -> Tensor:
    """The whole layer: x [T, H], [T, top_k], [T, top_k] on a GPU, weights on the CPU -> [T, H] on the GPU."""
    check()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.shape[0]:
        return y
    down = (x.contiguous(), top_k_index.long().contiguous(), floating(top_k_weights).contiguous())
    with torch.cuda.device(x.device), _lock:  # two threads may share a stream
        stream = torch.cuda.current_stream().cuda_stream
        workspace = _workspace(x.device.index, stream)
        host = [workspace.pinned(i, t) for i, t in enumerate((*down, y))]
        for to, t in zip(host, down, strict=False):
            _copy(to, t, stream)
        workspace.empty.begin()
        call = cpu.Call(*host[:3], weights, host[3], workspace.empty)
        workspace.keep(call, host)
        _do("cuLaunchHostFunc", ctypes.c_void_p(stream), ctypes.c_void_p(call.function), ctypes.c_void_p(call.argument))
        _copy(y, host[3], stream)
    return y


def check() -> None:
    """Raise what a call failed with that ran since this was called last. It waits for nothing: synchronize first."""
    try:
        cpu.raise_failure()
    except (ValueError, MemoryError) as error:
        raise type(error)(f"experts on the CPU, in an earlier call, whose result is NaN: {error}") from None


# ---- memory --------------------------------------------------------------------------------------


class _Scratch:
    """torch.empty on the CPU, from buffers that the next call takes again, in the same order."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.next = 0

    def begin(self) -> None:
        self.next = 0

    def __call__(self, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if self.next == len(self.buffers):
            self.buffers.append(torch.empty(0, dtype=torch.uint8, device=device))
        if self.buffers[self.next].numel() < size:  # the call before holds on to the old one
            self.buffers[self.next] = torch.empty(size, dtype=torch.uint8, device=device)
        self.next += 1
        return self.buffers[self.next - 1][:size].view(dtype).view(shape)


@dataclass
class _Workspace:
    """What calls that follow each other share. graph: that of a capture, which keeps its calls; 0: of a stream."""

    graph: int = 0
    capture: int = 0
    empty: _Scratch = field(default_factory=_Scratch)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    outgrown: list[Tensor] = field(default_factory=list)  # the GPU may still copy: less in all than what replaced them
    calls: list[cpu.Call] = field(default_factory=list)

    def pinned(self, i: int, like: Tensor) -> Tensor:
        """Pinned memory for `like`, the i-th of a call's tensors."""
        size = like.numel() * like.element_size()
        if i not in self.buffers or self.buffers[i].numel() < size:
            if i in self.buffers:
                self.outgrown.append(self.buffers[i])
            self.buffers[i] = _allocate_pinned(1 << (size - 1).bit_length())
        return self.buffers[i][:size].view(like.dtype).view(like.shape)

    def keep(self, call: cpu.Call, host: list[Tensor]) -> None:
        """Keep what `call` needs: until it has run, or as long as the graph lives."""
        if not self.graph:
            self.calls = [c for c in self.calls if not c.done] + [call]
            return
        call.tensors = (call.tensors, host)
        _captured[:] = [c for c in _captured if not c.released] + [call]
        owner = ctypes.c_void_p()
        argument, release = ctypes.c_void_p(call.argument), ctypes.c_void_p(call.release)
        _do("cuUserObjectCreate", ctypes.byref(owner), argument, release, 1, 1)  # the destructor synchronizes nothing
        _do("cuGraphRetainUserObject", ctypes.c_void_p(self.graph), owner, 1, 1)  # ours becomes the graph's


_lock = Lock()
_streams: dict[tuple[int, int], _Workspace] = {}  # by device and stream
_captures: dict[tuple[int, int], _Workspace] = {}  # of a stream, the last
_captured: list[cpu.Call] = []


def _workspace(device: int, stream: int) -> _Workspace:
    status, capture, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
    info = (ctypes.byref(status), ctypes.byref(capture), ctypes.byref(graph), None, None)
    _do("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *info)
    if status.value == 0:
        return _streams.setdefault((device, stream), _Workspace())
    found = _captures.get((device, stream))
    if found is None or found.capture != capture.value:
        found = _captures[device, stream] = _Workspace(graph.value or 0, capture.value)
    return found


def _allocate_pinned(size: int) -> Tensor:
    mode = ctypes.c_int(_RELAXED)
    _do("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    finally:
        _do("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


# ---- the driver ----------------------------------------------------------------------------------


def _copy(to: Tensor, t: Tensor, stream: int) -> None:
    size = ctypes.c_size_t(t.numel() * t.element_size())
    _do("cuMemcpyAsync", ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(t.data_ptr()), size, ctypes.c_void_p(stream))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if ctypes.sizeof(ctypes.c_long) == 4 else "libcuda.so.1")


def _do(name: str, *arguments) -> None:
    if code := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"{name} failed with CUDA driver error {code}: an earlier kernel may have; see the log")
