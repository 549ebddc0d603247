"""GGUF files with our experts: decoded by ggml-org's own package, and by hand."""

import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4.cli import main
from moe_nvfp4.quantize import export
from moe_nvfp4.quantize.export import blocks_of, export_gguf
from tests.checkpoints import converted, edit_config
from tests.folders import awq
from tests.models import make, qwen3_moe, tensors

gguf = pytest.importorskip("gguf", reason="needs the package gguf")
if not hasattr(gguf.GGMLQuantizationType, "NVFP4"):
    pytest.skip("this version of gguf does not know NVFP4", allow_module_level=True)

PARTS = ("gate", "up", "down")
E, LAYERS = 4, 2


def qwen(intermediate=64):
    return qwen3_moe(E, intermediate)


def weight(model, layer, part, e):
    """An expert's matrix as transformers has it."""
    experts = model.model.layers[layer].mlp.experts
    if part == "down":
        return experts.down_proj[e].detach()
    return experts.gate_up_proj[e].detach().chunk(2)[part == "up"]


LINEARS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
           "self_attn.o_proj": "attn_output"}  # fmt: skip
OF_BASE = {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(LAYERS) for ours, theirs in LINEARS.items()}
OF_BASE["lm_head"] = "output"


def rotated(rows, heads):
    """Rows in the order of llama.cpp's converter for Mixtral: of each head the first, the first of its second half, the
    second, ..."""
    half = len(rows) // heads // 2
    return torch.stack([rows[h * 2 * half + i + second] for h in range(heads) for i in range(half)
                        for second in (0, half)])  # fmt: skip


def linears_of(model, heads=None):
    """(name in the base, fp32 array) of each linear; q and k rotated if there are heads."""
    for ours, theirs in OF_BASE.items():
        w = model.get_submodule(ours).weight.detach().float()
        if heads and theirs.endswith(("_q", "_k")):
            w = rotated(w, heads[theirs.endswith("_k")])
        yield f"{theirs}.weight", w.numpy()


