"""What a server says about its model: log-probabilities, by whichever interface it has.

`echo` and `logprobs` of /v1/completions (vLLM, SGLang) give that of every token of a prompt; `logprobs` alone
(llama.cpp) those of the likeliest next tokens; /v1/systemone (transformers 5.23), after a question with 26 options, the
probabilities of its labels among each other.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from string import ascii_uppercase
from typing import Any, NamedTuple

import torch
from torch import Tensor

TIMEOUT = 600.0  # seconds for one answer: the first may wait for compilers
NEXT = 5  # tokens asked for after a prompt; OpenAI's limit
EVERY = 8  # tokens from one such prompt to the next
QUESTIONS = 8


class Asked(NamedTuple):
    """Log-probabilities that a server gave, and what they are of.

    ids       int64 [n]       what the model reads
    rows      int64 [m]       the tokens, by their place in ids, after which ...
    tokens    int64 [m, k]    ... these are the next
    logprobs  float64 [m, k]  of the server; NaN where it gave none
    among     whether the probabilities of the k tokens sum to 1
    """

    ids: Tensor
    rows: Tensor
    tokens: Tensor
    logprobs: Tensor
    among: bool = False


class Refused(Exception):
    """The server does not take a request: its HTTP status and what it says."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would follow with a GET of another address, and give that one the key."""

    def redirect_request(self, *args: Any) -> None:
        return None


