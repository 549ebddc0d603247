"""Global scales stay fp32: rounded to bf16 they change a layer's results by up to 0.4 %, and in fp16 they vanish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class FP32Scales(nn.Module):
    """A module whose parameters `*global_scale` and `*input_scale` move with the others, but are never cast."""

    def _fp32_parameters(self) -> list[nn.Parameter]:
        return [p for n, p in self._parameters.items() if p is not None and n.endswith(("global_scale", "input_scale"))]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Refuse a state dict that was cast: copying would silently convert its rounded numbers back."""
        scales, cast = {id(p) for p in self._fp32_parameters()}, []
        way_out = "load the state dict as it was saved"
        if prefix.endswith("base_layer."):
            way_out += (
                "; if it is PEFT's adapter of a dense model and brings that model's head, save it without "
                "(PeftModel.save_pretrained(..., save_embedding_layers=False))"
            )
        for name, p in self._parameters.items():
            if p is None or not (id(p) in scales or p.dtype == torch.uint8):
                continue
            found, expected = state_dict.get(prefix + name), torch.float32 if id(p) in scales else torch.uint8
            if found is not None and found.dtype != expected:
                cast.append(
                    f"{prefix}{name} is {found.dtype}, expected {expected}: codes and scales must not be cast; "
                    + way_out
                )
        if cast:
            args[-1].extend(cast)  # error_msgs
        else:
            super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales = {id(p) for p in self._fp32_parameters() if p.dtype == torch.float32}

        def spare(t: Tensor) -> Tensor:
            if id(t) not in scales:
                return fn(t)
            moved = fn(t.view(torch.int32))  # casts of floating parameters leave integers alone
            return moved.view(torch.float32) if moved.dtype == torch.int32 else t.to(moved.device)

        return super()._apply(spare, recurse)


def fp32_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The global scales of all 4-bit layers of `model`.

    FSDP2's mixed precision casts what it gathers, so leave them out of it:
    fully_shard(block, mp_policy=..., ignored_params=fp32_parameters(model)).
    """
    return {p for m in model.modules() if isinstance(m, FP32Scales) for p in m._fp32_parameters()}
