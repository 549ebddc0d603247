"""How checkpoint files hold experts: a file for each layout, read by whatever converts, verifies or loads.

In each, `recognise` finds the experts of a checkpoint by names and headers alone, and their matrices are read in
pieces (`base.Matrix`). A new layout is a file here and a line in `plan.py`.
"""

from moe_nvfp4.quantize.layouts.base import ErrorSums, ExpertLayout, Experts, Matrix

__all__ = ["ErrorSums", "ExpertLayout", "Experts", "Matrix"]
