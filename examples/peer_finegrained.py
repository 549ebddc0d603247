"""A peer of benchmark.py: the Hub's finegrained-kernels, by which transformers will run NVFP4 experts (its pull request
48058).

    pip install kernels
    cd examples && python benchmark.py --peer peer_finegrained

The kernels are downloaded, or loaded from the folder that FINEGRAINED_KERNELS names. Their tuner searches for minutes
at the first call of each size. For each number of tokens, the faster of their two paths is taken.
"""

import os
import time
from functools import partial
from pathlib import Path

import torch

from moe_nvfp4 import NVFP4Experts
from moe_nvfp4.quantize.layouts.base import interleave_rows

REPOSITORY, VERSION = "kernels-community/finegrained-kernels", 5


def make(w13, w2):
    """(w13 [E, 2I, H], w2 [E, H, I]) -> f(x [T, H], ids [T, top_k], weights [T, top_k]) -> [T, H], W4A16."""
    kernel, experts = load(), NVFP4Experts.from_dense(w13, w2)
    given, chosen = operands(experts), {}

    def run(x, ids, weights):
        if len(x) not in chosen:
            paths = kernel.moe_fused_batched, kernel.moe_fused_grouped
            chosen[len(x)] = min(paths, key=lambda path: seconds(lambda: path(x, ids, weights, **given)))
        return chosen[len(x)](x, ids, weights, **given)

    g = torch.Generator(w13.device).manual_seed(0)
    x = torch.randn(16, w13.shape[2], device=w13.device, dtype=w13.dtype, generator=g)
    ids = torch.arange(16, device=w13.device)[:, None] % len(w13)
    want, got = (f(x, ids, torch.ones(16, 1, device=w13.device)).double() for f in (experts, run))
    if (error := ((got - want).norm() / want.norm()).item()) > 0.02:
        raise ValueError(f"{REPOSITORY} computes something else, relative error {error:.2g}: its layout is another one")
    return run


def load():
    """The kernels."""
    from kernels import get_kernel, get_local_kernel

    folder = os.environ.get("FINEGRAINED_KERNELS")
    return get_local_kernel(Path(folder)) if folder else get_kernel(REPOSITORY, version=VERSION)


def operands(experts):
    """The arguments of the kernels for a layer: rows g0, u0, g1, u1, ..., gate's global scale for both, and what
    differs in up's in down's."""
    t = {name: tensor.detach() for name, tensor in experts.state_dict().items()}
    interleave = partial(interleave_rows, parts=2, dim=1)
    return {
        "gate_up_proj": interleave(t["gate_up_proj"]).view(torch.int8),
        "gate_up_proj_scale_inv": interleave(t["gate_up_proj_sf"]).view(torch.float8_e4m3fn),
        "gate_up_proj_weight_global_scale": t["gate_proj_global_scale"],
        "down_proj": t["down_proj"].view(torch.int8).clone(),  # `experts` may bring its own into another layout
        "down_proj_scale_inv": t["down_proj_sf"].view(torch.float8_e4m3fn).clone(),
        "down_proj_weight_global_scale": (
            t["down_proj_global_scale"] * t["up_proj_global_scale"] / t["gate_proj_global_scale"]
        ),
        "act_fn": "silu", "activation_format": "bf16",
    }  # fmt: skip


def seconds(f):
    """The shortest of ten calls; the first one tunes, and does not count."""
    times = []
    for _ in range(11):
        start = time.perf_counter()
        f()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
