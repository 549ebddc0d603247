"""`torch.topk` of a router's scores in one launch: in compiled code, in CUDA graphs, and for many tokens; and, in
compiled code, its linear for few tokens.

For one token torch's three kernels take 14 us, which is a fifth of a 4-bit model's decoding step (docs/performance.md):
two for the top-k, and one for the linear, whose some hundred rows leave most of a GPU idle. With few tokens, operators
that are called one by one wait for the host, and torch's are called sooner. The linear adds in another order than
torch's, and a CUDA graph is to give what the same calls give without it: so it is for compiled code only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from moe_nvfp4.backends import has_router, router_linear, top_k
from moe_nvfp4.devices import capturing
from moe_nvfp4.door import define, refuse_gradient

MOST_SCORES, MOST_TAKEN = 1024, 32  # of a row: a warp has them in registers
MANY_TOKENS = 256
FEW_TOKENS, FEW_PRODUCTS = 8, 1 << 23  # of a linear: with more, torch's is faster (docs/performance.md)
MOST_WEIGHTS = 1 << 21  # of a linear: routers have fewer; larger ones were not compared
MOST_COLUMNS = 1 << 14  # a block has a row of weights in registers
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _shapes(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = scores.new_empty(*scores.shape[:-1], k)
    return values, torch.empty_like(values, dtype=torch.int64)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compiled code may be for any number of tokens, so it is decided here which kernel runs. With many, ours runs once
    for one of them: a capture that comes later must find it loaded."""
    rows = input.flatten(0, -2)
    few = len(rows) <= FEW_TOKENS and len(rows) * weight.numel() <= FEW_PRODUCTS
    kernel = input.device, input.dtype, input.shape[-1], bias is None
    if few or kernel not in _loaded and not capturing(input.device):
        y = router_linear(rows if few else rows[:1], weight, bias)
        _loaded.add(kernel)
    return y.view(*input.shape[:-1], len(weight)) if few else functional.linear(input, weight, bias)


_loaded: set[tuple] = set()


op = define("top_k(Tensor scores, int k) -> (Tensor, Tensor)", top_k, _shapes)
linear_op = define(
    "router_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", _linear,
    lambda input, weight, bias=None: input.new_empty(*input.shape[:-1], weight.shape[0]),
)  # fmt: skip
refuse_gradient(op)
refuse_gradient(linear_op)


class OneLaunch(TorchFunctionMode):
    """Inside, `torch.topk` of short rows on a GPU is `op`, and a linear of few products, if compiled, `linear_op`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if (func is torch.topk or func is Tensor.topk) and args and _takes(*args, **kwargs):
            return torch.return_types.topk(op(args[0], args[1] if len(args) > 1 else kwargs["k"]))
        if func is functional.linear and torch.compiler.is_compiling() and _takes_linear(*args, **kwargs):
            return linear_op(*args, **kwargs)
        return func(*args, **kwargs)


def _takes(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, out: Any = None) -> bool:
    """Whether `op` does what torch.topk would with these arguments."""
    if type(x) is not Tensor or x.dtype not in _DTYPES or torch.is_grad_enabled() and x.requires_grad:
        return False
    if x.dim() == 0 or dim not in (-1, x.dim() - 1) or not largest or out is not None:
        return False
    return 0 < k <= min(x.shape[-1], MOST_TAKEN) and x.shape[-1] <= MOST_SCORES and has_router(x.device)


def _takes_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `linear_op` does what torch's linear would with these arguments."""
    given = (input, weight) if bias is None else (input, weight, bias)
    if any(type(t) not in (Tensor, nn.Parameter) for t in given) or torch.is_autocast_enabled("cuda"):
        return False
    if any((t.dtype, t.device) != (input.dtype, input.device) for t in given) or input.dtype not in _DTYPES:
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    if input.dim() < 2 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        return False
    if weight.numel() > MOST_WEIGHTS or weight.shape[1] > MOST_COLUMNS:
        return False
    return (bias is None or bias.shape == weight.shape[:1]) and has_router(input.device)


class Routed:
    """The hooks of a module with a router, inside whose forward `OneLaunch` is on where that is faster."""

    def __init__(self, module: nn.Module):
        self.mode = OneLaunch()
        self.device: torch.device | None = None  # where the kernel has run: it must be there before a capture
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, always_call=True)

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            x = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
            if x is None or not x.is_cuda:
                return
            few = x.shape[:-1].numel() < MANY_TOKENS
            if few and x.device == self.device and not capturing(x.device):
                return
            self.device = x.device
        self.mode.__enter__()

    def after(self, *_: Any) -> None:
        if _get_current_function_mode() is self.mode:  # of this thread
            self.mode.__exit__(None, None, None)


def in_one_launch(module: nn.Module) -> None:
    """Have a module that has a router take one launch where that is faster. Called again, it does nothing."""
    hooks = module._forward_pre_hooks.values()
    if not any(isinstance(getattr(hook, "__self__", None), Routed) for hook in hooks):
        Routed(module)
