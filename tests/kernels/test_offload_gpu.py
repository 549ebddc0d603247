"""Experts on the CPU beside a real GPU: bits, graphs, prompts and gradients."""

import time
from os import truncate

import pytest
import torch

from moe_nvfp4 import ready
from moe_nvfp4.kernels.common import ahead
from moe_nvfp4.kernels.offload import backend as offload
from moe_nvfp4.kernels.offload import files, pages, upload
from moe_nvfp4.ops import Adapter
from moe_nvfp4.weights import ExpertWeights, Gate, read_spec
from tests.common import THRESHOLDS, random_layer, relative_error
from tests.kernels.test_mapped import in_files
from tests.kernels.test_offload import SIZES, inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_on_a_gpu_the_bits_of_the_cpu_backend(activations):
    layer = random_layer(**SIZES, activations=activations).keep_on_cpu().to("cuda")
    for T in (0, 1, 5, 11, 2):
        batch = inputs(T, T)
        y = layer(*(t.cuda() for t in batch))
        assert y.is_cuda and torch.equal(y.cpu(), layer(*batch))


def moved(weights):
    tensors = [None if t is None else t.cuda() for t in weights.tensors()]
    return ExpertWeights.from_tensors(tensors, read_spec(weights.spec("")))


@pytest.mark.parametrize("activations, limit", [("bf16", "half"), ("nvfp4", "w4a4")])
def test_many_tokens_are_multiplied_on_the_gpu(activations, limit, monkeypatch):
    """The portable backend's bits, from pinned weights, in one piece and in several, any number of times: a buffer is
    filled only when the work with it is over."""
    layers = [random_layer(6, 1024, 1536, activations=activations, seed=i).keep_on_cpu() for i in range(3)]
    _, ids, p = inputs(300, 0)
    x = torch.randn(300, 1024).bfloat16()
    batch = [t.cuda() for t in (x, ids, p)]
    want = [offload.PORTABLE.experts(*batch, moved(layer.weights)) for layer in layers]
    for piece in (1 << 30, 10 << 20):
        monkeypatch.setattr(upload, "PIECE", piece)
        for _ in range(5):
            found = [layer(*batch) for layer in layers]
            for layer, y, w in zip(layers, found, want, strict=True):
                assert torch.equal(y, w) if piece == 1 << 30 else relative_error(y, w) < THRESHOLDS["half"]
                assert relative_error(y, layer(x, ids, p)) < THRESHOLDS[limit]
    assert pages._placed[layers[0].down_proj.data_ptr()].unpin


def test_no_call_compiles_after_prepare(monkeypatch):
    """Neither the few tokens that the CPU takes, nor the many that the GPU takes."""
    monkeypatch.setenv("MOE_NVFP4_COMPILE", "ahead")
    layer, gpu = random_layer(**SIZES | {"I": 208}).keep_on_cpu(), torch.device("cuda", 0)
    assert ready.prepare(layer, top_k=2, beside=gpu) > 0
    before = ahead.compilations
    for T in (1, 30, 300, 1000, 9000):
        x, ids, p = (t.cuda() for t in inputs(T, 0))
        layer(x, ids, p)
        layer(x, ids.int(), p.bfloat16())
    assert ahead.compilations == before


@pytest.mark.parametrize("piece, staged", [(1 << 30, 1 << 20), (10 << 20, 1 << 18), (1 << 30, 64 << 20)])
def test_many_tokens_of_weights_in_files(tmp_path, monkeypatch, piece, staged):
    """The same bits as from weights in memory, through buffers that are filled many times."""
    monkeypatch.setattr(upload, "PIECE", piece)
    monkeypatch.setattr(files, "STAGED", staged)
    layers = [random_layer(6, 1024, 1536, seed=i).keep_on_cpu() for i in range(2)]
    mapped = []
    for i, layer in enumerate(layers):
        (tmp_path / str(i)).mkdir()
        mapped.append(in_files(layer, tmp_path / str(i))[0])
    _, ids, p = inputs(300, 0)
    batch = [t.cuda() for t in (torch.randn(300, 1024).bfloat16(), ids, p)]
    want = [layer(*batch) for layer in layers]
    for _ in range(4):
        for y, w in zip([layer(*batch) for layer in mapped], want, strict=True):
            assert torch.equal(y, w)
    truncate(tmp_path / "0" / "a", 0)
    with pytest.raises(OSError, match="became shorter"):
        mapped[0](*batch)
    assert torch.equal(mapped[1](*batch), want[1])


