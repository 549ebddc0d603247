"""What `python -m tests.record_b200` would do on a Blackwell, as far as it goes without one."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.blackwell_instructions import GROUPS
from tests.record_b200 import GPU_TESTS, ROOT, difference, parts

CASES = {name: case for group, cases in GROUPS.items() if "tcgen05" in group for name, case in cases.items()}


def test_every_file_with_gpu_tests_is_run():
    skips = r"skipif\(not torch\.cuda|if not torch\.cuda\.is_available\(\)|import.* on_gpu|@on_gpu|else .cpu."
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in Path(ROOT, "tests").rglob("test_*.py")}
    found = {name for name, text in texts.items() if re.search(skips, text)} - {"tests/kernels/test_record_b200.py"}
    assert found <= set(GPU_TESTS), "name them in GPU_TESTS"
    assert all((ROOT / name).exists() for name in GPU_TESTS)


@pytest.mark.parametrize("name", list(CASES)[::9])
def test_instructions_on_the_emulator(name):
    """They run, and what is exact there is the same under another schedule."""
    case = CASES[name]
    (found,), (again,) = case.emulated("lazy"), case.emulated("random:1")
    assert np.array_equal(found, again) and np.isfinite(found).all() and (found != 0).any()


def test_differences():
    ones = np.ones(8, np.float32)
    off = ones.copy()
    off[3] = np.nextafter(np.float32(1), np.float32(2))
    assert difference(off, ones) == "12.5% differ, by 1.00 units of the largest's last place"
    assert difference(ones.view(np.uint32), off.view(np.uint32)) == "1 of 8 differ"


@pytest.mark.parametrize("capability, names", [(10, "machine instructions layers tests times model"),
                                               (9, "machine instructions layers tests times"),
                                               (8, "machine layers tests times")])  # fmt: skip
@pytest.mark.parametrize("quick", [False, True])
def test_parts(tmp_path, capability, names, quick):
    found = {name: command for name, _, command in parts(tmp_path, capability, quick)}
    assert [n for n in found if "flashinfer" not in n] == names.split()
    assert ("tests/kernels/test_sm100_gpu.py" in found["tests"]) == (not quick)
