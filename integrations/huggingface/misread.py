"""Is a server's model the one of its NVFP4 folder, or what it would be if the folder's numbers were misread?

The server's log-probabilities (`moe_nvfp4.integrations.endpoint`) are compared with those of the same model here, in
fp32: once as the folder says, and once for each known way to misread NVFP4 experts. What bf16 may change is measured:
it is what the model here changes between bf16 and fp32. A misreading is computed until it is ruled out, mostly by the
first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from moe_nvfp4.format import pack, unpack
from moe_nvfp4.integrations.endpoint import Asked
from moe_nvfp4.integrations.huggingface.experts import PACKED, HFExperts
from moe_nvfp4.integrations.huggingface.layerwise import reads_ids
from moe_nvfp4.integrations.huggingface.swap import set_activations
from moe_nvfp4.joined import same_rows
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.prepared import Prepared
from moe_nvfp4.quantize.layouts.base import interleave_rows, split_rows
from moe_nvfp4.weights import is_quantized

TOGETHER = 256  # tokens in a batch: after each, a misreading may be ruled out
NOISE = 3.0  # a right server is at most so many times as far from fp32 as bf16 here
FLOOR = 1e-3  # nats: less is no difference
CLEARLY = 0.75  # a misreading is named if it is at most so many times as far from the server as the folder is
ALIKE = 0.25  # the cosine between errors from which they are of one kind
MOST = 0.1  # the share of log-probabilities that may be missing
LEAST = -9999.0  # what vLLM writes in place of -Inf

Changes = Callable[[HFExperts], dict[str, Tensor]]
Misreading = Mapping[Prepared, Callable[[Any], dict[str, Tensor]]]  # layer -> its parameters that are read as others


# ---- the misreadings -----------------------------------------------------------------------------


def _global_scales(new: Callable[[Tensor], Tensor]) -> Changes:
    return lambda layer: {
        f"{part}_global_scale": new(layer.get_parameter(f"{part}_global_scale").data) for part in layer.projections
    }


def _gates_for_up(layer: HFExperts) -> dict[str, Tensor]:
    gate = layer.gate.gated
    return {"up_proj_global_scale": layer.get_parameter("gate_proj_global_scale").data} if gate else {}


def _rows(order: Callable[[Tensor], Tensor]) -> Changes:
    """Codes and block scales of [gate; up] in another order of rows; biases and global scales stay."""

    def changes(layer: HFExperts) -> dict[str, Tensor]:
        names = (layer.up_name, f"{layer.up_name}_sf") if layer.gate.gated else ()
        return {name: order(layer.get_parameter(name).data) for name in names}

    return changes


def _nibbles(layer: HFExperts) -> dict[str, Tensor]:
    return {
        name: pack(unpack(layer.get_parameter(name).data).unflatten(-1, (-1, 2)).flip(-1).flatten(-2))
        for name in (layer.up_name, "down_proj")
    }


def _scale(scale: Tensor, linear: NVFP4Linear) -> dict[str, Tensor]:
    return {"weight_global_scale": scale}


def _one_for_all(pick: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], Misreading]:
    """One of the global scales of linears that servers fuse, such as q, k and v, is used for each of them."""

    def of(model: nn.Module) -> Misreading:
        found: dict[Prepared, Callable[[Any], dict[str, Tensor]]] = {}
        for _, linears in same_rows(model):
            scales = [linear.get_parameter("weight_global_scale").data for linear in linears]
            found |= dict.fromkeys(linears, partial(_scale, pick(torch.cat(scales)).reshape(1)))
        return found

    return of


OF_EXPERTS: dict[str, Changes] = {
    "gate's global scale is used for up": _gates_for_up,
    "global scales are ignored": _global_scales(torch.ones_like),
    "global scales are taken for their reciprocals": _global_scales(lambda scales: 1 / scales),
    "rows of gate and up, concatenated, are read as interleaved": _rows(
        lambda t: torch.cat(split_rows(t, 2, interleaved=True, dim=1), dim=1)
    ),
    "rows of gate and up, interleaved, are read as concatenated": _rows(lambda t: interleave_rows(t, 2, dim=1)),
    "gate and up are exchanged": _rows(lambda t: torch.cat(t.chunk(2, dim=1)[::-1], dim=1)),
    "the two codes of a byte are exchanged": _nibbles,
}
OF_LINEARS = {
    "the largest global scale of fused linears is used for all": _one_for_all(torch.amax),
    "the smallest global scale of fused linears is used for all": _one_for_all(torch.amin),
}
PRECISIONS = {
    "bf16": "activations stay bf16 (W4A16), not NVFP4 as asked",
    "nvfp4": "activations are quantized to NVFP4 (W4A4), not bf16 as asked",
}
ROUNDINGS = {
    "nvfp4": "activations are rounded to NVFP4 as usual, not by four over six as asked",
    "nvfp4_four_over_six": "activations are rounded to NVFP4 by four over six, which was not asked",
}


def misreadings(model: nn.Module) -> dict[str, Misreading]:
    """All that are known, for the layers of `model`; none of linears where it has none that servers fuse."""
    experts = [module for module in model.modules() if isinstance(module, HFExperts)]
    of_experts: dict[str, Misreading] = {name: dict.fromkeys(experts, changes) for name, changes in OF_EXPERTS.items()}
    return of_experts | {name: found for name, of in OF_LINEARS.items() if (found := of(model))}


@contextmanager
def misread(misreading: Misreading) -> Iterator[None]:
    """While this lasts, each layer runs with these parameters in place of its own: changed before each call and changed
    back after it, so that no two copies of all experts are in memory."""
    kept: dict[nn.Module, dict[str, Tensor]] = {}

    def before(layer: Prepared, args: Any) -> None:
        layer.unpack()
        new = misreading[layer](layer)
        kept[layer] = {name: layer.get_parameter(name).data for name in new}
        for name, tensor in new.items():
            layer.get_parameter(name).data = tensor.contiguous()

    def after(layer: Prepared, args: Any, y: Any) -> None:
        layer.unpack()
        for name, tensor in kept.pop(layer).items():
            layer.get_parameter(name).data = tensor

    handles = [hook for layer in misreading for hook in (
        layer.register_forward_pre_hook(before), layer.register_forward_hook(after))]  # fmt: skip
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_effect(misreading: Misreading) -> bool:
    """Whether the numbers of every layer stay as they are."""

    def same(layer: Prepared) -> bool:
        layer.unpack()
        new = misreading[layer](layer)
        return all(torch.equal(layer.get_parameter(name).data, tensor) for name, tensor in new.items())

    return all(map(same, misreading))


# ---- the verdict ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What was found about a server. Differences are means of |difference| of log-probabilities, in nats.

    right           whether the server computes what the folder says
    numbers         how many log-probabilities were compared
    missing         how many more the server gave as NaN, or not at all
    noise           between the model here in bf16 and in fp32
    difference      between the server and the model here in fp32
    misreadings     name -> between the server and the model here if it is misread in this way; where few of the numbers
                    rule it out, over these
    without_effect  names of misreadings that leave this folder's numbers as they are
    fits            the misreading that fits best, where the server is wrong; None: none does
    undecided       where the server is right: names of misreadings that fit about as well
    """

    right: bool
    numbers: int
    missing: int
    noise: float
    difference: float
    misreadings: Mapping[str, float] = field(default_factory=dict)
    without_effect: Sequence[str] = ()
    fits: str | None = None
    undecided: Sequence[str] = ()

    @property
    def limit(self) -> float:
        """The largest difference of a right server."""
        return max(NOISE * self.noise, FLOOR)


