"""moe-nvfp4 generate: answer a prompt."""

from __future__ import annotations

import argparse
from typing import Any

from moe_nvfp4.cli.answers import Answer, Message, answer, encode, has_chat_template
from moe_nvfp4.cli.models import check_original, expert_bytes, load, load_to_answer
from moe_nvfp4.cli.options import (
    MODEL_HELP,
    Commands,
    add_answering,
    add_cpu_experts,
    add_device,
    add_map_files,
    add_quantizing,
    command,
    prompt_text,
    whole,
)
from moe_nvfp4.cli.output import note


def add(commands: Commands) -> None:
    sub = command(
        commands, "generate", run, "answer a prompt",
        "Load MODEL in bf16 with 4-bit experts (dense ones are quantized while loading) and answer a prompt, "
        "token by token. Prints the speed, and the size of the experts in bf16 and in NVFP4.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("--prompt", type=prompt_text, default="What is the capital of France, and what is it known for?")
    sub.add_argument("--max-new-tokens", type=whole(1), default=128, metavar="N")
    sub.add_argument("--raw", action="store_true", help="continue the prompt, without the chat template")
    sub.add_argument("--bf16", action="store_true", help="first answer with the model's bf16 experts, to compare with")
    add_answering(sub)
    add_quantizing(sub)
    add_device(sub)
    add_cpu_experts(sub)
    add_map_files(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.quantize.report import readable_size

    said = {}
    if args.bf16:
        check_original(args)
        if args.cpu_experts is not None or args.map_files:
            raise ValueError("--bf16 runs the whole model on one device: leave out --cpu-experts and --map-files")
        dense, tokenizer = load(args, None)
        note("\nbf16 experts:")
        said["bf16"] = _answer(args, dense, tokenizer)
        del dense
    model, tokenizer = load_to_answer(args)
    if not has_chat_template(tokenizer) and not args.raw:
        note(f"note: {args.model} has no chat template (chat_template.jinja): the prompt is continued, as with --raw")
    note("\n4-bit experts:" if args.bf16 else "")
    said["4-bit" if args.bf16 else "speed"] = _answer(args, model, tokenizer)
    before, after = expert_bytes(model)
    note("")
    for name, it in said.items():
        if it.tokens > 1:
            note(f"{name + ':':8s} {it.speed:.1f} tokens/s over {it.tokens} tokens, "
                f"first token after {it.first:.2f} s ({it.prompt} tokens of prompt), on {model.device}")  # fmt: skip
        else:
            note(f"{name + ':':8s} none: the answer has one token, which may be the end")
    if after:  # some files have only 4-bit linears
        smaller = f"{before / after:.2f}x smaller"
        note(f"experts: {readable_size(before)} in bf16, {readable_size(after)} in NVFP4 ({smaller})")
    if args.model == "demo":
        note("demo:    a test model of 135M parameters whose weights were 4-bit before: it shows numbers, not quality")


def _answer(args: argparse.Namespace, model: Any, tokenizer: Any) -> Answer:
    prompt: str | list[Message] = args.prompt
    if has_chat_template(tokenizer) and not args.raw:
        prompt = [{"role": "user", "content": args.prompt}]
    inputs = encode(tokenizer, prompt)
    return answer(model, tokenizer, inputs, args.temperature, max_new_tokens=args.max_new_tokens)
