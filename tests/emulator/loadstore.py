"""Instructions that access memory through the generic proxy: ld, st, atom, red, cp.async, ldmatrix, stmatrix; and
addresses.

PTX ISA: "Data Movement and Conversion Instructions", and atom and red in "Parallel Synchronization".
"""

import numpy as np

from tests.emulator import alu
from tests.emulator.barriers import find
from tests.emulator.formats import bf16_decode, bf16_encode, flush
from tests.emulator.machine import Operation
from tests.emulator.memory import OFFSET, RANK_SHIFT, Violation
from tests.emulator.parser import Register, Vector
from tests.emulator.program import PARAMETERS, SHARED_WINDOW, calculation, lanes_of, operation
from tests.emulator.races import acquire, release

SPACE = r"(?:\.(?P<space>param|global|shared(?:::cta|::cluster)?|const))?"
SCOPE = r"(?:\.weak|\.(?P<order>volatile|(?:relaxed|acquire|release)\.(?:cta|cluster|gpu|sys)))?"
CACHE = (
    r"(?:\.(?:ca|cg|cs|lu|cv|wb|wt))?(?:\.nc)?(?:\.L[12]::(?!cache_hint)\w+)*(?P<hint>\.L2::cache_hint)?(?:\.L2::\d+B)?"
)
TYPE = r"(?:\.v(?P<count>[248]))?\.(?P<type>[bsu](?:8|16|32|64)|f16|f32|f64)"


def pick(values, mask):
    return values if mask is True else values[mask]


def put(target, mask, values):
    target[slice(None) if mask is True else mask] = values


# ---- shared memory of a cluster ----
def shared_parts(warp, addresses):
    """[(cta, lanes)] of shared::cluster addresses; almost always only the CTA's own."""
    cluster = warp.cta.cluster.ctas
    ranks = addresses >> RANK_SHIFT
    first = int(ranks[0])
    one = not np.count_nonzero(ranks != first)
    if (first if one else int(ranks.max())) >= len(cluster):
        raise Violation(f"shared address {int(addresses.max()):#x} is in no CTA of the cluster")
    if one:
        parts = [(cluster[first], slice(None))]
    else:
        parts = [(cluster[r], np.flatnonzero(ranks == r)) for r in np.unique(ranks).tolist()]
    for cta, _ in parts:
        if cta is not warp.cta:
            if cta.done:
                raise Violation(f"uses shared memory of CTA {cta.number}, which has ended")
            cta.history.visit(warp)
    return parts


def load_shared(warp, addresses, width, count, ordered=False):
    parts = shared_parts(warp, addresses)
    offsets = addresses & addresses.dtype.type(OFFSET)
    for cta, lanes in parts if not ordered else ():
        cta.history.load(warp, offsets[lanes], width * count)
    if len(parts) == 1:
        return parts[0][0].shared.load(offsets, width, count)
    result = np.empty((len(addresses), count) if count > 1 else len(addresses), f"u{width}")
    for cta, lanes in parts:
        result[lanes] = cta.shared.load(offsets[lanes], width, count)
    return result


def store_shared(warp, addresses, width, values, ordered=False):
    count = 1 if values.ndim == 1 else values.shape[1]
    offsets = addresses & addresses.dtype.type(OFFSET)
    for cta, lanes in shared_parts(warp, addresses):
        mark = warp.index if cta is warp.cta else None
        cta.shared.store(offsets[lanes], width, values[lanes], mark)
        if not ordered:
            cta.history.store(warp, offsets[lanes], width * count)


def load_parameters(warp, addresses, width, count):
    size = width * count
    data = warp.cta.machine.parameters
    rows = {}
    for at in set(addresses.tolist()):
        if at + size > len(data):
            raise Violation(f"reads {size} bytes at {at} of {len(data)} bytes of parameters")
        rows[at] = np.frombuffer(data, f"u{width}", count, at)
    if len(rows) == 1:
        values = np.broadcast_to(*rows.values(), (len(addresses), count))
    else:
        values = np.array([rows[at] for at in addresses.tolist()])
    return values if count > 1 else values[:, 0]


