"""Imports point one way, importing is cheap, and every folder is packaged."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import moe_nvfp4

ROOT = Path(__file__).parents[2]
FOLDERS = ("quantize", "integrations")  # at the top of the checkout, symlinked into moe_nvfp4/

# Who may import whom: a file imports only from lines above its own, or from its own folder.
ORDER = [
    ["_version", "cache", "child", "devices", "progress"],
    ["demo"],
    ["format", "mapped", "routing", "scales"],
    ["weights"],
    ["checks"],
    ["reference"],
    ["kernels", "quantize"],
    ["backends"],
    ["door"],
    ["stages"],
    ["ops", "router"],
    ["prepared"],
    ["layer", "linear"],
    ["experts", "joined"],
    ["bench", "calibrate", "evaluate", "ready"],
    ["__init__"],
    ["integrations"],
    ["environment"],
    ["selftest"],
    ["conformance"],
    ["cli"],
    ["__main__"],
    ["examples", "tests"],
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
ALONE = {"_version", "cache", "child", "devices", "progress"}  # import nothing of ours
OUTSIDE = ORDER[-1]
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # the statements within one


def sources(root):
    """(file, its name in ORDER) for every Python file, each once."""
    for top in ("moe_nvfp4", *FOLDERS, *OUTSIDE):
        for folder, _, names in os.walk(root / top):  # does not follow the symlinks
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                parts = path.relative_to(root).with_suffix("").parts
                yield path, parts[1] if top == "moe_nvfp4" else top


def imports(tree):
    """(line, modules that it may mean, whether inside a function) for each import; relative ones begin with '.'."""

    def visit(node, inside):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, inside
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, "." if node.level else f"{node.module}.{alias.name}", inside
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for block in (getattr(node, name, ()) for name in BLOCKS):  # expressions contain no imports
            for child in block:
                yield from visit(child, inside)

    return visit(tree, False)


def problem(owner, module, inside):
    """Why a file of `owner` may not import `module`, or None."""
    top, *rest = module.split(".")
    if top == "":
        return "relative import"
    if top in FOLDERS:
        return f"bare {top}; write moe_nvfp4.{top}"
    if top in OUTSIDE:
        return None if owner in OUTSIDE else f"{top} is not installed"
    if top != "moe_nvfp4" or owner in OUTSIDE:
        return None
    target = rest[0] if rest and rest[0] in RANK else "__init__"
    if owner not in RANK:
        return "this file has no place in ORDER"
    if owner in ALONE or (target != owner and RANK[target] >= RANK[owner]):
        return f"{target} is not below {owner}"
    if target == "kernels" != owner and owner not in ("backends", "experts", "ready", "selftest"):
        return "kernels are imported by backends, ready, selftest, and by experts that stay on the CPU"
    return None


def violations(root):
    for path, owner in sources(root):
        for line, module, inside in imports(ast.parse(path.read_text("utf-8"))):
            if reason := problem(owner, module, inside):
                yield f"{path.relative_to(root)}:{line}: {reason}"


# What only `experts` knows: that weights may be elsewhere than x, or in files.
CORE = ("layer", "linear", "ops", "stages", "backends", "prepared", "door", "kernels/backend")
ELSEWHERE = re.compile(
    r"\bbeside\b|mapped|map_files|meanwhile\(|\.meanwhile|_number\b|on_cpu|host_weights|kernels.offload"
)


def mentions(root):
    for name in CORE:
        path = root / "moe_nvfp4" / f"{name}.py"
        for line, text in enumerate(path.read_text("utf-8").splitlines(), 1):
            if ELSEWHERE.search(text):
                yield f"{path.relative_to(root)}:{line}: {text.strip()}"


def unlisted_packages(root):
    listed = set(tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"])
    folders = {path.parent.relative_to(root) for path, owner in sources(root) if owner not in OUTSIDE}
    names = {".".join(f.parts if f.parts[0] == "moe_nvfp4" else ("moe_nvfp4", *f.parts)) for f in folders}
    return names ^ listed


def test_imports_point_one_way():
    assert list(violations(ROOT)) == []


def test_the_core_runs_weights_where_x_is(tmp_path):
    assert list(mentions(ROOT)) == []
    for name in CORE:
        (path := tmp_path / "moe_nvfp4" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        path.write_text("if self.on_cpu:\n")
    assert len(list(mentions(tmp_path))) == len(CORE)


NAMES = {"max", "four_over_six", "mse", "weighted", "gptq", "distill", "modelopt", "compressed-tensors"}


def compared(tree):
    """(line, name) where the name of a recipe or a dialect is compared, or a dialect is told by its scales."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Compare, ast.MatchValue)):
            found = (part for part in ast.walk(node) if isinstance(part, ast.Constant))
            yield from ((part.lineno, part.value) for part in found if part.value in NAMES)
        elif isinstance(node, ast.Attribute) and node.attr == "reciprocal":
            yield node.lineno, ast.unparse(node)


