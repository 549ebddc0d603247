"""Statistics of the rows that experts and linears of a dense model multiply with their weights, while it runs on data.

sums = SquareSums()
with watch(experts_modules, sums):
    model(ids)
importance = sums.importance()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout, dense_experts, own_gate
from moe_nvfp4.quantize.importance import Importance, layer_importance, linear_importance


class Visitor(Protocol):
    def __call__(self, name: str, layout: ModuleLayout, e: int, x: Tensor, h: Tensor) -> None:
        """Rows x [n, H] and h [n, I], n >= 1, that expert `e` of module `name` multiplies with [gate; up] and down."""


@contextmanager
def watch_linears(linears: Mapping[str, nn.Module], visit: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `visit(name, rows [n, K])` whenever one of the dense `linears` runs."""

    def hook(name: str) -> Any:
        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            with torch.no_grad():
                visit(name, args[0].reshape(-1, args[0].shape[-1]))

        return before

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch(modules: Mapping[str, tuple[nn.Module, ModuleLayout]], visit: Visitor) -> Iterator[None]:
    """Call `visit` for every expert that has rows, whenever one of the dense experts `modules` runs."""

    def hook(name: str, layout: ModuleLayout) -> Any:
        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            with torch.no_grad():
                for e, x, h in expert_rows(module, layout, *args, **kwargs):
                    visit(name, layout, e, x, h)

        return before

    handles = []
    try:
        for name, (module, layout) in modules.items():
            handles.append(module.register_forward_pre_hook(hook(name, layout), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def expert_rows(
    module: nn.Module,
    layout: ModuleLayout,
    hidden_states: Tensor,
    top_k_index: Tensor | None = None,
    top_k_weights: Tensor | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(e, x [n, H], h [n, I]) of each expert that has rows, in one call of the dense experts `module`; in its dtype.

    A row with a routing weight of 0 is none of the expert's: it adds nothing (ZAYA's tokens that skip all experts).
    """
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    E = layout.num_experts
    for e, (w13, _) in enumerate(dense_experts(module, layout)):
        if layout.call == "dense":  # Llama 4: expert e has a block of rows, zeros where it was not chosen
            T = rows.shape[0] // E
            x = rows[e * T : (e + 1) * T]
            x = x[(x != 0).any(dim=-1)]
        else:
            assert top_k_index is not None and top_k_weights is not None
            x = rows[((top_k_index == e) & (top_k_weights != 0)).any(dim=-1)]
        if len(x):
            w13_out = x @ w13.T.to(x.dtype)
            if layout.bias is not None:
                bias = getattr(module, f"{layout.up_name}_bias")[e]
                w13_out = w13_out + layout.canonical(f"{layout.up_name}_bias", bias)
            yield e, x, own_gate(module, type(module), layout, w13_out)


@dataclass
class _Sums:
    x: Tensor
    h: Tensor
    rows: Tensor


class SquareSums:
    """A visitor that adds up squares of x and h, column by column, in float64. linears: their sums [K] and rows."""

    def __init__(self) -> None:
        self.layers: dict[str, _Sums] = {}
        self.linears: dict[str, tuple[Tensor, int]] = {}

    def __call__(self, name: str, layout: ModuleLayout, e: int, x: Tensor, h: Tensor) -> None:
        if name not in self.layers:
            E, H, I = layout.num_experts, layout.hidden_size, layout.intermediate_size
            new = lambda *shape: torch.zeros(shape, dtype=torch.float64, device=x.device)
            self.layers[name] = _Sums(new(E, H), new(E, I), new(E))
        sums = self.layers[name]
        sums.x[e] += x.float().square().sum(dim=0, dtype=torch.float64)
        sums.h[e] += h.float().square().sum(dim=0, dtype=torch.float64)
        sums.rows[e] += len(x)

    def linear(self, name: str, rows: Tensor) -> None:
        """Add rows [n, K] of the linear `name`."""
        squares = rows.float().square().sum(dim=0, dtype=torch.float64)
        before, n = self.linears.get(name, (torch.zeros_like(squares), 0))
        self.linears[name] = before + squares, n + len(rows)

    def importance(self) -> Importance:
        """The importance of all modules that had rows. ValueError for NaN or Inf."""
        all_sums = [(name, t) for name, sums in self.layers.items() for t in (sums.x, sums.h)]
        for name, sums in [*all_sums, *((name, total) for name, (total, _) in self.linears.items())]:
            if not sums.isfinite().all():
                raise ValueError(f"{name} got activations with NaN or Inf: look for the text, or the layer, that makes "
                                 "them")  # fmt: skip
        layers = {name: layer_importance(s.x, s.h, s.rows) for name, s in self.layers.items()}
        return Importance(layers, linears={name: linear_importance(*sums) for name, sums in self.linears.items()})
