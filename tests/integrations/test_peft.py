"""LoRA through PEFT on 4-bit models gives the same as PEFT on the dequantized weights."""

import copy
import json
from contextlib import nullcontext

import pytest
import torch

peft = pytest.importorskip("peft", reason="LoRA needs peft")

from packaging.version import Version  # noqa: E402
from peft import (  # noqa: E402
    PEFT_TYPE_TO_TUNER_MAPPING,
    LoraConfig,
    PeftModel,
    PeftType,
    get_peft_config,
    get_peft_model,
    initialize_lora_eva_weights,
)  # fmt: skip
from peft.tuners import lora  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments  # noqa: E402
from transformers.integrations import peft as transformers_peft  # noqa: E402

from moe_nvfp4.format import dequantize  # noqa: E402
from moe_nvfp4.integrations.huggingface import (  # noqa: E402
    MoeNvfp4Config,
    register,
    set_activations,
    swap_experts,
    unregister,
)
from moe_nvfp4.integrations.huggingface.experts import HFExperts  # noqa: E402
from moe_nvfp4.integrations.huggingface.lora_layers import MergingLayer, digest  # noqa: E402
from moe_nvfp4.integrations.huggingface.peft import MergeableLoraConfig  # noqa: E402
from moe_nvfp4.kernels.cpu import backend as cpu  # noqa: E402
from moe_nvfp4.linear import NVFP4Linear  # noqa: E402
from moe_nvfp4.quantize.recipes import quantize_expert  # noqa: E402
from tests.common import relative_error  # noqa: E402
from tests.folders import awq, is_linear, quantized  # noqa: E402
from tests.models import (  # noqa: E402
    IDS,
    SMALL,
    deepseek,
    dense_like,
    folder,
    gemma4,
    gpt_oss,
    gradients,
    granite,
    llama4,
    load,
    logits,
    make,
    mixtral,
    nemotron_h,
    qwen3_moe,
    step3p7,
    tensors,
)  # fmt: skip

FAMILIES = [qwen3_moe, mixtral, gpt_oss, granite, gemma4, nemotron_h, llama4, step3p7]
CLOSE = 1e-5  # fp32 models
ON_EXPERTS = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]


def config(experts=True, **settings):
    settings = dict(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False) | settings
    return LoraConfig(target_parameters=ON_EXPERTS if experts else None, **settings)


def swapped(family=qwen3_moe, **settings):
    return swap_experts(make(family, torch.float32), progress=False, **settings)


def same_gradients(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert relative_error(one[name], other[name]) < CLOSE, name


def adapters(model):
    return {name: p.shape for name, p in model.named_parameters() if "lora_" in name}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_adapters_of_dense_experts_load_onto_4bit_ones_and_back(family, tmp_path):
    """They have the same names, shapes, logits and gradients as on dequantized weights, where PEFT's own layers run."""
    model = swapped(family)
    dense = get_peft_model(dense_like(model), config())
    dense.save_pretrained(tmp_path / "dense")
    mine = PeftModel.from_pretrained(model, tmp_path / "dense", is_trainable=True)
    assert adapters(mine) == adapters(dense) and any("base_layer.lora_A" in name for name in adapters(mine))
    assert relative_error(logits(mine), logits(dense)) < CLOSE
    with mine.disable_adapter():
        assert relative_error(logits(mine), logits(dense)) > 0.1
    same_gradients(gradients(mine), gradients(dense))

    with torch.no_grad():
        for name, p in mine.named_parameters():
            if "lora_" in name:
                p.mul_(1.5)
    mine.save_pretrained(tmp_path / "4bit")
    back = PeftModel.from_pretrained(dense.unload(), tmp_path / "4bit")
    assert relative_error(logits(back), logits(mine)) < CLOSE


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss])
def test_a_folder_of_an_adapter_is_loaded_as_its_base(family, tmp_path):
    """transformers loads the base that the folder names, quantizes it, and adds the adapter."""
    base = folder(tmp_path, family)
    dense = get_peft_model(load(base), config())
    dense.peft_config["default"].base_model_name_or_path = str(base)
    dense.save_pretrained(tmp_path / "adapter")
    model = load(tmp_path / "adapter", quantization_config=MoeNvfp4Config())
    want = load(base, quantization_config=MoeNvfp4Config())
    without = logits(want)
    want.load_adapter(tmp_path / "adapter")
    assert torch.equal(logits(model), logits(want)) and not torch.equal(logits(want), without)


