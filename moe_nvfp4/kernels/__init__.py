"""The backends: modules with the stage functions of `moe_nvfp4.reference`, picked by `moe_nvfp4.layer.backend`."""
