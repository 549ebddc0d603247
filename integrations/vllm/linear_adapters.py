"""vLLM's LoRA on the linears of a model with 4-bit experts: all of an adapter is used, or it is refused.

vLLM by itself leaves out what it finds no module for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer

# transformers' names of blocks, routers and shared experts -> vLLM's, in models that do not say so to adapters
NAMES = (
    (".mlp.gate", ".block_sparse_moe.gate"),  # Mixtral
    (".self_attn.", ".attn."),  # gpt-oss in InternVL
    (".mlp.router.gate", ".mlp.gate"),  # AFMoE
    (".mlp.shared_experts.", ".mlp.shared_expert."),  # Laguna
    (".mlp.shared_experts.", ".mlp.shared_mlp."),  # HY-V3
)


def check_adapters() -> None:
    """Have vLLM's adapters checked in this process: by itself it leaves out their tensors for any module that
    --lora-target-modules does not name, for those that a model calls by another name, and for those whose weights it
    has inside of other products, and answers with the rest."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager  # takes a second to import

    before, load = LRUCacheWorkerLoRAManager._manager_cls, LRUCacheWorkerLoRAManager._load_adapter
    if hasattr(before, "refuses"):
        return

    class Manager(before):  # type: ignore[valid-type, misc]
        refuses = True

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.is_ours = any(hasattr(module, "nvfp4") for module in self.model.modules())
            if self.is_ours:
                use_adapters(self.model, self.modules.values())
                split_rows(self.modules, self.model)
            self.absorbed = absorbed(self.model)

        def _create_merged_loras_inplace(self, lora_model) -> None:
            if hasattr(lora_model, "is_checked"):
                return
            parts = {part for fused in self.packed_modules.values() for part in fused}
            if self.is_pooling_model:  # it may be a base model's adapter, whose names have no `model.`
                known = parts.union(self.modules)
                own = {f"model.{name}": name for name in lora_model.loras if f"model.{name}" in known}
                own |= {f"model.{name}": name for name in lora_model.loras if name.startswith("layers.")}
                lora_model.loras |= {name: lora_model.loras.pop(theirs) for name, theirs in own.items()}
            if self.is_ours:
                rename(lora_model.loras, self.model, self.modules, parts)
                as_loaded(lora_model.loras, self.model)
            super()._create_merged_loras_inplace(lora_model)
            names = [name for name, module in self.modules.items() if id(module.base_layer) not in self.absorbed]
            used = {id(self._get_lora_layer_weights(lora_model, name)) for name in names}
            left = [n for n, w in lora_model.loras.items() if id(w) not in used and _is_here(self.model, n)]
            if left and self.is_ours:
                targets = self.lora_config.target_modules
                why = "vLLM's model has no such modules, or none that can have adapters: is it of another model?"
                if any(name in self.modules for name in left):
                    why = ("vLLM's latent attention (MLA) takes the base model's weight apart when it is loaded: train "
                           "without it (PEFT's exclude_modules), or serve with transformers (PEFT)")  # fmt: skip
                elif targets is not None:
                    why = f"--lora-target-modules has {' '.join(targets)}. Name the missing ones, too (docs/serving.md)"
                raise ValueError(
                    f"this LoRA adapter changes {left[0]} and others ({len(left)} in all), and would be served without "
                    f"them: {why}"
                )

    def _load_adapter(self: Any, lora_request: Any) -> Any:
        """`load`, with all that may be refused: vLLM then puts the adapter in the place of one of its name."""
        lora_model, manager = load(self, lora_request), self._adapter_manager
        if hasattr(manager, "take"):  # what is for experts
            manager.take(lora_model, lora_request)
        if getattr(manager, "is_ours", False):
            single = dict(lora_model.loras)
            manager._create_merged_loras_inplace(lora_model)
            check_ranks(single)
            check_sizes(lora_model.loras, manager.modules)
            lora_model.is_checked = True
        return lora_model

    LRUCacheWorkerLoRAManager._manager_cls, LRUCacheWorkerLoRAManager._load_adapter = Manager, _load_adapter


def check_ranks(adapters: Mapping[str, Any]) -> None:
    """ValueError for factors of another rank than adapter_config.json says, by which they are scaled."""
    for name, found in adapters.items():
        pair = found.lora_a, found.lora_b
        if all(isinstance(factor, Tensor) for factor in pair) and ".experts" not in name:
            ranks = len(pair[0]), pair[1].shape[1]
            if ranks != (found.rank, found.rank):
                raise ValueError(
                    f"this LoRA adapter has factors of ranks {ranks[0]} and {ranks[1]} for {name}, and rank "
                    f"{found.rank} by adapter_config.json: one of the two is of another adapter"
                )


