"""Kernels in CuTe DSL as functions of their configuration. Importing this does not need the DSL; launching does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from moe_nvfp4.kernels.common.ahead import Variants, note, noted_gpu


class CuteKernels(Variants):
    """A decorator for functions that return (kernel, placeholders, architecture), the arguments of `launch.compiled`.
    The decorated function returns a callable that launches this kernel, compiled on first use."""

    def __init__(self, make: Callable[..., tuple[object, tuple, str]]):
        self.make = make
        self.compiled = cache(lambda *arguments: _launches().compiled(*make(*arguments)))
        self.cache_clear = self.compiled.cache_clear

    def __call__(self, *arguments: Any) -> Callable[..., None]:
        if noted_gpu() is not None:
            note(self.make.__module__, self.make.__name__, *arguments)
            return _nothing
        launch: Callable[..., None] = self.compiled(*arguments)
        return launch

    def file(self, *arguments: Any) -> Path | None:
        file: Path | None = _launches().file(*self.make(*arguments))
        return file

    def build(self, *arguments: Any) -> None:
        _launches().build(*self.make(*arguments))

    def load(self, gpu: Any, *arguments: Any) -> None:
        self.compiled(*arguments)


def _launches() -> Any:
    return import_module(f"{__package__}.launch")


def _nothing(*values: object) -> None:
    """Stands in for a launch that is only noted."""
