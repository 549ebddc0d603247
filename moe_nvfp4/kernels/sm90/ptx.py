"""The Hopper instructions of the grouped GEMM, one function each, and its register arithmetic."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cutlass_dsl import dsl_user_op

FIELDS = 0x81C081C0  # sign and magnitude of two bf16
SCALE_FIELDS = 0x0FF00FF0  # five exponent bits and three of mantissa of two bf16
SCALE_HIGH = 0x70007000  # their upper exponent bits: with these a scale s reads as s * 2^106
# For `dequantize`: an immediate costs a second LOP3, and a shift uses the pipe that LOP3s wait for; a product does not.
DEQUANTIZE_CONSTANTS = (SCALE_HIGH, 8, 4)
UNSCALE = 2.0**20  # codes read as code * 2^-126, so sums come out times 2^-20


def _mul_half(a, s, half):
    """Packed bf16 a times (s.half, s.half); the compiler reads the half in place."""
    pick = "h, h" if half else "l, l"
    return cute.arch.inline_ptx(
        "{.reg .b16 l, h; .reg .b32 b; mov.b32 {l, h}, {$r1}; mov.b32 b, {%s}; mul.rn.bf16x2 {$w0}, {$r0}, b;}" % pick,
        write_only_types=[Uint32],
        read_only_args=[Uint32(a), Uint32(s)],
    )


def dequantize(w, s, constants):
    """A word of 8 codes and the scales of its two rows -> the four registers of an m64k16 A fragment.

    constants: DEQUANTIZE_CONSTANTS, in registers.
    """
    return [_mul_half(f, s, half) for f, s, half in factors(w, s, constants)]


def factors(w, s, constants):
    """What `dequantize` multiplies: (codes as bf16x2, scales as bf16x2, which of the scales' halves) for each register.

    constants: the first three of DEQUANTIZE_CONSTANTS, in registers.
    """
    high, eight, four = constants
    s = (s & SCALE_FIELDS) | high
    fields = (
        w & FIELDS,
        (w * eight) & FIELDS,
        ((w & 0x40074007) * 66) & FIELDS,  # two shifts, by 6 and by 1, in one multiplication
        ((w >> 3) & 0x01C001C0) | ((w * four) & 0x80008000),
    )
    return [(f, s, j % 2) for j, f in enumerate(fields)]


def scales_of_step(words, ks: int):
    """The block scales of k16 step ks, of a unit's words: where `dequantize` reads them."""
    scales = words[ks // 2]
    return (scales << 8) | (scales >> 24) if ks % 2 else scales


def pack_bf16(low, high):
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def ldmatrix(address):
    """Four 8x8 matrices of 16-bit elements -> this lane's register of each."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def mma(a, b0, b1, c):
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, b0, b1, *c],
    )


def bulk_copy(to, source, size, bar):
    """Copy `size` contiguous bytes into shared memory."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[to, source, size, bar],
    )


def tma(to, descriptor, column, row, bar):
    """Copy a box of tokens into shared memory."""
    cute.arch.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}, {{$r2}, {$r3}}], [{$r4}];",
        read_only_args=[to, descriptor, column, row, bar],
    )


def into_l2(rows: cute.Tensor, byte):
    """Prefetch the line at `byte` of a contiguous tensor into L2, if the tensor reaches that far."""
    there = byte < Int64(cute.size(rows)) * (rows.element_type.width // 8)
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[rows.iterator.toint() + byte], predicate=there)


def keep_largest(at, magnitude, live):
    """Raise the fp32 number in shared memory to at least `magnitude`, which is >= 0 and rounded to bf16; NaN wins."""
    bits = pack_bf16(Float32(0.0), magnitude)
    cute.arch.inline_ptx("red.relaxed.cta.shared.max.u32 [{$r0}], {$r1};", read_only_args=[at, bits], predicate=live)


def raise_to(at, bits):
    """The same in global memory, with the bits of a rounded number."""
    cute.arch.inline_ptx("red.relaxed.gpu.global.max.u32 [{$r0}], {$r1};", read_only_args=[at, bits])


def copy16(to, to_offset: int, source, source_offset: int, size):
    """Copy 16 bytes into shared memory: `size` that are read, then zeros. Constant offsets cost nothing."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0} + %d], [{$r1} + %d], 16, {$r2};" % (to_offset, source_offset),
        read_only_args=[to, source, Int32(size)],
    )


def load_words(n: int, address):
    """n words of weights, which nothing reads a second time."""
    registers = ", ".join("{$w%d}" % i for i in range(n))
    return cute.arch.inline_ptx(
        "ld.global.nc.L1::no_allocate.v%d.b32 {%s}, [{$r0}];" % (n, registers),
        write_only_types=[Uint32] * n,
        read_only_args=[address],
    )


def arrive_after_copies(bar):
    """Make `bar` expect an arrival of this lane, which happens when all its copies so far are complete."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.shared.b64 [{$r0}];", read_only_args=[bar])


@dsl_user_op
def descriptor(atom: cute.CopyAtom, *, loc=None, ip=None) -> Int64:
    """The address of a TMA atom's descriptor, for copies with varying coordinates."""
    atom = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    pointer = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    return cute_nvgpu.get_tma_desc_addr(pointer, atom, loc=loc, ip=ip).toint(loc=loc, ip=ip)


def store_pair(dtype, to, low, high, live):
    if const_expr(dtype is Float32):
        cute.arch.inline_ptx(
            "st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[to, low, high], predicate=live
        )
    else:
        cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[to, pack_bf16(low, high)], predicate=live)
