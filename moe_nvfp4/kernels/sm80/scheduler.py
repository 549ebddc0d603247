"""Which tiles a CTA of the sm_80 GEMM computes, one after another, and which rows of tokens they have.

The first warp finds out, one tile ahead, and writes it to shared memory, so that it costs no registers.

Tiles are ordered [RASTER weight tiles][token tile][weight tile], so that CTAs that run at the same time read the same
rows of tokens and the same weights. Each of `grid` persistent CTAs takes every grid-th tile.

Tiles seldom fill all CTAs to the end. If the launch `shares`, whole tiles are taken in waves only as long as more than
one wave is left; the stages of the rest, one tile's after the other's, are cut into equal ranges, one for each CTA. So
a range may end within a tile, and begin within another:

    * The CTA whose range has a tile's last stage stores the tile. It waits for the parts of the others and adds them to
      its own, the nearest first, which is always the same order.
    * A range is computed from its end: first the part of a tile that another CTA will store, so that it is there early.
    * Ranges are numbered as CTAs begin, by an atomic counter. Others' parts are in ranges with smaller numbers, whose
      CTAs run already, and they store them without waiting. So nothing waits for a CTA that has no multiprocessor yet.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute

from moe_nvfp4.kernels.sm80 import ptx
from moe_nvfp4.kernels.sm80.config import PLACES, GemmConfig, TileShape

RASTER = 8  # weight tiles that go through all token tiles together
LEAST = 2  # stages per range, at least


class Source(NamedTuple):
    """Where tiles' tokens are found; those that `GemmConfig.tiles` does not need are None.

    Row r of a tile is row mIndex[r] // index_div of mX, and of mScale, and becomes row mOutIndex[r] of the result;
    without an index r itself.
    """

    mIds: cute.Tensor | None  # few: int32 or int64 [R], the assignments' experts; r is the assignment
    mExpert: cute.Tensor | None  # sorted: int32, for each token tile its expert, its first row, the end of the expert's
    mRow: cute.Tensor | None
    mEnd: cute.Tensor | None
    mCount: cute.Tensor | None  # int32 [1], how many token tiles there are
    mIndex: cute.Tensor | None  # int32 [R]
    mOutIndex: cute.Tensor | None  # int32 [R]
    mScale: cute.Tensor | None  # fp32, the rows' global scales
    index_div: Int32
    pitch: Int32  # of mX, in units of 16 bytes
    R: Int32  # all: how many rows there are


class Extents(NamedTuple):
    """E experts; weight tiles of one; stages of a tile."""

    E: Int32
    m_tiles: Int32
    stages: Int32


class Work(NamedTuple):
    """A CTA's share of a launch."""

    number: Int32  # of the CTA, and of its range
    token_tiles: Int32
    waves: Int32  # whole tiles
    rest: Int32  # stages that are shared out, of the tiles after the waves
    ranges: Int32  # how many ranges they are cut into


class Tile(NamedTuple):
    """A tile, or a part of it: `count` stages from `first` on. One with a negative expert ends the list."""

    expert: Int32
    m: Int32  # the number of the weight tile
    rows: Int32  # of tokens
    number: Int32  # among the launch's tiles
    first: Int32
    count: Int32
    wave: Int32  # where the list goes on: the next wave, the end of what is left of the range
    end: Int32

    @property
    def valid(self):
        return self.expert >= 0


class Places(NamedTuple):
    """Shared memory: the CTA's `Work`, and of PLACES tiles, `Tile`s and for each token where its row begins in mX (in
    units of 16 bytes, -1 if there is no such token), its row of the result and its global scale."""

    sWork: cute.Tensor
    sTile: cute.Tensor
    sFrom: cute.Tensor
    sTo: cute.Tensor
    sScale: cute.Tensor


