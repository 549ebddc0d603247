"""Commands that read and write checkpoints: quantize, calibrate, info and verify."""

import io
import json
import math
import os
import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from moe_nvfp4 import demo
from moe_nvfp4.cli import info
from moe_nvfp4.cli.calibrate import _keep_dtypes
from moe_nvfp4.quantize.card import _use
from moe_nvfp4.quantize.files import open_checkpoint
from tests.cli.commands import Terminal, mistake, run
from tests.common import ROOT
from tests.folders import change_config, fp8
from tests.models import as_bytes, deepseek, diffusion_gemma, make, minimax_m3, qwen3_moe, tensors


def test_info_says_what_quantize_refuses(tmp_path, capsys):
    """`would become NVFP4` was all it said."""
    make(diffusion_gemma).save_pretrained(tmp_path / "a")
    run("info", tmp_path / "a")
    said = re.search(r"\nwarning: moe-nvfp4 quantize does not take these files: (.*)\n", capsys.readouterr().out)
    refusal = mistake(("quantize", tmp_path / "a", tmp_path / "b"), capsys)
    assert said[1] in refusal and "a layout that is not known" in refusal


def test_info_of_a_model_on_the_hub(folder, tmp_path, capsys, monkeypatch):
    """The headers are read in the Hub's cache, as in a folder; where there are none, the numbers are the config's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "cache" / "models--me--nvfp4"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("c" * 40)
    snapshot = place / "snapshots" / ("c" * 40)
    run("quantize", folder, snapshot, "--recipe", "max", "--linears", "attention", "--exclude", "model.layers.0.mlp.*")
    capsys.readouterr()

    def said(name):
        run("info", name)
        return capsys.readouterr().out.replace(str(name), "NAME")

    here = said(snapshot)
    assert "8 linears" in here and "warning" not in here
    assert said("me/nvfp4") == here
    for path in snapshot.glob("*.safetensors"):
        path.unlink()
    for name in ("me/nvfp4", snapshot):
        found = said(name)
        assert "linears: " not in found and "warning: the weights of NAME are not on this machine" in found


def test_quantize_info_generate(folder, tmp_path, capsys):
    destination = tmp_path / "out" / "nvfp4"
    run("quantize", folder, destination, "--recipe", "max", "--exclude", "model.layers.0.*")
    assert (destination / "NOTES.txt").read_text() == "kept"
    assert (destination / "tokenizer.json").is_file()
    keys = tensors(destination)
    assert keys["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.uint8
    assert keys["model.layers.0.mlp.experts.0.up_proj.weight"].dtype == torch.bfloat16
    assert [p.name for p in destination.parent.iterdir()] == ["nvfp4"]

    capsys.readouterr()
    run("info", destination)
    said = capsys.readouterr().out
    assert re.search(r"1 layers of experts, NVFP4 of modelopt", said)
    assert re.search(r"model.layers.1.mlp.experts +Qwen3MoeExperts +E 8  H 64  I 48 +silu", said)
    assert re.search(r"model.layers.0.mlp.experts +left as it is: excluded", said)
    run("info", folder)
    said = capsys.readouterr().out
    assert len(re.findall(r"mlp.experts", said)) == 1
    assert re.search(r"  2 x model.layers.0-1.mlp.experts +Qwen3MoeExperts +E 8  H 64  I 48 +silu", said)
    # 2 layers of 8 * 3 * 64 * 48 weights: 2 bytes each, then 9 bytes for 16 and 3 scales per expert
    assert "2 layers of experts, dense, would become NVFP4" in said
    assert f"experts: {2 * 147456 / 1e3:.1f} KB in bf16" in said

    other = tmp_path / "out" / "other"
    run("quantize", destination, other, "--dialect", "compressed-tensors")
    capsys.readouterr()
    run("info", other)
    assert "1 layers of experts, NVFP4 of compressed-tensors" in capsys.readouterr().out
    sizes = []
    for source, *more in ((folder,), (destination,), (other,), (other, "--map-files")):
        run("generate", source, "--raw", "--prompt", "Hello", "--max-new-tokens", 5, "--device", "cpu", *more)
        said = capsys.readouterr().out
        assert re.search(r"speed: +[\d.]+ tokens/s over 5 tokens", said)
        sizes += re.findall(r"experts: ([\d.]+ KB in bf16, [\d.]+ KB in NVFP4 \(3\.\d\dx smaller\))", said)
    assert len(sizes) == 4 and len(set(sizes[1:])) == 1  # wherever the weights are


def test_fp8_becomes_nvfp4_while_it_loads(folder, tmp_path, capsys):
    """And is compared with its own values: those of a bf16 folder that has them."""
    source, twin = tmp_path / "fp8", tmp_path / "twin"
    for path in (source, twin):
        shutil.copytree(folder, path)
    files, dense = tensors(folder), tensors(folder)
    for name in [n for n in files if ".experts." in n or "q_proj" in n]:
        files[name], files[f"{name}_scale_inv"], values = fp8("block", files[name].float())
        dense[name] = values.bfloat16()
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, twin / "model.safetensors", metadata={"format": "pt"})
    change_config(source, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    run("info", source)
    assert "2 layers of experts, FP8, would become NVFP4" in capsys.readouterr().out
    run("generate", source, "--raw", "--prompt", "Hello", "--max-new-tokens", 4, "--device", "cpu")
    said = capsys.readouterr().out
    assert f"{source} is FP8, and becomes NVFP4 while it loads: moe-nvfp4 quantize {source} DST writes it once" in said
    assert "smaller)" in said
    found = []
    for path in (source, twin):
        text = ("--text", ROOT / "README.md", "--window", 32, "--windows", 2, "--device", "cpu", "--json")
        run("compare", path, *text)
        said = capsys.readouterr()
        found.append(json.loads(said.out)["models"])
        assert ("becomes NVFP4 while it loads" in said.err) == (path == source)
    assert found[0] == found[1] and found[0]["W4A16"]["kl"] > 0
    lacking = {name: tensor for name, tensor in files.items() if "q_norm" not in name}
    save_file(lacking, source / "model.safetensors", metadata={"format": "pt"})
    for command in (("info",), ("generate", "--bf16")):
        assert "the files lack 2 of the 25 tensors" in mistake((command[0], source, *command[1:]), capsys)


def test_quantize_verify_and_back(folder, tmp_path, capsys):
    """bf16 -> compressed-tensors -> ModelOpt equals bf16 -> ModelOpt, and verify says so."""
    run("quantize", folder, tmp_path / "ct", "--dialect", "compressed-tensors", "--device", "cpu", "--workers", 2)
    run("quantize", tmp_path / "ct", tmp_path / "back")
    run("quantize", folder, tmp_path / "direct")
    back, direct = tensors(tmp_path / "back"), tensors(tmp_path / "direct")
    assert back.keys() == direct.keys() and all(torch.equal(back[k], direct[k]) for k in back if "scale_2" not in k)
    capsys.readouterr()
    run("verify", tmp_path / "direct", "--against", folder)
    assert re.search(r"model.layers.1.mlp.experts +24 +0\.0\d+ +2\d\.\d+", capsys.readouterr().out)
    run("verify", folder, expect=2)
    assert "is not an NVFP4 checkpoint" in capsys.readouterr().err


def test_dense_files_beside_a_4_bit_config(folder, tmp_path, capsys):
    """As from a dense model that was saved over a folder of ModelOpt's."""
    shutil.copytree(folder, tmp_path / "over")
    said = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}}
    (tmp_path / "over" / "hf_quant_config.json").write_text(json.dumps(said))
    for command, message in (("info", "has no 4-bit experts, although its config says so: moe-nvfp4 verify"),
                             ("verify", "remove its quantization_config, and hf_quant_config.json")):  # fmt: skip
        run(command, tmp_path / "over", expect=2)
        assert message in capsys.readouterr().err


