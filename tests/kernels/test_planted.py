"""The sweep of planted mistakes over the smallest kernel; `python -m tests.kernels.planted` runs it over all."""

import shutil

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
pytest.importorskip("tvm_ffi", reason="the kernels' host code is TVM-FFI's")
if shutil.which("cc") is None:
    pytest.skip("the emulator links the compiled host code with cc", allow_module_level=True)

from tests.emulator.mistakes import mistakes
from tests.kernels.planted import unnoticed

WAITING = """
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1+8], %r2, 10000000;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3], %r4;
"""


def test_the_mistakes_of_a_wait_and_an_arrival():
    found = {what.partition(" line")[0].rstrip(","): text.split() for what, text in mistakes(WAITING)}
    assert list(found) == [
        "no waiting", "other parity", "relaxed", ".acquire.cluster as nothing", "without",
        ".release.cluster as .relaxed.cluster", ".release.cluster as .release.cta",
    ]  # fmt: skip
    assert found["no waiting"][:4] == ["setp.eq.u32", "%p1,", "0,", "0;"]
    assert found["other parity"][3:8] == ["other;", "xor.b32", "other,", "%r2,", "1;"]
    assert found["relaxed"][0] == "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64"


@pytest.mark.slow
def test_only_what_does_no_harm_is_not_noticed():
    count, survivors = unnoticed("combine")
    assert count == 3 and [what.split(": ")[1] for what in survivors] == ["griddepcontrol.launch_dependents;"]
