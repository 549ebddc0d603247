"""Whole models: swap, quantize while loading, save, load, generate, compile, offload."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from safetensors.torch import save_file
from torch import nn

from moe_nvfp4 import cli
from moe_nvfp4.integrations.huggingface import (
    MoeNvfp4Config,
    calibrate,
    checkpoint_config,
    set_activations,
    swap_experts,
)
from moe_nvfp4.integrations.huggingface.calibration import files_importance
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import DIALECTS, matches
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests import checkpoints
from tests.common import THRESHOLDS, peak_while_loading, relative_error, stand_for_hopper
from tests.folders import change_config, fp8
from tests.models import (
    FAMILIES,
    IDS,
    SMALL,
    as_bytes,
    dbrx,
    deepseek,
    diffusion_gemma,
    folder,
    gpt_oss,
    granite,
    llama4,
    load,
    logits,
    make,
    mixtral,
    nemotron_h,
    qwen3_moe,
    same_tensors,
    tensors,
)  # fmt: skip


@pytest.fixture(params=FAMILIES, ids=lambda f: f.__name__)
def family(request):
    return request.param


def same_experts(a, b):
    ours, theirs = (dict(m.named_parameters()) for m in (a, b))
    assert ours.keys() == theirs.keys()
    for name, p in ours.items():
        assert torch.equal(p, theirs[name]), name
        assert p.dtype == theirs[name].dtype


@pytest.mark.slow_after(1)
# ---------------------------------------------------------------- the round trip
def test_round_trip(family, tmp_path):
    """Quantized in memory, while loading, or saved and loaded: the same bytes, logits and tokens."""
    source = folder(tmp_path, family)
    swapped = swap_experts(load(source), progress=False)
    model = load(source, quantization_config=MoeNvfp4Config())
    assert sum(isinstance(m, HFExperts) for m in model.modules()) > 0
    same_experts(swapped, model)
    assert torch.equal(logits(swapped), logits(model))
    assert not any(p.requires_grad for m in model.modules() if isinstance(m, HFExperts) for p in m.parameters())

    for i, saved in enumerate((model, swapped)):
        saved.save_pretrained(tmp_path / f"nvfp4-{i}")
        again = load(tmp_path / f"nvfp4-{i}")
        same_experts(again, model)
        assert torch.equal(logits(again), logits(model))
        greedy = dict(max_new_tokens=8, do_sample=False)
        assert torch.equal(again.generate(IDS, **greedy), model.generate(IDS, **greedy))
    assert_same_files(tmp_path / "nvfp4-0", tmp_path / "nvfp4-1")
    again.save_pretrained(tmp_path / "nvfp4-2")  # and a loaded one saves the same files again
    assert_same_files(tmp_path / "nvfp4-0", tmp_path / "nvfp4-2")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_are_those_of_a_dense_load(stored, tmp_path):
    """Also for files with renamed tensors, and for what the family keeps in fp32."""
    source = folder(tmp_path, nemotron_h, dtype=stored)
    swap_experts(load(source, stored), progress=False).save_pretrained(tmp_path / "nvfp4")
    for dtype in (torch.float32, torch.bfloat16):
        dense, packed = (dict(load(path, dtype).state_dict()) for path in (source, tmp_path / "nvfp4"))
        others = [name for name in dense if ".experts." not in name]
        assert {n: packed[n].dtype for n in others} == {n: dense[n].dtype for n in others}


@pytest.mark.slow_after(2)
def test_every_call_prepares(family, tmp_path):
    """On Hopper weights are packed in place; a forward without this step would pack them in every call."""
    model = load(folder(tmp_path, family), torch.bfloat16, quantization_config=MoeNvfp4Config())
    experts = [m for m in model.modules() if isinstance(m, HFExperts)]
    assert not any(m.packed for m in experts)
    with stand_for_hopper():
        logits(model)
    assert all(m.packed for m in experts)


def assert_same_files(a, b):
    same_tensors(a, b)
    assert json.loads((a / "config.json").read_text()) == json.loads((b / "config.json").read_text())


NAMES = {
    "qwen3_moe": ("model.layers.1.mlp.experts.{e}.", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("model.layers.1.block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
    "gpt_oss": ("model.layers.1.mlp.experts.{e}.", ("gate_proj", "up_proj", "down_proj")),
    "granite": ("model.layers.1.block_sparse_moe.experts.{e}.", ("gate_proj", "up_proj", "down_proj")),
    "gemma4": ("model.layers.1.experts.{e}.", ("gate_proj", "up_proj", "down_proj")),
    "nemotron_h": ("backbone.layers.0.mixer.experts.{e}.", ("up_proj", "down_proj")),
    "dbrx": ("transformer.blocks.1.ffn.experts.{e}.", ("gate_proj", "up_proj", "down_proj")),
    "llama4": ("model.layers.1.feed_forward.experts.{e}.", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.slow_after(1)
def test_files_have_modelopt_names_and_the_quantizers_bytes(family, tmp_path):
    """One tensor per expert, projection and scale; the bytes are those of quantizing each matrix, with a global scale
    that gate and up share."""
    from moe_nvfp4.quantize.recipes import quantize_matrix, recipe_global_scale

    source = folder(tmp_path, family)
    load(source, quantization_config=MoeNvfp4Config()).save_pretrained(tmp_path / "nvfp4")
    files, config = tensors(tmp_path / "nvfp4"), json.loads((tmp_path / "nvfp4/config.json").read_text())
    stem, projections = NAMES[family.__name__]
    prefix = stem.split(".{e}")[0]
    dense = experts_by_hand(tmp_path, family, prefix)
    seen = set()
    for e in range(4):
        *first, _ = dense[e]
        shared = recipe_global_scale(torch.cat(first).abs().amax().float())
        for projection, matrix in zip(projections, dense[e], strict=True):
            codes, sf, global_scale = quantize_matrix(matrix, "mse", shared if projection != projections[-1] else None)
            expected = {"weight": codes, "weight_scale": sf, "weight_scale_2": global_scale}
            for suffix, value in expected.items():
                key = stem.format(e=e) + f"{projection}.{suffix}"
                assert files[key].dtype == value.dtype and files[key].shape == value.shape, key
                assert as_bytes(files[key]) == as_bytes(value), key
                seen.add(key)
    expert_keys = {k for k in files if k.startswith(prefix + ".") and not k.endswith("bias")}
    per_expert = len(seen) // 4
    assert len(expert_keys) == per_expert * (8 if family is qwen3_moe else 4)
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "modelopt" and quantization["quant_algo"] == "W4A16_NVFP4"
    assert any("lm_head" in name for name in quantization["ignore"])


def experts_by_hand(tmp_path, family, prefix):
    """(gate, up, down) [out, in] of the first experts of the second MoE layer, from the bf16 model."""
    layers = make(family)
    name = prefix.replace("block_sparse_moe", "mlp") if family is mixtral else prefix
    name = name.replace("backbone", "model") if family is nemotron_h else name
    m = layers.get_submodule(name)
    if family is dbrx:
        w1, v1, w2 = (getattr(m.mlp, n).view(4, 48, 64) for n in ("w1", "v1", "w2"))
        return [(w1[e], v1[e], w2[e].T) for e in range(4)]
    if family is nemotron_h:
        return [(m.up_proj[e], m.down_proj[e]) for e in range(4)]
    found = []
    for e in range(4):
        up, down = m.gate_up_proj[e], m.down_proj[e]
        if family in (gpt_oss, llama4):
            up, down = up.T, down.T
        gate, up = (up[0::2], up[1::2]) if family is gpt_oss else up.chunk(2)
        found.append((gate, up, down))
    return found


def test_stacked_layout_saves_and_loads(tmp_path):
    """save_original_format=False writes one tensor per parameter, and nothing in the other layout."""
    model = load(folder(tmp_path, qwen3_moe), quantization_config=MoeNvfp4Config())
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    keys = tensors(tmp_path / "stacked").keys()
    assert not any(".experts.0." in k for k in keys)
    assert "model.layers.0.mlp.experts.gate_up_proj_sf" in keys
    same_experts(load(tmp_path / "stacked"), model)


@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss, llama4, nemotron_h, dbrx], ids=lambda f: f.__name__)
def test_stacked_layout_keeps_scales(family, tmp_path):
    """Static activation scales and AWQ's scales, which transformers would take for tensors that nothing needs."""
    model = swap_experts(make(family, torch.float32), activations="nvfp4", progress=False)
    calibrate(model, [IDS], progress=False)
    with_awq = swap_experts(make(family, torch.float32), progress=False)
    for experts in (m for m in with_awq.modules() if isinstance(m, HFExperts)):
        experts.add_pre_quant_scales(torch.float32)
        for scales in experts.pre_quant_scales:
            scales.data.uniform_(0.5, 2)
    for name, saved in (("static", model), ("awq", with_awq)):
        saved.save_pretrained(tmp_path / name, save_original_format=False)
        loaded = load(tmp_path / name, torch.float32)
        assert torch.equal(logits(loaded), logits(saved)), name
    files, module = tensors(tmp_path / "awq"), next(n for n, m in with_awq.named_modules() if isinstance(m, HFExperts))
    for lost, message in (
        ("down_proj_pre_quant_scale", "down_proj has no pre_quant_scale, which"),
        ("down_proj", "lack|gives"),
    ):
        some = {name: t for name, t in files.items() if name != f"{module}.{lost}"}
        assert len(some) == len(files) - 1
        save_file(some, tmp_path / "awq/model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "awq")


def test_one_config_for_several_models(tmp_path):
    """What the first leaves dense is nothing to the second, and the user's config stays as it was."""
    config = MoeNvfp4Config(linears=["attention"])
    before = copy.deepcopy(vars(config))
    for family in (deepseek, qwen3_moe):
        kind, path = type(family()), tmp_path / family.__name__  # AutoModel copies what it is given
        source, found = folder(path, family), []
        for name, by in (("shared", config), ("own", MoeNvfp4Config(linears=["attention"]))):
            kind.from_pretrained(source, quantization_config=by).save_pretrained(path / name)
            found.append((path / name / "config.json").read_text())
        assert found[0] == found[1] and vars(config) == before


def test_experts_that_the_model_does_not_have(tmp_path):
    """The config of Qwen3-Omni's thinker does not say how many experts the talker has."""
    convert_checkpoint(folder(tmp_path, qwen3_moe), tmp_path / "nvfp4", progress=False)
    files = tensors(tmp_path / "nvfp4")
    first = {name: t for name, t in files.items() if ".layers.0.mlp.experts." in name}
    static = {n.replace("weight_scale_2", "input_scale"): t for n, t in first.items() if n.endswith("_scale_2")}
    for more in ({}, static, {name.replace("experts.0.", "experts.64."): t for name, t in first.items()}):
        other = {f"talker.{name}": t.clone() for name, t in (first | more).items() if "experts.1." not in name}
        save_file(files | other, tmp_path / "nvfp4/model.safetensors", metadata={"format": "pt"})
        same_experts(load(tmp_path / "nvfp4"), swap_experts(load(tmp_path / "bf16"), progress=False))
    mtp = {name.replace("layers.0", "layers.2"): t.clone() for name, t in first.items()}  # is carried into new files
    for damaged, layer in ((files, 0), (files | mtp, 2)):
        left = {name: t for name, t in damaged.items() if f".{layer}.mlp.experts.1." not in name}
        save_file(left, tmp_path / "nvfp4/model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"layers.{layer}.mlp.experts.1.down_proj is missing"):
            load(tmp_path / "nvfp4")


def nemotron_3():
    """Experts on rows of 32, between two linears."""
    return nemotron_h(moe_latent_size=32)


def longcat():
    """Two experts that return their input: transformers' module has unused rows for them, and saves these."""
    from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

    return LongcatFlashForCausalLM(LongcatFlashConfig(
        vocab_size=96, hidden_size=64, num_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        ffn_hidden_size=48, expert_ffn_hidden_size=48, n_routed_experts=4, zero_expert_num=2, moe_topk=2,
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    ))  # fmt: skip


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [nemotron_3, longcat], ids=lambda f: f.__name__)
def test_other_rows_and_other_experts(family, tmp_path, capsys):
    """Quantized while loading and in memory, saved, loaded: the logits are those of the dequantized weights. `info`
    counts the experts' bytes."""
    source = folder(tmp_path, family)
    assert cli.main(["info", str(source), "--json"]) == 0
    of_experts = [t for name, t in tensors(source).items() if re.search(r"experts\.[0-3]\.", name)]
    assert json.loads(capsys.readouterr().out)["bytes"]["experts_bf16"] == sum(t.nbytes for t in of_experts)
    model = load(source, torch.float32, quantization_config=MoeNvfp4Config())
    found = logits(model)
    assert torch.equal(logits(swap_experts(load(source, torch.float32), progress=False)), found)
    model.save_pretrained(tmp_path / "nvfp4")
    assert torch.equal(logits(load(tmp_path / "nvfp4", torch.float32)), found)
    assert relative_error(found, logits(model.dequantize())) < 10 * THRESHOLDS["fp32"]
    assert relative_error(found, logits(load(source, torch.float32))) > 0.01  # the experts count


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rows", ["as transformers saves them", "of routed experts only"])
def test_rows_of_identity_experts(rows, tmp_path):
    """transformers' LongCat has gate and up for experts that return their input; published files have none."""
    source = folder(tmp_path, longcat)
    want = logits(load(source, quantization_config=MoeNvfp4Config()))
    if "only" in rows:
        files = {name: t for name, t in tensors(source).items() if not re.search(r"experts\.[45]\.", name)}
        assert len(tensors(source)) - len(files) == 2 * 2 * 2
        save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(source, tmp_path / "new", progress=False)
    assert verify_checkpoint(tmp_path / "new", source).warnings == []
    assert torch.equal(logits(load(tmp_path / "new")), want)
    importance = files_importance(source, [IDS], device="cpu", progress=False)
    assert [*importance.layers] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    loaded = load(source, quantization_config=MoeNvfp4Config(recipe="weighted", calibration=IDS))
    convert_checkpoint(source, tmp_path / "weighted", Options("weighted", importance=importance), progress=False)
    assert torch.equal(logits(load(tmp_path / "weighted")), logits(loaded))


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_identity_experts_of_a_layer_that_stays_dense(dialect, tmp_path):
    """transformers loads such a layer only with the rows that it has saved of them: the folder could not be loaded."""
    source = folder(tmp_path, longcat)
    options = Options(dialect=dialect, exclude="model.layers.0.mlp.experts")
    convert_checkpoint(source, tmp_path / "new", options, progress=False)
    other = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}[dialect]
    convert_checkpoint(tmp_path / "new", tmp_path / "again", Options(dialect=other), progress=False)
    want = logits(swap_experts(load(source), exclude="model.layers.0.mlp.experts", progress=False))
    identity = {n: t for n, t in tensors(source).items() if re.search(r"layers\.0\..*experts\.[45]\.", n)}
    assert len(identity) == 4
    for path in (tmp_path / "new", tmp_path / "again"):
        assert verify_checkpoint(path, source).warnings == [] and torch.equal(logits(load(path)), want)
        found = {n: t for n, t in tensors(path).items() if re.search(r"experts\.[45]\.", n)}
        assert found.keys() == identity.keys() and all(torch.equal(found[n], identity[n]) for n in found)


