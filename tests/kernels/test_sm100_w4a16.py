"""The Blackwell kernels for bf16 rows, on the emulator, against float64. Bounds as in `test_sm100`."""

import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_nvfp4 import backends
from moe_nvfp4 import format as nvfp4
from moe_nvfp4.kernels.sm100 import Blackwell
from moe_nvfp4.kernels.sm100 import backend as sm100
from moe_nvfp4.kernels.sm100.config import (
    SMEM,
    TMEM,
    CombineConfig,
    DenseTile,
    GemmConfig,
    InterleaveConfig,
    RouteConfig,
    SumConfig,
)
from moe_nvfp4.routing import Rows, group_by_expert
from moe_nvfp4.weights import Gate
from tests.common import THRESHOLDS, random_ids, random_layer, relative_error
from tests.emulator import EmulatorError, compiling_for
from tests.emulator.launch import programs
from tests.kernels.emulator_sm100 import RUNS, on_emulator
from tests.kernels.machine_code import counts
from tests.kernels.test_sm100 import GATES, UNIT, Problem, check_close, combined, exact_gate, prepared

TILES = [DenseTile(tokens, blocks) for tokens in (64, 128) for blocks in (1, 2)]


@pytest.fixture
def emulator():
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    pytest.importorskip("tvm_ffi", reason="the kernels' host code is TVM-FFI's")
    if shutil.which("cc") is None:
        pytest.skip("the emulator links the compiled host code with cc")
    with on_emulator() as runner:
        yield runner


# ---- compiled, for a GPU that is not here --------------------------------------------------------


def shipped_configs(architecture: str) -> list:
    """The configs for Qwen3-30B-A3B and gpt-oss: every tile and output (for sm_103a a few)."""
    configs = [
        InterleaveConfig(2048, True),
        SumConfig(3, 128, 768, Gate(), "interleaved"),
        GemmConfig(128, 768, 2048, 2, "float32", None, None, TILES[1], parts=3),
        GemmConfig(32, 2880, 2880, 2, "interleaved", GATES["oai"], "bfloat16", TILES[1]),
        GemmConfig(8, 704, 2048, 2, "bfloat16", Gate("raw"), None, TILES[3]),
    ]
    configs += [GemmConfig(128, 2048, 768, 1, "assignments", None, None, tile) for tile in TILES if tile.blocks == 1]
    return configs if architecture == "sm_100a" else configs[3:4]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_100a", "sm_103a"])
