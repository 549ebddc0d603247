"""How expert weights travel between files and modules: transformers' weight converters.

Files hold one tensor per expert and projection, here with ModelOpt's names (quantize/dialects.py has the others):

    ...experts.3.gate_proj.weight          U8      codes
    ...experts.3.gate_proj.weight_scale    F8_E4M3 sf
    ...experts.3.gate_proj.weight_scale_2  F32     global_scale
    ...experts.3.gate_proj.input_scale     F32     static activation scale, optional

or, written by ModelOpt, stacks of all experts, transposed or for each projection: quantize/layouts/nvfp4.py has the
names of all of them (`parameters`).
A family that stores its bf16 experts one by one keeps its own names (Mixtral: w1, w3, w2); for the
others gate_proj, up_proj, down_proj are used. Modules hold all experts of a layer stacked. A
`Conversions` builds the converters for both directions, and for quantizing bf16 checkpoints on
the way in, one expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, PrefixChange, WeightConverter

from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.fp8 import FP8Experts
from moe_nvfp4.integrations.huggingface.linears import LinearConverter
from moe_nvfp4.integrations.huggingface.operations import (
    DbrxStack,
    PreQuantScalePerExpert,
    ScalePerExpert,
    Stacked,
    StackExperts,
    TransposedStack,
    ViewDtype,
)
from moe_nvfp4.quantize.dialects import MODELOPT, Dialect
from moe_nvfp4.quantize.importance import Importance
from moe_nvfp4.quantize.layouts import ExpertLayout, nvfp4
from moe_nvfp4.quantize.names import PLAIN_NAMES, PRE_QUANT_SCALE
from moe_nvfp4.quantize.recipes import quantize_expert


# ---------------------------------------------------------------- the converter
class ExpertsConverter(WeightConverter):
    """A WeightConverter that knows the 4-bit experts modules it serves.

    While a bf16 checkpoint loads, it quantizes: expert by expert and before merging where the file
    has one tensor per expert, so that a layer's bf16 weights are never in memory together. Its
    errors leave `from_pretrained` as they are (transformers collects those of operations).
    """

    def __init__(
        self, source_patterns: list[str], target_patterns: list[str], operations: list[ConversionOps],
        force_cpu: bool = False, owner: Any = None, only: bool = False,
    ):  # fmt: skip
        super().__init__(source_patterns, target_patterns, operations, force_cpu)
        self.owner: Conversions = owner
        self.only = only  # True: leave the tensors of experts that were not swapped alone

    @property
    def by_expert(self) -> bool:
        """Whether the files have a tensor for each expert."""
        return "*" in self.source_patterns[0]

    def _scoped_match(self, source_key: str) -> Any:
        if self.only and source_key.rpartition(".")[0] in self.owner.excluded:
            return None
        match = super()._scoped_match(source_key)
        # `weight` must not match `weight_scale`: older transformers have no name boundary
        return match if match and match[2].end() == len(match[1]) else None

    def copy(self, source_patterns: list[str], target_patterns: list[str], **kwargs: Any) -> ExpertsConverter:
        kwargs = {"operations": self.operations, "force_cpu": self.force_cpu, **kwargs}
        new = type(self)(source_patterns, target_patterns, owner=self.owner, only=self.only, **kwargs)
        new.scope_prefix, new.base_model_prefix = self.scope_prefix, self.base_model_prefix
        return new

    def __deepcopy__(self, memo: dict) -> ExpertsConverter:
        """The loader copies a converter for each target; the model is never copied."""
        return self.copy(self._original_source_patterns, self._original_target_patterns)

    def reverse_transform(self) -> ExpertsConverter:
        operations = [op.reverse_op for op in self.operations[::-1]]
        return self.copy(self._original_target_patterns, self._original_source_patterns, operations=operations)

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Tensor]:
        module_name, _, name = layer_name.rpartition(".")
        experts = self.owner.experts.get(module_name)
        self.quantization_operation = None
        if loading_info is not None and experts is not None:
            check_sharding(module_name, experts, self, model)
        if loading_info is None or experts is None or self.owner.pre_quantized:
            found = super().convert(layer_name, model, config, hf_quantizer)  # without info, errors are raised
            return self.owner.as_read(self.layer_targets[layer_name], found) if loading_info is None else found
        if _is_merge(self.operations):
            sources: Any = [self.collected_tensors.pop(p, []) for p in self.source_patterns]
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
    """Expert e's rows, read from the file when asked for: [gate; up] or one projection."""

    def __init__(self, sources: list[list[Callable]]):
        self.sources = sources

    def __len__(self) -> int:
        return len(self.sources[0])

    def __getitem__(self, e: int) -> Tensor | None:
        """None: another rank's expert."""
        parts = [source[e]() for source in self.sources]
        return None if parts[0] is None else torch.cat(parts) if len(parts) > 1 else parts[0]


