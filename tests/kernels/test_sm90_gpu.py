"""The Hopper kernels against the reference, on a machine that has one."""

import copy
import os
import random
import subprocess
import sys

import pytest
import torch

from moe_nvfp4 import format as nvfp4
from moe_nvfp4 import ready, reference
from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.ops import moe_forward
from moe_nvfp4.routing import Rows, group_by_expert
from moe_nvfp4.weights import SILU, Gate
from tests.common import THRESHOLDS, on_gpu, reference_layer, reference_rows, relative_error
from tests.kernels.test_sm90_pack import random_bytes

pytestmark = on_gpu

OAI = Gate("silu", alpha=1.702, limit=7.0, up_offset=1.0)
STEP = Gate("silu", limit=3.0, clamp_after=True)
GELU = Gate("gelu_tanh")
RELU2 = Gate("relu2", gated=False)
RAW = Gate("raw")


# ---- layers and their reference ------------------------------------------------------------------


def make_layer(E, H, I, gate=SILU, bias=False, seed=0, scales=(40, 72), activations="bf16", static=False):
    layer = NVFP4Experts(E, H, I, gate, activations, torch.bfloat16 if bias else None, input_scale=static)
    g = torch.Generator().manual_seed(seed)
    for name in (layer.up_name, "down_proj"):
        codes, sf = getattr(layer, name), getattr(layer, f"{name}_sf")
        codes.data, sf.data = random_bytes(E, codes.shape[1], codes.shape[2] * 2, seed, scales)
        if bias:
            getattr(layer, f"{name}_bias").data.normal_(generator=g)
    for name in layer.projections:  # gate and up apart
        getattr(layer, f"{name}_global_scale").data.uniform_(0.5, 1.5, generator=g).div_(8 * H**0.5)
    return layer.cuda()


def routing(T, E, top_k, seed=0, sentinels=False, dtype=torch.int64):
    g = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(T, E, generator=g).topk(top_k, -1)
    if sentinels:
        ids[torch.rand(T, top_k, generator=g) < 0.3] = E
        ids[torch.rand(T, top_k, generator=g) < 0.1] = -1
    return ids.to(dtype).cuda(), weights.cuda()


