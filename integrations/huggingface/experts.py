"""`HFExperts`, which stands in for an experts module of transformers, and the experts modules of a model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils import logging

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.format import dequantize
from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.recognise import (
    GATE,
    ModuleLayout,
    act_settings,
    changes,
    describe,
    is_of_library,
    own_gate,
    recognise_gate,
)
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.ops import Adapters
from moe_nvfp4.quantize.layouts import dbrx
from moe_nvfp4.quantize.names import names_experts

logger = logging.get_logger(__name__)
IMPLEMENTATION = "moe_nvfp4"  # the experts implementation in the configs of 4-bit models
FLAGS = "has_bias", "has_gate", "has_post_expert_norm", "is_concatenated", "is_transposed"  # of the decorated classes
# names of the tensors of dense and 4-bit modules
OWN = re.compile(r"(((gate_up|gate|up|down)_proj|weight)_?)?(sf|global_scale|input_scale|pre_quant_scale|bias)?")
HALF_SWAPPED = (
    "swap_experts was interrupted: some experts are 4-bit, others dense, and nothing reads such files: call "
    "swap_experts again, which finishes the rest, then save"
)


def empty_like(module: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> nn.Module:
    """A module like `module` whose parameters are zeros, in `dtype` (default: their own). It shares the config, and has
    no hooks of accelerate, and no program that torch made of `module`."""
    new = type(module).__new__(type(module))
    nn.Module.__init__(new)
    bound = {"forward", "_hf_hook", "_old_forward", "_compiled_call_impl"}
    for name in vars(module).keys() - vars(new).keys() - bound:
        setattr(new, name, bound_to(new, module, getattr(module, name)))
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


def bound_to(new: nn.Module, old: nn.Module, value: Any) -> Any:
    """`value`, an attribute of `old`, for `new`: a method of the former becomes one of the latter."""
    return MethodType(value.__func__, new) if isinstance(value, MethodType) and value.__self__ is old else value


def assigned(module: nn.Module) -> str | None:
    """What was assigned to `module`, and not to its class, of the functions that 4-bit weights would not run."""
    own = {key: vars(module)[key] for key in ("_old_forward", "forward", "_apply_gate") if key in vars(module)}
    if "_old_forward" in own:  # accelerate's hooks call it
        own.pop("forward")
    for key, function in own.items():
        name = key.removeprefix("_old_")
        if getattr(function, "__func__", None) is not getattr(type(module), name, None):
            return name
    return "forward" if isinstance(module, nn.Linear) and not is_of_library(type(module).forward) else None


def refuse_assigned(module: nn.Module, name: str) -> None:
    """NotImplementedError if `module`, which 4-bit weights replace while a model loads, has functions of its own."""
    if function := assigned(module):
        raise NotImplementedError(
            f"{name}: the model's class assigns {function} to this module when it is made, and 4-bit weights would not "
            "run it: assign it to the loaded model, or put it into a hook (register_forward_hook), which stays"
        )
    refuse_added(name, module)


def refuse_added(name: str, module: nn.Module) -> None:
    """NotImplementedError if `module`, which another one replaces, has tensors or modules that are not of its class:
    they would vanish with it."""
    own = re.compile("weight|bias") if isinstance(module, nn.Linear) else OWN
    tensors = {**module._parameters, **module._buffers}.items()
    added = [key for key, tensor in tensors if tensor is not None and not own.fullmatch(key)]
    if added := [*added, *(module._modules if isinstance(module, nn.Linear | NVFP4Linear) else ())]:
        raise NotImplementedError(
            f"{name}: {added[0]} was added to this module, and the one that replaces it would not have it: put it into "
            "a module around this one. The model is as it was"
        )


def take_over(new: nn.Module, old: nn.Module, own: Iterable[str] = ()) -> nn.Module:
    """`new`, which replaces `old`, with what a user has put on that: attributes (all that are not its `own`, nor of
    either class), the hooks that were registered on it, and those that accelerate calls. Handles of the former remove
    them as before, from `new`."""
    for key in vars(old).keys() - vars(new).keys() - {*own}:
        if not (key.startswith("_") or hasattr(type(old), key) or hasattr(type(new), key)):
            setattr(new, key, bound_to(new, old, vars(old)[key]))
    hooks = {name: found for name, found in vars(old).items() if re.match(r"_(is_full_)?(for|back)ward_", name)}
    vars(new).update(hooks)
    if any(found for name, found in vars(old).items() if re.fullmatch(r"_(load_)?state_dict_(pre_|post_)?hooks", name)):
        logger.warning_once(
            f"hooks of state dicts on {type(old).__name__} (register_state_dict_pre_hook, ...) do not stay: its "
            "tensors are others now. Register them again"
        )
    vars(old).update({name: copy.copy(found) for name, found in hooks.items()})  # someone may keep it, and add others
    if own := users_hooks(old):
        from accelerate.hooks import add_hook_to_module

        for h in own:
            add_hook_to_module(new, h, append=True)
    return new


def users_hooks(module: nn.Module) -> list[Any]:
    """The hooks of a user's that accelerate calls around the forward of `module`."""
    hook = vars(module).get("_hf_hook")
    return [h for h in getattr(hook, "hooks", (hook,)) if h and not type(h).__module__.startswith("accelerate.")]


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
        self.copied = [name for name in vars(source) if not name.startswith("_") and not hasattr(self, name)]
        for name in self.copied:
            setattr(self, name, bound_to(self, source, vars(source)[name]))
        for name, child in source.named_children():
            keeps = not any(True for _ in child.parameters())
            if name == "post_expert_norm":
                keeps = getattr(source, "has_post_expert_norm", False)
            if keeps:
                setattr(self, name, child)
        if isinstance(mlp := getattr(source, "mlp", None), nn.Module):  # DBRX
            self.act_fn = mlp.activation_fn
        self.changes, self.act_settings = changes(self, self.source_class), act_settings(self)
        self.rows_for_one = layout.num_experts if layout.call == "dense" else 1
        self._is_expert_parallel = False
        self._hf_quantized_needs_local_tp = True
        self._source = (empty_like(source, "meta"),)  # in a tuple, so that it is no submodule
        self.implementation: str | None = None  # the config's before `set_implementation` changed it
        self.half_swapped = False  # True while `swap_experts` works, and after it was interrupted
        self._made_with = frozenset(vars(self))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FLAGS and name in vars(self) and value != vars(self)[name]:
            raise NotImplementedError(
                f"{name} of 4-bit experts stays {vars(self)[name]}: it says how their weights are kept and called. "
                "model.dequantize() makes dense experts, which follow it"
            )
        super().__setattr__(name, value)
        if name.endswith(GATE) and "half_swapped" in vars(self):  # what the gate computes
            self._recognise()  # now: torch.compile could not, in the next call

    def __getstate__(self) -> dict[str, Any]:
        self._look_again()
        # a function that replaced another may have no name, and could not be pickled
        return {**super().__getstate__(), "changes": self.changes.named()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.changes = changes(self, self.source_class)
        if self.changes.named() != state["changes"]:  # something was done in this process
            self._recognise()

    def _look_again(self) -> None:
        """Recognise the gate anew if something was done to it. NotImplementedError if the class has another forward."""
        if self.changes != (now := changes(self, self.source_class)):
            if now.forward is not self.changes.forward:
                raise NotImplementedError(
                    f"{self.source_class.__name__}.forward was replaced, and its experts are 4-bit and do not call it: "
                    "put it back, and what it does into a hook (register_forward_hook), or replace it after "
                    "model.dequantize()"
                )
            self._recognise()
        elif not torch.compiler.is_compiling() and self.act_settings != act_settings(self):
            self._recognise()

    def _recognise(self) -> None:
        self.changes, self.act_settings = changes(self, self.source_class), act_settings(self)
        before, self.gate = self.gate, recognise_gate(self, self.layout, self.source_class)
        if before.kind != "raw":
            self.say_unfused()

    def say_unfused(self) -> None:
        """Say once that the gate is the model's own; not if it is only unfused while there are hooks to be called."""
        hooked = self.changes.own and self.changes.assigned is None
        if self.gate.kind == "raw" and not hooked and not torch.compiler.is_compiling():
            logger.warning_once(
                f"{self.source_class.__name__} has a gate of its own: it runs unfused, between the two GEMMs"
            )

    def _save_to_state_dict(self, *args: Any) -> None:
        if self.half_swapped:
            raise RuntimeError(HALF_SWAPPED)
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name, packed = f"{prefix}{self.up_name}", ("_sf", "_global_scale")
        biased = self.layout.interleaved and f"{name}_bias" in state_dict
        if biased and not any(key.endswith(packed) for key in state_dict):
            args[-1].append(  # error_msgs
                f"{name}_bias comes without 4-bit weights, so it may be a dense model's, which alternates between gate "
                "and up, and that of 4-bit experts is [gate; up]: leave it out, and write it into "
                f"{self.up_name}_bias.data; a dense one as torch.cat([bias[:, ::2], bias[:, 1::2]], dim=1)"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

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
        self._look_again()
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
        E = self.down_proj_global_scale.shape[0]
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
        own = (name for name in vars(self) if name.endswith(GATE) or name in self.copied)
        for name in (*dict(self.named_children()), *own):  # as they are now
            dense._modules.pop(name, None)  # a function may be in place of a module
            setattr(dense, name, bound_to(dense, self, getattr(self, name)))
        if hasattr(dense, "mlp"):
            dense.mlp.activation_fn = self.act_fn
        return take_over(dense.train(self.training), self, self._made_with)


PACKED = (HFExperts, NVFP4Linear)  # the 4-bit modules of a model


def refuse_by_hand(model: nn.Module) -> None:
    """NotImplementedError for an `NVFP4Experts` that a user put into a transformers model: its names in files, and the
    dense module that it replaced, are not known."""
    for name, module in model.named_modules():
        if isinstance(module, NVFP4Experts) and not isinstance(module, HFExperts):
            raise NotImplementedError(
                f"{name} is {type(module).__name__}, put there by hand and not by swap_experts: it would be left out "
                "of what is saved, calibrated, switched or made dense. Put the dense experts back and call "
                "swap_experts(model), with exclude where their form is not supported; its layers take other weights, "
                "also of another recipe, by load_expert"
            )


def refuse_changed(name: str, module: Any) -> None:
    """NotImplementedError if what a 4-bit module computes was changed in a way that a dense one cannot follow."""
    refuse_added(name, module)
    changed = None
    if type(module) not in PACKED:
        changed = "its class"
    elif assigned(module) == "forward":
        changed = "its forward"
    elif isinstance(module, HFExperts):
        known = module.changes == changes(module, module.source_class)  # else the next call recognises the gate anew
        own = known and module.gate != recognise_gate(module, module.layout, module.source_class)
        lost = "_apply_gate" in vars(module) and not hasattr(module.source_class, "_apply_gate")
        if own or lost or "own_gate" in vars(module):
            changed = "its gate"
        elif module.down_proj_global_scale.shape[0] != module.layout.num_experts:
            raise NotImplementedError(
                f"{name}: it has {module.down_proj_global_scale.shape[0]} experts, and the dense module that it "
                f"replaced had {module.layout.num_experts}: save the model (save_pretrained), load it, and dequantize "
                "that. The model is as it was"
            )
        elif module.post_expert_norm is not None and not getattr(module, "has_post_expert_norm", False):
            changed = "its post_expert_norm"
    if changed:
        raise NotImplementedError(
            f"{name}: {changed} was replaced, and a dense module would not have that: put the original back, and make "
            "the change again in the model that dequantize() returns. The model is as it was"
        )


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
    experts.say_unfused()
    return experts.train(module.training)


def dense_forward(module: nn.Module, *args: Tensor) -> Tensor:
    """The experts implementation "moe_nvfp4" in transformers' registry: it runs dense experts as transformers' default.

    4-bit experts do not use the registry. Dense ones do, if they share a config that says "moe_nvfp4" with 4-bit ones,
    as multi-token prediction layers do, or if the user sets it.
    """
    if not torch.compiler.is_compiling():
        logger.warning_once(
            f"{type(module).__name__} of this model are dense and run by 'grouped_mm', though the experts "
            f"implementation is {IMPLEMENTATION!r}: swap_experts(model) makes them 4-bit, unless they are of a layer "
            "for multi-token prediction, which stays dense"
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
