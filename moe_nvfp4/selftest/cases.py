"""The cases of the self-test: small layers and linears on one backend, compared with the reference on the CPU.

A group is a function of a `Place`: it yields cases, whose kernels are then compiled together, or findings of its own.
Each group runs in a process of its own (see `run`). Weights are random bytes, of which all occur, block scales of 0 and
subnormal ones too; the reference (`moe_nvfp4.reference`) gets copies of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_nvfp4 import format as nvfp4
from moe_nvfp4 import reference
from moe_nvfp4.backends import named
from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.joined import join
from moe_nvfp4.kernels.backend import Backend, Device, Gpu, Problem
from moe_nvfp4.kernels.calls import Call, compile_ahead
from moe_nvfp4.kernels.sm90.pack import in_units
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.routing import Rows, group_by_expert
from moe_nvfp4.selftest.compare import LIMITS, Finding, Limit, compare, same_bits
from moe_nvfp4.stages import Adapter
from moe_nvfp4.weights import SILU, ExpertWeights, Gate, Matrices, is_quantized

Findings = Iterator[Finding]
GATES = {
    "silu": SILU,
    "swiglu_oai": Gate("silu", alpha=1.702, limit=1.0, up_offset=1.0),  # a limit that many values reach
    "gelu_tanh": Gate("gelu_tanh"),
    "relu2": Gate("relu2", gated=False),
    "clamped": Gate("silu", limit=2.0, clamp_after=True),
}
TOKENS = (1, 16, 70)  # few, in the kernels for few tokens; more than a tile
MANY = 600  # the rows of one expert, or of a linear, from which kernels go on in another way
# Bytes of block scales, [from, to): expert e has the band e. In one matrix the largest would hide what all others give.
BANDS = ((0x30, 0x40), (0, 0x10), (0x60, 0x7F), (0x40, 0x60), (0x10, 0x30))


class Place(NamedTuple):
    """Where cases run, and where the reference does; `quick` leaves out most of them."""

    backend: Backend
    device: torch.device
    quick: bool = False
    judge: torch.device = torch.device("cpu")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16,) if self.quick else (torch.bfloat16, torch.float16, torch.float32)

    def refusal(self, problem: Problem) -> str | None:
        """None if the backend takes `problem`, else why not."""
        reason = self.backend.unsupported(Device.of(self.device), problem)
        return f"{self.backend.name} {reason}" if reason else None


def block_scales(band: int, shape: Sequence[int], g: torch.Generator) -> tuple[Tensor, float]:
    """(random bytes of a band, the root of the mean square of its numbers)."""
    low, high = BANDS[band % len(BANDS)]
    numbers = torch.arange(low, high, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.randint(low, high, tuple(shape), generator=g), numbers.square().mean().sqrt().item()


def layer_of(
    E: int,
    H: int,
    I: int,
    gate: Gate = SILU,
    activations: str = "bf16",
    bias: torch.dtype | None = None,
    static: bool = False,
) -> NVFP4Experts:
    """A layer of random bytes on the CPU; y is of the size of x."""
    g = torch.Generator().manual_seed(E * H + I)
    layer = NVFP4Experts(E, H, I, gate, activations, bias, input_scale=static)
    for name, p in layer.named_parameters():
        if name.endswith("_input_scale"):
            p.copy_((torch.rand(p.shape, generator=g) + 0.5) * 2e-3)
        elif name.endswith("global_scale"):  # codes have a mean square of 9
            size = torch.tensor([block_scales(e, (), g)[1] for e in range(E)])
            p.copy_(
                (torch.rand(p.shape, generator=g) + 0.5) / (3 * size * (I if name.startswith("down") else H) ** 0.5)
            )
        elif name.endswith("_sf"):
            for e in range(E):
                p[e] = block_scales(e, p.shape[1:], g)[0]
        elif p.dtype == torch.uint8:
            p.copy_(torch.randint(0, 256, p.shape, generator=g))
        else:
            p.copy_(torch.randn(p.shape, generator=g))
    for name, K in ((layer.up_name, H), ("down_proj", I)):
        getattr(layer, name)[..., K // 2 :] = 0  # the padding of K
    return layer


def linear_of(
    N: int, K: int, activations: str, bias: torch.dtype | None = None, static: bool = False, band: int = 0
) -> NVFP4Linear:
    """A linear of random bytes on the CPU."""
    g = torch.Generator().manual_seed(N)
    linear = NVFP4Linear(K, N, bias, activations)
    sf, size = block_scales(band, (N, K // 16), g)
    linear.weight.data.copy_(torch.randint(0, 256, (N, K // 2), generator=g))
    linear.get_parameter("weight_sf").copy_(sf)
    linear.get_parameter("weight_global_scale").fill_(1 / (3 * size * K**0.5))
    if bias is not None:
        linear.get_parameter("bias").copy_(torch.randn(N, generator=g))
    if static:
        linear.set_input_scales(torch.tensor(2e-3))
    return linear


def batch_of(T: int, H: int, E: int, top_k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and routing weights on the CPU; some ids are "not here"."""
    g = torch.Generator().manual_seed(T)
    x, ids = torch.randn(T, H, generator=g).to(dtype), torch.rand(T, E, generator=g).topk(top_k).indices
    ids[T // 2, -1] = -1
    return x, ids, torch.rand(T, top_k, generator=g) + 0.1


def reference_of(x: Tensor, ids: Tensor, p: Tensor, w: ExpertWeights, gate: Any = None) -> Tensor:
    """The layer by the reference's stages: fp32, with h in x's dtype."""
    groups = group_by_expert(ids, w.num_experts)
    rows = Rows(x, index=groups.token)
    if w.quantized:
        rows = reference.quantize_rows(x, groups.token, w.x_scale, groups, w.four_over_six)
    h = reference.gemm1_swiglu(rows, w, groups, x.dtype)
    if gate is not None:
        h = Rows(gate(h.values))
    if w.quantized and not h.is_nvfp4:
        h = reference.quantize_rows(h.values, None, None, groups, w.four_over_six)
    return reference.gemm2_combine(h, w, groups, p, torch.float32)


def limit_of(activations: str, dtype: torch.dtype) -> Any:
    if is_quantized(activations):
        return LIMITS["w4a4"]
    return LIMITS["fp32" if dtype == torch.float32 else "half"]


class Case(NamedTuple):
    """A layer with a batch, or a linear with x. by_row: each row of y counts as much as the others, however small."""

    name: str
    module: NVFP4Experts | NVFP4Linear
    inputs: tuple[Tensor, ...]
    by_row: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype

    @property
    def problem(self) -> Problem:
        if isinstance(self.module, NVFP4Linear):
            return self.module._problem(self.dtype)[0]
        return self.module._problem(self.dtype, self.module._hooks().fused)[0]

    def call(self, at: Place) -> Call:
        """What the kernels depend on. Brings the weights there, into their kernels' layout."""
        self.module.to(at.device).prepare(self.dtype)
        if isinstance(self.module, NVFP4Linear):
            return Call.of(self.module.weights, self.dtype, tokens=len(self.inputs[0]))
        T, top_k = self.inputs[1].shape
        return Call.of(self.module.weights, self.dtype, top_k, self.problem.fused, T)

    @torch.no_grad()
    def check(self, at: Place) -> Finding:
        """Beside the reference."""
        y = self.module.to(at.device)(*(t.to(at.device) for t in self.inputs))
        x, *routing = (t.to(at.judge) for t in self.inputs)
        module = self.module.to(at.judge)
        if isinstance(module, NVFP4Linear):
            want = reference.linear(x.float(), module.weights)
        else:
            own_gate = module.own_gate if module.gate.kind == "raw" else None
            want = reference_of(x, routing[0], routing[1], module.weights, own_gate)
        if y.dtype != self.dtype:
            return Finding(self.name, False, f"the result is {_name(y.dtype)}, not {_name(self.dtype)}, as x is")
        if self.by_row:
            unit = want.double().norm(dim=-1, keepdim=True).clamp(min=1e-300)
            y, want = y.to(unit) / unit, want / unit
        return compare(self.name, y, want, limit_of(self.module.activations, self.dtype))


def check(at: Place, cases: Iterable[Case]) -> Findings:
    """Each case beside the reference; a finding says why if the backend does not take a case."""
    mine = []
    for case in cases:
        if refusal := at.refusal(case.problem):
            yield Finding(case.name, None, refusal)
        else:
            mine.append(case)
    compile_for(at, mine)
    for case in mine:
        yield case.check(at)


def compile_for(at: Place, cases: list[Case]) -> None:
    """Compile the kernels of these cases, in several processes."""
    _compile(at, (case.call(at) for case in cases if len(case.inputs[0])))


def _compile(at: Place, calls: Iterable[Call]) -> None:
    if at.device.type == "cuda":
        compile_ahead([(at.backend, call) for call in calls], Gpu.of(at.device), progress=False)


# ---- groups --------------------------------------------------------------------------------------


def gates(at: Place) -> Iterator[Case]:
    """W4A16: every gate, with and without biases, in every dtype."""
    for name, gate in GATES.items():
        for bias in (False, True)[: 1 if at.quick else 2]:
            for dtype in at.dtypes:
                for T in TOKENS[1:]:
                    case = f"{name}{', biases' * bias}, {_name(dtype)}, T {T}"
                    layer = layer_of(8, 192, 144, gate, bias=dtype if bias else None)
                    yield Case(case, layer, batch_of(T, 192, 8, 2, dtype))
    for dtype in at.dtypes:
        yield _with_own_gate("bf16", dtype)


def _with_own_gate(activations: str, dtype: torch.dtype) -> Case:
    """The gate is the model's, so that the stages are called one by one; with biases."""
    layer = layer_of(4, 128, 96, Gate("raw"), activations, bias=dtype)
    layer.own_gate = _own_gate  # type: ignore[method-assign, assignment]
    return Case(f"the model's own gate, {activations}, {_name(dtype)}", layer, batch_of(24, 128, 4, 2, dtype))


def _own_gate(z: Tensor) -> Tensor:
    return torch.tanh(z[:, ::2]) * z[:, 1::2]


def w4a4(at: Place) -> Iterator[Case]:
    """W4A4: dynamic and static scales, four over six, half of them with biases; every gate, and every dtype."""
    for activations in ("nvfp4", "nvfp4_four_over_six"):
        for static in (False, True):
            biased = static != (activations == "nvfp4_four_over_six")
            for gate in ("silu", "relu2"):
                for T in TOKENS:
                    yield _w4a4(activations, static, gate, torch.bfloat16, biased, T)
        yield _with_own_gate(activations, torch.bfloat16)
    if not at.quick:
        yield _w4a4("nvfp4", False, "silu", torch.bfloat16, True, MANY)
        for i, gate in enumerate(("swiglu_oai", "gelu_tanh", "clamped")):
            for dtype in at.dtypes:
                yield _w4a4("nvfp4", i == 0, gate, dtype, i == 0, TOKENS[-1])


def _w4a4(activations: str, static: bool, gate: str, dtype: torch.dtype, biased: bool, T: int) -> Case:
    how = f"{activations}, {'static' if static else 'dynamic'}, {gate}{', biases' * biased}, {_name(dtype)}, T {T}"
    layer = layer_of(8, 256, 192, GATES[gate], activations, dtype if biased else None, static)
    return Case(how, layer, batch_of(T, 256, 8, 2, dtype))


def routing(at: Place) -> Iterator[Case]:
    """Ragged and empty groups, and numbers of experts that are no power of two."""
    for E, top_k, sizes in ((8, 2, (70, 0, 1, 0, 33, 2, 0, 6)), (5, 1, (0, 0, 41, 0, 1)), (1, 1, (19,)),
                            (1, 1, (MANY,)), (60, 4, (1,) * 40 + (0,) * 20), (8, 8, (9,) * 8)):  # fmt: skip
        flat = [e for e, n in enumerate(sizes) for _ in range(n)]
        flat += [E, -1] * 3 + [-1] * (-(len(flat) + 6) % top_k)
        order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(E))
        ids = torch.tensor(flat)[order].view(-1, top_k)
        x, _, p = batch_of(len(ids), 128, max(E, top_k), top_k)
        yield Case(f"E {E}, top_k {top_k}, rows {sizes[:8]}", layer_of(E, 128, 64), (x, ids, p))
    nobody = batch_of(3, 128, 8, 2)
    yield Case("no token has an expert", layer_of(8, 128, 64), (nobody[0], torch.full((3, 2), -1), nobody[2]))
    none = torch.empty(0, 128).bfloat16(), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    yield Case("no tokens", layer_of(8, 128, 64), none)
    many = batch_of(40, 128, 8, 2)
    yield Case("int32 ids", layer_of(8, 128, 64), (many[0], many[1].int(), many[2]))
    for dtype in (torch.bfloat16, torch.float16):
        weights = (many[2] - 0.6).to(dtype)
        yield Case(f"{_name(dtype)} weights of either sign", layer_of(8, 128, 64), (*many[:2], weights))


