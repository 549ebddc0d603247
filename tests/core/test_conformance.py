"""The conformance suite: right implementations pass, and each case catches the mistake that it is for."""

import json
import math
import sys

import pytest
import torch
from safetensors.torch import load_file

from moe_nvfp4.conformance import __main__ as runner
from moe_nvfp4.conformance import adapters, expected, vectors
from moe_nvfp4.format import dequantize, quantize

CPU = torch.device("cpu")
SMALL = [name for name in vectors.RECIPES if name != "2880"]


@pytest.fixture(scope="module")
def wanted():
    cases = {}

    def want(name):
        if name not in cases:
            case = vectors.make(name)
            cases[name] = case, expected.expected(case)
        return cases[name]

    return want


def test_numbers_of_the_format():
    """The tables of the loop, against torch's e4m3 and this library's codes."""
    bytes_ = torch.arange(127, dtype=torch.uint8)
    assert torch.equal(torch.from_numpy(expected.E4M3[:127]), bytes_.view(torch.float8_e4m3fn).double())
    case = vectors.make("all scales")
    for rows, values in expected.weights(case.codes2[0], case.sf2[0], [case.down_scale[0]]):
        parts = (torch.from_numpy(a[0][rows]) for a in (case.codes2, case.sf2))
        assert torch.allclose(
            torch.from_numpy(values), dequantize(*parts, float(case.down_scale[0])).double(), rtol=1e-6
        )


def test_round_trip_is_quantizing():
    x = torch.randn(5, 64) * torch.logspace(-3, 0, 5)[:, None]
    scale = 2.0**-9
    codes, sf, _ = quantize(x, scale)
    assert torch.allclose(
        torch.from_numpy(expected.round_trip(x.double().numpy(), scale)), dequantize(codes, sf, scale).double()
    )


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2"])
def test_gates_and_their_bounds(kind):
    """Against torch; and errors of the inputs move h by no more than the variance says."""
    z = torch.linspace(-9, 9, 400, dtype=torch.float64).view(20, 20)
    dz = torch.rand_like(z) / 1000
    gate = {"kind": kind}
    h, variance = (torch.from_numpy(t) for t in expected.between(z.numpy(), dz.numpy() ** 2, gate))
    g, u = z.chunk(2, dim=1)
    F = torch.nn.functional
    right = {"silu": lambda: F.silu(g) * u, "gelu_tanh": lambda: F.gelu(g, approximate="tanh") * u,
             "relu2": lambda: F.relu(z) ** 2}[kind]()  # fmt: skip
    assert torch.allclose(h, right, rtol=1e-12, atol=1e-12)
    for seed in range(20):
        torch.manual_seed(seed)
        moved = z + dz * torch.randint(-1, 2, z.shape)
        other = torch.from_numpy(expected.between(moved.numpy(), dz.numpy(), gate)[0])
        assert ((other - h).abs() <= 2**0.5 * variance.sqrt() + 1e-5).all()  # of two errors, and of the second order


RIGHT = ["moe_nvfp4, cpu", "moe_nvfp4, reference", "transformers, grouped_mm, dense weights",
         "transformers, eager, dense weights", "compressed-tensors' dequantization, torch"]  # fmt: skip


@pytest.mark.parametrize("implementation", RIGHT)
def test_right_implementations(implementation, wanted):
    adapter = adapters.ADAPTERS[implementation]
    if reason := adapter.unavailable(CPU):
        pytest.skip(reason)
    found = [runner.judge(*wanted(name), adapter.function, CPU) for name in SMALL]
    assert [f for f in found if f.right is False] == []
    assert sum(f.right is True for f in found) >= 20


@pytest.mark.slow
def test_sizes_of_gpt_oss(wanted):
    for implementation in RIGHT[:3]:
        assert runner.judge(*wanted("2880"), adapters.ADAPTERS[implementation].function, CPU).right


def right(given):
    return adapters.ADAPTERS["moe_nvfp4, reference"].function(given)


def changed(**changes):
    """A function that computes rightly with other inputs."""
    return lambda given: right(given._replace(**{name: change(given) for name, change in changes.items()}))


def flushed(sf):
    return sf.masked_fill(sf < 8, 0)


