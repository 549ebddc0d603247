"""mbarriers, named barriers, cluster barriers and fences.

PTX ISA: "Parallel Synchronization and Communication Instructions".
"""

import numpy as np

from tests.emulator.machine import Lanes, Wait
from tests.emulator.memory import BARRIER, OFFSET, RANK_SHIFT, UNWRITTEN, Violation
from tests.emulator.program import first_lane, lanes_of, operation
from tests.emulator.races import (
    Known,
    acquire,
    fence_all,
    fence_before,
    gather,
    of_one_lane,
    release,
    tick,
    weakly_released,
)

MOST = (1 << 20) - 1


class Mbarrier:
    """Phase, pending arrivals, and bytes still to come. A phase ends when both counts are zero."""

    def __init__(self, warp, offset, count, line):
        cta = warp.cta
        if not 1 <= count <= MOST:
            raise Violation(f"mbarrier.init with count {count}")
        self.machine, self.cta, self.offset, self.line = cta.machine, cta, offset, line
        self.made = warp.slot, int(warp.known[warp.slot])  # by which warp, and when
        self.count = self.pending = count
        self.phase = self.tx = 0
        self.learned = Known(len(cta.history.names))  # in this phase
        self.past = [self.learned, self.learned]  # in the last phase of each parity
        self.visible = False  # to other CTAs and to the async proxy

    def __str__(self):
        return (f"mbarrier {self.offset:#x} of CTA {self.cta.number} (initialised in line {self.line}): "
                f"phase {self.phase}, {self.pending} of {self.count} arrivals and {self.tx} bytes missing")  # fmt: skip

    def expect(self, size):
        self.tx += size
        if abs(self.tx) > MOST:
            raise Violation(f"transaction count of {self}")

    def arrive(self, count, expect=0, clocks=None, far=False):
        """clocks: what waiters learn of the arriving warp's history; None: all. far: the warp is of another CTA."""
        if expect:
            self.expect(expect)
        if count > self.pending:
            raise Violation(f"arrives {count} times at {self}: more often than its count")
        self.pending -= count
        self.settle(clocks, far)

    def complete(self, size):
        self.tx -= size
        if abs(self.tx) > MOST:
            raise Violation(f"transaction count of {self}")
        self.settle()

    def settle(self, clocks=None, far=False):
        clocks = self.machine.clocks if clocks is None else clocks
        self.learned.learn(clocks, self.machine.memory.waited, self.machine.clock, far)
        if self.pending == 0 and self.tx == 0:
            self.past[self.phase & 1], self.learned = self.learned, Known(self.learned.clocks.shape[1])
            self.phase += 1
            self.pending = self.count
            self.machine.changed = True


def find(warp, address, own=False, asynchronous=False):
    """The mbarrier at a shared::cluster address. It must be the CTA's own, unless it is signalled asynchronously."""
    rank, offset = address >> RANK_SHIFT, address & OFFSET
    cluster = warp.cta.cluster.ctas
    if rank >= len(cluster):
        raise Violation(f"shared address {address:#x} is in no CTA of the cluster")
    if own and cluster[rank] is not warp.cta:
        raise Violation(f"waits at an mbarrier of another CTA ({address:#x})")
    if offset not in cluster[rank].mbarriers:
        raise Violation(f"no mbarrier was initialised at {offset:#x} of CTA {cluster[rank].number}")
    barrier = cluster[rank].mbarriers[offset]
    remote = cluster[rank] is not warp.cta
    if remote:
        if cluster[rank].done:
            raise Violation(f"signals an mbarrier of CTA {cluster[rank].number}, which has ended")
        cluster[rank].history.visit(warp)
    slot, when = barrier.made
    if when > warp.known[slot]:
        raise Violation(f"nothing orders the initialisation of {barrier} before this")
    if not barrier.visible and (asynchronous or remote):
        raise Violation(f"no fence.mbarrier_init (or fence.proxy.async) since the initialisation of {barrier}")
    return barrier


