"""vLLM with our experts against vLLM's own bf16 experts: one process, the same model of random weights, by turns.

    python examples/benchmark_vllm.py --layers 2 --batches 1 16 --prefill 256

Shapes are those of Qwen3-30B-A3B, with a small vocabulary, so that the experts are most of the work.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

SHAPES = dict(
    hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, intermediate_size=6144,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=1024, norm_topk_prob=True,
)  # fmt: skip
IGNORE = ["lm_head", "*.self_attn*", "*.gate"]
QUANTIZATION = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": IGNORE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="decoded by each request")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from transformers import Qwen3MoeConfig
    from vllm import LLM, SamplingParams

    config = Qwen3MoeConfig(**SHAPES, num_hidden_layers=args.layers, max_position_embeddings=4096)
    config = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16"}
    engines = {}
    for name, more in (("bf16", {}), ("NVFP4", {"quantization_config": QUANTIZATION})):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config | more))
            engines[name] = LLM(
                folder, quantization="moe_nvfp4" if more else None, load_format="dummy", dtype="bfloat16",
                max_model_len=1024, enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=False,
            )  # fmt: skip

    def seconds(engine: LLM, batch: int, prompt: int, new: int) -> float:
        prompts = [{"prompt_token_ids": [5 + (i * 37 + j * 11) % 1000 for j in range(prompt)]} for i in range(batch)]
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    print(f"{'':24}{'bf16':>12}{'NVFP4':>12}   tokens/s, best of {args.rounds}")
    points = [(f"decode, batch {b}", b, 8, args.tokens) for b in args.batches] + [("prefill", 1, args.prefill, 1)]
    for what, batch, prompt, new in points:
        times = {name: [] for name in engines}
        for _ in range(args.rounds + 1):
            for name, engine in engines.items():
                times[name].append(seconds(engine, batch, prompt, new))
        done = batch * new if new > 1 else prompt
        bf16, nvfp4 = (done / min(times[name][1:]) for name in ("bf16", "NVFP4"))
        print(f"{what:24}{bf16:12.1f}{nvfp4:12.1f}   {nvfp4 / bf16:.2f} times", flush=True)


if __name__ == "__main__":
    main()
