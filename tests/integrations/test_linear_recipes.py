"""Recipes that use data, for linears besides the experts: statistics by hand, the same bytes by every way, errors."""

import re

import pytest
import torch

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.format import dequantize
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, swap_experts
from moe_nvfp4.integrations.huggingface import gptq as module
from moe_nvfp4.integrations.huggingface.calibration import files_importance, first_linears, model_importance
from moe_nvfp4.integrations.huggingface.gptq import convert_gptq
from moe_nvfp4.integrations.huggingface.hessians import HessianSums, quantize_chosen
from moe_nvfp4.integrations.huggingface.statistics import watch_linears
from moe_nvfp4.quantize.codes import CodesFolder
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.gptq import quantize_gptq
from moe_nvfp4.quantize.importance import Importance, load_importance, save_importance
from moe_nvfp4.quantize.linears import Linear
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import quantize_matrix, recipe_global_scale
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.common import relative_error
from tests.folders import qwen2_moe
from tests.integrations.test_gptq import batches
from tests.models import as_bytes, deepseek, folder, llama4, load, nemotron_h, same_tensors, tensors

FIRST = "model.layers.0.self_attn."


def inputs(model):
    """float64 [rows, K]: what q of layer 0, and the head, multiply, taken from the modules before them."""
    seen = {f"{FIRST}q_proj": [], "lm_head": []}
    before = {f"{FIRST}q_proj": model.model.layers[0].input_layernorm, "lm_head": model.model.norm}
    handles = [
        norm.register_forward_hook(lambda m, args, y, name=name: seen[name].append(y.flatten(0, 1).double()))
        for name, norm in before.items()
    ]
    with torch.no_grad():
        for ids in batches():
            model(ids)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def rounded(row):
    """A row [1, K] as W4A4 rounds it."""
    scale = row.abs().max() / (6 * 448)
    codes, sf, _ = nvfp4.quantize(row, scale)
    return nvfp4.dequantize(codes, sf, scale)


def test_sums_are_those_of_a_loop(tmp_path):
    source = folder(tmp_path, qwen2_moe, dtype=torch.float32)
    model = load(source, torch.float32)
    found = files_importance(source, batches(), device="cpu", progress=False)
    for name, x in inputs(model).items():
        squares = (x**2).sum(dim=0)
        want = (squares + 64 * squares.mean() / len(x)) / (len(x) + 64)  # the prior of 64 rows of equal columns
        torch.testing.assert_close(found.linears[name].double(), want, rtol=1e-5, atol=0)
        for activations in ("bf16", "nvfp4"):
            sums = HessianSums(activations)
            with watch_linears({name: model.get_submodule(name)}, sums.linear), torch.no_grad():
                for ids in batches():
                    model(ids)
            rows = x if activations == "bf16" else torch.cat([rounded(row) for row in x.float().split(1)]).double()
            seen, halves = sums.linears[name], [call.split([84, 12]) for call in rows.split(96)]
            in_sum, held = (torch.cat(parts) for parts in zip(*halves, strict=True))  # an eighth of each call is kept
            assert seen.rows == len(in_sum) == 168 and seen.held.shape == (24, 64)
            assert relative_error(seen.held, held) < 1e-5
            torch.testing.assert_close(seen.x.double(), in_sum.T @ in_sum, rtol=1e-4, atol=1e-4)
    again = model_importance(model, batches(), progress=False, linears=first_linears(model))
    assert again.linears.keys() == found.linears.keys() == {
        *(f"model.layers.{i}.{name}" for i in range(2) for name in (
            "self_attn.q_proj", "self_attn.o_proj", "mlp.shared_expert.gate_proj", "mlp.shared_expert.down_proj")),
        "lm_head",
    }  # fmt: skip
    assert all(torch.equal(again.linears[name], found.linears[name]) for name in found.linears)


def test_a_linear_with_few_rows_leans_on_its_columns():
    """As if it had 8 more rows for each column, in which columns are uncorrelated."""
    torch.manual_seed(0)
    linear, x, sums = torch.nn.Linear(64, 32), torch.randn(400, 16) @ torch.randn(16, 64), HessianSums()
    sums.linear("0", x)
    ((_, made),) = quantize_chosen(torch.nn.Sequential(linear), [(Linear("0", "0", 64),)], sums, "gptq")
    hessian = x[:350].T @ x[:350]
    plain, weight = hessian.clone(), linear.weight.detach()
    hessian.diagonal().mul_(1 + 8 * 64 / 350)
    (want,), _, _ = quantize_gptq(weight[None], hessian[None])
    (other,), _, _ = quantize_gptq(weight[None], plain[None])
    assert torch.equal(made["weight"], want) and not torch.equal(want, other)


@pytest.mark.slow
@pytest.mark.parametrize("family", [qwen2_moe, deepseek, nemotron_h, llama4], ids=lambda f: f.__name__)
def test_weighted(family, tmp_path):
    """The bytes of each matrix alone with its importance; and the same by every way, also through a file."""
    source = folder(tmp_path, family, dtype=torch.float32)
    importance = files_importance(source, batches(), device="cpu", progress=False)
    save_importance(importance, tmp_path / "i.safetensors")
    read = load_importance(tmp_path / "i.safetensors")
    assert read.digest() == importance.digest() != Importance(read.layers).digest()
    options = Options("weighted", linears="all", importance=read, device="cpu")
    report = convert_checkpoint(source, tmp_path / "files", options, progress=False)
    files, found = tensors(source), tensors(tmp_path / "files")
    for fused in report.fused:
        weights = [files[f"{linear.name}.weight"] for linear in fused]
        scale = recipe_global_scale(max(w.abs().max().float() for w in weights), "weighted")
        for linear, w in zip(fused, weights, strict=True):
            codes, sf, _ = quantize_matrix(w, "weighted", scale, importance.linears[fused[0].model])
            assert as_bytes(found[f"{linear.name}.weight"]) == as_bytes(codes), linear.name
            assert as_bytes(found[f"{linear.name}.weight_scale"]) == as_bytes(sf), linear.name
    settings = dict(recipe="weighted", linears="all", calibration=batches())
    swap_experts(load(source, torch.float32), progress=False, **settings).save_pretrained(tmp_path / "swapped")
    load(source, torch.float32, quantization_config=MoeNvfp4Config(**settings)).save_pretrained(tmp_path / "loaded")
    for other in ("swapped", "loaded"):
        same_tensors(tmp_path / "files", tmp_path / other)
    assert verify_checkpoint(tmp_path / "files", source).warnings == []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen2_moe, deepseek, nemotron_h, llama4], ids=lambda f: f.__name__)
