"""4-bit folders of other tools load directly into transformers, with the same numbers, and are saved unchanged."""

import copy
import json
import pickle
import re
import zlib
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModel, AutoModelForCausalLM, Step3p7ForConditionalGeneration

from moe_nvfp4 import ExpertWeights, Gate, Matrices, reference
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, checkpoint_config, set_activations, swap_experts
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.linears import to_linear
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.common import THRESHOLDS, peak_while_loading, reference_layer, relative_error
from tests.folders import (
    CONFIGS,
    change_config,
    is_expert,
    is_linear,
    projection_first,
    quantized,
    qwen2_moe,
    value,
)
from tests.models import (
    IDS,
    SMALL,
    as_bytes,
    folder,
    gemma4,
    gpt_oss,
    logits,
    make,
    mixtral,
    nemotron_h,
    qwen3_moe,
    same_tensors,
    step3p7,
    tensors,
)


def load(path, dtype=torch.float32, **kwargs):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **kwargs).eval()


def packed(model, kind):
    return {n: m for n, m in model.named_modules() if isinstance(m, kind)}


both = pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])


# ---------------------------------------------------------------- experts
@pytest.mark.slow_after(2)
@both
@pytest.mark.parametrize("family", [qwen3_moe, mixtral, nemotron_h], ids=lambda f: f.__name__)
def test_experts_are_packed_and_compute_what_the_dense_twin_does(family, dialect, tmp_path):
    folder, twin = quantized(tmp_path, family, dialect)
    model = load(folder)
    found = packed(model, HFExperts)
    assert found and all(p.dtype == torch.uint8 for m in found.values() for n, p in m.named_parameters()
                         if n.endswith(("proj", "_sf")))  # fmt: skip
    assert {m.activations for m in found.values()} == {"nvfp4"}, "what the config says the file was made for"
    assert relative_error(logits(set_activations(model, "bf16")), logits(load(twin))) < 10 * THRESHOLDS["fp32"]


@both
def test_outputs_are_exactly_those_of_the_dequantized_weights(dialect, tmp_path, monkeypatch):
    """With global scales that are powers of two, sums of code * sf * x are, scaled, sums of dequantized weight * x:
    bit for bit, in the same reference with another product."""
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "reference")
    model = make(qwen3_moe)
    with torch.no_grad():
        for layer in model.model.layers:
            experts, q = layer.mlp.experts, layer.self_attn.q_proj.weight
            for w in (experts.gate_up_proj, experts.down_proj, q):
                w.clamp_(-2.5, 2.5)
            experts.gate_up_proj[:, 0, 0] = experts.gate_up_proj[:, 48, 0] = experts.down_proj[:, 0, 0] = 2.625
            q[0, 0] = -2.625  # 6 * 448 * 2^-10
    model.save_pretrained(tmp_path / "bf16")
    folder, twin = quantized(tmp_path, qwen3_moe, dialect, lambda k: is_expert(k) or "q_proj" in k)
    model, dense = set_activations(load(folder), "bf16"), tensors(twin)
    x, ids, p = torch.randn(7, 64), torch.randint(0, 8, (7, 2)), torch.rand(7, 2)
    for stem in ("model.layers.0", "model.layers.1"):
        linear, experts = model.get_submodule(f"{stem}.self_attn.q_proj"), model.get_submodule(f"{stem}.mlp.experts")
        gate, up, down = (
            torch.stack([dense[f"{stem}.mlp.experts.{e}.{part}_proj.weight"] for e in range(8)])
            for part in ("gate", "up", "down")
        )
        one, w13 = torch.ones(8), torch.cat([gate, up], dim=1)
        w2 = Matrices(down, down, one, *down.shape[1:])
        weights = ExpertWeights(Gate(), "bf16", Matrices(w13, w13, one, *w13.shape[1:], one), w2)
        actual, projected = experts(x, ids, p), linear(x)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_matmul", lambda x, w, _: torch.mm(x, w.T, out=torch.empty(len(x), len(w))))
            assert torch.equal(actual, reference_layer(x, ids, p, weights))
        assert isinstance(linear, NVFP4Linear)
        assert torch.equal(projected, x @ dense[f"{stem}.self_attn.q_proj.weight"].T)


