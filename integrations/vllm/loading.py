"""Fill an `NVFP4Experts` from single tensors of a checkpoint, which a server's loader passes on one by one.

Each rank of tensor parallelism keeps its part: rows of gate and up, columns of down. Global scales are those of whole
matrices, so all ranks together hold exactly the bytes that a single rank would.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.quantize.dialects import DIALECTS, Dialect, QuantizationInfo
from moe_nvfp4.quantize.files import TORCH_DTYPES, Checkpoint, TensorSlice, open_checkpoint, read_tensors
from moe_nvfp4.quantize.layouts.nvfp4 import UNREAD
from moe_nvfp4.quantize.names import PER_EXPERT, PLAIN_NAMES, PRE_QUANT_SCALE, is_scale
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, quantize_matrix, recipe_global_scale
from moe_nvfp4.quantize.source import nvfp4_info
from moe_nvfp4.quantize.unwritten import Unwritten
from moe_nvfp4.weights import is_quantized

DENSE = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = {"weight": torch.uint8, "sf": torch.float8_e4m3fn}

OUTSIDE = (
    'comes outside of a reload: replace weights by vLLM\'s collective_rpc("reload_weights", ...) or its weight '
    "transfer, which hand over a layer as a whole"
)
CAST = ": a global scale that is rounded is another one; send it as the files have it"
NO_AWQ = (
    "vLLM has no place for AWQ's pre_quant_scale. Serve the folder with transformers (moe-nvfp4 serve MODEL --engine "
    "transformers), or quantize the original with another recipe"
)
OTHER = "with which this server was started: load files of that form, or start the server again with these"


class ExpertLoader:
    """Puts tensors into `experts`, and in the end checks that none is missing.

    name      the layer's name, for messages
    dialect   how the files name and scale NVFP4 numbers; None: they hold bf16, fp16 or fp32, which is quantized here
    tp        (rank, size) of tensor parallelism
    recipe    how block scales are chosen when dense weights are quantized
    device    where they are quantized; None: where `experts` are
    """

    def __init__(
        self,
        experts: NVFP4Experts,
        name: str,
        dialect: Dialect | None,
        tp: tuple[int, int] = (0, 1),
        recipe: str = DEFAULT_RECIPE,
        device: torch.device | None = None,
    ):
        self.experts, self.name, self.dialect, self.tp, self.recipe = experts, name, dialect, tp, recipe
        self.device = experts.down_proj.device if device is None else device
        self._seen: set[tuple[str, str, int]] = set()  # kind, projection, expert
        self._halves: dict[int, dict[str, Tensor]] = {}  # dense gate or up of an expert, until the other one comes
        # vLLM makes the model's dtype the default
        none = torch.zeros(experts.num_experts, dtype=torch.float32, device="cpu")
        self._input_scales = {"up_proj": none, "down_proj": none.clone()}
        if tp[1] > 1 and experts.intermediate_size % 16:
            raise ValueError(
                f"{name}: a rank of {tp[1]} has {experts.intermediate_size} channels, which is not a multiple of 16, "
                "the NVFP4 block: choose another --tensor-parallel-size, or --enable-expert-parallel"
            )

    def load(self, kind: str, part: str, e: int, tensor: Tensor, where: str) -> None:
        """Take one tensor of expert `e`, which counts the experts of this rank.

        kind   "weight", "sf", "global_scale", "input_scale" or "bias"
        part   "gate_proj", "up_proj" or "down_proj"
        where  the tensor's name, for messages

        ValueError for a tensor of a wrong shape or dtype, or that has come before.
        """
        if (kind, part, e) in self._seen:
            raise ValueError(f"{where} comes twice: two files have it, or it was sent twice. Remove the wrong one")
        if kind in ("global_scale", "input_scale"):
            self._scale(kind, part, e, tensor, where)
        elif kind == "bias":
            self._bias(part, e, tensor, where)
        elif self.dialect is None and kind == "weight":
            self._dense(part, e, tensor, where)
        else:
            if tensor.dtype != DTYPES[kind]:
                raise ValueError(
                    f"{where} has dtype {tensor.dtype}, expected {DTYPES[kind]}: the config calls these experts NVFP4. "
                    "If they are not, name them in its ignore list, or quantize the checkpoint again"
                )
            name = self._stack(part) + ("_sf" if kind == "sf" else "")
            _fill(self._rows(name, part, e), self._of_rank(tensor.view(torch.uint8), part, where), where)
        self._seen.add((kind, part, e))

    def read(self, files: str | os.PathLike | Unwritten, place: Callable[[int], int]) -> None:
        """Take all tensors of this layer from a folder of NVFP4 files, or a checkpoint that is not written, if the
        server's loader passed on none.

        place  an expert's number in the files -> its index on this rank; -1 if it is on another rank
        """
        if self._seen or self.dialect is None:
            return
        kinds = {getattr(self.dialect, kind): kind for kind in ("weight", "sf", "global_scale", "input_scale")}
        layer = self.name[max(self.name.find("layers."), 0) :]  # the names in the files may begin differently
        coming = files if isinstance(files, Unwritten) else None
        source = open_checkpoint(files) if coming is None else coming.checkpoint
        places: dict[str, tuple[str, str, int]] = {}
        for name in source.tensors:
            stem, _, suffix = name.rpartition(".")
            found = PER_EXPERT.fullmatch(stem)
            if found is None or not f".{found['module']}".endswith(f".{layer}"):
                continue
            kind, part, e = (kinds | {"bias": "bias"}).get(suffix), found["part"], place(int(found["e"]))
            if kind is not None and e >= 0:
                places[name] = kind, PLAIN_NAMES.get(part, part), e
        made = {} if coming is None else coming.make(places)
        for name, (kind, part, e) in places.items():
            self.load(kind, part, e, made[name] if name in made else source.tensors[name].tensor(), name)

    def finish(self) -> None:
        """Check that all tensors have come and are valid. ValueError names the first that fails."""
        kinds = ("weight",) if self.dialect is None else ("weight", "sf", "global_scale")
        biases = ("bias",) if self._biased else ()
        for kind, part, e in self._expected(*kinds, *biases):
            if (kind, part, e) not in self._seen:
                raise ValueError(
                    f"{self.name}: {self._file_name(kind, part)} of expert {e} of this rank did not come from the "
                    "files: the checkpoint is incomplete, or vLLM's loader for this model does not pass it on. "
                    "moe-nvfp4 verify FOLDER tells which; transformers reads such folders (docs/serving.md)"
                )
        self._finish_input_scales()
        self.experts.weights.validate(self.name)

    # ---------------------------------------------------------------- one kind of tensor each
    def _scale(self, kind: str, part: str, e: int, tensor: Tensor, where: str) -> None:
        if tensor.numel() != 1 or tensor.dtype != torch.float32:
            stacked = ": stacks of all experts become single ones by moe-nvfp4 quantize SRC DST"
            why = stacked if tensor.dtype == torch.float32 else CAST
            raise ValueError(f"{where} is {tensor.dtype} {list(tensor.shape)}, expected one float32 number{why}")
        scale = self.dialect.decode_scale(tensor.reshape(()))
        if kind == "global_scale":
            self.experts.get_parameter(f"{part}_global_scale").data[e] = scale
            return
        # gate and up read the same rows, and the larger of their scales covers these
        scales = self._input_scales["down_proj" if part == "down_proj" else "up_proj"]
        scales[e] = torch.maximum(scales[e], scale.cpu())

    def _bias(self, part: str, e: int, tensor: Tensor, where: str) -> None:
        if not self._biased:
            raise ValueError(f"{where}: vLLM's model has experts without biases, the files have them")
        rows = self._rows(f"{self._stack(part)}_bias", part, e)
        if part != "down_proj":
            tensor = self._of_rank(tensor, part, where)
        elif self.tp[0] > 0:  # the ranks' results are added, so only rank 0 adds the bias
            tensor = torch.zeros_like(tensor)
        _fill(rows, tensor, where)

    def _dense(self, part: str, e: int, tensor: Tensor, where: str) -> None:
        """Quantize a matrix; gate and up, which share a global scale, only when both have come."""
        if tensor.dtype not in DENSE:
            raise ValueError(
                f"{where} is {tensor.dtype}: bf16, fp16 and fp32 experts are quantized as they are read; "
                "moe-nvfp4 quantize SRC DST reads other formats"
            )
        halves = {part: tensor}
        if part != "down_proj" and self.experts.gate.gated:
            halves = self._halves.setdefault(e, {}) | halves
            self._halves[e] = halves
            if len(halves) < 2:
                return
            halves = {half: self._halves[e][half] for half in ("gate_proj", "up_proj")}
            del self._halves[e]
        there = {half_part: half.to(self.device) for half_part, half in halves.items()}
        amax = torch.stack([half.abs().amax().float() for half in there.values()]).amax()
        rows = torch.cat([self._of_rank(half, half_part, where) for half_part, half in there.items()])
        try:
            codes, sf, scale = quantize_matrix(nvfp4.pad_k(rows), self.recipe, recipe_global_scale(amax, self.recipe))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        name = self._stack(part)
        _fill(self.experts.get_parameter(name).data[e], codes, where)
        _fill(self.experts.get_parameter(f"{name}_sf").data[e], sf.view(torch.uint8), where)
        for half_part in halves:
            self.experts.get_parameter(f"{half_part}_global_scale").data[e] = scale

    def _finish_input_scales(self) -> None:
        """For activations="nvfp4", set the input scales if all have come. If none has, every token gets its own scale.
        ValueError if only some have."""
        wanted = [(part, e) for _, part, e in self._expected("input_scale")]
        missing = [key for key in wanted if ("input_scale", *key) not in self._seen]
        if not is_quantized(self.experts.activations) or len(missing) == len(wanted):
            return
        if missing:
            part, e = missing[0]
            raise ValueError(
                f"{self.name}: {self._file_name('input_scale', part)} of expert {e} of this rank is not in the files, "
                "and others are: calibrate the checkpoint again (moe-nvfp4 calibrate), or serve it with "
                """--hf-overrides '{"moe_nvfp4": {"activations": "bf16"}}'"""
            )
        for part, scales in self._input_scales.items():
            scales = nn.Parameter(scales.to(self.experts.down_proj.device), requires_grad=False)
            self.experts.register_parameter(f"{part}_input_scale", scales)

    # ---------------------------------------------------------------- places
    @property
    def _biased(self) -> bool:
        return hasattr(self.experts, "down_proj_bias")

    def _expected(self, *kinds: str) -> Iterator[tuple[str, str, int]]:
        for kind in kinds:
            for part in self.experts.projections:
                for e in range(self.experts.num_experts):
                    yield kind, part, e

    def _file_name(self, kind: str, part: str) -> str:
        known = self.dialect is not None and kind != "bias"
        return f"{part}.{getattr(self.dialect, kind) if known else kind}"

    def _stack(self, part: str) -> str:
        return "down_proj" if part == "down_proj" else self.experts.up_name

    def _rows(self, name: str, part: str, e: int) -> Tensor:
        """The rows of one projection of expert `e` in the parameter `name`."""
        rows = self.experts.get_parameter(name).data[e]
        if part == "down_proj" or not self.experts.gate.gated:
            return rows
        return rows.chunk(2)[("gate_proj", "up_proj").index(part)]

    def _of_rank(self, tensor: Tensor, part: str, where: str) -> Tensor:
        """This rank's rows of gate and up, or columns of down."""
        rank, size = self.tp
        if size == 1:
            return tensor
        dim = 1 if part == "down_proj" else 0
        if tensor.dim() <= dim or tensor.shape[dim] % size:
            raise ValueError(f"{where} has shape {list(tensor.shape)}, which {size} ranks cannot share evenly")
        width = tensor.shape[dim] // size
        return tensor.narrow(dim, rank * width, width).contiguous()


