"""A checkpoint's files to NVFP4 files, tensor by tensor: no model is built, memory does not grow with it.

    convert_checkpoint("Qwen3-30B-A3B", "Qwen3-30B-A3B-NVFP4")

Sources: bf16, fp16 and fp32; FP8 in blocks (`weight` and `weight_scale_inv`, quant_method fp8); MXFP4
(gpt-oss: `_blocks` and `_scales`), which loses nothing by a searching recipe; and NVFP4 in the other
dialect, whose codes and block scales are carried as bytes. Experts are cast to the config's dtype
before they are quantized, as transformers does when it loads: the bytes are those of its dense model.

What is done to each tensor is decided by its name, its header and config.model_type alone:

* experts are quantized, each projection by `quantize_matrix`, named `experts.E.gate_proj.weight` or
  as the family names them (`w1`); stacked ones become one tensor per expert;
* FP8 tensors outside the experts, and those of excluded experts, become dense in the config's dtype
  (one quantization_config cannot describe FP8 next to NVFP4);
* layers beyond num_hidden_layers (multi-token prediction) keep their weights: loaders drop them;
* everything else is copied byte for byte, in its own dtype.

What cannot be identified with certainty is refused by name.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from moe_nvfp4.format import decode, dequantize, pad_k
from moe_nvfp4.quantize.checkpoint import (
    INDEX,
    TORCH_DTYPES,
    Checkpoint,
    ShardWriter,
    Stored,
    Workplace,
    open_checkpoint,
    tensor_bytes,
)
from moe_nvfp4.quantize.dialects import DIALECTS, Dialect, QuantizationInfo, read_config, write_config
from moe_nvfp4.quantize.experts import DEFAULT_RECIPE, RECIPES, quantize_matrix, recipe_global_scale
from moe_nvfp4.weights import ACTIVATIONS, check_global_scale

CHUNK = 1 << 22  # elements of a matrix that are worked on together: 8 MiB in bf16, 16 MiB in fp32
CUDA_CHUNK = 1 << 24
COPY = 1 << 23  # bytes copied at once
IN_FLIGHT = 500_000_000  # bytes that all workers together may hold
DENSE = ("BF16", "F16", "F32", "F64")
Write = Callable[[str, Tensor, int], None]  # name, data, byte offset in the tensor


@dataclass
class ConversionReport:
    """What a conversion did, or (dry_run) would do. Sizes in bytes of weight files."""

    source: Path
    destination: Path
    recipe: str
    quantized: int = 0  # matrices
    carried: int = 0  # NVFP4 matrices whose bytes were carried into another dialect
    copied: int = 0  # tensors
    dequantized: int = 0  # FP8 matrices that became dense
    skipped: dict[str, str] = field(default_factory=dict)  # what was left alone, and why
    bytes_before: int = 0
    bytes_after: int = 0
    experts_before: int = 0
    experts_after: int = 0
    shards: int = 0
    resumed_shards: int = 0
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """The plan, for people."""
        yield f"{self.source} -> {self.destination}: {self.shards} file(s)"
        for count, what in (
            (self.quantized, f"expert matrices quantized ({self.recipe})"),
            (self.carried, "NVFP4 matrices carried over, the same bytes"),
            (self.dequantized, "FP8 matrices outside the experts made dense"),
            (self.copied, "tensors copied as they are"),
        ):
            if count:
                yield f"  {count:7d} {what}"
        yield from (f"  left alone: {name}: {why}" for name, why in self.skipped.items())
        yield f"  experts {readable_size(self.experts_before)} -> {readable_size(self.experts_after)}"
        yield f"  all     {readable_size(self.bytes_before)} -> {readable_size(self.bytes_after)}"


def readable_size(n: float) -> str:
    """n bytes, for a person: "44.8 MB"."""
    for unit in ("B", "KB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"


# ---------------------------------------------------------------- names of experts
PER_EXPERT = re.compile(r"(?P<module>(?:.+\.)?experts)\.(?P<e>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w[123])")


@dataclass(frozen=True)
class Stack:
    """How a family's files keep all experts of a layer: the ends of the tensor names.

    up, down     gate and up rows together [E, 2I, H], and [E, H, I]
    module       what stands in place of these names in front of `.E.gate_proj`
    transposed   [E, H, 2I] and [E, I, H] instead; None: one or the other, by the config's sizes
    interleaved  gate and up rows alternate
    bias         tensors of the same names with `_bias` are there too
    """

    up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    module: str = "experts"
    transposed: bool | None = False
    interleaved: bool = False
    bias: bool = False


PLAIN = Stack()
GRANITE = Stack("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight",
                "block_sparse_moe.experts")  # fmt: skip
STACKS: dict[str, Stack] = {
    "gpt_oss": Stack(transposed=True, interleaved=True, bias=True),
    "openai_privacy_filter": Stack(transposed=True, bias=True),
    "llama4_text": Stack(transposed=True),
    "aria_text": Stack("experts.fc1.weight", "experts.fc2.weight", transposed=True),
    "qwen3_vl_moe_text": Stack(transposed=None),
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "granitemoehybrid": GRANITE,
    **dict.fromkeys(
        ("diffusion_gemma_text", "gemma4_text", "hy_v4", "mistral4", "qwen3_5_moe_text", "qwen3_next",
         "qwen4_exp_text"), PLAIN,
    ),
}  # fmt: skip
DBRX = re.compile(r"(?P<module>(?:.+\.)?experts)\.mlp\.(?P<part>w1|v1|w2)")
DBRX_PARTS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}
# 4-bit and 8-bit formats keep these next to a weight; one that nobody reads means wrong numbers
SCALES = re.compile(r"(weight_scale(_2|_inv)?|_scale_inv|_scales|_blocks|input_scale|activation_scale|_global_scale|"
                    r"weight_packed|pre_quant_scale|svdquant_lora_[ab])$")  # fmt: skip
KV_SCALE = re.compile(r"\.(k|v|q|kv)_(scale|zero_point)$")
# Module names that differ from the files' in transformers, which matches exclusions against its own
ALIASES = ((".block_sparse_moe.experts", ".mlp.experts"), (".ffn.experts", ".mlp.experts"), ("backbone.", "model."))


def _aliases(module: str) -> list[str]:
    names = [module]
    for theirs, ours in ALIASES:
        names += [n.replace(theirs, ours) for n in names if theirs in n]
    return names


def _configs(config: Mapping) -> list[Mapping]:
    """A config and its sub-configs (text_config, thinker_config, ...), all the way down."""
    found = [config]
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("config") and key != "quantization_config":
            found += _configs(value)
    return found


# ---------------------------------------------------------------- matrices
@dataclass(frozen=True)
class Matrix:
    """A dense [rows, columns] matrix in source files, read in pieces.

    open()        reads what must be read at once, and returns rows(a, b) -> floating point [b - a, columns]
    held          bytes that `open` keeps in memory
    size          source bytes it stands for
    global_scale  a better one than the recipe's, or None
    """

    rows: int
    columns: int
    size: int
    open: Callable[[], Callable[[int, int], Tensor]]
    held: int = 0
    global_scale: Callable[[], Tensor] | None = None


def row_major(stored: Stored, rows: int, columns: int, first: int = 0) -> Matrix:
    """Rows `first` to `first + rows` of a tensor whose rows have `columns` elements."""
    dtype = TORCH_DTYPES[stored.dtype]
    width = columns * dtype.itemsize

    def read(a: int, b: int) -> Tensor:
        return stored.read((first + a) * width, (b - a) * width).view(dtype).view(-1, columns)

    return Matrix(rows, columns, rows * width, lambda: read)


def slice_view(stored: Stored, e: int, shape: tuple[int, int], view: Callable[[Tensor], Tensor], parts: int) -> Matrix:
    """view([shape] number e of a stack): for layouts in which a matrix's rows are not in one piece."""
    dtype = TORCH_DTYPES[stored.dtype]
    size = shape[0] * shape[1] * dtype.itemsize

    def open() -> Callable[[int, int], Tensor]:
        matrix = view(stored.read(e * size, size).view(dtype).view(shape))
        return lambda a, b: matrix[a:b].contiguous()

    rows, columns = view(torch.empty(shape, device="meta")).shape
    return Matrix(rows, columns, size // parts, open, held=size)


def fp8_blocks(weight: Stored, scale: Stored, block: tuple[int, int], name: str) -> Matrix:
    """e4m3 [N, K] with a scale for every block [128, 128] -> fp32. ValueError where shapes disagree."""
    if len(weight.shape) != 2 or scale.shape != tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True)):
        raise ValueError(
            f"{name}: scales {list(scale.shape)} do not fit weights {list(weight.shape)} in blocks of {list(block)}: "
            "the file or weight_block_size in config.json is damaged; download them again"
        )
    N, K = weight.shape

    def open() -> Callable[[int, int], Tensor]:
        scales = scale.tensor().float()

        def rows(a: int, b: int) -> Tensor:
            dense = weight.read(a * K, (b - a) * K).view(torch.float8_e4m3fn).view(-1, K).float()
            of_rows = scales[torch.arange(a, b) // block[0]]
            return dense.mul_(of_rows.repeat_interleave(block[1], dim=1)[:, :K])

        return rows

    return Matrix(N, K, weight.size + scale.size, open, held=4 * scale.size)


def mxfp4(blocks: Stored, scales: Stored, e: int, first: int, step: int, name: str) -> Matrix:
    """Expert e's rows first, first + step, ... of [E, N, K/32, 16] codes with e8m0 [E, N, K/32] -> fp32.

    Its global scale is a power of two, so that a searching recipe finds every value again, exactly:
    MXFP4's scales are powers of two that e4m3 holds, 17 binades of them.
    """
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        raise ValueError(f"{name}: {list(blocks.shape)} and {list(scales.shape)} are not MXFP4 ([E, N, K/32, 16] codes "
                         "and [E, N, K/32] scales): the file is damaged; download it again")  # fmt: skip
    _, N, groups, _ = blocks.shape

    def scale_bytes(a: int, b: int) -> Tensor:
        rows = scales.read((e * N + a * step) * groups, (b - a) * step * groups).view(-1, groups)
        return rows[first::step]

    def rows(a: int, b: int) -> Tensor:
        width = groups * 16
        codes = blocks.read((e * N + a * step) * width, (b - a) * step * width).view(-1, groups, 16)[first::step]
        exponents = scale_bytes(a, b)
        if (exponents == 255).any():
            raise ValueError(f"{name}, expert {e}: an MXFP4 scale is NaN: download the checkpoint again")
        return torch.ldexp(decode(codes), exponents[..., None].to(torch.int32) - 127).flatten(1)

    def power_of_two() -> Tensor:
        return torch.ldexp(torch.ones(()), scale_bytes(0, N // step).max().to(torch.int32) - 127 - 8)

    size = (blocks.size + scales.size) // blocks.shape[0] // step
    return Matrix(N // step, groups * 32, size, lambda: rows, global_scale=power_of_two)


# ---------------------------------------------------------------- jobs
@dataclass
class Job:
    """One piece of work: `run(write)` writes the `outputs` of file `shard`.

    size: source bytes, for the progress bar; memory: bytes it holds while it runs.
    """

    shard: str
    size: int
    memory: int
    outputs: dict[str, tuple[str, tuple[int, ...]]]
    run: Callable[[Write], None]


def copy_job(name: str, stored: Stored, new_name: str | None = None) -> Job:
    new_name = new_name or name

    def run(write: Write) -> None:
        for at in range(0, stored.size, COPY):
            write(new_name, stored.read(at, min(COPY, stored.size - at)), at)

    outputs = {new_name: (stored.dtype, stored.shape)}
    return Job(stored.file.name, stored.size, 2 * min(stored.size, COPY), outputs, run)


def scale_job(name: str, stored: Stored, new_name: str, source: Dialect, target: Dialect) -> Job:
    """A global scale from one dialect to the other."""
    if stored.dtype != "F32" or tensor_bytes("F32", stored.shape) != 4:
        raise ValueError(
            f"{name} is {stored.dtype} {list(stored.shape)}: one F32 number per matrix is expected; fused experts "
            "with one scale for a whole stack are not supported: quantize the original checkpoint"
        )

    def run(write: Write) -> None:
        scale = source.decode_scale(stored.tensor()).reshape(())
        check_global_scale(scale, name)
        write(new_name, target.encode_scale(scale), 0)

    return Job(stored.file.name, 4, 64, {new_name: ("F32", (1,) if target.reciprocal else ())}, run)


def quantize_job(shard: str, stem: str, matrix: Matrix, options: Options) -> Job:
    """`stem`.weight and its scales, in the options' dialect."""
    weight, sf, scale = (f"{stem}.{s}" for s in options.dialect.suffixes[:3])
    N, K = matrix.rows, -(-matrix.columns // 16) * 16
    step = max(1, (CHUNK if options.device == "cpu" else CUDA_CHUNK) // K)

    def run(write: Write) -> None:
        rows = matrix.open()
        read = lambda a: options.cast(rows(a, min(a + step, N))).to(options.device)
        given = matrix.global_scale() if matrix.global_scale and options.recipe != "max" else None
        try:
            if given is None and step < N:
                amax = torch.stack([read(a).abs().amax().float() for a in range(0, N, step)]).amax()
                if amax.isfinite():  # else the part with NaN or Inf says so, below
                    given = recipe_global_scale(amax, options.recipe)
            for a in range(0, N, step):
                codes, block_scales, global_scale = quantize_matrix(pad_k(read(a)), options.recipe, given)
                write(weight, codes, a * K // 2)
                write(sf, block_scales, a * K // 16)
        except ValueError as error:
            raise ValueError(f"{stem}: {error}") from None
        write(scale, options.dialect.encode_scale(global_scale.cpu()), 0)

    outputs = {
        weight: ("U8", (N, K // 2)),
        sf: ("F8_E4M3", (N, K // 16)),
        scale: ("F32", (1,) if options.dialect.reciprocal else ()),
    }
    return Job(shard, matrix.size, matrix.held + min(N, step) * K * 10 + 10_000_000, outputs, run)


def dense_job(name: str, shard: str, matrix: Matrix, dtype: str) -> Job:
    """A quantized matrix as a dense one."""
    N, K = matrix.rows, matrix.columns
    step = max(1, CHUNK // K)
    target = TORCH_DTYPES[dtype]

    def run(write: Write) -> None:
        rows = matrix.open()
        for a in range(0, N, step):
            write(name, rows(a, min(a + step, N)).to(target), a * K * target.itemsize)

    return Job(shard, matrix.size, matrix.held + min(N, step) * K * 10, {name: (dtype, (N, K))}, run)


def bias_jobs(name: str, stored: Stored, stems: list[str], interleaved: bool) -> Iterator[Job]:
    """[E, n] biases, as one tensor per expert and projection. stems: with {e} for the expert."""
    E, n = stored.shape
    parts = len(stems)

    def job(e: int) -> Job:
        names = [f"{stem.format(e=e)}.bias" for stem in stems]

        def run(write: Write) -> None:
            width = stored.size // E
            row = stored.read(e * width, width).view(TORCH_DTYPES[stored.dtype])
            pieces = [row[i::parts] for i in range(parts)] if interleaved else row.chunk(parts)
            for new_name, piece in zip(names, pieces, strict=True):
                write(new_name, piece, 0)

        outputs = {new_name: (stored.dtype, (n // parts,)) for new_name in names}
        return Job(stored.file.name, stored.size // E, 2 * stored.size // E, outputs, run)

    return (job(e) for e in range(E))


# ---------------------------------------------------------------- the plan
@dataclass(frozen=True)
class Options:
    """What the caller asked for, checked, and the dtype of the config."""

    recipe: str
    exclude: tuple[str, ...]
    include: tuple[str, ...] | None
    dialect: Dialect
    activations: str
    device: str
    dtype: str | None  # of config.json, as safetensors writes it; None: it names none

    def cast(self, w: Tensor) -> Tensor:
        return w if self.dtype is None else w.to(TORCH_DTYPES[self.dtype])


class Plan:
    """What becomes of every tensor of `source`: `jobs`, and `config`, the new config.json.

    Raises ValueError for what cannot be converted; reads headers and config only.
    """

    def __init__(self, source: Checkpoint, options: Options, report: ConversionReport):
        self.source, self.options, self.report = source, options, report
        self.left = dict(source.tensors)  # not planned yet
        self.jobs: list[Job] = []
        self.quantized: dict[str, Matrix | None] = {}  # modules; None: NVFP4 already
        self.dense: set[str] = set()  # modules that keep, or get, dense weights
        self.excluded: set[str] = set()  # experts modules
        self.has_input_scale = False
        configs = _configs(source.config)
        self.types = [c["model_type"] for c in configs if isinstance(c.get("model_type"), str)]
        layers = [c.get("num_hidden_layers") for c in configs]
        self.layers = max((n for n in layers if type(n) is int), default=None)
        self.hidden = {c["hidden_size"] for c in configs if type(c.get("hidden_size")) is int}
        counts = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts")
        self.counts = {n for c in configs for k, n in c.items() if counts.fullmatch(k) and type(n) is int}
        self._make()
        for job in self.jobs:
            report.bytes_after += sum(tensor_bytes(*out) for out in job.outputs.values())
        report.bytes_before = sum(f.stat().st_size for f in source.files)
        report.shards = len({job.shard for job in self.jobs})

    def _make(self) -> None:
        q = self.source.config.get("quantization_config")
        method = (q or {}).get("quant_method")
        info = self._nvfp4_info(q, method)
        if info is not None:
            self._carry(info)
        else:
            if method == "mxfp4":
                self._mxfp4()
            if method == "fp8":
                self._fp8(q)
            self._per_expert()
            self._stacked()
            self._dbrx()
            self._check_nothing_missed()
        for name, stored in list(self.left.items()):
            if self._is_scale(name):
                raise ValueError(f"{name} is a scale that nothing reads, which would leave silently wrong numbers: "
                                 "this quantization is not known here; use the original checkpoint")  # fmt: skip
            self._copy(name, stored)
        self.config = {**self.source.config, "quantization_config": self._quantization_config(info)}

    def _nvfp4_info(self, q: Mapping | None, method: str | None) -> QuantizationInfo | None:
        """What the config says about NVFP4; None for dense, FP8 and MXFP4 sources."""
        hf = self.source.folder / "hf_quant_config.json"
        if (q is None and not hf.is_file()) or (method in ("fp8", "mxfp4") and "moe_quant_algo" not in q):
            return None
        info = read_config(self.source.config, json.loads(hf.read_text()) if hf.is_file() else None)
        if info is None:
            raise ValueError(f"{self.source.folder} is quantized with {method!r}, which is not read here: fp8 (in "
                             "blocks), mxfp4, and NVFP4 of modelopt or compressed-tensors are")  # fmt: skip
        return info

    def _is_scale(self, name: str) -> bool:
        if name.endswith(".scale"):  # of a norm, unless its weight is not dense
            weight = self.left.get(f"{name.removesuffix('scale')}weight")
            return weight is not None and weight.dtype not in DENSE
        return SCALES.search(name) is not None

    # ------------------------------------------------------------ dense and FP8 experts
    def _why_not(self, module: str) -> str | None:
        """Why the experts module `module` is left as it is; None: it is quantized."""
        o, names = self.options, [n for m in _aliases(module) for n in (m, f"{m}.0.down_proj", f"{m}.0.w2")]
        matches = lambda patterns: any(fnmatchcase(n, p) or n.startswith(f"{p}.") for p in patterns for n in names)
        if matches(o.exclude):
            return "excluded"
        if o.include is not None and not matches(o.include):
            return "not included"
        layer = re.search(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.", module)
        if re.match(r"(model\.)?mtp\b", module) or (layer and self.layers and int(layer[1]) >= self.layers):
            return "beyond num_hidden_layers (multi-token prediction), which transformers does not load"
        return None

    def _leave(self, module: str) -> bool:
        why = self._why_not(module)
        if why is not None:
            self.excluded.add(module)
            self.report.skipped[module] = why
        return why is not None

    def _quantize(self, stem: str, matrix: Matrix, shard: str) -> None:
        job = quantize_job(shard, stem, matrix, self.options)
        self.jobs.append(job)
        self.quantized[stem] = matrix
        self.report.quantized += 1
        self.report.experts_before += matrix.size
        self.report.experts_after += sum(tensor_bytes(*out) for out in job.outputs.values())

    def _per_expert(self) -> None:
        seen: dict[str, dict[str, set[int]]] = {}
        for name, stored in list(self.left.items()):
            match = PER_EXPERT.fullmatch(name.removesuffix(".weight"))
            if match is None or not name.endswith(".weight") or stored.dtype not in DENSE:
                continue
            _need(len(stored.shape) == 2, name, stored, "a matrix [out, in]")
            if self._leave(match["module"]):
                continue
            del self.left[name]
            seen.setdefault(match["module"], {}).setdefault(match["part"], set()).add(int(match["e"]))
            self._quantize(name.removesuffix(".weight"), row_major(stored, *stored.shape), stored.file.name)
        for module, parts in seen.items():
            self._check_complete(module, parts)

    def _check_complete(self, module: str, parts: Mapping[str, set[int]]) -> None:
        E = 1 + max(max(experts) for experts in parts.values())
        known = [n for n in self.counts if n >= E]
        E = E if E in self.counts or not known else min(known)
        for part, experts in parts.items():
            if len(experts) != E:
                first = min(set(range(E)) - experts)
                raise ValueError(f"{module}: the checkpoint has {len(experts)} of {E} experts' {part} (not {first}): "
                                 "a shard or a tensor is missing; download the checkpoint again")  # fmt: skip
        if set(parts) not in ({"gate_proj", "up_proj", "down_proj"}, {"up_proj", "down_proj"}, {"w1", "w2", "w3"}):
            raise ValueError(f"{module} has {', '.join(sorted(parts))}: a projection is missing; download it again")

    # ------------------------------------------------------------ stacked experts
    def _stacked(self) -> None:
        for stack in dict.fromkeys(STACKS[t] for t in self.types if t in STACKS):
            for name, up in list(self.left.items()):
                if not f".{name}".endswith(f".{stack.up}") or up.dtype not in DENSE:
                    continue
                prefix = name.removesuffix(stack.up)
                module, down_name = prefix + stack.module, prefix + stack.down
                if self._leave(module):
                    continue
                if down_name not in self.left:
                    raise ValueError(f"{down_name} is missing next to {name}: download the checkpoint again")
                down = self.left.pop(down_name)
                del self.left[name]
                self._stack(module, stack, (name, up), (down_name, down))

    def _stack(self, module: str, stack: Stack, up: tuple[str, Stored], down: tuple[str, Stored]) -> None:
        transposed = self._orientation(stack, *up, down[1])
        E, I = up[1].shape[0], up[1].shape[2 if transposed else 1] // 2
        H = up[1].shape[1 if transposed else 2]
        _need(down[1].shape == ((E, I, H) if transposed else (E, H, I)), down[0], down[1], f"E {E}, I {I}, H {H}")
        for e in range(E):
            for i, part in enumerate(("gate_proj", "up_proj")):
                if not transposed:
                    matrix = row_major(up[1], I, H, (2 * e + i) * I)
                else:
                    rows = slice(i, None, 2) if stack.interleaved else slice(i * I, (i + 1) * I)
                    matrix = slice_view(up[1], e, (H, 2 * I), lambda t, rows=rows: t[:, rows].T, 2)
                self._quantize(f"{module}.{e}.{part}", matrix, up[1].file.name)
            matrix = slice_view(down[1], e, (I, H), lambda t: t.T, 1) if transposed else row_major(down[1], H, I, e * H)
            self._quantize(f"{module}.{e}.down_proj", matrix, down[1].file.name)
        if stack.bias:
            self._biases(module, up[0], down[0], (E, I, H), stack.interleaved)

    def _orientation(self, stack: Stack, name: str, up: Stored, down: Stored) -> bool:
        """Whether the tensors are [E, in, out]."""
        _need(len(up.shape) == 3 and len(down.shape) == 3, name, up, "[experts, rows, columns]")
        if stack.transposed is not None:
            return stack.transposed
        fits = lambda H, I: (up.shape[1:] == (2 * I, H) and down.shape[1:] == (H, I),
                             up.shape[1:] == (H, 2 * I) and down.shape[1:] == (I, H))  # fmt: skip
        found = {fits(H, I) for H in self.hidden for I in down.shape[1:]} - {(False, False)}
        if found not in ({(True, False)}, {(False, True)}):
            raise ValueError(f"{name} {list(up.shape)}: whether this is [E, 2I, H] or [E, H, 2I] cannot be told from "
                             "hidden_size in config.json; leave the layer out with --exclude")  # fmt: skip
        return found == {(False, True)}

    def _biases(self, module: str, up: str, down: str, sizes: tuple[int, int, int], interleaved: bool) -> None:
        E, I, H = sizes
        for name, n, parts in ((up, 2 * I, ("gate_proj", "up_proj")), (down, H, ("down_proj",))):
            name += "_bias"
            if name not in self.left:
                raise ValueError(f"{name} is missing: download the checkpoint again")
            stored = self.left.pop(name)
            _need(stored.shape == (E, n), name, stored, f"[{E}, {n}]")
            stems = [f"{module}.{{e}}.{part}" for part in parts]
            self.jobs += bias_jobs(name, stored, stems, interleaved and len(parts) == 2)

    def _dbrx(self) -> None:
        """[E * I, H] matrices w1, v1 and, per expert [in, out], w2."""
        if "dbrx" not in self.types:
            return
        E = (self.source.config.get("ffn_config") or {}).get("moe_num_experts")
        for name, stored in list(self.left.items()):
            match = DBRX.fullmatch(name)
            if match is None or self._leave(match["module"]):
                continue
            fits = type(E) is int and E > 0 and len(stored.shape) == 2 and stored.shape[0] % E == 0
            _need(fits, name, stored, f"[{E} experts * I, H]")
            I, H = stored.shape[0] // E, stored.shape[1]
            del self.left[name]
            for e in range(E):
                down = match["part"] == "w2"
                matrix = slice_view(stored, e, (I, H), lambda t: t.T, 1) if down else row_major(stored, I, H, e * I)
                self._quantize(f"{match['module']}.{e}.{DBRX_PARTS[match['part']]}", matrix, stored.file.name)

    # ------------------------------------------------------------ sources that are quantized
    def _mxfp4(self) -> None:
        if "gpt_oss" not in self.types:
            raise ValueError(f"MXFP4 experts are known for gpt_oss only, not for model_type {self.types[0]!r}")
        for name in [n for n in self.left if n.endswith("experts.gate_up_proj_blocks")]:
            up, down = name.removesuffix("_blocks"), name.removesuffix("gate_up_proj_blocks") + "down_proj"
            module = up.removesuffix(".gate_up_proj")
            if self._leave(module):
                raise ValueError(f"{module} is {self.report.skipped[module]}, but its experts are MXFP4, which one "
                                 "config cannot name next to NVFP4: convert all, or start from bf16")  # fmt: skip
            missing = [n for p in (up, down) for n in (f"{p}_blocks", f"{p}_scales") if n not in self.left]
            if missing:
                raise ValueError(f"{missing[0]} is missing: download the checkpoint again")
            pairs = {p: (self.left.pop(f"{p}_blocks"), self.left.pop(f"{p}_scales")) for p in (up, down)}
            shard, (E, N) = pairs[up][0].file.name, pairs[up][0].shape[:2]
            H = pairs[down][0].shape[1]
            for e in range(E):
                for i, part in enumerate(("gate_proj", "up_proj")):
                    self._quantize(f"{module}.{e}.{part}", mxfp4(*pairs[up], e, i, 2, up), shard)
                self._quantize(f"{module}.{e}.down_proj", mxfp4(*pairs[down], e, 0, 1, down), pairs[down][0].file.name)
            self._biases(module, up, down, (E, N // 2, H), True)

    def _fp8(self, q: Mapping) -> None:
        block = q.get("weight_block_size")
        if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
            raise ValueError(f"FP8 without blocks (weight_block_size {block!r}) is not read: use the original")
        experts: dict[str, dict[str, set[int]]] = {}
        for name in [n for n in self.left if n.endswith(".weight_scale_inv")]:
            stem = name.removesuffix(".weight_scale_inv")
            weight = self.left.get(f"{stem}.weight")
            if weight is None or weight.dtype != "F8_E4M3" or self.left[name].dtype not in ("F32", "BF16", "F8_E8M0"):
                raise ValueError(f"{name} has no F8_E4M3 {stem}.weight: a shard is missing; download it again")
            matrix = fp8_blocks(weight, self.left.pop(name), tuple(block), stem)
            del self.left[f"{stem}.weight"]
            match = PER_EXPERT.fullmatch(stem)
            if match is not None and not self._leave(match["module"]):
                experts.setdefault(match["module"], {}).setdefault(match["part"], set()).add(int(match["e"]))
                self._quantize(stem, matrix, weight.file.name)
                continue
            self.jobs.append(dense_job(f"{stem}.weight", weight.file.name, matrix, self.options.dtype or "BF16"))
            self.report.dequantized += 1
            self.dense |= set() if match else {stem}
        for module, parts in experts.items():
            self._check_complete(module, parts)
        for name, stored in self.left.items():
            if stored.dtype.startswith("F8"):
                raise ValueError(f"{name} is {stored.dtype} without {name}_scale_inv: download the checkpoint again")

    def _carry(self, info: QuantizationInfo) -> None:
        """NVFP4 of one dialect to the other: codes and block scales are the same bytes."""
        source, target = info.dialect, self.options.dialect
        if source is target:
            raise ValueError(f"{self.source.folder} is quantized already (NVFP4 of {source.name}); quantize the "
                             "original checkpoint, or name another --dialect to carry these over")  # fmt: skip
        if info.layers is not None or "moe_quant_algo" in (self.source.config.get("quantization_config") or {}):
            raise ValueError("quant_algo MIXED_PRECISION cannot be carried into another dialect: quantize the original")
        if self.options.exclude or self.options.include is not None:
            raise ValueError("--exclude and --include choose what is quantized; these weights are NVFP4 already")
        marker = source.global_scale
        for name in [n for n in self.left if n.endswith(f".{marker}")]:
            stem = name.removesuffix(f".{marker}")
            parts = {s: self.left.pop(f"{stem}.{s}", None) for s in source.suffixes}
            codes, sf = parts[source.weight], parts[source.sf]
            if codes is None or sf is None or codes.dtype != "U8" or sf.dtype != "F8_E4M3":
                raise ValueError(f"{stem} has a {marker}, but not {source.weight} in U8 and {source.sf} in F8_E4M3: "
                                 "the checkpoint is damaged; download it again")  # fmt: skip
            _need(len(codes.shape) == 2 and sf.shape == (codes.shape[0], codes.shape[1] / 8), stem, codes, "[N, K/2]")
            for suffix, new in zip(source.suffixes, target.suffixes, strict=True):
                old_name, new_name, stored = f"{stem}.{suffix}", f"{stem}.{new}", parts[suffix]
                if stored is None:
                    continue
                if suffix in (source.weight, source.sf):
                    self.jobs.append(copy_job(old_name, stored, new_name))
                else:
                    self.jobs.append(scale_job(old_name, stored, new_name, source, target))
                self.has_input_scale |= suffix == source.input_scale
            self.quantized[stem] = None
            self.report.carried += 1
        for name in self.left:
            if KV_SCALE.search(name):
                self.report.skipped[name] = "a KV cache scale, copied under its own name"
        if not self.report.carried:
            raise ValueError(f"{self.source.folder} names NVFP4 in its config, but no tensor ends in {marker}: a shard "
                             "is missing, or the experts are fused stacks, which are not supported")  # fmt: skip

    # ------------------------------------------------------------ the rest
    def _copy(self, name: str, stored: Stored) -> None:
        self.jobs.append(copy_job(name, stored))
        self.report.copied += 1
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and len(stored.shape) == 2 and not re.search(r"embed|\bwte\b|\bwpe\b", module):
            if not any(module.startswith(f"{m}.") for m in self.excluded):
                self.dense.add(module)

    def _check_nothing_missed(self) -> None:
        """Everything that looks like experts is planned or left alone on purpose."""
        for name, stored in self.left.items():
            stacked = len(stored.shape) >= 3 and re.search(r"moe|expert", name)
            inside = len(stored.shape) == 2 and re.search(r"(^|\.)\w*(?<!shared_)experts?\.", name)
            if re.search(r"shared_expert", name) or not (stacked or inside) or name.endswith("norm.weight"):
                continue
            module = re.sub(r"(experts?)\..*", r"\1", name)
            owners = {module, re.sub(r"block_sparse_moe\..*", "block_sparse_moe.experts", name)}
            if owners & self.excluded or self._leave(module):
                continue
            raise ValueError(
                f"{name} {stored.dtype} {list(stored.shape)} looks like experts, in a layout that is not known for "
                f"model_type {self.types[0] if self.types else None!r}: quantize it while it loads "
                f"(from_pretrained with MoeNvfp4Config), or leave it as it is with exclude=['{module}']"
            )
        if not self.quantized:
            model = (self.source.config.get("architectures") or self.types or ["this model"])[0]
            all_excluded = f": {len(self.excluded)} experts modules are all excluded" if self.excluded else ""
            raise ValueError(f"{model} has no experts to quantize" + (
                all_excluded or "; dense models are not what this library is for"))  # fmt: skip

    def _quantization_config(self, info: QuantizationInfo | None) -> dict:
        o, q = self.options, self.source.config.get("quantization_config") or {}
        own = {"activations": o.activations, "recipe": o.recipe, "exclude": list(o.exclude), "input_scale": False}
        if info is not None:
            own = {"activations": info.activations, **(q.get("moe_nvfp4") or {}), "input_scale": self.has_input_scale}
        dense = self.dense | ({"lm_head"} - self.quantized.keys())
        ignore = ignore_patterns(dense, set(self.quantized), self.excluded, o.dialect)
        version = sys.modules[__name__.partition(".")[0]].__version__  # above this file, so not imported by it
        new = write_config(o.dialect, ignore, self.has_input_scale, own, version)
        if q.get("kv_cache_scheme") is not None:
            new["kv_cache_scheme"] = q["kv_cache_scheme"]
        return new


def source_matrices(source: Checkpoint, modules: Iterable[str]) -> dict[str, Matrix]:
    """The dense matrices of the experts `modules` of a checkpoint, by the names that NVFP4 files give them."""
    info = read_config(source.config)
    if info is None:
        options = Options("max", (), tuple(modules), DIALECTS["modelopt"], "bf16", "cpu", None)
        return Plan(source, options, ConversionReport(source.folder, source.folder, "max")).quantized
    marker = f".{info.dialect.global_scale}"
    stems = [n.removesuffix(marker) for n in source.tensors if n.endswith(marker)]
    return {stem: nvfp4_matrix(source, stem, info.dialect) for stem in stems}


def nvfp4_matrix(checkpoint: Checkpoint, stem: str, dialect: Dialect) -> Matrix:
    """Codes and scales -> fp32 [N, K]."""
    codes, sf, scale = (checkpoint.tensors[f"{stem}.{s}"] for s in dialect.suffixes[:3])
    N, half = codes.shape

    def rows(a: int, b: int) -> Tensor:
        part = codes.read(a * half, (b - a) * half).view(-1, half)
        part_sf = sf.read(a * half // 8, (b - a) * half // 8).view(-1, half // 8)
        return dequantize(part, part_sf, dialect.decode_scale(scale.tensor()).reshape(()))

    return Matrix(N, 2 * half, codes.size + sf.size, lambda: rows)


def _need(condition: bool, name: str, stored: Stored, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} has shape {list(stored.shape)}, expected {expected}: the file belongs to another "
                         "model, or this layout is not known here; leave it as it is with --exclude")  # fmt: skip


def ignore_patterns(dense: set[str], quantized: set[str], excluded: set[str], dialect: Dialect) -> list[str]:
    """The `ignore` list of a config: `dense` modules, layers folded into a wildcard where no quantized one fits it.

    Wildcards for ModelOpt, `re:` expressions for compressed-tensors. Excluded experts are named
    with everything in them, and also as transformers names them.
    """
    groups: dict[str, set[str]] = {}
    for module in dense:
        groups.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", module), set()).add(module)
    few = {re.sub(r"experts\.\d+\.", "experts.0.", name) for name in quantized}
    found = set()
    for pattern, members in groups.items():
        found |= members if any(fnmatchcase(name, pattern) for name in few) else {pattern}
    found |= {p.removesuffix(".layer") for p in found if p.endswith(".router.layer")}
    found |= {f"{name}*" for module in excluded for name in _aliases(module)}
    if dialect.reciprocal:  # compressed-tensors
        as_re = lambda p: re.escape(p[:-1]).replace(r"\*", r"\d+") + ".*" if p.endswith("experts*") else (
            re.escape(p).replace(r"\*", r"\d+") + "$")  # fmt: skip
        found = {f"re:{as_re(p)}" if "*" in p else p for p in found}
    return sorted(found)


# ---------------------------------------------------------------- the work
def convert_checkpoint(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    recipe: str = DEFAULT_RECIPE,
    exclude: Iterable[str] = (),
    include: Iterable[str] | None = None,
    dialect: str = "modelopt",
    activations: str = "bf16",
    workers: int | None = None,
    device: str | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Write the checkpoint in folder `source` to the new folder `destination`, with NVFP4 experts.

    recipe       how block scales are chosen (quantize.experts.RECIPES)
    exclude      experts modules to leave as they are: names or wildcards; `include`: only these
    dialect      "modelopt" or "compressed-tensors": the names and the config of the files
    activations  what a loader is asked for: "bf16" (W4A16) or "nvfp4" (W4A4)
    workers      threads (default: one per core)
    device       where matrices are quantized (default: a GPU where there is one); the bytes are the same
    dry_run      plan only, write nothing

    Memory stays below 1.5 GB. The destination appears whole, at the end; until then everything is in
    `.NAME.partial` next to it. An interrupted run leaves the finished files there and the same call
    goes on with them; its result is the same bytes. The source is only read.

    ValueError for what cannot be converted, naming the tensor, the rule and the way out; OSError
    where the disk is full, a file vanished or cannot be read.
    """
    began = time.perf_counter()
    source, destination = Path(source), Path(os.path.abspath(destination))
    if destination.exists() or destination.is_symlink():
        raise ValueError(f"{destination} exists: name a folder that does not, or remove it first")
    checkpoint = open_checkpoint(source)
    options = _options(checkpoint.config, recipe, exclude, include, dialect, activations, device)
    report = ConversionReport(source, destination, recipe)
    plan = Plan(checkpoint, options, report)
    report.skipped |= {p.name: "a weight file that belongs to no part of this checkpoint" for p in checkpoint.ignored}
    if dry_run:
        return report
    others = _other_files(checkpoint)
    place = Workplace(destination, _key(checkpoint, options))
    _check_space(place, report.bytes_after + sum(f.stat().st_size for f in others))
    state = _state(checkpoint)
    with place:
        if place.restarted and progress:
            print(f"starting again: {place.restarted}", file=sys.stderr)
        _run(plan.jobs, place, report, workers or _default_workers(), progress)
        _write_small_files(place.files, plan, others)
        if _state(checkpoint) != state:
            raise ValueError(f"{source} changed while it was read: run the same command again")
        place.publish()
    report.seconds = time.perf_counter() - began
    return report


def _options(config, recipe, exclude, include, dialect, activations, device) -> Options:
    for value, known, what in ((recipe, RECIPES, "recipe"), (dialect, DIALECTS, "dialect"),
                               (activations, ACTIVATIONS, "activations")):  # fmt: skip
        if value not in known:
            raise ValueError(f"unknown {what} {value!r}: choose one of {', '.join(known)}")
    dtypes = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    named = [c.get("dtype") or c.get("torch_dtype") for c in (config, config.get("text_config") or {})]
    known = [dtypes[d] for d in (str(d).removeprefix("torch.") for d in named) if d in dtypes]
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    include = None if include is None else tuple(include)
    dtype = known[0] if known else None
    return Options(recipe, tuple(exclude), include, DIALECTS[dialect], activations, device, dtype)


def _default_workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _state(checkpoint: Checkpoint) -> list:
    """What the source is, short of reading it: sizes in bytes and modification times in ns."""
    stats = [(f.name, f.stat()) for f in (*checkpoint.files, checkpoint.folder / "config.json")]
    return [[name, s.st_size, s.st_mtime_ns] for name, s in stats]


def _key(checkpoint: Checkpoint, options: Options) -> dict:
    """Two runs with equal keys write the same bytes."""
    o = options
    settings = [o.recipe, o.exclude, o.include, o.dialect.name, o.activations, o.dtype, 1]
    return {
        "the settings": hashlib.sha256(json.dumps(settings).encode()).hexdigest(),
        "the source": [str(checkpoint.folder.resolve()), *_state(checkpoint)],
    }


def _check_space(place: Workplace, needed: int) -> None:
    parent = place.destination.parent
    while not parent.exists():
        parent = parent.parent
    done = sum(f.stat().st_size for f in place.files.glob("*")) if place.files.is_dir() else 0
    free = shutil.disk_usage(parent).free
    if needed - done > free:
        raise ValueError(
            f"{parent} has {readable_size(free)} free, about {readable_size(needed - done)} are needed: make room, or "
            "name a destination on another disk"
        )


def _other_files(checkpoint: Checkpoint) -> list[Path]:
    """Tokenizer, templates and the like: all that is not weights and is not written anew."""
    anew = {"config.json", "hf_quant_config.json"}
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
    files = sorted(f for f in checkpoint.folder.iterdir() if f.is_file() and f.name not in anew)
    return [f for f in files if f.suffix not in weights and not f.name.endswith(".index.json")]


def _write_small_files(folder: Path, plan: Plan, others: list[Path]) -> None:
    """config.json, the index where there are several shards, and the source's other files."""
    for file in others:
        shutil.copy2(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    places = {name: job.shard for job in plan.jobs for name in job.outputs}
    if len(set(places.values())) > 1 or (plan.source.folder / INDEX).is_file():
        total = sum(tensor_bytes(*out) for job in plan.jobs for out in job.outputs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


class _Shard:
    """A file being written, and how many of its jobs are not done."""

    def __init__(self, path: Path, jobs: list[Job]):
        self.writer = ShardWriter(path, {name: out for job in jobs for name, out in job.outputs.items()})
        self.open_jobs, self.mutex = len(jobs), threading.Lock()

    def job_done(self) -> bool:
        """True once: for the last job."""
        with self.mutex:
            self.open_jobs -= 1
            return self.open_jobs == 0


def _run(jobs: list[Job], place: Workplace, report: ConversionReport, workers: int, progress: bool) -> None:
    """All jobs of shards that are not finished, by `workers` threads, at most IN_FLIGHT bytes in memory."""
    by_shard: dict[str, list[Job]] = {}
    for job in jobs:
        by_shard.setdefault(job.shard, []).append(job)
    report.resumed_shards = sum(shard in place.finished for shard in by_shard)
    done = sum(job.size for job in jobs if job.shard in place.finished)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one matrix per worker beats one matrix at a time
    bar = tqdm(total=sum(j.size for j in jobs), initial=done, unit="B", unit_scale=True, desc="NVFP4",
               disable=not progress)  # fmt: skip
    try:
        with bar, ThreadPoolExecutor(workers) as pool:
            _feed(pool, workers, _pending(by_shard, place), place, bar)
    finally:
        torch.set_num_threads(threads)


def _pending(by_shard: Mapping[str, list[Job]], place: Workplace) -> Iterator[tuple[_Shard, Job]]:
    for name, jobs in by_shard.items():
        if name not in place.finished:
            shard = _Shard(place.files / name, jobs)
            yield from ((shard, job) for job in jobs)


def _feed(pool: ThreadPoolExecutor, workers: int, work: Iterator[tuple[_Shard, Job]], place: Workplace, bar) -> None:
    """Give work to the pool as memory allows; the first error stops everything and is raised."""
    running: dict = {}
    stop = threading.Event()

    def one(shard: _Shard, job: Job) -> int:
        if not stop.is_set():
            job.run(lambda name, data, offset: shard.writer.write(name, data, offset))
            if shard.job_done():
                place.finish(shard.writer.path)
        return job.size

    def collect() -> None:
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            del running[future]
            bar.update(future.result())

    try:
        for shard, job in work:
            while running and (sum(running.values()) + job.memory > IN_FLIGHT or len(running) >= 4 * workers):
                collect()
            running[pool.submit(one, shard, job)] = job.memory
        while running:
            collect()
    finally:
        stop.set()