def test_identity_experts_in_fp8(tmp_path):
    """Their scales go where their weights do."""
    source = folder(tmp_path, longcat)
    files = tensors(source)
    for name in [n for n in files if ".mlp.experts." in n]:
        files[name], files[f"{name}_scale_inv"], _ = fp8("block", files[name].float())
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    change_config(source, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    convert_checkpoint(source, tmp_path / "new", progress=False)
    assert verify_checkpoint(tmp_path / "new", source).warnings == []
    assert not [name for name in tensors(tmp_path / "new") if re.search(r"experts\.[45]\.", name)]


@pytest.mark.slow
def test_experts_of_two_modules_in_one_list(tmp_path):
    """ERNIE 4.5 VL's files have the experts for text and for images in one list, which is halved."""
    from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration

    text = dict(
        **SMALL, intermediate_size=48, moe_intermediate_size=[48, 32], moe_num_experts=4,
        moe_k=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
    )  # fmt: skip
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4)
    config = Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision)
    model = make(lambda: Ernie4_5_VLMoeForConditionalGeneration(config), torch.float32)
    kind = type(model)
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(NotImplementedError, match="experts of several modules in one list.*then swap_experts"):
        kind.from_pretrained(tmp_path / "dense", quantization_config=MoeNvfp4Config())
    text = [torch.randint(0, 96, (4, 32), generator=torch.Generator().manual_seed(0))]
    with pytest.raises(ValueError, match=r"vision_moe.experts has no importance: no token reached it \(exclude it"):
        swap_experts(copy.deepcopy(model), recipe="weighted", calibration=text, progress=False)
    with pytest.warns(UserWarning, match="experts saw fewer than 8 rows"):
        learned = swap_experts(copy.deepcopy(model), recipe="distill", calibration=text, progress=False)
    swap_experts(model, linears=["attention"], progress=False)
    layers = (m.model.language_model.layers[1].mlp for m in (learned, model))
    learned, plain = ([mlp.get_submodule(f"{of}_moe.experts").down_proj for of in ("text", "vision")] for mlp in layers)
    assert [torch.equal(*pair) for pair in zip(learned, plain, strict=True)] == [False, True]
    model.save_pretrained(tmp_path / "nvfp4")  # under the model's own names
    again = kind.from_pretrained(tmp_path / "nvfp4", dtype=torch.float32).eval()
    assert torch.equal(logits(again), logits(model))
    for refused in (verify_checkpoint, lambda folder: convert_checkpoint(folder, tmp_path / "converted")):
        with pytest.raises(ValueError, match="unless it is ERNIE 4.5 VL, which has no other names"):
            refused(tmp_path / "nvfp4")
    expected = logits(model.dequantize())
    model.save_pretrained(tmp_path / "back")
    assert tensors(tmp_path / "back").keys() == tensors(tmp_path / "dense").keys()
    assert torch.equal(logits(kind.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()), expected)