def load(space, warp, addresses, width, count, ordered=False):
    """`ordered`: the access orders others (atomic, volatile, acquire)."""
    if ordered:
        acquire(warp, warp.cta.cluster.flags)
    if space == "global":
        return warp.cta.machine.memory.load(addresses, width, count)
    if space in ("shared", "shared::cta", "shared::cluster"):
        return load_shared(warp, addresses, width, count, ordered)
    if space == "param":
        return load_parameters(warp, addresses & addresses.dtype.type(PARAMETERS - 1), width, count)
    if space is None:
        space, addresses = generic(addresses)
        return load(space, warp, addresses, width, count, ordered)
    raise Violation(f"state space {space} is not modelled")


def generic(addresses):
    """The one state space that these generic addresses are in, and the addresses in it."""
    spaces = {("param" if a & PARAMETERS else "shared" if a & SHARED_WINDOW else "global") for a in addresses.tolist()}
    if len(spaces) > 1:
        raise Violation("generic addresses of one instruction in several state spaces are not modelled")
    space = spaces.pop()
    return space, addresses if space == "global" else addresses & np.uint64(SHARED_WINDOW - 1)


def store(space, warp, addresses, width, values, ordered=False):
    if ordered:
        release(warp, warp.cta.cluster.flags)
    if space is None:
        space, addresses = generic(addresses)
    if space == "global":
        warp.cta.machine.memory.store(addresses, width, values)
    elif space.startswith("shared"):
        store_shared(warp, addresses, width, values, ordered)
    else:
        raise Violation(f"a store to {space}")


@operation(f"ld{SCOPE}{SPACE}{CACHE}{TYPE}")
def build_load(build, match, target, source, policy=None):
    if (policy is not None) != (match["hint"] is not None):
        build.fail("a cache policy and .L2::cache_hint go together")
    space, count, kind = match["space"], int(match["count"] or 1), match["type"]
    width = np.dtype(alu.TYPES[kind]).itemsize
    index, offset = build.address(source, "u64" if space in (None, "global", "param") else None)
    targets = []
    for item in build.vector(target, count):
        wide = kind
        if isinstance(item, Register) and item.kind != kind[1:]:
            wide = ("s" if kind[0] == "s" else "u") + item.kind
        targets.append(build.target(item, wide))
    signed, ordered = kind[0] == "s", match["order"] is not None

    def run(warp, mask):
        R = warp.R
        base = R[index]
        addresses = pick(base + base.dtype.type(offset & (0xFFFFFFFF if base.itemsize == 4 else (1 << 64) - 1)), mask)
        values = load(space, warp, addresses, width, count, ordered)
        if ordered:
            read = warp.at, addresses.tobytes(), values.tobytes()
            warp.polls, warp.polled = read == warp.polled, read
        if signed:
            values = values.view(f"i{width}")
        for i, t in enumerate(targets):
            value = values if count == 1 else values[:, i]
            put(R[t], mask, value if value.itemsize != R[t].itemsize else value.view(R[t].dtype))

    return run


@operation(r"st\.(?:local|param)(?:\.v[248])?\.[bsuf](?:8|16|32|64)")
def build_store_elsewhere(build, match, target, source):
    """Stores that a call will read. Before the other stores, as the first pattern counts. ld.local is unknown."""
    return lambda warp, mask: None


@operation(f"st{SCOPE}{SPACE}{CACHE}{TYPE}")
def build_store(build, match, target, source, policy=None):
    if (policy is not None) != (match["hint"] is not None):
        build.fail("a cache policy and .L2::cache_hint go together")
    space, count, kind = match["space"], int(match["count"] or 1), match["type"]
    width = np.dtype(alu.TYPES[kind]).itemsize
    index, offset = build.address(target, "u64" if space in (None, "global") else None)
    sources = []
    for item in build.vector(source, count):
        narrow = isinstance(item, Register) and item.kind != kind[1:]
        sources.append(build.source(item, "u" + item.kind if narrow else "u" + str(8 * width)))

    ordered = match["order"] is not None

    def run(warp, mask):
        R = warp.R
        base = R[index]
        addresses = pick(base + base.dtype.type(offset & (0xFFFFFFFF if base.itemsize == 4 else (1 << 64) - 1)), mask)
        columns = [pick(R[s], mask).astype(f"u{width}", copy=False) for s in sources]
        store(space, warp, addresses, width, columns[0] if count == 1 else np.stack(columns, 1), ordered)

    return run


