"""`compare` of a folder, with tasks of lm-eval and a plot."""

import json
import shutil
import sys

import pytest
import torch

from examples import offline_tasks
from moe_nvfp4.cli import judging, main
from moe_nvfp4.cli.judging import tasks_of
from moe_nvfp4.demo import demo_text
from moe_nvfp4.integrations.huggingface import set_activations, swap_experts
from tests.cli.conftest import folder  # noqa: F401  (a fixture: a small checkpoint with a tokenizer)
from tests.models import load

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps; " * 6
TASK = offline_tasks.task_file("tiny_words", "QUESTIONS", offline_tasks.SUMS)


def run(*arguments):
    assert main([str(a) for a in (*arguments, "--device", "cpu")]) == 0


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    return tmp_path / "text"


@pytest.fixture
def quantized(folder, tmp_path):  # noqa: F811
    run("quantize", folder, tmp_path / "quantized", "--recipe", "max")
    return tmp_path / "quantized"


def test_a_folder_is_compared(folder, quantized, text, tmp_path, capsys):  # noqa: F811
    window = ("--text", text, "--window", 24, "--windows", 3)
    run("compare", folder, "--quantized", quantized, *window)
    lines = capsys.readouterr().out.splitlines()
    run("compare", folder, "--recipe", "max", *window)
    assert lines[-4:] == capsys.readouterr().out.splitlines()[-4:]  # the same weights, quantized as they load
    assert main(["compare", str(folder), "--quantized", str(folder), "--text", str(text)]) == 2
    assert "is not quantized" in capsys.readouterr().err


