"""Small layers for the Hopper kernels, and what each kernel launch returned.

`record_h200.py` ran them on an H200, `test_h200.py` runs them on the emulator. Inputs come from
`numpy.random.default_rng(seed).integers`, so that they are the same everywhere.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_nvfp4.experts import NVFP4Experts
from moe_nvfp4.kernels.common import launch
from moe_nvfp4.kernels.sm90 import backend as sm90
from moe_nvfp4.kernels.sm90.config import TileShape
from moe_nvfp4.kernels.sm90.pack import pack_weights
from moe_nvfp4.kernels.sm90.plan import TILE_SHAPES
from moe_nvfp4.routing import Rows
from moe_nvfp4.weights import SILU, Gate
from tests.common import reference_rows
from tests.emulator.stream import blank

OAI = Gate("silu", alpha=1.702, limit=1.5, up_offset=1.0)
RELU2 = Gate("relu2", gated=False)
GELU = Gate("gelu_tanh")


def outputs_of(kernel, values):
    """The arguments that a launch writes."""
    name = type(kernel).__name__
    places = {"Route": (2, 3, 4, 5, 6, 9, 10), "Gather": (2,), "Combine": (4,), "SumParts": (1,), "Quantize": (2, 3),
              "OneToken": (5,), "SumChunks": (2,)}  # fmt: skip
    if name == "GroupedGemm":
        places = {name: ((4,) if kernel.config.gate else ()) + ((7,) if kernel.config.down else ())}
    return [values[i] for i in places[name] if values[i] is not None]


@contextmanager
def fresh_kernels():
    """A context that begins and ends without compiled kernels of the backend."""
    caches = [sm90._route, sm90._gather, sm90._kernel, sm90._combine_kernel, sm90._sum_parts, sm90._quantize,
              sm90._one_token, sm90._sum_chunks]  # fmt: skip
    for function in caches:
        function.cache_clear()
    try:
        yield
    finally:
        for function in caches:
            function.cache_clear()


@contextmanager
def planned(plan):
    """A context in which every launch uses this plan."""
    kept, sm90.choose_plan = sm90.choose_plan, lambda *_: plan
    try:
        yield
    finally:
        sm90.choose_plan = kept


@contextmanager
def every_launch(listener):
    """Calls listener(kernel, run, values) in place of each launch; `run()` launches. Outputs are NaN before."""
    compiled = launch.compiled

    def listening(kernel, arguments, architecture):
        function = compiled(kernel, arguments, architecture)

        def start(*values):
            for tensor in outputs_of(kernel, values):
                blank(tensor)
            listener(kernel, lambda: function(*values), values)

        return start

    launch.compiled = listening
    try:
        with fresh_kernels():
            yield
    finally:
        launch.compiled = compiled


def nvfp4_tokens(T, K, seed=0, sf_max=448):
    """bf16 [T, K] that NVFP4 rows with global scales of 1 hold exactly: a 6 in each block, `sf_max` for the last."""
    rng = np.random.default_rng(seed)
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[rng.integers(0, 8, (T, K // 16, 16))]
    codes[:, :, 0] = 6
    sf = rng.integers(8, 16, (T, K // 16, 1)) * 2.0 ** rng.integers(-6, 1, (T, K // 16, 1))
    sf[:, -1] = sf_max
    x = codes * rng.choice([-1, 1], codes.shape) * sf
    return torch.from_numpy(x.reshape(T, K)).bfloat16()


def quantized_h(module, ids, tile=None):
    """(h as the launch of both GEMMs writes it, h as it should be): code * sf of the rows that have an expert.

    Since x has global scales of 1, the same kernel computes h from its bf16 rows, for the reference to quantize.
    """
    w = pack_weights(module.weights)
    T, top_k = ids.shape
    x = nvfp4_tokens(T, w.hidden_size, sf_max=256 if w.four_over_six else 448).to(ids.device)
    plan = sm90.choose_plan(w, T, top_k, sm90.multiprocessors(x.device))
    plan = replace(plan, tile=tile or plan.tile, config=replace(plan.config, gathered=True))
    launched = {}

    def listener(kernel, run, values):
        run()
        launched[type(kernel).__name__] = values

    with every_launch(listener), planned(plan):
        sm90.experts(x, ids, torch.ones(T, top_k, device=x.device), w)
    found = launched["GroupedGemm"][6]
    groups, token, *_ = sm90.route(ids, w.num_experts)
    h = x.new_empty(found.shape, dtype=torch.bfloat16 if w.h_scale is None else torch.float32)
    config = replace(plan.config, down=False, row_scale=False, four_over_six=False, out=launch.DTYPES[x.dtype])
    sm90._gemms(Rows(x, index=token), groups, w, h, x[:1], groups.offsets, replace(plan, config=config))
    want, _ = reference_rows(h, None, w.h_scale, groups, w.four_over_six)
    return found[: len(want)], want.bfloat16()


@dataclass(frozen=True)
class Layer:
    """A small layer with a tile shape, groups of these sizes, and three unrouted slots."""

    tile: TileShape | None
    sizes: tuple
    H: int = 208
    I: int = 80
    gate: Gate = SILU
    bias: bool = False
    split_k: int = 1
    activations: str = "bf16"
    gathered: bool = False
    seed: int = 0

    def inputs(self):
        """(module, x, top_k_index, top_k_weights) on the CPU, whatever the tile."""
        rng = np.random.default_rng(self.seed)
        module = NVFP4Experts(len(self.sizes), self.H, self.I, self.gate, self.activations,
                              torch.bfloat16 if self.bias else None)  # fmt: skip
        for name, parameter in module.named_parameters():
            shape, size = parameter.shape, parameter.numel()
            if parameter.dtype == torch.uint8:
                low, high = (40, 72) if name.endswith("_sf") else (0, 256)
                values = rng.integers(low, high, size, np.uint8)
            elif name.endswith("_scale"):
                values = rng.integers(128, 384, size) / 2**14
            else:
                values = rng.integers(-256, 256, size) / 128
            parameter.data.copy_(torch.from_numpy(values).view(shape))
        E = len(self.sizes)
        ids = np.repeat(np.arange(E + 1), [*self.sizes, 3])
        ids = rng.permutation(np.concatenate([ids, np.full(len(ids) % 2, -1)])).reshape(-1, 2)
        x = rng.integers(-256, 257, (len(ids), self.H)) / 128
        weights = rng.integers(1, 1 << 16, ids.shape) / 2**16
        return module, torch.from_numpy(x).bfloat16(), torch.from_numpy(ids), torch.from_numpy(weights).float()

    def on(self, device):
        """`inputs`, with packed weights in place of the module, on `device`."""
        module, *rest = self.inputs()
        return pack_weights(module.to(device).weights), *(t.to(device) for t in rest)

    def run(self, device):
        """Run the layer on `device`, and return the outputs of every launch."""
        packed, x, ids, weights = self.on(device)
        plan = sm90.choose_plan(packed, *ids.shape, sm90.multiprocessors(x.device))
        config = replace(plan.config, gathered=self.gathered)
        plan = replace(plan, tile=self.tile, split_k=self.split_k, config=config)
        with planned(plan):
            return sm90.experts(x, ids, weights, packed)


@dataclass(frozen=True)
class Token(Layer):
    """One token with an expert for each size that is not 0, and slots without one between them."""

    def inputs(self):
        module, x, ids, weights = super().inputs()
        slots = [id for e, n in enumerate(self.sizes) for id in (e, -1)[: 2 * n]]
        return module, x[:1], torch.tensor([slots]), weights.reshape(1, -1)[:, : len(slots)]

    def run(self, device):
        w, x, ids, weights = self.on(device)
        return sm90._experts_of_one(x, ids, weights, w, None, torch.empty_like(x))


@dataclass(frozen=True)
class HardRows:
    """Rows with values of every magnitude, infinities and NaN, with static global scales in fp32."""

    K: int = 208

    def inputs(self):
        rng = np.random.default_rng(self.K)
        bits = rng.integers(0, 1 << 32, (40, self.K), np.uint32)
        moderate = bits & 0x807FFFFF | (120 + rng.integers(0, 12, bits.shape)).astype(np.uint32) << 23
        bits[4:] = moderate[4:]
        bits[8] = 0
        bits[9, :16] = 0x80000000
        ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
        bits[10] = (ties[rng.integers(0, 7, self.K)] * np.float32(2.0**-6)).view(np.uint32)
        bits[10, ::16] = np.array([448 * 6 * 2.0**-6], np.float32).view(np.uint32)
        bits[11] &= 0x807FFFFF
        x = torch.from_numpy(bits.view(np.float32))
        ids = torch.from_numpy(rng.integers(-1, 4, (40, 2)))
        return x, ids, torch.tensor([2.0**-6, 1.0, 3e-3])

    def run(self, device):
        x, ids, scale = (t.to(device) for t in self.inputs())
        return sm90.route(ids, 3, 1, x, scale)


TILES = {tile.BN: tile for tile in TILE_SHAPES}
LAYERS = {
    "8 tokens, K in four": Layer(TileShape(8, KS=4, stages=14), (5, 0, 9), gathered=True, seed=186128272),
    "16 tokens, bias, two parts": Layer(
        TileShape(16, stages=4, group=4),
        (16, 3, 18),
        I=336,
        gate=OAI,
        bias=True,
        split_k=2,
        gathered=True,
        seed=662444648,
    ),
    "24 tokens by WGMMA, no gate": Layer(TILES[24], (7, 25), gate=RELU2, gathered=True, seed=1757155522),
    "128 tokens by WGMMA": Layer(TILES[128], (130, 5), gate=GELU, seed=1069361599),
    "one token": Token(None, (1, 0, 1, 1, 1), H=1056, I=144, seed=903411),
    "one token, bias": Token(None, (1, 1, 0), H=208, I=112, gate=OAI, bias=True, seed=903412),
    "one token, no gate": Token(None, (0, 1, 1), H=320, I=208, gate=RELU2, seed=903413),
    "NVFP4 rows": Layer(TileShape(8), (3, 17, 0, 1), activations="nvfp4", gathered=True, seed=468686412),
    "static NVFP4 rows": HardRows(),
}
