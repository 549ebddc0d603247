"""swap_experts and MoeNvfp4Config: all or nothing, and every argument has an effect or is refused."""

import copy
import gc
import json
import pickle
import weakref
from contextlib import nullcontext
from types import MethodType

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune
from transformers import AutoConfig, AutoModel, FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    ExpertsInterface,
    grouped_mm_experts_forward,
    use_experts_implementation,
)
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeForCausalLM

from moe_nvfp4 import NVFP4Experts
from moe_nvfp4.integrations.huggingface import (
    MoeNvfp4Config,
    calibrate,
    checkpoint_config,
    linears,
    set_activations,
    swap,
    swap_experts,
)
from moe_nvfp4.integrations.huggingface import experts as hf_experts
from moe_nvfp4.integrations.huggingface.config import resolve
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import matches
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.verify import verify_checkpoint
from moe_nvfp4.weights import Gate
from tests.common import THRESHOLDS, relative_error, stand_for_hopper
from tests.folders import change_config, fp8
from tests.models import (
    FAMILIES,
    IDS,
    SMALL,
    aria,
    as_bytes,
    dbrx,
    deepseek,
    dense_like,
    folder,
    gemma4,
    gpt_oss,
    granite,
    llama4,
    load,
    logits,
    make,
    mixtral,
    qwen3_moe,
    same_tensors,
    step3p7,
    tensors,
)


@pytest.fixture(params=FAMILIES, ids=lambda f: f.__name__)
def family(request):
    return request.param


EXPERTS = "model.layers.{}.mlp.experts"


def kinds(model):
    return [type(layer.mlp.experts).__name__ for layer in model.model.layers]


# ---------------------------------------------------------------- all or nothing
@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_leaves_the_model_as_it_was(family, value):
    model = make(family)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 5, 7] = value
    before, attributes = dict(model.named_parameters()), set(vars(model))
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts: down_proj of expert 3: 1 of .* NaN or Inf"):
        swap_experts(model, progress=False)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert set(vars(model)) == attributes and getattr(model, "hf_quantizer", None) is None
    assert getattr(model.config, "quantization_config", None) is None


@pytest.mark.parametrize("name", ["gate_up_proj_bias", "down_proj_bias"])
def test_a_bias_that_is_not_finite_is_refused(name):
    model = make(gpt_oss)
    with torch.no_grad():
        getattr(model.model.layers[1].mlp.experts, name)[2, 3] = float("nan")
    with pytest.raises(ValueError, match=f"layers.1.mlp.experts: {name} has NaN or Inf"):
        swap_experts(model, progress=False)
    assert not any(isinstance(module, HFExperts) for module in model.modules())


@pytest.mark.slow_after(1)
def test_verify_passes_what_a_swapped_model_saves(family, tmp_path):
    """And it finds the original's weights in the files."""
    make(family).save_pretrained(tmp_path / "bf16")
    swap_experts(make(family), progress=False).save_pretrained(tmp_path / "nvfp4")
    report = verify_checkpoint(tmp_path / "nvfp4", tmp_path / "bf16")
    assert report.warnings == [] and report.matrices > 0
    assert all(0.05 < layer.relative < 0.12 for layer in report.layers.values())


def test_a_model_that_transformers_made_dense_is_saved_dense(tmp_path):
    """From FP8 files: reversing the conversions that loaded them would make every weight FP8, some without scales."""
    source = folder(tmp_path, qwen3_moe)
    files = tensors(source)
    for name in [name for name in files if name.endswith("proj.weight")]:
        files[name], files[f"{name}_scale_inv"], _ = fp8("block", files[name].float())
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    block = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    change_config(source, quantization_config={**block, "modules_to_not_convert": ["lm_head"]})
    dense = FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    model = swap_experts(load(source, quantization_config=dense), progress=False)
    model.save_pretrained(tmp_path / "nvfp4")
    saved = tensors(tmp_path / "nvfp4")
    assert torch.equal(saved["lm_head.weight"], files["lm_head.weight"])
    assert not [name for name in saved if name.endswith("_inv")]
    assert torch.equal(logits(load(tmp_path / "nvfp4")), logits(model))


@pytest.mark.slow
def test_an_interrupted_swap_goes_on_where_it_was(monkeypatch, tmp_path):
    model, whole = make(qwen3_moe), swap_experts(make(qwen3_moe), progress=False)
    quantize, calls = HFExperts.load_expert, []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) > 8 + 3:  # in the second layer
            raise KeyboardInterrupt
        return quantize(self, *args)

    monkeypatch.setattr(HFExperts, "load_expert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swap_experts(model, progress=False)
    assert kinds(model) == ["HFExperts", "Qwen3MoeExperts"]
    mixed = logits(model)
    for half in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match="call swap_experts again"):
            half.save_pretrained(tmp_path / "half")
        assert not (tmp_path / "half").exists()
    monkeypatch.undo()
    reference = make(qwen3_moe)
    swap_experts(reference, exclude=EXPERTS.format(1), progress=False)
    assert torch.equal(mixed, logits(reference))
    swap_experts(model, progress=False)
    assert torch.equal(logits(model), logits(whole))
    model.save_pretrained(tmp_path / "whole")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("recipe", ["mse", "weighted"])
@pytest.mark.parametrize(("module", "function", "after"), [
    (swap, "_quantized", 1), (swap, "set_implementation", 0), (linears, "_with_parameters", 1),
], ids=["experts", "all done", "linears"])  # fmt: skip
def test_an_interrupted_swap_with_linears_goes_on(module, function, after, recipe, monkeypatch, tmp_path):
    """With the same arguments only. q, k and v are dense until all are 4-bit."""
    model, whole = (make(qwen3_moe, torch.float32) for _ in range(2))
    given = dict(recipe=recipe, linears="attention", progress=False)
    swap_experts(whole, **given)
    real, calls = getattr(module, function), []

    def interrupted(*args, **kwargs):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(args)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, function, interrupted)
        swap_experts(model, **given)
    attention = model.model.layers[0].self_attn
    assert len({type(attention.get_submodule(f"{part}_proj")) for part in "qkv"}) == 1
    if module is swap:
        for name, other in (("activations", "nvfp4"), ("recipe", "max"), ("linears", None), ("exclude", ["*.0.*"])):
            with pytest.raises(ValueError, match=f"interrupted with {name}=.* continue with the same, not "):
                swap_experts(model, **given | {name: other})
    swap_experts(model, **given)
    assert [type(m) for m in model.modules()] == [type(m) for m in whole.modules()]
    if recipe == "mse":  # the other's inputs come from the 4-bit layers in front
        assert torch.equal(logits(model), logits(whole))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path, torch.float32)), logits(model))


