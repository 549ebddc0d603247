"""Weights as the Blackwell kernels read them. Plain torch, on any device.

codes  uint8 [E, N, bytes]: the checkpoint's, every row padded with zeros to a multiple of 16 bytes, which TMA needs as
       a stride; unchanged for K % 32 == 0
sf     uint8, flat: for every expert, padded to 128 rows, the 128x4 layout of `format.swizzle_sf`

Rows of [gate; up] are interleaved first: 16 of gate, the same 16 of up, the next 16 of gate, and so on. So the 128 rows
of an MMA contain both, and so do the 32 lanes that a warp of the epilogue reads.

A module keeps both in one tensor [E, 1, 1, bytes], all codes first. Its E slices have equal sizes, but do not belong to
one expert each.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.kernels.sm100.config import TOGETHER
from moe_nvfp4.weights import Matrices


def pack(codes: Tensor, sf: Tensor, projections: int) -> Tensor:
    """Codes [E, N, 8 * K16] and block scales [E, N, K16] of one projection or two stacked ones -> one tensor."""
    parts = [pack_codes(codes, projections), pack_sf(sf, projections)]
    E, size = codes.shape[0], sum(t.numel() for t in parts)
    return torch.cat([t.flatten() for t in parts]).view(E, 1, 1, size // max(1, E))


def unpack(packed: Tensor, rows: int, K16: int, projections: int) -> tuple[Tensor, Tensor]:
    """The exact inverse of `pack`, as new tensors; rows: N."""
    codes, sf = parts(packed, rows, K16)
    codes = apart(codes[..., : 8 * K16], projections).clone(memory_format=torch.contiguous_format)
    return codes, unpack_sf(sf, packed.shape[0], projections, rows, K16)


def parts(packed: Tensor, rows: int, K16: int) -> tuple[Tensor, Tensor]:
    """(codes, sf) inside `packed`, as kernels read them."""
    shape = packed.shape[0], rows, -(-K16 // 2) * 16
    flat, size = packed.flatten(), shape[0] * shape[1] * shape[2]
    return flat[:size].view(shape), flat[size:]


def window(w: Matrices, experts: slice, columns: slice) -> Matrices:
    """These experts and columns of packed weights in the checkpoint's layout. Columns begin at multiples of 64."""
    projections, (codes, sf) = 2 if w.gated else 1, parts(w.codes, w.N, w.blocks)
    first, width = columns.start, min(columns.stop, w.K) - columns.start
    # A tile of scales has 128 rows and 64 columns, in 512 bytes.
    tiles = sf.view(w.codes.shape[0], -1, -(-w.K // 64), 512)[experts]
    tiles, K16 = tiles[:, :, first // 64 : -(-columns.stop // 64)], -(-width // 16)
    codes = apart(codes[experts, :, first // 2 : first // 2 + 8 * K16], projections)
    sf = unpack_sf(tiles.flatten(), tiles.shape[0], projections, w.N, K16)
    return w.of(experts)._replace(codes=codes, sf=sf, K=width, layout=None)


def pack_sf(sf: Tensor, projections: int) -> Tensor:
    """Block scales uint8 [E, N, K16] -> sf, flat, as above."""
    return nvfp4.swizzle_sf(together(sf, projections)).flatten()


def unpack_sf(packed: Tensor, experts: int, projections: int, rows: int, K16: int) -> Tensor:
    """The inverse of `pack_sf`: uint8 [E, N, K16]; rows: N."""
    return apart(nvfp4.unswizzle_sf(packed.view(experts, -1), rows, K16), projections)


def pack_codes(codes: Tensor, projections: int) -> Tensor:
    """Codes uint8 [E, N, 8 * K16] -> codes as above; unchanged for one projection and K % 32 == 0."""
    return pad_rows(together(codes, projections))


def together(x: Tensor, projections: int) -> Tensor:
    """Rows [E, N, bytes] of stacked projections -> 16 rows of each in turn. Each has a multiple of 16 rows."""
    E, N, width = x.shape
    return x.reshape(E, projections, -1, TOGETHER, width).transpose(1, 2).reshape(x.shape) if projections > 1 else x


def apart(x: Tensor, projections: int) -> Tensor:
    """The inverse of `together`."""
    E, N, width = x.shape
    return x.reshape(E, -1, projections, TOGETHER, width).transpose(1, 2).reshape(x.shape) if projections > 1 else x


def pad_rows(codes: Tensor) -> Tensor:
    """Codes with rows padded to a multiple of 16 bytes, as TMA needs them; unchanged for K % 32 == 0."""
    missing = -codes.shape[-1] % 16
    return F.pad(codes, (0, missing)) if missing else codes
