"""When a result is right: how far from the reference it may be, as a whole and in each element."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Limit(NamedTuple):
    """of_all    the largest relative error ||got - want|| / ||want||
    of_one    the largest error of an element, in units of its row's root mean square
    """

    of_all: float
    of_one: float


# What rounding does. "w4a4": a value at a boundary between two codes goes either way, and its step is a quarter of it.
# "adapters": sums are rounded before the addition and after it.
LIMITS = {
    "fp32": Limit(1e-5, 1e-3), "half": Limit(6e-3, 0.06), "w4a4": Limit(6e-2, 1.0), "gradient": Limit(2e-2, 0.2),
    "adapters": Limit(1.2e-2, 0.12),
}  # fmt: skip


class Finding(NamedTuple):
    """What one case showed. `right` is None where it was not run: `why` says why then, and what is wrong where it is
    False."""

    case: str
    right: bool | None
    why: str = ""
    error: float = 0.0
    limit: float = 0.0


def compare(case: str, got: Tensor, want: Tensor, limit: Limit) -> Finding:
    """got and want: [rows, columns], anywhere."""
    got, want = (t.detach().cpu().double() for t in (got, want))
    if got.shape != want.shape:
        return Finding(case, False, f"the result has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    for what, result in (("", got), (" of what is right", want)):
        if not result.isfinite().all():
            return Finding(case, False, f"{int((~result.isfinite()).sum())} elements{what} are NaN or Inf")
    if not want.numel():
        return Finding(case, True)
    every = want.norm() / want.numel() ** 0.5
    row = want.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-3 * every).clamp(min=torch.finfo(torch.double).tiny)
    ones = (got - want).abs() / row
    error, worst = ((got - want).norm() / want.norm().clamp(min=1e-300)).item(), ones.max().item()
    if error > limit.of_all:
        return Finding(case, False, f"the relative error is {error:.1e}", error, limit.of_all)
    if worst > limit.of_one:
        at = [int(i) for i in torch.unravel_index(ones.argmax(), ones.shape)]
        why = f"element {at} is {got[*at].item():.4g}, not {want[*at].item():.4g}"
        return Finding(case, False, why, error, limit.of_all)
    return Finding(case, True, "", error, limit.of_all)


def same_bits(case: str, *results: Tensor) -> Finding:
    """Whether results of the same call are equal to the bit, but for the sign of zeros."""
    like_first = [result.dtype == results[0].dtype and torch.equal(result, results[0]) for result in results]
    different = [i for i, equal in enumerate(like_first) if not equal]
    why = f"calls {different} of {len(results)} gave other bits than the first" if different else ""
    return Finding(case, not different, why)
