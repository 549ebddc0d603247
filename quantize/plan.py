"""Plan a conversion: what becomes of every tensor of a checkpoint, decided from its headers and config alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import Tensor

from moe_nvfp4._version import __version__
from moe_nvfp4.quantize.dialects import (
    GLOBAL_SCALES,
    MODELOPT,
    Dialect,
    QuantizationInfo,
)
from moe_nvfp4.quantize.files import NAMED_WEIGHTS, Checkpoint, TensorSlice, expert_counts
from moe_nvfp4.quantize.importance import Importance
from moe_nvfp4.quantize.jobs import (
    Job,
    bias_parts,
    copy_job,
    dense_job,
    dense_stack_job,
    linear_jobs,
    quantize_jobs,
    rescale_job,
    scale_job,
    without,
)
from moe_nvfp4.quantize.layouts import (
    CastSums,
    ErrorSums,
    ExpertLayout,
    Experts,
    Matrix,
    dbrx,
    fp8,
    nvfp4,
    one_by_one,
    stacked,
)
from moe_nvfp4.quantize.layouts.base import check_experts, dense, need
from moe_nvfp4.quantize.linears import Linear, choose, fused_in_files, linears_in_files
from moe_nvfp4.quantize.model import ModelTensors, UnknownModel
from moe_nvfp4.quantize.names import (
    DENSE,
    KV_SCALE,
    MTP,
    PER_EXPERT,
    PRE_QUANT_SCALE,
    aliases,
    by_number,
    experts_module,
    ignore_patterns,
    is_dense_linear,
    is_mtp,
    is_scale,
    names_experts,
    up_of,
)
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import recipe_named
from moe_nvfp4.quantize.source import (
    DTYPES,
    dense_dtype,
    nothing_there,
    nvfp4_info,
    quantized_layouts,
    quantized_weights,
    read_nvfp4,
)
from moe_nvfp4.weights import check_block_scales

DENSE_LAYOUTS = (one_by_one, stacked, dbrx)  # which any source may have


@dataclass(frozen=True)
class ConversionPlan:
    """What becomes of every tensor of `source`.

    jobs         write the new files
    config       the new config.json
    matrices     the NVFP4 matrices of the new files, by name; times pre_quant_scale, where there is one
    fused        those of `matrices` that are quantized and no experts; each tuple shares a global scale
    carried      those of `matrices` whose bytes are copied; without pre_quant_scale
    dequantized  FP8 and MXFP4 tensors that become dense, by name: a matrix, or the matrices of a stack
    copied       names of the tensors that are copied unchanged
    copies       new name -> the bytes that are written there: `copied`, parts of biases, codes and sf of `carried`
    scales       new name -> the scale of `carried` that is written there, in the target dialect
    skipped      name -> reason, of what is left alone
    modules      the experts modules of a source that is not NVFP4 yet
    unmatched    the patterns of `exclude` and `include` that match none of `modules`, and no linear that was asked for
    rescaled     how many carried matrices are quantized again, and the error that this adds
    cast         what becomes of MXFP4 matrices, known when the jobs have run
    unchanged    whether the source is NVFP4 already, in the dialect and the layout of new files
    owners       name -> the experts module, or the matrix, that is made of this tensor of a source that is not NVFP4
    """

    source: Checkpoint
    options: Options
    jobs: tuple[Job, ...]
    config: dict
    matrices: Mapping[str, Matrix]
    fused: tuple[tuple[Linear, ...], ...]
    carried: Mapping[str, Matrix]
    dequantized: Mapping[str, Matrix | list[Matrix]]
    copied: tuple[str, ...]
    copies: Mapping[str, TensorSlice]
    scales: Mapping[str, Callable[[], Tensor]]
    skipped: Mapping[str, str]
    modules: tuple[str, ...]
    unmatched: tuple[str, ...]
    rescaled: tuple[int, ErrorSums]
    cast: CastSums
    unchanged: bool
    owners: Mapping[str, str]

    def check_patterns(self) -> None:
        """ValueError for a pattern of `exclude` or `include` that matches nothing."""
        if self.unmatched:
            raise ValueError(
                f"the pattern {self.unmatched[0]!r} matches no experts module"
                + (
                    ", and none of the linears that are asked for: there are "
                    if self.options.linears
                    else ": there are "
                )
                + ", ".join([*self.modules[:3], *["..."] * (len(self.modules) > 3)])
            )


@dataclass
class _Draft:
    """A plan in the making. left: the tensors that are not planned yet."""

    source: Checkpoint
    options: Options
    left: dict[str, TensorSlice]
    jobs: list[Job] = field(default_factory=list)
    to_quantize: dict[str, Matrix] = field(default_factory=dict)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    fused: tuple[tuple[Linear, ...], ...] = ()
    unmatched: tuple[str, ...] | None = None  # patterns of `exclude` that match no linear; None: none are asked for
    carried: dict[str, Matrix] = field(default_factory=dict)
    dequantized: dict[str, Matrix | list[Matrix]] = field(default_factory=dict)
    copies: dict[str, TensorSlice] = field(default_factory=dict)
    scales: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str | None] = field(default_factory=dict)  # name -> why it is left alone, or None
    dense: set[str] = field(default_factory=set)  # modules that keep, or get, dense weights
    excluded: set[str] = field(default_factory=set)  # experts modules left alone
    rescaled: tuple[int, ErrorSums] = field(default_factory=lambda: (0, ErrorSums()))
    cast: CastSums = field(default_factory=CastSums)
    unchanged: bool = False
    owners: dict[str, str] = field(default_factory=dict)

    def take(self, names: Iterable[str], owner: str) -> None:
        """Take the tensors that the experts module, or the matrix, `owner` is made of."""
        for name in names:
            del self.left[name]
            self.owners[name] = owner

    def leave(self, module: str) -> bool:
        """Whether the experts module `module` is left as it is."""
        if module not in self.modules:
            self.modules[module] = why = self._why_not(module)
            if why is not None:
                self.excluded.add(module)
                self.skipped[module] = why
        return self.modules[module] is not None

    def _why_not(self, module: str) -> str | None:
        """Why the experts module `module` is left as it is; None: it is quantized."""
        if any(self.named(module, pattern) for pattern in self.options.exclude):
            return "excluded"
        if self.options.include is not None and not any(self.named(module, p) for p in self.options.include):
            return "not included"
        return MTP if is_mtp(module, self.source.layers) else None

    def named(self, module: str, pattern: str) -> bool:
        """Whether a pattern of exclude or include matches an experts module, by its name in files or in transformers,
        which `info` shows: linears are matched by both, and the experts beside them must not stay behind."""
        names = aliases(module)
        if self.model is not None and (name := self.model.experts_module(module)) is not None:
            names.append(name)
        return any(names_experts(pattern, name) for name in names)

    @cached_property
    def model(self) -> ModelTensors | None:
        """The model that the files belong to; None: transformers does not know it, and names in files decide."""
        try:
            return ModelTensors.of(self.source)
        except UnknownModel:
            return None

    def copy(
        self, name: str, stored: TensorSlice, new: str | None = None, check: Callable[[Tensor, str], None] | None = None
    ) -> None:
        """Plan to copy `stored`, the tensor `name` or a part of it, as the tensor `new`. check: see `copy_job`."""
        self.jobs.append(copy_job(name, stored, new, check))
        self.copies[new or name] = stored

    def dequantize(self, name: str, found: Matrix | list[Matrix]) -> None:
        """Plan to write tensor `name` dense: a config names only one quantized format."""
        dtype = self.options.dtype or "BF16"
        if isinstance(found, Matrix):
            self.jobs.append(dense_job(name, found, dtype))
        else:
            self.jobs.append(dense_stack_job(name, found, dtype))
        self.dequantized[name] = found


def plan(checkpoint: Checkpoint, options: Options, empty: bool = False) -> ConversionPlan:
    """Plan the conversion of `checkpoint` that `options` ask for. Reads headers and config, and with share_scales the
    global scales. empty: no error where no experts are to be quantized.

    Raises ValueError for what cannot be converted, naming the tensor, the rule and the way out.
    """
    options = replace(options, dtype=dense_dtype(checkpoint))
    if options.importance is not None:
        options = replace(options, importance=_importance_for_files(checkpoint, options.importance))
    draft = _Draft(checkpoint, options, dict(checkpoint.tensors))
    info = nvfp4_info(checkpoint)
    if info is not None:
        _carry(draft, info.dialect)
    else:
        _quantize(draft, empty)
    draft.jobs += quantize_jobs(draft.to_quantize, options, draft.cast)
    of_experts = {experts_module(name) for name, stored in draft.left.items() if stored.dtype in DENSE}
    of_experts |= {e.module for layout in DENSE_LAYOUTS for e in layout.recognise(checkpoint, draft.left)}
    draft.excluded |= {module for module in of_experts if module is not None}
    for name, stored in draft.left.items():
        if is_scale(name, draft.left):
            raise ValueError(nvfp4.UNREAD.format(name))
        draft.copy(name, stored)
        if is_dense_linear(name, stored) and not any(name.startswith(f"{m}.") for m in draft.excluded):
            draft.dense.add(name.removesuffix(".weight"))
    # transformers loads dense layers of LongCat only with what it has saved of their identity experts
    kept = {name: t for name, t in checkpoint.unread.items() if experts_module(name) in draft.excluded}
    draft.jobs += [copy_job(name, stored) for name, stored in kept.items() if stored.dtype in DENSE]
    dtype = DTYPES[options.dtype] if options.dtype else None
    config = config_of_new_files(checkpoint.config, _quantization_config(draft, info), dtype)
    if options.importance is not None:
        options.importance.check_model(draft.modules, checkpoint.tensors, checkpoint.folder)
    patterns = (*options.exclude, *(options.include or ()))
    modules = tuple(sorted(draft.modules, key=by_number))
    skipped = {name: draft.skipped[name] for name in sorted(draft.skipped, key=by_number)}
    unmatched = tuple(p for p in patterns if not any(draft.named(module, p) for module in draft.modules)
                      and (draft.unmatched is None or p not in options.exclude or p in draft.unmatched))  # fmt: skip
    jobs = tuple(_in_files_that_load(draft))
    return ConversionPlan(
        draft.source, options, jobs, config, draft.matrices, draft.fused, draft.carried,
        draft.dequantized, tuple(draft.left), draft.copies, draft.scales, skipped, modules, unmatched, draft.rescaled,
        draft.cast, draft.unchanged, draft.owners,
    )  # fmt: skip


def _in_files_that_load(draft: _Draft) -> list[Job]:
    """The jobs. Where there is no index, readers look for model.safetensors only; the source's one file may be named
    otherwise (model.fp16.safetensors)."""
    if draft.source.index is not None:
        return draft.jobs
    return [replace(job, shard="model.safetensors") for job in draft.jobs]


def _importance_for_files(source: Checkpoint, importance: Importance) -> Importance:
    """`importance`, which has the model's names, by the names in the files of `source`."""
    try:
        names = ModelTensors.of(source)
    except UnknownModel as error:
        raise ValueError(f"{source.folder}: {error}, so importance cannot be matched with its experts: use a recipe "
                         "without data (mse)") from None  # fmt: skip
    importance.check_config(names.config, source.folder)
    return importance.renamed(names.experts_module)


