"""The weight converters of a model with 4-bit experts: for loading 4-bit files, quantizing dense files, and saving.

`PackedConverter` (packed.py) converts the tensors of 4-bit experts. For dense files a `QuantizingConverter` replaces
each converter of the family that makes a parameter of experts, and quantizes one expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
)
from transformers.utils import logging

from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.experts import HFExperts, experts_modules
from moe_nvfp4.integrations.huggingface.linears import copy_of
from moe_nvfp4.integrations.huggingface.packed import (
    PackedConverter,
    check_sharding,
    dims_that_split_matrices,
    splits_matrices,
)
from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize.dialects import MODELOPT, Dialect
from moe_nvfp4.quantize.importance import Importance
from moe_nvfp4.quantize.layouts import ExpertLayout, dbrx
from moe_nvfp4.quantize.linears import EXCLUDED, Chosen, choose, linears_of_model
from moe_nvfp4.quantize.model import to_ask
from moe_nvfp4.quantize.names import PER_EXPERT, names_experts
from moe_nvfp4.quantize.recipes import quantize_expert

logger = logging.get_logger(__name__)

_MLP = [(rf"\.mlp\.{part}_proj\.", rf"\.block_sparse_moe\.{part}_proj\.") for part in ("gate", "up", "down")]
_HY_V4 = [
    *((rf"\.hc_{layer}_layer\.hc_pre\.", rf"\.hc_pre\.hc_{layer}_layer\.") for layer in ("attn", "mlp")),
    *((rf"\.{module}\.gate_proj\.", rf"\.{module}\.linear_gate\.") for module in ("mlp", "shared_experts")),
]
# model_type -> names as published, and as transformers saves them: 5.24, and of MiniMax-M3 5.17
PUBLISHED: dict[str | None, list[tuple[str, str]]] = {
    "hy_v4": [*_HY_V4, (r"\.hc_head\.hc_head_", r"\.hc_pre\.hc_head\.hc_head_")],
    "hy_v4_vl": [*_HY_V4, (r"\.hc_head\.hc_head_", r"\.hc_head\.hc_pre\.hc_head_")],
    "kimi_k25": [
        (r"language_model\.model\.layers\.", r"language_model\.model\.blocks\."),
        (r"^mm_projector\.", r"^model\.mm_projector\."),
        (r"^vision_tower\.patch_embed\.", r"^vision_tower\.encoder\.patch_embed\."),
    ],
    "kimi_linear": _MLP,
    "minimax_m3_vl": [*_MLP, *((rf"\.mlp\.{fc}\.", rf"\.block_sparse_moe\.{fc}\.") for fc in ("fc1", "fc2"))],
    "deepseek_v4": [
        (r"\.attn\.kv_norm\.", r"\.attn\.norm\."),
        *((rf"^hc_head_{part}", rf"^model\.hc_head\.hc_{part}") for part in ("fn", "base", "scale")),
        (r"^layers\.", r"^model\.layers\."),
        (r"^embed\.weight", r"^model\.embed_tokens\.weight"),
        (r"^norm\.weight", r"^model\.norm\.weight"),
    ],
}


# ---------------------------------------------------------------- quantizing on the way in
class QuantizingConverter(WeightConverter):
    """A converter of dense experts that quantizes those that become 4-bit.

    It works expert by expert, before merging if the file has one tensor per expert, so that a layer's bf16 weights are
    never in memory together. Its errors leave `from_pretrained` unchanged (transformers collects those of operations).

    PEFT makes converters of its class for the adapters of experts; these have no `owner`, and quantize nothing.
    """

    owner: Conversions | None = None

    @classmethod
    def of(
        cls, owner: Conversions, sources: Sequence[str], targets: Sequence[str], operations: list[ConversionOps],
        force_cpu: bool = False,
    ) -> QuantizingConverter:  # fmt: skip
        new = cls(list(sources), list(targets), operations, force_cpu)
        new.owner = owner
        return new

    @classmethod
    def like(cls, owner: Conversions, c: WeightConverter) -> QuantizingConverter:
        """A converter with the names and the operations of `c`."""
        sources, targets = c._original_source_patterns, c._original_target_patterns
        turned = [isinstance(op, Transpose) and op.check_dims for op in c.operations]
        operations = [_Turned(owner, op) if turn else op for turn, op in zip(turned, c.operations, strict=True)]
        new = cls.of(owner, sources, targets, operations, c.force_cpu)
        new.scope_prefix, new.base_model_prefix = c.scope_prefix, c.base_model_prefix
        return new

    def __deepcopy__(self, memo: dict) -> QuantizingConverter:
        return copy_of(self)

    def _scoped_match(self, source_key: str) -> Any:
        match = super()._scoped_match(source_key)
        # `down_proj` must not match `down_proj_bias`: older transformers have no name boundary
        return match if not self.owner or match and match[2].end() == len(match[1]) else None

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Tensor]:
        if self.owner is None:
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        module_name, _, name = layer_name.rpartition(".")
        experts = self.owner.experts.get(module_name)
        self.quantization_operation = None
        if len(self.target_patterns) > 1:
            raise NotImplementedError(
                f"{layer_name}: the files have experts of several modules in one list, which are not quantized as they "
                "are read: load the dense model, then swap_experts(model)"
            )
        if experts is None:
            return super().convert(layer_name, model, config, hf_quantizer)  # no loading_info: errors are raised
        check_sharding(module_name, experts, model)
        if _is_merge(self.operations):
            sources: Any = [self.collected_tensors.pop(p, []) for p in self.source_patterns]
            if experts.layout.call == "identity":  # files of transformers' own have rows for identity experts, too
                sources = [source[: experts.layout.num_experts] for source in sources]
            dense: _LazyExperts | _StackedExperts = _LazyExperts(sources)
        else:
            loaded = super().convert(layer_name, model, config, hf_quantizer, loading_info)
            (tensor,) = loaded.values()
            dense = _StackedExperts(tensor[0] if isinstance(tensor, list) else tensor, experts, name)
        if name.endswith("_bias"):
            found_here = (dense[e] for e in range(len(dense)))
            return {layer_name: torch.stack([bias for bias in found_here if bias is not None])}
        tensors = self.owner.quantize(dense, experts, name, layer_name)
        return {f"{module_name}.{key}": tensor for key, tensor in tensors.items()}


class _LazyExperts:
    """A sequence of the experts' matrices, [gate; up] or one projection, each read from the file when asked for."""

    def __init__(self, sources: list[list[Callable]]):
        self.sources = sources

    def __len__(self) -> int:
        return len(self.sources[0])

    def __getitem__(self, e: int) -> Tensor | None:
        """The matrix of expert e; None if it belongs to another rank."""
        parts = [source[e]() for source in self.sources]
        return None if parts[0] is None else torch.cat(parts) if len(parts) > 1 else parts[0]