@pytest.mark.slow_after(1)
def test_layers_with_another_number_of_experts(tmp_path):
    """The layers of dots3-note's vision tower have from 4 to 64 experts, by the config's per_layer_config: such a model
    was not saved."""
    dots = pytest.importorskip("transformers.models.dots3_note")
    text = dict(
        **SMALL | dict(num_key_value_heads=4), intermediate_size=48, moe_intermediate_size=48, n_routed_experts=8,
        num_experts_per_tok=2, shared_experts_intermediate_size=48, kv_lora_rank=16, q_lora_rank=16, v_head_dim=16,
        qk_rope_head_dim=16, qk_nope_head_dim=16, index_n_heads=2, index_head_dim=32,
        layer_types=["indexed_attention"] * 2, mlp_layer_types=["dense", "sparse"],
    )  # fmt: skip
    vision = dict(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        patch_size=4, adapter_in_dim=32, adapter_out_dim=64, mlp_layer_types=["sparse"] * 2,
        per_layer_config={0: {"num_local_experts": 4}, 1: {"num_local_experts": 6}},
    )  # fmt: skip
    audio = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, feature_size=16, downsample_hidden_size=16, conv_output_size=32, adapter_input_size=32,
        adapter_out_dim=64,
    )  # fmt: skip
    config = dots.Dots3NoteConfig(text_config=text, vision_config=vision, audio_config=audio)
    model = make(lambda: dots.Dots3NoteForConditionalGeneration(config), torch.float32)
    kind = type(model)
    model.save_pretrained(tmp_path / "dense")
    swap_experts(model, progress=False)
    model.save_pretrained(tmp_path / "nvfp4")
    pixels, grid = torch.randn(16, 48), torch.tensor([[1, 4, 4]])
    loading = kind.from_pretrained(tmp_path / "dense", dtype=torch.float32, quantization_config=MoeNvfp4Config())
    for again in (kind.from_pretrained(tmp_path / "nvfp4", dtype=torch.float32), loading):
        same_experts(again, model)
        assert torch.equal(logits(again.eval()), logits(model))
        with torch.no_grad():
            towers = [m.model.vision_tower(pixels, grid)[0] for m in (again, model)]
        assert torch.equal(*towers)


