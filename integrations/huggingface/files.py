"""What checkpoint files hold for a model, read from their headers before anything is built or loaded.

`read_layout` finds how the files keep every experts module and which linears are quantized; `verify_files` checks
that every tensor that is needed is there, and that no scale is left over.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter, rename_source_key

from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize.dialects import COMPRESSED_TENSORS, MODELOPT, Dialect
from moe_nvfp4.quantize.layouts import ExpertLayout, nvfp4
from moe_nvfp4.quantize.layouts.fp8 import fp8_block, fp8_scale
from moe_nvfp4.quantize.names import (
    DENSE,
    FUSED,
    KV_SCALE,
    PER_EXPERT,
    PRE_QUANT_SCALE,
    PROJECTION_FIRST,
    SCALES,
)

# One expert says what the others are like
OTHER_EXPERT = re.compile(r"\bexperts\.(\w+\.)?[1-9]\d*\.")


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear that the files hold quantized.

    module  its name in the model
    source  its name in the files, after the model's renamings
    kind    "nvfp4" or "fp8"
    also    the optional tensors that are there: input_scale, pre_quant_scale
    scale   the last part of the FP8 scale's name
    """

    module: str
    source: str
    kind: str
    also: frozenset[str] = frozenset()
    scale: str = ""


@dataclass
class CheckpointLayout:
    """What files hold.

    experts    module name -> ExpertLayout; without the modules of which nothing was found
    linears    module name -> QuantizedLinear
    fp8        of FP8 experts: name in the files, after the model's renamings -> the same after its converters
    nvfp4      every NVFP4 weight in the files, as quantize/layouts/nvfp4.py names them -> its layout
    """

    headers: dict[str, dict]
    dialect: Dialect = MODELOPT
    experts: dict[str, ExpertLayout] = field(default_factory=dict)
    linears: dict[str, QuantizedLinear] = field(default_factory=dict)
    fp8: dict[str, str] = field(default_factory=dict)
    nvfp4: dict[str, ExpertLayout] = field(default_factory=dict)

    @property
    def kv_scales(self) -> list[str]:
        return [key for key in self.headers if KV_SCALE.search(key)]

    @property
    def expert_input_scales(self) -> bool:
        """Whether the experts have static activation scales."""
        return self._experts_have(rf"\.{self.dialect.input_scale}|(gate_up|up|down)_proj_input_scale")

    @property
    def expert_pre_quant_scales(self) -> bool:
        """Whether they have AWQ's."""
        return self._experts_have(r"[._]pre_quant_scale")

    def _experts_have(self, last: str) -> bool:
        pattern = re.compile(rf"(^|\.)(experts\.(.*)?|moe\.(gate|up|down)_proj)({last})$")
        fp8 = lambda key: self.headers.get(f"{key.rpartition('.')[0]}.weight", {}).get("dtype") == "F8_E4M3"
        return any(pattern.search(key) and not fp8(key) for key in self.headers)


def is_nvfp4(headers: dict[str, dict]) -> bool:
    """Whether the files hold NVFP4 weights, in any dialect."""
    marks = tuple(d.global_scale for d in (MODELOPT, COMPRESSED_TENSORS))
    return any(key.endswith(marks) for key in headers)


def dialect_of(headers: dict[str, dict]) -> Dialect:
    return COMPRESSED_TENSORS if any(k.endswith(".weight_packed") for k in headers) else MODELOPT


