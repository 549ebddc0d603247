"""The portable backend on a GPU: modules, captured and compiled calls, several streams, sizes of real models."""

import os
import subprocess
import sys
import threading

import pytest
import torch

pytest.importorskip("triton", reason="the portable backend's kernels are Triton's")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs a GPU of compute capability 8.0 or above", allow_module_level=True)

from moe_nvfp4 import NVFP4Experts, backends, ready, reference  # noqa: E402
from moe_nvfp4 import format as nvfp4  # noqa: E402
from moe_nvfp4.kernels.common import ahead  # noqa: E402
from moe_nvfp4.linear import NVFP4Linear  # noqa: E402
from tests.common import THRESHOLDS, reference_layer, relative_error  # noqa: E402
from tests.kernels.test_portable import GATES, batch, make_weights  # noqa: E402


@pytest.fixture(autouse=True)
def portable(monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "portable")
    backends.forget()
    yield
    monkeypatch.undo()
    backends.forget()


def module(E, H, I, activations="bf16"):
    experts = NVFP4Experts(E, H, I, activations=activations, device="cuda")
    for name, parameter in experts.named_parameters():
        if parameter.dtype == torch.uint8:
            parameter.data.random_(40, 72) if name.endswith("_sf") else parameter.data.random_(0, 256)
        else:
            parameter.data.uniform_(1e-3, 3e-3)
    assert experts.backend().name == "portable"
    return experts


def make_linear(N, K, activations="bf16", static=False):
    linear = NVFP4Linear(K, N, torch.bfloat16, activations, static, device="cuda")
    if static:
        linear.input_scale.data.fill_(1.5e-3)
    linear.weight.data.random_(0, 256)
    linear.weight_sf.data.random_(40, 72)
    linear.weight_global_scale.data.fill_(0.01)
    linear.bias.data.normal_()
    assert linear.backend().name == "portable"
    return linear


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize("T", [1, 3, 8, 20, 70, 200, 900, 3000])
@pytest.mark.parametrize(("E", "H", "I", "top_k"), [(128, 2048, 768, 8), (8, 1024, 3584, 2), (32, 2880, 2880, 4)])
def test_sizes_of_models(E, H, I, top_k, T, activations):
    """From one token to enough for dense weights, which round GEMM 1's sums once more, so that some of h's codes
    differ."""
    w = make_weights(E, H, I, activations=activations, bias=E == 32)
    x, ids, weights = batch(T, H, E, top_k)
    ids[torch.rand(ids.shape, device="cuda") < 0.05] = -1
    layer = backends.named("portable").experts
    got = layer(x, ids, weights, w)
    threshold = 2 * THRESHOLDS["w4a4"] if activations == "nvfp4" else 1.5 * THRESHOLDS["half"]
    assert relative_error(got, reference_layer(x, ids, weights, w)) < threshold
    assert torch.equal(layer(x, ids, weights, w), got)


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_no_call_compiles_after_prepare(activations, monkeypatch):
    """Whatever the number of tokens and the dtypes of the router."""
    monkeypatch.setenv("MOE_NVFP4_COMPILE", "ahead")
    experts, linear = module(16, 320, 192, activations), make_linear(96, 320, activations)
    ready.prepare(torch.nn.ModuleList([experts, linear]), top_k=3)
    before = ahead.compilations
    for T in (1, 2, 5, 11, 23, 47, 65, 101, 333, 777, 1234, 3000, 9000, 50000):
        x, ids, weights = batch(T, 320, 16, 3)
        assert experts(x, ids, weights).isfinite().all() and linear(x).isfinite().all()
        assert experts(x, ids.int(), weights.bfloat16()).isfinite().all()
    assert ahead.compilations == before


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_and_uneven_routing(gate, dtype):
    for T, H, I in ((2, 100, 60), (50, 520, 300), (700, 72, 1000)):
        w = make_weights(9, H, I, GATES[gate], bias=True)
        x, ids, weights = batch(T, H, 9, 4, dtype)
        ids[T // 2 :] = torch.tensor([0, 1, 2, 9], device="cuda")
        got = backends.named("portable").experts(x, ids, weights, w)
        assert relative_error(got, reference_layer(x, ids, weights, w)) < THRESHOLDS["half"]


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize("T", [4, 2000])
def test_cuda_graphs(T, activations):
    """Replays read new inputs, routing included."""
    experts, inputs = module(16, 256, 128, activations), batch(T, 256, 16, 4)
    want = experts(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*inputs)
    graph.replay()
    assert torch.equal(out, want)
    for old, new in zip(inputs, batch(T, 256, 16, 4), strict=True):
        old.copy_(new)
    graph.replay()
    assert torch.equal(out, experts(*inputs))


def test_torch_compile():
    experts, linear, inputs = module(16, 256, 128), make_linear(64, 256), batch(5, 256, 16, 4)

    def f(x, ids, weights):
        return linear(experts(x, ids, weights) * 2)

    compiled = torch.compile(f, fullgraph=True)
    with torch.inference_mode():
        assert relative_error(compiled(*inputs), f(*inputs)) < THRESHOLDS["half"]


def test_several_streams_and_threads():
    experts = module(16, 512, 256)
    batches = [batch(T, 512, 16, 4) for T in (1, 7, 30, 120)]
    want, failed = [experts(*b) for b in batches], []
    torch.cuda.synchronize()

    def run(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                got = experts(*batches[i])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(got, want[i]):
                    failed.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not failed


@pytest.mark.parametrize("T", [1, 16, 100, 1500])
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (1000, 512), (151936, 256)])
def test_linears(N, K, T):
    linear, x = make_linear(N, K), torch.randn(T, K, device="cuda").bfloat16()
    got = linear(x)
    want = x.float() @ nvfp4.dequantize(linear.weight, linear.weight_sf, 0.01).T + linear.bias.float()
    assert relative_error(got, want) < THRESHOLDS["half"]


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize("T", [1, 16, 100, 1500])
def test_joined_linears(T, activations):
    """In the forward of their parent, and its graph, q, k and v are one launch; elsewhere each is alone."""
    attention = torch.nn.Module()
    for name, N in (("q_proj", 2048), ("k_proj", 256), ("v_proj", 144)):
        attention.add_module(name, make_linear(N, 512, activations))
        getattr(attention, name).weight_global_scale.data.mul_(1 + N / 1000)
    attention.forward = lambda x: [linear(x) for linear in attention.children()]
    x = torch.randn(T, 512, device="cuda").bfloat16()
    with torch.no_grad():
        want = attention(x)
        ready.prepare(attention)
        assert all(linear.joined is not None for linear in attention.children())
        found = attention(x)
        assert len({y.untyped_storage().data_ptr() for y in found}) == 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attention(x)
        graph.replay()
        for mine, again, theirs in zip(found, captured, want, strict=True):
            assert relative_error(mine, theirs) < 1.5 * THRESHOLDS["half"] and torch.equal(mine, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("T", [1, 16, 100, 1500])
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (1000, 512)])
def test_linears_of_nvfp4_rows(N, K, T, static, dtype):
    linear, x = make_linear(N, K, "nvfp4", static), torch.randn(T, K, device="cuda").to(dtype)
    x[T // 2] *= 1e-2
    want = reference.linear(x.float(), linear.weights)
    assert relative_error(linear(x), want) < 1.5 * THRESHOLDS["half"]


def test_an_illegal_id_is_an_error():
    code = (
        "import torch; from moe_nvfp4.kernels.portable.backend import route\n"
        "route(torch.tensor([0, 1, 7], device='cuda'), 3, 8); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode and "expert ids must lie in" in done.stdout + done.stderr