def test_both_dialects_are_the_same_model(tmp_path):
    """Bit for bit: the parameters, the logits in W4A16 and in W4A4 with static scales, and the saved files."""
    models = []
    for dialect in CONFIGS:
        folder, _ = quantized(tmp_path, qwen3_moe, dialect, lambda k: is_expert(k) or is_linear(k), 2**-9)
        models.append(load(folder, torch.bfloat16))
        stems = [f"model.layers.0.mlp.experts.{e}.down_proj" for e in range(8)]
        want = [2 ** (zlib.crc32(stem.encode()) % 3 - 9) for stem in stems]
        assert models[-1].model.layers[0].mlp.experts.down_proj_input_scale.tolist() == want and len(set(want)) == 3
    a, b = (dict(m.named_parameters()) for m in models)
    assert a.keys() == b.keys()
    for name, p in a.items():
        if name.endswith("_global_scale"):  # 1 / (1 / scale) may miss the last bit
            torch.testing.assert_close(b[name], p, rtol=2**-23, atol=0)
            b[name].data.copy_(p)
        assert torch.equal(p, b[name]), name
    for activations in ("nvfp4", "bf16"):
        first, second = (logits(set_activations(m, activations)) for m in models)
        assert torch.equal(first, second)


@pytest.mark.slow_after(1)
@both
def test_saving_writes_the_same_files(dialect, tmp_path):
    folder, _ = quantized(tmp_path, qwen2_moe, dialect, lambda k: is_expert(k) or is_linear(k), 0.003)
    model = load(folder, torch.bfloat16)
    assert packed(model, NVFP4Linear)
    model.save_pretrained(tmp_path / "again")
    files, again = tensors(folder), tensors(tmp_path / "again")
    assert files.keys() == again.keys()
    for key, tensor in files.items():
        assert tensor.dtype == again[key].dtype and tensor.shape == again[key].shape, key
        assert as_bytes(tensor) == as_bytes(again[key]), key
    config = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == dialect
    assert torch.equal(logits(load(tmp_path / "again", torch.bfloat16)), logits(model))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_experts_and_linears_are_never_dense_in_memory(tmp_path):
    """Loading needs the result and a fraction of it, far less than the same weights in bf16."""

    def family():
        return qwen3_moe(48, 512, hidden_size=512)

    folder, _ = quantized(tmp_path, family, "compressed-tensors", lambda k: is_expert(k) or is_linear(k))
    peak, result = peak_while_loading(folder)
    dense = sum(t.numel() * 2 for t in tensors(tmp_path / "bf16").values())
    assert result < dense / 3.4
    assert peak < 1.5 * result, f"peak {peak / 1e6:.0f} MB for a result of {result / 1e6:.0f} MB"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, mixtral, gpt_oss, nemotron_h], ids=lambda f: f.__name__)
def test_quantizing_while_loading_saves_the_dialect_that_was_asked_for(family, tmp_path):
    """It saves the converter's bytes; a layer that stays dense keeps the model's own names."""
    make(family).save_pretrained(tmp_path / "bf16")
    exclude = [] if family is nemotron_h else ["model.layers.0.*"]
    config = MoeNvfp4Config(dialect="compressed-tensors", recipe="max", exclude=exclude)
    model = load(tmp_path / "bf16", torch.bfloat16, quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    convert_checkpoint(
        tmp_path / "bf16", tmp_path / "converted", Options("max", exclude, dialect="compressed-tensors"), progress=False
    )
    saved, converted = tensors(tmp_path / "saved"), tensors(tmp_path / "converted")
    assert saved.keys() == converted.keys()
    # transformers widens a few (router biases) to fp32
    same = [n for n in saved if saved[n].dtype == converted[n].dtype]
    assert all(as_bytes(saved[n]) == as_bytes(converted[n]) for n in same) and len(same) > 0.9 * len(saved)
    for path in (tmp_path / "saved", tmp_path / "converted"):
        again = load(path, torch.bfloat16)
        assert torch.equal(logits(again), logits(model))


@pytest.mark.slow_after(1)
# ---------------------------------------------------------------- linears
@both
@pytest.mark.parametrize("family", [qwen2_moe, mixtral], ids=lambda f: f.__name__)
def test_linears_stay_packed_or_become_dense(family, dialect, tmp_path):
    folder, twin = quantized(tmp_path, family, dialect, lambda k: is_expert(k) or is_linear(k))
    expected = logits(load(twin))
    model = set_activations(load(folder), "bf16")
    linears = packed(model, NVFP4Linear)
    assert {n.rpartition(".")[2] for n in linears} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert ("model.layers.0.mlp.shared_expert.up_proj" in linears) == (family is qwen2_moe)
    assert not any(p.requires_grad for m in linears.values() for p in m.parameters())
    assert relative_error(logits(model), expected) < 10 * THRESHOLDS["fp32"]

    dense = load(folder, config=checkpoint_config(folder, linears="dense", activations="bf16"))
    assert not packed(dense, NVFP4Linear) and packed(dense, HFExperts)
    assert relative_error(logits(dense), expected) < 10 * THRESHOLDS["fp32"]
    for name in linears:
        assert torch.equal(dense.get_submodule(name).weight, tensors(twin)[f"{name}.weight"]), name
    dense.save_pretrained(tmp_path / "dense")
    again = load(tmp_path / "dense")
    assert torch.equal(logits(again), logits(dense)) and not packed(again, NVFP4Linear)


@pytest.mark.slow
def test_a_whole_model_loads_from_files_of_its_body(tmp_path):
    """Its head is tied to the embedding."""
    folder(tmp_path, gemma4)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4", progress=False)
    AutoModel.from_pretrained(tmp_path / "nvfp4").save_pretrained(tmp_path / "body")
    assert "layers.0.experts.0.down_proj.weight" in tensors(tmp_path / "body")
    assert torch.equal(logits(load(tmp_path / "body")), logits(load(tmp_path / "nvfp4")))


@pytest.mark.slow
def test_the_language_model_of_llama4_loads_from_files_of_all_of_it(tmp_path):
    """AutoModelForCausalLM loads it. The files' names have a prefix, which transformers removes only from whole
    names."""
    text = dict(**SMALL, intermediate_size=48, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1,
                interleave_moe_layer_step=1, attn_temperature_tuning=False)  # fmt: skip
    vision = dict(hidden_size=32, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, patch_size=4,
                  image_size=16, vision_output_dim=64, projector_input_dim=64, projector_output_dim=64)  # fmt: skip
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    folder(tmp_path, lambda: transformers.Llama4ForConditionalGeneration(config))
    convert_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4", progress=False)
    whole = transformers.Llama4ForConditionalGeneration.from_pretrained(tmp_path / "nvfp4", dtype=torch.float32).eval()
    model = load(tmp_path / "nvfp4")
    assert type(model).__name__ == "Llama4ForCausalLM" and len(packed(model, HFExperts)) == 2
    assert torch.equal(logits(model), logits(whole.language_model))  # transformers 5.24 fails to call the whole
    found = checkpoint_config(tmp_path / "nvfp4").quantization_config  # which the text's own config has not
    named = transformers.Llama4ForCausalLM.from_pretrained(
        tmp_path / "nvfp4", dtype=torch.float32, quantization_config=found
    )
    assert torch.equal(logits(named), logits(model))
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


def test_reciprocals_are_saved_as_they_were_read(tmp_path):
    """1 / (1 / s) is the neighbour of one s in six."""
    which = lambda key: is_expert(key) or is_linear(key)
    folder, _ = quantized(tmp_path, qwen2_moe, "compressed-tensors", which, input_scale=0.01)
    files, g = tensors(folder), torch.Generator().manual_seed(0)
    candidates = torch.rand(4096, generator=g) * 100 + 1
    left = iter(candidates[1 / (1 / candidates) != candidates].split(1))
    files |= {name: next(left).clone() for name in files if name.endswith("_global_scale")}
    for name in files:  # gate and up of an expert have one
        if re.search(r"experts\.\d+\.up_proj\.input_global_scale", name):
            files[name] = files[name.replace("up_proj", "gate_proj")].clone()
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder, torch.bfloat16).save_pretrained(tmp_path / "again")
    same_tensors(tmp_path / "again", folder)


