"""4-bit folders with an unusual config, layout or bytes load correctly in transformers, or are refused by name."""

import importlib.util
import json
import re
import shutil
from argparse import Namespace
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Step3p7ForConditionalGeneration

from moe_nvfp4 import cli
from moe_nvfp4.cli import models
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, checkpoint_config, set_activations, swap_experts
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import config_of
from tests.common import THRESHOLDS, relative_error
from tests.folders import (
    CONFIGS,
    as_published,
    awq,
    change_config,
    fp8,
    fused,
    is_expert,
    is_linear,
    projection_first,
    quantized,
    qwen2_moe,
    stacked_by_projection,
    stored,
    value,
    write,
)
from tests.integrations.test_checkpoints import both, load, packed
from tests.integrations.test_mtp import hy_v4
from tests.models import (
    SMALL,
    dense_like,
    folder,
    gemma4,
    gpt_oss,
    granite,
    llama4,
    logits,
    make,
    minimax_m3,
    mixtral,
    nemotron_h,
    qwen3_moe,
    same_tensors,
    step3p7,
    tensors,
)


# ---------------------------------------------------------------- configs
def without(config, *keys):
    return {k: v for k, v in config.items() if k not in keys}


W4A16 = {"group_0": {**CONFIGS["compressed-tensors"]["config_groups"]["group_0"], "input_activations": None}}
VARIANTS = {
    "W4A16": ("compressed-tensors", lambda q: {**q, "config_groups": W4A16}, "bf16"),
    "no config_groups": ("compressed-tensors", lambda q: without(q, "config_groups"), "bf16"),
    "mixed-precision": ("compressed-tensors", lambda q: {**q, "format": "mixed-precision"}, "nvfp4"),
    "ModelOpt W4A16": ("modelopt", lambda q: {**q, "quant_algo": "W4A16_NVFP4"}, "bf16"),
    "ModelOpt MIXED": (
        "modelopt", lambda q: {**without(q, "config_groups"), "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}}, "nvfp4"),
    "DeepSeek V4": (
        "modelopt", lambda q: {"quant_method": "fp8", "weight_block_size": [128, 128], "moe_quant_algo": "NVFP4"},
        "nvfp4"),
    "a string for the KV cache": ("modelopt", lambda q: {**q, "kv_cache_scheme": "FP8"}, "nvfp4"),
}  # fmt: skip


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_config_variants(variant, tmp_path):
    dialect, change, activations = VARIANTS[variant]
    folder, twin = quantized(tmp_path, qwen3_moe, dialect)
    change_config(folder, quantization_config=change(CONFIGS[dialect]))
    model = load(folder)
    assert {m.activations for m in packed(model, HFExperts).values()} == {activations}
    assert relative_error(logits(set_activations(model, "bf16")), logits(load(twin))) < 10 * THRESHOLDS["fp32"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("config", ["hf_quant_config.json", "nothing"])
def test_a_folder_whose_config_is_silent(config, tmp_path, capsys):
    """Older exports have only hf_quant_config.json; without that, tensor names tell what the files are."""
    folder, twin = quantized(tmp_path, qwen3_moe, "modelopt")
    change_config(folder, quantization_config=None)
    with pytest.raises(ValueError, match="neither config.json nor hf_quant_config.json says so"):
        checkpoint_config(folder)
    if config == "nothing":
        model = load(folder, quantization_config=MoeNvfp4Config())
    else:
        hf = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}}
        (folder / config).write_text(json.dumps(hf))
        model = load(folder, config=checkpoint_config(folder))
        assert {m.activations for m in packed(model, HFExperts).values()} == {"nvfp4"}
        args = Namespace(model=str(folder), device="cpu", recipe=None, exclude=[], linears=None, activations=None)
        ours, _ = models.load(args, "bf16", tokenizer=False)  # as commands do
        assert {m.activations for m in packed(ours, HFExperts).values()} == {"nvfp4"}
        inside = dict(subfolder=folder.name)  # of a repository that holds several
        again = load(tmp_path, config=checkpoint_config(tmp_path, **inside), **inside)
        assert {m.activations for m in packed(again, HFExperts).values()} == {"nvfp4"}
        set_activations(model, "bf16")
        cli.main(["info", str(folder)])
        assert "2 layers of experts, NVFP4 of modelopt" in capsys.readouterr().out
        convert_checkpoint(folder, tmp_path / "new", Options(dialect="compressed-tensors"), progress=False)
        new = json.loads((tmp_path / "new/config.json").read_text())["quantization_config"]
        scheme = {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
        assert new["kv_cache_scheme"] == scheme
    assert relative_error(logits(model), logits(load(twin))) < 10 * THRESHOLDS["fp32"]


@pytest.mark.slow_after(1)
@both
def test_layers_whose_experts_are_dense_in_the_files(dialect, tmp_path):
    pattern = "model.layers.0*" if dialect == "modelopt" else "re:model.layers.0.*"
    folder, twin = quantized(tmp_path, qwen3_moe, dialect, lambda k: is_expert(k) and "layers.1." in k,
                             ignore=["lm_head", pattern])  # fmt: skip
    model = set_activations(load(folder), "bf16")
    assert list(packed(model, HFExperts)) == ["model.layers.1.mlp.experts"]
    assert relative_error(logits(model), logits(load(twin))) < 10 * THRESHOLDS["fp32"]
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


@both
def test_the_files_count_where_the_config_excludes_too_much(dialect, tmp_path):
    pattern = "*.experts.*" if dialect == "modelopt" else "re:.*experts.*"
    folder, twin = quantized(tmp_path, qwen3_moe, dialect, ignore=["lm_head", pattern])
    model = set_activations(load(folder), "bf16")
    assert len(packed(model, HFExperts)) == 2
    assert relative_error(logits(model), logits(load(twin))) < 10 * THRESHOLDS["fp32"]


@pytest.mark.slow_after(1)
@both
@pytest.mark.parametrize("kind", ["tensor", "row", "mx", "block"])
def test_mixed_precision_fp8_linears_become_dense(kind, dialect, tmp_path, caplog):
    folder, twin = quantized(tmp_path, qwen2_moe, dialect)
    files, dense = tensors(folder), tensors(twin)
    for key in [k for k in files if is_linear(k)]:
        codes, scale, dense[key] = fp8(kind, files[key].float())
        files[key], stem = codes, key.removesuffix(".weight")
        files[f"{stem}.weight_scale_inv" if kind == "block" else f"{stem}.weight_scale"] = scale
        if kind == "tensor":
            files[f"{stem}.input_scale"] = torch.tensor(0.01)
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    dense = {key: tensor.contiguous() for key, tensor in dense.items()}
    save_file(dense, twin / "model.safetensors", metadata={"format": "pt"})
    model = set_activations(load(folder), "bf16")
    assert "14 FP8 linears are made dense" in caplog.text
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert torch.equal(module.weight, dense[f"{name}.weight"]), name
    assert relative_error(logits(model), logits(load(twin))) < 10 * THRESHOLDS["fp32"]


@pytest.mark.slow
@both
@pytest.mark.parametrize("kind, family", [
    ("tensor", qwen3_moe), ("row", qwen3_moe), ("block", mixtral),
    ("mx", lambda: nemotron_h("moe", "attention", "moe")),
], ids=["tensor", "row", "block, w1 w3 w2", "mx, no gate"])  # fmt: skip
def test_mixed_precision_fp8_experts_become_dense(kind, family, dialect, tmp_path, caplog):
    """One layer's experts are FP8, another's NVFP4: loaded into a model, and converted."""
    folder, twin = quantized(tmp_path, family, dialect, lambda k: is_expert(k) and "layers.0." not in k, 0.01)
    files, dense = tensors(folder), tensors(twin)
    for key in [k for k in files if is_expert(k) and "layers.0." in k]:
        files[key], scale, dense[key] = fp8(kind, files[key].float())
        stem = key.removesuffix(".weight")
        files[f"{stem}.{'weight_scale_inv' if kind == 'block' else 'weight_scale'}"] = scale
        if kind == "tensor":
            files[f"{stem}.input_scale"] = torch.tensor(0.01)
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({k: t.contiguous() for k, t in dense.items()}, twin / "model.safetensors", metadata={"format": "pt"})
    model, expected = set_activations(load(folder), "bf16"), load(twin)
    assert "the FP8 experts of 1 layers are made dense" in caplog.text
    assert len(packed(model, HFExperts)) == 1
    name = next(n for n, m in expected.named_modules() if n.endswith("experts") and "layers.0." in n)
    for key, p in model.get_submodule(name).named_parameters():
        assert torch.equal(p, expected.get_submodule(name).get_parameter(key)), key
    assert relative_error(logits(model), logits(expected)) < 10 * THRESHOLDS["fp32"]
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))
    convert_checkpoint(folder, tmp_path / "plain", Options(dialect=dialect), progress=False)
    plain = set_activations(load(tmp_path / "plain", torch.bfloat16), "bf16")
    assert torch.equal(logits(plain), logits(set_activations(load(folder, torch.bfloat16), "bf16")))
    for path in ("again", "plain"):  # servers are told
        assert not [line for line in verify_checkpoint(tmp_path / path).warnings if "ignore list" in line]
    if kind == "row":
        missing = next(k for k in files if is_expert(k) and "layers.0." in k and k.endswith("weight_scale"))
        del files[missing]
        save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(
            ValueError, match=f"{missing.removesuffix('_scale')} is FP8 .* and has no scale.* a shard is missing"
        ):
            load(folder)


