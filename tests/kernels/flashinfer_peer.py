"""FlashInfer's NVFP4 experts for Blackwell, for comparison in examples/benchmark.py; this has not run anywhere yet."""

import torch


def make(w13, w2):
    """f(x, ids, weights) that calls cutlass_fused_moe; x is quantized inside the call, as in ours."""
    from flashinfer import fp4_quantize
    from flashinfer.fused_moe import cutlass_fused_moe

    one = torch.ones(1, device=w13.device)

    def quantized(w):
        scales = 448 * 6 / w.abs().amax((1, 2)).float()
        parts = [fp4_quantize(matrix, scale) for matrix, scale in zip(w, scales, strict=True)]
        codes, sf = (torch.stack([part[i] for part in parts]) for i in range(2))
        return codes.view(torch.long), sf.view(torch.int32), 1 / scales

    (c13, sf13, scale13), (c2, sf2, scale2) = quantized(w13), quantized(w2)
    scales = [one, sf13, scale13, one, sf2, scale2]

    def run(x, ids, weights):
        codes, sf = fp4_quantize(x, one)
        return cutlass_fused_moe(codes, ids.int(), weights.float(), c13, c2, x.dtype, quant_scales=scales, input_sf=sf)[
            0
        ]

    return run
