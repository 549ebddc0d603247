"""Experts and linears that are quantized from the rows that they multiply: Hessians of a text, and codes from them.

sums = HessianSums()
with watch(experts_modules, sums):
    model(ids)
for name, (module, layout) in experts_modules.items():
    parameters = sums.quantize(name, module, layout, "gptq", device)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.integrations.huggingface.linears import quantize_fused
from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout, dense_experts
from moe_nvfp4.quantize.linears import Linear
from moe_nvfp4.quantize.recipes import better, quantize_matrix, recipe_named
from moe_nvfp4.weights import is_four_over_six, is_quantized

ENOUGH = 8  # rows for each column of a Hessian; with fewer, gptq overfits to the calibration text
HELD_OUT = 8  # one row of so many is kept from an expert's sums, to judge what was made from them
MOST_HELD = 256  # rows of an expert that are kept from its sums
TOGETHER = 3 << 27  # elements of experts that are quantized at once: fewer take a GPU longer, more need more memory

Fused: TypeAlias = tuple[Linear, ...]  # linears that share a global scale, and read the same rows
Made: TypeAlias = dict[str, Tensor]  # parameters of NVFP4Experts by name, and `rows`, int64 [E]; or of NVFP4Linear


@dataclass
class Sums:
    x: Tensor  # fp32 [E, H, H]
    h: Tensor  # fp32 [E, I, I]
    rows: Tensor  # int64 [E], rows in the sums
    held_x: list[Tensor]  # of each expert: rows [n, H] that are not in the sums
    held_h: list[Tensor]  # rows [n, I]


@dataclass
class LinearSums:
    x: Tensor  # fp32 [K, K]
    rows: int  # rows in the sum
    held: Tensor  # rows [n, K] that are not in the sum


class HessianSums:
    """A visitor (`statistics.watch`) that adds up x x^T and h h^T of every expert, and keeps the last rows of each
    call, an eighth, to judge by.

    activations: with those of W4A4, rows are quantized first, as the layer will quantize them.
    """

    def __init__(self, activations: str = "bf16"):
        self.activations = activations
        self.layers: dict[str, Sums] = {}
        self.linears: dict[str, LinearSums] = {}

    def __call__(self, name: str, layout: ModuleLayout, e: int, x: Tensor, h: Tensor) -> None:
        if name not in self.layers:
            self.layers[name] = no_rows(layout, x.device)
        sums = self.layers[name]
        n = len(x) - min(len(x) // HELD_OUT, MOST_HELD - len(sums.held_x[e]))
        for total, held, rows in ((sums.x[e], sums.held_x, x), (sums.h[e], sums.held_h, h)):
            rows = self._as_multiplied(rows)
            total.addmm_(rows[:n].T, rows[:n])
            held[e] = torch.cat([held[e], rows[n:]])
        sums.rows[e] += n

    def linear(self, name: str, x: Tensor) -> None:
        """Add rows x [n, K] of the linear `name`."""
        rows, K = self._as_multiplied(x), x.shape[1]
        if name not in self.linears:
            self.linears[name] = LinearSums(rows.new_zeros(K, K), 0, rows[:0])
        sums = self.linears[name]
        n = len(x) - min(len(x) // HELD_OUT, MOST_HELD - len(sums.held))
        sums.x.addmm_(rows[:n].T, rows[:n])
        sums.rows, sums.held = sums.rows + n, torch.cat([sums.held, rows[n:]])

    def quantize(
        self, name: str, module: nn.Module, layout: ModuleLayout, recipe: str, device: torch.device | str
    ) -> Made:
        """`quantize_experts` of the module `name`, whose sums are then forgotten."""
        sums = self.layers.pop(name) if name in self.layers else no_rows(layout, device)
        try:
            return quantize_experts(module, layout, sums, recipe)
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from None

    def _as_multiplied(self, rows: Tensor) -> Tensor:
        return as_nvfp4(rows, self.activations) if is_quantized(self.activations) else rows.float()


def as_nvfp4(rows: Tensor, activations: str) -> Tensor:
    """Rows [n, K], quantized with one scale each as in W4A4, and dequantized: fp32 [n, K]."""
    padded, four_over_six = nvfp4.pad_k(rows), is_four_over_six(activations)
    scale = nvfp4.row_scales(padded, four_over_six)
    codes, sf, _ = nvfp4.quantize(padded, scale, False, four_over_six)
    return nvfp4.dequantize(codes, sf, scale)[:, : rows.shape[1]]


def shrink(sums: Sums) -> None:
    """Add rows to `sums`, in place, since few rows say little.

    First x gets H rows like the layer's average, since all experts read the same hidden states. Then x and h get
    `ENOUGH` rows for each column, in which columns are uncorrelated: the fewer rows were seen (for x by the layer, for
    h by the expert), the closer gptq comes to ``weighted``. If there were none, all columns of h count alike, as with
    ``mse``.
    """
    rows, H = sums.rows.to(sums.x.device), sums.x.shape[-1]
    sums.x += sums.x.sum(dim=0) * (H / rows.sum().clamp(min=1).float())
    for total, seen in ((sums.x, rows.max()), (sums.h, rows[:, None])):
        diagonal = total.diagonal(dim1=1, dim2=2)
        diagonal *= 1 + ENOUGH * total.shape[-1] / seen.clamp(min=1).float()


def quantize_experts(module: nn.Module, layout: ModuleLayout, sums: Sums, recipe: str = "gptq") -> Made:
    """Quantize a dense experts `module` by a recipe that needs a text; matrices that are not better by it, on rows that
    it did not see, by the default recipe. Returns the parameters of `NVFP4Experts` by name, on its device, and `rows`,
    int64 [E]. ValueError naming the projection that cannot be quantized."""
    make = recipe_named(recipe).from_hessians
    assert make is not None, "the callers asked the recipe"
    shrink(sums)
    size = layout.hidden_size * layout.intermediate_size * (2 if layout.gated else 1)
    step = max(1, TOGETHER // size)
    parts: dict[str, list[Tensor]] = {}
    matrices = list(dense_experts(module, layout))  # views
    of_names = ((layout.up_name, sums.x, _of_layer(sums.held_x)), ("down_proj", sums.h, sums.held_h))
    for i, (name, hessian, held) in enumerate(of_names):
        for a in range(0, layout.num_experts, step):
            w = torch.stack([pair[i] for pair in matrices[a : a + step]])
            try:
                made = make(w, hessian[a : a + step])
                codes, sf, scale = better(w, made, quantize_matrix(nvfp4.pad_k(w)), held[a : a + step])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            tensors = {name: codes, f"{name}_sf": sf.view(torch.uint8)}
            shared = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
            tensors |= {f"{part}_global_scale": scale for part in shared}
            for key, tensor in tensors.items():
                parts.setdefault(key, []).append(tensor)
    return {key: torch.cat(tensors) for key, tensors in parts.items()} | {"rows": sums.rows}


def _of_layer(held: list[Tensor]) -> list[Tensor]:
    """Rows of x by expert. An expert without any gets those of all, since all experts read the same hidden states."""
    every = torch.cat(held)
    return [rows if len(rows) else every for rows in held]


def quantize_chosen(
    model: nn.Module, fused: Sequence[Fused], sums: HessianSums, recipe: str
) -> Iterator[tuple[Linear, Made]]:
    """Yield (linear, parameters of its `NVFP4Linear`) for every linear of `fused`.

    sums: of the first of each tuple. They are shrunk as those of h, and what is not better on rows that were not seen
    is quantized by the default recipe.
    """
    for linears in fused:
        weights = [model.get_parameter(f"{linear.model}.weight").detach() for linear in linears]
        seen = sums.linears.pop(linears[0].model, None)
        if seen is None:
            none = torch.zeros(0, weights[0].shape[1], dtype=torch.float32, device=weights[0].device)
            seen = LinearSums(none.T @ none, 0, none)
        seen.x.diagonal().mul_(1 + ENOUGH * len(seen.x) / max(seen.rows, 1))
        try:
            yield from zip(linears, quantize_fused(weights, recipe, None, (seen.x, seen.held)), strict=True)
        except ValueError as error:
            raise ValueError(f"{', '.join(linear.model for linear in linears)}: {error}") from None


def no_rows(layout: ModuleLayout, device: torch.device | str) -> Sums:
    E, H, I = layout.num_experts, layout.hidden_size, layout.intermediate_size
    new = lambda K: torch.zeros(E, K, K, dtype=torch.float32, device=device)
    none = lambda K: [torch.zeros(0, K, dtype=torch.float32, device=device) for _ in range(E)]
    return Sums(new(H), new(I), torch.zeros(E, dtype=torch.int64), none(H), none(I))