def test_a_folder_called_demo(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(folder)
    run("info", "./demo", "--json")
    assert json.loads(capsys.readouterr().out)["model"] == "./demo"
    run("info", "demo", expect=2)
    assert "a folder of that name is here: name that ./demo" in capsys.readouterr().err


def test_every_command_takes_demo_and_hub_names(folder, tmp_path, monkeypatch, capsys):
    """'demo' is our small checkpoint here; the hub returns a folder, and is asked only for a checkpoint's files."""
    monkeypatch.setattr(demo, "demo_path", lambda: folder)
    run("quantize", "demo", tmp_path / "nvfp4", "--recipe", "max", "--device", "cpu")
    capsys.readouterr()
    run("verify", tmp_path / "nvfp4", "--against", "demo")
    assert re.search(r"model.layers.1.mlp.experts +24 +0\.\d+", capsys.readouterr().out)

    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked, errors = [], []
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model.v3",
              "merges.txt", "chat_template.jinja", "modeling_x.py", "LICENSE.md", "NOTICE", "figure[1].png",
              "additional_chat_templates/tools.jinja"]  # fmt: skip
    left = ["consolidated-00001-of-2.safetensors", "original/params.json", "original/consolidated.safetensors",
            "encoding/x.py", "pytorch_model.bin", "model.gguf"]  # fmt: skip

    class Api:
        def model_info(self, name):
            if errors:
                raise errors.pop()
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in wanted + left])

    def snapshot(name, local_files_only=False, **patterns):
        asked.append((name, local_files_only, list(filter_repo_objects(wanted + left, **patterns))))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    run("verify", tmp_path / "nvfp4", "--against", "some/model")
    assert "Hub" not in capsys.readouterr().out
    run("quantize", "some/model", tmp_path / "other", "--dry-run")
    said = "consolidated-00001-of-2.safetensors, encoding/, model.gguf, original/, pytorch_model.bin"
    assert f"left on the Hub: {said}\n" in capsys.readouterr().out
    read = [name for name in wanted if name not in ("tokenizer.model.v3", "LICENSE.md", "NOTICE", "figure[1].png")]
    assert asked == [("some/model", False, read), ("some/model", False, wanted)]
    for error in (huggingface_hub.errors.OfflineModeIsEnabled("offline"), OSError("403: no token")):
        errors.append(error)
        run("quantize", "some/model", tmp_path / "other", "--dry-run")
    assert asked[2:] == [("some/model", True, wanted + left)] * 2
    said = capsys.readouterr().out
    assert re.search("Hub does not answer: of some/model only what is in the cache is copied, .*config.json, gen", said)


