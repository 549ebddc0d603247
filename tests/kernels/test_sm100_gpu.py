"""The Blackwell kernels on a Blackwell: the emulator's problems, with the same bounds."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10:
    pytest.skip("needs a GPU of compute capability 10.0 or 10.3", allow_module_level=True)
pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from moe_nvfp4.kernels.sm100 import backend as sm100
from moe_nvfp4.selftest import cases
from tests.kernels.emulator_sm100 import OnEmulator, in_place_of_launch, outputs_of
from tests.kernels.test_sm100 import (  # noqa: F401 (pytest finds them here)
    test_gates,
    test_many_experts,
    test_no_tokens,
    test_one_expert,
    test_quantize_rows,
    test_random_problems,
    test_routings,
    test_sizes,
    test_tiles_of_gate_and_up,
    test_tiles_of_one_projection,
)
from tests.kernels.test_sm100_w4a16 import test_gates as test_w4a16_gates  # noqa: F401
from tests.kernels.test_sm100_w4a16 import test_parts_of_k as test_w4a16_parts_of_k  # noqa: F401
from tests.kernels.test_sm100_w4a16 import test_routings as test_w4a16_routings  # noqa: F401
from tests.kernels.test_sm100_w4a16 import test_tiles as test_w4a16_tiles  # noqa: F401
from tests.kernels.test_sm100_w4a16 import test_weights_are_exact as test_w4a16_weights_are_exact  # noqa: F401


@pytest.mark.parametrize("group", cases.GROUPS)
def test_as_a_model_runs_it(group):
    """The self-test's cases: on all multiprocessors, with launches that overlap."""
    found = list(cases.findings(cases.place("sm100", "cuda", False), group))
    assert found and not [finding for finding in found if finding.right is False]


class OnGpu(OnEmulator):
    """Replaces `sm100.launch` as `OnEmulator` does: CPU tensors are copied to the GPU, and their outputs back."""

    def launch(self, config, arguments):
        moved = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
        architecture = sm100.architecture(torch.cuda.get_device_capability())
        for tensor in outputs_of(config, moved):
            tensor.view(torch.uint8).fill_(0xFF)
        sm100.compiled(config, architecture)(*moved)
        for ours, theirs in zip(outputs_of(config, arguments), outputs_of(config, moved), strict=True):
            ours.copy_(theirs)

    def before(self, rows):
        pass


@pytest.fixture
def emulator():
    """The fixture of the imported tests, which makes them run on the GPU."""
    with in_place_of_launch(OnGpu()) as runner:
        yield runner
