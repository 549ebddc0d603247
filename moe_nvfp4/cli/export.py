"""moe-nvfp4 export: write a GGUF file for llama.cpp."""

from __future__ import annotations

import argparse

from moe_nvfp4.cli.models import folder
from moe_nvfp4.cli.options import Commands, check_writable, command, path
from moe_nvfp4.cli.output import note


def add(commands: Commands) -> None:
    sub = command(
        commands, "export", run, "write a GGUF file for llama.cpp",
        "Put the experts and linears of the NVFP4 checkpoint SRC into a GGUF file, which llama.cpp computes with and "
        "cannot quantize. All else is that of --base, a GGUF file of the same model in any type, such as Q8_0. Each "
        "matrix is compared with the one that it replaces. The file is for llama.cpp: transformers' gguf_file= reads "
        "it without its global scales.",
    )  # fmt: skip
    sub.add_argument("source", metavar="SRC", help="folder or Hub name of a 4-bit checkpoint")
    sub.add_argument("destination", metavar="OUT.gguf", type=path, help="file to make; must not exist")
    sub.add_argument(
        "--base", metavar="BASE.gguf", type=path, required=True, help="a GGUF file of the same model, in one piece"
    )
    sub.add_argument(
        "--any-architecture", action="store_true",
        help="also for architectures of which it is not known that llama.cpp uses the experts' scales",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from moe_nvfp4.quantize.export import export_gguf
    from moe_nvfp4.quantize.report import readable_size

    check_writable(args.destination)
    report = export_gguf(folder(args.source), args.base, args.destination, args.any_architecture)
    for why in dict.fromkeys(report.left.values()):
        names = [name for name, other in report.left.items() if other == why]
        note(f"note: {len(names)} other 4-bit matrices of {args.source} are here as the base has them, because {why}: "
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")  # fmt: skip
    note(
        f"wrote {args.destination}: {report.matrices} matrices of {report.layers} layers, "
        f"{readable_size(report.before)} -> {readable_size(report.after)}, at most {report.error:.3f} from the base"
    )
    return 0
