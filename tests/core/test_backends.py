"""Which backend runs where, and what users are told where nothing fast runs, on devices that exist only in tests."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from moe_nvfp4 import Gate, NVFP4Experts, backends, ops, reference
from moe_nvfp4.backends import Backend, Device, Problem, explain, named
from moe_nvfp4.kernels import backend
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.weights import read_spec
from tests.common import THRESHOLDS, relative_error

ALL = frozenset({"cutlass", "tvm_ffi", "triton"})
GPUS = {name: Device("cuda", name, capability, ALL) for name, capability in [
    ("A100", (8, 0)), ("RTX 3090", (8, 6)), ("RTX 4090", (8, 9)), ("H200", (9, 0)), ("B200", (10, 0)),
    ("B300", (10, 3)), ("RTX 5090", (12, 0)), ("V100", (7, 0)),
]}  # fmt: skip


FOUR_OVER_SIX = dict(activations="nvfp4_four_over_six")


def problem(**changes):
    return Problem("experts", 8, 2048, 768, "silu", "bf16", torch.bfloat16)._replace(**changes)


def chosen(device, **changes):
    return explain(problem(**changes), device).backend.name


def test_linears_that_no_one_can_prepare_run_on_triton_kernels(monkeypatch):
    """Such linears get their weights from a hook in each call."""
    seen, linear = [], NVFP4Linear(32, 16)
    monkeypatch.setattr(type(named("portable")), "linear", lambda self, x, weights: seen.append(weights))
    monkeypatch.setattr(Device, "of", staticmethod(lambda device: Device("cpu", packages=frozenset({"triton"}))))
    named("sm90").linear(torch.randn(2, 32).bfloat16(), linear.weights)
    assert seen[0].matrix.codes is linear.weight and seen[0].matrix.layout is None


def test_the_device_table():
    w4a4 = dict(activations="nvfp4")
    assert chosen(GPUS["H200"]) == chosen(GPUS["H200"], **w4a4) == "sm90"
    assert chosen(GPUS["H200"], fused=False) == "sm90"
    assert chosen(GPUS["B200"], **w4a4) == chosen(GPUS["B300"], **w4a4) == "sm100"
    for name in ("A100", "RTX 3090", "RTX 4090", "RTX 5090"):
        linear = dict(kind="linear", num_experts=1, hidden_size=8192)
        for changes in (dict(), linear | dict(intermediate_size=8192), dict(fused=False)):
            assert chosen(GPUS[name], **changes) == "sm80"
            assert chosen(replace(GPUS[name], packages=frozenset({"triton"})), **changes) == "portable"
        smaller = linear | dict(intermediate_size=8176)
        for changes in (dict(dtype=torch.float16), dict(hidden_size=2056), dict(fused=False, **w4a4), smaller):
            assert chosen(GPUS[name], **changes) == "portable"
        for changes in (w4a4, FOUR_OVER_SIX):
            assert chosen(GPUS[name], **changes) == ("portable" if name == "RTX 5090" else "sm80")
        assert chosen(GPUS[name], dtype=torch.float32) == "reference"
    assert chosen(GPUS["B200"]) == chosen(GPUS["B300"], fused=False) == "sm100"
    assert chosen(GPUS["B200"], dtype=torch.float16) == "portable"
    assert chosen(GPUS["B200"], kind="linear") == "sm100"
    assert chosen(GPUS["H200"], kind="linear") == chosen(GPUS["H200"], kind="linear", **w4a4) == "sm90"
    assert chosen(GPUS["H200"], dtype=torch.float16) == "portable"
    assert chosen(Device("cuda", "MI300X", packages=ALL)) == "portable"
    assert (chosen(GPUS["H200"], **FOUR_OVER_SIX), chosen(GPUS["B200"], **FOUR_OVER_SIX)) == ("sm90", "sm100")
    assert chosen(GPUS["V100"]) == chosen(Device("mps")) == chosen(Device("meta")) == "reference"


@pytest.mark.parametrize(
    "device, changes, backend, reason",
    [
        ("H200", dict(dtype=torch.float32), "sm90", "takes bfloat16 activations, not float32: run the model in"),
        ("H200", dict(hidden_size=2056), "sm90", "takes sizes that are multiples of 16, not H = 2056 and I = 768"),
        ("H200", dict(num_experts=1025), "sm90", "takes up to 1024 experts, not 1025"),
        ("H200", dict(fused=False, activations="nvfp4"), "sm90", "use activations='bf16'"),
        ("B200", dict(dtype=torch.float16), "sm100", "takes x in bfloat16 where activations='bf16', not"),
        ("B200", dict(activations="nvfp4", intermediate_size=776), "sm100", "of 16, not H = 2048 and I = 776"),
        ("B200", dict(), "sm90", r"runs on compute capability 9.0 \(H100, H200\)"),
        ("RTX 4090", dict(), "sm100", r"runs on compute capability 10.0 or 10.3 \(B200, B300\)"),
        ("B200", dict(), "sm80", r"runs on compute capability 8.0 or 8.6 or 8.9 or 9.0 or 12.0 \(A100, RTX 30"),
        ("A100", dict(dtype=torch.float16), "sm80", "takes bfloat16 activations, not float16: run the model in"),
        ("RTX 5090", dict(activations="nvfp4"), "sm80", "multiplies NVFP4 rows as bf16, where the portable kernels"),
        ("A100", dict(), "cpu", "runs on CPUs"),
        ("A100", dict(dtype=torch.float32), "portable", "takes bfloat16 and float16 activations, not float32: run"),
        ("V100", dict(), "portable", "runs on compute capability 8.0 and above"),
    ],
)
def test_each_says_why_not(device, changes, backend, reason):
    choice = explain(problem(**changes), GPUS[device])
    assert choice.backend.name != backend
    with pytest.raises(ValueError, match=f"BACKEND={backend} on {device} .*: {backend} .*{reason}.* or unset"):
        explain(problem(**changes), GPUS[device], forced=backend)


def test_what_is_not_installed_is_named():
    for name, package in (("H200", "cutlass"), ("B200", "cutlass and tvm_ffi")):
        bare = Device("cuda", name, GPUS[name].capability)
        reasons = dict(explain(problem(activations="nvfp4"), bare).rejected)
        assert f"needs {package}, not installed: pip install moe-nvfp4[gpu]" in " ".join(reasons.values())


def test_packages_that_are_too_old_are_named(monkeypatch):
    """vLLM before 0.32 brings a CuTe DSL that lacks modules of the kernels."""
    for version, usable in (("4.6.0", False), ("4.7.1", False), ("4.8.0", True), ("4.10.0.dev1", True), ("5.0", True)):
        monkeypatch.setattr(backend.metadata, "version", lambda name, version=version: version)
        monkeypatch.setattr(backend, "find_spec", lambda name: name)
        found = Device.of.__wrapped__(torch.device("cpu"))
        gpu = replace(GPUS["H200"], packages=found.packages, old=found.old)
        choice = explain(problem(), gpu)
        assert choice.backend.name == ("sm90" if usable else "portable")
        reason = f"needs nvidia-cutlass-dsl 4.8 or newer, not {version}: pip install -U 'nvidia-cutlass-dsl>=4.8"
        assert usable or reason in dict(choice.rejected)["sm90"]

        monkeypatch.setattr(Device, "of", staticmethod(lambda device, gpu=gpu: gpu))
        for asked, slower in ((problem(), not usable), (problem(dtype=torch.float16), False)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                backends._select.__wrapped__(asked, torch.device("cpu"), None)
                backends._select.__wrapped__(asked, torch.device("cpu"), "portable")
            backends._warn.cache_clear()
            assert [f"portable kernels: sm90 {reason}" in str(w.message) for w in caught] == [True] * slower
        monkeypatch.undo()


@pytest.mark.slow
def test_variables_that_nothing_reads_are_said():
    code = "import moe_nvfp4.backends"
    environment = os.environ | {"MOE_NVFP4_BACKENDS": "cpu", "MOE_NVFP4_CPU": "portable"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stderr.count("is set, and nothing reads it") == 1
    assert "MOE_NVFP4_BACKENDS is set, and nothing reads it: the variables are MOE_NVFP4_BACKEND, " in said.stderr


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="BACKEND=hopper is unknown: the backends are sm90, sm100, .*reference"):
        explain(problem(), GPUS["H200"], forced="hopper")
    for forced in (None, "sm90", "reference"):
        with pytest.raises(ValueError, match="activations.*'int4'"):
            explain(problem(activations="int4"), GPUS["H200"], forced)


class Nothing(Backend):
    """A backend that cannot run on this machine; tests choose the reason."""

    name, device_type = "nothing", "cpu"

    def unavailable(self, device):
        return None if device.type == "cpu" else "runs on CPUs"

    def unsupported(self, device, problem):
        return "is waiting for the next release: use activations='nvfp4'" if problem.activations == "bf16" else None


@pytest.fixture
def gpu(monkeypatch):
    """This machine's CPU counts as a GPU that only `Nothing` and the reference know."""
    monkeypatch.delenv("MOE_NVFP4_BACKEND", raising=False)
    monkeypatch.setattr(backends, "BACKENDS", (Nothing(), backends.REFERENCE))
    backends.forget()
    yield
    monkeypatch.undo()
    backends.forget()


