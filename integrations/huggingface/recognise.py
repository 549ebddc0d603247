"""Experts modules of transformers: recognise them and their gates, and read their weights.

`describe` finds out how an experts module keeps and calls its weights (a `ModuleLayout`), `recognise_gate` what it
computes between its GEMMs. In transformers one interface, the `use_experts_implementation` decorator, serves nearly
every family; `LAYOUTS` has the few that store or call their experts differently.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.prepared import computes_parameters, real_tensors
from moe_nvfp4.quantize.layouts import dbrx
from moe_nvfp4.quantize.layouts.base import interleave_rows, split_rows
from moe_nvfp4.quantize.layouts.stacked import STEP
from moe_nvfp4.weights import Gate

# how the names of attributes end that a gate computes with
GATE = ("act_fn", "limit", "alpha", "softcap", "_apply_gate")


@dataclass(frozen=True)
class ModuleLayout:
    """How an experts module keeps and calls its weights.

    call         "routed": (hidden_states, top_k_index, top_k_weights), the common interface
                 "identity": the same, but experts from `num_experts` on return their input (LongCat)
                 "dense": (hidden_states [E * T, H]), one block of rows for every expert (Llama 4)
    transposed   weights are [E, in, out]
    interleaved  rows of gate and up alternate (gpt-oss)
    bias         the dtype of the biases; None: there are none
    in_files     what mlp.experts, the end of the module's name, is called in files
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    gated: bool = True
    transposed: bool = False
    interleaved: bool = False
    bias: torch.dtype | None = None
    call: str = "routed"
    in_files: str = "mlp.experts"

    @property
    def up_name(self) -> str:
        return "gate_up_proj" if self.gated else "up_proj"

    def canonical(self, name: str, tensor: Tensor) -> Tensor:
        """One expert's tensor as the module stores it, [in, out] or [out, in] -> [out, in] with rows [gate; up]."""
        if tensor.dim() == 2 and self.transposed:
            tensor = tensor.T
        if self.interleaved and name.startswith("gate_up_proj"):
            tensor = torch.cat(split_rows(tensor, 2, interleaved=True))
        return tensor

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `canonical`."""
        if self.interleaved and name.startswith("gate_up_proj"):
            tensor = interleave_rows(tensor, 2)
        return tensor.T if tensor.dim() == 2 and self.transposed else tensor


def describe(module: nn.Module, name: str = "") -> ModuleLayout | None:
    """The layout of an experts module; None for any other module. name: its name in the model.

    Raises NotImplementedError for experts that this library cannot run.
    """
    if isinstance(module, NVFP4Experts):
        return None
    what = f"{type(module).__module__}.{type(module).__name__}"
    own = LAYOUTS.get(type(module).__name__ if what.startswith("transformers.") else what)
    if own is None and hasattr(type(module), "_apply_gate") and hasattr(module, "has_gate"):
        own = _decorated
    if own is not None:
        _check_calls(module, moe if own is _decorated else sys.modules[type(module).__module__])
        return own(module)
    if listed := isinstance(module, nn.ModuleList) and len(module) and re.search(r"(^|\.)experts$", name):
        what = f"{name}, a list of {type(module[0]).__name__},"  # from code that a checkpoint brings along
    if listed or _looks_like_experts(module):
        if what.startswith("liger_kernel."):
            way_out = "It is for dense weights: keep the model's own with liger_kernel_config={'swiglu': False}"
        else:
            way_out = (
                "Leave it as it is with exclude=['<its module name>'], or decorate the class with transformers' "
                "use_experts_implementation"
            )
        raise NotImplementedError(
            f"{what} holds experts in a form that is not supported: neither transformers' experts interface "
            f"(use_experts_implementation) nor one of {', '.join(LAYOUTS)}. {way_out}"
        )
    return None


def _looks_like_experts(module: nn.Module) -> bool:
    if not re.search(r"(?<!Shared)Experts?(GLU)?$|CDMoE$", type(module).__name__):
        return False
    parent_only = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) == 0
    return not parent_only and next(module.parameters(), None) is not None


def _check_calls(module: nn.Module, defined_in: Any) -> None:
    """NotImplementedError unless the class of an experts module is called as it is in the file `defined_in`, and not by
    what a subclass or a patch has put over it."""
    for part in (module, *filter(None, [getattr(module, "mlp", None)])):  # DBRX has one
        made_in = getattr(type(part).forward, "__globals__", None)
        name = "__call__" if type(part).__call__ is not nn.Module.__call__ else "forward"
        if name == "__call__" or made_in is not vars(defined_in):
            raise NotImplementedError(
                f"{type(part).__name__} has a {name} of its own, over that of transformers, and 4-bit experts would "
                "not do what it does: put that into a module around the experts, decorate the class itself "
                "(use_experts_implementation), or leave it as it is with exclude=['<its module name>']"
            )


def _decorated(m: Any) -> ModuleLayout:
    forward = type(m).forward
    known_as = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    if "experts_interface" in known_as and known_as["experts_interface"].cell_contents is not ALL_EXPERTS_FUNCTIONS:
        raise NotImplementedError(
            f"{type(m).__name__} runs by functions of an experts_interface of its own, which 4-bit experts would not "
            "call: decorate it without, or leave it as it is with exclude=['<its module name>']"
        )
    up_name = "gate_up_proj" if m.has_gate else "up_proj"
    known = {f"{name}{end}" for name in (up_name, "down_proj") for end in ("", "_bias")[: 1 + m.has_bias]}
    norm = "post_expert_norm." if getattr(m, "has_post_expert_norm", False) else "\0"
    more = [n for n, _ in m.named_parameters() if n not in known and not n.startswith(norm)]
    more += [n for n, _ in m.named_buffers(recurse=False)]
    if computes_parameters(m):  # of which others tell
        more = []
    elif missing := {up_name, "down_proj"} - m._parameters.keys():
        raise NotImplementedError(
            f"{type(m).__name__}.{min(missing)} is no parameter of its own, but computed: 4-bit experts would have the "
            "result, and nothing could bring it back to what it is computed from. Leave it as it is with "
            "exclude=['<its module name>']"
        )
    if more:
        raise NotImplementedError(
            f"{type(m).__name__} has {', '.join(more[:3])} besides the weights of transformers' "
            "use_experts_implementation, and 4-bit experts would lose it: put it into a module around the experts, or "
            "leave them as they are with exclude=['<its module name>']"
        )
    shape = tuple(getattr(m, up_name).shape)
    E, N13, H = shape if not m.is_transposed else (shape[0], shape[2], shape[1])
    return ModuleLayout(
        num_experts=E,
        hidden_size=H,
        intermediate_size=N13 // 2 if m.has_gate else N13,
        gated=m.has_gate,
        transposed=m.is_transposed,
        interleaved=not m.is_concatenated,
        bias=m.down_proj_bias.dtype if m.has_bias else None,
    )


def _step3p7(m: Any) -> ModuleLayout:
    E, N13, H = m.gate_up_proj.shape
    return ModuleLayout(E, H, N13 // 2, in_files=STEP.module)


def _longcat(m: Any) -> ModuleLayout:
    if m.gate_up_proj is None:
        raise NotImplementedError(f"{type(m).__name__} has no routed expert: exclude this layer")
    # gate_up_proj also has (unused) rows for the identity experts, down_proj has none
    E, H, I = m.down_proj.shape
    return ModuleLayout(E, H, I, call="identity")


def _llama4(m: Any) -> ModuleLayout:
    E, I, H = m.down_proj.shape
    return ModuleLayout(E, H, I, transposed=True, call="dense")


def _dbrx(m: Any) -> ModuleLayout:
    return ModuleLayout(m.num_experts, m.hidden_size, m.ffn_hidden_size)


# name of a class of transformers, or full name of another -> function that describes its modules
LAYOUTS: dict[str, Callable[[nn.Module], ModuleLayout]] = {
    "Step3p7Experts": _step3p7,
    "LongcatFlashExperts": _longcat,
    "Llama4TextExperts": _llama4,
    "DbrxExperts": _dbrx,
}


def dense_experts(module: Any, layout: ModuleLayout) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (w13 [N13, H] with rows [gate; up], w2 [H, I]) of each expert in turn; no copies are kept."""
    if hasattr(module, "mlp"):  # DBRX: [E * I, H] each; w2 is already [in, out] per expert
        w1, v1, w2 = (dbrx.by_expert(p, layout.num_experts) for p in (module.mlp.w1, module.mlp.v1, module.mlp.w2))
        for e in range(layout.num_experts):
            yield torch.cat([w1[e], v1[e]]), w2[e].T
        return
    up, down = getattr(module, layout.up_name), module.down_proj
    for e in range(layout.num_experts):
        yield layout.canonical(layout.up_name, up[e]), layout.canonical("down_proj", down[e])


