"""A performance model of the Blackwell layer on a B200. None of our kernels was measured: no Blackwell was at hand.

    python -m moe_nvfp4.kernels.sm100.model

The kernels use the tiles that this model prefers (`plan_gemm`).

The time of a GEMM is START plus the slowest of five things: the bytes through HBM, and, for the CTA with the most
tiles, the cycles that its tensor cores, its shared memory, its MMA-issuing warp, and the issue slots for epilogue and
dequantization are busy. (Tiles overlap, so these run at the same time.) A layer is routing, rows, both GEMMs and the
sum, one after the other.

Where numbers come from: B200's data sheet (HBM, products); counts by the emulator that runs the compiled kernels (bytes
through shared memory, instructions; `tests/kernels/test_sm100_model.py` compares them); an H200 (LAUNCH); and a
published kernel, to which START and REACHED are fitted: the fastest NVFP4 grouped GEMM of GPU MODE's hackathon, for its
longest and its shortest problem. Its tile is like ours: weights are M, pairs of CTAs, 128 tokens. DENSE is fitted to
FlashInfer's W4A16 layer on a B300, which has the same memory. `main` prints how far off the model is for the other
problems, for FlashInfer's layers, and for those of LightMoE, another library with published B200 numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from moe_nvfp4.kernels.sm100.config import (
    BLOCK_K,
    CHUNK,
    DEQUANTIZE,
    EXACT_BYTES,
    ROWS,
    SF_TILE,
    DenseTile,
    TileShape,
)

SMS, CLOCK, HBM = 148, 1.85e9, 8e12
PRODUCTS = {"nvfp4": 16384, "bf16": 4096}  # multiply-adds per SM and cycle: 9 and 2.25 PFLOP/s
SHARED = 128  # bytes per SM and cycle, read or written
ISSUE = 2  # cycles per instruction of a single warp: an assumption, between 1 and 5 (if each needs the previous one)
LAUNCH = 3e-6  # seconds of an empty CUDA graph on an H200
START, REACHED = 4.5e-6, 0.773  # fitted: seconds of a GEMM besides its slowest resource; reached share of HBM's rate
# Fitted: how busy W4A16 can keep all but HBM. Without it the model is 11 to 21 % too good from 1024 tokens on; the
# residues with it are 9 % too good at 1024, 6 % at 2048, and 5 % too bad at 4096.
DENSE = 0.82
# Instructions of an epilogue warp for a chunk of tokens: CHUNK_LOOP, and per block, by (activations, projections,
# output). These, and the numbers in `of_step` and `of_chunk`, are counts by the emulator: PTX instructions without mov,
# which usually becomes no machine instruction.
CHUNK_LOOP = 32
EPILOGUE = {
    ("nvfp4", 2, "nvfp4"): 296,
    ("nvfp4", 2, "bfloat16"): 214,
    ("nvfp4", 1, "bfloat16"): 81,
    ("nvfp4", 1, "assignments"): 80,
    ("nvfp4", 1, "assignments bfloat16"): 84,
    ("bf16", 2, "interleaved"): 171,
    ("bf16", 2, "float32"): 54,
    ("bf16", 1, "float32"): 56,
    ("bf16", 1, "interleaved"): 61,
    ("bf16", 1, "assignments"): 56,
    ("bf16", 1, "assignments bfloat16"): 61,
}
NVFP4 = 0.5625  # bytes of a code with its share of a block scale


@dataclass(frozen=True)
class Launch:
    """One GEMM. groups: the rows of each expert; n: weight rows per projection; out_bytes: per output element."""

    groups: tuple[int, ...]
    n: int
    k: int
    projections: int
    out: str
    out_bytes: float
    tile: TileShape
    activations: str = "nvfp4"
    parts: int = 1  # of K, each a tile of its own with an fp32 result

    @property
    def chunk(self) -> int:
        """See `GemmConfig.chunk`."""
        return CHUNK * (2 if self.projections == 2 and self.out != "float32" else 1)


class Counts(NamedTuple):
    """What a CTA does, as the emulator counts it: bytes through shared memory, instructions of the MMA warp, and issue
    slots (a multiprocessor has four per cycle) of the warps that dequantize and of those that store."""

    shared: float
    instructions: float
    slots: float


def of_step(tile: TileShape, activations: str, width: int) -> Counts:
    """The counts for 64 of K in a tile with `width` tokens."""
    blocks, dense = tile.blocks, activations == "bf16"
    a, b, sf = ROWS * 32, width // tile.ctas * (128 if dense else 32), SF_TILE  # bytes
    if dense:  # writes: everything once; reads: codes and scales (whose rows collide in fours) once, tokens per block
        shared = blocks * (a + sf) + b + blocks * (a + 4 * sf + b)
        return Counts(shared, 30 + 8 * blocks, 4 * blocks * DEQUANTIZE[blocks])
    shared = blocks * (a + sf) + b + tile.sf_tiles * sf + blocks * (a + b) + (blocks + tile.sf_tiles) * sf
    return Counts(shared, 3.5 + 8.5 * (blocks + tile.sf_tiles), 0)


def of_chunk(launch: Launch) -> Counts:
    """The counts for `launch.chunk` tokens of a tile in the epilogue; per block, four warps transpose them in shared
    memory."""
    blocks = launch.tile.blocks
    exchanged = 2 * CHUNK * ROWS * (4 if launch.out in ("nvfp4", "assignments", "float32") else 2)
    if launch.activations == "nvfp4":  # scales of the tokens; with two projections, the halves of a warp read others
        exchanged += 8192 if launch.projections == 2 else 2048
    each = EPILOGUE[launch.activations, launch.projections, launch.out]
    return Counts(blocks * exchanged, 0, 4 * (CHUNK_LOOP + blocks * each))


def tiles_of_one(groups: tuple[int, ...], tokens: int, each: int, workers: int) -> Counter[int]:
    """{tokens of a tile: how many such tiles the first of `workers` has}, where a token tile makes `each` tiles."""
    found: Counter[int] = Counter()
    at = 0
    for rows in groups:
        for size, number in ((tokens, rows // tokens), (rows % tokens, 1)):
            if size and number:  # the first worker has the first of every `workers` tiles
                end = at + number * each
                found[size] += -(-end // workers) - -(-at // workers)
                at = end
    return found


def busy(launch: Launch, sms: int = SMS) -> dict[str, float]:
    """Seconds that each resource is busy."""
    tile, dense = launch.tile, launch.activations == "bf16"
    each, steps = tile.row_tiles(launch.n * launch.projections) * launch.parts, -(-launch.k // 64)
    steps = min(steps, -(-steps // (4 * launch.parts)) * 4)  # a part is whole K tiles of 256
    workers = min(sms // tile.ctas, each * sum(-(-rows // tile.tokens) for rows in launch.groups))
    cycles = dict.fromkeys(("matrix", "shared", "issue", "slots"), 0.0)
    chunk = of_chunk(launch)
    for rows, number in tiles_of_one(launch.groups, tile.tokens, each, workers).items():
        chunks = -(-rows // launch.chunk)
        width = chunks * launch.chunk
        step = of_step(tile, launch.activations, width)
        products = tile.blocks * ROWS * max(width, 64) * 64
        cycles["matrix"] += number * steps * products / PRODUCTS[launch.activations]
        cycles["shared"] += number * (steps * step.shared + chunks * chunk.shared) / SHARED
        cycles["issue"] += number * steps * step.instructions * ISSUE
        cycles["slots"] += number * (steps * step.slots + chunks * chunk.slots) / 4
    rows, hit = sum(launch.groups), sum(1 for rows in launch.groups if rows)
    outputs = launch.n * (2 if launch.projections == 2 and launch.out == "float32" else 1)
    size = hit * launch.n * launch.projections * launch.k * NVFP4
    size += rows * (launch.k * (2 if dense else NVFP4) + outputs * launch.out_bytes * launch.parts)
    rate = CLOCK * (DENSE if dense else 1)
    return {**{name: n / rate for name, n in cycles.items()}, "hbm": size / (HBM * REACHED)}


def gemm(launch: Launch) -> float:
    """Seconds of a GEMM alone."""
    return START + max(busy(launch).values())


@lru_cache(maxsize=4096)
def plan_gemm(
    activations: str, rows: int, experts: int, weight_rows: int, k: int, projections: int, out: str, sms: int
) -> tuple[TileShape, int]:
    """(tile, parts of K) with the least time, for `rows` rows in all, spread over the experts.

    Ties go to the plan that keeps a multiprocessor busy for the shortest time (a pair of CTAs must win by a fifth),
    then to the largest tile that has no more tokens than an expert.

    weight_rows  of a projection
    out          as in `GemmConfig`. "assignments" may be in parts, and so may any output of GEMM 1: as fp32 sums, which
                 a further kernel adds up before the gate. Parts must save a twentieth of the time; for NVFP4 rows they
                 never do.
    """
    rows = max(1, rows)
    groups, k_tiles = spread(rows, experts), -(-k // BLOCK_K)
    kind = DenseTile if activations == "bf16" else TileShape
    tokens = (64, 128, 256) if rows <= 64 * len(groups) else (128, 256, 64)
    tiles = [tile for c in (1, 2) for t in tokens for b in (2, 1) if (tile := kind(t, b, c)).legal and c <= sms]
    split = activations == "bf16" and out not in ("assignments bfloat16", "float32")

    def seconds(tile: TileShape, parts: int) -> tuple[float, float]:
        launch = launch_of(activations, groups, weight_rows, k, projections, out, tile, parts)
        times = busy(launch, sms)
        total = max(times.values()) + adding(launch)
        alone = max(t for name, t in times.items() if name != "hbm")
        return total * (1 if parts == 1 else 1.05), alone * (1 if tile.ctas == 1 else 1.2)

    def parts_of(tile: TileShape) -> list[int]:
        most = sum(-(-n // tile.tokens) for n in groups) * tile.row_tiles(weight_rows * projections)
        return [p for p in range(1, 9) if p == 1 or split and p <= k_tiles and p * most <= 4 * sms]

    return min(((tile, p) for tile in tiles for p in parts_of(tile)), key=lambda plan: seconds(*plan))


def launch_of(
    activations: str, groups: tuple[int, ...], n: int, k: int, projections: int, out: str, tile: TileShape,
    parts: int = 1,
) -> Launch:  # fmt: skip
    """The `Launch` of a GEMM that is described as in `GemmConfig`."""
    if parts > 1 and out != "assignments":
        out = "float32"
    size = {"assignments": 4, "float32": 4, "nvfp4": NVFP4}.get(out, 2)
    kind = out if (activations, projections, out) in EPILOGUE else {"nvfp4": "bfloat16"}.get(activations, "interleaved")
    return Launch(groups, n, k, projections, kind, size, tile, activations, parts)


def adding(launch: Launch) -> float:
    """Seconds that parts of K cost besides the GEMM: for GEMM 1 a further kernel, for GEMM 2 more rows to add up."""
    if launch.parts == 1:
        return 0.0
    scattered = launch.out == "assignments"
    size = 4 * sum(launch.groups) * launch.n * launch.projections * (launch.parts - scattered)
    return size / (HBM * REACHED) + (0.0 if scattered else START - LAUNCH)


def gemms(H: int, I: int, experts: int, top_k: int, tokens: int, activations: str) -> tuple[Launch, Launch]:
    """Both GEMMs of a layer."""
    groups, rows = spread(tokens * top_k, experts), tokens * top_k
    out = "assignments" if rows * H * 4 <= EXACT_BYTES else "assignments bfloat16"
    problems = (I, H, 2, "nvfp4" if activations == "nvfp4" else "interleaved"), (H, I, 1, out)
    first, second = (
        launch_of(activations, groups, *p, *plan_gemm(activations, rows, experts, *p, SMS)) for p in problems
    )
    return first, second


def layer(H: int, I: int, experts: int, top_k: int, tokens: int, activations: str) -> dict[str, float]:
    """Seconds of a layer's kernels, and a bound that no kernels can beat: to read weights and x and write y once, or to
    do the products."""
    gemm1, gemm2 = gemms(H, I, experts, top_k, tokens, activations)
    groups, rows, item = gemm1.groups, tokens * top_k, NVFP4 if activations == "nvfp4" else 2
    kernel = START - LAUNCH

    def stream(size: float) -> float:
        return kernel + size / (HBM * REACHED)

    times = {
        "route": kernel,
        "rows": stream(tokens * H * 2 + rows * H * item),
        "gemm1": kernel + max(busy(gemm1).values()) + adding(gemm1),
        "gemm2": kernel + max(busy(gemm2).values()) + adding(gemm2),
        "combine": stream(rows * H * gemm2.out_bytes + tokens * H * 2),
    }
    weights = 3 * H * I
    size = weights * NVFP4 * sum(1 for n in groups if n) + 4 * tokens * H
    products = weights * rows / (PRODUCTS[activations] * SMS * CLOCK)
    return {**times, "total": LAUNCH + sum(times.values()), "bound": max(size / HBM, products)}


def spread(rows: int, experts: int) -> tuple[int, ...]:
    """Rows of each expert, as uneven as routers make them: from half the mean to one and a half times the mean."""
    hit = min(rows, experts)
    if rows == hit:
        return (1,) * hit
    ends = [rows * i * (hit + i) // (2 * hit * hit) for i in range(hit + 1)]
    return tuple(end - start for start, end in zip(ends, ends[1:], strict=False))


LAYERS = {  # H, I, experts, top_k
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "DeepSeek-V3": (7168, 2048, 256, 8),
}
# The tile of the published kernels (GPU MODE's NVFP4 hackathon, 2026), then: rows of each group, N, K, best time in us
PUBLISHED = TileShape(128, 1, 2)
GROUPED = [
    ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168, 27.9),
    ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048, 19.4),
    ((192, 320), 3072, 4096, 8.48),
    ((128, 384), 4096, 1536, 6.43),
]
DUAL = [
    ((256,), 4096, 7168, 12.4),
    ((512,), 4096, 7168, 16.4),
    ((256,), 3072, 4096, 9.4),
    ((512,), 3072, 7168, 16.3),
]
# H, I, experts, top_k; {tokens: us} of LightMoE's layer on a B200 (its BENCHMARKS.md, 2026-08)
LIGHTMOE = {
    "Qwen3.5-35B-A3B": ((2048, 512, 16, 8), {1: 14.4, 128: 28.8, 8192: 252.5}),
    "Qwen3.5-397B-A17B": ((4096, 1024, 16, 10), {1: 20.5, 128: 53.6, 8192: 770.7}),
}
# FlashInfer's CuTe DSL layers of DeepSeek-V3 on a B300 (pull requests 4985 and 5301, 2026): H, I, the 32 experts of one
# of eight ranks, about one of them per token; activations -> {tokens: us}
FLASHINFER = (
    (7168, 2048, 32, 1),
    {
        "bf16": {16: 83.6, 64: 150.2, 256: 161.8, 1024: 185, 2048: 224, 4096: 328},
        "nvfp4": {16: 80.7, 64: 143.6, 256: 155.7, 1024: 163.1},
    },
)


def main() -> None:
    print("A model of a B200, in us; none of our kernels was measured.\n")
    print("Published kernels: measured, modelled (with their tile), and ours as modelled")
    print(f"{'':34} {'published':>9} {'model':>7} {'off by':>7} {'ours':>7}  tile, and what it waits for")
    for name, problems, projections in (("grouped", GROUPED, 1), ("dual", DUAL, 2)):
        for groups, n, k, published in problems:
            problem = n, k, projections, "bfloat16"
            ours = launch_of("nvfp4", groups, *problem, *plan_gemm("nvfp4", sum(groups), len(groups), *problem, SMS))
            theirs = launch_of("nvfp4", groups, *problem, PUBLISHED if projections == 1 else ours.tile)
            us, resources = gemm(theirs) * 1e6, busy(ours)
            print(f"{f'{name} {len(groups)} x {n} x {k}, {sum(groups)} rows':34} {published:9.1f} {us:7.1f} "
                  f"{us / published - 1:+7.0%} {gemm(ours) * 1e6:7.1f}  {described(ours)}, "
                  f"{max(resources, key=lambda r: resources[r])}")  # fmt: skip
    print(f"\n{'FlashInfer, DeepSeek-V3, 32 experts':34} {'published':>9} {'model':>7} {'off by':>7}")
    sizes, published_layers = FLASHINFER
    for activations, times in published_layers.items():
        for T, published in times.items():
            us = layer(*sizes, T, activations)["total"] * 1e6
            label = f"T={T} {'W4A4' if activations == 'nvfp4' else 'W4A16'}"
            print(f"{label:34} {published:9.1f} {us:7.1f} {us / published - 1:+7.0%}")
    columns = ("route", "rows", "gemm1", "gemm2", "combine", "total", "bound")
    print(f"\n{'Layers':34}", *(f"{c:>8}" for c in columns), "of bound   tiles of both GEMMs")
    cases = [(name, sizes, T, a, 0.0) for name, sizes in LAYERS.items() for a in ("nvfp4", "bf16")
             for T in (1, 16, 64, 256, 1024, 4096, 16384)]  # fmt: skip
    cases += [(name, sizes, T, "nvfp4", us) for name, (sizes, times) in LIGHTMOE.items() for T, us in times.items()]
    for name, sizes, T, activations, published in cases:
        m = layer(*sizes, T, activations)
        times = " ".join(f"{m[c] * 1e6:8.1f}" for c in columns)
        label = f"{name} T={T} {'W4A4' if activations == 'nvfp4' else 'W4A16'}"
        shapes = ", ".join(described(launch) for launch in gemms(*sizes, T, activations))
        beside = f"; LightMoE, measured: {published}" if published else ""
        print(f"{label:34} {times} {m['bound'] / m['total']:8.0%}   {shapes}{beside}")


def described(launch: Launch) -> str:
    """The tile in words: tokens by blocks, "pair" for pairs of CTAs, and the parts of K."""
    t = launch.tile
    return f"{t.tokens}x{t.blocks}" + " pair" * (t.ctas - 1) + (f" K/{launch.parts}" if launch.parts > 1 else "")


if __name__ == "__main__":
    main()
