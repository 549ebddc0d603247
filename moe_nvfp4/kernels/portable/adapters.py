"""What LoRA adapters of experts take besides the products with 4-bit weights: rows sorted by expert and adapter, and
their low-rank additions. One launch sorts; two add to a projection, through `low`, whose few columns are the rank:

    out[to[r]] += x[from[r]] · a[g]ᵀ · b[g]ᵀ        for each row r of a group g: an expert, or an adapter of an expert

Nothing waits for the offsets: there are as many programs as the rows can have tiles, and each finds its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_nvfp4.kernels.common.ahead import planned_tokens
from moe_nvfp4.kernels.portable.config import next_power_of_2
from moe_nvfp4.kernels.portable.dequantize import dot, how, rounded
from moe_nvfp4.kernels.portable.launch import launch
from moe_nvfp4.kernels.portable.rows import ILLEGAL
from moe_nvfp4.routing import Groups


def group(ids: Tensor, num_experts: int, top_k: int, adapter: Tensor | None, num_adapters: int) -> Groups:
    """As `routing.group_by_expert`, with `position`: ids int32 or int64 [T * top_k], adapter the same [T].

    An id outside the legal range stops the kernel with a message, and the next synchronization raises.
    """
    R, E, S = ids.shape[0], num_experts, num_adapters
    order, position, offsets = (ids.new_empty(n, dtype=torch.int32) for n in (R, R, E + 1))
    parts = bare = None
    if adapter is not None:
        parts, bare = ids.new_empty(E * S + 1, dtype=torch.int32), ids.new_empty(R, dtype=torch.uint8)
    chunk = 128 if R <= 128 else 1024
    launch(
        group_kernel, (E + 1,), ids, adapter, order, position, offsets, parts, bare, R, E, S, top_k, chunk,
        num_warps=1 if chunk == 128 else 4, debug=True, sanitize_overflow=False,
    )  # fmt: skip
    return Groups(order, offsets, top_k, position, parts, None if bare is None else bare.view(torch.bool))


@triton.jit(do_not_specialize=["R"])
def group_kernel(
    ids, adapter, order, position, offsets, parts, bare, R, E: tl.constexpr, S: tl.constexpr, TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e finds the rows of expert e, program E those without an expert. Of an expert's rows, those without an
    adapter come first, then those of each adapter."""
    e = tl.program_id(0)
    before, mine = 0, 0
    for start in range(0, R, CHUNK):
        i = start + tl.arange(0, CHUNK)
        id = tl.load(ids + i, mask=i < R, other=-1).to(tl.int32)
        tl.device_assert((id >= -1) & (id <= E), ILLEGAL)
        id = tl.where(id < 0, E, id)
        before += tl.sum(((id < e) & (i < R)).to(tl.int32), 0)
        mine += tl.sum(((id == e) & (i < R)).to(tl.int32), 0)
    tl.store(offsets + e, before)
    row = before
    for s in range(-1, S):
        if S > 0:
            if (s == 0) | (s > 0) & (e < E):
                tl.store(parts + e * S + s, tl.where(s == 0, before, row))
        if mine > 0:
            for start in range(0, R, CHUNK):
                i = start + tl.arange(0, CHUNK)
                id = tl.load(ids + i, mask=i < R, other=-1).to(tl.int32)
                found = (tl.where(id < 0, E, id) == e) & (i < R)
                if S > 0:
                    chosen = tl.load(adapter + i // TOP_K, mask=i < R, other=-1)
                    found &= tl.where((chosen >= 0) & (chosen < S), chosen, -1) == s
                found = found.to(tl.int32)
                to = row + tl.cumsum(found, 0) - 1
                tl.store(order + to, i, mask=found > 0)
                tl.store(position + i, to, mask=found > 0)
                if S > 0:
                    tl.store(bare + to, tl.where(i * 0 + s < 0, 1, 0).to(tl.uint8), mask=found > 0)
                row += tl.sum(found, 0)


def add_low_rank(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, offsets: Tensor, bare: Tensor | None, index: Tensor | None,
    index_div: int, to: Tensor | None,
) -> None:  # fmt: skip
    """Add to out [R, N] in place: to row to[r] (r without `to`) what group g adds for row index[r] // index_div of
    x [*, K] (r without `index`). Rows are sums in fp32, added to out and rounded once; `low` is rounded to x's dtype.

    a [G, r, K], b [G, N, r] in x's dtype, bf16 or fp16; offsets int32 [G + 1]: the rows of each group; the rows after
    all groups, and those that are `bare` bool [R], stay as they are.
    """
    (R, N), (G, rank, K) = out.shape, a.shape
    x, a, b = x.contiguous(), a.contiguous(), b.contiguous()
    planned = planned_tokens(R)
    BM = 8 if planned <= 8 * G else 16 if planned <= 24 * G else 64
    GP = max(128, next_power_of_2(G))  # an element for each thread
    RB, BK = min(64, max(16, next_power_of_2(rank))), 128
    blocks, columns = -(-rank // RB), -(-K // BK)
    programs = (planned // BM + min(G, planned)) * blocks
    each = -(-columns // min(8, columns, -(-256 // programs))) * BK  # so that few rows have many programs
    parts, tiles = -(-K // each), R // BM + min(G, R)
    low = x.new_empty(parts, R, rank, dtype=torch.float32)
    launch(
        shrink_kernel, (tiles, blocks, parts), x, a, index, offsets, low, R, G, GP, rank, K, each, index_div,
        RB, BM, BK, how(), num_warps=min(4, RB // 16 * BM // 8), num_stages=3,  # a 16 x 8 product for each warp
    )  # fmt: skip
    BN = 64 if BM == 8 else 128
    bare = None if bare is None else bare.view(torch.uint8)
    launch(
        expand_kernel, (tiles, -(-N // BN)), low, b, to, offsets, bare, out, R, G, GP, rank, N, parts, RB, BM, BN,
        how(), num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit
def _tile(offsets, G: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr):
    """(whether there is a tile of this number, its group, rows [BM], which of them are the group's)."""
    tile, g = tl.program_id(0), tl.arange(0, GP)
    begin = tl.load(offsets + g, mask=g < G, other=0)
    end = tl.load(offsets + g + 1, mask=g < G, other=0)
    tiles = (end - begin + BM - 1) // BM
    after = tl.cumsum(tiles, 0)
    mine = tl.sum((after <= tile).to(tl.int32), 0)
    here = g == mine
    row = tl.sum(tl.where(here, begin + (tile - after + tiles) * BM, 0), 0) + tl.arange(0, BM)
    last = tl.sum(tl.where(here, end, 0), 0)
    return mine < G, mine, tl.minimum(row, last - 1), row < last


@triton.jit(do_not_specialize=["R"])
def shrink_kernel(
    x, a, index, offsets, low, R, G: tl.constexpr, GP: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr,
    PART: tl.constexpr, INDEX_DIV: tl.constexpr, RB: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """low fp32 [parts of K, R, RANK] = x · aᵀ: the rows of a tile, RB columns, PART columns of K."""
    live, g, row, there = _tile(offsets, G, GP, BM)
    if live:
        source = row // INDEX_DIV
        if index is not None:
            source = tl.load(index + row) // INDEX_DIV
        rank = tl.program_id(1) * RB + tl.arange(0, RB)
        begin = tl.program_id(2) * PART
        from_a = a + (g.to(tl.int64) * RANK + rank)[:, None] * K
        from_x = x + source.to(tl.int64)[None, :] * K
        acc = tl.zeros([RB, BM], tl.float32)
        for at in range(0, PART, BK):
            k = begin + at + tl.arange(0, BK)
            av = tl.load(from_a + k[None, :], mask=(rank < RANK)[:, None] & (k < K)[None, :], other=0.0)
            xv = tl.load(from_x + k[:, None], mask=(k < K)[:, None], other=0.0)
            acc = dot(av, xv, acc, HOW)
        to = low + (tl.program_id(2) * R + row).to(tl.int64)[None, :] * RANK + rank[:, None]
        tl.store(to, acc, mask=there[None, :] & (rank < RANK)[:, None])


@triton.jit(do_not_specialize=["R"])
def expand_kernel(
    low, b, to, offsets, bare, out, R, G: tl.constexpr, GP: tl.constexpr, RANK: tl.constexpr, N: tl.constexpr,
    PARTS: tl.constexpr, RB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """out [R, N] += low · bᵀ: the rows of a tile, BN columns."""
    live, g, row, there = _tile(offsets, G, GP, BM)
    if live:
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        from_b = b + (g.to(tl.int64) * N + n)[:, None] * RANK
        acc = tl.zeros([BN, BM], tl.float32)
        for at in range(0, RANK, RB):
            rank = at + tl.arange(0, RB)
            inside = (rank < RANK)[:, None]
            lv = tl.zeros([RB, BM], tl.float32)
            for part in tl.static_range(PARTS):
                lv += tl.load(low + (part * R + row).to(tl.int64)[None, :] * RANK + rank[:, None], mask=inside, other=0)
            bv = tl.load(from_b + rank[None, :], mask=(n < N)[:, None] & (rank < RANK)[None, :], other=0.0)
            acc = dot(bv, rounded(lv, b.dtype.element_ty, HOW), acc, HOW)
        if bare is not None:
            there &= tl.load(bare + row) == 0
        target = row
        if to is not None:
            target = tl.load(to + row)
        here = out + target.to(tl.int64)[None, :] * N + n[:, None]
        inside = (n < N)[:, None] & there[None, :]
        result = tl.load(here, mask=inside, other=0.0).to(tl.float32) + acc
        tl.store(here, rounded(result, out.dtype.element_ty, HOW), mask=inside)
