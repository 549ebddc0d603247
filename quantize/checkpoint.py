"""Checkpoint files: what is in them, read from their headers alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

# safetensors' own limit; a larger number is not a header but another file format
MAX_HEADER = 100_000_000


def read_headers(files: Iterable[str | os.PathLike]) -> dict[str, dict]:
    """Tensor name -> {"dtype": "BF16", "shape": [...]} of safetensors files, no data read.

    Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header size, JSON, data).
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
                raise ValueError(
                    f"tensor {name} is in {where[name].name} and in {path.name}: two checkpoints are "
                    "mixed in one folder; keep one of them"
                )
            headers[name], where[name] = {"dtype": info["dtype"], "shape": info["shape"]}, path
    return headers


def read_header(path: str | os.PathLike) -> dict[str, dict]:
    """The header of one safetensors file, without its metadata; ValueError if it is damaged."""
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(_damaged(path, f"it has {size} bytes, its header alone needs {length + 8}"))
        try:
            header = json.loads(f.read(length))
        except ValueError as error:
            raise ValueError(_damaged(path, f"its header is not JSON ({error})")) from None
    header.pop("__metadata__", None)
    try:
        end = 8 + length + max((info["data_offsets"][1] for info in header.values()), default=0)
    except (KeyError, TypeError, IndexError, AttributeError):
        raise ValueError(_damaged(path, "its header has an entry without data_offsets")) from None
    if end != size:
        raise ValueError(_damaged(path, f"it has {size} bytes, its header describes {end}"))
    return header


def _damaged(path: Path, why: str) -> str:
    return f"{path} is truncated or is not a safetensors file: {why}. Download it again"
