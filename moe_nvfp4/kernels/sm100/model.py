"""A performance model of the Blackwell layer on a B200. Nothing of ours is measured: no Blackwell was at hand.

    python -m moe_nvfp4.kernels.sm100.model

The kernels' tiles are those that it prefers (`plan_gemm`).

A GEMM takes as long as the slowest of five things: bytes through HBM, and for the CTA with the most tiles the cycles
that its tensor cores, its shared memory, its MMA-issuing warp, and the issue slots for epilogue and dequantization
are busy (they overlap, tile against tile); and START. A layer is routing, rows, both GEMMs and the sum, one after the
other.

Where numbers come from: B200's data sheet (HBM, products); what the emulator counts when it runs the compiled kernels
(bytes through shared memory, instructions: `tests/kernels/test_sm100_model.py` compares); an H200 (LAUNCH); and two
published kernels, to which START and REACHED are fitted: the fastest NVFP4 grouped GEMM of GPU MODE's hackathon, its
longest problem and its shortest. Its tile is ours: weights are M, pairs of CTAs, 128 tokens. `main` prints how far off
the model is for the other problems, and for whole layers of LightMoE, another library whose B200 numbers are published.
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
PRODUCTS = {"nvfp4": 16384, "bf16": 4096}  # per SM and cycle: 9 and 2.25 PFLOP/s
SHARED = 128  # bytes per SM and cycle, read or written
ISSUE = 2  # cycles of an instruction of a warp by itself: an assumption, between 1 and 5 (where each needs the last)
LAUNCH = 3e-6  # of an empty CUDA graph, on an H200
START, REACHED = 4.5e-6, 0.773  # a GEMM alone, beside its slowest resource; share of HBM's data sheet rate: fitted
# Instructions of an epilogue warp for a chunk of tokens: CHUNK_LOOP, and for each block, by (activations, projections,
# what leaves). This and what `of_step` and `of_chunk` say is counted by the emulator: PTX without mov,
# which is no machine instruction as a rule.
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
    """One GEMM: `groups` are the rows of each expert; n is per projection; out_bytes of an element of the result."""

    groups: tuple[int, ...]
    n: int
    k: int
    projections: int
    out: str
    out_bytes: float
    tile: TileShape
    activations: str = "nvfp4"
    parts: int = 1  # of K, each a tile of its own that leaves fp32

    @property
    def chunk(self) -> int:
        """See `GemmConfig.chunk`."""
        return CHUNK * (2 if self.projections == 2 and self.out != "float32" else 1)


class Counts(NamedTuple):
    """What a CTA does, as the emulator counts it: bytes through shared memory, instructions of the MMA warp, and issue
    slots (a multiprocessor has four a cycle) of the warps that dequantize and that store."""

    shared: float
    instructions: float
    slots: float


def of_step(tile: TileShape, activations: str, width: int) -> Counts:
    """64 of K of a tile with `width` tokens."""
    blocks, dense = tile.blocks, activations == "bf16"
    a, b, sf = ROWS * 32, width // tile.ctas * (128 if dense else 32), SF_TILE  # bytes
    if dense:  # in: all once; out: codes and scales (whose rows collide in fours) once, tokens for each block
        shared = blocks * (a + sf) + b + blocks * (a + 4 * sf + b)
        return Counts(shared, 30 + 8 * blocks, 4 * blocks * DEQUANTIZE[blocks])
    shared = blocks * (a + sf) + b + tile.sf_tiles * sf + blocks * (a + b) + (blocks + tile.sf_tiles) * sf
    return Counts(shared, 3.5 + 8.5 * (blocks + tile.sf_tiles), 0)


def of_chunk(launch: Launch) -> Counts:
    """`launch.chunk` tokens of a tile in the epilogue: for each block four warps turn them around in shared memory."""
    blocks = launch.tile.blocks
    exchanged = 2 * CHUNK * ROWS * (4 if launch.out in ("nvfp4", "assignments", "float32") else 2)
    if launch.activations == "nvfp4":  # scales of the tokens, other ones for the halves of a warp
        exchanged += 8192 if launch.projections == 2 else 2048
    each = EPILOGUE[launch.activations, launch.projections, launch.out]
    return Counts(blocks * exchanged, 0, 4 * (CHUNK_LOOP + blocks * each))


def tiles_of_one(groups: tuple[int, ...], tokens: int, each: int, workers: int) -> Counter[int]:
    """{tokens of a tile: how many such tiles the first of `workers` has}, each token tile being `each` tiles."""
    found: Counter[int] = Counter()
    at = 0
    for rows in groups:
        for size, number in ((tokens, rows // tokens), (rows % tokens, 1)):
            if size and number:  # of every `workers` tiles it has the first
                end = at + number * each
                found[size] += -(-end // workers) - -(-at // workers)
                at = end
    return found


def busy(launch: Launch, sms: int = SMS) -> dict[str, float]:
    """Seconds that each resource is busy."""
    tile, dense = launch.tile, launch.activations == "bf16"
    each, steps = tile.row_tiles(launch.n * launch.projections) * launch.parts, -(-launch.k // 64)
    steps = min(steps, -(-steps // (4 * launch.parts)) * 4)  # a part is so many K tiles of 256
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
    return {**{name: n / CLOCK for name, n in cycles.items()}, "hbm": size / (HBM * REACHED)}


def gemm(launch: Launch) -> float:
    """Seconds of a GEMM alone."""
    return START + max(busy(launch).values())


@lru_cache(maxsize=4096)
def plan_gemm(
    activations: str, rows: int, experts: int, weight_rows: int, k: int, projections: int, out: str, sms: int
) -> tuple[TileShape, int]:
    """The tile for so many rows in all, spread over the experts, and the parts of K: which take the least time. Of
    equals the one that keeps a multiprocessor busy for the shortest (pairs of CTAs: by a fifth), then the largest tile,
    but no more tokens than an expert has.

    weight_rows  of a projection
    out          as in `GemmConfig`, but "assignments" may come in parts, and so may all that leaves GEMM 1: fp32 sums
                 that a kernel more adds up before the gate. That has to be worth it, by a twentieth of the time at
                 least; with NVFP4 rows it is not.
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
    """As `GemmConfig` has it."""
    if parts > 1 and out != "assignments":
        out = "float32"
    size = {"assignments": 4, "float32": 4, "nvfp4": NVFP4}.get(out, 2)
    kind = out if (activations, projections, out) in EPILOGUE else {"nvfp4": "bfloat16"}.get(activations, "interleaved")
    return Launch(groups, n, k, projections, kind, size, tile, activations, parts)


