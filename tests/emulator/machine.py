"""Warps, CTAs and clusters, and the scheduler that interleaves them with the asynchronous operations they started.

A warp's 32 lanes run as NumPy vectors. Where lanes diverge, the warp becomes several groups, each with its own place in
the code; the group furthest behind runs first, and groups that reach the same place merge again.
"""

import random
from dataclasses import dataclass

import numpy as np

from tests.emulator.memory import SHARED_BASE, UNWRITTEN, WRITTEN, Global, Shared, Tmem, Violation
from tests.emulator.races import History, Known, TmemHistory, start_clocks, tick
from tests.emulator.timeline import Timeline, latency

ALL = b"\1" * 32
NONE = bytes(32)
LANES = np.arange(32)
SPIN = 3000  # blocks that a warp runs before another one gets its turn
PATIENCE = 300  # rounds without any event, after which asynchronous operations advance by themselves
POISON = {"8": 0xBD, "16": 0x7FBD, "32": 0x7FBADBAD, "64": 0x7FFBADBAD7BADBAD, "pred": False}
DTYPES = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64, "pred": np.bool_}


class EmulatorError(Exception):
    """What the kernel did wrong, with the line, the CTA and the warp."""


@dataclass(frozen=True)
class Schedule:
    """The order of warps, and when asynchronous operations happen.

    order: "forward", "reverse" (each warp runs until it must wait), "random", or "slow": some warps, by the seed, run
    only when no other can, even after asynchronous operations. That shows missing back pressure.
    timing: "eager" (at issue), "lazy" (as late as the waits allow) or "random".
    """

    order: str = "forward"
    timing: str = "eager"
    seed: int = 0

    @classmethod
    def parse(cls, text):
        """ "eager", "lazy", "reverse", "reverse-lazy", "random:SEED", "slow:SEED", and any "order-timing"."""
        if isinstance(text, Schedule):
            return text
        name, _, seed = text.partition(":")
        parts = name.split("-")
        orders = [p for p in parts if p in ("forward", "reverse", "random", "slow")]
        timings = [p for p in parts if p in ("eager", "lazy")]
        if len(orders) + len(timings) != len(parts) or len(orders) > 1 or len(timings) > 1:
            raise ValueError(
                f"schedule {text!r}: an order (forward, reverse, random, slow; [:seed]) and a timing (eager, lazy)"
            )
        order = orders[0] if orders else "forward"
        timing = timings[0] if timings else {"random": "random", "slow": "lazy"}.get(order, "eager")
        return cls(order, timing, int(seed or 0))


class Wait:
    """Why a group cannot continue. `barrier`: what it needs, by which asynchronous operations are chosen."""

    expired = False

    def __init__(self, what, ready, barrier=None, may_expire=False):
        self.what, self.ready, self.barrier, self.may_expire = what, ready, barrier, may_expire


class Lanes(Wait):
    """Other lanes of the warp are missing; the wait ends when their group arrives."""

    def __init__(self):
        super().__init__("the other lanes of its warp", lambda: False)


class Group:
    __slots__ = ("block", "mask", "wait")

    def __init__(self, block, mask, wait=None):
        self.block, self.mask, self.wait = block, mask, wait

    def lanes(self):
        return LANES if self.mask is True else np.flatnonzero(self.mask)


def join(a, b):
    mask = a | b
    return True if mask.tobytes() == ALL else mask


class Warp:
    def __init__(self, cta, index, threads):
        self.cta, self.index = cta, index
        self.alive = np.arange(32) < threads
        mask = True if threads == 32 else self.alive.copy()
        self.groups = [Group(0, mask)]
        self.wait = None  # of the group now running, when it resumes after waiting
        self.at = None  # the instruction now running
        self.polled, self.polls = None, False  # its last read that orders others; whether it reads the same in a loop
        self.clock = 0  # see timeline.py
        self.waited = False  # whether it, or a warp that it has waited for, has called griddepcontrol.wait
        self.bulk_groups = []  # of asynchronous bulk stores: lists of operations, the last one open
        self.copy_groups = []  # of cp.async, likewise
        self.wgmma_groups, self.wgmma = [], None  # the latter from its first wgmma.fence on
        self.tmem_loads, self.tmem_stores = [], []
        self.unfenced_barriers = []  # that it initialised
        self.R = cta.machine.program.registers(self)

    @property
    def done(self):
        return not self.groups

    def __str__(self):
        return f"CTA {self.cta.number} warp {self.index}"

    def full(self, mask):
        """Whether all lanes that have not exited are here, as .aligned requires."""
        return mask is True or mask.tobytes() == self.alive.tobytes()


