"""The command line: moe-nvfp4 generate | quantize | verify | calibrate | info | compare | serve | env."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moe_nvfp4._version import __version__
from moe_nvfp4.demo import DemoError

if TYPE_CHECKING:
    from torch import Tensor

# torch and transformers take seconds to import: each command imports what it needs, and --help does without. So these
# are written down here; a test compares them with the modules that they belong to.
RECIPES, DEFAULT_RECIPE = ("max", "four_over_six", "mse"), "mse"
DIALECTS = ("modelopt", "compressed-tensors")
ACTIVATIONS = ("bf16", "nvfp4")
ENGINES = ("vllm", "transformers")

MODEL_HELP = "folder or hub name of a Hugging Face MoE model, 4-bit or not; 'demo' makes a small one"
# What is fetched of a hub model: nothing in subfolders (original/), no weights in other formats (.bin, .gguf).
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "README.md", "LICENSE*"]


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (2: a mistake that the message explains)."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, NotImplementedError, OSError, ImportError, DemoError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"moe-nvfp4 {args.command}: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmoe-nvfp4: interrupted", file=sys.stderr)
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moe-nvfp4",
        description="4-bit (NVFP4) experts for the mixture-of-experts models of Hugging Face.",
        epilog="examples:\n"
        "  moe-nvfp4 generate demo --prompt 'What is the capital of France?'\n"
        "  moe-nvfp4 info Qwen/Qwen3-30B-A3B\n"
        "  moe-nvfp4 quantize ./Qwen3-30B-A3B ./Qwen3-30B-A3B-NVFP4\n"
        "  moe-nvfp4 compare demo\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"moe-nvfp4 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], None], help: str, description: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=description)
        sub.set_defaults(run=run)
        return sub

    def quantizing(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--recipe", choices=RECIPES, default=None,
            help=f"how block scales are chosen when dense weights are quantized (default {DEFAULT_RECIPE})",
        )  # fmt: skip
        sub.add_argument(
            "--exclude", action="append", default=[], metavar="NAME",
            help="experts modules to leave as they are, wildcards allowed: 'model.layers.0.*'",
        )  # fmt: skip

    def texts(sub: argparse.ArgumentParser, windows: int, shortest: int) -> None:
        sub.add_argument("--text", type=Path, help="a text file (default for demo: a text of its own)")
        sub.add_argument(
            "--windows", type=_whole(1), default=windows, metavar="N", help=f"pieces of the text (default {windows})"
        )
        sub.add_argument(
            "--window", type=_whole(shortest), default=512, metavar="N", help="tokens in each (default 512)"
        )

    def device(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--device", default=None, help="cpu, cuda, cuda:1 (default: cuda where there is one)")

    sub = command(
        "generate", generate, "answer a prompt",
        "Load MODEL with 4-bit experts (quantizing dense ones on the way) and answer a prompt, "
        "token by token. Prints the speed and the memory of the experts before and after.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("--prompt", type=_prompt, default="What is the capital of France, and what is it known for?")
    sub.add_argument("--max-new-tokens", type=_whole(1), default=128, metavar="N")
    sub.add_argument("--temperature", type=_temperature, default=0.0, help="0 (default): the likeliest token")
    sub.add_argument("--raw", action="store_true", help="continue the prompt, without the chat template")
    sub.add_argument(
        "--activations", choices=ACTIVATIONS, default=None,
        help="bf16: W4A16; nvfp4: W4A4 (default: what the files say, else bf16)",
    )  # fmt: skip
    quantizing(sub)
    device(sub)

    sub = command(
        "quantize", quantize, "write a 4-bit checkpoint",
        "Quantize the experts of the checkpoint SRC (bf16, fp16, fp32, FP8 in blocks, MXFP4) and write DST, "
        "or carry NVFP4 files from one dialect to the other. No model is built: memory stays below 1.5 GB. "
        "DST appears when it is complete; an interrupted run goes on where it was; SRC is only read.",
    )  # fmt: skip
    sub.add_argument("source", metavar="SRC", help=MODEL_HELP)
    sub.add_argument("destination", metavar="DST", type=Path, help="folder to make; must not exist")
    sub.add_argument("--activations", choices=ACTIVATIONS, default="bf16", help="what DST asks for when loaded")
    quantizing(sub)
    sub.add_argument(
        "--include", action="append", default=None, metavar="NAME",
        help="only these experts modules, wildcards allowed (default: all)",
    )  # fmt: skip
    sub.add_argument(
        "--dialect", choices=DIALECTS, default="modelopt", help="names and config of the files (default modelopt)"
    )
    sub.add_argument(
        "--share-scales", action="store_true",
        help="of NVFP4 files whose experts have different global scales for gate and up, which servers misread: "
        "quantize one of the two again, so that they share one",
    )  # fmt: skip
    sub.add_argument("--dry-run", action="store_true", help="print the plan and the sizes, write nothing")
    sub.add_argument(
        "--workers", type=_whole(1, 256), metavar="N", help="threads (default: one per core, at most 4, 8 with a GPU)"
    )
    device(sub)

    sub = command(
        "verify", verify, "check a 4-bit checkpoint",
        "Read every tensor of the NVFP4 checkpoint DST: names, shapes, dtypes, scales, every expert complete. "
        "With --against, the error of each layer against the original too. Exit code 0 (good) or 2.",
    )  # fmt: skip
    sub.add_argument("destination", metavar="DST", help="folder or hub name of a 4-bit checkpoint")
    sub.add_argument("--against", default=None, metavar="SRC", help="the checkpoint it was made from, or 'demo'")

    sub = command(
        "calibrate", calibrate, "add static activation scales",
        "Load MODEL with 4-bit experts, run a text through it and write DST: the same weights, with an input_scale "
        "for every expert, for W4A4 without a scale per token. Needs memory for the 4-bit model.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("destination", metavar="DST", type=Path, help="folder to make; must not exist")
    texts(sub, 4, shortest=1)
    quantizing(sub)
    device(sub)

    sub = command(
        "info", info, "what is in a model",
        "List the experts of MODEL: layers, sizes, gate, format, bytes before and after, and what "
        "would be skipped and why. Reads headers and config only.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    quantizing(sub)

    sub = command(
        "compare", compare, "accuracy of 4-bit against the original",
        "Perplexity, KL divergence of the next-token distributions and top-1 agreement of 4-bit "
        "experts (W4A16 and W4A4) against the original MODEL, on a text. Needs memory for both.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    texts(sub, 12, shortest=2)
    quantizing(sub)
    device(sub)

    sub = command(
        "serve", serve, "answer through the OpenAI API",
        "Serve MODEL with 4-bit experts: with vLLM where it is installed (bf16 experts are quantized as they load), "
        "else with the server of transformers. What follows MODEL are options of that engine: --host, --port, "
        "--tensor-parallel-size ...",
    )  # fmt: skip
    sub.add_argument("--engine", choices=ENGINES, default=None, help="default: vllm where it is installed")
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("options", metavar="...", nargs=argparse.REMAINDER, help="options of the engine")

    command(
        "env", env, "what an issue report needs",
        "Versions, devices, which backend runs on each and why the others do not, caches and their sizes, and "
        "the environment variables that count here.",
    )  # fmt: skip
    return parser


# ---------------------------------------------------------------- values of arguments
def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return number


def _temperature(text: str) -> float:
    try:
        temperature = float(text)
    except ValueError:
        temperature = math.nan
    if not 0 <= temperature < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on: 0 takes the likeliest token")
    return temperature


def _prompt(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the prompt is empty: write a text to answer or, with --raw, to continue")
    return text


# ---------------------------------------------------------------- commands
def generate(args: argparse.Namespace) -> None:
    import torch
    from transformers import TextStreamer

    from moe_nvfp4.integrations.huggingface import set_activations
    from moe_nvfp4.quantize.report import readable_size

    model, tokenizer = _load(args, args.activations or "bf16")
    if args.activations:
        set_activations(model, args.activations)
    chat = tokenizer.chat_template is not None and not args.raw
    if chat:
        messages = [{"role": "user", "content": args.prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(args.prompt, return_tensors="pt")
    prompt = inputs["input_ids"].shape[1]
    if prompt == 0:
        raise ValueError(f"the tokenizer of {args.model} makes no tokens of the prompt {args.prompt!r}: write another")
    inputs = {k: v.to(model.device) for k, v in inputs.items() if k in ("input_ids", "attention_mask")}

    class Streamer(TextStreamer):
        times: list[float] = []

        def put(self, value: Tensor) -> None:
            self.times.append(time.perf_counter())
            super().put(value)

    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling = dict(do_sample=True, temperature=args.temperature) if args.temperature > 0 else dict(do_sample=False)
    _say("")
    start = time.perf_counter()
    with torch.no_grad():
        model.generate(**inputs, max_new_tokens=args.max_new_tokens, streamer=streamer, **sampling)
    times = streamer.times[1:]  # the first is the prompt
    before, after = _expert_bytes(model)
    _say("")
    if len(times) > 1:
        _say(f"speed:   {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s over {len(times)} tokens, "
             f"first token after {times[0] - start:.2f} s ({prompt} tokens of prompt), on {model.device}")  # fmt: skip
    if after:  # only linears are 4-bit in some files
        smaller = f"{before / after:.2f}x smaller"
        _say(f"experts: {readable_size(before)} in bf16, {readable_size(after)} in NVFP4 ({smaller})")


def quantize(args: argparse.Namespace) -> None:
    from moe_nvfp4.quantize.convert import convert_checkpoint
    from moe_nvfp4.quantize.files import open_checkpoint
    from moe_nvfp4.quantize.plan import nvfp4_info
    from moe_nvfp4.quantize.report import readable_size

    source, recipe = _folder(args.source), args.recipe or DEFAULT_RECIPE
    if args.recipe and not args.share_scales and Path(source).is_dir() and nvfp4_info(open_checkpoint(source)):
        raise ValueError(f"--recipe would have no effect: {args.source} is NVFP4 already, and another --dialect has "
                         "the same numbers; name the original model, or leave out --recipe")  # fmt: skip
    report = convert_checkpoint(
        source, args.destination, recipe, args.exclude, args.include, args.dialect,
        args.activations, args.workers, args.device, args.dry_run, share_scales=args.share_scales,
    )  # fmt: skip
    if args.dry_run:
        for line in report.lines():
            _say(line)
        return
    for name, why in report.skipped.items():
        _say(f"left alone: {name}: {why}")
    before, after = readable_size(report.experts_before), readable_size(report.experts_after)
    experts = f"; experts {before} -> {after} ({recipe})" if report.quantized else ""
    resumed = f", {readable_size(report.resumed)} of the source by an earlier run" if report.resumed else ""
    for line in report.rescaled_lines():
        _say(line)
    _say(f"wrote {args.destination}: {readable_size(report.bytes_after)}{experts} in {report.seconds:.1f} s{resumed}")


def verify(args: argparse.Namespace) -> None:
    from moe_nvfp4.quantize.verify import verify_checkpoint

    against = None if args.against is None else _folder(args.against)
    report = verify_checkpoint(_folder(args.destination), against)
    for line in report.lines():
        _say(line)


def calibrate(args: argparse.Namespace) -> None:
    from moe_nvfp4.integrations.huggingface import calibrate, set_activations

    if args.destination.exists():
        raise ValueError(f"{args.destination} exists: name a folder that does not, or remove it first")
    text = _text(args)
    model, tokenizer = _load(args, "nvfp4")
    windows = _windows(args, tokenizer, text)
    calibrate(model, windows[:, None])
    set_activations(model, "nvfp4").save_pretrained(args.destination)
    tokenizer.save_pretrained(args.destination)
    _say(f"wrote {args.destination}: static scales from {windows.numel()} tokens")


def info(args: argparse.Namespace) -> None:
    from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
    from moe_nvfp4.integrations.huggingface.config import names_experts
    from moe_nvfp4.integrations.huggingface.experts import HFExperts, describe
    from moe_nvfp4.quantize.files import open_checkpoint
    from moe_nvfp4.quantize.plan import separate_scales_warning
    from moe_nvfp4.quantize.report import readable_size

    source = _resolve(args.model)
    config = _config(source)
    quantization = _quantization(config, args)
    chosen = MoeNvfp4Config(exclude=args.exclude)
    if quantization is not None:
        chosen = MoeNvfp4Config.from_dict(quantization)
    model = _empty_model(config, source)
    rows: list[tuple[str, str]] = []  # name, what it is
    skipped: list[tuple[str, str]] = []  # name, why
    dense = packed = 0  # bytes
    inside = "\0"
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        try:
            layout = describe(module)
        except NotImplementedError as error:
            skipped.append((name, str(error).split(". ")[0]))
            continue
        if layout is None:
            continue
        inside = f"{name}."
        if chosen.excludes(name):
            skipped.append((name, "excluded"))
            continue
        experts = HFExperts(module, layout, chosen.activations, device="meta")
        before = 2 * sum(p.numel() for p in module.parameters())
        after = sum(p.numel() * p.element_size() for p in experts.parameters())
        dense, packed = dense + before, packed + after
        shape = f"E {layout.num_experts}  H {layout.hidden_size}  I {layout.intermediate_size}"
        gate = "own gate, unfused" if experts.gate.kind == "raw" else experts.gate.kind
        sizes = f"{readable_size(before):>9s} -> {readable_size(after):>9s}"
        rows.append((name, f"{type(module).__name__:24s} {shape:28s} {gate:12s} {sizes}"))
    total = 2 * sum(p.numel() for p in model.parameters())
    state = "bf16, would become NVFP4" if quantization is None else f"NVFP4 of {chosen.dialect}"
    _say(f"{args.model}: {type(model).__name__}, {len(rows)} layers of experts, {state}")
    for name, what in _grouped(rows):
        _say(f"  {name:44s} {what}")
    for name, why in _grouped(skipped):
        _say(f"  {name:44s} left as it is: {why}")
    names = [name for name, _ in rows + skipped]
    for pattern in args.exclude:
        if not any(names_experts(pattern, name) for name in names):
            raise ValueError(f"--exclude {pattern!r} matches no experts module of {args.model}, see above")
    if not rows:
        raise ValueError(f"{args.model} has no experts that this library can quantize")
    if quantization is not None and any(Path(source).glob("*.safetensors")):
        for line in separate_scales_warning(open_checkpoint(source)):
            _say(line)
    _say(f"experts: {readable_size(dense)} in bf16, {readable_size(packed)} in NVFP4; "
         f"whole model {readable_size(total)} -> {readable_size(total - dense + packed)}")  # fmt: skip


def _grouped(rows: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """(name, text) pairs; of those that differ in the first number of the name only, one: "30 x model.layers.0-29"."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, text in rows:
        before, number, after = re.findall(r"^(\D*)(\d*)(.*)$", name)[0]
        groups.setdefault((before, after, text), []).append(number)
    for (before, after, text), numbers in groups.items():
        spans: list[list[int]] = []
        for number in map(int, filter(None, numbers)):
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        listed = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
        yield (f"{len(numbers)} x " if len(numbers) > 1 else "") + before + listed + after, text


