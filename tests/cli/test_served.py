"""`moe-nvfp4 verify --server` names what a server misreads, and accuses no right one.

The servers here are threads that answer in the forms of vLLM and SGLang, or of llama.cpp. What they compute comes from
folders whose files were changed (`tests/misread.py`). Real servers are in tests/integrations.
"""

import json
import shutil
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.utils.import_utils import is_serve_available

import moe_nvfp4.integrations.huggingface  # noqa: F401  (reads NVFP4 folders)
from moe_nvfp4 import demo
from moe_nvfp4.integrations.endpoint import _check_words, _next_tokens
from moe_nvfp4.integrations.huggingface import misread, set_activations
from moe_nvfp4.integrations.huggingface.misread import PRECISIONS, ROUNDINGS, _apart
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.options import Options
from tests.cli.commands import mistake, run
from tests.folders import is_expert, quantized
from tests.misread import PLANTED, W4A4, planted
from tests.models import load, make, qwen3_moe, tensors
from tests.servers import Server


def with_tokenizer(folder, root, which, ignore, change=lambda name, t: t):
    """An NVFP4 folder of W4A16, in which gate and up of an expert have global scales of their own."""
    files = tensors(shutil.copytree(folder, root / "bf16"))
    files = {name: change(name, t) for name, t in files.items()}
    save_file(files, root / "bf16/model.safetensors", metadata={"format": "pt"})
    found, _ = quantized(root, None, "modelopt", which, ignore=ignore)
    for file in folder.glob("token*"):
        shutil.copy(file, found)
    config = json.loads((found / "config.json").read_text())
    config["quantization_config"]["moe_nvfp4"] = {"activations": "bf16"}  # no scales were calibrated
    (found / "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module")
def separate(folder, tmp_path_factory):
    return with_tokenizer(folder, tmp_path_factory.mktemp("separate"), is_expert, ["lm_head", "*self_attn*", "*.gate"])


@pytest.fixture(scope="module")
def with_attention(folder, tmp_path_factory):
    """q, k and v are 4-bit too, and have global scales of their own."""
    which = lambda key: is_expert(key) or key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    smaller = lambda name, t: t / 2 if "k_proj" in name else t
    root = tmp_path_factory.mktemp("attention")
    return with_tokenizer(folder, root, which, ["lm_head", "*o_proj", "*.gate"], smaller)


@pytest.fixture(autouse=True)
def beginning(monkeypatch):
    """Only the beginning of the demo's text: here each character is a token, and few of them are asked."""
    text = demo.demo_text()[:2000]
    monkeypatch.setattr(demo, "demo_text", lambda: text)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, status, found):
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {"data": [{"id": name} for name in self.server.names]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers))
        try:
            if self.path != "/v1/completions":
                raise ValueError(404, "Not Found")
            if body.get("model", "tiny") not in self.server.names:
                raise ValueError(404, f"The model {body['model']} does not exist.")
            self.answer(200, {"choices": [{"text": "", "logprobs": self.server.form(self.server.model, body)}]})
        except ValueError as error:
            status, message = error.args
            self.answer(status, {"error": {"message": message}})


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def vllm(model, body):
    """The prompt's tokens, then a new one."""
    ids, logprobs = body["prompt"], logits_of(model, body["prompt"])
    new = int(logprobs[-1].argmax())
    values = [None, *logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist(), logprobs[-1, new].item()]
    return {"tokens": [word(i) for i in [*ids, new]], "token_logprobs": values}


def llama_cpp(model, body):
    if body.get("echo"):
        raise ValueError(400, "Only no echo is supported")
    values, ids = logits_of(model, body["prompt"])[-1].topk(body["logprobs"])
    tops = [{"id": i, "token": word(i), "logprob": x} for i, x in zip(ids.tolist(), values.tolist(), strict=True)]
    return {"content": [tops[0] | {"top_logprobs": tops}]}


def openai(model, body):
    """As `llama_cpp`, in the form of OpenAI's old endpoint, which names tokens by their text."""
    (content,) = llama_cpp(model, {**body, "echo": False})["content"]
    return {"tokens": [content["token"]], "token_logprobs": [content["logprob"]],
            "top_logprobs": [{top["token"]: top["logprob"] for top in content["top_logprobs"]}]}  # fmt: skip