@pytest.mark.slow_after(2)
@both
@pytest.mark.parametrize("kind", ["dense", "FP8"])
@pytest.mark.parametrize("family", [gpt_oss, granite, llama4, gemma4])
def test_experts_one_by_one_of_families_with_stacks(family, kind, dialect, tmp_path):
    """A layer of dense or FP8 experts beside NVFP4 ones, by a tool that takes all stacks apart. transformers reads
    stacks only in these families, and would leave that layer's experts random."""
    source, path = folder(tmp_path, family), tmp_path / "nvfp4"
    convert_checkpoint(source, path, Options(dialect=dialect), progress=False)
    original = load(source, torch.float32)
    name = next(n for n, _ in original.named_modules() if re.search(r"\.0\.(.*\.)?experts$", n))
    experts = original.get_submodule(name)
    files = {key: tensor for key, tensor in tensors(path).items() if not key.startswith(f"{name}.")}
    up, down = experts.gate_up_proj.data, experts.down_proj.data
    up, down = (up.mT, down.mT) if family in (gpt_oss, llama4) else (up, down)
    halves = (up[:, ::2], up[:, 1::2]) if family is gpt_oss else up.chunk(2, dim=1)
    for part, stack in zip(("gate_proj", "up_proj", "down_proj"), (*halves, down), strict=True):
        for e, weight in enumerate(stack):
            key = f"{name}.{e}.{part}.weight"
            files[key] = weight.bfloat16().contiguous()
            if kind == "FP8":
                files[key], files[f"{key}_scale"], worth = fp8("tensor", weight)
                weight.copy_(worth)  # in the original
    if family is gpt_oss:
        b = experts.gate_up_proj_bias.data
        for part, biases in (("gate_proj", b[:, ::2]), ("up_proj", b[:, 1::2]), ("down_proj", experts.down_proj_bias)):
            files |= {f"{name}.{e}.{part}.bias": bias.bfloat16() for e, bias in enumerate(biases)}
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    other = next(d for d in ("modelopt", "compressed-tensors") if d != dialect)
    convert_checkpoint(path, tmp_path / "converted", Options(dialect=other), progress=False)
    for found, rounded in ((path, lambda t: t), (tmp_path / "converted", lambda t: t.bfloat16().float())):
        model = load(found, torch.float32)
        assert len(packed(model, HFExperts)) == 1
        for key, p in experts.named_parameters():
            assert torch.equal(model.get_submodule(name).get_parameter(key), rounded(p)), key
    if family is gpt_oss:
        stack = {f"{name}.gate_up_proj_bias": b, f"{name}.down_proj_bias": experts.down_proj_bias.data}
        others = {key: tensor for key, tensor in files.items() if not re.search(r"layers\.0\..*\d.*\.bias$", key)}
        others = {key: tensor for key, tensor in others.items() if key.startswith(name) or "experts" not in key}
        save_file(others | stack, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="a stack next to experts one by one"):
            load(path)


