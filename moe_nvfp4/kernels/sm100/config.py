"""What the Blackwell kernels are compiled for: numbers only, without CuTe DSL. `model` chooses them."""

from __future__ import annotations

from dataclasses import dataclass

from moe_nvfp4.weights import Gate

SMEM = 232448  # bytes of shared memory that a CTA may have
TMEM = 512  # columns; a CTA has a power of two of them
BLOCK_K = 256  # codes
BYTES_K = BLOCK_K // 2  # the width of the swizzle
ROWS = 128  # weight rows of a block: the M of an MMA
TOGETHER = 16  # this many rows of gate and of up alternate (`pack`)
SF_TILE = 512  # bytes of a 128x4 tile of scales: K = 64, one MMA
BOXES = 4  # TMA boxes per token tile; a tile with fewer rows loads fewer
CHUNK = 16  # tokens that a thread of the epilogue handles at a time
# Blocks per tile -> instructions of a warp for 32 weight rows and 64 columns, which are the cycles per block (`model`)
DEQUANTIZE = {1: 186, 2: 169}
EXACT_BYTES = 1 << 24  # GEMM 2's rows up to this size are kept in fp32, as on Hopper
EIGHT = (0, 4, 1, 5, 2, 6, 3, 7)  # the order of each eight columns in "interleaved" rows: nibbles 16 bits apart pair up


