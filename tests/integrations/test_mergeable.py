"""Adapters that are trained to be merged: the model in training, the merged one and its files are the same."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
import torch

pytest.importorskip("peft", reason="LoRA needs peft")

from packaging.version import Version  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from moe_nvfp4.integrations.huggingface import keep_experts_on_cpu, set_activations, swap_experts  # noqa: E402
from moe_nvfp4.integrations.huggingface.peft import MergeableLoraConfig  # noqa: E402
from moe_nvfp4.integrations.vllm.adapters import ExpertsAdapter  # noqa: E402
from tests.common import relative_error  # noqa: E402
from tests.folders import awq, qwen2_moe  # noqa: E402
from tests.models import (  # noqa: E402
    IDS,
    dense_like,
    gpt_oss,
    gradients,
    llama4,
    load,
    logits,
    make,
    nemotron_h,
    qwen3_moe,
)

ON_EXPERTS = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]
CLOSE = 1e-5  # fp32 models
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def config(kind=MergeableLoraConfig, **settings):
    settings = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False) | settings
    return kind(target_parameters=settings.pop("target_parameters", ON_EXPERTS), **settings)


def swapped(family=qwen3_moe):
    linears = "attention" if family is qwen3_moe else None
    return swap_experts(make(family, torch.float32), linears=linears, progress=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", [LoraConfig, MergeableLoraConfig])
def test_beside_a_gpu_adapters_merge_into_experts_on_the_cpu(kind):
    """The adapters are on the GPU. The bytes are those of a model that is all on the CPU."""
    torch.manual_seed(0)
    alone = get_peft_model(swapped(), config(kind))
    beside = copy.deepcopy(alone)
    keep_experts_on_cpu(beside, "all")
    beside.to("cuda")
    assert relative_error(logits(beside), logits(alone)) < 1e-4  # a mergeable one merges here
    state = alone.merge_and_unload().state_dict()
    for name, t in beside.merge_and_unload().state_dict().items():
        if ".experts." in name:
            assert t.device.type == "cpu" and torch.equal(t, state[name]), name


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss, nemotron_h, llama4], ids=lambda f: f.__name__)
def test_training_computes_with_the_merged_weights(family):
    """Against PEFT's own layers on dense weights Q - BA, which compute (Q - BA) + BA and its gradients."""
    torch.manual_seed(0)
    mine = get_peft_model(swapped(family), config())
    for name, p in mine.named_parameters():
        if "lora_" in name:
            p.data.mul_(0.3)
    state = {name: p for name, p in mine.state_dict().items() if "lora_" in name}
    expected, grads = logits(mine), gradients(mine)
    merged = copy.deepcopy(mine).merge_and_unload()
    assert relative_error(logits(merged), expected) < CLOSE
    dense = get_peft_model(dense_like(merged), config(LoraConfig))
    dense.load_state_dict(state, strict=False)
    for layer in [m for m in dense.modules() if hasattr(m, "get_delta_weight") and "default" in m.lora_A]:
        weight = layer.get_param() if hasattr(layer, "get_param") else layer.get_base_layer().weight
        weight.data -= layer.get_delta_weight("default")
    assert relative_error(logits(dense), expected) < CLOSE
    theirs = gradients(dense)
    assert grads.keys() == theirs.keys()
    for name, grad in grads.items():
        assert relative_error(grad, theirs[name]) < 5 * CLOSE, name


def test_the_config_says_that_it_is_mergeable(tmp_path):
    """By its class alone; files of other adapters are read as theirs."""
    MergeableLoraConfig(r=4).save_pretrained(tmp_path / "mine")
    LoraConfig(r=4).save_pretrained(tmp_path / "plain")
    for name, wanted in (("mine", True), ("plain", False)):
        assert LoraConfig.from_pretrained(tmp_path / name).nvfp4_mergeable is wanted
    with pytest.raises(ValueError, match="nvfp4_mergeable is True or False, got 'false'"):
        MergeableLoraConfig(nvfp4_mergeable="false")


