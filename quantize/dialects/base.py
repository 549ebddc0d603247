"""What a dialect is: how a tool names, scales and describes NVFP4 numbers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.format import is_global_scale

# Modules, by name or class, whose input is no activation: if one is W4A16, that says nothing about other layers
EMBEDDING = re.compile(r"(?<!un)embed|\bwte\b|\bwpe\b", re.IGNORECASE)


class Dialect(ABC):
    """How a tool names the four numbers of a matrix, stores its global scales, and writes its `quantization_config`.

    name             as users write it
    methods          the `quant_method` of its configs; they may be those of another format, too
    keys             of its configs, which are not carried through when they are written anew
    weight, sf,      the last parts of the tensors' names. Whichever is in no other dialect tells files apart
    global_scale,
    input_scale
    scale_shape      of a stored global scale
    reciprocal       whether stored global scales divide
    pre_quant_scale  whether files may hold AWQ's scales
    renamed          whether programs rename the modules in `ignore` as they rename the model's, but not in expressions
    """

    name: str
    methods: tuple[str, ...]
    keys: frozenset[str]
    weight: str
    sf: str
    global_scale: str
    input_scale: str
    scale_shape: tuple[int, ...] = ()
    reciprocal = False
    pre_quant_scale = False
    renamed = False

    # ---- the config
    @abstractmethod
    def read(self, q: Mapping, hf: Mapping) -> QuantizationInfo | None:
        """What a `quantization_config` with one of `methods` says about NVFP4; None: it is of another format.

        hf: "quantization" of ModelOpt's hf_quant_config.json, or empty. ValueError for NVFP4 in a form that is not
        supported, naming it.
        """

    @abstractmethod
    def write(
        self, ignore: list[str], input_scale: bool, own: dict, version: str, pre_quant_scale: bool = False
    ) -> dict:
        """The `quantization_config` of config.json; `own` is stored under "moe_nvfp4".

        input_scale: the files hold static activation scales (W4A4); otherwise only weights are quantized (W4A16).
        pre_quant_scale: the files hold AWQ's scales.
        """

    def is_nvfp4(self, q: Mapping) -> bool:
        """Whether a config with one of `methods` may be read here; else it is left to who else has the method."""
        return True

    def pattern(self, wildcard: str) -> str:
        """An entry of the config's ignore list, from a wildcard in which `*` is a number, or at the end anything."""
        return wildcard

    def kv_cache_scheme(self, found: Any) -> Any:
        """The `kv_cache_scheme` for new files, from that of the source; None: there is no form for it."""
        return found

    def misread_by(self, q: Mapping, stacked: bool, indexed: bool) -> list[str]:
        """A line for each program that silently misreads files with this config, with a remedy.

        stacked: the family's own files have stacks of experts; indexed: 4-bit q, k and v lie beside an indexer's.
        """
        return []

    # ---- the tensors
    @property
    def suffixes(self) -> tuple[str, str, str, str]:
        return self.weight, self.sf, self.global_scale, self.input_scale

    @property
    def exact(self) -> bool:
        """Whether decode_scale keeps every bit. Else a scale that was read is kept, to be written again."""
        return not self.reciprocal

    def decode_scale(self, stored: Tensor) -> Tensor:
        """Stored global scales, of any shape -> fp32 of that shape, the numbers that multiply."""
        stored = stored.float()
        return 1.0 / stored if self.reciprocal else stored

    def encode_scale(self, scale: Tensor, as_read: Tensor | None = None) -> Tensor:
        """A global scale that multiplies, fp32 0-d -> as files store it, [] or [1].

        If `scale` is a result of decode_scale, decode_scale of the result is `scale` again. as_read: the number that a
        file had before; it is written again if it still stands for `scale`. ValueError for a scale that cannot be
        written: its reciprocal may be beyond float32.
        """
        scale = scale.float().reshape(self.scale_shape)
        stored = scale
        if self.reciprocal:
            before = 1.0 / scale if as_read is None else as_read.to(scale.device).reshape(self.scale_shape)
            stored = before if torch.equal(1.0 / before, scale) else 1.0 / scale
        if not is_global_scale(stored).all():
            raise ValueError(f"the global scale {float(scale):.6g} cannot be written in {self.name}'s form, where it "
                             f"is {float(stored):.6g}: it must be finite and positive; keep ModelOpt's dialect, or "
                             "look at the original's weights, which are close to 0")  # fmt: skip
        return stored

    def carry_scale(self, stored: Tensor, target: Dialect) -> Tensor:
        """One global scale as files in this dialect store it -> as files in `target` do; unchanged in the same one."""
        if target is self:
            return stored.reshape(self.scale_shape)
        return target.encode_scale(self.decode_scale(stored).reshape(()))


