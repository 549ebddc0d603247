"""MXFP4 and FP8 files, as the NVFP4 files that a conversion would write: their tensors for vLLM's models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from moe_nvfp4.quantize.files import open_checkpoint
from moe_nvfp4.quantize.names import PER_EXPERT, by_number
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.unwritten import Unwritten, unwritten


@dataclass(frozen=True)
class Converted:
    """A checkpoint that becomes NVFP4 while vLLM loads it. Every process of vLLM has one, and plans for itself."""

    folder: str
    options: Options

    def open(self) -> Unwritten:
        stats = [(f.name, f.stat()) for f in sorted(Path(self.folder).iterdir()) if f.is_file()]
        return _open(self.folder, self.options, tuple((name, s.st_size, s.st_mtime_ns) for name, s in stats))


@lru_cache(maxsize=1)
def _open(folder: str, options: Options, files: tuple) -> Unwritten:
    """files: what the folder holds; a later engine of this process may find others there."""
    return unwritten(open_checkpoint(folder), options)


def tensors(coming: Unwritten, experts: bool = True) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint that is not written, in the order of their names: vLLM takes those of a module
    together. experts: with those of 4-bit experts."""
    units = {name: unit for unit in coming.units for name in unit.names}
    done: set[str] = set()
    for name in sorted(coming.checkpoint.tensors, key=by_number):
        if name in done or not experts and PER_EXPERT.fullmatch(name.rpartition(".")[0]):
            continue
        if name in units:
            done.update(units[name].names)
            yield from units[name].make(coming.device).items()
        else:
            yield name, coming.checkpoint.tensors[name].tensor()
