"""The emulator's instructions, one by one, against formulas that are written here independently."""

import bisect
import itertools
import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from tests.emulator.snippets import f32, run, u32


def each(opcode, out, *inputs, modifiers=""):
    """Run the instruction on 32 lanes of inputs, each a NumPy array; `out` is the dtype of the result."""
    body, arguments, parameters, names = "", [], [], []
    for i, values in enumerate(inputs):
        values = np.resize(values, 32)
        bits = 8 * values.itemsize
        register = {8: f"%y{i}", 16: f"%h{i}", 32: f"%r{i}", 64: f"%x{i}"}[bits]
        load = f"ld.global.b{bits} {register if bits > 8 else f'%h{i}'}, [%x{20 + i}];"
        body += f"ld.param.u64 %x{20 + i}, [in{i}]; mad.wide.u32 %x{20 + i}, %t, {bits // 8}, %x{20 + i}; {load}\n"
        if bits == 8:
            body += f"cvt.u8.u16 {register}, %h{i};\n"
        arguments.append(values)
        parameters.append(f".u64 in{i}")
        names.append(register)
    result = np.zeros(32, out)
    bits = 8 * result.itemsize
    target = {8: "%y9", 16: "%h9", 32: "%r9", 64: "%x9"}[bits]
    body += f"{opcode} {target}, {', '.join(names)}{modifiers};\n"
    body += f"mad.wide.u32 %x19, %t, {bits // 8}, %out;\n"
    if bits == 8:
        body += "cvt.u16.u8 %h9, %y9;\n"
        target = "%h9"
    body += f"st.global.b{bits} [%x19], {target};\n"
    run(body, result, arguments=arguments, parameters=parameters, registers=".reg .b8 %y<16>;")
    return result


# ---- integers ----
EDGES = [0, 1, 2, 3, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0xDEADBEEF, 0x12345678]
PAIRS = np.array(list(itertools.product(EDGES, EDGES)), np.uint32)


def signed(value, bits=32):
    return value - (1 << bits) if value >> (bits - 1) else value


def truncated(a, b):
    return 0 if b == 0 else int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b))


INTEGER = {
    "add.s32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.u32": max,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << min(b, 32),  # amounts beyond the width give 0
    "shr.u32": lambda a, b: a >> min(b, 32),
    "shr.s32": lambda a, b: signed(a) >> min(b, 32),
}


@pytest.mark.parametrize("opcode", INTEGER)
def test_integers(opcode):
    for start in range(0, len(PAIRS), 32):
        a, b = np.resize(PAIRS[start : start + 32], (32, 2)).T
        expected = u32(*(INTEGER[opcode](int(x), int(y)) for x, y in zip(a, b, strict=True)))
        np.testing.assert_array_equal(each(opcode, np.uint32, a.copy(), b.copy()), expected)


