"""The gates of 4-bit experts: recognised by what they compute, and those that may change run unfused."""

import copy
import functools
import pickle
from types import MethodType

import pytest
import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_nvfp4.integrations.huggingface import swap_experts
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from tests.common import relative_error
from tests.models import IDS, dbrx, dense_like, gemma4, gpt_oss, logits, make, nemotron_h, qwen3_moe


class ByChannel(Qwen3MoeExperts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up * torch.linspace(1, 2, up.shape[-1])


class Centred(Qwen3MoeExperts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * (up - up.mean(-1, keepdim=True))


class Clamped(Qwen3MoeExperts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.clamp(-50, 50).chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Dropped(Qwen3MoeExperts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.dropout(self.act_fn(gate / self.temperature) * up, 0.5, self.training)


class Scaled(nn.SiLU):
    factor = 1.0

    def forward(self, x):
        return super().forward(self.factor * x)


def test_a_gate_that_reads_more_than_its_activation_runs_unfused(tmp_path):
    """What it reads may change: here the mode, which is recognised in evaluation, and numbers of the user's own."""
    model = make(qwen3_moe, torch.float32)
    for layer in model.model.layers:
        layer.mlp.experts.__class__, layer.mlp.experts.temperature = Dropped, 1.0
    model.model.layers[0].mlp.experts.act_fn = Scaled()
    model.model.layers[1].mlp.experts.act_fn = nn.Sequential(nn.SiLU())
    swap_experts(model, progress=False)
    twin, before = dense_like(model), logits(model)
    for m in (model, twin):
        for layer in m.model.layers:
            layer.mlp.experts.temperature = 3.0
        m.model.layers[0].mlp.experts.act_fn.factor = 0.5
        m.model.layers[1].mlp.experts.act_fn[0] = nn.ReLU()
    assert relative_error(logits(model), logits(twin)) < 1e-5 < 1e-2 < relative_error(logits(twin), before)
    assert relative_error(logits(dense_like(model)), logits(twin)) < 1e-5

    def trained(m):
        torch.manual_seed(0)
        return m.train()(IDS).logits.detach()

    assert (
        relative_error(trained(model), trained(twin)) < 1e-5 < 1e-2 < relative_error(trained(twin), logits(twin.eval()))
    )


def test_only_limits_that_the_gate_reads_count():
    """Not another number whose name ends so, and not beyond what a clamp in the code leaves alone."""
    model = make(qwen3_moe, torch.float32)
    for layer in model.model.layers:
        layer.mlp.experts.token_limit = 0.1
        layer.mlp.gate.weight.data *= 100
        layer.mlp.experts.gate_up_proj.data *= 1000
    model.model.layers[1].mlp.experts.__class__ = Clamped
    swap_experts(model, progress=False)
    assert relative_error(logits(model), logits(dense_like(model))) < 1e-5
    assert [layer.mlp.experts.gate.kind for layer in model.model.layers] == ["silu", "raw"]


@pytest.mark.parametrize("own", [ByChannel, Centred, "interleaved"])
def test_gates_that_treat_channels_differently(own):
    """Among them one that takes halves for gate and up, where the class says that these alternate."""
    model = make(qwen3_moe, torch.float32)
    plain = swap_experts(copy.deepcopy(model), progress=False)
    for layer in model.model.layers:
        if own == "interleaved":
            layer.mlp.experts.is_concatenated = False
        else:
            layer.mlp.experts.__class__ = own
    mine = swap_experts(copy.deepcopy(model), progress=False)
    with torch.no_grad():
        for dense, layer in zip(model.model.layers, plain.model.layers, strict=True):
            dequantized = layer.mlp.experts.to_dense(torch.float32)
            dense.mlp.experts.gate_up_proj.copy_(dequantized.gate_up_proj)
            dense.mlp.experts.down_proj.copy_(dequantized.down_proj)
    assert relative_error(logits(mine), logits(model)) < 1e-5
    assert (relative_error(logits(mine), logits(plain)) > 1e-2) == (own != "interleaved")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("family, name, value", [
    (qwen3_moe, "act_fn", nn.GELU(approximate="tanh")), (qwen3_moe, "act_fn", nn.Tanh()),
    (qwen3_moe, "act_fn", nn.SiLU()), (gpt_oss, "limit", 1.0), (gpt_oss, "alpha", 0.5),
    (nemotron_h, "act_fn", nn.ReLU()),
])  # fmt: skip
def test_a_gate_that_is_changed_later_counts(family, name, value):
    model = swap_experts(make(family, torch.float32), progress=False)
    twin, before = dense_like(model), logits(model)
    for m in (model, twin):
        for module in m.modules():
            if type(module).__name__ in ("HFExperts", "Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"):
                setattr(module, name, value)
    assert relative_error(logits(model), logits(twin)) < 1e-5
    if name == "act_fn":  # compiled without an eager call in between
        for module in (m for m in model.modules() if isinstance(m, HFExperts)):
            setattr(module, name, copy.copy(value))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert relative_error(compiled(IDS).logits.detach(), logits(twin)) < 1e-5
        torch.compiler.reset()
    assert relative_error(logits(model.dequantize()), logits(twin)) < 1e-5
    assert isinstance(value, nn.SiLU) or relative_error(logits(twin), before) > 1e-3


class Normed(Qwen3MoeExperts):
    """With a norm that it does not call."""

    def __init__(self, config):
        super().__init__(config)
        self.post_expert_norm = nn.LayerNorm(config.hidden_size, elementwise_affine=False)


def test_flags_of_the_class_are_read_and_stay(monkeypatch):
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", Normed)
    model = make(qwen3_moe, torch.float32)
    experts = swap_experts(copy.deepcopy(model), progress=False).model.layers[0].mlp.experts
    assert type(model.model.layers[0].mlp.experts) is Normed and experts.post_expert_norm is None
    for name in ("has_bias", "is_concatenated"):
        setattr(experts, name, getattr(experts, name))
        with pytest.raises(NotImplementedError, match=f"{name} of 4-bit experts stays .*dequantize"):
            setattr(experts, name, not getattr(experts, name))
    for layer in model.model.layers:  # with weights, which would be lost
        layer.mlp.experts.post_expert_norm = nn.LayerNorm(layer.mlp.experts.hidden_dim)
    with pytest.raises(NotImplementedError, match="Normed has post_expert_norm.weight, post_expert_norm.bias besides"):
        swap_experts(model, progress=False)


def test_an_activation_of_dbrx_that_is_set_later_is_kept():
    """Its dense experts have it in a module inside. A gate that their class does not have cannot be."""
    model = swap_experts(make(dbrx, torch.float32), progress=False)
    before, experts = logits(model), [m for m in model.modules() if isinstance(m, HFExperts)]
    for module in experts:
        module.act_fn = nn.GELU(approximate="tanh")
    changed = logits(model)
    assert relative_error(changed, before) > 1e-3
    assert relative_error(logits(dense_like(model)), changed) < 1e-5
    experts[0]._apply_gate = lambda rows: rows.chunk(2, dim=-1)[0]
    with pytest.raises(NotImplementedError, match="blocks.0.*experts: its gate was replaced, and a dense module"):
        model.dequantize()
    assert all(isinstance(m, HFExperts) for m in experts) and torch.equal(logits(model), logits(copy.deepcopy(model)))


@pytest.mark.parametrize("what", ["gate", "activation"])
def test_a_class_whose_gate_is_changed_later_counts(what, monkeypatch):
    """As libraries that patch classes do. A model that was pickled or copied in the meantime follows, too."""
    model = swap_experts(make(qwen3_moe, torch.float32), progress=False)
    twin, before = dense_like(model), logits(model)
    experts = model.model.layers[0].mlp.experts
    changed = experts.source_class if what == "gate" else type(experts.act_fn)
    tanh = {
        "gate": lambda self, x: x.chunk(2, dim=-1)[0].tanh() * x.chunk(2, dim=-1)[1],
        "activation": lambda self, x: x.tanh(),
    }
    before_it = pickle.dumps(model)
    monkeypatch.setattr(changed, "_apply_gate" if what == "gate" else "forward", tanh[what])
    for followed in (copy.deepcopy(model), pickle.loads(before_it), model):  # a copy of what has not been called since
        assert relative_error(logits(followed), logits(twin)) < 1e-5 < relative_error(logits(twin), before)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    monkeypatch.undo()
    assert relative_error(logits(copied), before) == relative_error(logits(model), before) == 0
    assert relative_error(logits(twin), before) < 1e-5


@pytest.mark.parametrize("family", [qwen3_moe, nemotron_h], ids=lambda f: f.__name__)
def test_hooks_on_the_activation_function_are_called(family):
    """Where a fused gate would not: with what they are given in a dense model, and no probes. Without them, the gate is
    fused again."""
    seen = []

    def hook(module, args, output):
        seen.append(output)
        return output.clamp(max=0.1)

    def experts(model):
        return [m for m in model.modules() if type(m).__name__.endswith("Experts")]

    model = make(family, torch.float32)
    handles = [m.act_fn.register_forward_hook(hook) for m in experts(model)]
    swap_experts(model, progress=False)
    assert not seen
    hooked, twin = logits(model), dense_like(model)
    for handle in handles:
        handle.remove()
    plain = logits(model)
    assert len(seen) == len(handles) and experts(model)[0].gate.kind != "raw"
    assert relative_error(plain, hooked) > 1e-2
    for m in experts(model) + experts(twin):
        m.act_fn._forward_hooks.clear()
        m.act_fn.register_forward_hook(hook)
    seen.clear()
    assert torch.equal(logits(model), hooked) and relative_error(logits(twin), hooked) < 1e-5
    for ours, theirs in zip(seen[: len(handles)], seen[len(handles) :], strict=True):
        assert relative_error(ours, theirs) < 1e-5
    for function in (lambda self, x: x.tanh(), nn.Tanh.forward):
        for m in experts(model) + experts(twin):
            m.act_fn._forward_hooks.clear()
            m.act_fn.forward = MethodType(function, m.act_fn)
        assert relative_error(logits(model), logits(twin)) < 1e-5 < relative_error(logits(twin), plain)
    for m in experts(model):  # as transformers' use_kernels does: faster, and the same
        m.act_fn.forward = MethodType(type(m.act_fn).forward, m.act_fn)
    assert torch.equal(logits(model), plain) and experts(model)[0].gate.kind != "raw"


def wrapped(function):
    """What users wrap around a function: of the same name, in the same module, and called."""

    @functools.wraps(function)
    def mine(*args):
        return function(*args) * FACTOR["by"]

    return mine


FACTOR = {"by": 1.0}


@pytest.mark.parametrize("which", ["the class's gate", "the activation's class", "the activation"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_function_around_the_librarys_is_called(which, when, monkeypatch):
    def change(model):
        if which == "the class's gate":
            monkeypatch.setattr(Qwen3MoeExperts, "_apply_gate", wrapped(Qwen3MoeExperts._apply_gate))
        elif which == "the activation's class":
            monkeypatch.setattr(SiLUActivation, "forward", wrapped(SiLUActivation.forward))
        else:
            for layer in model.model.layers:
                del layer.mlp.experts.act_fn
                layer.mlp.experts.act_fn = wrapped(nn.functional.silu)

    model = make(qwen3_moe, torch.float32)
    if when == "before":
        change(model)
    swap_experts(model, progress=False)
    if when == "after":
        logits(model)
        change(model)
    twin, plain = dense_like(model), logits(model)
    monkeypatch.setitem(FACTOR, "by", 0.5)
    assert model.model.layers[0].mlp.experts.gate.kind == "raw"
    assert relative_error(logits(model), logits(twin)) < 1e-5 < 1e-2 < relative_error(logits(twin), plain)


def test_attributes_of_an_activation_that_change():
    model = swap_experts(make(gemma4, torch.float32), progress=False)
    experts = [m for m in model.modules() if isinstance(m, HFExperts)]
    plain = logits(model)
    assert experts[0].gate.kind == "gelu_tanh"
    for module in experts:
        module.act_fn.act = nn.functional.relu
    assert relative_error(logits(model), logits(dense_like(model))) < 1e-5 < 1e-2 < relative_error(logits(model), plain)


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
def test_numbers_of_a_gate_that_are_tensors_may_change(kind):
    """An alpha that is trained, and begins as the number that a fused gate has."""
    model = make(gpt_oss, torch.float32)
    experts = [m for m in model.modules() if type(m).__name__ == "GptOssExperts"]
    for module in experts:
        del module.alpha
        module.alpha = kind(torch.ones(()))
    if kind is nn.Parameter:  # 4-bit experts would lose it
        with pytest.raises(NotImplementedError, match="alpha"):
            swap_experts(model, progress=False)
        return
    swap_experts(model, progress=False)
    twin, plain = dense_like(model), logits(model)
    for m in (model, twin):
        for module in m.modules():
            if hasattr(module, "alpha"):
                module.alpha.fill_(2.5)
    assert relative_error(logits(model), logits(twin)) < 1e-5 < 1e-2 < relative_error(logits(twin), plain)


def test_a_global_hook_counts_as_long_as_it_is_there():
    """As of a profiler: the gate runs unfused, so that it is called, and is fused again."""
    model, seen = swap_experts(make(qwen3_moe), progress=False), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(type(module)))
    logits(model)
    assert any("SiLU" in kind.__name__ for kind in seen)
    assert model.model.layers[0].mlp.experts.gate.kind == "raw"
    handle.remove()
    logits(model)
    assert model.model.layers[0].mlp.experts.gate.kind == "silu"
