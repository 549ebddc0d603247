"""Folders that lack tensors, or have others than the model, are errors that name them."""

import json
import re
import shutil
from argparse import Namespace

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from moe_nvfp4.cli import main
from moe_nvfp4.cli.models import load as load_original
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.calibration import files_importance
from moe_nvfp4.integrations.huggingface.packed import PackedConverter
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.options import Options
from tests.folders import change_config, is_expert, is_linear, quantized, qwen2_moe
from tests.models import IDS, folder, gpt_oss, logits, qwen3_moe, step3p7, tensors

ONE = "model.layers.1.mlp.experts"


def load(path, auto=AutoModelForCausalLM, **kwargs):
    return auto.from_pretrained(path, dtype=torch.float32, **kwargs).eval()


def write(folder, files):
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})


def drop(pattern):
    def change(files):
        gone = [key for key in files if re.search(pattern, key)]
        assert gone
        for key in gone:
            del files[key]

    return change


def as_dense(stem):
    def change(files):
        rows = files[f"{stem}.weight_scale"].shape[0]
        for key in [key for key in files if key.startswith(f"{stem}.")]:
            del files[key]
        files[f"{stem}.weight"] = torch.randn(rows, 64).bfloat16()

    return change


def renumber(files):
    for key in [key for key in files if f"{ONE}.3." in key]:
        files[key.replace(".3.", ".8.")] = files.pop(key)


def one_more(files):
    files.update({k.replace(".3.", ".8."): t.clone() for k, t in files.items() if f"{ONE}.3." in k})


def twice(pattern):
    """The tensors also have the names that AutoModel saves them under."""
    return lambda files: files.update(
        {k.removeprefix("model."): t.clone() for k, t in files.items() if re.search(pattern, k)}
    )


def add(name, value):
    return lambda files: files.update({name: value})