# ---------------------------------------------------------------- sources that are not NVFP4 yet
def _quantize(draft: _Draft, empty: bool) -> None:
    source, options = draft.source, draft.options
    if options.share_scales:
        raise ValueError(f"{source.folder} is not NVFP4 yet: quantizing it gives gate and up one global "
                         "scale anyway; leave out --share-scales")  # fmt: skip
    if (scale := next((name for name in draft.left if name.endswith(GLOBAL_SCALES)), None)) is not None:
        raise ValueError(f"{scale} is of NVFP4 files, and neither config.json (its quantization_config, not one of "
                         "text_config) nor hf_quant_config.json says so: download them again")  # fmt: skip
    quantized = quantized_layouts(source.config.get("quantization_config") or {})
    for layout in (*quantized, *DENSE_LAYOUTS):
        for experts in list(layout.recognise(source, draft.left)):
            _quantize_experts(draft, experts)
    others = quantized_weights(source, draft.left)
    if options.linears:
        _quantize_linears(draft, others)
    for stem, (matrix, names) in others.items():
        if stem not in draft.matrices:
            draft.dequantize(f"{stem}.weight", matrix)
            draft.dense.add(stem)
            draft.take(names, stem)
    for name, stored in draft.left.items() if fp8 in quantized else ():
        if stored.dtype.startswith("F8"):
            raise ValueError(fp8.UNREAD.format(name=name, dtype=stored.dtype))
    for name in draft.left:
        stem, _, last = name.rpartition(".")
        if stem in draft.matrices and last != "bias":
            raise ValueError(nvfp4.UNREAD.format(name))
    _check_nothing_missed(draft, empty)