# ---------------------------------------------------------------- the gate, by what it computes
@real_tensors()
@torch.no_grad()
def recognise_gate(module: nn.Module, layout: ModuleLayout, source_class: Any = None) -> Gate:
    """The fused gate that computes the same as `module`'s own gate; Gate("raw") if there is none, and if its activation
    has hooks. source_class: the class whose gate it is, if not that of `module`.

    Configs mislead (gpt-oss and MiniMax-M3 say "silu" and mean SwiGLU-OAI). So candidates are built from the
    attributes that the module's gate reads, and compared with it on probe values far beyond every clamp. A user's own
    gate or activation runs unfused, and so does one that reads more than `GATE`: it may depend on what changes later
    (dropout in training), or differ where it is not probed.
    """
    raw, act, own_class = Gate("raw", gated=layout.gated), _activation(module), source_class or type(module)
    own = [f for f in (act, getattr(own_class, "_apply_gate", None)) if f is not None]
    if changes(module, source_class).own or "_apply_gate" in vars(module) or not all(map(is_of_library, own)):
        return raw
    read = set[str]()
    seen: Any = _Reading(module, read) if hasattr(own_class, "_apply_gate") else module

    def computed(rows: Tensor) -> Tensor:
        return own_gate(seen, own_class, layout, rows).float()

    def runs_on(device: torch.device | str) -> bool:
        try:
            computed(torch.zeros(1, 4 if layout.gated else 2, device=device))
        except Exception:  # a gate with parameters, which runs unfused, or a kernel for GPUs (`use_kernels`)
            return False
        return True

    gpu = next((p.device for p in module.parameters() if p.is_cuda), None)
    device = "cpu" if runs_on("cpu") else gpu if gpu is not None and runs_on(gpu) else None
    if device is None or not all(name.endswith(GATE) for name in read):
        return raw
    numbers = {name: getattr(module, name, None) for name in read if not name.endswith(("act_fn", "_apply_gate"))}
    if not all(isinstance(v, int | float | None) for v in numbers.values()):  # a tensor may be trained, or changed
        return raw
    values = {name: v for name, v in numbers.items() if v is not None}
    with torch.device(device):
        limits = {float(v) for name, v in values.items() if name.endswith("limit") and v > 0} | {inf}
        alphas = {float(v) for name, v in values.items() if name.endswith("alpha") and v} | {1.0}
        beyond = [sign * scale * limit for limit in limits - {inf} for scale in (0.99, 1.01, 2) for sign in (-1, 1)]
        # torch.device forgets linspace in a process where transformers has replaced it at first (model init on meta)
        wide, near = (torch.linspace(-end, end, steps, device=device) for end, steps in ((30, 121), (3, 61)))
        probe = torch.cat([wide, near, torch.tensor([*beyond, 0.0])])
        probe = probe[len(probe) % 2 :].float()
        rows = torch.cartesian_prod(probe, probe).T if layout.gated else probe[None]  # [gate, up], [2, probes^2]
        # As I = 2 channels [probes / 2, 2I]: a gate may treat them differently, or take others for gate and up
        concatenated = torch.cat([row.view(2, -1) for row in rows]).T.contiguous()
        expected = computed(concatenated)
        for gate in _candidates(limits, alphas) if layout.gated else (Gate("relu2", gated=False),):
            if torch.allclose(gate(concatenated), expected, rtol=1e-5, atol=1e-6):
                return gate
    return raw


