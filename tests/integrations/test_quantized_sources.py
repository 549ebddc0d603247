"""Recipes that use data, on FP8 and MXFP4 checkpoints: the same as on their dequantized twins."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4.integrations.huggingface import calibration
from moe_nvfp4.integrations.huggingface.calibration import files_importance, tokenizer_at
from moe_nvfp4.integrations.huggingface.gptq import convert_gptq
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.files import open_checkpoint
from moe_nvfp4.quantize.model import ModelTensors
from moe_nvfp4.quantize.options import Options
from tests.checkpoints import config_of
from tests.folders import change_config, fp8
from tests.models import deepseek, folder, gpt_oss, same_tensors, tensors

CPU = Options(device="cpu")
IDS = [torch.randint(0, 96, (2, 48), generator=torch.Generator().manual_seed(0))]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write(path, files):
    save_file({name: t.contiguous() for name, t in files.items()}, path / "model.safetensors", {"format": "pt"})


def fp8_folder(tmp_path, family=deepseek):
    """A model in blocks of FP8, experts and linears, and its twin in bf16."""
    source, twin = folder(tmp_path, family, "source"), folder(tmp_path, family, "twin")
    files, dense = tensors(source), tensors(twin)
    for name in [n for n in files if n.endswith(("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))]:
        codes, scale, worth = fp8("block", files[name].float())
        files |= {name: codes, f"{name}_scale_inv": scale}
        dense[name] = worth.bfloat16()
    write(source, files)
    write(twin, dense)
    change_config(source, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    return source, twin


def mxfp4_folder(tmp_path):
    """gpt-oss with MXFP4 experts, and its twin in bf16."""
    family = partial(gpt_oss, intermediate=64)
    source, twin = folder(tmp_path, family, "source"), folder(tmp_path, family, "twin")
    files, dense = tensors(source), tensors(twin)
    g = torch.Generator().manual_seed(0)
    for name in [n for n in files if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        E, K, N = files.pop(name).shape
        codes = torch.randint(0, 16, (E, N, K), generator=g)
        exponents = torch.randint(120, 126, (E, N, K // 32), generator=g)
        values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0) * 2.0 ** (exponents - 127).repeat_interleave(32, 2)
        dense[name] = values.transpose(1, 2).bfloat16()
        files[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(E, N, K // 32, 16)
        files[f"{name}_scales"] = exponents.to(torch.uint8)
    write(source, files)
    write(twin, dense)
    change_config(source, quantization_config={"quant_method": "mxfp4"})
    return source, twin


@pytest.mark.parametrize("make", [fp8_folder, mxfp4_folder])
def test_a_config_without_a_dtype(make, tmp_path):
    """Weights are dequantized to that of the dense ones, as they are with `from_pretrained`."""
    source, _ = make(tmp_path)
    convert_checkpoint(source, tmp_path / "named", CPU, progress=False)
    change_config(source, dtype=None)
    convert_checkpoint(source, tmp_path / "not", CPU, progress=False)
    same_tensors(tmp_path / "named", tmp_path / "not")
    change_config(source, dtype="float8_e4m3fn")  # no dtype of a model, which could not be built in it
    assert ModelTensors.of(open_checkpoint(source)).name == config_of(source)["architectures"][0]


@pytest.mark.parametrize("changes", [dict(model_type="mimo_v2_flash"), dict(architectures=["MiMoV2ForCausalLM"])])
def test_rows_in_chunks_are_refused(changes, tmp_path):
    """MiMo-V2.5's fused q, k and v in FP8, of which vLLM orders the rows; as bf16 it took them as they are."""
    source, _ = fp8_folder(tmp_path)
    files = tensors(source)
    for name in [name for name in files if "layers.0.self_attn.o_proj" in name]:
        files[name.replace("o_proj", "qkv_proj")] = files[name].clone()
    write(source, files)
    change_config(source, **changes)
    with pytest.raises(ValueError, match="layers.0.self_attn.qkv_proj.weight is q, k and v in FP8, in chunks of rows"):
        convert_checkpoint(source, tmp_path / "nvfp4", CPU, progress=False)