def _quantize_linears(draft: _Draft, others: Mapping[str, tuple[Matrix, tuple[str, ...]]]) -> None:
    """Plan to quantize the linears that the options ask for. others: those that are FP8 or MXFP4, with their tensors'
    names."""
    source, options = draft.source, draft.options
    weights = {name.removesuffix(".weight"): stored for name, stored in draft.left.items()
               if name.endswith(".weight") and stored.dtype in DENSE}  # fmt: skip
    shapes = {stem: stored.shape for stem, stored in weights.items()}
    shapes |= {stem: (matrix.rows, matrix.columns) for stem, (matrix, _) in others.items()}
    chosen = choose(linears_in_files(source, shapes, draft.model), options.linears, options.exclude, str(source.folder))
    draft.skipped |= chosen.left
    draft.fused, draft.unmatched = chosen.fused, chosen.unmatched
    for fused in draft.fused:
        matrices = {}
        for stem in (linear.name for linear in fused):
            matrices[stem], names = others.get(stem) or (dense(weights[stem]), (f"{stem}.weight",))
            draft.take(names, stem)
        columns = None  # the importance of each
        if options.importance is not None:
            columns = options.importance.of_linear(fused[0].model, fused[0].columns)
        draft.jobs += linear_jobs(matrices, options, draft.cast, columns)
        draft.matrices |= matrices


