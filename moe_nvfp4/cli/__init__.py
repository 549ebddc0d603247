"""The command line: a file for each command, with `add` (its options) and `run`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from moe_nvfp4._version import __version__
from moe_nvfp4.cli import (
    bench,
    calibrate,
    chat,
    compare,
    compile,
    env,
    generate,
    importance,
    info,
    quantize,
    serve,
    verify,
)
from moe_nvfp4.demo import DemoError

COMMANDS = (
    generate,
    chat,
    quantize,
    verify,
    importance,
    calibrate,
    info,
    compare,
    serve,
    bench,
    compile,
    env,
)  # as --help lists them; fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code (2: an error whose message says what to do)."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except KeyboardInterrupt:
        print("\nmoe-nvfp4: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has read enough, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit raises again
        return 141  # 128 + SIGPIPE
    except _explained() as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"moe-nvfp4 {args.command}: error: {message}", file=sys.stderr)
        return 2
    return 0


def _explained() -> tuple[type[Exception], ...]:
    """Errors whose message needs no traceback. safetensors has its own for a full disk, and is imported only then."""
    from safetensors import SafetensorError

    return (ValueError, NotImplementedError, OSError, ImportError, DemoError, SafetensorError)


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
    for module in COMMANDS:
        module.add(commands)
    return parser
