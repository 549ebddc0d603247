"""The Hopper kernels on the emulator, beside the reference: no GPU is needed.

Every tile shape runs both GEMMs, with tails of K and of tokens; rows become NVFP4 to the bit. What a kernel does not
write is NaN, and what the kernel before wrote is out of bounds until griddepcontrol.wait.
"""

import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL compiles the kernels")
pytest.importorskip("tvm_ffi", reason="the kernels' host code is TVM-FFI's")
if shutil.which("cc") is None:
    pytest.skip("the emulator links the compiled host code with cc", allow_module_level=True)

from moe_nvfp4 import format as nvfp4  # noqa: E402
from moe_nvfp4 import reference  # noqa: E402
from moe_nvfp4.cli.compile import IN, OUT  # noqa: E402
from moe_nvfp4.kernels.common.ahead import token_counts  # noqa: E402
from moe_nvfp4.kernels.common.tensors import settle, warn_unpacked  # noqa: E402
from moe_nvfp4.kernels.sm90 import backend as sm90  # noqa: E402
from moe_nvfp4.kernels.sm90.config import GemmConfig  # noqa: E402
from moe_nvfp4.kernels.sm90.one_token import suits_one_token  # noqa: E402
from moe_nvfp4.kernels.sm90.pack import pack_linear, pack_weights  # noqa: E402
from moe_nvfp4.kernels.sm90.plan import (  # noqa: E402
    K_IN_2,
    K_IN_4,
    NARROW,
    TILE_SHAPES,
    TWO_CTAS,
    TWO_IN_2,
    WIDE,
    LayerShape,
    plan_for,
    plan_linear,
)
from moe_nvfp4.routing import Rows, group_by_expert  # noqa: E402
from moe_nvfp4.weights import SILU, Gate, LinearWeights, Matrices  # noqa: E402
from tests.common import (  # noqa: E402
    THRESHOLDS,
    check_stages,
    random_ids,
    random_layer,
    reference_layer,
    reference_rows,
    relative_error,
)
from tests.emulator import EmulatorError, compile_for  # noqa: E402
from tests.kernels.emulator_sm90 import on_emulator  # noqa: E402
from tests.kernels.hopper_layers import planned, quantized_h  # noqa: E402
from tests.kernels.machine_code import counts  # noqa: E402

OAI = Gate("silu", alpha=1.702, limit=1.5, up_offset=1.0)
RELU2 = Gate("relu2", gated=False)
RAW = Gate("raw")


@pytest.fixture
def emulator():
    with on_emulator() as runner:
        yield runner


def make_layer(E, H, *args, **settings):
    """A layer with block scales near 1, some of them zero, and outputs near 1."""
    ranges = dict(sf=(40, 72), often=(0, 0.02), scale=1 / (8 * H**0.5), input_scale=1.5e-3)
    return random_layer(E, H, *args, **ranges, **settings)


def check(emulator, layer, ids, tile=None, split_k=None, schedules=("eager",), weights=torch.float32):
    """Run the whole layer under each schedule: the reference's values, and the same bits every time."""
    w = layer.weights
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ids.shape[0], w.hidden_size, generator=g).bfloat16()
    top_k_weights = torch.rand(ids.shape, generator=g).to(weights)
    want = reference_layer(x, ids, top_k_weights, w)
    packed = pack_weights(w)
    results, as_planned = [], nullcontext()
    if tile is not None or split_k is not None:
        plan = sm90.choose_plan(w, *ids.shape, sm90.multiprocessors(x.device))
        plan = replace(plan, tile=tile or plan.tile, split_k=split_k or plan.split_k)
        as_planned = planned(replace(plan, config=replace(plan.config, gathered=plan.tile.BN not in (32, 128, 144))))
    with as_planned:
        for emulator.schedule in schedules:
            emulator.kernels = []
            results.append(sm90.experts(x, ids, top_k_weights, packed))
    assert results[0].isfinite().all()
    assert relative_error(results[0], want) < THRESHOLDS["half" if w.activations == "bf16" else "w4a4"]
    assert all(torch.equal(result, results[0]) for result in results)
    return [kernel for kernel in emulator.kernels if type(kernel).__name__ == "GroupedGemm"]