def write_base(path, model, kind="Q8_0", together=False, architecture="qwen3moe", change=lambda name, w: w, more=()):
    """What llama.cpp's converter makes of `model`, as far as it matters here."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_file_type(7)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "é"])
    writer.add_array("some.numbers", [1.5, -2.0])
    writer.add_bool("some.flag", True)
    dtype = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("token_embd.weight", model.model.embed_tokens.weight.detach().float().numpy())
    for layer in range(LAYERS):
        stacks = {part: torch.stack([weight(model, layer, part, e) for e in range(E)]) for part in PARTS}
        if together:
            stacks = {"gate_up": torch.cat([stacks["gate"], stacks["up"]], dim=1), "down": stacks["down"]}
        for part, stack in stacks.items():
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            data = gguf.quants.quantize(change(name, stack.float()).contiguous().numpy(), dtype)
            writer.add_tensor(name, data, raw_dtype=dtype)
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", torch.randn(64).numpy())
    for name, data in more:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def settings(monkeypatch):
    """A function, after which `write_base` adds settings."""
    add = gguf.GGUFWriter.add_file_type

    def also(more):
        monkeypatch.setattr(gguf.GGUFWriter, "add_file_type", lambda writer, kind: (add(writer, kind), more(writer)))

    return also


@pytest.fixture(scope="module")
def model():
    return make(qwen)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """Folder with the dense model, 4-bit folders of both dialects and of W4A4, and bases."""
    path = tmp_path_factory.mktemp("export")
    model.save_pretrained(path / "dense")
    for dialect in ("modelopt", "compressed-tensors"):
        converted(path / "dense", path / dialect, recipe="mse", dialect=dialect)
        converted(path / "dense", path / f"all-{dialect}", recipe="mse", dialect=dialect, linears="all")
    converted(path / "dense", path / "W4A4", recipe="max", activations="nvfp4")
    for kind in ("Q8_0", "BF16", "F16", "F32", "Q4_0"):
        write_base(path / f"{kind}.gguf", model, kind)
    write_base(path / "together.gguf", model, together=True)
    return path


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def stored(folder, dialect, layer, part, e):
    return stored_linear(folder, dialect, f"model.layers.{layer}.mlp.experts.{e}.{part}_proj")


def stored_linear(folder, dialect, stem):
    """value = code * sf * global_scale, from the files by themselves."""
    from safetensors import safe_open

    stem = f"{stem}."
    with safe_open(folder / "model.safetensors", "pt") as file:
        if dialect == "modelopt":
            codes, sf, scale = (file.get_tensor(stem + s) for s in ("weight", "weight_scale", "weight_scale_2"))
        else:
            names = ("weight_packed", "weight_scale", "weight_global_scale")
            codes, sf, scale = (file.get_tensor(stem + s) for s in names)
            scale = 1 / scale
    halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).long()
    return torch.tensor(E2M1)[halves] * sf.float().repeat_interleave(16, dim=1) * scale


def read(path):
    reader = gguf.GGUFReader(path)
    return reader, {t.name: t for t in reader.tensors}


def value(tensors, layer, part, e):
    name = f"blk.{layer}.ffn_{part}_exps"
    found = tensors[f"{name}.weight"]
    assert found.tensor_type == gguf.GGMLQuantizationType.NVFP4
    return torch.from_numpy(gguf.quants.dequantize(found.data[e], found.tensor_type) * tensors[f"{name}.scale"].data[e])


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["Q8_0", "BF16", "F16", "F32", "Q4_0"])
def test_ggml_reads_the_numbers_of_the_checkpoint(dialect, kind, made, tmp_path):
    report = export_gguf(made / dialect, made / f"{kind}.gguf", tmp_path / "out.gguf")
    _, tensors = read(tmp_path / "out.gguf")
    for layer in range(LAYERS):
        for part in PARTS:
            for e in range(E):
                assert torch.equal(value(tensors, layer, part, e), stored(made / dialect, dialect, layer, part, e))
    assert report.matrices == LAYERS * 3 * E and 0.05 < report.error < 0.2 and not report.left
    assert report.after == LAYERS * E * 3 * (64 * 36 + 4)
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_gate_and_up_of_one_stack_are_two(made, tmp_path):
    """llama.cpp refuses a file with `ffn_gate_up_exps.scale`. Apart they may have different global scales."""
    folder = shutil.copytree(made / "modelopt", tmp_path / "4-bit")
    files = {name: t * 1.01 if name.endswith("up_proj.weight_scale_2") else t for name, t in tensors(folder).items()}
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    report = export_gguf(folder, made / "together.gguf", tmp_path / "out.gguf")
    _, found = read(tmp_path / "out.gguf")
    assert not any("gate_up" in name for name in found) and report.matrices == LAYERS * 3 * E
    for part in PARTS:
        for e in range(E):
            assert torch.equal(value(found, 1, part, e), stored(folder, "modelopt", 1, part, e))
    assert (found["blk.1.ffn_gate_exps.scale"].data < found["blk.1.ffn_up_exps.scale"].data).all()
    assert report.before == sum(int(t.n_bytes) for name, t in read(made / "together.gguf")[1].items() if "exps" in name)


def test_all_else_is_the_base(made, tmp_path):
    export_gguf(made / "modelopt", made / "Q8_0.gguf", tmp_path / "out.gguf")
    (base, before), (out, after) = read(made / "Q8_0.gguf"), read(tmp_path / "out.gguf")
    stacks = [name for name in before if "_exps" in name]
    assert [n for n in after if not n.endswith(".scale")] == list(before)  # in the same order
    assert {n for n in after if n.endswith(".scale")} == {n.replace(".weight", ".scale") for n in stacks}
    for name in set(before) - set(stacks):
        assert before[name].tensor_type == after[name].tensor_type
        assert before[name].data.tobytes() == after[name].data.tobytes()
    fields = {name: (f.types, f.contents()) for name, f in base.fields.items() if not name.startswith("GGUF.")}
    found = {name: (f.types, f.contents()) for name, f in out.fields.items() if not name.startswith("GGUF.")}
    extra = {name: found.pop(name)[1] for name in export.EXTRA}
    assert found.pop("general.file_type")[1] == 39 == fields.pop("general.file_type")[1] + 32
    assert found == fields
    assert extra == {export.EXTRA[0]: sorted(stacks), export.EXTRA[1]: [False] * len(stacks)}  # W4A16 stays W4A16


def test_w4a4_may_be_w4a4(made, tmp_path):
    (tmp_path / "kept").write_text("of someone else")
    (tmp_path / ".out.gguf.partial").symlink_to(tmp_path / "kept")
    export_gguf(made / "W4A4", made / "Q8_0.gguf", tmp_path / "out.gguf")
    assert not set(export.EXTRA) & set(read(tmp_path / "out.gguf")[0].fields)
    assert (tmp_path / "kept").read_text() == "of someone else" and len(list(tmp_path.iterdir())) == 2


def test_w4a16_layers_beside_w4a4_ones_stay_w4a16(made, tmp_path):
    folder = shutil.copytree(made / "W4A4", tmp_path / "mixed")
    algos = {"0": "NVFP4", "1": "W4A16_NVFP4"}  # by layer
    stems = [name.removesuffix(".weight_scale_2") for name in tensors(folder) if name.endswith("weight_scale_2")]
    layers = {stem: {"quant_algo": algos[stem.split(".")[2]], "group_size": 16} for stem in stems}
    edit_config(folder, quantization_config={
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})  # fmt: skip
    export_gguf(folder, made / "Q8_0.gguf", tmp_path / "out.gguf")
    names, allowed = (read(tmp_path / "out.gguf")[0].get_field(name).contents() for name in export.EXTRA)
    assert {f"blk.1.ffn_{part}_exps.weight" for part in PARTS} <= set(names) and not any(allowed)


def test_what_the_base_allows_other_tensors_is_kept(model, made, tmp_path, settings):
    def with_extra(writer):
        writer.add_array(export.EXTRA[0], ["a.weight", "blk.0.ffn_up_exps.weight"])
        writer.add_array(export.EXTRA[1], [False, True])

    settings(with_extra)
    base = write_base(tmp_path / "base.gguf", model)
    export_gguf(made / "modelopt", base, tmp_path / "out.gguf")
    names, allowed = (read(tmp_path / "out.gguf")[0].get_field(name).contents() for name in export.EXTRA)
    assert names[0] == "a.weight" and len(set(names)) == len(names) == 7 and not any(allowed)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_are_aligned_as_the_base_says(alignment, model, made, tmp_path, settings):
    settings(lambda writer: writer.add_custom_alignment(alignment))
    base = write_base(tmp_path / "base.gguf", model)
    export_gguf(made / "modelopt", base, tmp_path / "out.gguf")
    reader, tensors = read(tmp_path / "out.gguf")
    assert reader.alignment == alignment
    assert tensors["token_embd.weight"].data.tobytes() == read(base)[1]["token_embd.weight"].data.tobytes()
    for e in range(E):
        assert torch.equal(value(tensors, 1, "up", e), stored(made / "modelopt", "modelopt", 1, "up", e))


def test_arrays_of_arrays_are_refused(model, made, tmp_path, settings):
    """gguf's reader gives their elements in a row."""
    settings(lambda writer: writer.add_array("some.pairs", [[1, 2], [3, 4]]))
    base = write_base(tmp_path / "base.gguf", model)
    refused(made, base, tmp_path / "out.gguf", "some.pairs of the base is an array of arrays")