def sizes(at: Place) -> Iterator[Case]:
    """Sizes that fit no tile, and those of gpt-oss."""
    for H, I in ((16, 16), (48, 80), (208, 176), (100, 52), (2880, 2880)):
        for activations in ("bf16", "nvfp4"):
            layer = layer_of(3, H, I, activations=activations)
            yield Case(f"H {H}, I {I}, {activations}", layer, batch_of(9, H, 3, 2))


def linears(at: Place) -> Iterator[Case]:
    """Single linears: with and without a bias, by dynamic and static scales."""
    for band, (N, K) in enumerate(((256, 192), (72, 48), (1000, 2048))):
        biased, static = band > 0, band == 1
        for activations in ("bf16", "nvfp4", "nvfp4_four_over_six"):
            for dtype in at.dtypes:
                linear = linear_of(N, K, activations, dtype if biased else None, static, band)
                for T in (*TOKENS, MANY):
                    how = f"{', a bias' * biased}, {activations}{', static' * (static and is_quantized(activations))}"
                    yield Case(f"[{N}, {K}]{how}, {_name(dtype)}, T {T}", linear, batch_of(T, K, 2, 1, dtype)[:1])


class _SameRows(nn.Module):
    """Linears that read the same rows."""

    def __init__(self, linears: dict[str, NVFP4Linear]) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [linear(x) for linear in self.children()]


