"""The NVFP4 checkpoint that a conversion would write, for readers that take it without writing it.

Its headers are known from the plan. Its tensors are made in units, the experts of a layer or the linears that share a
global scale, when a reader asks for them: by the jobs that would write them, so they have the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from moe_nvfp4.quantize.files import TORCH_DTYPES, Checkpoint, TensorSlice, tensor_bytes
from moe_nvfp4.quantize.jobs import Job
from moe_nvfp4.quantize.layouts import CastSums
from moe_nvfp4.quantize.names import PER_EXPERT
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.plan import plan
from moe_nvfp4.quantize.work import default_workers, run_jobs


@dataclass(frozen=True)
class Unit:
    """Tensors that are made together.

    sources  the names of the source's tensors that they are made of
    jobs     make them
    """

    sources: tuple[str, ...]
    jobs: tuple[Job, ...]

    @property
    def names(self) -> list[str]:
        """The names of the new tensors."""
        return [name for job in self.jobs for name in job.outputs]

    def make(self, device: torch.device, only: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The new tensors by name, on the CPU. device: where they are quantized; only: make no others than these.

        ValueError for values that cannot be quantized, OSError for files that cannot be read.
        """
        wanted = set(self.names if only is None else only)
        jobs = [job for job in self.jobs if wanted & job.outputs.keys()]
        outputs = {name: out for job in jobs for name, out in job.outputs.items() if name in wanted}
        made = {name: torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="cpu")
                for name, (dtype, shape) in outputs.items()}  # fmt: skip
        places = {name: tensor.view(-1).view(torch.uint8) for name, tensor in made.items()}

        def write(name: str, data: Tensor, at: int) -> None:
            if name in places:
                piece = data.cpu().contiguous().view(-1).view(torch.uint8)
                places[name][at : at + len(piece)] = piece

        def do(job: Job) -> int:
            job.run(write)
            return 0

        run_jobs(((job, partial(do, job)) for job in jobs), device, default_workers(device))
        return made


@dataclass(frozen=True)
class Unwritten:
    """The checkpoint that the conversion of another one would write.

    checkpoint  its config, and its tensors: those that are copied lie in the source's files; of those that are made
                only headers are known, under the source's file
    units       in the order of the source's layers
    device      where tensors are quantized
    cast        what became of MXFP4 matrices, of the units that have been made
    """

    checkpoint: Checkpoint
    units: tuple[Unit, ...]
    device: torch.device
    cast: CastSums

    def make(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of the tensors `names` that are made, by name."""
        wanted = set(names)
        there = [(unit, wanted.intersection(unit.names)) for unit in self.units]
        return {name: tensor for unit, only in there if only for name, tensor in unit.make(self.device, only).items()}


def unwritten(source: Checkpoint, options: Options) -> Unwritten:
    """What a conversion of `source` would write. Reads headers and config. Raises what `plan` does, and ValueError for
    patterns that match nothing."""
    todo = plan(source, options)
    todo.check_patterns()
    copied = set(todo.copied)
    jobs = [job for job in todo.jobs if not copied.issuperset(job.outputs)]
    first: dict[str, str] = {}  # the owner of a job's first output, for all that it writes
    of_unit: dict[str, list[Job]] = {}
    for job in jobs:
        owners = dict.fromkeys(_owner(name.rpartition(".")[0]) for name in job.outputs)
        unit = next((first[owner] for owner in owners if owner in first), next(iter(owners)))
        first |= dict.fromkeys(owners, unit)
        of_unit.setdefault(unit, []).append(job)
    sources: dict[str, list[str]] = {}
    for name, owner in todo.owners.items():
        sources.setdefault(first[_owner(owner)], []).append(name)
    headers = {name: _header(job, name, source) for job in jobs for name in job.outputs}
    tensors = {name: source.tensors[name] for name in todo.copied} | headers
    units = tuple(Unit(tuple(sources[unit]), tuple(found)) for unit, found in of_unit.items())
    checkpoint = replace(source, config=todo.config, tensors=tensors)
    return Unwritten(checkpoint, units, todo.options.place, todo.cast)


def _owner(stem: str) -> str:
    """The experts module of an expert's matrix; else `stem` itself."""
    expert = PER_EXPERT.fullmatch(stem)
    return expert["module"] if expert else stem


class _Header(TensorSlice):
    """A tensor that lies nowhere yet."""

    def read(self, offset: int = 0, size: int | None = None) -> Tensor:
        raise AssertionError("a tensor of a checkpoint that is not written is made, not read")


def _header(job: Job, name: str, source: Checkpoint) -> TensorSlice:
    dtype, shape = job.outputs[name]
    return _Header(source.folder / job.shard, dtype, shape, 0, tensor_bytes(dtype, shape))