def not_numbers(model, body):
    found = vllm(model, body)
    return found | {"token_logprobs": [None] * len(found["tokens"])}


def word(i):
    return chr(i + 32) if i < 95 else "<unk>"


@contextmanager
def serving(path, form=vllm, names=("tiny",), dtype=torch.bfloat16):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.model, server.form, server.names, server.requests = path and load(path, dtype), form, names, []
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # seconds until it sees that it should end
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def verdict(capsys, expect, *args):
    capsys.readouterr()
    run("verify", "--json", "--device", "cpu", "--prompts", "6", *args, expect=expect)
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_right_servers(dialect, dtype, folder, tmp_path, capsys):
    convert_checkpoint(folder, tmp_path / "nvfp4", Options(dialect=dialect))
    with serving(tmp_path / "nvfp4", dtype=dtype) as (_, url):
        found = verdict(capsys, 0, "--server", url, tmp_path / "nvfp4")
        assert found["right"] and found["fits"] is None and found["numbers"] == 6 * 63
        assert found["difference"] < 3 * found["bf16_noise"] == found["limit"]
        assert found["without_effect"] == ["gate's global scale is used for up"]  # ours share it
        run("verify", "--device", "cpu", "--server", f"{url}/v1/", tmp_path / "nvfp4")
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "right: the server computes what this folder says"


