"""vLLM with our experts against vLLM's own: engines with the same model of random weights, called in turn.

    python examples/benchmark_vllm.py --layers 2 --batches 1 16 --prefill 256                    # a CPU
    python examples/benchmark_vllm.py --layers 48 --batches 1 32 256 --prompt 32 --tokens 64 --prefill 4096    # a GPU
    python examples/benchmark_vllm.py --layers 48 --engines NVFP4 Marlin --tensor-parallel 2     # two GPUs
    python examples/benchmark_vllm.py --layers 48 --engines CPU offload --batches 1 8    # experts in host memory
    python examples/benchmark_vllm.py --engines NVFP4 --adapters 1 2 4 --batches 1 4 16  # LoRA on experts, by request

The shapes are those of Qwen3-30B-A3B; on a CPU the vocabulary is small, so that experts are most of the work. On a CPU
vLLM has no NVFP4 experts of its own; on Hopper they are Marlin's.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SHAPES = dict(
    hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, intermediate_size=6144,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, norm_topk_prob=True,
)  # fmt: skip
IGNORE = ["lm_head", "*.self_attn*", "*.gate"]
LINEARS_TOO = ["*.gate"]
OPTIONS: dict[str, dict[str, Any]] = {
    "CPU": {"hf_overrides": {"moe_nvfp4": {"cpu_experts": "all"}}},
    "offload": {"cpu_offload_gb": 1000, "cpu_offload_params": {"experts"}},
    "all-NVFP4": {"hf_overrides": {"moe_nvfp4": {"linears": "moe_nvfp4"}}},
    "vLLM-linears": {"hf_overrides": {"moe_nvfp4": {"linears": "vllm"}}},
}
RANK = 16  # of adapters
GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=8, help="tokens of each prompt in a batch")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that each request decodes")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the single long prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=("bf16", "Marlin", "NVFP4", *OPTIONS),
                        help="NVFP4 are our experts; all-NVFP4: with 4-bit attention and head; vLLM-linears: these by "
                        "vLLM's kernels; CPU: our experts, computed by the CPU; offload: Marlin's, which the "
                        "GPU reads from host memory")  # fmt: skip
    parser.add_argument("--adapters", type=int, nargs="+", default=[], metavar="N", help="NVFP4 with so many adapters "
                        "of experts, of rank 16, too; each request has one, in turn")  # fmt: skip
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share each layer")
    parser.add_argument("--expert-parallel", action="store_true", help="these GPUs split the experts, not each expert")
    args = parser.parse_args()
    gpu = Path("/dev/nvidia0").exists()  # torch.cuda would start CUDA, and engines could not be forked
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not gpu:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engines = {}
    for name in args.engines or ("bf16", *["Marlin"] * gpu, "NVFP4"):
        print(f"starting {name}; on a GPU vLLM compiles for half a minute", file=sys.stderr, flush=True)
        engines[name] = engine(name, gpu, args)
    folder = tempfile.TemporaryDirectory()
    made = [adapter(Path(folder.name, str(i)), args.layers) for i in range(max(args.adapters, default=0))]
    chosen = {f"{n} LoRA": made[:n] for n in args.adapters}
    for name, some in chosen.items():
        more = dict(enable_lora=True, max_loras=len(some), max_lora_rank=RANK, lora_target_modules=["experts"])
        engines[name] = engine("NVFP4", gpu, args, more)

    print(f"{'':24}" + "".join(f"{name:>12}" for name in engines) + f"   tokens/s, best of {args.rounds}")
    points = [(f"decode, batch {b}", b, args.prompt, args.tokens) for b in args.batches] + [
        (f"prefill, {args.prefill}", 1, args.prefill, 1)
    ]
    for what, batch, prompt, new in points:
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.rounds + 1):
            for name, llm in engines.items():
                times[name].append(seconds(llm, batch, prompt, new, chosen.get(name, ())))
        done = batch * new if new > 1 else prompt
        print(f"{what:24}" + "".join(f"{done / min(found[1:]):12.1f}" for found in times.values()), flush=True)


def adapter(path: Path, layers: int) -> Path:
    """Write an adapter of all experts, of random numbers, as PEFT does."""
    from safetensors.torch import save_file

    E, H, I = (SHAPES[key] for key in ("num_experts", "hidden_size", "moe_intermediate_size"))
    tensors = {}
    for i in range(layers):
        for module, K, N in ((".base_layer", H, 2 * I), ("", I, H)):
            for side, shape in (("A", (RANK * E, K)), ("B", (N, RANK * E))):
                name = f"base_model.model.model.layers.{i}.mlp.experts{module}.lora_{side}.weight"
                tensors[name] = (torch.randn(shape) / K**0.5).bfloat16()
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    said = dict(peft_type="LORA", r=RANK, lora_alpha=RANK, target_modules=[], target_parameters=["experts.gate_up_proj",
                "experts.down_proj"])  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(said))
    return path


def engine(name: str, gpu: bool, args: argparse.Namespace, more: dict[str, Any] | None = None) -> Any:
    from transformers import Qwen3MoeConfig
    from vllm import LLM

    longest = max(args.prompt + args.tokens, args.prefill + 1, 1024)
    config = Qwen3MoeConfig(
        **SHAPES, vocab_size=151936 if gpu else 1024, num_hidden_layers=args.layers, max_position_embeddings=longest
    )
    config = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16"}
    options: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": GIB}  # several engines share the memory
    if gpu:  # several engines share it
        spread_random_weights()
        options = dict(
            gpu_memory_utilization=0.05, kv_cache_memory_bytes=4 * GIB, max_num_seqs=max(args.batches),
            max_num_batched_tokens=8192, compilation_config=dict(cudagraph_capture_sizes=sorted(args.batches)),
            tensor_parallel_size=args.tensor_parallel, enable_expert_parallel=args.expert_parallel,
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        ignore = LINEARS_TOO if name in ("all-NVFP4", "vLLM-linears") else IGNORE
        quantization = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ignore}
        ours = name not in ("bf16", "Marlin", "offload")
        quantized = {} if name == "bf16" else {"quantization_config": quantization | {"exclude_modules": ignore}}
        Path(folder, "config.json").write_text(json.dumps(config | quantized))
        return LLM(
            folder, quantization="moe_nvfp4" if ours else None, load_format="dummy", dtype="bfloat16",
            max_model_len=longest, skip_tokenizer_init=True, enable_prefix_caching=False, **options,
            **OPTIONS.get(name, {}), **(more or {}),
        )  # fmt: skip


def spread_random_weights() -> None:
    """Replace vLLM's random weights, which leave 4-bit codes uninitialized: activations must be finite, and tokens must
    reach all experts."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def fill(loader: object, model: torch.nn.Module, model_config: object) -> None:
        for name, p in model.named_parameters():
            if "scale" in name and p.dtype == torch.float32:
                p.data.fill_(1 / 256)
            elif p.dtype in (torch.uint8, torch.float8_e4m3fn):  # codes; block scales of 1
                p.data.random_(0, 256) if p.dtype == torch.uint8 else p.data.view(torch.uint8).fill_(0x38)
            else:
                p.data.fill_(1) if p.dim() == 1 else p.data.normal_(0, 0.02)

    DummyModelLoader.load_weights = fill


def seconds(llm: Any, batch: int, prompt: int, new: int, adapters: Sequence[Path] = ()) -> float:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    requests = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(adapters)]
    chosen = [requests[i % len(requests)] for i in range(batch)] if requests else None
    prompts = [{"prompt_token_ids": [5 + (i * 37 + j * 11) % 1000 for j in range(prompt)]} for i in range(batch)]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False, lora_request=chosen)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
