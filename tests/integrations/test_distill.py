"""The recipe distill on whole models: nearer than gptq on other texts, never worse, the same bytes in every way."""

from functools import partial

import pytest
import torch

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.cli import main
from moe_nvfp4.integrations.huggingface import distill, swap_experts
from moe_nvfp4.integrations.huggingface import gptq as module
from moe_nvfp4.integrations.huggingface.calibration import dense_modules
from moe_nvfp4.integrations.huggingface.gptq import convert_gptq, gptq_model
from moe_nvfp4.integrations.huggingface.hessians import HessianSums
from moe_nvfp4.integrations.huggingface.statistics import expert_rows
from moe_nvfp4.quantize.options import Options
from tests.models import (
    dbrx,
    deepseek,
    folder,
    gemma4,
    gpt_oss,
    granite,
    llama4,
    load,
    make,
    mixtral,
    nemotron_h,
    qwen3_moe,
    same_tensors,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*experts saw fewer than 8 rows")
CPU = Options(device="cpu")


@pytest.fixture
def few_steps(monkeypatch):
    """For tests that do not ask how near the outputs come."""
    monkeypatch.setattr(distill, "STEPS", 4)


def batches(n=8, seed=0):
    return list(torch.randint(0, 96, (n, 48), generator=torch.Generator().manual_seed(seed)).split(max(4, n // 4)))


FAMILIES = [qwen3_moe, mixtral, gpt_oss, granite, gemma4, nemotron_h, dbrx, deepseek]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_with_the_dense_weights_it_computes_what_transformers_does(family):
    """Routing, biases, layouts and gates, for every kind of module; and the targets are what the dense layer adds."""
    model = make(family, torch.float32)
    for name, (experts, layout) in dense_modules(model).items():
        calls = []
        with experts.register_forward_hook(lambda m, args, y: calls.append((*args, y))), torch.no_grad():  # noqa: B023
            model(batches(4)[0])
        ((x, index, weights, want),) = calls
        pairs = [torch.stack(w) for w in zip(*distill.dense_experts(experts, layout), strict=True)]
        found = distill.Experts(experts, layout, "bf16")(0, tuple(pairs), x.flatten(0, -2), index, weights)
        torch.testing.assert_close(found, want.flatten(0, -2), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("activations", ["nvfp4", "nvfp4_four_over_six"])
def test_with_quantized_activations_it_computes_what_the_layer_does(activations):
    """Codes of h may differ where sums in another order round to the other side."""
    model = make(qwen3_moe, torch.float32)
    (name, (experts, layout)), *_ = dense_modules(model).items()
    swapped = swap_experts(make(qwen3_moe, torch.float32), activations, progress=False).get_submodule(name)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    index = torch.randint(0, 8, (64, 2), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(64, 2, generator=torch.Generator().manual_seed(2))
    values = distill._values(dict(swapped.state_dict()), range(8), layout)
    found = distill.Experts(experts, layout, activations)(0, values, x, index, weights)
    with torch.no_grad():
        want = swapped(x, index, weights)
    assert (found - want).norm() < 0.02 * want.norm()
    plain = distill.Experts(experts, layout, "bf16")(0, values, x, index, weights)
    assert (plain - want).norm() > 0.05 * want.norm()


def some_experts(activations="bf16"):
    return distill.Experts(*dense_modules(make(qwen3_moe, torch.float32))["model.layers.0.mlp.experts"], activations)


def given(T, seed=0, chosen=2):
    """x [T, 64], whose columns are correlated, index and weights [T, chosen]."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(16, 64, generator=torch.Generator().manual_seed(9))
    x = torch.randn(T, 16, generator=g) @ mixing / 4 + torch.randn(T, 64, generator=g) / 4
    index = torch.stack([torch.randperm(8, generator=g)[:chosen] for _ in range(T)])
    return x, index, torch.rand(T, chosen, generator=g)


def dense(experts, rows):
    """What the experts give with the dense weights, in fp32."""
    pairs = zip(*distill.dense_experts(experts.module, experts.layout), strict=True)
    plain = distill.Experts(experts.module, experts.layout, "bf16")
    return plain(0, tuple(torch.stack(w) for w in pairs), *rows).detach()


def rows_of(target, *rows, weight=None):
    T = len(target)
    return distill.Rows(*rows, target, torch.ones(T) if weight is None else weight, torch.arange(T) >= T - T // 8)


def error_of(experts, made, rows):
    found = experts(0, distill._values(made, range(8), experts.layout), *rows)
    want = dense(experts, rows)
    return ((found - want).square().sum() / want.square().sum()).item()


def test_outputs_for_other_rows_are_nearer_than_by_gptq():
    """Where errors of experts can cancel, since each token chooses all of them. A third of the tokens has a target that
    none should learn, and no weight."""
    experts, rows = some_experts(), given(4500, chosen=8)
    sums = HessianSums()
    with torch.no_grad():
        for e, x, h in expert_rows(experts.module, experts.layout, *rows):
            sums("experts", experts.layout, e, x, h)
    gptq = sums.quantize("experts", experts.module, experts.layout, "gptq", "cpu")
    weight = (torch.arange(4500) % 3 > 0).float()
    target = torch.where(weight[:, None] > 0, dense(experts, rows), 10.0)
    made = distill.learn(experts, gptq, rows_of(target, *rows, weight=weight), "cpu")
    others = given(1000, seed=1, chosen=8)
    assert error_of(experts, made, others) < 0.98 * error_of(experts, gptq, others)


def test_each_token_is_learned_from_once(monkeypatch):
    """Or more often, if there are few: by whole steps, and never from a token that is held out."""
    for name, value in dict(STEPS=4, TOKENS=64).items():
        monkeypatch.setattr(distill, name, value)
    experts, seen = some_experts(), []
    for T, times in ((800, 10), (160, 4)):
        rows = rows_of(torch.zeros(T, 64), *given(T))
        monkeypatch.setattr(
            rows, "given", lambda which, device, rows=rows: seen.append(which) or type(rows).given(rows, which, device)
        )
        distill._learn_group(experts, range(8), start_of("mse"), rows, rows.target, "cpu")
        counts = torch.cat(seen).bincount(minlength=T)
        learned, held = counts[: T - T // 8], counts[T - T // 8 :]
        assert len(seen) == times and held.sum() == 0 and learned.sum() == 64 * times
        assert learned.max() - learned.min() <= 1
        seen.clear()


def start_of(recipe):
    swapped = swap_experts(make(qwen3_moe, torch.float32), recipe=recipe, progress=False)
    return {key: t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
            for key, t in swapped.model.layers[0].mlp.experts.state_dict().items()}  # fmt: skip


@pytest.mark.slow
def test_what_is_worse_on_rows_held_out_is_not_kept():
    """Expert 0's targets are noise for the rows to learn from, and its dense outputs for those held out; the other
    experts can be learned. Where all targets are noise, nothing changes."""
    experts, start, rows = some_experts(), start_of("mse"), given(1600)
    want = dense(experts, rows)
    noise = 0.5 * want.std() * torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    noise[1400:] = 0
    made = distill.learn(experts, start, rows_of(want + noise * (rows[1] == 0).any(dim=1)[:, None], *rows), "cpu")
    changed = [e for e in range(8) if any(not torch.equal(made[key][e], start[key][e]) for key in start)]
    assert 0 not in changed and len(changed) >= 4
    made = distill.learn(experts, start, rows_of(want + 20 * noise, *rows), "cpu")
    assert all(torch.equal(made[key], start[key]) for key in start)


@pytest.mark.parametrize("up, down, target, kept", [
    ((1.0, -0.9), (0.0, 0.0), 0.1, [(1, 0), (1, 0)]), ((1.0, -0.9), (0.0, 0.0), 0.0, [(0, 0), (0, 0)]),
    ((-5.0, 1.0), (0.0, 0.0), 1.0, [(0, 0), (1, 0)]), ((0.5, 0.0), (1.0, 0.0), 1.0, [(0, 1), (0, 0)]),
])  # fmt: skip
def test_learned_experts_are_judged_beside_each_other(up, down, target, kept):
    """Two experts give up + down, which were 0, for every token: each makes up for the other, and that is right, or the
    old ones were; one is wrong, and the other is judged without it; of the ways to be better the best one counts."""
    of = lambda numbers: torch.tensor(numbers).view(-1, 1, 1)

    def experts(first, values, x, index, weights):
        sums = enumerate(values[0] + values[1])
        return sum((index == first + j).any(dim=1)[:, None] * one for j, one in sums)

    T, old = 20, of((0.0, 0.0))
    everything = torch.full((T, 1), target), torch.ones(T), torch.ones(T, dtype=torch.bool)
    rows = distill.Rows(torch.ones(T, 1), torch.arange(2).expand(T, 2), torch.ones(T, 2), *everything)
    values = (old, old), (of(up), of(down))
    assert distill._better(experts, range(2), values, rows, rows.target, "cpu") == kept


def test_up_and_down_of_an_expert_are_taken_apart(monkeypatch, few_steps):
    choice = lambda e: (e % 2, e // 2 % 2)
    monkeypatch.setattr(distill, "_better", lambda experts, group, *_: [choice(e) for e in group])
    experts, start, rows = some_experts(), start_of("mse"), given(800)
    made = distill.learn(experts, start, rows_of(dense(experts, rows), *rows), "cpu")
    for e in range(8):
        taken = [not torch.equal(made[name][e], start[name][e]) for name in ("gate_up_proj", "down_proj")]
        assert taken == [bool(learned) for learned in choice(e)], e


@pytest.mark.parametrize("together", [1, 1 << 28])
def test_experts_that_too_few_tokens_reach_stay(together, monkeypatch):
    """Experts 0 and 1 are reached by none of the tokens held out, expert 1 by none of the others either."""
    monkeypatch.setattr(distill, "TOGETHER", together)
    experts, start, (x, index, weights) = some_experts(), start_of("mse"), given(800)
    held = torch.arange(800) >= 700
    index = index.masked_fill((index == 1) | held[:, None] & (index == 0), 8)
    made = distill.learn(experts, start, rows_of(dense(experts, (x, index, weights)), x, index, weights), "cpu")
    assert all(torch.equal(made[key][:2], start[key][:2]) for key in start)
    assert any(not torch.equal(made[key][2:], start[key][2:]) for key in start)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("together, chunk", [(1, 300), (1 << 28, 8192)])
def test_experts_in_groups(together, chunk, monkeypatch):
    """One expert after another, beside what the others give; and all at once. Rows in chunks, and all at once."""
    monkeypatch.setattr(distill, "TOGETHER", together)
    monkeypatch.setattr(distill, "CHUNK", chunk)
    experts, start, rows = some_experts(), start_of("mse"), given(1600)
    made = distill.learn(experts, start, rows_of(dense(experts, rows), *rows), "cpu")
    assert error_of(experts, made, given(400, seed=1)) < 0.97 * error_of(experts, start, given(400, seed=1))
    changed = nvfp4.unpack(made["gate_up_proj"]) != nvfp4.unpack(start["gate_up_proj"])
    assert 0.005 < changed.float().mean() < 0.3
    assert all(torch.equal(made[key], start[key]) for key in start if key.endswith(("_sf", "_scale")))


@pytest.mark.slow
@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss, mixtral], ids=lambda f: f.__name__)
def test_converted_and_swapped_models_are_the_same(family, tmp_path, few_steps):
    source = folder(tmp_path, family)
    report, _ = convert_gptq(source, tmp_path / "converted", batches(), CPU, progress=False, recipe="distill")
    assert report.recipe == "distill" and report.quantized > 0
    swapped = swap_experts(load(source), recipe="distill", calibration=batches(), progress=False)
    swapped.save_pretrained(tmp_path / "swap")
    same_tensors(tmp_path / "converted", tmp_path / "swap")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("save_every", [0.0, 1e9], ids=["states saved", "codes only"])
def test_an_interrupted_run_goes_on(save_every, tmp_path, monkeypatch, few_steps):
    """Interrupted in the third of four layers; with states from the second, or with codes alone, whose layers are run
    again, not learned."""
    source = folder(tmp_path, partial(qwen3_moe, num_hidden_layers=4))
    convert_gptq(source, tmp_path / "whole", batches(), CPU, progress=False, recipe="distill")
    monkeypatch.setattr(module, "SAVE_EVERY", save_every)
    learned, learn = [], distill.learn

    def counted(*args):
        learned.append(len(learned))
        if len(learned) == 3:
            raise KeyboardInterrupt
        return learn(*args)

    monkeypatch.setattr(distill, "learn", counted)
    with pytest.raises(KeyboardInterrupt):
        convert_gptq(source, tmp_path / "new", batches(), CPU, progress=False, recipe="distill")
    convert_gptq(source, tmp_path / "new", batches(), CPU, progress=False, recipe="distill")
    assert len(learned) == 3 + 2
    same_tensors(tmp_path / "whole", tmp_path / "new")


@pytest.mark.parametrize("how", ["added", "multiplied", "hooked"])
def test_targets_are_what_the_layer_lacks(how, monkeypatch, few_steps):
    """Of the second layer, computed from two models: the first layer's experts are dense, or dequantized. Granite
    multiplies what its experts give, and a user's hook may; there they are to give what the dense ones give."""
    family = granite if how == "multiplied" else mixtral
    model, data, seen = make(family, torch.float32), batches(), []
    if how == "hooked":
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_hook(lambda module, args, y: y * 0.5)
    if family is granite:
        for layer in model.model.layers:
            layer.residual_multiplier = 0.5
    learn = distill.learn
    monkeypatch.setattr(distill, "learn", lambda *args: (seen.append((args, learn(*args))), seen[-1][1])[1])
    gptq_model(model, data, progress=False, recipe="distill")
    (_, first), ((experts, _, rows, _), _) = seen
    layers, outputs = model.model.layers, {}

    def second(name, zero):
        """The output of the second layer, and what its experts get and give."""
        module, calls, after = experts.module, [], []
        seen = lambda m, args, y: calls.append((*args, y)) or (0 * y if zero else y)
        hooks = [module.register_forward_hook(seen, prepend=True),
                 layers[1].register_forward_hook(lambda m, args, y: after.append(y))]  # fmt: skip
        with torch.no_grad():
            for ids in data:
                model(ids)
        for hook in hooks:
            hook.remove()
        outputs[name] = torch.cat([y.flatten(0, -2) for y in after])
        return [torch.cat([part.flatten(0, -2) for part in parts]) for parts in zip(*calls, strict=True)]

    *_, given_by_dense = second("dense", zero=False)
    of_first, layout = seen[0][0][0].module, experts.layout
    w13, w2 = distill._values(first, range(4), layout)
    of_first.gate_up_proj.data.copy_(w13), of_first.down_proj.data.copy_(w2)
    x, index, weights, _ = second("quantized", zero=True)
    torch.testing.assert_close(rows.x, x, rtol=1e-4, atol=1e-5)
    assert torch.equal(rows.index, index)
    torch.testing.assert_close(rows.weights, weights, rtol=1e-4, atol=1e-5)
    want = outputs["dense"] - outputs["quantized"] if how == "added" else given_by_dense
    torch.testing.assert_close(rows.target, want, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_learned_is_said(tmp_path, capsys):
    with pytest.raises(NotImplementedError, match="use recipe gptq"):
        swap_experts(make(llama4), recipe="distill", calibration=batches(), progress=False)
    source = folder(tmp_path, qwen3_moe)
    assert main(["quantize", str(source), str(tmp_path / "x"), "--recipe", "distill", "--device", "cpu"]) == 2
    assert "--recipe distill learns from a text" in capsys.readouterr().err


@pytest.mark.slow
def test_no_gradient_mode_changes_the_result(few_steps):
    made = [gptq_model(make(mixtral, torch.float32), batches(), progress=False, recipe="distill")]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            made.append(gptq_model(make(mixtral, torch.float32), batches(), progress=False, recipe="distill"))
    for other in made[1:]:
        for name, tensors in made[0].items():
            assert all(torch.equal(other[name][key], tensor) for key, tensor in tensors.items())
