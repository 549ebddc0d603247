"""Linears that read the same rows, computed as one: the numbers of each by itself, whatever happens around them."""

import copy
import gc
import pickle
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from moe_nvfp4 import NVFP4Experts, joined, prepared, ready
from moe_nvfp4 import format as nvfp4
from moe_nvfp4.joined import IN_VAIN, join
from moe_nvfp4.linear import NVFP4Linear
from tests.common import THRESHOLDS, Kernels, PlainKernels, relative_error, stand_for_hopper

K = 96
ROWS = {"q_proj": 256, "k_proj": 128, "v_proj": 80}


class Attention(nn.Module):
    """q, k and v of the same rows; `between` is done to x after q."""

    def __init__(self, rows=ROWS, bias=True, activations="bf16"):
        super().__init__()
        torch.manual_seed(0)
        for i, (name, N) in enumerate(rows.items()):
            linear = NVFP4Linear(K, N, torch.bfloat16 if bias else None, activations)
            linear.weight.random_(0, 256), linear.weight_sf.random_(32, 64)
            linear.weight_global_scale.fill_(0.01 * 3**i)
            if bias:
                linear.bias.normal_()
            self.add_module(name, linear)

    def forward(self, x, between=lambda x: x):
        names = list(self._modules)
        first = getattr(self, names[0])(x)
        x = between(x)
        return [first, *(getattr(self, name)(x) for name in names[1:])]


def alone(model, x):
    """What each linear gives by itself: copies are not joined."""
    return [copy.deepcopy(linear)(x) for linear in model.children()]


def counted(model, *args):
    before, found = Kernels.calls, model(*args)
    return Kernels.calls - before, found


def same(found, want):
    return len(found) == len(want) and all(map(torch.equal, found, want))


def tokens(*shape):
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(autouse=True, params=["a layout", "plain"])
def layout(request, monkeypatch):
    """Whether the kernels have a layout of their own, as Hopper's, or read the checkpoint's bytes, as Triton's."""
    monkeypatch.delenv("MOE_NVFP4_BACKEND", raising=False)
    with stand_for_hopper(request.param == "a layout"):
        yield request.param == "a layout"


@pytest.fixture
def model():
    made = Attention()
    ready.prepare(made)
    with torch.no_grad():
        yield made


def test_what_prepare_is_asked_for_is_checked(model):
    for top_k in (0, -1, "2", True):
        with pytest.raises(ValueError, match=f"top_k is a number of experts per token, got {top_k!r}"):
            ready.prepare(model, top_k)
    with pytest.raises(TypeError, match="activations are bfloat16 or float16 or float32, not torch.float64"):
        ready.prepare(model, dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activations", ["bf16", "nvfp4", "nvfp4_four_over_six"])
def test_one_launch_computes_all(bias, activations):
    model, x = Attention(bias=bias, activations=activations), tokens(2, 5)
    assert counted(model, x)[0] == 3
    weights = [nvfp4.dequantize(m.weight, m.weight_sf, m.weight_global_scale) for m in alone_modules(model)]
    want = alone(model, x)
    ready.prepare(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            launches, found = counted(model, x)
            assert launches == 1 and same(found, want)
            assert [y.shape for y in found] == [(2, 5, N) for N in ROWS.values()]
            assert [y.shape for y in model(tokens(0))] == [(0, N) for N in ROWS.values()]
    if activations == "bf16":
        for y, w, linear in zip(found, weights, model.children(), strict=True):
            y64 = x.double() @ w.double().T + (linear.bias.double() if bias else 0)
            assert relative_error(y, y64) < THRESHOLDS["half"]


@pytest.mark.parametrize(("most", "launches"), [(4, 1), (3, 2), (2, 4)])
def test_of_four_the_kernels_take_all_or_three(most, launches, monkeypatch):
    """Inkling has q, k, v and r. The portable kernels take no more than three, and took none of these."""
    for kernels in (Kernels, PlainKernels):
        monkeypatch.setattr(kernels, "joins", lambda self, parts: len(parts) <= most)
    model, x = Attention({"q_proj": 256, "k_proj": 128, "v_proj": 128, "r_proj": 80}), tokens(2, 5)
    want = alone(model, x)
    ready.prepare(model)
    with torch.no_grad():
        counts, found = counted(model, x)
    assert counts == launches and same(found, want)


def alone_modules(model):
    copies = [copy.deepcopy(linear) for linear in model.children()]
    for linear in copies:
        linear.unpack()
    return copies


def test_nothing_is_in_memory_twice(model, layout):
    for name in ("weight", "weight_global_scale", "bias", *([] if layout else ["weight_sf"])):
        parameters = [linear.get_parameter(name) for linear in model.children()]
        (storage,) = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in parameters}.values()
        assert storage.nbytes() == sum(p.nbytes for p in parameters)


def test_a_first_pass_with_fake_tensors():
    """Such as an estimate of memory: what linears keep for later calls has numbers."""
    model, x = Attention(), tokens(2, 5)
    with torch.no_grad():
        want = alone(model, x)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            model(fake.from_tensor(x))
        model.state_dict()
        assert same(model(x), want) and same(model(x), want)
    assert all(type(p.data) is torch.Tensor for p in model.parameters())


def test_other_rows_are_computed_anew(model):
    x = tokens(7)
    for between in (torch.clone, lambda x: x.mul_(2), lambda x: x[:3], lambda x: x.half()):
        want = [*alone(model, x)[:1], *alone(model, between(x.clone()))[1:]]
        assert same(model(x.clone(), between), want)
        model(x)  # takes all, so that the next is not the second in vain
    with torch.autocast("cpu", torch.bfloat16):
        assert same(model(x.float()), alone(model, x.float()))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "compiled"])
