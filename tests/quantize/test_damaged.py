"""Damaged and hostile sources are errors by name, and `verify` finds damage."""

import json
import os
import re
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from moe_nvfp4 import cli
from moe_nvfp4.quantize.files import INDEX, ShardWriter, expert_counts, open_checkpoint, read_header, read_tensors
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import converted, experts, folder, same_files
from tests.models import make, qwen3_moe, tensors


# ---------------------------------------------------------------- sources that lie
def raw(path, header, data=b"\0" * 64, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(begin, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty": (dict(header=b"", length=0, data=b""), "is not JSON"),
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
    "a dtype of another form": (dict(header={"a": entry(0, 64, [64], ["U8"])}), "dtype .'U8'., which is not known"),
    "a shape of another form": (dict(header={"a": entry(0, 64, 64)}), "not whole numbers"),
    "a number beyond any": (dict(header={"a": entry(0, 0, [0, 1 << 63]), "b": entry(0, 64)}), "not whole numbers"),
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
    "an empty map": (index(lambda m: m.clear()), "has no weight_map"),
    "numbers of files": (index(lambda m: rename_first(m, 3)), "has no weight_map"),
    "hidden": (index(lambda m: rename_first(m, ".x.safetensors")), "shards must be"),
    "not JSON": (lambda p: (p / INDEX).write_text("{"), "is not JSON"),
    "a deep config": (lambda p: (p / "config.json").write_text("[" * 200000), "config.json is not JSON"),
    "a list for a config": (lambda p: (p / "config.json").write_text("[]"), "config.json is not a JSON object"),
    "one shard": (
        lambda p: [f.unlink() for f in p.glob("*model*") if "00001-" not in f.name],
        "1 .safetensors file.s. of a split checkpoint"),
    "shards beside a whole": (
        lambda p: (p / INDEX).unlink() or save_file({"a": torch.ones(1)}, p / "model.safetensors"),
        "4 .* of a split checkpoint"),
    "no index": (lambda p: (p / INDEX).unlink(), "of a split checkpoint, but no model.safetensors.index.json"),
    "no config": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "two checkpoints": (
        lambda p: save_file({"a": torch.ones(1)}, p / "model.safetensors"), "two checkpoints are mixed"),
    "an empty shard": (lambda p: os.truncate(p / "model-00003-of-00003.safetensors", 0), "model-00003.* has 0 bytes"),
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


def test_the_index_of_shards_that_are_gone(tmp_path):
    """save_pretrained of one file over shards removes these, and leaves their index."""
    model = make(qwen3_moe)
    model.save_pretrained(tmp_path / "a", max_shard_size="40KB")
    model.save_pretrained(tmp_path / "a")
    assert {p.name for p in (tmp_path / "a").glob("*.safetensors*")} == {INDEX, "model.safetensors"}
    model.save_pretrained(tmp_path / "right")
    same_files(converted(tmp_path / "a", tmp_path / "b"), converted(tmp_path / "right", tmp_path / "c"))


DTYPES = (
    "bool", "float64", "float32", "int64", "int32", "uint64", "uint32", "complex64", "bfloat16", "float16", "int16",
    "uint16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8",
)  # fmt: skip


def test_every_dtype_is_read_and_written(tmp_path):
    """safetensors writes and reads the same; each tensor begins at a multiple of its element size."""
    files = {f"{i}.{name}": torch.ones(3, 5).to(getattr(torch, name)) for i, name in enumerate(DTYPES)}
    save_file(files, tmp_path / "a.safetensors")
    for name, stored in read_tensors([tmp_path / "a.safetensors"]).items():
        found = stored.tensor()
        assert found.dtype == files[name].dtype and torch.equal(found.view(torch.uint8), files[name].view(torch.uint8))
    header, _ = read_header(tmp_path / "a.safetensors")
    writer = ShardWriter(tmp_path / "b", {n: (info["dtype"], tuple(info["shape"])) for n, info in header.items()})
    for name, tensor in files.items():
        writer.write(name, tensor)
    header, start = read_header(tmp_path / "b")
    with safe_open(tmp_path / "b", "pt") as file:
        assert file.metadata() == {"format": "pt"} and set(file.keys()) == files.keys()
        for name, tensor in files.items():
            assert (start + header[name]["data_offsets"][0]) % tensor.itemsize == 0
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_what_is_one_checkpoint(tmp_path):
    """A checkpoint is one file of any name, or `model.safetensors` beside others; configs are searched at any depth."""
    text = {"model_type": "inner", "n_routed_experts": 6, "num_hidden_layers": 3, "audio_config": {"num_experts": 2}}
    config = {
        "model_type": "outer", "num_local_experts": 8, "moe_num_experts": 4, "num_experts": True, "text_config": text,
        "quantization_config": {"model_type": "no", "num_experts": 9}, "rope_parameters": {"num_experts": 9},
        "num_experts_per_tok": 5, "vision_config": {"model_type": None, "num_hidden_layers": 2},
        "per_layer_config": {"07": {"num_local_experts": 12}},
    }  # fmt: skip
    path = folder(tmp_path / "a", {"a": torch.ones(1)}, config)
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    found = open_checkpoint(path)
    assert [f.name for f in found.files] == ["model-00001-of-00001.safetensors"] and [*found.tensors] == ["a"]
    assert (found.types, found.layers, expert_counts(config)) == (["outer", "inner"], 3, {8, 4, 6, 2, 12})
    save_file({"b": torch.ones(1)}, path / "model.safetensors")
    (path / "model-00001-of-00001.safetensors").rename(path / "adapter.safetensors")
    found = open_checkpoint(path)
    assert [*found.tensors] == ["b"] and [f.name for f in found.ignored] == ["adapter.safetensors"]
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="would load its base model and it, not the files here"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "model-00001-of-00001.safetensors"])
def test_new_files_have_the_name_that_readers_look_for(name, tmp_path):
    """They look for model.safetensors where there is no index."""
    source = folder(tmp_path / "a", experts(E=2))
    (source / "model.safetensors").rename(source / name)
    path = converted(source, tmp_path / "b")
    assert sorted(file.name for file in path.glob("*.safetensors")) == ["model.safetensors"]
    verify_checkpoint(path, source)


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
    "gates of another size": (
        lambda f: f.update({n: torch.zeros(64, 64) for n in f if "gate_proj" in n}), {}, r"gate_proj \[64, 64\]"),
    "down of another size": (
        lambda f: f.update({n: torch.zeros(64, 64) for n in f if "down_proj" in n}), {}, r"down is \[H, I\]"),
    "a config of another form": (lambda f: None, {"quantization_config": "nvfp4"}, "_config is 'nvfp4', no object"),
    "a config of ours of another form": (
        lambda f: None, {"quantization_config": {"quant_method": "modelopt", "moe_nvfp4": 1}}, "moe_nvfp4 .* is 1, no"),
    "classes without names": (lambda f: None, {"architectures": [None]}, r"architectures is \[None\]"),
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


