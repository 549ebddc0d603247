"""Happened-before: whether accesses of shared memory by different warps are ordered by something the kernel did.

Vector clocks, one entry per warp of the cluster. A warp's own entry grows whenever it releases (arrives at a barrier,
or starts an asynchronous operation); who waits for a barrier learns what those who arrived knew. So a missing barrier
is found in any schedule, even if the values happen to be right. Words of 32 bits; narrower accesses are not looked at.
PTX ISA: "Memory Consistency Model", much simplified: barriers and asynchronous operations order everything.
"""

import numpy as np

from tests.emulator.memory import GRANULE, Violation

WORD = 4


class History:
    """Who last wrote and read each word of one CTA's shared memory, at which time of its own clock."""

    def __init__(self, shared, warps):
        words = shared.size // WORD
        self.shared = shared
        self.names = warps
        self.writer = np.zeros(words, np.int16)  # slot of a warp
        self.written = np.zeros(words, np.int32)  # 0: nobody
        self.read = np.zeros((len(warps), words), np.int32)

    def words(self, addresses, size):
        first = (addresses.astype(np.int64) - self.shared.base) // WORD
        return first if size == WORD else (first[:, None] + np.arange(size // WORD)).ravel()

    def load(self, warp, addresses, size):
        if size >= WORD:
            words = self.words(addresses, size)
            self.check_read(warp.known, words, "reads")
            self.read[warp.slot, words] = warp.known[warp.slot]

    def store(self, warp, addresses, size):
        if size >= WORD:
            words = self.words(addresses, size)
            self.check_write(warp.known, words, "writes")
            self.writer[words], self.written[words] = warp.slot, warp.known[warp.slot]

    def check_read(self, known, words, what):
        late = self.written[words] > known[self.writer[words]]
        if late.any():
            word = int(words[late.argmax()])
            self.fail(what, word, "written", self.names[self.writer[word]])

    def check_write(self, known, words, what):
        self.check_read(known, words, what)
        late = self.read[:, words] > known[:, None]
        if late.any():
            slot, at = np.argwhere(late)[0]
            self.fail(what, int(words[at]), "read", self.names[slot])

    def fail(self, what, word, did, who):
        place = self.shared.base + word * WORD
        raise Violation(f"{what} {place:#x} in shared memory, {did} by {who} with no barrier between them")

    def async_read(self, known, granules):
        self.check_read(known, self.of(granules), "starts reading")

    def async_write(self, known, granules):
        """Afterwards only its mbarrier tells; that is looked after by claims."""
        words = self.of(granules)
        self.check_write(known, words, "starts writing")
        self.written[words] = 0
        self.read[:, words] = 0

    @staticmethod
    def of(granules):
        count = GRANULE // WORD
        return (np.asarray(granules).ravel()[:, None] * count + np.arange(count)).ravel()


class Known:
    """What one learns from one phase of a barrier: what those who arrived knew."""

    def __init__(self, warps):
        self.known = np.zeros(warps, np.int64)
        self.trusted = False  # whether any of them had called griddepcontrol.wait
        self.time = 0  # of the last arrival, see timeline.py

    def learn(self, known, trusted, time):
        np.maximum(self.known, known, out=self.known)
        self.trusted |= trusted
        self.time = max(self.time, time)


def acquire(warp, learned):
    """The warp has waited for those who arrived."""
    np.maximum(warp.known, learned.known, out=warp.known)
    if learned.trusted and not warp.trusted:
        warp.trusted = warp.cta.machine.memory.trusted = True


def release(warp, learned):
    """The warp arrives."""
    learned.learn(warp.known, warp.trusted, warp.clock)
    warp.known[warp.slot] += 1
