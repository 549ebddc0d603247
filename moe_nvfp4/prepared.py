"""Modules that keep weights in the layout of their kernels, and give everybody else the checkpoint's bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from moe_nvfp4.backends import Selected, named, selected
from moe_nvfp4.devices import capturing
from moe_nvfp4.scales import FP32Scales

_changing = threading.RLock()  # held while weights change their layout, or are taken out of their module


@dataclass
class Packed:
    """backend   the name of the backend whose layout it is
    matrices  name -> (the note that `Backend.restore` needs, dimensions of the codes without the last)
    first     the first of these names
    """

    backend: str
    matrices: dict[str, tuple[Any, tuple[int, ...]]]
    first: str


class Prepared(FP32Scales):
    """A module whose matrices are parameters `name`, codes uint8 [(E,) N, K/2], and `name_sf`, block scales.

    In a backend's layout the codes have four dimensions and contain the block scales, and `name_sf` is empty.
    `state_dict`, and everything that moves or loads parameters, still sees the checkpoint's bytes.
    """

    _packed: Packed | None = None
    _problem: Callable[..., Any]  # what `selected` takes
    _prepare_for: Callable[[Selected], None]
    weights: Any

    def _for_call(self, *problem: Any) -> tuple[Selected, Any]:
        """The backend for a call (arguments: those of `_problem`), and `weights` in its layout. These stay as they are
        even if other threads change the module's weights meanwhile (another dtype, `state_dict`, `to`)."""
        if torch.compiler.is_compiling():
            return selected(*self._problem(*problem)), self.weights
        with _changing:
            chosen = selected(*self._problem(*problem))
            self._prepare_for(chosen)
            return chosen, self.weights.held()

    @property
    def packed(self) -> bool:
        """Whether the weights are in a backend's layout."""
        return self._packed is not None and self._here(self._packed.first).dim() == 4

    def unpack(self) -> None:
        """Bring the weights back into the checkpoint's bytes."""
        if self._packed is not None and self.packed:
            _refuse_captured(self._here(self._packed.first))
            backend = named(self._packed.backend)
            for name, (note, rows) in self._packed.matrices.items():
                codes, sf = self._here(name), self._here(f"{name}_sf")
                prepared = codes.data.transpose(0, 1) if len(rows) == 1 else codes.data
                codes.data, sf.data = (t.view(*rows, -1) for t in backend.restore(prepared, note))
            self._packed = None

    def _pack(self, chosen: Selected, **matrices: bool) -> bool:
        """Bring these matrices into the layout of the backend `chosen`; name=whether its rows are [gate; up].
        Returns whether it did: not if they are in that layout already, or if there is none.

        Parameters that last for one call only are left alone: hooks bring them and take them away, and where
        transformers splits them over ranks, plain tensors stand in for DTensors during a call.
        """
        if self._packed is not None and self.packed:
            if self._packed.backend == chosen.layout:
                return False
            self.unpack()
        lasting = all(isinstance(self._parameters[name], nn.Parameter) for name in matrices) and not self._offloaded
        if chosen.layout is None or not lasting:
            return False
        _refuse_captured(self._here(next(iter(matrices))))
        backend, notes = named(chosen.name), {}
        for name, interleaved in matrices.items():
            codes, sf = self._here(name), self._here(f"{name}_sf")
            rows, one = tuple(codes.shape[:-1]), codes.dim() == 2
            stacks = (codes.data[None], sf.data[None]) if one else (codes.data, sf.data)
            prepared, note = backend.prepare(*stacks, interleaved)
            codes.data = prepared.transpose(0, 1) if one else prepared  # FSDP splits the first dimension
            sf.data = sf.data.new_empty(0)
            notes[name] = note, rows
        self._packed = Packed(chosen.layout, notes, next(iter(matrices)))
        return True

    @property
    def _offloaded(self) -> bool:
        """Whether a hook of accelerate brings the parameters for each call; other hooks only move the rows."""
        hook = getattr(self, "_hf_hook", None)
        hooks = getattr(hook, "hooks", (hook,))  # a SequentialHook holds several
        return hook is not None and any(getattr(h, "offload", True) for h in hooks)

    def _here(self, name: str) -> Tensor:
        """A parameter, or this rank's part of one that is split over ranks (a DTensor), in whatever layout it has."""
        parameter: Any = self._parameters[name]
        return getattr(parameter, "_local_tensor", parameter)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with _changing:
            self.unpack()  # to another device, say
            return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *args: Any) -> None:
        with _changing:
            self.unpack()
            super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        with _changing:
            self.unpack()
            super()._load_from_state_dict(*args)


def _refuse_captured(weight: Tensor) -> None:
    """RuntimeError inside a CUDA graph's capture: nothing is computed there, and the layout before is given up."""
    if capturing(weight.device):
        raise RuntimeError(
            "4-bit weights would change their layout in this call, which a CUDA graph cannot repeat: call the module "
            "once with inputs of this dtype, or its prepare(), before the capture"
        )
