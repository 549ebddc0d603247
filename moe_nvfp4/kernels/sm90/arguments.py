"""What the roles of the Hopper GEMM's kernel share: the tensors of a launch, and shared memory."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import cute

from moe_nvfp4.kernels.sm90.scheduler import TileSlots


class Tensors(NamedTuple):
    """What a launch reads and writes. What it does not use may be anything."""

    mW1: cute.Tensor  # int32 [E, M64, K64 * 576], `sm90.pack`
    mW2: cute.Tensor
    mX: cute.Tensor  # bf16 [T, K]
    mIndex: cute.Tensor  # int32 [R], row r of GEMM 1 is mX[mIndex[r]]
    mH: cute.Tensor  # [R, I] (raw gate: [R, 2I])
    mRaw: cute.Tensor  # what is quantized: mH as bf16, so fp32 values have two columns
    mQ: cute.Tensor  # bf16 [R, I], what GEMM 2 reads: mH, or its quantized rows, which may take the place of mH's
    mY: cute.Tensor  # [2^log2_split_k * R, H]
    mOffsets: cute.Tensor  # int32 [E + 1]
    mGateScale: cute.Tensor  # fp32 [E], times the gate rows
    mUpScale: cute.Tensor
    mDownScale: cute.Tensor
    mBias1: cute.Tensor  # [E, rows of the matrix]
    mBias2: cute.Tensor
    mRowScale: cute.Tensor  # fp32 [T], the global scales of the rows of mX
    mHScale: cute.Tensor  # h to be quantized: fp32 [E] its scales; of bf16 rows [R] zeros, raised to max |h|; of a
    # linear's rows fp32 [R] their global scales
    mSync: cute.Tensor  # int32 [1 + token tiles], zeros: the tile counter, and how far each token tile of h is


class Shared(NamedTuple):
    """Shared memory. full, empty, stored: the first mbarrier of each ring."""

    full: cute.Pointer
    empty: cute.Pointer
    slots: TileSlots
    stored: cute.Pointer
    sX: cute.Tensor
    sOffsets: cute.Tensor
    sFirst: cute.Tensor
    sRowScale: cute.Tensor  # fp32 [BN, slots]
    sLargest: cute.Tensor  # fp32 bits [BN, slots]
