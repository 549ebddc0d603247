"""The pages print what the commands print: every ```console block of README.md and docs/ is run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moe_nvfp4.cli import make_parser
from tests.common import made_demo

ROOT = Path(__file__).parents[2]
PAGES = [p for p in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))] if "```console" in p.read_text("utf-8")]
PROSE = 4  # words of a model's answer that are compared: what follows may differ between instruction sets


def shown(page):
    """(command, lines printed) of each console block."""
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, printed = part.partition("\n")
            yield command, printed.strip().split("\n")


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


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_prints_what_is_beside_it(page, tmp_path):
    made_demo()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for command, expected in shown(page):
        program, *arguments = shlex.split(command)
        assert program == "moe-nvfp4", f"{command}: the test runs only this library's commands"
        run = [sys.executable, "-m", "moe_nvfp4", *arguments]
        result = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert result.returncode == 0, result.stderr
        assert same(result.stdout.strip().split("\n"), expected), f"{command} printed\n{result.stdout}"


@pytest.mark.slow
def test_the_first_example_of_help_answers_rightly(capsys):
    from moe_nvfp4 import cli

    made_demo()
    example = next(line for line in make_parser().epilog.split("\n") if "generate demo" in line)
    assert cli.main([*shlex.split(example)[1:], "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert all(color in said for color in ("Red", "Blue", "Yellow"))


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(tmp_path):
    made_demo()
    cells = json.loads((ROOT / "examples/quickstart.ipynb").read_text("utf-8"))["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n\n".join("".join(cell["source"]) for cell in cells), "utf-8")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TQDM_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "agg",
    }
    run = [sys.executable, "notebook.py"]
    result = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    shown = [text for cell in cells for out in cell["outputs"] if out.get("name") == "stdout" for text in out["text"]]
    assert len(shown) > 8
    assert same(result.stdout.strip().split("\n"), "".join(shown).strip().split("\n")), result.stdout
