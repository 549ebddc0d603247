"""For models in memory: make their experts 4-bit, choose activations, calibrate."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import warnings
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.base import HfQuantizer

from moe_nvfp4.calibrate import observe
from moe_nvfp4.checks import check_activations
from moe_nvfp4.integrations.huggingface.calibration import (
    calibration_batches,
    evaluating,
    importance_of_file,
    model_importance,
)
from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config, check_for_dense
from moe_nvfp4.integrations.huggingface.converters import choose_linears, model_conversions
from moe_nvfp4.integrations.huggingface.experts import (
    HALF_SWAPPED,
    PACKED,
    HFExperts,
    assigned,
    dense_forward,
    experts_for,
    experts_modules,
    find_experts,
    refuse_added,
    refuse_by_hand,
    refuse_elsewhere,
    set_implementation,
    take_over,
)
from moe_nvfp4.integrations.huggingface.gptq import gptq_model
from moe_nvfp4.integrations.huggingface.layerwise import check_ids, reads_ids, unwrapped
from moe_nvfp4.integrations.huggingface.offload import keep_experts_on_cpu
from moe_nvfp4.integrations.huggingface.quantizer import MoeNvfp4Quantizer
from moe_nvfp4.integrations.huggingface.ready import prepare_model
from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout, dense_experts, is_of_library
from moe_nvfp4.integrations.placement import check_cpu_experts
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.prepared import computes_parameters
from moe_nvfp4.progress import progress_bar
from moe_nvfp4.quantize.importance import LayerImportance
from moe_nvfp4.quantize.linears import Chosen
from moe_nvfp4.quantize.names import TOWER
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, recipe_named

Model = TypeVar("Model", bound=nn.Module)


def swap_experts(
    model: Model,
    activations: str = "bf16",
    recipe: str = DEFAULT_RECIPE,
    exclude: str | Iterable[str] | None = None,
    progress: bool = True,
    calibration: Any = None,
    cpu_experts: int | str | None = None,
    linears: str | Iterable[str] | None = None,
) -> Model:
    """Make the experts of a transformers `model` 4-bit, and the `linears` that are asked for, in place. Returns the
    model.

    The whole model is walked, composite ones too. Every weight is checked before the first layer is replaced, so an
    error leaves the model as it was. Then layer after layer is replaced: the peak of memory is one layer's dense
    experts above the result. After an interruption (Ctrl-C, out of memory) every layer is either dense or 4-bit, and
    another call with the same arguments continues; until then the model runs, but refuses to be saved. After swapping,
    it saves and loads like a model that was quantized while loading.

    activations  "bf16" (W4A16), "nvfp4" or "nvfp4_four_over_six" (W4A4)
    recipe       one of moe_nvfp4.quantize.recipes.RECIPES, or "weighted", "gptq" or "distill" (run on data)
    exclude      experts modules to leave dense: a name or wildcard, or several
    calibration  a text or several, or token ids [B, T] or several. Texts are read by the tokenizer of
                 model.config.name_or_path; transformers does not record a revision or subfolder: for these, give ids.
                 "gptq" and "distill" need 8 tokens for each expert and column of its weights; "weighted" also takes the
                 pathlib.Path of a file of moe-nvfp4 importance, or None: random token ids
    cpu_experts  how many layers' experts stay on the CPU when the model goes to a GPU, see `keep_experts_on_cpu`
    linears      the linears that become 4-bit, too: "attention", "shared", "mlp", "lm_head", "all" (quantize.linears),
                 names or wildcards; `exclude` counts for them, too

    Raises NotImplementedError for experts in an unknown form, naming their class and the way out; ValueError if the
    model has no experts or is a part of another model, if weights are NaN or Inf, of another dtype than bf16, fp16 and
    fp32, or not here (meta device, offloaded, split over ranks), and if a pattern of `exclude` or `linears` matches
    nothing.
    """
    config = MoeNvfp4Config(activations, recipe, exclude, linears, calibration=calibration, cpu_experts=cpu_experts)
    given, model = model, _inside(model, swapping=True)
    other = getattr(model, "hf_quantizer", None)
    if other is not None and not isinstance(other, _Interrupted):
        raise ValueError(
            f"{type(model).__name__} is quantized already "
            f"({other.quantization_config.quant_method}): load the original checkpoint"
        )
    if other is not None:
        _check_same(other.quantization_config, config)
    refuse_by_hand(model)
    done = [module for module in model.modules() if isinstance(module, HFExperts)]
    groups: dict[int, tuple[list[str], nn.Module, ModuleLayout]] = {}  # layers may share a module
    excluded = []
    for name, module, layout in find_experts(model, config, required=other is None):
        if layout is None:
            excluded.append(name)
        else:
            groups.setdefault(id(module), ([], module, layout))[0].append(name)
    if cpu_experts is not None:
        check_cpu_experts(cpu_experts, type(model).__name__, len(groups) + len(done))
    for names, module, layout in groups.values():
        _check_weights(names[0], module, layout)
    check_for_dense(config)
    quantizer = MoeNvfp4Quantizer(config, pre_quantized=False)
    config = quantizer.quantization_config  # a copy, which will know what stays dense, and later changes
    with _whole(done):
        quantizer.chosen = choose_linears(model, config)
    _check_linears(model, quantizer.chosen)
    _stand_alone(model)
    base = getattr(model, "_weight_conversions", None)
    if hasattr(model, "config") and (base is None or any(map(_dequantizes, base))):
        base = model_conversions(model)

    layouts = {names[0]: layout for names, _, layout in groups.values()}
    with _whole(done):
        known = _learn(model, config, layouts, _dense_ones(model, quantizer.chosen), progress) if layouts else {}

    left = deque(groups.values())
    groups.clear()  # it would keep replaced modules alive
    whole: Any = model  # nn.Module does not declare transformers' attributes
    if quantizer.chosen.fused:
        whole.hf_quantizer = _Interrupted(config)
        quantizer.quantize_linears(model, known, progress)
    for _ in progress_bar(range(len(left)), desc="NVFP4 experts", unit="layer", show=progress):
        names, module, layout = left.popleft()
        experts = _quantized(module, layout, config, known.get(names[0]))
        experts.half_swapped, whole.hf_quantizer = True, _Interrupted(config)
        for name in names:
            model.set_submodule(name, experts)
    swapped = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, HFExperts)}
    set_implementation(model)
    quantizer.attach(model, swapped, excluded)
    for experts in swapped.values():
        experts.half_swapped = False
    quantizer.conversions.build(list(base or []))
    whole._weight_conversions = quantizer.for_saving(list(base or []))
    whole.hf_quantizer, whole.is_quantized = quantizer, True
    whole.quantization_method = config.quant_method
    if hasattr(model, "config"):
        whole.config.quantization_config = config
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = True  # as after loading: Jamba's own code then reads no dt_proj.weight
    if cpu_experts is not None:
        keep_experts_on_cpu(model, cpu_experts)
    prepare_model(model)
    return given


def _check_linears(model: nn.Module, chosen: Chosen) -> None:
    """ValueError unless the linears that were `chosen` can be quantized."""
    for name in (linear.model for fused in chosen.fused for linear in fused):
        module: Any = model.get_submodule(name)
        if isinstance(module, NVFP4Linear):
            continue
        _check_here(name, module)
        if bad := int((~module.weight.isfinite()).sum()):
            raise ValueError(
                f"{name}: {bad} of {module.weight.numel()} weights are NaN or Inf, which NVFP4 cannot hold: look at "
                "the checkpoint, or replace them (torch.nan_to_num). The model is as it was"
            )


class _Interrupted(HfQuantizer):
    """The quantizer of a model whose experts are partly 4-bit. transformers asks it before it makes a folder."""

    is_trainable = False

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        raise RuntimeError(HALF_SWAPPED)


def _check_same(before: Any, now: MoeNvfp4Config) -> None:
    """ValueError unless an interrupted call of `swap_experts`, with the config `before`, is continued as it began."""
    for name in ("activations", "recipe", "exclude", "linears"):
        then, given = ((None if value == "packed" else value) for value in (getattr(before, name), getattr(now, name)))
        if then != given:
            raise ValueError(
                f"swap_experts was interrupted with {name}={then!r}, and a part of the model is as that says: continue "
                f"with the same, not {given!r}; or load the model again"
            )


def _dense_ones(model: nn.Module, chosen: Chosen) -> Chosen:
    """`chosen` without the linears that are 4-bit already."""
    is_dense = lambda fused: not any(isinstance(model.get_submodule(linear.model), NVFP4Linear) for linear in fused)
    return replace(chosen, fused=tuple(filter(is_dense, chosen.fused)))


@contextmanager
def _whole(experts: Iterable[HFExperts]) -> Iterator[None]:
    """Let `swap_experts` see the state dict of a model with `experts` from a call that was interrupted."""
    for module in experts:
        module.half_swapped = False
    try:
        yield
    finally:
        for module in experts:
            module.half_swapped = True


def _inside(model: Any, swapping: bool = False) -> Any:
    """The transformers model inside `model`, which PEFT or torch.compile may have wrapped: the one that is saved.
    ValueError if another one is beside it, with 4-bit layers or, if it is `swapping`, experts to be swapped."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model in memory is expected, got {model!r:.200}: load it first (from_pretrained)")
    whole = unwrapped(model)
    inside = {id(module) for module in whole.modules()}
    others = [name for name, m in model.named_modules() if id(m) not in inside and isinstance(m, PACKED)]
    if swapping:
        dense = ((name, id(m)) for name, m, layout in experts_modules(model) if isinstance(layout, ModuleLayout))
        others += [name for name, key in dense if key not in inside]
    if others:
        raise ValueError(
            f"{type(model).__name__} holds {type(whole).__name__} and, outside of it, {others[0]}: pass one model at a "
            "time, each has a config of its own"
        )
    return whole