def refresh(here: nn.Module, new: nn.Module, name: str) -> None:
    """Copy the weights of `new` to where those of `here` are, which CUDA graphs know; both are in the layout of their
    kernels. NotImplementedError, and nothing is changed, unless they have the same parameters."""
    old, fresh = dict(here.named_parameters()), dict(new.named_parameters())
    shapes = [{key: (p.shape, p.dtype) for key, p in found.items()} for found in (old, fresh)]
    if shapes[0] != shapes[1]:
        differ = sorted(key for key in {**old, **fresh} if shapes[0].get(key) != shapes[1].get(key))
        raise NotImplementedError(
            f"{name}: the new weights have another form than those that they would replace ({', '.join(differ)}): "
            "start the server again with them"
        )
    for key, p in old.items():
        p.data.copy_(fresh[key].data)


def check_rows(where: str, tensor: Tensor, sizes: list[int], shard: Any, ranks: int) -> None:
    """ValueError if a tensor has more rows than its part of a fused linear: vLLM's loaders would cut them off.

    sizes  rows of each part on one of the `ranks`
    shard  whose the tensor is, as vLLM says it: "q", "k", "v", a number, several, or None, for all
    """
    shards = range(len(sizes)) if shard is None else shard if isinstance(shard, tuple) else (shard,)
    rows = ranks * sum(sizes["qkv".index(i) if isinstance(i, str) else i] for i in shards)
    if tensor.shape[0] > rows:
        raise ValueError(
            f"{where} is {tensor.dtype} {list(tensor.shape)}, the model's config needs {rows} rows: config.json and "
            "the weights are not of one model"
        )