@pytest.mark.parametrize("opcode", ["div.s32", "rem.s32", "div.u32", "rem.u32"])
def test_division_truncates(opcode):
    a, b = PAIRS[PAIRS[:, 1] != 0][::5][:32].T
    if opcode.endswith("s32"):
        quotient = [truncated(signed(int(x)), signed(int(y))) for x, y in zip(a, b, strict=True)]
        remainder = [signed(int(x)) - q * signed(int(y)) for x, y, q in zip(a, b, quotient, strict=True)]
    else:
        quotient = [int(x) // int(y) for x, y in zip(a, b, strict=True)]
        remainder = [int(x) % int(y) for x, y in zip(a, b, strict=True)]
    expected = u32(*(quotient if opcode.startswith("div") else remainder))
    np.testing.assert_array_equal(each(opcode, np.uint32, a.copy(), b.copy()), expected)


def test_wide_products_and_64_bit_addresses():
    a, b = PAIRS[:32].T.copy()
    expected = np.array(
        [(signed(int(x)) * signed(int(y))) & (1 << 64) - 1 for x, y in zip(a, b, strict=True)], np.uint64
    )
    np.testing.assert_array_equal(each("mul.wide.s32", np.uint64, a, b), expected)
    x = expected * np.uint64(0x9E3779B97F4A7C15)
    expected = np.array([(int(v) + (1 << 63)) & (1 << 64) - 1 for v in x], np.uint64)
    np.testing.assert_array_equal(each("add.s64", np.uint64, x, np.array([1 << 63], np.uint64)), expected)


def test_bit_fields():
    values = u32(*EDGES)
    a = np.resize(values, 32)
    expected = u32(*(bin(int(v)).count("1") for v in a))
    np.testing.assert_array_equal(each("popc.b32", np.uint32, a), expected)
    np.testing.assert_array_equal(each("clz.b32", np.uint32, a), u32(*(32 - int(v).bit_length() for v in a)))
    reverse = u32(*(int(f"{int(v):032b}"[::-1], 2) for v in a))
    np.testing.assert_array_equal(each("brev.b32", np.uint32, a), reverse)
    found = u32(*(int(v).bit_length() - 1 for v in a))
    np.testing.assert_array_equal(each("bfind.u32", np.uint32, a), found)
    expected = u32(*((int(v) >> 7) & 0x1FF for v in a))
    np.testing.assert_array_equal(each("bfe.u32", np.uint32, a, modifiers=", 7, 9"), expected)
    expected = u32(*(signed((int(v) >> 7) & 0x1FF, 9) for v in a))
    np.testing.assert_array_equal(each("bfe.s32", np.uint32, a, modifiers=", 7, 9"), expected)
    b = a[::-1].copy()
    expected = u32(*((int(y) & ~(0x1FF << 7)) | ((int(x) & 0x1FF) << 7) for x, y in zip(a, b, strict=True)))
    np.testing.assert_array_equal(each("bfi.b32", np.uint32, a, b, modifiers=", 7, 9"), expected)


def test_funnel_shift():
    a, b = PAIRS[20:52].T.copy()
    both = [int(y) << 32 | int(x) for x, y in zip(a, b, strict=True)]
    for amount in (0, 8, 31):
        modifiers = f", {amount}"
        left = each("shf.l.wrap.b32", np.uint32, a, b, modifiers=modifiers)
        np.testing.assert_array_equal(left, u32(*((v << amount) >> 32 for v in both)))
        right = each("shf.r.wrap.b32", np.uint32, a, b, modifiers=modifiers)
        np.testing.assert_array_equal(right, u32(*(v >> amount for v in both)))


@pytest.mark.parametrize("table", [0x80, 0xFE, 0x96, 0xCA, 0xE8, 0x6A])
def test_lop3(table):
    """The PTX ISA makes a table by applying the function to 0xF0, 0xCC, 0xAA."""
    rng = np.random.default_rng(table)
    a, b, c = rng.integers(0, 1 << 32, (3, 32), np.uint32)
    bit = lambda i: [(table >> ((int(x) >> i & 1) << 2 | (int(y) >> i & 1) << 1 | int(z) >> i & 1)) & 1
                     for x, y, z in zip(a, b, c, strict=True)]  # fmt: skip
    expected = sum(np.array(bit(i), np.uint64) << np.uint64(i) for i in range(32)).astype(np.uint32)
    np.testing.assert_array_equal(each("lop3.b32", np.uint32, a, b, c, modifiers=f", {table}"), expected)


def test_prmt():
    a, b = u32(0x83828180), u32(0x07060504)
    cases = {0x3210: 0x83828180, 0x7654: 0x07060504, 0x5410: 0x05048180, 0x0000: 0x80808080, 0xC8F0: 0x00FF0080}
    for selector, expected in cases.items():
        assert each("prmt.b32", np.uint32, a, b, u32(selector))[0] == expected, hex(selector)


# ---- floats ----
FLOATS = f32(
    0.0, -0.0, 1.0, -1.5, 3.0, 0.1, 1e-30, 1e30, 6e-39, np.inf, -np.inf, np.nan, 3.4e38, 2**-149, 1 + 2**-23, 7.7
)


def nearest_f32(exact):
    """The float32 nearest to a Fraction, ties to even."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, f32(-np.inf)[0]), near, np.nextafter(near, f32(np.inf)[0])]
    around = [x for x in around if np.isfinite(x)]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(np.float32(x).view(np.uint32)) & 1))


def test_fma_rounds_once():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 32)).astype(np.float32)
    c = (-a.astype(np.float64) * b * (1 + rng.choice([0, 2.0**-25, 2.0**-30], 32))).astype(np.float32)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    expected = f32(*(nearest_f32(e) for e in exact))
    np.testing.assert_array_equal(each("fma.rn.f32", np.float32, a, b, c), expected)
    # Here it would be wrong to add in float64 first: the sum is just above a tie of float32.
    a, b, c = f32(1 + 2**-12), f32(1 + 2**-12), f32(2.0**-60)
    assert each("fma.rn.f32", np.float32, a, b, c)[0] == nearest_f32(Fraction(1 + 2**-12) ** 2 + Fraction(1, 2**60))


def test_minimum_of_nan_and_zeros():
    a, b = f32(np.nan, 1.0, -0.0, 0.0, np.nan), f32(2.0, np.nan, 0.0, -0.0, np.nan)
    bits = lambda opcode: each(opcode, np.uint32, a.view(np.uint32), b.view(np.uint32))[:5].tolist()
    one, two, minus, nan = 0x3F800000, 0x40000000, 0x80000000, 0x7FFFFFFF
    assert bits("min.f32")[:4] == [two, one, minus, minus]
    assert bits("max.f32")[:4] == [two, one, 0, 0]
    assert bits("min.NaN.f32") == [nan, nan, minus, minus, nan]
    assert bits("max.NaN.f32") == [nan, nan, 0, 0, nan]


def test_three_inputs_of_max():
    a, b, c = f32(1, 5, 3), f32(2, 4, 9), f32(8, 0, np.nan)
    assert each("max.f32", np.float32, a, b, c)[:3].tolist() == [8, 5, 9]
    assert np.isnan(each("max.NaN.f32", np.float32, a, b, c)[2])


@pytest.mark.parametrize("opcode", ["rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"])
def test_approximations(opcode):
    """They give the exact value rounded, which is within every error that the PTX ISA allows."""
    x = np.linspace(0.01, 20, 32).astype(np.float32)
    exact = {"rcp": lambda v: 1 / v, "sqrt": np.sqrt, "rsqrt": lambda v: v**-0.5, "ex2": np.exp2, "lg2": np.log2,
             "sin": np.sin, "cos": np.cos, "tanh": np.tanh}[opcode](x.astype(np.float64))  # fmt: skip
    ftz = "" if opcode == "tanh" else ".ftz"
    got = each(f"{opcode}.approx{ftz}.f32", np.float32, x)
    np.testing.assert_allclose(got, exact, rtol=2.0**-22, atol=2.0**-22)


def test_flush_to_zero():
    x = f32(2.0**-149, -(2.0**-130), 2.0**-126, 1.0)
    got = each("add.ftz.f32", np.uint32, x.view(np.uint32), f32(-0.0).view(np.uint32))[:4]
    assert got.tolist() == [0, 0x80000000, f32(2.0**-126).view(np.uint32)[0], 0x3F800000]
    assert each("ex2.approx.ftz.f32", np.float32, f32(-130.0))[0] == 0


def test_packed_pairs():
    rng = np.random.default_rng(1)
    a, b, c = rng.standard_normal((3, 64)).astype(np.float32)
    got = each("fma.rn.f32x2", np.uint64, a.view(np.uint64), b.view(np.uint64), c.view(np.uint64)).view(np.float32)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(got, f32(*(nearest_f32(e) for e in exact)))
    np.testing.assert_array_equal(
        each("mul.rn.f32x2", np.uint64, a.view(np.uint64), b.view(np.uint64)).view(np.float32), a * b
    )


def bf16_value(bits):
    return struct.unpack("<f", struct.pack("<I", int(bits) << 16))[0]


def nearest_code(exact, codes, value):
    """The code whose value is nearest, ties to the even code."""
    return min(codes, key=lambda code: (abs(Fraction(value(code)) - exact), code & 1))


def test_bf16_products():
    """Also of subnormals, which are not flushed."""
    rng = np.random.default_rng(2)
    a = rng.integers(0, 0x7F00, 64).astype(np.uint16)
    a[:8] = [1, 2, 0x7F, 0x80, 0x40, 3, 0x11, 0x7E]
    b = rng.integers(0x3D00, 0x4200, 64).astype(np.uint16)
    got = each("mul.rn.bf16x2", np.uint32, a.view(np.uint32), b.view(np.uint32)).view(np.uint16)
    for x, y, z in zip(a, b, got, strict=True):
        exact = Fraction(bf16_value(x)) * Fraction(bf16_value(y))
        near = range(max(0, int(z) - 2), min(int(z) + 3, 0x7F80))
        assert z == nearest_code(exact, near, bf16_value)


# ---- comparisons ----
def test_comparisons_with_nan():
    a, b = f32(1, np.nan, 2, np.nan), f32(1, 1, np.nan, np.nan)
    for name, expected in {"eq": [1, 0, 0, 0], "ne": [0, 0, 0, 0], "equ": [1, 1, 1, 1], "neu": [0, 1, 1, 1],
                           "lt": [0, 0, 0, 0], "geu": [1, 1, 1, 1], "nan": [0, 1, 1, 1], 
                           "num": [1, 0, 0, 0]}.items():  # fmt: skip
        assert compare(name, "f32", a, b)[:4] == expected, name


def compare(name, kind, a, b):
    a, b = np.resize(a, 32).view(np.uint32), np.resize(b, 32).view(np.uint32)
    body = f"""ld.param.u64 %x1, [a]; ld.param.u64 %x2, [b];
        mad.wide.u32 %x1, %t, 4, %x1; mad.wide.u32 %x2, %t, 4, %x2;
        ld.global.b32 %r1, [%x1]; ld.global.b32 %r2, [%x2];
        setp.{name}.{kind} %p1, %r1, %r2; selp.b32 %r3, 1, 0, %p1; st.global.b32 [%mine], %r3;"""
    return run(body, arguments=[a, b], parameters=[".u64 a", ".u64 b"]).tolist()


def test_unsigned_and_signed_comparisons():
    a, b = u32(0xFFFFFFFF, 1), u32(1, 0xFFFFFFFF)
    assert compare("lt", "s32", a, b)[:2] == [1, 0]
    assert compare("lt", "u32", a, b)[:2] == [0, 1]
    assert compare("hi", "u32", a, b)[:2] == [1, 0]


def test_combined_predicates_and_both_results():
    body = """setp.lt.u32 %p1, %t, 16; setp.ge.and.u32 %p2|%p3, %t, 8, %p1;
        selp.b32 %r1, 1, 0, %p2; selp.b32 %r2, 2, 0, %p3; or.b32 %r1, %r1, %r2; st.global.b32 [%mine], %r1;"""
    # The second result combines the complement of the comparison.
    expected = [(8 <= t < 16) + 2 * (t < 8) for t in range(32)]
    assert run(body).tolist() == expected


# ---- conversions ----
def e4m3_value(code):
    code &= 0x7F
    exponent, mantissa = code >> 3, code & 7
    return Fraction(mantissa, 8) / 64 if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def e2m1_value(code):
    return Fraction([0, 1, 2, 3, 4, 6, 8, 12][code & 7], 2)


def e5m2_value(code):
    exponent, mantissa = code >> 2, code & 3
    return (
        Fraction(mantissa, 4) / 2**14 if exponent == 0 else (1 + Fraction(mantissa, 4)) * Fraction(2) ** (exponent - 15)
    )


SMALL = {"e4m3x2": (e4m3_value, 127, 8, np.uint16, 0x7F), "e5m2x2": (e5m2_value, 124, 8, np.uint16, 0x7F),
         "e2m1x2": (e2m1_value, 8, 4, np.uint8, 7)}  # fmt: skip


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SMALL)
def test_small_floats_round_to_even_and_saturate(name):
    value, count, bits, dtype, nan = SMALL[name]
    exact = [value(c) for c in range(count)]
    middles = [(x + y) / 2 for x, y in zip(exact, exact[1:], strict=False)]
    numbers = [float(v) for v in exact + middles] + [float(m) * (1 + s * 2.0**-20) for m in middles for s in (1, -1)]
    numbers += [float(exact[-1]) * 1.01, float(exact[-1]) * 8, np.inf]
    for start in range(0, len(numbers), 32):
        x = np.resize(f32(*numbers[start : start + 32]), 32)
        got = each(f"cvt.rn.satfinite.{name}.f32", dtype, -x, x)
        for number, pair in zip(x, got, strict=True):
            if np.isinf(number):
                code = count - 1
            else:
                at = bisect.bisect(exact, Fraction(float(number)))  # the codes are in the order of their values
                code = nearest_code(Fraction(float(number)), range(max(at - 2, 0), min(at + 2, count)), value)
            low, high = int(pair) & (1 << bits) - 1, int(pair) >> bits
            assert low == code, (number, low, code)  # the second source is the low half
            assert high == code | 1 << (bits - 1)
    assert int(each(f"cvt.rn.satfinite.{name}.f32", dtype, f32(np.nan), f32(0))[0]) >> bits == nan


def test_small_floats_to_half():
    codes = np.arange(256, dtype=np.uint16)
    for start in range(0, 256, 32):
        pairs = codes[start : start + 32] * np.uint16(257)
        halves = each("cvt.rn.f16x2.e4m3x2", np.uint32, pairs).view(np.float16)[::2]
        for code, half in zip(range(start, start + 32), halves, strict=True):
            if code & 0x7F == 0x7F:
                assert np.isnan(half)
            else:
                assert Fraction(float(half)) == e4m3_value(code) * (-1 if code & 0x80 else 1)
    codes = np.arange(32, dtype=np.uint8) % 16
    halves = each("cvt.rn.f16x2.e2m1x2", np.uint32, codes | codes << 4).view(np.float16)[::2]
    assert [Fraction(float(h)) for h in halves] == [e2m1_value(int(c)) * (-1 if c & 8 else 1) for c in codes]


def test_powers_of_two():
    x = f32(1.0, 1.5, 2.0, 3.0, 0.75, 2.0**-126, 3e38, 0.0)
    up = each("cvt.rp.satfinite.ue8m0x2.f32", np.uint16, f32(0), x)[:8] & 0xFF
    down = each("cvt.rz.satfinite.ue8m0x2.f32", np.uint16, f32(0), x)[:8] & 0xFF
    assert up.tolist() == [127, 128, 128, 129, 127, 1, 254, 0]
    assert down.tolist() == [127, 127, 128, 128, 126, 1, 254, 0]


def test_bf16_and_half_conversions():
    x = f32(1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, 3.4e38, -0.0, np.inf, 1e-40)
    bits = x.view(np.uint32)
    expected = [(int(b) + 0x7FFF + (int(b) >> 16 & 1)) >> 16 for b in bits]
    assert each("cvt.rn.bf16.f32", np.uint16, x)[:7].tolist() == expected
    packed = each("cvt.rn.bf16x2.f32", np.uint32, x, f32(2.0))[:7]
    assert packed.tolist() == [e << 16 | 0x4000 for e in expected]  # the first source is the high half
    halves = each("cvt.rn.f16x2.f32", np.uint32, f32(1.5), f32(-2.0))
    assert halves[0] == 0x3E00C000


def test_rounding_to_an_integer_in_f32():
    x = f32(0.5, 1.5, 2.5, -0.5, -1.5, 3.49, 1e30, np.nan)
    got = each("cvt.rni.f32.f32", np.float32, x)[:8]
    assert got[:7].tolist() == [float(round(float(v))) for v in x[:7]] and np.isnan(got[7])  # ties to even
    assert np.signbit(got[3])


def test_comparisons_of_bf16():
    a, b = f32(1.5, -2.0, np.nan, 3e38), f32(2.0, -2.0, 0.0, -3e38)
    body = "setp.lt.bf16 %p1, %h1, %h2; selp.b32 %r1, 1, 0, %p1; st.global.b32 [%mine], %r1;"
    for x, y in zip(a, b, strict=True):
        upper = [int(v.view(np.uint32)) >> 16 for v in (x, y)]
        assert run(f"mov.b16 %h1, {upper[0]}; mov.b16 %h2, {upper[1]};" + body)[0] == (x < y)


def test_integer_conversions():
    x = f32(1.5, 2.5, -1.5, -7.9, 3e9, -3e9, np.nan, np.inf)
    assert each("cvt.rni.s32.f32", np.int32, x)[:8].tolist() == [2, 2, -2, -8, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    assert each("cvt.rzi.s32.f32", np.int32, x)[:4].tolist() == [1, 2, -1, -7]
    assert each("cvt.rzi.u32.f32", np.uint32, x)[:6].tolist() == [1, 2, 0, 0, 3000000000, 0]
    assert each("cvt.rmi.s32.f32", np.int32, x)[:3].tolist() == [1, 2, -2]
    assert each("cvt.s64.s32", np.int64, u32(0xFFFFFFFE))[0] == -2
    assert each("cvt.u64.u32", np.int64, u32(0xFFFFFFFE))[0] == 0xFFFFFFFE
    assert each("cvt.s32.s8", np.int32, u32(0x1FE))[0] == -2  # only the low byte counts
    assert each("cvt.u32.u8", np.int32, u32(0x1FE))[0] == 0xFE
