"""moe-nvfp4 chat: talk with a model."""

from __future__ import annotations

import argparse
from typing import Any

from moe_nvfp4.cli.answers import Message, answer, encode
from moe_nvfp4.cli.models import load_to_answer
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
        commands, "chat", run, "talk with a model",
        "Load MODEL with 4-bit experts and talk with it, line by line. /new starts a new conversation; /quit or the "
        "end of the input ends the program; Ctrl-C stops an answer.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("--system", type=prompt_text, help="system prompt: how the model should behave")
    sub.add_argument("--max-new-tokens", type=whole(1), default=1024, metavar="N", help="per answer (default 1024)")
    add_answering(sub)
    add_quantizing(sub)
    add_device(sub)
    add_cpu_experts(sub)


def run(args: argparse.Namespace) -> None:
    model, tokenizer = load_to_answer(args)
    if tokenizer.chat_template is None:
        raise ValueError(f"{args.model} has no chat template: moe-nvfp4 generate --raw continues a text")
    talk = Talk(model, tokenizer, args.system, args.temperature, args.max_new_tokens)
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            line = "/quit"
        if line == "/quit":
            return
        if line == "/new":
            talk.forget()
        elif line:
            try:
                talk.ask(line)
            except KeyboardInterrupt:
                say("\n(stopped: this question and its answer are forgotten)")
            except ValueError as error:
                say(f"({error})")


class Talk:
    """A conversation, whose keys and values are kept from answer to answer."""

    def __init__(self, model: Any, tokenizer: Any, system: str | None, temperature: float, max_new_tokens: int):
        self.model, self.tokenizer = model, tokenizer
        self.first: list[Message] = [{"role": "system", "content": system}] if system else []
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.forget()

    def forget(self) -> None:
        self.messages = list(self.first)
        self.seen: list[int] = []  # the tokens that `cache` holds
        self.cache: Any = None

    def ask(self, text: str) -> str:
        """Answer the next message; both become part of the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        inputs = encode(self.tokenizer, messages)
        cache, self.cache = self.cache, None  # useless after an interruption
        if inputs["input_ids"][0, : len(self.seen)].tolist() != self.seen:
            cache = None  # the template writes earlier turns differently
        said = answer(
            self.model, self.tokenizer, inputs, self.temperature,
            max_new_tokens=self.max_new_tokens, cache=cache,
        )  # fmt: skip
        reply: str = self.tokenizer.decode(said.ids[said.prompt :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        self.cache, self.seen = said.cache, said.ids[: int(said.cache.get_seq_length())].tolist()
        return reply
