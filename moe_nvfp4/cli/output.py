"""How commands print: lines and tables that fit the terminal, and JSON for programs."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

_quiet = _json = False


def set_up(quiet: bool, json: bool = False) -> None:
    """What --quiet leaves out, that --json leaves stdout to programs, that nobody draws a bar into a file or pipe, and
    how threads wait. To be called before torch, transformers and tqdm are imported, which read these variables once."""
    global _quiet, _json
    _quiet, _json = quiet, json
    # Beside one busy process on two cores, threads that wait by spinning took 40 times as long as on idle cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if quiet:
        warnings.simplefilter("ignore")
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")


def say(line: str = "") -> None:
    """Print what was asked for. A terminal gets new lines between words where one is too long for it."""
    width, line = _width(), printable(line)
    if width is not None and len(line) > width:
        indent = line[: len(line) - len(line.lstrip())]
        line = textwrap.fill(
            line.strip(), width, initial_indent=indent, subsequent_indent=f"{indent}  ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    print(line, flush=True)


def note(line: str) -> None:
    """Print what was not asked for: --quiet leaves it out. With --json it goes to stderr."""
    if _json and not _quiet:
        print(printable(line), file=sys.stderr, flush=True)
    elif not _quiet:
        say(line)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """Print rows of cells, the first `left` columns to the left and the others to the right; without a line for an
    empty header. In a terminal that is too narrow, each row is a paragraph: its first cell, then the others by name."""
    from rich.console import Console
    from rich.table import Table

    width, rows = _width(), [list(row) for row in rows]
    console = Console(file=sys.stdout, width=width or 10_000, highlight=False, markup=False, emoji=False)
    lines = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(header))
    for i, name in enumerate(header):
        lines.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        lines.add_row(*map(printable, row))
    if width is None or console.measure(lines, options=console.options.update(width=10_000)).maximum <= width:
        console.print(lines, soft_wrap=True)
        return
    for first, *others in rows:
        say(first)
        named = zip(header[1:], others, strict=True)
        say("    " + ", ".join(f"{name} {cell.strip()}".strip() for name, cell in named if cell.strip()))


def printable(text: str) -> str:
    """`text` with the control characters escaped that may come from files, and that a terminal obeys."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", lambda m: ascii(m[0])[1:-1], text)


def show_json(found: dict[str, Any]) -> None:
    """Print one JSON object; numbers that JSON does not have (inf, nan) are null."""
    print(json.dumps(_finite(found), indent=2), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _width() -> int | None:
    """The columns of the terminal that stdout is, or None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