def joined(at: Place) -> Findings:
    """Linears that read the same rows, computed as one: q, k and v; gate and up. Each has its own global scale."""
    for names, sizes in ((("q_proj", "k_proj", "v_proj"), (256, 128, 80)), (("gate_proj", "up_proj"), (384, 384))):
        for activations in ("bf16", "nvfp4"):
            bias = torch.bfloat16 if len(names) == 3 else None
            parts = {
                name: linear_of(N, 192, activations, bias, band=band)
                for band, (name, N) in enumerate(zip(names, sizes, strict=True))
            }
            parent, case = _SameRows(parts).to(at.device), f"{', '.join(names)}, {activations}"
            if refusal := at.refusal(parts[names[0]]._problem(torch.bfloat16)[0]):
                yield Finding(case, None, refusal)
                continue
            if not list(join(parent, torch.bfloat16)):
                yield Finding(case, None, f"{at.backend.name} computes each by itself")
                continue
            for T in (*TOKENS, MANY):
                x = batch_of(T, 192, 2, 1)[0]
                with torch.no_grad():
                    found = parent.to(at.device)(x.to(at.device))
                parent.to(at.judge)
                for (name, linear), y in zip(parts.items(), found, strict=True):
                    want = reference.linear(x.float(), linear.weights)
                    yield compare(f"{case}, {name}, T {T}", y, want, limit_of(activations, x.dtype))


