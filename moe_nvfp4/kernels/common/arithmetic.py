"""fp32 arithmetic that rounds as torch does, for kernels that must equal the reference.

Divisions are correctly rounded, and nothing is contracted into an fma.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint16, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


def assembly(result, text: str, constraints: str, *args, loc, ip):
    """One instruction without side effects on `args`; returns its value as the numeric type `result`."""
    operands = [a.ir_value(loc=loc, ip=ip) for a in args]
    return result(
        llvm.inline_asm(result.mlir_type, operands, text, constraints, has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def mul(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """a * b, rounded: never contracted into an fma, since the reference rounds here."""
    return assembly(Float32, "mul.rn.f32 $0, $1, $2;", "=f,f,f", Float32(a), Float32(b), loc=loc, ip=ip)


@dsl_user_op
def add(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """a + b, rounded: never contracted into an fma."""
    return assembly(Float32, "add.rn.f32 $0, $1, $2;", "=f,f,f", Float32(a), Float32(b), loc=loc, ip=ip)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a * b + c, rounded once."""
    return assembly(Float32, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c, loc=loc, ip=ip)


@dsl_user_op
def divide(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """a / b, correctly rounded."""
    return assembly(Float32, "div.rn.f32 $0, $1, $2;", "=f,f,f", Float32(a), Float32(b), loc=loc, ip=ip)


@dsl_user_op
def encode_e4m3(x: Float32, *, loc=None, ip=None) -> Uint32:
    """The e4m3 byte of x: nearest, ties to even, saturating at 448; NaN stays NaN."""
    zero = Float32(0.0)
    text = "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;"
    pair = assembly(Uint16, text, "=h,f,f", zero, Float32(x), loc=loc, ip=ip)
    return Uint32(pair) & Uint32(0xFF)


@dsl_user_op
def decode_e4m3(byte: Uint32, *, loc=None, ip=None) -> Float32:
    """The value of an e4m3 byte."""
    halves = assembly(Uint32, "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", Uint16(byte), loc=loc, ip=ip)
    return assembly(Float32, "cvt.f32.f16 $0, $1;", "=f,h", Uint16(halves & Uint32(0xFFFF)), loc=loc, ip=ip)


def largest_magnitude(values: list[Float32]) -> Float32:
    """max |x|, or NaN if there is one, as in torch."""
    best = [cute.arch.fmax(v, -v, nan=True) for v in values]
    while len(best) > 1:
        pairs = range(0, len(best) - 1, 2)
        best = [cute.arch.fmax(best[i], best[i + 1], nan=True) for i in pairs] + best[len(best) & ~1 :]
    return best[0]


def divide_near(x: Float32, divisor: Float32, inverse: Float32) -> Float32:
    """x / divisor, correctly rounded, from inverse = 1 / divisor: two corrections by the exact remainder.

    Valid while no step overflows or underflows, or where only the sign of the quotient matters.
    """
    quotient = mul(x, inverse)
    for _ in range(2):
        quotient = fma(fma(-quotient, divisor, x), inverse, quotient)
    return quotient


def nearest_e2m1(x: Float32) -> Float32:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, signed, ties to the even code, for |x| < 7. -0 becomes 0.

    1.5 * 2^22 times the power of two of x is added and subtracted: the sum has no room for bits below half that power.
    """
    power = _power_of_two(cute.arch.fmax(cute.arch.fmax(x, -x), Float32(1.0)))
    return fma(power, Float32(-1.5 * 2.0**22), fma(power, Float32(1.5 * 2.0**22), x))


@dsl_user_op
def _power_of_two(x: Float32, *, loc=None, ip=None) -> Float32:
    """The largest power of two that is at most x > 0."""
    return assembly(Float32, "and.b32 $0, $1, 0x7F800000;", "=f,f", x, loc=loc, ip=ip)


@cute.jit
def better_scale(values: list[Float32], largest: Float32, six: Uint32, global_scale: Float32, sum_of_block) -> Uint32:
    """`format._four_over_six`: the e4m3 byte of a block's scale, where `six` is the byte for code 6.

    values: this thread's elements; sum_of_block adds a number over the block's threads. Sums are exact in any order.
    """
    four = encode_e4m3(divide(mul(largest, Float32(0.25)), global_scale))
    errors = []
    for sf in (six, four):
        value = decode_e4m3(sf)
        inverse, error = divide(Float32(1.0), mul(value, global_scale)), Float32(0.0)
        for x in values:
            place = add(fma(x, inverse, Float32(12288.0)), Float32(-12288.0))  # 1.5 * 2^13: rounds to 2^-10
            distance = add(place, -nearest_e2m1(place))
            error = fma(distance, distance, error)
        errors.append(mul(sum_of_block(error), mul(value, value)))
    sensible = decode_e4m3(six) >= 2.0**-6 and global_scale >= 2.0**-100 and global_scale <= 2.0**100
    return Uint32(cutlass.select_(sensible and errors[1] < errors[0], four, six))


@cute.jit
def global_scale_for(largest: Float32, sf_max: cutlass.Constexpr = 448.0) -> Float32:
    """`format.global_scale_for`: largest / (6 * sf_max), at least the smallest normal number; 1 for zero."""
    scale = Float32(1.0)
    if largest != 0.0:
        scale = divide(largest, Float32(6.0 * sf_max))
        scale = cute.arch.fmax(scale, Float32(1.1754943508222875e-38), nan=True)
    return scale