def _fill(place: Tensor, tensor: Tensor, where: str) -> None:
    if place.shape != tensor.shape:
        raise ValueError(
            f"{where} has shape {list(tensor.shape)} on this rank, the model's config needs {list(place.shape)}: "
            "config.json and the weights are not of one model"
        )
    place.copy_(tensor)


def check_form(name: str, dtype: torch.dtype | None, info: QuantizationInfo | None) -> None:
    """ValueError if a tensor that is loaded again is of another form than what a running server has for it.

    dtype  None: one that torch does not have
    info   what the config of the files said with which the server was started; None: their experts were bf16
    """
    stem, _, suffix = name.rpartition(".")
    packed = [d for d in DIALECTS.values() if suffix == d.global_scale or (suffix == d.weight and dtype == torch.uint8)]
    dense = suffix == "weight" and dtype in DENSE and PER_EXPERT.fullmatch(stem)
    wanted = "dense" if info is None or info.ignores(stem) else f"NVFP4 of {info.dialect.name}"
    found = f"NVFP4 of {packed[0].name}" if packed else "dense" if dense else wanted
    if found != wanted:
        raise ValueError(
            f"{name} comes as {found}, and {stem} is {wanted} in the files with which this server was started: load "
            "files of that form (moe-nvfp4 quantize SRC DST --dialect ...), or start the server again with these"
        )


