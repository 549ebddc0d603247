"""Misuse: every wrong shape, dtype and device is named, and nothing reaches a backend unchecked."""

import copy
from functools import cache, partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from moe_nvfp4 import Gate, NVFP4Experts, moe_forward
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.routing import group_by_expert
from moe_nvfp4.scales import fp32_parameters
from tests.common import THRESHOLDS, python, python_with_sanitizers, relative_error

FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
E, H, I, T, K = 5, 48, 32, 7, 3  # all different, so that no wrong shape passes for another right one
OPS = ("experts", "up", "down", "linear")


def make(activations="bf16", static=False, bias=True, gate=None):
    gate = gate or Gate()
    torch.manual_seed(0)
    layer = NVFP4Experts.from_dense(
        torch.randn(E, I * (2 if gate.gated else 1), H) / 7, torch.randn(E, H, I) / 6, gate, activations,
        (torch.randn(E, I * (2 if gate.gated else 1)), torch.randn(E, H)) if bias else None,
    )  # fmt: skip
    if static:
        layer.set_input_scales(torch.tensor(1e-3), torch.tensor(2e-3))
    return layer


def make_linear(activations="bf16", static=False, bias=True):
    torch.manual_seed(0)
    layer = NVFP4Linear(H, I, torch.float32 if bias else None, activations, static)
    layer.weight.random_(0, 256)
    layer.weight_sf.random_(32, 64)
    layer.weight_global_scale.fill_(0.01)
    if static:
        layer.input_scale.fill_(1e-3)
    if bias:
        layer.bias.normal_()
    return layer


def batch():
    """Random values that every dtype represents exactly."""
    torch.manual_seed(1)
    x, p = torch.randint(-16, 17, (T, H)) / 8, torch.randint(1, 9, (T, K)) / 8
    return x, torch.randint(-1, E + 1, (T, K)), p


@cache
def arguments(op, activations, static, bias):
    """Legal arguments of torch.ops.moe_nvfp4.`op`."""
    if op == "linear":
        layer, (x, _, _) = make_linear(activations, static, bias), batch()
        return [x, *layer.weights.tensors(), layer.weights.spec(layer.backend().name)]
    layer, (x, ids, p) = make(activations, static, bias), batch()
    w, groups = layer.weights, group_by_expert(ids, E)
    spec = w.spec(layer.backend(torch.float32).name)
    if op == "experts":
        return [x, ids, p, w.w13.bias, w.w2.bias, w.biased(None, None).tensors(), spec]
    several = (2,) if static else ()  # adapters of which a token has one
    if several:
        groups = group_by_expert(ids, E, torch.randint(-1, 2, (T,)), *several).with_position()
    own = [groups.order, groups.offsets, groups.position, groups.parts, groups.bare, K, torch.float32]
    exact = lambda *shape: torch.randint(1, 9, shape) / 8
    first = [x, exact(E, H), None, None, w.w13.bias, *own, w.biased(None, w.w2.bias).tensors(), spec]
    if op == "up":
        return first
    (h,) = torch.ops.moe_nvfp4.up(*first)
    second = w.biased(w.w13.bias, None).tensors()
    return [h, p, None, exact(E, I), exact(E, *several, 8, I), exact(E, *several, H, 8), w.w2.bias, *own, second, spec]


def tensors(args):
    """(where, tensor) of each argument, also of those in lists."""
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            yield (i, None), a
        for j, b in enumerate(a if isinstance(a, list) else ()):
            if isinstance(b, torch.Tensor):
                yield (i, j), b


def put(args, where, tensor):
    args, (i, j) = [list(a) if isinstance(a, list) else a for a in args], where
    if j is None:
        args[i] = tensor
    else:
        args[i][j] = tensor
    return args


