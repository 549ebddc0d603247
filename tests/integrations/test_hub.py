"""The layer as a kernel of the Hub: loaded by `kernels` where this package cannot be imported."""

import ast
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from moe_nvfp4 import NVFP4Experts
from moe_nvfp4.integrations import hub
from moe_nvfp4.kernels.common import ahead

pytest.importorskip("kernels", reason="needs Hugging Face's library kernels")

# Prints JSON lines. -S leaves out this checkout, which is installed by a .pth file.
LOAD = """
import json, sys, torch
from importlib import import_module
from pathlib import Path
from kernels import get_local_kernel

folder, inputs = map(Path, sys.argv[1:3])
kernel = get_local_kernel(folder)
def say(**found):
    print(json.dumps(found), flush=True)
given = torch.load(inputs)
experts = kernel.NVFP4Experts.from_dense(given["gate_up"], given["down"], activations=given["activations"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    hub.write(folder)
    return folder


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    torch.manual_seed(0)
    given = {
        "gate_up": torch.randn(4, 96, 64), "down": torch.randn(4, 64, 48), "x": torch.randn(6, 64),
        "ids": torch.randint(4, (6, 2)), "weights": torch.rand(6, 2), "activations": "nvfp4",
    }  # fmt: skip
    path = tmp_path_factory.mktemp("given") / "given.pt"
    torch.save(given, path)
    return path, given


def run(folder, given, code, **env):
    """Run `code` after LOAD, without this package; returns what it says."""
    path = os.pathsep.join(place for place in sys.path if Path(place).name == "site-packages")
    done = subprocess.run(
        [sys.executable, "-S", "-c", LOAD + code, str(folder), str(given)], cwd=folder.parent, text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": path, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def runtime_imports(tree):
    """The imports of a module, without those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from runtime_imports(node)


@pytest.mark.slow
def test_every_import_finds_its_file(folder):
    """Those of functions, too, which are not called here."""
    files = list((folder / "build").glob("torch-*/**/*.py"))
    assert len(files) > 100
    for file in files:
        for node in runtime_imports(ast.parse(file.read_text())):
            if isinstance(node, ast.Import) or not node.level:
                assert "moe_nvfp4" not in ast.unparse(node), f"{file}:{node.lineno}"
                continue
            target = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            assert target.with_suffix(".py").is_file() or (target / "__init__.py").is_file(), f"{file}:{node.lineno}"


@pytest.mark.slow
def test_the_same_bits_without_the_package(folder, given):
    path, inputs = given
    layer = NVFP4Experts.from_dense(inputs["gate_up"], inputs["down"], activations=inputs["activations"])
    want = layer(inputs["x"], inputs["ids"], inputs["weights"])
    code = """
assert not [m for m in sys.modules if m.partition(".")[0] == "moe_nvfp4"]
x = given["x"].requires_grad_()
y = experts(x, given["ids"], given["weights"])
y.square().sum().backward()
torch.save((y.detach(), x.grad), folder.parent / "result.pt")
compiled = torch.compile(experts, fullgraph=True, backend="eager")(given["x"], given["ids"], given["weights"])
say(name=kernel.__name__, backend=experts.backend().name, compiled=torch.equal(compiled, y))
say(ops=[op for op in dir(torch.ops) if op.startswith("moe_nvfp4")])
"""
    first, second = run(folder, path, code)
    assert first == {"name": first["name"], "backend": layer.backend().name, "compiled": True}
    assert first["name"].startswith("moe_nvfp4_cpu_") and second == {"ops": [first["name"]]}
    y, grad = torch.load(folder.parent / "result.pt")
    x = inputs["x"].clone().requires_grad_()
    layer(x, inputs["ids"], inputs["weights"]).square().sum().backward()
    assert torch.equal(y, want) and torch.equal(grad, x.grad)


@pytest.mark.slow
def test_two_versions_in_one_process(folder, given, tmp_path, monkeypatch):
    """The other has one more comment, and so another name."""
    relative = hub.relative
    monkeypatch.setattr(hub, "relative", lambda name: relative(name) + "# another version\n")
    hub.write(tmp_path / "other")
    code = f"""
other = get_local_kernel(Path({str(tmp_path / "other")!r}))
theirs = other.NVFP4Experts.from_dense(given["gate_up"], given["down"], activations=given["activations"])
call = given["x"], given["ids"], given["weights"]
say(same=torch.equal(experts(*call), theirs(*call)), names=[kernel.__name__, other.__name__])
"""
    (found,) = run(folder, given[0], code)
    assert found["same"] and len(set(found["names"])) == 2


