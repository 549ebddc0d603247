"""Files on disk: safetensors headers, checkpoint folders, shards that are written as streams, the staging folder."""

from moe_nvfp4.quantize.files.checkpoint import (
    INDEX,
    Checkpoint,
    TensorSlice,
    TensorView,
    expert_counts,
    fingerprint,
    open_checkpoint,
    read_tensors,
    sizes,
    sub_configs,
)
from moe_nvfp4.quantize.files.headers import TORCH_DTYPES, read_header, tensor_bytes
from moe_nvfp4.quantize.files.shards import ShardWriter
from moe_nvfp4.quantize.files.staging import StagingDir

__all__ = [
    "INDEX", "TORCH_DTYPES", "Checkpoint", "ShardWriter", "StagingDir", "TensorSlice", "TensorView", "expert_counts",
    "fingerprint", "open_checkpoint", "read_header", "read_tensors", "sizes", "sub_configs", "tensor_bytes",
]  # fmt: skip