@torch.no_grad()
def judge(
    model: Any,
    asked: Sequence[Asked],
    progress: Callable[[Iterable], Iterable] = iter,
    exact_model: Callable[[], Any] | None = None,
) -> Verdict:
    """Compare what a server gave with `model`, which is in bf16 and is in fp32 afterwards. exact_model: loads it in
    fp32, if its files have other numbers than bf16's.

    The server is right if its difference is within `Verdict.limit` and no misreading fits clearly better than the
    folder (`CLEARLY`). Activations in NVFP4 round differently after the least change before them, so two such models
    are as far from each other as from one with bf16 activations. But their errors have a part in common, by which they
    are recognised (`ALIKE`). progress: wraps the models that are computed.
    """
    given = torch.cat([a.logprobs.flatten() for a in asked])
    known = given > LEAST
    mine = _activations(model)
    other = "bf16" if is_quantized(mine) else "nvfp4"
    roundings = [name for name in ROUNDINGS if name != mine] if is_quantized(mine) else []
    known_ways = misreadings(model)
    nothing = [name for name, misreading in known_ways.items() if _without_effect(misreading)]
    effective = [name for name in known_ways if name not in nothing]
    of_activations = [PRECISIONS[other], *(ROUNDINGS[name] for name in roundings)]
    passes = iter(progress(["bf16", f"bf16, {other}", "fp32", *of_activations, *effective]))
    next(passes)
    rounded = log_probabilities(model, asked)
    next(passes)
    rounded_other = log_probabilities(set_activations(model, other), asked)
    set_activations(model, mine)
    if exact_model is None:
        model.to(torch.float32)  # transformers refuses .float() of 4-bit models
    else:
        model = exact_model()
        known_ways = misreadings(model)
    next(passes)
    exact = log_probabilities(model, asked)
    difference, noise = _apart(given, [exact], known), _apart(rounded, [exact], known)
    changed: list[Tensor] = []

    def with_other() -> Iterator[Tensor]:
        """The model's numbers with the other activations, from bf16 and fp32."""
        at = 0
        for numbers in _by_batch(set_activations(model, other), asked):
            changed.append((numbers + rounded_other[at : at + len(numbers)]) / 2)
            at += len(numbers)
            yield changed[-1]

    limit = difference / CLEARLY  # from which one is ruled out
    next(passes)
    whole = difference > NOISE * noise  # then the errors themselves are compared too
    found = {PRECISIONS[other]: _apart(given, with_other(), known, torch.inf if whole else limit)}
    for name in roundings:
        found[next(passes)] = _apart(given, _by_batch(set_activations(model, name), asked), known, limit)
    set_activations(model, mine)
    for name in passes:
        with misread(known_ways[name]):
            found[name] = _apart(given, _by_batch(model, asked), known, limit)
    fits = None
    within = dict.fromkeys(found, torch.inf)  # from how near a misreading is named, if it fits clearly better
    within |= dict.fromkeys(ROUNDINGS.values(), max(noise / 2, FLOOR))  # in bf16, each is about as near as the folder
    if other == "bf16":  # which is nearer than the folder to any other rounding of NVFP4, too
        own = 2 * _apart(rounded_other, changed, known) if found[PRECISIONS[other]] <= limit else 0.0
        within[PRECISIONS[other]] = max(NOISE * own, difference / 2, FLOOR)
    fitting = [name for name, apart in found.items() if apart < CLEARLY * difference]
    if difference > FLOOR:
        if named := [name for name in fitting if found[name] <= within[name]]:
            fits = min(named, key=lambda name: found[name])
        elif not fitting and whole and other == "nvfp4":
            errors = given - exact, torch.cat(changed) - exact
            fits = PRECISIONS[other] if _alike(*(e[known] for e in errors)) else None
    missing = int((~known).sum())
    verdict = Verdict(False, len(known) - missing, missing, noise, difference, found, nothing, fits)
    if missing > MOST * len(known) or fits is not None or difference > verdict.limit:
        return verdict
    if is_quantized(mine) and PRECISIONS[other] not in fitting:
        found = {name: apart for name, apart in found.items() if name != PRECISIONS[other]}  # would fit much better
    return replace(verdict, right=True, undecided=[name for name, apart in found.items() if apart <= limit])


