"""NVFP4 mixture-of-experts layers for PyTorch and Hugging Face models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_nvfp4._version import __version__

if TYPE_CHECKING:
    from moe_nvfp4.experts import NVFP4Experts
    from moe_nvfp4.ops import moe_forward
    from moe_nvfp4.routing import Groups, group_by_expert
    from moe_nvfp4.weights import ExpertWeights, Gate, Matrices

__all__ = [
    "ExpertWeights",
    "Gate",
    "Groups",
    "Matrices",
    "NVFP4Experts",
    "__version__",
    "group_by_expert",
    "moe_forward",
]

# The same names for the interpreter, imported on first use (PEP 562): importing torch takes seconds, and
# `moe-nvfp4 --help` needs none of it.
_MODULES = {
    "NVFP4Experts": "experts",
    "moe_forward": "ops",
    "Groups": "routing",
    "group_by_expert": "routing",
    "ExpertWeights": "weights",
    "Gate": "weights",
    "Matrices": "weights",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
