"""`ExpertsLayer`: the parameters of a layer of 4-bit experts, and its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from moe_nvfp4.backends import Backend, Problem, Selected, named, shown
from moe_nvfp4.checks import check_activations, check_bias_dtype, check_flag, check_gate, check_sizes
from moe_nvfp4.ops import Adapters, Hooks, run_experts
from moe_nvfp4.prepared import Prepared, autocast
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, quantize_expert
from moe_nvfp4.weights import SILU, ExpertWeights, Gate, Matrices, check_global_scale, is_quantized


class ExpertsLayer(Prepared):
    """The experts of one MoE layer with 4-bit weights, where x is; `NVFP4Experts` adds other places.

    forward(hidden_states [T, H], top_k_index [T, top_k], top_k_weights [T, top_k]) -> [T, H]

    With `expert_map`, int32 [G], the ids are those of G experts, of which this layer has E: expert_map[id] is the
    number of an expert here, or -1 if it is elsewhere, as in one rank of expert parallelism.

    Parameters (all frozen; uint8 bytes so that every collective and every loader carries them),
    with the names Hugging Face's experts use, so that its tensor- and expert-parallel plans apply:

    gate_up_proj           uint8 [E, 2I, K/2]   codes, rows [gate; up]; `up_proj` [E, I, K/2] if not
                                                gated
    gate_up_proj_sf        uint8 [E, 2I, K/16]  e4m3 bytes
    gate_proj_global_scale fp32 [E]             and up_proj_global_scale
    down_proj, down_proj_sf, down_proj_global_scale
    gate_up_proj_bias, down_proj_bias           [E, 2I], [E, H], with `bias`
    up_proj_input_scale, down_proj_input_scale  fp32 [E], with `input_scale`: static activation
                                                scales for activations="nvfp4"
    up_proj_pre_quant_scale, down_proj_pre_quant_scale  [E, H], [E, I], after `add_pre_quant_scales`

    On Hopper and Blackwell GPUs the first call brings codes and block scales into the layout of their kernels (see
    `prepare`); `state_dict`, and everything that moves or loads parameters, still sees them as above.
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter
    down_proj_global_scale: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        gate: Gate = SILU,
        activations: str = "bf16",
        bias: torch.dtype | None = None,
        input_scale: bool = False,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        check_gate(gate)
        check_activations(activations)
        check_bias_dtype(bias)
        check_flag("input_scale", input_scale)
        check_sizes(num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.num_experts, self.gate, self.activations = num_experts, gate, activations
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.post_expert_norm: nn.Module | None = None
        self.observer: Callable[[Tensor, Tensor], None] | None = None  # while scales are calibrated
        self.largest: Callable[[Tensor], Tensor] | None = None  # see share_rows
        self.recipe = DEFAULT_RECIPE  # by which adapters are merged
        self.up_name = "gate_up_proj" if gate.gated else "up_proj"
        E, N13 = num_experts, intermediate_size * (2 if gate.gated else 1)

        def add(name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> None:
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
            self.register_parameter(name, parameter)

        for name, N, K in ((self.up_name, N13, hidden_size), ("down_proj", hidden_size, intermediate_size)):
            K = -(-K // 16) * 16
            add(name, E, N, K // 2)
            add(f"{name}_sf", E, N, K // 16)
            if bias is not None:
                add(f"{name}_bias", E, N, dtype=bias)
        for name in self.projections:
            add(f"{name}_global_scale", E, dtype=torch.float32)
        for name in ("up_proj", "down_proj") if input_scale else ():
            add(f"{name}_input_scale", E, dtype=torch.float32)

    @classmethod
    def from_dense(
        cls,
        w13: Tensor,
        w2: Tensor,
        gate: Gate = SILU,
        activations: str = "bf16",
        bias: tuple[Tensor, Tensor] | None = None,
        recipe: str = DEFAULT_RECIPE,
    ) -> Self:
        """Quantize dense experts: w13 [E, 2I, H] (rows [gate; up]; [E, I, H] if not gated) and
        w2 [E, H, I], floating; bias: ([E, 2I], [E, H])."""
        check_gate(gate)
        if w13.dim() != 3 or w2.dim() != 3:
            raise ValueError(
                f"w13 and w2 must be [experts, rows, columns], got {tuple(w13.shape)} and {tuple(w2.shape)}: "
                "stack the experts"
            )
        E, N13, H = w13.shape
        if gate.gated and N13 % 2:
            raise ValueError(
                f"w13 has {N13} rows per expert, but a gated layer has as many gate rows as up rows: pass [gate; up], "
                "or a gate with gated=False"
            )
        I = N13 // (2 if gate.gated else 1)
        if w2.shape != (E, H, I):
            raise ValueError(f"w2 must be {(E, H, I)} for w13 {tuple(w13.shape)}, got {tuple(w2.shape)}")
        if bias is not None and (len(bias) != 2 or bias[0].dtype != bias[1].dtype):
            got = ", ".join(str(b.dtype) for b in bias)
            raise ValueError(f"bias is a pair of one dtype, for w13 and for w2, got ({got}): convert one of them")
        for name, b, shape in (("w13", bias[0], (E, N13)), ("w2", bias[1], (E, H))) if bias is not None else ():
            if b.shape != shape:
                raise ValueError(f"the bias of {name} must be {shape}, got {tuple(b.shape)}")
            if not b.is_meta and not b.isfinite().all():
                raise ValueError(f"the bias of {name} has NaN or Inf: look at the checkpoint, or use torch.nan_to_num")
        dtype = None if bias is None else bias[0].dtype
        layer = cls(E, H, I, gate, activations, dtype, device=w13.device)
        for e in range(E):
            layer.load_expert(e, w13[e], w2[e], recipe)
        if bias is not None:
            getattr(layer, f"{layer.up_name}_bias").data.copy_(bias[0])
            layer.down_proj_bias.data.copy_(bias[1])
        return layer

    def load_expert(
        self,
        e: int,
        w13: Tensor,
        w2: Tensor,
        recipe: str = DEFAULT_RECIPE,
        importance: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """Quantize one expert's dense w13 [N13, H] and w2 [H, I], floating, into place. AWQ's scales of it become 1.

        importance: for the recipe "weighted", fp32 [H] and [I], the means of x^2 and h^2 over calibration rows.
        ValueError for a wrong shape, an expert out of range, NaN, Inf and the meta device; the layer stays as it was.
        """
        H, I = self.hidden_size, self.intermediate_size
        if not 0 <= e < self.num_experts:
            raise ValueError(f"expert {e} does not exist: this layer has experts 0 to {self.num_experts - 1}")
        shapes = {self.up_name: (I * (2 if self.gate.gated else 1), H), "down_proj": (H, I)}
        for name, matrix in ((self.up_name, w13), ("down_proj", w2)):
            if matrix.shape != shapes[name]:
                raise ValueError(f"{name} of expert {e} must be {shapes[name]}, got {tuple(matrix.shape)}")
            if matrix.is_meta or getattr(self, name).is_meta:
                raise ValueError(
                    f"{name} of expert {e} is on {matrix.device}, the layer's on {getattr(self, name).device}: the "
                    "meta device holds no numbers; load the weights, or give the layer memory (to_empty(device=...))"
                )
        self.as_read()
        self.unpack()
        tensors: dict[str, Tensor] = {}
        for name, matrix, columns in ((self.up_name, w13, importance[0]), ("down_proj", w2, importance[1])):
            try:
                tensors |= quantize_expert(matrix, name, recipe, importance=columns)
            except ValueError as error:
                raise ValueError(f"{name} of expert {e}: {error}") from None
        self.recipe = recipe
        for key, tensor in tensors.items():
            getattr(self, key).data[e] = tensor
        for scales in self.pre_quant_scales:  # AWQ's, of the weights before
            if scales is not None:
                scales.data[e] = 1

    def set_input_scales(self, x_scale: Tensor, h_scale: Tensor) -> None:
        """Set static activation scales, fp32 0-d each, shared by all experts. ValueError unless each is one number,
        finite and positive."""
        pairs = (("up_proj", x_scale), ("down_proj", h_scale))
        for name, scale in pairs:
            if scale.numel() != 1:
                raise ValueError(f"{name}_input_scale is one number, for all experts, got shape {tuple(scale.shape)}")
            check_global_scale(scale.detach().float(), f"{name}_input_scale")
        for name, scale in pairs:
            scales = scale.detach().float().repeat(self.num_experts).to(self.down_proj.device)
            self.register_parameter(f"{name}_input_scale", nn.Parameter(scales, requires_grad=False))

    def add_pre_quant_scales(self, dtype: torch.dtype) -> None:
        """Add AWQ's parameters, initially ones, by which x and h are multiplied before the GEMMs."""
        for name, K in (("up_proj", self.hidden_size), ("down_proj", self.intermediate_size)):
            ones = torch.ones(self.num_experts, K, dtype=dtype, device=self.down_proj.device)
            self.register_parameter(f"{name}_pre_quant_scale", nn.Parameter(ones, requires_grad=False))

    @property
    def pre_quant_scales(self) -> tuple[Tensor | None, Tensor | None]:
        return self._parameters.get("up_proj_pre_quant_scale"), self._parameters.get("down_proj_pre_quant_scale")

    @property
    def _biases(self) -> tuple[Tensor | None, Tensor | None]:
        return self._parameters.get(f"{self.up_name}_bias"), self._parameters.get("down_proj_bias")

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections as checkpoints name them."""
        return ("gate_proj", "up_proj", "down_proj") if self.gate.gated else ("up_proj", "down_proj")

    @property
    def weights(self) -> ExpertWeights:
        """The parameters as they are now: read at every call, so sharding and offloading just work."""
        p: dict[str, Any] = self._parameters  # getattr would take twice as long
        up, (N13, H) = self.up_name, (self._rows(name) for name in (self.up_name, "down_proj"))
        I, layout = N13 // (2 if self.gate.gated else 1), self.packed_for
        sf13, sf2 = (p[f"{up}_sf"], p["down_proj_sf"]) if layout is None else (None, None)
        scales = p["up_proj_global_scale"], p.get("gate_proj_global_scale"), p["down_proj_global_scale"]
        w13 = Matrices(p[up], sf13, scales[0], N13, H, scales[1], p.get(f"{up}_bias"), layout)
        w2 = Matrices(p["down_proj"], sf2, scales[2], H, I, None, p.get("down_proj_bias"), layout)
        x_scale, h_scale = p.get("up_proj_input_scale"), p.get("down_proj_input_scale")
        return ExpertWeights(self.gate, self.activations, w13, w2, x_scale, h_scale)

    def _hooks(self, adapters: Adapters = ((), ()), adapter: Tensor | None = None) -> Hooks:
        p = self._parameters.get
        return Hooks(
            self.own_gate if self.gate.kind == "raw" else None, self.post_expert_norm,
            p("up_proj_pre_quant_scale"), p("down_proj_pre_quant_scale"), self.observer,
            self.largest if is_quantized(self.activations) and p("down_proj_input_scale") is None else None, adapters,
            adapter,
        )  # fmt: skip

    def backend(self, dtype: torch.dtype = torch.bfloat16) -> Backend:
        """The backend that runs this layer on its device, for x of `dtype`."""
        return named(self._select(dtype, self._hooks().fused).name)

    def _problem(self, dtype: torch.dtype, fused: bool) -> tuple[Problem, torch.device]:
        """The problem to run, and the device of the weights."""
        w13, H = self._here(self.up_name), self._rows("down_proj")
        I = self._rows(self.up_name) // (2 if self.gate.gated else 1)
        return Problem("experts", w13.shape[0], H, I, self.gate.kind, self.activations, dtype, fused), w13.device

    def prepare(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Bring the weights into the layout of the kernels that run activations of `dtype`.

        This happens in place, one projection at a time, without loss: `unpack` is its exact inverse. Loading a model
        onto a GPU and swapping its experts there call it; otherwise the first call of the module does, so call it
        yourself before torch.compile or a CUDA graph. Weights that a hook brings for a single call are left alone.
        """
        self._for_call(dtype, self._hooks().fused)

    def _prepare_for(self, chosen: Selected) -> None:
        self._pack(chosen, **{self.up_name: self.gate.gated, "down_proj": False})

    def share_rows(self, group: Any) -> None:
        """Say that this layer computes a part of each row of h, and the ranks of `group` (a ProcessGroup) the others.

        Only W4A4 with dynamic scales asks: the scale of a row belongs to the whole row, so each call then takes the
        largest magnitude over these ranks, [R] numbers, between the two GEMMs.
        """
        self.largest = _LargestOf(group)

    def own_gate(self, w13_out: Tensor) -> Tensor:
        """The gate of a "raw" layer, [R, 2I] -> [R, I]; adapters replace it."""
        raise NotImplementedError(
            "this layer has gate kind 'raw': assign `own_gate`, a function from GEMM 1's output "
            "[rows, 2 * I] to h [rows, I]"
        )

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Adapters = ((), ()),
        adapter: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        hooks, x = self._hooks(adapters, adapter), autocast(hidden_states)
        chosen, weights = self._for_call(x.dtype, hooks.fused)
        y = run_experts(x, top_k_index, top_k_weights, weights, hooks, chosen, expert_map)
        return y if x is hidden_states else y.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, gate={self.gate.kind}, "
            f"activations={self.activations!r}" + shown(*self._problem(torch.bfloat16, self._hooks().fused))
        )


class _LargestOf:
    """fp32 [R] -> the largest over the ranks of a group."""

    def __init__(self, group: Any):
        self.group = group

    def __call__(self, amax: Tensor) -> Tensor:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=self.group)
        return amax

    def __deepcopy__(self, memo: dict) -> Self:  # a process group cannot be copied
        return self