def test_factors_of_the_base_stay(model, made, tmp_path):
    """Gemma 4's experts have a factor each, under the name of the global scale."""
    factors = torch.tensor([1.0, 2.0, 0.5, 3.0]).numpy()
    base = write_base(tmp_path / "base.gguf", model, more=[("blk.1.ffn_down_exps.scale", factors)])
    export_gguf(made / "modelopt", base, tmp_path / "out.gguf")
    reader, tensors = read(tmp_path / "out.gguf")
    assert len(tensors) == len(reader.tensors)
    for e in range(E):
        want = stored(made / "modelopt", "modelopt", 1, "down", e) * factors[e]
        assert torch.allclose(value(tensors, 1, "down", e), want, rtol=1e-6)


def test_a_block_by_hand():
    """64 columns with codes 0, 1, ..., 15, four times, and block scales 1, 2, 3, 4."""
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 4], dtype=torch.uint8)
    sf = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    of_16 = [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]
    assert blocks_of(codes, sf).tolist() == [[1, 2, 3, 4, *of_16 * 4]]


# ---- linears -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(
    ("heads", "saved"), [(None, None), ((4, 2), (4, 2)), ((4, 2), (4, [2, 2])), ((4, 4), (4, None)), (None, (3, 5))]
)
def test_linears_are_those_of_the_checkpoint(heads, saved, dialect, tmp_path, settings):
    """Also with the rows of q and k in llama.cpp's order, and a number of heads for all layers, or for each."""

    def with_heads(writer):
        q, k = saved or (None, None)
        if q is not None:
            writer.add_head_count(q)
        if k is not None:
            writer.add_head_count_kv(k)

    settings(with_heads)
    model = make(lambda: qwen3_moe(E, 64, num_key_value_heads=heads[1] if heads else 2))
    model.save_pretrained(tmp_path / "dense")
    folder = converted(tmp_path / "dense", tmp_path / "4-bit", recipe="mse", dialect=dialect, linears="all")
    base = write_base(tmp_path / "base.gguf", model, more=linears_of(model, heads))
    report = export_gguf(folder, base, tmp_path / "out.gguf")
    reader, tensors = read(tmp_path / "out.gguf")
    assert len(tensors) == len(reader.tensors) == len(read(base)[1]) + LAYERS * (3 + len(LINEARS)) + 1
    for ours, theirs in OF_BASE.items():
        found, scale = tensors[f"{theirs}.weight"], tensors[f"{theirs}.scale"]
        assert found.tensor_type == gguf.GGMLQuantizationType.NVFP4 and list(scale.shape) == [1]
        want = stored_linear(tmp_path / "4-bit", dialect, ours)
        if heads and theirs.endswith(("_q", "_k")):
            want = rotated(want, heads[theirs.endswith("_k")])
        assert torch.equal(torch.from_numpy(gguf.quants.dequantize(found.data, found.tensor_type) * scale.data), want)
    for e in range(E):
        assert torch.equal(value(tensors, 1, "down", e), stored(tmp_path / "4-bit", dialect, 1, "down", e))
    names, allowed = (reader.get_field(name).contents() for name in export.EXTRA)
    assert {f"{theirs}.weight" for theirs in OF_BASE.values()} <= set(names) and not any(allowed)
    assert report.matrices == LAYERS * (3 * E + len(LINEARS)) + 1 and not report.left and 0.05 < report.error < 0.2
    nvfp4 = [t.n_bytes for t in reader.tensors if t.tensor_type.name == "NVFP4" or t.name.endswith(".scale")]
    assert report.after == sum(map(int, nvfp4))