def layers():
    torch.manual_seed(0)
    experts = NVFP4Experts.from_dense(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
    return experts, lambda x: experts(x, torch.tensor([[0], [1], [1]]), torch.ones(3, 1))


@pytest.mark.slow
def test_the_reference_warns_once_for_each_reason(gpu, monkeypatch):
    (experts, call), x, linear = layers(), torch.randn(3, 32), NVFP4Linear(32, 16)
    with pytest.warns(UserWarning, match="4-bit experts on cpu run as plain torch.*use activations='nvfp4'") as caught:
        for dtype in (torch.float32, torch.bfloat16):  # another choice, the same reason
            call(x.to(dtype))
        call(x)
    assert len(caught) == 1 and "MOE_NVFP4_BACKEND=reference silences" in str(caught[0].message)
    with pytest.warns(UserWarning, match="4-bit linears on cpu"):
        linear(x)
    assert "backend='reference'" in repr(experts) and "backend='reference'" in repr(linear)
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "reference")
    backends.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(x), linear(x), repr(experts)


@pytest.mark.slow
def test_a_compiled_call_chooses_by_the_problem(gpu):
    """torch 2.13 replaces a NamedTuple that it takes for a constant by an empty tuple."""
    choose = lambda x, p: x + len(backends.selected(p, x.device).name)
    compiled = torch.compile(choose, backend="eager", fullgraph=True)
    for p in (problem(activations="nvfp4"), problem(kind="linear", activations="nvfp4")):
        assert compiled(torch.zeros(1), p) == len("nothing")
    with pytest.warns(UserWarning, match="run as plain torch"):
        assert compiled(torch.zeros(1), problem()) == len("reference")


