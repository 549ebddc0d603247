"""What becomes of every tensor of a checkpoint, decided from its headers and config alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from torch import Tensor

from moe_nvfp4._version import __version__
from moe_nvfp4.quantize.dialects import DIALECTS, Dialect, QuantizationInfo, read_config, write_config
from moe_nvfp4.quantize.files import Checkpoint, TensorSlice, tensor_bytes
from moe_nvfp4.quantize.jobs import (
    Job,
    Options,
    bias_jobs,
    copy_job,
    dense_job,
    dense_stack_job,
    quantize_jobs,
    rescale_job,
    scale_job,
    stack_jobs,
    without,
)
from moe_nvfp4.quantize.matrices import (
    ErrorSums,
    Matrix,
    NVFP4Stack,
    fp8,
    mxfp4,
    nvfp4_matrix,
    nvfp4_stack,
    row_major,
    slice_view,
)
from moe_nvfp4.quantize.names import (
    BANK,
    DBRX,
    DBRX_PARTS,
    DENSE,
    FUSED,
    KV_SCALE,
    PER_EXPERT,
    PRE_QUANT_SCALE,
    PROJECTION_FIRST,
    SCALES,
    STACKS,
    STEP,
    Stack,
    aliases,
    fp8_scale,
    ignore_patterns,
    sub_configs,
    up_of,
)
from moe_nvfp4.weights import check_block_scales


@dataclass
class ConversionReport:
    """What a conversion did, or (dry_run) would do. Sizes in bytes of weight files."""

    source: Path
    destination: Path
    recipe: str
    quantized: int = 0  # matrices
    carried: int = 0  # NVFP4 matrices whose bytes were carried into another dialect
    copied: int = 0  # tensors
    dequantized: int = 0  # FP8 matrices and MXFP4 stacks that became dense
    skipped: dict[str, str] = field(default_factory=dict)  # what was left alone, and why
    bytes_before: int = 0
    bytes_after: int = 0
    experts_before: int = 0
    experts_after: int = 0
    shards: int = 0
    resumed: int = 0  # source bytes whose work an earlier run had done
    rescaled: int = 0  # carried matrices that were quantized again, for a global scale that gate and up share
    rescaling: ErrorSums = field(default_factory=ErrorSums)  # what that added
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """The plan, for people."""
        yield f"{self.source} -> {self.destination}: {self.shards} file(s)"
        for count, what in (
            (self.quantized, f"expert matrices quantized ({self.recipe})"),
            (self.carried, "NVFP4 matrices carried over, the same bytes"),
            (self.dequantized, "FP8 and MXFP4 tensors made dense"),
            (self.copied, "tensors copied as they are"),
        ):
            if count:
                yield f"  {count:7d} {what}"
        yield from self.rescaled_lines()
        yield from (f"  left alone: {name}: {why}" for name, why in self.skipped.items())
        yield f"  experts {readable_size(self.experts_before)} -> {readable_size(self.experts_after)}"
        yield f"  all     {readable_size(self.bytes_before)} -> {readable_size(self.bytes_after)}"


    def rescaled_lines(self) -> Iterator[str]:
        """What --share-scales did; the error, unless an earlier run did a part of it."""
        if self.rescaled:
            known = self.rescaling.square and not self.resumed
            error = f", which adds a relative error of {self.rescaling.relative:.4f} to them" if known else ""
            yield f"  {self.rescaled:7d} of the carried matrices (gate or up) quantized again, to share a scale{error}"


def readable_size(n: float) -> str:
    """n bytes, for a person: "44.8 MB"."""
    for unit in ("B", "KB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"


class Plan:
    """What becomes of every tensor of `source`: `jobs`, and `config`, the new config.json.

    Raises ValueError for what cannot be converted; reads headers and config only.
    """

    def __init__(self, source: Checkpoint, options: Options, report: ConversionReport):
        self.source, self.options, self.report = source, options, report
        self.left = dict(source.tensors)  # not planned yet
        self.jobs: list[Job] = []
        self.to_quantize: dict[str, Matrix] = {}
        self.quantized: dict[str, Matrix] = {}  # modules, by the names of new files
        self.carried: dict[str, Matrix] = {}  # of NVFP4 sources: `quantized`, without pre_quant_scale
        self.dequantized: dict[str, Matrix] = {}  # tensors that were FP8
        self.unchanged = False  # NVFP4 already, in the dialect and the layout of new files
        self.dense: set[str] = set()  # modules that keep, or get, dense weights
        self.excluded: set[str] = set()  # experts modules
        self.modules: dict[str, str | None] = {}  # all of these in a source that is quantized; why one is left alone
        self.unmatched = [*options.exclude, *(options.include or ())]  # patterns without a module
        self.has_input_scale = self.has_pre_quant_scale = False
        configs = sub_configs(source.config)
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
        info = nvfp4_info(self.source)
        if info is not None:
            self._carry(info)
        else:
            if self.options.share_scales:
                raise ValueError(f"{self.source.folder} is not NVFP4 yet: what is quantized here shares one global "
                                 "scale between gate and up anyway; leave out --share-scales")  # fmt: skip
            if method == "mxfp4":
                self._mxfp4()
            if method == "fp8":
                self._fp8(q)
            self._per_expert()
            self._stacked()
            self._dbrx()
            self._check_nothing_missed()
        for job in quantize_jobs(self.to_quantize, self.options):
            self.jobs.append(job)
            self.report.experts_after += sum(tensor_bytes(*out) for out in job.outputs.values())
        for name, stored in list(self.left.items()):
            if self._is_scale(name):
                raise ValueError(f"{name} is a scale that nothing reads, which would leave silently wrong numbers: "
                                 "this quantization is not known here; use the original checkpoint")  # fmt: skip
            self._copy(name, stored)
        self.config = {**self.source.config, "quantization_config": self._quantization_config(info)}

    def _is_scale(self, name: str) -> bool:
        if name.endswith(".scale"):  # of a norm, unless its weight is not dense
            weight = self.left.get(f"{name.removesuffix('scale')}weight")
            return weight is not None and weight.dtype not in DENSE
        return SCALES.search(name) is not None

    # ------------------------------------------------------------ dense and FP8 experts
    def _why_not(self, module: str) -> str | None:
        """Why the experts module `module` is left as it is; None: it is quantized."""
        o, names = self.options, [n for m in aliases(module) for n in (m, f"{m}.0.down_proj", f"{m}.0.w2")]
        matches = lambda pattern: any(fnmatchcase(n, pattern) or n.startswith(f"{pattern}.") for n in names)
        self.unmatched = [pattern for pattern in self.unmatched if not matches(pattern)]
        if any(map(matches, o.exclude)):
            return "excluded"
        if o.include is not None and not any(map(matches, o.include)):
            return "not included"
        layer = re.search(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.", module)
        if re.match(r"(model\.)?mtp\b", module) or (layer and self.layers and int(layer[1]) >= self.layers):
            return "a multi-token prediction layer, which transformers reads dense, for generate(use_mtp=True)"
        return None

    def _leave(self, module: str) -> bool:
        if module not in self.modules:
            self.modules[module] = why = self._why_not(module)
            if why is not None:
                self.excluded.add(module)
                self.report.skipped[module] = why
        return self.modules[module] is not None

    def _quantize(self, stem: str, matrix: Matrix) -> None:
        self.to_quantize[stem] = self.quantized[stem] = matrix
        self.report.quantized += 1
        self.report.experts_before += matrix.size

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
            self._quantize(name.removesuffix(".weight"), row_major(stored, *stored.shape))
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
                for other in (down_name, prefix + stack.gate) if stack.gate else (down_name,):
                    if other not in self.left:
                        raise ValueError(f"{other} is missing next to {name}: download the checkpoint again")
                down = self.left.pop(down_name)
                del self.left[name]
                gate = self.left.pop(prefix + stack.gate) if stack.gate else None
                if gate is not None:
                    self._separate(module, gate, (name, up), (down_name, down))
                else:
                    self._stack(module, stack, (name, up), (down_name, down))

    def _separate(
        self, module: str, gate: TensorSlice, up: tuple[str, TensorSlice], down: tuple[str, TensorSlice]
    ) -> None:
        """A stack for each projection, [E, out, in]."""
        fits = len(up[1].shape) == 3 and gate.shape == up[1].shape and gate.size
        _need(fits, up[0], up[1], f"{list(gate.shape)} as the gate's")
        E, I, H = gate.shape
        _need(down[1].shape == (E, H, I), down[0], down[1], f"[{E}, {H}, {I}]")
        for e in range(E):
            for part, stored in (("gate_proj", gate), ("up_proj", up[1]), ("down_proj", down[1])):
                rows, columns = stored.shape[1:]
                matrix = row_major(stored, rows, columns, e * rows)
                self._quantize(f"{module}.{e}.{part}", matrix)

    def _stack(self, module: str, stack: Stack, up: tuple[str, TensorSlice], down: tuple[str, TensorSlice]) -> None:
        transposed = self._orientation(stack, *up, down[1])
        E, I = up[1].shape[0], up[1].shape[2 if transposed else 1] // 2
        H = up[1].shape[1 if transposed else 2]
        _need(down[1].shape == ((E, I, H) if transposed else (E, H, I)), down[0], down[1], f"E {E}, I {I}, H {H}")
        for e in range(E):
            for i, part in enumerate(("gate_proj", "up_proj")):
                if not transposed and stack.interleaved:
                    matrix = slice_view(up[1], e, (2 * I, H), lambda t, i=i: t[i::2], 2)
                elif not transposed:
                    matrix = row_major(up[1], I, H, (2 * e + i) * I)
                else:
                    rows = slice(i, None, 2) if stack.interleaved else slice(i * I, (i + 1) * I)
                    matrix = slice_view(up[1], e, (H, 2 * I), lambda t, rows=rows: t[:, rows].T, 2)
                self._quantize(f"{module}.{e}.{part}", matrix)
            matrix = slice_view(down[1], e, (I, H), lambda t: t.T, 1) if transposed else row_major(down[1], H, I, e * H)
            self._quantize(f"{module}.{e}.down_proj", matrix)
        if stack.bias:
            self._biases(module, up[0], down[0], (E, I, H), stack.interleaved)

    def _orientation(self, stack: Stack, name: str, up: TensorSlice, down: TensorSlice) -> bool:
        """Whether the tensors are [E, in, out]."""
        _need(len(up.shape) == len(down.shape) == 3 and up.size and down.size, name, up, "[experts, rows, columns]")
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
            fits = type(E) is int and E > 0 and len(stored.shape) == 2 and stored.shape[0] % E == 0 and stored.size
            _need(fits, name, stored, f"[{E} experts * I, H]")
            I, H = stored.shape[0] // E, stored.shape[1]
            del self.left[name]
            for e in range(E):
                down = match["part"] == "w2"
                matrix = slice_view(stored, e, (I, H), lambda t: t.T, 1) if down else row_major(stored, I, H, e * I)
                self._quantize(f"{match['module']}.{e}.{DBRX_PARTS[match['part']]}", matrix)

    # ------------------------------------------------------------ sources that are quantized
    def _mxfp4(self) -> None:
        if "gpt_oss" not in self.types:
            raise ValueError(f"MXFP4 experts are known for gpt_oss only, not for model_type {self.types[0]!r}")
        for name in [n for n in self.left if n.endswith("experts.gate_up_proj_blocks")]:
            up, down = name.removesuffix("_blocks"), name.removesuffix("gate_up_proj_blocks") + "down_proj"
            module = up.removesuffix(".gate_up_proj")
            left_alone = self._leave(module)
            missing = [n for p in (up, down) for n in (f"{p}_blocks", f"{p}_scales") if n not in self.left]
            if missing:
                raise ValueError(f"{missing[0]} is missing: download the checkpoint again")
            pairs = {p: (self.left.pop(f"{p}_blocks"), self.left.pop(f"{p}_scales")) for p in (up, down)}
            E, N = pairs[up][0].shape[:2]
            H = pairs[down][0].shape[1]
            if left_alone:  # dense, as gpt-oss keeps it: one config cannot name MXFP4 next to NVFP4
                for name, pair in pairs.items():
                    matrices = [mxfp4(*pair, e, 0, 1, name) for e in range(E)]
                    dtype = self.options.dtype or "BF16"
                    self.jobs.append(dense_stack_job(name, matrices, dtype))
                    self.report.dequantized += 1
                continue
            for e in range(E):
                for i, part in enumerate(("gate_proj", "up_proj")):
                    self._quantize(f"{module}.{e}.{part}", mxfp4(*pairs[up], e, i, 2, up))
                self._quantize(f"{module}.{e}.down_proj", mxfp4(*pairs[down], e, 0, 1, down))
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
            matrix = fp8(weight, self.left.pop(name), tuple(block), stem)
            del self.left[f"{stem}.weight"]
            match = PER_EXPERT.fullmatch(stem)
            if match is not None and not self._leave(match["module"]):
                experts.setdefault(match["module"], {}).setdefault(match["part"], set()).add(int(match["e"]))
                self._quantize(stem, matrix)
                continue
            self._dequantize(stem, matrix)
            self.dense |= set() if match else {stem}
        for module, parts in experts.items():
            self._check_complete(module, parts)
        for name, stored in self.left.items():
            if stored.dtype.startswith("F8"):
                raise ValueError(f"{name} is {stored.dtype} without {name}_scale_inv: download the checkpoint again")

    def _carry(self, info: QuantizationInfo) -> None:
        """NVFP4 in another dialect or layout: codes and block scales are the same bytes."""
        source, target = info.dialect, self.options.dialect
        if self.options.exclude or self.options.include is not None:
            raise ValueError("--exclude and --include choose what is quantized; these weights are NVFP4 already")
        turned = [n for n in self.left if PROJECTION_FIRST.match(n)]
        fused = [n for n in self.left if FUSED.search(n) and f"{n}_weight_scale" in self.left]
        self._fp8_next_to_nvfp4()
        for name in fused:
            self._carry_stack(name, source)
        marker = source.global_scale
        banks = [n.removesuffix(f".{marker}") for n, t in self.left.items() if n.endswith(f".{marker}") and
                 len(self.left.get(f"{n.removesuffix(marker)}{source.weight}", t).shape) == 3]  # fmt: skip
        for stem in banks:
            self._carry_bank(stem, source)
        self.unchanged = source is target and not (turned or fused or banks or self.report.dequantized)
        for name in [n for n in self.left if n.endswith(f".{marker}")]:
            self._carry_matrix(name.removesuffix(f".{marker}"), source)
        if self.options.share_scales:
            self._share_scales()
        for name in self.left:
            if KV_SCALE.search(name):
                self.report.skipped[name] = "a KV cache scale, copied under its own name"
        if not self.report.carried:
            raise ValueError(f"{self.source.folder} names NVFP4 in its config, but no tensor ends in {marker}: a shard "
                             "is missing")  # fmt: skip

    def _share_scales(self) -> None:
        """Gate or up is quantized again, whichever has the smaller global scale, where an expert has one for each."""
        new = {}
        for gate, up, scales in separate_scales(self.carried):
            stem = gate if scales[0] < scales[1] else up
            new[stem] = rescale_job(stem, self.carried[stem], max(scales), self.options, self.report.rescaling)
        if not new:
            raise ValueError(f"{self.source.folder}: gate and up of every expert share a global scale already: "
                             "leave out --share-scales")  # fmt: skip
        names = {name for job in new.values() for name in job.outputs}
        kept = [without(job, names) if names & job.outputs.keys() else job for job in self.jobs]
        self.jobs = [*(job for job in kept if job.outputs), *new.values()]
        self.report.rescaled, self.unchanged = len(new), False

    def _carry_matrix(self, stem: str, source: Dialect) -> None:
        target = self.options.dialect
        parts = {s: self.left.pop(f"{stem}.{s}", None) for s in source.suffixes}
        codes, sf = parts[source.weight], parts[source.sf]
        if codes is None or sf is None or codes.dtype != "U8" or sf.dtype != "F8_E4M3":
            raise ValueError(f"{stem} has a {source.global_scale}, but not {source.weight} in U8 and {source.sf} in "
                             "F8_E4M3: the checkpoint is damaged; download it again")  # fmt: skip
        _need(len(codes.shape) == 2 and sf.shape == (codes.shape[0], codes.shape[1] / 8), stem, codes, "[N, K/2]")
        new_stem = PROJECTION_FIRST.sub(r"\g<module>.\g<e>.\g<part>", stem)
        for suffix, new in zip(source.suffixes, target.suffixes, strict=True):
            old_name, new_name, stored = f"{stem}.{suffix}", f"{new_stem}.{new}", parts[suffix]
            if stored is None:
                continue
            if suffix in (source.weight, source.sf):
                check = check_block_scales if suffix == source.sf else None
                self.jobs.append(copy_job(old_name, stored, new_name, check))
            else:
                self.jobs.append(scale_job(old_name, stored, new_name, source, target))
            self.has_input_scale |= suffix == source.input_scale
        smooth = self.left.pop(f"{stem}.{PRE_QUANT_SCALE}", None)
        if smooth is not None:
            if target.reciprocal:
                raise ValueError(f"{stem}.{PRE_QUANT_SCALE} (AWQ) has no place in {target.name} files: keep ModelOpt's")
            self.jobs.append(copy_job(f"{stem}.{PRE_QUANT_SCALE}", smooth, f"{new_stem}.{PRE_QUANT_SCALE}"))
            self.has_pre_quant_scale = True
        self.quantized[new_stem] = nvfp4_matrix(self.source, stem, source)
        self.carried[new_stem] = nvfp4_matrix(self.source, stem, source, smooth=False)
        self.report.carried += 1

    def _carry_stack(self, name: str, source: Dialect) -> None:
        """ModelOpt's stack of experts as one matrix per expert and projection."""
        module, _, last = name.rpartition(".")
        parts = ["gate_proj", "up_proj"] if last == "gate_up_proj" else [last]
        stems = [f"{module}.{{e}}.{part}" for part in parts]
        interleaved = len(parts) == 2 and any(STACKS[t].interleaved for t in self.types if t in STACKS)
        stack = nvfp4_stack(self.source, name, source, interleaved)
        stack.check(name)
        self._carry_experts(stack, stems, source, [name, *(f"{name}_{s}" for s in (source.sf, *stack.scales))])
        bias = self.left.pop(f"{name}_bias", None)
        if bias is not None:
            _need(bias.shape == stack.shape[:2], f"{name}_bias", bias, "[E, out]")
            self.jobs += bias_jobs(f"{name}_bias", bias, stems, interleaved)

    def _carry_bank(self, stem: str, source: Dialect) -> None:
        """A stack for each projection, [E, out, in/2] (Step-3)."""
        match = BANK.search(stem)
        if match is None:
            raise ValueError(f"{stem}.{source.weight} is a stack of NVFP4 matrices with a name that is not known here: "
                             "quantize the original checkpoint")  # fmt: skip
        bank = nvfp4_stack(self.source, stem, source)
        bank.check(stem)
        stems = [f"{stem[: match.start()]}{STEP.module}.{{e}}.{match['part']}"]
        self._carry_experts(bank, stems, source, [f"{stem}.{s}" for s in (source.weight, source.sf, *bank.scales)])

    def _carry_experts(self, stack: NVFP4Stack, stems: list[str], source: Dialect, names: list[str]) -> None:
        for name in names:
            del self.left[name]
        self.jobs += stack_jobs(stack, stems, source, self.options.dialect)
        self.has_input_scale |= source.input_scale in stack.scales
        for e, (i, stem) in product(range(stack.shape[0]), enumerate(stems)):
            matrix = stack.matrix(e, i, len(stems), source)
            self.quantized[stem.format(e=e)] = self.carried[stem.format(e=e)] = matrix
        self.report.carried += stack.shape[0] * len(stems)

    def _fp8_next_to_nvfp4(self) -> None:
        """FP8 weights of mixed precision become dense: config files name one format."""
        for name in [n for n, t in self.left.items() if t.dtype == "F8_E4M3" and n.endswith(".weight")]:
            stem, weight = name.removesuffix(".weight"), self.left.pop(name)
            scale = fp8_scale(stem, self.left)
            if scale is None:
                raise ValueError(f"{name} is FP8 and has no scale next to it: a shard is missing, download it again")
            matrix = fp8(weight, self.left.pop(scale), None, stem)
            self._dequantize(stem, matrix)
            expert = PER_EXPERT.fullmatch(stem)
            if self.left.pop(f"{stem}.input_scale", None) is not None:
                self.report.skipped[f"{stem}.input_scale"] = "of an FP8 layer that becomes dense"
            if expert is not None:
                self.excluded.add(expert["module"])
            else:
                self.dense.add(stem)

    def _dequantize(self, stem: str, matrix: Matrix) -> None:
        name = f"{stem}.weight"
        self.jobs.append(dense_job(name, matrix, self.options.dtype or "BF16"))
        self.dequantized[name] = matrix
        self.report.dequantized += 1

    # ------------------------------------------------------------ the rest
    def _copy(self, name: str, stored: TensorSlice) -> None:
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
            if re.search(r"shared?_expert", name) or not (stacked or inside) or name.endswith("norm.weight"):
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
        new = write_config(o.dialect, ignore, self.has_input_scale, own, __version__, self.has_pre_quant_scale)
        if q.get("kv_cache_scheme") is not None:
            new["kv_cache_scheme"] = q["kv_cache_scheme"]
        return new


