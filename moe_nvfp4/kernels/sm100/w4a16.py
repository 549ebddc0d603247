"""The grouped GEMM of Blackwell for bf16 tokens: 4-bit weights become bf16 on their way to the tensor cores.

    D[weight row, token] = sum over K of (w * w_sf) * x                 tcgen05.mma kind::f16, fp32, in TMEM

This is `gemm` with the same tiles of weight rows and tokens, tile map and epilogue. Weights arrive unchanged, 4.5 bits
each. Eight warps convert them to bf16, which is exact, and write them into TMEM, from where an MMA can read its A
operand. So shared memory, which the tokens keep busy already, holds only 4-bit weights. A thread has one weight row,
because a lane of TMEM is one.

The eight codes of a word become four pairs that lie 16 bits apart, (0, 4), (1, 5), (2, 6), (3, 7): to pair neighbours
would take as many instructions again. Instead, the tokens' columns are in that order (`config.EIGHT`):
`rows.InterleaveRows` has to copy them anyway, and the epilogue of GEMM 1 writes them in it.

With few tokens a tile may have only a part of K (`GemmConfig.parts`): dequantization takes a multiprocessor as long as
its share of the memory reads, so all multiprocessors are needed to read at full speed.

Edges: as in `gemm`; K ends in zero codes and zero tokens.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from moe_nvfp4.kernels.common.pipeline import advance, arrive, consumer_state
from moe_nvfp4.kernels.sm100 import ptx
from moe_nvfp4.kernels.sm100.config import BOXES, BYTES_K, CHUNK, ROWS, SF_TILE
from moe_nvfp4.kernels.sm100.epilogue import Tensors
from moe_nvfp4.kernels.sm100.gemm import GroupedGemm, Source, load_box, scales_tma, swizzled_tma, tma_boxes
from moe_nvfp4.kernels.sm100.scheduler import TileMap

DEQUANTIZE, WEIGHTS, TOKENS, MMA, THREADS = 8, 16, 17, 18, 608  # warps; 0 to 7 are the epilogue


class DequantizingGemm(GroupedGemm):
    """The kernel of a `GemmConfig` with a `DenseTile`.

    Warp roles
        0-7    epilogue, as in `GroupedGemm`
        8-15   dequantize: two groups of four take steps of K = 64 in turn, read codes and scales from shared memory and
               write bf16 into TMEM
        16     loads of weights into a ring of `stages` K tiles of 256, as in `GroupedGemm`
        17     loads of tokens by TMA, into `token_slots` steps of K = 64
        18     MMAs; owns the TMEM allocation

    Pipelines (producer role -> consumer role; arrivals)
        full[stage]    weights -> dequantize  1 + bytes    a K tile of codes and scales is in shared memory
        empty[stage]   dequantize -> weights  8 (warps)    the K tile has been read
        wide[slot]     dequantize -> MMA      4 (warps)    a step of bf16 weights is in TMEM
        used[slot]     MMA -> dequantize      1 (commit)   the MMAs that read it are done
        x_full[slot]   tokens -> MMA          1 + bytes    a step of tokens is in shared memory
        x_empty[slot]  MMA -> tokens          1 (commit)   the MMAs that read it are done
        acc_full, acc_empty                                as in `GroupedGemm`

    Timeline of each role, over the same tiles in the same order; rings run across tiles
        weights     per K tile: wait empty, expect the bytes, issue the copies
        tokens      per step: wait x_empty, expect the bytes, issue the copies
        dequantize  per K tile: wait full; per step of its group: wait used, dequantize, store, arrive wide; then arrive
                    empty
        MMA         per tile: wait acc_empty; per step: wait x_full and wide, issue MMAs, commit x_empty and used; then
                    commit acc_full
        epilogue    as in `GroupedGemm`

    Dependent launch: as in `GroupedGemm`.
    """

    @cute.jit
    def __call__(
        self,
        mW: cute.Tensor,  # uint8 [N, K/2, E]
        mWSF: cute.Tensor,  # uint8, `pack_sf`, flat
        mX: cute.Tensor,  # uint8 [R, 2K]: bf16, "interleaved"
        mOffsets: cute.Tensor,  # from here on see `epilogue.Tensors`
        mScale0: cute.Tensor,
        mScale1: cute.Tensor,
        mBias: cute.Tensor,
        mOut: cute.Tensor,
        mOrder: cute.Tensor,
        grid: Int32,
        stream,
    ):
        c, t = self.c, self.c.tile
        w = Source(*swizzled_tma(mW, ROWS, t.ctas), *scales_tma(mWSF, c.k_steps, t.ctas))
        tma_x, mX = swizzled_tma(mX, t.box, t.ctas)

        @cute.struct
        class Storage:
            w: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * t.blocks * ROWS * BYTES_K], 1024]
            x: cute.struct.Align[cute.struct.MemRange[Uint8, t.token_bytes], 1024]
            w_sf: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * t.blocks * 4 * SF_TILE], 128]
            out: cute.struct.Align[cute.struct.MemRange[Float32, CHUNK * ROWS], 128]
            scale: cute.struct.Align[cute.struct.MemRange[Float32, 2 * t.tokens], 16]
            ends: cute.struct.MemRange[Int32, c.map_size]
            sf_tiles: cute.struct.MemRange[cutlass.Uint16, c.map_size]
            full: cute.struct.MemRange[Int64, c.stages]
            empty: cute.struct.MemRange[Int64, c.stages]
            wide: cute.struct.MemRange[Int64, t.slots]
            used: cute.struct.MemRange[Int64, t.slots]
            x_full: cute.struct.MemRange[Int64, t.token_slots]
            x_empty: cute.struct.MemRange[Int64, t.token_slots]
            acc: cute.struct.MemRange[Int64, 2]
            tmem: cute.struct.MemRange[Int32, 1]

        self.storage = Storage
        tensors = Tensors(mScale0, mOffsets, mScale0, mScale1, mBias, mOut, mWSF, mScale0, mScale0, mOrder)
        self.kernel(w, tma_x, mX, tensors).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, w: Source, tma_x: cute.CopyAtom, mX: cute.Tensor, tensors: Tensors):
        c, t = self.c, self.c.tile
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        s = SmemAllocator().allocate(self.storage)

        if warp == WEIGHTS:
            for atom in (w.tma, w.tma_sf, tma_x):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                rings = (
                    (s.full, c.stages, 1), (s.empty, c.stages, 8), (s.wide, t.slots, 4), (s.used, t.slots, 1),
                    (s.x_full, t.token_slots, 1), (s.x_empty, t.token_slots, 1),
                )  # fmt: skip
                for barriers, count, arrivals in rings:
                    for i in range(count):
                        cute.arch.mbarrier_init(barriers.data_ptr() + i, arrivals)
                cute.arch.mbarrier_init(s.acc.data_ptr(), 1)
                cute.arch.mbarrier_init(s.acc.data_ptr() + 1, 8)
            cute.arch.mbarrier_init_fence()
        tile_map, tmem = self.begin(tensors, tid, warp == MMA, s)

        if warp == WEIGHTS:
            self.load_weights(w, tile_map, s)
        elif warp == TOKENS:
            cute.arch.griddepcontrol_wait()
            self.load_tokens(tma_x, mX, tile_map, s)
        elif warp == MMA:
            self.multiply(tile_map, tmem, s)
        elif warp >= DEQUANTIZE:
            self.dequantize(tile_map, tmem, tid, s)
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            self.epilogue.zero_unrouted_rows(tensors, tid)
            self.epilogue.run(tensors, tile_map, tmem, tid, warp, s)

        self.end(warp == MMA, s)

    # ---- warps 8 to 15: codes and scales to bf16 -------------------------------------------------

    @cute.jit
    def dequantize(self, tile_map: TileMap, tmem: Int32, tid: Int32, s):
        c, t = self.c, self.c.tile
        full, empty, wide, used = (b.data_ptr() for b in (s.full, s.empty, s.wide, s.used))
        group, row = (tid - DEQUANTIZE * 32) // ROWS, tid % ROWS
        lanes = tmem + t.columns - t.operand_columns + (row // 32 << 21)
        tile, step, count = self.scheduler.my_tiles(tile_map)
        ring, before = consumer_state(), Int32(0)  # before: the steps of all previous tiles
        while tile < count:
            _, k_tiles, k_steps = self.scheduler.k_range(tile)
            for k in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(full + ring.index, ring.phase)
                for i in cutlass.range(2, unroll=1):
                    part = 2 * i + (group + before) % 2  # a slot always belongs to the same group
                    if 4 * k + part < k_steps:
                        slot, turn = place(before + 4 * k + part, t.slots)
                        cute.arch.mbarrier_wait(used + slot, turn ^ 1)
                        ptx.tmem_fence(before=False)
                        for b in cutlass.range_constexpr(t.blocks):
                            words = self.step_of(s, ring.index * t.blocks + b, part, row)
                            ptx.store_columns(lanes + (slot * t.blocks + b) * 32, words)
                        ptx.wait_for_stores()
                        ptx.tmem_fence(before=True)
                        arrive((wide,), slot)
                arrive((empty,), ring.index)
                ring = advance(ring, c.stages)
            before += k_steps
            tile += step

    @cute.jit
    def step_of(self, s, block: Int32, part: Int32, row: Int32) -> list:
        """Step `part` (64 columns) of a row of a block, as 32 words of two bf16."""
        sf = block * (4 * SF_TILE) + part * SF_TILE + row % 32 * 16 + row // 32 * 4
        scales = ptx.widen_scales(load_words(s.w_sf.data_ptr().toint() + sf, 1)[0])
        words = []
        for q in cutlass.range_constexpr(2):
            piece = (part * 2 + q) ^ (row % 8)  # the swizzled 16-byte piece
            codes = load_words(s.w.data_ptr().toint() + block * (ROWS * BYTES_K) + row * BYTES_K + piece * 16, 4)
            for i in cutlass.range_constexpr(4):
                words += ptx.dequantize(codes[i], scales[i // 2], high=q == 1)
        return words

    # ---- warp 17: loads of tokens ----------------------------------------------------------------

    @cute.jit
    def load_tokens(self, tma_x, mX, tile_map: TileMap, s):
        t = self.c.tile
        full, empty = s.x_full.data_ptr(), s.x_empty.data_ptr()
        sX = tma_boxes(s.x, t.box, t.token_slots * BOXES)
        tile, step, count = self.scheduler.my_tiles(tile_map)
        before = Int32(0)
        while tile < count:
            work = self.scheduler.locate(tile, tile_map)
            boxes = (self.scheduler.width(work.rows) + t.box - 1) // t.box
            first, _, k_steps = self.scheduler.k_range(tile)
            for k in cutlass.range(k_steps, unroll=1):
                slot, turn = place(before + k, t.token_slots)
                cute.arch.mbarrier_wait(empty + slot, turn ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + slot, boxes * (t.box * BYTES_K))
                for b in cutlass.range_constexpr(BOXES):
                    if b < boxes:
                        row, at = work.first + b * t.box, 4 * first + k
                        load_box(tma_x, mX, row, at, sX, slot * BOXES + b, t.box, full + slot)
            before += k_steps
            tile += step

    # ---- warp 18: MMAs ---------------------------------------------------------------------------

    @cute.jit
    def multiply(self, tile_map: TileMap, tmem: Int32, s):
        t = self.c.tile
        wide, used, x_full, x_empty = (b.data_ptr() for b in (s.wide, s.used, s.x_full, s.x_empty))
        acc_full = s.acc.data_ptr()
        operands = tmem + t.columns - t.operand_columns
        tile, step, count = self.scheduler.my_tiles(tile_map)
        before, turn = Int32(0), Int32(0)
        while tile < count:
            work = self.scheduler.locate(tile, tile_map)
            instruction = ptx.dense_instruction_descriptor(self.scheduler.width(work.rows))
            acc = tmem + turn * t.second
            cute.arch.mbarrier_wait(acc_full + 1, turn ^ 1)  # the fence of the first step is for this wait, too
            _, _, k_steps = self.scheduler.k_range(tile)
            for k in cutlass.range(k_steps, unroll=1):
                slot, phase = place(before + k, t.slots)
                x_slot, x_phase = place(before + k, t.token_slots)
                cute.arch.mbarrier_wait(x_full + x_slot, x_phase)
                cute.arch.mbarrier_wait(wide + slot, phase)
                ptx.tmem_fence(before=False)
                with cute.arch.elect_one():
                    xd = ptx.operand_descriptor(s.x.data_ptr().toint() + x_slot * (t.tokens * BYTES_K))
                    for i in cutlass.range_constexpr(4):
                        for b in cutlass.range_constexpr(t.blocks):
                            a = operands + (slot * t.blocks + b) * 32 + i * 8
                            # 16 of K are 32 bytes: 2 in the units of a descriptor
                            ptx.dense_mma(acc + b * t.tokens, a, xd + 2 * i, instruction, (k > 0) | (i > 0))
                    tcgen05.commit(x_empty + x_slot)
                    tcgen05.commit(used + slot)
            with cute.arch.elect_one():
                tcgen05.commit(acc_full)
            before += k_steps
            turn ^= 1
            tile += step


def place(step: Int32, slots: int) -> tuple[Int32, Int32]:
    """(slot, parity of the round) of a step in a ring whose length is a power of two."""
    return step & (slots - 1), step >> (slots.bit_length() - 1) & 1


def load_words(address: Int32, count: int) -> list[Uint32]:
    """Load 1 or 4 words of shared memory."""
    if count == 1:
        text = "ld.shared.b32 {$w0}, [{$r0}];"
        return [cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[address])]
    text = "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[address]))