@pytest.mark.slow
def test_a_compiled_call_asks_what_an_eager_one_asks(gpu):
    """Every field reaches the backend, and its layout comes back."""
    seen = []

    class Packed(Nothing):
        layout = "another"

        def unsupported(self, device, problem):
            seen.append(problem)

    asked = Problem("experts", 3, 48, 32, "raw", "nvfp4", torch.float16, fused=False)
    with backends.registered(Packed()):
        assert backends.selected_now(asked, torch.device("cpu")) == ("nothing", "another")
        choose = torch.compile(lambda x: x + len(backends.selected(asked, x.device).layout), backend="eager")
        backends.forget()
        assert choose(torch.zeros(1)) == len("another")
    assert seen == [asked, asked]


def test_choices_follow_the_module_and_the_variable(gpu, monkeypatch):
    """When its dtype, its activations or its device change, and when MOE_NVFP4_BACKEND does."""

    class Half(Nothing):
        name = "half"

        def unsupported(self, device, problem):
            return None if problem.dtype == torch.bfloat16 else "takes bfloat16"

        def experts(self, x, ids, weights, w):
            return torch.full_like(x, 7.0)

    (experts, call), x = layers(), torch.randn(3, 32)
    with backends.registered(Half()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert call(x.bfloat16()).unique().tolist() == [7.0] and "backend='half'" in repr(experts)
        assert relative_error(call(x), want := call(x)) == 0 and len(want.unique()) > 7
        monkeypatch.setenv("MOE_NVFP4_BACKEND", "reference")
        assert relative_error(call(x.bfloat16()), want) < 0.05
        monkeypatch.delenv("MOE_NVFP4_BACKEND")
        assert call(x.bfloat16()).unique().tolist() == [7.0]
        experts.post_expert_norm = torch.nn.Identity()
        assert not experts.backend().unsupported(Device("cpu"), problem())
        experts.activations = "nvfp4"
        assert experts.backend(torch.float32).name == "nothing"
    assert experts.backend().name == "nothing"
    assert "backend" not in repr(experts.to("meta"))


@pytest.mark.parametrize("activations, width, used", [("nvfp4", 32, 4), ("bf16", 32, 0), ("nvfp4", 40, 0)])
def test_stages_run_one_after_the_other(activations, width, used, monkeypatch):
    """A Blackwell GPU runs NVFP4 rows of supported widths; the reference runs the others."""
    calls = []

    class Blackwell(type(backends.named("sm100"))):
        layout = None  # the reference reads the checkpoint's

        def unavailable(self, device):
            return None

        @property
        def functions(self):
            class Functions:
                def __getattr__(self, name):
                    return lambda *arguments: calls.append(name) or getattr(reference, name)(*arguments)

            return Functions()

    monkeypatch.delenv("MOE_NVFP4_BACKEND", raising=False)
    experts = NVFP4Experts.from_dense(torch.randn(2, 2 * width, 32), torch.randn(2, 32, width), activations=activations)
    experts.post_expert_norm = torch.nn.Identity()
    args = torch.randn(3, 32), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    want = experts(*args)
    with backends.registered(Blackwell()):
        assert relative_error(experts(*args), want) < THRESHOLDS["w4a4"]
    assert calls == ["quantize_rows", "gemm1_swiglu", "quantize_rows", "gemm2_combine"][:used]


def test_report(monkeypatch):
    for forced, runs in (("reference", 4), ("portable", 0)):
        monkeypatch.setenv("MOE_NVFP4_BACKEND", forced)
        found = {row.backend: row for row in backends.report() if str(row.device) == "cpu"}
        assert len(found[forced].runs) == sum(len(row.runs) for row in found.values()) == runs
        assert found["cpu"].reason == f"MOE_NVFP4_BACKEND={forced} is set"
    monkeypatch.delenv("MOE_NVFP4_BACKEND")
    rows = backends.report()
    assert [row.backend for row in rows[: len(backends.BACKENDS)]] == [b.name for b in backends.BACKENDS]
    assert all(row.runs or row.reason for row in rows)
    cpu = [row for row in rows if str(row.device) == "cpu"]
    assert sorted(name for row in cpu for name in row.runs) == [
        "experts W4A16", "experts W4A4", "linears W4A16", "linears W4A4"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "forced", "runs"), [(None, "", True), ("gave wrong results", "", False), (None, "reference", False)]
)
def test_routers_run_on_kernels_that_are_right(reason, forced, runs, monkeypatch):
    monkeypatch.setattr(type(named("portable")), "unavailable", lambda self, device: None)
    monkeypatch.setattr(backends.proof, "objection", lambda backend, problem, device: reason)
    monkeypatch.setenv("MOE_NVFP4_BACKEND", forced)
    backends.forget()
    assert backends.has_router(torch.device("cpu")) is runs
    monkeypatch.undo()
    backends.forget()


