"""What the portable backend does with rows besides its GEMMs: sort them by expert, quantize them, add them up."""

import triton
import triton.language as tl

from moe_nvfp4.kernels.portable.dequantize import rounded

ILLEGAL = tl.constexpr(
    "expert ids must lie in 0 .. num_experts - 1, or be num_experts or -1 for 'not here'; the router and the experts "
    "disagree about the number of experts"
)


@triton.jit(do_not_specialize=["R", "BM", "max_tiles"])
def route_kernel(
    ids, order, position, row_expert, offsets, tile_expert, tile_row, tile_end, tile_count, R,
    BM, max_tiles, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr, HISTOGRAM: tl.constexpr,
):  # fmt: skip
    """Program e finds the rows of expert e (see `routing.Groups`) and its tiles of BM rows (see `routing.Tiles`).

    ids [R]; EP: a power of two >= E. Every program counts the rows of all experts, so that none waits for another: in a
    histogram in shared memory (HISTOGRAM), or by comparing each id with each expert.
    """
    e = tl.program_id(0)
    experts = tl.arange(0, EP)
    counts = tl.zeros([EP], tl.int32)
    for start in range(0, R, CHUNK):
        i = start + tl.arange(0, CHUNK)
        here = tl.load(ids + i, mask=i < R, other=-1).to(tl.int32)
        tl.device_assert((here >= -1) & (here <= E), ILLEGAL)
        mine = (here >= 0) & (here < E)
        if HISTOGRAM:
            counts += tl.histogram(tl.where(mine, here, 0), EP, mask=mine)
        else:
            counts += tl.sum((tl.where(mine, here, -1)[:, None] == experts[None, :]).to(tl.int32), 0)
    begin = tl.sum(tl.where(experts < e, counts, 0), 0)
    count = tl.sum(tl.where(experts == e, counts, 0), 0)
    tl.store(offsets + e, begin)
    if e == E - 1:
        tl.store(offsets + E, begin + count)
    _store_tiles(counts, begin, count, tile_expert, tile_row, tile_end, tile_count, BM, max_tiles, E, EP)
    if count > 0:
        row = begin
        for start in range(0, R, CHUNK):
            i = start + tl.arange(0, CHUNK)
            found = (tl.load(ids + i, mask=i < R, other=-1).to(tl.int32) == e).to(tl.int32)
            to = row + tl.cumsum(found, 0) - 1
            tl.store(order + to, i, mask=found > 0)
            if position is not None:
                tl.store(position + i, to, mask=found > 0)
            if row_expert is not None:
                tl.store(row_expert + to, tl.zeros([CHUNK], tl.int32) + e, mask=found > 0)
            row += tl.sum(found, 0)