class _StackedExperts:
    def __init__(self, tensor: Tensor, experts: HFExperts, name: str):
        self.tensor, self.layout, self.name = tensor, experts.layout, name

    def __len__(self) -> int:
        return min(self.tensor.shape[0], self.layout.num_experts)

    def __getitem__(self, e: int) -> Tensor:
        return self.layout.canonical(self.name, self.tensor[e])


class _Stacked(ConversionOps):
    """For a tensor that holds all experts: unchanged, but DBRX's [E * I, H] become [E, 2I, H] (w1, v1) or [E, H, I]."""

    def __init__(self, dbrx_experts: int | None = None):
        self.dbrx_experts = dbrx_experts

    def convert(
        self, input_dict: dict[str, list[Tensor]], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Any:
        parts = [input_dict[pattern][0] for pattern in source_patterns]
        return {
            target_patterns[0]: parts[0] if self.dbrx_experts is None else dbrx.parameters(parts, self.dbrx_experts)
        }


class _Turned(ConversionOps):
    """Replaces Transpose(check_dims=True), for Qwen3-VL-MoE's files of either orientation. That transposes a tensor
    unless it has the parameter's shape; parameters are 4-bit here, so this compares with the dense one's."""

    def __init__(self, owner: Conversions, dense: Any):
        self.owner, self.dense = owner, dense

    def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
        module, _, name = kwargs["full_layer_name"].rpartition(".")
        if (experts := self.owner.experts.get(module)) is None:
            return self.dense.convert(input_dict, *args, **kwargs)
        ((key, found),) = input_dict.items()
        tensor = found[0] if isinstance(found, list) else found
        if tensor.shape != getattr(experts._source[0], name).shape:
            tensor = tensor.transpose(self.dense.dim0, self.dense.dim1).contiguous()
        return {key: tensor}


def _suffix(module_name: str) -> str:
    """The end that the names of all layers' experts share: "mlp.experts", or "experts" right after a layer's number."""
    parts = module_name.split(".")[-2:]
    return ".".join(p for p in parts if not p.isdigit())


def _is_merge(operations: list[ConversionOps]) -> bool:
    """Whether this is [MergeModulelist(0)] or [MergeModulelist(0), Concatenate(1)]: files have a tensor per expert."""
    chain = ((MergeModulelist, 0), (Concatenate, 1))
    return 0 < len(operations) <= 2 and all(
        isinstance(op, kind) and op.dim == dim for op, (kind, dim) in zip(operations, chain, strict=False)
    )


class _Renaming(WeightRenaming):
    """A renaming of the family for saving that leaves the projections of experts alone. Files of HY-V4 call attention's
    gate_proj linear_gate, and transformers' own renaming would change every gate_proj."""

    __slots__ = ()

    @classmethod
    def like(cls, c: WeightRenaming) -> _Renaming:
        new = cls([*c._original_source_patterns], [*c._original_target_patterns])
        new.scope_prefix, new.base_model_prefix = c.scope_prefix, c.base_model_prefix
        return new

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        expert = PER_EXPERT.match(source_key)
        end = len(source_key) if expert is None else expert.start("part")
        renamed, pattern = super().rename_source_key(source_key[:end])
        return renamed + source_key[end:], pattern


# ---------------------------------------------------------------- all converters of a model
class Conversions:
    """The converters for the 4-bit experts of one model.

    experts        module name -> HFExperts, of the modules that are 4-bit
    recipe         for quantizing dense files
    pre_quantized  whether the checkpoint is NVFP4 already
    dialect        of the files, loaded and saved
    importance     for the recipe "weighted"
    layout         how 4-bit files that are loaded keep experts
    prefix         of the names in the model's body
    singles        modules that become dense from experts one by one (PackedConverter)
    """

    def __init__(
        self,
        experts: dict[str, HFExperts],
        recipe: str,
        pre_quantized: bool,
        dialect: Dialect = MODELOPT,
        importance: Importance | None = None,
        layout: ExpertLayout = ExpertLayout.ONE_BY_ONE,
        prefix: str = "",
        singles: Mapping[str, ModuleLayout] | None = None,
    ):
        self.experts, self.singles = experts, singles or {}
        self.recipe, self.pre_quantized, self.importance = recipe, pre_quantized, importance
        self.dialect, self.layout, self.prefix = dialect, layout, prefix

    def build(self, base: list) -> list:
        """The conversions for loading: ours, then `base`, the model's own."""
        self._base = base
        merges = [c for c in base if self._params_of(c) and _is_merge(c.operations)]
        merges = [c for c in merges if all(s.endswith(".weight") for s in c.source_patterns)]
        self._packed = PackedConverter(self.experts, self.singles, self.prefix, merges, self.dialect, self.layout)
        if self.pre_quantized:
            return [self._packed, *base]
        quantizing = [QuantizingConverter.like(self, c) for c in base if self._params_of(c)]
        # Files of any family may have the stacks of its modules: save_original_format=False, torch.save
        known = {source for c in quantizing for source in c.source_patterns}
        for module_name, experts in self.experts.items():
            for name in (experts.up_name, "down_proj"):
                target = f"{_suffix(module_name)}.{name}"
                if target not in known:
                    known.add(target)
                    quantizing += self._stacked(target, experts)
        return quantizing + [c for c in base if not self._params_of(c)]

    def _stacked(self, target: str, experts: HFExperts) -> list[QuantizingConverter]:
        """Converters for files with all experts in one tensor `target`, for which transformers has none."""
        module, _, name = target.rpartition(".")
        sources, operation = [target], _Stacked()
        if experts.source_class.__name__ == "DbrxExperts":
            sources = [f"{module}.mlp.{part}" for part in (("w1", "v1") if name == "gate_up_proj" else ("w2",))]
            operation = _Stacked(experts.layout.num_experts)
        found = [QuantizingConverter.of(self, sources, [target], [operation])]
        if experts.layout.bias is not None and experts.layout.interleaved and name == "gate_up_proj":
            found.append(QuantizingConverter.of(self, [f"{target}_bias"], [f"{target}_bias"], [_Stacked()]))
        return found

    def for_saving(self, used: list) -> list:
        """The conversions for saving, which transformers reverses; none for ERNIE 4.5 VL, whose files have the experts
        of several modules in one list, from which 4-bit ones cannot be loaded: it is saved under the model's own names,
        which load. used: those that were used for loading."""
        ours = (QuantizingConverter, PackedConverter)
        own = [c for c in self._base if self._params_of(c)]  # for experts that are dense
        self._kept = [c for c in used if not isinstance(c, (*ours, Published)) and c not in own]
        if any(len(c.target_patterns) > 1 for c in own):
            return []
        kept = [_Renaming.like(c) if type(c) is WeightRenaming else c for c in self._kept]
        return [*kept, *own, self._packed]  # transformers reverses the order when saving, so ours is asked first

    def for_dense(self) -> list:
        """The conversions for saving after the experts became dense: the model's own that were used for loading, or
        that concern experts."""
        return [c for c in self._base if c in self._kept or self._params_of(c) or self._names_experts(c)]

    def _names_experts(self, c: Any) -> bool:
        """Whether `c` renames the experts' stacks, because files have other names for them (Aria)."""
        back = None if isinstance(c, WeightConverter) else c.reverse_transform().rename_source_key
        return back is not None and any(not back(f"{m}.{p}")[0].endswith(f".{p}") for m, p in self._stacks())

    def _params_of(self, c: Any) -> set[str]:
        """The full names of 4-bit parameters that converter `c` makes."""
        if not isinstance(c, WeightConverter):
            return set()
        scope = f"{c.scope_prefix}." if c.scope_prefix else ""
        targets = [target.replace("\\", "").lstrip(".") for target in c.target_patterns]
        ends = tuple(f".{target}" for target in targets)
        names = (f"{m}.{p}" for m, p in self._stacks())
        return {n for n in names if f".{n}".endswith(ends) and scope in n}

    def _stacks(self) -> Iterator[tuple[str, str]]:
        """(module, parameter) of every stack of codes."""
        return ((m, p) for m, e in self.experts.items() for p in (e.up_name, "down_proj"))

    # ------------------------------------------------------------ quantizing
    def quantize(self, dense: Any, experts: HFExperts, name: str, layer_name: str) -> dict[str, Tensor]:
        """Quantize `dense`, a sequence of [N, K] matrices, to the tensors of parameter `name`.

        Under tensor parallelism every rank has a slice of each matrix. The global scale comes from
        the whole matrix, so that ranks and a single process agree bit for bit.
        """
        param = getattr(experts, name)
        here = param.to_local().shape[0] if isinstance(param, DTensor) else experts.layout.num_experts
        expected = here if isinstance(dense, _StackedExperts) else experts.layout.num_experts
        if len(dense) != expected:
            raise ValueError(
                f"{layer_name}: the checkpoint has {len(dense)} of {expected} experts; "
                "a shard or a tensor is missing: download the checkpoint again"
            )
        if self.importance is not None and isinstance(param, DTensor):
            raise NotImplementedError(
                f"{layer_name}: recipe {self.recipe!r} does not quantize a model that is split over ranks: write 4-bit "
                "files first (moe-nvfp4 quantize), which load in any split"
            )
        if self.importance is not None:
            self.importance.layer(layer_name.rpartition(".")[0], expected)
        amax = _global_amax(dense, param) if splits_matrices(param) else None
        out: dict[str, Tensor] = {}
        row = 0
        for e in range(expected):
            matrix = dense[e]
            if matrix is None:  # another rank's expert
                continue
            columns = None
            if self.importance is not None:
                columns = self.importance.of(layer_name.rpartition(".")[0], e, name, matrix.shape[-1])
            try:
                tensors = quantize_expert(matrix, name, self.recipe, None if amax is None else amax[e], columns)
            except ValueError as error:
                raise ValueError(f"{layer_name}, expert {e}: {error}") from None
            for key, tensor in tensors.items():
                if key not in out:
                    out[key] = tensor.new_empty((here, *tensor.shape))
                out[key][row] = tensor
            row += 1
        return out


def _global_amax(dense: Any, param: DTensor) -> dict[int, Tensor]:
    """fp32, of each expert that is here: the largest magnitude of its matrix over all ranks that share it. FSDP beside
    tensor parallelism gives ranks other experts, which have nothing to do with these."""
    here = ((e, dense[e]) for e in range(len(dense)))
    amax = {e: matrix.abs().amax().float() for e, matrix in here if matrix is not None}
    if not amax:
        return {}
    largest = torch.stack([*amax.values()])
    for dim in dims_that_split_matrices(param):
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=param.device_mesh.get_group(dim))
    return dict(zip(amax, largest, strict=True))


