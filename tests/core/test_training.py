"""Gradients through 4-bit layers: against autograd through dequantized float64 experts, one token and one slot at a
time."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moe_nvfp4 import NVFP4Experts, backends, reference, stages
from moe_nvfp4.format import dequantize
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.ops import Adapter
from moe_nvfp4.weights import SILU, Gate
from tests.common import Kernels, random_layer, relative_error, unpacked
from tests.gradients import CLOSE, GATES, E, H, I, batch, compare, dense, leaf, oracle


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gate", GATES)
def test_gradients_equal_those_of_dequantized_float64(gate, dtype, backend, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_BACKEND", backend)
    for bias in (None, torch.float32):
        layer = random_layer(E, H, I, GATES[gate], bias=bias)
        compare(layer, *batch(dtype), CLOSE[dtype])
    compare(layer, *batch(dtype), CLOSE[dtype], train_biases=True)


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("hook", ["none", "biases", "own gate", "norm", "factors", "observer", "up", "down"])
def test_the_same_bits_with_gradients_as_without(hook, dtype, backend, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_BACKEND", backend)
    x, ids, p = batch(dtype)
    g = torch.Generator().manual_seed(4)
    pairs = {"up": ((E, 8, H), (E, 2 * I, 8)), "down": ((E, 8, I), (E, H, 8))}  # adapters
    pair = tuple(torch.randn(shape, generator=g).to(dtype) / 9 for shape in pairs.get(hook, ()))
    for activations, static in (("bf16", False), ("nvfp4", True), ("nvfp4", False), ("nvfp4_four_over_six", False)):
        gate = Gate("raw") if hook == "own gate" else SILU
        layer = random_layer(E, H, I, gate, activations, dtype, static, input_scale=3e-3)
        layer.own_gate = lambda z: torch.tanh(z[:, :I]) * z[:, I:]
        if hook == "biases":
            layer.gate_up_proj_bias.requires_grad_()
        elif hook == "norm":
            layer.post_expert_norm = nn.RMSNorm(H, dtype=dtype)
        elif hook == "factors":
            layer.add_pre_quant_scales(torch.float32)
            for f in layer.pre_quant_scales:
                f.data.uniform_(0.5, 2.0, generator=g)
        elif hook == "observer":
            layer.observer = lambda *rows: None
        adapters = tuple((Adapter(*pair),) if name == hook else () for name in ("up", "down"))
        with torch.no_grad():
            want = layer(x, ids, p, adapters)
        got = layer(leaf(x, x.dtype), ids, leaf(p, p.dtype), adapters)
        assert got.requires_grad and torch.equal(got, want)


@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("activations, static", [("nvfp4", True), ("nvfp4", False), ("nvfp4_four_over_six", False)])
def test_w4a4_goes_straight_through(activations, static, backend, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_BACKEND", backend)
    layer = random_layer(E, H, I, activations=activations, bias=torch.float32, static=static, input_scale=3e-3)
    compare(layer, *batch(torch.float32), 1e-5)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=E, max_size=E), unrouted=st.integers(0, 4), top_k=st.integers(1, 3),
    I=st.sampled_from([32, 40]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_routing(sizes, unrouted, top_k, I, seed):
    """No tokens, experts without tokens, all slots unrouted; weights with padding."""
    layer = random_layer(E, H, I)
    compare(layer, *batch(torch.float32, sizes, unrouted, top_k, seed), 1e-5)


def test_the_gradient_of_a_routing_weight_alone():
    """It is the product of dy and an expert's output, in which terms cancel: near by what is added, not by the sum."""
    torch.manual_seed(0)
    T, w13, w2 = 200, torch.randn(2, 448, 448) / 448**0.5, torch.randn(2, 448, 224) / 224**0.5
    biases = torch.randn(2, 448).half() / 10, torch.randn(2, 448).half() / 10
    layer = NVFP4Experts.from_dense(w13, w2, GATES["gpt-oss"], bias=biases)
    (x, dy), ids, p = torch.randn(2, T, 448).half(), torch.randint(2, (T, 1)), leaf(torch.rand(T, 1))
    single = leaf(p, torch.float32)
    (found,) = torch.autograd.grad(layer(x, ids, single), single, dy)
    y = oracle(layer, x.double(), ids, p, tuple(b.double() for b in biases))
    (want,) = torch.autograd.grad(y, p, dy.double())
    error, terms = (found - want).abs(), dy.double().norm(dim=1, keepdim=True) * (y / p).norm(dim=1, keepdim=True)
    assert (error / terms).max() < 2e-4 and (error / want.abs()).max() > 1e-2