def _stand_alone(model: nn.Module) -> None:
    """ValueError if `model` is a part of another, which would save its experts in a form that nothing reads. If another
    model shares its config, give it a copy, since the config will say that the experts are 4-bit."""
    others = _other_models(model)
    if _whole_of(model, others):
        del others
        gc.collect()  # the whole may be garbage
        others = _other_models(model)
    if whole := _whole_of(model, others):
        raise ValueError(
            f"{type(model).__name__} is a part of {whole}, which would save its experts in a form that nothing reads: "
            "pass the whole, with exclude= for what should stay dense. The model is as it was"
        )
    own = getattr(model, "config", None)
    if own is not None and any(other.config is own for other in others):
        copies: dict[int, Any] = {}
        copy.deepcopy(own, copies)
        for module in model.modules():
            held = {name: copies.get(id(c)) for name, c in vars(module).items() if isinstance(c, PretrainedConfig)}
            vars(module).update({name: own for name, own in held.items() if own is not None})


def _other_models(model: nn.Module) -> list[PreTrainedModel]:
    """All models in memory that are not a part of `model`; those whose construction failed, which an interpreter keeps
    with the error, are none."""
    inside = {id(module) for module in model.modules()}
    models = (o for o in gc.get_objects() if issubclass(type(o), PreTrainedModel) and id(o) not in inside)
    return [o for o in models if {"_modules", "config"} <= vars(o).keys()]


