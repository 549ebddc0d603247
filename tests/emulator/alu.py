"""Arithmetic, logic, comparison, selection, conversion: instructions that only touch registers of their own lane.

An entry is opcode -> (type of the result, types of the inputs, function). The opcode must match exactly, so one with a
modifier that nobody thought of is an unknown instruction. PTX ISA: "Integer / Floating Point / Half Precision /
Comparison and Selection / Logic and Shift / Data Movement and Conversion Instructions".
"""

import itertools

import numpy as np

from tests.emulator.formats import (
    E2M1,
    E4M3,
    E5M2,
    bf16_decode,
    bf16_encode,
    bf16_truncate,
    flush,
    fma_f32,
    sum_to_odd,
    ue8m0_decode,
    ue8m0_encode,
)  # fmt: skip

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
S32, S64, F32, F64 = np.int32, np.int64, np.float32, np.float64
TYPES = {
    "pred": np.bool_, "b8": U8, "u8": U8, "s8": np.int8,
    "b16": U16, "u16": U16, "s16": np.int16, "f16": np.float16,
    "b32": U32, "u32": U32, "s32": S32, "f32": F32,
    "b64": U64, "u64": U64, "s64": S64, "f64": F64,
}  # fmt: skip
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
TABLE = {}


def define(name, result, inputs, function):
    TABLE[name] = (result, tuple(inputs.split()), function)


