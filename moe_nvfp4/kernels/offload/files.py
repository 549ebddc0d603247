"""Copies of weights that stay in their files to a GPU: the CPU fills one pinned buffer while the GPU copies from
another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.weights import ExpertWeights, Matrices

STAGED = 64 << 20  # the most bytes of a pinned buffer, unless a single matrix needs more


@dataclass(frozen=True)
class InFiles:
    """A stand-in for a tensor uint8 [E, rows, columns] whose matrices, one for each expert, are in files.

    table  uint8 [E, parts, 2, 8]: see `moe_nvfp4.mapped`
    kind   0: codes, 1: block scales
    """

    table: Tensor
    kind: int
    rows: int
    columns: int

    dtype = torch.uint8

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.table.shape[0], self.rows, self.columns

    @property
    def nbytes(self) -> int:
        return self.table.shape[0] * self.rows * self.columns

    def __getitem__(self, experts: slice) -> InFiles:
        return replace(self, table=self.table[experts])

    def read(self, to: Tensor) -> Tensor:
        """Fill `to`, uint8 [nbytes] on the CPU; returns it in this shape. OSError if a file has lost its part."""
        cpu.gather(self.table, self.kind, to)
        return to.view(self.shape)


def sources(weights: ExpertWeights) -> list[Tensor | InFiles | None]:
    """`weights.tensors()` in the checkpoint's layout, each on the CPU or in files."""
    if weights.layout is None:
        return [*weights.tensors()]

    def in_files(m: Matrices) -> list[InFiles]:
        return [InFiles(m.codes, 0, m.N, 8 * m.blocks), InFiles(m.codes, 1, m.N, m.blocks)]

    _, _, *of_w13, _, _, scale, bias, x_scale, h_scale = weights.tensors()
    return [*in_files(weights.w13), *of_w13, *in_files(weights.w2), scale, bias, x_scale, h_scale]


class Staging:
    """Two pinned buffers, from which `stream` copies."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream, self.turn = stream, 0
        self.memory = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self.over = [torch.cuda.Event() for _ in range(2)]

    def send(self, source: InFiles, to: Tensor) -> None:
        """Copy `source` to `to` on the stream, which must be the current one. Waits until a buffer is free."""
        step = max(1, STAGED * len(source.table) // source.nbytes)
        for first in range(0, len(source.table), step):
            part, over = source[first : first + step], self.over[self.turn]
            over.synchronize()
            if self.memory[self.turn].numel() < part.nbytes:
                self.memory[self.turn] = _pinned(part.nbytes)
            filled = part.read(self.memory[self.turn][: part.nbytes])
            to[first : first + step].copy_(filled, non_blocking=True)
            over.record(self.stream)
            self.turn ^= 1


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