def _apart(given: Tensor, batches: Iterable[Tensor], known: Tensor, limit: float = torch.inf) -> float:
    """The mean |difference| between the `known` of `given`, float64 [n], and the n of `batches`. Once that of all is
    sure to exceed `limit`, the rest is not computed: it is that of the batches before, which exceeds `limit` too."""
    errors, most, at = given.new_empty(0), limit * int(known.sum()), 0
    for numbers in batches:
        part = slice(at, at := at + len(numbers))
        new = (given[part] - numbers)[known[part]].abs().nan_to_num(nan=torch.inf)
        errors = torch.cat([errors, new])
        if errors.sum().item() > most:
            break
    return errors.mean().item() if len(errors) else torch.inf


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether errors a and b are of one size, and have a part in common."""
    size = b.abs().mean().item()
    a, b = (t.clamp(-4 * size, 4 * size) for t in (a, b))  # else a few outliers decide
    common = (a * b).sum() / (a.norm() * b.norm()).clamp(min=torch.finfo(a.dtype).tiny)
    return size / 2 < a.abs().mean().item() < 2 * size and common.item() > ALIKE


def _activations(model: nn.Module) -> str:
    return next(m.activations for m in model.modules() if isinstance(m, PACKED))


def log_probabilities(model: Any, asked: Sequence[Asked]) -> Tensor:
    """float64 [all numbers of `asked`]: those of `model`."""
    return torch.cat([*_by_batch(model, asked)])


def _by_batch(model: Any, asked: Sequence[Asked]) -> Iterator[Tensor]:
    for length, group in groupby(asked, key=lambda a: len(a.ids)):
        same = list(group)
        for some in (same[i : i + max(1, TOGETHER // length)] for i in range(0, len(same), max(1, TOGETHER // length))):
            ids, found = torch.stack([a.ids for a in some]).to(model.device), []
            for a, logits in zip(some, reads_ids(model)(input_ids=ids, use_cache=False).logits, strict=True):
                rows, tokens = logits[a.rows.to(logits.device)].double().cpu(), a.tokens
                if a.among:
                    found.append(rows.gather(1, tokens).log_softmax(-1).flatten())
                else:
                    found.append((rows.gather(1, tokens) - rows.logsumexp(-1, keepdim=True)).flatten())
            yield torch.cat(found)