def test_the_next_weights_come_while_the_gpu_works():
    """Two layers' weights are there before the GPU begins with the first; the third layer's wait for a buffer."""
    layers = [random_layer(6, 1024, 1536, seed=i).keep_on_cpu() for i in range(3)]
    device, found = torch.device("cuda", 0), []
    list(upload.pieces(layers[0].weights, device, offload._do))  # buffers, pinned memory
    torch.cuda.synchronize()
    ours = torch.cuda.Stream()
    with torch.cuda.stream(ours):
        for layer in layers:
            for _, w in upload.pieces(layer.weights, device, offload._do):
                found.append((w.w13.codes, upload._buffers(device).stream.record_event()))
                torch.cuda._sleep(1 << 30)  # half a second of work with them
        until = time.monotonic() + 0.3
        while time.monotonic() < until and not found[1][1].query():
            time.sleep(0.001)
        assert [event.query() for _, event in found] == [True, True, False]
        ours.synchronize()
    assert torch.equal(found[2][0].cpu(), layers[2].weights.w13.codes) and torch.equal(
        found[1][0].cpu(), layers[1].weights.w13.codes
    )


def test_in_a_cuda_graph():
    layer, stream = random_layer(**SIZES).keep_on_cpu(), torch.cuda.Stream()
    batch = [t.cuda() for t in inputs(3, 0)]
    with torch.cuda.stream(stream):
        layer(*batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = layer(layer(*batch) * 2, *batch[1:])
        workspace = offload._graphs[-1]
        for seed in range(5):
            new = inputs(3, seed)
            for t, n in zip(batch, new, strict=True):
                t.copy_(n)
            graph.replay()
            assert torch.equal(y.cpu(), layer(layer(*new) * 2, *new[1:]))
        batch[1].fill_(77)
        graph.replay()
        assert y.isnan().all()
        with pytest.raises(ValueError, match="in an earlier call"):
            layer(*batch)
        assert not workspace.over
        del graph
        torch.cuda.synchronize()
        until = time.monotonic() + 10
        while not workspace.over:  # a thread of CUDA's says so
            assert time.monotonic() < until, "CUDA does not release what the graph had"
            time.sleep(0.01)


def test_many_tokens_in_a_cuda_graph():
    """The CPU computes them, not the GPU with copied weights."""
    layer, stream, batch = random_layer(**SIZES).keep_on_cpu(), torch.cuda.Stream(), inputs(300, 0)
    there = [t.cuda() for t in batch]
    with torch.cuda.stream(stream):
        assert offload._better_on_gpu(there[0], there[1].numel(), layer.weights)
        layer(*there)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = layer(*there)
        graph.replay()
        assert torch.equal(y.cpu(), layer(*batch))


def test_what_is_not_fused_waits_for_the_gpu():
    layer = random_layer(**SIZES, gate=Gate("raw")).keep_on_cpu()
    layer.own_gate = lambda h: torch.nn.functional.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]
    batch = inputs(5, 1)
    assert torch.equal(layer(*(t.cuda() for t in batch)).cpu(), layer(*batch))


def test_gradients_go_by_way_of_the_cpu():
    layer, (x, ids, p) = random_layer(**SIZES, bias=torch.float32).keep_on_cpu(), inputs(5, 1)
    bias = layer.down_proj_bias.requires_grad_()
    E, H, I = SIZES.values()
    torch.manual_seed(0)
    starts = [x.float(), p, torch.randn(E, 4, H) * 0.1, torch.randn(E, 2 * I, 4) * 0.1]
    found = []
    for device in ("cpu", "cuda"):
        x, p, a, b = (t.detach().to(device).requires_grad_() for t in starts)
        y = layer(x, ids.to(device), p, ((Adapter(a, b),), ()))
        assert y.device == x.device
        bias.grad = None
        y.square().sum().backward()
        found.append([y, *(t.grad for t in (x, p, a, b, bias))])
    for on_cpu, beside in zip(*found, strict=True):
        assert relative_error(beside, on_cpu) < THRESHOLDS["fp32"]
