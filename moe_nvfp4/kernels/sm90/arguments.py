"""What the roles of the Hopper GEMM kernel share: the tensors of a launch, and shared memory."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import cute

from moe_nvfp4.kernels.sm90.scheduler import TileSlots


class Tensors(NamedTuple):
    """The tensors that a launch reads and writes. Those that it does not use may be anything."""

    mW1: cute.Tensor  # int32 [E, M64, K64 * 576], `sm90.pack`
    mW2: cute.Tensor
    mX: cute.Tensor  # bf16 [T, K]
    mIndex: cute.Tensor  # int32 [R]: row r of GEMM 1 is mX[mIndex[r]]; of joined linears, which one each 64-row block
    # of the matrix belongs to
    mH: cute.Tensor  # [R, I] (raw gate: [R, 2I])
    mRaw: cute.Tensor  # what is quantized: mH viewed as bf16, so that an fp32 value has two columns
    mQ: cute.Tensor  # bf16 [R, I], what GEMM 2 reads: mH, or its quantized rows, which may overwrite those of mH
    mY: cute.Tensor  # [2^log2_split_k * R, H]
    mOffsets: cute.Tensor  # int32 [E + 1]
    mGateScale: cute.Tensor  # fp32 [E], global scales of the gate rows
    mUpScale: cute.Tensor
    mDownScale: cute.Tensor  # of joined linears, one for each
    mBias1: cute.Tensor  # [E, rows of the matrix]
    mBias2: cute.Tensor
    mRowScale: cute.Tensor  # fp32 [T], the global scales of the rows of mX
    mHScale: cute.Tensor  # if h is quantized: fp32 [E], its static scales, or for bf16 h [R], zeros that are raised to
    # max |h|; for a linear fp32 [R], the global scales of its rows
    mSync: cute.Tensor  # int32 [1 + token tiles], zeros: the tile counter, and the progress of each token tile of h


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