def folder_of(model: str, revision: str | None, cache: str | None = None) -> str:
    """The folder of a model: its own, or one with the config and the safetensors files that the Hub has under its name.

    cache  vLLM's --download-dir
    """
    if os.path.isdir(model) or "://" in model:  # object storage, from which vLLM streams
        return model
    from huggingface_hub import snapshot_download

    return snapshot_download(
        model, revision=revision, cache_dir=cache, allow_patterns=["*.safetensors", "*.json"], ignore_patterns="*/*"
    )


def opened(model: str | os.PathLike) -> Checkpoint | None:
    """The checkpoint in a local folder; None where no safetensors files are. ValueError unless it is whole."""
    folder = Path(model)
    if not (found := sorted(folder.glob("*.safetensors"))):
        return None
    if not (folder / "config.json").is_file() and (folder / "params.json").is_file():  # Mistral's own format
        return Checkpoint(folder, {}, read_tensors(found))
    return open_checkpoint(folder)


def check_folder(
    folder: str | os.PathLike, info: QuantizationInfo | None, before: str | os.PathLike, made_for: str | None = None
) -> None:
    """`check_form` of all tensors of a folder, by their headers; and ValueError if they differ in shape from those of
    the folder `before`, if a matrix that is NVFP4 there is not, or if the files were made for other activations. Either
    may be no folder of safetensors.

    made_for  the activations of the files with which the server was started; None: it was told which to use
    """
    if (new := opened(folder)) is None or not (tensors := new.tensors):
        return
    for name, stored in tensors.items():
        check_form(name, TORCH_DTYPES.get(stored.dtype), info)
    if info is not None:
        _check_scales(tensors, info.dialect)
    now = _activations(new)
    if None not in (made_for, now) and made_for != now:
        raise ValueError(f"{folder} was made for activations {now!r}, and the files for {made_for!r} {OTHER}")
    if (server := opened(before)) is None or not server.tensors:
        return
    for name, old in server.tensors.items():
        if name not in tensors and info is not None and name.endswith(f".{info.dialect.global_scale}"):
            raise ValueError(f"{folder} lacks {name}, which {before} has, {OTHER}")
        if name in tensors and tensors[name].shape != old.shape:
            shapes = list(tensors[name].shape), list(old.shape)
            raise ValueError(f"{name} is {shapes[0]} in {folder}, and {shapes[1]} in {before}, {OTHER}")


