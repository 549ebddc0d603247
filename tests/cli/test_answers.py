"""Commands that answer: generate and chat."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from moe_nvfp4.cli import answers, chat, generate
from moe_nvfp4.integrations.huggingface.calibration import tokenizer_at
from moe_nvfp4.integrations.huggingface.graphs import CACHE
from tests.cli.commands import run
from tests.common import ROOT, made_demo
from tests.integrations.test_graphs import as_on_gpu, recorded  # noqa: F401
from tests.integrations.test_importance import glm_moe_dsa
from tests.models import SMALL, make, mixtral, qwen3_moe


@pytest.mark.slow
def test_generate_says_the_same_by_graphs(folder, request, monkeypatch, capsys):
    from transformers import Qwen3MoeForCausalLM

    counts = request.getfixturevalue("recorded")
    criteria = lambda self, given, config: given[CACHE].is_compileable
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_valid_auto_compile_criteria", criteria)
    said = []
    for n, free in ((4, 0), (4, 1 << 30), (1, 1 << 30)):
        monkeypatch.setattr(answers, "_free_memory", lambda device, free=free: free)
        torch.manual_seed(0)
        hot = ("--temperature", 1, "--device", "cpu")
        run("generate", folder, "--raw", "--prompt", "Hello", "--max-new-tokens", n, *hot)
        said.append(capsys.readouterr().out.splitlines()[1])
    assert said[0] == said[1] and said[1].startswith(said[2])
    assert counts == {"captured": 1, "replayed": 2}


def test_a_prompt_without_a_chat_template(folder, capsys):
    """A download may lack the file, and the model then answers nothing, or anything."""
    for more, asked in ([], True), (["--raw"], False):
        run("generate", folder, "--prompt", "Hello", "--max-new-tokens", 1, "--device", "cpu", *more)
        said = capsys.readouterr().out
        assert (f"note: {folder} has no chat template" in said) == asked
        assert "none: the answer has one token" in said


def tekken():
    """A tokenizer of Mistral's: each byte is a token, after those that mark messages."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
               "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]",
               "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]  # fmt: skip
    size = 256 + len(special)
    config = dict(pattern=r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+", num_vocab_tokens=256, default_vocab_size=size,
                  default_num_special_tokens=len(special), version="v7")  # fmt: skip
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    marks = [{"rank": i, "token_str": mark, "is_control": True} for i, mark in enumerate(special)]
    return {"config": config, "vocab": vocab, "special_tokens": marks}, size


def test_messages_of_mistral(tmp_path, monkeypatch, capsys):
    """With mistral-common installed, as vLLM has it, transformers reads tekken.json without any template: `generate`
    continued the question, and `chat` refused."""
    pytest.importorskip("mistral_common", reason="mistral-common is not installed; vLLM brings it")
    file, size = tekken()
    make(lambda: mixtral(vocab_size=size)).save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    asked = []

    def noted(model, tokenizer, inputs, *others, **named):
        asked.append(tokenizer.decode(inputs["input_ids"][0].tolist()))
        said = answers.answer(model, tokenizer, inputs, *others, **named)
        return said._replace(ids=said.ids[: said.prompt], cache=None)  # that ends at once

    for command in (generate, chat):
        monkeypatch.setattr(command, "answer", noted)
    lines = iter(["hi", "again", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    options = ["--max-new-tokens", 2, "--device", "cpu", "--recipe", "max"]
    run("generate", tmp_path, "--prompt", "hi", *options)
    run("generate", tmp_path, "--prompt", "hi", "--raw", *options)
    assert "no chat template" not in capsys.readouterr().out
    run("chat", tmp_path, "--system", "short", *options)
    first = "<s>[SYSTEM_PROMPT]short[/SYSTEM_PROMPT][INST]hi[/INST]"
    assert asked == ["<s>[INST]hi[/INST]", "<s>hi", first, f"{first}</s>[INST]again[/INST]"]


def test_a_prompt_of_no_tokens(folder, tmp_path, capsys):
    """With no unknown token and no special ones, words outside the vocabulary make no tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = tmp_path / "model"
    model.mkdir()
    for file in folder.iterdir():
        (model / file.name).symlink_to(file)
    for file in model.glob("tokenizer*"):
        file.unlink()
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, []))).save_pretrained(model)
    run("generate", model, "--prompt", "?", "--device", "cpu", expect=2)
    assert "makes no tokens of the prompt '?'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_demo_answers(capsys):
    """The README's first command: a real model with 4-bit experts says something true."""
    made_demo()
    run("generate", "demo", "--max-new-tokens", 12, "--device", "cpu")
    said = capsys.readouterr().out
    assert "Paris" in said
    assert "159.3 MB in bf16, 44.8 MB in NVFP4 (3.55x smaller)" in said.replace("3.56x", "3.55x")


CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


PARTS = CHAT.replace("{{ m['content'] }}", "{% for c in m['content'] %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
                     "{% endfor %}")  # fmt: skip
USERS = CHAT.replace("m['content']", "m['content'] if m['role'] == 'user' else ''")
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT


def test_a_template_writes_what_is_said(folder):
    """Some take parts only, as processors have them; some leave the system's message out, or refuse it."""
    from transformers import AutoTokenizer

    from moe_nvfp4.cli.answers import encode

    tokenizer = AutoTokenizer.from_pretrained(folder)
    system, hi = {"role": "system", "content": "short"}, {"role": "user", "content": "Hi"}
    expected = tokenizer("s:short;u:Hi;a:").input_ids
    for template in (CHAT, PARTS, CHAT.replace("m['content']", "m['content'][0].text")):
        tokenizer.chat_template = template
        assert encode(tokenizer, [system, hi])["input_ids"][0].tolist() == expected
    for template, message in ((USERS, "leaves out the system message: leave out --system"),
                              (PARTS.replace("'text'", "'image'"), "leaves out the system message: write the whole"),
                              (REFUSES, "refuses the conversation: no system")):  # fmt: skip
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=message):
            encode(tokenizer, [system, hi])
    tokenizer.chat_template = USERS
    assert encode(tokenizer, [hi])["input_ids"][0].tolist() == tokenizer("u:Hi;a:").input_ids


@pytest.fixture
def talkative(folder, tmp_path):
    """The same checkpoint with a chat template."""
    path = tmp_path / "talkative"
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).symlink_to(file)
    (path / "chat_template.jinja").write_text(CHAT)
    return path


