"""Inputs of experts, collected from models of every kind, against the same collected by hand."""

import copy
import json
import pickle
import warnings
from argparse import Namespace
from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from moe_nvfp4.cli import main
from moe_nvfp4.cli.models import windows_of
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, swap_experts
from moe_nvfp4.integrations.huggingface.calibration import (
    calibration_batches,
    files_importance,
    model_importance,
    tokenizer_at,
)
from moe_nvfp4.integrations.huggingface.gptq import convert_gptq
from moe_nvfp4.integrations.huggingface.recognise import describe
from moe_nvfp4.integrations.huggingface.statistics import expert_rows
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.importance import layer_importance, load_importance, save_importance
from moe_nvfp4.quantize.options import Options
from tests.integrations.test_checkpoint_forms import deepseek_v4
from tests.models import (
    FAMILIES,
    IDS,
    SMALL,
    folder,
    gpt_oss,
    llama4,
    load,
    logits,
    make,
    nemotron_h,
    qwen3_moe,
    same_tensors,
    tensors,
)
from tests.quantize.test_convert import LINEAR_ATTENTION

BATCHES = [IDS, torch.tensor([[5, 6, 7], [90, 91, 92]])]


def by_hand(model):
    """Sums of squares over the rows of every expert of a dense Qwen3-MoE, token by token in float64."""
    found = {}

    def hook(name):
        def before(module, args):
            x, ids, _ = args
            E, H, I = module.num_experts, x.shape[1], module.down_proj.shape[2]
            sums = found.setdefault(name, (torch.zeros(E, H).double(), torch.zeros(E, I).double(), torch.zeros(E)))
            for t in range(len(x)):
                for e in ids[t].tolist():
                    gate, up = (module.gate_up_proj[e].double() @ x[t].double()).chunk(2)
                    sums[0][e] += x[t].double() ** 2
                    sums[1][e] += (F.silu(gate) * up) ** 2
                    sums[2][e] += 1

        return before

    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(hook(name))
    for ids in BATCHES:
        with torch.no_grad():
            model(ids)
    return {name: layer_importance(*sums) for name, sums in found.items()}


def test_sums_are_those_of_a_loop_over_tokens():
    model = make(qwen3_moe, torch.float32)
    found, want = model_importance(model, BATCHES, progress=False), by_hand(model)
    assert found.layers.keys() == want.keys()
    for name, layer in want.items():
        assert torch.equal(found.layers[name].rows, layer.rows) and layer.rows.sum() == 2 * 14
        torch.testing.assert_close(found.layers[name].x, layer.x, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.layers[name].h, layer.h, rtol=1e-4, atol=1e-9)
    second = model_importance(model, BATCHES, "model.layers.0.*", progress=False)
    assert second.layers.keys() == {"model.layers.1.mlp.experts"}
    with pytest.raises(ValueError, match="no experts to quantize, or all of them are excluded"):
        model_importance(model, BATCHES, ["*"], progress=False)


def glm_moe_dsa():
    """Its layers return a tuple, of which the next one gets the second part."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    latent = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    settings = SMALL | dict(num_hidden_layers=3, num_key_value_heads=4)
    del settings["head_dim"]
    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(
        **settings, **latent, index_n_heads=2, index_head_dim=32, index_topk=4, intermediate_size=96,
        moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        mlp_layer_types=["dense", "sparse", "sparse"]))  # fmt: skip


def gemma4_shared():
    """Its last two layers take keys and values of the first two."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    return Gemma4ForCausalLM(Gemma4TextConfig(
        **SMALL | dict(num_hidden_layers=4), intermediate_size=48, moe_intermediate_size=48, num_experts=4,
        top_k_experts=2, enable_moe_block=True, hidden_size_per_layer_input=16, vocab_size_per_layer_input=96,
        num_kv_shared_layers=2, sliding_window=32, layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=16))  # fmt: skip


