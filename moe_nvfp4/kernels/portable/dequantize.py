"""NVFP4 -> 16-bit floats inside a Triton kernel, without rounding: code * sf * 2^-7.

A code's bits s ee m, moved to the sign and the low end of the exponent of bf16, are the number code * 2^-126 (0.5 is a
subnormal in both formats). In the same way e4m3's bits are sf * 2^-120. So

    bf16:  (code * 2^-126) * (sf * 2^119)        fp16:  (code * 2^-14) * (sf * 2^7)

is one multiplication, and code * sf has at most 6 significant bits: nothing is rounded. The user of the products
multiplies their fp32 sum by `UNIT` * global_scale.

A byte holds columns 2i and 2i + 1 of K. Because a sum over K may be taken in any order, even and odd columns stay two
matrices with a product each, and nibbles are never interleaved.

HOW is how it is done: "asm" (PTX, for NVIDIA GPUs), "plain" (operations that Triton has everywhere) or "interpreted"
(plain, with workarounds: Triton's interpreter multiplies bf16 as integers and truncates where it should round).
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl

UNIT = tl.constexpr(128.0)

# Four bytes $4 and four scales $5, $6 -> even columns $0, $1 and odd columns $2, $3. Elements of a tensor that share a
# register need not be neighbours, so each has its own scale. A low (high) nibble times 0x1040 (0x104) has its sign at
# bit 15 and its magnitude at bits 8..6.
_BF16 = tl.constexpr("""{
.reg .b32 t, u, a, b, c, d, z;
prmt.b32 t, $4, 0, 0x4140;
prmt.b32 u, $4, 0, 0x4342;
and.b32 a, t, 0x000f000f;
and.b32 b, u, 0x000f000f;
and.b32 c, t, 0x00f000f0;
and.b32 d, u, 0x00f000f0;
mul.lo.u32 a, a, 0x1040;
mul.lo.u32 b, b, 0x1040;
mul.lo.u32 c, c, 0x104;
mul.lo.u32 d, d, 0x104;
and.b32 a, a, 0x81c081c0;
and.b32 b, b, 0x81c081c0;
and.b32 c, c, 0x81c081c0;
and.b32 d, d, 0x81c081c0;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 $0, a, $5, z;
fma.rn.bf16x2 $1, b, $6, z;
fma.rn.bf16x2 $2, c, $5, z;
fma.rn.bf16x2 $3, d, $6, z;
}""")
# The same for fp16. Its magnitude is at bits 11..9, too close to the sign for a multiplication.
_FP16 = tl.constexpr("""{
.reg .b32 t, u, a, b, c, d, s;
prmt.b32 t, $4, 0, 0x4140;
prmt.b32 u, $4, 0, 0x4342;
shl.b32 a, t, 9;
and.b32 a, a, 0x0e000e00;
shl.b32 s, t, 12;
lop3.b32 a, s, 0x80008000, a, 0xea;
shl.b32 b, u, 9;
and.b32 b, b, 0x0e000e00;
shl.b32 s, u, 12;
lop3.b32 b, s, 0x80008000, b, 0xea;
shl.b32 c, t, 5;
and.b32 c, c, 0x0e000e00;
shl.b32 s, t, 8;
lop3.b32 c, s, 0x80008000, c, 0xea;
shl.b32 d, u, 5;
and.b32 d, d, 0x0e000e00;
shl.b32 s, u, 8;
lop3.b32 d, s, 0x80008000, d, 0xea;
mul.rn.f16x2 $0, a, $5;
mul.rn.f16x2 $1, b, $6;
mul.rn.f16x2 $2, c, $5;
mul.rn.f16x2 $3, d, $6;
}""")
# Four scales $2: e4m3's bits, four places up (the lowest exponent bit is then bf16's), times 2^127 and 2^112.
_BF16_SF = tl.constexpr("""{
.reg .b32 t, u, c, d, z;
prmt.b32 t, $2, 0, 0x4140;
prmt.b32 u, $2, 0, 0x4342;
shl.b32 t, t, 4;
shl.b32 u, u, 4;
mov.b32 c, 0x7f007f00;
mov.b32 d, 0x77807780;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 t, t, c, z;
fma.rn.bf16x2 u, u, c, z;
fma.rn.bf16x2 $0, t, d, z;
fma.rn.bf16x2 $1, u, d, z;
}""")


@cache
def how() -> str:
    """The HOW of this process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted"
    return "plain" if torch.version.hip else "asm"


@triton.jit
def dequantize(codes, sf, DTYPE: tl.constexpr, HOW: tl.constexpr):
    """codes uint8 [N, K / 2], sf uint8 [N, K / 16] -> even and odd columns [N, K / 2] of code * sf / UNIT in DTYPE."""
    N: tl.constexpr = codes.shape[0]
    K2: tl.constexpr = codes.shape[1]
    if HOW == "asm" and DTYPE == tl.bfloat16:
        scale = tl.inline_asm_elementwise(_BF16_SF, "=r,=r,r", [sf], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        scale = (sf.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)  # sf * 2^-8
        scale *= 32768.0 if DTYPE == tl.float16 else 170141183460469231731687303715884105728.0  # 2^15, 2^127
    if HOW == "asm":
        scale = tl.reshape(tl.broadcast_to(scale.to(DTYPE)[:, :, None], (N, K2 // 8, 8)), (N, K2))
        if DTYPE == tl.bfloat16:
            even, odd = tl.inline_asm_elementwise(
                _BF16, "=r,=r,=r,=r,r,r,r", [codes, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            even, odd = tl.inline_asm_elementwise(
                _FP16, "=r,=r,=r,=r,r,r,r", [codes, scale], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        # The same in fp32, whose exponent is like bf16's.
        if DTYPE == tl.float16:
            scale *= 5192296858534827628530496329220096.0  # 2^112: fp32's exponent bias is that much larger than fp16's
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (N, K2 // 8, 8)), (N, K2))
        bits = codes.to(tl.int32)
        even = ((bits & 0x8) << 28) | ((bits & 0x7) << 22)
        odd = ((bits & 0x80) << 24) | ((bits & 0x70) << 18)
        even = (even.to(tl.float32, bitcast=True) * scale).to(DTYPE)
        odd = (odd.to(tl.float32, bitcast=True) * scale).to(DTYPE)
    return even, odd


@triton.jit
def dot(a, b, acc, HOW: tl.constexpr):
    if HOW == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def dot_nvfp4(codes, sf, x, x_sf, acc, HOW: tl.constexpr):
    """acc + (code * sf) . (code * sf), on tensor cores that take NVFP4 for both: codes uint8 [N, K / 2], sf uint8
    [N, K / 16], x uint8 [K / 2, M], x_sf uint8 [M, K / 16]."""
    if HOW == "interpreted":
        even, odd = dequantize(codes, sf, tl.bfloat16, HOW)
        x_even, x_odd = dequantize(tl.trans(x), x_sf, tl.bfloat16, HOW)
        product = dot(odd, tl.trans(x_odd), dot(even, tl.trans(x_even), acc * 0.0, HOW), HOW)
        return acc + product * (UNIT * UNIT)
    else:
        sf = sf.to(tl.float8e4nv, bitcast=True)
        x_sf = x_sf.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(codes, sf, "e2m1", x, x_sf, "e2m1", acc)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, HOW: tl.constexpr):
    """fp32 -> DTYPE, to nearest even."""
    if HOW == "interpreted" and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
