"""`moe-nvfp4 serve` chooses an engine and passes the rest on; tests/integrations/test_vllm.py tests the servers."""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
from transformers import PretrainedConfig
from transformers.utils import import_utils

from moe_nvfp4 import cli
from moe_nvfp4.integrations import serve
from moe_nvfp4.quantize.convert import convert_checkpoint
from tests.models import folder, qwen3_moe


def installed(monkeypatch, *names):
    monkeypatch.setattr(serve, "find_spec", lambda name: name in names or None)
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: "fastapi" in names)


def test_vllm_where_it_is_installed(monkeypatch):
    installed(monkeypatch, "vllm", "transformers")
    for engine in (None, "vllm"):
        command = serve.serve_command("some/model", engine, ["--port", "1"])
        assert command[:3] == [sys.executable, "-P", "-c"]
        assert command[4:] == ["serve", "some/model", "--quantization", "moe_nvfp4", "--port", "1"]


def test_plugins_of_vllm_include_this_one(monkeypatch):
    """Else vLLM would run NVFP4 files by kernels of its own, without a word."""
    installed(monkeypatch, "vllm")
    for plugins, allowed in (("lora_filesystem_resolver", False), ("", False), ("other,moe_nvfp4", True)):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        with nullcontext() if allowed else pytest.raises(ValueError, match="add moe_nvfp4 to it"):
            serve.serve_command("some/model")


def test_vllm_is_told_of_files_that_become_nvfp4(monkeypatch, tmp_path):
    installed(monkeypatch, "vllm", "transformers")
    for i, (said, told) in enumerate((
        ({"quant_method": "mxfp4"}, True), ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False), (None, False),
    )):  # fmt: skip
        PretrainedConfig(quantization_config=said).save_pretrained(tmp_path / str(i))
        command = serve.serve_command(str(tmp_path / str(i)), "vllm", ["--port", "1"])
        assert (command[6:8] == ["--load-format", "moe_nvfp4"]) is told and command[-2:] == ["--port", "1"], command
        for options in (["--load_format=dummy"], [f"--config={yaml_file(tmp_path, 'load_format: dummy')}"]):
            assert "--load-format" not in serve.serve_command(str(tmp_path / str(i)), "vllm", options)


def yaml_file(folder, text):
    (folder / "options.yaml").write_text(text)
    return str(folder / "options.yaml")


READS_FP8 = """
from transformers.quantizers.auto import AutoQuantizationConfig
print(type(AutoQuantizationConfig.from_dict({"quant_method": "fp8", "weight_block_size": [128, 128]})).__name__)
"""