def test_names_and_letters_that_cannot_be_printed(folder, tmp_path, monkeypatch):
    """Under LC_ALL=C: a name of bytes that are no text, and letters that the terminal has no code for."""
    destination = tmp_path / os.fsdecode(b"\xe9 caf\xc3\xa9")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    run("quantize", folder, destination, "--recipe", "max")
    sys.stdout.flush()
    assert rb"\udce9 caf\xe9" in sys.stdout.buffer.getvalue()
    assert "# \ufffd café\n" in (destination / "README.md").read_text("utf-8")


RESULTS = """
model-index:
- name: original
  results:
  - task: {type: text-generation}
    dataset: {name: MMLU, type: mmlu}
    metrics: [{type: accuracy, value: 71.2}]
"""


def test_the_model_card(folder, tmp_path, monkeypatch, capsys):
    """The Hub's own parser finds the original's metadata and ours, but not what is true of the original alone: its base
    and its results. The figures are those that verify prints."""
    from huggingface_hub import ModelCard

    source = tmp_path / "source"
    source.mkdir()
    for file in folder.iterdir():
        (source / file.name).hardlink_to(file)
    metadata = "license: apache-2.0\ntags: [chat, moe]\nlanguage: [nn, no]\nbase_model: some/base\n" + RESULTS
    (source / "README.md").write_text(f"---\n{metadata}\n---\n# Original\nIts text.\n")
    run("quantize", source, tmp_path / "plain", "--exclude", "model.layers.0.*", "--recipe", "max")
    run("quantize", source, tmp_path / "checked", "--verify", "--activations", "nvfp4", "--recipe", "max")
    said = capsys.readouterr().out
    plain, checked = (ModelCard.load(tmp_path / name / "README.md") for name in ("plain", "checked"))
    for card in (plain, checked):
        assert card.data.license == "apache-2.0" and card.data.tags == ["chat", "moe", "nvfp4"]
        assert card.data.language == ["nn", "no"]
        assert card.data.base_model_relation == "quantized" and card.data.base_model is None, "not a name on the Hub"
        assert card.data.eval_results is None
        assert card.text.count("Its text.") == 1
    assert "| left alone: `model.layers.0.mlp.experts` | excluded |" in plain.text
    assert "24 matrices in NVFP4, recipe `max`" in plain.text and "W4A16" in plain.text
    note = "SGLang 0.5.23 on a Blackwell GPU takes these W4A16 weights for W4A4"
    assert note in plain.text and said.count(f"note: {note}") == 2  # without static scales both are W4A16 to servers
    assert "moe-nvfp4 verify plain --against ORIGINAL" in plain.text
    for layer in (0, 1):
        error, snr = re.search(rf"model.layers.{layer}.mlp.experts +24 +([\d.]+) +([\d.]+)", said).groups()
        row = re.search(rf"\| `model.layers.{layer}.mlp.experts` \| ([\d.]+) \| ([\d.]+) \|", checked.text)
        assert float(row[1]) == pytest.approx(float(error), abs=1e-4) and float(row[2]) == pytest.approx(
            float(snr), abs=0.1
        )
    assert "W4A4" in checked.text
    size = sum(tensor.nbytes for tensor in tensors(tmp_path / "plain").values())
    before = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert f"| size | {size / 1000:.1f} KB, of {before / 1000:.1f} KB |" in plain.text
    # a folder whose path looks like a name on the Hub
    (tmp_path / "some").mkdir()
    source.rename(tmp_path / "some" / "model")
    monkeypatch.chdir(tmp_path)
    options = ["--recipe", "max", "--linears", "attention", "--activations", "nvfp4_four_over_six"]
    run("quantize", "some/model", tmp_path / "third", *options)
    card = ModelCard.load(tmp_path / "third" / "README.md")
    assert card.data.base_model is None and "\nmodel with NVFP4 experts and linears, made by" in card.text
    assert "| linears | 8 in NVFP4, recipe `max` |" in card.text
    assert "| activations | NVFP4 (W4A4), blocks by four-over-six |" in card.text
    # a carried folder keeps its activations; a card with unreadable metadata becomes part of the new text
    for i, content in enumerate((b"---\n: : :\n---\nIts text.", b"---\n- a\n---\nIts text.")):
        (tmp_path / "checked" / "README.md").write_bytes(content)
        run("quantize", tmp_path / "checked", tmp_path / f"carried-{i}", "--dialect", "compressed-tensors")
        card = ModelCard.load(tmp_path / f"carried-{i}" / "README.md")
        assert card.data.tags == ["nvfp4", "moe"] and "| activations | NVFP4 (W4A4) |" in card.text
        assert content.decode() in card.text


