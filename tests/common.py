"""What the tests share: the reference's layer and rows, one scalar for its error, the one table of thresholds, which
GPUs there are, and what stands for one."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_nvfp4 import backends, reference
from moe_nvfp4 import format as nvfp4
from moe_nvfp4.kernels.sm90 import BACKEND, Hopper
from moe_nvfp4.kernels.sm90 import pack as sm90_pack
from moe_nvfp4.routing import Groups, Rows, group_by_expert
from moe_nvfp4.weights import ExpertWeights, Layout

# Relative error ||a - b|| / ||b|| in float64 against an independent computation.
THRESHOLDS = {
    "fp32": 1e-6,  # fp32 sums in another order
    "half": 4e-3,  # bf16 or fp16 in and out: one rounding of h, one of y
    "w4a4": 2e-2,  # rows requantized to e2m1: a value at a rounding boundary moves by a step
}

HOPPER = torch.cuda.is_available() and not BACKEND.unavailable(backends.Device.of(torch.device("cuda", 0)))
on_gpu = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and nvidia-cutlass-dsl")
on_two_gpus = pytest.mark.skipif(
    not HOPPER or torch.cuda.device_count() < 2, reason="needs two Hopper GPUs and nvidia-cutlass-dsl"
)


def relative_error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, f"{tuple(a.shape)} is compared with {tuple(b.shape)}"
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return ((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()


def reference_layer(x: Tensor, ids: Tensor, top_k_weights: Tensor, w: ExpertWeights) -> Tensor:
    """The layer by the reference's stages, on weights as checkpoints have them: fp32, h in x's dtype."""
    groups = group_by_expert(ids, w.num_experts)
    if w.activations == "bf16":
        h = reference.gemm1_swiglu(Rows(x, index=groups.token), w, groups, x.dtype)
    else:
        rows = reference.quantize_rows(x, groups.token, w.x_scale, groups)
        h = reference.gemm1_swiglu(rows, w, groups, x.dtype)
        if not h.is_nvfp4:
            h = reference.quantize_rows(h.values, None, None, groups)
    return reference.gemm2_combine(h, w, groups, top_k_weights, torch.float32)


def reference_rows(x: Tensor, index: Tensor | None, scale: Tensor | None, groups: Groups) -> tuple[Tensor, Tensor]:
    """`reference.quantize_rows` of the rows with an expert (others have no block scales) -> fp32 code * sf, scales."""
    want, live = reference.quantize_rows(x, index, scale, groups), int(groups.offsets[-1])
    sf = nvfp4.unswizzle_sf_grouped(want.sf, groups.offsets, groups.num_rows, x.shape[1] // 16)
    return nvfp4.dequantize(want.values[:live], sf[:live], None), want.scale[:live]


_PEAK = """
import sys, threading, time
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config

def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))

peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

import transformers.models.qwen3_moe.modeling_qwen3_moe  # its code is not the checkpoint's memory
base = anonymous()
threading.Thread(target=watch, daemon=True).start()
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.bfloat16, ARGUMENTS)
done = True
time.sleep(0.01)
result = sum(p.numel() * p.element_size() for p in model.parameters())
print(peak - base, result)
"""


def peak_while_loading(path, arguments: str = "") -> tuple[int, int]:
    """from_pretrained(path, arguments): (peak of anonymous memory above the start, bytes of the parameters)."""
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", _PEAK.replace("ARGUMENTS", arguments), str(path)]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    peak, result = map(int, run.stdout.split())
    return peak, result


class Kernels(Hopper):
    """This machine's CPU as a Hopper GPU, as far as layers see: its layout, what it supports, and the reference on
    what comes back from it."""

    calls = 0

    def unavailable(self, device):
        return None

    def experts(self, x, ids, top_k_weights, weights):
        assert weights.layout == Layout("sm90", weights.hidden_size, weights.intermediate_size,
                                        tuple(weights.w13.shape[1:]), tuple(weights.w2.shape[1:]))  # fmt: skip
        Kernels.calls += 1
        H, I = weights.hidden_size, weights.intermediate_size
        rows = (2 if weights.gate.gated else 1) * I
        w13, w13_sf = self.restore(weights.w13, sm90_pack.Packed(None, None, rows, H, weights.gate.gated))
        w2, w2_sf = self.restore(weights.w2, sm90_pack.Packed(None, None, H, I, False))
        weights = replace(weights, layout=None, w13=w13, w13_sf=w13_sf, w2=w2, w2_sf=w2_sf)
        groups = group_by_expert(ids, weights.num_experts)
        h = reference.gemm1_swiglu(Rows(x, index=groups.token), weights, groups, x.dtype)
        return reference.gemm2_combine(h, weights, groups, top_k_weights, x.dtype)


def stand_for_hopper():
    """Inside of it this machine's CPU is a Hopper GPU, as far as layers see."""
    return backends.registered(Kernels())
