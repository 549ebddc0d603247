"""The recipe ``distill``: codes that are learned from the outputs of the dense layers, one layer after another.

A layer gets its inputs from the quantized layers in front of it, and is to give what the dense layer gives for dense
inputs. So its experts also make up for what the layers in front changed, as far as their inputs tell. They begin as
`quantize_experts` makes them, of these inputs. Then steps of Adam change their codes (quantize.learned), for the
squared error of the layer's outputs on a few tokens each. Errors count less where hidden states are large, as norms
divide by their size. An eighth of the tokens is not learned from: for these, a matrix that was learned must be better
than the one before, and so must the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_nvfp4.format import dequantize
from moe_nvfp4.integrations.huggingface.experts import users_hooks
from moe_nvfp4.integrations.huggingface.hessians import HELD_OUT, HessianSums, Made, as_nvfp4
from moe_nvfp4.integrations.huggingface.layerwise import LayerWalk, stand_in
from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout, dense_experts, own_gate
from moe_nvfp4.integrations.huggingface.statistics import watch
from moe_nvfp4.quantize.learned import LearnedMatrices
from moe_nvfp4.quantize.recipes import Quantized
from moe_nvfp4.routing import group_by_expert
from moe_nvfp4.weights import is_quantized

STEPS = 64  # of Adam, at least
TOKENS = 512  # in a step: as many steps as it takes to see each token once
RATE = 5e-3  # of weights, in units of their block's scale
TOGETHER = 1 << 28  # weights that are learned at once; each takes about 40 bytes, with its gradient and Adam's moments
TINY = torch.finfo(torch.float32).tiny
CHUNK = 8192  # tokens whose outputs are computed at once

Modules: TypeAlias = Mapping[str, tuple[nn.Module, ModuleLayout]]
Pair: TypeAlias = tuple[Tensor, Tensor]  # weights of n experts: [n, N13, H] and [n, H, I]


def check_learnable(module: nn.Module, layout: ModuleLayout) -> None:
    """NotImplementedError for experts from whose outputs nothing is learned."""
    if layout.call == "dense":
        raise NotImplementedError(
            f"recipe distill cannot learn from {type(module).__name__}, which gets a block of rows for each expert "
            "and not the experts of each token: use recipe gptq"
        )


class Experts:
    """The dense experts `module` with other weights: what they give for rows, with gradients for these weights.

    activations  with those of W4A4, rows are quantized before each product, as in the layer; gradients pass unchanged
    """

    def __init__(self, module: Any, layout: ModuleLayout, activations: str):
        check_learnable(module, layout)
        self.module, self.layout, self.activations = module, layout, activations
        self._biases: dict[str, Tensor] = {}  # by projection: [E, N]
        for part in (layout.up_name, "down_proj") if layout.bias is not None else ():
            rows = getattr(module, f"{part}_bias").detach()
            self._biases[part] = torch.stack([layout.canonical(f"{part}_bias", row) for row in rows])

    def __call__(self, first: int, values: Pair, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum fp32 [T, H] over experts from `first` on, of x [T, H], index [T, k] and weights [T, k]. On a
        CPU in fp32, which most CPUs multiply faster than bf16."""
        if len(x) > CHUNK:
            parts = zip(*(t.split(CHUNK) for t in (x, index, weights)), strict=True)
            return torch.cat([self(first, values, *part) for part in parts])
        x = x.float() if x.device.type == "cpu" else x
        n = len(values[0])
        groups = group_by_expert(torch.where((index >= first) & (index < first + n), index - first, n), n)
        counts = groups.offsets.diff().tolist()
        slots = groups.order[: sum(counts)].long()
        experts = index.flatten()[slots]
        w13, w2 = (w.to(x.dtype) for w in values)
        up = grouped_matmul(self._rounded(x)[slots // groups.top_k], w13, counts)
        up = self._with_bias(self.layout.up_name, experts, up)
        h = own_gate(self.module, type(self.module), self.layout, up)
        y = self._with_bias("down_proj", experts, grouped_matmul(self._rounded(h), w2, counts))
        # not index_add by token, which adds in any order on a GPU
        of_slots = torch.zeros(index.numel(), x.shape[1], device=x.device)
        of_slots = of_slots.index_copy(0, slots, y.float() * weights.float().flatten()[slots, None])
        return of_slots.view(*index.shape, x.shape[1]).sum(dim=1)

    def _with_bias(self, name: str, experts: Tensor, y: Tensor) -> Tensor:
        """y [n, N], a row each of `experts` [n], with their biases."""
        return y + self._biases[name].to(y.dtype)[experts] if name in self._biases else y

    def _rounded(self, rows: Tensor) -> Tensor:
        if not is_quantized(self.activations):
            return rows
        return rows + (as_nvfp4(rows.detach(), self.activations).to(rows.dtype) - rows.detach())

    def identity(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor | float:
        """What LongCat's experts that have no weights give for rows x [T, H]: [T, H]."""
        if self.layout.call != "identity":
            return 0.0
        none = index >= self.layout.num_experts
        return (x * weights.masked_fill(~none, 0).sum(dim=-1, keepdim=True)).to(x.dtype)


def grouped_matmul(x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
    """The first counts[0] rows of x [n, K] times w[0].T, the next counts[1] times w[1].T and so on: [n, N]."""
    if x.is_cuda and x.dtype == torch.bfloat16 and w.shape[1] % 8 == w.shape[2] % 8 == 0:  # as its loads need it
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return functional.grouped_mm(x, w.mT, offs=ends.to(x.device, non_blocking=True))
    return torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(counts), w.unbind(), strict=True)])


# ---------------------------------------------------------------- the experts of a layer
@dataclass
class Rows:
    """What the experts of a layer are given, and what they are to give; on the host.

    x       [T, H]
    index   int64 [T, k]: the experts of each token; E and more are none
    weights [T, k]: routing weights
    target  fp32 [T, H]
    weight  fp32 [T]: of a token's squared error
    held    bool [T]: not to be learned from
    """

    x: Tensor
    index: Tensor
    weights: Tensor
    target: Tensor
    weight: Tensor
    held: Tensor

    def given(self, which: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """x, index and weights of some tokens, on `device`."""
        return self.x[which].to(device), self.index[which].to(device), self.weights[which].to(device)


def learn(experts: Experts, start: Made, rows: Rows, device: torch.device | str) -> Made:
    """The parameters of `NVFP4Experts`, learned, where they are better than those of `start` for the rows held out."""
    start = {name: tensor.to(device) for name, tensor in start.items()}
    made = {name: tensor.clone() for name, tensor in start.items()}
    layout, groups = experts.layout, _groups(experts.layout)
    left = rows.target.clone()  # what experts outside of the group do not give
    for group in groups[1:]:
        _add(left, experts, group, _values(start, group, layout), rows, device, sign=-1)
    for k, group in enumerate(groups):
        before = _values(start, group, layout)
        if k > 0:
            _add(left, experts, group, before, rows, device, sign=1)
        learned = _learn_group(experts, group, start, rows, left, device)
        after = learned[0].values(), learned[1].values()
        chosen = _better(experts, group, (before, after), rows, left, device)
        for i, name in enumerate((layout.up_name, "down_proj")):
            for j in (j for j, choice in enumerate(chosen) if choice[i]):
                before[i][j] = after[i][j]
                _put(made, name, group[j], tuple(t[j] for t in learned[i].quantized()))
        if group is not groups[-1]:
            _add(left, experts, group, before, rows, device, sign=-1)
    return {name: tensor.cpu() for name, tensor in made.items()}


def _groups(layout: ModuleLayout) -> list[range]:
    """The experts, by groups that are learned at once."""
    step = max(1, TOGETHER // (layout.hidden_size * layout.intermediate_size * (3 if layout.gated else 2)))
    return [range(a, min(a + step, layout.num_experts)) for a in range(0, layout.num_experts, step)]


def _values(tensors: Made, group: range, layout: ModuleLayout) -> Pair:
    """The weights, fp32, of some experts."""
    w13, w2 = (dequantize(codes, sf, gs[:, None]) for codes, sf, gs in
               (_take(tensors, name, group) for name in (layout.up_name, "down_proj")))  # fmt: skip
    return w13[..., : layout.hidden_size], w2[..., : layout.intermediate_size]


def _take(tensors: Made, name: str, group: range) -> Quantized:
    part = slice(group.start, group.stop)
    scale = tensors[f"{name.replace('gate_up', 'gate')}_global_scale"]
    return tensors[name][part], tensors[f"{name}_sf"][part], scale[part]


def _put(tensors: Made, name: str, e: int, made: Sequence[Tensor]) -> None:
    tensors[name][e], tensors[f"{name}_sf"][e] = made[0], made[1].view(torch.uint8)
    for part in ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,):
        tensors[f"{part}_global_scale"][e] = made[2]


def _reached(rows: Rows, group: range) -> Tensor:
    """Which tokens are given to some of the experts: bool [T]."""
    return ((rows.index >= group.start) & (rows.index < group.stop)).any(dim=-1)


@torch.no_grad()
def _add(
    total: Tensor, experts: Experts, group: range, values: Pair, rows: Rows, device: torch.device | str, sign: int
) -> None:
    """Add `sign` times what some experts give to `total` [T, H]."""
    for which in _reached(rows, group).nonzero()[:, 0].split(CHUNK):
        total[which] += sign * experts(group.start, values, *rows.given(which, device)).cpu()


@torch.enable_grad()
def _learn_group(
    experts: Experts, group: range, start: Made, rows: Rows, target: Tensor, device: torch.device | str
) -> tuple[LearnedMatrices, LearnedMatrices]:
    """Learn some experts so that their sum comes near `target` [T, H]."""
    weights = zip(*(p for e, p in enumerate(dense_experts(experts.module, experts.layout)) if e in group), strict=True)
    up, down = (LearnedMatrices(torch.stack(w), _take(start, name, group)) for w, name in
                zip(weights, (experts.layout.up_name, "down_proj"), strict=True))  # fmt: skip
    tokens = (_reached(rows, group) & ~rows.held).nonzero()[:, 0]
    if not len(tokens):
        return up, down
    trained = [up.t.requires_grad_(), down.t.requires_grad_()]
    optimizer = torch.optim.Adam(trained, betas=(0.9, 0.95), fused=True)
    weight = rows.weight[:, None] / (rows.weight[tokens, None] * target[tokens].square()).mean().clamp(min=TINY)
    generator, order = torch.Generator().manual_seed(0), tokens[:0]
    steps = max(STEPS, len(tokens) // TOKENS)
    for k in range(steps):
        if len(order) < TOKENS:
            order = torch.cat([order, tokens[torch.randperm(len(tokens), generator=generator)]])
        which, order = order[:TOKENS], order[TOKENS:]
        y = experts(group.start, (up.values(), down.values()), *rows.given(which, device))
        loss = (weight[which].to(device) * (y - target[which].to(device)).square()).sum()
        for tensor, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            tensor.grad = gradient
        optimizer.param_groups[0]["lr"] = RATE * (1 - k / steps)
        optimizer.step()
    for tensor in trained:
        tensor.requires_grad_(False).grad = None
    return up, down


@torch.no_grad()
def _better(
    experts: Experts, group: range, values: tuple[Pair, Pair], rows: Rows, target: Tensor, device: torch.device | str
) -> Sequence[tuple[int, ...]]:
    """For each of some experts, which of its two weights to take from values[1], the learned ones, and not from
    values[0], to come nearer to `target` for the rows held out.

    Expert after expert, beside the other learned ones: what is not `_surely` better stays. If all together is not, all
    stays.
    """
    given, wanted = rows.given(rows.held, device), target[rows.held].to(device)
    weight = rows.weight[rows.held].to(device)
    before = wanted - experts(group.start, values[0], *given)
    left = wanted - experts(group.start, values[1], *given)
    chosen = []
    for j, e in enumerate(group):
        theirs = (given[1] == e).any(dim=-1)
        own = tuple(t[theirs] for t in given)
        outputs = {c: experts(e, (values[c[0]][0][j : j + 1], values[c[1]][1][j : j + 1]), *own)
                   for c in product((0, 1), repeat=2)}  # fmt: skip
        without = left[theirs] + outputs[1, 1]
        old, of = _squares(without - outputs[0, 0]), weight[theirs]
        gains = {c: of * (old - _squares(without - y)) for c, y in outputs.items()}
        better = [c for c, gain in gains.items() if _surely(gain)]
        chosen.append(max(better, key=lambda c: gains[c].sum().item()) if better else (0, 0))
        left[theirs] = without - outputs[chosen[-1]]
    return chosen if _surely(weight * (_squares(before) - _squares(left))) else [(0, 0)] * len(group)


def _squares(errors: Tensor) -> Tensor:
    return errors.square().sum(dim=-1)


def _surely(gains: Tensor) -> bool:
    """Whether the mean of `gains`, of a row each, is above zero by more than chance: two standard errors."""
    return bool(gains.sum() > 2 * gains.square().sum().sqrt())


# ---------------------------------------------------------------- the walk
class Distillation:
    """Quantizes the experts of a model layer by layer: `run` each of them in order.

    walk, quantized  walks through the dense layers and through the quantized ones
    """

    def __init__(self, walk: LayerWalk, activations: str, recipe: str):
        self.walk, self.activations, self.recipe = walk, activations, recipe
        self.quantized = LayerWalk(walk.model, walk.layers, walk.batches, walk.device)

    @property
    def states(self) -> Any:
        """What a run needs that goes on behind the layer that ran last."""
        return self.walk.states, self.quantized.states

    @states.setter
    def states(self, states: Any) -> None:
        self.walk.states, self.quantized.states = states

    @torch.inference_mode(False)
    def run(
        self, i: int, modules: Modules, done: Mapping[str, Made], beside: AbstractContextManager
    ) -> Iterable[tuple[str, Made]]:
        """Run layer i, and quantize those of `modules`, the experts in it, that are not in `done`, made earlier.
        beside: a context for the dense layer's run."""
        calls = {name: _Calls(*known, self.activations) for name, known in modules.items()}
        with _stand_in({name: call.dense for name, call in calls.items()}, modules), beside:
            self.walk.run(i)
        made, before = dict(done), self.quantized.states
        if left := {name: known for name, known in modules.items() if name not in done}:
            sums = HessianSums(self.activations)
            stand_ins = {name: calls[name].record if name in left else calls[name].of(done[name]) for name in modules}
            with _stand_in(stand_ins, modules), watch(left, sums):
                self.quantized.run(i)
            wanted = self._wanted() if len(modules) == 1 and self._adds(i, before, *calls.values()) else None
            weight = torch.cat([_hidden(dense).square().mean(dim=-1) for dense, _ in self.walk.states or ()])
            weight = weight.clamp(min=TINY).rsqrt()
            for name, known in left.items():
                made[name] = sums.quantize(name, *known, self.recipe, self.walk.device)
                if (reached := calls[name]).args:  # text does not reach experts of images
                    rows = reached.rows(wanted, weight)
                    made[name] = learn(reached.experts, made[name], rows, self.walk.device)
        self.quantized.states = before
        with _stand_in({name: calls[name].of(made[name]) for name in modules}, modules):
            self.quantized.run(i)
        return [(name, made[name]) for name in left]

    def _wanted(self) -> list[Tensor]:
        """By batch, what the quantized layer lacks without its experts: fp32 [B * T, H]."""
        pairs = zip(self.walk.states or (), self.quantized.states or (), strict=True)
        return [_hidden(dense) - _hidden(without) for (dense, _), (without, _) in pairs]

    def _adds(self, i: int, before: Any, calls: _Calls) -> bool:
        """Whether layer i adds the output of its experts, unchanged, to all else: after a run without it."""
        walk, module = self.quantized, calls.experts.module
        if users_hooks(module):
            return False
        without, walk.states = walk.states or [], before
        found: list[Tensor] = []
        # before hooks of a user's, which may change the output
        hook = module.register_forward_hook(lambda module, args, output: found.append(output), prepend=True)
        try:
            output, _ = walk.run_batch(i, 0)
        finally:
            hook.remove()
            walk.states = without
        added = _hidden(output) - _hidden(without[0][0])
        if len(found) != 1 or found[0].numel() != added.numel():
            return False
        given = found[0].cpu().float().view(added.shape)
        return bool((added - given).norm() <= 0.05 * given.norm())


def _hidden(output: Any) -> Tensor:
    """The hidden states of a layer's output, fp32 [B * T, H], on the host. Layers of GLM-5 return a tuple."""
    hidden = output if isinstance(output, Tensor) else output[0]
    return hidden.cpu().float().flatten(0, -2)


class _Calls:
    """The calls of an experts module by a layer that runs over all batches; on the host.

    outputs  of the dense experts, in the dense layer
    args     of the experts in the quantized layer: x, index, weights
    """

    def __init__(self, module: nn.Module, layout: ModuleLayout, activations: str):
        self.experts = Experts(module, layout, activations)
        self.outputs: list[Tensor] = []
        self.args: list[tuple[Tensor, Tensor, Tensor]] = []

    def dense(self, forward: Callable, *args: Tensor) -> Tensor:
        y: Tensor = forward(*args)
        self.outputs.append(y.cpu().float().flatten(0, -2))
        return y

    def record(self, forward: Callable, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.args.append((x.cpu().flatten(0, -2), index.cpu(), weights.cpu()))
        return torch.zeros_like(x)

    def of(self, made: Made) -> Callable:
        """The experts with these parameters."""
        layout = self.experts.layout

        def run(forward: Callable, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            here = {name: tensor.to(x.device) for name, tensor in made.items()}
            rows = x.flatten(0, -2)
            y = torch.zeros(rows.shape, dtype=torch.float32, device=x.device)
            for group in _groups(layout):
                y += self.experts(group.start, _values(here, group, layout), rows, index, weights)
            return (y.to(x.dtype) + self.experts.identity(rows, index, weights)).view(x.shape)

        return torch.no_grad()(run)

    def rows(self, wanted: list[Tensor] | None, weight: Tensor) -> Rows:
        """wanted: by batch, the sum that the experts are to give; None: what the dense ones gave. weight: as in `Rows`,
        for the tokens of the layer."""
        held, targets = [], []
        for args, target in zip(self.args, wanted or self.outputs, strict=True):
            targets.append(target - self.experts.identity(*args))
            held.append(torch.arange(len(target)) >= len(target) - len(target) // HELD_OUT)
        x, index, weights = (torch.cat(parts) for parts in zip(*self.args, strict=True))
        weight = weight if len(weight) == len(x) else torch.ones(len(x))  # a layer may give its experts other rows
        return Rows(x, index, weights, torch.cat(targets), weight, torch.cat(held))


def _stand_in(functions: Mapping[str, Callable], modules: Modules) -> AbstractContextManager:
    """Call functions in place of modules: (the module's forward, its arguments) -> its output."""
    pairs = [(modules[name][0], function) for name, function in functions.items()]
    return stand_in([(module, partial(_by_position, partial(run, module.forward))) for module, run in pairs])


def _by_position(run: Callable, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    y: Tensor = run(hidden_states, top_k_index, top_k_weights)
    return y
