"""Prepare models so that their calls never wait for a compiler."""

from __future__ import annotations

from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn

from moe_nvfp4 import ready
from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.integrations.huggingface import finegrained
from moe_nvfp4.integrations.huggingface.graphs import decode_by_graphs
from moe_nvfp4.quantize.files import TOP_K
from moe_nvfp4.quantize.settings import layer_configs
from moe_nvfp4.router import in_one_launch

Model = TypeVar("Model", bound=nn.Module)


def prepare_model(model: Model) -> Model:
    """Bring the 4-bit weights of a transformers `model` into the layout of their kernels, and compile and load, in
    parallel, every kernel that calls of any size can need. Returns the model. `swap_experts`, and loading a model onto
    a GPU, call this; call it yourself after a model has moved to a GPU, and after `set_activations`. With a static
    cache, `generate` then decodes by CUDA graphs, as after `use_cuda_graphs`.

    If the config does not say how many experts a token has, or under a name unknown here, the experts' kernels are
    compiled when a call needs them. With MOE_NVFP4_COMPILE=lazy all kernels are.
    """
    finegrained.prepare(model)
    whole: Any = model  # nn.Module does not declare transformers' attributes
    for top_k in experts_per_token(getattr(model, "config", None)) or (None,):
        ready.prepare(model, top_k, getattr(whole, "dtype", torch.bfloat16))  # a layer by itself has no dtype
    decode_by_graphs(model)
    for module in model.modules():
        if any(isinstance(child, NVFP4Experts) for child in module.children()):
            in_one_launch(module)
    return model


def experts_per_token(config: Any) -> set[int]:
    """The numbers of experts per token that a config and its sub-configs name."""
    found: set[int] = set()
    if config is None:
        return found
    for name, layer in product(TOP_K, layer_configs(config) or [config]):
        value = getattr(layer, name, None)
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int) and v > 0)
    for part in getattr(config, "sub_configs", {}):
        found |= experts_per_token(getattr(config, part, None))
    return found