def test_routers_norms_and_embeddings_get_their_gradients():
    """Trained without PEFT, around the frozen experts."""
    model = swapped()
    dense = dense_like(model)
    for name, p in dense.named_parameters():
        p.requires_grad_("experts" not in name)
    found = gradients(model)
    assert any(name.endswith("mlp.gate.weight") for name in found)
    same_gradients(found, gradients(dense))


@pytest.mark.slow
@pytest.mark.parametrize("r", [4, 5])
def test_packed_linears(r, tmp_path):
    """The case of QLoRA: the linears of attention are 4-bit too."""
    folder, _ = quantized(
        tmp_path, qwen3_moe, "modelopt", lambda key: "experts" in key or is_linear(key) or "lm_head" in key
    )
    model = set_activations(load(folder, torch.float32), "bf16")
    dense = dense_like(model)
    settings = dict(experts=False, r=r, target_modules=["q_proj", "v_proj", "o_proj"])
    mine = get_peft_model(model, config(**settings))
    assert isinstance(mine.base_model.model.model.layers[0].self_attn.q_proj.base_layer, NVFP4Linear)
    dense = get_peft_model(dense, config(**settings))
    dense.load_state_dict({k: v for k, v in mine.state_dict().items() if "lora_" in k}, strict=False)
    assert relative_error(logits(mine), logits(dense)) < CLOSE
    same_gradients(gradients(mine), gradients(dense))
    expected = logits(mine)
    mine.merge_adapter()
    assert 0 < relative_error(logits(mine), expected) < 0.5
    mine.unmerge_adapter()
    assert torch.equal(logits(mine), expected)
    # by default all linears except lm_head, which is packed too
    every, dense = (
        get_peft_model(m, config(experts=False, target_modules="all-linear"))
        for m in (load(folder, torch.float32), dense.unload())
    )
    assert adapters(every) == adapters(dense) and any("k_proj" in name for name in adapters(every))
    every.add_adapter("second", config(experts=False, target_modules="all-linear"))
    assert len(adapters(every)) == 2 * len(adapters(dense))


def test_all_linears_where_peft_takes_names_for_those_of_experts(tmp_path):
    """In DeepSeek's models PEFT makes gate_proj, up_proj and down_proj the experts' parameters, whenever it reads a
    config: adapters of shared experts and dense MLPs would not be read again."""
    four_bit = swap_experts(make(deepseek, torch.float32), linears="all", progress=False)
    four_bit.save_pretrained(tmp_path / "base")
    dense, mine = (
        get_peft_model(model, config(experts=False, target_modules="all-linear"))
        for model in (dense_like(four_bit), four_bit)
    )
    assert adapters(mine) == adapters(dense) and any("kv_b_proj" in name for name in adapters(mine))
    mine.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(tmp_path / "base", torch.float32), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(mine))


# ---- several adapters, merging -------------------------------------------------------------------


def test_an_adapter_of_which_peft_would_leave_out_a_part(tmp_path):
    """For example one of before 2026-11-28, whose tensors for shared experts PEFT has no place for. Tensors for what
    the model does not have are PEFT's own affair."""
    swapped = lambda: swap_experts(make(qwen3_moe, torch.float32), linears="all", progress=False)
    mine = get_peft_model(swapped(), LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    mine.save_pretrained(tmp_path)
    files = tensors(tmp_path)
    more = {name.replace("q_proj", "another"): tensor.clone() for name, tensor in files.items()}
    save_file(files | more, tmp_path / "adapter_model.safetensors")
    assert torch.equal(logits(PeftModel.from_pretrained(swapped(), tmp_path)), logits(mine))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["o_proj"]}))
    with pytest.raises(ValueError, match=r"tensors for model\.layers\.\d\.self_attn\.q_proj, which would be left out"):
        PeftModel.from_pretrained(swapped(), tmp_path)
    with pytest.raises(ValueError, match="which would be left out"):  # the layers have another adapter
        mine.load_adapter(tmp_path, "second")
    mine.add_adapter("third", LoraConfig(target_modules=["q_proj"]))
    state = mine.state_dict()
    one = get_peft_model(swapped(), LoraConfig(target_modules=["q_proj", "o_proj"]))
    found = one.load_state_dict(state, strict=False)  # with adapters that the model has not
    assert found.unexpected_keys and torch.equal(logits(one), logits(mine))


