"""NVFP4 activations on Hopper: x before the GEMMs, and what the GEMM kernel does for h.

A value is stored as bf16 `code * sf`, which is exact; the global scale of its row multiplies the sum. x is quantized by
CTAs that run beside those of `Route`, in the same launch. A row of h is spread over several tiles of GEMM 1, whose
epilogues keep the largest magnitude that they have seen, first in shared memory and then in global memory; separate
tiles quantize the rows. Values and scales are what `format.quantize` returns, except for the sign of zeros.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from moe_nvfp4.format import sf_max
from moe_nvfp4.kernels.common import arithmetic
from moe_nvfp4.kernels.common.route import local_id
from moe_nvfp4.kernels.common.warp import largest_of_lanes
from moe_nvfp4.kernels.sm90 import ptx
from moe_nvfp4.kernels.sm90.rows import load_eight, store_eight

# ---- eight values --------------------------------------------------------------------------------


@cute.jit
def code_times_sf(values: list, global_scale: Float32, four_over_six: cutlass.Constexpr):
    """8 values (the neighbouring lane has the other 8 of the block) -> their code * sf, exact in bf16:
    sf = e4m3(max / 6 / global_scale), or the one of `four_over_six`; code = e2m1(x / (sf * global_scale)). Zeros lose
    their sign.

    A whole warp must call it and take the same branches, so that ptxas knows that its lanes stay together.
    """
    largest = largest_of_lanes(arithmetic.largest_magnitude(values), range(1))
    sixth = arithmetic.divide_near(largest, Float32(6.0), Float32(1 / 6))
    sf = arithmetic.encode_e4m3(arithmetic.divide(sixth, global_scale))
    if const_expr(four_over_six):
        sf = arithmetic.better_scale(values, largest, sf, global_scale, _with_next_lane)
    value = arithmetic.decode_e4m3(sf)
    scale = arithmetic.mul(value, global_scale)
    none = value == 0.0  # then the codes will be multiplied by 0
    # if so, no quotient overflows, or underflows other than to 0, and none rounds to 8
    plain = global_scale > 2.0**-60 and global_scale < 2.0**60 and largest < 2.0**60
    rounded = [Float32(0.0)] * 8
    if cute.arch.vote_all_sync(plain and (none or largest < 6.9 * scale)):
        scale = cutlass.select_(none, Float32(1.0), scale)
        inverse = arithmetic.divide(Float32(1.0), scale)
        quotients = [arithmetic.divide_near(v, scale, inverse) for v in values]
        rounded = [arithmetic.fma(arithmetic.nearest_e2m1(q), value, Float32(0.0)) for q in quotients]
    else:
        sf = arithmetic.encode_e4m3(arithmetic.divide(arithmetic.divide(largest, Float32(6.0)), global_scale))
        if const_expr(four_over_six):
            sf = arithmetic.better_scale(values, largest, sf, global_scale, _with_next_lane)
        value = arithmetic.decode_e4m3(sf)
        scale = arithmetic.mul(value, global_scale)
        if value != 0.0:
            quotients = [_within_six(arithmetic.divide(v, scale)) for v in values]
            rounded = [arithmetic.fma(arithmetic.nearest_e2m1(q), value, Float32(0.0)) for q in quotients]
    return rounded


def _with_next_lane(x):
    return arithmetic.add(x, cute.arch.shuffle_sync_bfly(x, 1))


def _within_six(x):
    """x clamped to [-6, 6]; NaN stays NaN."""
    return cute.arch.fmax(cute.arch.fmin(x, Float32(6.0), nan=True), Float32(-6.0), nan=True)


def _fp32(x):
    return [x[i].to(Float32) for i in range(8)]


# ---- x -------------------------------------------------------------------------------------------


class Quantize:
    """x -> NVFP4, with `warps` warps per row and `each` half blocks per lane. A token has its own global scale; if
    scales are `static`, it becomes a row for each of its slots, with the scale of that slot's expert, or one row if the
    experts share it. A linear has one expert and no slots.
    """

    THREADS = 256  # of a CTA, when it is a launch of its own

    def __init__(self, static: bool, warps: int, each: int, four_over_six: bool):
        self.static, self.warps, self.each, self.four_over_six = static, warps, each, four_over_six

    def __repr__(self) -> str:
        return f"Quantize({self.static}, {self.warps}, {self.each}, {self.four_over_six})"

    @cute.jit
    def __call__(self, mX, mScale, mRows, mRowScale, stream):
        """Quantize the rows of a linear."""
        each = self.THREADS // 32 // self.warps
        self.kernel(mX, mScale, mRows, mRowScale).launch(
            grid=[(mRows.shape[0] + each - 1) // each, 1, 1],
            block=[self.THREADS, 1, 1],
            smem=self.THREADS // 32 * 4,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mScale: cute.Tensor | None, mRows: cute.Tensor, mRowScale: cute.Tensor):
        cta, _, _ = cute.arch.block_idx()
        self.rows(cta, self.THREADS // 32, mX, (None, None), mScale, mRows, mRowScale, Int32(1))

    @cute.jit
    def rows(self, cta: Int32, warps: cutlass.Constexpr, mX, ids: tuple, mScale, mRows, mRowScale, slots: Int32):
        """The work of CTA `cta` of `warps` warps: mX bf16 or fp32 [T, K] -> mRows bf16 [T * slots, K] and mRowScale
        fp32 [T * slots], with room for more; `slots` is 1 unless `static`, where mScale is fp32 [E] and row r is for
        expert mIds[r], or mMap[mIds[r]]; `ids` are these two. Without mIds all rows are the first expert's."""
        tid, _, _ = cute.arch.thread_idx()
        number, rows = cta * (warps // self.warps) + tid // (32 * self.warps), mX.shape[0] * slots
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        tensors = mX, ids, mScale, mRows, mRowScale
        if const_expr(self.static):
            if number < rows:
                self.row(number, True, warps, tensors, slots)
        else:  # warps of a row wait for each other
            self.row(cutlass.min(number, rows - 1), number < rows, warps, tensors, slots)

    @cute.jit
    def row(self, row: Int32, live: Boolean, warps: cutlass.Constexpr, tensors: tuple, slots: Int32):
        """Quantize a row, and store it if `live`."""
        mX, (mIds, mMap), mScale, mRows, mRowScale = tensors
        tid, _, _ = cute.arch.thread_idx()
        lane, lanes = tid % (32 * self.warps), 32 * self.warps
        loaded = [cute.make_rmem_tensor(8, mX.element_type) for _ in range(self.each)]
        source = row // slots if const_expr(self.static) else row
        for i in cutlass.range_constexpr(self.each):
            load_eight(mX, source, (lane + i * lanes) * 8, loaded[i])
        if const_expr(self.static):
            e = local_id(Int32(mIds[row]), mMap) if const_expr(mIds is not None) else Int32(0)
            here = e >= 0 and e < mScale.shape[0]  # unrouted rows are quantized too, with some expert's scale
            scale = mScale[cutlass.select_(here, e, Int32(0))]
        else:
            sLargest = cute.make_tensor(cute.arch.get_dyn_smem(Float32), cute.make_layout(warps))
            largest = arithmetic.largest_magnitude([arithmetic.largest_magnitude(_fp32(x)) for x in loaded])
            largest = largest_of_lanes(largest, range(5))
            if const_expr(self.warps > 1):
                if tid % 32 == 0:
                    sLargest[tid // 32] = largest
                cute.arch.sync_threads()
                first = tid // lanes * self.warps
                largest = arithmetic.largest_magnitude([sLargest[first + w] for w in range(self.warps)])
            scale = arithmetic.global_scale_for(largest, sf_max(self.four_over_six))
        if live and lane == 0:
            mRowScale[row] = scale
        for i in cutlass.range_constexpr(self.each):
            rounded = code_times_sf(_fp32(loaded[i]), scale, self.four_over_six)
            column = (lane + i * lanes) * 8
            if live and column < mRows.shape[1]:
                store_eight(mRows, row, column, rounded)


# ---- h, and the scales of rows: in the kernel of the GEMMs ---------------------------------------


@cute.jit
def ask_scales(out, sources, of_h, place, config: cutlass.Constexpr):
    """For a whole warp: load what the global scales of a tile's tokens lane, lane + 32, ... follow from. For x and for
    a linear's rows these are the scales; for h, its expert's scale if it is fp32, its largest magnitudes if bf16."""
    (mIndex, mRowScale, mHScale), (e, row, rows) = sources, place
    address = cutlass.select_(of_h, mHScale.iterator.toint(), mRowScale.iterator.toint())
    for q in cutlass.range_constexpr(cute.size(out)):
        at = row + cutlass.min(cute.arch.lane_idx() + 32 * q, rows - 1)
        h_at = e if const_expr(config.h_columns == 2) else at
        if not of_h:
            at = mIndex[at]
        at = address + Int64(cutlass.select_(of_h, h_at, at)) * 4
        pointer = cute.make_ptr(Float32, at, cute.AddressSpace.gmem)
        out[q] = cute.arch.load(pointer, Float32, sem="relaxed", scope="gpu")


@cute.jit
def store_scales(asked, sScale, of_h, config: cutlass.Constexpr):
    """For the same warp, when the loads are complete: store the scales in shared memory, for the consumers."""
    for q in cutlass.range_constexpr(cute.size(asked)):
        scale = asked[q]
        if const_expr(config.tracks_amax):
            if of_h:
                scale = arithmetic.global_scale_for(scale, sf_max(config.four_over_six))
        sScale[cutlass.min(cute.arch.lane_idx() + 32 * q, cute.size(sScale) - 1)] = scale


def load_pair(sScale, token, out):
    """The scales of tokens `token` (even) and `token` + 1."""
    pointer = cute.make_ptr(Float32, sScale.iterator.toint() + token * 4, cute.AddressSpace.smem, assumed_align=8)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), out)


