"""What the row kernels of the GPU backends share: neighbours in a row, and the sum over parts of K."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int64, const_expr, cute

from moe_nvfp4.kernels.common.arithmetic import add
from moe_nvfp4.kernels.common.gates import apply_gate_exact
from moe_nvfp4.weights import Gate


def neighbours(mRows: cute.Tensor, row, column, count: int = 8) -> cute.Tensor:
    """Elements column .. column + count - 1 of a row, aligned to their total size, but at most to 16 bytes."""
    address = (mRows.iterator + (Int64(row) * mRows.stride[0] + column)).toint()
    align = min(16, count * mRows.element_type.width // 8)
    pointer = cute.make_ptr(mRows.element_type, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


class SumParts:
    """out[r] = the sum of parts[p * R + r] over p = 0, 1, ..., always in this order, so with the same bits every time.
    The parts are those of K: where a GEMM has few tiles, each part of K is a tile of its own.

    A thread has len(order) neighbouring columns of a row, in each projection, and stores column order[i] of them i-th.

    gate     makes one column out of one column of each projection; None: there is only one projection
    routed   rows from offsets[E] on become zeros, and so do columns of the result that the parts lack
    """

    THREADS = 128

    def __init__(
        self, parts: int, order: tuple[int, ...] = (0, 1, 2, 3), projections: int = 1, gate: Gate | None = None,
        routed: bool = False,
    ):  # fmt: skip
        self.parts, self.order, self.projections, self.gate, self.routed = parts, order, projections, gate, routed

    def __repr__(self) -> str:
        return f"SumParts({self.parts}, {self.order}, {self.projections}, {self.gate}, {self.routed})"

    @cute.jit
    def __call__(
        self,
        mParts: cute.Tensor,  # fp32 [parts * R, projections * N]
        mOut: cute.Tensor,  # [R, width], written
        mOffsets,  # int32 [E + 1], if routed
        stream,
    ):
        R, width = mOut.shape
        self.kernel(mParts, mOut, mOffsets).launch(
            grid=[R, (width // len(self.order) + self.THREADS - 1) // self.THREADS, 1],
            block=[self.THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mParts: cute.Tensor, mOut: cute.Tensor, mOffsets):
        row, block, _ = cute.arch.block_idx()
        count = len(self.order)
        column = (block * self.THREADS + cute.arch.thread_idx()[0]) * count
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if column < mOut.shape[1]:
            sums = cute.make_rmem_tensor((self.projections, count), Float32)
            sums.fill(0.0)
            if const_expr(self.routed):
                if row < mOffsets[mOffsets.shape[0] - 1] and column < mParts.shape[1] // self.projections:
                    self.add_up(mParts, mOut.shape[0], row, column, sums)
            else:
                self.add_up(mParts, mOut.shape[0], row, column, sums)
            out = cute.make_rmem_tensor(count, mOut.element_type)
            for i in cutlass.range_constexpr(count):
                values = [sums[p, self.order[i]] for p in range(self.projections)]
                out[i] = apply_gate_exact(self.gate, *values).to(mOut.element_type)  # zeros give zero
            cute.autovec_copy(out, neighbours(mOut, row, column, count))

    @cute.jit
    def add_up(self, mParts: cute.Tensor, rows, row, column, sums: cute.Tensor):
        """Add the parts into sums. All loads come before the first addition."""
        count, N = len(self.order), mParts.shape[1] // self.projections
        loaded = []
        for part in cutlass.range_constexpr(self.parts):
            for p in cutlass.range_constexpr(self.projections):
                loaded.append(cute.make_rmem_tensor(count, Float32))
                for i in cutlass.range_constexpr(count // 4):
                    source = neighbours(mParts, part * rows + row, p * N + column + 4 * i, 4)
                    four = cute.make_tensor(loaded[-1].iterator + 4 * i, cute.make_layout(4))
                    cute.autovec_copy(source, four)
        for p in cutlass.range_constexpr(self.projections):
            for i in cutlass.range_constexpr(count):
                total = loaded[p][i]
                for part in cutlass.range_constexpr(1, self.parts):
                    total = add(total, loaded[part * self.projections + p][i])
                sums[p, i] = total
