"""The command line, used as a person would."""

import importlib.metadata
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4 import backends, cli, demo
from moe_nvfp4.cli import answers, bench, info, options
from moe_nvfp4.progress import progress_bar
from tests.common import made_demo
from tests.integrations.test_graphs import recorded  # noqa: F401
from tests.models import make, qwen3_moe, tensors

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small bf16 checkpoint with a tokenizer made here, byte by byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("cli") / "bf16"
    make(qwen3_moe).save_pretrained(path)
    vocabulary = {chr(i + 32): i for i in range(95)} | {"<unk>": 95}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
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
    assert len(re.findall(r"mlp.experts", said)) == 1
    assert re.search(r"  2 x model.layers.0-1.mlp.experts +Qwen3MoeExperts +E 8  H 64  I 48 +silu", said)
    # 2 layers of 8 * 3 * 64 * 48 weights: 2 bytes each, then 9 bytes for 16 and 3 scales per expert
    assert "2 layers of experts, bf16, would become NVFP4" in said
    assert f"experts: {2 * 147456 / 1e3:.1f} KB in bf16" in said

    other = tmp_path / "out" / "other"
    run("quantize", destination, other, "--dialect", "compressed-tensors")
    capsys.readouterr()
    run("info", other)
    assert "1 layers of experts, NVFP4 of compressed-tensors" in capsys.readouterr().out
    for source, *more in ((folder,), (destination,), (other,), (other, "--map-files")):
        run("generate", source, "--raw", "--prompt", "Hello", "--max-new-tokens", 5, "--device", "cpu", *more)
        said = capsys.readouterr().out
        assert re.search(r"speed: +[\d.]+ tokens/s over 5 tokens", said)
        assert re.search(r"experts: [\d.]+ KB in bf16, [\d.]+ KB in NVFP4 \(3\.\d\dx smaller\)", said)


CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def talkative(folder, tmp_path):
    """The same checkpoint with a chat template."""
    path = tmp_path / "talkative"
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).symlink_to(file)
    (path / "chat_template.jinja").write_text(CHAT)
    return path