STATE_SPACE = r"(?:\.shared(?:::cta|::cluster)?)"
ORDER = r"(?:\.(?P<order>release|acquire|relaxed))?(?:\.(?P<scope>cta|cluster))?"


def narrow(warp, match):
    """Whether an arrival or a wait orders nothing between CTAs. PTX ISA: the default scope is .cta."""
    return match["scope"] == "cta" or match["scope"] is None and not warp.cta.machine.lenient


@operation(rf"mbarrier\.init{STATE_SPACE}\.b64")
def build_init(build, match, place, count):
    index, offset = build.address(place)
    number, line = build.source(count, "u32"), build.instruction.line

    def run(warp, mask):
        cta = warp.cta
        for at in sorted({(int(warp.R[index][i]) + offset) & OFFSET for i in lanes_of(mask)}):
            if at & 7:
                raise Violation(f"mbarrier at {at:#x} is not aligned to 8 bytes")
            span = cta.shared.span(at, 8)
            old = cta.mbarriers.get(at)
            if old is not None and old.pending != old.count:
                raise Violation(f"initialises again, while in use, {old}")
            cta.shared.state[span] = BARRIER
            count = int(warp.R[number][first_lane(mask)])
            cta.mbarriers[at] = Mbarrier(warp, at, count, line)
            warp.unfenced_barriers.append(cta.mbarriers[at])

    return run


@operation(rf"mbarrier\.inval{STATE_SPACE}\.b64")
def build_inval(build, match, place):
    index, offset = build.address(place)

    def run(warp, mask):
        for lane in lanes_of(mask):
            barrier = find(warp, int(warp.R[index][lane]) + offset, own=True)
            del warp.cta.mbarriers[barrier.offset]
            warp.cta.shared.state[warp.cta.shared.span(barrier.offset, 8)] = UNWRITTEN

    return run


@operation(rf"mbarrier\.(?P<what>arrive|arrive\.expect_tx|expect_tx|complete_tx){ORDER}{STATE_SPACE}\.b64")
def build_arrive(build, match, *operands):
    operands = list(operands)
    what, relaxed = match["what"], match["order"] == "relaxed"
    state = None
    if what.startswith("arrive"):
        state = build.target(operands.pop(0), "u64")
    if not 1 <= len(operands) <= 2 or (what != "arrive" and len(operands) != 2):
        build.fail("operands of mbarrier.arrive")
    index, offset = build.address(operands[0])
    value = build.source(operands[1], "u32") if len(operands) == 2 else None

    def run(warp, mask):
        R = warp.R
        if what.startswith("arrive"):
            warp.cta.shared.release(warp.index)
            if warp.cta.machine.lenient:
                fence_before(warp)
        one_lane = not warp.full(mask) and len(lanes_of(mask)) == 1
        for lane in lanes_of(mask):
            barrier = find(warp, int(R[index][lane]) + offset)
            number = 1 if value is None else int(R[value][lane])
            far = barrier.cta is not warp.cta
            may_order = not (far and narrow(warp, match))
            clocks = warp.clocks if may_order and not relaxed else weakly_released(warp, far, may_order)
            if one_lane:
                clocks = of_one_lane(warp, clocks)
            if state is not None:
                R[state][lane] = barrier.phase
            if what == "arrive":
                barrier.arrive(number, clocks=clocks, far=far)
            elif what == "arrive.expect_tx":
                barrier.arrive(1, number, clocks, far)
            elif what == "expect_tx":
                barrier.expect(number)
                if not barrier.pending:  # the bytes came first
                    barrier.settle()
            else:
                barrier.complete(number)
        tick(warp)

    return run


