"""How well a quantized model does: perplexity, KL divergence and top-1 agreement against the original, on a text.

found = evaluate(original, {"W4A16": model}, windows)
found["original"].perplexity, found["W4A16"].kl
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

STEP = 1 << 22  # logits taken to float64 at once: 32 MiB


@dataclass(frozen=True)
class Metrics:
    """Metrics of one model, averaged over the tokens that it predicted."""

    tokens: int
    perplexity: float  # exp of the mean negative log-likelihood of the text's tokens
    kl: float  # KL(original || model) of the distributions of the next token, in nats
    top1: float  # the share of tokens for which both models rank the same next token first, 0 to 1
    kls: Tensor = field(repr=False, compare=False)  # float32 [tokens], window after window
    windows: tuple[int, ...] = field(repr=False, compare=False)  # how many of the tokens are in each window

    @property
    def kl_median(self) -> float:
        """The median. In a routed model, the few tokens whose routing changed dominate the mean, but not this."""
        return self.kls.median().item()

    @property
    def kl_trimmed(self) -> float:
        """The mean without the largest 5 %."""
        return self.kls.sort().values[: max(1, len(self.kls) * 95 // 100)].mean().item()

    @property
    def kl_interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the KL of such texts, by Student's t over windows, whose tokens are not
        independent: the KL is a ratio of two sums over windows. None for fewer than three windows, and for a KL that
        is infinite."""
        sums = torch.stack([part.double().sum() for part in self.kls.split(list(self.windows))])
        lengths, n = torch.tensor(self.windows, dtype=torch.float64), len(sums)
        kl = sums.sum() / lengths.sum()
        if n < 3 or not kl.isfinite():
            return None
        error = (n / (n - 1) * (sums - kl * lengths).square().sum()).sqrt() / lengths.sum()
        reach = students_t(n - 1) * error
        return max(0.0, (kl - reach).item()), max(0.0, (kl + reach).item())


def students_t(freedom: int) -> float:
    """The 97.5 % point of Student's t with so many degrees of freedom, two or more, to 1 %: Abramowitz and Stegun,
    Handbook of Mathematical Functions, 26.7.5."""
    z, terms = 1.959964, (2.37227, 2.82250, 2.55585, 1.58952)
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


@torch.no_grad()
def evaluate(
    original: Callable[[Tensor], Any], models: Mapping[str, Callable[[Tensor], Any]], windows: Iterable[Tensor]
) -> dict[str, Metrics]:
    """Metrics of the original, under the key "original", and of `models`, under their names.

    A model is called with token ids int64 [1, n] and returns an object with `logits` [1, n, vocabulary], as the models
    of transformers do. windows: ids [n], n >= 2, on the models' device; each window is a text of its own, and its
    first token is not predicted. The original runs once for all models. Sums are float64.

    ValueError for a window of one token, for no windows, for a model in train mode, whose dropout is random, for one
    named "original", and for logits with NaN or +Inf (-Inf is fine: a token that never comes).
    """
    if "original" in models:
        raise ValueError('a model is named "original", which is the name of what it is compared with: choose another')
    for name, model in {"original": original, **models}.items():
        if isinstance(model, nn.Module) and any(module.training for module in model.modules()):
            raise ValueError(f"{name} is in train mode, in which dropout is random: call eval() first")
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in ("original", *models)}
    kls: dict[str, list[Tensor]] = {name: [] for name in sums}
    lengths: list[int] = []
    for ids in windows:
        if ids.dim() != 1 or len(ids) < 2:
            raise ValueError(f"a window of shape {list(ids.shape)} predicts nothing: ids [n] with n >= 2 are needed")
        lengths.append(len(ids) - 1)
        expected = original(ids[None]).logits[0, :-1]
        sums["original"] += _sums(expected, expected, ids[1:], "original", kls["original"])
        for name, model in models.items():
            logits = model(ids[None]).logits[0, :-1]
            if logits.shape != expected.shape:
                raise ValueError(f"{name} has logits {list(logits.shape)}, the original {list(expected.shape)}")
            sums[name] += _sums(logits, expected, ids[1:], name, kls[name])
    if not lengths:
        raise ValueError("there are no windows to evaluate on")
    tokens = sum(lengths)
    means = {name: (total / tokens) for name, total in sums.items()}
    return {
        name: Metrics(tokens, nll.exp().item(), kl.item(), same.item(), torch.cat(kls[name]), tuple(lengths))
        for name, (nll, kl, same) in means.items()
    }


def _sums(logits: Tensor, expected: Tensor, targets: Tensor, name: str, kls: list[Tensor]) -> Tensor:
    """Sums over tokens, float64 [3]: -log p(target), KL(expected || logits), how often both have the same maximum.

    The KL of each token is appended to kls, float32, on the host.
    """
    found = torch.zeros(3, dtype=torch.float64)
    step = max(1, STEP // logits.shape[-1])
    for a in range(0, len(targets), step):
        b = a + step
        log_p, log_q = (t[a:b].double().log_softmax(-1) for t in (logits, expected))
        nll = -log_p.gather(1, targets[a:b, None]).sum()
        kl = torch.where(log_q.isneginf(), 0.0, log_q.exp() * (log_q - log_p)).sum(dim=-1)  # 0 log 0 is 0
        kls.append(kl.float().cpu())
        same = (logits[a:b].argmax(-1) == expected[a:b].argmax(-1)).sum()
        found += torch.stack([nll, kl.sum(), same]).cpu()
    if found.isnan().any():
        raise ValueError(f"the logits of {name} have NaN or +Inf: they say nothing about its accuracy")
    return found
