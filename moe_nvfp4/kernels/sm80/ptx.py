"""The sm_80 instructions of the GEMM, one function each, and its register arithmetic."""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32, cute

from moe_nvfp4.kernels.sm90.ptx import SCALE_HIGH, factors

_ptx = cute.arch.inline_ptx
# For `dequantize`, in registers: immediates cost instructions.
DEQUANTIZE_CONSTANTS = (SCALE_HIGH, 8, 4)


def _mul_half(a, s, half):
    """Packed bf16 a times (s.half, s.half), which the compiler reads in place. sm_80 has no product without a sum."""
    pick = "h, h" if half else "l, l"
    return _ptx(
        "{.reg .b16 l, h; .reg .b32 b, z; mov.b32 {l, h}, {$r1}; mov.b32 b, {%s}; mov.b32 z, 0; "
        "fma.rn.bf16x2 {$w0}, {$r0}, b, z;}" % pick,
        write_only_types=[Uint32],
        read_only_args=[Uint32(a), Uint32(s)],
    )


def dequantize(w, s, constants):
    """A word of 8 codes and the scales of its two rows -> the four registers of an m16k16 A fragment: code * sf, exact
    but for the factor that `sm90.ptx.UNSCALE` takes back."""
    return [_mul_half(f, s, half) for f, s, half in factors(w, s, constants)]


def here(value):
    """The value, such that what follows from it is computed here, and not before the main loop, where it would occupy
    registers."""
    return _ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def ldmatrix(address, offset: int):
    """Four 8x8 matrices of 16-bit elements -> this lane's register of each."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0} + %d];" % offset
    return _ptx(text, write_only_types=[Uint32] * 4, read_only_args=[address])


def load_shared(address, offset: int, words: int):
    to = ", ".join("{$w%d}" % i for i in range(words))
    text = "ld.shared.v%d.u32 {%s}, [{$r0} + %d];" % (words, to, offset)
    return _ptx(text, write_only_types=[Uint32] * words, read_only_args=[address])


def copy16(to, to_offset: int, source, source_offset: int, live=None, size=None):
    """Copy 16 bytes into shared memory, if `live`; with `size`, only so many are read, then zeros follow."""
    end = "" if size is None else ", {$r2}"
    text = "cp.async.cg.shared.global [{$r0} + %d], [{$r1} + %d], 16%s;" % (to_offset, source_offset, end)
    more = {} if live is None else {"predicate": live}
    _ptx(text, read_only_args=[to, source, *([] if size is None else [Int32(size)])], **more)


def store4(space: str, at, offset: int, acc, i: int):
    """Store sums i .. i + 3."""
    text = "st.%s.v4.f32 [{$r0} + %d], {{$r1}, {$r2}, {$r3}, {$r4}};" % (space, offset)
    _ptx(text, read_only_args=[at, *[acc[i + j] for j in range(4)]])


def add4(space: str, at, offset: int, acc, i: int):
    """Add four stored numbers to sums i .. i + 3."""
    text = "ld.%s.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0} + %d];" % (space, offset)
    for j, value in enumerate(_ptx(text, write_only_types=[Float32] * 4, read_only_args=[at])):
        acc[i + j] = acc[i + j] + value


def publish(flag):
    """Set a flag in global memory: what the CTA stored before the barrier before is there for who `await_flag`s."""
    _ptx("st.release.gpu.global.u32 [{$r0}], {$r1};", read_only_args=[flag, Int32(1)])


def flag_value(flag):
    return _ptx("ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[flag])


def same_lanes(value):
    """The mask of the lanes that have this value."""
    text = "match.any.sync.b32 {$w0}, {$r0}, 0xffffffff;"
    return _ptx(text, write_only_types=[Uint32], read_only_args=[value])