def _candidates(limits: Iterable[float], alphas: Iterable[float]) -> Iterator[Gate]:
    for limit in sorted(limits):
        for kind, alpha in [*(("silu", a) for a in sorted(alphas)), ("gelu_tanh", 1.0)]:
            for offset in (0.0, 1.0):
                yield from (Gate(kind, alpha, limit, offset, after) for after in (False, True))


class _Reading:
    """Stands for a module whose gate is called, and puts the names of the attributes that this reads into `read`."""

    def __init__(self, module: nn.Module, read: set[str]):
        self._module, self._read = module, read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._module, name)


def is_of_library(function: Any) -> bool:
    """Whether a function or module is one of torch or transformers, without parts that may be replaced: a user's own
    may depend on more than its input."""
    if isinstance(function, nn.Module):
        made_by, parts = type(function), any(True for _ in function.children())
        return not parts and _in_library(made_by.__module__) and is_of_library(made_by.forward)
    while function is not None:
        while isinstance(function, partial):
            function = function.func
        # what functools.wraps makes has the name of the module of another function
        made_in = getattr(function, "__globals__", None)
        if not _in_library(getattr(function, "__module__", None) if made_in is None else made_in.get("__name__")):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _in_library(module: Any) -> bool:
    return str(module).partition(".")[0] in ("torch", "transformers")


