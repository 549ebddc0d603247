"""moe-nvfp4 compile: what it compiles, and for which GPUs; tests/kernels/test_ahead.py tests the compiling itself."""

import pytest
import torch
import transformers

from moe_nvfp4 import NVFP4Experts, cli, ready
from moe_nvfp4.backends import PACKAGES, Device, Gpu
from moe_nvfp4.cli.known import ARCHS
from moe_nvfp4.integrations.huggingface.ready import experts_per_token, prepare_model
from moe_nvfp4.kernels.calls import kernels_of
from moe_nvfp4.linear import NVFP4Linear
from tests.models import qwen3_moe

# Models whose sizes are the defaults of transformers' config classes.
DEFAULTS = {
    "Qwen/Qwen3-30B-A3B": "Qwen3Moe", "Qwen/Qwen3-Next-80B-A3B-Instruct": "Qwen3Next",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "Mixtral", "deepseek-ai/DeepSeek-R1": "DeepseekV3",
    "openai/gpt-oss-120b": "GptOss", "zai-org/GLM-4.5-Air": "Glm4Moe", "MiniMaxAI/MiniMax-M2": "MiniMaxM2",
    "microsoft/Phi-3.5-MoE-instruct": "Phimoe", "baidu/ERNIE-4.5-21B-A3B-PT": "Ernie4_5_Moe",
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """Records what would be compiled: (gpu, top_k, experts or linears, dtype)."""
    calls = []

    def compile_for(model, gpu, top_k=None, dtype=torch.bfloat16, expert_map=False):
        calls.append((gpu, top_k, model, dtype))
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
    (gpu, top_k, ours, _), _, (_, their_top_k, theirs, _), _ = compiled
    assert gpu == (ARCHS["sm_100a"].capability, 148, None) and top_k == their_top_k
    assert sizes(ours) == sizes(theirs)


def test_what_one_gpu_of_several_has(compiled):
    command_line = ["compile", "deepseek-ai/DeepSeek-R1", "--arch", "sm_90a", "--multiprocessors", "132"]
    assert cli.main([*command_line, "--expert-parallel", "8", "--activations", "nvfp4"]) == 0
    (_, top_k, dynamic, _), (_, _, static, _), (_, _, linears, _) = compiled
    assert (dynamic.num_experts, top_k, len(linears)) == (32, 8, 0)
    assert dynamic.activations == static.activations == "nvfp4"
    assert dynamic.weights.x_scale is None and static.weights.x_scale is not None


def test_an_uneven_share_is_an_error(compiled, capsys):
    assert cli.main(["compile", "openai/gpt-oss-20b", "--arch", "sm_80", "--tensor-parallel", "7"]) == 2
    assert "2880 channels cannot be split evenly over 7 GPUs" in capsys.readouterr().err and not compiled


def test_experts_per_token():
    """Those of the text model inside of another, and of layers that differ."""
    vision = transformers.Qwen3VLMoeConfig(text_config={"num_experts_per_tok": 3})
    layers = transformers.PretrainedConfig(num_experts_per_tok=[2, 4, 0, 4])
    own = transformers.Qwen3MoeConfig(num_hidden_layers=2, num_experts_per_tok=2)
    own.per_layer_config = {1: {"num_experts_per_tok": 3}}  # reading it of the whole config is an error then
    assert [experts_per_token(config) for config in (vision, layers, own, None)] == [{3}, {2, 4}, {2, 3}, set()]


def test_what_a_model_of_transformers_is_prepared_for(monkeypatch):
    """Its number of experts per token and its dtype; without them linears at least, in bf16."""
    asked = []
    monkeypatch.setattr(ready, "prepare", lambda model, *how: asked.append(how))
    prepare_model(qwen3_moe().half())
    prepare_model(torch.nn.Linear(2, 2))
    assert asked == [(2, torch.float16), (None, torch.bfloat16)]


def test_what_is_compiled_for_experts(monkeypatch):
    """Where kernels read an expert_map, calls with one besides those without; stages, where the model's own operations
    are between them; the kernels that MOE_NVFP4_BACKEND names."""
    made = []
    monkeypatch.setattr(ready, "compile_ahead", lambda calls, gpu: made.extend(calls) or 7)
    monkeypatch.setattr(Device, "of", lambda device: Device(device.type, packages=frozenset(PACKAGES)))
    monkeypatch.delenv("MOE_NVFP4_BACKEND", raising=False)

    def found(capability, expert_map, norm=None):
        made.clear()
        layer = NVFP4Experts(8, 256, 128, device="meta")
        layer.post_expert_norm = norm
        assert ready.compile_for(layer, Gpu(capability, 132), 2, expert_map=expert_map) == 7
        assert {call.top_k for _, call in made} == {2}
        return sorted((backend.name, call.expert_map, call.fused) for backend, call in made)

    assert found((9, 0), False) == [("sm90", False, True)]
    assert found((9, 0), True) == [("sm90", False, True), ("sm90", True, True)]
    assert found((10, 0), True) == [("sm100", False, True)]
    assert found((9, 0), False, torch.nn.Identity()) == [("sm90", False, False)]
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "portable")
    assert found((9, 0), True) == [("portable", False, True)]


