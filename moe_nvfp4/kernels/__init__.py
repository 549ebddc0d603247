"""The backends, one folder each (see `moe_nvfp4.kernels.backend`); `common` is what several of them share."""
