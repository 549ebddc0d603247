"""The sm_80 backend's GEMMs on the emulator, beside the reference, and what ptxas makes of them: no GPU is needed.

Every tile shape runs both GEMMs, with tails of K and of tokens. What a kernel does not write is NaN.
"""

import shutil

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL compiles the kernels")
pytest.importorskip("tvm_ffi", reason="the kernels' host code is TVM-FFI's")
pytest.importorskip("triton", reason="all kernels but the GEMMs are Triton's")
if shutil.which("cc") is None:
    pytest.skip("the emulator links the compiled host code with cc", allow_module_level=True)

from moe_nvfp4 import format as nvfp4  # noqa: E402
from moe_nvfp4.kernels.backend import Gpu  # noqa: E402
from moe_nvfp4.kernels.sm80 import backend as sm80  # noqa: E402
from moe_nvfp4.kernels.sm80 import plan as plans  # noqa: E402
from moe_nvfp4.kernels.sm80.config import GemmConfig, TileShape  # noqa: E402
from moe_nvfp4.kernels.sm80.plan import Gemm, LayerPlan  # noqa: E402
from moe_nvfp4.kernels.sm90.pack import pack_linear, pack_weights  # noqa: E402
from moe_nvfp4.weights import SILU, Gate, LinearWeights, Matrices  # noqa: E402
from tests.common import THRESHOLDS, check_stages, random_ids, random_layer, reference_layer, relative_error  # noqa: E402
from tests.emulator import compile_for  # noqa: E402
from tests.kernels.emulator_sm80 import on_emulator  # noqa: E402
from tests.kernels.machine_code import counts  # noqa: E402

OAI = Gate("silu", alpha=1.702, limit=1.5, up_offset=1.0)
RELU2 = Gate("relu2", gated=False)
RAW = Gate("raw")
GPUS = {"A100": (8, 0), "RTX 3090": (8, 6), "L40S": (8, 9), "H200": (9, 0), "RTX 5090": (12, 0)}
SHAPES = {f"{tile.BN} tokens, {tile.rows} rows, {tile.KB} x {tile.stages} x {tile.ctas}": tile
          for tiles in (*plans._SHAPES.values(), plans._DEEP) for tile in tiles}  # fmt: skip


@pytest.fixture
def emulator():
    with on_emulator() as runner:
        yield runner


def make_layer(E, H, *args, **settings):
    """A layer with block scales near 1, some of them zero, and outputs near 1."""
    ranges = dict(sf=(40, 72), often=(0, 0.02), scale=1 / (8 * H**0.5), input_scale=1.5e-3)
    return random_layer(E, H, *args, **ranges, **settings)


def check(emulator, layer, ids, schedules=("random:1",)):
    """Run the whole layer under each schedule: the reference's values, and the same bits every time."""
    w = layer.weights
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ids.shape[0], w.hidden_size, generator=g).bfloat16()
    top_k_weights = torch.rand(ids.shape, generator=g)
    want, packed, results = reference_layer(x, ids, top_k_weights, w), pack_weights(w), []
    for emulator.schedule in schedules:
        emulator.kernels = []
        results.append(sm80.experts(x, ids, top_k_weights, packed))
    assert results[0].isfinite().all()
    assert relative_error(results[0], want) < THRESHOLDS["half" if w.activations == "bf16" else "w4a4"]
    assert all(torch.equal(result, results[0]) for result in results)
    return emulator.kernels


def planned(monkeypatch, tile, up=False, down=False, few=False, rows=torch.float32):
    plan = LayerPlan(Gemm(tile, up), Gemm(tile, down), few, rows)
    monkeypatch.setattr(sm80, "plan_experts", lambda *_: plan)
    monkeypatch.setattr(sm80, "plan_linear", lambda *_: plan.up)


# ---- layers --------------------------------------------------------------------------------------


# Shapes that differ in more than the number of stages and of CTAs, by turns with the fewest stages and the most
RINGS: dict[tuple, list[str]] = {}
for _name, _tile in SHAPES.items():
    RINGS.setdefault((_tile.BN, _tile.KB), []).append(_name)


