"""The argument parser: what it refuses, it refuses in one line that names what was meant."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose commands refuse unknown options themselves, since the parser above them does not know
    theirs, and which suggests similar options and choices."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        namespace, left = super().parse_known_args(args, namespace)
        if left:
            unknown = left[0].partition("=")[0]
            self.error(f"unknown arguments: {' '.join(left)}{did_you_mean(unknown, self._option_string_actions)}")
        return namespace, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            meant = did_you_mean(str(value), choices)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} (choose from {', '.join(choices)}){meant}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """; did you mean X?" with the most similar of the known words, or ""."""
    import difflib

    near: Sequence[str] = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
