"""`verify` knows all tensors of the model, and refuses files that would load random weights, or not load at all."""

import re

import pytest
import torch
import transformers
from safetensors.torch import save_file

from moe_nvfp4 import cli
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.model import ModelTensors, class_of
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import config_of
from tests.folders import (
    CONFIGS,
    change_config,
    fused,
    is_expert,
    is_linear,
    projection_first,
    quantized,
    qwen2_moe,
    stacked_by_projection,
    write,
)
from tests.models import (
    FAMILIES,
    deepseek,
    folder,
    gpt_oss,
    granite,
    llama4,
    load,
    mixtral,
    qwen3_moe,
    step3p7,
    tensors,
)
from tests.quantize.test_against import MADE

OTHER = "compressed-tensors"
EXPERT = "model.layers.1.mlp.experts"


def drop(*parts):
    return lambda files: {n: t for n, t in files.items() if not all(part in n for part in parts)}


def rename(old, new):
    """Add copies of tensors under other names, so that the files have more of them than the model."""
    return lambda files: files | {n.replace(old, new): t.clone() for n, t in files.items() if old in n}


def dense(stem):
    def change(files):
        N, half = files[f"{stem}.weight"].shape
        return drop(f"{stem}.")(files) | {f"{stem}.weight": torch.randn(N, 2 * half).bfloat16()}

    return change


def add(name, value):
    return lambda files: files | {name: value}


