"""The oracle of gradients: autograd through dequantized experts in float64, one token and one slot at a time."""

import torch

from moe_nvfp4.format import dequantize, global_scale_for, quantize
from moe_nvfp4.weights import SILU, Gate
from tests.common import random_ids, relative_error

E, H, I = 5, 48, 32
GATES = {
    "silu": SILU,
    "gpt-oss": Gate("silu", alpha=1.702, limit=7.0, up_offset=1.0),
    "clamp after": Gate("silu", limit=2.0, clamp_after=True),
    "gelu_tanh": Gate("gelu_tanh"),
    "relu2": Gate("relu2", gated=False),
}
# relative to a gradient's norm: fp32 sums in another order; bf16 between the products
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def dense(layer):
    """float64 w13 [E, N13, H] and w2 [E, H, I]."""
    w, H, I = layer.weights, layer.hidden_size, layer.intermediate_size
    parts = [s for s in (w.w13.gate_scale, w.w13.global_scale) if s is not None]
    scale = torch.cat([s[:, None].expand(-1, I) for s in parts], dim=1)
    w13 = dequantize(w.w13.codes, w.w13.sf, scale)[..., :H]
    return w13.double(), dequantize(w.w2.codes, w.w2.sf, w.w2.global_scale[:, None].expand(-1, H))[..., :I].double()


def straight(row, scale, activations):
    """A row [K] quantized as in W4A4, through which the gradient passes unchanged."""
    x, better = row.detach().float()[None], activations == "nvfp4_four_over_six"
    gs = global_scale_for(x.abs().amax(dim=-1), 256 if better else 448) if scale is None else scale[None]
    codes, sf, _ = quantize(x, gs, four_over_six=better)
    return row + (dequantize(codes, sf, gs)[0].double() - row).detach()


def oracle(layer, x, ids, p, biases=(None, None), adapters=((), ())):
    """The layer in float64, slot by slot, on leaves of autograd. W4A4 rounds x and h before they meet the weights, but
    not before they meet adapters."""
    (w13, w2), w = dense(layer), layer.weights
    low_rank = lambda which, e, row: sum(b[e] @ (a[e] @ row) for a, b in adapters[which])
    taken = lambda row, scales, e: (
        row if w.activations == "bf16" else straight(row, None if scales is None else scales[e], w.activations)
    )
    tokens = []
    for t in range(len(ids)):
        y = 0 * x[t]
        for j, e in enumerate(ids[t].tolist()):
            if not 0 <= e < layer.num_experts:
                continue
            z = w13[e] @ taken(x[t], w.x_scale, e) + low_rank(0, e, x[t]) + (0 if biases[0] is None else biases[0][e])
            h = layer.gate(z[None])[0]
            out = w2[e] @ taken(h, w.h_scale, e) + low_rank(1, e, h) + (0 if biases[1] is None else biases[1][e])
            y = y + p[t, j] * out
        tokens.append(y)
    return torch.stack(tokens) if tokens else x * 1.0


def leaf(t, dtype=torch.float64):
    return t.detach().to(dtype).requires_grad_()


def compare(layer, x, ids, p, limit, train_biases=False):
    """Compare the gradients of x, p and the biases of `layer`, on leaves x and p, with the oracle's."""
    named = [p for n, p in layer.named_parameters() if n.endswith("_bias")]
    for b in named:
        b.requires_grad_(train_biases).grad = None
    want = [leaf(t) for t in (x, p, *named)]
    got = [leaf(x, x.dtype), leaf(p, p.dtype), *named]
    dy = torch.randn(len(ids), layer.hidden_size, generator=torch.Generator().manual_seed(5)).to(x)
    layer(got[0], ids, got[1]).backward(dy)
    layer.unpack()
    oracle(layer, want[0], ids, want[1], want[2:] or (None, None)).backward(dy.double())
    for mine, theirs in zip(got if train_biases else got[:2], want, strict=False):
        theirs_grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        assert mine.grad.dtype == mine.dtype
        assert relative_error(mine.grad, theirs_grad) < limit
        if theirs_grad.any():
            cosine = torch.cosine_similarity(mine.grad.double().flatten(), theirs_grad.flatten(), dim=0)
            assert cosine > 0.9999


def batch(dtype, sizes=(5, 0, 9, 3, 4), unrouted=3, top_k=2, seed=0):
    """A batch with an expert without tokens, and slots without an expert (ids E and -1)."""
    g = torch.Generator().manual_seed(seed)
    ids = random_ids(list(sizes), unrouted, top_k, seed)
    return torch.randn(len(ids), H, generator=g).to(dtype), ids, torch.rand(ids.shape, generator=g)
