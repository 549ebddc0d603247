"""How checkpoint files hold experts: one module per layout, for whatever converts, verifies or loads them.

In each module `recognise` finds the experts of a checkpoint by names and headers alone; their matrices are read in
pieces (`base.Matrix`). To add a layout, add a module here and a line in `plan.py` (`source.py`, if its
weights are quantized).
"""

from moe_nvfp4.quantize.layouts.base import CastSums, ErrorSums, ExpertLayout, Experts, Matrix

__all__ = ["CastSums", "ErrorSums", "ExpertLayout", "Experts", "Matrix"]
