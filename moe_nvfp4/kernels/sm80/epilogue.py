"""The epilogue of the sm_80 GEMM: fp32 sums -> global scales, bias, gate -> rows of the result.

A thread holds the sums of two rows of the matrix (registers i and i + 2 of each four) for two tokens of each eight.
If a gate pairs the rows, they are gate and up of one column; otherwise they are two neighbouring columns.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute

from moe_nvfp4.kernels.common.gates import apply_gate_fast
from moe_nvfp4.kernels.sm80.config import GemmConfig, TileShape
from moe_nvfp4.kernels.sm80.scheduler import Tile
from moe_nvfp4.kernels.sm90.ptx import UNSCALE, store_pair


class Lane(NamedTuple):
    """A thread's place in a tile."""

    c: Int32  # its first two tokens of each eight are 2 c and 2 c + 1
    shift: Int32  # which of two tokens it stores, if a gate pairs rows
    odd: Boolean


class Epilogue:
    """The epilogue for tiles of 8 * NF tokens."""

    def __init__(self, t: TileShape, config: GemmConfig, NF: int):
        self.t, self.config, self.NF = t, config, NF
        self.paired = config.gate is not None and config.gate.gated
        self.raw = self.paired and config.gate.kind == "raw"

    @cute.jit
    def store(self, acc, scales: tuple, tile: Tile, mOut, mBias, of_rows: tuple):
        """Store the sums of the first WM warps. scales: the global ones of a thread's two rows of the matrix; of_rows:
        for each token its row of the result and its global scale."""
        t = self.t
        tid, _, _ = cute.arch.thread_idx()
        lane, wm = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        g, odd = lane // 4, lane // 4 % 2 == 1
        columns = mOut.shape[1] // 2 if const_expr(self.raw) else mOut.shape[1]
        scale0, scale1 = scales[0] * UNSCALE, scales[1] * UNSCALE
        # paired: a lane computes one column for two tokens; after a swap it has two columns of one token
        shift = cutlass.select_(odd, Int32(1), Int32(0)) if const_expr(self.paired) else Int32(0)
        at = Lane(lane % 4, shift, odd)
        wide = 8 if const_expr(self.paired) else 16  # columns of a fragment
        slab = (tile.m * t.WM + wm) * t.MF
        for mf in cutlass.range_constexpr(t.MF):
            begin = (slab + mf) * wide
            if begin < columns:  # then so are all columns of the fragment, because `columns` is a multiple of 16
                column = begin + (g if const_expr(self.paired) else 2 * g)
                bias0, bias1 = Float32(0.0), Float32(0.0)
                if const_expr(self.config.bias):
                    other = column + columns if const_expr(self.paired) else column + 1
                    bias0 = mBias[tile.expert, column].to(Float32)
                    bias1 = mBias[tile.expert, other].to(Float32)
                to = mOut.iterator.toint() + Int64(column - shift) * (mOut.element_type.width // 8)
                factors = (scale0, scale1, bias0, bias1)
                for nf in cutlass.range_constexpr(self.NF):
                    if nf * 8 < tile.rows:
                        sums = [acc[i + 4 * (mf * self.NF + nf)] for i in range(4)]
                        self.store_eight_tokens(nf, sums, factors, mOut, to, tile.rows, at, of_rows)

    @cute.jit
    def store_eight_tokens(
        self, nf: cutlass.Constexpr, sums: list, factors: tuple, mOut, to: Int64, rows: Int32, at: Lane, of_rows: tuple
    ):
        dtype, pitch, token = mOut.element_type, mOut.stride[0] * (mOut.element_type.width // 8), nf * 8 + at.c * 2
        sTo, sScale = of_rows
        values = []
        for i in cutlass.range_constexpr(2):
            row_scale = Float32(1.0)
            if const_expr(self.config.row_scale):
                row_scale = sScale[token + i]
            values.append(self.finish(sums[i], sums[i + 2], factors, row_scale))
        if const_expr(self.paired):
            token = token + at.shift
            place = to + Int64(sTo[token]) * pitch
            for half in cutlass.range_constexpr(2 if self.raw else 1):
                mine = cutlass.select_(at.odd, values[1][half], values[0][half])
                swap = cutlass.select_(at.odd, values[0][half], values[1][half])
                swap = cute.arch.shuffle_sync_bfly(swap, 4)
                low, high = cutlass.select_(at.odd, swap, mine), cutlass.select_(at.odd, mine, swap)
                further = Int64(half * (mOut.shape[1] // 2)) * (dtype.width // 8)
                store_pair(dtype, place + further, low, high, token < rows)
        else:
            for i in cutlass.range_constexpr(2):
                place = to + Int64(sTo[token + i]) * pitch
                store_pair(dtype, place, values[i][0], values[i][1], token + i < rows)

    def finish(self, a, b, factors: tuple, row_scale):
        """Two sums of a token -> two values. If the gate pairs them, the first is its result."""
        scale0, scale1, bias0, bias1 = factors
        gate = self.config.gate
        a, b = a * scale0, b * scale1
        if self.config.row_scale:
            a, b = a * row_scale, b * row_scale
        if self.config.bias:
            a, b = a + bias0, b + bias1
        if gate is not None and gate.kind == "relu2":
            a, b = apply_gate_fast(gate, a, a), apply_gate_fast(gate, b, b)
        if self.paired and not self.raw:
            a = apply_gate_fast(gate, a, b)
        return a, b
