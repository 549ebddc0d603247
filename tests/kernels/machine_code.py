"""Statistics of the machine code that ptxas makes of the GPU kernels, on a machine without a GPU."""

import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest


def counts(cubin: bytes, opcodes: tuple[str, ...]) -> dict[str, int]:
    """Registers, stack and local bytes, instructions of the one kernel in `cubin` (`__cubin__` of what cute.compile
    returns in `tests.emulator.compiling_for`), and how many instructions begin with each of `opcodes`; of "loop X", how
    many the smallest loop around all X has."""
    pytest.importorskip("nvidia.cu13", reason="nvdisasm and cuobjdump are not installed")
    tools = Path(next(iter(sys.modules["nvidia.cu13"].__path__)), "bin")
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        sass = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr)}
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]*)", sass, re.M)
    numbers |= {name: sum(o.startswith(name) for o in found) for name in opcodes if not name.startswith("loop ")}
    numbers |= {name: loop(sass, name.removeprefix("loop ")) for name in opcodes if name.startswith("loop ")}
    return {**numbers, "instructions": len(found)}


def loop(sass: str, opcode: str) -> int:
    """The number of instructions in the smallest loop, from a label to a jump back, that contains all `opcode`."""
    labels, places, jumps, count = {}, [], [], 0
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]*)(.*)", line):
            count += found[1] != "NOP"
            if found[1].startswith(opcode):
                places.append(count)
            if found[1] == "BRA" and (target := re.search(r"\.L_x_\d+", found[2])):
                jumps.append((count, target[0]))
    around = [end - labels[to] for end, to in jumps
              if places and labels.get(to, count) < places[0] and places[-1] <= end]  # fmt: skip
    return min(around, default=0)
