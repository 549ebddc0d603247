"""The recipes of quantize/recipes.py against a loop over single numbers, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_nvfp4 import format
from moe_nvfp4.quantize import search
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, RECIPES, quantize_expert, quantize_matrix

SEARCHES = [recipe for recipe in RECIPES if recipe != "max"]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# e4m3's numbers by their definition: 3 mantissa bits, exponent bias 7; byte 127 is NaN
E4M3 = [(n % 8) * 2.0**-9 if n < 8 else (1 + n % 8 / 8) * 2.0 ** (n // 8 - 7) for n in range(127)]


def nearest(value: float, grid: list[float]) -> int:
    """Index of the nearest number of the grid; the even one of two equally near. In float64, where ties are exact."""
    return min(range(len(grid)), key=lambda i: (abs(value - grid[i]), i % 2))


def f32(x) -> float:
    return float(np.float32(x))


def sum_by_halves(values: list[float]) -> float:
    while len(values) > 1:
        half = len(values) // 2
        values = [f32(values[k] + values[k + half]) for k in range(half)]
    return values[0]


def encode_block(x: list[float], sf: int, gs: float, weights: list[float]) -> tuple[list[int], float]:
    """The codes of a block with the e4m3 byte sf, and its weighted error in units of global_scale^2."""
    if sf == 0:
        return [0] * 16, 0.0
    scale = f32(E4M3[sf] * gs)
    a = [f32(abs(v) / scale) for v in x]  # float64 quotients, rounded once more: exact
    codes = [nearest(v, E2M1) for v in a]
    squares = [f32(f32(f32(v - E2M1[c]) ** 2) * k) for v, c, k in zip(a, codes, weights, strict=True)]
    error = f32(sum_by_halves(squares) * E4M3[sf] ** 2)
    return [c + 8 * (v < 0) for c, v in zip(codes, x, strict=True)], error


def candidates(recipe: str, largest: float, gs: float) -> list[int]:
    """The e4m3 bytes that a recipe tries, in the order in which the first of equals wins."""
    six = nearest(min(f32(f32(largest / 6) / gs), 448.0), E4M3)
    if recipe == "max" or six == 0:
        return [six]
    if recipe == "four_over_six":
        return [six, nearest(min(f32(f32(largest / 4) / gs), 448.0), E4M3)]
    return [six] + [min(max(six + step, 1), 126) for step in (-2, -1, 1, 2, 3, 4, 5, 6)]


def naive(w: torch.Tensor, recipe: str, gs: float | None = None, importance: torch.Tensor | None = None):
    """-> (codes uint8 [N, K], sf bytes [N, K/16], global scale, errors [N, K/16])"""
    rows = w.double().tolist()
    if gs is None:
        amax = max(abs(v) for row in rows for v in row)
        gs = max(f32(amax / (6 * (448 if recipe == "max" else 256))), 2.0**-126) if amax else 1.0
    columns = [1.0] * w.shape[1] if importance is None else importance.double().tolist()
    codes, sfs, errors = [], [], []
    for row in rows:
        for k in range(0, len(row), 16):
            block = row[k : k + 16]
            options = candidates(recipe, max(map(abs, block)), gs)
            tried = [(sf, *encode_block(block, sf, gs, columns[k : k + 16])) for sf in options]
            sf, block_codes, error = min(tried, key=lambda t: t[2])  # the first of equals
            codes += block_codes
            sfs.append(sf)
            errors.append(error)
    shape = (w.shape[0], -1)
    as_bytes = [torch.tensor(v, dtype=torch.uint8).reshape(shape) for v in (codes, sfs)]
    return *as_bytes, gs, torch.tensor(errors).reshape(shape)


def check(w: torch.Tensor, recipe: str, gs: float | None = None, importance: torch.Tensor | None = None):
    codes, sf, got_gs = quantize_matrix(w, recipe, gs, importance)
    want_codes, want_sf, want_gs, _ = naive(w, recipe, gs, importance)
    assert (codes.dtype, sf.dtype, got_gs.dtype) == (
        torch.uint8,
        torch.float8_e4m3fn,
        torch.float32,
    )
    assert got_gs.dim() == 0 and got_gs.item() == want_gs
    assert torch.equal(sf.view(torch.uint8), want_sf)
    assert torch.equal(format.unpack(codes), want_codes)


def matrix(seed: int, n: int = 5, k: int = 64, spread: float = 1.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    rows = torch.exp2(spread * torch.randn(n, 1, generator=g))
    return torch.randn(n, k, generator=g) * rows * 0.02


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_the_naive_loop(recipe, dtype):
    for seed in range(4):
        check(matrix(seed, spread=3.0 * seed).to(dtype), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_special_blocks(recipe):
    w = matrix(9)
    w[0] = 0
    w[1, :16] = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2)  # ties of every code
    w[1, 16:32] = -w[1, :16]
    w[2, :16] = 1e-9  # its scale rounds to zero
    w[2, 16:32] = 2e-6  # a subnormal scale
    w[3, :16] = 3.0  # every candidate that is exact has error 0
    check(w, recipe)
    check(torch.zeros(2, 32), recipe)
    check(w, recipe, gs=f32(0.001))  # saturates: 6 is beyond 6 * 448 * 0.001


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_smallest_scales(recipe):
    """Scales from 0 over 2^-9, the smallest, to the first normal numbers."""
    size = torch.exp2(torch.linspace(-9, -1, 40))[:, None]
    check(torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * size * 2**-5, recipe, gs=1.0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False), min_size=32, max_size=32))
@example(values=[0.0] * 31 + [f32(1.3471954516560073e-38)])  # the global scale would be subnormal
def test_any_numbers(recipe, values):
    check(torch.tensor(values).reshape(1, 32), recipe)


def squared_error(w, codes, sf, gs) -> torch.Tensor:
    d = w.double() - format.dequantize(codes, sf, None).double() * gs.double()
    return d.square().unflatten(-1, (-1, 16)).sum(-1)


@pytest.mark.parametrize("recipe", SEARCHES)
def test_no_block_is_worse_than_by_max(recipe):
    w = matrix(3, 64, 512).bfloat16()
    codes, sf, gs = quantize_matrix(w, recipe)
    error = squared_error(w, codes, sf, gs)
    by_max = squared_error(w, *quantize_matrix(w, "max", gs))
    assert (error <= by_max * (1 + 1e-5)).all()  # the recipes compare float32 sums
    assert error.sum() < 0.9 * by_max.sum()


def test_mse_finds_the_best_of_all_scales():
    w = matrix(4, 16, 256)
    codes, sf, gs = quantize_matrix(w, "mse")
    error = squared_error(w, codes, sf, gs)
    best = torch.full_like(error, torch.inf)
    for byte in range(1, 127):
        every = torch.full_like(sf.view(torch.uint8), byte).view(torch.float8_e4m3fn)
        best = torch.minimum(best, squared_error(w, format.encode(w, every, gs), every, gs))
    assert error.sum() <= best.sum() * 1.001
    assert (error <= best * (1 + 1e-5)).double().mean() > 0.99


def test_max_is_the_formats_own():
    w = matrix(5, 33, 160).bfloat16()
    for got, want in zip(quantize_matrix(w, "max"), format.quantize(w), strict=True):
        assert got.dtype == want.dtype and torch.equal(got.float(), want.float())


@pytest.mark.parametrize("recipe", SEARCHES)
@pytest.mark.parametrize("blocks", [1, 7, 1000])
def test_chunks_do_not_show(recipe, blocks, monkeypatch):
    w = matrix(6, 30, 176).bfloat16()
    whole = quantize_matrix(w, recipe)
    monkeypatch.setattr(search, "_CPU_BLOCKS", blocks)
    for got, want in zip(quantize_matrix(w, recipe), whole, strict=True):
        assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize("recipe", RECIPES)
def test_views_parameters_and_empty_matrices(recipe):
    w = matrix(7, 64, 48).bfloat16()
    want = quantize_matrix(w, recipe)
    for same in (w.t().contiguous().t(), torch.nn.Parameter(w), torch.cat([w, w], 1)[:, :48]):
        for a, b in zip(quantize_matrix(same, recipe), want, strict=True):
            assert torch.equal(a.float(), b.float())
    codes, sf, gs = quantize_matrix(w[:0], recipe)
    assert (codes.shape, sf.shape, gs.item()) == ((0, 24), (0, 3), 1.0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_global_scale(recipe):
    w = matrix(8)
    gs = w.abs().max() / 1000
    for given_gs in (gs, gs.reshape(1), gs.item()):
        codes, sf, got = quantize_matrix(w, recipe, given_gs)
        assert got.dim() == 0 and got == gs
    assert torch.equal(codes, format.encode(w, sf, gs))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("blocks", [7, 1 << 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_matrices_at_once(recipe, blocks, dtype, monkeypatch):
    """Each gets the bytes that it gets alone, whatever the others are; chunks of 7 blocks end within a matrix."""
    w = torch.stack([matrix(seed, 6, 80) * 10.0**seed for seed in range(4)]).to(dtype)
    w[1] = 0
    monkeypatch.setattr(search, "_CPU_BLOCKS", blocks)
    for given_gs in (None, torch.tensor([0.001, 0.5, 0.002, 3.0])):
        codes, sf, gs = quantize_matrix(w, recipe, given_gs)
        assert gs.shape == (4,) and len(set(gs.tolist())) == 4
        for i in range(4):
            alone = quantize_matrix(w[i], recipe, None if given_gs is None else given_gs[i])
            for got, want in zip((codes[i], sf[i], gs[i]), alone, strict=True):
                assert (got.dtype, got.shape) == (want.dtype, want.shape) and torch.equal(got.float(), want.float())
        for got, want in zip(quantize_matrix(w[2:3], recipe), quantize_matrix(w[2], recipe), strict=True):
            assert torch.equal(got.float(), want[None].float())
    w[3, 5, 79] = torch.inf
    with pytest.raises(ValueError, match="1 of 1920 .*NaN or Inf"):
        quantize_matrix(w, recipe)
    with pytest.raises(ValueError, match=r"\[4\], one for each matrix, not \[\]"):
        quantize_matrix(w, recipe, torch.ones(()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors(recipe):
    w = matrix(1)
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = w.clone()
        broken[2, 3] = bad
        with pytest.raises(ValueError, match="1 of 320 .*NaN or Inf"):
            quantize_matrix(broken, recipe)
    for bad_gs in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="global_scale"):
            quantize_matrix(w, recipe, bad_gs)
    with pytest.raises(ValueError, match="one number"):
        quantize_matrix(w, recipe, torch.ones(2))
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_matrix(w[:, :24], recipe)
    with pytest.raises(ValueError, match="float64"):
        quantize_matrix(w.double(), recipe)
    for bad in (w[0], w[None, None]):
        with pytest.raises(ValueError, match="matrix"):
            quantize_matrix(bad, recipe)


def columns(seed: int, k: int) -> torch.Tensor:
    """Importance like that of activations: a few columns are a thousand times larger than the others."""
    return torch.exp2(4 * torch.randn(k, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weighted_equals_the_naive_loop(dtype):
    for seed in range(4):
        w, importance = matrix(seed, spread=3.0 * seed).to(dtype), columns(seed, 64)
        check(w, "weighted", importance=importance)
        check(w, "weighted", importance=importance * 1e-30)
    importance[5:40] = 0  # inputs that never come; a block of them has max's scale
    check(w, "weighted", importance=importance)
    check(torch.zeros(2, 64), "weighted", importance=importance)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False), min_size=32, max_size=32),
    importance=st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=16, max_size=16),
)
def test_weighted_any_numbers(values, importance):
    check(torch.tensor(values).reshape(2, 16), "weighted", importance=torch.tensor(importance))


def test_weighted_with_equal_columns_is_mse():
    w = matrix(5, 33, 160).bfloat16()
    for got, want in zip(quantize_matrix(w, "weighted", importance=torch.full((160,), 0.3)), quantize_matrix(w, "mse"),
                         strict=True):  # fmt: skip
        assert torch.equal(got.float(), want.float())


def test_weighted_lowers_the_error_of_outputs():
    w, importance = matrix(3, 64, 512), columns(1, 512)
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * importance.sqrt()
    error = {}
    for recipe, given_importance in (("mse", None), ("weighted", importance)):
        codes, sf, gs = quantize_matrix(w, recipe, importance=given_importance)
        error[recipe] = (x @ (format.dequantize(codes, sf, gs) - w).double().T).square().mean().item()
    assert error["weighted"] < 0.8 * error["mse"]


@pytest.mark.parametrize("blocks", [7, 1 << 12])
def test_weighted_several_matrices_at_once(blocks, monkeypatch):
    """Each matrix has its own importance, or all share one; chunks of 7 blocks end within a row and within a matrix."""
    w = torch.stack([matrix(seed, 6, 80) * 10.0**seed for seed in range(4)])
    importance = torch.stack([columns(seed, 80) for seed in range(4)])
    monkeypatch.setattr(search, "_CPU_BLOCKS", blocks)
    for given_importance in (importance, importance[2]):
        together = quantize_matrix(w, "weighted", None, given_importance)
        for i in range(4):
            alone = quantize_matrix(w[i], "weighted", None, given_importance.expand(4, -1)[i])
            for got, want in zip(together, alone, strict=True):
                assert torch.equal(got[i].float(), want.float())


def test_importance_errors():
    w = matrix(1)
    with pytest.raises(ValueError, match="'weighted' needs the importance"):
        quantize_matrix(w, "weighted")
    with pytest.raises(ValueError, match="no effect on recipe 'mse'"):
        quantize_matrix(w, "mse", importance=columns(1, 64))
    with pytest.raises(ValueError, match=r"importance has shape \[32\], w \[5, 64\]"):
        quantize_matrix(w, "weighted", importance=columns(1, 32))
    with pytest.raises(ValueError, match=r"importance has shape \[33\], w \[5, 40\]"):  # padded, both have 48 columns
        quantize_expert(w[:, :40], "up_proj", "weighted", importance=columns(1, 33))
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            quantize_matrix(w, "weighted", importance=torch.full((64,), bad))


def test_recipe_names():
    assert DEFAULT_RECIPE in RECIPES
    with pytest.raises(ValueError, match="'best'.*max, four_over_six, mse"):
        quantize_matrix(matrix(1), "best")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
def test_cuda_gives_the_same_bits(recipe):
    w = matrix(2, 256, 512).bfloat16()
    on_gpu = quantize_matrix(w.cuda(), recipe)
    for got, want in zip(on_gpu, quantize_matrix(w, recipe), strict=True):
        assert torch.equal(got.cpu().float(), want.float())
