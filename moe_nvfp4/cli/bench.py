"""moe-nvfp4 bench: how fast this machine is with 4-bit experts, beside bf16."""

from __future__ import annotations

import argparse
import gc
from typing import Any

from moe_nvfp4.cli.answers import answer, encode
from moe_nvfp4.cli.models import check_original, load, text_of
from moe_nvfp4.cli.options import (
    ACTIVATIONS,
    ACTIVATIONS_HELP,
    ORIGINAL_HELP,
    Commands,
    add_device,
    add_json,
    command,
    whole,
)
from moe_nvfp4.cli.output import say, show_json, table

TOKENS = {"cpu": (1, 16, 256), "cuda": (1, 16, 64, 256, 1024, 4096)}


def add(commands: Commands) -> None:
    sub = command(
        commands, "bench", run, "measure the speed of this machine",
        "Time one layer (the shape of Qwen3-30B-A3B, random weights that are not in a cache) and MODEL with 4-bit "
        "experts, and transformers' bf16 experts in the same run. The roof of a layer is the time in which torch reads "
        "its 4-bit bytes from memory or does its arithmetic in a matrix product, whichever is longer on this machine.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", nargs="?", help=f"{ORIGINAL_HELP} (default: demo)")
    sub.add_argument(
        "--shape", type=whole(1), nargs=4, metavar=("H", "I", "E", "K"), default=(2048, 768, 128, 8),
        help="the layer's hidden size, intermediate size, experts and experts per token (default 2048 768 128 8)",
    )  # fmt: skip
    sub.add_argument(
        "--tokens", type=whole(1), nargs="+", action="extend", metavar="T", help="batch sizes to time the layer with"
    )
    sub.add_argument("--activations", choices=ACTIVATIONS, default="bf16", help=ACTIVATIONS_HELP)
    sub.add_argument("--max-new-tokens", type=whole(2), metavar="N", help="tokens that MODEL generates (default 48)")
    sub.add_argument("--layer-only", action="store_true", help="do not run MODEL")
    sub.set_defaults(text=None, recipe=None, exclude=[], linears=None)
    add_device(sub)
    add_json(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.environment import headline

    if args.layer_only and (args.model is not None or args.max_new_tokens is not None):
        raise ValueError("MODEL and --max-new-tokens would have no effect with --layer-only: leave out either")
    args.model, args.max_new_tokens = args.model or "demo", args.max_new_tokens or 48
    if not args.layer_only:
        check_original(args)
    found: dict[str, Any] = {"machine": headline()}
    if not args.json:
        say(found["machine"])
    found["layer"] = _layer(args)
    if not args.json:
        _show_layer(found["layer"])
    if not args.layer_only:
        found["model"] = _model(args)
        if not args.json:
            _show_model(found["model"])
    if args.json:
        show_json(found)


def _layer(args: argparse.Namespace) -> dict[str, Any]:
    """The speed of one layer. Seconds, bytes and FLOPs are those of `bench.Row`."""
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
    from moe_nvfp4.progress import progress_bar

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
    tokens = args.tokens or TOKENS["cuda" if device.type == "cuda" else "cpu"]
    bar = progress_bar(tokens, desc="bench", unit="batch", show=True)
    return {
        "device": str(device), "roof": roof._asdict(), "shape": shape._asdict(),
        "activations": args.activations, "backend": layers[0].backend().name,
        "rows": [row._asdict() | {"of_roof": row.least / row.nvfp4}
                 for row in time_layer(*layers, shape, bar, clock, roof)],
    }  # fmt: skip


def _show_layer(found: dict[str, Any]) -> None:
    roof, shape, rows = found["roof"], found["shape"], found["rows"]
    say(f"{found['device']}: reads {roof['bandwidth'] / 1e9:.0f} GB/s, matrix products {roof['flops'] / 1e12:.2f} "
        "TFLOP/s")  # fmt: skip
    say()
    say(f"experts H {shape['hidden_size']} I {shape['intermediate_size']} E {shape['num_experts']} "
        f"top_k {shape['top_k']}, {'W4A16' if found['activations'] == 'bf16' else 'W4A4'}, "
        f"backend {found['backend']}")  # fmt: skip
    table(
        ["T", "us", "GB/s", "TFLOP/s", "of roof", "bf16 us", "x bf16"],
        [
            [
                str(row["tokens"]), f"{row['nvfp4'] * 1e6:.1f}", f"{row['bytes'] / row['nvfp4'] / 1e9:.1f}",
                f"{row['flops'] / row['nvfp4'] / 1e12:.2f}", f"{row['of_roof']:.0%}", f"{row['bf16'] * 1e6:.1f}",
                f"{row['bf16'] / row['nvfp4']:.2f}",
            ]
            for row in rows
        ],
        left=0,
    )  # fmt: skip
    above = [f"T {row['tokens']} ({row['bound']})" for row in rows if row["of_roof"] > 1]
    if above:
        say(f"above 100% of the roof at {', '.join(above)}: the roof is what torch reaches on this machine, and the "
            "layer was faster; or other programs slowed down the roof's measurement")  # fmt: skip


def _model(args: argparse.Namespace) -> dict[str, Any]:
    """The speed of MODEL, with bf16 and with 4-bit experts."""
    text = text_of(args) if args.model == "demo" else "The quick brown fox jumps over the lazy dog. " * 100
    speeds: dict[str, dict[str, float]] = {}
    for label, activations in (("bf16", None), ("NVFP4", args.activations)):
        model, tokenizer = load(args, activations)
        inputs = {name: ids[:, :256] for name, ids in encode(tokenizer, text).items()}
        options = dict(max_new_tokens=args.max_new_tokens, min_new_tokens=args.max_new_tokens)
        answer(model, tokenizer, inputs, 0.0, show=False, max_new_tokens=3)  # compiles, prepares, captures
        said = answer(model, tokenizer, inputs, 0.0, show=False, **options)
        speeds[label] = {"tokens_per_s": said.speed, "first_token_s": said.first}
        del model
        gc.collect()
    return {"model": args.model, "new_tokens": args.max_new_tokens, "speeds": speeds}


def _show_model(found: dict[str, Any]) -> None:
    say()
    say(f"{found['model']}, batch 1, {found['new_tokens']} tokens")
    rows = found["speeds"].items()
    table(["", "tokens/s", "first token"], [
        [label, f"{of['tokens_per_s']:.1f}", f"{of['first_token_s'] * 1e3:.0f} ms"] for label, of in rows
    ])  # fmt: skip
