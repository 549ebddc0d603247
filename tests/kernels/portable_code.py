"""The portable kernels compiled for NVIDIA GPUs, without one: run on the emulator, and judged by what ptxas makes of
them.

A process of its own, since in the tests' own Triton interprets: `python -m tests.kernels.portable_code` prints JSON.
Tests run it with "emulate", "same" and "tiles". By hand, with TRITON_INTERPRET=0 TRITON_DISABLE_LINE_INFO=1 (minutes):

    spoilt    sm_120's GEMMs of NVFP4 times NVFP4, with a mistake in each instruction: how many, and the unnoticed ones
    large     a layer of DeepSeek's sizes on sm_120, whose weights are beyond 2**31 bytes: its error
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import torch
import triton

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.backends import named
from moe_nvfp4.kernels.portable import adapters, backend, config, dense, merge, router
from moe_nvfp4.kernels.portable.launch import compile_variant
from moe_nvfp4.kernels.sm90.pack import in_units
from moe_nvfp4.routing import Groups, group_by_expert
from moe_nvfp4.stages import Adapter, add_low_rank
from moe_nvfp4.weights import SILU, ExpertWeights, Gate, LinearWeights, Matrices
from tests.common import reference_layer, reference_rows, relative_error
from tests.emulator import EmulatorError, emulate
from tests.emulator.launch import Far
from tests.emulator.mistakes import unnoticed
from tests.kernels.test_adapters import naive

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120, 121)
OAI = Gate("silu", alpha=1.702, limit=0.7, up_offset=1.0)


@cache
def build(architecture, kernel, kinds, constants, options):
    with mock.patch("triton.backends.nvidia.compiler.CUDABackend.make_cubin", lambda *_: b""):  # only PTX is needed
        return compile_variant(divmod(architecture, 10), kernel, kinds, constants, options)


def compiled(kernel, arguments, options, architecture=80):
    """Compile a kernel as a launch with aligned tensors would."""
    n = sum(not p.is_constexpr for p in kernel.params)
    kinds = tuple(a.dtype if isinstance(a, torch.Tensor) else None if a is None else int for a in arguments[:n])
    return build(architecture, kernel, kinds, arguments[n:], tuple(options.items()))


class Launches:
    """Replaces `launch`: records launches and, with a schedule, runs them on the emulator."""

    def __init__(self, schedule=None):
        self.schedule, self.all = schedule, []

    def __call__(self, kernel, grid, *arguments, arch=None, **options):
        options |= {"arch": arch} if arch else {}
        self.all.append((kernel, arguments, options))
        if self.schedule is None:
            return
        code = compiled(kernel, arguments, options, int((arch or "sm80")[2:]))
        named = {p.name: v for p, v in zip(kernel.params, arguments, strict=True) if not p.is_constexpr}
        seen = [in_memory(value) for value in named.values() if value is not None]

        def run(ptx, schedule, **more):
            block = (32 * options["num_warps"], 1, 1)
            emulate(ptx, [*seen, 0, 0], grid, block, code.metadata.shared, schedule=schedule, **more)

        if "arch" in options:
            self.before(code.asm["ptx"], run, named["out"])
        run(code.asm["ptx"], self.schedule)

    def before(self, ptx, run, out):
        """What comes before the launch of a GEMM of NVFP4 times NVFP4."""

    def __enter__(self):
        self.kept = backend.launch
        self.put(self)
        return self

    def __exit__(self, *_):
        self.put(self.kept)

    def put(self, launch):
        for module in (adapters, backend, dense, merge, router):
            module.launch = launch


def in_memory(value):
    """Of an expanded tensor only the last expert is in memory, where a kernel would find it."""
    if not isinstance(value, torch.Tensor) or value.ndim != 3 or value.stride(0):
        return value
    one = value[0].numpy()
    return Far(value.shape, {(len(value) - 1) * one.size: one})


# ---- on the emulator -----------------------------------------------------------------------------


def weights(E, H, I, gate=SILU, bias=False, device="cpu", **more):
    def u8(low, high, *shape):
        if device == "meta":
            return torch.empty(shape, dtype=torch.uint8, device=device)
        return torch.randint(low, high, shape, dtype=torch.uint8)

    def scale(v):
        return torch.empty(E, device=device).uniform_(v, 2 * v)

    N = 2 * I
    codes, sf, gate_scale, up_scale = u8(0, 256, E, N, H // 2), u8(0, 80, E, N, H // 16), scale(5e-3), scale(1e-2)
    w13 = Matrices(codes, sf, up_scale, N, H, gate_scale)
    w2 = Matrices(u8(0, 256, E, H, I // 2), u8(0, 80, E, H, I // 16), scale(5e-3), H, I)
    biases = (torch.randn(E, N).bfloat16(), torch.randn(E, H).bfloat16()) if bias else (None, None)
    return ExpertWeights(gate, "bf16", w13, w2).biased(*biases)


@contextmanager
def on(capability):
    """A context in which launches are for a GPU of this compute capability, with 132 multiprocessors."""
    kept, backend.capability, backend._sms = (backend.capability, backend._sms), lambda _: capability, lambda _: 132
    try:
        yield
    finally:
        backend.capability, backend._sms = kept


def layer(schedule, T=5, w=None, dtype=torch.bfloat16, capability=None, **changes):
    torch.manual_seed(T)
    w = replace(w or weights(3, 144, 80), **changes)
    x = torch.randn(T, w.hidden_size).to(dtype)
    ids, top_k_weights = torch.rand(T, w.num_experts).topk(2).indices, torch.rand(T, 2)
    ids[0, 1] = -1
    with Launches(schedule), on(capability):
        got = backend.experts(x, ids, top_k_weights, w)
    return relative_error(got, reference_layer(x, ids, top_k_weights, w))


def linear(schedule):
    codes, sf = torch.randint(0, 256, (80, 1024), dtype=torch.uint8), torch.randint(0, 80, (80, 128), dtype=torch.uint8)
    matrix = Matrices(codes, sf, torch.full((1,), 1e-2), 80, 2048, bias=torch.randn(80).bfloat16())
    w = LinearWeights(matrix, None, "bf16")
    x = torch.randn(2, 2048).bfloat16()
    kept, config.split_k = config.split_k, lambda *arguments: 4
    try:
        with Launches(schedule):
            got = backend.linear(x, w)
    finally:
        config.split_k = kept
    want = backend.reference._matmul(x.float(), codes, sf) * 1e-2 + w.matrix.bias.float()
    return relative_error(got, want)


def chosen(schedule):
    """How many of a router's choices differ from a stable sort, among equal, infinite and subnormal scores and NaN."""
    scores = torch.randn(3, 300)
    scores[1] = (2 * scores[1]).round() + 0.0
    scores[2, ::7], scores[2, 3], scores[2, 5], scores[0] = torch.inf, torch.nan, -torch.nan, scores[0] * 1e-39
    with Launches(schedule):
        values, indices = backend.top_k(scores, 10)
    want = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(scores.gather(1, indices).view(torch.int32), values.view(torch.int32))
    return int((indices != want.indices[:, :10]).sum())


