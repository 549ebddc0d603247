"""Recipes that use data, on FP8 and MXFP4 checkpoints: the same as on their dequantized twins."""

import json
from dataclasses import replace
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
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import config_of, experts
from tests.checkpoints import folder as by_hand
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


MIMO = {"num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1], "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 48, "v_head_dim": 32, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4,
        "swa_head_dim": 32, "swa_v_head_dim": 32, "architectures": ["MiMoV2ForCausalLM"],
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}  # fmt: skip


def mimo_folder(path, whole=False):
    """MiMo-V2.5's q, k and v as its repository has them, and a twin in bf16. whole: blocks do not end with chunks."""
    files, twin = experts(H=128, I=64, E=2, layers=2), {}
    twin |= files
    kinds = {"model.layers.0": (4, 2, 48, 32), "model.layers.1": (8, 4, 32, 32), "model.mtp.layers.0": (8, 4, 32, 32)}
    g = torch.Generator().manual_seed(1)
    for layer, (heads, kv_heads, columns, columns_v) in kinds.items():
        if "mtp" in layer:
            files[f"{layer}.eh_proj.weight"] = twin[f"{layer}.eh_proj.weight"] = torch.ones(128, 256).bfloat16()
        sizes = (heads * columns, kv_heads * columns, kv_heads * columns_v)
        q, k, v = (torch.randn(n, 128, generator=g) * 2.0 ** torch.randint(-4, 4, (n, 1), generator=g) for n in sizes)
        chunks = [
            torch.cat([part[len(part) // 2 * i : len(part) // 2 * (i + 1)] for part in (q, k, v)]) for i in (0, 1)
        ]
        made = [fp8("block", torch.cat(chunks))] if whole else [fp8("block", chunk) for chunk in chunks]
        codes, scales, worth = (torch.cat(parts) for parts in zip(*made, strict=True))
        name = f"{layer}.self_attn.qkv_proj.weight"
        files |= {name: codes, f"{name}_scale_inv": scales}
        parts = [half.split([n // 2 for n in sizes]) for half in worth.chunk(2)]
        twin[name] = torch.cat([half[i] for i in range(3) for half in parts]).bfloat16()
    config = {**MIMO, "model_type": "mimo_v2", "num_experts": 2, "dtype": "bfloat16"}
    source = by_hand(path / "source", files, config)
    return source, by_hand(path / "twin", twin, {**config, "quantization_config": None})


@pytest.mark.parametrize("whole", [False, True], ids=["chunks", "whole"])
@pytest.mark.parametrize("linears", [(), ("attention",)], ids=["dense", "4 bits"])
def test_rows_in_chunks(linears, whole, tmp_path):
    """MiMo-V2.5's fused q, k and v in FP8, which vLLM reads as [Q | K | V] in every other format."""
    source, twin = mimo_folder(tmp_path, whole)
    assert len(tensors(source)["model.layers.0.self_attn.qkv_proj.weight_scale_inv"]) == (3 if whole else 4)
    for path in (source, twin):
        convert_checkpoint(path, tmp_path / f"{path.name}-4", replace(CPU, linears=linears), progress=False)
    same_tensors(tmp_path / "source-4", tmp_path / "twin-4")
    assert verify_checkpoint(tmp_path / "source-4", twin) is not None


@pytest.mark.parametrize("key", ["hybrid_layer_pattern", "swa_head_dim", "num_key_value_heads"])
def test_rows_in_chunks_that_the_config_does_not_say(key, tmp_path):
    source, _ = mimo_folder(tmp_path)
    change_config(source, **{key: None})
    with pytest.raises(ValueError, match="qkv_proj is q, k and v in FP8, in chunks .* they are not [0-9]+ rows"):
        convert_checkpoint(source, tmp_path / "nvfp4", CPU, progress=False)


def test_mxfp4_experts_beside_fp8(tmp_path):
    """Ling 3.0's scales of MXFP4 have the names of those of FP8."""
    files = experts(I=64)
    g = torch.Generator().manual_seed(0)
    said = {}
    for name in [name for name in files if ".experts." in name]:
        N, K = files[name].shape
        codes = torch.randint(0, 16, (N, K), generator=g)
        exponents = torch.randint(120, 126, (N, K // 32), generator=g)
        said[name] = (
            E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0) * 2.0 ** (exponents - 127).repeat_interleave(32, 1)
        )
        files[name] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        files[f"{name}_scale_inv"] = exponents.to(torch.uint8)
    linear = "model.layers.0.self_attn.q_proj.weight"
    files[linear], files[f"{linear}_scale_inv"], _ = fp8("block", files[linear].float())
    source = by_hand(tmp_path / "source", files, {"quantization_config": MIMO["quantization_config"]})
    convert_checkpoint(source, tmp_path / "nvfp4", CPU, progress=False)
    new = tensors(tmp_path / "nvfp4")
    for name, values in said.items():
        sf, scale = new[f"{name}_scale"].float(), new[f"{name}_scale_2"]
        codes = torch.stack((new[name] & 15, new[name] >> 4), -1).flatten(1).long()
        found = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0) * sf.repeat_interleave(16, 1) * scale
        assert torch.equal(found, values), name


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
