"""What checkpoint files hold for a model: read from their headers, before anything is built or loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import logging

from moe_nvfp4.quantize.dialects import GLOBAL_SCALES, MODELOPT, Dialect, dialect_of_files
from moe_nvfp4.quantize.files import (
    INDEX,
    Checkpoint,
    TensorSlice,
    open_checkpoint,
    read_header,
    read_json,
    read_tensors,
    without_identity_experts,
)
from moe_nvfp4.quantize.layouts import ExpertLayout, nvfp4
from moe_nvfp4.quantize.layouts.base import Given
from moe_nvfp4.quantize.model import ModelTensors
from moe_nvfp4.quantize.names import DENSE, KV_SCALE, PER_EXPERT, PRE_QUANT_SCALE, is_mtp, is_scale, mtp_layer
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.settings import language_config
from moe_nvfp4.quantize.unwritten import unwritten

logger = logging.get_logger(__name__)

# Names of experts' tensors. Expert 0 stands for all: the others have the same layout
EXPERT = re.compile(r"\bexperts\.(\w+\.)?(?P<e>\d+)\.")
OTHER_EXPERT = re.compile(r"\bexperts\.(\w+\.)?[1-9]\d*\.")
NO_STATIC = (
    "the static activation scales of experts are left out, and not saved either, because {}: W4A16 does not need them, "
    "and calibrate(model, batches) makes new ones"
)


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear that the files hold quantized.

    module  its name in the model
    source  its name in the files, after the model's renamings
    kind    "nvfp4" or "fp8"
    also    the optional tensors that are there: input_scale, pre_quant_scale
    """

    module: str
    source: str
    kind: str
    also: frozenset[str] = frozenset()


@dataclass
class CheckpointLayout:
    """What 4-bit files hold.

    experts          module name -> ExpertLayout, of the modules that the files have tensors of
    linears          module name -> QuantizedLinear
    input_scale      whether the experts have static activation scales
    pre_quant_scale  whether the experts have AWQ's scales
    kv_scales        names of the scales of a quantized KV cache
    left_out         names of static activation scales that only some experts have; W4A16 does not need them
    """

    dialect: Dialect = MODELOPT
    experts: dict[str, ExpertLayout] = field(default_factory=dict)
    linears: dict[str, QuantizedLinear] = field(default_factory=dict)
    input_scale: bool = False
    pre_quant_scale: bool = False
    kv_scales: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def open_files(files: Iterable[str | os.PathLike], model: Any) -> Checkpoint:
    """The files that transformers is about to load into `model`. ValueError where a sharded checkpoint is beside them,
    which may be the newer one: saving one leaves an older model.safetensors, and transformers prefers that."""
    paths = [Path(file) for file in files]
    index = paths[0].with_name(INDEX) if [path.name for path in paths] == ["model.safetensors"] else None
    if index is not None and index.is_file():
        shards = {index.with_name(str(name)) for name in (read_json(index).get("weight_map") or {}).values()}
        if paths[0] not in shards and all(shard.is_file() for shard in shards):
            raise ValueError(f"{index.parent} has model.safetensors and {INDEX}: two checkpoints are mixed; keep one "
                             "of them")  # fmt: skip
    config = model.config.to_dict()
    return Checkpoint(Path(), config, without_identity_experts(read_tensors(paths), config))


def is_nvfp4(tensors: Iterable[str]) -> bool:
    """Whether the files hold NVFP4 weights, in any dialect."""
    return any(key.endswith(GLOBAL_SCALES) for key in tensors)


def check_dense(source: Checkpoint, model: nn.Module, quantizing: bool = False) -> None:
    """ValueError unless the files have all tensors of `model`, in which transformers would put random numbers, and no
    scale of a weight that is quantized already. quantizing: as in `ModelTensors.check`."""
    tensors, names = source.tensors, ModelTensors(model)
    _refuse_scales(tensors, names)
    names.check(nvfp4.dense_given(tensors), quantizing)


