"""Conversions that are killed, run out of disk or lose their source; two at once; destinations that exist."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from moe_nvfp4.quantize import convert, jobs
from moe_nvfp4.quantize.codes import CodesFolder
from moe_nvfp4.quantize.convert import _key, convert_checkpoint
from moe_nvfp4.quantize.files import ShardWriter, new_file, open_checkpoint, read_header
from moe_nvfp4.quantize.options import Options
from tests.checkpoints import ENVIRONMENT, converted, experts, folder, same_files
from tests.models import folder as saved
from tests.models import qwen3_moe, tensors
from tests.quantize.test_importance import importance_for


def command(source, destination, *options):
    return [sys.executable, "-m", "moe_nvfp4", "quantize", str(source), str(destination), *options]


SLOWED = """
import sys, time
from moe_nvfp4.quantize import convert, jobs
whole = jobs.quantize_matrix
def slow(*args):
    time.sleep(0.005)
    return whole(*args)
jobs.quantize_matrix = slow
convert.convert_checkpoint(sys.argv[1], sys.argv[2], convert.Options(device="cpu"), progress=False)
"""


@pytest.fixture(scope="module")
def single(split):
    """The same tensors in one file, and its conversion in one go."""
    path = split[0].parent
    source = folder(path / "single", tensors(split[0]))
    return source, converted(source, path / "single-b")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
@pytest.mark.parametrize("files", ["split", "single"])
def test_killed_at_random_points_it_goes_on(files, request, tmp_path):
    """Killed anywhere, also within a file, it repeats no job of the journal. On a CPU, since a GPU has few jobs."""
    source, whole = request.getfixturevalue(files)
    rng, journal = random.Random(7), tmp_path / ".x.partial/journal.jsonl"
    digests = lambda: len(re.findall(rb'"[0-9a-f]{64}"', journal.read_bytes())) if journal.exists() else 0
    before = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SLOWED, source, tmp_path / "x"], env=ENVIRONMENT)
        wanted = before + rng.randint(30, 120)  # of 582
        while process.poll() is None and digests() < wanted:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
        assert not (tmp_path / "x").exists() and digests() >= wanted
        before = digests()
    report = convert_checkpoint(source, tmp_path / "x", Options(device="cpu"), progress=False)
    assert 90 / 582 * report.bytes_before < report.resumed < report.bytes_before
    same_files(whole, tmp_path / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def interrupted(monkeypatch, source, destination, after, error, **options):
    """Convert until `after` pieces are written, then fail. Returns the error that was raised."""
    write, count = ShardWriter.write, iter(range(10**9))

    def fails(self, *args):
        if next(count) >= after:
            raise error
        write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", fails)
        with pytest.raises(type(error)) as raised:
            converted(source, destination, **options)
    return raised.value


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 40, 200, 420])
def test_a_full_disk_loses_nothing(after, split, tmp_path, monkeypatch):
    source, whole = split
    interrupted(monkeypatch, source, tmp_path / "x", after, OSError(errno.ENOSPC, "No space left on device"))
    assert not (tmp_path / "x").exists()
    if after == 0:
        assert list(tmp_path.iterdir()) == [], "nothing was finished, so nothing stays"
    report = convert_checkpoint(source, tmp_path / "x", progress=False)
    assert (report.resumed > 0) == (after > 0)
    same_files(whole, tmp_path / "x")


@pytest.mark.slow
def test_too_little_space_is_said_before_anything_is_written(split, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(ValueError, match="1.0 KB free, about .* [KM]B are needed"):
        converted(split[0], tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_other_settings_or_another_source_start_again(split, tmp_path, monkeypatch, capsys):
    source, whole = split
    copy = shutil.copytree(source, tmp_path / "a")
    stop = OSError(errno.ENOSPC, "No space left on device")
    interrupted(monkeypatch, copy, tmp_path / "x", 300, stop, recipe="max")
    report = convert_checkpoint(copy, tmp_path / "x")
    assert "starting again: the settings changed" in capsys.readouterr().err and report.resumed == 0
    same_files(whole, tmp_path / "x")
    interrupted(monkeypatch, copy, tmp_path / "y", 300, stop)
    os.utime(next(copy.glob("model-00003*")), (1, 1))
    report = convert_checkpoint(copy, tmp_path / "y")
    assert "starting again: the source changed" in capsys.readouterr().err and report.resumed == 0


def test_every_option_starts_again(tmp_path):
    """A run does not resume one with other options, except for the device, which changes no byte."""
    source, importance = open_checkpoint(folder(tmp_path / "a", experts())), importance_for(["experts"])
    changes = dict(
        recipe="max", exclude="a", include="b", dialect="compressed-tensors", activations="nvfp4", share_scales=True,
        linears="attention", dtype="F32", importance=importance, codes=CodesFolder(tmp_path),
    )  # fmt: skip
    assert changes.keys() == {field.name for field in fields(Options)} - {"device"}
    recipes = {"importance": "weighted", "codes": "gptq"}
    key = lambda **options: json.dumps(_key(source, Options(**options), [])["the settings"])
    keys = [key(**{"recipe": recipes[name]} if name in recipes else {}, **{name: v}) for name, v in changes.items()]
    assert len({key(), *keys}) == 1 + len(changes)
    assert key(recipe="weighted", importance=importance_for(["experts"], seed=1)) not in keys
    assert key(device="cpu") == key()


@pytest.mark.slow
def test_what_was_damaged_meanwhile_is_made_again(single, tmp_path, monkeypatch):
    """And nothing else: every tensor of an earlier run is checked. A journal may end in the middle of a line.

    On a CPU, where jobs are single matrices; on a GPU they are batches.
    """
    source, whole = single
    stop = OSError(errno.ENOSPC, "No space left on device")
    interrupted(monkeypatch, source, tmp_path / "z", 400, stop, device="cpu")
    journal, path = tmp_path / ".z.partial/journal.jsonl", tmp_path / ".z.partial/files/model.safetensors"
    lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    stored = open_checkpoint(source).tensors
    codes = next(name for line in lines[:-1] for name in line if name.endswith("down_proj.weight"))
    (header, _), data = read_header(path), bytearray(path.read_bytes())
    data[len(data) - max(i["data_offsets"][1] for i in header.values()) + header[codes]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    journal.write_text(journal.read_text()[:-20])
    report = convert_checkpoint(source, tmp_path / "z", Options(device="cpu"), progress=False)
    kept = sum(stored[name].size for line in lines[:-1] for name in line if name in stored)
    assert report.resumed == kept - stored[codes].size > 0
    same_files(whole, tmp_path / "z")
    interrupted(monkeypatch, source, tmp_path / "y", 400, stop, device="cpu")
    (tmp_path / ".y.partial/journal.jsonl").write_text("{")
    assert convert_checkpoint(source, tmp_path / "y", Options(device="cpu"), progress=False).resumed == 0
    same_files(whole, tmp_path / "y")


@pytest.mark.slow
def test_two_converters_on_one_destination(split, tmp_path, monkeypatch):
    source, whole = split
    started, go_on = threading.Event(), threading.Event()
    quantize = jobs.quantize_matrix

    def waits(*args):
        started.set()
        assert go_on.wait(60)
        return quantize(*args)

    monkeypatch.setattr(jobs, "quantize_matrix", waits)
    first = threading.Thread(target=converted, args=(source, tmp_path / "x"))
    first.start()
    assert started.wait(60)
    second = subprocess.run(command(source, tmp_path / "x"), env=ENVIRONMENT, capture_output=True, text=True)
    go_on.set()
    first.join()
    assert second.returncode == 2
    assert "being written by another converter" in second.stderr and f"process {os.getpid()}" in second.stderr
    same_files(whole, tmp_path / "x")


def test_a_disk_without_room_for_the_lock_is_not_a_converter_at_work(tmp_path, monkeypatch):
    source = folder(tmp_path / "a", experts(E=2))
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left on device: '.*x.partial/lock'"):
        full.setattr(os, "write", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        converted(source, tmp_path / "x")
    same_files(converted(source, tmp_path / "x"), converted(source, tmp_path / "y"))


def test_a_disk_that_is_full_when_weights_are_written_is_named(tmp_path, monkeypatch):
    source, wrote = folder(tmp_path / "a", experts(E=2)), Path.write_text
    whole = converted(source, tmp_path / "y")

    def write_text(path, *args):
        if path.name == "config.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return wrote(path, *args)

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left on device: '.*config.json'"):
        full.setattr(Path, "write_text", write_text)
        converted(source, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    same_files(converted(source, tmp_path / "x"), whole)


def test_a_new_file_of_two_processes(tmp_path):
    """One at a time, and none over one that has come to be meanwhile."""
    out, part = tmp_path / "new/out.gguf", tmp_path / "new/.out.gguf.partial"
    with new_file(out) as first:
        first.write_bytes(b"first")
        with pytest.raises(ValueError, match="out.gguf is being written by another"), new_file(out):
            pass
        assert part.read_bytes() == b"first"
    assert out.read_bytes() == b"first" and [*out.parent.iterdir()] == [out]
    with pytest.raises(ValueError, match="out.gguf was made by someone else meanwhile"), new_file(out) as second:
        second.write_bytes(b"second")
    assert out.read_bytes() == b"first" and [*out.parent.iterdir()] == [out]


def test_a_destination_that_another_converter_has_finished(tmp_path, monkeypatch):
    """It may appear after this one has looked for it, and then nothing is converted in vain, or left."""
    source = folder(tmp_path / "a", experts(E=2))
    monkeypatch.setattr(convert, "check_space", lambda *args: (tmp_path / "x").mkdir())
    monkeypatch.setattr(convert, "_run", lambda *args: pytest.fail("work in vain"))
    with pytest.raises(ValueError, match="x was made by someone else meanwhile: name another folder"):
        converted(source, tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "x"]


@pytest.mark.slow
def test_files_that_cannot_be_written_are_named(tmp_path):
    """As on a full disk; the limit is one of the operating system."""
    source = folder(tmp_path / "a", experts(E=8, layers=4))
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
    code += "from moe_nvfp4 import cli; sys.exit(cli.main(sys.argv[1:]))"
    run = [sys.executable, "-c", code, *command(source, tmp_path / "x")[3:]]
    result = subprocess.run(run, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 2
    assert f"File too large: '{tmp_path}/.x.partial/files/model.safetensors'" in result.stderr


def replaced(path):
    """Other weights of the same size, with the old time."""
    before, files = path.stat(), {n: t + 1 for n, t in tensors_of(path).items()}
    save_file(files, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def tensors_of(path):
    with safe_open(path, "pt") as f:
        return {name: f.get_tensor(name).clone() for name in f.keys()}


@pytest.mark.slow
def test_a_source_that_changed_between_two_runs(split, tmp_path, monkeypatch):
    """Even if size and time are the same, the work of the two runs is not mixed."""
    source = shutil.copytree(split[0], tmp_path / "a")
    interrupted(monkeypatch, source, tmp_path / "x", 100, OSError(errno.ENOSPC, "No space left"), device="cpu")
    replaced(source / "model-00001-of-00008.safetensors")
    assert convert_checkpoint(source, tmp_path / "x", Options(device="cpu"), progress=False).resumed == 0
    same_files(converted(source, tmp_path / "y"), tmp_path / "x")


def test_a_change_at_either_end_of_a_tensor_is_seen(single, tmp_path):
    """Size and time of the file are the same."""
    source = shutil.copytree(single[0], tmp_path / "a")
    (file,) = source.glob("*.safetensors")
    before, whole, stat = open_checkpoint(source).state(), file.read_bytes(), file.stat()
    largest = max(open_checkpoint(source).tensors.values(), key=lambda t: t.size)
    for at in (largest.start, largest.start + largest.size - 1):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert open_checkpoint(source).state() != before
    file.write_bytes(whole)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_checkpoint(source).state() == before


@pytest.mark.slow
def test_a_source_that_changes_or_vanishes(split, tmp_path, monkeypatch):
    quantize = jobs.quantize_matrix
    actions = {
        "vanishes": lambda p: p.unlink(),
        "shrinks": lambda p: p.write_bytes(p.read_bytes()[:5000]),
        "is touched": lambda p: os.utime(p, (1, 1)),
        "is replaced": replaced,
    }
    for name, action in actions.items():
        copy = shutil.copytree(split[0], tmp_path / name)
        last, once = copy / "model-00008-of-00008.safetensors", threading.Event()

        def acts(*args, once=once, action=action, last=last):
            if not once.is_set():
                once.set()
                action(last)
            return quantize(*args)

        monkeypatch.setattr(jobs, "quantize_matrix", acts)
        with pytest.raises((OSError, ValueError), match="model-00008|changed while it was read"):
            converted(copy, tmp_path / "x", workers=1)
        assert not (tmp_path / "x").exists()


def test_destinations_that_cannot_be_written(split, tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file/x", "file/y/x"):
        with pytest.raises(ValueError, match="file is a file, where the folder .* goes: move it away, or name another"):
            converted(split[0], tmp_path / path)
    (tmp_path / ".z.partial").write_text("mine")
    with pytest.raises(ValueError, match=r"\.z\.partial is a file, where the folder of the work in progress"):
        converted(split[0], tmp_path / "z")
    assert (tmp_path / ".z.partial").read_text() == "mine"
    with pytest.raises(ValueError, match="exists: name a folder that does not"):
        converted(split[0], tmp_path / "file")
    if os.name == "posix" and os.geteuid() != 0:
        (tmp_path / "read-only").mkdir(mode=0o555)
        with pytest.raises(PermissionError):
            converted(split[0], tmp_path / "read-only" / "x")


def test_the_source_is_only_read(tmp_path):
    """Files other than weights are copied, and the copies are writable; the report names what is left out."""
    source = saved(tmp_path, qwen3_moe, max_shard_size="40KB")
    copied = ["tokenizer.model", "README.md", "additional_chat_templates/tools.jinja"]
    for name in (*copied, "model.onnx", "vae/config.json", ".git/HEAD"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
        (source / name).chmod(0o444)
    (source / "tokenizer.json").symlink_to("../blobs/0")  # as in the Hub's cache after a failed download
    state = lambda: {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.rglob("*") if p.is_file()}
    before = state()
    report = convert_checkpoint(source, tmp_path / "b", Options(device="cpu"), progress=False)
    assert before == state()
    for name in copied:
        assert (tmp_path / "b" / name).read_text() == name
        assert (tmp_path / "b" / name).stat().st_mode & 0o200, "the model card is written over README.md"
    assert report.skipped.keys() == {"model.onnx", "vae/", "tokenizer.json"}
    assert not {"model.onnx", "vae", ".git"} & {p.name for p in (tmp_path / "b").iterdir()}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", source.name]


def test_nan_is_named(tmp_path):
    files = experts()
    files["model.layers.0.mlp.experts.2.up_proj.weight"][3, 5] = float("nan")
    with pytest.raises(ValueError, match="experts.2.up_proj: 1 of 3072 weights are NaN or Inf"):
        converted(folder(tmp_path / "a", files), tmp_path / "b")