def test_a_base_model_loads_too(tmp_path):
    """AutoModel's module names lack the leading `model.`."""
    folder, twin = quantized(tmp_path, qwen2_moe, "modelopt", lambda k: is_expert(k) or is_linear(k))
    model, dense = (AutoModel.from_pretrained(p, dtype=torch.float32).eval() for p in (folder, twin))
    assert len(packed(model, NVFP4Linear)) == 14 and len(packed(model, HFExperts)) == 2
    set_activations(model, "bf16")
    with torch.no_grad():
        a, b = (m(IDS).last_hidden_state for m in (model, dense))
    assert relative_error(a, b) < 10 * THRESHOLDS["fp32"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("linears", ["packed", "dense"])
def test_a_quantized_lm_head(linears, tmp_path):
    folder, twin = quantized(tmp_path, qwen3_moe, "modelopt", lambda k: is_expert(k) or k == "lm_head.weight")
    config = checkpoint_config(folder, linears=linears, activations="bf16")
    model = load(folder, config=config)
    assert isinstance(model.lm_head, NVFP4Linear if linears == "packed" else nn.Linear)
    assert relative_error(logits(model), logits(load(twin))) < 10 * THRESHOLDS["fp32"]
    greedy = dict(max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(IDS, **greedy), load(twin).generate(IDS, **greedy))
    change_config(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="lm_head is quantized in the files, but config.json ties it"):
        load(folder, config=checkpoint_config(folder, linears=linears))


def test_whether_a_quantized_lm_head_is_tied_says_the_whole_config(tmp_path):
    """Not the text config: transformers ties by the config of the model that it loads."""
    folder, twin = quantized(tmp_path, step3p7, "modelopt", lambda k: k == "lm_head.weight")
    for path in (folder, twin):
        text = json.loads((path / "config.json").read_text())["text_config"]
        change_config(path, text_config={**text, "tie_word_embeddings": True}, tie_word_embeddings=False)
    load = lambda path: Step3p7ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    model = set_activations(load(folder), "bf16")
    assert isinstance(model.lm_head, NVFP4Linear)
    assert relative_error(logits(model), logits(load(twin))) < 10 * THRESHOLDS["fp32"]
    change_config(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="lm_head is quantized in the files, but config.json ties it"):
        load(folder)


@pytest.mark.slow
def test_what_a_user_made_dense_is_saved_dense(tmp_path):
    """A new head where linears are packed, and the original experts in a layer that 4 bits hurt."""
    folder, twin = quantized(tmp_path, qwen3_moe, "modelopt", lambda k: is_expert(k) or k == "lm_head.weight")
    model, dense = load(folder), load(twin)
    model.lm_head, model.model.layers[1].mlp.experts = dense.lm_head, dense.model.layers[1].mlp.experts
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "mixed")
    again = load(tmp_path / "mixed")
    assert torch.equal(logits(again), logits(model)) and logits(again).shape[-1] == 100
    assert isinstance(again.model.layers[0].mlp.experts, HFExperts)
    ignore = json.loads((tmp_path / "mixed/config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.1.mlp.experts*"} <= set(ignore)
    assert not any(fnmatchcase("model.layers.0.mlp.experts.0.up_proj", pattern) for pattern in ignore)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("quantize", ["files", "loading", "swapped"])
def test_more_and_fewer_tokens_with_a_packed_head(tmp_path, quantize, caplog):
    """transformers resizes dense heads only: a packed one becomes dense, with the values that it had."""
    if quantize == "files":
        path, _ = quantized(tmp_path, qwen3_moe, "modelopt", lambda k: is_expert(k) or k == "lm_head.weight")
        model = set_activations(load(path, torch.bfloat16), "bf16")
    elif quantize == "loading":
        path = folder(tmp_path, qwen3_moe)
        model = load(path, torch.bfloat16, quantization_config=MoeNvfp4Config(linears="lm_head"))
    else:
        model = swap_experts(make(qwen3_moe), linears="lm_head", progress=False)
    copied = copy.deepcopy(model)
    model = pickle.loads(pickle.dumps(model)) if quantize == "swapped" else model
    assert isinstance(model.resize_token_embeddings(96), nn.Embedding) and isinstance(model.lm_head, NVFP4Linear)
    hidden = torch.randn(5, 64).bfloat16()
    want, before, other = (f(hidden) for f in (model.lm_head, to_linear(model.lm_head, torch.bfloat16), copied.lm_head))
    assert relative_error(before, want) < 5e-3
    for size in (100, 90):
        model.resize_token_embeddings(size)
        assert isinstance(model.lm_head, nn.Linear) and logits(model).shape[-1] == model.config.vocab_size == size
        assert torch.equal(model.lm_head(hidden)[:, :90], before[:, :90])
    assert sum("output head becomes dense" in r.message for r in caplog.records) == 1
    model.save_pretrained(tmp_path / "fewer")
    again, state = load(tmp_path / "fewer", model.dtype), model.state_dict()
    assert isinstance(again.lm_head, nn.Linear)
    assert {n: as_bytes(t) for n, t in again.state_dict().items()} == {n: as_bytes(t) for n, t in state.items()}
    assert isinstance(copied.lm_head, NVFP4Linear) and torch.equal(copied.lm_head(hidden), other)
    copied.resize_token_embeddings(104)
    assert torch.equal(copied.lm_head(hidden)[:, :96], before) and torch.equal(model.lm_head(hidden), before[:, :90])
    dense = again.dequantize()
    assert dense.resize_token_embeddings(95).weight.shape == (95, 64) and "_get_resized_lm_head" not in vars(dense)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss], ids=lambda f: f.__name__)
