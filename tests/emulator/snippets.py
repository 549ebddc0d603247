"""A few lines of PTX made into a kernel, for tests."""

import numpy as np

from tests.emulator import emulate
from tests.emulator.ptx import entry


def kernel(body, parameters=(".u64 out",), registers=""):
    """A kernel with the statements `body`; %t is the thread's number, %out the first parameter."""
    return entry(
        parameters,
        f"""    .reg .b32 %r<64>;
    .reg .b64 %x<32>;
    .reg .b32 %t;
    .reg .b64 %out;
    .reg .b64 %mine;
    {registers}
    mov.u32 %t, %tid.x;
    ld.param.u64 %out, [{parameters[0].split()[-1]}];
    mad.wide.u32 %mine, %t, 4, %out;
{body}""",
    )


def run(
    body, out=None, threads=32, arguments=(), parameters=(), registers="", shared=8192, schedule="eager", **options
):
    """Run `body` and return `out` (by default one word per thread)."""
    out = np.zeros(threads, np.uint32) if out is None else out
    ptx = kernel(body, (".u64 out", *parameters), registers)
    emulate(ptx, [out, *arguments], options.pop("grid", 1), threads, shared, schedule=schedule, **options)
    return out


def f32(*values):
    return np.array(values, np.float32)


def u32(*values):
    return np.array([v & 0xFFFFFFFF for v in values], np.uint32)
