"""4-bit weights in vLLM's modules, unseen by vLLM: it would empty what modules hold before it loads weights again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.linear import NVFP4Linear


def hide(layer: nn.Module, made: NVFP4Experts | list[NVFP4Linear]) -> None:
    """Make `made` layer.nvfp4."""
    object.__setattr__(layer, "nvfp4", made)


def hidden(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) for all that is hidden in a model."""
    for name, module in model.named_modules():
        made = getattr(module, "nvfp4", [])
        for i, part in enumerate(made if isinstance(made, list) else [made]):
            for last, parameter in part.named_parameters():
                yield f"{name}.nvfp4.{i}.{last}", parameter


def refuse_saving(layer: nn.Module, name: str) -> None:
    """Have `state_dict` of `layer` raise NotImplementedError: what vLLM saves of the model (save_sharded_state,
    tensorizer) would lack what is hidden."""

    def refuse(*_: object) -> None:
        raise NotImplementedError(
            f"{name}: 4-bit weights are in the layout of their kernels, and are not saved from vLLM: serve the folder "
            "that moe-nvfp4 quantize SRC DST writes"
        )

    layer.register_state_dict_pre_hook(refuse)


def show_to_checks() -> None:
    """Have vLLM's checksums (0.32), by which a trainer knows whether new weights have come, and its reset count what is
    hidden. Without that, those before and after would be the same."""
    try:
        from vllm.model_executor.model_loader import weight_checksum
    except ImportError:
        return
    before: Any = weight_checksum._weights
    if hasattr(before, "whole"):
        return

    def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        yield from before(model)
        yield from hidden(model)

    _weights.whole = True  # type: ignore[attr-defined]
    weight_checksum._weights = _weights
