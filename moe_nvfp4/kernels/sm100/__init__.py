"""The Blackwell backend: CuTe DSL kernels for sm_100a and sm_103a."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.kernels.backend import Backend, Device, Problem, dequantized, not_installed, other_gpu
from moe_nvfp4.kernels.sm100.pack import pack, parts, unpack, unpack_sf
from moe_nvfp4.weights import ExpertWeights, Projection


class Blackwell(Backend):
    name = "sm100"
    packages = ("cutlass", "tvm_ffi")
    whole = False
    layout = "sm100"

    def unavailable(self, device: Device) -> str | None:
        return other_gpu(device, ((10, 0), (10, 3)), "B200, B300") or not_installed(
            device, self.packages, "pip install moe-nvfp4[gpu] brings CuTe DSL"
        )

    def unsupported(self, device: Device, problem: Problem) -> str | None:
        p = problem
        if p.kind == "linear":
            return "has no kernel for single linears yet: load them with linears='dense'"
        if p.activations != "nvfp4":
            return "takes NVFP4 activations only: use activations='nvfp4'"
        if p.hidden_size % 16 or p.intermediate_size % 16:
            return f"takes sizes that are multiples of 16, not H = {p.hidden_size} and I = {p.intermediate_size}"
        return None

    def prepare(self, codes: Tensor, sf: Tensor, interleaved: bool) -> tuple[Tensor, Any]:
        _, rows, K16 = sf.shape
        projections = 2 if interleaved else 1
        return pack(codes, sf, projections), (rows, K16, projections)

    def restore(self, prepared: Tensor, note: Any) -> tuple[Tensor, Tensor]:
        return unpack(prepared, *note)

    def unpacked(self, weights: ExpertWeights) -> ExpertWeights:
        (w13, w13_sf), (w2, w2_sf) = (
            unpack(p.codes, p.rows, -(-p.width // 16), 2 if p.interleaved else 1)
            for p in (weights.projection("w13"), weights.projection("w2"))
        )
        return replace(weights, w13=w13, w13_sf=w13_sf, w2=w2, w2_sf=w2_sf, layout=None)

    def dequantize(self, weights: Projection, experts: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        w = weights
        if w.sf is None:
            halves, (codes, sf) = 2 if w.interleaved else 1, parts(w.codes, w.rows, -(-w.width // 16))
            # A tile of scales has 128 rows and 64 columns, in 512 bytes; columns begin with one.
            tiles = sf.view(w.codes.shape[0], halves, -1, -(-w.width // 64), 512)[experts]
            width = min(columns.stop, w.width) - columns.start
            tiles, K16 = tiles[:, :, :, columns.start // 64 : -(-columns.stop // 64)], -(-width // 16)
            sf = unpack_sf(tiles.flatten(), tiles.shape[0], halves, w.rows // halves, K16)
            codes = codes[experts, :, columns.start // 2 :][..., : 8 * K16]
            first = None if w.first_scale is None else w.first_scale[experts]
            w = w._replace(codes=codes, sf=sf, first_scale=first, scale=w.scale[experts], width=width)
            experts, columns = slice(0, len(codes)), slice(0, width)
        return dequantized(w, experts, columns, dtype)


BACKEND = Blackwell()
