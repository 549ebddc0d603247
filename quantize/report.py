"""What a conversion did, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moe_nvfp4.quantize.layouts import CastSums, ErrorSums
from moe_nvfp4.quantize.linears import Linear


@dataclass
class ConversionReport:
    """What a conversion did, or (dry_run) would do. Sizes are in bytes; `bytes_before` is that of weight files, all
    others are those of tensors."""

    source: Path
    destination: Path
    recipe: str
    activations: str = "bf16"  # what the new files ask loaders for
    quantized: int = 0  # matrices of experts
    fused: tuple[tuple[Linear, ...], ...] = ()  # linears that were quantized; each tuple shares a global scale
    carried: int = 0  # NVFP4 matrices whose bytes were carried into another dialect
    carried_linears: int = 0  # those of them that are no experts'
    copied: int = 0  # tensors
    dequantized: int = 0  # FP8 matrices and MXFP4 stacks that became dense
    modules: tuple[str, ...] = ()  # the experts modules that are quantized, as files name them
    skipped: dict[str, str] = field(default_factory=dict)  # name -> why it was left alone
    not_compared: str = ""  # why the source's tensors could not be compared with its model's own list
    bytes_before: int = 0
    bytes_after: int = 0
    experts_before: int = 0  # of the matrices that are quantized
    experts_after: int = 0
    linears_before: int = 0
    linears_after: int = 0
    shards: int = 0
    resumed: int = 0  # source bytes that an earlier run had converted
    rescaled: int = 0  # carried matrices that were quantized again, so that gate and up share a global scale
    rescaling: ErrorSums = field(default_factory=ErrorSums)  # the error that this added
    cast: CastSums = field(default_factory=CastSums)  # what became of MXFP4 matrices in this run
    seconds: float = 0.0

    @property
    def linears(self) -> int:
        """How many linears were quantized."""
        return sum(map(len, self.fused))

    def lines(self) -> Iterator[str]:
        """The report, line by line."""
        yield f"{self.source} -> {self.destination}: {self.shards} file(s)"
        for count, what in (
            (self.quantized, f"expert matrices quantized ({self.recipe})"),
            (self.linears, f"linears quantized ({self.recipe})"),
            (self.carried, "NVFP4 matrices carried over, the same bytes"),
            (self.dequantized, "FP8 and MXFP4 tensors made dense"),
            (self.copied, "tensors copied as they are"),
        ):
            if count:
                yield f"  {count:7d} {what}"
        yield from self.cast_lines()
        yield from self.rescaled_lines()
        yield from (f"  left alone: {name}: {why}" for name, why in self.skipped.items())
        if self.not_compared:
            yield f"  not compared with the model's own list of tensors: {self.not_compared}"
        if self.quantized:
            yield f"  experts {readable_size(self.experts_before)} -> {readable_size(self.experts_after)}"
        if self.linears:
            yield f"  linears {readable_size(self.linears_before)} -> {readable_size(self.linears_after)}"
        yield f"  all     {readable_size(self.bytes_before)} -> {readable_size(self.bytes_after)}"

    def cast_lines(self) -> Iterator[str]:
        """What became of MXFP4 matrices, if this run did all of it."""
        if self.cast.matrices and not self.resumed:
            error = f"{self.cast.lost} of them with a relative error of at most {self.cast.relative:.3g}"
            lost = error if self.cast.lost else "none lost anything"
            yield f"  {self.cast.matrices:7d} MXFP4 matrices cast to NVFP4, {lost}"

    def rescaled_lines(self) -> Iterator[str]:
        """What --share-scales did, with the error that it added if this run did all of it."""
        if self.rescaled:
            known = self.rescaling.square and not self.resumed
            error = f", which adds a relative error of {self.rescaling.relative:.4f} to them" if known else ""
            yield f"  {self.rescaled:7d} of the carried matrices (gate or up) quantized again, to share a scale{error}"


def readable_size(n: float) -> str:
    """n bytes, for a person: "44.8 MB"."""
    for unit in ("B", "KB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"


def readable_snr(sums: ErrorSums, digits: int) -> str:
    """The signal-to-noise ratio in dB, for a person: "20.1", or "exact" where there is no error."""
    return f"{sums.snr:.{digits}f}" if sums.error else "exact"