class Cta:
    def __init__(self, machine, cluster, index, rank):
        self.machine, self.cluster, self.index, self.rank = machine, cluster, index, rank
        grid = machine.grid
        self.number = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        self.shared = Shared(rank, machine.shared_size, machine.shared_state)
        self.tmem = Tmem(0 if machine.eager else Tmem.COLUMNS // 2)
        self.mbarriers = {}
        self.named = {}
        threads = int(np.prod(machine.block))
        self.warps = [Warp(self, i, min(32, threads - 32 * i)) for i in range(-(-threads // 32))]

    @property
    def done(self):
        return all(warp.done for warp in self.warps)


class Cluster:
    def __init__(self):
        self.ctas = []
        self.arrived, self.phase = set(), 0

    def complete(self):
        """Called when all CTAs exist: number the warps."""
        warps = [warp for cta in self.ctas for warp in cta.warps]
        self.learned = self.past = Known(2 * len(warps))  # from this phase of its barrier, and the last
        # Learned from accesses that order others (atomics, volatile, acquire, release) and from fences: one for all.
        self.flags = Known(2 * len(warps))
        for slot, warp in enumerate(warps):
            start_clocks(warp, slot, len(warps))
        for cta in self.ctas:
            cta.history, cta.tmem.history = History(cta.shared, warps), TmemHistory(warps)


class Operation:
    """An asynchronous operation. `stages` run in order; a store has two, since its source is free before it is done.

    signals: mbarriers that it will complete. order: operations with the same key run in the order of issue, but none
    waits for one that is `last`.
    """

    def __init__(self, warp, stages, signals=(), order=None, owner=None, last=False):
        self.warp, self.instruction = warp, warp.at
        self.stages, self.signals, self.order, self.last = list(stages), signals, order, last
        self.owners = [owner or warp.cta]
        self.done = False
        self.time = warp.clock  # when it was issued, later when it is over
        self.waited, self.clocks = warp.waited, warp.clocks.copy()
        tick(warp)

    def __str__(self):
        return f"{self.instruction.opcode.split('.mbarrier')[0]} (line {self.instruction.line}, {self.warp})"


class Machine:
    """One launch.

    stale_shared: reading shared memory that nobody wrote is no error, for kernels that ignore what they read there; it
    holds NaNs.
    lenient: accept what kernels published by NVIDIA rely on beyond the PTX ISA, see README.md.
    cut_sums: tcgen05.mma adds like an H200's tensor cores, see `tensor_core.multiply_add`; else it rounds an exact sum
    once. What a Blackwell does is not documented.
    only: the numbers of the clusters that run, as if there were no others; None: all.
    """

    def __init__(self, program, grid, block, dynamic_shared=0, cluster=(1, 1, 1), memory=None, parameters=b"",
                 schedule="eager", resident=None, trace=None, max_steps=20_000_000,
                 stale_shared=False, lenient=False, only=None,
                 cut_sums=False):  # fmt: skip
        self.program, self.grid, self.block, self.cluster_shape = program, grid, block, cluster
        self.dynamic_shared = dynamic_shared
        self.shared_state = WRITTEN if stale_shared else UNWRITTEN
        self.place_shared()
        self.memory, self.parameters = memory or Global(), parameters
        self.schedule = Schedule.parse(schedule)
        self.random = random.Random(self.schedule.seed)
        self.resident, self.trace, self.max_steps, self.lenient, self.only = resident, trace, max_steps, lenient, only
        self.cut_sums = cut_sums
        self.pending = []  # operations in order of issue
        self.steps = 0  # blocks of instructions run
        self.instructions = 0
        self.ctas = []
        self.timeline = Timeline()
        self.clocks, self.clock = None, 0  # the clocks and the time of the warp or operation that acts now
        self.ends = {}  # (CTA, warp) -> clock at its end
        self.changed_maps = {}  # address of a tensor map that the kernel changed -> CTAs that have acquired it since
        self.last_of_order = {}  # order key -> time of the last operation of that order
        self.changed = False  # whether anything happened that could end a wait
        self.early_trigger = False  # the next kernel may start before the one before has ended
        for size, most in zip(grid, cluster, strict=True):
            if size % most:
                raise ValueError(f"grid {grid} is not a multiple of the cluster {cluster}")

    # ---- layout ----
    def place_shared(self):
        self.shared_symbols, at, dynamic = {}, SHARED_BASE, []
        for variable in self.program.kernel.shared:
            if variable.size == 0:
                dynamic.append(variable)
                continue
            at = -(-at // variable.align) * variable.align
            self.shared_symbols[variable.name] = at
            at += variable.size
        for variable in dynamic:
            at = -(-at // variable.align) * variable.align
        for variable in dynamic:
            self.shared_symbols[variable.name] = at
        self.shared_size = at + self.dynamic_shared - SHARED_BASE
        if self.shared_size > 227 * 1024:
            raise EmulatorError(f"{self.shared_size} bytes of shared memory: a CTA has at most {227 * 1024}")

    def clusters(self):
        (gx, gy, gz), (cx, cy, cz) = self.grid, self.cluster_shape
        wide, high, deep = gx // cx, gy // cy, gz // cz
        for number in range(wide * high * deep) if self.only is None else self.only:
            x, y, z = number % wide * cx, number // wide % high * cy, number // (wide * high) * cz
            cluster = Cluster()
            for rank in range(cx * cy * cz):
                index = (x + rank % cx, y + rank // cx % cy, z + rank // (cx * cy))
                cluster.ctas.append(Cta(self, cluster, index, rank))
            cluster.complete()
            yield cluster

    # ---- running ----
    def run(self):
        with np.errstate(all="ignore"):
            waiting, resident = self.clusters(), []
            most = self.resident or 1 << 30
            exhausted = False
            while True:
                while not exhausted and sum(len(c.ctas) for c in resident) < most:
                    cluster = next(waiting, None)
                    if cluster is None:
                        exhausted = True
                    else:
                        resident.append(cluster)
                if not resident:
                    return self
                self.run_until_some_end(resident)
                for cluster in [c for c in resident if all(cta.done for cta in c.ctas)]:
                    for cta in cluster.ctas:
                        self.check_exit(cta)
                    resident.remove(cluster)

    def run_until_some_end(self, resident):
        self.ctas = [cta for cluster in resident for cta in cluster.ctas]
        warps = [w for cta in self.ctas for w in cta.warps if not w.done]
        if self.schedule.order == "reverse":
            warps.reverse()
        if self.schedule.order == "slow":
            rank = random.Random(self.schedule.seed).sample(range(32), 32)  # the same for every CTA
            warps.sort(key=lambda warp: rank[warp.index])
        expired = unchanged = 0
        while True:
            progress = self.spins = False
            if self.schedule.order == "random":
                self.random.shuffle(warps)
            for warp in warps:
                if self.run_warp(warp):
                    progress = True
                elif self.schedule.order == "slow":
                    progress = self.complete_awaited([warp])
                if progress and self.schedule.order == "slow" and not self.spins:
                    break  # back to the first
            if self.schedule.timing == "random":
                for _ in range(self.random.randint(0, 2)):
                    self.complete_random()
            alive = [w for w in warps if not w.done]
            if len(alive) < len(warps):
                warps = alive
                if any(all(cta.done for cta in c.ctas) for c in resident):
                    return
            if self.steps > self.max_steps:
                raise EmulatorError(f"not finished after {self.steps} steps\n{self.report(warps)}")
            unchanged += 1
            if self.changed:
                expired, unchanged, self.changed = 0, 0, False
            if (self.spins or unchanged > PATIENCE) and self.pending and not self.complete_awaited(warps):
                self.advance(self.pending[0])  # a loop that polls memory may be waiting for it
            if progress:
                continue
            if self.complete_awaited(warps):
                expired = 0
                continue
            expired += 1
            if expired > 2 or not self.expire(warps):
                raise EmulatorError(f"deadlock: every warp waits\n{self.report(warps)}")

    def run_warp(self, warp):
        """Let one warp run until it must wait, or for a while. Returns whether it did anything."""
        quantum = self.random.randint(1, 30) if self.schedule.order == "random" else SPIN
        ran = warp.polls = False
        while quantum > 0 and warp.groups:
            if warp.polls:  # it would only repeat this: nothing changes while it runs
                self.steps += quantum
                quantum = 0
                break
            group = self.pick(warp)
            if group is None:
                break
            ran = True
            quantum -= self.run_group(warp, group, quantum)
        self.spins |= ran and quantum <= 0 and self.schedule.order != "random"
        return ran

    def pick(self, warp):
        groups = warp.groups
        if len(groups) == 1:
            group = groups[0]
            return group if group.wait is None or group.wait.ready() or group.wait.expired else None
        groups.sort(key=lambda g: g.block)
        for a, b in zip(groups, groups[1:], strict=False):
            if a.block == b.block and all(g.wait is None or isinstance(g.wait, Lanes) for g in (a, b)):
                a.mask, a.wait = join(a.mask, b.mask), None
                groups.remove(b)
                return self.pick(warp)
        for group in groups:
            if group.wait is None or group.wait.ready() or group.wait.expired:
                return group
        return None

    def run_group(self, warp, group, quantum):
        """Run blocks of one group until it waits, ends or may meet another group. Returns how many."""
        program, count = self.program, 0
        self.clocks, self.clock, self.memory.waited = warp.clocks, warp.clock, warp.waited
        warp.wait, group.wait = group.wait, None
        alone = len(warp.groups) == 1
        try:
            while count < quantum and not warp.polls:
                count += 1
                block = program.blocks[group.block]
                self.instructions += len(block.code)
                warp.clock += len(block.code) + (block.end is not None)
                self.clock = warp.clock
                if block.waits:
                    warp.at, run = block.code[0]
                    wait = run(warp, group.mask)
                    warp.wait = None
                    if wait is not None:
                        group.wait = wait
                        warp.clock -= 1  # it will be called again
                        self.instructions -= 1
                        return count
                    if self.trace:
                        self.trace(warp, group.mask)
                else:
                    mask = group.mask
                    for warp.at, run in block.code:  # noqa: B020 (the loop tells where the warp is)
                        run(warp, mask)
                        if self.trace:
                            self.trace(warp, mask)
                end = block.end
                if end is None:
                    group.block += 1
                else:
                    warp.at = block.end_instruction
                    if end(warp, group):
                        return count
                if not alone:
                    return count
                alone = len(warp.groups) == 1
            return count
        except Violation as error:
            raise self.located(error, warp, warp.at) from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise self.located(f"the emulator failed: {error!r}", warp, warp.at) from error
        finally:
            self.steps += count

    def located(self, error, warp, instruction):
        return EmulatorError(f"line {instruction.line}: {instruction.text[:160]}\n  {warp}: {error}")

    # ---- asynchronous operations ----
    def issue(self, operation):
        """Run an operation at once if the timing is eager; else it waits until someone needs it."""
        if self.schedule.timing == "eager":
            self.act(operation)
            self.retire(operation)
        else:
            self.pending.append(operation)

    def act(self, operation, keep=0):
        """Run the operation's stages at its own time; then the clock is the issuing warp's again."""
        if operation.order is not None:
            operation.time = max(operation.time, self.last_of_order.get(operation.order, 0))
        operation.time += latency(operation.instruction.opcode)
        if operation.order is not None:
            self.last_of_order[operation.order] = operation.time
        before = self.clocks, self.clock, self.memory.waited
        self.clocks, self.clock, self.memory.waited = operation.clocks, operation.time, operation.waited
        while len(operation.stages) > keep:
            operation.stages.pop(0)()
        self.clocks, self.clock, self.memory.waited = before

    @property
    def eager(self):
        return self.schedule.timing == "eager"

    def finish(self, warp, operations, keep=0):
        """A warp waits for its own operations."""
        for operation in operations:
            self.advance(operation, keep)
            self.timeline.wait(warp, operation.time, "its own " + operation.instruction.opcode.split(".mbarrier")[0])
        self.clock = warp.clock

    def retire(self, operation):
        operation.done = True
        self.changed = True
        for cta in operation.owners:
            if cta.shared.claims:
                cta.shared.unclaim(operation)
            if cta.tmem.claims:
                cta.tmem.unclaim(operation)
        if operation in self.pending:
            self.pending.remove(operation)

    def advance(self, operation, keep=0):
        """Run all but the last `keep` stages of an operation, after the operations it must follow."""
        if len(operation.stages) <= keep:
            return
        if operation.order is not None:
            for other in [o for o in self.pending if o.order == operation.order]:
                if other is operation:
                    break
                if not other.last:
                    self.advance(other)
        try:
            for barrier in operation.signals:
                if barrier.cta.done and barrier.cta is not operation.warp.cta:
                    raise Violation(f"signals an mbarrier of CTA {barrier.cta.number}, which may have ended")
            self.act(operation, keep)
        except Violation as error:
            raise self.located(error, operation.warp, operation.instruction) from None
        if not operation.stages:
            self.retire(operation)

    def complete_random(self):
        if self.pending:
            self.advance(self.random.choice(self.pending))

    def complete_awaited(self, warps):
        """Every warp waits: complete one operation that some warp waits for, the newest first."""
        barriers = {
            g.wait.barrier for w in warps for g in w.groups if g.wait is not None and g.wait.barrier is not None
        }
        for operation in reversed(self.pending):
            if not barriers.isdisjoint(operation.signals):
                self.advance(operation)
                return True
        return False

    def expire(self, warps):
        """Let a try_wait give up after a time."""
        waits = [g.wait for w in warps for g in w.groups if g.wait is not None and g.wait.may_expire]
        for wait in waits:
            wait.expired = True
        return bool(waits)

    # ---- ends ----
    def check_exit(self, cta):
        def fail(why, warp=None):
            raise EmulatorError(f"CTA {cta.number} ends {why}")

        for operation in [o for o in self.pending if cta in o.owners]:
            stores = "cp.async.bulk.tensor", "cp.async.bulk.global", "cp.reduce"
            stored = operation.instruction.opcode.startswith(stores) and not operation.signals
            if not (operation.done or operation.last or (stored and len(operation.stages) == 1)):
                fail(f"while {operation} is unfinished: nobody waited for it")
            self.advance(operation)
        for barrier in cta.mbarriers.values():
            if barrier.tx:
                fail(f"with {barrier.tx} bytes still expected at {barrier}")
        if cta.tmem.sizes:
            fail(f"without tcgen05.dealloc of TMEM columns {sorted(cta.tmem.sizes)}")

    def report(self, warps):
        lines = []
        for warp in warps:
            for group in warp.groups:
                block = self.program.blocks[group.block]
                instruction = block.code[0][0] if block.code else block.end_instruction
                lanes = "" if group.mask is True else f" lanes {group.lanes().tolist()}"
                why = f" waits for {group.wait.what}" if group.wait else ""
                lines.append(f"  {warp}{lanes}: line {instruction.line}: {instruction.text[:80]}{why}")
        for operation in self.pending:
            lines.append(f"  unfinished: {operation}")
        for cta in self.ctas:
            for offset, barrier in cta.mbarriers.items():
                if barrier.tx and barrier.pending == 0:
                    lines.append(f"  CTA {cta.number} mbarrier {offset:#x}: all arrived, but {barrier.tx} bytes did "
                                 "not come: the transaction count does not match")  # fmt: skip
        return "\n".join(lines)