def mxfp4(files, E=2, I=32, H=64):
    """Replace the experts of `files` by gpt-oss's, in MXFP4."""
    for name in [name for name in files if ".experts." in name]:
        del files[name]
    for part, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        files[f"{MXFP4}.{part}_blocks"] = torch.randint(256, (E, N, K // 32, 16), dtype=torch.uint8)
        files[f"{MXFP4}.{part}_scales"] = torch.randint(110, 124, (E, N, K // 32), dtype=torch.uint8)
        files[f"{MXFP4}.{part}_bias"] = torch.zeros(E, N)


def fp8(files):
    """Make the experts of `files` FP8, with scales for blocks of 32."""
    for name in [name for name in files if ".experts." in name]:
        files[name] = files[name].to(torch.float8_e4m3fn)
        files[f"{name}_scale_inv"] = torch.ones([-(-n // 32) for n in files[name].shape])


def stacks(files, E=4, I=16, H=64):
    """Replace the experts of `files` by stacks like Granite's, by projection like Step-3's, and rows like DBRX's."""
    for name in [name for name in files if ".experts." in name]:
        del files[name]
    gate, up, down = torch.zeros(E, I, H), torch.zeros(E, I, H), torch.zeros(E, H, I)
    files |= {f"{GRANITE}.input_linear.weight": torch.cat([gate, up], dim=1), f"{GRANITE}.output_linear.weight": down}
    files |= {f"{STEP}.{n}_proj.weight": t.clone() for n, t in (("gate", gate), ("up", up), ("down", down))}
    files |= {f"{DBRX}.{n}": t.flatten(0, 1).clone() for n, t in (("w1", gate), ("v1", up), ("w2", up))}


def only(stem, **changes):
    """Keep only the tensors of `stacks` that begin with `stem`; `changes` gives some another shape, or removes them."""

    def change(files):
        for name in [n for n in files if n.startswith("model.layers.0.") and "self_attn" not in n]:
            shape = changes.get(name.removeprefix(stem).split(".")[1].removesuffix("_proj"), 0)
            if not name.startswith(stem) or shape is None:
                del files[name]
            elif shape:
                files[name] = torch.zeros(shape)

    return change


GRANITE, STEP, DBRX = (f"model.layers.0.{n}" for n in ("block_sparse_moe", "moe", "ffn.experts.mlp"))
STACKED = {name: {"model_type": name, "quantization_config": None} for name in ("granitemoe", "step3p5")}
STACKED["dbrx"] = {"model_type": "dbrx", "quantization_config": None, "ffn_config": {"moe_num_experts": 4}}
MXFP4, Q = "model.layers.0.mlp.experts", "model.layers.0.self_attn.q_proj"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
DAMAGED = {
    "MXFP4, NaN": (mxfp4, lambda f: f[f"{MXFP4}.down_proj_scales"][1, 5].fill_(255), {}, "expert 1: .* scale is NaN"),
    "MXFP4, half the codes": (
        mxfp4, lambda f: f.update({f"{MXFP4}.down_proj_blocks": f[f"{MXFP4}.down_proj_blocks"][..., :8].clone()}), {},
        r"down_proj: \[2, 64, 1, 8\] and \[2, 64, 1\] are not MXFP4"),
    "MXFP4, codes of another form": (
        mxfp4, lambda f: f.update({f"{MXFP4}.down_proj_blocks": f[f"{MXFP4}.down_proj_blocks"].flatten(2)}), {},
        "are not MXFP4"),
    "MXFP4, scales of others": (
        mxfp4, lambda f: f.update({f"{MXFP4}.gate_up_proj_scales": f[f"{MXFP4}.down_proj_scales"].clone()}), {},
        "gate_up_proj: .* are not MXFP4"),
    "MXFP4, no experts": (
        mxfp4, lambda f: f.update({n: t[:0].clone() for n, t in f.items() if ".experts." in n}), {}, "are not MXFP4"),
    "MXFP4, an expert is missing": (
        mxfp4, lambda f: f.update({n: t[:1].clone() for n, t in f.items() if "down_proj" in n}), {},
        r"down_proj: \[1, 64, 1, 16\] and \[1, 64, 1\] are not MXFP4"),
    "MXFP4, down of another size": (
        mxfp4, lambda f: f.update({n: f[n].repeat_interleave(2, 2) for n in f if "down_proj_" in n and f[n].dim() > 2}),
        {}, r"down_proj \[64, 64\]: gate and up are"),
    "MXFP4, scales of another type": (
        mxfp4, lambda f: f.update({f"{MXFP4}.down_proj_scales": f[f"{MXFP4}.down_proj_scales"].float()}), {},
        "are not MXFP4"),
    "MXFP4, a tensor is missing": (
        mxfp4, lambda f: f.pop(f"{MXFP4}.down_proj_scales"), {}, "down_proj_scales is missing"),
    "MXFP4, a bias is missing": (mxfp4, lambda f: f.pop(f"{MXFP4}.down_proj_bias"), {}, "down_proj_bias is missing"),
    "MXFP4, a bias too short": (
        mxfp4, lambda f: f.update({f"{MXFP4}.down_proj_bias": torch.zeros(2, 32)}), {}, r"expected \[2, 64\]"),
    "MXFP4 of another family": (mxfp4, lambda f: None, {"model_type": "qwen3_moe"}, "for gpt_oss only"),
    "FP8, a weight is missing": (fp8, lambda f: f.pop(f"{E3}.up_proj.weight"), {}, "has no .*3.up_proj.weight"),
    "FP8, a dense weight": (
        fp8, lambda f: f.update({f"{E3}.up_proj.weight": torch.zeros(48, 64)}), {},
        "up_proj.weight is F32 and .*weight_scale_inv F32"),
    "FP8, an expert is missing": (
        fp8, lambda f: [f.pop(n) for n in list(f) if E3 in n], {"num_experts": 4}, "3 of 4 experts"),
    "FP8, a scale is missing": (
        fp8, lambda f: f.pop(f"{E3}.up_proj.weight_scale_inv"), {}, "3.up_proj.weight is F8_E4M3 and 3 of 4"),
    "FP8, a linear without a scale": (
        fp8, lambda f: f.update({f"{Q}.weight": torch.zeros(64, 64).to(torch.float8_e4m3fn)}), {},
        "q_proj.weight is F8_E4M3 without .*q_proj.weight_scale_inv"),
    "FP8, other scales": (
        fp8, lambda f: f.update({f"{E3}.up_proj.weight_scale_inv": torch.ones(1, 2)}), {}, r"\[1, 2\] do not fit"),
    "stacks, one is missing": (
        stacks, only(GRANITE, output_linear=None), STACKED["granitemoe"], "output_linear.weight is missing next to"),
    "stacks, of other sizes": (
        stacks, only(GRANITE, output_linear=(4, 64, 32)), STACKED["granitemoe"], r"expected E 4, I 16, H 64"),
    "stacks, not stacked": (
        stacks, only(GRANITE, input_linear=(128, 64)), STACKED["granitemoe"], r"expected \[experts, rows, columns\]"),
    "stacks by projection, one is missing": (
        stacks, only(STEP, gate=None), STACKED["step3p5"], "moe.gate_proj.weight is missing next to"),
    "stacks by projection, another gate": (
        stacks, only(STEP, gate=(4, 32, 64)), STACKED["step3p5"], r"expected \[4, 32, 64\] as the gate's"),
    "stacks by projection, not stacked": (
        stacks, only(STEP, gate=(64, 64), up=(64, 64)), STACKED["step3p5"], "as the gate's"),
    "stacks by projection, of other sizes": (
        stacks, only(STEP, down=(4, 16, 64)), STACKED["step3p5"], r"down_proj.* expected \[4, 64, 16\]"),
    "rows, of a part of an expert": (
        stacks, only(DBRX, w1=(66, 64)), STACKED["dbrx"], r"w1 has shape \[66, 64\], expected \[4 experts"),
    "rows, stacked": (stacks, only(DBRX, w2=(4, 16, 64)), STACKED["dbrx"], "w2 has shape .* expected .4 experts"),
    "rows, gates of another size": (
        stacks, only(DBRX, w1=(128, 64)), STACKED["dbrx"], r"gate_proj \[32, 64\].* \[I, H\]"),
    "rows, some are missing": (stacks, only(DBRX, v1=None), STACKED["dbrx"], "experts.mlp.v1 is missing"),
    "rows, of how many experts": (
        stacks, only(DBRX), STACKED["dbrx"] | {"ffn_config": None}, r"expected \[None experts"),
    "FP8, blocks of nothing": (
        fp8, lambda f: None, {"quantization_config": BLOCKS | {"weight_block_size": [0, 32]}}, "FP8 without blocks"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_layouts_are_refused_by_name(case, tmp_path):
    make, change, config, message = DAMAGED[case]
    files = experts()
    make(files)
    method = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}} if make is mxfp4 else {}
    form = {"quantization_config": BLOCKS} | method
    change(files)
    with pytest.raises(ValueError, match=message):
        converted(folder(tmp_path / "a", files, form | config), tmp_path / "b")


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
        head = files["lm_head.weight"]
        for dtype, code in ((torch.float16, 0), (torch.float32, 0), (torch.int64, 2)):  # of a model saved in another
            save_file(files | {"lm_head.weight": head.to(dtype)}, path / "model.safetensors", metadata={"format": "pt"})
            assert cli.main(["verify", str(path), "--against", str(source)]) == code
        rounded = head.half()
        rounded[-1, -1] += 1
        save_file(files | {"lm_head.weight": rounded}, path / "model.safetensors", metadata={"format": "pt"})
        assert cli.main(["verify", str(path), "--against", str(source)]) == 2
        assert "it should have been copied, rounded to F16" in capsys.readouterr().err
        files[f"{E3}.up_proj.weight_scale_2"] *= 2  # as a flipped bit of its exponent does
        save_file(files, path / "model.safetensors", metadata={"format": "pt"})
        assert cli.main(["verify", str(path), "--against", str(source)]) == 2
        assert f"{E3}.up_proj.weight_scale_2 stands for 0.00" in capsys.readouterr().err


def test_verify_takes_infinite_bounds(tmp_path, capsys):
    """Gemma 4's audio tower clamps by them, and where nothing is clipped they are infinite."""
    bound = "audio_tower.layers.0.ffw_layer_1.input_max"
    source = folder(tmp_path / "a", experts() | {bound: torch.tensor(torch.inf, dtype=torch.bfloat16)})
    path = converted(source, tmp_path / "b")
    assert cli.main(["verify", str(path), "--against", str(source)]) == 0
    save_file(tensors(path) | {bound: torch.tensor(torch.nan)}, path / "model.safetensors", metadata={"format": "pt"})
    assert cli.main(["verify", str(path)]) == 2
    assert f"{bound} has NaN: the original" in capsys.readouterr().err


FIRST, LAST = "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"
OTHERS = {
    "a layer less": (lambda f: [f.pop(n) for n in list(f) if LAST in n], f"{LAST}.0.* has no original in"),
    "an expert more": (
        lambda f: f.update({n.replace("experts.1", "experts.2"): t.clone() for n, t in f.items() if "experts.1" in n}),
        f"{FIRST}.2.down_proj is in .* and neither quantized nor dense in"),
    "larger matrices": (
        lambda f: f.update({n: torch.ones(64, 64) for n in f if ".experts." in n}),
        r"is \[\d+, \d+\], its original \[64, 64\]"),
    "a norm more": (lambda f: f.update({"model.norm.weight": torch.ones(64)}), "model.norm.weight is in .* and not in"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_verify_against_another_checkpoint(case, tmp_path):
    change, message = OTHERS[case]
    files = experts(E=2, layers=2)
    path = converted(folder(tmp_path / "a", files), tmp_path / "b")
    change(files)
    with pytest.raises(ValueError, match=message):
        verify_checkpoint(path, folder(tmp_path / "c", files))


def test_verify_misses_what_save_pretrained_writes_not(tmp_path):
    """A tied head, scales of a KV cache and tables of RoPE may be missing, and nothing else: not a head that is said to
    be tied, and is not the embedding, which transformers does not tie."""
    attention = "model.layers.0.self_attn"
    files = experts(E=2) | {f"{attention}.k_scale": torch.ones(1), f"{attention}.rotary_emb.inv_freq": torch.ones(8)}
    own, embedding = files["lm_head.weight"], files["model.embed_tokens.weight"]
    assert own.shape == embedding.shape and not torch.equal(own, embedding)
    for said, tied in ((True, True), (True, False), (False, False)):
        files["lm_head.weight"] = embedding.clone() if tied else own
        source = folder(tmp_path / f"{said}-{tied}", files, {"text_config": {"tie_word_embeddings": said}})
        path = converted(source, tmp_path / f"{said}-{tied}-new")
        there = {name: t for name, t in tensors(path).items() if name not in files or ".experts." in name}
        kept = ("model.embed_tokens.weight", f"{attention}.q_proj.weight", *([] if tied else ["lm_head.weight"]))
        for gone in (None, *kept):
            save_file(there | {n: files[n] for n in kept if n != gone}, path / "model.safetensors")
            if gone is None:
                verify_checkpoint(path, source)
                continue
            with pytest.raises(ValueError, match=f"{gone} is in .* and not in"):
                verify_checkpoint(path, source)