def test_what_a_model_computes_is_what_is_saved(tmp_path):
    """Activations that were set module by module, and a config that was replaced."""
    source = folder(tmp_path, qwen3_moe)
    model = swap_experts(load(source), progress=False)
    experts = [layer.mlp.experts for layer in model.model.layers]
    experts[0].activations = "nvfp4"
    with pytest.raises(NotImplementedError, match="activations 'nvfp4', others 'bf16', .* set_activations"):
        model.save_pretrained(tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()
    experts[1].activations = "nvfp4"
    model.config = AutoConfig.from_pretrained(source)
    model.save_pretrained(tmp_path / "both")
    assert torch.equal(logits(load(tmp_path / "both")), logits(model))


@pytest.mark.slow
def test_dense_experts_go_one_layer_after_the_other(monkeypatch):
    """While a layer is quantized, those before it are 4-bit, and nothing keeps their dense weights alive."""
    model = make(lambda: qwen3_moe(num_hidden_layers=4))
    dense = [weakref.ref(layer.mlp.experts.down_proj) for layer in model.model.layers]
    quantize, alive = HFExperts.load_expert, []

    def watched(self, e, *args):
        if e == 0:
            gc.collect()
            alive.append(sum(ref() is not None for ref in dense))
        return quantize(self, e, *args)

    monkeypatch.setattr(HFExperts, "load_expert", watched)
    swap_experts(model, progress=False)
    assert alive == [4, 3, 2, 1]


def test_hooks_stay_where_a_layer_is_replaced():
    """By 4-bit experts and linears, and by dense ones again; their handles still remove them."""
    model, seen = make(qwen3_moe, torch.float32), []

    def look(module, args):
        seen.append(type(module).__name__)

    def double(module, args, output):
        return 2 * output

    layer = model.model.layers[0]
    handles = [layer.mlp.experts.register_forward_pre_hook(look), layer.self_attn.v_proj.register_forward_hook(double)]
    swap_experts(model, linears=["attention"], progress=False)
    hooked = logits(model)
    assert seen == ["HFExperts"]
    for name, p in (twin := dense_like(model)).named_parameters():
        if name == "model.layers.0.self_attn.v_proj.weight":
            p.data *= 2
    twin.model.layers[0].self_attn.v_proj._forward_hooks.clear()
    assert relative_error(hooked, logits(twin)) < 1e-5
    seen.clear()
    model.dequantize()
    assert relative_error(logits(model), hooked) < 1e-5 and seen == ["Qwen3MoeExperts"]
    for handle in handles:
        handle.remove()
    assert relative_error(logits(model), hooked) > 0.01 and seen == ["Qwen3MoeExperts"]


def test_attributes_of_modules_stay():
    """Which a user's hook reads."""
    model = make(qwen3_moe, torch.float32)
    attention, experts = model.model.layers[0].self_attn, model.model.layers[0].mlp.experts
    attention.v_proj.scale = experts.scale = 0.5
    for module in (attention.v_proj, experts):
        module.register_forward_hook(lambda module, args, y: y * module.scale)
    swap_experts(model, linears="attention", progress=False)
    attention.k_proj.note = model.model.layers[1].mlp.experts.note = "mine"
    halved = logits(model)
    attention.v_proj.scale = model.model.layers[0].mlp.experts.scale = 1.0
    assert relative_error(logits(model), halved) > 1e-2
    attention.v_proj.scale = model.model.layers[0].mlp.experts.scale = 0.5
    assert relative_error(logits(model.dequantize()), halved) < 1e-5
    assert attention.k_proj.note == model.model.layers[1].mlp.experts.note == "mine"
    assert {*vars(attention.q_proj)} == {*vars(nn.Linear(1, 1)), "_is_hf_initialized"}


@pytest.mark.parametrize("what", ["parameter", "buffer", "module"])
def test_what_was_added_to_modules_is_not_lost(what):
    def add(module):
        if what == "module":
            module.add_module("added", nn.Linear(2, 2))
        else:
            getattr(module, f"register_{what}")("added", nn.Parameter(torch.ones(2)))

    model = make(qwen3_moe)
    add(model.model.layers[0].self_attn.q_proj)
    with pytest.raises(NotImplementedError, match=r"0\.self_attn\.q_proj: added was added"):
        swap_experts(model, linears="attention", progress=False)
    assert kinds(model) == ["Qwen3MoeExperts"] * 2
    for part in ("self_attn.q_proj", "mlp.experts"):
        model = swap_experts(make(qwen3_moe), linears="attention", progress=False)
        add(model.model.layers[0].get_submodule(part))
        if (part, what) == ("mlp.experts", "module"):
            assert isinstance(model.dequantize().model.layers[0].mlp.experts.added, nn.Linear)
            continue
        with pytest.raises(NotImplementedError, match=rf"0\.{part}: added was added"):
            model.dequantize()
        assert kinds(model) == ["HFExperts"] * 2


def test_a_patch_of_all_linears_is_refused(monkeypatch):
    plain = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: plain(self, x) * 0.9)
    with pytest.raises(ValueError, match=r"q_proj: forward was assigned"):
        swap_experts(make(qwen3_moe), linears="attention", progress=False)


def test_hooks_of_state_dicts_do_not_stay(caplog):
    model = make(qwen3_moe)
    model.model.layers[0].self_attn.q_proj.register_state_dict_post_hook(lambda *args: None)
    swap_experts(model, linears="attention", progress=False)
    assert "hooks of state dicts on Linear" in caplog.text and caplog.text.count("hooks of state dicts") == 1
    model.model.layers[1].mlp.experts.register_load_state_dict_post_hook(lambda *args: None)
    model.dequantize()
    assert "hooks of state dicts on HFExperts" in caplog.text


def test_a_module_that_a_user_keeps_has_hooks_of_its_own():
    model, seen = make(qwen3_moe, torch.float32), []
    old = model.model.layers[0].mlp.experts
    handle = old.register_forward_hook(lambda *args: seen.append("both"))
    swap_experts(model, progress=False)
    old.register_forward_hook(lambda *args: seen.append("dense"))
    model.model.layers[0].mlp.experts.register_forward_hook(lambda *args: seen.append("4-bit"))
    logits(model)
    assert seen == ["both", "4-bit"]
    old(torch.randn(1, 64), torch.tensor([[0]]), torch.ones(1, 1))
    assert seen == ["both", "4-bit", "both", "dense"]
    handle.remove()
    logits(model)
    assert seen[4:] == ["4-bit"]


class Doubled(HFExperts):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


CHANGES = {
    "its forward": lambda experts: setattr(experts, "forward", lambda x, *args: x),
    "its class": lambda experts: setattr(experts, "__class__", Doubled),
    "its post_expert_norm": lambda experts: setattr(experts, "post_expert_norm", nn.LayerNorm(64)),
    "its gate": lambda experts: setattr(experts, "gate", Gate("gelu_tanh")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_4_bit_experts_that_dense_ones_would_lose_are_refused(what):
    model = swap_experts(make(qwen3_moe, torch.float32), linears="attention", progress=False)
    logits(model)
    CHANGES[what](model.model.layers[1].mlp.experts)
    changed = logits(model)
    with pytest.raises(NotImplementedError, match=f"layers.1.mlp.experts: {what} was replaced, and a dense module"):
        model.dequantize()
    assert torch.equal(logits(model), changed) and kinds(model)[0] == "HFExperts"


def test_dense_biases_that_alternate_are_not_taken_for_4_bit_ones():
    """gpt-oss: names, shapes and dtypes of a dense model's biases are those of a 4-bit one, and the rows are not."""
    model = swap_experts(make(gpt_oss, torch.float32), progress=False)
    dense, before = make(gpt_oss, torch.float32), {k: t.clone() for k, t in model.state_dict().items()}
    same = {k: t for k, t in dense.state_dict().items() if k in before and t.shape == before[k].shape}
    with pytest.raises(RuntimeError, match=r"experts\.gate_up_proj_bias comes without .*\[bias\[:, ::2\], bias\["):
        model.load_state_dict(same, strict=False)
    model.load_state_dict({k: t for k, t in same.items() if not k.endswith("gate_up_proj_bias")}, strict=False)
    model.load_state_dict(before)
    with pytest.raises(NotImplementedError, match="bias='all' would save"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], bias="all"))
    get_peft_model(swap_experts(make(qwen3_moe), progress=False), LoraConfig(target_modules=["q_proj"], bias="all"))


@pytest.mark.parametrize("family", [qwen3_moe, llama4])
@pytest.mark.parametrize("kept", [[3, 1, 0], [0, 1, 2, 3, 1, 0]], ids=["fewer", "more"])
def test_other_numbers_of_experts(family, kept, tmp_path):
    """Experts pruned or repeated in a 4-bit model, as in a dense one; Llama 4's have rows for each expert."""
    model = swap_experts(make(family, torch.float32), progress=False)
    E, twin = model.config.num_experts if family is qwen3_moe else model.config.num_local_experts, dense_like(model)
    for m in (model, twin):
        for module in m.modules():
            for name, p in [*module.named_parameters(recurse=False)]:
                if p.shape[0] == E:
                    setattr(module, name, nn.Parameter(p.data[kept].clone(), requires_grad=False))
            if hasattr(module, "num_experts") and not isinstance(module, HFExperts):
                module.num_experts = len(kept)
        setattr(m.config, "num_local_experts" if family is llama4 else "num_experts", len(kept))
    want = logits(twin)
    assert relative_error(logits(model), want) < 1e-5
    with pytest.raises(NotImplementedError, match=rf"it has {len(kept)} experts, .* had {E}: save the model"):
        model.dequantize()
    assert relative_error(logits(model), want) < 1e-5
    model.save_pretrained(tmp_path)
    assert relative_error(logits(load(tmp_path, dtype=torch.float32).dequantize()), want) < 1e-5


def test_awqs_scales_that_are_added_by_hand_are_said(tmp_path):
    """In one layer only, nothing would read them."""
    model = swap_experts(make(qwen3_moe, torch.float32), progress=False)
    layers = [layer.mlp.experts for layer in model.model.layers]
    for layer in layers:
        with (
            pytest.raises(ValueError, match="experts has no pre_quant_scale.*add_pre")
            if layer is layers[1]
            else (nullcontext())
        ):
            model.save_pretrained(tmp_path / "saved")
        layer.add_pre_quant_scales(torch.float32)
        for scales in layer.pre_quant_scales:
            scales.data.uniform_(0.5, 2)
    model.save_pretrained(tmp_path / "saved", state_dict=None)
    assert json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]["quant_algo"] == "NVFP4_AWQ"
    assert torch.equal(logits(load(tmp_path / "saved", torch.float32)), logits(model))


