"""moe-nvfp4 chat: talk with a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moe_nvfp4.cli.answers import Message, answer, encode, has_chat_template
from moe_nvfp4.cli.models import load_to_answer
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
from moe_nvfp4.cli.output import note, say
from moe_nvfp4.cli.parser import did_you_mean

COMMANDS = {
    "/help": "show these commands",
    "/new": "begin a new conversation; /reset, too",
    "/reset": "",
    "/quit": "end the program; Ctrl-D, too",
}
HELP = (
    "Ctrl-C stops an answer. The arrow keys edit a line and bring back earlier ones.",
    "A message may begin with / after a space.",
)
HISTORY = 1000  # lines


def add(commands: Commands) -> None:
    sub = command(
        commands, "chat", run, "talk with a model",
        "Load MODEL in bf16 with 4-bit experts and talk with it, line by line. /help lists what can be typed; /quit or "
        "the end of the input ends the program; Ctrl-C stops an answer.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("--system", type=prompt_text, help="system prompt: how the model should behave")
    sub.add_argument("--max-new-tokens", type=whole(1), default=1024, metavar="N", help="per answer (default 1024)")
    add_answering(sub)
    add_quantizing(sub)
    add_device(sub)
    add_cpu_experts(sub)
    add_map_files(sub)


def run(args: argparse.Namespace) -> None:
    model, tokenizer = load_to_answer(args)
    if not has_chat_template(tokenizer):
        raise ValueError(f"{args.model} has no chat template: moe-nvfp4 generate --raw continues a text")
    talk = Talk(model, tokenizer, args.system, args.temperature, args.max_new_tokens)
    note("/help lists the commands")
    with _line_editing():
        while (line := _read()) is not None:
            if line.startswith("/"):
                word = line.split()[0]
                if word == "/quit":
                    return
                _obey(word, talk)
            elif line.strip():
                try:
                    talk.ask(line.strip())
                except KeyboardInterrupt:
                    say("\n(stopped: this question and its answer are forgotten)")
                except ValueError as error:
                    say(f"({error})")


def _read() -> str | None:
    """The next line, or None at the end of the input."""
    while True:
        print(flush=True)
        try:
            return input("> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            say("\n(/quit or Ctrl-D ends the program)")


def _obey(word: str, talk: Talk) -> None:
    if word in ("/new", "/reset"):
        talk.forget()
        note("(a new conversation)")
    elif word == "/help":
        for command, what in COMMANDS.items():
            if what:
                say(f"{command:8s}{what}")
        for line in HELP:
            say(line)
    else:
        say(f"(there is no {word}{did_you_mean(word, COMMANDS)}; /help lists the commands)")


@contextmanager
def _line_editing() -> Iterator[None]:
    """Let `input` edit lines and remember those of earlier runs, where Python has readline and stdin is a terminal."""
    try:
        import readline
    except ImportError:
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        yield
        return
    from moe_nvfp4.cache import own_folder

    try:
        file = own_folder("chat") / "history"
        readline.read_history_file(file)
    except OSError:
        pass  # the first run, or no place to keep it
    readline.set_history_length(HISTORY)
    try:
        yield
    finally:
        try:
            readline.write_history_file(own_folder("chat") / "history")
        except OSError:
            pass


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
        self.cache = said.cache if _holds_tokens_only(said.cache) else None
        self.seen = [] if self.cache is None else said.ids[: int(self.cache.get_seq_length())].tolist()
        return reply


def _holds_tokens_only(cache: Any) -> bool:
    """Whether a cache is keys and values of tokens. With a state (linear attention, convolutions) or an index (sparse
    attention), models of transformers go on with one token; of several at once, the next message, some compute
    something else (Jamba, MiniMax, GLM-5)."""
    from transformers import cache_utils as known

    plain = known.DynamicLayer, known.DynamicSlidingWindowLayer, known.StaticLayer, known.StaticSlidingWindowLayer
    layers = [] if cache is None else cache.layers
    return bool(layers) and all(type(layer) in plain and layer.keys is not None for layer in layers)
