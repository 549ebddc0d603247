"""Progress bars on stderr."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(*args: Any, show: bool, **settings: Any) -> tqdm:
    """tqdm(*args, **settings), which shows nothing if not `show`, or without a stderr (pythonw, a daemon), or if
    TQDM_DISABLE is set; passing disable=False would override that variable."""
    return tqdm(*args, **settings) if show and sys.stderr is not None else tqdm(*args, **settings, disable=True)
