"""moe-nvfp4 env: what an issue report needs."""

from __future__ import annotations

import argparse

from moe_nvfp4.cli.options import Commands, add_json, command
from moe_nvfp4.cli.output import say, show_json


def add(commands: Commands) -> None:
    sub = command(
        commands, "env", run, "show what an issue report needs",
        "Show versions, devices, which backend runs on each and why the others do not, caches and their sizes, and "
        "the environment variables that matter here.",
    )  # fmt: skip
    add_json(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.environment import Environment

    found = Environment.here()
    if args.json:
        show_json(vars(found))
        return
    for line in found.lines():
        say(line)
