"""Experts on the CPU beside a GPU, in vLLM's build for NVIDIA GPUs: by hand, as CI has no GPU.

bf16, in which kernels of CPU and GPU round differently: each engine is compared with fp32, and none with experts on the
CPU may be further from it than the one without.
"""

import json
import os
from functools import partial

import pytest
import torch

from tests.common import on_gpu
from tests.models import folder, load, qwen3_moe

pytest.importorskip("vllm", reason="needs vLLM's build for NVIDIA GPUs")
pytestmark = on_gpu
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1"}

from moe_nvfp4.quantize.convert import convert_checkpoint  # noqa: E402
from moe_nvfp4.quantize.options import Options  # noqa: E402

LAYERS, NEW = 4, 12
# Decoding steps of few tokens, a batch of prompts, and one that is longer than any CUDA graph
PROMPTS = [[(7 * i * i + 3 * j + j * j * i) % 90 + 3 for j in range(size)] for i, size in enumerate([24] * 7 + [700])]
# 8 tokens per expert, from which on weights are copied to the GPU, are 64 tokens here.
small = partial(qwen3_moe, 16, 128, head_dim=64, hidden_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
                max_position_embeddings=1024)  # fmt: skip


def test_auto(tmp_path):
    """First, as it counts what the process has on the GPU: layers of Qwen3-30B-A3B, and room for about half of them."""
    from transformers import Qwen3MoeConfig

    shapes = dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, head_dim=128,
                  num_attention_heads=32, num_key_value_heads=4, vocab_size=1024, intermediate_size=6144)  # fmt: skip
    config = Qwen3MoeConfig(**shapes, num_hidden_layers=12, max_position_embeddings=4096).to_dict()
    ignore = ["lm_head", "*.self_attn*", "*.gate"]
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ignore,
                                     "exclude_modules": ignore}  # fmt: skip
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    utilization = 5e9 / torch.cuda.mem_get_info()[1]
    llm = engine(tmp_path, "auto", load_format="dummy", kv_cache_memory_bytes=None, gpu_memory_utilization=utilization,
                 max_model_len=4096, max_num_batched_tokens=2048, max_num_seqs=16)  # fmt: skip
    devices, others = where(llm)
    blocks = llm.llm_engine.vllm_config.cache_config
    print(f"\n{devices.count('cpu')} of 12 layers on the CPU; other weights {others / 1e9:.2f} GB, "
          f"KV cache of {blocks.num_gpu_blocks * blocks.block_size} tokens")  # fmt: skip
    assert 2 <= devices.count("cpu") <= 10 and devices == sorted(devices)
    assert blocks.num_gpu_blocks * blocks.block_size >= 4096
    ask(llm)
    end(llm)


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory):
    root = tmp_path_factory.mktemp("vllm")
    folder(root, small)
    convert_checkpoint(root / "bf16", root / "nvfp4", Options(), progress=False)
    return root / "nvfp4"


@pytest.fixture(scope="module")
def exact(nvfp4):
    """Function of continuations: log-probabilities in fp32, by transformers on the CPU, of the tokens that come after
    the first one of each prompt, and of those of the continuations."""
    import moe_nvfp4.integrations.huggingface  # noqa: F401

    model = load(nvfp4, torch.float32)

    def exact(new):
        read, written = [], []
        for prompt, tokens in zip(PROMPTS, new, strict=True):
            ids = torch.tensor([prompt + tokens])
            with torch.no_grad():
                found = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            read.append(found[: len(prompt) - 1])
            written.append(found[len(prompt) - 1 :])
        return torch.cat(read), torch.cat(written)

    return exact


def engine(folder, cpu_experts, **options):
    from vllm import LLM

    override = {"moe_nvfp4": {"cpu_experts": cpu_experts}} if cpu_experts is not None else None
    settings = dict(quantization="moe_nvfp4", dtype="bfloat16", max_model_len=1024, skip_tokenizer_init=True, seed=0,
                    kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.3, hf_overrides=override,
                    enable_prefix_caching=False)  # fmt: skip
    return LLM(str(folder), **settings | options)


def ask(llm):
    """Greedy tokens, log-probabilities of the prompts' tokens, and of the greedy ones."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, prompt_logprobs=0, logprobs=0,
                              detokenize=False)  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    of = lambda steps, tokens: [step[token].logprob for step, token in zip(steps, tokens, strict=True)]
    read = [x for o, p in zip(outputs, PROMPTS, strict=True) for x in of(o.prompt_logprobs[1:], p[1:])]
    new = [list(o.outputs[0].token_ids) for o in outputs]
    written = [x for o, tokens in zip(outputs, new, strict=True) for x in of(o.outputs[0].logprobs, tokens)]
    return new, torch.tensor(read), torch.tensor(written)


def where(llm):
    """The device of each layer's experts, and the bytes of weights on the GPU."""

    def look(model):
        devices = [str(m.nvfp4.down_proj.device) for m in model.modules() if hasattr(m, "nvfp4")]
        return devices, sum(p.nbytes for p in model.parameters())

    devices, others = llm.apply_model(look)[0]
    return devices, others


def end(llm):
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def on_the_gpu(nvfp4):
    """eager -> answers without experts on the CPU."""
    found = {}
    for eager in (True, False):
        llm = engine(nvfp4, None, enforce_eager=eager)
        found[eager] = ask(llm)
        end(llm)
    return found


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("count", [1, "all"])
def test_answers(nvfp4, exact, on_the_gpu, count, eager):
    """Of prompts, the long one of which the GPU multiplies by copied weights, and of steps that decode 8 tokens."""
    llm = engine(nvfp4, count, enforce_eager=eager)
    devices, _ = where(llm)
    on_cpu = LAYERS if count == "all" else count
    assert devices == ["cpu"] * on_cpu + ["cuda:0"] * (LAYERS - on_cpu)
    tokens, *logprobs = ask(llm)
    again = ask(llm)
    end(llm)
    before = on_the_gpu[eager]
    equal = sum(a == b for a, b in zip(tokens, before[0], strict=True))
    print(f"\n{count}, {'eager' if eager else 'graphs'}: {equal} of {len(tokens)} continuations equal", end="")
    for what, mine, its, others, theirs in zip(
        ("prompts", "decoding"), logprobs, exact(tokens), before[1:], exact(before[0]), strict=True
    ):
        apart, usual = (mine - its).abs(), (others - theirs).abs()
        print(f"; {what} {apart.mean():.4f} from fp32, {usual.mean():.4f} without", end="")
        assert apart.mean() < 1.25 * usual.mean() + 0.01
    assert again[0] == tokens and torch.equal(again[1], logprobs[0])


def test_sleep(nvfp4, exact):
    """Experts on the CPU stay in host memory."""
    llm = engine(nvfp4, 2, enable_sleep_mode=True)
    tokens, *before = ask(llm)
    llm.sleep(level=1)
    llm.wake_up()
    again, *after = ask(llm)
    end(llm)
    equal = sum(a == b for a, b in zip(tokens, again, strict=True))
    apart = [(x - y).abs().mean().item() for found, new in ((before, tokens), (after, again))
             for x, y in zip(found, exact(new), strict=True)]  # fmt: skip
    print(f"\nafter sleep: {equal} of {len(tokens)} continuations equal; from fp32 {apart}")
    assert equal >= len(tokens) - 1 and max(apart[2] / apart[0], apart[3] / apart[1]) < 1.25