# ---- machine code --------------------------------------------------------------------------------

COUNTED = ("HGMMA", "HMMA", "WARPGROUP", "WARPSYNC", "LDL", "STL")


def good_machine_code(tile, config, found):
    """Check that nothing is in local memory, that no WGMMA waits for the one before (as ptxas does if registers are
    short), and that ptxas knows which warps stay together. Returns a line about the code."""
    assert found["STACK"] == found["LOCAL"] == found["LDL"] == found["STL"] == found["WARPSYNC"] == 0, tile
    assert found["HMMA"] if tile.uses_mma_sync else found["HGMMA"] > 1.5 * found["WARPGROUP"] > 0, tile
    size = (
        f"{found['REG']:4} registers {found['instructions']:5} instructions {tile.stages * tile.stage_bytes:6} B ring"
    )
    return f"{size}  {tile}{', quantizes h' if config.row_scale else ''}"


def machine_code_of(emulator, kernel):
    """The same check for a kernel that ran on the emulator."""
    return good_machine_code(kernel.t, kernel.config, counts(emulator.cubins[repr(kernel)], COUNTED))


# ---- bf16 rows -----------------------------------------------------------------------------------

# A tile's name -> (tile, gate, bias, sizes of the groups, split_k).
W4A16 = {
    "8, K in 4": (K_IN_4, SILU, None, [5, 0, 9], 1),
    "8, K in 2": (K_IN_2, RELU2, torch.bfloat16, [8, 1], 2),
    "8": (TILE_SHAPES[0], OAI, torch.bfloat16, [3, 17, 0, 1], 1),
    "8, pair": (TWO_CTAS, SILU, None, [9, 2], 1),
    "8, pair, K in 2": (TWO_IN_2, OAI, torch.bfloat16, [9, 2], 2),
    "24": (TILE_SHAPES[1], RELU2, None, [7, 41], 1),
    "32": (TILE_SHAPES[2], SILU, torch.float32, [33, 20], 2),
    **{str(tile.BN): (tile, gate, bias, [tile.BN + 9, 20], split_k)
       for tile, gate, bias, split_k in zip(
           TILE_SHAPES[3:], (SILU, OAI, RELU2, SILU, SILU, OAI),
           (None, torch.bfloat16, torch.bfloat16, None, None, torch.bfloat16), (1, 2, 1, 1, 1, 1), strict=True)},
}  # fmt: skip


SHAPES = (*TILE_SHAPES, K_IN_4, K_IN_2, TWO_CTAS, TWO_IN_2)


def test_every_tile_shape_is_here():
    assert set(SHAPES) == {tile for tile, *_ in W4A16.values()}


@pytest.mark.parametrize("name", W4A16)
def test_tiles(emulator, name, record_property):
    """Also checks what ptxas made of the kernel that ran."""
    tile, gate, bias, sizes, split_k = W4A16[name]
    schedules = {24: ["eager", "slow:1"], 48: ["random:3"], 128: ["slow:1"], 144: ["slow:1"]}.get(tile.BN, ["random:1"])
    layer = make_layer(len(sizes), 304, 80 + 64 * tile.KB * (split_k - 1), gate, bias=bias)  # no part of K is empty
    (kernel,) = check(emulator, layer, random_ids(sizes, 3, 2), tile, split_k, schedules)
    assert kernel.t == tile and kernel.config.both_gemms
    record_property("table", machine_code_of(emulator, kernel))


ONE_TOKEN = {  # gate, H, I, bias; ids
    "silu": (SILU, 512, 256, None, [2, 0]),
    "parts of blocks and slabs": (SILU, 208, 112, None, [0, 2]),
    "oai": (OAI, 192, 160, torch.bfloat16, [1, 1]),
    "relu2": (RELU2, 256, 80, torch.float32, [2, 1]),
    "unrouted slots": (SILU, 192, 96, None, [-1, 1, 3]),
}


