"""vLLM plugin: experts run on this library's kernels, and linears where vLLM has no kernel for them.

`vllm.general_plugins` (the entry point in pyproject.toml) calls `register` in every process of vLLM:

    vllm serve FOLDER --quantization moe_nvfp4

FOLDER holds NVFP4 experts (ModelOpt or compressed-tensors), or bf16 ones, which are quantized as they are read.

    config.py    the quantization config: which layers are ours, and which options and files are errors
    method.py    one MoE layer: its parameters and its forward
    linear.py    one linear, or several that vLLM fuses
    adapters.py  a LoRA adapter of experts; does not import vLLM
    loading.py   fills an `NVFP4Experts` from single tensors; does not import vLLM
    placement.py which layers' experts stay on the CPU; does not import vLLM
    engine.py    uses vLLM's internals, which change with its versions
"""

NAME = "moe_nvfp4"


def register() -> None:
    """Make `--quantization moe_nvfp4` known to vLLM, which calls this. It may be called more than once."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if NAME not in QUANTIZATION_METHODS:
        from moe_nvfp4.integrations.vllm.config import MoeNvfp4Config

        register_quantization_config(NAME)(MoeNvfp4Config)
