"""moe-nvfp4 generate: answer a prompt."""

from __future__ import annotations

import argparse

from moe_nvfp4.cli.answers import Message, answer, encode
from moe_nvfp4.cli.models import expert_bytes, load_to_answer
from moe_nvfp4.cli.options import (
    MODEL_HELP,
    Commands,
    add_answering,
    add_cpu_experts,
    add_device,
    add_quantizing,
    command,
    prompt_text,
    say,
    whole,
)


def add(commands: Commands) -> None:
    sub = command(
        commands, "generate", run, "answer a prompt",
        "Load MODEL with 4-bit experts (dense ones are quantized while loading) and answer a prompt, "
        "token by token. Prints the speed, and the size of the experts in bf16 and in NVFP4.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("--prompt", type=prompt_text, default="What is the capital of France, and what is it known for?")
    sub.add_argument("--max-new-tokens", type=whole(1), default=128, metavar="N")
    sub.add_argument("--raw", action="store_true", help="continue the prompt, without the chat template")
    add_answering(sub)
    add_quantizing(sub)
    add_device(sub)
    add_cpu_experts(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.quantize.report import readable_size

    model, tokenizer = load_to_answer(args)
    prompt: str | list[Message] = args.prompt
    if tokenizer.chat_template is not None and not args.raw:
        prompt = [{"role": "user", "content": args.prompt}]
    inputs = encode(tokenizer, prompt)
    say("")
    said = answer(model, tokenizer, inputs, args.temperature, max_new_tokens=args.max_new_tokens)
    before, after = expert_bytes(model)
    say("")
    if said.tokens > 1:
        say(f"speed:   {said.speed:.1f} tokens/s over {said.tokens} tokens, "
            f"first token after {said.first:.2f} s ({said.prompt} tokens of prompt), on {model.device}")  # fmt: skip
    if after:  # some files have only 4-bit linears
        smaller = f"{before / after:.2f}x smaller"
        say(f"experts: {readable_size(before)} in bf16, {readable_size(after)} in NVFP4 ({smaller})")
