"""The epilogue of the Hopper GEMMs: fp32 sums -> global scales, bias, gate -> rows of h or of the expert outputs.

A thread holds the sums of two rows of the matrix (registers i and i + 2 of each four) for two tokens of each eight.
If a gate pairs the rows, they are gate and up of one column of h; otherwise they are two neighbouring columns.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from moe_nvfp4.kernels.common import arithmetic
from moe_nvfp4.kernels.common.gates import apply_gate_fast
from moe_nvfp4.kernels.sm90 import ptx, quantize
from moe_nvfp4.kernels.sm90.config import GemmConfig, TileShape


class Output(NamedTuple):
    """Where a tile is stored, and what its sums are multiplied by."""

    mOut: cute.Tensor  # [rows, columns]
    mBias: cute.Tensor
    scale0: Float32  # global scales of the thread's two rows of the matrix
    scale1: Float32
    sRowScale: cute.Tensor  # [BN, slots], global scales of the tokens
    sLargest: cute.Tensor  # [BN, slots], largest magnitudes so far, to be raised
    slot: Int32


class Place(NamedTuple):
    """Which tile: the expert, its first 64-row block, its first row, its number of tokens, its part of K."""

    expert: Int32
    block: Int32
    row: Int32
    rows: Int32
    part: Int32


class Column(NamedTuple):
    """A thread's place in the output."""

    column: Int32  # its column, or the first of two; also its first row of the matrix
    other: Int32  # its other row of the matrix: that of up, or the next one
    shift: Int32  # which of two tokens it stores
    odd: cutlass.Boolean
    pitch: Int64  # bytes from row to row


class Epilogue:
    """The epilogue for tiles of N tokens, of GEMM 2 (`down`) or GEMM 1."""

    def __init__(self, t: TileShape, config: GemmConfig, N: int, down: bool):
        self.t, self.config, self.N, self.down = t, config, N, down
        self.gate = None if down else config.gate
        self.paired = self.gate is not None and self.gate.gated
        self.raw = self.paired and self.gate.kind == "raw"
        self.tracks_amax = config.tracks_amax and not down

    @cute.jit
    def store(self, acc, out: Output, place: Place):
        """Store all 64-row blocks of a warpgroup."""
        t, mOut = self.t, out.mOut
        tid = cute.arch.thread_idx()[0] % 128
        warp, g = cute.arch.make_warp_uniform(tid // 32), tid % 32 // 4
        out = out._replace(scale0=out.scale0 * ptx.UNSCALE, scale1=out.scale1 * ptx.UNSCALE)
        largest = cute.make_rmem_tensor(self.N // 4, Float32)  # the largest magnitude of each of the thread's tokens
        largest.fill(0.0)
        columns = mOut.shape[1] // 2 if const_expr(self.raw) else mOut.shape[1]
        size = mOut.element_type.width // 8
        pitch = Int64(mOut.stride[0]) * size
        odd = g % 2 == 1
        # paired: a lane computes one column for two tokens; after a swap it has two columns of one token
        shift = cutlass.select_(odd, Int32(1), Int32(0)) if const_expr(self.paired) else Int32(0)
        for m in cutlass.range_constexpr(t.MB):
            if const_expr(self.paired):
                begin = (place.block + m) * 32 + warp * 8
                column = begin + g
                first, other = column, column + columns
            else:
                begin = (place.block + m) * 64 + warp * 16
                column = begin + 2 * g
                first, other = column, column + 1
            if begin < columns:  # then so are all columns of the warp, because `columns` is a multiple of 16
                self.store_block(m, acc, largest, out, place, Column(first, other, shift, odd, pitch))
        if const_expr(self.tracks_amax):
            values = [largest[j] for j in range(self.N // 4)]
            quantize.keep_largest(values, out.sLargest[None, out.slot].iterator, place.rows)

    @cute.jit
    def store_block(self, m: cutlass.Constexpr, acc, largest, out: Output, place: Place, at: Column):
        """Store block m of the warpgroup, eight tokens at a time; scales are read one step ahead."""
        N, c, config = self.N, cute.arch.thread_idx()[0] % 4, self.config
        bias0, bias1 = Float32(0.0), Float32(0.0)
        if const_expr(config.bias):
            if place.part == 0:  # only once, because the combine adds the parts of K
                bias0 = out.mBias[place.expert, at.column].to(Float32)
                bias1 = out.mBias[place.expert, at.other].to(Float32)
        to = out.mOut.iterator.toint() + Int64(place.row + c * 2 + at.shift) * at.pitch
        to = to + Int64(at.column - at.shift) * (out.mOut.element_type.width // 8)
        scales = [cute.make_rmem_tensor(2, Float32) for _ in range(2)]
        if const_expr(config.row_scale):
            quantize.load_pair(out.sRowScale[None, out.slot], c * 2, scales[0])
        for n in cutlass.range_constexpr(N // 8):
            if const_expr(config.row_scale and n + 1 < N // 8):  # hidden behind this step's arithmetic
                quantize.load_pair(out.sRowScale[None, out.slot], (n + 1) * 8 + c * 2, scales[(n + 1) % 2])
            if n * 8 < place.rows:
                sums = [acc[i + 4 * n + N // 2 * m] for i in range(4)]
                values = []
                for i in cutlass.range_constexpr(2):
                    a, b = self.finish(sums[i] * out.scale0, sums[i + 2] * out.scale1, scales[n % 2][i], bias0, bias1)
                    values.append((a, b))
                    self.keep_largest(largest, 2 * n + i, [a] if self.paired else [a, b])
                self.store_eight_tokens(n, values, out.mOut, to, place.rows, at)

    def finish(self, a, b, row_scale, bias0, bias1):
        """Two sums of a token, times the matrix's global scales -> two values. If the gate pairs them, the first is its
        result."""
        if self.config.row_scale:
            a, b = a * row_scale, b * row_scale
        if self.config.bias:
            a, b = a + bias0, b + bias1
        if self.gate is not None and self.gate.kind == "relu2":
            a, b = apply_gate_fast(self.gate, a, a), apply_gate_fast(self.gate, b, b)
        if self.paired and not self.raw:
            a = apply_gate_fast(self.gate, a, b)
        return a, b

    def keep_largest(self, largest, token: int, values: list):
        if self.tracks_amax:
            largest[token] = arithmetic.largest_magnitude([largest[token], *values])

    @cute.jit
    def store_eight_tokens(self, n: cutlass.Constexpr, values, mOut, to: Int64, rows, at: Column):
        c, dtype = cute.arch.thread_idx()[0] % 4, mOut.element_type
        if const_expr(self.paired):
            columns = mOut.shape[1] // 2 if const_expr(self.raw) else mOut.shape[1]
            for half in cutlass.range_constexpr(2 if self.raw else 1):
                mine = cutlass.select_(at.odd, values[1][half], values[0][half])
                swap = cutlass.select_(at.odd, values[0][half], values[1][half])
                swap = cute.arch.shuffle_sync_bfly(swap, 4)
                low, high = cutlass.select_(at.odd, swap, mine), cutlass.select_(at.odd, mine, swap)
                place = to + (n * 8) * at.pitch + half * columns * (dtype.width // 8)
                ptx.store_pair(dtype, place, low, high, n * 8 + c * 2 + at.shift < rows)
        else:
            for i in cutlass.range_constexpr(2):
                place = to + (n * 8 + i) * at.pitch
                ptx.store_pair(dtype, place, values[i][0], values[i][1], n * 8 + c * 2 + i < rows)