@pytest.mark.parametrize("name", [names[-(i % 2)] for i, names in enumerate(RINGS.values())])
def test_tiles(emulator, monkeypatch, name):
    """Whole tiles and small ones, of rows in parts that CTAs share: more CTAs than tiles, and fewer."""
    tile, number = SHAPES[name], list(SHAPES).index(name)
    gate, bias = ((SILU, None), (OAI, torch.bfloat16), (RELU2, torch.float32))[number % 3]
    planned(monkeypatch, tile, number % 2 == 0, number % 2 == 1)
    sizes = [tile.BN + 3, 0, 8 * tile.small or 7]
    layer = make_layer(3, 64 * tile.KB * (2 if tile.KB < 4 else 1) + 48, 64 * tile.KB + 16, gate, bias=bias)
    kernels = check(emulator, layer, random_ids(sizes, 3, 2))
    assert [(k.t, k.config.gate) for k in kernels] == [(tile, gate), (tile, None)]


def test_shared_tiles_have_the_same_bits(emulator, monkeypatch):
    """However CTAs come: a tile's parts are added in one order. Ranges begin and end within tiles."""
    planned(monkeypatch, TileShape(2, WM=1, WK=2, KB=2, stages=3), True, True, rows=torch.bfloat16)
    emulator.multiprocessors = 7
    schedules = "eager", "slow:1", "reverse-lazy", "random:2"
    check(emulator, make_layer(2, 64 * 7, 64 * 5), random_ids([20, 9], 0, 1), schedules)


@pytest.mark.parametrize("shares", [False, True])
def test_a_few_assignments_are_not_sorted(emulator, monkeypatch, shares):
    """Up to 32, among them more of one expert than fit into a tile, and some without an expert."""
    for sizes, unrouted, top_k in (([19, 0, 4, 1], 4, 4), ([32, 0], 0, 2), ([0, 0], 3, 1)):
        layer = make_layer(len(sizes), 304, 144, OAI, bias=torch.bfloat16)
        planned(monkeypatch, plans._SHAPES[16][1], down=shares, few=True)
        kernels = check(emulator, layer, random_ids(sizes, unrouted, top_k))
        assert [k.config.tiles for k in kernels] == ["few", "few"]


def test_what_the_plan_chooses(emulator):
    """Few assignments to many experts are not sorted, more are."""
    layer = make_layer(8, 64, 80)
    for sizes, tiles, BN in (([1, 2, 0, 3, 1, 0, 0, 1], "few", 16), ([20] * 8, "sorted", 32)):
        kernels = check(emulator, layer, random_ids(sizes, 0, 2))
        assert all(k.config.tiles == tiles and k.t.BN == BN for k in kernels)