def adding(launch: Launch) -> float:
    """Seconds that parts take beside the GEMM: of GEMM 1 a kernel more, of GEMM 2 more rows to read for the sum."""
    if launch.parts == 1:
        return 0.0
    scattered = launch.out == "assignments"
    size = 4 * sum(launch.groups) * launch.n * launch.projections * (launch.parts - scattered)
    return size / (HBM * REACHED) + (0.0 if scattered else START - LAUNCH)


def gemms(H: int, I: int, experts: int, top_k: int, tokens: int, activations: str) -> tuple[Launch, Launch]:
    """Both of a layer."""
    groups, rows = spread(tokens * top_k, experts), tokens * top_k
    out = "assignments" if rows * H * 4 <= EXACT_BYTES else "assignments bfloat16"
    problems = (I, H, 2, "nvfp4" if activations == "nvfp4" else "interleaved"), (H, I, 1, out)
    first, second = (
        launch_of(activations, groups, *p, *plan_gemm(activations, rows, experts, *p, SMS)) for p in problems
    )
    return first, second


def layer(H: int, I: int, experts: int, top_k: int, tokens: int, activations: str) -> dict[str, float]:
    """Seconds of a layer's kernels, and the bound that no kernels can beat: weights, x and y once, or the products."""
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
    """So many rows over the experts, as uneven as routers are: from half of the mean to one and a half of it."""
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
# rows of each group, N, K, the best published time in us (GPU MODE's NVFP4 hackathon, 2026); the tile of those kernels
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


def main() -> None:
    print("A model of a B200, in us; nothing of ours is measured.\n")
    print("Published kernels, and the model of them (a tile as theirs) and of ours")
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
    """Tokens by blocks, whether by pairs of CTAs, and the parts of K."""
    t = launch.tile
    return f"{t.tokens}x{t.blocks}" + " pair" * (t.ctas - 1) + (f" K/{launch.parts}" if launch.parts > 1 else "")


if __name__ == "__main__":
    main()
