"""`NVFP4Experts`: a layer whose weights may also stay on the CPU while x is on a GPU, or in their files.

    on_cpu   x is on    what runs
    False    anywhere   `ExpertsLayer`, where the weights are
    True     the CPU    the same
    True     a GPU      `kernels.offload`: the CPU computes, as work of the caller's stream

What is not fused (`Hooks`) or is being trained waits for the GPU, and runs where the weights are. Weights in files
(`moe_nvfp4.mapped`) are in a layout that only the CPU kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from types import ModuleType
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from moe_nvfp4.backends import Device, Selected, named
from moe_nvfp4.checks import check_rows, check_weights
from moe_nvfp4.devices import capturing
from moe_nvfp4.door import define
from moe_nvfp4.kernels import offload
from moe_nvfp4.layer import ExpertsLayer
from moe_nvfp4.mapped import Matrix, StandIn, table
from moe_nvfp4.ops import Adapters, refuse_transforms
from moe_nvfp4.prepared import Packed, Prepared, autocast, check_plain, made_for
from moe_nvfp4.routing import local_ids
from moe_nvfp4.weights import ExpertWeights

_CPU = torch.device("cpu")


class RouterCopy:
    """The matrix of a router, the parameter `name` of `module`, on the CPU: for guesses, so an old copy will do."""

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self._copy: tuple[int, Tensor] | None = None

    def on_cpu(self, E: int, H: int) -> Tensor | None:
        """bf16 [E, H]; None if there is none of this shape, or none yet: it is not copied while a graph is captured."""
        weight = getattr(self.module, self.name).detach()
        if type(weight) is Tensor and not weight.is_meta and weight.shape == (E, H) and not capturing(weight.device):
            if self._copy is None or self._copy[0] != weight.data_ptr():
                self._copy = weight.data_ptr(), weight.to("cpu", torch.bfloat16).contiguous()
        return None if self._copy is None else self._copy[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_copy": None}


class NVFP4Experts(ExpertsLayer):
    """The experts of one MoE layer with 4-bit weights: a drop-in for the experts module of a Hugging Face MoE model.

    forward(hidden_states [T, H], top_k_index [T, top_k], top_k_weights [T, top_k]) -> [T, H]

    Build one with `NVFP4Experts.from_dense`, or `moe_nvfp4.integrations.huggingface.swap_experts`. `ExpertsLayer` says
    which parameters it has.
    """

    on_cpu = False  # whether the weights stay on the CPU, wherever x is
    meanwhile: Callable[[], None] | None = None  # launches work for the GPU while the CPU computes
    router: RouterCopy | None = None  # beside a GPU, by which the CPU guesses experts a layer ahead
    rows_for_one = 1  # how many rows of x the model passes for each one that has an expert, if it pads

    # The number stands for these weights at their place in memory: with a new one, torch.compile makes new CUDA graphs.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._number = _numbered(self)

    def __setstate__(self, state: Any) -> None:  # a copy has its own number
        super().__setstate__(state)
        self._number = _numbered(self)

    @property
    def mapped(self) -> bool:
        """Whether the weights stay in their files."""
        return self.packed_for == "cpu"

    @property
    def mapped_bytes(self) -> int:
        """The size of the codes and block scales that stay in their files."""
        matrices = self._packed.matrices.values() if self._packed is not None and self.mapped else ()
        return sum(self.num_experts * note.rows * note.columns * 9 // 16 for note, _ in matrices)

    def map_files(self, projections: Mapping[str, Sequence[Sequence[Matrix]]]) -> Self:
        """Leave codes and block scales in safetensors files, for models that are larger than the memory: the CPU
        kernels read from there what a call needs. As after `keep_on_cpu`, moving the model does not move them.

        projections: parameter name -> for each expert, where its matrix lies, or its gate and its up projection.

        NotImplementedError where the CPU kernels cannot be compiled; ValueError for files that are too short.
        """
        notes: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for name, experts in projections.items():
            E, rows, half = self._here(name).shape
            addresses, note = table(experts, rows, 2 * half)
            notes[name] = note, (E, rows)
            for key, tensor in ((name, addresses), (f"{name}_sf", addresses.new_empty(0))):
                setattr(self, key, nn.Parameter(tensor, requires_grad=False))
        self._packed = Packed("cpu", notes, self.up_name)
        self.on_cpu = True
        self.backend()  # raises if the CPU kernels cannot run
        return self

    def keep_on_cpu(self, keep: bool = True) -> Self:
        """Move the weights to the CPU and keep them there: `.to("cuda")` of the model moves everything else.

        Called with tensors on a GPU, the layer then computes on the CPU, as part of the caller's stream and inside
        CUDA graphs (see `moe_nvfp4.kernels.offload`). A layer that is not fused (`Hooks`) or is being trained waits for
        the GPU instead. With keep=False the weights may be moved again.
        """
        if keep and not self.mapped:
            self.to("cpu")
            for p in self.parameters():
                with made_for(p):
                    p.data = offload.place(p.data)
        self.on_cpu = keep
        self._changed()
        self._number = _numbered(self)
        return self

    def _select(self, *problem: Any) -> Selected:
        chosen = super()._select(*problem)
        if not (self.on_cpu and self.mapped):
            return chosen
        if chosen.name != "cpu":
            raise _not_from_files(chosen.name)
        return Selected("cpu", "cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._number = _numbered(self)
        if not self.on_cpu:
            return super()._apply(fn, recurse)

        def stay(t: Tensor) -> Tensor:
            """fn(t), except that t stays on the CPU and is never copied to a GPU."""
            to = fn(t.new_empty(0))
            return fn(t) if to.device.type in ("cpu", "meta") else t.to(to.dtype)

        if self.mapped:
            return super(Prepared, self)._apply(stay, recurse)  # Prepared's own would unpack
        return super()._apply(stay, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self._packed is None or not self.mapped:
            return super()._save_to_state_dict(destination, prefix, keep_vars)
        super(Prepared, self)._save_to_state_dict(destination, prefix, keep_vars)
        for name, (note, rows) in self._packed.matrices.items():
            destination[prefix + name] = StandIn(*rows, note.columns // 2)
            destination[f"{prefix}{name}_sf"] = StandIn(*rows, note.columns // 16)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Adapters = ((), ()),
        adapter: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        if not self.on_cpu or hidden_states.device == (here := self._here("down_proj").device):
            return super().forward(hidden_states, top_k_index, top_k_weights, adapters, adapter, expert_map)
        if expert_map is not None:
            top_k_index = local_ids(top_k_index, expert_map)
        inputs = hidden_states, top_k_index, top_k_weights
        x, fused = autocast(hidden_states), self._hooks(adapters).fused
        if fused and not _wants_gradients(x, top_k_weights, *self._biases):
            y = run_beside(x, top_k_index, top_k_weights, self._number, self.meanwhile)
        else:
            there = (x, *inputs[1:], adapters, adapter)
            y = super().forward(*tree_map(lambda t: None if t is None else t.to(here), there))
        return y.to(hidden_states)


def _not_from_files(chosen: str) -> Exception:
    """The error of weights in files where not the CPU kernels were chosen."""
    if reason := named("cpu").unavailable(Device.of(_CPU)):
        return NotImplementedError(
            f"experts that stay in their files: cpu {reason}; or load the model without map_files"
        )
    return ValueError(
        f"MOE_NVFP4_BACKEND={chosen} on cpu: {chosen} takes weights in memory, not those that stay in their files; or "
        "unset the variable"
    )


def _wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# ---- the op that finds weights by their layer's number -------------------------------------------

_layers: WeakValueDictionary[int, NVFP4Experts] = WeakValueDictionary()
_numbers = count()


def _numbered(layer: NVFP4Experts) -> int:
    """A new number by which `experts_beside` finds `layer.weights`, as long as `layer` lives."""
    number = next(_numbers)
    _layers[number] = layer
    return number


@cache
def _kernels(device: torch.device) -> ModuleType:
    """The functions that compute on the CPU for x on `device`; NotImplementedError if they cannot."""
    found = Device.of(device)
    if reason := offload.unavailable(found):
        raise NotImplementedError(
            f"experts on the CPU, x on {found}: offload {reason}; or move the layer to the device of x"
        )
    return offload.functions()


def serve_beside(device: torch.device, threads: int) -> None:
    """Say that this process serves models whose experts stay on the CPU beside `device`: with so many threads, whatever
    torch's number becomes, and in CUDA graphs that are replayed one after the other, and so share memory.

    NotImplementedError if the CPU cannot compute beside that device.
    """
    _kernels(device).serve(threads)


def beside(device: Device) -> str:
    """For `moe-nvfp4 env`: whether experts can stay on the CPU beside `device`, or why not."""
    return offload.unavailable(device) or "experts kept on the CPU"


def _checked(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: int) -> tuple[ModuleType, ExpertWeights]:
    check_plain(module := _layers[layer])
    kernels, w = _kernels(x.device), module.weights
    check_weights(w, _CPU)
    check_rows(x, top_k_index, top_k_weights, w)
    return kernels, w


def _run(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: int, meanwhile: Callable[[], None] | None = None
) -> Tensor:
    kernels, w = _checked(x, top_k_index, top_k_weights, layer)
    routed = top_k_index.numel() // (module := _layers[layer]).rows_for_one
    router = module.router and module.router.on_cpu(w.num_experts, w.hidden_size)
    return kernels.experts(x, top_k_index, top_k_weights, w, routed, meanwhile, router)


def _fake(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: int) -> Tensor:
    _checked(x, top_k_index, top_k_weights, layer)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# Weights are named by their layer's number, as torch.compile makes no CUDA graphs of ops that take CPU tensors.
experts_beside = define(
    "experts_beside(Tensor x, Tensor top_k_index, Tensor top_k_weights, int layer) -> Tensor", _run, _fake
)


def run_beside(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    layer: int,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """`run_experts` for the fused layer with this number, whose weights are on the CPU while x is on a GPU.

    meanwhile() launches work for the GPU to do while the CPU computes: in eager mode, without gradients.
    """
    refuse_transforms()
    if meanwhile is None or torch.compiler.is_compiling() or torch.is_grad_enabled() or type(x) is not Tensor:
        return experts_beside(x, top_k_index, top_k_weights, layer)
    return _run(x, top_k_index, top_k_weights, layer, meanwhile)