def test_several_adapters():
    mine = get_peft_model(swapped(), config())
    alone = logits(mine)
    mine.add_adapter("second", config(r=3))
    assert torch.equal(logits(mine), alone)
    mine.set_adapter("second")
    second = logits(mine)
    assert relative_error(second, alone) > 0.01
    mine.base_model.set_adapter(["default", "second"])
    both, state = logits(mine), mine.state_dict()
    with pytest.raises(ValueError, match=r"layers.\d.mlp.experts has adapters.*save them .* take them off .unload"):
        mine.dequantize()  # whose layers would call dense experts with adapters
    dense = get_peft_model(dense_like(mine.unload()), config())
    dense.add_adapter("second", config(r=3))
    dense.load_state_dict({key: value for key, value in state.items() if "lora_" in key}, strict=False)
    dense.base_model.set_adapter(["default", "second"])
    assert relative_error(both, logits(dense)) < CLOSE


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss, nemotron_h], ids=lambda f: f.__name__)
def test_merging_quantizes_the_sums_by_the_layers_recipe(family, tmp_path):
    model = swapped(family, recipe="max")
    before = {name: p.clone() for name, p in model.named_parameters()}
    mine = get_peft_model(model, config())
    mine.add_adapter("second", config())
    expected, base = logits(mine), mine.base_model.model
    mine.merge_adapter()
    assert relative_error(logits(mine), expected) < 0.5
    wrapper = next(m for m in base.modules() if type(m).__name__ == "ParamWrapper")
    experts = wrapper.get_base_layer()
    down = wrapper if wrapper.parameter_name == "down_proj" else wrapper.base_layer
    a, b = down.adapter("default")
    name = next(n for n, m in model.named_modules() if m is experts).replace(".base_layer", "") + "."
    codes, sf, scale = (before[f"{name}down_proj{suffix}"][1] for suffix in ("", "_sf", "_global_scale"))
    dense = dequantize(codes, sf, scale)[:, : experts.intermediate_size] + b[1] @ a[1]
    for key, value in quantize_expert(dense, "down_proj", "max").items():
        assert torch.equal(getattr(experts, key)[1], value), key
    with pytest.raises(ValueError, match="default is merged already, and merging on top would round twice"):
        mine.merge_adapter(["second"])
    mine.unmerge_adapter()
    assert relative_error(logits(mine), expected) < CLOSE
    for key, p in experts.named_parameters():
        assert torch.equal(p, before[f"{name}{key}"]), key
    merged = mine.merge_and_unload()
    assert not adapters(merged) and isinstance(next(m for m in merged.modules() if m is experts), HFExperts)
    merged.save_pretrained(tmp_path / "merged")
    assert relative_error(logits(load(tmp_path / "merged", torch.float32)), logits(merged)) < CLOSE


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("where", [
    dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"]), dict(target_modules=["q_proj"]),
    dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
])  # fmt: skip
@pytest.mark.parametrize("merged", [False, True])
def test_a_model_with_adapters_inside_is_not_saved(where, merged, tmp_path):
    """Its files would load without the adapters."""
    mine = get_peft_model(swapped(qwen3_moe), LoraConfig(r=2, **where, init_lora_weights=False)).eval()
    if merged:
        mine.merge_adapter()
    with pytest.raises(ValueError, match=r"model.layers.0.\w+.(experts|q_proj) has adapters of PEFT.*merge_and_unload"):
        mine.get_base_model().save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    mine.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(swapped(qwen3_moe), tmp_path / "adapter").eval()
    mine.unmerge_adapter()
    assert relative_error(logits(again), logits(mine)) < CLOSE
    mine.merge_and_unload().save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("mergeable", [False, True])
