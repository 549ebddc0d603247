"""The search for block scales: of the scales that a recipe tries, the one with the least squared error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from moe_nvfp4.format import E4M3_MAX, SF_VEC_SIZE

# The scales to try: a function of n blocks' (scales by the recipe `max`, as bytes uint8 [n]; largest magnitudes fp32
# [n]; global scales [] or [n]), which returns bytes of e4m3, uint8 [C, n], with max's first
Candidates: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

# Blocks processed at once, with all their candidates. For mse a scratch plane is then 2.4 MB on a CPU (about the cache,
# yet enough work to outweigh an operation's cost) and 151 MB on a GPU (2304 MB/s; with four times as many blocks 2052).
_CPU_BLOCKS = 1 << 12
_CUDA_BLOCKS = 1 << 18


def four_over_six(by_max: Tensor, largest: Tensor, global_scale: Tensor) -> Tensor:
    return torch.stack([by_max, _scale_for(largest, 4.0, global_scale)])


def neighbours(by_max: Tensor, largest: Tensor, global_scale: Tensor) -> Tensor:
    steps = torch.tensor([0, -2, -1, 1, 2, 3, 4, 5, 6], dtype=torch.int16, device=by_max.device)
    tried = (by_max + steps[:, None]).clamp_(1, 126)  # bytes of positive e4m3 numbers are in their order
    tried[0] = by_max  # may be 0
    return tried.to(torch.uint8)


def scales_of_mse(largest: Tensor, global_scale: Tensor) -> Tensor:
    """The scales that ``mse`` tries, e4m3 bytes [C, n], for n blocks with largest magnitudes `largest`, fp32 [n]."""
    return neighbours(_scale_for(largest, 6.0, global_scale), largest, global_scale)


def best_scales(w: Tensor, global_scale: Tensor, candidates: Candidates, importance: Tensor | None) -> Tensor:
    """The block scales float8_e4m3fn ``[..., N, K/16]`` with the least (weighted) squared error.

    importance: fp32 ``[K]`` or ``[n, K]``, the weight of each column's squared error, or None: all count alike.

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