EXTREMES = {torch.float16: (2.0**-20, 2.0**13)}  # sizes of x; of other dtypes:
EXTREME = 1e-30, 1e30


def extremes(at: Place) -> Iterator[Case]:
    """x so small or large that weights with the opposite global scales bring it back; rows of different sizes, one of
    them zeros; gates far from 0; of W4A4, blocks far below the largest one, and x beyond what static scales reach."""
    for activations in ("bf16", "nvfp4", "nvfp4_four_over_six"):
        for dtype in at.dtypes:
            for T in TOKENS[1:]:
                here, batch = f"{activations}, {_name(dtype)}, T {T}", batch_of(T, 96, 4, 2, dtype)
                x, *routing = batch
                for size in EXTREMES.get(dtype, EXTREME):
                    linear = linear_of(80, 96, activations)
                    to = 1.2e4 if size > 1 else 1.0  # to numbers that need all the range of fp16
                    linear.get_parameter("weight_global_scale").mul_(to / size)
                    yield Case(f"a linear, x times {size:.0e}, {here}", linear, (x * size,), True)
                    layer = _with_up_scales(1 / size, 4, 96, 64, activations=activations)
                    yield Case(f"x times {size:.0e}, {here}", layer, (x * size, *routing), True)
                rows = x * torch.arange(T)[:, None].remainder(11).sub(5).exp2().to(dtype)
                rows[T // 3] = 0
                yield Case(f"rows of many sizes, {here}", layer_of(4, 96, 64, activations=activations),
                           (rows, *routing), True)  # fmt: skip
                if not is_quantized(activations):
                    for name, gate in GATES.items():
                        yield Case(f"{name} far from 0, {here}", _with_up_scales(30, 4, 96, 64, gate), batch, True)
                    continue
                layer = _with_up_scales(8, 4, 96, 64, activations=activations)
                layer.get_parameter("gate_up_proj_sf")[..., 0] = 0  # so that only the small blocks count
                small = torch.cat([x[:, :16] * 2**12, x[:, 16:] / 8], dim=1)
                yield Case(f"small blocks beside a large one, {here}", layer, (small, *routing), True)
                layer = layer_of(4, 96, 64, activations=activations, static=True)
                yield Case(f"x beyond static scales, {here}", layer, (4 * x, *routing), True)


def _with_up_scales(factor: float, *sizes: Any, **options: Any) -> NVFP4Experts:
    """`layer_of` with other global scales of the up and gate projection."""
    layer = layer_of(*sizes, **options)
    for name in layer.projections[:-1]:
        layer.get_parameter(f"{name}_global_scale").mul_(factor)
    return layer


def inputs(at: Place) -> Findings:
    """Tensors whose elements do not follow one another in memory give the same bits; NaN and Inf in x stay with their
    token."""
    for activations, static in (("bf16", False), ("nvfp4", False), ("nvfp4", True)):
        for dtype in at.dtypes:
            layer = layer_of(4, 96, 64, activations=activations, static=static)
            linear = linear_of(80, 96, activations, static=static)
            for module, batch in ((layer, batch_of(24, 96, 4, 2, dtype)), (linear, batch_of(24, 96, 1, 1, dtype)[:1])):
                name = f"{type(module).__name__}, {activations}{', static' * static}, {_name(dtype)}"
                case = Case(name, module, batch)
                if refusal := at.refusal(case.problem):
                    yield Finding(name, None, refusal)
                    continue
                compile_for(at, [case])
                given = [t.to(at.device) for t in batch]
                with torch.no_grad():
                    y = module.to(at.device)(*given)
                    for how, view in VIEWS.items():
                        for i in range(len(given)):
                            some = [*given[:i], view(given[i]), *given[i + 1 :]]
                            yield same_bits(f"{name}, {how} of input {i}", y, module(*some))
                    for bad in (torch.nan, torch.inf, -torch.inf):
                        x = given[0].clone()
                        x[7, 40] = bad
                        found = module(x, *given[1:])
                        others = torch.arange(len(x), device=x.device) != 7
                        yield same_bits(f"{name}, tokens beside {bad}", y[others], found[others])
                        if bad != bad or not static:  # static scales make a number of Inf
                            lost = bool((found[7].isnan() if bad != bad else ~found[7].isfinite()).all())
                            yield Finding(f"{name}, a token with {bad}", lost, "" if lost else "it has numbers")


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda t: t.T.contiguous().T,
    "every second column": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "every second row": lambda t: torch.stack([t, t.flip(0)], dim=1).flatten(0, 1)[::2],
    "the left half": lambda t: torch.cat([t, t.flip(0)], dim=1)[:, : t.shape[1]],
}


