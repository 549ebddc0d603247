"""Offline quantization of checkpoints and bf16 experts to NVFP4; installed as `moe_nvfp4.quantize`."""
