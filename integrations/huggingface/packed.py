"""transformers' weight converter for 4-bit experts, from files to modules and back.

Files hold one tensor per expert and projection, here with ModelOpt's names (quantize/dialects has the others):

    ...experts.3.gate_proj.weight          U8      codes
    ...experts.3.gate_proj.weight_scale    F8_E4M3 sf
    ...experts.3.gate_proj.weight_scale_2  F32     global_scale
    ...experts.3.gate_proj.input_scale     F32     static activation scale, optional

or stacks of all experts, written by ModelOpt: [E, in, out], or [E, out, in] for each projection. Modules hold all
experts of a layer stacked. A tensor goes where the family's own converter puts the dense tensor of its matrix, and is
saved under the family's names (Mixtral: w1, w3, w2). A family without a converter has gate_proj, up_proj, down_proj.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import MergeModulelist, WeightConverter

from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.linears import FP8_TENSORS, Nothing, copy_of
from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout
from moe_nvfp4.integrations.huggingface.singles import single_experts
from moe_nvfp4.quantize.dialects import MODELOPT, Dialect
from moe_nvfp4.quantize.layouts import ExpertLayout
from moe_nvfp4.quantize.layouts.base import STACKED, split_rows
from moe_nvfp4.quantize.layouts.nvfp4 import new_name
from moe_nvfp4.quantize.layouts.stacked import STEP
from moe_nvfp4.quantize.names import PLAIN_NAMES, PRE_QUANT_SCALE, SEPARATE, aliases, projections

SINGLE_KINDS = tuple(f"single.{last}" for last in (*FP8_TENSORS, "bias"))
KINDS = ("codes", "sf", "global_scale", "input_scale", PRE_QUANT_SCALE, "bias")
MATRIX = re.compile(r"(?P<module>.+)\.\d+\.(?P<part>gate_proj|up_proj|down_proj|w[123])")
STACK = re.compile(r"(?P<part>gate_up_proj|up_proj|down_proj)(_(?P<last>\w+))?")


def _parameters(up_name: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name in (up_name, "down_proj"):
        parts = projections(name)
        found |= {name: ("codes", parts), f"{name}_sf": ("sf", parts), f"{name}_bias": ("bias", parts)}
        found |= {f"{part}_global_scale": ("global_scale", (part,)) for part in parts}
        found |= {f"{parts[-1]}_{kind}": (kind, parts) for kind in ("input_scale", PRE_QUANT_SCALE)}
    return found


# up_name -> parameters of `HFExperts` -> which of KINDS they are, and the projections that they hold or belong to
PARAMETERS = {up_name: _parameters(up_name) for up_name in ("gate_up_proj", "up_proj")}


class PackedConverter(WeightConverter):
    """All tensors of 4-bit experts in files -> the parameters of `HFExperts`, and back.

    experts  module name -> HFExperts
    singles  name of a module that becomes dense from experts one by one -> its layout
    prefix   of names in the model's body; files of the body alone lack it
    merges   the family's converters that merge dense experts one by one
    dialect  of the files, loaded and saved
    layout   of the experts in files that are loaded; they are always saved one by one
    saving   convert parameters to files
    stored   parameter -> reciprocals of its scales as they were read, [projections, E], to be written again
    """

    def __init__(
        self,
        experts: dict[str, HFExperts],
        singles: Mapping[str, ModuleLayout],
        prefix: str = "",
        merges: Iterable[WeightConverter] = (),
        dialect: Dialect = MODELOPT,
        layout: ExpertLayout = ExpertLayout.ONE_BY_ONE,
        saving: bool = False,
        stored: dict[str, Tensor] | None = None,
    ):  # fmt: skip
        self.experts, self.singles, self.prefix = experts, singles, prefix
        self.dialect, self.layout, self.saving = dialect, layout, saving
        self.merges = [copy.copy(c) for c in merges]  # copies, since renaming marks a converter as used
        self.stored = {} if stored is None else stored
        self.lasts = dict(zip(KINDS, (*dialect.suffixes, PRE_QUANT_SCALE, "bias"), strict=True))
        self.kinds = {last: kind for kind, last in self.lasts.items()}
        parts = ("experts",) if saving else ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
        sources = [f"{part} {kind}" for part in parts for kind in (*KINDS, *SINGLE_KINDS)]
        # Neither does anything here: of the second, transformers before 5.21 sees that a rank takes some of the experts
        operation = Nothing() if layout in STACKED else MergeModulelist()
        super().__init__(sources, ["gate_proj_global_scale"], [operation])
        if layout is ExpertLayout.STACKED_TRANSPOSED:  # one scale in the file becomes gate's and up's
            self.target_patterns.append("up_proj_global_scale")

    def __deepcopy__(self, memo: dict) -> PackedConverter:
        return copy_of(self)

    def reverse_transform(self) -> PackedConverter:
        return PackedConverter(
            self.experts, self.singles, self.prefix, self.merges, self.dialect, self.layout, True, self.stored
        )

    # ---------------------------------------------------------------- names
    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """For transformers: the parameter that a tensor of the files becomes or is a part of, and the pattern that says
        which part. When saving: the file tensor of the first projection of expert *, and the pattern of its kind."""
        named = self._saved(source_key) if self.saving else self._loaded(source_key)
        if named is None:
            return source_key, None
        self._was_used = True
        return named

    def _saved(self, key: str) -> tuple[str, str] | None:
        module, _, name = key.rpartition(".")
        known = PARAMETERS[self.experts[module].up_name] if module in self.experts else {}
        if name not in known:
            return None
        kind, parts = known[name]
        return f"{self._stems(module)[parts[0]]}.{self.lasts[kind]}", f"experts {kind}"

    def _loaded(self, key: str) -> tuple[str, str] | None:
        found = self._place(key)
        module = None if found is None else self._module(found[0])
        if found is None or module is None:
            return None
        _, part, last = found
        if module in self.singles:
            name = "down_proj" if part == "down_proj" else self.singles[module].up_name
            return f"{module}.{name}" + "_bias" * (last == "bias"), f"{part} single.{last}"
        kind, first = self.kinds.get(last), projections(part)[0]
        known = PARAMETERS[self.experts[module].up_name].items()
        names = (name for name, (k, parts) in known if k == kind and first in parts)
        return next(((f"{module}.{name}", f"{part} {kind}") for name in names), None)

    def _place(self, key: str) -> tuple[str, str, str] | None:
        """(module, projection, last part of the name) of a tensor in files, by its name after the model's renamings."""
        stem, _, last = key.rpartition(".")
        if self.layout in STACKED and (stack := STACK.fullmatch(last)):
            # For Step-3 only the codes of down_proj: they have a dense weight's name, which transformers renames
            return stem, stack["part"], stack["last"] or self.dialect.weight
        if last not in self.kinds and last not in FP8_TENSORS:
            return None
        stem = new_name(stem)
        if separate := SEPARATE.search(stem):
            return f"{stem[: separate.start()]}{STEP.module}", separate["part"], last
        for c in self.merges:
            target, pattern = c.rename_source_key(f"{stem}.weight")
            if pattern is not None:
                module, _, name = target.rpartition(".")
                return module, projections(name)[c.source_patterns.index(pattern)], last
        match = MATRIX.fullmatch(stem)
        return (match["module"], PLAIN_NAMES.get(match["part"], match["part"]), last) if match else None

    def _module(self, name: str) -> str | None:
        """The name in the model of the module `name`; None if its experts are not ours."""
        of_body = lambda n: (n, f"{self.prefix}.{n}", n.removeprefix(f"{self.prefix}."))
        names = (n for alias in aliases(name) for n in of_body(alias))
        return next((n for n in names if n in self.experts or n in self.singles), None)

    def _stems(self, module: str) -> dict[str, str]:
        """projection -> stem of its matrices' names in files, with * for the expert's number."""
        found: dict[str, str] = {}
        in_files = re.sub(r"mlp\.experts$", self.experts[module].layout.in_files, module)
        for name in (self.experts[module].up_name, "down_proj"):
            stems = [f"{in_files}.*.{part}" for part in projections(name)]
            for c in (c.reverse_transform() for c in self.merges):
                first, pattern = c.rename_source_key(f"{module}.{name}")
                if pattern is not None:
                    names = [first.replace(c.target_patterns[0], other) for other in c.target_patterns]
                    stems = [name.removesuffix(".weight") for name in names]
            found |= dict(zip(projections(name), stems, strict=True))
        return found

    # ---------------------------------------------------------------- tensors
    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Tensor]:
        if self.saving:
            return self._files(layer_name)
        module, _, name = layer_name.rpartition(".")
        if module in self.singles:
            parameter, layout = model.get_parameter(layer_name), self.singles[module]
            return {layer_name: single_experts(layer_name, parameter, layout, self.materialize_tensors())}
        experts = self.experts[module]
        kind, _ = PARAMETERS[experts.up_name][name]
        check_sharding(module, experts, model, self)
        found = self.materialize_tensors()
        sources = [source for source in self.source_patterns if source in found]  # gate's before up's
        if kind not in ("global_scale", "input_scale"):
            whole = self._whole(layer_name, kind, [found.pop(source) for source in sources])
            return {layer_name: whole.to(getattr(experts, name).dtype) if kind in ("bias", PRE_QUANT_SCALE) else whole}
        columns = torch.stack([torch.cat([t.reshape(-1) for t in found[source]]) for source in sources])
        if not self.dialect.exact:
            self.stored[layer_name] = columns.cpu()
        scale = self.dialect.decode_scale(columns).amax(dim=0)  # the larger, if two projections share one
        if self.layout is ExpertLayout.STACKED_TRANSPOSED:  # the stack has one
            scale = scale.expand(experts.layout.num_experts)
        of = projections(sources[0].split()[0])
        names = [f"{part}_global_scale" for part in of] if kind == "global_scale" else [name]
        return {f"{module}.{name}": scale.clone() for name in names}

    def _whole(self, name: str, kind: str, parts: list[list[Tensor]]) -> Tensor:
        """The parameter `name` from the files' tensors of each of its projections: one stack, or one per expert."""
        whole = []
        while parts:  # drops each projection's tensors once they are stacked
            tensors = parts.pop(0)
            tensors = [t.view(torch.uint8) for t in tensors] if kind == "sf" else tensors
            whole.append(tensors[0] if self.layout in STACKED else torch.stack(tensors))
            del tensors
        if kind == PRE_QUANT_SCALE:
            if any(not torch.allclose(whole[0], other, 0, 0, equal_nan=True) for other in whole[1:]):
                raise ValueError(f"{name}: gate and up have different pre_quant_scale, but they share one input: use "
                                 "the tool that wrote these files")  # fmt: skip
            return whole[0]
        tensor = torch.cat(whole, dim=1) if len(whole) > 1 else whole[0]
        if self.layout is ExpertLayout.STACKED_TRANSPOSED:
            module, _, last = name.rpartition(".")
            tensor = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
            if self.experts[module].layout.interleaved and last.startswith("gate_up_proj"):
                tensor = torch.cat(split_rows(tensor, 2, interleaved=True, dim=1), dim=1)
        return tensor.contiguous()

    def _files(self, name_in_files: str) -> dict[str, Tensor]:
        """The files' tensors for a parameter: one for each expert and projection.

        name_in_files: the name for the first projection, with * for the expert's number. transformers 5.17 passes it
        after the model's renamings.
        """
        ((tensor,),), (name,) = self.materialize_tensors().values(), self.layer_targets[name_in_files]
        module, _, parameter = name.rpartition(".")
        kind, parts = PARAMETERS[self.experts[module].up_name][parameter]
        scales, stems = kind in ("global_scale", "input_scale"), self._stems(module)
        start = name_in_files.rpartition("*")[0]
        as_read = self.stored.get(name, torch.full((len(parts), len(tensor)), torch.nan))
        tensor = tensor.view(torch.float8_e4m3fn) if kind == "sf" else tensor
        shared = scales or kind == PRE_QUANT_SCALE
        pieces = [tensor] * len(parts) if shared else tensor.chunk(len(parts), dim=1)
        found = {}
        for i, part in enumerate(parts):
            for e, piece in enumerate(pieces[i]):
                piece = self.dialect.encode_scale(piece, as_read[i, e]) if scales else piece
                name = f"{start}{e}{stems[part].rpartition('*')[2]}.{self.lasts[kind]}"
                found[name] = piece.clone() if shared else piece
        return found


