"""Parse PTX text to a list of instructions: names are resolved to registers, scopes flattened, nothing is interpreted.

Grammar from the PTX ISA, chapters "Syntax", "State Spaces, Types, and Variables" and "Directives". Only what a compiled
kernel contains is accepted; anything else stops with its line.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
NAME = re.compile(r"[%$A-Za-z_][\w$%.]*")  # the dot is for %tid.x
LABEL = re.compile(r"([$A-Za-z_][\w$]*)\s*:(?!:)")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
VARIABLE = re.compile(
    r"\.(param|shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+"
    r"(?:\.ptr\s+\.global\s+\.align\s+\d+\s+)?([\w$]+)\s*(?:\[(\d*)\])?$"  # what a pointer points to is of no use here
)
IGNORED = (".pragma", ".loc", ".file", ".section")
PER_FUNCTION = (".reqntid", ".maxntid", ".minnctapersm", ".maxnreg", ".reqnctapercluster", ".explicitcluster",
                ".maxclusterrank", ".blocksareclusters", ".noreturn")  # fmt: skip


class PtxError(Exception):
    """Text that the parser does not know."""


@dataclass(frozen=True)
class Register:
    index: int
    kind: str  # "pred", "8", "16", "32", "64", "128"


@dataclass(frozen=True)
class Immediate:
    bits: int  # integers as written, floats as their bit pattern
    float_kind: str = ""  # "f32" or "f64"


@dataclass(frozen=True)
class Symbol:
    name: str  # a variable, a parameter, a label or a special register


@dataclass(frozen=True)
class Address:
    base: object  # Register, Symbol or Immediate
    offset: int = 0
    coordinates: tuple = ()  # of a tensor copy: [map, {c0, c1}]
    more: object = None  # what stands behind the coordinates


@dataclass(frozen=True)
class Vector:
    items: tuple


@dataclass(frozen=True)
class Pair:
    first: object
    second: object


@dataclass(frozen=True)
class Not:
    register: Register


@dataclass
class Instruction:
    line: int
    text: str
    opcode: str
    operands: tuple
    guard: object = None  # Register, or Not(Register)


@dataclass
class Variable:
    space: str
    name: str
    size: int
    align: int


@dataclass
class Kernel:
    name: str
    parameters: list
    shared: list = field(default_factory=list)  # of Variable; size 0 is dynamic shared memory
    registers: list = field(default_factory=list)  # kinds
    code: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)  # name -> index into code
    tables: dict = field(default_factory=dict)  # of brx.idx: name -> labels
    elsewhere: list = field(default_factory=list)  # of Variable: constants and local memory, which nothing may read


def parse(text):
    """{name: Kernel} for every .entry in the text."""
    return _Parser(text).module()


def parse_number(text):
    if text[:2] in ("0f", "0F"):
        return Immediate(int(text[2:], 16), "f32")
    if text[:2] in ("0d", "0D"):
        return Immediate(int(text[2:], 16), "f64")
    negative = text.startswith("-")
    digits = text.lstrip("+-").rstrip("U")
    octal = re.fullmatch(r"0[0-7]+", digits)
    value = int(digits, 8 if octal else 0)
    return Immediate(-value if negative else value)


def split(text, separator=","):
    """Split `text` at its top-level separators, not those inside brackets or braces."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "[{(") - (char in "]})")
        if char == separator and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    tail = text[start:].strip()
    return parts + [tail] if tail or parts else []


