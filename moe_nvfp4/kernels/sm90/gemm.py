"""The grouped GEMMs of a layer on Hopper, both in one launch: D[weight row, token] = W (NVFP4) · Xᵀ (bf16).

Weights are the MMA's A operand (M), dequantized in registers from the layout of `sm90.pack`; tokens
are B (N = 8 .. 256), from shared memory. Up to 8 tokens a warp uses its own mma.sync, whose
fragments are WGMMA's: fewer instructions and no waiting, where issue slots are what decode is short of.
A group's last tile is computed by WGMMAs of `small` tokens where they suffice: between 16 and 100 tokens
the tensor cores' time counts beside the bytes.
NVFP4 rows stand as bf16 code * sf too, which is exact; sums are fp32, and global scales (and the row's scale) multiply
the sum: `value = code * sf * global_scale`. How h becomes such rows is in `sm90.quantize`.

Work. A tile is BM weight rows of one expert times BN of its tokens. The list of tiles follows from the
group offsets on the device: those of GEMM 1, those that quantize h, then those of GEMM 2, each [expert]
[RASTER token tiles][weight tile, or part of h][token tile], in GEMM 2 with 2^halvings parts of K beside each
weight tile, which end up in rows of their own, for the combine to add; nobody waits for the host and experts
without tokens cost nothing. Weight tiles that concurrent CTAs share are read from memory once. Persistent CTAs
draw tiles from a counter, so that GEMM 2 fills the gaps GEMM 1 leaves, and whoever waits for a row of h waits
for CTAs that run.

Warp roles (128 * (NWG + 1) threads)
    warps 0..4 NWG-1   consumers, in warpgroups. KS of them split K among themselves (summed through
                       shared memory), the rest split the rows: MB blocks of 64 rows each. Or they quantize
    next warp          draws tiles, publishes them, issues the bulk copies of weights
    next two warps     copy tokens, or h to be quantized: boxes of 16 or 8 rows by TMA, or 16 bytes a lane where
                       they are gathered or few, TMA taking its time. Rows beyond the group hold anything: a token
                       is a column of its own, not stored. The first of them also brings the scales of rows
    last warp          tells other CTAs the largest magnitudes of rows of h, and which are stored

Pipelines (mbarriers: arrivals)
    full[stage]    1 with the transaction bytes of weights and tokens, 1 of each token warp (it may have
                   nothing to copy, but must not fall behind), and where lanes copy 1 of each when its
                   copies are there, expected and made good by the lane itself. Where rows have scales, 1 of each
                   lane of the token warps: they come with a tile's last stage, or the first if it is to be quantized
    empty[stage]   1 per consumer warp, after the WGMMAs that read the stage's tokens (its codes were
                   in registers long before). The ring of stages runs on from tile to tile
    told[slot]     1, a tile's four numbers are in shared memory
    heard[slot]    1 per other warp that is done with them: nobody is `slots` tiles ahead of another
    stored[slot]   1 per consumer warp that is done with them, and so with its stores
    mSync[1 + t]   in global memory: tiles of token tile t of h that are stored, then also those that are
                   quantized. The last warp adds them, since the fence before it takes microseconds while
                   memory is busy

Timelines
    weights    scan of the offsets | per tile: publish, draw the next | per stage: wait empty (in the first round
               also for what half a ring before has come, so that it comes in order), copy
    tokens     per tile: wait told, but for GEMM 1 wait for h | per stage: wait empty, copy, scales, arrive
    consumer   per tile: wait told, ask for scales | per stage: wait full, per 64 columns: load codes
               and scales, dequantize k16 by k16 into one half of the fragment ring while the WGMMAs of
               the other half run | drain, sum over KS, epilogue: scales, bias, gate, largest magnitudes,
               store | arrive at stored and heard
               or: per stage: wait full, quantize, store, arrive at empty | arrive at stored and heard
    last       per tile of h: wait stored | largest magnitudes to memory, add

ptxas must see that the lanes of a warp stay together: one branch on a lane with a loop or a store of many
behind it, or a sync_warp in a branch, and it resynchronizes them at every stage of every tile (3 to 9 % slower).
What stands between two tiles counts too: a division, or a scale waited for before it is needed, was 0.4 us a tile.

Programmatic dependent launch: GEMM 1 waits for the routing kernel; a launch of GEMM 2 alone reads
offsets and weights at once and waits only for the rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from moe_nvfp4.kernels.common import arithmetic
from moe_nvfp4.kernels.sm90 import ptx as ptx
from moe_nvfp4.kernels.sm90 import quantize as h_rows
from moe_nvfp4.kernels.sm90.config import MAX_EXPERTS, Tile, Work
from moe_nvfp4.kernels.sm90.pack import UNIT_WORDS

GEMM1, GEMM2, QUANTIZE = 0, 1, 2  # kinds of tiles
QUANTIZED = 16  # 64-column blocks of a tile that is to be quantized
RASTER = 16  # token tiles that share a weight tile before the next weight tile begins


# ---- the tile list -------------------------------------------------------------------------------


@cute.jit
def _scan(mOffsets, sOffsets, sFirst, BN: cutlass.Constexpr):
    """A warp: offsets into shared memory, and sFirst[e] = token tiles of the experts before e."""
    E, lane = mOffsets.shape[0] - 1, cute.arch.lane_idx()
    rows, base = mOffsets[E], Int32(0)
    for i in cutlass.range((E + 31) // 32, unroll=4):
        e = cutlass.min(i * 32 + lane, E)
        low, high = mOffsets[e], mOffsets[cutlass.min(e + 1, E)]
        tiles = (high - low + (BN - 1)) // BN
        before = arithmetic.sum_of_lanes_before(tiles)
        sOffsets[e] = low
        sFirst[e] = base + before
        base += cute.arch.shuffle_sync(before + tiles, 31)
    sOffsets[E] = rows
    sFirst[E] = base
    cute.arch.sync_warp()


@cute.jit
def _tile_at(sOffsets, sFirst, E: Int32, tile: Int32, mtiles: Int32, BN: cutlass.Constexpr):
    """Number of a tile within its GEMM -> (expert, weight tile, first row, rows, token tile). By a whole warp."""
    lane = cute.arch.lane_idx()
    token_tile = tile // mtiles
    e = Int32(-1)
    for i in cutlass.range((E + 31) // 32, unroll=4):
        at = i * 32 + lane
        below = sFirst[cutlass.min(at, E)] <= token_tile and at < E
        e += cute.arch.popc(cute.arch.vote_ballot_sync(below))
    first = sFirst[e]
    local = tile - first * mtiles
    width, mt, nt = sFirst[e + 1] - first, local, Int32(0)
    if width > 1:  # divisions take longer than all else here
        if width > RASTER:
            nt = local // (RASTER * mtiles) * RASTER
            local -= nt * mtiles
            width = cutlass.min(width - nt, Int32(RASTER))
        mt = local // width
        nt += local - mt * width
    row = sOffsets[e] + nt * BN
    return e, mt, row, cutlass.min(sOffsets[e + 1] - row, Int32(BN)), first + nt


# ---- the kernel ----------------------------------------------------------------------------------


class GroupedGemm:
    def __init__(self, tile: Tile, work: Work):
        tile.check()
        self.t, self.work = tile, work

    def __repr__(self) -> str:
        return f"GroupedGemm({self.t}, {self.work})"

    @cute.jit
    def __call__(
        self,
        mW1: cute.Tensor,  # int32 [E, M64, K64 * 576], `sm90.pack`; what a launch does not use may be anything
        mW2: cute.Tensor,
        mX: cute.Tensor,  # bf16 [T, K]
        mIndex: cute.Tensor,  # int32 [R], row r of GEMM 1 is mX[mIndex[r]]
        mH: cute.Tensor,  # [R, I] (raw gate: [R, 2I])
        mRaw: cute.Tensor,  # what is quantized: mH as bf16, so fp32 values have two columns
        mQ: cute.Tensor,  # bf16 [R, I], what GEMM 2 reads: mH, or its quantized rows, which may take the place of mH's
        mY: cute.Tensor,  # [2^halvings * R, H]
        mOffsets: cute.Tensor,  # int32 [E + 1]
        mGateScale: cute.Tensor,  # fp32 [E], times the gate rows
        mUpScale: cute.Tensor,
        mDownScale: cute.Tensor,
        mBias1: cute.Tensor,  # [E, rows of the matrix]
        mBias2: cute.Tensor,
        mRowScale: cute.Tensor,  # fp32 [T], the global scales of the rows of mX
        mHScale: cute.Tensor,  # h to be quantized: fp32 [E] its scales; of bf16 rows [R] zeros, raised to max |h|
        mSync: cute.Tensor,  # int32 [1 + token tiles], zeros
        halvings: Int32,  # of K in GEMM 2
        grid: Int32,
        stream,
    ):
        t = self.t
        box = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, t.box, 64), BFloat16, 1)
        box = cute.slice_(box, (None, None, 0))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_x, _ = cpasync.make_tiled_tma_atom(load, mX, box, (t.box, 64))
        if const_expr(self.work.down and not t.warpwise):
            tma_h, _ = cpasync.make_tiled_tma_atom(load, mQ, box, (t.box, 64))
        else:
            tma_h = tma_x
        tma_raw = tma_h
        if const_expr(self.work.width == 2 and not t.warpwise):
            tma_raw, _ = cpasync.make_tiled_tma_atom(load, mRaw, box, (t.box, 64))
        x_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, t.BN, t.KB * 64), BFloat16, t.stages)

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, t.stages]
            empty: cute.struct.MemRange[Int64, t.stages]
            told: cute.struct.MemRange[Int64, t.slots]
            heard: cute.struct.MemRange[Int64, t.slots]
            stored: cute.struct.MemRange[Int64, t.slots]
            tiles: cute.struct.Align[cute.struct.MemRange[Int32, 4 * t.slots], 16]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, t.BN * t.slots if self.work.row_scale else 1], 16]
            largest: cute.struct.MemRange[Uint32, t.BN * t.slots if self.work.measured else 1]
            offsets: cute.struct.MemRange[Int32, MAX_EXPERTS + 1]
            first: cute.struct.MemRange[Int32, MAX_EXPERTS + 1]
            x: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(x_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[Uint32, UNIT_WORDS * t.KB * t.blocks * t.stages], 128]
            part: cute.struct.MemRange[Float32, max(1, (t.KS - 1) * t.blocks * 64 * t.BN)]

        self.storage = Storage
        self.kernel(
            x_layout, tma_x, tma_raw, tma_h, mW1, mW2, mX, mIndex, mH, mRaw, mQ, mY, mOffsets, mGateScale, mUpScale,
            mDownScale, mBias1, mBias2, mRowScale, mHScale, mSync, halvings, tuple(Uint32(x) for x in ptx.HELD),
        ).launch(
            grid=[grid, 1, 1], block=[t.threads, 1, 1], min_blocks_per_mp=t.ctas, stream=stream, use_pdl=True,
            preferred_smem_carveout=100
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x_layout: cute.ComposedLayout,
        tma_x: cute.CopyAtom,
        tma_raw: cute.CopyAtom,
        tma_h: cute.CopyAtom,
        mW1: cute.Tensor,
        mW2: cute.Tensor,
        mX: cute.Tensor,
        mIndex: cute.Tensor,
        mH: cute.Tensor,
        mRaw: cute.Tensor,
        mQ: cute.Tensor,
        mY: cute.Tensor,
        mOffsets: cute.Tensor,
        mGateScale: cute.Tensor,
        mUpScale: cute.Tensor,
        mDownScale: cute.Tensor,
        mBias1: cute.Tensor,
        mBias2: cute.Tensor,
        mRowScale: cute.Tensor,
        mHScale: cute.Tensor,
        mSync: cute.Tensor,
        halvings: Int32,
        held: tuple,  # ptx.HELD, so that they are in registers
    ):
        t = self.t
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        wg = cute.arch.make_warp_uniform(tid // 128)

        storage = SmemAllocator().allocate(self.storage)
        ring = (storage.full.data_ptr(), storage.empty.data_ptr())
        news = (
            storage.told.data_ptr(),
            storage.heard.data_ptr(),
            storage.tiles.get_tensor(cute.make_layout((4, t.slots))),
        )
        stored = storage.stored.data_ptr()
        sX = storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        sOffsets = storage.offsets.get_tensor(cute.make_layout(MAX_EXPERTS + 1))
        sFirst = storage.first.get_tensor(cute.make_layout(MAX_EXPERTS + 1))
        sRowScale = storage.scales.get_tensor(cute.make_layout((t.BN, t.slots)))
        sLargest = storage.largest.get_tensor(cute.make_layout((t.BN, t.slots)))
        k64 = (mW1.shape[2] // UNIT_WORDS, mW2.shape[2] // UNIT_WORDS)
        m64 = (mW1.shape[1], mW2.shape[1])

        if warp == 0:
            if const_expr(self.work.gate is not None and not self.work.gathered):
                cpasync.prefetch_descriptor(tma_x)
            if const_expr(self.work.down and not t.warpwise):
                cpasync.prefetch_descriptor(tma_h)
        if warp == 1:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(t.stages):
                    cute.arch.mbarrier_init(ring[0] + i, 65 if self.work.row_scale else 3)
                    cute.arch.mbarrier_init(ring[1] + i, t.NWG * 4)
                for i in cutlass.range_constexpr(t.slots):
                    cute.arch.mbarrier_init(news[0] + i, 1)
                    cute.arch.mbarrier_init(news[1] + i, t.NWG * 4 + (3 if self.work.both else 2))
                    cute.arch.mbarrier_init(stored + i, t.NWG * 4)
            cute.arch.mbarrier_init_fence()
        if const_expr(self.work.measured):
            for i in cutlass.range(tid, t.BN * t.slots, t.threads, unroll=1):
                sLargest[i] = Uint32(0)
        cute.arch.sync_threads()
        if const_expr(self.work.by_index and not self.work.row_scale):  # mostly older than the kernel before
            ptx.into_l2(mX, Int64(cute.arch.block_idx()[0] * t.threads + tid) * 128)
        if const_expr(self.work.gate is not None):
            cute.arch.griddepcontrol_wait()  # the offsets come from the kernel before
        cute.arch.griddepcontrol_launch_dependents()

        if wg == t.NWG:
            cute.arch.setmaxregister_decrease(t.registers[1])
            if warp == 4 * t.NWG:
                to = storage.w.data_ptr().toint()
                self.draw(mW1, mW2, m64, k64, halvings, mSync, mOffsets, sOffsets, sFirst, to, ring, news)
            elif warp < 4 * t.NWG + 3:
                if const_expr(self.work.gate is None):
                    cute.arch.griddepcontrol_wait()
                x, h = (tma_x, mX, mIndex), (tma_raw, mRaw, tma_h, mQ)
                scales = (mRowScale, mHScale, sRowScale)
                to = storage.x.data_ptr().toint()
                self.tokens(x, h, scales, (m64[0], k64), halvings, mSync, to, ring, news)
            elif const_expr(self.work.both):
                self.tell(mSync, mHScale, sLargest, stored, news)
        else:
            cute.arch.setmaxregister_increase(t.registers[0])
            sPart = storage.part.get_tensor(cute.make_layout((128, t.MB * t.BN // 2, t.across, max(1, t.KS - 1))))
            outputs = (mH, mQ, mY, mGateScale, mUpScale, mDownScale, mBias1, mBias2, mHScale)
            memory = (sX, storage.x.data_ptr(), storage.w.data_ptr(), sPart, (sRowScale, sLargest), held)
            self.consume(memory, k64, halvings, ring, news, stored, outputs)

    # ---- producers ----

    @cute.jit
    def draw(self, mW1, mW2, m64, k64, halvings, mSync, mOffsets, sOffsets, sFirst, to: Int32, ring, news):
        """One warp: the tiles, and their weights."""
        t, work = self.t, self.work
        full, empty = ring
        told, heard, sTiles = news
        lane = cute.arch.lane_idx()
        drawn = self.ticket(mSync, lane) if const_expr(work.both) else Int32(0)
        _scan(mOffsets, sOffsets, sFirst, t.BN)
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        E = mW1.shape[0] if const_expr(work.gate is not None) else mW2.shape[0]
        mtiles1, mtiles2 = (m64[0] + t.blocks - 1) // t.blocks, ((m64[1] + t.blocks - 1) // t.blocks) << halvings
        tiles1 = sFirst[E] * mtiles1 if const_expr(work.gate is not None) else Int32(0)
        parts = self.quantized_parts(k64)
        before2 = tiles1 + (sFirst[E] * parts if const_expr(work.row_scale) else 0)
        tiles = before2 + (sFirst[E] * mtiles2 if const_expr(work.down) else 0)

        tile = Int32(bid)
        if const_expr(work.both):  # also the first: a CTA that does not run yet must own no tile
            tile = cute.arch.shuffle_sync(drawn, 0)
        stage, phase, slot, turn, filling = Int32(0), Int32(1), Int32(0), Int32(1), Boolean(True)
        while tile < tiles:
            second = tile >= before2
            number = tile - before2 if second else tile
            mtiles = mtiles2 if second else mtiles1
            kind = Int32(GEMM2) if second else Int32(GEMM1)
            if const_expr(work.row_scale):
                if tile >= tiles1 and not second:
                    number, mtiles, kind = tile - tiles1, parts, Int32(QUANTIZE)
            e, mt_part, row, rows, token_tile = _tile_at(sOffsets, sFirst, E, number, mtiles, t.BN)
            cute.arch.mbarrier_wait(heard + slot, turn)
            following = tile + grid
            if const_expr(work.both):
                following = self.ticket(mSync, lane)  # used after this tile: nobody waits for it
            if lane == 0:
                sTiles[0, slot] = e * 4 + kind
                sTiles[1, slot] = mt_part
                sTiles[2, slot] = row
                sTiles[3, slot] = token_tile * 512 + rows
                cute.arch.mbarrier_arrive(told + slot)
            slot, turn = self.advance(slot, turn, t.slots)
            mt, part, begin, count = self.part(mt_part, k64, kind, halvings)
            boxed = (rows + t.box - 1) // t.box * t.box  # rows of tokens that TMA writes
            if self.by_lanes(kind != GEMM1):
                boxed = Int32(0)
            M64, K64 = (m64[1] if second else m64[0]), (k64[1] if second else k64[0])
            valid = cutlass.min(M64 - mt * t.blocks, Int32(t.blocks))
            if const_expr(work.row_scale):
                valid = cutlass.select_(kind == QUANTIZE, Int32(0), valid)
            source = (mW2.iterator.toint() if second else mW1.iterator.toint()) + (
                (Int64(e * M64 + mt * t.blocks) * K64 + begin) * (UNIT_WORDS * 4)
            )
            for kt in cutlass.range((count + (t.KB - 1)) >> t.shift, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                if filling and stage >= t.window:  # at first: so that what is needed first comes first
                    cute.arch.mbarrier_wait(full + (stage - t.window), 0)
                filling = filling and stage + 1 < t.stages
                blocks = cutlass.min(count - kt * t.KB, Int32(t.KB))
                bytes = blocks * (UNIT_WORDS * 4)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, bytes * valid + blocks * boxed * 128)
                    for b in cutlass.range_constexpr(t.blocks):
                        if b < valid:
                            cute.arch.inline_ptx(
                                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                                read_only_args=[
                                    to + (stage * t.blocks + b) * (t.KB * UNIT_WORDS * 4),
                                    source + (Int64(b) * K64 + kt * t.KB) * (UNIT_WORDS * 4),
                                    bytes,
                                    Int32((full + stage).toint()),
                                ],
                            )
                stage, phase = self.advance(stage, phase, t.stages)
            tile = cute.arch.shuffle_sync(following, 0)
        cute.arch.mbarrier_wait(heard + slot, turn)
        if lane == 0:
            sTiles[0, slot] = Int32(-1)  # there are no more
            cute.arch.mbarrier_arrive(told + slot)

    @cute.jit
    def part(self, mt, k64, kind, halvings):
        """What a tile says of its place -> (weight tile, part of K, its first 64-column block, how many); of one that
        quantizes (-, -, its first 64-column block, how many)."""
        part, first, count = Int32(0), Int32(0), k64[0]
        if kind == GEMM2:
            part = mt & ((1 << halvings) - 1)
            mt = mt >> halvings
            each = self.t.part(k64[1], halvings)
            first = part * each
            count = cutlass.min(each, k64[1] - first)
        if const_expr(self.work.row_scale):
            if kind == QUANTIZE:
                first = mt * QUANTIZED
                count = cutlass.min(k64[1] * self.work.width - first, Int32(QUANTIZED))
        return mt, part, first, count

    def quantized_parts(self, k64):
        """Tiles that quantize a token tile of h."""
        return (k64[1] * self.work.width + QUANTIZED - 1) // QUANTIZED

    @cute.jit
    def by_lanes(self, of_h):
        """Whether a tile's tokens come 16 bytes a lane: gathered ones, and the few rows of h that are waited for. Else
        TMA brings them."""
        holds = self.work.by_index
        if const_expr(self.t.warpwise and not holds):
            holds = of_h
        elif const_expr(holds and not self.t.warpwise):
            holds = not of_h
        return holds

    @cute.jit
    def ticket(self, mSync, lane):
        """The next tile's number, in lane 0."""
        number = Int32(0)
        if lane == 0:
            number = cute.arch.atomic_add(mSync.iterator, Int32(1), sem="relaxed", scope="gpu")
        return number

    @cute.jit
    def advance(self, at: Int32, phase: Int32, count: cutlass.Constexpr):
        """The next of `count` stages, or slots."""
        at += 1
        if at == count:
            at = Int32(0)
            phase ^= 1
        return at, phase

    @cute.jit
    def leave(self, bars, at):
        """A warp: it is done with stage or slot `at`, as it says at each of `bars`."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(bars)):
                cute.arch.mbarrier_arrive(bars[i] + at)

    @cute.jit
    def hear(self, news, slot, turn):
        """A warp: the next tile -> (4 * expert + kind or -1, weight tile, first row, 512 * token tile + rows)."""
        told, heard, sTiles = news
        cute.arch.mbarrier_wait(told + slot, turn)
        tile = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(sTiles[None, slot], tile)
        return tile[0], tile[1], tile[2], tile[3]

    @cute.jit
    def done(self, bars, slot, turn):
        """A warp: the tile and its stores are behind it, as it says at each of `bars` -> the next slot."""
        self.leave(bars, slot)
        return self.advance(slot, turn, self.t.slots)

    @cute.jit
    def tokens(self, x, h, scales, matrices, halvings, mSync, to: Int32, ring, news):
        """Two warps: every tile's tokens. They share rows, or 64-column blocks, evenly; the first brings scales too."""
        t, work = self.t, self.work
        full, empty = ring
        (tma_x, mX, mIndex), (tma_raw, mRaw, tma_h, mQ), (m64, k64) = x, h, matrices
        *scales, sRowScale = scales
        lane = cute.arch.lane_idx()
        mine = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32 % 4) - 1
        from_x, from_raw, from_h = ptx.descriptor(tma_x), ptx.descriptor(tma_raw), ptx.descriptor(tma_h)
        # by lanes: a warp has four rows of every eight, a lane 16 bytes of one, where the swizzle puts them
        within, chunk = 4 * mine + lane // 8, lane % 8
        chunks = cute.make_rmem_tensor(t.BN // 8, Int32)  # where they are, in units of 16 bytes
        row_scale = cute.make_rmem_tensor((t.BN + 31) // 32, Float32)

        stage, phase, slot, turn = Int32(0), Int32(1), Int32(0), Int32(0)
        what, mt, row, last = self.hear(news, slot, turn)
        while what >= 0:
            rows = last & 511
            kind = what & 3
            of_h, raw = kind != GEMM1, kind == QUANTIZE
            if const_expr(work.both):
                if of_h:
                    quantized = 0
                    if const_expr(work.row_scale):
                        quantized = cutlass.select_(raw, Int32(0), self.quantized_parts(k64))
                    self.wait_for_h(mSync, last >> 9, m64, quantized)
            mt, part, first, count = self.part(mt, k64, kind, halvings)
            by_lanes, base, columns = self.by_lanes(of_h), mX.iterator.toint(), mX.shape[1]
            pitch = Int32(mX.stride[0] // 8)
            if const_expr(t.warpwise):
                if const_expr(work.down):
                    base, columns, pitch = self.rows_of(mQ, of_h, base, columns, pitch)
                if const_expr(work.width == 2):
                    base, columns, pitch = self.rows_of(mRaw, raw, base, columns, pitch)
                columns = cutlass.select_(within < rows, columns, Int32(0))  # rows beyond the group are not read
            if by_lanes:
                for i in cutlass.range_constexpr(t.BN // 8):
                    at = row + cutlass.min(8 * i + within, rows - 1)
                    if const_expr(work.by_index):
                        if not of_h:
                            at = mIndex[at]
                    chunks[i] = at * pitch + chunk
            # only an epilogue needs them, but all that quantizes
            scales_at = cutlass.select_(raw, Int32(0), (count - 1) >> t.shift)
            for kt in cutlass.range((count + (t.KB - 1)) >> t.shift, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                bar = Int32((full + stage).toint())
                if by_lanes:
                    target = to + stage * (t.KB * t.BN * 128) + within * 128 + ((chunk ^ within) << 4)
                    column = (first + kt * t.KB) * 64 + chunk * 8
                    sizes = [cutlass.select_(column + j * 64 < columns, 16, 0) for j in range(t.KB)]
                    for i in cutlass.range_constexpr(t.BN // 8):
                        if 8 * i < rows:
                            address = base + Int64(chunks[i] + (first + kt * t.KB) * 8) * 16
                            for j in cutlass.range_constexpr(t.KB):
                                ptx.copy16(target, (j * t.BN + 8 * i) * 128, address, j * 128, sizes[j])
                    ptx.arrive_after_copies(bar)
                    if const_expr(not work.row_scale):
                        cute.arch.sync_warp()
                with cute.arch.elect_one():
                    if not self.by_lanes(of_h):
                        for j in cutlass.range(mine, cutlass.min(count - kt * t.KB, Int32(t.KB)), 2, unroll=1):
                            source = from_h if of_h else from_x
                            if const_expr(work.width == 2):
                                source = from_raw if raw else source
                            for i in cutlass.range(0, rows, t.box, unroll=1):
                                target = to + (stage * t.KB + j) * (t.BN * 128) + i * 128
                                ptx.tma(target, source, (first + kt * t.KB + j) * 64, row + i, bar)
                    if const_expr(not work.row_scale):
                        cute.arch.mbarrier_arrive(full + stage)
                if const_expr(work.row_scale):  # under the copies
                    if mine == 0:
                        if kt == 0:
                            place = (what >> 2, row, rows)
                            h_rows.ask_scales(row_scale, (mIndex, *scales), of_h, place, work.h)
                        if kt == scales_at:
                            h_rows.tell_scales(row_scale, sRowScale[None, slot], of_h, work.h)
                    cute.arch.mbarrier_arrive(full + stage)  # each lane for what it stored
                stage, phase = self.advance(stage, phase, t.stages)
            slot, turn = self.done((news[1],), slot, turn)
            what, mt, row, last = self.hear(news, slot, turn)

    def rows_of(self, rows, chosen, *place):
        """Where rows are, how many columns they have and how far apart they are: those of `rows`, if chosen."""
        own = (rows.iterator.toint(), rows.shape[1], Int32(rows.stride[0] // 8))
        return [cutlass.select_(chosen, a, b) for a, b in zip(own, place, strict=True)]

    @cute.jit
    def tell(self, mSync, mHScale, sLargest, stored, news):
        """One warp: keeps the largest magnitude of each row, and counts the tiles of h that are stored."""
        slot, turn = Int32(0), Int32(0)
        what, mt, row, last = self.hear(news, slot, turn)
        while what >= 0:
            if (what & 3) != GEMM2:
                cute.arch.mbarrier_wait(stored + slot, turn)
                if const_expr(self.work.measured):
                    if (what & 3) == GEMM1:
                        for token in cutlass.range(cute.arch.lane_idx(), last & 511, 32, unroll=1):
                            at = mHScale.iterator.toint() + Int64(row + token) * 4
                            ptx.raise_to(at, sLargest[token, slot])
                            sLargest[token, slot] = Uint32(0)
                    cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    cute.arch.atomic_add(mSync.iterator + ((last >> 9) + 1), Int32(1), sem="release", scope="gpu")
            slot, turn = self.done((news[1],), slot, turn)
            what, mt, row, last = self.hear(news, slot, turn)

    @cute.jit
    def wait_for_h(self, mSync, token_tile, m64, quantized):
        """Until the token tile is stored, and `quantized` parts of it are quantized."""
        at, there = token_tile + 1, Int32(0)
        count = (m64 + self.t.blocks - 1) // self.t.blocks + quantized
        while there < count:
            there = cute.arch.load(mSync.iterator + at, Int32, sem="acquire", scope="gpu")
        if const_expr(not self.t.warpwise):
            cute.arch.fence_proxy(kind="async")  # they were written by ordinary stores, TMA reads them

    # ---- consumers ----

    @cute.jit
    def consume(self, memory, k64, halvings, ring, news, stored, outputs):
        """A consumer warp: every tile."""
        work = self.work
        stage, phase, slot, turn = Int32(0), Int32(0), Int32(0), Int32(0)
        what, mt, row, last = self.hear(news, slot, turn)
        while what >= 0:
            tile, rest = (what, mt, row, last, slot), (memory, k64, halvings, ring, outputs)
            if const_expr(work.row_scale):
                if (what & 3) == QUANTIZE:
                    stage, phase = self.quantize(tile, stage, phase, rest)
                else:
                    stage, phase = self.one_of(tile, stage, phase, rest)
            else:
                stage, phase = self.one_of(tile, stage, phase, rest)
            slot, turn = self.done((news[1], stored), slot, turn)
            what, mt, row, last = self.hear(news, slot, turn)

    @cute.jit
    def one_of(self, tile, stage: Int32, phase: Int32, rest):
        """A tile of a GEMM, by MMAs of as many tokens as it needs."""
        t = self.t
        if const_expr(t.small > 0):
            if (tile[3] & 511) <= t.small:
                stage, phase = self.compute(t.small, tile, stage, phase, rest)
            else:
                stage, phase = self.compute(t.BN, tile, stage, phase, rest)
        else:
            stage, phase = self.compute(t.BN, tile, stage, phase, rest)
        return stage, phase

    @cute.jit
    def quantize(self, tile, stage: Int32, phase: Int32, rest):
        """A part of a token tile of h to NVFP4."""
        t = self.t
        _, part, row, last, slot = tile
        (_, pX, _, _, (sRowScale, _), _), k64, halvings, (full, empty), outputs = rest
        _, _, first, count = self.part(part, k64, Int32(QUANTIZE), halvings)
        for kt in cutlass.range((count + (t.KB - 1)) >> t.shift, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            at = Int32(pX.toint()) + stage * (t.KB * t.BN * 128)
            place = (row, last & 511, first, kt)
            h_rows.quantize(at, sRowScale[None, slot], outputs[1], place, t, self.work.h)
            self.leave((empty,), stage)
            stage, phase = self.advance(stage, phase, t.stages)
        return stage, phase

    def mma(self, N: int, sX, acc, words):
        """WGMMA of N tokens -> (tiled MMA, accumulators, A fragments, B)."""
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
        tCrB = mma.make_fragment_B(mma.get_slice(0).partition_B(sX))  # (mma, 1, (4, KB), stage)
        return mma, tCrC, tCrA, tCrB

    @cute.jit
    def compute(self, N: cutlass.Constexpr, tile, stage: Int32, phase: Int32, rest):
        """A tile, by MMAs of N tokens: the sum, and its epilogue."""
        t, work = self.t, self.work
        what, mt, row, last, slot = tile
        (sX, pX, sW, sPart, of_rows, held), k64, halvings, ring, outputs = rest
        tid = cute.arch.thread_idx()[0] % 128
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        wk, wm = wg // t.across, wg % t.across
        e, second, rows = what >> 2, (what & 3) == GEMM2, last & 511
        mt, part, first, count = self.part(mt, k64, what & 3, halvings)
        scales = (*self.scales(outputs, e, second), of_rows, slot)
        acc = cute.make_rmem_tensor(t.MB * N // 2, Float32)
        acc.fill(0.0)
        if const_expr(t.warpwise):
            stage, phase = self.narrow(acc, pX, sW, held, (wk, wm), count, stage, phase, ring)
        else:
            words = [cute.make_rmem_tensor(16 * t.MB, Uint32) for _ in range(2)]
            operands = (*self.mma(N, sX, acc, words), words, sW, held)
            stage, phase = self.wide(operands, (wk, wm), count, stage, phase, ring)
        if const_expr(t.KS > 1):
            if wk > 0:
                for i in cutlass.range_constexpr(t.MB * N // 2):
                    sPart[tid, i, wm, wk - 1] = acc[i]
            cute.arch.barrier(barrier_id=1, number_of_threads=128 * t.NWG)
            if wk == 0:
                for i in cutlass.range_constexpr(t.MB * N // 2):
                    for j in cutlass.range_constexpr(t.KS - 1):
                        acc[i] = acc[i] + sPart[tid, i, wm, j]
            cute.arch.barrier(barrier_id=2, number_of_threads=128 * t.NWG)
        if wk == 0:
            block = (mt * t.across + wm) * t.MB
            place = (block, row + part * (outputs[2].shape[0] >> halvings))
            if const_expr(work.both):
                if second:
                    self.store(N, acc, outputs, scales, e, place, rows, part, True)
                else:
                    self.store(N, acc, outputs, scales, e, place, rows, part, False)
            else:
                self.store(N, acc, outputs, scales, e, place, rows, part, work.down)
        return stage, phase

    @cute.jit
    def wide(self, operands, who, count: Int32, stage: Int32, phase: Int32, ring):
        """acc += W · Xᵀ over `count` 64-column blocks, by WGMMA."""
        t = self.t
        mma, acc, tCrA, tCrB, words, sW, held = operands
        full, empty = ring
        wk, wm = who
        tid = cute.arch.thread_idx()[0] % 128
        lane = tid % 32
        each = t.KB // t.KS  # 64-column blocks of a stage for this warpgroup
        previous = Int32(0)
        for kt in cutlass.range(count >> t.shift, unroll=1):
            begin = wk * each if const_expr(t.KS > 1) else 0
            at_codes, at_sf = self.weights_at(sW, begin, wm, stage)
            self.wait_full(full + stage, phase)
            stage = cute.arch.make_warp_uniform(stage)  # descriptors by the uniform datapath: 3 % of prefill
            codes, sf = self.load(at_codes, at_sf, 0)
            for kb in cutlass.range_constexpr(each):
                at = begin + kb
                if const_expr(kb + 1 < each):  # under this block's arithmetic
                    following = self.load(at_codes, at_sf, kb + 1)
                for k0 in cutlass.range_constexpr(0, 4, t.group):
                    for ks in cutlass.range_constexpr(k0, k0 + t.group):
                        self.fill(words[kb % 2], codes, sf, ks, held)
                    warpgroup.fence()
                    for ks in cutlass.range_constexpr(k0, k0 + t.group):
                        cute.gemm(mma, acc, tCrA[kb % 2][None, None, ks], tCrB[None, None, (ks, at), stage], acc)
                    warpgroup.commit_group()
                    warpgroup.wait_group(8 // t.group - 1)  # who read the fragments written next is done
                if const_expr(kb == (0 if t.group == 4 else 1)):  # and so is the previous stage
                    if kt > 0:
                        if lane == 0:
                            cute.arch.mbarrier_arrive(empty + previous)
                if const_expr(kb + 1 < each):
                    codes, sf = following
            previous = stage
            stage, phase = self.advance(stage, phase, t.stages)
        warpgroup.wait_group(0)
        if count >= t.KB:
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + previous)
        left = count & (t.KB - 1)
        if left > 0:  # the rest of K, one 64-column block after the other
            self.wait_full(full + stage, phase)
            for at in cutlass.range(wk, left, t.KS, unroll=1):
                codes, sf = self.load(*self.weights_at(sW, at, wm, stage), 0)
                for ks in cutlass.range_constexpr(4):
                    self.fill(words[0], codes, sf, ks, held)
                warpgroup.fence()
                for ks in cutlass.range_constexpr(4):
                    cute.gemm(mma, acc, tCrA[0][None, None, ks], tCrB[None, None, (ks, at), stage], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + stage)
            stage, phase = self.advance(stage, phase, t.stages)
        return stage, phase

    @cute.jit
    def wait_full(self, bar, phase):
        """Before WGMMAs, which read by the async proxy."""
        cute.arch.mbarrier_wait(bar, phase)
        if const_expr(self.work.by_index):
            cute.arch.fence_proxy(kind="async.shared", space="cta")  # cp.async writes by the generic one

    @cute.jit
    def narrow(self, acc, sX, sW, held, who, count: Int32, stage: Int32, phase: Int32, ring):
        """The same by mma.sync: each warp its 16 rows."""
        t = self.t
        full, empty = ring
        wk, wm = who
        each = t.KB // t.KS
        for _ in cutlass.range(count >> t.shift, unroll=1):
            weights = self.weights_at(sW, wk * each, wm, stage)
            cute.arch.mbarrier_wait(full + stage, phase)
            for kb in cutlass.range_constexpr(each):
                self.narrow_block(acc, sX, self.load(*weights, kb), held, stage * t.KB + wk * each + kb)
            self.leave((empty,), stage)
            stage, phase = self.advance(stage, phase, t.stages)
        left = count & (t.KB - 1)
        if left > 0:
            cute.arch.mbarrier_wait(full + stage, phase)
            for at in cutlass.range(wk, left, t.KS, unroll=1):
                weights = self.weights_at(sW, at, wm, stage)
                self.narrow_block(acc, sX, self.load(*weights, 0), held, stage * t.KB + at)
            self.leave((empty,), stage)
            stage, phase = self.advance(stage, phase, t.stages)
        return stage, phase

    @cute.jit
    def narrow_block(self, acc, sX, weights, held, at):
        """64 columns, by the tokens' 64-column block `at` of the ring."""
        lane = cute.arch.lane_idx()
        codes, sf = weights
        words = cute.make_rmem_tensor(16, Uint32)
        for ks in cutlass.range_constexpr(4):
            self.fill(words, codes, sf, ks, held)
        # lane 8 i + r addresses 16-byte chunk i of row r, for ldmatrix; chunks of 128-byte rows are swizzled
        row = Int32(sX.toint()) + lane % 8 * 128
        for half in cutlass.range_constexpr(2):
            b = ptx.ldmatrix(row + (((half * 4 + lane // 8) ^ (lane % 8)) << 4) + at * (self.t.BN * 128))
            for i in cutlass.range_constexpr(2):
                ks = half * 2 + i
                d = ptx.mma([words[4 * ks + j] for j in range(4)], b[2 * i], b[2 * i + 1], [acc[j] for j in range(4)])
                for j in cutlass.range_constexpr(4):
                    acc[j] = d[j]

    @cute.jit
    def scales(self, outputs, e, second):
        """The global scales of the matrix rows in registers h = 0 and h = 1."""
        _, _, _, mGateScale, mUpScale, mDownScale, _, _, _ = outputs
        work = self.work
        if const_expr(work.gate is None):
            return mDownScale[e], mDownScale[e]
        a, b = mGateScale.iterator.toint(), mUpScale.iterator.toint()
        if const_expr(work.both):  # addresses are chosen, not values, which would be waited for here
            down = mDownScale.iterator.toint()
            a, b = cutlass.select_(second, down, a), cutlass.select_(second, down, b)
        a, b = (cute.make_ptr(Float32, address + Int64(e) * 4, cute.AddressSpace.gmem) for address in (a, b))
        return cute.arch.load(a, Float32), cute.arch.load(b, Float32)

    @cute.jit
    def weights_at(self, sW, block, wm, stage):
        """Addresses, for `load`, of this thread's codes and block scales in a stage's 64-column block `block`; asked
        for before the wait for the stage. Codes are a unit's first 2048 bytes."""
        t = self.t
        tid = cute.arch.thread_idx()[0] % 128
        at = Int32(sW.toint()) + ((stage * t.blocks + wm * t.MB) * t.KB + block) * (UNIT_WORDS * 4)
        return at + tid * 16, at + 2048 + tid // 4 * 8

    @cute.jit
    def load(self, at_codes, at_sf, after: cutlass.Constexpr):
        """This thread's 32 codes and 8 block scales of each 64-row block, `after` 64-column blocks further on."""
        codes, sf = [], []
        for m in cutlass.range_constexpr(self.t.MB):
            ahead = (m * self.t.KB + after) * (UNIT_WORDS * 4)
            for at, words, out in ((at_codes, 4, codes), (at_sf, 2, sf)):
                pointer = cute.make_ptr(Uint32, at + ahead, cute.AddressSpace.smem, assumed_align=4 * words)
                out.append(cute.make_rmem_tensor(words, Uint32))
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(words)), out[m])
        return codes, sf

    @cute.jit
    def fill(self, words, codes, sf, ks: cutlass.Constexpr, held):
        """Dequantize k16 step ks into its registers of the A fragment."""
        for m in cutlass.range_constexpr(self.t.MB):
            s = sf[m][ks // 2]
            if const_expr(ks % 2):
                s = (s << 8) | (s >> 24)
            registers = ptx.dequantize(codes[m][ks], s, held)
            for j in cutlass.range_constexpr(4):
                words[j + 4 * m + 4 * self.t.MB * ks] = registers[j]

    @cute.jit
    def store(self, N: cutlass.Constexpr, acc, outputs, scales, e, place, rows, part, down: cutlass.Constexpr):
        """The epilogue of 64-row blocks `block` ... of expert e: `rows` tokens, stored from `row`."""
        t, work = self.t, self.work
        block, row = place
        mH, _, mY, _, _, _, mBias1, mBias2, mHScale = outputs
        mOut, mBias, gate = (mY, mBias2, None) if const_expr(down) else (mH, mBias1, work.gate)
        tid = cute.arch.thread_idx()[0] % 128
        warp, g, c = cute.arch.make_warp_uniform(tid // 32), tid % 32 // 4, tid % 4
        scale0, scale1 = scales[0] * ptx.UNSCALE, scales[1] * ptx.UNSCALE
        (sRowScale, sLargest), slot = scales[2:]
        measured = work.measured and not down
        largest = cute.make_rmem_tensor(N // 4, Float32)  # magnitude of tokens c * 2 + i of each eight
        largest.fill(0.0)
        paired = gate is not None and gate.gated
        raw = paired and gate.kind == "raw"
        columns = mOut.shape[1] // 2 if const_expr(raw) else mOut.shape[1]
        dtype, size = mOut.element_type, mOut.element_type.width // 8
        pitch = Int64(mOut.stride[0]) * size
        odd = g % 2 == 1
        # paired: lane g has one column, and its neighbour's for one of its two tokens after a swap
        shift = cutlass.select_(odd, Int32(1), Int32(0)) if const_expr(paired) else Int32(0)
        for m in cutlass.range_constexpr(t.MB):
            if const_expr(paired):
                begin = (block + m) * 32 + warp * 8
                column = begin + g
                first, other = column, column + columns
            else:
                begin = (block + m) * 64 + warp * 16
                column = begin + 2 * g
                first, other = column, column + 1
            if begin < columns:  # and so are the warp's others: columns are a multiple of 16
                bias0, bias1 = Float32(0.0), Float32(0.0)
                if const_expr(work.bias):
                    if part == 0:  # once, where the combine adds parts of K
                        bias0, bias1 = mBias[e, first].to(Float32), mBias[e, other].to(Float32)
                to = mOut.iterator.toint() + Int64(row + c * 2 + shift) * pitch + Int64(column - shift) * size
                pairs = [cute.make_rmem_tensor(2, Float32) for _ in range(2)]
                if const_expr(work.row_scale):
                    h_rows.load_pair(sRowScale[None, slot], c * 2, pairs[0])
                for n in cutlass.range_constexpr(N // 8):
                    if const_expr(work.row_scale and n + 1 < N // 8):  # under this one's arithmetic
                        h_rows.load_pair(sRowScale[None, slot], (n + 1) * 8 + c * 2, pairs[(n + 1) % 2])
                    if n * 8 < rows:
                        value = []
                        for i in cutlass.range_constexpr(2):
                            a = acc[i + 4 * n + N // 2 * m] * scale0
                            b = acc[i + 2 + 4 * n + N // 2 * m] * scale1
                            if const_expr(work.row_scale):
                                a, b = a * pairs[n % 2][i], b * pairs[n % 2][i]
                            if const_expr(work.bias):
                                a, b = a + bias0, b + bias1
                            if const_expr(gate is not None and gate.kind == "relu2"):
                                a, b = ptx.apply_gate(gate, a, a), ptx.apply_gate(gate, b, b)
                            if const_expr(paired and not raw):
                                a = ptx.apply_gate(gate, a, b)
                            value.append((a, b))
                            if const_expr(measured):
                                here = [largest[2 * n + i], a] if paired else [largest[2 * n + i], a, b]
                                largest[2 * n + i] = arithmetic.largest_magnitude(here)
                        if const_expr(paired):
                            for half in cutlass.range_constexpr(2 if raw else 1):
                                mine = cutlass.select_(odd, value[1][half], value[0][half])
                                swap = cutlass.select_(odd, value[0][half], value[1][half])
                                swap = cute.arch.shuffle_sync_bfly(swap, 4)
                                low, upper = cutlass.select_(odd, swap, mine), cutlass.select_(odd, mine, swap)
                                at = to + (n * 8) * pitch + half * columns * size
                                ptx.store_pair(dtype, at, low, upper, n * 8 + c * 2 + shift < rows)
                        else:
                            for i in cutlass.range_constexpr(2):
                                at = to + (n * 8 + i) * pitch
                                ptx.store_pair(dtype, at, value[i][0], value[i][1], n * 8 + c * 2 + i < rows)
        if const_expr(measured):
            h_rows.keep_largest([largest[j] for j in range(N // 4)], sLargest[None, slot].iterator, rows)
