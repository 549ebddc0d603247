"""The grouped NVFP4 GEMM of Blackwell: gate and up (or down) of all experts in one persistent launch.

    D[weight row, token] = sum over K of (w * w_sf) * (x * x_sf)        tcgen05.mma, fp32, in TMEM

Weights are the M operand: `blocks` blocks of 128 rows (a block of gate rows and the same rows of up; or
neighbouring rows of a single projection) have an accumulator each and share every token tile. Tokens
are N: a tile holds up to `tokens` rows of one expert, and its MMAs are as wide as it has rows, rounded
up to 16 (what the epilogue reads at a time), so 3 tokens cost 16 columns and 40 cost 48.

With `ctas` = 2 a pair of CTAs works on one token tile: each has its own weight rows, accumulators and
epilogue and loads half of the tokens' codes; the first CTA issues the MMAs of both.

Warps
    0-7  epilogue, two groups of four that take 16 tokens in turn: TMEM -> scales, bias, gate -> shared
         memory (transposed; one buffer, which the groups hand to each other) -> bf16, NVFP4 or fp32 rows
    8    loads of weights: codes by TMA, block scales by bulk copies, into a ring of `stages` K tiles of 256
    9    loads of tokens, likewise, into the same stages
    10   scales from shared memory to TMEM, MMAs; owns the TMEM allocation. In the second CTA of a pair it
         only reports full stages to the first

Barriers (arrivals)
    full[stage]   loads -> MMA        2 + bytes     the K tile is in shared memory
    peer_full[s]  warps 10            1             of a pair: the second CTA's stage s is full
    empty[stage]  MMA -> loads        1 (commit)    the MMAs that read it are done
    acc_full      MMA -> epilogue     1 (commit)    a tile is summed up
    acc_empty     epilogue -> MMA     8 (warps)     the next tile's accumulators may be written; of a pair 16

Timeline, the same tiles in the same order in every role (tile i of CTA, or pair, b is b + i * grid):
    loads     per K tile: wait empty, expect the bytes, issue the copies; the ring runs across tiles
    MMA       per tile: wait acc_empty; per K tile: wait full, copy scales, issue MMAs, commit empty;
              then commit acc_full
    epilogue  per tile: fetch scales and biases, wait acc_full, drain 16 tokens at a time, arrive acc_empty

Two tiles are in TMEM at a time, at columns 0 and `second`. Where they do not both fit they overlap: the
epilogue drains the shared columns first and arrives at acc_empty there, not at the end. As it drains
tiles in order, that one arrival also says that everything before is drained.

Dependent launch: weights and offsets are older than the kernel before this one (all kernels here wait
for theirs before they let the next one start), so the tile map and the weights do not wait for its end;
tokens and everything that is written do.

Tile map: every CTA sums the experts' tile counts from the offsets (one warp, a scan), so nothing waits
for the host. Rows of nobody (from offsets[E] on) are written as zeros.

Edges: K ends in zero codes (TMA fills, and padding scales are zero); weight rows and tokens beyond
the end are computed and not stored; scales of rows beyond the end may hold anything.
"""

from __future__ import annotations

from math import inf

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr, cute
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from moe_nvfp4.kernels.common.arithmetic import sum_of_lanes_before
from moe_nvfp4.kernels.sm100 import ptx as ptx
from moe_nvfp4.kernels.sm100.config import BOXES, BYTES_K, CHUNK, ROWS, SF_TILE, TMEM, GemmConfig
from moe_nvfp4.weights import Gate

WEIGHTS, TOKENS, MMA, THREADS = 8, 9, 10, 352  # warps; 0 to 7 are the epilogue
TILE, GROUP, EXCHANGE = 1, 2, 4  # named barriers of the epilogue: one, and one per group twice


@cute.jit
def expert_of(ends: cute.Tensor, tile: Int32, size: cutlass.Constexpr) -> Int32:
    """The first expert with ends[expert] > tile; ends: [size], ascending, size a power of two."""
    expert = Int32(0)
    for p in cutlass.range_constexpr(size.bit_length() - 1):
        half = size >> (p + 1)
        if ends[expert + half - 1] <= tile:
            expert += half
    return expert