@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("hook", ["none", "norm", "factors"])
def test_no_experts_per_token(hook, backend, monkeypatch):
    """top_k = 0: the output and all gradients are zeros."""
    monkeypatch.setenv("MOE_NVFP4_BACKEND", backend)
    layer = random_layer(E, H, I, bias=torch.float32)
    layer.gate_up_proj_bias.requires_grad_()
    if hook == "norm":
        layer.post_expert_norm = nn.RMSNorm(H)
    elif hook == "factors":
        layer.add_pre_quant_scales(torch.float32)
    x, p = torch.randn(3, H, requires_grad=True), torch.ones(3, 0, requires_grad=True)
    y = layer(x, torch.zeros(3, 0, dtype=torch.int64), p)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape and p.grad.shape == p.shape
    assert not (y.any() or x.grad.any() or layer.gate_up_proj_bias.grad.any())


def test_a_large_batch_is_cut_by_tokens(monkeypatch):
    monkeypatch.setattr(stages, "MAX_ROWS", 7)
    compare(random_layer(E, H, I, bias=torch.float32), *batch(torch.float32), 2e-6, train_biases=True)


@pytest.mark.parametrize("scratch", [1, 1 << 29])
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_windows_of_columns(name, scratch, monkeypatch):
    """As on GPUs: one window of all experts' columns at a time, and all at once; also for a linear."""
    monkeypatch.setattr(stages, "SCRATCH", scratch)
    layer, backend = random_layer(4, 200, 136), backends.named("cpu")
    weights, w = getattr(layer.weights, name), dense(layer)[name == "w2"]
    rows, offsets = torch.randn(9, weights.N).bfloat16(), torch.tensor([0, 2, 2, 6, 8], dtype=torch.int32)
    got = stages._times_windows(rows, weights, offsets, backend)
    for e, (first, last) in enumerate(pairwise(offsets.tolist())):
        if first < last:  # the ninth row has no expert
            assert relative_error(got[first:last], rows[first:last].double() @ w[e]) < CLOSE[torch.bfloat16]
    one = weights.of(slice(1))._replace(gate_scale=None)
    got = stages._times_windows(rows, one, None, backend)
    matrix = dequantize(one.codes[0], one.sf[0], one.global_scale)[:, : weights.K]
    assert relative_error(got, rows.double() @ matrix.double()) < CLOSE[torch.bfloat16]


def test_repeated_backward_passes_give_the_same_bits():
    x, ids, p = batch(torch.bfloat16)
    layer, grads = random_layer(E, H, I), []
    for _ in range(2):
        a, b = leaf(x, x.dtype), leaf(p, p.dtype)
        layer(a, ids, b).square().sum().backward()
        grads.append((a.grad, b.grad))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


