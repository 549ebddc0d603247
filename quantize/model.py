"""The tensors that a model has, by its config and transformers, to compare a checkpoint's files with."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe_nvfp4.quantize.layouts import Source
from moe_nvfp4.quantize.names import FUSED, PER_EXPERT, SEPARATE

PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class UnknownModel(Exception):
    """Why transformers cannot say which tensors a model has, in one line."""

    def __init__(self, why: str):
        super().__init__(" ".join(why.split()))


@dataclass(frozen=True)
class Given:
    """What a folder gives under one name, as it would be called in a dense checkpoint.

    kind   "NVFP4", "FP8" or "dense"
    shape  of the dense tensor; None where only the kind counts
    """

    kind: str
    shape: tuple[int, ...] | None


class ModelTensors:
    """The state dict of the model that the config of `source` describes, built without memory (on meta).

    Raises UnknownModel where transformers does not know the model, or cannot build it.
    """

    def __init__(self, source: Source):
        try:
            import torch
            import transformers
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter
        except ImportError as error:
            raise UnknownModel(f"transformers is not installed ({error})") from None
        try:
            config = transformers.AutoConfig.from_pretrained(source.checkpoint.folder)
        except Exception as error:  # whatever a stranger's config makes of it
            raise UnknownModel(f"transformers {transformers.__version__} cannot read config.json ({error})") from None
        names = config.architectures or []
        kind = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
        if kind is None:
            known = ", ".join(names) or "any architecture"
            raise UnknownModel(f"transformers {transformers.__version__} does not know {known}")
        self.name = kind.__name__
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        try:
            with torch.device("meta"):
                model = kind._from_config(config)
        except Exception as error:
            raise UnknownModel(f"transformers {transformers.__version__} cannot build {self.name} ({error})") from None
        self.shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self._state, self._prefix = model.state_dict(), model.base_model_prefix
        conversions = [copy.copy(c) for c in get_model_conversion_mapping(model, add_legacy=True)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._renamings = [c for c in conversions if not isinstance(c, WeightConverter)]
        self._tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._optional = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
        self._num_experts = next(iter(source.counts)) if len(source.counts) == 1 else None

    def targets(self, name: str) -> list[str]:
        """Where the model has what a file calls `name`: one place, or several that share a tensor of the files."""
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        if target not in self.shapes and name in self.shapes:
            return [name]
        several = next((c.target_patterns for c in self._converters if pattern in c.source_patterns), [""])
        if pattern is None or len(several) == 1:
            return [target]
        return [target.replace(several[0], other, 1) for other in several]

    def check(self, given: Mapping[str, Given]) -> None:
        """ValueError unless `given`, a folder's tensors by their dense names, is all that the model needs."""
        covered: set[str] = set()
        experts: dict[str, dict[str, dict[int, str]]] = {}  # module -> projection -> expert -> kind
        for name, of in given.items():
            target, *more = self.targets(name)
            module, numbers, part = self._expert(name, target, of) if not more else ("", (), None)
            if part is not None:
                for e in numbers:
                    experts.setdefault(module, {}).setdefault(part, {})[e] = of.kind
            elif target in self.shapes:
                covered.update([target, *more])
                if target == name and of.shape is not None and self.shapes[target] != of.shape:
                    raise ValueError(f"{name} is {list(of.shape)}, by config.json {self.name} has "
                                     f"{list(self.shapes[target])} there: the file belongs to another model, or is "
                                     "damaged")  # fmt: skip
        for module, found in experts.items():
            covered |= self._check_experts(module, found, covered)
        for name in self.shapes.keys() - covered:
            source = self._tied.get(name)
            if source in covered or any(p.search(name) for p in self._optional):
                continue
            raise ValueError(f"{name} is missing: by config.json {self.name} has it, and nothing in the folder gives "
                             "it; quantize the original checkpoint again, or download the files again")  # fmt: skip

    def _expert(self, name: str, target: str, of: Given) -> tuple[str, range, str | None]:
        """(experts module of the model, experts, projection or its bias) that `name` is of; the last None: of none."""
        stem, _, last = name.rpartition(".")
        match = PER_EXPERT.fullmatch(stem)
        if match is not None and last in ("weight", "bias"):
            inside = PER_EXPERT.fullmatch(target.rpartition(".")[0])  # where the model's own files are stacked
            module = inside["module"] if inside else target.rpartition(".")[0]
            part = PARTS.get(match["part"], match["part"]) + (".bias" if last == "bias" else "")
            known = any(n.startswith(f"{module}.") for n in self.shapes)
            return module, range(int(match["e"]), int(match["e"]) + 1), part if known else None
        separate = SEPARATE.search(stem)
        if of.kind == "NVFP4" and of.shape is not None and len(of.shape) == 3 and (separate or FUSED.search(name)):
            part = separate["part"] if separate else name.rpartition(".")[2]
            return target.rpartition(".")[0], range(of.shape[0]), part
        return "", range(0), None

    def _check_experts(self, module: str, found: Mapping[str, Mapping[int, str]], covered: set[str]) -> set[str]:
        """The parameters of the model's `module` that `found` gives, which must be all of its experts."""
        own = {name for name in self.shapes if name.startswith(f"{module}.")}
        down = self.shapes.get(f"{module}.down_proj", ())
        E = down[0] if len(down) == 3 else self._num_experts
        stacked = "gate_up_proj" in found
        names = set(self._projections(module, stacked))
        biases = f"{module}.down_proj_bias" in own and f"{module}.down_proj_bias" not in covered
        names |= {f"{name}.bias" for name in names} if biases else set()
        for part in sorted(names | found.keys()):
            numbers = found.get(part, {})
            if part not in names and not part.endswith(".bias"):
                raise ValueError(f"{module} has {part}, which {self.name} has not: the files belong to another model")
            if E is not None and numbers and max(numbers) >= E:
                raise ValueError(f"{module}.{max(numbers)}.{part} is an expert too many: by config.json there are {E}; "
                                 "the files belong to another model")  # fmt: skip
            missing = next((e for e in range(E or 1 + max(numbers, default=0)) if e not in numbers), None)
            if missing is not None:
                raise ValueError(f"{module}.{missing}.{part} is missing: {len(numbers)} of {E} experts have it; a "
                                 "shard or a tensor is missing, download the files or quantize again")  # fmt: skip
        kinds = {(kind, part) for part, numbers in found.items() for kind in numbers.values() if "bias" not in part}
        if len({kind for kind, _ in kinds}) > 1:
            said = ", ".join(f"{part} {kind}" for kind, part in sorted(kinds, key=lambda k: k[::-1]))
            raise ValueError(f"{module} is neither quantized nor dense: {said}. All projections of all experts of a "
                             "layer must be of one kind: quantize the original checkpoint again")  # fmt: skip
        weights = re.compile(r"(gate_up_proj|up_proj|down_proj)(_bias)?|mlp\.(w1|v1|w2)")
        return {name for name in own if weights.fullmatch(name.removeprefix(f"{module}."))}

    def _projections(self, module: str, stacked: bool) -> Iterator[str]:
        gated = any(f"{module}.{name}" in self.shapes for name in ("gate_up_proj", "mlp.v1"))
        if gated and stacked:
            yield "gate_up_proj"
        else:
            yield from ("gate_proj", "up_proj") if gated else ("up_proj",)
        yield "down_proj"