class _StackedExperts:
    def __init__(self, tensor: Tensor, experts: HFExperts, name: str):
        self.tensor, self.layout, self.name = tensor, experts.layout, name

    def __len__(self) -> int:
        return min(self.tensor.shape[0], self.layout.num_experts)

    def __getitem__(self, e: int) -> Tensor:
        return self.layout.canonical(self.name, self.tensor[e])


def _suffix(module_name: str) -> str:
    """What the names of all layers share: "mlp.experts", or "experts" where a layer's number precedes it."""
    parts = module_name.split(".")[-2:]
    return ".".join(p for p in parts if not p.isdigit())


def _merge(sources: Sequence[str]) -> list[ConversionOps]:
    """One tensor per expert, of one or two projections -> stacked, the second's rows after the first's."""
    return [StackExperts(0)] + ([Concatenate(1)] if len(sources) == 2 else [])


def _is_merge(operations: list[ConversionOps]) -> bool:
    """[MergeModulelist(0)] or [MergeModulelist(0), Concatenate(1)]: one file tensor per expert."""
    chain = ((MergeModulelist, 0), (Concatenate, 1))
    return 0 < len(operations) <= 2 and all(
        isinstance(op, kind) and op.dim == dim for op, (kind, dim) in zip(operations, chain, strict=False)
    )


