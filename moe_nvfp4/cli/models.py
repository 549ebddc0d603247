"""Models as they are named on the command line: 'demo', a folder, or a name on the Hub."""

from __future__ import annotations

import argparse
import glob
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_nvfp4.cli.known import KNOWN
from moe_nvfp4.cli.output import note
from moe_nvfp4.cli.parser import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moe_nvfp4.quantize.files import Checkpoint

READ = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")  # the files that a model is read from


def resolve(model: str) -> str:
    if model != "demo":
        return os.path.expanduser(model)  # the shell does not expand the ~ of --against=~/model
    if os.path.isfile("demo/config.json"):
        raise ValueError(
            "demo is the test model that comes with this program, and a folder of that name is here: name that ./demo, "
            "or call this where it is not"
        )
    from moe_nvfp4.demo import demo_path

    return str(demo_path())


def folder(model: str, copied: bool = False) -> str:
    """The folder of a model: the one named, or the local cache's for a Hub model.

    copied  whether its files are copied into a new one: all that belong there are fetched, and it is said which are not
    """
    return resolved_folder(resolve(model), copied)


def resolved_folder(source: str, copied: bool = False) -> str:
    """As `folder`, of a name from `resolve`."""
    if Path(source).exists():
        return source
    check_folder(source)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with hub_errors(source):
        try:
            names = [file.rfilename for file in HfApi().model_info(source).siblings or ()]
        except Exception as error:  # no network, HF_HUB_OFFLINE, no token: errors of several libraries
            try:
                path = snapshot_download(source, local_files_only=True)
            except LocalEntryNotFoundError as absent:
                raise (error if isinstance(error, OSError) else absent) from None
            if copied:
                there = sorted(file.name for file in Path(path).iterdir() if file.suffix != ".safetensors")
                note(f"the Hub does not answer: of {source} only what is in the cache is copied, {', '.join(there)}")
            return path
        wanted, left = _of_a_model(names, copied)
        if left and copied:
            note(f"left on the Hub: {', '.join(left)}")
        return snapshot_download(source, allow_patterns=[glob.escape(name) for name in wanted])


def _of_a_model(names: list[str], copied: bool) -> tuple[list[str], list[str]]:
    """Of the files of a repository: those that a model, or a copy of it, needs; and the others, or their folders."""
    from moe_nvfp4.quantize.convert import OTHER_WEIGHTS, TEMPLATES
    from moe_nvfp4.quantize.files import INDEX

    usual = not {"model.safetensors", INDEX}.isdisjoint(names)
    wanted, left = list[str](), set[str]()
    for name in names:
        top, _, inside = name.partition("/")
        if inside:
            belongs = top == TEMPLATES
        elif usual and top.startswith("consolidated") and top.endswith(".safetensors"):
            belongs = False  # the same weights in Mistral's own format
        else:
            belongs = top.endswith(READ) or copied and not top.endswith(OTHER_WEIGHTS)
        if belongs:
            wanted.append(name)
        else:
            left.add(f"{top}/" if inside else name)
    return wanted, sorted(left)


