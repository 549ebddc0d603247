"""A checkpoint's folder: config.json, the index, and where each tensor lies.

Indexes come from strangers, so their file names and entries are checked before use.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import NoneType

import torch
from torch import Tensor

from moe_nvfp4.quantize.files.headers import TORCH_DTYPES, named_errors, read_header, twice

INDEX = "model.safetensors.index.json"
EXPERT_COUNTS = r"(moe_)?(num|n)_(local_|routed_)?experts"  # keys of configs
# Keys of configs, the number of experts per token. It is a list where layers differ.
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
# Keys of rope_parameters, or of configs if they begin with rope_: numbers, or lists of them
ROPE_NUMBERS = r"\w*theta|\w*factor|\w*freq|beta_(fast|slow)|mscale\w*|original_max_position_embeddings"
NAMED_WEIGHTS = "transformers_weights"  # the key of a config for the file that is loaded in place of the usual one
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")  # where there is no safetensors file of a usual name
ENDS = 64  # bytes that `Checkpoint.state` reads at each end of a tensor


@dataclass(frozen=True)
class TensorSlice:
    """Where a tensor lies: `size` bytes of `file` from byte `start` on."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self, offset: int = 0, size: int | None = None) -> Tensor:
        """Read bytes of the tensor from the file: uint8 [size]. OSError where it cannot be read."""
        size = self.size - offset if size is None else size
        data = torch.empty(size, dtype=torch.uint8, device="cpu")
        view, done = data.numpy().data, 0
        with open(self.file, "rb", buffering=0) as f, named_errors(self.file):
            f.seek(self.start + offset)
            while done < size:
                count = f.readinto(view[done:])
                if not count:
                    raise OSError(f"{self.file} became shorter while it was read: download it again")
                done += count
        return data

    def reader(self) -> Callable[[int, int], Tensor]:
        """A function read(offset, size) -> uint8 [size], for reading the tensor piece by piece."""
        return self.read

    @property
    def held(self) -> int:
        """Bytes of memory that a reader holds."""
        return 0

    def tensor(self) -> Tensor:
        return self.read().view(TORCH_DTYPES[self.dtype]).reshape(self.shape)

    def rows(self, first: int, count: int) -> TensorSlice:
        """Rows `first` to `first + count`."""
        width = self.size // self.shape[0]
        return TensorSlice(self.file, self.dtype, (count, *self.shape[1:]), self.start + first * width, count * width)

    def expert(self, e: int) -> TensorSlice:
        """Expert e of a stack [E, ...]."""
        return replace(self.rows(e, 1), shape=self.shape[1:])


@dataclass(frozen=True)
class TensorView(TensorSlice):
    """view(whole), whose elements are not contiguous in the file: a read takes all of `whole` into memory."""

    whole: TensorSlice
    view: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, whole: TensorSlice, view: Callable[[Tensor], Tensor]) -> TensorView:
        like = view(torch.empty(whole.shape, dtype=TORCH_DTYPES[whole.dtype], device="meta"))
        return cls(whole.file, whole.dtype, tuple(like.shape), whole.start, like.nbytes, whole, view)

    def reader(self) -> Callable[[int, int], Tensor]:
        data = self.view(self.whole.tensor()).contiguous().view(-1).view(torch.uint8)
        return lambda offset, size: data[offset : offset + size]

    def read(self, offset: int = 0, size: int | None = None) -> Tensor:
        return self.reader()(offset, self.size - offset if size is None else size)

    @property
    def held(self) -> int:
        return self.whole.size + self.size


