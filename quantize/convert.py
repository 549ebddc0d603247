"""Convert a checkpoint's files to NVFP4, tensor by tensor: no model is built, and memory does not grow with its size.

    convert_checkpoint("Qwen3-30B-A3B", "Qwen3-30B-A3B-NVFP4", Options(recipe="max"))

Sources: bf16, fp16 and fp32; FP8 in blocks (`weight` and `weight_scale_inv`, quant_method fp8); MXFP4
(gpt-oss: `_blocks` and `_scales`), which a searching recipe converts without loss; and NVFP4 in another
dialect or layout, whose codes and block scales are copied byte for byte. Experts are cast to the config's dtype
before they are quantized, as transformers does when it loads them, so quantizing the loaded model gives the same bytes.

A tensor's name, its header and config.model_type alone decide what happens to it:

* experts are quantized, each projection by `quantize_matrix`, and named `experts.E.gate_proj.weight` or
  as the family names them (`w1`); a stack becomes one tensor per expert;
* FP8 tensors outside the experts, and the FP8 and MXFP4 tensors of excluded experts, become dense in the
  config's dtype (one quantization_config cannot describe them next to NVFP4);
* experts of layers beyond num_hidden_layers (multi-token prediction) are not quantized: their readers take them dense;
* linears that `Options.linears` names are quantized (quantize.linears); those that servers fuse share a global scale;
* everything else is copied byte for byte, in its own dtype.

A tensor that cannot be identified with certainty is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from moe_nvfp4.progress import progress_bar
from moe_nvfp4.quantize.card import text_of_card, write_card
from moe_nvfp4.quantize.dense import dense_given
from moe_nvfp4.quantize.files import (
    INDEX,
    Checkpoint,
    ShardWriter,
    StagingDir,
    open_checkpoint,
    tensor_bytes,
    write_text,
)
from moe_nvfp4.quantize.jobs import Job
from moe_nvfp4.quantize.layouts import nvfp4
from moe_nvfp4.quantize.model import ModelTensors, UnknownModel
from moe_nvfp4.quantize.names import PER_EXPERT
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.plan import ConversionPlan, plan
from moe_nvfp4.quantize.report import ConversionReport, readable_size
from moe_nvfp4.quantize.source import nvfp4_info
from moe_nvfp4.quantize.work import default_workers, run_jobs

OTHER_WEIGHTS = (
    ".bin", ".pt", ".pth", ".ckpt", ".nemo", ".ot", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".npz",
)  # fmt: skip
HEADS = ("head.safetensors", "readout.safetensors")  # of decision models, which transformers reads beside the weights
TEMPLATES = "additional_chat_templates"  # the folder where tokenizers with several templates keep them, as *.jinja


def convert_checkpoint(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    options: Options | None = None,
    workers: int | None = None,
    dry_run: bool = False,
    progress: bool = True,
    card: str | None = None,
) -> ConversionReport:
    """Write the checkpoint in folder `source` to the new folder `destination`, with NVFP4 experts.

    options      recipe, dialect, exclusions and the rest (default: `Options()`)
    workers      threads (default: one per core, at most 4, or 8 with a GPU)
    dry_run      plan only, write nothing
    card         the name of `source` for a model card (README.md), which is then written too (default: none)

    Memory stays below 1.5 GB. The destination appears at the end, complete; until then everything is in
    `.NAME.partial` next to it. An interrupted run leaves its work there, and the same call resumes it, tensor
    by tensor, with the same bytes as a result. The source is only read.

    Raises ValueError for what cannot be converted, naming the tensor, the rule and the way out; OSError
    where the disk is full, or a file vanished or cannot be read.
    """
    began = time.perf_counter()
    source, destination = Path(source), Path(os.path.abspath(destination))
    if destination.exists() or destination.is_symlink():
        raise ValueError(f"{destination} exists: name a folder that does not, or remove it first")
    checkpoint = open_checkpoint(source)
    if workers is not None and not 1 <= workers <= 256:
        raise ValueError(f"workers = {workers}: a conversion takes 1 to 256 threads")
    if (info := nvfp4_info(checkpoint)) is not None and info.mixed:
        raise ValueError(
            f"{source} has W4A4 and W4A16 layers, and new files name one for all layers: for W4A16, set quant_algo to "
            "W4A16_NVFP4, or input_activations to null, for all NVFP4 layers in its config"
        )
    options = options or Options()
    todo = plan(checkpoint, options)
    todo.check_patterns()
    if todo.unchanged:
        raise ValueError(
            f"{source} is quantized already (NVFP4 of {options.dialect}): quantize the original checkpoint, rewrite "
            "this one in another --dialect, or add --share-scales if gate and up have different global scales"
        )
    others, left_out = other_files(checkpoint)
    report = _report(todo, destination, left_out)
    report.not_compared = _check_whole(checkpoint)
    if dry_run:
        return report
    state = checkpoint.state()
    place = StagingDir(destination, _key(checkpoint, todo.options, state))
    check_space(destination, report.bytes_after + sum(f.stat().st_size for f in others), place.files)
    with place:
        if place.restarted and progress:
            print(f"starting again: {place.restarted}", file=sys.stderr)
        _run(todo.jobs, place, report, options.place, workers or default_workers(options.place), progress)
        names = _write_small_files(place.files, todo, others)
        if card is not None:
            names.add(write_card(report, card, place.files).name)
        checkpoint.check_state(state)
        place.publish(names)
    report.seconds = time.perf_counter() - began
    return report


def surplus_of(source: Checkpoint) -> list[str]:
    """The tensors of a source that its model does not have. ValueError if the files lack a tensor of the model, which
    would be random numbers in all that is loaded from new files; UnknownModel where transformers does not know it."""
    info = nvfp4_info(source)
    found = dense_given(source) if info is None else nvfp4.read(source, info.dialect, input_scales=False).given()
    return ModelTensors.of(source).check(found)


def _check_whole(source: Checkpoint) -> str:
    """ValueError if the files lack a tensor of their model. Returns why that is not known, where transformers does not
    know the model; else ""."""
    try:
        surplus_of(source)
    except UnknownModel as error:
        return str(error)
    return ""


def _report(plan: ConversionPlan, destination: Path, left_out: Mapping[str, str]) -> ConversionReport:
    """What `plan` will do; left_out: files that are not copied, and why."""
    checkpoint = plan.source
    sizes = {name: tensor_bytes(*out) for job in plan.jobs for name, out in job.outputs.items()}
    linears = {linear.name for fused in plan.fused for linear in fused}
    experts = plan.matrices.keys() - plan.carried.keys() - linears

    def before_and_after(stems: Collection[str]) -> tuple[int, int]:
        new = [f"{stem}.{suffix}" for stem in stems for suffix in plan.options.target.suffixes]
        return sum(plan.matrices[stem].size for stem in stems), sum(sizes[name] for name in new if name in sizes)

    (experts_before, experts_after), of_linears = before_and_after(experts), before_and_after(linears)
    return ConversionReport(
        checkpoint.folder, destination, plan.options.recipe,
        quantized=len(experts), fused=plan.fused, carried=len(plan.carried),
        carried_linears=sum(PER_EXPERT.fullmatch(stem) is None for stem in plan.carried),
        copied=len(plan.copied), dequantized=len(plan.dequantized),
        activations=plan.config["quantization_config"]["moe_nvfp4"]["activations"],
        skipped={**plan.skipped, **left_out},
        bytes_before=sum(f.stat().st_size for f in checkpoint.files), bytes_after=sum(sizes.values()),
        experts_before=experts_before, experts_after=experts_after,
        linears_before=of_linears[0], linears_after=of_linears[1],
        modules=tuple(m for m in plan.modules if m not in plan.skipped),
        shards=len({job.shard for job in plan.jobs}), rescaled=plan.rescaled[0], rescaling=plan.rescaled[1],
        cast=plan.cast,
    )  # fmt: skip


def _key(checkpoint: Checkpoint, options: Options, state: list) -> dict:
    """Two runs with equal keys write the same bytes."""
    o = options
    settings = [o.recipe, o.exclude, o.include, o.dialect, o.activations, o.dtype, o.share_scales, o.linears, 4]
    settings += [data.digest() for data in (o.importance, o.codes) if data is not None]
    return {
        "the settings": hashlib.sha256(json.dumps(settings).encode()).hexdigest(),
        "the source": [str(checkpoint.folder.resolve()), *state],
    }


def check_space(destination: Path, needed: int, *begun: Path) -> None:
    """ValueError unless `destination`'s disk has room for `needed` bytes, less those already in the folders `begun`."""
    parent = next(p for p in destination.parents if p.exists())
    there = [f.stat() for folder in begun if folder.is_dir() for f in folder.glob("*")]
    done = sum(getattr(s, "st_blocks", s.st_size // 512) * 512 for s in there)  # bytes on disk: files have holes
    free = shutil.disk_usage(parent).free
    if needed - done > free:
        raise ValueError(
            f"{parent} has {readable_size(free)} free, about {readable_size(needed - done)} are needed: make room, or "
            "name a destination on another disk"
        )


def other_files(checkpoint: Checkpoint) -> tuple[list[Path], dict[str, str]]:
    """The files to copy, and name -> reason of those left out. Copied are the tokenizer, templates, decision heads, and
    whatever else holds no weights and is not written anew. Hidden folders (.git, .cache) are no part of a
    checkpoint."""
    anew, folder = {"config.json", "hf_quant_config.json"}, checkpoint.folder
    files = sorted(f for f in folder.iterdir() if f.is_file() and f.name not in anew)
    weights = (".safetensors", *OTHER_WEIGHTS)
    index = re.compile(rf"({'|'.join(map(re.escape, weights))})\.index(\..+)?\.json$")
    left = {f.name: "weights in another format" for f in files if f.suffix in OTHER_WEIGHTS}
    if text_of_card(folder / "README.md") is None:
        left["README.md"] = "not UTF-8: the new card has neither its metadata nor its text"
    other = [f for f in files if f.suffix not in weights and f.name not in left and not index.search(f.name)]
    for file in checkpoint.ignored:
        if file.name in HEADS:
            other.append(file)
        else:
            left[file.name] = "a weight file that belongs to no part of this checkpoint"
    left |= {f.name: "a link to a file that is not there" for f in folder.iterdir() if not f.exists()}
    inside = {f.name for f in folder.iterdir() if f.is_dir() and f.name[0] != "."} - {TEMPLATES}
    left |= {f"{name}/": f"a folder: only {TEMPLATES} is copied" for name in sorted(inside)}
    other += sorted((folder / TEMPLATES).glob("*.jinja"))
    for file in other:
        _check_link(file, folder)
    return other, left


def _check_link(file: Path, folder: Path) -> None:
    """ValueError for a link out of `folder`: a copy of what it names would go into the new checkpoint. Folders of the
    Hub's cache, snapshots/COMMIT, link into blobs/ next to snapshots/."""
    target, home = file.resolve(), folder.resolve()
    own = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(target.is_relative_to(place) for place in own):
        raise ValueError(f"{file} is a link to {target}, outside of the checkpoint, whose content would be copied into "
                         "the new one: put the file itself there, or remove the link")  # fmt: skip


def copy_files(files: Iterable[Path], source: Path, destination: Path) -> None:
    """Copy `files` from the folder `source` to the same places in `destination`."""
    for file in files:
        new = destination / file.relative_to(source)
        new.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, new)  # without the mode, which may be read-only: README.md is written again later


def _write_small_files(folder: Path, plan: ConversionPlan, others: list[Path]) -> set[str]:
    """config.json, the index where there are several shards, and the source's other files. Returns the names of all
    files of the destination."""
    copy_files(others, plan.source.folder, folder)
    write_text(folder / "config.json", json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n")
    places = {name: job.shard for job in plan.jobs for name in job.outputs}
    if len(set(places.values())) > 1 or plan.source.index is not None:
        total = sum(tensor_bytes(*out) for job in plan.jobs for out in job.outputs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return {*places.values(), "config.json", INDEX, *(f.relative_to(plan.source.folder).as_posix() for f in others)}


class _Shard:
    """A file being written, and the number of its jobs that are not done yet."""

    def __init__(self, path: Path, jobs: list[Job]):
        self.writer = ShardWriter(path, {name: out for job in jobs for name, out in job.outputs.items()})
        self.open_jobs, self.mutex = len(jobs), threading.Lock()

    def work(self, job: Job, place: StagingDir) -> int:
        """Do a job, unless an earlier run did it and its tensors are intact. Returns the source bytes saved by that."""
        done = all(n in place.done and place.done[n] == self.writer.digest(n) for n in job.outputs)
        if not done:
            job.run(self.writer.write)
            place.finish({name: self.writer.digest(name) for name in job.outputs})
        with self.mutex:
            self.open_jobs -= 1
            last = self.open_jobs == 0
        if last:
            self.writer.sync()
        return job.size if done else 0


def _run(
    jobs: Sequence[Job], place: StagingDir, report: ConversionReport, device: torch.device, workers: int, progress: bool
) -> None:
    """Run all jobs in `workers` threads."""
    by_shard: dict[str, list[Job]] = {}
    for job in jobs:
        by_shard.setdefault(job.shard, []).append(job)
    size = sum(j.size for j in jobs)
    with progress_bar(total=size, unit="B", unit_scale=True, desc="NVFP4", show=progress) as bar:
        report.resumed = run_jobs(_pending(by_shard, place), device, workers, bar)


def _pending(by_shard: Mapping[str, list[Job]], place: StagingDir) -> Iterator[tuple[Job, Callable[[], int]]]:
    for name, jobs in by_shard.items():
        shard = _Shard(place.files / name, jobs)
        yield from ((job, partial(shard.work, job, place)) for job in jobs)