def test_experts_that_are_tied(tmp_path):
    """DiffusionGemma's text encoder has the experts of its decoder. Codes were tied without their scales: a model that
    was loaded was saved without the encoder's codes, and transformers put any numbers into scales that files lack."""
    model = make(diffusion_gemma, torch.float32)
    kind = type(model)

    def experts(model):
        return (part.layers[0].experts for part in (model.model.encoder.language_model, model.model.decoder))

    def answer(model):
        with torch.no_grad():
            return model(input_ids=IDS, decoder_input_ids=IDS.flip(1)).logits

    model.save_pretrained(tmp_path / "dense")
    for exclude in ((), ["model.encoder.*"], ["model.decoder.*"]):
        with pytest.raises(NotImplementedError, match="same weights .tied.*then swap_experts"):
            kind.from_pretrained(tmp_path / "dense", quantization_config=MoeNvfp4Config(exclude=exclude))
    with pytest.raises(ValueError, match="a layout that is not known for model_type 'diffusion_gemma'"):
        convert_checkpoint(tmp_path / "dense", tmp_path / "new", progress=False)
    with pytest.raises(ValueError, match="'mlp'.*it has the weights of model.encoder.*tied"):
        swap_experts(model, linears="mlp", progress=False)  # a 4-bit decoder would add to the dense encoder
    swap_experts(model, progress=False)
    want = answer(model)
    for name in ("nvfp4", "again"):
        model.tie_weights()
        one, other = experts(model)
        assert isinstance(one, HFExperts) and one.gate_up_proj is not other.gate_up_proj
        model.save_pretrained(tmp_path / name)
        model = kind.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        assert torch.equal(answer(model), want)
    assert tensors(tmp_path / "again").keys() == tensors(tmp_path / "nvfp4").keys()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss, granite], ids=lambda f: f.__name__)
def test_exclusions_are_honoured_and_recorded(family, tmp_path):
    source = folder(tmp_path, family)
    first = "model.layers.0." + ("block_sparse_moe" if family is granite else "mlp") + ".experts"
    model = load(source, quantization_config=MoeNvfp4Config(exclude=["model.layers.0.*"]))
    kinds = {n: isinstance(m, HFExperts) for n, m in model.named_modules() if n.endswith(".experts")}
    assert kinds.pop(first) is False and set(kinds.values()) == {True}
    model.save_pretrained(tmp_path / "nvfp4")
    config = json.loads((tmp_path / "nvfp4/config.json").read_text())["quantization_config"]
    assert f"{first}*" in config["ignore"] and config["moe_nvfp4"]["exclude"] == ["model.layers.0.*"]
    again = load(tmp_path / "nvfp4")
    same_experts(again, model)
    assert torch.equal(logits(again), logits(model))
    dense = dict(load(source).named_parameters())
    for name, p in again.get_submodule(first).named_parameters():
        assert torch.equal(p, dense[f"{first}.{name}"])


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_the_ignore_list_of_layers_that_changed_places(dialect, tmp_path):
    """It names what is dense now, and nothing that is 4-bit: other programs believe it."""
    chosen = MoeNvfp4Config(exclude="model.layers.0.*", linears="attention", dialect=dialect)
    model = load(folder(tmp_path, qwen3_moe), quantization_config=chosen)
    model.model.layers = nn.ModuleList([*model.model.layers][::-1])
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = i
    want = logits(model)
    model.save_pretrained(tmp_path / "nvfp4")
    config = json.loads((tmp_path / "nvfp4/config.json").read_text())["quantization_config"]
    ignore = config["ignore"]
    assert config["moe_nvfp4"]["exclude"] == []
    files = tensors(tmp_path / "nvfp4")
    last = DIALECTS[dialect].suffixes[1]
    stems = {name.removesuffix(".weight") for name in files if name.endswith(("proj.weight", "head.weight"))}
    stems |= {name.removesuffix(f".{last}") for name in files if name.endswith(f".{last}")}
    for stem in stems:
        assert any(matches(p, stem) for p in ignore) == (f"{stem}.{last}" not in files), stem
    assert torch.equal(logits(load(tmp_path / "nvfp4")), want)


