"""4-bit modules of a model become dense again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_nvfp4.integrations.huggingface.experts import (
    PACKED,
    HFExperts,
    refuse_by_hand,
    refuse_changed,
    refuse_elsewhere,
)
from moe_nvfp4.integrations.huggingface.linears import to_linear
from moe_nvfp4.prepared import check_plain


def make_dense(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the 4-bit experts and linears of `model` by dense ones in `dtype`.

    ValueError, before anything is replaced, for modules whose weights are not those that dense ones would have: with
    adapters, with hooks or changes of a user, with weights elsewhere.
    """
    refuse_by_hand(model)
    modules = model.named_modules(remove_duplicate=False)
    found: dict[str, Any] = {name: m for name, m in modules if isinstance(m, PACKED)}
    for name, module in found.items():
        if name.endswith(".base_layer"):
            raise ValueError(
                f"{name.partition('.base_layer')[0]} has adapters, which PEFT made for 4-bit weights: save them "
                "(save_pretrained), take them off (unload() of the PeftModel, or load the model anew), dequantize, "
                "and load them onto the dense model (PeftModel.from_pretrained). The model is as it was"
            )
        check_plain(module, name)
        for p in module.parameters():
            refuse_elsewhere(p, "dequantized")
        refuse_changed(name, module)
    dense: dict[int, nn.Module] = {}  # layers may share a module
    while found:
        name, module = found.popitem()
        if getattr(module, "implementation", None):
            module.config._experts_implementation_internal = module.implementation
        if id(module) not in dense:
            made = module.to_dense(dtype) if isinstance(module, HFExperts) else to_linear(module, dtype)
            for part in made.modules():  # else `post_init`, of a model around this one say, makes random weights
                part._is_hf_initialized = True  # type: ignore[assignment]
            dense[id(module)] = made
        model.set_submodule(name, dense[id(module)])
