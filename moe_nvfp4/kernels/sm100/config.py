"""What the Blackwell kernels are compiled for: numbers only, no CuTe DSL. `model` chooses."""

from __future__ import annotations

from dataclasses import dataclass

from moe_nvfp4.weights import Gate

SMEM = 232448  # bytes of shared memory a CTA may have
TMEM = 512  # columns, of which a CTA has a power of two
BLOCK_K = 256  # codes
BYTES_K = BLOCK_K // 2  # the width of the swizzle
ROWS = 128  # weight rows of a block: the M of an MMA
TOGETHER = 16  # rows of gate, then as many of up, in turn (`pack`)
SF_TILE = 512  # bytes of a 128x4 tile of scales: K = 64, one MMA
BOXES = 4  # TMA boxes of a token tile; a tile with fewer rows loads fewer
CHUNK = 16  # tokens that a thread of the epilogue handles at a time
# By the blocks of a tile, instructions of a warp for 32 weight rows and 64 columns: cycles for a block (`model`)
DEQUANTIZE = {1: 186, 2: 169}
EXACT_BYTES = 1 << 24  # GEMM 2's rows up to this size are kept in fp32, as on Hopper
EIGHT = (0, 4, 1, 5, 2, 6, 3, 7)  # how "interleaved" rows have each eight columns: nibbles of a word, four bits apart


