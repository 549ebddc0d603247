"""The layer alone: quantize random experts, run them, compare with bf16.

python examples/layer.py
"""

import torch

from moe_nvfp4 import Gate, NVFP4Experts

E, H, I, T, top_k = 16, 512, 256, 16, 4
torch.manual_seed(0)
w13 = torch.randn(E, 2 * I, H) / H**0.5  # rows [gate; up], as Hugging Face stores them
w2 = torch.randn(E, H, I) / I**0.5
x = torch.randn(T, H)
top_k_weights, top_k_index = torch.rand(T, E).softmax(-1).topk(top_k)

exact = torch.zeros(T, H)
for t in range(T):
    for e, p in zip(top_k_index[t], top_k_weights[t], strict=True):
        gate, up = (w13[e] @ x[t]).chunk(2)
        exact[t] += p * (w2[e] @ (torch.nn.functional.silu(gate) * up))

for activations in ("bf16", "nvfp4"):
    experts = NVFP4Experts.from_dense(w13, w2, gate=Gate("silu"), activations=activations)
    y = experts(x.bfloat16(), top_k_index, top_k_weights)
    error = ((y - exact).norm() / exact.norm()).item()
    packed = sum(p.numel() * p.element_size() for p in experts.parameters())
    dense = 2 * (w13.numel() + w2.numel())
    print(f"activations={activations!r}: relative error {error:.3f}, {dense / packed:.2f}x smaller than bf16")
    assert error < {"bf16": 0.2, "nvfp4": 0.3}[activations], "4-bit experts should be closer than this"