# DeepSeek V4's first layers choose experts by a table of integers; nemotron_h is quick: its routers have buffers
V4 = [pytest.param(deepseek_v4, marks=pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="transformers before 5.24 may not run it in bf16: its "
    "norms stay fp32, and 5.17 does not cast what they return"
))]  # fmt: skip


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("family", [gemma4_shared, glm_moe_dsa, *V4, *FAMILIES[::-1]])
def test_layer_by_layer_from_files_is_the_whole_model(family, tmp_path):
    """Layers compute the same, bit for bit. No two layers or experts are mixed up, and files that are no part of the
    checkpoint are ignored."""
    source = folder(tmp_path, family)
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors(source).items()}, source / "old.safetensors")
    streamed = files_importance(source, BATCHES, device="cpu", progress=False)
    whole = model_importance(load(source), BATCHES, progress=False, linears=streamed.linears)
    assert streamed.linears and whole.layers.keys() == streamed.layers.keys() and whole.digest() == streamed.digest()
    first = next(iter(whole.layers.values()))
    assert (first.rows >= 0).all() and first.rows.sum() > 0
    assert len({layer.x.sum().item() for layer in whole.layers.values()}) == len(whole.layers)


def test_a_tied_embedding_under_the_name_of_the_head(tmp_path):
    """safetensors' own save_model keeps the first of the names of a tensor, which is lm_head.weight."""
    source = folder(tmp_path, lambda: qwen3_moe(tie_word_embeddings=True))
    batches = [torch.arange(3, 35)[None]]
    before = files_importance(source, batches, progress=False)
    files = tensors(source)
    assert "lm_head.weight" not in files
    files["lm_head.weight"] = files.pop("model.embed_tokens.weight")
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    after = files_importance(source, batches, progress=False)
    for name, layer in before.layers.items():
        assert torch.equal(layer.x, after.layers[name].x) and torch.equal(layer.h, after.layers[name].h)
    assert before.linears.keys() == after.linears.keys()


def test_h_of_interleaved_experts_with_biases():
    """gpt-oss: h is what the module's own forward multiplies with down_proj."""
    model = make(gpt_oss, torch.float32)
    module = model.model.layers[0].mlp.experts
    module.gate_up_proj_bias.data.normal_()
    x = torch.randn(6, 64)
    ids, weights = torch.arange(4)[None].expand(6, -1), torch.tensor([[1.0, 0, 0, 0]] * 3 + [[1.0, 0, 0, 1e-30]] * 3)
    with torch.no_grad():
        rows = {e: (x, h) for e, x, h in expert_rows(module, describe(module), x, ids, weights)}
        want = module(x, ids, weights)
    assert rows.keys() == {0, 3} and torch.equal(rows[3][0], x[3:])  # a weight of 0: not routed there
    got = rows[0][1] @ module.down_proj[0] + module.down_proj_bias[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_rows_of_experts_that_get_a_block_each():
    """Llama 4's: zeros where a token did not choose the expert."""
    module, x = make(llama4, torch.float32).model.layers[0].feed_forward.experts, torch.randn(4, 5, 64)
    x[1], x[2, 2:] = 0, 0
    with torch.no_grad():
        found = {e: (rows, h) for e, rows, h in expert_rows(module, describe(module), x.view(20, 64))}
        want = module(x.view(20, 64)).view(4, 5, 64)
    assert found.keys() == {0, 2, 3}
    for e, (rows, h) in found.items():
        n = 2 if e == 2 else 5
        assert torch.equal(rows, x[e, :n])
        torch.testing.assert_close(h @ module.down_proj[e], want[e, :n], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", [qwen3_moe, gpt_oss, nemotron_h])
def test_converted_loaded_and_swapped_models_are_the_same(family, tmp_path):
    source = folder(tmp_path, family)
    ids = torch.cat([torch.arange(96), torch.arange(0, 96, 3)])[None]
    importance = files_importance(source, [ids], device="cpu", progress=False)
    save_importance(importance, tmp_path / "file")
    convert_checkpoint(source, tmp_path / "converted", Options("weighted", importance=importance), progress=False)
    wide = [n for n in tensors(source) if ".mixer.gate." in n]  # transformers keeps them in fp32
    config = lambda given: MoeNvfp4Config(recipe="weighted", calibration=given)
    load(source, quantization_config=config(ids)).save_pretrained(tmp_path / "loaded")
    load(source, quantization_config=config(tmp_path / "file")).save_pretrained(tmp_path / "from_file")
    for name, given in (("swapped", [ids]), ("swapped_file", tmp_path / "file")):
        model = swap_experts(load(source), recipe="weighted", calibration=given, progress=False)
        model.save_pretrained(tmp_path / name)
    for name in ("loaded", "from_file", "swapped", "swapped_file"):
        same_tensors(tmp_path / "converted", tmp_path / name, but=wide)
    mse = swap_experts(load(source), progress=False)
    mse.save_pretrained(tmp_path / "mse")
    with pytest.raises(AssertionError):
        same_tensors(tmp_path / "converted", tmp_path / "mse", but=wide)


def test_random_ids_are_the_same_ids(tmp_path):
    source = folder(tmp_path, qwen3_moe)
    one, two = (calibration_batches(None, load(source).config) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)) and sum(map(torch.numel, one)) == 4096
    assert 0 <= min(ids.min() for ids in one) and 90 < max(ids.max() for ids in one) < 96


def add_tokenizer(path, words=96, bos=False):
    """A word w17 is token 17. bos: texts begin with <s>, which is token 95."""
    vocabulary = {f"w{i}": i for i in range(words)}
    if bos:
        del vocabulary["w95"]
        vocabulary["<s>"] = 95
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 95)])
    special = {"bos_token": "<s>"} if bos else {}
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", **special).save_pretrained(path)