def _quantize_experts(draft: _Draft, experts: Experts) -> None:
    if draft.leave(experts.module):
        if experts.dense is not None:
            for name, found in experts.dense().items():
                draft.dequantize(name, found)
            draft.take(experts.tensors, experts.module)
        return
    matrices = experts.matrices()
    shapes = {stem: (m.rows, m.columns) for stem, m in matrices.items()}
    check_experts(shapes, expert_counts(draft.source.config), draft.left)
    if draft.options.importance is not None:
        numbers = {match["e"] for stem in matrices if (match := PER_EXPERT.fullmatch(stem))}
        draft.options.importance.layer(experts.module, len(numbers))
    draft.to_quantize |= matrices
    draft.matrices |= matrices
    E = len(matrices) // (sum(map(len, experts.biases.values())) or 1)
    for name, stems in experts.biases.items():
        if name not in draft.left:
            raise ValueError(f"{name} is missing: download the checkpoint again")
        stored, rows = draft.left[name], sum(matrices[stem.format(e=0)].rows for stem in stems)
        if stored.dtype not in DENSE:
            raise ValueError(f"{name} is {stored.dtype}, and biases are read as {', '.join(DENSE)}: download it again")
        need(stored.shape == (E, rows), name, stored, f"[{E}, {rows}]")
        for new, part in bias_parts(stored, stems, experts.interleaved):
            draft.copy(name, part, new)
    draft.take((*experts.tensors, *experts.biases), experts.module)


