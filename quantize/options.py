"""The options of a conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_nvfp4.checks import check_flag
from moe_nvfp4.devices import usable_device
from moe_nvfp4.quantize.codes import CodesFolder
from moe_nvfp4.quantize.dialects import DIALECTS, Dialect, as_patterns
from moe_nvfp4.quantize.files import TORCH_DTYPES
from moe_nvfp4.quantize.importance import Importance
from moe_nvfp4.quantize.linears import as_wanted
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, REGISTRY, recipe_named
from moe_nvfp4.weights import ACTIVATIONS


@dataclass(frozen=True)
class Options:
    """How to convert a checkpoint.

    recipe       how block scales are chosen (quantize.recipes)
    exclude      experts modules to leave as they are: a name or wildcard, or several
    include      quantize only these experts modules: a name or wildcard, or several
    linears      quantize these linears too: "attention", "shared", "mlp", "lm_head", "all" (quantize.linears), a name
                 or wildcard, or several; `exclude` counts for them, too
    dialect      "modelopt" or "compressed-tensors": the names and the config of the files
    activations  what the files ask loaders for: "bf16" (W4A16), "nvfp4" or "nvfp4_four_over_six" (W4A4)
    share_scales for an NVFP4 source: give gate and up of an expert (or MLP) one global scale, as servers expect; the
                 one with the smaller scale is quantized again from its exact values, and all other bytes are kept
    device       where matrices are quantized (default: a GPU if there is one); the bytes are the same on all
    importance   the weights of errors, for a recipe that needs them (quantize.importance.load_importance)
    codes        the experts, quantized already, for a recipe that makes them from a text (quantize.codes)
    dtype        the dtype of dense weights (`source.dense_dtype`), as safetensors writes it, or None; `plan` sets it

    Raises ValueError for unknown values, TypeError for patterns that are not strings.
    """

    recipe: str = DEFAULT_RECIPE
    exclude: Sequence[str] = ()
    include: Sequence[str] | None = None
    dialect: str = "modelopt"
    activations: str = "bf16"
    share_scales: bool = False
    device: str | None = None
    importance: Importance | None = None
    codes: CodesFolder | None = None
    linears: Sequence[str] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        recipe = recipe_named(self.recipe)
        for value, known, what in ((self.dialect, DIALECTS, "dialect"), (self.activations, ACTIVATIONS, "activations")):
            if value not in known:
                raise ValueError(f"unknown {what} {value!r}: choose one of {', '.join(known)}")
        check_flag("share_scales", self.share_scales)
        for what, given, need, way in (
            ("importance", self.importance, "importance", "moe-nvfp4 importance MODEL OUT, then --importance OUT"),
            ("codes", self.codes, "text", f"moe-nvfp4 quantize --recipe {recipe.name} makes them from a text"),
        ):
            if given is not None and not getattr(recipe, need):
                takers = " or ".join(repr(r.name) for r in REGISTRY if getattr(r, need))
                raise ValueError(f"{what} would have no effect on recipe {recipe.name!r}: it is for {takers}")
            if given is None and getattr(recipe, need):
                raise ValueError(f"recipe {recipe.name!r} needs {what}: {way}")
        include = None if self.include is None else tuple(as_patterns(self.include, "include"))
        object.__setattr__(self, "exclude", tuple(as_patterns(self.exclude, "exclude")))
        object.__setattr__(self, "include", include)
        object.__setattr__(self, "linears", tuple(as_wanted(self.linears)))
        object.__setattr__(self, "device", str(usable_device(self.device)))

    @property
    def target(self) -> Dialect:
        """The dialect of new files."""
        return DIALECTS[self.dialect]

    @property
    def place(self) -> torch.device:
        return torch.device(self.device or "cpu")

    def cast(self, w: Tensor) -> Tensor:
        return w if self.dtype is None else w.to(TORCH_DTYPES[self.dtype])