class Stages(Kernels):
    """A stand-in for Hopper that has stages, too."""

    def gemm1_swiglu(self, rows, weights, groups, dtype):
        return reference.gemm1_swiglu(rows, unpacked(self, weights), groups, dtype)

    def gemm2_combine(self, h, weights, groups, top_k_weights, dtype):
        return reference.gemm2_combine(h, unpacked(self, weights), groups, top_k_weights, dtype)


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_weights_in_hoppers_layout(activations):
    """Backward reads Hopper's layout. Its kernels have no stages for W4A4, for which the bytes are restored."""
    x, ids, p = batch(torch.bfloat16)
    layer, grads = random_layer(E, H, I, activations=activations), []
    for backend in ((), (Stages(),)):
        with backends.registered(*backend):
            layer.activations = "bf16" if backend else activations
            layer.prepare()
            layer.activations = activations
            a, b = leaf(x, x.dtype), leaf(p, p.dtype)
            w, dy = layer.weights, torch.ones(x.shape, dtype=x.dtype)
            assert layer.packed == bool(backend)
            kernels = backends.named("sm90" if backend else "cpu")
            grads.append(stages.gradients(dy, a.detach(), ids, b.detach(), w, kernels, False))
            if backend:
                values = unpacked(backend[0], w)
                layer.unpack()
    for name in ("w13", "w2"):
        found, want = (dequantize(m.codes, m.sf, None) for m in (getattr(values, name), getattr(layer.weights, name)))
        assert torch.equal(found, want)
    for mine, theirs in zip(*grads, strict=True):
        assert relative_error(mine, theirs) < CLOSE[torch.bfloat16]


# ---- what the model's own code does between the stages -------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_a_gate_a_norm_and_factors_of_the_models_own(which):
    """Their parameters get gradients, and so does an adapter of one projection, whose rows are not multiplied by
    factors; observers see the rows that meet the weights."""
    x, ids, p = batch(torch.float32)
    layer, seen, met = random_layer(E, H, I, Gate("raw")), [], [[0.0], [0.0]]
    slope = nn.Parameter(torch.tensor(1.3))
    norm = nn.RMSNorm(H, eps=1e-6)
    layer.own_gate = lambda z: torch.tanh(slope * z[:, :I]) * z[:, I:]
    layer.post_expert_norm = norm
    layer.observer = lambda *rows: seen.extend(r.abs().max().item() for r in rows)
    layer.add_pre_quant_scales(torch.float32)
    factors = layer.pre_quant_scales
    for f in factors:
        f.data.uniform_(0.5, 2.0)
    adapter = Adapter(torch.randn(E, 8, (H, I)[which]) / 9, torch.randn(E, (2 * I, H)[which], 8) / 9)
    mine = [*(leaf(t, torch.float32) for t in (x, p, *adapter)), slope, norm.weight]
    adapters = tuple((Adapter(*mine[2:4]),) if i == which else () for i in range(2))
    dy, weights = torch.randn(len(ids), H), dense(layer)
    layer(mine[0], ids, mine[1], adapters).backward(dy)

    x64, p64, a64, b64, slope64, weight64 = theirs = [leaf(t) for t in mine]

    def project(i, e, row):
        taken = row * factors[i][e].double()
        met[i].append(taken.abs().max().item())
        return weights[i][e] @ taken + (b64[e] @ (a64[e] @ row) if i == which else 0)

    y = []
    for t in range(len(ids)):
        total = torch.zeros(H, dtype=torch.float64)
        for j, e in enumerate(ids[t].tolist()):
            if 0 <= e < E:
                z = project(0, e, x64[t])
                out = project(1, e, torch.tanh(slope64 * z[:I]) * z[I:])
                total = total + p64[t, j] * nn.functional.rms_norm(out, (H,), weight64, eps=1e-6)
        y.append(total)
    torch.stack(y).backward(dy.double())
    for one, other in zip(mine, theirs, strict=True):
        assert relative_error(one.grad, other.grad) < 1e-4
    assert seen == pytest.approx([max(m) for m in met], rel=1e-5)


@pytest.mark.parametrize("name", ["gate_up_proj_bias", "down_proj_bias"])
def test_a_bias_alone_is_trained(name):
    """It gets the gradient that it has where both are trained."""
    x, ids, p = batch(torch.float32)
    found = []
    for names in (["gate_up_proj_bias", "down_proj_bias"], [name]):
        layer = random_layer(E, H, I, bias=torch.float32)
        for each in names:
            getattr(layer, each).requires_grad_()
        layer(x, ids, p).square().sum().backward()
        found.append(getattr(layer, name).grad)
    assert found[0].any() and torch.equal(*found)