class Half(ModelHook):
    def post_forward(self, module, output):
        return output / 2


def test_hooks_that_accelerate_calls_stay():
    model = make(qwen3_moe, torch.float32)
    plain = logits(swap_experts(copy.deepcopy(model), linears="attention", progress=False))
    for layer in model.model.layers:
        for module in (layer.mlp.experts, layer.self_attn.q_proj):
            add_hook_to_module(module, Half())
    hooked = logits(swap_experts(model, linears="attention", progress=False))
    assert relative_error(hooked, plain) > 0.05
    assert relative_error(logits(dense_like(model)), hooked) < 1e-5
    for layer in model.model.layers:
        remove_hook_from_module(layer.mlp.experts)
        remove_hook_from_module(layer.self_attn.q_proj)
    assert torch.equal(logits(model), plain)


def test_experts_that_were_compiled_in_place_do_not_come_back():
    """Dequantized, they are the 4-bit ones', and nothing holds the original."""
    model = make(qwen3_moe, torch.float32)
    for layer in model.model.layers:
        layer.mlp.experts.compile(backend="eager")
    logits(model)
    original = weakref.ref(model.model.layers[0].mlp.experts)
    expected = logits(swap_experts(model, progress=False))
    assert relative_error(logits(model.dequantize()), expected) < 1e-5
    torch.compiler.reset()
    gc.collect()
    assert original() is None


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_dense_modules_that_are_added_are_on_the_ignore_list(dialect, tmp_path):
    """A layer of dense experts, a linear, a block of another kind: servers take the others for 4-bit."""
    source = folder(tmp_path, qwen3_moe)
    given = MoeNvfp4Config(exclude="model.layers.0.*", linears="attention", dialect=dialect)
    model = load(source, quantization_config=given)
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[1].mlp.extra = nn.Linear(64, 64)
    model.config.num_hidden_layers = 3
    model.save_pretrained(tmp_path / "saved")
    ignore = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]["ignore"]
    files = {name.rpartition(".")[0] for name, t in tensors(tmp_path / "saved").items() if t.dtype == torch.bfloat16}
    files = {name for name in files if name.endswith(("proj", "extra", "mlp.gate", "lm_head"))}
    assert len(files) > 24 and [n for n in files if not any(matches(pattern, n) for pattern in ignore)] == []
    assert not any(matches(pattern, "model.layers.1.mlp.experts.0.up_proj") for pattern in ignore)


def test_experts_of_a_name_that_nothing_reads_are_not_saved(tmp_path):
    model = make(qwen3_moe)
    model.model.layers[1].mlp.bank = model.model.layers[1].mlp.__dict__["_modules"].pop("experts")
    swap_experts(model, progress=False)
    with pytest.raises(NotImplementedError, match=r"layers\.1\.mlp\.bank: files name a 4-bit expert"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_hooks_of_a_models_class_stay_while_it_loads(tmp_path):
    """And what else it assigns to modules that become 4-bit is refused, from dense and from 4-bit files."""
    calls = []

    class Hooked(Qwen3MoeForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            layer = self.model.layers[1]
            for module in (layer.mlp.experts, layer.self_attn.q_proj):
                module.register_forward_hook(lambda m, args, y: calls.append(type(m).__name__) or y / 2)

    class Assigned(Qwen3MoeForCausalLM):
        which = "mlp.experts"

        def __init__(self, config):
            super().__init__(config)
            self.model.layers[1].get_submodule(self.which).forward = lambda *args: args[0]

    config = MoeNvfp4Config(linears="attention")
    source = folder(tmp_path, qwen3_moe, dtype=torch.float32)
    load(source, torch.float32, quantization_config=config).save_pretrained(tmp_path / "nvfp4")
    for path, given in ((source, {"quantization_config": config}), (tmp_path / "nvfp4", {})):
        model = Hooked.from_pretrained(path, dtype=torch.float32, **given).eval()
        found = logits(model)
        assert calls == ["NVFP4Linear", "HFExperts"]
        assert relative_error(logits(dense_like(model)), found) < 1e-5
        calls.clear()
        for Assigned.which in ("mlp.experts", "self_attn.q_proj"):
            with pytest.raises(
                NotImplementedError, match=f"layers.1.{Assigned.which}: the model's class assigns forward"
            ):
                Assigned.from_pretrained(path, dtype=torch.float32, **given)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["forward", "_apply_gate"])
def test_functions_of_a_single_module_are_refused_or_run(name):
    model = make(qwen3_moe, torch.float32)
    experts = model.model.layers[1].mlp.experts
    setattr(experts, name, lambda *args: args[0])
    with pytest.raises(ValueError, match=f"layers.1.mlp.experts: {name} was assigned to this module.*assign it after"):
        swap_experts(model, progress=False)
    assert kinds(model) == ["Qwen3MoeExperts"] * 2
    delattr(experts, name)
    swap_experts(model, progress=False)
    twin = dense_like(model)
    for m in (model, twin):
        change = {"forward": lambda x, *args: -x, "_apply_gate": lambda x: x.chunk(2, -1)[0] - x.chunk(2, -1)[1]}[name]
        setattr(m.model.layers[1].mlp.experts, name, change)
    assert relative_error(logits(model), logits(twin)) < 1e-5


def test_linears_with_a_forward_of_their_own_are_refused():
    model = make(qwen3_moe)
    linear = model.model.layers[1].self_attn.o_proj
    linear.forward = lambda x: x
    with pytest.raises(ValueError, match="layers.1.self_attn.o_proj: forward was assigned to this module"):
        swap_experts(model, linears=["attention"], progress=False)
    del linear.forward
    prune.l1_unstructured(linear, "weight", 0.5)
    with pytest.raises(ValueError, match="o_proj.* stays dense: its weight is no plain parameter"):
        swap_experts(model, linears=["*.layers.1.*.o_proj"], progress=False)
    with pytest.raises(ValueError, match="experts: the weights are parametrized.*prune.remove"):
        pruned = make(qwen3_moe)
        prune.l1_unstructured(pruned.model.layers[1].mlp.experts, "down_proj", 0.5)
        swap_experts(pruned, progress=False)


@pytest.mark.parametrize("linears", [None, "*.mamba.dt_proj"])
def test_a_family_that_asks_whether_it_is_quantized(linears, tmp_path):
    """Jamba reads dt_proj.weight, unless its config says that the model is 4-bit: then it calls the module, and rounds
    otherwise."""
    from transformers import JambaConfig, JambaForCausalLM

    def jamba():
        return JambaForCausalLM(JambaConfig(
            **{k: v for k, v in SMALL.items() if k != "head_dim"}, intermediate_size=48, num_experts=4,
            num_experts_per_tok=2, expert_layer_period=1, expert_layer_offset=0, attn_layer_period=2,
            attn_layer_offset=0, mamba_d_state=16, mamba_dt_rank=16, mamba_expand=1, use_mamba_kernels=False,
        ))  # fmt: skip

    source = folder(tmp_path, jamba)
    loaded = load(source, quantization_config=MoeNvfp4Config(linears=linears))
    swapped = swap_experts(load(source), linears=linears, progress=False)
    assert torch.equal(logits(swapped), logits(loaded))
    swapped.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(load(tmp_path / "b")), logits(swapped))
    assert not hasattr(load(source).config, "_is_quantized")


def test_linears_that_stay_dense_are_named(caplog):
    """In a group, too: one warning for each, as quantize reports them."""
    model = make(qwen3_moe)
    prune.l1_unstructured(model.model.layers[1].self_attn.o_proj, "weight", 0.5)
    swap_experts(model, linears=["attention", "lm_head"], exclude="lm_head", progress=False)
    left = [r.message for r in caplog.records if "stays dense" in r.message]
    assert len(left) == 1 and left[0].startswith(
        "linears: model.layers.1.self_attn.o_proj stays dense: its weight is no"
    )
    model = get_peft_model(make(qwen3_moe), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        ValueError, match="fuse .*k_proj and .*q_proj, of which the second stays dense .its weight is no"
    ):
        swap_experts(model, linears="attention", progress=False)


