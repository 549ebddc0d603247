"""`verify` and `info` warn about files that load correctly here and that other programs may misread."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4 import cli
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import COMPRESSED_TENSORS, MODELOPT, dialect_of_files, read_config
from moe_nvfp4.quantize.dialects.modelopt import KV_SCHEMES
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import config_of
from tests.folders import CONFIGS, NUMBERS, is_linear, quantized, qwen2_moe, stored, write
from tests.models import folder, minimax_m3, qwen3_moe, tensors
from tests.quantize.test_convert import inkling, inkling2

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module", params=CONFIGS)
def good(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("good")
    convert_checkpoint(folder(path, qwen3_moe), path / "nvfp4", Options(dialect=request.param), progress=False)
    assert verify_checkpoint(path / "nvfp4").warnings == []
    return path


def test_dense_experts_that_the_config_does_not_name(good, tmp_path, capsys):
    files = {n: t for n, t in tensors(good / "nvfp4").items() if EXPERTS not in n}
    files |= {n: t for n, t in tensors(good / "bf16").items() if EXPERTS in n}
    config = config_of(good / "nvfp4")
    path = write(tmp_path / "mixed", files, config, config["quantization_config"])
    (warning,) = verify_checkpoint(path).warnings
    assert f"1 layers are dense and not in the ignore list of config.json: {EXPERTS}. " in warning
    assert cli.main(["info", str(path)]) == 0
    said = capsys.readouterr().out
    assert "1 layers of experts, NVFP4 of" in said
    assert re.search(rf"^  {EXPERTS} +left as it is: dense in the files, contrary to their config$", said, re.M)
    config["quantization_config"]["ignore"].append(EXPERTS)
    assert verify_checkpoint(write(tmp_path / "named", files, config, config["quantization_config"])).warnings == []


def test_dense_linears_that_the_config_does_not_name(good, tmp_path):
    config = config_of(good / "nvfp4")
    config["quantization_config"]["ignore"] = [p for p in config["quantization_config"]["ignore"] if "attn" not in p]
    path = write(tmp_path / "short", tensors(good / "nvfp4"), config, config["quantization_config"])
    (warning,) = verify_checkpoint(path).warnings
    assert "8 layers are dense and not in the ignore list" in warning and "model.layers.0.self_attn.k_proj" in warning


@pytest.mark.parametrize("pattern", [EXPERTS, "model.layers.1.*", r"re:.*layers\.1\.mlp"])
def test_quantized_experts_that_the_config_calls_dense(pattern, good, tmp_path):
    config = config_of(good / "nvfp4")
    config["quantization_config"]["ignore"].append(pattern)
    path = write(tmp_path / "more", tensors(good / "nvfp4"), config, config["quantization_config"])
    (warning,) = verify_checkpoint(path).warnings
    assert f"1 layers are 4-bit and in the ignore list of config.json: {EXPERTS}. " in warning


def test_quantized_activations_without_a_scale_for_them(good, tmp_path):
    config, files = config_of(good / "nvfp4"), tensors(good / "nvfp4")
    before = config["quantization_config"]
    says = CONFIGS[before["quant_method"]] | {"ignore": before["ignore"]}
    (warning,) = verify_checkpoint(write(tmp_path / "w4a4", files, config, says)).warnings
    assert "48 of 48 matrices have no input_" in warning and "calibrate adds them" in warning


def test_tensors_that_the_model_has_not(good, tmp_path):
    config, new = config_of(good / "nvfp4"), "model.layers.0.mlp.shared_expert.norm"
    files = tensors(good / "nvfp4") | {
        new: torch.ones(64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    path = write(tmp_path / "more", files, config, config["quantization_config"])
    (warning,) = verify_checkpoint(path).warnings
    assert f"1 tensors are none of Qwen3MoeForCausalLM's, by config.json, and nothing reads them: {new}" in warning


@pytest.mark.parametrize("head", ["eh_proj", "norm"])
def test_layers_after_the_last(head, good, tmp_path):
    """One for multi-token prediction has an eh_proj, and servers draft with it; others are of another model."""
    config, files = config_of(good / "nvfp4"), tensors(good / "nvfp4")
    files |= {"model.layers.2.input_layernorm.weight": torch.ones(64), f"model.layers.2.{head}.weight": torch.ones(64)}
    warnings = verify_checkpoint(write(tmp_path, files, config, config["quantization_config"])).warnings
    assert [("2 tensors are none of" in line) for line in warnings] == ([] if head == "eh_proj" else [True])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "dialect, scale", [("modelopt", "weight_scale_2"), ("compressed-tensors", "weight_global_scale")]
)
def test_linears_that_servers_fuse_with_scales_of_their_own(dialect, scale, tmp_path):
    path, _ = quantized(tmp_path, qwen2_moe, dialect, lambda k: is_linear(k) or ".experts." in k)
    files = tensors(path)
    warnings = [line for line in verify_checkpoint(path).warnings if "fuses" in line]
    names = r"model.layers.\d.(self_attn.q_proj, k_proj, v_proj|mlp.shared_expert.gate_proj, up_proj)"
    assert re.search(rf"warning: 4 groups of linears have different global scales \({names}, ...\)", *warnings)
    for name in files:
        if name.endswith(scale) and re.search(r"(q|k|v)_proj|shared_expert.(gate|up)", name):
            files[name] = torch.full_like(files[name], 0.5)
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    assert not [line for line in verify_checkpoint(path).warnings if "fuses" in line]


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_linears_that_servers_fuse_of_which_some_are_dense(dialect, tmp_path):
    path, _ = quantized(tmp_path, qwen2_moe, dialect, lambda k: k.endswith("1.self_attn.q_proj.weight"))
    (warning,) = [line for line in verify_checkpoint(path).warnings if "it fuses" in line]
    assert "1 groups of linears are 4-bit in part (model.layers.1.self_attn.q_proj, k_proj, v_proj, ...)" in warning


def test_linears_that_transformers_joins(tmp_path):
    """MiniMax M3's gate and up are one linear there, so that both had the same name in the model."""
    source = folder(tmp_path, minimax_m3)
    files = {}
    for key, tensor in tensors(source).items():
        packed = re.search(r"(mlp|shared_experts)\.(gate|up|down)_proj\.weight|experts\.\d+\.w[123]\.weight", key)
        files |= stored("modelopt", key.removesuffix(".weight"), tensor) if packed else {key: tensor}
    path = write(tmp_path / "nvfp4", files, config_of(source), CONFIGS["modelopt"])
    (warning,) = [line for line in verify_checkpoint(path).warnings if "fuses" in line]
    assert "2 groups of linears have different global scales" in warning and "mlp.gate_proj, up_proj" in warning