@pytest.mark.parametrize("how", [dict(), dict(assign=True), "in place"], ids=str)
def test_weights_that_are_loaded_after_merging_are_not_unmerged(how, mergeable):
    """Unmerging would overwrite them with those from before."""
    model, kind = swapped(linears="attention"), MergeableLoraConfig if mergeable else LoraConfig
    settings = dict(nvfp4_mergeable=True) if mergeable else {}
    settings |= dict(r=2, target_modules=["q_proj"], target_parameters=ON_EXPERTS, init_lora_weights=False)
    mine, base = get_peft_model(copy.deepcopy(model), kind(**settings)).eval(), logits(model)
    expected = logits(mine)
    mine.merge_adapter()
    merged = logits(mine)
    mine.load_state_dict(copy.deepcopy(mine.state_dict()))  # of the same weights
    copy.deepcopy(mine).half().unmerge_adapter()
    mine.unmerge_adapter()
    assert torch.equal(logits(mine), expected)
    torch.manual_seed(1)
    for module in (NVFP4Linear, HFExperts):
        mine.merge_adapter()
        assert torch.equal(logits(mine), merged)
        layers = (m.get_base_layer() for m in mine.modules() if isinstance(m, MergingLayer))
        layer = next(m for m in layers if isinstance(m, module))
        name = "weight" if module is NVFP4Linear else "down_proj"
        other = getattr(layer, name).detach().flip(0)
        if how == "in place":
            getattr(layer, name).data.copy_(other)
        else:
            layer.load_state_dict({name: other}, strict=False, **how)
        loaded = logits(mine)
        assert relative_error(loaded, merged) > 1e-3
        for unmerge in (mine.unmerge_adapter, mine.merge_adapter) if mergeable else (mine.unmerge_adapter,):
            with pytest.raises(ValueError, match=r"default: .* others were loaded since.*unload\(\) returns"):
                unmerge()
        with pytest.raises(ValueError, match="others were loaded since"), mine.disable_adapter():
            logits(mine)
        assert torch.equal(logits(copy.deepcopy(mine).unload()), loaded)
        getattr(layer, name).data.copy_(other.flip(0))
        mine.unmerge_adapter()
    assert torch.equal(logits(mine.unload()), base)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 12, (1 << 20) + 9])
def test_a_digest_changes_with_any_byte(dtype, size):
    torch.manual_seed(0)
    t = torch.randint(256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    before, data = digest(t), t.view(torch.uint8)
    assert digest(t.clone()) == before
    for i in {0, 7, 8, len(data) // 2, len(data) - 1}.intersection(range(len(data))):
        for bit in (1, 128):
            data[i] ^= bit
            assert digest(t) != before
            data[i] ^= bit
    changed = data.roll(8)
    assert size == 1 or not torch.equal(changed, data) and digest(changed) != before


def test_merging_into_experts_whose_recipe_needs_data_takes_mse():
    model = swapped(qwen3_moe, recipe="weighted")
    mine = get_peft_model(model, config())
    wrapper = next(m for m in mine.modules() if getattr(m, "parameter_name", None) == "down_proj")
    experts, (a, b) = wrapper.get_base_layer(), wrapper.adapter("default")
    w = experts.weights.w2
    dense = dequantize(w.codes[1], w.sf[1], w.global_scale[1])[:, : w.K] + b[1] @ a[1]
    mine.merge_adapter()
    for key, value in quantize_expert(dense, "down_proj", "mse").items():
        assert torch.equal(getattr(experts, key)[1], value), key


@pytest.mark.slow
def test_awq_scales_count_for_the_base_and_not_for_adapters(tmp_path):
    folder, twin = awq(tmp_path, qwen3_moe)
    models = set_activations(load(folder, torch.float32), "bf16"), load(twin, torch.float32)
    mine, dense = (get_peft_model(m, config(lora_alpha=40)) for m in models)
    dense.load_state_dict({k: v for k, v in mine.state_dict().items() if "lora_" in k}, strict=False)
    assert relative_error(logits(mine), logits(dense)) < CLOSE
    merged, want = dense_like(mine.merge_and_unload()), dict(dense.merge_and_unload().named_parameters())
    changed = [name for name in want if ".experts." in name or "q_proj" in name]
    assert len(changed) == 2 * 3
    for name in changed:
        assert relative_error(merged.get_parameter(name), want[name]) < 0.25, (
            name
        )  # what 4 bits lose; 0.3 and more without the vectors


def test_models_that_have_adapters_are_swapped(tmp_path):
    """If the adapters are on linears; those on dense experts would add their products to the codes."""
    whole = get_peft_model(make(qwen3_moe, torch.float32), config(experts=False))
    assert swap_experts(whole, progress=False) is whole
    expected = logits(whole)
    model = whole.merge_and_unload()
    model.save_pretrained(tmp_path / "merged")
    assert "model.layers.0.mlp.experts.7.down_proj.weight_scale_2" in tensors(tmp_path / "merged")
    assert relative_error(logits(load(tmp_path / "merged", torch.float32)), expected) < CLOSE

    whole = get_peft_model(make(qwen3_moe, torch.float32), config())
    before = logits(whole)
    with pytest.raises(ValueError, match="have adapters that PEFT made for dense experts: call swap_experts first"):
        swap_experts(whole, progress=False)
    assert torch.equal(logits(whole), before)


@pytest.mark.skipif(not cpu.available(), reason="no C compiler")
def test_a_model_in_files_has_its_adapters_saved_and_loaded(tmp_path):
    """And nothing else: its weights are in the files already, and stay there."""
    swapped().to(torch.bfloat16).save_pretrained(tmp_path / "4bit")
    in_files = lambda: load(tmp_path / "4bit", quantization_config=MoeNvfp4Config(map_files=True))
    model = get_peft_model(in_files(), config())
    want = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(base := in_files(), tmp_path / "adapter")
    assert torch.equal(logits(again), want) and not torch.equal(logits(in_files()), want)
    assert all(m.mapped for m in base.modules() if isinstance(m, HFExperts))
    with pytest.raises(NotImplementedError, match="are saved already"):
        base.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "config.json").exists()
    if Version(peft.__version__) < Version(transformers_peft.MIN_PEFT_VERSION):
        pytest.skip(f"transformers' own adapters, here, need PEFT {transformers_peft.MIN_PEFT_VERSION}")
    (own := in_files()).load_adapter(tmp_path / "adapter")
    own.save_pretrained(tmp_path / "own")
    assert {file.name for file in (tmp_path / "own").iterdir()} >= {"adapter_model.safetensors"}
    assert not (tmp_path / "own" / "model.safetensors").exists()


def test_pefts_registry_is_as_it_was_after_unregister():
    assert PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] is not lora.LoraModel
    unregister()
    try:
        assert PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] is lora.LoraModel
    finally:
        register()
    assert issubclass(PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA], lora.LoraModel)
    dense = get_peft_model(make(qwen3_moe, torch.float32), config())  # other models get PEFT's own layers
    wrapper = next(m for m in dense.modules() if type(m).__name__ == "ParamWrapper")
    assert type(wrapper) is lora.ParamWrapper