@pytest.mark.slow
def test_else_transformers_which_reads_nvfp4_folders(monkeypatch, tmp_path):
    """Our import precedes its command line, so that its loader finds our reader. What is in the current folder is not
    imported: in a checkout that is another copy."""
    bf16 = folder(tmp_path, qwen3_moe)
    convert_checkpoint(bf16, tmp_path / "nvfp4")
    installed(monkeypatch, "transformers", "fastapi", "accelerate")
    command = serve.serve_command(str(tmp_path / "nvfp4"), options=["--port", "1"])
    assert command[4:] == ["serve", str(tmp_path / "nvfp4"), "--port", "1"]
    with pytest.raises(ValueError, match="not an NVFP4 checkpoint.*moe-nvfp4 quantize .*bf16 DST.*install vLLM"):
        serve.serve_command(str(bf16))
    code = command[3].partition("from transformers.cli")[0] + READS_FP8
    found = subprocess.run([*command[:3], code], capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout == "MoeNvfp4Config\n", found.stderr
    if importlib.util.find_spec("typer") is None:
        pytest.skip("the command line of transformers needs typer")
    command[command.index("serve") + 1 :] = ["--help"]
    (tmp_path / "moe_nvfp4.py").write_text("raise SystemExit('of the current folder')")
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0 and "continuous-batching" in found.stdout, found.stderr


def test_what_is_not_there_is_named(monkeypatch, capsys):
    installed(monkeypatch, "transformers")
    assert cli.main(["serve", "--engine", "vllm", "some/model"]) == 2
    assert "vllm is not installed: pip install vllm" in capsys.readouterr().err
    assert cli.main(["serve", "some/model"]) == 2
    assert 'packages that are missing: pip install "transformers[serving]", or' in capsys.readouterr().err
    installed(monkeypatch, "transformers", "fastapi")  # without accelerate, each request would end in an error
    assert cli.main(["serve", "--engine", "transformers", "some/model"]) == 2
    assert 'packages that are missing: pip install "transformers[serving]", or' in capsys.readouterr().err
    with pytest.raises(ValueError, match="engine must be one of vllm, transformers, got 'sglang'"):
        serve.serve_command("some/model", "sglang")


def test_a_model_on_the_hub_that_would_be_served_dense_is_refused(monkeypatch, capsys):
    installed(monkeypatch, "transformers", "fastapi", "accelerate")
    assert cli.main(["serve", "some/model"]) == 2
    assert "'some/model' is no folder here, and the Hugging Face Hub does not give it" in capsys.readouterr().err
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", lambda name: ({"model_type": "qwen3_moe"}, {}))
    with pytest.raises(ValueError, match="some/model is not an NVFP4 checkpoint.*quantize some/model DST"):
        serve.serve_command("some/model")


def test_options_after_the_model_are_the_engines(monkeypatch, capsys):
    installed(monkeypatch, "vllm")
    ran = []
    monkeypatch.setattr(os, "execv", lambda file, command: ran.append(command))
    assert cli.main(["serve", "some/model", "--port", "1", "--enforce-eager"]) == 0
    assert ran[0][-3:] == ["--port", "1", "--enforce-eager"]
    for options, text in [
        (["--engine", "transformers"], "--engine must stand before MODEL"),
        (["-qfp8"], "-qfp8: moe-nvfp4 serve gives --model and --quantization itself"),
        (["-q", "fp8"], "-q: moe-nvfp4 serve gives --model and --quantization itself"),
        (["--quantization=fp8"], "--quantization: moe-nvfp4 serve gives"),
        (["--port", "1", "--model", "another"], "--model: moe-nvfp4 serve gives"),
    ]:
        assert cli.main(["serve", "some/model", *options]) == 2 and len(ran) == 1
        assert text in capsys.readouterr().err


def test_experts_on_the_cpu_are_an_option_of_vllm(monkeypatch, tmp_path, capsys):
    installed(monkeypatch, "vllm", "transformers", "fastapi", "accelerate")
    ran = []
    monkeypatch.setattr(os, "execv", lambda file, command: ran.append(command))
    for given, number in (("12", 12), ("auto", "auto")):
        assert cli.main(["serve", "--cpu-experts", given, "some/model", "--port", "1"]) == 0
        place = ran[-1].index("--hf-overrides")
        assert json.loads(ran[-1][place + 1]) == {"moe_nvfp4": {"cpu_experts": number}}
        assert ran[-1][-2:] == ["--port", "1"]
    for arguments, text in [
        (["some/model", "--cpu-experts", "12"], "--cpu-experts must stand before MODEL"),
        (["--cpu-experts", "12", "some/model", "--hf-overrides={}"], 'say it there, {"moe_nvfp4": {"cpu_experts": 12'),
        (["--cpu-experts", "12", "some/model", "--hf_overrides", "{}"], "vLLM takes the latter once"),
        (["--cpu-experts", "12", "some/model", "--hf-over", "{}"], "vLLM takes the latter once"),
        (["--cpu-experts", "12", "some/model", "--hf_overrides.a.b", "c"], "vLLM takes the latter once"),
        (
            ["--cpu-experts", "12", "some/model", "--config", yaml_file(tmp_path, "hf-overrides: {rope_theta: 1}")],
            "vLLM takes the latter once",
        ),
        (["--engine", "transformers", "--cpu-experts", "all", "some/model"], "no option for it: install vLLM"),
    ]:
        assert cli.main(["serve", *arguments]) == 2 and len(ran) == 2
        assert text in capsys.readouterr().err