@pytest.mark.parametrize("architecture", ["cohere2moe", "deepseek32", "gemma4", "glm-dsa", "hy_v3", "qwen3moe"])
def test_dense_mlps_are_those_of_the_checkpoint(architecture, tmp_path, capsys):
    """Where the graph multiplies with their scales; elsewhere they stay. Layer 2 has an MLP."""
    model = make(
        lambda: qwen3_moe(E, 64, num_hidden_layers=LAYERS + 1, mlp_only_layers=[LAYERS], intermediate_size=128)
    )
    model.save_pretrained(tmp_path / "dense")
    folder = converted(tmp_path / "dense", tmp_path / "4-bit", recipe="mse", linears="mlp")
    mlp = model.model.layers[LAYERS].mlp
    more = [
        (f"blk.{LAYERS}.ffn_{part}.weight", getattr(mlp, f"{part}_proj").weight.detach().float().numpy())
        for part in PARTS
    ]
    base = write_base(tmp_path / "base.gguf", model, architecture=architecture, more=more)
    notes, tensors = left(tmp_path, base, tmp_path / "out.gguf", capsys, "4-bit")
    if architecture == "qwen3moe":
        (note,) = notes.values()
        assert "note: 3 other 4-bit matrices" in note and f"blk.{LAYERS}.ffn_up.scale" not in tensors
        return
    assert not notes
    for part in PARTS:
        found, scale = (tensors[f"blk.{LAYERS}.ffn_{part}.{kind}"] for kind in ("weight", "scale"))
        assert found.tensor_type == gguf.GGMLQuantizationType.NVFP4 and list(scale.shape) == [1]
        want = stored_linear(folder, "modelopt", f"model.layers.{LAYERS}.mlp.{part}_proj")
        assert torch.equal(torch.from_numpy(gguf.quants.dequantize(found.data, found.tensor_type) * scale.data), want)


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("model.layers.11.self_attn.o_proj", "blk.11.attn_output"),
        ("model.language_model.layers.3.self_attn.k_proj", "blk.3.attn_k"),
        ("backbone.layers.3.mixer.q_proj", "blk.3.attn_q"),
        ("model.layers.3.mixer.in_proj", "blk.3.ssm_in"),
        ("backbone.layers.3.mixer.shared_experts.up_proj", "blk.3.ffn_up_shexp"),
        ("model.layers.3.mlp.shared_expert.gate_proj", "blk.3.ffn_gate_shexp"),
        ("model.layers.3.mlp.shared_mlp.down_proj", "blk.3.ffn_down_shexp"),
        ("model.layers.0.mlp.gate_proj", "blk.0.ffn_gate"),
        ("lm_head", "output"),
        ("model.layers.3.linear_attn.out_proj", None),
        ("model.layers.3.self_attn.q_a_proj", None),
        ("model.layers.3.mlp.shared_expert_gate", None),
        ("model.layers.3.mixer.fc1_latent_proj", None),
        ("model.visual.blocks.0.attn.qkv", None),
        ("vision_tower.encoder.layers.0.self_attn.q_proj", None),
    ],
)
def test_names_are_those_of_llama_cpp(stem, name):
    """As its converter makes them."""
    assert export._name_of(stem) == (name and f"{name}.weight")


