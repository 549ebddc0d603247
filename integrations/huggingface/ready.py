"""Models whose calls never wait for a compiler."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from moe_nvfp4 import ready

Model = TypeVar("Model", bound=nn.Module)

# What configs call the number of experts per token. Where layers differ, it is a list.
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")


def prepare_model(model: Model) -> Model:
    """Bring the 4-bit weights of a transformers `model` into the layout of their kernels, and compile and load, in
    parallel, every kernel that calls of any size can need; returns the model. Loading a model on a GPU and
    `swap_experts` do it; call it after a model has moved to a GPU, or after `set_activations`.

    Where a config does not say how many experts a token has, or says it in a way unknown here, the experts' kernels are
    compiled by the calls that need them. MOE_NVFP4_COMPILE=lazy leaves all to these.
    """
    whole: Any = model  # nn.Module does not declare transformers' attributes
    for top_k in experts_per_token(getattr(model, "config", None)) or (None,):
        ready.prepare(model, top_k, getattr(whole, "dtype", torch.bfloat16))  # a layer by itself names none
    return model


def experts_per_token(config: Any) -> set[int]:
    """The numbers of experts per token that a config, or one inside it, speaks of."""
    found: set[int] = set()
    if config is None:
        return found
    for name in TOP_K:
        value = getattr(config, name, None)
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int) and v > 0)
    for part in getattr(config, "sub_configs", {}):
        found |= experts_per_token(getattr(config, part, None))
    return found
