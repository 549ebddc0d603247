"""Memories that know which bytes were written, which of them an unfinished asynchronous operation still uses, and which
were written by ordinary stores that the async proxy may not see yet.

PTX ISA: "State Spaces", "Async proxy", "Tensor Memory". Errors raised here carry no place; the machine adds it.
"""

import ctypes
from bisect import bisect_right

import numpy as np

UNWRITTEN, WRITTEN, BARRIER, OUTSIDE = 0, 1, 2, 3
EARLIER = 4  # added to another state: the kernel before uses this byte, so griddepcontrol.wait must come first
STATE_NAMES = {
    UNWRITTEN: "never written",
    BARRIER: "an mbarrier",
    OUTSIDE: "outside of every buffer",
}
GRANULE = 16  # asynchronous operations use whole 16-byte pieces
SHARED_BASE = 1024  # the system owns the first KiB of shared memory, so a null address is out of bounds
RANK_SHIFT = 24  # shared::cluster addresses carry the CTA's rank in the cluster above the offset
OFFSET = (1 << RANK_SHIFT) - 1
ALL_WRITTEN, NOT_OURS = ({w: int(byte * w, 16) for w in (1, 2, 4, 8)} for byte in ("01", "06"))  # in all bytes
RELEASED = 255  # unfenced writes that their warp has since released through a barrier


class Violation(Exception):
    """The kernel broke a rule of the machine."""