def test_a_folder_that_is_not_in_bf16(folder, tmp_path, capsys):
    """What is computed here in fp32 has not been rounded to bf16 before."""
    shutil.copytree(folder, tmp_path / "fp16")
    make(qwen3_moe, torch.float16).save_pretrained(tmp_path / "fp16")
    convert_checkpoint(tmp_path / "fp16", tmp_path / "nvfp4", Options())
    with serving(tmp_path / "nvfp4", dtype=torch.float32) as (_, url):
        found = verdict(capsys, 0, "--server", url, tmp_path / "nvfp4")
    assert found["right"] and found["difference"] < 1e-4 < 1e-2 < found["bf16_noise"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", [W4A4, *PLANTED])
def test_misreadings_are_named(name, separate, tmp_path, capsys):
    wrong = planted(separate, name, tmp_path / "wrong")
    dtype = torch.float16 if name == W4A4 else torch.bfloat16  # not the roundings of the model it is compared with
    with serving(wrong, dtype=dtype) as (_, url):
        found = verdict(capsys, 1, "--server", url, separate)
        assert not found["right"] and found["fits"] == name, found
        if name == W4A4:
            assert verdict(capsys, 0, "--server", url, wrong)["right"]  # it serves that folder rightly


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_one_global_scale_for_fused_linears(which, with_attention, capsys):
    """As vLLM 0.32 reads ModelOpt's and compressed-tensors' folders. On average it changes not much more than bf16."""
    with serving(with_attention) as (server, url):
        assert verdict(capsys, 0, "--server", url, with_attention)["right"]
        for layer in server.model.model.layers:
            attention = layer.self_attn
            scales = [attention.get_submodule(f"{name}_proj").weight_global_scale.data for name in "qkv"]
            one = (max if which == "largest" else min)(scales).clone()
            for scale in scales:
                scale.copy_(one)
        found = verdict(capsys, 1, "--server", url, with_attention)
        assert found["fits"] == f"the {which} global scale of fused linears is used for all", found


@pytest.mark.slow
def test_what_bf16_hides_is_said(folder, tmp_path, capsys):
    """Experts of a new model change so little that both orders of gate and up would be right."""
    quiet = lambda name, t: t * 0.1 if ".mlp." in name or "lm_head" in name else t
    nvfp4 = with_tokenizer(folder, tmp_path, is_expert, ["lm_head", "*self_attn*", "*.gate"], quiet)
    with serving(nvfp4) as (_, url):
        found = verdict(capsys, 0, "--server", url, nvfp4)
        assert "gate and up are exchanged" in found["undecided"]
        assert "global scales are ignored" not in found["undecided"]
        run("verify", "--device", "cpu", "--server", url, nvfp4)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("right: ") and "it could as well be that" in last and "gate and up are exchanged" in last
    with serving(nvfp4, dtype=torch.float32) as (_, url):
        assert verdict(capsys, 0, "--server", url, nvfp4)["undecided"] == []


def test_w4a16_where_w4a4_was_asked(separate, capsys):
    with serving(separate) as (_, url):
        run("verify", "--device", "cpu", "--server", url, "--activations", "nvfp4", separate, expect=1)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "WRONG: activations stay bf16 (W4A16), not NVFP4 as asked"


@pytest.mark.parametrize("mine, other", [("nvfp4", "nvfp4_four_over_six"), ("nvfp4_four_over_six", "nvfp4")])
def test_another_rounding_of_activations(mine, other, separate, capsys):
    """It is not called W4A16, which is nearer to both. In bf16, the two are about as far from fp32."""
    for dtype in (torch.float32, torch.bfloat16):
        with serving(separate, dtype=dtype) as (server, url):
            ask = ("--server", url, "--activations", mine, separate)
            set_activations(server.model, other)
            found = verdict(capsys, int(dtype == torch.float32), *ask)
            if dtype == torch.float32:
                assert found["fits"] == ROUNDINGS[other] and found["misreadings"][ROUNDINGS[other]] < 1e-5
            else:
                assert ROUNDINGS[other] in found["undecided"] and PRECISIONS["bf16"] not in found["undecided"]
            set_activations(server.model, mine)
            assert verdict(capsys, 0, *ask)["right"]


def test_what_is_no_verdict_has_another_exit_code(separate, tmp_path, monkeypatch, capsys):
    """Layers with different activations, which run in one way here; and an error that nobody foresaw."""
    mixed = shutil.copytree(separate, tmp_path / "mixed")
    config = json.loads((mixed / "config.json").read_text())
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}, "model.layers.1.mlp.experts": {
        "quant_algo": "W4A16_NVFP4"}}  # fmt: skip
    own = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (mixed / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
    with serving(separate) as (_, url):
        for more in ([], ["--activations", "nvfp4"]):
            said = mistake(["verify", "--server", url, *more, mixed], capsys)
            assert "has layers whose activations are quantized (W4A4) and others (W4A16)" in said
        monkeypatch.setattr(misread, "log_probabilities", lambda *args: {}["unforeseen"])
        run("verify", "--device", "cpu", "--server", url, separate, expect=2)
        assert "KeyError: 'unforeseen'" in capsys.readouterr().err


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", [llama_cpp, openai])
def test_servers_without_echo(form, separate, tmp_path, capsys):
    with serving(separate, form) as (server, url):
        found = verdict(capsys, 0, "--server", url, separate)
        assert found["way"] == "log-probabilities of next tokens" and found["numbers"] == 6 * 8 * 5
        assert server.requests[-1][1]["prompt"] == server.requests[-1][1]["prompt"][:64]
    name = "gate and up are exchanged"
    with serving(planted(separate, name, tmp_path / "wrong"), form) as (_, url):
        assert verdict(capsys, 1, "--server", url, separate)["fits"] == name


@pytest.mark.slow
@pytest.mark.skipif(not is_serve_available(), reason="needs transformers[serving]")
def test_transformers_server(separate, tmp_path, monkeypatch, capsys):
    """It has no log-probabilities, but answers questions with probabilities. A right one is that of the pages, whose
    commands test_printed.py runs."""
    pytest.importorskip("transformers.decision")
    right = shutil.copytree(separate, tmp_path / "right")
    tokenizer = AutoTokenizer.from_pretrained(right)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}: "
    tokenizer.save_pretrained(right)
    name = "gate's global scale is used for up"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with Server(planted(right, name, tmp_path / "wrong")) as server:
        assert server.wait(), server.log.read_text()[-3000:]
        found = verdict(capsys, 1, "--server", server.url, right)
        assert found["way"] == "probabilities of labels" and found["numbers"] == 6 * 26 and found["fits"] == name


