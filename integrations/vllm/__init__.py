"""vLLM plugin: experts run on this library's kernels, and linears where vLLM has no kernel for them.

`vllm.general_plugins` (the entry point in pyproject.toml) calls `register` in every process of vLLM:

    vllm serve FOLDER --quantization moe_nvfp4

FOLDER holds NVFP4 experts (ModelOpt or compressed-tensors), or bf16 ones, which are quantized as they are read; with
`--load-format moe_nvfp4` also MXFP4 or FP8 ones.

    config.py    the quantization config: which layers are ours, and which options and files are errors
    method.py    one MoE layer: its parameters and its forward
    linear.py    one linear, or several that vLLM fuses
    arrived.py   whether all weights of vLLM's own layers have come
    hidden.py    4-bit weights, which vLLM does not see
    adapters.py  LoRA adapters of experts; does not import vLLM
    lora.py      those that requests choose: experts in vLLM's own LoRA
    loading.py   fills an `NVFP4Experts` from single tensors; does not import vLLM
    unwritten.py MXFP4 and FP8 files, as NVFP4; does not import vLLM
    placement.py which layers' experts stay on the CPU; does not import vLLM
    reload.py    new weights in a running server
    engine.py    uses vLLM's internals, which change with its versions
"""

NAME = "moe_nvfp4"


def register() -> None:
    """Make `--quantization moe_nvfp4` known to vLLM, which calls this. It may be called more than once."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if NAME not in QUANTIZATION_METHODS:
        from moe_nvfp4.integrations.vllm.config import MoeNvfp4Config, check_options

        register_quantization_config(NAME)(MoeNvfp4Config)
        check_options()
        from vllm.model_executor.model_loader import register_model_loader

        from moe_nvfp4.integrations.vllm.engine import UnwrittenLoader

        register_model_loader(NAME)(UnwrittenLoader)