@dataclass(frozen=True)
class TileShape:
    """The shape of a CTA's tile: `blocks` * 128 weight rows (of gate and up together) by `tokens` tokens.

    ctas  2: a pair of CTAs, each with its own weight rows, shares the token tile, and each loads half of it
    """

    tokens: int
    blocks: int
    ctas: int = 1

    def row_tiles(self, rows: int) -> int:
        """How many tiles `rows` weight rows make."""
        return -(-rows // (ROWS * self.ctas * self.blocks))

    @property
    def box(self) -> int:
        """Tokens per TMA box."""
        return self.tokens // self.ctas // BOXES

    @property
    def sf_tiles(self) -> int:
        """128-row scale tiles of a token tile."""
        return -(-self.tokens // 128)

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory per K tile: codes and scales of weights and tokens."""
        codes = (self.blocks * ROWS + self.tokens // self.ctas) * BYTES_K
        return codes + (self.blocks + self.sf_tiles) * 4 * SF_TILE

    @property
    def other_bytes(self) -> int:
        """Bytes of shared memory besides stages and epilogue: barriers."""
        return 256

    @property
    def operand_columns(self) -> int:
        """How many of a CTA's last TMEM columns hold operands of MMAs: here the block scales."""
        return 16 * (self.blocks + self.sf_tiles)

    @property
    def columns(self) -> int:
        """TMEM columns of a CTA: all, or half of them if two tiles fit there, so that another CTA can have the rest."""
        return TMEM // 2 if 2 * self.blocks * self.tokens + self.operand_columns <= TMEM // 2 else TMEM

    @property
    def second(self) -> int:
        """The first TMEM column of odd tiles."""
        return min(self.columns - self.operand_columns - self.blocks * self.tokens, self.blocks * self.tokens)

    @property
    def shared_tokens(self) -> int:
        """How many tokens of a tile have columns that the next tile overwrites.

        These are the last tokens of even tiles (in the last block) and the first tokens of odd tiles (in block 0).
        """
        return self.blocks * self.tokens - self.second

    @property
    def legal(self) -> bool:
        # A token tile lies in one 128-row tile of scales and starts at its TMEM column 0 or 2, which are 64 rows apart;
        # or it is two such tiles, and its sums take all of TMEM.
        if self.tokens == 256:
            return self.blocks == 1 and self.ctas == 2
        return self.tokens in (64, 128) and self.blocks in (1, 2) and self.ctas in (1, 2)


@dataclass(frozen=True)
class DenseTile(TileShape):
    """A tile for bf16 tokens: weights are dequantized to bf16 in TMEM, in steps of K = 64 (`w4a16`)."""

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
        """Bytes of tokens and barriers."""
        return self.token_bytes + 160 + 16 * (self.slots + self.token_slots)

    @property
    def operand_columns(self) -> int:
        return 32 * self.blocks * self.slots

    @property
    def legal(self) -> bool:
        return super().legal and self.ctas == 1


@dataclass(frozen=True)
class GemmConfig:
    """Everything that the compiled kernel depends on.

    rows         weight rows of a projection: I, or H
    k            codes per row, a multiple of 32 (TMA strides are multiples of 16 bytes)
    projections  2: [gate; up] in one tensor; or 1
    out          "nvfp4": codes and swizzled sf; "bfloat16", "float16", "float32": rows of that type;
                 "assignments", "assignments bfloat16": rows of fp32 or bf16, with row r at order[r];
                 "interleaved": bf16 rows as a `DenseTile` reads them
    gate         the gate; None: every weight row gives an output
    bias         dtype of the bias, or None
    parts        parts of K, each a tile of its own; part p of row r is row p * R + r of the output, which is fp32
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
        """Bytes of shared memory besides the ring: the epilogue's exchange, row scales, the tile map, barriers."""
        return 4 * (CHUNK * ROWS + 2 * self.tile.tokens) + 6 * self.map_size + self.tile.other_bytes

    @property
    def stages(self) -> int:
        return min(8, (SMEM - self.fixed_bytes) // self.tile.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory of the launch, a multiple of its alignment."""
        return -(-(self.stages * self.tile.stage_bytes + self.fixed_bytes) // 1024) * 1024

    @property
    def map_size(self) -> int:
        """Entries of the tile map, 6 bytes each: a power of two, for the binary search."""
        return 1 << max(0, self.experts - 1).bit_length()

    @property
    def scattered(self) -> bool:
        """Whether row r of the output goes to order[r]."""
        return self.out.startswith("assignments")

    @property
    def halves(self) -> bool:
        """Whether the output is rows of 16-bit numbers."""
        return self.out.endswith("float16") or self.out == "interleaved"

    @property
    def dense(self) -> bool:
        """Whether tokens are bf16."""
        return isinstance(self.tile, DenseTile)

    @property
    def fused(self) -> bool:
        """Whether two accumulators make one output."""
        return self.projections == 2 and self.gate is not None and self.gate.kind != "raw"

    @property
    def chunk(self) -> int:
        """Tokens that the epilogue handles at a time. If fused, the half of a warp with the up rows takes 16 others."""
        return CHUNK * (2 if self.fused else 1)

    @property
    def matrix_rows(self) -> int:
        """Weight rows per expert."""
        return self.rows * self.projections

    @property
    def row_tiles(self) -> int:
        return self.tile.row_tiles(self.matrix_rows)

    @property
    def work_tiles(self) -> int:
        """Tiles per token tile of an expert."""
        return self.row_tiles * self.parts

    @property
    def sf_row_tiles(self) -> int:
        """128-row scale tiles per expert."""
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
    """The width of "interleaved" rows: as many columns as packed weights have; the last ones are zero."""
    return -(-columns // 32) * 32


@dataclass(frozen=True)
class InterleaveConfig:
    """Everything that the compiled `InterleaveRows` depends on. k: columns, a multiple of 16; gather: by an index."""

    k: int
    gather: bool


@dataclass(frozen=True)
class QuantizeConfig:
    """Everything that the compiled `QuantizeRows` depends on."""

    experts: int
    k: int  # a multiple of 16
    dtype: str  # of x
    gather: bool
    static: bool  # a global scale per expert, else one per row
    four_over_six: bool = False  # see `format.quantize`


@dataclass(frozen=True)
class CombineConfig:
    """Everything that the compiled `Combine` depends on."""

    top_k: int
    hidden: int  # a multiple of 16
    weights: str  # dtype of the routing weights
    out: str  # dtype of y
    rows: str = "float32"  # dtype of GEMM 2's rows
    parts: int = 1  # of K, in GEMM 2


@dataclass(frozen=True)
class SumConfig:
    """Everything that the compiled `SumParts` depends on: `parts` of GEMM 1, with `rows` columns per projection."""

    parts: int
    experts: int
    rows: int
    gate: Gate
    out: str  # dtype of h, or "interleaved"

    @property
    def projections(self) -> int:
        """How many projections make one column of h."""
        return 2 if self.gate.gated and self.gate.kind != "raw" else 1

    @property
    def columns(self) -> int:
        """Columns per projection."""
        return self.rows * (2 if self.gate.gated and self.gate.kind == "raw" else 1)

    @property
    def width(self) -> int:
        """Columns of h."""
        return interleaved_width(self.columns) if self.out == "interleaved" else self.columns


@dataclass(frozen=True)
class RouteConfig:
    """Everything that the compiled `Route` depends on. ids: the dtype of ids; the rest as in `Route`."""

    ids: str
    ctas: int
    warps: int
    each: int