@pytest.mark.parametrize("trains", [True, False])
def test_a_new_parameter_over_the_same_memory_counts(trains):
    """The usual way to train a parameter, or to freeze it: the record of an earlier call has another one."""
    x, ids, p = batch(torch.float32)
    layer = random_layer(E, H, I, bias=torch.float32)
    linear = NVFP4Linear(H, I, bias=torch.float32)
    linear.weight_sf.data.fill_(0x38)
    for module, name, call in (
        (layer, "down_proj_bias", lambda: layer(x, ids, p)),
        (linear, "bias", lambda: linear(x)),
    ):
        getattr(module, name).requires_grad_(not trains)
        want = call().detach()
        setattr(module, name, nn.Parameter(getattr(module, name).data, requires_grad=trains))
        y = call()
        assert torch.equal(y, want) and y.requires_grad == trains
        if trains:
            y.sum().backward()
            assert getattr(module, name).grad.any()
    layer.down_proj_global_scale = nn.Parameter(layer.down_proj_global_scale.data, requires_grad=trains)
    with pytest.raises(NotImplementedError, match="scales of 4-bit weights have requir") if trains else nullcontext():
        layer(x, ids, p)


@pytest.mark.parametrize("activations", ["nvfp4", "nvfp4_four_over_six"])
@pytest.mark.parametrize("factors", [False, True])
def test_largest_magnitudes_of_whole_rows(activations, factors):
    """Those of rows that are here as a whole (`share_rows`) change nothing: they are of what is quantized."""
    layer = random_layer(E, H, I, activations=activations)
    if factors:
        layer.add_pre_quant_scales(torch.float32)
        for f in layer.pre_quant_scales:
            f.data.uniform_(0.5, 2.0)
    x, ids, p = batch(torch.float32)
    want, seen = layer(x, ids, p), []
    layer.largest = lambda amax: seen.append(amax) or amax
    got = layer(x, ids, p)
    assert seen[0].any() and relative_error(got, want) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_h_that_a_static_scale_quantizes_is_not_rounded_before(dtype):
    """By stages as in one call, which never has h in the rows' dtype."""
    layer = random_layer(E, 64, 64, activations="nvfp4", static=True, input_scale=3e-3)
    _, ids, p = batch(dtype, sizes=(50, 0, 90, 30, 40), unrouted=10)
    x = torch.randn(len(ids), 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = layer(x, ids, p)
    layer.observer = lambda *rows: None
    assert torch.equal(layer(x, ids, p), want)


def test_factors_alone_are_trained():
    """Nothing else is trained."""
    x, ids, p = batch(torch.float32)
    layer = random_layer(E, H, I)
    layer.add_pre_quant_scales(torch.float32)
    factors = [f.requires_grad_() for f in layer.pre_quant_scales]
    for f in factors:
        f.data.uniform_(0.5, 2.0)  # ones would not show whether a gradient is multiplied by them
    layer(x, ids, p).square().sum().backward()

    (w13, w2), (x_factor, h_factor) = dense(layer), map(leaf, factors)
    y = []
    for t in range(len(ids)):
        total = torch.zeros(H, dtype=torch.float64)
        for j, e in enumerate(ids[t].tolist()):
            if 0 <= e < E:
                gate, up = (w13[e] @ (x[t].double() * x_factor[e])).chunk(2)
                total = total + p[t, j].double() * (w2[e] @ (nn.functional.silu(gate) * up * h_factor[e]))
        y.append(total)
    torch.stack(y).square().sum().backward()
    for mine, theirs in zip(factors, (x_factor, h_factor), strict=True):
        assert relative_error(mine.grad, theirs.grad) < 1e-5


@pytest.mark.parametrize("r, activations", [(3, "nvfp4"), (8, "bf16")])
@pytest.mark.parametrize("gate", GATES)
def test_adapters_add_their_products_to_the_weights(gate, r, activations):
    """Values and gradients of W + B A in float64, for two adapters and for one; W4A4 does not quantize their rows."""
    layer = random_layer(E, H, I, GATES[gate], activations)
    x, ids, p = batch(torch.float32)
    N13 = layer.weights.w13.codes.shape[1]
    g = torch.Generator().manual_seed(2)

    def adapter(N, K):
        return Adapter(*(torch.randn(s, generator=g) * 0.1 for s in ((E, r, K), (E, N, r))))

    adapters = ((adapter(N13, H), adapter(N13, H)), (adapter(H, I),))
    mine = tuple(tuple(Adapter(*(leaf(t, t.dtype) for t in one)) for one in some) for some in adapters)
    theirs = tuple(tuple(Adapter(*(leaf(t) for t in one)) for one in some) for some in adapters)
    a, b, a64, b64 = leaf(x, x.dtype), leaf(p, p.dtype), leaf(x), leaf(p)
    y, y64 = layer(a, ids, b, mine), oracle(layer, a64, ids, b64, adapters=theirs)
    assert relative_error(y, y64) < 2e-6
    y.square().sum().backward()
    y64.square().sum().backward()
    assert relative_error(a.grad, a64.grad) < 5e-6 and relative_error(b.grad, b64.grad) < 5e-6
    for some, others in zip(mine, theirs, strict=True):
        for one, other in zip(some, others, strict=True):
            for t, t64 in zip(one, other, strict=True):
                assert relative_error(t.grad, t64.grad) < 5e-6
    with torch.no_grad():
        assert torch.equal(layer(x, ids, p, mine), y)
        assert relative_error(layer(x, ids, p), oracle(layer, x.double(), ids, p.double())) < 2e-6


@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("r, activations", [(3, "nvfp4"), (8, "bf16")])
def test_each_token_has_its_adapter(r, activations, backend, monkeypatch):
    """Values and gradients in float64, token by token with its own adapter, or without. Numbers of no adapter are none;
    routing slots of other ranks are skipped; bf16 rows and several calls of torch's product give the same."""
    monkeypatch.setenv("MOE_NVFP4_BACKEND", backend)
    layer, (x, ids, p), S = random_layer(E, H, I, activations=activations), batch(torch.float32), 3
    g = torch.Generator().manual_seed(2)
    adapter = 5 * torch.arange(len(x)) % (S + 4) - 2
    assert {*adapter.tolist()} == {*range(-2, S + 2)} and len(x) * ids.shape[1] > E * S
    shapes = ((S, r, H), (S, 2 * I, r)), ((S, r, I), (S, H, r))
    adapters = tuple((Adapter(*(torch.randn(E, *s, generator=g) * 0.1 for s in pair)),) for pair in shapes)
    mine, theirs = (tuple((Adapter(*(leaf(t, d) for t in one)),) for (one,) in adapters)
                    for d in (torch.float32, torch.float64))  # fmt: skip
    a, b, a64, b64 = leaf(x, x.dtype), leaf(p, p.dtype), leaf(x), leaf(p)

    def of_token(t):
        here = 0 <= (s := int(adapter[t])) < S
        return tuple((Adapter(*(m[:, s] for m in one)),) if here else () for (one,) in theirs)

    y64 = torch.cat([oracle(layer, a64[t : t + 1], ids[t : t + 1], b64[t : t + 1], adapters=of_token(t))
                     for t in range(len(x))])  # fmt: skip
    y = layer(a, ids, b, mine, adapter)
    assert relative_error(y, y64) < 2e-6
    y.square().sum().backward()
    y64.square().sum().backward()
    assert relative_error(a.grad, a64.grad) < 5e-6 and relative_error(b.grad, b64.grad) < 5e-6
    for (one,), (other,) in zip(mine, theirs, strict=True):
        for t, t64 in zip(one, other, strict=True):
            assert relative_error(t.grad, t64.grad) < 5e-6
    with torch.no_grad():
        assert torch.equal(layer(x, ids, p, mine, adapter), y)
        half = layer(x.bfloat16(), ids, p, mine, adapter)
        assert relative_error(half, y64) < (2e-2 if activations == "bf16" else 0.1)
        for most in (2, E * S - 1):
            monkeypatch.setattr(stages, "MOST_GROUPS", most)
            assert torch.equal(layer(x.bfloat16(), ids, p, mine, adapter), half)


def test_wrong_adapters_of_tokens_are_named():
    layer, (x, ids, p) = random_layer(E, H, I), batch(torch.float32)
    one, several = torch.randn(E, 8, H), torch.randn(E, 2, 8, H)
    for a, adapter, text in (
        (one, torch.zeros(len(x), dtype=torch.int64), "of at least one, got torch.int64 .* of 0"),
        (several, torch.zeros(len(x)), "got torch.float32 .* of 2: pass -1 for a token without"),
        (several, torch.zeros(len(x) + 1, dtype=torch.int64), rf"numbers \[{len(x)}\]"),
        (several, None, r"x's adapter a has shape .*, expected"),
    ):
        b = torch.randn(*a.shape[:-2], 2 * I, 8)
        with pytest.raises(ValueError, match=text):
            layer(x, ids, p, ((Adapter(a, b),), ()), adapter)


@pytest.mark.parametrize("tokens", [0, 1])
def test_adapters_without_tokens(tokens):
    """Experts that no token chose get zeros, not what the memory held."""
    layer, (x, ids, p) = random_layer(E, H, I), batch(torch.float32)
    a, b = torch.randn(E, 8, H, requires_grad=True), torch.randn(E, 2 * I, 8, requires_grad=True)
    x, ids, p = x[:tokens].requires_grad_(), torch.full((tokens, 2), 3), p[:tokens]
    layer(x, ids, p, ((Adapter(a, b),), ())).sum().backward()
    others = [0, 1, 2, 4]
    assert not a.grad[others].any() and not b.grad[others].any() and x.grad.shape == (tokens, H)
    assert bool(a.grad[3].any()) == bool(tokens)


# ---- linears -------------------------------------------------------------------------------------


def linear(activations="bf16", bias=torch.float32):
    layer = NVFP4Linear(H, I, bias, activations)
    g = torch.Generator().manual_seed(3)
    layer.weight.data.copy_(torch.randint(0, 256, layer.weight.shape, generator=g))
    layer.weight_sf.data.copy_(torch.randint(0x30, 0x40, layer.weight_sf.shape, generator=g))
    layer.weight_global_scale.data.fill_(0.01)
    if bias is not None:
        layer.bias.data.normal_(generator=g)
    return layer


@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_gradients_of_a_linear(dtype, backend, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_BACKEND", backend)
    layer = linear()
    layer.bias.requires_grad_()
    x = torch.randn(2, 7, H).to(dtype)
    a, a64, bias64 = leaf(x, dtype), leaf(x), leaf(layer.bias)
    w = dequantize(layer.weight, layer.weight_sf, layer.weight_global_scale.reshape(())).double()
    layer(a).square().sum().backward()
    (a64 @ w.T + bias64).square().sum().backward()
    assert relative_error(a.grad, a64.grad) < CLOSE[dtype]
    assert relative_error(layer.bias.grad, bias64.grad) < CLOSE[dtype]


def test_w4a4_linears_go_straight_through():
    layer = linear("nvfp4", None)
    x = torch.randn(7, H)
    w = dequantize(layer.weight, layer.weight_sf, layer.weight_global_scale.reshape(()))
    a = leaf(x, x.dtype)
    dy = torch.randn(7, I)
    layer(a).backward(dy)
    assert relative_error(a.grad, dy.double() @ w.double()) < 2e-6
    assert layer(x[:0].requires_grad_()).sum().backward() is None


# ---- as training calls them ----------------------------------------------------------------------


def test_second_derivatives_are_refused():
    x, ids, p = batch(torch.float32)
    layer, a = random_layer(E, H, I), leaf(x, x.dtype)
    normed = random_layer(E, H, I)
    normed.post_expert_norm = nn.RMSNorm(H)
    for f in (lambda a: layer(a, ids, p), lambda a: normed(a, ids, p), linear()):
        (grad,) = torch.autograd.grad(f(a).square().sum(), a, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives of 4-bit experts and linears"):
            grad.sum().backward()


def test_scales_are_not_trained():
    """`requires_grad_()` of all floating parameters would silently leave them as they are."""
    x, ids, p = batch(torch.float32)
    layer = random_layer(E, H, I)
    adapters = ((Adapter(torch.randn(E, 4, H), torch.randn(E, 2 * I, 4)),), ())
    for module, args in ((linear(), ()), (layer, (ids, p)), (layer, (ids, p, adapters))):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in ("weight_global_scale", "down_proj_global_scale"))
        for rows in (x, leaf(x, x.dtype)):  # a layer above may have all the other gradients
            with pytest.raises(NotImplementedError, match=r"scales of 4-bit .*have requires_grad.*requires_grad_\(F"):
                module(rows, *args)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    x, ids, p = batch(torch.float32)
    layer, grads = random_layer(E, H, I), []
    for f in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=reentrant)):
        a, b = leaf(x, x.dtype), leaf(p, p.dtype)
        f(a, ids, b).square().sum().backward()
        grads.append((a.grad, b.grad))
    for mine, theirs in zip(*grads, strict=True):  # under no_grad the layer is fused
        assert relative_error(mine, theirs) < 2e-6


