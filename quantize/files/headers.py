"""safetensors headers, checked before use: they come from strangers.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header size, JSON, data).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# safetensors' own limit; a file that begins with a larger number is of another format
MAX_HEADER = 100_000_000

# dtype -> bits of an element; F4 and F6 elements do not fill bytes
BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64,
}  # fmt: skip
# In a tensor's name: a layer or expert with six digits or more, which no model has
LARGE_NUMBER = re.compile(r"(?<![^.])\d{6,}(?![^.])")
# Also there: control characters, which a terminal obeys, and what has no UTF-8
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Make errors of reading and writing (a full disk) name the file, as those of opening it do."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_header(path: Path) -> tuple[dict[str, dict], int]:
    """The header of one safetensors file without its metadata, name -> dtype, shape and data_offsets; and the byte
    where the data begins.

    ValueError if the file is damaged: every tensor must lie inside the file, fill exactly the bytes that
    its dtype and shape need, and share none with another.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: name a folder with the weights themselves")
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if length > min(size - 8, MAX_HEADER):
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
    if strange := next((name for name in header if UNPRINTABLE.search(name)), None):
        raise ValueError(f"{path} names a tensor {strange[:200]!a}: a name has no control characters")
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
        raise _Duplicate(Counter(key for key, _ in pairs).most_common(1)[0][0])
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


def twice(name: str, a: Path, b: Path) -> str:
    return f"tensor {name} is in {a.name} and in {b.name}: two checkpoints are mixed in one folder; keep one of them"


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    return -(-math.prod(shape) * BITS[dtype] // 8)