def test_sums_are_exact(emulator, monkeypatch):
    """Bit-equal to float64 where fp32 holds every sum: codes times sf times integers, a scale of one."""
    planned(monkeypatch, SHAPES["128 tokens, 256 rows, 1 x 3 x 1"], True)
    g, (N, K, T) = torch.Generator().manual_seed(0), (272, 336, 131)
    codes = torch.randint(0, 256, (N, K // 2), generator=g, dtype=torch.uint8)
    sf = torch.tensor([0x30, 0x38, 0x40, 0x00], dtype=torch.uint8)[torch.randint(0, 4, (N, K // 16), generator=g)]
    x = torch.randint(-3, 4, (T, K), generator=g).bfloat16()
    matrix = Matrices(codes, sf, torch.ones(1), N, K)
    want = x.double() @ nvfp4.dequantize(codes, sf, torch.ones(1)).double().T
    got = sm80.linear(x, LinearWeights(pack_linear(matrix), None, "bf16"))
    assert torch.equal(got, want.float().bfloat16())


def test_stages_of_their_own(emulator):
    """gemm1_swiglu with a raw gate, and gemm2_combine, for models whose gate or norm runs in between."""
    emulator.schedule = "random:3"
    layer = make_layer(2, 96, 80, RAW, bias=torch.bfloat16)
    check_stages(sm80, layer.weights, pack_weights(layer.weights), random_ids([9, 2], 2, 2))


@pytest.mark.parametrize("activations, static, sizes", [
    ("nvfp4", False, [3, 0, 1, 0, 2]), ("nvfp4", True, [3, 0, 1, 0, 2]), ("nvfp4", False, [40, 9]),
    ("nvfp4_four_over_six", False, [3, 0, 1, 0, 2]), ("nvfp4_four_over_six", True, [40, 9]),
])  # fmt: skip
def test_nvfp4_activations(emulator, activations, static, sizes):
    """Rows with global scales of their own or their experts', with and without sorting."""
    layer = make_layer(len(sizes), 304, 144, SILU, activations, torch.bfloat16, static)
    kernels = check(emulator, layer, random_ids(sizes, 2, 2))
    assert all(k.config.row_scale for k in kernels)


@pytest.mark.parametrize("T, static, WK", [(1, None, 8), (20, None, 2), (70, True, 1), (3, False, 8)])
def test_linears(emulator, T, static, WK):
    """One matrix has all rows; where it has few tiles, more warps split K."""
    emulator.schedule = "random:5"
    g, N, K = torch.Generator().manual_seed(T), 144, 784
    codes = torch.randint(0, 256, (N, K // 2), generator=g, dtype=torch.uint8)
    sf = torch.randint(40, 72, (N, K // 16), generator=g, dtype=torch.uint8)
    bias = torch.randn(N, generator=g).bfloat16() if T % 2 else None
    matrix = Matrices(codes, sf, torch.tensor([1 / (8 * K**0.5)]), N, K, bias=bias)
    w = LinearWeights(matrix, None, "bf16" if static is None else "nvfp4")
    x = torch.randn(T, K, generator=g).bfloat16()
    rows = x.double()
    if static is not None:
        w = w._replace(input_scale=torch.tensor([1.5e-3]) if static else None)
        scale = w.input_scale.expand(T) if static else nvfp4.global_scale_for(x.abs().amax(1).float())
        rows = nvfp4.dequantize(*nvfp4.quantize(x, scale, check=False)).double()
    want = rows @ nvfp4.dequantize(codes, sf, matrix.global_scale).double().T
    want += 0 if bias is None else bias.double()
    got = sm80.linear(x, w._replace(matrix=pack_linear(matrix)))
    assert relative_error(got, want) < THRESHOLDS["half"] and emulator.kernels[0].t.WK == WK


# ---- machine code --------------------------------------------------------------------------------


def kernels_of(gpu):
    """(kernel, arguments, architecture) by each tile that this GPU has (8.6 and 8.9, whose tiles are the 5090's: the
    largest one), of GEMM 1 without sharing and GEMM 2 with it."""
    every = (*plans._SHAPES.values(), plans._DEEP)
    for shapes in (plans._SHAPES[128],) if gpu.capability in ((8, 6), (8, 9)) else every:
        tile = plans._fitting(shapes, gpu)
        for gate in (SILU, None):
            config = GemmConfig("sorted", gate, shares=gate is None)
            present = gate is not None, gate is None, False
            yield sm80._kernel.make(gpu.architecture, tile, config, present, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["A100", "RTX 3090", "L40S", "RTX 5090"])
def test_machine_code(gpu, record_property):
    """ptxas keeps all in registers, unless CTAs share tiles: then it puts up to 12 words aside."""
    table = []
    for kernel, arguments, architecture in kernels_of(Gpu(GPUS[gpu], 100)):
        found = counts(compile_for(architecture, kernel, arguments).__cubin__, ("HMMA", "LDL", "STL"))
        assert found["HMMA"] and found["LOCAL"] == 0
        assert found["STACK"] <= (48 if kernel.config.shares else 0), found
        table.append(found)
    assert len(table) == 2 * (1 if gpu in ("RTX 3090", "L40S") else 1 + len(plans._SHAPES))
    record_property("table", "\n".join(map(str, table)))


@pytest.mark.parametrize("gpu", GPUS)
def test_shared_memory(gpu):
    """Every number of tokens has a shape for each GPU: 163 KB on an A100, 99 KB on GeForce."""
    most = {(8, 0): 163 << 10, (9, 0): 227 << 10}.get(GPUS[gpu], 99 << 10)
    for shapes in (*plans._SHAPES.values(), plans._DEEP):
        tile = plans._fitting(shapes, Gpu(GPUS[gpu], 100))
        assert tile.shared_bytes <= most and tile.ctas * (tile.shared_bytes + 1024) <= plans.SHARED[GPUS[gpu]]
