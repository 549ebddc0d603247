"""Mistakes to plant into PTX: one in every instruction that synchronizes, copies, multiplies or stores.

A spoilt kernel is noticed when the emulator stops it, or when it stores something else, in one of three schedules.
"""

import re

import torch

from tests.emulator.machine import EmulatorError
from tests.emulator.parser import PtxError

SCHEDULES = "lazy", "slow:1", "random:3"
INSTRUCTION = re.compile(r"^\s*(?:\{\s*)?(?:@!?%p\d+ )?\s*([a-z][\w.:]*)[^;]*;", re.M)
LEFT_OUT = re.compile(
    r"bar\.|barrier\.|fence\.|membar|griddepcontrol|cp\.async|mbarrier\.(arrive|init)|st\.(shared|global)"
    r"|tcgen05\.(fence|wait|commit|cp|mma|st|dealloc)|mma\.sync"
)
PEER_BIT = "-16777224;"  # what the mask leaves out of an mbarrier's address: the rank in a pair
WEAKER = (
    (".release.cluster", ".relaxed.cluster"), (".release.cluster", ".release.cta"), (".acquire.cluster", ""),
    (".relaxed.cluster", ".relaxed.cta"),
)  # fmt: skip


def mistakes(ptx):
    """(what is wrong, the spoilt text)"""
    for match in INSTRUCTION.finditer(ptx):
        opcode, text = match[1], match[0]
        line = f"line {ptx.count(chr(10), 0, match.start(1)) + 1}: {' '.join(text.split())[:90]}"

        def put(new, match=match):
            return ptx[: match.start()] + new + ptx[match.end() :]

        if LEFT_OUT.match(opcode):
            yield f"without {line}", put("")
        if opcode.startswith("mbarrier.try_wait"):
            operands = re.search(r"(mbarrier\.\S+)\s+(\S+), (\[[^]]*\]), ([^,;]+)", text)
            yield f"no waiting, {line}", put(f"setp.eq.u32 {operands[2]}, 0, 0;")
            wait, done, place, parity = operands.groups()
            other = f"xor.b32 other, {parity}, 1; {wait} {done}, {place}, other;"
            yield f"other parity, {line}", put(f"{{ .reg .b32 other; {other} }}")
            if ".relaxed" not in opcode:
                relaxed = re.sub(r"(try_wait\.parity)(\.acquire\.\w+)?", r"\1.relaxed.cluster", text)
                yield f"relaxed, {line}", put(relaxed)
        for strong, weak in WEAKER:
            if opcode.startswith("mbarrier") and strong in opcode:
                yield f"{strong} as {weak or 'nothing'}, {line}", put(text.replace(strong, weak))
        if opcode.startswith("barrier.cluster.arrive"):
            yield f"relaxed, {line}", put(text.replace("cluster.arrive", "cluster.arrive.relaxed"))
        if "expect_tx" in opcode and (size := re.search(r", (%r\d+);", text)):
            yield (
                f"16 bytes more, {line}",
                put(f"add.s32 {size[1]}, {size[1]}, 16; {text} sub.s32 {size[1]}, {size[1]}, 16;"),
            )
        if opcode.startswith("tcgen05.ld"):
            yield f"the next column, {line}", put(re.sub(r"\[(%r\d+)\]", r"[\1+1]", text, count=1))
        if load := re.search(r"ld\.shared\.[bu]32\s+(%r\d+),", text):  # of Tensor Memory's first column, among others
            yield f"zero in place of {line}", put(f"mov.b32 {load[1]}, 0;")
        if opcode.startswith("ldmatrix"):
            further = re.sub(r"\[(%r\d+)\+?(\d*)\]", lambda at: f"[{at[1]}+{int(at[2] or 0) + 16}]", text)
            yield f"16 bytes further, {line}", put(further)
        if opcode == "cp.async.wait_group":
            yield f"one group less, {line}", put(re.sub(r"\d+(?=;)", lambda n: str(int(n[0]) + 1), text))
        if opcode.startswith("mapa"):
            yield f"to itself, {line}", put(re.sub(r", 0;", ", 1;", text))
        if opcode == "and.b32" and PEER_BIT in text:
            yield f"in its own CTA, {line}", put(text.replace(PEER_BIT, "-8;"))
        if opcode.startswith("cp.async.bulk.tensor") and ".cta_group::2" in opcode:
            yield f"of one CTA, {line}", put(text.replace(".cta_group::2", ""))


def unnoticed(ptx, run):
    """(the number of mistakes in `ptx`, those that nothing noticed). run(ptx, schedule) returns what is stored."""
    right, count, survivors = [stored.view(torch.uint8) for stored in run(ptx, "lazy")], 0, []

    def noticed(text):
        try:
            found = (stored.view(torch.uint8) for s in SCHEDULES for stored in run(text, s))
            return not all(torch.equal(a, b) for a, b in zip(found, right * len(SCHEDULES), strict=True))
        except (EmulatorError, PtxError):
            return True

    for what, text in mistakes(ptx):
        count += 1
        if not noticed(text):
            survivors.append(what)
    return count, survivors