def test_linears_of_other_rows_are_not_fused(tmp_path):
    """Inkling 2's q, k and v read rows of their own, and its files call them as Inkling's, which are fused."""

    def warned(family):
        source = folder(tmp_path / family.__name__, family)
        files = {}
        for key, tensor in tensors(source).items():
            stem = key.removesuffix(".weight")
            files |= stored("modelopt", stem, tensor) if re.search(r"\.w[qkvr]_d[uv]\.weight", key) else {key: tensor}
        path = write(tmp_path / family.__name__ / "nvfp4", files, config_of(source), CONFIGS["modelopt"])
        return [line for line in verify_checkpoint(path).warnings if "fuses" in line]

    (warning,) = warned(inkling)
    assert "2 groups of linears have different global scales" in warning and "wq_du, wk_dv, wv_dv, wr_du," in warning
    assert not warned(inkling2)


# ---------------------------------------------------------------- NVFP4 without a word about activations
def test_nvfp4_whose_groups_have_no_input_activations_is_w4a16():
    """vLLM reads them so (ModelOptNvFp4Config); ModelOpt itself writes W4A16_NVFP4 for weights only."""
    numbers = {"num_bits": 4, "type": "float", "group_size": 16}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    for groups, activations in (
        ({"group_0": {"weights": numbers, "input_activations": numbers}}, "nvfp4"),
        ({"group_0": {"weights": numbers, "input_activations": None}}, "bf16"),
        ({"group_0": {"weights": numbers}}, "bf16"),
        ({"group_0": {"weights": numbers}, "group_1": {"weights": numbers, "input_activations": numbers}}, "nvfp4"),
        ({}, "nvfp4"),
        (None, "nvfp4"),
    ):
        assert read_config(config | ({} if groups is None else {"config_groups": groups})).activations == activations