class _Parser:
    def __init__(self, text):
        # Comments become blanks, so that every position keeps its line.
        blank = lambda match: re.sub(r"[^\n]", " ", match[0])
        self.text = re.sub(r"/\*.*?\*/|//[^\n]*", blank, text, flags=re.S)
        self.starts = [0] + [match.end() for match in re.finditer("\n", self.text)]
        self.at = 0
        self.module_shared, self.module_constants = [], []

    def fail(self, why, at=None):
        raise PtxError(f"PTX line {self.line(self.at if at is None else at)}: {why}")

    def line(self, at):
        return bisect_right(self.starts, at)

    def skip_blanks(self):
        match = re.compile(r"\s*").match(self.text, self.at)
        self.at = match.end()
        return self.at < len(self.text)

    def take(self, pattern):
        match = re.compile(pattern, re.S).match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def module(self):
        kernels = {}
        while self.skip_blanks():
            if self.take(r"\.(version|target|address_size)[^\n]*"):
                continue
            if match := self.take(r"(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$]+)\s*(?:\((.*?)\))?([^{]*)\{"):
                kernels[match[1]] = self.entry(match)
            elif match := self.take(r"(?:\.(?:extern|visible|weak)\s+)*(\.shared[^;]*);"):
                self.module_shared.append(self.variable(match[1].strip()))
            elif match := self.take(r"(\.global[^;=]*)=[^;]*;"):
                self.module_constants.append(self.variable(match[1].strip()))
            elif self.take(r"\.extern\s+\.func[^;{]*;"):
                continue
            elif self.take(r"\.(file|section|loc)[^\n]*"):
                continue
            else:
                self.fail("unknown at module level: " + self.text[self.at :].split("\n")[0])
        return kernels

    def variable(self, text):
        match = VARIABLE.match(" ".join(text.split()))
        if not match or match[4] not in SIZES:
            self.fail(f"unknown variable: {text}")
        space, align, _, bits, name, count = match.groups()
        unit = SIZES[bits]
        size = unit if count is None else unit * int(count or 0)
        return Variable(space, name, size, int(align or unit))

    def entry(self, match):
        for directive in re.findall(r"\.[a-z]\w*", match[3]):
            if directive not in PER_FUNCTION:
                self.fail(f"unknown directive {directive}", match.start())
        kernel = Kernel(match[1], [self.variable(p) for p in split(match[2] or "")], list(self.module_shared))
        kernel.elsewhere = list(self.module_constants)
        scopes = [{}]  # name -> Register, or a label's unique name
        uses = []  # (instruction, scopes at its place): labels may be used before they are defined
        while scopes:
            if not self.skip_blanks():
                self.fail("the text ends inside a kernel")
            if self.take(r"\{"):
                scopes = [*scopes, {}]
            elif self.take(r"\}"):
                scopes = scopes[:-1]
            elif label := self.take(LABEL.pattern):
                self.label(label[1], kernel, scopes)
            else:
                self.statement(kernel, scopes, uses)
        for instruction, text, visible in uses:
            instruction.operands = tuple(self.operand(part, visible, instruction) for part in split(text))
        return kernel

    def label(self, name, kernel, scopes):
        self.skip_blanks()
        if targets := self.take(r"\.branchtargets([^;]*);"):
            kernel.tables[name] = split(targets[1])
            scopes[-1][name] = Symbol(name)
            return
        unique = name if name not in kernel.labels else f"{name}@{self.line(self.at)}"
        kernel.labels[unique] = len(kernel.code)
        scopes[-1][name] = Symbol(unique)

    def statement(self, kernel, scopes, uses):
        start = self.at
        end = self.text.find(";", start)
        if end < 0:
            self.fail("a statement without its semicolon")
        text = " ".join(self.text[start:end].split())
        self.at = end + 1
        if not text:
            return
        if text.startswith(".local"):
            kernel.elsewhere.append(self.variable(text))
            return
        if text.startswith(IGNORED):
            return
        if match := REGISTERS.match(text):
            self.declare(match, kernel, scopes[-1])
        elif text.startswith(".shared"):
            kernel.shared.append(self.variable(text))
        elif re.match(r"\.param \.[a-z]\d+ \w+$", text):
            return  # of a call
        elif text.startswith("."):
            self.fail(f"unknown directive: {text}", start)
        else:
            match = re.match(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
            if not match:
                self.fail(f"not an instruction: {text}", start)
            instruction = Instruction(self.line(start), text, match[3], ())
            if match[2]:
                register = self.lookup(match[2], scopes)
                if not isinstance(register, Register):
                    self.fail(f"the guard {match[2]} is no register", start)
                instruction.guard = Not(register) if match[1] else register
            kernel.code.append(instruction)
            uses.append((instruction, match[4], scopes))

    def declare(self, match, kernel, scope):
        kind = match[1] if match[1] == "pred" else match[1].lstrip("bsuf")
        if kind not in ("pred", "8", "16", "32", "64", "128"):
            self.fail(f"unknown register type .{match[1]}")
        for name in split(match[2]):
            counted = re.fullmatch(r"([%$\w]+)<(\d+)>", name)
            names = [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]
            for each in names:
                scope[each] = Register(len(kernel.registers), kind)
                kernel.registers.append(kind)

    def lookup(self, name, scopes):
        for scope in reversed(scopes):
            if name in scope:
                return scope[name]
        return Symbol(name)

    def operand(self, text, scopes, instruction):
        where = f"PTX line {instruction.line}: {instruction.text}"
        if text.startswith(("{", "(")):
            return Vector(tuple(self.operand(part, scopes, instruction) for part in split(text[1:-1])))
        if text.startswith("["):
            return self.address(text[1:-1], scopes, instruction)
        if "|" in text:
            return Pair(*(self.operand(part.strip(), scopes, instruction) for part in text.split("|")))
        if text.startswith("!"):
            return Not(self.operand(text[1:].strip(), scopes, instruction))
        if re.fullmatch(r"[-+]?\d\w*", text):
            return parse_number(text)
        if NAME.fullmatch(text):
            return self.lookup(text, scopes)
        raise PtxError(f"{where}: unknown operand {text}")

    def address(self, text, scopes, instruction):
        parts = split(text)
        match = re.fullmatch(r"(.+?)\s*(?:\+\s*(-?\w+))?", parts[0])
        base = self.operand(match[1].strip(), scopes, instruction)
        offset = parse_number(match[2]).bits if match[2] else 0
        coordinates, more = (), None
        if len(parts) > 1:
            vector = self.operand(parts[1], scopes, instruction)
            coordinates = vector.items if isinstance(vector, Vector) else (vector,)
        if len(parts) > 2:
            more = self.operand(parts[2], scopes, instruction)
        return Address(base, offset, coordinates, more)