def left(made, base, out, capsys, folder="all-modelopt", *options):
    """The names of linears that stay, by the reason in the notes; the file has them as the base does."""
    assert main(["export", str(made / folder), str(out), "--base", str(base), *options]) == 0
    before, after = read(base)[1], read(out)[1]
    for name in before:
        assert (
            "_exps" in name
            or before[name].data.tobytes() == after[name].data.tobytes()
            or f"{name[:-7]}.scale" in after
        )
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    return {note.partition("because ")[2].partition(": ")[0]: note for note in notes}, after


def test_linears_that_the_base_has_not_stay(model, made, tmp_path, capsys):
    """q, k and v in one, and the embedding as the head."""
    more = [(name, w) for name, w in linears_of(model) if name.endswith("attn_output.weight")]
    base = write_base(tmp_path / "base.gguf", model, more=more)
    notes, after = left(made, base, tmp_path / "out.gguf", capsys)
    (note,) = notes.values()
    assert "note: 7 other 4-bit matrices" in note and "fused ones, or the embedding as the head: lm_head, model" in note
    assert {name for name in after if name.endswith(".scale") and "_exps" not in name} == {
        f"blk.{layer}.attn_output.scale" for layer in range(LAYERS)}  # fmt: skip


@pytest.mark.parametrize("architecture", ["deepseek2", "something-new"])
def test_linears_whose_scale_is_not_used_stay(architecture, model, made, tmp_path, capsys):
    base = write_base(tmp_path / "base.gguf", model, architecture=architecture, more=linears_of(model))
    notes, after = left(made, base, tmp_path / "out.gguf", capsys, "all-modelopt", "--any-architecture")
    (why,) = notes
    assert why == f"llama.cpp's graph for {architecture} was not seen to multiply with their global scales"
    assert "note: 9 other" in notes[why] and all("_exps" in n for n in after if n.endswith(".scale"))


@pytest.mark.parametrize(
    ("architecture", "ignored"),
    [
        ("qwen3next", ["ssm_in", "ssm_out", "attn_qkv", "attn_gate", "ffn_gate_inp_shexp", "ffn_gate"]),
        ("glm-dsa", ["output", "attn_q_a", "attn_q_b", "attn_kv_a_mqa"]),
        ("deepseek32", ["output", "attn_q_a", "attn_q_b", "attn_kv_a_mqa"]),
    ],
)
def test_scales_that_a_graph_ignores_are_not_written(architecture, ignored):
    """It multiplies with those of other linears, and not with these, or refuses a file that has them."""
    assert not export.USE_SCALES[architecture] & set(ignored)