class Endpoint:
    """An OpenAI endpoint at `url`, such as http://127.0.0.1:8000; model: its name there, or None for the only one. A
    key is sent if OPENAI_API_KEY is set."""

    def __init__(self, url: str, model: str | None = None):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--server {url}: an address begins with http:// or https://: http://127.0.0.1:8000")
        try:
            urllib.parse.urlsplit(url)
        except ValueError as error:
            raise ValueError(f"--server {url}: {error}; an address is like http://127.0.0.1:8000") from None
        self.url, self.model = url.rstrip("/").removesuffix("/v1"), model

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to a request about the model; `Refused` where it is an error. OSError if nobody answers."""
        named = {} if self.model is None else {"model": self.model}
        return self._open(path, json.dumps({**named, **body}).encode())

    def models(self) -> list[str]:
        """The names that the server lists; none where it has no list."""
        try:
            return [str(model["id"]) for model in self._open("/v1/models")["data"]]
        except (Refused, KeyError, TypeError):
            return []

    def _open(self, path: str, data: bytes | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY", "").strip():
            if not (key.isascii() and key.isprintable()):
                raise ValueError("OPENAI_API_KEY has a line break, or characters that are not ASCII: set it to the key")
            headers["Authorization"] = f"Bearer {key}"
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")
            if place := error.headers.get("Location"):
                raise ValueError(
                    f"{self.url} redirects to {place} (HTTP {error.code}): write the address of the server itself"
                ) from None
            if error.code in (401, 403):
                raise ValueError(
                    f"{self.url} refuses (HTTP {error.code}): set OPENAI_API_KEY to a key that it takes"
                ) from None
            raise Refused(f"HTTP {error.code}: {_message(said)}") from None
        except (OSError, HTTPException, UnicodeError) as error:
            why = getattr(error, "reason", None) or error
            raise ConnectionError(
                f"no server answers at {self.url} ({why}): start one (moe-nvfp4 serve FOLDER), or write its address"
            ) from None
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused("its answer is not JSON") from None
        if not isinstance(found, dict):
            raise Refused("its answer is not an object")
        return found


def _message(said: str) -> str:
    """The message of an error, of which servers have several forms, in at most 200 characters."""
    try:
        found = json.loads(said)
        found = found.get("error", found)
        found = found.get("message", found.get("detail", found)) if isinstance(found, dict) else found
    except (ValueError, AttributeError):
        found = said
    return " ".join(str(found).split())[:200]


def ask(server: Endpoint, tokenizer: Any, windows: Iterable[Tensor]) -> tuple[str, list[Asked]]:
    """(the way that the server takes, what it gave) for windows, int64 [n] each, n > 1.

    ValueError if it gives no log-probabilities, has not the model, or has another vocabulary.
    """
    pieces, refusals = list(windows), dict[str, str]()
    for name, way in WAYS.items():
        try:
            return name, list(way(server, tokenizer, pieces))
        except Refused as refusal:
            refusals[name] = str(refusal)
    models, listed = server.models(), f"{server.url} has "
    listed += ", ".join(map(repr, models))
    if models and server.model is not None and server.model not in models:
        raise ValueError(f"{listed}, and no model {server.model!r}: name one of them with --model")
    if server.model is None and len(models) > 1:
        raise ValueError(f"{listed}: name the one that serves this folder with --model")
    said = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    raise ValueError(
        f"{server.url} gives no log-probabilities, by which it could be judged. One of these is needed: `echo` with "
        "`logprobs` in /v1/completions (vLLM, SGLang), `logprobs` there (llama.cpp), or /v1/systemone (transformers "
        f"from 5.23, with a chat template). It said: {said}"
    )


# ---- the ways ------------------------------------------------------------------------------------


def _prompts(server: Endpoint, tokenizer: Any, windows: list[Tensor]) -> Iterator[Asked]:
    """The log-probability of every token but the first."""
    for ids in windows:
        answer = server.post("/v1/completions", prompt=ids.tolist(), max_tokens=1, temperature=0, echo=True, logprobs=1)
        with _another_form():
            found = _logprobs(answer)
            values, words = found.get("token_logprobs") or [], found.get("tokens") or []
            if len(values) < len(ids):
                raise Refused(f"{len(values)} log-probabilities for a prompt of {len(ids)} tokens")
            numbers, words = _numbers(values[1 : len(ids)]), list(words)[: len(ids)]
        _check_words(words, ids, tokenizer)
        _check_below_zero(numbers)
        yield Asked(ids, torch.arange(len(ids) - 1), ids[1:, None], numbers[:, None])


def _next_tokens(server: Endpoint, tokenizer: Any, windows: list[Tensor]) -> Iterator[Asked]:
    """The log-probabilities of the likeliest tokens after the beginnings of each window."""
    known: dict[str, int] | None = None
    for ids in windows:
        rows = range(EVERY - 1, len(ids), EVERY)
        tokens, logprobs = torch.zeros(len(rows), NEXT, dtype=torch.int64), torch.full((len(rows), NEXT), torch.nan)
        for i, row in enumerate(rows):
            prompt = ids[: row + 1].tolist()
            answer = server.post("/v1/completions", prompt=prompt, max_tokens=1, temperature=0, logprobs=NEXT)
            known = _words(tokenizer) if known is None else known
            with _another_form():
                pairs = _likeliest(_logprobs(answer))[:NEXT]
                of = {known.get(word, -1) if token is None else int(token): value for token, word, value in pairs}
                of.pop(-1, None)
                numbers = _numbers(of.values())
            if not of or min(of) < 0 or max(of) >= len(tokenizer):
                raise _other_vocabulary(pairs[0][1])
            _check_below_zero(numbers)
            tokens[i, : len(of)], logprobs[i, : len(of)] = torch.tensor([*of]), numbers.float()
        yield Asked(ids, torch.tensor(rows), tokens, logprobs.double())


def _decisions(server: Endpoint, tokenizer: Any, windows: list[Tensor]) -> Iterator[Asked]:
    """The log-probabilities of the labels A to Z after a question with 26 options."""
    try:
        from transformers.decision.configuration_utils import DecisionConfig
        from transformers.decision.template_utils import label_token_ids, prepare_inputs
    except ImportError:
        raise Refused("this transformers has no decisions, by which it could be compared: install 5.23") from None
    config = DecisionConfig()
    for window in windows[:QUESTIONS]:
        options = [str(i) for i in range(len(ascii_uppercase))]
        question = {"type": "choice", "instructions": "What follows?", "criteria": dict.fromkeys(options)}
        body = {
            "state": tokenizer.decode(window[: len(window) // 2], skip_special_tokens=True),
            "questions": {"next": question},
        }
        answer = server.post("/v1/systemone", **body)
        try:
            ((inputs, _),) = prepare_inputs(config, body, tokenizer)
            labels = label_token_ids(tokenizer, tuple(ascii_uppercase))
        except ValueError as error:
            raise Refused(f"this folder's tokenizer cannot ask it ({error})") from None
        with _another_form():
            found = answer["answers"]["next"]["probabilities"]
            values, tokens = _numbers(found[option] for option in options), answer["usage"]["input_tokens"]
        ids = inputs["input_ids"][0]
        if tokens != len(ids):
            raise ValueError(
                f"the server makes {tokens} tokens of a question, this folder's tokenizer {len(ids)}: it has another "
                "tokenizer or chat template; serve this folder, or verify the folder that is served"
            )
        yield Asked(ids, torch.tensor([len(ids) - 1]), torch.tensor([labels]), values.log()[None], among=True)


WAYS: dict[str, Callable[[Endpoint, Any, list[Tensor]], Iterator[Asked]]] = {
    "log-probabilities of prompts": _prompts,
    "log-probabilities of next tokens": _next_tokens,
    "probabilities of labels": _decisions,
}


@contextmanager
def _another_form() -> Iterator[None]:
    """`Refused` where an answer cannot be read: nothing in it is what it should be by the API."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
        raise Refused("no log-probabilities in its answer, or in another form") from None


