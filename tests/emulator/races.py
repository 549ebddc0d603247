"""Happened-before: whether accesses of shared memory and of Tensor Memory by different warps are ordered by something
the kernel did.

This uses vector clocks with one entry per warp of the cluster. A warp's own entry grows whenever it releases (arrives
at a barrier, or starts an asynchronous operation); a warp that waits for a barrier learns what those who arrived knew.
So a missing barrier is found in any schedule, even if the values happen to be right. PTX ISA: "Memory Consistency
Model", much simplified: barriers and asynchronous operations order everything.

Tensor Memory also needs fences. A warp releases those of its tcgen05 operations that precede its last
tcgen05.fence::before_thread_sync (tcgen05.commit needs none), and what it acquires of others' operations counts from
its next tcgen05.fence::after_thread_sync on; with these fences .relaxed is enough. PTX ISA: "tcgen05 Memory Consistency
Model", with its canonical synchronization patterns.

The lanes of a warp run together here, but an arrival of one lane releases only its own accesses, and those that the
others made before the last barrier of all lanes: bar.warp.sync, bar.sync, barrier.cluster, or wgmma.wait_group, since
its WGMMAs used the registers of all lanes. Accesses by one lane count as those of another warp. For Tensor Memory any
instruction is enough in which all lanes wait for each other, such as elect.sync in front of an arrival: the operations
have been waited for, and the fences come after them.
"""

import numpy as np

from tests.emulator.memory import GRANULE, Violation

WORD = 4
TCGEN05 = 1  # row of a warp's clocks that says what others learn of its tcgen05 operations; row 0 is for all else
EVER = 1 << 40


class Uses:
    """Who last wrote and read each of some places, and at which time of its own clock."""

    def __init__(self, places, warps):
        self.names = warps * 2
        self.writer = np.zeros(places, np.int16)  # slot of a warp
        self.written = np.zeros(places, np.int32)  # 0: nobody
        self.read = np.zeros((len(warps), places), np.int32)  # rows for single lanes are appended when there are any
        self.readers = np.arange(len(warps))  # their slots

    def check_read(self, known, places, what):
        late = self.written[places] > known[self.writer[places]]
        if np.count_nonzero(late):  # quicker than any()
            place = int(places[late.argmax()])
            self.fail(what, place, "written", self.names[self.writer[place]])

    def check_write(self, known, places, what):
        self.check_read(known, places, what)
        late = self.read[:, places] > known[self.readers, None]
        if np.count_nonzero(late):
            row, at = np.argwhere(late)[0]
            self.fail(what, int(places[at]), "read", self.names[self.readers[row]])

    def mark_read(self, warp, places, one_lane=False):
        row = slot = warp.slots[one_lane]
        if one_lane:
            if slot not in self.readers:
                self.readers = np.append(self.readers, slot)
                self.read = np.concatenate([self.read, np.zeros_like(self.read[:1])])
            row = int((self.readers == slot).argmax())
        self.read[row, places] = warp.known[slot]

    def mark_written(self, warp, places, one_lane=False):
        slot = warp.slots[one_lane]
        self.writer[places], self.written[places] = slot, warp.known[slot]

    def forget(self, places):
        self.written[places] = 0
        self.read[:, places] = 0

    def split(self, parts):
        """Divide each place into `parts` places."""
        self.writer, self.written = np.repeat(self.writer, parts), np.repeat(self.written, parts)
        self.read = np.repeat(self.read, parts, axis=1)


