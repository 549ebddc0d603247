"""Which tile a CTA of the Hopper GEMMs computes next: the list of tiles, and the ring that brings them to the warps.

The list is computed from the group offsets, on the device: first the tiles of GEMM 1, then those that quantize h, then
those of GEMM 2. Each kind is ordered [expert][RASTER token tiles][weight tile, or part of h][token tile]; in GEMM 2 the
2^log2_split_k parts of K of a weight tile are next to each other. So CTAs that run at the same time share weight tiles,
which are read from memory only once.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from moe_nvfp4.kernels.common.pipeline import PipelineState, advance, arrive
from moe_nvfp4.kernels.common.warp import sum_of_lanes_before
from moe_nvfp4.kernels.sm90.config import GemmConfig, TileShape

GEMM1, GEMM2, QUANTIZE = 0, 1, 2  # kinds of tiles
QUANTIZE_BLOCKS = 16  # 64-column blocks per tile that quantizes h
RASTER = 16  # token tiles that use a weight tile before the next weight tile begins
KIND_BITS, ROWS_BITS = 2, 9


class Extents(NamedTuple):
    """The sizes of both GEMMs' matrices, in 64-row and 64-column units of the packed weights; and how K is split."""

    m64: tuple[Int32, Int32]
    k64: tuple[Int32, Int32]
    log2_split_k: Int32  # in GEMM 2


class Tile(NamedTuple):
    """A tile. m_index is the number of the weight tile; in GEMM 2 its low bits are the part of K, and in a tile that
    quantizes it is the part of the row."""

    kind: Int32
    expert: Int32
    m_index: Int32
    row: Int32  # the first row of tokens
    rows: Int32
    token_tile: Int32


class WorkTile(NamedTuple):
    """A `Tile` as four words in shared memory. One that is not valid ends the list."""

    expert_and_kind: Int32
    m_index: Int32
    row: Int32
    token_tile_and_rows: Int32

    @property
    def valid(self):
        return self.expert_and_kind >= 0

    @property
    def expert(self):
        return self.expert_and_kind >> KIND_BITS

    @property
    def kind(self):
        return self.expert_and_kind & ((1 << KIND_BITS) - 1)

    @property
    def token_tile(self):
        return self.token_tile_and_rows >> ROWS_BITS

    @property
    def rows(self):
        return self.token_tile_and_rows & ((1 << ROWS_BITS) - 1)


class KRange(NamedTuple):
    """What a tile covers: its weight tile, its part of K, and that part's first 64-column block and number of blocks.
    For a tile that quantizes, only the last two mean anything."""

    m_tile: Int32
    part: Int32
    first: Int32
    count: Int32


class TileList(NamedTuple):
    """Where each kind of tiles begins and ends, and how many tiles of a kind share a token tile."""

    tiles1: Int32  # the end of GEMM 1
    begin2: Int32  # the beginning of GEMM 2
    end: Int32
    m_tiles1: Int32
    m_tiles2: Int32
    quantize_parts: Int32


class TileSlots(NamedTuple):
    """The ring from the scheduler warp to all others: full and empty barriers, and the tiles' words [4, slots]."""

    full: cute.Pointer
    empty: cute.Pointer
    sTiles: cute.Tensor