def test_every_window_of_a_text_begins_with_bos(tmp_path):
    """Where the tokenizer begins a text with it."""
    config = make(qwen3_moe).config
    text = " ".join(f"w{2 + i % 90}" for i in range(300))
    (tmp_path / "text").write_text(text, "utf-8")
    args = Namespace(windows=9, window=None)
    for bos in (False, True):
        add_tokenizer(tmp_path, bos=bos)
        windows = calibration_batches(text, config, tmp_path)
        assert [len(ids[0]) for ids in windows] == ([128, 128, 47] if bos else [128, 128, 44])
        assert all((ids[0, 0] == 95) == bos and (ids[0, 1:] < 95).all() for ids in windows)
        rest = torch.cat([ids[0, int(bos) :] for ids in windows])
        assert torch.equal(rest, 2 + torch.arange(300) % 90)
        assert torch.equal(windows_of(args, tokenizer_at(tmp_path), text, config), torch.cat(windows[:2]))


@pytest.mark.parametrize("sub", ["", "inner/most"])
def test_the_tokenizer_of_a_model_on_the_hub_is_fetched(sub, tmp_path, monkeypatch):
    """from_pretrained by name brings its weights alone."""
    place, commit = tmp_path / "models--me--dense", "c" * 40
    make(qwen3_moe).save_pretrained(place / "snapshots" / commit / sub)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    original, fetched = AutoTokenizer.from_pretrained, []

    def from_hub(name, revision=None, cache_dir=None, subfolder="", **kwargs):
        if name == "me/dense":
            fetched.append((revision, cache_dir, subfolder))
            add_tokenizer(name := cache_dir / "models--me--dense" / "snapshots" / revision / subfolder)
        return original(name, **kwargs)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_hub)
    config = MoeNvfp4Config(recipe="weighted", calibration="w3 w5 w7 " * 50)
    model = AutoModelForCausalLM.from_pretrained(
        "me/dense", cache_dir=tmp_path, subfolder=sub, quantization_config=config
    )
    assert fetched == [(commit, tmp_path, sub)]
    here = AutoModelForCausalLM.from_pretrained(place / "snapshots" / commit / sub, quantization_config=config)
    assert len(fetched) == 1 and all(map(torch.equal, model.state_dict().values(), here.state_dict().values()))