@pytest.mark.parametrize("name, before", [("q_proj", False), ("k_proj", True), ("v_proj", True)])
def test_hooks_that_change_x_in_place(mode, name, before):
    """Inference mode and compiled code have no version that would show it."""
    model, linear = Attention(), NVFP4Linear.register_forward_pre_hook
    change = linear if before else NVFP4Linear.register_forward_hook
    twin = copy.deepcopy(model)
    ready.prepare(model)
    for made in (model, twin):
        change(getattr(made, name), lambda module, args, *y: (args[0].mul_(2), None)[1])
    run = torch.compile(model, fullgraph=True, backend="eager") if mode == "compiled" else model
    with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
        assert same(run(tokens(4)), twin(tokens(4)))


@pytest.mark.parametrize("made", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("first", [
    lambda m: ready.prepare(m), lambda m: m(tokens(4)), lambda m: m.q_proj(tokens(4)), lambda m: m.state_dict(),
])  # fmt: skip
def test_inference_mode_leaves_no_weights_that_cannot_be_trained_through(made, first):
    """Nor are the weights of a model that was made there mixed with others, which torch cannot make views of."""
    with made():
        model = Attention()
        ready.prepare(model)
        model.state_dict()
    with torch.inference_mode():
        first(model)
        model.k_proj = copy.deepcopy(model.k_proj)
        assert same(model(tokens(4)), alone(model, tokens(4)))
        model.state_dict()
    with torch.no_grad():
        assert same(model(tokens(4)), alone(model, tokens(4)))
    if made is torch.enable_grad:
        x, y = tokens(6).requires_grad_(), tokens(6).requires_grad_()
        model.q_proj(x).float().square().sum().backward()
        Attention().q_proj(y).float().square().sum().backward()
        assert torch.equal(x.grad, y.grad) and x.grad.any()


def test_biases_of_another_half_under_autocast(layout):
    model = Attention().half()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ready.prepare(model)
        want = [y.to(torch.bfloat16) for y in alone(model, tokens(4))]
        assert counted(model, tokens(4))[0] == 1 and same(model(tokens(4).float()), want)


def test_replicas_compute_for_themselves(model):
    replica = model._replicate_for_data_parallel()
    for name, linear in model.named_children():
        replica._modules[name] = linear._replicate_for_data_parallel()
        replica._modules[name]._parameters = dict(linear._parameters)
    assert same(replica(tokens(3)), alone(model, tokens(3)))


def test_outside_the_forward_each_is_alone(model):
    x = tokens(3)
    q = model.q_proj(x)
    model.k_proj.weight_global_scale.data.mul_(2)
    model.v_proj.bias.data.zero_()
    assert same([q, model.k_proj(x), model.v_proj(x)], alone(model, x))


def test_where_an_error_ends_the_forward(model):
    x = tokens(3)

    def fail(x):
        raise MemoryError

    with pytest.raises(MemoryError):
        model(x, fail)
    assert model.q_proj.joined.left is None
    launches, found = counted(model, x)
    assert launches == 1 and same(found, alone(model, x))


def test_those_who_do_not_take_their_part_compute_for_themselves(model):
    """Layers that share keys and values call q only; adapters may give each linear rows of its own."""
    x, k = tokens(3), model.k_proj
    for _ in range(IN_VAIN):
        assert counted(model, x, torch.clone)[0] == 2
    launches, found = counted(model, x)
    assert launches == 3 and same(found, alone(model, x)) and k.joined.left is None


@pytest.mark.parametrize("edit", [
    lambda m: m.k_proj.weight_global_scale.data.mul_(2),
    lambda m: m.v_proj.bias.data.add_(1),
    lambda m: setattr(m.q_proj.weight_global_scale, "data", torch.full((1,), 0.5)),
    lambda m: m.load_state_dict({k: v.flip(0) for k, v in m.state_dict().items()}),
    lambda m: m.k_proj.unpack(),
    lambda m: m.float(),
    lambda m: m.bfloat16(),
    lambda m: m.q_proj.set_input_scales(torch.tensor(0.1)),
    lambda m: setattr(m.v_proj, "activations", "nvfp4"),
    lambda m: m.state_dict(),
    lambda m: m.add_module("k_proj", copy.deepcopy(m.v_proj)),
    lambda m: m.v_proj.register_forward_hook(lambda module, args, y: y * 2),
    lambda m: m.v_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
])  # fmt: skip
def test_edits_are_seen(model, edit):
    x = tokens(4)
    before = model(x)
    edit(model)
    for _ in range(3):
        assert same(model(x), alone(model, x))
    assert len(before) == 3


def test_state_dicts_and_copies(model, layout):
    x, storage = tokens(4), model.k_proj.bias.untyped_storage().nbytes()
    want = model(x)
    fresh = Attention()
    torch.manual_seed(5)
    fresh.load_state_dict(model.state_dict())
    for tensor in model.state_dict().values() if layout else ():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes < storage or tensor.nbytes > storage
    for other in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(linear.joined is None for linear in other.children())
        assert same(other(x), want)
        ready.prepare(other)
        launches, found = counted(other, x)
        assert launches == 1 and same(found, want)
    launches, found = counted(model, x)
    assert launches == 1 and same(found, want)


def test_memory(model, layout):
    """Nothing moves without need, since captured graphs read addresses, and nothing is kept that nobody reads."""
    x, addresses = tokens(4), [p.data_ptr() for p in model.parameters()]
    model(x)
    ready.prepare(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    old = weakref.ref(model.k_proj.weight_global_scale.data.untyped_storage())
    model.k_proj.weight_global_scale.data = torch.full((1,), 0.25)
    assert same(model(x), alone(model, x)) and counted(model, x)[0] == 1 and old() is not None
    assert [m.weight.data_ptr() for m in model.children()] == addresses[::4]
    packed = weakref.ref(model.q_proj.weight.data.untyped_storage())
    model.state_dict()
    gc.collect()
    assert (packed() is None) == layout
    model.q_proj.prepare(), model.k_proj.prepare()
    model.v_proj.weight.data = model.v_proj.weight.data.clone()
    assert same(model(x), alone(model, x)) and counted(model, x)[0] == 1


def test_graphs_are_warned_of_only_where_something_moves(model, monkeypatch):
    x = tokens(4)
    with monkeypatch.context() as patch:
        patch.setattr("moe_nvfp4.prepared.capturing", lambda device: True)
        patch.setattr("moe_nvfp4.joined.capturing", lambda device: True)
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready.prepare(model)
        model(x)
    model.k_proj.weight_global_scale.data = torch.full((1,), 0.25)
    with pytest.warns(UserWarning, match="a CUDA graph was captured that reads them"):
        model(x)


def test_gradients(model):
    x, y = tokens(6).requires_grad_(), tokens(6).requires_grad_()
    with torch.enable_grad():
        launches, found = counted(model, x)
        assert launches == 3
        sum(f.float().square().sum() for f in found).backward()
        sum(f.float().square().sum() for f in alone(model, y)).backward()
        assert torch.equal(x.grad, y.grad) and x.grad.any()
        model.v_proj.bias.requires_grad_(True)
        found = model(tokens(6))
        assert found[2].requires_grad and not found[0].requires_grad


def test_who_is_joined():
    """Rows of a warpgroup have one global scale, and x is the same for all."""
    for rows, want in (
        ({"gate_proj": 128, "up_proj": 16}, [("gate_proj", "up_proj")]),
        ({"gate_proj": 192, "up_proj": 128}, []),
        ({"q_proj": 128, "o_proj": 128}, []),
        ({"q_proj": 128, "v_proj": 144}, [("q_proj", "v_proj")]),
    ):
        model = Attention(rows)
        joined = list(join(model, torch.bfloat16))
        assert [tuple(n for n, m in model.named_children() if m in linears) for linears in joined] == want
        assert list(join(model, torch.bfloat16)) == joined and len(model._forward_hooks) == len(want)
        with torch.no_grad():
            launches, found = counted(model, tokens(3))
            assert launches == (1 if want else 2) and same(found, alone(model, tokens(3)))
    model = Attention()
    model.k_proj.set_input_scales(torch.tensor(0.5))
    assert not list(join(model, torch.bfloat16)) and not list(join(Attention(), torch.float16))


@pytest.mark.slow
def test_compiled(model):
    x = tokens(4)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for edit in (
        lambda: None,
        lambda: model.k_proj.weight_global_scale.data.mul_(2),
        lambda: setattr(model.v_proj.bias, "data", torch.ones(80).bfloat16()),
        lambda: model.state_dict(),
    ):
        edit()
        model(x)  # brings edited tensors together again
        launches, found = counted(compiled, x)
        assert launches == 1 and same(found, alone(model, x))
    model.v_proj.bias.data = model.v_proj.bias.data.clone()
    launches, found = counted(compiled, x)
    assert launches == 3 and same(found, alone(model, x))


# ---- threads that each have a stream of a GPU, without one -----------------------------------------


@pytest.mark.parametrize("layout", [True, False])
def test_memory_is_kept_until_the_stream_is_done_with_it(layout, monkeypatch):
    """Where weights move, the stream still reads what they were, and others may read at once what they become: `finish`
    comes after each of them has moved, and before its old memory can be used again."""
    model = nn.ModuleList([Attention(), NVFP4Experts.from_dense(torch.randn(2, 96, 64), torch.randn(2, 64, 48))])
    storages = lambda: {StorageWeakRef(p.untyped_storage()) for p in model.parameters() if p.numel()}
    before, moved = storages(), []

    def finish(device):
        left = before - (now := storages())
        assert not any(storage.expired() for storage in left)
        moved.extend(left)
        before.clear(), before.update(now)

    for module in (prepared, joined):
        monkeypatch.setattr(module, "finish", finish)
    rows, ids = torch.randn(3, K).bfloat16(), torch.tensor([[0], [1], [1]])

    def call():
        model[0](rows)
        model[1](rows[:, :64], ids, torch.ones(3, 1))

    with stand_for_hopper(layout):
        for change in (lambda: ready.prepare(model), call, model.state_dict, call, lambda: copy.deepcopy(model), call):
            change()
            assert before == storages()
    assert len(moved) > (20 if layout else 5)


def test_the_memory_of_weights_waits_for_all_streams_that_read_them(monkeypatch):
    """Those of captures are left to whoever keeps the graph."""
    device, now, noted = torch.device("cuda", 1), SimpleNamespace(), []
    weight = SimpleNamespace(is_cuda=True, device=device, record_stream=lambda s: noted.append(s))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: (where, now.stream))
    monkeypatch.setattr(prepared, "capturing", lambda where: now.capturing)
    readers = prepared._Readers(SimpleNamespace(tensors=lambda: [weight, None, torch.zeros(1)]))
    for now.stream, now.capturing in ((0, False), (7, True), (7, False), (0, False), (7, False)):
        readers.note()
    assert noted == [(device, 0), (device, 7)]
    on_cpu = prepared._Readers(SimpleNamespace(tensors=lambda: [torch.zeros(1)]))
    on_cpu.note()
    assert not on_cpu.streams
