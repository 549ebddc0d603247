"""Ways to start a kernel: PTX with its arguments, or a function compiled by CuTe DSL. Its own host code then decides
grid, shared memory and parameters (tensor maps included), but its launches come here instead of to a GPU."""

import ast
import ctypes
import struct
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.emulator.machine import EmulatorError, Machine
from tests.emulator.memory import EARLIER, UNWRITTEN, WRITTEN, Global, Memory
from tests.emulator.parser import parse
from tests.emulator.program import Program

# DLPack: (type code, bits, lanes) by the name of the dtype in torch or NumPy.
DTYPES = {
    "int8": (0, 8, 1), "int16": (0, 16, 1), "int32": (0, 32, 1), "int64": (0, 64, 1),
    "uint8": (1, 8, 1), "uint16": (1, 16, 1), "uint32": (1, 32, 1), "uint64": (1, 64, 1),
    "float16": (2, 16, 1), "float32": (2, 32, 1), "float64": (2, 64, 1), "bfloat16": (4, 16, 1), "bool": (6, 8, 1),
    "float8_e4m3fn": (10, 8, 1), "float8_e5m2": (12, 8, 1), "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}  # fmt: skip
CUDA = 2  # DLPack's device type: the host code checks it
NONE, INT, FLOAT, TENSOR = 0, 1, 3, 7  # type indices of TVM-FFI's values
CLUSTER_DIMENSION = 4  # cudaLaunchAttributeID


@dataclass
class Launch:
    kernel: str
    grid: tuple
    block: tuple
    shared: int
    cluster: tuple = (1, 1, 1)
    parameters: bytes = b""


@dataclass
class Tensor:
    """What the emulator needs to know of a torch tensor or a NumPy array."""

    host: int  # address of its allocation,
    size: int  # the bytes of that,
    offset: int  # where in it the tensor starts
    extent: int  # and the bytes from its first element to the end of its last
    shape: tuple
    strides: tuple  # in elements
    dtype: str
    kept: object = field(repr=False, default=None)

    @classmethod
    def of(cls, value):
        if hasattr(value, "data_ptr"):
            if value.device.type != "cpu":
                raise ValueError("the emulator works on CPU tensors")
            strides, item, storage = tuple(value.stride()), value.element_size(), value.untyped_storage()
            address, dtype = value.data_ptr(), str(value.dtype).removeprefix("torch.")
            host, size = storage.data_ptr(), storage.nbytes()
        else:
            strides, item, base = tuple(s // value.itemsize for s in value.strides), value.itemsize, value
            while isinstance(base.base, np.ndarray):
                base = base.base
            address, dtype = value.__array_interface__["data"][0], str(value.dtype)
            host, size = base.__array_interface__["data"][0], base.nbytes
        shape = tuple(value.shape)
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        return cls(host, size, address - host, extent * item, shape, strides, dtype, value)

    def place(self, memory, name="tensor", state=WRITTEN):
        """The tensor's address on the device. An empty tensor has none, but the host code wants an aligned address."""
        if not self.extent:
            return Global.ALIGNMENT
        name = f"{name} ({self.dtype} {list(self.shape)})"
        return memory.place(name, self.host, self.size, self.offset, self.extent, state)

    def keep_for_later(self, memory):
        """Forbid the use of this memory before griddepcontrol.wait, if the kernel can reach it at all."""
        if self.extent and self.host in memory.copies:
            memory.copies[self.host][1].state[self.offset : self.offset + self.extent] |= EARLIER


class Far:
    """A tensor too large for memory. Only its `windows` exist, {first element: NumPy array}, at an invented address; a
    kernel that touches anything else of it stops. Windows begin and end at multiples of 16 bytes."""

    BASE, ROOM = 1 << 44, 1 << 40
    count = 0

    def __init__(self, shape, windows, strides=None):
        self.shape, self.windows, self.dtype = shape, windows, str(next(iter(windows.values())).dtype)
        self.strides = strides or tuple(int(np.prod(shape[i + 1 :], dtype=object)) for i in range(len(shape)))
        self.address = Far.BASE + Far.ROOM * Far.count
        Far.count += 1

    def place(self, memory, name="tensor", state=WRITTEN):
        for first, array in self.windows.items():
            data = array.reshape(-1).view(np.uint8)
            base = self.address + first * array.itemsize
            memory.add(Memory(f"{name}, from {first} on", base, data, np.full(len(data), state, np.uint8), memory))


def is_tensor(value):
    return hasattr(value, "data_ptr") or isinstance(value, np.ndarray)


def device_memory(values, unwritten=(), after_wait=()):
    """Global memory with these tensors. `unwritten`: those that the kernel must not read before it writes them.
    `after_wait`: those that the kernel before uses under programmatic dependent launch, which must not be touched
    before griddepcontrol.wait."""
    memory = Global()
    for number, value in enumerate(values):
        if isinstance(value, Far):
            value.place(memory, f"tensor {number}")
        elif is_tensor(value):
            Tensor.of(value).place(memory, f"tensor {number}")
    for value in unwritten:
        Tensor.of(value).place(memory, state=UNWRITTEN)
    for value in after_wait:
        Tensor.of(value).keep_for_later(memory)
    return memory


def address_of(value, memory):
    tensor = Tensor.of(value)
    return memory.copies[tensor.host][1].base + tensor.offset if tensor.extent else Global.ALIGNMENT


# ---- PTX ----
PROGRAMS = {}


def programs(ptx):
    """{kernel name: Program}; each text is translated only once."""
    if ptx not in PROGRAMS:
        PROGRAMS[ptx] = {name: Program(kernel) for name, kernel in parse(ptx).items()}
    return PROGRAMS[ptx]


def pack(program, arguments, memory):
    """The parameter bytes: tensors become pointers, numbers have the parameter's size, bytes stay as they are."""
    kernel, data = program.kernel, bytearray(program.parameter_bytes)
    if len(arguments) != len(kernel.parameters):
        raise ValueError(
            f"{kernel.name} has {len(kernel.parameters)} parameters, {len(arguments)} arguments were given"
        )
    for parameter, value in zip(kernel.parameters, arguments, strict=True):
        if isinstance(value, Far):
            raw = struct.pack("<Q", value.address)
        elif is_tensor(value):
            raw = struct.pack("<Q", address_of(value, memory))
        elif isinstance(value, float):
            raw = struct.pack("<f" if parameter.size == 4 else "<d", value)
        elif isinstance(value, (bytes, bytearray)):
            raw = bytes(value)
        else:
            raw = (int(value) & ((1 << (8 * parameter.size)) - 1)).to_bytes(parameter.size, "little")
        if len(raw) != parameter.size:
            raise ValueError(f"{parameter.name} has {parameter.size} bytes, its argument has {len(raw)}")
        at = program.parameters[parameter.name]
        data[at : at + len(raw)] = raw
    return bytes(data)


def emulate(ptx, arguments, grid, block, shared=0, cluster=(1, 1, 1), kernel=None, schedule="eager", unwritten=(),
            after_wait=(), buffers=(), **options):  # fmt: skip
    """Run one kernel of a PTX text; its tensors change in place. Returns the Machine.

    shared: bytes of dynamic shared memory. unwritten, after_wait: see device_memory. buffers: tensors that the kernel
    reaches through pointers in memory. options: see Machine.
    """
    found = programs(ptx)
    program = found[kernel] if kernel else next(iter(found.values()))
    memory = device_memory((*arguments, *buffers), unwritten, after_wait)
    parameters = pack(program, arguments, memory)
    launch = Launch(program.kernel.name, _three(grid), _three(block), shared, _three(cluster), parameters)
    return start(program, launch, memory, schedule, **options)


def _three(size):
    size = (size,) if isinstance(size, int) else tuple(size)
    return size + (1,) * (3 - len(size))


def start(program, launch, memory, schedule="eager", **options):
    machine = Machine(program, launch.grid, launch.block, launch.shared, launch.cluster, memory, launch.parameters,
                      schedule, **options)  # fmt: skip
    try:
        return machine.run()
    finally:
        memory.fetch()


# ---- captured launches ----
def save(path, ptx, launches, memory):
    arrays = {"ptx": np.array(ptx), "launches": np.array([repr(vars(launch)) for launch in launches])}
    for number, buffer in enumerate(memory.buffers):
        arrays[f"name{number}"], arrays[f"base{number}"] = np.array(buffer.name), np.array(buffer.base)
        arrays[f"bytes{number}"], arrays[f"state{number}"] = buffer.bytes, buffer.state
    np.savez_compressed(path, **arrays)


def restore(path):
    """(ptx, launches, memory); the buffers keep the addresses that they had, since the parameters hold these."""
    arrays, memory = np.load(path), Global()
    number = 0
    while f"base{number}" in arrays:
        name, base = str(arrays[f"name{number}"]), int(arrays[f"base{number}"])
        memory.bases.append(base)
        memory.buffers.append(Memory(name, base, arrays[f"bytes{number}"], arrays[f"state{number}"], memory))
        number += 1
    return str(arrays["ptx"]), [Launch(**ast.literal_eval(str(text))) for text in arrays["launches"]], memory


# ---- functions compiled by CuTe DSL ----
OPTIONS = "--enable-tvm-ffi"  # of cute.compile
PTX_ONLY = f"{OPTIONS} --ptxas-options '-O0'"  # where no one looks at the cubin: in four fifths of the time


@contextmanager
def compiling_for(architecture):
    """A context in which cute.compile makes code for sm_90a, sm_100a, ... and keeps PTX and cubin; no GPU is needed."""
    from cutlass.cutlass_dsl import CuTeDSL

    dsl = CuTeDSL._get_dsl()
    settings = dsl.envar
    with tempfile.TemporaryDirectory() as folder:
        wanted = {"arch": architecture, "dump_dir": folder, "disable_file_caching": True}
        wanted |= {"keep_ptx": True, "keep_cubin": True}
        kept = {name: settings._arch if name == "arch" else getattr(settings, name) for name in wanted}
        dsl._runtime_can_run_compiled = lambda *architectures: False  # else it also links a function to call here
        try:
            for name, value in wanted.items():
                setattr(settings, name, value)
            yield
        finally:
            del dsl._runtime_can_run_compiled
            for name, value in kept.items():
                setattr(settings, name, value)


def compile_for(architecture, kernel, arguments, options=OPTIONS):
    """The compiled function of `kernel`, which takes `arguments` and a stream, with its PTX and cubin; see Emulated."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with compiling_for(architecture):
        return cute.compile(kernel, *arguments, stream, options=options)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Any(ctypes.Structure):
    _fields_ = [("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint64)]


class Emulated:
    """A function compiled with cute.compile(..., options=PTX_ONLY), run here instead of on a GPU.

        gemm = Emulated(cute.compile(kernel, ..., options=PTX_ONLY))
        gemm(a, b, out, unwritten=[out], schedule="lazy")      # CPU tensors, changed in place

    Its PTX must have been kept: compile it inside compiling_for(architecture), or set CUTE_DSL_KEEP_PTX=1 in the
    environment before cutlass is imported, or give `ptx`.
    """

    def __init__(self, compiled, ptx=None):
        self.ptx = ptx or getattr(compiled, "__ptx__", None)
        if not self.ptx:
            raise ValueError("the compiled function kept no PTX: set CUTE_DSL_KEEP_PTX=1 before importing cutlass")
        self.programs = programs(self.ptx)
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        compiled.export_to_c(str(folder / "host.o"), function_name="kernel")
        library = folder / "host.so"
        stub = Path(__file__).with_name("stub.c")
        # -Bsymbolic: the stub is used even when cutlass has loaded the real functions into this process.
        command = [
            "cc",
            "-shared",
            "-fPIC",
            "-mcmodel=large",
            "-w",
            "-Wl,-Bsymbolic",
            "-o",
            library,
            stub,
            folder / "host.o",
        ]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.stub_message.restype = ctypes.c_char_p

    def launches(self, *arguments, memory=None):
        """The launches that the host code would start."""
        memory = memory or device_memory(arguments)
        kept, found = [], []
        values = (_Any * len(arguments))(*(self._value(a, memory, kept) for a in arguments))

        def on_launch(name, config, pointers):
            found.append(self._launch(name.decode(), config, pointers))
            return 0

        callback = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        )(on_launch)  # fmt: skip
        self.library.stub_set_launch(callback)
        status = self.library.__getattr__("__tvm_ffi_kernel")(None, values, len(arguments), ctypes.byref(_Any()))
        if status:
            raise ValueError(self.library.stub_message().decode())
        return found

    def __call__(self, *arguments, schedule="eager", unwritten=(), after_wait=(), buffers=(), memory=None,
                 **options):  # fmt: skip
        """Run all launches one after another. Returns their Machines."""
        memory = memory or device_memory((*arguments, *buffers), unwritten, after_wait)
        return [start(self.programs[launch.kernel], launch, memory, schedule, **options)
                for launch in self.launches(*arguments, memory=memory)]  # fmt: skip

    def capture(self, path, *arguments, unwritten=(), after_wait=(), buffers=()):
        """Write all that a run needs to a file, for `python -m tests.emulator PATH`."""
        memory = device_memory((*arguments, *buffers), unwritten, after_wait)
        save(path, self.ptx, self.launches(*arguments, memory=memory), memory)

    @staticmethod
    def _value(argument, memory, kept):
        if is_tensor(argument) or isinstance(argument, Far):
            far = isinstance(argument, Far)
            tensor = argument if far else Tensor.of(argument)
            if tensor.dtype not in DTYPES:
                raise ValueError(f"dtype {tensor.dtype}")
            rank, address = len(tensor.shape), argument.address if far else address_of(argument, memory)
            shape, strides = (ctypes.c_int64 * rank)(*tensor.shape), (ctypes.c_int64 * rank)(*tensor.strides)
            described = _DLTensor(address, CUDA, 0, rank, *DTYPES[tensor.dtype], shape, strides, 0)
            kept.append((described, shape, strides, argument))
            return _Any(TENSOR, 0, ctypes.addressof(described))
        if argument is None:
            return _Any(NONE, 0, 0)
        if isinstance(argument, float):
            return _Any(FLOAT, 0, struct.unpack("<Q", struct.pack("<d", argument))[0])
        return _Any(INT, 0, int(argument) & ((1 << 64) - 1))

    def _launch(self, name, config, pointers):
        """cudaLaunchConfig_t: grid, block, shared memory, stream, attributes."""
        raw = ctypes.string_at(config, 56)
        grid, block = struct.unpack_from("3I", raw, 0), struct.unpack_from("3I", raw, 12)
        (shared,), (attributes,), (count,) = (
            struct.unpack_from(f, raw, at) for f, at in (("Q", 24), ("Q", 40), ("I", 48))
        )
        cluster = (1, 1, 1)
        for i in range(count):
            attribute = ctypes.string_at(attributes + 72 * i, 72)
            if struct.unpack_from("I", attribute)[0] == CLUSTER_DIMENSION:
                cluster = struct.unpack_from("3I", attribute, 8)
        if name not in self.programs:
            raise EmulatorError(f"the host code starts {name!r}, which the PTX does not have")
        program = self.programs[name]
        data = bytearray(program.parameter_bytes)
        for i, parameter in enumerate(program.kernel.parameters):
            at = program.parameters[parameter.name]
            data[at : at + parameter.size] = ctypes.string_at(pointers[i], parameter.size)
        return Launch(name, grid, block, shared, cluster, bytes(data))
