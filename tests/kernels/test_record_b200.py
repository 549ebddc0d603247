"""What `python -m tests.record_b200` will do on a Blackwell, as far as it can be tested without one."""

import json
import re
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests import guarded
from tests.kernels.blackwell_instructions import GROUPS
from tests.record_b200 import GPU_TESTS, ROOT, SHAPES, difference, parts, record

CASES = {name: case for group, cases in GROUPS.items() if "tcgen05" in group for name, case in cases.items()}


def test_every_file_with_gpu_tests_is_run():
    skips = r"skipif\(not torch\.cuda|if not torch\.cuda\.is_available\(\)|import.* on_gpu|@on_gpu|else .cpu."
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in Path(ROOT, "tests").rglob("test_*.py")}
    found = {name for name, text in texts.items() if re.search(skips, text)} - {"tests/kernels/test_record_b200.py"}
    assert found <= set(GPU_TESTS), "name them in GPU_TESTS"
    assert all((ROOT / name).exists() for name in GPU_TESTS)


def test_files_named_gpu_need_one_as_a_whole():
    """tests/conftest.py leaves them out where there is none."""
    for path in Path(ROOT, "tests").rglob("test_*gpu.py"):
        assert re.search(r"^pytestmark = |allow_module_level=True", path.read_text("utf-8"), re.M), path


@pytest.mark.parametrize("name", list(CASES)[::9])
def test_instructions_on_the_emulator(name):
    """They run, and exact cases give the same under another schedule."""
    case = CASES[name]
    (found,), (again,) = case.emulated("lazy"), case.emulated("random:1")
    assert np.array_equal(found, again) and np.isfinite(found).all() and (found != 0).any()


def test_differences():
    ones = np.ones(8, np.float32)
    off = ones.copy()
    off[3] = np.nextafter(np.float32(1), np.float32(2))
    assert difference(off, ones) == "12.5% differ, by 1.00 units of the largest's last place"
    assert difference(ones.view(np.uint32), off.view(np.uint32)) == "1 of 8 differ"


@pytest.mark.parametrize("capability", [10, 9, 8])
@pytest.mark.parametrize("quick", [False, True])
def test_parts(tmp_path, capability, quick):
    """What only a Blackwell can tell comes first; every file of tests is a part, and so are the times of each layer."""
    found = {name: command for name, _, command in parts(tmp_path, capability, quick)}
    first = {10: "machine instructions layers model", 9: "machine instructions layers", 8: "machine layers"}
    assert list(found)[: len(first[capability].split())] == first[capability].split()
    times = [name for name in found if name.startswith("times_") and "flashinfer" not in name]
    assert times == [f"times_{shape}" for shape in SHAPES[: 1 if quick else None]]
    files = [next(c for c in command if c.startswith("tests/")) for name, command in found.items() if "tests_" in name]
    assert files == (["tests/kernels/test_portable_gpu.py"] if quick else list(GPU_TESTS))


@pytest.mark.slow
def test_a_part_spoils_no_other(tmp_path, capfd):
    """One fails, one cannot be started, one neither ends nor lets its child end, one begins too late."""
    hang = "print('begun', flush=True); import signal, subprocess, time; "
    hang += "signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(['sleep', '60']); time.sleep(60)"
    one = lambda name, code, limit=20: (name, limit, [sys.executable, "-S", "-c", code])
    found = [one("fails", "print('half'); raise SystemExit(3)"), ("missing", 20, ["/no/such/program"]),
             one("hangs", hang, 4), one("works", "print('whole')")]  # fmt: skip
    folder, out, start = tmp_path / "made", tmp_path / "out.zip", time.time()
    folder.mkdir()
    assert record(out, found, folder, 1, {"gpu": "none"})
    assert time.time() - start < 18
    with zipfile.ZipFile(out) as file:
        summary = json.loads(file.read("summary.json"))
        texts = {name: file.read(f"{name}.txt").decode() for name in ("fails", "hangs", "works")}
    assert texts == {"fails": "half\n", "hangs": "begun\n", "works": "whole\n"}
    statuses = {name: part["status"] for name, part in summary["parts"].items()}
    assert statuses.pop("missing").startswith("[Errno 2]")
    assert statuses == {"fails": 3, "hangs": "no end", "works": 0}
    assert record(out, [one("late", "")], folder, 0, {})
    assert "left out" in capfd.readouterr().out


@pytest.mark.slow
def test_a_test_spoils_no_other(tmp_path, monkeypatch):
    """The outcomes of tests before and after one that kills the process, or does not end, are kept."""
    tests = tmp_path / "test_some.py"
    tests.write_text("""if True:
        import os, time
        def test_a(): pass
        def test_b(): os._exit(0)
        def test_c(): assert not "why"
        def test_d(): time.sleep(60)
        def test_e(): pass
        def test_f(): import pytest; pytest.skip("no GPU")
    """)
    path = tmp_path / "results.jsonl"
    assert guarded.main(path, str(tests), "-c", "/dev/null", "--rootdir", str(tmp_path), limit=1.5) == 1
    found = {test[-1]: outcome for test, outcome in guarded.outcomes(path).items()}
    assert found == {"a": "passed", "b": "no end", "c": "failed", "d": "no end", "e": "passed", "f": "skipped"}
    assert "assert not 'why'" in path.read_text()