# ---- integers ----
def _divide(a, b):
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return a // safe
    sizes = [np.abs(x.astype(S64)).view(U64) for x in (a, safe)]  # unsigned, so that the smallest number has one too
    quotient = (sizes[0] // sizes[1]).view(S64)
    return np.where((a < 0) != (safe < 0), -quotient, quotient).astype(a.dtype)


def _remainder(a, b):
    return (a - _divide(a, b) * b).astype(a.dtype)


def _high(a, b):
    """The upper half of the product."""
    if a.dtype.itemsize < 8:
        bits = 8 * a.dtype.itemsize
        return ((a.astype(S64 if a.dtype.kind == "i" else U64) * b) >> bits).astype(a.dtype)
    high = [(int(x) * int(y)) >> 64 & 0xFFFFFFFFFFFFFFFF for x, y in zip(a, b, strict=True)]
    return np.array(high, U64).view(a.dtype)


for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
    T = TYPES[t]
    unsigned = "u" + t[1:]
    define(f"add.{t}", unsigned, f"{unsigned} {unsigned}", np.add)
    define(f"sub.{t}", unsigned, f"{unsigned} {unsigned}", np.subtract)
    define(f"mul.lo.{t}", unsigned, f"{unsigned} {unsigned}", np.multiply)
    define(f"mad.lo.{t}", unsigned, f"{unsigned} {unsigned} {unsigned}", lambda a, b, c: a * b + c)
    define(f"mul.hi.{t}", t, f"{t} {t}", _high)
    define(f"mad.hi.{t}", t, f"{t} {t} {t}", lambda a, b, c: _high(a, b) + c)
    define(f"div.{t}", t, f"{t} {t}", _divide)
    define(f"rem.{t}", t, f"{t} {t}", _remainder)
    define(f"min.{t}", t, f"{t} {t}", np.minimum)
    define(f"max.{t}", t, f"{t} {t}", np.maximum)
    define(f"shr.{t}", t, f"{t} u32", np.right_shift)
    if t[0] == "s":
        define(f"neg.{t}", t, t, np.negative)
        define(f"abs.{t}", t, t, np.abs)
    if t in WIDE:
        W = TYPES[WIDE[t]]
        define(f"mul.wide.{t}", WIDE[t], f"{t} {t}", lambda a, b, W=W: a.astype(W) * b.astype(W))
        define(f"mad.wide.{t}", WIDE[t], f"{t} {t} {WIDE[t]}", lambda a, b, c, W=W: a.astype(W) * b.astype(W) + c)

for t in ("b16", "b32", "b64", "pred"):
    define(f"and.{t}", t, f"{t} {t}", np.logical_and if t == "pred" else np.bitwise_and)
    define(f"or.{t}", t, f"{t} {t}", np.logical_or if t == "pred" else np.bitwise_or)
    define(f"xor.{t}", t, f"{t} {t}", np.logical_xor if t == "pred" else np.bitwise_xor)
    define(f"not.{t}", t, t, np.logical_not if t == "pred" else np.bitwise_not)
    if t == "pred":
        define("mov.pred", t, t, lambda a: a)
    else:
        define(f"shl.{t}", t, f"{t} u32", np.left_shift)
        define(f"shr.{t}", t, f"{t} u32", np.right_shift)
for t in ("u16", "s16", "u32", "s32", "f32", "u64", "s64", "f64"):
    define(f"mov.{t}", "b" + t[1:], "b" + t[1:], np.positive)
for t in ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
    b = "b" + t[1:]
    define(f"selp.{t}", b, f"{b} {b} pred", lambda a, c, p: np.where(p, a, c))


def _bits(a):
    return np.unpackbits(np.ascontiguousarray(a).view(U8).reshape(len(a), -1), axis=1, bitorder="little")


def _count_leading_zeros(a):
    reverse = _bits(a)[:, ::-1]
    return np.where(a == 0, reverse.shape[1], reverse.argmax(1)).astype(U32)


def _reverse_bits(a):
    return np.packbits(_bits(a)[:, ::-1], axis=1, bitorder="little").view(a.dtype).ravel()


def _find_high(a):
    return np.where(a == 0, U32(0xFFFFFFFF), U32(8 * a.dtype.itemsize - 1) - _count_leading_zeros(a)).astype(U32)


for t in ("b32", "b64"):
    define(f"popc.{t}", "u32", t, lambda a: _bits(a).sum(1).astype(U32))
    define(f"clz.{t}", "u32", t, _count_leading_zeros)
    define(f"brev.{t}", t, t, _reverse_bits)
for t in ("u32", "u64"):
    define(f"bfind.{t}", "u32", t, _find_high)


def _funnel(shift):
    """shf: the 64 bits {b, a} shifted; l keeps the upper word, r the lower."""

    def left(a, b, c):
        return ((((b.astype(U64) << U64(32)) | a) << shift(c)) >> U64(32)).astype(U32)

    def right(a, b, c):
        return (((b.astype(U64) << U64(32)) | a) >> shift(c)).astype(U32)

    return left, right


for mode, shift in (("wrap", lambda c: (c & U32(31)).astype(U64)), ("clamp", lambda c: np.minimum(c, 32).astype(U64))):
    left, right = _funnel(shift)
    define(f"shf.l.{mode}.b32", "b32", "b32 b32 u32", left)
    define(f"shf.r.{mode}.b32", "b32", "b32 b32 u32", right)


def _lop3(a, b, c, table):
    """Bit (a, b, c) of the truth table, a the high bit of the index."""
    table = int(table[0])
    result = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            term = a if index & 4 else ~a
            term = term & (b if index & 2 else ~b)
            result |= term & (c if index & 1 else ~c)
    return result


def _prmt(a, b, selector):
    """Default mode: four nibbles pick bytes of {b, a}; the nibble's top bit replicates the byte's sign."""
    source = np.stack([(word >> U32(8 * i)) & U32(255) for word in (a, b) for i in range(4)], axis=1)
    result = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> U32(4 * i)) & U32(15)
        byte = np.take_along_axis(source, (nibble & U32(7))[:, None].astype(S64), 1)[:, 0]
        sign = np.where(byte & U32(128), U32(255), U32(0))
        result |= np.where(nibble & U32(8), sign, byte).astype(U32) << U32(8 * i)
    return result


def _field(width, *numbers):
    """Position and length are taken modulo 256, as PTX specifies; an H200 does not do so for 64 bits."""
    return [np.minimum(n if width == 64 else n & U32(255), U32(255)) for n in numbers]


