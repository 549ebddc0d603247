"""The layer and its stages against per-token loops in float64."""

import copy
import math
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils import parametrize, prune

from moe_nvfp4 import ExpertWeights, Gate, NVFP4Experts, moe_forward, ops, reference
from moe_nvfp4 import format as nvfp4
from moe_nvfp4.backends import Selected, named
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.ops import run_linear
from moe_nvfp4.prepared import weights_are_held
from moe_nvfp4.quantize.recipes import quantize_expert
from moe_nvfp4.routing import group_by_expert
from moe_nvfp4.weights import ACTIVATIONS
from tests.common import THRESHOLDS, Kernels, relative_error, stand_for_hopper

GATES = {
    "silu": Gate(),
    "gelu_tanh": Gate("gelu_tanh"),
    "swiglu_oai": Gate("silu", alpha=1.702, limit=1.5, up_offset=1.0),
    "clamped": Gate("silu", limit=0.8),
    "clamp_after": Gate("silu", limit=0.5, clamp_after=True),
    "relu2": Gate("relu2", gated=False),
}


def naive_gate(gate: Gate, v: list[float], I: int) -> list[float]:
    """The formulas of `Gate`, written again with the math module."""
    if gate.kind == "relu2":
        return [max(x, 0.0) ** 2 for x in v]
    out = []
    for g, u in zip(v[:I], v[I:], strict=True):
        u = max(-gate.limit, min(gate.limit, u))
        if not gate.clamp_after:
            g = min(g, gate.limit)
        if gate.kind == "silu":
            a = g / (1 + math.exp(-gate.alpha * g))
        else:
            a = 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
        if gate.clamp_after:
            a = min(a, gate.limit)
        out.append(a * (u + gate.up_offset))
    return out


