"""Record what an H200 returns for `hopper_instructions` and `hopper_layers`, in a file for `test_h200.py`.

    python -m tests.kernels.record_h200 tests/data/h200.npz              # on a machine with the GPU, under a minute
    python -m tests.kernels.record_h200 --emulate dry.npz                # the same on the emulator, to try the script

Each group of cases runs in its own process, and again without a case that failed, so that no case spoils another.
The driver gets the PTX as text; the layers run as the library runs them.
"""

import argparse
import ctypes
import importlib
import json
import pickle
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from tests.kernels.hopper_instructions import Map

HOPPER = "tests.kernels.hopper_instructions"  # a module with GROUPS of cases, {group: {name: case}}
FILE = Path(__file__).parent / "data" / "h200.npz"
LAYERS = "layers"
REFUSED = "an illegal instruction was encountered"
LIMIT = 120  # seconds for a group


# ---- the file ----
def save(path, about, records):
    """Write records: {name: (checksum of the inputs, outputs)}; no outputs: refused. All bytes are in one array, which
    compresses best."""
    index, parts, at = {}, [], 0
    for name, (checksum, outputs) in records.items():
        places = []
        for array in outputs:
            places.append([str(array.dtype), list(array.shape), at])
            parts.append(np.ascontiguousarray(array).view(np.uint8).ravel())
            at += array.nbytes
        index[name] = [checksum, places]
    text = json.dumps({"about": about, "index": index}).encode()
    np.savez_compressed(path, data=np.concatenate(parts), index=np.frombuffer(text, np.uint8))


def load(path=FILE):
    """(about, {name: (checksum, outputs)})"""
    with np.load(path) as file:
        data, text = file["data"], json.loads(file["index"].tobytes())
    read = lambda dtype, shape, at: np.frombuffer(data, dtype, int(np.prod(shape)), at).reshape(shape)
    records = {n: (checksum, [read(*place) for place in places]) for n, (checksum, places) in text["index"].items()}
    return text["about"], records


# ---- a GPU, through the driver ----
class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]  # fmt: skip


MAX_DYNAMIC_SHARED, CLUSTER_DIMENSION = 8, 4  # CUfunction_attribute, CUlaunchAttributeID
ERROR_LOG, ERROR_LOG_SIZE = 5, 6  # CUjit_option
TYPES = {"u8": 0, "u16": 1, "u32": 2, "f16": 6, "f32": 7, "bf16": 9}  # CUtensorMapDataType


