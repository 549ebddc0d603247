"""Routing against naive loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_nvfp4.checks import check_groups
from moe_nvfp4.routing import group_by_expert


@st.composite
def routings(draw):
    E = draw(st.integers(1, 12))
    T, top_k = draw(st.integers(0, 20)), draw(st.integers(1, 6))
    ids = draw(st.lists(st.integers(-1, E), min_size=T * top_k, max_size=T * top_k))
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return E, torch.tensor(ids, dtype=dtype).view(T, top_k)


@settings(max_examples=200, deadline=None)
@given(routings(), st.sampled_from([1, 2, 8, 32]))
def test_groups_and_tiles_match_a_loop(routing, tile):
    E, ids = routing
    groups = group_by_expert(ids, E)

    flat = ids.reshape(-1).tolist()
    rows = [[i for i, id in enumerate(flat) if id == e] for e in range(E)]
    live = sum(map(len, rows))
    assert groups.order.tolist()[:live] == sum(rows, [])
    assert sorted(groups.order.tolist()) == list(range(len(flat)))
    ends = [0]
    for r in rows:
        ends.append(ends[-1] + len(r))
    assert groups.offsets.tolist() == ends
    assert groups.token.tolist() == [a // ids.shape[1] for a in groups.order.tolist()]
    expected = [e for e, r in enumerate(rows) for _ in r] + [E] * (len(flat) - live)
    assert groups.expert_of_row().tolist() == expected

    tiles = groups.tiles(tile)
    count = tiles.count.item()
    naive = [(e, ends[e] + i) for e, r in enumerate(rows) for i in range(0, len(r), tile)]
    assert list(zip(tiles.expert.tolist(), tiles.row.tolist(), strict=True))[:count] == naive
    assert count == len(naive) and set(tiles.expert.tolist()[count:]) <= {-1}


@settings(max_examples=100, deadline=None)
@given(routings(), st.integers(1, 4), st.data())
def test_rows_of_an_expert_are_sorted_by_adapter(routing, S, data):
    E, ids = routing
    chosen = data.draw(st.lists(st.integers(-2, S + 1), min_size=len(ids), max_size=len(ids)))
    groups = group_by_expert(ids, E, torch.tensor(chosen, dtype=torch.int64), S)
    assert torch.equal(groups.offsets, group_by_expert(ids, E).offsets)
    of_token = [s if 0 <= s < S else None for s in chosen]
    flat, top_k = ids.reshape(-1).tolist(), ids.shape[1]
    assignments = [(e, of_token[i // top_k], i) for i, e in enumerate(flat)]
    want = [[i for e, s, i in assignments if (e, s) == (own, s_own)] for own in range(E) for s_own in [None, *range(S)]]
    assert groups.order.tolist()[: sum(map(len, want))] == sum(want, [])
    sizes = [len(want[e * (S + 1) + s + 1]) + (s == 0) * len(want[e * (S + 1)]) for e in range(E) for s in range(S)]
    assert groups.parts.diff().tolist() == sizes and groups.parts[0] == 0
    check_groups(groups)
    bare = [(i % (S + 1) == 0) for i, rows in enumerate(want) for _ in rows]
    assert groups.bare.tolist()[: len(bare)] == bare


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_adapters_by_small_integers(dtype):
    """uint8 has no -1, and int8 no 200."""
    ids, adapter = torch.tensor([[0, 2], [1, 0], [2, 1], [1, 2]]), torch.tensor([5, 1, 0, 127])
    for S in (2, 200):
        want, found = (group_by_expert(ids, 3, a, S) for a in (adapter, adapter.to(dtype)))
        for name in ("order", "offsets", "parts", "bare"):
            assert torch.equal(getattr(found, name), getattr(want, name)), name


@pytest.mark.slow
def test_every_shape_is_static_and_compiles():
    def sizes(ids):
        groups, by_adapter = group_by_expert(ids, 4), group_by_expert(ids, 4, ids[:, 0] - 1, 2)
        tiles = groups.tiles(8)
        chosen = by_adapter.order, by_adapter.parts, by_adapter.bare
        return groups.order, groups.offsets, groups.expert_of_row(), tiles.expert, tiles.row, *chosen

    compiled = torch.compile(sizes, fullgraph=True)
    for ids in ([[0, 0], [0, 0], [0, 0]], [[4, 4], [-1, 4], [4, 4]], [[0, 1], [2, 3], [1, 4]]):
        ids = torch.tensor(ids)
        eager, traced = sizes(ids), compiled(ids)
        for a, b in zip(eager, traced, strict=True):
            assert torch.equal(a, b)
    assert [t.shape for t in sizes(torch.zeros(3, 2, dtype=torch.long))] == [t.shape for t in eager]


@pytest.mark.parametrize(("dtype", "experts"), [(torch.int8, 128), (torch.uint8, 255), (torch.uint8, 256)])
def test_ids_of_a_dtype_without_room_for_the_number_of_experts(dtype, experts):
    ids = torch.tensor([[3, 127], [0, 9]])
    got, want = group_by_expert(ids.to(dtype), experts), group_by_expert(ids, experts)
    assert torch.equal(got.order, want.order) and torch.equal(got.offsets, want.offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_leave_out_what_unrouted_rows_hold(dtype):
    """Rows without an expert may hold NaN. Sums are in fp32, whatever the rows are."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 6, (400, 3), generator=g)
    groups, rows = group_by_expert(ids, 5), torch.randn(1200, 4, generator=g).to(dtype)
    rows[groups.offsets[-1] :] = torch.nan
    by_expert, by_token = torch.zeros(5, 4, dtype=torch.float64), torch.zeros(400, 4, dtype=torch.float64)
    for row, assignment in zip(rows.double(), groups.order.tolist(), strict=True):
        if 0 <= (e := int(ids.flatten()[assignment])) < 5:
            by_expert[e] += row
            by_token[assignment // 3] += row
    found = groups.sum_by_expert(rows)
    assert found.dtype == torch.float32 and (found - by_expert).abs().max() < 1e-4
    torch.testing.assert_close(groups.sum(rows).double(), by_token, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5,
                               atol=1e-2 if dtype == torch.bfloat16 else 1e-5)  # fmt: skip


def test_misuse_is_named():
    for low, high in ((0, 5), (-2, 4)):
        with pytest.raises(ValueError, match=rf"expert ids must lie in 0\.\.3.*got ids from {low} to {high}"):
            group_by_expert(torch.tensor([[low, high]]), 4)
    with pytest.raises(TypeError, match="top_k_index and top_k_weights swapped"):
        group_by_expert(torch.rand(2, 2), 4)
    with pytest.raises(ValueError, match=r"must be \[tokens, top_k\]"):
        group_by_expert(torch.zeros(4, dtype=torch.long), 4)
    with pytest.raises(ValueError, match="tile must be at least 1"):
        group_by_expert(torch.zeros(1, 1, dtype=torch.long), 4).tiles(0)
