"""The command line: moe-nvfp4 generate | quantize | verify | calibrate | info | compare."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import DIALECTS, read_config
from moe_nvfp4.quantize.plan import readable_size
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, RECIPES
from moe_nvfp4.weights import ACTIVATIONS

MODEL_HELP = "folder or hub name of a Hugging Face MoE model, 4-bit or not; 'demo' makes a small one"


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (2: a mistake that the message explains)."""
    args = _parser().parse_args(argv)
    from moe_nvfp4.demo import DemoError

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-nvfp4",
        description="4-bit (NVFP4) experts for the mixture-of-experts models of Hugging Face.",
        epilog="examples:\n"
        "  moe-nvfp4 generate demo --prompt 'What is the capital of France?'\n"
        "  moe-nvfp4 info Qwen/Qwen3-30B-A3B\n"
        "  moe-nvfp4 quantize ./Qwen3-30B-A3B ./Qwen3-30B-A3B-NVFP4\n"
        "  moe-nvfp4 compare demo\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, help: str, description: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=description)
        sub.set_defaults(run=run)
        return sub

    def quantizing(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--recipe", choices=RECIPES, default=DEFAULT_RECIPE,
            help=f"how block scales are chosen when dense weights are quantized (default {DEFAULT_RECIPE})",
        )  # fmt: skip
        sub.add_argument(
            "--exclude", action="append", default=[], metavar="NAME",
            help="experts modules to leave as they are, wildcards allowed: 'model.layers.0.*'",
        )  # fmt: skip

    def texts(sub: argparse.ArgumentParser, windows: int) -> None:
        sub.add_argument("--text", type=Path, help="a text file (default for demo: a text of its own)")
        sub.add_argument("--windows", type=int, default=windows, help=f"pieces of the text (default {windows})")
        sub.add_argument("--window", type=int, default=512, help="tokens in each (default 512)")

    def device(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--device", default=None, help="cpu, cuda, cuda:1 (default: cuda where there is one)")

    sub = command(
        "generate", generate, "answer a prompt",
        "Load MODEL with 4-bit experts (quantizing dense ones on the way) and answer a prompt, "
        "token by token. Prints the speed and the memory of the experts before and after.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("--prompt", default="What is the capital of France, and what is it known for?")
    sub.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    sub.add_argument("--temperature", type=float, default=0.0, help="0 (default): the likeliest token")
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
        "--workers", type=int, metavar="N", help="threads (default: one per core, at most 4, 8 with a GPU)"
    )
    device(sub)

    sub = command(
        "verify", verify, "check a 4-bit checkpoint",
        "Read every tensor of the NVFP4 checkpoint DST: names, shapes, dtypes, scales, every expert complete. "
        "With --against, the error of each layer against the original too. Exit code 0 (good) or 2.",
    )  # fmt: skip
    sub.add_argument("destination", metavar="DST", type=Path, help="folder of a 4-bit checkpoint")
    sub.add_argument("--against", type=Path, default=None, metavar="SRC", help="the checkpoint it was made from")

    sub = command(
        "calibrate", calibrate, "add static activation scales",
        "Load MODEL with 4-bit experts, run a text through it and write DST: the same weights, with an input_scale "
        "for every expert, for W4A4 without a scale per token. Needs memory for the 4-bit model.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("destination", metavar="DST", type=Path, help="folder to make; must not exist")
    texts(sub, 4)
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
    texts(sub, 12)
    quantizing(sub)
    device(sub)
    return parser


# ---------------------------------------------------------------- commands
def generate(args: argparse.Namespace) -> None:
    import torch
    from transformers import TextStreamer

    from moe_nvfp4.integrations.huggingface import set_activations

    model, tokenizer = _load(args.model, args.device, args.recipe, args.exclude, args.activations or "bf16")
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
    inputs = {k: v.to(model.device) for k, v in inputs.items() if k in ("input_ids", "attention_mask")}

    class Streamer(TextStreamer):
        times: list[float] = []

        def put(self, value):
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
    prompt = inputs["input_ids"].shape[1]
    _say("")
    if len(times) > 1:
        _say(f"speed:   {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s over {len(times)} tokens, "
             f"first token after {times[0] - start:.2f} s ({prompt} tokens of prompt), on {model.device}")  # fmt: skip
    _say(f"experts: {readable_size(before)} in bf16, {readable_size(after)} in NVFP4 ({before / after:.2f}x smaller)")


def quantize(args: argparse.Namespace) -> None:
    report = convert_checkpoint(
        _folder(args.source), args.destination, args.recipe, args.exclude, args.include, args.dialect,
        args.activations, args.workers, args.device, args.dry_run, share_scales=args.share_scales,
    )  # fmt: skip
    if args.dry_run:
        for line in report.lines():
            _say(line)
        return
    for name, why in report.skipped.items():
        _say(f"left alone: {name}: {why}")
    before, after = readable_size(report.experts_before), readable_size(report.experts_after)
    experts = f"; experts {before} -> {after} ({args.recipe})" if report.quantized else ""
    resumed = f", {readable_size(report.resumed)} of the source by an earlier run" if report.resumed else ""
    for line in report.rescaled_lines():
        _say(line)
    _say(f"wrote {args.destination}: {readable_size(report.bytes_after)}{experts} in {report.seconds:.1f} s{resumed}")


def verify(args: argparse.Namespace) -> None:
    from moe_nvfp4.quantize.verify import verify_checkpoint

    report = verify_checkpoint(args.destination, args.against)
    for line in report.lines():
        _say(line)


def calibrate(args: argparse.Namespace) -> None:
    from moe_nvfp4.integrations.huggingface import calibrate, set_activations

    if args.destination.exists():
        raise ValueError(f"{args.destination} exists: name a folder that does not, or remove it first")
    text = _text(args)
    model, tokenizer = _load(args.model, args.device, args.recipe, args.exclude, "nvfp4")
    windows = _windows(args, tokenizer, text)
    calibrate(model, windows[:, None])
    set_activations(model, "nvfp4").save_pretrained(args.destination)
    tokenizer.save_pretrained(args.destination)
    _say(f"wrote {args.destination}: static scales from {windows.numel()} tokens")


def info(args: argparse.Namespace) -> None:
    import torch

    from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
    from moe_nvfp4.integrations.huggingface.experts import HFExperts, describe
    from moe_nvfp4.quantize.checkpoint import open_checkpoint
    from moe_nvfp4.quantize.plan import separate_scales_warning

    source = _resolve(args.model)
    config = _config(source)
    quantization = config.to_dict().get("quantization_config")
    chosen = MoeNvfp4Config(exclude=args.exclude)
    if quantization is not None:
        if read_config(quantization) is None:
            raise ValueError(f"{args.model} is quantized with {quantization.get('quant_method')!r}, not with NVFP4")
        chosen = MoeNvfp4Config.from_dict(quantization)
    with torch.device("meta"):
        model = _model_class(config)._from_config(config, dtype=torch.bfloat16)
    rows, skipped, inside = [], [], "\0"
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
        dense = 2 * sum(p.numel() for p in module.parameters())
        packed = sum(p.numel() * p.element_size() for p in experts.parameters())
        rows.append((name, type(module).__name__, layout, experts.gate, dense, packed))
    total = 2 * sum(p.numel() for p in model.parameters())
    state = "bf16, would become NVFP4" if quantization is None else f"NVFP4 of {chosen.dialect}"
    _say(f"{args.model}: {type(model).__name__}, {len(rows)} layers of experts, {state}")
    for name, kind, layout, gate, dense, packed in rows:
        shape = f"E {layout.num_experts}  H {layout.hidden_size}  I {layout.intermediate_size}"
        fused = "own gate, unfused" if gate.kind == "raw" else gate.kind
        sizes = f"{readable_size(dense):>9s} -> {readable_size(packed):>9s}"
        _say(f"  {name:44s} {kind:24s} {shape:28s} {fused:12s} {sizes}")
    for name, why in skipped:
        _say(f"  {name:44s} left as it is: {why}")
    if not rows:
        raise ValueError(f"{args.model} has no experts that this library can quantize")
    if quantization is not None and Path(source).is_dir():
        for line in separate_scales_warning(open_checkpoint(source)):
            _say(line)
    dense, packed = sum(r[4] for r in rows), sum(r[5] for r in rows)
    _say(f"experts: {readable_size(dense)} in bf16, {readable_size(packed)} in NVFP4; "
         f"whole model {readable_size(total)} -> {readable_size(total - dense + packed)}")  # fmt: skip


def compare(args: argparse.Namespace) -> None:
    import torch
    from tqdm import tqdm

    from moe_nvfp4.integrations.huggingface import set_activations

    source = _resolve(args.model)
    if "quantization_config" in _config(source).to_dict():
        raise ValueError(f"{args.model} is quantized already: compare needs the original to compare with")
    text = _text(args)
    original, tokenizer = _load(source, args.device, None, [], None)
    model, _ = _load(source, args.device, args.recipe, args.exclude, "bf16", tokenizer=False)
    windows = _windows(args, tokenizer, text).to(original.device)

    names = {"bf16": "bf16", "W4A16": "bf16", "W4A4": "nvfp4"}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in names}  # nll, KL, top-1 equal
    with torch.no_grad():
        for window in tqdm(windows, desc="compare", unit="window"):
            target = window[1:, None]
            base = original(window[None]).logits[0, :-1].float().log_softmax(-1)
            for name, activations in names.items():
                log_p = base
                if name != "bf16":
                    set_activations(model, activations)
                    log_p = model(window[None]).logits[0, :-1].float().log_softmax(-1)
                nll = -log_p.gather(1, target).sum()
                kl = (base.exp() * (base - log_p)).sum()
                same = (log_p.argmax(-1) == base.argmax(-1)).sum()
                sums[name] += torch.stack([nll, kl, same]).double().cpu()
    tokens = len(windows) * (args.window - 1)
    _say(f"{args.model}, recipe {args.recipe}, {tokens} tokens in windows of {args.window}")
    _say(f"{'':8s}{'perplexity':>12s}{'KL (nats)':>12s}{'top-1':>9s}")
    for name, (nll, kl, same) in ((n, (s / tokens).tolist()) for n, s in sums.items()):
        _say(f"{name:8s}{math.exp(nll):12.3f}{kl:12.5f}{same:9.2%}")


# ---------------------------------------------------------------- helpers
def _text(args: argparse.Namespace) -> str:
    """What --text names, or the demo's own text."""
    if args.text is not None:
        return args.text.read_text(errors="replace")
    if args.model != "demo":
        raise ValueError(f"name a text to {args.command} with: --text FILE")
    from moe_nvfp4.demo import demo_text

    return demo_text()


def _windows(args: argparse.Namespace, tokenizer, text: str):
    """int64 [count, window]: the first --windows pieces of the text."""
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
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

    return snapshot_download(source)


def _resolve(model: str) -> str:
    if model != "demo":
        return model
    from moe_nvfp4.demo import demo_path

    return str(demo_path())


def _config(source: str):
    from transformers import AutoConfig

    path = Path(source)
    if not path.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ValueError(f"{source} does not exist")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{source} has no config.json: name the folder of a Hugging Face checkpoint")
    return AutoConfig.from_pretrained(source)


def _model_class(config):
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise ValueError(f"transformers {transformers.__version__} does not know {config.architectures}")


def _load(model: str, device, recipe, exclude, activations, tokenizer: bool = True):
    """(model, tokenizer); recipe None: as it is, without 4-bit experts."""
    import torch
    from transformers import AutoTokenizer

    from moe_nvfp4.integrations.huggingface import MoeNvfp4Config

    source = _resolve(model)
    config = _config(source)
    kwargs = {}
    if recipe is not None and "quantization_config" not in config.to_dict():
        kwargs["quantization_config"] = MoeNvfp4Config(activations=activations, recipe=recipe, exclude=exclude)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu":  # needs the package accelerate (extra "gpu"), which a CPU can do without
        kwargs["device_map"] = device
    loaded = _model_class(config).from_pretrained(source, dtype=torch.bfloat16, **kwargs)
    return loaded.eval(), AutoTokenizer.from_pretrained(source) if tokenizer else None


def _expert_bytes(model) -> tuple[int, int]:
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
