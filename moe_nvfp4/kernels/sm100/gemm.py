"""The grouped NVFP4 GEMM of Blackwell: gate and up (or down) of all experts in one persistent launch.

    D[weight row, token] = sum over K of (w * w_sf) * (x * x_sf)        tcgen05.mma, fp32, in TMEM

Weights are the M operand: `blocks` blocks of 128 rows (neighbours in the layout of `pack`, which interleaves rows of
gate and up) have an accumulator each and share every token tile. Tokens are N: a tile holds up to `tokens` rows of one
expert, and its MMAs are as wide as it has rows, rounded up to what the epilogue reads at a time (16, or 32 with a
gate). So 3 tokens cost 16 columns and 40 cost 48.

With `ctas` = 2 a pair of CTAs works on one token tile: each has its own weight rows, accumulators and epilogue, and
loads half of the tokens' codes. The first CTA issues the MMAs of both.

Tile map: every CTA sums the experts' tile counts from the offsets (one warp, a scan), so nothing waits for the host.
Unrouted rows (from offsets[E] on) are written as zeros.

Edges: K ends in zero codes (TMA fills with zeros, and padding scales are zero). Weight rows and tokens beyond the end
are computed but not stored; the scales of such rows may hold anything.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr, cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from moe_nvfp4.kernels.common.pipeline import advance, consumer_state, producer_state
from moe_nvfp4.kernels.sm100 import ptx
from moe_nvfp4.kernels.sm100.config import BOXES, BYTES_K, CHUNK, ROWS, SF_TILE, GemmConfig
from moe_nvfp4.kernels.sm100.epilogue import Epilogue, Tensors
from moe_nvfp4.kernels.sm100.scheduler import TileMap, TileScheduler

WEIGHTS, TOKENS, MMA, THREADS = 8, 9, 10, 352  # warps; 0 to 7 are the epilogue


def tma_boxes(storage, rows: int, count: int) -> cute.Tensor:
    """`count` boxes of `rows` swizzled rows in shared memory."""
    layout = cute.make_layout((rows, BYTES_K, count), stride=(BYTES_K, 1, rows * BYTES_K))
    return storage.get_tensor(layout, swizzle=cute.make_swizzle(3, 4, 3))


def swizzled_tma(tensor: cute.Tensor, rows: int, ctas: int) -> tuple:
    """(atom, tensor of coordinates) for such boxes of a tensor of bytes."""
    layout = cute.make_layout((rows, BYTES_K), stride=(BYTES_K, 1))
    one = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, layout)
    return cpasync.make_tiled_tma_atom(load_by(ctas), tensor, one, (rows, BYTES_K))


def scales_tma(sf: cute.Tensor, k_steps: int, ctas: int) -> tuple:
    """(atom, tensor of coordinates) for boxes of four 128x4 scale tiles, of K = 256; zeros beyond the last one."""
    words = SF_TILE // 4
    # Dynamic on purpose: a dimension known to be 1 is left out of the DSL's copies, but not out of its tensor maps.
    tiles = Int32(sf.shape[0] // (k_steps * SF_TILE))
    shape = tiles, k_steps, words
    layout = cute.make_layout(shape, stride=(k_steps * words, words, 1))
    sf = cute.make_tensor(cute.recast_ptr(sf.iterator, dtype=Uint32), layout)
    box = cute.make_layout((1, 4, words), stride=(4 * words, words, 1))
    return cpasync.make_tiled_tma_atom(load_by(ctas), sf, box, (1, 4, words))


def load_by(ctas: int) -> cpasync.CopyBulkTensorTileG2SOp:
    """The TMA operation. In a pair, the copies of both CTAs complete at the first CTA's mbarrier."""
    return cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE)


def load_box(atom, tensor: cute.Tensor, row: Int32, k: Int32, boxes: cute.Tensor, box: Int32, rows: int, barrier):
    """Load one TMA box: `rows` rows from `row` on of K tile k, into box `box` of `boxes`; zeros beyond the tensor."""
    gA = cute.local_tile(cute.domain_offset((row, 0), tensor), (rows, BYTES_K), (0, None))
    tAsA, tAgA = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(gA, 0, 2)
    )
    cute.copy(atom, tAgA[None, k], tAsA[None, box], tma_bar_ptr=barrier)