@pytest.mark.slow
def test_windows_that_the_model_does_not_take_are_refused(tmp_path, capsys):
    """Tokens beyond the vocabulary, too many in a row, no tokenizer."""
    source = folder(tmp_path, qwen3_moe)
    (tmp_path / "text").write_text("\ufeffw95 w7 " + "w3 " * 400, "utf-8")
    command = ["importance", str(source), str(tmp_path / "out"), "--text", str(tmp_path / "text"), "--device", "cpu"]
    gptq = ["quantize", str(source), str(tmp_path / "out"), "--recipe", "gptq", *command[3:]]
    for args in (command, gptq):
        assert main(args) == 2
        assert "download its files (tokenizer.json" in capsys.readouterr().err
    add_tokenizer(source, 100)
    assert main([*command, "--window", "5", "--windows", "2"]) == 0  # a byte order mark is no part of the first word
    (tmp_path / "out").unlink()
    capsys.readouterr()
    (tmp_path / "text").write_text("w99 " * 400, "utf-8")
    for args, message in (
        ((), "token ids from 99 to 99, the model has 0 to 95"),
        (("--window", "200"), "token ids"),
        (("--window", "500"), "the text has 400 tokens"),
    ):
        for given in (command, gptq):
            assert main([*given, *args]) == 2 and message in capsys.readouterr().err
    (tmp_path / "text").write_text("w9 " * 400, "utf-8")
    for given in (command, gptq, [*command[:3], "--device", "cpu"]):
        assert main([*given, "--window", "200"]) == 2
        assert "200 tokens in a row, the model is made for 128" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    model = load(source)
    for bad, message in (
        ([torch.full((1, 5), 96)], "token ids from 96 to 96"),
        ([torch.zeros(1, 200, dtype=torch.int64)], "200 tokens in a row"),
        ([torch.zeros(5, dtype=torch.int64)], r"token ids are int64 or int32 \[B, T\], not torch.int64 \[5\]"),
        ([[1, 2]], "a list is given, where token ids are expected"),
        ([], "batches are a list of token ids, int64 .*, and this list has none"),
        (iter([torch.ones(1, 5).long()]), "this list_iterator has none"),
    ):
        for learn in (
            lambda batches: convert_gptq(source, tmp_path / "out", batches, Options(device="cpu"), progress=False),
            lambda batches: files_importance(source, batches, device="cpu", progress=False),
            lambda batches: model_importance(model, batches, progress=False),
        ):
            with pytest.raises(ValueError, match=message):
                learn(bad)
    assert not (tmp_path / "out").exists()


def test_texts_become_windows_and_nothing_else_becomes_a_text(tmp_path):
    config = make(lambda: qwen3_moe(max_position_embeddings=1024)).config
    add_tokenizer(tmp_path)
    ids = torch.arange(700) % 96
    texts = [" ".join(f"w{i}" for i in ids), "", "w3 w4"]
    found = calibration_batches(texts, config, tmp_path)
    assert [batch.tolist() for batch in found] == [[ids[:512].tolist()], [ids[512:].tolist()], [[3, 4]]]
    assert torch.equal(calibration_batches(texts[2], config, tmp_path)[0], found[2])
    for bad, message in (
        (PreTrainedTokenizerFast.from_pretrained(tmp_path)("w3", return_tensors="pt"), "BatchEncoding is given"),
        ([{"input_ids": IDS}], "dict is given"),
        (["w3", IDS], "Tensor is given"),
        ([[3, 4]], "list is given"),
        (7, "int is given"),
        (IDS.to(torch.uint8), "int64 or int32 .B, T., not torch.uint8"),
        (str(tmp_path / "tokenizer.json"), "would be read as a text.*pathlib.Path"),
        ("importance.safetensors", "would be read as a text"),
    ):
        with pytest.raises(ValueError, match=message):
            calibration_batches(bad, config, tmp_path)