def read_tensors(files: Iterable[str | os.PathLike]) -> dict[str, TensorSlice]:
    """Where the tensors of safetensors files lie, by name. No data is read, and other files (.bin) are skipped.

    ValueError for a file that is truncated or is not safetensors, and for a tensor that two files hold.
    """
    tensors: dict[str, TensorSlice] = {}
    for path in (path for path in map(Path, files) if path.suffix == ".safetensors"):
        header, data = read_header(path)
        for name, info in header.items():
            begin, end = info["data_offsets"]
            if name in tensors:
                raise ValueError(twice(name, tensors[name].file, path))
            tensors[name] = TensorSlice(path, info["dtype"], tuple(info["shape"]), data + begin, end - begin)
    return tensors


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and safetensors files. ignored: weight files that do not belong to the checkpoint;
    index: the file that says which tensor is in which shard, if there is one; unread: tensors of identity experts,
    which only a dense class of transformers needs."""

    folder: Path
    config: dict
    tensors: dict[str, TensorSlice]
    files: tuple[Path, ...] = ()
    ignored: tuple[Path, ...] = ()
    index: Path | None = None
    unread: dict[str, TensorSlice] = field(default_factory=dict)

    @property
    def own(self) -> dict:
        """What this library has written into the quantization_config of its own files; empty for those of others."""
        return (self.config.get("quantization_config") or {}).get("moe_nvfp4") or {}

    @property
    def types(self) -> list[str]:
        """Every model_type in the config, the outermost first."""
        return [c["model_type"] for c in sub_configs(self.config) if isinstance(c.get("model_type"), str)]

    @property
    def layers(self) -> int | None:
        """num_hidden_layers of the model that has experts: in the config, the largest of the parts that name experts (a
        tower may have more layers, as Step-3.7's), or else of all; None: there is none. Of Nemotron-H transformers
        saves a list of the layers in its place."""
        of_experts = (c for c in sub_configs(self.config) if any(re.fullmatch(EXPERT_COUNTS, key) for key in c))
        counts = (c.get("num_hidden_layers") or c.get("layers_block_type") for c in of_experts)
        found = {len(n) if isinstance(n, list) else n for n in counts if isinstance(n, int | list)}
        return max(found or sizes(self.config, "num_hidden_layers"), default=None)

    def state(self) -> list:
        """A fingerprint of the files that does not read all of them: sizes in bytes, modification times in ns, and one
        sha256 of the first and last bytes of all tensors, which may change where sizes and times do not."""
        of_tensors = dict.fromkeys(t.file for t in self.tensors.values())  # where no folder was opened
        files = (*self.files, self.folder / "config.json") if self.files else of_tensors
        stats = [(f.name, f.stat()) for f in files]
        ends = hashlib.sha256()
        for path, tensors in groupby(self.tensors.values(), lambda t: t.file):  # one at a time: there may be thousands
            with open(path, "rb", buffering=0) as file:
                for t in tensors:
                    for at in (t.start, max(t.start, t.start + t.size - ENDS)):
                        file.seek(at)
                        ends.update(file.read(min(ENDS, t.size)))
        return [*([name, s.st_size, s.st_mtime_ns] for name, s in stats), ends.hexdigest()]

    def check_state(self, before: list) -> None:
        """ValueError unless the files are what they were when `before` was their `state`."""
        if self.state() != before:
            where = self.folder if self.files else next(iter(self.tensors.values())).file.parent
            raise ValueError(f"{where} changed while it was read: run the same command again")


def sub_configs(config: Mapping) -> list[Mapping]:
    """A config and its sub-configs (text_config, thinker_config, "07" in per_layer_config, ...), all the way down."""
    found = [config]
    for key, value in config.items():
        inside = str(key).isdecimal() or key.endswith("config") and key != "quantization_config"
        if isinstance(value, Mapping) and inside:
            found += sub_configs(value)
    return found


def sizes(config: Mapping, name: str) -> set[int]:
    """All integers in a config and its sub-configs whose key matches the regular expression `name`."""
    configs = sub_configs(config)
    return {n for c in configs for key, n in c.items() if type(n) is int and re.fullmatch(name, key)}


def expert_counts(config: Mapping) -> set[int]:
    """All numbers of experts that a config and its sub-configs name."""
    return sizes(config, EXPERT_COUNTS)


def open_checkpoint(folder: str | os.PathLike) -> Checkpoint:
    """What a folder holds, from config.json, the index and the headers; no weights are read.

    ValueError where these disagree or are damaged, naming the file, the rule and the way out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist or is not a folder: name the folder of a checkpoint")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: name the folder of a Hugging Face checkpoint")
    config = _read_config(folder / "config.json")
    found = sorted(folder.glob("*.safetensors"))
    files, path, index = _weight_files(folder, config, found)
    tensors = read_tensors(files)
    if path is not None:
        _check_index(path, index, tensors)
    if config.get(NAMED_WEIGHTS) is None:
        _check_usual(path or files[0])
    _check_sizes(folder / "config.json", config, {name: t.shape for name, t in tensors.items()})
    read = without_identity_experts(tensors, config)
    unread = {name: stored for name, stored in tensors.items() if name not in read}
    return Checkpoint(folder, config, read, files, tuple(p for p in found if p not in files), path, unread)


