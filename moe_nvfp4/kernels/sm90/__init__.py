"""The Hopper backend: CuTe DSL kernels for sm_90a."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.kernels.backend import Backend, Device, Problem, dequantized, not_installed, other_gpu
from moe_nvfp4.kernels.portable import BACKEND as portable
from moe_nvfp4.weights import ExpertWeights, Gate, LinearWeights, Projection


class Hopper(Backend):
    name = "sm90"
    packages = ("cutlass",)
    layout = "sm90"

    def unavailable(self, device: Device) -> str | None:
        return other_gpu(device, ((9, 0),), "H100, H200") or not_installed(
            device, self.packages, "pip install moe-nvfp4[gpu] brings CuTe DSL"
        )

    def unsupported(self, device: Device, problem: Problem) -> str | None:
        p = problem
        if p.dtype != torch.bfloat16:
            return f"takes bfloat16 activations, not {str(p.dtype).removeprefix('torch.')}: run the model in bfloat16"
        if p.hidden_size % 16 or p.intermediate_size % 16:
            return f"takes sizes that are multiples of 16, not H = {p.hidden_size} and I = {p.intermediate_size}"
        if p.num_experts > 1024:
            return f"takes up to 1024 experts, not {p.num_experts}"
        if p.activations != "bf16" and not p.fused:
            return (
                "keeps NVFP4 rows between its kernels, so the model's own gate or norm and AWQ's scales cannot run "
                "there: use activations='bf16'"
            )
        return None

    def prepare(self, codes: Tensor, sf: Tensor, interleaved: bool) -> tuple[Tensor, Any]:
        from moe_nvfp4.kernels.common.tensors import settle
        from moe_nvfp4.kernels.sm90.pack import pack

        packed = pack(codes, sf, interleaved)
        settle(packed.units.device)
        return packed.units.view(torch.uint8), replace(packed, units=None)

    def restore(self, prepared: Tensor, note: Any) -> tuple[Tensor, Tensor]:
        from moe_nvfp4.kernels.sm90.pack import unpack

        return unpack(replace(note, units=prepared.view(torch.int32)))

    def linear(self, x: Tensor, weights: LinearWeights) -> Tensor:
        # Offloaded weights, which a hook brings for each call, cannot be prepared. Packing them each time would take
        # longer than the Triton kernels, which read the checkpoint's layout.
        unprepared = weights.sf is not None and "triton" in Device.of(x.device).packages
        return (portable if unprepared else super()).linear(x, weights)

    def gate(self, gate: Gate, w13_out: Tensor) -> Tensor:
        return (portable if w13_out.is_cuda else super()).gate(gate, w13_out)

    def gate_gradient(self, gate: Gate, w13_out: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        return (portable if w13_out.is_cuda else super()).gate_gradient(gate, w13_out, dh)

    def unpacked(self, weights: ExpertWeights) -> ExpertWeights:
        (w13, w13_sf), (w2, w2_sf) = (_values(weights.projection(name)) for name in ("w13", "w2"))
        return replace(weights, w13=w13, w13_sf=w13_sf, w2=w2, w2_sf=w2_sf, layout=None)

    def dequantize(self, weights: Projection, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        w = weights
        if w.sf is None:
            first = None if w.first_scale is None else w.first_scale[experts]
            w = w._replace(codes=w.codes[experts], first_scale=first, scale=w.scale[experts])
            if w.codes.is_cuda:
                from moe_nvfp4.kernels.sm90.dequantize import window

                return window(w, columns, dtype)
            codes, sf = _values(w)
            w, experts = w._replace(codes=codes, sf=sf), slice(0, len(codes))
        return dequantized(w, experts, columns, dtype)


def _values(w: Projection) -> tuple[Tensor, Tensor]:
    """(codes, sf) with the same values. Blocks whose scale is zero get zero codes, whatever their codes were."""
    from moe_nvfp4.kernels.sm90.pack import Packed, unpack

    return unpack(Packed(w.codes.view(torch.int32), None, w.rows, -(-w.width // 16) * 16, w.interleaved))


BACKEND = Hopper()
