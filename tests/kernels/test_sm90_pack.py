"""The layout of weights on Hopper: `pack` has an exact inverse, and is what its docstring says."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.kernels.sm90 import pack as sm90_pack


def random_bytes(E, N, K, seed=0, scales=(0, 127)):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (E, N, K // 2), generator=g, dtype=torch.uint8)
    return codes, torch.randint(*scales, (E, N, K // 16), generator=g, dtype=torch.uint8)


@settings(max_examples=40, deadline=None)
@given(
    E=st.integers(0, 3),
    halves=st.booleans(),
    rows=st.integers(1, 150),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 99),
    zeros=st.booleans(),
    chunk=st.sampled_from([1, 8192, 1 << 15, 1 << 25]),
)
def test_unpack_is_the_exact_inverse_of_pack(E, halves, rows, blocks, seed, zeros, chunk):
    codes, sf = random_bytes(E, rows * (2 if halves else 1), blocks * 16, seed)
    if zeros:  # with codes that the packed layout cannot hold
        sf[sf < 64] = 0
    whole, _ = sm90_pack.pack(codes, sf, halves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90_pack, "_CHUNK", chunk)  # some experts at a time, or some rows
        packed, escapes = sm90_pack.pack(codes, sf, halves)
        back = sm90_pack.unpack(packed, escapes, codes.shape[1], 2 * codes.shape[2], halves)
    assert torch.equal(packed, whole)
    assert torch.equal(back[0], codes) and torch.equal(back[1], sf)


@pytest.mark.parametrize("halves", [False, True])
def test_the_layout_is_the_one_described(halves):
    """A loop reads a packed unit as sm90_pack's docstring describes it, bf16 arithmetic included."""
    N, K = 128, 128
    codes, sf = random_bytes(1, N, K)
    values = nvfp4.dequantize(codes, sf, None)[0]
    units = sm90_pack.pack(codes, sf, halves)[0][0]
    sign, magnitude = {(0, 0): 15, (1, 0): 12, (0, 1): 14, (1, 1): 13}, {(0, 0): 6, (1, 0): 3, (0, 1): 0, (1, 1): 9}
    for m64, k64 in ((0, 0), (1, 1)):
        unit = units[m64, k64].tolist()
        for w, g, c, ks, h, kh, e in random.Random(0).sample(
            [(w, g, c, ks, h, kh, e) for w in range(4) for g in range(8) for c in range(4) for ks in range(4)
             for h in range(2) for kh in range(2) for e in range(2)], 300,
        ):  # fmt: skip
            half = unit[((w * 8 + g) * 4 + c) * 4 + ks] >> (16 * e) & 0xFFFF
            bits = (half >> sign[h, kh] & 1) << 15 | (half >> magnitude[h, kh] & 7) << 6
            scales = unit[512 + (w * 8 + g) * 2 + ks // 2] & 0xFFFFFFFF
            scales = (scales << 8 | scales >> 24) & 0xFFFFFFFF if ks % 2 else scales
            scale = scales >> (16 * h) & 0x0FF0 | 0x7000
            a, b = torch.tensor([bits, scale]).to(torch.int16).view(torch.bfloat16).double().tolist()
            if halves:
                row = m64 * 32 + w * 8 + g + h * (N // 2)
            else:
                row = m64 * 64 + w * 16 + 2 * g + h
            column = k64 * 64 + ks * 16 + kh * 8 + c * 2 + e
            assert a * b * 2.0**20 == values[row, column].item()


def test_pack_refuses_what_is_no_block_scale():
    codes, sf = random_bytes(1, 64, 64)
    sf[0, 3, 1] = 0x80 | 0x38
    with pytest.raises(ValueError, match="negative"):
        sm90_pack.pack(codes, sf, False)
