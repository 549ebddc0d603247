"""A performance model of the Blackwell GEMMs on a B200. Nothing here is measured: no Blackwell was at hand.

    python -m moe_nvfp4.kernels.sm100.model

A launch is as slow as the slowest of five things, plus a ramp: bytes through HBM, and for the CTA with the most
tiles the cycles its tensor cores, its shared memory, its MMA-issuing thread and its epilogue are busy (they overlap,
tile against tile). Constants are data-sheet numbers or counted: per SM and cycle 16384 NVFP4 products, 128 bytes of
shared memory, read or written; epilogue instructions per 16 tokens from the disassembly, one per cycle and scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_nvfp4.kernels.sm100.config import ROWS, choose_tile

SMS, CLOCK, HBM = 148, 1.85e9, 8e12  # B200
PRODUCTS, SHARED = 16384, 128  # per SM and cycle
ISSUE = 8  # cycles between two tcgen05 instructions of one thread: an assumption
RAMP = 3e-6  # launch, TMEM and barriers, the first loads, the last epilogue: an assumption
EPILOGUE = {"nvfp4": 400, "bfloat16": 230, "assignments": 180}  # instructions of a warp per 16 tokens
OUT_BYTES = {"nvfp4": 0.5625, "bfloat16": 2, "assignments": 4}
NVFP4 = 0.5625  # bytes of a code with its share of a block scale


@dataclass(frozen=True)
class Launch:
    """One GEMM: `groups` are the rows of each expert; N is per projection."""

    groups: tuple[int, ...]
    n: int
    k: int
    projections: int
    out: str

    def tile(self):
        return choose_tile(sum(self.groups), len(self.groups), self.n, self.projections, SMS)


def model(launch: Launch) -> dict[str, float]:
    """Seconds each resource is busy, the sum of what a launch takes, and the bound no kernel can beat."""
    tile = launch.tile()
    per_tile = ROWS * tile.ctas * (1 if launch.projections == 2 else tile.blocks)
    row_tiles, k_steps = -(-launch.n // per_tile), -(-launch.k // 64)
    tiles = [min(tile.tokens, rows - i) for rows in launch.groups for i in range(0, rows, tile.tokens)]
    workers = min(SMS // tile.ctas, len(tiles) * row_tiles)
    busiest = [tiles[i // row_tiles] for i in range(0, len(tiles) * row_tiles, workers)]  # of CTA (or pair) 0
    matrix = shared = issue = epilogue = 0.0
    for rows in busiest:
        width = -(-rows // 16) * 16
        matrix += k_steps * tile.blocks * 128 * max(width, 64) * 64 / PRODUCTS
        a, b = 128 * 32, width // tile.ctas * 32  # bytes of a step
        shared += k_steps * (tile.blocks * (a + b) + tile.blocks * a + b + 2 * 512 * (tile.blocks + 1)) / SHARED
        issue += k_steps * (2 * tile.blocks + 1) * ISSUE
        epilogue += width / 16 * EPILOGUE[launch.out]
    hit = [rows for rows in launch.groups if rows]
    outputs = launch.n if launch.projections == 1 or launch.out != "assignments" else 2 * launch.n
    weights = len(hit) * launch.n * launch.projections * launch.k * NVFP4
    size = weights + sum(hit) * (launch.k * NVFP4 + outputs * OUT_BYTES[launch.out])
    flops = 2 * sum(hit) * launch.n * launch.projections * launch.k
    times = {name: cycles / CLOCK for name, cycles in
             dict(matrix=matrix, shared=shared, issue=issue, epilogue=epilogue).items()}  # fmt: skip
    times["hbm"] = size / HBM
    bound = max(size / HBM, flops / (2 * PRODUCTS * SMS * CLOCK))
    return {**times, "total": max(times.values()) + RAMP, "bound": bound, "waves": len(tiles) * row_tiles / workers}


def spread(tokens: int, top_k: int, experts: int) -> tuple[int, ...]:
    """tokens * top_k rows, as evenly as they go, over the experts."""
    each, more = divmod(tokens * top_k, experts)
    return tuple(each + (i < more) for i in range(experts))


LAYERS = {  # H, I, experts, top_k
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "DeepSeek-V3": (7168, 2048, 256, 8),
}
# rows of each group, N, K, the best published time in us (GPU MODE's NVFP4 hackathon)
DUAL = [
    ((256,), 4096, 7168, 12.4),
    ((512,), 4096, 7168, 16.4),
    ((256,), 3072, 4096, 9.4),
    ((512,), 3072, 7168, 16.3),
]
GROUPED = [
    ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168, 27.9),
    ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048, 19.4),
    ((192, 320), 3072, 4096, 8.48),
    ((128, 384), 4096, 1536, 6.43),
]


def main() -> None:
    cases = [(f"dual {sum(g)} x {n} x {k}", Launch(g, n, k, 2, "bfloat16"), t) for g, n, k, t in DUAL]
    cases += [(f"grouped {len(g)} x {n} x {k}", Launch(g, n, k, 1, "bfloat16"), t) for g, n, k, t in GROUPED]
    for name, (H, I, E, top_k) in LAYERS.items():
        for T in (1, 16, 64, 256, 1024, 4096, 16384):
            groups = spread(T, top_k, E)
            cases.append((f"{name} T={T} gemm1", Launch(groups, I, H, 2, "nvfp4"), None))
            cases.append((f"{name} T={T} gemm2", Launch(groups, H, I, 1, "assignments"), None))
    print("A model of B200, in us; nothing is measured. `of bound` = bound / total; published: the best known kernel.")
    columns = ("matrix", "shared", "issue", "epilogue", "hbm", "total", "bound")
    print(f"{'':30} {'tile':>12} {'waves':>6}", *(f"{c:>9}" for c in columns), "of bound", "published")
    for name, launch, published in cases:
        m, t = model(launch), launch.tile()
        tile = f"{t.tokens}x{t.blocks}" + " pair" * (t.ctas - 1)
        times = " ".join(f"{m[c] * 1e6:9.1f}" for c in columns)
        share = f"{m['bound'] / m['total']:8.0%}"
        print(f"{name:30} {tile:>12} {m['waves']:6.1f} {times} {share} {published or ''}")


if __name__ == "__main__":
    main()