CASES = {
    "a router": (
        drop(r"layers\.1\.mlp\.gate\."),
        r"lack 1 of the \d+ tensors of Qwen3MoeForCausalLM, .*: model.layers.1.mlp.gate.weight",
    ),
    "a projection": (drop(r"layers\.0\.self_attn\.q_proj"), "lack 1 of .*: model.layers.0.self_attn.q_proj.weight"),
    "norms": (drop("norm"), "lack 9 of .*: model.layers.0.self_attn.q_norm.weight, .*, ..."),
    "the embedding": (drop("embed_tokens"), "lack 1 of .*: model.embed_tokens.weight"),
    "lm_head": (drop("lm_head"), "lack 1 of .*: lm_head.weight"),
    "an expert": (drop(rf"{ONE}\.5\."), rf"{ONE}.5.\w+ is missing: 7 of 8 experts have it"),
    "the last expert": (drop(rf"{ONE}\.7\."), rf"{ONE}.7.\w+ is missing: 7 of 8 experts have it"),
    "all experts of a layer": (drop(rf"{ONE}\."), f"lack 2 of the .*: {ONE}.gate_up_proj, {ONE}.down_proj"),
    "one projection of all experts": (drop(rf"{ONE}\.\d\.up_proj"), f"{ONE} has down_proj, gate_proj only"),
    "an expert too many": (one_more, rf"{ONE}.8.\w+ is an expert too many: by config.json there are 8, 0 to 7"),
    "another number": (renumber, rf"{ONE}.3.\w+ is missing: 8 of 9 experts have it"),
    "a dense projection": (
        as_dense(f"{ONE}.2.gate_proj"),
        "gate_proj.weight is BF16 and 7 of 8 experts have one that is read in",
    ),
    "experts twice": (
        add(f"{ONE}.down_proj", torch.ones(8, 64, 48).bfloat16()),
        rf"experts of {ONE} twice, one by one and in {ONE}\.down_proj, and nothing says which",
    ),
    "a norm twice": (
        twice(r"layers\.1\.input_layernorm"),
        r"layers\.1\.input_layernorm.weight are one tensor of Qwen3MoeForCausalLM under two names",
    ),
    "experts under two names": (
        twice(rf"{ONE}\."),
        rf" and {ONE}\.0\.down_proj.weight are one tensor of Qwen3MoeForCausalLM under two names",
    ),
    "one input scale": (
        add(f"{ONE}.2.down_proj.INPUT", torch.tensor(0.5)),
        "has no input_(global_)?scale, which 1 of 48",
    ),
    "one pre_quant_scale": (
        add(f"{ONE}.2.down_proj.pre_quant_scale", torch.ones(48)),
        "has no pre_quant_scale, which 1 of 48",
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_tensors_that_are_missing_or_too_many_are_named(dialect, tmp_path):
    folder, _ = quantized(tmp_path, qwen3_moe, dialect)
    whole = tensors(folder)
    name = {"modelopt": "input_scale", "compressed-tensors": "input_global_scale"}[dialect]
    for case, (change, message) in CASES.items():
        files = dict(whole)
        change(files)
        write(folder, {key.replace("INPUT", name): t for key, t in files.items()})
        with pytest.raises(ValueError) as caught:
            load(folder)
        assert re.search(message, str(caught.value)), (case, str(caught.value))
    write(folder, tensors(tmp_path / "bf16"))
    with pytest.raises(ValueError, match="the files hold no NVFP4 weights that this model has"):
        load(folder)
    write(folder, whole)
    load(folder)


def test_biases_of_experts_twice(tmp_path):
    convert_checkpoint(folder(tmp_path, gpt_oss), tmp_path / "nvfp4", progress=False)
    write(tmp_path / "nvfp4", tensors(tmp_path / "nvfp4") | {f"{ONE}.down_proj_bias": torch.ones(4, 64).bfloat16()})
    with pytest.raises(ValueError, match=rf"experts of {ONE} twice, one by one and in {ONE}\.down_proj_bias"):
        load(tmp_path / "nvfp4")


DENSE = {
    "model.layers.0.self_attn.o_proj.weight": "lack 1 of .*: model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.mlp.gate.weight": "lack 1 of .*: model.layers.1.mlp.gate.weight",
    "model.norm.weight": "lack 1 of .*: model.norm.weight",
    "lm_head.weight": "lack 1 of .*: lm_head.weight",
    f"{ONE}.5.up_proj.weight": f"{ONE}.5.up_proj is missing: 7 of 8",
}


def test_dense_files_that_are_quantized_while_they_load_are_whole(tmp_path, capsys):
    """Every saved folder would have other random numbers in place of what is missing."""
    source = folder(tmp_path, qwen3_moe)
    whole = tensors(source)
    for name, message in DENSE.items():
        write(source, {key: t for key, t in whole.items() if key != name})
        with pytest.raises(ValueError, match=message):
            load(source, quantization_config=MoeNvfp4Config())
    write(source, {key: t for key, t in whole.items() if "o_proj" not in key})
    assert main(["calibrate", str(source), str(tmp_path / "new"), "--text", __file__, "--device", "cpu"]) == 2
    assert "lack 2 of" in capsys.readouterr().err and not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="lack 2 of .*: model.layers.0.self_attn.o_proj.weight"):  # as in compare
        load_original(Namespace(model=str(source), device="cpu"), None, tokenizer=False)
    write(source, whole)
    quantized = load(source, AutoModelForSequenceClassification, num_labels=3, quantization_config=MoeNvfp4Config())
    assert quantized.score.weight.shape == (3, 64)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("family, name", [
    (qwen3_moe, "model.layers.0.self_attn.o_proj.weight"), (qwen3_moe, "model.layers.0.mlp.experts.3.up_proj.weight"),
    (gpt_oss, "model.layers.0.mlp.experts.gate_up_proj"), (gpt_oss, "model.layers.0.mlp.experts.down_proj_bias"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_weights_that_are_no_floating_point_numbers(dtype, family, name, tmp_path):
    """torch casts them to bf16 without a word, and they are half of a quantized weight."""
    source = folder(tmp_path, family)
    files = tensors(source)
    write(source, files | {name: files[name].to(dtype)})
    for read in (
        lambda: convert_checkpoint(source, tmp_path / "new", progress=False),
        lambda: load(source, quantization_config=MoeNvfp4Config()),
        lambda: files_importance(source, [IDS], device="cpu", progress=False),
    ):
        with pytest.raises(ValueError, match=f"^{name} .*(I32|BOOL|F8_E4M3|F8_E5M2)"):
            read()
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_an_older_file_beside_shards(tmp_path):
    """transformers reads model.safetensors, and leaves it there when it saves shards. It removes shards when it saves
    one file, but not their index."""
    source = folder(tmp_path, qwen3_moe)
    model = load(source, quantization_config=MoeNvfp4Config())
    path, settings = tmp_path / "new", {"quantization_config": MoeNvfp4Config()}
    for model, kwargs in ((model, {}), (load(source), settings)):  # noqa: B020
        model.save_pretrained(path, max_shard_size="50KB")
        model.save_pretrained(path)
        assert torch.equal(logits(load(path, **kwargs)), logits(load(source, **settings)))
        model.save_pretrained(path, max_shard_size="50KB")
        with pytest.raises(ValueError, match="has model.safetensors and .*index.json: two checkpoints are mixed"):
            load(path, **kwargs)
        shutil.rmtree(path)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_dense_files_with_a_4_bit_config_say_what_they_are(dialect, tmp_path, capsys):
    """transformers gives a model that from_config makes the quantization_config, and saves it beside dense files."""
    path, _ = quantized(tmp_path, qwen3_moe, dialect)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(tmp_path / "new")
    for read in (load, lambda new: load(new, quantization_config=MoeNvfp4Config())):
        with pytest.raises(ValueError, match="from_config made of a 4-bit folder's config.*remove its quantization_co"):
            read(tmp_path / "new")
    for command in (["verify"], ["quantize", str(tmp_path / "x")]):
        assert main([command[0], str(tmp_path / "new"), *command[1:]]) == 2
        assert "if they are dense" in capsys.readouterr().err
    config = json.loads((tmp_path / "new/config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "new/config.json").write_text(json.dumps(config))
    load(tmp_path / "new", quantization_config=MoeNvfp4Config())


def test_models_on_meta_are_not_saved(tmp_path):
    model = load(folder(tmp_path, qwen3_moe), quantization_config=MoeNvfp4Config())
    model.model.layers[1].mlp.experts.to("meta")
    with pytest.raises(ValueError, match="layers.1.mlp.experts.gate_up_proj is on the meta device, where there are no"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_experts_of_several_dtypes(tmp_path):
    """They are quantized in the config's dtype, from files and while they load."""
    source = folder(tmp_path, qwen3_moe)
    files, name = tensors(source), "model.layers.0.mlp.experts.3.up_proj.weight"
    write(source, files | {name: files[name].float() * 1.001})
    convert_checkpoint(source, tmp_path / "new", progress=False)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", quantization_config=MoeNvfp4Config())
    want = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert torch.equal(logits(model.eval()), logits(want.eval()))


def test_parameters_that_no_converter_reaches_are_named(tmp_path, monkeypatch):
    """transformers alone would only report them, and leave them random."""
    folder, _ = quantized(tmp_path, qwen3_moe, "modelopt")
    monkeypatch.setattr(PackedConverter, "rename_source_key", lambda self, key: (key, None))
    with pytest.raises(
        ValueError, match="nothing in the checkpoint gives model.layers.0.mlp.experts.down_proj_global_scale: "
    ):
        load(folder)


@pytest.mark.parametrize("lost, to, first", [
    ("layers.1.mlp.gate", "layers.0.mlp.gate", "model.layers.1.mlp.gate.weight"),
    ("layers.1.self_attn.q_proj", "of.another.model", "model.layers.1.self_attn.q_proj.weight"),
    ("layers.1.mlp.experts", "of.another.model", f"{ONE}.down_proj"),
])  # fmt: skip
def test_key_mapping_to_other_names(lost, to, first, tmp_path):
    """What was in memory would be the weights."""
    packed, _ = quantized(tmp_path, qwen2_moe, "modelopt", lambda k: is_expert(k) or is_linear(k))
    with pytest.raises(ValueError, match=f"nothing in the checkpoint gives {first}.* key_mapping renames them"):
        load(packed, key_mapping={re.escape(lost): to})


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "gate_up_proj_bias"])
def test_key_mapping_past_the_converters(name, tmp_path):
    """transformers loads a tensor under its own name where its new one is not the model's: dense weights in the place
    of codes, and biases that are not in order."""
    with pytest.raises(ValueError, match=f"nothing in the checkpoint gives {ONE}.{name}: "):
        load(folder(tmp_path, gpt_oss), quantization_config=MoeNvfp4Config(),
             key_mapping={rf"layers\.1\.mlp\.experts\.{name}$": "of.another.model"})  # fmt: skip


def test_linears_lack_their_bias_or_their_dense_twin(tmp_path):
    folder, _ = quantized(tmp_path, qwen2_moe, "modelopt", lambda k: is_expert(k) or is_linear(k))
    whole = tensors(folder)
    for gone, count, first in (("layers.0.self_attn.q_proj.bias", 1, "model.layers.0.self_attn.q_proj.bias"),
                               ("layers.0.self_attn.q_proj.weight", 1, "model.layers.0.self_attn.q_proj.weight"),
                               ("shared_expert_gate", 2, "model.layers.0.mlp.shared_expert_gate.weight")):  # fmt: skip
        files = dict(whole)
        drop(gone)(files)
        write(folder, files)
        with pytest.raises(ValueError, match=f"lack {count} of .*: {first}"):
            load(folder)


@pytest.mark.slow
def test_what_is_tied_ignored_or_to_be_trained_is_not_missed(tmp_path):
    folder, _ = quantized(tmp_path, lambda: qwen3_moe(tie_word_embeddings=True), "modelopt")
    files = tensors(folder)
    assert "lm_head.weight" not in files
    model = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        body = load(folder, AutoModel)(IDS).last_hidden_state
        assert torch.equal(body @ model.lm_head.weight.T, logits(model))
    # the head of another class is new, as when a dense checkpoint is loaded
    classifier = load(folder, AutoModelForSequenceClassification, num_labels=3)
    assert classifier.score.weight.shape == (3, 64)
    assert torch.equal(classifier.model.embed_tokens.weight, model.lm_head.weight)
    # but a language model's head is not
    base, _ = quantized(tmp_path / "untied", qwen3_moe, "modelopt")
    files = tensors(base)
    del files["lm_head.weight"]
    write(base, files)
    change_config(base, architectures=["Qwen3MoeModel"])
    with pytest.raises(ValueError, match="lack 1 of .*: lm_head.weight"):
        load(base)
    assert json.loads((base / "config.json").read_text())["architectures"] == ["Qwen3MoeModel"]
    load(base, AutoModel)
    # nor is anything of the body
    change_config(base, architectures=["Qwen3MoeForCausalLM"])
    del files["model.layers.0.self_attn.o_proj.weight"]
    write(base, files)
    with pytest.raises(ValueError, match="lack 1 of .*: layers.0.self_attn.o_proj.weight. A shard is missing"):
        load(base, AutoModel)


def test_the_body_of_a_model_with_other_names_in_files(tmp_path):
    """AutoModel's experts of Step-3.7 are those of the whole model, which its files call moe.experts."""
    convert_checkpoint(folder(tmp_path, step3p7), tmp_path / "q", progress=False)
    body, whole = load(tmp_path / "q", AutoModel), load(tmp_path / "q", AutoModelForImageTextToText)
    found, expected = (m.language_model(IDS).last_hidden_state for m in (body, whole.model))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "4-bit"])
def test_another_vocabulary(dense, tmp_path):
    """As in a dense model: transformers says what does not fit, and makes it new if it is told so."""
    if dense:
        source, settings = folder(tmp_path, qwen3_moe), {"quantization_config": MoeNvfp4Config()}
    else:
        (source, _), settings = quantized(tmp_path / "q", qwen3_moe, "modelopt"), {}
    if Version(transformers.__version__) < Version("5.24"):  # it would take the files' sizes without a word
        with pytest.raises(ValueError, match=r"\[96, 64\], by config.json .* has \[40, 64\]"):
            load(source, vocab_size=40, ignore_mismatched_sizes=True, **settings)
        return
    model = load(source, vocab_size=40, ignore_mismatched_sizes=True, **settings)
    assert model.lm_head.weight.shape == model.model.embed_tokens.weight.shape == (40, 64)
    assert torch.equal(model.model.norm.weight, load(source, **settings).model.norm.weight)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(source, vocab_size=40, **settings)


def test_another_number_of_labels(tmp_path):
    """Likewise of a classifier's head."""
    source = folder(tmp_path, qwen3_moe)
    load(source, AutoModelForSequenceClassification, num_labels=2).save_pretrained(source)
    settings = {"num_labels": 3, "ignore_mismatched_sizes": True, "quantization_config": MoeNvfp4Config()}
    if Version(transformers.__version__) < Version("5.24"):
        with pytest.raises(ValueError, match=r"score.weight .* \[2, 64\], by config.json .* has \[3, 64\]"):
            load(source, AutoModelForSequenceClassification, **settings)
    else:
        assert load(source, AutoModelForSequenceClassification, **settings).score.weight.shape == (3, 64)


@pytest.mark.parametrize("how", ["4-bit head", "weighted"])
def test_another_vocabulary_than_that_of_a_4_bit_head_or_of_what_is_run(how, tmp_path):
    """transformers makes no new codes, and `weighted` runs the files by itself."""
    source, settings = folder(tmp_path, qwen3_moe), {"quantization_config": MoeNvfp4Config(recipe="weighted")}
    if how == "4-bit head":
        convert_checkpoint(source, tmp_path / "q", Options(linears="all"), progress=False)
        source, settings = tmp_path / "q", {}
    with pytest.raises(ValueError, match=r"lm_head.weight in .*\[96, 64\].*\[40, 64\]|embed_tokens.*\[40, 64\]"):
        load(source, vocab_size=40, ignore_mismatched_sizes=True, **settings)
