"""examples/benchmark_vllm.py: what it starts, says and leaves behind, with stand-ins for vLLM's server and client.

By hand, its numbers against the server's own counters.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
import time
import urllib.request
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.common import ROOT
from tests.integrations.vllm_engine import SETTINGS

vllm = pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
os.environ |= SETTINGS

ARGUMENTS = Namespace(
    layers=1, batches=[1, 4], prompt=6, tokens=5, prefill=40, tensor_parallel=1, expert_parallel=False
)
TINY = dict(hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, intermediate_size=64,
            num_attention_heads=2, num_key_value_heads=2, head_dim=32)  # fmt: skip

# Answers /health, and has a process that does not end when it is asked to.
ANSWERS = """
import http.server, subprocess, sys
waits = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", waits])
print("child", child.pid, flush=True)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""
MEASURES = """
import json, pathlib, sys
value = lambda flag: sys.argv[sys.argv.index(flag) + 1]
n = int(value("--num-prompts")) - {lost}
result = dict(completed=n, total_input_tokens=n * int(value("--random-input-len")), given=sys.argv[1:],
              total_output_tokens=n * int(value("--random-output-len")))
pathlib.Path(value("--result-dir"), value("--result-filename")).write_text(json.dumps(result))
print("what the client says")
"""

TOLD = """
spread = spread_random_weights
def spread_random_weights():
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    spread()
    fill = DummyModelLoader.load_weights
    DummyModelLoader.load_weights = lambda *given: (fill(*given), print("spread weights", flush=True))
"""


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmark_vllm", ROOT / "examples" / "benchmark_vllm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SHAPES", module.SHAPES | TINY)
    for name in ("PYTHONPATH", "no_proxy"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # what it sets ends with the test
    return module


def ends(pid):
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


@pytest.mark.parametrize("error", [None, RuntimeError("of the client"), KeyboardInterrupt(), SystemExit(143)])
def test_a_server_is_ended_with_its_processes(benchmark, monkeypatch, tmp_path, capsys, error):
    monkeypatch.setattr(benchmark, "SERVE", (sys.executable, "-c", ANSWERS))
    with contextlib.suppress(*[type(error)] if error else []), benchmark.server("NVFP4", tmp_path, {}) as url:
        assert urllib.request.urlopen(f"{url}/health").status == 200
        child = int(re.search(r"child (\d+)", (tmp_path / "log").read_text())[1])
        assert not benchmark.answers("http://127.0.0.1:1")
        if error:
            raise error
    assert ends(child) and not benchmark.answers(url)
    said = capsys.readouterr().err
    assert "starting vllm serve of NVFP4: 0 s" in said
    assert (f"child {child}" in said) is isinstance(error, RuntimeError)  # its log


def test_a_server_that_does_not_answer(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "SERVE", (sys.executable, "-c", "print('no such model'); raise SystemExit(7)"))
    with pytest.raises(RuntimeError, match="NVFP4 ended with exit code 7"), benchmark.server("NVFP4", tmp_path, {}):
        pass
    assert "no such model" in capsys.readouterr().err
    slow = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    monkeypatch.setattr(benchmark, "SERVE", (sys.executable, "-c", slow))
    monkeypatch.setattr(benchmark, "START", 2)
    with pytest.raises(TimeoutError, match=r"NVFP4 has not answered http.*/health in 2 s"):  # noqa: SIM117
        with benchmark.server("NVFP4", tmp_path, {}):
            pass
    assert ends(int(re.search(r"pid (\d+)", capsys.readouterr().err)[1]))


def test_requests_that_fail_are_an_error(benchmark, monkeypatch, tmp_path):
    """Else a server that refuses half of the requests would look fast."""
    monkeypatch.setattr(benchmark, "BENCH", (sys.executable, "-c", MEASURES.format(lost=0)))
    given = benchmark.bench("http://a", tmp_path, 4, 6, 5, 3, [Path("0"), Path("1")])["given"]
    for flag, values in (("--num-prompts", ["12"]), ("--max-concurrency", ["4"]), ("--num-warmups", ["4"]),
                         ("--base-url", ["http://a"]), ("--lora-modules", ["0", "1"])):  # fmt: skip
        assert given[given.index(flag) + 1 :][: len(values)] == values, flag
    for client in (MEASURES.format(lost=1), "raise SystemExit('what the client says')"):
        monkeypatch.setattr(benchmark, "BENCH", (sys.executable, "-c", client))
        with pytest.raises(RuntimeError, match=r"(?s)what the client says.*not \[12, 72, 60\]"):
            benchmark.bench("http://a", tmp_path, 4, 6, 5, 3)


def test_the_table(benchmark, monkeypatch, tmp_path, capsys):
    """Tokens/s are those of answers, for the long prompt those of the prompt; a server at a time."""
    seconds, events = {"bf16": 4.0, "NVFP4": 2.0, "2 LoRA": 8.0}, []

    @contextlib.contextmanager
    def server(name, folder, options):
        assert options.get("lora_modules") == (
            [f"{i}={tmp_path / str(i)}" for i in range(2)] if "LoRA" in name else None
        )
        events.append(name)
        yield "http://a"
        events.append("ended")

    def bench(url, folder, batch, prompt, new, rounds, adapters):
        n = batch * rounds
        assert len(adapters) == (2 if "LoRA" in folder.name else 0)
        return dict(duration=seconds[folder.name], total_input_tokens=n * prompt, total_output_tokens=n * new,
                    median_ttft_ms=12.34, median_tpot_ms=5.678)  # fmt: skip

    for name, stand_in in (("server", server), ("bench", bench), ("tokenizer", lambda folder: None)):
        monkeypatch.setattr(benchmark, name, stand_in)
    monkeypatch.setattr(benchmark.signal, "signal", lambda *_: None)
    points = [("decode, batch 4", 4, 6, 5), ("prefill, 40", 1, 40, 1)]
    arguments = Namespace(**vars(ARGUMENTS), rounds=2)
    benchmark.over_http({"bf16": 0, "NVFP4": 0, "2 LoRA": 2}, points, False, arguments, tmp_path)
    assert events == ["bf16", "ended", "NVFP4", "ended", "2 LoRA", "ended"]
    rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["tokens/s", "x bf16", "first token, ms", "per token, ms"],
        ["bf16", "decode, batch 4", "10.0", "1.00", "12.3", "5.68"],  # 4 clients * 2 rounds * 5 tokens in 4 s
        ["bf16", "prefill, 40", "20.0", "1.00", "12.3", "-"],
        ["NVFP4", "decode, batch 4", "20.0", "2.00", "12.3", "5.68"],
        ["NVFP4", "prefill, 40", "40.0", "2.00", "12.3", "-"],
        ["2 LoRA", "decode, batch 4", "5.0", "0.50", "12.3", "5.68"],
        ["2 LoRA", "prefill, 40", "10.0", "0.50", "12.3", "-"],
    ]