def read_layout(
    headers: dict[str, dict], model: nn.Module, conversions: list, experts: Iterable[str]
) -> CheckpointLayout:
    """What the files hold for `model` (still with its dense modules), whose experts modules are `experts`.

    conversions: transformers' renamings and converters for the model. Raises NotImplementedError for quantized
    weights that go through a converter of the model, ValueError for incomplete or damaged ones.
    """
    found = CheckpointLayout(headers, dialect_of(headers))
    found.nvfp4 = nvfp4.recognise({name: info["shape"] for name, info in headers.items()}, found.dialect)
    names = sorted(experts, key=len, reverse=True)  # a module before what contains it
    modules = dict(model.named_modules())
    for key, target, source, pattern in _targets(found, model, conversions):
        owner = next((n for n in names if target == n or target.startswith(f"{n}.")), None)
        if owner is not None:
            layout = _expert_layout(key, headers[key]["dtype"], found)
            if layout is not None and found.experts.get(owner, ExpertLayout.DENSE) is ExpertLayout.DENSE:
                found.experts[owner] = layout
            if layout is ExpertLayout.FP8:
                renamed, _ = rename_source_key(key, _split(conversions)[0], [])
                found.fp8[PER_EXPERT.fullmatch(renamed.removesuffix(".weight"))["module"]] = source.rpartition(".")[0]
            continue
        linear = _linear(key, target.removesuffix(".weight"), source.removesuffix(".weight"), found)
        if linear is None or linear.module not in modules:
            continue
        if pattern is not None or getattr(modules[linear.module], "weight", None) is None:
            raise NotImplementedError(
                f"{key} is quantized, but {type(model).__name__} rearranges it while it loads (or has no weight "
                "there), which is not known here: use a checkpoint in which this layer is dense"
            )
        module = modules[linear.module]
        if module is model.get_output_embeddings() and model.config.get_text_config().tie_word_embeddings:
            raise ValueError(
                f"{linear.module} is quantized in the files, but config.json ties it to the embedding: set "
                "tie_word_embeddings to false there, or use files that agree with their config"
            )
        _check_shape_of_linear(key, linear, module.weight.shape, found)
        found.linears[linear.module] = linear
    return found


def _targets(
    found: CheckpointLayout, model: nn.Module, conversions: list
) -> Iterator[tuple[str, str, str, str | None]]:
    """(key, name in the model, the same before its prefix is fitted, converter's pattern) of every weight, of
    expert 0 only."""
    renamings, converters = _split(conversions)
    state = model.state_dict()
    for key in found.headers:
        stem, _, last = key.rpartition(".")
        if last not in ("weight", "weight_packed") and not FUSED.search(key) and not key.endswith("_proj_sf"):
            continue
        if OTHER_EXPERT.search(key):
            continue
        name = f"{stem}.weight" if last == "weight_packed" else key
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        source, _ = rename_source_key(name, renamings, converters)
        yield key, target, source, pattern


def _split(conversions: list) -> tuple[list, list]:
    """Renamings and converters, as copies: asking one for a name marks it as used."""
    converters = [copy.copy(c) for c in conversions if isinstance(c, WeightConverter)]
    return [copy.copy(c) for c in conversions if not isinstance(c, WeightConverter)], converters


def _expert_layout(key: str, dtype: str, found: CheckpointLayout) -> ExpertLayout | None:
    """The layout of the experts whose weight is `key`; None where the name says nothing."""
    if key.endswith("_proj_sf"):
        return ExpertLayout.PARAMETERS
    if dtype in DENSE:
        return ExpertLayout.DENSE
    if dtype == "F8_E4M3":
        if PER_EXPERT.fullmatch(key.removesuffix(".weight")) is None:
            raise ValueError(
                f"{key} is FP8: such experts are read where each has a tensor of its own, experts.E.gate_proj.weight; "
                "use the original checkpoint"
            )
        return ExpertLayout.FP8
    layout = found.nvfp4.get(key) or found.nvfp4.get(key.rpartition(".")[0])
    return layout or (None if FUSED.search(key) else ExpertLayout.ONE_BY_ONE)


def _linear(key: str, module: str, source: str, found: CheckpointLayout) -> QuantizedLinear | None:
    """The quantized linear whose weight is `key`; None where the weight is dense."""
    stem, _, last = key.rpartition(".")
    d, headers = found.dialect, found.headers
    if headers[key]["dtype"] == "F8_E4M3" and last == "weight":
        scale = fp8_scale(stem, headers)
        if scale is None:
            raise ValueError(f"{key} is FP8 and has no scale next to it: a shard is missing, download it again")
        return QuantizedLinear(module, source, "fp8", scale=scale.rpartition(".")[2])
    if last != d.weight or f"{stem}.{d.global_scale}" not in headers:
        return None
    also = {name for name in (d.input_scale, PRE_QUANT_SCALE) if f"{stem}.{name}" in headers}
    return QuantizedLinear(module, source, "nvfp4", frozenset(also))


