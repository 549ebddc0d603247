"""Calibration data, and the importance of input columns that the recipe ``weighted`` learns from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from moe_nvfp4.devices import usable_device
from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.converters import names_in_files
from moe_nvfp4.integrations.huggingface.experts import find_experts
from moe_nvfp4.integrations.huggingface.layerwise import (
    LayerFiles,
    LayerWalk,
    check_batches,
    check_ids,
    decoder_layers,
    layer_number,
    on_meta,
    positions,
    reads_ids,
    unwrapped,
)
from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout
from moe_nvfp4.integrations.huggingface.statistics import SquareSums, watch, watch_linears
from moe_nvfp4.progress import progress_bar
from moe_nvfp4.quantize.files import Checkpoint, read_json
from moe_nvfp4.quantize.importance import Importance, fingerprint, load_importance
from moe_nvfp4.quantize.linears import linears_of_model
from moe_nvfp4.quantize.names import by_number, fused_names
from moe_nvfp4.quantize.recipes import recipe_named
from moe_nvfp4.quantize.settings import language_config, settings

# Token ids [n] or [B, T], or a text, or a list of either; None: random token ids.
Calibration: TypeAlias = "Tensor | Sequence[Tensor] | Sequence[str] | str | None"

TOGETHER = 16384  # tokens in a batch
WINDOW = 512  # tokens in a window
RANDOM_TOKENS = 4096  # more change nothing for `weighted`: docs/accuracy.md


def calibration_batches(calibration: Any, config: Any, tokenizer: str | os.PathLike | None = None) -> list[Tensor]:
    """Batches of token ids, int64 [B, T], from what a user gave.

    calibration  ids [T] or [B, T] or a list of them, a text or a list of texts, or None: random ids, always the same
    config       the model's config
    tokenizer    the folder or name of the tokenizer for texts

    Texts are cut into windows, each of which begins with the token that the tokenizer puts before a text (BOS), if any.

    ValueError for anything else, for no text, for the name of a file, for ids that are not of this model, and for more
    tokens in a row than it has positions.
    """
    if calibration is None:
        return random_batches(config)
    one = isinstance(calibration, (str, Tensor, Mapping)) or not isinstance(calibration, Iterable)
    items: list[Any] = [calibration] if one else list(calibration)
    texts = [item for item in items if isinstance(item, str)]
    if others := [type(item).__name__ for item in items if not isinstance(item, str if texts else Tensor)]:
        raise ValueError(f"calibration: {others[0]} is given, where tensors of token ids, or texts, are expected")
    if files := [text for text in texts if text.endswith(".safetensors") or os.path.exists(text)]:
        raise ValueError(f"calibration: {files[0]!r} names a file, and would be read as a text: give the text in it, "
                         "or pathlib.Path(...) for a file of moe-nvfp4 importance")  # fmt: skip
    if texts:
        items = _windows(items, tokenizer, window_for(config))
    batches = [item[None] if item.dim() == 1 else item for item in items]
    if not batches:
        raise ValueError("calibration: there is no text: give some, or None for random token ids")
    check_batches(batches, config)
    return batches


def window_for(config: Any) -> int:
    """Tokens in a window for the model of `config`, where nobody chose."""
    return min(WINDOW, positions(config) or WINDOW)


def random_batches(config: Any, windows: int | None = None, window: int | None = None) -> list[Tensor]:
    """Batches of `windows` windows of `window` random token ids for the model of `config`; always the same ids.
    Default: 4096 tokens."""
    window = window or window_for(config)
    windows = windows or -(-RANDOM_TOKENS // window)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(language_config(config).vocab_size, (windows, window), generator=generator)
    check_ids(ids, config)
    return in_batches(ids)


def in_batches(windows: Tensor) -> list[Tensor]:
    """Split token ids [n, T] into batches of at most `TOGETHER` tokens, but at least one window."""
    return list(windows.split(max(1, TOGETHER // windows.shape[1])))


def _windows(texts: Iterable[str], tokenizer: str | os.PathLike | None, window: int) -> list[Tensor]:
    """Tokenize texts into ids [1, at most `window`]."""
    if not tokenizer:
        raise ValueError("calibration: the model does not say where it came from, so texts need its tokenizer: give "
                         "token ids instead")  # fmt: skip
    encode = tokenizer_at(tokenizer)
    return [piece[None] for text in texts for piece in cut(encode, text, window)]


def tokenizer_at(source: str | os.PathLike) -> Any:
    """The tokenizer in the folder, or of the name, `source`. ValueError if there is none."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except ImportError:
        raise
    except Exception as error:
        _refuse_own_code(source)
        what = f"{type(error).__name__}: {error}"[:300]
        here = [name for name in ("tokenizer.json", "tokenizer.model") if os.path.isfile(os.path.join(source, name))]
        if here == ["tokenizer.model"] and find_spec("sentencepiece") is None:
            raise ValueError(f"{source}: tokenizer.model cannot be read ({what}): pip install sentencepiece") from None
        raise ValueError(f"the tokenizer of {source} cannot be read ({what}): download its files (tokenizer.json, "
                         "tokenizer_config.json) into the same folder") from None  # fmt: skip
    if len(found) <= len(found.all_special_tokens):  # transformers makes an empty one where there is none
        _refuse_own_code(source)
        raise ValueError(f"{source} has no tokenizer: download its files (tokenizer.json, tokenizer_config.json) into "
                         "the same folder")  # fmt: skip
    if found.chat_template is None:  # processors of transformers 4 had it in a file of their own
        found.chat_template = _json_at(source, "chat_template.json").get("chat_template")
    return found