def check_sharding(
    module_name: str, experts: HFExperts, model: nn.Module, files: PackedConverter | None = None
) -> None:
    """Check that a parallelism plan splits our [E, N, K] tensors at whole blocks of 16, and can split the 4-bit files.

    Raises NotImplementedError for plans and files that are not supported, ValueError for a split inside a block.
    """
    if getattr(model, "_ep_plan", None):
        instead = "use expert parallelism (DistributedConfig(tp_size=n, ep_size=n))"
    else:  # Llama 4
        instead = "this model has no plan of expert parallelism; whole layers go to several GPUs with device_map='auto'"
    parallel = any(isinstance(p, DTensor) for p in experts.parameters())
    if parallel and experts.pre_quant_scales[0] is not None:
        raise NotImplementedError(f"{module_name}: experts with AWQ's pre_quant_scale are not split over ranks yet")
    if parallel and files is not None and (files.layout in STACKED or files.dialect.scale_shape):
        what = "stacks of experts" if files.layout in STACKED else f"{files.dialect.name}'s scales"
        raise NotImplementedError(
            f"{module_name}: 4-bit files with {what} cannot be split over ranks as they are read: write them with "
            "ModelOpt's names first, the same bytes (moe-nvfp4 quantize SRC DST --dialect modelopt)"
        )
    for name in (experts.up_name, "down_proj"):
        if name not in experts._parameters:  # it stays in its file, and is not split
            continue
        codes, sf = getattr(experts, name), getattr(experts, f"{name}_sf")
        if not splits_matrices(codes):
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


def ranks_of_a_row(param: Tensor) -> Any:
    """The process group whose ranks hold the columns of a matrix of the parameter [E, N, K/2]; None: all are here."""
    if isinstance(param, DTensor):
        for i, placement in enumerate(param.placements):
            if hasattr(placement, "dim") and placement.dim % param.ndim == param.ndim - 1:
                return param.device_mesh.get_group(i)
    return None


def splits_matrices(param: Tensor) -> bool:
    """Whether ranks hold parts of each matrix of the parameter [E, N, K/2], not only some of the experts."""
    return bool(dims_that_split_matrices(param))


def dims_that_split_matrices(param: Tensor) -> list[int]:
    """The dimensions of the device mesh over which ranks hold parts of each matrix, and not other experts."""
    if not isinstance(param, DTensor):
        return []
    return [i for i, p in enumerate(param.placements) if hasattr(p, "dim") and p.dim % param.ndim != 0]