class Changes(NamedTuple):
    """What was done to the class of an experts module, to its gate, and to its activation, if that is a module.

    act          the class of the activation
    own          whether this has hooks or a forward of its own, which a fused gate would not call
    gate         the gate's function
    act_forward  the forward of the activation's class
    assigned     a forward that was assigned to the activation
    forward      the forward of the experts' class
    """

    act: Any
    own: bool
    gate: Any
    act_forward: Any
    assigned: Any
    forward: Any

    def named(self) -> list[str]:
        """The same by names: those that another process may have, too."""
        return [f"{getattr(x, '__module__', '')}.{getattr(x, '__qualname__', x)}" for x in self]


def changes(module: Any, source_class: Any = None) -> Changes:
    """source_class: as for `recognise_gate`."""
    own_class = source_class or type(module)
    act, gate, forward = _activation(module), getattr(own_class, "_apply_gate", None), own_class.forward
    if not isinstance(act, nn.Module):
        return Changes(None, False, gate, None, None, forward)
    hooks = act._forward_pre_hooks, act._forward_hooks, act._backward_pre_hooks, act._backward_hooks
    assigned = vars(act).get("forward")
    # transformers' use_kernels assigns the method of a class, which is asked whether it computes the same
    own = assigned is not None and not (isinstance(assigned, MethodType) and assigned.__qualname__.count(".") == 1)
    own = own or any(map(len, hooks)) or bool(_has_any_global_hook())
    return Changes(type(act), own, gate, type(act).forward, assigned, forward)


def act_settings(module: Any) -> tuple[Any, Any]:
    """The attributes by which GELUTanh and torch's GELU compute, of the activation of an experts module."""
    act = _activation(module)
    found = vars(act) if isinstance(act, nn.Module) else {}
    return found.get("act"), found.get("approximate")


def _activation(module: Any) -> Any:
    return getattr(module, "act_fn", None) or getattr(getattr(module, "mlp", None), "activation_fn", None)


def own_gate(module: Any, source_class: Any, layout: ModuleLayout, w13_out: Tensor) -> Tensor:
    """`source_class`'s gate on GEMM 1's output [rows, 2I], columns [gate, up], with the attributes of `module`."""
    if not layout.gated:
        return module.act_fn(w13_out)
    if layout.interleaved:
        w13_out = torch.stack(w13_out.chunk(2, dim=-1), dim=-1).flatten(-2)
    if (assigned := vars(module).get("_apply_gate")) is not None:  # to this module, not to its class
        return assigned(w13_out)
    apply_gate = getattr(source_class, "_apply_gate", None)
    if apply_gate is not None:
        return apply_gate(module, w13_out)
    gate, up = w13_out.chunk(2, dim=-1)
    activated: Tensor = _activation(module)(gate)
    return activated * up
