"""The tensors of a transformers model, to check that a checkpoint's files have all of them."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from moe_nvfp4.quantize.files import Checkpoint, expert_counts
from moe_nvfp4.quantize.layouts.base import Given, one_too_many
from moe_nvfp4.quantize.layouts.nvfp4 import UNREAD
from moe_nvfp4.quantize.names import DENSE, KV_SCALE, PER_EXPERT, PLAIN_NAMES, aliases, is_scale
from moe_nvfp4.quantize.source import model_dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

TIED = (
    "config.json says that it is the embedding (tie_word_embeddings), which stays as it is; for a 4-bit head, save the "
    "model with one of its own (tie_word_embeddings false)"
)
# the end of a class's name -> transformers' classes of this kind, by config
AUTO = {
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "ForConditionalGeneration": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
}
SAME = {"BailingMoeV3ForCausalLM": "BailingHybridForCausalLM"}  # Ling 3.0's name, and transformers'
EXPERT_WEIGHTS = re.compile(r"(gate_up_proj|up_proj|down_proj)(_bias)?|mlp\.(w1|v1|w2)")


class UnknownModel(Exception):
    """Why transformers cannot say which tensors a model has, in one line."""

    def __init__(self, why: str):
        super().__init__(" ".join(why.split()))


def model_config(folder: str | os.PathLike) -> Any:
    """The config in `folder` as transformers reads it; its own code is not run. UnknownModel where it cannot."""
    try:
        import transformers
    except ImportError as error:
        raise UnknownModel(f"transformers is not installed ({error})") from None
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a stranger's config may raise anything
        why = "the model's class is in its own repository, whose code is never run" if _is_own_code(error) else error
        raise UnknownModel(f"transformers {transformers.__version__} cannot read config.json ({why})") from None


def class_of(config: Any) -> Any:
    """The class of transformers that `config` describes; None where it has none.

    Files may name a class of their repository's own code (PhiMoEForCausalLM, KimiK25ForConditionalGeneration). Then it
    is the class that transformers has for the model_type, if that has the same name but for its spelling and its kind
    (UnlimitedOCRForCausalLM): models of other names share a model_type, as Ling 2.5 does Ling 3.0's.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    names = [str(name) for name in config.architectures] if isinstance(config.architectures, list) else []
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for name in names:
        for ending in sorted(AUTO, key=lambda ending: not name.endswith(ending)):
            found = getattr(modeling_auto, AUTO[ending]).get(type(config), None)
            known = () if found is None else (_alike(found.__name__), _alike(type(config).__name__))
            if _alike(SAME.get(name, name)) in known:
                return found
    return None


def _alike(name: str) -> str:
    return re.sub(rf"({'|'.join(AUTO)}|Config)$", "", name).replace("_", "").lower()


@contextmanager
def own_code(source: str | os.PathLike) -> Iterator[None]:
    """Say in other words what transformers says of a model whose class is in its own repository: to trust its code."""
    try:
        yield
    except ValueError as error:
        if not _is_own_code(error):
            raise
        raise ValueError(
            f"{source}: transformers does not have this model, and the code of its repository is never run. quantize "
            "and verify take its files; a vLLM that has the model serves them"
        ) from None


def _is_own_code(error: Exception) -> bool:
    return "trust_remote_code" in str(error)


def to_ask(conversion: Any) -> Any:
    """A copy of a conversion of transformers that takes names in any order, one by one. The original marks itself as
    used; and one of two renamings, norm0 -> norm1 -> norm2 (Kimi-K2.5), waits for the first, since names are sorted."""
    found = copy.copy(conversion)
    if hasattr(found, "_active"):
        found._active = True
    return found


# What files hold for the experts of one module: projection (or its bias) -> expert -> what
Parts = dict[str, dict[int, Given]]


def kept_in_fp32(model: Any, dtype: torch.dtype) -> re.Pattern | None:
    """What the names match of the tensors that a model of this `dtype` has in fp32; None: there are none."""
    from transformers.core_model_loading import build_glob_alternation

    wide = model._get_dtype_plan(dtype)
    return build_glob_alternation(list(wide))[0] if wide else None