@pytest.mark.parametrize("name", ONE_TOKEN)
def test_one_token(emulator, name):
    """A CTA for each chunk of a slot, without routing."""
    emulator.multiprocessors = 132
    gate, H, I, bias, ids = ONE_TOKEN[name]
    schedules = ("eager", "lazy", "random:1") if name == "unrouted slots" else ("eager",)
    check(emulator, make_layer(3, H, I, gate=gate, bias=bias), torch.tensor([ids]), schedules=schedules)
    assert [type(kernel).__name__ for kernel in emulator.kernels] == ["OneToken", "SumChunks"]


def test_the_map_of_experts_of_one_token(emulator):
    emulator.multiprocessors, w = 132, pack_weights(make_layer(3, 192, 96).weights)
    x, p, here = torch.randn(1, 192).bfloat16(), torch.rand(1, 4), torch.tensor([2, -1, 0, 3, 1], dtype=torch.int32)
    found = sm90.experts(x, torch.tensor([[0, 1, 4, 3]], dtype=torch.int32), p, w, here)
    assert torch.equal(found, sm90.experts(x, torch.tensor([[2, -1, 1, 3]]), p, w)) and found.any()


@pytest.mark.parametrize("id", [-2, 4, 1 << 40])
def test_an_illegal_id_of_one_token_stops(emulator, id):
    emulator.multiprocessors, w = 132, pack_weights(make_layer(3, 192, 96).weights)
    with pytest.raises(EmulatorError, match="vprintf"):
        sm90.experts(torch.zeros(1, 192).bfloat16(), torch.tensor([[1, id]]), torch.ones(1, 2), w)


def test_layers_that_have_a_kernel_for_one_token():
    small = dict(E=2, H=512, I=192)
    fits = lambda top_k=8, n=132, **other: suits_one_token(random_layer(**small | other).weights, top_k, n)
    assert fits() and fits(n=24) and not fits(n=23) and not fits(gate=RAW) and not fits(activations="nvfp4")
    assert fits(top_k=3) and not fits(top_k=2)  # 6 CTAs for rows of 8 blocks


def test_bf16_rows_leave_static_scales_alone(emulator):
    """A checkpoint may have them, for NVFP4 rows."""
    check(emulator, make_layer(2, 64, 80, static=True), random_ids([3, 2], 1, 2))


def test_what_the_plan_chooses(emulator):
    for I, tile, weights in ((144, K_IN_4, torch.bfloat16), (368, TWO_IN_2, torch.float64)):
        layer = make_layer(1, 64, I)
        (kernel,) = check(emulator, layer, random_ids([3], 0, 1), weights=weights)
        assert kernel.t == tile


def test_tiles_of_few_tokens():
    """As measured: short tiles where there are few, or few experts; long ones where there are many."""
    layer = lambda E, H, I: LayerShape(SILU, False, False, False, False, E, H, I)
    qwen, mixtral, deepseek = layer(128, 2048, 768), layer(8, 4096, 14336), layer(32, 7168, 2048)
    chosen = lambda shape, top_k: [plan_for(shape, T, top_k, 132).tile for T in (1, 4, 8)]
    assert chosen(qwen, 8) == [K_IN_4, K_IN_2, TILE_SHAPES[0]]
    assert chosen(mixtral, 2) == [TWO_IN_2, TWO_IN_2, K_IN_2]
    assert chosen(deepseek, 8) == [K_IN_2, K_IN_2, K_IN_2]


def test_no_part_of_k_is_empty():
    """4160 columns are 65 blocks: in four parts of whole stages of 8 blocks, the last would be empty."""
    found = set()
    for I in (*range(16, 9216, 16), 14336):
        plan = plan_for(LayerShape(SILU, False, False, False, False, 2, 64, I), 1, 2, 132)
        blocks, each = -(-I // 64), plan.tile.split_blocks(-(-I // 64), plan.split_k.bit_length() - 1)
        assert each % plan.tile.KB == 0 and each * (plan.split_k - 1) < blocks <= each * plan.split_k
        assert I >= 1024 * plan.split_k or plan.split_k == 1
        found.add(plan.split_k)
    assert found == {1, 2, 4}


def test_stages_of_their_own(emulator):
    """gemm1_swiglu with a raw gate, and gemm2_combine, for models whose gate or norm runs in between."""
    emulator.schedule = "random:3"
    layer = make_layer(2, 96, 80, RAW, bias=torch.bfloat16)
    check_stages(sm90, layer.weights, pack_weights(layer.weights), random_ids([9, 2], 2, 2))


# ---- NVFP4 rows ----------------------------------------------------------------------------------

FOUR_OVER_SIX = "nvfp4_four_over_six"
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]  # halfway between two codes