def test_the_template_of_a_processor(folder, tmp_path, monkeypatch, capsys):
    """transformers 4 wrote it into chat_template.json, which its tokenizers do not read."""
    place = tmp_path / "model"
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).symlink_to(file)
    (place / "chat_template.json").write_text(json.dumps({"chat_template": CHAT}))
    tokenizer = tokenizer_at(place)
    made = answers.encode(tokenizer, [{"role": "user", "content": "Hi"}])["input_ids"][0]
    assert made.tolist() == tokenizer("u:Hi;a:").input_ids
    run("generate", place, "--prompt", "Hi", "--max-new-tokens", 1, "--device", "cpu")
    assert "no chat template" not in capsys.readouterr().out


def test_chat(talkative, monkeypatch, capsys):
    typed = ["Hi there", "", "\udcff, a byte", "more", "/new", "Hi there", "/reset", "Hi there", "/quit", "never asked"]
    lines = iter(typed)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    options = ["--max-new-tokens", 6, "--system", "short", "--device", "cpu", "--recipe", "max"]
    run("chat", talkative, *options, "--quiet")
    first, refused, second, anew, again = filter(None, capsys.readouterr().out.splitlines())
    assert "is not UTF-8 text" in refused
    assert next(lines) == "never asked"
    assert first == anew == again != second and 0 < len(first) <= 6
    lines = iter([])

    def no_more(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", no_more)
    run("chat", talkative, *options)
    assert capsys.readouterr().out == "/help lists the commands\n\n"


def test_a_command_of_chat_never_reaches_the_model(talkative, monkeypatch, capsys):
    from moe_nvfp4.cli import chat

    lines = iter(["/hlep", "/usr/bin", "/help me", " /usr/bin is a folder", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(chat.Talk, "ask", lambda self, text: print("asked", text))
    run("chat", talkative, "--device", "cpu", "--recipe", "max")
    _, misspelt, unknown, *helped, asked = filter(None, capsys.readouterr().out.splitlines())
    assert misspelt == "(there is no /hlep; did you mean /help?; /help lists the commands)"
    assert unknown == "(there is no /usr/bin; /help lists the commands)"
    assert all(any(line.startswith(word) for line in helped) for word in ("/help", "/new", "/quit", "Ctrl-C"))
    assert "/reset" in "".join(helped)
    assert asked == "asked /usr/bin is a folder"


NEVER = b"never sent"  # Ctrl-C follows


@pytest.mark.slow
def test_chat_in_a_terminal(tmp_path):
    """Ctrl-C at the prompt does not end the program, and the arrow up brings back a line of an earlier run."""
    for module in ("pty", "fcntl", "termios", "readline"):
        pytest.importorskip(module, reason=f"Python without {module} here")
    import fcntl
    import pty
    import select
    import termios

    code = (
        "import sys; from moe_nvfp4 import cli; from moe_nvfp4.cli import chat\n"
        "chat.load_to_answer = lambda args: (None, type('Tokenizer', (), {'chat_template': ''}))\n"
        "chat.Talk.ask = lambda self, text: print('asked', text)\n"
        "sys.exit(cli.main(['chat', 'X']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOE_NVFP4_CACHE": str(tmp_path), "TERM": "dumb"}

    def begin():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores Ctrl-C

    def talk(*typed):
        """What the terminal shows while these lines are typed, each after a prompt."""
        end, terminal = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=terminal, stdout=terminal, stderr=terminal, env=environment,
            start_new_session=True, preexec_fn=begin,
        )  # fmt: skip
        os.close(terminal)
        shown = b""

        def read():
            assert select.select([end], [], [], 60)[0], shown
            return os.read(end, 1000)

        try:
            for i, text in enumerate(typed):
                while shown.count(b"\r\n> ") <= i:  # prompts; readline may write one again, but at the same line
                    shown += read()
                os.write(end, text)
                if text == NEVER:
                    while NEVER not in shown:
                        shown += read()
                    time.sleep(0.5)  # until readline waits for the next key, as it does while a person thinks
                    for _ in range(12):  # a busy machine takes longer
                        os.write(end, b"\x03")
                        if select.select([end], [], [], 5)[0]:
                            break
            while piece := read():
                shown += piece
        except OSError:  # Linux's way to say that the other end was closed
            pass
        finally:
            os.close(end)
        assert process.wait(60) == 0, shown
        return shown.decode()

    shown = talk(b"first\n", NEVER, b"/quit\n")
    assert "asked first" in shown and "(/quit or Ctrl-D ends the program)" in shown and "asked never" not in shown
    assert "asked first" in talk(b"\x1b[A\x1b[A\n", b"\x04")


def test_ctrl_c_at_a_prompt_that_is_no_terminals_ends_chat(talkative, monkeypatch, capsys):
    def stop(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", stop)
    run("chat", talkative, "--device", "cpu", "--recipe", "max", expect=130)
    assert capsys.readouterr().err.endswith("\nmoe-nvfp4: interrupted\n")


def test_chat_goes_on_after_an_interruption(talkative, monkeypatch, capsys):
    from moe_nvfp4.cli import chat

    lines = iter(["first", "second"])

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    def interrupted(self, text):
        if text == "first":
            raise KeyboardInterrupt
        print("asked", text)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(chat.Talk, "ask", interrupted)
    run("chat", talkative, "--device", "cpu", "--recipe", "max")
    assert re.search("forgotten.*asked second", capsys.readouterr().out, re.S)


@pytest.mark.parametrize("room", [[0, 0, 0], [1 << 30, 1 << 30, 1, 1 << 30]], ids=["cpu", "graphs"])  # bytes
def test_chat_answers_the_whole_conversation(room, talkative, request, monkeypatch, caplog):
    """Each reply is the model's answer to everything before it, with keys and values computed anew."""
    from transformers import AutoTokenizer

    from moe_nvfp4.cli.chat import Talk
    from moe_nvfp4.integrations.huggingface import swap_experts

    N = 4
    model = swap_experts(make(qwen3_moe, torch.float32), recipe="max").eval()  # bf16 has near ties
    tokenizer = AutoTokenizer.from_pretrained(talkative)
    counts = request.getfixturevalue("recorded")
    model._valid_auto_compile_criteria = lambda given, c: c.use_cache and given[CACHE].is_compileable
    talk, text, seen = Talk(model, tokenizer, "short", 0.0, N), "s:short;", []
    read = []  # tokens in each forward pass

    def count(_, args, given):
        read.append(given["input_ids"].shape[1])

    count.__module__ = "moe_nvfp4"  # beside hooks of a user there are no graphs
    model.register_forward_pre_hook(count, with_kwargs=True)
    said = []
    for asked, free in zip(("Hi there", "more", "and more", "yet more"), room, strict=False):
        monkeypatch.setattr(answers, "_free_memory", lambda device, free=free: free)
        inputs = tokenizer(f"{text}u:{asked};a:", return_tensors="pt")
        prompt = inputs["input_ids"].shape[1]
        read.clear()
        said.append(talk.ask(asked))
        assert read[0] == prompt - (0 if free == 1 else len(seen)), "what was seen is not read again, if there is room"
        new = model.generate(**inputs, do_sample=False, max_new_tokens=N, use_cache=False)[0, prompt:]
        assert tokenizer.decode(new, skip_special_tokens=True) == said[-1]
        text, seen = f"{text}u:{asked};a:{said[-1]};", talk.seen
    assert len(seen) == prompt + N - 1, "the last token was not fed back"
    assert counts == {"captured": sum(free > 1 for free in room), "replayed": (N - 2) * sum(free > 1 for free in room)}
    assert ("a smaller --max-new-tokens" in caplog.text) == (1 in room)
    talk.forget()
    assert talk.ask("Hi there") == said[0]


def test_the_temperature_is_the_one_that_was_asked_for(talkative):
    """At almost none, what is drawn is the likeliest; at a high one, it seldom is."""
    from transformers import AutoTokenizer

    model, tokenizer = make(qwen3_moe, torch.float32), AutoTokenizer.from_pretrained(talkative)
    inputs = answers.encode(tokenizer, "Hi there")
    model.generation_config.eos_token_id = None
    first = lambda temperature: answers.answer(model, tokenizer, inputs, temperature, 1, show=False).ids[-1].item()
    likeliest = first(0.0)
    assert {first(1e-4) for _ in range(20)} == {likeliest}
    assert sum(first(50.0) == likeliest for _ in range(20)) < 5


@pytest.mark.parametrize("how", ["stopped", "rewritten"])
def test_keys_and_values_of_another_text_are_not_used(how, talkative):
    """Those of an answer that was stopped; those of turns that the template writes differently later, as where it
    leaves out what a model thought."""
    from transformers import AutoTokenizer

    from moe_nvfp4.cli.chat import Talk
    from moe_nvfp4.integrations.huggingface import swap_experts

    model = swap_experts(make(qwen3_moe, torch.float32), recipe="max").eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(talkative)
    if how == "rewritten":
        later = "'zebras' if m['role'] == 'assistant' else m['content']"
        tokenizer.chat_template = CHAT.replace("m['content']", later)
    talk = Talk(model, tokenizer, None, 0.0, 6)
    before = talk.ask("Hi there")
    if how == "stopped":
        steps = []

        def stop(*_):
            steps.append(1)
            if len(steps) == 4:
                raise KeyboardInterrupt

        hook = model.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            talk.ask("more")
        hook.remove()
    before = "zebras" if how == "rewritten" else before
    inputs = tokenizer(f"u:Hi there;a:{before};u:more;a:", return_tensors="pt")
    new = model.generate(**inputs, do_sample=False, max_new_tokens=6, use_cache=False)
    assert talk.ask("more") == tokenizer.decode(new[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("setting", [
    dict(cache_implementation="static"), dict(use_cache=False), dict(do_sample=True, temperature=9.0),
    dict(num_beams=3), dict(do_sample=True, num_return_sequences=3), dict(stop_strings=["a string that never comes"]),
], ids=str)  # fmt: skip
def test_chat_with_settings_of_the_models_own(setting, talkative, monkeypatch):
    """What generation_config.json says of caches, sampling, beams and ends: the second answer still follows from the
    whole conversation."""
    from transformers import AutoTokenizer

    from moe_nvfp4.cli.chat import Talk
    from moe_nvfp4.integrations.huggingface import swap_experts

    model, tokenizer = swap_experts(make(qwen3_moe), recipe="max").eval(), AutoTokenizer.from_pretrained(talkative)
    first = Talk(model, tokenizer, None, 0.0, 4)
    want = [first.ask("Hi there"), first.ask("more")]
    model.generation_config.update(**setting)
    talk = Talk(model, tokenizer, None, 0.0, 4)
    assert [talk.ask("Hi there"), talk.ask("more")] == want


def _jamba():
    """A state of a mamba layer in the cache."""
    from transformers import JambaConfig, JambaForCausalLM

    return JambaForCausalLM(JambaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, attn_layer_period=3, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False, pad_token_id=0))  # fmt: skip


def minimax():
    """One of linear attention, in a cache that has no keys and values in its first layer."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    return MiniMaxForCausalLM(MiniMaxConfig(
        **SMALL, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"], block_size=8))  # fmt: skip


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("family", [_jamba, minimax, glm_moe_dsa])
def test_chat_with_a_model_that_keeps_more_than_keys_and_values(family, talkative):
    """transformers' models of these families compute something else when several tokens come at once, as the next
    message does."""
    from transformers import AutoTokenizer

    from moe_nvfp4.cli.chat import Talk
    from moe_nvfp4.integrations.huggingface import swap_experts

    model = swap_experts(make(family, torch.float32), recipe="max").eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(talkative)
    talk, text = Talk(model, tokenizer, None, 0.0, 6), ""
    for asked in ("Hi there", "more", "and more"):
        inputs = tokenizer(f"{text}u:{asked};a:", return_tensors="pt")
        new = model.generate(**inputs, do_sample=False, max_new_tokens=6)
        want = tokenizer.decode(new[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert talk.ask(asked) == want
        text += f"u:{asked};a:{want};"