def of_a_model(tmp_path, dtype):
    """The folder of a config with attention, a shared expert and its gate of one row."""
    config = transformers.Qwen2MoeConfig(
        num_hidden_layers=2, hidden_size=1024, moe_intermediate_size=512, shared_expert_intermediate_size=1024,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=4096, architectures=["Qwen2MoeForCausalLM"],
        dtype=dtype,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    return config


@pytest.mark.parametrize(("activations", "static"), [("bf16", False), ("nvfp4", False), ("nvfp4", True)])
def test_linears_that_run_as_one_and_static_scales(activations, static, tmp_path, monkeypatch):
    """What a model with 4-bit linears in place needs (`ready`) is among what the command compiles."""
    pytest.importorskip("cutlass", reason="CuTe DSL compiles the kernels")
    pytest.importorskip("triton", reason="the quantization of rows is Triton's")
    kernels = {}

    def note(calls, gpu):
        for backend, call in calls:
            kernels.update(kernels_of(backend, call, gpu))
        return 0

    monkeypatch.setattr(ready, "compile_ahead", note)
    config = of_a_model(tmp_path, torch.bfloat16)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module.out_features > 1:
            bias = None if module.bias is None else module.bias.dtype
            sizes = module.in_features, module.out_features, bias
            model.set_submodule(name, NVFP4Linear(*sizes, activations, static, device="meta"))
    ready.compile_for(model, Gpu((9, 0), 132))
    wanted, _ = dict(kernels), kernels.clear()
    assert len(wanted) > 20
    command_line = ["compile", str(tmp_path), "--arch", "sm_90a", "--multiprocessors", "132", "--linears"]
    assert cli.main([*command_line, "--activations", activations]) == 0
    assert wanted.keys() - kernels.keys() == set()


def test_awq(tmp_path, compiled):
    """Its scales come between the stages, which then have kernels of their own."""
    config = of_a_model(tmp_path, torch.bfloat16)
    config.quantization_config = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}
    config.save_pretrained(tmp_path)
    assert cli.main(["compile", str(tmp_path), "--arch", "sm_90a", "--multiprocessors", "132"]) == 0
    (_, _, experts, _), _ = compiled
    assert not experts._hooks().fused and None not in experts.pre_quant_scales


def test_a_model_in_fp16(tmp_path, compiled):
    for dtype, dtypes in ((torch.float16, [torch.bfloat16, torch.float16]), (torch.float32, [torch.bfloat16])):
        compiled.clear()
        of_a_model(tmp_path, dtype)
        assert cli.main(["compile", str(tmp_path), "--arch", "sm_90a", "--multiprocessors", "132"]) == 0
        assert [call[3] for call in compiled if call[1]] == dtypes