class Device:
    """The first GPU of this machine; it runs PTX text."""

    def __init__(self):
        self.driver, self.modules = ctypes.CDLL("libcuda.so.1"), {}
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self.call("cuDeviceGetName", name, 100, device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.about = f"{name.value.decode()}, driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"

    def call(self, name, *arguments):
        status = getattr(self.driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {status}, {(text.value or b'').decode()}")

    def module(self, ptx):
        if ptx not in self.modules:
            module, log = ctypes.c_void_p(), ctypes.create_string_buffer(8192)
            options = (ctypes.c_int * 2)(ERROR_LOG, ERROR_LOG_SIZE)
            values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
            try:
                self.call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode() + b"\0", 2, options, values)
            except RuntimeError as error:
                raise RuntimeError(f"{error}\n{log.value.decode()}") from None
            self.modules[ptx] = module
        return self.modules[ptx]

    def tensor_map(self, map, address):
        """The map's 128 bytes, at an address aligned to 64, as the driver requires."""
        room = ctypes.create_string_buffer(192)
        aligned = -(-ctypes.addressof(room) // 64) * 64
        rank = len(map.dims)
        dims = (ctypes.c_uint64 * rank)(*map.dims)
        strides = (ctypes.c_uint64 * max(1, rank - 1))(*map.strides)
        box, steps = (ctypes.c_uint32 * rank)(*map.box), (ctypes.c_uint32 * rank)(*[1] * rank)
        swizzle, promotion = (0, 32, 64, 128).index(map.span), (0, 64, 128, 256).index(map.promotion)
        self.call("cuTensorMapEncodeTiled", ctypes.c_void_p(aligned), TYPES[map.kind], rank, ctypes.c_void_p(address),
                  dims, strides, box, steps, 0, swizzle, promotion, 0)  # fmt: skip
        return ctypes.string_at(aligned, 128)

    def run(self, case):
        """The outputs of a case, followed by the bytes of its maps without the address."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self.module(case.ptx), case.kernel.encode())
        self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, case.shared)
        pointers = {}
        for i, array in enumerate(case.arguments):
            if not isinstance(array, Map):
                pointers[i] = ctypes.c_uint64()
                self.call("cuMemAlloc_v2", ctypes.byref(pointers[i]), ctypes.c_size_t(array.nbytes))
                self.copy("cuMemcpyHtoD_v2", pointers[i], np.ascontiguousarray(array))
        maps = {i: self.tensor_map(m, pointers[m.argument].value) for i, m in enumerate(case.arguments)
                if isinstance(m, Map)}  # fmt: skip
        values = [pointers[i] if i in pointers else ctypes.create_string_buffer(maps[i], 128)
                  for i in range(len(case.arguments))]  # fmt: skip
        parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        three = lambda n: (ctypes.c_uint * 3)(*(n if isinstance(n, tuple) else (n, 1, 1)))
        attribute = _Attribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(case.cluster, 1, 1))
        config = _Config(three(case.grid), three(case.block), case.shared, None, ctypes.addressof(attribute),
                         int(case.cluster > 1))  # fmt: skip
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, parameters, None)
        self.call("cuCtxSynchronize")
        outputs = []
        for i in case.outputs:
            outputs.append(np.empty_like(case.arguments[i]))
            self.copy("cuMemcpyDtoH_v2", pointers[i], outputs[-1])
        for pointer in pointers.values():
            self.call("cuMemFree_v2", pointer)
        return outputs + [np.frombuffer(bytes(8) + raw[8:], np.uint8) for raw in maps.values()]

    def copy(self, name, pointer, array):
        host = ctypes.c_void_p(array.ctypes.data)
        pair = (pointer, host) if name.startswith("cuMemcpyHtoD") else (host, pointer)
        self.call(name, *pair, ctypes.c_size_t(array.nbytes))


# ---- one group, in a process of its own ----
def bits(tensor):
    import torch

    of = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.detach().contiguous().cpu().view(of).numpy().copy()


def layer_checksum(layer):
    """A hash of the inputs only: the kernels and their tiles may change."""
    first, *rest = layer.inputs()
    tensors = first.state_dict().values() if hasattr(first, "state_dict") else [first]
    return zlib.crc32(repr(([zlib.crc32(bits(t).tobytes()) for t in (*tensors, *rest)],)).encode())


def record_layer(layer, device):
    """The outputs of every launch, one after another."""
    from tests.kernels.hopper_layers import every_launch, outputs_of

    outputs = []

    def listener(kernel, run, values):
        run()
        outputs.extend(bits(tensor) for tensor in outputs_of(kernel, values))

    with every_launch(listener):
        layer.run(device)
    return outputs


def record_here(group, skip, emulate, cases=HOPPER):
    """Yield (None, what runs the cases), then (name,) before and (name, checksum, outputs) after each case."""
    if group != LAYERS:
        device = None if emulate else Device()
        yield None, "" if emulate else device.about
        for name, case in importlib.import_module(cases).GROUPS[group].items():
            if name not in skip:
                yield (name,)
                yield name, case.checksum, case.emulated() if emulate else device.run(case)
        return
    import cutlass
    import torch

    from tests.kernels import hopper_layers

    yield None, f"torch {torch.__version__}, CuTe DSL {cutlass.__version__}"
    with ExitStack() as stack:
        if emulate:
            from tests.kernels.emulator_sm90 import on_emulator

            stack.enter_context(on_emulator())
        for name, layer in hopper_layers.LAYERS.items():
            if name not in skip:
                yield (name,)
                yield name, layer_checksum(layer), record_layer(layer, "cpu" if emulate else "cuda")


# ---- all groups ----
def record(group, emulate, cases=HOPPER):
    """(what ran it, {name: (checksum, outputs)}, {name: why it failed}) of a group; continues after a failed case."""
    start, about, records, failed = time.time(), "", {}, {}
    whole = False
    while not whole and len(failed) < 5 and group not in failed:
        command = [sys.executable, "-m", "tests.kernels.record_h200", "--group", group, "--cases", cases]
        command += ["--skip", json.dumps([*records, *failed])] + ["--emulate"] * emulate
        with tempfile.NamedTemporaryFile() as part, tempfile.TemporaryFile() as errors:
            try:
                done = subprocess.run([*command, part.name], stdout=errors, stderr=errors, timeout=LIMIT)
                whole = done.returncode == 0
            except subprocess.TimeoutExpired:
                errors.write(f"no end after {LIMIT} s".encode())
            found = pickles(part.name)
            about = next((line[1] for line in found if line[0] is None), about)
            records.update((name, rest) for name, *rest in found if len(rest) == 2)
            if not whole:
                errors.seek(0)
                name, why = found[-1][0] if found else group, errors.read().decode(errors="replace")
                case = importlib.import_module(cases).GROUPS.get(group, {}).get(name)
                if case and case.refused and (case.refused if emulate else REFUSED) in why:
                    records[name] = case.checksum, []
                else:
                    failed[name] = why
    print(f"{group}: {len(records)} recorded, {len(failed)} failed, {time.time() - start:.1f} s", flush=True)
    return about, records, failed


def record_all(groups, emulate, cases=HOPPER):
    """([what ran them], {name: (checksum, outputs)}, {name: why it failed}), with several groups at a time."""
    records, failed, about = {}, {}, []
    with ThreadPoolExecutor(2 if emulate else len(groups)) as pool:
        for one, found, wrong in pool.map(lambda group: record(group, emulate, cases), groups):
            about += [one] * (one not in about)
            records.update(found)
            failed.update(wrong)
    return about, records, failed


def pickles(path):
    found = []
    with open(path, "rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            found.append(pickle.load(file))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, default=FILE)
    parser.add_argument("--emulate", action="store_true", help="on the emulator in place of the GPU")
    parser.add_argument("--cases", default=HOPPER, help="the module that has them")
    parser.add_argument("--group", help="this one only, as pickles")
    parser.add_argument("--skip", type=json.loads, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        with open(options.out, "wb", buffering=0) as file:
            for result in record_here(options.group, options.skip, options.emulate, options.cases):
                file.write(pickle.dumps(result))
        return 0
    begin = time.time()
    groups = [*importlib.import_module(options.cases).GROUPS] + [LAYERS] * (options.cases == HOPPER)
    about, records, failed = record_all(groups, options.emulate, options.cases)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = "the emulator" if options.emulate else "; ".join(about) + time.strftime("; %Y-%m-%d")
    save(options.out, text, records)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB from {text}, {time.time() - begin:.0f} s")
    for name, why in failed.items():
        print(f"--- failed, {name}\n{why[-1500:]}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
