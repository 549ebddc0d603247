"""Time and memory of `moe-nvfp4 quantize --recipe gptq` or distill for a few layers of random weights of a real shape.

python examples/benchmark_gptq.py --layers 3 --folder /tmp [--recipe distill]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_nvfp4.integrations.huggingface.gptq import gptq_files
from moe_nvfp4.quantize.codes import CodesFolder
from moe_nvfp4.quantize.options import Options


def make_model(folder: Path, layers: int, hidden: int, intermediate: int, experts: int, device: str) -> None:
    """A Qwen3-MoE with `layers` layers of random bf16 weights."""
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=experts, num_experts_per_tok=8,
        num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=2, head_dim=128,
        intermediate_size=4 * hidden, vocab_size=32768, dtype="bfloat16", norm_topk_prob=True,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=3, help="layers to measure; of several, the first is not counted")
    parser.add_argument("--of", type=int, default=48, help="layers of the whole model, to extrapolate to")
    parser.add_argument("--shape", type=int, nargs=3, default=(2048, 768, 128), metavar=("H", "I", "E"))
    parser.add_argument("--recipe", choices=("gptq", "distill"), default="gptq")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="where to make a temporary folder for the files")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        source, codes = Path(work, "source"), CodesFolder(Path(work, "codes"))
        make_model(source, args.layers, *args.shape, args.device)
        ids = torch.randint(32768, (args.windows, args.window), generator=torch.Generator().manual_seed(0))
        if args.device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        began = time.time()
        batches = ids.split(max(1, 16384 // args.window))
        experts = [f"model.layers.{i}.mlp.experts" for i in range(args.layers)]
        gptq_files(source, codes, batches, Options(device=args.device), (experts, []), recipe=args.recipe)
        ends = sorted(file.stat().st_mtime for file in codes.folder.glob("*.safetensors"))
        whole = time.time() - began
        seconds = [b - a for a, b in zip(ends, ends[1:], strict=False)]
        rows = codes.rows(codes.modules[-1])
    peak = torch.cuda.max_memory_allocated() / 1e9 if args.device != "cpu" else float("nan")
    each = sum(seconds) / len(seconds) if seconds else whole
    H, I, E = args.shape
    print(f"H {H}, I {I}, {E} experts; {args.windows} x {args.window} tokens, {rows.min()} to {rows.max()} per expert")
    print(f"layers {', '.join(f'{s:.1f}' for s in seconds)} s (the first {ends[0] - began:.1f} s; all {whole:.1f} s)")
    print(f"{args.of} layers: {args.of * each / 60:.1f} min; peak GPU memory {peak:.1f} GB")


if __name__ == "__main__":
    main()