def test_linears_that_have_no_blocks_of_64_stay(tmp_path, capsys):
    model = make(lambda: qwen3_moe(E, 64, num_attention_heads=3, num_key_value_heads=1))  # o_proj has 48 columns
    model.save_pretrained(tmp_path / "dense")
    converted(tmp_path / "dense", tmp_path / "4-bit", recipe="max", linears="attention")
    base = write_base(tmp_path / "base.gguf", model, more=linears_of(model))
    notes, after = left(tmp_path, base, tmp_path / "out.gguf", capsys, "4-bit")
    (note,) = notes.values()
    assert "note: 2 other" in note and "no multiple of 64: model.layers.0.self_attn.o_proj" in note
    assert after["blk.1.attn_q.weight"].tensor_type.name == "NVFP4" and "output.scale" not in after


# ---- what does not fit ------------------------------------------------------------------------------------------


def refused(made, base, out, match, folder="modelopt", **settings):
    with pytest.raises(ValueError, match=match):
        export_gguf(made / folder, base, out, **settings)
    assert not out.exists() and not list(out.parent.glob(f".{out.name}*"))


def swap(name, w):
    return w[[1, 0, 2, 3]] if name == "blk.1.ffn_up_exps.weight" else w


def turn(name, w):
    return w.transpose(1, 2) if name == "blk.0.ffn_down_exps.weight" else w


def zero(name, w):
    return w * (torch.arange(E)[:, None, None] != 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (swap, r"1.mlp.experts.0.up_proj differs from its place in blk.1.ffn_up_exps.weight of the base by 1\.\d+"),
        (turn, "layers.0.mlp.experts.0.down_proj differs"),
        (zero, "layers.0.mlp.experts.2.gate_proj differs from .* by everything: it is zero there"),
        (lambda name, w: w * torch.nan if "down" in name else w, "down_proj differs from .* by nan"),
        (lambda name, w: 2 * w if name == "blk.1.ffn_down_exps.weight" else w, "layers.1.mlp.experts.0.down_proj"),
    ],
)  # fmt: skip
def test_another_model(change, named, model, made, tmp_path):
    base = write_base(tmp_path / "base.gguf", model, change=change)
    refused(made, base, tmp_path / "out.gguf", named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w[:16], r"blk.1.attn_v.weight of the base is \[16, 64\], and .*1.self_attn.v_proj is \[32, 64\]"),
        (lambda w: w[::-1], "1.self_attn.v_proj differs from its place in blk.1.attn_v.weight of the base by 1"),
        (lambda w: 0 * w, "1.self_attn.v_proj differs from .* by everything: it is zero there"),
    ],
)  # fmt: skip
def test_linears_of_another_model(change, named, model, made, tmp_path):
    more = [(name, change(w).copy() if "1.attn_v" in name else w) for name, w in linears_of(model)]
    base = write_base(tmp_path / "base.gguf", model, more=more)
    refused(made, base, tmp_path / "out.gguf", named, folder="all-modelopt")


def test_an_expert_that_was_pruned_in_both(tmp_path, model):
    """Zero is no distance from zero."""
    pruned = make(qwen)
    for layer in pruned.model.layers:
        layer.mlp.experts.gate_up_proj.data[1] = 0
        layer.mlp.experts.down_proj.data[1] = 0
    pruned.save_pretrained(tmp_path / "dense")
    converted(tmp_path / "dense", tmp_path / "4-bit", recipe="mse")
    base = write_base(tmp_path / "base.gguf", pruned)
    export_gguf(tmp_path / "4-bit", base, tmp_path / "out.gguf")
    assert not value(read(tmp_path / "out.gguf")[1], 0, "up", 1).any()


def test_bases_that_do_not_fit(model, made, tmp_path):
    out = tmp_path / "out.gguf"
    base = write_base(tmp_path / "other.gguf", model, architecture="deepseek2")
    refused(made, base, out, "graph for 'deepseek2' was not seen to multiply .* add --any-architecture")
    export_gguf(made / "modelopt", base, tmp_path / "any.gguf", any_architecture=True)
    refused(made, tmp_path / "no.gguf", out, "no.gguf is no file")
    (tmp_path / "text.gguf").write_text("This is a text and not a file of numbers.")
    refused(made, tmp_path / "text.gguf", out, "text.gguf is no GGUF file, or damaged")
    refused(made, tmp_path / "any.gguf", out, "of the base is NVFP4 already", any_architecture=True)
    fewer = write_base(tmp_path / "fewer.gguf", model, change=lambda name, w: w[:3])
    refused(made, fewer, out, r"ffn_down_exps.weight of the base is \[3, 64, 64\], and .* one of 4 experts")
    old = write_base(tmp_path / "old.gguf", model, change=lambda name, w: w)
    out.write_text("kept")
    with pytest.raises(ValueError, match="out.gguf exists"):
        export_gguf(made / "modelopt", old, out)
    assert out.read_text() == "kept"


