"""Turn a parsed kernel into Python functions, one per instruction, grouped into blocks.

A function is called with (warp, mask): mask is True when all 32 lanes run, else a bool array. `warp.R` lists typed
views of registers, constants and special registers; operands are indices into it, resolved here once. An instruction
that may have to wait returns a Wait and is called again when that is over; it stands in a block of its own.
"""

import functools
import re

import numpy as np

from tests.emulator import alu
from tests.emulator.formats import bf16_decode, flush
from tests.emulator.machine import ALL, DTYPES, NONE, POISON, Group
from tests.emulator.memory import RANK_SHIFT
from tests.emulator.parser import Address, Immediate, Instruction, Not, Pair, PtxError, Register, Symbol, Vector

PARAMETERS = 1 << 61  # where .param lies in the generic address space
SHARED_WINDOW = 1 << 60
ELSEWHERE = 1 << 59  # addresses of what is not modelled; they are in no buffer
SETP = r"setp\.(?P<compare>[a-z]+)(?:\.(?P<combine>and|or|xor))?(?P<ftz>\.ftz)?\.(?P<type>\w+)"
OPERATIONS = []  # (pattern, builder, waits)


def operation(pattern, waits=False):
    """Register the builder of an opcode. builder(build, match, *operands) -> function(warp, mask)."""

    def register(builder):
        OPERATIONS.append((re.compile(pattern), builder, waits))
        return builder

    return register


@functools.cache
def find_operation(opcode):
    """(match, builder, waits) of the first pattern that matches."""
    matches = ((pattern.fullmatch(opcode), *rest) for pattern, *rest in OPERATIONS)
    return next((found for found in matches if found[0]), (None, None, False))


class Block:
    def __init__(self):
        self.code, self.end, self.end_instruction, self.waits = [], None, None, False


def _special():
    dims = "xyz"
    table = {}
    for i, d in enumerate(dims):
        table[f"%ntid.{d}"] = lambda w, i=i: w.cta.machine.block[i]
        table[f"%ctaid.{d}"] = lambda w, i=i: w.cta.index[i]
        table[f"%nctaid.{d}"] = lambda w, i=i: w.cta.machine.grid[i]
        table[f"%cluster_nctaid.{d}"] = lambda w, i=i: w.cta.machine.cluster_shape[i]
        table[f"%cluster_ctaid.{d}"] = lambda w, i=i: w.cta.index[i] % w.cta.machine.cluster_shape[i]
        table[f"%clusterid.{d}"] = lambda w, i=i: w.cta.index[i] // w.cta.machine.cluster_shape[i]
        table[f"%nclusterid.{d}"] = lambda w, i=i: w.cta.machine.grid[i] // w.cta.machine.cluster_shape[i]
    thread = lambda w: 32 * w.index + np.arange(32)
    table["%tid.x"] = lambda w: thread(w) % w.cta.machine.block[0]
    table["%tid.y"] = lambda w: thread(w) // w.cta.machine.block[0] % w.cta.machine.block[1]
    table["%tid.z"] = lambda w: thread(w) // (w.cta.machine.block[0] * w.cta.machine.block[1])
    table["%laneid"] = lambda w: np.arange(32)
    table["%warpid"] = lambda w: w.index
    table["%nwarpid"] = lambda w: len(w.cta.warps)
    table["%smid"] = lambda w: w.cta.number
    table["%cluster_ctarank"] = lambda w: w.cta.rank
    table["%cluster_nctarank"] = lambda w: int(np.prod(w.cta.machine.cluster_shape))
    table["%dynamic_smem_size"] = lambda w: w.cta.machine.dynamic_shared
    bit = np.uint64(1) << np.arange(32, dtype=np.uint64)
    table["%lanemask_eq"] = lambda w: bit
    table["%lanemask_lt"] = lambda w: bit - np.uint64(1)
    table["%lanemask_le"] = lambda w: 2 * bit - np.uint64(1)
    table["%lanemask_gt"] = lambda w: (1 << 32) - 2 * bit
    table["%lanemask_ge"] = lambda w: (1 << 32) - bit
    return table


SPECIAL = _special()


