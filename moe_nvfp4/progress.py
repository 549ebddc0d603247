"""Progress bars on stderr."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(*args: Any, show: bool, **settings: Any) -> tqdm:
    """tqdm(*args, **settings), which shows nothing if not `show`, or if stderr is no terminal (a file, a pipe, none at
    all), or if TQDM_DISABLE is set; passing disable=False would override that variable."""
    shown = show and sys.stderr is not None and sys.stderr.isatty()
    return tqdm(*args, **settings) if shown else tqdm(*args, **settings, disable=True)
