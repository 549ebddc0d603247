"""A model's answers, token by token: shared by `generate`, `chat` and `bench`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
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


def has_chat_template(tokenizer: Any) -> bool:
    """Whether `encode` can write messages: with the template of the files, or as mistral-common does, without one."""
    return tokenizer.chat_template is not None or _of_mistral(tokenizer)


def _of_mistral(tokenizer: Any) -> bool:
    """Whether it reads tekken.json with mistral-common, where this is installed, which knows the form of messages."""
    return type(tokenizer).__name__ == "MistralCommonBackend"


def encode(tokenizer: Any, prompt: str | list[Message]) -> dict[str, Tensor]:
    """input_ids and attention_mask [1, tokens] of a text to continue, or of messages to answer. ValueError if there are
    no tokens, and for text that was not valid UTF-8 (Python keeps such bytes as lone surrogates)."""
    for text in [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]:
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(f"{text!r} is not UTF-8 text: write it in UTF-8")
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        if _of_mistral(tokenizer):  # it refuses an answer that was empty, and writes a space as nothing
            messages: list[Any] = [message | {"content": message["content"] or " "} for message in prompt]
        else:
            messages = _in_form(tokenizer, prompt)
        try:
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:
            if not type(error).__module__.startswith("mistral_common"):
                raise
            raise ValueError(f"the model's tokenizer refuses the conversation: {error}") from None
    if inputs["input_ids"].shape[1] == 0:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        raise ValueError(f"the tokenizer makes no tokens of the prompt {text!r}: write another")
    return {k: v for k, v in inputs.items() if k in ("input_ids", "attention_mask")}


def _in_form(tokenizer: Any, messages: list[Message]) -> list[Any]:
    """The messages in the form that the chat template reads: each a text, or a list of parts, as processors have them.

    ValueError for a template that refuses them, or that writes the same whatever the first or the last one says.
    """
    from jinja2 import TemplateError

    def left_out(form: Callable[[str], Any]) -> list[str]:
        """The roles of which the template writes nothing."""

        def written(messages: list[Message]) -> str:
            given = [message | {"content": form(message["content"])} for message in messages]
            try:
                return tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
            except (TemplateError, TypeError) as error:
                raise ValueError(f"the model's chat template refuses the conversation: {error}") from None

        roles, whole = [], written(messages)
        for i in sorted({0, len(messages) - 1}):
            other = messages[i] | {"content": f"{messages[i]['content']} and more"}
            if messages[i]["content"] and whole == written([*messages[:i], other, *messages[i + 1 :]]):
                roles.append(messages[i]["role"])
        return roles

    parts = lambda text: [{"type": "text", "text": text}]
    problem: ValueError | None = None
    for form in (str, parts):
        try:
            missing = left_out(form)
        except ValueError as refusal:
            problem = problem or refusal
            continue
        if not missing:
            return [message | {"content": form(message["content"])} for message in messages]
        remedy = "leave out --system" if missing == ["system"] else "write the whole prompt, with generate --raw"
        problem = problem or ValueError(f"the model's chat template leaves out the {missing[0]} message: {remedy}")
    assert problem is not None
    raise problem


def answer(
    model: Any,
    tokenizer: Any,
    inputs: dict[str, Tensor],
    temperature: float,
    max_new_tokens: int,
    show: bool = True,
    cache: Any = None,
    **options: Any,
) -> Answer:
    """Generate an answer and show it as it comes. temperature 0: greedy; cache: that of an earlier answer, whose tokens
    `inputs` begin with; `options` go to model.generate."""
    import torch
    from transformers.generation.streamers import TextStreamer

    from moe_nvfp4.integrations.huggingface.graphs import CACHE

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
    # Whatever generation_config.json asks for: one text is shown as it comes
    sampling |= dict(num_beams=1, num_return_sequences=1, tokenizer=tokenizer)
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    prompt = inputs["input_ids"].shape[1]
    start = time.perf_counter()
    with torch.no_grad():
        options |= {"max_new_tokens": max_new_tokens, CACHE: _cache(model, prompt + max_new_tokens, cache)}
        made = model.generate(**inputs, **options, **sampling, streamer=streamer, return_dict_in_generate=True)
    times = streamer.times[1:]  # the first is the prompt
    return Answer(made.sequences[0].cpu(), prompt, times[0] - start, times[-1] - start, made.get(CACHE))


def _cache(model: Any, tokens: int, old: Any) -> Any:
    """A static cache of `tokens` tokens that begins with what `old` holds: with it, `generate` runs each step as a CUDA
    graph. Where it cannot, as on CPUs, a cache that grows: `old`, or None for a new one.
    """
    import torch
    from transformers import StaticCache
    from transformers.utils import logging

    from moe_nvfp4.integrations.huggingface import use_cuda_graphs
    from moe_nvfp4.integrations.huggingface.offload import cache_bytes
    from moe_nvfp4.quantize.report import readable_size

    config = model.generation_config
    free = _free_memory(model.device)
    if config.use_cache is False or config.cache_implementation is not None:
        return None  # `generate` makes its own, or none, and takes no other
    if not free:
        return old
    try:
        use_cuda_graphs(model)
    except NotImplementedError:
        return old
    if (size := cache_bytes(model, tokens)) > free / 2:
        logging.get_logger(__name__).warning_once(
            f"slower, without CUDA graphs: their cache of {tokens} tokens would take {readable_size(size)} of "
            f"{readable_size(free)} of free GPU memory; a smaller --max-new-tokens makes a smaller one"
        )
        return None if isinstance(old, StaticCache) else old  # an old one has no room for this answer
    with torch.device(model.device):  # else the host waits for the GPU in each layer, to bring its length there
        cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=tokens)
    for new, layer in zip(cache.layers, old.layers if old is not None else [], strict=False):
        length = int(layer.get_seq_length())
        new.update(layer.keys[:, :, :length], layer.values[:, :, :length])
    return cache


def _free_memory(device: torch.device) -> int:
    """Bytes that a CUDA GPU has left; 0 on other devices."""
    import torch

    if device.type != "cuda":
        return 0
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved
