"""The NVFP4 number format: quantize, dequantize, and the scale-factor layout of the tensor cores.

One sentence defines the format, here and everywhere in the package:

    value = code * sf * global_scale

* ``code``: e2m1, four bits: 0 .5 1 1.5 2 3 4 6, bit 3 the sign. Two to a byte, element 2i in the
  low nibble: uint8 ``[..., K/2]``.
* ``sf``: e4m3, never negative, one for each block of 16 consecutive elements of K:
  float8_e4m3fn ``[..., K/16]``. As an argument it may also be uint8 that holds the same bytes.
* ``global_scale``: float32, usually amax / (6 * 448), in the *decode* direction: it multiplies.
  One for the whole tensor (0-d), or any shape that broadcasts to the shape without K: ``[M]``
  is one for each row.

That is NVIDIA's format (blocks of 16, e4m3 scales, an fp32 scale above them); the 128x4 layout of
the scale factors is the one in the cuBLAS and PTX (tcgen05) documentation. See docs/format.md.

Everything is plain torch, on CPU and CUDA tensors, and bit-exact: true divisions, ties to even.
Nothing waits for the device except ``quantize(check=True)``. Work goes through the rows in chunks,
so temporaries do not grow with the tensor (only a non-contiguous one is copied first).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SF_VEC_SIZE = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SF_DTYPES = (torch.float8_e4m3fn, torch.uint8)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
SEARCH_SF_MAX = 256.0  # leaves room to try larger scales: 1.5 * 256 = 384 is an e4m3 number, 1.75 * 256 = 448 the last

# Elements worked on at once. On a CPU the temporaries of a chunk stay in the L2 cache; on a GPU a
# chunk fills the machine and its temporaries stay small beside a stack of experts.
_CPU_CHUNK = 1 << 17
_CUDA_CHUNK = 1 << 24


# ---- quantize ------------------------------------------------------------------------------------


def global_scale_for(amax: Tensor | float, sf_max: float = E4M3_MAX) -> Tensor:
    """The global scale ``amax / (6 * sf_max)``: float32, of amax's shape.

    It makes the largest block scale ``sf_max``: 448 is all of e4m3, 256 leaves the headroom that
    four-over-six recipes need. An amax of 0 gives 1.0. The result is never below the smallest
    normal float32, so it cannot underflow to 0. NaN stays NaN.
    """
    amax = amax.float() if isinstance(amax, Tensor) else torch.tensor(amax, dtype=torch.float32)
    scale = _div_number(amax, E2M1_MAX * sf_max).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def block_scales(x: Tensor, global_scale: Tensor | float, check: bool = True) -> Tensor:
    """``sf = e4m3_rne(min(blockmax / 6 / global_scale, 448))``: float8_e4m3fn ``[..., K/16]``.

    x: float32, bfloat16 or float16 ``[..., K]``; ValueError unless K % 16 == 0 and, with `check` (see `quantize`),
    global_scale is positive and finite. A zero block has sf 0, a block with a NaN has sf NaN.
    """
    check_x(x)
    blocks, gs = _blocks(x, as_scale(global_scale, x, check))
    sf = blocks.new_empty(blocks.shape[:2], dtype=torch.float8_e4m3fn)
    for c in _chunks(blocks):
        sf[c] = _block_scales(blocks[c].float().abs(), gs[c])
    return sf.view(_sf_shape(x.shape))


def encode(x: Tensor, sf: Tensor, global_scale: Tensor | float, check: bool = True) -> Tensor:
    """``code = e2m1_rne(x / (sf * global_scale))``, two to a byte: uint8 ``[..., K/2]``.

    x, global_scale, check: as in `block_scales`; sf: ``[..., K/16]``. Magnitudes above 6 saturate. The sign bit says
    ``x < 0`` even where the magnitude rounds to zero (code 8); -0.0 has code 0. Where sf is 0 all
    codes are 0; where it is NaN they mean nothing.
    """
    check_x(x)
    blocks, gs = _blocks(x, as_scale(global_scale, x, check))
    sf = _as_e4m3(sf, x.shape).reshape(blocks.shape[:2])
    codes = blocks.new_empty((*blocks.shape[:2], 8), dtype=torch.uint8)
    for c in _chunks(blocks):
        values = blocks[c].float()
        codes[c] = _encode(values, values.abs(), sf[c], gs[c])
    return codes.view(*x.shape[:-1], x.shape[-1] // 2)


def sf_max(four_over_six: bool) -> float:
    """The largest block scale of a row whose global scale is derived from that row."""
    return SEARCH_SF_MAX if four_over_six else E4M3_MAX


def row_scales(x: Tensor, four_over_six: bool = False) -> Tensor:
    """The dynamic global scale of each row of x ``[..., K]``: float32 ``[...]``.

    Its largest magnitude / (6 * 448), or with `four_over_six` / (6 * 256): room for block scales half as large again.
    """
    return global_scale_for(x.abs().amax(dim=-1), sf_max(four_over_six))


def quantize(
    x: Tensor, global_scale: Tensor | float | None = None, check: bool = True, four_over_six: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x float32, bfloat16 or float16 ``[..., K]`` -> ``(codes, sf, global_scale)``.

    uint8 ``[..., K/2]``, float8_e4m3fn ``[..., K/16]``, float32 (0-d, or as given). A global_scale
    of None means one for the whole tensor, from its largest magnitude.

    four_over_six: a block may have the scale that makes its largest magnitude code 4 in place of code 6, whichever has
    the smaller squared error (docs/numerics.md has the rule to the bit). The steps next to the largest are then 1 and
    not 2 (arXiv 2512.02010). A given global_scale is used as it is; without one it leaves room for such scales.

    ValueError if K % 16 != 0 and, with `check`, if x has NaN or Inf or a given global_scale is not
    positive and finite. ``check=False`` never waits for the device: for code that is compiled or
    captured in a graph. NaN in a block then shows as sf NaN.
    """
    check_x(x)
    if check or global_scale is None:
        amax = _amax(x)
    if check and not amax.isfinite():
        raise ValueError(
            f"{int((~x.isfinite()).sum())} of {x.numel()} elements are NaN or Inf, which NVFP4 "
            "cannot hold: find out where they come from, or replace them (torch.nan_to_num)"
        )
    if global_scale is None:
        global_scale = global_scale_for(amax, sf_max(four_over_six))
    else:
        global_scale = as_scale(global_scale, x, check)

    blocks, gs = _blocks(x, global_scale)
    sf = blocks.new_empty(blocks.shape[:2], dtype=torch.float8_e4m3fn)
    codes = blocks.new_empty((*blocks.shape[:2], 8), dtype=torch.uint8)
    for c in _chunks(blocks):
        values = blocks[c].float()
        magnitudes = values.abs()
        sf_c = (_four_over_six if four_over_six else _block_scales)(magnitudes, gs[c])
        codes[c] = _encode(values, magnitudes, sf_c, gs[c])
        sf[c] = sf_c
    return codes.view(*x.shape[:-1], x.shape[-1] // 2), sf.view(_sf_shape(x.shape)), global_scale


def pad_k(x: Tensor) -> Tensor:
    """x with zeros appended to its last dimension, up to a multiple of 16."""
    missing = -x.shape[-1] % SF_VEC_SIZE
    return F.pad(x, (0, missing)) if missing else x


def pack(nibbles: Tensor) -> Tensor:
    """uint8 ``[..., K]`` of values < 16 -> uint8 ``[..., K/2]``, the even element in the low half.

    ValueError if K is odd, or for another dtype.
    """
    _check_bytes("nibbles", nibbles)
    if nibbles.shape[-1] % 2:
        raise ValueError(f"pack puts two nibbles into a byte, but K = {nibbles.shape[-1]} is odd")
    pairs = nibbles.contiguous().view(torch.int16)  # little-endian: the even one is the low byte
    return ((pairs | pairs >> 4) & 0xFF).to(torch.uint8)


# ---- dequantize ----------------------------------------------------------------------------------


def unpack(codes: Tensor) -> Tensor:
    """uint8 ``[..., K/2]`` -> uint8 ``[..., K]`` of values < 16: the inverse of `pack`."""
    _check_bytes("codes", codes)
    pairs = codes.contiguous().to(torch.int16)
    return ((pairs | pairs << 4) & 0x0F0F).view(torch.uint8)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The e2m1 values of packed codes, unscaled: uint8 ``[..., K/2]`` -> dtype ``[..., K]``."""
    _check_bytes("codes", codes)
    flat = codes.reshape(-1)
    out = flat.new_empty((flat.shape[0], 2), dtype=dtype)
    for c in _chunks(out):
        out[c] = (_decode(flat[c]).to(dtype) * _DECODE_UNIT).view(-1, 2)
    return out.view(*codes.shape[:-1], 2 * codes.shape[-1])


def dequantize(
    codes: Tensor,
    sf: Tensor,
    global_scale: Tensor | float | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``(code * sf) * global_scale`` in float32, then cast: dtype ``[..., K]``.

    codes: uint8 ``[..., K/2]``; sf: ``[..., K/16]``. code * sf is exact (at most 6 significant
    bits), so a float32 value is rounded once. A global_scale of None stops at code * sf.
    """
    _check_bytes("codes", codes)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    sf = _as_e4m3(sf, shape)
    scale = as_scale(1.0 if global_scale is None else global_scale, codes, check=False)
    rows, width, gs = _rows(shape, scale)
    codes = codes.reshape(rows, width // 2)
    sf = sf.reshape(rows, width // SF_VEC_SIZE)
    out = codes.new_empty((rows, width // SF_VEC_SIZE, SF_VEC_SIZE), dtype=dtype)
    for c in _chunks(out):
        values = _decode(codes[c]).float().view(-1, *out.shape[1:])
        values *= (sf[c].float() * _DECODE_UNIT).unsqueeze(-1)  # a power of two: still exact
        if global_scale is not None:
            values *= gs[c].unsqueeze(-1)
        out[c] = values
    return out.view(shape)


# ---- the 128x4 layout of scale factors -----------------------------------------------------------


def swizzle_sf(sf: Tensor) -> Tensor:
    """Row-major scale factors ``[..., M, K16]`` -> the 128x4 layout ``[..., padM * padK16]``.

    M is padded with zeros to a multiple of 128 and K16 to one of 4, in every matrix. Each tile of
    128 rows and 4 columns is 512 bytes in a row, tiles along K16 first (all divisions floor):

        off(m, k) = (m/128 * ceil(K16/4) + k/4) * 512 + (m%32) * 16 + (m/32)%4 * 4 + k%4
    """
    if sf.dim() < 2 or sf.dtype not in SF_DTYPES:
        raise ValueError(f"sf must be [..., M, K/16] float8_e4m3fn or its bytes, got {sf.dtype} {list(sf.shape)}")
    *batch, M, K16 = sf.shape
    padded = F.pad(sf.view(torch.uint8), (0, -K16 % 4, 0, -M % 128))
    tiles = padded.reshape(*batch, -(-M // 128), 4, 32, -(-K16 // 4), 4)
    return tiles.transpose(-4, -2).flatten(-5).view(sf.dtype)


def unswizzle_sf(flat: Tensor, M: int, K16: int) -> Tensor:
    """The 128x4 layout ``[..., padM * padK16]`` -> row-major ``[..., M, K16]``."""
    row_tiles, col_tiles = -(-M // 128), -(-K16 // 4)
    if flat.dim() < 1 or flat.shape[-1] != 512 * row_tiles * col_tiles or flat.dtype not in SF_DTYPES:
        raise ValueError(
            f"scale factors of {M} rows and {K16} blocks are {512 * row_tiles * col_tiles} of float8_e4m3fn or its "
            f"bytes in the 128x4 layout, got {flat.dtype} {list(flat.shape)}"
        )
    tiles = flat.view(torch.uint8).reshape(*flat.shape[:-1], row_tiles, col_tiles, 32, 4, 4)
    padded = tiles.transpose(-4, -2).reshape(*flat.shape[:-1], 128 * row_tiles, 4 * col_tiles)
    return padded[..., :M, :K16].contiguous().view(flat.dtype)


# Grouped rows: R rows sorted by expert, those of expert e from offsets[e] to offsets[e + 1]. The
# layout gives every expert tiles of its own: its rows are padded to a multiple of 128, experts
# follow one another, and an expert without rows takes no space. How much space that is depends on
# the offsets, which only the device knows, so buffers have the size of the worst case.


def grouped_sf_rows(num_rows: int, num_groups: int) -> int:
    """Padded rows that always suffice for num_rows rows in num_groups groups: 128-row tiles."""
    return (num_rows + 127 * min(num_rows, num_groups)) // 128 * 128


def padded_rows(offsets: Tensor, num_rows: int) -> Tensor:
    """Where each of num_rows grouped rows lies among the padded rows: int64 ``[num_rows]``.

    offsets: int32 ``[E+1]``, ascending from 0. Rows from ``offsets[E]`` on are unrouted: they get
    `grouped_sf_rows`, one past the last padded row.
    """
    num_groups = offsets.shape[0] - 1
    sizes = (offsets.diff() + 127) // 128 * 128
    shifts = sizes.cumsum(0) - sizes - offsets[:-1]  # of a group: padded row - row
    rows = torch.arange(num_rows, dtype=offsets.dtype, device=offsets.device)
    group = torch.searchsorted(offsets, rows, right=True) - 1
    padded = rows + shifts[group.clamp(max=num_groups - 1)]
    return torch.where(group < num_groups, padded, grouped_sf_rows(num_rows, num_groups))


def swizzle_sf_grouped(sf: Tensor, offsets: Tensor) -> Tensor:
    """Grouped rows ``[R, K16]`` -> the 128x4 layout ``[grouped_sf_rows(R, E) * padK16]``.

    offsets: int32 ``[E+1]``. Padding is 0; unrouted rows (see `padded_rows`) are dropped.
    """
    R, K16 = sf.shape
    bound = grouped_sf_rows(R, offsets.shape[0] - 1)
    padded = torch.zeros(bound + 1, K16, dtype=torch.uint8, device=sf.device)
    padded[padded_rows(offsets, R)] = sf.view(torch.uint8)
    return swizzle_sf(padded[:bound]).view(sf.dtype)


def unswizzle_sf_grouped(flat: Tensor, offsets: Tensor, num_rows: int, K16: int) -> Tensor:
    """The inverse of `swizzle_sf_grouped`: ``[num_rows, K16]``. Unrouted rows come back as 0."""
    bound = grouped_sf_rows(num_rows, offsets.shape[0] - 1)
    padded = F.pad(unswizzle_sf(flat.view(torch.uint8), bound, K16), (0, 0, 0, 1))
    return padded[padded_rows(offsets, num_rows)].view(flat.dtype)


# ---- inside --------------------------------------------------------------------------------------


def _block_scales(magnitudes: Tensor, gs: Tensor, code: float = E2M1_MAX) -> Tensor:
    """|x| float32 [rows, blocks, 16], gs [rows, 1] -> sf e4m3 [rows, blocks] that give a block's largest this code."""
    largest = magnitudes
    for n in (8, 4, 2, 1):  # by halves: torch's CPU reduction of so short a dimension is scalar
        largest = torch.maximum(largest[..., :n], largest[..., n:])
    sf = _div(_div_number(largest.squeeze(-1), code), gs)
    return sf.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)  # the cast alone makes 480 a NaN


def _four_over_six(magnitudes: Tensor, gs: Tensor) -> Tensor:
    """As `_block_scales`, for code 6 or for code 4: whichever has the smaller error, code 6 if they are equal.

    It is code 6, too, where its scale is below e4m3's smallest normal number (or zero) or is NaN, and where
    1 / (sf * gs) might not be a normal number. So no element exceeds 6 + 6/16 times its scale.
    """
    six, four = _block_scales(magnitudes, gs), _block_scales(magnitudes, gs, code=4.0)
    sensible = (six.float() >= 2.0**-6) & (gs >= 2.0**-100) & (gs <= 2.0**100)
    better = _squared_error(magnitudes, four, gs) < _squared_error(magnitudes, six, gs)
    return torch.where(sensible & better, four.view(torch.uint8), six.view(torch.uint8)).view(torch.float8_e4m3fn)


def _squared_error(magnitudes: Tensor, sf: Tensor, gs: Tensor) -> Tensor:
    """The squared error of blocks with these scales, in units of gs^2: float32 [rows, blocks].

    Quotients are products with the scale's rounded inverse (exact in float64), rounded to multiples of 2^-10, ties to
    even. Each is then at most 1 from the nearest e2m1 value, and the sum of the squares of these distances, at most
    2^24 times 2^-20, is exact in float32 in any order, with fused multiplications or without.
    """
    sf = sf.float()
    inverse = _div(torch.ones_like(sf), sf * gs).double().unsqueeze(-1)
    a = (magnitudes.double() * inverse).mul_(2.0**10).round_().float() * 2.0**-10
    nearest = torch.where(a < 2, (a * 2).round() * 0.5, torch.where(a < 4, a.round(), (a * 0.5).round() * 2))
    return (a - nearest.clamp_(max=6)).square_().sum(dim=-1) * (sf * sf)


def _encode(x: Tensor, magnitudes: Tensor, sf: Tensor, gs: Tensor) -> Tensor:
    """x and |x| float32 [rows, blocks, 16], sf e4m3 [rows, blocks] -> codes [rows, blocks, 8]."""
    sf = sf.float()
    scale = torch.where(sf == 0, torch.inf, sf * gs).unsqueeze(-1)  # x / inf is code 0
    a = _div(magnitudes, scale)
    # Values are 0.5 apart below 2, then 1 apart, then 2. In each of these ranges the code is a line in a,
    # rounded with ties to even, and is the lowest of the three lines.
    code = torch.minimum((a * 2).round_(), a.round().add_(2))
    code = torch.minimum(code, (a * 0.5).round_().add_(4)).clamp_(max=7)
    below_zero = torch.where(sf == 0, -torch.inf, 0.0).unsqueeze(-1)  # no sign where sf is 0
    return pack(code.to(torch.uint8) | (x < below_zero).to(torch.uint8) << 3)


_DECODE_UNIT = 2.0**14  # between the exponent biases of e2m1 (1) and float16 (15)


def _decode(codes: Tensor) -> Tensor:
    """Packed codes [..., n] -> their values * 2^-14, float16 [..., 2n].

    It moves a code's sign, exponent and mantissa bits to where float16 has its own: that is this
    number. 0.5, a subnormal of e2m1, becomes a subnormal of float16.
    """
    pairs = codes.to(torch.int32)
    pairs |= pairs << 12  # the even element's nibble at bit 0, the odd one's at bit 16
    return ((pairs & 0x00080008) << 12 | (pairs & 0x00070007) << 9).view(torch.float16)


def _amax(x: Tensor) -> Tensor:
    """The largest |x|: float32, 0-d. NaN if there is one. An empty tensor has 0."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    low, high = x.detach().aminmax()
    return torch.maximum(-low, high).float()


def _div(a: Tensor, b: Tensor) -> Tensor:
    """a / b in float32, correctly rounded wherever it runs."""
    if a.is_cuda and torch.compiler.is_compiling():
        # Triton divides float32 approximately. A float64 quotient rounded to float32 is exact:
        # 53 bits are enough for the double rounding not to show. (Its conversion to e4m3 still
        # rounds twice, so that code generated for CUDA can differ in a block scale near a tie.)
        return (a.double() / b.double()).float()
    return a / b


def _div_number(a: Tensor, b: float) -> Tensor:
    """a / b for a Python number, which torch would replace by a * (1 / b) on CUDA."""
    return _div(a, a.new_full((), b))


def check_x(x: Tensor) -> None:
    """ValueError unless x is float32, bfloat16 or float16 ``[..., K]`` with whole blocks."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x must be float32, bfloat16 or float16, not {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % SF_VEC_SIZE:
        K = x.shape[-1] if x.dim() else "none"
        raise ValueError(
            f"K = {K} (the last dimension of {list(x.shape)}) is not a multiple of 16, the NVFP4 "
            "block: append zeros first, with pad_k(x)"
        )


def _check_bytes(name: str, t: Tensor) -> None:
    """ValueError unless uint8: the sign of an int8, say, would spill into the bits of the second element."""
    if t.dtype != torch.uint8:
        raise ValueError(f"{name} must be uint8, not {t.dtype}: view bytes as such (codes.view(torch.uint8))")


def as_scale(global_scale: Tensor | float, like: Tensor, check: bool = True) -> Tensor:
    """The scale as float32, on the device of `like`. With `check`, which waits for the device, ValueError unless it is
    positive and finite."""
    if isinstance(global_scale, Tensor):
        scale = global_scale.detach().to(like.device, torch.float32)
    else:  # not torch.tensor, which copies from the host: a CUDA graph cannot capture that
        scale = torch.full((), global_scale, dtype=torch.float32, device=like.device)
    if check and (bad := scale[~is_global_scale(scale)]).numel():
        raise ValueError(f"global_scale must be positive and finite, got {bad[0].item()}")
    return scale


def is_global_scale(scale: Tensor) -> Tensor:
    """Whether each number can be a global scale: bool, of the same shape. 0, Inf, NaN and negative ones cannot."""
    return (scale > 0) & scale.isfinite()


def _sf_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // SF_VEC_SIZE)


def _as_e4m3(sf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """sf as float8_e4m3fn; ValueError unless it fits values of this shape."""
    if shape[-1] % SF_VEC_SIZE or tuple(sf.shape) != _sf_shape(shape):
        raise ValueError(
            f"sf has shape {list(sf.shape)}, but values of shape {list(shape)} need one scale for "
            "every 16 elements of the last dimension"
        )
    if sf.dtype not in SF_DTYPES:
        raise ValueError(f"sf must be float8_e4m3fn, or uint8 with its bytes, not {sf.dtype}")
    return sf.view(torch.float8_e4m3fn)


def _rows(shape: tuple[int, ...], global_scale: Tensor) -> tuple[int, int, Tensor]:
    """Values of this shape as rows with one global scale each: (rows, width, gs [rows, 1])."""
    *lead, K = shape
    rows = 1
    for n in lead:
        rows *= n
    if global_scale.numel() == 1:  # then a row can be a single block, and a chunk any number of blocks
        rows, K = rows * (K // SF_VEC_SIZE), SF_VEC_SIZE
        return rows, K, global_scale.reshape(1, 1).expand(rows, 1)
    try:
        return rows, K, global_scale.expand(lead).reshape(rows, 1)
    except RuntimeError:
        raise ValueError(
            f"global_scale of shape {list(global_scale.shape)} does not broadcast to {lead}, the "
            "shape of the values without K"
        ) from None


def _blocks(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """x as [rows, blocks, 16] with one global scale for a row: gs [rows, 1]."""
    rows, width, gs = _rows(x.shape, global_scale)
    return x.detach().reshape(rows, width // SF_VEC_SIZE, SF_VEC_SIZE), gs


def _chunks(rows: Tensor) -> list[slice]:
    """Slices of the first dimension, a chunk of elements each."""
    if torch.compiler.is_compiling():
        return [slice(None)]  # a compiler fuses the whole expression, without temporaries
    chunk = _CUDA_CHUNK if rows.is_cuda else _CPU_CHUNK
    step = max(1, chunk // max(1, rows[:1].numel()))
    return [slice(i, i + step) for i in range(0, rows.shape[0], step)]
