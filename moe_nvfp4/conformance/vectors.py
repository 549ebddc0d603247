"""The cases: layers of NVFP4 experts and their inputs, the same bits on every machine.

They are made anew, not stored, since a layer of gpt-oss's size alone has 28 MB. Every number comes from a counter by
integer arithmetic (splitmix64), and what stands for bf16 is exact in it. `CHECKSUMS` holds the SHA-256 of each case.
`python -m moe_nvfp4.conformance --write DIR` writes them as safetensors, with the expected results, for programs in
other languages.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
CHECKSUMS: dict[str, str] = json.loads(Path(__file__).with_name("checksums.json").read_text("utf-8"))
USUAL = (0x30, 0x40)  # bytes of block scales, e4m3: 0.5 to 1.875


class Given(NamedTuple):
    """What a function under test gets: tensors on its device. It returns y [T, H], of any floating dtype.

    A weight is code * block scale * global scale. Codes are e2m1, two in a byte, that of the even column in the low
    nibble; block scales e4m3, one for 16 columns of a row. What a function does not compute, it raises as
    NotImplementedError, whose message is shown.

    codes13      uint8 [E, N13, H/2]   rows [gate; up], N13 = 2I; without a gate projection up alone, N13 = I
    sf13         uint8 [E, N13, H/16]  bytes of e4m3
    gate_scale   fp32 [E] or None      global scale of gate's rows
    up_scale     fp32 [E]              and of up's
    codes2       uint8 [E, H, I/2]
    sf2          uint8 [E, H, I/16]
    down_scale   fp32 [E]
    bias13       bf16 [E, N13] or None
    bias2        bf16 [E, H] or None
    gate         what happens between the two products, by name and numbers: see `expected.between`
    x            bf16 [T, H]
    ids          int64 [T, top_k]      experts; -1: none, such as an expert of another rank
    routing      fp32 [T, top_k]       their weights; they need not sum to 1
    x_scale      fp32 [E] or None      W4A4: the static global scale with which x is quantized to NVFP4
    h_scale      fp32 [E] or None      and h; None: activations stay as they are (W4A16)
    """

    codes13: Tensor
    sf13: Tensor
    gate_scale: Tensor | None
    up_scale: Tensor
    codes2: Tensor
    sf2: Tensor
    down_scale: Tensor
    bias13: Tensor | None
    bias2: Tensor | None
    gate: dict[str, Any]
    x: Tensor
    ids: Tensor
    routing: Tensor
    x_scale: Tensor | None
    h_scale: Tensor | None


@dataclass(frozen=True)
class Recipe:
    """How a case is made.

    E, H, I, T, top_k  sizes
    gate               see `expected.between`
    bias               whether the products have biases
    separate           whether gate and up have global scales of their own
    scale              what global scales are multiplied by: for up and gate, for down
    sf                 bytes of block scales, from and up to
    zeros              of 8 blocks, how many have a block scale of 0
    ids                the experts of each token, where they matter
    static             whether activations are quantized
    signed             whether routing weights have either sign
    tail               whether gate's sums are all near -3.5, where gelu by tanh and by erf differ by a quarter
    """

    about: str
    E: int = 8
    H: int = 256
    I: int = 128
    T: int = 17
    top_k: int = 2
    gate: dict[str, Any] = field(default_factory=lambda: {"kind": "silu"})
    bias: bool = False
    separate: bool = False
    scale: tuple[float, float] = (1.0, 1.0)
    sf: tuple[int, int] = USUAL
    zeros: int = 0
    ids: tuple[tuple[int, ...], ...] | None = None
    static: bool = False
    signed: bool = False
    tail: bool = False


OAI = {"kind": "silu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
RECIPES = {
    "plain": Recipe("silu; one global scale for gate and up, as most files have it"),
    "one token": Recipe("T = 1", T=1),
    "many tokens": Recipe("more than a tile for each expert", E=4, T=300),
    "separate scales": Recipe("gate and up of an expert have global scales of their own", separate=True),
    "small scales": Recipe("global scales far below 1, whose reciprocals are large", scale=(2.0**-12, 2.0**12)),
    "large scales": Recipe("global scales far above 1", scale=(2.0**12, 2.0**-12)),
    "biases": Recipe("biases of both products", bias=True),
    "gpt-oss": Recipe("its gate: clamped, with biases", gate=OAI, bias=True, scale=(4.0, 0.25)),
    "clamped silu": Recipe("gate and up clamped before silu", gate={"kind": "silu", "limit": 2.0}, scale=(2.0, 1.0)),
    "gelu": Recipe("gelu by tanh", gate={"kind": "gelu_tanh"}),
    "gelu of -3.5": Recipe("gelu by tanh, not by erf", gate={"kind": "gelu_tanh"}, scale=(1.0, 2.0**10), tail=True),
    "relu2": Recipe("no gate projection: the square of relu", gate={"kind": "relu2", "gated": False}),
    "absent experts": Recipe("ids of -1", ids=((0, -1), (-1, -1), (-1, 3), (7, 2), (5, -1), (-1, 0))),
    "nobody": Recipe("no token has an expert: y is 0", ids=((-1, -1),) * 3),
    "five experts": Recipe("E is no power of two", E=5),
    "sixty experts": Recipe("E is no power of two, and most are not hit", E=60, H=64, I=64, top_k=4, T=9),
    "one expert": Recipe("E = 1", E=1, top_k=1),
    "one token each": Recipe("each expert has one token, or none", E=16, top_k=1, T=11,
                             ids=tuple((3 * t % 16,) for t in range(11))),
    "twice": Recipe("a token's slots name one expert twice, with two weights", ids=((3, 3), (0, 5), (7, 7), (3, 0))),
    "negative weights": Recipe("routing weights of either sign", signed=True),
    "all experts": Recipe("top_k = E", top_k=8, T=5),
    "one for all": Recipe("all tokens have the same experts", T=40, ids=((6, 1),) * 40),
    "2880": Recipe("gpt-oss's sizes, which are no multiple of 128", E=2, H=2880, I=2880, T=3, gate=OAI, bias=True),
    "odd sizes": Recipe("multiples of 16 only", E=3, H=208, I=176),
    "subnormal scales": Recipe("block scales below e4m3's smallest normal number", sf=(0x01, 0x08), scale=(64.0, 64.0)),
    "all scales": Recipe("block scales from 2^-9 to 448", sf=(0x01, 0x7F), scale=(2.0**-6, 2.0**-6)),
    "zero blocks": Recipe("block scales of 0 over codes that are not", zeros=4),
    "W4A4": Recipe("activations in NVFP4, with static scales", static=True),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The numbers of a case: as `Given`, but NumPy arrays, with bf16 as float32."""

    name: str
    about: str
    gate: dict[str, Any]
    codes13: Array
    sf13: Array
    gate_scale: Array | None
    up_scale: Array
    codes2: Array
    sf2: Array
    down_scale: Array
    bias13: Array | None
    bias2: Array | None
    x: Array
    ids: Array
    routing: Array
    x_scale: Array | None
    h_scale: Array | None

    def arrays(self) -> dict[str, Array]:
        """Those that are there, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}

    def checksum(self) -> str:
        """SHA-256 of names, shapes and bytes, and of the gate."""
        digest = hashlib.sha256(json.dumps(self.gate, sort_keys=True).encode())
        for name, array in sorted(self.arrays().items()):
            digest.update(f"{name} {array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def on(self, device: torch.device | str) -> Given:
        """The tensors that a function gets: copies, since it may change them in place."""
        found: dict[str, Any] = {name: torch.tensor(array, device=device) for name, array in self.arrays().items()}
        for name in {"x", "bias13", "bias2"} & set(found):
            found[name] = found[name].to(torch.bfloat16)  # exact
        absent = dict.fromkeys(set(Given._fields) - set(found))
        return Given(**(absent | found | {"gate": self.gate}))


def make(name: str) -> Case:
    """A case. RuntimeError if its numbers are not those of `CHECKSUMS`."""
    case = _make(name, RECIPES[name])
    if CHECKSUMS.get(name) != case.checksum():
        raise RuntimeError(f"the case {name!r} has other numbers on this machine than elsewhere: please open an issue")
    return case


def _make(name: str, r: Recipe) -> Case:
    E, H, I = r.E, r.H, r.I
    gated = r.gate.get("gated", True)
    N13 = 2 * I if gated else I
    ids = np.array(r.ids, dtype=np.int64) if r.ids is not None else _experts(name, r.T, E, r.top_k)
    T = len(ids)

    def scales(what: str, K: int, factor: float) -> Array:
        """About 1 / (3.6 sqrt(K)), so that y is of x's size; different for each expert."""
        size = factor * 2.0 ** -np.round(np.log2(3.6 * K**0.5))
        return ((96 + _bits(f"{name} {what}", E) % 128) / 128 * size).astype(np.float32)

    def sf(what: str, *shape: int) -> Array:
        low, high = r.sf
        found = (low + _bits(f"{name} {what}", *shape) % (high - low)).astype(np.uint8)
        found[_bits(f"{name} zeros of {what}", *shape) % 8 < r.zeros] = 0
        return found

    def halves(what: str, *shape: int, unit: float = 1 / 64) -> Array:
        """Multiples of `unit`, up to 127 of them, of either sign."""
        return ((_bits(f"{name} {what}", *shape) % 255).astype(np.float32) - 127) * np.float32(unit)

    codes13 = (_bits(f"{name} codes13", E, N13, H // 2) % 256).astype(np.uint8)
    x = halves("x", T, H)
    up = gate = scales("up", H, r.scale[0])
    if r.separate:
        gate = scales("gate", H, r.scale[0])
    if r.tail:  # products of x and gate are not positive: |x| is 1, a code 2.25 and a block scale 1.08, in the mean
        x, up = np.abs(x), np.full(E, np.float32(3.5 / (1.08 * 2.25 * H)))
        codes13[:, :I] |= 0x88
        gate = up
    routing = (1 + _bits(f"{name} routing", *ids.shape) % 255) / 256
    if r.signed:
        routing *= 1 - 2 * (_bits(f"{name} signs", *ids.shape) % 2).astype(np.float64)
    more = np.arange(E) % 4 / 4  # experts differ, and x from h
    x_scale, h_scale = ((2.0**-9 * (1 + m)).astype(np.float32) if r.static else None for m in (more, more[::-1]))
    return Case(
        name, r.about, r.gate,
        codes13=codes13,
        sf13=sf("sf13", E, N13, H // 16),
        gate_scale=gate if gated else None,
        up_scale=up,
        codes2=(_bits(f"{name} codes2", E, H, I // 2) % 256).astype(np.uint8),
        sf2=sf("sf2", E, H, I // 16),
        down_scale=scales("down", I, r.scale[1]),
        bias13=halves("bias13", E, N13) if r.bias else None,
        bias2=halves("bias2", E, H) if r.bias else None,
        x=x,
        ids=ids,
        routing=routing.astype(np.float32),
        x_scale=x_scale,
        h_scale=h_scale,
    )  # fmt: skip


def _experts(name: str, T: int, E: int, top_k: int) -> Array:
    """Different experts for each token: those with the largest of E random numbers."""
    return np.argsort(_bits(f"{name} ids", T, E), axis=1, kind="stable")[:, :top_k].astype(np.int64)


def _bits(name: str, *shape: int) -> Array:
    """uint64: splitmix64 of a counter that starts where the name's SHA-256 says."""
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    z = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(start >> 1)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (z ^ z >> np.uint64(31)).reshape(shape)
