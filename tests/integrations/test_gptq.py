"""The recipe gptq on whole models: Hessians by hand, the same bytes from files and models, interruptions, messages."""

import json
import shutil
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.cli import main
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, hessians, swap_experts
from moe_nvfp4.integrations.huggingface import gptq as module
from moe_nvfp4.integrations.huggingface.calibration import dense_modules, files_importance
from moe_nvfp4.integrations.huggingface.gptq import convert_gptq, gptq_model, plan_gptq
from moe_nvfp4.integrations.huggingface.hessians import HessianSums, Sums, shrink
from moe_nvfp4.integrations.huggingface.statistics import watch
from moe_nvfp4.quantize.gptq import quantize_gptq
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import quantize_matrix, recipe_named
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import edit_config
from tests.models import (
    as_bytes,
    folder,
    gpt_oss,
    llama4,
    load,
    logits,
    make,
    mixtral,
    nemotron_h,
    qwen3_moe,
    same_tensors,
    tensors,
)

CPU = Options(device="cpu")


def batches(n=4, seed=0):
    return list(torch.randint(0, 96, (n, 48), generator=torch.Generator().manual_seed(seed)).split(2))


@pytest.mark.parametrize("activations", ["bf16", "nvfp4", "nvfp4_four_over_six"])
def test_hessians_are_those_of_a_loop(activations):
    """Against Qwen3-MoE token by token; for W4A4, rows are quantized with a scale each, as in the layer."""
    model = make(qwen3_moe, torch.float32)
    experts = model.model.layers[1].mlp.experts
    seen = []
    with experts.register_forward_pre_hook(lambda m, args: seen.append(args)), torch.no_grad():
        model(batches()[0])
    sums = HessianSums(activations)
    with watch({"experts": dense_modules(model)["model.layers.1.mlp.experts"]}, sums), torch.no_grad():
        model(batches()[0])
    found, ((x, ids, _),) = sums.layers["experts"], seen

    def row(values):
        if activations == "bf16":
            return values.double()
        rounding = activations == "nvfp4_four_over_six"
        scale = values.abs().max() / (6 * (256 if rounding else 448))
        codes, sf, _ = nvfp4.quantize(values[None], scale, four_over_six=rounding)
        return nvfp4.dequantize(codes, sf, scale)[0].double()

    for e in (0, 5):
        rows = x[(ids == e).any(dim=1)]
        rows, held = rows.split([len(rows) - len(rows) // 8, len(rows) // 8])  # the last eighth is to judge by
        assert found.rows[e] == len(rows) > 2 and len(held) > 0
        error = (found.held_x[e].double() - torch.stack([row(t) for t in held])).norm() / held.norm()
        assert error < 1e-5 and found.held_h[e].shape == (len(held), 48)
        want_x, want_h = torch.zeros(64, 64).double(), torch.zeros(48, 48).double()
        for t in rows:
            gate, up = (experts.gate_up_proj[e] @ t).detach().chunk(2)
            for want, values in ((want_x, row(t)), (want_h, row(F.silu(gate) * up))):
                want += torch.outer(values, values)
        torch.testing.assert_close(found.x[e].double(), want_x, rtol=1e-4, atol=1e-5)
        # codes of h may differ, as the kernels sum in another order
        error = (found.h[e].double() - want_h).norm() / want_h.norm()
        assert error < (1e-5 if activations == "bf16" else 0.02)


def test_rare_experts_lean_on_their_layer():
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 8, generator=g) * torch.arange(1, 9) for n in (4000, 2, 0)]
    hessian = torch.stack([r.T @ r for r in rows])
    sums = Sums(hessian.clone(), hessian.clone(), torch.tensor([4000, 2, 0]), [], [])
    shrink(sums)
    average = hessian.sum(dim=0) / 4002
    for e, n in enumerate((4000, 2, 0)):
        want = hessian[e] + 8 * average
        torch.testing.assert_close(sums.x[e], want + 64 / 4000 * torch.diag(want.diagonal()))
        torch.testing.assert_close(sums.h[e], hessian[e] + 64 / max(n, 1) * torch.diag(hessian[e].diagonal()))