def test_a_4_bit_embedding_does_not_make_files_mixed():
    """ModelOpt 0.47 writes W4A16_NVFP4 for it next to NVFP4 (NVFP4_FP8_MHA_CONFIG): token ids are no activations."""
    layers = {"model.embed_tokens": {"quant_algo": "W4A16_NVFP4"}, "lm_head": {"quant_algo": "NVFP4"}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    info = read_config(config)
    assert (info.activations, info.mixed) == ("nvfp4", False)
    assert read_config({**config, "quantized_layers": {**layers, "a": {"quant_algo": "W4A16_NVFP4"}}}).mixed
    linears, numbers = CONFIGS["compressed-tensors"]["config_groups"]["group_0"], {"num_bits": 4, "group_size": 16}
    for targets, mixed in ((["Embedding"], False), (["re:.*embed_tokens"], False), (["re:.*o_proj"], True)):
        groups = {"group_0": linears, "group_1": {"targets": targets, "weights": numbers, "input_activations": None}}
        info = read_config({**CONFIGS["compressed-tensors"], "config_groups": groups})
        assert (info.activations, info.mixed) == ("nvfp4", mixed), targets


def test_configs_of_modelopt_as_vllm_takes_them():
    """config.json may have all of hf_quant_config.json under "quantization", and algorithms in lower case."""
    inner = {"quant_algo": "nvfp4", "group_size": 16, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    flat = {"quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_scheme": KV_SCHEMES["FP8"]}
    assert read_config({"quant_method": "modelopt", "quantization": inner}) == read_config(
        {"quant_method": "modelopt", **flat}
    )
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "w4a16_nvfp4"}}}
    config = {"quant_method": "modelopt", "quantization": mixed}
    assert read_config(config).activations == "bf16"
    assert not read_config(config).whole and read_config(config).layers == {"a": "W4A16_NVFP4"}
    mixed["quantized_layers"]["b"] = {"quant_algo": "W4A8_NVFP4_FP8"}
    for refused, message in (
        ({"quantization": {"quant_algo": "nvfp4_svd"}}, "quant_algo 'NVFP4_SVD'; this library reads"),
        (mixed, "quant_algo 'W4A8_NVFP4_FP8'; this library reads"),
        ({**flat, "group_size": 32}, "blocks of 16, the checkpoint says group_size 32"),
    ):
        with pytest.raises(ValueError, match=message):
            read_config({"quant_method": "modelopt", **refused})
    beside = {"quantization": {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["lm_head"]}}  # hf_quant_config.json
    assert read_config({}, beside).activations == "bf16" and read_config({}, beside).ignore == ("lm_head",)
    short = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}  # older ones, whose map is in the other file
    assert read_config(short, {"quantization": {"quantized_layers": {"a": {"quant_algo": "NVFP4"}}}}).layers
    with pytest.raises(ValueError, match=r"without quantized_layers.* if hf_quant_config\.json has them"):
        read_config(short)
    assert read_config({"quantization_config": {"quant_algo": "NVFP4"}}, beside).activations == "nvfp4"