def test_codes_are_the_nearest_of_the_sums():
    torch.manual_seed(0)
    model = swapped()
    before = {name: p.clone() for name, p in model.named_parameters()}
    mine = get_peft_model(model, config())
    logits(mine)
    down = next(m for m in mine.modules() if getattr(m, "parameter_name", "") == "down_proj")
    experts, (a, b) = down.get_base_layer(), down.adapter("default")
    name = next(n for n, m in mine.base_model.model.named_modules() if m is experts).replace(".base_layer", "") + "."
    for suffix in ("_sf", "_global_scale"):
        assert torch.equal(getattr(experts, f"down_proj{suffix}"), before[f"{name}down_proj{suffix}"])
    sf = before[f"{name}down_proj_sf"].view(torch.float8_e4m3fn).double().repeat_interleave(16, dim=-1)
    step = sf * before[f"{name}down_proj_global_scale"].double()[:, None, None]

    def values(codes):
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
        return MAGNITUDES[nibbles & 7] * torch.where(nibbles > 7, -1, 1) * step

    wanted = values(before[f"{name}down_proj"])
    wanted[..., : a.shape[2]] += (b.double() @ a.double()).detach()
    found, near = values(experts.down_proj), (wanted.abs() / step)[..., None]
    nearest = (near - MAGNITUDES).abs().min(dim=-1).values
    changed = (found != values(before[f"{name}down_proj"])).double().mean()
    assert 0.05 < changed < 0.95
    assert ((found - wanted).abs() / step <= nearest + 1e-5).all()


def test_awqs_scales_divide_what_is_added(tmp_path):
    """The layer multiplies x by them, and the adapter does not: the nearest codes of value + b · a / scale."""
    path, _ = awq(tmp_path, qwen2_moe)
    torch.manual_seed(0)
    model = set_activations(load(path, torch.float32), "bf16")
    before = {name: p.clone() for name, p in model.named_parameters()}
    mine = get_peft_model(model, config(target_modules=["q_proj"]))
    logits(mine)

    def check(name, codes, sf, scale, awq_scale, added):
        step = sf.view(torch.float8_e4m3fn).double().repeat_interleave(16, dim=-1) * scale.double()
        signed = torch.cat([MAGNITUDES, -MAGNITUDES])
        values = [signed[torch.stack([c & 15, c >> 4], -1).flatten(-2).long()] for c in (before[name], codes)]
        wanted = values[0] + (added.double() / awq_scale.double()[..., None, :] / step).detach().nan_to_num(0, 0, 0)
        nearest = (wanted.abs()[..., None] - MAGNITUDES).abs().min(dim=-1).values
        assert 0.05 < (values[0] != values[1]).double().mean() < 0.95
        assert (((values[1] - wanted).abs() <= nearest + 1e-5) | (step == 0)).all()

    wrapped = dict(mine.base_model.model.named_modules())
    for i in range(2):
        q = f"model.layers.{i}.self_attn.q_proj"
        linear, base = wrapped[q], wrapped[q].get_base_layer()
        added = linear.lora_B["default"].weight @ linear.lora_A["default"].weight * 2
        check(f"{q}.weight", base.weight, base.weight_sf, base.weight_global_scale, base.pre_quant_scale, added)
    for module in [m for m in mine.modules() if hasattr(m, "parameter_name")]:
        experts, part, (a, b) = module.get_base_layer(), module.parameter_name, module.adapter("default")
        name = next(n for n, m in wrapped.items() if m is experts).replace(".base_layer", "")
        p = experts.get_parameter
        scales = [p(f"{half}_global_scale")[:, None].expand(-1, experts.intermediate_size) for half in
                  ("gate_proj", "up_proj")]  # fmt: skip
        scale = torch.cat(scales, 1)[..., None] if part == "gate_up_proj" else p(f"{part}_global_scale")[:, None, None]
        awq_scale = p(f"{part.replace('gate_', '')}_pre_quant_scale")
        check(f"{name}.{part}", p(part), p(f"{part}_sf"), scale, awq_scale, b @ a)