def _check_nothing_missed(draft: _Draft, empty: bool) -> None:
    """ValueError unless every tensor that looks like experts is planned, or left alone on purpose, and, if not `empty`,
    some are planned."""
    types, config = draft.source.types, draft.source.config
    # Of a stack that is no dense one, its partner is left, too: that one is not to blame
    for name, stored in sorted(draft.left.items(), key=lambda item: item[1].dtype in DENSE):
        in_stack = len(stored.shape) >= 3 and re.search(r"moe|expert", name)
        inside = len(stored.shape) == 2 and re.search(r"(^|\.)\w*(?<!shared_)experts?\.", name)
        if re.search(r"shared?_expert", name) or not (in_stack or inside) or name.endswith("norm.weight"):
            continue
        module = re.sub(r"(experts?)\..*", r"\1", name)
        owners = {module, re.sub(r"(block_sparse_moe|moe)\..*", r"\1.experts", name)}
        if owners & draft.excluded or draft.leave(module):
            continue
        if experts_module(name) is not None and stored.dtype not in DENSE:
            raise ValueError(f"{name} is {stored.dtype}, and experts are read as {', '.join(DENSE)}, FP8 with scales "
                             "for blocks or MXFP4, as config.json says: use the original checkpoint")  # fmt: skip
        raise ValueError(
            f"{name} {stored.dtype} {list(stored.shape)} looks like experts, in a layout that is not known for "
            f"model_type {types[0] if types else None!r}, so these files are neither converted nor compared with. If "
            "moe-nvfp4 info lists its layers, it can be quantized while it loads (from_pretrained with "
            f"MoeNvfp4Config); else leave it as it is with exclude=['{module}']"
        )
    if not (draft.to_quantize or empty):
        model = (config.get("architectures") or types or ["this model"])[0]
        why = "; dense models are not what this library is for"
        if draft.excluded:
            some = ", ".join(sorted(draft.excluded, key=by_number)[:3])
            why = f": {some}, ... ({len(draft.excluded)}) are all excluded, or not included"
        raise ValueError(f"{model} has no experts to quantize{why}")


# ---------------------------------------------------------------- NVFP4 in another dialect or layout
def _carry(draft: _Draft, source: Dialect) -> None:
    """Plan to copy codes and block scales byte for byte, and to rewrite global scales in the target dialect."""
    target, options, folder = draft.options.target, draft.options, draft.source.folder
    if recipe_named(options.recipe).model:
        raise ValueError(f"recipe {options.recipe!r} would have no effect: these weights are NVFP4 already; quantize "
                         "the original checkpoint")  # fmt: skip
    if options.activations != "bf16":
        raise ValueError(f"activations={options.activations!r} would have no effect: these weights are NVFP4 already, "
                         "and keep what their config says; choose when loading (checkpoint_config)")  # fmt: skip
    if options.exclude or options.include is not None or options.linears:
        raise ValueError("--exclude, --include and --linears choose what is quantized, and these weights are NVFP4 "
                         "already: leave them out, or quantize the original checkpoint")  # fmt: skip
    files = read_nvfp4(draft.source, source)
    _fp8_next_to_nvfp4(draft, files)
    for name, matrix in files.matrices.items():
        _carry_matrix(draft, name, matrix)
    one_by_one = all(matrix.layout is ExpertLayout.ONE_BY_ONE for matrix in files.matrices.values())
    draft.unchanged = source is target and one_by_one and not draft.dequantized
    if options.share_scales:
        _share_scales(draft)
    for name in draft.left:
        if KV_SCALE.search(name):
            draft.skipped[name] = "a KV cache scale, copied under its own name"
    if not draft.carried:
        raise ValueError(nothing_there(str(folder), files, source))


def _carry_matrix(draft: _Draft, new_stem: str, matrix: nvfp4.NVFP4Matrix) -> None:
    target, source = draft.options.target, matrix.dialect
    if PRE_QUANT_SCALE in matrix.tensors and not target.pre_quant_scale:
        raise ValueError(f"{matrix.stem}.{PRE_QUANT_SCALE} (AWQ) has no place in {target.name} files: keep ModelOpt's")
    suffixes = dict(zip(source.suffixes, target.suffixes, strict=True))
    for suffix, stored in matrix.tensors.items():
        old_name, name = matrix.names[suffix], f"{new_stem}.{suffixes.get(suffix, suffix)}"
        if suffix in (source.global_scale, source.input_scale):
            draft.jobs.append(scale_job(old_name, stored, name, source, target))
            draft.scales[name] = partial(_carried_scale, stored, source, target)
        else:
            draft.copy(old_name, stored, name, check_block_scales if suffix == source.sf else None)
    for name in matrix.names.values():  # all matrices of a stack have the same
        draft.left.pop(name, None)
    draft.matrices[new_stem] = matrix.matrix()
    draft.carried[new_stem] = matrix.matrix(pre_quant_scale=False)


