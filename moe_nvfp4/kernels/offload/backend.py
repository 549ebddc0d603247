"""The offload backend: x, ids and routing weights go down, the CPU kernels run, y comes up, all on the caller's stream.

    stream:  x, ids, weights -> pinned memory ── the CPU's program ── y <- pinned memory

The program (`moe_nvfp4.kernels.cpu.backend.Call`) runs on the threads of the CPU backend's library, without Python: it
needs no GIL, and a CUDA graph can replay it any number of times. The stream starts it by mail: it writes the program's
address into a mailbox in pinned memory that a thread looks into (`Mailbox`), and goes on when that is empty again.
Where the GPU cannot do this, or mailboxes run out, the program is a host function of the stream. The host never waits
here: only later work on the stream does, and other streams continue meanwhile.

Many tokens. From UPLOAD tokens per expert on, the weights are copied to the GPU for the call, at the speed of PCIe (55
GB/s), also out of files (`files`). The portable backend multiplies by one piece while the next is copied (`upload`).

Memory. Calls on one stream run one after the other, so they share pinned buffers and scratch (`_Workspace`). So do
calls captured into one graph; the graph keeps these (as CUDA user objects), because it may run at any time. A server
has thousands of graphs, which it replays one after the other: all of them share one workspace (`serve`).

Errors. A call that fails on the CPU (out of memory, illegal ids, a file that is gone) gives NaN, in a graph too. The
next call of any layer raises, and so does `check`.

Everything goes through the driver's library, which is there wherever a GPU is and has the same functions in CUDA 12
and 13. Results equal those of the CPU backend, or of the portable one, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from moe_nvfp4 import mapped
from moe_nvfp4.devices import capturing, cores
from moe_nvfp4.kernels.backend import Device, Problem
from moe_nvfp4.kernels.common.tensors import floating
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.kernels.offload.upload import pieces
from moe_nvfp4.kernels.portable import BACKEND as PORTABLE
from moe_nvfp4.kernels.portable.driver import INVALID_CONTEXT, use_context
from moe_nvfp4.kernels.proof import objection
from moe_nvfp4.weights import ExpertWeights

# The average number of tokens per expert from which on the weights are copied. How much the CPU reads depends on how
# many different experts the tokens choose. Qwen3-30B-A3B, 16 cores with AMX beside an H200: if each token chooses at
# random, a layer takes the CPU 6.9 and 10.2 ms at 4 and 12 tokens per expert, and 6.2 ms with copied weights. Prompts
# of a model with random weights, whose tokens choose few, take 163, 236 and 611 ms at 4, 8 and 32, and 300 ms copied
# (2026-11-23). With 8, neither takes more than 1.4 times the better way. Without AMX, which is 2 to 4 times faster, the
# number is a guess.
UPLOAD, UPLOAD_WITHOUT_AMX = 8, 4
# The factor on that number for weights in files, which the CPU must first copy to pinned memory: the same layer takes
# 9.5, 12.7 and 17.4 ms on the CPU at 12, 24 and 48 tokens per expert, and 10.4 copied.
FROM_FILES = 2
SPARE = 1  # cores that are left to the program's other threads
_CAN_USE_64_BIT_STREAM_MEM_OPS = 122  # CU_DEVICE_ATTRIBUTE_
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: memory may be allocated while a stream is captured


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertWeights,
    routed: int | None = None,
    meanwhile: Callable[[], None] | None = None,
    router: Tensor | None = None,
) -> Tensor:
    """The whole layer: x [T, H], [T, top_k], [T, top_k] on a GPU, weights on the CPU -> [T, H] on the GPU.

    routed: about how many of the T * top_k slots have an expert, if not all of them: the ids are on the GPU, and
    nothing waits for it.
    meanwhile() is called once the stream has asked the CPU, and before the stream waits for the answer: what it
    launches on the stream overlaps with the CPU's work. It is not called where there is no such gap (host functions,
    weights that are copied to the GPU).
    router: bf16 [E, H] on the CPU, whose largest products with x are near the scores of the experts that a token gets.
    In a graph, the CPU guesses by it what the layer before should fetch.
    """
    check()
    if _better_on_gpu(x, top_k_index.numel() if routed is None else routed, weights):
        return _on_gpu(x, top_k_index, top_k_weights, weights)
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
        hidden, ids, p, result = host
        call = cpu.Call(hidden, ids, p, weights, result, workspace.empty, _threads())
        workspace.keep(call, weights)
        if workspace.graph:
            workspace.follow(call, weights, router if x.shape[0] == 1 else None)
        _run(call, workspace.mailbox, stream, meanwhile)
        _copy(y, result, stream)
    return y


def _better_on_gpu(x: Tensor, routed: int, w: ExpertWeights) -> bool:
    """Whether the GPU has kernels for these weights and is faster for this many routed slots, even with copying them.

    In a graph the CPU computes always: the graph would read memory that is not pinned, or run code that reads files.
    """
    enough = UPLOAD if cpu.path() == "amx" else min(UPLOAD, UPLOAD_WITHOUT_AMX)
    if w.layout is not None:
        enough *= FROM_FILES
    if routed < enough * w.num_experts or capturing(x.device):
        return False
    device, sizes = Device.of(x.device), (w.num_experts, w.hidden_size, w.intermediate_size)
    problem = Problem("experts", *sizes, w.gate.kind, w.activations, x.dtype)
    return multiplies(device, problem) and objection(PORTABLE, problem, x.device) is None


def multiplies(device: Device, problem: Problem) -> bool:
    """Whether a GPU has kernels for this problem, for weights that are copied to it: those of `PORTABLE`."""
    return PORTABLE.unavailable(device) is None and PORTABLE.unsupported(device, problem) is None


def _on_gpu(x: Tensor, ids: Tensor, p: Tensor, weights: ExpertWeights) -> Tensor:
    with _lock:
        total = None
        for first, w in pieces(weights, x.device, _do):
            if w.num_experts == weights.num_experts:
                total = PORTABLE.experts(x, ids, p, w)
            else:
                here = (ids >= first) & (ids < first + w.num_experts)
                y = PORTABLE.experts(x, torch.where(here, ids - first, -1), p, w).float()
                total = y if total is None else total.add_(y)
    assert total is not None, "a layer has experts"
    return total.to(x.dtype)


def serve(threads: int) -> None:
    """For the process of a server, which captures a graph for each of many batch sizes, or several, and sets torch's
    number of threads to 1 once the weights are loaded.

    From now on calls use `threads`, and all graphs of a device share memory: the process must replay them one after the
    other.
    """
    global _served_by
    _served_by = threads


def check() -> None:
    """Raise the error of a call that has failed since `check` was last called. It does not wait: synchronize first."""
    try:
        cpu.raise_failure()
    except (ValueError, MemoryError, OSError) as error:
        raise type(error)(f"experts on the CPU, in an earlier call, whose result is NaN: {error}") from None


def _threads() -> int:
    """As many threads as torch has, but with SPARE cores left to the program's other threads: if one of ours had to
    wait for those, all would."""
    return max(1, min(_served_by or torch.get_num_threads(), cores() - SPARE))


def _run(call: cpu.Call, mailbox: cpu.Mailbox | None, stream: int, meanwhile: Callable[[], None] | None) -> None:
    where = ctypes.c_void_p(stream)
    if mailbox is None:
        _do("cuLaunchHostFunc", where, ctypes.c_void_p(call.function), ctypes.c_void_p(call.argument))
        return
    box, empty = ctypes.c_uint64(mailbox.address), ctypes.c_uint64(0)
    _do("cuStreamWriteValue64_v2", where, box, ctypes.c_uint64(call.argument), 0)
    try:
        if meanwhile is not None:
            meanwhile()
    finally:  # the next call needs an empty mailbox
        _do("cuStreamWaitValue64_v2", where, box, empty, _EQUAL)  # a batch of both calls is not faster


# ---- memory --------------------------------------------------------------------------------------


class _Scratch:
    """torch.empty on the CPU, out of buffers that the next call uses again in the same order."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.next = 0

    def begin(self) -> None:
        self.next = 0

    def __call__(self, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if self.next == len(self.buffers):
            self.buffers.append(torch.empty(0, dtype=torch.uint8, device=device))
        if self.buffers[self.next].numel() < size:  # the previous call keeps the old buffer alive
            self.buffers[self.next] = torch.empty(size, dtype=torch.uint8, device=device)
        self.next += 1
        return self.buffers[self.next - 1][:size].view(dtype).view(shape)


@dataclass
class _Workspace:
    """What calls that run one after the other share: those of a stream, of one capture, whose graph keeps them, or of
    all captures (`serve`)."""

    mailbox: cpu.Mailbox | None
    graph: int = 0
    capture: int = 0
    empty: _Scratch = field(default_factory=_Scratch)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    outgrown: list[Tensor] = field(default_factory=list)  # the GPU may still use them; smaller in all than `buffers`
    calls: list[cpu.Call] = field(default_factory=list)
    latest: cpu.Call | None = None  # of one token, in the present graph

    def pinned(self, i: int, like: Tensor) -> Tensor:
        """Pinned memory for `like`, the i-th of a call's tensors."""
        size = like.numel() * like.element_size()
        if i not in self.buffers or self.buffers[i].numel() < size:
            if i in self.buffers:
                self.outgrown.append(self.buffers[i])
            self.buffers[i] = _allocate_pinned(1 << (size - 1).bit_length())
        return self.buffers[i][:size].view(like.dtype).view(like.shape)

    def keep(self, call: cpu.Call, weights: ExpertWeights) -> None:
        """Keep `call`, and what it reads of `weights`, alive: until it has run, or as long as the graph lives."""
        if not self.graph:
            self.calls = [c for c in self.calls if not c.done]
            own = [t.detach() for t in weights.tensors() if t is not None]
            call.tensors = call.tensors, own, mapped.opened() if weights.layout is not None else ()
        else:
            owner = ctypes.c_void_p()
            argument, release = ctypes.c_void_p(call.argument), ctypes.c_void_p(call.release)
            _do("cuUserObjectCreate", ctypes.byref(owner), argument, release, 1, 1)  # flag: destructor without sync
            _do("cuGraphRetainUserObject", ctypes.c_void_p(self.graph), owner, 1, 1)  # moves our reference to the graph
        self.calls.append(call)

    def follow(self, call: cpu.Call, weights: ExpertWeights, router: Tensor | None) -> None:
        """Have the call before this one in the graph fetch what it guesses that this one needs; router: as `experts`.

        They live as long as each other, because their graph keeps both."""
        if self.latest is not None and router is not None and weights.layout is None:
            self.latest.guess(router, weights)
        self.latest = None if router is None else call

    def begin(self, graph: int) -> None:
        """The next calls are captured into this graph."""
        if graph != self.graph:
            self.graph, self.calls, self.latest = graph, [c for c in self.calls if not c.released], None

    @property
    def over(self) -> bool:
        """Whether this belonged to a graph that is gone."""
        return bool(self.graph) and all(c.released for c in self.calls)


_lock = Lock()
_streams: dict[tuple[int, int], _Workspace] = {}  # by device and stream
_graphs: list[_Workspace] = []
_served_by: int | None = None  # the threads of a server's process, see `serve`
_served: dict[int, _Workspace] = {}  # by device: that of all its graphs
_mailboxes: list[cpu.Mailbox] = []  # free ones: their graphs are gone


def _workspace(device: int, stream: int) -> _Workspace:
    status, capture, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
    info = (ctypes.byref(status), ctypes.byref(capture), ctypes.byref(graph), None, None)
    _do("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *info)
    if status.value == 0:
        if (device, stream) not in _streams:
            _streams[device, stream] = _Workspace(_mailbox(device))
        return _streams[device, stream]
    if _served_by is not None:
        if device not in _served:
            _served[device] = _Workspace(_mailbox(device))
        _served[device].begin(graph.value or 0)
        return _served[device]
    for workspace in _graphs:
        if workspace.capture == capture.value:
            return workspace
    _mailboxes.extend(w.mailbox for w in _graphs if w.over and w.mailbox)
    _graphs[:] = [w for w in _graphs if not w.over]
    _graphs.append(_Workspace(_mailbox(device), graph.value or 0, capture.value))
    return _graphs[-1]


def _mailbox(device: int) -> cpu.Mailbox | None:
    """A mailbox that nobody uses. None if the GPU cannot wait for one, or there are no more: use a host function."""
    supported = ctypes.c_int()
    _do("cuDeviceGetAttribute", ctypes.byref(supported), _CAN_USE_64_BIT_STREAM_MEM_OPS, device)
    if not supported.value:
        return None
    try:
        return _mailboxes.pop() if _mailboxes else cpu.Mailbox(_allocate_pinned(64)[:8].view(torch.int64))
    except OSError:
        return None


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


def _do(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code == INVALID_CONTEXT:  # a thread that has not used the GPU yet
        use_context(torch.cuda.current_device())
        code = getattr(_driver(), name)(*arguments)
    if code:
        raise RuntimeError(f"{name} failed with CUDA driver error {code}: an earlier kernel may be why; see the log")