@pytest.mark.slow
def test_calibration_errors(tmp_path):
    source = folder(tmp_path, qwen3_moe)
    config = load(source).config
    for bad, message in (
        (torch.ones(2, 3), "int64 or int32"),
        (torch.tensor([[1, 96]]), "model has 0 to 95"),
        (torch.ones(0, dtype=int), "int64 or int32"),
        ([], "no text"),
        (["a text"], "texts need its tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            calibration_batches(bad, config)
    with pytest.raises(ValueError, match="calibration has no effect on recipe 'mse'"):
        MoeNvfp4Config(calibration=IDS)
    convert_checkpoint(source, tmp_path / "4-bit", progress=False)
    with pytest.raises(ValueError, match="calibration, recipe would have no effect"):
        load(tmp_path / "4-bit", quantization_config=MoeNvfp4Config(recipe="weighted", calibration=IDS))
    with pytest.raises(ValueError, match="quantized already"):
        files_importance(tmp_path / "4-bit", [IDS], device="cpu", progress=False)
    other = files_importance(
        folder(tmp_path, lambda: qwen3_moe(intermediate=32), "other"), [IDS], device="cpu", progress=False
    )
    save_importance(other, tmp_path / "other.safetensors")
    model = load(source)
    with pytest.raises(ValueError, match="48 input columns, the importance is of 8 experts with 32"):
        swap_experts(model, recipe="weighted", calibration=tmp_path / "other.safetensors", progress=False)
    assert not any("NVFP4" in type(m).__name__ or "HFExperts" in type(m).__name__ for m in model.modules())
    more = files_importance(
        folder(tmp_path, lambda: qwen3_moe(experts=16), "more"), [IDS], device="cpu", progress=False
    )
    save_importance(more, path := tmp_path / "new folder" / "more.safetensors")
    for convert in (
        lambda: swap_experts(model, recipe="weighted", calibration=path, progress=False),
        lambda: load(source, quantization_config=MoeNvfp4Config(recipe="weighted", calibration=path)),
        lambda: convert_checkpoint(source, tmp_path / "x", Options("weighted", importance=more, device="cpu")),
    ):
        with pytest.raises(ValueError, match="has 8 experts, the importance is of 16: it was made with another model"):
            convert()


def rewrite(source, change):
    state = tensors(source)
    change(state)
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "gone"),
    [
        (qwen3_moe, "model.layers.1.self_attn.q_proj.weight"),
        (qwen3_moe, "model.embed_tokens.weight"),
        (qwen3_moe, "model.layers.0.mlp.experts.3.up_proj.weight"),
        (nemotron_h, "backbone.layers.0.mixer.gate.e_score_correction_bias"),  # a buffer
    ],
)
def test_a_missing_tensor_is_named(family, gone, tmp_path):
    """transformers would put random numbers, or zeros, in its place."""
    source = folder(tmp_path, family)
    rewrite(source, lambda state: state.pop(gone))
    name = gone.replace("backbone.", "model.").removesuffix(".weight")
    with pytest.raises(ValueError, match=rf"{name} is missing: 7 of 8|lack 1 of the \d+ tensors of .*: {name}"):
        files_importance(source, [IDS], device="cpu", progress=False)


def zaya():
    """Its routers may skip all experts; a token that does has a routing weight of 0 for expert 0."""
    from transformers import ZayaConfig, ZayaForCausalLM

    return ZayaForCausalLM(ZayaConfig(**SMALL, num_experts=4, moe_intermediate_size=48, router_hidden_size=32))