@pytest.mark.slow
def test_experts_that_are_compiled_by_themselves_are_refused():
    model = make(qwen3_moe)
    experts = model.model.layers[1].mlp.experts
    model.model.layers[1].mlp.experts = torch.compile(experts)
    with pytest.raises(ValueError, match="experts._orig_mod: torch.compile has made a program.*swap first"):
        swap_experts(model, progress=False)
    model.model.layers[1].mlp.experts = experts
    model.model.layers[1].self_attn.o_proj = torch.compile(model.model.layers[1].self_attn.o_proj)
    with pytest.raises(ValueError, match="o_proj._orig_mod: torch.compile has made"):
        swap_experts(model, linears="*.layers.1.*.o_proj", progress=False)


def test_a_subclass_with_a_forward_of_its_own_is_refused():
    class Doubled(Qwen3MoeExperts):
        def forward(self, *args):
            return 2 * super().forward(*args)

    model = make(qwen3_moe)
    model.model.layers[1].mlp.experts.__class__ = Doubled
    with pytest.raises(NotImplementedError, match="Doubled has a forward of its own"):
        swap_experts(model, progress=False)
    swap_experts(model, exclude="model.layers.1.*", progress=False)
    assert kinds(model) == ["HFExperts", "Doubled"]
    model = make(qwen3_moe)
    model.model.layers[1].mlp.experts.__class__ = type(
        "Called", (Qwen3MoeExperts,), {"__call__": lambda self, *a: a[0]}
    )
    with pytest.raises(NotImplementedError, match="Called has a __call__ of its own"):
        swap_experts(model, progress=False)


@pytest.mark.parametrize("family", [dbrx, llama4, qwen3_moe, step3p7], ids=lambda f: f.__name__)
def test_a_class_whose_forward_was_patched_is_refused(family, monkeypatch):
    """Before swapping; some classes are known by their names."""
    model = make(family)
    changed = next(type(m) for m in model.modules() if type(m).__name__.endswith("Experts"))
    monkeypatch.setattr(changed, "forward", lambda self, *args: args[0])
    with pytest.raises(NotImplementedError, match=f"{changed.__name__} has a forward of its own"):
        swap_experts(model, progress=False)
    monkeypatch.undo()
    logits(swap_experts(model, progress=False))
    monkeypatch.setattr(changed, "forward", lambda self, *args: args[0])
    with pytest.raises(NotImplementedError, match=f"{changed.__name__}.forward was replaced, and its experts are 4-bi"):
        logits(model)
    monkeypatch.undo()
    logits(model)


def test_an_experts_implementation_of_the_users_is_refused(monkeypatch):
    monkeypatch.setitem(
        ALL_EXPERTS_FUNCTIONS, "mine", lambda self, x, ids, p: grouped_mm_experts_forward(self, x, ids, p / 2)
    )
    model = make(qwen3_moe)
    model.set_experts_implementation("mine")
    with pytest.raises(
        ValueError, match="layers.0.mlp.experts: the model runs its experts by 'mine', a function of yo"
    ):
        swap_experts(model, progress=False)
    for name in ("batched_mm", "eager"):
        model.set_experts_implementation(name)
        swap_experts(copy.deepcopy(model), progress=False)
    own = type("Own", (Qwen3MoeExperts,), {"forward": Qwen3MoeExperts.forward})
    model.model.layers[0].mlp.experts.__class__ = use_experts_implementation(own, experts_interface=ExpertsInterface())
    with pytest.raises(NotImplementedError, match="Own runs by functions of an experts_interface of its own"):
        swap_experts(model, progress=False)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "activation"])
def test_what_4_bit_experts_would_lose_is_refused(kind):
    """Swish with a learned factor, say: from its usual value 1, the gate is silu until it is trained."""
    model = make(qwen3_moe)
    experts = model.model.layers[1].mlp.experts
    if kind == "activation":
        experts.act_fn = nn.PReLU()
    elif kind == "buffer":
        experts.register_buffer("beta", torch.ones(()))
    else:
        experts.beta = nn.Parameter(torch.ones(()))
    name = "act_fn.weight" if kind == "activation" else "beta"
    with pytest.raises(NotImplementedError, match=f"Qwen3MoeExperts has {name} besides the weights of .* would lose"):
        swap_experts(model, progress=False)
    assert kinds(model) == ["Qwen3MoeExperts"] * 2
    swap_experts(model, exclude="model.layers.1.*", progress=False)


