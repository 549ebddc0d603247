"""`torch.topk` of a router's scores in one launch: in compiled code, in CUDA graphs, and for many tokens.

torch takes two kernels, which are a tenth of a 4-bit model's decoding step (docs/performance.md). With few tokens,
operators that are called one by one wait for the host, and torch's is called sooner.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from moe_nvfp4.backends import has_top_k, top_k
from moe_nvfp4.devices import capturing
from moe_nvfp4.door import define, refuse_gradient

MOST_SCORES, MOST_TAKEN = 1024, 32  # of a row: a warp has them in registers
MANY_TOKENS = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _shapes(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = scores.new_empty(*scores.shape[:-1], k)
    return values, torch.empty_like(values, dtype=torch.int64)


op = define("top_k(Tensor scores, int k) -> (Tensor, Tensor)", top_k, _shapes)
refuse_gradient(op)


class OneLaunch(TorchFunctionMode):
    """Inside, `torch.topk` of short rows on a GPU is `op`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if (func is torch.topk or func is Tensor.topk) and args and _takes(*args, **kwargs):
            return torch.return_types.topk(op(args[0], args[1] if len(args) > 1 else kwargs["k"]))
        return func(*args, **kwargs)


def _takes(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, out: Any = None) -> bool:
    """Whether `op` does what torch.topk would with these arguments."""
    if type(x) is not Tensor or x.dtype not in _DTYPES or torch.is_grad_enabled() and x.requires_grad:
        return False
    if x.dim() == 0 or dim not in (-1, x.dim() - 1) or not largest or out is not None:
        return False
    return 0 < k <= min(x.shape[-1], MOST_TAKEN) and x.shape[-1] <= MOST_SCORES and has_top_k(x.device)


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
