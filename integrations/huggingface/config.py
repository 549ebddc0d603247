"""`MoeNvfp4Config`: what a user chooses, and what config.json says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_nvfp4._version import __version__
from moe_nvfp4.checks import check_flag
from moe_nvfp4.integrations.placement import check_cpu_experts
from moe_nvfp4.quantize.convert import HEADS
from moe_nvfp4.quantize.dialects import DIALECTS, QuantizationInfo, as_patterns, read_config
from moe_nvfp4.quantize.files import read_json
from moe_nvfp4.quantize.linears import as_wanted
from moe_nvfp4.quantize.model import own_code
from moe_nvfp4.quantize.names import ignores_experts, names_experts
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, recipe_named
from moe_nvfp4.weights import ACTIVATIONS

DEFAULTS: dict[str, Any] = dict(activations="bf16", recipe=DEFAULT_RECIPE, exclude=[], linears="packed",
                                dialect="modelopt", calibration=None, cpu_experts=None, map_files=False)  # fmt: skip
FIELDS = tuple(DEFAULTS)
LOADING = {"activations", "linears", "cpu_experts", "map_files"}  # fields that can be chosen for 4-bit files
LINEARS = ("packed", "dense")
ASKED = "moe_nvfp4"  # the attribute under which transformers keeps the user's config
# Keys of a quantization_config that are not carried through: parsed and written anew, or about KV cache scales, which
# new files do not have
REWRITTEN = frozenset[str]().union(*(dialect.keys for dialect in DIALECTS.values()))


class MoeNvfp4Config(QuantizationConfigMixin):
    """How to make a model's experts 4-bit, and what config.json says about it afterwards.

    activations  "bf16" (W4A16, the default) or "nvfp4" (W4A4: rows are quantized to NVFP4 before each GEMM, with the
                 file's `input_scale` if it has one, else one scale per token), or "nvfp4_four_over_six": W4A4 in
                 which each block has the better of two scales (docs/numerics.md)
    recipe       how block scales are chosen when weights are quantized: one of
                 moe_nvfp4.quantize.recipes.RECIPES ("mse") or "weighted"; files may also say "gptq" or "distill"
    calibration  data for the recipe "weighted": a text or several, token ids [B, T] or several, the pathlib.Path of a
                 file of moe-nvfp4 importance, or None: random token ids. The model runs once, layer by layer
    exclude      experts modules to leave as they are: a name or wildcard of the model's modules, such as
                 "model.layers.0.*", or several; each must match a module
    linears      for weights that are not NVFP4: which linears become 4-bit besides the experts, "attention", "shared",
                 "mlp", "lm_head", "all" (quantize.linears), a name or wildcard of the model's modules, or several
                 (default: none; `exclude` counts for them, too).
                 For 4-bit files, which may hold linears quantized: "packed" (the default) keeps them NVFP4
                 (`NVFP4Linear`, the memory that the file promises); "dense" dequantizes them to the model's dtype as
                 they are read (faster where there is no kernel)
    dialect      the names and the config of files: "modelopt" (the default) or "compressed-tensors"
    cpu_experts  layers whose experts stay on the CPU, and are computed there, when the model goes to a GPU: a number
                 (the first ones), "all", or "auto": as many as the GPU has no room for. This is about the machine, so
                 it is not saved
    map_files    whether 4-bit experts that stay on the CPU (all, unless `cpu_experts` says otherwise) also stay in
                 their safetensors files, for models larger than the memory: nothing is copied, and each call reads
                 what it needs. This is not saved either

    config.json has this as the dialect's `quantization_config`, so that servers read the files too; our own fields are
    under its key "moe_nvfp4". An MXFP4 or FP8 folder becomes NVFP4 while it loads, as a dense one does. For a folder
    that is NVFP4 already, `activations`, `linears`, `cpu_experts` and `map_files` may be given here, and the first two
    also to `checkpoint_config`; the others would have no effect and raise ValueError. An unknown field raises
    TypeError. What other tools wrote into a config.json is carried through.

    ignore, input_scale and pre_quant_scale are what files say: their ignore list, and whether they have static
    activation scales and AWQ's scales.
    """

    activations: str
    recipe: str
    exclude: list[str]
    linears: str | list[str]
    dialect: str
    calibration: Any
    cpu_experts: int | str | None
    map_files: bool

    def __init__(
        self,
        activations: str | None = None,
        recipe: str | None = None,
        exclude: str | Iterable[str] | None = None,
        linears: str | Iterable[str] | None = None,
        dialect: str | None = None,
        calibration: Any = None,
        cpu_experts: int | str | None = None,
        map_files: bool = False,
        *,
        ignore: Iterable[str] | None = None,
        input_scale: bool = False,
        pre_quant_scale: bool = False,
        **unknown: Any,
    ):
        _check_known(unknown)
        self.settled = False  # whether fields that are assigned or changed are no longer a user's choice
        self.given: frozenset[str] = frozenset()  # fields that the user set; copies do not share it
        values = activations, recipe, exclude, linears, dialect, calibration, cpu_experts, map_files or None
        for name, value in zip(FIELDS, values, strict=True):
            setattr(self, name, value)
        for value, known, what in ((self.activations, ACTIVATIONS, "activations"),
                                   (self.dialect, tuple(DIALECTS), "dialect")):  # fmt: skip
            if value not in known:
                raise ValueError(f"{what} must be one of {known}, got {value!r}")
        if not recipe_named(self.recipe).model and calibration is not None:
            raise ValueError(f"calibration has no effect on recipe {self.recipe!r}: choose 'weighted', or leave it out")
        if cpu_experts is not None:
            check_cpu_experts(cpu_experts)
        check_flag("map_files", map_files)
        self.quant_method: Any = "moe_nvfp4"  # for transformers' registry; config.json has the dialect's
        self.ignore = list(ignore or [])
        self.input_scale, self.pre_quant_scale = bool(input_scale), bool(pre_quant_scale)
        self.weights_only = False  # whether the files say W4A16, for which their static scales, if any, are not used
        self.dequantize = False  # a loading attribute of transformers' CompressedTensorsConfig
        self.unknown: dict[str, Any] = {}  # what other tools wrote, carried through
        self.described = False  # whether this says what files are, and not how to make them
        self.unread: Exception | None = None  # of a folder that becomes NVFP4 if asked for: why nothing else reads it

    def __setattr__(self, name: str, value: Any) -> None:
        """A field that is assigned counts as one that was given; None is its default. `resolve` checks the value."""
        if name in FIELDS:
            if name == "exclude":
                value = as_patterns(value, name) or None
            elif name == "linears":
                wanted = as_wanted(value)
                value = wanted[0] if wanted in ([one] for one in LINEARS) else wanted or None
            elif name == "calibration" and isinstance(value, Iterator):
                value = list(value)  # else the config could be used once, and no model that has it be copied or saved
            if not self.settled:
                self.given = self.given - {name} if value is None else self.given | {name}
            value = copy(DEFAULTS[name]) if value is None else value
        elif not vars(self).get("settled", True) and get_close_matches(name, FIELDS, n=1, cutoff=0.8):
            _check_known([name])
        super().__setattr__(name, value)

    @property
    def chosen(self) -> dict[str, Any]:
        """The fields that the user set, and those that were changed in place."""
        values = {name: getattr(self, name) for name in FIELDS}
        changed = lambda name: not self.settled and values[name] != DEFAULTS[name]
        return {name: value for name, value in values.items() if name in self.given or changed(name)}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        config = {key: value for key, value in config_dict.items() if key not in REWRITTEN}
        own = config.pop("moe_nvfp4", None) or {}
        described = bool(own)
        method = config.pop("quant_method", None)
        if method == "moe_nvfp4" and "quant_algo" not in config_dict:  # a dictionary of the fields of `cls`
            method = None
        info = None
        if method is not None:
            info = read_config(config_dict)
            if info is None:
                raise ValueError(f"the quantization_config of quant_method {method!r} does not say NVFP4")
            own, described = _said(info, own), True
            config.pop("ignore", None)
        elif not own:  # the fields of `cls` without a method
            own, config = config, {}
        try:
            result = cls(**{**own, **kwargs})
        except TypeError as error:
            if method is None or kwargs:
                raise
            raise ValueError(f"moe_nvfp4 in the quantization_config of config.json makes no sense ({error}): download "
                             "it again") from None  # fmt: skip
        result.unknown, result.described = config, described
        if described:
            result.given, result.settled = frozenset(), True
        result.weights_only = info is not None and info.activations == "bf16"
        return (result, {}) if return_unused_kwargs else result

    @property
    def says_static(self) -> bool:
        """Whether what this writes says that files have static activation scales, which makes servers run W4A4."""
        return self.input_scale and not (self.weights_only and self.activations == "bf16")

    def to_dict(self) -> dict[str, Any]:
        own = {
            "activations": self.activations,
            "recipe": self.recipe,
            "exclude": self.exclude,
            "input_scale": self.says_static,
        }
        if self.linears == "dense":
            own["linears"] = self.linears
        written = DIALECTS[self.dialect].write(self.ignore, self.says_static, own, __version__, self.pre_quant_scale)
        return {**self.unknown, **written}

    def get(self, key: str, default: Any = None) -> Any:
        """As of the dictionary in config.json: transformers asks so the config of a model that is in memory, which
        from_pretrained(folder, config=model.config) gives it."""
        return self.to_dict().get(key, default)

    def get_loading_attributes(self) -> dict[str, Any]:
        """For transformers, which sets these attributes of the config that a folder's config.json says: the fields that
        the user gave, and which quantizer is to load the folder. `resolve` takes them from there."""
        if not self.settled:
            MoeNvfp4Config(**self.chosen)  # what was assigned may be no choice
        said = {"activations": self.activations} if self.described or self.activations != "bf16" else {}
        if self.linears == "dense":
            said["linears"] = "dense"
        return {**self.chosen, **said, "quant_method": self.quant_method, ASKED: self}

    def excludes(self, module_name: str) -> bool:
        """Whether the experts module `module_name` is to be left alone."""
        return any(names_experts(p, module_name) for p in self.exclude) or any(
            ignores_experts(p, module_name) for p in self.ignore if "expert" in p
        )


def resolve(config: Any) -> tuple[MoeNvfp4Config, bool]:
    """(How to load a folder: a config of this model alone. Whether its files are of another format and become NVFP4
    while they load.)

    config: what transformers has made of the quantization_config of config.json, if there is one, and of the one that
    the user gave. ValueError for what has no effect on files that are NVFP4 already, and the error of what reads a
    folder of another format if the user gave none.
    """
    asked = vars(config).pop(ASKED, None)
    if (unread := getattr(config, "unread", None)) is not None and asked is None:
        raise unread
    converts = asked is not None and (unread is not None or not isinstance(config, MoeNvfp4Config))
    source = asked if converts else config
    if asked is not None and not converts:
        loading_fields(asked.chosen)
    users = source if asked is None else asked
    for name in ("ignore", "input_scale", "pre_quant_scale"):
        if not users.settled and getattr(users, name):  # else it was read from files, which it describes
            raise ValueError(f"{name} is what config.json says of 4-bit files, and no choice: exclude names what "
                             "is to be left as it is, and moe-nvfp4 calibrate measures scales")  # fmt: skip
    for name in ("modules_to_not_convert", "use_optimized_inference"):  # options of other packages' configs
        if getattr(source, name, None):
            raise ValueError(f"{name} has no effect on files that are NVFP4 already: leave it out")
    # A user may load other models by `source`, which may be of the registry's reader's class
    plain = MoeNvfp4Config(**({} if source.settled else source.chosen))
    vars(plain).update({key: v for key, v in vars(source).items() if source.settled or key not in FIELDS})
    plain.given, plain.settled = frozenset(source.chosen), True
    return plain, converts


def loading_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields`, if all can be chosen for files that are 4-bit already; else ValueError, or TypeError if unknown."""
    _check_known(fields)
    if others := sorted(set(fields) - LOADING):
        raise ValueError(
            f"{', '.join(others)} would have no effect: the files are 4-bit already, and only activations, linears, "
            "cpu_experts and map_files can be chosen for them. Quantize the original checkpoint for another recipe or "
            "exclude, and convert these files for another dialect (moe-nvfp4 quantize SRC DST --dialect ...)"
        )
    if (linears := fields.get("linears", "packed")) not in LINEARS:
        raise ValueError(
            f"linears={linears!r} would have no effect: the files are 4-bit already, so it is one of {LINEARS}; "
            "quantize the original checkpoint for more 4-bit linears"
        )
    return dict(fields)


def check_for_dense(config: MoeNvfp4Config) -> None:
    """ValueError for a config of weights that are not NVFP4 yet that is about NVFP4 files: one that chooses what
    becomes of their linears, which would have no effect, or says what they hold."""
    if as_wanted(config.chosen.get("linears")) and isinstance(config.linears, str):
        raise ValueError(
            f"linears={config.linears!r} would have no effect: it is for files that are NVFP4 already. Leave it out or "
            "name the linears that are to become 4-bit ('attention', 'shared', 'mlp', 'lm_head', 'all')"
        )
    if config.described:
        raise ValueError(
            "this quantization_config says what 4-bit files hold (a config.json has it, and to_dict() writes it), not "
            "how to make them of other files: give MoeNvfp4Config(recipe=..., linears=...), or a dictionary "
            'of its fields, {"quant_method": "moe_nvfp4", "recipe": ..., "linears": ...}'
        )


def _check_known(fields: Iterable[str]) -> None:
    """TypeError for fields that users cannot set; it suggests the most similar ones that they can."""
    if unknown := [name for name in fields if name not in FIELDS]:
        near = {name: get_close_matches(name, FIELDS, n=1) for name in unknown}
        hints = [f"{name!r}" + (f" (did you mean {found[0]!r}?)" if found else "") for name, found in near.items()]
        raise TypeError(f"MoeNvfp4Config has no field {', '.join(hints)}; it has {', '.join(FIELDS)}")


def _said(info: QuantizationInfo, own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a checkpoint's config sets; `own`, its "moe_nvfp4" part, takes precedence."""
    if info.mixed and "activations" not in own:
        raise ValueError(
            "these files have NVFP4 layers for quantized activations (W4A4) and others for bf16 ones (W4A16), and here "
            "all layers of a model run in one way: choose it, checkpoint_config(path, activations='bf16') or 'nvfp4'"
        )
    return {"activations": info.activations, "dialect": info.dialect.name, "ignore": list(info.ignore), **own}


def checkpoint_config(
    path: str | os.PathLike, *, subfolder: str = "", revision: str | None = None, **fields: Any
) -> PretrainedConfig:
    """The config of a 4-bit checkpoint, for `from_pretrained(path, config=...)`, with fields of `MoeNvfp4Config`.

    Needed to choose `linears` or `activations`, and for folders in which only hf_quant_config.json, not config.json,
    speaks of quantization. subfolder, revision: as in from_pretrained. ValueError if neither says NVFP4, and for fields
    without effect on such files.
    """
    for name in {"cpu_experts", "map_files"} & set(fields):
        raise ValueError(
            f"{name} is not a part of a checkpoint's config: give it to from_pretrained, as quantization_config="
            f"MoeNvfp4Config({name}=...)"
        )
    where: dict[str, Any] = {"subfolder": subfolder, "revision": revision}
    with own_code(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **where)
    info = files_info(path, config, **where)
    if info is None:
        raise ValueError(
            f"{os.path.join(path, subfolder)} is not an NVFP4 checkpoint: neither config.json nor hf_quant_config.json "
            "says so"
        )
    heads = (cached_file(path, name, _raise_exceptions_for_missing_entries=False, **where) for name in HEADS)
    if fields and any(heads):
        raise ValueError(
            f"transformers reads the config of a decision model ({path}) by itself, whatever it is given: "
            "from_pretrained(path, quantization_config=MoeNvfp4Config(...)) with the same fields"
        )
    own = (getattr(config, "quantization_config", None) or {}).get("moe_nvfp4") or {}
    config.quantization_config = MoeNvfp4Config(**_said(info, own | loading_fields(fields))).to_dict()
    return config


def files_info(path: str | os.PathLike, config: PretrainedConfig, **where: Any) -> QuantizationInfo | None:
    """What a checkpoint's config, and its hf_quant_config.json if there is one, say about NVFP4. where: `subfolder` and
    `revision`."""
    file = cached_file(path, "hf_quant_config.json", _raise_exceptions_for_missing_entries=False, **where)
    hf = None
    if file is not None:
        hf = read_json(Path(file))
    return read_config({"quantization_config": getattr(config, "quantization_config", None)}, hf)
