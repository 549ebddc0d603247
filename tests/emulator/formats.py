"""Number formats that NumPy lacks, bit for bit: bf16, e4m3, e5m2, e2m1, ue8m0, and the exactly rounded fma.

PTX ISA: "Alternate Floating-Point Data Formats", and "cvt" for rounding and saturation.
"""

import numpy as np

U32, F32, F64 = np.uint32, np.float32, np.float64
SMALLEST = F32(2.0**-126)  # normal float32


def _magnitudes(exponent_bits, mantissa_bits, bias, count):
    code = np.arange(count)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


class SmallFloat:
    """A sign bit and monotonic magnitudes, so that a code is an index."""

    def __init__(self, bits, exponent_bits, mantissa_bits, bias, finite, nan_code):
        self.sign = 1 << (bits - 1)
        self.nan_code = nan_code
        self.magnitudes = _magnitudes(exponent_bits, mantissa_bits, bias, finite)
        self.middles = (self.magnitudes[1:] + self.magnitudes[:-1]) / 2
        table = np.full(2 * self.sign, np.nan)
        table[:finite] = self.magnitudes
        table[self.sign : self.sign + finite] = -self.magnitudes
        if bits == 8 and exponent_bits == 5:
            table[0x7C], table[0xFC] = np.inf, -np.inf
        self.table = table.astype(F32)
        self.table64 = table

    def encode(self, x):
        """Round to nearest even and saturate to finite: cvt.rn.satfinite."""
        x = np.asarray(x, F64)
        size = np.abs(x)
        code = np.searchsorted(self.middles, size, side="left")
        at_tie = self.middles[np.minimum(code, len(self.middles) - 1)] == size
        code = code + (at_tie & (code & 1 == 1))
        code = np.where(np.isnan(x), self.nan_code, code | np.where(np.signbit(x), self.sign, 0))
        return code.astype(np.uint8)

    def decode(self, code):
        return self.table[code]


E2M1 = SmallFloat(4, 2, 1, 1, 8, nan_code=0x7)
E4M3 = SmallFloat(8, 4, 3, 7, 127, nan_code=0x7F)
E5M2 = SmallFloat(8, 5, 2, 15, 124, nan_code=0x7F)


def ue8m0_decode(code):
    code = np.asarray(code)
    return np.where(code == 255, np.nan, 2.0 ** (code.astype(F64) - 127))


def ue8m0_encode(x, up):
    """Powers of two only: cvt.rp (up) and cvt.rz, satfinite; the sign is dropped and NaN is 0xFF."""
    x = np.abs(np.asarray(x, F64))
    fraction, exponent = np.frexp(x)  # x = fraction * 2**exponent, fraction in [0.5, 1)
    exponent = exponent - 1 + ((fraction > 0.5) if up else 0)
    code = np.where(x == 0, 0, np.where(np.isinf(x), 254, np.clip(exponent + 127, 0, 254)))
    return np.where(np.isnan(x), 255, code).astype(np.uint8)


def bf16_encode(x):
    """float32 to bf16 bits, to nearest even."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    rounded = ((bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), rounded) if np.count_nonzero(nan) else rounded


def bf16_truncate(x):
    bits = np.ascontiguousarray(x, F32).view(U32) >> U32(16)
    return np.where(np.isnan(x), U32(0x7FFF), bits).astype(np.uint16)


def bf16_decode(bits):
    return (bits.astype(U32) << U32(16)).view(F32)


def to_odd(total, error):
    """`total`, with its rounding error `error`, rounded to odd: rounding that again to fewer bits is exact."""
    rounded = error != 0
    if not np.count_nonzero(rounded):
        return total
    bits = np.ascontiguousarray(total, F64).view(np.int64)
    inexact = rounded & (bits & 1 == 0) & np.isfinite(total)
    toward = np.where((error > 0) == (total >= 0), 1, -1)
    toward = np.where(total == 0, 0, toward)
    return np.where(inexact, bits + toward, bits).view(F64)


def sum_to_odd(a, b):
    """a + b in float64, rounded to odd (Knuth's two-sum gives the error exactly)."""
    total = a + b
    b_part = total - a
    return to_odd(total, (a - (total - b_part)) + (b - b_part))


def fma_f32(a, b, c):
    """fma rounded once: the product of two float32 is exact in float64."""
    return sum_to_odd(a.astype(F64) * b.astype(F64), c.astype(F64)).astype(F32)


def flush(x):
    """.ftz: float32 subnormals become zero of the same sign."""
    small = np.abs(x) < SMALLEST
    return np.where(small, np.copysign(F32(0), x), x) if np.count_nonzero(small) else x
