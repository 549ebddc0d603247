"""moe-nvfp4 compile: what it compiles, and for which GPUs; tests/kernels/test_ahead.py tests the compiling itself."""

import pytest
import transformers

from moe_nvfp4 import cli, ready
from moe_nvfp4.cli.known import ARCHS

# Models whose sizes are the defaults of transformers' config classes.
DEFAULTS = {
    "Qwen/Qwen3-30B-A3B": "Qwen3Moe", "Qwen/Qwen3-Next-80B-A3B-Instruct": "Qwen3Next",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "Mixtral", "deepseek-ai/DeepSeek-R1": "DeepseekV3",
    "openai/gpt-oss-120b": "GptOss", "zai-org/GLM-4.5-Air": "Glm4Moe", "MiniMaxAI/MiniMax-M2": "MiniMaxM2",
    "microsoft/Phi-3.5-MoE-instruct": "Phimoe", "baidu/ERNIE-4.5-21B-A3B-PT": "Ernie4_5_Moe",
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """Records what would be compiled: (gpu, top_k, experts or linears)."""
    calls = []

    def compile_for(model, gpu, top_k=None):
        calls.append((gpu, top_k, model))
        return 0

    monkeypatch.setattr(ready, "compile_for", compile_for)
    return calls


def sizes(layer):
    biased = hasattr(layer, "down_proj_bias")
    return layer.num_experts, layer.hidden_size, layer.intermediate_size, layer.gate, biased


@pytest.mark.parametrize("name", DEFAULTS)
def test_built_in_sizes_are_those_of_transformers(name, tmp_path, compiled):
    config = getattr(transformers, f"{DEFAULTS[name]}Config")(num_hidden_layers=1)
    if name.startswith("Qwen/Qwen3-Next"):
        config.layer_types = ["full_attention"]
    for key in ("mlp_layer_types", "first_k_dense_replace", "moe_layer_start_index"):
        if hasattr(config, key):
            setattr(config, key, ["sparse"] if "types" in key else 0)
    config.architectures = [f"{DEFAULTS[name]}ForCausalLM"]
    config.save_pretrained(tmp_path)
    for model in (name, str(tmp_path)):
        assert cli.main(["compile", model, "--arch", "sm_100a"]) == 0
    (gpu, top_k, ours), _, (_, their_top_k, theirs), _ = compiled
    assert gpu == (ARCHS["sm_100a"].capability, 148, None) and top_k == their_top_k
    assert sizes(ours) == sizes(theirs)


def test_what_one_gpu_of_several_has(compiled):
    command_line = ["compile", "deepseek-ai/DeepSeek-R1", "--arch", "sm_90a", "--multiprocessors", "132"]
    assert cli.main([*command_line, "--expert-parallel", "8", "--activations", "nvfp4"]) == 0
    (_, top_k, dynamic), (_, _, static), (_, _, linears) = compiled
    assert (dynamic.num_experts, top_k, len(linears)) == (32, 8, 0)
    assert dynamic.activations == static.activations == "nvfp4"
    assert dynamic.weights.x_scale is None and static.weights.x_scale is not None


def test_an_uneven_share_is_an_error(compiled, capsys):
    assert cli.main(["compile", "openai/gpt-oss-20b", "--arch", "sm_80", "--tensor-parallel", "7"]) == 2
    assert "2880 channels cannot be split evenly over 7 GPUs" in capsys.readouterr().err and not compiled
