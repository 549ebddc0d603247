"""transformers' own packed NVFP4 experts, run by this library's layer:

    model.set_experts_implementation("moe_nvfp4")

`FineGrainedExperts` keep what `FineGrainedConfig` loads (transformers' pull requests 48058 and 49015, in no release
yet; read at commit bf0e7ec of the branch). P is gate_up_proj, or up_proj without a gate, and down_proj:

    P                      int8 [E, N, K/2]     codes, low nibble = even k; gate_up_proj's rows are g0, u0, g1, u1, ...
    P_scale_inv            e4m3 [E, N, K/16]    sf; on Blackwell in its tensor cores' order, [E, N/128, K/64, 2, 256]
    P_weight_global_scale  fp32 [E]             global_scale, one for gate and up
    P_input_global_scale   fp32 [1] or [E]      of the activations, in W4A4 (activation_format None; "bf16" is W4A16)
    P_bias                 [E, N] or None

The first call moves all of it into an `NVFP4Experts`, a child of the module, one projection at a time, and leaves the
module's own parameters empty: weights are never there twice. What reads them there (`state_dict`, loading, another
experts implementation) gets the same bytes back first. A parameter that is given new data meanwhile (`p.data = new`)
is moved by the next call; the empty ones must not be changed in place, which has no effect.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.format import swizzle_sf, unswizzle_sf
from moe_nvfp4.integrations.huggingface.experts import IMPLEMENTATION
from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout, changes, own_gate, recognise_gate
from moe_nvfp4.prepared import changing, check_plain, made_for
from moe_nvfp4.quantize.layouts.base import interleave_rows, split_rows

MODULE = "transformers.integrations.finegrained"
# how the names of our parameters end -> of theirs
KINDS = {
    "": "", "_sf": "_scale_inv", "_bias": "_bias", "_global_scale": "_weight_global_scale",
    "_input_scale": "_input_global_scale",
}  # fmt: skip
# what is read of a module, besides its parameters
ATTRIBUTES = (
    "num_experts", "hidden_dim", "intermediate_dim", "weight_format", "activation_format", "gate_up_name", "has_gate",
    "has_bias", "holds_interleaved_gate_up", "has_post_expert_norm", "post_expert_norm", "act_fn", "swiglu_alpha",
    "swiglu_limit", "_is_expert_parallel", "_moe_operands", "expert_linear", "_apply_gate",
)  # fmt: skip
NUMBERS = "swiglu_alpha", "swiglu_limit", "limit", "gate_softcap", "up_softcap"  # what a gate may compute with
INSTEAD = "load the model with quantization_config=MoeNvfp4Config(), whose experts can"


# ---- the registry --------------------------------------------------------------------------------
class _AfterImport:
    """Adds our function to `MODULE` when that is imported, which happens when a model needs it: it takes seconds."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_add(module: ModuleType) -> None:
                execute(module)
                _add(module)

            spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec


_after_import: Any = _AfterImport()


def _add(module: ModuleType) -> None:
    if (functions := getattr(module, "ALL_FINEGRAINED_EXPERTS_FUNCTIONS", None)) is not None:
        functions[IMPLEMENTATION] = forward


def register() -> None:
    """Add "moe_nvfp4" to the functions of transformers' `FineGrainedExperts`, if it has them: now, or once they are
    imported."""
    if MODULE in sys.modules:
        _add(sys.modules[MODULE])
    elif _after_import not in sys.meta_path:
        sys.meta_path.insert(0, _after_import)


def unregister() -> None:
    if _after_import in sys.meta_path:
        sys.meta_path.remove(_after_import)
    getattr(sys.modules.get(MODULE), "ALL_FINEGRAINED_EXPERTS_FUNCTIONS", {}).pop(IMPLEMENTATION, None)


# ---- the experts implementation ------------------------------------------------------------------
def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`FineGrainedExperts.forward` by this library: hidden_states [..., H], ids and weights [T, top_k] -> [..., H]."""
    layer = module._modules.get(IMPLEMENTATION) or take(module)
    _check_own(module)
    if layer.computes != _computes(module) or any(module._parameters[source].numel() for source in layer.shapes):
        _give_back(module)  # but for what somebody gave the module meanwhile
        layer = take(module)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    return layer(x, top_k_index, top_k_weights).view(hidden_states.shape)


def prepare(model: nn.Module) -> None:
    """Move the weights of those `FineGrainedExperts` of `model` that this library shall run, before any call."""
    for module in [*model.modules()]:
        if _class(module) is not None and _ours(module):
            take(module)


class TakenExperts(NVFP4Experts):
    """The weights of `FineGrainedExperts` while this library runs them, as a child of that module."""

    def __init__(self, module: Any, layout: ModuleLayout):
        activations = {None: "nvfp4", "bf16": "bf16"}[module.activation_format]
        super().__init__(
            layout.num_experts, layout.hidden_size, layout.intermediate_size, recognise_gate(module, layout),
            activations, layout.bias, input_scale=activations == "nvfp4", device="meta",
        )  # fmt: skip
        self.layout, self.computes = layout, _computes(module)
        self.theirs = (module,)  # in a tuple, so that it is no child
        self.shapes: dict[str, torch.Size] = {}
        self.post_expert_norm = _norm(module)
        for name in [*self._parameters]:
            source, kind = self._source(name)
            tensor = module.get_parameter(source).detach()
            self.shapes[source] = tensor.shape
            self.register_parameter(name, nn.Parameter(self._read(tensor, source, kind), requires_grad=False))

    def _source(self, name: str) -> tuple[str, str]:
        """Of one of our parameters: the name of theirs, and its kind."""
        projection, _, kind = name.partition("proj")
        source = "down_proj" if projection == "down_" else self.up_name
        return f"{source}{KINDS[kind]}", kind

    def _read(self, tensor: Tensor, source: str, kind: str) -> Tensor:
        if kind == "_input_scale":
            return tensor.expand(self.num_experts).clone()
        if kind == "_global_scale":
            return tensor.clone()
        tensor = tensor if kind == "_bias" else tensor.view(torch.uint8)
        if tensor.dim() == 5:
            E, row_blocks, column_blocks = tensor.shape[:3]
            tensor = unswizzle_sf(tensor.flatten(), E * row_blocks * 128, column_blocks * 4).view(
                E, row_blocks * 128, -1
            )
        if self._interleaves(source):
            tensor = torch.cat(split_rows(tensor, 2, interleaved=True, dim=1), dim=1)
        return tensor

    def _write(self, tensor: Tensor, source: str, kind: str) -> Tensor:
        """The inverse of `_read`."""
        shape = self.shapes[source]
        if kind.endswith("_scale"):
            return tensor[: shape[0]].clone()
        if self._interleaves(source):
            tensor = interleave_rows(tensor, 2, dim=1)
        if len(shape) == 5:
            tensor = swizzle_sf(tensor.flatten(0, 1)).view(shape)
        return tensor if kind == "_bias" else tensor.view(torch.int8 if kind == "" else torch.float8_e4m3fn)

    def _interleaves(self, source: str) -> bool:
        return source.startswith("gate_up_proj") and self.theirs[0].holds_interleaved_gate_up

    def own_gate(self, w13_out: Tensor) -> Tensor:
        return own_gate(self.theirs[0], type(self.theirs[0]), self.layout, w13_out)

    def give_back(self) -> None:
        """Fill the module's empty parameters again, with the same bytes, and leave it."""
        (module,) = self.theirs
        self.unpack()
        self.warn_of_graphs()
        with made_for(self.down_proj):
            for name, parameter in self.named_parameters(recurse=False):
                source, kind = self._source(name)
                if (theirs := module._parameters[source]) is not None and not theirs.numel():
                    theirs.data = self._write(parameter.detach(), source, kind)
        del module._modules[IMPLEMENTATION]


def take(module: Any) -> TakenExperts:
    """Move the weights of `FineGrainedExperts` into a child of it, unless they are there.

    NotImplementedError for what the layer cannot do, ValueError for scales that are no numbers: the module is then as
    it was. RuntimeError where torch.compile traces the call.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "the first call of the experts moves their weights, which torch.compile cannot trace: call the model once, "
            "or moe_nvfp4.integrations.huggingface.prepare_model(model), and then compile it"
        )
    with changing:
        if (taken := module._modules.get(IMPLEMENTATION)) is not None:
            return cast(TakenExperts, taken)
        layout = _describe(module)
        with made_for(module.down_proj):
            layer = TakenExperts(module, layout)
            layer.weights.validate(type(module).__name__)
            for source in layer.shapes:
                parameter = module._parameters[source]
                parameter.data = parameter.data.new_empty(0)
        if _first not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_first)
            module.register_state_dict_pre_hook(_give_back)
            module.register_load_state_dict_pre_hook(_give_back)
        module.add_module(IMPLEMENTATION, layer.train(module.training))
    return layer


def _give_back(module: nn.Module, *_: Any) -> None:
    with changing:
        if (layer := module._modules.get(IMPLEMENTATION)) is not None:
            cast(TakenExperts, layer).give_back()


def _first(module: nn.Module, *_: Any) -> None:
    """Before each call: another experts implementation finds the weights where it reads them."""
    if not _ours(module):
        _give_back(module)


def _ours(module: Any) -> bool:
    return module.config._experts_implementation == IMPLEMENTATION


def _class(module: nn.Module) -> type | None:
    """transformers' class of packed experts, of which `module` is an instance; None: it is not."""
    return next((c for c in type(module).__mro__ if c.__name__ == "FineGrainedExperts"), None)


def _norm(module: Any) -> nn.Module | None:
    return module.post_expert_norm if module.has_post_expert_norm else None


def _computes(module: Any) -> tuple:
    """All that the layer depends on, besides its weights."""
    said = vars(module)
    own = *map(said.get, NUMBERS), said.get("_apply_gate"), changes(module)
    return own, module.act_fn, _norm(module), module.activation_format


def _check_own(module: Any) -> None:
    """NotImplementedError if a part of the module's computation was replaced, as adapters do."""
    check_plain(module, type(module).__name__)
    if module.training and torch.is_grad_enabled():  # transformers gives all of them requires_grad
        for name, p in module._parameters.items():
            if name.endswith("_bias") and p is not None and p.requires_grad:
                raise NotImplementedError(
                    f"{name} of {type(module).__name__} has requires_grad, and would get no gradients from "
                    f"{IMPLEMENTATION!r}: call requires_grad_(False), or {INSTEAD} train them"
                )
    for name in ("_moe_operands", "expert_linear"):
        if name in vars(module) or getattr(type(module), name) is not getattr(_class(module), name):
            raise NotImplementedError(
                f"{type(module).__name__}.{name} was replaced, as LoRA adapters do, and {IMPLEMENTATION!r} would leave "
                f"out what it adds: use another experts implementation, or {INSTEAD} be trained"
            )


def _describe(module: Any) -> ModuleLayout:
    """The sizes of `FineGrainedExperts`; NotImplementedError if they are not what the layer runs."""
    what = f"{IMPLEMENTATION!r} for {type(module).__name__}"
    if missing := [name for name in ATTRIBUTES if not hasattr(module, name)]:
        raise NotImplementedError(
            f"{what}: it has no {missing[0]}, so it is of a version of transformers that is unknown here: {INSTEAD} run"
        )
    _check_own(module)
    up = module.gate_up_name
    E, H, I = module.num_experts, module.hidden_dim, module.intermediate_dim
    N13 = 2 * I if module.has_gate else I
    if module.weight_format != "nvfp4":
        raise NotImplementedError(
            f"{what}: weight_format is {module.weight_format!r}, and its kernels read 'nvfp4': use another experts "
            "implementation, or load the model with quantization_config=MoeNvfp4Config(), which makes NVFP4 of MXFP4 "
            "and FP8 files"
        )
    if module.activation_format not in (None, "bf16"):
        raise NotImplementedError(
            f"{what}: activation_format is {module.activation_format!r}; None (W4A4) and 'bf16' (W4A16) are supported"
        )
    parameters = module._parameters
    if static := [n for n in (up, "down_proj") if parameters.get(f"{n}_activation_scale") is not None]:
        raise NotImplementedError(f"{what}: {static[0]}_activation_scale is not supported: {INSTEAD} have input scales")
    hook = getattr(module, "_hf_hook", None)
    offloads = any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))
    if any(p is not None and p.is_meta for p in parameters.values()) or offloads:
        raise NotImplementedError(
            f"{what}: the weights are offloaded, and would come for each call: {INSTEAD} stay on the CPU (cpu_experts)"
        )
    shapes = {up: (E, N13, H // 2), "down_proj": (E, H, I // 2)}
    split = any(isinstance(p, DTensor) for p in parameters.values()) or module._is_expert_parallel
    if split or any(tuple(parameters[name].shape) != shape for name, shape in shapes.items()):
        found = {name: tuple(parameters[name].shape) for name in shapes}
        raise NotImplementedError(
            f"{what}: the weights are split over ranks, or not {shapes}: {found}; {INSTEAD} be split"
        )
    if H % 16 or I % 16:
        raise NotImplementedError(f"{what}: H = {H} and I = {I} are to be multiples of 16: {INSTEAD} have any size")
    bias = parameters["down_proj_bias"].dtype if module.has_bias else None
    # the gate takes columns g0, u0, ..., in whatever order the rows are
    return ModuleLayout(E, H, I, gated=module.has_gate, interleaved=module.has_gate, bias=bias)