def hard_rows(T, K):
    """Rows of every magnitude, ties, zeros, blocks of zeros, infinities and NaN."""
    g = torch.Generator().manual_seed(K)
    x = torch.randn(T, K, generator=g)
    x[0], x[1, :16], x[2, 0] = 0, 0, -0.0
    x[3], x[4], x[5], x[6] = x[3] * 1e30, x[4] * 1e-30, x[5] * 1e-38, x[6] * 1e-44
    x[7, 3], x[8, -1], x[9, 1], x[10, 2] = float("nan"), float("-nan"), float("inf"), float("-inf")
    x[11] = x[11].sign() * torch.tensor(TIES)[torch.randint(0, 7, (K,), generator=g)] * 2.0**-6
    x[11, ::16] = 448 * 6 * 2.0**-6  # the global scale is 2^-6
    x[12, ::2] *= 1e-12
    x[13] *= torch.logspace(-45, 38, K)
    x[14] = 3e38
    return x


SCALES, ONE = (2.0**-6, 1.0, 3e-3, 1e-30, 0.37), (2.0**-6,) * 5


@pytest.mark.parametrize(
    "K, static, dtype, four_over_six",
    [(16, None, torch.bfloat16, False), (16, SCALES, torch.float32, False),
     (2064, None, torch.float32, False), (2064, SCALES, torch.bfloat16, False), (2064, ONE, torch.bfloat16, False),
     (528, None, torch.float32, True), (528, SCALES, torch.bfloat16, True)],
)  # fmt: skip
def test_rows_are_quantized_to_the_bit(emulator, K, static, dtype, four_over_six):
    emulator.schedule = "random:1"
    same_rows(random_ids([9, 0, 20, 1, 12], 4, 2), K, static, dtype, four_over_six)


@pytest.mark.parametrize("static, four_over_six", [(None, False), (SCALES, False), (ONE, False), (ONE, True)])
def test_rows_of_many_tokens(emulator, static, four_over_six):
    """They are sorted by a cluster. Where all experts have the same static scale, a token's slots share a row."""
    emulator.schedule = "random:1"
    same_rows(random_ids([150, 0, 200, 31, 131], 16, 2), 48, static, torch.bfloat16, four_over_six)


def same_rows(ids, K, static, dtype, four_over_six):
    x, scale = hard_rows(len(ids), K).to(dtype), None if static is None else torch.tensor(static)
    groups, index, _, rows = sm90.route(ids, 5, 1, x, scale, four_over_six)
    expert_map = torch.tensor([3, 1, -1, 0, 4, 2], dtype=torch.int32)
    outside = torch.tensor([3, 1, 5, 0, 4, -1, -1])[ids]  # of six experts
    again = sm90.route(outside, 5, 1, x, scale, four_over_six, expert_map)[-1]
    for mapped, plain in zip(again.tensors(), rows.tensors(), strict=True):
        assert mapped is plain is None or torch.equal(mapped.nan_to_num(-1), plain.nan_to_num(-1))
    token, of_slots = groups.order // 2, static is SCALES or static is ONE and ids.numel() <= 512
    assert torch.equal(index, groups.order if of_slots else token) and torch.equal(rows.index, index)
    exact, exact_scale = reference_rows(x, token, scale, groups, four_over_six)
    assert torch.equal(exact.bfloat16().float().nan_to_num(-1), exact.nan_to_num(-1))
    values, row_scale = (t[rows.index.long()][: len(exact)] for t in (rows.values, rows.scale))
    if scale is not None:
        gathered = sm90.gather(rows, groups, early=False, indexed=True).values[: len(exact)]
        assert torch.equal(gathered.view(torch.int16), values.view(torch.int16))
    for found, right in ((values, exact.bfloat16() + 0), (row_scale, exact_scale)):  # zeros have no sign
        assert torch.equal(found.isnan(), right.isnan())
        number = {2: torch.int16, 4: torch.int32}[found.itemsize]
        assert torch.equal(found.view(number)[~right.isnan()], right.view(number)[~right.isnan()])


