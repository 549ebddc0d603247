"""Routing: top-k ids -> order, position, token, offsets, by a stable counting sort on the device.

A warp owns a run of assignments and a histogram in shared memory. Lanes with the same expert find each other by one
ballot per bit, so that ranks come out in order (match.any took 4 us more for 8192 assignments on an H200). Few
assignments are sorted by one CTA, more by a cluster of eight, whose CTAs read each other's histograms.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from moe_nvfp4.kernels.common.warp import all_equal, sum_of_lanes_before


def route_shape(R: int) -> tuple[int, int, int]:
    """CTAs, warps per CTA, assignments per thread. Allowing every power of two for the last would save large batches at
    most 0.7 % (H200, 2026-11-22) but need half as many kernels again."""
    if R <= 512:
        return 1, 8, 1 if R <= 256 else 2
    return (8, 8, 1) if R <= 2048 else (8, 16, 2 if R <= 8192 else 8 if R <= 32768 else 32)


@cute.jit
def local_id(id: Int32, mMap: cute.Tensor | None):
    """The number of an expert here, if a map tells it; -1 stays."""
    if const_expr(mMap is not None):
        if id >= 0 and id < mMap.shape[0]:
            id = mMap[id]
    return id


def print_illegal(E: Int32):
    """What is printed of an id that is not legal, before the kernel traps."""
    cute.printf("moe_nvfp4: an expert id is not in 0..%d (-1 and %d mean 'not here')\n", E - 1, E)


@cute.jit
def _bins(
    mIds: cute.Tensor, mMap: cute.Tensor | None, first: Int32, stride: cutlass.Constexpr, each: cutlass.Constexpr,
    E: Int32,
):  # fmt: skip
    """The bins of assignments first, first + stride, ...: the expert, E if unrouted (id -1 or E), E + 1 beyond the end.

    Traps on other ids.
    """
    ids, most = [E + 1] * each, E if const_expr(mMap is None) else mMap.shape[0] - 1
    for i in cutlass.range_constexpr(each):  # all loads first
        at = first + i * stride
        if at < mIds.shape[0]:
            ids[i] = Int32(mIds[at])
            if mIds[at] < -1 or mIds[at] > most:
                ids[i] = Int32(-3)
    if const_expr(mMap is not None):
        for i in cutlass.range_constexpr(each):
            if first + i * stride < mIds.shape[0]:
                ids[i] = local_id(ids[i], mMap)
                if ids[i] < -1 or ids[i] > E:
                    ids[i] = Int32(-3)
    wrong = ids[0] == -3
    for i in cutlass.range_constexpr(1, each):
        wrong = wrong or ids[i] == -3
    if wrong:
        print_illegal(E)
        cute.arch.inline_ptx("trap;")
    return [cutlass.select_(id == -1, E, id) for id in ids]


@cute.jit
def _peers(bin: Int32, bits: Int32):
    """(how many lanes have this bin, how many of them come before this lane), for bins of that many bits."""
    mask = Uint32(0xFFFFFFFF)
    for p in cutlass.range(bits, unroll=4):
        bit = (bin >> p) & 1
        mask &= ~(Uint32(cute.arch.vote_ballot_sync(bit != 0)) ^ Uint32(-bit))
    return Int32(cute.arch.popc(mask)), Int32(cute.arch.popc(mask & cute.arch.lanemask_lt()))


@cute.jit
def _bits(E: Int32):
    """The number of bits of bins 0 .. E + 1."""
    return 32 - Int32(cute.arch.clz(E + 1))


@cute.jit
def _scan(value: Int32, sSums: cute.Tensor, warps: cutlass.Constexpr):
    """A scan over the threads of a CTA: (the sum of value over the threads before this one, the sum over all).

    All threads must call it, and synchronize before they call it again.
    """
    tid, _, _ = cute.arch.thread_idx()
    before = sum_of_lanes_before(value)
    if tid % 32 == 31:
        sSums[tid // 32] = before + value
    cute.arch.sync_threads()
    total = Int32(0)
    for w in cutlass.range_constexpr(warps):
        if w < tid // 32:
            before += sSums[w]
        total += sSums[w]
    return before, total


def _load_of(rank: int, pointer: cute.Pointer) -> Int32:
    """Load a word from the shared memory of CTA `rank` of the cluster."""
    return cute.arch.inline_ptx(
        "{.reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, %d; ld.shared::cluster.b32 {$w0}, [a];}" % rank,
        write_only_types=[Int32],
        read_only_args=[pointer.toint()],
    )


class Routed(NamedTuple):
    """What routing reads (ids, int32 or int64 [R]) and writes (all int32; see `routing.Groups`)."""

    mIds: cute.Tensor  # [R]
    mOrder: cute.Tensor
    mPosition: cute.Tensor
    mToken: cute.Tensor  # the row of x that is read: a token, or an assignment where `quantize` makes rows of those
    mOffsets: cute.Tensor
    mSync: cute.Tensor  # set to zeros, for the GEMMs


class Route:
    """Sorts by a cluster of `ctas` CTAs with `warps` warps each and `each` assignments per thread. With `quantize`,
    further CTAs quantize x at the same time; neither depends on the other.

    The order is assembled in shared memory: writing it unsorted, one word per sector, took ten microseconds.
    """

    LOCAL = 14  # bits for the place of an assignment within its CTA; the 17 bits above hold its row

    def __init__(self, ctas: int, warps: int, each: int, quantize=None):
        assert 32 * warps * each <= 1 << self.LOCAL
        self.ctas, self.warps, self.each, self.quantize = ctas, warps, each, quantize

    def __repr__(self) -> str:
        return f"Route({self.ctas}, {self.warps}, {self.each}, {self.quantize})"

    @cute.jit
    def __call__(
        self, mIds, mMap, mOrder, mPosition, mToken, mOffsets, mSync, mX, mScale, mRows, mRowScale,
        E: Int32, top_k: Int32, stream,
    ):  # fmt: skip
        ctas = Int32(self.ctas)
        if const_expr(self.quantize is not None):
            each = self.warps // self.quantize.warps  # rows per CTA
            ctas += (mRows.shape[0] + each * self.ctas - 1) // (each * self.ctas) * self.ctas  # whole clusters
        groups = Routed(mIds, mOrder, mPosition, mToken, mOffsets, mSync)
        self.kernel(groups, mMap, mX, mScale, mRows, mRowScale, E, top_k).launch(
            grid=[ctas, 1, 1],
            block=[self.warps * 32, 1, 1],
            cluster=[self.ctas, 1, 1] if const_expr(self.ctas > 1) else None,
            smem=(32 + (self.warps + 3) * (E + 1) + self.warps * 32 * self.each) * 4,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        groups: Routed,
        mMap: cute.Tensor | None,  # int32: of each id, the number of the expert here, or -1
        mX: cute.Tensor | None,  # [T, K]; this and the next three as in `sm90.quantize.Quantize`
        mScale: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mRowScale: cute.Tensor | None,
        E: Int32,
        top_k: Int32,
    ):
        cta, _, _ = cute.arch.block_idx()
        if const_expr(self.quantize is None):
            self.group(cta, groups, mMap, E, top_k)
        else:
            slots = self.slots(mScale, top_k)
            if cta < self.ctas:
                self.group(cta, groups, mMap, E, slots)
            else:
                each = top_k // slots
                ids = groups.mIds, mMap
                self.quantize.rows(cta - self.ctas, self.warps, mX, ids, mScale, mRows, mRowScale, each)

    def slots(self, mScale: cute.Tensor | None, top_k: Int32) -> Int32:
        """How many slots of a token read the same row of x: one, if its rows have the static scales of experts, unless
        these are all the same. For few tokens that is not asked: it would take 1.5 us and save nothing."""
        if const_expr(mScale is None):
            return top_k
        if const_expr(self.ctas == 1):
            return Int32(1)
        return cutlass.select_(all_equal(mScale), top_k, Int32(1))

    @cute.jit
    def group(self, cta: Int32, groups: Routed, mMap: cute.Tensor | None, E: Int32, slots: Int32):
        """The work of one of the CTAs that sort; `slots` of a token read the same row of x."""
        mIds, mOrder, mPosition, mToken, mOffsets, mSync = groups
        threads, each = self.warps * 32, self.each
        chunk = threads * each
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = tid // 32, tid % 32
        bins = E + 1
        smem = cute.arch.get_dyn_smem(Int32)
        sSums = cute.make_tensor(smem, cute.make_layout(32))
        sRun = cute.make_tensor(smem + 32, cute.make_layout((self.warps, bins), stride=(bins, 1)))
        lists = smem + (32 + self.warps * bins)
        sCount, sStart, sMine = (cute.make_tensor(lists + i * bins, cute.make_layout(bins)) for i in range(3))
        sOrder = cute.make_tensor(lists + 3 * bins, cute.make_layout(chunk))
        for i in cutlass.range(tid, self.warps * bins, threads, unroll=1):
            smem[32 + i] = Int32(0)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        first = cta * chunk + warp * each * 32 + lane  # a warp has 32 * each consecutive assignments
        bin = _bins(mIds, mMap, first, 32, each, E)
        for i in cutlass.range(cta * threads + tid, mSync.shape[0], self.ctas * threads, unroll=1):
            mSync[i] = Int32(0)
        cute.arch.sync_threads()
        rank, bits = [], _bits(E)
        for i in cutlass.range_constexpr(each):
            n, before = _peers(bin[i], bits)
            at = cutlass.min(bin[i], E)
            count = sRun[warp, at]
            rank.append(count + before)
            cute.arch.sync_warp()
            if before == 0 and bin[i] <= E:
                sRun[warp, at] = count + n
            cute.arch.sync_warp()
        cute.arch.sync_threads()

        # sRun: how many of a bin's assignments in this CTA come before the warp's; sCount: how many the CTA has
        for b in cutlass.range(tid, bins, threads, unroll=1):
            counts = [sRun[w, b] for w in range(self.warps)]
            total = Int32(0)
            for w in cutlass.range_constexpr(self.warps):
                sRun[w, b] = total
                total += counts[w]
            sCount[b] = total
        if const_expr(self.ctas > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        self.starts(cta, bins, sSums, sCount, sStart, sMine, mOffsets)
        if const_expr(self.ctas > 1):
            cute.arch.cluster_arrive()  # no CTA may end while others read its counts

        sLocal = sMine if const_expr(self.ctas > 1) else sStart
        for i in cutlass.range_constexpr(each):
            if bin[i] <= E:
                within = sRun[warp, bin[i]] + rank[i]
                row = sStart[bin[i]] + within
                local = warp * each * 32 + lane + i * 32
                sOrder[sLocal[bin[i]] + within] = (row << self.LOCAL) | local
                mPosition[cta * chunk + local] = row
        cute.arch.sync_threads()
        for i in cutlass.range(tid, cutlass.min(mIds.shape[0] - cta * chunk, Int32(chunk)), threads, unroll=1):
            both = sOrder[i]
            at, row = cta * chunk + (both & ((1 << self.LOCAL) - 1)), both >> self.LOCAL
            mOrder[row] = at
            mToken[row] = at // slots
        if const_expr(self.ctas > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def starts(self, cta: Int32, bins: Int32, sSums, sCount, sStart, sMine, mOffsets):
        """Find where bins begin. sStart: the row of the CTA's first assignment of a bin (all assignments of earlier
        bins, plus those of this bin in earlier CTAs). sMine: the CTA's own assignments of earlier bins."""
        threads, (tid, _, _) = self.warps * 32, cute.arch.thread_idx()
        base, base_mine = Int32(0), Int32(0)
        for i in cutlass.range((bins + threads - 1) // threads, unroll=1):
            b = i * threads + tid
            mine, before, total = Int32(0), Int32(0), Int32(0)
            if b < bins:
                mine = sCount[b]
                before, total = self.counted(cta, sCount, b, mine)
            start, whole = _scan(total, sSums, self.warps)
            if b < bins:
                sStart[b] = base + start + before
                if cta == 0:
                    mOffsets[b] = base + start
            base += whole
            cute.arch.sync_threads()
            if const_expr(self.ctas > 1):
                start, whole = _scan(mine, sSums, self.warps)
                if b < bins:
                    sMine[b] = base_mine + start
                base_mine += whole
                cute.arch.sync_threads()

    @cute.jit
    def counted(self, cta: Int32, sCount, b: Int32, mine: Int32):
        """(assignments of bin b in the CTAs before this one, in all CTAs)."""
        before, total = Int32(0), mine
        if const_expr(self.ctas > 1):
            total = Int32(0)
            for c in cutlass.range_constexpr(self.ctas):
                if c == cta:
                    before = total
                total += _load_of(c, sCount.iterator + b)
        return before, total