def test_the_card_names_the_class_that_loads_the_model(tmp_path):
    for kind, names, loader in (
        ("qwen3_moe", ["Qwen3MoeForCausalLM"], "AutoModelForCausalLM"),
        ("qwen3_vl_moe", ["Qwen3VLMoeForConditionalGeneration"], "Qwen3VLMoeForConditionalGeneration"),
        ("mistral4", ["Mistral4ForCausalLM"], "Mistral4ForCausalLM"),  # no model of AutoModelForCausalLM
        ("phimoe", ["PhiMoEForCausalLM"], "AutoModelForCausalLM"),  # as published
        ("kimi_k25", ["KimiK25ForConditionalGeneration"], "Kimi_K25ForConditionalGeneration"),
        ("sarvam_moe", ["SarvamMoEForCausalLM"], "AutoModelForCausalLM"),  # transformers has Glm4MoeForCausalLM for it
        ("qwen3_moe", ["OfTheirOwnCode"], "AutoModelForCausalLM"),
        ("qwen3_moe", None, "AutoModelForCausalLM"),
    ):
        if hasattr(transformers, loader) and kind in CONFIG_MAPPING:
            (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": names}))
            assert f'model = {loader}.from_pretrained("x"' in _use(tmp_path, "x"), (kind, names)


@pytest.mark.parametrize("model", ["chat", "old chat", "mistral", "base", "own code", "classifier"])
def test_the_commands_of_the_card_can_be_run(model, folder, tmp_path, capsys):
    """A base model has no chat template, and a classifier says nothing: the card named `chat` for all."""
    source = shutil.copytree(folder, tmp_path / "source")
    template = "{{ messages[-1].content }}"
    if model == "chat":
        (source / "chat_template.jinja").write_text(template)
    elif model == "old chat":
        file = source / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    elif model == "mistral":
        (source / "tekken.json").write_text("{}")
    elif model == "own code":
        (source / "tokenizer.json").unlink()
        auto_map = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
        (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map, "chat_template": template}))
    elif model == "classifier":
        change_config(source, architectures=["Qwen3MoeModel"])
    run("quantize", source, tmp_path / "made", "--recipe", "max")
    said = (tmp_path / "made" / "README.md").read_text()
    commands = re.findall(r"^moe-nvfp4 (.*made.*?)(?: +#.*)?$", said, re.M)
    answers = {"base": ['generate made --raw --prompt "Once upon a time"'], "classifier": [], "own code": []}
    assert [c for c in commands if not c.startswith(("serve", "verify"))] == answers.get(model, ["chat made"])
    if model == "own code":
        said = mistake(("generate", tmp_path / "made", "--device", "cpu"), capsys)
        assert "the tokenizer is code of its repository, which is never run here: make token ids with it" in said
    if model == "base":
        run("generate", tmp_path / "made", *shlex.split(commands[0])[2:], "--max-new-tokens", "2")


def test_cards_and_indexes_of_other_programs(folder, tmp_path, capsys):
    """A byte order mark is no text; a card in another encoding is left out, and said so; a name with "index" alone does
    not make a file a list of weights."""
    from huggingface_hub import ModelCard

    source = tmp_path / "source"
    shutil.copytree(folder, source)
    (source / "faiss.index.json").write_text("{}")
    (source / "tf_model.h5.index.json").write_text('{"weight_map": {}}')
    text = "---\nlicense: mit\n---\nIts text: é"
    for encoding, kept in (("utf-8-sig", True), ("utf-16", False), ("latin-1", False)):
        (source / "README.md").write_text(text, encoding=encoding)
        run("quantize", source, tmp_path / encoding, "--recipe", "max")
        card = ModelCard.load(tmp_path / encoding / "README.md")
        assert card.data.license == ("mit" if kept else None) and ("Its text: é" in card.text) == kept
        assert ("README.md: not UTF-8" in capsys.readouterr().out) != kept
        assert (tmp_path / encoding / "faiss.index.json").read_text() == "{}"
        assert not (tmp_path / encoding / "tf_model.h5.index.json").exists()


def test_the_card_names_what_the_hub_has(folder, tmp_path):
    """A name on the Hub is the base, also of what is made from that folder."""
    from huggingface_hub import ModelCard

    from moe_nvfp4.quantize.convert import convert_checkpoint
    from moe_nvfp4.quantize.options import Options

    convert_checkpoint(folder, tmp_path / "made", Options("max"), progress=False, card="some/model")
    run("quantize", tmp_path / "made", tmp_path / "carried", "--dialect", "compressed-tensors")
    for name, title in (("made", "some/model"), ("carried", "made")):
        card = ModelCard.load(tmp_path / name / "README.md")
        assert (card.data.base_model, card.data.base_model_relation) == ("some/model", "quantized")
        assert f"\n{title} with NVFP4 experts, made by moe-nvfp4" in card.text


@pytest.mark.parametrize("recipe", ["max", "gptq"])
def test_the_card_appears_with_the_folder(recipe, folder, tmp_path, monkeypatch):
    """A run that is killed as soon as DST is there leaves its card, and not the source's own."""
    from moe_nvfp4.quantize.files import StagingDir

    publish = StagingDir.publish

    def killed(self, names):
        publish(self, names)
        raise KeyboardInterrupt

    source, text = tmp_path / "source", tmp_path / "text.txt"
    source.mkdir()
    for file in folder.iterdir():
        (source / file.name).hardlink_to(file)
    (source / "README.md").write_text("# Original\n")
    text.write_text("abcdefgh ijkl mnop " * 20)
    options = ["--text", text, "--windows", 2, "--window", 16, "--device", "cpu"] if recipe == "gptq" else []
    monkeypatch.setattr(StagingDir, "publish", killed)
    run("quantize", source, tmp_path / "made", "--recipe", recipe, *options, expect=130)
    card = (tmp_path / "made" / "README.md").read_text()
    assert f"recipe `{recipe}`" in card and "# Original" in card
    assert not [p.name for p in (tmp_path / "made").iterdir() if p.name.startswith(".")]


def test_a_checkpoint_is_exactly_itself(folder, tmp_path, capsys):
    run("quantize", folder, tmp_path / "made", "--recipe", "max")
    run("quantize", tmp_path / "made", tmp_path / "carried", "--dialect", "compressed-tensors", "--verify")
    said = capsys.readouterr().out
    assert re.search(r"model.layers.1.mlp.experts +24 +0\.00000 +exact$", said, re.M) and "inf" not in said
    assert "| `model.layers.1.mlp.experts` | 0.0000 | exact |" in (tmp_path / "carried" / "README.md").read_text()


@pytest.mark.slow
def test_layers_are_sorted_as_numbers(tmp_path, capsys):
    make(partial(qwen3_moe, num_hidden_layers=12)).save_pretrained(tmp_path / "bf16")
    run("quantize", tmp_path / "bf16", tmp_path / "made", "--recipe", "max", "--exclude", "model.layers.[0-9].*")
    said = capsys.readouterr().out
    assert re.findall(r"left alone: model.layers.(\d+)", said) == [str(i) for i in range(10)]
    run("quantize", tmp_path / "bf16", tmp_path / "all", "--recipe", "max", "--verify")
    said = capsys.readouterr().out
    assert re.findall(r"^model.layers.(\d+)", said, re.M) == [str(i) for i in range(12)]
    card = (tmp_path / "all" / "README.md").read_text()
    assert re.findall(r"^\| `model.layers.(\d+)", card, re.M) == [str(i) for i in range(12)]


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["model.layers.3.mlp.experts"], ["model.layers.3.mlp.experts"]),
        ([f"layers.{i}.mlp" for i in (1, 2, 3, 7, 9, 10)], ["6 x layers.1-3,7,9-10.mlp"]),
        (["a.0.x", "b.0.x", "a.1.x", "a.1.y"], ["2 x a.0-1.x", "b.0.x", "a.1.y"]),
        (["experts", "layers.0.mlp.experts.0"], ["experts", "layers.0.mlp.experts.0"]),
    ],
)
def test_equal_layers_are_one_line(names, lines):
    assert list(info.grouped((name, "same") for name in names)) == [(line, "same") for line in lines]
    assert len(list(info.grouped(zip(names, "abcdefg", strict=False)))) == len(names), "different ones are not"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("columns", [60, 200])
def test_a_narrow_terminal(columns, folder, tmp_path, monkeypatch):
    """Lines are no longer than the terminal, no word is broken, and every number is there."""
    run("quantize", folder, tmp_path / "made", "--recipe", "max", "--quiet")
    pipe, terminal = io.StringIO(), Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    for stream in (pipe, terminal):
        monkeypatch.setattr(sys, "stdout", stream)
        run("info", folder)
        run("verify", "made", "--against", folder)
    text = re.sub(r"\x1b\[\d*m", "", terminal.getvalue())
    words = [set(re.split(r"[,:\s]+", shown)) for shown in (pipe.getvalue(), text)]
    assert words[0] <= words[1]
    assert columns == 200 or max(map(len, text.splitlines())) <= max(60, len(str(folder)) + 1)


def test_an_interrupted_quantize_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    from moe_nvfp4.quantize.files import ShardWriter

    def fails(self, name, data, offset=0):
        raise OSError("No space left on device")

    monkeypatch.setattr(ShardWriter, "write", fails)
    run("quantize", folder, tmp_path / "nvfp4", "--recipe", "max", expect=2)
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_says_how_to_go_on(folder, tmp_path, monkeypatch, capsys):
    from moe_nvfp4.quantize import verify
    from moe_nvfp4.quantize.files import ShardWriter

    written, write = [], ShardWriter.write

    def stop(self, name, data, offset=0):
        written.append(name)
        if len(written) >= stop.after:
            raise KeyboardInterrupt
        write(self, name, data, offset)

    def interrupted(*options):
        run("quantize", folder, tmp_path / "made", "--recipe", "max", "--workers", 1, *options, expect=130)
        return capsys.readouterr().err.splitlines()[-1]

    monkeypatch.setattr(ShardWriter, "write", stop)
    stop.after = 1
    assert interrupted() == "moe-nvfp4: interrupted: nothing was written"
    stop.after = 60
    line = interrupted()
    assert "the same command goes on from here" in line and str(tmp_path / ".made.partial") in line
    stop.after = math.inf
    monkeypatch.setattr(verify, "verify_checkpoint", lambda *folders: (_ for _ in ()).throw(KeyboardInterrupt))
    line = interrupted("--verify")
    assert f"made is complete; moe-nvfp4 verify {tmp_path / 'made'} --against {folder}" in line
    assert (tmp_path / "made" / "README.md").exists()


def test_calibrate(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijkl mnop " * 20)
    run("calibrate", folder, tmp_path / "static", "--text", text, "--window", 32, "--windows", 3, "--device", "cpu")
    assert "static scales from 96 tokens" in capsys.readouterr().out
    card = (tmp_path / "static" / "README.md").read_text()
    assert "| weights | quantized from the original, recipe `mse` |" in card
    assert "| activations | NVFP4 (W4A4), static scales measured with 96 tokens |" in card
    found = tensors(tmp_path / "static")
    scales = {k: v.item() for k, v in found.items() if k.endswith("up_proj.input_scale")}
    assert len(scales) == 16 and len(set(scales.values())) == 2, "every expert has its layer's"
    run("verify", tmp_path / "static")
    run("generate", tmp_path / "static", "--raw", "--prompt", "Hello", "--max-new-tokens", 5, "--device", "cpu")
    run("calibrate", folder, tmp_path / "static", "--text", text, expect=2)
    assert "exists: name a folder that does not" in capsys.readouterr().err


def umask():
    now = os.umask(0)
    os.umask(now)
    return now


def test_calibrate_keeps_the_rest(tmp_path, folder, capsys):
    """Its bytes, in the dtype of the files, the files beside the weights, and the config as older programs read it.
    The card is a new one, with the text of the old."""
    shutil.copytree(folder, tmp_path / "fp16")
    make(qwen3_moe, torch.float16).save_pretrained(tmp_path / "fp16")
    (tmp_path / "fp16" / "preprocessor_config.json").write_text('{"size": 3}')
    run("quantize", tmp_path / "fp16", tmp_path / "4bit", "--linears", "attention")
    config = json.loads((tmp_path / "4bit" / "config.json").read_text())
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "torch_dtype": config.pop("dtype")}
    config |= {"rope_scaling": None, "of_my_own": {"a": [1]}}
    (tmp_path / "4bit" / "config.json").write_text(json.dumps(config))
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijkl mnop " * 20)
    capsys.readouterr()
    run("calibrate", tmp_path / "4bit", tmp_path / "static", "--text", text, "--window", 32, "--device", "cpu")
    said = capsys.readouterr().out
    assert "left out" not in said
    card = (tmp_path / "static" / "README.md").read_text()
    assert "\n# static\n\n4bit with NVFP4 experts and linears, made by" in card
    tokens = re.search(r"static scales from (\d+) tokens", said)[1]
    assert f"| activations | NVFP4 (W4A4), static scales measured with {tokens} tokens |" in card
    assert "| weights | those of the original |" in card
    assert card.count("# 4bit\n") == 1, "the text of the card before"
    before, after = tensors(tmp_path / "4bit"), tensors(tmp_path / "static")
    assert all("input_scale" in name for name in after.keys() - before.keys())
    kept = {path.stat().st_mode & 0o777 for path in (tmp_path / "static").iterdir()}
    assert kept == {0o666 & ~umask()}, "safetensors writes files that only their owner reads"
    for name, tensor in before.items():
        assert (tensor.dtype, as_bytes(tensor)) == (after[name].dtype, as_bytes(after[name])), name
    names = {path.name for path in (tmp_path / "4bit").iterdir()}
    assert {path.name for path in (tmp_path / "static").iterdir()} == names
    for name in names - {"config.json", "model.safetensors", "README.md"}:
        assert (tmp_path / "4bit" / name).read_bytes() == (tmp_path / "static" / name).read_bytes()
    now = json.loads((tmp_path / "static" / "config.json").read_text())
    assert now.pop("quantization_config")["quant_algo"] == "NVFP4" and config.pop("quantization_config")
    assert now == config


@pytest.mark.parametrize(
    "family, dtype", [(qwen3_moe, torch.float32), (deepseek, torch.bfloat16)], ids=["float32", "bf16"]
)
def test_calibrate_keeps_dtypes(family, dtype, tmp_path, folder):
    """Some publish routers in float32 beside bf16, which became bf16, and vLLM computes with float32; of others
    transformers makes float32."""
    source, text = shutil.copytree(folder, tmp_path / "source"), tmp_path / "text.txt"
    make(family).save_pretrained(source)
    found, generator = tensors(source), torch.Generator().manual_seed(0)
    routers = [name for name in found if name.endswith("mlp.gate.weight")]
    for name in routers:
        found[name] = torch.randn(found[name].shape, generator=generator).to(dtype)
    save_file(found, source / "model.safetensors", metadata={"format": "pt"})
    text.write_text("abcdefgh ijkl mnop " * 20)
    options = ("--text", text, "--window", 32, "--device", "cpu")
    run("quantize", source, tmp_path / "4bit")
    run("calibrate", source, tmp_path / "static", *options)
    run("calibrate", tmp_path / "4bit", tmp_path / "again", *options)
    want = tensors(tmp_path / "4bit")
    assert routers and all(want[name].dtype == dtype for name in routers)
    for made in ("static", "again"):
        same = tensors(tmp_path / made)
        assert [n for n, t in want.items() if (t.dtype, as_bytes(t)) != (same[n].dtype, as_bytes(same[n]))] == []