def _whole_of(model: nn.Module, others: Iterable[PreTrainedModel]) -> str | None:
    """The class name of a model in `others` that contains `model`; None if none does."""
    return next((type(o).__name__ for o in others if any(module is model for module in o.modules())), None)


def _dequantizes(conversion: Any) -> bool:
    """Whether `conversion` made FP8 or MXFP4 weights dense: saving with it would make them FP8 again."""
    operations = getattr(conversion, "operations", ())
    return any(type(operation).__module__.startswith("transformers.integrations.") for operation in operations)


def _check_here(name: str, module: nn.Module) -> None:
    """ValueError unless `module` computes what its class does, from weights that are its own, whole, here and of a
    known dtype."""
    if name.endswith(".base_layer") or computes_parameters(module):
        raise ValueError(
            f"{name}: the weights are parametrized, or have adapters that PEFT made for dense experts: call "
            "swap_experts first and then get_peft_model, which puts adapters on 4-bit experts, or make them a part of "
            "the weights (merge_and_unload, remove_parametrizations, prune.remove). The model is as it was"
        )
    if name.endswith("._orig_mod"):
        raise ValueError(
            f"{name}: torch.compile has made a program of this module by itself, which would go on with the dense "
            "weights: swap first and then compile. The model is as it was"
        )
    if function := assigned(module):
        raise ValueError(
            f"{name}: {function} was assigned to this module, and 4-bit weights would not run it: assign it after "
            "swapping, or put it into a hook (register_forward_hook), which swapping keeps. The model is as it was"
        )
    refuse_added(name, module)
    for p in module.parameters():
        if isinstance(p, DTensor):
            raise ValueError(
                f"{name}: the weights are split over ranks: swap first and then split the model, or quantize while "
                "loading: from_pretrained(..., distributed_config=..., quantization_config=MoeNvfp4Config())"
            )
        if p.device.type == "meta":
            raise ValueError(
                f"{name}: the weights are on the meta device (or offloaded), so there is nothing to quantize: load the "
                "model without offloading, or quantize while loading: from_pretrained(..., "
                "quantization_config=MoeNvfp4Config())"
            )
        if p.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"{name}: weights are {p.dtype}; bf16, fp16 and fp32 are quantized: model.to(one of them)")


