"""The grouped GEMMs of a layer on Hopper, both in one launch: D[weight row, token] = W (NVFP4) · Xᵀ (bf16).

Weights are the MMA's A operand (M), dequantized in registers from the layout of `sm90.pack`. Tokens are B (N = 8 to
256), from shared memory. For up to 8 tokens, each warp uses mma.sync, which has the same fragments as WGMMA: that takes
fewer instructions and no waiting, and decode is short of issue slots. A group's last tile is computed by WGMMAs of
`small` tokens if they suffice: between 16 and 100 tokens the tensor cores' time matters, not only that of the bytes.

NVFP4 rows are bf16 code * sf too, which is exact. Sums are fp32, and the global scales of weights and rows multiply the
sum: `value = code * sf * global_scale`. `sm90.quantize` says how h becomes such rows.

A tile is 64 * m_blocks weight rows of one expert times BN of its tokens; the list of tiles is in `sm90.scheduler`.
Nothing waits for the host, and experts without tokens cost nothing. GEMM 2 may split K into 2^log2_split_k parts, each
with output rows of its own, which the combine adds. Persistent CTAs take tiles from an atomic tile counter. So GEMM 2
fills the gaps that GEMM 1 leaves, and a CTA that waits for a row of h waits only for CTAs that are running.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from moe_nvfp4.kernels.common.pipeline import (
    PipelineState,
    advance,
    arrive,
    consumer_state,
    producer_state,
)
from moe_nvfp4.kernels.sm90 import ptx, quantize
from moe_nvfp4.kernels.sm90.arguments import Shared, Tensors
from moe_nvfp4.kernels.sm90.config import MAX_EXPERTS, GemmConfig, TileShape
from moe_nvfp4.kernels.sm90.epilogue import Epilogue, Output, Place
from moe_nvfp4.kernels.sm90.pack import UNIT_WORDS
from moe_nvfp4.kernels.sm90.scheduler import (
    GEMM1,
    GEMM2,
    QUANTIZE,
    Extents,
    KRange,
    Tile,
    TileScheduler,
    TileSlots,
    WorkTile,
)
from moe_nvfp4.kernels.sm90.tokens import TokenLoader


class Consumer(NamedTuple):
    """What a consumer warp keeps from tile to tile."""

    x: cute.Pointer  # where the tokens' stages begin
    w: cute.Pointer  # where the weights' stages begin
    sPartial: cute.Tensor  # sums of the warpgroups that split K
    constants: tuple  # ptx.DEQUANTIZE_CONSTANTS, in registers
    wk: Int32 | None = None  # within a tile: its warpgroup's number among those that split K
    wm: Int32 | None = None  # within a tile: its warpgroup's number among those that split the rows


class Wgmma(NamedTuple):
    """A tile's WGMMAs. There are two of tCrA and of the registers behind it, `words`, which are used in turn."""

    mma: cute.TiledMma
    tCrC: cute.Tensor
    tCrA: list
    tCrB: cute.Tensor  # (mma, 1, (4, KB), stage)
    words: list