def model_conversions(model: Any, loading: bool = False) -> list:
    """transformers' renamings and converters for a model: for loading, or for saving one not loaded from files."""
    conversions = get_model_conversion_mapping(model, add_legacy=loading)
    if loading:
        return conversions
    return [*published_names(model), *(c for c in conversions if not isinstance(c, PrefixChange))]


class Published(WeightRenaming):
    """From a published name to that under which transformers saves the same tensor."""

    __slots__ = ()


def published_names(model: Any) -> list[Published]:
    """What transformers' own renamings, which were written for loading, do not undo when they are reversed: they
    rename more than they do then. It reads either name, and servers only the published one."""
    kind = getattr(model.config, "model_type", None)
    pairs = [*PUBLISHED.get(kind, ())]
    if kind == "bailing_hybrid":  # Ling 3.0's full attention has a dense, and its linear attention an o_proj
        of_linear = [n for n, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
        pairs += [(rf"\.{n}\.attention\.o_proj\.", rf"\.{n}\.attention\.dense\.") for n in of_linear]
    return [Published(*pair) for pair in pairs]


def names_in_files(model: nn.Module, modules: Iterable[str]) -> dict[str, str]:
    """The names in files of `modules`, by their names in `model`."""
    conversions = model_conversions(model) if hasattr(model, "config") else []
    back = [to_ask(c.reverse_transform()) for c in conversions[::-1] if not isinstance(c, WeightConverter)]

    return {module: _renamed(f"{module}.weight", back).removesuffix(".weight") for module in modules}


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def names_for_saving(model: Any, names: Iterable[str]) -> dict[str, str | None]:
    """Names of tensors in files -> the names in a state dict from which save_pretrained of `model`, which renames all,
    makes these; None: from no name."""
    conversions = getattr(model, "_weight_conversions", None) or []
    forth = [to_ask(c) for c in conversions if isinstance(c, WeightRenaming)]
    back = [to_ask(c.reverse_transform()) for c in conversions[::-1]]
    merges, renamings = ([c for c in back if isinstance(c, kind)] for kind in (WeightConverter, WeightRenaming))

    def saved_as(key: str) -> str | None:
        return None if any(c.rename_source_key(key)[1] is not None for c in merges) else _renamed(key, renamings)

    return {name: next((k for k in (name, _renamed(name, forth)) if saved_as(k) == name), None) for name in names}


def choose_linears(model: Any, config: MoeNvfp4Config) -> Chosen:
    """The linears of a dense `model` that `config` asks for; none where it does not. NVFP4 linears count as chosen.
    ValueError for a part of a model, whose linears have no names, and for a pattern of `config.exclude` that matches
    neither experts nor linears that are asked for."""
    if isinstance(config.linears, str):
        return Chosen()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"linears={config.linears} are chosen by their names in a transformers model, and a {type(model).__name__} "
            "is a part of one: pass the whole model, or leave linears out"
        )
    done = {name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, NVFP4Linear)}
    names = names_in_files(model, (name for name, _ in model.named_modules(remove_duplicate=False)))
    chosen = choose(linears_of_model(model, names, done), config.linears, config.exclude, type(model).__name__)
    if chosen.unmatched:
        _check_name_experts(chosen.unmatched, model)
    for name, why in chosen.left.items():
        if why != EXCLUDED:
            logger.warning(f"linears: {name} stays dense: {why}")
    return chosen