SHAPES = {
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "a row less": lambda t: t[:-1],
    "no rows": lambda t: t[:0],
    "twice as wide": lambda t: torch.cat([t, t], -1),
    "half as wide": lambda t: t[..., : t.shape[-1] // 2].contiguous(),
    "one wide": lambda t: t[..., :1].contiguous(),
    "transposed": lambda t: t.transpose(0, -1).contiguous(),
    "a dimension more": lambda t: t[None],
    "a dimension less": lambda t: t[0],
    "a number": lambda t: t.flatten()[0].clone(),
    "on meta": lambda t: t.to("meta"),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],  # legal
}
# Changes that are legal: any number of rows of x for a linear; another dtype of a factor's.
FREE = {("linear", 0): ("a row more", "a row less", "no rows")}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int16,
          torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]  # fmt: skip


def results(op, args):
    y = getattr(torch.ops.moe_nvfp4, op)(*args)
    return y if isinstance(y, list) else [y]


def misuse(examples):
    """Call each op with one argument changed: it raises an error of ours, or returns what it returned before."""
    wrong = st.one_of(st.sampled_from(sorted(SHAPES)), st.sampled_from(DTYPES))

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(op=st.sampled_from(OPS), activations=st.sampled_from(["bf16", "nvfp4"]), static=st.booleans(),
           bias=st.booleans(), which=st.integers(0, 99), wrong=wrong)  # fmt: skip
    def one(op, activations, static, bias, which, wrong):
        args = arguments(op, activations, static, bias)
        expected = results(op, args)
        where, tensor = list(tensors(args))[which % len(list(tensors(args)))]
        assume(wrong not in FREE.get((op, where[0]), ()))
        changed = SHAPES[wrong](tensor) if isinstance(wrong, str) else tensor.to(wrong)
        try:
            found = results(op, put(args, where, changed))
        except (TypeError, ValueError):
            assert wrong != "strided"
            return
        if activations == "nvfp4" and not isinstance(wrong, str):  # rows are rounded to it before they are quantized
            there = [*args[:-1], args[-1].replace("cpu", "reference")]
            expected = results(op, put(there, where, changed))
        for a, b in zip(found, expected, strict=True):
            assert a.device == b.device and relative_error(a.float(), b.float()) < THRESHOLDS["half"]

    one()


@pytest.mark.slow
def test_ops_name_what_is_wrong():
    misuse(400)


