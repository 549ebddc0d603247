"""What commands share: options and the values they take."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

# torch and transformers take seconds to import, so each command imports what it needs, and --help needs neither. For
# that these constants are repeated here; a test compares them with the modules that they come from.
RECIPES, DEFAULT_RECIPE = ("max", "four_over_six", "mse"), "mse"
CALIBRATED_RECIPES = ("weighted", "gptq", "distill")
DIALECTS = ("modelopt", "compressed-tensors")
ACTIVATIONS = ("bf16", "nvfp4", "nvfp4_four_over_six")
ACTIVATIONS_HELP = "bf16: W4A16; nvfp4: W4A4; nvfp4_four_over_six: W4A4 with the better of two scales for each block"
WINDOW = 512  # tokens
ENGINES = ("vllm", "transformers")
SHELLS = ("bash", "zsh")

MODEL_HELP, ORIGINAL_HELP = (
    f"folder or Hub name of a Hugging Face MoE model{which}; 'demo' makes a small one"
    for which in (", 4-bit or not", " that is not NVFP4")
)

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int | None], help: str, description: str
) -> argparse.ArgumentParser:
    """Add a command with the options that every command has. run: returns the exit code, if it is not 0."""
    sub = commands.add_parser(name, help=help, description=description)
    sub.add_argument("--quiet", action="store_true", help="no progress bars, notes or warnings")
    sub.set_defaults(run=run)
    return sub


# ---- groups of options ---------------------------------------------------------------------------


def add_quantizing(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--recipe", choices=(*RECIPES, *CALIBRATED_RECIPES), default=None,
        help=f"how dense weights are quantized (default {DEFAULT_RECIPE}); weighted: errors count by how large "
        "inputs are; gptq: by their effect on the outputs for a text; distill: gptq's, then learned from the outputs "
        "of the original's layers (both only in moe-nvfp4 quantize)",
    )  # fmt: skip
    sub.add_argument(
        "--linears", action="append", default=None, metavar="WHICH",
        help="linears to quantize besides the experts: attention, shared (experts), mlp, lm_head, all, or a name that "
        "may have wildcards; several with commas between them (default: none)",
    )  # fmt: skip
    add_exclude(sub)


def add_exclude(sub: argparse.ArgumentParser, what: str = "experts modules, or --linears,") -> None:
    sub.add_argument(
        "--exclude", action="append", default=[], metavar="NAME",
        help=f"{what} to leave as they are; may have wildcards: 'model.layers.0.*'",
    )  # fmt: skip


def add_answering(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--temperature", type=temperature, default=0.0, help="0 (default): the likeliest token")
    sub.add_argument(
        "--activations", choices=ACTIVATIONS, default=None,
        help=f"{ACTIVATIONS_HELP} (default: what the files say, else bf16)",
    )  # fmt: skip


def add_texts(
    sub: argparse.ArgumentParser, windows: int, shortest: int, default: str = "default, for demo only: a built-in one"
) -> None:
    sub.add_argument("--text", type=path, help=f'a text file, or .jsonl with a "text" in each line ({default})')
    sub.add_argument(
        "--windows", type=whole(1), default=windows, metavar="N", help=f"pieces of the text to use (default {windows})"
    )
    sub.add_argument(
        "--window", type=whole(shortest), default=None, metavar="N",
        help=f"tokens in each piece (default {WINDOW}, or as many as the model takes)",
    )  # fmt: skip


def add_device(sub: argparse._ActionsContainer) -> None:
    sub.add_argument("--device", default=None, help="cpu, cuda, cuda:1 (default: cuda where there is one)")


def add_json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def add_cpu_experts(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--cpu-experts", type=layers, default=None, metavar="N",
        help="how many layers keep their experts on the CPU and compute them there: a number, 'all', or 'auto' for as "
        "many as the GPU has no room for",
    )  # fmt: skip


def add_map_files(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--map-files", action="store_true",
        help="leave 4-bit experts that run on the CPU in their files, for models larger than the memory: what a token "
        "needs is read from there",
    )  # fmt: skip


# ---- values --------------------------------------------------------------------------------------


def path(text: str) -> Path:
    """A path. The shell does not expand the ~ of --text=~/file, so this does."""
    return Path(os.path.expanduser(text))


def check_writable(path: Path) -> None:
    """ValueError if the file `path`, or a new folder, cannot be made; to be asked before the work, not after it."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ValueError(f"{path} cannot be written: {place} is read-only or not a folder; name another place")


def check_beside(path: Path, begins: str) -> None:
    """ValueError if the file `path`, which is written beside the one that a user names, is there already and does not
    begin as this command's do."""
    if path.exists() and not (path.is_file() and path.read_text("utf-8", "replace").startswith(begins)):
        raise ValueError(f"{path} is written, too, and there is one that is not of this command: name another place")


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
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0; 0 takes the likeliest token")
    return number


def prompt_text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the prompt is empty: write a text to answer or, with --raw, to continue")
    return text
