"""MXFP4 to NVFP4 by table: the bytes that the search for block scales gives, several times faster.

A value of MXFP4 is an e2m1 code times 2^k, in units of the matrix's global scale, which is a power of two itself. Which
scale and which codes a recipe finds for a block of 16 depends only on which magnitudes the block has, of the seven that
e2m1 knows; 2^k moves the scale by k binades, and changes no code. So the recipe is asked once for each of the 128 sets
of magnitudes. Rows with a block whose candidates are not all normal e4m3 numbers are left to the search.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_nvfp4.format import decode, dequantize, encode
from moe_nvfp4.quantize.recipes import quantize_matrix

LEAST = 40  # e8m0: from this scale on, no value and no quotient is a subnormal float32


class Tables(NamedTuple):
    """What a recipe makes of blocks, by their set of magnitudes (bit i: magnitude i + 1 of e2m1) at k = 0.

    present  uint8 [256]: the set of the two codes in a byte
    sf       int16 [128]: the block scale, as an e4m3 byte; 0 without magnitudes
    codes    uint8 [128 * 256]: the new byte for each byte of codes
    lowest   int16 [128]: the least k at which all candidates are normal; the largest is 8 for all
    """

    present: Tensor
    sf: Tensor
    codes: Tensor
    lowest: Tensor


@lru_cache
def tables(recipe: str) -> Tables | None:
    """The tables of a recipe that searches; None if it loses something of some block."""
    with torch.device("cpu"):
        nibbles = torch.arange(16, dtype=torch.uint8)
        values = decode(nibbles[::2] | nibbles[1::2] << 4)
        sets = torch.arange(128)
        has = (sets[:, None] >> torch.arange(7) & 1).bool()  # [128, 7]
        blocks = torch.zeros(128, 16, dtype=torch.float32)
        blocks[:, :7] = torch.where(has, values[1:8], 0.0)
        one = torch.ones((), dtype=torch.float32)
        codes, sf, _ = quantize_matrix(blocks, recipe, one)
        if not torch.equal(dequantize(codes, sf, one), blocks):
            return None
        packed = encode(values.expand(128, 16), sf, one)  # [128, 8]: the new code of each code
        new = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
        low, high = torch.arange(256) & 15, torch.arange(256) >> 4
        bit = 1 << (nibbles % 8).int() >> 1  # none for 0
        by_max = (blocks.amax(dim=1) / 6).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
        lowest = -((by_max - 2 - 8) // 8)  # the lowest candidate is two numbers below max's, normal ones begin at 8
        return Tables(
            (bit[low] | bit[high]).to(torch.uint8),
            sf.view(torch.uint8).view(-1).to(torch.int16),
            (new[:, low] | new[:, high] << 4).flatten().contiguous(),
            lowest,
        )


@lru_cache
def _tables_on(device: torch.device, recipe: str) -> Tables | None:
    known = tables(recipe)
    return None if known is None else Tables(*(t.to(device) for t in known))


def cast_exactly(codes: Tensor, exponents: Tensor, global_scale: Tensor, recipe: str) -> tuple[Tensor, Tensor] | None:
    """(codes uint8 [n, K/2], sf float8_e4m3fn [n, K/16]) of rows of MXFP4, as `quantize_matrix` makes them of the
    values; None where it must be asked.

    codes         uint8 [n, K/2]
    exponents     e8m0, uint8 [n, K/32]
    global_scale  fp32 0-d, on a CPU: a power of two
    """
    known = _tables_on(codes.device, recipe)
    mantissa, exponent = torch.frexp(global_scale)
    if known is None or mantissa != 0.5:
        return None
    index = codes.long()
    present = known.present[index].view(len(codes), -1, 8)  # [n, K/16, 8]
    for half in (4, 2, 1):
        present = present[..., :half] | present[..., half:]
    sets = present[..., 0].long()  # [n, K/16]
    used = sets > 0
    of_blocks = exponents.repeat_interleave(2, dim=1).to(torch.int16)
    k = of_blocks - 127 - (int(exponent) - 1)
    if not (~used | (k >= known.lowest[sets]) & (k <= 8) & (of_blocks >= LEAST)).all():
        return None
    sf = torch.where(used, known.sf[sets] + 8 * k, 0).to(torch.uint8)
    new = known.codes[(sets[..., None] << 8) + index.view(*sets.shape, 8)]
    return new.view(codes.shape), sf.view(torch.float8_e4m3fn)
