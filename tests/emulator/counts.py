"""Count what a run costs: the instructions of each warp, and the cycles that its CTAs' shared memory is busy.

    with counting() as counts:
        kernel(*arguments, trace=counts)

A multiprocessor's shared memory has 32 banks of 4 bytes: 128 bytes a cycle. Copies and tensor cores read and write all
banks at once; lanes that use the same bank wait for each other, unless they read the same word (with 16 bytes a lane,
eight lanes run at a time).
"""

from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np

from tests.emulator import copies, tcgen05
from tests.emulator.memory import Shared

BANKS = 32


class Counts:
    """instructions: {(CTA, warp, opcode up to its first dot): how many}, without "mov", as most of these are no machine
    instructions. shared: {"copies", "tensor cores", "loads", "stores": bytes} of all CTAs, where loads and stores count
    128 for each cycle."""

    def __init__(self):
        self.instructions, self.shared, self.last = Counter(), Counter(), {}

    def __call__(self, warp, mask):
        """Called after each instruction, as the emulator's `trace`; branches are not counted."""
        opcode = warp.at.opcode
        if not opcode.startswith("mov."):
            self.instructions[warp.cta.number, warp.index, opcode.partition(".")[0]] += 1
        if warp.at.line in self.branches(warp.cta.machine.program):
            self.instructions[warp.cta.number, warp.index, "bra"] += 1

    def branches(self, program):
        """The number of lines in front of branches."""
        if program not in self.last:
            self.last[program] = {b.code[-1][0].line for b in program.blocks if b.code and b.end is not None}
        return self.last[program]

    def of_warp(self, warp, cta=0, only=None):
        """The number of a warp's instructions, or of those whose opcodes begin like this."""
        of = self.instructions.items()
        return sum(n for (c, w, name), n in of if (c, w) == (cta, warp) and only in (None, name))


def cycles(addresses, size):
    """The cycles of one access in shared memory: an address for each lane, of `size` bytes each."""
    if (addresses == addresses[0]).all():
        return 1
    lanes = BANKS * 4 // max(size, 4)
    total = 0
    for start in range(0, len(addresses), lanes):
        words = np.unique((addresses[start : start + lanes, None] + np.arange(0, size, 4)) // 4)
        total += int(np.bincount(words.astype(np.int64) % BANKS).max())
    return total


@contextmanager
def counting():
    """A context in which the work of the emulator's shared memory is counted, too."""
    counts = Counts()

    def count(owner, name, what, size):
        original = getattr(owner, name)

        def run(*arguments):
            counts.shared[what] += size(*arguments)
            return original(*arguments)

        return patch.object(owner, name, run)

    def of_load(shared, addresses, width, count=1):
        return 4 * BANKS * cycles(addresses, width * count)

    def of_store(shared, addresses, width, values, *warp):
        return 4 * BANKS * cycles(addresses, width * values[0].size)

    with ExitStack() as stack:
        for wrapped in (
            count(Shared, "load", "loads", of_load),
            count(Shared, "store", "stores", of_store),
            count(copies, "write_shared", "copies", lambda shared, address, data, *span: len(data)),
            count(tcgen05, "read_matrix", "tensor cores", lambda shared, granules: 16 * granules.size),
        ):
            stack.enter_context(wrapped)
        yield counts
