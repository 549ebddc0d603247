"""Sizes of well-known models, for `moe-nvfp4 compile` on a machine without a network."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """The routed experts of a model; gate: "swiglu", "oai" (gpt-oss: clamped, with biases) or "relu2" (not gated)."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    gate: str = "swiglu"


# From the config.json of each, on the Hugging Face Hub.
KNOWN = {
    "Qwen/Qwen3-30B-A3B": Sizes(2048, 768, 128, 8),
    "Qwen/Qwen3-235B-A22B": Sizes(4096, 1536, 128, 8),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": Sizes(6144, 2560, 160, 8),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Sizes(2048, 512, 512, 10),
    "Qwen/Qwen3.5-35B-A3B": Sizes(2048, 512, 256, 8),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Sizes(4096, 14336, 8, 2),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": Sizes(6144, 16384, 8, 2),
    "deepseek-ai/DeepSeek-R1": Sizes(7168, 2048, 256, 8),
    "deepseek-ai/DeepSeek-V2-Lite": Sizes(2048, 1408, 64, 6),
    "openai/gpt-oss-20b": Sizes(2880, 2880, 32, 4, "oai"),
    "openai/gpt-oss-120b": Sizes(2880, 2880, 128, 4, "oai"),
    "zai-org/GLM-4.5": Sizes(5120, 1536, 160, 8),
    "zai-org/GLM-4.5-Air": Sizes(4096, 1408, 128, 8),
    "moonshotai/Kimi-K2-Instruct": Sizes(7168, 2048, 384, 8),
    "MiniMaxAI/MiniMax-M2": Sizes(3072, 1536, 256, 8),
    "allenai/OLMoE-1B-7B-0924": Sizes(2048, 1024, 64, 8),
    "microsoft/Phi-3.5-MoE-instruct": Sizes(4096, 6400, 16, 2),
    "baidu/ERNIE-4.5-21B-A3B-PT": Sizes(2560, 1536, 64, 6),
    "tencent/Hunyuan-A13B-Instruct": Sizes(4096, 3072, 64, 8),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Sizes(2688, 1856, 128, 6, "relu2"),
}


class Arch(NamedTuple):
    """multiprocessors: of the GPUs on sale, from NVIDIA's data sheets. Plans depend on their number."""

    capability: tuple[int, int]
    multiprocessors: tuple[int, ...]


ARCHS = {
    "sm_80": Arch((8, 0), (108,)),  # A100
    "sm_86": Arch((8, 6), (82, 84, 72)),  # RTX 3090, A40 and A6000, A10
    "sm_89": Arch((8, 9), (128, 142, 58)),  # RTX 4090, L40S, L4
    "sm_90a": Arch((9, 0), (132, 114, 78)),  # H100, H200 and GH200, H100 PCIe, H20
    "sm_100a": Arch((10, 0), (148,)),  # B200
    "sm_103a": Arch((10, 3), (148, 160)),  # B300
    "sm_120": Arch((12, 0), (170, 188, 84)),  # RTX 5090, RTX PRO 6000, RTX 5080
    "sm_121": Arch((12, 1), (48,)),  # DGX Spark
}
