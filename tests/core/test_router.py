"""A router's choice in one launch: the experts that torch's stable sort puts first, where and when it is asked for; and
its linear."""

import copy
import pickle
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moe_nvfp4 import router
from moe_nvfp4.integrations.huggingface import swap_experts
from tests import models
from tests.common import THRESHOLDS, on_gpu, relative_error

pytest.importorskip("triton", reason="the kernel is Triton's")

SPECIAL = (-torch.inf, torch.inf, torch.nan, -torch.nan, 0.0, 1e-30, -3.0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def here(monkeypatch):
    """As if this device were a GPU whose kernels are proven."""
    monkeypatch.setattr(router, "has_router", lambda device: True)


def taken(work, op=router.op, torchs=(torch.ops.aten.topk,)):
    """(what `work` returns, how often it ran `op`, and how often torch's)."""

    class Count(TorchDispatchMode):
        own = torchs = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.own += func is op
            self.torchs += func.overloadpacket in torchs
            return func(*args, **kwargs or {})

    with Count() as count:
        made = work()
    return made, count.own, count.torchs


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, 4), N=st.integers(1, 300), dtype=st.sampled_from(router._DTYPES),
    special=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(SPECIAL))), coarse=st.booleans(), data=st.data(),
)  # fmt: skip
def test_it_is_a_stable_sort(rows, N, dtype, special, coarse, data):
    k = data.draw(st.integers(1, min(N, router.MOST_TAKEN)))
    scores = torch.randn(2, rows, N, generator=torch.Generator().manual_seed(N))
    scores = ((2 * scores).round() + 0.0 if coarse else scores).to(dtype)  # many are equal
    for at, value in special if rows else ():
        scores.view(-1)[at % scores.numel()] = value
    values, indices = router.op(scores.to(DEVICE), k)
    want = scores.float().sort(dim=-1, descending=True, stable=True)
    assert values.dtype == dtype and torch.equal(indices.cpu(), want.indices[..., :k])
    assert torch.equal(values.cpu().float().nan_to_num(7), want.values[..., :k].nan_to_num(7))


def test_rows_that_are_not_contiguous():
    scores = torch.randn(9, 3, 40, device=DEVICE).transpose(0, 1)[:, ::2]
    values, indices = router.op(scores, 5)
    assert torch.equal(values, scores.topk(5).values) and torch.equal(scores.gather(-1, indices), values)


@pytest.mark.parametrize("call", [
    lambda x: torch.topk(x, 3), lambda x: torch.topk(x, k=3, dim=-1, sorted=False), lambda x: x.topk(3, 1),
    lambda x: x.topk(3, largest=True),
])  # fmt: skip
def test_what_is_taken(here, call):
    x = torch.randn(5, 16, device=DEVICE)
    with router.OneLaunch():
        found, own, torchs = taken(lambda: call(x))
    assert (own, torchs) == (1, 0) and torch.equal(found.values, torch.topk(x, 3).values)
    assert torch.equal(x.gather(1, found.indices), found.values)


@pytest.mark.parametrize("call", [
    lambda x: torch.topk(x, 3, dim=0), lambda x: torch.topk(x, 3, largest=False), lambda x: torch.topk(x.double(), 3),
    lambda x: torch.topk(x.long(), 3), lambda x: torch.topk(input=x, k=3), lambda x: x.repeat(1, 80).topk(3),
    lambda x: x.repeat(1, 4).topk(40), lambda x: x.requires_grad_().topk(3),
    lambda x: torch.topk(x, 3, out=(x.new_empty(0), torch.empty(0, dtype=torch.int64, device=x.device))),
    lambda x: torch.topk(x[0, 0], 1),
])  # fmt: skip
def test_what_is_left_to_torch(here, call):
    x = torch.randn(5, 16, device=DEVICE)
    with router.OneLaunch():
        found, own, torchs = taken(lambda: call(x))
    assert (own, torchs) == (0, 1) and torch.equal(found.values, call(x).values)


def test_an_error_is_torchs(here):
    with router.OneLaunch(), pytest.raises(RuntimeError, match="out of range"):
        torch.topk(torch.randn(2, 4), 5)


