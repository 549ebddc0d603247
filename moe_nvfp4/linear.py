"""`NVFP4Linear`: a linear layer with 4-bit weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_nvfp4 import ops
from moe_nvfp4.backends import Backend, Problem, Selected, select, shown
from moe_nvfp4.checks import check_activations, check_bias_dtype, check_flag, check_sizes
from moe_nvfp4.prepared import Prepared, autocast
from moe_nvfp4.weights import LinearWeights, Matrices, check_global_scale


class NVFP4Linear(Prepared):
    """y = x · wᵀ + bias with 4-bit weights.

    forward(x [..., K]) -> [..., N] in x's dtype; sums in fp32, rounded once.

    Parameters (frozen): weight uint8 [N, K/2], weight_sf uint8 [N, K/16], weight_global_scale fp32 [1]; bias [N],
    with `bias`; input_scale fp32 [1], with `input_scale`: the static global scale of the rows for
    activations="nvfp4" (without it, one scale per row); pre_quant_scale [K], where that argument is a dtype:
    x is multiplied by it first (AWQ).

    On Hopper and Blackwell GPUs, loading a model or else the first call brings codes and block scales into the layout
    of their kernels (see `prepare`); `state_dict`, and everything that moves or loads parameters, still sees them as
    above.
    """

    weight: nn.Parameter
    pre_quant_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: torch.dtype | None = None,
        activations: str = "bf16",
        input_scale: bool = False,
        pre_quant_scale: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        check_activations(activations)
        check_bias_dtype(bias)
        check_flag("input_scale", input_scale)
        check_sizes(in_features=in_features, out_features=out_features)
        if in_features % 16:
            raise ValueError(f"in_features = {in_features} is not a multiple of 16, the NVFP4 block")
        self.in_features, self.out_features, self.activations = in_features, out_features, activations
        K, N = in_features, out_features
        sizes = {
            "weight": ((N, K // 2), torch.uint8),
            "weight_sf": ((N, K // 16), torch.uint8),
            "weight_global_scale": ((1,), torch.float32),
            "bias": ((N,), bias),
            "input_scale": ((1,), torch.float32 if input_scale else None),
            "pre_quant_scale": ((K,), pre_quant_scale),
        }
        for name, (shape, dtype) in sizes.items():
            zeros = None if dtype is None else torch.zeros(shape, dtype=dtype, device=device)
            self.register_parameter(name, None if zeros is None else nn.Parameter(zeros, requires_grad=False))
        self.observer: Callable[..., None] | None = None  # while scales are calibrated
        self.joined: Any = None  # a `joined.Joined`, if it runs with others as one

    def set_input_scales(self, x_scale: Tensor) -> None:
        """Set the static activation scale, one fp32 number. ValueError unless it is finite and positive."""
        if x_scale.numel() != 1:
            raise ValueError(f"input_scale is one number, got shape {tuple(x_scale.shape)}")
        check_global_scale(x_scale.detach().float(), "input_scale")
        scale = x_scale.detach().float().reshape(1).to(self.weight.device)
        self.register_parameter("input_scale", nn.Parameter(scale, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        ops.refuse_transforms()
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must be [..., {self.in_features}], this linear's in_features, got {tuple(x.shape)}")
        given, x = x, autocast(x)
        rows = x.reshape(-1, self.in_features)
        if self.pre_quant_scale is not None:
            rows = rows * self.pre_quant_scale.to(rows.dtype)
        if self.observer is not None:
            self.observer(rows)
        y = None if self.joined is None else self.joined.columns(self, given, rows)
        if y is None:
            chosen, weights = self._for_call(x.dtype, x.device)
            y = ops.run_linear(rows, weights, chosen)
        return y.view(*x.shape[:-1], self.out_features)

    def prepare(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Bring the weights into the layout of the kernels that run activations of `dtype`, as
        `NVFP4Experts.prepare` does; `unpack` is its exact inverse."""
        self._for_call(dtype)

    def unpack(self) -> None:
        packed = self.packed
        super().unpack()
        if self.joined is not None:
            self.joined.left = self.joined.whole = None  # they hold the memory of all
            if packed:
                self.joined.separate(self)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.joined is not None:  # the memory of all would be pickled with each
            alone = {name: None if p is None else nn.Parameter(p.detach().clone(), p.requires_grad)
                     for name, p in self._parameters.items()}  # fmt: skip
            state = {**state, "_parameters": alone}
        return state

    def _changed(self) -> None:
        super()._changed()
        if self.joined is not None:
            self.joined.left = None  # columns of the weights before

    def _prepare_for(self, chosen: Selected) -> None:
        self._pack(chosen, weight=False)

    @property
    def weights(self) -> LinearWeights:
        """The parameters as they are now."""
        p: dict[str, Any] = self._parameters
        layout = self.packed_for
        sf = p["weight_sf"] if layout is None else None
        sizes = self.out_features, self.in_features
        matrix = Matrices(p["weight"], sf, p["weight_global_scale"], *sizes, None, p["bias"], layout)
        return LinearWeights(matrix, p["input_scale"], self.activations)

    def backend(self, dtype: torch.dtype = torch.bfloat16) -> Backend:
        """The backend that runs this linear on its device, for x of `dtype`."""
        return select(*self._problem(dtype))

    def _problem(self, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Problem, torch.device]:
        """The problem to run and its device: `device` (of x) if given, else the device of the weights."""
        problem = Problem("linear", 1, self.out_features, self.in_features, "raw", self.activations, dtype)
        return problem, device or self.weight.device

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activations={self.activations!r}" + shown(*self._problem(torch.bfloat16))
        )
