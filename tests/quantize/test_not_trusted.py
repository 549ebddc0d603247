"""Files of strangers: no code of theirs runs, nothing blocks or takes long, and links lead nowhere."""

import io
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4 import cli
from moe_nvfp4.cli.output import printable
from moe_nvfp4.quantize.files import StagingDir, check_config, open_checkpoint, read_header
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import ENVIRONMENT, config_of, converted, edit_config, experts, folder, same_files
from tests.folders import awq, change_config, quantized
from tests.models import dbrx, deepseek, gemma4, load, make, qwen3_moe, tensors
from tests.quantize.test_damaged import entry, raw

NAN, INF = float("nan"), float("inf")


def small():
    return qwen3_moe(experts=2, num_hidden_layers=1)


@pytest.mark.parametrize("command", ["verify", "info", "quantize"])
def test_code_of_a_checkpoint_is_not_run(command, tmp_path, monkeypatch, capsys):
    """Neither by config.json's auto_map nor by the tokenizer's, whatever is typed."""
    source = folder(tmp_path / "a", experts(E=2))
    path = converted(source, tmp_path / "b")
    for place in (source, path):
        (place / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config:\n    pass\n")
        edit_config(place, model_type="not_known", auto_map={"AutoConfig": "evil.Config"})
    arguments = {"verify": [path], "info": [path], "quantize": [source, tmp_path / "c", "--verify"]}[command]
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\n"))
    code = cli.main([command, *map(str, arguments)])
    said = capsys.readouterr()
    assert not (tmp_path / "ran").exists(), said.out
    if command != "info":
        assert "not compared with the model's own list" in said.out
    else:
        assert code == 2 and "the code of its repository is never run. quantize and verify take its files" in said.err
    if command == "quantize":
        card = (tmp_path / "c" / "README.md").read_text()
        assert "moe-nvfp4 serve c " in card and "chat" not in card and "from_pretrained" not in card


def test_long_headers(tmp_path):
    """A name that repeats is found in a second among 40,000."""
    text = ",".join(f'"t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in [*range(40000), 39999])
    raw(tmp_path / "x.safetensors", f"{{{text}}}".encode(), data=b"")
    start = time.perf_counter()
    with pytest.raises(ValueError, match="names t39999 twice"):
        read_header(tmp_path / "x.safetensors")
    assert time.perf_counter() - start < 5


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("family, key, message", [
    (small, "num_hidden_layers", "names 10000000 layers, and the tensors of the files are numbered to 1"),
    (gemma4, "num_hidden_layers", "names 10000000 layers, and the tensors of the files are numbered to 3"),
    (small, "num_local_experts", "names 10000000 experts, and the tensors of the files are for 96 at most"),
    (deepseek, "n_routed_experts", "names 10000000 experts, and the tensors of the files are for 128 at most"),
    (small, "hidden_size", "names 10000000 columns .hidden_size., and the tensors of the files have 96 at most"),
], ids=lambda value: getattr(value, "__name__", str(value)[:20]))  # fmt: skip
@pytest.mark.parametrize("command", ["verify", "info", "quantize"])
def test_sizes_that_files_cannot_have(command, family, key, message, tmp_path, capsys):
    """config.json is compared with the tensors' names before anything is built of it, a list of layers either."""
    make(family).save_pretrained(tmp_path / "a")
    path = converted(tmp_path / "a", tmp_path / "b")
    change_config(path, **{key: 10_000_000})
    arguments = [tmp_path / "c", "--dialect", "compressed-tensors"] if command == "quantize" else []
    start = time.perf_counter()
    assert cli.main([command, *map(str, (path, *arguments))]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert time.perf_counter() - start < 10


def test_a_config_of_very_many_layers_alone(tmp_path, capsys):
    """info needs no weights."""
    make(small).save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()
    assert cli.main(["info", str(tmp_path / "a")]) == 0
    change_config(tmp_path / "a", num_hidden_layers=10_000_000)
    assert cli.main(["info", str(tmp_path / "a")]) == 2
    assert "names 10000000 layers, and no model has more than 1000" in capsys.readouterr().err


def test_info_refuses_dense_files_of_another_model(tmp_path, capsys):
    make(small).save_pretrained(tmp_path / "a")
    change_config(tmp_path / "a", moe_intermediate_size=96)
    assert cli.main(["info", str(tmp_path / "a")]) == 2
    assert "by config.json Qwen3MoeForCausalLM has [64, 96] there" in capsys.readouterr().err


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("family, changes, there", [
    (qwen3_moe, {"moe_intermediate_size": 32}, "[64, 32]"),
    (qwen3_moe, {"hidden_size": 32}, "[96, 32]"),
    (deepseek, {"moe_intermediate_size": 96}, "[64, 96]"),
    (dbrx, {"ffn_config": {"ffn_hidden_size": 96}}, "[64, 96]"),
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
@pytest.mark.parametrize("command", ["verify", "info"])
def test_4_bit_files_of_other_sizes_than_their_config(command, family, changes, there, tmp_path, capsys):
    make(family).save_pretrained(tmp_path / "a")
    config = config_of(converted(tmp_path / "a", tmp_path / "b"))
    new = {key: {**config[key], **value} if isinstance(value, dict) else value for key, value in changes.items()}
    change_config(tmp_path / "b", **new)
    assert cli.main([command, str(tmp_path / "b")]) == 2
    assert re.search(rf"by config.json \w+ has {re.escape(there)} there", capsys.readouterr().err)


def test_files_that_are_none(tmp_path):
    source = folder(tmp_path / "a", experts(E=2))
    (source / "model.safetensors").unlink()
    os.mkfifo(source / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors is not a regular file"):
        open_checkpoint(source)


def test_links_out_of_the_source(tmp_path):
    """Links inside the folder, and those of the Hub's cache, are read; another's content is not copied."""
    cache = tmp_path / "models--a--b"
    source = folder(cache / "snapshots" / "0123", experts(E=2))
    (cache / "blobs").mkdir()
    for name in ("model.safetensors", "config.json"):
        (source / name).rename(cache / "blobs" / name)
        (source / name).symlink_to(f"../../blobs/{name}")
    (cache / "blobs" / "abc").write_text("{}")
    (source / "tokenizer.json").symlink_to("../../blobs/abc")
    (source / "same.json").symlink_to("tokenizer.json")
    path = converted(source, tmp_path / "b")
    assert (path / "same.json").read_text() == "{}" and not (path / "same.json").is_symlink()
    (tmp_path / "secret").write_text("secret")
    (source / "NOTICE").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=f"NOTICE is a link to {tmp_path}/secret, outside of the checkpoint"):
        converted(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("link", ["", "files", "files/model.safetensors"])
def test_links_in_the_work_in_progress(link, tmp_path):
    source = folder(tmp_path / "a", experts(E=2))
    away = tmp_path / "away"
    (away / "files").mkdir(parents=True)
    (away / "model.safetensors").write_text("keep")
    place = tmp_path / ".b.partial" / link
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(away / "model.safetensors" if link.endswith("safetensors") else away)
    with pytest.raises(ValueError, match=f"{place} is a link"):
        converted(source, tmp_path / "b")
    assert (away / "model.safetensors").read_text() == "keep" and not (tmp_path / "b").exists()


def test_files_of_an_earlier_run_are_not_published(tmp_path, monkeypatch):
    """Neither those that left the source while a run was interrupted, nor any other."""
    source = folder(tmp_path / "a", experts(E=2), shards=2)
    whole = converted(source, tmp_path / "whole")
    (source / "old.json").write_text("{}")

    def interrupt(self, names):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StagingDir, "publish", interrupt)
        converted(source, tmp_path / "b")
    begun = tmp_path / ".b.partial" / "files"
    assert (begun / "old.json").exists()
    (source / "old.json").unlink()
    (begun / "stray.safetensors").write_text("")
    (begun / "some" / "where").mkdir(parents=True)
    (begun / "some" / "where" / "else.txt").write_text("")
    same_files(converted(source, tmp_path / "b"), whole)


@pytest.mark.slow
def test_many_shards_and_few_open_files(tmp_path):
    source = folder(tmp_path / "a", experts(E=24), shards=69)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "from moe_nvfp4 import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "quantize", str(source), str(tmp_path / "b"), "--recipe", "max", "--verify"]
    done = subprocess.run(command, text=True, capture_output=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]


def test_escape_sequences(tmp_path, capsys):
    path = tmp_path / "a"
    folder(path, experts(E=2))
    raw(path / "model.safetensors", {"a\x1b[2Jb": entry(0, 64)})
    assert cli.main(["quantize", str(path), str(tmp_path / "b")]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said and r"a\x1b[2Jb" in said and "no control characters" in said
    assert printable("a\x1b]0;x\x07\n\u202eb é 🙂") == "a\\x1b]0;x\\x07\n\\u202eb é 🙂"
    edit_config(path, architectures=["A\x1b[31m"])
    save_file({"a.weight": torch.ones(4, 4)}, path / "model.safetensors")
    assert cli.main(["quantize", str(path), str(tmp_path / "b")]) == 2
    assert "\x1b" not in capsys.readouterr().err


# ---------------------------------------------------------------- errors that name the file
@pytest.mark.parametrize("text", ["[1]", '"x"', "3", "[" * 100_000, "{"])
def test_hf_quant_config_of_another_form(text, tmp_path, capsys):
    source, _ = quantized(tmp_path, small, "modelopt")
    (source / "hf_quant_config.json").write_text(text)
    for command in (["verify", source], ["quantize", source, tmp_path / "x", "--dialect", "compressed-tensors"]):
        assert cli.main([*map(str, command)]) == 2
        assert "hf_quant_config.json is not" in capsys.readouterr().err


def config_text(text):
    return lambda path: (path / "config.json").write_text(text)


E0 = "model.layers.0.mlp.experts.0"
FORMS = {
    "half a surrogate pair": (lambda p: edit_config(p, note="\ud800"), "config.json has half of a surrogate pair"),
    "a byte order mark": (
        lambda p: (p / "config.json").write_bytes(b"\xef\xbb\xbf" + (p / "config.json").read_bytes()),
        "config.json begins with a byte order mark"),
    "MXFP4 of no model": (
        config_text('{"architectures": ["A"], "quantization_config": {"quant_method": "mxfp4"}}'),
        "config.json says MXFP4, and the files hold no MXFP4 weights"),
    "experts of nothing": (
        lambda p: save_file({n: t[:0] if ".experts." in n else t for n, t in tensors(p).items()},
                            p / "model.safetensors"), "a matrix without elements"),
    "experts of no columns": (
        lambda p: save_file({n: t[:, :0].contiguous() if ".experts." in n else t for n, t in tensors(p).items()},
                            p / "model.safetensors"), "a matrix without elements"),
    **{f"experts in {dtype}": (
        lambda p, dtype=dtype: save_file({n: t.to(dtype) if ".experts." in n else t for n, t in tensors(p).items()},
                                         p / "model.safetensors"), f"{E0}.* is {name}, and experts are read as BF16")
       for dtype, name in ((torch.int64, "I64"), (torch.bool, "BOOL"), (torch.float8_e5m2, "F8_E5M2"))},
    "experts in F4": (
        lambda p: save_file({n: t.view(torch.uint8).view(torch.float4_e2m1fn_x2) if ".experts." in n else t
                             for n, t in tensors(p).items()}, p / "model.safetensors"), f"{E0}.* is F4, and experts"),
    "one matrix in I64": (
        lambda p: save_file({n: t.long() if n.startswith(f"{E0}.up") else t for n, t in tensors(p).items()},
                            p / "model.safetensors"), f"{E0}.up_proj.weight is I64 and 1 of 2 experts"),
}  # fmt: skip


@pytest.mark.slow_after(7)
@pytest.mark.parametrize("key", [
    "text_config", "vision_config", "quantization_config", "rope_parameters", "rope_scaling",
    "text_config.audio_config", "text_config.rope_parameters",
])  # fmt: skip
@pytest.mark.parametrize("value", ["x", 3, [1]], ids=str)
def test_parts_of_a_config_that_are_no_objects(key, value, tmp_path, capsys):
    """The key is named by every command, for dense and for 4-bit files."""
    source = folder(tmp_path / "a", experts(E=2))
    path = converted(source, tmp_path / "b")
    *above, last = key.split(".")
    for place in (source, path):
        edit_config(place, **({above[0]: {last: value}} if above else {last: value}))
    for command in (["info", source], ["info", path], ["verify", path], ["verify", path, "--against", source],
                    ["quantize", source, tmp_path / "c"]):  # fmt: skip
        assert cli.main([*map(str, command)]) == 2
        assert f"config.json: {key} is {value!r}, no object" in capsys.readouterr().err


@pytest.mark.slow_after(9)
@pytest.mark.parametrize("family, changes, message", [
    (small, {"num_experts_per_tok": 3}, "num_experts_per_tok is 3, and a token has 1 to 2 experts"),
    (small, {"num_experts_per_tok": 0}, "num_experts_per_tok is 0, and a token has 1 to 2 experts"),
    (dbrx, {"ffn_config": {"moe_top_k": -1}}, "moe_top_k is -1, and a token has 1 to 4 experts"),
    (small, {"rope_parameters": {"rope_theta": -1e4}}, "rope_parameters.rope_theta is -10000.0, no positive number"),
    (small, {"rope_parameters": {"rope_theta": "10000"}}, "rope_parameters.rope_theta is '10000', no positive number"),
    (small, {"rope_parameters": {"rope_theta": NAN}}, "rope_parameters.rope_theta is NaN"),
    (small, {"rope_parameters": {"factor": True}}, "rope_parameters.factor is True, no positive number"),
    (small, {"rope_scaling": {"long_factor": [1.0, INF]}}, "rope_scaling.long_factor is .1.0, inf., no positive"),
    (gemma4, {"rope_parameters": {"full_attention": {"rope_theta": 0}}}, "full_attention.rope_theta is 0, no positive"),
    (small, {"rope_theta": -1}, "rope_theta is -1, no positive number"),
    (small, {"rms_norm_eps": NAN}, "rms_norm_eps is NaN"),
], ids=lambda value: getattr(value, "__name__", str(value)[:40]))  # fmt: skip
@pytest.mark.parametrize("command", ["verify", "info", "quantize"])
def test_settings_that_no_model_can_have(command, family, changes, message, tmp_path, capsys):
    make(family).save_pretrained(tmp_path / "a")
    path = tmp_path / "a" if command == "quantize" else converted(tmp_path / "a", tmp_path / "b")
    config = config_of(path)
    for key, value in changes.items():
        change_config(path, **{key: {**(config.get(key) or {}), **value} if isinstance(value, dict) else value})
    assert cli.main([command, str(path), *([str(tmp_path / "c")] if command == "quantize" else [])]) == 2
    assert re.search(f"config.json: .*{message}", capsys.readouterr().err)


@pytest.mark.slow_after(7)
@pytest.mark.parametrize("own, message", [
    (3, "moe_nvfp4 in quantization_config is 3, no object"),
    ({"exclude": 3}, "config.json has exclude 3 under moe_nvfp4, which makes no sense"),
    ({"linears": "all"}, "config.json has linears 'all' under moe_nvfp4, which makes no sense"),
    ({"activations": "int3"}, "config.json has activations 'int3' under moe_nvfp4, which makes no sense"),
    ({"input_scale": "no"}, "config.json has input_scale 'no' under moe_nvfp4, which makes no sense"),
    ({"recipe": "best"}, "unknown recipe 'best': choose one of max, "),
    ({"recipe": "max", "later": 1}, "config.json has later under moe_nvfp4, which version .* does not know: upgrade"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("command", ["verify", "info", "quantize"])
def test_our_own_part_of_a_config(command, own, message, tmp_path, capsys):
    make(small).save_pretrained(tmp_path / "a")
    path = converted(tmp_path / "a", tmp_path / "b")
    change_config(path, quantization_config=config_of(path)["quantization_config"] | {"moe_nvfp4": own})
    to = [str(tmp_path / "c"), "--dialect", "compressed-tensors"] if command == "quantize" else []
    assert cli.main([command, str(path), *to]) == 2
    assert re.search(message, capsys.readouterr().err)
    with pytest.raises(ValueError, match=message if isinstance(own, dict) else "makes no sense"):
        load(path)


@pytest.mark.parametrize("case", FORMS)
def test_forms_of_another_kind(case, tmp_path, capsys):
    change, message = FORMS[case]
    source = folder(tmp_path / "a", experts(E=2))
    change(source)
    with pytest.raises(ValueError, match=message):
        converted(source, tmp_path / "b")
    assert cli.main(["quantize", str(source), str(tmp_path / "b")]) == 2


def test_an_empty_pattern(tmp_path, capsys):
    source = folder(tmp_path / "a", experts(E=2))
    assert cli.main(["quantize", str(source), str(tmp_path / "b"), "--exclude", ""]) == 2
    assert "exclude has an empty pattern" in capsys.readouterr().err


def test_config_of_the_other_dialect(tmp_path):
    source, _ = quantized(tmp_path, small, "modelopt")
    (tmp_path / "other").mkdir()
    other, _ = quantized(tmp_path / "other", small, "compressed-tensors")
    (source / "config.json").write_text(json.dumps(config_of(other)))
    with pytest.raises(ValueError, match="named as modelopt names them, and the config is compressed-tensors's"):
        verify_checkpoint(source)


def test_the_body_of_a_model(tmp_path):
    make(small).model.save_pretrained(tmp_path / "a")
    verify_checkpoint(converted(tmp_path / "a", tmp_path / "b"), tmp_path / "a")
    change_config(tmp_path / "b", architectures=["Qwen3MoeForCausalLM"])
    with pytest.raises(ValueError, match="lm_head.weight. They are of the model's body, as AutoModel saves it"):
        verify_checkpoint(tmp_path / "b")


def test_files_beside_the_weights_are_not_read(tmp_path):
    """macOS's ._ files, a half download of Mistral's consolidated.safetensors, another model's tensors, a folder."""
    path, large = tmp_path / "a", {"layers.900.x": torch.zeros(2)}
    make(small).save_pretrained(path)
    (path / "._model.safetensors").write_bytes(bytes(100))
    (path / "consolidated.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:900])
    save_file(large, path / "other.safetensors")
    (path / "x.safetensors").mkdir()
    check_config(path)
    change_config(path, num_hidden_layers=1500)
    with pytest.raises(ValueError, match="names 1500 layers, and the tensors of the files are numbered to 1"):
        check_config(path)
    (path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        check_config(path)


@pytest.mark.parametrize("metadata", ["tags: 3", "tags: [[a, b], {c: d}, moe]", "tags: {a: b}", "- a\n- b"])
def test_cards_of_another_form(metadata, tmp_path):
    source = folder(tmp_path / "a", experts(E=2))
    (source / "README.md").write_text(f"---\n{metadata}\n---\n# Title\n")
    assert cli.main(["quantize", str(source), str(tmp_path / "b"), "--recipe", "max"]) == 0
    assert "# Title" in (tmp_path / "b" / "README.md").read_text()


@pytest.mark.parametrize("algo", ["NVFP4", "INT8", "NVFP4_AFFINE", "FP8"])
def test_kv_cache_schemes(algo, tmp_path):
    """compressed-tensors takes a scheme in numbers, or none, and vLLM only one that is symmetric and has a strategy;
    ModelOpt's own name is kept in its dialect."""
    source, _ = quantized(tmp_path, small, "modelopt", kv_cache_quant_algo=algo)
    q = config_of(converted(source, tmp_path / "b", dialect="compressed-tensors"))["quantization_config"]
    numbers = {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    assert q["kv_cache_scheme"] == (numbers if algo == "FP8" else None)
    if algo == "FP8":  # what a file says stays so
        theirs = {**numbers, "strategy": "attn_head"}
        edit_config(source, quantization_config={**config_of(source)["quantization_config"], "kv_cache_scheme": theirs})
        q = config_of(converted(source, tmp_path / "c", dialect="compressed-tensors"))["quantization_config"]
        assert q["kv_cache_scheme"] == theirs


def test_awq_scales_that_differ(tmp_path):
    source, _ = awq(tmp_path, small)
    verify_checkpoint(source)
    files = tensors(source)
    files[f"{E0}.up_proj.pre_quant_scale"][3] *= 2
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="gate_proj.pre_quant_scale differs from that of up_proj"):
        verify_checkpoint(source)


def test_zeros_are_said(tmp_path):
    """An expert of zeros is a warning, a block scale of -0 an error that says what it saw."""
    files = experts(E=2)
    for part in ("gate_proj", "up_proj", "down_proj"):
        files[f"{E0}.{part}.weight"].zero_()
    path = converted(folder(tmp_path / "a", files), tmp_path / "b")
    assert any("all elements of 3 matrices are 0" in line for line in verify_checkpoint(path, tmp_path / "a").warnings)
    made = tensors(path)
    made[f"{E0}.up_proj.weight_scale"].view(torch.uint8)[0, 0] = 0x80
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="up_proj.weight_scale holds a block scale of -0.0 .byte 0x80"):
        verify_checkpoint(path)
