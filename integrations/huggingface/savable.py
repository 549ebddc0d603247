"""Whether files of a model would be read again as what it is now: a user may have changed it since it became 4-bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_nvfp4.integrations.huggingface.experts import PACKED, HFExperts, refuse_by_hand
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.mapped import SAVED
from moe_nvfp4.prepared import check_plain, only_shapes
from moe_nvfp4.quantize.files import expert_counts
from moe_nvfp4.quantize.names import PRE_QUANT_SCALE

OTHERS = ("bitsandbytes.", "hqq.", "optimum.", "torch.ao.", "torchao.")  # whose quantized weights only they can read
WRAPPED = re.compile(r"(\.(base_layer|original_module|token_adapter))+$")  # modules inside PEFT's


def check_savable(model: Any, state: Mapping[str, Tensor] | None = None) -> None:
    """NotImplementedError for experts that stay in files, for layers of several activations, for weights that another
    library quantized, for a model of which each rank has some layers, and for one that FSDP has split, not transformers
    (it gathers), unless its `state` is given; ValueError for parameters without numbers, codes that are no bytes,
    parameters that are parametrized, adapters inside the model, static activation scales in some layers only, another
    number of experts than the config's, and a `state` of something else."""
    own = getattr(model.config, "distributed_config", None) or getattr(model, "_tp_size", None)
    if pipeline_stages(model) > 1:
        raise NotImplementedError(
            f"each rank has some layers of this model (pp_size={pipeline_stages(model)}), of which transformers would "
            "write the first rank's only: load it in one process, or with tp_size or fsdp_size, and save that"
        )
    if state is None and not own and any(isinstance(p, DTensor) for p in model.parameters()):
        raise NotImplementedError(
            "fully_shard has split this model over ranks: gather it on all ranks "
            "(torch.distributed.checkpoint.state_dict.get_model_state_dict, full_state_dict=True), then save on one, "
            "save_pretrained(folder, state_dict=that); or load with DistributedConfig(fsdp_size=...), which saves"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        return  # only adapters are saved then
    no_numbers = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if no_numbers and not hasattr(model, "hf_device_map"):  # with it they are offloaded
        raise ValueError(f"{no_numbers} is on the meta device, where there are no numbers to save: load the model")
    if any(isinstance(m, HFExperts) and m.mapped for m in model.modules()):
        raise NotImplementedError(SAVED)
    if wrapped := next((name for name, _ in model.named_modules() if WRAPPED.search(name)), None):
        raise ValueError(
            f"{WRAPPED.sub('', wrapped)} has adapters of PEFT, for which the files of a model have no place: save "
            "them with save_pretrained of the PeftModel, or make them a part of the weights (merge_and_unload), or "
            "take them off (unload), and then save the model that this returns"
        )
    for name, found in (*model.named_modules(), *model.named_parameters()):
        if (kind := f"{type(found).__module__}.{type(found).__name__}").startswith(OTHERS):
            raise NotImplementedError(
                f"{name} is {kind}: the files of a 4-bit model have no place for weights that another library "
                "quantized, and nothing would read them. Save the model without, and quantize what is loaded; or make "
                "these 4-bit here (linears=...)"
            )
    refuse_by_hand(model)
    if len(found := activations_of(model)) > 1:
        raise NotImplementedError(
            f"some 4-bit layers have activations {found[0]!r}, others {found[1]!r}, and config.json has one for "
            "all: set_activations(model, one of them)"
        )
    experts: dict[str, HFExperts] = {}
    for name, m in model.named_modules():
        if isinstance(m, PACKED):
            check_plain(m, name)
        if isinstance(m, HFExperts):
            experts[name] = m
            if (last := name.rpartition(".")[2]) != "experts":
                raise NotImplementedError(
                    f"{name}: files name a 4-bit expert MODULE.experts.0.up_proj, and this module is called {last!r}, "
                    "so nothing would read them: call it `experts` in the model's class"
                )
            _check_codes(name, m, m.up_name, "down_proj")
        elif isinstance(m, NVFP4Linear):
            _check_codes(name, m, "weight")
    _check_alike(experts, expert_counts(model.config.to_dict()))
    if state is not None:
        _check_state(model, state)


def refuse_part(name: str, *args: Any, **kwargs: Any) -> None:
    """In place of `save_pretrained` of a model inside one that became 4-bit, of the class `name`. It knows nothing of
    its 4-bit layers: nothing would read the names of their scales, and its config may not say what they are."""
    raise NotImplementedError(
        f"{name} is a part of a 4-bit model, and nothing would read its files: save the whole, load the part from that "
        "(AutoModel, or AutoModelForCausalLM for a language model), and save what this returns; or dequantize() the "
        "whole before"
    )


def pipeline_stages(model: Any) -> int:
    """Over how many ranks transformers has split the layers of `model`, or will while it loads."""
    return getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1


def check_format(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """NotImplementedError for `arguments` of save_pretrained with which nothing would read the files."""
    if arguments.get("distributed_checkpoint"):
        raise NotImplementedError(
            "distributed_checkpoint=True: transformers writes such files of a 4-bit model, and refuses to load them "
            '("Quantization is not supported"): leave it out, and the whole is gathered on rank 0; in training, save '
            "the adapters"
        )
    linear = next((name for name, m in model.named_modules() if isinstance(m, NVFP4Linear)), None)
    if linear and not arguments.get("save_original_format", True):
        raise NotImplementedError(
            f"save_original_format=False: {linear} is 4-bit, and its tensors would have names that nothing reads: "
            "leave it out"
        )


def _check_state(model: Any, state: Mapping[str, Tensor]) -> None:
    """ValueError unless a state dict of `model` that was given for saving has its names, shapes and dtypes, as files
    with anything else would not be read again."""
    with only_shapes():
        own: dict[str, Tensor] = model.state_dict()
    missing = own.keys() - state.keys() - (model.all_tied_weights_keys or {}).keys()
    way_out = "pass what state_dict() of this model returns, with other numbers, or leave state_dict out"
    if wrong := sorted(missing | (state.keys() - own.keys())):
        has = "lacks" if wrong[0] in missing else "has"
        raise ValueError(f"state_dict {has} {wrong[0]}, and the model is saved as a whole: {way_out}")
    for name, t in state.items():
        if (t.shape, t.dtype) != (own[name].shape, own[name].dtype):
            raise ValueError(
                f"{name} in state_dict is {t.dtype} {tuple(t.shape)}, in the model {own[name].dtype} "
                f"{tuple(own[name].shape)}: {way_out}"
            )


def _check_codes(name: str, module: nn.Module, *keys: str) -> None:
    """ValueError unless these parameters of the module `name`, which are codes, are bytes."""
    for key in keys:
        if (dtype := module.get_parameter(key).dtype) != torch.uint8:
            raise ValueError(
                f"{name}.{key} is {dtype}: 4-bit codes are bytes, which a cast of all parameters (type(), not to()) "
                "or tie_weights() of a 4-bit head has replaced: load the model again"
            )


def _check_alike(experts: Mapping[str, HFExperts], counts: set[int]) -> None:
    """ValueError unless all `experts`, by name, have what a config says once for all: static activation scales or none,
    AWQ's scales or none, and as many experts as one of `counts`, if there are any."""
    for key, what, way_out in (
        ("input_scale", "static activation scale", "calibrate(model, batches) gives all layers one"),
        (PRE_QUANT_SCALE, PRE_QUANT_SCALE, "add_pre_quant_scales gives a layer ones"),
    ):
        without = [name for name, m in experts.items() if m._parameters.get(f"down_proj_{key}") is None]
        if 0 < len(without) < len(experts):
            raise ValueError(
                f"{without[0]} has no {what}, and other layers have one, which no program reads from files: {way_out}"
            )
    for name, m in experts.items():
        if counts and (n := m.down_proj.shape[0]) not in counts:
            raise ValueError(
                f"{name} has {n} experts, and the config says {', '.join(map(str, sorted(counts)))}, for all layers, "
                "so no program could load the files: give every layer as many, set the config's number to that, and "
                "then save; or keep the model as it is with torch.save(model, file)"
            )


def activations_of(model: nn.Module) -> list[str]:
    """What the 4-bit layers of `model` have as activations, each once."""
    return list(dict.fromkeys(m.activations for m in model.modules() if isinstance(m, PACKED)))