def _extract(a, start, length):
    """bfe: a signed field is filled with its top bit."""
    width = 8 * a.dtype.itemsize
    values = []
    start, length = _field(width, start, length)
    for x, p, n in zip(a.tolist(), start.tolist(), length.tolist(), strict=True):
        sign = 0
        if a.dtype.kind == "i" and n:
            sign = (x >> min(p + n - 1, width - 1)) & 1
        unsigned = x & ((1 << width) - 1)
        field = (unsigned >> p) & ((1 << n) - 1)
        kept = min(n, max(0, width - p))
        values.append((field | (-1 << kept)) if sign else field)
    return np.array([v & ((1 << width) - 1) for v in values], f"u{a.dtype.itemsize}").view(a.dtype)


def _insert(a, b, start, length):
    """bfi: the low bits of a into b."""
    start, length = (n.astype(U64) for n in _field(8 * b.dtype.itemsize, start, length))
    one = U64(1)
    mask = np.where(length >= U64(64), ~U64(0), (one << np.minimum(length, U64(63))) - one) << start
    return ((b & ~mask) | ((a.astype(U64) << start) & mask)).astype(b.dtype)


define("lop3.b32", "b32", "b32 b32 b32 b32", _lop3)
define("prmt.b32", "b32", "b32 b32 b32", _prmt)
for t in ("u32", "s32", "u64", "s64"):
    define(f"bfe.{t}", t, f"{t} u32 u32", _extract)
for t in ("b32", "b64"):
    define(f"bfi.{t}", t, f"{t} {t} u32 u32", _insert)


# ---- floats ----
def _extremum(pick, zeros):
    """-0 < +0, which NumPy leaves open: equal values differ only in sign, so `zeros` works on their bits."""

    def run(a, b):
        bits = f"u{a.dtype.itemsize}"
        equal = zeros(a.view(bits), b.view(bits)).view(a.dtype)
        return np.where(a == b, equal, pick(a, b))

    return run


def _canonical(function):
    """A NaN result is 0x7fffffff, and of float16 0x7fff."""

    def run(*inputs):
        result = function(*inputs)
        if result.dtype == F32 and result.dot(result) < np.inf:  # a quick way to see that there is no NaN
            return result
        return np.where(np.isnan(result), NAN[result.itemsize], result)

    return run


NAN = {4: np.array([0x7FFFFFFF], U32).view(F32)[0], 2: np.array([0x7FFF], U16).view(np.float16)[0]}
_min, _max = _extremum(np.fmin, np.bitwise_or), _extremum(np.fmax, np.bitwise_and)
_min_nan, _max_nan = _extremum(np.minimum, np.bitwise_or), _extremum(np.maximum, np.bitwise_and)
_three = lambda f: lambda a, b, c: f(f(a, b), c)
_ftz = lambda f: lambda *inputs: flush(f(*(flush(x) for x in inputs)))
_approximate = lambda f: lambda *inputs: f(*(x.astype(F64) for x in inputs)).astype(F32)
_saturate = lambda f: lambda *inputs: np.nan_to_num(np.clip(f(*inputs), F32(0), F32(1)), nan=0.0) + F32(0)  # no -0


def _divide_quickly(a, b):
    """div.approx: divisors above 2**126 give 0."""
    large = (np.abs(b) > F32(2.0**126)) & np.isfinite(b)
    return np.where(large, F32(0) * a * b, a / b)


ARITHMETIC = {"add": (np.add, 2), "sub": (np.subtract, 2), "mul": (np.multiply, 2), "fma": (fma_f32, 3)}
for (name, (f, count)), mode, ftz, sat in itertools.product(
    ARITHMETIC.items(), ("", ".rn"), ("", ".ftz"), ("", ".sat")
):
    if name == "fma" and not mode:
        continue
    g = _ftz(f) if ftz else f
    g = _saturate(g) if sat else _canonical(g)
    define(f"{name}{mode}{ftz}{sat}.f32", "f32", " ".join(["f32"] * count), g)