@pytest.mark.parametrize("make", [fp8_folder, mxfp4_folder])
def test_importance_is_that_of_the_dequantized_twin(make, tmp_path):
    source, twin = make(tmp_path)
    found, want = (files_importance(path, IDS, device="cpu", progress=False) for path in (source, twin))
    assert found.digest() == want.digest() and all(layer.rows.sum() > 0 for layer in found.layers.values())


@pytest.mark.slow
def test_fp8_is_quantized_by_gptq_and_weighted_as_its_twin(tmp_path):
    source, twin = fp8_folder(tmp_path)
    for path in (source, twin):
        convert_gptq(path, tmp_path / f"{path.name}-gptq", IDS, CPU, progress=False)
        importance = files_importance(path, IDS, device="cpu", progress=False)
        options = Options("weighted", importance=importance, device="cpu")
        convert_checkpoint(path, tmp_path / f"{path.name}-weighted", options, progress=False)
    for recipe in ("gptq", "weighted"):
        same_tensors(tmp_path / f"source-{recipe}", tmp_path / f"twin-{recipe}")
    assert any(name.endswith("weight_scale_2") for name in tensors(tmp_path / "source-gptq"))


def test_gptq_leaves_mxfp4_to_recipes_that_keep_it(tmp_path):
    source, _ = mxfp4_folder(tmp_path)
    with pytest.raises(ValueError, match="is MXFP4, of which NVFP4 holds every value: recipe mse keeps them all"):
        convert_gptq(source, tmp_path / "new", IDS, CPU, progress=False)


def test_no_code_of_a_checkpoint_runs(tmp_path, monkeypatch):
    """Nor is anybody asked whether it may."""
    source = folder(tmp_path, deepseek)
    change_config(source, model_type="theirs", auto_map={"AutoConfig": "code.Theirs"})
    (source / "code.py").write_text("raise SystemExit")
    config = {"auto_map": {"AutoTokenizer": ["code.Theirs", None]}, "tokenizer_class": "Theirs"}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    with pytest.raises(ValueError, match="code of its repository is never run|does not recognize this architecture"):
        files_importance(source, IDS, device="cpu", progress=False)
    with pytest.raises(ValueError, match="the tokenizer is code of its repository, which is never run here"):
        tokenizer_at(source)


def test_a_tokenizer_of_a_package_that_is_not_installed(tmp_path, monkeypatch):
    """transformers asks for tiktoken."""
    source = folder(tmp_path, deepseek)
    (source / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr(calibration, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tokenizer.model cannot be read.*pip install sentencepiece"):
        tokenizer_at(source)


def test_scales_that_nothing_reads(tmp_path):
    """The model would have other numbers than the files mean."""
    source, _ = fp8_folder(tmp_path)
    files = tensors(source)
    name = next(name for name in files if name.endswith("o_proj.weight"))
    scale = torch.ones(files[name].shape[1]).bfloat16()
    save_file(files | {name.replace("weight", "pre_quant_scale"): scale}, source / "model.safetensors")
    with pytest.raises(ValueError, match="o_proj.pre_quant_scale is a scale that nothing reads"):
        files_importance(source, IDS, device="cpu", progress=False)


def test_other_formats_and_missing_scales_are_named(tmp_path):
    source, _ = fp8_folder(tmp_path)
    files = tensors(source)
    gone = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    write(source, {name: tensor for name, tensor in files.items() if name != gone})
    with pytest.raises(ValueError, match="o_proj.weight is F8_E4M3 without"):
        files_importance(source, IDS, device="cpu", progress=False)
    del files["model.layers.0.self_attn.o_proj.weight"], files["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    write(source, files)
    with pytest.raises(ValueError, match="lack 1 of .*: model.layers.0.self_attn.o_proj.weight"):
        files_importance(source, IDS, device="cpu", progress=False)
    change_config(source, quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="is quantized with 'awq'"):
        files_importance(source, IDS, device="cpu", progress=False)
    assert json.loads((source / "config.json").read_text())["quantization_config"] == {"quant_method": "awq"}
