"""ExpertWeights: the 4-bit weights of one MoE layer, as every backend reads them; LinearWeights: those of a linear."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_nvfp4.format import is_global_scale

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


@dataclass(frozen=True)
class Layout:
    """How a backend keeps the weights of a layer [H, I] once `prepare` has brought them into its own order.

    w13, w2  the dimensions of the two tensors without E, in bytes
    """

    backend: str
    hidden_size: int
    intermediate_size: int
    w13: tuple[int, ...]
    w2: tuple[int, ...]
    spec: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", json.dumps({f.name: getattr(self, f.name) for f in fields(self) if f.init}))


@dataclass(eq=False)  # not frozen, which would make construction (twice per call) four times as slow
class ExpertWeights:
    """The weights of E experts; `value = code * sf * global_scale`. Do not modify one: use dataclasses.replace.

    w13         uint8 [E, N13, K13/2]   codes, low nibble = even k; rows [gate; up] as in Hugging
                                        Face checkpoints (N13 = 2I), or up only (N13 = I)
    w13_sf      uint8 [E, N13, K13/16]  e4m3 bytes, row-major
    gate_scale  fp32 [E] or None        global scale of the gate rows (None: no gate projection)
    up_scale    fp32 [E]                global scale of the up rows
    w2, w2_sf   uint8 [E, H, K2/2], [E, H, K2/16]
    w2_scale    fp32 [E]
    b13, b2     [E, N13], [E, H] or None
    x_scale     fp32 [E] or None        static global scale of the activations x, decode direction
    h_scale     fp32 [E] or None        the same for h; None: dynamic, one scale per token

    gate        what happens between the GEMMs
    activations "bf16" (W4A16), or W4A4: "nvfp4", or "nvfp4_four_over_six" (see `format.quantize`)
    layout      None, or the layout of a backend: w13 and w2 are then uint8 [E, *layout.w13] and
                [E, *layout.w2] with the block scales inside, and w13_sf and w2_sf are None

    K13 and K2 are H and I rounded up to a multiple of 16. The padding holds zero codes, so it changes no result.
    """

    gate: Gate
    activations: str
    w13: Tensor
    w13_sf: Tensor | None
    gate_scale: Tensor | None
    up_scale: Tensor
    w2: Tensor
    w2_sf: Tensor | None
    w2_scale: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    x_scale: Tensor | None = None
    h_scale: Tensor | None = None
    layout: Layout | None = None

    checked_on: torch.device | None = dataclasses.field(default=None, init=False)  # `checks.check_weights` did, there

    def held(self) -> ExpertWeights:
        """Self, with the parameters' present tensors: giving a parameter other data later does not change them."""
        self.w13, self.w2 = self.w13.detach(), self.w2.detach()
        if self.layout is None:
            w13_sf, w2_sf = self.block_scales()
            self.w13_sf, self.w2_sf = w13_sf.detach(), w2_sf.detach()
        return self

    def block_scales(self) -> tuple[Tensor, Tensor]:
        """w13_sf and w2_sf of weights in the checkpoint's layout."""
        assert self.w13_sf is not None and self.w2_sf is not None, "in a backend's layout they are in w13 and w2"
        return self.w13_sf, self.w2_sf

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w2.shape[1] if self.layout is None else self.layout.hidden_size

    @property
    def intermediate_size(self) -> int:
        if self.layout is not None:
            return self.layout.intermediate_size
        return self.w13.shape[1] // (2 if self.gate.gated else 1)

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

    def projection(self, name: str) -> Projection:
        """The projection of this name, "w13" or "w2"."""
        H, I, gated = self.hidden_size, self.intermediate_size, self.gate.gated
        if name == "w2":
            return Projection(self.w2, self.w2_sf, None, self.w2_scale, H, I)
        return Projection(self.w13, self.w13_sf, self.gate_scale, self.up_scale, I * (2 if gated else 1), H, gated)

    def tensors(self) -> list[Tensor | None]:
        """The tensor fields in order; with `spec` all that `from_tensors` needs."""
        return [getattr(self, name) for name in _TENSORS]

    def spec(self, backend: str) -> str:
        """What a torch op must know besides the tensors, as JSON: gate, activations, layout, and its backend."""
        layout = "null" if self.layout is None else self.layout.spec
        return (
            f'{{"version": {_VERSION}, "backend": "{backend}", "activations": "{self.activations}", '
            f'"layout": {layout}, "gate": {self.gate.spec}}}'
        )

    @classmethod
    def from_tensors(cls, tensors: list[Tensor | None], spec: Spec) -> ExpertWeights:
        return cls(spec.gate, spec.activations, *tensors, spec.layout)  # type: ignore[arg-type, call-arg]

    def validate(self, name: str = "experts") -> ExpertWeights:
        """Check the values of all scales; returns self. Every call checks dtypes and shapes (`moe_nvfp4.checks`).

        Reads the scales back to the host: call it once, after loading. ValueError names the tensor, the rule and the
        way out.
        """
        for field, tensor in vars(self).items():
            if tensor is not None and field.endswith("_scale"):
                check_global_scale(tensor, f"{name}.{field}")
            elif tensor is not None and field.endswith("_sf"):
                check_block_scales(tensor, f"{name}.{field}")
        return self


