"""Hugging Face experts modules: recognise them, read their weights, call them the same way.

`describe` tells what an experts module is (a `Layout`); `HFExperts` is `NVFP4Experts` with that
module's manners. In transformers, one interface (the `use_experts_implementation` decorator)
serves nearly every family; `LAYOUTS` has the few that store or call their experts differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.layer import NVFP4Experts
from moe_nvfp4.weights import Gate

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Layout:
    """How an experts module keeps and calls its weights.

    call         "routed": (hidden_states, top_k_index, top_k_weights), the common interface
                 "identity": the same; ids from `num_experts` on return their input (LongCat)
                 "dense": (hidden_states [E * T, H]), every expert's rows in a block (Llama 4)
    transposed   weights are [E, in, out]
    interleaved  gate and up rows alternate (gpt-oss)
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    gated: bool = True
    transposed: bool = False
    interleaved: bool = False
    bias: torch.dtype | None = None
    call: str = "routed"

    @property
    def up_name(self) -> str:
        return "gate_up_proj" if self.gated else "up_proj"

    def canonical(self, name: str, tensor: Tensor) -> Tensor:
        """One expert's tensor as stored, [in, out] or [out, in] -> [out, in], rows [gate; up]."""
        if tensor.dim() == 2 and self.transposed:
            tensor = tensor.T
        if self.interleaved and name.startswith("gate_up_proj"):
            tensor = torch.cat([tensor[0::2], tensor[1::2]])
        return tensor


def describe(module: nn.Module) -> Layout | None:
    """The layout of an experts module, None for any other module.

    Raises NotImplementedError for experts that this library does not know how to run.
    """
    if isinstance(module, NVFP4Experts):
        return None
    own = LAYOUTS.get(type(module).__name__)
    if own is not None and type(module).__module__.startswith("transformers."):
        return own(module)
    if hasattr(type(module), "_apply_gate") and hasattr(module, "has_gate"):
        return _decorated(module)
    if _looks_like_experts(module):
        raise NotImplementedError(
            f"{type(module).__module__}.{type(module).__name__} holds experts in a form that is not "
            "supported: neither transformers' experts interface (use_experts_implementation) nor "
            f"one of {', '.join(LAYOUTS)}. Leave it as it is with exclude=['<its module name>'], "
            "or decorate the class with transformers' use_experts_implementation"
        )
    return None


def _looks_like_experts(module: nn.Module) -> bool:
    if not re.search(r"Experts?(GLU)?$|CDMoE$", type(module).__name__):
        return False
    parent_only = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) == 0
    return not parent_only and next(module.parameters(), None) is not None


def _decorated(m: nn.Module) -> Layout:
    up = m.gate_up_proj if m.has_gate else m.up_proj
    shape = tuple(up.shape)
    E, N13, H = shape if not m.is_transposed else (shape[0], shape[2], shape[1])
    return Layout(
        num_experts=E,
        hidden_size=H,
        intermediate_size=N13 // 2 if m.has_gate else N13,
        gated=m.has_gate,
        transposed=m.is_transposed,
        interleaved=not m.is_concatenated,
        bias=m.down_proj_bias.dtype if m.has_bias else None,
    )


