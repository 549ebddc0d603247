"""Hugging Face experts modules: recognise them, read their weights, and stand in for them.

`describe` finds out how an experts module keeps and calls its weights (a `ModuleLayout`); `HFExperts` is
`NVFP4Experts` with the interface of that module. In transformers one interface, the `use_experts_implementation`
decorator, serves nearly every family; `LAYOUTS` has the few that store or call their experts differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils import logging

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.format import dequantize
from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.ops import Adapters
from moe_nvfp4.prepared import real_tensors
from moe_nvfp4.quantize.layouts import dbrx
from moe_nvfp4.quantize.layouts.base import interleave_rows, split_rows
from moe_nvfp4.quantize.layouts.stacked import STEP
from moe_nvfp4.quantize.names import names_experts
from moe_nvfp4.weights import Gate

logger = logging.get_logger(__name__)
GATE = ("act_fn", "limit", "alpha", "_apply_gate")  # how the names of attributes end that a gate computes with
IMPLEMENTATION = "moe_nvfp4"  # the experts implementation in the configs of 4-bit models
HALF_SWAPPED = (
    "swap_experts was interrupted: some experts are 4-bit, others dense, and nothing reads such files: call "
    "swap_experts again, which finishes the rest, then save"
)


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
    if own is not None:
        return own(module)
    if hasattr(type(module), "_apply_gate") and hasattr(module, "has_gate"):
        return _decorated(module)
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


def _decorated(m: Any) -> ModuleLayout:
    if getattr(type(m).forward, "__globals__", None) is not vars(moe):  # the decorator's
        raise NotImplementedError(
            f"{type(m).__name__} has a forward of its own, over that of transformers' use_experts_implementation, and "
            "4-bit experts would not do what it does: put that into a module around the experts, decorate the class "
            "itself, or leave it as it is with exclude=['<its module name>']"
        )
    up_name = "gate_up_proj" if m.has_gate else "up_proj"
    known = {f"{name}{end}" for name in (up_name, "down_proj") for end in ("", "_bias")[: 1 + m.has_bias]}
    more = [n for n, _ in m.named_parameters() if n not in known and not n.startswith("post_expert_norm.")]
    more += [n for n, _ in m.named_buffers(recurse=False)]
    if more and {up_name, "down_proj"} <= m._parameters.keys():  # else they are parametrized, of which others tell
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


def empty_like(module: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> nn.Module:
    """A module like `module` whose parameters are zeros, in `dtype` (default: their own). It shares the config, and has
    no hooks of accelerate."""
    new = type(module).__new__(type(module))
    nn.Module.__init__(new)
    hooks = {"forward", "_hf_hook", "_old_forward"}  # attached by accelerate
    for name in vars(module).keys() - vars(new).keys() - hooks:
        setattr(new, name, getattr(module, name))
    new.train(module.training)
    for name, p in module.named_parameters(recurse=False):
        zeros = torch.zeros_like(p, device=device, dtype=dtype, memory_format=torch.contiguous_format)
        new.register_parameter(name, nn.Parameter(zeros))
    for name, buffer in module.named_buffers(recurse=False):
        new.register_buffer(name, buffer)
    for name, child in module.named_children():
        has_weights = next(child.parameters(), None) is not None
        new.add_module(name, empty_like(child, device, dtype) if has_weights else child)
    return new


def keep_hooks(new: nn.Module, old: nn.Module) -> nn.Module:
    """`new`, which replaces `old`, with the hooks that were registered on that. Their handles remove them as before."""
    vars(new).update(
        {name: hooks for name, hooks in vars(old).items() if re.match(r"_(is_full_)?(for|back)ward_", name)}
    )
    return new


# ---------------------------------------------------------------- the gate, by what it computes
@real_tensors()
def recognise_gate(module: nn.Module, layout: ModuleLayout, source_class: Any = None) -> Gate:
    """The fused gate that computes the same as `module`'s own gate; Gate("raw") if there is none, and if its activation
    has hooks. source_class: the class whose gate it is, if not that of `module`.

    Configs mislead (gpt-oss and MiniMax-M3 say "silu" and mean SwiGLU-OAI). So candidates are built from the
    module's attributes, and compared with the module's own function on probe values far beyond every clamp.
    """
    if changes(module)[1]:
        return Gate("raw", gated=layout.gated)
    probe = torch.cat([torch.linspace(-30, 30, 121, device="cpu"), torch.linspace(-3, 3, 61, device="cpu")]).float()
    limits = {float(v) for v in _attributes(module, "limit") if v and v > 0} | {inf}
    alphas = {float(v) for v in _attributes(module, "alpha") if v} | {1.0}
    if layout.gated:
        rows = torch.cartesian_prod(probe, probe).T  # [gate, up], [2, probes^2]
        candidates = [
            Gate(kind, alpha, limit, offset, after)
            for limit in sorted(limits)
            for kind, alpha in [*(("silu", a) for a in sorted(alphas)), ("gelu_tanh", 1.0)]
            for offset in (0.0, 1.0)
            for after in (False, True)
        ]
    else:
        rows = probe[None]
        candidates = [Gate("relu2", gated=False)]
    # As I = 2 channels [probes / 2, 2I]: a gate of its own may treat them differently, or take others for gate and up
    concatenated = torch.cat([row.view(2, -1) for row in rows]).T.contiguous()
    with torch.no_grad(), torch.device("cpu"):
        try:
            expected = own_gate(module, source_class or type(module), layout, concatenated).float()
        except Exception:  # a gate with parameters, which runs unfused
            return Gate("raw", gated=layout.gated)
        for gate in candidates:
            if torch.allclose(gate(concatenated), expected, rtol=1e-5, atol=1e-6):
                return gate
    return Gate("raw", gated=layout.gated)


def _attributes(module: nn.Module, ending: str) -> Iterator[float]:
    for name, value in vars(module).items():
        if name.endswith(ending) and isinstance(value, (int, float)):
            yield value


def changes(module: Any, source_class: Any = None) -> tuple:
    """What was done to the gate of `module` and to its activation function, if that is a module: (its class, whether it
    has hooks or a forward of its own, which a fused gate would not call, and the functions of both classes).
    source_class: as for `recognise_gate`."""
    act, gate = _activation(module), getattr(source_class or type(module), "_apply_gate", None)
    if not isinstance(act, nn.Module):
        return None, False, gate
    hooks = act._forward_pre_hooks, act._forward_hooks, act._backward_pre_hooks, act._backward_hooks
    forward = vars(act).get("forward")
    # transformers' use_kernels assigns the method of a class that computes the same
    own = forward is not None and not (isinstance(forward, MethodType) and forward.__qualname__.count(".") == 1)
    return type(act), own or any(map(len, hooks)) or _has_any_global_hook(), gate, type(act).forward


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


# ---------------------------------------------------------------- the drop-in
class HFExperts(NVFP4Experts):
    """`NVFP4Experts` in place of a transformers experts module (`source`)."""

    def __init__(
        self,
        source: nn.Module,
        layout: ModuleLayout,
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
        # transformers' parallel styles, and the module's own gate, read these
        for name, value in vars(source).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)
        for name, child in source.named_children():
            if not any(True for _ in child.parameters()) or name == "post_expert_norm":
                setattr(self, name, child)
        if isinstance(mlp := getattr(source, "mlp", None), nn.Module):  # DBRX
            self.act_fn = mlp.activation_fn
        self.changes = changes(self, self.source_class)
        self.rows_for_one = layout.num_experts if layout.call == "dense" else 1
        self._is_expert_parallel = False
        self._hf_quantized_needs_local_tp = True
        self._source = (empty_like(source, "meta"),)  # in a tuple, so that it is no submodule
        self.implementation: str | None = None  # the config's before `set_implementation` changed it
        self.half_swapped = False  # True while `swap_experts` works, and after it was interrupted

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.endswith(GATE) and "half_swapped" in vars(self):  # what the gate computes
            self.gate = recognise_gate(self, self.layout, self.source_class)

    def __getstate__(self) -> dict[str, Any]:
        # a function that replaced another may have no name, and could not be pickled
        return {**super().__getstate__(), "changes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.changes = changes(self, self.source_class)

    def _save_to_state_dict(self, *args: Any) -> None:
        if self.half_swapped:
            raise RuntimeError(HALF_SWAPPED)
        super()._save_to_state_dict(*args)

    def own_gate(self, w13_out: Tensor) -> Tensor:
        return own_gate(self, self.source_class, self.layout, w13_out)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        adapters: Adapters = ((), ()),
    ) -> Tensor:
        config: Any = getattr(self, "config", None)
        if self.implementation and config._experts_implementation != IMPLEMENTATION:
            raise ValueError(
                f"experts_implementation {config._experts_implementation!r} was set, but 4-bit experts run in one "
                f"way only: model.set_experts_implementation({IMPLEMENTATION!r}) restores it, and model.dequantize() "
                "makes dense experts, which run in the other ways"
            )
        if self.changes != (now := changes(self, self.source_class)):
            self.changes = now
            self.gate = recognise_gate(self, self.layout, self.source_class)
        if self.layout.call == "dense":
            return self._forward_dense(hidden_states, adapters)
        assert top_k_index is not None and top_k_weights is not None, "all other experts are routed"
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
            y = super().forward(x, index, top_k_weights, adapters) + (x * kept).to(x.dtype)
        else:
            y = super().forward(x, top_k_index, top_k_weights, adapters)
        return y.view(hidden_states.shape)

    def _forward_dense(self, hidden_states: Tensor, adapters: Adapters) -> Tensor:
        """Llama 4: expert e gets rows e*T to e*T+T-1, which the router has scaled.

        Rows of tokens that did not choose the expert are zeros. Experts without biases map zeros to zeros, so these
        rows are skipped.
        """
        E = self.num_experts
        T = hidden_states.shape[0] // E
        expert = torch.arange(E, device=hidden_states.device).repeat_interleave(T)[:, None]
        index = torch.where((hidden_states != 0).any(dim=-1, keepdim=True), expert, E)
        return super().forward(hidden_states, index, torch.ones_like(index, dtype=torch.float32), adapters)

    def to_dense(self, dtype: torch.dtype) -> nn.Module:
        """The experts module that this one replaced, with these weights dequantized exactly and rounded to `dtype`.

        NotImplementedError for weights that are split over ranks or offloaded.
        """
        self.unpack()
        for parameter in self.parameters():
            refuse_elsewhere(parameter, "dequantized")
        (source,) = self._source
        dense: Any = empty_like(source, self.down_proj.device, dtype)
        p, layout = dict(self.named_parameters()), self.layout
        for e in range(self.num_experts):
            scales = [p[f"{part}_global_scale"][e].expand(self.intermediate_size) for part in self.projections[:-1]]
            w13 = dequantize(p[self.up_name][e], p[f"{self.up_name}_sf"][e], torch.cat(scales))
            w2 = dequantize(p["down_proj"][e], p["down_proj_sf"][e], p["down_proj_global_scale"][e])
            w13, w2 = w13[:, : self.hidden_size], w2[:, : self.intermediate_size]
            # AWQ: (x * s) · wᵀ = x · (w * s)ᵀ
            pairs = zip((w13, w2), self.pre_quant_scales, strict=True)
            w13, w2 = (w if s is None else w * s[e].float() for w, s in pairs)
            if hasattr(dense, "mlp"):  # DBRX
                mlp = dense.mlp
                w1, v1, down = (dbrx.by_expert(q.data, self.num_experts) for q in (mlp.w1, mlp.v1, mlp.w2))
                w1[e], v1[e], down[e] = *w13.chunk(2), w2.T
                continue
            getattr(dense, self.up_name).data[e] = layout.stored(self.up_name, w13)
            dense.down_proj.data[e] = layout.stored("down_proj", w2)
            for name in (self.up_name, "down_proj") if layout.bias is not None else ():
                getattr(dense, f"{name}_bias").data[e] = layout.stored(f"{name}_bias", p[f"{name}_bias"][e])
        for name, value in (*self.named_children(), *((n, v) for n, v in vars(self).items() if n.endswith(GATE))):
            setattr(dense, name, value)
        return keep_hooks(dense.train(self.training), self)


def refuse_elsewhere(parameter: Tensor, what: str) -> None:
    """NotImplementedError unless all of `parameter` is here, in memory. what: a participle for the message."""
    if isinstance(parameter, DTensor):
        raise NotImplementedError(f"a model that is split over ranks is not {what}: do it in one process, and save")
    if parameter.device.type == "meta":
        raise NotImplementedError(f"a model with weights on disk or on meta is not {what}: load it without offloading")


# ---------------------------------------------------------------- the experts of a model
def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, ModuleLayout | NotImplementedError]]:
    """(name, module, layout) of every experts module; one that several layers share appears under each of its names. If
    there is no layout, the error that says why is in its place."""
    inside = "\0"
    for name, module in model.named_modules(remove_duplicate=False):
        if name.startswith(inside):
            continue  # parts of an experts module are not experts modules
        try:
            layout = describe(module, name)
        except NotImplementedError as error:
            yield name, module, error
            continue
        if layout is not None:
            inside = f"{name}."
            yield name, module, layout


def find_experts(
    model: nn.Module, config: MoeNvfp4Config, required: bool = True
) -> list[tuple[str, nn.Module, ModuleLayout | None]]:
    """(name, module, layout) of every experts module; layout is None if `config` excludes it. A module that several
    layers share appears under each of its names; if one of them is excluded, all are.

    required: ValueError if there is none to quantize, and for a pattern of `config.exclude` that matches none.
    """
    found: list[tuple[str, nn.Module, ModuleLayout | None]] = []
    excluded: set[int] = set()
    for name, module, layout in experts_modules(model):
        leave = config.excludes(name)
        if isinstance(layout, NotImplementedError):
            if not leave:
                raise layout
            found.append((name, module, None))
            continue
        found.append((name, module, layout))
        excluded |= {id(module)} if leave else set()
    found = [(name, m, None if id(m) in excluded else layout) for name, m, layout in found]
    if required:
        _check_excluded(model, config, found)
    return found


def refuse_tied(model: Any, names: Iterable[str]) -> None:
    """NotImplementedError for experts modules, of those `names` that no file has, which are tied to others."""
    for name, other in _tied(model, names).items():
        raise NotImplementedError(
            f"{name} and {other} have the same weights (tied), which the files have once: 4-bit ones are not made of "
            "them as they are read. Load the dense model, then swap_experts(model), which can be saved and loaded"
        )


def untie(model: Any, names: Iterable[str]) -> None:
    """Have the 4-bit experts `names` keep weights of their own, also when the model ties its weights again.

    transformers would tie codes, but not the scales beside them, and kernels bring the codes of one module into their
    layout.
    """
    own = _tied(model, names).keys()
    if not own:
        return
    pairs = {key: other for key, other in model.all_tied_weights_keys.items()
             if not any(name.rpartition(".")[0] in own for name in (key, other))}  # fmt: skip
    model.all_tied_weights_keys = pairs
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and part._tied_weights_keys:  # patterns, which match 4-bit weights as well
            start = f"{name}." if name else ""
            inside = {k: v for k, v in pairs.items() if k.startswith(start) and v.startswith(start)}
            part._tied_weights_keys = {k.removeprefix(start): v.removeprefix(start) for k, v in inside.items()}


def _tied(model: Any, names: Iterable[str]) -> dict[str, str]:
    """name -> the module that has the same weights, of those experts modules `names` that are tied to another one."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = {key.rpartition(".")[0]: other.rpartition(".")[0] for key, other in tied.items()}
    pairs |= {other: key for key, other in pairs.items()}
    return {name: pairs[name] for name in names if name in pairs}


