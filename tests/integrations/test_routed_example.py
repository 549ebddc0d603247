"""examples/train_routed.py: transformers runs the model that it trains, with the same logits."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from examples import train_routed
from examples.train_routed import Shape, checkpoint_of, dense_weights, hidden_of, student_of

IDS = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def demo_like():
    """A model whose tokens all use all experts, with equal weights."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=8, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    for name, p in model.named_parameters():
        p.data = torch.zeros_like(p) if "gate.weight" in name else p * 10
    return model


def logits(weights, shape):
    return (hidden_of(weights, IDS, shape) @ weights["embed"].T).unflatten(0, IDS.shape)


@torch.no_grad()
def test_the_dense_model_and_the_routed_one_are_those_of_transformers(demo_like, monkeypatch):
    for name, value in dict(EXPERTS=4, TOP_K=2, SHARED=16).items():
        monkeypatch.setattr(train_routed, name, value)
    shape, teacher = Shape(demo_like.config), dense_weights(demo_like)
    want = demo_like(IDS).logits
    torch.testing.assert_close(logits(teacher, shape), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    student = student_of(teacher, shape, IDS)
    want = checkpoint_of(student, shape, demo_like.config).eval()(IDS).logits
    torch.testing.assert_close(logits(student, shape), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    assert (logits(teacher, shape) - want).norm() < 0.9 * want.norm()  # it starts from what it is to learn
