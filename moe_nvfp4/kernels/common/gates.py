"""`Gate.__call__` for one element in fp32 registers, in two versions.

`apply_gate_exact` rounds every operation as the reference does, for results that are quantized to NVFP4, where one bit
may decide a code. `apply_gate_fast` lets the compiler contract operations, and leaves out what matters only for such
results. NaN stays NaN in both. Both use the hardware's approximations of exp and 1 / x.
"""

from __future__ import annotations

from math import inf

import cutlass
from cutlass import Float32, const_expr, cute
from cutlass.cutlass_dsl import dsl_user_op

from moe_nvfp4.kernels.common.arithmetic import add, assembly, mul
from moe_nvfp4.weights import Gate

LOG2_E = 1.4426950408889634


# ---- exact ---------------------------------------------------------------------------------------


def apply_gate_exact(gate: Gate | None, g: Float32, u: Float32 | None = None) -> Float32:
    """gate(g, u), rounded operation by operation; g itself if there is no gate or it is "raw"."""
    if gate is None or gate.kind == "raw":
        return g
    if gate.kind == "relu2":
        g = cute.arch.fmax(g, Float32(0.0), nan=True)
        return mul(g, g)
    limit = Float32(gate.limit)
    if gate.limit < inf:
        u = cute.arch.fmax(cute.arch.fmin(u, limit, nan=True), Float32(-gate.limit), nan=True)
        g = g if gate.clamp_after else cute.arch.fmin(g, limit, nan=True)
    if gate.kind == "silu":
        g = mul(g, _sigmoid_exact(g if gate.alpha == 1.0 else mul(Float32(gate.alpha), g)))
    else:  # gelu, tanh form: (1 + tanh z) / 2 = sigmoid(2z)
        cubic = mul(mul(mul(g, g), g), Float32(0.044715))
        g = mul(g, _sigmoid_exact(mul(add(g, cubic), Float32(1.5957691216057308))))
    if gate.limit < inf and gate.clamp_after:
        g = cute.arch.fmin(g, limit, nan=True)
    return mul(g, add(u, Float32(gate.up_offset)) if gate.up_offset else u)


def _sigmoid_exact(x: Float32) -> Float32:
    return _reciprocal(add(_exp2(mul(x, Float32(-LOG2_E))), Float32(1.0)))


@dsl_user_op
def _exp2(a: Float32, *, loc=None, ip=None) -> Float32:
    return assembly(Float32, "ex2.approx.ftz.f32 $0, $1;", "=f,f", Float32(a), loc=loc, ip=ip)


@dsl_user_op
def _reciprocal(a: Float32, *, loc=None, ip=None) -> Float32:
    return assembly(Float32, "rcp.approx.ftz.f32 $0, $1;", "=f,f", Float32(a), loc=loc, ip=ip)


# ---- fast ----------------------------------------------------------------------------------------


def apply_gate_fast(gate: Gate, g: Float32, u: Float32) -> Float32:
    """gate(g, u) of a gate that is not "raw"; u matters only if it is gated."""
    if const_expr(gate.kind == "relu2"):
        return cutlass.select_(g < 0.0, Float32(0.0), g) * cutlass.select_(g < 0.0, Float32(0.0), g)
    limited = gate.limit < inf
    if const_expr(limited):
        u = _at_most(u, gate.limit)
        u = 0.0 - _at_most(0.0 - u, gate.limit)
        if const_expr(not gate.clamp_after):
            g = _at_most(g, gate.limit)
    if const_expr(gate.kind == "silu"):
        g = g * _sigmoid_fast(gate.alpha * g if gate.alpha != 1.0 else g)
    else:  # gelu, tanh form, with the cubic factored out
        g = g * _sigmoid_fast(g * (1.5957691216057308 + 0.07135481627260 * g * g))
    if const_expr(limited and gate.clamp_after):
        g = _at_most(g, gate.limit)
    return g * (u + gate.up_offset) if gate.up_offset else g * u


def _sigmoid_fast(x: Float32) -> Float32:
    power = cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x * -LOG2_E]
    )
    return cute.arch.inline_ptx(
        "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[1.0 + power]
    )


def _at_most(x: Float32, limit: float) -> Float32:
    return cutlass.select_(x > limit, Float32(limit), x)