def test_gptq(family, tmp_path):
    """The same bytes from files and in memory, one scale for what servers fuse, and less error of the outputs."""
    source = folder(tmp_path, family, dtype=torch.float32)
    data = batches(n=24)
    report, _ = convert_gptq(source, tmp_path / "files", data, Options(linears="all", device="cpu"), progress=False)
    assert report.linears > 5 and report.recipe == "gptq"
    model = load(source, torch.float32)
    sums = HessianSums()
    firsts = {fused[0].model: model.get_submodule(fused[0].model) for fused in report.fused}
    with watch_linears(firsts, sums.linear), torch.no_grad():
        for ids in data:
            model(ids)
    files, found = tensors(source), tensors(tmp_path / "files")
    for fused in report.fused:
        hessian, losses = sums.linears[fused[0].model].x.double(), {"gptq": 0.0, "mse": 0.0}
        scales = {float(found[f"{linear.name}.weight_scale_2"]) for linear in fused}
        amax = max(files[f"{linear.name}.weight"].abs().max() for linear in fused)
        assert scales == {float(recipe_global_scale(amax, "gptq"))}
        for linear in fused:
            w = files[f"{linear.name}.weight"]
            ours = (found[f"{linear.name}.{last}"] for last in ("weight", "weight_scale", "weight_scale_2"))
            for recipe, parts in (("gptq", ours), ("mse", quantize_matrix(w, "mse", min(scales)))):
                error = (dequantize(*parts) - w).double()
                losses[recipe] += float(((error @ hessian) * error).sum())
        assert losses["gptq"] < 0.9 * losses["mse"], (fused[0].name, losses)
    swapped = swap_experts(model, recipe="gptq", linears="all", calibration=data, progress=False)
    swapped.save_pretrained(tmp_path / "swapped")
    same_tensors(tmp_path / "files", tmp_path / "swapped")
    assert verify_checkpoint(tmp_path / "files", source).warnings == []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("after", [3, 10, 14], ids=["in a layer", "in the last layer", "before the head"])
def test_an_interrupted_gptq_goes_on(after, tmp_path, monkeypatch, capsys):
    source, options = folder(tmp_path, qwen2_moe), Options(linears="all", device="cpu")
    convert_gptq(source, tmp_path / "whole", batches(), options, progress=False)
    save, count = CodesFolder.save, iter(range(99))

    def stops(*args):
        if next(count) == after:
            raise KeyboardInterrupt
        save(*args)

    with monkeypatch.context() as patch:
        patch.setattr(CodesFolder, "save", stops)
        patch.setattr(module, "SAVE_EVERY", 0)
        with pytest.raises(KeyboardInterrupt):
            convert_gptq(source, tmp_path / "b", batches(), options)
    assert re.search(rf"{after} layers of experts and linears are done", capsys.readouterr().err)
    assert not (tmp_path / "b").exists()
    convert_gptq(source, tmp_path / "b", batches(), options, progress=False)
    same_tensors(tmp_path / "whole", tmp_path / "b")
    assert {p.name for p in tmp_path.iterdir()} == {"bf16", "whole", "b"}


def test_importance_that_lacks_linears_is_an_error(tmp_path):
    source = folder(tmp_path, qwen2_moe)
    importance = files_importance(source, batches(), device="cpu", progress=False)
    for left in ({}, {"model.layers.1.self_attn.q_proj": torch.ones(64)}):
        without = Importance(importance.layers, linears=left)
        with pytest.raises(
            ValueError, match="lm_head has no importance: no token reached it, or .* run moe-nvfp4 importance"
        ):
            convert_checkpoint(source, tmp_path / "b", Options("weighted", linears="all", importance=without))
    wrong = Importance(importance.layers, linears=importance.linears | {f"{FIRST}q_proj": torch.ones(32)})
    with pytest.raises(ValueError, match="has 64 input columns, the importance is of 32"):
        convert_checkpoint(source, tmp_path / "b", Options("weighted", linears="all", importance=wrong))
    assert not (tmp_path / "b").exists()


def test_a_linear_that_no_text_reaches(tmp_path):
    """gptq follows the text through the decoder's layers to the head only."""

    def beside():
        model = qwen2_moe()
        model.model.extra = torch.nn.Linear(64, 64, bias=False)
        return model

    model = beside().eval()
    with pytest.raises(
        ValueError, match="model.extra is in no decoder layer, so no text is followed to it: leave it out"
    ):
        swap_experts(model, recipe="gptq", linears="model.extra", calibration=batches(), progress=False)
    with pytest.raises(ValueError, match="model.extra has no importance: no token reached it"):
        swap_experts(model, recipe="weighted", linears="model.extra", calibration=batches(), progress=False)
    assert isinstance(model.model.extra, torch.nn.Linear)
