"""The portable backend against the reference, in Triton's interpreter, or on a GPU if there is one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the portable backend's kernels are Triton's")

from moe_nvfp4 import format as nvfp4  # noqa: E402
from moe_nvfp4 import reference  # noqa: E402
from moe_nvfp4.kernels.portable import backend as portable  # noqa: E402
from moe_nvfp4.kernels.portable import config, dense, rows  # noqa: E402
from moe_nvfp4.kernels.portable.dequantize import how  # noqa: E402
from moe_nvfp4.kernels.portable.launch import launch  # noqa: E402
from moe_nvfp4.routing import Rows, group_by_expert  # noqa: E402
from moe_nvfp4.weights import SILU, ExpertWeights, Gate, LinearWeights, Matrices  # noqa: E402
from tests.common import THRESHOLDS, reference_layer, reference_rows, relative_error  # noqa: E402
from tests.core.test_layer import naive_moe, naive_situ, situ  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = {
    "silu": SILU,
    "oai": Gate("silu", alpha=1.702, limit=0.7, up_offset=1.0),
    "clamp after": Gate("silu", limit=0.3, clamp_after=True),
    "gelu": Gate("gelu_tanh"),
    "relu2": Gate("relu2", gated=False),
}


def make_weights(E, H, I, gate=SILU, activations="bf16", bias=False, x_scale=None, h_scale=None):
    """Random codes; block scales from zero and subnormals to some hundreds; a global scale for each matrix."""

    def matrix(N, K):
        blocks = -(-K // 16)
        codes = torch.randint(0, 256, (E, N, blocks * 8), dtype=torch.uint8, device=DEVICE)
        sf = torch.randint(30, 80, (E, N, blocks), dtype=torch.uint8, device=DEVICE)
        sf[:, ::5] = torch.randint(0, 9, sf[:, ::5].shape, dtype=torch.uint8, device=DEVICE)
        padding = torch.arange(blocks * 8, device=DEVICE) * 2 >= K
        codes[..., padding] = 0
        if K % 2:
            codes[..., K // 2] &= 15
        return codes, sf

    def vector(low, high, *shape):
        return torch.empty(shape, device=DEVICE).uniform_(low, high)

    N13 = I * (2 if gate.gated else 1)
    (w13, w13_sf), (w2, w2_sf) = matrix(N13, H), matrix(H, I)
    gate_scale, up_scale = (vector(0.05 / H**0.5, 0.15 / H**0.5, E) for _ in range(2))
    matrices = (
        Matrices(w13, w13_sf, up_scale, N13, H, gate_scale if gate.gated else None),
        Matrices(w2, w2_sf, vector(0.01, 0.03, E), H, I),
    )
    biases = (vector(-1, 1, E, N13).bfloat16(), vector(-1, 1, E, H).bfloat16()) if bias else (None, None)
    scales = (None if s is None else vector(s, 2 * s, E) for s in (x_scale, h_scale))
    return ExpertWeights(gate, activations, *matrices, *scales).biased(*biases)


def batch(T, H, E, top_k, dtype=torch.bfloat16, ids=torch.int64):
    x = torch.randn(T, H, device=DEVICE).to(dtype)
    return x, torch.rand(T, E, device=DEVICE).topk(top_k).indices.to(ids), torch.rand(T, top_k, device=DEVICE)


def check(w, x, ids, top_k_weights, threshold=THRESHOLDS["half"]):
    got = portable.experts(x, ids, top_k_weights, w)
    want = reference_layer(x, ids, top_k_weights, w)
    assert got.dtype == x.dtype and got.isfinite().all()
    assert relative_error(got, want) < threshold
    return got


def plan_as(monkeypatch, **changes):
    plan = config.plan_experts
    monkeypatch.setattr(config, "plan_experts", lambda *arguments: replace(plan(*arguments), **changes))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    E=st.integers(1, 6),
    H=st.integers(8, 100),
    I=st.integers(8, 100),
    T=st.integers(1, 24),
    gate=st.sampled_from(sorted(GATES)),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    ids=st.sampled_from([torch.int64, torch.int32]),
    sort=st.booleans(),
    data=st.data(),
)
def test_random_layers(E, H, I, T, gate, bias, dtype, ids, sort, data):
    """With sorted and unsorted ids; experts with more rows than a tile, with one, with none."""
    top_k = data.draw(st.integers(1, E))
    w = make_weights(E, H, I, GATES[gate], bias=bias)
    x, index, weights = batch(T, H, E, top_k, dtype, ids)
    elsewhere = data.draw(st.sampled_from(["nowhere", "some", "all", "one expert"]))
    if elsewhere == "one expert":
        index.fill_(E - 1)
    elif elsewhere == "all":
        index.fill_(E)
    elif elsewhere == "some":
        index[torch.rand(index.shape, device=DEVICE) < 0.4] = data.draw(st.sampled_from([-1, E]))
    with pytest.MonkeyPatch.context() as monkeypatch:
        plan_as(monkeypatch, most_ids=0 if sort else 256)
        check(w, x, index, weights)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_sorting_few_tokens_gives_the_same_bits(activations, monkeypatch):
    w, (x, ids, weights) = make_weights(12, 64, 48, activations=activations, bias=True), batch(5, 64, 12, 2)
    ids[0], ids[2, 1], ids[3] = 4, -1, 12
    want = check(w, x, ids, weights, THRESHOLDS["w4a4" if activations == "nvfp4" else "half"])
    plan_as(monkeypatch, most_ids=16)
    assert torch.equal(portable.experts(x, ids, weights, w), want)


def test_what_is_not_sorted():
    """Few assignments, most with an expert of their own, and no more programs than the GPU runs at once."""
    few = [R for R in range(1, 200) if config.plan_experts(128, 2048, 768, R, torch.bfloat16, 132).most_ids]
    assert few == list(range(1, 33))
    for E, I, R, sms, most in (8, 14336, 2, 132, 32), (8, 14336, 8, 132, 0), (4, 64, 5, 132, 0), (128, 768, 32, 48, 0):
        assert config.plan_experts(E, 4096, I, R, torch.bfloat16, sms).most_ids == most


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate):
    check(make_weights(3, 64, 48, GATES[gate], bias=True), *batch(7, 64, 3, 2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("x_scale", "h_scale", "activations"),
    [
        (None, None, "nvfp4"),
        (2e-3, 5e-3, "nvfp4"),
        (2e-3, None, "nvfp4_four_over_six"),
        (None, 5e-3, "nvfp4_four_over_six"),
    ],
)
def test_w4a4(x_scale, h_scale, activations, dtype):
    """Static and dynamic scales for both W4A4 activations; some tokens are unrouted."""
    w = make_weights(4, 72, 80, activations=activations, x_scale=x_scale, h_scale=h_scale, bias=True)
    x, ids, weights = batch(9, 72, 4, 2, dtype)
    ids[0, 0], ids[4] = 4, -1
    check(w, x, ids, weights, THRESHOLDS["w4a4"])


@pytest.fixture
def multiplies_nvfp4(monkeypatch):
    """Pretend that the GPU's tensor cores multiply NVFP4 by NVFP4."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 12:
        pytest.skip("this GPU's do not")
    monkeypatch.setattr(config, "multiplies_nvfp4", lambda capability: True)
    monkeypatch.setattr(portable, "capability", lambda device: (12, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x_scale", "h_scale", "gate", "T", "top_k"),
    [(None, None, "oai", 5, 2), (2e-3, 5e-3, "relu2", 16, 3), (2e-3, None, "silu", 14, 3), (None, 5e-3, "gelu", 1, 1)],
)
def test_nvfp4_times_nvfp4(multiplies_nvfp4, x_scale, h_scale, gate, T, top_k):
    """Codes and block scales of both operands; tails of K, tiles of 8, 16 and 32 tokens."""
    w = make_weights(3, 80, 144, GATES[gate], "nvfp4", True, x_scale, h_scale)
    x, ids, weights = batch(T, 80, 3, top_k, torch.float16 if gate == "oai" else torch.bfloat16)
    ids[T // 2, 0] = -1
    check(w, x, ids, weights, THRESHOLDS["w4a4"])


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("native, four_over_six", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("static", [False, True])
def test_quantized_rows_are_the_reference_s_bit_by_bit(static, native, four_over_six):
    """As bf16 code * sf, and as codes and block scales."""
    E, K, ids = 3, 64 if not four_over_six else 320, torch.tensor([[2], [0], [3], [2], [1], [0]], device=DEVICE)
    x = torch.randn(6, K, device=DEVICE).bfloat16()
    x[0] *= 1e-30  # a global scale far below the others
    x[1, :16], x[3] = 0, 0
    x[4, :16] *= 1e-3  # a subnormal block scale
    groups, scale = group_by_expert(ids, E), torch.tensor([1e-3, 4e-4, 1e-7], device=DEVICE) if static else None
    routing = portable.route(ids.view(-1), E, 8, row_expert=True)
    got = portable.quantize(portable.Values(x, index=routing.order), scale, routing, four_over_six, native)
    want, row_scale = reference_rows(x, groups.token, scale, groups, four_over_six)
    live = len(want)
    at = slice(live) if static else groups.token[:live]
    values = nvfp4.dequantize(got.values, got.sf, None) if native else got.values.float()
    assert torch.equal(values[at], want) and torch.equal(got.scale[at], row_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantization_of_every_byte(dtype):
    """All codes with all block scales are exact."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(127, 1)
    sf = torch.arange(127, dtype=torch.uint8, device=DEVICE)[:, None].repeat(1, 32)
    out = torch.empty(1, 127, 512, dtype=dtype, device=DEVICE)
    dense._dequantize(codes, sf, None, out, 0, 127, 512, 127, 1)
    assert torch.equal(out[0].float(), nvfp4.dequantize(codes, sf, None))


def test_an_empty_batch():
    w = make_weights(2, 32, 32)
    assert portable.experts(*batch(0, 32, 2, 1), w).shape == (0, 32)


@pytest.mark.slow
def test_more_rows_than_are_taken_at_a_time(monkeypatch):
    monkeypatch.setattr(config, "MAX_ROWS", 8)
    check(make_weights(3, 32, 32), *batch(11, 32, 3, 2))


@pytest.mark.parametrize("T", [1, 200])
def test_routing(T):
    """Both ways of counting against torch's sort; tiles cover every expert's rows exactly once."""
    E, top_k, BM = 5, 3, 16
    ids = torch.randint(-1, E + 1, (T, top_k), device=DEVICE)
    want, r = group_by_expert(ids, E), portable.route(ids.view(-1), E, BM, row_expert=True, position=True)
    live = int(want.offsets[-1])
    assert torch.equal(r.offsets, want.offsets) and torch.equal(r.order[:live], want.order[:live])
    assert torch.equal(r.row_expert[:live], want.expert_of_row()[:live])
    assert torch.equal(r.position[r.order[:live].long()], torch.arange(live, dtype=torch.int32, device=DEVICE))
    tiles, count = want.tiles(BM), int(r.tile_count[0])
    assert count == int(tiles.count) and (r.tile_expert[count : portable.max_tiles(T * top_k, E, BM)] == -1).all()
    assert torch.equal(r.tile_expert[:count], tiles.expert[:count])
    assert torch.equal(r.tile_row[:count], tiles.row[:count])
    assert torch.equal(r.tile_end[:count], want.offsets[1:][tiles.expert[:count]])


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 4])
def test_parts_of_k(splits, monkeypatch):
    monkeypatch.setattr(config, "split_k", lambda *arguments: splits)
    config.plan_experts.cache_clear()
    try:
        check(make_weights(2, 48, 1100, bias=True), *batch(3, 48, 2, 2))
    finally:
        config.plan_experts.cache_clear()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rows", [1, 8, 30, 90, 130])
def test_every_tile_shape(rows):
    check(make_weights(1, 160, 144), *batch(rows, 160, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "scratch"), list(zip(GATES, (1, 1 << 20, 1 << 20, 1 << 20, 1), strict=True)))
def test_large_batches_through_dense_weights(gate, scratch, monkeypatch):
    """GEMM 1's sums are rounded to bf16 before the gate, which adds an error of 2^-9."""
    monkeypatch.setattr(config, "dense_pays", lambda *arguments: True)
    monkeypatch.setattr(dense, "SCRATCH", scratch)
    x, ids, weights = batch(11, 160, 4, 2)
    ids[3] = -1
    check(make_weights(4, 160, 144, GATES[gate], bias=True), x, ids, weights, 1.5 * THRESHOLDS["half"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x_scale", "h_scale", "gate", "dtype"),
    [(2e-3, 5e-3, "oai", torch.bfloat16), (None, None, "silu", torch.float16), (None, 5e-3, "relu2", torch.bfloat16)],
)
def test_large_batches_of_nvfp4_rows(x_scale, h_scale, gate, dtype, monkeypatch):
    """code * sf of rows times code * sf of weights; tokens of very different sizes."""
    monkeypatch.setattr(config, "dense_pays", lambda *arguments: True)
    x, ids, weights = batch(7, 80, 3, 2, dtype)
    x[5] *= 0.01
    ids[3] = -1
    w = make_weights(3, 80, 64, GATES[gate], "nvfp4", True, x_scale, h_scale)
    want, got = reference_layer(x, ids, weights, w), portable.experts(x, ids, weights, w)
    assert got.dtype == dtype and relative_error(got, want) < 2 * THRESHOLDS["w4a4"]


@pytest.mark.slow
def test_stages():
    """Rows are `routing.Rows`, with x indexed or gathered; h is returned for a gate of the caller's own."""
    w = make_weights(3, 40, 56, Gate("raw"), bias=True)
    x, ids, weights = batch(6, 40, 3, 2)
    groups = group_by_expert(ids, 3)
    for r in (Rows(x, index=groups.token), Rows(x[groups.token])):
        both = portable.gemm1_swiglu(r, w, groups, x.dtype).values
        assert relative_error(both, reference.gemm1_swiglu(r, w, groups, torch.float32).values) < THRESHOLDS["half"]
    h = SILU(both.float()).bfloat16()
    y = portable.gemm2_combine(Rows(h), w, groups, weights, x.dtype)
    want = reference.gemm2_combine(Rows(h), w, groups, weights, torch.float32)
    assert relative_error(y, want) < THRESHOLDS["half"]


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_a_gate_of_a_model_s_own_between_the_stages(activations):
    """SiTU, whose gate and up are clipped by tanh, in a loop over tokens and slots in float64."""
    torch.manual_seed(0)
    w = make_weights(3, 64, 48, Gate("raw"), activations, bias=True)
    x, ids, weights = batch(5, 64, 3, 2)
    groups = group_by_expert(ids, 3)
    quantized = activations == "nvfp4"
    r = portable.quantize_rows(x, groups.token, None, groups) if quantized else Rows(x, index=groups.token)
    h = situ(portable.gemm1_swiglu(r, w, groups, torch.float32 if quantized else x.dtype).values)
    r = portable.quantize_rows(h, None, None, groups) if quantized else Rows(h)
    y = portable.gemm2_combine(r, w, groups, weights, x.dtype)
    want = naive_moe(x, ids, weights, w, own_gate=lambda gate, v, I: naive_situ(v, I, 1.5, 0.75))
    assert relative_error(y, want) < THRESHOLDS["w4a4" if quantized else "half"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("h_scale", [None, 5e-3])
def test_stages_of_nvfp4_rows(h_scale):
    w = make_weights(3, 64, 80, activations="nvfp4", h_scale=h_scale)
    x, ids, weights = batch(6, 64, 3, 2)
    groups = group_by_expert(ids, 3)
    r = portable.quantize_rows(x, groups.token, None, groups)
    h, want = (stage.gemm1_swiglu(r, w, groups, torch.float32) for stage in (portable, reference))
    if h_scale is None:
        assert relative_error(h.values, want.values) < THRESHOLDS["fp32"]
        h = want = portable.quantize_rows(want.values, None, None, groups)
    y = portable.gemm2_combine(h, w, groups, weights, x.dtype)
    want = reference.gemm2_combine(want, w, groups, weights, torch.float32)
    assert relative_error(y, want) < THRESHOLDS["w4a4"]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("activations", "T", "K", "bias"),
    [("bf16", 1, 2048, False), ("bf16", 5, 64, True), ("bf16", 21, 64, True), ("bf16", 0, 64, True),
     ("nvfp4", 3, 1088, False), ("nvfp4_four_over_six", 20, 64, True), ("nvfp4", 21, 64, True)],
)  # fmt: skip
def test_linear(activations, T, K, bias, monkeypatch):
    """With few tokens K is split; many tokens use dense weights."""
    monkeypatch.setattr(config, "linear_limit", lambda *arguments: 20)
    check_linear(activations, T, K, bias)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("activations", "T", "K", "bias", "parts"),
    [("bf16", 1, 2048, False, (80, 16, 24)), ("bf16", 5, 64, True, (64, 72)), ("nvfp4", 20, 64, True, (32, 48, 16)),
     ("bf16", 21, 64, True, (48, 32, 40)), ("nvfp4", 21, 64, False, (16, 80)), ("bf16", 0, 64, True, (16, 16))],
)  # fmt: skip
def test_joined_linears(activations, T, K, bias, parts, monkeypatch):
    """One launch gives each linear's columns, with its own global scale; tiles have rows of several."""
    monkeypatch.setattr(config, "linear_limit", lambda *arguments: 20)
    N = sum(parts)
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=DEVICE)
    sf = torch.randint(30, 80, (N, K // 16), dtype=torch.uint8, device=DEVICE)
    b = torch.randn(N, device=DEVICE).bfloat16() if bias else None
    scale = torch.tensor([1e-2, 3e-1, 4e-3], device=DEVICE)[: len(parts)]
    x = torch.randn(T, K, device=DEVICE).bfloat16()
    found = portable.linear(x, LinearWeights(Matrices(codes, sf, scale, N, K, bias=b), None, activations, parts))
    rows = x.float()
    if activations == "nvfp4":
        rows = nvfp4.dequantize(*nvfp4.quantize(rows, nvfp4.row_scales(rows)))
    each = scale.repeat_interleave(torch.tensor(parts, device=DEVICE))
    want = rows @ nvfp4.dequantize(codes, sf, each).T + (0 if b is None else b.float())
    assert found.shape == (T, N)
    for mine, theirs in zip(found.split(parts, dim=1), want.split(parts, dim=1), strict=True):
        assert T == 0 or relative_error(mine, theirs) < (1 if T <= 20 else 1.5) * THRESHOLDS["half"]


@pytest.mark.slow
@pytest.mark.parametrize(("T", "K"), [(21, 64), (3, 1088)])
def test_linear_of_nvfp4_times_nvfp4(multiplies_nvfp4, T, K):
    check_linear("nvfp4", T, K, True)


def check_linear(activations, T, K, bias):
    """Dynamic and static scales."""
    N = 72
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=DEVICE)
    sf = torch.randint(30, 80, (N, K // 16), dtype=torch.uint8, device=DEVICE)
    b = torch.randn(N, device=DEVICE).bfloat16() if bias else None
    for input_scale in (None, torch.tensor([2e-3], device=DEVICE)):
        matrix = Matrices(codes, sf, torch.full((1,), 1e-2, device=DEVICE), N, K, bias=b)
        w = LinearWeights(matrix, input_scale, activations)
        x = torch.randn(T, K, device=DEVICE).bfloat16()
        rows = x.float()
        if w.quantized:
            scale = nvfp4.row_scales(rows, w.four_over_six) if input_scale is None else input_scale.expand(T)
            rows = nvfp4.dequantize(*nvfp4.quantize(rows, scale, four_over_six=w.four_over_six))
        want = rows @ nvfp4.dequantize(codes, sf, 1e-2).T + (0 if b is None else b.float())
        assert relative_error(portable.linear(x, w), want) < (1 if T <= 20 else 1.5) * THRESHOLDS["half"]


@pytest.mark.slow
def test_same_bits_again():
    w, inputs = make_weights(4, 96, 200), batch(13, 96, 4, 3)
    first = portable.experts(*inputs, w)
    assert torch.equal(portable.experts(*inputs, w), first)


@pytest.mark.slow
def test_nan_and_infinity_stay():
    """Clamps and maxima must not hide them."""
    for gate in GATES.values():
        for activations in ("bf16", "nvfp4"):
            w = make_weights(2, 32, 32, gate, activations)
            x, ids, weights = batch(3, 32, 2, 1)
            x[1, 5] = torch.nan
            got = portable.experts(x, ids, weights, w)
            assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


@pytest.mark.slow
def test_one_row_of_any_stride():
    """torch calls it contiguous, and an odd stride cannot be that of pairs of numbers."""
    w, (x, ids, weights) = make_weights(4, 32, 32), batch(1, 32, 4, 2)
    apart = torch.zeros(1, 45, device=DEVICE).bfloat16()[:, 5:37].copy_(x)
    assert apart.stride(0) == 45
    assert torch.equal(portable.experts(apart, ids, weights, w), portable.experts(x, ids, weights, w))
    matrix = w.w2._replace(codes=w.w2.codes[0], sf=w.w2.sf[0], global_scale=w.w2.global_scale[:1])
    linear = LinearWeights(matrix, None, "bf16")
    assert torch.equal(portable.linear(apart, linear), portable.linear(x, linear))


@pytest.mark.slow
def test_views():
    """x, codes and ids need not be contiguous, nor aligned."""
    w = make_weights(3, 64, 48)
    x, ids, weights = batch(5, 64, 3, 2)
    want = portable.experts(x, ids, weights, w)
    odd = torch.empty(5, 67, dtype=x.dtype, device=DEVICE)[:, 3:].copy_(x)
    shifted = (
        torch.empty(w.w13.codes.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:]
        .view_as(w.w13.codes)
        .copy_(w.w13.codes)
    )
    got = portable.experts(
        odd, ids.T.contiguous().T, weights.T.contiguous().T, replace(w, w13=w.w13._replace(codes=shifted))
    )
    assert torch.equal(got, want)


def test_combine_adds_in_slot_order():
    """In fp32, sums of 1, 2^-24 and -1 reveal the order."""
    y = torch.tensor([1.0, 2**-24, 2**-24, -1.0], device=DEVICE).view(1, 4, 1).repeat(1, 1, 16)
    out, ids = torch.empty(1, 16, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    weights = torch.ones(1, 4, device=DEVICE)
    arguments = (y, ids, weights, None, None, None, None, out, 4, 16, 1, 4, 16, 1, 16, how())
    launch(rows.combine_kernel, (1, 1), *arguments, num_warps=1)
    assert (out == 0).all()  # in the opposite order it would be 2^-23
