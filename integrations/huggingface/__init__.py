"""Hugging Face transformers: swap experts, quantize while loading, save and load again.

Importing this module registers the quantization methods `modelopt` and `moe_nvfp4` with transformers, and reads NVFP4
folders of `compressed-tensors` and `fp8` (DeepSeek V4) in place of transformers' own readers, until `unregister`:

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=MoeNvfp4Config())  # bf16, MXFP4, FP8
    model = swap_experts(model)                      # or: a model already in memory
    model.save_pretrained(folder)                    # 4-bit files
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, config=checkpoint_config(folder, linears="dense"))
    model = swap_experts(model, cpu_experts="auto").to("cuda")   # experts beside the GPU, where it has no room
    calibrate(model, batches)                        # static scales for activations="nvfp4"
    model.dequantize()                               # dense again, with the 4-bit weights' exact values

Multi-token prediction layers are not part of a model: generate(use_mtp=True) reads them, dense, from the files
that the model was loaded from. Conversion, and save_pretrained of a loaded model, copy them unchanged.
"""

from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config, checkpoint_config
from moe_nvfp4.integrations.huggingface.graphs import use_cuda_graphs
from moe_nvfp4.integrations.huggingface.offload import describe_placement, keep_experts_on_cpu
from moe_nvfp4.integrations.huggingface.quantizer import MoeNvfp4Quantizer
from moe_nvfp4.integrations.huggingface.ready import prepare_model
from moe_nvfp4.integrations.huggingface.registry import register, unregister
from moe_nvfp4.integrations.huggingface.swap import calibrate, set_activations, swap_experts

__all__ = [
    "MoeNvfp4Config",
    "MoeNvfp4Quantizer",
    "calibrate",
    "checkpoint_config",
    "describe_placement",
    "keep_experts_on_cpu",
    "prepare_model",
    "register",
    "set_activations",
    "swap_experts",
    "unregister",
    "use_cuda_graphs",
]

register()
