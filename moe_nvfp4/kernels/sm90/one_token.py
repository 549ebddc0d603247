"""The experts of one token on Hopper, both GEMMs in one launch without routing, and the sum of what its CTAs make.

A token's layer is short: what costs time is not the bytes but what happens one after the other (routing, the tiles of a
CTA, h through global memory). Here the slots of the token are the groups, so nothing is sorted. A CTA makes a chunk of
64 columns of h for a slot, and multiplies it by the 64 columns of down_proj that meet it, so no CTA waits for another.
That gives a row of y for each chunk, and `SumChunks` adds the rows. Weights go from global memory into registers,
many loads ahead of their use: there is no ring in shared memory and no producer, and the loads of GEMM 2 are under way
before h is there.

The rows of the weights, their order and the rounding of h are those of `sm90.gemm`.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.memory import SmemAllocator

from moe_nvfp4.kernels.common.gates import apply_gate_fast
from moe_nvfp4.kernels.common.route import local_id, print_illegal
from moe_nvfp4.kernels.common.rows import neighbours
from moe_nvfp4.kernels.common.warp import sum_of_lanes
from moe_nvfp4.kernels.sm90 import ptx
from moe_nvfp4.kernels.sm90.pack import UNIT, UNIT_WORDS
from moe_nvfp4.weights import ExpertWeights, Gate

UNIT_BYTES = 4 * UNIT_WORDS
WARPS = 16
THREADS = 32 * WARPS
AHEAD, AHEAD_IN_2 = (4, 3), 8  # blocks that a warp has on their way in GEMM 1, and most in GEMM 2: six registers each


def chunks(I: int) -> int:
    """How many CTAs share a slot of a token."""
    return -(-I // UNIT)


def suits_one_token(w: ExpertWeights, top_k: int, multiprocessors: int) -> bool:
    """Whether this kernel runs a token of this layer: W4A16, with all CTAs at the same time, and enough of them, since
    one takes as long as its rows of H columns are."""
    ctas = top_k * chunks(w.intermediate_size)
    return not w.quantized and w.gate.kind != "raw" and w.hidden_size // UNIT <= ctas <= multiprocessors


class OneToken:
    """The kernel for the slots of one token: fp32 [top_k * chunks(I), H], a row for each CTA, which is its part of the
    slot's row of y, or 0 where the slot has no expert.

    Warp roles: all do the same. In GEMM 1 a warp has one of the chunk's slabs of 16 weight rows (8 of gate and 8 of up,
    where there are both), and a part of K. In GEMM 2 it has every 16th slab of the 64 columns.

    Timeline
        wait for the previous kernel | x and ids | ask for the first blocks | x to shared memory | per block of 64
        columns: dequantize, multiply, ask for the next one, at last for those of GEMM 2 | sum over parts of K, gate,
        h in registers | per block of GEMM 2: dequantize, multiply, store, ask for the next one

    Lanes with the same lane % 4 read the same numbers of x, so all eight columns of a product are the token.
    """

    def __init__(self, gate: Gate, H: int, I: int, bias: bool):
        self.gate, self.H, self.I, self.bias = gate, H, I, bias
        self.slabs = 8 if gate.gated else 4  # of a chunk
        self.parts = WARPS // self.slabs  # of K
        self.K1, self.K2 = -(-H // UNIT), chunks(I)  # blocks of K
        self.M1, self.M2 = -(-I // (UNIT // 2 if gate.gated else UNIT)), self.K1  # units along rows
        up, down = -(-self.K1 // self.parts), -(-4 * self.M2 // WARPS)  # blocks of a warp
        self.ahead = min(AHEAD, key=lambda n: (-(-up // n) * n, -n))
        self.up_rounds, self.down_rounds = -(-up // self.ahead), -(-down // AHEAD_IN_2)
        self.ahead_in_2 = max(self.ahead, -(-down // self.down_rounds))
        self.words = 32 * self.parts * self.up_rounds * self.ahead  # of x, with zeros at its end

    def __repr__(self) -> str:
        return f"OneToken({self.gate}, {self.H}, {self.I}, {self.bias})"

    @cute.jit
    def __call__(
        self, mIds, mMap, mW1, mW2, mX, mY, mGateScale, mUpScale, mDownScale, mBias1, mBias2, E: Int32, stream
    ):
        @cute.struct
        class Storage:
            x: cute.struct.Align[cute.struct.MemRange[Uint32, self.words], 16]
            sums: cute.struct.MemRange[Float32, 16 * WARPS]

        self.storage = Storage
        constants = tuple(Uint32(x) for x in ptx.DEQUANTIZE_CONSTANTS)
        tensors = (mIds, mMap, mW1, mW2, mX, mY, mGateScale, mUpScale, mDownScale, mBias1, mBias2)
        self.kernel(*tensors, E, constants).launch(
            grid=[mY.shape[0], 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,  # else ptxas takes 78 registers, and has fewer loads on their way: 1.6 us more
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mIds: cute.Tensor,  # int32 or int64 [top_k]
        mMap: cute.Tensor | None,  # int32: of each id, the number of the expert here, or -1
        mW1: cute.Tensor,  # units, int32 [E, M1, K1 * 576]
        mW2: cute.Tensor,
        mX: cute.Tensor,  # bf16 [1, H]
        mY: cute.Tensor,  # fp32 [top_k * K2, H]
        mGateScale: cute.Tensor,  # fp32 [E], as the next two
        mUpScale: cute.Tensor,
        mDownScale: cute.Tensor,
        mBias1: cute.Tensor,
        mBias2: cute.Tensor,
        E: Int32,
        constants: tuple,
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        storage = SmemAllocator().allocate(self.storage)
        sX = storage.x.get_tensor(cute.make_layout(self.words))
        sSums = storage.sums.get_tensor(cute.make_layout(16 * WARPS))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        mWords, x = cute.recast_tensor(mX, Uint32), cute.make_rmem_tensor(-(-self.words // THREADS), Uint32)
        x.fill(0)
        for i in cutlass.range_constexpr(cute.size(x)):
            if i * THREADS + tid < self.H // 2:
                x[i] = mWords[0, i * THREADS + tid]
        e = self.expert(mIds, mMap, cta // self.K2, E)
        if e < E:
            self.multiply(e, cta, mW1, mW2, x, mY, (mGateScale, mUpScale, mDownScale), (mBias1, mBias2), sX, sSums,
                          constants)  # fmt: skip
        else:
            for i in cutlass.range(tid, self.H, THREADS, unroll=1):
                mY[cta, i] = Float32(0.0)

    @cute.jit
    def expert(self, mIds, mMap, slot: Int32, E: Int32):
        """The expert of a slot; E if it has none. Traps on other ids than Route takes."""
        most = E if const_expr(mMap is None) else mMap.shape[0] - 1
        e = Int32(mIds[slot])
        wrong = mIds[slot] < -1 or mIds[slot] > most
        if not wrong:
            e = local_id(e, mMap)
            wrong = e < -1 or e > E
        if wrong:
            if cute.arch.thread_idx()[0] == 0:
                print_illegal(E)
            cute.arch.sync_threads()
            cute.arch.inline_ptx("trap;")
        return cutlass.select_(e < 0, E, e)

    @cute.jit
    def multiply(self, e: Int32, cta: Int32, mW1, mW2, x, mY, scales, biases, sX, sSums, constants):
        """Both GEMMs for a chunk of a live slot."""
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        chunk, slab, part = cta % self.K2, warp % self.slabs, warp // self.slabs
        row = cutlass.min((chunk * self.slabs + slab) // 4, Int32(self.M1 - 1))
        up = mW1.iterator.toint() + (Int64(e) * self.M1 + row) * (self.K1 * UNIT_BYTES)
        down = mW2.iterator.toint() + (Int64(e) * (self.M2 * self.K2) + chunk) * UNIT_BYTES
        ahead, first = self.ahead, part * (self.up_rounds * self.ahead)
        asked = [cute.make_rmem_tensor(6, Uint32) for _ in range(ahead)]
        for i in cutlass.range_constexpr(ahead):
            self.ask(asked[i], up, self.up_at(first + i))
        gate_scale, up_scale, down_scale = (m[e] * ptx.UNSCALE for m in scales)
        for i in cutlass.range_constexpr(cute.size(x)):
            at = i * THREADS + tid
            if const_expr(self.words % THREADS == 0) or at < self.words:
                sX[self.place(at)] = x[i]
        cute.arch.sync_threads()

        acc = cute.make_rmem_tensor(4, Float32)
        acc.fill(0.0)
        for r in cutlass.range(self.up_rounds, unroll=1):
            over, block = r + 1 == self.up_rounds, first + r * ahead
            following = cutlass.select_(over, down, up)
            for i in cutlass.range_constexpr(ahead):
                self.multiply_block(acc, asked[i], self.vector(sX, block + i), constants)
                at = cutlass.select_(over, self.down_at(i), self.up_at(block + ahead + i))
                self.ask(asked[i], following, at)
        asked += [cute.make_rmem_tensor(6, Uint32) for _ in range(self.ahead_in_2 - ahead)]
        for i in cutlass.range_constexpr(ahead, self.ahead_in_2):
            self.ask(asked[i], down, self.down_at(i))
        if lane % 4 == 0:
            sSums[(slab * self.parts + part) * 16 + lane // 4] = acc[0]
            sSums[(slab * self.parts + part) * 16 + lane // 4 + 8] = acc[2]
        cute.arch.sync_threads()
        h = self.hidden(e, chunk, gate_scale, up_scale, biases[0], sSums)
        for r in cutlass.range(self.down_rounds, unroll=1):
            for i in cutlass.range_constexpr(self.ahead_in_2):
                acc.fill(0.0)
                self.multiply_block(acc, asked[i], h, constants)
                self.store(acc, e, cta, r * self.ahead_in_2 + i, down_scale, biases[1], mY)
                if r + 1 < self.down_rounds:
                    self.ask(asked[i], down, self.down_at((r + 1) * self.ahead_in_2 + i))

    def up_at(self, block):
        """How many bytes after the first block of its row block `block` of K is, in GEMM 1."""
        if self.words > 32 * self.K1:  # blocks beyond the last one are multiplied by zeros
            block = cutlass.min(block, Int32(self.K1 - 1))
        return block * UNIT_BYTES

    def down_at(self, number):
        """How many bytes after the chunk's first unit a warp's slab `number` is, in GEMM 2."""
        row = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) + number * (WARPS // 4)
        if 4 * self.M2 < WARPS * self.down_rounds * self.ahead_in_2:
            row = cutlass.min(row, Int32(self.M2 - 1))
        return row * (self.K2 * UNIT_BYTES)

    def ask(self, words, base, offset):
        """Load the codes and block scales of this warp's slab of the unit at `offset`."""
        tid, _, _ = cute.arch.thread_idx()
        unit = base + Int64(offset)
        codes = ptx.load_words(4, unit + tid % 128 * 16)
        sf = ptx.load_words(2, unit + (2048 + tid % 128 // 4 * 8))
        for j, word in enumerate([*codes, *sf]):
            words[j] = word

    def vector(self, sX, block):
        """This lane's eight words of a block of x."""
        b = cute.make_rmem_tensor(8, Uint32)
        at = (sX.iterator + (block * 32 + cute.arch.lane_idx() % 4 * 8)).toint()
        source = cute.make_ptr(Uint32, at, cute.AddressSpace.smem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), b)
        return [b[i] for i in range(8)]

    @staticmethod
    def place(word):
        """Where word `word` of x (elements 2 `word` and the next) is in shared memory: the eight of a block that a lane
        needs lie together."""
        block, rest = word // 32, word % 32
        return block * 32 + rest % 4 * 8 + rest // 8 * 2 + rest // 4 % 2

    def multiply_block(self, acc, words, b, constants):
        """acc += 16 weight rows times 64 numbers of the vector."""
        sums = [acc[j] for j in range(4)]
        for ks in range(4):
            a = ptx.dequantize(words[ks], ptx.scales_of_step([words[4], words[5]], ks), constants)
            sums = ptx.mma(a, b[2 * ks], b[2 * ks + 1], sums)
        for j in range(4):
            acc[j] = sums[j]

    @cute.jit
    def hidden(self, e: Int32, chunk: Int32, gate_scale, up_scale, mBias, sSums):
        """This lane's eight words of the chunk of h. Every warp makes all of them: a lane two columns."""
        lane, gated = cute.arch.lane_idx(), self.gate.gated
        column = chunk * UNIT + 2 * lane
        at = cutlass.min(column, Int32(self.I - 2))  # of biases
        values = []
        for i in cutlass.range_constexpr(2):
            slab, row = (lane // 4, lane % 4 * 2 + i) if const_expr(gated) else (lane // 8, lane % 8 + 8 * i)
            a = b = self.total(slab, row, sSums) * (gate_scale if const_expr(gated) else up_scale)
            if const_expr(gated):
                b = self.total(slab, row + 8, sSums) * up_scale
            if const_expr(self.bias):
                a = a + mBias[e, at + i].to(Float32)
                if const_expr(gated):
                    b = b + mBias[e, at + i + self.I].to(Float32)
            values.append(apply_gate_fast(self.gate, a, b))
        word = cutlass.select_(column < self.I, ptx.pack_bf16(*values), Uint32(0))
        return [cute.arch.shuffle_sync(word, 4 * i + lane % 4) for i in range(8)]

    def total(self, slab, row, sSums):
        """The sum of a row of a slab over the parts of K, in their order."""
        found = sSums[slab * (self.parts * 16) + row]
        for p in range(1, self.parts):
            found = found + sSums[(slab * self.parts + p) * 16 + row]
        return found

    @cute.jit
    def store(self, acc, e: Int32, cta: Int32, number, scale, mBias, mY):
        """A warp's slab `number` of the CTA's row of y."""
        tid, _, _ = cute.arch.thread_idx()
        column = (number * WARPS + tid // 32) * 16 + tid % 32 // 4 * 2
        if column < self.H and tid % 4 == 0:
            pair = cute.make_rmem_tensor(2, Float32)
            for i in cutlass.range_constexpr(2):
                pair[i] = acc[2 * i] * scale
                if const_expr(self.bias):
                    if cta % self.K2 == 0:  # else another chunk of the slot brings it
                        pair[i] = pair[i] + mBias[e, column + i].to(Float32)
            cute.autovec_copy(pair, neighbours(mY, cta, column, 2))


class SumChunks:
    """y[h] = sum over rows r = (slot, chunk) of weight[slot] * rows[r, h], fp32; a CTA has 32 columns.

    A thread adds every 64th row, in order; then those of a warp, and then the warps.
    """

    COLUMNS = 32

    def __init__(self, top_k: int, chunks: int):
        self.top_k, self.chunks = top_k, chunks

    def __repr__(self) -> str:
        return f"SumChunks({self.top_k}, {self.chunks})"

    @cute.jit
    def __call__(self, mRows, mWeights, mOut, stream):
        @cute.struct
        class Storage:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * self.COLUMNS], 16]

        self.storage = Storage
        self.kernel(mRows, mWeights, mOut).launch(
            grid=[(mOut.shape[1] + self.COLUMNS - 1) // self.COLUMNS, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mRows: cute.Tensor,  # fp32 [top_k * chunks, H]
        mWeights: cute.Tensor,  # [1, top_k]
        mOut: cute.Tensor,  # bf16 [1, H]
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        R, lanes = self.top_k * self.chunks, self.COLUMNS // 4
        each = 32 // lanes * WARPS
        sSums = SmemAllocator().allocate(self.storage).sums.get_tensor(cute.make_layout((self.COLUMNS, WARPS)))
        column, loaded, weights = cta * self.COLUMNS + tid % lanes * 4, [], []
        for i in cutlass.range_constexpr(-(-R // each)):
            row = cutlass.min(i * each + tid // lanes, Int32(R - 1))
            weights.append(mWeights[0, row // self.chunks].to(Float32))  # the router was over before the GEMMs began
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        for i in cutlass.range_constexpr(len(weights)):
            loaded.append(cute.make_rmem_tensor(4, Float32))
            loaded[i].fill(0.0)
            if column < mOut.shape[1] and i * each + tid // lanes < R:
                cute.autovec_copy(neighbours(mRows, i * each + tid // lanes, column, 4), loaded[i])
        for c in cutlass.range_constexpr(4):
            total = Float32(0.0)
            for i in cutlass.range_constexpr(len(weights)):
                if i * each + tid // lanes < R:
                    total = total + weights[i] * loaded[i][c]
            total = sum_of_lanes(total, range(lanes.bit_length() - 1, 5))
            if tid % 32 < lanes:
                sSums[tid % lanes * 4 + c, tid // 32] = total
        cute.arch.sync_threads()
        if tid < self.COLUMNS and cta * self.COLUMNS + tid < mOut.shape[1]:
            total = Float32(0.0)
            for w in cutlass.range_constexpr(WARPS):
                total = total + sSums[tid, w]
            mOut[0, cta * self.COLUMNS + tid] = total.to(mOut.element_type)