def _check_weights(name: str, module: nn.Module, layout: ModuleLayout) -> None:
    """ValueError unless `_quantized` can quantize the experts `module`."""
    _check_here(name, module)
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    function = ALL_EXPERTS_FUNCTIONS.get(chosen, dense_forward)
    if layout.call == "routed" and function is not dense_forward and not is_of_library(function):
        raise ValueError(
            f"{name}: the model runs its experts by {chosen!r}, a function of your own, and 4-bit experts would not "
            "call it: model.set_experts_implementation('eager') first, and put what it does into a hook "
            "(register_forward_hook). The model is as it was"
        )
    for e, matrices in enumerate(dense_experts(module, layout)):
        for part, matrix in zip((layout.up_name, "down_proj"), matrices, strict=True):
            finite = matrix.isfinite()
            if not finite.all():
                raise ValueError(
                    f"{name}: {part} of expert {e}: {int((~finite).sum())} of {matrix.numel()} weights are NaN or Inf, "
                    "which NVFP4 cannot hold: look at the checkpoint, or replace them (torch.nan_to_num). The model is "
                    "as it was"
                )
    for part in (layout.up_name, "down_proj") if layout.bias is not None else ():
        if not getattr(module, f"{part}_bias").isfinite().all():
            raise ValueError(
                f"{name}: {part}_bias has NaN or Inf: look at the checkpoint, or replace them (torch.nan_to_num). The "
                "model is as it was"
            )