class TileScheduler:
    def __init__(self, t: TileShape, config: GemmConfig):
        self.t, self.config = t, config

    # ---- shared memory ----

    def work(self, places: Places) -> Work:
        """The CTA's `Work`."""
        return Work(*_load(places.sWork, len(Work._fields)))

    def tile(self, places: Places, place: Int32) -> Tile:
        return Tile(*_load(places.sTile[None, place], len(Tile._fields)))

    # ---- the list of tiles: for the first warp ----

    @cute.jit
    def begin(self, source: Source, extents: Extents, mSync, places: Places):
        """Find the CTA's `Work` and its first tile."""
        config, stages, lane = self.config, extents.stages, cute.arch.lane_idx()
        number, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        if const_expr(config.shares):
            if lane == 0:
                number = cute.arch.atomic_add(mSync.iterator, Int32(1), sem="relaxed", scope="gpu")
            number = cute.arch.shuffle_sync(number, 0)
        if const_expr(config.tiles == "sorted"):
            token_tiles = source.mCount[0]
        elif const_expr(config.tiles == "few"):
            _, _, begins = self.search(source, extents.E)
            token_tiles = Int32(cute.arch.popc(begins))
        else:
            token_tiles = (source.R + self.t.BN - 1) // self.t.BN
        tiles = extents.m_tiles * token_tiles
        waves, rest, ranges = (tiles + grid - 1 - number) // grid, Int32(0), Int32(1)
        if const_expr(config.shares):
            waves = tiles // grid
            if tiles != waves * grid:
                waves = cutlass.max(waves - 1, Int32(0))
            rest = (tiles - waves * grid) * stages
            ranges = cutlass.max(cutlass.min(grid, rest // LEAST), Int32(1))
        work = Work(number, token_tiles, waves, rest, ranges)
        if lane == 0:
            _store(places.sWork, work)
        end = rest * cutlass.min(number + 1, ranges) // ranges
        self.locate(work, (Int32(0), end), Int32(0), source, extents, places)

    @cute.jit
    def advance(self, place: Int32, source: Source, extents: Extents, places: Places):
        """Find the tile after the one at `place`."""
        before = self.tile(places, place)
        self.locate(self.work(places), (before.wave, before.end), after(place), source, extents, places)

    @cute.jit
    def locate(self, work: Work, at: tuple, place: Int32, source: Source, extents: Extents, places: Places):
        """Write the tile of this wave, or at the end of what is left of the range, to `place`."""
        wave, end = at
        grid, _, _ = cute.arch.grid_dim()
        valid, number, first, count = wave < work.waves, wave * grid + work.number, Int32(0), extents.stages
        if const_expr(self.config.shares):
            if wave >= work.waves:
                valid, number, first, count = self.of_range(work, end, extents.stages)
                end -= count
                wave -= 1
        wave += 1
        e, m, rows = Int32(-1), Int32(0), Int32(0)
        if valid:
            group = number // (RASTER * work.token_tiles)
            inside = number - group * (RASTER * work.token_tiles)
            width = cutlass.min(extents.m_tiles - group * RASTER, Int32(RASTER))
            n = inside // width
            m = group * RASTER + inside - n * width
            if const_expr(self.config.tiles == "few"):
                e, rows = self.find(n, place, source, extents, places)
            else:
                e, rows = self.look_up(n, place, source, places)
        if cute.arch.lane_idx() == 0:
            _store(places.sTile[None, place], Tile(e, m, rows, number, first, count, wave, end))

    @cute.jit
    def of_range(self, work: Work, end: Int32, stages: Int32) -> tuple:
        """The last tile of what is left of the CTA's range: whether there is one, its number, its stages there."""
        grid, _, _ = cute.arch.grid_dim()
        begin = work.rest * cutlass.min(work.number, work.ranges) // work.ranges
        tile = cutlass.max(end - 1, Int32(0)) // stages
        first = cutlass.max(begin - tile * stages, Int32(0))
        return begin < end, work.waves * grid + tile, first, end - tile * stages - first

    @cute.jit
    def look_up(self, n: Int32, place: Int32, source: Source, places: Places) -> tuple:
        """Token tile n: its expert, and the number of its rows."""
        lane, BN = cute.arch.lane_idx(), self.t.BN
        e, row, rows = Int32(0), n * BN, source.R - n * BN
        if const_expr(self.config.tiles == "sorted"):
            e, row = source.mExpert[n], source.mRow[n]
            rows = source.mEnd[n] - row
        rows = cutlass.min(rows, Int32(BN))
        self.forget(rows, place, places)
        for token in cutlass.range(lane, rows, 32, unroll=1):
            self.note(row + token, (token, place), source, places)
        return e, rows

    @cute.jit
    def find(self, n: Int32, place: Int32, source: Source, extents: Extents, places: Places) -> tuple:
        """The same among a few assignments."""
        lane = cute.arch.lane_idx()
        expert, order, begins = self.search(source, extents.E)
        rank = Int32(cute.arch.popc(begins & Uint32(cute.arch.lanemask_lt())))
        here = (begins >> Uint32(lane)) & Uint32(1)
        mask = Uint32(cute.arch.vote_ballot_sync(here != 0 and rank == n))
        leader = Int32(cute.arch.popc(mask - Uint32(1)))
        e, at = cute.arch.shuffle_sync(expert, leader), order - cute.arch.shuffle_sync(order, leader)
        mine = expert == e and at >= 0 and at < self.t.BN
        rows = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(mine)))
        self.forget(rows, place, places)
        if mine:
            self.note(lane, (at, place), source, places)
        return e, rows

    @cute.jit
    def search(self, source: Source, E: Int32) -> tuple:
        """Lane i has assignment i: (its expert or -1, its place among the expert's; the mask of assignments that begin
        a tile, whose place is a multiple of BN)."""
        lane = cute.arch.lane_idx()
        e = Int32(-1)
        if lane < source.mIds.shape[0]:
            e = Int32(source.mIds[lane])
        ours = e >= 0 and e < E
        e = cutlass.select_(ours, e, Int32(-1))
        order = Int32(cute.arch.popc(ptx.same_lanes(e) & Uint32(cute.arch.lanemask_lt())))
        return e, order, Uint32(cute.arch.vote_ballot_sync(ours and order % self.t.BN == 0))

    @cute.jit
    def forget(self, rows: Int32, place: Int32, places: Places):
        """Note that there are only so many rows."""
        for token in cutlass.range(rows + cute.arch.lane_idx(), self.t.BN, 32, unroll=1):
            places.sFrom[token, place] = Int32(-1)

    @cute.jit
    def note(self, row: Int32, to: tuple, source: Source, places: Places):
        """Store what is known of a row."""
        token, place = to
        found = row
        if const_expr(source.mIndex is not None):
            found = source.mIndex[row]
        found = found // source.index_div
        places.sFrom[token, place] = found * source.pitch
        if const_expr(source.mOutIndex is not None):
            places.sTo[token, place] = source.mOutIndex[row]
        else:
            places.sTo[token, place] = row
        if const_expr(self.config.row_scale):
            places.sScale[token, place] = source.mScale[found]

    # ---- parts of a tile ----

    @cute.jit
    def parts(self, work: Work, tile: Tile, stages: Int32) -> Int32:
        """How many other CTAs have earlier parts of a tile: those with the numbers before this one's."""
        grid, _, _ = cute.arch.grid_dim()
        start, others = (tile.number - work.waves * grid) * stages, Int32(0)
        while work.rest * (work.number - others) // work.ranges > start:
            others += 1
        return others

    def flag(self, mSync, number) -> Int64:
        """The address of the flag that says that the part of CTA `number` is stored."""
        return mSync.iterator.toint() + Int64(1 + number) * 4


def after(place: Int32) -> Int32:
    """The place of the tile after the one at `place`."""
    return cutlass.select_(place == PLACES - 1, Int32(0), place + 1)


def _load(source: cute.Tensor, count: int) -> list:
    found = cute.make_rmem_tensor(count, Int32)
    cute.autovec_copy(cute.make_tensor(source.iterator, cute.make_layout(count)), found)
    return [found[i] for i in range(count)]


def _store(to: cute.Tensor, words: tuple):
    for i, word in enumerate(words):
        to[i] = word
