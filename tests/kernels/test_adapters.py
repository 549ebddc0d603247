"""What Triton does between the stages of a layer with adapters, in its interpreter, or on a GPU if there is one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_nvfp4.kernels.portable import BACKEND, adapters, config  # noqa: E402
from moe_nvfp4.kernels.portable import backend as portable  # noqa: E402
from moe_nvfp4.routing import group_by_expert  # noqa: E402
from moe_nvfp4.stages import Adapter, Extras, add_low_rank, down_rows, up_rows  # noqa: E402
from tests.common import THRESHOLDS, relative_error  # noqa: E402
from tests.core.test_layer import dense, naive_gate  # noqa: E402
from tests.core.test_routing import routings  # noqa: E402
from tests.kernels.test_portable import DEVICE, GATES, batch, make_weights  # noqa: E402


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(routings(), st.integers(0, 3), st.data())
def test_rows_are_sorted_as_by_torch(routing, S, data):
    """All of `Groups`, rows without an expert included; adapters of any number, which are none beyond S."""
    E, ids = routing
    ids, adapter = ids.to(DEVICE), None
    if S:
        chosen = data.draw(st.lists(st.integers(-2, S + 1), min_size=len(ids), max_size=len(ids)))
        adapter = torch.tensor(chosen, dtype=data.draw(st.sampled_from([torch.int64, torch.int32, torch.int8])))
        adapter = adapter.to(DEVICE)
    got, want = (f(ids, E, adapter, S).with_position() for f in (BACKEND.group, group_by_expert))
    for name in ("order", "offsets", "position", *(("parts", "bare") if S else ())):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert S or got.parts is None and got.bare is None


@pytest.mark.slow
def test_many_rows_are_sorted_in_several_chunks():
    g = torch.Generator().manual_seed(0)
    ids, adapter = torch.randint(-1, 4, (700, 3), generator=g), torch.randint(-1, 2, (700,), generator=g)
    ids, adapter = ids.to(DEVICE), adapter.to(DEVICE)
    got, want = BACKEND.group(ids, 3, adapter, 2), group_by_expert(ids, 3, adapter, 2)
    assert torch.equal(got.order, want.order) and torch.equal(got.parts, want.parts)
    assert torch.equal(got.bare, want.bare) and len(ids) * 3 > 1024  # the largest chunk


@settings(max_examples=40, deadline=None)
@given(routings(), st.sampled_from([1, 8, 64]))
def test_tiles_of_sorted_rows(routing, BM):
    E, ids = routing
    if not ids.numel():
        return
    groups = group_by_expert(ids.to(DEVICE), E)
    r, want = portable.Routing.of(groups, BM), groups.tiles(BM)
    count = int(want.count)
    assert int(r.tile_count) == count and (r.tile_expert[count:] == -1).all()
    assert torch.equal(r.tile_expert[:count], want.expert[:count]) and torch.equal(r.tile_row[:count], want.row[:count])
    assert torch.equal(r.tile_end[:count], groups.offsets[1:][want.expert[:count]])
    flat = ids.reshape(-1)
    assert r.ids.tolist() == torch.where((flat < 0) | (flat >= E), E, flat).tolist()


def random_adapter(E, S, r, N, K, dtype):
    several = (S,) if S else ()
    return Adapter(*(torch.randn(E, *several, *s, device=DEVICE).to(dtype) / s[1] ** 0.5 for s in ((r, K), (N, r))))


def naive(out, x, adapter, groups, adapter_of_token, up):
    """`add_low_rank` in float64, row by row; between the products, rows are rounded to x's dtype."""
    out, (a, b) = out.double(), (t.double() for t in adapter)
    live = int(groups.offsets[-1])
    for r, (slot, e) in enumerate(zip(groups.order.tolist(), groups.expert_of_row().tolist(), strict=True)):
        g = (e,) if adapter_of_token is None else (e, adapter_of_token[slot // groups.top_k])
        if r < live and g[-1] >= 0:
            row = x[slot // groups.top_k if up else r].double()
            out[r if up else slot] += b[g] @ (a[g] @ row).to(x.dtype).double()
    return out


CASES = [  # T, E, top_k, S, rank, N, K: every number of tokens per tile, ranks, parts of K, sizes of no power of two
    (1, 4, 2, 0, 8, 96, 512), (5, 3, 2, 2, 24, 40, 72), (40, 2, 2, 0, 72, 130, 33), (90, 1, 1, 3, 16, 64, 48),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_rank_additions(case, up, dtype, monkeypatch):
    """Against float64, row by row; rows without an expert and tokens without an adapter keep their bits."""
    T, E, top_k, S, rank, N, K = case
    torch.manual_seed(sum(case))
    ids = torch.randint(-1, E, (T, top_k), device=DEVICE)
    ids[0] = 0
    of_token = torch.arange(T, device=DEVICE) % (S + 1) - 1 if S else None
    groups = group_by_expert(ids, E, of_token, S).with_position()
    x = torch.randn(T if up else T * top_k, K, device=DEVICE).to(dtype)
    out, adapter = torch.randn(T * top_k, N, device=DEVICE).to(dtype), random_adapter(E, S, rank, N, K, dtype)
    want, before = naive(out, x, adapter, groups, None if of_token is None else of_token.tolist(), up), out.clone()
    called = []
    real = adapters.add_low_rank
    monkeypatch.setattr(adapters, "add_low_rank", lambda *a: called.append(a) or real(*a))
    add_low_rank(out, x, adapter, groups, BACKEND, up)
    assert called and relative_error(out, want) < THRESHOLDS["half"]
    same = want == before
    assert same.any() or S == 0 and (ids >= 0).all()
    assert torch.equal(out[same], before[same])


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T", [1, 20])
def test_layers_with_adapters(gate, T):
    """Both stages and the combine, against a loop over tokens in float64 with the changed weights."""
    torch.manual_seed(T)
    E, H, I, top_k = 4, 64, 48, 2
    w = make_weights(E, H, I, GATES[gate], bias=True)
    x, ids, p = batch(T, H, E, top_k)
    ids[-1, 0] = E
    pair = random_adapter(E, 0, 8, w.w13.N, H, x.dtype), random_adapter(E, 0, 8, H, I, x.dtype)
    groups = BACKEND.group(ids, E, None, 0)
    h = up_rows(x, Extras(adapter=pair[0]), w, groups, BACKEND, x.dtype)[0]
    y = down_rows(h, p, Extras(adapter=pair[1]), w, groups, BACKEND, x.dtype)
    x, ids, p, y = (t.cpu() for t in (x, ids, p, y))
    w13, w2 = (
        dense(m.codes.cpu(), m.sf.cpu(), m.row_scales().cpu()[..., None])[..., : m.K]
        + (low.b.double() @ low.a.double()).cpu()
        for m, low in zip((w.w13, w.w2), pair, strict=True)
    )
    b13, b2, want = w.w13.bias.cpu().double(), w.w2.bias.cpu().double(), torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for j, e in enumerate(ids[t].tolist()):
            if e < E:
                h = naive_gate(w.gate, (w13[e] @ x[t].double() + b13[e]).tolist(), I)
                want[t] += p[t, j] * (w2[e] @ torch.tensor(h, dtype=torch.float64) + b2[e])
    # Of both products, the sum is rounded before and after the addition, and h after the gate
    assert relative_error(y, want) < 3 * THRESHOLDS["half"]


@pytest.mark.parametrize("T", [3, 40])
def test_a_routing_weight_of_nan_without_an_expert(T):
    """docs/numerics.md: it makes its token's output NaN, and no other's, as on every backend."""
    w, (x, ids, p) = make_weights(4, 64, 32), batch(T, 64, 4, 2)
    want = portable.experts(x, ids, p, w)
    ids[1, 1], ids[2, 0], p[1, 1], p[2, 0] = 4, -1, float("nan"), float("inf")
    got = portable.experts(x, ids, p, w)
    assert got[1:3].isnan().all() and torch.equal(got[[0, *range(3, T)]], want[[0, *range(3, T)]])
    assert config.FEW < 2 * 40  # both ways of finding rows
