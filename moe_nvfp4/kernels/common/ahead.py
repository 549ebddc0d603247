"""Compiling before the first call: which kernels a layer can need, and building them in several processes.

The kernel of a launch depends on the number of tokens only through `planned_tokens`, which has a few hundred values.
So a backend's own code is run once for each of them, on meta tensors, and its launches are noted instead of made: that
gives every kernel that any number of tokens can need. No separate list exists that could disagree with the code.

A built kernel is a file in the cache folder, named by a hash of this package's kernel sources and of what it was
compiled for. Where it cannot be kept, the next process builds it again. Wheels bring files of some kernels
(`.ci/kernels`), which are copied to the cache folder when they are needed.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from moe_nvfp4.cache import CHECKSUM, own_folder, try_to_keep
from moe_nvfp4.child import interpreter
from moe_nvfp4.devices import cores
from moe_nvfp4.kernels.backend import Gpu
from moe_nvfp4.progress import progress_bar

_WORKER = f"{__package__}.worker"


# ---- numbers of tokens ---------------------------------------------------------------------------


MAX_ROWS = 1 << 17  # most assignments that are planned for: more run with the same kernels, or in several calls


def planned_tokens(T: int, top_k: int = 1) -> int:
    """The number of tokens that T tokens are planned as: T up to 64, then rounded up to one of 32 steps per octave."""
    step = 1 << max(0, (T - 1).bit_length() - 6)
    return min(-(-T // step) * step, max(1, MAX_ROWS // max(1, top_k)))


def token_counts(top_k: int = 1) -> Iterator[int]:
    """Every value of `planned_tokens(T, top_k)`, T > 0."""
    T = 0
    while (after := planned_tokens(T + 1, top_k)) > T:
        yield (T := after)


# ---- what is launched ----------------------------------------------------------------------------


class Build(NamedTuple):
    """One kernel to build: the `Variants` of this module and name, with these arguments."""

    module: str
    name: str
    arguments: tuple

    @property
    def variants(self) -> Variants:
        variants: Variants = getattr(import_module(self.module), self.name)
        return variants


class Variants:
    """The kernels that one function makes from its arguments, which must be hashable and picklable."""

    def file(self, *arguments: Any) -> Path | None:
        """The file where the kernel is or would be kept; None if nothing can be kept."""
        raise NotImplementedError

    def build(self, *arguments: Any) -> None:
        """Compile the kernel into `file`. The GPU need not be there."""
        raise NotImplementedError

    def load(self, gpu: Gpu, *arguments: Any) -> None:
        """Load the kernel onto the GPU, so that its first launch waits for nothing."""
        raise NotImplementedError


class _Notes(NamedTuple):
    gpu: Gpu
    jobs: dict[Build, None]


_notes: ContextVar[_Notes | None] = ContextVar("notes", default=None)


@contextmanager
def noting(gpu: Gpu) -> Iterator[dict[Build, None]]:
    """Inside the context, launches are noted in the set that it yields instead of made. Meta tensors stand for tensors
    on `gpu`."""
    token = _notes.set(notes := _Notes(gpu, {}))
    try:
        yield notes.jobs
    finally:
        _notes.reset(token)


def noted_gpu() -> Gpu | None:
    """The GPU that launches are noted for; None outside `noting`."""
    notes = _notes.get()
    return None if notes is None else notes.gpu


def note(module: str, name: str, *arguments: Any) -> None:
    """Note the launch of this `Build`."""
    notes = _notes.get()
    assert notes is not None
    notes.jobs[Build(module, name, arguments)] = None


# ---- files ---------------------------------------------------------------------------------------

KERNELS = Path(__file__).parents[1]
BESIDE = ("format.py", "weights.py")  # what is compiled takes numbers from these, too
BROUGHT = KERNELS / "compiled.zip"
ORIGIN = "origin"  # the file with the hash of a Hub kernel's sources, and that of those they were made from


@cache
def kernel_folder() -> Path | None:
    try:
        return own_folder("kernels")
    except OSError as error:
        print(f"moe_nvfp4: compiled kernels are not kept: {error}", file=sys.stderr)
        return None


def kernel_file(suffix: str, *parts: object) -> Path | None:
    """The file of a kernel that is compiled from this package's sources for `parts`; None if none can be kept. If the
    package brought it, it is there."""
    if (folder := kernel_folder()) is None:
        return None
    key = hashlib.sha256(sources().encode())
    for part in parts:
        key.update(b"\0" + str(part).encode())
    file = folder / f"{key.hexdigest()[:32]}{suffix}"
    if (archive := _brought()) and file.name in archive.NameToInfo and not file.exists():
        data = archive.read(file.name)
        try_to_keep(file, lambda name: Path(name).write_bytes(data[:-CHECKSUM]))
    return file


@cache
def _brought() -> zipfile.ZipFile | None:
    """The kernels that came with this package."""
    return zipfile.ZipFile(BROUGHT) if BROUGHT.exists() else None


@cache
def sources() -> str:
    """The hash of the sources that kernels are compiled from. A kernel of the Hub has that of the package it was made
    from, whose compiled kernels are its own: only imports differ (`moe_nvfp4.integrations.hub`)."""
    own = hash_of(KERNELS, ".py")
    try:
        written, origin = (KERNELS / ORIGIN).read_text().split()
    except FileNotFoundError:
        return own
    return origin if written == own else own  # own if somebody changed them


def hash_of(kernels: Path, *suffixes: str) -> str:
    """The hash of the files with these suffixes in the folder `kernels` of a package, and of BESIDE."""
    files = sorted(file for file in kernels.rglob("*") if file.suffix in suffixes)
    content = b"".join(file.read_bytes() for file in [*files, *(kernels.parent / name for name in BESIDE)])
    return hashlib.sha256(content).hexdigest()


# ---- building ------------------------------------------------------------------------------------

compilations = 0  # kernels that calls had to wait for, in this process


def count_compilation(what: str) -> None:
    """Count a kernel that a call has to wait for, and say so on stderr."""
    global compilations
    compilations += 1
    print(f"moe_nvfp4: compiling {what}, a few seconds, once", file=sys.stderr)


def build(jobs: Iterable[Build], gpu: Gpu, workers: int | None = None, progress: bool = True) -> int:
    """Build the kernels for `gpu` that are not in the cache folder, in separate processes; returns how many.

    Several ranks of one machine share the work: each has a random order, and skips files that exist by then.
    RuntimeError with the compiler's message if a kernel cannot be compiled.
    """
    files = [(job, job.variants.file(*job.arguments)) for job in jobs]
    missing = [(job, file) for job, file in files if file is not None and not file.exists()]
    if not missing:
        return 0
    random.shuffle(missing)
    workers = min(len(missing), workers or min(16, cores()))
    idle: SimpleQueue[_Worker] = SimpleQueue()
    started = []
    try:
        for _ in range(workers):
            started.append(_Worker(gpu))
            idle.put(started[-1])

        def run(item: tuple[Build, Path]) -> None:
            worker = idle.get()
            try:
                if not item[1].exists():
                    worker.build(item[0])
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(workers) as pool:
            done: Iterable[None] = pool.map(run, missing)
            for _ in progress_bar(done, total=len(missing), desc="moe_nvfp4: compiling kernels", show=progress):
                pass
    finally:
        for worker in started:
            worker.end()
    return len(missing)


class _Worker:
    """A process that builds kernels, one at a time. It sees no GPU and imports nothing of the main program."""

    def __init__(self, gpu: Gpu) -> None:
        self.log = tempfile.TemporaryFile()
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": gpu.architecture, "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "0",
        }  # fmt: skip
        self.process = subprocess.Popen(
            interpreter(_WORKER), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log,
        )  # fmt: skip

    def build(self, job: Build) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            pickle.dump(tuple(job), self.process.stdin)
            self.process.stdin.flush()
            error = pickle.load(self.process.stdout)
        except (OSError, EOFError):
            self.log.seek(0)
            error = f"the process ended: {self.log.read().decode(errors='replace')[-2000:]}"
        if error is not None:
            raise RuntimeError(f"{job.name}{job.arguments} could not be compiled: {error}")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()