@pytest.mark.parametrize("reference", [False, True])
def test_the_layer_names_what_is_wrong(reference, monkeypatch):
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "reference" if reference else "")
    layer, (x, ids, p) = make(), batch()
    for bad in (p[:, :2], torch.cat([p, p], 1), p.T, p[:-1], p.flatten()):
        with pytest.raises(ValueError, match=r"top_k_weights has shape .*expected \(7, 3\)"):
            layer(x, ids, bad)
    with pytest.raises(TypeError, match="top_k_weights is torch.int64"):
        layer(x, ids, ids)
    for wrong in (E + 1, -2):
        with pytest.raises(ValueError, match=rf"expert ids must lie in 0\.\.4.*got ids from .*{wrong}"):
            layer(x, ids.index_fill(0, torch.tensor(3), wrong), p)
    with pytest.raises(TypeError, match="x is torch.float64, expected bfloat16 or float16 or float32"):
        layer(x.double(), ids, p)
    with pytest.raises(ValueError, match="w13.codes is on cpu.* on meta: move them to one device"):
        layer(x.to("meta"), ids, p)
    with pytest.raises(ValueError, match="w13.codes is on meta"):
        copy.deepcopy(layer).to("meta")(x, ids, p)
    layer.double()
    with pytest.raises(TypeError, match="w13.bias is torch.float64"):
        layer(x, ids, p)
    assert layer.float()(x, ids, p.double()).isfinite().all()
    with pytest.raises(
        TypeError, match="w13.codes is torch.bfloat16, expected uint8: codes and block scales are bytes"
    ):
        make().type(torch.bfloat16)(x, ids, p)
    linear = make_linear()
    for width in (H // 2, 2 * H, 1):
        with pytest.raises(ValueError, match=r"x must be \[\.\.\., 48\]"):
            linear(torch.randn(3, width))
    with pytest.raises(TypeError, match="x is torch.float64"):
        linear(x.double())
    assert linear(torch.randn(H)).shape == (I,) and linear(torch.randn(2, 0, H)).shape == (2, 0, I)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_the_default_dtype_changes_nothing(activations, dtype):
    layer, linear, (x, ids, p) = make(activations), make_linear(activations), batch()
    want = layer(x, ids, p), linear(x)
    torch.set_default_dtype(dtype)
    try:
        for _ in range(20):  # a heap that was overrun is noticed late
            got = layer(x, ids, p), linear(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_a_layer_on_meta_gives_shapes(activations):
    y = make(activations).to("meta")(*(t.to("meta") for t in batch()))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (T, H), torch.float32)


def test_groups_that_are_none():
    """Invalid values of groups, which only the CPU checks: a GPU would have to wait."""
    op, args = "down", arguments("down", "bf16", False, True)
    args[3:6] = [None] * 3
    order, offsets = args[7], args[8]
    down_and_up = offsets.clone()  # its ends are right
    down_and_up[1] = offsets[-1] + 1
    for where, values in [
        ((8, None), down_and_up), ((8, None), offsets.flip(0)), ((8, None), offsets + 1), ((8, None), offsets * 1000),
        ((7, None), order + 1), ((7, None), order - 1), ((7, None), order * 100000),
    ]:  # fmt: skip
        if cpu.available():
            with pytest.raises(ValueError, match="group_by_expert"):
                results(op, put(args, where, values))


def test_arguments_that_are_no_tensors():
    for op in ("up", "down"):
        args = [*arguments(op, "bf16", False, True)]
        args[-3] = torch.float64
        with pytest.raises(TypeError, match="result's dtype is torch.float64, expected bfloat16"):
            results(op, args)
    args = [*arguments("linear", "bf16", False, True)]
    for right, wrong, rule in (
        ('"activations": "bf16"', '"activations": "fp8"', "activations must be one of"),
        (f'"sizes": [{I}, {H}]', f'"sizes": [{H}, {I}]', "codes, got"),
        (f'"sizes": [{I}, {H}]', f'"sizes": [{I + 16}, {H}]', "weight.codes has shape"),
    ):
        with pytest.raises(ValueError, match=rule):
            results("linear", [*args[:-1], args[-1].replace(right, wrong)])


# ---- scales --------------------------------------------------------------------------------------


CASTS = {
    "to": lambda m, dtype: m.to(dtype),
    "to with a device": lambda m, dtype: m.to("cpu", dtype),
    "type": lambda m, dtype: m.type(dtype) if dtype.is_floating_point and dtype.itemsize > 1 else m.to(dtype),
    "apply": lambda m, dtype: m._apply(lambda t: t.to(dtype) if t.is_floating_point() else t),
    "there and back": lambda m, dtype: m.to(dtype).float(),
    "deepcopy": lambda m, dtype: copy.deepcopy(m).to(dtype),
    "a parent": lambda m, dtype: torch.nn.Sequential(m).to(dtype)[0],
}


@cache
def layer_of_scales(linear):
    return make_linear(static=True) if linear else make(static=True)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(FLOATING), cast=st.sampled_from(sorted(CASTS)), linear=st.booleans(),
       exponent=st.integers(-40, 5), seed=st.integers(0, 99))  # fmt: skip
def test_casts_do_not_round_scales(dtype, cast, linear, exponent, seed):
    layer = copy.deepcopy(layer_of_scales(linear))
    scales = [name for name, p in layer.named_parameters() if p in fp32_parameters(layer)]
    assert len(scales) == (2 if linear else 5)
    torch.manual_seed(seed)
    for name in scales:
        layer.get_parameter(name).copy_(torch.rand_like(layer.get_parameter(name)) * 10.0**exponent)
    before = {name: layer.get_parameter(name).clone() for name in scales}
    after = CASTS[cast](layer, dtype)
    for name in scales:
        found = after.state_dict()[name]
        assert found.dtype == torch.float32 and torch.equal(found.view(torch.int32), before[name].view(torch.int32))
        assert isinstance(after.get_parameter(name), torch.nn.Parameter)
    if not linear and cast != "type":  # type() casts codes too, and calls say so
        assert after.gate_up_proj_bias.dtype == (torch.float32 if cast == "there and back" else dtype)