def scored(schedule):
    """A router's linear of odd sizes, with parts beyond the last token, column and row."""
    x, weight, bias = torch.randn(5, 2100), torch.randn(7, 2100), torch.randn(7)
    errors = []
    for dtype in (torch.bfloat16, torch.float32):
        arguments = [t.to(dtype) for t in (x, weight, bias)]
        with Launches(schedule):
            got = backend.router_linear(*arguments)
        errors.append(relative_error(got, torch.nn.functional.linear(*(t.double() for t in arguments))))
    assert errors[1] < 1e-6
    return errors[0]


def merged(schedule):
    """How many codes differ from those of the sums, with a rank, rows and columns beyond the last ones of a block, and
    how many bytes in Hopper's layout."""
    codes, sf = torch.randint(256, (2, 70, 48)).to(torch.uint8), torch.randint(0x7E, (2, 70, 6)).to(torch.uint8)
    scale, a, b = torch.rand(2, 70) * 1e-3, torch.randint(-3, 4, (2, 5, 90)) / 64, torch.randint(-3, 4, (2, 70, 5)) / 64
    sf[:, ::4] = 0

    def wanted(scale):
        dense = nvfp4.dequantize(codes, sf, scale)
        dense[..., :90] += b @ a
        return nvfp4.encode(dense, sf, scale)

    with Launches(schedule):
        different = (backend.merged_codes(codes, sf, scale, a, b) != wanted(scale)).sum()
    for gate_scale in (None, scale[:, 1]):
        w = Matrices(codes, sf, scale[:, 0], 70, 96, gate_scale)
        packed = in_units(w)
        with Launches(schedule):
            assert named("sm90").merge(packed, codes, a, b)
        different += (packed.codes != in_units(w._replace(codes=wanted(w.row_scales()))).codes).sum()
    return int(different)