def _carried_scale(stored: TensorSlice, source: Dialect, target: Dialect) -> Tensor:
    return source.carry_scale(stored.tensor(), target)


def _share_scales(draft: _Draft) -> None:
    """Where gate and up have different global scales, plan to quantize the one with the smaller scale again."""
    new, errors = {}, ErrorSums()
    for gate, up, scales in separate_scales(draft.carried):
        stem = gate if scales[0] < scales[1] else up
        new[stem] = rescale_job(stem, draft.carried[stem], max(scales), draft.options, errors)
    if not new:
        raise ValueError(f"{draft.source.folder}: gate and up of every expert share a global scale already: "
                         "leave out --share-scales")  # fmt: skip
    names = {name for job in new.values() for name in job.outputs}
    kept = [without(job, names) if names & job.outputs.keys() else job for job in draft.jobs]
    draft.jobs = [*(job for job in kept if job.outputs), *new.values()]
    draft.rescaled, draft.unchanged = (len(new), errors), False


def _fp8_next_to_nvfp4(draft: _Draft, files: nvfp4.NVFP4Files) -> None:
    """Plan to write FP8 weights of mixed-precision files dense: a config names only one quantized format."""
    for name, scale in files.fp8.items():
        stem = name.removesuffix(".weight")
        if fp8.chunks_of(draft.source, stem) is not None:
            raise ValueError(f"{name} is q, k and v in FP8, whose rows may be in chunks, which is known of files that "
                             "are FP8 as a whole: quantize the original")  # fmt: skip
        draft.dequantize(name, fp8.fp8_matrix(draft.left[name], draft.left[scale], None, stem))
        draft.take((name, scale), stem)
        if draft.left.pop(f"{stem}.input_scale", None) is not None:
            draft.skipped[f"{stem}.input_scale"] = "of an FP8 layer that becomes dense"
        if expert := PER_EXPERT.fullmatch(stem):
            draft.excluded.add(expert["module"])
        else:
            draft.dense.add(stem)


# ---------------------------------------------------------------- the rest
def config_of_new_files(source: Mapping, quantization_config: dict, dtype: str | None) -> dict:
    """The config.json of a checkpoint in a new format: the `source`'s, in its form. dtype: of the weights, for a source
    that does not say it."""
    config = {**_unquantized(source), "quantization_config": quantization_config}
    config.pop(NAMED_WEIGHTS, None)  # new files have the usual names
    if not (config.get("dtype") or config.get("torch_dtype")) and dtype:
        config["dtype"] = dtype  # without it, transformers may take that of a scale
    return config


def _unquantized(config: Mapping) -> dict:
    """`config` without what it says of quantized files; its parts (text_config) may say it again."""
    inside = lambda key, value: _unquantized(value) if isinstance(value, Mapping) and key.endswith("config") else value
    return {key: inside(key, value) for key, value in config.items() if key != "quantization_config"}


def _excluded(draft: _Draft) -> list[str]:
    """What `exclude` says, and the model's names of other experts that are left alone, where files have stacks of these
    under another name: the ignore list has that one, which their reader does not know (Inkling)."""
    found = list(draft.options.exclude)
    stacks = {module for module in draft.excluded
              if any(experts_module(name) is None for name in draft.left if name.startswith(f"{module}."))}  # fmt: skip
    for module in sorted(stacks, key=by_number):
        name = None if draft.model is None else draft.model.experts_module(module)
        if name is not None and name != module and not any(names_experts(p, name) for p in found):
            found.append(name)
    return found


def _quantization_config(draft: _Draft, info: QuantizationInfo | None) -> dict:
    o = draft.options
    written = [name for job in draft.jobs for name in job.outputs]
    # Where the source says W4A16, its scales are copied, and nobody is told to use them
    used = info is not None and info.activations != "bf16"
    has_input_scale = used and any(name.endswith(f".{o.target.input_scale}") for name in written)
    has_pre_quant_scale = info is not None and any(name.endswith(f".{PRE_QUANT_SCALE}") for name in written)
    if info is not None:
        own = {"activations": info.activations, **draft.source.own, "input_scale": has_input_scale}
    else:
        own = {"activations": o.activations, "recipe": o.recipe, "exclude": _excluded(draft), "input_scale": False}
    dense = draft.dense | (set() if any(name.endswith("lm_head") for name in draft.matrices) else {"lm_head"})
    ignore = ignore_patterns(dense, set(draft.matrices), draft.excluded, o.target, draft.source.layers)
    new = o.target.write(ignore, has_input_scale, own, __version__, has_pre_quant_scale)
    if info is not None and info.kv_cache is not None:
        if (scheme := o.target.kv_cache_scheme(info.kv_cache)) is not None:
            new["kv_cache_scheme"] = scheme
        else:
            draft.skipped["kv_cache_scheme"] = (
                f"{info.kv_cache}, for which {o.target.name} has no form: the new files say nothing of the KV cache"
            )
    return new