class GroupedGemm:
    """The kernel of a `TileShape` and a `GemmConfig`.

    Warp roles (128 * (NWG + 1) threads)
        warps 0..4 NWG-1   consumers, in warpgroups. Groups of KS warpgroups split K (and add up through shared memory);
                           the groups split the rows: MB blocks of 64 rows each. Or they quantize h
        next warp          tile scheduler and weights: takes tiles from the counter, publishes them, issues the bulk
                           copies of their weights
        next two warps     tokens, or h to be quantized: boxes of 16 or 8 rows by TMA, or 16 bytes per lane if rows are
                           gathered or few (where TMA takes longer). Rows beyond the group may hold anything: each token
                           is a column of its own, and these are not stored. The first warp also brings rows' scales
        last warp          publishes h: raises the largest magnitudes of rows in global memory, counts stored tiles

    Pipelines (producer role -> consumer role; arrivals)
        full[stage]        weights, tokens -> consumers: 1 with the transaction bytes of weights and tokens; 1 per token
                           warp (which may have nothing to copy, but must not fall behind); where lanes copy, 1 per lane
                           when its copies have arrived, which the lane itself adds to the expected count. Where rows
                           have scales, 1 per lane of the token warps instead of 1 per warp: scales come with a tile's
                           last stage, or with the first if the tile quantizes
        empty[stage]       consumers -> weights, tokens: 1 per consumer warp, after the WGMMAs that read the stage's
                           tokens (its codes were in registers long before). The ring continues from tile to tile
        slots.full[slot]   tile scheduler -> all others: 1, when the tile's four words are in shared memory
        slots.empty[slot]  all others -> tile scheduler: 1 per warp. No warp gets `slots` tiles ahead of another
        stored[slot]       consumers -> last warp: 1 per consumer warp, after its stores
        mSync[1 + t]       in global memory: how many tiles of token tile t of h are stored, plus how many are
                           quantized. The last warp adds them, because the fence before this takes microseconds while
                           memory is busy

    Timeline of each role
        weights    scan of the offsets | per tile: wait slots.empty, publish, count the next tile | per stage: wait
                   empty (in the first round also until the stage half a ring earlier has arrived, so that stages
                   arrive in order), copy
        tokens     per tile: wait slots.full; unless GEMM 1, wait for h | per stage: wait empty, copy, scales, arrive
        consumer   per tile: wait slots.full, ask for scales | per stage: wait full; per 64 columns: load codes and
                   scales, dequantize k16 by k16 into one half of the fragment ring while the WGMMAs of the other half
                   run | drain, sum over KS, epilogue: scales, bias, gate, largest magnitudes, store | arrive at stored
                   and slots.empty
                   or: per stage: wait full, quantize, store, arrive at empty | arrive at stored and slots.empty
        last       per tile of h: wait stored | largest magnitudes to memory, add

    Dependent launch: GEMM 1 waits for the routing kernel. A launch of GEMM 2 alone reads offsets and weights at once
    and waits only for the rows.

    ptxas must see that the lanes of a warp stay together. After a single branch on a lane with a loop or many stores in
    it, or a sync_warp in a branch, it resynchronizes them at every stage of every tile (3 to 9 % slower). Code between
    two tiles matters too: a division, or waiting for a scale before it is needed, cost 0.4 us per tile.
    """

    def __init__(self, tile: TileShape, config: GemmConfig):
        tile.check()
        self.t, self.config, self.scheduler = tile, config, TileScheduler(tile, config)
        self.tokens = TokenLoader(tile, config, self.scheduler)

    def __repr__(self) -> str:
        return f"GroupedGemm({self.t}, {self.config})"

    @cute.jit
    def __call__(
        self, mW1, mW2, mX, mIndex, mH, mRaw, mQ, mY, mOffsets, mGateScale, mUpScale, mDownScale, mBias1, mBias2,
        mRowScale, mHScale, mSync, log2_split_k: Int32, grid: Int32, stream,
    ):  # fmt: skip
        """Arguments: the fields of `Tensors`, log2 of the parts of K in GEMM 2, and the number of CTAs."""
        t = self.t
        box = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, t.box_rows, 64), BFloat16, 1)
        box = cute.slice_(box, (None, None, 0))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_x, _ = cpasync.make_tiled_tma_atom(load, mX, box, (t.box_rows, 64))
        if const_expr(self.config.down and not t.uses_mma_sync):
            tma_h, _ = cpasync.make_tiled_tma_atom(load, mQ, box, (t.box_rows, 64))
        else:
            tma_h = tma_x
        tma_raw = tma_h
        if const_expr(self.config.h_columns == 2 and not t.uses_mma_sync):
            tma_raw, _ = cpasync.make_tiled_tma_atom(load, mRaw, box, (t.box_rows, 64))
        x_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, t.BN, t.KB * 64), BFloat16, t.stages)

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, t.stages]
            empty: cute.struct.MemRange[Int64, t.stages]
            slots_full: cute.struct.MemRange[Int64, t.slots]
            slots_empty: cute.struct.MemRange[Int64, t.slots]
            stored: cute.struct.MemRange[Int64, t.slots]
            tiles: cute.struct.Align[cute.struct.MemRange[Int32, 4 * t.slots], 16]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, t.BN * t.slots if self.config.row_scale else 1], 16]
            largest: cute.struct.MemRange[Uint32, t.BN * t.slots if self.config.tracks_amax else 1]
            offsets: cute.struct.MemRange[Int32, MAX_EXPERTS + 1]
            first: cute.struct.MemRange[Int32, MAX_EXPERTS + 1]
            x: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(x_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[Uint32, UNIT_WORDS * t.KB * t.m_blocks * t.stages], 128]
            partial: cute.struct.MemRange[Float32, max(1, (t.KS - 1) * t.m_blocks * 64 * t.BN)]

        self.storage = Storage
        tensors = Tensors(
            mW1, mW2, mX, mIndex, mH, mRaw, mQ, mY, mOffsets, mGateScale, mUpScale, mDownScale, mBias1, mBias2,
            mRowScale, mHScale, mSync,
        )  # fmt: skip
        constants = tuple(Uint32(x) for x in ptx.DEQUANTIZE_CONSTANTS)
        self.kernel(x_layout, tma_x, tma_raw, tma_h, tensors, log2_split_k, constants).launch(
            grid=[grid, 1, 1],
            block=[t.threads, 1, 1],
            min_blocks_per_mp=t.ctas,
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        x_layout: cute.ComposedLayout,
        tma_x: cute.CopyAtom,
        tma_raw: cute.CopyAtom,
        tma_h: cute.CopyAtom,
        tensors: Tensors,
        log2_split_k: Int32,
        constants: tuple,
    ):
        t, config = self.t, self.config
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        wg = cute.arch.make_warp_uniform(tid // 128)

        storage = SmemAllocator().allocate(self.storage)
        s = self.shared(storage, x_layout)
        k64 = (tensors.mW1.shape[2] // UNIT_WORDS, tensors.mW2.shape[2] // UNIT_WORDS)
        extents = Extents((tensors.mW1.shape[1], tensors.mW2.shape[1]), k64, log2_split_k)

        if warp == 0:
            if const_expr(config.gate is not None and not config.gathered):
                cpasync.prefetch_descriptor(tma_x)
            if const_expr(config.down and not t.uses_mma_sync):
                cpasync.prefetch_descriptor(tma_h)
        if warp == 1:
            self.initialize_barriers(s)
        if const_expr(config.tracks_amax):
            for i in cutlass.range(tid, t.BN * t.slots, t.threads, unroll=1):
                s.sLargest[i] = Uint32(0)
        cute.arch.sync_threads()
        if const_expr(config.gathers_x and not config.row_scale):  # x is usually older than the previous kernel
            ptx.into_l2(tensors.mX, Int64(cute.arch.block_idx()[0] * t.threads + tid) * 128)
        if const_expr(config.gate is not None):
            cute.arch.griddepcontrol_wait()  # the previous kernel writes the offsets
        cute.arch.griddepcontrol_launch_dependents()

        if wg == t.NWG:
            cute.arch.setmaxregister_decrease(t.registers[1])
            if warp == 4 * t.NWG:
                self.load_weights(storage.w.data_ptr().toint(), tensors, extents, s)
            elif warp < 4 * t.NWG + 3:
                if const_expr(config.gate is None):
                    cute.arch.griddepcontrol_wait()
                to = storage.x.data_ptr().toint()
                self.tokens.load(to, (tma_x, tma_raw, tma_h), tensors, extents, s)
            elif const_expr(config.both_gemms):
                self.publish_h(tensors, s)
        else:
            cute.arch.setmaxregister_increase(t.registers[0])
            layout = cute.make_layout((128, t.MB * t.BN // 2, t.m_warpgroups, max(1, t.KS - 1)))
            sPartial = storage.partial.get_tensor(layout)
            consumer = Consumer(storage.x.data_ptr(), storage.w.data_ptr(), sPartial, constants)
            self.consume(consumer, tensors, extents, s)

    def shared(self, storage, x_layout) -> Shared:
        t = self.t
        tile_words = storage.tiles.get_tensor(cute.make_layout((4, t.slots)))
        of_rows = cute.make_layout((t.BN, t.slots))
        return Shared(
            storage.full.data_ptr(),
            storage.empty.data_ptr(),
            TileSlots(storage.slots_full.data_ptr(), storage.slots_empty.data_ptr(), tile_words),
            storage.stored.data_ptr(),
            storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner),
            storage.offsets.get_tensor(cute.make_layout(MAX_EXPERTS + 1)),
            storage.first.get_tensor(cute.make_layout(MAX_EXPERTS + 1)),
            storage.scales.get_tensor(of_rows),
            storage.largest.get_tensor(of_rows),
        )

    @cute.jit
    def initialize_barriers(self, s: Shared):
        """Called by one warp."""
        t, config = self.t, self.config
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(t.stages):
                cute.arch.mbarrier_init(s.full + i, 65 if config.row_scale else 3)
                cute.arch.mbarrier_init(s.empty + i, t.NWG * 4)
            for i in cutlass.range_constexpr(t.slots):
                cute.arch.mbarrier_init(s.slots.full + i, 1)
                cute.arch.mbarrier_init(s.slots.empty + i, t.NWG * 4 + (3 if config.both_gemms else 2))
                cute.arch.mbarrier_init(s.stored + i, t.NWG * 4)
        cute.arch.mbarrier_init_fence()

    # ---- producers ----

    @cute.jit
    def load_weights(self, to: Int32, tensors: Tensors, extents: Extents, s: Shared):
        """The role of one warp: the tile scheduler, and the weights of its tiles."""
        t, config = self.t, self.config
        lane = cute.arch.lane_idx()
        counted = self.scheduler.count_tile(tensors.mSync, lane) if const_expr(config.both_gemms) else Int32(0)
        if const_expr(config.grouped):
            self.scheduler.scan(tensors.mOffsets, s.sOffsets, s.sFirst)
        else:
            self.scheduler.only_group(tensors.mQ.shape[0], s.sOffsets, s.sFirst)
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        E = tensors.mW1.shape[0] if const_expr(config.gate is not None) else tensors.mW2.shape[0]
        tiles = self.scheduler.tile_list(s.sFirst, E, extents)

        number = Int32(bid)
        if const_expr(config.both_gemms):  # the first tile too: a CTA that does not run yet must own none
            number = cute.arch.shuffle_sync(counted, 0)
        ring, slot, filling = producer_state(), producer_state(), Boolean(True)
        while number < tiles.end:
            tile = self.scheduler.locate(number, tiles, s.sOffsets, s.sFirst, E)
            cute.arch.mbarrier_wait(s.slots.empty + slot.index, slot.phase)
            following = number + grid
            if const_expr(config.both_gemms):
                following = self.scheduler.count_tile(tensors.mSync, lane)  # not waited for: used after this tile
            if lane == 0:
                self.scheduler.publish(s.slots, slot, tile)
            slot = advance(slot, t.slots)
            where = self.scheduler.k_range(tile.m_index, tile.kind, extents)
            boxed = (tile.rows + t.box_rows - 1) // t.box_rows * t.box_rows  # rows of tokens that TMA writes
            if self.tokens.copied_by_lanes(tile.kind != GEMM1):
                boxed = Int32(0)
            filling, ring = self.load_weight_tile(to, tensors, extents, tile, boxed, where, (filling, ring), s)
            number = cute.arch.shuffle_sync(following, 0)
        cute.arch.mbarrier_wait(s.slots.empty + slot.index, slot.phase)
        if lane == 0:
            self.scheduler.publish_end(s.slots, slot)

    @cute.jit
    def load_weight_tile(
        self, to: Int32, tensors: Tensors, extents: Extents, tile: Tile, boxed: Int32, where: KRange, state: tuple,
        s: Shared,
    ):  # fmt: skip
        """The stages of one tile: bulk copies of 64-row blocks. It also expects the bytes of tokens that TMA writes."""
        t, kind, e = self.t, tile.kind, tile.expert
        filling, ring = state
        second = kind == GEMM2
        M64 = extents.m64[1] if second else extents.m64[0]
        K64 = extents.k64[1] if second else extents.k64[0]
        valid = cutlass.min(M64 - where.m_tile * t.m_blocks, Int32(t.m_blocks))
        if const_expr(self.config.quantizes_h):
            valid = cutlass.select_(kind == QUANTIZE, Int32(0), valid)
        source = (tensors.mW2.iterator.toint() if second else tensors.mW1.iterator.toint()) + (
            (Int64(e * M64 + where.m_tile * t.m_blocks) * K64 + where.first) * (UNIT_WORDS * 4)
        )
        for kt in cutlass.range((where.count + (t.KB - 1)) >> t.log2_KB, unroll=1):
            cute.arch.mbarrier_wait(s.empty + ring.index, ring.phase)
            if filling and ring.index >= t.first_stages:  # in the first round: stages should arrive in order
                cute.arch.mbarrier_wait(s.full + (ring.index - t.first_stages), 0)
            filling = filling and ring.index + 1 < t.stages
            blocks = cutlass.min(where.count - kt * t.KB, Int32(t.KB))
            size = blocks * (UNIT_WORDS * 4)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(s.full + ring.index, size * valid + blocks * boxed * 128)
                for b in cutlass.range_constexpr(t.m_blocks):
                    if b < valid:
                        ptx.bulk_copy(
                            to + (ring.index * t.m_blocks + b) * (t.KB * UNIT_WORDS * 4),
                            source + (Int64(b) * K64 + kt * t.KB) * (UNIT_WORDS * 4),
                            size,
                            Int32((s.full + ring.index).toint()),
                        )
            ring = advance(ring, t.stages)
        return filling, ring

    @cute.jit
    def publish_h(self, tensors: Tensors, s: Shared):
        """The role of one warp: keeps the largest magnitude of each row, and counts the tiles of h that are stored."""
        slot = consumer_state()
        tile = self.scheduler.fetch(s.slots, slot)
        while tile.valid:
            if tile.kind != GEMM2:
                cute.arch.mbarrier_wait(s.stored + slot.index, slot.phase)
                self.publish_tile(tile, slot, tensors, s)
            slot = self.scheduler.release((s.slots.empty,), slot)
            tile = self.scheduler.fetch(s.slots, slot)

    @cute.jit
    def publish_tile(self, tile: WorkTile, slot: PipelineState, tensors: Tensors, s: Shared):
        if const_expr(self.config.tracks_amax):
            if tile.kind == GEMM1:
                self.raise_largest(tensors.mHScale, tile, slot, s)
            cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            at = tensors.mSync.iterator + (tile.token_tile + 1)
            cute.arch.atomic_add(at, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def raise_largest(self, mHScale, tile: WorkTile, slot: PipelineState, s: Shared):
        """Move the largest magnitudes from shared to global memory, and set them to zero."""
        for token in cutlass.range(cute.arch.lane_idx(), tile.rows, 32, unroll=1):
            at = mHScale.iterator.toint() + Int64(tile.row + token) * 4
            ptx.raise_to(at, s.sLargest[token, slot.index])
            s.sLargest[token, slot.index] = Uint32(0)

    # ---- consumers ----

    @cute.jit
    def consume(self, consumer: Consumer, tensors: Tensors, extents: Extents, s: Shared):
        """The role of a consumer warp: all tiles."""
        ring, slot = consumer_state(), consumer_state()
        tile = self.scheduler.fetch(s.slots, slot)
        while tile.valid:
            if const_expr(self.config.quantizes_h):
                if tile.kind == QUANTIZE:
                    ring = self.quantize_tile(tile, slot, ring, consumer, tensors, extents, s)
                else:
                    ring = self.multiply_tile(tile, slot, ring, consumer, tensors, extents, s)
            else:
                ring = self.multiply_tile(tile, slot, ring, consumer, tensors, extents, s)
            slot = self.scheduler.release((s.slots.empty, s.stored), slot)
            tile = self.scheduler.fetch(s.slots, slot)

    @cute.jit
    def quantize_tile(
        self, tile: WorkTile, slot, ring: PipelineState, consumer: Consumer, tensors: Tensors, extents: Extents,
        s: Shared,
    ):  # fmt: skip
        """Quantize a part of a token tile of h to NVFP4."""
        t = self.t
        where = self.scheduler.k_range(tile.m_index, Int32(QUANTIZE), extents)
        for kt in cutlass.range((where.count + (t.KB - 1)) >> t.log2_KB, unroll=1):
            cute.arch.mbarrier_wait(s.full + ring.index, ring.phase)
            at = Int32(consumer.x.toint()) + ring.index * (t.KB * t.BN * 128)
            place = (tile.row, tile.rows, where.first, kt)
            quantize.quantize_stage(at, s.sRowScale[None, slot.index], tensors.mQ, place, t, self.config)
            arrive((s.empty,), ring.index)
            ring = advance(ring, t.stages)
        return ring

    @cute.jit
    def multiply_tile(
        self, tile: WorkTile, slot, ring: PipelineState, consumer: Consumer, tensors: Tensors, extents: Extents,
        s: Shared,
    ):  # fmt: skip
        """Compute a tile of a GEMM, by MMAs that are as wide as its tokens need."""
        t = self.t
        if const_expr(t.small > 0):
            if tile.rows <= t.small:
                ring = self.multiply(t.small, tile, slot, ring, consumer, tensors, extents, s)
            else:
                ring = self.multiply(t.BN, tile, slot, ring, consumer, tensors, extents, s)
        else:
            ring = self.multiply(t.BN, tile, slot, ring, consumer, tensors, extents, s)
        return ring

    @cute.jit
    def multiply(
        self, N: cutlass.Constexpr, tile: WorkTile, slot, ring: PipelineState, consumer: Consumer, tensors: Tensors,
        extents: Extents, s: Shared,
    ):  # fmt: skip
        """Compute a tile by MMAs of N tokens: the sums and their epilogue."""
        t, config = self.t, self.config
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        consumer = consumer._replace(wk=wg // t.m_warpgroups, wm=wg % t.m_warpgroups)
        expert, second, rows = tile.expert, tile.kind == GEMM2, tile.rows
        where = self.scheduler.k_range(tile.m_index, tile.kind, extents)
        block = (where.m_tile * t.m_warpgroups + consumer.wm) * t.MB
        scales = self.global_scales(tensors, tensors.mIndex[block] if const_expr(config.joined) else expert, second)
        acc = cute.make_rmem_tensor(t.MB * N // 2, Float32)
        acc.fill(0.0)
        if const_expr(t.uses_mma_sync):
            ring = self.multiply_by_mma_sync(acc, where.count, ring, consumer, s)
        else:
            words = [cute.make_rmem_tensor(16 * t.MB, Uint32) for _ in range(2)]
            ring = self.multiply_by_wgmma(self.wgmma(N, s.sX, acc, words), where.count, ring, consumer, s)
        if const_expr(t.KS > 1):
            self.sum_over_k(acc, consumer)
        if consumer.wk == 0:
            row = tile.row + where.part * (tensors.mY.shape[0] >> extents.log2_split_k)
            place = Place(expert, block, row, rows, where.part)
            of_rows = (s.sRowScale, s.sLargest, slot.index)
            if const_expr(config.both_gemms):
                if second:
                    self.store(N, acc, tensors, scales, of_rows, place, True)
                else:
                    self.store(N, acc, tensors, scales, of_rows, place, False)
            else:
                self.store(N, acc, tensors, scales, of_rows, place, config.down)
        return ring

    @cute.jit
    def store(
        self, N: cutlass.Constexpr, acc, tensors: Tensors, scales, of_rows, place: Place, down: cutlass.Constexpr
    ):
        mOut, mBias = (tensors.mY, tensors.mBias2) if const_expr(down) else (tensors.mH, tensors.mBias1)
        Epilogue(self.t, self.config, N, down).store(acc, Output(mOut, mBias, *scales, *of_rows), place)

    @cute.jit
    def sum_over_k(self, acc, consumer: Consumer):
        """Add up the sums of the warpgroups that split K, in the first of them."""
        t, sPartial, wk, wm = self.t, consumer.sPartial, consumer.wk, consumer.wm
        tid = cute.arch.thread_idx()[0] % 128
        if wk > 0:
            for i in cutlass.range_constexpr(cute.size(acc)):
                sPartial[tid, i, wm, wk - 1] = acc[i]
        cute.arch.barrier(barrier_id=1, number_of_threads=128 * t.NWG)
        if wk == 0:
            for i in cutlass.range_constexpr(cute.size(acc)):
                for j in cutlass.range_constexpr(t.KS - 1):
                    acc[i] = acc[i] + sPartial[tid, i, wm, j]
        cute.arch.barrier(barrier_id=2, number_of_threads=128 * t.NWG)

    @cute.jit
    def global_scales(self, tensors: Tensors, e, second):
        """The global scales of the thread's two rows of the matrix."""
        config = self.config
        if const_expr(config.gate is None):
            return tensors.mDownScale[e], tensors.mDownScale[e]
        a, b = tensors.mGateScale.iterator.toint(), tensors.mUpScale.iterator.toint()
        if const_expr(config.both_gemms):  # selects addresses: selecting values would wait for them here
            down = tensors.mDownScale.iterator.toint()
            a, b = cutlass.select_(second, down, a), cutlass.select_(second, down, b)
        a, b = (cute.make_ptr(Float32, address + Int64(e) * 4, cute.AddressSpace.gmem) for address in (a, b))
        return cute.arch.load(a, Float32), cute.arch.load(b, Float32)

    # ---- consumers: WGMMA ----

    def wgmma(self, N: int, sX, acc, words) -> Wgmma:
        """WGMMAs of N tokens."""
        t = self.t
        mma = sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.K, Float32,
            (1, 1, 1), (64, N), warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, True)
        shape = mma.partition_shape_C((64 * t.MB, N))
        tCrC = cute.make_tensor(acc.iterator, cute.make_layout(shape))
        shape = mma.partition_shape_A((64 * t.MB, 64))
        tCrA = [cute.make_tensor(cute.recast_ptr(w.iterator, dtype=BFloat16), cute.make_layout(shape)) for w in words]
        sX = cute.local_tile(sX, (N, t.KB * 64, t.stages), (0, 0, 0))
        tCrB = mma.make_fragment_B(mma.get_slice(0).partition_B(sX))
        return Wgmma(mma, tCrC, tCrA, tCrB, words)

    @cute.jit
    def multiply_by_wgmma(self, mma: Wgmma, count: Int32, ring: PipelineState, consumer: Consumer, s: Shared):
        """acc += W · Xᵀ over `count` 64-column blocks."""
        t, constants, wk, wm = self.t, consumer.constants, consumer.wk, consumer.wm
        lane = cute.arch.thread_idx()[0] % 128 % 32
        each = t.KB // t.KS  # 64-column blocks of a stage for this warpgroup
        previous = Int32(0)
        for kt in cutlass.range(count >> t.log2_KB, unroll=1):
            begin = wk * each if const_expr(t.KS > 1) else 0
            weights = self.weights_at(consumer.w, begin, wm, ring.index)
            self.wait_full(s.full + ring.index, ring.phase)
            # a uniform index lets the uniform datapath compute descriptors: 3 % of prefill
            ring = PipelineState(cute.arch.make_warp_uniform(ring.index), ring.phase)
            codes, sf = self.load(*weights, 0)
            for kb in cutlass.range_constexpr(each):
                if const_expr(kb + 1 < each):  # hidden behind this block's arithmetic
                    following = self.load(*weights, kb + 1)
                for k0 in cutlass.range_constexpr(0, 4, t.group):
                    steps = range(k0, k0 + t.group)
                    self.wgmma_group(mma, kb % 2, steps, (codes, sf), (begin + kb, ring.index), constants)
                    warpgroup.wait_group(8 // t.group - 1)  # until the fragments to be written next have been read
                if const_expr(kb == (0 if t.group == 4 else 1)):  # by now the previous stage has been read, too
                    self.arrive_if(kt > 0, lane, s.empty, previous)
                if const_expr(kb + 1 < each):
                    codes, sf = following
            previous = ring.index
            ring = advance(ring, t.stages)
        warpgroup.wait_group(0)
        self.arrive_if(count >= t.KB, lane, s.empty, previous)
        left = count & (t.KB - 1)
        if left > 0:  # the rest of K, one 64-column block at a time
            self.wait_full(s.full + ring.index, ring.phase)
            for at in cutlass.range(wk, left, t.KS, unroll=1):
                loaded = self.load(*self.weights_at(consumer.w, at, wm, ring.index), 0)
                self.wgmma_group(mma, 0, range(4), loaded, (at, ring.index), constants)
                warpgroup.wait_group(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(s.empty + ring.index)
            ring = advance(ring, t.stages)
        return ring

    @cute.jit
    def wgmma_group(self, mma: Wgmma, half: cutlass.Constexpr, steps: cutlass.Constexpr, loaded, place, constants):
        """k16 steps of a stage's 64-column block `at`, through one half of the fragment ring."""
        (codes, sf), (at, stage) = loaded, place
        for ks in cutlass.range_constexpr(steps.start, steps.stop):
            self.dequantize(mma.words[half], codes, sf, ks, constants)
        warpgroup.fence()
        for ks in cutlass.range_constexpr(steps.start, steps.stop):
            tCrA, tCrB = mma.tCrA[half][None, None, ks], mma.tCrB[None, None, (ks, at), stage]
            cute.gemm(mma.mma, mma.tCrC, tCrA, tCrB, mma.tCrC)
        warpgroup.commit_group()

    @cute.jit
    def arrive_if(self, condition, lane, barriers, index):
        if condition:
            if lane == 0:
                cute.arch.mbarrier_arrive(barriers + index)

    @cute.jit
    def wait_full(self, barrier, phase):
        """Wait for a stage before WGMMAs, which read through the async proxy."""
        cute.arch.mbarrier_wait(barrier, phase)
        if const_expr(self.config.gathers_x):
            cute.arch.fence_proxy(kind="async.shared", space="cta")  # cp.async writes through the generic proxy

    # ---- consumers: mma.sync ----

    @cute.jit
    def multiply_by_mma_sync(self, acc, count: Int32, ring: PipelineState, consumer: Consumer, s: Shared):
        """The same with mma.sync: each warp computes its 16 rows."""
        t, constants, wk, wm = self.t, consumer.constants, consumer.wk, consumer.wm
        each = t.KB // t.KS
        for _ in cutlass.range(count >> t.log2_KB, unroll=1):
            weights = self.weights_at(consumer.w, wk * each, wm, ring.index)
            cute.arch.mbarrier_wait(s.full + ring.index, ring.phase)
            for kb in cutlass.range_constexpr(each):
                loaded = self.load(*weights, kb)
                self.mma_sync_block(acc, consumer.x, loaded, constants, ring.index * t.KB + wk * each + kb)
            arrive((s.empty,), ring.index)
            ring = advance(ring, t.stages)
        left = count & (t.KB - 1)
        if left > 0:
            cute.arch.mbarrier_wait(s.full + ring.index, ring.phase)
            for at in cutlass.range(wk, left, t.KS, unroll=1):
                weights = self.weights_at(consumer.w, at, wm, ring.index)
                self.mma_sync_block(acc, consumer.x, self.load(*weights, 0), constants, ring.index * t.KB + at)
            arrive((s.empty,), ring.index)
            ring = advance(ring, t.stages)
        return ring

    @cute.jit
    def mma_sync_block(self, acc, x: cute.Pointer, loaded, constants, at):
        """64 columns of weights times the tokens' 64-column block `at` of the ring."""
        lane = cute.arch.lane_idx()
        codes, sf = loaded
        words = cute.make_rmem_tensor(16, Uint32)
        for ks in cutlass.range_constexpr(4):
            self.dequantize(words, codes, sf, ks, constants)
        # for ldmatrix, lane 8 i + r gives the address of 16-byte chunk i of row r; chunks of 128-byte rows are swizzled
        row = Int32(x.toint()) + lane % 8 * 128
        for half in cutlass.range_constexpr(2):
            b = ptx.ldmatrix(row + (((half * 4 + lane // 8) ^ (lane % 8)) << 4) + at * (self.t.BN * 128))
            for i in cutlass.range_constexpr(2):
                ks = half * 2 + i
                d = ptx.mma([words[4 * ks + j] for j in range(4)], b[2 * i], b[2 * i + 1], [acc[j] for j in range(4)])
                for j in cutlass.range_constexpr(4):
                    acc[j] = d[j]

    # ---- consumers: weights, from shared memory to registers ----

    @cute.jit
    def weights_at(self, w: cute.Pointer, block, wm, stage):
        """Addresses, for `load`, of this thread's codes and block scales in 64-column block `block` of a stage;
        computed before the wait for the stage. Codes are the first 2048 bytes of a unit."""
        t = self.t
        tid = cute.arch.thread_idx()[0] % 128
        at = Int32(w.toint()) + ((stage * t.m_blocks + wm * t.MB) * t.KB + block) * (UNIT_WORDS * 4)
        return at + tid * 16, at + 2048 + tid // 4 * 8

    @cute.jit
    def load(self, at_codes, at_sf, after: cutlass.Constexpr):
        """Load this thread's 32 codes and 8 block scales of each 64-row block, `after` 64-column blocks further on."""
        codes, sf = [], []
        for m in cutlass.range_constexpr(self.t.MB):
            ahead = (m * self.t.KB + after) * (UNIT_WORDS * 4)
            for at, words, out in ((at_codes, 4, codes), (at_sf, 2, sf)):
                pointer = cute.make_ptr(Uint32, at + ahead, cute.AddressSpace.smem, assumed_align=4 * words)
                out.append(cute.make_rmem_tensor(words, Uint32))
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(words)), out[m])
        return codes, sf

    @cute.jit
    def dequantize(self, words, codes, sf, ks: cutlass.Constexpr, constants):
        """Dequantize k16 step ks into its registers of the A fragment."""
        for m in cutlass.range_constexpr(self.t.MB):
            registers = ptx.dequantize(codes[m][ks], ptx.scales_of_step(sf[m], ks), constants)
            for j in cutlass.range_constexpr(4):
                words[j + 4 * m + 4 * self.t.MB * ks] = registers[j]