class Program:
    """The executable form of one kernel. It does not depend on a launch and can be run many times."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.slots, self.slot_of, self.constants = [], {}, None
        self.rows, self.counts = [], dict.fromkeys(DTYPES, 0)
        for kind in kernel.registers:
            if kind not in DTYPES:
                raise PtxError(f"{kernel.name}: .b{kind} registers are not modelled")
            self.rows.append(self.counts[kind])
            self.counts[kind] += 1
        self.parameters, at = {}, 0
        for parameter in kernel.parameters:
            at = -(-at // parameter.align) * parameter.align
            self.parameters[parameter.name] = at
            at += parameter.size
        self.parameter_bytes = at
        self.instruction = self.cta_group = None
        self.blocks = self.make_blocks()

    # ---- operands ----
    def fail(self, why):
        raise PtxError(f"line {self.instruction.line}: {self.instruction.text[:160]}\n  {why}")

    def slot(self, *spec):
        if spec not in self.slot_of:
            self.slot_of[spec] = len(self.slots)
            self.slots.append(spec)
        return self.slot_of[spec]

    def source(self, operand, kind):
        """The index into R of a value of PTX type `kind` (u32, f32, pred, ...)."""
        dtype = np.dtype(alu.TYPES[kind])
        if isinstance(operand, Register):
            have = np.dtype(DTYPES[operand.kind]).itemsize
            if (operand.kind == "pred") != (kind == "pred") or have < dtype.itemsize:
                self.fail(f"a .{operand.kind} register where .{kind} is needed")
            return self.slot("register", operand.kind, self.rows[operand.index], dtype.str)
        if isinstance(operand, Immediate):
            return self.slot("constant", self.constant(operand, dtype), dtype.str)
        if isinstance(operand, Symbol):
            return self.slot("symbol", operand.name, dtype.str)
        return self.fail(f"operand {operand} where a value is needed")

    def constant(self, immediate, dtype):
        if dtype.kind == "b":
            return int(immediate.bits != 0)
        if immediate.float_kind:
            wide = np.array([immediate.bits], f"u{4 if immediate.float_kind == 'f32' else 8}")
            if dtype.itemsize != wide.dtype.itemsize:
                if dtype.kind != "f":
                    self.fail("a float constant of another size")
                wide = wide.view(f"f{wide.dtype.itemsize}").astype(dtype)
            return int(wide.view(f"u{dtype.itemsize}")[0])
        return immediate.bits & ((1 << (8 * dtype.itemsize)) - 1)

    def target(self, operand, kind):
        """The index into R of a register to write; a sink is a register that nobody reads."""
        if isinstance(operand, Symbol) and operand.name == "_":
            return self.slot("sink", np.dtype(alu.TYPES[kind]).str)
        if not isinstance(operand, Register):
            self.fail(f"{operand} is no register")
        return self.source(operand, kind)

    def register_rows(self, operands):
        """The rows of these 32-bit registers in `warp.words`."""
        for operand in operands:
            if not isinstance(operand, Register) or operand.kind != "32":
                self.fail(f"{operand} where a 32-bit register is needed")
        return np.array([self.rows[operand.index] for operand in operands])

    def predicate(self, operand):
        """(index, negated)"""
        if isinstance(operand, Not):
            return self.source(operand.register, "pred"), True
        return self.source(operand, "pred"), False

    def address(self, operand, kind=None):
        """(index, offset): u32 or u64 by the register's size, unless `kind` says otherwise."""
        if not isinstance(operand, Address):
            self.fail(f"{operand} where [an address] is needed")
        if operand.coordinates:
            self.fail("coordinates in an ordinary address")
        base = operand.base
        if kind is None:
            kind = "u64" if isinstance(base, Register) and base.kind == "64" else "u32"
        elif isinstance(base, Register) and base.kind != kind[1:]:
            kind = "u" + base.kind
        return self.source(base, kind), operand.offset

    def vector(self, operand, count):
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if len(items) != count:
            self.fail(f"{len(items)} registers where {count} are needed")
        return items

    # ---- blocks ----
    def make_blocks(self):
        kernel = self.kernel
        starts = set(kernel.labels.values())
        place, blocks, branches = {}, [Block()], []
        for at, instruction in enumerate(kernel.code):
            self.instruction = instruction
            if at in starts and (blocks[-1].code or blocks[-1].end_instruction):
                blocks.append(Block())
            if at in starts:
                place[at] = len(blocks) - 1
            if instruction.opcode in ("bra", "bra.uni", "ret", "exit", "brx.idx", "brx.idx.uni"):
                if blocks[-1].waits:
                    blocks.append(Block())
                blocks[-1].end_instruction = instruction
                branches.append(blocks[-1])
                blocks.append(Block())
                continue
            function, waits = self.build(instruction)
            if waits and blocks[-1].code:
                blocks.append(Block())
            blocks[-1].code.append((instruction, function))
            if waits:
                blocks[-1].waits = True
                blocks.append(Block())
        place[len(kernel.code)] = len(blocks) - 1
        blocks.append(Block())  # the end of the text, for labels there and for kernels without ret
        ending = blocks[-1]
        last = kernel.code[-1].line if kernel.code else 0
        ending.end_instruction = Instruction(last, "(end of the kernel)", "ret", ())
        branches.append(ending)
        self.places = {name: place[at] for name, at in kernel.labels.items()}
        for block in branches:
            self.instruction = block.end_instruction
            block.end = self.build_branch(block.end_instruction)
        return blocks

    def build(self, instruction):
        match, builder, waits = find_operation(instruction.opcode)
        if builder is None:
            function = self.build_arithmetic(instruction)
        else:
            try:
                function = builder(self, match, *instruction.operands)
            except TypeError as error:
                if "positional argument" not in str(error):
                    raise
                self.fail(f"{len(instruction.operands)} operands are not known for this instruction")
            self.check_cta_group(match)
        if instruction.guard is not None:
            function = self.guarded(function, instruction.guard)
        return function, waits

    def check_cta_group(self, match):
        """PTX ISA, tcgen05: "All tcgen05 instructions in a kernel must specify the same value for .cta_group"."""
        group = match.groupdict().get("group")
        if group is not None and self.cta_group not in (None, group):
            self.fail(f"cta_group::{group} in a kernel that has cta_group::{self.cta_group} too")
        self.cta_group = group or self.cta_group

    def build_arithmetic(self, instruction):
        opcode, operands = instruction.opcode, instruction.operands
        if opcode.startswith("setp."):
            return self.build_comparison(re.fullmatch(SETP, opcode), *operands)
        entry = alu.TABLE.get(f"{opcode}:{len(operands) - 1}") or alu.TABLE.get(opcode)
        if entry is None:
            self.fail("unknown instruction")
        result, kinds, f = entry
        if len(operands) != len(kinds) + 1:
            self.fail(f"{len(operands)} operands, {len(kinds) + 1} are known")
        if opcode.startswith("cvt."):
            return self.build_conversion(result, kinds, f, operands)
        sources = [self.source(o, k) for o, k in zip(operands[1:], kinds, strict=True)]
        return calculation(f, self.target(operands[0], result), sources)

    def build_conversion(self, result, kinds, f, operands):
        """Registers may be wider than cvt's types: sources are truncated, results sign-extended."""
        target = operands[0]
        if isinstance(target, Register) and target.kind != result[1:] and result[0] in "us":
            wide = result[0] + target.kind
            f, result = (lambda *inputs, inner=f, T=alu.TYPES[wide]: inner(*inputs).astype(T)), wide
        sources = []
        for operand, kind in zip(operands[1:], kinds, strict=True):
            if isinstance(operand, Register) and operand.kind != kind[1:]:
                f = lambda a, inner=f, T=alu.TYPES[kind]: inner(a.astype(f"u{np.dtype(T).itemsize}").view(T))
                kind = "u" + operand.kind
            sources.append(self.source(operand, kind))
        return calculation(f, self.target(target, result), sources)

    def build_comparison(self, match, target=None, a=None, b=None, more=None):
        kind = match and match["type"]
        compare = match and alu.comparison(match["compare"], "f32" if kind == "bf16" else kind)
        if compare is None or b is None or (more is None) != (match["combine"] is None):
            self.fail("unknown comparison")
        if match["ftz"]:
            plain, compare = compare, (lambda x, y: plain(flush(x), flush(y)))
        if kind == "bf16":
            exact, kind = compare, "b16"
            compare = lambda x, y: exact(bf16_decode(x), bf16_decode(y))
        x, y = self.source(a, kind), self.source(b, kind)
        if more is None and not isinstance(target, Pair):
            return calculation(compare, self.target(target, "pred"), [x, y])
        combine = alu.BOOLEAN[match["combine"]] if match["combine"] else lambda result, _: result
        third, negated = self.predicate(more) if more is not None else (None, False)
        outs = [
            self.target(t, "pred") for t in ((target.first, target.second) if isinstance(target, Pair) else (target,))
        ]

        def run(warp, mask):
            R = warp.R
            result = compare(R[x], R[y])
            extra = None if third is None else R[third] ^ negated
            for out, value in zip(outs, (result, ~result), strict=False):
                np.copyto(R[out], combine(value, extra), where=mask)

        return run

    def guarded(self, function, guard):
        index, negated = self.predicate(guard)

        def run(warp, mask):
            condition = ~warp.R[index] if negated else warp.R[index].copy()
            if mask is not True:
                condition &= mask
            which = condition.tobytes()
            if which == NONE:
                return None
            return function(warp, True if which == ALL else condition)

        return run

    def build_branch(self, instruction):
        opcode, guard = instruction.opcode, instruction.guard
        if opcode in ("ret", "exit"):
            return leave(self.predicate(guard) if guard is not None else None)
        if opcode.startswith("brx"):
            if guard is not None or len(instruction.operands) != 2:
                self.fail("this form of brx.idx is not modelled")
            index = self.source(instruction.operands[0], "u32")
            table = self.kernel.tables[instruction.operands[1].name]
            return branch_indexed(index, [self.places[name] for name in table])
        (label,) = instruction.operands
        if not isinstance(label, Symbol) or label.name not in self.places:
            self.fail(f"no label {label}")
        return branch(self.places[label.name], self.predicate(guard) if guard is not None else None)

    # ---- a warp's registers ----
    def registers(self, warp):
        arrays = {k: np.full((max(1, n), 32), POISON[k], DTYPES[k]) for k, n in self.counts.items()}
        warp.words = arrays["32"]
        if self.constants is None:
            self.constants = [self.constant_lanes(*spec[1:]) if spec[0] == "constant" else None for spec in self.slots]
        found, views = self.constants.copy(), {}
        for slot, spec in enumerate(self.slots):
            if spec[0] == "register":
                _, kind, row, dtype = spec
                view = views.get((kind, dtype))
                if view is None:  # of a wider register, the low part
                    width = arrays[kind].itemsize // np.dtype(dtype).itemsize
                    view = views[kind, dtype] = arrays[kind].view(dtype)[:, ::width]
                found[slot] = view[row]
            elif spec[0] != "constant":
                found[slot] = self.materialize(spec, warp)
        return found

    @staticmethod
    def constant_lanes(bits, dtype):
        return np.full(32, bits, f"u{np.dtype(dtype).itemsize}").view(dtype)

    def materialize(self, spec, warp):
        what, *rest = spec
        if what == "sink":
            return np.zeros(32, rest[0])
        name, dtype = rest
        value = self.symbol(name, warp)
        return np.broadcast_to(np.asarray(value).astype(np.uint64), 32).astype(dtype)

    def symbol(self, name, warp):
        if name in SPECIAL:
            return SPECIAL[name](warp)
        if name in self.parameters:
            return PARAMETERS + self.parameters[name]
        if name in warp.cta.machine.shared_symbols:
            return warp.cta.machine.shared_symbols[name] | warp.cta.rank << RANK_SHIFT
        if any(name == variable.name for variable in self.kernel.elsewhere):
            return ELSEWHERE
        raise PtxError(f"{self.kernel.name}: unknown name {name}")