def linears(work):
    return taken(work, router.linear_op, (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, router.FEW_TOKENS), N=st.integers(1, 20), K=st.sampled_from((1, 17, 64, 2049)),
    dtype=st.sampled_from(router._DTYPES), biased=st.booleans(), apart=st.booleans(),
)  # fmt: skip
def test_linear(rows, N, K, dtype, biased, apart):
    """Beside float64; a row's bits depend on no other row."""
    g = torch.Generator().manual_seed(K)
    new = lambda *shape: torch.randn(shape, generator=g).to(DEVICE, dtype)
    x, weight, bias = new(1, 2 * rows, K)[:, ::2], new(N, K + apart)[:, :K], new(N) if biased else None
    y = router.linear_op(x, weight, bias)
    want = torch.nn.functional.linear(*(None if t is None else t.double() for t in (x, weight, bias)))
    assert y.dtype == dtype and y.shape == (1, rows, N)
    if rows:
        assert relative_error(y, want) < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)
        assert torch.equal(router.linear_op(x[:, -1:], weight, bias), y[:, -1:])


W, B = torch.randn(6, 16, device=DEVICE), torch.randn(6, device=DEVICE)


@pytest.mark.parametrize("call", [
    lambda f, x: f(x, W), lambda f, x: f(x, weight=W, bias=B), lambda f, x: f(input=x, weight=W),
    lambda f, x: f(x, W, B), lambda f, x: f(x[None, :3], torch.nn.Parameter(W)),
])  # fmt: skip
def test_linears_that_are_taken(here, monkeypatch, call):
    """In compiled code, and not elsewhere."""
    x = torch.randn(5, 16, device=DEVICE)
    with torch.no_grad(), router.OneLaunch():
        assert linears(lambda: call(torch.nn.functional.linear, x))[1:] == (0, 1)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        found, own, torchs = linears(lambda: call(torch.nn.functional.linear, x))
    assert (own, torchs) == (1, 0) and relative_error(found, call(torch.nn.functional.linear, x)) < 1e-6


@pytest.mark.parametrize("call", [
    lambda f, x: f(x[0], W), lambda f, x: f(x, W[0]), lambda f, x: f(x, W, B[:1]),
    lambda f, x: f(x.double(), W.double()), lambda f, x: f(x, W.clone().requires_grad_()),
    lambda f, x: f(x, torch.ones(1, 16).expand((1 << 17) + 1, 16).to(DEVICE)),
    lambda f, x: f(x.repeat(1, 2048), torch.ones(3, 1 << 15, device=DEVICE)),
])  # fmt: skip
def test_linears_that_are_left_to_torch(here, monkeypatch, call):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.randn(5, 16, device=DEVICE)
    with router.OneLaunch():
        found, own, _ = linears(lambda: call(torch.nn.functional.linear, x))
    assert own == 0 and torch.equal(found, call(torch.nn.functional.linear, x))


def test_a_linear_of_many_tokens_is_torchs(here, monkeypatch):
    """And ours runs once, for one of them, so that it is there in a capture."""
    runs = []
    monkeypatch.setattr(router, "_loaded", set())
    monkeypatch.setattr(router, "router_linear", lambda x, *_: runs.append(len(x)) or x.new_zeros(len(x), 6))
    for T in (9, 9, 8):
        x = torch.randn(T, 16, device=DEVICE)
        y = router.linear_op(x, W, B)
        assert torch.equal(y, torch.nn.functional.linear(x, W, B) if T > 8 else torch.zeros(8, 6, device=DEVICE))
    assert runs == [1, 8]