def gradients(at: Place) -> Findings:
    """Gradients of x and of the routing weights, beside those of dense matrices in float64; y has the same bits."""
    for name in ("silu", "relu2"):
        layer, (x, ids, p) = layer_of(5, 128, 96, GATES[name]), batch_of(33, 128, 5, 2)
        here = layer.to(at.device)
        problem, _ = here._problem(x.dtype, True)
        if refusal := at.refusal(problem):
            yield Finding(name, None, refusal)
            continue
        a, b = (t.to(at.device, copy=True).requires_grad_() for t in (x, p))
        with torch.no_grad():
            plain = here(a, ids.to(at.device), b)
        y = here(a, ids.to(at.device), b)
        y.float().square().sum().backward()
        yield same_bits(f"{name}: y with gradients", y.detach(), plain)
        c, d = (t.double().requires_grad_() for t in (x, p))
        _dense(c, ids, d, layer.to("cpu").weights).square().sum().backward()
        for what, got, want in (("x", a.grad, c.grad), ("the routing weights", b.grad, d.grad)):
            assert got is not None and want is not None
            yield compare(f"{name}: gradient of {what}", got, want, LIMITS["gradient"])


def adapters(at: Place) -> Findings:
    """LoRA adapters of experts, beside dense matrices in float64: one for all tokens, or each has one of several."""
    g = torch.Generator().manual_seed(0)
    for several, rank, gate in ((0, 8, "gelu_tanh"), (3, 24, "swiglu_oai")):
        for dtype in at.dtypes:
            limit = LIMITS["fp32" if dtype == torch.float32 else "adapters"]
            layer = layer_of(5, 192, 144, GATES[gate])
            case = f"{several or 'one'} of rank {rank}, {gate}, {_name(dtype)}"
            if refusal := at.refusal(layer._problem(dtype, False)[0]):
                yield Finding(case, None, refusal)
                continue
            w, S = layer.weights, (several,) if several else ()
            pairs = tuple(
                Adapter(*(torch.randn(5, *S, *s, generator=g).to(dtype) / s[1] ** 0.5 for s in ((rank, K), (N, rank))))
                for N, K in ((w.w13.N, 192), (192, 144))
            )
            there = tuple((Adapter(*(t.to(at.device) for t in pair)),) for pair in pairs)
            tokens = (*TOKENS, MANY) if dtype == torch.bfloat16 else TOKENS
            layer.to(at.device).prepare(dtype)
            _compile(at, (Call.of(layer.weights, dtype, 2, True, T, (rank, several)) for T in tokens))
            for T in tokens:
                x, ids, p = batch_of(T, 192, 5, 2, dtype)
                of_token = torch.arange(T) % (several + 1) - 1 if several else None  # -1: none
                *inputs, chosen = (t if t is None else t.to(at.device) for t in (x, ids, p, of_token))
                with torch.no_grad():
                    y = layer.to(at.device)(*inputs, there, chosen)
                want = _dense(x.double(), ids, p.double(), layer.to("cpu").weights, pairs, of_token)
                yield compare(f"{case}, T {T}", y, want, limit)