def compare(args: argparse.Namespace) -> None:
    from moe_nvfp4.evaluate import evaluate
    from moe_nvfp4.integrations.huggingface import set_activations
    from moe_nvfp4.progress import progress_bar

    source = _resolve(args.model)
    if "quantization_config" in _config(source).to_dict():
        raise ValueError(f"{args.model} is quantized already: compare needs the original to compare with")
    text = _text(args)
    original, tokenizer = _load(args, None)
    model, _ = _load(args, "bf16", tokenizer=False)
    windows = _windows(args, tokenizer, text).to(original.device)

    bits = {"W4A16": "bf16", "W4A4": "nvfp4"}
    models = {name: lambda ids, a=a: set_activations(model, a)(ids) for name, a in bits.items()}
    found = evaluate(original, models, progress_bar(windows, desc="compare", unit="window", show=True))
    tokens = found["original"].tokens
    _say(f"{args.model}, recipe {args.recipe or DEFAULT_RECIPE}, {tokens} tokens in windows of {args.window}")
    _say(f"{'':8s}{'perplexity':>12s}{'KL (nats)':>12s}{'top-1':>9s}")
    for name, of in found.items():
        label = "bf16" if name == "original" else name
        _say(f"{label:8s}{of.perplexity:12.3f}{of.kl:12.5f}{of.top1:9.2%}")


