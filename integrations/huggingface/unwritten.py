"""Load MXFP4 and FP8 checkpoints: as the NVFP4 checkpoint that a conversion would write, without writing it.

transformers hands over the tensors of the files that are there. `UnwrittenConverter` takes those that the conversion
makes something of, unread; has the conversion's jobs make the new tensors, for the experts of one layer at a time; and
gives these to the converters that would have got them from files. So there is one reader for each format, and the
model is what moe-nvfp4 quantize and from_pretrained give, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import logging

from moe_nvfp4.integrations.huggingface.calibration import importance_for_load
from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.converters import choose_linears
from moe_nvfp4.integrations.huggingface.linears import Nothing, copy_of
from moe_nvfp4.quantize.dialects import read_config
from moe_nvfp4.quantize.files import Checkpoint, open_checkpoint
from moe_nvfp4.quantize.layouts import CastSums
from moe_nvfp4.quantize.names import by_number
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import recipe_named
from moe_nvfp4.quantize.unwritten import Unit, Unwritten, unwritten

logger = logging.get_logger(__name__)
FIRST = "moe-nvfp4 quantize SRC DST writes 4-bit files first, which load so"
PATTERN = "a tensor that a conversion reads"


def open_unwritten(model: Any, files: Iterable[str], config: MoeNvfp4Config, device: str | None) -> Unwritten:
    """The NVFP4 checkpoint that a conversion of `files` would write, as `config` asks for.

    model   dense, on meta
    device  where its tensors will be quantized; None: a GPU if there is one

    Raises what a conversion does; NotImplementedError for options that need 4-bit files.
    """
    if config.map_files:
        raise NotImplementedError(f"map_files: the experts of these files are not NVFP4 yet: {FIRST}")
    if getattr(model.config, "distributed_config", None) is not None:
        raise NotImplementedError(
            "MXFP4 and FP8 files are converted whole while they load, and this model is split over ranks (tp_plan, "
            f"distributed_config): {FIRST}"
        )
    paths = {Path(file) for file in files}
    source = open_checkpoint(min(paths).parent)
    if set(source.files) != paths:
        others = ", ".join(sorted(path.name for path in paths.symmetric_difference(source.files)))
        raise ValueError(f"{source.folder} has weights of several checkpoints (about {others}): move those that are "
                         "meant, and config.json, to another folder")  # fmt: skip
    importance = None
    if recipe_named(config.recipe).model:
        chosen = [fused[0].model for fused in choose_linears(model, config).fused]
        importance = importance_for_load(source, model, config, chosen)
    with torch.device("cpu"):  # transformers calls with meta as the default
        return unwritten(source, Options(
            config.recipe, config.exclude, dialect=config.dialect, activations=config.activations,
            device=device, importance=importance,
            linears=() if isinstance(config.linears, str) else config.linears,
        ))  # fmt: skip


def ignore_list(source: Checkpoint) -> list[str]:
    """The modules that the config of an NVFP4 checkpoint leaves dense."""
    info = read_config(source.config)
    assert info is not None, "a conversion's config says NVFP4"
    return list(info.ignore)


def where_to_quantize(device_map: Any, gpu: torch.device | None) -> str | None:
    """The device for `open_unwritten`: a GPU that a part of the model goes to. gpu: where all goes after loading."""
    if isinstance(device_map, str):  # "auto" and the like, which transformers has not resolved yet
        return None
    places = [gpu] if gpu is not None else (device_map or {}).values()
    names = [f"cuda:{place}" if str(place).isdecimal() else str(place) for place in places]
    return min((name for name in names if name.startswith("cuda")), default="cpu")


def report_cast(cast: CastSums) -> None:
    """Warn if MXFP4 matrices lost something."""
    if cast.lost:
        logger.warning(
            f"{cast.lost} of {cast.matrices} MXFP4 matrices lost something when they became NVFP4 (a relative error of "
            f"{cast.relative:.3g}): their scales span more powers of two than e4m3 holds"
        )


class UnwrittenConverter(WeightConverter):
    """Tensors of the source's files -> the parameters that are made of the unit they belong to.

    made         the checkpoint that is not written
    conversions  those for loading it, of which transformers asks this one first
    dtypes       of the model's parameters, by name
    """

    def __init__(self, made: Unwritten, model: Any, conversions: list, dtypes: dict[str, torch.dtype]):
        super().__init__([PATTERN], ["down_proj"], [Nothing()], force_cpu=True)  # then each result goes to its device
        self.made, self.state, self.dtypes = made, model.state_dict(), dtypes
        self.prefix: str = model.base_model_prefix
        self.renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self.converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self.known = {pattern: c for c in self.converters for pattern in c.source_patterns}
        # By the parameter under which transformers collects their sources; it joins linears of some (MiniMax-M3)
        self.units: dict[str, list[Unit]] = defaultdict(list)
        self.places: dict[str, str] = {}  # the source's name, after the model's renamings -> that parameter
        for unit in made.units:
            targets = (self._place(name)[0] for name in unit.names)
            target = next((target for target in targets if target in self.state), None)
            if target is None:
                continue  # of a layer that the model does not have
            self.units[target].append(unit)
            renamed = (rename_source_key(source, self.renamings, [])[0] for source in unit.sources)
            self.places |= dict.fromkeys(renamed, target)

    def __deepcopy__(self, memo: dict) -> UnwrittenConverter:
        return copy_of(self)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        target = self.places.get(source_key)
        return (source_key, None) if target is None else (target, PATTERN)

    def _place(self, name: str) -> tuple[str, str | None]:
        """Where transformers puts a tensor of the unwritten checkpoint: see `rename_source_key` there."""
        target, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.state)
        if target not in self.state and name in self.state:
            return name, None
        return target, pattern

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Tensor]:
        self.collected_tensors.clear()  # the jobs read the files themselves
        made: dict[str, Tensor] = {}
        for unit in self.units[layer_name]:
            made |= unit.make(self.made.device)
        found: dict[str, Tensor] = {}
        merging: dict[str, Any] = {}  # converters: they take tensors, too, where transformers declares futures
        for name in sorted(made, key=by_number):
            target, pattern = self._place(name)
            tensor = made.pop(name)
            if target not in self.state:
                loading_info.unexpected_keys.add(target)
            elif pattern is None:
                found[target] = tensor.to(self.dtypes.get(target, tensor.dtype))
            else:
                converter = merging.setdefault(target, deepcopy(self.known[pattern]))
                converter.add_tensor(target, name, pattern, tensor)
        while merging:
            target, converter = merging.popitem()
            found |= converter.convert(target, model, config, hf_quantizer, loading_info)
        return found