def test_compiles_without_a_gpu(architecture, record_property):
    """No spills; and a stream of weights that keeps up with the memory: a step of K = 64 is 1152 bytes for each block
    and warp, a multiprocessor issues four instructions a clock, and a B200 delivers at most 29 bytes in one."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    names = ("UTCHMMA", "UTCCP", "UTMALDG", "STTM", "LDTM", "LDL", "STL", "loop STTM")
    lines = []
    for config in shipped_configs(architecture):
        with compiling_for(architecture):
            found = counts(sm100.compile_kernel(config, "--enable-tvm-ffi").__cubin__, names)
        assert found["STACK"] == found["LOCAL"] == found["LDL"] == found["STL"] == 0
        line = f"{found['REG']:4} registers {found['instructions']:5} instructions"
        if isinstance(config, GemmConfig):
            t = config.tile
            assert config.shared_bytes <= SMEM and found["REG"] <= 96
            assert found["UTCHMMA"] == 4 * t.blocks and found["UTCCP"] == 0
            assert found["UTMALDG"] == 2 * t.blocks + 4 and found["STTM"] == t.blocks
            assert found["LDTM"] == t.blocks * (4 if config.fused else 1)  # 16x32bx2 counts as two
            rate = 4 * 1152 * t.blocks / found["loop STTM"]
            assert rate > (26 if t.blocks == 2 else 24)
            line += f" {config.stages} stages {config.shared_bytes:6} B shared {t.second + t.blocks * t.tokens:3} + "
            line += (
                f"{t.operand_columns} TMEM columns  {found['loop STTM']} instructions a step: {rate:.1f} bytes a clock"
            )
            line += f"  {t.tokens} x {t.blocks} {config.out}"
        lines.append(line)
    record_property("table", "\n".join([architecture, *lines]))


def test_tiles_are_legal():
    for t in TILES:
        assert t.legal and t.second + t.blocks * t.tokens + t.operand_columns <= t.columns <= TMEM
        assert t.shared_tokens <= t.tokens  # of one block: see `TileShape.shared_tokens`
    assert not DenseTile(64, 1, 2).legal
    interleaved, assignments, bf16 = (2, "interleaved"), (1, "assignments"), (1, "assignments bfloat16")
    for R, E, rows, K, leaving, tile, parts in [
        (8, 128, 768, 2048, interleaved, DenseTile(64, 1), 1),  # 96 tiles for 148 multiprocessors
        (2, 8, 1792, 4096, interleaved, DenseTile(64, 2), 4),  # 28 tiles of two blocks
        (2, 8, 14336, 4096, interleaved, DenseTile(64, 2), 1),  # 224 tiles
        (2, 8, 4096, 14336, assignments, DenseTile(64, 2), 4),  # 32 tiles of two blocks
        (2, 8, 4096, 14336, bf16, DenseTile(64, 1), 1),  # parts are fp32
        (16, 128, 2880, 2880, assignments, DenseTile(64, 2), 3),  # 192 pairs of blocks are two rounds, 576 parts four
        (512, 8, 4096, 14336, bf16, DenseTile(128, 2), 1),  # 32 to 96 rows an expert: one tile of each holds them
        (3072, 16, 768, 2048, interleaved, DenseTile(128, 1), 1),  # 384 tiles of one block: three rounds, short ones
        (65536, 128, 2048, 768, bf16, DenseTile(128, 2), 1),
    ]:
        assert sm100.plan_gemm("bf16", R, E, rows, K, *leaving, 148) == (tile, parts), (R, E, rows, K)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 20_000), st.integers(1, 300), st.integers(1, 500), st.integers(1, 500), st.integers(1, 160),
    st.sampled_from([
        (2, "interleaved"), (2, "bfloat16"), (2, "nvfp4"), (1, "float16"),
        (1, "assignments"), (1, "assignments bfloat16"),
    ]),
)  # fmt: skip
def test_every_plan_is_legal(rows, experts, weight_rows, k, sms, leaving):
    """No part of K is empty, and what the kernel needs of shared memory is there."""
    projections, out = leaving
    kind = "nvfp4" if out in ("nvfp4", "float16") else "bf16"
    tile, parts = sm100.plan_gemm(kind, rows, experts, 16 * weight_rows, 32 * k, projections, out, sms)
    split = parts > 1 and projections == 2
    gate = Gate() if projections == 2 and not split else None
    out = "float32" if split else out
    c = GemmConfig(experts, 16 * weight_rows, 32 * k, projections, out, gate, None, tile, parts)
    assert c.legal and c.shared_bytes <= SMEM


# ---- on the emulator -----------------------------------------------------------------------------


def exact_projection(x, w, sf, groups, scales, bias):
    """(float64 values [R, N], bound on the fp32 error) of rows x [R, K] with global scales [E, N] and a bias."""
    expert = groups.expert_of_row().clamp(max=groups.num_experts - 1).long()
    out, size = (torch.zeros(len(x), w.shape[1], dtype=torch.float64) for _ in range(2))
    offsets = groups.offsets.tolist()
    for e, (a, b) in enumerate(zip(offsets, offsets[1:], strict=False)):
        v = nvfp4.dequantize(w[e], sf[e], None).double()[:, : x.shape[1]]
        out[a:b], size[a:b] = x[a:b].double() @ v.T, x[a:b].double().abs() @ v.T.abs()
    out, size = out * scales.double()[expert], size * scales.double()[expert]
    if bias is not None:
        out, size = out + bias.double()[expert], size + bias.double()[expert].abs()
    return out, size * ((x.shape[1] + 8) * UNIT)


def check_layer(emulator, problem: Problem):
    """Check both GEMMs against float64, each on inputs that torch made; returns the last one, to call it again."""
    E, H, I, gate = len(problem.sizes), problem.H, problem.I, problem.gate
    layer = random_layer(E, H, I, gate, "bf16", problem.bias, seed=problem.seed, scale=2e-3)
    w, packed = layer.weights, prepared(layer).weights
    ids = random_ids(problem.sizes, problem.sentinels, problem.top_k, problem.seed)
    groups = group_by_expert(ids, E)
    live = groups.expert_of_row() < E
    generator = torch.Generator().manual_seed(problem.seed)
    x = torch.randn(len(ids), H, generator=generator).bfloat16()

    emulator.before(Rows(x))
    h = sm100.gemm1_swiglu(Rows(x, index=groups.token), packed, groups, problem.dtype).values
    scales = (
        [w.w13.gate_scale, w.w13.global_scale]
        if gate.gated and w.w13.gate_scale is not None
        else [w.w13.global_scale] * (1 + gate.gated)
    )
    scales = torch.cat([s[:, None].expand(E, I) for s in scales], 1)
    projected = exact_projection(x[groups.token], w.w13.codes, w.w13.sf, groups, scales, w.w13.bias)
    check_close(h, *exact_gate(gate, *projected), live)

    weights = torch.rand(ids.shape, generator=generator) - 0.3
    h = torch.randn(groups.num_rows, I, generator=generator).bfloat16()
    emulator.before(Rows(h))
    y = sm100.gemm2_combine(Rows(h), packed, groups, weights, problem.dtype)
    exact, bound = exact_projection(h, w.w2.codes, w.w2.sf, groups, w.w2.global_scale[:, None].expand(E, H), w.w2.bias)
    check_close(y, *combined(exact, bound, live, groups, weights), torch.ones(len(y), dtype=torch.bool))
    return lambda: (sm100.gemm2_combine(Rows(h), packed, groups, weights, problem.dtype), y)


ROUTINGS = {
    "ragged": ([70, 0, 1, 6], 7, 2),
    "one token": ([0, 0, 1, 0], 0, 1),
    "no row": ([0, 0, 0, 0], 5, 1),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(emulator, routing):
    emulator.schedule = "lazy"
    sizes, sentinels, top_k = ROUTINGS[routing]
    again = check_layer(emulator, Problem(128, 144, sizes, sentinels, top_k))
    emulator.schedule, emulator.multiprocessors = "random:7", 2  # other CTAs, in another order: the same bits
    assert torch.equal(*again())


def test_no_tokens(monkeypatch):
    """Nothing is launched, whatever the multiprocessors."""
    monkeypatch.setattr(sm100, "multiprocessors", lambda device: 148)
    monkeypatch.setattr(sm100, "launch", lambda *arguments: pytest.fail("a launch"))
    w = prepared(random_layer(3, 272, 528, Gate(), "bf16")).weights
    groups = group_by_expert(torch.empty(0, 2, dtype=torch.int32), 3)
    rows = Rows(torch.empty(0, 272).bfloat16(), index=groups.token)
    assert sm100.gemm1_swiglu(rows, w, groups, torch.bfloat16).values.shape == (0, 528)
    h = Rows(torch.empty(0, 528).bfloat16())
    assert sm100.gemm2_combine(h, w, groups, torch.empty(0, 2), torch.bfloat16).shape == (0, 272)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.tokens}x{t.blocks}")
def test_tiles(emulator, tile):
    """All tiles run in one CTA: every ring goes round, both accumulators are used, and the number of steps is odd."""
    emulator.schedule, emulator.tile, emulator.multiprocessors = "reverse-lazy", tile, 1
    gate = GATES["silu" if tile.blocks == 2 else "relu2"]
    check_layer(emulator, Problem(272, 144, [tile.tokens + 4, 0, 18], 2, gate=gate))


@pytest.mark.parametrize(
    "gate, H, I, bias, dtype, parts",
    [
        ("oai", 592, 80, torch.bfloat16, torch.bfloat16, 2),
        ("gelu", 16, 16, torch.float32, torch.float32, 1),
        ("raw", 272, 144, None, torch.float16, 2),
    ],
)
def test_gates(emulator, gate, H, I, bias, dtype, parts):
    """Also K tails of 16 and of 80 columns, weight rows that do not fill a block, and GEMM 1's K in parts."""
    emulator.schedule, emulator.tile, emulator.parts = "slow:1", TILES[1], parts
    check_layer(emulator, Problem(H, I, [5, 0, 18, 2], 1, 2, GATES[gate], bias, dtype=dtype))