def _weight_files(folder: Path, config: Mapping, found: list[Path]) -> tuple[tuple[Path, ...], Path | None, dict]:
    """The files of the model among all that were `found`, the path of their index (None: they are one file), and what
    it says. ValueError where these disagree."""
    named = _named_weights(folder, config)
    path = _find_index(folder) if named is None else named if named.suffix == ".json" else None
    if path is not None and (index := _read_index(path, found if named is None else [])):
        return tuple(sorted({folder / name for name in index.values()})), path, index
    return _single(folder, found) if named is None else (named,), None, {}


def identity_experts(config: Mapping) -> range:
    """The numbers of the experts that return their input: LongCat's, after the routed ones."""
    for part in sub_configs(config):
        routed, identity = part.get("n_routed_experts"), part.get("zero_expert_num")
        if type(routed) is int and type(identity) is int:
            return range(routed, routed + identity)
    return range(0)


def without_identity_experts(tensors: dict[str, TensorSlice], config: Mapping) -> dict[str, TensorSlice]:
    """`tensors` without gate and up of identity experts: transformers' class has and saves these, and reads none."""
    unused, last = identity_experts(config), re.compile(r".*\.experts\.(\d+)\.(?:gate|up)_proj\.weight(_scale_inv)?")
    if not unused:
        return tensors
    return {name: t for name, t in tensors.items() if not ((m := last.fullmatch(name)) and int(m[1]) in unused)}


def check_config(folder: str | os.PathLike) -> None:
    """ValueError if config.json in `folder` has an entry of another type than its name says, or names sizes that the
    safetensors files there cannot have. To be asked before transformers makes lists and modules of what it says.
    """
    path = Path(folder, "config.json")
    config = _read_config(path)
    try:
        files, *_ = _weight_files(path.parent, config, sorted(path.parent.glob("*.safetensors")))
    except ValueError:  # whoever loads them says so
        files = ()
    _check_sizes(path, config, {name: t.shape for name, t in read_tensors(files).items()})


