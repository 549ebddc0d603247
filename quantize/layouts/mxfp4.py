"""MXFP4: e2m1 codes, of which 32 in a row share an e8m0 scale, a power of two.

                          codes                          scales
    gpt-oss, stacks       `_blocks` U8 [E, N, K/32, 16]  `_scales` U8 [E, N, K/32]; rows of gate and up alternate
    compressed-tensors    `weight_packed` U8 [N, K/2]    `weight_scale` U8 [N, K/32]
    ModelOpt, AMD Quark   `weight` U8 [N, K/2]           `weight_scale` U8 [N, K/32]
    DeepSeek V4           `weight` I8 [N, K/2]           `scale` F8_E8M0 [N, K/32]
    Ling 3.0, beside FP8  `weight` U8 [N, K/2]           `weight_scale_inv` U8 [N, K/32]

Sources: compressed-tensors 0.20 (`compressors/mxfp4`), nvidia-modelopt 0.47 (`qtensor/mxfp4_tensor.py`), the OCP
Microscaling specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.format import decode
from moe_nvfp4.quantize.files import Checkpoint, TensorSlice
from moe_nvfp4.quantize.layouts.base import Experts, Matrix, experts_of

PAIRS = (
    ("weight_packed", "weight_scale"),
    ("weight", "weight_scale"),
    ("weight", "scale"),
    ("weight", "weight_scale_inv"),
)  # names of codes, scales
ALGOS = ("MXFP4", "W4A16_MXFP4", "W4A8_MXFP4_FP8")  # quant_algo of ModelOpt
FORMAT = "mxfp4-pack-quantized"  # of compressed-tensors


def _of_compressed_tensors(q: Mapping) -> bool:
    if FORMAT not in {q.get("format"), *(group.get("format") for group in (q.get("config_groups") or {}).values())}:
        return False
    if (q.get("transform_config") or {}).get("config_groups"):
        raise ValueError(f"{FORMAT} with transforms (rotations) is not read: quantize the original checkpoint")
    return True


def _of_quark(q: Mapping) -> bool:
    weight: Any = (q.get("global_quant_config") or {}).get("weight") or {}
    weight = weight[0] if isinstance(weight, list) else weight
    if (weight.get("dtype"), weight.get("group_size")) != ("fp4", 32):
        return False
    steps = q.get("algo_config") or []
    for step in steps if isinstance(steps, list) else [steps]:
        more = [key for key in ("r4", "online_r1_rotation") if step.get(key)]  # r1 and r2 are in the weights
        if more or step.get("name") == "svdquant":
            said = ", ".join([str(step.get("name")), *more])
            raise ValueError(f"Quark's algo_config ({said}) needs more than weights, rotated inputs or a second "
                             "product, and is not read: quantize the original checkpoint")  # fmt: skip
    return True


METHODS: dict[str, Callable[[Mapping], bool]] = {  # quant_method -> whether its config says MXFP4
    "mxfp4": lambda q: True,
    "compressed-tensors": _of_compressed_tensors,
    "quark": _of_quark,
    "modelopt": lambda q: str(q.get("quant_algo")).upper() in ALGOS,
}


def describes(q: Mapping) -> bool:
    """Whether a quantization_config says MXFP4. ValueError for weights that are more than codes and scales."""
    says = METHODS.get(str(q.get("quant_method")))
    try:
        return says is not None and says(q)
    except (AttributeError, KeyError, TypeError):  # not the structure that the tools write
        return False


def weights(left: Mapping[str, TensorSlice]) -> dict[str, tuple[Matrix, tuple[str, ...]]]:
    """The MXFP4 matrices that files keep one by one: stem -> matrix, its tensors' names."""
    found: dict[str, tuple[Matrix, tuple[str, ...]]] = {}
    for name, scales in left.items():
        stem, _, last = name.rpartition(".")
        pair = next((f"{stem}.{codes}" for codes, of in PAIRS if of == last and f"{stem}.{codes}" in left), None)
        if pair is None or scales.dtype not in ("U8", "F8_E8M0") or left[pair].dtype not in ("U8", "I8"):
            continue
        codes = left[pair]
        fits = len(scales.shape) == 2 and codes.shape == (scales.shape[0], 16 * scales.shape[1])
        if not fits or not codes.size:
            raise ValueError(f"{pair}: {codes.dtype} {list(codes.shape)} with scales {scales.dtype} "
                             f"{list(scales.shape)} is no MXFP4 matrix ([N, K/2] codes and [N, K/32] scales): the file "
                             "is damaged, or in a layout that is not known here; use the original")  # fmt: skip
        N, groups = scales.shape
        blocks = replace(codes, dtype="U8", shape=(1, N, groups, 16))
        scales = replace(scales, dtype="U8", shape=(1, N, groups))
        found[stem] = mxfp4_matrix(blocks, scales, 0, 0, 1, stem), (pair, name)
    return found


def mxfp4_matrix(blocks: TensorSlice, scales: TensorSlice, e: int, first: int, step: int, name: str) -> Matrix:
    """Rows first, first + step, ... of expert `e`, fp32. blocks: codes [E, N, K/32, 16]; scales: e8m0 [E, N, K/32].

    Its global scale is a power of two, so that a searching recipe reproduces every value exactly: MXFP4's scales
    are powers of two, and e4m3 holds 18 consecutive ones. Gate and up share the larger of their global scales; that of
    a matrix of zeros is 0. Where the scales in use span more than 18 powers of two (15 where blocks at the lower end
    have small codes only), small values are rounded, with a warning.
    """
    _, N, groups, _ = blocks.shape

    def scale_bytes(a: int, b: int) -> Tensor:
        rows = scales.read((e * N + a * step) * groups, (b - a) * step * groups).view(-1, groups)
        return rows[first::step]

    def code_bytes(a: int, b: int) -> Tensor:
        width = groups * 16
        return blocks.read((e * N + a * step) * width, (b - a) * step * width).view(-1, groups, 16)[first::step]

    def packed(a: int, b: int) -> tuple[Tensor, Tensor]:
        exponents = scale_bytes(a, b)
        if (exponents == 255).any():
            where = f"{name}, expert {e}" if blocks.shape[0] > 1 else name
            raise ValueError(f"{where}: an MXFP4 scale is NaN: download the checkpoint again")
        return code_bytes(a, b).flatten(1), exponents

    def rows(a: int, b: int) -> Tensor:
        codes, exponents = packed(a, b)
        values = decode(codes.view(*exponents.shape, 16))
        return torch.ldexp(values, exponents[..., None].to(torch.int32) - 127).flatten(1)

    def power_of_two() -> Tensor:
        used = (code_bytes(0, N // step) & 0x77 != 0).any(dim=2)  # blocks of zeros may have any scale
        if not used.any():
            return torch.zeros((), dtype=torch.float32)
        largest = scale_bytes(0, N // step)[used].max().to(torch.int32) - 127 - 8
        one = torch.ones((), dtype=torch.float32)
        return torch.ldexp(one, largest.clamp(min=-126))  # a normal number, as is its reciprocal

    size = (blocks.size + scales.size) // blocks.shape[0] // step
    return Matrix(N // step, groups * 32, size, blocks.file.name, lambda: rows, 0, power_of_two, packed)


def recognise(source: Checkpoint, left: Mapping[str, TensorSlice]) -> Iterator[Experts]:
    stacks = [n for n in left if n.endswith("experts.gate_up_proj_blocks")]
    if stacks and "gpt_oss" not in source.types:
        raise ValueError(f"stacks of MXFP4 experts are known for gpt_oss only, not for model_type "
                         f"{(*source.types, None)[0]!r}")  # fmt: skip
    found = weights(left)
    if not stacks and not found and describes(source.config["quantization_config"]):
        raise ValueError("config.json says MXFP4, and the files hold no MXFP4 weights, or in a layout that is not "
                         "known here: download the checkpoint again, or use the original")  # fmt: skip
    for name in stacks:
        yield _experts(left, name.removesuffix(".gate_up_proj_blocks"))
    yield from experts_of(found)


def _experts(left: Mapping[str, TensorSlice], module: str) -> Experts:
    up, down = f"{module}.gate_up_proj", f"{module}.down_proj"
    tensors = tuple(f"{p}_{kind}" for p in (up, down) for kind in ("blocks", "scales"))
    if missing := [n for n in tensors if n not in left]:
        raise ValueError(f"{missing[0]} is missing: download the checkpoint again")
    pairs = {p: (left[f"{p}_blocks"], left[f"{p}_scales"]) for p in (up, down)}
    E = (*pairs[up][0].shape, 0)[0]
    for name, (blocks, scales) in pairs.items():
        fits = len(scales.shape) == 3 and scales.shape[0] == E and blocks.shape == (*scales.shape, 16)
        if not fits or not blocks.size or not blocks.dtype == scales.dtype == "U8":
            raise ValueError(f"{name}: {list(blocks.shape)} and {list(scales.shape)} are not MXFP4 ([E, N, K/32, 16] "
                             "codes and [E, N, K/32] scales): the file is damaged; download it again")  # fmt: skip

    def matrices() -> dict[str, Matrix]:
        found = {}
        for e in range(E):
            for i, part in enumerate(("gate_proj", "up_proj")):
                found[f"{module}.{e}.{part}"] = mxfp4_matrix(*pairs[up], e, i, 2, up)
            found[f"{module}.{e}.down_proj"] = mxfp4_matrix(*pairs[down], e, 0, 1, down)
        return found

    def dense() -> dict[str, list[Matrix]]:
        """The stacks of gpt-oss's bf16 files, [E, in, out]."""
        return {name: [mxfp4_matrix(*pair, e, 0, 1, name) for e in range(E)] for name, pair in pairs.items()}

    biases = {f"{up}_bias": [f"{module}.{{e}}.gate_proj", f"{module}.{{e}}.up_proj"],
              f"{down}_bias": [f"{module}.{{e}}.down_proj"]}  # fmt: skip
    return Experts(module, tensors, matrices, biases, interleaved=True, dense=dense)
