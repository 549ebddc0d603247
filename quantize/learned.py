"""Matrices in NVFP4 whose codes gradients change.

``value = code * sf * global_scale`` with code = e2m1(t): t is trained. The rounding lets gradients pass as if it were
not there, and a saturated code has none (straight-through: Bengio et al., arXiv 1308.3432):

    d value / d t = sf * global_scale  where |t| <= 6, else 0

Scales stay as they are. Block scales that were trained in the same way made outputs for other texts worse
(docs/measurements.md), and global scales follow from the largest magnitudes, which `verify` checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.format import E2M1_MAX, SF_VEC_SIZE, decode, encode, pad_k
from moe_nvfp4.quantize.recipes import Quantized
from moe_nvfp4.quantize.search import round_to_e2m1

INSIDE = 0.45  # of a step between codes: how far from its code a weight may begin; from 0.5 on it is another code


class Rounded(torch.autograd.Function):
    """t, fp32 in units of the scale, and the two scales -> values, fp32. In place where it can be: memory is slow."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, sf: Tensor, global_scale: Tensor) -> Tensor:
        ctx.save_for_backward(t, sf, global_scale)
        return round_to_e2m1(t).mul_(sf).mul_(global_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        t, sf, global_scale = ctx.saved_tensors
        return (grads[0] * sf).mul_(global_scale).masked_fill_(t.abs() > E2M1_MAX, 0), None, None


class LearnedMatrices:
    """n matrices w, floating [n, N, K], that begin as `start`: codes, sf and global scales, as recipes return them.

    t  fp32 [n, N, K/16, 16], to be trained: weights in units of their scales, K padded to a multiple of 16. It begins
       as near to w as it can and still have the codes of `start`.
    """

    def __init__(self, w: Tensor, start: Quantized):
        codes, sf, global_scale = start
        self.columns = w.shape[-1]
        self._sf = sf.view(torch.float8_e4m3fn).float()[..., None]
        self._global_scale = global_scale.float().view(-1, 1, 1, 1)
        code = decode(codes).unflatten(-1, (-1, SF_VEC_SIZE))
        scale = self._sf * self._global_scale
        t = pad_k(w.detach().float()).view(code.shape) / torch.where(scale > 0, scale, torch.inf)
        sign = torch.where(code == 0, t, code).sign()
        size = code.abs()
        below = 0.5 + 0.5 * (size > 2).float() + (size > 4).float()  # the steps to the next codes
        above = (0.5 + 0.5 * (size >= 2).float() + (size >= 4).float()) * (size < E2M1_MAX).float()
        self.t = (t * sign).clamp(size - INSIDE * below, size + INSIDE * above) * sign

    def values(self) -> Tensor:
        """The weights, fp32 [n, N, K]; differentiable."""
        values: Tensor = Rounded.apply(self.t, self._sf, self._global_scale)
        return values.flatten(-2)[..., : self.columns]

    @torch.no_grad()
    def quantized(self) -> Quantized:
        """Codes, sf and global scales. Dequantized, they are `values`, bit for bit."""
        sf = self._sf[..., 0].to(torch.float8_e4m3fn)
        ones = torch.ones(sf.shape, device=sf.device).to(torch.float8_e4m3fn)
        return encode(round_to_e2m1(self.t).flatten(-2), ones, 1.0, check=False), sf, self._global_scale.flatten()