# ---- registers and addresses ----
@operation(r"mov\.b(16|32|64)")
def build_move(build, match, target, source):
    """mov also packs {a, b} into one register, and unpacks one into several."""
    bits = int(match[1])
    if isinstance(source, Vector):
        part = bits // len(source.items)
        sources = [build.source(item, f"u{part}") for item in source.items]
        out = build.target(target, f"u{bits}")

        def run(warp, mask):
            R = warp.R
            packed = np.empty((32, len(sources)), f"u{part // 8}")
            for i, s in enumerate(sources):
                packed[:, i] = R[s]
            np.copyto(R[out], packed.view(f"u{bits // 8}")[:, 0], where=mask)

    elif isinstance(target, Vector):
        part = bits // len(target.items)
        targets = [build.target(item, f"u{part}") for item in target.items]
        whole = build.source(source, f"u{bits}")

        def run(warp, mask):
            R = warp.R
            parts = R[whole].view(f"u{part // 8}").reshape(32, -1)
            for i, t in enumerate(targets):
                np.copyto(R[t], parts[:, i], where=mask)

    else:
        return calculation(np.positive, build.target(target, f"u{bits}"), [build.source(source, f"u{bits}")])
    return run


def copy_address(build, target, source, change):
    kind = "u" + target.kind
    if isinstance(source, Register):
        a = build.source(source, "u" + source.kind)
    else:
        a = build.source(source, kind)
    out = build.target(target, kind)

    def run(warp, mask):
        np.copyto(warp.R[out], change(warp.R[a].astype(np.uint64)).astype(warp.R[out].dtype), where=mask)

    return run


@operation(r"cvta(\.to)?\.(param|global|local|shared|shared::cta|shared::cluster)\.u(32|64)")
def build_cvta(build, match, target, source):
    """Global addresses are generic ones, and a parameter's symbol is generic already."""
    if not match[2].startswith("shared"):
        return copy_address(build, target, source, lambda a: a)
    if match[1]:
        return copy_address(build, target, source, lambda a: a & np.uint64(SHARED_WINDOW - 1))
    return copy_address(build, target, source, lambda a: a | np.uint64(SHARED_WINDOW))


@operation(r"mapa(?:\.(?P<space>shared::cluster))?\.u(32|64)")
def build_mapa(build, match, target, source, rank):
    if match["space"] is None:
        build.fail("mapa of generic addresses is not modelled")
    kind = "u" + match[2]
    a, r, out = build.source(source, kind), build.source(rank, "u32"), build.target(target, kind)

    def run(warp, mask):
        R = warp.R
        ranks = R[r]
        if int(pick(ranks, mask).max()) >= len(warp.cta.cluster.ctas):
            raise Violation(f"mapa: rank {int(pick(ranks, mask).max())} in a cluster of {len(warp.cta.cluster.ctas)}")
        mapped = (R[a] & R[a].dtype.type(OFFSET)) | (ranks.astype(R[a].dtype) << R[a].dtype.type(RANK_SHIFT))
        np.copyto(R[out], mapped, where=mask)

    return run


@operation(r"prefetch.*|applypriority.*|discard.*")
def build_prefetch(build, match, *operands):
    return lambda warp, mask: None


@operation(r"createpolicy\.fractional\.L2::\w+(?:\.L2::\w+)?\.b64")
def build_policy(build, match, target, *fraction):
    return calculation(lambda: np.zeros(32, np.uint64), build.target(target, "u64"), [])


# ---- atomics ----
def _as_f32(f):
    return lambda old, new: f(old.view(np.float32), new.view(np.float32)).view(old.dtype)


def _as_bf16x2(f):
    def run(old, new):
        parts = [bf16_decode(x.reshape(1).view(np.uint16)) for x in (old, new)]
        return bf16_encode(f(*parts)).view(np.uint32)[0]

    return run


