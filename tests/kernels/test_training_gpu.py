"""Gradients on a GPU, on each of its backends: small sizes against the float64 oracle, and larger ones."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs a GPU of compute capability 8.0 or above", allow_module_level=True)

from moe_nvfp4 import backends, stages  # noqa: E402
from moe_nvfp4.kernels.backend import dequantized  # noqa: E402
from moe_nvfp4.linear import NVFP4Linear  # noqa: E402
from moe_nvfp4.ops import Adapter  # noqa: E402
from moe_nvfp4.weights import Gate  # noqa: E402
from tests.common import random_layer, relative_error  # noqa: E402
from tests.gradients import CLOSE, GATES, E, H, I, batch, compare, dense, leaf  # noqa: E402

GPU = torch.device("cuda", 0)
BACKENDS = [name for name in ("sm90", "portable") if not backends.named(name).unavailable(backends.Device.of(GPU))]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_BACKEND", request.param)
    yield request.param


def on_gpu(*args, **kwargs):
    return random_layer(*args, **kwargs).to(GPU)


def large(dtype=torch.bfloat16, E=16, H=512, T=700, top_k=4):
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(T, E, generator=g).topk(top_k).indices
    ids[(torch.rand(ids.shape, generator=g) < 0.1) | (ids == 3)] = -1  # expert 3 has no tokens
    return torch.randn(T, H, generator=g).to(GPU, dtype), ids.to(GPU), torch.rand(T, top_k, generator=g).to(GPU)


def oracle(layer, x, ids, p, adapters=((), ())):
    """The gradients in float64, expert by expert."""
    (w13, w2), y = dense(layer), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for a, b in adapters[0]:
        w13 = w13 + b @ a
    for a, b in adapters[1]:
        w2 = w2 + b @ a
    for e in range(layer.num_experts):
        token, slot = (ids == e).nonzero().unbind(1)
        out = layer.gate(x[token] @ w13[e].T) @ w2[e].T
        y = y.index_add(0, token, out * p[token, slot, None])
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_gradients(gate, dtype, backend):
    if backend == "sm90" and dtype == torch.float16:
        pytest.skip("Hopper's kernels take bf16")
    for bias in (None, torch.float32):
        layer = on_gpu(E, H, I, GATES[gate], bias=bias)
        inputs = [t.to(GPU) for t in batch(dtype)]
        compare(layer, *inputs, CLOSE[dtype])
    compare(layer, *inputs, 2 * CLOSE[dtype], train_biases=True)
    none = [t[:0] for t in inputs]
    leaf_x = leaf(none[0], dtype)
    layer(leaf_x, *none[1:]).sum().backward()
    assert leaf_x.grad.shape == (0, H)


@pytest.mark.parametrize("scratch", [1 << 29, 1 << 20])
def test_larger_sizes_and_several_windows(scratch, backend, monkeypatch):
    monkeypatch.setattr(stages, "SCRATCH", scratch)
    layer, (x, ids, p) = on_gpu(16, 512, 256), large()
    grads = []
    for _ in range(2):
        a, b = leaf(x, x.dtype), leaf(p, p.dtype)
        layer(a, ids, b).backward(x)
        grads.append((a.grad, b.grad))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    a64, b64 = leaf(x), leaf(p)
    layer.unpack()
    oracle(layer, a64, ids, b64).backward(x.double())
    for mine, theirs in zip(grads[0], (a64, b64), strict=True):
        assert relative_error(mine, theirs.grad) < CLOSE[x.dtype]
        assert torch.cosine_similarity(mine.double().flatten(), theirs.grad.flatten(), dim=0) > 0.9999


@pytest.mark.parametrize("hook", ["none", "biases", "own gate", "norm", "factors", "adapters"])
@pytest.mark.parametrize("activations, static", [("bf16", False), ("nvfp4", False), ("nvfp4", True)])
def test_the_same_bits_with_gradients_as_without(hook, activations, static, backend, monkeypatch):
    if backend == "sm90" and activations != "bf16":  # with hooks, Triton's kernels run
        monkeypatch.delenv("MOE_NVFP4_BACKEND")
    gate, bias = Gate("raw") if hook == "own gate" else Gate(), torch.bfloat16
    layer = random_layer(16, 512, 256, gate, activations, bias, static).to(GPU)
    layer.own_gate = lambda z: torch.tanh(z[:, :256]) * z[:, 256:]
    x, ids, p = large()
    g = torch.Generator().manual_seed(2)
    a, b = (torch.randn(s, generator=g).to(GPU, x.dtype) * 0.05 for s in ((16, 8, 512), (16, 512, 8)))
    if hook == "biases":
        layer.down_proj_bias.requires_grad_()
    elif hook == "norm":
        layer.post_expert_norm = torch.nn.RMSNorm(512, device=GPU, dtype=x.dtype)
    elif hook == "factors":
        layer.add_pre_quant_scales(torch.float32)
    adapters = ((Adapter(a, b),), ()) if hook == "adapters" else ((), ())
    for T in (1, 7, len(x)):
        with torch.no_grad():
            want = layer(x[:T], ids[:T], p[:T], adapters)
        assert torch.equal(layer(leaf(x[:T], x.dtype), ids[:T], leaf(p[:T], p.dtype), adapters), want)


@pytest.mark.parametrize("r", [4, 16])
def test_adapters(r, backend):
    layer, (x, ids, p) = on_gpu(16, 512, 256), large()
    g = torch.Generator().manual_seed(2)

    def adapter(N, K):
        return Adapter(*(torch.randn(s, generator=g).to(GPU) * 0.05 for s in ((16, r, K), (16, N, r))))

    adapters = ((adapter(512, 512),), (adapter(512, 256),))
    mine = tuple(tuple(Adapter(*(leaf(t, t.dtype) for t in one)) for one in some) for some in adapters)
    theirs = tuple(tuple(Adapter(*(leaf(t) for t in one)) for one in some) for some in adapters)
    a, b, a64, b64 = leaf(x, x.dtype), leaf(p, p.dtype), leaf(x), leaf(p)
    y = layer(a, ids, b, mine)
    y.backward(x)
    layer.unpack()
    y64 = oracle(layer, a64, ids, b64, theirs)
    y64.backward(x.double())
    pairs = [(y, y64), (a.grad, a64.grad), (b.grad, b64.grad)]
    for which in (0, 1):
        pairs += [(m.grad, t.grad) for m, t in zip(mine[which][0], theirs[which][0], strict=True)]
    for i, pair in enumerate(pairs):
        assert relative_error(*pair) < CLOSE[x.dtype], i


def test_w4a4_equals_the_cpu(backend):
    layer, inputs, grads = random_layer(16, 512, 256, activations="nvfp4"), large(), []
    for device in ("cpu", GPU):
        layer.to(device)
        x, ids, p = (t.to(device) for t in inputs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOE_NVFP4_BACKEND", backend if device == GPU else "cpu")
            a, b = leaf(x, x.dtype), leaf(p, p.dtype)
            layer(a, ids, b).backward(x)
        grads.append((a.grad.cpu(), b.grad.cpu()))
    for mine, theirs in zip(*grads, strict=True):
        assert relative_error(mine, theirs) < 2e-2


def test_compiled(backend):
    layer, (x, ids, p), grads = on_gpu(16, 512, 256), large(), []
    layer.prepare()
    for layer.post_expert_norm in (None, torch.nn.RMSNorm(512, device=GPU, dtype=x.dtype)):
        torch.compiler.reset()
        for f in (layer, torch.compile(layer, fullgraph=True)):
            a, b = leaf(x, x.dtype), leaf(p, p.dtype)
            f(a, ids, b).backward(x)
            grads.append((a.grad, b.grad))
        for mine, theirs in zip(*grads[-2:], strict=True):  # a compiled norm rounds elsewhere
            assert relative_error(mine, theirs) < (1e-3 if layer.post_expert_norm is None else 1e-2)


def test_dense_weights_of_every_layout(backend):
    """The values in fp32, rounded once, whatever the layout."""
    layer = on_gpu(3, 176, 80)
    runs = backends.named(backend)
    for name in ("w13", "w2"):
        layer.unpack()
        plain = getattr(layer.weights, name)
        plain = plain._replace(codes=plain.codes.clone(), sf=plain.sf.clone())
        layer.prepare()
        w = getattr(layer.weights, name)
        assert layer.packed == (backend == "sm90")
        for columns in (slice(0, w.K), slice(64, w.K)):
            for dtype in (torch.bfloat16, torch.float16):
                want = dequantized(plain, slice(0, 3), columns, dtype)
                assert torch.equal(runs.dequantize(w, slice(0, 3), columns, dtype), want)


@pytest.mark.parametrize("T", [5, 300])
def test_linear(T, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "portable")
    layer = NVFP4Linear(512, 384, torch.bfloat16, device=GPU)
    layer.weight.data.random_(0, 256)
    layer.weight_sf.data.random_(0x30, 0x40)
    layer.weight_global_scale.data.fill_(0.01)
    x, dy = torch.randn(T, 512, device=GPU).bfloat16(), torch.randn(T, 384, device=GPU).bfloat16()
    layer.bias.requires_grad_()
    a = leaf(x, x.dtype)
    layer(a).backward(dy)
    w = dequantized(layer_weights(layer), slice(0, 1), slice(0, 512), torch.float32)[0].double()
    assert relative_error(a.grad, dy.double() @ w) < CLOSE[x.dtype]
    assert relative_error(layer.bias.grad, dy.double().sum(0)) < CLOSE[x.dtype]


def layer_weights(layer):
    return layer.weights.matrix.stacked()
