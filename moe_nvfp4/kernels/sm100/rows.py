"""The row kernels of Blackwell: they gather or quantize rows before a GEMM, and add up the top-k slots after both."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute
from cutlass.memory import SmemAllocator

from moe_nvfp4.format import sf_max
from moe_nvfp4.kernels.common import arithmetic
from moe_nvfp4.kernels.common.rows import neighbours
from moe_nvfp4.kernels.common.warp import largest_of_lanes, sum_of_lanes
from moe_nvfp4.kernels.sm100 import ptx
from moe_nvfp4.kernels.sm100.config import EIGHT, CombineConfig, InterleaveConfig, QuantizeConfig, interleaved_width


class QuantizeRows:
    """Row r of the result is x[index[r]] in NVFP4: codes, and scales in the grouped 128x4 layout.

    One CTA of 128 threads per row. All threads count the experts before the row (which gives its expert and
    its padded row) and, with dynamic scales, find the row's largest magnitude; after a barrier they quantize
    blocks of 16, one per thread at a time. Unrouted rows get codes and a scale, but no sf.
    """

    THREADS = 128

    def __init__(self, config: QuantizeConfig):
        self.c = config

    def __repr__(self) -> str:
        return f"QuantizeRows({self.c})"

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [*, K]
        index: cute.Tensor,  # int32 [R]
        scale: cute.Tensor,  # fp32 [E], if static
        offsets: cute.Tensor,  # int32 [E + 1]
        codes: cute.Tensor,  # uint32 [R, K/8], written
        sf: cute.Tensor,  # uint8, flat, written except for the padding rows
        row_scale: cute.Tensor,  # fp32 [R], written
        stream,
    ):
        @cute.struct
        class Storage:
            experts: cute.struct.MemRange[Int32, 4]
            padding: cute.struct.MemRange[Int32, 4]
            largest: cute.struct.MemRange[Float32, 4]

        self.storage = Storage
        self.kernel(x, index, scale, offsets, codes, sf, row_scale).launch(
            grid=[row_scale.shape[0], 1, 1], block=[self.THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x, index, scale, offsets, codes, sf, row_scale):
        c = self.c
        blocks, sf_columns = c.k // 16, -(-c.k // 64) * 4
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        s = SmemAllocator().allocate(self.storage)
        s_experts = s.experts.get_tensor(cute.make_layout(4))
        s_padding = s.padding.get_tensor(cute.make_layout(4))
        s_largest = s.largest.get_tensor(cute.make_layout(4))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        experts, padding = Int32(0), Int32(0)  # before this row
        for i in cutlass.range_constexpr(-(-c.experts // self.THREADS)):
            expert = tid + i * self.THREADS
            if expert < c.experts:
                first, end = offsets[expert], offsets[expert + 1]
                if end <= row:
                    experts += 1
                    padding += (end - first + 127) // 128 * 128 - (end - first)
        source = Int64(index[row] if const_expr(c.gather) else row) * c.k
        largest = Float32(0.0)
        if const_expr(not c.static):
            for block in cutlass.range(tid, blocks, self.THREADS):
                largest = cute.arch.fmax(largest, ptx.largest_magnitude(self.load(x, source, block)), nan=True)
        experts, padding = sum_of_lanes(experts), sum_of_lanes(padding)
        largest = largest_of_lanes(largest, range(5))
        with cute.arch.elect_one():
            s_experts[warp], s_padding[warp], s_largest[warp] = experts, padding, largest
        cute.arch.sync_threads()
        experts = s_experts[0] + s_experts[1] + s_experts[2] + s_experts[3]
        padded = row + s_padding[0] + s_padding[1] + s_padding[2] + s_padding[3]
        live = experts < c.experts

        global_scale = Float32(1.0)
        if const_expr(c.static):
            if live:
                global_scale = scale[experts]
        else:
            largest = ptx.largest_magnitude([s_largest[i] for i in range(4)])
            global_scale = arithmetic.global_scale_for(largest, sf_max(c.four_over_six))
        if tid == 0:
            row_scale[row] = global_scale
        for block in cutlass.range(tid, sf_columns, self.THREADS):
            byte = Uint32(0)
            if block < blocks:
                byte, low, high = ptx.quantize_block(self.load(x, source, block), global_scale, c.four_over_six)
                two = cute.make_rmem_tensor(2, Uint32)
                two[0], two[1] = low, high
                at = (codes.iterator + Int64(row) * (c.k // 8) + block * 2).align(8)
                cute.autovec_copy(two, cute.make_tensor(at, cute.make_layout(2)))
            if live:
                tile = Int64(padded // 128) * (sf_columns // 4) + block // 4
                sf[tile * 512 + padded % 32 * 16 + padded % 128 // 32 * 4 + block % 4] = Uint8(byte)

    def load(self, x: cute.Tensor, source: Int64, block: Int32) -> list[Float32]:
        """16 values of a row as fp32."""
        values = cute.make_rmem_tensor(16, x.element_type)
        at = (x.iterator + source + block * 16).align(16)
        cute.autovec_copy(cute.make_tensor(at, cute.make_layout(16)), values)
        return [values[i].to(Float32) for i in range(16)]


class InterleaveRows:
    """Row r of the result is x[index[r]] as a `DenseTile` reads it: each eight columns are in the order `EIGHT`, and
    the padding columns are zero.

    One CTA of 128 threads per row; a thread copies eight columns at a time.
    """

    THREADS = 128

    def __init__(self, config: InterleaveConfig):
        self.c = config

    def __repr__(self) -> str:
        return f"InterleaveRows({self.c})"

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # uint32 [*, k / 2]: two bf16 each
        index: cute.Tensor,  # int32 [R]
        rows: cute.Tensor,  # uint32 [R, width / 2], written
        stream,
    ):
        self.kernel(x, index, rows).launch(
            grid=[rows.shape[0], 1, 1], block=[self.THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x, index, rows):
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        source = Int64(index[row] if const_expr(c.gather) else row) * (c.k // 2)
        for eight in cutlass.range(tid, interleaved_width(c.k) // 8, self.THREADS):
            loaded, stored = (cute.make_rmem_tensor(4, Uint32) for _ in range(2))
            loaded.fill(0)
            if eight < c.k // 8:
                at = (x.iterator + source + eight * 4).align(16)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout(4)), loaded)
            for i in cutlass.range_constexpr(4):
                a, b = (loaded[EIGHT[2 * i + j] // 2] for j in range(2))
                # both are odd columns, or both are even
                stored[i] = cute.arch.prmt(a, b, 0x7632 if EIGHT[2 * i] % 2 else 0x5410)
            to = (rows.iterator + Int64(row) * (interleaved_width(c.k) // 2) + eight * 4).align(16)
            cute.autovec_copy(stored, cute.make_tensor(to, cute.make_layout(4)))


class Combine:
    """y[t] = sum over slots j = 0, 1, ... of weight[t, j] * row[t * top_k + j], in fp32 and in that order.

    If rows have parts (of K), the parts of a row are added first, in order.

    A thread sums four columns of a token; the grid of CTAs of 128 threads is (tokens, column blocks).
    """

    THREADS = 128

    def __init__(self, config: CombineConfig):
        self.c = config

    def __repr__(self) -> str:
        return f"Combine({self.c})"

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,  # [parts * T * top_k, H]
        weights: cute.Tensor,  # [T, top_k]
        y: cute.Tensor,  # [T, H], written
        stream,
    ):
        columns = -(-self.c.hidden // (4 * self.THREADS))
        self.kernel(rows, weights, y).launch(
            grid=[y.shape[0], columns, 1], block=[self.THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, rows, weights, y):
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        token, block, _ = cute.arch.block_idx()
        column = (block * self.THREADS + tid) * 4
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if column < c.hidden:
            sums = [Float32(0.0)] * 4
            for j in cutlass.range_constexpr(c.top_k):
                weight = weights[token, j].to(Float32)
                row, values = Int64(token) * c.top_k + j, []
                for part in cutlass.range_constexpr(c.parts):
                    four = cute.make_rmem_tensor(4, rows.element_type)
                    cute.autovec_copy(neighbours(rows, part * (y.shape[0] * c.top_k) + row, column, 4), four)
                    loaded = [four[i].to(Float32) for i in range(4)]
                    values = [ptx.add(v, x) for v, x in zip(values, loaded, strict=True)] if part else loaded
                sums = [ptx.add(total, ptx.mul(weight, value)) for value, total in zip(values, sums, strict=True)]
            result = cute.make_rmem_tensor(4, y.element_type)
            for i in cutlass.range_constexpr(4):
                result[i] = sums[i].to(y.element_type)
            to = (y.iterator + Int64(token) * c.hidden + column).align(8)
            cute.autovec_copy(result, cute.make_tensor(to, cute.make_layout(4)))