def _activations(files: Checkpoint) -> str | None:
    """The activations that NVFP4 files were made for; None if their config does not say."""
    info = nvfp4_info(files)
    return None if info is None else files.own.get("activations", info.activations)


def checked(tensors: Iterable[tuple[str, Tensor]], info: QuantizationInfo | None) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, each after `check_form`."""
    for name, tensor in tensors:
        check_form(name, tensor.dtype, info)
        yield name, tensor


def dense_names(source: Checkpoint, info: QuantizationInfo) -> list[str]:
    """The matrices of files that their config's ignore list leaves dense, as the files name them; experts by the name
    of all."""
    found = {}
    for name, stored in source.tensors.items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "weight" and TORCH_DTYPES.get(stored.dtype) in DENSE and len(stored.shape) == 2:
            expert = PER_EXPERT.fullmatch(stem)
            found[expert["module"] if expert else stem] = stem
    return [name for name, stem in found.items() if info.ignores(stem)]


def check_files(source: Checkpoint, info: QuantizationInfo, whole: bool = True) -> None:
    """Compare the headers of a folder with its config, before a worker reads it.

    whole  whether these are all that there will be: vLLM downloads the rest of a model on the Hub

    ValueError unless every NVFP4 matrix of an expert has codes, block scales and a global scale, if they are `whole`,
    and for a scale that nothing reads.
    """
    folder, tensors = source.folder, source.tensors
    d = info.dialect
    _check_scales(tensors, d)
    if not whole:
        return
    wanted = {d.weight: "U8", d.sf: "F8_E4M3", d.global_scale: "F32"}
    for name, found in tensors.items():
        stem, _, suffix = name.rpartition(".")
        codes = suffix == d.weight and found.dtype == "U8" and PER_EXPERT.fullmatch(stem)  # a linear's may be others'
        if not (codes or suffix == d.global_scale) or info.ignores(stem):
            continue
        for last, dtype in wanted.items():
            stored = tensors.get(f"{stem}.{last}")
            if stored is None:
                raise ValueError(
                    f"{folder}: {stem}.{last} is missing: every NVFP4 matrix has codes, block scales and a global "
                    "scale. Download the folder again, or quantize again"
                )
            if stored.dtype != dtype:
                raise ValueError(
                    f"{folder}: {stem}.{last} has dtype {stored.dtype}, expected {dtype}: the config calls this "
                    "NVFP4. If it is not, name it in the config's ignore list; else download the folder again"
                )


def check_others(folder: str | os.PathLike, load_format: str) -> None:
    """ValueError if vLLM, with this --load-format, would read other files of a local folder than those of its
    checkpoint: it takes a tensor from whatever file comes last."""
    names = {path.name for path in Path(folder).glob("*.safetensors")}
    of_mistral = {name for name in names if name.startswith("consolidated")}
    if load_format == "mistral" or not names - of_mistral:
        return
    if of_mistral and load_format == "auto":
        raise ValueError(
            f"{folder}: vLLM would read {min(of_mistral)} in place of {min(names - of_mistral)}: move one of them to "
            "another folder, or add --load-format mistral to have the former read"
        )
    others = names - {"model.safetensors"}
    if others != names and others and not Path(folder, "model.safetensors.index.json").is_file():
        raise ValueError(
            f"{folder}: vLLM would read {min(others)} beside model.safetensors, as there is no index, and take from "
            "either what both have: move it to another folder"
        )


def _check_scales(tensors: Mapping[str, TensorSlice], dialect: Dialect) -> None:
    """ValueError for a scale beside an NVFP4 or a dense weight that is none of its format, and NotImplementedError for
    AWQ's: loaders of some of vLLM's models (gpt-oss) pass over names that they do not know."""
    for name in (name for name in tensors if is_scale(name, tensors)):
        stem, _, last = name.rpartition(".")
        if f"{stem}.{dialect.global_scale}" in tensors:
            if last == PRE_QUANT_SCALE:
                raise NotImplementedError(f"{name}: {NO_AWQ}")
            read = last in dialect.suffixes
        else:
            weight = tensors.get(f"{stem}.weight")
            read = weight is None or TORCH_DTYPES.get(weight.dtype) not in DENSE
        if not read:
            raise ValueError(UNREAD.format(name))
