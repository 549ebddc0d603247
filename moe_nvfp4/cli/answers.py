"""A model's answers, token by token: shared by `generate`, `chat` and `bench`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Message = dict[str, str]  # {"role": ..., "content": ...}


class Answer(NamedTuple):
    """ids [prompt + new] of one sequence, and when its first and last new token came, in seconds after the call."""

    ids: Tensor
    prompt: int
    first: float
    last: float
    cache: Any  # keys and values of all tokens but the last

    @property
    def tokens(self) -> int:
        return len(self.ids) - self.prompt

    @property
    def speed(self) -> float:
        """Tokens per second, without the first, which waits for the prompt; nan for a single one."""
        return (self.tokens - 1) / (self.last - self.first) if self.tokens > 1 else float("nan")


def encode(tokenizer: Any, prompt: str | list[Message]) -> dict[str, Tensor]:
    """input_ids and attention_mask [1, tokens] of a text to continue, or of messages to answer. ValueError if there are
    no tokens, and for text that was not valid UTF-8 (Python keeps such bytes as lone surrogates)."""
    for text in [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]:
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(f"{text!r} is not UTF-8 text: write it in UTF-8")
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    if inputs["input_ids"].shape[1] == 0:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        raise ValueError(f"the tokenizer makes no tokens of the prompt {text!r}: write another")
    return {k: v for k, v in inputs.items() if k in ("input_ids", "attention_mask")}


def answer(
    model: Any, tokenizer: Any, inputs: dict[str, Tensor], temperature: float, show: bool = True, **options: Any
) -> Answer:
    """Generate an answer and show it as it comes. temperature 0: greedy; `options` go to model.generate."""
    import torch
    from transformers.generation.streamers import TextStreamer

    class Streamer(TextStreamer):
        times: list[float] = []

        def put(self, value: Tensor) -> None:
            self.times.append(time.perf_counter())
            if show:
                super().put(value)

        def end(self) -> None:
            if show:
                super().end()

    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling = dict(do_sample=True, temperature=temperature) if temperature > 0 else dict(do_sample=False)
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    start = time.perf_counter()
    with torch.no_grad():
        made = model.generate(**inputs, **options, **sampling, streamer=streamer, return_dict_in_generate=True)
    times = streamer.times[1:]  # the first is the prompt
    ids = made.sequences[0].cpu()
    return Answer(ids, inputs["input_ids"].shape[1], times[0] - start, times[-1] - start, made.past_key_values)