def separate_scales(matrices: Mapping[str, Matrix]) -> Iterator[tuple[str, str, tuple[Tensor, Tensor]]]:
    """(gate's stem, up's stem, their global scales, fp32 0-d) of each expert whose gate and up have different ones."""
    for gate, matrix in matrices.items():
        if (up := up_of(gate)) is not None and up in matrices:
            scales = matrix.known_scale(), matrices[up].known_scale()
            if scales[0] != scales[1]:
                yield gate, up, scales


def separate_linears(checkpoint: Checkpoint, matrices: Mapping[str, Matrix]) -> tuple[list[str], list[str]]:
    """Groups of linears outside the experts that servers fuse into one: those whose global scales differ, as
    "model.layers.0.self_attn.q_proj, k_proj, v_proj", and those of which only some are 4-bit."""
    weights = (name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith(".weight"))
    linears = [stem for stem in dict.fromkeys((*matrices, *weights)) if not PER_EXPERT.fullmatch(stem)]
    differ, partly = [], []
    groups = fused_in_files(checkpoint, linears).values() if not matrices.keys().isdisjoint(linears) else ()
    for group in dict.fromkeys(groups):
        packed = [stem for stem in group if stem in matrices]
        if packed and len(packed) < len(group):
            partly.append(_together(group))
        elif len({float(matrices[stem].known_scale()) for stem in packed}) > 1:
            differ.append(_together(group))
    return differ, partly


def _together(stems: Sequence[str]) -> str:
    return ", ".join((stems[0], *(stem.rpartition(".")[2] for stem in stems[1:])))


def scale_warnings(checkpoint: Checkpoint) -> Iterator[str]:
    """Warnings about global scales that differ where servers read one for all: gate and up of an expert, and linears
    that they fuse, of which some may also be dense."""
    carried = plan_of(checkpoint).carried
    if count := sum(1 for _ in separate_scales(carried)):
        yield (f"warning: {count} experts have different global scales for gate and up. This library honours both; "
               "vLLM and SGLang read gate's for both and compute something else. Repair the files for them: "
               f"moe-nvfp4 quantize {checkpoint.folder} DST --share-scales")  # fmt: skip
    differ, partly = separate_linears(checkpoint, carried)
    if differ:
        yield (f"warning: {len(differ)} groups of linears have different global scales ({differ[0]}, ...). This "
               "library honours each; vLLM fuses them, reads one for all, and computes something else. Serve files in "
               "which they are dense, or share a scale, as ModelOpt's and llm-compressor's do")  # fmt: skip
    if partly:
        yield (f"warning: {len(partly)} groups of linears are 4-bit in part ({partly[0]}, ...). This library reads "
               "them; vLLM refuses those that it fuses into one linear: serve with transformers (moe-nvfp4 serve MODEL "
               "--engine transformers), or quantize the original again")  # fmt: skip


def plan_of(
    checkpoint: Checkpoint, include: Iterable[str] | None = None, dialect: Dialect | None = None
) -> ConversionPlan:
    """A plan that is not carried out: only what it would write is read.

    include  the experts modules to plan for, where the checkpoint is not NVFP4 (default: all)
    dialect  of what it would write (default: that of the checkpoint)
    """
    info = nvfp4_info(checkpoint)
    chosen = None if info or include is None else tuple(include)
    dialect = dialect or (info.dialect if info else MODELOPT)
    return plan(checkpoint, Options("max", include=chosen, dialect=dialect.name, device="cpu"), empty=True)
