"""The pages print what the commands print: every ```console block of README.md and docs/ is run."""

import io
import json
import re
import shlex
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from transformers.utils.import_utils import is_serve_available

from moe_nvfp4 import cli
from tests.common import made_demo
from tests.servers import Server

ROOT = Path(__file__).parents[2]
PAGES = [p for p in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))] if "```console" in p.read_text("utf-8")]
PROSE = 4  # words of a model's answer that are compared: what follows may differ between instruction sets


def shown(page):
    """(command, lines printed) of each console block."""
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            lines = part.strip("\n").split("\n")
            first = next(i for i in range(1, len(lines) + 1) if whole("\n".join(lines[:i])))
            yield "\n".join(lines[:first]), lines[first:]


def whole(command):
    """Whether all its quotes are closed."""
    try:
        return bool(shlex.split(command))
    except ValueError:
        return False


def comparable(line):
    """A line without what differs from run to run: numbers, and the end of an answer."""
    line = re.sub(r"\d[\d.,]*", "N", " ".join(line.split()))
    return " ".join(line.split()[:PROSE]) if line.startswith("The ") else line


def same(printed, expected):
    """Whether the lines are those expected, where "..." stands for any number of lines."""
    pattern = "".join(".*" if line == "..." else re.escape(comparable(line) + "\n") for line in expected)
    return re.fullmatch(pattern, "".join(comparable(line) + "\n" for line in printed), re.S) is not None


def test_comparing_notices_another_number_of_layers_word_or_line():
    assert same(["a 1.5 s", "b", "c"], ["a 2 s", "..."]) and same(["The x y z one"], ["The x y z two"])
    assert not same(["a 1.5 ms"], ["a 2 s"]) and not same(["a", "b"], ["a"]) and not same(["The x y u"], ["The x y z"])


def as_piped(lines):
    """(what is typed, lines printed) of a conversation: where input is no terminal, it is not seen in the output."""
    typed = "".join(f"{line[2:]}\n" for line in lines if line.startswith("> "))
    return typed, re.sub(r"^> .*\n?", "> ", "\n".join(lines), flags=re.M).split("\n")


def test_a_conversation_is_compared_without_what_is_typed():
    assert as_piped(["a", "> b", "c", "", "> /quit"]) == ("b\n/quit\n", ["a", "> c", "", "> "])


@pytest.fixture
def on_cpu(monkeypatch):
    """No GPU, here and in a process that is started: what is shown was printed without one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.slow
def test_every_command_prints_what_is_beside_it(on_cpu, tmp_path, monkeypatch, capsys):
    """Those of the first page in its order, in one folder, then those of other pages that it does not have."""
    made_demo()
    monkeypatch.chdir(tmp_path)
    pages = sorted(PAGES, key=lambda page: page.name != "index.md")
    server = None
    with ExitStack() as running:
        for command, expected in dict.fromkeys((c, tuple(lines)) for page in pages for c, lines in shown(page)):
            match shlex.split(command):
                case ["curl", url, *_, body]:
                    check_answer(server, urlsplit(url).path, json.loads(body), json.loads("".join(expected)))
                case ["moe-nvfp4", "serve", model, *_]:
                    if not is_serve_available():
                        pytest.skip("moe-nvfp4 serve: needs transformers[serving]")
                    server = running.enter_context(Server(model))
                    check_start(server, expected)
                case ["moe-nvfp4", *arguments]:
                    if "--server" in arguments:
                        url = arguments[at := arguments.index("--server") + 1]
                        arguments[at], expected = server.url, [line.replace(url, server.url) for line in expected]
                    if arguments[0] == "chat":
                        typed, expected = as_piped(expected)
                        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
                    capsys.readouterr()
                    assert cli.main(arguments) == 0, capsys.readouterr().err
                    check_output(capsys.readouterr().out, expected)
                case _:
                    raise AssertionError(f"{command}: the test runs only this library's commands and curl")


def check_output(printed, expected):
    lines = [text.strip().split("\n") for text in (printed, "\n".join(expected))]
    assert same(*lines), printed


def check_start(server, expected):
    assert server.wait(), server.log.read_text()
    log = server.log.read_text().replace("127.0.0.1", "localhost").split("\n")
    assert {comparable(line) for line in expected} - {"..."} <= {comparable(line) for line in log}, log


def check_answer(server, path, body, expected):
    found = server.post(path, **body)
    for reply in (found, expected):
        for name in ("id", "created", "usage"):
            del reply[name]
    said, should = (reply["choices"][0]["message"].pop("content").split("\n") for reply in (found, expected))
    assert found == expected and same(said, should), said


@pytest.mark.slow
def test_the_first_example_of_help_answers_rightly(capsys):
    made_demo()
    example = next(line for line in cli.make_parser().epilog.split("\n") if "generate demo" in line)
    assert cli.main([*shlex.split(example)[1:], "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert all(color in said for color in ("Red", "Blue", "Yellow"))


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(on_cpu, tmp_path, monkeypatch, capsys):
    made_demo()
    cells = json.loads((ROOT / "examples/quickstart.ipynb").read_text("utf-8"))["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    exec("\n\n".join("".join(cell["source"]) for cell in cells), {})
    shown = [text for cell in cells for out in cell["outputs"] if out.get("name") == "stdout" for text in out["text"]]
    assert len(shown) > 8
    check_output(capsys.readouterr().out, "".join(shown).split("\n"))
