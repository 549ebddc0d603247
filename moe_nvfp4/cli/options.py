"""What commands share of the command line: options, the values they take, one line of output."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

# torch and transformers take seconds to import: each command imports what it needs, and --help does without. So these
# are written down here; a test compares them with the modules that they belong to.
RECIPES, DEFAULT_RECIPE = ("max", "four_over_six", "mse"), "mse"
CALIBRATED_RECIPES = ("weighted", "gptq")
DIALECTS = ("modelopt", "compressed-tensors")
ACTIVATIONS = ("bf16", "nvfp4", "nvfp4_four_over_six")
ACTIVATIONS_HELP = "bf16: W4A16; nvfp4: W4A4; nvfp4_four_over_six: W4A4 whose blocks have the better of two scales"
WINDOW = 512  # tokens
ENGINES = ("vllm", "transformers")

MODEL_HELP = "folder or hub name of a Hugging Face MoE model, 4-bit or not; 'demo' makes a small one"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], None], help: str, description: str
) -> argparse.ArgumentParser:
    """A command with no options yet."""
    sub = commands.add_parser(name, help=help, description=description)
    sub.set_defaults(run=run)
    return sub


# ---- groups of options ---------------------------------------------------------------------------


def add_quantizing(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--recipe", choices=(*RECIPES, *CALIBRATED_RECIPES), default=None,
        help=f"how block scales are chosen when dense weights are quantized (default {DEFAULT_RECIPE}); weighted: by "
        "what the experts get as input; gptq: by what they get of a text, in moe-nvfp4 quantize only",
    )  # fmt: skip
    add_exclude(sub)


def add_exclude(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--exclude", action="append", default=[], metavar="NAME",
        help="experts modules to leave as they are, wildcards allowed: 'model.layers.0.*'",
    )  # fmt: skip


def add_answering(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--temperature", type=temperature, default=0.0, help="0 (default): the likeliest token")
    sub.add_argument(
        "--activations", choices=ACTIVATIONS, default=None,
        help=f"{ACTIVATIONS_HELP} (default: what the files say, else bf16)",
    )  # fmt: skip


def add_texts(
    sub: argparse.ArgumentParser, windows: int, shortest: int, default: str = "default for demo: a text of its own"
) -> None:
    sub.add_argument("--text", type=path, help=f"a text file ({default})")
    sub.add_argument(
        "--windows", type=whole(1), default=windows, metavar="N", help=f"pieces of the text (default {windows})"
    )
    sub.add_argument(
        "--window", type=whole(shortest), default=WINDOW, metavar="N", help=f"tokens in each (default {WINDOW})"
    )


def add_device(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--device", default=None, help="cpu, cuda, cuda:1 (default: cuda where there is one)")


def add_cpu_experts(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--cpu-experts", type=layers, default=None, metavar="N",
        help="layers whose experts stay on the CPU and are computed there, beside the GPU: a number, all, or auto, as "
        "many as the GPU has no room for",
    )  # fmt: skip
    sub.add_argument(
        "--map-files", action="store_true",
        help="leave the 4-bit experts of the CPU in their files, for models that are larger than the memory: what a "
        "token needs is read from there",
    )  # fmt: skip


# ---- values --------------------------------------------------------------------------------------


def path(text: str) -> Path:
    """A path. The shell leaves the ~ of --text=~/file for us."""
    return Path(os.path.expanduser(text))


def check_writable(path: Path) -> None:
    """ValueError where the file or folder `path` cannot be made: asked before the work, not after it."""
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ValueError(f"{path} cannot be written: {place} is read-only, or no folder; name another place")


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return number


def layers(text: str) -> int | str:
    if text in ("all", "auto"):
        return text
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of layers, all or auto")
    return int(text)


def temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on: 0 takes the likeliest token")
    return number


def prompt_text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the prompt is empty: write a text to answer or, with --raw, to continue")
    return text


# ---- output --------------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, flush=True)