@pytest.mark.slow
def test_compiled_whole():
    mine = get_peft_model(swapped(), config())
    found = []
    torch.compiler.reset()
    for model in (mine, torch.compile(mine, fullgraph=True, backend="aot_eager")):
        mine.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        found.append({name: p.grad for name, p in mine.named_parameters() if p.grad is not None})
    same_gradients(*found)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(target_modules=r".*\.experts", target_parameters=None), ValueError, "no LoRA for the module as a whole"),
        (dict(target_parameters=["experts.down_proj_sf"]), ValueError, "no LoRA for down_proj_sf: name their proj"),
        (dict(init_lora_weights="pissa"), NotImplementedError, "init_lora_weights='pissa' reads dense weights"),
        (
            dict(modules_to_save=["experts"]),
            NotImplementedError,
            "modules_to_save: model.layers.0.mlp.experts has",
        ),
        (dict(lora_dropout=0.1), ValueError, "does not work with lora_dropout"),
        (dict(use_dora=True), ValueError, "does not work with use_dora"),
    ],
)
def test_what_is_refused_by_name(settings, error, message):
    plain = dict(r=4, target_modules=[], target_parameters=["experts.down_proj"])
    with pytest.raises(error, match=message):
        get_peft_model(swapped(), LoraConfig(**plain | settings))


@pytest.mark.parametrize("target", [dict(target_modules=["q_proj"]), dict(target_parameters=["experts.down_proj"])])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(lora_bias=True), "lora_bias=False only"),  # merging would lose the bias
        (dict(fan_in_fan_out=True), "fan_in_fan_out=False only"),
        (dict(init_lora_weights="pissa"), "reads dense weights"),
        (dict(init_lora_weights="orthogonal"), "reads dense weights"),
    ],
)
def test_later_adapters_are_refused_like_the_first(target, settings, message):
    plain = dict(target_modules=[]) | target
    model = get_peft_model(swapped(linears="attention"), LoraConfig(**plain))
    with pytest.raises(NotImplementedError, match=message):
        model.add_adapter("later", LoraConfig(**plain | settings))