def check_sizes(adapters: Mapping[str, Any], adapted: Mapping[str, Any]) -> None:
    """ValueError (NotImplementedError for a part that vLLM does not take alone) for factors of other sizes than the
    linears, embeddings and heads `adapted`, by name, have: vLLM copies smaller ones into a part of its own."""
    for name, module in adapted.items():
        if name not in adapters or not hasattr(module, "base_layer"):
            continue
        found, base = adapters[name], module.base_layer
        if isinstance(base, LinearBase):
            columns, rows = base.input_size, _sizes(module)
        elif isinstance(base, VocabParallelEmbedding):
            columns, rows = base.org_vocab_size, [base.embedding_dim]
        elif isinstance(base, LogitsProcessor):
            columns, rows = module.hidden_size, [base.org_vocab_size]
        else:  # experts, which are checked with their own sizes
            continue
        pairs = [pair if isinstance(pair, list) else [pair] for pair in (found.lora_a, found.lora_b)]
        for a, b, size in zip(*pairs, _of_parts(name, pairs[1], rows), strict=True):
            if a is not None and (a.shape[1] != columns or len(b) != size):
                raise ValueError(
                    f"this LoRA adapter has {list(a.shape)} and {list(b.shape)} for {name}, whose columns and rows are "
                    f"{columns} and {size}: it is of another model, or damaged"
                )


def _of_parts(name: str, parts: list[Any], rows: list[int]) -> list[int]:
    """The rows of each of the parts that adapters have of the linear `name`: a part is one or more of its `rows`, the
    first one if there are too few. NotImplementedError for one without those before it, which vLLM cannot place."""
    if len(parts) == len(rows):
        return rows
    if None in parts[:-1]:
        raise NotImplementedError(
            f"this LoRA adapter changes a part of {name} without the first one, and vLLM cannot place it: train both, "
            "or serve it with transformers (PEFT)"
        )
    first = len(rows) - len(parts) + 1
    return [sum(rows[:first]), *rows[first:]]


def _sizes(module: Any) -> list[int]:
    """The rows, on all ranks, of each of the linears that the adapted linear `module` is."""
    linear = module.base_layer
    if isinstance(linear, QKVParallelLinear):
        q, kv, size = linear.total_num_heads, linear.total_num_kv_heads, linear.head_size
        return [q * size, kv * size, kv * getattr(linear, "v_head_size", size)]
    if isinstance(rows := getattr(module, "slice_lora_b", None), partial):  # of `split_rows`
        return rows.args[1]
    return getattr(linear, "output_sizes", [linear.output_size])


def use_adapters(model: torch.nn.Module, adapted: Iterable[torch.nn.Module]) -> None:
    """Put the linears `adapted`, which are others with adapters, at all places where `model` holds the latter: routers
    are the block's and the experts' runner's, and a shared expert's gate is the block's and the expert's."""
    by_base = {id(module.base_layer): module for module in adapted if isinstance(module.base_layer, LinearBase)}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        parent, _, last = name.rpartition(".")
        if id(module) in by_base and last != "base_layer":
            setattr(model.get_submodule(parent), last, by_base[id(module)])


