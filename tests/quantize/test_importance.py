"""The importance of input columns: its file, names and sums, and its use in a conversion."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.files import open_checkpoint
from moe_nvfp4.quantize.importance import (
    PRIOR_ROWS,
    Importance,
    LayerImportance,
    fingerprint,
    layer_importance,
    load_importance,
    save_importance,
)
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import quantize_matrix, recipe_global_scale
from tests.models import folder, mixtral, qwen3_moe, same_tensors, tensors


def importance_for(modules, E=8, H=64, I=48, seed=0):
    g = torch.Generator().manual_seed(seed)
    vectors = lambda K: torch.exp2(3 * torch.randn(E, K, generator=g))
    return Importance({m: LayerImportance(vectors(H), vectors(I), torch.full((E,), 100)) for m in modules})


MODULES = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def test_few_rows_say_little():
    """Expert 0 saw 1000 rows, expert 1 saw 1, expert 2 none."""
    rows = torch.tensor([1000, 1, 0])
    x = torch.tensor([[2000.0, 500.0], [90.0, 0.0], [0.0, 0.0]])
    h = torch.tensor([[3000.0, 1000.0], [8.0, 0.0], [0.0, 0.0]])
    found = layer_importance(x, h, rows)
    average = [2090 / 1001, 500 / 1001]
    want_x = [[(s + PRIOR_ROWS * a) / (n + PRIOR_ROWS) for s, a in zip(row, average, strict=True)]
              for row, n in zip(x.tolist(), rows.tolist(), strict=True)]  # fmt: skip
    assert torch.allclose(found.x, torch.tensor(want_x), rtol=1e-6)
    assert torch.allclose(found.x[2], torch.tensor(average))
    assert torch.allclose(found.h[0], torch.tensor([(3000 + 64 * 2) / 1064, (1000 + 64 * 2) / 1064]))
    assert found.h[1, 0] / found.h[1, 1] == pytest.approx((8 + 64 * 4) / (64 * 4))  # of one row: nearly flat
    assert found.h[2].tolist() == [PRIOR_ROWS / PRIOR_ROWS] * 2  # as without data
    assert found.rows.tolist() == [1000, 1, 0]


def test_file(tmp_path):
    importance = Importance(importance_for(MODULES).layers, "a test", "abc", {"num_experts_per_tok": 2})
    save_importance(importance, tmp_path / "a")
    again = load_importance(tmp_path / "a")
    assert (again.source, again.fingerprint, again.settings) == ("a test", "abc", {"num_experts_per_tok": 2})
    assert again.digest() == importance.digest() != importance_for(MODULES, seed=1).digest()
    for part in ("x", "h"):
        layers = importance_for(MODULES).layers
        getattr(layers[MODULES[1]], part)[3, 5] += 1
        assert Importance(layers).digest() != importance.digest(), part
    for name, layer in importance.layers.items():
        for key, tensor in vars(layer).items():
            assert torch.equal(vars(again.layers[name])[key], tensor)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="moe-nvfp4 importance MODEL"):
        load_importance(tmp_path / "none")
    save_file({"a.x": torch.ones(1)}, tmp_path / "weights")
    with pytest.raises(ValueError, match="not written by moe-nvfp4 importance"):
        load_importance(tmp_path / "weights")
    (tmp_path / "damaged").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="damaged"):
        load_importance(tmp_path / "damaged")
    for key, value in (("x", 0.0), ("h", 0.0), ("h", float("nan")), ("x", -1.0)):
        importance = importance_for(MODULES)
        vars(importance.layers[MODULES[1]])[key][5] = value
        save_importance(importance, tmp_path / "zeros")
        with pytest.raises(ValueError, match=f"layers.1.mlp.experts.{key} has zeros for all columns of an expert"):
            load_importance(tmp_path / "zeros")


def test_importance_of_another_model_is_refused_or_said(tmp_path):
    """Refused with a layer too many; of the same shapes, a warning names both."""
    source, other = (folder(tmp_path, qwen3_moe, name) for name in ("source", "other"))
    files = tensors(other)
    files["model.layers.1.self_attn.q_proj.weight"] += 1
    save_file(files, other / "model.safetensors", metadata={"format": "pt"})
    of = {path: fingerprint(open_checkpoint(path).tensors) for path in (source, other)}
    assert of[source] != of[other]
    more = importance_for([*MODULES, "model.layers.2.mlp.experts"])
    with pytest.raises(ValueError, match="importance has model.layers.2.mlp.experts, and .*source does not"):
        convert_checkpoint(source, tmp_path / "new", Options("weighted", importance=more), progress=False)
    importance = Importance(importance_for(MODULES).layers, "that model", of[other])
    with pytest.warns(UserWarning, match=r"measured on other weights \(that model\) than those of .*source"):
        convert_checkpoint(source, tmp_path / "new", Options("weighted", importance=importance), dry_run=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_checkpoint(other, tmp_path / "new", Options("weighted", importance=importance), dry_run=True)


def test_names():
    importance = importance_for(["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"])
    want = importance.layers["model.layers.1.mlp.experts"]
    for name in ("model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe.experts"):
        found = importance.renamed(lambda module: module.replace("block_sparse_moe", "mlp"))
        assert torch.equal(found.of(name, 3, "gate_proj", 64), want.x[3])
        assert torch.equal(found.of(name, 3, "w3", 64), want.x[3])
        assert torch.equal(found.of(name, 3, "w2", 48), want.h[3])
        assert torch.equal(found.of_matrix(f"{name}.7.down_proj", 48), want.h[7])
    with pytest.raises(ValueError, match="layers.2.mlp.experts has no importance: .*another model"):
        importance.of("model.layers.2.mlp.experts", 0, "up_proj", 64)
    with pytest.raises(ValueError, match="48 input columns, the importance is of 8 experts with 64"):
        importance.of("model.layers.0.mlp.experts", 0, "up_proj", 48)
    with pytest.raises(
        ValueError, match="layers.0.mlp.experts has 4 experts, the importance is of 8: it was made with"
    ):
        importance.layer("model.layers.0.mlp.experts", 4)
    for e in (8, -1):
        with pytest.raises(ValueError, match="of 8 experts"):
            importance.of("model.layers.0.mlp.experts", e, "up_proj", 64)
    for other in ("encoder.layers.1.mlp.experts", "layers.1.mlp.experts", "mtp_layers.1.mlp.experts"):
        with pytest.raises(ValueError, match="no importance"):  # the same number is no match
            importance.of(other, 0, "up_proj", 64)
    with pytest.raises(ValueError, match="mtp.0.experts is not a part of the model .*exclude mtp.0.experts"):
        importance.renamed(lambda module: None).of("mtp.0.experts", 0, "up_proj", 64)


@pytest.mark.parametrize(("build", "E", "prefix", "parts"), [
    (qwen3_moe, 8, "model.layers.{}.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    (mixtral, 4, "model.layers.{}.block_sparse_moe.experts", ("w1", "w3", "w2")),
])  # fmt: skip
def test_conversion(build, E, prefix, parts, tmp_path):
    """Every matrix of the new files is `quantize_matrix` of the old one, with gate and up's scale shared."""
    source = folder(tmp_path, build)
    importance = importance_for(MODULES, E)
    options = Options("weighted", importance=importance, device="cpu")
    convert_checkpoint(source, tmp_path / "new", options, progress=False)
    dense, new = tensors(source), tensors(tmp_path / "new")
    for i, module in enumerate(MODULES):
        for e in range(E):
            w = [dense[f"{prefix.format(i)}.{e}.{part}.weight"] for part in parts]
            shared = recipe_global_scale(torch.cat(w[:2]).abs().amax().float(), "weighted")
            vectors = [importance.layers[module].x[e]] * 2 + [importance.layers[module].h[e]]
            for part, matrix, scale, vector in zip(parts, w, (shared, shared, None), vectors, strict=True):
                want = quantize_matrix(matrix, "weighted", scale, vector)
                stem = f"{prefix.format(i)}.{e}.{part}"
                got = [new[f"{stem}.{suffix}"] for suffix in ("weight", "weight_scale", "weight_scale_2")]
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a.float(), b.float())
    config = json.loads((tmp_path / "new/config.json").read_text())
    assert config["quantization_config"]["moe_nvfp4"]["recipe"] == "weighted"
    other = Options("weighted", importance=importance_for(MODULES, E + 1), device="cpu")
    with pytest.raises(ValueError, match=f"has {E} experts, the importance is of {E + 1}: it was made with another"):
        convert_checkpoint(source, tmp_path / "other", other, progress=False)


@pytest.mark.slow
def test_an_interrupted_conversion_does_not_mix_two_importances(tmp_path, monkeypatch, capsys):
    source = folder(tmp_path, qwen3_moe)
    first, second = (Options("weighted", importance=importance_for(MODULES, seed=s), device="cpu") for s in (0, 1))
    with monkeypatch.context() as patch:
        patch.setattr("moe_nvfp4.quantize.convert._write_small_files", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert_checkpoint(source, tmp_path / "new", first, progress=False)
    convert_checkpoint(source, tmp_path / "new", second)
    assert "starting again" in capsys.readouterr().err
    convert_checkpoint(source, tmp_path / "want", second, progress=False)
    same_tensors(tmp_path / "new", tmp_path / "want")


def test_options():
    with pytest.raises(ValueError, match="'weighted' needs importance: .*--importance OUT"):
        Options("weighted")
    with pytest.raises(ValueError, match="importance would have no effect on recipe 'mse'"):
        Options("mse", importance=importance_for(MODULES))
