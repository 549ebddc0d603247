"""Fine-tuning a mixture of experts with LoRA on attention and experts: 4-bit experts against bf16 ones, one after the
other, each in a separate process. Random weights of Qwen3-30B-A3B's shapes; tokens per second and peak memory.

    python examples/benchmark_finetune.py                    an H200: 48 layers, sequence 2048, rank 16
    python examples/benchmark_finetune.py --tiny             a small model on a CPU, to see that it runs
"""

import argparse
import json
import subprocess
import sys
import time

import torch
from peft import get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.experts import experts_for, find_experts
from moe_nvfp4.integrations.huggingface.peft import MergeableLoraConfig
from moe_nvfp4.integrations.huggingface.recognise import describe

QWEN3_30B = dict(
    hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936, intermediate_size=6144,
    norm_topk_prob=True,
)  # fmt: skip
TINY = QWEN3_30B | dict(
    hidden_size=64, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=256, intermediate_size=96,
)  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def build(kind: str, args: argparse.Namespace) -> torch.nn.Module:
    """The model with random weights, made where it runs; `kind`: "nvfp4" or "bf16" experts."""
    config = Qwen3MoeConfig(**(TINY if args.tiny else QWEN3_30B), use_cache=False, max_position_embeddings=8192)
    config.num_hidden_layers = args.layers or config.num_hidden_layers
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")
    if kind == "nvfp4":
        choice = MoeNvfp4Config()
        for name, module, _ in find_experts(model, choice):
            experts = experts_for(module, describe(module), choice, args.device)
            for key, p in experts.named_parameters():
                if key.endswith("_sf"):
                    p.data.random_(0x30, 0x40)
                elif p.dtype == torch.uint8:
                    p.data.random_(0, 256)
                else:
                    p.data.fill_(2.5e-3)  # values of about 0.02
            model.set_submodule(name, experts)
    for module in model.modules():
        for key, p in module.named_parameters(recurse=False):
            if p.is_meta:
                new = torch.empty_like(p, device=args.device)
                new.fill_(1.0) if "norm" in type(module).__name__.lower() else new.normal_(0, 0.02)
                setattr(module, key, torch.nn.Parameter(new))
    with torch.device(args.device):
        model.model.rotary_emb = Qwen3MoeRotaryEmbedding(config)
    return model.train()


def measure(kind: str, args: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    model = build(kind, args)
    targets = None if args.attention_only else EXPERTS
    lora = MergeableLoraConfig(r=args.rank, lora_alpha=32, target_modules=ATTENTION, target_parameters=targets)
    lora.nvfp4_mergeable = args.mergeable and kind == "nvfp4"
    model = get_peft_model(model, lora)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(0, model.config.vocab_size, (args.batch, args.sequence), device=args.device)
    sync = torch.cuda.synchronize if args.device == "cuda" else lambda: None

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    begin, seconds, losses = time.perf_counter(), [], []
    for i in range(args.warmup + args.steps):
        sync()
        start = time.perf_counter()
        losses.append(step().item())
        sync()
        if i >= args.warmup:
            seconds.append(time.perf_counter() - start)
        else:
            print(f"# {kind}: step {i}, {time.perf_counter() - begin:.1f} s after the model was made", file=sys.stderr)
    median = sorted(seconds)[len(seconds) // 2]
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    if args.profile:
        profile(step, kind)
    return dict(
        experts=kind, tokens_per_second=round(ids.numel() / median, 1), ms=round(median * 1e3, 1),
        peak_gb=round(peak / 1e9, 2), trained=sum(p.numel() for p in trained), first_loss=losses[0],
        last_loss=losses[-1],
    )  # fmt: skip


def profile(step, kind: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        step()
        torch.cuda.synchronize()
    print(f"# {kind}", p.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70),
          file=sys.stderr)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    parser.add_argument("--attention-only", action="store_true", help="no adapters on experts")
    parser.add_argument("--mergeable", action="store_true", help="4-bit experts' adapters are trained to be merged")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one step on stderr")
    parser.add_argument("--arm", choices=["nvfp4", "bf16"], help="run only these experts, in this process")
    for name, default in (("layers", 0), ("sequence", 2048), ("batch", 1), ("rank", 16), ("warmup", 3), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    if args.tiny:
        args.sequence, args.steps = min(args.sequence, 64), 2
    if args.arm:
        print(json.dumps(measure(args.arm, args)))
        return
    for arm in ("nvfp4", "bf16"):
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--arm", arm], stdout=subprocess.PIPE, text=True
        )
        print(done.stdout.strip() or f"{arm} failed", flush=True)


if __name__ == "__main__":
    main()