@pytest.mark.parametrize("which", ["a layer", "a linear", "the head"])
def test_linears_of_another_model(which, tmp_path):
    """Its 4-bit ones in place of dense ones, and the other way round: files and ignore list say what there is."""
    few = swap_experts(make(qwen3_moe, torch.float32), progress=False)
    many = swap_experts(make(qwen3_moe, torch.float32), progress=False, linears="all")
    for name, (to, other) in {"packed": (few, many), "dense": (many, few)}.items():
        at = {"a layer": "model.layers.0", "a linear": "model.layers.1.self_attn.o_proj", "the head": "lm_head"}[which]
        mine, theirs = to.get_submodule(at), other.get_submodule(at)
        to.set_submodule(at, theirs)
        want = logits(to)
        to.save_pretrained(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        files = tensors(tmp_path / name)
        for stem in {n.removesuffix(".weight") for n in files if n.endswith(("proj.weight", "head.weight"))}:
            assert any(matches(p, stem) for p in config["ignore"]) == (f"{stem}.weight_scale" not in files), stem
        verify_checkpoint(tmp_path / name)
        assert torch.equal(logits(load(tmp_path / name, torch.float32)), want)
        to.set_submodule(at, mine)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from([qwen3_moe, gpt_oss]), experts=st.integers(2, 11), intermediate=st.integers(1, 5),
    odd=st.booleans(), layers=st.integers(1, 3), excluded=st.integers(-1, 2), recipe=st.sampled_from(["max", "mse"]),
    shard=st.sampled_from(["20KB", "1GB"]),
)  # fmt: skip
def test_any_checkpoint_round_trips(
    family, experts, intermediate, odd, layers, excluded, recipe, shard, tmp_path_factory
):
    """Any number of experts (above ten, '10' sorts before '2'), padded widths, shards, exclusions."""
    path = tmp_path_factory.mktemp("any")
    width = 16 * intermediate + 8 * odd
    make(lambda: family(experts, width, num_hidden_layers=layers)).save_pretrained(path / "a", max_shard_size=shard)
    exclude = [f"model.layers.{excluded}.*"] if 0 <= excluded < layers and layers > 1 else []
    config = MoeNvfp4Config(recipe=recipe, exclude=exclude)
    model = load(path / "a", quantization_config=config)
    same_experts(swap_experts(load(path / "a"), recipe=recipe, exclude=exclude, progress=False), model)
    model.save_pretrained(path / "b", max_shard_size=shard)
    again = load(path / "b")
    same_experts(again, model)
    assert torch.equal(logits(again), logits(model))


def test_shards_and_missing_index(tmp_path):
    source = folder(tmp_path, qwen3_moe, max_shard_size="40KB")
    assert len(list(source.glob("*.safetensors"))) > 4
    model = load(source, quantization_config=MoeNvfp4Config())
    model.save_pretrained(tmp_path / "nvfp4", max_shard_size="30KB")
    assert len(list((tmp_path / "nvfp4").glob("*.safetensors"))) > 2
    same_experts(load(tmp_path / "nvfp4"), model)


@pytest.mark.slow
def test_shards_of_a_variant(tmp_path, capsys):
    """transformers names the index of a variant in another way: every command reads it, and quantize writes files that
    load without a variant."""
    args = dict(variant="four", max_shard_size="30KB")
    source = folder(tmp_path, qwen3_moe, **args)
    assert sorted(source.glob("*.json"))[-1].name == "model.safetensors.index.four.json"
    model = load(source, variant="four", quantization_config=MoeNvfp4Config())
    model.save_pretrained(tmp_path / "nvfp4", **args)
    assert verify_checkpoint(tmp_path / "nvfp4", source).layers
    convert_checkpoint(source, tmp_path / "converted", Options(), progress=False)
    same_tensors(tmp_path / "converted", tmp_path / "nvfp4")
    again = load(tmp_path / "converted")
    same_experts(again, model)
    assert torch.equal(logits(again), logits(model))
    assert {p.name for p in (tmp_path / "converted").glob("*.json")} == {
        "config.json", "generation_config.json", "model.safetensors.index.json"}  # fmt: skip
    assert cli.main(["info", str(tmp_path / "nvfp4")]) == 0
    assert "4 shards" not in capsys.readouterr().err
    make(mixtral).save_pretrained(source, variant="other", max_shard_size="30KB")
    with pytest.raises(ValueError, match=r"index.four.json, model.safetensors.index.other.json\), and no others: move"):
        verify_checkpoint(source)
    model.save_pretrained(source)  # files without a variant are the checkpoint's, as from_pretrained reads it
    assert verify_checkpoint(source, tmp_path / "nvfp4").layers


@pytest.mark.parametrize("index", [False, True], ids=["a file", "an index"])
def test_the_weights_that_the_config_names(index, tmp_path):
    """transformers loads what transformers_weights in config.json names, whatever else is in the folder. New files have
    the usual names."""
    source, other = folder(tmp_path, qwen3_moe), make(qwen3_moe, torch.bfloat16)
    for p in other.parameters():
        p.data.mul_(2)
    other.save_pretrained(tmp_path / "other", **(dict(variant="a", max_shard_size="30KB") if index else {}))
    names = {"model.safetensors": "a.safetensors", "model.safetensors.index.a.json": "a.safetensors.index.json"}
    for path in (tmp_path / "other").glob("model*"):
        shutil.copy(path, source / names.get(path.name, path.name))
    checkpoints.edit_config(source, transformers_weights=f"a.safetensors{'.index.json' * index}")
    dense = tensors(tmp_path / "other")
    assert all(torch.equal(p, dense[name]) for name, p in load(source).named_parameters() if name in dense)
    convert_checkpoint(source, tmp_path / "converted", Options(), progress=False)
    assert "transformers_weights" not in checkpoints.config_of(tmp_path / "converted")
    assert verify_checkpoint(tmp_path / "converted", source).layers
    same_experts(load(tmp_path / "converted"), load(source, quantization_config=MoeNvfp4Config()))
    for wrong in ("b.safetensors", "../a.safetensors", "a.bin", 3):
        checkpoints.edit_config(source, transformers_weights=wrong)
        with pytest.raises(ValueError, match="config.json: transformers_weights is .* remove the entry"):
            convert_checkpoint(source, tmp_path / "x", Options(), progress=False)