@cute.jit
def keep_largest(largest: list, to, rows):
    """For a whole warp: store the largest of largest[2 n + i], over the lanes with the same lane % 4, for token
    8 n + lane % 4 * 2 + i in shared memory. In three steps, lanes exchange half of what they have (while it is more
    than one)."""
    lane = cute.arch.lane_idx()
    first, live = Int32(0), Boolean(True)
    for bit in cutlass.range_constexpr(2, 5):
        upper = (lane >> bit) & 1 == 1
        if const_expr(len(largest) > 1):
            half = (len(largest) + 1) // 2
            largest = [*largest, Float32(0.0)][: 2 * half]
            mine = [cutlass.select_(upper, largest[j + half], largest[j]) for j in range(half)]
            other = [cutlass.select_(upper, largest[j], largest[j + half]) for j in range(half)]
            other = [cute.arch.shuffle_sync_bfly(x, 1 << bit) for x in other]
            largest = [cute.arch.fmax(mine[j], other[j], nan=True) for j in range(half)]
            first = first + cutlass.select_(upper, Int32(half), Int32(0))
        else:
            largest = [largest_of_lanes(largest[0], range(bit, bit + 1))]
            live = live and not upper
    for j in cutlass.range_constexpr(len(largest)):
        at = first + j
        token = (at >> 1) * 8 + lane % 4 * 2 + (at & 1)
        ptx.keep_largest(to.toint() + token * 4, largest[j], live and token < rows)


