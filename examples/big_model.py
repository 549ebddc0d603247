"""A model that is larger than the GPU: experts stay in host memory and are computed on the CPU.

python examples/big_model.py MODEL [--cpu-experts auto] [--prompt TEXT]     folder or Hub name, 4-bit or not
python examples/big_model.py MODEL --map-files                              4-bit files, larger than the memory
python examples/big_model.py --random Qwen3-30B-A3B                         its real config, random weights: tokens/s

The same from the command line: moe-nvfp4 generate MODEL --cpu-experts auto --map-files
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, describe_placement

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default="Qwen/Qwen3-30B-A3B")
parser.add_argument("--cpu-experts", default="auto", help="a number of layers, 'all' or 'auto' (default)")
parser.add_argument("--map-files", action="store_true", help="leave experts that run on the CPU in their 4-bit files")
parser.add_argument("--prompt", default="Explain in two sentences why the sky is blue.")
parser.add_argument("--max-new-tokens", type=int, default=60)
parser.add_argument("--random", metavar="NAME", help="measure this model of benchmark_offload.py with random weights")
arguments = parser.parse_args()

if arguments.random:
    from benchmark_offload import benchmark

    benchmark(arguments.random)
    raise SystemExit

device = "cuda" if torch.cuda.is_available() else "cpu"
layers = int(arguments.cpu_experts) if arguments.cpu_experts.isdecimal() else arguments.cpu_experts
config = MoeNvfp4Config(cpu_experts=layers if device == "cuda" else "all", map_files=arguments.map_files)
model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="bfloat16", quantization_config=config)
print(describe_placement(model))
model.to(device)

tokenizer = AutoTokenizer.from_pretrained(arguments.model)
chat = [{"role": "user", "content": arguments.prompt}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
with torch.no_grad():
    model.generate(**inputs.to(device), max_new_tokens=arguments.max_new_tokens, do_sample=False, streamer=streamer)
