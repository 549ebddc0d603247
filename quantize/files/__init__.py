"""Files on disk: safetensors headers, checkpoint folders, shards written piece by piece, the staging folder."""

from moe_nvfp4.quantize.files.checkpoint import (
    INDEX,
    NAMED_WEIGHTS,
    TOP_K,
    Checkpoint,
    TensorSlice,
    TensorView,
    check_config,
    expert_counts,
    identity_experts,
    open_checkpoint,
    read_json,
    read_tensors,
    sizes,
    sub_configs,
    without_identity_experts,
)
from moe_nvfp4.quantize.files.headers import TORCH_DTYPES, read_header, tensor_bytes
from moe_nvfp4.quantize.files.shards import ShardWriter
from moe_nvfp4.quantize.files.staging import StagingDir, lock, new_file, unlock, write_text

__all__ = [
    "INDEX", "NAMED_WEIGHTS", "TOP_K", "TORCH_DTYPES", "Checkpoint", "ShardWriter", "StagingDir", "TensorSlice",
    "TensorView", "check_config", "expert_counts", "identity_experts", "lock", "new_file", "open_checkpoint",
    "read_header", "read_json", "read_tensors", "sizes", "sub_configs", "tensor_bytes", "unlock",
    "without_identity_experts", "write_text",
]  # fmt: skip
