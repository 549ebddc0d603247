"""How tests call the command line."""

import io

from moe_nvfp4 import cli


def run(*args, expect=0):
    assert cli.main([str(a) for a in args]) == expect


def mistake(args, capsys) -> str:
    """The last line that a wrong command prints; its exit code is 2."""
    capsys.readouterr()
    try:
        run(*args, expect=2)
    except SystemExit as stop:
        assert stop.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"moe-nvfp4 {args[0]}: error: ")
    return error


class Terminal(io.StringIO):
    def isatty(self):
        return True