def apply_gate(gate: Gate | None, g: Float32, u: Float32 | None = None) -> Float32:
    """One element of `Gate.__call__`, operation for operation."""
    if gate is None or gate.kind == "raw":
        return g
    if gate.kind == "relu2":
        g = cute.arch.fmax(g, Float32(0.0), nan=True)
        return ptx.mul(g, g)
    limit = Float32(gate.limit)
    if gate.limit < inf:
        u = cute.arch.fmax(cute.arch.fmin(u, limit, nan=True), Float32(-gate.limit), nan=True)
        g = g if gate.clamp_after else cute.arch.fmin(g, limit, nan=True)
    if gate.kind == "silu":
        g = ptx.mul(g, ptx.sigmoid(g if gate.alpha == 1.0 else ptx.mul(Float32(gate.alpha), g)))
    else:  # gelu, tanh form: (1 + tanh z) / 2 = sigmoid(2z)
        cubic = ptx.mul(ptx.mul(ptx.mul(g, g), g), Float32(0.044715))
        g = ptx.mul(g, ptx.sigmoid(ptx.mul(ptx.add(g, cubic), Float32(1.5957691216057308))))
    if gate.limit < inf and gate.clamp_after:
        g = cute.arch.fmin(g, limit, nan=True)
    return ptx.mul(g, ptx.add(u, Float32(gate.up_offset)) if gate.up_offset else u)


def tma_boxes(storage, rows: int, count: int) -> cute.Tensor:
    """`count` boxes of `rows` swizzled rows in shared memory."""
    layout = cute.make_layout((rows, BYTES_K, count), stride=(BYTES_K, 1, rows * BYTES_K))
    return storage.get_tensor(layout, swizzle=cute.make_swizzle(3, 4, 3))


def load_box(atom, tensor: cute.Tensor, row: Int32, k: Int32, boxes: cute.Tensor, box: Int32, rows: int, barrier):
    """One TMA box: `rows` rows from `row` on of K tile k, into box `box` of `boxes`; zeros where there is nothing."""
    gA = cute.local_tile(cute.domain_offset((row, 0), tensor), (rows, BYTES_K), (0, None))
    tAsA, tAgA = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(gA, 0, 2)
    )
    cute.copy(atom, tAgA[None, k], tAsA[None, box], tma_bar_ptr=barrier)


def load_sf(sf: cute.Tensor, tile: Int64, slots, slot: Int32, size: Int32, barrier):
    """`size` bytes of consecutive 128x4 scale tiles, from tile `tile` on, into a slot for four."""
    ptx.bulk_load(slots.data_ptr() + slot * (4 * SF_TILE), sf.iterator + tile * SF_TILE, size, barrier)


def arrive_in_first(barrier):
    """An arrival at the barrier of the first CTA of the pair."""
    cute.arch.mbarrier_arrive(barrier, 0, scope=nvvm.MemScopeKind.CLUSTER)


def store_words(words: list[Uint32], out: cute.Tensor, row: Int32, start: Int32):
    """2 or 4 words into out[row, start:], in one store."""
    registers = cute.make_rmem_tensor(len(words), Uint32)
    for i, word in enumerate(words):
        registers[i] = word
    to = (out.iterator + Int64(row) * out.shape[1] + start).align(4 * len(words))
    cute.autovec_copy(registers, cute.make_tensor(to, cute.make_layout(len(words))))


