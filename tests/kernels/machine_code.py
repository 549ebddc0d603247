"""Statistics of the machine code that ptxas makes of the GPU kernels, on a machine without a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def machine_code(module: str, architecture: str, opcodes: tuple[str, ...], folder: Path) -> list[dict]:
    """What ptxas made of each kernel for which `compile_all(architecture)` of tests.kernels.<module> yields a compiling
    call.

    Registers, stack and local bytes, instructions, and how many of them begin with each of `opcodes`; of "loop X", how
    many the smallest loop around all X has. Compiled in a process of its own, where the DSL leaves its cubins in
    `folder`.
    """
    environment = {
        **os.environ, "CUTE_DSL_ARCH": architecture, "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    }  # fmt: skip
    call = f"machine_code.inspect(t, {architecture!r}, {opcodes!r}, {str(folder)!r})"
    code = f"from tests.kernels import machine_code, {module} as t; {call}"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def inspect(module, architecture: str, opcodes: tuple[str, ...], folder: str) -> None:
    """Runs in the other process of `machine_code`, and prints a JSON list."""
    table = []
    for compile_kernel in module.compile_all(architecture):
        for old in Path(folder).iterdir():
            old.unlink()
        compile_kernel()
        (cubin,) = Path(folder).glob("*.cubin")
        table.append(counts(cubin, opcodes))
    print(json.dumps(table))


def counts(cubin: Path, opcodes: tuple[str, ...]) -> dict[str, int]:
    """The counts of one kernel's machine code: see `machine_code`."""
    pytest.importorskip("nvidia.cu13", reason="nvdisasm and cuobjdump are not installed")
    tools = Path(next(iter(sys.modules["nvidia.cu13"].__path__)), "bin")
    usage = subprocess.run([tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
    sass = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
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