@operation(rf"mbarrier\.(?P<what>try_wait|test_wait)(?P<parity>\.parity)?{ORDER}{STATE_SPACE}\.b64", waits=True)
def build_try_wait(build, match, target, place, phase, limit=None):
    out, (index, offset) = build.target(target, "pred"), build.address(place)
    expected = build.source(phase, "u32" if match["parity"] else "u64")
    may_wait, relaxed = match["what"] == "try_wait", match["order"] == "relaxed"

    def run(warp, mask):
        R = warp.R
        first = first_lane(mask)
        at = int(R[index][first]) + offset
        wanted = int(R[expected][first])
        if mask is True or mask.sum() > 1:
            lanes = slice(None) if mask is True else mask
            if (R[index][lanes] != R[index][first]).any() or (R[expected][lanes] != R[expected][first]).any():
                raise Violation("the lanes of a warp wait for different mbarriers, which is not modelled")
        barrier = find(warp, at, own=True)
        done = (barrier.phase & 1) != wanted if match["parity"] else barrier.phase > wanted
        if match["parity"] and wanted > 1:
            raise Violation(f"phase parity {wanted}")
        if not done and may_wait and not (warp.wait is not None and warp.wait.expired):
            # A try that fails is repeated, so it may as well return when the answer changes.
            if match["parity"]:
                ready = lambda: (barrier.phase & 1) != wanted
            else:
                ready = lambda: barrier.phase > wanted
            which = f"parity {wanted}" if match["parity"] else f"phase {wanted}"
            return Wait(f"{which} of {barrier}", ready, barrier, may_expire=True)
        if done:
            past = barrier.past[wanted & 1]
            warp.cta.machine.timeline.wait(warp, past.time, f"parity {wanted & 1} of mbarrier {barrier.offset:#x}")
            acquire(warp, past, relaxed, narrow(warp, match))
        np.copyto(R[out], done, where=mask)

    return run


# ---- named barriers ----
class Named:
    """One use of a named barrier, until all have arrived."""

    def __init__(self, warps, expected):
        self.arrived, self.expected, self.complete, self.learned = 0, expected, False, Known(warps)


@operation(r"(?:bar|barrier)(?:\.cta)?\.(?P<what>sync|arrive)(?P<aligned>\.aligned)?", waits=True)
def build_bar(build, match, number, threads=None):
    which = build.source(number, "u32")
    count = None if threads is None else build.source(threads, "u32")
    what = match["what"]
    if what == "arrive" and count is None:
        build.fail("bar.arrive needs a thread count")

    def run(warp, mask):
        if warp.wait is not None and not isinstance(warp.wait, Lanes):
            gather(warp)
            warp.cta.machine.timeline.wait(warp, warp.wait.barrier.learned.time, warp.wait.what.partition(":")[0])
            acquire(warp, warp.wait.barrier.learned)
            return None  # it has waited, and the wait is over
        if not warp.full(mask):
            return Lanes()
        R = warp.R
        lane, cta = first_lane(mask), warp.cta
        at = int(R[which][lane])
        if at > 15:
            raise Violation(f"barrier {at}: there are 16")
        everyone = 32 * len(cta.warps)
        expected = everyone if count is None else int(R[count][lane])
        if expected % 32 or not 0 < expected <= everyone:
            raise Violation(f"barrier {at} for {expected} threads in a CTA of {everyone}")
        barrier = cta.named.setdefault(at, Named(len(warp.known), expected))
        if barrier.expected != expected:
            raise Violation(f"barrier {at} for {expected} threads, while others wait there for {barrier.expected}")
        barrier.arrived += 32
        release(warp, barrier.learned)
        cta.shared.release(warp.index)
        if barrier.arrived > expected:
            raise Violation(f"more than {expected} threads arrive at barrier {at}")
        if barrier.arrived == expected:
            del cta.named[at]
            barrier.complete = cta.machine.changed = True
            if what == "sync":
                gather(warp)
                cta.machine.timeline.wait(warp, barrier.learned.time, f"barrier {at}")
                acquire(warp, barrier.learned)
            return None
        if what == "arrive":
            return None
        return Wait(f"barrier {at}: {barrier.arrived} of {expected} threads", lambda: barrier.complete, barrier)

    return run


