"""A backend's first layer on a device where nothing proves it is checked, in a process of its own."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from moe_nvfp4 import NVFP4Experts, backends
from moe_nvfp4.child import run_child
from moe_nvfp4.kernels import proof
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.linear import NVFP4Linear

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"the CPU kernels cannot be compiled: {cpu.missing()}")
ROOT = Path(__file__).parents[2]
# Python runs it first in every process that finds it, such as the one that checks.
PLANTED = """
import os, sys, time
from moe_nvfp4.kernels.cpu import CPU
right = CPU.experts
def experts(self, x, ids, p, w):
    y = right(self, x, ids, p, w)
    {mistake}
    return y
CPU.experts = experts
if "moe_nvfp4.selftest" in sys.orig_argv:
    from moe_nvfp4.selftest import cases
    cases.SECONDS = {seconds}
"""
MISTAKES = {
    "y[-1, 5] += 0.5 * y[-1].norm() / y.shape[1] ** 0.5": r"T 1: ",
    "time.sleep(1000)": r"not over after 2 s",
    "os.abort()": r"ended by SIGABRT",
}


@pytest.fixture
def unproven(tmp_path, monkeypatch):
    """A cache of the test's own, in which nothing is known of this CPU."""
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOE_NVFP4_CHECK", raising=False)
    monkeypatch.setattr(proof, "PROVEN", {})
    backends.forget()
    yield tmp_path
    backends.forget()


def layer(H=96, I=64):
    return NVFP4Experts.from_dense(torch.randn(6, 2 * I, H), torch.randn(6, H, I))


def notes(folder):
    return [json.loads(file.read_text()) for file in (folder / "cache/checks").glob("*.json")]


def counted(monkeypatch):
    """The arguments of processes that check."""
    runs, run = [], proof.run_child
    monkeypatch.setattr(proof, "run_child", lambda *arguments: runs.append(arguments) or run(*arguments))
    return runs


@pytest.mark.slow
def test_right_results_are_noted_once(unproven, monkeypatch, capfd):
    runs = counted(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layer().backend().name == "cpu" and len(runs) == 1
        assert "checking them, once (MOE_NVFP4_CHECK=0 skips this)" in capfd.readouterr().err
        assert layer().backend().name == "cpu" and len(runs) == 1  # this process knows
        backends.forget()
        assert layer().backend().name == "cpu" and len(runs) == 1  # the cache knows
        (note,) = notes(unproven)
        assert note["right"] and "H 96, I 64, silu, bf16, bfloat16" in note["subject"]
        assert layer(64, 64).backend().name == "cpu" and len(runs) == 2  # other sizes
        assert NVFP4Linear(64, 48).backend().name == "cpu" and len(runs) == 3
        assert NVFP4Linear(32, 16).backend().name == "cpu" and len(runs) == 3  # one linear stands for all
        (row,) = [row for row in backends.report() if row.backend == "cpu"]
        assert row.proof.count(": right") == 3
        monkeypatch.setenv("MOE_NVFP4_CHECK", "always")
        backends.forget()
        assert layer().backend().name == "cpu" and len(runs) == 4
        assert capfd.readouterr().err.endswith("(MOE_NVFP4_CHECK=always)\n")


@pytest.mark.slow  # a process takes five seconds to start
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_results_are_not_used(mistake, unproven, monkeypatch):
    planted = PLANTED.format(mistake=mistake, seconds=2.0 if "sleep" in mistake else 60.0)
    (unproven / "sitecustomize.py").write_text(planted)
    monkeypatch.syspath_prepend(unproven)
    mine = layer()
    with pytest.warns(UserWarning, match="plain torch operations") as caught:
        assert mine.backend().name == "reference"
    said = str(caught[0].message)
    assert re.search(MISTAKES[mistake], said) and "selftest --report" in said and "MOE_NVFP4_CHECK=0" in said
    runs = counted(monkeypatch)
    backends.forget()
    with pytest.warns(UserWarning, match=MISTAKES[mistake]):  # the next process says it again
        assert layer().backend().name == "reference" and not runs
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "cpu")
    with pytest.raises(ValueError, match="MOE_NVFP4_BACKEND=cpu on cpu: cpu gave wrong results"):
        mine.backend()
    monkeypatch.setenv("MOE_NVFP4_CHECK", "0")
    backends.forget()
    assert mine.backend().name == "cpu" and not runs


def test_what_cannot_be_checked_runs_with_a_warning(unproven, monkeypatch):
    (unproven / "sitecustomize.py").write_text("import sys\n'moe_nvfp4.selftest' in sys.orig_argv and sys.exit('no')")
    monkeypatch.syspath_prepend(unproven)
    with pytest.warns(UserWarning, match="could not be checked on .* and run unchecked: the process ended"):
        assert layer().backend().name == "cpu"
    assert notes(unproven) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"right": true}', "\0" * 20])