def test_chat(talkative, monkeypatch, capsys):
    typed = ["Hi there", "", "\udcff, a byte", "more", "/new", "Hi there", "/reset", "Hi there", "/quit", "never asked"]
    lines = iter(typed)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    options = ["--max-new-tokens", 6, "--system", "short", "--device", "cpu", "--recipe", "max"]
    run("chat", talkative, *options, "--quiet")
    first, refused, second, anew, again = filter(None, capsys.readouterr().out.splitlines())
    assert "is not UTF-8 text" in refused
    assert next(lines) == "never asked"
    assert first == anew == again != second and 0 < len(first) <= 6
    lines = iter([])

    def no_more(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", no_more)
    run("chat", talkative, *options)
    assert capsys.readouterr().out == "/help lists the commands\n\n"


def test_a_command_of_chat_never_reaches_the_model(talkative, monkeypatch, capsys):
    from moe_nvfp4.cli import chat

    lines = iter(["/hlep", "/usr/bin", "/help me", " /usr/bin is a folder", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(chat.Talk, "ask", lambda self, text: print("asked", text))
    run("chat", talkative, "--device", "cpu", "--recipe", "max")
    _, misspelt, unknown, *helped, asked = filter(None, capsys.readouterr().out.splitlines())
    assert misspelt == "(there is no /hlep; did you mean /help?; /help lists the commands)"
    assert unknown == "(there is no /usr/bin; /help lists the commands)"
    assert all(any(line.startswith(word) for line in helped) for word in ("/help", "/new", "/quit", "Ctrl-C"))
    assert "/reset" in "".join(helped)
    assert asked == "asked /usr/bin is a folder"


NEVER = b"never sent"  # Ctrl-C follows


def test_chat_in_a_terminal(tmp_path):
    """Ctrl-C at the prompt does not end the program, and the arrow up brings back a line of an earlier run."""
    for module in ("pty", "fcntl", "termios", "readline"):
        pytest.importorskip(module, reason=f"Python without {module} here")
    import fcntl
    import pty
    import select
    import termios

    code = (
        "import sys; from moe_nvfp4 import cli; from moe_nvfp4.cli import chat\n"
        "chat.load_to_answer = lambda args: (None, type('Tokenizer', (), {'chat_template': ''}))\n"
        "chat.Talk.ask = lambda self, text: print('asked', text)\n"
        "sys.exit(cli.main(['chat', 'X']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOE_NVFP4_CACHE": str(tmp_path), "TERM": "dumb"}

    def talk(*typed):
        """What the terminal shows while these lines are typed, each after a prompt."""
        end, terminal = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=terminal, stdout=terminal, stderr=terminal, env=environment,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(terminal)
        shown = b""

        def read():
            assert select.select([end], [], [], 60)[0], shown
            return os.read(end, 1000)

        try:
            for i, text in enumerate(typed):
                while shown.count(b"\r\n> ") <= i:  # prompts; readline may write one again, but at the same line
                    shown += read()
                os.write(end, text)
                if text == NEVER:
                    while NEVER not in shown:
                        shown += read()
                    time.sleep(0.5)  # until readline waits for the next key, as it does while a person thinks
                    os.write(end, b"\x03")
            while piece := read():
                shown += piece
        except OSError:  # Linux's way to say that the other end was closed
            pass
        finally:
            os.close(end)
        assert process.wait(60) == 0, shown
        return shown.decode()

    shown = talk(b"first\n", NEVER, b"/quit\n")
    assert "asked first" in shown and "(/quit or Ctrl-D ends the program)" in shown and "asked never" not in shown
    assert "asked first" in talk(b"\x1b[A\x1b[A\n", b"\x04")


def test_ctrl_c_at_a_prompt_that_is_no_terminals_ends_chat(talkative, monkeypatch, capsys):
    def stop(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", stop)
    run("chat", talkative, "--device", "cpu", "--recipe", "max", expect=130)
    assert capsys.readouterr().err.endswith("\nmoe-nvfp4: interrupted\n")


@pytest.mark.parametrize("room", [[0, 0, 0], [1 << 30, 1 << 30, 1, 1 << 30]], ids=["cpu", "graphs"])  # bytes
def test_chat_answers_the_whole_conversation(room, talkative, request, monkeypatch, caplog):
    """Each reply is the model's answer to everything before it, with keys and values computed anew."""
    from transformers import AutoTokenizer

    from moe_nvfp4.cli.chat import Talk
    from moe_nvfp4.integrations.huggingface import swap_experts

    N = 4
    model = swap_experts(make(qwen3_moe, torch.float32), recipe="max").eval()  # bf16 has near ties
    tokenizer = AutoTokenizer.from_pretrained(talkative)
    counts = request.getfixturevalue("recorded")
    model._valid_auto_compile_criteria = lambda given, c: c.use_cache and given["past_key_values"].is_compileable
    talk, text, seen = Talk(model, tokenizer, "short", 0.0, N), "s:short;", []
    read = []  # tokens in each forward pass
    model.register_forward_pre_hook(lambda _, args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True)
    said = []
    for asked, free in zip(("Hi there", "more", "and more", "yet more"), room, strict=False):
        monkeypatch.setattr(answers, "_free_memory", lambda device, free=free: free)
        inputs = tokenizer(f"{text}u:{asked};a:", return_tensors="pt")
        prompt = inputs["input_ids"].shape[1]
        read.clear()
        said.append(talk.ask(asked))
        assert read[0] == prompt - (0 if free == 1 else len(seen)), "what was seen is not read again, if there is room"
        new = model.generate(**inputs, do_sample=False, max_new_tokens=N, use_cache=False)[0, prompt:]
        assert tokenizer.decode(new, skip_special_tokens=True) == said[-1]
        text, seen = f"{text}u:{asked};a:{said[-1]};", talk.seen
    assert len(seen) == prompt + N - 1, "the last token was not fed back"
    assert counts == {"captured": sum(free > 1 for free in room), "replayed": (N - 2) * sum(free > 1 for free in room)}
    assert ("a smaller --max-new-tokens" in caplog.text) == (1 in room)
    talk.forget()
    assert talk.ask("Hi there") == said[0]


@pytest.mark.parametrize("setting", [dict(cache_implementation="static"), dict(use_cache=False)], ids=str)
def test_chat_with_a_cache_of_the_models_own(setting, talkative, monkeypatch):
    """What generation_config.json says of the cache: the second answer still follows from the whole conversation."""
    from transformers import AutoTokenizer

    from moe_nvfp4.cli.chat import Talk
    from moe_nvfp4.integrations.huggingface import swap_experts

    model, tokenizer = swap_experts(make(qwen3_moe), recipe="max").eval(), AutoTokenizer.from_pretrained(talkative)
    first = Talk(model, tokenizer, None, 0.0, 4)
    want = [first.ask("Hi there"), first.ask("more")]
    model.generation_config.update(**setting)
    talk = Talk(model, tokenizer, None, 0.0, 4)
    assert [talk.ask("Hi there"), talk.ask("more")] == want


def test_names_and_letters_that_cannot_be_printed(folder, tmp_path, monkeypatch):
    """Under LC_ALL=C: a name of bytes that are no text, and letters that the terminal has no code for."""
    destination = tmp_path / os.fsdecode(b"\xe9 caf\xc3\xa9")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    run("quantize", folder, destination, "--recipe", "max")
    sys.stdout.flush()
    assert rb"\udce9 caf\xe9" in sys.stdout.buffer.getvalue()
    assert "# \ufffd café\n" in (destination / "README.md").read_text("utf-8")


def test_chat_goes_on_after_an_interruption(talkative, monkeypatch, capsys):
    from moe_nvfp4.cli import chat

    lines = iter(["first", "second"])

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    def interrupted(self, text):
        if text == "first":
            raise KeyboardInterrupt
        print("asked", text)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(chat.Talk, "ask", interrupted)
    run("chat", talkative, "--device", "cpu", "--recipe", "max")
    assert re.search("forgotten.*asked second", capsys.readouterr().out, re.S)


def test_generate_says_the_same_by_graphs(folder, request, monkeypatch, capsys):
    from transformers import Qwen3MoeForCausalLM

    counts = request.getfixturevalue("recorded")
    criteria = lambda self, given, config: given["past_key_values"].is_compileable
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_valid_auto_compile_criteria", criteria)
    said = []
    for n, free in ((4, 0), (4, 1 << 30), (1, 1 << 30)):
        monkeypatch.setattr(answers, "_free_memory", lambda device, free=free: free)
        torch.manual_seed(0)
        run("generate", folder, "--prompt", "Hello", "--max-new-tokens", n, "--temperature", 1, "--device", "cpu")
        said.append(capsys.readouterr().out.splitlines()[1])
    assert said[0] == said[1] and said[1].startswith(said[2])
    assert counts == {"captured": 1, "replayed": 2}


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
    rows = {m[1]: [float(v) for v in m.groups()[1:]] for m in
            re.finditer(r"^(bf16|W4A16|W4A4) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)%$", said, re.M)}  # fmt: skip
    assert rows["bf16"][1:] == [0.0, 0.0, 100.0]
    assert 0 < rows["W4A16"][2] < rows["W4A16"][1], "the median is of the less surprising half"
    assert 0 < rows["W4A16"][1] < rows["W4A4"][1], "activations in 4 bits cost more"
    assert "93 tokens in windows of 32" in said
    run("compare", folder, "--text", text, "--window", 32, "--windows", 3, "--recipe", "max", "--device", "cpu",
        "--activations", "nvfp4", "nvfp4_four_over_six")  # fmt: skip
    said = capsys.readouterr().out
    plain, better = (float(re.search(rf"^{name} +[\d.]+ +([\d.]+)", said, re.M)[1]) for name in ("W4A4", "W4A4 4/6"))
    assert plain == rows["W4A4"][1] != better and "W4A16" not in said


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


def test_calibrate_on_a_full_disk_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    """And shows no traceback of safetensors' own error. ~ is expanded where the shell does not do it."""
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    def fails(model, path):
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


def test_an_interrupted_quantize_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    from moe_nvfp4.quantize.files import ShardWriter

    def fails(self, name, data, offset=0):
        raise OSError("No space left on device")

    monkeypatch.setattr(ShardWriter, "write", fails)
    run("quantize", folder, tmp_path / "nvfp4", "--recipe", "max", expect=2)
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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


def test_the_model_card(folder, tmp_path, capsys):
    """The Hub's own parser finds the original's metadata and ours; the figures are those that verify prints."""
    from huggingface_hub import ModelCard

    source = tmp_path / "source"
    source.mkdir()
    for file in folder.iterdir():
        (source / file.name).hardlink_to(file)
    metadata = "license: apache-2.0\ntags: [chat, moe]\nlanguage: [nn, no]"
    (source / "README.md").write_text(f"---\n{metadata}\n---\n# Original\nIts text.\n")
    run("quantize", source, tmp_path / "plain", "--exclude", "model.layers.0.*", "--recipe", "max")
    run("quantize", source, tmp_path / "checked", "--verify", "--activations", "nvfp4", "--recipe", "max")
    said = capsys.readouterr().out
    plain, checked = (ModelCard.load(tmp_path / name / "README.md") for name in ("plain", "checked"))
    for card in (plain, checked):
        assert card.data.license == "apache-2.0" and card.data.tags == ["chat", "moe", "nvfp4"]
        assert card.data.language == ["nn", "no"]
        assert card.data.base_model_relation == "quantized" and card.data.base_model is None, "not a name on the Hub"
        assert card.text.count("Its text.") == 1
    assert "| not quantized: `model.layers.0.mlp.experts` | excluded |" in plain.text
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
    # a carried folder keeps its activations; a card with unreadable metadata becomes part of the new text
    for i, content in enumerate((b"\xff\xfe", b"---\n: : :\n---\nIts text.", b"---\n- a\n---\nIts text.")):
        (tmp_path / "checked" / "README.md").write_bytes(content)
        run("quantize", tmp_path / "checked", tmp_path / f"carried-{i}", "--dialect", "compressed-tensors")
        card = ModelCard.load(tmp_path / f"carried-{i}" / "README.md")
        assert card.data.tags == ["nvfp4", "moe"] and "| activations | NVFP4 (W4A4) |" in card.text
        assert content.decode(errors="replace") in card.text


def test_every_command_takes_demo_and_hub_names(folder, tmp_path, monkeypatch, capsys):
    """'demo' is our small checkpoint here; the hub returns a folder, and is asked only for a checkpoint's files."""
    monkeypatch.setattr(demo, "demo_path", lambda: folder)
    run("quantize", "demo", tmp_path / "nvfp4", "--recipe", "max", "--device", "cpu")
    capsys.readouterr()
    run("verify", tmp_path / "nvfp4", "--against", "demo")
    assert re.search(r"model.layers.1.mlp.experts +24 +0\.\d+", capsys.readouterr().out)

    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked = []

    def snapshot(name, **patterns):
        files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model",
                 "merges.txt", "chat_template.jinja", "modeling_x.py", "LICENSE.md", "original/params.json",
                 "original/consolidated.safetensors", "metal/model.bin", "pytorch_model.bin", "model.gguf",
                 "additional_chat_templates/tools.jinja", "figure.png"]  # fmt: skip
        asked.append((name, list(filter_repo_objects(files, **patterns))))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    run("verify", tmp_path / "nvfp4", "--against", "some/model")
    run("quantize", "some/model", tmp_path / "other", "--dry-run")
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model",
              "merges.txt", "chat_template.jinja", "modeling_x.py", "LICENSE.md"]  # fmt: skip
    assert asked == [("some/model", ["additional_chat_templates/tools.jinja"]), ("some/model", wanted)] * 2


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


def test_mistakes_are_one_line_and_exit_code_2(folder, tmp_path, monkeypatch, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**small)).save_pretrained(tmp_path / "dense")
    run("quantize", folder, tmp_path / "done", "--recipe", "max")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "utf16.txt").write_text("of another encoding", "utf-16")
    shutil.copytree(tmp_path / "done", tmp_path / "lacking")
    save_file({n: t for n, t in tensors(tmp_path / "done").items() if "q_norm" not in n},
              tmp_path / "lacking" / "model.safetensors")  # fmt: skip
    fp8 = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(fp8))
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
        (("generate", tmp_path / "fp8"), "is quantized with 'fp8', not with NVFP4: FP8 and MXFP4 are converted by"),
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
        (("compare", tmp_path / "done", "--text", tmp_path / "short.txt"), "needs the original"),
        (("compile", "Qwen/Qwen3-30B-A3B", "--arch", "sm_80", "--out", tmp_path / "file"), "Not a directory"),
    ]
    for args, message in cases:
        assert message in mistake(args, capsys)
    assert not (tmp_path / "x").exists()


