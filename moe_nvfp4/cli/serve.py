"""moe-nvfp4 serve: answer through the OpenAI API."""

from __future__ import annotations

import argparse
import os
import sys

from moe_nvfp4.cli.models import check_folder, hub_errors, resolve
from moe_nvfp4.cli.options import ENGINES, MODEL_HELP, Commands, add_cpu_experts, command


def add(commands: Commands) -> None:
    sub = command(
        commands, "serve", run, "answer through the OpenAI API",
        "Serve MODEL with 4-bit experts: with vLLM where it is installed (bf16 experts are quantized while loading), "
        "else with the server of transformers. Everything after MODEL is an option of that engine: --host, --port, "
        "--tensor-parallel-size ...",
    )  # fmt: skip
    sub.add_argument("--engine", choices=ENGINES, default=None, help="default: vllm where it is installed")
    add_cpu_experts(sub)
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("options", metavar="...", nargs=argparse.REMAINDER, help="options of the engine")


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.integrations.serve import serve_command

    for ours in ("--engine", "--cpu-experts"):
        if ours in args.options:
            raise ValueError(f"{ours} must stand before MODEL, since everything after MODEL is an option of the engine")
    source = resolve(args.model)
    check_folder(source)
    with hub_errors(source):
        argv = serve_command(source, args.engine, args.options, args.cpu_experts)
    sys.stdout.flush()
    os.execv(argv[0], argv)  # not a child process, so that signals reach the engine