def _step3p7(m: nn.Module) -> Layout:
    E, N13, H = m.gate_up_proj.shape
    return Layout(E, H, N13 // 2)


def _longcat(m: nn.Module) -> Layout:
    if m.gate_up_proj is None:
        raise NotImplementedError(f"{type(m).__name__} has no routed expert: exclude this layer")
    # gate_up_proj also has (unused) rows for the identity experts; down_proj has the real ones only
    E, H, I = m.down_proj.shape
    return Layout(E, H, I, call="identity")


def _llama4(m: nn.Module) -> Layout:
    E, I, H = m.down_proj.shape
    return Layout(E, H, I, transposed=True, call="dense")


def _dbrx(m: nn.Module) -> Layout:
    return Layout(m.num_experts, m.hidden_size, m.ffn_hidden_size)


LAYOUTS: dict[str, Callable[[nn.Module], Layout]] = {
    "Step3p7Experts": _step3p7,
    "LongcatFlashExperts": _longcat,
    "Llama4TextExperts": _llama4,
    "DbrxExperts": _dbrx,
}


def dense_experts(module: nn.Module, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """(w13 [N13, H], w2 [H, I]) of one expert after the other, rows [gate; up], no copies kept."""
    if hasattr(module, "mlp"):  # DBRX: [E * I, H] each; w2 is already [in, out] per expert
        w1, v1, w2 = (p.view(layout.num_experts, -1, layout.hidden_size) for p in
                      (module.mlp.w1, module.mlp.v1, module.mlp.w2))  # fmt: skip
        for e in range(layout.num_experts):
            yield torch.cat([w1[e], v1[e]]), w2[e].T
        return
    up, down = getattr(module, layout.up_name), module.down_proj
    for e in range(layout.num_experts):
        yield layout.canonical(layout.up_name, up[e]), layout.canonical("down_proj", down[e])


# ---------------------------------------------------------------- the gate, by what it computes
def recognise_gate(module: nn.Module, layout: Layout) -> Gate:
    """The fused gate that computes what `module`'s own gate computes, else Gate("raw").

    Configs mislead (gpt-oss and MiniMax-M3 say "silu" and mean SwiGLU-OAI), so candidates are
    built from the module's attributes and compared with its own function on probe values that
    reach far beyond every clamp.
    """
    probe = torch.cat([torch.linspace(-30, 30, 121, device="cpu"), torch.linspace(-3, 3, 61, device="cpu")]).float()
    limits = {float(v) for v in _attributes(module, "limit") if v and v > 0} | {inf}
    alphas = {float(v) for v in _attributes(module, "alpha") if v} | {1.0}
    if layout.gated:
        pairs = torch.cartesian_prod(probe, probe).T.contiguous()  # [2, probes^2]
        candidates = [
            Gate(kind, alpha, limit, offset, after)
            for limit in sorted(limits)
            for kind, alpha in [*(("silu", a) for a in sorted(alphas)), ("gelu_tanh", 1.0)]
            for offset in (0.0, 1.0)
            for after in (False, True)
        ]
    else:
        pairs = probe[None]
        candidates = [Gate("relu2", gated=False)]
    concatenated = pairs.T.contiguous()  # rows of [gate, up]; the same when interleaved: I = 1
    with torch.no_grad(), torch.device("cpu"):
        try:
            expected = own_gate(module, type(module), layout, concatenated).float()
        except Exception:  # a gate with parameters of its own: run it unfused
            return Gate("raw", gated=layout.gated)
        for gate in candidates:
            if torch.allclose(gate(concatenated), expected, rtol=1e-5, atol=1e-6):
                return gate
    return Gate("raw", gated=layout.gated)


def _attributes(module: nn.Module, ending: str) -> Iterator[float]:
    for name, value in vars(module).items():
        if name.endswith(ending) and isinstance(value, (int, float)):
            yield value


def own_gate(module: nn.Module, source_class: type, layout: Layout, w13_out: Tensor) -> Tensor:
    """`source_class`'s gate on GEMM 1's output [rows, 2I] (rows [gate; up]), by `module`'s attributes."""
    if not layout.gated:
        return module.act_fn(w13_out)
    if layout.interleaved:
        w13_out = torch.stack(w13_out.chunk(2, dim=-1), dim=-1).flatten(-2)
    apply_gate = getattr(source_class, "_apply_gate", None)
    if apply_gate is not None:
        return apply_gate(module, w13_out)
    act = module.act_fn if hasattr(module, "act_fn") else module.mlp.activation_fn
    gate, up = w13_out.chunk(2, dim=-1)
    return act(gate) * up


# ---------------------------------------------------------------- the drop-in
class HFExperts(NVFP4Experts):
    """`NVFP4Experts` in place of a transformers experts module (`source`)."""

    def __init__(
        self,
        source: nn.Module,
        layout: Layout,
        activations: str,
        input_scale: bool = False,
        device: torch.device | str | None = None,
    ):
        gate = recognise_gate(source, layout)
        super().__init__(
            layout.num_experts, layout.hidden_size, layout.intermediate_size, gate,
            activations, layout.bias, input_scale, device,
        )  # fmt: skip
        self.layout, self.source_class = layout, type(source)
        # transformers' parallel styles and a gate of its own read these
        for name, value in vars(source).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)
        for name, child in source.named_children():
            if not any(True for _ in child.parameters()) or name == "post_expert_norm":
                setattr(self, name, child)
        if hasattr(source, "mlp"):  # DBRX
            self.act_fn = source.mlp.activation_fn
        self._is_expert_parallel = False
        self._hf_quantized_needs_local_tp = True

    def own_gate(self, w13_out: Tensor) -> Tensor:
        return own_gate(self, self.source_class, self.layout, w13_out)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Tensor:
        if self.layout.call == "dense":
            return self._forward_dense(hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.layout.call == "identity":
            if self.num_experts != self.layout.num_experts:
                raise NotImplementedError(
                    f"{self.source_class.__name__} has identity experts, which expert parallelism "
                    "would confuse with experts of other ranks: use tensor parallelism"
                )
            identity = top_k_index >= self.num_experts
            kept = top_k_weights.masked_fill(~identity, 0).sum(dim=1, keepdim=True)
            index = top_k_index.clamp(max=self.num_experts)
            y = super().forward(x, index, top_k_weights) + (x * kept).to(x.dtype)
        else:
            y = super().forward(x, top_k_index, top_k_weights)
        return y.view(hidden_states.shape)

    def _forward_dense(self, hidden_states: Tensor) -> Tensor:
        """Llama 4: rows e*T .. e*T+T-1 go to expert e, scaled by the router beforehand.

        The rows that a token did not choose are zeros, and an expert without biases maps zero to
        zero: they are skipped.
        """
        E = self.num_experts
        T = hidden_states.shape[0] // E
        expert = torch.arange(E, device=hidden_states.device).repeat_interleave(T)[:, None]
        index = torch.where((hidden_states != 0).any(dim=-1, keepdim=True), expert, E)
        return super().forward(hidden_states, index, torch.ones_like(index, dtype=torch.float32))


# ---------------------------------------------------------------- the experts of a model
def find_experts(model: nn.Module, config: MoeNvfp4Config, required: bool = True) -> list[tuple[str, nn.Module, Any]]:
    """(name, module, layout) of every experts module; layout None: excluded by `config`.

    Raises ValueError where there is none to quantize, if it is `required`.
    """
    found, inside = [], ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue  # parts of an experts module are not experts modules
        excluded = config.excludes(name)
        try:
            layout = describe(module)
        except NotImplementedError:
            if not excluded:
                raise
            layout = None
            found.append((name, module, None))
            continue
        if layout is not None:
            found.append((name, module, None if excluded else layout))
            inside = (f"{name}.",)
    if required and not any(layout is not None for _, _, layout in found):
        raise ValueError(
            f"{type(model).__name__} has no experts to quantize"
            + (f": {len(found)} experts modules are all excluded" if found else
               "; dense models are not what this library is for")
        )  # fmt: skip
    return found


def replace_experts(model: nn.Module, name: str, module: nn.Module, layout: Layout, config, device) -> HFExperts:
    """Put an empty `HFExperts` on `device` in the place of the experts module `name`; returns it."""
    experts = HFExperts(module, layout, config.activations, config.input_scale, device)
    if experts.gate.kind == "raw":
        logger.warning_once(f"{type(module).__name__} has a gate of its own: it runs unfused, between the two GEMMs")
    experts.train(module.training)
    model.set_submodule(name, experts)
    return experts
