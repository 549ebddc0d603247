"""Checkpoint files: what is in them, read from their headers alone, and files written as a stream.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header size, JSON, data).
Headers and indexes come from strangers: sizes, offsets and file names are checked before use.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# safetensors' own limit; a larger number is not a header but another file format
MAX_HEADER = 100_000_000

# dtype -> bits of an element; F4 and F6 need not fill bytes
BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8,
}  # fmt: skip
ENDS = 64  # bytes at the ends of a tensor that `fingerprint` reads
INDEX = "model.safetensors.index.json"
# In a tensor's name: no model has so many layers or experts
LARGE_NUMBER = re.compile(r"(?<![^.])\d{6,}(?![^.])")


# ---------------------------------------------------------------- headers
def read_headers(files: Iterable[str | os.PathLike]) -> dict[str, dict]:
    """Tensor name -> {"dtype": "BF16", "shape": [...]} of safetensors files, no data read.

    Raises ValueError for a file that is truncated or is not safetensors, and for a tensor that two
    files hold. Other weight files (.bin) are passed over.
    """
    headers: dict[str, dict] = {}
    where: dict[str, Path] = {}
    for path in map(Path, files):
        if path.suffix != ".safetensors":
            continue
        for name, info in read_header(path).items():
            if name in headers:
                raise ValueError(_twice(name, where[name], path))
            headers[name], where[name] = {"dtype": info["dtype"], "shape": info["shape"]}, path
    return headers


def read_header(path: str | os.PathLike) -> dict[str, dict]:
    """The header of one safetensors file, without its metadata: name -> dtype, shape, data_offsets.

    ValueError if it is damaged: every tensor must lie inside the file, fill exactly the bytes that
    its dtype and shape need, and share none with another.
    """
    return _read_header(Path(path))[0]


def _read_header(path: Path) -> tuple[dict[str, dict], int]:
    """The header, and where the data begins."""
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(_damaged(path, f"it has {size} bytes, its header alone needs {length + 8}"))
        try:
            header = json.loads(f.read(length), object_pairs_hook=_no_duplicates)
        except _Duplicate as error:
            raise ValueError(_damaged(path, f"its header names {error} twice")) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(_damaged(path, f"its header is not JSON ({error})")) from None
    if not isinstance(header, dict):
        raise ValueError(_damaged(path, "its header is not a JSON object"))
    header.pop("__metadata__", None)
    if strange := next((name for name in header if LARGE_NUMBER.search(name)), None):
        raise ValueError(f"{path} names a tensor {strange[:200]!r}: no layer or expert has a number of 6 digits")
    end = 0
    for name, info in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        begin, stop = _offsets(path, name, info)
        if begin != end and stop != begin:
            rule = "overlaps another tensor" if begin < end else "leaves bytes that belong to no tensor before it"
            raise ValueError(_damaged(path, f"{name} at bytes {begin} to {stop} {rule} (which ends at {end})"))
        end = max(end, stop)
    if 8 + length + end != size:
        raise ValueError(_damaged(path, f"it has {size} bytes, its header describes {8 + length + end}"))
    return header, 8 + length


class _Duplicate(Exception):
    pass


def _no_duplicates(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        raise _Duplicate(next(n for n in names if names.count(n) > 1))
    return found


def _offsets(path: Path, name: str, info: dict) -> tuple[int, int]:
    """The data_offsets of a header entry, checked against its dtype and shape."""
    try:
        (begin, end), shape, dtype = info["data_offsets"], info["shape"], info["dtype"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(_damaged(path, f"its header entry {name} lacks data_offsets, shape or dtype")) from None
    numbers = [begin, end, *shape] if isinstance(shape, list) else [None]
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError(_damaged(path, f"the offsets or the shape of {name} are not whole numbers from 0"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{path}: {name} has the dtype {dtype!r}, which is not known; known are {', '.join(BITS)}")
    needed = -(-math.prod(shape) * BITS[dtype] // 8)
    if end - begin != needed:
        raise ValueError(_damaged(path, f"{name} has bytes {begin} to {end}, but {dtype} {shape} needs {needed} bytes"))
    return begin, end


def _damaged(path: Path, why: str) -> str:
    return f"{path} is truncated or is not a safetensors file: {why}. Download it again"


def _twice(name: str, a: Path, b: Path) -> str:
    return f"tensor {name} is in {a.name} and in {b.name}: two checkpoints are mixed in one folder; keep one of them"


# ---------------------------------------------------------------- reading
@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `size` bytes of `file` from byte `start` on."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self, offset: int = 0, size: int | None = None) -> Tensor:
        """uint8 [size]: bytes of the tensor, read from the file now. OSError where it cannot be read."""
        size = self.size - offset if size is None else size
        data = torch.empty(size, dtype=torch.uint8, device="cpu")
        view, done = memoryview(data.numpy()), 0
        with open(self.file, "rb", buffering=0) as f:
            f.seek(self.start + offset)
            while done < size:
                count = f.readinto(view[done:])
                if not count:
                    raise OSError(f"{self.file} became shorter while it was read: download it again")
                done += count
        return data

    def tensor(self) -> Tensor:
        return self.read().view(TORCH_DTYPES[self.dtype]).reshape(self.shape)


def fingerprint(tensors: Iterable[Stored]) -> str:
    """sha256 of the first and last bytes of each tensor: what may differ where a file's size and time do not."""
    found, files = hashlib.sha256(), {}
    try:
        for t in tensors:
            if t.file not in files:
                files[t.file] = open(t.file, "rb", buffering=0)
            for at in (t.start, max(t.start, t.start + t.size - ENDS)):
                files[t.file].seek(at)
                found.update(files[t.file].read(min(ENDS, t.size)))
    finally:
        for file in files.values():
            file.close()
    return found.hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and safetensors files; `ignored` weight files belong to no model here."""

    folder: Path
    config: dict
    tensors: dict[str, Stored]
    files: tuple[Path, ...]
    ignored: tuple[Path, ...]


def open_checkpoint(folder: str | os.PathLike) -> Checkpoint:
    """What a folder holds, from config.json, the index and the headers; no weights are read.

    ValueError where these disagree or are damaged: names the file, the rule and the way out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist or is not a folder: name the folder of a checkpoint")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: name the folder of a Hugging Face checkpoint")
    config = _json(folder / "config.json")
    found = sorted(folder.glob("*.safetensors"))
    index = _read_index(folder, found)
    files = tuple(sorted({folder / name for name in index.values()})) if index is not None else _single(folder, found)
    tensors: dict[str, Stored] = {}
    for path in files:
        header, data = _read_header(path)
        for name, info in header.items():
            begin, end = info["data_offsets"]
            if name in tensors:
                raise ValueError(_twice(name, tensors[name].file, path))
            tensors[name] = Stored(path, info["dtype"], tuple(info["shape"]), data + begin, end - begin)
    if index is not None:
        _check_index(folder / INDEX, index, tensors)
    return Checkpoint(folder, config, tensors, files, tuple(p for p in found if p not in files))