def test_autocast_chooses_the_dtype():
    """As for torch's own layers; experts return x's dtype."""
    x, ids, p = batch(torch.float32)
    layer, nn_linear = random_layer(E, H, I), linear()
    want = layer(x.bfloat16(), ids, p), nn_linear(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        a = leaf(x, x.dtype)
        y, z = layer(a, ids, p), nn_linear(a)
        assert y.dtype == torch.float32 and torch.equal(y, want[0].float())
        assert z.dtype == torch.bfloat16 == nn.Linear(H, 4)(a).dtype and torch.equal(z, want[1])
    (y.sum() + z.sum()).backward()
    assert a.grad.dtype == torch.float32 and a.grad.isfinite().all()


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_autocast_during_backward_changes_no_bit(activations):
    """Torch's products inside the gradient are of fp32, and would be rounded."""
    x, ids, p = batch(torch.bfloat16)
    layer, nn_linear, grads = random_layer(E, H, I, activations=activations), linear(), []
    for inside in (False, True):
        a, b = leaf(x, x.dtype), leaf(p, p.dtype)
        loss = layer(a, ids, b).float().square().sum() + nn_linear(a).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        grads.append((a.grad, b.grad))
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_compiled():
    x, ids, p = batch(torch.float32)
    layer, grads = random_layer(E, H, I, bias=torch.float32), []
    torch.compiler.reset()
    for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        a, b = leaf(x, x.dtype), leaf(p, p.dtype)
        f(a, ids, b).square().sum().backward()
        grads.append((a.grad, b.grad))
    for mine, theirs in zip(*grads, strict=True):
        assert relative_error(mine, theirs) < 2e-6
    adapters = ((Adapter(torch.randn(E, 4, H), torch.randn(E, 2 * I, 4).requires_grad_()),), ())
    grads = []
    for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        (grad,) = torch.autograd.grad(f(x, ids, p, adapters).square().sum(), adapters[0][0].b)
        grads.append(grad)
    assert relative_error(*grads) < 2e-6
    compiled, a = torch.compile(linear(), fullgraph=True, backend="aot_eager"), leaf(x, x.dtype)
    compiled(a).sum().backward()
    want = leaf(x, x.dtype)
    linear()(want).sum().backward()
    assert relative_error(a.grad, want.grad) < 2e-6
