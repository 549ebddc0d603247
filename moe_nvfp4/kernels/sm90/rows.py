"""The kernels around the GEMMs on Hopper, without tensor cores: gathering before, the combine after.

Gather   the rows of x in grouped order: a token is read once and written to the rows of its slots. Where static scales
         make rows of slots, a row is found by its index.
Combine  y[t] = sum over slots j = 0, 1, ... of weight[t, j] * rows[position[t, j]], fp32, in that order; a row
         may have parts (if GEMM 2 splits K), which are added first.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from moe_nvfp4.kernels.common.rows import neighbours


@cute.jit
def load_eight(mRows: cute.Tensor, row, column, out):
    """Load eight elements of a row into the registers `out`, or zeros beyond the row's end."""
    out.fill(0.0)
    if column < mRows.shape[1]:
        cute.autovec_copy(neighbours(mRows, row, column), out)


@cute.jit
def store_eight(mRows: cute.Tensor, row, column, values: list):
    """Store eight fp32 registers as bf16."""
    out = cute.make_rmem_tensor(8, BFloat16)
    for i in cutlass.range_constexpr(8):
        out[i] = values[i].to(BFloat16)
    cute.autovec_copy(out, neighbours(mRows, row, column))


class Gather:
    """Each warp copies `WIDTH` columns of a token, 16 bytes per lane at a time. `early`: x is older than the routing
    kernel, and can be read while that one ends. `indexed`: row r is row mPosition[r] of x; top_k is 1."""

    THREADS, WIDTH = 256, 1024

    def __init__(self, early: bool, indexed: bool):
        assert not (early and indexed)
        self.early, self.indexed = early, indexed

    def __repr__(self) -> str:
        return f"Gather({self.early}, {self.indexed})"

    @cute.jit
    def __call__(self, mX, mPosition, mRows, top_k: Int32, stream):
        warps = mX.shape[0] * ((mX.shape[1] + self.WIDTH - 1) // self.WIDTH)
        self.kernel(mX, mPosition, mRows, top_k).launch(
            grid=[(warps * 32 + self.THREADS - 1) // self.THREADS, 1, 1],
            block=[self.THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mPosition: cute.Tensor, mRows: cute.Tensor, top_k: Int32):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        parts = (mX.shape[1] + self.WIDTH - 1) // self.WIDTH
        number = cta * (self.THREADS // 32) + tid // 32
        token, first = number // parts, number % parts * self.WIDTH + tid % 32 * 8
        loaded = [cute.make_rmem_tensor(8, mX.element_type) for _ in range(self.WIDTH // 256)]
        if const_expr(not self.early):
            cute.arch.griddepcontrol_wait()
        if token < mX.shape[0]:
            source = mPosition[token] if const_expr(self.indexed) else token
            for i in cutlass.range_constexpr(self.WIDTH // 256):
                if first + i * 256 < mX.shape[1]:
                    cute.autovec_copy(neighbours(mX, source, first + i * 256), loaded[i])
        if const_expr(self.early):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if token < mX.shape[0]:
            for j in cutlass.range(top_k, unroll=1):
                row = token if const_expr(self.indexed) else mPosition[token * top_k + j]
                for i in cutlass.range_constexpr(self.WIDTH // 256):
                    if first + i * 256 < mX.shape[1]:
                        cute.autovec_copy(loaded[i], neighbours(mRows, row, first + i * 256))


class Combine:
    """Adds top_k slots (unrolled) of `splits` parts each; a thread has 16 bytes of a token's rows."""

    THREADS = 128

    def __init__(self, top_k: int, splits: int):
        self.top_k, self.splits = top_k, splits

    def __repr__(self) -> str:
        return f"Combine({self.top_k}, {self.splits})"

    @cute.jit
    def __call__(self, mRows, mPosition, mOffsets, mWeights, mOut, stream):
        T, H = mOut.shape
        threads = H // (128 // mRows.element_type.width)
        self.kernel(mRows, mPosition, mOffsets, mWeights, mOut).launch(
            grid=[T, (threads + self.THREADS - 1) // self.THREADS, 1],
            block=[self.THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mRows: cute.Tensor,  # fp32 or bf16 [R, H], grouped
        mPosition: cute.Tensor,  # int32 [R]
        mOffsets: cute.Tensor,  # int32 [E + 1]
        mWeights: cute.Tensor,  # [T, top_k]
        mOut: cute.Tensor,  # bf16 [T, H]
    ):
        tid, _, _ = cute.arch.thread_idx()
        token, part, _ = cute.arch.block_idx()
        columns = 128 // mRows.element_type.width
        column = (part * self.THREADS + tid) * columns
        # routing was over before the GEMMs began, so its results can be read while they end
        live = mOffsets[mOffsets.shape[0] - 1]
        position = [mPosition[token * self.top_k + j] for j in range(self.top_k)]
        weight = [mWeights[token, j].to(Float32) for j in range(self.top_k)]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if column < mOut.shape[1]:
            R = mRows.shape[0] // self.splits
            loaded = []
            for j in cutlass.range_constexpr(self.top_k * self.splits):
                row = cutlass.select_(position[j // self.splits] < live, position[j // self.splits], Int32(0))
                row += R * (j % self.splits)
                loaded.append(cute.make_rmem_tensor(columns, mRows.element_type))
                cute.autovec_copy(neighbours(mRows, row, column, columns), loaded[j])
            total = cute.make_rmem_tensor(columns, Float32)
            total.fill(0.0)
            for j in cutlass.range_constexpr(self.top_k):
                for i in cutlass.range_constexpr(columns):
                    value = loaded[j * self.splits][i].to(Float32)
                    for part in cutlass.range_constexpr(1, self.splits):
                        value += loaded[j * self.splits + part][i].to(Float32)
                    # unrouted rows may hold anything
                    total[i] = total[i] + weight[j] * cutlass.select_(position[j] < live, value, Float32(0.0))
            out = cute.make_rmem_tensor(columns, mOut.element_type)
            for i in cutlass.range_constexpr(columns):
                out[i] = total[i].to(mOut.element_type)
            cute.autovec_copy(out, neighbours(mOut, token, column, columns))