def test_another_fault_is_wrong_without_a_name(separate, tmp_path, capsys):
    """Attention that lost a matrix is no misreading of NVFP4."""
    with serving(separate) as (server, url):
        for layer in server.model.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
        found = verdict(capsys, 1, "--server", url, separate)
        assert not found["right"] and found["fits"] is None
        run("verify", "--device", "cpu", "--server", url, separate, expect=1)
        assert "no known misreading explains it" in capsys.readouterr().out


def test_numbers_that_are_none(separate, capsys):
    with serving(separate, not_numbers) as (_, url):
        found = verdict(capsys, 1, "--server", url, separate)
        assert found["numbers"] == 0 and found["missing"] == 6 * 63 and found["difference"] is None
        run("verify", "--device", "cpu", "--server", url, separate, expect=1)
        assert "are no numbers" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("form", [vllm, llama_cpp])
def test_logits_are_no_log_probabilities(form, separate, monkeypatch, capsys):
    """vLLM's --logprobs-mode raw_logits."""
    logprobs_of = logits_of
    monkeypatch.setitem(globals(), "logits_of", lambda model, ids: logprobs_of(model, ids) + 12)
    with serving(separate, form) as (_, url):
        said = mistake(["verify", "--server", url, separate], capsys)
    assert "as a log-probability, which is 0 at most" in said and "--logprobs-mode raw_logprobs" in said


def top(**changes):
    return {"content": [{"top_logprobs": [{"id": 5, "token": "a", "logprob": -1.0} | changes]}]}


@pytest.mark.parametrize("found", [
    {"token_logprobs": 5}, {"token_logprobs": ["a"] * 99}, {"token_logprobs": [[1]] * 99},
    {"token_logprobs": [10**400] * 99}, {"token_logprobs": [-1.0] * 99, "tokens": 3}, {"content": 5},
    {"content": [{}]}, {"content": [{"top_logprobs": []}]}, top(id="a"), top(logprob="x"),
    {"content": [{"top_logprobs": [{"id": 3}]}]}, {"top_logprobs": [{}]}, {"top_logprobs": [None]},
    {"top_logprobs": [["a", 1]]}, top(id=-5), top(id=10**6),
], ids=lambda found: json.dumps(found)[:50])  # fmt: skip
def test_answers_in_another_form(found, separate, capsys):
    with serving(None, lambda model, body: found) as (_, url):
        said = mistake(["verify", "--server", url, separate], capsys)
    assert "gives no log-probabilities" in said or "it serves another model" in said


@pytest.mark.parametrize("status, headers, body, message", [
    (200, {}, b"data: {}", "its answer is not JSON"), (200, {}, b"[" * 100_000, "its answer is not JSON"),
    (301, {"Location": "http://127.0.0.1:1/v1"}, b"", "redirects to http://127.0.0.1:1/v1 (HTTP 301): write the addr"),
])  # fmt: skip
def test_answers_of_other_servers(status, headers, body, message, separate, monkeypatch, capsys):
    def answer(self):
        self.rfile.read(int(self.headers["Content-Length"]))  # closing before this resets the connection
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    monkeypatch.setattr(Handler, "do_POST", answer)
    with serving(None) as (_, url):
        assert message in mistake(["verify", "--server", url, separate], capsys)


def test_keys_and_addresses_that_are_none(separate, monkeypatch, capsys):
    """urllib's errors of these are ValueErrors, as are those of JSON; one of them shows the key."""
    with serving(separate) as (server, url):
        monkeypatch.setenv("OPENAI_API_KEY", "secret\n")  # as from a file
        verdict(capsys, 0, "--server", url, separate)
        assert server.requests[-1][2]["Authorization"] == "Bearer secret"
        monkeypatch.setenv("OPENAI_API_KEY", "se\ncret")
        said = mistake(["verify", "--server", url, separate], capsys)
        assert "OPENAI_API_KEY has a line break" in said and "cret" not in said
    monkeypatch.delenv("OPENAI_API_KEY")
    for address in ("http://[::1", "http://a\tb:1", "http://"):
        said = mistake(["verify", "--server", address, separate], capsys)
        assert "an address is like" in said or "no server answers at" in said