def tokens(T, H, seed=0):
    return torch.randn(T, H, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def expected(layer, x, ids, weights):
    """The reference's result with this machine's unpacked weights."""
    layer.unpack()
    return reference_layer(x, ids, weights, layer.weights)


def check(layer, T, top_k, seed=0, **kwargs):
    x = tokens(T, layer.hidden_size, seed)
    ids, weights = routing(T, layer.num_experts, top_k, seed, **kwargs)
    want = expected(layer, x, ids, weights)
    got = layer(x, ids, weights)
    assert layer.packed and got.dtype == torch.bfloat16
    assert got.isfinite().all()
    assert relative_error(got, want) < THRESHOLDS["half"]
    return got


@pytest.mark.parametrize("seed", range(220))
def test_random_problems(seed):
    pick = random.Random(seed)
    gate, bias = pick.choice([(SILU, False), (SILU, False), (OAI, True), (RELU2, False)])
    E = pick.choice([1, 2, 7, 16, 64, 130])
    top_k = pick.randint(1, min(E, 9))
    T = pick.choice([1, 2, 3, 5, 8, 17, 33, 64, 100, 200, 300, 700])
    H, I = 16 * pick.randint(1, 40), 16 * pick.randint(1, 40)
    layer = make_layer(E, H, I, gate, bias, seed)
    dtype = pick.choice([torch.int64, torch.int32])
    x, (ids, weights) = tokens(T, H, seed), routing(T, E, top_k, seed, pick.random() < 0.3, dtype)
    if pick.random() < 0.2:  # everybody to one expert
        ids.fill_(pick.randrange(E))
    weights = weights.to(pick.choice([torch.float32, torch.bfloat16]))
    want = expected(layer, x, ids, weights)
    if not (ids >= 0).logical_and(ids < E).any():
        assert not layer(x, ids, weights).any()
    else:
        assert relative_error(layer(x, ids, weights), want) < THRESHOLDS["half"]


REAL = {
    "Qwen3-30B-A3B": (128, 2048, 768, 8, SILU, False),
    "gpt-oss": (32, 2880, 2880, 4, OAI, True),
    "Mixtral slice": (8, 4096, 3584, 2, SILU, False),
    "DeepSeek-V2-Lite": (64, 2048, 1408, 6, SILU, False),
    "Qwen2-57B slice": (16, 3584, 2560, 8, SILU, False),
    "Nemotron-H slice": (32, 1024, 704, 6, RELU2, False),
    "512 experts": (512, 1024, 512, 10, SILU, False),
}


@pytest.mark.parametrize("name", REAL)
def test_real_shapes(name):
    E, H, I, top_k, gate, bias = REAL[name]
    layer = make_layer(E, H, I, gate, bias)
    for T in (1, 4, 16, 64, 256, 1024):
        check(layer, T, top_k)


@pytest.mark.parametrize("gate", [GELU, STEP, OAI], ids=["gelu_tanh", "clamp after", "oai"])
def test_gates(gate):
    check(make_layer(8, 256, 192, gate), 40, 2)


def test_many_tokens():
    """More than one routing CTA takes, more than get fp32 expert outputs, and a grid that outlives its tiles."""
    check(make_layer(16, 128, 64), 20_000, 4)
    check(make_layer(4, 64, 64), 65_536, 1)
    check(make_layer(16, 64, 64), 40_000, 4)  # more than are done at a time


def test_no_tokens_and_unrouted_tokens():
    layer = make_layer(4, 64, 64)
    assert layer(tokens(0, 64), *routing(0, 4, 2)).shape == (0, 64)
    ids, weights = routing(5, 4, 2)
    assert not layer(tokens(5, 64), torch.full_like(ids, 4), weights).any()


@pytest.mark.parametrize("T", [8, 16, 24, 32, 48, 64, 80, 96, 128])
def test_dequantization_is_exact(T):
    """One-hot tokens return the weights themselves: every scale times every code, in every tile shape."""
    K, N = 256, 128
    layer = make_layer(1, K, N, RAW, scales=(0, 127))
    layer.gate_proj_global_scale.data.fill_(1.0), layer.up_proj_global_scale.data.fill_(1.0)
    want = nvfp4.dequantize(layer.gate_up_proj.data, layer.gate_up_proj_sf.data, None)[0]
    layer.prepare()
    for first in range(0, K, T):
        x = torch.eye(K)[first : first + T].bfloat16().cuda()
        ids = torch.zeros(x.shape[0], 1, dtype=torch.int64, device="cuda")
        groups = group_by_expert(ids, 1)
        rows = Rows(x, None, None, groups.token)
        from moe_nvfp4.kernels.sm90 import backend as sm90

        h = sm90.gemm1_swiglu(rows, layer.weights, groups, torch.bfloat16)
        assert torch.equal(h.values.float(), want[:, first : first + T].T)


# ---- NVFP4 activations ---------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("K", [16, 208, 2048, 14336])
def test_rows_are_quantized_to_the_bit(K, dtype, static):
    from moe_nvfp4.kernels.sm90 import backend as sm90

    ids, _ = routing(50, 8, 3, sentinels=True)
    x = tokens(50, K).to(dtype)
    x[:8] *= torch.logspace(-30, 30, 8).cuda()[:, None]  # beyond the short division, both ways
    x[8], x[9, ::3], x[10, 5] = 0, 0, float("nan")
    scale = torch.logspace(-4, 0, 8).cuda() if static else None
    groups, _, _, rows = sm90.route(ids, 8, 1, x, scale)
    codes_times_sf, scales = reference_rows(x, groups.token, scale, groups)
    index = rows.index[: len(scales)].long()
    values, row_scale = rows.values[index], rows.scale[index]
    assert torch.equal(row_scale.nan_to_num(-1), scales.nan_to_num(-1))
    assert torch.equal(values.float().nan_to_num(-1), codes_times_sf.nan_to_num(-1))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("T", [1, 7, 30, 150, 600])
@pytest.mark.parametrize("gate, bias", [(SILU, False), (OAI, True), (RELU2, False)], ids=["silu", "oai", "relu2"])
def test_w4a4(gate, bias, T, static):
    layer = make_layer(16, 512, 192, gate, bias, activations="nvfp4", static=static)
    for name in ("up_proj", "down_proj") if static else ():
        getattr(layer, f"{name}_input_scale").data.uniform_(1e-3, 2e-3)
    x, (ids, weights) = tokens(T, 512), routing(T, 16, 4, sentinels=True)
    want = expected(layer, x, ids, weights)
    got = layer(x, ids, weights)
    assert layer.packed
    assert relative_error(got, want) < THRESHOLDS["w4a4"]
    assert torch.equal(got, layer(x, ids, weights))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("T", [1, 20, 100, 700, 3000])
def test_h_is_quantized_to_the_bit(T, static):
    from tests.kernels.hopper_layers import quantized_h

    layer = make_layer(8, 256, 1200, activations="nvfp4", static=static)
    if static:
        layer.up_proj_input_scale.data.fill_(1)
        layer.down_proj_input_scale.data.copy_(torch.logspace(0, 4, 8))
    found, want = quantized_h(layer, routing(T, 8, 2, sentinels=T > 1)[0])
    assert torch.equal(found, want)


def test_w4a4_with_parts_of_k():
    layer = make_layer(4, 256, 4096, activations="nvfp4")
    x, (ids, weights) = tokens(5, 256), routing(5, 4, 2)
    want = expected(layer, x, ids, weights)
    assert relative_error(layer(x, ids, weights), want) < THRESHOLDS["w4a4"]


@pytest.mark.parametrize("static", [False, True])
def test_switching_activations(static):
    layer = make_layer(8, 256, 128)
    if static:
        layer.set_input_scales(torch.tensor(2e-3), torch.tensor(2e-3))
    x, (ids, weights) = tokens(20, 256), routing(20, 8, 2)
    first = layer(x, ids, weights)
    layer.activations = "nvfp4"
    assert relative_error(layer(x, ids, weights), first) > THRESHOLDS["half"]
    layer.activations = "bf16"
    assert torch.equal(layer(x, ids, weights), first)


# ---- stages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [3, 40, 200])
def test_own_gate_and_norm_between_the_stages(T):
    layer = make_layer(8, 256, 128, RAW)
    layer.own_gate = lambda h: torch.tanh(h[:, :128]) * h[:, 128:]
    layer.post_expert_norm = torch.nn.RMSNorm(256).cuda().bfloat16()
    x, (ids, weights) = tokens(T, 256), routing(T, 8, 3, sentinels=True)
    got = layer(x, ids, weights)
    layer.unpack()
    want = moe_forward(x.float(), ids, weights, layer.weights, layer.own_gate, layer.post_expert_norm.float())
    assert relative_error(got, want) < 2 * THRESHOLDS["half"]  # own_gate runs in bf16 there


# ---- manners -------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 30, 600])
def test_the_same_bits_twice_and_on_two_streams(T):
    layer = make_layer(32, 512, 256)
    x, (ids, weights) = tokens(T, 512), routing(T, 32, 4)
    want = layer(x, ids, weights)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(layer(x, ids, weights))
    torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in results)


@pytest.mark.parametrize("T", [1, 20, 300])
def test_captured_in_a_cuda_graph(T):
    layer = make_layer(16, 256, 128)
    x, (ids, weights) = tokens(T, 256), routing(T, 16, 2)
    layer(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, ids, weights)
    x.copy_(tokens(T, 256, seed=1))
    ids.copy_(routing(T, 16, 2, seed=1)[0])
    graph.replay()
    got = y.clone()
    assert torch.equal(got, layer(x, ids, weights))


def test_compiles_as_one_graph():
    layer = make_layer(16, 256, 128)
    layer.prepare()
    compiled = torch.compile(layer, fullgraph=True)
    for T in (1, 7, 33):
        x, (ids, weights) = tokens(T, 256), routing(T, 16, 2)
        assert torch.equal(compiled(x, ids, weights), layer(x, ids, weights))


@pytest.mark.filterwarnings("ignore:4-bit weights are brought", "ignore:The CUDA Graph is empty")
def test_weights_are_not_packed_in_a_capture():
    """Packing reads values back to the host: compiled code does so at every call if no one has called prepare()."""
    layer = make_layer(16, 256, 128)
    x, (ids, weights) = tokens(7, 256), routing(7, 16, 2)
    compiled = torch.compile(layer, fullgraph=True)
    want = compiled(x, ids, weights)
    with pytest.raises(RuntimeError, match="prepare_model"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        compiled(x, ids, weights)
    assert torch.equal(layer(x, ids, weights), want)


def test_a_token_of_nan_spoils_itself_only():
    layer = make_layer(8, 256, 128)
    for T in (5, 70, 300):
        x, (ids, weights) = tokens(T, 256), routing(T, 8, 2)
        want = layer(x, ids, weights)
        x[2] = float("nan")
        got = layer(x, ids, weights)
        assert got[2].isnan().all()
        got[2] = want[2]
        assert torch.equal(got, want)


def test_packing_costs_no_bytes_and_loses_none():
    layer = make_layer(8, 256, 128, scales=(0, 127))
    layer.down_proj_sf.data[1, 2, 3] = 0  # a zero scale whose codes are not zero
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    size = sum(p.numel() * p.element_size() for p in layer.parameters())
    layer.prepare()
    assert layer.packed
    assert sum(p.numel() * p.element_size() for p in layer.parameters()) == size
    after = layer.state_dict()
    assert not layer.packed
    assert all(torch.equal(after[name], before[name]) for name in before)
    layer.prepare()
    other = make_layer(8, 256, 128, seed=9)
    other.prepare()
    other.load_state_dict(layer.state_dict())
    x, (ids, weights) = tokens(4, 256), routing(4, 8, 2)
    assert torch.equal(other(x, ids, weights), layer(x, ids, weights))
    moved = layer.cpu()
    assert not moved.packed and all(torch.equal(moved.state_dict()[n], before[n].cpu()) for n in before)


def test_other_dtypes_run_on_the_reference():
    layer = make_layer(8, 256, 128)
    x, (ids, weights) = tokens(9, 256), routing(9, 8, 2)
    fast = layer(x, ids, weights)
    slow = layer(x.float(), ids, weights)
    assert slow.dtype == torch.float32 and not layer.packed
    assert relative_error(fast, slow) < THRESHOLDS["half"]


def test_an_illegal_id_is_reported():
    code = (
        "import torch; from tests.kernels.test_sm90_gpu import *; layer = make_layer(4, 64, 64); x = tokens(3, 64)\n"
        "ids, weights = routing(3, 4, 2); ids[1, 1] = 7\n"
        "try: layer(x, ids, weights); torch.cuda.synchronize()\n"
        "except Exception as error: print('raised', type(error).__name__)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert "raised" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_no_call_compiles_after_prepare(activations, monkeypatch):
    from moe_nvfp4.kernels.common import ahead

    monkeypatch.setenv("MOE_NVFP4_COMPILE", "ahead")
    layer = make_layer(16, 256, 128, activations=activations)
    ready.prepare(layer, top_k=3)
    before = ahead.compilations
    for T in (1, 2, 5, 11, 23, 47, 65, 101, 333, 777, 1234, 3000, 9000, 50000):
        x, (ids, weights) = tokens(T, 256), routing(T, 16, 3)
        assert layer(x, ids, weights).isfinite().all() and layer(x, ids.int(), weights.bfloat16()).isfinite().all()
    assert ahead.compilations == before


def make_linear(N, K, bias=True, activations="bf16", static=False):
    linear = NVFP4Linear(K, N, torch.bfloat16 if bias else None, activations, static)
    if static:
        linear.input_scale.data.fill_(1.5e-3)
    (codes,), (sf,) = random_bytes(1, N, K, scales=(40, 72))
    linear.weight.data, linear.weight_sf.data = codes, sf
    linear.weight_global_scale.data.fill_(1 / (8 * K**0.5))
    if bias:
        linear.bias.data.normal_(generator=torch.Generator().manual_seed(N))
    return linear.cuda()


@pytest.mark.parametrize("T", [1, 8, 9, 30, 64, 100, 150, 257, 700, 1500])
@pytest.mark.parametrize(("N", "K"), [(4096, 2048), (576, 7168), (30000, 256), (80, 144), (1024, 8192)])
def test_linears(N, K, T):
    """Tiles of all sizes, K in parts and whole, dense weights."""
    linear, x = make_linear(N, K, bias=N % 3 == 0), tokens(T, K)
    dense = nvfp4.dequantize(linear.weight, linear.weight_sf, linear.weight_global_scale).float()
    want = x.float() @ dense.T + (0 if linear.bias is None else linear.bias.float())
    got = linear(x)
    assert linear.packed and got.dtype == torch.bfloat16 and got.isfinite().all()
    assert relative_error(got, want) < THRESHOLDS["half"]
    assert torch.equal(linear(x), got)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("T", [1, 9, 64, 257, 1500])
@pytest.mark.parametrize(("N", "K"), [(4096, 2048), (576, 7168), (1024, 28672)])
def test_linears_of_nvfp4_rows(N, K, T, static):
    linear, x = make_linear(N, K, N % 3 == 0, "nvfp4", static), tokens(T, K)
    x[T // 2] *= 1e-2
    with torch.no_grad():
        want = reference.linear(x.float(), linear.weights)
        got = linear(x)
    assert linear.packed and got.dtype == torch.bfloat16
    assert relative_error(got, want) < 1.5 * THRESHOLDS["half"]  # dense weights: another rounding
    assert torch.equal(linear(x), got)


class Attention(torch.nn.Module):
    """q, k and v, which read the same rows."""

    def __init__(self, K, activations, bias):
        super().__init__()
        for i, (name, N) in enumerate({"q_proj": 1024, "k_proj": 256, "v_proj": 208}.items()):
            self.add_module(name, make_linear(N, K, bias, activations))
            getattr(self, name).weight_global_scale.data.mul_(3**i)

    def forward(self, x):
        return [linear(x) for linear in self.children()]


@pytest.mark.parametrize("activations, bias", [("bf16", True), ("bf16", False), ("nvfp4", True)])
@torch.no_grad()
def test_joined_linears(monkeypatch, activations, bias):
    """Eager, in graphs and compiled; after `ready.prepare` nothing compiles, and the bytes come back."""
    from moe_nvfp4.kernels.common import ahead

    monkeypatch.setenv("MOE_NVFP4_COMPILE", "ahead")
    model = Attention(2048, activations, bias)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    weights = [copy.deepcopy(linear).weights for linear in model.children()]
    ready.prepare(model)
    compiled, count = torch.compile(model, fullgraph=True), ahead.compilations
    for T in (1, 7, 20, 50, 90, 333, 2000):
        x = tokens(T, 2048)
        found = model(x)
        for y, w, again in zip(found, weights, compiled(x), strict=True):
            assert relative_error(y, reference.linear(x.float(), w)) < 1.5 * THRESHOLDS["half"]
            assert torch.equal(again, y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        x.copy_(tokens(T, 2048, seed=1))
        graph.replay()
        assert all(map(torch.equal, y, model(x))) and not torch.equal(y[2], found[2])
    assert ahead.compilations == count
    model.k_proj.weight_global_scale.mul_(2)
    assert torch.equal(model(x)[1], y[1] * 2) if not bias else not torch.equal(model(x)[1], y[1])
    model.k_proj.weight_global_scale.div_(2)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_linears_in_graphs_and_compiled(monkeypatch, activations):
    """After `ready.prepare` nothing compiles; afterwards the bytes are the checkpoint's."""
    from moe_nvfp4.kernels.common import ahead

    monkeypatch.setenv("MOE_NVFP4_COMPILE", "ahead")
    linear = make_linear(1024, 2048, activations=activations)
    before = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    ready.prepare(linear)
    compiled, count = torch.compile(linear, fullgraph=True), ahead.compilations
    for T in (1, 7, 20, 50, 90, 333, 2000, 9000):
        x = tokens(T, 2048)
        want = linear(x)
        assert torch.equal(compiled(x), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(x)
        x.copy_(tokens(T, 2048, seed=1))
        graph.replay()
        assert torch.equal(y, linear(x)) and not torch.equal(y, want)
    assert ahead.compilations == count
    after = linear.state_dict()
    assert not linear.packed and all(torch.equal(after[name], before[name]) for name in before)


def test_gradients_pass_through_linears():
    linear, x, dy = make_linear(384, 512), tokens(70, 512), tokens(70, 384, seed=1)
    dense = nvfp4.dequantize(linear.weight, linear.weight_sf, linear.weight_global_scale).float()
    linear.bias.requires_grad_()
    x.requires_grad_()
    linear(x).backward(dy)
    assert linear.packed
    assert relative_error(x.grad, dy.float() @ dense) < THRESHOLDS["half"]
    assert relative_error(linear.bias.grad, dy.float().sum(0)) < THRESHOLDS["half"]


def test_other_linears_run_on_other_kernels():
    linear, x = make_linear(256, 512), tokens(9, 512)
    fast, half = linear(x), linear(x.half())
    assert half.dtype == torch.float16 and not linear.packed and linear.backend(torch.float16).name == "portable"
    assert relative_error(half, fast.float()) < THRESHOLDS["half"]
    linear.activations = "nvfp4"
    assert linear.backend().name == "sm90" and relative_error(linear(x), fast.float()) < 0.2


def test_kernels_are_kept_on_disk(tmp_path):
    code = (
        "import time, torch; from tests.kernels.test_sm90_gpu import *; from moe_nvfp4.kernels.common import launch\n"
        "layer = make_layer(4, 64, 64); x = tokens(3, 64); r = routing(3, 4, 2); layer.prepare(); import cutlass\n"
        "t = time.time(); y = layer(x, *r); torch.cuda.synchronize(); print(time.time() - t, y.double().sum().item())"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MOE_NVFP4_CACHE": str(tmp_path)}
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env) for _ in range(2)]
    (first, a), (second, b) = (run.stdout.split() for run in runs)
    assert a == b
    assert float(second) < float(first) / 2
    assert list((tmp_path / "kernels").glob("*.o"))