@triton.jit
def _store_tiles(
    counts, begin, count, tile_expert, tile_row, tile_end, tile_count, BM, max_tiles, E: tl.constexpr, EP: tl.constexpr
):  # fmt: skip
    """Program e stores the tiles of expert e, whose `count` rows begin at `begin`; counts [EP] has those of all."""
    e = tl.program_id(0)
    tiles = (counts + BM - 1) // BM
    tile = tl.sum(tl.where(tl.arange(0, EP) < e, tiles, 0), 0)
    if e == E - 1:
        all_tiles = tl.sum(tiles, 0)
        tl.store(tile_count, all_tiles)
        for start in range(all_tiles, max_tiles, 128):
            i = start + tl.arange(0, 128)
            tl.store(tile_expert + i, tl.full([128], -1, tl.int32), mask=i < max_tiles)
    for t in range(0, (count + BM - 1) // BM):
        tl.store(tile_expert + tile + t, e)
        tl.store(tile_row + tile + t, begin + t * BM)
        tl.store(tile_end + tile + t, begin + count)


@triton.jit(do_not_specialize=["R", "BM", "max_tiles"])
def tiles_kernel(
    order, offsets, ids, tile_expert, tile_row, tile_end, tile_count, R, BM, max_tiles, E: tl.constexpr,
    EP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What `route_kernel` makes, of rows that are sorted already: program e stores the tiles of expert e and, for its
    assignments, their ids [R]; program E - 1 also those of the assignments without an expert."""
    e = tl.program_id(0)
    experts = tl.arange(0, EP)
    starts = tl.load(offsets + experts, mask=experts < E, other=0)
    counts = tl.load(offsets + experts + 1, mask=experts < E, other=0) - starts
    begin = tl.load(offsets + e)
    end = tl.load(offsets + e + 1)
    _store_tiles(counts, begin, end - begin, tile_expert, tile_row, tile_end, tile_count, BM, max_tiles, E, EP)
    last = tl.where(e == E - 1, R, end)
    for start in range(begin, last, CHUNK):
        row = start + tl.arange(0, CHUNK)
        of_row = tl.load(order + row, mask=row < last, other=0)
        tl.store(ids + of_row, tl.where(row < end, e, E), mask=row < last)


@triton.jit
def quantize_kernel(
    x, index, expert, expert_scale, live, values, sf_values, row_scale,
    K: tl.constexpr, INDEX_DIV: tl.constexpr, BLOCK: tl.constexpr, HOW: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
):  # fmt: skip
    """Quantize row r of x as `reference.quantize_rows` does, to code * sf in bf16 and a global scale. With `sf_values`
    uint8 [R, K / 16], it stores codes in `values` uint8 [R, K / 2] and block scales there.

    The scale is that of the row's expert if `expert_scale` [E] is given, else the row's own. Rows from `live` on are
    skipped.
    """
    r = tl.program_id(0)
    ours = r == r
    if live is not None:
        ours = r < tl.load(live)
    if ours:
        source = r
        if index is not None:
            source = tl.load(index + r) // INDEX_DIV
        from_row = x + source.to(tl.int64) * K
        k = tl.arange(0, BLOCK)
        if expert_scale is not None:
            scale = tl.load(expert_scale + tl.load(expert + r))
        else:
            largest = tl.zeros([BLOCK], tl.float32)
            for at in range(0, K, BLOCK):
                v = tl.load(from_row + at + k, mask=at + k < K, other=0.0).to(tl.float32)
                largest = tl.maximum(largest, tl.abs(v), propagate_nan=tl.PropagateNan.ALL)
            amax = tl.reduce(largest, 0, _larger)
            most = 1536.0 if FOUR_OVER_SIX else 2688.0  # 6 * 256, 6 * 448
            scale = _larger(tl.math.div_rn(amax, most), 1.1754943508222875e-38)
            scale = tl.where(amax == 0.0, 1.0, scale)
        tl.store(row_scale + r, scale)
        for at in range(0, K, BLOCK):
            v = tl.load(from_row + at + k, mask=at + k < K, other=0.0).to(tl.float32)
            v = tl.reshape(v, (BLOCK // 16, 16))
            a = tl.abs(v)
            most_of_block = tl.reduce(a, 1, _larger)
            sf = _e4m3(tl.math.div_rn(tl.math.div_rn(most_of_block, 6.0), scale))
            if FOUR_OVER_SIX:  # see format._four_over_six
                four = _e4m3(tl.math.div_rn(tl.math.div_rn(most_of_block, 4.0), scale))
                within = tl.minimum(tl.maximum(scale, 7.888609052210118e-31), 1.2676506002282294e30)  # 2^-100, 2^100
                four = tl.where(sf < 0.015625, sf, tl.where(within == scale, four, sf))
                sf = tl.where(_squared_error(a, four, scale) < _squared_error(a, sf, scale), four, sf)
            step = tl.where(sf == 0.0, float("inf"), sf * scale)
            magnitude = _e2m1(tl.math.div_rn(a, tl.broadcast_to(step[:, None], (BLOCK // 16, 16))))
            if sf_values is None:
                magnitude *= sf[:, None]
                v = tl.reshape(tl.where(v < 0.0, -magnitude, magnitude), (BLOCK,))
                to = values + r.to(tl.int64) * K + at + k
                tl.store(to, rounded(v, values.dtype.element_ty, HOW), mask=at + k < K)
            else:
                code = _e2m1_bits(magnitude) | tl.where(v < 0.0, 8, 0)
                low, high = tl.split(tl.reshape(code, (BLOCK // 2, 2)))
                pair = at // 2 + tl.arange(0, BLOCK // 2)
                to = values + r.to(tl.int64) * (K // 2) + pair
                tl.store(to, (low | (high << 4)).to(tl.uint8), mask=pair < K // 2)
                block = at // 16 + tl.arange(0, BLOCK // 16)
                tl.store(sf_values + r.to(tl.int64) * (K // 16) + block, _e4m3_bits(sf), mask=block < K // 16)


@triton.jit
def _e4m3(x):
    """fp32 x >= 0 -> the nearest e4m3 number, ties to even, at most 448. NaN stays, though its bits may overflow."""
    x = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    normal = tl.where(x == x, normal, x)
    return tl.where(x < 0.015625, _integer(x * 512.0) * 0.001953125, normal)  # 2^-6: below, steps of 2^-9


@triton.jit
def _e2m1(x):
    """fp32 x >= 0 -> the nearest of 0 .5 1 1.5 2 3 4 6, ties to even codes: steps of .5 below 2, of 1, of 2 from 4."""
    x = tl.minimum(x, 6.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(x < 2.0, _integer(2.0 * x) * 0.5, tl.where(x < 4.0, _integer(x), 2.0 * _integer(0.5 * x)))


@triton.jit
def _e4m3_bits(x):
    """The e4m3 byte of a number that `_e4m3` returned. NaN gives e4m3's NaN."""
    bits = (x.to(tl.int32, bitcast=True) >> 20) - 960  # 8 * (127 - 7), the difference of the exponent biases
    bits = tl.where(x < 0.015625, (x * 512.0).to(tl.int32), bits)
    return tl.where(x == x, bits, 127).to(tl.uint8)


@triton.jit
def _e2m1_bits(x):
    """The code of a number that `_e2m1` returned. NaN gives 7; its block scale is NaN."""
    bits = (x.to(tl.int32, bitcast=True) >> 22) - 252  # 2 * (127 - 1), the difference of the exponent biases
    return tl.where(x < 1.0, (2.0 * x).to(tl.int32), tl.where(x == x, bits, 7))


@triton.jit
def _squared_error(a, sf, scale):
    """`format._squared_error` of |x| [n, 16], bit for bit: the exact product is rounded to 2^-10, and everything after
    that is exact, whatever is fused and in whatever order it is added."""
    inverse = tl.broadcast_to(tl.math.div_rn(1.0, sf * scale)[:, None], a.shape)
    a = tl.fma(a, inverse, 12288.0) - 12288.0  # 1.5 * 2^13, where fp32 has steps of 2^-10
    power = (tl.maximum(a, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = power * 6291456.0  # 1.5 * 2^22: there fp32 has steps of half of `power`, as e2m1 has near a
    d = a - ((a + large) - large)
    return tl.sum(d * d, 1) * (sf * sf)


@triton.jit
def _integer(x):
    """fp32 0 <= x < 2^22 -> the nearest integer, ties to even: x + 1.5 * 2^23 has no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["R", "LD"])
def combine_kernel(
    y, ids, weights, position, scale, row_scale, bias, out, R, LD,
    E: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """out[t, :N] = sum over slots j, in order, of weights[t, j] * (sum over splits of y[split, t * TOP_K + j]), fp32.

    Slots whose id is not an expert's have rows of zeros. Without `weights`, they have weight one. LD: the row stride of
    out. With `position`, the row of each assignment in y [R, N], y holds plain products: the
    expert's `scale` [E], `row_scale` [R] (if given) and `bias` [E, LD] are applied here.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = t * TOP_K + j
        width = N
        if ids is not None:
            e = tl.load(ids + slot).to(tl.int32)
            tl.device_assert((e >= -1) & (e <= E), ILLEGAL)
            ours = (e >= 0) & (e < E)
            e = tl.where(ours, e, 0)
            width = tl.where(ours, N, 0)
        there = n < width
        from_row = slot
        if position is not None:
            from_row = tl.load(position + slot, mask=ours, other=0).to(tl.int64)
        row = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            row += tl.load(y + (split * R + from_row) * N + n, mask=there, other=0.0).to(tl.float32)
        if scale is not None:
            row *= tl.load(scale + e)
        if row_scale is not None:
            row *= tl.load(row_scale + from_row)
        if bias is not None:
            row += tl.load(bias + e.to(tl.int64) * LD + n, mask=there, other=0.0).to(tl.float32)
        row = tl.where(there, row, 0.0)
        if weights is not None:
            row *= tl.load(weights + slot).to(tl.float32)
        total += row
    tl.store(out + t * LD + n, rounded(total, out.dtype.element_ty, HOW), mask=n < N)
