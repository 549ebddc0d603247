"""4-bit linears in vLLM on a CPU, where it has no kernels for them: the numbers of this library under transformers."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from tests.folders import is_expert, is_linear, quantized, qwen2_moe
from tests.models import SMALL, folder, load, qwen3_moe, tensors

pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")

from vllm.config import VllmConfig  # noqa: E402

from moe_nvfp4.backends import PACKAGES, Device  # noqa: E402
from moe_nvfp4.integrations.vllm import mends  # noqa: E402
from moe_nvfp4.integrations.vllm.config import MoeNvfp4Config  # noqa: E402
from moe_nvfp4.quantize.convert import convert_checkpoint  # noqa: E402
from moe_nvfp4.quantize.dialects import DIALECTS  # noqa: E402
from moe_nvfp4.quantize.options import Options  # noqa: E402
from moe_nvfp4.quantize.recipes import quantize_matrix  # noqa: E402
from tests.integrations.test_vllm import MOST, _tokenizer, by_transformers, latent_attention, same, tiny  # noqa: E402
from tests.integrations.vllm_engine import PROMPTS, engine, generate, lora, on_two_ranks  # noqa: E402

IGNORE = {"modelopt": ["lm_head", "*.gate", "*.shared_expert_gate"], "compressed-tensors": ["lm_head", "re:.*gate$"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("linears")
    folder(root, tiny())
    for name, dialect, linears in (("modelopt", "modelopt", "all"), ("attention", "compressed-tensors", "attention"),
                                   ("compressed-tensors", "compressed-tensors", "all")):  # fmt: skip
        convert_checkpoint(root / "bf16", root / name, Options(dialect=dialect, linears=linears), progress=False)
    return root


@pytest.fixture(scope="module")
def one_rank(folders):
    return generate(folders / "modelopt")


@pytest.mark.parametrize("name", ["modelopt", "compressed-tensors", "attention"])
def test_folders_of_ours(folders, one_rank, name):
    """With attention and head, and with attention only; q, k and v share a scale."""
    files = tensors(folders / name)
    assert any("q_proj.weight_scale" in key for key in files)
    assert any("lm_head.weight_scale" in key for key in files) == (name != "attention")
    same(one_rank if name == "modelopt" else generate(folders / name), by_transformers(folders / name))


def test_compiled(tmp_path, monkeypatch):
    """As vLLM does by default. Inductor (torch 2.13) computes this model's router before the scores that it reads."""
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    options = Options(linears="attention")
    convert_checkpoint(folder(tmp_path, latent_attention), tmp_path / "nvfp4", options, progress=False)
    same(generate(tmp_path / "nvfp4", enforce_eager=False), by_transformers(tmp_path / "nvfp4"))


def test_linears_that_vllm_does_not_name(monkeypatch):
    """Those of DeepSeek's attention without latents (DeepSeek-VL2 Tiny), which the files may have in 4-bit."""
    from vllm.model_executor.models import deepseek_v2

    mends.complete_names()
    made = []
    for kind in ("QKVParallelLinear", "RowParallelLinear"):
        monkeypatch.setattr(deepseek_v2, kind, lambda *_, prefix="", **__: made.append(prefix))
    for kind in ("get_tensor_model_parallel_world_size", "get_rope", "Attention"):
        monkeypatch.setattr(deepseek_v2, kind, lambda *_, **__: 1)
    whole = SimpleNamespace(model_config=SimpleNamespace(hf_config=None))
    config = SimpleNamespace(num_key_value_heads=4, rope_parameters=None)
    deepseek_v2.DeepseekAttention(whole, config, 128, 4, prefix="layers.0.self_attn")
    assert made == ["layers.0.self_attn.qkv_proj", "layers.0.self_attn.o_proj"]


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_modules_that_vllm_calls_otherwise(dialect, folders):
    """LFM2-VL's, than its own mapper calls their weights."""
    said = json.loads((folders / dialect / "config.json").read_text())["quantization_config"]
    names = ["language_model.model.layers.0.conv.in_proj", "language_model.lm_head"]
    config = MoeNvfp4Config.from_config(said | {"ignore": names})
    assert config.ignores("language.model.layers.0.short_conv.in_proj") and config.ignores("language.lm_head")
    assert not config.ignores("language.model.layers.1.short_conv.in_proj")