@dataclass(frozen=True)
class QuantizationInfo:
    """What a checkpoint's config says about its NVFP4 tensors.

    ignore       patterns of modules left alone: wildcards, `re:` expressions, and class names
    layers       module name -> quant_algo where the file mixes precisions, else None
    activations  "nvfp4" or "bf16": what the file was made for
    mixed        whether some NVFP4 layers were made for "nvfp4" and others for "bf16"
    whole        whether the config says that every linear is quantized which `ignore` does not name; else it lists some
    kv_cache     the KV cache scheme that the config names, as config.json writes it; this library does not apply it
    awq          whether the config says that the files hold AWQ's scales
    """

    dialect: Dialect
    ignore: tuple[str, ...] = ()
    layers: Mapping[str, str] | None = None
    activations: str = "bf16"
    kv_cache: Any = None
    whole: bool = True
    mixed: bool = False
    awq: bool = False

    def ignores(self, module: str) -> bool:
        names, patterns = self._ignore
        above = accumulate(module.split("."), "{}.{}".format)
        return any(name in names for name in above) or any(matches(pattern, module) for pattern in patterns)

    @cached_property
    def _ignore(self) -> tuple[frozenset[str], tuple[str, ...]]:
        """The names in `ignore`, of which there may be hundreds, and the patterns."""
        patterns = tuple(p for p in self.ignore if p.startswith("re:") or re.search(r"[*?[]|\.$", p))
        return frozenset(self.ignore).difference(patterns), patterns


def check_group(group: Mapping) -> None:
    """ValueError unless `group`, one of NVFP4 of a config's config_groups, says what is computed here."""
    weights, inputs = (group.get(key) or {} for key in ("weights", "input_activations"))
    for numbers in (weights, inputs):
        if numbers.get("group_size") not in (16, None):
            raise ValueError(f"NVFP4 has blocks of 16, the config group says {numbers}: these are files of another "
                             "format; load them with the tool that wrote them")  # fmt: skip
    if weights.get("num_bits", 4) != 4:
        raise ValueError(f"NVFP4 weights have 4 bits, the config group says {weights}: these are files of another "
                         "format; load them with the tool that wrote them")  # fmt: skip
    if group.get("output_activations"):
        raise ValueError(
            "NVFP4 layers whose outputs are quantized (output_activations) are not computed here: load them "
            "with the tool that wrote them, or set it to null in config.json"
        )
    if (bits := inputs.get("num_bits", 4)) != 4:
        raise ValueError(
            f"NVFP4 weights with activations of {bits} bits (W4A{bits}) are not computed here: load them with "
            "the tool that wrote them, or set input_activations to null in config.json (W4A16)"
        )


def as_patterns(given: str | Iterable[str] | None, name: str) -> list[str]:
    """The value of an argument `name`, which takes one pattern or several, as a list. TypeError for anything else."""
    if given is None:
        return []
    patterns = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else [given]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{name} is a pattern of module names or a list of them, got {pattern!r}")
        if not pattern:
            raise ValueError(f"{name} has an empty pattern, which matches nothing: name a module, or leave it out")
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
            raise ValueError(
                f"{pattern[:200]!r}, excluded or in the config's ignore list, {why}: name modules"
            ) from None
    return fnmatchcase(module, pattern) or module.startswith(pattern.rstrip("*.") + ".")