def mistake(args, capsys) -> str:
    """The last line that a wrong command prints; its exit code is 2."""
    capsys.readouterr()
    try:
        run(*args, expect=2)
    except SystemExit as stop:
        assert stop.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"moe-nvfp4 {args[0]}: error: ")
    return error


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


def test_a_prompt_of_no_tokens(folder, tmp_path, capsys):
    """With no unknown token and no special ones, words outside the vocabulary make no tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = tmp_path / "model"
    model.mkdir()
    for file in folder.iterdir():
        (model / file.name).symlink_to(file)
    for file in model.glob("tokenizer*"):
        file.unlink()
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, []))).save_pretrained(model)
    run("generate", model, "--prompt", "?", "--device", "cpu", expect=2)
    assert "makes no tokens of the prompt '?'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "RecursionError"),
        ("3", "TypeError"),
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


def test_help_teaches(capsys):
    for args in (["--help"], ["generate", "--help"], ["quantize", "--help"], ["info", "--help"], ["compare", "--help"],
                 ["verify", "--help"], ["calibrate", "--help"], ["serve", "--help"], ["env", "--help"]):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            cli.main(args)
        assert stop.value.code == 0
    said = capsys.readouterr().out
    for word in ("moe-nvfp4 quantize ./Qwen3-30B-A3B", "W4A16", "wildcards", "'demo' makes a small one"):
        assert word in said


def test_choices_are_those_of_the_library():
    """cli/options.py has its own lists of them, so that --help imports nothing."""
    from moe_nvfp4 import weights
    from moe_nvfp4.integrations import serve
    from moe_nvfp4.quantize import dialects, recipes

    assert (options.RECIPES, options.DEFAULT_RECIPE) == (recipes.RECIPES, recipes.DEFAULT_RECIPE)
    assert options.CALIBRATED_RECIPES == recipes.CALIBRATED_RECIPES
    assert (options.DIALECTS, options.ACTIVATIONS) == (tuple(dialects.DIALECTS), weights.ACTIVATIONS)
    assert options.ENGINES == serve.ENGINES


@pytest.mark.parametrize("args", [["--help"], ["quantize", "--help"], ["--version"], ["generate", "X", "--prompt", ""]])
def test_help_imports_nothing_slow(args):
    code = (
        f"import sys\nfrom moe_nvfp4 import cli\ntry:\n    cli.main({args})\nexcept SystemExit:\n"
        "    print('slow:', sorted({'torch', 'numpy', 'transformers', 'tqdm', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("slow: []\n")


def test_env(tmp_path, monkeypatch, capsys):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "x.o").write_bytes(bytes(1500))
    (tmp_path / "demo-1").mkdir()
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    run("env")
    said = capsys.readouterr().out
    version = importlib.metadata.version
    for package in ("torch", "transformers", "safetensors"):
        assert re.search(rf"^{package} +{re.escape(version(package))}$", said, re.M)
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


def test_env_says_that_a_backend_is_unknown(monkeypatch, capsys):
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "sm91")
    run("env")
    said = capsys.readouterr().out
    assert (
        "\nerror: MOE_NVFP4_BACKEND=sm91 is unknown: the backends are " in said and "\nMOE_NVFP4_BACKEND=sm91\n" in said
    )


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"moe-nvfp4 {importlib.metadata.version('moe-nvfp4')}\n"


@pytest.mark.slow
def test_interrupted_while_importing(tmp_path):
    """Ctrl-C reaches a process that is still importing torch."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore SIGINT
        "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "moe_nvfp4", "info", "X"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "\nmoe-nvfp4: interrupted\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO, lambda: None], ids=["terminal", "pipe", "none"])
