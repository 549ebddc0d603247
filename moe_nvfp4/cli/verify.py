"""moe-nvfp4 verify: check a 4-bit checkpoint."""

from __future__ import annotations

import argparse

from moe_nvfp4.cli.models import folder
from moe_nvfp4.cli.options import Commands, command, say


def add(commands: Commands) -> None:
    sub = command(
        commands, "verify", run, "check a 4-bit checkpoint",
        "Read every tensor of the NVFP4 checkpoint DST: names, shapes, dtypes, scales, every expert complete. "
        "With --against, the error of each layer against the original too. Exit code 0 (good) or 2.",
    )  # fmt: skip
    sub.add_argument("destination", metavar="DST", help="folder or hub name of a 4-bit checkpoint")
    sub.add_argument("--against", default=None, metavar="SRC", help="the checkpoint it was made from, or 'demo'")


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.quantize.verify import verify_checkpoint

    against = None if args.against is None else folder(args.against)
    report = verify_checkpoint(folder(args.destination), against)
    for line in report.lines():
        say(line)
