"""Weights and calls of more than 2**32 bytes on a GPU: some rows beside the reference, for their few experts."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs a GPU of compute capability 8.0 or above", allow_module_level=True)

from moe_nvfp4 import NVFP4Experts, backends  # noqa: E402
from moe_nvfp4 import format as nvfp4  # noqa: E402
from moe_nvfp4.linear import NVFP4Linear  # noqa: E402
from tests.common import HOPPER, THRESHOLDS, reference_layer, relative_error  # noqa: E402

GIB = 1 << 30
KINDS = [
    pytest.param("sm90", marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and nvidia-cutlass-dsl")),
    "sm80", "portable",
]  # fmt: skip


@pytest.fixture(params=KINDS)
def backend(request, monkeypatch):
    if torch.cuda.mem_get_info()[0] < 70 * GIB:
        pytest.skip("needs 70 GiB of free GPU memory")
    monkeypatch.setenv("MOE_NVFP4_BACKEND", request.param)
    backends.forget()
    yield request.param
    monkeypatch.undo()
    backends.forget()
    torch.cuda.empty_cache()


def filled(module):
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.uint8:
            parameter.data.random_(48, 64) if name.endswith("_sf") else parameter.data.random_(0, 256)
        else:
            parameter.data.uniform_(1e-3, 3e-3)
    return module


def some_of(T):
    """The first, the last and some other tokens."""
    return torch.cat([torch.arange(12), torch.randint(12, T - 12, (24,)).unique(), torch.arange(T - 12, T)]).cuda()


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_experts(backend, activations):
    """Kimi-K2's layer: its gate and up are 5.6e9 bytes, and 150,000 tokens have 8.6e9 numbers of down's outputs."""
    torch.manual_seed(0)
    E, H, I, top_k, T = 384, 7168, 2048, 8, 150_000
    layer = filled(NVFP4Experts(E, H, I, activations=activations, device="cuda"))
    few = NVFP4Experts(12, H, I, activations=activations, device="cuda")
    kept = torch.tensor([0, 1, 127, 128, 191, 192, *range(E - 6, E)]).cuda()
    for name, parameter in few.named_parameters():
        parameter.data.copy_(layer.get_parameter(name)[kept])
    assert layer.backend().name == backend and layer.gate_up_proj.numel() > 1 << 32
    x, top_k_weights = torch.randn(T, H, dtype=torch.bfloat16, device="cuda"), torch.rand(T, top_k, device="cuda")
    ids = torch.randint(0, E // top_k, (T, top_k), device="cuda") + E // top_k * torch.arange(top_k, device="cuda")
    rows = some_of(T)
    of_few = torch.stack([torch.randperm(12)[:top_k] for _ in rows]).cuda()
    ids[rows] = kept[of_few]
    want = reference_layer(x[rows], of_few, top_k_weights[rows], few.weights)
    for count in (len(rows), T):  # the few alone, too: then all offsets that are large are those of weights
        here = rows if count < T else slice(None)
        with torch.no_grad():
            y = layer(x[here], ids[here], top_k_weights[here])
        found = y if count < T else y[rows]
        limit = THRESHOLDS["half" if activations == "bf16" else "w4a4"]
        if backend == "portable" and activations == "nvfp4" and count == T:
            limit *= 3  # torch's grouped product rounds h before its codes are chosen
        assert relative_error(found, want) < limit


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_linear(backend, activations):
    """A head of 262,144 words: 5.2e9 numbers."""
    torch.manual_seed(0)
    K, N, T = 5376, 262_144, 20_000
    linear = filled(NVFP4Linear(K, N, activations=activations, device="cuda"))
    columns = torch.cat([torch.arange(64), N // 2 + torch.arange(64), N - 64 + torch.arange(64)]).cuda()
    weight = [t.data[columns] for t in (linear.weight, linear.weight_sf)]
    dense = nvfp4.dequantize(*weight, linear.weight_global_scale.data).double()
    assert linear.backend().name == backend
    x, rows = torch.randn(T, K, dtype=torch.bfloat16, device="cuda"), some_of(T)
    with torch.no_grad():
        y = linear(x)
        few = linear(x[rows])
    assert relative_error(y[rows], few) < THRESHOLDS["half"]
    if activations == "bf16":
        assert relative_error(y[rows][:, columns], x[rows].double() @ dense.T) < THRESHOLDS["half"]