def reciprocals(given):
    return 1 / given.up_scale


def by_erf(given):
    """Gelu by its exact formula, in float64."""
    (w13, w2), y = adapters._exact(given), given.x.double() * 0
    for t, ids in enumerate(given.ids.tolist()):
        for e, p in zip(ids, given.routing[t].tolist(), strict=True):
            g, u = (w13[e] @ given.x[t].double()).chunk(2)
            y[t] += p * (w2[e] @ (torch.nn.functional.gelu(g) * u))
    return y


def last_of_each(given):
    """Routing weights as a table [T, E] holds them, into which they were written without adding."""
    same = (given.ids[:, :, None] == given.ids[:, None, :]).triu(1).any(-1)
    return given.routing.masked_fill(same, 0)


MISTAKES = {
    "separate scales": changed(up_scale=lambda g: g.gate_scale),
    "small scales": changed(up_scale=reciprocals, gate_scale=reciprocals, down_scale=lambda g: 1 / g.down_scale),
    "large scales": changed(up_scale=lambda g: g.up_scale.half().float().clamp(max=1)),
    "biases": changed(bias13=lambda g: torch.zeros_like(g.bias13)),
    "gpt-oss": changed(gate=lambda g: g.gate | {"limit": math.inf}),
    "clamped silu": changed(gate=lambda g: {"kind": "silu"}),
    "gelu": changed(gate=lambda g: {"kind": "silu", "alpha": 1.702}),
    "gelu of -3.5": by_erf,
    "twice": changed(routing=last_of_each),
    "negative weights": changed(routing=lambda g: g.routing.abs()),
    "relu2": lambda given: right(given) ** 2,
    "absent experts": changed(ids=lambda g: g.ids % len(g.up_scale)),  # as Python's index -1: the last expert
    "nobody": changed(ids=lambda g: g.ids.clamp(min=0)),
    "five experts": changed(ids=lambda g: g.ids & 3),
    "sixty experts": changed(ids=lambda g: g.ids & 31),
    "one token each": changed(ids=lambda g: g.ids.sort(dim=0).values),
    "all experts": lambda given: right(given._replace(ids=given.ids[:, :4], routing=given.routing[:, :4])),
    "many tokens": lambda given: right(given._replace(x=torch.cat([given.x[:256], given.x[256:] * 0]))),
    "odd sizes": changed(x=lambda g: torch.cat([g.x[:, :192], g.x[:, 192:] * 0], dim=1)),
    "subnormal scales": changed(sf13=lambda g: flushed(g.sf13)),
    "all scales": changed(sf13=lambda g: g.sf13.clamp(max=0x77)),
    "zero blocks": changed(sf2=lambda g: g.sf2.masked_fill(g.sf2 == 0, 0x38)),
    "W4A4": changed(x_scale=lambda g: None, h_scale=lambda g: None),
    "plain": changed(codes13=lambda g: g.codes13 >> 4 | (g.codes13 & 15) << 4),
    "one token": changed(routing=lambda g: g.routing / g.routing.sum(-1, keepdim=True)),
    "one for all": lambda given: right(given._replace(x=given.x.flip(0))),
    "one expert": lambda given: right(given).half().bfloat16() + 0.02,
}


@pytest.mark.parametrize("name", SMALL)
def test_each_case_catches_a_mistake(name, wanted):
    found = runner.judge(*wanted(name), MISTAKES[name], CPU)
    assert found.right is False and found.why, found
    assert runner.judge(*wanted(name), right, CPU).right


@pytest.mark.parametrize("scale", ["x_scale", "h_scale"])
def test_each_expert_has_static_scales_of_its_own(scale, wanted):
    mistake = changed(**{scale: lambda g: getattr(g, scale)[:1].repeat(len(g.up_scale))})
    assert runner.judge(*wanted("W4A4"), mistake, CPU).right is False


def test_one_wrong_element_is_found(wanted):
    """Its error is small beside the norm, and beyond the bound."""

    def function(given):
        y = right(given).double()
        y[3, 5] += 1.5 * bound[3, 5]
        return y

    bound = wanted("many tokens")[1].bound
    found = runner.judge(*wanted("many tokens"), function, CPU)
    assert found.right is False and found.why.startswith("element [3, 5] is") and found.error < found.limit