def _check_excluded(model: nn.Module, config: MoeNvfp4Config, found: list) -> None:
    names = [name for name, *_ in found]
    what = type(model).__name__
    if not names:
        raise ValueError(f"{what} has no experts to quantize; dense models are not what this library is for")
    useless = [p for p in config.exclude if not any(names_experts(p, name) for name in names)]
    if useless and isinstance(config.linears, str):  # else `exclude` is for linears too, and `choose_linears` says so
        listed = ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")
        raise ValueError(f"exclude: {', '.join(map(repr, useless))} matches no experts module; {what} has {listed}")
    if all(layout is None for _, _, layout in found):
        raise ValueError(f"{what} has no experts to quantize: {len(found)} experts modules are all excluded")


def experts_for(
    module: nn.Module, layout: ModuleLayout, config: MoeNvfp4Config, device: torch.device | str
) -> HFExperts:
    """Empty 4-bit experts on `device` that can replace `module`."""
    experts = HFExperts(module, layout, config.activations, config.input_scale, device)
    experts.recipe = config.recipe
    if experts.gate.kind == "raw":
        logger.warning_once(f"{type(module).__name__} has a gate of its own: it runs unfused, between the two GEMMs")
    return experts.train(module.training)


def dense_forward(module: nn.Module, *args: Tensor) -> Tensor:
    """The experts implementation "moe_nvfp4" in transformers' registry: it runs dense experts as transformers' default.

    4-bit experts do not use the registry. Dense ones do, if they share a config that says "moe_nvfp4" with 4-bit ones,
    as multi-token prediction layers do, or if the user sets it.
    """
    if not torch.compiler.is_compiling():
        logger.warning_once(
            f"{type(module).__name__} of this model are dense and run by 'grouped_mm', though the experts "
            f"implementation is {IMPLEMENTATION!r}: swap_experts(model) makes them 4-bit"
        )
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *args)


def set_implementation(model: nn.Module, loading: bool = False) -> None:
    """Set the experts implementation to "moe_nvfp4" in every config of `model` that only 4-bit experts read.

    If it is changed later (`set_experts_implementation`), calling the experts is an error; generate() does not change
    it. A config that dense experts share keeps its implementation. loading: ValueError if from_pretrained was given
    another one.
    """
    modules: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "config", None), PretrainedConfig)]
    experts: list[Any] = [m for m in modules if isinstance(m, HFExperts)]
    dense = {id(m.config) for m in modules if hasattr(type(m), "_apply_gate")}
    switches = [m for m in modules if getattr(m, "_can_set_experts_implementation", bool)()]
    defaults = {id(m.config): m.get_correct_experts_implementation(None) for m in switches}
    configs = {id(m.config): m.config for m in experts if id(m.config) not in dense}
    before = {key: config._experts_implementation for key, config in configs.items()}
    for key, config in configs.items():
        if loading and key in defaults and before[key] not in (defaults[key], IMPLEMENTATION):
            raise ValueError(
                f"experts_implementation {before[key]!r} was asked for, but 4-bit experts run in one way only: leave "
                f"it out, or say {IMPLEMENTATION!r}"
            )
        config._experts_implementation_internal = IMPLEMENTATION
    for module in experts:
        module.implementation = before.get(id(module.config))