def test_dtypes_are_kept_in_each_shard(tmp_path):
    """What was rounded is written again, and nothing that has become something else."""
    make(qwen3_moe).save_pretrained(tmp_path / "source")
    make(qwen3_moe).save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    wide = {name: t.float() * (1 + 1e-4) for name, t in tensors(tmp_path / "source").items()}
    other = wide["model.layers.0.input_layernorm.weight"]
    other += 1
    save_file(wide, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    _keep_dtypes(open_checkpoint(tmp_path / "source"), tmp_path / "shards")
    found = open_checkpoint(tmp_path / "shards")
    different = [n for n, t in wide.items() if as_bytes(found.tensors[n].tensor()) != as_bytes(t)]
    assert different == ["model.layers.0.input_layernorm.weight"] and len(found.files) > 2
    size = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert size == sum(t.nbytes for t in wide.values()) - 2 * other.numel()


@pytest.mark.parametrize("family, exclude", [(qwen3_moe, ["--exclude", "*.0.mlp.experts"]), (minimax_m3, [])])
def test_calibrate_keeps_dtypes_of_what_is_rearranged(family, exclude, tmp_path, folder):
    """Experts that stay dense are stacks in the model, and MiniMax-M3's gate and up one matrix."""
    source, text = shutil.copytree(folder, tmp_path / "source"), tmp_path / "text.txt"
    make(family).save_pretrained(source)
    wide = {n: t.float() + 1e-4 if t.dtype == torch.bfloat16 else t for n, t in tensors(source).items()}
    save_file(wide, source / "model.safetensors", metadata={"format": "pt"})
    text.write_text("abcdefgh ijkl mnop " * 20)
    run("calibrate", source, tmp_path / "static", "--text", text, "--window", 32, "--device", "cpu", *exclude)
    new = tensors(tmp_path / "static")
    kept = [name for name in wide if f"{name}_scale" not in new]
    assert any("experts" in name for name in kept)
    assert [name for name in kept if as_bytes(new[name]) != as_bytes(wide[name])] == []


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors", None])
def test_calibrate_says_what_the_model_does_not_have(dialect, tmp_path, folder, capsys):
    """New files are the model's own; tensors of the old ones that it lacks are named."""
    source, text = tmp_path / "source", tmp_path / "text.txt"
    run("quantize", folder, source, "--dialect", dialect) if dialect else shutil.copytree(folder, source)
    found = tensors(source) | {"model.extra.weight": torch.ones(4, 4), "speaker.table": torch.ones(3)}
    for path in source.glob("*.safetensors*"):
        path.unlink()
    save_file(found, source / "model.safetensors", metadata={"format": "pt"})
    text.write_text("abcdefgh ijkl mnop " * 20)
    capsys.readouterr()
    run("calibrate", source, tmp_path / "static", "--text", text, "--window", 32, "--device", "cpu")
    line, said = "left out: 2 tensors that are none of Qwen3MoeForCausalLM's: ", capsys.readouterr().out
    assert re.search(f"{line}(model.extra.weight, speaker.table|speaker.table, model.extra.weight)", said)
    # nor is it silent on other programs, where `quantize` is not
    assert ("loads these experts with wrong numbers" in said) == (dialect == "compressed-tensors")


def test_calibrate_on_a_full_disk_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    """And shows no traceback of safetensors' own error. ~ is expanded where the shell does not do it."""
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    def fails(model, path, *args, **options):
        Path(path).mkdir(exist_ok=True)
        (Path(path) / "config.json").touch()
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fails)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.txt").write_text("abcdefgh ijkl mnop " * 20)
    options = ["--text=~/text.txt", "--window", 32, "--recipe", "max", "--device", "cpu"]
    run("calibrate", folder, "~/static", *options, expect=2)
    assert capsys.readouterr().err.endswith("moe-nvfp4 calibrate: error: No space left on device\n")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("dialect, linears, warned", [
    ("compressed-tensors", "attention", True), ("compressed-tensors", "mlp", False), ("modelopt", "attention", False)
])  # fmt: skip
def test_attention_beside_an_indexer(dialect, linears, warned, tmp_path, capsys):
    """Over which vLLM passes without a word, in the names of one dialect."""
    config = minimax_m3().config
    config.text_config.layer_types = ["full_attention", "minimax_m3_sparse"]
    source = tmp_path / "source"
    make(lambda: transformers.MiniMaxM3SparseForConditionalGeneration(config)).save_pretrained(source)
    assert any(name.endswith("self_attn.index_q_proj.weight") for name in tensors(source))
    run("quantize", source, tmp_path / "new", "--dialect", dialect, "--linears", linears, "--recipe", "max")
    line = "vLLM 0.32 by itself passes over 4-bit q, k and v beside an indexer's (MiniMax-M3)"
    for text in (capsys.readouterr().out, (tmp_path / "new/README.md").read_text()):
        assert (line in text) is warned