@dataclass(frozen=True)
class TileShape:
    """The shape of a CTA's tile: `blocks` * 128 weight rows by `tokens` tokens. Rows of gate and of up count alike.

    ctas  2: a pair of CTAs, each with its own weight rows, shares the token tile: each loads half of it
    """

    tokens: int
    blocks: int
    ctas: int = 1

    def row_tiles(self, rows: int) -> int:
        """Tiles of so many weight rows."""
        return -(-rows // (ROWS * self.ctas * self.blocks))

    @property
    def box(self) -> int:
        """Tokens of a TMA box."""
        return self.tokens // self.ctas // BOXES

    @property
    def sf_tiles(self) -> int:
        """128-row scale tiles of the tokens."""
        return -(-self.tokens // 128)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a K tile: codes and scales of weights and tokens."""
        codes = (self.blocks * ROWS + self.tokens // self.ctas) * BYTES_K
        return codes + (self.blocks + self.sf_tiles) * 4 * SF_TILE

    @property
    def other_bytes(self) -> int:
        """Shared memory beside stages and epilogue: barriers."""
        return 256

    @property
    def operand_columns(self) -> int:
        """The last TMEM columns of a CTA: operands of the MMAs; here the block scales."""
        return 16 * (self.blocks + self.sf_tiles)

    @property
    def columns(self) -> int:
        """TMEM columns of a CTA: all, or half of them where two tiles fit: the rest is for others."""
        return TMEM // 2 if 2 * self.blocks * self.tokens + self.operand_columns <= TMEM // 2 else TMEM

    @property
    def second(self) -> int:
        """First TMEM column of odd tiles."""
        return min(self.columns - self.operand_columns - self.blocks * self.tokens, self.blocks * self.tokens)

    @property
    def shared_tokens(self) -> int:
        """Tokens of a tile whose columns the next tile overwrites.

        The last ones of even tiles (in the last block) and the first ones of odd tiles (in block 0).
        """
        return self.blocks * self.tokens - self.second

    @property
    def legal(self) -> bool:
        # A token tile lies in one 128-row tile of scales, and starts at its TMEM column 0 or 2: 64 rows apart; or it
        # is two of them, whose sums take all of TMEM.
        if self.tokens == 256:
            return self.blocks == 1 and self.ctas == 2
        return self.tokens in (64, 128) and self.blocks in (1, 2) and self.ctas in (1, 2)


@dataclass(frozen=True)
class DenseTile(TileShape):
    """A tile for bf16 tokens: the weights become bf16 in TMEM, in steps of K = 64 (`w4a16`)."""

    @property
    def slots(self) -> int:
        """Steps of dequantized weights in TMEM: an even number, for two groups of warps."""
        return 2 if self.blocks * self.tokens == 256 else 4

    @property
    def token_slots(self) -> int:
        """Steps of tokens in shared memory: 64 KiB."""
        return 512 // self.tokens

    @property
    def stage_bytes(self) -> int:
        return self.blocks * (ROWS * BYTES_K + 4 * SF_TILE)

    @property
    def token_bytes(self) -> int:
        return self.token_slots * self.tokens * BYTES_K

    @property
    def other_bytes(self) -> int:
        """Tokens, and barriers."""
        return self.token_bytes + 160 + 16 * (self.slots + self.token_slots)

    @property
    def operand_columns(self) -> int:
        return 32 * self.blocks * self.slots

    @property
    def legal(self) -> bool:
        return super().legal and self.ctas == 1


@dataclass(frozen=True)
class GemmConfig:
    """All that the compiled kernel depends on.

    rows         weight rows of a projection: I, or H
    k            codes per row, a multiple of 32 (TMA strides are multiples of 16 bytes)
    projections  2: [gate; up] in one tensor; 1
    out          "nvfp4": codes and swizzled sf, "bfloat16", "float16", "float32": rows of that type;
                 "assignments", "assignments bfloat16": rows of fp32 or bf16, row r at order[r];
                 "interleaved": bf16 rows as a `DenseTile` reads them
    gate         what happens to gate and up; None: every row is an output of its own
    bias         dtype of the bias, or None
    parts        of K, each a tile of its own; part p of row r is row p * R + r of the output, which is fp32
    four_over_six  how "nvfp4" is quantized: see `format.quantize`
    """

    experts: int
    rows: int
    k: int
    projections: int
    out: str
    gate: Gate | None
    bias: str | None
    tile: TileShape
    parts: int = 1
    four_over_six: bool = False

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the ring: the epilogue's exchange, row scales, the tile map, barriers."""
        return 4 * (CHUNK * ROWS + 2 * self.tile.tokens) + 6 * self.map_size + self.tile.other_bytes

    @property
    def stages(self) -> int:
        return min(8, (SMEM - self.fixed_bytes) // self.tile.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the launch: a multiple of its alignment."""
        return -(-(self.stages * self.tile.stage_bytes + self.fixed_bytes) // 1024) * 1024

    @property
    def map_size(self) -> int:
        """Experts in the tile map, 6 bytes each: a power of two, for the binary search."""
        return 1 << max(0, self.experts - 1).bit_length()

    @property
    def scattered(self) -> bool:
        """Row r goes to order[r]."""
        return self.out.startswith("assignments")

    @property
    def halves(self) -> bool:
        """16-bit rows leave."""
        return self.out.endswith("float16") or self.out == "interleaved"

    @property
    def dense(self) -> bool:
        """bf16 tokens."""
        return isinstance(self.tile, DenseTile)

    @property
    def fused(self) -> bool:
        """Two accumulators make one output."""
        return self.projections == 2 and self.gate is not None and self.gate.kind != "raw"

    @property
    def chunk(self) -> int:
        """Tokens that the epilogue handles at a time: the half of a warp that would have up rows takes 16 more."""
        return CHUNK * (2 if self.fused else 1)

    @property
    def matrix_rows(self) -> int:
        """Weight rows of an expert."""
        return self.rows * self.projections

    @property
    def row_tiles(self) -> int:
        return self.tile.row_tiles(self.matrix_rows)

    @property
    def work_tiles(self) -> int:
        """Tiles of an expert's token tile."""
        return self.row_tiles * self.parts

    @property
    def sf_row_tiles(self) -> int:
        """128-row scale tiles of an expert."""
        return -(-self.matrix_rows // ROWS)

    @property
    def k_steps(self) -> int:
        """MMAs along K."""
        return -(-self.k // 64)

    @property
    def k_tiles(self) -> int:
        return -(-self.k // BLOCK_K)

    @property
    def width(self) -> int:
        """Columns of the output."""
        if self.out == "interleaved":
            return interleaved_width(self.rows)
        return self.rows if self.fused else self.matrix_rows

    @property
    def legal(self) -> bool:
        return (
            self.tile.legal
            and self.rows % 16 == 0
            and (self.out != "interleaved" or self.fused or self.projections == 1)
            and not (self.dense and self.out == "nvfp4")
            and (self.parts == 1 or self.split_legal)
            and self.k % 32 == 0
            and self.stages >= 2
        )

    @property
    def split_legal(self) -> bool:
        return self.dense and self.out in ("assignments", "float32") and not self.fused and self.parts <= self.k_tiles


def interleaved_width(columns: int) -> int:
    """Of "interleaved" rows: as many columns as packed weights have, the last ones zero."""
    return -(-columns // 32) * 32


@dataclass(frozen=True)
class InterleaveConfig:
    """All that the compiled `InterleaveRows` depends on. k: columns, a multiple of 16; gather: by an index."""

    k: int
    gather: bool


@dataclass(frozen=True)
class QuantizeConfig:
    """All that the compiled `QuantizeRows` depends on."""

    experts: int
    k: int  # a multiple of 16
    dtype: str  # of x
    gather: bool
    static: bool  # a global scale per expert, else one per row
    four_over_six: bool = False  # see `format.quantize`


@dataclass(frozen=True)
class CombineConfig:
    """All that the compiled `Combine` depends on."""

    top_k: int
    hidden: int  # a multiple of 16
    weights: str  # dtype of the routing weights
    out: str  # dtype of y
    rows: str = "float32"  # dtype of GEMM 2's rows
    parts: int = 1  # of K, in GEMM 2


@dataclass(frozen=True)
class SumConfig:
    """All that the compiled `SumParts` depends on: `parts` of GEMM 1, of `rows` columns for each projection."""

    parts: int
    experts: int
    rows: int
    gate: Gate
    out: str  # dtype of h, or "interleaved"

    @property
    def projections(self) -> int:
        """That one column of h is made of."""
        return 2 if self.gate.gated and self.gate.kind != "raw" else 1

    @property
    def columns(self) -> int:
        """Of one of them."""
        return self.rows * (2 if self.gate.gated and self.gate.kind == "raw" else 1)

    @property
    def width(self) -> int:
        """Columns of h."""
        return interleaved_width(self.columns) if self.out == "interleaved" else self.columns


@dataclass(frozen=True)
class RouteConfig:
    """All that the compiled `Route` depends on. ids: their dtype; the rest as there."""

    ids: str
    ctas: int
    warps: int
    each: int