def test_configs_of_compressed_tensors():
    """Configs with a format for each group or for all, or with groups of other formats, are read; ours match."""
    theirs = CONFIGS["compressed-tensors"]
    group = theirs["config_groups"]["group_0"]
    plain = {key: value for key, value in group.items() if key != "format"}
    eight = {"targets": ["re:.*o_proj"], "format": "float-quantized", "weights": {"num_bits": 8},
             "input_activations": {"num_bits": 8}}  # fmt: skip
    one = read_config({**theirs, "config_groups": {"group_0": plain}})
    assert one == read_config(theirs) and one.activations == "nvfp4" and one.whole
    assert read_config({**theirs, "config_groups": {"group_0": {**plain, "format": None}, "group_1": eight}}) == one
    two = {"format": "mixed-precision", "config_groups": {"group_0": group, "group_1": eight}}
    assert read_config({**theirs, **two}) == one
    assert read_config({**theirs, **two, "config_groups": {"group_1": eight}}) is None
    assert not read_config({**theirs, "config_groups": {"group_0": {**group, "targets": ["re:.*experts.*"]}}}).whole
    assert read_config({**theirs, "kv_cache_scheme": KV_SCHEMES["FP8"]}).kv_cache == KV_SCHEMES["FP8"]
    for numbers in ({"group_size": 32}, {"num_bits": 8}):
        with pytest.raises(ValueError, match="NVFP4 has blocks of 16|NVFP4 weights have 4 bits"):
            read_config({**theirs, "config_groups": {"group_0": {**group, "weights": {**NUMBERS, **numbers}}}})

    written = COMPRESSED_TENSORS.write(theirs["ignore"], True, {}, "1")
    for numbers in (written["config_groups"]["group_0"][kind] for kind in ("weights", "input_activations")):
        assert numbers.pop("scale_dtype") == "torch.float8_e4m3fn"
    assert written == {**theirs, "moe_nvfp4": {}}
    weights_only = COMPRESSED_TENSORS.write([], False, {}, "1")["config_groups"]["group_0"]
    assert weights_only["input_activations"] is None and weights_only["weights"]["dynamic"] is False
    modelopt = MODELOPT.write(["lm_head"], True, {}, "1")
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert modelopt["config_groups"] == {
        "group_0": {"weights": numbers, "input_activations": numbers, "targets": ["Linear"]}
    }
    assert (modelopt["quant_method"], modelopt["quant_algo"], modelopt["ignore"]) == ("modelopt", "NVFP4", ["lm_head"])
    assert modelopt["producer"] == {"name": "moe_nvfp4", "version": "1"}


@pytest.mark.slow  # importing ModelOpt takes seconds
@pytest.mark.parametrize("algo, activations", [("NVFP4", "nvfp4"), ("W4A16_NVFP4", "bf16")])
def test_activations_as_modelopt_writes_them(algo, activations):
    export = pytest.importorskip("modelopt.torch.export.convert_hf_config", reason="needs nvidia-modelopt")
    producer = {"name": "modelopt", "version": "0.47.0"}
    details = {"quant_algo": algo, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    written = export.convert_hf_quant_config_format({"producer": producer, "quantization": details})
    assert read_config(json.loads(json.dumps(written))).activations == activations


def test_the_dialect_of_files_is_told_by_names_that_no_other_has():
    stem = "model.layers.0.mlp.experts.0.up_proj"
    names = lambda dialect: {f"{stem}.{last}" for last in dialect.suffixes}
    assert dialect_of_files(names(MODELOPT)) is MODELOPT
    assert dialect_of_files(names(COMPRESSED_TENSORS)) is COMPRESSED_TENSORS
    assert dialect_of_files(["model.layers.0.mlp.experts.gate_up_proj_weight_scale_2"]) is MODELOPT  # a stack
    own = ["lm_head.weight", "lm_head.weight_sf", "lm_head.weight_global_scale", "experts.up_proj_global_scale"]
    assert dialect_of_files(own) is None
    with pytest.raises(ValueError, match="as modelopt and compressed-tensors name them: two checkpoints are mixed"):
        dialect_of_files(names(MODELOPT) | names(COMPRESSED_TENSORS))
