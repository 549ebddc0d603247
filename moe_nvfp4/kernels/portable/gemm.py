"""The grouped GEMM of the portable backend: tiles of an expert's weights times tiles of its tokens.

D[weight row, token] = sum over K of (code * sf)[weight row, k] * x[token, k]. The weights are the M operand of the
tensor cores, because there are always many rows of them; tokens fill the small N of 8, 16, ... x is read as 32-bit
words that hold a pair of columns, so that even and odd columns can be multiplied separately (see `dequantize`).
"""

import triton
import triton.language as tl

from moe_nvfp4.kernels.portable.dequantize import UNIT, dequantize, dot, dot_nvfp4, rounded


@triton.jit(do_not_specialize=["R"])
def gemm_kernel(
    x, x_sf, x_index, codes, sf, first_scale, scale, bias, row_scale, out, out_index, tile_expert, tile_row, tile_end,
    tile_count, R,
    N: tl.constexpr, K: tl.constexpr, K_PART: tl.constexpr, LD: tl.constexpr, SPLIT_AT: tl.constexpr,
    THIRD_AT: tl.constexpr, X_DIV: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr, CLAMP_AFTER: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, IDS: tl.constexpr, E: tl.constexpr, DTYPE: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """One tile: `out[to, n] = gate(x[from] . w[e, n])` for the rows of a token tile and each n of a weight tile.

    The token tiles come from `route_kernel`. With IDS > 0, `tile_expert` holds the ids of R <= IDS assignments to E
    experts instead, and these are the rows: see `_own_tile`. Without tiles, one expert has all rows.

    x          int32 [*, K / 2]: pairs of columns of DTYPE; with x_sf uint8 [*, K / 16], codes uint8 [*, K / 2], for
               tensor cores that multiply NVFP4 by NVFP4
    codes, sf  uint8 [E, N or 2N, K / 2 or K / 16]
    SPLIT_AT   rows below it have first_scale; if THIRD_AT is not 0, the rows are those of two or three linears: below
               SPLIT_AT, below THIRD_AT, and the others, with scale fp32 [2 or 3]
    """
    NT: tl.constexpr = (N + BN - 1) // BN
    PAIRED: tl.constexpr = GATE == "silu" or GATE == "gelu_tanh"
    ROWS: tl.constexpr = 2 * N if PAIRED else N
    K2: tl.constexpr = K // 2
    BK2: tl.constexpr = BK // 2
    if IDS > 0:
        n_tile = tl.program_id(0) % NT
        live, e, row, there = _own_tile(tile_expert, tl.program_id(0) // NT, R, IDS, E, BM)
    else:
        live, e, n_tile, row, there = _tile(tile_expert, tile_row, tile_end, tile_count, R, NT, GROUP, BM)
    if live:
        split = tl.program_id(1)
        source = row // X_DIV
        if x_index is not None:
            source = tl.load(x_index + row) // X_DIV
        n = n_tile * BN + tl.arange(0, BN)
        inside = tl.minimum(tl.arange(0, BN), N - 1 - n_tile * BN)
        first = e.to(tl.int64) * ROWS + n_tile * BN
        k = tl.arange(0, BK2)
        ks = tl.arange(0, BK2 // 8)
        begin = split * K_PART
        w = codes + first * K2 + begin + inside[:, None] * K2 + k[None, :]
        w_sf = sf + first * (K2 // 8) + begin // 8 + inside[:, None] * (K2 // 8) + ks[None, :]
        pairs = x + source.to(tl.int64)[None, :] * K2 + begin + k[:, None]
        if x_sf is not None:
            x_scales = x_sf + source.to(tl.int64)[:, None] * (K2 // 8) + begin // 8 + ks[None, :]
        acc = tl.zeros([BN, BM], tl.float32)
        acc_up = acc
        for at in range(0, K_PART, BK2):
            if K2 % K_PART == 0 and K_PART % BK2 == 0:
                c = tl.load(w + at)
                s = tl.load(w_sf + at // 8)
                if PAIRED:
                    c_up = tl.load(w + N * K2 + at)
                    s_up = tl.load(w_sf + N * (K2 // 8) + at // 8)
                pair = tl.load(pairs + at)
                if x_sf is not None:
                    x_s = tl.load(x_scales + at // 8)
            else:
                left = tl.minimum(K_PART, K2 - begin) - at
                c = tl.load(w + at, mask=(k < left)[None, :], other=0)
                s = tl.load(w_sf + at // 8, mask=(ks < left // 8)[None, :], other=0)
                if PAIRED:
                    c_up = tl.load(w + N * K2 + at, mask=(k < left)[None, :], other=0)
                    s_up = tl.load(w_sf + N * (K2 // 8) + at // 8, mask=(ks < left // 8)[None, :], other=0)
                pair = tl.load(pairs + at, mask=(k < left)[:, None], other=0)
                if x_sf is not None:
                    x_s = tl.load(x_scales + at // 8, mask=(ks < left // 8)[None, :], other=0)
            if x_sf is not None:
                acc = dot_nvfp4(c, s, pair, x_s, acc, HOW)
                if PAIRED:
                    acc_up = dot_nvfp4(c_up, s_up, pair, x_s, acc_up, HOW)
            else:
                x_even = pair.to(tl.int16).to(DTYPE, bitcast=True)
                x_odd = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
                even, odd = dequantize(c, s, DTYPE, HOW)
                acc = dot(even, x_even, acc, HOW)
                acc = dot(odd, x_odd, acc, HOW)
                if PAIRED:
                    even, odd = dequantize(c_up, s_up, DTYPE, HOW)
                    acc_up = dot(even, x_even, acc_up, HOW)
                    acc_up = dot(odd, x_odd, acc_up, HOW)

        unit = UNIT if x_sf is None else 1.0
        if PAIRED:
            acc = _scaled(acc, tl.load(first_scale + e) * unit, row_scale, bias, split, source, first + inside)
            acc_up = _scaled(acc_up, tl.load(scale + e) * unit, row_scale, bias, split, source, first + N + inside)
            result = gated(acc, acc_up, GATE, ALPHA, LIMIT, UP_OFFSET, CLAMP_AFTER)
        else:
            weight_scale = tl.load(scale + e) * unit
            if THIRD_AT > 0:
                last = n_tile * BN + inside
                which = (last >= SPLIT_AT).to(tl.int32) + (last >= THIRD_AT).to(tl.int32)
                weight_scale = tl.load(scale + which)[:, None] * unit
            elif SPLIT_AT > 0:
                weight_scale = tl.where(n < SPLIT_AT, tl.load(first_scale + e) * unit, weight_scale)[:, None]
            result = _scaled(acc, weight_scale, row_scale, bias, split, source, first + inside)
            if GATE == "relu2":
                result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)
                result *= result
        to = row
        if out_index is not None:
            to = tl.load(out_index + row)
        if LD != N:
            result = tl.where((n < N)[:, None], result, 0.0)
        here = out + (split * R + to).to(tl.int64)[None, :] * LD + n[:, None]
        tl.store(here, rounded(result, out.dtype.element_ty, HOW), mask=(n < LD)[:, None] & there[None, :])


@triton.jit
def _tile(tile_expert, tile_row, tile_end, tile_count, R, NT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr):
    """(whether this program has a tile, its expert, weight tile, rows [BM], which of them are the expert's)."""
    pid = tl.program_id(0)
    if GROUP == 1:
        tile = pid // NT
        n_tile = pid % NT
        live = tile >= 0
    else:  # GROUP token tiles in a row read the same weights
        if tile_count is None:
            count = (R + BM - 1) // BM
        else:
            count = tl.load(tile_count)
        group = pid // (GROUP * NT)
        inside = pid % (GROUP * NT)
        size = tl.minimum(tl.maximum(count - group * GROUP, 1), GROUP)
        tile = group * GROUP + inside % size
        n_tile = inside // size
        live = (tile < count) & (n_tile < NT)
        tile = tl.where(live, tile, 0)
    if tile_expert is None:  # one expert with all rows
        e = tile * 0
        begin = tile * BM
        end = R
    else:
        e = tl.load(tile_expert + tile)
        begin = tl.load(tile_row + tile)
        end = tl.load(tile_end + tile)
        live = live & (e >= 0)
    row = begin + tl.arange(0, BM)
    return live, e, n_tile, tl.where(row < end, row, begin), row < end


@triton.jit
def _own_tile(ids, mine, R, IDS: tl.constexpr, E: tl.constexpr, BM: tl.constexpr):
    """(whether assignment `mine` begins a tile of its expert, the expert, rows [BM], which of them exist).

    The first assignment of an expert begins a tile, and so does every BM-th after it. The rows are the expert's
    assignments from there on.
    """
    i = tl.arange(0, IDS)
    e = tl.load(ids + mine).to(tl.int32)
    same = (tl.load(ids + i, mask=i < R, other=-1).to(tl.int32) == e) & (i < R)
    rank = tl.cumsum(same.to(tl.int32), 0) - 1
    first = tl.sum((same & (i < mine)).to(tl.int32), 0)
    here = same[None, :] & (rank[None, :] == (first + tl.arange(0, BM))[:, None])
    row = tl.max(tl.where(here, i[None, :], -1), 1)
    live = (e >= 0) & (e < E) & (first % BM == 0)
    return live, e, tl.where(row < 0, mine, row), row >= 0


@triton.jit
def _scaled(acc, weight_scale, row_scale, bias, split, source, n):
    """The sums times their scales; the first part of K adds the bias, so that the parts' sum has it once."""
    result = acc * weight_scale
    if row_scale is not None:
        result *= tl.load(row_scale + source)[None, :]
    if bias is not None:
        if split == 0:
            result += tl.load(bias + n).to(tl.float32)[:, None]
    return result


@triton.jit
def gated(
    g, u, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
):  # fmt: skip
    """`weights.Gate` of fp32 g and u, for kinds that have both. LIMIT 0: no limit."""
    if LIMIT > 0:
        u = tl.clamp(u, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if not CLAMP_AFTER:
            g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if GATE == "silu":
        g = g / (1.0 + tl.exp(-ALPHA * g))
    else:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        g *= 1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner))
    if LIMIT > 0 and CLAMP_AFTER:
        g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return g * (u + UP_OFFSET)