def nvfp4_info(source: Checkpoint) -> QuantizationInfo | None:
    """What the configs say about NVFP4; None for dense, FP8 and MXFP4 sources. ValueError for other formats."""
    q = source.config.get("quantization_config")
    method, hf = (q or {}).get("quant_method"), source.folder / "hf_quant_config.json"
    if (q is None and not hf.is_file()) or (method in ("fp8", "mxfp4") and "moe_quant_algo" not in q):
        return None
    info = read_config(source.config, json.loads(hf.read_text("utf-8")) if hf.is_file() else None)
    if info is None:
        raise ValueError(f"{source.folder} is quantized with {method!r}, which is not read here: fp8 (in "
                         "blocks), mxfp4, and NVFP4 of modelopt or compressed-tensors are")  # fmt: skip
    return info


def separate_scales(matrices: Mapping[str, Matrix]) -> Iterator[tuple[str, str, tuple[Tensor, Tensor]]]:
    """(gate's stem, up's stem, their global scales fp32 0-d) of the experts of NVFP4 files for which these differ."""
    for gate, matrix in matrices.items():
        if (up := up_of(gate)) in matrices:
            scales = matrix.global_scale(), matrices[up].global_scale()
            if scales[0] != scales[1]:
                yield gate, up, scales


def separate_scales_warning(checkpoint: Checkpoint) -> Iterator[str]:
    """A line where gate and up of experts in NVFP4 files have different global scales."""
    count = sum(1 for _ in separate_scales(plan_of(checkpoint).carried))
    if count:
        yield (f"warning: {count} experts have different global scales for gate and up. This library honours both; "
               "vLLM and SGLang read gate's for both and compute something else. Repair the files for them: "
               f"moe-nvfp4 quantize {checkpoint.folder} DST --share-scales")  # fmt: skip


def plan_of(source: Checkpoint, include: Iterable[str] | None = None) -> Plan:
    """A plan for what `source` holds, in its own dialect: not to be carried out, but for its matrices.

    include: the experts modules of a dense checkpoint to take (default: all).
    """
    info = nvfp4_info(source)
    chosen = None if info or include is None else tuple(include)
    dialect = info.dialect if info else DIALECTS["modelopt"]
    options = Options("max", (), chosen, dialect, "bf16", "cpu", config_dtype(source.config))
    return Plan(source, options, ConversionReport(source.folder, source.folder, "max"))


def config_dtype(config: Mapping) -> str | None:
    """The dtype that a config names for its weights, as safetensors writes it."""
    dtypes = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    named = [c.get("dtype") or c.get("torch_dtype") for c in (config, config.get("text_config") or {})]
    known = [dtypes[d] for d in (str(d).removeprefix("torch.") for d in named) if d in dtypes]
    return known[0] if known else None


def _need(condition: bool, name: str, stored: TensorSlice, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} has shape {list(stored.shape)}, expected {expected}: the file belongs to another "
                         "model, or this layout is not known here; leave it as it is with --exclude")  # fmt: skip
