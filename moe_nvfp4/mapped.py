"""Experts whose weights stay in their files, for models that are larger than the memory.

A table takes the place of a projection's codes and block scales: uint8 [E, parts, 2, 8], for each expert the addresses
of its codes and of its block scales in memory that the files are mapped to, each with a checksum. parts is 2 where gate
and up are separate matrices. This is the cpu backend's `Layout`. The kernels read the files' bytes unchanged: the
system loads them when the kernels ask (kernels/cpu/cpu_mapped.h), keeps them as long as it has room, and shares them
between processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Matrix(NamedTuple):
    """Where codes [N, K/2] and block scales [N, K/16] lie: for either, its file and the offset of its first byte."""

    codes: tuple[Path, int]
    sf: tuple[Path, int]


class MappedFile:
    """A file that is mapped into this process; the system reads its pages when they are needed."""

    def __init__(self, path: Path):
        with open(path, "rb") as f:
            status = os.fstat(f.fileno())
            self.path, self.size = path, status.st_size
            self.pages = mmap.mmap(f.fileno(), self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
            self.address = torch.frombuffer(self.pages, dtype=torch.uint8).data_ptr()

        # For a file that is not ours to write, the system reports all pages as in memory, whether they are or not.
        self.known = os.geteuid() in (0, status.st_uid) or os.access(path, os.W_OK)

    def at(self, start: int, size: int) -> int:
        if start < 0 or start + size > self.size:
            raise ValueError(f"{self.path} has {self.size} bytes, but {start + size} are needed: download it again")
        return self.address + start

    @property
    def whole(self) -> bool:
        """Whether the mapped file still has all its bytes (by now its name may be another file's)."""
        return self.pages.size() >= self.size

    def __deepcopy__(self, memo: dict) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"weights that stay in their files ({self.path}) cannot go to another process: load the model there, or "
            "load it here without map_files"
        )


_files: WeakValueDictionary[tuple[int, int], MappedFile] = WeakValueDictionary()  # by device and inode
_strange: list[Path] = []  # files that are not `known`


def known() -> bool:
    """Whether the system tells which pages are in memory, for every file that was opened so far."""
    return not _strange


def opened() -> list[MappedFile]:
    """The files that are mapped now; they stay mapped while the list lives."""
    return list(_files.values())


def _open(path: Path) -> MappedFile:
    status = path.stat()
    file = _files.get(key := (status.st_dev, status.st_ino))
    if file is None or file.size != status.st_size:
        file = _files[key] = MappedFile(path)
        if not file.known:
            _strange.append(path)
    return file


@dataclass(frozen=True)
class MappedProjection:
    """What `read` and `Backend.restore` need besides a table: the matrices' sizes and the files that hold them."""

    rows: int
    columns: int
    files: tuple[MappedFile, ...]


def table(experts: Sequence[Sequence[Matrix]], rows: int, columns: int) -> tuple[Tensor, MappedProjection]:
    """The table uint8 [E, parts, 2, 8] of where each expert's parts lie; rows, columns: N and K (in blocks of 16).

    ValueError for a file that is too short to hold them.
    """
    files: dict[Path, MappedFile] = {}
    addresses = []
    count = rows // len(experts[0]) * columns
    for parts in experts:
        for matrix in parts:
            for (path, start), size in zip(matrix, (count // 2, count // 16), strict=True):
                if path not in files:
                    files[path] = _open(path)
                addresses.append(_sealed(files[path].at(start, size)))
    found = torch.tensor(addresses, dtype=torch.int64, device="cpu").view(len(experts), -1, 2, 1)
    return found.view(torch.uint8), MappedProjection(rows, columns, tuple(files.values()))


def _sealed(address: int) -> int:
    """The entry of a table for `address`: its 48 bits, below 16 that belong to them. cpu.c checks these, since whoever
    averages or rescales parameters would change the addresses."""
    assert 0 <= address < 1 << 48
    seal = (address * 0x9E3779B97F4A7C15 >> 48 & 0xFFFF) ^ 0x5EA1
    return address | (seal - (seal >> 15 << 16)) << 48  # as int64


EDITED = (
    "a parameter that was edited has the addresses of experts that stay in their files (map_files), not weights: load "
    "the model again, without map_files to change its experts, and leave uint8 parameters out of averages and casts"
)


def read(addresses: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Copies of the codes [E, N, K/2] and block scales [E, N, K/16] that a table points to.

    OSError if a file does not have them any more; ValueError if the table was edited.
    """
    if any(not file.whole for file in _files.values()):
        raise OSError(loss())
    E, parts = addresses.shape[:2]
    found = (
        torch.empty(E, rows, columns // 2, dtype=torch.uint8),
        torch.empty(E, rows, columns // 16, dtype=torch.uint8),
    )
    for e, of_parts in enumerate(addresses.view(torch.int64).view(E, parts, 2).tolist()):
        for part, where in enumerate(of_parts):
            for to, entry in zip(found, where, strict=True):
                to, address = to[e].chunk(parts)[part], entry & ((1 << 48) - 1)
                if _sealed(address) != entry:
                    raise ValueError(EDITED)
                ctypes.memmove(to.data_ptr(), address, to.nbytes)
    return found


SAVED = (
    "the experts of this layer stay in their files, and are saved already: copy those, or load the model without "
    "map_files and save that"
)


class StandIn(Tensor):
    """In a state dict, for codes or block scales that stay in their files: it has their shape and dtype. Reading or
    saving it is an error, as files without the weights would look complete."""

    @staticmethod
    def __new__(cls, *shape: int) -> Self:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.uint8, device=torch.device("cpu"))

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"StandIn{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(SAVED)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(SAVED)

    data_ptr = untyped_storage = __reduce_ex__ = __deepcopy__ = _refuse


def loss() -> str:
    """The error message for mapped memory whose file is gone or shorter."""
    shorter = sorted(str(file.path) for file in _files.values() if not file.whole)
    which = ", ".join(shorter) or "one of the files"
    return (
        f"{which} became shorter, was deleted or cannot be read any more, and experts are mapped from it (map_files): "
        "restore the checkpoint and load the model again; never overwrite files of a running model, replace them"
    )