def dense(codes, sf, scale):
    """[N, K/2] codes -> float64 [N, K], by looking up each code of the format."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cpu").double()
    low, high = values[(codes & 15).long()], values[(codes >> 4).long()]
    sf = sf.view(torch.float8_e4m3fn).double().repeat_interleave(16, dim=-1)
    return torch.stack([low, high], -1).flatten(-2) * sf * scale.double()


def fake_quantize(row, scale=None, activations="nvfp4"):
    """One float64 row -> the values of its NVFP4 form (the format itself is tested elsewhere)."""
    row = nvfp4.pad_k(row.float())
    codes, sf, scale = nvfp4.quantize(row, scale, four_over_six=activations == "nvfp4_four_over_six")
    return dense(codes, sf.view(torch.uint8), scale)


def naive_situ(v: list[float], I: int, beta: float, linear: float) -> list[float]:
    """A gate that the kernels do not have: SiTU, whose gate and up are clipped by tanh (Kimi's)."""
    return [
        beta * math.tanh(g / beta) / (1 + math.exp(-g)) * linear * math.tanh(u / linear)
        for g, u in zip(v[:I], v[I:], strict=True)
    ]


def naive_moe(x, ids, weights, w: ExpertWeights, pre_quant_scales=None, own_gate=naive_gate):
    """Token by token, slot by slot, in float64; h is rounded where the specification rounds it.

    own_gate: in place of the gate that `w` names: (gate, v, I) -> h
    """
    x, ids, weights = x.cpu(), ids.cpu(), weights.cpu()
    there = lambda v: v.cpu() if isinstance(v, torch.Tensor) else v
    scales = dict(x_scale=there(w.x_scale), h_scale=there(w.h_scale))
    w = replace(w, w13=type(w.w13)(*map(there, w.w13)), w2=type(w.w2)(*map(there, w.w2)), **scales)
    y = torch.zeros(x.shape[0], w.hidden_size, dtype=torch.float64, device="cpu")
    I, quantized = w.intermediate_size, w.activations != "bf16"
    for t in range(x.shape[0]):
        for e, p in zip(ids[t].tolist(), weights[t].double().tolist(), strict=True):
            if not 0 <= e < w.num_experts:
                continue
            x_t = x[t] if pre_quant_scales is None else x[t] * pre_quant_scales[0][e]
            row = nvfp4.pad_k(x_t.double())
            if quantized:
                row = fake_quantize(x_t, None if w.x_scale is None else w.x_scale[e], w.activations)
            if w.gate.gated:
                scale = torch.cat([w.w13.gate_scale[e].expand(I), w.w13.global_scale[e].expand(I)])[:, None]
            else:
                scale = w.w13.global_scale[e]
            v = dense(w.w13.codes[e], w.w13.sf[e], scale) @ row
            if w.w13.bias is not None:
                v = v + w.w13.bias[e].double()
            h = torch.tensor(own_gate(w.gate, v.tolist(), I), dtype=torch.float64, device="cpu")
            if pre_quant_scales is not None:
                h = h.to(x.dtype).double() * pre_quant_scales[1][e].double()
            if not quantized:
                h = nvfp4.pad_k(h.to(x.dtype).double())
            elif w.h_scale is None:
                h = fake_quantize(h.to(x.dtype), None, w.activations)
            else:
                h = fake_quantize(h, w.h_scale[e], w.activations)
            out = dense(w.w2.codes[e], w.w2.sf[e], w.w2.global_scale[e]) @ h
            if w.w2.bias is not None:
                out = out + w.w2.bias[e].double()
            y[t] += p * out
    return y


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def device(request):
    """Tensors made in a test are on this device; the loops always run on the CPU."""
    with torch.device(request.param):
        yield request.param


def make(E=4, H=64, I=32, gate="silu", activations="bf16", bias=False, static=False, seed=0):
    torch.manual_seed(seed)
    gate = GATES[gate]
    layer = NVFP4Experts.from_dense(
        torch.randn(E, I * (2 if gate.gated else 1), H) / H**0.5,
        torch.randn(E, H, I) / I**0.5,
        gate=gate,
        activations=activations,
        bias=(torch.randn(E, I * (2 if gate.gated else 1)), torch.randn(E, H)) if bias else None,
    )
    if static:
        for name in ("up_proj", "down_proj"):
            scale = torch.rand(E) * 1e-3 + 5e-4
            layer.register_parameter(f"{name}_input_scale", torch.nn.Parameter(scale, requires_grad=False))
    return layer


def batch(T, E, k, H, dtype=torch.float32, sentinels=False):
    ids = torch.randint(-1 if sentinels else 0, E + sentinels, (T, k))
    return torch.randn(T, H).to(dtype), ids, torch.rand(T, k).to(dtype)


@pytest.mark.slow_after(16)
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_layer_matches_the_loop(gate, bias, activations, device):
    layer = make(gate=gate, bias=bias, activations=activations)
    x, ids, p = batch(9, 4, 3, 64, sentinels=True)
    expected = naive_moe(x, ids, p, layer.weights.validate())
    assert relative_error(layer(x, ids, p), expected) < THRESHOLDS["fp32"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_half_precision_rows(dtype, static, activations, device):
    layer = make(activations=activations, static=static)
    x, ids, p = batch(16, 4, 2, 64, dtype)
    expected = naive_moe(x, ids, p, layer.weights)  # before Hopper's kernels bring them into their own order
    y = layer(x, ids, p)
    assert y.dtype == dtype
    # an h close to a rounding boundary may land on its other side: one step of bf16
    # or of e2m1 in one element, hence a threshold above that of fp32
    kind = "w4a4" if activations == "nvfp4" else "half"
    assert relative_error(y, expected) < THRESHOLDS[kind]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    E=st.integers(1, 6), T=st.integers(0, 12), k=st.integers(1, 4),
    H=st.sampled_from([16, 48, 72, 100]), I=st.sampled_from([8, 16, 40]),
    gate=st.sampled_from(sorted(GATES)), activations=st.sampled_from(ACTIVATIONS),
    static=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(E, T, k, H, I, gate, activations, static, seed):
    """Widths that are no multiple of 16 are padded with zeros, which changes nothing."""
    layer = make(E, H, I, gate, activations, static=static, seed=seed)
    x, ids, p = batch(T, E, k, H, sentinels=True)
    y = layer(x, ids, p)
    assert y.shape == (T, H)
    expected = naive_moe(x, ids, p, layer.weights.validate())
    assert T == 0 or relative_error(y, expected) < THRESHOLDS["fp32" if activations == "bf16" else "w4a4"]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("activations", ["bf16", "nvfp4", "nvfp4_four_over_six"])
def test_awq_scales_multiply_the_rows_of_their_expert(activations, static, device):
    layer = make(activations=activations, static=static)
    layer.add_pre_quant_scales(torch.float32)
    x, ids, p = batch(9, 4, 3, 64, sentinels=True)
    assert torch.equal(layer(x, ids, p), make(activations=activations, static=static)(x, ids, p)) or static  # ones
    for scale in layer.pre_quant_scales:
        scale.copy_(torch.randint(1, 9, scale.shape) / 4)
    expected = naive_moe(x, ids, p, layer.weights, [scale.cpu() for scale in layer.pre_quant_scales])
    assert relative_error(layer(x, ids, p), expected) < THRESHOLDS["fp32" if activations == "bf16" else "w4a4"]


@settings(max_examples=30, deadline=None)
@given(
    T=st.integers(0, 9), N=st.integers(1, 40), K=st.integers(1, 6), bias=st.booleans(), awq=st.booleans(),
    static=st.booleans(), activations=st.sampled_from(ACTIVATIONS), seed=st.integers(0, 99),
)  # fmt: skip
def test_linear_is_its_definition(T, N, K, bias, awq, static, activations, seed):
    torch.manual_seed(seed)
    layer = NVFP4Linear(16 * K, N, torch.float32 if bias else None, activations, static,
                        torch.float32 if awq else None)  # fmt: skip
    codes, sf, scale = nvfp4.quantize(torch.randn(N, 16 * K))
    values = {
        "weight": codes, "weight_sf": sf.view(torch.uint8), "weight_global_scale": scale.reshape(1),
        "bias": torch.randn(N), "input_scale": torch.full((1,), 1e-3),
        "pre_quant_scale": torch.randint(1, 9, (16 * K,)) / 4,
    }  # fmt: skip
    for name, parameter in layer.named_parameters():
        parameter.copy_(values[name])
    x = torch.randn(2, T, 16 * K)
    rows = (x * values["pre_quant_scale"] if awq else x).reshape(-1, 16 * K)
    if activations != "bf16":
        rows = [fake_quantize(row, values["input_scale"] if static else None, activations) for row in rows]
        rows = torch.stack(rows) if rows else torch.zeros(0, 16 * K)
    expected = rows.double() @ dense(codes, sf.view(torch.uint8), scale).T + (values["bias"].double() if bias else 0)
    y, x = layer(x), x * values["pre_quant_scale"] if awq else x
    assert y.shape == (2, T, N)
    for found in (y.flatten(0, 1), reference.linear(x.flatten(0, 1), layer.weights)):
        assert T == 0 or relative_error(found, expected) < THRESHOLDS["fp32"]


@settings(max_examples=15, deadline=None)
@given(N=st.integers(1, 9), K=st.integers(1, 9), zeros=st.booleans(), seed=st.integers(0, 99))
def test_a_linear_in_the_layout_of_kernels_gives_the_checkpoints_bytes_back(N, K, zeros, seed):
    """To everyone who saves, loads, moves, copies or calls it elsewhere."""
    torch.manual_seed(seed)
    layer, x = NVFP4Linear(16 * K, 16 * N), torch.randn(3, 16 * K)
    for name, high in (("weight", 256), ("weight_sf", 127)):
        getattr(layer, name).random_(0, high)
    layer.weight_global_scale.fill_(2.0**-7)
    if zeros:  # blocks that the layout itself cannot hold
        layer.weight_sf[layer.weight_sf < 64] = 0
    want, before = layer(x), {name: t.clone() for name, t in layer.state_dict().items()}
    hopper = Selected("sm90", "sm90")
    for look in (
        layer.state_dict, lambda: layer.load_state_dict(before), lambda: layer.to(torch.bfloat16), lambda: layer(x),
    ):  # fmt: skip
        layer._prepare_for(hopper)
        assert layer.packed and layer.weight_sf.numel() == 0
        assert layer.weight.is_contiguous() and len(layer.weight) == -(-N // 4)  # FSDP splits rows over ranks
        every = slice(0, 1), slice(0, 16 * K)
        matrix = named("sm90").dequantize(layer.weights.matrix.stacked(), *every, torch.float32)[0]  # of gradients
        assert torch.equal(matrix.double(), dense(before["weight"], before["weight_sf"], torch.tensor(2.0**-7)))
        with pytest.raises(TypeError, match="unpack"):  # inside of torch.compile it cannot be unpacked
            run_linear(x, layer.weights, Selected("cpu", None))
        assert torch.equal(copy.deepcopy(layer)(x), want)
        look()
        assert not layer.packed and all(torch.equal(t, before[name]) for name, t in layer.named_parameters())
    layer._hf_hook = SimpleNamespace(offload=True)  # accelerate loads its parameters for each call
    layer._prepare_for(hopper)
    assert not layer.packed and torch.equal(layer(x), want)


def test_views_of_the_same_memory_count():
    """Every expert becomes the first, every row of a linear too, without a copy, after a call."""
    experts, (x, ids, p) = make(), batch(8, 4, 2, 64)
    linear = NVFP4Linear(64, 32)
    for name, high in (("weight", 256), ("weight_sf", 127)):
        getattr(linear, name).random_(0, high)
    linear.weight_global_scale.fill_(2.0**-7)
    for layer, inputs in ((experts, (x, ids, p)), (linear, (x,))):
        before = layer(*inputs)
        for name, parameter in layer.named_parameters(recurse=False):
            parameter.data = parameter.data[:1].expand_as(parameter)
            assert parameter.stride(0) == 0 or parameter.shape[0] == 1, name
        found = layer(*inputs)
        assert torch.equal(found, copy.deepcopy(layer)(*inputs)) and not torch.equal(found, before)
    assert relative_error(experts(x, ids, p), naive_moe(x, ids, p, experts.weights)) < THRESHOLDS["fp32"]
    assert torch.equal(linear(x), linear(x)[:, :1].expand(8, 32))


def test_gate_and_up_keep_their_own_global_scale():
    layer = make()
    layer.up_proj_global_scale.mul_(7.0)
    x, ids, p = batch(8, 4, 2, 64)
    assert relative_error(layer(x, ids, p), naive_moe(x, ids, p, layer.weights)) < THRESHOLDS["fp32"]


def test_sentinels_duplicates_and_zero_weights(device):
    layer = make()
    x = torch.randn(3, 64)
    unrouted = layer(x, torch.full((3, 2), 4), torch.rand(3, 2))
    assert torch.equal(unrouted, torch.zeros(3, 64))
    one = layer(x, torch.tensor([[1], [2], [3]]), torch.ones(3, 1))
    twice = layer(x, torch.tensor([[1, 1], [2, 2], [3, 3]]), torch.full((3, 2), 0.5))
    assert relative_error(twice, one) < THRESHOLDS["fp32"]
    with_sentinel = layer(x, torch.tensor([[4, 1], [2, -1], [3, 4]]), torch.ones(3, 2))
    assert torch.equal(with_sentinel, one)
    zero = layer(x, torch.tensor([[1, 0], [2, 0], [3, 0]]), torch.tensor([[1.0, 0.0]] * 3))
    assert torch.equal(zero, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 40, 700])
def test_expert_map(T, dtype, device):
    """Ids of seven experts, four of which are here: as four experts whose slots are -1 elsewhere. An id of -1 stays."""
    expert_map = torch.tensor([-1, 2, 0, -1, 3, 1, 2], dtype=torch.int32)
    layer = make()
    x, ids, p = batch(T, 7, 3, 64)
    ids[0, 0] = ids[-1, 1] = -1
    here, x = torch.where(ids < 0, -1, expert_map[ids]), x.to(dtype)
    expected = naive_moe(x, here.long(), p, layer.weights)  # before Hopper's kernels bring them into their own order
    y = layer(x, ids, p, expert_map=expert_map)
    assert torch.equal(y, layer(x, here, p)) and y.any()
    assert relative_error(y, expected) < THRESHOLDS["fp32" if dtype == torch.float32 else "half"]
    for asked in (x.clone().requires_grad_(), x):  # beside autograd and with a gate of the model's
        assert torch.equal(layer(asked, ids, p, expert_map=expert_map), y)
        layer.post_expert_norm = torch.nn.Identity()
        y = layer(asked, here, p)
    assert torch.equal(layer(x, ids.to(torch.int8), p, expert_map=expert_map), y)
    with pytest.raises(TypeError, match="expert_map is torch.int64, expected int32"):
        layer(x, ids, p, expert_map=expert_map.long())


def test_an_expert_that_is_loaded_into_a_layer_with_awqs_scales():
    """It is what it is given; the others keep theirs."""
    layer, plain = make(), make()
    layer.add_pre_quant_scales(torch.float32)
    for scales in layer.pre_quant_scales:
        scales.data.uniform_(0.5, 2)
    w13, w2 = torch.randn(2 * layer.intermediate_size, layer.hidden_size), torch.randn(64, layer.intermediate_size)
    x, p = torch.randn(3, 64), torch.ones(3, 1)
    before = [layer(x, torch.full((3, 1), e), p) for e in range(4)]
    for each in (layer, plain):
        each.load_expert(2, w13, w2)
    for e in range(4):
        want = plain(x, torch.full((3, 1), e), p) if e == 2 else before[e]
        assert torch.equal(layer(x, torch.full((3, 1), e), p), want)


def test_same_bits_twice_and_in_any_batch():
    """The combine's order is fixed, and a token's result does not depend on its neighbours' order."""
    layer = make(activations="nvfp4")
    x, ids, p = batch(32, 4, 2, 64)
    y = layer(x, ids, p)
    assert torch.equal(y, layer(x, ids, p))
    perm = torch.randperm(32)
    assert relative_error(layer(x[perm], ids[perm], p[perm]), y[perm]) < THRESHOLDS["fp32"]


def test_own_gate_runs_between_the_gemms():
    layer, raw = make(), make()
    raw.gate = Gate("raw")
    raw.own_gate = lambda v: torch.nn.functional.silu(v.chunk(2, -1)[0]) * v.chunk(2, -1)[1]
    for activations in ("bf16", "nvfp4"):
        layer.activations = raw.activations = activations
        x, ids, p = batch(8, 4, 2, 64)
        assert relative_error(raw(x, ids, p), want := layer(x, ids, p)) < THRESHOLDS["w4a4"]
        with torch.no_grad():
            assert relative_error(raw(x, ids, p), want) < THRESHOLDS["w4a4"]


def situ(v):
    """The gate of `naive_situ`, as a model has it."""
    g, u = v.float().chunk(2, -1)
    return (1.5 * torch.tanh(g / 1.5) * torch.sigmoid(g) * 0.75 * torch.tanh(u / 0.75)).to(v.dtype)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("activations", "static"), [("bf16", False), ("nvfp4", False), ("nvfp4", True)])
def test_a_gate_that_new_models_bring_matches_the_loop(activations, static, backend, monkeypatch):
    """x * tanh-like gates run between the GEMMs, with biases and slots of other ranks."""
    monkeypatch.setenv("MOE_NVFP4_BACKEND", backend)
    layer = make(bias=True, activations=activations, static=static)
    layer.gate, layer.own_gate = Gate("raw"), situ
    x, ids, p = batch(9, 4, 3, 64, sentinels=True)
    assert layer.backend(x.dtype).name == backend
    own = lambda gate, v, I: naive_situ(v, I, 1.5, 0.75)
    expected = naive_moe(x, ids, p, layer.weights.validate(), own_gate=own)
    assert relative_error(layer(x, ids, p), expected) < THRESHOLDS["fp32"]
    with torch.no_grad():
        assert relative_error(layer(x, ids, p), expected) < THRESHOLDS["fp32"]
    silu = naive_moe(x, ids, p, replace(layer.weights, gate=Gate("silu")))
    assert relative_error(silu, expected) > 0.1, "another gate gives other numbers"


def test_post_expert_norm_comes_before_the_routing_weight():
    """A slot without an expert adds nothing, whatever the norm makes of zeros."""
    layer = make()
    x, ids, p = batch(6, 4, 2, 64, sentinels=True)
    norm = torch.nn.LayerNorm(64)
    for parameter in norm.parameters():
        torch.nn.init.uniform_(parameter)
    expected = torch.zeros(6, 64, dtype=torch.float64)
    one = torch.ones(1, 1)
    for t in range(6):
        for j in range(2):
            if 0 <= ids[t, j] < 4:
                out = naive_moe(x[t : t + 1], ids[t : t + 1, j : j + 1], one, layer.weights)
                out = (out - out.mean()) / (out.var(correction=0) + 1e-5).sqrt()
                expected[t] += p[t, j].double() * (out * norm.weight.double() + norm.bias.double())[0]
    for trained in (True, False):
        norm.requires_grad_(trained)
        y = moe_forward(x, ids, p, layer.weights, post_expert_norm=norm)
        assert y.requires_grad == trained and relative_error(y, expected) < THRESHOLDS["fp32"]


def test_what_is_not_finite_in_x(monkeypatch):
    """It makes its own row NaN, except that a static scale saturates infinities. Other rows are as they were."""
    x, ids, p = batch(6, 4, 2, 64)
    for backend in ("", "reference"):
        monkeypatch.setenv("MOE_NVFP4_BACKEND", backend)
        for activations, static in (("bf16", False), ("nvfp4", False), ("nvfp4", True)):
            layer = make(activations=activations, static=static)
            want = layer(x, ids, p)
            for value in (math.inf, math.nan):
                bad = x.clone()
                bad[2, 5] = value
                y = layer(bad, ids, p)
                assert torch.equal(y[[0, 1, 3, 4, 5]], want[[0, 1, 3, 4, 5]])
                assert bool(y[2].isfinite().all()) == (static and value == math.inf)


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_routing_weight_of_nan(gradients, activations, monkeypatch):
    """Its token's output is NaN, also in a slot without an expert; no other token's is."""
    x, ids, p = batch(6, 4, 2, 64)
    ids[2, 1], bad = 4, p.clone()
    bad[2, 1] = math.nan
    for backend in ("", "reference"):
        monkeypatch.setenv("MOE_NVFP4_BACKEND", backend)
        layer = make(activations=activations)
        y = layer(x.clone().requires_grad_(gradients), ids, bad).detach()
        others = [0, 1, 3, 4, 5]
        assert y[2].isnan().all() and torch.equal(y[others], layer(x, ids, p)[others])


@pytest.mark.parametrize("activations", ["nvfp4", "nvfp4_four_over_six"])
def test_the_scale_of_a_row_belongs_to_the_whole_row(activations):
    """Two ranks with half of I each add up to the layer, values and gradients; by scales of their own they do not."""
    whole, (x, ids, p), seen = make(activations=activations), batch(8, 4, 2, 64, sentinels=True), []
    w, I, parts = whole.weights, whole.intermediate_size, []
    whole.observer = lambda x, h: seen.append(h.abs().amax(-1))
    whole(x, ids, p)
    whole.observer = None
    for columns in (slice(0, I // 2), slice(I // 2, I)):
        part = NVFP4Experts(4, 64, I // 2, activations=activations)
        for name, codes in (("gate_up_proj", w.w13.codes), ("gate_up_proj_sf", w.w13.sf)):
            getattr(part, name).copy_(torch.cat([half[:, columns] for half in codes.chunk(2, 1)], 1))
        for name, codes, n in (("down_proj", w.w2.codes, 2), ("down_proj_sf", w.w2.sf, 16)):
            getattr(part, name).copy_(codes[..., columns.start // n : columns.stop // n])
        for name in ("gate_proj_global_scale", "up_proj_global_scale", "down_proj_global_scale"):
            getattr(part, name).copy_(getattr(whole, name))
        parts.append(part)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    want = whole(a, ids, p)
    assert relative_error(sum(part(x, ids, p) for part in parts), want) > 1e-2
    for part in parts:
        part.largest = lambda amax: seen[0]
    got = sum(part(b, ids, p) for part in parts)
    assert relative_error(got, want) < THRESHOLDS["fp32"]
    with torch.no_grad():
        assert torch.equal(sum(part(x, ids, p) for part in parts), got)
    for y in (got, want):
        y.square().sum().backward()
    assert relative_error(b.grad, a.grad) < THRESHOLDS["fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_compiles_without_a_graph_break(activations, static, device):
    layer = make(activations=activations, static=static)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for T in (1, 5, 8):
        x, ids, p = batch(T, 4, 2, 64, torch.bfloat16, sentinels=True)
        assert torch.equal(compiled(x, ids, p), layer(x, ids, p))


def test_ops_pass_torchs_own_check():
    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    for activations, static in (("bf16", False), ("nvfp4", False), ("nvfp4_four_over_six", True)):
        layer = make(activations=activations, static=static)
        w, (x, ids, p) = layer.weights, batch(5, 4, 2, 64)
        g, rest = group_by_expert(ids, 4), (w.tensors(), w.spec(layer.backend(x.dtype).name))
        check(ops.experts, (x, ids, p, None, None, *rest))
        own = (g.order, g.offsets, None, None, None, 2, x.dtype, *rest)
        for a, b in ((None, None), (torch.randn(4, 8, 64), torch.randn(4, w.w13.codes.shape[1], 8))):
            args = (x, torch.rand(4, 64), a, b, None, *own)
            check(ops.up, args)
            h = ops.up(*args)[0]
        chosen = torch.tensor([1, -1, 0, 2, 1])
        for adapters in (0, 1, 3):
            check(ops.group, (ids, chosen if adapters else None, 4, adapters, "reference"))
        g = group_by_expert(ids, 4, chosen, 3)
        by_token = (g.order, g.offsets, g.position, g.parts, g.bare, 2, x.dtype, *rest)
        check(ops.up, (x, None, torch.randn(4, 3, 8, 64), torch.randn(4, 3, w.w13.codes.shape[1], 8), None, *by_token))
        args = (h, p, None, torch.rand(4, h.shape[1]), None, None, None, *own)
        check(ops.down, args)
        check(ops.down, (h, None, *args[2:]))


def test_bad_weights_are_named():
    layer = make()
    with pytest.raises(ValueError, match="unknown activation 'swish2'"):
        Gate("swish2")
    for wrong, rule in [
        (dict(kind="relu2"), "relu2 has no gate projection: pass gated=False"),
        (dict(kind="gelu_tanh", gated=False), "gelu_tanh needs a gate projection"),
        (dict(limit=0.0), "limit must be positive"),
        (dict(alpha=float("nan")), "alpha must be a finite number, got nan"),
        (dict(up_offset=float("inf")), "up_offset must be a finite number"),
        (dict(kind="gelu_tanh", alpha=1.702), "alpha=1.702 has no effect on gelu_tanh: leave it out"),
        (dict(kind="relu2", gated=False, limit=7.0), "limit=7.0 has no effect on relu2"),
        (dict(kind="raw", up_offset=1.0), "up_offset=1.0 has no effect on raw"),
        (dict(kind="raw", clamp_after=True), "clamp_after=True has no effect on raw"),
    ]:
        with pytest.raises(ValueError, match=rule):
            Gate(**wrong)
    layer.activations = "W4A4"
    for call in (lambda: make(activations="fp8"), lambda: layer(*batch(2, 4, 2, 64))):
        with pytest.raises(ValueError, match="activations must be one of"):
            call()
    assert "backend=None" in repr(layer)
    layer = make()
    for bad in (0.0, float("inf"), float("nan"), -1.0):
        layer.up_proj_global_scale[2] = bad
        with pytest.raises(ValueError, match="experts.w13.global_scale of expert 2 is"):
            layer.weights.validate()
    layer = make()
    layer.down_proj_sf[1, 2, 0] = 0x7F
    with pytest.raises(ValueError, match="w2.sf holds NaN or negative"):
        layer.weights.validate()
    with pytest.raises(ValueError, match="of expert 0.*NaN or Inf"):
        NVFP4Experts.from_dense(torch.full((1, 32, 16), float("nan")), torch.zeros(1, 16, 16))
    x, ids, p = batch(2, 4, 2, 64)
    with pytest.raises(ValueError, match="row of top_k_index per token"):
        layer(x[:1], ids, p)
    with pytest.raises(ValueError, match=r"x must be \[tokens, 64\]"):
        layer(x[:, :32], ids, p)


# ---- layouts and backends of GPUs, without one ---------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.delenv("MOE_NVFP4_BACKEND", raising=False)
    with stand_for_hopper():
        yield


def test_linears_are_called_in_the_layout_of_the_kernels(hopper):
    torch.manual_seed(0)
    layer, x = NVFP4Linear(96, 80, torch.bfloat16), torch.randn(2, 5, 96).bfloat16()
    layer.weight.random_(0, 256), layer.weight_sf.random_(32, 64), layer.bias.normal_()
    layer.weight_global_scale.fill_(0.01)
    want = x.double() @ dense(layer.weight, layer.weight_sf, torch.tensor(0.01)).T + layer.bias.double()
    calls = Kernels.calls
    got = layer(x)
    assert layer.packed and layer.backend().name == "sm90" and Kernels.calls == calls + 1
    assert relative_error(got, want) < THRESHOLDS["half"] and torch.equal(layer(x), got)
    assert layer.backend(torch.float16).name != "sm90" and relative_error(layer(x.half()), want) < THRESHOLDS["half"]
    assert not layer.packed and layer.weight.shape == (80, 48)


@pytest.mark.parametrize("gate", [Gate(), Gate("relu2", gated=False)], ids=["silu", "relu2"])
def test_packed_weights_come_back_wherever_they_are_asked_for(hopper, gate):
    torch.manual_seed(0)
    dense = torch.randn(4, 96 if gate.gated else 48, 64), torch.randn(4, 64, 48)
    layer = NVFP4Experts.from_dense(*dense, gate)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x, ids = torch.randn(5, 64).bfloat16(), torch.randint(4, (5, 2))
    weights = torch.rand(5, 2)
    layer.activations = "nvfp4"  # never packed for stages, so that there is something to compare with
    layer.post_expert_norm = torch.nn.Identity()
    layer(x, ids, weights)
    assert not layer.packed
    layer.activations, layer.post_expert_norm = "bf16", None
    calls, problem = Kernels.calls, layer._problem(torch.bfloat16, True)
    with torch.inference_mode():
        y = layer(x, ids, weights)
    assert layer.packed and layer._problem(torch.bfloat16, True) == problem and Kernels.calls == calls + 1
    assert sum(p.nbytes for p in layer.parameters()) >= sum(t.nbytes for t in before.values())

    saved = layer.state_dict()
    assert not layer.packed and all(torch.equal(saved[name], before[name]) for name in before)
    assert torch.equal(layer(x, ids, weights), y) and layer.packed
    layer.load_state_dict({"adapter": torch.ones(1)}, strict=False)  # nothing of this layer
    assert layer.packed
    layer.to(torch.float64)  # moves and casts restore the checkpoint's bytes, too
    assert not layer.packed
    assert torch.equal(layer.down_proj, before["down_proj"])
    layer.float()
    layer(x, ids, weights)
    layer.load_state_dict(before)
    assert torch.equal(layer(x, ids, weights), y)
    layer(x.float(), ids, weights)  # runs on the rows of the checkpoint
    assert not layer.packed
    layer.prepare()
    layer.load_expert(0, dense[0][1], dense[1][1])
    assert not layer.packed and torch.equal(layer(x, ids.clamp(max=0), weights), layer(x, ids.clamp(1, 1), weights))


@pytest.mark.parametrize("symbols", [None, ShapeEnv()], ids=["", "symbols"])
@pytest.mark.parametrize("staged", [False, True])
def test_a_first_pass_with_fake_tensors(staged, symbols, monkeypatch):
    """Such as an estimate of memory, or a look at shapes: what the layer keeps for later calls has numbers."""
    torch.manual_seed(0)
    layer = NVFP4Experts.from_dense(torch.randn(4, 96, 64), torch.randn(4, 64, 48))
    layer.post_expert_norm = torch.nn.Identity() if staged else None
    inputs = torch.randn(5, 64).bfloat16(), torch.randint(4, (5, 2)), torch.rand(5, 2)
    want = copy.deepcopy(layer)(*inputs)
    monkeypatch.delenv("MOE_NVFP4_BACKEND", raising=False)
    with stand_for_hopper(not staged):
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols) as fake:
            assert layer(*map(fake.from_tensor, inputs)).dtype == torch.bfloat16
        assert layer.packed != staged and all(type(p.data) is torch.Tensor for p in layer.parameters())
        layer.unpack()
    assert relative_error(layer(*inputs), want) < THRESHOLDS["half"]


def test_the_recipe_of_an_expert():
    """Adapters are later merged by the same one."""
    torch.manual_seed(0)
    layer, w13, w2 = NVFP4Experts(2, 64, 32), torch.randn(64, 64), torch.randn(64, 32)
    for recipe in ("max", "four_over_six"):
        layer.load_expert(1, w13, w2, recipe)
        for name, matrix in (("gate_up_proj", w13), ("down_proj", w2)):
            for key, want in quantize_expert(matrix, name, recipe).items():
                assert torch.equal(getattr(layer, key)[1], want)
        assert layer.recipe == recipe


def test_threads_do_not_meet_weights_that_change_their_layout(hopper, monkeypatch):
    """Calls in bf16 pack weights, calls in fp32 and state_dict restore them; no call sees them half changed."""
    pack = Kernels.pack
    monkeypatch.setattr(Kernels, "pack", lambda *args: (time.sleep(0.002), pack(*args))[1])
    torch.manual_seed(0)
    layer = NVFP4Experts.from_dense(torch.randn(4, 96, 64), torch.randn(4, 64, 48))
    linear = NVFP4Linear(64, 80)
    linear.weight.random_(0, 256), linear.weight_sf.random_(32, 64), linear.weight_global_scale.fill_(0.01)
    x, ids, p = batch(5, 4, 2, 64, torch.bfloat16)
    calls = [lambda: layer(x, ids, p), lambda: layer(x.float(), ids, p), lambda: layer.state_dict()["down_proj"],
             lambda: linear(x), lambda: linear(x.float()), lambda: linear.state_dict()["weight"]]  # fmt: skip
    want = [call() for call in calls]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda call: call(), calls * 3))
    assert all(map(torch.equal, got, want * 3))


def test_weights_change_no_layout_while_a_graph_is_captured(hopper, monkeypatch):
    """Nothing is computed then: they would be lost."""
    layer = NVFP4Experts.from_dense(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
    x, ids, p = batch(3, 2, 1, 32, torch.bfloat16)
    codes = layer.state_dict()["down_proj"].clone()
    for prepared, other in ((False, x), (True, x.float())):
        if prepared:
            layer(x, ids, p)
        with monkeypatch.context() as patch:
            patch.setattr("moe_nvfp4.prepared.capturing", lambda device: True)
            with pytest.raises(RuntimeError, match="before the capture"):
                layer(other, ids, p)
            if prepared:
                layer(x, ids, p)
        assert layer.packed == prepared
    assert torch.equal(layer.state_dict()["down_proj"], codes)


def test_weights_that_a_graph_reads_do_not_move_silently(hopper, monkeypatch):
    """A graph that was captured would go on to read their old memory."""
    layer = NVFP4Experts.from_dense(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
    x, ids, p = batch(3, 2, 1, 32, torch.bfloat16)

    def capture():
        layer(x, ids, p)
        with monkeypatch.context() as patch:
            patch.setattr("moe_nvfp4.prepared.capturing", lambda device: True)
            layer(x, ids, p)

    state = {name: t.clone() for name, t in layer.state_dict().items()}
    moves = [layer.state_dict, lambda: layer.load_state_dict(state), lambda: layer.to("cpu"),
             lambda: layer(x.float(), ids, p)]  # fmt: skip
    for move in moves:
        capture()
        with pytest.warns(UserWarning, match="a CUDA graph was captured that reads them"):
            move()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(x, ids, p)
            move()  # no graph was captured since
            with weights_are_held():
                capture()
            move()


def test_weights_that_an_offloading_hook_brings_are_left_alone(hopper):
    """But those of a layer that device_map has put on one of several GPUs stay there, and are packed."""
    from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module

    for offload, several in [(False, False), (False, True), (True, False), (True, True)]:
        layer = NVFP4Experts.from_dense(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
        hook = AlignDevicesHook("cpu", offload=offload)
        add_hook_to_module(layer, SequentialHook(AlignDevicesHook("cpu"), hook) if several else hook)
        layer.prepare()
        assert bool(layer.packed) != offload
    layer = NVFP4Experts.from_dense(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
    layer._hf_hook = object()  # an unknown hook
    layer.prepare()
    assert not layer.packed


def test_packed_weights_refuse_other_dtypes(hopper):
    layer = NVFP4Experts.from_dense(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
    layer.prepare()
    with pytest.raises(TypeError, match="call unpack"):
        moe_forward(torch.randn(3, 32), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), layer.weights)


def every_parameter():
    """Modules with all that is optional, and the names of their parameters."""
    biases = torch.randn(4, 32), torch.randn(4, 32)
    experts = NVFP4Experts.from_dense(torch.randn(4, 32, 32), torch.randn(4, 32, 16), Gate(), "nvfp4", biases)
    experts.set_input_scales(torch.tensor(0.01), torch.tensor(0.02))
    experts.add_pre_quant_scales(torch.float32)
    linear = NVFP4Linear(32, 48, torch.float32, "nvfp4", input_scale=True, pre_quant_scale=torch.float32)
    linear.set_input_scales(torch.tensor(0.01))
    return [(module, name) for module in (experts, linear) for name, _ in module.named_parameters()]


@pytest.mark.slow_after(12)
@pytest.mark.parametrize("module, name", every_parameter(), ids=lambda x: x if isinstance(x, str) else type(x).__name__)
@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_that_are_computed_are_refused(module, name, compiled):
    """Codes and scales would be a KeyError, and biases and static scales be left out without a word."""
    x, routing = torch.randn(3, 32), (torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.rand(3, 2))
    inputs = (x, *routing) if isinstance(module, NVFP4Experts) else (x,)
    ways = [lambda m: parametrize.register_parametrization(m, name, torch.nn.Identity(), unsafe=True)]
    if module._parameters[name].is_floating_point():
        ways.append(lambda m: prune.l1_unstructured(m, name, 1))
    for change in ways:
        changed = copy.deepcopy(module)
        want = changed(*inputs)
        change(changed)
        assert type(module).__name__ in repr(changed)
        call = torch.compile(changed, backend="eager", fullgraph=True) if compiled else changed
        with pytest.raises(Exception, match="parametrized or pruned .torch.nn.utils.*remove_parametrizations"):
            call(*inputs)
        if hasattr(changed, "parametrizations"):
            parametrize.remove_parametrizations(changed, name)
            assert torch.equal(changed(*inputs), want)


@pytest.mark.parametrize("module, name", every_parameter(), ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_bytes_are_not_pruned(module, name):
    """By their size, which says nothing of the values', and `prune.remove` would leave that without a word."""
    if module._parameters[name].is_floating_point():
        return
    before = copy.deepcopy(module.state_dict())
    for method in (prune.l1_unstructured, prune.random_unstructured):
        with pytest.raises(ValueError, match="prune the dense model"):
            method(module, name, 0.5)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
