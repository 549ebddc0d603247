"""4-bit matrices as every backend reads them: `Matrices`, `ExpertWeights` of a layer, `LinearWeights` of a linear."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from math import inf, isfinite, pi, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_nvfp4.format import is_global_scale

# Linears that read the same rows: servers fuse them into one
FUSED_LINEARS = (("q_proj", "k_proj", "v_proj", "r_proj"), ("wq_du", "wk_dv", "wv_dv", "wr_du"),
                 ("q_a_proj", "kv_a_proj_with_mqa", "kv_proj"), ("wq_a", "wkv"), ("in_proj_qkv", "in_proj_z"),
                 ("in_proj_b", "in_proj_a"), ("gate_proj", "up_proj"), ("w1", "w3"))  # fmt: skip
ACTIVATIONS = ("bf16", "nvfp4", "nvfp4_four_over_six")
GATE_KINDS = ("silu", "gelu_tanh", "relu2", "raw")


def is_quantized(activations: str) -> bool:
    """Whether rows are NVFP4 (W4A4)."""
    return activations != "bf16"


def is_four_over_six(activations: str) -> bool:
    """Whether rows are quantized with `format.quantize`'s four_over_six."""
    return activations == "nvfp4_four_over_six"


@dataclass(frozen=True)
class Gate:
    """What happens between the two GEMMs, in fp32.

    kind       formula
    silu       g * sigmoid(alpha * g) * (u + up_offset)
    gelu_tanh  gelu(g, tanh) * (u + up_offset)
    relu2      relu(u)^2, without a gate projection (Nemotron-H)
    raw        nothing: GEMM 1 returns its fp32 sums in the rows' dtype, and the caller applies the gate

    alpha is of silu; the other numbers are of both gated kinds, and an error for relu2 and raw.
    With a finite `limit`, g <= limit and |u| <= limit: before the activation, or, with
    `clamp_after`, on act(g) (Step-3.7). SwiGLU-OAI (gpt-oss, MiniMax-M3) is
    Gate("silu", alpha=1.702, limit=7.0, up_offset=1.0). `gated` is False where the experts have
    an up projection only.
    """

    kind: str = "silu"
    alpha: float = 1.0
    limit: float = inf
    up_offset: float = 0.0
    clamp_after: bool = False
    gated: bool = True
    # the fields as JSON, made once: how a gate travels through a torch op (see `ExpertWeights.spec`)
    spec: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", json.dumps({f.name: getattr(self, f.name) for f in fields(self) if f.init}))
        if self.kind not in GATE_KINDS:
            raise ValueError(
                f"unknown activation {self.kind!r}: the fused gates are {', '.join(GATE_KINDS)}; "
                "for another one use kind 'raw' and apply it to what GEMM 1 returns"
            )
        if self.kind == "relu2" and self.gated:
            raise ValueError("relu2 has no gate projection: pass gated=False")
        if self.kind in ("silu", "gelu_tanh") and not self.gated:
            raise ValueError(f"{self.kind} needs a gate projection: pass gated=True or kind 'raw'")
        if not self.limit > 0:
            raise ValueError(f"limit must be positive, got {self.limit}")
        for name in ("alpha", "up_offset"):
            if not isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")
        numbers = ("alpha", "limit", "up_offset", "clamp_after")
        used = {"silu": numbers, "gelu_tanh": numbers[1:]}.get(self.kind, ())
        for f in fields(self):
            if f.name in numbers and f.name not in used and (value := getattr(self, f.name)) != f.default:
                raise ValueError(
                    f"{f.name}={value} has no effect on {self.kind}: leave it out, or use kind 'raw' and an own gate"
                )

    def __hash__(self) -> int:  # of one string, which keeps its hash: gates are part of the keys of kernels
        return hash(self.spec)

    def __call__(self, w13_out: Tensor) -> Tensor:
        """fp32 [R, 2I] ([gate; up] halves; [R, I] when not gated) -> fp32 [R, I] (raw: as it is)."""
        if self.kind == "raw":
            return w13_out
        if self.kind == "relu2":
            return F.relu(w13_out).square()
        g, u = w13_out.chunk(2, dim=-1)
        if self.limit < inf:
            u = u.clamp(-self.limit, self.limit)
            g = g if self.clamp_after else g.clamp(max=self.limit)
        g = g * torch.sigmoid(self.alpha * g) if self.kind == "silu" else F.gelu(g, approximate="tanh")
        if self.clamp_after:
            g = g.clamp(max=self.limit)
        return g * (u + self.up_offset) if self.up_offset else g * u

    def gradient(self, w13_out: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        """The gate's input [R, 2I] (or [R, I]) and dh [R, I] -> (h, the gradient of the input), in the input's dtype.

        The derivative of `__call__`, in fp32; where a limit clamps, it is zero.
        """
        z, d, dtype = w13_out.float(), dh.float(), w13_out.dtype
        if self.kind == "relu2":
            positive = z.clamp(min=0)
            return (positive * positive).to(dtype), (2 * positive * d).to(dtype)
        g, u = z.chunk(2, dim=-1)
        u_alive = u.abs() <= self.limit
        g_alive = torch.ones_like(u_alive)
        if self.limit < inf:
            u = u.clamp(-self.limit, self.limit)
            if not self.clamp_after:
                g, g_alive = g.clamp(max=self.limit), g <= self.limit
        if self.kind == "silu":
            s = torch.sigmoid(self.alpha * g)
            a, da = g * s, s * (1 + self.alpha * g * (1 - s))
        else:  # 0.5 g (1 + tanh(c (g + 0.044715 g^3)))
            c = sqrt(2 / pi)
            t = torch.tanh(c * (g + 0.044715 * g * g * g))
            a, da = 0.5 * g * (1 + t), 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * c * (1 + 0.134145 * g * g)
        if self.clamp_after and self.limit < inf:
            a, g_alive = a.clamp(max=self.limit), a <= self.limit
        u = u + self.up_offset
        return (a * u).to(dtype), torch.cat([d * u * da * g_alive, d * a * u_alive], dim=-1).to(dtype)


SILU = Gate()


class Matrices(NamedTuple):
    """A 4-bit matrix [N, K] for each of E experts; `value = code * sf * global_scale`.

    codes         uint8 [E, N, K/2]   low nibble = even k
    sf            uint8 [E, N, K/16]  e4m3 bytes, row-major
    global_scale  fp32 [E]
    N, K
    gate_scale    fp32 [E] or None    of the gate rows, where the rows are [gate; up]; `global_scale` is that of up
    bias          [E, N] or None
    layout        None, or the name of a backend: codes are then what its `pack` made of codes and sf, uint8 with four
                  dimensions, and sf is None

    The tensors' K is rounded up to a multiple of 16. The padding holds zero codes, so it changes no result.

    The matrix of a linear has no E: codes [N, K/2], sf [N, K/16], bias [N], but global_scale [1]. Its codes in a
    backend's layout have their first two dimensions exchanged, so that FSDP splits the second.
    """

    codes: Tensor
    sf: Tensor | None
    global_scale: Tensor
    N: int
    K: int
    gate_scale: Tensor | None = None
    bias: Tensor | None = None
    layout: str | None = None

    @property
    def gated(self) -> bool:
        """Whether the rows are [gate; up]; a backend's layout interleaves the two halves."""
        return self.gate_scale is not None

    @property
    def blocks(self) -> int:
        """Of a row: ceil(K / 16)."""
        return -(-self.K // 16)

    def block_scales(self) -> Tensor:
        """sf of weights in the checkpoint's layout."""
        assert self.sf is not None, "in a backend's layout they are in codes"
        return self.sf

    def row_scales(self) -> Tensor:
        """The global scale of each row, fp32 [E, N]."""
        halves = [s for s in (self.gate_scale, self.global_scale) if s is not None]
        return torch.cat([s[:, None].expand(-1, self.N // len(halves)) for s in halves], dim=1)

    def held(self) -> Matrices:
        """The present tensors of parameters: giving a parameter other data later does not change them."""
        return self._replace(codes=self.codes.detach(), sf=None if self.sf is None else self.sf.detach())

    def of(self, experts: slice) -> Matrices:
        """Those of some experts, without biases."""
        part = lambda t: None if t is None else t[experts]
        scales = self.global_scale[experts], part(self.gate_scale)
        return self._replace(
            codes=self.codes[experts], sf=part(self.sf), global_scale=scales[0], gate_scale=scales[1], bias=None
        )

    def split(self, parts: tuple[int, ...], unit: int = 1) -> Iterator[tuple[Matrices, slice]]:
        """Each of the linears whose rows this matrix has, and its rows; parts: as in `LinearWeights`, all of them if it
        is empty. unit: how many rows a slice of codes holds."""
        if not parts:
            yield self, slice(None)
        for i, (end, N) in enumerate(zip(accumulate(parts), parts, strict=True)):
            rows, units = slice(end - N, end), slice((end - N) // unit, -(-end // unit))
            sf = None if self.sf is None else self.sf[units]
            bias = None if self.bias is None else self.bias[rows]
            scale = self.global_scale[i : i + 1]
            yield self._replace(codes=self.codes[units], sf=sf, global_scale=scale, N=N, bias=bias), rows

    def stacked(self) -> Matrices:
        """The matrix of a linear, with E = 1."""
        bias = None if self.bias is None else self.bias[None]
        if self.layout is not None:
            return self._replace(codes=self.codes.transpose(0, 1), bias=bias)
        return self._replace(codes=self.codes[None], sf=self.block_scales()[None], bias=bias)


@dataclass(eq=False)  # not frozen, which would make construction four times as slow
class ExpertWeights:
    """The weights of E experts. Do not modify one: use dataclasses.replace.

    gate         what happens between the GEMMs
    activations  "bf16" (W4A16), or W4A4: "nvfp4", or "nvfp4_four_over_six" (see `format.quantize`)
    w13          [N13, H]: rows [gate; up] as in Hugging Face checkpoints (N13 = 2I), or up only (N13 = I)
    w2           [H, I]
    x_scale      fp32 [E] or None        static global scale of the activations x, decode direction
    h_scale      fp32 [E] or None        the same for h; None: dynamic, one scale per token
    """

    gate: Gate
    activations: str
    w13: Matrices
    w2: Matrices
    x_scale: Tensor | None = None
    h_scale: Tensor | None = None

    checked_on: torch.device | None = dataclasses.field(default=None, init=False)  # `checks.check_weights` did, there

    def held(self) -> ExpertWeights:
        """Self, with the parameters' present tensors: giving a parameter other data later does not change them."""
        self.w13, self.w2 = self.w13.held(), self.w2.held()
        return self

    def biased(self, b13: Tensor | None, b2: Tensor | None) -> ExpertWeights:
        """The same weights with these biases."""
        return dataclasses.replace(self, w13=self.w13._replace(bias=b13), w2=self.w2._replace(bias=b2))

    @property
    def num_experts(self) -> int:
        return self.w13.codes.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w2.N

    @property
    def intermediate_size(self) -> int:
        return self.w2.K

    @property
    def layout(self) -> str | None:
        """None, or the name of the backend in whose layout the weights are."""
        return self.w13.layout

    @property
    def quantized(self) -> bool:
        return is_quantized(self.activations)

    @property
    def four_over_six(self) -> bool:
        return is_four_over_six(self.activations)

    @property
    def quantizes_h(self) -> bool:
        """Whether GEMM 1 returns NVFP4 rows: if their scales are static and nothing runs between it and GEMM 2."""
        return self.quantized and self.h_scale is not None and self.gate.kind != "raw"

    def tensors(self) -> list[Tensor | None]:
        """All tensors in order; with `spec` all that `from_tensors` needs."""
        a, b = self.w13, self.w2
        return [
            a.codes, a.sf, a.global_scale, a.gate_scale, a.bias, b.codes, b.sf, b.global_scale, b.bias,
            self.x_scale, self.h_scale,
        ]  # fmt: skip

    def spec(self, backend: str) -> str:
        """What a torch op must know besides the tensors, as JSON (see `Spec`), and the backend that runs it."""
        return _spec(backend, self.activations, self.w2, self.gate.spec)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any], spec: Spec) -> ExpertWeights:
        codes13, sf13, up_scale, gate_scale, b13, codes2, sf2, scale2, b2, x_scale, h_scale = tensors
        (H, I), layout = spec.sizes, spec.layout
        w13 = Matrices(codes13, sf13, up_scale, I * (2 if spec.gate.gated else 1), H, gate_scale, b13, layout)
        w2 = Matrices(codes2, sf2, scale2, H, I, None, b2, layout)
        return cls(spec.gate, spec.activations, w13, w2, x_scale, h_scale)

    def validate(self, name: str = "experts") -> ExpertWeights:
        """Check the values of all scales; returns self. Every call checks dtypes and shapes (`moe_nvfp4.checks`).

        Reads the scales back to the host: call it once, after loading. ValueError names the tensor, the rule and the
        way out.
        """
        for which in ("w13", "w2"):
            matrices: Matrices = getattr(self, which)
            check_global_scale(matrices.global_scale, f"{name}.{which}.global_scale")
            if matrices.gate_scale is not None:
                check_global_scale(matrices.gate_scale, f"{name}.{which}.gate_scale")
            if matrices.sf is not None:
                check_block_scales(matrices.sf, f"{name}.{which}.sf")
        for which in ("x_scale", "h_scale"):
            if getattr(self, which) is not None:
                check_global_scale(getattr(self, which), f"{name}.{which}")
        return self


class LinearWeights(NamedTuple):
    """The weights of one linear, or of several that read the same rows, as one matrix.

    matrix       [N, K], K a multiple of 16
    input_scale  fp32 [1] or None: the static global scale of the rows for activations="nvfp4"
    activations  as in `ExpertWeights`
    parts        N of each of several linears, in the order of the matrix's rows; global_scale is then fp32 [len(parts)]
    """

    matrix: Matrices
    input_scale: Tensor | None
    activations: str
    parts: tuple[int, ...] = ()

    @property
    def quantized(self) -> bool:
        return is_quantized(self.activations)

    @property
    def four_over_six(self) -> bool:
        return is_four_over_six(self.activations)

    def held(self) -> LinearWeights:
        """A copy with the parameters' present tensors: giving a parameter other data later does not change it."""
        return self._replace(matrix=self.matrix.held())

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in order; with `spec` all that `from_tensors` needs."""
        m = self.matrix
        return m.codes, m.sf, m.global_scale, m.bias, self.input_scale

    def spec(self, backend: str) -> str:
        """As `ExpertWeights.spec`."""
        return _spec(backend, self.activations, self.matrix, "null", self.parts)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any], spec: Spec) -> LinearWeights:
        codes, sf, global_scale, bias, input_scale = tensors
        matrix = Matrices(codes, sf, global_scale, *spec.sizes, None, bias, spec.layout)
        return cls(matrix, input_scale, spec.activations, spec.parts)

    @classmethod
    def joined(
        cls, linears: Sequence[LinearWeights], one: Callable[[Sequence[Any]], Tensor | None] | None = None
    ) -> LinearWeights | None:
        """Several linears as one. None if they have static scales of their own for the rows, or if `one` finds no
        tensor for those of one kind. Default: `in_one`, without a copy."""
        first, parts = linears[0], tuple(w.matrix.N for w in linears)
        *kinds, input_scales = zip(*(w.tensors() for w in linears), strict=True)
        whole = [None if kind[0] is None else (one or in_one)(kind) for kind in kinds]
        if any(t is None and kind[0] is not None for t, kind in zip(whole, kinds, strict=True)) or any(
            scale is not None for scale in input_scales
        ):
            return None
        codes, sf, global_scale, bias = whole
        assert codes is not None and global_scale is not None, "every linear has them"
        matrix = first.matrix._replace(codes=codes, sf=sf, global_scale=global_scale, bias=bias, N=sum(parts))
        return cls(matrix, None, first.activations, parts)


def in_one(tensors: Sequence[Any]) -> Tensor | None:
    """One tensor of all their elements, along the first dimension, if they follow one another in memory; else None."""
    first, end = tensors[0], tensors[0].data_ptr()
    for t in tensors:
        if t is None or t.data_ptr() != end or not t.is_contiguous() or t.shape[1:] != first.shape[1:]:
            return None
        if t.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += t.nbytes
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


# ---- what an op must know besides tensors --------------------------------------------------------

_VERSION = 3


class Spec(NamedTuple):
    """sizes: of experts H and I, of a linear N and K; gate: None for a linear; parts: as in `LinearWeights`."""

    backend: str
    activations: str
    sizes: tuple[int, int]
    layout: str | None
    gate: Any
    parts: tuple[int, ...] = ()


def _spec(backend: str, activations: str, m: Matrices, gate: str, parts: tuple[int, ...] = ()) -> str:
    layout = "null" if m.layout is None else f'"{m.layout}"'
    return (
        f'{{"version": {_VERSION}, "backend": "{backend}", "activations": "{activations}", "sizes": [{m.N}, {m.K}], '
        f'"layout": {layout}, "gate": {gate}, "parts": {list(parts)}}}'
    )


@lru_cache(maxsize=256)
def read_spec(spec: str) -> Spec:
    """Parse the `spec` of experts or of a linear. ValueError for a string that another version of the package wrote."""
    read = json.loads(spec)
    if read.pop("version") != _VERSION:
        raise ValueError(f"the spec of a torch op is not of version {_VERSION}, got {spec}: compile the model again")
    gate = None if read["gate"] is None else Gate(**read["gate"])
    return Spec(read["backend"], read["activations"], tuple(read["sizes"]), read["layout"], gate, tuple(read["parts"]))


def check_global_scale(scale: Tensor, name: str) -> None:
    """ValueError unless every fp32 scale is finite and positive (0, inf and NaN are named)."""
    if scale.dtype != torch.float32:
        raise ValueError(f"{name} has dtype {scale.dtype}, expected torch.float32")
    bad = ~is_global_scale(scale)
    if bad.any():
        first = int(bad.reshape(-1).nonzero()[0])
        raise ValueError(
            f"{name} of expert {first} is {scale.reshape(-1)[first].item()}: a global scale is a "
            "finite positive number (value = code * sf * global_scale); the checkpoint is damaged "
            "or was written with a reciprocal of zero: quantize it again"
            + (", or load with activations='bf16'" if name.endswith("input_scale") else "")
        )


def check_block_scales(sf: Tensor, name: str) -> None:
    """ValueError unless every e4m3 byte is a number, and not negative."""
    # 0x7f and 0xff are NaN, a set sign bit is a negative scale
    if (sf >= 0x7F).any():
        raise ValueError(
            f"{name} holds NaN or negative block scales: the file is damaged or is not NVFP4 "
            "(block scales are e4m3 numbers from 0 to 448); quantize again"
        )