def test_a_server_gets_the_options_of_an_engine(benchmark, tmp_path):
    """vLLM's own parser makes of the flags what `LLM` is given."""
    from vllm import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    empty = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(tmp_path)]))
    for gpu in (False, True):
        (tmp_path / str(gpu)).mkdir()
        for name, adapters in {
            "bf16": 0,
            "Marlin": 0,
            "NVFP4": 0,
            **dict.fromkeys(benchmark.OPTIONS, 0),
            "2 LoRA": 2,
        }.items():
            folder, options = benchmark.engine(name, adapters, gpu, ARGUMENTS, tmp_path / str(gpu))
            flags = benchmark.flags({"model": str(folder), **options})
            found = AsyncEngineArgs.from_cli_args(parser.parse_args(flags))
            expected = EngineArgs(model=str(folder), **options)
            for field in dataclasses.fields(EngineArgs):
                value = getattr(found, field.name)
                if field.name in options:
                    wanted = getattr(expected, field.name)
                    assert (set(value) if isinstance(wanted, set) else value) == wanted, (name, field.name)
                elif field.name != "model":
                    assert value == getattr(empty, field.name), (name, field.name)
            assert (found.quantization == "moe_nvfp4") is (name not in ("bf16", "Marlin", "offload"))


def test_random_weights_reach_all_experts(benchmark, monkeypatch):
    """vLLM's own leave codes as they are in memory. 0.26 and 0.32 fill weights by different functions."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    monkeypatch.setattr(DummyModelLoader, "load_weights", DummyModelLoader.load_weights)  # undone after the test
    benchmark.spread_random_weights()
    model = torch.nn.Module()
    for name, shape, dtype in (
        ("codes", (64, 64), torch.uint8), ("sf", (64, 8), torch.float8_e4m3fn), ("weight_scale_2", (4,), torch.float32),
        ("norm", (64,), torch.bfloat16), ("gate", (64, 64), torch.bfloat16),
    ):  # fmt: skip
        setattr(model, name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, None)
    assert len(model.codes.unique()) > 200 and (model.sf.float() == 1).all()
    assert (model.weight_scale_2 == 1 / 256).all() and (model.norm == 1).all() and 0.015 < model.gate.std() < 0.025


def test_the_plug_in_is_found(benchmark, monkeypatch, tmp_path):
    from vllm.plugins import load_plugins_by_group

    monkeypatch.setenv("VLLM_PLUGINS", "moe_nvfp4")
    benchmark.plug_in(tmp_path / "plug_in")
    monkeypatch.syspath_prepend(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    found = load_plugins_by_group("vllm.general_plugins")
    monkeypatch.delitem(sys.modules, "benchmark_vllm")
    assert sorted(found) == ["moe_nvfp4", "weights"]
    assert found["weights"].__code__.co_filename == str(tmp_path / "plug_in" / "benchmark_vllm.py")


def test_a_token_is_a_word(benchmark, tmp_path):
    from transformers import AutoTokenizer

    folder, _ = benchmark.engine("NVFP4", 0, False, ARGUMENTS, tmp_path)
    benchmark.tokenizer(folder)
    tokens = list(range(1024))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens and not tokenizer.all_special_ids


@pytest.mark.slow  # a server and three clients that import vLLM: a minute, by hand
def test_the_numbers_are_those_of_the_server(benchmark, monkeypatch, tmp_path):
    """Tokens by the server's own counters: with the warm-up, and no others."""

    def counted(url):
        said = urllib.request.urlopen(f"{url}/metrics").read().decode()
        return [sum(float(v) for v in re.findall(rf"^vllm:{name}_tokens_total{{.*}} (\S+)$", said, re.M))
                for name in ("prompt", "generation")]  # fmt: skip

    benchmark.plug_in(tmp_path / "plug_in")
    with open(tmp_path / "plug_in" / "benchmark_vllm.py", "a") as plug_in:
        plug_in.write(TOLD)
    folder, options = benchmark.engine("NVFP4", 0, False, ARGUMENTS, tmp_path)
    benchmark.tokenizer(folder)
    with benchmark.server("NVFP4", folder, options) as url:
        for batch, prompt, new in ((1, 6, 5), (4, 6, 5), (1, 40, 1)):
            before, began = counted(url), time.monotonic()
            found = benchmark.bench(url, folder, batch, prompt, new, 3)
            took = time.monotonic() - began
            requests = batch * 3 + batch  # these are the warm-up
            assert [b - a for a, b in zip(before, counted(url), strict=True)] == [requests * prompt, requests * new]
            assert 0 < found["duration"] < took and 0 < found["median_ttft_ms"] < 1e3 * found["duration"]
            assert found["median_tpot_ms"] * (new - 1) < 1e3 * found["duration"]
        assert json.loads((folder / "config.json").read_text())["hidden_size"] == TINY["hidden_size"]
    assert "spread weights" in (folder / "log").read_text()