def test_what_is_trained_is_what_is_merged_and_saved(tmp_path):
    torch.manual_seed(0)
    model = swapped()
    base, before = logits(model), {name: p.clone() for name, p in model.named_parameters()}
    mine = get_peft_model(copy.deepcopy(model), config(init_lora_weights=True))
    assert relative_error(logits(mine), base) < CLOSE  # B is 0
    optimizer = torch.optim.AdamW([p for p in mine.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = mine(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    expected = logits(mine)
    with mine.disable_adapter():
        assert relative_error(logits(mine), base) < CLOSE
    assert torch.equal(logits(mine), expected)
    mine.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter", is_trainable=True)
    assert torch.equal(logits(again), expected)  # the file says what kind of adapter it is
    mine.merge_adapter()
    assert torch.equal(logits(mine), expected)
    mine.unmerge_adapter()
    for name, p in mine.base_model.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(p, before[name.replace("base_layer.", "")]), name
    merged = mine.merge_and_unload()
    assert torch.equal(logits(merged), expected)
    merged.save_pretrained(tmp_path / "merged")
    assert relative_error(logits(load(tmp_path / "merged", torch.float32)), expected) < CLOSE
    other = make(qwen3_moe, torch.float32)
    with pytest.raises(ValueError, match="trained to be merged into 4-bit weights .* changes none in this model"):
        PeftModel.from_pretrained(other, tmp_path / "adapter")
    with pytest.raises(NotImplementedError, match="trained to be merged .* serve that folder"):
        ExpertsAdapter(str(tmp_path / "adapter"))


def test_the_same_layers_are_4_bit_as_in_training(tmp_path):
    """What was rounded in training and is not here, or the other way round, made logits 20 to 46 % off."""
    mine, settings = make(qwen3_moe, torch.float32), config()
    dense = swap_experts(copy.deepcopy(mine), progress=False)
    packed = swap_experts(mine, linears="attention", progress=False)
    for name, model in {"packed": packed, "dense": dense}.items():  # one config for two models
        get_peft_model(copy.deepcopy(model), settings).save_pretrained(tmp_path / name)
        PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / name)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj 4-bit, .* the other way round \(4 such layers\)"):
        PeftModel.from_pretrained(dense, tmp_path / "packed")
    with pytest.raises(ValueError, match="layers.0.self_attn.q_proj dense, and here it is the other way round"):
        PeftModel.from_pretrained(packed, tmp_path / "dense")


@pytest.mark.parametrize("kind", [MergeableLoraConfig, LoraConfig])
def test_mixed_precision_does_not_round_what_is_merged(kind):
    """Codes that calls choose under autocast are those that merging chooses without."""
    torch.manual_seed(0)
    mine = get_peft_model(swapped(), config(kind))
    other = copy.deepcopy(mine)
    mine.merge_adapter()
    with torch.autocast("cpu", torch.bfloat16):
        if kind is LoraConfig:
            other.merge_adapter()
        else:
            logits(other)
    expected = dict(mine.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in other.named_parameters())


def test_state_dicts_in_training():
    """They have the weights that the model was given, whatever a call has merged: a checkpoint that is loaded into a
    new model goes on as the old one. After `merge_adapter` they are merged, as PEFT's are."""
    torch.manual_seed(0)
    model = swapped()
    mine, other = (get_peft_model(copy.deepcopy(model), config()) for _ in range(2))
    expected, used = logits(mine), logits(other)
    assert relative_error(used, expected) > 0.01
    state = copy.deepcopy(mine.state_dict())
    for name, p in model.named_parameters():
        (found,) = [state[key] for key in state if key.replace("base_layer.", "") == f"base_model.model.{name}"]
        assert torch.equal(found, p), name
    assert torch.equal(logits(mine), expected)  # which go on
    for again in (get_peft_model(copy.deepcopy(model), config()), other, mine):
        again.load_state_dict(state)
        assert torch.equal(logits(again), expected)
    mine.merge_adapter()
    merged = mine.state_dict()
    assert any(not torch.equal(merged[key], state[key]) for key in state)
    assert torch.equal(logits(mine), expected)
    mine.unmerge_adapter()
    assert all(torch.equal(value, state[key]) for key, value in mine.state_dict().items())


def test_what_calls_merge_is_for_them_only():
    """`unload` gives the model as it was, `set_adapter` and `delete_adapter` do not speak of merging."""
    torch.manual_seed(0)
    model = swapped()
    base, mine = logits(model), get_peft_model(copy.deepcopy(model), config())
    mine.add_adapter("second", config())
    expected = logits(mine)
    assert relative_error(expected, base) > 0.01
    assert torch.equal(logits(copy.deepcopy(mine).unload()), base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine.set_adapter("second")
        second = logits(mine)
        mine.delete_adapter("default")
    assert torch.equal(logits(mine), second) and relative_error(second, expected) > 0.01
    mine.merge_adapter()
    assert torch.equal(logits(mine.unload()), second)  # as with PEFT's own layers


def test_weights_that_a_base_layer_is_given_by_itself():
    """While a call has merged an adapter into it: they are merged in the next call, and are what stays without it."""
    other, new = swapped(), (torch.randn(96, 64), torch.randn(64, 48))
    with torch.no_grad():
        for module in other.modules():
            if hasattr(module, "load_expert"):
                module.load_expert(1, *new)
                module.load_expert(2, *new)

    def changed(call_before):
        torch.manual_seed(0)
        model = get_peft_model(swapped(), config()).eval()
        layers = [m for m in model.modules() if hasattr(m, "load_expert")]
        before = [layer.state_dict()["down_proj"].clone() for layer in layers]
        if call_before:
            logits(model)
            assert all(torch.equal(m.state_dict()["down_proj"], b) for m, b in zip(layers, before, strict=True))
            logits(model)
        layers[0].load_expert(2, *new)
        layers[1].load_state_dict(other.model.layers[1].mlp.experts.state_dict())
        return model

    once, twice = changed(False), changed(True)
    assert torch.equal(logits(twice), logits(once))
    plain = twice.unload()
    for mine, theirs in zip(plain.model.layers, once.unload().model.layers, strict=True):
        assert torch.equal(mine.mlp.experts.down_proj, theirs.mlp.experts.down_proj)


def test_a_graph_is_not_captured(monkeypatch):
    mine = get_peft_model(swapped(), config())
    monkeypatch.setattr("moe_nvfp4.integrations.huggingface.lora_layers.capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="merge_and_unload"):
        logits(mine)


def test_threads_merge_once():
    """Those that call the model first, at the same time, all find nothing merged, and merged on top of each other."""
    model, base = get_peft_model(swapped(), config()), logits(swapped())
    want = logits(copy.deepcopy(model))
    start = Barrier(4)

    def call(_):
        start.wait()
        return logits(model)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(call, range(4)))
    assert all(torch.equal(answer, want) for answer in answers)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)


def test_reading_the_weights_leaves_calls_alone():
    """State dicts have the weights without the adapter, while another thread calls, and after later calls."""
    model = get_peft_model(swapped(), config())
    want = logits(copy.deepcopy(model))
    state = model.state_dict()
    before = {name: t.clone() for name, t in state.items()}
    assert torch.equal(logits(model), want)
    assert all(torch.equal(t, before[name]) for name, t in state.items())
    read = Event()

    def reading():
        while not read.is_set():
            assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(reading)
        answers = [logits(model) for _ in range(12)]
        read.set()
        reader.result()
    assert all(torch.equal(answer, want) for answer in answers)


def test_training_after_a_call_in_inference_mode():
    models = [get_peft_model(swapped(), config()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with torch.inference_mode():
        models[0](IDS)
    found, expected = map(gradients, models)
    assert len(found) > 4 and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_training_is_the_same(backend):
    """Merging is outside of what is compiled: also in a call without the adapter, between two with it."""
    torch.manual_seed(0)
    models, losses = [get_peft_model(swapped(), config())], [[], []]
    models.append(copy.deepcopy(models[0]))
    for some, model in zip(losses, models, strict=True):
        call = model if model is models[0] else torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
        for _ in range(2):
            loss = call(IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), model.disable_adapter():
                some += [loss.item(), call(IDS, labels=IDS).loss.item()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(losses[0])) == 3  # two of training, and that of the model without its adapter


def test_weights_that_are_shared_after_a_call_stay_so():
    """What a call has merged is undone where the weights are now."""
    model = get_peft_model(swapped(), config())
    codes = next(p for name, p in model.named_parameters() if "down_proj" in name and p.dtype == torch.uint8)
    before = codes.clone()
    logits(model)
    assert not torch.equal(codes, before)
    model.share_memory()
    model.state_dict()
    assert codes.is_shared() and torch.equal(codes, before)


def test_weights_of_several_layers_or_processes_are_refused():
    """One would merge on top of the other."""
    with pytest.raises(NotImplementedError, match="have the same weights .layer_replication., .* plain LoraConfig"):
        get_peft_model(swapped(), config(target_modules=["q_proj"], layer_replication=[[0, 1], [0, 2]],
                                         target_parameters=[ON_EXPERTS[0], ON_EXPERTS[2]]))  # fmt: skip
    model = get_peft_model(swapped(), config())
    want = logits(copy.deepcopy(model))
    model.share_memory()
    with pytest.raises(NotImplementedError, match="memory that processes share .* copy.deepcopy of the model"):
        logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), want)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="FSDP2 of torch 2.11 takes floating parameters only"
)
@pytest.mark.parametrize("units", ["layers", "whole"])
def test_fsdp_is_refused(units):
    """It would take the merged codes away after a call, and give the backward pass those before. An adapter that is
    not merged gives the same; so does one in a model beside."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh, model = init_device_mesh("cpu", (1,)), swapped()
        plain, mergeable, beside = (
            get_peft_model(copy.deepcopy(model), config(kind))
            for kind in (LoraConfig, MergeableLoraConfig, MergeableLoraConfig)
        )
        before, other = logits(plain), logits(beside)
        for mine in (plain, mergeable):
            for part in mine.base_model.model.model.layers if units == "layers" else ():
                fully_shard(part, mesh=mesh)
            fully_shard(mine, mesh=mesh)
        assert torch.equal(logits(plain), before)
        for call in (logits, gradients):
            with pytest.raises(NotImplementedError, match="fully_shard takes these away .* plain LoraConfig"):
                call(mergeable)
        with torch.no_grad():
            next(p for name, p in beside.named_parameters() if "lora_B" in name).mul_(2)
        assert relative_error(logits(beside), other) > 1e-3
    finally:
        torch.distributed.destroy_process_group()


def test_adapters_of_two_kinds():
    mine = get_peft_model(swapped(), config())
    alone = logits(mine)
    mine.add_adapter("plain", config(LoraConfig))
    mine.set_adapter("plain")
    plain = logits(mine)
    assert relative_error(plain, alone) > 0.01
    mine.base_model.set_adapter(["default", "plain"])
    with pytest.raises(NotImplementedError, match="some are trained to be merged"):
        logits(mine)
    with pytest.raises(NotImplementedError, match="some are trained to be merged"):
        mine.merge_adapter(["default", "plain"])
    with pytest.raises(NotImplementedError, match="and their sum would be of one kind"):
        mine.add_weighted_adapter(["default", "plain"], [0.5, 0.5], "sum", combination_type="linear")
    mine.base_model.set_adapter(["plain"])
    assert torch.equal(logits(mine), plain)
    mine.base_model.set_adapter(["default"])
    assert torch.equal(logits(mine), alone)
    mine.add_adapter("second", config())
    mine.base_model.set_adapter(["default", "second"])
    both = logits(mine)
    assert relative_error(both, alone) > 0.01
    assert relative_error(logits(mine.merge_and_unload(adapter_names=["default", "second"])), both) < CLOSE
    model = swapped()
    mine, other = (get_peft_model(copy.deepcopy(model), config(kind)) for kind in (MergeableLoraConfig, LoraConfig))
    logits(mine)
    mine.unmerge_adapter()
    mine.delete_adapter("default")
    mine.add_adapter("default", config(LoraConfig))  # another one of this name
    mine.set_adapter("default")
    mine.load_state_dict(other.state_dict())
    assert torch.equal(logits(mine), logits(other))
    with pytest.raises(NotImplementedError, match="lora_dropout=0"):
        get_peft_model(swapped(), config(target_parameters=None, lora_dropout=0.1))


def test_what_a_user_merged_stays_merged():
    """A call merged the active adapter in its place, so what was saved then depended on whether there was a call."""
    model = get_peft_model(swapped(), config())
    model.add_adapter("other", config())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B.other" in name:
                p.normal_(std=0.05)
    alone = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        alone[name] = logits(model)
    model.set_adapter("default")
    model.unmerge_adapter()
    model.merge_adapter(adapter_names=["other"])
    for _ in range(2):
        assert torch.equal(logits(model), alone["other"])
    model.unmerge_adapter()
    assert torch.equal(logits(model), alone["default"]) and relative_error(alone["other"], alone["default"]) > 0.01
    with pytest.raises(NotImplementedError, match="adapter_names: adapters that are trained to be merged"):
        model(IDS, adapter_names=["default"] * len(IDS))
    assert torch.equal(logits(model), alone["default"])


@pytest.mark.parametrize("kind", [MergeableLoraConfig, LoraConfig], ids=["mergeable", "plain"])
def test_conversion_to_a_plain_adapter(kind):
    """PEFT makes it of another adapter; of one that is trained to be merged it would be another model."""
    peft = pytest.importorskip("peft", minversion="0.19", reason="PEFT converts adapters from 0.19 on")
    adapted = get_peft_model(swapped(), kind(r=4, target_modules=["q_proj"]))
    if kind is LoraConfig:
        assert peft.convert_to_lora(adapted, rank=4)
    else:
        with pytest.raises(NotImplementedError, match=r"is trained to be merged.*: merge_and_unload\(\) keeps what"):
            peft.convert_to_lora(adapted, rank=4)


@pytest.mark.parametrize("kind", [MergeableLoraConfig, LoraConfig], ids=["mergeable", "plain"])
@pytest.mark.parametrize("what", ["q_proj.lora_A", "experts.base_layer.lora_A", "experts.lora_B"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_nan_is_not_merged(what, kind, bad):
    torch.manual_seed(0)
    mine = get_peft_model(swapped(), config(kind))
    before = {name: p.clone() for name, p in mine.named_parameters() if "lora_" not in name}
    with torch.no_grad():
        next(p for name, p in mine.named_parameters() if what in name).view(-1)[5] = bad
    with pytest.raises(ValueError, match="NaN or Inf"):
        mine.merge_adapter()
    mine.unmerge_adapter()
    for name, value in before.items():
        assert torch.equal(mine.get_parameter(name), value), name
    if kind is MergeableLoraConfig:  # computing with merged weights is merging
        with pytest.raises(ValueError, match="NaN or Inf"):
            gradients(mine)
        with pytest.raises(ValueError, match="NaN or Inf"):
            logits(mine)
