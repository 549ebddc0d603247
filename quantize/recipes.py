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
``gptq``           Not here: it works on the experts of a layer at once (moe_nvfp4.quantize.gptq).
=================  ==============================================================================

The global scale decides which block scales e4m3 can hold. With amax / (6 * 448), ``max`` gives the block
that has amax the largest e4m3 number, and no larger scale can be tried. So searching recipes use amax / (6 * 256).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moe_nvfp4.format import (
    E4M3_MAX,
    SEARCH_SF_MAX,
    SF_VEC_SIZE,
    as_scale,
    check_x,
    encode,
    global_scale_for,
    pad_k,
    quantize,
)

RECIPES = ("max", "four_over_six", "mse")  # need no data
CALIBRATED_RECIPES = ("weighted", "gptq")  # need statistics of the model's activations
DEFAULT_RECIPE = "mse"

# Blocks processed at once, with all their candidates. For mse a scratch plane is then 2.4 MB on a CPU (about the cache,
# yet enough work to outweigh an operation's cost) and 151 MB on a GPU (2304 MB/s; with four times as many blocks 2052).
_CPU_BLOCKS = 1 << 12
_CUDA_BLOCKS = 1 << 18


def recipe_global_scale(amax: Tensor, recipe: str = DEFAULT_RECIPE) -> Tensor:
    """The global scale that a recipe uses for a matrix, or for matrices that share one, with this largest magnitude
    `amax`: float32, of amax's shape."""
    return global_scale_for(amax, E4M3_MAX if recipe == "max" else SEARCH_SF_MAX)


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
    if recipe == "gptq":
        raise ValueError("recipe 'gptq' needs more than a matrix: use moe-nvfp4 quantize, or swap_experts")
    if recipe not in _CANDIDATES and recipe != "max":
        raise ValueError(f"unknown recipe {recipe!r}: choose one of {', '.join((*RECIPES, *CALIBRATED_RECIPES))}")
    if w.dim() not in (2, 3):
        raise ValueError(f"w must be a matrix [N, K] or several [n, N, K], not {list(w.shape)}")
    stack = w.shape[:-2]
    if isinstance(global_scale, Tensor):
        if global_scale.numel() != math.prod(stack):
            wanted = f"{list(stack)}, one for each matrix" if stack else "one number"
            raise ValueError(f"global_scale must be {wanted}, not {list(global_scale.shape)}")
        global_scale = global_scale.reshape(stack)
    _check_importance(importance, recipe, w)
    if recipe == "max" and not stack:
        return quantize(w, global_scale)
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
    if recipe == "max":
        codes, sf, _ = quantize(w, of_rows, check=False)
    else:
        sf = _search(w, global_scale, _CANDIDATES[recipe], importance)
        codes = encode(w, sf, of_rows, check=False)
    return codes, sf, global_scale


