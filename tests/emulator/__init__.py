"""A functional model of the GPU: it runs a kernel's PTX on the CPU and stops where hardware would leave it undefined.

    from tests.emulator import emulate
    emulate(ptx, [x, y, 3], grid=(4, 1, 1), block=(128, 1, 1), shared=49152, schedule="lazy")

It knows the instructions that this project's kernels use. One that it does not know stops it with its line.
"""

from . import barriers, copies, lanes, loadstore, tensor_core  # noqa: F401 (they register their instructions)
from .launch import Emulated, Launch, compiling_for, emulate  # noqa: F401
from .machine import EmulatorError, Machine, Schedule  # noqa: F401
from .memory import Global  # noqa: F401
from .parser import PtxError, parse  # noqa: F401
from .program import Program  # noqa: F401