def test_moves_move_scales():
    layer = make(static=True)
    assert {p.device.type for p in copy.deepcopy(layer).to("meta").parameters()} == {"meta"}
    empty = copy.deepcopy(layer).to("meta", torch.bfloat16).to_empty(device="cpu")
    assert empty.up_proj_global_scale.dtype == torch.float32 and empty.up_proj_global_scale.shape == (E,)
    layer.share_memory()
    assert all(p.is_shared() for p in layer.parameters())


def test_half_precision_models_give_the_same_numbers():
    layer, (x, ids, p) = make(bias=False), batch()
    want = layer(x.bfloat16(), ids, p)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(layer.to(dtype)(x.bfloat16(), ids, p), want)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_a_state_dict_that_was_cast_is_refused(linear, assign):
    layer = make_linear(static=True) if linear else make(static=True)
    before, name = copy.deepcopy(layer.state_dict()), "weight_sf" if linear else "down_proj_sf"
    rounded = {key: t.bfloat16() if t.is_floating_point() else t for key, t in before.items()}
    with pytest.raises(RuntimeError, match="global_scale is torch.bfloat16, expected torch.float32: codes and scales"):
        layer.load_state_dict(rounded, assign=assign)
    e4m3 = before | {name: before[name].view(torch.float8_e4m3fn)}  # copied, its numbers would become bytes
    with pytest.raises(RuntimeError, match=f"{name} is torch.float8_e4m3fn, expected torch.uint8"):
        layer.load_state_dict(e4m3, assign=assign)
    assert all(torch.equal(t, before[key]) for key, t in layer.state_dict().items())
    for byte in (0x7F, 0x80, 0xB8, 0xFF):  # NaN and negative block scales, which kernels would read as something else
        sf = next(name for name in before if name.endswith("_sf"))
        damaged = {**before, sf: before[sf].clone()}
        damaged[sf].view(-1)[3] = byte
        with pytest.raises(RuntimeError, match=f"{sf} holds NaN or negative block scales: the file is damaged"):
            layer.load_state_dict(damaged, assign=assign)
    for name in (name for name in before if name.endswith("_scale")):
        for number in (0.0, -1.0, float("nan"), float("inf")):
            damaged = {**before, name: torch.full_like(before[name], number)}
            with pytest.raises(RuntimeError, match=f"{name} of expert 0 is {number}: a global scale is a"):
                layer.load_state_dict(damaged, assign=assign)
    assert all(torch.equal(t, before[key]) for key, t in layer.state_dict().items())
    layer.load_state_dict(before, assign=assign)
    assert layer.load_state_dict({}, strict=False, assign=assign).missing_keys == list(before)


SHARDED = """
import copy, torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tests.core.test_checks import *
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
layer, (x, ids, p) = make(bias=False), batch()
want, policy = layer(x.bfloat16(), ids, p), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
spared = fully_shard(copy.deepcopy(layer), mesh=mesh)
assert torch.equal(spared(x.bfloat16(), ids, p), want)
spared = copy.deepcopy(layer)
fully_shard(spared, mesh=mesh, mp_policy=policy, ignored_params=fp32_parameters(spared))
assert torch.equal(spared(x.bfloat16(), ids, p), want)
cast = fully_shard(copy.deepcopy(layer), mesh=mesh, mp_policy=policy)
try:
    cast(x.bfloat16(), ids, p)
except TypeError as error:
    print("named", error)
"""


@pytest.mark.slow
def test_mixed_precision_of_fsdp():
    """It never rounds scales silently, and leaves them alone when it is told to."""
    done = python(SHARDED)
    assert "named w13.global_scale is torch.bfloat16" in done.stdout and "fp32_parameters(model)" in done.stdout, (
        done.stderr
    )


# ---- compiling and transforms ---------------------------------------------------------------------


def without_gate(activations):
    layer = make(activations)
    layer.gate = Gate("raw")
    layer.own_gate = lambda v: v[:, :I] * v[:, I:]
    return layer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "stages", "linear"])
