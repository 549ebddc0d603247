"""moe-nvfp4 completion: let a shell complete commands, options and files."""

from __future__ import annotations

import argparse

from moe_nvfp4.cli.options import SHELLS, Commands, command, path

FILES = {"MODEL", "SRC", "DST"}  # the names of arguments that may be a folder; so may those of type `path`


def add(commands: Commands) -> None:
    sub = command(
        commands, "completion", run, "let a shell complete commands and options",
        "Print a script that lets SHELL complete commands, options and files by TAB. For bash, write in ~/.bashrc: "
        'eval "$(moe-nvfp4 completion bash)". For zsh: moe-nvfp4 completion zsh > DIR/_moe-nvfp4, where DIR is in '
        "$fpath.",
    )  # fmt: skip
    sub.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4 import cli

    try:
        import shtab
    except ImportError:
        raise ImportError("moe-nvfp4 completion needs a package that is not installed: pip install shtab") from None
    parser = cli.make_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for sub in commands.choices.values():
        for action in sub._actions:
            if action.type is path or action.metavar in FILES:
                action.complete = shtab.FILE
    print(shtab.complete(parser, args.shell))