def test_autocast_is_torchs(here, monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.randn(5, 16, device=DEVICE)
    with router.OneLaunch():
        assert linears(lambda: torch.nn.functional.linear(x, W))[1] == 0


def test_on_a_cpu_there_is_none():
    assert not router.has_router(torch.device("cpu"))


MODELS = {"qwen3_moe": 2, "gpt_oss": 2, "gemma4": 2, "deepseek": 3}


def swapped(name):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # in bf16 scores are equal, which CPUs sort otherwise
    return swap_experts(getattr(models, name)().eval().to(DEVICE, dtype), progress=False)


def same(got, want):
    """Linears add in another order, and GPUs sort equal scores in another one, in which a token's experts are added."""
    return relative_error(got, want) < (1e-5 if DEVICE == "cpu" else THRESHOLDS["half"])


def compiled(model, **options):
    """`model` compiled by a backend that notes how often each graph makes a router's choice, by `router.op` and by
    torch, and how often `router.linear_op` runs; and these notes."""
    notes = []

    def backend(graph, example):
        targets = [node.target for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
        torchs = targets.count(torch.topk) + targets.count("topk")
        notes.append((targets.count(router.op), torchs, targets.count(router.linear_op)))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, **options), notes


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_routers_take_one_launch(here, name):
    """Whoever's router it is, with the numbers of the model that is not compiled; DeepSeek's chooses groups, too."""
    model, ids = swapped(name), models.IDS.to(DEVICE)
    want = model(ids).logits
    run, notes = compiled(model, fullgraph=True)
    assert same(run(ids).logits, want)
    ((own, torchs, linear),) = notes
    assert linear >= own == MODELS[name] and torchs == 0 and torch._C._len_torch_function_stack() == 0


@torch.no_grad()
@pytest.mark.slow
def test_a_graph_break_inside(here):
    """Hooks are then compiled by themselves, and the mode is on in code that runs as it is."""
    model, ids = swapped("qwen3_moe"), models.IDS.to(DEVICE)
    want = model(ids).logits
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    run, _ = compiled(model)
    for _ in range(2):
        assert same(run(ids).logits, want) and torch._C._len_torch_function_stack() == 0


@torch.no_grad()
@pytest.mark.slow
def test_copies_and_errors(here):
    """Copies have hooks of their own, one pair each, and an error leaves no mode behind."""
    model, ids = swapped("qwen3_moe"), models.IDS.to(DEVICE)
    want = model(ids).logits
    for made in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        block = made.model.layers[0].mlp
        assert len(block._forward_pre_hooks) == len(block._forward_hooks) == 1
        router.in_one_launch(block)
        assert len(block._forward_pre_hooks) == 1
    run, notes = compiled(made, fullgraph=True)
    assert same(run(ids).logits, want) and notes == [(2, 0, 2)]

    def fail(*_):
        raise MemoryError

    block = model.model.layers[0].mlp
    block.gate.register_forward_hook(fail)
    with torch.device(DEVICE), pytest.raises(MemoryError):
        hooks = next(iter(block._forward_pre_hooks.values())).__self__
        hooks.mode.__enter__()
        block(torch.randn(1, 3, 64, dtype=model.dtype))
    assert torch._C._len_torch_function_stack() == 0


@on_gpu
@torch.no_grad()
def test_when_a_gpu_takes_one_launch():
    """For the first call, so that a capture finds the kernel there; in captures; for many tokens; else torch's is."""
    block, few, many = swapped("qwen3_moe").model.layers[0].mlp, *(torch.randn(1, n, 64).to("cuda", torch.bfloat16)
                                                                   for n in (3, router.MANY_TOKENS))  # fmt: skip
    want = block(few)
    assert taken(lambda: block(few))[1:] == (0, 1) and taken(lambda: block(many))[1:] == (1, 0)
    other = copy.deepcopy(block)
    assert taken(lambda: other(few))[1:] == (0, 1)  # the copy knows where the kernel is
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        captured, own, torchs = taken(lambda: block(few))
    graph.replay()
    assert (own, torchs) == (1, 0) and same(captured, want)
    block.gate.weight.requires_grad_()
    with torch.enable_grad():
        assert taken(lambda: block(many))[1:] == (0, 1)


def test_another_thread_has_no_mode(here):
    """One thread's forward ends while another's is under way: each leaves what it has entered."""
    hooks = router.Routed(torch.nn.Identity())
    hooks.mode.__enter__()
    thread = Thread(target=hooks.after)
    thread.start(), thread.join()
    assert torch._C._len_torch_function_stack() == 1
    hooks.after()
    assert torch._C._len_torch_function_stack() == 0