def test_compiled_layers_give_the_same(kind):
    """The forward pass alone, and with gradients."""
    x, ids, p = batch()
    layer = {"whole": make, "stages": without_gate, "linear": make_linear}[kind]("nvfp4")
    rest = () if kind == "linear" else (ids, p)
    torch.compiler.reset()
    compiled, found = torch.compile(layer, fullgraph=True, backend="aot_eager"), []
    assert torch.equal(compiled(x, *rest), layer(x, *rest))
    for f in (compiled, layer):
        leaf = x.clone().requires_grad_()
        y = f(leaf, *rest)
        y.sum().backward()
        found.append((y, leaf.grad))
    for mine, theirs in zip(*found, strict=True):
        assert relative_error(mine, theirs) < THRESHOLDS["fp32"]


@pytest.mark.slow
def test_transforms_are_refused_by_name():
    layer, linear, (x, ids, p) = make(), make_linear(), batch()
    for f, args in ((layer, (x, ids, p)), (linear, (x,))):
        with pytest.raises(NotImplementedError, match="vmap"):
            torch.vmap(f)(*(a[None] for a in args))
        with pytest.raises(NotImplementedError, match="torch.export and torch.jit of 4-bit layers"):
            torch.export.export(f, args)
        with pytest.raises(NotImplementedError, match="torch.export and torch.jit of 4-bit layers"):
            torch.jit.trace(f, args)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
            f(forward_ad.make_dual(x, x), *args[1:])
    with pytest.raises(NotImplementedError, match="grad, jvp"):
        torch.func.grad(lambda x: layer(x, ids, p).sum())(x)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda x, ids, p: moe_forward(x, ids, p, layer.weights))(x[None], ids[None], p[None])