def test_codes_stay_those_of_mse_where_they_are_better(monkeypatch):
    """Expert 0's sums lack half of the directions that its other rows have, so that gptq moves errors into them; expert
    1's are of the same kind as its other rows; expert 2 has no rows. Then a recipe that is worse everywhere."""
    model = make(partial(qwen3_moe, experts=4), torch.float32)
    experts, layout = dense_modules(model)["model.layers.0.mlp.experts"]
    g = torch.Generator().manual_seed(0)
    H, I = layout.hidden_size, layout.intermediate_size

    def planted():
        sums = hessians.no_rows(layout, "cpu")
        sums.rows[:2] = 4000
        for e in (0, 1):
            for total, held, K in ((sums.x, sums.held_x, H), (sums.h, sums.held_h, I)):
                few = torch.randn(4000, K // 4, generator=g) @ torch.randn(K // 4, K, generator=g)
                total[e] = few.T @ few
                held[e] = torch.randn(64, K, generator=g) if e == 0 else few[:64]
        return sums

    made = hessians.quantize_experts(experts, layout, planted())
    mse = swap_experts(make(partial(qwen3_moe, experts=4), torch.float32), progress=False)
    by_mse = dict(mse.model.layers[0].mlp.experts.named_parameters())
    same = {(name, e): torch.equal(made[name][e], by_mse[name][e]) for name in ("gate_up_proj", "down_proj")
            for e in (0, 1)}  # fmt: skip
    assert same == {(name, e): e == 0 for name in ("gate_up_proj", "down_proj") for e in (0, 1)}

    def zeros(w, hessian):
        codes, sf, scale = quantize_gptq(w, hessian)
        return torch.zeros_like(codes), sf, scale

    monkeypatch.setattr(hessians, "recipe_named", lambda name: replace(recipe_named(name), from_hessians=zeros))
    made = hessians.quantize_experts(experts, layout, planted())
    for name in by_mse:
        assert torch.equal(made[name][:2], by_mse[name].view(made[name].dtype)[:2]), name


def outputs_error(w, codes, sf, global_scale, covariance):
    error = nvfp4.dequantize(codes, sf, global_scale)[:, : w.shape[1]].double() - w.double()
    return (error @ covariance * error).sum().item()


@pytest.mark.parametrize("rows", [16, 64, 256, 4096])
def test_little_data_is_no_worse_than_weighted(rows):
    """With correlated columns; errors of outputs are computed from the true covariance, which recipes do not know."""
    g = torch.Generator().manual_seed(rows)
    mixing = torch.randn(64, 24, generator=g).double()
    covariance = mixing @ mixing.T + torch.diag(torch.rand(64, generator=g).double() * 8)
    x = torch.randn(rows, 64, generator=g) @ torch.linalg.cholesky(covariance).T.float()
    w = torch.randn(96, 64, generator=g)
    sums = Sums((x.T @ x)[None], (x.T @ x)[None], torch.tensor([rows]), [], [])
    by_weighted = quantize_matrix(w, "weighted", importance=x.square().mean(dim=0))
    weighted = outputs_error(w, *by_weighted, covariance)
    shrink(sums)
    for hessian in (sums.x, sums.h):
        codes, sf, scale = (t[0] for t in quantize_gptq(w[None], hessian))
        assert outputs_error(w, codes, sf, scale, covariance) < (1.0 if rows < 256 else 0.8) * weighted


def test_a_config_without_a_dtype(tmp_path):
    """Weights are those of the files, not rounded to bf16."""
    source = folder(tmp_path, qwen3_moe, dtype=torch.float32)
    convert_gptq(source, tmp_path / "named", batches(), CPU, progress=False)
    edit_config(source, dtype=None)
    convert_gptq(source, tmp_path / "not", batches(), CPU, progress=False)
    same_tensors(tmp_path / "named", tmp_path / "not")


@pytest.mark.slow
@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss, mixtral, nemotron_h], ids=lambda f: f.__name__)
def test_converted_and_swapped_models_are_the_same(family, tmp_path):
    source = folder(tmp_path, family)
    report, _ = convert_gptq(source, tmp_path / "converted", batches(), CPU, progress=False)
    assert report.recipe == "gptq" and report.quantized > 0
    verified = verify_checkpoint(tmp_path / "converted", source)
    assert all(layer.relative < 0.2 for layer in verified.layers.values())
    swap_experts(load(source), recipe="gptq", calibration=batches(), progress=False).save_pretrained(tmp_path / "swap")
    wide = [n for n in tensors(source) if ".mixer.gate." in n]  # transformers keeps them in fp32
    same_tensors(tmp_path / "converted", tmp_path / "swap", but=wide)
    assert not list(tmp_path.glob(".*"))


