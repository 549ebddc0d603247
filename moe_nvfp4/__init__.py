"""NVFP4 mixture-of-experts layers for PyTorch and Hugging Face models."""

from moe_nvfp4.layer import NVFP4Experts, moe_forward
from moe_nvfp4.routing import Groups, group_by_expert
from moe_nvfp4.weights import ExpertWeights, Gate

__version__ = "0.1.0"

__all__ = ["ExpertWeights", "Gate", "Groups", "NVFP4Experts", "group_by_expert", "moe_forward"]