# A tile's name -> (tile, gate, bias, sizes of the groups, split_k, static scales)
W4A4 = {
    "K in 4": (K_IN_4, SILU, None, [1, 0, 2], 1, False),
    "K in 2": (K_IN_2, OAI, torch.bfloat16, [8, 1], 2, False),
    "pair, K in 2": (TWO_IN_2, SILU, None, [3, 0, 8], 2, True),
    "8": (TILE_SHAPES[0], RELU2, None, [3, 17, 0, 1], 1, True),
    "24": (TILE_SHAPES[1], SILU, torch.bfloat16, [16, 3, 18], 2, False),
    "32": (TILE_SHAPES[2], OAI, torch.bfloat16, [33, 20], 2, True),
    "128": (TILE_SHAPES[7], SILU, None, [131, 5], 1, False),
    "144, three warpgroups": (TILE_SHAPES[8], SILU, None, [147, 5], 1, False),
}  # fmt: skip


@pytest.mark.parametrize("name", W4A4)
def test_nvfp4_activations(emulator, name, record_property):
    tile, gate, bias, sizes, split_k, static = W4A4[name]
    schedules = {24: ["slow:1"]}.get(tile.BN, ["random:1"])
    layer = make_layer(len(sizes), 304, 80 + 64 * tile.KB * (split_k - 1), gate, "nvfp4", bias, static)
    (kernel,) = check(emulator, layer, random_ids(sizes, 3, 2), tile, split_k, schedules)
    assert kernel.t == tile and kernel.config.both_gemms and kernel.config.row_scale
    record_property("table", machine_code_of(emulator, kernel))


# Tiles of W4A4 that do not run here
LAUNCHES = [
    (tile, GemmConfig(SILU, True, row_scale=True)) for tile in SHAPES if tile not in {t for t, *_ in W4A4.values()}
]


@pytest.mark.slow
def test_compiles_without_a_gpu(record_property):
    lines = []
    for tile, config in LAUNCHES:
        kernel, arguments, architecture = sm90._kernel.make(tile, config, torch.bfloat16)
        cubin = compile_for(architecture, kernel, arguments).__cubin__
        lines.append(good_machine_code(tile, config, counts(cubin, COUNTED)))
    record_property("table", "\n".join(lines))


@pytest.mark.parametrize(
    "tile, I, activations, static",
    [(TILE_SHAPES[0], 1040, "nvfp4", False), (TILE_SHAPES[4], 336, "nvfp4", True),
     (TILE_SHAPES[8], 208, "nvfp4", False), (TILE_SHAPES[0], 144, FOUR_OVER_SIX, False),
     (TILE_SHAPES[0], 144, FOUR_OVER_SIX, True)],
)  # fmt: skip
def test_h_is_quantized_to_the_bit(emulator, tile, I, activations, static):
    """By tiles that run between those of the GEMMs, in one part or two, with tails."""
    emulator.schedule = "random:2"
    layer = make_layer(3, 64, I, activations=activations, static=static)
    if static:
        layer.up_proj_input_scale.data.fill_(1)
        layer.down_proj_input_scale.data.copy_(torch.tensor([30.0, 1.0, 1e3]))
    found, want = quantized_h(layer, random_ids([tile.BN - 1, 0, tile.BN + 2], 3, 2), tile)
    assert torch.equal(found, want) and (want == 0).any() and len(want.unique()) > 50


# ---- linears -------------------------------------------------------------------------------------

