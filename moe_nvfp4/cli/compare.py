"""moe-nvfp4 compare: accuracy of 4-bit against the original."""

from __future__ import annotations

import argparse
from typing import Any

from moe_nvfp4.cli.models import check_original, load, model_config, resolve, text_of, windows_of
from moe_nvfp4.cli.options import (
    ACTIVATIONS,
    ACTIVATIONS_HELP,
    DEFAULT_RECIPE,
    MODEL_HELP,
    Commands,
    add_device,
    add_quantizing,
    add_texts,
    command,
    path,
    say,
    whole,
)

LABELS = {"bf16": "W4A16", "nvfp4": "W4A4", "nvfp4_four_over_six": "W4A4 4/6"}


def add(commands: Commands) -> None:
    sub = command(
        commands, "compare", run, "measure the accuracy of 4-bit against the original",
        "Measure perplexity, KL divergence of the next-token distributions and top-1 agreement of MODEL with 4-bit "
        "experts (W4A16 and W4A4) against the original, on a text. Needs memory for both models.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument(
        "--quantized", metavar="DST",
        help="the 4-bit folder to compare, made by any recipe or tool (default: MODEL, quantized while loading)",
    )  # fmt: skip
    add_texts(sub, 12, shortest=2)
    add_quantizing(sub)
    sub.add_argument(
        "--activations", nargs="+", choices=ACTIVATIONS, default=["bf16", "nvfp4"],
        help=f"which to compare (default: bf16 nvfp4). {ACTIVATIONS_HELP}",
    )  # fmt: skip
    sub.add_argument(
        "--tasks", metavar="NAME,...",
        help="also run these tasks of lm-eval (pip install lm-eval): arc_easy,hellaswag, or the YAML file of one",
    )  # fmt: skip
    sub.add_argument("--limit", type=whole(1), metavar="N", help="with --tasks: at most N questions of each task")
    sub.add_argument(
        "--plot", type=path, metavar="OUT.png",
        help="plot the KL by position in the window (pip install matplotlib); the numbers go to OUT.json",
    )  # fmt: skip
    add_device(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.cli import judging
    from moe_nvfp4.evaluate import evaluate
    from moe_nvfp4.integrations.huggingface import set_activations
    from moe_nvfp4.progress import progress_bar

    check_original(args)
    if args.limit is not None and not args.tasks:
        raise ValueError("--limit would have no effect without --tasks, whose questions it limits: name tasks")
    if args.plot is not None:
        judging.check_plot(args.plot)
    tasks = judging.tasks_of(args.tasks) if args.tasks else None
    text = text_of(args)
    original, tokenizer = load(args, None)
    model = _quantized(args)
    windows = windows_of(args, tokenizer, text).to(original.device)

    chosen = {a: LABELS[a] for a in args.activations}
    models = {name: lambda ids, a=a: set_activations(model, a)(ids) for a, name in chosen.items()}
    found = evaluate(original, models, progress_bar(windows, desc="compare", unit="window", show=True))
    recipe = f"recipe {args.recipe or DEFAULT_RECIPE}" if args.quantized is None else args.quantized
    say(f"{args.model}, {recipe}, {found['original'].tokens} tokens in windows of {args.window}")
    say(f"{'':8s}{'perplexity':>12s}{'KL (nats)':>12s}{'median':>9s}{'top-1':>9s}")
    for name, of in found.items():
        label = "bf16" if name == "original" else name
        say(f"{label:8s}{of.perplexity:12.3f}{of.kl:12.5f}{of.kl_median:9.5f}{of.top1:9.2%}")
    if args.plot is not None:
        judging.plot_positions(args.plot, {name: found[name] for name in models}, args.window)
        say(f"wrote {args.plot} and {args.plot.with_suffix('.json')}")
    if tasks is not None:
        scores = {"bf16": tasks.run(original, tokenizer, args.limit)}
        for activations, name in chosen.items():
            scores[name] = tasks.run(set_activations(model, activations), tokenizer, args.limit)
        for line in judging.score_lines(scores):
            say(line)


def _quantized(args: argparse.Namespace) -> Any:
    """The 4-bit model."""
    if args.quantized is None:
        return load(args, "bf16", tokenizer=False)[0]
    source = resolve(args.quantized)
    if "quantization_config" not in model_config(source).to_dict():
        raise ValueError(f"{args.quantized} is not quantized: name a 4-bit folder, or leave out --quantized")
    return load(argparse.Namespace(**{**vars(args), "model": source}), None, tokenizer=False)[0]