def deepseek_v4():
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(
        vocab_size=96, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, head_dim=32, q_lora_rank=32,
        o_lora_rank=32, o_groups=2, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        index_n_heads=2, index_head_dim=32, qk_rope_head_dim=16, sliding_window=8, index_topk=4,
        max_position_embeddings=128,
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has no DeepSeek V4")
def test_deepseek_v4_with_its_own_names(tmp_path):
    """NVFP4 experts named w1, w3, w2; everything else is FP8 in blocks, with power-of-two scales named `scale`."""
    make(deepseek_v4).save_pretrained(tmp_path / "bf16")
    files, twin = {}, {}
    for key, tensor in tensors(tmp_path / "bf16").items():
        twin[key] = tensor.float()
        name = key.removeprefix("model.")
        stem = name.removesuffix(".weight")
        if is_expert(key):
            new = stored("modelopt", stem, tensor, 0.01)
            files |= new
            twin[key] = value("modelopt", new, stem)
        elif re.search(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123])\.weight$", key):
            files[name], scale, twin[key] = fp8("block", tensor.float(), power_of_two=True)
            files[f"{stem}.scale"] = scale.to(torch.float8_e8m0fnu)
        else:
            files[name] = tensor
    original = json.loads((tmp_path / "bf16/config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
                    "moe_quant_algo": "NVFP4"}  # fmt: skip
    folder = write(tmp_path / "nvfp4", files, original, quantization)
    dense = load(write(tmp_path / "twin", twin, {**original, "dtype": "float32"}, None))
    model = set_activations(load(folder), "bf16")
    assert len(packed(model, HFExperts)) == 3 and not packed(model, NVFP4Linear)
    assert relative_error(logits(model), logits(dense)) < 10 * THRESHOLDS["fp32"]
    report = convert_checkpoint(folder, tmp_path / "plain", progress=False)
    assert (report.carried, report.dequantized) == (36, sum(name.endswith(".scale") for name in files))
    assert torch.equal(logits(set_activations(load(tmp_path / "plain"), "bf16")), logits(model))


@both
def test_kv_cache_scales_are_reported_once(dialect, tmp_path, caplog):
    folder, twin = quantized(tmp_path, qwen3_moe, dialect)
    files = tensors(folder)
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn"
        names = ("k_proj.k_scale", "v_proj.v_scale") if dialect == "modelopt" else ("k_scale", "v_global_scale")
        files |= {f"{stem}.{name}": torch.tensor(0.5) for name in names}
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert caplog.text.count("4 scales of a quantized KV cache are left out (model.layers.0.self_attn") == 1
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert relative_error(logits(set_activations(model, "bf16")), logits(load(twin))) < 10 * THRESHOLDS["fp32"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
def test_other_compressed_tensors_folders_are_left_to_transformers(tmp_path):
    """FP8 by row gets transformers' own config and quantizer, and the dense model's numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

    make(lambda: LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=96))).save_pretrained(tmp_path / "bf16")
    files, twin = tensors(tmp_path / "bf16"), {}
    for key in list(files):
        twin[key] = files[key].float()
        if is_linear(key) or ".mlp." in key:
            files[key], scale, twin[key] = fp8("row", files[key].float())
            files[f"{key}_scale"] = scale
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**numbers, "strategy": "channel", "dynamic": False}}
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
                    "quantization_status": "compressed", "config_groups": {"group_0": group}}  # fmt: skip
    original = json.loads((tmp_path / "bf16/config.json").read_text())
    model = load(write(tmp_path / "fp8", files, original, quantization))
    assert type(model.hf_quantizer) is CompressedTensorsHfQuantizer
    dense = load(write(tmp_path / "twin", twin, {**original, "dtype": "float32"}, None))
    assert relative_error(logits(model), logits(dense)) < 1e-3


def test_other_fp8_folders_are_left_to_transformers():
    from transformers.quantizers.auto import AutoQuantizationConfig
    from transformers.utils.quantization_config import FineGrainedFP8Config

    config = AutoQuantizationConfig.from_dict({"quant_method": "fp8", "weight_block_size": [64, 64]})
    assert type(config) is FineGrainedFP8Config and config.weight_block_size == [64, 64]


# ---------------------------------------------------------------- other layouts of experts
@pytest.mark.slow
def test_experts_numbered_after_the_projection(tmp_path):
    """experts.gate_proj.3, as older ModelOpt wrote some families."""
    folder, twin = quantized(
        tmp_path, lambda: qwen3_moe(experts=12), "modelopt", rename=projection_first, input_scale=0.002
    )
    assert "model.layers.0.mlp.experts.up_proj.11.weight_scale_2" in tensors(folder)
    model = set_activations(load(folder), "bf16")
    assert relative_error(logits(model), logits(load(twin))) < 10 * THRESHOLDS["fp32"]
    model.save_pretrained(tmp_path / "again")  # with the number first, as all readers expect
    assert "model.layers.0.mlp.experts.11.up_proj.weight_scale_2" in tensors(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


def check_both_activations(model, dense, load, folder):
    """In W4A16 a W4A4 model equals the dense one; saved and loaded from `folder`, both modes answer the same."""
    w4a4 = logits(model)
    assert relative_error(logits(set_activations(model, "bf16")), logits(dense)) < 10 * THRESHOLDS["fp32"]
    model.save_pretrained(folder)
    again = load(folder)
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(set_activations(again, "nvfp4")), w4a4)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("inputs", [False, True], ids=["W4A16", "input scales"])
@pytest.mark.parametrize("family", [gpt_oss, llama4], ids=lambda f: f.__name__)
def test_fused_stacks(family, inputs, tmp_path):
    """Codes [E, in/2, out] with one scale for all experts, the layout of Llama 4 and gpt-oss exports."""
    folder, twin = fused(tmp_path, family, 0.01 if inputs else None)
    dense = load(twin)
    model = load(folder)
    experts = next(iter(packed(model, HFExperts).values()))
    assert ("down_proj_input_scale" in experts._parameters) == inputs
    check_both_activations(model, dense, load, tmp_path / "again")
    with pytest.raises(
        NotImplementedError, match="map_files: the experts of these files are transposed stacks.*SRC DST"
    ):
        load(folder, quantization_config=MoeNvfp4Config(map_files=True))


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [False, True], ids=["W4A16", "input scales"])
def test_a_stack_for_each_projection(inputs, tmp_path):
    """Step-3: moe.gate_proj.weight [E, out, in/2], and scales [E]."""
    folder, twin = stacked_by_projection(tmp_path, step3p7, 0.01 if inputs else None)
    load = lambda path: Step3p7ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    model, dense, files = load(folder), load(twin), tensors(folder)
    name, experts = next(iter(packed(model, HFExperts).items()))
    assert len(packed(model, HFExperts)) == 2
    stem = name.replace("language_model.", "").replace("mlp.experts", "moe")
    for part, rows in (("gate_proj", slice(0, 48)), ("up_proj", slice(48, None))):
        assert torch.equal(experts.gate_up_proj[:, rows], files[f"{stem}.{part}.weight"])
        assert torch.equal(getattr(experts, f"{part}_global_scale"), files[f"{stem}.{part}.weight_scale_2"])
    assert ("down_proj_input_scale" in experts._parameters) == inputs
    check_both_activations(model, dense, load, tmp_path / "again")
    del files[f"{stem}.up_proj.weight_scale_2"]
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{stem}.up_proj.weight_scale_2 is missing"):
        load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize("linears", ["packed", "dense"])
def test_awq(linears, activations, tmp_path):
    """NVFP4_AWQ multiplies x and h by a vector before the GEMM; the dense twin has that vector in its weights."""
    folder, twin = awq(tmp_path, qwen2_moe, 2**-6)
    files = tensors(folder)
    model = load(folder, config=checkpoint_config(folder, linears=linears, activations=activations))
    error = relative_error(logits(model), logits(load(twin)))
    assert error < 10 * THRESHOLDS["fp32"] if activations == "bf16" else 1e-3 < error < 2  # rows of 4 bits
    assert relative_error(logits(dense_like(model)), logits(load(twin))) < 10 * THRESHOLDS["fp32"]
    half = load(folder, torch.bfloat16, config=checkpoint_config(folder, linears=linears, activations="bf16"))
    assert relative_error(logits(half).float(), logits(load(twin))) < 0.15  # 0.8 without the vectors
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4_AWQ"
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))
    if linears == "packed":
        assert tensors(tmp_path / "again").keys() == files.keys()
    with pytest.raises(ValueError, match="AWQ. has no place in compressed-tensors files"):
        convert_checkpoint(folder, tmp_path / "other", Options(dialect="compressed-tensors"), progress=False)
    files["model.layers.0.mlp.experts.1.gate_proj.pre_quant_scale"] += 1
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="layers.0.mlp.experts.up_proj_pre_quant_scale: gate and up have different"):
        load(folder)
    files["model.layers.0.mlp.experts.1.gate_proj.pre_quant_scale"] -= 1
    for part in ("gate_proj", "up_proj"):
        files[f"model.layers.1.mlp.experts.2.{part}.pre_quant_scale"][3] = torch.nan
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="layers.1.mlp.experts.up_proj_pre_quant_scale has NaN or Inf"):
        load(folder)


# ---------------------------------------------------------------- refused by name
Q = "model.layers.1.self_attn.q_proj"
E3 = "model.layers.1.mlp.experts.3"
DAMAGE = {
    "a scale of a linear is missing": (lambda f: f.pop(f"{Q}.weight_scale"), f"{Q}.weight_scale is missing"),
    "a global scale of a linear is missing": (
        lambda f: f.pop(f"{Q}.weight_scale_2"), f"{Q}.weight_scale_2 is missing"),
    "another shape": (
        lambda f: f.update({f"{Q}.weight": torch.zeros(8, 32, dtype=torch.uint8)}),
        rf"{Q}.weight_scale has shape \[64, 4\], which does not fit codes of \[8, 32\]"),
    "another size": (
        lambda f: f.update({f"{Q}.{n}": f[f"{Q}.{n}"][:32].contiguous() for n in ("weight", "weight_scale")}),
        rf"{Q}.weight in model.safetensors is NVFP4 \[32, 64\], by config.json Qwen3Moe.* has \[64, 64\] there"),
    "a zero global scale": (lambda f: f[f"{Q}.weight_scale_2"].zero_(), rf"{Q}.weight_scale_2 of expert 0 is 0.0"),
    "NaN block scales": (lambda f: f[f"{Q}.weight_scale"].view(torch.uint8).fill_(127), f"{Q}.weight_scale holds NaN"),
    "FP8 without a scale": (
        lambda f: f.update({"model.layers.0.mlp.gate.weight": torch.zeros(8, 64).to(torch.float8_e4m3fn)}),
        r"mlp.gate.weight is FP8 \[8, 64\] and has no scale"),
    "an SVD part": (
        lambda f: f.update({f"{Q}.svdquant_lora_a": torch.zeros(4, 64)}), "svdquant_lora_a is a scale that nothing"),
    "experts in two ways": (
        lambda f: [f.update({projection_first(k): f.pop(k)}) for k in list(f) if "layers.0" in k and is_expert(k)],
        "the files name experts in several ways"),
}  # fmt: skip


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case, tmp_path):
    change, message = DAMAGE[case]
    folder, _ = quantized(tmp_path, qwen3_moe, "modelopt", lambda k: is_expert(k) or is_linear(k))
    files = tensors(folder)
    change(files)
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_what_is_not_supported_is_refused_by_name(tmp_path):
    folder, _ = quantized(tmp_path, qwen3_moe, "modelopt")
    for algo in ("NVFP4_SVD", "W4A8_NVFP4_FP8"):
        change_config(folder, quantization_config={**CONFIGS["modelopt"], "quant_algo": algo})
        with pytest.raises(ValueError, match=f"quant_algo '{algo}'; this library reads"):
            load(folder)
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"}, "lm_head": {"quant_algo": "NVFP4"}}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    change_config(folder, quantization_config=mixed)
    with pytest.raises(ValueError, match="all layers of a model run in one way: choose it, checkpoint_config"):
        load(folder)
    model = load(folder, config=checkpoint_config(folder, activations="bf16"))
    assert {m.activations for m in packed(model, HFExperts).values()} == {"bf16"}
    with pytest.raises(ValueError, match="has W4A4 and W4A16 layers, and new files name one for all"):
        convert_checkpoint(folder, tmp_path / "new", Options(dialect="compressed-tensors"))
    layers["lm_head"] = "NVFP4"

    def group(**numbers):
        return {**CONFIGS["modelopt"], "config_groups": {"group_0": numbers}}

    for change, message in (
        ({**mixed, "quantized_layers": layers}, r"makes no sense .TypeError"),
        ({**CONFIGS["modelopt"], "config_groups": {"group_0": None}}, r"makes no sense .AttributeError"),
        ({**CONFIGS["modelopt"], "ignore": [None]}, "makes no sense .TypeError: ignore is a pattern"),
        ({**CONFIGS["modelopt"], "moe_nvfp4": {"later": 1}}, "later under moe_nvfp4, .* upgrade"),
        (group(weights={"num_bits": 4, "group_size": 32}), "NVFP4 has blocks of 16, the config group says"),
        (group(weights={"num_bits": 8, "group_size": 16}), "NVFP4 weights have 4 bits"),
        (group(input_activations={"num_bits": 4, "group_size": 128}), "NVFP4 has blocks of 16"),
        (group(input_activations={"num_bits": 8}), r"activations of 8 bits \(W4A8\) are not computed here"),
        (group(output_activations={"num_bits": 8}), "outputs are quantized"),
    ):
        change_config(folder, quantization_config=change)
        with pytest.raises(ValueError, match=message):
            load(folder)
    other, _ = quantized(tmp_path, qwen3_moe, "compressed-tensors")
    groups = CONFIGS["compressed-tensors"]["config_groups"]
    for extra, message in (
        (
            {"config_groups": {**groups, "group_1": W4A16["group_0"]}},
            "others for bf16 ones .W4A16., and here all layers",
        ),
        ({"config_groups": {"group_0": {"output_activations": {"num_bits": 8}}}}, "outputs are quantized"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "rotations"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity 'sparse-24-bitmask' are not read"),
        ({"moe_sparsity_config": {"method": "prune", "num_experts": [8, 6]}}, "fewer experts in some layers"),
        ({"config_groups": {"group_0": {"input_activations": {"num_bits": 8}}}}, r"\(W4A8\) are not computed here"),
    ):
        change_config(other, quantization_config={**CONFIGS["compressed-tensors"], **extra})
        with pytest.raises(ValueError, match=message):
            load(other)
    with pytest.raises(ValueError, match="dialect must be one of"):
        MoeNvfp4Config(dialect="gguf")


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_mixtral_as_llm_compressor_names_it(dialect, tmp_path):
    """With gate_proj, up_proj, down_proj in place of w1, w3, w2 it is the same model, and saves Mixtral's names."""
    source = folder(tmp_path, mixtral)
    convert_checkpoint(source, tmp_path / "own", Options(dialect=dialect), progress=False)
    shutil.copytree(tmp_path / "own", tmp_path / "theirs", ignore=shutil.ignore_patterns("*.safetensors*"))
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    plain = {re.sub(r"\bw[123]\b", lambda w: names[w[0]], name): t for name, t in tensors(tmp_path / "own").items()}
    assert len([name for name in plain if "experts.3.gate_proj" in name]) == 2 * 3  # layers, tensors
    save_file(plain, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path / "theirs", torch.bfloat16)
    assert torch.equal(logits(model), logits(load(tmp_path / "own", torch.bfloat16)))
    model.save_pretrained(tmp_path / "saved")
    same_tensors(tmp_path / "own", tmp_path / "saved")


@pytest.mark.skipif(not hasattr(transformers, "JevForDecision"), reason="this transformers has no decision models")
@pytest.mark.parametrize("name, weight, bias", [("head", "proj.weight", True), ("readout", "weight", False)])
def test_a_decision_head_beside_the_weights(name, weight, bias, tmp_path):
    """It has a file of its own, which is copied; vLLM's has no bias, so that transformers' zeros stay."""
    source = folder(tmp_path, qwen3_moe)
    head = {weight: torch.randn(4, 64)} | ({"proj.bias": torch.randn(4)} if bias else {})
    save_file(head, source / f"{name}.safetensors")
    (source / "decision_config.json").write_text('{"codes": ["a", "b", "c", "d"], "temperature": 1.0}')
    convert_checkpoint(source, tmp_path / "4-bit", progress=False)
    kind, dtype = transformers.JevForDecision, dict(dtype=torch.float32)
    model = kind.from_pretrained(tmp_path / "4-bit", **dtype)
    assert torch.equal(model.proj.weight, head[weight]) and torch.equal(
        model.proj.bias, head.get("proj.bias", torch.zeros(4))
    )
    here = dict(input_ids=torch.tensor([[3, 17, 40, 5]]), marks=torch.tensor([[2, 4]]))
    here |= dict(num_options=torch.tensor([[2, 3]]), question_type_ids=torch.tensor([[0, 0]]))
    scores = model(**here)
    with pytest.raises(ValueError, match="config of a decision model .* by itself.*quantization_config=MoeNvfp4Config"):
        checkpoint_config(tmp_path / "4-bit", activations="nvfp4")  # transformers does not use it
    model.save_pretrained(tmp_path / "again")
    flying = kind.from_pretrained(source, quantization_config=MoeNvfp4Config(), **dtype)
    for other in (flying, kind.from_pretrained(tmp_path / "again", **dtype), model.dequantize()):
        assert relative_error(other(**here), scores) < THRESHOLDS["fp32"]
    for path in (source, tmp_path / "4-bit"):
        (path / f"{name}.safetensors").unlink()
    with pytest.raises(ValueError, match="proj.weight"):
        kind.from_pretrained(tmp_path / "4-bit", **dtype)


def kimi_linear():
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    return KimiLinearForCausalLM(KimiLinearConfig(
        **SMALL | dict(num_key_value_heads=4), intermediate_size=48, moe_intermediate_size=48, num_experts=4,
        num_experts_per_token=2, num_shared_experts=1, num_expert_group=1, topk_group=1, linear_head_dim=16,
        linear_num_heads=4, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"]))  # fmt: skip


def kimi_k25():
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    text = dict(
        **SMALL | dict(num_key_value_heads=4), model_type="deepseek_v3", intermediate_size=48, moe_intermediate_size=48,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=14,
                  pos_emb_height=8, pos_emb_width=8)  # fmt: skip
    tokens = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    return Kimi_K25ForConditionalGeneration(Kimi_K25Config(text_config=text, vision_config=vision, **tokens))


@pytest.mark.parametrize("one", ["fc0", "fc1"])
def test_names_that_shift(one, tmp_path):
    """Kimi-K2.5's fc0 and fc1 are fc1 and fc2 in transformers, whatever the order of the files' tensors is: it sorts
    them, and safetensors files have float32 before bf16."""
    if not hasattr(transformers, "Kimi_K25Config"):
        pytest.skip("this transformers has no Kimi_K25Config")
    source = folder(tmp_path, kimi_k25)
    as_published(source)
    files = tensors(source)
    wide = {name: t.float() if re.search(r"norm1|fc1", name) else t for name, t in files.items()}
    save_file(wide, source / "model.safetensors", metadata={"format": "pt"})
    load = transformers.Kimi_K25ForConditionalGeneration.from_pretrained
    linears = [f"vision_tower.encoder.blocks.0.mlp.{one}"]
    convert_checkpoint(source, tmp_path / "4-bit", Options(linears=linears), progress=False)
    load(source, dtype=torch.bfloat16, quantization_config=MoeNvfp4Config(linears=linears)).save_pretrained(
        tmp_path / "loading"
    )
    swap_experts(load(source, dtype=torch.bfloat16), linears=linears, progress=False).save_pretrained(
        tmp_path / "swapped"
    )
    other = f"vision_tower.encoder.blocks.*.mlp.{'fc1' if one == 'fc0' else 'fc0'}"
    for made in ("4-bit", "loading", "swapped"):
        packed = [n.removesuffix(".weight_scale") for n in tensors(tmp_path / made) if n.endswith("weight_scale")]
        assert [name for name in packed if "experts" not in name] == linears
        ignored = config_of(tmp_path / made)["quantization_config"]["ignore"]
        assert [name for name in ignored if name.startswith("vision_tower") and ".fc" in name] == [other]
        same_model = load(tmp_path / made, dtype=torch.bfloat16).dequantize().state_dict()
        for key, tensor in load(source, dtype=torch.bfloat16).state_dict().items():
            assert relative_error(same_model[key].double(), tensor.double()) < 0.15, key


def ling3():
    from transformers import BailingHybridConfig, BailingHybridForCausalLM

    return BailingHybridForCausalLM(BailingHybridConfig(
        **SMALL | dict(num_key_value_heads=4), intermediate_size=48, moe_intermediate_size=48, num_experts=4,
        num_experts_per_tok=2, num_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, linear_head_dim=16,
        layer_types=["linear_attention", "full_attention"]))  # fmt: skip


PUBLISHED = {kimi_linear: "KimiLinearConfig", kimi_k25: "Kimi_K25Config", deepseek_v4: "DeepseekV4Config",
             hy_v4: "HYV4Config", ling3: "BailingHybridConfig", minimax_m3: "MiniMaxM3VLConfig"}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_published_names_stay(family, dialect, tmp_path):
    """What transformers saves of these has names that vLLM does not know, and so had what calibrate makes for it."""
    if not hasattr(transformers, PUBLISHED[family]):
        pytest.skip(f"this transformers has no {PUBLISHED[family]}")
    source = folder(tmp_path, family)
    saved = tensors(source)
    as_published(source)
    files = tensors(source)
    assert files.keys() != saved.keys() or family is minimax_m3  # transformers 5.24 saves its as they are published
    read = partial(getattr(transformers, config_of(source)["architectures"][0]).from_pretrained, dtype=torch.bfloat16)
    given = dict(recipe="max", linears="attention")
    convert_checkpoint(source, tmp_path / "written", Options(dialect=dialect, **given), progress=False)
    read(tmp_path / "written").save_pretrained(tmp_path / "saved")
    read(source, quantization_config=MoeNvfp4Config(dialect=dialect, **given)).save_pretrained(tmp_path / "loaded")
    ways = ["saved", "loaded"]
    if dialect == "modelopt":
        swap_experts(read(source), **given, progress=False).save_pretrained(tmp_path / "swapped")
        ways.append("swapped")
    want = tensors(tmp_path / "written")
    assert {name for name, tensor in files.items() if tensor.dim() == 1} <= want.keys()
    for way in ways:
        found = tensors(tmp_path / way)
        assert found.keys() == want.keys() and all(torch.equal(found[n], want[n]) for n in want if "norm" in n), way
        assert verify_checkpoint(tmp_path / way, source).warnings == []
        one, other = (logits(read(tmp_path / name, dtype=torch.float32)) for name in (way, "written"))
        assert torch.equal(one, other)