@pytest.mark.parametrize("form", [vllm, openai])
def test_servers_that_call_tokens_by_their_numbers(form, separate, monkeypatch, capsys):
    """vLLM's --return-tokens-as-token-ids."""
    monkeypatch.setitem(globals(), "word", lambda i: f"token_id:{i}")
    with serving(separate, form) as (server, url):
        assert verdict(capsys, 0, "--server", url, separate)["right"]
        monkeypatch.setitem(globals(), "word", lambda i: f"token_id:{i + 1000}")
        said = mistake(["verify", "--server", url, separate], capsys)
        assert "the server's vocabulary has 'token_id:1" in said and "it serves another model" in said


def test_what_cannot_be_asked_is_an_error(separate, folder, monkeypatch, capsys):
    def error(*args):
        return mistake(["verify", *args], capsys)

    with serving(separate) as (server, url):
        assert "no model 'big': name one of them with --model" in error("--server", url, "--model", "big", separate)
        verdict(capsys, 0, "--server", url, "--model", "tiny", separate)
        server.form = lambda model, body: None
        said = error("--server", url, separate)
        assert "gives no log-probabilities" in said and "`echo` with `logprobs`" in said and "404: Not Found" in said
        server.names = ("tiny", "large")
        assert "has 'tiny', 'large': name the one that serves this folder" in error("--server", url, separate)
        shifted = lambda model, body: vllm(model, body) | {"tokens": [word(i + 1) for i in body["prompt"]]}
        server.form = shifted
        assert "it serves another model; serve this folder" in error("--server", url, separate)
        assert "not an NVFP4 checkpoint: name the 4-bit folder" in error("--server", url, folder)
        assert "--against compares folders" in error("--server", url, "--against", folder, separate)
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        error("--server", url, separate)
        assert server.requests[-1][2]["Authorization"] == "Bearer secret"

        def locked(model, body):
            raise ValueError(401, "Unauthorized")

        server.form = locked
        assert "(HTTP 401): set OPENAI_API_KEY" in error("--server", url, separate)
    assert "no server answers at" in error("--server", url, separate)
    assert "begins with http://" in error("--server", "localhost:8000", separate)
    assert "--model and --tokens would have no effect" in error("--model", "tiny", "--tokens", "32", separate)


class Texts(list):
    """A tokenizer whose tokens have these texts."""

    def batch_decode(self, tokens):
        return [self[i] for (i,) in tokens]


def test_a_text_that_two_tokens_have_says_nothing_of_either():
    class Server:
        def post(self, path, **body):
            return {"choices": [{"logprobs": {"top_logprobs": [{"a": -1.0, "b": -2.0}]}}]}

    (found,) = _next_tokens(Server(), Texts(["a", "b", "a"]), [torch.zeros(8, dtype=torch.int64)])
    known = ~found.logprobs.isnan()
    assert found.tokens[known].tolist() == [1] and found.logprobs[known].tolist() == [-2.0]


def test_texts_of_another_vocabulary():
    """Up to a tenth may differ (spaces do not count), and parts of letters are written in several ways."""
    tokenizer = Texts([*"abcdefghij", *["\ufffd"] * 20])
    check = lambda *changed: _check_words([*changed, *tokenizer[len(changed) :]], torch.arange(30), tokenizer)
    check(" a", "x")
    _check_words([*"abcdefghij", *["\\xe4"] * 20], torch.arange(30), tokenizer)
    with pytest.raises(ValueError, match="vocabulary has 'y' where this folder's has 'a'"):
        check("y", "x")


def test_a_misreading_is_computed_until_it_is_ruled_out():
    given = torch.tensor([0, 0, torch.nan, 0, 0, 0], dtype=torch.float64)
    known = ~given.isnan()
    batches = [torch.tensor(part, dtype=torch.float64) for part in ([1, -1, 9], [2], [torch.nan, 4])]
    left = iter(batches)
    assert _apart(given, left, known, 0.3) == 1 and len(list(left)) == 2  # two of five numbers: 0.4 at least
    left = iter(batches)
    assert _apart(given, left, known, 0.7) == 4 / 3 and len(list(left)) == 1
    assert _apart(given, batches, known, 0.9) == _apart(given, batches, known) == torch.inf
    assert _apart(given, batches[:2], known, 0.9) == 4 / 3 and _apart(given, batches, ~known & False) == torch.inf