def test_vllm_itself_finds_the_head(folders):
    """By its name, as the target Linear stands for classes whose names contain it, and that of heads does not."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for name, there in (("compressed-tensors", True), ("attention", False)):
        config = json.loads((folders / name / "config.json").read_text())["quantization_config"]
        config = CompressedTensorsConfig.from_config(config)
        head = object.__new__(ParallelLMHead)
        for prefix in ("lm_head", "language_model.lm_head"):
            assert (config.get_scheme_dict(head, prefix) is not None) == there


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_dense_head_that_vllm_renames(dialect, folders, monkeypatch):
    """Qwen3-VL's is language_model.lm_head in vLLM, and lm_head on the ignore list. Gemma 4's is the embedding, so its
    files have none."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.models.utils import WeightsMapper

    from moe_nvfp4.integrations.vllm import engine

    monkeypatch.setattr(engine, "refuse_linear", lambda name: None)  # it asks an engine, which there need not be
    mapper = WeightsMapper(orig_to_new_prefix={"lm_head.": "language_model.lm_head."})
    said = json.loads((folders / dialect / "config.json").read_text())["quantization_config"]
    for dense, in_files in ((True, True), (True, False), (False, False)):
        config = MoeNvfp4Config.from_config(said | {"ignore": ["lm_head"] if dense else ["model.embed_tokens"]})
        config.dense = ["lm_head"] * in_files
        config.apply_vllm_mapper(mapper)
        method = config.get_quant_method(object.__new__(ParallelLMHead), "language_model.lm_head")
        assert method is None if dense else type(method).__name__ == "NVFP4LinearMethod"


