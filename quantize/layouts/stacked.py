"""Dense experts in stacks: all experts of a layer in one tensor, in the way of each family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe_nvfp4.quantize.files import Checkpoint, TensorSlice, sizes
from moe_nvfp4.quantize.layouts.base import Experts, Matrix, dense, need, parts_of_expert
from moe_nvfp4.quantize.names import DENSE


@dataclass(frozen=True)
class Stack:
    """How a family's files keep all experts of a layer.

    up, down     the ends of the tensors' names: rows of gate and up together [E, 2I, H], and down [E, H, I]
    module       replaces these ends in new files, in front of `.E.gate_proj`
    transposed   the tensors are [E, H, 2I] and [E, I, H]; None: the config's sizes tell which
    interleaved  rows of gate and up alternate
    bias         there are also biases, named `up`_bias and `down`_bias
    gate         gate has a tensor of its own, [E, I, H], whose name ends like this; `up` is [E, I, H] then
    """

    up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    module: str = "experts"
    transposed: bool | None = False
    interleaved: bool = False
    bias: bool = False
    gate: str = ""


PLAIN = Stack()
GRANITE = Stack("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight",
                "block_sparse_moe.experts")  # fmt: skip
STEP = Stack("moe.up_proj.weight", "moe.down_proj.weight", "moe.experts", gate="moe.gate_proj.weight")
STACKS: dict[str, Stack] = {
    "gpt_oss": Stack(transposed=True, interleaved=True, bias=True),
    "openai_privacy_filter": Stack(transposed=True, bias=True),
    "llama4_text": Stack(transposed=True),
    "aria_text": Stack("experts.fc1.weight", "experts.fc2.weight", transposed=True),
    **dict.fromkeys(("inkling_mm_model", "inkling2_text"),
                    Stack("experts.w13_weight", "experts.w2_weight", interleaved=True)),
    "qwen3_vl_moe_text": Stack(transposed=None),
    "step3p5": STEP,
    "step3p7": STEP,
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "granitemoehybrid": GRANITE,
    **dict.fromkeys(
        ("dots3_note_text", "gemma4_text", "granitemoe_swa", "hy_v4", "inkling_text",
         "mistral4", "muse_spark_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text", "unlimited_ocr_text",
         "zaya"), PLAIN,
    ),
}  # fmt: skip


def recognise(source: Checkpoint, left: Mapping[str, TensorSlice]) -> Iterator[Experts]:
    for stack in dict.fromkeys(STACKS[t] for t in source.types if t in STACKS):
        for name, up in left.items():
            if f".{name}".endswith(f".{stack.up}") and up.dtype in DENSE:
                yield _experts(source, left, stack, name)


def _experts(source: Checkpoint, left: Mapping[str, TensorSlice], stack: Stack, up: str) -> Experts:
    prefix = up.removesuffix(stack.up)
    module, down = prefix + stack.module, prefix + stack.down
    gate = prefix + stack.gate if stack.gate else None
    names = (up, down, gate) if gate else (up, down)

    def matrices() -> dict[str, Matrix]:
        for other in names[1:]:
            if other not in left:
                raise ValueError(f"{other} is missing next to {up}: download the checkpoint again")
        if gate:
            return _separate(module, left, gate, up, down)
        return _together(module, left, stack, sizes(source.config, "hidden_size"), up, down)

    biases = {}
    if stack.bias:
        biases = {f"{up}_bias": [f"{module}.{{e}}.gate_proj", f"{module}.{{e}}.up_proj"],
                  f"{down}_bias": [f"{module}.{{e}}.down_proj"]}  # fmt: skip
    return Experts(module, names, matrices, biases, stack.interleaved)


def _separate(module: str, left: Mapping[str, TensorSlice], gate: str, up: str, down: str) -> dict[str, Matrix]:
    """A stack for each projection, [E, out, in]."""
    parts = {"gate_proj": left[gate], "up_proj": left[up], "down_proj": left[down]}
    fits = len(left[up].shape) == 3 and left[gate].shape == left[up].shape and left[gate].size > 0
    need(fits, up, left[up], f"{list(left[gate].shape)} as the gate's")
    E, I, H = left[gate].shape
    need(left[down].shape == (E, H, I), down, left[down], f"[{E}, {H}, {I}]")
    return {f"{module}.{e}.{part}": dense(stored.expert(e)) for e in range(E) for part, stored in parts.items()}


def _together(
    module: str, left: Mapping[str, TensorSlice], stack: Stack, hidden: set[int], up_name: str, down_name: str
) -> dict[str, Matrix]:
    """Gate and up in one stack."""
    up, down, found = left[up_name], left[down_name], {}
    transposed = _is_transposed(stack, hidden, up_name, up, down)
    E, I = up.shape[0], up.shape[2 if transposed else 1] // 2
    H = up.shape[1 if transposed else 2]
    need(down.shape == ((E, I, H) if transposed else (E, H, I)), down_name, down, f"E {E}, I {I}, H {H}")
    for e in range(E):
        gate_up = parts_of_expert(up, e, 2, transposed, stack.interleaved)
        parts = *gate_up, *parts_of_expert(down, e, 1, transposed)
        for part, stored in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            found[f"{module}.{e}.{part}"] = dense(stored)
    return found


def _is_transposed(stack: Stack, hidden: set[int], name: str, up: TensorSlice, down: TensorSlice) -> bool:
    """Whether the tensors are [E, in, out]."""
    fits = len(up.shape) == len(down.shape) == 3 and up.size > 0 and down.size > 0
    need(fits, name, up, "[experts, rows, columns]")
    if stack.transposed is not None:
        return stack.transposed
    found = set()
    for H in hidden:
        for I in down.shape[1:]:
            if up.shape[1:] == (2 * I, H) and down.shape[1:] == (H, I):
                found.add(False)
            if up.shape[1:] == (H, 2 * I) and down.shape[1:] == (I, H):
                found.add(True)
    if len(found) != 1:
        raise ValueError(f"{name} {list(up.shape)}: whether this is [E, 2I, H] or [E, H, 2I] cannot be told from "
                         "hidden_size in config.json; leave the layer out with --exclude")  # fmt: skip
    return found.pop()