def test_a_state_dict_that_is_given_is_what_is_saved(tmp_path, family):
    """transformers leaves it out if a model is quantized. Copies save themselves."""
    model = swap_experts(load(folder(tmp_path, family), torch.bfloat16), progress=False)
    state = {name: t.roll(1, 0) for name, t in model.state_dict().items()}
    (other := copy.deepcopy(model)).load_state_dict(state)
    for saved in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        saved.save_pretrained(tmp_path / "given", state_dict=state)
        saved.save_pretrained(tmp_path / "own")
    other.save_pretrained(tmp_path / "want")
    model.save_pretrained(tmp_path / "model", True, state)
    same_tensors(tmp_path / "given", tmp_path / "want")
    same_tensors(tmp_path / "model", tmp_path / "want")
    assert torch.equal(logits(load(tmp_path / "own", torch.bfloat16)), logits(model))
    assert state.keys() == model.state_dict().keys()  # it remains the caller's
    assert "save_pretrained" not in vars(model.dequantize())


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("change, message", [
    (lambda s: s.pop("model.norm.weight"), "state_dict lacks model.norm.weight, and"),
    (lambda s: s.update(x=torch.ones(1)), "state_dict has x, and"),
    (lambda s: s.update({"lm_head.weight": s["lm_head.weight"].float()}), r"float32 \(96, 64\), in the model"),
    (lambda s: s.update({"lm_head.weight": s["lm_head.weight"][1:]}), r"\(95, 64\), in the model"),
], ids=["lacks", "has", "dtype", "shape"])  # fmt: skip
def test_a_state_dict_of_something_else_is_not_saved(tmp_path, change, message):
    model = swap_experts(make(qwen3_moe), progress=False)
    change(state := model.state_dict())
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path / "saved", state_dict=state)
    assert not (tmp_path / "saved").exists()


