"""The command line: a file for each command, with `add` (its options) and `run`."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback

from moe_nvfp4._version import __version__
from moe_nvfp4.cli import (
    bench,
    calibrate,
    chat,
    compare,
    compile,
    completion,
    env,
    export,
    generate,
    importance,
    info,
    output,
    quantize,
    selftest,
    serve,
    verify,
)
from moe_nvfp4.cli.parser import Parser

COMMANDS = (
    generate,
    chat,
    quantize,
    verify,
    importance,
    calibrate,
    info,
    compare,
    export,
    serve,
    bench,
    selftest,
    compile,
    env,
    completion,
)  # as --help lists them; fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code (1: `verify` found a wrong server; 2: an error whose message says what
    to do)."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None where it is closed, as by >&-
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # LC_ALL=C: a letter that cannot be printed must not end a command
            stream.reconfigure(errors="backslashreplace")
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    if args.command != "env":  # which shows the variables that the user has set
        output.set_up(args.quiet, getattr(args, "json", False))
    try:
        code = args.run(args)
    except KeyboardInterrupt as stop:  # a command that can go on later says how
        print(f"\nmoe-nvfp4: interrupted{''.join(f': {why}' for why in stop.args)}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has read enough, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit raises again
        return 141  # 128 + SIGPIPE
    except _explained() as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"moe-nvfp4 {args.command}: error: {output.printable(message)}", file=sys.stderr)
        return 2
    except Exception:
        if args.command != "verify":
            raise
        traceback.print_exc()  # the exit code of a traceback is 1, and means a wrong server here
        return 2
    return code or 0


def _explained() -> tuple[type[Exception], ...]:
    """Errors whose message needs no traceback. safetensors has its own for a full disk, and is imported only then."""
    from safetensors import SafetensorError

    from moe_nvfp4.demo import DemoError

    return (ValueError, NotImplementedError, OSError, ImportError, DemoError, SafetensorError)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands. It is also what shell completion and the reference of the commands are made from."""
    parser = Parser(
        prog="moe-nvfp4",
        description="4-bit (NVFP4) experts for the mixture-of-experts models of Hugging Face.",
        epilog="examples:\n"
        "  moe-nvfp4 generate demo --prompt 'Name three primary colors.'\n"
        "  moe-nvfp4 info Qwen/Qwen3-30B-A3B\n"
        "  moe-nvfp4 quantize ./Qwen3-30B-A3B ./Qwen3-30B-A3B-NVFP4\n"
        "  moe-nvfp4 compare demo\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"moe-nvfp4 {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser
