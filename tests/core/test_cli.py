"""The command line, as a person types it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_nvfp4 import cli, demo
from tests.models import make, qwen3_moe, tensors

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small bf16 checkpoint with a tokenizer made here, byte by byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("cli") / "bf16"
    make(qwen3_moe).save_pretrained(path)
    vocabulary = {chr(i + 32): i for i in range(95)} | {"<unk>": 95}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    (path / "NOTES.txt").write_text("kept")
    return path


def run(*args, expect=0):
    assert cli.main([str(a) for a in args]) == expect


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
    # 2 layers of 8 * 3 * 64 * 48 weights: 2 bytes each, then 9 bytes for 16 and 3 scales per expert
    assert "2 layers of experts, bf16, would become NVFP4" in said
    assert f"experts: {2 * 147456 / 1e3:.1f} KB in bf16" in said

    other = tmp_path / "out" / "other"
    run("quantize", destination, other, "--dialect", "compressed-tensors")
    capsys.readouterr()
    run("info", other)
    assert "1 layers of experts, NVFP4 of compressed-tensors" in capsys.readouterr().out
    for source in (folder, destination, other):
        run("generate", source, "--raw", "--prompt", "Hello", "--max-new-tokens", 5, "--device", "cpu")
        said = capsys.readouterr().out
        assert re.search(r"speed: +[\d.]+ tokens/s over 5 tokens", said)
        assert re.search(r"experts: [\d.]+ KB in bf16, [\d.]+ KB in NVFP4 \(3\.\d\dx smaller\)", said)


def test_compare(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijkl mnop " * 20)
    run("compare", folder, "--text", text, "--window", 32, "--windows", 3, "--recipe", "max", "--device", "cpu")
    said = capsys.readouterr().out
    rows = {m[1]: [float(v) for v in m.groups()[1:]] for m in
            re.finditer(r"^(bf16|W4A16|W4A4) +([\d.]+) +([\d.]+) +([\d.]+)%$", said, re.M)}  # fmt: skip
    assert rows["bf16"][1:] == [0.0, 100.0]
    assert 0 < rows["W4A16"][1] < rows["W4A4"][1], "activations in 4 bits cost more"
    assert "93 tokens in windows of 32" in said


def test_calibrate(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijkl mnop " * 20)
    run("calibrate", folder, tmp_path / "static", "--text", text, "--window", 32, "--windows", 3, "--device", "cpu")
    assert "static scales from 96 tokens" in capsys.readouterr().out
    found = tensors(tmp_path / "static")
    scales = {k: v.item() for k, v in found.items() if k.endswith("up_proj.input_scale")}
    assert len(scales) == 16 and len(set(scales.values())) == 2, "every expert has its layer's"
    run("verify", tmp_path / "static")
    run("generate", tmp_path / "static", "--raw", "--prompt", "Hello", "--max-new-tokens", 5, "--device", "cpu")
    run("calibrate", folder, tmp_path / "static", "--text", text, expect=2)
    assert "exists: name a folder that does not" in capsys.readouterr().err


def test_an_interrupted_quantize_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    from moe_nvfp4.quantize.checkpoint import ShardWriter

    def fails(self, name, data, offset=0):
        raise OSError("No space left on device")

    monkeypatch.setattr(ShardWriter, "write", fails)
    run("quantize", folder, tmp_path / "nvfp4", "--recipe", "max", expect=2)
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_quantize_verify_and_back(folder, tmp_path, capsys):
    """bf16 -> compressed-tensors -> ModelOpt is bf16 -> ModelOpt; verify says so."""
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


def test_mistakes_are_one_line_and_exit_code_2(folder, tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**small)).save_pretrained(tmp_path / "dense")
    run("quantize", folder, tmp_path / "done", "--recipe", "max")
    (tmp_path / "short.txt").write_text("short")
    cases = [
        (("info", tmp_path / "nothing"), "does not exist"),
        (("info", tmp_path), "has no config.json"),
        (("info", tmp_path / "dense"), "no experts"),
        (("quantize", tmp_path / "dense", tmp_path / "x"), "LlamaForCausalLM has no experts to quantize"),
        (("quantize", folder, tmp_path / "done"), "exists: name a folder that does not"),
        (("quantize", tmp_path / "done", tmp_path / "x"), "is quantized already"),
        (("compare", folder), "--text FILE"),
        (("compare", folder, "--text", tmp_path / "short.txt"), "less than one window of 512"),
        (("compare", tmp_path / "done", "--text", tmp_path / "short.txt"), "needs the original"),
    ]
    for args, message in cases:
        capsys.readouterr()
        run(*args, expect=2)
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith(f"moe-nvfp4 {args[0]}: error: ") and message in error
    assert not (tmp_path / "x").exists()


def test_help_teaches(capsys):
    for args in (["--help"], ["generate", "--help"], ["quantize", "--help"], ["info", "--help"], ["compare", "--help"],
                 ["verify", "--help"], ["calibrate", "--help"]):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            cli.main(args)
        assert stop.value.code == 0
    said = capsys.readouterr().out
    for word in ("moe-nvfp4 quantize ./Qwen3-30B-A3B", "W4A16", "wildcards", "'demo' makes a small one"):
        assert word in said
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "demo", "--recipe", "best"])
    assert stop.value.code == 2


def test_python_dash_m():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moe_nvfp4", "info", "/no/such/model"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT.parent)
    assert result.returncode == 2 and "does not exist" in result.stderr and "Traceback" not in result.stderr


def test_the_demo_answers(capsys):
    """The README's first command: a real model with 4-bit experts says something true."""
    try:
        demo.demo_path()
    except demo.DemoError as error:
        pytest.skip(f"the demo model cannot be made here: {error}")
    run("generate", "demo", "--max-new-tokens", 12, "--device", "cpu")
    said = capsys.readouterr().out
    assert "Paris" in said
    assert "159.3 MB in bf16, 44.8 MB in NVFP4 (3.55x smaller)" in said.replace("3.56x", "3.55x")
