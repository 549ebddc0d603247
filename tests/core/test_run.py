"""examples/run.py installs with uv what pip would install, or leaves it to pip."""

import os
import runpy
import sys

import pytest

from tests.common import ROOT

CONFIGURED = """
[global]
index-url = https://a.example/simple
timeout = 60
[install]
extra-index-url = https://b.example/simple
    https://c.example/simple
constraint = x.example
[freeze]
timeout = 10
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The names of examples/run.py, with the pip of this Python, configured by the file above."""
    pytest.importorskip("pip", reason="asks pip how it is configured")
    for name in os.environ:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(CONFIGURED)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))  # in place of this machine's
    names = runpy.run_path(str(ROOT / "examples/run.py"))["installer"].__globals__
    names["PIP"] = [sys.executable, "-I", "-m", "pip"]
    return names


def test_uv_is_told_how_pip_is_configured(run, monkeypatch):
    """By files, whose values may have several words, and by variables, which win over files."""
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable.example/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    settings = run["pip_settings"]()
    assert settings["timeout"] == "60"
    options = run["uv_options"](settings)
    assert [option for option in options if ".example" in option] == [
        "--constraint=x.example",
        "--extra-index-url=https://b.example/simple",
        "--extra-index-url=https://c.example/simple",
        "--index-url=https://variable.example/simple",
    ]
    assert options[-1] == "--no-index" and not any("timeout" in option for option in options)
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    assert run["uv_options"](run["pip_settings"]()) == options[:-1]


@pytest.mark.slow
def test_pip_installs_where_uv_cannot_do_what_it_is_told(run, monkeypatch, capsys):
    monkeypatch.setitem(run, "step", lambda title, command, remedy: False)
    assert run["installer"]() is run["BY_PIP"] and "no uv here" in capsys.readouterr().out
    monkeypatch.setitem(run, "step", lambda title, command, remedy: True)
    assert run["installer"]()[: len(run["BY_UV"])] == run["BY_UV"]
    monkeypatch.setenv("PIP_ONLY_BINARY", ":all:")
    assert run["installer"]() is run["BY_PIP"]
    assert "no setting like pip's only-binary" in capsys.readouterr().out


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_torch_is_the_cpu_build_where_there_is_one(failing, run, monkeypatch, capsys):
    """From pip's own index, else from pytorch.org, else the ordinary one."""
    monkeypatch.setattr(sys, "platform", "linux")
    tried = []

    def step(title, command, remedy="again"):
        tried.append(command[1:])
        return len(tried) > failing

    monkeypatch.setitem(run, "step", step)
    assert run["install"](["pip"], "moe-nvfp4[test]", gpu=False)
    cpu = run["TORCH"] + "+cpu"
    ways = [[cpu], [cpu, "--extra-index-url", run["CPU_BUILDS"]], [run["TORCH"]]]
    assert tried == [*ways[: failing + 1], ["--editable", f"{ROOT}[test]"]]
    assert ("about 3 GB" in capsys.readouterr().out) == (failing == 2)
