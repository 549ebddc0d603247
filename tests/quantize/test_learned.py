"""Codes that gradients change: derivatives worked out by hand, and bytes that are the values."""

import pytest
import torch

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.quantize.learned import LearnedMatrices
from moe_nvfp4.quantize.recipes import quantize_matrix


def test_gradients_are_straight_through():
    """Scale 2 * 0.25 = 0.5. By hand: 1.1 has code 1, -2.6 has -3, 7 has 6 and no gradient, 5.5 has
    6 and the scale's, as all others."""
    start = quantize_matrix(torch.full((1, 1, 16), 3.0), "max")
    codes, sf = start[0], torch.full((1, 1, 1), 2.0).to(torch.float8_e4m3fn)
    learned = LearnedMatrices(torch.zeros(1, 1, 16), (codes, sf, torch.tensor([0.25])))
    learned.t = torch.zeros(1, 1, 1, 16)
    learned.t[0, 0, 0, :4] = torch.tensor([1.1, -2.6, 7.0, 5.5])
    learned.t.requires_grad_()
    assert learned.values()[0, 0, :4].tolist() == [0.5, -1.5, 3.0, 3.0]
    weights = torch.zeros(16)
    weights[:4] = torch.tensor([10.0, 100.0, 1000.0, 10000.0])
    (learned.values() * weights).sum().backward()
    assert learned.t.grad[0, 0, 0, :4].tolist() == [5.0, 50.0, 0.0, 5000.0]


@pytest.mark.parametrize("recipe", ["max", "mse"])
@pytest.mark.parametrize("columns", [48, 40])
def test_it_begins_with_the_given_codes(recipe, columns):
    """Each weight at its own place, unless that rounds to another code; at the end of the code's interval then."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(3, 8, columns, generator=g)
    w[0, 0, :16] = 0
    start = quantize_matrix(nvfp4.pad_k(w), recipe)
    learned = LearnedMatrices(w, start)
    want = nvfp4.dequantize(start[0], start[1], start[2][:, None])
    assert torch.equal(learned.values(), want[..., :columns])
    codes, sf, scale = learned.quantized()
    assert torch.equal(nvfp4.dequantize(codes, sf, scale[:, None]), want)
    assert torch.equal(sf.view(torch.uint8), start[1].view(torch.uint8)) and torch.equal(scale, start[2])
    # Codes far from the weights: the value moves towards the weight, and stays the code's
    other = start[0].flip(0)
    far = LearnedMatrices(w, (other, start[1], start[2]))
    want = nvfp4.dequantize(other, start[1], start[2][:, None])[..., :columns]
    assert torch.equal(far.values(), want)
    scale = start[1].float().repeat_interleave(16, dim=-1)[..., :columns] * start[2][:, None, None]
    place = far.t.flatten(-2)[..., :columns] * scale
    moved, wanted = place - want, w - want
    assert ((moved.sign() == wanted.sign()) | (moved.abs() < 1e-6)).all() and (moved.abs() > 0.1 * scale).any()


def test_bytes_are_the_values_after_training():
    g = torch.Generator().manual_seed(1)
    w = torch.randn(2, 8, 48, generator=g)
    learned = LearnedMatrices(w, quantize_matrix(w, "mse"))
    first = learned.quantized()
    learned.t += 0.4 * torch.randn(learned.t.shape, generator=g)
    codes, sf, scale = learned.quantized()
    assert torch.equal(nvfp4.dequantize(codes, sf, scale[:, None]), learned.values())
    assert (codes != first[0]).float().mean() > 0.3
    assert torch.equal(scale, first[2]) and torch.equal(sf.view(torch.uint8), first[1].view(torch.uint8))


def test_training_comes_nearer_than_rounding():
    """A target that no rounding of single weights reaches: outputs for rows that are strongly correlated."""
    g = torch.Generator().manual_seed(2)
    rows = torch.randn(400, 4, generator=g) @ torch.randn(4, 32, generator=g)
    w = torch.randn(1, 16, 32, generator=g)
    start = quantize_matrix(w, "mse")
    learned = LearnedMatrices(w, start)
    error = lambda: (rows @ (learned.values()[0] - w[0]).T).square().sum() / (rows @ w[0].T).square().sum()  # noqa: E731
    before = error().item()
    optimizer = torch.optim.Adam([learned.t.requires_grad_()], lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        error().backward()
        optimizer.step()
    assert error().item() < 0.6 * before