def _single(folder: Path, found: list[Path]) -> tuple[Path, ...]:
    if len(found) == 1 and not re.search(r"-of-0*([2-9]|1\d)\d*\.", found[0].name):
        return (found[0],)
    if folder / "model.safetensors" in found and not any("-of-" in p.name for p in found):
        return (folder / "model.safetensors",)
    if not found:
        raise ValueError(f"{folder} has no .safetensors file: save the model with safetensors first")
    raise ValueError(
        f"{folder} has {len(found)} .safetensors file(s) of a split checkpoint, but no {INDEX}: which tensors "
        "belong together is not known; download that file too"
    )


def _read_index(folder: Path, found: list[Path]) -> dict[str, str] | None:
    """Tensor name -> file name, or None without an index."""
    path = folder / INDEX
    if not path.is_file():
        return None
    index = _json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(v, str) for v in index.values()):
        raise ValueError(f"{path} has no weight_map of tensor names and file names: download it again")
    if folder / "model.safetensors" in found and "model.safetensors" not in index.values():
        raise ValueError(f"{folder} has model.safetensors and {INDEX}: two checkpoints are mixed; keep one of them")
    for name in sorted(set(index.values())):
        if not re.fullmatch(r"[\w.\-]+\.safetensors", name) or name.startswith("."):
            raise ValueError(f"{path} names the file {name!r}: shards must be .safetensors files in the same folder")
        if not (folder / name).is_file():
            raise ValueError(f"{path} names {name}, which is not in the folder: download that shard too")
    pattern = re.compile(re.sub(r"\d+", lambda m: r"\d+", re.escape(next(iter(index.values())))))
    for file in found:
        if pattern.fullmatch(file.name) and file.name not in index.values():
            raise ValueError(f"{path} does not name the shard {file.name}: download the index again, or remove that")
    return index


def _check_index(path: Path, index: Mapping[str, str], tensors: Mapping[str, Stored]) -> None:
    for name, file in index.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(f"{path} says that {name} is in {file}, and it is not: download both again")
    for name, stored in tensors.items():
        if name not in index:
            raise ValueError(f"{path} does not name {name}, which is in {stored.file.name}: download both again")


def _json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object: download it again")
    return found