def test_outputs_of_experts_are_nearer_than_by_mse():
    model = make(qwen3_moe, torch.float32)
    data = batches(40)
    made = gptq_model(model, data, progress=False)
    errors = {"gptq": 0.0, "mse": 0.0}
    swapped = swap_experts(make(qwen3_moe, torch.float32), progress=False)

    def visit(name, layout, e, x, h):
        dense, by_mse = model.get_submodule(name), swapped.get_submodule(name)
        for part, rows, weight in (("gate_up_proj", x, dense.gate_up_proj[e]), ("down_proj", h, dense.down_proj[e])):
            scale = f"{part.replace('gate_up', 'gate')}_global_scale"
            for recipe, of in (("gptq", made[name]), ("mse", dict(by_mse.named_parameters()))):
                codes, sf = of[part][e], of[f"{part}_sf"][e].view(torch.float8_e4m3fn)
                error = rows @ (nvfp4.dequantize(codes, sf, of[scale][e]) - weight).T
                errors[recipe] += (error.square().sum() / (rows @ weight.T).square().sum()).item()

    with watch(dense_modules(model), visit), torch.no_grad():
        for ids in batches(8, seed=1):  # others than it learned from
            model(ids)
    assert errors["gptq"] < 0.9 * errors["mse"]


def test_hooks_that_bring_a_layer_its_inputs_run_and_stay():
    """accelerate's hooks of a model on several GPUs replace `forward`."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Halves(hooks.ModelHook):
        def pre_forward(self, layer, x, *args, **kwargs):
            return (x / 2, *args), kwargs

    plain, hooked = make(qwen3_moe, torch.float32), make(qwen3_moe, torch.float32)
    for layer in plain.model.layers:
        layer.register_forward_pre_hook(lambda layer, args: (args[0] / 2, *args[1:]))
    for layer in hooked.model.layers:
        hooks.add_hook_to_module(layer, Halves())
    data = batches(2)
    want = plain(data[0]).logits
    assert torch.equal(hooked(data[0]).logits, want)
    made = gptq_model(hooked, data, progress=False)
    assert torch.equal(hooked(data[0]).logits, want)
    for name, tensors_of in gptq_model(plain, data, progress=False).items():
        for key, tensor in tensors_of.items():
            assert torch.equal(made[name][key], tensor)


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, capsys):
    """Interrupted after the second layer; the next call starts with the third and ends in the same bytes. A call that
    quantizes other layers starts from scratch."""
    source = folder(tmp_path, partial(qwen3_moe, num_hidden_layers=3))
    convert_gptq(source, tmp_path / "whole", batches(), CPU, progress=False)
    monkeypatch.setattr(module, "SAVE_EVERY", 0.0)
    ran, run = [], module.LayerWalk.run

    def counted(self, i):
        ran.append(i)
        if ran in ([0, 1, 2], [0, 1, 2, 0, 1, 2]):
            raise KeyboardInterrupt
        run(self, i)

    monkeypatch.setattr(module.LayerWalk, "run", counted)
    for options, done in ((replace(CPU, include=["*.1.*", "*.2.*"]), 1), (CPU, 2)):
        with pytest.raises(KeyboardInterrupt):
            convert_gptq(source, tmp_path / "new", batches(), options)
        assert not (tmp_path / "new").exists()
        assert f"{done} layers of experts are done, and lie in {tmp_path / '.new.gptq'}" in capsys.readouterr().err
    convert_gptq(source, tmp_path / "new", batches(), CPU, progress=False)
    assert ran == [0, 1, 2, 0, 1, 2, 2]
    same_tensors(tmp_path / "whole", tmp_path / "new")


def test_no_layer_is_run_that_nothing_needs(tmp_path, monkeypatch):
    """None after the last one to quantize. Patterns match the names in files, which differ from the modules'."""
    source, ran, run = folder(tmp_path, mixtral), [], module.LayerWalk.run
    monkeypatch.setattr(module.LayerWalk, "run", lambda self, i: (ran.append(i), run(self, i)))
    options = replace(CPU, include=["model.layers.0.block_sparse_moe.experts"])
    convert = module.convert_checkpoint
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        stop = lambda *args, dry_run=False, **kwargs: convert(*args, dry_run=True) if dry_run else 1 / 0
        patch.setattr(module, "convert_checkpoint", stop)
        convert_gptq(source, tmp_path / "new", batches(), options, progress=False)
    convert_gptq(source, tmp_path / "new", batches(), options, progress=False)  # all layers are done
    assert ran == [0]
    quantized = [name for name in tensors(tmp_path / "new") if name.endswith("weight_scale_2")]
    assert {name.split(".experts.")[0] for name in quantized} == {"model.layers.0.block_sparse_moe"}