ATOMICS = {
    **{f"add.{t}": lambda old, new: old + new for t in ("u32", "s32", "u64")},
    **{f"{n}.{t}": lambda old, new, f=f, t=t: f(old.view(alu.TYPES[t]), new.view(alu.TYPES[t])).view(old.dtype)
       for n, f in (("min", np.minimum), ("max", np.maximum)) for t in ("u32", "s32", "u64", "s64")},
    **{f"{n}.{t}": f for n, f in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor))
       for t in ("b32", "b64")},
    "add.f32": _as_f32(np.add), "add.noftz.bf16x2": _as_bf16x2(np.add),
    "exch.b32": lambda old, new: new, "exch.b64": lambda old, new: new,
    "inc.u32": lambda old, new: old.dtype.type(0) if old >= new else old + old.dtype.type(1),
}  # fmt: skip
SEMANTICS = r"(?:\.(?:relaxed|acquire|release|acq_rel))?(?:\.(?:cta|cluster|gpu|sys))?"
ATOMIC = (
    f"{SEMANTICS}{SPACE}{SEMANTICS}"  # compilers also write the semantics behind the space
    r"\.(?P<what>(?:add|min|max|and|or|xor|exch|inc|cas)(?:\.noftz)?)(?:\.v(?P<count>[248]))?\.(?P<type>\w+)"
)


def atomic(build, match, target, place, values, compare=None):
    space, count = match["space"], int(match["count"] or 1)
    name = f"{match['what']}.{match['type']}"
    f = (lambda old, new: new) if match["what"] == "cas" else ATOMICS.get(name)
    if f is None or (match["what"] == "cas") != (compare is not None):
        build.fail("unknown atomic operation")
    if name == "add.f32" and space != "shared":  # in global memory it flushes subnormals
        f = _as_f32(lambda old, new: flush(flush(old) + flush(new)))
    bits = "32" if match["type"] == "bf16x2" else match["type"][1:]
    index, offset = build.address(place, "u64" if space in (None, "global") else None)
    new_values = [build.source(v, f"u{bits}") for v in build.vector(values, count)]
    expected = None if compare is None else build.source(compare, f"u{bits}")
    olds = [] if target is None else [build.target(t, f"u{bits}") for t in build.vector(target, count)]
    width = int(bits) // 8

    def run(warp, mask):
        R = warp.R
        for lane in lanes_of(mask):  # lanes may share an address, so they run one after another
            for i, new in enumerate(new_values):
                at = R[index][lane : lane + 1].astype(np.uint64) + np.uint64(offset % (1 << 64) + i * width)
                if R[index].itemsize == 4:
                    at = at.astype(np.uint32)
                old = load(space, warp, at, width, 1, ordered=True)
                if expected is None or old[0] == R[expected][lane]:
                    result = f(old[0], R[new][lane])
                    store(space, warp, at, width, np.array([result], old.dtype), ordered=True)
                if olds:
                    R[olds[i]][lane] = old[0]
        warp.cta.machine.changed = True

    return run


@operation("atom" + ATOMIC)
def build_atom(build, match, target, place, values, *more):
    if match["what"] == "cas":
        (new,) = more
        return atomic(build, match, target, place, new, compare=values)
    return atomic(build, match, target, place, values, *more)


@operation("red(?:\\.async)?" + ATOMIC)
def build_red(build, match, place, values):
    if ".async" in match[0]:
        build.fail("red.async is not modelled")
    return atomic(build, match, None, place, values)


# ---- cp.async: copies of 4 to 16 bytes per lane ----
@operation(r"cp\.async\.(?:ca|cg)\.shared(?:::cta)?\.global(?P<hint>\.L2::cache_hint)?(?:\.L2::\d+B)?")
def build_cp_async(build, match, target, source, size, *more):
    more = list(more)
    if match["hint"] and more:
        more.pop()
    if len(more) > 1:
        build.fail("operands of cp.async")
    to, to_offset = build.address(target)
    at, at_offset = build.address(source, "u64")
    size = size.bits
    given = build.source(more[0], "u32") if more else None  # bytes to read; the rest is zero

    def run(warp, mask):
        R = warp.R
        addresses = pick(R[to].astype(np.int64) + to_offset, mask) & OFFSET
        sources = pick(R[at] + np.uint64(at_offset % (1 << 64)), mask)
        sizes = np.full(len(addresses), size) if given is None else pick(R[given], mask).astype(np.int64)
        if (sizes > size).any():
            raise Violation(f"cp.async reads {int(sizes.max())} bytes into {size}")
        shared, memory, index = warp.cta.shared, warp.cta.machine.memory, warp.index
        data = np.zeros((len(addresses), size), np.uint8)

        def copy():
            for row, (source, count) in enumerate(zip(sources.tolist(), sizes.tolist(), strict=True)):
                if count:
                    data[row, :count] = memory.read(source, count)
            width = min(size, 8)
            values = data.view(f"u{width}")
            shared.store_unclaimed(addresses, width, values if size > width else values[:, 0], index)

        warp.cta.history.store(warp, addresses, size)  # before the operation, which orders this access too
        one = Operation(warp, [copy], order=("cp.async", warp))
        if not warp.copy_groups:
            warp.copy_groups.append([])
        warp.copy_groups[-1].append(one)
        if not warp.cta.machine.eager:
            granules = np.unique(np.concatenate([shared.granules(a, size) for a in addresses.tolist()]))
            # Lanes may fill one granule in several instructions: this is no conflict.
            shared.claims.append((one, granules, True))
            shared.writers[granules] += 1
        warp.cta.machine.issue(one)

    return run


