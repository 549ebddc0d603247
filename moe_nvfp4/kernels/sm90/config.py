"""What a Hopper GEMM kernel is compiled for: the shape of a tile, and what a launch computes."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import BFloat16, Float32

from moe_nvfp4.kernels.sm90.pack import UNIT_WORDS
from moe_nvfp4.weights import Gate

MAX_EXPERTS = 1024
SMEM = 233472  # bytes of shared memory per multiprocessor; a CTA's ring has 3 KB and the tile list less than its share


@dataclass(frozen=True)
class TileShape:
    """A CTA's tile, and how its consumer warpgroups share the work.

    BN         tokens per tile: N
    NWG        consumer warpgroups
    MB         64-row blocks of weights per warpgroup
    KS         parts of K among the warpgroups; in each part, NWG / KS warpgroups split the rows
    KB         64-column blocks of K per stage
    stages     of the ring
    group      k16 steps per WGMMA commit
    registers  of a consumer thread and of a producer thread
    small      N of the WGMMAs for a tile of at most this many tokens; 0: always BN
    ctas       CTAs per multiprocessor
    """

    BN: int = 8
    NWG: int = 4
    MB: int = 1
    KS: int = 1
    KB: int = 4
    stages: int = 5
    group: int = 2
    registers: tuple[int, int] = (104, 64)
    small: int = 0
    ctas: int = 1

    @property
    def m_warpgroups(self) -> int:
        """Warpgroups that split the rows."""
        return self.NWG // self.KS

    @property
    def m_blocks(self) -> int:
        """64-row blocks per tile."""
        return self.m_warpgroups * self.MB

    @property
    def uses_mma_sync(self) -> bool:
        """Whether consumers use mma.sync, warp by warp, instead of WGMMA."""
        return self.BN == 8

    @property
    def first_stages(self) -> int:
        """Stages in flight until the ring is full for the first time."""
        return self.stages // 2

    @property
    def slots(self) -> int:
        """Tiles fetched ahead. With one or two tiles per CTA, the first CTA should not take all of GEMM 2."""
        return 2 if self.KS == 4 else 4

    @property
    def log2_KB(self) -> int:
        """K in 64-column blocks, shifted by this, is the number of stages; a division would cost every tile time."""
        return self.KB.bit_length() - 1

    def split_blocks(self, blocks, log2_split_k):
        """64-column blocks per part, in whole stages, when K is split into 2^log2_split_k parts. Takes integers of
        Python or of a kernel."""
        return (((blocks - 1) >> log2_split_k) + self.KB) & -self.KB

    @property
    def box_rows(self) -> int:
        """Rows of tokens per TMA copy."""
        return 16 if self.BN % 16 == 0 else 8

    @property
    def stage_bytes(self) -> int:
        return self.KB * (self.m_blocks * UNIT_WORDS * 4 + self.BN * 128)

    @property
    def threads(self) -> int:
        return 128 * (self.NWG + 1)

    def check(self) -> None:
        """ValueError, which says why, if no kernel can have this shape."""
        partial_sums = (self.KS - 1) * self.m_blocks * 64 * self.BN * 4
        if self.BN % 8 or not 8 <= self.BN <= 256:
            raise ValueError(f"{self}: BN must be a multiple of 8 up to 256")
        if self.KB != 1 << self.log2_KB:
            raise ValueError(f"{self}: KB must be a power of two")
        if self.uses_mma_sync and (self.KB % self.KS or self.MB > 1):
            raise ValueError(f"{self}: KS must divide KB, and MB be 1, with so few tokens")
        if not self.uses_mma_sync and (self.NWG % self.KS or self.KB % (2 * self.KS)):
            raise ValueError(f"{self}: the fragment ring needs an even number of 64-column blocks per warpgroup")
        available = 65536 // (self.ctas * self.threads) // 8 * 8 * self.threads
        if 128 * (self.NWG * self.registers[0] + self.registers[1]) > available:
            raise ValueError(f"{self}: a CTA of {self.threads} threads has {available} registers from start to end")
        if self.small % 8 or self.small >= self.BN or self.uses_mma_sync and self.small:
            raise ValueError(f"{self}: `small` must be a multiple of 8 below BN, and 0 without WGMMA")
        needed = self.stages * self.stage_bytes + partial_sums + 8 * self.slots * self.BN  # two numbers per row
        available = SMEM // self.ctas - 2816 - 8 * (MAX_EXPERTS + 1)
        if needed > available:
            raise ValueError(f"{self}: {needed} bytes of shared memory, {available} are available")


@dataclass(frozen=True)
class GemmConfig:
    """What a launch computes, apart from the shape of its tiles.

    gate       the gate after GEMM 1; None: no GEMM 1
    down       whether there is GEMM 2
    gathered   whether rows of x are found by index; else they lie in order
    grouped    whether rows belong to experts, by the group offsets; else all belong to one: GEMM 2 of a linear
    joined     whether the matrix is that of several linears, each of which has a global scale
    bias       whether the matrices have biases
    row_scale  whether rows (of x, or of a linear) have a global scale each: NVFP4 activations. h is then quantized by
               separate tiles between those of GEMM 1 and GEMM 2: bf16 h with a scale per row, fp32 h with its expert's
    four_over_six  whether h is quantized with `format.quantize`'s four_over_six
    h, out     dtypes that GEMM 1 and GEMM 2 write, bf16 or fp32
    """

    gate: Gate | None = None
    down: bool = False
    gathered: bool = True
    bias: bool = False
    row_scale: bool = False
    four_over_six: bool = False
    h: type = BFloat16
    out: type = BFloat16
    grouped: bool = True
    joined: bool = False

    @property
    def gathers_x(self) -> bool:
        """Whether there are rows of x and they are found by index."""
        return self.gathered and self.gate is not None

    @property
    def both_gemms(self) -> bool:
        return self.gate is not None and self.down

    @property
    def quantizes_h(self) -> bool:
        return self.row_scale and self.both_gemms

    @property
    def tracks_amax(self) -> bool:
        """Whether GEMM 1 keeps the largest magnitude of each row of h."""
        return self.quantizes_h and self.h is BFloat16

    @property
    def h_columns(self) -> int:
        """bf16 columns per value of h: two if fp32 values are to be quantized."""
        return 2 if self.quantizes_h and self.h is Float32 else 1