def serve(args: argparse.Namespace) -> None:
    from moe_nvfp4.integrations.serve import serve_command

    command = serve_command(_resolve(args.model), args.engine, args.options)
    sys.stdout.flush()
    os.execv(command[0], command)  # signals then reach the engine


def env(args: argparse.Namespace) -> None:
    from moe_nvfp4.environment import describe

    for line in describe():
        _say(line)


# ---------------------------------------------------------------- helpers
def _text(args: argparse.Namespace) -> str:
    """What --text names, or the demo's own text."""
    if args.text is not None:
        return str(args.text.read_text(errors="replace"))
    if args.model != "demo":
        raise ValueError(f"name a text to {args.command} with: --text FILE")
    from moe_nvfp4.demo import demo_text

    return demo_text()


def _windows(args: argparse.Namespace, tokenizer: Any, text: str) -> Tensor:
    """int64 [count, window]: the first --windows pieces of the text."""
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[0]
    count = min(args.windows, len(ids) // args.window)
    if count < 1:
        raise ValueError(f"the text has {len(ids)} tokens: less than one window of {args.window}")
    return ids[: count * args.window].view(count, args.window)


def _folder(model: str) -> str:
    """The folder of a model: as named, or of the hub model in the local cache."""
    source = _resolve(model)
    if Path(source).is_dir() or Path(source).is_absolute() or source.count("/") != 1 or source.startswith("."):
        return source
    from huggingface_hub import snapshot_download

    return snapshot_download(source, allow_patterns=HUB_FILES, ignore_patterns="*/*")


def _resolve(model: str) -> str:
    if model != "demo":
        return model
    from moe_nvfp4.demo import demo_path

    return str(demo_path())


def _config(source: str) -> Any:
    """transformers' config object of a model."""
    from transformers import AutoConfig

    path = Path(source)
    if not path.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ValueError(f"{source} does not exist")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{source} has no config.json: name the folder of a Hugging Face checkpoint")
    with _config_errors(source):
        return AutoConfig.from_pretrained(source)


def _model_class(config: Any) -> Any:
    import transformers

    for name in config.architectures if isinstance(config.architectures, list) else ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    raise ValueError(f"transformers {transformers.__version__} has no model {config.architectures}")


@contextmanager
def _config_errors(source: str) -> Iterator[None]:
    """What transformers raises where a config.json makes no sense to it, of any type, as one ValueError."""
    import transformers

    try:
        yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        version, what = transformers.__version__, f"{type(error).__name__}: {error}"[:300]
        raise ValueError(
            f"the config.json of {source} is damaged, or transformers {version} is too old for it ({what})"
        ) from None


def _empty_model(config: Any, source: str) -> Any:
    """The model that config.json describes, on the meta device; ValueError where it describes none."""
    import torch

    with torch.device("meta"), _config_errors(source):
        return _model_class(config)._from_config(config, dtype=torch.bfloat16)


def _quantization(config: Any, args: argparse.Namespace) -> dict[str, Any] | None:
    """The quantization_config of NVFP4 files, None of dense ones; ValueError for other formats, and for options of
    the quantization where nothing is left to quantize.
    """
    from moe_nvfp4.quantize.dialects import read_config

    quantization: dict[str, Any] | None = config.to_dict().get("quantization_config")
    if quantization is None:
        return None
    if read_config(quantization) is None:
        raise ValueError(f"{args.model} is quantized with {quantization.get('quant_method')!r}, not with NVFP4: FP8 "
                         "and MXFP4 are converted by moe-nvfp4 quantize")  # fmt: skip
    if given := [f"--{name}" for name in ("recipe", "exclude") if getattr(args, name)]:
        raise ValueError(f"{' and '.join(given)} would have no effect: {args.model} is 4-bit already; name the "
                         f"original model, or leave out {' and '.join(given)}")  # fmt: skip
    return quantization


def _load(args: argparse.Namespace, activations: str | None, tokenizer: bool = True) -> tuple[Any, Any]:
    """(model, tokenizer); activations of experts that are quantized on the way, None: the model as it is."""
    import torch
    from transformers import AutoTokenizer

    from moe_nvfp4.devices import usable_device
    from moe_nvfp4.integrations.huggingface import MoeNvfp4Config

    place = usable_device(args.device)
    source = _resolve(args.model)
    config = _config(source)
    kwargs: dict[str, Any] = {}
    if _quantization(config, args) is None and activations is not None:
        kwargs["quantization_config"] = MoeNvfp4Config(
            activations=activations, recipe=args.recipe, exclude=args.exclude
        )
    _empty_model(config, source)  # else transformers ends in a traceback where the config makes no sense
    if place.type != "cpu":  # needs the package accelerate (extra "gpu"), which a CPU can do without
        kwargs["device_map"] = str(place)
    loaded = _model_class(config).from_pretrained(source, dtype=torch.bfloat16, **kwargs)
    return loaded.eval(), AutoTokenizer.from_pretrained(source) if tokenizer else None


def _expert_bytes(model: Any) -> tuple[int, int]:
    """Bytes of the experts' weights: (in bf16, as they are)."""
    from moe_nvfp4.integrations.huggingface.experts import HFExperts

    before = after = 0
    for module in model.modules():
        if isinstance(module, HFExperts):
            layout = module.layout
            rows = layout.intermediate_size * (3 if layout.gated else 2)
            before += 2 * layout.num_experts * rows * layout.hidden_size
            after += sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
    return before, after


def _say(line: str) -> None:
    print(line, flush=True)
