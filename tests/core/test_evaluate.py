"""Metrics against a loop over tokens in Python floats, against transformers' own loss, and by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from moe_nvfp4 import evaluate as evaluation
from moe_nvfp4.evaluate import Metrics, evaluate, students_t
from tests.models import make, qwen3_moe

VOCABULARY = 11


def speaks(table):
    """A model that is a table: the logits after token i are row i."""
    return lambda ids: SimpleNamespace(logits=table[ids])


def by_hand(table, original, windows):
    """(tokens, perplexity, KL, top-1), computed token by token."""

    def probabilities(row):
        row = row.double().tolist()
        exps = [math.exp(v - max(row)) for v in row]
        return [v / math.fsum(exps) for v in exps]

    nll, kl, same = [], [], []
    for ids in windows:
        for token, target in zip(ids.tolist(), ids.tolist()[1:], strict=False):
            q, p = probabilities(original[token]), probabilities(table[token])
            nll.append(-math.log(p[target]))
            kl.extend(b * math.log(b / a) for a, b in zip(p, q, strict=True) if b)
            same.append(p.index(max(p)) == q.index(max(q)))
    n = len(nll)
    return n, math.exp(math.fsum(nll) / n), math.fsum(kl) / n, sum(same) / n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [1, 3 * VOCABULARY, 1 << 22], ids=lambda step: f"step{step}")
def test_against_a_loop(dtype, step, monkeypatch):
    monkeypatch.setattr(evaluation, "STEP", step)
    original = (3 * torch.randn(VOCABULARY, VOCABULARY)).to(dtype)
    tables = {"near": original + 0.1 * torch.randn_like(original), "far": torch.randn_like(original)}
    windows = [torch.randint(VOCABULARY - 1, (n,)) for n in (2, 7, 30)]
    original[:, -1] = tables["near"][:, -1] = -math.inf  # a token that never comes
    found = evaluate(speaks(original), {name: speaks(table) for name, table in tables.items()}, windows)
    assert list(found) == ["original", "near", "far"]
    for name, table in {"original": original, **tables}.items():
        tokens, *means = by_hand(table, original, windows)
        metrics = found[name]
        assert metrics.tokens == tokens == 36
        assert [metrics.perplexity, metrics.kl, metrics.top1] == pytest.approx(means, rel=1e-12, abs=1e-15)
        each = [by_hand(table, original, [w[t : t + 2]])[2] for w in windows for t in range(len(w) - 1)]
        assert metrics.kls.tolist() == pytest.approx(each, rel=1e-6, abs=1e-7)
        assert metrics.kl_median == pytest.approx(sorted(each)[17], rel=1e-6, abs=1e-7)
        assert metrics.windows == (1, 6, 29)
        assert metrics.kl_trimmed == pytest.approx(math.fsum(sorted(each)[:34]) / 34, rel=1e-6, abs=1e-7)
    assert (found["original"].kl, found["original"].top1) == (0, 1) and 0 < found["near"].kl < found["far"].kl


def test_intervals():
    """By hand in float64, for windows of several lengths; they hold the truth as often as they say."""
    windows = [[0.1, 0.3], [0.2, 0.2, 0.2], [0.9], [0.4]]
    kls = torch.tensor([kl for window in windows for kl in window])
    metrics = Metrics(7, 0.0, kls.mean().item(), 0.0, kls, tuple(map(len, windows)))
    kl = math.fsum(kls.tolist()) / 7
    spread = math.fsum((math.fsum(window) - kl * len(window)) ** 2 for window in windows)
    reach = 3.182446 * math.sqrt(4 / 3 * spread) / 7  # the point of t with 3 degrees of freedom, from a table
    assert kl < reach and metrics.kl_interval == (0.0, pytest.approx(kl + reach, rel=5e-3))
    assert Metrics(2, 0.0, 0.0, 0.0, kls[:2], (1, 1)).kl_interval is None
    assert Metrics(3, 0.0, 0.0, 0.0, torch.tensor([0.1, math.inf, 0.2]), (1, 1, 1)).kl_interval is None
    assert Metrics(3, 0.0, 0.0, 0.0, torch.full((3,), -1e-9), (1, 1, 1)).kl_interval == (0.0, 0.0)

    for freedom, point in ((2, 4.302653), (5, 2.570582), (11, 2.200985), (47, 2.011741), (10000, 1.960201)):
        assert students_t(freedom) == pytest.approx(point, rel=1e-2 if freedom == 2 else 1e-3)
    draws, held = torch.randn(500, 6, generator=torch.Generator().manual_seed(0)) * 0.01 + 0.1, 0
    for drawn in draws:
        low, high = Metrics(6, 0.0, 0.0, 0.0, drawn, (1,) * 6).kl_interval
        held += low <= 0.1 <= high
    assert 460 <= held <= 490


def test_by_hand():
    """The original knows that a coin falls 3 : 1; the model thinks it is fair."""
    original, fair = torch.tensor([[3.0, 1.0]] * 2).log(), torch.zeros(2, 2)
    found = evaluate(speaks(original), {"fair": speaks(fair)}, [torch.tensor([0, 0, 0, 0, 1])])
    assert found["original"].perplexity == pytest.approx(4 / 27**0.25, rel=1e-7)  # fp32 logits
    assert found["fair"].perplexity == pytest.approx(2, rel=1e-12)
    assert found["fair"].kl == pytest.approx(math.log(2) - (math.log(4) - 0.75 * math.log(3)), rel=1e-6)
    assert found["fair"].top1 == 1


def test_perplexity_is_that_of_transformers():
    model = make(qwen3_moe, torch.float32)
    ids = torch.randint(96, (40,))
    loss = model(ids[None], labels=ids[None]).loss.item()
    assert evaluate(model, {}, [ids])["original"].perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_what_cannot_be_judged_is_an_error():
    good, ids = torch.zeros(VOCABULARY, VOCABULARY), torch.tensor([1, 2, 3])
    for windows, message in (([ids[:1]], r"\[1\] pred"), ([ids[None]], r"\[1, 3\] pred"), ([], "no windows")):
        with pytest.raises(ValueError, match=message):
            evaluate(speaks(good), {}, windows)
    for wrong in (math.nan, math.inf):
        bad = good.clone()
        bad[2, 5] = wrong
        with pytest.raises(ValueError, match="logits of x have NaN"):
            evaluate(speaks(good), {"x": speaks(bad)}, [ids])
        with pytest.raises(ValueError, match="logits of original have NaN"):
            evaluate(speaks(bad), {"x": speaks(good)}, [ids])
    with pytest.raises(ValueError, match=r"x has logits \[2, 10\], the original \[2, 11\]"):
        evaluate(speaks(good), {"x": speaks(good[:, :10])}, [ids])
    impossible = good.clone()
    impossible[:, 3] = -math.inf  # an infinite perplexity is an answer, not an error
    found = evaluate(speaks(good), {"x": speaks(impossible)}, [ids])["x"]
    assert (found.perplexity, found.kl) == (math.inf, math.inf)


def test_models_that_are_not_to_be_compared_are_named():
    table = torch.randn(VOCABULARY, VOCABULARY)
    ids = [torch.tensor([1, 2])]
    with pytest.raises(ValueError, match='a model is named "original"'):  # its sums would be added to the original's
        evaluate(speaks(table), {"original": speaks(table)}, ids)
    model = make(qwen3_moe, torch.float32)
    model.model.layers[1].train()
    for original, models in ((model, {}), (make(qwen3_moe, torch.float32), {"mine": model})):
        with pytest.raises(ValueError, match=f"{'mine' if models else 'original'} is in train mode"):
            evaluate(original, models, ids)