@pytest.mark.parametrize("other", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("variant", ["a file", "shards"])
def test_weights_that_transformers_passes_over(variant, other, tmp_path):
    """Where no safetensors file has a usual name, transformers takes the other format, which may be other weights."""
    source = folder(tmp_path, qwen3_moe, variant="a", max_shard_size="30KB" if variant == "shards" else "1GB")
    assert convert_checkpoint(source, tmp_path / "x", Options(), dry_run=True).quantized
    (source / other).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{other} is what transformers loads, and not model"):
        convert_checkpoint(source, tmp_path / "x", Options(), dry_run=True)
    make(qwen3_moe).save_pretrained(source)
    assert convert_checkpoint(source, tmp_path / "x", Options(), dry_run=True).quantized


# ---------------------------------------------------------------- generate
@pytest.mark.slow
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_generate_with_every_cache_and_compiled(activations, tmp_path):
    # fp32: the caches round attention differently, which in bf16 decides near-ties of a random model
    config = MoeNvfp4Config(activations=activations)
    model = load(folder(tmp_path, qwen3_moe), torch.float32, quantization_config=config)
    greedy = dict(max_new_tokens=10, do_sample=False)
    expected = model.generate(IDS, **greedy)
    assert torch.equal(model.generate(IDS, cache_implementation="static", **greedy), expected)
    assert torch.equal(model.generate(IDS, use_cache=False, **greedy), expected)
    torch.compiler.reset()
    step = torch.compile(model.model.layers[0].mlp, fullgraph=True)
    x = torch.randn(1, 5, 64)
    with torch.no_grad():
        traced, eager = (y[0] if isinstance(y, tuple) else y for y in (step(x), model.model.layers[0].mlp(x)))
    assert relative_error(traced, eager) < THRESHOLDS["fp32"]  # the compiler fuses the router, which rounds elsewhere


@pytest.mark.slow
def test_compiled_model_has_no_graph_break(tmp_path):
    model = load(folder(tmp_path, mixtral), quantization_config=MoeNvfp4Config())
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        a, b = compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits
    # the compiler fuses the rest of the model, which moves its roundings
    assert (a - b).abs().max() <= 0.05 * b.abs().max()


@pytest.mark.slow
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="transformers 5.17 sizes its paged cache beyond a CPU machine's memory, with any model",
)
def test_generate_batch_equals_generate(tmp_path):
    model = load(folder(tmp_path, qwen3_moe), quantization_config=MoeNvfp4Config())
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)  # else most of the machine's memory
    outputs = model.generate_batch([IDS[0].tolist()], config, small)
    (result,) = outputs.values()
    expected = model.generate(IDS, generation_config=config)[0, IDS.shape[1] :]
    assert result.generated_tokens == expected.tolist()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("quantized", [False, True], ids=["while loading", "from 4-bit files"])
def test_disk_offload(quantized, tmp_path):
    source = folder(tmp_path, qwen3_moe)
    whole = load(source, quantization_config=MoeNvfp4Config())
    kwargs = dict(quantization_config=MoeNvfp4Config())
    if quantized:
        whole.save_pretrained(tmp_path / "nvfp4")
        source, kwargs = tmp_path / "nvfp4", {}
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
                  "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    model = load(source, device_map=device_map, offload_folder=tmp_path / "offload", **kwargs)
    assert next(model.model.layers[1].mlp.experts.parameters()).device.type == "meta"
    assert torch.equal(logits(model), logits(whole))


def test_set_activations(tmp_path):
    model = load(folder(tmp_path, qwen3_moe), quantization_config=MoeNvfp4Config())
    w4a16 = logits(model)
    set_activations(model, "nvfp4")
    assert not torch.equal(logits(model), w4a16)
    model.save_pretrained(tmp_path / "nvfp4")
    assert torch.equal(logits(load(tmp_path / "nvfp4")), logits(model))
    assert torch.equal(logits(set_activations(model, "bf16")), w4a16)
    with pytest.raises(ValueError, match="Qwen3MoeModel is a part of a 4-bit model, .* pass the whole"):
        set_activations(model.model, "nvfp4")
    assert torch.equal(logits(model), w4a16)
    with pytest.raises(TypeError, match="a model in memory is expected, got 'Qwen/Qwen3-30B-A3B': load it first"):
        swap_experts("Qwen/Qwen3-30B-A3B")


# ---------------------------------------------------------------- files from elsewhere
def test_static_input_scales_are_loaded_used_and_saved_again(tmp_path):
    source = nvfp4_folder(tmp_path)

    def add(files):
        for key in list(files):
            if key.endswith("weight_scale_2"):
                up = "up_proj" in key  # gate and up read the same rows, so the larger scale counts
                files[key.replace("weight_scale_2", "input_scale")] = torch.tensor(0.002 if up else 0.0015)

    edit(source, add)
    edit_config(source, lambda q: q.update(quant_algo="NVFP4"))
    model = load(source)
    experts = model.model.layers[0].mlp.experts
    assert experts.activations == "bf16", "our own field decides what we do"
    assert experts.up_proj_input_scale.tolist() == pytest.approx([0.002] * 8)
    assert experts.down_proj_input_scale.tolist() == pytest.approx([0.0015] * 8)
    dynamic = logits(set_activations(load(nvfp4_folder(tmp_path, "plain")), "nvfp4"))
    assert not torch.equal(logits(set_activations(model, "nvfp4")), dynamic)
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4"
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


def test_a_state_dict_as_files(tmp_path):
    """Parameters under their own names, as `torch.save` and accelerate's checkpoints have them."""
    model = load(nvfp4_folder(tmp_path))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "nvfp4/model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(load(tmp_path / "nvfp4")), logits(model))
    with pytest.raises(ValueError, match="have the parameters of 4-bit layers .* load the model, and save_pretrained"):
        verify_checkpoint(tmp_path / "nvfp4")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, granite, nemotron_h], ids=lambda f: f.__name__)
