"""Linears that read the same rows run as one: q, k and v of an attention, gate and up of an MLP.

Inside the forward of the module that has them, the first that is called computes for all, in one launch, and the others
take their columns of the result. With few tokens a launch costs more than the product, and this is one in place of
three.

Their weights are brought to follow one another in memory, so that nothing is there twice. Each linear remains one by
itself for everything that reads, moves, saves or edits its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_nvfp4 import ops
from moe_nvfp4.backends import Backend, named
from moe_nvfp4.devices import capturing, finish
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.prepared import changing, made_for, real_tensors
from moe_nvfp4.weights import FUSED_LINEARS, LinearWeights, in_one

IN_VAIN = 2  # forwards in a row in which not all took their columns, after which each linear computes for itself


def join(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[NVFP4Linear, ...]]:
    """Join all linears inside `model` that read the same rows, where their kernels for rows of `dtype` can compute them
    as one. Yields those that are joined."""
    for parent, found in siblings(model):
        if not (linears := joinable(found, lambda linear: linear.backend(dtype))):
            continue
        joined = linears[0].joined
        if joined is None or joined.linears != linears:
            joined = Joined(parent, linears)
        with changing:
            joined.bring_together()
        yield linears


def backend_of(linears: Sequence[NVFP4Linear], each: Callable[[NVFP4Linear], Backend]) -> Backend | None:
    """What computes `linears` as one: the backend of `each`, if all have the same and it can."""
    first, *others = map(each, linears)
    return first if all(other is first for other in others) and first.joins(parts_of(linears)) else None


def joinable(linears: tuple[NVFP4Linear, ...], each: Callable[[NVFP4Linear], Backend]) -> tuple[NVFP4Linear, ...]:
    """Those of `linears` that the backend of `each` computes as one: all, or the first three (the portable kernels take
    no more, and Inkling has four), or none."""
    return next((some for some in (linears, linears[:3]) if backend_of(some, each) is not None), ())


def siblings(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[NVFP4Linear, ...]]]:
    """(module, its linears that read the same rows and can be one matrix) for all modules inside `model`."""
    return (found for found in same_rows(model) if _alike(found[1]))


def same_rows(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[NVFP4Linear, ...]]]:
    """(module, its linears that read the same rows, two or more) for all modules inside `model`."""
    for parent in model.modules():
        for names in FUSED_LINEARS:
            found = [parent._modules.get(name) for name in names]
            linears = tuple(linear for linear in found if isinstance(linear, NVFP4Linear))
            if len(linears) > 1:
                yield parent, linears


def as_one(linears: Sequence[NVFP4Linear]) -> LinearWeights:
    """The weights of several linears as those of one, on meta."""

    def copied(tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[0]  # torch.cat of tensors on meta imports torch._dynamo, which takes seconds
        return torch.empty((sum(map(len, tensors)), *first.shape[1:]), dtype=first.dtype, device="meta")

    whole = LinearWeights.joined([linear.weights for linear in linears], copied)
    assert whole is not None, "they are alike"
    return whole


def parts_of(linears: Sequence[NVFP4Linear]) -> tuple[int, ...]:
    """As in `LinearWeights`."""
    return tuple(linear.out_features for linear in linears)


def _alike(linears: Sequence[NVFP4Linear]) -> bool:
    """Whether they differ in N and in the values of their weights only, and do nothing else to x."""
    first = linears[0]
    for linear in linears:
        if (linear.in_features, linear.activations) != (first.in_features, first.activations):
            return False
        if linear.input_scale is not None or linear.pre_quant_scale is not None:
            return False
        if linear._forward_hooks or linear._forward_pre_hooks:  # they may change x in place
            return False
        for name, p in linear._parameters.items():
            other = first._parameters[name]
            if p is None or other is None:
                if p is not other:
                    return False
            elif type(p) is not nn.Parameter or p.dtype != other.dtype:
                return False
    return True


class Joined:
    """Linears that are computed as one inside the forward of their parent, in the order of their columns.

    Only where there are no gradients: there, nothing depends on what the model does in place to some of the columns.
    What it does to x in place between two of them is seen by x's version. In inference mode and in compiled code there
    is none: a forward that does this there is not supported (none of transformers' models does).
    """

    def __init__(self, parent: nn.Module, linears: Sequence[NVFP4Linear]) -> None:
        self.linears = tuple(linears)
        self.open, self.in_vain = False, 0
        self.left: Any = None  # the tensor of the last call, its version, and the columns, None where they were taken
        self.whole: tuple[list[LinearWeights], LinearWeights] | None = None  # of the last call
        self.made: dict[str, int] = {}  # where the memory of all codes begins, and of all sf, by name
        self.before: list[list[Tensor]] = []  # scales and biases that were moved: captured graphs may read them
        for linear in linears:
            if linear.joined is not None:
                linear.joined.in_vain = IN_VAIN
            linear.joined = self
        parent.register_forward_pre_hook(_Hook(self, True))
        parent.register_forward_hook(_Hook(self, False), always_call=True)

    def __reduce__(self) -> tuple:
        return type(None), ()  # copies of linears are not joined

    def columns(self, linear: NVFP4Linear, x: Tensor, rows: Tensor) -> Tensor | None:
        """y [T, N] of one of the linears for x, whose rows are `rows` [T, K]; None if it is to compute for itself."""
        if not self.open or self.in_vain >= IN_VAIN or torch.is_grad_enabled() and x.requires_grad:
            return None
        tracing = torch.compiler.is_compiling()
        version = rows.dtype, None if tracing or x.is_inference() else x._version
        same = [other is linear for other in self.linears]
        if not any(same):  # a shallow copy, as nn.DataParallel makes
            return None
        left, i = self.left, same.index(True)
        if left is not None and left[0] is x and left[1] == version and left[2][i] is not None:
            columns = left[2]
        else:
            y = self._compute(rows, tracing)
            if y is None:
                return None
            columns, end = [], 0
            for N in parts_of(self.linears):
                columns.append(y[:, end : end + N])
                end += N
        self.left = x, version, [None if j == i else column for j, column in enumerate(columns)]
        return columns[i]

    def close(self) -> None:
        """The parent's forward is over."""
        left = self.left  # another thread may change it
        taken = left is None or all(column is None for column in left[2])
        self.open, self.left, self.in_vain = False, None, 0 if taken else self.in_vain + 1

    def _compute(self, rows: Tensor, tracing: bool) -> Tensor | None:
        """y [T, sum of N] of all; None if they cannot be one now."""
        linears, problem = self.linears, (rows.dtype, rows.device)
        trained = [linear.bias is not None and linear.bias.requires_grad for linear in linears]
        if torch.is_grad_enabled() and any(trained) or not _alike(linears):
            return None
        chosen = linears[0]._select(*problem)
        layouts = {linear.packed_for for linear in linears}
        if len(layouts) > 1 or not named(chosen.name).joins(parts_of(linears)):
            return None
        if tracing:
            return ops.run_linears(rows, [linear.weights for linear in linears], chosen)
        with changing:
            parts = self._parts(problem)
            if self.whole is None or any(a is not b for a, b in zip(self.whole[0], parts, strict=True)):
                with real_tensors():
                    whole = LinearWeights.joined(parts)
                    if whole is None and self.bring_together():
                        parts = self._parts(problem)
                        whole = LinearWeights.joined(parts)
                if whole is None:
                    return None
                self.whole = parts, whole
            whole = self.whole[1]
        return ops.run_linears(rows, parts, chosen, whole)

    def _parts(self, problem: tuple) -> list[LinearWeights]:
        return [linear._for_call(*problem)[1] for linear in self.linears]

    def bring_together(self) -> bool:
        """Make the linears' tensors of each kind follow one another in memory, if they do not. False if they are not in
        one layout, last for one call only, share their memory with others, were not all made in inference mode or all
        outside, or a CUDA graph is being captured, or was: some weights are where they were brought together, and
        others no longer."""
        linears, layout = self.linears, self.linears[0].packed_for
        alike = all(linear.packed_for == layout and linear.lasting for linear in linears)
        if capturing(linears[0].weight.device) or not alike:
            return False
        apart: dict[str, list[nn.Parameter]] = {}
        for name in ("weight", "weight_global_scale", "bias", *(("weight_sf",) if layout is None else ())):
            parameters = [p for linear in linears if (p := linear._parameters[name]) is not None]
            if parameters and in_one([p.data for p in parameters]) is None:
                apart[name] = parameters
                if len({p.is_inference() for p in parameters}) > 1:
                    return False
        free = layout is None and not any(linear._captured for linear in linears)
        for name in ("weight", "weight_sf"):
            for p in apart.get(name, ()):
                if _shared(p) and not (free and p.untyped_storage().data_ptr() == self.made.get(name)):
                    return False
        for linear in linears if apart else ():
            linear.warn_of_graphs()
            linear._changed()
        for name, moved in apart.items():
            tensors = [p.data for p in moved]
            with made_for(moved[0]):
                # With `out`, autocast looks away: to bf16 it would refuse fp16
                together = torch.cat(tensors, out=tensors[0].new_empty(0))
                if name in ("weight", "weight_sf"):
                    self.made[name] = together.data_ptr()
                else:
                    self.before.append(tensors)
                for p, part in zip(moved, together.split([len(t) for t in tensors]), strict=True):
                    p.data = part
                finish(together.device)  # before another stream reads this, or is given the memory of `tensors`
        if apart and layout is not None:
            named(layout).settle(linears[0].weight.device)
        return True

    def separate(self, linear: NVFP4Linear) -> None:
        """Give one of the linears, which has left the layout, memory of its own again."""
        for name in ("weight_global_scale", "bias"):
            p = linear._parameters[name]
            if p is not None and _shared(p):
                with made_for(p):
                    together, p.data = p.data, p.data.clone()
                    finish(together.device)  # as in `bring_together`


def _shared(t: Tensor) -> bool:
    """Whether other tensors are in the memory of t, too."""
    return t.untyped_storage().nbytes() > t.nbytes


class _Hook:
    """Before and after the forward of the linears' parent."""

    def __init__(self, joined: Joined | None, before: bool) -> None:
        self.joined, self.before = joined, before

    def __call__(self, *_: Any) -> None:
        if self.joined is None:  # of a copy
            return
        if self.before:
            self.joined.open, self.joined.left = True, None  # an interrupt may have ended the last forward
        else:
            self.joined.close()

    def __reduce__(self) -> tuple:
        return _Hook, (None, self.before)
