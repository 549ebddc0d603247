"""Progress bars on stderr."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def progress_bar(*args: Any, show: bool, **settings: Any) -> tqdm:
    """tqdm(*args, **settings); nothing where TQDM_DISABLE is set (which disable=False overrides), or if not `show`."""
    return tqdm(*args, **settings) if show else tqdm(*args, **settings, disable=True)
