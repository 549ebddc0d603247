"""Small random models of every kind of checkpoint, and helpers to look into their files."""

import copy

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

SMALL = dict(
    vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def qwen3_moe(experts=8, intermediate=48, **settings):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **SMALL | {"intermediate_size": 96} | settings, moe_intermediate_size=intermediate, num_experts=experts,
        num_experts_per_tok=2))  # fmt: skip


def mixtral(intermediate=48, **settings):
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(
        **SMALL | settings, intermediate_size=intermediate, num_local_experts=4, num_experts_per_tok=2))  # fmt: skip


def gpt_oss(experts=4, intermediate=48, **settings):
    """Transposed and interleaved weights with biases, stacked in files."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **SMALL | settings, intermediate_size=intermediate, num_local_experts=experts, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    return GptOssForCausalLM(config)


def granite():
    """The plain layout, but stacked in files."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    small = {k: v for k, v in SMALL.items() if k != "head_dim"}
    return GraniteMoeForCausalLM(GraniteMoeConfig(
        **small, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2))  # fmt: skip


def gemma4(global_head_dim=16, **sizes):
    """The experts are beside the layer's MLP: `layers.1.experts`."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **SMALL | sizes, intermediate_size=48, moe_intermediate_size=48, num_experts=4, top_k_experts=2,
        enable_moe_block=True, hidden_size_per_layer_input=0, vocab_size_per_layer_input=96, num_kv_shared_layers=0,
        sliding_window=32, layer_types=["sliding_attention", "full_attention"], global_head_dim=global_head_dim,
    )  # fmt: skip
    return Gemma4ForCausalLM(config)


def diffusion_gemma():
    """Its encoder of text has the experts of its decoder."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    text = dict(
        **SMALL, intermediate_size=96, moe_intermediate_size=48, num_experts=4, top_k_experts=2, sliding_window=32,
        layer_types=["sliding_attention", "full_attention"], global_head_dim=16, num_global_key_value_heads=2,
    )  # fmt: skip
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                  num_key_value_heads=2, head_dim=16, patch_size=4, position_embedding_size=64)  # fmt: skip
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=8)
    return DiffusionGemmaForBlockDiffusion(config)


def nemotron_h(*layers, **settings):
    """Experts without a gate projection."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=len(layers) or 2,
        layers_block_type=[*layers] or ["moe", "attention"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=48, intermediate_size=48, moe_shared_expert_intermediate_size=48, n_group=1,
        topk_group=1, bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings,
    )  # fmt: skip
    return NemotronHForCausalLM(config)


def dbrx():
    from transformers import DbrxConfig, DbrxForCausalLM

    config = DbrxConfig(
        d_model=64, n_heads=4, n_layers=2, max_seq_len=128, vocab_size=96,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    )  # fmt: skip
    return DbrxForCausalLM(config)


def llama4(**sizes):
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **SMALL | sizes, intermediate_size=48, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=1, attn_temperature_tuning=False,
    )  # fmt: skip
    return Llama4ForCausalLM(config)


def deepseek():
    """Shared experts, which run after the routed ones."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(
        **{k: v for k, v in SMALL.items() if k != "head_dim"} | dict(num_key_value_heads=4), intermediate_size=48,
        moe_intermediate_size=48, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=16,
        q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1,
    ))  # fmt: skip


def aria():
    """Stacks under other names in files."""
    from transformers import AriaTextConfig, AriaTextForCausalLM

    return AriaTextForCausalLM(AriaTextConfig(
        **SMALL, intermediate_size=48, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1))  # fmt: skip


def step3p7():
    """A stack for each projection."""
    from transformers import Step3p7Config, Step3p7ForConditionalGeneration

    text = dict(**SMALL, intermediate_size=96, moe_intermediate_size=48, share_expert_dim=48, n_routed_experts=4,
                num_experts_per_tok=2, sliding_window=32, mlp_layer_types=["sparse", "sparse"])  # fmt: skip
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=4,
                  image_size=16)  # fmt: skip
    return Step3p7ForConditionalGeneration(Step3p7Config(text_config=text, vision_config=vision))


def minimax_m3():
    """Shared experts, and a dense layer, whose gate and up transformers joins."""
    from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig

    text = dict(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, intermediate_size=48, dense_intermediate_size=64,
        shared_intermediate_size=48, mlp_layer_types=["dense", "sparse"], layer_types=["full_attention"] * 2,
    )  # fmt: skip
    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return MiniMaxM3SparseForConditionalGeneration(MiniMaxM3VLConfig(text_config=text, vision_config=vision))


FAMILIES = [qwen3_moe, mixtral, gpt_oss, granite, gemma4, nemotron_h, dbrx, llama4]
IDS = torch.tensor([[3, 17, 40, 5, 9, 11, 2, 8]])


def make(family, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = family().to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.2)
        for t in model.state_dict().values():  # norms, biases, what routers add: not the ones and zeros of new models
            if t.dim() == 1 and t.is_floating_point():
                t.add_(torch.randn_like(t), alpha=0.2)
    return model


def folder(tmp_path, family, name="bf16", dtype=torch.bfloat16, **kwargs):
    make(family, dtype).save_pretrained(tmp_path / name, **kwargs)
    return tmp_path / name


def load(path, dtype=torch.bfloat16, **kwargs):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **kwargs).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS.to(model.device)).logits.cpu()


def dense_like(model):
    """A dense model with the same weights, dequantized."""
    model = copy.deepcopy(model)
    return model.hf_quantizer._dequantize(model)


def gradients(model):
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def tensors(path):
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            found |= {key: f.get_tensor(key) for key in f.keys()}
    return found


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_tensors(a, b, but=()):
    """Check that two folders have the same tensors in their files."""
    a, b = tensors(a), tensors(b)
    assert a.keys() == b.keys()
    for name, value in a.items():
        if name not in but:
            assert (value.dtype, value.shape) == (b[name].dtype, b[name].shape), name
            assert as_bytes(value) == as_bytes(b[name]), name