class GroupedGemm:
    """The kernel of a `GemmConfig`; see the module's docstring."""

    def __init__(self, config: GemmConfig):
        assert config.legal, config
        self.c = config

    def __repr__(self) -> str:
        return f"GroupedGemm({self.c})"

    @cute.jit
    def __call__(
        self,
        w: cute.Tensor,  # uint8 [N, K/2, E]
        w_sf: cute.Tensor,  # uint8, `pack_sf`, flat
        x: cute.Tensor,  # uint8 [R, K/2]
        x_sf: cute.Tensor,  # uint8, grouped 128x4 layout, flat
        x_scale: cute.Tensor,  # fp32 [R]
        offsets: cute.Tensor,  # int32 [E + 1]
        scale0: cute.Tensor,  # fp32 [E]: global scales of gate rows (or of the only projection)
        scale1: cute.Tensor,  # fp32 [E]: of up rows
        bias: cute.Tensor,  # [E, N], or anything
        out: cute.Tensor,  # 32-bit words [R, words]: rows of the output, or codes
        out_sf: cute.Tensor,  # "nvfp4": uint8, flat
        out_scale: cute.Tensor,  # "nvfp4": fp32 [R], the scale of each row, written
        h_scale: cute.Tensor,  # "nvfp4": fp32 [E], read
        order: cute.Tensor,  # "assignments": int32 [R]
        grid: Int32,
        stream,
    ):
        c, t = self.c, self.c.tile

        def tma(tensor, rows):
            one = cute.make_composed_layout(
                cute.make_swizzle(3, 4, 3), 0, cute.make_layout((rows, BYTES_K), stride=(BYTES_K, 1))
            )
            op = cpasync.CopyBulkTensorTileG2SOp()
            return cpasync.make_tiled_tma_atom(op, tensor, one, (rows, BYTES_K))

        tma_w, mW = tma(w, ROWS)
        tma_x, mX = tma(x, t.box)

        @cute.struct
        class Storage:
            w: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * t.blocks * ROWS * BYTES_K], 1024]
            x: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * t.tokens // t.ctas * BYTES_K], 1024]
            w_sf: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * t.blocks * 4 * SF_TILE], 128]
            x_sf: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * 4 * SF_TILE], 128]
            out: cute.struct.Align[cute.struct.MemRange[Float32, CHUNK * ROWS], 128]
            scale: cute.struct.Align[cute.struct.MemRange[Float32, 2 * t.tokens], 16]
            ends: cute.struct.MemRange[Int32, c.map_size]
            sf_tiles: cute.struct.MemRange[Uint16, c.map_size]
            full: cute.struct.MemRange[Int64, c.stages]
            empty: cute.struct.MemRange[Int64, c.stages]
            peer_full: cute.struct.MemRange[Int64, c.stages]
            acc: cute.struct.MemRange[Int64, 2]
            tmem: cute.struct.MemRange[Int32, 1]

        self.storage = Storage
        self.kernel(
            tma_w, mW, w_sf, tma_x, mX, x_sf, x_scale, offsets, scale0, scale1, bias, out, out_sf, out_scale,
            h_scale, order,
        ).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1] if t.ctas == 2 else None,
            min_blocks_per_mp=1, stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_w: cute.CopyAtom,
        mW: cute.Tensor,
        w_sf: cute.Tensor,
        tma_x: cute.CopyAtom,
        mX: cute.Tensor,
        x_sf: cute.Tensor,
        x_scale: cute.Tensor,
        offsets: cute.Tensor,
        scale0: cute.Tensor,
        scale1: cute.Tensor,
        bias: cute.Tensor,
        out: cute.Tensor,
        out_sf: cute.Tensor,
        out_scale: cute.Tensor,
        h_scale: cute.Tensor,
        order: cute.Tensor,
    ):
        c, t = self.c, self.c.tile
        pair = t.ctas == 2
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        s = SmemAllocator().allocate(self.storage)
        full, empty, acc_full = s.full.data_ptr(), s.empty.data_ptr(), s.acc.data_ptr()
        acc_empty = acc_full + 1

        if warp == WEIGHTS:
            cpasync.prefetch_descriptor(tma_w)
            cpasync.prefetch_descriptor(tma_x)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(full + i, 2)
                    cute.arch.mbarrier_init(empty + i, 1)
                    cute.arch.mbarrier_init(s.peer_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(acc_full, 1)
                cute.arch.mbarrier_init(acc_empty, 8 * t.ctas)
            cute.arch.mbarrier_init_fence()
        if warp == MMA:
            cute.arch.alloc_tmem(TMEM, s.tmem.data_ptr(), pair)
            cute.arch.relinquish_tmem_alloc_permit(pair)
        ends = s.ends.get_tensor(cute.make_layout(c.map_size))
        sf_tiles = s.sf_tiles.get_tensor(cute.make_layout(c.map_size))
        if warp == 0:
            self.make_map(offsets, ends, sf_tiles, tid)
        ptx.tmem_fence(before=True)
        self.sync_all()
        ptx.tmem_fence(before=False)
        tmem = s.tmem.get_tensor(cute.make_layout(1))[0]

        if warp == WEIGHTS:
            self.load_weights(tma_w, mW, w_sf, offsets, ends, sf_tiles, s)
        elif warp == TOKENS:
            cute.arch.griddepcontrol_wait()
            self.load_tokens(tma_x, mX, x_sf, offsets, ends, sf_tiles, s)
        elif warp == MMA:
            if cute.arch.block_idx()[0] % t.ctas == 0:
                self.multiply(offsets, ends, sf_tiles, tmem, s)
            else:
                self.report_full(ends, s)
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            self.zero_rows_of_nobody(offsets, out, out_scale, order, tid)
            self.epilogue(
                x_scale, offsets, ends, sf_tiles, scale0, scale1, bias, out, out_sf, out_scale, h_scale, order,
                tmem, tid, warp, s,
            )  # fmt: skip

        ptx.tmem_fence(before=True)
        self.sync_all()
        if warp == MMA:
            ptx.tmem_fence(before=False)
            cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, s.tmem.data_ptr()), TMEM, pair)

    @cute.jit
    def sync_all(self):
        """All threads of the CTA, or of the pair."""
        cute.arch.sync_threads()
        if const_expr(self.c.tile.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # ---- the tile map ----------------------------------------------------------------------------

    @cute.jit
    def make_map(self, offsets: cute.Tensor, ends: cute.Tensor, sf_tiles: cute.Tensor, lane: Int32):
        """ends[e]: token tiles of experts 0..e; sf_tiles[e]: 128-row scale tiles before expert e. One warp."""
        c, tokens = self.c, self.c.tile.tokens
        each = -(-c.map_size // 32)
        sizes, tiles, atoms = [], Int32(0), Int32(0)
        for i in cutlass.range_constexpr(each):
            expert = cutlass.min(lane * each + i, c.experts)
            sizes.append(offsets[cutlass.min(expert + 1, c.experts)] - offsets[expert])
            tiles += (sizes[i] + tokens - 1) // tokens
            atoms += (sizes[i] + 127) // 128
        tiles, atoms = sum_of_lanes_before(tiles), sum_of_lanes_before(atoms)
        for i in cutlass.range_constexpr(each):
            expert = lane * each + i
            tiles += (sizes[i] + tokens - 1) // tokens
            if expert < c.map_size:
                ends[expert] = tiles
                sf_tiles[expert] = Uint16(atoms)
            atoms += (sizes[i] + 127) // 128

    @cute.jit
    def locate(self, tile: Int32, offsets: cute.Tensor, ends: cute.Tensor, sf_tiles: cute.Tensor):
        """(expert, weight row tile, first row, rows, first row in the group, scale tile of the group)."""
        c, tokens = self.c, self.c.tile.tokens
        token_tile = tile // c.row_tiles
        expert = expert_of(ends, token_tile, c.map_size)
        first, end = offsets[expert], offsets[expert + 1]
        here = (token_tile - ends[expert]) * tokens + (end - first + tokens - 1) // tokens * tokens
        rows = cutlass.min(end - first - here, tokens)
        return expert, tile - token_tile * c.row_tiles, first + here, rows, here, Int32(sf_tiles[expert])

    @cute.jit
    def my_tiles(self, ends: cute.Tensor):
        """(first tile, step to the next, number of tiles) of this CTA, or of its pair."""
        c, ctas = self.c, self.c.tile.ctas
        return (
            cute.arch.block_idx()[0] // ctas,
            cute.arch.grid_dim()[0] // ctas,
            ends[c.experts - 1] * c.row_tiles,
        )

    def block_row(self, row_tile: Int32, block: int) -> Int32:
        """First row of a block in its projection."""
        t = self.c.tile
        rank = cute.arch.block_idx()[0] % t.ctas
        if self.c.projections == 2:
            return (row_tile * t.ctas + rank) * ROWS
        return ((row_tile * t.blocks + block) * t.ctas + rank) * ROWS

    def block_sf(self, row_tile: Int32, block: int) -> Int32:
        """Its scale tile among those of an expert; of a block beyond the last row, any."""
        tile = cutlass.min(self.block_row(row_tile, block) // ROWS, self.c.sf_row_tiles - 1)
        return tile + (block * self.c.sf_row_tiles if self.c.projections == 2 else 0)

    # ---- warps 8 and 9: loads --------------------------------------------------------------------

    @cute.jit
    def load_weights(self, tma_w, mW, w_sf, offsets, ends, sf_tiles, s):
        c, t = self.c, self.c.tile
        full, empty = s.full.data_ptr(), s.empty.data_ptr()
        sW = tma_boxes(s.w, ROWS, c.stages * t.blocks)
        tile, step, count = self.my_tiles(ends)
        stage, phase = Int32(0), Int32(1)
        while tile < count:
            expert, row_tile, _, _, _, _ = self.locate(tile, offsets, ends, sf_tiles)
            for k in cutlass.range(c.k_tiles, unroll=1):
                size = cutlass.min(c.k_steps - 4 * k, 4) * SF_TILE
                bar = full + stage
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, t.blocks * (ROWS * BYTES_K + size))
                for b in cutlass.range_constexpr(t.blocks):
                    row = self.block_row(row_tile, b) + (c.rows if c.projections == 2 and b == 1 else 0)
                    load_box(tma_w, mW[None, None, expert], row, k, sW, stage * t.blocks + b, ROWS, bar)
                with cute.arch.elect_one():
                    for b in cutlass.range_constexpr(t.blocks):
                        sf_tile = Int64(expert) * (c.projections * c.sf_row_tiles) + self.block_sf(row_tile, b)
                        load_sf(w_sf, sf_tile * c.k_steps + 4 * k, s.w_sf, stage * t.blocks + b, size, bar)
                stage += 1
                if stage == c.stages:
                    stage, phase = Int32(0), phase ^ 1
            tile += step

    @cute.jit
    def load_tokens(self, tma_x, mX, x_sf, offsets, ends, sf_tiles, s):
        c, t = self.c, self.c.tile
        full, empty = s.full.data_ptr(), s.empty.data_ptr()
        sX = tma_boxes(s.x, t.box, c.stages * BOXES)
        tile, step, count = self.my_tiles(ends)
        stage, phase = Int32(0), Int32(1)
        while tile < count:
            _, _, first, rows, here, group_sf = self.locate(tile, offsets, ends, sf_tiles)
            if const_expr(t.ctas == 2):  # each CTA of a pair has half of the MMA's width
                half = (rows + CHUNK - 1) // CHUNK * (CHUNK // 2)
                rank = cute.arch.block_idx()[0] % 2
                first, rows = first + rank * half, half
            used = (rows + t.box - 1) // t.box
            sf_tile = Int64(group_sf + here // 128)
            for k in cutlass.range(c.k_tiles, unroll=1):
                size = cutlass.min(c.k_steps - 4 * k, 4) * SF_TILE
                bar = full + stage
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, used * (t.box * BYTES_K) + size)
                for b in cutlass.range_constexpr(BOXES):
                    if b < used:
                        load_box(tma_x, mX, first + b * t.box, k, sX, stage * BOXES + b, t.box, bar)
                with cute.arch.elect_one():
                    load_sf(x_sf, sf_tile * c.k_steps + 4 * k, s.x_sf, stage, size, bar)
                stage += 1
                if stage == c.stages:
                    stage, phase = Int32(0), phase ^ 1
            tile += step

    # ---- warp 10: scales and MMAs ----------------------------------------------------------------

    @cute.jit
    def multiply(self, offsets, ends, sf_tiles, tmem: Int32, s):
        c, t = self.c, self.c.tile
        full, empty, acc_full = s.full.data_ptr(), s.empty.data_ptr(), s.acc.data_ptr()
        peer_full, acc_empty = s.peer_full.data_ptr(), acc_full + 1
        tile, step, count = self.my_tiles(ends)
        sfw = tmem + TMEM - t.sf_columns  # [step of 64][block] 4 columns, then [step] 4 columns
        sfx = sfw + 16 * t.blocks
        w_at, x_at = s.w.data_ptr().toint(), s.x.data_ptr().toint()
        w_sf_at, x_sf_at = s.w_sf.data_ptr().toint(), s.x_sf.data_ptr().toint()
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        while tile < count:
            _, _, _, rows, here, _ = self.locate(tile, offsets, ends, sf_tiles)
            instruction = ptx.instruction_descriptor(ROWS * t.ctas, (rows + CHUNK - 1) // CHUNK * CHUNK)
            acc = tmem + turn * t.second
            sfb = sfx + (here % 128) // 32  # 32 rows a column; a tile may start at row 64 of its scale tile
            cute.arch.mbarrier_wait(acc_empty, turn ^ 1)
            ptx.tmem_fence(before=False)
            for k in cutlass.range(c.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                if const_expr(t.ctas == 2):
                    cute.arch.mbarrier_wait(peer_full + stage, phase)
                with cute.arch.elect_one():
                    xd = ptx.operand_descriptor(x_at + stage * (t.tokens // t.ctas * BYTES_K))
                    for i in cutlass.range_constexpr(4):
                        if 4 * k + i < c.k_steps:
                            at = x_sf_at + stage * (4 * SF_TILE) + i * SF_TILE
                            ptx.copy_scales(sfx + i * 4, ptx.scales_descriptor(at), t.ctas)
                            for b in cutlass.range_constexpr(t.blocks):
                                at = w_sf_at + (stage * t.blocks + b) * (4 * SF_TILE) + i * SF_TILE
                                sfa = sfw + (i * t.blocks + b) * 4
                                ptx.copy_scales(sfa, ptx.scales_descriptor(at), t.ctas)
                                wd = ptx.operand_descriptor(w_at + (stage * t.blocks + b) * (ROWS * BYTES_K))
                                # a step is 64 codes, 32 bytes: 2 in a descriptor's units
                                ptx.mma(
                                    acc + b * t.tokens, wd + 2 * i, xd + 2 * i, instruction,
                                    sfa, sfb + i * 4, (k > 0) | (i > 0), t.ctas,
                                )  # fmt: skip
                    self.commit(empty + stage)
                stage += 1
                if stage == c.stages:
                    stage, phase = Int32(0), phase ^ 1
            with cute.arch.elect_one():
                self.commit(acc_full)
            turn ^= 1
            tile += step

    def commit(self, barrier):
        """An arrival when the MMAs issued so far are done; of a pair, in both CTAs."""
        if self.c.tile.ctas == 2:
            tcgen05.commit(barrier, 0b11, tcgen05.CtaGroup.TWO)
        else:
            tcgen05.commit(barrier)

    @cute.jit
    def report_full(self, ends, s):
        """In the second CTA of a pair: tells the first, which issues the MMAs of both, what is in shared memory."""
        c = self.c
        full, peer_full = s.full.data_ptr(), s.peer_full.data_ptr()
        tile, step, count = self.my_tiles(ends)
        stage, phase = Int32(0), Int32(0)
        while tile < count:
            for _ in cutlass.range(c.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                with cute.arch.elect_one():
                    arrive_in_first(peer_full + stage)
                stage += 1
                if stage == c.stages:
                    stage, phase = Int32(0), phase ^ 1
            tile += step

    # ---- warps 0 to 7: epilogue ------------------------------------------------------------------

    @cute.jit
    def epilogue(
        self, x_scale, offsets, ends, sf_tiles, scale0, scale1, bias, out, out_sf, out_scale, h_scale, order,
        tmem: Int32, tid: Int32, warp: Int32, s,
    ):  # fmt: skip
        c, t = self.c, self.c.tile
        acc_full = s.acc.data_ptr()
        acc_empty = acc_full + 1
        group, thread = warp // 4, tid % 128
        exchange = s.out.get_tensor(cute.make_layout((ROWS, CHUNK), stride=(1, ROWS)))
        tile, step, count = self.my_tiles(ends)
        lane_base = tmem + (warp % 4 << 21)  # lanes 32 * (warp % 4) ..
        outputs = 1 if c.fused else t.blocks
        turn, done = Int32(0), Int32(0)  # done: chunks so far, modulo 2
        if group == 1:
            cute.arch.barrier_arrive(barrier_id=EXCHANGE, number_of_threads=256)
        while tile < count:
            expert, row_tile, first, rows, here, group_sf = self.locate(tile, offsets, ends, sf_tiles)
            x_scales = cute.make_tensor(s.scale.data_ptr() + turn * t.tokens, cute.make_layout(t.tokens))
            if tid < t.tokens:
                row_scale = Float32(0.0)
                if tid < rows:
                    row_scale = x_scale[first + tid]
                    if const_expr(c.out == "nvfp4"):
                        if row_tile == 0:
                            out_scale[first + tid] = h_scale[expert]
                x_scales[tid] = row_scale
            scales, biases = [], []
            for b in cutlass.range_constexpr(t.blocks):
                up = const_expr(c.projections == 2 and b == 1)
                scales.append(scale1[expert] if up else scale0[expert])
                if const_expr(c.bias is not None):
                    of = cutlass.min(self.block_row(row_tile, b) + thread, c.rows - 1) + (c.rows if up else 0)
                    biases.append(bias[expert, of].to(Float32))
            gs = h_scale[expert] if const_expr(c.out == "nvfp4") else Float32(1.0)
            cute.arch.barrier(barrier_id=TILE, number_of_threads=256)
            cute.arch.mbarrier_wait(acc_full, turn)
            ptx.tmem_fence(before=False)
            acc = lane_base + turn * t.second
            # odd tiles are drained from the start and even ones from the end: where the other one's columns are
            chunks, shared = (rows + CHUNK - 1) // CHUNK, t.shared_tokens // CHUNK
            early = turn * cutlass.min(chunks, shared)
            early += (1 - turn) * cutlass.max(chunks + shared - t.tokens // CHUNK, 0)
            for i in cutlass.range(chunks, unroll=1):
                if i == early:
                    self.release(acc_empty)
                if (i ^ done) & 1 == group:
                    at = (turn * i + (1 - turn) * (chunks - 1 - i)) * CHUNK
                    token = at + thread // 8
                    for o in cutlass.range_constexpr(outputs):
                        of_block = range(o, o + t.blocks // outputs)
                        sums = ptx.load_columns([acc + b * t.tokens + at for b in of_block], CHUNK)
                        of_tokens = cute.make_rmem_tensor(CHUNK, Float32)
                        cute.autovec_copy(
                            cute.make_tensor((x_scales.iterator + at).align(16), cute.make_layout(CHUNK)), of_tokens
                        )
                        results = []
                        for j in cutlass.range_constexpr(CHUNK):
                            values = [ptx.mul(ptx.mul(v[j], scales[b]), of_tokens[j]) for b, v in enumerate(sums, o)]
                            if const_expr(c.bias is not None):
                                values = [ptx.add(v, biases[b]) for b, v in enumerate(values, o)]
                            results.append(apply_gate(c.gate, *values))
                        # the exchange belongs to the groups in turn
                        if const_expr(o == 0):
                            cute.arch.barrier(barrier_id=EXCHANGE + group, number_of_threads=256)
                        else:
                            cute.arch.barrier(barrier_id=GROUP + group, number_of_threads=128)
                        for j in cutlass.range_constexpr(CHUNK):
                            # a warp's rows are swapped in fours, so that reading back is free of bank conflicts
                            exchange[thread ^ (warp % 4 << 2), j] = results[j]
                        cute.arch.barrier(barrier_id=GROUP + group, number_of_threads=128)
                        mine = cute.make_rmem_tensor(16, Float32)
                        for q in cutlass.range_constexpr(4):
                            four = thread // 8 * ROWS + thread % 8 * 16 + ((q ^ (thread % 8 // 2)) << 2)
                            cute.autovec_copy(
                                cute.make_tensor((exchange.iterator + four).align(16), cute.make_layout(4)),
                                cute.make_tensor(mine.iterator + 4 * q, cute.make_layout(4)),
                            )
                        if const_expr(o == outputs - 1):
                            cute.arch.barrier_arrive(barrier_id=EXCHANGE + 1 - group, number_of_threads=256)
                        column = self.block_row(row_tile, o) + thread % 8 * 16
                        self.store(
                            mine, token < rows, first + token, column, o, here + token, group_sf, gs,
                            out, out_sf, order,
                        )  # fmt: skip
            if early == chunks:
                self.release(acc_empty)
            done ^= chunks & 1
            turn ^= 1
            tile += step
        if done == group:  # the last turn was given and not taken
            cute.arch.barrier(barrier_id=EXCHANGE + group, number_of_threads=256)

    @cute.jit
    def release(self, acc_empty):
        ptx.tmem_fence(before=True)
        with cute.arch.elect_one():
            if const_expr(self.c.tile.ctas == 2):
                arrive_in_first(acc_empty)
            else:
                cute.arch.mbarrier_arrive(acc_empty)

    @cute.jit
    def store(
        self, mine, live, row, column, block: cutlass.Constexpr, row_in_group, group_sf, gs, out, out_sf, order
    ):  # fmt: skip
        """Sixteen neighbouring columns of one row, from registers to the output."""
        c = self.c
        values = [mine[i] for i in range(16)]
        inside = column < c.rows
        if const_expr(c.out == "nvfp4"):
            sf, low, high = ptx.quantize_block(values, gs)
            k = column // 16
            if live:
                if inside:
                    store_words([low, high], out, row, k * 2)
                if k < -(-c.rows // 64) * 4:  # columns up to a multiple of 4 are there, and zero
                    sf_tile = Int64(group_sf + row_in_group // 128) * -(-c.rows // 64) + k // 4
                    byte = row_in_group % 32 * 16 + row_in_group % 128 // 32 * 4 + k % 4
                    if not inside:
                        sf = Uint32(0)
                    out_sf[sf_tile * SF_TILE + byte] = Uint8(sf)
        else:
            if const_expr(c.out == "assignments"):
                row = order[row] if live else row
            if const_expr(c.out in ("assignments", "float32")):
                words = [v.bitcast(Uint32) for v in values]
            else:
                half = cutlass.BFloat16 if c.out == "bfloat16" else cutlass.Float16
                words = [ptx.pack_half2(values[2 * i], values[2 * i + 1], half) for i in range(8)]
            if const_expr(c.projections == 2):
                column += block * c.rows
            if live and inside:
                start = column * len(words) // 16
                for q in cutlass.range_constexpr(len(words) // 4):
                    store_words(words[4 * q : 4 * q + 4], out, row, start + 4 * q)

    @cute.jit
    def zero_rows_of_nobody(self, offsets, out, out_scale, order, tid):
        """Zeros for the rows from offsets[E] on, by the epilogue's threads, before their first tile."""
        c = self.c
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        row = offsets[c.experts] + bid
        while row < order.shape[0]:
            at = row
            if const_expr(c.out == "assignments"):
                at = order[row]
            for pair in cutlass.range(tid, out.shape[1] // 2, 256):
                store_words([Uint32(0), Uint32(0)], out, at, pair * 2)
            if const_expr(c.out == "nvfp4"):
                if tid == 0:
                    out_scale[row] = Float32(1.0)
            row += grid
