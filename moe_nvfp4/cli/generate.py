"""moe-nvfp4 generate: answer a prompt."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from moe_nvfp4.cli.models import expert_bytes, load
from moe_nvfp4.cli.options import (
    ACTIVATIONS,
    MODEL_HELP,
    Commands,
    add_device,
    add_quantizing,
    command,
    prompt_text,
    say,
    temperature,
    whole,
)

if TYPE_CHECKING:
    from torch import Tensor


def add(commands: Commands) -> None:
    sub = command(
        commands, "generate", run, "answer a prompt",
        "Load MODEL with 4-bit experts (quantizing dense ones on the way) and answer a prompt, "
        "token by token. Prints the speed and the memory of the experts before and after.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("--prompt", type=prompt_text, default="What is the capital of France, and what is it known for?")
    sub.add_argument("--max-new-tokens", type=whole(1), default=128, metavar="N")
    sub.add_argument("--temperature", type=temperature, default=0.0, help="0 (default): the likeliest token")
    sub.add_argument("--raw", action="store_true", help="continue the prompt, without the chat template")
    sub.add_argument(
        "--activations", choices=ACTIVATIONS, default=None,
        help="bf16: W4A16; nvfp4: W4A4 (default: what the files say, else bf16)",
    )  # fmt: skip
    add_quantizing(sub)
    add_device(sub)


def run(args: argparse.Namespace) -> None:
    import torch
    from transformers import TextStreamer

    from moe_nvfp4.integrations.huggingface import set_activations
    from moe_nvfp4.quantize.report import readable_size

    model, tokenizer = load(args, args.activations or "bf16")
    if args.activations:
        set_activations(model, args.activations)
    chat = tokenizer.chat_template is not None and not args.raw
    if chat:
        messages = [{"role": "user", "content": args.prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(args.prompt, return_tensors="pt")
    prompt = inputs["input_ids"].shape[1]
    if prompt == 0:
        raise ValueError(f"the tokenizer of {args.model} makes no tokens of the prompt {args.prompt!r}: write another")
    inputs = {k: v.to(model.device) for k, v in inputs.items() if k in ("input_ids", "attention_mask")}

    class Streamer(TextStreamer):
        times: list[float] = []

        def put(self, value: Tensor) -> None:
            self.times.append(time.perf_counter())
            super().put(value)

    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling = dict(do_sample=True, temperature=args.temperature) if args.temperature > 0 else dict(do_sample=False)
    say("")
    start = time.perf_counter()
    with torch.no_grad():
        model.generate(**inputs, max_new_tokens=args.max_new_tokens, streamer=streamer, **sampling)
    times = streamer.times[1:]  # the first is the prompt
    before, after = expert_bytes(model)
    say("")
    if len(times) > 1:
        say(f"speed:   {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s over {len(times)} tokens, "
             f"first token after {times[0] - start:.2f} s ({prompt} tokens of prompt), on {model.device}")  # fmt: skip
    if after:  # only linears are 4-bit in some files
        smaller = f"{before / after:.2f}x smaller"
        say(f"experts: {readable_size(before)} in bf16, {readable_size(after)} in NVFP4 ({smaller})")