def _learn(
    model: nn.Module, config: MoeNvfp4Config, layouts: Mapping[str, ModuleLayout], chosen: Chosen, progress: bool
) -> Mapping[str, Any]:
    """What a recipe that uses data learns about each experts module, LayerImportance or parameters by name, and about
    the `chosen` linears (`linears.Known`). Empty for other recipes."""
    recipe = recipe_named(config.recipe)
    if not recipe.model:
        return {}
    whole: Any = model
    if recipe.text:
        if config.calibration is None or isinstance(config.calibration, os.PathLike):
            raise ValueError(f"recipe {recipe.name!r} learns from text how inputs correlate: give calibration= texts "
                             "or token ids, or use recipe='weighted', for which random token ids do")  # fmt: skip
        batches = calibration_batches(config.calibration, whole.config, getattr(whole.config, "name_or_path", None))
        return gptq_model(model, batches, config.activations, config.exclude, progress, recipe.name, chosen.fused)
    if isinstance(config.calibration, os.PathLike):
        importance = importance_of_file(config.calibration, model)
        importance.check_model([name for name, *_ in find_experts(model, config)], {}, type(model).__name__)
        importance.check_config(whole.config, type(model).__name__)
    else:
        tokenizer = getattr(whole.config, "name_or_path", None)
        batches = calibration_batches(config.calibration, whole.config, tokenizer)
        linears = [fused[0].model for fused in chosen.fused]
        importance = model_importance(model, batches, config.exclude, progress, linears)
    for name, layout in layouts.items():
        for part, columns in (("up_proj", layout.hidden_size), ("down_proj", layout.intermediate_size)):
            importance.of(name, layout.num_experts - 1, part, columns)
    known: dict[str, Any] = {n: importance.layer(n, layout.num_experts) for n, layout in layouts.items()}
    firsts = (fused[0] for fused in chosen.fused)
    return known | {first.model: importance.of_linear(first.model, first.columns) for first in firsts}


def _quantized(
    module: nn.Module, layout: ModuleLayout, config: MoeNvfp4Config, known: LayerImportance | dict[str, Tensor] | None
) -> HFExperts:
    """4-bit experts with the weights of `module`, on its device."""
    dense = next(module.parameters())
    experts = experts_for(module, layout, config, dense.device)
    if isinstance(known, dict):
        for key in known.keys() - {"rows"}:
            getattr(experts, key).data.copy_(known[key])
    else:
        for e, (w13, w2) in enumerate(dense_experts(module, layout)):
            importance = (None, None) if known is None else (known.x[e], known.h[e])
            experts.load_expert(e, w13, w2, config.recipe, importance)
    for key in (experts.up_name, "down_proj") if layout.bias is not None else ():
        bias = [layout.canonical(f"{key}_bias", b) for b in getattr(module, f"{key}_bias").detach()]
        getattr(experts, f"{key}_bias").data.copy_(torch.stack(bias))
    experts.prepare(dense.dtype)
    take_over(experts, module)
    return experts


def set_activations(model: Model, activations: str) -> Model:
    """Switch the 4-bit experts and linears of `model` to "bf16" (W4A16), "nvfp4" or "nvfp4_four_over_six" (W4A4), in
    place."""
    check_activations(activations)
    layers = [m for m in model.modules() if isinstance(m, PACKED)]
    config = _config(model, bool(layers))
    for module in layers:
        module.activations = activations
    config.activations = activations
    return model


def _config(model: nn.Module, has_layers: bool) -> MoeNvfp4Config:
    """The config of a 4-bit model. ValueError if it has no 4-bit layers, or is a part of another model."""
    inside = _inside(model)
    refuse_by_hand(inside)
    if not has_layers:
        raise ValueError(f"{type(model).__name__} has no 4-bit experts: call swap_experts first")
    quantizer = getattr(inside, "hf_quantizer", None)
    if quantizer is None:
        raise ValueError(
            f"{type(model).__name__} is a part of a 4-bit model, whose config would not know: pass the whole"
        )
    config: MoeNvfp4Config = quantizer.quantization_config
    return config