def _refuse_own_code(source: str | os.PathLike) -> None:
    """ValueError if the tokenizer at `source` is of a class in its repository."""
    try:
        config = _json_at(source, "tokenizer_config.json")
    except (OSError, ValueError):  # there is no such place
        return
    if "AutoTokenizer" in (config.get("auto_map") or {}):
        raise ValueError(f"{source}: the tokenizer is code of its repository, which is never run here: make token ids "
                         "with it (AutoTokenizer.from_pretrained(..., trust_remote_code=True)) and give these in "
                         "Python, as in calibrate(model, [ids])") from None  # fmt: skip


def _json_at(source: str | os.PathLike, name: str) -> dict[str, Any]:
    """A JSON file of the folder, or of the name, `source`; empty where it is not."""
    from transformers.utils.hub import cached_file

    quiet: dict[str, Any] = dict(
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    file = cached_file(source, name, **quiet)
    return {} if file is None else read_json(Path(file))


def _fetch_tokenizer(name: str, folder: Path) -> None:
    """Bring the tokenizer of the model `name` on the Hub, if that is in this `folder` of the cache, which may have only
    weights, into it."""
    from transformers import AutoTokenizer

    snapshot = next((path for path in (folder, *folder.parents) if path.parent.name == "snapshots"), None)
    if snapshot is None or os.path.isdir(name):
        return
    with suppress(Exception):  # whoever reads it says why it cannot
        AutoTokenizer.from_pretrained(
            name, revision=snapshot.name, cache_dir=snapshot.parents[2], trust_remote_code=False,
            subfolder=folder.relative_to(snapshot).as_posix().removeprefix("."),
        )  # fmt: skip


def cut(tokenizer: Any, text: str, window: int) -> list[Tensor]:
    """Tokenize `text` and cut it into windows of token ids, int64 [window]; the last may be shorter.

    Where the tokenizer begins a text with BOS, each window begins with it: models that are trained so compute something
    else without it, and each window is a text of its own.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    if window > 1 and len(ids) and tokenizer.bos_token_id is not None and int(ids[0]) == tokenizer.bos_token_id:
        bos, rest = ids[:1], ids[1:]
        return [torch.cat([bos, piece]) for piece in rest.split(window - 1) if len(piece)]
    return [piece for piece in ids.split(window) if len(piece)]


@contextmanager
def evaluating(model: nn.Module, by_autocast: bool = True) -> Iterator[None]:
    """A context in which `model` is in eval mode, without dropout, and its modules run as they are and not by compiled
    code, which would pass over the hooks that observe them. Afterwards every module has its own mode again.

    by_autocast: whether autocast stays on, where the caller switched it on.
    """
    modes = [(module, module.training) for module in model.modules()]
    in_place = {m: vars(m).pop("_compiled_call_impl") for m, _ in modes if "_compiled_call_impl" in vars(m)}
    wrapped = any("_orig_mod" in module._modules for module, _ in modes)  # by torch.compile
    device = next((p.device.type for p in model.parameters()), "cpu")
    model.eval()
    try:
        with (
            torch.compiler.set_stance("force_eager") if wrapped else nullcontext(),
            nullcontext() if by_autocast else torch.autocast(device, enabled=False),
        ):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for module, compiled in in_place.items():
            module._compiled_call_impl = compiled


def model_importance(
    model: nn.Module,
    batches: Sequence[Tensor],
    exclude: str | Iterable[str] = (),
    progress: bool = True,
    linears: Iterable[str] = (),
) -> Importance:
    """The importance of the dense experts, and of these `linears`, of a `model` in memory, from a forward pass over
    batches of token ids, int64 [B, T]. ValueError for ids that the model does not take, and for none."""
    whole: Any = model
    inside = unwrapped(model)  # by whose names files know modules
    modules = dense_modules(inside, exclude)
    sums, watched = SquareSums(), {name: inside.get_submodule(name) for name in linears}
    check_batches(batches, inside.config)
    with (
        evaluating(model, by_autocast=False), watch(modules, sums), watch_linears(watched, sums.linear), torch.no_grad()
    ):  # fmt: skip
        for ids in progress_bar(batches, desc="importance", unit="batch", show=progress):
            reads_ids(whole)(input_ids=ids.to(whole.device), use_cache=False)
    return sums.importance()


def files_importance(
    folder: str | os.PathLike,
    batches: Sequence[Tensor],
    exclude: str | Iterable[str] = (),
    device: str | None = None,
    progress: bool = True,
) -> Importance:
    """The importance of experts and linears of the checkpoint in `folder`, one decoder layer in memory at a time."""
    return streamed_importance(LayerFiles.open(folder, usable_device(device)), batches, exclude, progress)


def streamed_importance(
    files: LayerFiles,
    batches: Sequence[Tensor],
    exclude: str | Iterable[str] = (),
    progress: bool = True,
    linears: Iterable[str] | None = None,
) -> Importance:
    """`files_importance` of a model that is read from `files`. linears: names of those to measure (default: all)."""
    modules, state = dense_modules(files.model, exclude), files.checkpoint.state()
    name, _ = decoder_layers(files.model, modules)
    layers = files.use_layers(name)
    walk, sums = LayerWalk(files.model, layers, batches, files.device), SquareSums()
    at = linears_by_layer(files.model, name, first_linears(files.model) if linears is None else linears)
    numbers = [*(layer_number(module, name) for module in modules), *at]
    last = max(len(layers) - 1 if i is None else i for i in numbers)
    with watch(modules, sums), torch.autocast(files.device.type, enabled=False):
        for i in progress_bar(range(last + 1), desc="importance", unit="layer", show=progress):
            files.load(i)
            with watch_linears(at.get(i, {}), sums.linear):
                walk.run(i)
            files.drop(i)
        for module_name, head in at.get(None, {}).items():
            with watch_linears({module_name: head}, sums.linear):
                walk.run_head(head)
    found = sums.importance()
    measured = f"{files.checkpoint.folder}, {sum(ids.numel() for ids in batches)} tokens"
    tied_to = fingerprint(files.checkpoint.tensors), settings(files.model.config)
    files.checkpoint.check_state(state)
    return Importance(found.layers, measured, *tied_to, found.linears)


def importance_for_load(source: Checkpoint, model: Any, config: MoeNvfp4Config, linears: Iterable[str]) -> Importance:
    """The importance of the experts and `linears` of `model`, which is about to be loaded from the dense files
    `source`: read from the file `config.calibration`, or measured on a twin of this class, with this config and dtype.
    """
    if recipe_named(name := config.recipe).text:
        raise ValueError(
            f"recipe {name!r} does not quantize while a model loads: moe-nvfp4 quantize SRC DST --recipe {name} --text "
            f"FILE writes 4-bit files, swap_experts(model, recipe={name!r}, calibration=...) takes a model in memory"
        )
    if isinstance(config.calibration, os.PathLike):
        return importance_of_file(config.calibration, model)
    folder, name = next(iter(source.tensors.values())).file.parent, model.config.name_or_path
    if config.calibration is not None:
        _fetch_tokenizer(name, folder)
    with torch.device("cpu"):  # transformers calls with meta as the default
        batches = calibration_batches(config.calibration, model.config, folder)
        files = LayerFiles(source, on_meta(type(model), model.config, model.dtype), usable_device())
        return streamed_importance(files, batches, config.exclude, linears=linears)


def first_linears(model: nn.Module) -> list[str]:
    """The linears of a dense `model` that can be 4-bit, of those that servers fuse the first."""
    names = names_in_files(model, (name for name, _ in model.named_modules(remove_duplicate=False)))
    able = {linear.model for linear in linears_of_model(model, names) if linear.why is None}
    return [name for name in sorted(able, key=by_number) if name == next(n for n in fused_names(name) if n in able)]


def linears_by_layer(model: Any, layers: str, names: Iterable[str]) -> dict[int | None, dict[str, nn.Module]]:
    """Group linears by the number of their layer in the list `layers`; None: the output embedding. Drops others."""
    found: dict[int | None, dict[str, nn.Module]] = {}
    for name in names:
        module = model.get_submodule(name)
        if (layer := layer_number(name, layers)) is not None:
            found.setdefault(layer, {})[name] = module
        elif module is model.get_output_embeddings():
            found.setdefault(None, {})[name] = module
    return found


def importance_of_file(path: str | os.PathLike, model: Any) -> Importance:
    """The importance in the file `path`, by the names of `model`, which may be the body of the model that was measured,
    or have it as its body."""
    found, prefix = load_importance(path), f"{getattr(model, 'base_model_prefix', '')}."
    in_file = lambda name: next((n for n in (f"{prefix}{name}", name.removeprefix(prefix)) if n in found.layers), name)
    return found.renamed(lambda name: name if name in found.layers else in_file(name))


def dense_modules(model: nn.Module, exclude: str | Iterable[str] = ()) -> dict[str, tuple[nn.Module, ModuleLayout]]:
    """The dense experts of `model` that `exclude` does not match, by name, each once. ValueError if there are none."""
    found: dict[int, tuple[str, nn.Module, ModuleLayout]] = {}
    for name, module, layout in find_experts(model, MoeNvfp4Config(exclude=exclude), required=False):
        if layout is not None:
            found.setdefault(id(module), (name, module, layout))
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts to quantize, or all of them are excluded")
    return {name: (module, layout) for name, module, layout in found.values()}
