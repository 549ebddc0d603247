"""The Blackwell instructions of the sm_100a kernels, one function each, and NVFP4 arithmetic.

Addresses in shared memory and in tensor memory (TMEM) are 32-bit integers. A TMEM address is
lane << 16 | column: 128 lanes, 512 columns of 32 bits. Bit layouts of descriptors: PTX ISA, tcgen05.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cutlass_dsl import dsl_user_op

from moe_nvfp4.kernels.common.arithmetic import (
    add,
    assembly,
    better_scale,
    decode_e4m3,
    divide,
    divide_near,
    encode_e4m3,
    largest_magnitude,
    mul,
)

# ---- tensor cores --------------------------------------------------------------------------------

_VERSION = 1 << 46  # version of the shared memory descriptor: 1 on sm_100
_ROWS_128B_SWIZZLED = 1024 >> 4 << 32 | 2 << 61 | 1 << 16 | _VERSION  # 8 rows of 128 bytes, then the next 8
_ROWS_16B = 128 >> 4 << 32 | 1 << 16 | _VERSION  # 8 rows of 16 bytes, then the next 8
_E2M1_BY_E2M1 = 1 << 7 | 1 << 10  # e4m3 scales: bit 23 is 0
_BF16_BY_BF16 = 1 << 4 | 1 << 7 | 1 << 10  # fp32 sums


def operand_descriptor(address: Int32) -> Int64:
    """A K-major operand in shared memory: rows of 128 bytes (256 codes, 64 bf16), 128-byte swizzle."""
    return Int64(address >> 4) | Int64(_ROWS_128B_SWIZZLED)


def scales_descriptor(address: Int32) -> Int64:
    """512 bytes of block scales in shared memory: one tile of the 128x4 layout."""
    return Int64(address >> 4) | Int64(_ROWS_16B)


def instruction_descriptor(rows: int, tokens: Int32) -> Int32:
    """For D[rows, tokens] of an NVFP4 MMA; dynamic tokens: a multiple of 8 (16 for a pair of CTAs) up to 256."""
    return Int32(_E2M1_BY_E2M1 | rows >> 4 << 24) | (tokens >> 3 << 17)


def dense_instruction_descriptor(tokens: Int32) -> Int32:
    """For D[128, tokens] of a bf16 MMA; dynamic tokens: a multiple of 16 up to 256."""
    return Int32(_BF16_BY_BF16 | 128 >> 4 << 24) | (tokens >> 3 << 17)


def _group(ctas: int):
    return nvvm.CTAGroupKind.CTA_1 if ctas == 1 else nvvm.CTAGroupKind.CTA_2


def _tmem(address, loc, ip):
    return llvm.inttoptr(llvm.PointerType.get(6), Int32(address).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


@dsl_user_op
def mma(
    d: Int32, a: Int64, b: Int64, instruction: Int32, sfa: Int32, sfb: Int32, accumulate, ctas: int = 1,
    *, loc=None, ip=None,
):  # fmt: skip
    """D (+)= (A * SFA) · (B * SFB)ᵀ over 64 codes of K. One thread issues it; a commit tells when it is done.

    With two CTAs, addresses are the same in both: each has 128 rows of A, SFA and D, half the rows of B, all of SFB.
    """
    nvvm.tcgen05_mma_block_scale(
        nvvm.Tcgen05MMAKind.MXF4NVF4,
        _group(ctas),
        _tmem(d, loc, ip),
        Int64(a).ir_value(loc=loc, ip=ip),
        Int64(b).ir_value(loc=loc, ip=ip),
        Int32(instruction).ir_value(loc=loc, ip=ip),
        Boolean(accumulate).ir_value(loc=loc, ip=ip),
        _tmem(sfa, loc, ip),
        _tmem(sfb, loc, ip),
        block_scale=nvvm.Tcgen05MMABlockScale.BLOCK16,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def dense_mma(d: Int32, a: Int32, b: Int64, instruction: Int32, accumulate, *, loc=None, ip=None):
    """D (+)= A · Bᵀ over 16 of K: bf16 A in 8 columns of TMEM, one row per lane; B in shared memory. Else as `mma`."""
    nvvm.tcgen05_mma(
        nvvm.Tcgen05MMAKind.F16,
        _group(1),
        _tmem(d, loc, ip),
        _tmem(a, loc, ip),
        Int64(b).ir_value(loc=loc, ip=ip),
        Int32(instruction).ir_value(loc=loc, ip=ip),
        Boolean(accumulate).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def copy_scales(column: Int32, source: Int64, ctas: int = 1, *, loc=None, ip=None):
    """Copy one 128x4 tile of scales from shared memory to 4 TMEM columns (to all four lane quarters).

    Row r of the tile goes to column r / 32. Ordered with the MMAs of the same thread. With two CTAs, done in both.
    """
    nvvm.tcgen05_cp(
        nvvm.Tcgen05CpShape.SHAPE_32x128b,
        _tmem(column, loc, ip),
        Int64(source).ir_value(loc=loc, ip=ip),
        group=_group(ctas),
        multicast=nvvm.Tcgen05CpMulticast.WARPX4,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_columns(address: Int32, count: int, halves: bool, *, loc=None, ip=None) -> list[list[Float32]]:
    """[`count` columns of this thread's TMEM lane]. With halves: [`count` columns of lane i % 16, of lane 16 + i % 16],
    where i is the thread's lane in its warp; threads with i >= 16 get the next `count` columns. The loads and their
    wait are one block of instructions, because a compiler must not touch the registers in between."""
    addresses = [address, Int32(address) + (16 << 16)] if halves else [address]
    shape, second = ("16x32bx2", f", {count}") if halves else ("32x32b", "")
    total = count * len(addresses)
    lines = []
    for i in range(len(addresses)):
        registers = ", ".join(f"${i * count + j}" for j in range(count))
        lines.append(f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {{{registers}}}, [${total + i}]{second};")
    result = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * total)})>"),
        [Int32(a).ir_value(loc=loc, ip=ip) for a in addresses],
        " ".join([*lines, "tcgen05.wait::ld.sync.aligned;"]),
        ",".join(["=f"] * total + ["r"] * len(addresses)),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    values = [Float32(llvm.extractvalue(Float32.mlir_type, result, [i], loc=loc, ip=ip)) for i in range(total)]
    return [values[i : i + count] for i in range(0, total, count)]


@dsl_user_op
def store_columns(address: Int32, words: list[Uint32], *, loc=None, ip=None):
    """Store words (a power of two of them) in columns of this thread's TMEM lane, from `address` on; see
    `wait_for_stores`."""
    registers = ", ".join(f"${i + 1}" for i in range(len(words)))
    llvm.inline_asm(
        None,
        [Int32(address).ir_value(loc=loc, ip=ip), *(w.ir_value(loc=loc, ip=ip) for w in words)],
        f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [$0], {{{registers}}};",
        ",".join(["r"] * (len(words) + 1)),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def wait_for_stores(*, loc=None, ip=None):
    """Wait until this thread's stores to TMEM are done."""
    nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.STORE, loc=loc, ip=ip)


