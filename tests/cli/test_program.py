"""The program as a whole: help, completion, misspelt words, bars, how it ends."""

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys

import pytest

from moe_nvfp4 import cli
from moe_nvfp4.cli import options
from moe_nvfp4.progress import progress_bar
from tests.cli.commands import Terminal, mistake, run
from tests.common import ROOT


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


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"moe-nvfp4 {importlib.metadata.version('moe-nvfp4')}\n"


def test_the_command_alone_prints_help(capsys):
    run()
    assert "moe-nvfp4 quantize ./Qwen3-30B-A3B" in capsys.readouterr().out


def test_python_dash_m(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moe_nvfp4", "verify"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 2 and "DST (see moe-nvfp4 verify --help)" in result.stderr


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


@pytest.mark.parametrize("set_by_user", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_threads_sleep_while_they_wait_unless_the_user_has_set_it(set_by_user):
    """In a process of its own: OpenMP reads the variable when torch is imported."""
    code = (
        "import os, sys; from moe_nvfp4 import cli\n"
        "cli.info.run = lambda args: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
        "cli.main(['info', 'X'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | set_by_user
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"{set_by_user.get('OMP_WAIT_POLICY', 'PASSIVE')} False\n", done.stderr


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


@pytest.mark.slow
def test_without_stdout():
    """As after >&-, and under some services."""
    code = "import os; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'moe_nvfp4', 'env'])"
    result = subprocess.run([sys.executable, "-c", f"import sys; {code}"], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_reader_that_has_enough():
    code = (
        "import sys; from moe_nvfp4 import cli; cli.env.run = lambda args: print('x', flush=True)\n"
        "sys.exit(cli.main(['env']))"
    )
    command = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.close()
    assert (command.stderr.read(), command.wait()) == (b"", 141)