@operation(r"cp\.async\.commit_group")
def build_cp_async_commit(build, match):
    def run(warp, mask):
        warp.copy_groups = warp.copy_groups or [[]]
        warp.copy_groups.append([])

    return run


@operation(r"cp\.async\.wait_(group|all)")
def build_cp_async_wait(build, match, count=None):
    left = 0 if count is None else count.bits

    def run(warp, mask):
        groups = warp.copy_groups or [[]]
        closed = groups if match[1] == "all" else groups[:-1]
        done = closed if left == 0 else closed[:-left]
        for group in done:
            warp.cta.machine.finish(warp, group)
        warp.copy_groups = groups[len(done) :] or [[]]

    return run


@operation(r"cp\.async\.mbarrier\.arrive(?P<noinc>\.noinc)?\.shared(?:::cta)?\.b64")
def build_cp_async_arrive(build, match, place):
    index, offset = build.address(place)

    def run(warp, mask):
        for lane in lanes_of(mask):
            barrier = find(warp, int(warp.R[index][lane]) + offset)
            if not match["noinc"]:
                barrier.pending += 1

            def arrive(barrier=barrier):
                warp.cta.shared.release(warp.index)
                barrier.arrive(1)

            warp.cta.machine.issue(Operation(warp, [arrive], signals=(barrier,), order=("cp.async", warp)))

    return run


# ---- matrices of 8 x 8 16-bit elements ----
MATRIX = r"\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared(?:::cta)?\.b16"


def _matrix_addresses(warp, index, offset, count):
    """Lanes 8i to 8i + 7 hold the row addresses of matrix i."""
    return warp.R[index][: 8 * count] + np.uint32(offset & 0xFFFFFFFF)


@operation("ldmatrix" + MATRIX)
def build_ldmatrix(build, match, targets, source):
    count = int(match["count"])
    outs = [build.target(t, "u32") for t in build.vector(targets, count)]
    index, offset = build.address(source)

    def run(warp, mask):
        if not warp.full(mask):
            raise Violation("ldmatrix needs the whole warp")
        rows = load_shared(warp, _matrix_addresses(warp, index, offset, count), 8, 2)
        for i, out in enumerate(outs):
            matrix = np.ascontiguousarray(rows[8 * i : 8 * i + 8]).view(np.uint16)
            matrix = np.ascontiguousarray(matrix.T) if match["trans"] else matrix
            warp.R[out][:] = matrix.view(np.uint32).ravel()  # lane 4r + c holds row r, columns 2c and 2c + 1

    return run


@operation("stmatrix" + MATRIX)
def build_stmatrix(build, match, target, sources):
    count = int(match["count"])
    ins = [build.source(s, "u32") for s in build.vector(sources, count)]
    index, offset = build.address(target)

    def run(warp, mask):
        if not warp.full(mask):
            raise Violation("stmatrix needs the whole warp")
        rows = []
        for source in ins:
            matrix = np.ascontiguousarray(warp.R[source]).view(np.uint16).reshape(8, 8)
            rows.append(np.ascontiguousarray(matrix.T if match["trans"] else matrix).view(np.uint64))
        addresses = _matrix_addresses(warp, index, offset, count)
        store_shared(warp, addresses, 8, np.concatenate(rows))

    return run
