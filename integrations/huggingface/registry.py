"""Entries in transformers' registries: which quantization methods are read here."""

from __future__ import annotations

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.quantizer import MoeNvfp4Quantizer
from moe_nvfp4.quantize.dialects import read_config


def register() -> None:
    for method in ("modelopt", "moe_nvfp4"):
        register_quantization_config(method)(MoeNvfp4Config)
        register_quantizer(method)(MoeNvfp4Quantizer)
    for method in ("compressed-tensors", "fp8"):
        _dispatch(method)


def _dispatch(method: str) -> None:
    """Have NVFP4 configs of a `method` that transformers knows become ours; others stay transformers'.

    transformers asks its registry for the class that reads a quantization_config, and then the object that this
    class returns for its quantizer: so one entry of the registry decides, and no code of transformers is changed.
    """
    theirs = AUTO_QUANTIZATION_CONFIG_MAPPING[method]

    class Dispatcher(QuantizationConfigMixin):
        @classmethod
        def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
            reader = theirs if read_config(config_dict) is None else MoeNvfp4Config
            return reader.from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)

    AUTO_QUANTIZATION_CONFIG_MAPPING[method] = Dispatcher


for _method in ("compressed-tensors", "fp8"):
    _dispatch(_method)
