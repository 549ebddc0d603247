"""vLLM: experts run on this library's kernels, everything else as vLLM does it.

`vllm.general_plugins` (the entry point in pyproject.toml) calls `register` in every process of vLLM:

    vllm serve FOLDER --quantization moe_nvfp4

FOLDER holds NVFP4 experts (ModelOpt or compressed-tensors), or bf16 ones, which are quantized as they are read.

    config.py   the quantization config: which layers are ours, and what is refused before anything is loaded
    method.py   one MoE layer: its parameters and its forward
    loading.py  fills an `NVFP4Experts` from single tensors; knows nothing of vLLM
    engine.py   all that is internal to vLLM, and changes with its versions
"""

NAME = "moe_nvfp4"


def register() -> None:
    """Make `--quantization moe_nvfp4` known to vLLM; may be called twice. Imports vLLM, which is what calls it."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if NAME not in QUANTIZATION_METHODS:
        from moe_nvfp4.integrations.vllm.config import MoeNvfp4Config

        register_quantization_config(NAME)(MoeNvfp4Config)