def test_the_report_of_a_forced_backend(gpu, monkeypatch):
    """What it can run, and why not the rest, which would end in an error."""
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "nothing")
    nothing = backends.report()[0]
    assert nothing.runs == ("experts W4A4", "linears W4A4")
    assert nothing.reason == "is waiting for the next release: use activations='nvfp4'"


@pytest.mark.parametrize("at_once", [1, 1000, 1 << 26])  # one expert at a time, two, all
def test_merged_codes_in_pieces(at_once, monkeypatch):
    """The nearest of all 16 values, in float64, for each weight of each expert."""
    monkeypatch.setattr(backends, "_AT_ONCE", at_once)
    E, N, K, columns, r = 5, 15, 32, 28, 3  # 480 weights each; the last columns are padding
    codes = torch.randint(256, (E, N, K // 2), dtype=torch.uint8)
    sf = (torch.rand(E, N, K // 16) * 4 + 1).to(torch.float8_e4m3fn)
    scale, a, b = torch.rand(E, N) + 0.5, torch.randn(E, r, columns), torch.randn(E, N, r) * 3
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    worth = lambda codes: values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    step = sf.double().repeat_interleave(16, -1) * scale.double()[..., None]
    merged = worth(codes) * step
    merged[..., :columns] += b.double() @ a.double()
    nearest = values[(merged[..., None] - values * step[..., None]).abs().argmin(-1)]
    assert torch.equal(worth(backends.merged_codes(codes, sf, scale, a, b)), nearest)


# ---- what travels through an op ------------------------------------------------------------------


@pytest.mark.parametrize("layout", [None, "sm90"])
@pytest.mark.parametrize("gate", [Gate(), Gate("silu", 1.702, 7.0, 1.0, True), Gate("relu2", gated=False), Gate("raw")])
def test_specs_come_back(gate, layout):
    from dataclasses import replace

    w = layers()[0].weights
    w = replace(w, gate=gate, w2=w.w2._replace(N=64, K=48, layout=layout), activations="nvfp4")
    assert read_spec(w.spec("cpu")) == ("cpu", "nvfp4", (64, 48), layout, gate, ())


def test_ops_refuse_what_they_were_not_made_for():
    experts, x = layers()[0], torch.randn(3, 32)
    args = x, torch.tensor([[0], [1], [1]]), torch.ones(3, 1), None, None, experts.weights.tensors()
    with pytest.raises(ValueError, match="not of version 3"):
        ops.experts(*args, experts.weights.spec("cpu").replace('"version": 3', '"version": 1'))
    with pytest.raises(ValueError, match="the sm90 kernels were chosen for tensors on cpu: sm90 runs on compute"):
        ops.experts(*args, experts.weights.spec("sm90"))
