"""moe-nvfp4 env: what an issue report needs."""

from __future__ import annotations

import argparse

from moe_nvfp4.cli.options import Commands, command, say


def add(commands: Commands) -> None:
    command(
        commands, "env", run, "show what an issue report needs",
        "Show versions, devices, which backend runs on each and why the others do not, caches and their sizes, and "
        "the environment variables that matter here.",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.environment import describe

    for line in describe():
        say(line)
