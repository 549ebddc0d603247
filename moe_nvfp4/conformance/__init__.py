"""A neutral test of anybody's NVFP4 experts: inputs (`vectors`), what they must give (`expected`), and a runner.

    python -m moe_nvfp4.conformance MODULE:FUNCTION

calls FUNCTION(given) for every case; `vectors.Given` says what it gets and returns. This library's kernels have no part
in it: the inputs are made of integers, the same on every machine (checksums are compared), and the expected results by
a loop in float64.
"""
