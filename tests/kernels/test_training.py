"""The Triton kernels of training, in Triton's interpreter or on a GPU: dense weights from the checkpoint's layout and
from Hopper's, the gate and its gradient."""

import pytest
import torch

pytest.importorskip("triton", reason="these kernels are Triton's")

from moe_nvfp4.kernels.backend import dequantized  # noqa: E402
from moe_nvfp4.kernels.portable import BACKEND, dense  # noqa: E402
from moe_nvfp4.kernels.sm90.dequantize import window  # noqa: E402
from moe_nvfp4.kernels.sm90.pack import pack  # noqa: E402
from moe_nvfp4.weights import SILU, Gate  # noqa: E402
from tests.common import random_layer, relative_error  # noqa: E402
from tests.gradients import GATES  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(176, 80), (64, 64), (208, 48)]  # K and N that are no multiples of 64
ALL = slice(0, 3)


def projections(H, I, gated):
    layer = random_layer(3, H, I, SILU if gated else Gate("relu2", gated=False)).to(DEVICE)
    layer.unpack()
    for name in ("w13", "w2"):
        w = getattr(layer.weights, name)
        for columns in (slice(0, w.K), slice(64, 128)):
            if columns.start < min(columns.stop, w.K):
                yield w, columns


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("H, I", SIZES)
def test_dense_weights(H, I, gated):
    for w, columns in projections(H, I, gated):
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(dense.window(w, columns, dtype), dequantized(w, ALL, columns, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("H, I", SIZES)
def test_dense_weights_from_hoppers_layout(H, I, gated):
    """Exact in fp32, also the zeros of blocks whose scale is zero."""
    for w, columns in projections(H, I, gated):
        units, _ = pack(w.codes, w.sf, w.gated)
        units = w._replace(codes=units.view(torch.uint8), sf=None, layout="sm90")
        want = dequantized(w, ALL, columns, torch.float32)
        assert (want == 0).any() and torch.equal(window(units, columns, torch.float32), want)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_gates_and_their_gradients(gate, dtype):
    """Against autograd through `Gate.__call__` in fp32, with limits; and torch's own formula."""
    gate, g = GATES[gate], torch.Generator().manual_seed(0)
    z = (torch.randn(7, 74 if gate.gated else 37, generator=g) * 4).to(DEVICE, dtype)
    dh = torch.randn(7, 37, generator=g).to(DEVICE, dtype)
    leaf = z.float().requires_grad_()
    h = gate(leaf)
    h.backward(dh.float())
    limit = 2e-6 if dtype == torch.float32 else 4e-3
    for found in (gate.gradient(z, dh), BACKEND.gate_gradient(gate, z, dh), (BACKEND.gate(gate, z),)):
        for mine, theirs in zip(found, (h, leaf.grad), strict=False):
            assert mine.dtype == dtype and relative_error(mine, theirs) < limit