def _logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    found = answer["choices"][0]["logprobs"]
    if not isinstance(found, dict):
        raise Refused("no log-probabilities in its answer")
    return found


def _check_below_zero(logprobs: Tensor) -> None:
    """ValueError for numbers that are no log-probabilities."""
    if (logprobs > 1e-3).any():
        raise ValueError(
            f"the server gives {logprobs.nan_to_num(-torch.inf).max():.3g} as a log-probability, which is 0 at most: "
            "it seems to give logits (vLLM's --logprobs-mode); start it with --logprobs-mode raw_logprobs"
        )


def _likeliest(found: dict[str, Any]) -> list[tuple[int | None, str, float]]:
    """(id, text, log-probability) of the likeliest next tokens."""
    if content := found.get("content"):  # llama.cpp's form
        pairs = [(top.get("id"), top["token"], top["logprob"]) for top in content[0]["top_logprobs"]]
    else:
        pairs = [(_number(word), word, logprob) for word, logprob in found["top_logprobs"][0].items()]
    if not pairs:
        raise Refused("no log-probabilities in its answer")
    return pairs


def _number(word: Any) -> int | None:
    """The id in a token's text, if that is how the server calls it (vLLM's --return-tokens-as-token-ids)."""
    found = re.fullmatch(r"token_id:(\d+)", str(word))
    return int(found[1]) if found else None


def _numbers(values: Iterable[Any]) -> Tensor:
    """float64 [n]; NaN for null, which JSON has in its place."""
    return torch.tensor([float("nan") if value is None else float(value) for value in values], dtype=torch.float64)


def _words(tokenizer: Any) -> dict[str, int]:
    """The text of a token -> its id, of those that no other token has."""
    found: dict[str, int] = {}
    for i, word in enumerate(tokenizer.batch_decode([[i] for i in range(len(tokenizer))])):
        found[word] = -1 if word in found else i
    return found


def _check_words(words: list[Any], ids: Tensor, tokenizer: Any) -> None:
    """ValueError if the server has other texts for these tokens than `tokenizer`. Spaces are not compared, and tokens
    that are no whole letters not at all."""
    ours = tokenizer.batch_decode(ids[:, None].tolist())
    named = zip(words, ours, ids.tolist(), strict=False)
    pairs = [(str(word).strip(), our.strip()) for word, our, i in named if our.isascii() and _number(word) != i]
    different = [(word, our) for word, our in pairs if word != our]
    if len(different) > len(pairs) / 10:
        raise _other_vocabulary(*different[0])


def _other_vocabulary(word: str, ours: str | None = None) -> ValueError:
    here = ", which this folder's has not" if ours is None else f" where this folder's has {ours!r}"
    return ValueError(
        f"the server's vocabulary has {word!r}{here}: it serves another model; serve this folder, or verify the "
        "folder that is served"
    )