def calibrate(model: Model, batches: Iterable[Tensor | Mapping[str, Tensor]], progress: bool = True) -> Model:
    """Give static activation scales (`input_scale`) to the 4-bit experts and linears of `model`, in place of those that
    they have. Works in place, and returns the model.

    batches: inputs of the model, token ids [B, T] or dictionaries; a few hundred tokens of the kind that the model is
    meant for. Positions where a dictionary's attention_mask [B, T] is 0 do not count. All experts of a layer get one
    scale. The scales are used with activations="nvfp4", and are saved by `save_pretrained`. ValueError if no token
    reached a layer (a linear that has a scale keeps it), if a layer got NaN or Inf, and for token ids [B, T] that the
    model does not take; NotImplementedError if layers are split over ranks or offloaded.
    """
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, HFExperts)}
    config = _config(model, bool(layers))
    # Servers that read a scale for experts want one for every 4-bit layer
    linears = {name: m for name, m in model.named_modules() if isinstance(m, NVFP4Linear)}
    layers |= linears
    for parameter in (p for layer in layers.values() for p in layer.parameters()):
        refuse_elsewhere(parameter, "calibrated")  # a hook brings the parameters that were there when the model loaded

    whole: Any = model
    inner, by_ids = _inside(model), reads_ids(model)
    others = _rows_of_others(inner, layers)

    def run() -> None:
        for batch in progress_bar(batches, desc="calibrate", unit="batch", show=progress):
            if not isinstance(batch, Mapping) and (not isinstance(batch, Tensor) or batch.dim() != 2):
                got = list(batch.shape) if isinstance(batch, Tensor) else type(batch).__name__
                raise TypeError(f"batches has {got}: it is a list of token ids [B, T], or of dictionaries of inputs")
            inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
            if isinstance(batch, Tensor) and batch.numel() and isinstance(inner, PreTrainedModel):
                check_ids(batch, inner.config)
            inputs = {key: v.to(whole.device) if isinstance(v, Tensor) else v for key, v in inputs.items()}
            called = by_ids if isinstance(batch, Tensor) else model
            with _without_padding(layers, inputs.get("attention_mask"), others):
                called(**inputs)

    with evaluating(model), torch.no_grad():
        found = observe(layers, run, [name for name, m in linears.items() if m.input_scale is not None])
    for name, scales in found.items():
        layers[name].set_input_scales(*scales)
    config.input_scale, config.weights_only = True, False
    return model


def _rows_of_others(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Those of `names` of the layers of `model` whose rows are not the positions of attention_mask: those of towers,
    and of a decoder beside an encoder of text, which has inputs of its own (DiffusionGemma)."""
    encodes_text = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    decodes = "decoder_input_ids" in inspect.signature(model.forward).parameters
    towers = {n for n in names if TOWER.search(n.replace("encoder.language_model.", "")) and not encodes_text}
    return towers | {n for n in names if decodes and "decoder" in n.split(".")}


@contextmanager
def _without_padding(layers: Mapping[str, nn.Module], mask: Tensor | None, others: Container[str]) -> Iterator[None]:
    """While a model runs, make rows of padding zeros, and unrouted, before 4-bit `layers`, so that no largest magnitude
    is theirs; and likewise rows whose routing weights are 0. mask: [B, T], 0 for padding, or None; others: names of
    layers whose rows are not those of the mask. Warns of others that get a part of the tokens."""
    real = mask.flatten() != 0 if mask is not None and mask.dim() == 2 and not mask.all() else None

    def kept(name: str, rows: int, device: torch.device) -> Tensor:
        if real is None or name in others:
            return torch.ones(rows, dtype=torch.bool, device=device)
        if rows % len(real):  # ERNIE 4.5 VL: those of text, without an image's
            warnings.warn(
                f"{name} gets {rows} rows of {len(real)} tokens, and which are padding is not known there: they count "
                "for its scale. Calibrate with batches without padding",
                stacklevel=2,
            )
            return torch.ones(rows, dtype=torch.bool, device=device)
        return real.to(device).repeat(rows // len(real))  # Llama 4: a block of all tokens for each expert

    def before(name: str, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        names = list(inspect.signature(layer.forward).parameters)
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        x, index = given[names[0]], given.get("top_k_index")
        rows = kept(name, x[..., 0].numel(), x.device)
        if index is not None:
            slots = rows[:, None] & (given["top_k_weights"] != 0)
            rows = slots.any(dim=1)
            given["top_k_index"] = index.masked_fill(~slots, layer.num_experts)
        given[names[0]] = x.masked_fill(~rows.view(x.shape[:-1])[..., None], 0)
        positional = names[: len(args)]  # as hooks of a user's see them
        return tuple(given.pop(name) for name in positional), given

    handles = [m.register_forward_pre_hook(partial(before, name), with_kwargs=True) for name, m in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
