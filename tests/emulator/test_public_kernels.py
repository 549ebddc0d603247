"""Kernels that others published, compiled here and run on the emulator: it must find them right.

torch brings two of NVIDIA's CUTLASS (`torch/_inductor/kernel/vendored_templates/cutedsl`). What they leave out of what
the PTX ISA asks for is what `lenient` accepts, see README.md.
"""

import shutil
from inspect import signature
from types import SimpleNamespace

import pytest
import torch

cutlass = pytest.importorskip("cutlass", reason="CuTe DSL compiles the kernels")
pytest.importorskip("tvm_ffi", reason="the kernels' host code is TVM-FFI's")
if shutil.which("cc") is None:
    pytest.skip("the emulator links the compiled host code with cc", allow_module_level=True)

from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float32, Int32, Int64, Uint8, cute  # noqa: E402

from tests.emulator import Emulated, EmulatorError, compiling_for  # noqa: E402
from tests.emulator.kernels import compile, fake  # noqa: E402
from tests.emulator.launch import Tensor, address_of, device_memory  # noqa: E402
from tests.emulator.test_kernels import blackwell_problem, integers  # noqa: E402

pytestmark = pytest.mark.slow


class BlockScaled:
    """CUTLASS's persistent NVFP4 GEMM, for tensors of bytes."""

    def __init__(self, tile, cluster):
        templates = pytest.importorskip(
            "torch._inductor.kernel.vendored_templates.cutedsl.dense_blockscaled_gemm_persistent",
            reason="this torch brings no CUTLASS kernels",
        )
        self.gemm = templates.Sm100BlockScaledPersistentDenseGemmKernel(16, tile, cluster)
        self.clusters = 2 // (cluster[0] * cluster[1]) or 1
        self.scaled = "alpha_tensor" in signature(type(self.gemm).__call__).parameters  # from torch 2.15 on

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, sfa: cute.Tensor, sfb: cute.Tensor, alpha: cute.Tensor,
                 out: cute.Tensor, stream):  # fmt: skip
        (m, k), n = a.shape, b.shape[0]
        k = 2 * k

        def tensor(t, dtype, shape, stride):
            return cute.make_tensor(cute.recast_ptr(t.iterator, dtype=dtype), cute.make_layout(shape, stride=stride))

        self.gemm(
            tensor(a, Float4E2M1FN, (1, m, k), (m * k, k, 1)),
            tensor(b, Float4E2M1FN, (1, k, n), (n * k, 1, k)),
            tensor(sfa, Float8E4M3FN, (m * k // 16,), (1,)),
            tensor(sfb, Float8E4M3FN, (n * k // 16,), (1,)),
            tensor(out, Float32, (1, m, n), (m * n, n, 1)),
            self.clusters,
            stream,
            **({"alpha_tensor": alpha} if self.scaled else {}),
        )


@pytest.fixture(autouse=True)
def names_of_an_older_dsl(monkeypatch):
    """torch 2.13 brings kernels for a CuTe DSL before 4.8, in which two enumerations were still public."""
    if not hasattr(cute.arch, "ProxyKind"):
        monkeypatch.setattr(cute.arch, "ProxyKind", SimpleNamespace(async_shared="async.shared"), raising=False)
        monkeypatch.setattr(cute.arch, "SharedSpace", SimpleNamespace(shared_cta="cta"), raising=False)


@pytest.mark.parametrize("tile, cluster, n", [((128, 128), (1, 1), 128), ((256, 128), (2, 1), 256)], ids=str)
def test_block_scaled_gemm(tile, cluster, n):
    """Right, but only with `lenient`: it has no tcgen05.fence."""
    operands = fake(Uint8, None, None, align=32), fake(Uint8, None, None, align=32)
    scales = fake(Uint8, None, align=128), fake(Uint8, None, align=128), fake(Float32, 1)
    with compiling_for("sm_100a"):
        gemm = Emulated(compile(BlockScaled(tile, cluster), *operands, *scales, fake(Float32, None, None)))
    for schedule in ("lazy", "slow:1"):
        (*inputs, out), expected = blackwell_problem(256, n, 512)
        arguments = *inputs, torch.ones(1), out
        gemm(*arguments, unwritten=arguments[-1:], schedule=schedule, lenient=True)
        assert torch.equal(arguments[-1].double(), expected)
    with pytest.raises(EmulatorError, match="without tcgen05.fence::before_thread_sync"):
        gemm(*arguments, unwritten=arguments[-1:], schedule="lazy")


class Grouped:
    """CUTLASS's grouped bf16 GEMM, which makes each group's tensor maps on the device."""

    def __init__(self, groups, tile, cluster):
        templates = pytest.importorskip(
            "torch._inductor.kernel.vendored_templates.cutedsl.kernels.cutedsl_grouped_gemm",
            reason="this torch brings no CUTLASS kernels",
        )
        self.gemm = templates.GroupedGemmKernel(Float32, tile[0] == 256, tile, cluster)
        self.groups, self.clusters = groups, 6 // (cluster[0] * cluster[1])

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, shapes: cute.Tensor, strides: cute.Tensor,
                 pointers: cute.Tensor, maps: cute.Tensor, stream):  # fmt: skip
        def batch(t):
            return cute.make_tensor(t.iterator, cute.make_layout((*t.shape, 1), stride=(t.shape[1], 1, 0)))

        self.gemm(batch(a), batch(b), batch(out), self.groups, shapes, strides, pointers, self.clusters, maps,
                  self.clusters, stream)  # fmt: skip


@pytest.mark.parametrize("tile, cluster", [((128, 64), (1, 1)), ((256, 64), (2, 1))], ids=str)
def test_grouped_gemm(tile, cluster):
    sizes = [(128, 64, 192), (200, 96, 64)]
    of = fake(BFloat16, None, None), fake(BFloat16, None, None), fake(Float32, None, None)
    lists = fake(Int32, 2, 4), fake(Int32, 2, 3, 2), fake(Int64, 2, 3), fake(Int64, 6, 3, 16, align=128)
    with compiling_for("sm_100a"):
        gemm = Emulated(compile(Grouped(2, tile, cluster), *of, *lists))
    for schedule in ("lazy", "random:1"):
        groups = [(integers(m, k), integers(n, k), torch.zeros(m, n)) for m, n, k in sizes]
        kept = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(16, 16)
        shapes = torch.tensor([(*size, 1) for size in sizes], dtype=torch.int32)
        strides = torch.tensor([[(k, 1), (k, 1), (n, 1)] for m, n, k in sizes], dtype=torch.int32)
        maps = torch.zeros(6, 3, 16, dtype=torch.int64)
        memory = device_memory([*(t for group in groups for t in group), *kept, shapes, strides, maps])
        pointers = torch.tensor([[address_of(t, memory) for t in group] for group in groups])
        Tensor.of(pointers).place(memory, "pointers")
        gemm(*kept, shapes, strides, pointers, maps, memory=memory, schedule=schedule, lenient=True)
        for a, b, out in groups:
            assert torch.equal(out.double(), a.double() @ b.double().T)