def _dense(
    x: Tensor, ids: Tensor, p: Tensor, w: ExpertWeights, pairs: tuple[Adapter, ...] = (), adapter: Tensor | None = None
) -> Tensor:
    """The layer in x's dtype, one slot after the other; with adapters of both projections, see `NVFP4Experts`."""
    values = [
        nvfp4.dequantize(m.codes, m.block_scales(), m.row_scales()).to(x.dtype)[..., : m.K] for m in (w.w13, w.w2)
    ]

    @cache
    def matrices(e: int, s: int | None) -> list[Tensor]:
        if not pairs or s == -1:
            return [m[e] for m in values]
        of = e if s is None else (e, s)
        return [m[e] + b[of].to(m) @ a[of].to(m) for m, (a, b) in zip(values, pairs, strict=True)]

    rows = []
    for t in range(len(x)):
        y = x.new_zeros(w.hidden_size)
        for j, e in enumerate(ids[t].tolist()):
            if 0 <= e < w.num_experts:
                w13, w2 = matrices(e, None if adapter is None else int(adapter[t]))
                y = y + p[t, j] * (w2 @ w.gate((w13 @ x[t])[None])[0])
        rows.append(y)
    return torch.stack(rows)


def own_function(title: str) -> Callable[[Callable[[Place, Callable], Findings]], Callable[[Place], Findings]]:
    """The decorator of a group for the backend's function of its name, which gets this function if there is one."""

    def decorate(show: Callable[[Place, Callable], Findings]) -> Callable[[Place], Findings]:
        def group(at: Place) -> Findings:
            function = getattr(at.backend, show.__name__, None)
            if function is None:
                yield Finding(title, None, f"{at.backend.name} has none: the portable kernels run there")
            else:
                yield from show(at, function)

        return group

    return decorate