def test_adapters_that_start_from_inputs():
    """EVA's are those of the dense model, up to signs."""
    model = swapped(linears="attention")
    batches = [{"input_ids": torch.randint(3, 90, (2, 12))} for _ in range(4)]
    found = []
    for start in (dense_like(model), model):
        adapted = get_peft_model(start, LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights="eva"))
        torch.manual_seed(0)
        initialize_lora_eva_weights(adapted, batches)
        found.append({name: p.detach().abs() for name, p in adapted.named_parameters() if "lora_A" in name})
    assert len(found[1]) == 4
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-3)
    with pytest.raises(NotImplementedError, match="'eva' starts from a linear's inputs, and experts are several"):
        get_peft_model(swapped(), LoraConfig(target_parameters=["experts.down_proj"], init_lora_weights="eva"))


@pytest.mark.parametrize("start, target", [
    *((start, dict(target_modules=["q_proj"])) for start in ("eva", "orthogonal", "lora_ga")),
    ("eva", dict(target_modules=[], target_parameters=["experts.down_proj"])),
])  # fmt: skip
def test_adapters_of_dense_models_that_started_otherwise(start, target, tmp_path):
    """Files have what was learned, wherever it started: PEFT's config says how, and loading was refused."""
    model = swapped(linears="attention")
    dense = get_peft_model(dense_like(model), LoraConfig(r=4, init_lora_weights=start, **target))
    with torch.no_grad():
        for name, p in dense.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.1)
    dense.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(model, tmp_path)
    factors = [p.dtype for name, p in loaded.named_parameters() if "lora_" in name]
    assert factors and set(factors) == {torch.float32}
    assert relative_error(logits(loaded), logits(dense)) < 1e-5
    assert loaded.peft_config["default"].init_lora_weights == start
    with pytest.raises(NotImplementedError, match="init_lora_weights='pissa' reads dense weights"):
        loaded.add_adapter("later", LoraConfig(r=4, init_lora_weights="pissa", **target))


