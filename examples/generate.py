"""Swap the experts of a model for 4-bit ones, and generate.

python examples/generate.py [MODEL] [--prompt TEXT]     MODEL: folder or Hub name; default: the demo
python examples/generate.py --random Qwen3-30B-A3B      its real config, random weights: tokens/s, memory and where the
                                                        time goes, beside bf16 experts (a GPU); `tiny`: any machine
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from moe_nvfp4.demo import demo_path
from moe_nvfp4.integrations.huggingface import swap_experts

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default="demo")
parser.add_argument("--prompt", default="Explain in two sentences why the sky is blue.")
parser.add_argument("--max-new-tokens", type=int, default=60)
parser.add_argument("--random", metavar="NAME", help="Qwen3-30B-A3B or tiny")
parser.add_argument("--steps", type=int, default=64, help="with --random: decoding steps")
parser.add_argument("--prefill", type=int, default=4096, help="with --random: tokens of the long prompt")
parser.add_argument("--no-compile", action="store_true", help="with --random: no torch.compile, no table of kernels")
arguments = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

if arguments.random:
    from benchmark_model import benchmark

    benchmark(arguments.random, device, arguments.steps, arguments.prefill, not arguments.no_compile)
    raise SystemExit

name = demo_path() if arguments.model == "demo" else arguments.model
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16")
if getattr(model, "hf_quantizer", None) is None:  # else the files are 4-bit already
    swap_experts(model, activations="bf16")
model.to(device)

if tokenizer.chat_template is None:
    inputs = tokenizer(arguments.prompt, return_tensors="pt")
else:
    chat = [{"role": "user", "content": arguments.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
start = time.perf_counter()
tokens = model.generate(
    **inputs.to(device), max_new_tokens=arguments.max_new_tokens, do_sample=False, streamer=streamer
)
new = tokens.shape[1] - inputs["input_ids"].shape[1]
assert new > 0
print(f"{new / (time.perf_counter() - start):.1f} tokens/s over {new} tokens, prompt included, on {device}")