def test_half_a_note_is_made_again(damage, unproven, monkeypatch):
    """As after a power failure."""
    monkeypatch.setattr(proof, "_check", lambda *arguments: (True, ""))
    assert layer().backend().name == "cpu"
    (file,) = (unproven / "cache/checks").glob("*.json")
    file.write_text(damage)
    assert proof.state(backends.named("cpu"), torch.device("cpu")) == "its first layer will be checked"
    backends.forget()
    assert layer().backend().name == "cpu" and notes(unproven)[0]["right"] is True


def test_notes_that_cannot_be_written(unproven, monkeypatch):
    """The check counts for this process. A folder that is read-only, of a container say, is still read."""
    runs = []
    monkeypatch.setattr(proof, "_check", lambda *arguments: runs.append(1) or (True, ""))
    monkeypatch.setattr(proof.os, "replace", refused)
    assert layer().backend().name == layer().backend().name == "cpu" and len(runs) == 1
    monkeypatch.undo()
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(unproven / "cache"))
    monkeypatch.delenv("MOE_NVFP4_CHECK", raising=False)
    monkeypatch.setattr(proof, "PROVEN", {})
    monkeypatch.setattr(proof, "_check", lambda *arguments: runs.append(1) or (True, ""))
    for _ in range(2):
        backends.forget()
        assert layer().backend().name == "cpu" and len(runs) == 2
        monkeypatch.setattr(proof.os, "access", lambda *arguments: False)
        monkeypatch.setattr(proof, "FileLock", refused)


def test_a_lock_of_another_user(unproven, monkeypatch):
    """As after sudo. What is found is noted all the same: the folder is this user's."""
    monkeypatch.setattr(proof, "_check", lambda *arguments: (True, ""))
    monkeypatch.setattr(proof, "FileLock", refused)
    assert layer().backend().name == "cpu" and notes(unproven)[0]["right"] is True


def refused(*arguments):
    raise OSError(28, "No space left on device")


def test_lines_of_a_child_that_are_no_objects():
    code = """print("{not json"); print('{"case": 1}'); print('{"case": ', end="")"""
    found, ended = run_child("timeit", ["-n", "1", "-r", "1", code], {}, 60)
    assert found == [{"case": 1}] and ended == ""


def test_what_is_proven_is_not_checked(monkeypatch):
    monkeypatch.delenv("MOE_NVFP4_CHECK", raising=False)
    monkeypatch.setattr(proof, "PROVEN", {"cpu": {cpu.path(): ()}})
    monkeypatch.setattr(proof, "run_child", lambda *_: pytest.fail("a process was started"))
    backends.forget()
    assert layer().backend().name == "cpu"
    monkeypatch.setenv("MOE_NVFP4_CHECK", "never")
    backends.forget()
    with pytest.raises(ValueError, match="MOE_NVFP4_CHECK=never is unknown: 0, once or always"):
        layer().backend()


RANK = """
import torch
from moe_nvfp4 import NVFP4Experts
from moe_nvfp4.kernels import proof
proof.PROVEN = {}
torch.manual_seed(0)
layer = NVFP4Experts.from_dense(torch.randn(6, 128, 96), torch.randn(6, 96, 64))
print(layer.backend().name)
"""


@pytest.mark.slow
def test_ranks_of_one_machine_share_the_check(unproven):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)
    ]
    ended = [rank.communicate(timeout=300) for rank in ranks]
    assert [out for out, _ in ended] == ["cpu\n"] * 3
    assert sum("checking them" in err for _, err in ended) == 1 and len(notes(unproven)) == 1


@pytest.mark.slow
def test_a_compiled_call_is_checked(unproven):
    mine = layer()
    batch = torch.randn(5, 96).bfloat16(), torch.randint(0, 6, (5, 2)), torch.rand(5, 2)
    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*batch), mine(*batch)) and len(notes(unproven)) == 1


def test_proofs_have_reports():
    """What is said to be proven is in a report of docs/proven, without a case that went wrong."""
    reports = [json.loads(file.read_text("utf-8")) for file in (ROOT / "docs/proven").glob("*.json")]
    shown = set()
    for report in reports:
        assert report["summary"]["wrong"] == 0 and not report["quick"]
        for group in report["groups"]:
            name, packages = report["names"][group["device"]], report["packages"]
            package = {"cpu": None, "portable": "triton"}.get(group["backend"], "nvidia-cutlass-dsl")
            where = re.search(r"\((\w+)\)$", name)[1] if package is None else name.partition(" (")[0]
            shown.add((group["backend"], where, package and ".".join(packages[package].split(".")[:2])))
    claimed = {
        (backend, where, version)
        for backend, devices in proof.PROVEN.items()
        for where, versions in devices.items()
        for version in versions or (None,)
    }
    assert claimed and claimed <= shown