for ftz in ("", ".ftz"):
    g = lambda f, ftz=ftz: _canonical(_ftz(f) if ftz else f)
    for name, plain, quiet in (("min", _min, _min_nan), ("max", _max, _max_nan)):
        define(f"{name}{ftz}.f32", "f32", "f32 f32", g(plain))
        define(f"{name}{ftz}.NaN.f32", "f32", "f32 f32", g(quiet))
        define(f"{name}{ftz}.f32:3", "f32", "f32 f32 f32", g(_three(plain)))
        define(f"{name}{ftz}.NaN.f32:3", "f32", "f32 f32 f32", g(_three(quiet)))
    define(f"neg{ftz}.f32", "f32", "f32", g(np.negative))
    define(f"abs{ftz}.f32", "f32", "f32", g(np.abs))
    define(f"div.rn{ftz}.f32", "f32", "f32 f32", g(np.divide))
    define(f"div.full{ftz}.f32", "f32", "f32 f32", g(np.divide))
    define(f"div.approx{ftz}.f32", "f32", "f32 f32", g(_divide_quickly))
    define(f"rcp.rn{ftz}.f32", "f32", "f32", g(np.reciprocal))
    define(f"sqrt.rn{ftz}.f32", "f32", "f32", g(np.sqrt))
    # Approximate functions: the exact result rounded, which lies inside the documented error.
    for name, f in (("rcp", np.reciprocal), ("sqrt", np.sqrt), ("ex2", np.exp2), ("lg2", np.log2),
                    ("sin", np.sin), ("cos", np.cos), ("rsqrt", lambda x: 1 / np.sqrt(x))):  # fmt: skip
        define(f"{name}.approx{ftz}.f32", "f32", "f32", g(_approximate(f)))
define("tanh.approx.f32", "f32", "f32", _canonical(_approximate(np.tanh)))
define("copysign.f32", "f32", "f32 f32", lambda a, b: np.copysign(b, a))
for name, f in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.divide)):
    for mode in (".rn",) if name == "div" else ("", ".rn"):
        define(f"{name}{mode}.f64", "f64", "f64 f64", f)


# ---- two or more values in one register ----
def _pairs(f, dtype):
    """Apply f to the packed values; they are one array, so f needs no loop."""

    def run(*inputs):
        return f(*(np.ascontiguousarray(x).view(dtype) for x in inputs)).view(inputs[0].dtype)

    return run


def _bf16_multiply(a, b):
    """A product of two bf16 has 16 bits, so float32 holds it unless it underflows."""
    x, y = bf16_decode(a), bf16_decode(b)
    result = x * y
    if np.count_nonzero((np.abs(result) < F32(2.0**-100)) & (x != 0) & (y != 0)):
        return _bf16(np.multiply)(a, b)
    return bf16_encode(result)


def _bf16(f):
    """bf16 results are the exact ones rounded once; float64 rounded to odd keeps all bits that this needs."""

    def run(*inputs):
        exact = f(*(bf16_decode(x).astype(F64) for x in inputs))
        nearest = exact.astype(F32)
        return bf16_encode(_odd_f32(exact, nearest))

    return run


def _odd_f32(exact, nearest):
    """float64 to float32, rounded to odd."""
    error = exact - nearest.astype(F64)
    rounded = error != 0
    if not np.count_nonzero(rounded):
        return nearest
    bits = nearest.view(U32)
    inexact = rounded & (bits & U32(1) == 0) & np.isfinite(nearest)
    away = (error > 0) != np.signbit(nearest)
    bits = np.where(inexact, np.where(away, bits + U32(1), bits - U32(1)), bits).astype(U32)
    return bits.view(F32)


def _half(f):
    return _canonical(lambda *inputs: f(*(x.astype(F64) for x in inputs)).astype(np.float16))


EXACT = {"add": (sum_to_odd, 2), "sub": (lambda a, b: sum_to_odd(a, -b), 2), "mul": (np.multiply, 2),
         "fma": (lambda a, b, c: sum_to_odd(a * b, c), 3)}  # fmt: skip