def low_rank(schedule, S, T=9, E=3, K=200, N=72, rank=24):
    """Sorted rows and their tiles as torch makes them, and additions in float64, of S adapters of experts or one."""
    torch.manual_seed(S)
    ids, of_token = torch.randint(-1, E + 1, (T, 2)), torch.arange(T) % (S + 1) - 1 if S else None
    x, out, several = torch.randn(T, K).bfloat16(), torch.randn(2 * T, N).bfloat16(), (S,) if S else ()
    pair = Adapter(*(torch.randn(E, *several, *shape).bfloat16() / 9 for shape in ((rank, K), (N, rank))))
    groups = group_by_expert(ids, E, of_token, S).with_position()
    want = naive(out, x, pair, groups, of_token.tolist() if S else None, up=True)
    with Launches(schedule):
        found = named("portable").group(ids, E, of_token, S)
        tiles = backend.Routing.of(found, 8)
        add_low_rank(out, x, pair, found, named("portable"), up=True)
    for name in ("order", "offsets", "position", *(("parts", "bare") if S else ())):
        assert torch.equal(getattr(found, name), getattr(groups, name)), name
    count = int(groups.tiles(8).count)
    assert tiles.tile_count == count and torch.equal(tiles.tile_row[:count], groups.tiles(8).row[:count])
    assert torch.equal(tiles.ids.long(), torch.where(ids < 0, E, ids).view(-1))
    return relative_error(out, want)


def last_of_many(schedule="reverse-lazy"):
    """DeepSeek's sizes; the last expert's weights are beyond 2**31 bytes."""
    E, T, few = 150, 3, weights(1, 7168, 2048)
    few = replace(few, activations="nvfp4", x_scale=torch.full((1,), 2e-3), h_scale=torch.full((1,), 5e-3))

    def many(value):
        if isinstance(value, Matrices):
            return Matrices(*map(many, value))
        if isinstance(value, torch.Tensor):
            return value.expand(E, *value.shape[1:]) if value.ndim == 3 else value.repeat(E)
        return value

    w = replace(few, **{name: many(getattr(few, name)) for name in ("w13", "w2", "x_scale", "h_scale")})
    x, ids, top_k_weights = torch.randn(T, 7168).bfloat16(), torch.zeros(T, 1, dtype=torch.int64), torch.rand(T, 1)
    with Launches(schedule), on((12, 0)), mock.patch.object(backend, "aligned", lambda t: t):  # which would copy
        got = backend.experts(x, ids + E - 1, top_k_weights, w)
    return relative_error(got, reference_layer(x, ids, top_k_weights, few))


def nan_stays(schedule):
    """A block scale that is NaN makes its row NaN in the tensor cores too."""
    w, x = replace(weights(2, 128, 64), activations="nvfp4"), torch.randn(3, 128).bfloat16()
    x[1, 5] = torch.nan
    with Launches(schedule), on((12, 0)):
        got = backend.experts(x, torch.tensor([[0], [1], [1]]), torch.ones(3, 1), w)
    return 0 if got[1].isnan().all() and got[[0, 2]].isfinite().all() else str(got)


def four_over_six(schedule):
    """The number of values and scales whose bits differ from the reference's."""
    x = torch.randn(9, 144).bfloat16() * torch.logspace(-3, 3, 9)[:, None]
    with Launches(schedule):
        got = backend.quantize(backend.Values(x), None, None, True)
    want, scale = reference_rows(x, None, None, Groups(torch.arange(9), torch.tensor([0, 9]), 1), True)
    return int((got.values.float() != want).sum() + (got.scale != scale).sum())


