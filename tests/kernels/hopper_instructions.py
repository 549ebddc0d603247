"""Small PTX kernels for sm_90a, an instruction or a few each, that run on a GPU and on the emulator.

`CASES` maps a name to a `Case`. `record_h200.py` ran them on an H200, `test_h200.py` runs them on the emulator. Inputs
come from `numpy.random.default_rng(seed).integers`, so that they are the same everywhere.
"""

import itertools
import re
import zlib
from dataclasses import dataclass

import numpy as np

from tests.emulator import Launch, alu
from tests.emulator.launch import address_of, device_memory, pack, programs, start
from tests.emulator.ptx import DATA, dump, fill, initialise, laid_out, tensor_map, wait
from tests.emulator.ptx import kernel as kernel_with

U16, U32, U64, F32 = np.uint16, np.uint32, np.uint64, np.float32


@dataclass(frozen=True)
class Map:
    """A parameter that is a tensor map of another argument. Strides are in bytes, of dimensions 1 and up."""

    argument: int
    kind: str  # u8, u16, u32, f16, f32, bf16
    dims: tuple
    strides: tuple
    box: tuple
    span: int = 0  # of the swizzle: 0, 32, 64 or 128
    promotion: int = 0  # to L2: 0, 64, 128 or 256 bytes

    CODES = {"u8": 0, "u16": 1, "u32": 2, "f16": 6, "f32": 7, "bf16": 10}  # in the map's bytes

    def encoded(self, address):
        """The bytes of the map as the driver encodes it."""
        span, flags = (0, 32, 64, 128).index(self.span), (0, 64, 128, 256).index(self.promotion) << 17
        return tensor_map(address, self.CODES[self.kind], self.dims, self.strides, self.box, span, flags)


@dataclass(frozen=True)
class Case:
    ptx: str
    arguments: tuple  # arrays and Maps, one per parameter
    outputs: tuple = (0,)  # which arguments are results
    grid: int | tuple = 1
    block: int | tuple = 32
    shared: int = 0
    cluster: int = 1
    kernel: str = "test"
    refused: str = ""  # why this is an illegal instruction, as the emulator says it

    @property
    def checksum(self):
        """A hash of the case's inputs: a recording belongs to exactly these."""
        entry = re.search(rf"\.entry {self.kernel}\(.*?\n}}\n", self.ptx, re.S)[0]
        parts = [repr((self.grid, self.block, self.shared, self.cluster)).encode(), entry.encode()]
        for argument in self.arguments:
            if isinstance(argument, Map):
                parts.append(repr(argument).encode())
            else:
                parts += [f"{argument.dtype}{argument.shape}".encode(), argument.tobytes()]
        return zlib.crc32(b"\0".join(parts))

    def emulated(self, schedule="eager"):
        """The outputs, followed by the bytes of the maps with their addresses set to zero."""
        arrays = [a.copy() if isinstance(a, np.ndarray) else a for a in self.arguments]
        memory = device_memory([a for a in arrays if isinstance(a, np.ndarray)])
        maps = [a for a in arrays if isinstance(a, Map)]
        values = [a.encoded(address_of(arrays[a.argument], memory)) if isinstance(a, Map) else a for a in arrays]
        program = programs(self.ptx)[self.kernel]
        parameters = pack(program, values, memory)
        sizes = [s if isinstance(s, tuple) else (s, 1, 1) for s in (self.grid, self.block, self.cluster)]
        launch = Launch(self.kernel, *sizes[:2], self.shared, sizes[2], parameters)
        start(program, launch, memory, schedule)
        return [arrays[i] for i in self.outputs] + [np.frombuffer(m.encoded(0), np.uint8) for m in maps]


def seeded(name):
    return np.random.default_rng(zlib.crc32(name.encode()))


# ---- one instruction per thread and value: arithmetic, logic, comparison, conversion ----
# Opcodes of the emulator's table that sm_90a lacks: pairs of f32, three-input extrema, formats below 8 bits.
NOT_ON_HOPPER = re.compile(r".*(f32x2|:3$|e2m1|ue8m0).*")
EDGES = {
    16: [0, 1, 2, 0x7F, 0x80, 0xFF, 0x0380, 0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0x7E00, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF],
    32: [0, 1, 2, 31, 32, 33, 0x007FFFFF, 0x00800000, 0x33000000, 0x3F000000, 0x3F800000, 0x3F800001, 0x3FC00000,
         0x4B000001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF],
    64: [0, 1, 2, 63, 64, 65, 0x3FF0000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000,
         0x7FFFFFFFFFFFFFFF],
}  # fmt: skip
SIGNS = {bits: [edge | 1 << bits - 1 for edge in edges] for bits, edges in EDGES.items()}


