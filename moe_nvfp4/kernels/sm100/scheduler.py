"""Which tiles a CTA (or a pair of CTAs) of the Blackwell GEMM computes: the i-th tile of CTA b is b + i * grid.

Tiles are ordered [expert][token tile][weight row tile][part of K]. Each role of a CTA finds its tiles independently, in
a map in shared memory that one warp makes from the group offsets.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint16, cute

from moe_nvfp4.kernels.common.warp import sum_of_lanes_before
from moe_nvfp4.kernels.sm100.config import ROWS, GemmConfig


class TileMap(NamedTuple):
    mOffsets: cute.Tensor  # int32 [E + 1]
    sEnds: cute.Tensor  # [e]: token tiles of experts 0..e
    sSFTiles: cute.Tensor  # [e]: 128-row scale tiles before expert e


class WorkTile(NamedTuple):
    expert: Int32
    row_tile: Int32  # of the weights
    first: Int32  # the first row of tokens
    rows: Int32
    row_in_group: Int32  # of the row `first`
    sf_tile: Int32  # where the group's scale tiles begin
    part: Int32  # of K


class TileScheduler:
    def __init__(self, config: GemmConfig):
        self.c = config

    @cute.jit
    def make_map(self, tile_map: TileMap, lane: Int32):
        """Called by one warp: fill the map."""
        c, tokens = self.c, self.c.tile.tokens
        mOffsets, sEnds, sSFTiles = tile_map
        each = -(-c.map_size // 32)
        sizes, tiles, sf_tiles = [], Int32(0), Int32(0)
        for i in cutlass.range_constexpr(each):
            expert = cutlass.min(lane * each + i, c.experts)
            sizes.append(mOffsets[cutlass.min(expert + 1, c.experts)] - mOffsets[expert])
            tiles += (sizes[i] + tokens - 1) // tokens
            sf_tiles += (sizes[i] + 127) // 128
        tiles, sf_tiles = sum_of_lanes_before(tiles), sum_of_lanes_before(sf_tiles)
        for i in cutlass.range_constexpr(each):
            expert = lane * each + i
            tiles += (sizes[i] + tokens - 1) // tokens
            if expert < c.map_size:
                sEnds[expert] = tiles
                if cutlass.const_expr(not c.dense):  # bf16 tokens have no scales
                    sSFTiles[expert] = Uint16(sf_tiles)
            sf_tiles += (sizes[i] + 127) // 128

    @cute.jit
    def locate(self, tile: Int32, tile_map: TileMap) -> WorkTile:
        c, tokens = self.c, self.c.tile.tokens
        mOffsets, sEnds, sSFTiles = tile_map
        token_tile = tile // c.work_tiles
        row_tile = tile - token_tile * c.work_tiles
        expert = self.expert_of(sEnds, token_tile)
        first, end = mOffsets[expert], mOffsets[expert + 1]
        here = (token_tile - sEnds[expert]) * tokens + (end - first + tokens - 1) // tokens * tokens
        rows = cutlass.min(end - first - here, tokens)
        sf_tile = Int32(0) if c.dense else Int32(sSFTiles[expert])
        return WorkTile(
            expert, row_tile // c.parts, first + here, rows, here, sf_tile, row_tile % c.parts
        )  # fmt: skip

    def k_range(self, tile: Int32):
        """(first K tile, K tiles, steps of K = 64) of a tile."""
        c = self.c
        if c.parts == 1:
            return 0, c.k_tiles, c.k_steps
        part = tile % c.parts
        first, end = part * c.k_tiles // c.parts, (part + 1) * c.k_tiles // c.parts
        return first, end - first, cutlass.min(4 * end, c.k_steps) - 4 * first

    @cute.jit
    def expert_of(self, sEnds, token_tile: Int32) -> Int32:
        """The first expert with sEnds[expert] > token_tile: sEnds ascends, and its size is a power of two."""
        expert = Int32(0)
        size = self.c.map_size
        for p in cutlass.range_constexpr(size.bit_length() - 1):
            half = size >> (p + 1)
            if sEnds[expert + half - 1] <= token_tile:
                expert += half
        return expert

    @cute.jit
    def my_tiles(self, tile_map: TileMap):
        """(first tile, step to the next, number of tiles) of this CTA, or of its pair."""
        c, ctas = self.c, self.c.tile.ctas
        return (
            cute.arch.block_idx()[0] // ctas,
            cute.arch.grid_dim()[0] // ctas,
            tile_map.sEnds[c.experts - 1] * c.work_tiles,
        )

    def width(self, rows: Int32) -> Int32:
        """The width N of the MMAs for a tile with `rows` tokens."""
        return (rows + self.c.chunk - 1) // self.c.chunk * self.c.chunk

    def block_row(self, row_tile: Int32, block: int) -> Int32:
        """The first weight row of a block."""
        t = self.c.tile
        rank = cute.arch.block_idx()[0] % t.ctas
        return ((row_tile * t.blocks + block) * t.ctas + rank) * ROWS

    def block_sf(self, row_tile: Int32, block: int) -> Int32:
        """The block's scale tile among those of an expert; for a block beyond the last row, the last tile."""
        return cutlass.min(self.block_row(row_tile, block) // ROWS, self.c.sf_row_tiles - 1)
