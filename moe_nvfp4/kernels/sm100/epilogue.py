"""The epilogue of the Blackwell GEMM: fp32 sums in TMEM -> scales, bias, gate -> bf16, fp16, fp32 or NVFP4 rows.

A thread reads its own TMEM lane, which is a weight row, for 16 tokens. With a gate it reads two lanes, of gate and of
up, which are 16 apart (`pack`), and the upper half of a warp takes the next 16 tokens. Shared memory transposes that:
afterwards a thread has 16 neighbouring columns of one token, which are a block of NVFP4; or, for 16-bit output, 8
columns of two tokens, which are exchanged as one word. Two groups of four warps take 16 (or 32) tokens in turn and
share the buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute

from moe_nvfp4.kernels.common.gates import apply_gate_exact
from moe_nvfp4.kernels.sm100 import ptx
from moe_nvfp4.kernels.sm100.config import CHUNK, EIGHT, ROWS, SF_TILE, TOGETHER, GemmConfig
from moe_nvfp4.kernels.sm100.scheduler import TileMap, TileScheduler, WorkTile

TILE, GROUP, EXCHANGE = 1, 2, 4  # named barriers: one for all warps; GROUP and EXCHANGE have one per group


class Tensors(NamedTuple):
    """What the kernel reads and writes besides the operands. Tensors that a configuration does not use may be any."""

    mXScale: cute.Tensor  # fp32 [R]
    mOffsets: cute.Tensor  # int32 [E + 1]
    mScale0: cute.Tensor  # fp32 [E]: global scales of gate rows (or of the only projection)
    mScale1: cute.Tensor  # fp32 [E]: global scales of up rows
    mBias: cute.Tensor  # [E, N]
    mOut: cute.Tensor  # 32-bit words [R, words]: rows of the output, or codes
    mOutSF: cute.Tensor  # "nvfp4": uint8, flat
    mOutScale: cute.Tensor  # "nvfp4": fp32 [R], the scale of each row, written
    mHScale: cute.Tensor  # "nvfp4": fp32 [E], read
    mOrder: cute.Tensor  # "assignments": int32 [R]


class Thread(NamedTuple):
    """A thread's number among all 256 and among its group's 128; its warp, its group, its TMEM lanes."""

    tid: Int32
    thread: Int32
    warp: Int32
    group: Int32
    lanes: Int32


class TileScales(NamedTuple):
    """What is applied to a tile's sums: the global scale of the thread's row, or of its gate and up rows; as many
    biases per block; the scale of each token, in shared memory; and the global scale of NVFP4 rows of h."""

    of_rows: list
    biases: list
    sTokens: cute.Tensor
    h: Float32


class Epilogue:
    """The epilogue of a `GemmConfig`."""

    def __init__(self, config: GemmConfig, scheduler: TileScheduler):
        self.c, self.scheduler = config, scheduler

    @cute.jit
    def run(self, tensors: Tensors, tile_map: TileMap, tmem: Int32, tid: Int32, warp: Int32, s):
        """The role of eight warps: all tiles."""
        c, t = self.c, self.c.tile
        acc_full = s.acc.data_ptr()
        acc_empty = acc_full + 1
        group, thread = warp // 4, tid % 128
        words = cute.recast_ptr(s.out.data_ptr(), dtype=Uint32)
        sExchange = cute.make_tensor(words, cute.make_layout((ROWS, CHUNK), stride=(1, ROWS)))
        tile, step, count = self.scheduler.my_tiles(tile_map)
        me = Thread(tid, thread, warp, group, tmem + (warp % 4 << 21))  # lanes 32 * (warp % 4) ..
        turn, done = Int32(0), Int32(0)  # done: chunks so far, modulo 2
        if group == 1:
            cute.arch.barrier_arrive(barrier_id=EXCHANGE, number_of_threads=256)
        while tile < count:
            work = self.scheduler.locate(tile, tile_map)
            scales = self.fetch_scales(work, turn, tensors, me, s)
            if const_expr(not self.c.dense):  # until the tokens' scales are in shared memory
                cute.arch.barrier(barrier_id=TILE, number_of_threads=256)
            cute.arch.mbarrier_wait(acc_full, turn)
            ptx.tmem_fence(before=False)
            acc = me.lanes + turn * t.second
            # odd tiles are drained from the start and even tiles from the end, where the other tile's columns are
            chunks, shared = (work.rows + c.chunk - 1) // c.chunk, -(-t.shared_tokens // c.chunk)
            early = turn * cutlass.min(chunks, shared)
            early += (1 - turn) * cutlass.max(chunks + shared - t.tokens // c.chunk, 0)
            for i in cutlass.range(chunks, unroll=1):
                if i == early:
                    self.release(acc_empty)
                if (i ^ done) & 1 == group:
                    at = (turn * i + (1 - turn) * (chunks - 1 - i)) * c.chunk
                    self.drain(acc, at, work, scales, sExchange, tensors, me)
            if early == chunks:
                self.release(acc_empty)
            done ^= chunks & 1
            turn ^= 1
            tile += step
        if done == group:  # the buffer was handed to this group once more than it took it
            cute.arch.barrier(barrier_id=EXCHANGE + group, number_of_threads=256)

    @cute.jit
    def fetch_scales(self, work: WorkTile, turn: Int32, tensors: Tensors, me: Thread, s) -> TileScales:
        """Load the scales of the tile's tokens into shared memory, weight scales and biases into registers."""
        c, t = self.c, self.c.tile
        sTokens = cute.make_tensor(s.scale.data_ptr() + turn * t.tokens, cute.make_layout(t.tokens))
        if const_expr(not c.dense):
            if me.tid < t.tokens:
                row_scale = Float32(0.0)
                if me.tid < work.rows:
                    row_scale = tensors.mXScale[work.first + me.tid]
                    if const_expr(c.out == "nvfp4"):
                        self.store_row_scale(work, tensors, me)
                sTokens[me.tid] = row_scale
        scales, biases = [tensors.mScale0[work.expert]], []
        if const_expr(c.projections == 2):
            scales.append(tensors.mScale1[work.expert])
        lane = me.thread
        if const_expr(c.fused):  # the thread's gate row
            lane -= me.thread // TOGETHER % 2 * TOGETHER
        elif const_expr(c.projections == 2):
            scales = [cutlass.select_(me.thread // TOGETHER % 2 == 1, scales[1], scales[0])]
        if const_expr(c.dense):
            scales = [scale * ptx.UNSCALE for scale in scales]
        if const_expr(c.bias is not None):
            for b in cutlass.range_constexpr(t.blocks):
                column, up = self.column_of(self.scheduler.block_row(work.row_tile, b) + lane)
                column = cutlass.min(column, c.rows - 1)
                columns = [column, column + c.rows] if const_expr(c.fused) else [column + up * c.rows]
                here = [tensors.mBias[work.expert, i].to(Float32) for i in columns]
                if const_expr(c.parts > 1):
                    here = [cutlass.select_(work.part == 0, bias, Float32(0.0)) for bias in here]
                biases.append(here)
        h = tensors.mHScale[work.expert] if const_expr(c.out == "nvfp4") else Float32(1.0)
        return TileScales(scales, biases, sTokens, h)

    def column_of(self, row: Int32) -> tuple:
        """(column within its projection, 1 for up) of a weight row."""
        if self.c.projections == 1:
            return row, 0
        return row // (2 * TOGETHER) * TOGETHER + row % TOGETHER, row // TOGETHER % 2

    @cute.jit
    def store_row_scale(self, work: WorkTile, tensors: Tensors, me: Thread):
        if work.row_tile == 0:
            tensors.mOutScale[work.first + me.tid] = tensors.mHScale[work.expert]

    @cute.jit
    def drain(self, acc: Int32, at: Int32, work: WorkTile, scales: TileScales, sExchange, tensors: Tensors, me: Thread):
        """For one group: bring a chunk of the tile's tokens, from `at` on, through the buffer to the output."""
        c, t, thread, group = self.c, self.c.tile, me.thread, me.group
        for b in cutlass.range_constexpr(t.blocks):
            words = self.words_of(self.finish(acc, at, b, scales, me))
            # the groups own the buffer in turn
            if const_expr(b == 0):
                cute.arch.barrier(barrier_id=EXCHANGE + group, number_of_threads=256)
            else:
                cute.arch.barrier(barrier_id=GROUP + group, number_of_threads=128)
            for j in cutlass.range_constexpr(len(words)):
                # a warp's rows are permuted in fours, so that reading back has no bank conflicts
                sExchange[thread ^ (me.warp % 4 << 2), j] = words[j]
            cute.arch.barrier(barrier_id=GROUP + group, number_of_threads=128)
            count = len(words)  # columns that the thread has afterwards, of one token or of two in a word
            line, first = thread // (ROWS // count), thread % (ROWS // count) * count
            mine = cute.make_rmem_tensor(count, Uint32)
            for q in cutlass.range_constexpr(count // 4):
                four = line * ROWS + ((first + 4 * q) ^ (first // 32 << 2))
                cute.autovec_copy(
                    cute.make_tensor((sExchange.iterator + four).align(16), cute.make_layout(4)),
                    cute.make_tensor(mine.iterator + 4 * q, cute.make_layout(4)),
                )
            if const_expr(b == t.blocks - 1):
                cute.arch.barrier_arrive(barrier_id=EXCHANGE + 1 - group, number_of_threads=256)
            column, upper = self.column_of(self.scheduler.block_row(work.row_tile, b) + first)
            start, up = at, upper
            if const_expr(c.fused):  # the upper halves of warps had later tokens
                start, up = at + upper * CHUNK, 0
            mine = [mine[i] for i in range(count)]
            if const_expr(c.out == "nvfp4"):
                self.store_nvfp4(mine, start + line, column, work, scales.h, tensors)
            elif const_expr(c.halves):
                for high in cutlass.range_constexpr(2):
                    words = self.halves_of(mine, column, high)
                    self.store_row(words, start + 2 * line + high, column, up, work, tensors)
            else:
                self.store_row(mine, start + line, column, up, work, tensors)

    def words_of(self, results: list) -> list:
        """16 tokens as words: fp32 numbers, or two 16-bit numbers per word."""
        if not self.c.halves:
            return [v.bitcast(Uint32) for v in results]
        half = cutlass.Float16 if self.c.out == "float16" else cutlass.BFloat16
        return [ptx.pack_half2(results[j], results[j + 1], half) for j in range(0, CHUNK, 2)]

    @cute.jit
    def halves_of(self, mine: list, column: Int32, high: cutlass.Constexpr) -> list:
        """The low or high halves of eight words, two per word; zero beyond the last column of "interleaved" rows."""
        order = EIGHT if self.c.out == "interleaved" else range(8)
        pick = 0x7632 if high else 0x5410
        words = [Uint32(cute.arch.prmt(mine[order[i]], mine[order[i + 1]], pick)) for i in range(0, 8, 2)]
        if self.c.out == "interleaved":
            words = [word if column < self.c.rows else Uint32(0) for word in words]
        return words

    @cute.jit
    def finish(self, acc: Int32, at: Int32, block: cutlass.Constexpr, scales: TileScales, me: Thread) -> list:
        """The thread's column for 16 tokens: sums from TMEM, scales, bias, gate."""
        c = self.c
        sums = ptx.load_columns(acc + block * c.tile.tokens + at, CHUNK, c.fused)
        if const_expr(c.fused):
            at += me.thread // TOGETHER % 2 * CHUNK
        of_tokens = cute.make_rmem_tensor(CHUNK, Float32)
        if const_expr(not c.dense):
            cute.autovec_copy(
                cute.make_tensor((scales.sTokens.iterator + at).align(16), cute.make_layout(CHUNK)), of_tokens
            )
        results = []
        for j in cutlass.range_constexpr(CHUNK):
            values = [ptx.mul(v[j], scale) for v, scale in zip(sums, scales.of_rows, strict=True)]
            if const_expr(not c.dense):
                values = [ptx.mul(v, of_tokens[j]) for v in values]
            if const_expr(c.bias is not None):
                values = [ptx.add(v, bias) for v, bias in zip(values, scales.biases[block], strict=True)]
            results.append(apply_gate_exact(c.gate, *values))
        return results

    @cute.jit
    def release(self, acc_empty):
        ptx.tmem_fence(before=True)
        with cute.arch.elect_one():
            if const_expr(self.c.tile.ctas == 2):
                ptx.arrive_in_first(acc_empty)
            else:
                cute.arch.mbarrier_arrive(acc_empty)

    @cute.jit
    def store_row(self, words: list, token: Int32, column: Int32, up: Int32, work: WorkTile, tensors: Tensors):
        """Store neighbouring columns of one token, as fp32 or two per word; up: 1 for columns of up rows."""
        c, per_word = self.c, 2 if self.c.halves else 1
        inside = column < (c.width if c.out == "interleaved" else c.rows)
        column += up * c.rows
        if token < work.rows and inside:
            row = work.first + token
            if const_expr(c.scattered):
                row = tensors.mOrder[row]
            if const_expr(c.parts > 1):
                row += work.part * tensors.mOrder.shape[0]
            for q in cutlass.range_constexpr(len(words) // 4):
                store_words(words[4 * q : 4 * q + 4], tensors.mOut, row, column // per_word + 4 * q)

    @cute.jit
    def store_nvfp4(self, words: list, token: Int32, column: Int32, work: WorkTile, h_scale, tensors: Tensors):
        """Quantize a block of 16 fp32 numbers and store its codes and sf. Columns of sf are padded to a multiple of 4
        with zeros."""
        c, row, row_in_group = self.c, work.first + token, work.row_in_group + token
        inside = column < c.rows
        values = [word.bitcast(Float32) for word in words]
        sf, low, high = ptx.quantize_block(values, h_scale, c.four_over_six)
        k = column // 16
        if token < work.rows:
            if inside:
                store_words([low, high], tensors.mOut, row, k * 2)
            if k < -(-c.rows // 64) * 4:
                sf_tile = Int64(work.sf_tile + row_in_group // 128) * -(-c.rows // 64) + k // 4
                byte = row_in_group % 32 * 16 + row_in_group % 128 // 32 * 4 + k % 4
                if not inside:
                    sf = Uint32(0)
                tensors.mOutSF[sf_tile * SF_TILE + byte] = Uint8(sf)

    @cute.jit
    def zero_unrouted_rows(self, tensors: Tensors, tid):
        """Write zeros to the rows from offsets[E] on, before the first tile."""
        c = self.c
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        row = tensors.mOffsets[c.experts] + bid
        while row < tensors.mOrder.shape[0]:
            at = row
            if const_expr(c.scattered):
                at = tensors.mOrder[row]
            for part in cutlass.range_constexpr(c.parts):
                for pair in cutlass.range(tid, tensors.mOut.shape[1] // 2, 256):
                    store_words([Uint32(0), Uint32(0)], tensors.mOut, at + part * tensors.mOrder.shape[0], pair * 2)
            if const_expr(c.out == "nvfp4"):
                if tid == 0:
                    tensors.mOutScale[row] = Float32(1.0)
            row += grid


def store_words(words: list[Uint32], mOut: cute.Tensor, row: Int32, start: Int32):
    """Write 2 or 4 words to mOut[row, start:] in one store."""
    registers = cute.make_rmem_tensor(len(words), Uint32)
    for i, word in enumerate(words):
        registers[i] = word
    to = (mOut.iterator + Int64(row) * mOut.shape[1] + start).align(4 * len(words))
    cute.autovec_copy(registers, cute.make_tensor(to, cute.make_layout(len(words))))