def illegal_id(schedule, kind):
    try:
        with Launches(schedule):
            if kind == "stages":
                backend.group(torch.tensor([[0, 1, 4, 2]]), 3, None, 0)
            elif kind == "few":
                x, ids = torch.zeros(1, 144, dtype=torch.bfloat16), torch.tensor([[0, 9]])
                backend.experts(x, ids, torch.ones(1, 2), weights(6, 144, 80, OAI, True))
            else:
                backend.route(torch.tensor([0, 1, 5, 2]), 3, 8)
    except EmulatorError as error:
        return 0 if "__assertfail" in str(error) else str(error)
    return "the kernel went on"


static = {"activations": "nvfp4", "x_scale": torch.full((3,), 2e-3), "h_scale": torch.full((3,), 5e-3)}
CASES = {
    "bf16": lambda schedule: layer(schedule),
    "fp16": lambda schedule: layer(schedule, dtype=torch.float16),
    "bias, clamps, unsorted": lambda schedule: layer(schedule, 3, weights(6, 144, 80, OAI, True)),
    "W4A4, static": lambda schedule: layer(schedule, **static),
    "W4A4, dynamic": lambda schedule: layer(schedule, activations="nvfp4"),
    "NVFP4 times NVFP4, static": lambda schedule: layer(schedule, capability=(12, 0), **static),
    "NVFP4 times NVFP4, dynamic": lambda schedule: layer(schedule, 40, activations="nvfp4", capability=(12, 0)),
    "NVFP4 times NVFP4, NaN": nan_stays,
    "four over six": four_over_six,
    "sixteen rows a tile": lambda schedule: layer(schedule, T=14),
    "split K": linear,
    "top-k": chosen,
    "a router's linear": scored,
    "merged codes": merged,
    "an adapter of each expert": partial(low_rank, S=0),
    "an adapter of each expert, many tokens": partial(low_rank, S=0, T=40),
    "an adapter of each token": partial(low_rank, S=2, T=30),
    "an illegal id": partial(illegal_id, kind="many"),
    "an illegal id, unsorted": partial(illegal_id, kind="few"),
    "an illegal id, between stages": partial(illegal_id, kind="stages"),
}


# ---- mistakes in the GEMMs of NVFP4 times NVFP4 ----


class Spoilt(Launches):
    """Runs each launch; the first CTA of GEMMs of NVFP4 times NVFP4 also once with each of `mistakes`. found: for each
    of these GEMMs how many mistakes, and those that nothing noticed."""

    def __init__(self):
        super().__init__("lazy")
        self.found = []

    def before(self, ptx, run, out):
        def stored(ptx, schedule):
            out.view(torch.uint8).fill_(0xFF)
            run(ptx, schedule, unwritten=[out], only=[0], max_steps=400_000)
            return [out.clone()]

        self.found.append(unnoticed(ptx, stored))


def spoilt():
    torch.manual_seed(0)
    scales = {"x_scale": torch.full((2,), 2e-3), "h_scale": torch.full((2,), 5e-3)}
    w = replace(weights(2, 528, 272), activations="nvfp4", **scales)
    ids = torch.tensor([[0]] * 40 + [[1]])  # the first tile of tokens is full
    with Spoilt() as launches, on((12, 0)):
        backend.experts(torch.randn(41, 528).bfloat16(), ids, torch.rand(41, 1), w)
    return launches.found


# ---- what ptxas makes of them --------------------------------------------------------------------

SHAPES = {"qwen": (2048, 768, 128, 8), "gptoss": (2880, 2880, 128, 4)}


def gemms(shape, capability=None, activations="bf16"):
    """The arguments of every GEMM that runs a layer of this shape on a GPU with 132 multiprocessors."""
    H, I, E, top_k = SHAPES[shape]
    w = replace(weights(E, H, I, device="meta"), activations=activations)
    with Launches() as launches, on(capability):
        for T in (1, 16, 64, 256, 1024, 4096):
            x = torch.empty(T, H, dtype=torch.bfloat16, device="meta")
            ids = torch.empty(T, top_k, dtype=torch.int64, device="meta")
            backend.experts(x, ids, torch.empty(T, top_k, device="meta"), w)
    return [launch for launch in launches.all if launch[0] is backend.gemm_kernel]