def test_parts_of_k(emulator):
    """Each part is a tile of its own, in both GEMMs; one CTA and three give the same bits."""
    emulator.schedule, emulator.tile, emulator.parts, emulator.multiprocessors = "reverse-lazy", TILES[2], 3, 1
    again = check_layer(emulator, Problem(272, 528, [19, 0, 5], 2, gate=GATES["relu2"]))
    emulator.schedule, emulator.multiprocessors = "random:3", 3
    assert torch.equal(*again())


def test_weights_are_exact(emulator):
    """Tokens that are one-hot return the columns of the weights: every code with every block scale."""
    emulator.schedule, H, I = "eager", 128, 256
    layer = random_layer(1, H, I, seed=3)
    layer.down_proj_sf.copy_((torch.arange(H * I // 16) % 0x7F).view(1, H, I // 16))
    layer.down_proj.copy_((torch.arange(H * I // 2) * 0x21 & 0xFF).view(1, H, I // 2))
    w = layer.weights
    groups = group_by_expert(torch.zeros(I, 1, dtype=torch.int), 1)
    y = sm100.gemm2_combine(Rows(torch.eye(I).bfloat16()), w, groups, torch.ones(I, 1), torch.float32)
    assert torch.equal(y.T, nvfp4.dequantize(w.w2.codes[0], w.w2.sf[0], w.w2.global_scale))


@pytest.fixture(params=[64, 272], ids=lambda H: f"{H} columns")
def layer_call(request, emulator, monkeypatch):
    """(a layer, its inputs, the reference's result)"""
    H = request.param
    layer = random_layer(4, H, 80, GATES["oai"], bias=torch.bfloat16, scale=2e-3)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    ids[0, 0] = 4  # an unrouted row, which the epilogue zeroes before anything else
    inputs = torch.randn(9, H).bfloat16(), ids, torch.rand(9, 2)
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "reference")
    right = layer(*inputs)
    monkeypatch.delenv("MOE_NVFP4_BACKEND")

    class OnTheEmulator(Blackwell):
        def unavailable(self, device):
            return None

    with backends.registered(OnTheEmulator()):
        yield layer, inputs, right


@pytest.mark.parametrize("T, E", [(9, 4), (150, 40)])
def test_route(emulator, T, E):
    """By one CTA, and by a cluster."""
    emulator.schedule = "random:2"
    ids = torch.randint(-1, E + 1, (T, 4), dtype=torch.int32)
    (found, token), right = sm100.route(ids, E), group_by_expert(ids, E).with_position()
    for name in ("order", "offsets", "position"):
        assert torch.equal(getattr(found, name), getattr(right, name))
    assert torch.equal(token, right.token)


def test_many_rows_leave_in_bf16(emulator, monkeypatch):
    """GEMM 2's rows are rounded to bf16 if they would take more than EXACT_BYTES; they are summed in fp32."""
    emulator.schedule = "lazy"
    w = prepared(random_layer(2, 32, 48, scale=2e-3)).weights
    groups = group_by_expert(torch.randint(-1, 2, (20, 3)), 2)
    h, weights = Rows(torch.randn(60, 48).bfloat16()), torch.rand(20, 3)
    monkeypatch.setattr(sm100, "EXACT_BYTES", 60 * 32 * 4 - 1)
    found = sm100.gemm2_combine(h, w, groups, weights, torch.bfloat16)
    slots = sm100.gemm2_combine(h, w, replace(groups, top_k=1), torch.ones(60, 1), torch.float32).bfloat16().float()
    slots = slots.view(20, 3, 32) * weights[..., None]
    assert torch.equal(found, (slots[:, 0] + slots[:, 1] + slots[:, 2]).bfloat16())


def test_layer(emulator, layer_call, monkeypatch):
    """All of it in one call, GEMM 1 in two parts where there are two K tiles; each griddepcontrol.wait is left out in
    turn."""
    emulator.schedule, emulator.tile, emulator.parts = "random:5", TILES[1], 2
    layer, (x, ids, p), right = layer_call
    assert relative_error(layer(x, ids, p), right) < THRESHOLDS["half"]
    assert layer.packed
    launched = []
    launch = emulator.launch
    monkeypatch.setattr(sm100, "launch", lambda *arguments: launched.append(arguments[0]) or launch(*arguments))
    layer(x, ids, p)
    total = [SumConfig] if x.shape[1] > 256 else []
    kinds = [RouteConfig, InterleaveConfig, GemmConfig, *total, GemmConfig, CombineConfig]
    assert [type(config) for config in launched] == kinds
    assert launched[2 + len(total)].out == "interleaved"
    for config in launched[3:4] if total else launched[1:-1]:
        first, *others = RUNS[config].ptx.split("griddepcontrol.wait;")
        assert len(others) == (2 if isinstance(config, GemmConfig) else 1)
        for left_out in range(len(others)):
            waits = ["" if i == left_out else "griddepcontrol.wait;" for i in range(len(others))]
            ptx = first + "".join(wait + part for wait, part in zip(waits, others, strict=True))
            with monkeypatch.context() as patch, pytest.raises(EmulatorError, match="wait was not called"):
                patch.setattr(RUNS[config], "programs", programs(ptx))
                layer(x, ids, p)