def _check_sizes(path: Path, config: Mapping, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError if the config in `path` names far larger sizes than the tensors of these shapes have: building such a
    model takes minutes and gigabytes, whatever is in the files. shapes: empty if there are no files."""
    last = max((int(n) for name in shapes for n in re.findall(r"(?<=\.)\d+(?=\.)", name)), default=0)
    widest = max((n for shape in shapes.values() for n in shape), default=0)
    most = 2 * last + 200 if shapes else 1000  # layers: those of several modules may be numbered from 0
    for what, key, limit, there in (
        ("layers", r"\w*layers?|\w*depth|\w*blocks", most, f"are numbered to {last} at most"),
        ("experts", EXPERT_COUNTS, max(last, widest) + 1000, f"are for {max(last + 1, widest)} at most"),
        ("columns (hidden_size)", r"hidden_size|d_model|n_embd", 2 * widest + 1000, f"have {widest} at most"),
    ):
        n = max(sizes(config, key), default=0)
        if n > limit and (shapes or what == "layers"):
            there = f"the tensors of the files {there}" if shapes else f"no model has more than {most}"
            raise ValueError(f"{path} names {n} {what}, and {there}: it is damaged, or belongs to another model; "
                             "download both again")  # fmt: skip


def _read_config(path: Path) -> dict:
    """The config in `path`. ValueError where an entry has another type than its name says; transformers checks the
    other entries."""
    if (adapter := path.with_name("adapter_config.json")).is_file():
        raise ValueError(f"{adapter} is an adapter's: transformers would load its base model and it, not the files "
                         "here. Merge it into them (PEFT's merge_and_unload, then save_pretrained), or move the "
                         "adapter to another folder")  # fmt: skip
    config = read_json(path)
    _check_objects(path, config)
    for part in sub_configs(config):
        _check_top_k(path, part)
    quantization, names = config.get("quantization_config") or {}, config.get("architectures") or []
    if not isinstance(own := quantization.get("moe_nvfp4") or {}, dict):
        raise ValueError(f"{path}: moe_nvfp4 in quantization_config is {own!r:.200}, no object: download it again")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: architectures is {names!r:.200}, no list of names: download it again")
    return config


def _check_top_k(path: Path, config: Mapping) -> None:
    """ValueError where `config` has more experts per token than experts, or none."""
    experts = max((n for key, n in config.items() if re.fullmatch(EXPERT_COUNTS, key) and type(n) is int), default=0)
    most = experts + (config.get("zero_expert_num") or 0)  # LongCat's identity experts
    for key in TOP_K if experts else ():
        for k in config[key] if isinstance(config.get(key), list) else [config.get(key)]:
            if type(k) is int and not 0 < k <= most:
                raise ValueError(f"{path}: {key} is {k}, and a token has 1 to {most} experts, as many as there are: "
                                 "download it again")  # fmt: skip


def _check_objects(path: Path, config: Mapping, above: str = "") -> None:
    """ValueError where a part of `config` that all models name as an object (or null) is none, where a value is NaN,
    and where a number of RoPE, whose angles would be NaN or turn backwards, is not positive."""
    for key, value in config.items():
        kinds = (dict, NoneType, list) if key == "algo_config" else (dict, NoneType)  # Quark has a list of these
        if re.search(r"_config$|^rope_(parameters|scaling)$", key) and not isinstance(value, kinds):
            way = ", or remove it if the files are dense" if key == "quantization_config" else ""
            raise ValueError(f"{path}: {above}{key} is {value!r:.200}, no object: download it again{way}")
        if value != value:
            raise ValueError(f"{path}: {above}{key} is NaN, which no setting is: download it again")
        if re.fullmatch(ROPE_NUMBERS, key) and (key.startswith("rope_") or "rope_" in above) and value is not None:
            numbers, least = value if isinstance(value, list) else [value], 0 if key.startswith("mscale") else 1e-9
            if not all(type(n) in (int, float) and least <= n < math.inf for n in numbers):
                raise ValueError(f"{path}: {above}{key} is {value!r:.200}, no positive number: download it again")
        if isinstance(value, dict):
            _check_objects(path, value, f"{above}{key}.")


def _named_weights(folder: Path, config: Mapping) -> Path | None:
    """The weights, or their index, that the config tells transformers to load, whatever else is in the folder; None: it
    names none. ValueError for a name of anything else, or of a file that is not there."""
    if (name := config.get(NAMED_WEIGHTS)) is None:
        return None
    known = isinstance(name, str) and re.fullmatch(r"[\w\-][\w.\-]*\.safetensors(\.index\.json)?", name)
    if not known or not (folder / name).is_file():
        raise ValueError(f"{folder / 'config.json'}: {NAMED_WEIGHTS} is {name!r:.200}, and transformers loads what it "
                         "names: it must be a .safetensors file in the folder, or the index of such files; download "
                         "that file too, or remove the entry")  # fmt: skip
    return folder / name


def _single(folder: Path, found: list[Path]) -> tuple[Path, ...]:
    if len(found) == 1 and not re.search(r"-of-0*([2-9]|1\d)\d*\.", found[0].name):
        return (found[0],)
    shards = [p for p in found if "-of-" in p.name and not p.name.startswith("model.")]  # model.VARIANT-00001-of-2
    if folder / "model.safetensors" in found and not shards:
        return (folder / "model.safetensors",)
    if not found:
        raise ValueError(f"{folder} has no .safetensors file: save the model with safetensors first")
    raise ValueError(
        f"{folder} has {len(found)} .safetensors file(s) of a split checkpoint, but no {INDEX}: which tensors "
        "belong together is not known; download that file too"
    )


def _find_index(folder: Path) -> Path | None:
    """The index of the files that a folder is loaded from; None: they are one file. transformers names that of a
    variant (save_pretrained(variant=...)) otherwise, and reads it only where there are no other weights."""
    if (folder / INDEX).is_file():
        return folder / INDEX
    variants = sorted(folder.glob(INDEX.replace(".json", ".*.json")))
    if (folder / "model.safetensors").is_file() or not variants:
        return None
    if len(variants) > 1:
        raise ValueError(
            f"{folder} has the weights of {len(variants)} variants ({variants[0].name}, "
            f"{variants[1].name}), and no others: move those of one, and config.json, to another folder"
        )
    return variants[0]


def _read_index(path: Path, found: list[Path]) -> dict[str, str]:
    """Tensor name -> file name, from the index in `path`. ValueError unless its files are all there.

    Empty if none is, beside model.safetensors: save_pretrained removes the shards of an earlier save, but not their
    index, and transformers looks for model.safetensors first.
    """
    folder = path.parent
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(v, str) for v in index.values()):
        raise ValueError(f"{path} has no weight_map of tensor names and file names: download it again")
    if folder / "model.safetensors" in found and "model.safetensors" not in index.values():
        if not {file.name for file in found} & set(index.values()):
            return {}
        raise ValueError(
            f"{folder} has model.safetensors and the shards of {path.name}: two checkpoints are mixed, as where one is "
            "saved over another; keep one of them"
        )
    for name in sorted(set(index.values())):
        if not re.fullmatch(r"[\w.\-]+\.safetensors", name) or name.startswith("."):
            raise ValueError(f"{path} names the file {name!r}: shards must be .safetensors files in the same folder")
        if not (folder / name).is_file():
            raise ValueError(f"{path} names {name}, which is not in the folder: download that shard too")
    pattern = re.compile(re.sub(r"\d+", lambda m: r"\d+", re.escape(next(iter(index.values())))))
    for file in found:
        if pattern.fullmatch(file.name) and file.name not in index.values():
            raise ValueError(f"{path} does not name the shard {file.name}: download the index again, or remove that")
    return index


def _check_index(path: Path, index: Mapping[str, str], tensors: Mapping[str, TensorSlice]) -> None:
    for name, file in index.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(f"{path} says that {name} is in {file}, and it is not: download both again")
    for name, stored in tensors.items():
        if name not in index:
            raise ValueError(f"{path} does not name {name}, which is in {stored.file.name}: download both again")


def _check_usual(path: Path) -> None:
    """ValueError where transformers would not load `path`, the weights or their index, but those of another format."""
    others = (path.with_name(name) for name in PICKLED)
    if path.name not in (INDEX, "model.safetensors") and (other := next(filter(Path.is_file, others), None)):
        raise ValueError(f"{other} is what transformers loads, and not {path.name}, which may be of other weights: "
                         "move one of them to another folder")  # fmt: skip


def read_json(path: Path) -> dict:
    """The JSON object in a file. ValueError, naming the file, for anything else, and for text that has no UTF-8."""
    data = path.read_bytes()
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError(f"{path} begins with a byte order mark, which JSON does not have: save it as UTF-8 without")
    try:
        found = json.loads(data.decode())
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path} has half of a surrogate pair ({error}), which is no character: download it again"
                         ) from None  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object: download it again")
    return found