def test_an_error_before_the_first_layer_leaves_nothing(tmp_path, monkeypatch):
    source = folder(tmp_path, qwen3_moe)
    with pytest.raises(ValueError, match="token ids from 1000000"):
        convert_gptq(source, tmp_path / "new", [torch.tensor([[10**6]])], CPU, progress=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 200_000))
    with pytest.raises(ValueError, match="200.0 KB free, about 242.8 KB are needed"):  # 160 KB, experts twice
        convert_gptq(source, tmp_path / "new", [torch.tensor([[10**6]])], CPU, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["text", "source", "version"])
def test_another_text_or_source_starts_anew(other, tmp_path, monkeypatch):
    source = folder(tmp_path, qwen3_moe)
    planned = module.convert_checkpoint(source, tmp_path / "new", CPU, dry_run=True)

    def at_once(*args, dry_run=False, **kwargs):
        if dry_run:
            return planned
        with pytest.raises(ValueError, match="is being written by another converter"):
            convert_gptq(source, tmp_path / "new", batches(), CPU, progress=False)
        1 / 0  # noqa: B018

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(module, "convert_checkpoint", at_once)
        if other == "version":  # another release may quantize otherwise
            patch.setattr(module, "__version__", "0.0")
            save = module.CodesFolder.save
            spoilt = lambda self, name, made: save(self, name, {k: torch.zeros_like(t) for k, t in made.items()})
            patch.setattr(module.CodesFolder, "save", spoilt)
        convert_gptq(source, tmp_path / "new", batches(seed=int(other == "text")), CPU, progress=False)
    if other == "source":
        files = list(source.glob("*.safetensors"))
        save_file({name: tensor * 1.5 for name, tensor in tensors(source).items()}, *files, {"format": "pt"})
    convert_gptq(source, tmp_path / "new", batches(), CPU, progress=False)
    convert_gptq(source, tmp_path / "want", batches(), CPU, progress=False)
    same_tensors(tmp_path / "new", tmp_path / "want")