def test_skipped_tokens_are_rows_of_no_expert(tmp_path):
    """transformers sets the bias of skipping to -1 after loading, whatever the files say."""
    source = folder(tmp_path, zaya)

    def balance(state):
        for name in state:
            if name.endswith("balancing_biases"):
                state[name] = torch.tensor([0.0, 0, 0, 0, 5])

    rewrite(source, balance)
    model = load(source)
    streamed = files_importance(source, BATCHES, device="cpu", progress=False)
    whole = model_importance(model, BATCHES, progress=False, linears=streamed.linears)
    assert whole.digest() == streamed.digest()
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = 0.0
    seen = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda m, args: seen.append((args[1] + 4 * (args[2] == 0)).flatten())
        )
    found = model_importance(model, BATCHES, progress=False)
    routed = [torch.cat(seen[i :: len(found.layers)]).bincount(minlength=5)[:4] for i in range(len(found.layers))]
    assert any(rows.sum() < 14 for rows in routed)
    for rows, layer in zip(routed, found.layers.values(), strict=True):
        assert torch.equal(layer.rows, rows)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("given", ["override", "config", "dtype", "variant"])
def test_what_is_measured_is_the_model_that_is_loaded(given, tmp_path):
    """The same codes as from `swap_experts` on the same model."""
    source = folder(tmp_path, qwen3_moe)
    config = AutoConfig.from_pretrained(source)
    config.num_experts_per_tok = 4
    kwargs = {"override": {"num_experts_per_tok": 4}, "config": {"config": config}, "variant": {"variant": "other"}}
    kwargs = kwargs.get(given, {})
    if given == "variant":  # which differs only in the layer before
        other = {name: t * 2 if "layers.0.self_attn.o_proj" in name else t for name, t in tensors(source).items()}
        save_file(other, source / "model.other.safetensors", metadata={"format": "pt"})
    kwargs["dtype"] = torch.float32 if given == "dtype" else torch.bfloat16
    ids = torch.arange(96)[None]
    loaded = load(source, quantization_config=MoeNvfp4Config(recipe="weighted", calibration=ids), **kwargs)
    swapped = swap_experts(load(source, **kwargs), recipe="weighted", calibration=ids, progress=False)
    plain = load(source, quantization_config=MoeNvfp4Config(recipe="weighted", calibration=ids))
    states = [model.model.layers[1].mlp.experts.state_dict() for model in (loaded, swapped, plain)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert not all(torch.equal(tensor, states[2][name]) for name, tensor in states[0].items())


def test_a_classifier_is_measured_without_its_new_head(tmp_path):
    source = folder(tmp_path, qwen3_moe)
    recipe = MoeNvfp4Config(recipe="weighted", calibration=IDS)
    classifier = AutoModelForSequenceClassification.from_pretrained(source, num_labels=3, quantization_config=recipe)
    model = load(source, quantization_config=recipe)
    for a, b in zip(classifier.model.layers, model.model.layers, strict=True):
        assert torch.equal(a.mlp.experts.gate_up_proj, b.mlp.experts.gate_up_proj)


@pytest.mark.slow
def test_the_body_of_the_model_that_was_measured_takes_its_file(tmp_path):
    source = folder(tmp_path, qwen3_moe)
    save_importance(files_importance(source, BATCHES, device="cpu", progress=False), path := tmp_path / "file")
    recipe = MoeNvfp4Config(recipe="weighted", calibration=path)
    want = load(source, quantization_config=recipe).model
    body = AutoModel.from_pretrained(source, dtype=torch.bfloat16)
    loaded = AutoModel.from_pretrained(source, dtype=torch.bfloat16, quantization_config=recipe)
    for model in (swap_experts(body, recipe="weighted", calibration=path, progress=False), loaded):
        for name, tensor in want.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name


def composite():
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, patch_size=4)
    text = dict(**LINEAR_ATTENTION, layer_types=["linear_attention", "full_attention"])
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision))


