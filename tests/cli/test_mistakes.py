"""What cannot be done ends in one line, which says what to do, and in exit code 2."""

import argparse
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4.cli import models
from tests.cli.commands import mistake, run
from tests.common import ROOT
from tests.models import tensors


def test_mistakes_are_one_line_and_exit_code_2(folder, tmp_path, monkeypatch, capsys):
    from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

    small = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**small)).save_pretrained(tmp_path / "dense")
    run("quantize", folder, tmp_path / "done", "--recipe", "max")
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "body")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "foreign.txt").write_text("яя " * 100, "utf-8")
    (tmp_path / "utf16.txt").write_text("of another encoding", "utf-16")
    shutil.copytree(tmp_path / "done", tmp_path / "lacking")
    save_file({n: t for n, t in tensors(tmp_path / "done").items() if "q_norm" not in n},
              tmp_path / "lacking" / "model.safetensors")  # fmt: skip
    awq = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "awq").mkdir()
    (tmp_path / "awq" / "config.json").write_text(json.dumps(awq))
    for name, pattern, cut in (("cut", "*.safetensors", 100), ("no-tokenizer", "tokenizer.json", 5)):
        shutil.copytree(folder, tmp_path / name)
        path = next((tmp_path / name).glob(pattern))
        path.write_bytes(path.read_bytes()[:-cut])
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOE_NVFP4_CACHE", os.environ.get("MOE_NVFP4_CACHE", ""))  # the last case sets another
    cases = [
        (("quantize", folder, tmp_path / "x", "--verify", "--dry-run"), "--verify would have no effect with --dry-run"),
        (
            ("quantize", folder, tmp_path / "x", "--recipe", "gptq", "--importance", tmp_path / "file"),
            "--importance would have no effect on recipe gptq",
        ),
        (("bench", folder, "--layer-only"), "MODEL and --max-new-tokens would have no effect with --layer-only"),
        (("importance", folder, tmp_path / "file" / "x"), "file is read-only or not a folder; name another place"),
        (("calibrate", folder, tmp_path / "file" / "x"), "file is read-only or not a folder; name another place"),
        (("compare", tmp_path / "cut", "--text", ROOT / "README.md"), "is truncated or is not a safetensors file"),
        (("importance", tmp_path / "cut", tmp_path / "x"), "is truncated or is not a safetensors file"),
        (("importance", tmp_path / "no-tokenizer", tmp_path / "x", "--text", ROOT / "README.md"), "the tokenizer of"),
        (("importance", folder, tmp_path / "x", "--text", tmp_path / "utf16.txt"), "utf16.txt is not UTF-8 text"),
        (
            ("compare", tmp_path / "body", "--text", ROOT / "README.md"),
            "Qwen3MoeModel, which does not predict the next",
        ),
        (("generate", tmp_path / "body"), "name a model with a language model's head"),
        (("info", tmp_path / "nothing"), "does not exist"),
        (("serve", tmp_path / "nothing"), "does not exist"),
        (("bench", "--shape", "17", "8", "3", "1"), "H 17 and I 8 must be multiples of 8 for the bf16 product"),
        (("generate", folder, "--cpu-experts", "all", "--device", "cpu"), "keeps experts beside a GPU, and the model"),
        (("generate", folder, "--map-files", "--device", "cpu"), "map_files: the experts of these files are dense"),
        (("info", tmp_path), "has no config.json"),
        (("info", tmp_path / "dense"), "no experts"),
        (("info", tmp_path / "lacking"), "the files lack 2 of the 25 tensors of Qwen3MoeForCausalLM"),
        (("quantize", tmp_path / "dense", tmp_path / "x"), "LlamaForCausalLM has no experts to quantize"),
        (("quantize", folder, tmp_path / "done"), "exists: name a folder that does not"),
        (("quantize", tmp_path / "done", tmp_path / "x"), "is quantized already"),
        (
            ("quantize", folder, tmp_path / "x", "--include", "nope*"),
            "model.layers.0.mlp.experts, model.layers.1.mlp.experts, ... (2) are all excluded, or not included",
        ),
        (
            ("quantize", tmp_path / "done", tmp_path / "x", "--dialect", "compressed-tensors", "--recipe", "max"),
            "--recipe would have no effect",
        ),
        (
            ("quantize", tmp_path / "done", tmp_path / "x", "--dialect", "compressed-tensors", "--activations", "bf16"),
            "--activations would have no effect",
        ),
        (("info", "nobody/nothing"), "'nobody/nothing' is no folder here, and the Hugging Face Hub does not give it"),
        (("verify", "nobody/nothing"), "'nobody/nothing' is no folder here"),
        (
            ("generate", tmp_path / "awq"),
            "awq: the files are quantized with 'awq'; this library reads fp8 (in blocks), ",
        ),
        (("info", folder, "--exclude", "nope*"), "--exclude 'nope*' matches no experts module"),
        (("info", tmp_path / "done", "--exclude", "model.layers.0.*"), "--exclude would have no effect"),
        (
            ("generate", tmp_path / "done", "--recipe", "max", "--exclude", "*"),
            "--recipe and --exclude would have no effect",
        ),
        (
            ("calibrate", tmp_path / "done", tmp_path / "x", "--text", ROOT / "README.md", "--recipe", "mse"),
            "--recipe would have no effect",
        ),
        (("compare", folder), "--text FILE"),
        (("compare", folder, "--text", tmp_path / "short.txt"), "less than one window of 128"),
        (("compare", folder, "--text", tmp_path / "foreign.txt"), "67% of the text's tokens are '<unk>'"),
        (("compare", tmp_path / "done", "--text", tmp_path / "short.txt"), "needs the original"),
        (("compile", "Qwen/Qwen3-30B-A3B", "--arch", "sm_80", "--out", tmp_path / "file"), "Not a directory"),
    ]
    for args, message in cases:
        assert message in mistake(args, capsys)
    assert not (tmp_path / "x").exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a machine with a GPU has some of these")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "meta", "foo"])
@pytest.mark.parametrize("command", ["generate", "quantize", "calibrate", "compare"])
def test_a_device_that_is_not_there(command, device, folder, tmp_path, capsys):
    destination = {"quantize": [tmp_path / "x"], "calibrate": [tmp_path / "x"]}.get(command, [])
    text = ["--text", ROOT / "README.md"] if command in ("calibrate", "compare") else []
    error = mistake([command, folder, *destination, *text, "--device", device], capsys)
    assert {"foo": "write cpu, cuda or cuda:1", "meta": "write cpu or cuda"}.get(device, "finds cpu") in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "X", "--prompt", ""], "the prompt is empty"),
        (["generate", "X", "--prompt", " \n"], "the prompt is empty"),
        (["generate", "X", "--max-new-tokens", 0], "'0' is not a whole number from 1"),
        (["generate", "X", "--max-new-tokens", 10**30], "is not a whole number from 1 to 2147483647"),
        (["generate", "X", "--temperature", "nan"], "'nan' is not a number of at least 0"),
        (["generate", "X", "--temperature", "-1"], "'-1' is not a number of at least 0"),
        (["generate", "X", "--temperature", "inf"], "'inf' is not a number of at least 0"),
        (["generate", "X", "--temperature", "hot"], "'hot' is not a number of at least 0"),
        (["generate", "X", "--recipe", "best"], "invalid choice: 'best'"),
        (["generate", "X", "--cpu-experts", "most"], "'most' is not a number of layers, all or auto"),
        (["chat", "X", "--cpu-experts", "-1"], "'-1' is not a number of layers, all or auto"),
        (["quantize", "X", "Y", "--workers", 0], "'0' is not a whole number from 1 to 256"),
        (["quantize", "X", "Y", "--workers", 1000], "'1000' is not a whole number from 1 to 256"),
        (["calibrate", "X", "Y", "--window", 0], "'0' is not a whole number from 1"),
        (["calibrate", "X", "Y", "--windows", "-1"], "'-1' is not a whole number from 1"),
        (["compare", "X", "--windows", "x"], "'x' is not a whole number from 1"),
        (["compare", "X", "--window", 1], "'1' is not a whole number from 2"),
    ],
)
def test_values_out_of_range(args, message, capsys):
    error = mistake(args, capsys)
    assert message in error and f"(see moe-nvfp4 {args[0]} --help)" in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "is not JSON (maximum recursion depth"),
        ("3", "is not a JSON object"),
        ({"hidden_act": "foo"}, "KeyError: 'foo'"),
        ({"num_hidden_layers": "two"}, "expected int, got str"),
        ({"dtype": "float3"}, "float3"),
        ({"architectures": ["AutoConfig"]}, "has no model ['AutoConfig']"),
        ({"architectures": None}, "config.json has no architectures"),
    ],
    ids=["nested", "number", "gate", "layers", "dtype", "auto class", "no class"],
)
def test_a_config_that_makes_no_sense(changes, message, folder, tmp_path, capsys):
    config = json.loads((folder / "config.json").read_text())
    text = changes if isinstance(changes, str) else json.dumps(config | changes)
    (tmp_path / "config.json").write_text(text)
    for command in ("info", "generate"):
        error = mistake([command, tmp_path], capsys)
        assert message in error and len(error) < 600


def test_texts_in_files_of_other_forms(tmp_path):
    """Keys, quotes and escapes would be measured with the text."""

    def read(name, text):
        (tmp_path / name).write_text(text, "utf-8")
        return models.text_of(argparse.Namespace(text=tmp_path / name, model="x", command="compare"))

    lines = '{"text": "caf\\u00e9\\nand tea", "id": 1}\n\n{"text": "more\u2028"}\n'
    assert read("a.jsonl", lines) == "café\nand tea\n\nmore\u2028"
    assert read("a.txt", lines) == lines
    for name, text in (
        ("b.jsonl", '{"messages": []}\n'), ("c.jsonl", '{"text": 3}\n'), ("d.jsonl", "plain\n"), ("e.JSONL", "[]"),
        ("n.ndjson", '{"a": 1}'), ("r.jsonl", "[" * 100000), ("f.json", '[{"text": "a"}]'), ("g.csv", "text\na\n"),
        ("h.jsonl", ""),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf'{name} is no plain text: .* the "text" of each line .* a \.txt file'):
            read(name, text)
