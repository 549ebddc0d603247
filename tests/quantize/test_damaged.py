"""Sources that lie, and what `verify` finds."""

import json
import os
import re
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moe_nvfp4 import cli
from moe_nvfp4.quantize.files import INDEX, read_header
from tests.checkpoints import converted, experts, folder
from tests.models import tensors


# ---------------------------------------------------------------- sources that lie
def raw(path, header, data=b"\0" * 64, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(begin, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HOSTILE = {
    "huge header": (dict(header={}, length=1 << 62), "its header alone needs"),
    "not JSON": (dict(header=b"{nonsense"), "is not JSON"),
    "deep JSON": (dict(header=b"[" * 200000), "is not"),
    "a list": (dict(header=[1, 2]), "not a JSON object"),
    "overlapping": (dict(header={"a": entry(0, 40), "b": entry(32, 64)}), "b at bytes 32 to 64 overlaps"),
    "a hole": (dict(header={"a": entry(0, 16), "b": entry(32, 64)}), "belong to no tensor"),
    "beyond the file": (dict(header={"a": entry(0, 1 << 40)}), "its header describes"),
    "negative": (dict(header={"a": entry(-8, 64)}), "not whole numbers"),
    "backwards": (dict(header={"a": entry(64, 0, [64])}), "needs 64 bytes"),
    "another size": (dict(header={"a": entry(0, 64, [4, 4], "F32"), "b": entry(64, 64, [3])}), "needs 3 bytes"),
    "shape overflow": (dict(header={"a": entry(0, 64, [1 << 61, 1 << 61, 0, 64])}), "needs 0 bytes"),
    "booleans": (dict(header={"a": entry(0, 64, [True])}), "not whole numbers"),
    "unknown dtype": (dict(header={"a": entry(0, 64, [64], "F9")}), "dtype 'F9', which is not known"),
    "no offsets": (dict(header={"a": {"dtype": "U8", "shape": [64]}}), "lacks data_offsets"),
    "twice": (dict(header=b'{"a": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}, "a": {}}'), "names a twice"),
    "an expert of 31 digits": (
        dict(header={f"model.layers.0.mlp.experts.{10**30}.up_proj.weight": entry(0, 64, [4, 8], "BF16")}),
        "no layer or expert has a number of 6 digits",
    ),
    "trailing bytes": (dict(header={"a": entry(0, 32)}), "its header describes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case, tmp_path):
    kwargs, message = HOSTILE[case]
    source = folder(tmp_path / "a", experts())
    raw(source / "model.safetensors", **kwargs)
    with pytest.raises(ValueError, match=message) as raised:
        converted(source, tmp_path / "b")
    assert "model.safetensors" in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.slow
@given(data=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    try:
        read_header(path)
    except ValueError as error:
        assert "any.safetensors" in str(error)


def index(change):
    def edit(path):
        found = json.loads((path / INDEX).read_text())
        change(found["weight_map"])
        (path / INDEX).write_text(json.dumps(found))

    return edit


def rename_first(weight_map, name):
    weight_map[next(iter(weight_map))] = name


WRONG = {
    "a path": (index(lambda m: rename_first(m, "../../etc/x.safetensors")), "shards must be .safetensors files in"),
    "absolute": (index(lambda m: rename_first(m, "/etc/x.safetensors")), "shards must be"),
    "another kind": (index(lambda m: rename_first(m, "config.json")), "shards must be"),
    "a missing shard": (lambda p: (p / "model-00002-of-00003.safetensors").unlink(), "names model-00002.* not in the"),
    "a tensor elsewhere": (index(lambda m: rename_first(m, "model-00002-of-00003.safetensors")), "and it is not"),
    "a tensor too many": (index(lambda m: m.update(ghost="model-00002-of-00003.safetensors")), "says that ghost is in"),
    "a tensor too few": (index(lambda m: m.pop(next(iter(m)))), "does not name model"),
    "a shard too few": (
        index(lambda m: [m.pop(k) for k in list(m) if "00003-" in m[k]]), "does not name the shard model-00003"),
    "no map": (lambda p: (p / INDEX).write_text("{}"), "has no weight_map"),
    "not JSON": (lambda p: (p / INDEX).write_text("{"), "is not JSON"),
    "no index": (lambda p: (p / INDEX).unlink(), "of a split checkpoint, but no model.safetensors.index.json"),
    "no config": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "two checkpoints": (
        lambda p: save_file({"a": torch.ones(1)}, p / "model.safetensors"), "two checkpoints are mixed"),
    "truncated": (lambda p: os.truncate(p / "model-00003-of-00003.safetensors", 3000), "model-00003.* is truncated"),
    "twice": (lambda p: shutil.copy(p / "model-00001-of-00003.safetensors", p / "model-00002-of-00003.safetensors"),
              "two checkpoints are mixed"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_indexes(case, tmp_path):
    change, message = WRONG[case]
    source = folder(tmp_path / "a", experts(), shards=3)
    change(source)
    with pytest.raises(ValueError, match=message):
        converted(source, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


E3 = "model.layers.0.mlp.experts.3"
UNKNOWN = {
    "an expert is missing": (
        lambda f: [f.pop(k) for k in list(f) if k.startswith(E3)], {"num_experts": 4}, "3 of 4 experts"),
    "a matrix is missing": (lambda f: f.pop(f"{E3}.up_proj.weight"), {}, f"{E3}.up_proj is missing: 3 of 4 experts"),
    "a projection is missing": (
        lambda f: [f.pop(k) for k in list(f) if k.endswith("down_proj.weight")], {}, "a projection is missing"),
    "a scale": (
        lambda f: f.update({"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(4)}), {}, "scale that nothing"),
    "a stack": (
        lambda f: f.update({"model.layers.1.moe.gate_proj.weight": torch.zeros(4, 8, 16)}), {}, "not known for model"),
    "another name": (
        lambda f: f.update({"encoder.mlp.experts.expert_0.wi.weight": torch.zeros(8, 16)}), {}, "not known for model"),
    "GPTQ": (lambda f: None, {"quantization_config": {"quant_method": "gptq"}}, "quantized with 'gptq'"),
    "a config of another form": (lambda f: None, {"quantization_config": "nvfp4"}, "_config is 'nvfp4', no object"),
    "SVD": (
        lambda f: None, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}}, "NVFP4_SVD"),
    "no experts": (lambda f: [f.pop(k) for k in list(f) if "experts" in k], {}, "MadeByHand has no experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_is_refused_by_name(case, tmp_path):
    change, config, message = UNKNOWN[case]
    files = experts()
    change(files)
    with pytest.raises(ValueError, match=message):
        converted(folder(tmp_path / "a", files, config), tmp_path / "b")


def test_unknown_settings(split, tmp_path):
    for options in (dict(recipe="best"), dict(dialect="gguf"), dict(activations="int4")):
        with pytest.raises(ValueError, match="unknown"):
            converted(split[0], tmp_path / "x", **options)
    with pytest.raises(ValueError, match="quantized already"):
        converted(split[1], tmp_path / "x")
    with pytest.raises(ValueError, match="are all excluded"):
        converted(split[0], tmp_path / "x", exclude=["*"])
    for option in ("exclude", "include"):
        patterns = {option: ["model.layers.1.*", "model.layer.0.*"]}
        message = r"'model.layer.0.\*' matches no experts module: there are model.layers.0.mlp.experts, "
        with pytest.raises(ValueError, match=message):
            converted(split[0], tmp_path / "x", **patterns)
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------- verify
DAMAGE = {
    "a scale is gone": (lambda f: f.pop(f"{E3}.up_proj.weight_scale"), "up_proj.weight_scale is missing"),
    "codes are gone": (lambda f: f.pop(f"{E3}.up_proj.weight"), "up_proj.weight is missing"),
    "an expert is gone": (lambda f: [f.pop(k) for k in list(f) if E3[:-1] + "2" in k], "2.down_proj is missing"),
    "a global scale is gone": (lambda f: f.pop(f"{E3}.up_proj.weight_scale_2"), "up_proj.weight_scale_2 is missing"),
    "an infinite scale": (lambda f: f[f"{E3}.up_proj.weight_scale_2"].fill_(float("inf")), "is inf: a global scale"),
    "NaN block scales": (lambda f: f[f"{E3}.up_proj.weight_scale"].view(torch.uint8).fill_(0x7F), "NaN or negative"),
    "NaN elsewhere": (lambda f: f["lm_head.weight"].fill_(float("nan")), "lm_head.weight has NaN or Inf"),
    "another dtype": (lambda f: f.update({f"{E3}.up_proj.weight_scale": torch.ones(48, 4)}), "F32, expected F8_E4M3"),
    "another shape": (
        lambda f: f.update({f"{E3}.up_proj.weight": torch.zeros(48, 16, dtype=torch.uint8)}), "does not fit codes"),
    "other codes": (None, None),
}  # fmt: skip


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("case", DAMAGE)
def test_verify_finds_damage(case, tmp_path, capsys):
    change, message = DAMAGE[case]
    source = folder(tmp_path / "a", experts())
    path = converted(source, tmp_path / "b")
    assert cli.main(["verify", str(path), "--against", str(source)]) == 0
    said = capsys.readouterr().out
    row = re.search(r"^model.layers.0.mlp.experts +12 +(0\.\d+) +(\d+\.\d+)$", said, re.M)
    assert 0.08 < float(row[1]) < 0.1 and 20 < float(row[2]) < 22
    files = tensors(path)
    if change is None:  # what only the original tells
        files["lm_head.weight"][0, 0] += 1
        message = "lm_head.weight is not what it is in"
    else:
        change(files)
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    assert cli.main(["verify", str(path), *(["--against", str(source)] if change is None else [])]) == 2
    assert message in capsys.readouterr().err
    if change is None:  # nothing can be said of an original without values
        original = experts()
        original[f"{E3}.up_proj.weight"][0, 0] = torch.nan
        assert cli.main(["verify", str(path), "--against", str(folder(tmp_path / "c", original))]) == 2
        assert f"the original of {E3}.up_proj has NaN or Inf" in capsys.readouterr().err
        files["lm_head.weight"][0, 0] -= 1
        files[f"{E3}.up_proj.weight_scale_2"] *= 2  # as a flipped bit of its exponent does
        save_file(files, path / "model.safetensors", metadata={"format": "pt"})
        assert cli.main(["verify", str(path), "--against", str(source)]) == 2
        assert f"{E3} is 0.5" in capsys.readouterr().err
