"""What a GEMM kernel of the sm_80 backend is compiled for: the shape of a tile, and what a launch computes."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import BFloat16

from moe_nvfp4.weights import Gate

UNIT_BYTES = 2304  # of `sm90.pack`, 64 rows times 64 columns: 2048 of codes, 256 of scales
FEW = 32  # assignments that need no sorting: one for each lane of a warp
PLACES = 3  # tiles whose rows are in shared memory: one being stored, one being multiplied, the next one


@dataclass(frozen=True)
class TileShape:
    """A CTA's tile, and how its WM * WK warps share it. Each has 16 * MF weight rows and all tokens.

    NF      tokens per tile, in eights
    WM      warps that split the rows
    WK      warps that split a stage's 64-column blocks; their sums are added through shared memory
    MF      16-row fragments per warp
    KB      64-column blocks of K per stage
    stages  of the ring
    ctas    CTAs per multiprocessor
    small   NF of the MMAs for a tile of at most 8 * small tokens; 0: always NF
    """

    NF: int
    WM: int
    WK: int = 1
    MF: int = 4
    KB: int = 4
    stages: int = 3
    ctas: int = 1
    small: int = 0

    @property
    def BN(self) -> int:
        """Tokens per tile."""
        return 8 * self.NF

    @property
    def rows(self) -> int:
        """Weight rows per tile."""
        return 16 * self.MF * self.WM

    @property
    def units(self) -> int:
        """64-row units of packed weights per tile."""
        return self.rows // 64

    @property
    def threads(self) -> int:
        return 32 * self.WM * self.WK

    @property
    def storing(self) -> int:
        """Threads that have a tile's sums in the end: the first of those that split K."""
        return 32 * self.WM

    @property
    def x_bytes(self) -> int:
        """Of a stage's tokens."""
        return self.KB * self.BN * 128

    @property
    def w_bytes(self) -> int:
        """Of a stage's weights."""
        return self.KB * self.units * UNIT_BYTES

    @property
    def ring_bytes(self) -> int:
        """The ring of stages; between two tiles, sums of the warps that split K are there."""
        return max(self.stages * (self.x_bytes + self.w_bytes), (self.WK - 1) * self.rows * self.BN * 4)

    @property
    def shared_bytes(self) -> int:
        """Of a CTA, with the rows of its tiles."""
        return self.ring_bytes + 12 * PLACES * self.BN + 1024

    def check(self) -> None:
        """ValueError, which says why, if no kernel can have this shape."""
        pieces = 8 * self.BN  # of 16 bytes, in a 64-column block of all tokens
        if self.rows % 64 or self.MF not in (2, 4):
            raise ValueError(f"{self}: a tile has whole units of 64 rows, a warp two or four fragments")
        if self.NF % 2 or self.small % 2 or self.small >= self.NF:
            raise ValueError(f"{self}: a load of tokens brings 16, so NF and `small` are even, and `small` is less")
        if max(pieces, self.threads) % min(pieces, self.threads) or self.KB * pieces % self.threads:
            raise ValueError(f"{self}: {self.threads} threads cannot copy {pieces} pieces of each block evenly")
        if self.threads % self.units or self.KB % self.WK or self.BN > self.threads:
            raise ValueError(f"{self}: threads must split units evenly, warps the blocks; a token has a thread")


@dataclass(frozen=True)
class GemmConfig:
    """What a launch computes, apart from the shape of its tiles.

    tiles      how tokens' tiles are found: "sorted", listed by the routing kernel; "few", by a search among FEW expert
               ids; "all", of the rows in order, which belong to one matrix
    gate       what pairs two rows of the matrix, or None. A "raw" one stores both
    bias       whether the matrix has a bias
    row_scale  whether rows have a global scale each: NVFP4 activations
    shares     whether CTAs share the last tiles evenly, by parts of K
    out        dtype of the result, bf16 or fp32
    """

    tiles: str = "sorted"
    gate: Gate | None = None
    bias: bool = False
    row_scale: bool = False
    shares: bool = False
    out: type = BFloat16
