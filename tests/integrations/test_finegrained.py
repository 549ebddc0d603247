"""transformers' packed NVFP4 experts, `FineGrainedExperts`, run by this library: experts implementation "moe_nvfp4".

No release of transformers has them yet, so the tests run with a stand-in, too: the names, shapes and dtypes of what
that class holds. What it computes is compared with a float64 loop over these parameters.
"""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation

from moe_nvfp4.integrations.huggingface import finegrained, prepare_model, set_activations
from moe_nvfp4.integrations.huggingface.finegrained import IMPLEMENTATION, MODULE, TakenExperts
from tests.common import THRESHOLDS, on_gpu, python, relative_error
from tests.folders import quantized
from tests.models import as_bytes, load, logits, qwen3_moe

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
SUFFIXES = "", "_scale_inv", "_weight_global_scale", "_input_global_scale", "_activation_scale", "_bias"


class Functions(ExpertsInterface):
    _global_mapping = {}


class FineGrainedExperts(nn.Module):
    """The stand-in."""

    def __init__(self, config, has_bias=False, has_gate=True, weight_format="nvfp4", activation_format=None, **_):
        super().__init__()
        self.num_experts, self.hidden_dim = config.num_experts, config.hidden_size
        self.intermediate_dim, self.act_fn = config.moe_intermediate_size, ACT2FN[config.hidden_act]
        self.swiglu_alpha = getattr(config, "swiglu_alpha", None)
        self.swiglu_limit = getattr(config, "swiglu_limit", None)
        self.weight_format, self.activation_format = weight_format, activation_format
        self.holds_interleaved_gate_up, self.post_expert_norm = has_gate, None
        self.has_post_expert_norm = self._is_expert_parallel = False  # transformers 5.17 sets neither
        self.gate_up_name = "gate_up_proj" if has_gate else "up_proj"
        E, H, I = self.num_experts, self.hidden_dim, self.intermediate_dim
        for name, N, K, inputs in ((self.gate_up_name, I * (1 + has_gate), H, 1), ("down_proj", H, I, E)):
            tensors = (
                torch.empty(E, N, K // 2, dtype=torch.int8), torch.empty(E, N, K // 16, dtype=torch.float8_e4m3fn),
                torch.ones(E), torch.ones(inputs) if activation_format is None else None, None,
                torch.empty(E, N) if has_bias else None,
            )  # fmt: skip
            for suffix, t in zip(SUFFIXES, tensors, strict=True):
                trained = t is not None and t.is_floating_point()
                self.register_parameter(name + suffix, None if t is None else nn.Parameter(t, requires_grad=trained))

    def _apply_gate(self, gate_up):
        return gate(self, gate_up[..., 0::2], gate_up[..., 1::2])

    # as theirs: a user's own would run unfused
    _apply_gate = FunctionType(_apply_gate.__code__, {"__name__": "transformers", "gate": lambda *args: gate(*args)})

    def _moe_operands(self, kernel):
        raise AssertionError("of the other implementations")

    expert_linear = _moe_operands


def theirs():
    """(transformers' own class, the interface of its functions)."""
    if find_spec(MODULE) is None:
        pytest.skip(f"this version of transformers has no {MODULE}")
    from transformers.integrations import finegrained as module

    return module.FineGrainedExperts, module.ALL_FINEGRAINED_EXPERTS_FUNCTIONS


@pytest.fixture(params=["stand-in", "transformers"])
def make(request):
    """make(activation_format, ...) -> experts with random weights."""

    def build(activation_format, E=4, H=64, I=32, has_bias=False, has_gate=True, seed=0, config=None, **settings):
        if request.param == "stand-in":
            cls, functions = FineGrainedExperts, Functions()
        else:
            cls, functions = theirs()
        functions[IMPLEMENTATION], functions["probe"] = finegrained.forward, reference
        cls = type(cls.__name__, (cls,), {})  # the decorator changes it
        cls = use_experts_implementation(cls, experts_interface=functions, has_bias=has_bias, has_gate=has_gate)
        config = config or SimpleNamespace(
            num_experts=E, hidden_size=H, moe_intermediate_size=I, hidden_act="silu",
            _experts_implementation=IMPLEMENTATION, **settings,
        )  # fmt: skip
        flags = dict(has_bias=has_bias, has_gate=has_gate, weight_format="nvfp4", activation_format=activation_format)
        module, g = cls(config, is_concatenated=True, **flags), torch.Generator().manual_seed(seed)
        for name, p in module.named_parameters():
            if p.dtype == torch.int8:
                p.data = torch.randint(-128, 128, p.shape, generator=g, dtype=torch.int8)
            elif p.dtype == torch.float8_e4m3fn:
                p.data = (torch.rand(p.shape, generator=g) * 2).to(p.dtype)
            elif name.endswith("_scale"):
                p.data = (torch.rand(p.shape, generator=g) + 0.5) * (0.01 if "input" in name else 0.1)
            else:
                p.data = torch.randn(p.shape, generator=g)
        return module.eval()  # as loaded models are

    return build


# ---- the same in float64 -------------------------------------------------------------------------
def gate(module, g, u):
    limit, alpha = module.swiglu_limit, module.swiglu_alpha
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(g * alpha) * (u + 1) if alpha is not None else module.act_fn(g) * u


def row_major(sf):
    """Block scales in tiles of 128 rows and 4 blocks: in one, that of row r and block c is byte
    16 (r mod 32) + 4 (r // 32) + c."""
    if sf.dim() == 3:
        return sf
    E, R, C = sf.shape[:3]
    r, c = torch.arange(R * 128)[:, None], torch.arange(C * 4)[None]
    byte = 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4
    return sf.reshape(E, R, C, 512)[:, r // 128, c // 4, byte]


def dense(module, name):
    codes, sf, scale = (getattr(module, name + suffix).detach() for suffix in SUFFIXES[:3])
    codes = codes.view(torch.uint8).long()
    values = E2M1[torch.stack([codes % 16, codes // 16], dim=-1).flatten(-2)]
    sf = row_major(sf.view(torch.uint8)).view(torch.float8_e4m3fn).double()
    return values * sf.repeat_interleave(16, dim=-1) * scale.double()[:, None, None]


def rounded(rows, scale):
    """Rows as NVFP4 with a static scale: value = code * sf * scale."""
    blocks = rows.float().unflatten(-1, (-1, 16))
    sf = (blocks.abs().amax(dim=-1, keepdim=True) / 6 / scale).clamp(max=448).to(torch.float8_e4m3fn).float()
    step = (blocks / (sf * scale)).nan_to_num(0, 0, 0).clamp(-6, 6).double()
    near = (step[..., None] - E2M1[:8] * torch.where(step < 0, -1, 1)[..., None]).abs()
    near[..., 1::2] += 1e-9  # ties go to the even code
    codes = E2M1[near.argmin(dim=-1)] * torch.where(step < 0, -1, 1)
    return (codes * sf.double() * scale.double()).flatten(-2)


def reference(module, x, ids, weights):
    w13, w2 = dense(module, module.gate_up_name), dense(module, "down_proj")
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        e, rows = int(ids[t, k]), [x[t].double()]
        for name, w in ((module.gate_up_name, w13), ("down_proj", w2)):
            scale, bias = (getattr(module, f"{name}{suffix}") for suffix in ("_input_global_scale", "_bias"))
            row = rows[-1] if scale is None else rounded(rows[-1], scale.detach()[e if len(scale) > 1 else 0])
            z = w[e] @ row + (0 if bias is None else bias[e].double())
            if name == "gate_up_proj":
                z = gate(module, z[0::2], z[1::2])
            elif name == "up_proj":
                z = module.act_fn(z)
            rows.append(z)
        z = rows[-1] if module.post_expert_norm is None else module.post_expert_norm(rows[-1].float()).double()
        y[t] += z * weights[t, k].double()
    return y.to(x.dtype)


def inputs(module, T=9, seed=1):
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(module.num_experts, generator=g)[:2] for _ in range(T)])
    return torch.randn(T, module.hidden_dim, generator=g), ids, torch.rand(T, 2, generator=g)


CASES = {
    "plain": {},
    "biases": dict(has_bias=True),
    "SwiGLU-OAI": dict(has_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0),
    "clamps": dict(swiglu_limit=0.5),
    "ungated": dict(has_gate=False),
}


@pytest.mark.parametrize("activation_format", [None, "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_computes_what_the_parameters_say(make, case, activation_format):
    module = make(activation_format, **CASES[case])
    x, ids, weights = inputs(module)
    want = reference(module, x.double(), ids, weights)
    bound = THRESHOLDS["w4a4" if activation_format is None else "fp32"]
    assert relative_error(module(x, ids, weights), want) < bound
    if activation_format == "bf16":
        half, want = x.bfloat16(), reference_of(module, x.bfloat16(), ids, weights)
        assert relative_error(module(half, ids, weights), want) < THRESHOLDS["half"]
    got = module(x[None], ids, weights)
    assert got.shape == (1, *x.shape) and torch.equal(got[0], module(x, ids, weights))


@on_gpu
@pytest.mark.parametrize("activation_format", [None, "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(make, case, activation_format):
    """The same numbers, in a CUDA graph too, without a second copy of the weights."""
    module = make(activation_format, E=16, H=512, I=256, **CASES[case])
    x, ids, weights = (t.to(torch.bfloat16) if t.is_floating_point() else t for t in inputs(module, T=40))
    want = reference(module, x.double(), ids, weights)
    module.cuda()
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    x, ids, weights = x.cuda(), ids.cuda(), weights.cuda()
    torch.cuda.synchronize()
    gc.collect()  # what tests before have left
    asked_for = lambda: torch.cuda.memory_stats()["requested_bytes.all.current"]  # blocks may be 1 MB larger
    before, graph = asked_for(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        got = module(x, ids, weights)
        held = asked_for() - before
        with torch.cuda.graph(graph):
            again = module(x, ids, weights)
    graph.replay()
    assert relative_error(got.cpu(), want) < (THRESHOLDS["w4a4"] if activation_format is None else 0.01)
    assert held < size / 20 and torch.equal(got, again)


def test_a_norm_of_each_experts_rows(make):
    module = make("bf16")
    x, ids, weights = inputs(module)
    module.post_expert_norm, module.has_post_expert_norm = nn.RMSNorm(64, eps=1e-6), True
    nn.init.normal_(module.post_expert_norm.weight)
    want = reference(module, x.double(), ids, weights)
    assert relative_error(module(x, ids, weights), want) < 10 * THRESHOLDS["fp32"], "the norm is in fp32, twice"


def test_a_gate_of_its_own_and_one_that_changes_later(make):
    module = make("bf16")
    x, ids, weights = inputs(module)
    module(x, ids, weights)
    for act in (nn.Mish(), nn.SiLU()):
        module.act_fn = act
        module.config._experts_implementation = "probe"
        want = module(x.double(), ids, weights)
        module.config._experts_implementation = IMPLEMENTATION
        assert relative_error(module(x, ids, weights), want) < THRESHOLDS["fp32"]
        assert module.moe_nvfp4.gate.kind == ("raw" if isinstance(act, nn.Mish) else "silu")
    handle = module.act_fn.register_forward_hook(lambda module, args, output: -output)
    assert relative_error(-module(x, ids, weights), want) < THRESHOLDS["fp32"]
    handle.remove()
    assert relative_error(module(x, ids, weights), want) < THRESHOLDS["fp32"]
    module.swiglu_limit = 0.5  # while the weights are ours
    got = module(x, ids, weights)
    finegrained._give_back(module)
    assert relative_error(got, reference(module, x.double(), ids, weights)) < THRESHOLDS["fp32"]


def test_what_changes_after_the_first_call(make):
    """The norm, the activations, and parameters that are replaced one by one, as weights from elsewhere are."""
    module = make("bf16", has_bias=True)
    x, ids, weights = inputs(module)
    module(x, ids, weights)
    norms = [nn.RMSNorm(64, eps=1e-6) for _ in range(2)]

    def norm(i):
        module.post_expert_norm, module.has_post_expert_norm = norms[i], True
        nn.init.normal_(norms[i].weight)

    def data():
        module.down_proj.data = torch.randint(-128, 128, (4, 64, 16), dtype=torch.int8)
        module.gate_up_proj_bias.data = torch.randn(4, 64)

    def parameter():
        module.gate_up_proj_weight_global_scale = nn.Parameter(torch.rand(4))

    for change in (lambda: norm(0), lambda: norm(1), data, parameter):
        change()
        want = reference_of(module, x.double(), ids, weights)
        assert relative_error(module(x, ids, weights), want) < 10 * THRESHOLDS["fp32"], "the norm is in fp32, twice"
        assert isinstance(module._modules[IMPLEMENTATION], TakenExperts) and module.down_proj.numel() == 0

    module = make(None)
    module(x, ids, weights)
    module.activation_format = "bf16"
    module.gate_up_proj_input_global_scale = module.down_proj_input_global_scale = None
    want = reference_of(module, x.double(), ids, weights)
    assert relative_error(module(x, ids, weights), want) < THRESHOLDS["fp32"]


def test_rows_that_are_gate_and_then_up(make):
    module = make("bf16", has_bias=True)
    x, ids, weights = inputs(module)
    want = reference(module, x.double(), ids, weights)
    for suffix in ("", "_scale_inv", "_bias"):
        p = getattr(module, f"gate_up_proj{suffix}")
        rows = p.data.view(torch.uint8) if p.itemsize == 1 else p.data
        p.data = torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1).view(p.dtype)
    module.holds_interleaved_gate_up = False
    assert relative_error(module(x, ids, weights), want) < THRESHOLDS["fp32"]


def test_block_scales_in_the_tensor_cores_order(make):
    module = make(None, H=128, I=64)
    x, ids, weights = inputs(module)
    tiles = torch.randint(0, 0x40, (4, 1, 2, 2, 256), dtype=torch.uint8).view(torch.float8_e4m3fn)
    module.gate_up_proj_scale_inv = nn.Parameter(tiles, requires_grad=False)
    assert row_major(tiles.view(torch.uint8)).shape == (4, 128, 8)
    want = reference(module, x.double(), ids, weights)
    assert relative_error(module(x, ids, weights), want) < THRESHOLDS["w4a4"]
    assert torch.equal(module.state_dict()["gate_up_proj_scale_inv"].view(torch.uint8), tiles.view(torch.uint8))


def same(a, b):
    return a.keys() == b.keys() and all(as_bytes(t.detach()) == as_bytes(b[k].detach()) for k, t in a.items())


def size(module):
    return sum(p.nbytes for p in module.parameters())


@pytest.mark.parametrize("activation_format", [None, "bf16"])
def test_the_weights_are_there_once_and_come_back(make, activation_format):
    module = make(activation_format, has_bias=True)
    x, ids, weights = inputs(module)
    before, once = {k: v.clone() for k, v in module.state_dict().items()}, size(module)
    first = module(x, ids, weights)
    assert module.gate_up_proj.numel() == module.down_proj.numel() == 0 and isinstance(module.moe_nvfp4, TakenExperts)
    assert size(module) <= once + 4 * 8 * (activation_format is None) + 16, "gate and up have the same scale twice"

    copied = copy.deepcopy(module)
    assert torch.equal(copied(x, ids, weights), first) and copied.moe_nvfp4.theirs[0] is copied
    assert same(copied.state_dict(), before)
    assert isinstance(module._modules[IMPLEMENTATION], TakenExperts)
    assert same(module.state_dict(), before)
    assert IMPLEMENTATION not in module._modules and [n for n, _ in module.named_parameters()] == [*before]
    assert torch.equal(module(x, ids, weights), first)

    module.config._experts_implementation = "probe"  # another one finds them
    assert relative_error(module(x, ids, weights), first) < THRESHOLDS["w4a4"]
    assert IMPLEMENTATION not in module._modules
    module.config._experts_implementation = IMPLEMENTATION
    module(x, ids, weights)
    other = make(activation_format, has_bias=True, seed=5)
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(x, ids, weights), other(x, ids, weights)) and not torch.equal(
        module(x, ids, weights), first
    )


def test_threads_that_call_first_together(make):
    module = make("bf16")
    x, ids, weights = inputs(module)
    want = reference(module, x.double(), ids, weights)
    with ThreadPoolExecutor(8) as pool:
        for y in pool.map(lambda _: module(x, ids, weights), range(16)):
            assert relative_error(y, want) < THRESHOLDS["fp32"]


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_gradients_reach_the_rows_and_the_routing(make, first):
    module = make("bf16")
    x, ids, weights = inputs(module)
    with first():
        module(x, ids, weights)
        finegrained._give_back(module)
        module(x, ids, weights)
    a, b = (t.clone().requires_grad_() for t in (x, weights))
    module(a, ids, b).square().sum().backward()
    c, d = (t.double().requires_grad_() for t in (x, weights))
    finegrained._give_back(module)
    reference(module, c, ids, d).square().sum().backward()
    assert relative_error(a.grad, c.grad) < 10 * THRESHOLDS["fp32"]
    assert relative_error(b.grad, d.grad) < 10 * THRESHOLDS["fp32"]


def lora(module):
    module._moe_operands = lambda kernel: {}


def lora_class(module):
    module.__class__ = type("Lora", (type(module),), {"expert_linear": lambda *_: None})


def parametrized(module):
    nn.utils.parametrize.register_parametrization(module, "down_proj_weight_global_scale", nn.Identity())


def narrow(module):
    module.hidden_dim = 56
    module.gate_up_proj.data, module.down_proj.data = module.gate_up_proj[..., :28], module.down_proj[:, :56]


REFUSED = {
    "it has no holds_interleaved_gate_up": lambda m: delattr(m, "holds_interleaved_gate_up"),
    "weight_format is 'mxfp4'": lambda m: setattr(m, "weight_format", "mxfp4"),
    "activation_format is 'fp8'": lambda m: setattr(m, "activation_format", "fp8"),
    "_moe_operands was replaced, as LoRA": lora,
    "expert_linear was replaced, as LoRA": lora_class,
    "parametrized or pruned": parametrized,
    "down_proj_activation_scale is not supported": lambda m: m.register_parameter(
        "down_proj_activation_scale", nn.Parameter(torch.ones(4))
    ),
    "split over ranks": lambda m: setattr(m, "_is_expert_parallel", True),
    "or not": lambda m: setattr(m.down_proj, "data", m.down_proj.data[:2]),
    "weights are offloaded": lambda m: m.to("meta"),
    "multiples of 16": narrow,
    "holds NaN": lambda m: m.down_proj_scale_inv.data.view(torch.uint8).fill_(0x7F),
    "is 0.0: a global scale": lambda m: m.down_proj_weight_global_scale.data[2:3].zero_(),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_by_name_and_leaves_the_module_as_it_was(make, message):
    module = make("bf16")
    REFUSED[message](module)
    before = {name: p.clone() for name, p in module.named_parameters()}
    x, ids, weights = inputs(make("bf16"))
    with pytest.raises((NotImplementedError, ValueError), match=message):
        module(x, ids, weights)
    after = dict(module.named_parameters())
    assert after.keys() == before.keys() and all(p.shape == before[n].shape for n, p in after.items())
    assert IMPLEMENTATION not in module._modules


def test_adapters_that_come_later_are_refused_too(make):
    module = make("bf16")
    x, ids, weights = inputs(module)
    module(x, ids, weights)
    lora(module)
    with pytest.raises(NotImplementedError, match="_moe_operands was replaced"):
        module(x, ids, weights)


def test_biases_are_not_trained_without_a_word(make):
    module = make("bf16", has_bias=True).train()
    x, ids, weights = inputs(module)
    with pytest.raises(NotImplementedError, match="gate_up_proj_bias.*has requires_grad, and would get no gradients"):
        module(x, ids, weights)
    with torch.no_grad():
        y = module(x, ids, weights)
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        module.get_parameter(name).requires_grad_(False)
    assert torch.equal(module(x, ids, weights), y)


def test_compiled_after_the_first_call(make):
    module = make("bf16")
    x, ids, weights = inputs(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="moves their weights, which torch.compile cannot trace"):
        compiled(x, ids, weights)
    torch._dynamo.reset()
    prepare_model(module)
    assert relative_error(compiled(x, ids, weights), reference_of(module, x, ids, weights)) < THRESHOLDS["fp32"]


def reference_of(module, x, ids, weights):
    other = copy.deepcopy(module)
    finegrained._give_back(other)
    return reference(other, x.double(), ids, weights)


# ---- models, and the registry --------------------------------------------------------------------
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_a_model_has_the_logits_of_the_folder_it_came_from(make, tmp_path, activations):
    """The folder's gate and up have scales of their own. transformers keeps gate's: up's goes into down's."""
    path, _ = quantized(tmp_path, lambda: qwen3_moe(intermediate=32), "modelopt", input_scale=0.02)
    ours = load(path, torch.float32)
    set_activations(ours, activations)
    want, model = logits(ours), copy.deepcopy(ours)
    for name, experts in [*ours.named_modules()]:
        if name.endswith(".experts"):
            E, H, I = experts.num_experts, experts.hidden_size, experts.intermediate_size
            packed = make("bf16" if activations == "bf16" else None, E=E, H=H, I=I, config=experts.config)
            fill(packed, experts.state_dict())
            model.set_submodule(name, packed)
    model.config._experts_implementation_internal = "grouped_mm"
    model.set_experts_implementation(IMPLEMENTATION)
    bound = THRESHOLDS["w4a4"] if activations == "nvfp4" else 10 * THRESHOLDS["fp32"]
    assert relative_error(logits(model), want) < bound
    assert model.model.layers[0].mlp.experts.gate_up_proj.numel() == 0


def fill(module, ours):
    interleave = lambda t: torch.stack(t.chunk(2, dim=1), dim=2).flatten(1, 2)
    ratio = ours["up_proj_global_scale"] / ours["gate_proj_global_scale"]
    assert (ratio != 1).any()
    tensors = {
        "gate_up_proj": interleave(ours["gate_up_proj"]).view(torch.int8),
        "down_proj": ours["down_proj"].view(torch.int8),
        "gate_up_proj_scale_inv": interleave(ours["gate_up_proj_sf"]).view(torch.float8_e4m3fn),
        "down_proj_scale_inv": ours["down_proj_sf"].view(torch.float8_e4m3fn),
        "gate_up_proj_weight_global_scale": ours["gate_proj_global_scale"],
        "down_proj_weight_global_scale": ours["down_proj_global_scale"] * ratio,
        "gate_up_proj_input_global_scale": ours["up_proj_input_scale"].amax()[None],
        "down_proj_input_global_scale": ours["down_proj_input_scale"] / ratio,
    }  # fmt: skip
    for name, p in module.named_parameters():
        assert p.shape == tensors[name].shape and p.dtype == tensors[name].dtype, name
        p.data = tensors[name]


OURS = "import moe_nvfp4.integrations.huggingface as ours"
THEIRS = "from transformers.integrations import finegrained"


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours", "theirs"])
def test_either_package_may_be_imported_first(tmp_path, order):
    (tmp_path / "finegrained.py").write_text(
        "from transformers.integrations.moe import ExpertsInterface\n"
        "class Functions(ExpertsInterface):\n    _global_mapping = {'grouped_mm': print}\n"
        "ALL_FINEGRAINED_EXPERTS_FUNCTIONS = Functions()\n"
    )
    done = python(f"""
import transformers.integrations as i, sys
i.__path__.insert(0, {str(tmp_path)!r})
{order[0]}; {order[1]}
functions = finegrained.ALL_FINEGRAINED_EXPERTS_FUNCTIONS
assert functions["moe_nvfp4"].__module__ == "moe_nvfp4.integrations.huggingface.finegrained"
assert functions["grouped_mm"] is print
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("moe_nvfp4")]
ours.register()
ours.unregister()
assert "moe_nvfp4" not in functions
ours.register()
assert "moe_nvfp4" in functions
""")
    assert done.returncode == 0, done.stderr


def test_importing_this_package_does_not_import_theirs():
    done = python(f"import moe_nvfp4.integrations.huggingface, sys; assert {MODULE!r} not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_the_benchmarks_peer_gets_the_same_weights(monkeypatch):
    """examples/peer_finegrained.py with the kernels' two paths replaced by the float64 loop over their arguments."""
    from examples import peer_finegrained

    def path(x, ids, weights, act_fn, activation_format, **given):
        assert (act_fn, activation_format) == ("silu", "bf16")
        slots = {f"{name}{s}": None for name in ("gate_up_proj", "down_proj") for s in SUFFIXES} | given
        module = SimpleNamespace(
            gate_up_name="gate_up_proj", post_expert_norm=None, swiglu_limit=None, swiglu_alpha=None,
            act_fn=nn.functional.silu, **slots,
        )  # fmt: skip
        return reference(module, x, ids, weights)

    kernel = SimpleNamespace(moe_fused_batched=path, moe_fused_grouped=path)
    monkeypatch.setattr(peer_finegrained, "load", lambda: kernel)
    monkeypatch.setattr(peer_finegrained, "seconds", lambda f: 0)
    torch.manual_seed(0)
    dense = torch.randn(4, 64, 64).bfloat16(), torch.randn(4, 64, 32).bfloat16()
    peer_finegrained.make(*dense)  # compares
    wrong = lambda *given, **also: path(*given, **{**also, "gate_up_proj": also["gate_up_proj"].roll(1, dims=1)})
    kernel.moe_fused_batched = wrong
    with pytest.raises(ValueError, match="computes something else"):
        peer_finegrained.make(*dense)
