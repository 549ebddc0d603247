"""How other tools name and scale the same NVFP4 numbers: a file for each. No other file tells dialects apart.

                    ModelOpt (`modelopt`)        compressed-tensors (`nvfp4-pack-quantized`)
    codes           weight          U8           weight_packed        U8        low nibble = even k
    sf              weight_scale    F8_E4M3      weight_scale         F8_E4M3   row-major, the same bytes
    global_scale    weight_scale_2  F32 []       weight_global_scale  F32 [1]   its reciprocal
    input_scale     input_scale     F32 []       input_global_scale   F32 [1]   its reciprocal

Sources: nvidia-modelopt 0.47 (`torch/export`), compressed-tensors 0.20 (`compressors/nvfp4`).
A float32 that is a reciprocal is the reciprocal of its reciprocal: 1/(1/(1/x)) = 1/x for all 2^23 mantissas of x.
But neighbouring numbers may have the same reciprocal, so a scale that has been read is written as it was read
(`encode_scale`, `carry_scale`). Codes and block scales are the same bytes in both dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moe_nvfp4._version import __version__
from moe_nvfp4.quantize.dialects.base import EMBEDDING, Dialect, QuantizationInfo, as_patterns, matches
from moe_nvfp4.quantize.dialects.compressed_tensors import CompressedTensors
from moe_nvfp4.quantize.dialects.modelopt import ModelOpt
from moe_nvfp4.quantize.recipes import recipe_named
from moe_nvfp4.weights import ACTIVATIONS

__all__ = [
    "COMPRESSED_TENSORS", "DIALECTS", "EMBEDDING", "GLOBAL_SCALES", "MODELOPT", "Dialect", "QuantizationInfo",
    "as_patterns", "dialect_of_files", "dialect_of_method", "matches", "read_config",
]  # fmt: skip

MODELOPT, COMPRESSED_TENSORS = ModelOpt(), CompressedTensors()
DIALECTS: dict[str, Dialect] = {d.name: d for d in (MODELOPT, COMPRESSED_TENSORS)}
GLOBAL_SCALES = tuple(d.global_scale for d in DIALECTS.values())  # names of tensors that only NVFP4 files have
OWN = {
    "weight",
    "weight_global_scale",
    "input_scale",
}  # the names of our own modules' parameters, in torch.save's files


def dialect_of_method(method: str | None) -> Dialect | None:
    """The dialect whose configs have this `quant_method`; None: that of another format."""
    return next((d for d in DIALECTS.values() if (method or MODELOPT.name) in d.methods), None)


def dialect_of_files(tensors: Iterable[str]) -> Dialect | None:
    """The dialect that names tensors of files in this way; None if nothing says so. ValueError for several."""
    names, found = tuple(tensors), list[Dialect]()
    for dialect in DIALECTS.values():
        others = OWN.union(*(d.suffixes for d in DIALECTS.values() if d is not dialect))
        if any(name.endswith(tuple(set(dialect.suffixes) - others)) for name in names):
            found.append(dialect)
    if len(found) > 1:
        raise ValueError(f"these files have tensors as {' and '.join(d.name for d in found)} name them: two "
                         "checkpoints are mixed; keep the files of one")  # fmt: skip
    return found[0] if found else None


def read_config(config: Mapping, hf_quant_config: Mapping | None = None) -> QuantizationInfo | None:
    """Read what a checkpoint's configs say about NVFP4. None: it is not an NVFP4 checkpoint.

    config: config.json, or its quantization_config; hf_quant_config: hf_quant_config.json, if there is one.
    ValueError for NVFP4 in a form that is not supported, naming it, and for unknown settings of ours.
    """
    q = config.get("quantization_config", config if "quant_method" in config else None)
    hf = (hf_quant_config or {}).get("quantization", {})
    if q is None and not hf:
        return None
    q = q or {}
    dialect = dialect_of_method(q.get("quant_method"))  # hf_quant_config.json, ModelOpt's file, names no method
    try:
        info = None if dialect is None else dialect.read(q, hf)
        if info is not None:
            _check_own(own := q.get("moe_nvfp4") or {})
            if own.get("input_scale") and info.activations == "bf16":
                raise ValueError(
                    "config.json says W4A16 (quant_algo, input_activations), and under moe_nvfp4, which this library "
                    "reads, that there are static activation scales: for W4A16 make input_scale false and activations "
                    '"bf16" there, too, else put back what was changed'
                )
        return info
    except (AttributeError, KeyError, TypeError) as error:  # not the structure that the tools write
        raise ValueError(
            f"the quantization_config of these files makes no sense ({type(error).__name__}: {error}): download "
            "config.json again, or compare it with what the tool writes"
        ) from None


def _check_own(own: Mapping) -> None:
    """ValueError unless `own`, what a quantization_config has under "moe_nvfp4", is what this version may write."""
    known: dict[str, Callable[[Any], bool]] = {
        "activations": ACTIVATIONS.__contains__,
        "recipe": lambda name: bool(recipe_named(name)),
        "exclude": lambda patterns: isinstance(patterns, list) and as_patterns(patterns, "exclude") == patterns,
        "linears": ("packed", "dense").__contains__,
        "input_scale": lambda there: isinstance(there, bool),
    }
    if newer := set(own) - known.keys():
        raise ValueError(
            f"config.json has {', '.join(sorted(newer))} under moe_nvfp4, which version {__version__} does not know: "
            "upgrade (pip install -U moe-nvfp4)"
        )
    for name, value in own.items():
        if not known[name](value):
            raise ValueError(
                f"config.json has {name} {value!r} under moe_nvfp4, which makes no sense: download it again"
            )
