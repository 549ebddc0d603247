"""moe-nvfp4 compare: accuracy of 4-bit against the original."""

from __future__ import annotations

import argparse
from typing import Any

from moe_nvfp4.cli.models import check_original, form_of, load, model_config, resolve, text_of, windows_of
from moe_nvfp4.cli.options import (
    ACTIVATIONS,
    ACTIVATIONS_HELP,
    DEFAULT_RECIPE,
    ORIGINAL_HELP,
    Commands,
    add_device,
    add_json,
    add_quantizing,
    add_texts,
    command,
    path,
    whole,
)
from moe_nvfp4.cli.output import note, say, show_json, table

LABELS = {"bf16": "W4A16", "nvfp4": "W4A4", "nvfp4_four_over_six": "W4A4 4/6"}


def add(commands: Commands) -> None:
    sub = command(
        commands, "compare", run, "measure the accuracy of 4-bit against the original",
        "Measure perplexity, KL divergence of the next-token distributions and top-1 agreement of MODEL with 4-bit "
        "experts (W4A16 and W4A4) against the original, on a text, both in bf16. Needs memory for both models.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=ORIGINAL_HELP)
    sub.add_argument(
        "--quantized", metavar="DST",
        help="the 4-bit folder to compare, made by any recipe or tool (default: MODEL, quantized while loading)",
    )  # fmt: skip
    add_texts(sub, 12, shortest=2)
    add_quantizing(sub)
    sub.add_argument(
        "--activations", nargs="+", choices=ACTIVATIONS, action="extend",
        help=f"which to compare (default: bf16 nvfp4). {ACTIVATIONS_HELP}",
    )  # fmt: skip
    sub.add_argument(
        "--tasks", metavar="NAME,...", action="append",
        help="also run these tasks of lm-eval (pip install lm-eval): arc_easy,hellaswag, or the YAML file of one",
    )  # fmt: skip
    sub.add_argument("--limit", type=whole(1), metavar="N", help="with --tasks: at most N questions of each task")
    sub.add_argument(
        "--plot", type=path, metavar="OUT.png",
        help="plot the KL by position in the window (pip install matplotlib); the numbers go to OUT.json",
    )  # fmt: skip
    add_device(sub)
    add_json(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.cli import judging
    from moe_nvfp4.evaluate import evaluate
    from moe_nvfp4.integrations.huggingface import set_activations
    from moe_nvfp4.progress import progress_bar

    check_original(args)
    if args.limit is not None and not args.tasks:
        raise ValueError("--limit would have no effect without --tasks, whose questions it limits: name tasks")
    if args.plot is not None:
        judging.check_plot(args.plot, judging.BY_POSITION)
    tasks = judging.tasks_of(",".join(args.tasks)) if args.tasks else None
    text = text_of(args)
    original, tokenizer = load(args, None)
    model = _quantized(args)
    warnings = [] if args.quantized is None else _of_another_model(args, original, model)
    windows = windows_of(args, tokenizer, text, original.config).to(original.device)

    chosen = {a: LABELS[a] for a in args.activations or ("bf16", "nvfp4")}
    models = {name: lambda ids, a=a: set_activations(model, a)(ids) for a, name in chosen.items()}
    found = evaluate(original, models, progress_bar(windows, desc="compare", unit="window", show=True))
    labels = {"original": "bf16"} | {name: name for name in models}
    scores: dict[str, dict[str, float]] = {}
    if tasks is not None:
        scores["bf16"] = tasks.run(original, tokenizer, args.limit)
        for activations, name in chosen.items():
            scores[name] = tasks.run(set_activations(model, activations), tokenizer, args.limit)
    if args.plot is not None:
        judging.plot_positions(args.plot, {name: found[name] for name in models}, windows.shape[1])
    recipe = args.recipe or DEFAULT_RECIPE
    if args.json:
        show_json({
            "model": args.model, "quantized": args.quantized, "recipe": None if args.quantized else recipe,
            "tokens": found["original"].tokens, "window": windows.shape[1],
            "models": {
                labels[name]: {"perplexity": of.perplexity, "kl": of.kl, "kl_interval": of.kl_interval,
                               "kl_median": of.kl_median, "top1": of.top1}
                for name, of in found.items()
            },
            "tasks": scores, "warnings": warnings,
        })  # fmt: skip
        return
    of_what = args.quantized or f"recipe {recipe}"
    say(f"{args.model}, {of_what}, {found['original'].tokens} tokens in windows of {windows.shape[1]}")
    table(
        ["", "perplexity", "KL (nats)", "95 % interval", "median", "top-1"],
        [
            [
                labels[name],
                f"{of.perplexity:.3f}",
                f"{of.kl:.5f}",
                "{:.5f} to {:.5f}".format(*of.kl_interval) if of.kl_interval else "-",
                f"{of.kl_median:.5f}",
                f"{of.top1:.2%}",
            ]
            for name, of in found.items()
        ],
    )
    for warning in warnings:
        say(f"warning: {warning}")
    if args.plot is not None:
        note(f"wrote {args.plot} and {args.plot.with_suffix('.json')}")
    if scores:
        say()
        rows = [[task, *(f"{of[task]:.4f}" for of in scores.values())] for task in scores["bf16"]]
        table(["", *scores], rows)


def _of_another_model(args: argparse.Namespace, original: Any, model: Any) -> list[str]:
    """A warning if `model`, of the folder --quantized, has other settings than `original`. ValueError if its class is
    another."""
    from moe_nvfp4.quantize.settings import differences, settings

    one, other = type(model).__name__, type(original).__name__
    if one != other:
        raise ValueError(f"{args.quantized} is a {one}, {args.model} a {other}: name a folder that was made from it")
    found = differences(settings(model.config), settings(original.config))
    return [f"config.json of {args.quantized} has other settings than that of {args.model}: {found}"] if found else []


def _quantized(args: argparse.Namespace) -> Any:
    """The 4-bit model."""
    if args.quantized is None:
        return load(args, "bf16", tokenizer=False)[0]
    source = resolve(args.quantized)
    if form_of(model_config(source), args.quantized) != "NVFP4":
        raise ValueError(f"{args.quantized} is not quantized to NVFP4: name a 4-bit folder, or leave out --quantized")
    return load(argparse.Namespace(**{**vars(args), "model": source}), None, tokenizer=False)[0]
