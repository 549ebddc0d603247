"""moe-nvfp4 verify --server: is the server of a folder right?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from moe_nvfp4.cli.models import folder, form_of, load, model_config
from moe_nvfp4.cli.options import ACTIVATIONS, add_device, path, whole
from moe_nvfp4.cli.output import note, say, show_json, table

if TYPE_CHECKING:
    from moe_nvfp4.integrations.huggingface.misread import Verdict

PROMPTS, TOKENS = 12, 64
ONLY = ("model", "text", "prompts", "tokens", "activations", "device")  # options that go with --server


def add(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("with --server")
    group.add_argument("--server", metavar="URL", help="the address of an OpenAI endpoint: http://127.0.0.1:8000")
    group.add_argument("--model", metavar="NAME", help="the model's name there, if the server has several")
    group.add_argument("--text", type=path, help="a text file to cut prompts from (default: a built-in text)")
    group.add_argument("--prompts", type=whole(1), metavar="N", help=f"how many prompts (default {PROMPTS})")
    group.add_argument("--tokens", type=whole(16), metavar="N", help=f"tokens of a prompt (default {TOKENS})")
    group.add_argument(
        "--activations", choices=ACTIVATIONS, help="what the server was asked to compute (default: what DST says)"
    )
    add_device(group)


def refuse(args: argparse.Namespace) -> None:
    """ValueError for options that have no effect without --server."""
    if given := [f"--{name}" for name in ONLY if getattr(args, name) is not None]:
        raise ValueError(f"{' and '.join(given)} would have no effect without --server URL: name a server")


def run(args: argparse.Namespace) -> int:
    """Ask the server, compute the same here, and print the verdict. Returns the exit code."""
    import torch

    from moe_nvfp4.cli.models import text_of, tokenizer_of
    from moe_nvfp4.integrations.endpoint import Endpoint, ask
    from moe_nvfp4.integrations.huggingface.calibration import cut
    from moe_nvfp4.integrations.huggingface.layerwise import check_ids
    from moe_nvfp4.integrations.huggingface.misread import judge
    from moe_nvfp4.progress import progress_bar
    from moe_nvfp4.quantize.files import open_checkpoint
    from moe_nvfp4.quantize.source import model_dtype, nvfp4_info

    for option in ("against", "plot"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{option} compares folders, --server a server: leave one of them out")
    server, source = Endpoint(args.server, args.model), folder(args.destination)
    config = model_config(source)
    if form_of(config, args.destination) != "NVFP4":
        raise ValueError(f"{args.destination} is not an NVFP4 checkpoint: name the 4-bit folder that is served")
    checkpoint = open_checkpoint(source)
    if (info := nvfp4_info(checkpoint)) is not None and info.mixed:
        raise NotImplementedError(
            f"{args.destination} has layers whose activations are quantized (W4A4) and others (W4A16), and here all "
            "run in one way: no verdict about a server of it is possible"
        )
    tokenizer = tokenizer_of(source)
    text = text_of(argparse.Namespace(text=args.text, model="demo", command=args.command))
    tokens = args.tokens or TOKENS
    windows = [ids for ids in cut(tokenizer, text, tokens) if len(ids) == tokens][: args.prompts or PROMPTS]
    if not windows:
        raise ValueError(f"the text has less than {tokens} tokens: write a smaller --tokens, or name a longer --text")
    check_ids(torch.stack(windows), config)
    way, asked = ask(server, tokenizer, windows)
    loading = argparse.Namespace(
        model=source, device=args.device, activations=args.activations, recipe=None, exclude=[], linears=None
    )
    model, _ = load(loading, None, tokenizer=False)
    bar = lambda names: progress_bar(names, desc="computed here", unit="model", show=not args.json)
    in_bf16 = model_dtype(checkpoint) == torch.bfloat16
    exact = lambda: load(loading, None, tokenizer=False, dtype=torch.float32)[0]
    verdict = judge(model, asked, bar, None if in_bf16 else exact)
    if args.json:
        show_json({"folder": source, "server": server.url, "way": way, **as_json(verdict)})
    else:
        show(verdict, server.url, way)
    return 0 if verdict.right else 1


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Differences are nats; null where one is infinite."""
    return {
        "right": verdict.right, "fits": verdict.fits, "numbers": verdict.numbers, "missing": verdict.missing,
        "difference": verdict.difference, "limit": verdict.limit, "bf16_noise": verdict.noise,
        "misreadings": dict(verdict.misreadings), "without_effect": list(verdict.without_effect),
        "undecided": list(verdict.undecided),
    }  # fmt: skip


def show(verdict: Verdict, url: str, way: str) -> None:
    say(f"{url}: {way}, {verdict.numbers} numbers" + f", {verdict.missing} more missing" * bool(verdict.missing))
    say(f"difference of the server from this folder, computed here in fp32: {verdict.difference:.4f} nats on average")
    say(f"of bf16 here from fp32: {verdict.noise:.4f}; of a right server, at most {verdict.limit:.4f}")
    note("")
    note("difference of the server from this folder, misread:")
    rows = sorted(verdict.misreadings.items(), key=lambda pair: pair[1])
    if rows:
        table([], [[f"  {name}", f"{difference:.4f}"] for name, difference in rows])
    for name in verdict.without_effect:
        note(f"  {name}: changes nothing in this folder")
    say("")
    say(conclusion(verdict))


def conclusion(verdict: Verdict) -> str:
    if verdict.right:
        or_else = "; with these prompts, it could as well be that " * bool(verdict.undecided)
        return f"right: the server computes what this folder says{or_else}{', or that '.join(verdict.undecided)}"
    if verdict.fits is not None:
        return f"WRONG: {verdict.fits}"
    if verdict.missing > verdict.numbers:
        return "WRONG: its log-probabilities are no numbers, as where sums overflow: global scales may be ignored"
    return (
        "WRONG: the server computes something else than this folder says, and no known misreading explains it. Does it "
        "serve this folder, with this version of its files, without adapters and without an FP8 KV cache?"
    )