for (name, (f, count)), mode in itertools.product(EXACT.items(), ("", ".rn")):
    if name == "fma" and not mode:
        continue
    inputs = lambda t, count=count: " ".join([t] * count)
    brain = _bf16_multiply if name == "mul" else _bf16(f)
    define(f"{name}{mode}.bf16", "b16", inputs("b16"), brain)
    define(f"{name}{mode}.bf16x2", "b32", inputs("b32"), _pairs(brain, U16))
    define(f"{name}{mode}.f16", "f16", inputs("f16"), _half(f))
    define(f"{name}{mode}.f16x2", "b32", inputs("b32"), _pairs(_half(f), np.float16))
    for ftz in ("", ".ftz"):
        g = ARITHMETIC[name][0]
        define(f"{name}{mode}{ftz}.f32x2", "b64", inputs("b64"), _pairs(_ftz(g) if ftz else g, F32))
for t in ("f16", "bf16"):
    infinity = U16(0x7C00 if t == "f16" else 0x7F80)
    nan = lambda f, infinity=infinity: lambda a: np.where(a & U16(0x7FFF) > infinity, U16(0x7FFF), f(a))
    negative, absolute = nan(lambda a: a ^ U16(0x8000)), nan(lambda a: a & U16(0x7FFF))
    define(f"neg.{t}", "b16", "b16", negative)
    define(f"abs.{t}", "b16", "b16", absolute)
    define(f"neg.{t}x2", "b32", "b32", _pairs(negative, U16))
    define(f"abs.{t}x2", "b32", "b32", _pairs(absolute, U16))
for name, f in (("min", _min), ("max", _max), ("min.NaN", _min_nan), ("max.NaN", _max_nan)):
    # A NaN result is 0x7fff; NumPy's float16 NaN has other bits, so it is set separately.
    half = lambda a, b, f=f: _half_nan(f(a.view(np.float16), b.view(np.float16)))
    brain = lambda a, b, f=f: bf16_encode(f(bf16_decode(a), bf16_decode(b)))
    for t, g in (("f16", half), ("bf16", brain)):
        define(f"{name}.{t}", "b16", "b16 b16", g)
        define(f"{name}.{t}x2", "b32", "b32 b32", _pairs(g, U16))


def _half_nan(x):
    return np.where(np.isnan(x), U16(0x7FFF), x.view(U16))


# ---- comparison ----
UFUNC = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
ORDER = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name, t):
    """The function for setp's comparison `name` on type `t`, or None."""
    if t in ("f32", "f64", "f16"):
        if name == "nan":
            return lambda a, b: np.isnan(a) | np.isnan(b)
        if name == "num":
            return lambda a, b: ~(np.isnan(a) | np.isnan(b))
        if name == "ne":  # the ordered ne: false if one is NaN
            return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
        if name in UFUNC:
            return UFUNC[name]
        if name.endswith("u") and name[:-1] in UFUNC:
            f = UFUNC[name[:-1]]
            return lambda a, b: f(a, b) | np.isnan(a) | np.isnan(b)
        return None
    if t[0] == "u" and name in ORDER:
        return UFUNC[ORDER[name]]
    if t[0] == "b" and name not in ("eq", "ne"):
        return None
    return UFUNC.get(name)


# ---- conversion ----
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _to_integer(rounding, T, ftz):
    limits = np.iinfo(T)

    def run(a):
        x = ROUND[rounding](flush(a) if ftz else a).astype(F64)
        nan = np.isnan(x)  # an H200 turns it into 0, and for 64 bits into the top bit
        x = np.where(nan, 0, x)
        # The top of a 64-bit range is not a float64: values at or above it are set, not converted.
        top = x >= float(limits.max)
        inside = np.clip(x, float(limits.min), np.nextafter(float(limits.max), 0) if limits.bits == 64 else limits.max)
        result = np.where(top, T(limits.max), inside.astype(T))
        if limits.bits == 64:
            result.view(U64)[nan] = 1 << 63
        return result

    return run


def _pack(high, low, bits):
    unsigned = {4: U8, 8: U16, 16: U32}[bits]
    return ((high.astype(unsigned) << unsigned(bits)) | low.astype(unsigned)).astype(unsigned)


def _relu(x, relu):
    return np.where(x <= 0, F32(0), x) if relu else x  # no -0 either


def _f16(x):
    """The bits of float16, rounded to nearest even."""
    return _half_nan(x.astype(np.float16))


