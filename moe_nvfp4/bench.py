"""Time a layer of 4-bit experts beside transformers' bf16 experts, and what this machine could do at best.

Every timed call finds its weights in memory, not in a cache. On a GPU it is the replay of a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from moe_nvfp4.experts import NVFP4Experts

Call = Callable[[], Any]


class Shape(NamedTuple):
    """A layer of SwiGLU experts."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


class Roof(NamedTuple):
    """The most bytes/s that torch reads and the most FLOP/s that it computes on a machine. Code that uses the machine
    better than torch can exceed it."""

    bandwidth: float
    flops: float


class Row(NamedTuple):
    """For one number of tokens: the seconds that the 4-bit and the bf16 layer take, the bytes that the 4-bit one must
    read, the FLOPs of either, and the least seconds that these bytes and FLOPs can take under the roof."""

    tokens: int
    nvfp4: float
    bf16: float
    bytes: float
    flops: float
    least: float
    bound: str  # by which of the two: "memory" or "arithmetic"


class CpuClock:
    """Median seconds of a call, after the caches were filled with something else."""

    def __init__(self, repeats: int = 7) -> None:
        self.repeats, self.other = repeats, torch.ones(1 << 25, dtype=torch.int64)

    def __call__(self, call: Call) -> float:
        times = []
        for _ in range(1 + self.repeats):
            self.other.sum()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return median(times[1:])


class CudaClock:
    """Median seconds of the replay of a captured call.

    Before each, L2 is filled by writing, so that nothing of the call is in it, and then by reading, so that no dirty
    lines are left for the next kernel to wait for. A rest and a few replays that don't count come first: right after
    large batches, at the GPU's power limit, small ones take up to a fifth longer.
    """

    WARM_UP, REST = 5, 0.3  # replays, seconds

    def __init__(self, repeats: int = 15) -> None:
        self.repeats = repeats
        self.dirty = torch.empty(1 << 26, dtype=torch.int32, device="cuda")
        self.clean = torch.ones(1 << 27, device="cuda")

    def __call__(self, call: Call) -> float:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # where the inputs are made
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                call()
            torch.cuda.synchronize()
            time.sleep(self.REST)
            times = [self._replay(graph) for _ in range(self.WARM_UP + self.repeats)]
        return median(times[self.WARM_UP :])

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        self.dirty.fill_(1)
        self.clean.sum()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


Clock = CpuClock | CudaClock


def measure_roof(clock: Clock, device: torch.device) -> Roof:
    """The roof of this machine, measured by reading a large tensor and by a matrix product: in bf16 on a GPU, in bf16
    or fp32 on a CPU, whichever is faster. On a CPU without instructions for bf16, torch's product in it was 60 times as
    slow (an AMD EPYC with AVX2, 2026-11-23)."""
    gpu = device.type == "cuda"
    numbers = torch.ones(1 << (28 if gpu else 26), dtype=torch.int64, device=device)

    def product(N: int, dtype: torch.dtype) -> float:
        a, b = (torch.randn(N, N, device=device).to(dtype) for _ in range(2))
        return clock(lambda: a @ b) / (2 * N**3)

    dtype = torch.bfloat16 if gpu else min((torch.bfloat16, torch.float32), key=lambda dtype: product(512, dtype))
    return Roof(numbers.nbytes / clock(lambda: numbers.sum()), 1 / product(8192 if gpu else 2048, dtype))


def random_experts(shape: Shape, device: torch.device, activations: str = "bf16") -> NVFP4Experts:
    """A layer with random codes, block scales of usual size and equal global scales."""
    H, I, E, _ = shape
    layer = NVFP4Experts(E, H, I, activations=activations, device=device)
    for name, parameter in layer.named_parameters():
        if parameter.dtype == torch.float32:
            parameter.data.fill_(1e-2)
        else:
            parameter.data.random_(40, 72) if name.endswith("_sf") else parameter.data.random_(0, 256)
    layer.prepare()
    return layer


def dense_experts(shape: Shape, device: torch.device) -> torch.nn.Module:
    """transformers' experts in bf16, by grouped matrix products."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    H, I, E, top_k = shape
    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=top_k)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        layer = Qwen3MoeExperts(config)
    layer = layer.bfloat16().to_empty(device=device)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.02)
    return layer


@torch.inference_mode()
def time_layer(
    ours: NVFP4Experts, theirs: torch.nn.Module, shape: Shape, tokens: Sequence[int], clock: Clock, roof: Roof
) -> Iterator[Row]:
    """One row for each number of tokens; every expert is equally likely.

    Routing weights are bf16, as Qwen3's router makes them: fp32 ones cost the bf16 experts more (on an H200 a tenth at
    T = 4096).
    """
    device = next(theirs.parameters()).device
    for T in tokens:
        batch = random_batch(shape, T, device)
        nvfp4, bf16 = (clock(partial(layer, *batch)) for layer in (ours, theirs))
        yield Row(T, nvfp4, bf16, *least_time(shape, batch[1], roof))


def random_batch(shape: Shape, T: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x bf16 [T, H], ids and bf16 routing weights [T, top_k], of which every expert is equally likely."""
    torch.manual_seed(T)
    scores, ids = torch.rand(T, shape.num_experts, device=device).topk(shape.top_k)
    return torch.randn(T, shape.hidden_size, device=device).bfloat16(), ids, scores.bfloat16()


def least_time(shape: Shape, ids: torch.Tensor, roof: Roof) -> tuple[float, float, float, str]:
    """For a call with these ids: `bytes`, `flops`, `least` and `bound` of `Row`."""
    H, I, _, top_k = shape
    size, flops = ids.unique().numel() * 3 * H * I * 9 / 16, 6.0 * H * I * len(ids) * top_k
    least = {"memory": size / roof.bandwidth, "arithmetic": flops / roof.flops}
    bound = max(least, key=least.__getitem__)
    return size, flops, least[bound], bound