_TENSORS = tuple(f.name for f in fields(ExpertWeights) if f.type.startswith("Tensor"))
_VERSION = 1


class Spec(NamedTuple):
    """What `ExpertWeights.spec` says, parsed."""

    backend: str
    activations: str
    gate: Gate
    layout: Layout | None


@lru_cache(maxsize=256)
def read_spec(spec: str) -> Spec:
    """Parse `ExpertWeights.spec`. ValueError for a string that another version of the package wrote."""
    read = json.loads(spec)
    if read.pop("version") != _VERSION:
        raise ValueError(f"the spec of a torch op is not of version {_VERSION}, got {spec}: compile the model again")
    layout = read["layout"]
    if layout is not None:
        layout = Layout(**layout | {name: tuple(layout[name]) for name in ("w13", "w2")})
    return Spec(read["backend"], read["activations"], Gate(**read["gate"]), layout)


class Projection(NamedTuple):
    """One projection of E experts, [N, K] each: what a backward pass multiplies by.

    codes, sf    as in `ExpertWeights`, in the same layout
    first_scale  fp32 [E] or None: the global scale of the first half of the rows (gate), if it has its own
    scale        fp32 [E]: the global scale of the other rows
    rows, width  N and K, without padding
    interleaved  whether a backend's layout interleaves the two halves of the rows
    """

    codes: Tensor
    sf: Tensor | None
    first_scale: Tensor | None
    scale: Tensor
    rows: int
    width: int
    interleaved: bool = False


class LinearWeights(NamedTuple):
    """The weights of one linear; `value = code * sf * global_scale`.

    codes         uint8 [N, K/2]   K a multiple of 16
    sf            uint8 [N, K/16]  e4m3 bytes
    global_scale  fp32 [1]
    bias          [N] or None
    input_scale   fp32 [1] or None: the static global scale of the rows for activations="nvfp4"
    activations   as in `ExpertWeights`
    sizes         None, or (N, K) of weights in a backend's layout: codes are then what `Backend.prepare` returned for
                  them as a single expert, block scales included, with its first two dimensions exchanged, so that FSDP
                  splits the second; sf is None
    """

    codes: Tensor
    sf: Tensor | None
    global_scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None
    activations: str
    sizes: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.sizes or (self.codes.shape[0], 2 * self.codes.shape[1])

    @property
    def quantized(self) -> bool:
        return is_quantized(self.activations)

    @property
    def four_over_six(self) -> bool:
        return is_four_over_six(self.activations)

    def held(self) -> LinearWeights:
        """A copy with the parameters' present tensors: giving a parameter other data later does not change it."""
        return self._replace(codes=self.codes.detach(), sf=None if self.sf is None else self.sf.detach())

    def block_scales(self) -> Tensor:
        """sf of weights in the checkpoint's layout."""
        assert self.sf is not None, "in a backend's layout they are in codes"
        return self.sf

    def projection(self) -> Projection:
        """The weights as the projection of a single expert."""
        N, K = self.shape
        if self.sizes is not None:
            return Projection(self.codes.transpose(0, 1), None, None, self.global_scale, N, K)
        return Projection(self.codes[None], self.block_scales()[None], None, self.global_scale, N, K)


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