def load_sf(atom, sf: cute.Tensor, tile: Int32, k: Int32, slots, slot: Int32, barrier):
    """Load the scales of 128 rows for K tile k into a slot for four 128x4 tiles."""
    words = SF_TILE // 4
    to = cute.recast_ptr(slots.data_ptr() + slot * (4 * SF_TILE), dtype=Uint32)
    box = cute.make_tensor(to, cute.make_layout((1, 4, words), stride=(4 * words, words, 1)))
    gSF = cute.local_tile(sf, (1, 4, words), (tile, k, 0))
    tAsA, tAgA = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(box, 0, 3), cute.group_modes(gSF, 0, 3)
    )
    cute.copy(atom, tAgA, tAsA, tma_bar_ptr=barrier)


class Source(NamedTuple):
    """Where a stage of the ring is loaded from: codes and scales, of weights or of tokens, each with its TMA atom."""

    tma: cute.CopyAtom
    codes: cute.Tensor
    tma_sf: cute.CopyAtom
    sf: cute.Tensor


class Operands(NamedTuple):
    """Addresses of stage 0 in shared memory, and of the scales in TMEM (the last two)."""

    w: Int32
    x: Int32
    w_sf: Int32
    x_sf: Int32
    sfw: Int32
    sfx: Int32


class GroupedGemm:
    """The kernel of a `GemmConfig`.

    Warp roles
        0-7  epilogue: two groups of four take 16 tokens in turn: TMEM -> scales, bias, gate -> shared memory
             (transposed; one buffer, which the groups hand to each other) -> bf16, NVFP4 or fp32 rows
        8    loads weights by TMA, codes and block scales, into a ring of `stages` K tiles of 256
        9    loads tokens in the same way, into the same stages
        10   copies scales from shared memory to TMEM, issues MMAs (in a pair, only in the first CTA); owns the TMEM
             allocation

    Pipelines (producer role -> consumer role; arrivals)
        full[stage]   loads -> MMA       2 + bytes    the K tile is in shared memory (in a pair: of both CTAs)
        empty[stage]  MMA -> loads       1 (commit)   the MMAs that read it are done
        acc_full      MMA -> epilogue    1 (commit)   the sums of a tile are complete
        acc_empty     epilogue -> MMA    8 (warps)    the next tile's accumulators may be written (in a pair: 16)

    A pair uses full and acc_empty of the first CTA: the copies of the second CTA complete there, and the first CTA
    expects the bytes of both. A commit arrives at empty, or at acc_full, of both CTAs. Before a CTA ends, its weights
    warp waits for the last of these.

    Timeline of each role, over the same tiles in the same order
        loads     per K tile: wait empty, expect the bytes, issue the copies; the ring runs across tiles
        MMA       per tile: wait acc_empty; per K tile: wait full, copy scales, issue MMAs, commit empty; then commit
                  acc_full
        epilogue  per tile: fetch scales and biases, wait acc_full, drain 16 tokens at a time, arrive acc_empty

    Two tiles are in TMEM at a time, at columns 0 and `second`. If they do not both fit, they overlap: the epilogue
    drains the shared columns first and arrives at acc_empty then, not at the end. Because it drains tiles in order,
    this one arrival also says that everything before has been drained.

    Dependent launch: weights and offsets are older than the previous kernel (every kernel here waits for its
    predecessor before it lets the next one start, and the backend ensures this where it packs weights), so the tile map
    and the weights need not wait for its end. Tokens and all writes wait.
    """

    def __init__(self, config: GemmConfig):
        assert config.legal, config
        self.c, self.scheduler = config, TileScheduler(config)
        self.epilogue = Epilogue(config, self.scheduler)

    def __repr__(self) -> str:
        return f"GroupedGemm({self.c})"

    @cute.jit
    def __call__(
        self,
        mW: cute.Tensor,  # uint8 [N, K/2, E]
        mWSF: cute.Tensor,  # uint8, `pack_sf`, flat
        mX: cute.Tensor,  # uint8 [R, K/2]
        mXSF: cute.Tensor,  # uint8, grouped 128x4 layout, flat
        mXScale: cute.Tensor,  # from here on see `epilogue.Tensors`
        mOffsets: cute.Tensor,
        mScale0: cute.Tensor,
        mScale1: cute.Tensor,
        mBias: cute.Tensor,
        mOut: cute.Tensor,
        mOutSF: cute.Tensor,
        mOutScale: cute.Tensor,
        mHScale: cute.Tensor,
        mOrder: cute.Tensor,
        grid: Int32,
        stream,
    ):
        c, t = self.c, self.c.tile
        w = Source(*swizzled_tma(mW, ROWS, t.ctas), *scales_tma(mWSF, c.k_steps, t.ctas))
        x = Source(*swizzled_tma(mX, t.box, t.ctas), *scales_tma(mXSF, c.k_steps, t.ctas))

        @cute.struct
        class Storage:
            w: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * t.blocks * ROWS * BYTES_K], 1024]
            x: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * t.tokens // t.ctas * BYTES_K], 1024]
            w_sf: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * t.blocks * 4 * SF_TILE], 128]
            x_sf: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * t.sf_tiles * 4 * SF_TILE], 128]
            out: cute.struct.Align[cute.struct.MemRange[Float32, CHUNK * ROWS], 128]
            scale: cute.struct.Align[cute.struct.MemRange[Float32, 2 * t.tokens], 16]
            ends: cute.struct.MemRange[Int32, c.map_size]
            sf_tiles: cute.struct.MemRange[Uint16, c.map_size]
            full: cute.struct.MemRange[Int64, c.stages]
            empty: cute.struct.MemRange[Int64, c.stages]
            acc: cute.struct.MemRange[Int64, 2]
            tmem: cute.struct.MemRange[Int32, 1]

        self.storage = Storage
        tensors = Tensors(
            mXScale, mOffsets, mScale0, mScale1, mBias, mOut, mOutSF, mOutScale, mHScale, mOrder
        )  # fmt: skip
        self.kernel(w, x, tensors).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1] if t.ctas == 2 else None,
            min_blocks_per_mp=1, stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, w: Source, x: Source, tensors: Tensors):
        c, t = self.c, self.c.tile
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        s = SmemAllocator().allocate(self.storage)
        full, empty, acc_full = s.full.data_ptr(), s.empty.data_ptr(), s.acc.data_ptr()
        acc_empty = acc_full + 1

        if warp == WEIGHTS:
            for atom in (w.tma, w.tma_sf, x.tma, x.tma_sf):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(full + i, 2)
                    cute.arch.mbarrier_init(empty + i, 1)
                cute.arch.mbarrier_init(acc_full, 1)
                cute.arch.mbarrier_init(acc_empty, 8 * t.ctas)
            cute.arch.mbarrier_init_fence()
        tile_map, tmem = self.begin(tensors, tid, warp == MMA, s)

        if warp == WEIGHTS:
            self.load_weights(w, tile_map, s)
        elif warp == TOKENS:
            cute.arch.griddepcontrol_wait()
            self.load_tokens(x, tile_map, s)
        elif warp == MMA:
            if self.leads():
                self.multiply(tile_map, tmem, s)
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            self.epilogue.zero_unrouted_rows(tensors, tid)
            self.epilogue.run(tensors, tile_map, tmem, tid, warp, s)

        self.end(warp == MMA, s)

    @cute.jit
    def begin(self, tensors: Tensors, tid: Int32, owns_tmem, s):
        """Called by all warps after the barriers are initialized: (tile map, first TMEM column)."""
        c, pair = self.c, self.c.tile.ctas == 2
        if owns_tmem:
            cute.arch.alloc_tmem(c.tile.columns, s.tmem.data_ptr(), pair)
            cute.arch.relinquish_tmem_alloc_permit(pair)
        in_map = cute.make_layout(c.map_size)
        tile_map = TileMap(tensors.mOffsets, s.ends.get_tensor(in_map), s.sf_tiles.get_tensor(in_map))
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            self.scheduler.make_map(tile_map, tid)
        ptx.tmem_fence(before=True)
        self.sync_all()
        ptx.tmem_fence(before=False)
        return tile_map, s.tmem.get_tensor(cute.make_layout(1))[0]

    @cute.jit
    def end(self, owns_tmem, s):
        """Called by all warps when their work is done."""
        ptx.tmem_fence(before=True)
        self.sync_all()
        if owns_tmem:
            ptx.tmem_fence(before=False)
            place = cute.arch.retrieve_tmem_ptr(Float32, 16, s.tmem.data_ptr())
            cute.arch.dealloc_tmem(place, self.c.tile.columns, self.c.tile.ctas == 2)

    @cute.jit
    def sync_all(self):
        """Synchronize all threads of the CTA, or of the pair."""
        cute.arch.sync_threads()
        if const_expr(self.c.tile.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # ---- warps 8 and 9: loads --------------------------------------------------------------------

    def leads(self):
        """Whether this CTA issues the MMAs: in a pair, the first does."""
        return cute.arch.block_idx()[0] % self.c.tile.ctas == 0

    @cute.jit
    def load_weights(self, source: Source, tile_map: TileMap, s):
        c, t = self.c, self.c.tile
        full, empty = s.full.data_ptr(), s.empty.data_ptr()
        sW = tma_boxes(s.w, ROWS, c.stages * t.blocks)
        tile, step, count = self.scheduler.my_tiles(tile_map)
        ring = producer_state()
        while tile < count:
            work = self.scheduler.locate(tile, tile_map)
            first, k_tiles, _ = self.scheduler.k_range(tile)
            for i in cutlass.range(k_tiles, unroll=1):
                k = first + i
                bar = full + ring.index
                cute.arch.mbarrier_wait(empty + ring.index, ring.phase)
                if self.leads():
                    with cute.arch.elect_one():
                        size = t.ctas * t.blocks * (ROWS * BYTES_K + 4 * SF_TILE)
                        cute.arch.mbarrier_arrive_and_expect_tx(bar, size)
                for b in cutlass.range_constexpr(t.blocks):
                    row = self.scheduler.block_row(work.row_tile, b)
                    sf_tile = work.expert * c.sf_row_tiles + self.scheduler.block_sf(work.row_tile, b)
                    slot = ring.index * t.blocks + b
                    load_box(source.tma, source.codes[None, None, work.expert], row, k, sW, slot, ROWS, bar)
                    load_sf(source.tma_sf, source.sf, sf_tile, k, s.w_sf, slot, bar)
                ring = advance(ring, c.stages)
            tile += step
        if const_expr(t.ctas == 2):
            # The last MMAs signal the barriers of both CTAs, which must still exist then.
            for _ in cutlass.range(c.stages, unroll=1):
                cute.arch.mbarrier_wait(empty + ring.index, ring.phase)
                ring = advance(ring, c.stages)

    @cute.jit
    def load_tokens(self, source: Source, tile_map: TileMap, s):
        c, t = self.c, self.c.tile
        full, empty = s.full.data_ptr(), s.empty.data_ptr()
        sX = tma_boxes(s.x, t.box, c.stages * BOXES)
        tile, step, count = self.scheduler.my_tiles(tile_map)
        ring = producer_state()
        while tile < count:
            work = self.scheduler.locate(tile, tile_map)
            # each CTA of a pair has half of the MMA's width
            width, rank = self.scheduler.width(work.rows) // t.ctas, cute.arch.block_idx()[0] % t.ctas
            first, used = work.first + rank * width, (width + t.box - 1) // t.box
            sf_tile, sf_tiles = work.sf_tile + work.row_in_group // 128, (work.rows + 127) // 128
            for k in cutlass.range(c.k_tiles, unroll=1):
                bar = full + ring.index
                cute.arch.mbarrier_wait(empty + ring.index, ring.phase)
                if self.leads():
                    with cute.arch.elect_one():
                        size = t.ctas * (used * (t.box * BYTES_K) + sf_tiles * (4 * SF_TILE))
                        cute.arch.mbarrier_arrive_and_expect_tx(bar, size)
                for b in cutlass.range_constexpr(BOXES):
                    if b < used:
                        load_box(source.tma, source.codes, first + b * t.box, k, sX, ring.index * BOXES + b, t.box, bar)
                for j in cutlass.range_constexpr(t.sf_tiles):
                    if j < sf_tiles:
                        load_sf(source.tma_sf, source.sf, sf_tile + j, k, s.x_sf, ring.index * t.sf_tiles + j, bar)
                ring = advance(ring, c.stages)
            tile += step

    # ---- warp 10: scales and MMAs ----------------------------------------------------------------

    @cute.jit
    def multiply(self, tile_map: TileMap, tmem: Int32, s):
        c, t = self.c, self.c.tile
        full, empty, acc_full = s.full.data_ptr(), s.empty.data_ptr(), s.acc.data_ptr()
        acc_empty = acc_full + 1
        tile, step, count = self.scheduler.my_tiles(tile_map)
        sfw = tmem + t.columns - t.operand_columns  # [step of 64][block] of 4 columns; sfx: [step][tile] of 4 columns
        sfx = sfw + 16 * t.blocks
        operands = Operands(
            s.w.data_ptr().toint(), s.x.data_ptr().toint(), s.w_sf.data_ptr().toint(), s.x_sf.data_ptr().toint(),
            sfw, sfx,
        )  # fmt: skip
        ring, turn = consumer_state(), Int32(0)
        while tile < count:
            work = self.scheduler.locate(tile, tile_map)
            instruction = ptx.instruction_descriptor(ROWS * t.ctas, self.scheduler.width(work.rows))
            acc = tmem + turn * t.second
            # 32 rows per column; a tile may start at row 64 of its scale tile
            sfb = sfx + (work.row_in_group % 128) // 32
            if const_expr(t.ctas == 2):
                ptx.wait_for_pair(acc_empty, turn ^ 1)
            else:
                cute.arch.mbarrier_wait(acc_empty, turn ^ 1)
            ptx.tmem_fence(before=False)
            for k in cutlass.range(c.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(full + ring.index, ring.phase)
                with cute.arch.elect_one():
                    self.issue_k_tile(k, ring.index, operands, (acc, sfb, instruction, work.rows))
                    self.commit(empty + ring.index)
                ring = advance(ring, c.stages)
            with cute.arch.elect_one():
                self.commit(acc_full)
            turn ^= 1
            tile += step

    @cute.jit
    def issue_k_tile(self, k: Int32, stage: Int32, at: Operands, tile: tuple):
        """From one thread: for each 64 codes of a K tile, the copies of scales and an MMA per block of weights."""
        c, t, (acc, sfb, instruction, rows) = self.c, self.c.tile, tile
        xd = ptx.operand_descriptor(at.x + stage * (t.tokens // t.ctas * BYTES_K))
        for i in cutlass.range_constexpr(4):
            if 4 * k + i < c.k_steps:
                for j in cutlass.range_constexpr(t.sf_tiles):
                    if j * 128 < rows:
                        x_sf = at.x_sf + (stage * t.sf_tiles + j) * (4 * SF_TILE) + i * SF_TILE
                        sfx = at.sfx + (i * t.sf_tiles + j) * 4
                        ptx.copy_scales(sfx, ptx.scales_descriptor(x_sf), t.ctas)
                for b in cutlass.range_constexpr(t.blocks):
                    w_sf = at.w_sf + (stage * t.blocks + b) * (4 * SF_TILE) + i * SF_TILE
                    sfa = at.sfw + (i * t.blocks + b) * 4
                    ptx.copy_scales(sfa, ptx.scales_descriptor(w_sf), t.ctas)
                    wd = ptx.operand_descriptor(at.w + (stage * t.blocks + b) * (ROWS * BYTES_K))
                    # a step is 64 codes, 32 bytes: 2 in the units of a descriptor
                    ptx.mma(
                        acc + b * t.tokens, wd + 2 * i, xd + 2 * i, instruction, sfa, sfb + i * t.sf_tiles * 4,
                        (k > 0) | (i > 0), t.ctas,
                    )  # fmt: skip

    def commit(self, barrier):
        """Arrive at the barrier (in a pair, at those of both CTAs) when the MMAs issued so far are done."""
        if self.c.tile.ctas == 2:
            tcgen05.commit(barrier, 0b11, tcgen05.CtaGroup.TWO)
        else:
            tcgen05.commit(barrier)