@pytest.mark.slow
def test_plot(folder, quantized, text, tmp_path, capsys):  # noqa: F811
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot = tmp_path / "plot.png"
    run("compare", folder, "--quantized", quantized, "--text", text, "--window", 24, "--windows", 3, "--plot", plot)
    found = json.loads((tmp_path / "plot.json").read_text())["kl_by_position"]
    assert {name: len(values) for name, values in found.items()} == {"W4A16": 23, "W4A4": 23}
    shown = {line.split()[0]: float(line.split()[2]) for line in capsys.readouterr().out.splitlines() if "W4A" in line}
    for name, values in found.items():
        assert sum(values) / 23 == pytest.approx(shown[name], abs=1e-5)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_plot_of_experts(folder, quantized, tmp_path, capsys):  # noqa: F811
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot = tmp_path / "experts.png"
    assert main(["verify", str(quantized), "--against", str(folder), "--plot", str(plot)]) == 0
    found = json.loads((tmp_path / "experts.json").read_text())["relative_error"]
    dense, packed = load(folder), load(quantized).dequantize()
    for i in range(2):
        rows = found[f"model.layers.{i}.mlp.experts"]
        for e in range(8):
            error = square = 0.0
            for part in ("gate_up_proj", "down_proj"):
                new, old = (getattr(m.model.layers[i].mlp.experts, part)[e].float() for m in (packed, dense))
                error, square = error + (new - old).square().sum().item(), square + old.square().sum().item()
            assert rows[e] == pytest.approx((error / square) ** 0.5, rel=0.01)  # `dequantize` rounds to bf16
    assert plot.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    for name, message in (
        ("kl", "must end in .png"),
        ("experts.png/kl.png", "not a folder"),
        ("mine.png", "mine.json is written, too"),
        ("experts.png", "experts.json is written, too"),
    ):
        assert main(["compare", str(folder), "--text", "x", "--plot", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    assert main(["verify", str(quantized), "--plot", str(plot)]) == 2
    assert "--against SRC" in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text() == '{"mine": 1}'
    assert main(["verify", str(quantized), "--against", str(folder), "--plot", str(plot)]) == 0  # its own again


@pytest.mark.slow
def test_tasks(folder, quantized, text, tmp_path, capsys):  # noqa: F811
    """Every question answered by hand: the likeliest of the choices is the model's answer."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from transformers import AutoTokenizer

    source = shutil.copytree(folder, tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token="<unk>")  # lm-eval asks for one
    tokenizer.save_pretrained(source)
    asked = [
        ("the quick br", ["o", "x"], 0), ("lazy d", ["q", "o"], 1), ("fox j", ["u", "z"], 0), ("ab", ["c", "d"], 1),
    ]  # fmt: skip
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps(dict(text=t, choices=c, answer=a)) for t, c, a in asked))
    (tmp_path / "tiny.yaml").write_text(TASK.replace("QUESTIONS", str(questions)))
    window = ("--text", text, "--window", 24, "--windows", 1)
    run("compare", source, "--quantized", quantized, *window, "--tasks", tmp_path / "tiny.yaml")
    scores = capsys.readouterr().out.splitlines()[-1].split()
    assert scores[:2] == ["tiny_words", "acc"]
    models = [load(folder), swap_experts(load(folder), recipe="max", progress=False)]
    for got, model, activations in zip(scores[2:], [models[0], models[1], models[1]], [None, "bf16", "nvfp4"],
                                       strict=True):  # fmt: skip
        if activations:
            set_activations(model, activations)
        right = 0
        for before, choices, answer in asked:
            with torch.no_grad():
                logits = model(tokenizer(before, return_tensors="pt").input_ids).logits[0, -1]
            right += logits[[tokenizer(c).input_ids[0] for c in choices]].argmax().item() == answer
        assert float(got) == right / len(asked)


@pytest.mark.slow
def test_tasks_are_looked_up_before_models_run(folder, text, tmp_path, capsys):  # noqa: F811
    """The YAML file of a task may build on its neighbours; what lies in folders beside it (an environment's) is not
    read."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    for names in ("nosuchtask", "arc_easy,arc_eassy"):
        assert main(["compare", str(folder), "--text", str(text), "--tasks", names]) == 2
        said = capsys.readouterr()
        assert f"lm-eval has no task {names.rpartition(',')[2]!r}" in said.err and not said.out
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/other.yaml").write_text(TASK.replace("tiny_words", "not_asked_for"))
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps(dict(text="the quick br", choices=["o", "x"], answer=0)))
    (tmp_path / "base.yaml").write_text(TASK.replace("task: tiny_words\n", "").replace("QUESTIONS", str(questions)))
    (tmp_path / "mine.yaml").write_text("include: base.yaml\ntask: mine\nprocess_results: !function code.score\n")
    (tmp_path / "code.py").write_text("def score(*args): return {}\n")
    tasks = tasks_of(str(tmp_path / "mine.yaml"))
    assert tasks.names == ["mine"] and "mine" in tasks.manager.all_tasks
    assert "not_asked_for" not in tasks.manager.all_tasks
    assert list(tasks.manager.load_task_or_group(tasks.names)) == ["mine"]


@pytest.mark.parametrize("name", ["mine", "'mine' # of ours", '"my task"'])
def test_two_tasks_of_one_name_are_refused(name, tmp_path, monkeypatch):
    """lm-eval would run that of the first file. Of a .yml file it would know nothing."""
    monkeypatch.setattr(judging, "need", lambda *args: None)
    for file, mark in (("new.yaml", "\ufeff"), ("old.yaml", ""), ("new.yml", "")):
        (tmp_path / file).write_text(f"{mark}task: {name}\n")
    with pytest.raises(ValueError, match=r"old\.yaml beside it has a task '(mine|my task)' too"):
        tasks_of(str(tmp_path / "new.yaml"))
    with pytest.raises(ValueError, match="names end in .yaml: rename it"):
        tasks_of(str(tmp_path / "new.yml"))


def test_tasks_made_offline(tmp_path):
    """Passages are the text's own, up to the last word of a sentence; of four sums one is right: the answer."""
    text = demo_text()
    offline_tasks.write(tmp_path, text, 50)
    read = lambda name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    words = " ".join(text.split())
    assert len(read("cloze")) == 50 and len({p["text"] for p in read("cloze")}) == 50
    for passage in read("cloze"):
        whole = f"{passage['text']} {passage['word']}"
        assert whole in words and words[words.index(whole) + len(whole)] in ".!?"
        assert 17 <= len(whole.split()) <= 65
    for question in read("sums"):
        *_, asked = question["text"].split("\n")
        a, b = asked.removesuffix(" =").split(" + ")
        right = [int(choice) == int(a) + int(b) for choice in question["choices"]]
        assert len(right) == 4 and sum(right) == 1 and right[question["answer"]]
        assert all(eval(line.replace("=", "==")) for line in question["text"].split("\n")[:-1])
    with pytest.raises(ValueError, match="no paragraph"):
        offline_tasks.write(tmp_path / "none", "Too short.", 5)
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    tasks = tasks_of(str(tmp_path / "offline.yaml"))
    (found,) = tasks.manager.load_task_or_group(tasks.names).values()
    assert {name: len(task.test_docs()) for name, task in found.items()} == {"cloze": 50, "sums": 50}


def test_what_cannot_be_imported_is_named(folder, text, tmp_path, monkeypatch, capsys):  # noqa: F811
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval/__init__.py").write_text("import transformers; transformers.AutoModelForVision2Seq")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["compare", str(folder), "--text", str(text), "--tasks", "arc_easy"]) == 2
    assert "the installed lm-eval cannot be imported (AttributeError: " in capsys.readouterr().err


def test_what_is_not_installed_is_named(folder, text, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for option, value, package in (("--tasks", "arc_easy", "lm-eval"), ("--plot", "x.png", "matplotlib")):
        assert main(["compare", str(folder), "--text", str(text), option, value]) == 2
        assert f"{option} needs a package that is not installed: pip install {package}" in capsys.readouterr().err
    assert main(["compare", str(folder), "--text", str(text), "--limit", "3"]) == 2
    assert "--limit would have no effect without --tasks" in capsys.readouterr().err