def test_recipes_and_dialects_are_asked_and_not_named():
    found = []
    for path, owner in sources(ROOT):
        if owner not in OUTSIDE and "dialects" not in path.parts and "kernels" not in path.parts:
            found += [
                f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in compared(ast.parse(path.read_text()))
            ]
    assert found == []
    planted = "if recipe == 'gptq' or options.recipe not in ('max', 'mse') or d.reciprocal: pass"
    assert [name for _, name in compared(ast.parse(planted))] == ["gptq", "max", "mse", "d.reciprocal"]


def test_every_folder_is_packaged():
    assert unlisted_packages(ROOT) == set()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("moe_nvfp4/format.py", "from moe_nvfp4 import weights"),
        ("moe_nvfp4/weights.py", "import moe_nvfp4.layer"),
        ("moe_nvfp4/reference.py", "from moe_nvfp4.quantize.recipes import quantize_expert"),
        ("moe_nvfp4/layer.py", "from moe_nvfp4 import kernels"),
        ("moe_nvfp4/ops.py", "def f():\n    import moe_nvfp4.kernels.cpu"),
        ("moe_nvfp4/linear.py", "import moe_nvfp4.layer"),
        ("moe_nvfp4/layer.py", "from moe_nvfp4 import NVFP4Experts"),
        ("moe_nvfp4/layer.py", "from .format import SF_VEC_SIZE"),
        ("moe_nvfp4/cache.py", "def f():\n    import moe_nvfp4._version"),
        ("moe_nvfp4/demo.py", "def f():\n    import moe_nvfp4.format"),
        ("moe_nvfp4/new.py", "import moe_nvfp4.format"),
        ("quantize/recipes.py", "from quantize import dialects"),
        ("quantize/recipes.py", "def f():\n    import moe_nvfp4.kernels.sm90"),
        ("integrations/huggingface/swap.py", "from moe_nvfp4.cli import main"),
        ("moe_nvfp4/cli/info.py", "from tests.common import THRESHOLDS"),
        ("tests/test_x.py", "import integrations"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, text):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("from moe_nvfp4.format import quantize_rows\n" if file.endswith("recipes.py") else "")
    assert list(violations(tmp_path)) == []
    path.write_text(text)
    assert len(list(violations(tmp_path))) == 1


def test_an_unlisted_folder_is_found(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.setuptools]\npackages = ["moe_nvfp4"]\n')
    for folder in ("moe_nvfp4", "moe_nvfp4/kernels", "quantize"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    assert unlisted_packages(tmp_path) == {"moe_nvfp4.kernels", "moe_nvfp4.quantize"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_symlinks(folder):
    link = ROOT / "moe_nvfp4" / folder
    if os.name == "nt" and not link.is_symlink():
        pytest.skip("a Windows checkout without symlinks; there the mapping in pyproject.toml serves")
    assert link.readlink() == Path("..", folder)
    assert not (ROOT / folder).is_symlink() and (ROOT / folder / "__init__.py").is_file()


@pytest.mark.slow
def test_the_package_is_lazy():
    """`import moe_nvfp4` costs nothing; each name that type checkers see is imported when it is asked for."""
    code = (
        "import sys, moe_nvfp4, moe_nvfp4.cli\n"
        "assert not {'torch', 'numpy', 'transformers', 'tqdm'} & set(sys.modules)\n"
        "assert moe_nvfp4.NVFP4Experts is __import__('moe_nvfp4.experts').experts.NVFP4Experts\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    tree = ast.parse(Path(moe_nvfp4.__file__).read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert {*seen, "__version__"} == set(moe_nvfp4.__all__) <= set(dir(moe_nvfp4))
    for name, module in seen.items():
        assert getattr(moe_nvfp4, name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="module 'moe_nvfp4' has no attribute 'NVFP4Expert'"):
        moe_nvfp4.NVFP4Expert  # noqa: B018


@pytest.mark.slow
def test_importing_needs_no_gpu_and_no_big_library():
    """The layer can be built on any machine, without a GPU, kernel languages or (unless asked for) transformers."""
    banned = ("transformers", "cutlass", "triton", "vllm")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({banned}))\n"  # None: importing it raises ImportError
        "import torch\n"
        "from moe_nvfp4 import *\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not [m for m in sys.modules if m.startswith('moe_nvfp4.kernels.') and m.count('.') > 2]\n"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
