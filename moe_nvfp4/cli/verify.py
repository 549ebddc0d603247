"""moe-nvfp4 verify: check a 4-bit checkpoint."""

from __future__ import annotations

import argparse

from moe_nvfp4.cli.models import folder
from moe_nvfp4.cli.options import Commands, command, path, say


def add(commands: Commands) -> None:
    sub = command(
        commands, "verify", run, "check a 4-bit checkpoint",
        "Read every tensor of the NVFP4 checkpoint DST and check names, shapes, dtypes, scales, and that every expert "
        "is complete. With --against, also show the error of each layer against the original. Exit code 0 (good) or 2.",
    )  # fmt: skip
    sub.add_argument("destination", metavar="DST", help="folder or Hub name of a 4-bit checkpoint")
    sub.add_argument("--against", default=None, metavar="SRC", help="the checkpoint it was made from, or 'demo'")
    sub.add_argument(
        "--plot", type=path, metavar="OUT.png",
        help="with --against: plot the error of every layer and expert (pip install matplotlib); the numbers go to "
        "OUT.json",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.cli import judging
    from moe_nvfp4.quantize.verify import verify_checkpoint

    if args.plot is not None:
        judging.check_plot(args.plot)
        if args.against is None:
            raise ValueError("--plot shows the error against the original: name it with --against SRC")
    against = None if args.against is None else folder(args.against)
    report = verify_checkpoint(folder(args.destination), against)
    for line in report.lines():
        say(line)
    if args.plot is not None:
        judging.plot_experts(args.plot, report.experts)
        say(f"wrote {args.plot} and {args.plot.with_suffix('.json')}")
