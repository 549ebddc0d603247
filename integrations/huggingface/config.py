"""What a user chooses, and what config.json says: `MoeNvfp4Config`."""

from __future__ import annotations

import json
import os
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_nvfp4 import __version__
from moe_nvfp4.quantize.dialects import DIALECTS, matches, read_config, write_config
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, RECIPES
from moe_nvfp4.weights import ACTIVATIONS

LINEARS = ("packed", "dense")
# Read anew, or written anew, or about something that does not come along (KV cache scales)
REWRITTEN = {
    "quant_algo", "moe_quant_algo", "config_groups", "producer", "format", "quantization_status", "quantized_layers",
    "group_size", "exclude_modules", "global_compression_ratio", "kv_cache_scheme", "kv_cache_quant_algo",
}  # fmt: skip


class MoeNvfp4Config(QuantizationConfigMixin):
    """How to make a model's experts 4-bit, and what config.json says about it afterwards.

    activations  "bf16" (W4A16) or "nvfp4" (W4A4: rows quantized to NVFP4 before each GEMM, with the
                 file's `input_scale` where it has one, else one scale per token)
    recipe       how block scales are chosen when bf16 weights are quantized
                 (moe_nvfp4.quantize.recipes.RECIPES)
    exclude      experts modules to leave as they are: names or wildcards of the model's modules,
                 such as "model.layers.0.*"
    linears      what becomes of linears that 4-bit files hold quantized too (attention, shared experts, lm_head):
                 "packed", they stay NVFP4 (`NVFP4Linear`, the memory that the file promises), or "dense", they are
                 dequantized to the model's dtype as they are read (faster where no kernel is)
    dialect      whose names and config files have: "modelopt" or "compressed-tensors"

    In config.json this is the dialect's `quantization_config`, so that servers read the files too; our own fields
    travel in its key "moe_nvfp4". For files that are 4-bit already, transformers takes config.json's fields and
    not an argument's: `checkpoint_config` sets them.
    """

    def __init__(
        self,
        activations: str = "bf16",
        recipe: str = DEFAULT_RECIPE,
        exclude: list[str] | None = None,
        linears: str = "packed",
        dialect: str = "modelopt",
        **kwargs: Any,
    ):
        for value, known, what in ((activations, ACTIVATIONS, "activations"), (linears, LINEARS, "linears"),
                                   (dialect, tuple(DIALECTS), "dialect")):  # fmt: skip
            if value not in known:
                raise ValueError(f"{what} must be one of {known}, got {value!r}")
        if recipe not in RECIPES:
            raise ValueError(f"unknown recipe {recipe!r}: choose one of {', '.join(RECIPES)}")
        self.quant_method = "moe_nvfp4"  # who reads it; config.json has the dialect's
        self.activations, self.recipe, self.exclude = activations, recipe, list(exclude or [])
        self.linears, self.dialect = linears, dialect
        self.ignore: list[str] = list(kwargs.pop("ignore", None) or [])
        self.input_scale = bool(kwargs.pop("input_scale", False))  # the files hold input scales
        self.pre_quant_scale = bool(kwargs.pop("pre_quant_scale", False))  # and AWQ's
        self.unknown = kwargs  # carried through, whatever other tools wrote

    @classmethod
    def from_dict(cls, config_dict: dict, return_unused_kwargs: bool = False, **kwargs: Any):
        config = {key: value for key, value in config_dict.items() if key not in REWRITTEN}
        own = config.pop("moe_nvfp4", None) or {}
        if config.pop("quant_method", None) is not None:
            info = read_config(config_dict)
            own = {"activations": info.activations, "dialect": info.dialect.name, "ignore": list(info.ignore)} | own
        result = cls(**{**config, **own, **kwargs})
        return (result, {}) if return_unused_kwargs else result

    def to_dict(self) -> dict[str, Any]:
        own = {
            "activations": self.activations,
            "recipe": self.recipe,
            "exclude": self.exclude,
            "input_scale": self.input_scale,
        }
        if self.linears != "packed":
            own["linears"] = self.linears
        dialect = DIALECTS[self.dialect]
        written = write_config(dialect, self.ignore, self.input_scale, own, __version__, self.pre_quant_scale)
        return {**self.unknown, **written}

    def excludes(self, module_name: str) -> bool:
        """Whether the experts module `module_name` is to be left alone."""
        patterns = [*self.exclude, *(p for p in self.ignore if "expert" in p)]
        names = (module_name, f"{module_name}.0.down_proj", f"{module_name}.0.w2")
        return any(matches(p, name) for p in patterns for name in names)


def checkpoint_config(path: str | os.PathLike, **fields: Any) -> PretrainedConfig:
    """The config of a 4-bit checkpoint, for `from_pretrained(path, config=...)`, with fields of `MoeNvfp4Config`.

    Needed to choose `linears` or `activations`, and for folders whose config.json says nothing about quantization
    while hf_quant_config.json does. ValueError where neither says NVFP4.
    """
    config = AutoConfig.from_pretrained(path)
    file = cached_file(path, "hf_quant_config.json", _raise_exceptions_for_missing_entries=False)
    hf = None
    if file is not None:
        with open(file, encoding="utf-8") as f:
            hf = json.load(f)
    given = getattr(config, "quantization_config", None)
    info = read_config({"quantization_config": given}, hf)
    if info is None:
        raise ValueError(f"{path} is not an NVFP4 checkpoint: neither config.json nor hf_quant_config.json says so")
    said = {"activations": info.activations, "dialect": info.dialect.name, "ignore": list(info.ignore)}
    own = (given or {}).get("moe_nvfp4") or {}
    config.quantization_config = MoeNvfp4Config(**(said | own | fields)).to_dict()
    return config