def test_bf16_everywhere_is_within_the_bounds(wanted):
    """An implementation that rounds all that may be rounded."""

    def function(given):
        w13, w2 = (w.bfloat16() for w in adapters._exact(given))
        y = torch.zeros_like(given.x)
        for t, ids in enumerate(given.ids.tolist()):
            for e, p in zip(ids, given.routing[t], strict=True):
                g, u = (w13[e] @ given.x[t]).chunk(2)
                y[t] += p.bfloat16() * (w2[e] @ (torch.nn.functional.silu(g.float()) * u.float()).bfloat16())
        return y

    for name in ("plain", "separate scales", "all experts", "all scales", "zero blocks"):
        assert runner.judge(*wanted(name), function, CPU).right, name


def test_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "def experts(given): return given.x\ndef none(given): raise NotImplementedError('no')"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(runner, "RECIPES", {name: vectors.RECIPES[name] for name in ("plain", "W4A4")})
    assert runner.main(["mine:experts", "mine:none", "--json", "found.json"]) == 1
    said = capsys.readouterr().out
    assert "mine:experts: 0 right, 2 wrong, 0 not run" in said and "not run: W4A4: no" in said
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [r["name"] for r in results] == ["mine:experts", "mine:none"] and results[0]["cases"][0]["right"] is False
    assert runner.main(["moe_nvfp4, reference"]) == 0
    assert runner.main(["mine"]) == 2 and "neither MODULE:FUNCTION nor an adapter" in capsys.readouterr().err
    assert runner.main(["--write", "cases"]) == 0
    files = load_file(tmp_path / "cases/plain.safetensors")
    assert files["y"].dtype == torch.float64 and files["codes13"].shape == (8, 256, 128)


@pytest.mark.parametrize("result, why", [
    (lambda y: None, "NoneType"), (lambda y: (y,), "tuple"), (lambda y: y.float().numpy(), "ndarray"),
    (lambda y: y.to(torch.complex64), "complex64"), (lambda y: y.long(), "int64"), (lambda y: y.to("meta"), "on meta"),
    (lambda y: y.to_sparse(), "sparse"), (lambda y: sys.exit(0), "SystemExit"), (lambda y: y.T, "shape"),
    (lambda y: y * math.nan, "NaN"),
], ids=["none", "tuple", "array", "complex", "integers", "meta", "sparse", "exit", "transposed", "nan"])  # fmt: skip
def test_results_of_another_kind(result, why, wanted):
    """They are wrong, and end nothing: other implementations are judged."""
    found = runner.judge(*wanted("plain"), lambda given: result(right(given)), CPU)
    assert found.right is False and why in found.why, found


def test_functions_that_change_their_inputs(wanted):
    """Such as those that bring weights into another layout in place: the next one gets the case as it was."""

    def function(given):
        y = right(given)
        for tensor in given:
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        return y

    for implementation in (function, right):
        assert runner.judge(*wanted("absent experts"), implementation, CPU).right


@pytest.mark.parametrize("arguments, message", [
    (["mine:none"], "no case was run"), (["mine:number"], "is 3, no function"), (["mine:Experts"], "no function"),
    (["moe_nvfp4, reference", "--device", "nothing"], "'nothing' is not a device"),
    (["moe_nvfp4, reference", "--device", "meta"], "'meta' has shapes but no numbers"),
    (["moe_nvfp4, reference", "--json", "there/is/none.json"], "cannot be written"),
    (["--write", "mine.py/cases"], "Not a directory"),
])  # fmt: skip
def test_what_cannot_be_run_is_no_success(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "def none(given): raise NotImplementedError('no')\nnumber = 3\nclass Experts: pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(runner, "RECIPES", {"plain": vectors.RECIPES["plain"]})
    assert runner.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_other_numbers_are_noticed(monkeypatch):
    monkeypatch.setitem(vectors.CHECKSUMS, "plain", "0" * 64)
    with pytest.raises(RuntimeError, match="'plain' has other numbers on this machine"):
        vectors.make("plain")
