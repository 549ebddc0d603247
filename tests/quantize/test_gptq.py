"""GPTQ against a loop over single columns in float64, and by its purpose, a smaller error of outputs."""

import pytest
import torch

from moe_nvfp4 import format
from moe_nvfp4.quantize import gptq
from moe_nvfp4.quantize.gptq import DAMPING, inverse_factor, quantize_gptq
from moe_nvfp4.quantize.recipes import better, quantize_matrix
from tests.quantize.test_recipes import E2M1, E4M3, candidates, f32, nearest


def correlated(seed, K, rows=400):
    """Inputs [rows, K] with correlated columns, some a hundred times larger than others."""
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, K // 2, generator=g) @ torch.randn(K // 2, K, generator=g)
    return (mixed + torch.randn(rows, K, generator=g)) * torch.exp2(2 * torch.randn(K, generator=g))


def weights(seed, n=2, N=6, K=48):
    return torch.randn(n, N, K, generator=torch.Generator().manual_seed(seed)) * 0.02


def hessian_of(x):
    return x.T @ x


def naive(w, hessian):
    """One matrix, row by row and column by column -> (codes' values [N, K], sf's values [N, K/16], global scale)."""
    gs = f32(w.abs().max().item() / (6 * 256))
    H = hessian.double()
    U = torch.linalg.cholesky(torch.linalg.inv(H + DAMPING * H.diagonal().mean() * torch.eye(len(H))), upper=True)
    values, scales = torch.zeros_like(w), torch.zeros(w.shape[0], w.shape[1] // 16)
    for r, row in enumerate(w.double()):
        left = row.clone()
        for k in range(0, len(row), 16):
            tried = []
            for byte in candidates("mse", left[k : k + 16].abs().max().item(), gs):
                trial, loss, found = left.clone(), 0.0, []
                for j in range(k, k + 16):
                    scale = E4M3[byte] * gs
                    code = E2M1[nearest(abs(trial[j].item()) / scale, E2M1)] if byte else 0.0
                    found.append(code if trial[j] >= 0 else -code)
                    error = (trial[j] - found[-1] * scale) / U[j, j]
                    trial[j + 1 :] -= error * U[j, j + 1 :]
                    loss += error.item() ** 2
                tried.append((loss, byte, found, trial))
            _, byte, found, left = min(tried, key=lambda t: t[0])
            values[r, k : k + 16], scales[r, k // 16] = torch.tensor(found), E4M3[byte]
    return values, scales, gs


@pytest.mark.parametrize("lazy", [16, 32, gptq.LAZY])
def test_equals_the_naive_loop(lazy, monkeypatch):
    """lazy: errors reach the columns behind so many by one product."""
    monkeypatch.setattr(gptq, "LAZY", lazy)
    w, H = weights(0), torch.stack([hessian_of(correlated(s, 48)) for s in range(2)])
    codes, sf, gs = quantize_gptq(w, H)
    assert (codes.dtype, sf.dtype, gs.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    for i in range(2):
        values, scales, scale = naive(w[i], H[i])
        assert gs[i].item() == scale
        assert (sf[i].float() == scales).float().mean() > 0.97  # float64 breaks some ties of float32
        assert (format.decode(codes[i]) == values).float().mean() > 0.97


def test_inverse_factor():
    H = torch.stack([hessian_of(correlated(s, 64)) for s in range(3)])
    U = inverse_factor(H).double()
    mean = H.double().diagonal(dim1=1, dim2=2).mean(dim=1)
    damped = H.double() + DAMPING * torch.diag_embed(mean[:, None].expand(3, 64))
    eye = torch.eye(64).double().expand(3, -1, -1)
    torch.testing.assert_close(U.transpose(1, 2) @ U @ damped, eye, rtol=0, atol=1e-3)
    assert (U.tril(-1) == 0).all() and (U.diagonal(dim1=1, dim2=2) > 0).all()


def test_a_singular_hessian_is_damped():
    x = correlated(1, 64, rows=3)  # rank 3
    codes, sf, gs = quantize_gptq(weights(1, 1, 8, 64), hessian_of(x)[None])
    assert format.dequantize(codes[0], sf[0], gs[0]).isfinite().all()


def test_only_what_needs_it_is_damped_more():
    """A Hessian that rounding made indefinite leaves the matrices beside it as they are."""
    H = torch.stack([hessian_of(correlated(s, 48)) for s in range(2)])
    H[1] -= 0.05 * H[1].diagonal().mean() * torch.eye(48)
    with torch.no_grad():
        found, alone = inverse_factor(H), inverse_factor(H[:1])
    assert torch.linalg.eigvalsh(H[1].double()).min() < -2 * DAMPING * H[1].diagonal().mean()
    assert torch.equal(found[:1], alone) and found.isfinite().all()


def test_of_equal_errors_the_other_is_kept():
    """As for an expert that no row reached."""
    w = weights(8)
    made, other = (
        tuple(torch.stack(t) for t in zip(*(quantize_matrix(m, r) for m in w), strict=True)) for r in ("mse", "max")
    )
    for rows in ([torch.zeros(0, 48)] * 2, [torch.zeros(3, 48)] * 2):
        assert all(map(torch.equal, better(w, made, other, rows), other))


@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_nearer_than_by_any_scale(seed):
    w, x = weights(seed, 1, 64, 128), correlated(seed, 128, rows=2000)
    H = hessian_of(x)
    error = lambda codes, sf, gs: (x @ (format.dequantize(codes, sf, gs) - w[0]).T).square().mean().item()
    codes, sf, gs = quantize_gptq(w, H[None])
    weighted = error(*quantize_matrix(w[0], "weighted", importance=H.diagonal()))
    assert error(codes[0], sf[0], gs[0]) < 0.6 * weighted < 0.6 * error(*quantize_matrix(w[0], "mse"))


@pytest.mark.parametrize("known", [0.0, 3.0], ids=["no data", "columns that do not go together"])
def test_without_correlations_it_is_mse(known):
    w = weights(3, 2, 32, 96)
    codes, sf, gs = quantize_gptq(w, known * torch.eye(96).expand(2, -1, -1))
    for i in range(2):
        want = quantize_matrix(w[i], "mse")
        assert gs[i] == want[2]
        assert (sf[i].float() == want[1].float()).float().mean() > 0.995
        assert (format.decode(codes[i]) == format.decode(want[0])).float().mean() > 0.995  # 0 or -0


def test_columns_without_input_are_rounded_by_themselves():
    x = correlated(4, 64)
    x[:, 10:20] = 0
    w = weights(4, 1, 16, 64)
    codes, sf, gs = quantize_gptq(w, hessian_of(x)[None])
    values = format.dequantize(codes[0], sf[0], gs[0])
    step = (sf[0].float() * gs[0]).repeat_interleave(16, dim=1)
    assert ((values - w[0]).abs()[:, 10:20] <= step[:, 10:20] * 1.001 + 1e-9).all()  # half of the widest step, 2
    assert values[:, 10:20].abs().sum() > 0


def test_chunks_do_not_show(monkeypatch):
    w, H = weights(5, 3, 40, 160), torch.stack([hessian_of(correlated(s, 160)) for s in range(3)])
    whole = quantize_gptq(w, H)
    monkeypatch.setattr(gptq, "_CPU_ELEMENTS", 16 * 9 * 3 * 7)  # 7 rows
    monkeypatch.setattr(gptq, "_FACTORED", 1)
    for got, want in zip(quantize_gptq(w, H), whole, strict=True):
        assert (got.float() == want.float()).float().mean() > 0.99  # sums in another order


def test_padding():
    """K = 24 is a block of 16 and one of 8 columns and 8 zeros."""
    w, H = weights(6, 1, 8, 24), hessian_of(correlated(6, 24))[None]
    codes, sf, gs = quantize_gptq(w, H)
    assert codes.shape == (1, 8, 16) and sf.shape == (1, 8, 2)
    assert (format.decode(codes[0])[:, 24:] == 0).all()
    error = (format.dequantize(codes[0], sf[0], gs[0])[:, :24] - w[0]).norm() / w[0].norm()
    assert error < 0.25


def test_errors():
    w, H = weights(7), torch.stack([hessian_of(correlated(s, 48)) for s in range(2)])
    with pytest.raises(ValueError, match=r"hessian must be \[2, 48, 48\]"):
        quantize_gptq(w, H[:1])
    for bad in (float("nan"), float("inf")):
        broken = w.clone()
        broken[1, 2, 3] = bad
        with pytest.raises(ValueError, match="1 weights are NaN or Inf"):
            quantize_gptq(broken, H)
        broken = H.clone()
        broken[0, 1, 1] = bad
        with pytest.raises(ValueError, match="1 sums of the calibration data are NaN or Inf"):
            quantize_gptq(w, broken)
    with pytest.raises(ValueError, match="not positive semidefinite"):
        quantize_gptq(w, -H)
    with pytest.raises(ValueError, match="needs more than a matrix"):
        quantize_matrix(w[0], "gptq")
