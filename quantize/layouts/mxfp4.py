"""MXFP4 experts of gpt-oss: stacks of e2m1 codes with e8m0 scales; rows of gate and up alternate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moe_nvfp4.format import decode
from moe_nvfp4.quantize.files import Checkpoint, TensorSlice
from moe_nvfp4.quantize.layouts.base import Experts, Matrix


def mxfp4_matrix(blocks: TensorSlice, scales: TensorSlice, e: int, first: int, step: int, name: str) -> Matrix:
    """Rows first, first + step, ... of expert `e`, fp32. blocks: codes [E, N, K/32, 16]; scales: e8m0 [E, N, K/32].

    Its global scale is a power of two, so that a searching recipe reproduces every value exactly: MXFP4's scales
    are powers of two, and e4m3 holds 18 consecutive ones. Gate and up share the larger of their global scales; that of
    a matrix of zeros is 0. Where the scales in use span more than 18 powers of two, small values are rounded, with a
    warning.
    """
    _, N, groups, _ = blocks.shape

    def scale_bytes(a: int, b: int) -> Tensor:
        rows = scales.read((e * N + a * step) * groups, (b - a) * step * groups).view(-1, groups)
        return rows[first::step]

    def code_bytes(a: int, b: int) -> Tensor:
        width = groups * 16
        return blocks.read((e * N + a * step) * width, (b - a) * step * width).view(-1, groups, 16)[first::step]

    def rows(a: int, b: int) -> Tensor:
        codes, exponents = code_bytes(a, b), scale_bytes(a, b)
        if (exponents == 255).any():
            raise ValueError(f"{name}, expert {e}: an MXFP4 scale is NaN: download the checkpoint again")
        return torch.ldexp(decode(codes), exponents[..., None].to(torch.int32) - 127).flatten(1)

    def power_of_two() -> Tensor:
        used = (code_bytes(0, N // step) & 0x77 != 0).any(dim=2)  # blocks of zeros may have any scale
        if not used.any():
            return torch.zeros((), dtype=torch.float32)
        largest = scale_bytes(0, N // step)[used].max().to(torch.int32) - 127 - 8
        one = torch.ones((), dtype=torch.float32)
        return torch.ldexp(one, largest.clamp(min=-126))  # a normal number, as is its reciprocal

    size = (blocks.size + scales.size) // blocks.shape[0] // step
    return Matrix(N // step, groups * 32, size, blocks.file.name, lambda: rows, global_scale=power_of_two)


def recognise(source: Checkpoint, left: Mapping[str, TensorSlice]) -> Iterator[Experts]:
    if "gpt_oss" not in source.types:
        raise ValueError(f"MXFP4 experts are known for gpt_oss only, not for model_type {(*source.types, None)[0]!r}")
    for name in [n for n in left if n.endswith("experts.gate_up_proj_blocks")]:
        yield _experts(left, name.removesuffix(".gate_up_proj_blocks"))


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