def weights_of(source: str) -> Path | None:
    """The folder with the safetensors files of a model, its own or that in the Hub's cache; None: they are not all on
    this machine. Nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    from moe_nvfp4.quantize.files import INDEX, read_json

    if Path(source).is_dir():
        return Path(source) if any(Path(source).glob("*.safetensors")) else None
    for name in ("model.safetensors", INDEX):
        if isinstance(found := try_to_load_from_cache(source, name), str):
            place = Path(found).parent
            shards = read_json(Path(found)).get("weight_map") or {} if name == INDEX else {}
            return place if all((place / str(shard)).is_file() for shard in shards.values()) else None
    return None


@contextmanager
def hub_errors(source: str) -> Iterator[None]:
    """Make errors name `source`, if it is neither a folder here nor a model that the Hub gives us."""
    try:
        yield
    except OSError as error:  # RepositoryNotFoundError and LocalEntryNotFoundError are subclasses
        if Path(source).exists():
            raise
        meant = _similar(source)
        raise OSError(
            f"{source!r} is no folder here, and the Hugging Face Hub does not give it{meant}: {error}"
        ) from None


def _similar(source: str) -> str:
    """; did you mean X?" with a folder, a well-known model or 'demo', or ""."""
    place = Path(source).parent
    folders = [path.name for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
    return did_you_mean(Path(source).name, folders) or did_you_mean(source, ["demo", *KNOWN])


def check_folder(source: str) -> None:
    """ValueError for a path that does not exist, and for a folder without config.json; names on the Hub pass."""
    path = Path(source)
    if not path.exists() and (source.startswith((".", "/", "~")) or source.count("/") != 1):
        raise ValueError(f"{source} does not exist{_similar(source)}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{source} has no config.json: name the folder of a Hugging Face checkpoint")


def model_config(source: str) -> Any:
    """transformers' config object of a model. It has a quantization_config even where only hf_quant_config.json says
    that the files are NVFP4. ValueError for files that are cut off, and for a config that cannot be theirs."""
    from transformers import AutoConfig

    from moe_nvfp4.integrations.huggingface.config import checkpoint_config, files_info
    from moe_nvfp4.quantize.files import check_config

    check_folder(source)
    if Path(source).is_dir():
        check_config(source)
    with hub_errors(source), config_errors(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        silent = getattr(config, "quantization_config", None) is None
        return checkpoint_config(source) if silent and files_info(source, config) else config


@contextmanager
def config_errors(source: str) -> Iterator[None]:
    """Turn any exception that transformers raises for a config.json that makes no sense to it into a ValueError."""
    import transformers

    from moe_nvfp4.quantize.model import own_code

    try:
        with own_code(source):
            yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        version, what = transformers.__version__, f"{type(error).__name__}: {error}"[:300]
        raise ValueError(
            f"the config.json of {source} is damaged, or transformers {version} is too old for it ({what})"
        ) from None


def check_whole(model: Any, source: str) -> Checkpoint:
    """The files of `source`, which are not NVFP4. ValueError if they lack a tensor of `model`, where transformers would
    put random ones."""
    from moe_nvfp4.integrations.huggingface.files import check_dense
    from moe_nvfp4.quantize.dense import dense_given
    from moe_nvfp4.quantize.files import open_checkpoint
    from moe_nvfp4.quantize.model import ModelTensors

    files = open_checkpoint(resolved_folder(source))
    if files.config.get("quantization_config"):
        ModelTensors(model).check(dense_given(files))
    else:
        check_dense(files, model)
    return files


def tokenizer_of(source: str) -> Any:
    """The tokenizer of a model."""
    from moe_nvfp4.integrations.huggingface.calibration import tokenizer_at

    return tokenizer_at(source)


def model_class(config: Any) -> Any:
    import transformers

    from moe_nvfp4.quantize.model import class_of

    if (found := class_of(config)) is not None:
        return found
    if not config.architectures:
        raise ValueError("config.json has no architectures, the name of the model's class: download it again, or save "
                         "the model with save_pretrained")  # fmt: skip
    raise ValueError(f"transformers {transformers.__version__} has no model {config.architectures}")


def empty_model(config: Any, source: str) -> Any:
    """The model that config.json describes, on the meta device; ValueError if it describes none."""
    import torch

    with torch.device("meta"), config_errors(source):
        return model_class(config)._from_config(config, dtype=torch.bfloat16)


def form_of(config: Any, name: str) -> str | None:
    """What the files of model `name` hold: "NVFP4"; "MXFP4" or "FP8", which become NVFP4 while they load; None: dense.
    ValueError for other formats."""
    from moe_nvfp4.quantize.source import quantized_form

    quantization = config.to_dict().get("quantization_config")
    try:
        return quantized_form({"quantization_config": quantization})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def quantization_of(config: Any, args: argparse.Namespace) -> dict[str, Any] | None:
    """The quantization_config of NVFP4 files; None for those that are yet to be quantized. ValueError for other
    formats, and for options about quantizing where nothing is left to quantize.
    """
    if form_of(config, args.model) != "NVFP4":
        return None
    if given := [f"--{name}" for name in ("recipe", "exclude", "linears") if getattr(args, name)]:
        raise ValueError(f"{' and '.join(given)} would have no effect: {args.model} is 4-bit already; name the "
                         f"original model, or leave out {' and '.join(given)}")  # fmt: skip
    quantization: dict[str, Any] = config.to_dict()["quantization_config"]
    return quantization


def load(
    args: argparse.Namespace, activations: str | None, tokenizer: bool = True, dtype: torch.dtype | None = None,
    head: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """(model, tokenizer). activations: for experts that are not NVFP4, which are then quantized while loading; None:
    dense, or as NVFP4 files have them. dtype: default bf16. head: whether the model must predict tokens."""
    import torch

    from moe_nvfp4.devices import usable_device
    from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, checkpoint_config, describe_placement

    place = usable_device(args.device)
    source = resolve(args.model)
    config = model_config(source)
    kwargs: dict[str, Any] = {"config": config}  # whose class may be another than the model class's own (Sarvam)
    beside, map_files = getattr(args, "cpu_experts", None), getattr(args, "map_files", False)
    if map_files and place.type == "cuda" and beside is None:
        beside = "all"
    if beside is not None and place.type != "cuda":
        raise ValueError(f"--cpu-experts keeps experts beside a GPU, and the model runs on {place}: leave it out")
    form, quantized = form_of(config, args.model), quantization_of(config, args) is not None
    if quantized:
        chosen = getattr(args, "activations", None)  # `compare` has a list, and sets each itself
        kwargs["config"] = checkpoint_config(source, activations=chosen) if isinstance(chosen, str) else config
    if not quantized and activations is not None:
        kwargs["quantization_config"] = MoeNvfp4Config(
            activations=activations, recipe=args.recipe, exclude=args.exclude, linears=args.linears, cpu_experts=beside,
            map_files=map_files,
        )  # fmt: skip
    elif beside is not None or map_files:
        kwargs["quantization_config"] = MoeNvfp4Config(cpu_experts=beside, map_files=map_files)
    if head and not (kind := model_class(config)).can_generate():
        raise ValueError(f"{args.model} is a {kind.__name__}, which does not predict the next token: name a model with "
                         "a language model's head (...ForCausalLM, ...ForConditionalGeneration)")  # fmt: skip
    empty = empty_model(config, source)  # else a config that makes no sense ends in a traceback of transformers
    if not quantized and activations is None:
        check_whole(empty, source)
    make = partial(model_class(config).from_pretrained, source, dtype=dtype or torch.bfloat16)
    if form in ("MXFP4", "FP8") and activations is None:
        make = partial(dense_model, source, dtype=torch.bfloat16)
    elif form in ("MXFP4", "FP8"):
        note(f"{args.model} is {form}, and becomes NVFP4 while it loads: moe-nvfp4 quantize {args.model} DST writes it "
             "once")  # fmt: skip
    if place.type != "cpu" and beside is None:  # device_map needs accelerate (extra "gpu"), which a CPU can do without
        kwargs["device_map"] = str(place)
    with torch.cuda.device(place) if beside is not None else nullcontext():  # "auto" looks at this GPU's memory
        loaded = make(**kwargs)
    if beside is not None:
        note(describe_placement(loaded))
        loaded = loaded.to(place)
    return loaded.eval(), tokenizer_of(source) if tokenizer else None


def dense_model(source: str, config: Any, **kwargs: Any) -> Any:
    """The dense model of the MXFP4 or FP8 files of `source`: each tensor is dequantized when transformers asks for it.
    kwargs: of from_pretrained."""
    from transformers import GenerationConfig

    from moe_nvfp4.quantize.dense import dense_tensors
    from moe_nvfp4.quantize.files import open_checkpoint

    dense = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    files = dense_tensors(open_checkpoint(resolved_folder(source)))
    model = model_class(config).from_pretrained(None, config=dense, state_dict=files, **kwargs)
    with suppress(OSError):  # there is none
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def load_to_answer(args: argparse.Namespace) -> tuple[Any, Any]:
    """(model, tokenizer) with 4-bit experts, and with --activations where given."""
    from moe_nvfp4.integrations.huggingface import set_activations

    model, tokenizer = load(args, args.activations or "bf16")
    return set_activations(model, args.activations) if args.activations else model, tokenizer


def check_original(args: argparse.Namespace) -> None:
    """ValueError if MODEL is NVFP4, for commands that compare with the original."""
    if form_of(model_config(resolve(args.model)), args.model) == "NVFP4":
        raise ValueError(f"{args.model} is quantized already: {args.command} needs the original to compare with")


def expert_bytes(model: Any) -> tuple[int, int]:
    """Bytes of the experts' weights and biases: (if they were bf16, as they are)."""
    from moe_nvfp4.integrations.huggingface.experts import HFExperts

    before = after = 0
    for module in model.modules():
        if isinstance(module, HFExperts):
            before += bf16_bytes(module)
            tables = (module.up_name, "down_proj") if module.mapped else ()  # of addresses, for weights in files
            stored = (p for name, p in module.named_parameters(recurse=False) if name not in tables)
            after += sum(p.numel() * p.element_size() for p in stored) + module.mapped_bytes
    return before, after


def bf16_bytes(experts: Any) -> int:
    """Bytes of the weights and biases of `HFExperts` in bf16, as files have them: LongCat's dense module has rows more
    that nothing uses, of experts without weights."""
    layout = experts.layout
    biases = sum(p.numel() for name, p in experts.named_parameters(recurse=False) if name.endswith("_bias"))
    rows = layout.intermediate_size * (3 if layout.gated else 2)
    return int(2 * (layout.num_experts * rows * layout.hidden_size + biases))


def text_of(args: argparse.Namespace) -> str:
    """The text that --text names, or the demo's own text."""
    if args.text is not None:
        try:
            return _plain(args.text, args.text.read_text("utf-8-sig"))  # without the mark that some editors write first
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{args.text} is not UTF-8 text ({error}): convert it (iconv -t utf-8), or name another"
            ) from None
    if args.model != "demo":
        raise ValueError(f"{args.command} needs a text: name one with --text FILE")
    from moe_nvfp4.demo import demo_text

    return demo_text()


LINES = (".jsonl", ".ndjson")  # files of JSON, line by line


def _plain(file: Path, text: str) -> str:
    """What is text in the contents of a file: all, or each line's "text" in JSONL. ValueError for others of JSON and of
    tables, whose keys and quotes a model would be measured with."""
    suffix = file.suffix.lower()
    if suffix not in (*LINES, ".json", ".csv", ".tsv"):
        return text
    try:
        texts = [json.loads(line)["text"] for line in text.split("\n") if line.strip()] if suffix in LINES else []
    except (ValueError, KeyError, TypeError, RecursionError):
        texts = []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f'{file} is no plain text: of a .jsonl file the "text" of each line is read, and here some line has none. '
            "Write other texts into a .txt file"
        )
    return "\n\n".join(texts)


def windows_of(args: argparse.Namespace, tokenizer: Any, text: str, config: Any) -> Tensor:
    """int64 [count, window]: the first --windows pieces of the text, each of which begins with BOS, if the tokenizer
    begins a text so. ValueError if the text is too short, if the tokenizer does not know most of it, or if the model of
    `config` does not take such windows."""
    import torch

    from moe_nvfp4.integrations.huggingface.calibration import cut, window_for
    from moe_nvfp4.integrations.huggingface.layerwise import check_ids

    window = args.window or window_for(config)
    pieces = cut(tokenizer, text, window)
    whole = [piece for piece in pieces if len(piece) == window][: args.windows]
    if not whole:
        raise ValueError(f"the text has {sum(map(len, pieces))} tokens, less than one window of {window}: write a "
                         "smaller --window, or name a longer text")  # fmt: skip
    windows = torch.stack(whole)
    unknown = 0.0 if tokenizer.unk_token_id is None else (windows == tokenizer.unk_token_id).double().mean().item()
    if unknown > 0.5:
        raise ValueError(f"{unknown:.0%} of the text's tokens are {tokenizer.unk_token!r}, words that the model's "
                         "tokenizer does not know: name a text like those that the model was trained on")  # fmt: skip
    check_ids(windows, config)
    return windows
