"""Weights that are copied to a GPU for one call, because for its many tokens this is faster than the CPU.

They are copied in pieces of whole experts into two buffers, which the calls of all layers use in turn: a separate
stream fills one buffer while the caller's stream multiplies by the other. The host waits for nothing and so runs layers
ahead, except for weights in files (see `files`). docs/small_gpus.md has the times of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from moe_nvfp4.kernels.offload.files import InFiles, Staging, sources
from moe_nvfp4.kernels.offload.pages import HUGE, pin
from moe_nvfp4.weights import ExpertWeights, read_spec

PIECE = 1 << 30  # the most bytes of a buffer, unless a single expert needs more
_ALIGNED = 256  # bytes


def pieces(
    weights: ExpertWeights, device: torch.device, do: Callable[..., None]
) -> Iterator[tuple[int, ExpertWeights]]:
    """Yield (number of the first expert, weights of some experts on `device`) until every expert has come. The caller
    must put its work with a piece on the current stream before it asks for the next one. do: calls a function of CUDA's
    driver by name.
    """
    found = sources(weights)
    tensors = {place: t for place, t in enumerate(found) if t is not None}
    spec = read_spec(weights.spec(""))._replace(layout=None)
    made = lambda here: ExpertWeights.from_tensors([here.get(place) for place in range(len(found))], spec)
    for t in tensors.values():
        if isinstance(t, Tensor):
            pin(t, do)
    count = -(-sum(t.nbytes for t in tensors.values()) // PIECE)
    step = -(-weights.num_experts // count)
    for first in range(0, weights.num_experts, step):
        part = {place: t[first : first + step] for place, t in tensors.items()}
        if device.type != "cuda":
            yield first, made({place: _whole(t).to(device, non_blocking=True) for place, t in part.items()})
            continue
        buffers = _buffers(device)
        here = buffers.fill(part)
        try:
            yield first, made(here)
        finally:
            buffers.emptied()


def _whole(t: Tensor | InFiles) -> Tensor:
    return t if isinstance(t, Tensor) else t.read(torch.empty(t.nbytes, dtype=torch.uint8))


class _Buffers:
    """Two buffers on a GPU. Each has an event that says when the last work with it is over."""

    def __init__(self, device: torch.device):
        # With another priority than torch's streams, so that it shares no queue of the GPU with them.
        self.device, self.stream = device, torch.cuda.Stream(device, priority=-1)
        self.memory = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self.over = [torch.cuda.Event() for _ in range(2)]
        self.turn = 0
        self.staging = Staging(self.stream)

    def fill(self, tensors: dict[int, Tensor | InFiles]) -> dict[int, Tensor]:
        """Copy `tensors` into the buffer whose turn it is; later work on the current stream waits for them."""
        sizes = [-(-t.nbytes // _ALIGNED) * _ALIGNED for t in tensors.values()]
        current, memory = torch.cuda.current_stream(self.device), self.memory[self.turn]
        # Must come before a larger buffer replaces this one: torch reuses its memory after the work on this stream.
        self.stream.wait_event(self.over[self.turn])
        if memory.numel() < sum(sizes):
            memory.record_stream(self.stream)
            memory = self.memory[self.turn] = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self.stream.wait_stream(current)  # its work may still use what this memory held before
        with torch.cuda.stream(self.stream):
            found = {}
            for (place, t), room in zip(
                tensors.items(), memory.split([*sizes, memory.numel() - sum(sizes)]), strict=False
            ):
                found[place] = room[: t.nbytes].view(t.dtype).view(t.shape)
                if isinstance(t, InFiles):
                    self.staging.send(t, found[place])
                else:  # a copy from memory that is not pinned would make the host wait for the whole stream
                    found[place].copy_(t if t.nbytes >= HUGE else t.pin_memory(), non_blocking=True)
        current.wait_stream(self.stream)
        return found

    def emptied(self) -> None:
        """Note that all work with the buffer whose turn it was is now on the current stream."""
        self.over[self.turn].record(torch.cuda.current_stream(self.device))
        self.turn ^= 1


@cache
def _buffers(device: torch.device) -> _Buffers:
    return _Buffers(device)