@cute.jit
def quantize_stage(at: Int32, sScale, mQ, place, t: cutlass.Constexpr, config: cutlass.Constexpr):
    """For the consumer warps of tile shape t: quantize KB 64-column blocks of `rows` rows of h (an fp32 value has two
    columns), swizzled in shared memory, into mQ [R, I]. A lane has 8 values. Stage `kt` begins with the warp after the
    one that ended the previous stage."""
    (row, rows, first, kt), h = place, config.h
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
    chunks = h.width // 16  # chunks of 16 bytes per lane
    lanes = 8 // chunks  # lanes per 64-column block of a row
    words = cute.make_rmem_tensor(4 * chunks, Uint32)
    values = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=h), cute.make_layout(8))
    pieces, warps = (rows * (t.KB * lanes) + 31) // 32, 4 * t.NWG
    for i in cutlass.range((warp + kt * (warps - pieces % warps)) % warps, pieces, warps, unroll=1):
        number = i * (32 // lanes) + lane // lanes
        r, block = cutlass.min(number >> t.log2_KB, rows - 1), number & (t.KB - 1)
        for c in cutlass.range_constexpr(chunks):
            chunk = (lane % lanes * chunks + c) ^ (r % 8)
            source = at + (block * t.BN + r) * 128 + chunk * 16
            source = cute.make_ptr(Uint32, source, cute.AddressSpace.smem, assumed_align=16)
            to = cute.make_tensor(words.iterator + 4 * c, cute.make_layout(4))
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), to)
        rounded = code_times_sf(_fp32(values), sScale[r], config.four_over_six)
        column = (first + kt * t.KB + block) * (64 // chunks) + lane % lanes * 8
        if number >> t.log2_KB < rows and column < mQ.shape[1]:
            store_eight(mQ, row + r, column, rounded)