def read_layout(
    source: Checkpoint,
    model: nn.Module,
    experts: Iterable[str],
    activations: str = "nvfp4",
    quantizing: bool = False,
) -> CheckpointLayout:
    """What 4-bit files hold for `model`, which still has its dense modules. experts: the names of its experts modules;
    quantizing: as in `ModelTensors.check`.

    Raises NotImplementedError for quantized weights that go through a converter of the model; ValueError for files that
    are damaged or incomplete, and for tensors of the model that are missing or have another shape.
    """
    tensors = source.tensors
    dialect = dialect_of_files(tensors) or MODELOPT  # parameters under their own names, which are saved as ModelOpt's
    names, layers = ModelTensors(model), layers_of(model)
    has = lambda module: names.experts_module(module) is not None or is_mtp(f"{module}.", layers)
    files = nvfp4.read(source, dialect, activations != "bf16", has)
    found = CheckpointLayout(dialect)
    found.input_scale, found.pre_quant_scale = map(files.experts_have, (dialect.input_scale, PRE_QUANT_SCALE))
    found.left_out = [] if found.input_scale else files.of_experts(dialect.input_scale)
    found.kv_scales = [name for name in tensors if KV_SCALE.search(name)]
    owners = sorted(experts, key=len, reverse=True)  # a module before one that contains it
    for name, layout in _weights(files):
        target, pattern = names.place(name)
        owner = next((n for n in owners if target == n or target.startswith(f"{n}.")), None)
        if owner is None:
            if layout in (ExpertLayout.ONE_BY_ONE, ExpertLayout.FP8):
                _add_linear(found, model, names, files, name)
            continue
        one_by_one = PER_EXPERT.fullmatch(name.removesuffix(".weight")) is not None
        if layout is ExpertLayout.FP8 and not one_by_one:
            raise ValueError(f"{name} is FP8: such experts are read where each has a tensor of its own, "
                             "experts.E.gate_proj.weight; use the original checkpoint")  # fmt: skip
        if found.experts.get(owner, ExpertLayout.DENSE) is ExpertLayout.DENSE:
            unread = layout is ExpertLayout.DENSE and pattern is None and target not in names.state
            found.experts[owner] = ExpertLayout.SINGLE if unread and one_by_one else layout
    _refuse_scales(files.left, names)
    given = files.given()
    for owner in (name for name, layout in found.experts.items() if layout is ExpertLayout.PARAMETERS):
        for inner, _ in model.get_submodule(owner).named_children():  # DBRX's dense weights, for which ours stand
            given |= {n: Given("NVFP4", None, "") for n in names.state if n.startswith(f"{owner}.{inner}.")}
    names.check(given, quantizing)
    return found


def check_reached(
    source: Checkpoint, model: nn.Module, conversions: list, made: Collection[str], converted: Collection[str]
) -> None:
    """ValueError if `conversions` fill a tensor of `model` from no tensor of the files: transformers would initialize
    it, or leave what is in memory.

    made       tensors that come with others
    converted  tensors that a converter must make: as they are in the files, they would be wrong numbers
    """
    names = ModelTensors(model, conversions)
    reached = names.reached((name for name in source.tensors if not OTHER_EXPERT.search(name)), converted)
    if missing := sorted(set(names.missing(reached)).difference(made)):
        raise ValueError(
            f"nothing in the checkpoint gives {missing[0]}: its tensors are named in a way that is not known for "
            f"{type(model).__name__}, or key_mapping renames them to something else; use the original checkpoint, or "
            "the tool that wrote this one"
        )


def _weights(files: nvfp4.NVFP4Files) -> Iterator[tuple[str, ExpertLayout]]:
    """(name in a dense checkpoint, layout) of every weight; of experts only number 0. Linears count as one by one."""
    matrices = (m for m in files.matrices.values() if not OTHER_EXPERT.search(f"{m.stem}."))
    yield from ((m.dense_name, m.layout) for m in matrices)
    yield from ((name, ExpertLayout.FP8) for name in files.fp8 if not OTHER_EXPERT.search(name))
    yield from ((name, ExpertLayout.PARAMETERS) for name in files.parameters if name.endswith("_proj_sf"))
    yield from ((name, ExpertLayout.DENSE) for name in files.dense_weights() if not OTHER_EXPERT.search(name))