@pytest.mark.skipif(not hasattr(transformers, "JevForDecision"), reason="this transformers has no decision models")
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, composite])
def test_data_for_a_decision_model_goes_through_its_body(family, tmp_path):
    """Its head wants to know where questions are. A composite config may be its body's."""
    source = folder(tmp_path, family)
    inner = AutoModel.from_pretrained(source, dtype=torch.bfloat16)
    config = transformers.JevConfig(hidden_size=64, text_config=inner.config)
    model = transformers.JevForDecision(config).to(torch.bfloat16)
    model.model.load_state_dict(inner.state_dict())
    model.save_pretrained(tmp_path / "decider")
    model = transformers.JevForDecision.from_pretrained(tmp_path / "decider", dtype=torch.bfloat16)
    measured = files_importance(tmp_path / "decider", BATCHES, device="cpu", progress=False)
    body = files_importance(source, BATCHES, device="cpu", progress=False)
    for other in (body, model_importance(model, BATCHES, progress=False)):
        for name, layer in other.layers.items():
            assert torch.equal(layer.x, measured.layers[name].x) and torch.equal(layer.h, measured.layers[name].h)
    convert_gptq(source, tmp_path / "1", BATCHES, Options(device="cpu"), progress=False)
    convert_gptq(tmp_path / "decider", tmp_path / "2", BATCHES, Options(device="cpu"), progress=False)
    a, b = (
        {n.removeprefix("model.").removeprefix("language_model."): t for n, t in tensors(tmp_path / name).items()}
        for name in "12"
    )
    assert all(torch.equal(a[name], b[name]) for name in a if "experts" in name)


EXTRA = ("extra_layers.0", "model.nextn_predict_layers.0", "draft.layers.0")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("extra", EXTRA)
def test_experts_that_are_no_part_of_the_model_have_no_importance(extra, tmp_path):
    """A layer that shares its number with one of the model's is another layer."""
    source = folder(tmp_path, qwen3_moe)
    add = lambda state: state.update({
        name.replace("model.layers.0.", f"{extra}."): tensor.clone() for name, tensor in [*state.items()]
        if name.startswith("model.layers.0.mlp.experts.")})  # fmt: skip
    rewrite(source, add)
    importance = files_importance(source, [IDS], device="cpu", progress=False)
    refused = rf"{extra}.mlp.experts is not a part of .*exclude {extra}.mlp.experts"
    with pytest.raises(ValueError, match=refused):
        convert_checkpoint(source, tmp_path / "new", Options("weighted", importance=importance), progress=False)
    with pytest.raises(ValueError, match=refused):
        convert_gptq(source, tmp_path / "new", [IDS], Options(device="cpu"), progress=False)
    options = Options("weighted", importance=importance, exclude=[f"{extra}.mlp.experts"])
    convert_checkpoint(source, tmp_path / "new", options, progress=False)
    convert_gptq(source, tmp_path / "gptq", [IDS], Options(exclude=[f"{extra}.*"], device="cpu"), progress=False)
    before = tensors(source)
    for new in (tensors(tmp_path / "new"), tensors(tmp_path / "gptq")):
        kept = [name for name in new if name.startswith(extra)]
        assert len(kept) == 8 * 3 and all(torch.equal(new[name], before[name]) for name in kept)


