"""What README.md, CONTRIBUTING.md and docs/ mention exists: files, links, modules, names, commands, variables."""

import ast
import importlib
import importlib.util
import re
import runpy
import shutil
from pathlib import Path

import pytest

from moe_nvfp4 import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/*.md")])
PACKAGE = [path for top in ("moe_nvfp4", "quantize", "integrations") for path in (ROOT / top).rglob("*.py")]
# Tools in the pages' commands whose names do not start with the library's.
MODULES = re.compile(r"python3? -m ((?:moe_nvfp4|tests)[\w.]*)")


@pytest.fixture(params=PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def page(request):
    return request.param


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_files_and_modules_are_there(page):
    text = page.read_text("utf-8")
    if page.name == "CHANGELOG.md":
        pytest.skip("it speaks of files that have gone")
    named = re.findall(r"(?<![\w/.])((?:moe_nvfp4|quantize|integrations|tests|examples|docs)/[\w./*-]*\w)", text)
    assert [name for name in named if not any(ROOT.glob(name))] == []
    missing = [m for m in MODULES.findall(text) if importlib.util.find_spec(m) is None]
    assert missing == []


def test_imported_names_exist(page):
    for block in blocks(page.read_text("utf-8"), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "moe_nvfp4":
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], node.module


def test_commands_exist(page, capsys):
    for command in set(re.findall(r"(?:^|`)moe-nvfp4 ([a-z]+)", page.read_text("utf-8"), re.M)):
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        assert stopped.value.code == 0, command
        capsys.readouterr()


def test_every_environment_variable_is_described():
    """All that the package reads by os.environ[...], .get(...) and getenv(...), and all names of ours in it."""
    read = r"(?:environ(?:\.get|\.setdefault|\.pop)?\s*[\[(]|getenv\()\s*[\"'](\w+)"
    code = "\n".join(path.read_text("utf-8") for path in PACKAGE)
    used = set(re.findall(read, code)) | set(re.findall(r"\bMOE_NVFP4_[A-Z_]+", code))
    text = (ROOT / "docs/environment.md").read_text("utf-8")
    ours, _ = text.split("Those of other libraries")
    assert used - set(re.findall(r"\w+", text)) == set()
    assert set(re.findall(r"^\| `(\w+)`", ours, re.M)) - used == set()


@pytest.mark.parametrize("url", [None, "https://example.org/moe_nvfp4"])
def test_a_package_index_shows_no_broken_link(tmp_path, monkeypatch, url):
    """README.md as setup.py passes it on has no links into the repository, or absolute ones."""
    setuptools = pytest.importorskip("setuptools", reason="setup.py needs it")
    for name in ("README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "moe_nvfp4/kernels/cpu", tmp_path / "moe_nvfp4/kernels/cpu")
    if url:
        with open(tmp_path / "pyproject.toml", "a") as file:
            file.write(f'[project.urls]\nRepository = "{url}"\n')
    monkeypatch.chdir(tmp_path)
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path("setup.py")
    text = given["long_description"]
    assert re.findall(r"\]\((?!https:)[^)]*", text) == []
    assert ("![" in text) == bool(url) and ("(https://example.org/moe_nvfp4/blob/HEAD/docs/" in text) == bool(url)
    assert len(text.splitlines()) == len((ROOT / "README.md").read_text("utf-8").splitlines())