@pytest.mark.slow
def test_compiled_kernels_of_the_package_are_its_own(given, tmp_path, monkeypatch):
    """A kernel's file has the same name, until somebody changes the folder's sources; a wheel's kernels come along."""
    pytest.importorskip("triton", reason="names Triton's kernels")
    from moe_nvfp4.kernels.portable import launch

    monkeypatch.setattr(ahead, "BROUGHT", tmp_path / "compiled.zip")
    with zipfile.ZipFile(ahead.BROUGHT, "w") as archive:
        archive.writestr("some.o", b"code")
    hub.write(folder := tmp_path / "kernel")
    assert [file.parts[-3:] for file in folder.rglob("compiled.zip")] == [("torch-cuda", "kernels", "compiled.zip")]
    gemm = (".kernels.portable.gemm", "kernel", (), (1, 2), ())
    names = [ahead.kernel_file(".o", "sm_90a", 1), launch.cubins.file((9, 0), "moe_nvfp4" + gemm[0], *gemm[1:])]
    code = f"""
ahead = import_module(kernel.__name__ + ".kernels.common.ahead")
launch = import_module(kernel.__name__ + ".kernels.portable.launch")
name, *rest = {gemm!r}
say(names=[ahead.kernel_file(".o", "sm_90a", 1).name, launch.cubins.file((9, 0), kernel.__name__ + name, *rest).name])
"""
    assert run(folder, given[0], code) == [{"names": [file.name for file in names]}]
    for changed in folder.glob("build/torch-*/kernels/cpu/backend.py"):
        changed.write_text(changed.read_text() + "# changed\n")
    (found,) = run(folder, given[0], code)
    assert not {file.name for file in names} & set(found["names"])


@pytest.mark.slow
def test_processes_that_it_starts(folder, given, tmp_path):
    """Checks in a process of their own, and compilers: both import the kernel from its folder."""
    code = """
group = import_module(kernel.__name__ + ".selftest.run").run_group("cpu", "cpu", "gates", quick=True)
say(right=[finding.right for finding in group.findings])
ahead = import_module(kernel.__name__ + ".kernels.common.ahead")
worker = ahead._Worker(import_module(kernel.__name__ + ".kernels.backend").Gpu((8, 0), 108))
arguments = (8, 0), "no module", "no_kernel", (), (), ()
job = ahead.Build(kernel.__name__ + ".kernels.portable.launch", "cubins", arguments)
try:
    worker.build(job)
except RuntimeError as error:
    say(error=str(error))
worker.end()
"""
    checked, built = run(folder, given[0], code, MOE_NVFP4_CACHE=str(tmp_path))
    assert checked["right"] and all(right is not False for right in checked["right"]) and True in checked["right"]
    assert "No module named 'no module'" in built["error"]


def test_it_is_described(folder):
    found = [json.loads((folder / f"build/torch-{b}/metadata.json").read_text()) for b in ("cpu", "cuda")]
    assert [one["backend"]["type"] for one in found] == ["cpu", "cuda"]
    assert found[0]["id"] != found[1]["id"] and found[0]["id"].isidentifier()
    assert 'backends = ["cpu", "cuda"]' in (folder / "build.toml").read_text()
    with pytest.raises(ValueError, match="exists: name a folder that does not"):
        hub.write(folder)


def test_a_folder_that_is_there_is_an_error_of_one_line(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hub", str(folder)])
    with pytest.raises(SystemExit) as stopped:
        hub.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(
        f"error: {folder} exists: name a folder that does not, or remove it first\n"
    )


def test_every_kernel_is_in_it():
    """What backends import by name, at run time, is no import that a reader of the sources sees."""
    found = hub.closure(hub.STARTS)
    kernels = {str(p.relative_to(hub.ROOT).with_suffix("")) for p in Path(hub.ROOT, "kernels").rglob("*.py")}
    assert kernels - found <= {"kernels/sm90/__main__"}, kernels - found