def _add_linear(found: CheckpointLayout, model: Any, names: ModelTensors, files: nvfp4.NVFP4Files, name: str) -> None:
    """Add the quantized linear that the files call `name` to `found`, if the model has it."""
    target, pattern = names.place(name)
    linear = target.removesuffix(".weight")
    module = dict(model.named_modules()).get(linear)
    if module is None:
        return
    if pattern is not None or getattr(module, "weight", None) is None:
        raise NotImplementedError(
            f"{name} is quantized, but {type(model).__name__} rearranges it while it loads (or has no weight there), "
            "which is not known here: use a checkpoint in which this layer is dense"
        )
    if not names.renames_module(name.removesuffix(".weight")):
        raise NotImplementedError(
            f"{name} is quantized, but {type(model).__name__} renames it while it loads, and not the scales beside it: "
            "use a checkpoint in which this layer is dense"
        )
    if f"{linear}.weight" in names.tied:
        raise ValueError(
            f"{linear} is quantized in the files, but config.json ties it to the embedding: set tie_word_embeddings to "
            "false there, or use files that agree with their config"
        )
    source = names.renamed(name).removesuffix(".weight")
    matrix = files.matrices.get(name.removesuffix(".weight"))
    also = frozenset() if matrix is None else {found.dialect.input_scale, PRE_QUANT_SCALE} & matrix.tensors.keys()
    found.linears[linear] = QuantizedLinear(linear, source, "fp8" if matrix is None else "nvfp4", frozenset(also))


def _refuse_scales(tensors: Mapping[str, TensorSlice], names: ModelTensors) -> None:
    """ValueError for a scale among `tensors` that the model neither has nor ignores on purpose."""
    for name in tensors:
        if is_scale(name, tensors) and not names.ignores(name) and names.place(name)[0] not in names.state:
            raise ValueError(nvfp4.UNREAD.format(name))


# ---------------------------------------------------------------- layers that are not a part of the model
@dataclass(frozen=True)
class MtpTensors:
    """The tensors of multi-token prediction layers: a model leaves them out, and generate(use_mtp=True) reads them.

    names  of the tensors
    dense  those that are dense matrices, without `.weight`
    files  that hold them, or all of the checkpoint, with `convert`: path -> its size and time when the model was loaded
    convert  whether the files are of another format, of which a conversion makes dense tensors
    layers   how many layers the model had when it was loaded: theirs may be the next number
    """

    names: tuple[str, ...] = ()
    dense: frozenset[str] = frozenset()
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    convert: bool = False
    layers: int | None = None

    def lost(self, model: Any) -> str | None:
        """Why the tensors cannot be saved with `model`; None: they can."""
        if (now := layers_of(model)) != self.layers and not all(is_mtp(name, None) for name in self.names):
            return f"the model has {now} layers, and had {self.layers} when it was loaded"
        for path, before in self.files.items():
            if not Path(path).is_file():
                return f"{path}, which the model was loaded from, is gone"
            if _size_and_time(path) != before:
                return f"{path}, which the model was loaded from, holds something else now"
        return None

    def read(self) -> dict[str, Tensor]:
        """Copies of the tensors by name; copies, as the files may be overwritten."""
        found: dict[str, Tensor] = {}
        if self.convert:
            source = open_checkpoint(Path(next(iter(self.files))).parent)
            found = unwritten(source, Options("max", device="cpu")).make(self.names)  # dense with any recipe
        for path in self.files:
            with safe_open(path, "pt") as file:
                here = set(self.names).difference(found).intersection(file.keys())
                found |= {name: file.get_tensor(name).clone() for name in here}
        return found

    def written(self, folder: str | os.PathLike) -> MtpTensors:
        """The same, after they were saved in `folder`, which may be where they were loaded from."""
        home = Path(folder).resolve()
        if all(Path(path).parent.resolve() != home for path in self.files):
            return self
        new = [path for path in home.glob("*.safetensors") if not read_header(path)[0].keys().isdisjoint(self.names)]
        return replace(self, files={str(path): _size_and_time(path) for path in new}, convert=False)