def calculation(f, target, sources):
    """A function over whole registers; lanes outside of the mask keep their values."""
    if isinstance(f, np.ufunc) and len(sources) == 2:
        a, b = sources

        def run(warp, mask):
            R = warp.R
            if mask is True:
                f(R[a], R[b], out=R[target])
            else:
                np.copyto(R[target], f(R[a], R[b]), where=mask)

    else:

        def run(warp, mask):
            R = warp.R
            value = f(*[R[s] for s in sources])
            if mask is True:
                R[target][:] = value
            else:
                np.copyto(R[target], value, where=mask)

    return run


def leave(predicate):
    def end(warp, group):
        gone = True if group.mask is True else group.mask
        if predicate is not None:
            condition = ~warp.R[predicate[0]] if predicate[1] else warp.R[predicate[0]]
            gone = condition & group.mask
        if gone is True or gone.tobytes() == (group.mask if group.mask is not True else np.ones(32, bool)).tobytes():
            warp.alive &= ~np.asarray(group.mask)
            warp.groups.remove(group)
            warp.cta.machine.changed = True
            warp.cta.machine.ends[warp.cta.number, warp.index] = warp.clock
            if warp.cta.done:
                warp.cta.history.check_exit(warp.cta)
            return True
        warp.alive &= ~gone
        group.mask = group.mask & ~gone
        group.block += 1
        return True

    return end