def _check_importance(importance: Tensor | None, recipe: str, w: Tensor) -> None:
    if (importance is None) != (recipe != "weighted"):
        raise ValueError(
            f"recipe {recipe!r} needs the importance of each input column"
            if importance is None
            else f"importance has no effect on recipe {recipe!r}: leave it out, or use 'weighted'"
        )
    if importance is None:
        return
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

    ValueError for NaN or Inf.
    """
    scale = None if amax is None else recipe_global_scale(amax, recipe)
    if importance is not None:
        importance = pad_k(importance[None])[0]
    codes, sf, global_scale = quantize_matrix(pad_k(matrix), recipe, scale, importance)
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    scales = {f"{part}_global_scale": global_scale for part in parts}
    return {name: codes, f"{name}_sf": sf.view(torch.uint8), **scales}


# ---- the search ----------------------------------------------------------------------------------


def _four_over_six(by_max: Tensor, largest: Tensor, global_scale: Tensor) -> Tensor:
    return torch.stack([by_max, _scale_for(largest, 4.0, global_scale)])


def _neighbours(by_max: Tensor, largest: Tensor, global_scale: Tensor) -> Tensor:
    steps = torch.tensor([0, -2, -1, 1, 2, 3, 4, 5, 6], dtype=torch.int16, device=by_max.device)
    tried = (by_max + steps[:, None]).clamp_(1, 126)  # bytes of positive e4m3 numbers are in their order
    tried[0] = by_max  # may be 0
    return tried.to(torch.uint8)


# recipe -> function of (max's sf uint8 [n], blockmax [n], global_scale [] or [n]), which returns the bytes to try for
# sf: uint8 [C, n], max's first
_CANDIDATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "four_over_six": _four_over_six,
    "mse": _neighbours,
    "weighted": _neighbours,
}


def _search(w: Tensor, global_scale: Tensor, candidates: Callable, importance: Tensor | None) -> Tensor:
    """The block scales float8_e4m3fn ``[..., N, K/16]`` with the least (weighted) squared error.

    Among equal errors max's scale wins, then the earlier candidate. A block whose scale is 0 with ``max``
    (all zeros, or nothing above 2^-10 * 6 * global_scale) keeps 0.
    """
    blocks = w.detach().reshape(-1, SF_VEC_SIZE)
    best = torch.empty(blocks.shape[0], dtype=torch.uint8, device=w.device)
    step = min(_CUDA_BLOCKS if w.is_cuda else _CPU_BLOCKS, max(1, blocks.shape[0]))
    scratch = torch.empty(0)
    if global_scale.numel() > 1:
        of_blocks = global_scale.repeat_interleave(blocks.shape[0] // len(global_scale))
    columns = None if importance is None else _of_planes(importance.to(w.device))
    row = w.shape[-1] // SF_VEC_SIZE  # blocks in a row of w
    for i in range(0, blocks.shape[0], step):
        # A plane for each of the 16 places in a block: arithmetic runs across blocks, not within one.
        part = blocks[i : i + step].t()
        planes = torch.empty_like(part, dtype=torch.float32, memory_format=torch.contiguous_format)
        planes.copy_(part).abs_()
        largest = planes.amax(dim=0)
        gs = of_blocks[i : i + step] if global_scale.numel() > 1 else global_scale
        by_max = _scale_for(largest, 6.0, gs)
        tried = candidates(by_max, largest, gs)
        if i == 0:
            scratch = planes.new_empty(3, SF_VEC_SIZE, len(tried), step)
        weights = None
        if columns is not None:
            at = torch.arange(i, i + tried.shape[1], device=w.device)
            of_matrix = at // (row * w.shape[-2]) * row if columns.shape[1] > row else 0
            weights = columns[:, at % row + of_matrix]
        error = _squared_error(planes, tried, gs, scratch[..., : tried.shape[1]], weights)
        # torch.min returns the first of equal errors; so does argmin, but it is 20 times slower on a CPU
        best[i : i + step] = tried.gather(0, error.min(dim=0, keepdim=True).indices).squeeze(0)
    return best.view(torch.float8_e4m3fn).view(*w.shape[:-1], w.shape[-1] // SF_VEC_SIZE)


def candidates(largest: Tensor, global_scale: Tensor) -> Tensor:
    """The scales that ``mse`` tries, e4m3 bytes [C, n], for n blocks with largest magnitudes `largest`, fp32 [n]."""
    return _neighbours(_scale_for(largest, 6.0, global_scale), largest, global_scale)


def round_to_e2m1(x: Tensor) -> Tensor:
    """Round fp32 to the nearest e2m1 values (0 .5 1 1.5 2 3 4 6 and negatives), ties to even, saturating: fp32."""
    a = x.abs()
    return _round_magnitudes(a, torch.empty_like(a), torch.empty_like(a)).copysign_(x)


def _round_magnitudes(a: Tensor, power: Tensor, code: Tensor) -> Tensor:
    """Round `a`, fp32 and not negative, to e2m1 values in `code`, which is returned; `power` is scratch."""
    # e2m1 has one mantissa bit, and spacing 0.5 up to 2. float32 rounds to this spacing (ties to even) when
    # 2^22 times a's power of two, clamped to 1 .. 4, is added and subtracted again.
    bits = power.view(torch.int32)
    torch.bitwise_and(a.view(torch.int32), 0x7F800000, out=bits).clamp_(0x3F800000, 0x40800000)
    return torch.add(a, power, alpha=2**22, out=code).sub_(power, alpha=2**22).clamp_(max=6.0)


def _of_planes(importance: Tensor) -> Tensor:
    """importance ``[K]`` or ``[n, K]`` -> float32 ``[16, n K/16]``, times a power of two that makes it at most 1."""
    importance = importance.detach().float()
    largest = (importance.amax() if importance.numel() else importance.new_zeros(())).clamp(min=2.0**-100)
    scaled = torch.ldexp(importance, -torch.frexp(largest).exponent)
    return scaled.reshape(-1, SF_VEC_SIZE).t().contiguous()


def _scale_for(largest: Tensor, code: float, global_scale: Tensor) -> Tensor:
    """The scale that makes a block's largest magnitude this code: e4m3 bytes ``[n]``."""
    sf = largest / largest.new_full((), code) / global_scale  # CUDA would multiply by 1 / code if this were a number
    return sf.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _squared_error(
    planes: Tensor, tried: Tensor, global_scale: Tensor, scratch: Tensor, weights: Tensor | None
) -> Tensor:
    """sum weight * (|x| - code * scale)^2 / global_scale^2, scale = sf * global_scale: float32 ``[C, n]``.

    planes: |x| float32 ``[16, n]``; weights: float32 ``[16, n]``, or None (all 1); tried: bytes of sf ``[C, n]``.
    Computed as sf^2 * sum (a - code)^2, with a = |x| / scale. The sum is taken by halves (places k and k + 8,
    then k + 4, ...), so that it has the same bits everywhere. 0 where sf is 0.
    """
    # An e4m3 byte shifted by 7 bits is 2^-8 times its number in float16; torch's own cast is slow.
    sf = (tried.to(torch.int16) << 7).view(torch.float16).float() * 256
    a, power, code = scratch
    torch.div(planes[:, None], sf.clamp(min=2**-9) * global_scale, out=a)
    _round_magnitudes(a, power, code)
    a.sub_(code).mul_(a)
    if weights is not None:
        a.mul_(weights[:, None])
    for n in (8, 4, 2, 1):
        a = a[:n].add_(a[n:])
    return a.squeeze(0) * (sf * sf)
