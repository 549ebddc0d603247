"""What README.md, CONTRIBUTING.md and docs/ mention exists: files, links, modules, names, commands, variables."""

import ast
import importlib
import importlib.util
import inspect
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from moe_nvfp4 import cli
from moe_nvfp4.backends import VARIABLES

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
    assert set(re.findall(r"^\| `(MOE_NVFP4_\w+)`", ours, re.M)) == set(VARIABLES)


def generated():
    return runpy.run_path(str(ROOT / "docs/generated.py"))


@pytest.mark.parametrize("page", ["cli.md", "conformance.md", "proven.md", "speed.svg",
                                  pytest.param("families.md", marks=pytest.mark.slow),
                                  pytest.param("fits.md", marks=pytest.mark.slow)])  # fmt: skip
def test_generated_pages_are_those_of_the_code(page):
    made = generated()["PAGES"][page]()
    assert made == (ROOT / "docs" / page).read_text("utf-8"), "run python docs/generated.py"


def test_figures_are_those_of_the_results_file(page):
    """Tables and paragraphs that say so; in README and on the first page every speed must."""
    made, text = generated(), page.read_text("utf-8")
    assert made["with_results"](text) == text, "run python docs/generated.py"
    assert made["stray_numbers"](text) == []
    if page in (ROOT / "README.md", ROOT / "docs/index.md"):
        prose = re.sub(r"^```.*?^```|<!-- (?:results|quotes): .*?(?:<!-- end -->|\n\n)", "", text, flags=re.M | re.S)
        prose = prose.replace("3 GB of CUDA", "")
        assert re.findall(r".*(?<!\w)\d[\d.]* (?:tokens/s|us|ms|nats|times|%|GB).*", prose) == []


def test_times_on_blackwell_are_those_of_the_model():
    from moe_nvfp4.kernels.sm100.model import LAYERS, layer

    text = (ROOT / "docs/measurements.md").read_text("utf-8").partition("\n## Blackwell, by counts\n")[2]
    rows = [row.strip("| ").split(" | ") for row in text.partition("\n## ")[0].splitlines() if "| W4A" in row]
    tokens = (1, 16, 64, 256, 1024, 4096, 16384)
    of = [(name, activations) for name in ("Qwen3-30B-A3B", "Mixtral-8x7B") for activations in ("bf16", "nvfp4")]
    for row, (name, activations) in zip(rows, of, strict=True):
        assert row[-len(tokens) :] == [f"{1e6 * layer(*LAYERS[name], T, activations)['total']:.0f}" for T in tokens]
        assert ("W4A16" in row) == (activations == "bf16") and (name in row) == (activations == "bf16")


def test_every_result_is_shown_and_a_changed_figure_is_noticed():
    made = generated()
    pages = "".join(page.read_text("utf-8") for page in made["FIGURES"])
    assert set(re.findall(r"<!-- results: (\w+)", pages)) == set(made["RESULTS"])
    marked = "<!-- quotes: demo -->\nIt has 46.32 and 46.33 (W4A16).\n\nNot 3."
    assert made["stray_numbers"](marked) == ["46.33"]
    table = "<!-- results: demo -->\n| 1 |\n<!-- end -->"
    assert "52.08" in made["with_results"](table) and made["with_results"]("| 1 |") == "| 1 |"


@pytest.mark.slow
def test_configurations_have_the_parameters_of_the_models_cards():
    made = generated()
    for name, (_, _, billions) in made["MODELS"].items():
        assert made["packed_model"](name).parameters_in_total / 1e9 == pytest.approx(billions, rel=0.01), name


def public_names():
    """All names of the packages' __all__, and all that examples in pages and examples/ import."""
    for package in ("moe_nvfp4", "moe_nvfp4.integrations.huggingface"):
        yield from ((package, name) for name in importlib.import_module(package).__all__)
    texts = [block for page in PAGES for block in blocks(page.read_text("utf-8"), "python")]
    texts += [
        (ROOT / f"examples/{name}.py").read_text("utf-8") for name in ("layer", "generate", "finetune", "big_model")
    ]
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "moe_nvfp4":
                yield from ((node.module, alias.name) for alias in node.names)


def test_every_public_name_is_in_the_reference():
    listed = set(re.findall(r"^::: ([\w.]+)", (ROOT / "docs/api.md").read_text("utf-8"), re.M))
    missing = set()
    for module, name in public_names():
        value = getattr(importlib.import_module(module), name)
        if inspect.isroutine(value) or inspect.isclass(value):
            where = f"{value.__module__}.{value.__qualname__}"
            missing |= {where} - listed if where.split(".")[:2] != ["moe_nvfp4", "format"] else set()
    assert missing == set()


def test_aligned_columns_become_lists(monkeypatch):
    monkeypatch.setitem(sys.modules, "griffe", type("griffe", (), {"Docstring": str, "Extension": object}))
    as_lists = runpy.run_path(str(ROOT / "docs/docstrings.py"))["as_lists"]
    columns = "Words.\n\nrecipe   how\n         it is done\nw13, w2  weights\n\nRaises none."
    assert as_lists(columns) == "Words.\n\n* `recipe`: how\n  it is done\n* `w13, w2`: weights\n\nRaises none."
    for other in ("One two\nthree.", "recipe   how\nx", "recipe   how\nanother line of words"):
        assert as_lists(other) == other


def test_every_name_of_the_reference_exists_and_is_described():
    for where in re.findall(r"^::: ([\w.]+)", (ROOT / "docs/api.md").read_text("utf-8"), re.M):
        module, _, name = where.rpartition(".")
        value = (
            importlib.import_module(where)
            if where == "moe_nvfp4.format"
            else getattr(importlib.import_module(module), name)
        )
        assert value.__doc__, where


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