def test_files_that_nothing_reads_are_not_saved(tmp_path):
    """transformers would write them without a word; experts alone are read under their own names, too."""
    model = swap_experts(make(qwen3_moe), linears="attention", progress=False)
    with pytest.raises(NotImplementedError, match="transformers writes such files of a 4-bit model, and refuses"):
        model.save_pretrained(tmp_path / "saved", distributed_checkpoint=True)
    with pytest.raises(NotImplementedError, match=r"layers\.0\.self_attn\.q_proj is 4-bit, and its tensors"):
        model.save_pretrained(tmp_path / "saved", save_original_format=False)
    assert not (tmp_path / "saved").exists()
    experts = swap_experts(load(folder(tmp_path, qwen3_moe), torch.bfloat16), progress=False)
    experts.save_pretrained(tmp_path / "experts", save_original_format=False)
    assert torch.equal(logits(load(tmp_path / "experts", torch.bfloat16)), logits(experts))


def test_parametrized_layers_are_neither_saved_nor_made_dense(tmp_path):
    """Their parameters have other names, which nothing reads."""
    for module, name in (("model.layers.1.mlp.experts", "down_proj_bias"), ("lm_head", "weight_global_scale")):
        model = swap_experts(make(gpt_oss), linears="lm_head", progress=False)
        parametrize.register_parametrization(model.get_submodule(module), name, nn.Identity(), unsafe=True)
        for refused in (partial(model.save_pretrained, tmp_path / "saved"), model.dequantize):
            with pytest.raises(ValueError, match=f"{module}: the parameters are parametrized.*remove_parametrizations"):
                refused()
        assert not (tmp_path / "saved").exists()


KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    dialect=st.sampled_from(sorted(CONFIGS)), E=st.integers(2, 11), I=st.integers(1, 4), layers=st.integers(1, 3),
    linears=st.sets(st.sampled_from(KINDS)), dense=st.integers(-1, 2), inputs=st.booleans(), renamed=st.booleans(),
    shards=st.integers(1, 3), mode=st.sampled_from(["packed", "dense"]), dtype=st.sampled_from([torch.bfloat16,
    torch.float32]),
)  # fmt: skip
def test_any_folder(dialect, E, I, layers, linears, dense, inputs, renamed, shards, mode, dtype, tmp_path_factory):
    """Parameters have the bytes of the files, whatever is quantized, sharded or left dense; saving loses nothing."""
    path = tmp_path_factory.mktemp("any")
    dense = dense if layers > 1 else -1
    which = lambda k: (is_expert(k) and f"layers.{dense}." not in k) or any(f"{kind}.weight" in k for kind in linears)
    renamed = renamed and dense < 0
    folder, _ = quantized(path, lambda: qwen3_moe(E, 16 * I, num_hidden_layers=layers), dialect, which,
                          0.003 if inputs else None, projection_first if renamed else lambda stem: stem,
                          ignore=["lm_head", "re:.*gate$"])  # fmt: skip
    files = tensors(folder)
    first = next(stem for stem in sorted(files) if stem.endswith("weight_scale"))
    codes = files[first.replace("_scale", "_packed" if dialect == "compressed-tensors" else "")]
    codes[0, :8], codes[-1, :8] = 0x88, 0  # a block of -0.0, and zeros under a scale of zero
    files[first].view(torch.uint8)[-1, 0] = 0
    deal(files, folder, shards)
    model = load(folder, dtype, config=checkpoint_config(folder, linears=mode))
    last = {"modelopt": ("weight", "weight_scale_2"), "compressed-tensors": ("weight_packed", "weight_global_scale")}
    weight, scale = last[dialect]
    decode = (lambda t: 1 / t) if dialect == "compressed-tensors" else (lambda t: t)
    for name, experts in packed(model, HFExperts).items():
        halves = slice(0, 16 * I), slice(16 * I, None), slice(None)
        for part, rows in zip(("gate_proj", "up_proj", "down_proj"), halves, strict=True):
            parameter = "down_proj" if part == "down_proj" else "gate_up_proj"
            for e in range(E):
                stem = projection_first(f"{name}.{e}.{part}") if renamed else f"{name}.{e}.{part}"
                assert torch.equal(getattr(experts, parameter)[e, rows], files[f"{stem}.{weight}"])
                assert as_bytes(getattr(experts, f"{parameter}_sf")[e, rows]) == as_bytes(files[f"{stem}.weight_scale"])
                assert getattr(experts, f"{part}_global_scale")[e] == decode(files[f"{stem}.{scale}"])
        assert ("up_proj_input_scale" in experts._parameters) == inputs
    assert len(packed(model, HFExperts)) == layers - (0 <= dense < layers)
    found = packed(model, NVFP4Linear)
    assert {n.rpartition(".")[2] for n in found} == (linears if mode == "packed" else set())
    for name, linear in found.items():
        assert torch.equal(linear.weight, files[f"{name}.{weight}"])
        assert linear.weight_global_scale == decode(files[f"{name}.{scale}"])
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.{scale}" in files:
            assert torch.equal(module.weight, value(dialect, files, name).to(dtype))
    before = logits(model)
    assert before.isfinite().all()
    model.save_pretrained(path / "again", max_shard_size="20KB")
    again = load(path / "again", dtype)
    ours, theirs = (dict(m.named_parameters()) for m in (model, again))
    assert ours.keys() == theirs.keys() and all(torch.equal(p, theirs[n]) for n, p in ours.items())
    assert torch.equal(logits(again), before)


