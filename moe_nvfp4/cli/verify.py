"""moe-nvfp4 verify: check a 4-bit checkpoint, or a server of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from moe_nvfp4.cli import served
from moe_nvfp4.cli.models import folder
from moe_nvfp4.cli.options import Commands, add_json, command, path
from moe_nvfp4.cli.output import note, say, show_json, table

if TYPE_CHECKING:
    from moe_nvfp4.quantize.verify import VerificationReport


def add(commands: Commands) -> None:
    sub = command(
        commands, "verify", run, "check a 4-bit checkpoint, or a server of it",
        "Read every tensor of the NVFP4 checkpoint DST and check names, shapes, dtypes, scales, and that every expert "
        "is complete. With --against, also show the error of each layer against the original. With --server, ask a "
        "server of DST for log-probabilities instead, compare them with the model computed here in fp32, and say "
        "whether it misreads DST, and how. Exit code 0 (good, or a right server), 1 (a wrong server) or 2.",
    )  # fmt: skip
    sub.add_argument("destination", metavar="DST", help="folder or Hub name of a 4-bit checkpoint")
    sub.add_argument("--against", default=None, metavar="SRC", help="the checkpoint it was made from, or 'demo'")
    sub.add_argument(
        "--plot", type=path, metavar="OUT.png",
        help="with --against: plot the error of every layer and expert (pip install matplotlib); the numbers go to "
        "OUT.json",
    )  # fmt: skip
    served.add(sub)
    add_json(sub)


def run(args: argparse.Namespace) -> int:
    from moe_nvfp4.cli import judging
    from moe_nvfp4.quantize.verify import verify_checkpoint

    if args.server is not None:
        return served.run(args)
    served.refuse(args)
    if args.plot is not None:
        judging.check_plot(args.plot, judging.BY_EXPERT)
        if args.against is None:
            raise ValueError("--plot shows the error against the original: name it with --against SRC")
    against = None if args.against is None else folder(args.against)
    report = verify_checkpoint(folder(args.destination), against)
    if args.json:
        show_json(as_json(report))
    else:
        show(report)
    if args.plot is not None:
        judging.plot_experts(args.plot, report.experts)
        if not args.json:
            note(f"wrote {args.plot} and {args.plot.with_suffix('.json')}")
    return 0


def show(report: VerificationReport) -> None:
    """Print what was found, with a line for each layer that was compared."""
    from moe_nvfp4.quantize.report import readable_snr

    say(f"{report.folder}: {report.matrices} NVFP4 matrices, {report.tensors} other tensors, {report.size:,} bytes: "
        "good")  # fmt: skip
    for line in report.warnings:
        say(line)
    if report.layers:
        table(
            ["", "matrices", "relative error", "SNR (dB)"],
            [
                [name, str(sums.matrices), f"{sums.relative:.5f}", readable_snr(sums, 2)]
                for name, sums in report.layers.items()
            ],
        )


def as_json(report: VerificationReport) -> dict[str, Any]:
    """What was found. snr_db is null where a layer has no error."""
    return {
        "folder": report.folder, "nvfp4_matrices": report.matrices, "other_tensors": report.tensors,
        "bytes": report.size, "warnings": report.warnings,
        "layers": [
            {"name": name, "matrices": sums.matrices, "relative_error": sums.relative, "snr_db": sums.snr}
            for name, sums in report.layers.items()
        ],
    }  # fmt: skip