class Memory:
    """`data` from address `base`, uint8; `state` per byte."""

    def __init__(self, name, base, data, state, owner=None):
        self.name, self.base, self.size = name, base, len(data)
        self.bytes, self.state = data, state
        self.owner = owner
        self.views = {w: self._view(data, w) for w in (1, 2, 4, 8)}
        self.states = {w: self._view(state, w) for w in (1, 2, 4, 8)}

    @staticmethod
    def _view(array, width):
        return array[: len(array) // width * width].view(f"u{width}")

    def _index(self, addresses, width, count):
        """The index of each access into the view of its width; checks bounds and alignment."""
        size = width * count
        offsets = addresses - self.base  # unsigned: below the base they are large
        outside = offsets > max(self.size - size, 0)
        if np.count_nonzero(outside) or size > self.size:  # quicker than any()
            raise Violation(f"{size} bytes at {int(addresses[outside.argmax()]):#x} are outside of {self.describe()}")
        odd = offsets & (size - 1)
        if np.count_nonzero(odd):
            raise Violation(f"address {int(addresses[(odd != 0).argmax()]):#x} is not aligned to {size} bytes")
        index = (offsets >> (width.bit_length() - 1)).astype(np.intp)
        return index if count == 1 else index[:, None] + np.arange(count)

    def describe(self):
        return f"{self.name} [{self.base:#x}, {self.base + self.size:#x})"

    def _fail(self, what, index, width, writes=False):
        """Raise, unless every byte may be used after all."""
        at = (np.asarray(index)[..., None] * width + np.arange(width)).ravel()
        if (refusal := self.refusal(at, writes)) is not None:
            raise Violation(f"{what} {refusal[0]:#x} in {self.name}: {refusal[1]}")

    def refusal(self, at, writes=False):
        """The first of these bytes that may not be read (or written) now: (its address, why not); or None."""
        states = self.state[at]
        if self.owner is not None and self.owner.waited:
            states = states & ~np.uint8(EARLIER)
        refused = states > WRITTEN if writes else states != WRITTEN
        if not refused.any():
            return None
        place, state = int(at[refused][0]), int(states[refused][0])
        if state & EARLIER:
            return self.base + place, "belongs to the kernel before, and griddepcontrol.wait was not called"
        return self.base + place, STATE_NAMES[state]

    def load(self, addresses, width, count=1):
        """Unsigned integers (lanes,) or (lanes, count)."""
        index = self._index(addresses, width, count)
        if np.count_nonzero(self.states[width][index] != ALL_WRITTEN[width]):
            self._fail("reads", index, width)
        return self.views[width][index]

    def store(self, addresses, width, values):
        count = 1 if values.ndim == 1 else values.shape[1]
        index = self._index(addresses, width, count)
        if np.count_nonzero(self.states[width][index] & NOT_OURS[width]):
            self._fail("writes", index, width, writes=True)
        self.views[width][index] = values
        self.states[width][index] = ALL_WRITTEN[width]

    def span(self, address, size):
        start = address - self.base
        if start < 0 or start + size > self.size:
            raise Violation(f"{size} bytes at {address:#x} are outside of {self.describe()}")
        return slice(start, start + size)

    def read(self, address, size):
        """Read bytes for the async proxy; the caller has checked hazards."""
        span = self.span(address, size)
        if (self.state[span] != WRITTEN).any():
            self._fail("reads", np.arange(span.start, span.stop), 1)
        return self.bytes[span]

    def write(self, address, data):
        span = self.span(address, len(data))
        if (self.state[span] > WRITTEN).any():
            self._fail("writes", np.arange(span.start, span.stop), 1, writes=True)
        self.bytes[span] = data
        self.state[span] = WRITTEN


class Shared(Memory):
    """One CTA's shared memory. Addresses here are offsets, without the rank."""

    def __init__(self, rank, size, state=UNWRITTEN):
        size = -(-size // GRANULE) * GRANULE
        # Unwritten bytes are NaN in every format, in case a check misses them.
        super().__init__("shared memory", SHARED_BASE, np.full(size, 0xFF, np.uint8), np.full(size, state, np.uint8))
        self.rank = rank
        self.unfenced = np.zeros(size, np.uint8)  # the warp + 1 whose store the async proxy may not see, or RELEASED
        self.unfenced_views = {w: self._view(self.unfenced, w) for w in (1, 2, 4, 8)}
        self.has_unfenced = set()
        self.readers = np.zeros(size // GRANULE, np.uint16)  # unfinished asynchronous operations, per granule
        self.writers = np.zeros(size // GRANULE, np.uint16)
        self.claims = []

    # ---- generic proxy ----
    def load(self, addresses, width, count=1):
        if self.claims:
            self._check(self.writers, addresses, width * count, "reads", "writing")
        return super().load(addresses, width, count)

    def store(self, addresses, width, values, warp=None):
        count = 1 if values.ndim == 1 else values.shape[1]
        if self.claims:
            self._check(self.writers, addresses, width * count, "writes", "writing")
            self._check(self.readers, addresses, width * count, "writes", "reading")
        self.store_unclaimed(addresses, width, values, warp)

    def store_unclaimed(self, addresses, width, values, warp):
        """Store without checking whether an asynchronous operation is under way there."""
        count = 1 if values.ndim == 1 else values.shape[1]
        super().store(addresses, width, values)
        if warp is not None:
            index = self._index(addresses, width, count)
            self.unfenced_views[width][index] = int(f"{warp + 1:02x}" * width, 16)
            self.has_unfenced.add(warp + 1)

    def _check(self, counts, addresses, size, what, doing):
        first = (addresses.astype(np.int64) - self.base) // GRANULE
        inside = (first >= 0) & (first < len(counts))
        busy = counts[np.where(inside, first, 0)] != 0  # no access is larger than a granule
        if np.count_nonzero(busy):
            granule = int(first[busy.argmax()])
            raise Violation(f"{what} {self.base + granule * GRANULE:#x} in shared memory, which "
                            f"{self.claimed_by(granule, doing)} is still {doing}")  # fmt: skip

    def release(self, warp):
        """The warp arrives at a barrier: whoever waits there may fence on its behalf."""
        if warp + 1 in self.has_unfenced:
            self.has_unfenced.discard(warp + 1)
            self.has_unfenced.add(RELEASED)
            self.unfenced[self.unfenced == warp + 1] = RELEASED

    def fence(self, warp):
        """fence.proxy.async, executed by one warp."""
        for mark in (warp + 1, RELEASED):
            if mark in self.has_unfenced:
                self.has_unfenced.discard(mark)
                self.unfenced[self.unfenced == mark] = 0

    # ---- async proxy ----
    def granules(self, address, size):
        span = self.span(address, size)
        return np.arange(span.start // GRANULE, -(-span.stop // GRANULE))

    def claim(self, operation, granules, writes):
        """An asynchronous operation is issued that will use these pieces; `granules` without repeats."""
        busy = self.writers[granules] != 0
        doing = "writing"
        if writes and not busy.any():
            busy, doing = self.readers[granules] != 0, "reading"
        if busy.any():
            granule = int(granules[busy.argmax()])
            raise Violation(f"{'writes' if writes else 'reads'} {self.base + granule * GRANULE:#x} in shared memory, "
                            f"which {self.claimed_by(granule, doing)} is still {doing}")  # fmt: skip
        (self.writers if writes else self.readers)[granules] += 1
        self.claims.append((operation, granules, writes))

    def unclaim(self, operation):
        for claim in [c for c in self.claims if c[0] is operation]:
            _, granules, writes = claim
            (self.writers if writes else self.readers)[granules] -= 1
        self.claims = [c for c in self.claims if c[0] is not operation]

    def claimed_by(self, granule, doing):
        for operation, granules, writes in self.claims:
            if writes == (doing == "writing") and granule in granules:
                return operation
        raise AssertionError("a claim without its operation")

    def check_fenced(self, granules):
        """Check that ordinary stores have been fenced before the async proxy reads."""
        if not self.has_unfenced:
            return
        marks = self.unfenced.reshape(-1, GRANULE)[granules]
        if marks.any():
            mark = int(marks.max())
            who = "a store" if mark == RELEASED else f"a store of warp {mark - 1}"
            granule = int(np.asarray(granules)[marks.any(1).argmax()])
            raise Violation(f"the async proxy reads {self.base + granule * GRANULE:#x} in shared memory, written by "
                            f"{who} without a fence.proxy.async since")  # fmt: skip

    def write(self, address, data):
        super().write(address, data)
        self.unfenced[self.span(address, len(data))] = 0


class Global:
    """Device memory: for every host buffer a copy, aligned as device allocations are, with guards around it."""

    ALIGNMENT, GUARD = 512, 64

    def __init__(self):
        self.buffers, self.bases = [], []
        self.waited = True  # whether whoever acts now knows that the kernel before has ended
        self.copies = {}  # host address -> (host bytes, Memory)

    def allocate(self, name, size):
        """Make a Memory of which no byte may be used yet."""
        room = np.full(size + 2 * self.ALIGNMENT + self.GUARD, 0xFF, np.uint8)
        start = -room.__array_interface__["data"][0] % self.ALIGNMENT + self.ALIGNMENT
        base = room.__array_interface__["data"][0] + start
        data = room[start : start + -(-size // GRANULE) * GRANULE]
        return self.add(Memory(name, base, data, np.full(len(data), OUTSIDE, np.uint8), self))

    def add(self, buffer):
        at = bisect_right(self.bases, buffer.base)
        self.bases.insert(at, buffer.base)
        self.buffers.insert(at, buffer)
        return buffer

    def place(self, name, host, size, offset, extent, state=WRITTEN):
        """The device address of `extent` bytes at `offset` in a host allocation of `size` bytes at `host`."""
        if host not in self.copies:
            theirs = np.frombuffer((ctypes.c_uint8 * size).from_address(host), np.uint8)
            buffer = self.allocate(name, size)
            buffer.bytes[:size] = theirs
            self.copies[host] = theirs, buffer
        buffer = self.copies[host][1]
        buffer.state[offset : offset + extent] = state
        return buffer.base + offset

    def fetch(self):
        """Copy what the kernel wrote back to the host."""
        for theirs, buffer in self.copies.values():
            used = np.flatnonzero(buffer.state[: len(theirs)] == WRITTEN)
            if len(used):
                span = slice(used[0], used[-1] + 1)
                np.copyto(theirs[span], buffer.bytes[span], where=buffer.state[span] == WRITTEN)

    def find(self, address):
        at = bisect_right(self.bases, address) - 1
        if at < 0 or address >= self.buffers[at].base + self.buffers[at].size:
            near = f"; the buffer below it is {self.buffers[at].describe()}" if at >= 0 else ""
            raise Violation(f"global address {address:#x} is in no buffer{near}")
        return self.buffers[at]

    def split(self, addresses):
        """The buffers of an access: [(buffer, lanes)]."""
        buffer = self.find(int(addresses[0]))
        if not np.count_nonzero(addresses - buffer.base >= buffer.size):
            return [(buffer, slice(None))]
        owners = [self.find(int(a)) for a in addresses]
        return [(b, np.array([i for i, o in enumerate(owners) if o is b])) for b in dict.fromkeys(owners)]

    def load(self, addresses, width, count=1):
        parts = self.split(addresses)
        if len(parts) == 1:
            return parts[0][0].load(addresses, width, count)
        result = np.empty((len(addresses), count) if count > 1 else len(addresses), f"u{width}")
        for buffer, lanes in parts:
            result[lanes] = buffer.load(addresses[lanes], width, count)
        return result

    def store(self, addresses, width, values, warp=None):
        for buffer, lanes in self.split(addresses):
            buffer.store(addresses[lanes], width, values[lanes])

    def read(self, address, size):
        return self.find(address).read(address, size)

    def write(self, address, data):
        self.find(address).write(address, data)


class Tmem:
    """Tensor Memory of one CTA: 128 lanes by 512 columns of 32 bits, allocated by columns, from `first` on if there is
    room: kernels may not rely on column 0."""

    LANES, COLUMNS = 128, 512

    def __init__(self, first=0):
        self.first = first
        self.words = np.full((self.LANES, self.COLUMNS), 0xFFFFFFFF, np.uint32)
        self.written = np.zeros((self.LANES, self.COLUMNS), bool)
        self.owner = np.zeros(self.COLUMNS, np.int64)  # number of the allocation, 0: free
        self.allocations = 0
        self.sizes = {}
        self.may_allocate = True
        self.claims = []  # (operation, order, lanes, columns, writes)
        self.collected = self.collection = None  # of the matrix in the collector buffer: its place, its bytes

    def allocate(self, columns):
        """The first column of a new allocation, or None if there is no room now."""
        if columns < 32 or columns > 512 or columns & (columns - 1):
            raise Violation(f"tcgen05.alloc of {columns} columns: it must be a power of two from 32 to 512")
        if not self.may_allocate:
            raise Violation("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        start = next(self.rooms(columns), None)
        if start is not None:
            self.allocations += 1
            self.owner[start : start + columns] = self.allocations
            self.sizes[start] = columns
        return start

    def has_room(self, columns):
        return any(True for _ in self.rooms(columns))

    def rooms(self, columns):
        """First columns of free places, from `first` on."""
        starts = range(0, self.COLUMNS, columns)
        for start in sorted(starts, key=lambda start: (start < self.first, start)):
            if not self.owner[start : start + columns].any():
                yield start

    def free(self, start, columns):
        if self.sizes.get(start) != columns:
            raise Violation(f"tcgen05.dealloc of {columns} columns at {start}: no such allocation")
        for operation, _, _, used, _ in self.claims:
            if used.start < start + columns and start < used.stop:
                raise Violation(
                    f"tcgen05.dealloc of columns {start}..{start + columns - 1}, which {operation} still uses"
                )
        del self.sizes[start]
        self.owner[start : start + columns] = 0
        self.written[:, start : start + columns] = False

    def check(self, lanes, columns, reads):
        """Check `lanes` and `columns`, which are slices: inside an allocation, and written if they are read."""
        if lanes.stop > self.LANES or columns.stop > self.COLUMNS or columns.start < 0:
            raise Violation(f"TMEM lanes {lanes.start}..{lanes.stop - 1}, columns {columns.start}..{columns.stop - 1} "
                            "are outside of 128 x 512")  # fmt: skip
        if not self.owner[columns].all():
            free = columns.start + int((self.owner[columns] == 0).argmax())
            raise Violation(f"TMEM column {free} is not allocated")
        if reads and not self.written[lanes, columns].all():
            lane, column = np.argwhere(~self.written[lanes, columns])[0]
            raise Violation(f"reads TMEM lane {lanes.start + lane}, column {columns.start + column}: never written")

    def claim(self, operation, order, lanes, columns, writes):
        """Operations of one `order` run one after another; others must not meet."""
        for other, its_order, its_lanes, its_columns, its_writes in self.claims:
            if its_order == order or not (writes or its_writes):
                continue
            if its_lanes.start < lanes.stop and lanes.start < its_lanes.stop:
                if its_columns.start < columns.stop and columns.start < its_columns.stop:
                    what, doing = "writes" if writes else "reads", "writing" if its_writes else "reading"
                    span = f"{columns.start}..{columns.stop - 1}"
                    raise Violation(f"{what} TMEM columns {span}, which {other} is still {doing}")
        self.claims.append((operation, order, lanes, columns, writes))

    def unclaim(self, operation):
        self.claims = [c for c in self.claims if c[0] is not operation]