@own_function("top-k")
def top_k(at: Place, choose: Callable) -> Findings:
    """What routers choose, beside a stable sort: with equal scores, infinities and NaN."""
    g = torch.Generator().manual_seed(0)
    for N, k in ((8, 2), (60, 4), (128, 8), (256, 8), (1024, 32)):
        for dtype in at.dtypes:
            scores = torch.randn(33, N, generator=g).to(dtype)
            scores[11:22] = (4 * scores[11:22]).round() + 0.0  # equal ones, and no -0
            scores[0, 1:], scores[1, ::3], scores[2] = -torch.inf, torch.inf, torch.nan
            scores[12, N // 2] = -torch.nan
            want = scores.float().sort(dim=-1, descending=True, stable=True)
            values, indices = (t.cpu() for t in choose(scores.to(at.device), k))
            right = torch.equal(indices, want.indices[:, :k])
            right &= torch.equal(values.float().nan_to_num(7), want.values[:, :k].nan_to_num(7))
            yield Finding(f"top-k, {k} of {N}, {_name(dtype)}", right, "" if right else "it chose others")


@own_function("router's linear")
def router_linear(at: Place, linear: Callable) -> Findings:
    """The scores of routers for few tokens, beside float64; and that a token's do not depend on the others."""
    g = torch.Generator().manual_seed(0)
    for N, K, biased in ((8, 4096, False), (60, 2048, False), (128, 2880, True), (256, 7168, False)):
        for dtype in at.dtypes:
            x, weight, bias = (torch.randn(shape, generator=g).to(dtype) for shape in ((8, K), (N, K), (N,)))
            arguments = [t.to(at.device) for t in (weight, bias)[: 1 + biased]] + [None] * (not biased)
            y, one = linear(x.to(at.device), *arguments).cpu(), linear(x[3:4].to(at.device), *arguments).cpu()
            want = x.double() @ weight.double().T + (bias.double() if biased else 0)
            limit = Limit(1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps, LIMITS["half"].of_one)
            case = f"router's linear, {N} x {K}, {_name(dtype)}"
            yield compare(case, y, want, limit)
            yield same_bits(f"{case}, a token alone", y[3:4], one)


@own_function("merged codes")
def merged_codes(at: Place, merge: Callable) -> Findings:
    """The codes of weights with a low-rank change, to the bit: the change is a sum that fp32 holds exactly."""
    g = torch.Generator().manual_seed(0)
    for E, N, K, r in ((1, 96, 48, 3), (3, 130, 256, 16), (2, 64, 2880, 40)):
        codes = torch.randint(256, (E, N, K // 2), generator=g).to(torch.uint8)
        sf = torch.randint(0x7E, (E, N, K // 16), generator=g).to(torch.uint8)
        sf[:, ::5] = 0
        scale = torch.rand(E, N, generator=g) * 1e-3 + 1e-4
        scale = scale if E > 1 else torch.full_like(scale, 2.0**-8)  # many values are in the middle of two codes
        a, b = (torch.randint(-3, 4, shape, generator=g) / 64 for shape in ((E, r, K - 8), (E, N, r)))
        dense = nvfp4.dequantize(codes, sf, scale)
        dense[..., : K - 8] += b @ a
        case, there = f"merged codes, {E} x {N} x {K}, rank {r}", [t.to(at.device) for t in (codes, sf, scale, a, b)]
        yield same_bits(case, merge(*there).cpu(), nvfp4.encode(dense, sf, scale))
        for gated in (False, True):
            w = Matrices(codes, sf, scale[:, 0], N, K, scale[:, 1] if gated else None)
            dense = nvfp4.dequantize(codes, sf, w.row_scales())
            dense[..., : K - 8] += b @ a
            want = in_units(w._replace(codes=nvfp4.encode(dense, sf, w.row_scales()))).codes
            units = in_units(w).codes.to(at.device)
            scales = there[2][:, 0], there[2][:, 1] if gated else None
            named("sm90").merge(Matrices(units, None, scales[0], N, K, scales[1], None, "sm90"), there[0], *there[3:])
            yield same_bits(f"{case}, in Hopper's layout{', gate and up' * gated}", units.cpu(), want)


def repeated(at: Place) -> Findings:
    """The same bits at every call: on one stream, in a chain, on two streams at once, and from a CUDA graph. The
    larger layer has tiles for all multiprocessors, several times over."""
    for E, H, I, activations in ((8, 256, 192, "bf16"), (64, 1024, 768, "nvfp4"), (64, 1024, 768, "bf16")):
        case = Case(f"E {E}, H {H}, I {I}, {activations}", layer_of(E, H, I, activations=activations),
                    batch_of(45, H, E, 2 if E == 8 else 8))  # fmt: skip
        if refusal := at.refusal(case.problem):
            yield Finding(case.name, None, refusal)
            continue
        compile_for(at, [case])
        yield case.check(at)
        for finding in _repeated(at, case.module.to(at.device), [t.to(at.device) for t in case.inputs]):
            yield finding._replace(case=f"{case.name}: {finding.case}")
        if at.quick:
            return


def _repeated(at: Place, here: NVFP4Experts | NVFP4Linear, batch: list[Tensor]) -> Findings:
    x, ids, p = batch
    with torch.no_grad():
        yield same_bits("ten calls", *(here(x, ids, p) for _ in range(10)))

        def chain() -> Tensor:
            y = x
            for _ in range(6):
                y = here(y, ids, p)
                y = y / y.float().norm(dim=-1, keepdim=True).clamp(min=1e-6).to(y.dtype)
            return y

        first = chain()
        yield same_bits("a chain of six calls", first, *(chain() for _ in range(4)))
        if at.device.type != "cuda":
            return
        streams = [torch.cuda.Stream(at.device) for _ in range(2)]
        results = []
        for stream in streams * 3:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(chain())
        torch.cuda.synchronize()
        yield same_bits("chains on two streams at once", first, *results)
        with torch.cuda.stream(streams[0]):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=streams[0]):
                captured = chain()
            replays = []
            for _ in range(3):
                captured.zero_()
                graph.replay()
                replays.append(captured.clone())
            x.mul_(0.5)
            graph.replay()
            torch.cuda.synchronize()
            yield same_bits("replays of a CUDA graph", first, *replays)
            yield same_bits("a CUDA graph with another x", chain(), captured)


GROUPS: dict[str, Callable[[Place], Iterator[Case]] | Callable[[Place], Findings]] = {
    "gates": gates, "w4a4": w4a4, "routing": routing, "sizes": sizes, "linears": linears, "joined": joined,
    "extremes": extremes, "inputs": inputs, "adapters": adapters, "gradients": gradients, "top_k": top_k,
    "router_linear": router_linear, "merged_codes": merged_codes, "repeated": repeated,
}  # fmt: skip
QUICK = ("gates", "w4a4", "routing", "repeated")


def findings(at: Place, name: str) -> Findings:
    """What a group shows."""
    group: Any = GROUPS[name]
    yield from (
        group(at)
        if group in (joined, inputs, adapters, gradients, top_k, router_linear, merged_codes, repeated)
        else check(at, group(at))
    )


# ---- the first layer on a device -------------------------------------------------------------------

SECONDS = 60.0  # that the cases of `first` may take once their kernels are compiled
FIRST_TOKENS = (1, 16, 300)
EXPERTS = 4


def first(at: Place, problem: Problem) -> Iterator[Finding | dict[str, Any]]:
    """For `kernels.proof`: layers of the sizes of `problem`, with few experts, or what routers choose. When kernels are
    compiled it yields {"patience": seconds}, for as long as the rest may take; {"unchecked": why} if there is too
    little memory."""
    try:
        if at.device.type == "cuda":
            at = at._replace(judge=at.device)
        if problem.kind == "router":
            yield {"patience": SECONDS}
            yield from router_linear(at)
            yield from top_k(at)
            yield from merged_codes(at)
            return
        cases = list(_first(at, problem))
        try:
            compile_for(at, cases)
        except RuntimeError as error:  # of a compiler
            yield Finding("compilation", False, str(error))
            return
        yield {"patience": SECONDS}
        for case in cases:
            yield case.check(at)
        module, inputs = cases[-1].module.to(at.device), [t.to(at.device) for t in cases[-1].inputs]
        with torch.no_grad():
            yield same_bits("five calls", *(module(*inputs) for _ in range(5)))
    except torch.OutOfMemoryError:
        yield {"unchecked": "there was too little free memory"}


def _first(at: Place, problem: Problem) -> Iterator[Case]:
    _, E, H, I, gate, activations, dtype, fused = problem
    if problem.kind == "linear":
        linear = linear_of(H, I, activations)
        for T in FIRST_TOKENS:
            yield Case(f"[{H}, {I}], {activations}, {_name(dtype)}, T {T}", linear, batch_of(T, I, 2, 1, dtype)[:1])
        return
    E = min(E, EXPERTS)
    of_kind = next((g for g in GATES.values() if g.kind == gate), Gate(gate, gated=gate != "relu2"))
    for bias in (False, True):
        layer = layer_of(E, H, I, of_kind, activations, dtype if bias else None)
        if gate == "raw":
            layer.own_gate = _own_gate  # type: ignore[method-assign, assignment]
        elif not fused:
            layer.add_pre_quant_scales(dtype)
        for T in FIRST_TOKENS:
            name = f"E {E}, H {H}, I {I}, {gate}{', biases' * bias}, {activations}, {_name(dtype)}, T {T}"
            yield Case(name, layer, batch_of(T, H, E, min(2, E), dtype))


def place(backend: str, device: str, quick: bool) -> Place:
    return Place(named(backend), torch.device(device), quick)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