@pytest.mark.parametrize(("family", "version", "refused"), [
    (qwen3_moe, "0.18.1", True), (qwen3_moe, "0.19.1", False), (gpt_oss, "0.18.1", False), (gpt_oss, "0.19.0", True),
    (qwen3_moe, None, True), (gpt_oss, None, False),
])  # fmt: skip
def test_adapters_of_experts_by_an_older_peft(family, version, refused, tmp_path):
    """They have the two factors in another order, which sizes that are equal do not tell."""

    def loading(intermediate, change=lambda files: files):
        made = lambda: swap_experts(make(lambda: family(4, intermediate), torch.float32), progress=False)
        folder = tmp_path / f"{intermediate}{change.__name__}"
        get_peft_model(made(), config(target_modules=[])).save_pretrained(folder)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_version": version}))
        save_file(change(tensors(folder)), folder / "adapter_model.safetensors")
        return PeftModel.from_pretrained(made(), folder)

    def exchanged(files):
        for name in [name for name in files if "lora_A" in name and "experts" in name]:
            other = name.replace("lora_A", "lora_B")
            a, b = files[name], files[other]
            files |= {name: torch.ones(len(a), len(b)), other: torch.ones(a.shape[1], b.shape[1])}
        return files

    message = f"by PEFT {version or 'before 0.18'}, which"
    with pytest.raises(NotImplementedError, match=message) if refused else nullcontext():
        loading(SMALL["hidden_size"] // 2)
    assert version in (None, loading(48).peft_config["default"].peft_version)  # as a later PEFT saves them again
    with pytest.raises(NotImplementedError, match=r"by PEFT before 0\.19\.1, which"):
        loading(48, exchanged)


def test_a_new_adapter_that_a_dictionary_describes(tmp_path):
    """PEFT makes our config of it, which has no version, as the files of an old PEFT have none."""
    described = dict(peft_type="LORA", task_type="CAUSAL_LM", r=4, target_parameters=["experts.down_proj"])
    square = lambda: qwen3_moe(4, SMALL["hidden_size"])
    model = swap_experts(make(square, torch.float32), progress=False)
    get_peft_model(model, get_peft_config(described)).save_pretrained(tmp_path / "new")
    again = PeftModel.from_pretrained(make(square), tmp_path / "new", is_trainable=True)
    again.save_pretrained(tmp_path / "again")
    for name in ("new", "again"):
        said = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert said["target_parameters"] == ["experts.down_proj"] and not [key for key in said if "nvfp4" in key]


def test_adapters_of_single_experts_by_an_older_peft(tmp_path):
    """In transformers 4 each expert's linears were modules. PEFT stacks their adapters, in the order of linears."""
    model = swap_experts(make(qwen3_moe, torch.float32), progress=False)
    dense, files, scaling = dense_like(model), {}, 1.5
    for name, module in dense.named_modules():
        if name.endswith(".experts"):
            for e in range(len(module.down_proj)):
                gate, up = module.gate_up_proj.data[e].chunk(2)
                for part, weight in ("gate_proj", gate), ("up_proj", up), ("down_proj", module.down_proj.data[e]):
                    a, b = 0.1 * torch.randn(4, weight.shape[1]), 0.1 * torch.randn(len(weight), 4)
                    weight += scaling * b @ a
                    stem = f"base_model.model.{name}.{e}.{part}"
                    files |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    targets = ["gate_proj", "up_proj", "down_proj"]
    LoraConfig(r=4, lora_alpha=6, target_modules=targets, peft_version="0.18.0").save_pretrained(tmp_path)
    save_file(files, tmp_path / "adapter_model.safetensors")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_version"] == "0.18.0"
    torch.testing.assert_close(logits(PeftModel.from_pretrained(model, tmp_path)), logits(dense), atol=1e-5, rtol=1e-5)


def test_mixed_models_are_refused_with_the_way_out():
    """PEFT makes their layers itself."""
    mixed = get_peft_model(swapped(), LoraConfig(target_parameters=["experts.down_proj"]), mixed=True)
    with pytest.raises(ValueError, match="PeftMixedModel makes.*: get_peft_model without mixed=True"):
        mixed(IDS)


def test_an_adapter_that_brings_a_dense_head(tmp_path):
    """PEFT saves the head with an adapter on it, which has no place in a 4-bit one."""
    folder, _ = quantized(tmp_path, qwen3_moe, "modelopt", lambda key: "experts" in key or "lm_head" in key)
    model = set_activations(load(folder, torch.float32), "bf16")
    dense = get_peft_model(dense_like(model), LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    expected = logits(dense)
    dense.save_pretrained(tmp_path / "adapter")
    with pytest.raises(RuntimeError, match="save it without .PeftModel.save_pretrained.*save_embedding_layers=False"):
        PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    dense.save_pretrained(tmp_path / "without", save_embedding_layers=False)
    assert relative_error(logits(PeftModel.from_pretrained(model, tmp_path / "without")), expected) < CLOSE


def test_experts_that_are_split_over_ranks_are_refused():
    """No parallel plan says whether an adapter is to be split."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = swapped()
        experts = next(m for m in model.modules() if isinstance(m, HFExperts))
        split = distribute_tensor(experts.down_proj, init_device_mesh("cpu", (1,)), [Shard(0)])
        experts.down_proj = torch.nn.Parameter(split, requires_grad=False)
        with pytest.raises(NotImplementedError, match="split over ranks: give the whole model its adapters first"):
            get_peft_model(model, config())
    finally:
        torch.distributed.destroy_process_group()


# ---- Trainer -------------------------------------------------------------------------------------


class Repeat(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return dict(input_ids=IDS[0], labels=IDS[0])


def arguments(path, **settings):
    return TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=2, max_steps=8, learning_rate=2e-2, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_trainer(checkpointing, tmp_path):
    """Trainer asks the quantizer whether the model can be trained, and runs in bf16 under its autocast."""
    model = get_peft_model(swapped().bfloat16(), config(init_lora_weights=True))
    before = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = Trainer(
        model, arguments(tmp_path, bf16=True, gradient_checkpointing=checkpointing), train_dataset=Repeat()
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
    for name, p in model.named_parameters():
        assert p.requires_grad or torch.equal(p, before[name]), name
    model = trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # without the autocast of training
    expected = logits(model.eval())
    trainer.save_model(str(tmp_path / "adapter"))
    again = PeftModel.from_pretrained(swapped().bfloat16(), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), expected)


def test_sft_trainer(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL's trainer needs trl")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([dict(input_ids=IDS[0].tolist())] * 16)
    settings = {k: v for k, v in vars(arguments(tmp_path)).items() if k in ("max_steps", "learning_rate", "use_cpu")}
    words = models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w2")
    args = trl.SFTConfig(output_dir=str(tmp_path), logging_steps=1, report_to=[], save_strategy="no",
                         dataset_kwargs={"skip_prepare_dataset": True}, **settings)  # fmt: skip
    trainer = trl.SFTTrainer(
        swapped(), args, train_dataset=rows, peft_config=config(init_lora_weights=True), processing_class=tokenizer
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