# ---------------------------------------------------------------- writing
class ShardWriter:
    """One safetensors file whose tensors are written in any order, by any thread.

    outputs: name -> (dtype, shape). The header comes first, wide dtypes before narrow ones, so that
    every tensor is aligned. Same outputs, same bytes. A file that an earlier run began is gone on with.
    """

    def __init__(self, path: Path, outputs: Mapping[str, tuple[str, tuple[int, ...]]]):
        self.path = path
        self._place: dict[str, tuple[int, int]] = {}  # from, to
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape) in sorted(outputs.items(), key=lambda item: (-BITS[item[1][0]], item[0])):
            begin, end = end, end + tensor_bytes(dtype, shape)
            self._place[name] = begin, end
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data, self.size = 8 + len(text), 8 + len(text) + end
        with open(path, "r+b" if path.exists() else "w+b") as f:
            begun = f.read(self._data) == len(text).to_bytes(8, "little") + text
            if not begun or os.fstat(f.fileno()).st_size != self.size:
                f.truncate(0)
                f.seek(0)
                f.write(len(text).to_bytes(8, "little") + text)
                f.truncate(self.size)

    def write(self, name: str, data: Tensor, offset: int = 0) -> None:
        """Bytes of tensor `name` from byte `offset` of it on. OSError when the disk is full."""
        raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        view, done = memoryview(raw), 0
        with open(self.path, "r+b", buffering=0) as f:
            f.seek(self._data + self._place[name][0] + offset)
            while done < len(view):
                done += f.write(view[done:])

    def digest(self, name: str) -> str:
        """sha256 of tensor `name` as it is in the file."""
        found, (at, end) = hashlib.sha256(), self._place[name]
        with open(self.path, "rb", buffering=0) as f:
            f.seek(self._data + at)
            while at < end and (piece := f.read(min(1 << 20, end - at))):
                found.update(piece)
                at += len(piece)
        return found.hexdigest()

    def sync(self) -> None:
        """Have the file on the disk."""
        with open(self.path, "r+b") as f:
            os.fsync(f.fileno())


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    return -(-math.prod(shape) * BITS[dtype] // 8)


class Workplace:
    """The hidden folder `.NAME.partial` next to a destination, where it grows until it is whole.

    files/         the files of the destination so far
    journal.jsonl  what they are made from, and line by line {tensor: sha256, ...} of the jobs that are done
    lock           held by the process that works here

    A context manager: leaving it without `publish` keeps what is done for the next run, and nothing
    where nothing is.
    """

    def __init__(self, destination: Path, key: dict):
        self.destination, self.key = destination, key
        self.folder = destination.parent / f".{destination.name}.partial"
        self.files = self.folder / "files"
        self.done: dict[str, str] = {}  # tensor -> sha256
        self.restarted = ""  # why the work of an earlier run could not be used
        self._lock = -1
        self._journal: TextIO | None = None
        self._mutex = threading.Lock()

    def __enter__(self) -> Workplace:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            inside = next(p for p in (self.folder, *self.folder.parents) if p.exists() and not p.is_dir())
            raise ValueError(
                f"{inside} is a file, where the folder {'of the work in progress' if inside == self.folder else ''} "
                f"for {self.destination} goes: move it away, or name another destination"
            ) from None
        self._lock = _lock(self.folder / "lock", self.destination)
        try:
            self._resume()
            self.files.mkdir(exist_ok=True)
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, *error) -> None:
        self._journal.close()
        if not self.done or not self.files.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _resume(self) -> None:
        """What an earlier run has done, if it was the same one."""
        path = self.folder / "journal.jsonl"
        try:
            first, *lines = path.read_text("utf-8").splitlines()
            earlier = json.loads(first)
            if earlier != self.key:
                changed = [k for k in self.key if earlier.get(k) != self.key[k]]
                self.restarted = f"{' and '.join(changed) or 'the settings'} changed since the interrupted run"
            else:
                self.done = {name: sha for line in lines for name, sha in _entries(line)}
        except FileNotFoundError:
            pass
        except (ValueError, AttributeError):
            self.restarted = "the journal of the interrupted run is damaged"
        if self.restarted:
            shutil.rmtree(self.files, ignore_errors=True)
        new = path.with_suffix(".new")  # without what may stand in a last, unfinished line
        new.write_text("".join(f"{json.dumps(entry)}\n" for entry in (self.key, *([self.done] if self.done else ()))))
        os.replace(new, path)
        self._journal = open(path, "a", encoding="utf-8")

    def finish(self, digests: Mapping[str, str]) -> None:
        """Put tensors that are in their file into the journal: sha256 by name."""
        with self._mutex:
            self.done |= digests
            self._journal.write(f"{json.dumps(digests)}\n")
            self._journal.flush()

    def publish(self) -> None:
        """The destination appears, whole."""
        if self.destination.exists():
            raise ValueError(f"{self.destination} was made by someone else meanwhile: the result is in {self.files}")
        os.replace(self.files, self.destination)
        self.done = {}

    def _unlock(self) -> None:
        os.close(self._lock)
        if fcntl is None:
            (self.folder / "lock").unlink(missing_ok=True)


def _entries(line: str) -> list[tuple[str, str]]:
    """Of one line of a journal; none where a run ended in the middle of it."""
    try:
        return list(json.loads(line).items())
    except ValueError:
        return []


def _lock(path: Path, destination: Path) -> int:
    """A file descriptor that holds `path`; ValueError while another process does."""
    busy = f"{destination} is being written by another converter (lock file {path}): wait for it"
    flags = os.O_RDWR | os.O_CREAT | (0 if fcntl else os.O_EXCL)
    try:
        fd = os.open(path, flags, 0o644)
    except FileExistsError:  # without fcntl a lock outlives its process
        raise ValueError(f"{busy}; if there is none, remove the lock file") from None
    if fcntl:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = path.exists() and os.fstat(fd).st_ino == path.stat().st_ino
        except BlockingIOError:
            same = False
        if not same:
            pid = os.read(fd, 20).decode(errors="replace").strip()
            os.close(fd)
            raise ValueError(f"{busy} (process {pid or 'unknown'})")
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd
