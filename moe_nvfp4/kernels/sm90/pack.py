"""Hopper's layout of 4-bit weights, without loss: what a WGMMA thread reads together lies together.

A unit is 64 rows by 64 columns: 2048 bytes of codes, then 256 bytes of scales, so that one bulk
copy brings any number of units along K. Within a unit (in 32-bit words; for warp w = 0..3 of a warpgroup and
lane 4 g + c with g = 0..7 and c = 0..3, as in the m64k16 fragment of the PTX ISA):

    codes   [w, g, c, k16]    8 codes: rows 16 w + g and 16 w + g + 8, columns 2c, 2c+1, 2c+8, 2c+9
    scales  [w, g, k16 / 2]   4 scales: the same two rows, two k16 steps

Code words hold signs and magnitudes separately, at places from where one shift and one mask move them into two bf16
at a time. As bf16, a code's three magnitude bits are its value times 2^-126 (a subnormal for 0.5).

    16-bit half of the word: sign and lowest magnitude bit of  row g   k 0..7   at 15 and 6
                                                               row g+8          at 12 and 3
                                                               row g   k 8..15  at 14 and 0
                                                               row g+8          at 13 and 9

Scales give their sign bit, which is zero, to the exponent: five bits of exponent x and three of mantissa f, without
subnormals, `s = (1 + f / 8) * 2^(x - 9)`. ORed with 0x7000, this is the bf16 number s * 2^106. Zero has
no such form: a block with a zero scale gets zero codes and the scale `ZERO`. The rare block that had other
codes is put on a list, so that `unpack` gives back every byte.

The rows of a unit: for `interleaved` halves [gate; up], 32 gate rows and their 32 up rows (rows g and g + 8 of a
slab of 16 are gate and up of one column of h, and belong to one thread); otherwise rows g and g + 8 of a slab are
neighbours in the matrix, 2g and 2g + 1. Rows are padded to whole units and K to 64, with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_nvfp4.devices import capturing
from moe_nvfp4.kernels.common.tensors import settle, warn_unpacked
from moe_nvfp4.weights import ExpertWeights, Matrices

UNIT = 64  # rows, and columns
UNIT_WORDS = 576  # 512 of codes and 64 of scales
ZERO = 0xF0  # stands for a scale of zero; as bf16 it is finite
_SIGN = (15, 12, 14, 13)  # bit of the sign for (row half, k half) = (0, 0), (1, 0), (0, 1), (1, 1)
_MAGNITUDE = (6, 3, 0, 9)
_CHUNK = 1 << 25  # codes packed at a time: some hundred MB of temporaries


Escapes = tuple[Tensor, Tensor]  # int64 [n] flat indices of blocks among [E, N, K/16], uint8 [n, 8] their codes


def pack(codes: Tensor, sf: Tensor, interleaved: bool) -> tuple[Tensor, Escapes | None]:
    """uint8 codes [E, N, K/2] and e4m3 bytes [E, N, K/16] -> units, int32 [E, M64, K64, 576], with M64 and K64 units
    along rows and columns, and escapes. They are settled: kernels read weights without waiting for the launch before.

    Reads values back to the host, to find the escapes: RuntimeError where a CUDA graph is being captured. ValueError
    for NaN or negative scales, and for interleaved halves with an odd N.
    """
    E, N, half = codes.shape
    if capturing(codes.device):
        raise RuntimeError(
            "4-bit weights would be brought into the Hopper kernels' layout while a CUDA graph is captured: call "
            "prepare_model(model), or the modules' prepare(), before the capture or torch.compile"
        )
    if interleaved and N % 2:
        raise ValueError(f"gate and up halves need an even number of rows, got {N}")
    if E and not sf.is_meta and (sf >= 0x7F).any():
        raise ValueError("block scales must be e4m3 numbers from 0 to 448: NaN or a negative one is in the weights")
    M64 = -(-N // 2 // 32) if interleaved else -(-N // UNIT)
    units = torch.empty(E, M64, -(-half // 32), UNIT_WORDS, dtype=torch.int32, device=codes.device)
    if codes.is_meta:
        return units, None
    encode = torch.tensor(_SCALE_CODES, dtype=torch.int32, device=codes.device)
    indices, lost = [], []
    for at, to in _chunks(units, N, interleaved):
        c, s = codes[at], sf[at]
        blocks = c.reshape(*s.shape, 8)
        zero = s == 0
        where = (zero & (blocks != 0).any(-1)).reshape(-1).nonzero().squeeze(-1)
        if where.numel():
            indices.append(where + (at[0].start * N + at[1].start) * half // 8)
            lost.append(blocks.reshape(-1, 8)[where])
        c = blocks.masked_fill(zero[..., None], 0).reshape(c.shape)
        units[to][..., :512] = _code_words(_unit_rows(c, interleaved, 32))
        units[to][..., 512:] = _scale_words(encode[_unit_rows(s, interleaved, 4).long()])
    escapes = (torch.cat(indices), torch.cat(lost)) if indices else None
    settle(units.device)
    return units, escapes


def unpack(units: Tensor, escapes: Escapes | None, N: int, K: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The exact inverse of `pack`: (codes, sf). Without escapes, blocks whose scale is zero get zero codes."""
    E = units.shape[0]
    codes = torch.empty(E, N, K // 2, dtype=torch.uint8, device=units.device)
    sf = torch.empty(E, N, K // 16, dtype=torch.uint8, device=units.device)
    decode = torch.zeros(256, dtype=torch.uint8, device=units.device)
    decode[torch.tensor(_SCALE_CODES[:127], device=units.device)] = torch.arange(
        127, dtype=torch.uint8, device=units.device
    )
    for at, to in _chunks(units, N, interleaved):
        part, rows = units[to], at[1].stop - at[1].start
        codes[at] = _matrix_rows(_codes(part[..., :512]), interleaved, rows, K // 2)
        sf[at] = _matrix_rows(decode[_scales(part[..., 512:]).long()], interleaved, rows, K // 16)
    if escapes is not None:
        index, lost = escapes
        codes.view(-1, 8)[index] = lost
    return codes, sf


def _chunks(units: Tensor, N: int, interleaved: bool) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Yield (experts and rows of the matrices, experts and rows of their units) in chunks: some experts, or parts of
    one if that is too large and its rows are in order."""
    E, M64, K64, _ = units.shape
    experts = max(1, _CHUNK // max(1, M64 * K64 * UNIT * UNIT))
    blocks = M64 if interleaved else max(1, min(M64, _CHUNK // max(1, K64 * UNIT * UNIT)))
    for e in range(0, E, experts):
        here = slice(e, min(e + experts, E))
        for m in range(0, M64, blocks):
            rows = slice(0, N) if blocks == M64 else slice(m * UNIT, min((m + blocks) * UNIT, N))
            yield (here, rows), (here, slice(m, m + blocks))


# ---- matrices ------------------------------------------------------------------------------------


def in_units(m: Matrices) -> Matrices:
    """Matrices of experts in this layout, as new tensors."""
    units, _ = pack(m.codes, m.block_scales(), m.gated)
    return m._replace(codes=units.view(torch.uint8), sf=None, layout="sm90")


def pack_weights(weights: ExpertWeights) -> ExpertWeights:
    """The weights of experts in this layout, as new tensors."""
    return replace(weights, w13=in_units(weights.w13), w2=in_units(weights.w2))


def packed(weights: ExpertWeights, kernels: str) -> ExpertWeights:
    """The weights in this layout. If they are not, each call packs them, and a warning names the kernels."""
    if weights.layout is not None:
        return weights
    warn_unpacked(kernels)
    return pack_weights(weights)


def packed_linear(m: Matrices, kernels: str) -> Matrices:
    """The matrix of a linear in this layout, as `packed`."""
    if m.layout is not None:
        return m
    warn_unpacked(kernels)
    return pack_linear(m)


def pack_linear(m: Matrices) -> Matrices:
    """The matrix of a linear in this layout, as new tensors."""
    return m._replace(codes=in_units(m.stacked()).codes.transpose(0, 1), sf=None, layout="sm90")


def merge_operands(m: Matrices, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a kernel needs for a low-rank change of packed matrices, in the order of their units: the rows' global
    scales [E, M64, 32, 2], a [E, r, columns] -> [E, r, K64, 16, 4], b [E, N, r] -> [E, M64, r, 32, 2]; fp32."""
    scale = _unit_rows(m.row_scales()[..., None].float(), m.gated, 1)  # E M64 w g h 1 1
    rows = _unit_rows(b.float(), m.gated, b.shape[2])  # E M64 w g h 1 r
    K64 = m.codes.shape[2]
    columns = F.pad(a.float(), (0, K64 * UNIT - a.shape[2])).unflatten(2, (K64, 4, 2, 4, 2))  # k16, k half, c, odd
    return (
        scale.reshape(*scale.shape[:2], 32, 2).contiguous(),
        columns.permute(0, 1, 2, 5, 3, 4, 6).reshape(*a.shape[:2], K64, 16, 4).contiguous(),
        rows.squeeze(5).permute(0, 1, 5, 2, 3, 4).reshape(*rows.shape[:2], -1, 32, 2).contiguous(),
    )


def words(m: Matrices) -> Tensor:
    """Packed codes as kernels take them: int32 [E, M64, words]. ValueError if they are not the size of [N, K]."""
    M64 = -(-m.N // 2 // 32) if m.gated else -(-m.N // UNIT)
    if m.layout != "sm90" or m.codes.shape[1:] != (M64, -(-m.K // UNIT), 4 * UNIT_WORDS):
        raise ValueError(
            f"weights {tuple(m.codes.shape)} in the layout of {m.layout} are not [{m.N}, {m.K}] in that of sm90: load "
            "the layer again"
        )
    return m.codes.view(torch.int32).flatten(2)


# ---- inside: rows of the matrix <-> [E, M64, w, g, row half, K64, bytes of 64 columns] ------------


def _unit_rows(x: Tensor, interleaved: bool, width: int) -> Tensor:
    E, N, K = x.shape
    if interleaved:
        x = F.pad(x.reshape(E, 2, N // 2, K), (0, -K % width, 0, -(N // 2) % 32))
        return x.reshape(E, 2, -1, 4, 8, x.shape[-1] // width, width).permute(0, 2, 3, 4, 1, 5, 6)
    x = F.pad(x, (0, -K % width, 0, -N % UNIT))
    return x.reshape(E, -1, 4, 8, 2, x.shape[-1] // width, width)


def _matrix_rows(x: Tensor, interleaved: bool, N: int, K: int) -> Tensor:
    E = x.shape[0]
    if interleaved:
        x = x.permute(0, 4, 1, 2, 3, 5, 6).reshape(E, 2, -1, x.shape[5] * x.shape[6])
        return x[:, :, : N // 2, :K].reshape(E, N, K)
    return x.reshape(E, -1, x.shape[5] * x.shape[6])[:, :N, :K]


def _code_words(x: Tensor) -> Tensor:
    """Bytes [E, M64, w, g, h, K64, 32] -> words [E, M64, K64, 512]."""
    x = x.unflatten(-1, (4, 2, 4)).to(torch.int32)  # k16, k half, c
    word = torch.zeros_like(x[:, :, :, :, 0, :, :, 0])
    for j, (sign, magnitude) in enumerate(zip(_SIGN, _MAGNITUDE, strict=True)):
        pair = x[:, :, :, :, j % 2, :, :, j // 2]
        pair = pair & 0xF | (pair & 0xF0) << 12
        word |= (pair >> 3 & 0x00010001) << sign | (pair & 0x00070007) << magnitude
    return word.permute(0, 1, 4, 2, 3, 6, 5).flatten(3)  # E M64 K64 | w g c k16


def _codes(words: Tensor) -> Tensor:
    words = words.unflatten(-1, (4, 8, 4, 4)).permute(0, 1, 3, 4, 2, 6, 5)  # E M64 w g K64 k16 c
    halves = []
    for sign, magnitude in zip(_SIGN, _MAGNITUDE, strict=True):
        pair = (words >> sign & 0x00010001) << 3 | words >> magnitude & 0x00070007
        halves.append((pair & 0xF | pair >> 12 & 0xF0).to(torch.uint8))
    x = torch.stack([torch.stack(halves[:2], 4), torch.stack(halves[2:], 4)], -2)  # E M64 w g h K64 k16 kh c
    return x.flatten(-3)


def _scale_words(x: Tensor) -> Tensor:
    """Scale codes int32 [E, M64, w, g, h, K64, 4] -> words [E, M64, K64, 64]."""
    x = x.unflatten(-1, (2, 2))
    pair = x[:, :, :, :, 0] << 4 | x[:, :, :, :, 1] << 20  # E M64 w g K64 p odd
    even, odd = pair.unbind(-1)
    word = even | odd >> 8 | (odd & 0xFF) << 24  # rotated by 8, the odd step's scales are where the even step's were
    return word.permute(0, 1, 4, 2, 3, 5).flatten(3)


def _scales(words: Tensor) -> Tensor:
    words = words.unflatten(-1, (4, 8, 2)).permute(0, 1, 3, 4, 2, 5)  # E M64 w g K64 p
    odd = words << 8 | words >> 24 & 0xFF
    x = torch.stack([torch.stack([w >> 4 & 0xFF, w >> 20 & 0xFF], 4) for w in (words, odd)], -1)
    return x.flatten(-2)  # E M64 w g h K64 k16


def _scale_code(byte: int) -> int:
    exponent, f = byte >> 3, byte & 7
    if exponent:
        return exponent + 2 << 3 | f
    if not f:
        return ZERO
    x = f.bit_length() - 1  # a subnormal f * 2^-9
    return x << 3 | (f << 3 >> x) - 8


_SCALE_CODES = tuple(_scale_code(byte) for byte in range(127)) + (0,)
