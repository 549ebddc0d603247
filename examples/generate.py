"""Swap the experts of a model that is in memory already, and generate.

python examples/generate.py [MODEL] [PROMPT]      MODEL: folder or hub name; without: the demo
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from moe_nvfp4.demo import demo_path
from moe_nvfp4.integrations.huggingface import swap_experts

name = sys.argv[1] if len(sys.argv) > 1 else demo_path()
prompt = sys.argv[2] if len(sys.argv) > 2 else "Explain in two sentences why the sky is blue."

tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16")
swap_experts(model, activations="bf16")
model.to("cuda" if torch.cuda.is_available() else "cpu")

chat = [{"role": "user", "content": prompt}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
tokens = model.generate(**inputs.to(model.device), max_new_tokens=60, do_sample=False, streamer=streamer)
assert tokens.shape[1] > inputs["input_ids"].shape[1]