# ---- clusters ----
@operation(r"barrier\.cluster\.arrive(?:\.(?P<order>release|relaxed))?(?:\.aligned)?", waits=True)
def build_cluster_arrive(build, match):
    relaxed = match["order"] == "relaxed"

    def run(warp, mask):
        if not warp.full(mask):
            return Lanes()
        cluster = warp.cta.cluster
        if warp in cluster.arrived:
            raise Violation("arrives twice at the cluster barrier")
        warp.cluster_phase = cluster.phase
        warp.cta.shared.release(warp.index)
        cluster.arrived.add(warp)
        release(warp, cluster.learned, relaxed)
        if all(w in cluster.arrived or w.done for cta in cluster.ctas for w in cta.warps):
            cluster.arrived.clear()
            cluster.past, cluster.learned = cluster.learned, Known(len(warp.known))
            cluster.phase += 1
            warp.cta.machine.changed = True
        return None

    return run


@operation(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?", waits=True)
def build_cluster_wait(build, match):
    def run(warp, mask):
        if not warp.full(mask):
            return Lanes()
        cluster, phase = warp.cta.cluster, getattr(warp, "cluster_phase", None)
        if phase is None:
            raise Violation("waits at the cluster barrier without having arrived")
        if cluster.phase == phase:
            return Wait("the cluster barrier", lambda: cluster.phase != phase)
        gather(warp)
        warp.cta.machine.timeline.wait(warp, cluster.past.time, "the cluster barrier")
        acquire(warp, cluster.past)
        return None

    return run


# ---- fences and hints ----
@operation(r"fence\.proxy\.async(?:\.(?:shared::(?:cta|cluster)|global))?|fence\.proxy\.async::generic\.\S+")
def build_proxy_fence(build, match):
    if match[0].endswith(".global"):
        return lambda warp, mask: None

    def run(warp, mask):
        warp.cta.shared.fence(warp.index)
        show_barriers(warp, mask)

    return run


def show_barriers(warp, mask):
    for barrier in warp.unfenced_barriers:
        barrier.visible = True
    warp.unfenced_barriers.clear()


@operation(r"fence\.mbarrier_init\.release\.cluster")
def build_barrier_fence(build, match):
    """Orders the initialisations before a relaxed arrival at the cluster barrier, too."""

    def run(warp, mask):
        show_barriers(warp, mask)
        fence_all(warp)

    return run


@operation(r"(?:fence(?:\.(?:sc|acq_rel|acquire|release))?|membar)\.(?P<scope>cta|cluster|gpu|gl|sys)")
def build_fence(build, match):
    far = match["scope"] != "cta"

    def run(warp, mask):
        acquire(warp, warp.cta.cluster.flags)
        np.maximum(warp.known, warp.unacquired_far if far else warp.unacquired, out=warp.known)
        fence_all(warp, far)
        release(warp, warp.cta.cluster.flags)

    return run


@operation(
    r"nanosleep\.u32|setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32"
    r"|fence\.proxy\.(?:alias|tensormap::generic\.release)\S*"
)
def build_nothing(build, match, *operands):
    """Does nothing: time does not pass here, and registers are never short."""
    if match[0].startswith("setmaxnreg"):
        count = operands[0].bits
        if not 24 <= count <= 256 or count % 8:
            build.fail("setmaxnreg: from 24 to 256 in steps of 8")
    return lambda warp, mask: None


@operation(r"griddepcontrol\.launch_dependents")
def build_dependents_launch(build, match):
    """Kernels run one at a time: `Stream` makes the next one wait for what it may not see yet."""

    def run(warp, mask):
        warp.cta.machine.early_trigger |= not warp.waited

    return run


@operation(r"griddepcontrol\.wait")
def build_dependency_wait(build, match):
    def run(warp, mask):
        warp.waited = warp.cta.machine.memory.waited = True

    return run


@operation(r"call(?:\.uni)?")
def build_call(build, match, *operands):
    """Kernels call nothing here but vprintf and __assertfail, to say why they stop."""
    function = operands[-2]

    def run(warp, mask):
        raise Violation(f"the kernel calls {function.name}")

    if getattr(function, "name", None) not in ("vprintf", "__assertfail"):
        build.fail("only vprintf and __assertfail may be called")
    return run


@operation(r"trap|brkpt")
def build_trap(build, match):
    def run(warp, mask):
        raise Violation("the kernel traps")

    return run