def branch(target, predicate):
    if predicate is None:

        def end(warp, group):
            group.block = target
            return False

        return end
    index, negated = predicate

    def end(warp, group):
        condition = ~warp.R[index] if negated else warp.R[index]
        mask = group.mask
        if mask is not True:
            condition = condition & mask
        which = condition.tobytes()
        if which == NONE:
            group.block += 1
            return False
        if which == ALL or (mask is not True and which == mask.tobytes()):
            group.block = target
            return False
        group.mask = ~condition if mask is True else mask & ~condition
        warp.groups.append(Group(target, condition.copy()))
        group.block += 1
        return True

    return end


def branch_indexed(index, targets):
    def end(warp, group):
        values = warp.R[index]
        mask = np.ones(32, bool) if group.mask is True else group.mask
        wanted = sorted(set(values[mask].tolist()))
        for value in wanted[1:]:
            warp.groups.append(Group(targets[value], mask & (values == value)))
        kept = mask & (values == wanted[0])
        group.mask = True if kept.tobytes() == ALL else kept
        group.block = targets[wanted[0]]
        return len(wanted) > 1

    return end


def lanes_of(mask):
    return range(32) if mask is True else np.flatnonzero(mask).tolist()


def first_lane(mask):
    return 0 if mask is True else int(mask.argmax())
