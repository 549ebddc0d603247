"""A safetensors file that is written piece by piece."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from moe_nvfp4.quantize.files.headers import BITS, named_errors, tensor_bytes


class ShardWriter:
    """One safetensors file whose tensors are written in any order, by any thread.

    outputs: name -> (dtype, shape). The header is written first. Wide dtypes precede narrow ones, so that
    every tensor is aligned. The same outputs give the same bytes. A file that an earlier run began is continued.
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
        with named_errors(path), open(path, "r+b" if path.exists() else "w+b") as f:
            begun = f.read(self._data) == len(text).to_bytes(8, "little") + text
            if not begun or os.fstat(f.fileno()).st_size != self.size:
                f.truncate(0)
                f.seek(0)
                f.write(len(text).to_bytes(8, "little") + text)
                f.truncate(self.size)

    def write(self, name: str, data: Tensor, offset: int = 0) -> None:
        """Write bytes of tensor `name`, from its byte `offset` on. OSError when the disk is full."""
        raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        view, done = raw.data, 0
        with open(self.path, "r+b", buffering=0) as f, named_errors(self.path):
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
        """Wait until the file is on the disk."""
        with open(self.path, "r+b") as f:
            os.fsync(f.fileno())