# ---------------------------------------------------------------- all converters of a model
class Conversions:
    """The converters for the 4-bit experts of one model.

    experts        module name -> HFExperts, the modules that are 4-bit
    excluded       names of experts modules that keep their weights
    pre_quantized  the checkpoint is NVFP4 already
    importance     of the recipe "weighted"
    dialect        of the files, those that are loaded and those that are saved
    layout         how the 4-bit files keep experts; they are always saved one by one
    plain_names    the 4-bit files that are loaded call the projections gate_proj, up_proj and down_proj, whatever the
                   family does, as llm-compressor writes them; they are saved with the family's names
    stored         reciprocals of global scales as they were read, by parameter (`ScalePerExpert`): two of them may have
                   the same reciprocal, and saving writes the one that was there
    """

    def __init__(
        self,
        experts: dict[str, HFExperts],
        excluded: Iterable[str],
        recipe: str,
        pre_quantized: bool,
        dialect: Dialect = MODELOPT,
        importance: Importance | None = None,
        layout: ExpertLayout = ExpertLayout.ONE_BY_ONE,
    ):
        self.experts, self.excluded = experts, frozenset(excluded)
        self.recipe, self.pre_quantized, self.importance = recipe, pre_quantized, importance
        self.dialect, self.layout, self.plain_names = dialect, layout, False
        self.stored: dict[str, Tensor] = {}
        self._saved: list[ExpertsConverter] = []
        self._dense: list[WeightConverter] = []  # for experts that are dense

    def build(self, base: list) -> list:
        """The conversions to load with: `base` (the model's own) with ours in front."""
        self._base = base
        self._saved, self._dense = [], []
        extra, kept, covered = list[Any](), list[Any](), set[str]()
        for c in base:
            names = self._params_of(c)
            if not names:
                kept.append(c)
            elif _is_merge(c.operations) and all(s.endswith(".weight") for s in c.source_patterns):
                covered |= names
                more, own = self._one_by_one(c)
                extra, kept = extra + more, kept + own
            elif self.pre_quantized:
                kept.append(c)
            else:
                sources, (target,) = c._original_source_patterns, c._original_target_patterns
                extra.append(self._converter(sources, target, c.operations, c))
        for module_name, experts in self.experts.items():
            suffix = _suffix(module_name)
            for name in (experts.up_name, "down_proj"):
                if f"{module_name}.{name}" in covered:
                    continue
                covered |= {f"{m}.{name}" for m in self.experts if f".{m}".endswith(f".{suffix}")}
                self._saved += self._own_files(suffix, name)
                extra += [] if self.pre_quantized else self._stacked_sources(suffix, name, experts, extra)
        files = self._saved
        if self.layout is ExpertLayout.PROJECTION_FIRST:
            files = [_projection_first(c) for c in self._saved]
        elif self.layout in (ExpertLayout.STACKED_TRANSPOSED, ExpertLayout.STACKED_BY_PROJECTION):
            files = self._stacks()
        elif self.plain_names:
            files = [_plainly_named(c) for c in self._saved]
        return files + extra + kept

    def _one_by_one(self, c: Any) -> tuple[list, list]:
        """(converters that quantize, those of dense experts) in the place of the model's own `c`, which merges a tensor
        for each expert."""
        sources, target = c._original_source_patterns, c._original_target_patterns[0]
        # Where codes have another name than dense weights, converters of their own are for those.
        apart = self.dialect.weight != "weight"
        stems = [source.removesuffix(".weight") for source in sources]
        self._saved += self._files(ExpertLayout.ONE_BY_ONE, stems, target, c, only=apart)
        if not apart:
            return [], []
        self._dense.append(c)  # for experts that were left alone, and for those of multi-token prediction
        if self.pre_quantized:
            return [], [c] if self.excluded else []
        return [self._converter(sources, target, _merge(sources), c)], []

    def for_saving(self, used: list) -> list:
        """The conversions whose reverse writes files, from those `used` while loading."""
        merges = lambda c: self._params_of(c) and _is_merge(c.operations)
        kept = [c for c in used if not isinstance(c, (ExpertsConverter, FP8Experts)) and not merges(c)]
        return kept + self._dense + self._saved  # reversed when saving, so that ours are asked first

    def for_dense(self, used: list) -> list:
        """The conversions to save with after the experts became dense: the model's own."""
        kept = [c for c in used if not isinstance(c, (ExpertsConverter, LinearConverter)) and c not in self._dense]
        return kept + [c for c in self._base if self._params_of(c)]

    def as_read(self, parameter: set[str], found: dict[str, Tensor]) -> dict[str, Tensor]:
        """`found`, what files are to have for a parameter, with the global scales that were read where they count."""
        stored, decode = self.stored.get(min(parameter, default="")), self.dialect.decode_scale
        if stored is None or stored.numel() != len(found):
            return found
        pairs = zip(found.items(), stored.reshape(-1), strict=True)
        return {n: old.clone().view_as(new) if decode(old) == decode(new.cpu()) else new for (n, new), old in pairs}

    def renew(self, used: list) -> list:
        """`for_saving` again, after modules got other parameters."""
        self.build(self._base)
        return self.for_saving(used)

    def _params_of(self, c: Any) -> set[str]:
        """The full names of 4-bit parameters that converter `c` makes."""
        if not isinstance(c, WeightConverter) or len(c.target_patterns) != 1:
            return set()
        scope = f"{c.scope_prefix}." if c.scope_prefix else ""
        target = c.target_patterns[0].replace("\\", "")
        names = (f"{m}.{p}" for m, e in self.experts.items() for p in (e.up_name, "down_proj"))
        return {n for n in names if f".{n}".endswith(target) and scope in n}

    def _converter(
        self, sources: Iterable[str], target: str | list[str], operations: Iterable[ConversionOps], like: Any = None,
        only: bool = False,
    ) -> ExpertsConverter:  # fmt: skip
        targets = [target] if isinstance(target, str) else target
        c = ExpertsConverter(list(sources), targets, list(operations), owner=self, only=only)
        if like is not None:
            c.scope_prefix, c.base_model_prefix = like.scope_prefix, like.base_model_prefix
            c.force_cpu = like.force_cpu
        return c

    def _files(
        self, layout: ExpertLayout, stems: list[str], target: str, like: Any = None, only: bool = False
    ) -> list[ExpertsConverter]:
        """Converters between the tensors of 4-bit files and the parameter `target` of modules, with those beside it."""
        suffix = target.rpartition(".")[0].replace("\\", "")
        modules = [experts for name, experts in self.experts.items() if f".{name}".endswith(suffix)]
        found = []
        for source in nvfp4.parameters(layout, self.dialect, stems, target):
            own = source.parameters[-1].rpartition(".")[2]
            if any(own in experts._parameters for experts in modules):
                operations = self._operations(layout, source)
                found.append(self._converter(source.tensors, list(source.parameters), operations, like, only))
        return found

    def _operations(self, layout: ExpertLayout, source: nvfp4.ParameterSource) -> list[ConversionOps]:
        as_bytes = [ViewDtype(torch.uint8, torch.float8_e4m3fn)] if source.kind == "sf" else []
        if layout is ExpertLayout.STACKED_TRANSPOSED:
            return [*as_bytes, TransposedStack(self.experts)]
        if source.kind in ("global_scale", "input_scale"):
            return [ScalePerExpert(self.dialect, self.stored)]
        if source.kind == PRE_QUANT_SCALE:
            return [PreQuantScalePerExpert(0)]
        if layout is ExpertLayout.STACKED_BY_PROJECTION:
            return [*as_bytes, Concatenate(1) if len(source.tensors) == 2 else Stacked()]
        return [*as_bytes, *_merge(source.tensors)]

    def _own_files(self, suffix: str, name: str) -> list[ExpertsConverter]:
        """With ModelOpt's names, for families whose own files are stacked."""
        parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        stems = [f"{suffix}.*.{part}" for part in parts]
        return self._files(ExpertLayout.ONE_BY_ONE, stems, f"{suffix}.{name}", only=True)

    def _stacks(self) -> list[ExpertsConverter]:
        """For files with stacks of all experts."""
        found = []
        for suffix, experts in {_suffix(m): e for m, e in self.experts.items()}.items():
            for name in (experts.up_name, "down_proj"):
                only = self.layout is ExpertLayout.STACKED_TRANSPOSED
                found += self._files(self.layout, [], f"{suffix}.{name}", only=only)
        return found

    def _stacked_sources(self, suffix: str, name: str, experts: HFExperts, extra: list) -> list[ExpertsConverter]:
        """Converters for bf16 files with all experts in one tensor."""
        target = f"{suffix}.{name}"
        if any(self._params_of(c) & {f"{m}.{name}" for m in self.experts} for c in extra):
            return []
        found = []
        if experts.source_class.__name__ == "DbrxExperts":
            sources = ["w1", "v1"] if name == "gate_up_proj" else ["w2"]
            stack = [DbrxStack(experts.layout.num_experts)]
            found.append(self._converter([f"{suffix}.mlp.{s}" for s in sources], target, stack))
        else:
            found.append(self._converter([target], target, [Stacked()], only=True))
        if experts.layout.bias is not None and experts.layout.interleaved and name == "gate_up_proj":
            found.append(self._converter([f"{target}_bias"], f"{target}_bias", [Stacked()], only=True))
        return found

    # ------------------------------------------------------------ quantizing
    def quantize(self, dense: Any, experts: HFExperts, name: str, layer_name: str) -> dict[str, Tensor]:
        """Quantize `dense` (a sequence of [N, K] matrices) to the tensors of parameter `name`.

        Under tensor parallelism every rank has a slice of each matrix; the global scale comes from
        the whole matrix, so that ranks and single process agree bit for bit.
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
        amax = _global_amax(dense, param) if _splits_matrices(param) else None
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


def _projection_first(c: ExpertsConverter) -> ExpertsConverter:
    """The same for files that number experts after the projection: experts.gate_proj.3."""
    sources = [re.sub(r"experts\.\*\.(\w+)\.", r"experts.\1.*.", s) for s in c._original_source_patterns]
    return c.copy(sources, c._original_target_patterns)


def _plainly_named(c: ExpertsConverter) -> ExpertsConverter:
    """The same for files that say gate_proj, down_proj and up_proj where the family says w1, w2 and w3."""
    names = [re.sub(r"\bw[123]\b", lambda w: PLAIN_NAMES[w[0]], source) for source in c._original_source_patterns]
    return c.copy(names, c._original_target_patterns)


def check_sharding(module_name: str, experts: HFExperts, converter: ExpertsConverter, model: nn.Module) -> None:
    """The plan of parallelism must cut our [E, N, K] tensors at whole blocks of 16, and files must be cut likewise."""
    files = converter.owner
    if getattr(model, "_ep_plan", None):
        instead = "use expert parallelism (DistributedConfig(tp_size=n, ep_size=n))"
    else:  # Llama 4
        instead = "this model has no plan of expert parallelism; whole layers go to several GPUs with device_map='auto'"
    parallel = any(isinstance(p, DTensor) for p in experts.parameters())
    if parallel and experts.pre_quant_scales[0] is not None:
        raise NotImplementedError(f"{module_name}: experts with AWQ's pre_quant_scale are not split over ranks yet")
    stacks = files.layout in (ExpertLayout.STACKED_TRANSPOSED, ExpertLayout.STACKED_BY_PROJECTION)
    if parallel and files.pre_quantized and (stacks or files.dialect.scale_shape):
        what = "stacks of experts" if stacks else f"{files.dialect.name}'s scales"
        raise NotImplementedError(
            f"{module_name}: 4-bit files with {what} cannot be split over ranks as they are read: write them with "
            "ModelOpt's names first, the same bytes (moe-nvfp4 quantize SRC DST --dialect modelopt)"
        )
    for name in (experts.up_name, "down_proj"):
        if name not in experts._parameters:  # those stay in their files, and are not split
            continue
        codes, sf = getattr(experts, name), getattr(experts, f"{name}_sf")
        if not _splits_matrices(codes):
            continue
        if experts.layout.transposed:
            raise NotImplementedError(
                f"{module_name}: {experts.source_class.__name__} stores its experts transposed, so its "
                f"tensor-parallel plan does not fit 4-bit experts: {instead}"
            )
        if codes.to_local().shape[-1] * 2 != sf.to_local().shape[-1] * 16:
            raise ValueError(
                f"{module_name}.{name}: K = {codes.shape[-1] * 2} does not split over "
                f"{codes.device_mesh.size()} ranks into whole blocks of 16: choose a tp_size that "
                f"divides K / 16, or {instead}"
            )


def _splits_matrices(param: Tensor) -> bool:
    return isinstance(param, DTensor) and any(hasattr(p, "dim") and p.dim % param.ndim != 0 for p in param.placements)


def _global_amax(dense: Any, param: DTensor) -> Tensor:
    """fp32 [E]: the largest magnitude of each matrix over all ranks that share it."""
    amax = torch.stack([dense[e].abs().amax().float() for e in range(len(dense))])
    for dim, placement in enumerate(param.placements):
        if hasattr(placement, "dim"):
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=param.device_mesh.get_group(dim))
    return amax


def model_conversions(model: Any, loading: bool = False) -> list:
    """transformers' renamings and converters: to load with, or to save a model that was not loaded from files."""
    conversions = get_model_conversion_mapping(model, add_legacy=loading)
    return [c for c in conversions if loading or not isinstance(c, PrefixChange)]


def with_names_in_files(model: nn.Module, modules: Iterable[str]) -> set[str]:
    """The names of `modules` of `model`, and what files call them, which is what servers go by."""
    modules = set(modules)
    conversions = model_conversions(model) if hasattr(model, "config") else []
    back = [c.reverse_transform() for c in conversions[::-1] if not isinstance(c, WeightConverter)]

    def name_in_files(module: str) -> str:
        key = f"{module}.weight"
        for renaming in back:
            key, _ = renaming.rename_source_key(key)
        return key.removesuffix(".weight")

    return modules | {name_in_files(module) for module in modules}
