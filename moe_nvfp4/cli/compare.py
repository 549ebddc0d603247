"""moe-nvfp4 compare: accuracy of 4-bit against the original."""

from __future__ import annotations

import argparse

from moe_nvfp4.cli.models import load, model_config, resolve, text_of, windows_of
from moe_nvfp4.cli.options import (
    DEFAULT_RECIPE,
    MODEL_HELP,
    Commands,
    add_device,
    add_quantizing,
    add_texts,
    command,
    say,
)


def add(commands: Commands) -> None:
    sub = command(
        commands, "compare", run, "accuracy of 4-bit against the original",
        "Perplexity, KL divergence of the next-token distributions and top-1 agreement of 4-bit "
        "experts (W4A16 and W4A4) against the original MODEL, on a text. Needs memory for both.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_texts(sub, 12, shortest=2)
    add_quantizing(sub)
    add_device(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.evaluate import evaluate
    from moe_nvfp4.integrations.huggingface import set_activations
    from moe_nvfp4.progress import progress_bar

    source = resolve(args.model)
    if "quantization_config" in model_config(source).to_dict():
        raise ValueError(f"{args.model} is quantized already: compare needs the original to compare with")
    text = text_of(args)
    original, tokenizer = load(args, None)
    model, _ = load(args, "bf16", tokenizer=False)
    windows = windows_of(args, tokenizer, text).to(original.device)

    bits = {"W4A16": "bf16", "W4A4": "nvfp4"}
    models = {name: lambda ids, a=a: set_activations(model, a)(ids) for name, a in bits.items()}
    found = evaluate(original, models, progress_bar(windows, desc="compare", unit="window", show=True))
    tokens = found["original"].tokens
    say(f"{args.model}, recipe {args.recipe or DEFAULT_RECIPE}, {tokens} tokens in windows of {args.window}")
    say(f"{'':8s}{'perplexity':>12s}{'KL (nats)':>12s}{'top-1':>9s}")
    for name, of in found.items():
        label = "bf16" if name == "original" else name
        say(f"{label:8s}{of.perplexity:12.3f}{of.kl:12.5f}{of.top1:9.2%}")