@pytest.mark.slow
@pytest.mark.parametrize("make_layer", [make, make_linear])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_mode_is_refused_in_compiled_code(backend, make_layer):
    """Inside it and around it: tangents would be zeros, without a word."""
    layer, (x, ids, p) = make_layer(), batch()
    call = (lambda x: layer(x, ids, p)) if make_layer is make else layer
    torch.compiler.reset()
    compiled = torch.compile(call, backend=backend)
    assert relative_error(compiled(x), call(x)) < THRESHOLDS["fp32"]  # made for calls without a transform

    def dual(f, x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    def jvp(f, x):
        return torch.func.jvp(f, (x,), (torch.ones_like(x),))

    for transform in (jvp, dual):
        inside = torch.compile(partial(transform, call), backend=backend)
        for run in (inside, partial(transform, compiled)):
            with pytest.raises(NotImplementedError, match="torch.func's transforms"):
                run(x)


# ---- what is loaded ------------------------------------------------------------------------------


def test_dense_experts_that_do_not_fit():
    w13, w2 = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    for args, rule in [
        ((w13[:, 1:], w2), "63 rows per expert, but a gated layer"),
        ((w13[0], w2), r"must be \[experts, rows, columns\]"),
        ((w13, w2.mT), r"w2 must be \(5, 48, 32\)"),
    ]:
        with pytest.raises(ValueError, match=rule):
            NVFP4Experts.from_dense(*args)
    good = torch.randn(E, 2 * I), torch.randn(E, H)
    for bias, rule in [
        ((good[0][:, 1:], good[1]), r"bias of w13 must be \(5, 64\), got \(5, 63\)"),
        ((good[0], good[1][:, :1]), r"bias of w2 must be \(5, 48\), got \(5, 1\)"),
        ((good[0], good[1][0]), r"bias of w2 must be \(5, 48\), got \(48,\)"),
        ((good[0] / 0, good[1]), "bias of w13 has NaN or Inf"),
        ((good[0], good[1] * float("nan")), "bias of w2 has NaN or Inf"),
    ]:
        with pytest.raises(ValueError, match=rule):
            NVFP4Experts.from_dense(w13, w2, bias=bias)
    with pytest.raises(TypeError, match="biases are bfloat16 or float16 or float32, not torch.float64"):
        NVFP4Experts.from_dense(w13, w2, bias=tuple(b.double() for b in good))
    with pytest.raises(ValueError, match="input_scale is True or False, got 0.02"):
        NVFP4Experts(E, H, I, input_scale=0.02)
    for bias in ((good[0].bfloat16(), good[1]), good[:1]):
        with pytest.raises(ValueError, match="bias is a pair of one dtype"):
            NVFP4Experts.from_dense(w13, w2, bias=bias)
    for args in ((w13.to("meta"), w2.to("meta")), (w13, w2.to("meta"))):
        with pytest.raises(ValueError, match="of expert 0 is on meta, the layer's on .*: the meta device holds no"):
            NVFP4Experts.from_dense(*args)
    with pytest.raises(ValueError, match="gate_up_proj of expert 0 is on cpu, the layer's on meta"):
        NVFP4Experts(E, H, I, device="meta").load_expert(0, w13[0], w2[0])
    for wrong in (lambda: NVFP4Experts(E, H, I, "silu"), lambda: NVFP4Experts.from_dense(w13, w2, "silu")):
        with pytest.raises(TypeError, match=r"gate must be a moe_nvfp4.Gate, such as Gate\('silu'\), got 'silu'"):
            wrong()
    for sizes, rule in [
        ((0, H, I), "num_experts must be at least 1, got 0"),
        ((E, H, -1), "intermediate_size .* got -1"),
    ]:
        with pytest.raises(ValueError, match=rule):
            NVFP4Experts(*sizes)
    with pytest.raises(ValueError, match="out_features must be at least 1, got -3"):
        NVFP4Linear(16, -3)
    with pytest.raises(ValueError, match="in_features = 24 is not a multiple of 16"):
        NVFP4Linear(24, 16)
    layer = make()
    for args, rule in [
        ((E, w13[0], w2[0]), "expert 5 does not exist"),
        ((-1, w13[0], w2[0]), "expert -1 does not exist"),
        ((0, w13[0, 1:], w2[0]), r"gate_up_proj of expert 0 must be \(64, 48\), got \(63, 48\)"),
        ((0, w13[0], w2[0].T), r"down_proj of expert 0 must be \(48, 32\), got \(32, 48\)"),
    ]:
        with pytest.raises(ValueError, match=rule):
            layer.load_expert(*args)


def test_what_fails_leaves_the_layer_as_it_was():
    layer, one = make(static=True), torch.tensor(1.0)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match="down_proj of expert 1: 1536 of 1536 weights are NaN"):
        layer.load_expert(1, torch.randn(2 * I, H), torch.full((H, I), torch.nan), "four_over_six")
    assert layer.recipe == "mse"  # by which adapters are merged
    for scale, rule in [(one * torch.nan, "is nan: a global scale"), (one * 0, "is 0.0: a global scale"),
                        (torch.ones(E), r"is one number, for all experts, got shape \(5,\)")]:  # fmt: skip
        with pytest.raises(ValueError, match=f"down_proj_input_scale.* {rule}"):
            layer.set_input_scales(one, scale)
    with pytest.raises(ValueError, match=r"input_scale is one number, got shape \(2,\)"):
        NVFP4Linear(32, 8).set_input_scales(torch.ones(2))
    assert all(torch.equal(t, before[key]) for key, t in layer.state_dict().items())


# ---- the environment, and a process of its own ---------------------------------------------------


def test_unknown_names_in_the_environment(monkeypatch):
    layer, args = make(), batch()
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "refrence")
    with pytest.raises(ValueError, match="MOE_NVFP4_BACKEND=refrence is unknown: the backends are .*cpu.* reference"):
        layer(*args)


def test_importing_leaves_the_compiler_out():
    done = python("import sys, moe_nvfp4; assert 'torch._dynamo' not in sys.modules")
    assert done.returncode == 0, done.stderr


MISUSE = """
from tests.core import test_checks
import torch
torch.set_num_threads(1)
test_checks.misuse(150)
test_checks.test_groups_that_are_none()
test_checks.test_the_default_dtype_changes_nothing("bf16", torch.bfloat16)
test_checks.test_the_default_dtype_changes_nothing("nvfp4", torch.float16)
print("clean")
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="no C compiler")
def test_misuse_under_sanitizers(sanitized_cache):
    done = python_with_sanitizers(MISUSE, sanitized_cache, MOE_NVFP4_CPU="portable")
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]
