"""The token warps of the Hopper GEMM: rows of x or h, and their scales, from global to shared memory.

TMA copies boxes of rows that lie in order. Gathered rows, and the few rows of h in decode, are copied 16 bytes per lane
(TMA would take longer), to where the swizzle of TMA would have put them.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from moe_nvfp4.kernels.common.pipeline import (
    PipelineState,
    advance,
    consumer_state,
    producer_state,
)
from moe_nvfp4.kernels.sm90 import ptx, quantize
from moe_nvfp4.kernels.sm90.arguments import Shared, Tensors
from moe_nvfp4.kernels.sm90.config import GemmConfig, TileShape
from moe_nvfp4.kernels.sm90.scheduler import (
    GEMM1,
    QUANTIZE,
    Extents,
    TileScheduler,
    WorkTile,
)


class TokenLoader:
    def __init__(self, t: TileShape, config: GemmConfig, scheduler: TileScheduler):
        self.t, self.config, self.scheduler = t, config, scheduler

    @cute.jit
    def copied_by_lanes(self, of_h):
        """Whether lanes copy a tile's tokens, 16 bytes each: gathered ones, and the few rows of h in decode. Otherwise
        TMA does."""
        holds = self.config.gathers_x
        if const_expr(self.t.uses_mma_sync and not holds):
            holds = of_h
        elif const_expr(holds and not self.t.uses_mma_sync):
            holds = not of_h
        return holds

    @cute.jit
    def load(self, to: Int32, atoms: tuple, tensors: Tensors, extents: Extents, s: Shared):
        """The role of two warps: all tiles. They share rows or 64-column blocks evenly; the first also loads scales."""
        t, config = self.t, self.config
        lane = cute.arch.lane_idx()
        mine = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32 % 4) - 1
        descriptors = tuple(ptx.descriptor(atom) for atom in atoms)
        # if lanes copy: a warp has four of every eight rows, and a lane 16 bytes of a row, placed as by the swizzle
        within, chunk = 4 * mine + lane // 8, lane % 8
        chunks = cute.make_rmem_tensor(t.BN // 8, Int32)  # their addresses, in units of 16 bytes
        row_scale = cute.make_rmem_tensor((t.BN + 31) // 32, Float32)

        ring, slot = producer_state(), consumer_state()
        tile = self.scheduler.fetch(s.slots, slot)
        while tile.valid:
            rows, kind = tile.rows, tile.kind
            of_h, raw = kind != GEMM1, kind == QUANTIZE
            if const_expr(config.both_gemms):
                if of_h:
                    self.wait_for_h(tensors.mSync, tile.token_tile, raw, extents)
            where = self.scheduler.k_range(tile.m_index, kind, extents)
            by_lanes = self.copied_by_lanes(of_h)
            base, columns, pitch = self.token_rows(tensors, of_h, raw)
            if const_expr(t.uses_mma_sync):
                columns = cutlass.select_(within < rows, columns, Int32(0))  # rows beyond the group are not read
            if by_lanes:
                self.locate(chunks, tile, (within, chunk), of_h, pitch, tensors.mIndex)
            # the stage that scales come with: a GEMM needs them only in its epilogue, a tile that quantizes at once
            scales_at = cutlass.select_(raw, Int32(0), (where.count - 1) >> t.log2_KB)
            for kt in cutlass.range((where.count + (t.KB - 1)) >> t.log2_KB, unroll=1):
                cute.arch.mbarrier_wait(s.empty + ring.index, ring.phase)
                bar = Int32((s.full + ring.index).toint())
                if by_lanes:
                    target = to + ring.index * (t.KB * t.BN * 128) + within * 128 + ((chunk ^ within) << 4)
                    self.copy_by_lanes(target, base, chunks, (where.first + kt * t.KB, chunk), columns, rows)
                    ptx.arrive_after_copies(bar)
                    if const_expr(not config.row_scale):
                        cute.arch.sync_warp()
                with cute.arch.elect_one():
                    if not self.copied_by_lanes(of_h):
                        blocks = (mine, where.first + kt * t.KB, cutlass.min(where.count - kt * t.KB, Int32(t.KB)))
                        to_stage = (to, ring.index, bar)
                        self.copy_by_tma(to_stage, descriptors, (of_h, raw), blocks, tile.row, rows)
                    if const_expr(not config.row_scale):
                        cute.arch.mbarrier_arrive(s.full + ring.index)
                if const_expr(config.row_scale):  # while the copies run
                    self.load_row_scales(row_scale, tile, slot, (mine, kt, scales_at), tensors, s)
                    cute.arch.mbarrier_arrive(s.full + ring.index)  # each lane for what it stored
                ring = advance(ring, t.stages)
            slot = self.scheduler.release((s.slots.empty,), slot)
            tile = self.scheduler.fetch(s.slots, slot)

    @cute.jit
    def token_rows(self, tensors: Tensors, of_h, raw):
        """Where lanes find a tile's rows: the address of the first, their columns, the pitch in units of 16 bytes."""
        place = (tensors.mX.iterator.toint(), tensors.mX.shape[1], Int32(tensors.mX.stride[0] // 8))
        if const_expr(self.t.uses_mma_sync):
            if const_expr(self.config.down):
                place = self.choose_rows(tensors.mQ, of_h, place)
            if const_expr(self.config.h_columns == 2):
                place = self.choose_rows(tensors.mRaw, raw, place)
        return place

    def choose_rows(self, rows, chosen, place: tuple) -> tuple:
        own = (rows.iterator.toint(), rows.shape[1], Int32(rows.stride[0] // 8))
        return tuple(cutlass.select_(chosen, a, b) for a, b in zip(own, place, strict=True))

    @cute.jit
    def locate(self, chunks, tile: WorkTile, place: tuple, of_h, pitch, mIndex):
        """Find the addresses of this lane's 16 bytes in every eighth row."""
        within, chunk = place
        for i in cutlass.range_constexpr(self.t.BN // 8):
            at = tile.row + cutlass.min(8 * i + within, tile.rows - 1)
            if const_expr(self.config.gathers_x):
                if not of_h:
                    at = mIndex[at]
            chunks[i] = at * pitch + chunk

    @cute.jit
    def copy_by_lanes(self, target, base, chunks, place: tuple, columns, rows):
        """Copy a stage's tokens: this lane's 16 bytes of every eighth row, in each 64-column block from `first` on."""
        t, (first, chunk) = self.t, place
        column = first * 64 + chunk * 8
        sizes = [cutlass.select_(column + j * 64 < columns, 16, 0) for j in range(t.KB)]
        for i in cutlass.range_constexpr(t.BN // 8):
            if 8 * i < rows:
                address = base + Int64(chunks[i] + first * 8) * 16
                for j in cutlass.range_constexpr(t.KB):
                    ptx.copy16(target, (j * t.BN + 8 * i) * 128, address, j * 128, sizes[j])

    @cute.jit
    def copy_by_tma(self, to_stage: tuple, descriptors: tuple, source: tuple, blocks: tuple, row, rows):
        """Copy a stage's tokens, from one lane: every second of `count` 64-column blocks from `first` on, by boxes."""
        t, (to, stage, bar) = self.t, to_stage
        (from_x, from_raw, from_h), (of_h, raw), (mine, first, count) = descriptors, source, blocks
        for j in cutlass.range(mine, count, 2, unroll=1):
            descriptor = from_h if of_h else from_x
            if const_expr(self.config.h_columns == 2):
                descriptor = from_raw if raw else descriptor
            for i in cutlass.range(0, rows, t.box_rows, unroll=1):
                target = to + (stage * t.KB + j) * (t.BN * 128) + i * 128
                ptx.tma(target, descriptor, (first + j) * 64, row + i, bar)

    @cute.jit
    def load_row_scales(self, row_scale, tile: WorkTile, slot: PipelineState, when: tuple, tensors: Tensors, s: Shared):
        """For the first token warp: ask for a tile's row scales at its first stage, store them at stage `scales_at`."""
        mine, kt, scales_at = when
        of_h = tile.kind != GEMM1
        if mine == 0:
            if kt == 0:
                sources = (tensors.mIndex, tensors.mRowScale, tensors.mHScale)
                place = (tile.expert, tile.row, tile.rows)
                quantize.ask_scales(row_scale, sources, of_h, place, self.config)
            if kt == scales_at:
                quantize.store_scales(row_scale, s.sRowScale[None, slot.index], of_h, self.config)

    @cute.jit
    def wait_for_h(self, mSync, token_tile, raw, extents: Extents):
        """Wait until the token tile of h is stored and, unless `raw` rows are wanted, quantized."""
        quantized = 0
        if const_expr(self.config.row_scale):
            quantized = cutlass.select_(raw, Int32(0), self.scheduler.quantize_parts(extents.k64))
        at, found = token_tile + 1, Int32(0)
        count = (extents.m64[0] + self.t.m_blocks - 1) // self.t.m_blocks + quantized
        while found < count:
            found = cute.arch.load(mSync.iterator + at, Int32, sem="acquire", scope="gpu")
        if const_expr(not self.t.uses_mma_sync):
            cute.arch.fence_proxy(kind="async")  # ordinary stores wrote the rows, TMA will read them