def test_what_users_are_told(tmp_path, capsys):
    source, new = folder(tmp_path, qwen3_moe), tmp_path / "new"
    _, report = convert_gptq(source, new, batches(), CPU, progress=False)
    lines = " ".join(report.lines())
    assert "16 of 16 experts saw fewer than 8 rows" in lines and "192, would do" in lines
    assert list(module.GptqReport(1000, {"a": torch.tensor([512, 600])}, {"a": 64}).lines()) == []
    with pytest.raises(ValueError, match="does not quantize while a model loads: moe-nvfp4 quantize"):
        load(source, quantization_config=MoeNvfp4Config(recipe="gptq", calibration=batches()))
    with pytest.raises(ValueError, match="give calibration= texts or token ids"):
        swap_experts(load(source), recipe="gptq", progress=False)
    with pytest.raises(ValueError, match="recipe 'gptq' needs codes"):
        Options("gptq")
    command = ["quantize", str(source), str(tmp_path / "x"), "--device", "cpu"]
    assert main([*command, "--recipe", "gptq"]) == 2
    assert "name one with --text FILE" in capsys.readouterr().err
    assert main([*command, "--text", __file__]) == 2
    assert "--text would have no effect on recipe mse" in capsys.readouterr().err
    assert main([*command, "--windows", "3"]) == 2
    assert "--windows would have no effect on recipe mse" in capsys.readouterr().err
    assert main(["quantize", str(new), str(tmp_path / "x"), "--recipe", "gptq", "--text", __file__]) == 2
    assert "NVFP4 already" in capsys.readouterr().err


def test_few_tokens_are_said_with_the_numbers():
    with pytest.warns(
        UserWarning, match=r"16 of 16 experts saw fewer than 8 rows for each of their input columns \(512\)"
    ):
        swap_experts(make(qwen3_moe), recipe="gptq", calibration=torch.tensor([[3]]), progress=False)


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:.*experts saw fewer than 8 rows")
@pytest.mark.parametrize("state", [
    partial(torch.autocast, "cpu", torch.bfloat16), partial(default_dtype, torch.bfloat16),
    partial(default_dtype, torch.float64),
], ids=["autocast", "bf16", "fp64"])  # fmt: skip
def test_what_torch_is_set_to_changes_no_byte(state, tmp_path):
    """Neither of the codes of gptq, nor of what weighted learns, of models and of files."""
    source = folder(tmp_path, qwen3_moe, dtype=torch.float32)

    def made(out):
        found = {}
        for recipe in ("gptq", "weighted"):
            model = swap_experts(load(source, torch.float32), recipe=recipe, calibration=batches(), progress=False)
            found |= {f"{recipe} {key}": tensor for key, tensor in model.state_dict().items()}
        convert_gptq(source, tmp_path / out, batches(), CPU, progress=False)
        for name, layer in files_importance(source, batches(), device="cpu", progress=False).layers.items():
            found |= {f"{name}.{key}": tensor for key, tensor in vars(layer).items()}
        return found | tensors(tmp_path / out)

    want = made("want")
    with state():
        found = made("found")
    assert found.keys() == want.keys()
    assert [name for name, tensor in want.items() if as_bytes(found[name]) != as_bytes(tensor)] == []


@pytest.mark.filterwarnings("ignore:.*experts saw fewer than 8 rows")
@pytest.mark.parametrize("recipe", ["gptq", "weighted"])
def test_modules_that_were_compiled_in_place_are_observed(recipe):
    """Their code passes over hooks."""
    found = []
    for compiled in (False, True):
        model = make(qwen3_moe, torch.float32)
        for layer in [*model.model.layers] * compiled:
            layer.compile(backend="eager")
            layer.self_attn.compile(backend="eager")
        logits(model)
        given = dict(recipe=recipe, linears="attention", calibration=batches(), progress=False)
        found.append(swap_experts(model, **given).state_dict())
    assert [n for n, t in found[0].items() if as_bytes(t) != as_bytes(found[1][n])] == []
    torch.compiler.reset()


