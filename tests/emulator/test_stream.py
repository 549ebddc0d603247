"""Which tensors a kernel may use before griddepcontrol.wait, in a stream of torch's kernels and emulated ones."""

import pytest
import torch

from tests.emulator import EmulatorError, emulate
from tests.emulator.ptx import kernel
from tests.emulator.stream import Stream

WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
COPY = """ld.param.u64 %x2, [in]; mad.wide.u32 %x3, %t, 4, %x2; ld.global.b32 %r2, [%x3];
    mad.wide.u32 %x4, %t, 4, %out; {} st.global.b32 [%x4], %r2;"""


def launch(stream, out, source, before_read=WAIT, before_write=""):
    """out = source, by a kernel that runs `before_read` before it reads and `before_write` before it writes."""
    ptx = kernel(before_read + COPY.format(before_write), [".u64 in"])
    run = lambda *arguments, **options: [emulate(ptx, arguments, 1, 32, **options)]
    stream.launch(run, out, source, outputs=[out], unwritten=[out])


def refused():
    return pytest.raises(EmulatorError, match="griddepcontrol.wait was not called")


def test_what_the_kernel_before_wrote():
    with Stream() as stream:
        a, b, c = (torch.empty(32, dtype=torch.int32) for _ in range(3))
        torch.arange(32, out=a)
        launch(stream, b, a)
        launch(stream, c, b)
        with refused():
            launch(stream, a, c, before_read="", before_write=WAIT)
    assert c.tolist() == list(range(32))


def test_what_is_older():
    with Stream() as stream:
        a, b, c = torch.arange(32, dtype=torch.int32), *torch.empty(2, 32, dtype=torch.int32).unbind()
        launch(stream, b, a)
        launch(stream, c, a, before_read="", before_write=WAIT)
        assert c.tolist() == list(range(32))
        launch(stream, c, b)
        with refused():
            launch(stream, c, a, before_read="")  # the kernel before may still be writing there


def test_a_kernel_that_lets_the_next_one_start_early():
    """Then the kernel before it may still be running, too."""
    with Stream() as stream:
        a, b, c = torch.arange(32, dtype=torch.int32), *torch.empty(2, 32, dtype=torch.int32).unbind()
        other = a.clone()
        launch(stream, b, other, before_read=WAIT + TRIGGER)
        launch(stream, c, other, before_read="", before_write=WAIT)
        other += 1
        launch(stream, b, a, before_read=TRIGGER, before_write=WAIT)
        with refused():
            launch(stream, c, other, before_read="", before_write=WAIT)


def test_kernels_of_torch():
    with Stream() as stream:
        a = torch.zeros(4, 32)
        for operation, written in [
            (lambda: a.view(32, 4).T, [a]),
            (lambda: torch.empty(3), [a]),
            (lambda: a.contiguous(), [a]),
            (lambda: a.split(2), [a]),
            (lambda: a[1].add_(1), [a[1]]),
        ]:
            stream.unsettled = [a]
            operation()
            assert [t.data_ptr() for t in stream.unsettled] == [t.data_ptr() for t in written]
        for operation, outputs in [(lambda: a.T.contiguous(), 1), (lambda: a.sort(), 2), (lambda: a.sum().item(), 0)]:
            stream.unsettled = [a]
            operation()
            assert len(stream.unsettled) == outputs and all(t is not a for t in stream.unsettled)
