"""Progress bars on stderr."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(*args: Any, show: bool, **settings: Any) -> tqdm:
    """tqdm(*args, **settings); nothing where TQDM_DISABLE is set (which disable=False overrides), if not `show`, or
    without a stderr (pythonw, a daemon)."""
    return tqdm(*args, **settings) if show and sys.stderr is not None else tqdm(*args, **settings, disable=True)
