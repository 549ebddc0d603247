"""The Hopper backend: CuTe DSL kernels for sm_90a."""