def split_rows(adapted: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Have a rank take those rows of an adapter's B that vLLM's loader gave it of the linear: by itself vLLM's LoRA
    takes a fused linear in one piece for two of one size (Qwen3-Next's in_proj_qkvz), and a Mamba layer of one group,
    whose rows for the group all ranks have, for one piece (Granite 4's in_proj).

    adapted  the linears with adapters, by their names in `model`
    """
    from vllm.lora.layers import ColumnParallelLinearWithLoRA, ColumnParallelLinearWithShardedLoRA
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    for name, module in adapted.items():
        if type(module) not in (ColumnParallelLinearWithLoRA, ColumnParallelLinearWithShardedLoRA):
            continue
        linear, mixer = module.base_layer, _module(model, name.rpartition(".")[0])
        sizes, of_all = getattr(linear, "output_sizes", [linear.output_size]), ()
        if isinstance(mixer, MambaMixer2) and type(linear) is ColumnParallelLinear:
            inner, state = mixer.intermediate_size, mixer.ssm_state_size  # rows of gate and x; of B and C
            sizes, of_all = [inner, inner, state, state, mixer.num_heads], (2, 3)
        module.slice_lora_b = partial(_rows, name, sizes, of_all, module)


def _rows(name: str, sizes: list[int], of_all: Collection[int], module: Any, b: Tensor) -> Tensor:
    """A rank's rows of the factor `b` of a linear that is several of these sizes, those of_all whole."""
    if len(b) == module.output_size:  # of a warm-up, which makes a rank's alone; or there is one rank
        return b
    if len(b) != sum(sizes):
        raise ValueError(f"this LoRA adapter has {len(b)} rows for {name}, which has {sum(sizes)}: it is of another "
                         "model")  # fmt: skip
    parts = enumerate(b.split(sizes))
    return torch.cat([part if i in of_all else part.chunk(module.tp_size)[module.tp_rank] for i, part in parts])


def rename(
    adapters: dict[str, Any], model: torch.nn.Module, adapted: Mapping[str, torch.nn.Module], parts: Collection[str]
) -> None:
    """Put the `adapters` of linears under the names that vLLM's manager has for these: it names a module by one of the
    places where `model` holds it, and some of vLLM's models have other names than transformers'.

    adapted  the linears with adapters, by the manager's names
    parts    names of linears that are fused in those
    """
    names = {id(module): name for name, module in adapted.items()}
    parents = {id(_module(model, parent)): parent for parent in {name.rpartition(".")[0] for name in adapted}}
    for name in [name for name in adapters if name not in adapted]:
        for other in (name, *(name.replace(theirs, ours) for theirs, ours in NAMES)):
            parent, _, last = other.rpartition(".")
            place = parents.get(id(_module(model, parent)), parent)
            fused = f"{place}.{last}" in parts
            new = names.get(id(_module(model, other)), f"{place}.{last}" if fused else name)
            if new != name and new not in adapters:
                adapters[new] = adapters.pop(name)
                break


def as_loaded(adapters: dict[str, Any], model: torch.nn.Module) -> None:
    """Do to the `adapters` of linears what vLLM's loaders do to the rows of the linears, and not to adapters: of Llama
    4's q and k, those that are rotated together become neighbours; where values are keys (Gemma 4), k is v, too.

    NotImplementedError for K2-Horizon's dense q and k, whose rows have another order, too.
    """
    of_attention = [name for name in adapters if name.endswith((".q_proj", ".k_proj"))]  # not warm-up's, of fused ones
    modules = [*model.named_modules()] if of_attention else []
    for prefix, owner in ((f"{name}." if name else "", module) for name, module in modules):
        permute = getattr(owner, "permute_qk_weight_for_rotary", None)
        stacked = getattr(getattr(owner, "hf_to_vllm_mapper", None), "orig_to_new_stacked", {})
        several = {theirs: shards for theirs, (_, shards) in stacked.items() if isinstance(shards, list)}
        folds = getattr(owner, "fold_rope_weights", False)
        for name in of_attention if permute or several or folds else ():
            adapter, parent = adapters[name], name.rpartition(".")[0]
            if not name.startswith(prefix):
                continue
            if folds:
                raise NotImplementedError(
                    f"this LoRA adapter changes {name}, whose rows vLLM's {type(model).__name__} reorders, and not the "
                    "adapter's: train without it (PEFT's exclude_modules), or serve with transformers (PEFT)"
                )
            if permute:
                order = permute(f"{name}.weight", torch.arange(len(adapter.lora_b))[:, None])[1][:, 0]
                adapter.lora_b = adapter.lora_b[order.to(adapter.lora_b.device)]
            for shards in (shards for theirs, shards in several.items() if f".{theirs}" in f".{name}."):
                adapters |= {f"{parent}.{shard}_proj": adapter for shard in shards}


def absorbed(model: torch.nn.Module) -> set[int]:
    """The ids of the linears that latent attention has inside of other products: it does not call them."""
    found = (module.kv_b_proj for module in model.modules() if isinstance(module, MLAAttention))
    return {id(getattr(linear, "base_layer", linear)) for linear in found}


def _is_here(model: torch.nn.Module, name: str) -> bool:
    """Whether the layer of the module `name` is on this stage of a pipeline."""
    return not any(isinstance(module, PPMissingLayer) for module in _along(model, name))


def _module(model: torch.nn.Module, name: str) -> Any:
    """The module of this name, or None."""
    return _along(model, name)[-1]


def _along(model: torch.nn.Module, name: str) -> list[Any]:
    """The model, and what it has at each part of a name: modules, or None."""
    return list(accumulate(name.split("."), lambda module, part: getattr(module, part, None), initial=model))
