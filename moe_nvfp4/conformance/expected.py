"""What the cases must give: y in float64, by a loop over experts and their tokens, and how far a result may be from it.

The bounds are those of the format. NVFP4 weights and bf16 activations are exact, and so is a product of two of them, in
fp32. An implementation may round to bf16: weights after they were multiplied by their scales, the results of both
products, h, and the weighted sum at each of its terms; and it may add in fp32, in any order. Roundings are taken for
independent: the loop computes the variance of their sum in each element beside the element itself, and a result may be
`SIGMAS` standard deviations from y. `Expected.of_all` limits the norm of all errors: to 2^-7, or to one standard
deviation of them all where that is more. W4A4 has only that, 6 %, since a value between two codes may get either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_nvfp4.conformance.vectors import Case
from moe_nvfp4.selftest.compare import LIMITS

Array = NDArray[np.float64]
BF16 = 2.0**-8  # what rounding to bf16 changes a number by, at most, relatively
ROUNDING, ADDITION = BF16**2 / 3, 2.0**-48 / 3  # variances of a rounding to bf16, and to fp32
SIGMAS = 8
STEEPEST = 1.13  # the largest derivative of silu (1.0998) and gelu (1.129)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)])
E4M3[-1] = np.nan


class Expected(NamedTuple):
    """y       float64 [T, H]
    bound   float64 [T, H]: the largest |error| of each element
    of_all  the largest relative error ||got - y|| / ||y||
    """

    y: Array
    bound: Array
    of_all: float


def expected(case: Case) -> Expected:
    """y and its bounds."""
    y, variance = np.zeros(case.x.shape), np.zeros(case.x.shape)
    for e in range(len(case.up_scale)):
        users = np.argwhere(case.ids == e)
        if not len(users):
            continue
        x = case.x[users[:, 0]].astype(np.float64)
        if case.x_scale is not None:
            x = round_trip(x, float(case.x_scale[e]))
        scales = [case.up_scale[e]] if case.gate_scale is None else [case.gate_scale[e], case.up_scale[e]]
        z, vz = _product(x, np.zeros_like(x), case.codes13[e], case.sf13[e], scales)
        if case.bias13 is not None:
            z = z + case.bias13[e]
        h, vh = between(z, vz + ROUNDING * z**2, case.gate)
        if case.h_scale is not None:
            h = round_trip(h, float(case.h_scale[e]))
        out, vout = _product(h, vh + ROUNDING * h**2, case.codes2[e], case.sf2[e], [case.down_scale[e]])
        if case.bias2 is not None:
            out = out + case.bias2[e]
        vout += 2 * ROUNDING * out**2  # of the product, and of the weighted term
        for (t, j), term, v in zip(users, out, vout, strict=True):
            p = float(case.routing[t, j])
            y[t] += p * term
            variance[t] += p**2 * v + ROUNDING * y[t] ** 2
    if case.x_scale is not None:
        return Expected(y, np.full_like(y, np.inf), LIMITS["w4a4"].of_all)
    together = np.sqrt(variance.sum()) / max(np.linalg.norm(y), np.finfo(float).tiny)
    return Expected(y, SIGMAS * np.sqrt(variance), max(2 * BF16, float(together)))


def weights(codes: Any, sf: Any, scales: list[Any]) -> Iterator[tuple[slice, Array]]:
    """Pieces of a matrix in float64: (rows, values [rows, K]). scales: one, or that of the first half of the rows and
    that of the second."""
    N, half = codes.shape
    each = np.repeat(np.array(scales, dtype=np.float64), N // len(scales))
    for first in range(0, N, 512):
        rows = slice(first, min(N, first + 512))
        values = np.empty((rows.stop - first, 2 * half))
        values[:, 0::2], values[:, 1::2] = E2M1[codes[rows] & 15], E2M1[codes[rows] >> 4]
        yield rows, values * np.repeat(E4M3[sf[rows]], 16, axis=1) * each[rows, None]


def _product(x: Array, vx: Array, codes: Any, sf: Any, scales: list[Any]) -> tuple[Array, Array]:
    """x · wᵀ, and the variance of its error where x's is vx."""
    out, variance = np.empty((len(x), len(codes))), np.empty((len(x), len(codes)))
    each = ROUNDING + x.shape[1] * ADDITION
    for rows, w in weights(codes, sf, scales):
        out[:, rows] = x @ w.T
        variance[:, rows] = (vx + each * x**2) @ (w**2).T
    return out, variance


def between(z: Array, vz: Array, gate: dict[str, Any]) -> tuple[Array, Array]:
    """h [rows, I], and the variance of its error. z: the first product, [rows, 2I] with gate's columns before up's, or
    [rows, I] without a gate projection; vz: the variance of its error.

    kind "silu":      g * sigmoid(alpha * g) * (u + up_offset), with g = min(gate, limit) and u in [-limit, limit]
         "gelu_tanh"  gelu(g), by its formula with tanh, times u
         "relu2"      max(u, 0)^2, where there is no gate projection
    alpha is 1, limit infinite and up_offset 0 where they are not given.
    """
    if gate["kind"] == "relu2":
        u = np.maximum(z, 0)
        return u * u, 4 * u**2 * vz
    limit, offset = gate.get("limit", np.inf), gate.get("up_offset", 0.0)
    g, u = np.split(z, 2, axis=1)
    vg, vu = np.split(vz, 2, axis=1)
    g, u = np.minimum(g, limit), np.clip(u, -limit, limit) + offset
    if gate["kind"] == "silu":  # the sigmoid by tanh, without overflow
        slope = 0.5 * gate.get("alpha", 1.0)
        t, slopes = np.tanh(slope * g), slope
    else:
        t = np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))
        slopes = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * g**2)
    a = 0.5 * g * (1 + t)
    steep = np.abs(0.5 * (1 + t) + 0.5 * g * (1 - t**2) * slopes) + np.sqrt(vg)  # second derivatives are below 1
    steep = np.minimum(steep, STEEPEST)
    return a * u, a**2 * vu + (steep * u) ** 2 * vg


def round_trip(x: Array, scale: float) -> Array:
    """x [rows, K] as NVFP4 with this global scale holds it: block scales and codes are the nearest, ties to even."""
    blocks = x.reshape(len(x), -1, 16)
    sf = _nearest(np.abs(blocks).max(axis=-1) / 6 / scale, E4M3[:-1])
    unit = np.where(sf == 0, np.inf, sf * scale)[..., None]
    values: Array = np.sign(blocks) * _nearest(np.abs(blocks) / unit, E2M1[:8]) * (sf * scale)[..., None]
    return values.reshape(x.shape)


def _nearest(a: Array, grid: Array) -> Array:
    """The nearest number of an ascending grid, that of the even index where two are; its last where a is beyond."""
    above = np.clip(np.searchsorted(grid, a), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    up = (a - low > high - a) | ((a - low == high - a) & (above % 2 == 0))
    found: Array = np.where(up, high, low)
    return found
