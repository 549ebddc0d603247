"""The backends, a folder each (see `moe_nvfp4.kernels.backend`), and what several of them share in `common`."""
