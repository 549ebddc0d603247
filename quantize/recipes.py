"""Recipes that quantize weight matrices to NVFP4: most choose block scales with a smaller error than the format's rule.

``value = code * sf * global_scale`` (moe_nvfp4.format) leaves one choice: the scale ``sf`` of each
block of 16. A recipe is a list of candidates for it; the one with the least squared error is taken.
Every result is plain NVFP4 that any reader of the format decodes, so a recipe costs time only once, here.

=================  ==============================================================================
``max``            The format's own rule: the block's largest magnitude becomes code 6. It is
                   `moe_nvfp4.format.quantize`, bit for bit.
``four_over_six``  max's scale, and the one that makes the largest magnitude code 4. The next code
                   below is then 1 away, not 2, which suits a block with several large values
                   (arXiv 2512.02010).
``mse``            max's scale and its neighbours, from 2 e4m3 numbers below to 6 above: about 0.8
                   to 1.7 times it. A wider window does not help: lower scales clip the largest
                   magnitude too much, higher ones make it code 3 and waste codes 4 and 6. On
                   Gaussian and on trained weights the best of all 126 scales is in this window
                   for 9999 blocks of 10000.
``weighted``       The candidates of mse, with the squared error of input column k weighted by its
                   importance, E[x_k^2]: if columns of inputs are uncorrelated, the sum is the
                   error of the output (moe_nvfp4.quantize.importance).
``gptq``           Works on the experts of a layer at once, with the Hessians of their inputs for a text
                   (moe_nvfp4.quantize.gptq). A matrix that is not `better` by it keeps the codes of mse.
``distill``        gptq's scales. Its codes are then learned, layer by layer, so that a layer gives what the dense one
                   gives (moe_nvfp4.integrations.huggingface.distill).
=================  ==============================================================================

The global scale decides which block scales e4m3 can hold. With amax / (6 * 448), ``max`` gives the block
that has amax the largest e4m3 number, and no larger scale can be tried. So searching recipes use amax / (6 * 256).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from moe_nvfp4.format import (
    E4M3_MAX,
    SEARCH_SF_MAX,
    as_scale,
    check_x,
    dequantize,
    encode,
    global_scale_for,
    pad_k,
    quantize,
)
from moe_nvfp4.quantize.gptq import quantize_gptq
from moe_nvfp4.quantize.search import Candidates, best_scales, four_over_six, neighbours

Quantized: TypeAlias = tuple[Tensor, Tensor, Tensor]  # codes, sf and global scales of matrices


@dataclass(frozen=True)
class Recipe:
    """How matrices become NVFP4, and what that takes besides the weights. No other file compares names of recipes.

    candidates     the block scales to try (quantize.search); None: max's alone
    sf_max         the block scale of the block with the largest magnitude, which decides the global scale
    importance     whether it needs the importance of input columns, from a file or a run of the model on any tokens
    from_hessians  how it makes codes from a text: a function like `quantize_gptq`; None: without one
    learned        whether these codes are then learned from what the dense layers give for the text
    """

    name: str
    candidates: Candidates | None = None
    sf_max: float = SEARCH_SF_MAX
    importance: bool = False
    from_hessians: Callable[[Tensor, Tensor], Quantized] | None = None
    learned: bool = False

    @property
    def text(self) -> bool:
        """Whether it needs a text, which the model reads layer by layer while its experts are quantized."""
        return self.from_hessians is not None

    @property
    def model(self) -> bool:
        """Whether it needs to know what a model computes, for whatever data."""
        return self.importance or self.text


REGISTRY = (
    Recipe("max", sf_max=E4M3_MAX),
    Recipe("four_over_six", four_over_six),
    Recipe("mse", neighbours),
    Recipe("weighted", neighbours, importance=True),
    Recipe("gptq", from_hessians=quantize_gptq),
    Recipe("distill", from_hessians=quantize_gptq, learned=True),
)
RECIPES = tuple(r.name for r in REGISTRY if not r.model)  # need no data
CALIBRATED_RECIPES = tuple(r.name for r in REGISTRY if r.model)  # need statistics of the model's activations
DEFAULT_RECIPE = "mse"


def recipe_named(name: str) -> Recipe:
    """The recipe with this name. ValueError for an unknown one."""
    if (found := next((r for r in REGISTRY if r.name == name), None)) is None:
        raise ValueError(f"unknown recipe {name!r}: choose one of {', '.join(r.name for r in REGISTRY)}")
    return found


def recipe_global_scale(amax: Tensor, recipe: str = DEFAULT_RECIPE) -> Tensor:
    """The global scale that a recipe uses for a matrix, or for matrices that share one, with this largest magnitude
    `amax`: float32, of amax's shape."""
    return global_scale_for(amax, recipe_named(recipe).sf_max)