class TileScheduler:
    def __init__(self, t: TileShape, config: GemmConfig):
        self.t, self.config = t, config

    # ---- the list ----

    @cute.jit
    def scan(self, mOffsets, sOffsets, sFirst):
        """For a whole warp: copy the offsets to shared memory; sFirst[e] = token tiles of the experts before e."""
        E, lane, BN = mOffsets.shape[0] - 1, cute.arch.lane_idx(), self.t.BN
        rows, base = mOffsets[E], Int32(0)
        for i in cutlass.range((E + 31) // 32, unroll=4):
            e = cutlass.min(i * 32 + lane, E)
            low, high = mOffsets[e], mOffsets[cutlass.min(e + 1, E)]
            tiles = (high - low + (BN - 1)) // BN
            before = sum_of_lanes_before(tiles)
            sOffsets[e] = low
            sFirst[e] = base + before
            base += cute.arch.shuffle_sync(before + tiles, 31)
        sOffsets[E] = rows
        sFirst[E] = base
        cute.arch.sync_warp()

    @cute.jit
    def only_group(self, rows: Int32, sOffsets, sFirst):
        """For a whole warp: as `scan`, for one expert that has all rows."""
        sOffsets[0], sOffsets[1] = Int32(0), rows
        sFirst[0], sFirst[1] = Int32(0), (rows + (self.t.BN - 1)) // self.t.BN
        cute.arch.sync_warp()

    @cute.jit
    def tile_list(self, sFirst, E: Int32, extents: Extents) -> TileList:
        t, config = self.t, self.config
        m64, k64, log2_split_k = extents
        m_tiles1 = (m64[0] + t.m_blocks - 1) // t.m_blocks
        m_tiles2 = ((m64[1] + t.m_blocks - 1) // t.m_blocks) << log2_split_k
        tiles1 = sFirst[E] * m_tiles1 if const_expr(config.gate is not None) else Int32(0)
        parts = self.quantize_parts(k64)
        begin2 = tiles1 + (sFirst[E] * parts if const_expr(config.quantizes_h) else 0)
        end = begin2 + (sFirst[E] * m_tiles2 if const_expr(config.down) else 0)
        return TileList(tiles1, begin2, end, m_tiles1, m_tiles2, parts)

    @cute.jit
    def locate(self, number: Int32, tiles: TileList, sOffsets, sFirst, E: Int32) -> Tile:
        """For a whole warp: the tile with this number."""
        second = number >= tiles.begin2
        local = number - tiles.begin2 if second else number
        m_tiles = tiles.m_tiles2 if second else tiles.m_tiles1
        kind = Int32(GEMM2) if second else Int32(GEMM1)
        if const_expr(self.config.quantizes_h):
            if number >= tiles.tiles1 and not second:
                local, m_tiles, kind = number - tiles.tiles1, tiles.quantize_parts, Int32(QUANTIZE)
        return Tile(kind, *self.tile_of_kind(local, m_tiles, sOffsets, sFirst, E))

    @cute.jit
    def tile_of_kind(self, number: Int32, m_tiles: Int32, sOffsets, sFirst, E: Int32) -> tuple:
        """A number among the tiles of one kind -> the other fields of its `Tile`."""
        lane, BN = cute.arch.lane_idx(), self.t.BN
        token_tile = number // m_tiles
        e = Int32(-1)
        for i in cutlass.range((E + 31) // 32, unroll=4):
            at = i * 32 + lane
            below = sFirst[cutlass.min(at, E)] <= token_tile and at < E
            e += cute.arch.popc(cute.arch.vote_ballot_sync(below))
        first = sFirst[e]
        local = number - first * m_tiles
        width, m, n = sFirst[e + 1] - first, local, Int32(0)
        if width > 1:  # the divisions would take longer than everything else here
            if width > RASTER:
                n = local // (RASTER * m_tiles) * RASTER
                local -= n * m_tiles
                width = cutlass.min(width - n, Int32(RASTER))
            m = local // width
            n += local - m * width
        row = sOffsets[e] + n * BN
        return e, m, row, cutlass.min(sOffsets[e + 1] - row, Int32(BN)), first + n

    @cute.jit
    def k_range(self, m_index, kind, extents: Extents) -> KRange:
        k64, log2_split_k = extents.k64, extents.log2_split_k
        part, first, count = Int32(0), Int32(0), k64[0]
        if kind == GEMM2:
            part = m_index & ((1 << log2_split_k) - 1)
            m_index = m_index >> log2_split_k
            each = self.t.split_blocks(k64[1], log2_split_k)
            first = part * each
            count = cutlass.min(each, k64[1] - first)
        if const_expr(self.config.quantizes_h):
            if kind == QUANTIZE:
                first = m_index * QUANTIZE_BLOCKS
                count = cutlass.min(k64[1] * self.config.h_columns - first, Int32(QUANTIZE_BLOCKS))
        return KRange(m_index, part, first, count)

    def quantize_parts(self, k64):
        """How many tiles quantize a token tile of h."""
        return (k64[1] * self.config.h_columns + QUANTIZE_BLOCKS - 1) // QUANTIZE_BLOCKS

    @cute.jit
    def count_tile(self, mSync, lane):
        """Lane 0 gets the next tile's number from the atomic tile counter."""
        number = Int32(0)
        if lane == 0:
            number = cute.arch.atomic_add(mSync.iterator, Int32(1), sem="relaxed", scope="gpu")
        return number

    # ---- the ring ----

    @cute.jit
    def publish(self, slots: TileSlots, slot: PipelineState, tile: Tile):
        """For lane 0 of the scheduler warp, after it has waited for the slot."""
        slots.sTiles[0, slot.index] = tile.expert * (1 << KIND_BITS) + tile.kind
        slots.sTiles[1, slot.index] = tile.m_index
        slots.sTiles[2, slot.index] = tile.row
        slots.sTiles[3, slot.index] = tile.token_tile * (1 << ROWS_BITS) + tile.rows
        cute.arch.mbarrier_arrive(slots.full + slot.index)

    @cute.jit
    def publish_end(self, slots: TileSlots, slot: PipelineState):
        """The same, to say that there are no more tiles."""
        slots.sTiles[0, slot.index] = Int32(-1)
        cute.arch.mbarrier_arrive(slots.full + slot.index)

    @cute.jit
    def fetch(self, slots: TileSlots, slot: PipelineState) -> WorkTile:
        """Wait for the warp's next tile."""
        cute.arch.mbarrier_wait(slots.full + slot.index, slot.phase)
        words = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(slots.sTiles[None, slot.index], words)
        return WorkTile(words[0], words[1], words[2], words[3])

    @cute.jit
    def release(self, barriers: tuple, slot: PipelineState) -> PipelineState:
        """Arrive at these barriers of the slot once the warp is done with its tile; returns the next slot."""
        arrive(barriers, slot.index)
        return advance(slot, self.t.slots)