class History(Uses):
    """Uses of one CTA's shared memory, by words until a narrower access comes, since warps may share a word."""

    def __init__(self, shared, warps):
        super().__init__(shared.size // WORD, warps)
        self.shared, self.unit = shared, WORD
        self.visits = np.zeros(len(warps), np.int64)  # when a warp of another CTA last used it

    def places(self, addresses, size):
        if size < self.unit:
            self.split(self.unit // size)
            self.unit = size
        first = (addresses.astype(np.int64) - self.shared.base) // self.unit
        return first if size == self.unit else (first[:, None] + np.arange(size // self.unit)).ravel()

    def load(self, warp, addresses, size):
        places = self.places(addresses, size)
        self.check_read(warp.known, places, "reads")
        self.mark_read(warp, places, len(addresses) == 1)

    def store(self, warp, addresses, size):
        places = self.places(addresses, size)
        self.check_write(warp.known, places, "writes")
        self.mark_written(warp, places, len(addresses) == 1)

    def fail(self, what, place, did, who):
        at = self.shared.base + place * self.unit
        raise Violation(
            f"{what} {at:#x} in shared memory, {did} by {who} with no barrier between them, or by an arrival of one "
            "lane that had not waited for the others (bar.warp.sync)"
        )

    def async_read(self, warp, granules):
        """Whoever writes there later knows that `warp` started it, as with `async_write`. A read that was waited for is
        over for all lanes."""
        places = self.of(granules)
        self.check_read(warp.known, places, "starts reading")
        self.mark_read(warp, places, one_lane=True)

    def async_write(self, warp, granules):
        """Whoever uses it knows that `warp` started it from the mbarrier, whose completion is checked by the claims."""
        places = self.of(granules)
        self.check_write(warp.known, places, "starts writing")
        self.forget(places)
        self.mark_written(warp, places, one_lane=True)

    def of(self, granules):
        count = GRANULE // self.unit
        return (np.asarray(granules).ravel()[:, None] * count + np.arange(count)).ravel()

    def visit(self, warp):
        self.visits[warp.slot] = warp.known[warp.slot]

    def check_exit(self, cta):
        """The CTA ends: someone in it must know that others will no longer use its shared memory."""
        late = self.visits > np.max([warp.known for warp in cta.warps], axis=0)[: len(self.visits)]
        if late.any():
            raise Violation(f"CTA {cta.number} may end before {self.names[late.argmax()]} has used its shared memory")


class TmemHistory(Uses):
    """Uses of one CTA's Tensor Memory, by columns of each quarter of the lanes."""

    QUARTERS, COLUMNS = 4, 512

    def __init__(self, warps):
        super().__init__(self.QUARTERS * self.COLUMNS, warps)

    def places(self, lanes, columns):
        quarters = np.arange(lanes.start // 32, -(-lanes.stop // 32))
        return (quarters[:, None] * self.COLUMNS + np.arange(columns.start, columns.stop)).ravel()

    def use(self, warp, lanes, columns, writes):
        places = self.places(lanes, columns)
        if writes:
            self.check_write(warp.tmem_known, places, "writes")
            self.mark_written(warp, places)
        else:
            self.check_read(warp.tmem_known, places, "reads")
            self.mark_read(warp, places)

    def free(self, warp, columns):
        places = self.places(slice(0, 128), columns)
        self.check_write(warp.tmem_known, places, "frees")
        self.forget(places)

    def fail(self, what, place, did, who):
        raise Violation(f"{what} TMEM column {place % self.COLUMNS}, {did} by {who}, with no barrier between them or "
                        "without tcgen05.fence::before_thread_sync and ::after_thread_sync around it")  # fmt: skip


class Known:
    """What a wait learns from one phase of a barrier: all that those who arrived knew."""

    def __init__(self, slots):
        self.clocks = np.zeros((2, slots), np.int64)
        self.near = np.zeros((2, slots), np.int64)  # without the arrivals of other CTAs' warps
        self.waited = False  # whether any of those who arrived had called griddepcontrol.wait
        self.time = 0  # of the last arrival, see timeline.py

    def learn(self, clocks, waited, time, far=False):
        np.maximum(self.clocks, clocks, out=self.clocks)
        if not far:
            np.maximum(self.near, clocks, out=self.near)
        self.waited |= waited
        self.time = max(self.time, time)


def start_clocks(warp, slot, warps):
    """`clocks`: what a warp releases. `tmem_known`: which tcgen05 operations have happened before its next one. Each
    warp has two slots: for accesses of all its lanes, and for those of a single lane."""
    warp.slot, warp.slots, warp.clocks = slot, [slot, slot + warps], np.zeros((2, 2 * warps), np.int64)
    warp.known, warp.tmem_known = warp.clocks[0], np.zeros(2 * warps, np.int64)
    # What a relaxed arrival releases: `clocks` at the last fence. far: to other CTAs, where fence.cta does not count.
    warp.fenced, warp.fenced_far = np.zeros((2, 2, 2 * warps), np.int64)
    # What relaxed waits (of other CTAs, narrow waits too) have seen; the next fence acquires it.
    warp.unacquired, warp.unacquired_far = np.zeros((2, 2 * warps), np.int64)
    warp.known[warp.slots], warp.tmem_known[slot] = 1, EVER
    # Its own time when all lanes last waited for each other, in a barrier and in any instruction.
    warp.together, warp.gathered = 0, 0


def tick(warp):
    """What the warp does from now on is not part of what it has released."""
    warp.known[warp.slots] += 1


def gather(warp, barrier=True):
    """Note that all lanes have waited for each other."""
    warp.gathered = int(warp.known[warp.slot])
    if barrier:
        warp.together = warp.gathered
    tick(warp)


def of_one_lane(warp, clocks):
    """The part of `clocks` that an arrival of one lane releases."""
    clocks = clocks.copy()
    clocks[0, warp.slot] = min(clocks[0, warp.slot], warp.together)
    if not warp.cta.machine.lenient:
        clocks[TCGEN05, warp.slot] = min(clocks[TCGEN05, warp.slot], warp.gathered)
    return clocks


def fence_before(warp):
    warp.clocks[TCGEN05, warp.slot] = warp.known[warp.slot]
    tick(warp)


def fence_after(warp):
    np.maximum(warp.tmem_known, warp.clocks[TCGEN05], out=warp.tmem_known)


def fence_all(warp, far=True):
    """A fence: all that the warp has done precedes its next relaxed arrival, for whoever sees that (in its CTA)."""
    warp.fenced[:] = warp.clocks
    if far:
        warp.fenced_far[:] = warp.clocks
    tick(warp)


def acquire(warp, learned, relaxed=False, narrow=False):
    """The warp has waited for those who arrived. narrow: at CTA scope, which orders nothing of other CTAs."""
    if relaxed or narrow:
        np.maximum(warp.unacquired_far, learned.clocks[0], out=warp.unacquired_far)
    if relaxed:
        np.maximum(warp.unacquired, learned.near[0], out=warp.unacquired)
        seen = learned.near if narrow else learned.clocks
        np.maximum(warp.clocks[TCGEN05], seen[TCGEN05], out=warp.clocks[TCGEN05])
        return
    np.maximum(warp.clocks, learned.near if narrow else learned.clocks, out=warp.clocks)
    if warp.cta.machine.lenient:
        fence_after(warp)
    if learned.waited and not warp.waited:
        warp.waited = warp.cta.machine.memory.waited = True


def weakly_released(warp, far, scope_is_enough):
    """What an arrival releases that is .relaxed, or whose scope is too narrow for the CTA that it goes to."""
    clocks = (warp.fenced_far if far else warp.fenced).copy()
    if scope_is_enough:
        clocks[TCGEN05] = warp.clocks[TCGEN05]
    return clocks


def release(warp, learned, relaxed=False):
    """The warp arrives, and releases to every CTA of the cluster."""
    if warp.cta.machine.lenient and not relaxed:
        fence_before(warp)
    learned.learn(warp.fenced_far if relaxed else warp.clocks, warp.waited, warp.clock)
    tick(warp)