def test_dense_stacks_under_the_modules_names(family, tmp_path):
    """They load though the family's own files have one tensor per expert, or other names. Files without headers are
    refused."""
    folder(tmp_path, family, save_original_format=False)
    assert any(name.endswith("experts.down_proj") for name in tensors(tmp_path / "bf16"))
    expected = logits(swap_experts(load(tmp_path / "bf16"), progress=False))
    assert torch.equal(logits(load(tmp_path / "bf16", quantization_config=MoeNvfp4Config())), expected)
    torch.save(tensors(tmp_path / "bf16"), tmp_path / "bf16/pytorch_model.bin")
    (tmp_path / "bf16/model.safetensors").unlink()
    with pytest.raises(ValueError, match="from safetensors files, .*here are none .* then swap_experts"):
        load(tmp_path / "bf16", quantization_config=MoeNvfp4Config())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("orientation", ["hub", "saved"])
def test_qwen3_vl_moe_is_quantized_from_either_orientation(orientation, tmp_path):
    """Its files on the Hub have [E, in, out]; those that transformers saves have [E, out, in]."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = dict(**SMALL, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]})  # fmt: skip
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4, out_hidden_size=64,
                  num_position_embeddings=16, deepstack_visual_indexes=[0])  # fmt: skip
    model = make(lambda: Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision)))
    model.save_pretrained(tmp_path)
    if orientation == "hub":
        turned = lambda name, tensor: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        edit(tmp_path, lambda files: files.update({n: turned(n, t) for n, t in files.items()}))
    ours = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=MoeNvfp4Config())
    same_experts(ours, swap_experts(model, progress=False))


def test_gate_and_up_with_different_global_scales_are_both_honoured(tmp_path):
    source = nvfp4_folder(tmp_path)
    before = logits(load(source))
    key = "model.layers.0.mlp.experts.{}.up_proj.weight_scale_2"
    edit(source, lambda f: [f[key.format(e)].mul_(4) for e in range(8)])
    model = load(source)
    experts = model.model.layers[0].mlp.experts
    ratio = experts.up_proj_global_scale / tensors(nvfp4_folder(tmp_path, "plain"))[key.format(0)]
    assert ratio[0] == 4.0 and not torch.equal(logits(model), before)


def nvfp4_folder(tmp_path, name="nvfp4"):
    source = folder(tmp_path, qwen3_moe, f"{name}-source")
    load(source, quantization_config=MoeNvfp4Config()).save_pretrained(tmp_path / name)
    return tmp_path / name


def edit(path, change):
    (file,) = path.glob("*.safetensors")
    files = tensors(path)
    change(files)
    save_file(files, file, metadata={"format": "pt"})


def edit_config(path, change):
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))


EXPERT = "model.layers.1.mlp.experts.3"
DAMAGE = {
    "a scale is missing": (
        lambda f: f.pop(f"{EXPERT}.up_proj.weight_scale"),
        rf"{EXPERT}.up_proj.weight_scale is missing: every NVFP4 matrix has codes, block scales and a global scale",
    ),
    "a weight is missing": (
        lambda f: f.pop(f"{EXPERT}.down_proj.weight"),
        f"{EXPERT}.down_proj.weight is missing: every",
    ),
    "a layer's scales are missing": (
        lambda f: [f.pop(k) for k in list(f) if "layers.1" in k and k.endswith("weight_scale_2")],
        r"layers.1.mlp.experts.0.down_proj.weight_scale_2 is missing: every NVFP4 matrix has codes",
    ),
    "an extra scale": (
        lambda f: f.update({"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(64, 4)}),
        r"self_attn.q_proj.weight_scale is a scale that nothing reads",
    ),
    "a scale of an expert that is not there": (
        lambda f: f.update({"model.layers.0.mlp.experts.8.up_proj.weight_scale_2": torch.tensor(1.0)}),
        r"experts.8.up_proj.weight is missing: every NVFP4 matrix has codes",
    ),
    "bf16 codes": (
        lambda f: f.update({f"{EXPERT}.up_proj.weight": torch.zeros(48, 32, dtype=torch.bfloat16)}),
        rf"{EXPERT}.up_proj.weight has dtype BF16, expected U8",
    ),
    "fp32 block scales": (
        lambda f: f.update({f"{EXPERT}.up_proj.weight_scale": torch.ones(48, 4)}),
        rf"{EXPERT}.up_proj.weight_scale has dtype F32, expected F8_E4M3",
    ),
    "another shape": (
        lambda f: f.update({f"{EXPERT}.up_proj.weight": torch.zeros(48, 16, dtype=torch.uint8)}),
        r"weight_scale has shape \[48, 4\], which does not fit codes of \[48, 16\]",
    ),
    "another size of one expert": (
        lambda f: f.update({k: f[k][:32].contiguous() for k in f if f"{EXPERT}.up_proj.weight" in k and f[k].dim()}),
        r"the experts' up_proj have different shapes \[\(32, 64\), \(48, 64\)\]",
    ),
    "another size of all experts": (
        lambda f: f.update(
            {k: f[k][:32].contiguous() for k in f if "layers.1" in k and "up_proj.weight" in k and f[k].dim()}
        ),
        r"up_proj \[32, 64\]: gate and up are \[I, H\], down is \[H, I\]",
    ),
    "a router of another shape": (
        lambda f: f.update({"model.layers.1.mlp.gate.weight": torch.zeros(4, 64)}),
        r"layers.1.mlp.gate.weight in model.safetensors is F32 \[4, 64\], by config.json Qwen3Moe.* \[8, 64\] there",
    ),
    "a global scale of zero": (
        lambda f: f.update({f"{EXPERT}.up_proj.weight_scale_2": torch.tensor(0.0)}),
        r"up_proj_global_scale of expert 3 is 0.0: a global scale is a finite positive number",
    ),
    "an infinite global scale": (
        lambda f: f.update({f"{EXPERT}.down_proj.weight_scale_2": torch.tensor(float("inf"))}),
        r"down_proj_global_scale of expert 3 is inf",
    ),
    "NaN block scales": (
        lambda f: f[f"{EXPERT}.down_proj.weight_scale"].view(torch.uint8).fill_(0x7F),
        r"down_proj_sf.*NaN or negative block scales",
    ),
}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named(damage, tmp_path):
    change, message = DAMAGE[damage]
    source = nvfp4_folder(tmp_path)
    edit(source, change)
    with pytest.raises(ValueError, match=message):
        load(source)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("value", [None, float("nan"), 0.0, float("inf")])
def test_bad_and_missing_input_scales_are_named(value, tmp_path, caplog):
    """They are an error for W4A4, and left out for W4A16, which does not need them."""
    source = nvfp4_folder(tmp_path)
    expected = logits(load(source))

    def add(files):
        for key in [k for k in files if k.endswith("weight_scale_2")]:
            files[key.replace("weight_scale_2", "input_scale")] = torch.tensor(0.002)
        wrong = files.pop(f"{EXPERT}.down_proj.input_scale")
        if value is not None:
            files[f"{EXPERT}.down_proj.input_scale"] = wrong.fill_(value)

    edit(source, add)
    wrong = (
        " has no input_scale, which 47 of 48 .* Load with"
        if value is None
        else "_input_scale of expert 3 is .*load with"
    )
    with pytest.raises(ValueError, match=f"down_proj{wrong} activations='bf16'"):
        load(source, config=checkpoint_config(source, activations="nvfp4"))
    model = load(source, config=checkpoint_config(source, activations="bf16"))
    assert torch.equal(logits(model), expected)
    assert "the static activation scales of experts are left out" in caplog.text
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), expected)
    assert not [name for name in tensors(tmp_path / "again") if name.endswith("input_scale")]
    assert (
        json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
    )


def test_truncated_file_is_named(tmp_path):
    for quantized in (True, False):
        source = nvfp4_folder(tmp_path, f"t{quantized}") if quantized else folder(tmp_path, qwen3_moe)
        (file,) = source.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1000])
        kwargs = {} if quantized else dict(quantization_config=MoeNvfp4Config())
        with pytest.raises(ValueError, match="model.safetensors is truncated"):
            load(source, **kwargs)


@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(family, value, tmp_path):
    model = make(family)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 5, 7] = value
    model.save_pretrained(tmp_path / "bad")
    message = r"model.layers.1.mlp.experts.*down_proj.*expert 2: .*NaN or Inf"
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "bad", quantization_config=MoeNvfp4Config())
    with pytest.raises(ValueError, match="down_proj of expert 2: .*NaN or Inf"):
        swap_experts(model, progress=False)


def test_a_missing_expert_of_a_bf16_checkpoint_is_named(tmp_path):
    source = folder(tmp_path, qwen3_moe)
    edit(source, lambda f: [f.pop(k) for k in list(f) if k.startswith(f"{EXPERT}.")])
    with pytest.raises(ValueError, match=f"{EXPERT}.down_proj is missing: 7 of 8 experts have it"):
        load(source, quantization_config=MoeNvfp4Config())


def test_unknown_settings_are_named(tmp_path):
    source = nvfp4_folder(tmp_path)
    for algo in ("NVFP4_SVD", "W4A8_NVFP4_FP8", None):
        edit_config(source, lambda q, algo=algo: q.update(quant_algo=algo))
        with pytest.raises(ValueError, match=f"quant_algo {algo!r}; this library reads"):
            load(source)
    with pytest.raises(ValueError, match="activations must be one of"):
        MoeNvfp4Config(activations="int4")
    with pytest.raises(ValueError, match="unknown recipe 'best'"):
        MoeNvfp4Config(recipe="best")
    with pytest.raises(ValueError, match="are all excluded"):
        swap_experts(make(qwen3_moe), exclude=["*"], progress=False)
    with pytest.raises(ValueError, match="quantized already"):
        swap_experts(swap_experts(make(qwen3_moe), progress=False), progress=False)


@pytest.mark.parametrize("what", ["before", "after", "config"])
def test_layers_with_other_numbers_of_experts_are_not_saved(what, tmp_path):
    """No program loads files with fewer experts in one layer than the config says."""
    model = make(qwen3_moe)
    experts = model.model.layers[1].mlp.experts

    def prune(names):
        for name in names:
            p = getattr(experts, name)
            setattr(experts, name, torch.nn.Parameter(p[:6].clone(), requires_grad=False))
        experts.num_experts = 6

    if what == "before":
        prune(["gate_up_proj", "down_proj"])
    swap_experts(model, progress=False)
    if what == "after":
        experts = model.model.layers[1].mlp.experts
        prune([name for name, _ in experts.named_parameters()])
    if what == "config":
        model.config.num_experts = 6
    counts = ("layers.0.mlp.experts has 8", "says 6") if what == "config" else ("layers.1.mlp.experts has 6", "says 8")
    with pytest.raises(ValueError, match=".* experts, and the config ".join(counts)):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_saving_is_refused_nothing(tmp_path):
    """deepcopy makes a copy that runs alone; half() and float() of a 4-bit model are refused."""
    import copy

    model = load(folder(tmp_path, qwen3_moe), quantization_config=MoeNvfp4Config())
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    with pytest.raises(ValueError):
        model.half()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_loading_holds_little_more_than_the_result(tmp_path):
    """Quantizing while loading takes at most 1.3 times the result plus one shard, in anonymous memory."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{**SMALL, "num_hidden_layers": 6}, intermediate_size=96, moe_intermediate_size=512, num_experts=64,
        num_experts_per_tok=2,
    )  # fmt: skip
    config.hidden_size, shard = 512, 40_000_000
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    dense = sum(p.numel() * 2 for p in model.parameters())
    model.save_pretrained(tmp_path / "big", max_shard_size=shard)
    del model
    peak, result = peak_while_loading(tmp_path / "big", 'quantization_config=MoeNvfp4Config(recipe="max")')
    assert result < dense / 3
    assert peak <= 1.3 * result + shard, f"peak {peak / 1e6:.0f} MB for a result of {result / 1e6:.0f} MB"