def deal(files, folder, shards):
    """Deal `files` out to that many shards in turn, and write an index."""
    if shards == 1:
        save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    names = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(files)}
    for name in set(names.values()):
        save_file({n: t for n, t in files.items() if names[n] == name}, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.slow
def test_packed_linears_offload_compile_and_generate(tmp_path):
    folder, _ = quantized(tmp_path, qwen2_moe, "compressed-tensors", lambda k: is_expert(k) or is_linear(k), 0.003)
    whole = load(folder)
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
                  "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    model = load(folder, device_map=device_map, offload_folder=tmp_path / "offload")
    assert model.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    assert torch.equal(logits(model), logits(whole))
    greedy = dict(max_new_tokens=6, do_sample=False)
    static = whole.generate(IDS, cache_implementation="static", **greedy)
    assert torch.equal(static, whole.generate(IDS, **greedy))
    attention = whole.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 3, 64)
    torch.compiler.reset()
    assert torch.equal(torch.compile(attention, fullgraph=True)(x), attention(x))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", ["kimi_k25", "muse_spark"])
def test_dense_modules_are_ignored_under_their_names_in_files(family, tmp_path):
    """Kimi-K2.5's files have q, k and v of the vision tower as one tensor, Muse Spark a table that is no "embed"."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    text = dict(SMALL, intermediate_size=48, moe_intermediate_size=48, num_experts_per_tok=2)
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=4,
                  pos_emb_height=4, pos_emb_width=4)  # fmt: skip
    if family == "kimi_k25":
        kind, config = module.Kimi_K25ForConditionalGeneration, dict(projection_hidden_size=32)
        text |= dict(
            model_type="deepseek_v3", n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1,
            first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, v_head_dim=16, qk_rope_head_dim=16,
            qk_nope_head_dim=16, num_key_value_heads=4,
        )  # fmt: skip
    else:
        audio = dict(patch_sizes=[4], hidden_sizes=[32], depths=[1], num_hidden_layers=1, out_hidden_size=64)
        kind, config = module.MuseSparkForConditionalGeneration, dict(out_hidden_size=128, projector_hidden_size=64)
        config |= dict(audio_config=audio)
        text |= dict(num_local_experts=4, moe_hidden_size=32, layer_types=["full_attention"] * 2,
                     layer_rope_theta=[1e4, 0], mlp_layer_types=["sparse"] * 2)  # fmt: skip
        vision |= dict(layer_types=["full_attention"])
    model = make(lambda: kind(kind.config_class(text_config=text, vision_config=vision, **config)))
    swap_experts(model, progress=False).save_pretrained(tmp_path)
    assert verify_checkpoint(tmp_path).warnings == []