class ModelTensors:
    """The tensors of a transformers model, on any device, and how names in files become names of these tensors.

    conversions  transformers' renamings and converters that load the model; default: those of its class
    as_saved     the model is what the files' config.json says, not of a class or a size that its user chose
    """

    def __init__(self, model: nn.Module, conversions: list | None = None, as_saved: bool = False):
        import torch
        from torch import nn
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        whole: Any = model  # nn.Module does not declare transformers' attributes
        self.name, self.config = type(model).__name__, whole.config
        self.state = {n: t for n, t in model.state_dict(keep_vars=True).items() if not n.endswith("_extra_state")}
        self.shapes = {name: tuple(t.shape) for name, t in self.state.items()}
        self._modules = {name[: at.start()] for name in self.state for at in re.finditer(r"\.", name)}
        self._counts = expert_counts(whole.config.to_dict())
        self._prefix: str = whole.base_model_prefix
        body = getattr(whole, self._prefix, whole)
        self._is_body = body is whole  # as AutoModel has it
        known = get_model_conversion_mapping(whole, add_legacy=True) if conversions is None else conversions
        conversions = [to_ask(c) for c in known]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._renamings = [c for c in conversions if not isinstance(c, WeightConverter)]
        self.tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._optional = _expressions(model, "_keys_to_ignore_on_load_missing")
        if self.name == "JevForDecision":  # its bias is 0, unless files have another: vLLM's decision heads have none
            self._optional = [*self._optional, re.compile(r"^proj\.bias$")]
        self._surplus = _expressions(model, "_keys_to_ignore_on_load_unexpected")
        self._linears = {n for n, m in model.named_modules(remove_duplicate=False) if type(m) is nn.Linear}
        # What transformers keeps in float32 in half-precision models. Files in float32 may be loaded as such
        self._wide = kept_in_fp32(whole, torch.bfloat16 if whole.dtype == torch.float32 else whole.dtype)
        output = whole.get_output_embeddings()
        speaks = set() if output is None else {id(p) for p in output.parameters()}
        reads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        self._embeddings = {name for name, t in self.state.items() if id(t) in speaks | reads}  # their rows are tokens
        heads = set() if as_saved else self._heads(body, speaks)
        as_files_say = self.name in (whole.config.architectures or [self.name]) or class_of(whole.config) is type(model)
        self._resized, self._new = heads, set() if as_files_say else heads

    @classmethod
    def of(cls, source: Checkpoint) -> ModelTensors:
        """The tensors of the model that a checkpoint's config describes, built without memory (on meta).

        Raises UnknownModel where transformers does not know the model, or cannot build it; its own code is not run.
        """
        config = model_config(source.folder)
        import torch
        import transformers

        here = f"transformers {transformers.__version__}"
        kind = class_of(config)
        if kind is None:
            raise UnknownModel(f"{here} does not know {', '.join(config.architectures or ()) or 'any architecture'}")
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        try:
            with torch.device("meta"):  # the config's dtype may be a string that is none (float8_e4m3fn)
                return cls(kind._from_config(config, dtype=model_dtype(source)), as_saved=True)
        except Exception as error:
            raise UnknownModel(f"{here} cannot build {kind.__name__} ({error})") from None

    # ---------------------------------------------------------------- names
    def place(self, name: str) -> tuple[str, str | None]:
        """The model's tensor for the tensor `name` of a file, and the pattern of the converter that rearranges it, if
        one does. Of a tensor that becomes several, the first."""
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.state)
        if target not in self.state and name in self.state:
            return name, None
        return self._in_body(target), pattern

    def _in_body(self, target: str) -> str:
        """Give the name of an expert's tensor the prefix that the model's body has. transformers does so only where the
        model has a tensor of that whole name, and stacked experts do not (Llama 4's language model, from files of the
        whole model)."""
        end = target.rfind(".experts.") + len(".experts")
        if end < len(".experts") or target[:end] in self._modules:
            return target
        return next(
            (name for name in self._bodies(target) if name[: end - len(target) + len(name)] in self._modules), target
        )

    def _bodies(self, name: str) -> tuple[str, str]:
        """The names of a module where the model is a body by itself, and where its body has a prefix."""
        return name.removeprefix(f"{self._prefix}."), f"{self._prefix}.{name}"

    def experts_module(self, module: str) -> str | None:
        """The model's name of the experts module that new files call `module`; None if it is no part of the model."""
        names = [f"{module}.0.{part}.weight" for part in ("down_proj", "w2")]
        found = [self._expert(name, self.place(name)[0]) for name in names]
        return next((expert[0] for expert in found if expert is not None), None)

    def renamed(self, name: str) -> str:
        """`name` after the model's renamings and converters, before the model's prefix is added or removed."""
        from transformers.core_model_loading import rename_source_key

        return str(rename_source_key(name, self._renamings, self._converters)[0])

    def why_dense(self, weight: str, stem: str, pattern: str | None = None) -> str | None:
        """Why the model's tensor `weight` cannot be the weight of a 4-bit linear, which files call `stem`; None: it
        can. pattern: as `place` returns it."""
        module = weight.removesuffix(".weight")
        if weight not in self.state:
            return f"it is no part of {self.name}"
        if module not in self._linears:
            return f"{self.name} has no nn.Linear there, but a module that may do more than one product"
        rearranged = tuple(f".{target}" for target in self._rearranged(weight))
        ends = f".{weight}", f".{module}"  # converters name the weight, or all tensors of the module
        if pattern is not None or any(end.endswith(rearranged) for end in ends):
            return f"{self.name} rearranges it while it loads, which is not known here"
        if not self.renames_module(stem):
            return f"{self.name} renames its weight alone, and would not find the scales beside it"
        for one, other in self.tied.items():
            if weight in (one, other):
                embedding = other.removesuffix(".weight") not in self._linears
                return TIED if embedding else f"it has the weights of {one if weight == other else other} (tied)"
        return "transformers keeps it in float32" if self._wide is not None and self._wide.search(weight) else None

    def renames_module(self, stem: str) -> bool:
        """Whether the model renames all tensors of the files' module `stem` alike, not only one called `weight`."""
        lasts = ("weight", "weight_scale", "input_scale")  # a renaming of "x.weight" may take "x.weight_scale", too
        return len({self.renamed(f"{stem}.{last}").rpartition(".")[0] for last in lasts}) == 1

    def _rearranged(self, weight: str) -> Iterator[str]:
        """The ends of the names of tensors that converters make, of those converters that are for the module which has
        `weight`: a part of a model may have its own."""
        for converter in self._converters:
            scope = getattr(converter, "scope_prefix", None)
            if scope and not weight.removeprefix(f"{converter.base_model_prefix}.").startswith(f"{scope}."):
                continue
            yield from (target.replace("\\", "").lstrip(".") for target in converter._original_target_patterns)

    def reached(self, names: Iterable[str], converted: Collection[str] = ()) -> set[str]:
        """The model's tensors that a file's tensors `names` fill; those of `converted` through a converter only."""
        places = map(self.place, names)
        right = ((target, pattern) for target, pattern in places if pattern is not None or target not in converted)
        return {place for found in right for place in self._all_places(*found)}

    def ignores(self, name: str) -> bool:
        """Whether the model ignores the tensor `name` of the files on purpose."""
        rotary = name.endswith("rotary_emb.inv_freq")
        return rotary or KV_SCALE.search(name) is not None or any(p.search(name) for p in self._surplus)

    def _all_places(self, target: str, pattern: str | None) -> list[str]:
        several = next((c.target_patterns for c in self._converters if pattern in c.source_patterns), [""])
        if pattern is None or len(several) == 1:
            return [target]
        first, *others = (t.replace("\\", "") for t in several)
        return [target, *(target.replace(first, other, 1) for other in others)]

    # ---------------------------------------------------------------- the check
    def check(self, given: Mapping[str, Given], quantizing: bool = False) -> list[str]:
        """ValueError unless files hold all that the model needs, and for scales that nothing reads. Returns the names
        that the model has no tensor for.

        These may be missing: tensors that are tied to one that is there; those that transformers ignores; and the head,
        if the model is of another class than the files (a classifier on a language model), as it is yet to be trained.

        given       name in a dense checkpoint -> what the files hold
        quantizing  transformers loads them with a quantizer. Since 5.24 it says where the user chose other sizes of a
                    head or a vocabulary, or makes it new (ignore_mismatched_sizes); before it took the files' sizes
        """
        import transformers

        says = Version(transformers.__version__) >= Version("5.24")
        resized = self._resized if says or not quantizing else set()
        tokens = self._embeddings if says and quantizing else set()
        covered: set[str] = set()
        experts: dict[str, Parts] = {}
        surplus = []
        names: dict[tuple, str] = {}  # what of the model -> the name of what files hold for it
        for name, what in given.items():
            target, pattern = self.place(name)
            places = self._all_places(target, pattern)
            expert = self._expert(name, target) if len(places) == 1 else None
            alone = target in self.shapes and "*" not in (pattern or "")  # else a list of modules becomes one tensor
            if (expert or alone) and (first := names.setdefault(expert or (target, pattern), name)) != name:
                raise ValueError(
                    f"{first} and {name} are one tensor of {self.name} under two names, and nothing says which is "
                    "right: two checkpoints are mixed; remove one of them, or download the checkpoint again"
                )
            if expert is not None or (target in self.state and self.state[target].is_floating_point()):
                self._check_kind(name, what)
            if expert is not None:
                module, e, part = expert
                experts.setdefault(module, {}).setdefault(part, {})[e] = what
            elif target in self.shapes:
                covered.update(places)
                if pattern is None and target not in resized:
                    self._check_shape(name, target, what, rows=int(target in tokens and what.kind in DENSE))
            elif not self.ignores(name):
                if what.kind != "NVFP4" and is_scale(name, {}):
                    raise ValueError(UNREAD.format(name))
                surplus.append(name)
        for module, found in experts.items():
            stacks = {n for n in covered if EXPERT_WEIGHTS.fullmatch(n.removeprefix(f"{module}."))}
            kinds = {part.endswith(".bias") for part in found}
            if twice := [name for name in stacks if name.endswith("_bias") in kinds]:
                raise ValueError(
                    f"the files have experts of {module} twice, one by one and in {min(twice)}, and nothing says "
                    "which are right: remove one of them, or quantize the original checkpoint"
                )
            covered |= self._check_experts(module, found, covered)
        if missing := list(self.missing(covered)):
            listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            count = f"{len(missing)} of the {len(self.shapes)} tensors of {self.name}"
            why = (
                "A shard is missing, or config.json belongs to another model: download the checkpoint again, or "
                "quantize the original"
            )
            if not self._is_body and not any(name.startswith(f"{self._prefix}.") for name in missing):
                why = (
                    "They are of the model's body, as AutoModel saves it: name the body's class under architectures in "
                    "config.json, or save the whole model"
                )
            raise ValueError(f"the files lack {count}, which would be random numbers: {listed}. {why}")
        return surplus

    def missing(self, covered: set[str]) -> Iterator[str]:
        """The tensors of the model that must be in files, without those of `covered` and what is tied to them."""
        here = {id(self.state[name]) for name in self.state.keys() & covered}  # modules may share parameters
        for name, tensor in self.state.items():
            tied = any(name in pair and not covered.isdisjoint(pair) for pair in self.tied.items())
            optional = name in self._new or any(p.search(name) for p in self._optional)
            if id(tensor) not in here and not tied and not optional:
                yield name

    def _heads(self, body: Any, speaks: set[int]) -> set[str]:
        """The tensors beside the model's `body`, except the output embedding, whose ids are `speaks`."""
        inside = {id(t) for t in (*body.parameters(), *body.buffers())} | speaks
        return {name for name, tensor in self.state.items() if id(tensor) not in inside}

    def _check_kind(self, name: str, what: Given) -> None:
        """ValueError for a weight that is stored as integers, or in 8 bits without a scale: loading would cast it."""
        if what.kind not in (*DENSE, "NVFP4", "FP8"):
            raise ValueError(
                f"{name} in {what.file} is {what.kind}, and {self.name} has floating-point numbers there: it is "
                "quantized, and its scale or config.json's quantization_config is missing; download the original"
            )

    def _check_shape(self, name: str, target: str, what: Given, rows: int = 0) -> None:
        """ValueError unless the sizes are the model's, from dimension `rows` on."""
        if what.shape is not None and self.shapes[target][rows:] != what.shape[rows:]:
            raise ValueError(
                f"{name} in {what.file} is {what.kind} {list(what.shape)}, by config.json {self.name} has "
                f"{list(self.shapes[target])} there: the file belongs to another model, or is damaged; download it "
                "and config.json again"
            )

    def _expert(self, name: str, target: str) -> tuple[str, int, str] | None:
        """(experts module of the model, expert, projection or its bias) to which `name` belongs, or None."""
        stem, _, last = name.rpartition(".")
        match = PER_EXPERT.fullmatch(stem)
        if match is None or last not in ("weight", "bias"):
            return None
        inside = PER_EXPERT.fullmatch(target.rpartition(".")[0])  # where the model's own files are stacked
        module = inside["module"] if inside else target.rpartition(".")[0]
        part = PLAIN_NAMES.get(match["part"], match["part"]) + (".bias" if last == "bias" else "")
        places = (module, *self._bodies(module))
        own = next((m for place in places for m in aliases(place) if m in self._modules), None)
        return None if own is None else (own, int(match["e"]), part)

    def _check_experts(self, module: str, found: Parts, covered: set[str]) -> set[str]:
        """The parameters of the model's `module` that `found` fills. ValueError unless all its experts are whole."""
        own = {name for name in self.shapes if name.startswith(f"{module}.")}
        down = self.shapes.get(f"{module}.down_proj", ())
        E = down[0] if len(down) == 3 else next(iter(self._counts)) if len(self._counts) == 1 else None
        gated = any(f"{module}.{name}" in self.shapes for name in ("gate_up_proj", "mlp.v1"))
        names = {"gate_proj", "up_proj", "down_proj"} if gated else {"up_proj", "down_proj"}
        biases = f"{module}.down_proj_bias" in own and f"{module}.down_proj_bias" not in covered
        names |= {f"{name}.bias" for name in names} if biases else set()
        for part in sorted(names | found.keys()):
            numbers = found.get(part, {})
            if part not in names and not part.endswith(".bias"):
                raise ValueError(f"{module} has {part}, but {self.name} does not: the files belong to another model")
            if E is not None and numbers and max(numbers) >= E:
                raise one_too_many(f"{module}.{max(numbers)}.{part}", E)
            missing = next((e for e in range(E or 1 + max(numbers, default=0)) if e not in numbers), None)
            if missing is not None:
                raise ValueError(f"{module}.{missing}.{part} is missing: {len(numbers)} of {E} experts have it; a "
                                 "shard or a tensor is missing, download the files or quantize again")  # fmt: skip
        weights = {part: experts for part, experts in found.items() if not part.endswith(".bias")}
        of = lambda kind: "dense" if kind in DENSE else kind
        kinds = {(of(what.kind), part) for part, experts in weights.items() for what in experts.values()}
        if len({kind for kind, _ in kinds}) > 1:
            said = ", ".join(f"{part} {kind}" for kind, part in sorted(kinds, key=lambda k: k[::-1]))
            raise ValueError(f"{module} is neither quantized nor dense: {said}. All projections of all experts of a "
                             "layer must be of one kind: quantize the original checkpoint again")  # fmt: skip
        self._check_sizes(module, weights, E)
        return {name for name in own if EXPERT_WEIGHTS.fullmatch(name.removeprefix(f"{module}."))}

    def _check_sizes(self, module: str, weights: Parts, E: int | None) -> None:
        """ValueError where a matrix [out, in] of an expert is not of the model's size; `in` may be padded to blocks."""
        sizes = self._sizes(module, E)
        for part, experts in weights.items():
            for e, what in experts.items():
                shape = what.shape or ()
                fitting = [s for s in sizes if _matrix(part, *s, padded=what.kind == "NVFP4") == shape]
                if sizes and shape and not fitting:
                    wanted = " or ".join(str([*_matrix(part, *s, padded=what.kind == "NVFP4")]) for s in sizes)
                    raise ValueError(
                        f"{module}.{e}.{part} in {what.file} is {what.kind} {list(shape)}, by config.json {self.name} "
                        f"has {wanted} there: the file belongs to another model, or its codes are not [out, in / 2]"
                    )
                sizes = fitting or sizes

    def _sizes(self, module: str, E: int | None) -> list[tuple[int, int]]:
        """The possible (I, H) of the experts: two, if a stack may be [E, in, out] or [E, out, in]."""
        dbrx, down = self.shapes.get(f"{module}.mlp.w1"), self.shapes.get(f"{module}.down_proj", ())
        if dbrx is not None and E:
            return [(dbrx[0] // E, dbrx[1])]
        if len(down) != 3:
            return []
        up = self.shapes.get(f"{module}.gate_up_proj")
        factor = 1 if up is None else 2
        up = up or self.shapes.get(f"{module}.up_proj", ())
        both = dict.fromkeys([(down[2], down[1]), (down[1], down[2])])
        return [(I, H) for I, H in both if sorted(up[1:]) == sorted((factor * I, H))]


def _matrix(part: str, I: int, H: int, padded: bool) -> tuple[int, int]:
    """The shape [out, in] of an expert's projection. padded: `in` is padded to whole blocks of 16."""
    N, K = (H, I) if part == "down_proj" else (I, H)
    return N, -(-K // 16) * 16 if padded else K


def _expressions(model: nn.Module, attribute: str) -> list[re.Pattern]:
    return [re.compile(p) for p in getattr(model, attribute, None) or ()]