def test_bars_are_for_terminals(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    assert list(progress_bar([1, 2], show=True, desc="NVFP4")) == [1, 2]
    assert list(progress_bar([1, 2], show=False, desc="NVFP4")) == [1, 2]
    if sys.stderr is not None:
        assert ("NVFP4: 100%" in sys.stderr.getvalue()) == sys.stderr.isatty()


@pytest.mark.parametrize(("given", "shown"), [([], True), (["--quiet"], False)])
def test_quiet_hides_the_bars_of_all_libraries(given, shown):
    """In a process of its own, since tqdm and transformers read the variables when they are imported."""
    code = (
        "import io, sys; from moe_nvfp4 import cli\n"
        "class Terminal(io.StringIO):\n    isatty = lambda self: True\n"
        "def work(args):\n"
        "    from tqdm import tqdm\n    list(tqdm([1], desc='theirs'))\n"
        "    from moe_nvfp4.progress import progress_bar\n    list(progress_bar([1], show=True, desc='ours'))\n"
        "cli.info.run, sys.stderr = work, Terminal()\n"
        f"assert cli.main(['info', 'X', *{given}]) == 0\n"
        "print(sys.stderr.getvalue())"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("theirs: 100%" in done.stdout, "ours: 100%" in done.stdout) == (shown, shown)


def test_a_reader_that_has_enough():
    code = (
        "import sys; from moe_nvfp4 import cli; cli.env.run = lambda args: print('x', flush=True)\n"
        "sys.exit(cli.main(['env']))"
    )
    command = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.close()
    assert (command.stderr.read(), command.wait()) == (b"", 141)


def test_python_dash_m(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moe_nvfp4", "verify"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 2 and "DST (see moe-nvfp4 verify --help)" in result.stderr


def test_the_command_alone_prints_help(capsys):
    run()
    assert "moe-nvfp4 quantize ./Qwen3-30B-A3B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "meant", "parser"),
    [
        (["quantise", "X", "Y"], "quantize", "moe-nvfp4"),
        (["generate", "X", "--promt", "hi"], "--prompt", "moe-nvfp4 generate"),
        (["quantize", "X", "Y", "--reciep=mse"], "--recipe", "moe-nvfp4 quantize"),
        (["quantize", "X", "Y", "--recipe", "four_over_sic"], "four_over_six", "moe-nvfp4 quantize"),
        (["generate", "X", "--zzz"], None, "moe-nvfp4 generate"),
    ],
)
def test_misspelt_words_are_refused_by_their_command(args, meant, parser, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(args)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{parser}: error: ") and line.endswith(f"(see {parser} --help)")
    assert re.findall(r"did you mean (\S+)\?", line) == ([meant] if meant else [])


@pytest.mark.parametrize(
    ("model", "meant"),
    [("dmeo", "demo"), ("Qwen/Qwen3-30B-A3", "Qwen/Qwen3-30B-A3B"), ("{}/Qwen3-4bits", "Qwen3-4bit"), ("zzz", None)],
)
@pytest.mark.parametrize("command", ["info", "verify"])
def test_misspelt_models(command, model, meant, tmp_path, capsys):
    (tmp_path / "Qwen3-4bit").mkdir()
    error = mistake([command, model.format(tmp_path)], capsys)
    assert re.findall(r"did you mean ([^?]+)\?", error) == ([meant] if meant else [])


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
        row = f"{name} +{of['perplexity']:.3f} +{of['kl']:.5f} +{of['kl_median']:.5f} +{of['top1']:.2%}"
        assert re.search(f"^{row}$", said, re.M)
    shown = found("env")
    assert shown["packages"]["torch"] == torch.__version__ and shown["backends"]["cpu"]["reference"]


def test_a_checkpoint_is_exactly_itself(folder, tmp_path, capsys):
    run("quantize", folder, tmp_path / "made", "--recipe", "max")
    run("quantize", tmp_path / "made", tmp_path / "carried", "--dialect", "compressed-tensors", "--verify")
    said = capsys.readouterr().out
    assert re.search(r"model.layers.1.mlp.experts +24 +0\.00000 +exact$", said, re.M) and "inf" not in said
    assert "| `model.layers.1.mlp.experts` | 0.0000 | exact |" in (tmp_path / "carried" / "README.md").read_text()


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


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("moe-nvfp4 qua", {"quantize"}),
        ("moe-nvfp4 quantize --sh", {"--share-scales"}),
        ("moe-nvfp4 generate --recipe m", {"max", "mse"}),
        ("moe-nvfp4 info ./quan", {"./quantize"}),
    ],
)
def test_completion(typed, offered, capsys):
    """What bash completes, by the script."""
    pytest.importorskip("shtab", reason="shtab is not installed")
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    run("completion", "zsh")
    assert capsys.readouterr().out.startswith("#compdef moe-nvfp4")
    run("completion", "bash")
    ask = (
        f"\nCOMP_WORDS=({typed}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        '_shtab_moe_nvfp4 moe-nvfp4 "${COMP_WORDS[-1]}"\necho "${COMPREPLY[@]}"'
    )
    script = capsys.readouterr().out + ask
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.slow
def test_the_demo_answers(capsys):
    """The README's first command: a real model with 4-bit experts says something true."""
    made_demo()
    run("generate", "demo", "--max-new-tokens", 12, "--device", "cpu")
    said = capsys.readouterr().out
    assert "Paris" in said
    assert "159.3 MB in bf16, 44.8 MB in NVFP4 (3.55x smaller)" in said.replace("3.56x", "3.55x")
