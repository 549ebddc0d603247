"""Run one kernel and show what it did.

    python -m tests.emulator kernel.ptx --grid 4 --block 128 --shared 49152 --arg x.npy --arg zeros:int32:64x32 --arg 7
    python -m tests.emulator capture.npz --schedule lazy --timeline -

An argument of a kernel is a tensor (FILE.npy, or zeros:DTYPE:SIZExSIZE, which must be written before it is read), an
integer, a float with a point, or the bytes of a struct (FILE.bin). A capture holds all of it: Emulated.capture() writes
one for a function compiled by CuTe DSL, whose parameters nobody wants to type.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from tests.emulator.launch import emulate, programs, restore, start
from tests.emulator.machine import EmulatorError
from tests.emulator.parser import Pair, PtxError, Register, Vector


def size(text):
    return tuple(int(part) for part in text.split(","))


def argument(text):
    """Parse an argument: (value, whether it is an output)."""
    if text.startswith("zeros:"):
        _, dtype, shape = text.split(":")
        return np.zeros(tuple(int(n) for n in shape.split("x")), dtype), True
    if text.endswith(".npy"):
        return np.load(text), False
    if text.endswith(".bin"):
        return Path(text).read_bytes(), False
    return (float(text) if "." in text else int(text, 0)), False


class Trace:
    """Prints the instructions of one warp after they ran, with the values that they wrote."""

    def __init__(self, cta, warp, lines):
        self.cta, self.warp, self.lines = cta, warp, lines

    def __call__(self, warp, mask):
        instruction = warp.at
        if (warp.cta.number, warp.index) != (self.cta, self.warp):
            return
        if self.lines and not self.lines[0] <= instruction.line <= self.lines[-1]:
            return
        first = instruction.operands[0] if instruction.operands else None
        items = (
            first.items
            if isinstance(first, Vector)
            else (first.first, first.second)
            if isinstance(first, Pair)
            else (first,)
        )
        shown = [self.value(warp, item) for item in items[:4] if isinstance(item, Register)]
        lanes = "" if mask is True else f" lanes {np.flatnonzero(mask).tolist()}"
        print(f"{instruction.line:6} {instruction.text[:90]:90}{lanes}  {' '.join(shown)}")

    @staticmethod
    def value(warp, register):
        program = warp.cta.machine.program
        for spec, slot in program.slot_of.items():
            if spec[:3] == ("register", register.kind, program.rows[register.index]):
                values = warp.R[slot]
                if (values == values[0]).all():
                    return f"= {values[0]}"
                return f"= {values[0]} {values[1]} {values[2]} .. {values[-1]}"
        return ""


def main():
    parser = argparse.ArgumentParser("python -m tests.emulator", description=__doc__.split("\n")[0])
    parser.add_argument("file", help="PTX, or a capture")
    parser.add_argument("--kernel", help="its name, if the PTX has several")
    parser.add_argument("--grid", type=size, default=(1,), metavar="X[,Y[,Z]]")
    parser.add_argument("--block", type=size, default=(32,), metavar="X[,Y[,Z]]")
    parser.add_argument("--cluster", type=size, default=(1,), metavar="X[,Y[,Z]]")
    parser.add_argument("--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory")
    parser.add_argument("--arg", action="append", default=[], metavar="VALUE", help="once for each parameter")
    parser.add_argument(
        "--schedule", default="eager", help="eager, lazy, reverse, reverse-lazy, random:SEED, slow:SEED"
    )
    parser.add_argument("--lenient", action="store_true", help="accept what published kernels rely on, see README.md")
    parser.add_argument("--out", metavar="FILE.npz", help="write the tensors, as they are at the end")
    parser.add_argument("--trace", metavar="CTA:WARP[:FIRST[-LAST]]", help="print a warp's instructions and results")
    parser.add_argument("--timeline", metavar="FILE.svg", help="picture of who waits where; - prints it as text")
    parser.add_argument("--ctas", type=int, default=1, help="CTAs in the timeline")
    options = parser.parse_args()
    more = {"lenient": options.lenient}
    if options.trace:
        cta, warp, *lines = options.trace.split(":")
        more["trace"] = Trace(int(cta), int(warp), [int(n) for n in lines[0].split("-")] if lines else None)
    try:
        machines, outputs = run(options, more)
    except (EmulatorError, PtxError) as error:
        sys.exit(str(error))
    for machine in machines:
        name, count = machine.program.kernel.name, machine.instructions
        print(f"{name}: grid {machine.grid}, block {machine.block}, {count} instructions")
        if options.timeline == "-":
            print(machine.timeline.text(machine, options.ctas))
        elif options.timeline:
            Path(options.timeline).write_text(machine.timeline.svg(machine, options.ctas))
    if options.out:
        np.savez(options.out, **outputs)


def run(options, more):
    if options.file.endswith(".npz"):
        ptx, launches, memory = restore(options.file)
        machines = [start(programs(ptx)[one.kernel], one, memory, options.schedule, **more) for one in launches]
        return machines, {f"buffer{i}": buffer.bytes for i, buffer in enumerate(memory.buffers)}
    values = [argument(text) for text in options.arg]
    tensors = {f"arg{i}": value for i, (value, _) in enumerate(values) if isinstance(value, np.ndarray)}
    machine = emulate(Path(options.file).read_text(), [value for value, _ in values], options.grid, options.block,
                      options.shared, options.cluster, options.kernel, options.schedule,
                      unwritten=[value for value, output in values if output], **more)  # fmt: skip
    return [machine], tensors


main()