def test_a_linear_without_a_static_scale_is_said(tmp_path, caplog):
    """Where experts have one: servers would run it with a scale of 1. Folders that other tools wrote may be so."""
    model = swap_experts(make(qwen3_moe, torch.float32), linears="attention", progress=False)
    calibrate(model, [IDS], progress=False).save_pretrained(tmp_path / "saved")
    assert "no static activation scale" not in caplog.text
    model.model.layers[1].self_attn.k_proj.input_scale = None
    model.save_pretrained(tmp_path / "saved")
    assert "model.layers.1.self_attn.k_proj has no static activation scale, and experts have" in caplog.text
    calibrate(model, [IDS], progress=False).save_pretrained(tmp_path / "saved")
    assert verify_checkpoint(tmp_path / "saved").warnings == []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_static_scales_in_one_layer_are_not_saved(activations, tmp_path):
    """Neither verify nor from_pretrained would take the files."""
    model = set_activations(swap_experts(make(qwen3_moe, torch.float32), progress=False), activations)
    model.model.layers[1].mlp.experts.set_input_scales(torch.tensor(0.1), torch.tensor(0.2))
    with pytest.raises(ValueError, match="layers.0.mlp.experts has no static activation scale, and other layers have"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    calibrate(model, [IDS], progress=False).save_pretrained(tmp_path / "saved")
    verify_checkpoint(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved", torch.float32)), logits(model))
    config = lambda: json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]["moe_nvfp4"]
    for layer in model.model.layers:  # the config says what the layers have, whoever gave and took it
        for name in ("up_proj_input_scale", "down_proj_input_scale"):
            layer.mlp.experts._parameters.pop(name)
    model.save_pretrained(tmp_path / "saved")
    assert config()["input_scale"] is False
    for layer in model.model.layers:
        layer.mlp.experts.set_input_scales(torch.tensor(0.1), torch.tensor(0.2))
    model.save_pretrained(tmp_path / "saved")
    assert config()["input_scale"] is True and verify_checkpoint(tmp_path / "saved")


def test_codes_that_a_cast_destroyed_are_not_saved(tmp_path):
    model = swap_experts(make(qwen3_moe), progress=False).type(torch.bfloat16)
    with pytest.raises(ValueError, match="experts.gate_up_proj is torch.bfloat16: 4-bit codes are bytes"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_linears_that_another_library_quantized_are_not_saved(tmp_path):
    """transformers would write some of them without a word, and nothing would read the files."""
    model = swap_experts(make(qwen3_moe, torch.float32), progress=False)
    model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)
    with pytest.raises(NotImplementedError, match=r"q_proj is torch\.ao\..*another library quantized, and nothing"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_was_put_in_by_hand_is_refused(first, tmp_path):
    """set_activations, calibrate and dequantize passed over it, and it was saved under names that nothing reads."""
    model = make(qwen3_moe)
    old = model.model.layers[0].mlp.experts
    own = NVFP4Experts.from_dense(old.gate_up_proj, old.down_proj, recipe="max")
    refused = pytest.raises(
        NotImplementedError, match="layers.0.mlp.experts is NVFP4Experts, put there by hand.*load_expert"
    )
    if first:
        model.model.layers[0].mlp.experts = own
        with refused:
            swap_experts(model, progress=False)
        assert model.model.layers[0].mlp.experts is own
        return
    swap_experts(model, progress=False)
    layer, w13 = model.model.layers[0].mlp.experts, old.gate_up_proj.detach()
    for e in range(len(w13)):  # what the error advises
        layer.load_expert(e, w13[e], old.down_proj[e].detach(), "max")
    x, ids, weights = torch.randn(5, 64).bfloat16(), torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    assert torch.equal(layer(x, ids, weights), own(x, ids, weights))
    model.model.layers[0].mlp.experts = own
    alone = make(qwen3_moe)
    for layer in alone.model.layers:
        layer.mlp.experts = own
    for call in (lambda: set_activations(model, "nvfp4"), lambda: set_activations(alone, "nvfp4"),
                 lambda: calibrate(model, [IDS], progress=False), model.dequantize,
                 lambda: model.save_pretrained(tmp_path / "a")):  # fmt: skip
        with refused:
            call()
    assert not (tmp_path / "a").exists()


def test_experts_that_two_layers_share_are_swapped_for_both():
    model = make(qwen3_moe)
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    apart = make(qwen3_moe)
    apart.model.layers[1].mlp.experts = copy.deepcopy(apart.model.layers[0].mlp.experts)
    swap_experts(model, progress=False)
    assert kinds(model) == ["HFExperts"] * 2 and model.model.layers[0].mlp.experts is model.model.layers[1].mlp.experts
    assert torch.equal(logits(model), logits(swap_experts(apart, progress=False)))
    model.dequantize()
    assert kinds(model) == ["Qwen3MoeExperts"] * 2
    assert model.model.layers[0].mlp.experts is model.model.layers[1].mlp.experts


def test_linears_of_a_part_have_no_names():
    layer = nn.ModuleList([make(qwen3_moe).model.layers[0]])
    with pytest.raises(ValueError, match=r"linears=.*attention.* a ModuleList is a part of one"):
        swap_experts(layer, linears="attention", progress=False)
    assert type(layer[0].mlp.experts) is Qwen3MoeExperts
    assert isinstance(swap_experts(layer, progress=False)[0].mlp.experts, HFExperts)


@pytest.mark.slow
def test_two_models_in_one_module_are_refused():
    """Each has a config, and only the first one's would say what both are."""
    for models in (
        [make(qwen3_moe), make(mixtral)],
        [swap_experts(make(f), progress=False) for f in (mixtral, mixtral)],
    ):
        both = nn.ModuleList(models)
        for change in (swap_experts, lambda m: set_activations(m, "nvfp4"), lambda m: calibrate(m, [IDS])):
            if change is swap_experts or kinds(models[0])[0] == "HFExperts":
                with pytest.raises(
                    ValueError, match="ModuleList holds .* outside of it, 1.model.layers.0.mlp.experts:"
                ):
                    change(both)
        assert {m.activations for m in both.modules() if isinstance(m, HFExperts)} <= {"bf16"}
    heads = nn.ModuleDict({"body": make(qwen3_moe), "experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))})
    assert kinds(swap_experts(heads, progress=False)["body"]) == ["HFExperts"] * 2  # these are no model's


class Computed(Qwen3MoeExperts):
    @property
    def down_proj(self):
        return self.raw * 2

    @down_proj.setter
    def down_proj(self, value):
        self.raw = value


def test_weights_that_are_computed_from_others_are_refused():
    model = make(qwen3_moe)
    experts = model.model.layers[1].mlp.experts
    experts.raw, experts.__class__ = experts._parameters.pop("down_proj"), Computed
    with pytest.raises(NotImplementedError, match="Computed.down_proj is no parameter of its own, but computed"):
        swap_experts(model, progress=False)


@pytest.mark.parametrize("before", [True, False])
def test_a_save_pretrained_of_the_users_is_called(before, tmp_path):
    """Assigned before swapping or after it, and it is there after dequantize."""
    model, calls = make(qwen3_moe), []

    def save(self, folder):
        calls.append(folder)
        type(self).save_pretrained(self, folder)

    for step in ("own", "swap") if before else ("swap", "own"):
        if step == "own":
            model.save_pretrained = MethodType(save, model)
        else:
            swap_experts(model, progress=False)
    model.save_pretrained(tmp_path / "nvfp4")
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    model.dequantize().save_pretrained(tmp_path / "dense")
    assert calls == [tmp_path / name for name in ("nvfp4", "copy", "dense")]
    assert torch.equal(logits(load(tmp_path / "nvfp4")), logits(load(tmp_path / "copy")))


@pytest.mark.parametrize("config", [{"hidden_size": 4}, None], ids=["a dict", "none"])
def test_a_model_whose_construction_failed_is_none(config):
    """An interpreter keeps it with the last error."""
    half = Qwen3MoeForCausalLM.__new__(Qwen3MoeForCausalLM)
    with pytest.raises((TypeError, AttributeError)):
        half.__init__(config)
    assert kinds(swap_experts(make(qwen3_moe), progress=False)) == ["HFExperts"] * 2


def test_a_part_of_a_model_is_refused(tmp_path):
    """The whole model would save it without this library: codes by expert, but scales in stacks."""
    whole = make(granite, torch.float32)
    before = logits(whole)
    with pytest.raises(ValueError, match="GraniteMoeModel is a part of GraniteMoeForCausalLM, .*: pass the whole"):
        swap_experts(whole.model, progress=False)
    assert torch.equal(logits(whole), before) and not hasattr(whole.config, "quantization_config")
    body = whole.model
    del whole
    swap_experts(body, progress=False).save_pretrained(tmp_path / "body")
    with torch.no_grad():
        same = [m(IDS)[0] for m in (body, AutoModel.from_pretrained(tmp_path / "body", dtype=torch.float32))]
    assert torch.equal(*same)


def test_a_part_of_a_4_bit_model_is_not_saved(tmp_path):
    """It would be written without a word, and read by nothing: scales had the names of the module's parameters."""
    whole = swap_experts(make(qwen3_moe, torch.float32), linears="attention", progress=False)
    for part in (whole.model, copy.deepcopy(whole).model, pickle.loads(pickle.dumps(whole)).model):
        with pytest.raises(NotImplementedError, match="Qwen3MoeModel is a part of a 4-bit model, .*: save the whole"):
            part.save_pretrained(tmp_path / "body")
    assert not (tmp_path / "body").exists()
    whole.dequantize()
    whole.model.save_pretrained(tmp_path / "body")
    with torch.no_grad():
        same = [m(IDS)[0] for m in (whole.model, AutoModel.from_pretrained(tmp_path / "body", dtype=torch.float32))]
    assert torch.equal(*same)


@pytest.mark.slow
def test_a_part_of_a_model_that_was_loaded_is_refused(tmp_path):
    """Layers of it, and a body that was loaded by itself and put into a whole."""
    whole = load(path := folder(tmp_path, granite))
    whole.model = AutoModel.from_pretrained(path)
    for part in (whole.model, whole.model.layers, whole.model.layers[1]):
        with pytest.raises(ValueError, match=f"{type(part).__name__} is a part of Granite.*: pass the whole"):
            swap_experts(part, progress=False)
    assert not any(isinstance(m, HFExperts) for m in whole.modules())


def test_float64_is_refused_before_anything_is_read(tmp_path):
    source = folder(tmp_path, mixtral)
    load(source, quantization_config=MoeNvfp4Config()).save_pretrained(tmp_path / "nvfp4")
    for path, config in ((source, {"quantization_config": MoeNvfp4Config()}), (tmp_path / "nvfp4", {})):
        with pytest.raises(ValueError, match=r"dtype=torch.float64: .*load in one of these; dequantize\(torch.float64"):
            load(path, torch.float64, **config)


@pytest.mark.slow
def test_two_models_of_one_config_say_what_each_is(tmp_path):
    one = make(qwen3_moe, torch.float32)
    other = type(one)(one.config).eval()
    assert other.config is one.config
    before = logits(other)
    swap_experts(one, progress=False)
    one.save_pretrained(tmp_path / "4-bit"), other.save_pretrained(tmp_path / "dense")
    assert torch.equal(logits(load(tmp_path / "4-bit", torch.float32)), logits(one))
    assert torch.equal(logits(load(tmp_path / "dense", torch.float32)), before)
    one.config.output_router_logits = True  # read by its layers
    assert one(IDS).router_logits is not None and other(IDS).router_logits is None
    swap_experts(other, progress=False)
    one.dequantize()
    other.save_pretrained(tmp_path / "other")
    assert torch.equal(logits(load(tmp_path / "other", torch.float32)), logits(other))


@pytest.mark.parametrize("made", ["swapped", "loaded", "copied", "pickled", "interrupted"])
def test_the_config_says_what_the_model_is_before_it_is_saved(made, tmp_path, monkeypatch):
    """swap_experts put one config into the model and kept another: `config.save_pretrained` beside weights that another
    program wrote said W4A16 of a W4A4 model, and 4-bit of its dense linears."""
    source = folder(tmp_path, qwen3_moe)
    if made == "loaded":
        model = load(source, quantization_config=MoeNvfp4Config(linears="attention"))
    else:
        model = load(source)
        if made == "interrupted":
            with monkeypatch.context() as patch:
                patch.setattr(swap, "_quantized", lambda *args: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    swap_experts(model, linears="attention", progress=False)
        swap_experts(model, linears="attention", progress=False)
    if made in ("copied", "pickled"):
        model = copy.deepcopy(model) if made == "copied" else pickle.loads(pickle.dumps(model))
    calibrate(set_activations(model, "nvfp4"), [IDS], progress=False)
    model.config.save_pretrained(tmp_path / "alone")
    model.save_pretrained(tmp_path / "whole")
    alone, whole = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("alone", "whole"))
    assert alone["quantization_config"] == whole["quantization_config"]
    assert "lm_head" in whole["quantization_config"]["ignore"]
    assert model.config.quantization_config is model.hf_quantizer.quantization_config


def test_weights_that_are_not_there_or_of_another_dtype_are_named():
    with torch.device("meta"):
        model = qwen3_moe()
    with pytest.raises(ValueError, match="layers.0.mlp.experts: the weights are on the meta device"):
        swap_experts(model, progress=False)
    with pytest.raises(ValueError, match="layers.0.mlp.experts: weights are torch.float64; bf16, fp16 and fp32"):
        swap_experts(make(qwen3_moe).double(), progress=False)


# ---------------------------------------------------------------- exclude
@pytest.mark.slow
def test_exclude_is_a_pattern_or_several(tmp_path):
    source = folder(tmp_path, qwen3_moe)
    for exclude in ("model.layers.0.*", ["model.layers.0.*"], ("model.layers.0",)):
        assert kinds(swap_experts(load(source), exclude=exclude, progress=False)) == ["Qwen3MoeExperts", "HFExperts"]
        model = load(source, quantization_config=MoeNvfp4Config(exclude=exclude))
        assert kinds(model) == ["Qwen3MoeExperts", "HFExperts"]
    for exclude in (7, [7], [["a"]]):
        with pytest.raises(TypeError, match="exclude is a pattern of module names or a list of them, got"):
            MoeNvfp4Config(exclude=exclude)
    for exclude in ("", [""]):
        with pytest.raises(ValueError, match="exclude has an empty pattern"):
            MoeNvfp4Config(exclude=exclude)


def test_an_exclude_that_matches_nothing_is_named(tmp_path):
    source = folder(tmp_path, qwen3_moe)
    message = r"exclude: 'model.layer.0', '\*attn' matches no experts module; Qwen3MoeForCausalLM has model.layers.0"
    exclude = ["model.layer.0", "model.layers.1.*", "*attn"]
    with pytest.raises(ValueError, match=message):
        swap_experts(load(source), exclude=exclude, progress=False)
    with pytest.raises(ValueError, match=message):
        load(source, quantization_config=MoeNvfp4Config(exclude=exclude))


# ---------------------------------------------------------------- fields
def test_the_config_of_a_model_in_memory_loads_another(tmp_path):
    model = swap_experts(make(qwen3_moe, torch.float32), linears="attention", progress=False)
    set_activations(model, "nvfp4").save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", config=model.config, dtype=torch.float32).eval()
    assert torch.equal(logits(again), logits(model))
    set_activations(again, "bf16")
    assert model.config.quantization_config.activations == "nvfp4", "each has a config of its own"


def experts_of(model):
    """The 4-bit experts of each layer, or None."""
    modules = (layer.mlp.experts for layer in model.model.layers)
    return [experts if isinstance(experts, HFExperts) else None for experts in modules]


def test_unknown_fields_are_refused_with_the_nearest(tmp_path):
    for field, near in (("activation", "activations"), ("excludes", "exclude"), ("recipes", "recipe")):
        with pytest.raises(TypeError, match=f"has no field '{field}' .did you mean '{near}'..; it has"):
            MoeNvfp4Config(**{field: "nvfp4"})
    with pytest.raises(TypeError, match="has no field 'bits'; it has"):
        MoeNvfp4Config(bits=4)
    given = {"quant_method": "moe_nvfp4", "activations": "nvfp4"}  # as a dictionary, which transformers takes too
    assert MoeNvfp4Config.from_dict(given).to_dict() == MoeNvfp4Config(activations="nvfp4").to_dict()
    with pytest.raises(TypeError, match="has no field 'recipes' .did you mean 'recipe'"):
        MoeNvfp4Config.from_dict(given | {"recipes": "max"})
    swap_experts(make(qwen3_moe), progress=False).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="has no field 'linear' .did you mean 'linears'"):
        checkpoint_config(tmp_path, linear="dense")


@pytest.mark.parametrize("assign", [lambda config, field, value: setattr(config, field, value),
                                    lambda config, field, value: config.update(**{field: value})])  # fmt: skip
def test_fields_that_are_assigned_count(assign, tmp_path):
    """As those that are given. linears of dense files, and map_files and cpu_experts of 4-bit ones, had no effect."""
    dense = folder(tmp_path, qwen3_moe)
    convert_checkpoint(dense, tmp_path / "4-bit", Options(activations="nvfp4"), progress=False)

    def loading(source, field, value, **given):
        config = MoeNvfp4Config(**given)
        assign(config, field, value)
        return load(source, quantization_config=config), config

    count = lambda model: sum(isinstance(m, NVFP4Linear) for m in model.modules())
    model, config = loading(dense, "linears", "attention")
    assert count(model) == 8
    assign(config, "linears", "lm_head")  # for the next model
    assert model.hf_quantizer.quantization_config.linears == ["attention"]
    assert count(load(dense, quantization_config=config)) == 1
    assert not experts_of(loading(dense, "exclude", "model.layers.0.*")[0])[0]
    for field, value, given in (
        ("map_files", True, {}), ("cpu_experts", "all", {}), ("activations", "bf16", dict(activations="nvfp4")),
        ("activations", "bf16", {}),
    ):  # fmt: skip
        layer = experts_of(loading(tmp_path / "4-bit", field, value, **given)[0])[1]
        assert layer.activations == ("bf16" if field == "activations" else "nvfp4")
        assert (layer.mapped, layer.on_cpu) == (field == "map_files", field != "activations")
    loading(tmp_path / "4-bit", "exclude", None)
    config = MoeNvfp4Config()
    assign(config, "exclude", "model.layers.0.*")
    assert config.excludes("model.layers.0.mlp.experts") and not config.excludes("model.layers.1.mlp.experts")
    for source, field, value, message in (
        (tmp_path / "4-bit", "recipe", "max", "recipe would have no effect"), (dense, "linears", "dense", "no effect"),
        (tmp_path / "4-bit", "activations", "fp8", "got 'fp8'"), (dense, "recipe", "best", "recipe 'best'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            loading(source, field, value)


@pytest.mark.parametrize("said", [dict(ignore=["lm_head"]), dict(input_scale=True), dict(pre_quant_scale=True)])
def test_what_config_json_says_is_no_choice(said, tmp_path):
    """lm_head became 4-bit all the same, and config.json then called it dense."""
    dense = folder(tmp_path, qwen3_moe)
    convert_checkpoint(dense, tmp_path / "4-bit", progress=False)
    for source in (dense, tmp_path / "4-bit"):
        with pytest.raises(ValueError, match=f"{next(iter(said))} is what config.json says of 4-bit files, and no ch"):
            load(source, quantization_config=MoeNvfp4Config(**said))
    model = load(dense, quantization_config=MoeNvfp4Config(linears="attention"))
    config = model.config.quantization_config  # of a model that was made so, for another one
    assert config.ignore and torch.equal(logits(load(dense, quantization_config=config)), logits(model))


def test_fields_that_are_changed_in_place_count():
    """A list of patterns to which one is added had no effect, and what a copy was assigned changed the original."""

    def made(change, config=None):
        config = config or MoeNvfp4Config(exclude="a", linears="attention")
        change(config)
        plain, _ = resolve(copy.deepcopy(config))
        return plain.exclude, plain.linears

    assert made(lambda config: config.exclude.append("b")) == (["a", "b"], ["attention"])
    assert made(lambda config: config.exclude.clear()) == ([], ["attention"])
    assert made(lambda config: config.linears.append("lm_head")) == (["a"], ["attention", "lm_head"])
    assert made(lambda config: setattr(config, "exclude", iter("bc"))) == (["b", "c"], ["attention"])
    assert made(lambda config: setattr(config, "linears", (x for x in ("mlp", "x,y")))) == (["a"], ["mlp", "x", "y"])
    assert made(lambda config: setattr(config, "linears", None)) == (["a"], "packed")
    assert made(lambda config: config.exclude.append("b"), MoeNvfp4Config()) == (["b"], "packed")
    assert made(lambda config: vars(config).update(linears="mlp"), MoeNvfp4Config()) == ([], ["mlp"])
    for both in ("dense,attention", ["packed", "attention"]):
        assert isinstance(MoeNvfp4Config(linears=both).linears, list)  # and so it is refused
    config = MoeNvfp4Config()
    assert config.exclude is not MoeNvfp4Config().exclude and config.chosen == {}
    other = copy.copy(config)
    other.activations, other.exclude = "nvfp4", "a"
    assert config.chosen == {} and other.chosen == {"activations": "nvfp4", "exclude": ["a"]}
    assert resolve(other)[0].chosen == pickle.loads(pickle.dumps(other)).chosen == other.chosen
    for name, near in (("activation", "activations"), ("excludes", "exclude"), ("linear", "linears")):
        with pytest.raises(TypeError, match=f"has no field '{name}' .did you mean '{near}'"):
            setattr(config, name, "x")


def test_a_config_from_a_dictionary_counts(tmp_path):
    """One of fields does as if they were given one by one. One that describes files chooses what it says of calls, and
    makes no other files 4-bit, for which it does not say which linears."""
    dense, nvfp4 = folder(tmp_path, qwen3_moe), tmp_path / "nvfp4"
    swap_experts(load(dense), progress=False).save_pretrained(nvfp4)
    chosen = MoeNvfp4Config(activations="nvfp4")
    model = load(nvfp4, quantization_config=chosen)
    of_fields = {"quant_method": "moe_nvfp4", "activations": "nvfp4"}
    described = (chosen.to_dict(), model.config.quantization_config.to_dict())
    others = [MoeNvfp4Config.from_dict(d) for d in (of_fields, *described)]
    for config in (*others, model.config.quantization_config):
        assert torch.equal(logits(load(nvfp4, quantization_config=config)), logits(model))
    attention = {"quant_method": "moe_nvfp4", "linears": "attention"}
    assert isinstance(load(dense, quantization_config=attention).model.layers[0].self_attn.q_proj, NVFP4Linear)
    with pytest.raises(ValueError, match=r"linears=\['attention'\] would have no effect"):
        load(nvfp4, quantization_config=MoeNvfp4Config.from_dict(attention))
    for config in (MoeNvfp4Config(linears="attention").to_dict(), model.config.quantization_config):
        with pytest.raises(ValueError, match="says what 4-bit files hold .*, not how to make them of other files"):
            load(dense, quantization_config=config)


def test_what_other_tools_wrote_is_carried_through(tmp_path):
    model = swap_experts(make(qwen3_moe), progress=False)
    config = model.config.quantization_config.to_dict() | {"their_key": {"a": 1}}
    again = MoeNvfp4Config.from_dict(config)
    assert again.to_dict() == config
    config["moe_nvfp4"]["from_the_future"] = True
    with pytest.raises(ValueError, match="from_the_future under moe_nvfp4, which version .* upgrade"):
        MoeNvfp4Config.from_dict(config)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, mixtral], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_config_for_a_folder_that_is_4_bit_already_counts_or_is_refused(family, dialect, tmp_path):
    source = folder(tmp_path, family)
    config = MoeNvfp4Config(activations="nvfp4", dialect=dialect)
    load(source, quantization_config=config).save_pretrained(tmp_path / "nvfp4")
    expected = logits(set_activations(load(tmp_path / "nvfp4"), "bf16"))
    model = load(tmp_path / "nvfp4", quantization_config=MoeNvfp4Config(activations="bf16"))
    assert {m.activations for m in model.modules() if isinstance(m, HFExperts)} == {"bf16"}
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), expected)
    same_tensors(tmp_path / "again", tmp_path / "nvfp4")
    unchanged = load(tmp_path / "nvfp4", quantization_config=MoeNvfp4Config())
    assert {m.activations for m in unchanged.modules() if isinstance(m, HFExperts)} == {"nvfp4"}
    for field in (dict(recipe="max"), dict(exclude="model.layers.0"), dict(dialect="modelopt")):
        with pytest.raises(ValueError, match=f"{next(iter(field))} would have no effect: the files are 4-bit already"):
            load(tmp_path / "nvfp4", quantization_config=MoeNvfp4Config(**field))
        with pytest.raises(ValueError, match=f"{next(iter(field))} would have no effect: the files are 4-bit already"):
            checkpoint_config(tmp_path / "nvfp4", **field)


@pytest.mark.parametrize("where", ["on the config", "no config says NVFP4"])
@pytest.mark.parametrize(
    "field", [dict(recipe="max"), dict(exclude="*"), dict(linears="attention"), dict(dialect="compressed-tensors")]
)
def test_a_choice_for_dense_weights_is_refused_for_4_bit_files(field, where, tmp_path):
    """They were not read, and config.json of what was saved said what the user had asked for."""
    swap_experts(make(qwen3_moe), progress=False).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"^{next(iter(field))}.* would have no effect: the files are 4-bit already"):
        if where == "on the config":
            config.quantization_config = MoeNvfp4Config(**field)
            load(tmp_path, config=config)
        else:
            change_config(tmp_path, quantization_config=None)
            load(tmp_path, quantization_config=MoeNvfp4Config(**field))


@pytest.mark.parametrize("linears", ["dense", "packed"])
def test_a_choice_for_4_bit_files_is_refused_for_dense_weights(linears, tmp_path):
    source = folder(tmp_path, qwen3_moe)
    with pytest.raises(ValueError, match=f"linears='{linears}' would have no effect: it is for files that are NVFP4"):
        load(source, quantization_config=MoeNvfp4Config(linears=linears))
    before = logits(model := load(source))
    with pytest.raises(ValueError, match=f"linears='{linears}' would have no effect"):
        swap_experts(model, linears=linears, progress=False)
    assert torch.equal(logits(model), before)
    load(source, quantization_config=MoeNvfp4Config(linears=[]))  # none are named


@pytest.mark.parametrize("linears, becomes", [("dense", torch.nn.Linear), ("packed", NVFP4Linear)])
def test_a_choice_for_4_bit_files_counts_whatever_config_json_says(linears, becomes, tmp_path):
    swap_experts(make(qwen3_moe), linears="attention", progress=False).save_pretrained(tmp_path / "nvfp4")
    config = json.loads((tmp_path / "nvfp4/config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "nvfp4/config.json").write_text(json.dumps(config))
    (tmp_path / "nvfp4/hf_quant_config.json").unlink(missing_ok=True)
    model = load(tmp_path / "nvfp4", quantization_config=MoeNvfp4Config(linears=linears))
    assert type(model.model.layers[0].self_attn.q_proj) is becomes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dequantize_casts_buffers_too(dtype, tmp_path):
    """But not what transformers keeps in fp32, and not the angles of rotary embeddings, which are not saved."""
    dense = swap_experts(load(folder(tmp_path, gemma4)), progress=False).dequantize(dtype)
    assert {t.dtype for t in dense.state_dict().values()} == {dtype}
    assert {t.dtype for name, t in dense.named_buffers() if "inv_freq" in name} == {torch.float32}
    assert logits(dense).dtype == dtype


# ---------------------------------------------------------------- transformers' choice of an implementation
def test_another_experts_implementation_is_an_error(tmp_path):
    source = folder(tmp_path, qwen3_moe)
    model = load(source, quantization_config=MoeNvfp4Config())
    expected = logits(model)
    assert model.get_experts_implementation()[""] == "moe_nvfp4"
    for name in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        with pytest.raises(ValueError, match=f"experts_implementation '{name}' was set, but 4-bit experts run in one"):
            logits(model)
    model.set_experts_implementation("moe_nvfp4")
    assert torch.equal(logits(model), expected)
    with pytest.raises(ValueError, match="experts_implementation 'eager' was asked for"):
        load(source, quantization_config=MoeNvfp4Config(), experts_implementation="eager")
    load(source, quantization_config=MoeNvfp4Config(), experts_implementation="moe_nvfp4")
    # what a dense model was loaded with is no longer asked for
    swapped = swap_experts(load(source, experts_implementation="eager"), progress=False)
    assert torch.equal(logits(swapped), expected)
    assert swapped.dequantize().get_experts_implementation()[""] == "eager"


def test_dense_experts_are_said_to_stay_dense(tmp_path, caplog):
    """Who sets our implementation on a dense model expects 4-bit experts."""
    model = load(folder(tmp_path, qwen3_moe))
    expected = logits(model)
    model.set_experts_implementation("moe_nvfp4")
    hf_experts.logger.warning_once.cache_clear()
    assert torch.equal(logits(model), expected)
    said = "Qwen3MoeExperts of this model are dense and run by 'grouped_mm', though"
    assert sum(said in record.message and "swap_experts" in record.message for record in caplog.records) == 1


def test_dense_experts_beside_4_bit_ones_keep_their_implementation(tmp_path):
    config = MoeNvfp4Config(exclude="model.layers.0.*")
    model = load(folder(tmp_path, qwen3_moe), torch.float32, quantization_config=config)
    expected = logits(model)
    assert model.get_experts_implementation()[""] == "grouped_mm"
    model.set_experts_implementation("eager")
    torch.testing.assert_close(logits(model), expected)
    dense = type(model)(model.config).eval()  # a dense model with the config of a 4-bit one
    swap_experts(model.dequantize(), progress=False)
    assert model.config._experts_implementation == "moe_nvfp4"
    dense = type(model)(model.config).eval()
    with torch.no_grad():
        a = dense(IDS).logits
        dense.set_experts_implementation("grouped_mm")
        assert torch.equal(dense(IDS).logits, a)


# ---------------------------------------------------------------- and back
def test_experts_in_the_layout_of_the_kernels_are_dequantized(monkeypatch):
    monkeypatch.delenv("MOE_NVFP4_BACKEND", raising=False)
    want = dict(swap_experts(make(qwen3_moe), progress=False).dequantize().named_parameters())
    with stand_for_hopper():
        model = swap_experts(make(qwen3_moe), progress=False)
        logits(model)
        assert all(layer.mlp.experts.packed for layer in model.model.layers)
        for name, p in model.dequantize().named_parameters():
            assert torch.equal(p, want[name]), name


def test_dequantized_experts_are_exactly_what_the_4_bit_ones_were(tmp_path):
    """Against the definition of the format, in numpy's float64, from the bytes of the files."""
    source = folder(tmp_path, qwen3_moe)
    model = load(source, quantization_config=MoeNvfp4Config())
    model.save_pretrained(tmp_path / "nvfp4")
    files = tensors(tmp_path / "nvfp4")
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    dense = load(tmp_path / "nvfp4").dequantize()
    for e in range(8):
        for part, rows in (("gate_proj", slice(0, 48)), ("up_proj", slice(48, None)), ("down_proj", slice(None))):
            stem = f"{EXPERTS.format(1)}.{e}.{part}"
            codes, sf = files[f"{stem}.weight"], files[f"{stem}.weight_scale"].double()
            values = levels[torch.stack([codes & 15, codes >> 4], dim=-1).long()].flatten(1)
            exact = values * sf.repeat_interleave(16, dim=1) * files[f"{stem}.weight_scale_2"].double()
            name = "down_proj" if part == "down_proj" else "gate_up_proj"
            actual = getattr(dense.model.layers[1].mlp.experts, name)[e, rows]
            assert as_bytes(actual) == as_bytes(exact.float().bfloat16())


def test_a_dequantized_model_keeps_its_weights_where_another_is_built_around_it(family):
    """`post_init` of a model that has it as a part, a reward model say, initializes what has no mark."""

    class Around(PreTrainedModel):
        def __init__(self, inner):
            super().__init__(AutoConfig.for_model("bert"))
            self.inner = inner
            self.post_init()

    model = swap_experts(make(family, torch.float32), linears=["attention"], progress=False).dequantize()
    before = copy.deepcopy(model.state_dict())
    Around(model)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    after = Around(copy.deepcopy(model)).inner.state_dict()  # parameters that are copied lose marks of their own
    assert all(torch.equal(t, before[name]) for name, t in after.items())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [*FAMILIES, aria], ids=lambda f: f.__name__)
def test_a_dequantized_model_is_a_dense_model(family, tmp_path):
    """Also one that was saved in between, and one from 4-bit files. In fp32, since rounding routers' logits to bf16
    decides near ties otherwise."""
    if family is aria and not hasattr(AriaExperts, "_apply_gate"):
        pytest.skip("Aria's experts have another form in this transformers, which is refused")
    source, dtype = folder(tmp_path, family), torch.float32
    saved = load(source, dtype, quantization_config=MoeNvfp4Config())
    saved.save_pretrained(tmp_path / "nvfp4")  # from here on its config has the dtype's name only
    for model in (saved, swap_experts(load(source, dtype)), load(tmp_path / "nvfp4", dtype)):
        w4a16 = logits(model)
        assert model.dequantize() is model
        assert not any(isinstance(m, HFExperts) for m in model.modules())
        assert not getattr(model, "is_quantized", False) and not hasattr(model.config, "quantization_config")
        original = load(source, dtype)
        names = {n: (p.shape, p.dtype, p.requires_grad) for n, p in original.named_parameters()}
        assert {n: (p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()} == names
        dense = logits(model)
        assert relative_error(dense, w4a16) < 10 * THRESHOLDS["fp32"]
        model.save_pretrained(tmp_path / "dense")
        assert tensors(tmp_path / "dense").keys() == tensors(source).keys()
        again = load(tmp_path / "dense", dtype)
        assert type(again) is type(original)
        theirs = dict(again.named_parameters())
        assert all(torch.equal(p, theirs[name]) for name, p in model.named_parameters())
        model(IDS).logits.float().sum().backward()  # and trains
        assert all(p.grad is not None for n, p in model.named_parameters() if "experts" in n)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_model_is_dequantized_in_one_dtype(dtype, tmp_path):
    """What is saved is what ran, and computes what the 4-bit model does in this dtype."""
    from tests.folders import is_expert, is_linear, quantized, qwen2_moe

    path, _ = quantized(tmp_path, qwen2_moe, "modelopt", lambda k: is_expert(k) or is_linear(k))
    change_config(path, quantization_config={"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"})
    model = load(path).dequantize(dtype)
    assert {p.dtype for p in model.parameters()} == {model.dtype} == {dtype}
    model.set_experts_implementation("eager")
    found, single = logits(model), load(path, torch.float32)
    assert relative_error(found, logits(single)) < (1e-2 if dtype == torch.float16 else 1e-5)
    model.save_pretrained(tmp_path / "dense")
    again = load(tmp_path / "dense", "auto")
    again.set_experts_implementation("eager")
    assert torch.equal(logits(again), found)


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [deepseek, gpt_oss], ids=lambda f: f.__name__)
def test_dequantizing_keeps_in_fp32_what_loading_does(family, wanted, loaded, tmp_path):
    """Of DeepSeek-V3 correction biases, of gpt-oss in fp16 norms, whatever dtype the 4-bit model had."""
    source = folder(tmp_path, family)
    swap_experts(load(source), progress=False).save_pretrained(tmp_path / "nvfp4")
    found = load(tmp_path / "nvfp4", loaded).dequantize(wanted).state_dict()
    dtypes = {name: t.dtype for name, t in load(source, wanted).state_dict().items()}
    assert {name: t.dtype for name, t in found.items()} == dtypes
    assert len(set(dtypes.values())) == 2 or (family, wanted) == (gpt_oss, torch.bfloat16)


def test_a_dequantized_model_has_dense_linears(tmp_path):
    from tests.folders import is_expert, is_linear, quantized, qwen2_moe

    source, twin = quantized(tmp_path, qwen2_moe, "compressed-tensors", lambda k: is_expert(k) or is_linear(k))
    model, expected = load(source, torch.float32).dequantize(), load(twin, torch.float32)
    assert any(type(m) is nn.Linear for n, m in model.named_modules() if n.endswith("q_proj"))
    theirs = dict(expected.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, theirs[name]), name
    assert torch.equal(logits(model), logits(expected))


def test_a_model_that_is_not_all_here_is_not_dequantized(tmp_path):
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
                  "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    model = load(folder(tmp_path, qwen3_moe), device_map=device_map, offload_folder=tmp_path / "offload",
                 quantization_config=MoeNvfp4Config())  # fmt: skip
    before = kinds(model)
    with pytest.raises(NotImplementedError, match="weights on disk or on meta is not dequantized"):
        model.dequantize()
    assert kinds(model) == before


def test_weights_of_an_indexer_stay_dense():
    """transformers casts x to the dtype that they have."""
    if not hasattr(transformers, "DeepseekV32ForCausalLM"):
        pytest.skip("this transformers does not have DeepSeek-V3.2")
    config = transformers.DeepseekV32Config(
        **SMALL | dict(num_key_value_heads=4), intermediate_size=96, moe_intermediate_size=48, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=0, kv_lora_rank=16, q_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, index_n_heads=4, index_head_dim=32, index_topk=16,
    )  # fmt: skip
    model = make(lambda: transformers.DeepseekV32ForCausalLM(config), torch.float32)
    swap_experts(model, linears=["*self_attn*"], progress=False)
    indexer = model.model.layers[0].self_attn.indexer
    assert isinstance(indexer.wq_b, NVFP4Linear) and type(indexer.weights_proj) is torch.nn.Linear
    torch.testing.assert_close(logits(model), logits(dense_like(model)), atol=1e-5, rtol=1e-5)