def quantize_matrix(
    w: Tensor,
    recipe: str = DEFAULT_RECIPE,
    global_scale: Tensor | float | None = None,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize w, bfloat16, float16 or float32 ``[N, K]``, to ``(codes, sf, global_scale)``.

    These are uint8 ``[N, K/2]``, float8_e4m3fn ``[N, K/16]`` and float32 0-d, on w's device, CPU or CUDA.
    n matrices at once, ``[n, N, K]``, have n global scales.

    global_scale  used instead of the recipe's, so that matrices can share it; magnitudes above 6 * 448 * global_scale
                  saturate
    importance    for ``weighted``: float32 ``[K]`` or ``[n, K]``, the weight of each column's squared error

    Deterministic: the same bits on every device and for any split of the rows. Temporaries do not
    grow with w. ValueError for an unknown recipe, for a w of another shape or dtype or with K % 16,
    for NaN or Inf in w, and for an importance that is missing, without effect, negative or not finite.
    """
    chosen = recipe_named(recipe)
    if chosen.text:
        raise ValueError(f"recipe {recipe!r} needs more than a matrix: use moe-nvfp4 quantize, or swap_experts")
    if w.dim() not in (2, 3):
        raise ValueError(f"w must be a matrix [N, K] or several [n, N, K], not {list(w.shape)}")
    stack = w.shape[:-2]
    if isinstance(global_scale, Tensor):
        if global_scale.numel() != math.prod(stack):
            wanted = f"{list(stack)}, one for each matrix" if stack else "one number"
            raise ValueError(f"global_scale must be {wanted}, not {list(global_scale.shape)}")
        global_scale = global_scale.reshape(stack)
    _check_importance(importance, chosen, w)
    check_x(w)

    if w.numel() == 0:
        amax = w.new_zeros(stack, dtype=torch.float32)
    else:
        low, high = w.detach().flatten(1).aminmax(dim=1) if stack else w.detach().aminmax()
        amax = torch.maximum(-low, high).float()
    if not amax.isfinite().all():
        raise ValueError(
            f"{int((~w.isfinite()).sum())} of {w.numel()} weights are NaN or Inf, which NVFP4 "
            "cannot hold: look at the checkpoint, or replace them (torch.nan_to_num)"
        )
    if global_scale is None:
        global_scale = recipe_global_scale(amax, recipe)
    else:
        global_scale = as_scale(global_scale, w).expand(stack)
    of_rows = global_scale[:, None] if stack else global_scale
    if chosen.candidates is None:
        codes, sf, _ = quantize(w, of_rows, check=False)
    else:
        sf = best_scales(w, global_scale, chosen.candidates, importance)
        codes = encode(w, sf, of_rows, check=False)
    return codes, sf, global_scale


def better(w: Tensor, made: Quantized, other: Quantized, rows: Sequence[Tensor]) -> Quantized:
    """Of two ways to quantize each of n matrices w, floating ``[n, N, K]``, the one with the smaller error of outputs.

    made, other  codes, sf and global scales of the n matrices, as `quantize_matrix` returns them
    rows         for each matrix inputs fp32 ``[r, K]`` from which neither was made; `other` is kept without any, and
                 where both are equal
    """

    def error(of: Quantized, i: int) -> float:
        codes, sf, global_scale = (t[i] for t in of)
        change = dequantize(codes, sf, global_scale) - pad_k(w[i].detach().float())
        return (pad_k(rows[i]) @ change.T).square().sum().item()

    chosen = [made if error(made, i) < error(other, i) else other for i in range(len(w))]
    codes, sf, global_scale = (torch.stack([of[part][i] for i, of in enumerate(chosen)]) for part in range(3))
    return codes, sf, global_scale


def _check_importance(importance: Tensor | None, recipe: Recipe, w: Tensor) -> None:
    if importance is None:
        if recipe.importance:
            raise ValueError(f"recipe {recipe.name!r} needs the importance of each input column")
        return
    if not recipe.importance:
        takers = " or ".join(repr(r.name) for r in REGISTRY if r.importance)
        raise ValueError(f"importance has no effect on recipe {recipe.name!r}: leave it out, or use {takers}")
    if importance.shape not in (w.shape[-1:], (*w.shape[:-2], w.shape[-1])):
        raise ValueError(f"importance has shape {list(importance.shape)}, w {list(w.shape)}: one number for each "
                         "column of a matrix is needed")  # fmt: skip
    if not ((importance >= 0) & importance.isfinite()).all():
        raise ValueError("importance must be finite and not negative: it is a mean of squares")


def quantize_expert(
    matrix: Tensor,
    name: str,
    recipe: str = DEFAULT_RECIPE,
    amax: Tensor | None = None,
    importance: Tensor | None = None,
) -> dict[str, Tensor]:
    """Quantize one expert's matrix [N, K] to its slices of the parameters of `NVFP4Experts`, by their names.

    name        "gate_up_proj" (rows [gate; up], which share one global scale: servers read gate's for both),
                "up_proj" or "down_proj"
    amax        fp32 0-d: the largest magnitude of the whole, where the matrix is a part of a larger one
    importance  fp32 [K], for the recipe "weighted"

    ValueError for NaN or Inf, and as `quantize_matrix` for an importance.
    """
    scale = None if amax is None else recipe_global_scale(amax, recipe)
    if importance is not None:
        _check_importance(importance, recipe_named(recipe), matrix)
        importance = pad_k(importance[None])[0]
    codes, sf, global_scale = quantize_matrix(pad_k(matrix), recipe, scale, importance)
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    scales = {f"{part}_global_scale": global_scale for part in parts}
    return {name: codes, f"{name}_sf": sf.view(torch.uint8), **scales}