DAMAGE = {
    "all experts of a layer": (drop(f"{EXPERT}."), f"{EXPERT}.* is missing"),
    "the last expert of a layer": (drop(f"{EXPERT}.7."), rf"{EXPERT}.7.\w+ is missing: 7 of 8 experts have it"),
    "up and gate of a layer": (drop(EXPERT, "gate_proj"), f"{EXPERT}.0.gate_proj is missing"),
    "an expert too many": (rename(f"{EXPERT}.7.", f"{EXPERT}.8."), "8.* is an expert too many: .* there are 8"),
    "a dense projection": (
        dense(f"{EXPERT}.3.up_proj"), f"{EXPERT}.3.up_proj.weight is BF16 and 7 of 8 experts have one that is read in"),
    "one kind for up, one for down": (
        lambda f: [f := dense(f"{EXPERT}.{e}.down_proj")(f) for e in range(8)][-1], "gate_proj, up_proj only"),
    "an input scale": (add(f"{EXPERT}.3.up_proj.input_scale", torch.tensor(0.1)), "has no input_scale, which 1 of 48"),
    "AWQ of one expert": (
        add(f"{EXPERT}.3.up_proj.pre_quant_scale", torch.ones(64)), "has no pre_quant_scale, which 1 of 48"),
    "the router": (drop("layers.1.mlp.gate"), "lack 1 of the .* Qwen3Moe.*: model.layers.1.mlp.gate.weight"),
    "a projection of attention": (drop("layers.0.self_attn.q_proj"), "lack 1 of .*: model.layers.0.self_attn.q_proj.w"),
    "a norm": (drop("model.norm"), "lack 1 of .*: model.norm.weight"),
    "another shape": (add("lm_head.weight", torch.zeros(96, 32)), r"lm_head.weight in .* is F32 \[96, 32\], by config"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good")
    convert_checkpoint(folder(path, qwen3_moe), path / "nvfp4", progress=False)
    return path / "nvfp4"


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("case", DAMAGE)
def test_what_the_model_would_miss_is_refused(case, good, tmp_path):
    change, message = DAMAGE[case]
    config = config_of(good)
    assert verify_checkpoint(good).warnings == []
    damaged = write(tmp_path / "damaged", change(tensors(good)), config, config["quantization_config"])
    with pytest.raises(ValueError, match=message):
        verify_checkpoint(damaged)


@pytest.mark.parametrize("case", ["a lone expert", "an expert is gone"])
def test_what_is_incomplete_is_not_carried(case, good, tmp_path):
    """So no conversion of incomplete files writes what `verify` would refuse."""
    lone = {n.replace("experts.7.", "experts.1000."): t for n, t in tensors(good).items() if f"{EXPERT}.7.up" in n}
    files = tensors(good) | lone if case == "a lone expert" else drop(f"{EXPERT}.5.")(tensors(good))
    config = config_of(good)
    damaged = write(tmp_path / "damaged", files, config, config["quantization_config"])
    message = rf"{EXPERT}.{8 if case == 'a lone expert' else 5}.\w+ is missing: \d of \d+ experts have it"
    for run in (verify_checkpoint, lambda p: convert_checkpoint(p, tmp_path / "x", Options(dialect=OTHER))):
        with pytest.raises(ValueError, match=message):
            run(damaged)
    assert not (tmp_path / "x").exists()


LOST = [
    (qwen3_moe, "layers.0.self_attn.o_proj"), (qwen2_moe, "layers.1.mlp.shared_expert.down_proj"),
    (deepseek, "layers.1.mlp.gate.e_score_correction_bias"), (gpt_oss, "layers.1.post_attention_layernorm"),
    (granite, "embed_tokens"), (llama4, "layers.0.feed_forward.router"), (mixtral, "model.norm"),
]  # fmt: skip


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("family, name", LOST, ids=lambda value: getattr(value, "__name__", value))
def test_sources_that_lack_a_tensor_are_not_quantized(family, name, tmp_path, capsys):
    """No text is needed for this: a loaded model would have random numbers there."""
    source = folder(tmp_path, family)
    convert_checkpoint(source, tmp_path / "good", Options("max"), progress=False)
    files = tensors(source)
    kept = {n: t for n, t in files.items() if name not in n}
    assert len(kept) == len(files) - 1
    write(source, kept, config_of(source), None)
    for dry in ([], ["--dry-run"]):
        assert cli.main(["quantize", str(source), str(tmp_path / "x"), *dry]) == 2
        assert re.search(rf"the files lack 1 of the \d+ tensors of .*{name}", capsys.readouterr().err)
    assert not list(tmp_path.glob("*x*"))


@pytest.mark.parametrize("form", ["MXFP4", "FP8", "carried from ModelOpt", "carried from compressed-tensors"])
def test_quantized_sources_that_lack_a_tensor(form, tmp_path):
    make, options = MADE[form]
    source = make(tmp_path / "a")
    convert_checkpoint(source, tmp_path / "good", Options(**options), progress=False)
    files = drop("layers.0.input_layernorm")(tensors(source))
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="the files lack 1 of .*: model.layers.0.input_layernorm.weight"):
        convert_checkpoint(source, tmp_path / "x", Options(**options), progress=False)
    assert not (tmp_path / "x").exists()


def test_a_stack_of_biases_next_to_experts_one_by_one_is_refused(tmp_path):
    """Rows of gate and up alternate in gpt-oss's stack, but perhaps not in files whose experts have been split."""
    convert_checkpoint(folder(tmp_path, gpt_oss), tmp_path / "good", progress=False)
    name, config = f"{EXPERT}.gate_up_proj_bias", config_of(tmp_path / "good")
    files = {n: t for n, t in tensors(tmp_path / "good").items() if not n.endswith(("gate_proj.bias", "up_proj.bias"))}
    files |= {n: t for n, t in tensors(tmp_path / "bf16").items() if n.endswith("gate_up_proj_bias")}
    path = write(tmp_path / "mixed", files, config, config["quantization_config"])
    for read in (load, verify_checkpoint, lambda p: convert_checkpoint(p, tmp_path / "x", Options(dialect=OTHER))):
        with pytest.raises(ValueError, match=rf"{name.replace('1', '0')} is a stack next to experts one by one"):
            read(path)


def test_nvfp4_files_whose_config_does_not_say_so(good, tmp_path):
    path = write(tmp_path / "silent", tensors(good), config_of(good), None)
    with pytest.raises(ValueError, match=r"weight_scale_2 is of NVFP4 files, and neither config.json .* says so"):
        convert_checkpoint(path, tmp_path / "x", progress=False)


def test_a_config_of_fewer_experts_is_refused_before_anything_is_written(tmp_path):
    source = folder(tmp_path, qwen3_moe)
    change_config(source, num_experts=4, num_local_experts=4)
    with pytest.raises(ValueError, match=r"experts.7.\w+ is an expert too many: by config.json there are 4, 0 to 3"):
        convert_checkpoint(source, tmp_path / "x", progress=False)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("dialect", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_whole_folders_pass(family, dialect, tmp_path):
    exclude = ["*layers.0.*"] if family in (gpt_oss, granite, mixtral) else []
    convert_checkpoint(
        folder(tmp_path, family), tmp_path / "b", Options(dialect=dialect, exclude=exclude), progress=False
    )
    assert verify_checkpoint(tmp_path / "b", tmp_path / "bf16").warnings == []
    files, config = tensors(tmp_path / "b"), config_of(tmp_path / "b")
    gone = re.compile(r"experts\.\d+\.(down_proj|w2)\." + ("bias" if family is gpt_oss else ""))
    files = {n: t for n, t in files.items() if not gone.search(n)}
    write(tmp_path / "c", files, config, config["quantization_config"])
    with pytest.raises(ValueError, match="missing"):
        verify_checkpoint(tmp_path / "c")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", ["fused", "fused with biases", "stacks", "projection first", "linears"])
def test_other_layouts_pass(kind, tmp_path):
    if kind.startswith("fused"):
        source, _ = fused(tmp_path, llama4 if kind == "fused" else gpt_oss)
    elif kind == "stacks":
        source, _ = stacked_by_projection(tmp_path, step3p7)
    elif kind == "projection first":
        source, _ = quantized(tmp_path, qwen3_moe, "modelopt", rename=projection_first)
    else:
        source, _ = quantized(tmp_path, qwen2_moe, "modelopt", lambda k: is_expert(k) or is_linear(k))
    verify_checkpoint(source)
    files = tensors(source)
    last = {n for n in files if "layers.1." in n and ("down_proj" in n) and ("experts" in n or ".moe." in n)}
    assert last
    write(source, {n: t for n, t in files.items() if n not in last}, config_of(source), CONFIGS["modelopt"])
    with pytest.raises(ValueError, match="missing|a projection is missing"):
        verify_checkpoint(source)


def test_sources_of_models_that_are_not_known_say_so(tmp_path, capsys):
    source = folder(tmp_path, qwen3_moe)
    change_config(source, architectures=["MyOwnModel"])
    assert cli.main(["quantize", str(source), str(tmp_path / "x"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "not compared with the model's own list of tensors" in said and "does not know MyOwnModel" in said
    assert cli.main(["quantize", str(source), str(tmp_path / "x")]) == 0
    assert "tensors that SRC may lack were not noticed" in capsys.readouterr().out


@pytest.mark.slow_after(1)
def test_models_that_are_not_known_say_so(good, tmp_path):
    config = config_of(good) | {"architectures": ["SomethingNew"]}
    path = write(tmp_path / "new", drop("layers.1.mlp.gate")(tensors(good)), config, config["quantization_config"])
    (warning,) = verify_checkpoint(path).warnings
    assert "does not know SomethingNew" in warning and "not compared with the model's own list of tensors" in warning
    change_config(path, model_type="something_new")
    (warning,) = verify_checkpoint(path).warnings
    assert "cannot read config.json" in warning and "\n" not in warning


PUBLISHED = [  # architectures and model_type in published files, and the class that transformers has
    ("PhiMoEForCausalLM", "phimoe", "PhimoeForCausalLM"),
    ("ExaoneMoEForCausalLM", "exaone_moe", "ExaoneMoeForCausalLM"),
    ("KimiK25ForConditionalGeneration", "kimi_k25", "Kimi_K25ForConditionalGeneration"),
    ("SarvamMoEForCausalLM", "sarvam_moe", "Glm4MoeForCausalLM"),
    ("SarvamMLAForCausalLM", "sarvam_mla", "DeepseekV3ForCausalLM"),
    ("BailingMoeV3ForCausalLM", "bailing_hybrid", "BailingHybridForCausalLM"),
    ("UnlimitedOCRForCausalLM", "unlimited_ocr", "UnlimitedOcrForConditionalGeneration"),
]


@pytest.mark.parametrize("name, kind, wanted", PUBLISHED, ids=[kind for _, kind, _ in PUBLISHED])
@pytest.mark.filterwarnings("error")
def test_classes_that_files_name_otherwise(name, kind, wanted):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.AutoConfig.for_model(kind, architectures=[name])
    assert class_of(config).__name__ == wanted
    for other in ("OfTheirOwnCode", "MineForCausalLM", "BailingMoeV2_5ForCausalLM"):  # Ling 2.5: another model
        config.architectures = [other]
        assert class_of(config) is None


@pytest.mark.parametrize("source", ["unembed.weight", "unembed.weight$"])
def test_a_renaming_of_a_weight_alone_is_seen(source):
    """The first takes unembed.weight_scale as well, but not the scale of activations (Inkling, transformers 5.17)."""
    from transformers.core_model_loading import WeightRenaming

    names = ModelTensors(qwen3_moe(), [WeightRenaming(source, "lm_head.weight")])
    assert not names.renames_module("unembed") and names.renames_module("lm_head")
    assert ModelTensors(qwen3_moe(), [WeightRenaming("unembed", "lm_head")]).renames_module("unembed")
