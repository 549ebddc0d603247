"""How fast layers of known models are on one backend, beside what the device could do at best."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_nvfp4.bench import CpuClock, CudaClock, Shape, least_time, measure_roof, random_batch, random_experts

LAYERS = {
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4),
    "Mixtral-8x7B": Shape(4096, 14336, 8, 2),
}
TOKENS = (1, 16, 256, 4096)
PATIENCE = 1.5  # seconds that a call may take: slower ones are left out


@torch.inference_mode()
def measure(device: torch.device, quick: bool = False) -> Iterator[dict[str, Any]]:
    """First the device's roof (bytes/s, FLOP/s), then a row for each layer and number of tokens: microseconds, GB/s,
    TFLOP/s, and the share of the roof. What is too large or too slow here is left out."""
    clock = CudaClock() if device.type == "cuda" else CpuClock(3)
    roof = measure_roof(clock, device)
    yield roof._asdict()
    for name, shape in list(LAYERS.items())[: 1 if quick else None]:
        H, I, E, _ = shape
        if 1.5 * E * 3 * H * I * 9 / 16 > _free(device):
            continue
        layer = random_experts(shape, device)
        for T in TOKENS[:2] if quick else TOKENS:
            batch = random_batch(shape, T, device)
            size, flops, least, bound = least_time(shape, batch[1], roof)
            if 2 * least < PATIENCE:
                seconds = clock(partial(layer, *batch))
                yield {
                    "layer": name, "tokens": T, "us": seconds * 1e6, "GB/s": size / seconds / 1e9,
                    "TFLOP/s": flops / seconds / 1e12, "of_roof": least / seconds, "bound": bound,
                }  # fmt: skip


def _free(device: torch.device) -> float:
    """Bytes of memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = Path("/proc/meminfo")
    fields = dict(line.split(":") for line in known.read_text().splitlines()) if known.exists() else {}
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else float("inf")