@dsl_user_op
def tmem_fence(before: bool, *, loc=None, ip=None):
    """Order tensor memory accesses before (or after) an mbarrier through which warps synchronize."""
    kind = nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC if before else nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC
    nvvm.tcgen05_fence(kind, loc=loc, ip=ip)


def arrive_in_first(barrier: cute.Pointer):
    """Arrive at the barrier of the first CTA of the pair, to hand over tensor memory.

    After `tmem_fence` this needs no release (PTX ISA, canonical synchronization patterns of tcgen05), which in machine
    code would wait for all earlier stores.
    """
    cute.arch.mbarrier_arrive(barrier, 0, relaxed=True, scope=nvvm.MemScopeKind.CLUSTER)


@dsl_user_op
def _try_wait_for_pair(barrier: cute.Pointer, phase: Int32, *, loc=None, ip=None) -> Boolean:
    found = nvvm.mbarrier_wait_parity(
        barrier.to_llvm_ptr(loc=loc, ip=ip),
        Int32(phase).ir_value(loc=loc, ip=ip),
        nvvm.MBarrierWaitKind.TRY,
        scope=nvvm.MemScopeKind.CLUSTER,
        order=nvvm.MemOrderKind.RELAXED,
        loc=loc,
        ip=ip,
    )
    return Boolean(found)


@cute.jit
def wait_for_pair(barrier: cute.Pointer, phase: Int32):
    """Wait for arrivals of both CTAs of the pair; `tmem_fence` must follow, as with `arrive_in_first`. A plain wait has
    the scope of its CTA, and orders nothing of the other CTA."""
    done = Boolean(False)
    while not done:
        done = _try_wait_for_pair(barrier, phase)


# ---- weights to bf16 -----------------------------------------------------------------------------
# The bits of a code, moved to the sign and the low end of the exponent of bf16, are code * 2^-126; those of a block
# scale are sf * 2^-120, subnormal or not. Products of code and sf have 6 significant bits, so all of this is exact.

_FIELDS = 0x81C081C0  # sign and magnitude of two bf16
UNSCALE = 128.0  # dequantized weights must be multiplied by it


