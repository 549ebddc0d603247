"""Families of vLLM's, by hand (pytest -m slow, a minute each): our experts answer as vLLM's own with the same values.

Where CI compares vLLM with transformers (test_vllm.py), the two must agree on everything else. Of some families they do
not, with dense experts either; so here both sides are vLLM's models.
"""

import pytest
import torch
import transformers

from tests.models import SMALL, tensors

pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")

import moe_nvfp4.integrations.huggingface  # noqa: E402, F401
from moe_nvfp4.integrations.vllm import mends  # noqa: E402
from moe_nvfp4.quantize.convert import convert_checkpoint  # noqa: E402
from moe_nvfp4.quantize.options import Options  # noqa: E402
from tests.integrations.test_vllm import same  # noqa: E402
from tests.integrations.vllm_engine import generate  # noqa: E402

SIZES = {k: v for k, v in SMALL.items() if k != "head_dim"} | dict(
    hidden_size=128, num_hidden_layers=3, num_experts_per_tok=2, tie_word_embeddings=False
)
HEADS = dict(head_dim=32)  # vLLM's attention on a CPU has heads of 32 and more
LATENT = dict(q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
              num_key_value_heads=4)  # fmt: skip
DENSE = dict(intermediate_size=96, moe_intermediate_size=64)  # a dense first layer
GROUPS = dict(n_group=2, topk_group=1, routed_scaling_factor=2.5)
ROUTED = dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1)
MIXTRAL = dict(intermediate_size=64, num_local_experts=8)

FAMILIES = {
    "Glm4Moe": HEADS | DENSE | GROUPS | ROUTED | dict(norm_topk_prob=True),
    "Dots1": HEADS | DENSE | GROUPS | ROUTED | dict(norm_topk_prob=True),
    "DeepseekV2": LATENT | DENSE | GROUPS | ROUTED | dict(topk_method="group_limited_greedy"),
    "DeepseekV3": LATENT | DENSE | GROUPS | ROUTED | dict(
        norm_topk_prob=True, topk_method="noaux_tc", scoring_func="sigmoid"),
    "ExaoneMoe": HEADS | DENSE | GROUPS | dict(num_experts=8, num_shared_experts=1),
    "Afmoe": HEADS | DENSE | dict(num_experts=8, num_dense_layers=1, num_shared_experts=1, route_scale=2.0,
                                  score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    "Lfm2Moe": DENSE | dict(num_experts=8, num_dense_layers=1, layer_types=["conv", *["full_attention"] * 2]),
    "Ernie4_5_Moe": DENSE | dict(moe_num_experts=8, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=1),
    "Olmoe": dict(intermediate_size=64, num_experts=8),
    "HunYuanMoEV1": HEADS | dict(intermediate_size=64, num_experts=8, moe_topk=2),
    "GraniteMoe": MIXTRAL,
    "GraniteMoeShared": MIXTRAL | dict(shared_intermediate_size=64),
}  # fmt: skip


def made(family, path, **options):
    """A folder in bf16 and one in NVFP4, and what vLLM answers with the dequantized values."""
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if (p.dim() > 1 or "bias" in name) and "inv_freq" not in name:
                p.normal_(std=0.2)
    model.save_pretrained(path / "bf16")
    convert_checkpoint(path / "bf16", path / "nvfp4", Options(**options), progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "nvfp4", dtype=torch.float32)
    model.dequantize()
    model.save_pretrained(path / "dequantized")
    mends.complete()  # as beside our experts
    return path / "bf16", path / "nvfp4", generate(path / "dequantized")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_as_vllms_own_experts(family, tmp_path):
    bf16, nvfp4, want = made(family, tmp_path)
    same(generate(nvfp4), want)
    same(generate(bf16, quantization="moe_nvfp4"), want)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_as_vllms_own_linears(family, tmp_path):
    """All linears 4-bit, but for a head that vLLM takes from the embedding."""
    linears = "attention,mlp" if family == "Lfm2Moe" else "all"
    _, nvfp4, want = made(family, tmp_path, linears=linears)
    assert any("q_proj.weight_scale" in name or "q_a_proj.weight_scale" in name for name in tensors(nvfp4))
    same(generate(nvfp4), want, 1e-3)  # Granite with dense weights is 3e-4 from transformers