def body(ptx):
    """The text without its first lines, which name the GPU and a version."""
    return re.sub(r"^\.(version|target).*$", "", ptx, flags=re.M)


USAGE = {"registers": r"Used (\d+) registers", "spills": r"(\d+) bytes spill stores"}


def usage(ptx, architecture):
    """Registers and spilt bytes of a PTX text, for any GPU ("80", "120a"), by the ptxas that comes with Triton."""
    bin = Path(triton.__file__).parent / "backends/nvidia/bin"
    tool = bin / ("ptxas-blackwell" if len(architecture) > 2 else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(re.sub(r"\.target sm_\d+a?", f".target sm_{architecture}", ptx))
        command = [tool, "-v", f"--gpu-name=sm_{architecture}", "-o", os.devnull, file]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {name: int(re.search(pattern, text)[1]) for name, pattern in USAGE.items()}


def same_everywhere():
    """By kernel, the ARCHITECTURES whose PTX differs from sm_80's."""
    with Launches() as launches:
        x, ids = torch.empty(2, 64, dtype=torch.bfloat16), torch.empty(2, 2, dtype=torch.int64)
        backend.experts(x, ids, torch.empty(2, 2), weights(3, 64, 48))
        backend.top_k(torch.empty(2, 8), 2)
        backend.router_linear(torch.empty(2, 64), torch.empty(8, 64), None)
        w = weights(3, 64, 48).w2
        a, b = torch.empty(3, 4, 48), torch.empty(3, 64, 4)
        backend.merged_codes(w.codes, w.sf, torch.empty(3, 64), a, b)
        named("sm90").merge(in_units(w), w.codes, a, b)
        groups = backend.group(ids, 3, None, 0)
        backend.Routing.of(groups, 8)
        pair = Adapter(torch.empty(3, 8, 64, dtype=x.dtype), torch.empty(3, 96, 8, dtype=x.dtype))
        add_low_rank(torch.empty(4, 96, dtype=x.dtype), x, pair, groups, named("portable"), up=True)
    different = {}
    for kernel, *rest in launches.all:
        texts = {a: body(compiled(kernel, *rest, architecture=a).asm["ptx"]) for a in ARCHITECTURES}
        different[kernel.fn.__name__] = [a for a, text in texts.items() if text != texts[80]]
    with on((12, 0)):
        native = gemms("gptoss", (12, 0), "nvfp4")[0]
        texts = [
            body(compiled(*native[:2], native[2] | {"arch": f"sm{a}"}, architecture=a).asm["ptx"]) for a in (120, 121)
        ]
        different["NVFP4 times NVFP4"] = [] if texts[0] == texts[1] else [121]
    return different


def tiles():
    """For the GEMMs of SHAPES: tokens, shared memory and, by GPU, registers and spilt bytes."""
    table = {}
    variants = [(shape, None, "bf16", 80, ("80", "86", "120")) for shape in SHAPES]
    for shape, capability, activations, architecture, gpus in (*variants, ("gptoss", (12, 0), "nvfp4", 120, ("120a",))):
        for kernel, arguments, options in gemms(shape, capability, activations):
            a = dict(zip([p.name for p in kernel.params], arguments, strict=True))
            name = f"{shape} {activations} {a['GATE']} {a['BN']}x{a['BM']}x{a['BK']}"
            if name not in table:
                code = compiled(kernel, arguments, options, architecture)
                by_gpu = {gpu: usage(code.asm["ptx"], gpu) for gpu in gpus}
                table[name] = {"tokens": a["BM"], "shared": code.metadata.shared, "by GPU": by_gpu}
    return table


def main(what):
    if what == "emulate":
        result = {}
        for name, case in CASES.items():
            for schedule in ("eager", "random:1", "reverse-lazy") if name == "bf16" else ("reverse-lazy",):
                try:
                    result[f"{name}, {schedule}"] = case(schedule)
                except Exception as error:
                    result[f"{name}, {schedule}"] = f"{type(error).__name__}: {error}"
    else:
        result = {"same": same_everywhere, "tiles": tiles, "spoilt": spoilt, "large": last_of_many}[what]()
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