def _size_and_time(path: str | os.PathLike) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def layers_of(model: Any) -> int | None:
    """The number of layers of the language model, without those of multi-token prediction."""
    return getattr(language_config(model.config), "num_hidden_layers", None)


def mtp_tensors(
    model: Any, tensors: Mapping[str, TensorSlice], files: Iterable[str | os.PathLike], convert: bool = False
) -> MtpTensors:
    """Those of `tensors` that `model` ignores, named "mtp" or belonging to layers after the last. They lie in
    `files`; convert: or a conversion makes them of these.

    Many classes ignore the layer of one release by its number, or none: has a layer after the last, or one named "mtp",
    an eh_proj, `model` ignores it from here on.
    """
    layers = layers_of(model)
    of = {name: layer for name in tensors if (layer := mtp_layer(name, layers))}
    for layer in {layer for name, layer in of.items() if name.endswith(".eh_proj.weight")}:
        leave_out(model, rf"^{re.escape(layer)}\.")
    patterns = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    names = [name for name in of if any(p.search(name) for p in patterns)]
    dense = [n for n in names if tensors[n].dtype in DENSE and len(tensors[n].shape) == 2]
    stems = frozenset(n.removesuffix(".weight") for n in dense)
    paths = files if convert else sorted({tensors[name].file for name in names})
    return MtpTensors(tuple(names), stems, {str(path): _size_and_time(path) for path in paths}, convert, layers)


def report_unused(model: Any, found: CheckpointLayout, mtp: MtpTensors, tensors: Mapping[str, TensorSlice]) -> None:
    """Warn about what the files, with `tensors`, hold and this model does not use."""
    if packed := [name for name in mtp.names if name.endswith(GLOBAL_SCALES)]:
        logger.warning(
            f"the files' layers of multi-token prediction are 4-bit ({packed[0]}, ...), and transformers reads them as "
            "dense: generate(use_mtp=True) ends in an error about sizes; without it all is well"
        )
    if fp8 := [name for name in mtp.names if name in tensors and tensors[name].dtype.startswith("F8")]:
        logger.warning(
            f"the files' layers of multi-token prediction are FP8 ({fp8[0]}, ...), and transformers reads them without "
            "their scales: generate(use_mtp=True) refuses its own drafts, and is slower than without it. moe-nvfp4 "
            "quantize SRC DST writes them dense, and from DST drafts are right"
        )
    if found.kv_scales:
        keys = found.kv_scales
        logger.warning(
            f"{len(keys)} scales of a quantized KV cache are left out ({keys[0]}, ...): transformers keeps its cache "
            "in the model's dtype, which needs none"
        )
        leave_out(model, KV_SCALE.pattern)
    if found.left_out:
        logger.warning(NO_STATIC.format("some experts have none"))
        leave_out(model, rf"{found.dialect.input_scale}$")
    fp8 = [linear.module for linear in found.linears.values() if linear.kind == "fp8"]
    if fp8:
        logger.warning(f"{len(fp8)} FP8 linears are made dense ({fp8[0]}, ...); their inputs are not rounded to FP8")
    if fp8 := [name for name, layout in found.experts.items() if layout is ExpertLayout.FP8]:
        logger.warning(f"the FP8 experts of {len(fp8)} layers are made dense ({fp8[0]}, ...)")


def leave_out(model: Any, names: str) -> None:
    """Keep transformers from reporting tensors of the files whose names match the expression `names`."""
    ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    model._keys_to_ignore_on_load_unexpected = ignored | {names}
