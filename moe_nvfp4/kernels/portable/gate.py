"""The gate and its gradient as kernels of their own, for training: one pass over memory each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_nvfp4.kernels.portable.config import next_power_of_2
from moe_nvfp4.kernels.portable.dequantize import how, rounded
from moe_nvfp4.kernels.portable.launch import launch


def gate(arguments: tuple, both: Tensor, dh: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """both [R, 2I] ([R, I] for relu2) -> (h [R, I]; the gradient of `both` if dh is given, in its dtype).

    arguments: kind, alpha, limit (0: none), up_offset, clamp_after of `weights.Gate`.
    """
    both = both.contiguous()
    R, I = both.shape[0], both.shape[1] // (1 if arguments[0] == "relu2" else 2)
    h, d_both = both.new_empty(R, I), None if dh is None else torch.empty_like(both)
    block = min(1024, next_power_of_2(I))
    if R:
        dh = None if dh is None else dh.contiguous()
        launch(kernel, (R, -(-I // block)), both, dh, h, d_both, I, *arguments, block, how(), num_warps=4)
    return h, d_both


@triton.jit
def kernel(
    both, dh, h, d_both,
    I: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    CLAMP_AFTER: tl.constexpr, BLOCK: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """`weights.Gate.gradient` of BLOCK columns of row program_id(0)."""
    r = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = n < I
    if GATE == "relu2":
        a = tl.maximum(tl.load(both + r * I + n, mask=there, other=0.0).to(tl.float32), 0.0)
        tl.store(h + r * I + n, rounded(a * a, h.dtype.element_ty, HOW), mask=there)
        if dh is not None:
            d = tl.load(dh + r * I + n, mask=there, other=0.0).to(tl.float32)
            tl.store(d_both + r * I + n, rounded(2 * a * d, h.dtype.element_ty, HOW), mask=there)
    else:
        row = both + r * 2 * I + n
        g = tl.load(row, mask=there, other=0.0).to(tl.float32)
        u = tl.load(row + I, mask=there, other=0.0).to(tl.float32)
        g_alive = g == g
        u_alive = u == u
        if LIMIT > 0:
            u_alive = tl.abs(u) <= LIMIT
            u = tl.clamp(u, -LIMIT, LIMIT)
            if not CLAMP_AFTER:
                g_alive = g <= LIMIT
                g = tl.minimum(g, LIMIT)
        if GATE == "silu":
            s = 1.0 / (1.0 + tl.exp(-ALPHA * g))
            a = g * s
            da = s * (1.0 + ALPHA * g * (1.0 - s))
        else:
            t = 1.0 - 2.0 / (1.0 + tl.exp(1.5957691216057308 * (g + 0.044715 * g * g * g)))
            a = 0.5 * g * (1.0 + t)
            da = 0.5 * (1.0 + t) + 0.3989422804014327 * g * (1.0 - t * t) * (1.0 + 0.134145 * g * g)
        if LIMIT > 0 and CLAMP_AFTER:
            g_alive = a <= LIMIT
            a = tl.minimum(a, LIMIT)
        u += UP_OFFSET
        tl.store(h + r * I + n, rounded(a * u, h.dtype.element_ty, HOW), mask=there)
        if dh is not None:
            d = tl.load(dh + r * I + n, mask=there, other=0.0).to(tl.float32)
            to = d_both + r * 2 * I + n
            tl.store(to, rounded(tl.where(g_alive, d * u * da, 0.0), h.dtype.element_ty, HOW), mask=there)
            tl.store(to + I, rounded(tl.where(u_alive, d * a, 0.0), h.dtype.element_ty, HOW), mask=there)