@pytest.mark.slow
def test_command(tmp_path, capsys):
    source, out = str(folder(tmp_path, qwen3_moe)), tmp_path / "importance"
    assert main(["importance", source, str(out), "--device", "cpu"]) == 0
    said = "2 layers of experts and 5 inputs of linears, from 1024 tokens of random token ids"  # 8 windows of 128
    assert said in capsys.readouterr().out
    assert load_importance(out).layers["model.layers.1.mlp.experts"].rows.sum() == 2 * 1024
    assert main(["importance", source, str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    short = ["importance", source, str(tmp_path / "short"), "--device", "cpu", "--windows", "3", "--window", "5"]
    assert main(short) == 0
    assert load_importance(tmp_path / "short").layers["model.layers.1.mlp.experts"].rows.sum() == 2 * 15
    new = str(tmp_path / "new")
    assert main(["quantize", source, new, "--recipe", "weighted", "--device", "cpu"]) == 2
    assert "--importance OUT" in capsys.readouterr().err
    assert main(["quantize", source, new, "--recipe", "weighted", "--importance", str(out), "--device", "cpu"]) == 0
    saved = json.loads((tmp_path / "new/config.json").read_text())
    assert saved["quantization_config"]["moe_nvfp4"]["recipe"] == "weighted"
    assert AutoModelForCausalLM.from_pretrained(new).config.quantization_config.recipe == "weighted"


@pytest.mark.slow
def test_importance_of_other_settings_is_said(tmp_path):
    """Of the same weights with other settings, wherever they come from; not of another dtype or class."""
    source, out = folder(tmp_path, qwen3_moe), tmp_path / "file"
    save_importance(files_importance(source, BATCHES, device="cpu", progress=False), out)
    recipe = dict(recipe="weighted", calibration=out)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_checkpoint(source, tmp_path / "x", Options("weighted", importance=load_importance(out)))
        load(source, dtype=torch.float32, quantization_config=MoeNvfp4Config(**recipe))
        swap_experts(AutoModel.from_pretrained(source, dtype=torch.bfloat16), **recipe, progress=False)
    said = r"was measured \(.*bf16, 14 tokens\) with num_experts_per_tok 2, and Qwen3MoeForCausalLM has 4: run"
    with pytest.warns(UserWarning, match=said):
        load(source, num_experts_per_tok=4, quantization_config=MoeNvfp4Config(**recipe))
    with pytest.warns(UserWarning, match=said):
        swap_experts(load(source, num_experts_per_tok=4), **recipe, progress=False)
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5e5
    (source / "config.json").write_text(json.dumps(config | {"transformers_version": "4.0", "pad_token_id": 5}))
    with pytest.warns(UserWarning, match=r"rope_parameters.rope_theta \d+.0, and .*bf16 has 500000.0: run") as warned:
        convert_checkpoint(source, tmp_path / "y", Options("weighted", importance=load_importance(out)))
    assert "pad_token_id" not in str(warned[0].message)


def test_batches_that_can_be_read_once(tmp_path):
    """What an iterator gives counts for each model that a config makes, and these can be copied and saved: after gptq,
    which may take an hour, they could not."""
    batches = [torch.randint(3, 90, (2, 24)) for _ in range(3)]
    source, ways = folder(tmp_path, qwen3_moe), (list, iter, lambda items: (ids for ids in items))
    found = []
    for given in ways:
        settings = {"recipe": "weighted", "linears": "attention", "calibration": given(batches)}
        config = MoeNvfp4Config(**settings)
        models = [load(source, quantization_config=config) for _ in range(2)]
        models.append(swap_experts(load(source), **settings | {"calibration": given(batches)}, progress=False))
        models += [copy.deepcopy(models[2]), pickle.loads(pickle.dumps(models[2]))]
        models[2].save_pretrained(tmp_path / "saved")
        models.append(load(source, quantization_config=models[0].config.quantization_config))
        found += [logits(model) for model in (*models, load(tmp_path / "saved"))]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("wrapper", ["compiled", "adapters"])
def test_importance_of_a_model_in_a_wrapper(wrapper):
    """PEFT and torch.compile give modules other names; the file was refused as another model's."""
    measure = partial(model_importance, batches=[IDS], linears=["model.layers.0.self_attn.o_proj"], progress=False)
    model = make(qwen3_moe, torch.float32)
    want = measure(model)
    if wrapper == "compiled":
        model = torch.compile(model, backend="eager")
    else:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    got = measure(model)
    assert got.layers.keys() == want.layers.keys() and got.linears.keys() == want.linears.keys()
    for name, of_layer in want.layers.items():
        torch.testing.assert_close(vars(got.layers[name]), vars(of_layer), atol=1e-5, rtol=1e-5)