for integer, rounding, ftz in itertools.product(("u16", "s16", "u32", "s32", "u64", "s64"), ROUND, ("", ".ftz")):
    define(f"cvt.{rounding}{ftz}.{integer}.f32", integer, "f32", _to_integer(rounding, TYPES[integer], ftz))
for integer in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
    define(f"cvt.rn.f32.{integer}", "f32", integer, lambda a: a.astype(F32))
    define(f"cvt.rn.f64.{integer}", "f64", integer, lambda a: a.astype(F64))
    for other in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        if integer != other:
            define(f"cvt.{other}.{integer}", other, integer, lambda a, T=TYPES[other]: a.astype(T))
for rounding, f in ROUND.items():
    define(f"cvt.{rounding}.f32.f32", "f32", "f32", _canonical(f))
    define(f"cvt.{rounding}.ftz.f32.f32", "f32", "f32", _canonical(_ftz(f)))
define("cvt.f64.f32", "f64", "f32", lambda a: a.astype(F64))
define("cvt.rn.f32.f64", "f32", "f64", lambda a: a.astype(F32))
define("cvt.f32.f16", "f32", "f16", _canonical(lambda a: a.astype(F32)))
define("cvt.rn.f16.f32", "b16", "f32", _f16)
define("cvt.f32.bf16", "f32", "b16", bf16_decode)
define("cvt.rn.bf16.f32", "b16", "f32", bf16_encode)
for relu in ("", ".relu"):
    define(f"cvt.rn{relu}.bf16x2.f32", "b32", "f32 f32",
           lambda a, b, r=relu: _pack(bf16_encode(_relu(a, r)), bf16_encode(_relu(b, r)), 16))  # fmt: skip
    define(f"cvt.rz{relu}.bf16x2.f32", "b32", "f32 f32",
           lambda a, b, r=relu: _pack(bf16_truncate(_relu(a, r)), bf16_truncate(_relu(b, r)), 16))  # fmt: skip
    define(f"cvt.rn{relu}.f16x2.f32", "b32", "f32 f32",
           lambda a, b, r=relu: _pack(_f16(_relu(a, r)), _f16(_relu(b, r)), 16))  # fmt: skip
    for name, small, bits, result in (
        ("e2m1x2", E2M1, 4, "b8"),
        ("e4m3x2", E4M3, 8, "b16"),
        ("e5m2x2", E5M2, 8, "b16"),
    ):
        convert = lambda a, b, s=small, n=bits, r=relu: _pack(s.encode(_relu(a, r)), s.encode(_relu(b, r)), n)
        define(f"cvt.rn.satfinite{relu}.{name}.f32", result, "f32 f32", convert)
for name, small in (("e4m3x2", E4M3), ("e5m2x2", E5M2)):
    define(f"cvt.rn.f16x2.{name}", "b32", "b16",
           lambda a, s=small: _pack(_f16(s.decode(a >> U16(8))), _f16(s.decode(a & U16(255))), 16))  # fmt: skip
    define(f"cvt.rn.satfinite.{name}.f16x2", "b16", "b32",
           lambda a, s=small: _pack(s.encode((a >> U32(16)).astype(U16).view(np.float16)),
                                    s.encode((a & U32(0xFFFF)).astype(U16).view(np.float16)), 8))  # fmt: skip
define("cvt.rn.f16x2.e2m1x2", "b32", "b8",
       lambda a: _pack(_f16(E2M1.decode(a >> U8(4))), _f16(E2M1.decode(a & U8(15))), 16))  # fmt: skip
for rounding in ("rp", "rz"):
    define(f"cvt.{rounding}.satfinite.ue8m0x2.f32", "b16", "f32 f32",
           lambda a, b, up=rounding == "rp": _pack(ue8m0_encode(a, up), ue8m0_encode(b, up), 8))  # fmt: skip
define("cvt.rn.bf16x2.ue8m0x2", "b32", "b16",
       lambda a: _pack(bf16_encode(ue8m0_decode(a >> U16(8)).astype(F32)),
                       bf16_encode(ue8m0_decode(a & U16(255)).astype(F32)), 16))  # fmt: skip