def _check_name_experts(patterns: Iterable[str], model: nn.Module) -> None:
    """ValueError for a pattern that matches no experts module of `model`, dense or 4-bit."""
    experts = [name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, HFExperts)]
    experts += [name for name, *_ in experts_modules(model)]
    if useless := [p for p in patterns if not any(names_experts(p, name) for name in experts)]:
        raise ValueError(
            f"exclude: {useless[0]!r} matches no experts module, and none of the linears that are asked for; "
            f"{type(model).__name__} has {', '.join(experts[:3])}" + (", ..." if len(experts) > 3 else "")
        )


def with_names_in_files(model: nn.Module, modules: Iterable[str]) -> set[str]:
    """`modules`, names of modules in `model`, and their names in files, which servers use; also of linears that files
    have as one (Kimi-K2.5's wqkv), or that are one in `model` only (MiniMax-M3's gate_up_proj)."""
    names = names_in_files(model, modules)
    conversions = model_conversions(model) if hasattr(model, "config") else []
    found = {f"{module}.weight" for module in names}
    for back in (to_ask(c.reverse_transform()) for c in conversions[::-1]):
        found = {new for name in found for new in _converted(name, back)}
    return {*names, *names.values(), *(name.removesuffix(".weight") for name in found)}


def _converted(name: str, conversion: Any) -> list[str]:
    """All names that `conversion` makes of the tensor `name`; itself if it makes none."""
    first, *others = conversion.target_patterns
    new, matched = conversion.rename_source_key(name)
    if matched is None or not isinstance(conversion, WeightConverter):
        return [new]
    return [new, *(new.replace(first, other, 1) for other in others)]
