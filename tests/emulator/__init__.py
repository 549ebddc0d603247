"""A functional model of the GPU: it runs a kernel's PTX on the CPU, and stops where the result would be undefined.

    from tests.emulator import emulate
    emulate(ptx, [x, y, 3], grid=(4, 1, 1), block=(128, 1, 1), shared=49152, schedule="lazy")

It knows the instructions that this project's kernels use; an unknown one is an error that names its line. Run a
function compiled by CuTe DSL with Emulated, and debug one with `python -m tests.emulator`.

    parser      PTX text -> instructions             machine      warps, CTAs, scheduler, asynchronous operations
    program     instructions -> Python functions     memory       global, shared and Tensor Memory, and who uses them
    alu, formats        registers of one lane        races        accesses that nothing orders
    lanes               lanes together               launch       how a kernel is started
    loadstore, copies, tensor_maps  memory                       timeline     who waited where
    barriers            synchronization              stream       kernels one after another
    tensor_core, tcgen05  MMAs                       counts       instructions, cycles of shared memory

What it finds: wrong results; deadlocks; addresses out of bounds, misaligned, never written; wrong transaction counts;
use of what a copy or an MMA is still reading or writing; missing barriers, griddepcontrol.wait, proxy fences,
wgmma.fence and tcgen05.fence; mbarriers used by a warp that cannot know that they are initialised, or that their CTA
has not ended; TMEM allocated, freed or addressed wrongly; descriptors and tensor maps with bits that nobody sets on
purpose. A missing wait shows under schedule="lazy", where asynchronous work happens as late as the waits allow.

What it does not show: time; how tcgen05.mma adds (one float64 sum per instruction here); that ptxas may contract mul
and add without .rn; the error of approximations; races in global memory; CTAs that share an SM. Generic accesses are
sequentially consistent. README.md says more.

`test_h200.py` compares it with what an H200 returned: every instruction that sm_90a has, and the Hopper kernels.
"""

# they register their instructions
from tests.emulator import barriers, copies, lanes, loadstore, tcgen05, tensor_core, tensor_maps  # noqa: F401
from tests.emulator.launch import PTX_ONLY, Emulated, Launch, compile_for, compiling_for, emulate  # noqa: F401
from tests.emulator.machine import EmulatorError, Machine, Schedule  # noqa: F401
from tests.emulator.memory import Global  # noqa: F401
from tests.emulator.parser import PtxError, parse  # noqa: F401
from tests.emulator.program import Program  # noqa: F401
