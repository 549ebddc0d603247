"""moe-nvfp4 bench: how fast this machine is with 4-bit experts, beside bf16."""

from __future__ import annotations

import argparse
import gc

from moe_nvfp4.cli.answers import answer, encode
from moe_nvfp4.cli.models import check_original, load, text_of
from moe_nvfp4.cli.options import ACTIVATIONS, ACTIVATIONS_HELP, MODEL_HELP, Commands, add_device, command, say, whole

TOKENS = {"cpu": (1, 16, 256), "cuda": (1, 16, 64, 256, 1024, 4096)}


def add(commands: Commands) -> None:
    sub = command(
        commands, "bench", run, "measure the speed of this machine",
        "Time one layer (the shape of Qwen3-30B-A3B, random weights that are not in a cache) and MODEL with 4-bit "
        "experts, and transformers' bf16 experts in the same run. The roof of a layer is the time to read its 4-bit "
        "bytes from memory or to do its arithmetic in a bf16 matrix product, whichever is longer on this machine.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL_HELP} (default: demo)")
    sub.add_argument(
        "--shape", type=whole(1), nargs=4, metavar=("H", "I", "E", "K"), default=(2048, 768, 128, 8),
        help="the layer's hidden size, intermediate size, experts and experts per token (default 2048 768 128 8)",
    )  # fmt: skip
    sub.add_argument("--tokens", type=whole(1), nargs="+", metavar="T", help="batch sizes to time the layer with")
    sub.add_argument("--activations", choices=ACTIVATIONS, default="bf16", help=ACTIVATIONS_HELP)
    sub.add_argument("--max-new-tokens", type=whole(2), metavar="N", help="tokens that MODEL generates (default 48)")
    sub.add_argument("--layer-only", action="store_true", help="do not run MODEL")
    sub.set_defaults(text=None, recipe=None, exclude=[])
    add_device(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.environment import headline

    if args.layer_only and (args.model is not None or args.max_new_tokens is not None):
        raise ValueError("MODEL and --max-new-tokens would have no effect with --layer-only: leave out either")
    args.model, args.max_new_tokens = args.model or "demo", args.max_new_tokens or 48
    if not args.layer_only:
        check_original(args)
    say(headline())
    _layer(args)
    if not args.layer_only:
        _model(args)


def _layer(args: argparse.Namespace) -> None:
    from moe_nvfp4.bench import (
        CpuClock,
        CudaClock,
        Shape,
        dense_experts,
        measure_roof,
        random_experts,
        time_layer,
    )
    from moe_nvfp4.devices import usable_device

    device, shape = usable_device(args.device), Shape(*args.shape)
    if shape.top_k > shape.num_experts:
        raise ValueError(f"--shape: {shape.top_k} experts per token of {shape.num_experts} experts: K is at most E")
    if shape.hidden_size % 8 or shape.intermediate_size % 8:
        raise ValueError(
            f"--shape: H {shape.hidden_size} and I {shape.intermediate_size} must be multiples of 8 for the bf16 "
            "product, torch's grouped_mm"
        )
    clock = CudaClock() if device.type == "cuda" else CpuClock()
    roof = measure_roof(clock, device)
    layers = random_experts(shape, device, args.activations), dense_experts(shape, device)
    say(f"{device}: reads {roof.bandwidth / 1e9:.0f} GB/s, bf16 matrix products {roof.flops / 1e12:.2f} TFLOP/s")
    say(f"\nexperts H {shape.hidden_size} I {shape.intermediate_size} E {shape.num_experts} top_k {shape.top_k}, "
        f"{'W4A16' if args.activations == 'bf16' else 'W4A4'}, backend {layers[0].backend().name}")  # fmt: skip
    say(f"{'T':>6s}{'us':>10s}{'GB/s':>8s}{'TFLOP/s':>9s}{'of roof':>9s}{'bf16 us':>10s}{'x bf16':>8s}")
    tokens = args.tokens or TOKENS["cuda" if device.type == "cuda" else "cpu"]
    for row in time_layer(*layers, shape, tokens, clock, roof):
        say(f"{row.tokens:6d}{row.nvfp4 * 1e6:10.1f}{row.bytes / row.nvfp4 / 1e9:8.1f}"
            f"{row.flops / row.nvfp4 / 1e12:9.2f}{row.least / row.nvfp4:9.0%}"
            f"{row.bf16 * 1e6:10.1f}{row.bf16 / row.nvfp4:8.2f}")  # fmt: skip


def _model(args: argparse.Namespace) -> None:
    say(f"\n{args.model}, batch 1, {args.max_new_tokens} tokens")
    say(f"{'':8s}{'tokens/s':>10s}{'first token':>14s}")
    text = text_of(args) if args.model == "demo" else "The quick brown fox jumps over the lazy dog. " * 100
    for label, activations in (("bf16", None), ("NVFP4", args.activations)):
        model, tokenizer = load(args, activations)
        inputs = {name: ids[:, :256] for name, ids in encode(tokenizer, text).items()}
        options = dict(max_new_tokens=args.max_new_tokens, min_new_tokens=args.max_new_tokens)
        answer(model, tokenizer, inputs, 0.0, show=False, max_new_tokens=3)  # compiles, prepares, captures
        said = answer(model, tokenizer, inputs, 0.0, show=False, **options)
        say(f"{label:8s}{said.speed:10.1f}{said.first * 1e3:11.0f} ms")
        del model
        gc.collect()