def biased():
    """Biases of q, k and v; a shared expert with its own gate; heads that vLLM's attention on a CPU has."""
    small = qwen2_moe()
    small.config.hidden_size = 128
    model = type(small)(small.config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                p.normal_()
    return model


@pytest.mark.parametrize("linears", [(), "attention"], ids=["dense", "4-bit"])
def test_other_biases_and_rows(tmp_path, linears):
    """vLLM would take the bias from what is in memory, and cut the rows off."""
    folder(tmp_path, biased)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4", Options(linears=linears), progress=False)
    files = tensors(tmp_path / "nvfp4")
    bias, weight = (f"model.layers.0.self_attn.v_proj.{last}" for last in ("bias", "weight"))
    for change, message in (
        ({key: files[key] for key in files if key != bias}, r"qkv_proj\.bias: all or a part did not come from"),
        (files | {weight: torch.cat([files[weight].view(torch.uint8)] * 2).view(files[weight].dtype)},
         r"qkv_proj.*weight.* is torch\.\w+ \[128, \d+\], the model's config needs 64 rows"),
    ):  # fmt: skip
        save_file(change, tmp_path / "nvfp4" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            generate(tmp_path / "nvfp4")


@pytest.mark.parametrize("input_scale", [None, 0.01], ids=["dynamic scales", "static scales"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_folders_of_others(tmp_path, dialect, input_scale):
    """Each linear has a scale of its own; vLLM's kernels would use one for all that it fuses. W4A4, then W4A16."""
    path, _ = quantized(tmp_path, biased, dialect, lambda key: is_expert(key) or is_linear(key), input_scale,
                        ignore=IGNORE[dialect])  # fmt: skip
    found = tensors(path)
    scale = "weight_scale_2" if dialect == "modelopt" else "weight_global_scale"
    q, k = (found[f"model.layers.0.self_attn.{part}.{scale}"] for part in ("q_proj", "k_proj"))
    assert not torch.equal(q, k)
    same(generate(path), by_transformers(path), prompts=MOST)
    if input_scale is None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
        config.quantization_config["moe_nvfp4"] = {"activations": "bf16"}
        w4a16 = generate(path, hf_overrides={"moe_nvfp4": {"activations": "bf16"}})
        same(w4a16, by_transformers(path, config=config))


def test_two_ranks(folders, one_rank, tmp_path):
    """Tensor parallelism: rows of q, k, v and of the head, columns of o."""
    forms = {"tensors": (folders / "modelopt", {"tensor_parallel_size": 2})}
    for found in on_two_ranks(forms, tmp_path)["tensors"]:
        same(found, one_rank)


def _embeddings(folder, adapter=None):
    """vLLM's, of two prompts; of the second with the adapter in that folder."""
    _tokenizer(folder)  # vLLM asks for one
    chosen = {} if adapter is None else {"lora_request": [None, lora(adapter)]}
    llm = engine(folder, runner="pooling", convert="embed", skip_tokenizer_init=False, enable_lora=bool(chosen))
    outputs = llm.embed([{"prompt_token_ids": p} for p in PROMPTS[:2]], use_tqdm=False, **chosen)
    llm.llm_engine.engine_core.shutdown()
    return torch.tensor([output.outputs.embedding for output in outputs])


def test_embeddings(folders):
    """A model that pools has no head, whose weights the folder has in 4 bits."""
    import moe_nvfp4.integrations.huggingface  # noqa: F401

    model, prompts = load(folders / "modelopt", torch.float32), PROMPTS[:2]
    with torch.no_grad():
        last = model(torch.tensor(prompts), output_hidden_states=True).hidden_states[-1][:, -1]
    found = _embeddings(folders / "modelopt")
    assert torch.allclose(found, torch.nn.functional.normalize(last), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_base_model(tmp_path, dialect):
    """The names in its files, in their config's ignore list and in its adapters lack the `model.` of vLLM's model."""
    from peft import LoraConfig, get_peft_model

    import moe_nvfp4.integrations.huggingface  # noqa: F401

    folder(tmp_path, lambda: qwen3_moe(8, 96, head_dim=32, hidden_size=128).model)
    options = Options(dialect=dialect, linears="attention")
    convert_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4", options, progress=False)
    model = AutoModel.from_pretrained(tmp_path / "nvfp4", dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False,
                        target_parameters=["experts.gate_up_proj", "experts.down_proj"])  # fmt: skip
    model = get_peft_model(model, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        last = lambda prompt: model(torch.tensor([prompt])).last_hidden_state[0, -1]
        with model.disable_adapter():
            want = [last(PROMPTS[0])]
        want = torch.nn.functional.normalize(torch.stack([*want, last(PROMPTS[1])]))
    assert torch.allclose(_embeddings(tmp_path / "nvfp4", tmp_path / "adapter"), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_a_head_that_does_not_come(runner):
    """One that pools does not need it: vLLM's JambaForSequenceClassification has one, and files of that have none."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from moe_nvfp4.integrations.vllm.arrived import _checking

    head = ParallelLMHead.__new__(ParallelLMHead)
    torch.nn.Module.__init__(head)
    head.weight = torch.nn.Parameter(torch.ones(4, 4))
    loader = SimpleNamespace(converted="by this library")
    load = lambda: _checking(lambda *_: None)(
        loader, torch.nn.ModuleDict({"lm_head": head}), SimpleNamespace(quantization="moe_nvfp4", runner_type=runner)
    )
    if runner == "pooling":
        load()
        assert head.weight.eq(1).all()
        return
    with pytest.raises(ValueError, match=r"lm_head\.weight: all or a part did not come"):
        load()


def test_adapters_on_4_bit_linears(folders, tmp_path):
    """LoRA on 4-bit attention answers as in PEFT."""
    from peft import LoraConfig, get_peft_model
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    import moe_nvfp4.integrations.huggingface  # noqa: F401

    attention = ["q_proj", "o_proj"]
    config = LoraConfig(r=4, target_modules=attention, init_lora_weights=False)
    model = get_peft_model(load(folders / "modelopt", torch.float32), config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        logprobs = model(torch.tensor(PROMPTS[:1])).logits[0, -1].log_softmax(-1)
    llm = engine(folders / "modelopt", enable_lora=True, lora_target_modules=attention)
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=1, detokenize=False)
    prompt, request = {"prompt_token_ids": PROMPTS[0]}, LoRARequest("attention", 1, str(tmp_path))
    (output,) = llm.generate([prompt], sampling, use_tqdm=False, lora_request=request)
    ((token, found),) = output.outputs[0].logprobs[0].items()
    assert token == int(logprobs.argmax()) and abs(found.logprob - logprobs.max().item()) < 1e-4
    llm.llm_engine.engine_core.shutdown()


# ---------------------------------------------------------------- what is refused
def changed(folders, path, change):
    """A copy of a folder whose tensors `change` has changed."""
    path.mkdir()
    for file in (folders / "modelopt").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    files = tensors(path)
    change(files)
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    return path


K = "model.layers.1.self_attn.k_proj"


def without(files, name):
    del files[name]


def dense(files):
    """A dense linear, which the config's ignore list does not name."""
    for last in ("weight_scale", "weight_scale_2"):
        del files[f"{K}.{last}"]
    files[f"{K}.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)


CHANGES = [
    (lambda files: without(files, f"{K}.weight_scale"), rf"{K}\.weight_scale is missing: every NVFP4 matrix"),
    (lambda files: without(files, f"{K}.weight_scale_2"),
     r"layers\.1\.self_attn\.qkv_proj: weight_scale_2 did not come from the files \(of 3 fused linears: q, v\)"),
    (lambda files: files.update({f"{K}.weight": torch.zeros(64, 128, dtype=torch.bfloat16)}),
     rf"{K}\.weight has dtype BF16, expected U8: .*ignore list"),
    (dense, r"layers\.1\.self_attn\.qkv_proj: weight of k is torch\.bfloat16 \[64, 128\].*ignore list"),
    (lambda files: files.update({f"{K}.weight": torch.zeros(64, 32, dtype=torch.uint8)}),
     r"qkv_proj: weight of k is torch\.uint8 \[64, 32\], the model's config needs 128 columns"),
    (lambda files: files.update({f"{K}.weight": torch.zeros(128, 64, dtype=torch.uint8)}),
     r"qkv_proj: weight of k is torch\.uint8 \[128, 64\], the model's config needs 64 rows"),
    (lambda files: files.update({f"{K}.weight_scale_2": torch.tensor(float("inf"))}),
     r"qkv_proj\.weight_scale_2 .*is inf"),
    (lambda files: files[f"{K}.weight_scale"].view(torch.uint8).fill_(0xFF), r"qkv_proj\.weight_scale holds NaN"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=range(len(CHANGES)))
def test_what_is_missing_or_wrong_is_named(folders, tmp_path, change, text):
    with pytest.raises(ValueError, match=text):
        generate(changed(folders, tmp_path / "changed", change))


@pytest.mark.parametrize(
    ("kernels", "text"),
    [
        (dict(linear_backend="cutlass"), "qkv_proj: --linear-backend cutlass: .*leave it out"),
        (dict(linear_backend_per_quant={"nvfp4_w4a16": "humming"}), "linear_backend_per_quant nvfp4_w4a16: humming"),
    ],
)
def test_options_for_kernels_of_vllm_are_refused(folders, kernels, text):
    """They would have no effect; those for other formats' linears have one."""
    with pytest.raises(ValueError, match=text):
        generate(folders / "modelopt", kernel_config=kernels)
    if "linear_backend_per_quant" in kernels:
        generate(folders / "modelopt", kernel_config={"linear_backend_per_quant": {"fp8_w8a8": "triton"}})


def test_fused_linears_become_one_where_both_scales_are_equal():
    from moe_nvfp4.integrations.vllm.linear import NVFP4LinearMethod

    method = NVFP4LinearMethod("model.layers.0.self_attn.qkv_proj", DIALECTS["modelopt"], "nvfp4")
    method.sizes = [32, 16, 16]
    found = {"weight": torch.zeros(64, 16, dtype=torch.uint8), "sf": torch.ones(64, 2).to(torch.float8_e4m3fn)}
    for scales, inputs, rows in (
        ((1, 1, 1), (2, 2, 2), [64]), ((1, 1, 1), (2, 2, 4), [48, 16]), ((1, 3, 3), (2, 2, 2), [32, 32]),
        ((1, 3, 1), (2, 2, 2), [32, 16, 16]),
    ):  # fmt: skip
        each = {"global_scale": torch.tensor(scales).float(), "input_scale": torch.tensor(inputs).float()}
        made = method._made(found | each, None)
        assert [linear.out_features for linear in made] == rows
        ends = torch.tensor(rows).cumsum(0).tolist()
        of = [next(i for i, end in enumerate((32, 48, 64)) if end == last) for last in ends]
        assert [float(linear.weight_global_scale) for linear in made] == [scales[i] for i in of]
        assert [float(linear.input_scale) for linear in made] == [inputs[i] for i in of]


def _without_an_engine(monkeypatch):
    """Returns the config of one that there is not."""
    from moe_nvfp4.integrations.vllm import engine

    config = VllmConfig()
    monkeypatch.setattr(engine, "current", lambda: config)
    for name, number in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(f"vllm.model_executor.parameter.get_tensor_model_parallel_{name}", lambda n=number: n)
    return config


def test_what_files_decide_is_in_the_key_of_compiled_code(monkeypatch):
    """How many linears a fused one becomes, and whether they have static scales: vLLM's key has no files in it."""
    from moe_nvfp4.integrations.vllm.linear import NVFP4LinearMethod

    def key(scales, static=()):
        config = _without_an_engine(monkeypatch)
        layer, method = torch.nn.Module(), NVFP4LinearMethod("a.qkv_proj", DIALECTS["modelopt"], "nvfp4")
        method.create_weights(layer, 64, [32, 16], 64, 48, torch.float32, lambda p, w, i: p.data[i:i + 1].copy_(w)
                              if p.dim() == 1 else p.data[32 * i:32 * i + len(w)].copy_(w))  # fmt: skip
        for i, rows in enumerate((32, 16)):
            files = {"weight": torch.zeros(rows, 32, dtype=torch.uint8), "weight_scale_2": torch.tensor(scales[i]),
                     "weight_scale": torch.ones(rows, 4).to(torch.float8_e4m3fn)}  # fmt: skip
            files |= {"input_scale": torch.tensor(static[i])} if static else {}
            for name, tensor in files.items():
                layer.get_parameter(name).weight_loader(layer.get_parameter(name), tensor, i)
        method.process_weights_after_loading(layer)
        return config.compute_hash()

    keys = [key([1.0, 1.0]), key([1.0, 2.0]), key([1.0, 1.0], [0.5, 0.5]), key([1.0, 1.0], [0.5, 0.25])]
    assert len({*keys}) == 4 and key([3.0, 3.0]) == keys[0] and key([1.0, 1.0], [0.1, 0.1]) == keys[2]


def test_rows_of_w4a4_that_ranks_would_scale_in_parts(monkeypatch):
    """And columns that are no multiple of 16 on a rank."""
    from moe_nvfp4.integrations.vllm.linear import NVFP4LinearMethod

    _without_an_engine(monkeypatch)

    def made(activations, here, columns, dialect=DIALECTS["modelopt"]):
        layer, method = torch.nn.Module(), NVFP4LinearMethod("model.layers.0.self_attn.o_proj", dialect, activations)
        method.create_weights(layer, here, [32], columns, 32, torch.float32, lambda p, w: p.data.copy_(w[:, :p.shape[1]]
                              if p.dim() == 2 else w.reshape(1)))  # fmt: skip
        files = {"weight": torch.zeros(32, columns // 2, dtype=torch.uint8), "weight_scale_2": torch.ones(()),
                 "weight_scale": torch.ones(32, columns // 16).to(torch.float8_e4m3fn)}  # fmt: skip
        for name, tensor in files.items():
            parameter = layer.get_parameter(name)
            parameter.weight_loader(parameter, tensor)
        method.process_weights_after_loading(layer)

    with pytest.raises(NotImplementedError, match="o_proj: W4A4 without a static scale.*moe-nvfp4 calibrate"):
        made("nvfp4", 32, 64)
    with pytest.raises(ValueError, match="o_proj: a rank has 24 of 48 columns.*16.*tensor-parallel-size"):
        made("bf16", 24, 48)


def test_a_mamba_layer_of_one_group_on_ranks(monkeypatch):
    """vLLM loads its rows as those of a dense linear."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    from moe_nvfp4.integrations.vllm.linear import NVFP4LinearMethod

    _without_an_engine(monkeypatch)
    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    method = NVFP4LinearMethod("model.layers.0.mixer.in_proj", DIALECTS["modelopt"], "bf16")
    for layer.tp_size, error in (
        (1, nullcontext()),
        (2, pytest.raises(NotImplementedError, match="serve with one rank")),
    ):
        with error:
            method.create_weights(layer, 64, [32], 64, 64, torch.float32, None)


@pytest.mark.parametrize("fp4", [False, True])
def test_other_activations_are_said(monkeypatch, fp4):
    """vLLM's kernels know nothing of the option, and before Blackwell they take bf16 activations only."""
    from vllm.model_executor.layers.linear import LinearBase

    from moe_nvfp4.integrations.vllm import engine

    said: list[str] = []
    monkeypatch.setattr(engine, "log", said.append)
    monkeypatch.setattr(engine, "has_fp4", lambda: fp4)
    for algo, chosen, says in [
        ("NVFP4", None, not fp4), ("NVFP4", "nvfp4", not fp4), ("NVFP4", "bf16", fp4), ("W4A16_NVFP4", None, False),
        ("W4A16_NVFP4", "nvfp4", True), ("NVFP4", "nvfp4_four_over_six", True),
    ]:  # fmt: skip
        config = MoeNvfp4Config.from_config({"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"]})
        config.choose({"linears": "vllm"} | ({"activations": chosen} if chosen else {}))
        config.base = SimpleNamespace(
            is_layer_excluded=lambda prefix: False, get_quant_method=lambda layer, prefix: "vLLM's"
        )
        said.clear()
        for name in ("q_proj", "o_proj"):
            layer = object.__new__(LinearBase)
            assert config.get_quant_method(layer, f"model.layers.0.self_attn.{name}") == "vLLM's"
        assert len(said) == says, (algo, chosen)
        assert not says or f"and {chosen or 'nvfp4'} ones were asked for" in said[0]


def test_whose_kernels(monkeypatch):
    """On a CPU these, and the Hopper kernels; vLLM's where it is told; on bf16 files the option has no meaning."""
    config = MoeNvfp4Config.from_config({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]})
    assert config.runs_linears("bf16") and config.runs_linears("nvfp4")
    with torch.device("meta"):  # a tower that --language-model-only leaves out
        assert config.runs_linears("bf16")
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda"))
    every, expected = frozenset(PACKAGES), {"bf16": True, "nvfp4": False}
    for packages, capability, dtype, ours in [
        (every, (9, 0), torch.bfloat16, True), (every, (9, 0), torch.float16, False),
        (every - {"cutlass"}, (9, 0), torch.bfloat16, False), (every, (8, 0), torch.bfloat16, False),
        (every, (10, 0), torch.bfloat16, False),
    ]:  # fmt: skip
        found = Device("cuda", "a GPU", capability, packages)
        monkeypatch.setattr(Device, "of", staticmethod(lambda device, found=found: found))
        monkeypatch.setattr(torch, "get_default_dtype", lambda dtype=dtype: dtype)
        for activations, fast in expected.items():
            assert config.runs_linears(activations) == (ours and fast), (found, dtype, activations)
            assert config.choose({"linears": "moe_nvfp4"}).runs_linears(activations)
            assert not config.choose({"linears": "vllm"}).runs_linears(activations)
            config.linears = None
    with pytest.raises(ValueError, match="linears='marlin': linears must be one of moe_nvfp4, vllm"):
        config.choose({"linears": "marlin"})
    with pytest.raises(ValueError, match="linears='vllm': the linears of these files are bf16.*--linears all"):
        MoeNvfp4Config().choose({"linears": "vllm"})


def test_heads_that_vllms_models_do_not_have():
    """Dense whatever the config says, or the embedding."""
    from moe_nvfp4.integrations.vllm.linear import NVFP4LinearMethod

    def check(model_type, tokens=None, norm_head=False, tied=False, **changes):
        given = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []} | changes
        text = SimpleNamespace(
            model_type=model_type, classifier_from_token=tokens, tie_word_embeddings=tied, norm_head=norm_head
        )
        MoeNvfp4Config.from_config(given).check_head(SimpleNamespace(get_text_config=lambda: text))

    check("qwen3_moe")
    check("gpt_oss", ignore=["lm_head"])
    check("qwen3_moe", ["no", "yes"], ignore=["lm_head"])
    with pytest.raises(NotImplementedError, match="vLLM's ernie_mtp has a dense one .*or leave out the drafts"):
        check("ernie_mtp")
    with pytest.raises(NotImplementedError, match="vLLM's glm4_moe_mtp has a dense one .*or leave out the drafts"):
        check("glm4_moe_mtp")
    with pytest.raises(NotImplementedError, match="vLLM's bailing_moe_v2 has a dense one"):
        check("bailing_moe_v2", norm_head=True)
    check("bailing_moe_v2", norm_head=True, ignore=["lm_head"])
    check("cohere2_moe", tied=True)
    with pytest.raises(NotImplementedError, match="vLLM's cohere2_moe has a dense one"):
        check("cohere2_moe")
    with pytest.raises(NotImplementedError, match="classifier_from_token: .*of a dense lm_head.*--linears attention"):
        check("qwen3_moe", ["no", "yes"])
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "NVFP4"}}}
    for changes in ({}, mixed):
        with pytest.raises(NotImplementedError, match="lm_head is 4-bit.*gpt_oss has a dense one.*--linears attention"):
            check("gpt_oss", **changes)
    method = NVFP4LinearMethod("lm_head", DIALECTS["modelopt"], "bf16")
    with pytest.raises(NotImplementedError, match="takes the embedding for it: quantize with --exclude lm_head"):
        method.tie_weights(torch.nn.Module(), torch.nn.Module())


def test_random_weights(folders):
    generate(folders / "modelopt", load_format="dummy")


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_dense_prediction_layer_drafts_for_4_bit_ones(dialect, tmp_path):
    """vLLM calls its head layers.2.head, which is layers.2.shared_head.head in files."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    H, small = 128, SMALL | dict(head_dim=32, hidden_size=128)
    source = folder(tmp_path, lambda: Glm4MoeForCausalLM(Glm4MoeConfig(
        **small, intermediate_size=96, moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, num_nextn_predict_layers=1)))  # fmt: skip
    files = tensors(source)
    files |= {n.replace(".layers.1.", ".layers.2."): t.clone() for n, t in files.items() if ".layers.1." in n}
    for name, shape in {"enorm": (H,), "hnorm": (H,), "eh_proj": (H, 2 * H), "shared_head.norm": (H,),
                        "shared_head.head": (96, H), "embed_tokens": (96, H)}.items():  # fmt: skip
        files[f"model.layers.2.{name}.weight"] = (0.2 * torch.randn(shape)).bfloat16()
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(source, tmp_path / "nvfp4", Options(linears="attention,shared", dialect=dialect), progress=False)
    want = generate(tmp_path / "nvfp4")
    drafted = generate(tmp_path / "nvfp4", speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    same(drafted, want, prompts=7)
    if dialect == "modelopt":
        _reads_only_drafts(source)


def _reads_only_drafts(source):
    """Beside a target of random weights, the layer for drafts has those of the files."""
    drafts = {"method": "mtp", "num_speculative_tokens": 1, "draft_load_config": {"load_format": "auto"}}
    llm = engine(source, quantization="moe_nvfp4", load_format="dummy", speculative_config=drafts)
    runner, name = llm.llm_engine.model_executor.driver_worker.worker.model_runner, ".mlp.experts.routed_experts"
    experts = [next(module.nvfp4 for found, module in model.named_modules() if found.endswith(name))
               for model in (runner.model, runner.drafter.model)]  # fmt: skip
    scale = quantize_matrix(tensors(source)["model.layers.2.mlp.experts.0.down_proj.weight"])[2]
    assert [e.down_proj_global_scale[0].item() for e in experts] == [1 / 256, scale.item()]


def test_a_prediction_layer_that_vllm_renames(tmp_path):
    """ERNIE 4.5's model.mtp_block.0 is model.layers.2 in vLLM, also where only experts are 4-bit."""
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    H, I = 128, 96
    small = SMALL | dict(head_dim=32, hidden_size=H, intermediate_size=I, moe_intermediate_size=64)
    source = folder(tmp_path, lambda: Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(
        **small, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=1,
        num_nextn_predict_layers=1)))  # fmt: skip
    files, of, block = tensors(source), "model.layers.1.", "model.mtp_block.0."
    files |= {n.replace(of, block): t.clone() for n, t in files.items() if n.startswith(of) and ".mlp." not in n}
    shapes = {"mtp_emb_norm.0": (H,), "mtp_hidden_norm.0": (H,), "mtp_linear_proj.0": (H, 2 * H)}
    shapes |= {f"mtp_block.0.mlp.{n}_proj": (I, H) for n in ("gate", "up")} | {"mtp_block.0.mlp.down_proj": (H, I)}
    files |= {f"model.{name}.weight": (0.2 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(source, tmp_path / "nvfp4", Options(), progress=False)
    drafted = generate(tmp_path / "nvfp4", speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    same(drafted, generate(tmp_path / "nvfp4"), prompts=7)