def test_checkpoints_that_do_not_fit(model, made, tmp_path):
    base, out = made / "Q8_0.gguf", tmp_path / "out.gguf"
    refused(made, base, out, "is not an NVFP4 checkpoint", folder="dense")
    make(lambda: qwen(48)).save_pretrained(tmp_path / "48")
    converted(tmp_path / "48", tmp_path / "4-bit", recipe="max")
    narrow = write_base(tmp_path / "narrow.gguf", make(lambda: qwen(48)), "F16")
    refused(tmp_path, narrow, out, "down_proj has 48 columns: NVFP4 in GGUF is blocks of 64", folder="4-bit")
    awq(tmp_path, qwen)
    refused(tmp_path, base, out, "pre_quant_scale: AWQ's scales have no place in GGUF")


def test_stopped_in_the_middle_it_leaves_nothing(made, tmp_path, monkeypatch):
    before, seen = export.blocks_of, []

    def stop(codes, sf):
        seen.append(1)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return before(codes, sf)

    monkeypatch.setattr(export, "blocks_of", stop)
    with pytest.raises(KeyboardInterrupt):
        export_gguf(made / "modelopt", made / "Q8_0.gguf", tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())


def test_killed_in_the_middle_the_next_run_makes_the_same_file(made, tmp_path, monkeypatch):
    """What it left is removed, before the disk is asked for room."""
    export_gguf(made / "modelopt", made / "Q8_0.gguf", tmp_path / "whole.gguf")
    (tmp_path / ".out.gguf.partial").write_bytes(b"half of it")
    monkeypatch.setattr(
        export, "check_space", lambda path, needed: seen.append((tmp_path / ".out.gguf.partial").exists())
    )
    seen = []
    export_gguf(made / "modelopt", made / "Q8_0.gguf", tmp_path / "out.gguf")
    assert seen == [False]
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("byte", [0x80, 0xB8, 0x7F])
def test_block_scales_that_gguf_cannot_hold(byte, made, tmp_path):
    folder = shutil.copytree(made / "modelopt", tmp_path / "4-bit")
    files = tensors(folder)
    sf = files["model.layers.1.mlp.experts.2.up_proj.weight_scale"]
    sf.view(torch.uint8)[3, 1] = byte
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    base, out = made / "Q8_0.gguf", tmp_path / "out.gguf"
    match = "differs from its place" if byte == 0x7F else "2.up_proj.weight_scale holds NaN or negative block scales"
    refused(tmp_path, base, out, match, folder="4-bit")


def test_without_the_package(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install 'gguf>=0.19'"):
        export_gguf(made / "modelopt", made / "Q8_0.gguf", tmp_path / "out.gguf")
    monkeypatch.setitem(sys.modules, "gguf", type("old", (), {"GGMLQuantizationType": object}))
    with pytest.raises(ImportError, match="does not know NVFP4"):
        export_gguf(made / "modelopt", made / "Q8_0.gguf", tmp_path / "out.gguf")


def test_the_command(made, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    assert main(["export", str(made / "modelopt"), str(out), "--base", str(made / "Q8_0.gguf")]) == 0
    assert (
        capsys.readouterr().out
        == f"wrote {out}: 24 matrices of 2 layers, 104.4 KB -> 55.4 KB, at most 0.082 from the base\n"
    )
    assert main(["export", str(made / "modelopt"), str(out), "--base", str(made / "Q8_0.gguf")]) == 2
    assert "exists: name a file that does not" in capsys.readouterr().err
    quiet = tmp_path / "quiet.gguf"
    assert main(["export", str(made / "modelopt"), str(quiet), "--base", str(made / "Q8_0.gguf"), "--quiet"]) == 0
    assert quiet.read_bytes() == out.read_bytes() and capsys.readouterr() == ("", "")
