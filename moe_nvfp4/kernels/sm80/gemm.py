"""A grouped GEMM by sm_80 instructions: D[weight row, token] = W (NVFP4) · Xᵀ (bf16), by cp.async, ldmatrix, mma.sync.

Weights are the MMA's A operand (M): a thread's codes of 64 columns are one 16-byte load in the layout of `sm90.pack`,
whose m64k16 fragments are four of m16k16, and become bf16 code * sf in registers, exactly. Tokens are B (N), in
swizzled rows of 128 bytes in shared memory. NVFP4 rows are bf16 code * sf too. Sums are fp32, and the global scales of
weights and rows multiply the sum: `value = code * sf * global_scale`. `scheduler` has the list of tiles.

Nothing here is newer than sm_80, so what one GPU and the emulator have shown holds for all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.memory import SmemAllocator

from moe_nvfp4.kernels.sm80 import ptx
from moe_nvfp4.kernels.sm80.config import PLACES, UNIT_BYTES, GemmConfig, TileShape
from moe_nvfp4.kernels.sm80.epilogue import Epilogue
from moe_nvfp4.kernels.sm80.scheduler import Extents, Places, Source, Tile, TileScheduler, after
from moe_nvfp4.kernels.sm90.ptx import mma


class Tensors(NamedTuple):
    """The tensors that a launch reads and writes, besides those of `scheduler.Source`."""

    mW: cute.Tensor  # int32 [E, M64, K64 * 576], `sm90.pack`
    mX: cute.Tensor  # bf16 [*, K]
    mOut: cute.Tensor  # [*, N]
    mScale0: cute.Tensor  # fp32 [E], global scales of the gate rows; without a gate those of all rows, as
    mScale1: cute.Tensor  # fp32 [E], of the other rows
    mBias: cute.Tensor | None  # [E, rows of the matrix]
    mSync: cute.Tensor | None  # int32 zeros, if CTAs share tiles: a counter of CTAs, then a flag for each
    mParts: cute.Tensor | None  # fp32, and the part of a tile that each CTA leaves to another
    mClear: cute.Tensor | None  # int32, set to zero: the next launch's mSync


class Copies(NamedTuple):
    """What a thread copies of each stage: 16 bytes of every threads-th piece of tokens and weights."""

    rows: cute.Pointer  # in shared memory, where its first token's row of mX is
    weights: Int32  # in mW, in units of 16 bytes
    x_to: Int32  # where they go, in stage 0 of shared memory
    w_to: Int32


class GroupedGemm:
    """The kernel of a `TileShape` and a `GemmConfig`.

    All warps do the same (32 * WM * WK threads): they copy a part of each stage, multiply, and store.

    Pipeline
        A ring of `stages` stages of KB 64-column blocks, filled by cp.async, one group per stage. At the last k16 step
        of a stage, a thread waits for its copies of the next stage, and all threads meet: then they may read that
        stage, and fill the one that they have just read.

    Timeline of a tile, whose first stages - 1 stages are on their way
        first warp: find the next tile | per k16 step: load the next step's tokens and codes, per fragment: MMAs, while
        the next fragment is dequantized | add the sums of warps that split K | start the copies of the next tile | add
        the sums of other CTAs | scales, bias, gate, store

    What decides its speed is the number of instructions beside each MMA: many tokens per warp, so that a dequantized
    fragment has many MMAs, and few barriers, by many blocks per stage. Constants of the dequantization are arguments of
    the kernel, so that they are in registers.
    """

    def __init__(self, tile: TileShape, config: GemmConfig):
        tile.check()
        self.t, self.config, self.scheduler = tile, config, TileScheduler(tile, config)

    def __repr__(self) -> str:
        return f"GroupedGemm({self.t}, {self.config})"

    @cute.jit
    def __call__(
        self, mW, mX, mOut, mScale0, mScale1, mBias, mIds, mExpert, mRow, mEnd, mCount, mIndex, mOutIndex, mRowScale,
        mSync, mParts, mClear, R: Int32, index_div: Int32, grid: Int32, stream,
    ):  # fmt: skip
        """R: the number of rows, if they all belong to one matrix."""
        t = self.t
        rows = t.BN * PLACES

        @cute.struct
        class Storage:
            ring: cute.struct.Align[cute.struct.MemRange[Uint32, t.ring_bytes // 4], 1024]
            source: cute.struct.MemRange[Int32, rows]
            target: cute.struct.MemRange[Int32, rows]
            scale: cute.struct.MemRange[Float32, rows]
            tiles: cute.struct.Align[cute.struct.MemRange[Int32, 8 * PLACES], 16]
            work: cute.struct.MemRange[Int32, 8]

        self.storage = Storage
        source = Source(
            mIds, mExpert, mRow, mEnd, mCount, mIndex, mOutIndex, mRowScale, index_div, Int32(mX.stride[0] // 8), R
        )
        tensors = Tensors(mW, mX, mOut, mScale0, mScale1, mBias, mSync, mParts, mClear)
        constants = tuple(Uint32(x) for x in ptx.DEQUANTIZE_CONSTANTS)
        self.kernel(tensors, source, constants).launch(
            grid=[grid, 1, 1],
            block=[t.threads, 1, 1],
            min_blocks_per_mp=t.ctas,
            stream=stream,
            preferred_smem_carveout=100,  # without it the DSL asks the driver: no compilation without a GPU
        )

    @cute.kernel
    def kernel(self, tensors: Tensors, source: Source, constants: tuple):
        t = self.t
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
        storage = SmemAllocator().allocate(self.storage)
        shared = Int32(storage.ring.data_ptr().toint())
        of_rows = cute.make_layout((t.BN, PLACES))
        places = Places(
            storage.work.get_tensor(cute.make_layout(8)),
            storage.tiles.get_tensor(cute.make_layout((8, PLACES))),
            *(part.get_tensor(of_rows) for part in (storage.source, storage.target, storage.scale)),
        )
        E, M64, words = tensors.mW.shape
        k64 = words // (UNIT_BYTES // 4)
        extents = Extents(E, (M64 + t.units - 1) // t.units, (k64 + t.KB - 1) // t.KB)
        if const_expr(tensors.mClear is not None):
            self.clear(tensors.mClear)
        if warp == 0:
            self.scheduler.begin(source, extents, tensors.mSync, places)
        cute.arch.sync_threads()
        place = Int32(0)
        tile = self.scheduler.tile(places, place)
        self.start(tile, place, shared, tensors, places)
        while tile.valid:
            if warp == 0:
                self.scheduler.advance(place, source, extents, places)
            if const_expr(t.small > 0):
                if tile.rows <= 8 * t.small:
                    self.compute(t.small, shared, tensors, extents, tile, place, places, constants)
                else:
                    self.compute(t.NF, shared, tensors, extents, tile, place, places, constants)
            else:
                self.compute(t.NF, shared, tensors, extents, tile, place, places, constants)
            place = after(place)
            tile = self.scheduler.tile(places, place)

    @cute.jit
    def clear(self, mClear):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if cta == 0:
            for i in cutlass.range(tid, mClear.shape[0], self.t.threads, unroll=1):
                mClear[i] = Int32(0)

    @cute.jit
    def start(self, tile: Tile, place: Int32, shared: Int32, tensors: Tensors, places: Places):
        """Start the copies of a tile's first stages."""
        if tile.valid:
            copies = self.copies(shared, tile, place, tensors, places)
            for s in cutlass.range_constexpr(self.t.stages - 1):
                self.copy_stage(s < tile.count, tile.first + s, Int32(s), copies, tensors)

    @cute.jit
    def compute(
        self, NF: cutlass.Constexpr, shared: Int32, tensors: Tensors, extents: Extents, tile: Tile, place: Int32,
        places: Places, constants: tuple,
    ):  # fmt: skip
        """A tile, or a part of it, by MMAs of NF * 8 tokens: the sums, and what becomes of them."""
        t = self.t
        acc = cute.make_rmem_tensor(4 * t.MF * NF, Float32)
        acc.fill(0.0)
        copies = self.copies(shared, tile, place, tensors, places)
        self.multiply(NF, acc, shared, (tile.first, tile.count), copies, tensors, constants)
        if const_expr(t.WK > 1):
            self.sum_over_warps(acc, shared)
        self.start(self.scheduler.tile(places, after(place)), after(place), shared, tensors, places)
        tile = self.scheduler.tile(places, place)  # again, rather than keeping it in registers
        if const_expr(self.config.shares):
            if tile.first + tile.count < extents.stages:
                self.leave(acc, tensors, places)
            else:
                if tile.first > 0:
                    self.collect(acc, tensors, tile, extents.stages, places)
                self.store(NF, acc, tile, place, tensors, places)
        else:
            self.store(NF, acc, tile, place, tensors, places)

    @cute.jit
    def store(self, NF: cutlass.Constexpr, acc, tile: Tile, place: Int32, tensors: Tensors, places: Places):
        if cute.arch.thread_idx()[0] < self.t.storing:
            scales = tensors.mScale0[tile.expert], tensors.mScale1[tile.expert]
            rows = (places.sTo[None, place], places.sScale[None, place])
            Epilogue(self.t, self.config, NF).store(acc, scales, tile, tensors.mOut, tensors.mBias, rows)

    # ---- copies ----

    @cute.jit
    def copies(self, shared: Int32, tile: Tile, place: Int32, tensors: Tensors, places: Places) -> Copies:
        t, (tid, _, _) = self.t, cute.arch.thread_idx()
        _, M64, words = tensors.mW.shape
        # pieces of weights: threads share a unit's blocks. Beyond the last unit, it is repeated
        each: cutlass.Constexpr = t.threads // t.units
        u, piece = tid // each, tid % each
        unit = tile.expert * M64 + cutlass.min(tile.m * t.units + u, M64 - 1)
        w_to = shared + t.stages * t.x_bytes + u * (t.KB * UNIT_BYTES) + piece * 16
        # pieces of tokens: a row's block is eight of them
        chunk, row, block = tid % 8, tid // 8 % t.BN, tid // (8 * t.BN)
        x_to = shared + block * (t.BN * 128) + row * 128 + ((chunk ^ (row % 8)) << 4)
        rows = places.sFrom[None, place].iterator + row
        return Copies(rows, unit * (words // 4) + piece, x_to, w_to)

    @cute.jit
    def copy_stage(self, live, stage: Int32, slot: Int32, copies: Copies, tensors: Tensors):
        """Start the copies of a stage, if there is one; they are a group in any case. Beyond K there are zeros."""
        if live:
            columns = tensors.mX.shape[1] - stage * (64 * self.t.KB)
            if columns >= 64 * self.t.KB:
                self.copy(stage, slot, copies, tensors, None)
            else:
                self.copy(stage, slot, copies, tensors, columns)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy(self, stage: Int32, slot: Int32, copies: Copies, tensors: Tensors, columns: Any):
        """columns: how many of the stage there are, or None: all."""
        t, (tid, _, _) = self.t, cute.arch.thread_idx()
        each, pieces = t.threads // t.units, t.KB * UNIT_BYTES // 16
        to = copies.w_to + slot * t.w_bytes
        source = tensors.mW.iterator.toint() + Int64(copies.weights + stage * pieces) * 16
        for j in cutlass.range_constexpr(-(-pieces // each)):
            live = None if (j + 1) * each <= pieces else tid % each < pieces - j * each
            size = None
            if const_expr(columns is not None):
                there = (columns + 63) // 64 * (UNIT_BYTES // 16) - j * each
                size = cutlass.select_(tid % each < there, 16, 0)
            ptx.copy16(to, j * each * 16, source, j * each * 16, live, size)
        to, per_block, step = copies.x_to + slot * t.x_bytes, 8 * t.BN, t.threads // 8
        column, of_thread = tid // per_block * 64 + tid % 8 * 8, max(1, t.BN // step)
        for i in cutlass.range_constexpr(of_thread):
            row = copies.rows[i * step]
            source = tensors.mX.iterator.toint() + Int64(row + (stage * (8 * t.KB) + column // 8)) * 16
            for j in cutlass.range_constexpr(t.KB * per_block // t.threads // of_thread):
                block = j if of_thread > 1 else t.threads // per_block * j
                size = None
                if const_expr(columns is not None):
                    size = cutlass.select_(column + block * 64 < columns, 16, 0)
                ptx.copy16(to, block * (t.BN * 128) + step * 128 * i, source, block * 128, row >= 0, size)

    # ---- products ----

    @cute.jit
    def multiply(
        self, NF: cutlass.Constexpr, acc, shared: Int32, stages: tuple, copies: Copies, tensors: Tensors, constants
    ):
        """acc += W · Xᵀ over `count` stages, of which the first are on their way."""
        t, (first, count) = self.t, stages
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
        wm, wk = warp % t.WM, warp // t.WM
        each: cutlass.Constexpr = t.KB // t.WK
        x_at = shared + ((lane >> 4) * 8 + lane % 8) * 128 + ((((lane >> 3) & 1) ^ (lane % 8)) << 4)
        x_at += wk * (each * t.BN * 128)
        unit = shared + t.stages * t.x_bytes + (wm * t.MF // 4 * t.KB + wk * each) * UNIT_BYTES
        fragment = wm * t.MF % 4
        codes_at, sf_at = unit + fragment * 512 + lane * 16, unit + 2048 + fragment * 64 + lane // 4 * 8

        # what the next k16 step needs, from one turn of the loop to the next
        tokens = cute.make_rmem_tensor(2 * NF, Uint32)
        weights = cute.make_rmem_tensor(6 * t.MF, Uint32)
        a_first = cute.make_rmem_tensor(4, Uint32)
        cute.arch.cp_async_wait_group(t.stages - 2)
        cute.arch.sync_threads()
        keep(tokens, self.load_tokens(NF, x_at, 0))
        keep(weights, self.load_weights(codes_at, sf_at, 0))
        keep(a_first, self.fragment(values(weights), 0, 0, constants))

        slot = Int32(0)
        last = first + count
        for stage in cutlass.range(first, last, unroll=1):
            b, w, a = values(tokens), values(weights), values(a_first)
            filled = cutlass.select_(slot == 0, Int32(t.stages - 1), slot - 1)  # the slot that was read last
            here = (x_at + slot * t.x_bytes, codes_at + slot * t.w_bytes, sf_at + slot * t.w_bytes)
            slot = cutlass.select_(slot == t.stages - 1, Int32(0), slot + 1)
            there = (x_at + slot * t.x_bytes, codes_at + slot * t.w_bytes, sf_at + slot * t.w_bytes)
            for s in cutlass.range_constexpr(4 * each):
                if const_expr(s == 0):
                    ahead = stage + (t.stages - 1)
                    self.copy_stage(ahead < last, ahead, filled, copies, tensors)
                if const_expr(s == 4 * each - 1):
                    cute.arch.cp_async_wait_group(t.stages - 2)
                    cute.arch.sync_threads()
                    next_b = self.load_tokens(NF, there[0], 0)
                    next_w = self.load_weights(there[1], there[2], 0)
                else:
                    next_b = self.load_tokens(NF, here[0] + (s + 1) // 4 * (t.BN * 128), (s + 1) % 4)
                    next_w = self.load_weights(here[1], here[2], s // 4 + 1) if const_expr(s % 4 == 3) else w
                for m in cutlass.range_constexpr(t.MF):
                    for n in cutlass.range_constexpr(NF):
                        at = (m * NF + n) * 4
                        keep(acc, mma(a, b[2 * n], b[2 * n + 1], [acc[at + j] for j in range(4)]), at)
                    if const_expr(m < t.MF - 1):
                        a = self.fragment(w, s % 4, m + 1, constants)
                    else:
                        a = self.fragment(next_w, (s + 1) % 4, 0, constants)
                b, w = next_b, next_w
            keep(tokens, b)
            keep(weights, w)
            keep(a_first, a)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    def load_tokens(self, NF: int, at, ks: int) -> list:
        """B fragments of a k16 step for all tokens."""
        return [r for j in range(NF // 2) for r in ptx.ldmatrix(at ^ (ks << 5), j * 2048)]

    def load_weights(self, codes_at, sf_at, block: int) -> list:
        """This thread's codes and block scales in a 64-column block: four words for each fragment, then two."""
        codes, sf = [], []
        for m in range(self.t.MF):
            codes += ptx.load_shared(codes_at, block * UNIT_BYTES + m * 512, 4)
            sf += ptx.load_shared(sf_at, block * UNIT_BYTES + m * 64, 2)
        return codes + sf

    def fragment(self, weights: list, ks: int, m: int, constants) -> list:
        """The A fragment of k16 step ks."""
        sf = weights[4 * self.t.MF + 2 * m + ks // 2]
        if ks % 2:
            sf = (sf << 8) | (sf >> 24)
        return ptx.dequantize(weights[4 * m + ks], sf, constants)

    # ---- sums ----

    @cute.jit
    def sum_over_warps(self, acc, shared: Int32):
        """Add up the sums of the warps that split K, in the first of them."""
        t, size, (tid, _, _) = self.t, cute.size(acc), cute.arch.thread_idx()
        others: cutlass.Constexpr = t.threads - t.storing
        if tid >= t.storing:
            for i in cutlass.range_constexpr(0, size, 4):
                ptx.store4("shared", shared + (tid - t.storing) * 16, i * 4 * others, acc, i)
        cute.arch.sync_threads()
        if tid < t.storing:
            for p in cutlass.range_constexpr(t.WK - 1):
                for i in cutlass.range_constexpr(0, size, 4):
                    ptx.add4("shared", shared + tid * 16, i * 4 * others + p * t.storing * 16, acc, i)
        cute.arch.sync_threads()

    def part_at(self, tensors: Tensors, number, tid) -> Int64:
        size = self.t.rows * self.t.BN * 4
        return tensors.mParts.iterator.toint() + Int64(number) * size + Int64(tid * 16)

    @cute.jit
    def leave(self, acc, tensors: Tensors, places: Places):
        """Store a part of a tile for the CTA that will store the tile."""
        number, tid = self.scheduler.work(places).number, ptx.here(cute.arch.thread_idx()[0])
        if tid < self.t.storing:
            to = self.part_at(tensors, number, tid)
            for i in cutlass.range_constexpr(0, cute.size(acc), 4):
                ptx.store4("global", to, i * 4 * self.t.storing, acc, i)
        cute.arch.sync_threads()
        if tid == 0:
            ptx.publish(self.scheduler.flag(tensors.mSync, number))

    @cute.jit
    def collect(self, acc, tensors: Tensors, tile: Tile, stages: Int32, places: Places):
        """Add the other parts of a tile."""
        work, tid = self.scheduler.work(places), ptx.here(cute.arch.thread_idx()[0])
        others = self.scheduler.parts(work, tile, stages)
        for p in cutlass.range(tid, others, self.t.threads, unroll=1):
            seen = Int32(0)
            while seen == 0:
                seen = ptx.flag_value(self.scheduler.flag(tensors.mSync, work.number - 1 - p))
        cute.arch.sync_threads()
        if tid < self.t.storing:
            for p in cutlass.range(others, unroll=1):
                at = self.part_at(tensors, work.number - 1 - p, tid)
                for i in cutlass.range_constexpr(0, cute.size(acc), 4):
                    ptx.add4("global.cg", at, i * 4 * self.t.storing, acc, i)


def keep(to, found: list, at: int = 0):
    for j, value in enumerate(found):
        to[at + j] = value


def values(tensor) -> list:
    return [tensor[j] for j in range(cute.size(tensor))]
