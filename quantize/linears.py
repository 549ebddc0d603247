"""Which linears besides the experts become 4-bit, by group or by name.

    attention  q, k, v and o, also fused or of low rank (MLA), and the large ones of linear attention
    shared     shared experts
    mlp        dense MLPs, in layers without experts or beside them
    lm_head    the output embedding

Groups are of the language model: the linears of its layers, and its head. Routers, small gates, embeddings and what
transformers keeps in float32 are in no group. Linears that servers fuse share a global scale.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from moe_nvfp4.quantize.dialects import EMBEDDING, as_patterns
from moe_nvfp4.quantize.files import Checkpoint, sub_configs
from moe_nvfp4.quantize.model import TIED, ModelTensors, UnknownModel
from moe_nvfp4.quantize.names import MTP, TOWER, by_number, fused_names, is_meant, is_mtp, spans

GROUPS = ("attention", "shared", "mlp", "lm_head")
ALL = "all"
EXCLUDED = "excluded"

ROUTER = re.compile(r"(^|\.)((\w+_)?gate|(\w+_)?router|wg)(\.|$)")
EXPERTS = re.compile(r"(^|\.)\w*(?<!shared_)(?<!share_)experts?\.")
SHARED = re.compile(r"(^|\.)shared?_(experts?|mlp)\.")
ATTENTION = re.compile(
    r"[qkvor]_proj|w[qkvo]|w?qkv(_proj)?|query_key_value|out_proj|dense|gate_proj|(q|kv|o)_[ab]_proj|kv_a_proj_with_mqa|"
    r"kv_proj|q_gate_proj|v_proj_(current|delayed)|in_proj_(qkvz|qkv|z)", re.IGNORECASE
)  # fmt: skip
PROJECTION = re.compile(r"(q|k|v|o|qkv)_proj")  # of attention, whatever its module is called
MLP = re.compile(r"(gate|up|down|gate_up)_proj|w[123]|fc[12]|(in|out)put_linear")


@dataclass(frozen=True)
class Linear:
    """A linear that is not an expert's.

    name     in files, or in a model in memory
    model    its name in transformers; the same as `name` where that is not known
    columns  K
    why      it stays dense whatever is asked for; None: it can be 4-bit
    """

    name: str
    model: str
    columns: int
    why: str | None = None

    @property
    def group(self) -> str | None:
        """The group that it is in, or None."""
        if _apart(self.model):  # which its name in files may not say
            return None
        return group_of(self.model) or group_of(self.name)

    def named(self, pattern: str) -> bool:
        """Whether a user's pattern matches it or a module that it is in."""
        return is_meant(pattern, self.name) or is_meant(pattern, self.model)


def as_wanted(given: str | Iterable[str] | None) -> list[str]:
    """The value of an argument `linears`: groups and patterns, one or several, also with commas between them."""
    items = [item.strip() for part in as_patterns(given, "linears") for item in part.split(",")]
    return as_patterns(items, "linears")


def group_of(name: str) -> str | None:
    """The group of the linear `name`, by its name; None: it is in none."""
    path, _, last = name.removesuffix(".linear").rpartition(".")  # Inkling 2 has q_proj.linear
    if last == "lm_head":
        return last
    in_layer = any(part.isdecimal() for part in path.split("."))
    if not in_layer or _apart(name):
        return None
    if SHARED.search(name):
        return "shared" if MLP.fullmatch(last) else None
    if ("att" in path and ATTENTION.fullmatch(last)) or PROJECTION.fullmatch(last):
        return "attention"
    return "mlp" if MLP.fullmatch(last) else None


def _apart(name: str) -> bool:
    """Whether the linear `name` is in a tower, a router, a norm (A.X K2), an indexer or a compressor (DeepSeek V4)."""
    inside = re.search(r"layernorm\.|\.(indexer|compressor)\.", name)
    return bool(inside or TOWER.search(name.rpartition(".")[0]) or ROUTER.search(name))


