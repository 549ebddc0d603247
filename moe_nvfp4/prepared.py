"""Modules that keep weights in the layout of their kernels, and give everybody else the checkpoint's bytes."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import _disable_current_modes

from moe_nvfp4.backends import Selected, backends_now, named, selected, selected_now
from moe_nvfp4.devices import capturing, finish
from moe_nvfp4.scales import FP32Scales
from moe_nvfp4.weights import check_block_scales, check_global_scale

changing = threading.RLock()  # held while weights change their layout, or are taken out of their module
# For each module: its state at its last call, what that call got, and who reads it.
_last: WeakKeyDictionary[Prepared, tuple[tuple | None, Selected, Any, _Readers]] = WeakKeyDictionary()


@contextmanager
def made_for(p: Tensor) -> Iterator[None]:
    """Tensors made inside may become the data of the parameter p: they are inference tensors if p is one, whatever mode
    the caller is in. As weights, those of an inference mode could not be trained through."""
    with real_tensors(), torch.inference_mode(p.is_inference()), torch.no_grad():
        yield


@contextmanager
def real_tensors() -> Iterator[None]:
    """What is made inside may outlast the call: it holds numbers also where the caller's tensors are fake (an estimate
    of memory, a tracer)."""
    with _disable_current_modes():
        yield


_calls = threading.local()


@contextmanager
def before_weights(module: nn.Module, function: Callable[[], None]) -> Iterator[None]:
    """In this thread, calls of `module` call `function` before they take the weights, which no other thread changes in
    between."""
    functions = _calls.__dict__.setdefault("before", {})
    before = functions.get(module, ())
    functions[module] = (*before, function)
    try:
        yield
    finally:
        functions[module] = before
        if not before:
            del functions[module]


@dataclass
class Packed:
    """What is known of parameters in a backend's layout.

    layout    the name of the backend
    matrices  parameter -> (the note that `Backend.unpack` needs, dimensions of its codes without the last: [E,] N)
    first     the first of these parameters
    before    parameter -> what `_pack` took: the shapes of codes and block scales, and whether rows are [gate; up]
    """

    layout: str
    matrices: dict[str, tuple[Any, tuple[int, ...]]]
    first: str
    before: dict[str, tuple[torch.Size, torch.Size, bool]] = field(default_factory=dict)


class Prepared(FP32Scales):
    """A module whose matrices are parameters `name`, codes uint8 [(E,) N, K/2], and `name_sf`, block scales.

    In a backend's layout the codes have four dimensions and contain the block scales, and `name_sf` is empty.
    `state_dict`, and everything that moves or loads parameters, still sees the checkpoint's bytes.
    """

    _packed: Packed | None = None
    _merged_by: tuple[Any, ...] = ()  # the layers of adapters whose calls have merged these into the weights (PEFT)
    _captured = False  # whether a CUDA graph reads the weights, which will not follow if they move in memory
    _problem: Callable[..., Any]  # what `selected` takes
    _prepare_for: Callable[[Selected], None]
    weights: Any

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name.endswith("_orig") and param is not None and param.dtype == torch.uint8:  # by torch.nn.utils.prune
            raise ValueError(
                f"{name.removesuffix('_orig')} has 4-bit codes or their scales as bytes, which pruning would take for "
                "values: prune the dense model, and quantize the result"
            )
        super().register_parameter(name, param)

    def _for_call(self, *problem: Any) -> tuple[Selected, Any]:
        """The backend for a call (arguments: those of `_problem`), and `weights` in its layout. These stay as they are
        even if other threads change the module's weights meanwhile (another dtype, `state_dict`, `to`), also where each
        thread has a stream of its own."""
        if torch.compiler.is_compiling():
            check_plain(self)
            return self._select(*problem), self.weights
        with changing:
            for function in getattr(_calls, "before", {}).get(self, ()):
                function()
            now, last = self._state(problem), _last.get(self)
            if last is not None and last[0] == now:
                self._note_capture()
                last[3].note()
                return last[1], last[2]
            check_plain(self)
            chosen = self._select(*problem)
            if self.packed_for != chosen.layout:
                self._prepare_for(chosen)
            self._note_capture()
            with real_tensors():
                weights = self.weights.held()
            if now is not None:
                readers = _Readers(weights)
                readers.note()
                _last[self] = self._state(problem), chosen, weights, readers
            return chosen, weights

    def _select(self, *problem: Any) -> Selected:
        """The backend for a problem (arguments: those of `_problem`)."""
        return (selected if torch.compiler.is_compiling() else selected_now)(*self._problem(*problem))

    def _changed(self) -> None:
        """To be called when something changes that `_state` does not see."""
        _last.pop(self, None)

    def _state(self, problem: tuple) -> tuple | None:
        """All that the result of `_for_call` depends on; None where parameters last for one call only. Two states are
        never equal by chance: what `_last` holds keeps its memory, so no other tensor can have its address."""
        places: list[Any] = []
        for p in self._parameters.values():
            if p is not None:
                if type(p) is not nn.Parameter:
                    return None
                # a view of the same memory has another shape or other strides, and a new parameter its own gradient
                places += (id(p), p.data_ptr(), p.shape, p.stride())
        if self._offloaded:
            return None
        attributes = self.__dict__
        chosen = attributes["activations"], attributes.get("gate"), backends_now()
        computing = len(attributes["_modules"]), len(attributes["_forward_pre_hooks"])  # see `computes_parameters`
        return problem, places, chosen, computing

    @property
    def packed(self) -> bool:
        """Whether the weights are in a backend's layout."""
        return self.packed_for is not None

    @property
    def packed_for(self) -> str | None:
        """None, or the name of the backend in whose layout the weights are."""
        packed = self._packed
        return packed.layout if packed is not None and self._here(packed.first).dim() == 4 else None

    def _rows(self, name: str) -> int:
        """N of a matrix, of this rank's part if it is split over ranks."""
        if self._packed is not None and self.packed:
            return self._packed.matrices[name][1][-1]
        return self._here(name).shape[-2]

    def _note_capture(self) -> None:
        if not (self._captured or _held):
            device = next(p.device for p in self._parameters.values() if p is not None)
            self._captured = capturing(device)

    def warn_of_graphs(self) -> None:
        """To be called before the weights move in memory: warn if a CUDA graph reads them."""
        if self._captured:
            self._captured = False
            warnings.warn(
                "4-bit weights move in memory (state_dict, saving, loading and moving a model do this), and a CUDA "
                "graph was captured that reads them where they were: call the model once and capture the graph again",
                stacklevel=3,
            )

    def as_read(self) -> None:
        """Undo what calls of adapters' layers have merged, before the weights are read or written past these."""
        for layer in self._merged_by:
            layer.as_read()

    def unpack(self) -> None:
        """Bring the weights back into the checkpoint's bytes."""
        self._changed()  # what `_last` has holds the weights
        if self._packed is not None and self.packed:
            if self._split:
                raise NotImplementedError(
                    "fully_shard has split 4-bit weights in the layout of their kernels over ranks, where each rank "
                    "cannot change it: move, convert or merge the model before fully_shard"
                )
            _refuse_captured(self._here(self._packed.first))
            self.warn_of_graphs()
            for name in self._packed.matrices:
                codes, sf = self._here(name), self._here(f"{name}_sf")
                with made_for(codes):
                    prepared = codes.data
                    codes.data, sf.data = self._unpacked(name, prepared)
                    finish(codes.device)  # before another stream reads these, or is given the memory of `prepared`
            self._packed = None

    def _unpacked(self, name: str, prepared: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and block scales of a packed parameter, whose data are `prepared`."""
        assert self._packed is not None
        note, rows = self._packed.matrices[name]
        prepared = prepared.transpose(0, 1) if len(rows) == 1 else prepared
        codes, sf = (t.view(*rows, -1) for t in named(self._packed.layout).unpack(prepared, note))
        return codes, sf

    def _pack(self, chosen: Selected, **matrices: bool) -> None:
        """Bring these matrices into the layout of the backend `chosen`, if it has one; name=whether its rows are
        [gate; up].

        Parameters that last for one call only are left alone: hooks bring them and take them away, and where
        transformers splits them over ranks, plain tensors stand in for DTensors during a call.
        """
        if self._packed is not None and self.packed:
            if self._packed.layout == chosen.layout:
                return
            self.unpack()
        if chosen.layout is None or not self.lasting:
            return
        _refuse_captured(self._here(next(iter(matrices))))
        packed = Packed(chosen.layout, {}, next(iter(matrices)))
        for name, interleaved in matrices.items():
            codes, sf = self._here(name), self._here(f"{name}_sf")
            packed.before[name] = codes.shape, sf.shape, interleaved
            with made_for(codes):
                stored = codes.data, sf.data
                codes.data, packed.matrices[name] = packed_matrix(chosen.name, *stored, interleaved)
                sf.data = sf.data.new_empty(0)
                finish(codes.device)  # as in `unpack`
        self._packed = packed

    @property
    def _split(self) -> bool:
        """Whether FSDP2 has split packed weights over ranks. The ranks of other plans split the checkpoint's bytes, and
        each packs its part."""
        parameter = None if self._packed is None else self._parameters.get(self._packed.first)
        return parameter is not None and hasattr(parameter, "_local_tensor") and parameter.dim() == 4

    @property
    def lasting(self) -> bool:
        """Whether the parameters outlast a call."""
        if self._offloaded or in_fsdp(self):
            return False
        return all(p is None or isinstance(p, nn.Parameter) for p in self._parameters.values())

    @property
    def _offloaded(self) -> bool:
        """Whether a hook of accelerate brings the parameters for each call; other hooks only move the rows."""
        hook = getattr(self, "_hf_hook", None)
        hooks = getattr(hook, "hooks", (hook,))  # a SequentialHook holds several
        return hook is not None and any(getattr(h, "offload", True) for h in hooks)

    def _here(self, name: str) -> Tensor:
        """A parameter, or this rank's part of one that is split over ranks (a DTensor), in whatever layout it has."""
        parameter: Any = self._parameters.get(name)
        if parameter is None:  # parametrized, which only `repr` may meet
            parameter = getattr(self, name)
        return getattr(parameter, "_local_tensor", parameter)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with changing:
            self.unpack()  # to another device, say
            return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *args: Any) -> None:
        with changing:
            self.as_read()
            if not (split := self._split):
                self.unpack()
            super()._save_to_state_dict(*args)
            if split:
                destination, prefix, *_ = args
                destination.update({prefix + name: t for name, t in self._gathered()})

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter, the checkpoint's bytes, split over ranks as it is) where FSDP2 has split packed weights. All
        ranks have to ask, since each matrix is gathered; under `only_shapes`, tensors on meta."""
        assert self._packed is not None
        for name, (*shapes, _) in self._packed.before.items():
            p: Any = self._parameters[name]
            if _only_shapes:
                found: Any = [torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes]
            else:
                found = [_split_like(p, t) for t in self._unpacked(name, p.full_tensor())]
            yield from zip((name, f"{name}_sf"), found, strict=True)

    def _to_split(self, given: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(parameter, what was `given` for it in a state dict, packed and split likewise) where FSDP2 has split packed
        weights."""
        assert self._packed is not None
        for name, (*_, interleaved) in self._packed.before.items():
            p: Any = self._parameters[name]
            both = [t for key in (name, f"{name}_sf") if (t := given.get(key)) is not None]
            if len(both) == 1:
                raise ValueError(f"{name} and {name}_sf belong together, and one of them is not in the state dict")
            if both:
                codes, sf = (getattr(t, "full_tensor", lambda t=t: t)().to(p.device) for t in both)
                whole, self._packed.matrices[name] = packed_matrix(self._packed.layout, codes, sf, interleaved)
                yield name, _split_like(p, whole)
                yield f"{name}_sf", self.get_parameter(f"{name}_sf")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = {name: state_dict[prefix + name] for name in self._parameters if prefix + name in state_dict}
        for name, t in given.items():
            if type(t) in (Tensor, nn.Parameter) and not t.is_meta:
                try:
                    if name.endswith("_sf") and t.dtype == torch.uint8:
                        check_block_scales(t, prefix + name)  # kernels read other bytes as anything
                    elif name.endswith(("global_scale", "input_scale")) and t.dtype == torch.float32:
                        check_global_scale(t, prefix + name)
                except ValueError as error:
                    args[-1].append(str(error))  # error_msgs
                    return
        with changing:
            if given:
                self.as_read()
            if given and self._split:
                self._changed()
                state_dict = {**state_dict, **{prefix + name: t for name, t in self._to_split(given)}}
            elif given:  # not if it is an adapter's
                self.unpack()
            super()._load_from_state_dict(state_dict, prefix, *args)


class _Readers:
    """The streams that read a module's weights: torch does not use the memory again before their work is done, should
    another thread give the module other weights meanwhile."""

    def __init__(self, weights: Any) -> None:
        self.tensors = [t for t in weights.tensors() if t is not None and t.is_cuda]
        self.index = self.tensors[0].device.index if self.tensors else None
        self.streams: set[int] = set()

    def note(self) -> None:
        """The current stream is one."""
        if self.index is None or (now := torch._C._cuda_getCurrentRawStream(self.index)) in self.streams:
            return
        device = self.tensors[0].device
        if not capturing(device):  # a graph runs on any stream, and its owner keeps what it reads
            self.streams.add(now)
            for t in self.tensors:
                t.record_stream(torch.cuda.current_stream(device))


def in_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 (`fully_shard`) brings the parameters of `module` for each call, and takes them away after it."""
    split = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if split is None or not split.__subclasses__():  # it has not been used in this process
        return False
    if module not in _in_fsdp:
        for whole in (o for o in gc.get_objects() if issubclass(type(o), split)):  # the only way to a module's parents
            _in_fsdp.update(whole.modules())
    return module in _in_fsdp


_in_fsdp: WeakSet[nn.Module] = WeakSet()


def packed_matrix(backend: str, codes: Tensor, sf: Tensor, interleaved: bool) -> tuple[Tensor, tuple[Any, tuple]]:
    """Codes [(E,) N, K/2] and block scales in the layout of `backend`, and what `Packed.matrices` has of them."""
    rows, one = tuple(codes.shape[:-1]), codes.dim() == 2
    prepared, note = named(backend).pack(*((codes[None], sf[None]) if one else (codes, sf)), interleaved)
    return prepared.transpose(0, 1) if one else prepared, (note, rows)  # FSDP splits the first dimension


def _split_like(p: Any, whole: Tensor) -> Tensor:
    """`whole`, which every rank has, split over ranks as the parameter p."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


_only_shapes = False


@contextmanager
def only_shapes() -> Iterator[None]:
    """For state dicts of which only shapes are read: nothing waits for other ranks. Other threads' state dicts wait."""
    global _only_shapes
    with changing:
        _only_shapes, before = True, _only_shapes
        try:
            yield
        finally:
            _only_shapes = before


_held = 0  # how many captures hold the weights' memory themselves


@contextmanager
def weights_are_held() -> Iterator[None]:
    """For captures of CUDA graphs that keep the weights' memory as long as they are replayed."""
    global _held
    _held += 1
    try:
        yield
    finally:
        _held -= 1


def computes_parameters(module: nn.Module) -> bool:
    """Whether torch.nn.utils computes parameters of `module` from others at each call."""
    hooks = module._forward_pre_hooks.values()
    return "parametrizations" in module._modules or any(isinstance(hook, _COMPUTING) for hook in hooks)


_COMPUTING = BasePruningMethod, SpectralNorm, WeightNorm  # torch 2.11 cannot trace what module a hook is from


def check_plain(module: nn.Module, name: str = "4-bit weights") -> None:
    """ValueError for a module that `computes_parameters`: what it computes is no longer among its parameters, where a
    bias or a scale is optional and would be left out."""
    if computes_parameters(module):
        computing = module._modules.get("parametrizations") or nn.Module()
        if any(type(m).__module__.startswith("peft.") for m in computing.modules()):
            raise ValueError(
                f"{name}: PEFT's own layers, which PeftMixedModel makes, would add LoRA to the bytes of 4-bit weights: "
                "get_peft_model without mixed=True, and LoRA alone"
            )
        raise ValueError(
            f"{name}: the parameters are parametrized or pruned (torch.nn.utils), and kernels read codes, scales and "
            "biases as they are: make this a part of them (remove_parametrizations, prune.remove), or do it to the "
            "dense model and quantize the result"
        )


def _refuse_captured(weight: Tensor) -> None:
    """RuntimeError inside a CUDA graph's capture: nothing is computed there, and the layout before is given up."""
    if capturing(weight.device):
        raise RuntimeError(
            "4-bit weights would change their layout in this call, which a CUDA graph cannot repeat: call the module "
            "once with inputs of this dtype, or its prepare(), before the capture"
        )


_AUTOCAST = tuple(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu")))  # torch 2.11 cannot trace it


def autocast(x: Tensor) -> Tensor:
    """x in the dtype that torch.autocast has chosen, as torch's own layers take it."""
    device = x.device.type
    enabled = device in _AUTOCAST and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if enabled else x