def _multiply_bf16(a: Uint32, constant: int) -> Uint32:
    """Two bf16 numbers times the two in `constant`."""
    return cute.arch.inline_ptx(
        "{.reg .b32 c; mov.b32 c, %d; mul.rn.bf16x2 {$w0}, {$r0}, c;}" % constant,
        write_only_types=[Uint32],
        read_only_args=[Uint32(a)],
    )


def _multiply_by_half(a: Uint32, s: Uint32, high: bool) -> Uint32:
    """Two bf16 numbers times one half of s, which the instruction reads in place."""
    pick = "h, h" if high else "l, l"
    return cute.arch.inline_ptx(
        "{.reg .b16 l, h; .reg .b32 b; mov.b32 {l, h}, {$r1}; mov.b32 b, {%s}; mul.rn.bf16x2 {$w0}, {$r0}, b;}" % pick,
        write_only_types=[Uint32],
        read_only_args=[Uint32(a), Uint32(s)],
    )


def widen_scales(four: Uint32) -> tuple[Uint32, Uint32]:
    """The bytes of four block scales -> sf * 2^119 in bf16: the first and the third, the second and the fourth."""
    pairs = (four << 4) & 0x07F007F0, (four >> 4) & 0x07F007F0
    first, second = (_multiply_bf16(_multiply_bf16(pair, 0x7B807B80), 0x7B007B00) for pair in pairs)  # 2^120, 2^119
    return first, second


def dequantize(codes: Uint32, scales: Uint32, high: bool) -> list[Uint32]:
    """Eight codes times a half of `scales` -> columns 0 and 4, 1 and 5, 2 and 6, 3 and 7 in bf16, times 2^-7."""
    later = codes >> 8
    # One multiplication shifts a nibble twice, for its magnitude and for its sign, and keeps the shifters free.
    pairs = [((word & 0x000F000F) * 0x1040, (word & 0x00F000F0) * 0x0104) for word in (codes, later)]
    return [_multiply_by_half(field & _FIELDS, scales, high) for pair in pairs for field in pair]


# ---- arithmetic ----------------------------------------------------------------------------------


@dsl_user_op
def encode_e2m1x8(x: list[Float32], *, loc=None, ip=None) -> Uint32:
    """Eight e2m1 codes, x[0] in the low nibble: nearest, ties to even, saturating at 6."""
    text = (
        "{ .reg .b8 a, b, c, d;"
        " cvt.rn.satfinite.e2m1x2.f32 a, $2, $1; cvt.rn.satfinite.e2m1x2.f32 b, $4, $3;"
        " cvt.rn.satfinite.e2m1x2.f32 c, $6, $5; cvt.rn.satfinite.e2m1x2.f32 d, $8, $7;"
        " mov.b32 $0, {a, b, c, d}; }"
    )
    return assembly(Uint32, text, "=r,f,f,f,f,f,f,f,f", *x, loc=loc, ip=ip)


@dsl_user_op
def pack_half2(low: Float32, high: Float32, dtype: type, *, loc=None, ip=None) -> Uint32:
    """Two bf16 or fp16 numbers in a word, rounded to nearest even."""
    name = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[dtype]
    return assembly(Uint32, f"cvt.rn.{name}.f32 $0, $1, $2;", "=r,f,f", high, low, loc=loc, ip=ip)


@cute.jit
def quantize_block(
    values: list[Float32], global_scale: Float32, four_over_six: cutlass.Constexpr
) -> tuple[Uint32, Uint32, Uint32]:
    """16 values -> (e4m3 byte, codes 0..7, codes 8..15), bit for bit what `format.quantize` returns.

    sf = e4m3(max / 6 / global_scale), or the one of `four_over_six`; code = e2m1(x / (sf * global_scale)); if sf is 0,
    all codes are 0.
    """
    largest = largest_magnitude(values)
    sf = encode_e4m3(divide(divide(largest, Float32(6.0)), global_scale))
    if const_expr(four_over_six):
        sf = better_scale(values, largest, sf, global_scale, lambda error: error)
    scale = mul(decode_e4m3(sf), global_scale)
    # x + 0 turns -0 into 0, so that its code is 0; a negative number keeps its sign even if it rounds to zero
    values = [add(v, Float32(0.0)) for v in values]
    low, high = Uint32(0), Uint32(0)
    if sf != 0:
        if scale > 2.0**-60 and scale < 2.0**60 and largest < 2.0**60:  # one division for all 16
            inverse = divide(Float32(1.0), scale)
            low = encode_e2m1x8([divide_near(v, scale, inverse) for v in values[:8]])
            high = encode_e2m1x8([divide_near(v, scale, inverse) for v in values[8:]])
        else:
            low = encode_e2m1x8([divide(v, scale) for v in values[:8]])
            high = encode_e2m1x8([divide(v, scale) for v in values[8:]])
    return sf, low, high