def linears_in_files(
    source: Checkpoint, shapes: Mapping[str, tuple[int, ...]], model: ModelTensors | None
) -> list[Linear]:
    """The linears of files.

    shapes  stem -> shape of each tensor that may be the weight of one
    model   that the files belong to; None: transformers does not know it, and names decide
    """
    tied = any(c.get("tie_word_embeddings") for c in sub_configs(source.config))
    found = {}
    for stem, shape in shapes.items():
        if len(shape) != 2 or EXPERTS.search(f"{stem}."):
            continue
        weight, pattern = (f"{stem}.weight", None) if model is None else model.place(f"{stem}.weight")
        name = weight.removesuffix(".weight")
        why = MTP if is_mtp(stem, source.layers) else _why_by_name(name)
        if model is not None:
            why = why or model.why_dense(weight, stem, pattern)
        elif tied and group_of(stem) == "lm_head":
            why = TIED
        found[stem] = Linear(stem, name, shape[1], why or _why_by_size(shape[1]))
    heads = [w.removesuffix(".weight") for w in model.tied] if model is not None else ["lm_head"] if tied else []
    there = {linear.model for linear in found.values()}
    absent = [head for head in heads if group_of(head) == "lm_head" and head not in there]
    return [*found.values(), *(Linear(head, head, 0, TIED) for head in absent)]


def fused_in_files(source: Checkpoint, stems: Collection[str]) -> dict[str, tuple[str, ...]]:
    """stem -> those of `stems`, all matrices of the files, that servers fuse with it; itself included."""
    in_model = {stem: stem for stem in stems}
    if linears := [stem for stem in stems if not EXPERTS.search(stem)]:
        try:
            model = ModelTensors.of(source)
            in_model |= {stem: model.place(f"{stem}.weight")[0].removesuffix(".weight") for stem in linears}
        except UnknownModel:
            pass  # their names in files decide
    one = Counter(in_model.values())  # transformers joins some (MiniMax M3's gate and up): their names in files decide
    in_model = {stem: name if one[name] == 1 else stem for stem, name in in_model.items()}
    in_files = {name: stem for stem, name in in_model.items()}
    return {stem: tuple(in_files[n] for n in fused_names(name) if n in in_files) for stem, name in in_model.items()}


def linears_of_model(model: Any, in_files: Mapping[str, str], done: Collection[str] = ()) -> list[Linear]:
    """The linears of a transformers `model`, on any device.

    in_files  name of a module -> its name in files
    done      names of modules that are 4-bit already
    """
    tensors, found = ModelTensors(model), []
    for weight, shape in tensors.shapes.items():
        name = weight.removesuffix(".weight")
        if name == weight or len(shape) != 2 or EXPERTS.search(f"{name}."):
            continue
        stem, why = in_files.get(name, name), None
        if name not in done:
            why = _why_by_name(name) or tensors.why_dense(weight, stem) or _why_by_size(shape[1])
        found.append(Linear(stem, name, shape[1], why))
    for name, module in model.named_modules():
        columns = getattr(module, "in_features", None)
        if isinstance(columns, int) and "weight" not in module._parameters and not EXPERTS.search(f"{name}."):
            why = "its weight is no plain parameter (an adapter, a parametrization, pruning); make it one first"
            found.append(Linear(in_files.get(name, name), name, columns, why))
    return found


def _why_by_name(name: str) -> str | None:
    """Why the linear `name` stays dense, if its name says so."""
    if EMBEDDING.search(name):
        return "an embedding, or a linear that makes embeddings"
    if name.endswith(".indexer.weights_proj"):
        return "an indexer's weights, which transformers multiplies with x in the dtype that they have"
    return "a router or gate, which decides by small differences" if ROUTER.search(name) else None


def _why_by_size(columns: int) -> str | None:
    return f"K = {columns} is no multiple of 16, the NVFP4 block" if columns % 16 else None