@pytest.mark.parametrize("family, recipe, message", [
    (llama4, "distill", "recipe distill cannot learn from Llama4TextExperts"),
    (qwen3_moe, "gptq", "has no model .'OfTheirOwnCode'"),
])  # fmt: skip
def test_a_dry_run_is_refused_as_the_run_is(family, recipe, message, tmp_path):
    """It printed a plan of what could not be learned from, and of files whose model transformers does not have."""
    source = folder(tmp_path, family)
    if family is qwen3_moe:
        edit_config(source, architectures=["OfTheirOwnCode"])
    for ask in (plan_gptq, partial(convert_gptq, batches=batches(1))):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            ask(source, tmp_path / "x", options=CPU, recipe=recipe)
    assert not list(tmp_path.glob("*x*"))


@pytest.mark.slow
def test_the_command_says_what_it_did(tmp_path, capsys, monkeypatch):
    """A dry run names the recipe; the time is that of all the work."""
    source = folder(tmp_path, qwen3_moe)
    assert main(["quantize", str(source), str(tmp_path / "x"), "--recipe", "gptq", "--dry-run", "--device", "cpu"]) == 0
    assert "48 expert matrices quantized (gptq)" in capsys.readouterr().out
    run = module.LayerWalk.run
    monkeypatch.setattr(module.LayerWalk, "run", lambda self, i: (time.sleep(0.7), run(self, i)))
    report, _ = convert_gptq(source, tmp_path / "new", batches(), CPU, progress=False)
    assert report.seconds > 1.4


def exact(family=qwen3_moe):
    """Make the weights' global scales powers of two, so that products do not round in any order."""
    model = family()
    for name, p in model.named_parameters():
        if ".experts." in name:
            p.data = (torch.randn_like(p) * 0.3).clamp_(-1.5, 1.5)
            p.data[:, 0, 0] = 1.5  # 6 * 256 * 2^-10
    return model


@pytest.mark.slow
def test_other_peoples_readers_see_the_same_numbers(tmp_path):
    """compressed-tensors and ModelOpt, bit for bit."""
    pytest.importorskip("compressed_tensors", reason="the compressed-tensors library is not installed")
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    torch.manual_seed(0)
    exact().bfloat16().save_pretrained(tmp_path / "dense")
    for dialect in ("modelopt", "compressed-tensors"):
        options = Options(dialect=dialect, device="cpu")
        convert_gptq(tmp_path / "dense", tmp_path / dialect, batches(), options, progress=False)
    ours, theirs = tensors(tmp_path / "modelopt"), tensors(tmp_path / "compressed-tensors")
    config = json.loads((tmp_path / "compressed-tensors/config.json").read_text())["quantization_config"]
    config.pop("moe_nvfp4")
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    stems = [name.removesuffix(".weight_scale_2") for name in ours if name.endswith("weight_scale_2")]
    assert len(stems) == 2 * 8 * 3
    for stem in stems:
        codes, sf, scale = (ours[f"{stem}.{s}"] for s in ("weight", "weight_scale", "weight_scale_2"))
        want = nvfp4.dequantize(codes, sf, scale)
        packed = NVFP4QTensor(torch.Size((codes.shape[0], codes.shape[1] * 2)), torch.float32, codes)
        found = packed.dequantize(dtype=torch.float32, scale=sf, double_scale=scale, block_sizes={-1: 16})
        assert torch.equal(found, want), stem
        state = {s: theirs[f"{stem}.{s}"] for s in ("weight_packed", "weight_scale", "weight_global_scale")}
        found = compressor.decompress(state, scheme)["weight"]
        assert torch.equal(found, want.to(found.dtype)), stem