def _check_shape_of_linear(key: str, linear: QuantizedLinear, shape: tuple[int, ...], found: CheckpointLayout) -> None:
    """ValueError unless the tensors of `linear` fit a weight of `shape` [N, K]."""
    stem, d = key.rpartition(".")[0], found.dialect
    N, K = shape
    if linear.kind == "fp8":
        given = found.headers[f"{stem}.{linear.scale}"]["shape"]
        if tuple(found.headers[key]["shape"]) != (N, K) or fp8_block((N, K), tuple(given)) is None:
            raise ValueError(
                f"{key} {found.headers[key]['shape']} with scales {given} does not fit an FP8 weight [{N}, {K}]: one "
                "scale, one for a row, for 32 of a row or for a block of 128 x 128 is known"
            )
        return
    expected = {
        d.weight: ("U8", [N, K // 2]), d.sf: ("F8_E4M3", [N, K // 16]), d.global_scale: ("F32", []),
        d.input_scale: ("F32", []), PRE_QUANT_SCALE: (None, [K]),
    }  # fmt: skip
    for last, (dtype, wanted) in expected.items():
        info = found.headers.get(f"{stem}.{last}")
        if info is None and last in (d.weight, d.sf, d.global_scale):
            raise ValueError(f"{stem}.{last} is missing: a shard is missing or the file is damaged")
        if info is not None and (dtype or info["dtype"], wanted) != (
            info["dtype"], [] if info["shape"] == [1] else info["shape"]):  # fmt: skip
            raise ValueError(
                f"{stem}.{last} is {info['dtype']} {info['shape']}, expected {dtype or 'numbers'} {wanted} from the "
                "model's config: the file belongs to another model, or is damaged"
            )


# ---------------------------------------------------------------- before a byte is loaded
def verify_files(found: CheckpointLayout, model: nn.Module, conversions: list, owner) -> None:
    """Every tensor that the 4-bit experts need is in the files, with its dtype; no scale is extra. 4-bit files hold
    every other tensor of the model too.

    conversions: what the model is loaded with; owner: the `Conversions` they come from. Raises ValueError.
    """
    renamings, converters = _split(conversions)
    dtypes = dict(zip(found.dialect.suffixes, ("U8", "F8_E4M3", "F32", "F32"), strict=True))
    state = model.state_dict()
    needed = {f"{m}.{p}" for m, e in owner.experts.items() for p in e._parameters}
    skipped = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    counted: dict[str, dict[str | None, int]] = {}
    given = set()
    for key, info in found.headers.items():
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        last = key.rpartition(".")[2]
        given.add(name)
        if name in needed:
            _check_number(key, name, owner)
            counts = counted.setdefault(name, {})
            counts[pattern] = counts.get(pattern, 0) + 1
            if owner.pre_quantized and pattern is not None and last in dtypes:
                if info["dtype"] != dtypes[last]:
                    raise ValueError(
                        f"{key} has dtype {info['dtype']}, but NVFP4 experts need {dtypes[last]} "
                        "there: this file is not NVFP4, or this layer should be in the config's "
                        "'ignore' list"
                    )
                _check_shape(key, last in found.dialect.suffixes[:2], info["shape"], name, owner)
        elif SCALES.search(key) and name not in state and not any(p.search(name) for p in skipped):
            raise ValueError(
                f"{key} is a scale that nothing reads: loading on would give silently wrong numbers. "
                "The layer is quantized in a way, or has a name, that is not known here; use the original "
                "checkpoint, or the tool that wrote this one"
            )
    if not owner.pre_quantized:
        needed = {f"{m}.{p}" for m, e in owner.experts.items() for p in (e.up_name, "down_proj")}
    for converter in converters:  # of several targets only the first was asked for
        first, *others = (target.replace("\\", "") for target in converter.target_patterns)
        stems = [name.removesuffix(first) for name in given if name.endswith(first)]
        given |= {stem + other for stem in stems for other in others}
    for name in sorted(needed - given):
        raise ValueError(
            f"nothing in the checkpoint gives {name}: its tensors are missing (or named in a way "
            "this model does not know); download the checkpoint again"
        )
    if owner.pre_quantized:
        _check_counts(counted, owner)
        linears = {f"{n}.{p}" for n, m in model.named_modules() if isinstance(m, NVFP4Linear) for p in m._parameters}
        bias = {name for name in linears if name.endswith(".bias")}
        _check_nothing_missing(model, given | needed | (linears - bias))


def _check_number(key: str, name: str, owner) -> None:
    stem = key.rpartition(".")[0]
    match = PER_EXPERT.fullmatch(stem) or PROJECTION_FIRST.fullmatch(stem)
    E = owner.experts[name.rpartition(".")[0]].layout.num_experts
    if match is not None and int(match["e"]) >= E:
        raise ValueError(f"{key} is of an expert too many: the model has {E} in a layer, 0 to {E - 1}. The files "
                         "belong to another model, or to another config.json")  # fmt: skip


def _check_nothing_missing(model: nn.Module, given: set[str]) -> None:
    """ValueError where a tensor of `model` is not among `given`; transformers would make it up.

    Not missed are tensors that are tied to one that is there, those that transformers ignores, and the head of a model
    of another class than the files were made for (a classifier on a language model), which is to be trained.
    """
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if not n.endswith("_extra_state")}
    here = {id(state[name]) for name in given if name in state}  # modules may share parameters
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    body, output = f"{model.base_model_prefix}.", model.get_output_embeddings()
    other_class = type(model).__name__ not in (getattr(model.config, "architectures", None) or [type(model).__name__])

    def is_new_head(name: str) -> bool:
        return other_class and not name.startswith(body) and all(state[name] is not p for p in _parameters(output))

    def is_tied(name: str) -> bool:
        return any(name in pair and not given.isdisjoint(pair) for pair in tied.items())

    missing = [
        name for name, tensor in state.items()
        if id(tensor) not in here and not is_tied(name) and not any(p.search(name) for p in ignored)
        and not is_new_head(name)
    ]  # fmt: skip
    if missing:
        listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(
            f"the 4-bit files lack {len(missing)} of the model's {len(state)} tensors, which would be random numbers: "
            f"{listed}. A shard is missing, or config.json belongs to another model; download the checkpoint again"
        )


def _parameters(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters())


def _check_shape(key: str, matrix: bool, shape: list[int], name: str, owner) -> None:
    module_name, _, param = name.rpartition(".")
    param = owner.experts[module_name]._parameters[param]
    expected = []
    if matrix:
        parts = 2 if name.endswith(("gate_up_proj", "gate_up_proj_sf")) else 1
        expected = [param.shape[1] // parts, param.shape[2]]
    if owner.layout is ExpertLayout.STACKED_BY_PROJECTION:
        expected = [param.shape[0], *expected]
    if list(shape) != expected and not (expected == [] and list(shape) == [1]):
        raise ValueError(
            f"{key} has shape {list(shape)}, expected {expected} from the model's config: "
            "the file belongs to another model, or its packing is not [out, in / 2]"
        )


def _check_counts(counted: dict[str, dict[str | None, int]], owner) -> None:
    for converter in owner.files:
        for name, counts in counted.items():
            if not set(counts) & set(converter.source_patterns):
                continue
            E = owner.experts[name.rpartition(".")[0]].layout.num_experts if converter.by_expert else 1
            for pattern in converter.source_patterns:
                if counts.get(pattern, 0) != E:
                    raise ValueError(
                        f"{name}: the checkpoint has {counts.get(pattern, 0)} of {E} tensors "
                        f"'{pattern.replace(chr(92), '')}': one scale or weight per expert is needed; "
                        "a shard is missing or the file is damaged"
                    )


# ---------------------------------------------------------------- layers that are not a part of the model
@dataclass(frozen=True)
class MtpTensors:
    """The tensors of multi-token prediction layers: a model leaves them out, generate(use_mtp=True) reads them.

    names of the tensors; dense: those of them that are dense matrices, without `.weight`; files that hold them
    """

    names: tuple[str, ...] = ()
    dense: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()

    def read(self) -> dict[str, Tensor]:
        """Copies, as the files may be written over. KeyError for a tensor that is not there."""
        found: dict[str, Tensor] = {}
        for path in self.files:
            if Path(path).is_file():
                with safe_open(path, "pt") as file:
                    here = set(self.names).intersection(file.keys())
                    found |= {name: file.get_tensor(name).clone() for name in here}
        if missing := set(self.names) - found.keys():
            raise KeyError(min(missing))
        return found


def mtp_tensors(model: nn.Module, headers: dict[str, dict], files: Iterable[str | os.PathLike]) -> MtpTensors:
    """Those in `headers` of `files` that the class of `model` ignores, named "mtp" or as layers after the last."""
    patterns = [re.compile(p) for p in type(model)._keys_to_ignore_on_load_unexpected or ()]
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)

    def is_mtp(name: str) -> bool:
        layer = re.search(r"\blayers\.(\d+)\.", name)
        return re.search(r"\bmtp\b", name) is not None or (layer is not None and int(layer[1]) >= layers)

    names = [name for name in headers if is_mtp(name) and any(p.search(name) for p in patterns)]
    dense = [n for n in names if headers[n]["dtype"] in DENSE and len(headers[n]["shape"]) == 2]
    return MtpTensors(tuple(names), frozenset(n.removesuffix(".weight") for n in dense), tuple(map(str, files)))
