"""How torch.library ops are made: each parses its arguments, checks them and finds the backend in one place.

Ops are opaque to torch.compile. They take tensors instead of dataclasses; everything else an op must know, such as the
backend that runs it, is in the string `spec`. A tensor that a caller may differentiate is an argument of its own, not
an item of a list, so that autograd sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from moe_nvfp4.backends import named_on
from moe_nvfp4.weights import ExpertWeights, read_spec

NAMESPACE = __package__  # moe_nvfp4; as a kernel of the Hub, a name that no other version has
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_TWICE = (
    "second derivatives of 4-bit experts and linears are not implemented: call backward without create_graph, or "
    "differentiate the dense model"
)


def define(schema: str, real: Callable, fake: Callable, tags: tuple = ()) -> Any:
    """torch.ops.moe_nvfp4.NAME of `schema`, "NAME(...) -> ...", without a gradient so far."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")  # custom_op would cost 9 us more a call
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def layer_op(arguments: str, returns: str, fake: Callable, check: Callable, tags: tuple = ()) -> Callable[..., Any]:
    """The decorator of an op's kernel run(backend, weights, *arguments); fake and check take (weights, *arguments)."""

    def opened(args: tuple) -> tuple[str, ExpertWeights, list]:
        *arguments, tensors, spec = args
        read = read_spec(spec)
        w = ExpertWeights.from_tensors(tensors, read)
        check(w, *arguments)
        return read.backend, w, arguments

    def decorate(run: Callable) -> Any:
        def real(*args: Any) -> Any:
            name, w, arguments = opened(args)
            return run(named_on(name, w.w13.codes.device), w, *arguments)

        def traced(*args: Any) -> Any:
            _, w, arguments = opened(args)
            return fake(w, *arguments)

        schema = f"{run.__name__}({arguments}, Tensor?[] weights, str spec) -> {returns}"
        return define(schema, real, traced, tags)

    return decorate


def differentiate(op: Any, remember: Callable, backward: Callable) -> None:
    """Give `op` a gradient. Autocast that is on during backward() would round sums inside it."""

    def without_autocast(ctx: Any, *grads: Any) -> Any:
        with torch._C._DisableAutocast():
            return backward(ctx, *grads)

    torch.library.register_autograd(op._schema.name, without_autocast, setup_context=remember, lib=_LIBRARY)


# In place of a formula for second derivatives there is an op that raises: compiled code then works where nobody asks.
no_gradient = define(
    "no_gradient(Tensor grad, Tensor like, str why) -> Tensor", lambda grad, like, why: _raise(why),
    lambda grad, like, why: torch.empty_like(like),
)  # fmt: skip


def _raise(why: str) -> None:
    raise NotImplementedError(why)


def refuse_gradient(op: Any) -> None:
    """Make `op` a part of autograd's graph that raises, so that its inputs never silently get a gradient of zero."""

    def remember(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.inputs = inputs

    def refuse(ctx: Any, *grads: Any) -> Any:
        # an op that returns a list gets its gradients as a list
        grad = next(g for g in tree_leaves(grads) if g is not None)
        return tree_map(lambda needed, t: no_gradient(grad, t, _TWICE) if needed else None, ctx.needs_input_grad,
                        ctx.inputs)  # fmt: skip

    differentiate(op, remember, refuse)


def no_gradients(ctx: Any, i: int) -> Any:
    """The missing gradient of input i of an op: None, or for what torch sees as a list of tensors, a list of None."""
    return tree_map(lambda _: None, ctx.needs_input_grad[i])


def present(*tensors: Tensor | None) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def spread(found: list[Tensor], *like: Any) -> list[Tensor | None]:
    """`found` in the places of `like` that are not None (and not False)."""
    left = iter(found)
    return [next(left) if t is not None and t is not False else None for t in like]


def like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def saved(ctx, n: int) -> list:
    """The first n saved tensors, and the list of the others."""
    saved = ctx.saved_tensors  # checkpointing allows one look
    return [*saved[:n], list(saved[n:])]
