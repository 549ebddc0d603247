"""How other tools name and scale the same NVFP4 numbers. No other file here takes a reciprocal of a global scale.

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

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dialect:
    """The last parts of the tensors' names, and whether files store global scales as reciprocals."""

    name: str
    weight: str
    sf: str
    global_scale: str
    input_scale: str
    reciprocal: bool

    @property
    def suffixes(self) -> tuple[str, str, str, str]:
        return self.weight, self.sf, self.global_scale, self.input_scale

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of a stored global scale."""
        return (1,) if self.reciprocal else ()

    def decode_scale(self, stored: Tensor) -> Tensor:
        """Stored global scales, of any shape -> fp32 of that shape, the numbers that multiply."""
        stored = stored.float()
        return 1.0 / stored if self.reciprocal else stored

    def encode_scale(self, scale: Tensor, as_read: Tensor | None = None) -> Tensor:
        """A global scale that multiplies, fp32 0-d -> as files store it, [] or [1].

        If `scale` is a result of decode_scale, decode_scale of the result is `scale` again. as_read: the number that a
        file had before; it is written again if it still stands for `scale`.
        """
        if not self.reciprocal:
            return scale.float().reshape(())
        scale = scale.float().reshape(1)
        before = 1.0 / scale if as_read is None else as_read.to(scale.device).reshape(1)
        return before if torch.equal(1.0 / before, scale) else 1.0 / scale

    def carry_scale(self, stored: Tensor, target: Dialect) -> Tensor:
        """One global scale as files in this dialect store it -> as files in `target` do; unchanged in the same one."""
        if target is self:
            return stored.reshape(self.scale_shape)
        return target.encode_scale(self.decode_scale(stored).reshape(()))


MODELOPT = Dialect("modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", False)
COMPRESSED_TENSORS = Dialect(
    "compressed-tensors", "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True
)
DIALECTS = {d.name: d for d in (MODELOPT, COMPRESSED_TENSORS)}
GLOBAL_SCALES = tuple(d.global_scale for d in DIALECTS.values())  # names of tensors that only NVFP4 files have

# Modules, by name or class, whose input is no activation: if one is W4A16, that says nothing about other layers
EMBEDDING = re.compile(r"(?<!un)embed|\bwte\b|\bwpe\b", re.IGNORECASE)
# quant_algo of ModelOpt -> activations
ALGOS = {"NVFP4": "nvfp4", "W4A16_NVFP4": "bf16", "NVFP4_AWQ": "nvfp4"}
# kv_cache_quant_algo of ModelOpt's hf_quant_config.json -> kv_cache_scheme of config.json, as ModelOpt converts it
KV_SCHEMES = {"FP8": {"dynamic": False, "num_bits": 8, "type": "float"}}


@dataclass(frozen=True)
class QuantizationInfo:
    """What a checkpoint's config says about its NVFP4 tensors.

    ignore       patterns of modules left alone: wildcards (ModelOpt) or `re:` expressions and class
                 names (compressed-tensors)
    layers       module name -> quant_algo where the file mixes precisions, else None
    activations  "nvfp4" or "bf16": what the file was made for
    mixed        whether some NVFP4 layers were made for "nvfp4" and others for "bf16"
    whole        whether the config says that every linear is quantized which `ignore` does not name; else it lists some
    kv_cache     the KV cache scheme that the config names, as config.json writes it; this library does not apply it
    """

    dialect: Dialect
    ignore: tuple[str, ...] = ()
    layers: Mapping[str, str] | None = None
    activations: str = "bf16"
    kv_cache: Any = None
    whole: bool = True
    mixed: bool = False

    def ignores(self, module: str) -> bool:
        return any(matches(pattern, module) for pattern in self.ignore)


def as_patterns(given: str | Iterable[str] | None, name: str) -> list[str]:
    """The value of an argument `name`, which takes one pattern or several, as a list. TypeError for anything else."""
    if given is None:
        return []
    patterns = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else [given]
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"{name} is a pattern of module names or a list of them, got {pattern!r}")
    return patterns


def matches(pattern: str, module: str) -> bool:
    """Whether an entry of an `ignore` list, a name, a wildcard or `re:` and an expression, matches `module`.

    ValueError for an expression that is not valid or takes longer than a second.
    """
    if pattern.startswith("re:"):
        import regex  # it has a time limit, and re has none

        try:
            return regex.match(pattern[3:], module, timeout=1.0) is not None
        except (regex.error, TimeoutError) as error:
            why = "takes too long" if isinstance(error, TimeoutError) else f"is no regular expression ({error})"
            raise ValueError(f"{pattern[:200]!r} in the config's ignore list {why}: name the modules instead") from None
    return fnmatchcase(module, pattern) or module.startswith(pattern.rstrip("*.") + ".")


def read_config(config: Mapping, hf_quant_config: Mapping | None = None) -> QuantizationInfo | None:
    """Read what a checkpoint's configs say about NVFP4. None: it is not an NVFP4 checkpoint.

    config: config.json, or its quantization_config; hf_quant_config: hf_quant_config.json, if there is one.
    ValueError for NVFP4 in a form that is not supported, naming it.
    """
    q = config.get("quantization_config", config if "quant_method" in config else None)
    hf = (hf_quant_config or {}).get("quantization", {})
    if q is None and not hf:
        return None
    try:
        method = (q or {}).get("quant_method")
        if method == "compressed-tensors":
            return _compressed_tensors(q)
        if method in ("modelopt", "moe_nvfp4", None) or (method == "fp8" and "moe_quant_algo" in q):
            return _modelopt({**hf, **(q or {})})
    except (AttributeError, KeyError, TypeError) as error:  # not the structure that the tools write
        raise ValueError(
            f"the quantization_config of these files makes no sense ({type(error).__name__}: {error}): download "
            "config.json again, or compare it with what the tool writes"
        ) from None
    return None


def modelopt_algo(q: Mapping) -> str:
    """The quant_algo of ModelOpt's quantization_config, in capitals; "" if it has none.

    It may be at the top or under "quantization", as in hf_quant_config.json. vLLM reads both, too.
    """
    inner = q.get("quantization") or {}
    return str(q.get("moe_quant_algo") or q.get("quant_algo") or inner.get("quant_algo") or "").upper()


def _modelopt(q: Mapping) -> QuantizationInfo:
    algo, q = modelopt_algo(q), {**(q.get("quantization") or {}), **q}
    products = {algo}
    ignore = tuple(dict.fromkeys(p for key in ("ignore", "exclude_modules") for p in as_patterns(q.get(key), key)))
    kv = q.get("kv_cache_scheme") or q.get("kv_cache_quant_algo")
    layers = None
    if algo == "MIXED_PRECISION":
        layers = {name: entry["quant_algo"].upper() for name, entry in (q.get("quantized_layers") or {}).items()}
        unknown = {a for a in layers.values() if a.startswith(("NVFP4", "W4A")) and a not in ALGOS}
        if unknown:
            raise ValueError(_unsupported(", ".join(sorted(unknown))))
        used = {name: a for name, a in layers.items() if a in ALGOS}
        if not used:
            raise ValueError("quant_algo MIXED_PRECISION names no NVFP4 layer: nothing here is for this library")
        products = {a for name, a in used.items() if not EMBEDDING.search(name)} or set(used.values())
        algo = min(products)
    if algo not in ALGOS:
        raise ValueError(_unsupported(algo))
    size = q.get("group_size", 16)
    if size != 16:
        raise ValueError(f"NVFP4 has blocks of 16, the checkpoint says group_size {size}")
    activations = ALGOS[algo]
    groups = q.get("config_groups")
    if algo == "NVFP4" and groups and not any(group.get("input_activations") for group in groups.values()):
        activations = "bf16"  # ModelOpt would write W4A16_NVFP4; vLLM reads this as the same
    if isinstance(kv, str):
        kv = KV_SCHEMES.get(kv, kv)
    mixed = len({ALGOS[a] for a in products}) > 1
    return QuantizationInfo(MODELOPT, ignore, layers, activations, kv, layers is None, mixed)


def _compressed_tensors(q: Mapping) -> QuantizationInfo | None:
    groups = q.get("config_groups") or {}
    formats = {g.get("format") or q.get("format") for g in groups.values()} or {q.get("format")}
    if "nvfp4-pack-quantized" not in formats:
        return None
    sparsity = (q.get("sparsity_config") or {}).get("format", "dense")
    refused = {
        "transforms (rotations)": (q.get("transform_config") or {}).get("config_groups"),
        f"sparsity {sparsity!r}": sparsity != "dense",
        "fewer experts in some layers (moe_sparsity_config)": q.get("moe_sparsity_config"),
    }
    if what := next((name for name, there in refused.items() if there), None):
        raise ValueError(
            f"compressed-tensors files with {what} are not read: load them with the tool that wrote them, or quantize "
            "the original checkpoint (moe-nvfp4 quantize SRC DST)"
        )
    activations = set()
    for group in groups.values():
        if (group.get("format") or q.get("format")) != "nvfp4-pack-quantized":
            continue
        weights = group.get("weights") or {}
        if weights.get("group_size", 16) != 16 or weights.get("num_bits", 4) != 4:
            raise ValueError(f"nvfp4-pack-quantized has 4 bits in blocks of 16, the config group says {weights}")
        inputs = group.get("input_activations")
        if group.get("output_activations"):
            raise ValueError("NVFP4 layers whose outputs are quantized (output_activations) are not computed here: "
                             "load them with the tool that wrote them, or set it to null in config.json")  # fmt: skip
        if inputs and inputs.get("num_bits", 4) != 4:
            bits = inputs["num_bits"]
            raise ValueError(
                f"NVFP4 weights with activations of {bits} bits (W4A{bits}) are not computed "
                "here: load them with the tool that wrote them, or set input_activations to null in config.json (W4A16)"
            )
        if not (targets := group.get("targets")) or not all(map(EMBEDDING.search, targets)):
            activations.add("nvfp4" if inputs else "bf16")
    whole = any("Linear" in (group.get("targets") or ()) for group in groups.values())
    return QuantizationInfo(
        COMPRESSED_TENSORS, tuple(as_patterns(q.get("ignore"), "ignore")), None, max(activations, default="bf16"),
        q.get("kv_cache_scheme"), whole, len(activations) > 1,
    )  # fmt: skip


def _unsupported(algo: str) -> str:
    return (
        f"quant_algo {algo or None!r}; this library reads {', '.join(ALGOS)}. Quantize the original checkpoint "
        "again (moe-nvfp4 quantize SRC DST), or load this one with the tool that wrote it"
    )


def write_config(
    dialect: Dialect, ignore: list[str], input_scale: bool, own: dict, version: str, pre_quant_scale: bool = False
) -> dict:
    """The `quantization_config` of config.json for files in `dialect`; `own` is stored under "moe_nvfp4".

    input_scale: the files hold static activation scales (W4A4); otherwise only weights are quantized (W4A16).
    pre_quant_scale: the files hold AWQ's scales, for which only ModelOpt's dialect has a name.
    """
    if dialect is MODELOPT:
        numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"weights": numbers, "targets": ["Linear"]}
        if input_scale:
            group["input_activations"] = dict(numbers)
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4_AWQ" if pre_quant_scale else "NVFP4" if input_scale else "W4A16_NVFP4",
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "producer": {"name": "moe_nvfp4", "version": version},
            "moe_nvfp4": own,
        }
    numbers = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
        "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "nvfp4-pack-quantized",
                "weights": {**numbers, "dynamic": False},
                "input_activations": {**numbers, "dynamic": "local"} if input_scale else None,
                "output_activations": None,
            }
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
        "moe_nvfp4": own,
    }