# Tile, parts of K, sizes [N, K], number of tokens and, for NVFP4 rows, whether their scale is static. There is a bias
# where N is odd in units of 16
LINEARS = {
    "8": (TILE_SHAPES[0], 2, 272, 464, 11, True),
    **{f"{t.BN}, K in {t.KS}": (t, parts, N, 64 * t.KB * parts - 48, T, static)
       for t, parts, N, T, static in zip(NARROW, (2, 1, 1, 2, 2, 1), (144, 160, 80, 80, 16, 80),
                                         (5, 9, 16, 9, 33, 25), (None, False, None, None, True, None), strict=True)},
    **{f"{t.BN}, {t.NWG} warpgroups": (t, parts, N, 64 * t.KB * parts - 48, T, static)
       for t, parts, N, T, static in zip(WIDE[::2], (1, 1, 4, 2, 1), (144, 80, 80, 208, 272), (9, 100, 160, 64, 131),
                                         (None, True, False, None, None), strict=True)},
    "128": (TILE_SHAPES[7], 2, 80, 208, 131, False),
    "dense": (None, 1, 80, 64, 40, False),
}  # fmt: skip


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", LINEARS)
def test_linears(emulator, monkeypatch, name):
    """GEMM 2 of one expert, with K in parts that are added afterwards; one has the same bits under two schedules."""
    tile, parts, N, K, T, static = LINEARS[name]
    g = torch.Generator().manual_seed(N + K)
    codes = torch.randint(0, 256, (N, K // 2), generator=g, dtype=torch.uint8)
    sf = torch.randint(40, 72, (N, K // 16), generator=g, dtype=torch.uint8)
    bias = torch.randn(N, generator=g).bfloat16() if N // 16 % 2 else None
    matrix = Matrices(codes, sf, torch.tensor([1 / (8 * K**0.5)]), N, K, bias=bias)
    w = LinearWeights(matrix, None, "bf16" if static is None else "nvfp4")
    x = torch.randn(T, K, generator=g).bfloat16()
    rows = x.double()
    if static is not None:
        x[1] *= 1e-3
        w = w._replace(input_scale=torch.tensor([1.5e-3]) if static else None)
        scale = w.input_scale.expand(T) if static else nvfp4.global_scale_for(x.abs().amax(1).float())
        rows = nvfp4.dequantize(*nvfp4.quantize(x, scale, check=False)).double()
    want = rows @ nvfp4.dequantize(codes, sf, matrix.global_scale).double().T
    want += 0 if bias is None else bias.double()
    monkeypatch.setattr(sm90, "plan_linear", lambda *_: (tile, parts))
    packed = w._replace(matrix=pack_linear(matrix))
    settle(x.device)  # weights are older than the kernel before
    emulator.schedule = "random:5"
    got = sm90.linear(x, packed)
    assert relative_error(got, want) < (1 if tile else 1.5) * THRESHOLDS["half"]
    if name == "8, K in 4":
        emulator.schedule = "eager"
        warn_unpacked.cache_clear()
        with pytest.warns(UserWarning, match="Hopper kernels at every call"):
            assert torch.equal(sm90.linear(x, w), got)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("tile, split_k, T, bias, static", [
    (NARROW[0], 2, 3, True, None), (NARROW[2], 1, 9, False, False), (TILE_SHAPES[3], 1, 7, True, None),
    (WIDE[6], 1, 7, False, None), (None, 1, 5, True, False),
], ids=["8", "16", "48", "three warpgroups", "dense"])  # fmt: skip
def test_joined_linears(emulator, monkeypatch, tile, split_k, T, bias, static):
    """One launch gives each linear's columns, with its own global scale."""
    g, K, parts = torch.Generator().manual_seed(T), 64 * tile.KB * split_k - 48 if tile else 80, (128, 256, 80)
    linears, activations = [], "bf16" if static is None else "nvfp4"
    for i, N in enumerate(parts):
        codes = torch.randint(0, 256, (N, K // 2), generator=g, dtype=torch.uint8)
        sf = torch.randint(40, 72, (N, K // 16), generator=g, dtype=torch.uint8)
        b = torch.randn(N, generator=g).bfloat16() if bias else None
        matrix = Matrices(codes, sf, torch.tensor([0.01 * 5.0**i]), N, K, bias=b)
        linears.append(LinearWeights(matrix, None, activations))
    x, packed = torch.randn(T, K, generator=g).bfloat16(), [pack_linear(w.matrix) for w in linears]
    codes, scales = torch.cat([m.codes for m in packed]), torch.cat([m.global_scale for m in packed])
    b = torch.cat([m.bias for m in packed]) if bias else None
    whole = packed[0]._replace(codes=codes, global_scale=scales, bias=b, N=sum(parts))
    monkeypatch.setattr(sm90, "plan_linear", lambda *_: (tile, split_k))
    settle(x.device)
    emulator.schedule = "random:3"
    found = sm90.linear(x, LinearWeights(whole, None, activations, parts)).split(parts, dim=1)
    for y, w in zip(found, linears, strict=True):
        assert relative_error(y, reference.linear(x.float(), w)) < (1 if tile else 1.5) * THRESHOLDS["half"]


@pytest.mark.parametrize("static, four_over_six", [(False, False), (True, False), (False, True)])
def test_rows_of_linears_are_quantized_to_the_bit(emulator, static, four_over_six):
    x, scale = hard_rows(15, 528).bfloat16(), torch.tensor([2.0**-6]) if static else None
    values, row_scale = sm90._quantize_rows(x, scale, four_over_six)
    want = scale.expand(15) if static else nvfp4.row_scales(x, four_over_six)
    codes, sf, _ = nvfp4.quantize(x, want, False, four_over_six)
    exact = nvfp4.dequantize(codes, sf, None)
    for found, right in ((values, exact), (row_scale, want)):
        assert torch.equal(found.float().nan_to_num(-1), right.nan_to_num(-1))


# ---- routing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "T, top_k, E, dtype",
    [(1, 1, 1, torch.int64), (150, 3, 400, torch.int32), (200, 8, 9, torch.int64), (1100, 4, 70, torch.int32)],
)
def test_routing(emulator, T, top_k, E, dtype):
    """One CTA, and clusters, return what group_by_expert returns."""
    emulator.schedule = "random:4"
    ids = torch.randint(-1, E + 1, (T, top_k)).to(dtype)
    want = group_by_expert(ids, E)
    groups, token, zeros, _ = sm90.route(ids, E, 5)
    live = int(want.offsets[-1])
    assert torch.equal(groups.offsets, want.offsets) and not zeros.any()
    assert torch.equal(groups.order, want.order) and torch.equal(token, want.token)
    assert torch.equal(groups.position[want.order.long()], torch.arange(T * top_k, dtype=torch.int32))
    expert_map = torch.cat([torch.randperm(E), torch.tensor([-1, E, -1])])[torch.randperm(E + 3)].int()
    outside = torch.randint(-1, E + 3, (T, top_k)).to(dtype)  # ids of E + 3 experts, and -1
    inside = torch.where(outside < 0, -1, expert_map[outside])
    mapped, want_mapped = sm90.route(outside, E, expert_map=expert_map)[0], group_by_expert(inside, E)
    assert torch.equal(mapped.offsets, want_mapped.offsets) and torch.equal(mapped.order, want_mapped.order)
    for H in (48, 2064):
        x = torch.randn(T, H).bfloat16()
        settle(x.device)  # in a layer the routing kernel runs in between
        assert torch.equal(sm90.gather(Rows(x), groups).values[:live], x[want.token.long()][:live])


def test_an_illegal_id_stops(emulator):
    for ids in ([[0], [4]], [[-2], [0]]):
        with pytest.raises(EmulatorError, match="vprintf"):
            sm90.route(torch.tensor(ids), 3)
    for ids, number in (([[0], [3]], 0), ([[2], [0]], 4), ([[2], [0]], -2)):
        with pytest.raises(EmulatorError, match="vprintf"):
            sm90.route(torch.tensor(ids), 3, expert_map=torch.tensor([0, 1, number], dtype=torch.int32))


def test_what_a_wheel_compiles_for_linears_is_what_models_need():
    """The sizes of `compile known --linears` need every kernel that matrices of known models do, on an H200."""
    known = [(4096, 2048), (512, 2048), (5120, 2048), (2048, 4096), (8192, 8192), (28672, 8192), (8192, 28672),
             (1536, 7168), (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (7168, 18432), (6144, 4096),
             (5120, 2880), (2880, 4096), (151936, 2048), (129280, 7168)]  # fmt: skip

    def kernels(sizes):
        plans = {plan_linear(N, K, T, 132) for N, K in sizes for T in token_counts()}
        return {(tile, parts > 1) for tile, parts in plans} | {parts for _, parts in plans}

    assert kernels(known) <= kernels((n * N, K) for K in IN for N in OUT for n in (1, 2))
