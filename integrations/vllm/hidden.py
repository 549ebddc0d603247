"""4-bit weights in vLLM's modules, unseen by vLLM: it would empty what modules hold before it loads weights again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.linear import NVFP4Linear


def hide(layer: nn.Module, made: NVFP4Experts | list[NVFP4Linear]) -> None:
    """Make `made` layer.nvfp4."""
    object.__setattr__(layer, "nvfp4", made)


def hidden(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) for all that is hidden in a model: what `hide` was given, and the one adapter for all requests."""
    for name, module in model.named_modules():
        made = getattr(module, "nvfp4", [])
        for i, part in enumerate(made if isinstance(made, list) else [made]):
            for last, parameter in part.named_parameters():
                yield f"{name}.nvfp4.{i}.{last}", parameter
        for i, tensor in enumerate(tree_leaves(getattr(getattr(module, "quant_method", None), "adapters", ()))):
            yield f"{name}.nvfp4.adapter.{i}", tensor


def refuse_saving(layer: nn.Module, name: str) -> None:
    """Have `state_dict` of `layer` raise NotImplementedError: what vLLM saves of the model (save_sharded_state,
    tensorizer) would lack what is hidden."""

    def refuse(*_: object) -> None:
        raise NotImplementedError(
            f"{name}: 4-bit weights are in the layout of their kernels, and are not saved from vLLM: serve the folder "
            "that moe-nvfp4 quantize SRC DST writes"
        )

    layer.register_state_dict_pre_hook(refuse)


def show_what_is_hidden() -> None:
    """Have vLLM (0.32) count what is hidden: in checksums, by which a trainer knows whether new weights have come, in
    its reset, and in what sleep at level 2 keeps. Else the first would not change, and the last would be lost."""
    try:
        from vllm.model_executor.model_loader import weight_checksum
        from vllm.v1.worker.gpu_worker import Worker
    except ImportError:
        return
    seen: Any = weight_checksum._weights
    if hasattr(seen, "whole"):
        return
    kept: Any = getattr(Worker, "_get_sleep_parameters", None)

    def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        yield from seen(model)
        yield from hidden(model)

    def _get_sleep_parameters(self: Any, model: nn.Module) -> dict[str, Tensor]:
        draft = self.get_draft_model()
        of_draft = () if draft is None else hidden(draft)
        return kept(self, model) | dict(hidden(model)) | {f"draft.{name}": tensor for name, tensor in of_draft}

    _weights.whole = True  # type: ignore[attr-defined]
    weight_checksum._weights = _weights
    if kept is not None:
        Worker._get_sleep_parameters = _get_sleep_parameters