@dataclass(frozen=True)
class Chosen:
    """What becomes of linears.

    fused      those that become 4-bit; each tuple shares a global scale, because servers fuse its linears into one
    left       name -> why it stays dense, although it was asked for; * stands for any number, where that goes for all
               linears of such a name, and {0-2,5} for layers, where it goes for these only
    unmatched  patterns of `exclude` that match none of those asked for
    """

    fused: tuple[tuple[Linear, ...], ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()


def choose(linears: Sequence[Linear], wanted: Sequence[str], exclude: Sequence[str], model: str) -> Chosen:
    """Choose among `linears`, all of `model` (a name for errors), those that `wanted` asks for: groups, "all", names
    or wildcards. exclude: names or wildcards of linears that stay dense nevertheless.

    A linear that cannot be 4-bit is left dense, and its reason is among `left`. ValueError where a name or group
    matches no linear, or none that can be 4-bit, and where only some of the linears are chosen that servers fuse.
    """
    asked: dict[Linear, None] = {}
    for item in wanted:
        matched = [linear for linear in linears if _is_meant(linear, item)]
        if not matched:
            raise ValueError(f"linears: {item!r} matches no linear of {model}{_hint(item, linears)}")
        if item != ALL and all(linear.why for linear in matched):
            first = matched[0]
            more = f" ({len(matched)} linears)" if len(matched) > 1 else ""
            raise ValueError(f"linears: {item!r}: {first.name}{more} stays dense: {first.why}. Leave it out")
        asked |= dict.fromkeys(matched)
    excluded = [linear for linear in asked if any(linear.named(p) for p in exclude)]
    left = _named_together(linears, {linear: EXCLUDED for linear in excluded}
                           | {linear: linear.why for linear in asked if linear.why})  # fmt: skip
    chosen = {linear.model: linear for linear in asked if not linear.why and linear not in excluded}
    if wanted and not chosen:
        raise ValueError(f"linears: of those that {', '.join(wanted)} names in {model}, none can be 4-bit: "
                         + "; ".join(f"{name}: {why}" for name, why in sorted(left.items())))  # fmt: skip
    unmatched = tuple(p for p in exclude if not any(linear.named(p) for linear in asked))
    by_model = {linear.model: linear for linear in linears}
    fused: dict[tuple[str, ...], tuple[Linear, ...]] = {}
    for name in chosen:
        names = tuple(n for n in fused_names(name) if n in by_model)
        if missing := [by_model[n] for n in names if n not in chosen]:
            why = missing[0].why or (EXCLUDED if missing[0] in excluded else "not asked for")
            raise ValueError(f"linears: servers fuse {name} and {missing[0].model}, of which the second stays dense "
                             f"({why}): ask for both or for neither")  # fmt: skip
        fused[names] = tuple(chosen[n] for n in names)
    return Chosen(tuple(fused.values()), left, unmatched)


def _is_meant(linear: Linear, item: str) -> bool:
    if item == ALL:
        return linear.group is not None
    if item == "mtp":  # no group: the error says why
        return linear.why == MTP
    return linear.group == item if item in GROUPS else linear.named(item)


def _folded(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _named_together(linears: Iterable[Linear], why: Mapping[Linear, str]) -> dict[str, str]:
    """`Chosen.left`, of the reasons `why` some of all `linears` stay dense."""
    alike: dict[str, set[str | None]] = defaultdict(set)
    for linear in linears:
        alike[_folded(linear.name)].add(why.get(linear))
    left: dict[str, str] = {}
    some: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for linear, reason in why.items():
        if len(alike[folded := _folded(linear.name)]) == 1:
            left[folded] = reason
        else:
            before, number, after = re.split(r"(?<=\.)(\d+)(?=\.|$)", linear.name, maxsplit=1)
            some[before, after, reason].append(int(number))
    for (before, after, reason), numbers in some.items():
        listed = spans(sorted(numbers))
        left[f"{before}{listed if len(numbers) == 1 else f'{{{listed}}}'}{after}"] = reason
    return left


def _hint(item: str, linears: Iterable[Linear]) -> str:
    """What to write instead of `item`, which matches nothing."""
    groups = [group for group in GROUPS if any(linear.group == group for linear in linears)]
    if item in GROUPS:
        return f", which has {', '.join(groups) or 'none in a group'}"
    names = sorted({_folded(linear.model) for linear in linears if linear.group}, key=by_number)
    ends = [f"*.{item}" for name in names if name.endswith(f".{item}")][:1]
    near = ends or get_close_matches(item, [*GROUPS, ALL, *names, *{f"*.{n.rpartition('.')[2]}" for n in names}], n=2)
    meant = f": did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"{meant or ':'} Groups are {', '.join((*groups, ALL))}; names are {', '.join(names[:4])}, ..."
