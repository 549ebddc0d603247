"""Where a destination grows until it is complete, and what an interrupted run leaves for the next one."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from moe_nvfp4.quantize.files.headers import named_errors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_text(path: Path, text: str) -> None:
    """Write a text file; an error names it, also that of a full disk."""
    with named_errors(path):
        path.write_text(text, "utf-8")


@contextmanager
def new_file(destination: Path) -> Iterator[Path]:
    """A context whose file `.NAME.partial` becomes `destination` at its end, complete. ValueError if that exists by
    then, and while another process writes it."""
    part, busy = (destination.with_name(f".{destination.name}.{last}") for last in ("partial", "lock"))
    part.parent.mkdir(parents=True, exist_ok=True)
    fd = lock(busy, destination)
    try:
        part.unlink(missing_ok=True)  # of a run that was killed; and a link would be followed
        part.touch()
        mode = part.stat().st_mode  # by the umask, which safetensors does not go by
        part.unlink()
        yield part
        _set_mode(part, mode)
        try:
            os.link(part, destination)
        except OSError:
            if os.path.lexists(destination):
                raise ValueError(f"{destination} was made by someone else meanwhile: name another file") from None
            os.rename(part, destination)  # a disk without hard links
    finally:
        part.unlink(missing_ok=True)
        if fcntl:  # else `unlock` removes it
            busy.unlink(missing_ok=True)
        unlock(fd, busy)


class StagingDir:
    """The hidden folder `.NAME.partial` next to a destination, where it grows until it is complete.

    files/         the files of the destination so far
    journal.jsonl  what they are made from; then a line {tensor: sha256, ...} for each job that is done
    lock           held by the process that works here

    A context manager. Leaving it without `publish` keeps finished work for the next run, and removes the folder
    if there is none.
    """

    def __init__(self, destination: Path, key: dict):
        self.destination, self.key = destination, key
        self.folder = self.beside(destination)
        self.files = self.folder / "files"
        self.done: dict[str, str] = {}  # tensor -> sha256
        self.restarted = ""  # why the work of an earlier run could not be used
        self._lock = -1
        self._journal: TextIO | None = None
        self._mutex = threading.Lock()

    @staticmethod
    def beside(destination: Path) -> Path:
        """The hidden folder of `destination`, whether it exists or not."""
        return destination.parent / f".{destination.name}.partial"

    def __enter__(self) -> StagingDir:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            inside = next(p for p in (self.folder, *self.folder.parents) if p.exists() and not p.is_dir())
            raise ValueError(
                f"{inside} is a file, where the folder {'of the work in progress' if inside == self.folder else ''} "
                f"for {self.destination} goes: move it away, or name another destination"
            ) from None
        if links := [p for p in (self.folder, *self.folder.rglob("*")) if p.is_symlink()]:
            raise ValueError(f"{links[0]} is a link, and the work in progress is only in its own folder: remove the "
                             "link, or name another destination")  # fmt: skip
        self._lock = lock(self.folder / "lock", self.destination)
        try:
            if self.destination.exists():
                if not (self.folder / "journal.jsonl").exists():
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise ValueError(f"{self.destination} was made by someone else meanwhile: name another folder, or "
                                 "remove it first")  # fmt: skip
            self._resume()
            self.files.mkdir(exist_ok=True)
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._journal is not None:
            self._journal.close()
        result = self.done or self.destination.exists()  # made by someone else meanwhile: see `publish`
        if not result or not self.files.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _resume(self) -> None:
        """Take over the work of an earlier run, if it had the same settings and source."""
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
        new = path.with_suffix(".new")  # written again, without a last line that may be unfinished
        new.write_text("".join(f"{json.dumps(entry)}\n" for entry in (self.key, *([self.done] if self.done else ()))))
        os.replace(new, path)
        self._journal = open(path, "a", encoding="utf-8")

    def finish(self, digests: Mapping[str, str]) -> None:
        """Note in the journal that tensors are written: name -> sha256."""
        assert self._journal is not None, "inside the context only"
        with self._mutex:
            self.done |= digests
            self._journal.write(f"{json.dumps(digests)}\n")
            self._journal.flush()

    def publish(self, names: Container[str] | None = None) -> None:
        """Move the files to the destination, which appears complete. ValueError if it exists by now.

        names: the files that belong there, relative to it (default: all). Others, of an earlier run, are removed.
        """
        mode = (self.folder / "journal.jsonl").stat().st_mode  # by the umask, which safetensors does not go by
        found = sorted(self.files.rglob("*"), reverse=True)  # a folder after what is in it
        for path in found:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
            elif path.is_file() and names is not None and path.relative_to(self.files).as_posix() not in names:
                path.unlink()
            elif path.suffix == ".safetensors":
                _set_mode(path, mode)
        if self.destination.exists():
            raise ValueError(f"{self.destination} was made by someone else meanwhile: the result is in {self.files}")
        os.replace(self.files, self.destination)
        self.done = {}

    def _unlock(self) -> None:
        unlock(self._lock, self.folder / "lock")


def _set_mode(path: Path, mode: int) -> None:
    if path.stat().st_mode != mode:
        with suppress(OSError):  # a disk of another system, where all files have one mode
            path.chmod(mode)


def _entries(line: str) -> list[tuple[str, str]]:
    """The entries of one line of a journal; none if a run ended in the middle of it."""
    try:
        return list(json.loads(line).items())
    except ValueError:
        return []


def lock(path: Path, destination: Path) -> int:
    """Lock the file `path` for the process that writes `destination`. Returns a file descriptor for `unlock`.
    ValueError while another process holds the lock."""
    busy = f"{destination} is being written by another converter (lock file {path}): wait for it"
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | (0 if fcntl else os.O_EXCL)
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
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
    except OSError as error:  # a full disk
        unlock(fd, path)
        raise OSError(error.errno, error.strerror, str(path)) from None
    return fd


def unlock(fd: int, path: Path) -> None:
    os.close(fd)
    if fcntl is None:
        path.unlink(missing_ok=True)