def numbers(kind, rng, count):
    """One third edge cases, one third random bits, one third small integers or moderate floats, in random order."""
    bits = max(16, int(re.sub(r"\D", "", kind) or 32))
    dtype = np.dtype(f"u{bits // 8}")
    any_bits = rng.integers(0, (1 << bits) - 1, count, dtype, endpoint=True)
    edges = np.array(EDGES[bits] + SIGNS[bits], dtype)
    edges = edges[rng.integers(0, len(edges), count)]
    moderate = rng.integers(0, 2 * bits, count).astype(dtype)
    if kind[0] == "f" or kind == "b16":
        mantissa, width = {16: (10, 5), 32: (23, 8), 64: (52, 11)}[bits]
        exponent = (1 << width - 1) - 1 + rng.integers(-4, 5, count)
        low = rng.integers(0, (1 << bits) - 1, count, dtype, endpoint=True) & dtype.type((1 << mantissa) - 1)
        moderate = low | exponent.astype(dtype) << dtype.type(mantissa)
        moderate |= rng.integers(0, 2, count).astype(dtype) << dtype.type(bits - 1)
        if kind == "b16" and rng.integers(2):  # bf16 rather than f16
            moderate = (0x3F80 + rng.integers(-0x300, 0x300, count)).astype(dtype)
    which = rng.integers(0, 3, count)
    return np.choose(which, [edges, any_bits, moderate]).astype(dtype)


def register(kind, number):
    bits = max(16, int(re.sub(r"\D", "", kind) or 0))
    return f"%p{number}" if kind == "pred" else {16: "%h", 32: "%r", 64: "%x"}[bits] + str(number)


def one_by_one(name, opcode, result, kinds, modifiers=""):
    """The text of a kernel that applies `opcode` to element t of each input."""
    body, parameters = "", [".param .u64 out"]
    for i, kind in enumerate(kinds):
        bits = 32 if kind == "pred" else max(16, int(kind[1:]))
        loaded = f"%r{i}" if kind == "pred" else register(kind, i)
        parameters.append(f".param .u64 in{i}")
        body += f"ld.param.u64 %a1, [in{i}]; mad.wide.u32 %a1, %t, {bits // 8}, %a1; ld.global.b{bits} {loaded}, [%a1];"
        body += f" setp.ne.u32 %p{i}, {loaded}, 0;\n" if kind == "pred" else "\n"
    sources = ", ".join(register(kind, i) for i, kind in enumerate(kinds))
    target = register(result, 7)
    body += f"{opcode} {target}, {sources}{modifiers};\n"
    if result == "pred":
        body, target = body + "selp.b32 %r7, 1, 0, %p7;\n", "%r7"
    bits = 32 if result == "pred" else max(16, int(result[1:]))
    return f""".visible .entry {name}({", ".join(parameters)})
{{
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %x<8>; .reg .b64 %a<2>; .reg .b32 %t, %n, %b;
mov.u32 %t, %ctaid.x; mov.u32 %n, %ntid.x; mov.u32 %b, %tid.x; mad.lo.u32 %t, %t, %n, %b;
{body}ld.param.u64 %a0, [out]; mad.wide.u32 %a0, %t, {bits // 8}, %a0; st.global.b{bits} [%a0], {target};
ret;
}}
"""


def forms():
    """(opcode, result, kinds, what follows the registers)"""
    for name, (result, kinds, _) in alu.TABLE.items():
        opcode = name.split(":")[0]
        if NOT_ON_HOPPER.match(name):
            continue
        if opcode == "lop3.b32":
            for table in (0x80, 0xFE, 0x96, 0xCA, 0xE8, 0x6A, 0x1B, 0xD4):
                yield opcode, result, kinds[:3], f", {table}"
        else:
            yield opcode, result, kinds, ""
    for kind in ("u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64", "f16", "bf16", "f32", "f64"):
        for compare in (*alu.UFUNC, *alu.ORDER, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
            if alu.comparison(compare, "f32" if kind == "bf16" else kind):
                yield f"setp.{compare}.{kind}", "pred", ("b16" if kind == "bf16" else kind,) * 2, ""


def one_by_one_cases():
    found, text = {}, ""
    for number, (opcode, result, kinds, modifiers) in enumerate(forms()):
        name = opcode + modifiers
        rng, count = seeded(name), 1024 if ".approx" in opcode else 256
        inputs = [numbers(kind, rng, count) for kind in kinds]
        if opcode.startswith(("div.s", "div.u", "rem")):  # of 0 is anything
            inputs[1][inputs[1] == 0] = 3
        size = 4 if result == "pred" else max(2, int(result[1:]) // 8)
        text += one_by_one(f"f{number}", opcode, result, kinds, modifiers)
        found[name] = dict(arguments=(np.zeros(count, f"u{size}"), *inputs), grid=count // 256, block=256,
                           kernel=f"f{number}")  # fmt: skip
    ptx = ".version 8.8\n.target sm_90a\n.address_size 64\n" + text
    return {name: Case(ptx, **rest) for name, rest in found.items()}


# ---- a few instructions, written out ----
def kernel(body, parameters=()):
    return kernel_with(body, parameters).replace("sm_100a", "sm_90a")


def store(words, registers="%r{}", first=0):
    """Store each thread's words to out, one thread after another."""
    return f"mad.wide.u32 %x19, %t, {4 * words}, %out;\n" + "".join(
        f"st.global.b32 [%x19+{4 * i}], {registers.format(first + i)};\n" for i in range(words)
    )


def words(count):
    return np.zeros(count, U32)


def lane_cases():
    """Instructions across the lanes of a warp, some of them with only part of the lanes."""
    found = {}
    values = seeded("lanes").integers(0, 1 << 32, 32, U32)
    few = seeded("few").integers(0, 4, 32, U32)
    load = "ld.param.u64 %x1, [in]; mad.wide.u32 %x1, %t, 4, %x1; ld.global.b32 %r1, [%x1];\n"
    apart = "mov.b32 %r2, 0; mov.b32 %r3, 0; setp.ge.u32 %p4, %t, 11; @%p4 bra END;\n"  # lanes 0 to 10 continue

    def add(name, body, given=values, count=2):
        text = kernel(load + body + store(count, first=2), [".u64 in"])
        found[name] = Case(text, (words(32 * count), given))

    for mode, (amount, clamp) in itertools.product(
        ("idx", "up", "down", "bfly"),
        ((0, 31), (3, 31), (5, 0), (1, 0x1C03), (2, 0x1C00), (9, 0x1807), (16, 0x101F), (31, 31)),
    ):
        shuffle = f"shfl.sync.{mode}.b32 %r2|%p2, %r1, {amount}, {clamp}, -1; selp.b32 %r3, 1, 0, %p2;"
        add(f"shfl {mode} {amount} {clamp:#x}", shuffle)
    by_each = "and.b32 %r4, %r1, 31; shfl.sync.idx.b32 %r2|%p2, %r1, %r4, 31, -1; selp.b32 %r3, 1, 0, %p2;"
    add("shfl by each lane", by_each)
    partly = apart + "shfl.sync.bfly.b32 %r2|%p2, %r1, 2, 31, 0x7FF; selp.b32 %r3, 1, 0, %p2; END:\n"
    add("shfl of some lanes", partly.replace("11;", "8;").replace("0x7FF", "0xFF"))
    votes = "vote.sync.{0}.pred %p3, %p2, {1}; selp.b32 %r2, 1, 0, %p3; vote.sync.ballot.b32 %r3, %p2, {1};"
    for mode, test in itertools.product(("any", "all", "uni"), ("%t, 40", "%t, 0", "%t, 7", "%r1, 0x80000000")):
        add(f"vote {mode} {test}", f"setp.lt.u32 %p2, {test};" + votes.format(mode, -1))
        add(f"vote {mode} {test} of some", f"setp.lt.u32 %p2, {test};" + apart + votes.format(mode, 0x7FF) + "END:\n")
    add("match", "match.any.sync.b32 %r2, %r1, -1; cvt.u64.u32 %x2, %r1; match.any.sync.b64 %r3, %x2, -1;", few)
    add("match of some", apart + "match.any.sync.b32 %r2, %r1, 0x7FF; END:\n", few)
    for what, kind in itertools.product(("add", "min", "max"), ("u32", "s32")):
        add(f"redux {what} {kind}", f"redux.sync.{what}.{kind} %r2, %r1, -1; mov.b32 %r3, 0;")
    for what in ("and", "or", "xor"):
        add(f"redux {what}", f"or.b32 %r1, %r1, 64; redux.sync.{what}.b32 %r2, %r1, -1; mov.b32 %r3, 0;")
    add("redux of some", apart + "redux.sync.add.u32 %r2, %r1, 0x7FF; END:\n")
    elect = "elect.sync %r2|%p2, {}; selp.b32 %r3, 1, 0, %p2;"
    add("elect", elect.format(-1))
    add("elect of some", apart.replace("ge", "lt") + elect.format(0xFFFFF800) + "END:\n")
    add("activemask", apart + "activemask.b32 %r2; END:\n")
    masks = ("eq", "lt", "le", "gt", "ge")
    add("lane masks", "".join(f"mov.u32 %r{2 + i}, %lanemask_{m};" for i, m in enumerate(masks)), count=5)
    packing = """mov.b32 {%h1, %h2}, %r1; mov.b32 %r2, {%h2, %h1}; mov.b64 %x2, {%r1, %r2}; mov.b64 {%r4, %r3}, %x2;
        add.u32 %r3, %r3, %r4;"""
    add("moves of parts", packing)
    return found


def place_case():
    """The registers with numbers of threads, CTAs and clusters."""
    dims = [f"%{n}.{d}" for n in ("tid", "ntid", "ctaid", "nctaid", "cluster_nctaid", "cluster_ctaid", "clusterid",
                                  "nclusterid") for d in "xyz"]  # fmt: skip
    names = [*dims, "%laneid", "%cluster_ctarank", "%cluster_nctarank", "%dynamic_smem_size"]
    body = """mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z; mad.lo.u32 %r1, %r1, 8, %t; mad.lo.u32 %t, %r2, 16, %r1;
        mov.u32 %r1, %ctaid.y; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r1, %r1, 4, %r2; mad.lo.u32 %t, %r1, 32, %t;"""
    body += "".join(f"mov.u32 %r{10 + i}, {name};\n" for i, name in enumerate(names)) + store(len(names), first=10)
    return Case(kernel(body), (words(8 * 32 * len(names)),), grid=(4, 2, 1), block=(8, 2, 2), shared=4096, cluster=2)


def memory_cases():
    """ldmatrix, stmatrix, atomics, cp.async."""
    found = {}
    given = seeded("memory").integers(0, 1 << 32, 128, U32)
    fill_shared = """ld.param.u64 %x1, [in]; mad.wide.u32 %x1, %t, 16, %x1; mad.lo.u32 %r1, %t, 16, %data;
        ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%x1]; st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5}; bar.sync 0;\n"""
    for count, trans in itertools.product((1, 2, 4), ("", ".trans")):
        listed = ", ".join(f"%r{10 + i}" for i in range(count))
        # Rows in another order: lane l points to row 5 l modulo 32.
        rows = "mul.lo.u32 %r6, %t, 5; and.b32 %r6, %r6, 31; mad.lo.u32 %r6, %r6, 16, %data;\n"
        form = f"sync.aligned.m8n8.x{count}{trans}.shared.b16"
        body = fill_shared + rows + f"ldmatrix.{form} {{{listed}}}, [%r6];\n" + store(count, first=10)
        found[f"ldmatrix x{count}{trans}"] = Case(kernel(body, [".u64 in"]), (words(32 * count), given), shared=8192)
        loads = "".join(f"add.u32 %r{10 + i}, %r2, {i};" for i in range(count))
        body = fill_shared + rows + loads + f"stmatrix.{form} [%r6], {{{listed}}}; bar.sync 0;\n" + dump(128)
        found[f"stmatrix x{count}{trans}"] = Case(kernel(body, [".u64 in"]), (words(128), given), shared=8192)
    for kind, space in itertools.product(("u32", "s32"), ("global", "shared")):
        for what in ("add", "min", "max"):
            found[f"atom {space} {what} {kind}"] = atomic(space, f"{what}.{kind}", given)
    for what, space in itertools.product(
        ("and.b32", "or.b32", "xor.b32", "exch.b32", "inc.u32", "cas.b32", "add.f32"), ("global", "shared")
    ):
        found[f"atom {space} {what}"] = atomic(space, what, given)
    floats = seeded("floats").integers(0, 1 << 32, 128, U32)
    floats[:64] &= 0x807FFFFF  # subnormals
    floats[64:] = floats[64:] & 0x807FFFFF | 0x3F000000
    found["atom global add.f32 of subnormals"] = atomic("global", "add.f32", floats)
    found["atom shared add.f32 of subnormals"] = atomic("shared", "add.f32", floats)
    found["red global add.noftz.bf16x2"] = atomic("global", "add.noftz.bf16x2", given & U32(0xBFFFBFFF), "red")
    for what in ("add.u32", "max.s32", "xor.b32", "inc.u32"):  # 32 lanes meet in one place
        body = f"""ld.param.u64 %x1, [in]; mad.wide.u32 %x1, %t, 4, %x1; ld.global.b32 %r2, [%x1];
            {"or.b32 %r2, %r2, 64;" if what == "inc.u32" else ""} red.global.{what} [%out], %r2;"""
        found[f"red {what} of all lanes"] = Case(kernel(body, [".u64 in"]), (words(1), given))
    copy = """ld.param.u64 %x2, [in]; mad.wide.u32 %x2, %t, 16, %x2; mad.lo.u32 %r1, %t, 16, %data;
        and.b32 %r5, %t, 15;
        cp.async.cg.shared.global [%r1+512], [%x2], 16; cp.async.commit_group;
        cp.async.ca.shared.global [%r1], [%x2], 16, %r5; cp.async.ca.shared.global [%r1+1024], [%x2], 8;
        cp.async.ca.shared.global [%r1+1032], [%x2+4], 4; cp.async.ca.shared.global [%r1+1036], [%x2], 4;
        cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;\n"""
    found["cp.async"] = Case(kernel(copy + dump(384), [".u64 in"]), (words(384), given), shared=8192)
    arrive = (
        initialise(count=32)
        + """ld.param.u64 %x2, [in]; mad.wide.u32 %x2, %t, 16, %x2;
        mad.lo.u32 %r1, %t, 16, %data;
        cp.async.cg.shared.global [%r1], [%x2], 16; cp.async.mbarrier.arrive.noinc.shared.b64 [%bar];\n"""
        + wait()
    )
    found["cp.async and an mbarrier"] = Case(kernel(arrive + dump(128), [".u64 in"]), (words(128), given), shared=8192)
    arrive = (
        initialise(count=1)
        + """ld.param.u64 %x2, [in]; mad.wide.u32 %x2, %t, 16, %x2;
        mad.lo.u32 %r1, %t, 16, %data; and.b32 %r5, %t, 16;
        cp.async.cg.shared.global [%r1], [%x2], 16, %r5; cp.async.mbarrier.arrive.shared.b64 [%bar];
        setp.eq.u32 %p3, %t, 0; bar.warp.sync -1; @%p3 mbarrier.arrive.shared.b64 %x1, [%bar];\n"""
        + wait()
    )
    found["cp.async that an mbarrier did not expect"] = Case(
        kernel(arrive + dump(128), [".u64 in"]), (words(128), given), shared=8192
    )
    return found


def atomic(space, what, given, how="atom"):
    """Lane t applies the atomic to word t and stores the old word (of atom), then the new one."""
    at = "[%x3]" if space == "global" else "[%r6]"
    old, compared = ("%r7, " if how == "atom" else ""), ("%r8, " if what.startswith("cas") else "")
    body = f"""ld.param.u64 %x1, [in]; mad.wide.u32 %x1, %t, 4, %x1;
        ld.global.b32 %r2, [%x1]; ld.global.b32 %r3, [%x1+128];
        mad.wide.u32 %x3, %t, 8, %out; mad.lo.u32 %r6, %t, 4, %data; st.{space}.b32 {at}, %r2; mov.b32 %r7, 0;
        and.b32 %r8, %t, 1; setp.eq.u32 %p3, %r8, 0; selp.b32 %r8, %r2, %r3, %p3;
        {how}.{space}.{what} {old}{at}, {compared}%r3; ld.{space}.b32 %r4, {at};
        st.global.b32 [%x3], %r4; st.global.b32 [%x3+4], %r7;"""
    return Case(kernel(body, [".u64 in"]), (words(64), given), shared=8192)


# ---- tensor cores ----
def floats(rng, shape, spread, kind="bf16"):
    """Bits of floats with random signs and mantissas, exponents from -spread to spread; spread -1: small integers."""
    mantissa, bias = {"bf16": (7, 127), "f16": (10, 15), "f32": (23, 127)}[kind]
    bits = U32 if kind == "f32" else U16
    if spread < 0:
        values = rng.integers(-4, 5, shape).astype(F32)
        if kind == "f16":
            return values.astype(np.float16).view(U16)
        return values.view(U32) if kind == "f32" else (values.view(U32) >> U32(16)).astype(U16)
    exponent = bias + rng.integers(-spread, spread + 1, shape)
    sign = rng.integers(0, 2, shape) << (8 * np.dtype(bits).itemsize - 1)
    return (sign | exponent << mantissa | rng.integers(0, 1 << mantissa, shape)).astype(bits)


ODD = {"bf16": (0, 0x8000, 1, 0x7F, 0x80, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0),
       "f16": (0, 0x8000, 1, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00)}  # fmt: skip


def mma_cases(warps=8):
    """mma.m16n8k16 on fragments of random bits, other ones in every warp."""
    found = {}
    for kind, spread in ((k, s) for k in ("bf16", "f16") for s in (-1, 0, 3, 7, 20, "odd") if (k, s) != ("f16", 20)):
        rng = seeded(f"mma {kind} {spread}")
        if spread == "odd":  # zeros, subnormals, the largest, infinities, NaN; few in each product
            a, b = (floats(rng, (warps, 32, n, 2), 2, kind) for n in (4, 2))
            odd = rng.random(a.shape) < 0.05
            a[odd] = np.array(ODD[kind], U16)[rng.integers(0, len(ODD[kind]), odd.sum())]
            c = floats(rng, (warps, 32, 4), 2, "f32")
        else:
            a, b = (floats(rng, (warps, 32, n, 2), spread, kind) for n in (4, 2))
            c = floats(rng, (warps, 32, 4), spread, "f32")
            c[: warps // 2] = 0
        body = f"""mov.u32 %r1, %ctaid.x; mad.lo.u32 %t, %r1, 32, %t; ld.param.u64 %x1, [a]; ld.param.u64 %x2, [b];
            ld.param.u64 %x3, [c]; mad.wide.u32 %x1, %t, 16, %x1; mad.wide.u32 %x2, %t, 8, %x2;
            mad.wide.u32 %x3, %t, 16, %x3; ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%x1];
            ld.global.v2.b32 {{%r14, %r15}}, [%x2]; ld.global.v4.b32 {{%r16, %r17, %r18, %r19}}, [%x3];
            mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r20, %r21, %r22, %r23}},
                {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};\n""" + store(4, first=20)
        arguments = (words(warps * 128), a.view(U32)[..., 0], b.view(U32)[..., 0], c)
        text = kernel(body, [".u64 a", ".u64 b", ".u64 c"])
        found[f"mma {kind} {spread}"] = Case(text, arguments, grid=warps)
    return found


def descriptor(register, at, rows, span):
    """The matrix descriptor of K-major rows at %data + at, into a 64-bit register."""
    stride, mode = (8 * span, {128: 1, 64: 2, 32: 3}[span]) if span else (128, 0)
    fixed = 16 * rows >> 4 << 16 | stride >> 4 << 32 | mode << 62
    return f"""add.u32 %r1, %data, {at}; shr.u32 %r1, %r1, 4; and.b32 %r1, %r1, 0x3FFF; cvt.u64.u32 {register}, %r1;
        or.b64 {register}, {register}, {fixed};\n"""


def wgmma(name, n, span, spread=-1, kind="bf16", registers=False, signs=(1, 1), from_zero=False):
    """out[64, n] = (c +) a[64, k] @ b[n, k].T, where the k columns are one row of the swizzle, 16 at a time."""
    rng, k = seeded(name), max(span, 32) // 2
    b = laid_out(floats(rng, (n, k), spread, kind), span)
    steps, parts = k // 16, [b]
    if registers:
        a = floats(rng, (steps, 128, 4, 2), spread, kind).view(U32)[..., 0]
    else:
        parts.append(laid_out(floats(rng, (64, k), spread, kind), span))
    b_size = -(-len(b) // 1024) * 1024
    data = np.concatenate([np.resize(b, b_size), *parts[1:]])
    c = floats(rng, (128, n // 2), spread, "f32")
    d = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    body = fill(len(data)) + descriptor("%x11", 0, n, span) + descriptor("%x10", b_size, 64, span)
    body += f"ld.param.u64 %x3, [c]; mad.wide.u32 %x3, %t, {2 * n}, %x3;"
    body += "".join(f"ld.global.b32 %r{100 + i}, [%x3+{4 * i}];\n" for i in range(n // 2))
    if registers:
        body += "ld.param.u64 %x4, [a]; mad.wide.u32 %x4, %t, 16, %x4;"
        for step in range(steps):
            four = ", ".join(f"%r{50 + 4 * step + i}" for i in range(4))
            body += f"ld.global.v4.b32 {{{four}}}, [%x4+{step * 2048}];\n"
    body += f"setp.{'ne' if from_zero else 'eq'}.u32 %p3, 0, 0; setp.eq.u32 %p4, 0, 0; wgmma.fence.sync.aligned;\n"
    for step in range(steps):
        left = "%x10"
        if registers:
            left = "{" + ", ".join(f"%r{50 + 4 * step + i}" for i in range(4)) + "}"
        body += f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{d}}}, {left}, %x11, "
        body += f"{'%p4' if step else '%p3'}, {signs[0]}, {signs[1]}, 0{'' if registers else ', 0'};\n"
        body += "add.u64 %x10, %x10, 2; add.u64 %x11, %x11, 2;\n"  # 32 bytes further along the rows
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n" + store(n // 2, first=100)
    parameters, arguments = [".u64 in", ".u64 c"], (words(64 * n), data, c)
    if registers:
        parameters, arguments = [*parameters, ".u64 a"], (*arguments, a)
    return Case(kernel(body, parameters), arguments, block=128, shared=65536)


def wgmma_cases():
    found = {}

    def add(name, *args, **kwargs):
        found[name] = wgmma(name, *args, **kwargs)

    for n, span, registers in itertools.product((8, 24), (0, 32, 64, 128), (False, True)):
        add(f"wgmma n{n} swizzle {span} {'registers' if registers else 'shared'}", n, span, registers=registers)
    for n in (16, 48, 80, 256):
        add(f"wgmma n{n}", n, 128)
    several = ((8, 0, True), (8, 7, False), (8, 20, True), (24, 3, True), (32, 7, True), (64, 3, False), (128, 2, True))
    for n, spread, registers in several:
        add(f"wgmma n{n} spread {spread}", n, 32 if n == 8 else 128, spread, registers=registers)
    for spread in (0, 3, 7, 20):  # a single instruction, to see how it adds
        add(f"wgmma one step, spread {spread}", 16, 32, spread, registers=True)
        add(f"wgmma one step from zero, spread {spread}", 16, 32, spread, registers=True, from_zero=True)
    add("wgmma f16", 24, 128, 3, kind="f16")
    add("wgmma f16 registers", 16, 64, 7, kind="f16", registers=True)
    add("wgmma -a", 8, 64, 3, signs=(-1, 1))
    add("wgmma -b", 8, 64, 3, signs=(1, -1), registers=False)
    add("wgmma -a -b from zero", 8, 64, 3, signs=(-1, -1), from_zero=True)
    return found


# ---- copies and barriers ----
def tensor_cases():
    """Tiles copied through tensor maps, inside and across every edge; and the bytes of the maps."""
    found = {}
    image = seeded("image").integers(1, 256, 40960, np.uint8)

    def load(name, map, at, refused=""):
        rank, size = len(map.dims), int(np.prod(map.box)) * int(re.sub(r"\D", "", map.kind)) // 8
        where = ", ".join(f"%r{8 + i}" for i in range(rank))
        body = initialise() + "mov.b64 %x9, map; cvta.param.u64 %x9, %x9;\n"
        body += "".join(f"mov.b32 %r{8 + i}, {c};" for i, c in enumerate(at))
        body += f"""@%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], {size};
            @%p1 cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
                [%data], [%x9, {{{where}}}], [%bar];\n""" + wait() + dump(size // 4)  # fmt: skip
        text = kernel(body, [".u64 in", ".align 64 .b8 map[128]"])
        found[f"tensor load {name}"] = Case(text, (words(size // 4), image, map), shared=65536, refused=refused)

    for span in (0, 32, 64, 128):
        row = span or 128
        map = Map(1, "u8", (256, 20), (256,), (row, 16), span)
        load(f"swizzle {span}", map, (32, 2))
        load(f"swizzle {span} over the right and lower edge", map, (256 - row // 2, 9))
        load(f"swizzle {span} over the left and upper edge", map, (-16, -3))
    load("bf16", Map(1, "bf16", (100, 30), (208,), (64, 8), 128, 128), (64, 25))
    load("bf16, one row", Map(1, "bf16", (304, 30), (608,), (64, 1), 128), (256, 29))
    load("f16", Map(1, "f16", (64, 64), (128,), (32, 8), 64, 256), (8, 60))
    load("u16", Map(1, "u16", (33, 9), (80,), (16, 16), 32, 64), (24, 1))
    load("f32", Map(1, "f32", (32, 64), (128,), (32, 16), 128), (-4, 55))
    load("u32", Map(1, "u32", (64, 9), (256,), (8, 4), 0), (60, 7))
    load("of one dimension", Map(1, "u8", (1000,), (), (256,)), (896,))
    load("of three dimensions", Map(1, "u16", (24, 10, 7), (48, 512), (16, 4, 3), 32), (-8, 8, 5))
    load("of four dimensions", Map(1, "bf16", (16, 5, 4, 3), (32, 160, 640), (16, 2, 3, 2), 32), (0, 4, 2, 1))
    load("of a large tensor", Map(1, "u8", (128, 300), (128,), (128, 8), 128, 128), (0, 296))
    odd = "does not begin at a multiple of 16 bytes"
    load("f16, 6 bytes off", Map(1, "f16", (64, 64), (128,), (32, 8), 64, 256), (3, 60), odd)
    load("f32, outside and 4 bytes off", Map(1, "f32", (32, 64), (128,), (32, 16), 128), (-5, 55), odd)

    def save(name, map, at, refused=""):
        rank, size = len(map.dims), int(np.prod(map.box)) * int(re.sub(r"\D", "", map.kind)) // 8
        where = ", ".join(f"%r{8 + i}" for i in range(rank))
        body = "mov.b64 %x9, map; cvta.param.u64 %x9, %x9; ld.param.u64 %x2, [in]; mov.b32 %r2, %t;\n"
        for i in range(size // 128):
            body += "mad.lo.u32 %r1, %t, 4, %data; ld.param.u64 %x2, [in]; mad.wide.u32 %x2, %t, 4, %x2;"
            body += f"ld.global.b32 %r2, [%x2+{128 * i}]; st.shared.b32 [%r1+{128 * i}], %r2;\n"
        body += "".join(f"mov.b32 %r{8 + i}, {c};" for i, c in enumerate(at)) + f"""
            fence.proxy.async.shared::cta; bar.sync 0;
            @%p1 cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%x9, {{{where}}}], [%data];
            cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""  # fmt: skip
        text = kernel(body, [".u64 in", ".align 64 .b8 map[128]"])
        target = np.full(4096, 0xEE, np.uint8)
        found[f"tensor store {name}"] = Case(text, (target, image[:4096].copy(), map), shared=65536, refused=refused)

    save("swizzle 128", Map(0, "u8", (256, 16), (256,), (128, 8), 128), (64, 3))
    save("over the right and lower edge", Map(0, "bf16", (60, 16), (128,), (32, 8), 64), (40, 12))
    save("over the left and upper edge", Map(0, "f32", (32, 16), (128,), (16, 4), 0), (-4, -2), "begins outside")
    save("8 bytes off", Map(0, "bf16", (60, 16), (128,), (32, 8), 64), (44, 12), odd)
    return found


def barrier_cases():
    """Phases of an mbarrier, named barriers, bulk copies."""
    found = {}
    tests = itertools.count()

    def test(parity, form="test_wait.parity"):
        n = next(tests)
        asked = f"mbarrier.{form}.shared.b64 %p2, [%bar], {parity};"
        return asked + f"selp.b32 %r1, 1, 0, %p2; st.global.b32 [%out+{4 * n}], %r1;\n"

    both = lambda: test(0) + test(1)
    arrive = "mbarrier.arrive.shared.b64 %x{}, [%bar]{};\n"
    body = """setp.ne.u32 %p9, %t, 0; @%p9 bra END; ld.param.u64 %x2, [in]; mov.b32 %r7, 512;
        mbarrier.init.shared.b64 [%bar], 3; fence.mbarrier_init.release.cluster;\n"""
    body += both() + arrive.format(10, "") + both() + arrive.format(11, "") + test("%x11", "test_wait")
    body += arrive.format(12, "") + both() + test("%x11", "test_wait") + test("%x12", "try_wait")  # the first phase
    body += test(0, "try_wait.parity")
    body += "mbarrier.arrive.expect_tx.shared.b64 %x10, [%bar], 64;\n" + arrive.format(11, ", 2") + both()
    body += "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 32;\n" + both()
    body += "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%bar], 80;\n" + both()
    body += "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%bar], 16;\n" + both()  # the second
    body += arrive.format(10, ", 2") + "mbarrier.arrive.expect_tx.shared.b64 %x10, [%bar], 512;\n" + both()
    body += "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%data], [%x2], %r7, [%bar];\n"
    body += wait() + both()  # the third, by a copy
    body += "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%bar], 16;\n" + arrive.format(10, ", 3") + both()
    body += "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 16;\n" + both()  # the fourth: bytes came first
    body += "mbarrier.inval.shared.b64 [%bar]; mbarrier.init.shared.b64 [%bar], 1;\n"
    body += both() + arrive.format(10, "") + both()
    source = seeded("bulk").integers(0, 1 << 32, 128, U32)
    arguments = (words(next(tests)), source)
    found["mbarrier"] = Case(kernel(body + "END:\n", [".u64 in"]), arguments, shared=8192)

    copy = fill(512) + dump(128)
    found["bulk load"] = Case(kernel(copy, [".u64 in"]), (words(128), source), shared=8192)
    within = fill(512) + """mov.b32 %r7, 256; add.u32 %r8, %data, 128; add.u32 %r9, %data, 1024; add.u32 %r6, %bar, 8;
        @%p1 mbarrier.init.shared.b64 [%r6], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%r6], 256;
        @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r9], [%r8], %r7, [%r6];
        """ + wait(1) + dump(64, "%r9")  # fmt: skip
    arguments, own = (words(64), source), "to the CTA's own shared memory"
    found["bulk copy inside shared memory"] = Case(kernel(within, [".u64 in"]), arguments, shared=8192, refused=own)
    put = (
        fill(512)
        + """mov.b32 %r7, 512; fence.proxy.async; bar.sync 0;
        @%p1 cp.{}.bulk.global.shared::cta.bulk_group{} [%out], [%data], %r7;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    )
    target = seeded("target").integers(0, 1 << 32, 128, U32)
    found["bulk store"] = Case(kernel(put.format("async", ""), [".u64 in"]), (words(128), source), shared=8192)
    for what in ("add.u32", "add.s32", "add.u64", "add.noftz.f16", "add.noftz.bf16"):
        mask = U32(0xBFFFBFFF) if "noftz" in what else U32(0xFFFFFFFF)  # no infinities
        text = kernel(put.format("reduce.async", "." + what), [".u64 in"])
        found[f"bulk {what}"] = Case(text, (target & mask, source & mask), shared=8192)
    named = """mad.lo.u32 %r1, %t, 4, %data; setp.ge.u32 %p5, %t, 32; @%p5 bra READ;
        mul.lo.u32 %r3, %t, %t; st.shared.b32 [%r1], %r3; bar.arrive 1, 64; bra END;
        READ: bar.sync 1, 64; ld.shared.b32 %r2, [%r1+-128]; mad.wide.u32 %x1, %t, 4, %out;
        st.global.b32 [%x1+-128], %r2; END:\n"""
    found["named barrier"] = Case(kernel(named), (words(32),), block=64, shared=8192)
    return found


def cluster_cases():
    """Two CTAs use each other's shared memory and mbarriers, and one copy writes to both."""
    found = {}
    rank = "mov.u32 %r2, %cluster_ctarank; "
    meet = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;\n"
    out = "mad.lo.u32 %r9, %r2, 32, %t; mad.wide.u32 %x1, %r9, 4, %out; st.global.b32 [%x1], %r7;\n"
    swap = (
        initialise()
        + rank
        + """mad.lo.u32 %r3, %t, 4, %data; mad.lo.u32 %r4, %r2, 1000, %t;
        st.shared.b32 [%r3], %r4;"""
    )
    swap += (
        meet
        + """xor.b32 %r5, %r2, 1; mapa.shared::cluster.u32 %r6, %r3, %r5;
        ld.shared::cluster.b32 %r7, [%r6]; mapa.shared::cluster.u32 %r8, %bar, %r5;
        @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];\n"""
    )
    swap += wait() + out + meet
    found["cluster: each reads from the other"] = Case(kernel(swap), (words(64),), grid=2, cluster=2, shared=8192)
    source = seeded("multicast").integers(0, 1 << 32, 32, U32)
    both = initialise() + rank + "@%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], 128;" + meet + """
        setp.eq.and.u32 %p3, %r2, 1, %p1; mov.b32 %r7, 128; mov.b16 %h1, 3; ld.param.u64 %x2, [in];
        @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%data], [%x2], %r7, [%bar], %h1;
        """ + wait() + "mad.lo.u32 %r1, %t, 4, %data; ld.shared.b32 %r7, [%r1];" + out + meet  # fmt: skip
    arguments = (words(64), source)
    found["cluster: multicast"] = Case(kernel(both, [".u64 in"]), arguments, grid=2, cluster=2, shared=8192)
    across = initialise() + rank + """mad.lo.u32 %r3, %t, 4, %data; mad.lo.u32 %r4, %r2, 1000, %t;
        st.shared.b32 [%r3], %r4; fence.proxy.async; bar.sync 0; mov.b32 %r10, 128; xor.b32 %r5, %r2, 1;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %x1, [%bar], 128;""" + meet + """
        add.u32 %r6, %data, 256; mapa.shared::cluster.u32 %r6, %r6, %r5; mapa.shared::cluster.u32 %r8, %bar, %r5;
        @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r6], [%data], %r10, [%r8];
        """ + wait() + "ld.shared.b32 %r7, [%r3+256];" + out + meet  # fmt: skip
    found["cluster: bulk copy to the other"] = Case(kernel(across), (words(64),), grid=2, cluster=2, shared=8192)
    return found


GROUPS = {
    "one by one": one_by_one_cases(),
    "lanes": lane_cases(),
    "memory": {"places": place_case(), **memory_cases()},
    "mma": mma_cases(),
    "wgmma": wgmma_cases(),
    "tensor copies": tensor_cases(),
    "barriers": barrier_cases(),
    "clusters": cluster_cases(),
}
CASES = {name: case for group in GROUPS.values() for name, case in group.items()}
assert len(CASES) == sum(map(len, GROUPS.values()))
assert DATA % 1024 == 0  # swizzled data lies there
