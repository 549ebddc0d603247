"""The cache folder: code that is built on first use and loaded again by the next process, and the demo model.

Each file of code ends with a checksum of the rest, because loading half a file may kill the process. (Loaders of
libraries and objects ignore what follows the last section.)
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CHECKSUM = 32  # bytes


def cache_folder() -> Path:
    """``$MOE_NVFP4_CACHE``, else ``$XDG_CACHE_HOME/moe_nvfp4``, else ``~/.cache/moe_nvfp4``. It need not exist."""
    if folder := os.environ.get("MOE_NVFP4_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_nvfp4"


def own_folder(name: str) -> Path:
    """This folder of the cache, made if needed. PermissionError if other users could put code there."""
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022 or folder.is_symlink()):
        raise PermissionError(
            f"others could write to {folder}, and code is loaded from there: chmod 700 it, or set MOE_NVFP4_CACHE"
        )
    return folder


def is_whole(file: Path) -> bool:
    """Whether a file that `keep` has made is there and whole. One that cannot be read, as of another user, is not."""
    try:
        data = file.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-CHECKSUM]).digest() == data[-CHECKSUM:]


def keep(target: Path, make: Callable[[str], object]) -> None:
    """Let make(name) write a file beside `target`, append its checksum and move it to `target` in one step."""
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(handle)
    made = Path(name)
    try:
        make(name)
        with open(made, "ab") as file:
            file.write(hashlib.sha256(made.read_bytes()).digest())
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)


def try_to_keep(target: Path, make: Callable[[str], object]) -> None:
    """`keep`, but on a full disk, or if the folder is gone, the next process makes it again."""
    with suppress(OSError):
        keep(target, make)
