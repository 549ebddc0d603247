"""Static activation scales from a few prompts: `input_scale` of each layer's GEMMs, for activations="nvfp4".

    scales = observe(layers, run)        # run() sends prompts through the model, in W4A16
    layers[name].set_input_scales(*scales[name])

Each GEMM of a layer gets one scale, amax / (6 * 448) over all rows it was given, as in ModelOpt for experts that are
one module. All experts of the layer share it, even those that no token was routed to. A linear is one GEMM. Rows
beyond the calibrated range saturate, so the prompts should resemble those of later use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.format import global_scale_for
from moe_nvfp4.linear import NVFP4Linear


class Observer:
    """The largest |x|, and for experts |h|, that a layer has seen. The layer calls it with x and h, floating [*, K]."""

    def __init__(self, layer: NVFP4Experts | NVFP4Linear) -> None:
        self.amax: list[Tensor | None] = [None, None] if isinstance(layer, NVFP4Experts) else [None]

    def __call__(self, *inputs: Tensor) -> None:
        for i, rows in enumerate(inputs):
            if rows.numel():
                amax, before = rows.detach().abs().amax().float(), self.amax[i]
                self.amax[i] = amax if before is None else before.maximum(amax)


def observe(
    layers: Mapping[str, NVFP4Experts | NVFP4Linear],
    run: Callable[[], object],
    optional: Collection[str] = (),
) -> dict[str, tuple[Tensor, ...]]:
    """Scales of `layers`, from what they see while `run()` runs: name -> (scale of x, scale of h), fp32 0-d; for a
    linear (scale of x,).

    Meanwhile the layers run in W4A16, so that the rounding of activations does not change their range.
    ValueError for a layer that no row reached, unless it is one of `optional`, and for rows that have NaN or Inf.
    """
    observers = {name: Observer(layer) for name, layer in layers.items()}
    before = {layer: layer.activations for layer in layers.values()}
    try:
        for name, layer in layers.items():
            layer.observer = observers[name]
        for layer in before:
            layer.activations = "bf16"
        run()
    finally:
        for layer, activations in before.items():
            layer.observer, layer.activations = None, activations
    reached = {n: seen for n, seen in observers.items() if n not in optional or all(_is_reached(a) for a in seen.amax)}
    return {name: tuple(_scale(name, amax) for amax in seen.amax) for name, seen in reached.items()}


def _is_reached(amax: Tensor | None) -> bool:
    return amax is not None and bool(amax != 0)  # unrouted rows of h are zeros


def _scale(name: str, amax: Tensor | None) -> Tensor:
    if amax is None or not _is_reached(amax):
        raise ValueError(f"{name} was not reached by any token: calibrate with a prompt that gets there")
    if not amax.isfinite():
        raise ValueError(f"{name} got activations with NaN or Inf: look for the prompt, or the layer, that makes them")
    return global_scale_for(amax)
