"""vLLM on a CPU runs our experts: the same numbers as the library's own path under transformers.

.ci/run has an environment with vLLM. Models are tiny and run in fp32, where nothing hides in rounding: tokens are equal
and log-probabilities agree to 1e-4.
"""

import copy
import json
import math
import os
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.common import free_port, made_demo, python
from tests.folders import CONFIGS, change_config, fp8, quantized, qwen2_moe
from tests.folders import value as value_of
from tests.integrations.vllm_engine import NEW, PROMPTS, SETTINGS, ask, generate, on_two_ranks
from tests.integrations.vllm_engine import engine as start
from tests.models import SMALL, folder, gpt_oss, llama4, mixtral, qwen3_moe, tensors
from tests.servers import Server

vllm = pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
os.environ |= SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

from vllm.config.load import LoadConfig  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

if not current_platform.is_cpu():
    pytest.skip("vLLM's build for CPUs is what this compares", allow_module_level=True)

from moe_nvfp4 import cli  # noqa: E402
from moe_nvfp4.integrations.vllm import config as vllm_config  # noqa: E402
from moe_nvfp4.integrations.vllm import engine, loading, mends  # noqa: E402
from moe_nvfp4.integrations.vllm.arrived import _checking, left, mark  # noqa: E402
from moe_nvfp4.quantize.convert import convert_checkpoint  # noqa: E402
from moe_nvfp4.quantize.options import Options  # noqa: E402
from moe_nvfp4.quantize.recipes import quantize_matrix  # noqa: E402

ROOT = Path(__file__).parents[2]
Config = vllm_config.MoeNvfp4Config


def tiny(experts=8, intermediate=64):
    return lambda: qwen3_moe(experts, intermediate, head_dim=32, hidden_size=128)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The three forms of one model: bf16, and NVFP4 in each dialect."""
    root = tmp_path_factory.mktemp("tiny")
    bf16 = folder(root, tiny())
    _tokenizer(bf16)
    for dialect in ("modelopt", "compressed-tensors"):
        convert_checkpoint(bf16, root / dialect, Options(dialect=dialect))
    return root


@pytest.fixture(scope="module")
def one_rank(folders):
    llm = start(folders / "modelopt")
    answers = ask(llm)
    llm.llm_engine.engine_core.shutdown()
    return answers


def _tokenizer(path):
    """Token 17 is the word t17."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(96)} | {"<unk>": 96}  # special tokens are found inside of other words too
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)


def by_transformers(path, prompts=PROMPTS, dtype=torch.float32, adapter=None, model=None, **kwargs):
    """The same as `generate`, computed with this library under transformers, and PEFT.

    model: its class, if it is not one for causal language models
    """
    import moe_nvfp4.integrations.huggingface  # noqa: F401
    from tests.models import load

    model = load(path, dtype, **kwargs) if model is None else model.from_pretrained(path, dtype=dtype).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
    ids = torch.tensor(prompts)
    with torch.no_grad():
        logprobs = model(ids).logits.float().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        model.generation_config.eos_token_id = None  # a token as any other
        tokens = model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)[:, ids.shape[1] :]
    return tokens.tolist(), logprobs.tolist()


def same(one, other, tolerance=1e-4, prompts=8):
    """Compare tokens and log-probabilities; at least so many prompts must agree."""
    equal = [a == b for a, b in zip(one[0], other[0], strict=True)]
    close = (torch.tensor(one[1]) - torch.tensor(other[1])).abs().amax(dim=1) < tolerance
    assert sum(equal) >= prompts and int(close.sum()) >= prompts, (equal, close)


W4A4 = {"moe_nvfp4": {"activations": "nvfp4"}}
MOST = 6  # in W4A4 a value next to a rounding boundary may get either code


# ---------------------------------------------------------------- numbers
def test_folders_of_ours(folders, one_rank):
    same(one_rank, by_transformers(folders / "modelopt"))
    same(generate(folders / "compressed-tensors"), by_transformers(folders / "compressed-tensors"))


def test_bf16_experts_are_quantized_while_they_load(folders, one_rank):
    same(generate(folders / "bf16", quantization="moe_nvfp4"), one_rank, 1e-6)


def test_the_demo_in_bf16(tmp_path):
    """Trained weights, as people run them: the engines differ no more than with dense experts (docs/serving.md)."""
    from transformers import AutoTokenizer

    from moe_nvfp4.demo import demo_text

    demo, path = made_demo(), tmp_path / "demo"
    convert_checkpoint(demo, path, Options())
    ids = AutoTokenizer.from_pretrained(demo)(demo_text()).input_ids
    prompts = [ids[i : i + 24] for i in range(0, 16 * 100, 100)]
    tokens, logprobs = generate(path, prompts, dtype="bfloat16")
    others = by_transformers(path, prompts, torch.bfloat16)
    equal = sum(a == b for a, b in zip(tokens, others[0], strict=True))
    apart = (torch.tensor(logprobs) - torch.tensor(others[1])).abs().mean().item()
    print(f"{equal} of {len(prompts)} continuations are equal, log-probabilities {apart:.4f} apart")
    assert apart < 0.07 and equal >= len(prompts) // 2


@pytest.mark.parametrize("input_scale", [0.01, None], ids=["static scales", "dynamic scales"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_w4a4_folders_of_others(tmp_path, dialect, input_scale):
    ignore = ["lm_head", "*.self_attn*", "*.gate"] if dialect == "modelopt" else ["lm_head", "re:.*(self_attn|gate$)"]
    path, _ = quantized(tmp_path, tiny(), dialect, input_scale=input_scale, ignore=ignore)
    same(generate(path), by_transformers(path), prompts=MOST)


@pytest.fixture(scope="module")
def w4a4(folders):
    return generate(folders / "modelopt", hf_overrides=W4A4)


def test_activations_from_the_command_line(folders, one_rank, w4a4):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folders / "modelopt")
    config.quantization_config["moe_nvfp4"]["activations"] = "nvfp4"
    same(w4a4, by_transformers(folders / "modelopt", config=config), prompts=MOST)
    with pytest.raises(AssertionError):
        same(w4a4, one_rank, prompts=1)


YARN = dict(rope_type="yarn", rope_theta=1e4, factor=2.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=64)  # fmt: skip


@pytest.mark.parametrize("family", [qwen2_moe, mixtral, gpt_oss, llama4])
def test_families(tmp_path, family):
    """Shared experts with their own gate; other names of projections; biases, a clamped gate and attention sinks;
    router weights on the input."""
    small = family()
    small.config.hidden_size = 128  # vLLM's attention on a CPU has heads of 32 and more
    if hasattr(small.config, "head_dim"):
        small.config.head_dim = 32
    if family is gpt_oss:
        small.config.rope_parameters = YARN  # vLLM's gpt-oss has no other
    folder(tmp_path, lambda: type(small)(small.config))
    convert_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4")
    expected = by_transformers(tmp_path / "nvfp4")
    same(generate(tmp_path / "nvfp4"), expected)
    if family is gpt_oss:  # vLLM calls its attention otherwise, and the ignore list has expressions
        convert_checkpoint(tmp_path / "bf16", tmp_path / "other", Options(dialect="compressed-tensors"))
        same(generate(tmp_path / "other"), expected)
    if family is llama4:  # stacks of all experts
        same(generate(tmp_path / "bf16", quantization="moe_nvfp4"), expected)
    if family is gpt_oss:
        with pytest.raises(NotImplementedError, match="gpt-oss's bf16 experts.*moe-nvfp4 quantize"):
            generate(tmp_path / "bf16", quantization="moe_nvfp4")


def test_dense_experts_one_by_one(tmp_path):
    """vLLM's gpt-oss passes over them, and would answer from what is in memory."""
    small = gpt_oss(intermediate=64, hidden_size=128, head_dim=32)
    small.config.rope_parameters = YARN
    folder(tmp_path, lambda: type(small)(small.config))
    convert_checkpoint(tmp_path / "bf16", path := tmp_path / "nvfp4")
    files, experts = tensors(path), "model.layers.1.mlp.experts"
    for stem in [k.removesuffix(".weight_scale_2") for k in files if experts in k and k.endswith(".weight_scale_2")]:
        dense = value_of("modelopt", files, stem).bfloat16()
        files = {k: t for k, t in files.items() if not k.startswith(f"{stem}.weight")} | {f"{stem}.weight": dense}
    save_file(files, path / "model.safetensors", {"format": "pt"})
    quantization = json.loads((path / "config.json").read_text())["quantization_config"]
    change_config(path, quantization_config=quantization | {"ignore": [*quantization["ignore"], f"{experts}*"]})
    with pytest.raises(ValueError, match="layers.1.mlp.experts.*w13_weight.*did not come"):
        generate(path)


def ernie(**small):
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    return Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(
        **small, moe_num_experts=8, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=1))  # fmt: skip


def laguna(**small):
    from transformers import LagunaConfig, LagunaForCausalLM

    return LagunaForCausalLM(LagunaConfig(
        **small, num_experts=8, num_experts_per_tok=2, shared_expert_intermediate_size=64))  # fmt: skip


@pytest.mark.parametrize("family, dialect", [(ernie, "modelopt"), (ernie, "compressed-tensors"), (laguna, "modelopt")])
def test_routing_with_a_correction_bias(family, dialect, tmp_path):
    """Experts without groups, of which vLLM's router on a CPU (0.32) leaves out the bias. Laguna's is a parameter of
    the experts, over which vLLM's loader passes."""
    small = SMALL | dict(head_dim=32, hidden_size=128, intermediate_size=96, moe_intermediate_size=64)
    source = folder(tmp_path, lambda: family(**small))
    biases = [t for name, t in tensors(source).items() if name.endswith("e_score_correction_bias")]
    assert biases and min(bias.std() for bias in biases) > 0.01
    convert_checkpoint(source, tmp_path / "nvfp4", Options(dialect=dialect), progress=False)
    same(generate(tmp_path / "nvfp4"), by_transformers(tmp_path / "nvfp4"))


def test_aria(tmp_path):
    """vLLM's model calls gate and up of an expert as it calls a dense MLP's, and gives shared experts no name."""
    from transformers import AriaConfig, AriaForConditionalGeneration, AriaImageProcessor, AriaProcessor, AutoTokenizer

    text = SMALL | dict(model_type="aria_text", hidden_size=128, head_dim=32, intermediate_size=64, moe_num_experts=4,
                        moe_topk=2, moe_num_shared_experts=1)  # fmt: skip
    vision = dict(model_type="idefics3_vision", hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                  num_attention_heads=2, image_size=56, patch_size=14)  # fmt: skip
    config = AriaConfig(text_config=text, vision_config=vision, vision_feature_layer=-1, image_token_id=90,
                        projector_patch_to_query_dict={16: 4})  # fmt: skip
    folder(tmp_path, lambda: AriaForConditionalGeneration(config))
    convert_checkpoint(tmp_path / "bf16", path := tmp_path / "nvfp4", progress=False)
    _tokenizer(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.image_token, tokenizer.image_token_id = "t90", 90
    AriaProcessor(AriaImageProcessor(), tokenizer).save_pretrained(path)
    prompts = [[min(token, 89) for token in prompt] for prompt in PROMPTS]  # 90 is an image
    found = generate(path, prompts, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 0})
    same(found, by_transformers(path, prompts, model=AriaForConditionalGeneration))


def hy_v3():
    """The correction bias is the block's, and the router scales what it chooses."""
    from transformers import HYV3Config, HYV3ForCausalLM

    return HYV3ForCausalLM(HYV3Config(
        **SMALL | dict(head_dim=32, hidden_size=128, intermediate_size=96, moe_intermediate_size=64), num_experts=8,
        num_experts_per_tok=2, first_k_dense_replace=1, router_scaling_factor=2.5))  # fmt: skip


def test_routing_in_a_model_of_transformers(tmp_path):
    """vLLM replaces the block that routes, and leaves out what the block itself has."""
    source = folder(tmp_path, hy_v3)
    assert any(name.endswith("expert_bias") and t.std() > 0.01 for name, t in tensors(source).items())
    convert_checkpoint(source, tmp_path / "nvfp4", progress=False)
    expected = by_transformers(tmp_path / "nvfp4")
    same(generate(tmp_path / "nvfp4", model_impl="transformers"), expected)


def test_experts_that_vllm_leaves_to_transformers(tmp_path):
    """They would stay dense without a word. In a process of its own, since vLLM changes transformers' classes."""
    source = folder(tmp_path, lambda: gpt_oss(hidden_size=128, intermediate=96))
    options = dict(quantization="moe_nvfp4", model_impl="transformers")
    code = f"from tests.integrations.vllm_engine import generate; generate({str(source)!r}, **{options})"
    error = python(code).stderr
    said = "in vLLM this model has no experts, or runs them by other code .*: leave it out, or --model-impl"
    assert re.search(said, error), error


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_router_of_cpus(scores):
    """All that it is given, in float64, written out."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    mends.complete_router()
    logits, bias = 2 * torch.randn(50, 8), torch.randn(8)
    s = logits.double().sigmoid() if scores == "sigmoid" else logits.double().exp() / logits.double().exp().sum(1, True)
    for renormalize in (True, False):
        router = cpu_router.CPURouter(3, 8, renormalize=renormalize, scoring_func=scores, routed_scaling_factor=2.5,
                                      e_score_correction_bias=bias)  # fmt: skip
        weights, ids = router._compute_routing(logits, logits, None)
        for row, w, i in zip(s, weights, ids, strict=True):
            best = sorted(range(8), key=lambda e: -(row[e] + bias[e].double()).item())[:3]
            assert sorted(i.tolist()) == sorted(best)
            want = row[i.long()] / (row[best].sum() if renormalize else 1) * 2.5
            assert torch.allclose(w.double(), want, rtol=1e-5)


def latent_attention():
    """A DeepSeek-V3 without YaRN."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {k: v for k, v in SMALL.items() if k not in ("head_dim", "num_key_value_heads")}
    return DeepseekV3ForCausalLM(DeepseekV3Config(
        **sizes | dict(hidden_size=128), num_key_value_heads=SMALL["num_attention_heads"], q_lora_rank=32,
        kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, intermediate_size=96,
        moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=2,
        topk_group=1, first_k_dense_replace=1, topk_method="noaux_tc", scoring_func="sigmoid"))  # fmt: skip


def test_latent_attention(tmp_path):
    """vLLM's CPU kernel (0.32) turns other numbers of the query."""
    convert_checkpoint(folder(tmp_path, latent_attention), tmp_path / "nvfp4", progress=False)
    same(generate(tmp_path / "nvfp4"), by_transformers(tmp_path / "nvfp4"))


@pytest.mark.parametrize("neighbours", [True, False])
def test_the_rope_of_cpus(neighbours):
    """Queries of all forms, in place, in float64, written out."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    mends.complete_rope()
    T, heads, size, at = 5, 3, 64, torch.arange(5) + 2
    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(size, size, 32, 1e4, not neighbours, torch.float32)
    angle = at[:, None].double() / 1e4 ** (torch.arange(0, size, 2).double() / size)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    query, key = torch.randn(T, heads, size), torch.randn(T, 1, size)

    def turned(v):
        parts = (v[..., ::2], v[..., 1::2]) if neighbours else v.chunk(2, -1)
        z = torch.complex(*(part.double() for part in parts)) * turn
        return torch.stack([z.real, z.imag], -1 if neighbours else -2).flatten(-2)

    forms = {"heads apart": lambda v: v.clone(), "together": lambda v: v.flatten(1).clone(),
             "a part": lambda v: torch.cat([v, v], -1)[..., size:]}  # fmt: skip
    for form in forms.values():
        q, k = form(query), form(key)
        for given, found, v in zip((q, k), rope.forward_cpu(at, q, k), (query, key), strict=True):
            assert found.shape == given.shape and torch.equal(found, given)
            assert torch.allclose(found.double().view(v.shape), turned(v), rtol=0, atol=1e-5)


def test_other_formats_become_nvfp4_while_they_load(tmp_path):
    """gpt-oss in MXFP4, whose experts vLLM's model does not pass on, and Qwen3 in FP8: as the folders that quantize
    writes. vLLM's own loader would pass on other tensors."""
    for family, form in ((lambda: gpt_oss(intermediate=64), mxfp4_stacks), (tiny(4), fp8_blocks)):
        path = tmp_path / form.__name__
        small = family()
        small.config.hidden_size, small.config.head_dim = 128, 32
        if small.config.model_type == "gpt_oss":
            small.config.rope_parameters = YARN
        form(folder(path, lambda model=small: type(model)(model.config), "source"))
        convert_checkpoint(path / "source", path / "nvfp4")
        expected = by_transformers(path / "nvfp4")
        same(generate(path / "source", quantization="moe_nvfp4", load_format="moe_nvfp4"), expected)
    with pytest.raises(ValueError, match="the files are FP8, and become NVFP4 while they load: add --load-format"):
        start(path / "source", quantization="moe_nvfp4")


def test_a_draft_model_beside_files_that_become_nvfp4(tmp_path):
    """Its tensors are those of its own folder, and its options are asked of its own config."""
    small = tiny(4)()
    small.config.hidden_size, small.config.head_dim, small.config.num_hidden_layers = 128, 32, 3
    fp8_blocks(folder(tmp_path, lambda: type(small)(small.config), "source"))
    files = eagle3(tmp_path / "draft", small.config.vocab_size)

    def drafting(**said):
        drafts = {"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2} | said
        options = {"quantization": "moe_nvfp4", "load_format": "moe_nvfp4"}
        return start(tmp_path / "source", speculative_config=drafts, **options)

    llm = drafting()
    made = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model.model
    for name in ("norm", "layers.0.hidden_norm"):
        assert torch.equal(made.get_parameter(f"{name}.weight").bfloat16(), files[f"{name}.weight"])
    llm.llm_engine.engine_core.shutdown()
    with pytest.raises(ValueError, match="--quantization moe_nvfp4: in vLLM this model has no experts"):
        drafting(quantization="moe_nvfp4")


def eagle3(path, vocabulary, H=128, I=96):
    """A folder of one dense layer that drafts by EAGLE-3 for a model of 3 layers. Returns its tensors."""
    path.mkdir()
    sizes = {"fc": (H, 3 * H), "norm": (H,), "lm_head": (vocabulary, H)}
    attention = {"q_proj": (128, 2 * H), "k_proj": (64, 2 * H), "v_proj": (64, 2 * H), "o_proj": (H, 128)}
    sizes |= {f"layers.0.self_attn.{name}": size for name, size in attention.items()}
    sizes |= {f"layers.0.mlp.{name}_proj": (H, I) if name == "down" else (I, H) for name in ("gate", "up", "down")}
    sizes |= {f"layers.0.{name}": (H,) for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm")}
    files = {f"{name}.weight": 0.2 * torch.randn(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    save_file(files, path / "model.safetensors", {"format": "pt"})
    config = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=H, intermediate_size=I,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=1, dtype="float32",
                  vocab_size=vocabulary, draft_vocab_size=vocabulary, max_position_embeddings=128,
                  eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return files


@pytest.mark.parametrize("form", ["bf16", "FP8"])
def test_options_of_files_that_become_nvfp4(form, folders, tmp_path):
    """Recipe, excluded experts and activations: as of the folder that quantize writes with the same ones."""
    source, load = folders / "bf16", {"quantization": "moe_nvfp4"}
    if form == "FP8":
        source = folder(tmp_path, tiny(4), "source")
        fp8_blocks(source)
        load["load_format"] = "moe_nvfp4"
    options = {"recipe": "max", "exclude": ["model.layers.0.*"], "activations": "nvfp4"}
    convert_checkpoint(source, tmp_path / "nvfp4", Options(**options), progress=False)
    same(generate(source, hf_overrides={"moe_nvfp4": options}, **load), generate(tmp_path / "nvfp4"), 1e-5)


def mxfp4_stacks(path):
    """Make the experts of a gpt-oss folder MXFP4, of random numbers."""
    files = tensors(path)
    for name in [n for n in files if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        E, K, N = files.pop(name).shape
        files[f"{name}_blocks"] = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8)
        files[f"{name}_scales"] = torch.randint(121, 126, (E, N, K // 32), dtype=torch.uint8)
    save_file(files, path / "model.safetensors", {"format": "pt"})
    change_config(path, quantization_config={"quant_method": "mxfp4"})


def fp8_blocks(path):
    """Make the experts and the linears of a folder FP8."""
    files = tensors(path)
    for name in [n for n in files if n.endswith("proj.weight")]:
        files[name], files[f"{name}_scale_inv"], _ = fp8("block", files[name].float())
    save_file(files, path / "model.safetensors", {"format": "pt"})
    change_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})


def test_adapters(folders, tmp_path):
    """One on the attention answers as in PEFT. One with tensors for other modules, which vLLM would leave out, is
    refused when it is loaded."""
    from peft import LoraConfig, get_peft_model
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    import moe_nvfp4.integrations.huggingface  # noqa: F401
    from tests.models import load

    attention = ["q_proj", "v_proj"]

    def adapter(name, targets, parameters=()):
        model = load(folders / "modelopt", torch.float32)
        config = LoraConfig(r=4, target_modules=targets, target_parameters=[*parameters], init_lora_weights=False)
        model = get_peft_model(model, config).eval()
        model.save_pretrained(tmp_path / name)
        return model

    model = adapter("attention", attention)
    adapter("experts", ["q_proj"], ["experts.gate_up_proj", "experts.down_proj"])
    adapter("output", ["q_proj", "o_proj"])
    with torch.no_grad():
        logprobs = model(torch.tensor(PROMPTS[:1])).logits[0, -1].log_softmax(-1)
    llm = start(folders / "modelopt", enable_lora=True, lora_target_modules=attention)
    llm.llm_engine.add_lora(request := LoRARequest("attention", 1, str(tmp_path / "attention")))
    for i, (name, left_out) in enumerate([("experts", "experts.*4 in all"), ("output", "o_proj.*2 in all")]):
        with pytest.raises(ValueError, match=rf"layers\.0\.\S*{left_out}.*lora-target-modules has q_proj v_proj"):
            llm.llm_engine.add_lora(LoRARequest(name, 2 + i, str(tmp_path / name)))
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=1, detokenize=False)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    (output,) = llm.generate([prompt], sampling, use_tqdm=False, lora_request=request)
    ((token, found),) = output.outputs[0].logprobs[0].items()
    assert token == int(logprobs.argmax()) and abs(found.logprob - logprobs.max().item()) < 1e-4
    llm.llm_engine.engine_core.shutdown()


RANKS = {
    "tensors": {"tensor_parallel_size": 2},
    "tensors in W4A4": {"tensor_parallel_size": 2, "hf_overrides": W4A4},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "data": {"data_parallel_size": 2},
    "data in W4A4": {"data_parallel_size": 2, "hf_overrides": W4A4},
    "data and experts": {"data_parallel_size": 2, "enable_expert_parallel": True},
}


@pytest.fixture(scope="module")
def two_ranks(folders, tmp_path_factory):
    forms = {form: (folders / "modelopt", options) for form, options in RANKS.items()}
    return on_two_ranks(forms, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("form", RANKS)
def test_two_ranks(two_ranks, one_rank, w4a4, form):
    """Tensor parallelism (channels of every expert), expert parallelism (half of the experts), and data parallelism, in
    which every rank answers all prompts, and the experts see the tokens of both, and have half of the channels. In W4A4
    the scale of a row is that of both ranks' parts."""
    for found in two_ranks[form]:
        same(found, *((w4a4, 1e-3, MOST) if "hf_overrides" in RANKS[form] else (one_rank,)))


# ---------------------------------------------------------------- gates
def _layer(kind, limit=None, alpha=None, beta=None, **moe):
    return SimpleNamespace(
        layer_name="layer", activation=SimpleNamespace(value=kind), swiglu_limit=limit, swiglu_alpha=alpha,
        swiglu_beta=beta, moe_config=SimpleNamespace(activation_situ_beta=None, activation_situ_linear_beta=None) if not
        moe else SimpleNamespace(**moe),
    )  # fmt: skip


def _silu_oai(g, u):
    g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
    return g / (1 + torch.exp(-1.702 * g)) * (u + 1)


GATES = [
    (("silu",), lambda g, u: g / (1 + torch.exp(-g)) * u),
    (("silu", 2.5), lambda g, u: g.clamp(max=2.5) / (1 + torch.exp(-g.clamp(max=2.5))) * u.clamp(-2.5, 2.5)),
    (("swigluoai_uninterleave", 7.0, 1.702, 1.0), _silu_oai),
    (("swigluoai",), _silu_oai),
    (("swiglustep",), lambda g, u: (g / (1 + torch.exp(-g))).clamp(max=7.0) * u.clamp(-7.0, 7.0)),
    (("gelu",), lambda g, u: 0.5 * g * (1 + torch.erf(g / math.sqrt(2))) * u),
    (("gelu_tanh",), lambda g, u: 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u),
    (("relu2_no_mul",), lambda g, u: u.clamp(min=0) ** 2),
    (("silu_no_mul",), lambda g, u: u / (1 + torch.exp(-u))),
    (("gelu_no_mul",), lambda g, u: 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))),
]


@pytest.mark.parametrize(("arguments", "formula"), GATES, ids=[" ".join(map(str, gate[0])) for gate in GATES])
def test_gates(arguments, formula):
    """Against the formulas of vLLM's kernels (vllm/model_executor/layers/activation.py), written out here."""
    gate, own = engine.gate_of(_layer(*arguments))
    values = torch.linspace(-12, 12, 97, dtype=torch.float64)
    pairs = torch.cartesian_prod(values, values)
    found = (own or gate)(pairs if gate.gated else pairs[:, 1:])
    assert torch.allclose(found[:, 0], formula(*pairs.T), rtol=1e-9, atol=1e-12)


def test_kimis_gate_is_vllms():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SituAndMul

    x = torch.randn(50, 32) * 4
    for linear in (None, 3.0):
        layer = _layer("situ", activation_situ_beta=2.0, activation_situ_linear_beta=linear)
        with set_current_vllm_config(VllmConfig()):
            theirs = SituAndMul(2.0, linear).forward_native(x)
        assert torch.allclose(engine.gate_of(layer)[1](x), theirs, rtol=1e-6)


def test_the_gate_that_the_config_says():
    """vLLM's models have one activation function each, and gpt-oss's kernel one limit, whatever config.json says."""
    from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig, Qwen3VLMoeConfig

    of = lambda kind, config: engine.gate_of(_layer(kind), vllm_config.gate_settings(config))[0]
    g, u = torch.tensor([[2.5, -5.0, 8.0], [4.0, -4.0, 6.5]], dtype=torch.float64)
    want = g.clamp(max=3) / (1 + torch.exp(-2 * g.clamp(max=3))) * (u.clamp(-3, 3) + 1)
    found = of("swigluoai", GptOssConfig(swiglu_limit=3.0, swiglu_alpha=2.0))(torch.cat([g, u]))
    assert torch.allclose(found, want, rtol=1e-12)
    of("silu", Qwen3MoeConfig(hidden_act="swish"))
    of("relu2_no_mul", NemotronHConfig())
    vision = Qwen3VLMoeConfig(text_config={"hidden_act": "gelu_pytorch_tanh"})
    of("gelu_tanh", vision)
    of("gelu_tanh", Qwen3MoeConfig(hidden_act="gelu_new"))  # two names of one function
    of("silu", Qwen3MoeConfig(hidden_act="a_name_of_its_own"))  # a model's own code may know it
    relu = Qwen3MoeConfig(hidden_act="relu")
    for config, said in ((Qwen3MoeConfig(hidden_act="gelu"), "gelu"), (vision, "gelu_pytorch_tanh"), (relu, "relu")):
        with pytest.raises(NotImplementedError, match=f"layer: .*config says '{said}'.*computes 'silu'.*--engine"):
            of("silu", config)


@pytest.mark.parametrize(
    "arguments",
    [
        ("swigluoai", 5.0), ("swigluoai", None, 1.5), ("swigluoai_uninterleave",), ("silu", 7.0, 1.702),
        ("silu", None, None, 1.0), ("gelu_tanh", 7.0), ("gelu_tanh", None, None, 1.0), ("gelu", None, 1.5),
        ("relu2_no_mul", 7.0), ("swiglustep", 5.0),
    ],
)  # fmt: skip
def test_other_gates_are_refused_by_name(arguments):
    with pytest.raises(NotImplementedError, match=f"'{arguments[0]}'.*--engine transformers"):
        engine.gate_of(_layer(*arguments))


# ---------------------------------------------------------------- what is taken, and what is refused
IGNORE = ["model.layers.*.self_attn.[qkv]_proj", "lm_head"]
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": IGNORE}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}


def test_which_checkpoints_are_taken(monkeypatch):
    taken = Config.override_quantization_method
    assert taken(NVFP4, None) == "moe_nvfp4" == taken(NVFP4, "moe_nvfp4")  # this is a CPU
    assert taken({"quantization": {"quant_algo": "NVFP4", "exclude_modules": []}, "quant_method": "modelopt"}, None)
    assert taken(NVFP4, "modelopt_fp4") is None and taken(FP8, None) is None
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stacks = [{"quant_method": method} for method in ("mxfp4", "gpt_oss_mxfp4")]  # the second is vLLM's own name
    for other in (blocks, blocks | {"quant_method": "deepseek_v4_fp8"}, *stacks):  # and so is this
        assert taken(other, None) is None and taken(other, "moe_nvfp4") == "moe_nvfp4"
    with pytest.raises(ValueError, match="'awq'.*moe-nvfp4 quantize"):
        taken({"quant_method": "awq"}, "moe_nvfp4")
    with pytest.raises(ValueError, match="'FP8'"):
        taken(FP8, "moe_nvfp4")
    with pytest.raises(NotImplementedError, match="NVFP4_AWQ.*pre_quant_scale"):
        Config.from_config(NVFP4 | {"quant_algo": "NVFP4_AWQ"})
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert taken(NVFP4, None) is None and taken(NVFP4, "moe_nvfp4") == "moe_nvfp4"  # a GPU: only where it is asked for


@pytest.mark.parametrize("version", ["0.25.1", "0.29.0", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused_in_one_line(monkeypatch, version):
    """On a CPU vLLM before 0.30 has no router without its own experts."""
    monkeypatch.setattr(vllm, "__version__", version)
    supported = r"vLLM 0\.30 to 0\.33 on a CPU, this is"
    with pytest.raises(ImportError, match=rf"{supported} vLLM {re.escape(version)}: install") as error:
        Config.override_quantization_method(NVFP4, None)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    taken = lambda: Config.override_quantization_method(NVFP4, "moe_nvfp4")
    if version == "0.29.0":
        assert taken() == "moe_nvfp4"
        return
    with pytest.raises(ImportError, match=rf"vLLM 0\.26 to 0\.33, this is vLLM {re.escape(version)}: install"):
        taken()


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="activations='fp8': activations must be one of bf16, nvfp4"):
        Config().choose({"activations": "fp8"})
    with pytest.raises(ValueError, match="actvations=.*options are activations, recipe, .*, adapter, cpu_experts"):
        Config().choose({"actvations": "bf16"})
    for exclude in ("model.layers.0.*", None, [0]):  # of a string, "*" alone would exclude every layer
        with pytest.raises(ValueError, match="exclude=.*: it is a list of names or wildcards"):
            Config().choose({"exclude": exclude})
    with pytest.raises(ValueError, match="'nvfp4': options are an object"):
        Config().choose("nvfp4")
    with pytest.raises(ValueError, match="recipe='max': these experts are NVFP4 already"):
        Config.from_config(NVFP4).choose({"recipe": "max"})


def test_options_in_the_wrong_place_are_named():
    """transformers takes any key of --hf-overrides for one of the model's."""
    from transformers import PretrainedConfig, Qwen3VLMoeConfig

    choose = lambda **said: Config().maybe_update_config("model", PretrainedConfig(**said))
    for key, value in (("moe-nvfp4", {}), ("moe_nvfp", {}), ("moe_nvpf4", {}), ("activations", "nvfp4"),
                       ("recipe", "max"), ("linears", "vllm"), ("cpu_experts", 3)):  # fmt: skip
        with pytest.raises(ValueError, match=f"--hf-overrides: '{key}' is not an option of moe_nvfp4: these go under"):
            choose(**{key: value})
    choose(activations="gelu", recipe=["max"], moe_layers=[1], moe_nvfp4={"activations": "bf16"})
    for key, value in (("moe_nvfp4", {"activations": "nvfp4"}), ("activations", "nvfp4")):
        config = Qwen3VLMoeConfig()
        setattr(config.text_config, key, value)
        with pytest.raises(
            ValueError, match=f"--hf-overrides: 'text_config.{key}' is not an option of moe_nvfp4: thes"
        ):
            Config().maybe_update_config("model", config)


def test_options_of_a_plug_in_that_does_not_run(folders, monkeypatch):
    """vLLM asks no quantization config about bf16 files: it served them without a word."""
    from vllm.config import ModelConfig

    from moe_nvfp4.integrations.vllm import register

    register()
    options = {"hf_overrides": {"moe_nvfp4": {"activations": "bf16"}}, "skip_tokenizer_init": True}
    refused = pytest.raises(ValueError, match="has options of moe_nvfp4, which does not run: add --quantization moe_n")
    with refused:
        ModelConfig(str(folders / "bf16"), **options)
    for name, more in (("bf16", {"quantization": "moe_nvfp4"}), ("modelopt", {})):
        assert ModelConfig(str(folders / name), **options, **more).quantization == "moe_nvfp4"
    for draft in ({}, options | {"runner": "draft"}):  # vLLM passes a function of overrides on to a dense draft model
        assert ModelConfig(str(folders / "bf16"), **{"skip_tokenizer_init": True} | draft).quantization is None
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    for user in (None, "modelopt_fp4"):
        with refused:
            ModelConfig(str(folders / "modelopt"), quantization=user, **options)
    loader = engine.UnwrittenLoader(LoadConfig(load_format="moe_nvfp4"))
    model = SimpleNamespace(model="a", runner_type="generate")
    for config in (None, SimpleNamespace(get_name=lambda: "fp8")):
        of_engine = SimpleNamespace(quant_config=config, model_config=model)
        with pytest.raises(ValueError, match="--load-format moe_nvfp4: .*: add --quantization moe_nvfp4"):
            loader.load_model(of_engine, model)
    # a dense draft model of another folder, which vLLM gives as the model
    monkeypatch.setattr(engine.DefaultModelLoader, "load_model", lambda self, config, model: "loaded")
    draft = SimpleNamespace(model="b", hf_text_config=SimpleNamespace(model_type="qwen3"), runner_type="draft")
    of_drafts = SimpleNamespace(quant_config=None, model_config=draft)
    assert loader.load_model(of_drafts, draft) == "loaded"


def test_vllms_own_quantization_while_loading_is_refused():
    """vLLM leaves it to the quantization of the files, which has no such layers."""
    for folder_config in (NVFP4, None):
        config = Config() if folder_config is None else Config.from_config(folder_config)
        config.online_quantization_config = object()
        with pytest.raises(ValueError, match="--quantization-config: moe_nvfp4 quantizes no layers in other formats"):
            config.maybe_update_config("model")


def test_options_without_an_effect_are_refused(monkeypatch):
    """They are refused when the first linear of bf16 files has been loaded: all modules exist then."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    def load(experts, exclude, whole=True, dense=False):
        config = Config().choose({"exclude": exclude})
        monkeypatch.setattr(engine, "whole_and_dense", lambda model: (whole, dense))
        linear = config.get_quant_method(object.__new__(LinearBase), "model.layers.0.self_attn.qkv_proj")
        for name in experts:
            assert config.get_quant_method(object.__new__(RoutedExperts), name) is None
        linear.process_weights_after_loading(torch.nn.Linear(16, 16))

    here = "model.layers.0.mlp.experts"
    load([here], ["*.layers.0.*"])
    load([here], ["*.layers.0.*", "*.layers.9.*"], whole=False)  # another stage of the pipeline has it
    with pytest.raises(ValueError, match=rf"exclude=\['\*.layers.9.\*'\] matches no .* this model has {here}$"):
        load([here], ["*.layers.0.*", "*.layers.9.*"])
    load([], [])  # a dense layer that drafts for a mixture of experts
    with pytest.raises(ValueError, match="--quantization moe_nvfp4: in vLLM this model has no experts"):
        load([], [], dense=True)


@pytest.mark.parametrize(
    "model,counted,stages,whole_and_dense",
    [
        ("target", 4, 1, (True, True)),  # MiniCPM's, whose class in vLLM has experts of its own
        ("target", 4, 2, (False, False)),  # the experts may be on the other stage
        ("target", 0, 2, (False, True)),
        ("layers for drafts", 4, 1, (True, False)),  # a dense one of a mixture of experts
        ("other folder", 0, 1, (True, True)),
    ],
)
def test_which_models_must_have_experts(model, counted, stages, whole_and_dense, monkeypatch):
    from moe_nvfp4.integrations.vllm.config import Model

    def config(name, *classes):
        count = counted if model in ("target", found[name, classes]) else 4 - counted
        hf_config = SimpleNamespace(architectures=list(classes))
        return SimpleNamespace(model=name, hf_config=hf_config, get_num_experts=lambda: count)

    found = {("a", ("A",)): "target", ("a", ("MTP",)): "layers for drafts", ("b", ("Eagle",)): "other folder"}
    draft = ("b", "Eagle") if model == "other folder" else ("a", "MTP")
    drafts = SimpleNamespace(draft_model_config=config(*draft), target_model_config=config("a", "A"))
    pipeline = SimpleNamespace(pipeline_parallel_size=stages)
    current = SimpleNamespace(model_config=config("a", "A"), speculative_config=drafts, parallel_config=pipeline)
    monkeypatch.setattr(engine, "get_current_vllm_config", lambda: current)
    name, classes = next(key for key in found if found[key] == model)
    assert engine.whole_and_dense(Model(name, classes)) == whole_and_dense


@pytest.mark.parametrize("method,refused", [("mtp", None), ("draft_model", "--load-format moe_nvfp4")])
def test_how_a_draft_model_is_read(method, refused, monkeypatch):
    """vLLM reads a "draft_model" as it does the target, whatever its draft_load_config says."""
    from moe_nvfp4.integrations.vllm.config import Model

    def config(name):
        return SimpleNamespace(model=name, hf_config=SimpleNamespace(architectures=["A"]))

    drafts = SimpleNamespace(draft_model_config=config("b"), target_model_config=config("a"), method=method,
                             draft_load_config=SimpleNamespace(load_format="moe_nvfp4"))  # fmt: skip
    current = SimpleNamespace(speculative_config=drafts, load_config=SimpleNamespace(load_format="auto"))
    monkeypatch.setattr(engine, "get_current_vllm_config", lambda: current)
    for name, want in (("a", "--load-format moe_nvfp4"), ("b", refused)):
        with pytest.raises(ValueError, match=f"become NVFP4 while they load: add {want}") if want else nullcontext():
            engine.check_load_format("x", "FP8", Model(name, ("A",)))


def test_a_place_for_downloads_that_is_not_used_is_refused():
    loader = engine.UnwrittenLoader(LoadConfig(load_format="moe_nvfp4", download_dir="/elsewhere"))
    model = SimpleNamespace(
        model="me/model", hf_text_config=SimpleNamespace(model_type="gpt_oss"), runner_type="generate"
    )
    quant_config = SimpleNamespace(converted=object(), get_name=lambda: "moe_nvfp4")
    config = SimpleNamespace(quant_config=quant_config, model_config=model)
    with pytest.raises(ValueError, match="--download-dir /elsewhere: .*hf download me/model --local-dir"):
        loader.load_model(config, model)


def test_an_adapter_of_experts_that_stay_dense_is_refused():
    """vLLM would run them without it."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    config = Config().choose({"exclude": ["*.layers.0.*"]})
    config.adapter = SimpleNamespace(changes=lambda module: ".1." not in module)
    for layer in (0, 2):
        config.exclude = [f"*.layers.{layer}.*"]
        with pytest.raises(
            NotImplementedError, match=rf"layers\.{layer}\.mlp\.experts is not 4-bit here, and the adapt"
        ):
            config.get_quant_method(object.__new__(RoutedExperts), f"model.layers.{layer}.mlp.experts")
    config.exclude = ["*.layers.1.*"]
    assert config.get_quant_method(object.__new__(RoutedExperts), "model.layers.1.mlp.experts") is None


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.gate", "self_attn.q_norm", "embed_tokens", "lm_head"])
def test_a_folder_without_a_weight(folders, tmp_path, name):
    """vLLM looks for these only in models without quantization, and would answer from what is in memory."""
    path = shutil.copytree(folders / "modelopt", tmp_path / "nvfp4")
    files = {key: t for key, t in tensors(path).items() if f"{name}.weight" not in key or "layers.0" in key}
    assert len(files) < len(tensors(path))
    save_file(files, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{name.replace('k_proj', 'qkv_proj')}.weight.*did not come from the files"):
        generate(path)


@pytest.mark.parametrize("form", ["bf16", "modelopt"])
def test_files_beside_the_model(folders, tmp_path, form):
    """vLLM reads them too, or in place of it, where transformers and verify do not."""
    path, options = shutil.copytree(folders / form, tmp_path / form), {"quantization": "moe_nvfp4"}
    for name, message in (
        ("model_old.safetensors", r"would read model_old\.safetensors beside model\.safetensors"),
        ("consolidated.safetensors", r"would read consolidated\.safetensors in place of model\.safetensors"),
    ):
        shutil.copy(path / "model.safetensors", path / name)
        with pytest.raises(ValueError, match=message):
            generate(path, **options)
        (path / name).unlink()


def test_an_expert_that_comes_twice(folders, tmp_path):
    """Its up would be quantized with a gate of another file."""
    path, up = shutil.copytree(folders / "bf16", tmp_path / "bf16"), "model.layers.1.mlp.experts.3.up_proj.weight"
    (path / "model.safetensors").rename(path / "model-00002-of-00002.safetensors")
    save_file({up: tensors(folders / "bf16")[up]}, path / "model-00001-of-00002.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.3\.up_proj\.weight comes twice"):
        generate(path, quantization="moe_nvfp4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_weights_of_vllms_own_layers_that_do_not_come(dtype):
    """A part of a fused linear, an expert's matrix, a bias; but not scales that files may lack, nor rows that vLLM adds
    to a part that came."""
    model = torch.nn.ModuleDict({name: torch.nn.Module() for name in ("qkv", "experts", "norm", "head", "cache")})
    model["qkv"].output_partition_sizes, model["qkv"].quant_method = [4, 2, 2], object()
    shapes = {"qkv.weight": (8, 3), "qkv.bias": (8,), "qkv.input_scale": (3,), "experts.w13_weight": (2, 8, 3),
              "experts.w2_weight": (2, 3, 4), "norm.weight": (3,), "norm.factor": (), "head.weight": (8, 3),
              "cache.k_scale": ()}  # fmt: skip
    model["experts"].quant_method, model["cache"].quant_method = object(), object()
    for name, shape in shapes.items():
        module, _, last = name.partition(".")
        model[module].register_parameter(last, torch.nn.Parameter(torch.full(shape, 2.0).to(dtype), False))
    model["qkv"].register_parameter("codes", torch.nn.Parameter(torch.ones(2, 2, dtype=torch.uint8), False))

    def missing(*lost):
        """lost: (name, index of what does not come)"""
        before = mark(model)
        assert "qkv.codes" not in before and "qkv.input_scale" not in before and "cache.k_scale" not in before
        for name in before:
            p = model.get_parameter(name).data
            keep = torch.ones(p.shape, dtype=torch.bool)
            for i in [i for n, i in lost if n == name]:
                keep[i] = False
            p[keep] = torch.ones(int(keep.sum()), dtype=dtype)
        found = left(model, before)
        for name in before:
            p = model.get_parameter(name).data.float()
            assert not p.isnan().any()
            for i in [i for n, i in lost if n == name]:
                assert (p[i] == 2).all()
                p[i] = 1
            assert (p == 1).all()
            model.get_parameter(name).data.fill_(2)
        return found

    whole = slice(None)
    assert missing() == []
    for name in ("qkv.weight", "qkv.bias"):
        assert missing((name, slice(4, 6))) == [name]  # k
        assert missing((name, slice(3, 5))) == []
    assert missing(("experts.w13_weight", (1, slice(0, 4)))) == ["experts.w13_weight"]  # gate of expert 1
    assert missing(("experts.w13_weight", (1, slice(6, 8)))) == []
    assert missing(("experts.w2_weight", 0), ("norm.weight", whole), ("head.weight", whole)) == [
        "experts.w2_weight", "norm.weight", "head.weight"]  # fmt: skip
    assert missing(("norm.factor", ...), ("head.weight", slice(7, 8))) == ["norm.factor"]
    if dtype.itemsize > 1:  # a NaN of the files stays one
        before = mark(model)
        for name in before:
            model.get_parameter(name).data.fill_(1)
        model["norm"].weight.data[1] = torch.nan
        assert left(model, before) == [] and model["norm"].weight.isnan().tolist() == [False, True, False]


def test_a_draft_model_takes_another_ones_embedding():
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    embedding = object.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(embedding)
    embedding.register_parameter("weight", torch.nn.Parameter(torch.ones(3, 2)))
    model = torch.nn.ModuleDict({"embed_tokens": embedding, "norm": torch.nn.LayerNorm(2)})
    seen = {"generate": [], "draft": []}

    class Loader:
        load_config = SimpleNamespace(load_format="auto")

        def load_weights(self, model, model_config):
            seen[model_config.runner_type] = [name for name, p in model.named_parameters() if p.isnan().any()]

    load = _checking(Loader.load_weights)
    for runner in seen:
        with pytest.raises(ValueError, match="did not come"):
            load(Loader(), model, SimpleNamespace(quantization="moe_nvfp4", runner_type=runner, model=""))
    norm = ["norm.weight", "norm.bias"]
    assert seen == {"generate": ["embed_tokens.weight", *norm], "draft": norm}
    load(Loader(), model, SimpleNamespace(quantization=None, runner_type="generate"))
    assert seen["generate"] == []


def test_fused_names_are_ignored_with_their_parts():
    config = Config.from_config(NVFP4)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert config.base.packed_modules_mapping == config.packed_modules_mapping
    assert config.ignores("model.layers.3.self_attn.qkv_proj") and config.ignores("lm_head")
    assert not config.ignores("model.layers.3.self_attn.o_proj") and not config.ignores("model.layers.3.mlp.experts")
    config.ignore = [f"model.layers.3.self_attn.{part}_proj" for part in "qk"]
    assert not config.ignores("model.layers.3.self_attn.qkv_proj")  # all its parts, or it is 4-bit


def test_mamba_modules_have_other_names_in_vllm():
    """A Mamba module of Granite 4 is named mixer, and its weights mamba."""
    config = Config.from_config(NVFP4 | {"ignore": ["model.layers.*.mamba*", "model.layers.*.mixer.q*"]})
    assert config.ignores("model.layers.0.mixer.in_proj") and config.ignores("model.layers.0.mixer.q_proj")
    assert not config.ignores("model.layers.0.mixer")  # Nemotron-H's experts are in a module of that name
    assert not Config.from_config(NVFP4).ignores("model.layers.0.mixer.in_proj")


def test_attention_of_ling_has_other_names_in_vllm():
    """Ling 2.5's loader renames it. Its dense attention was taken for 4-bit, and the folder refused."""
    config = Config.from_config(NVFP4 | {"ignore": ["model.layers.*.attention*", "lm_head"]})
    for part in ("query_key_value", "dense", "g_proj", "fused_qkv_a_proj", "q_b_proj", "o_proj"):
        assert config.ignores(f"model.layers.1.self_attn.{part}")
    assert not config.ignores("model.layers.1.mlp.experts")
    assert not Config.from_config(NVFP4).ignores("model.layers.1.self_attn.dense")


def test_a_linear_without_a_name():
    """What the files have under that name decides, if they are here."""
    config = Config.from_config(NVFP4 | {"ignore": ["model.layers.*.mlp.shared_experts*", "lm_head"]})
    assert not config.ignores(".down_proj") and not config.ignores(".gate_up_proj")
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    config.dense = [f"model.layers.0.mlp.shared_experts.{part}_proj" for part in ("gate", "down")]
    assert config.ignores(".down_proj") and not config.ignores(".gate_up_proj")
    config.dense.append("model.layers.0.mlp.shared_experts.up_proj")
    assert config.ignores(".gate_up_proj") and not config.ignores("model.layers.0.mlp.gate_up_proj")


def test_a_name_that_vllm_empties_does_not_match_all():
    """In vLLM Jamba's q_proj is not in a module self_attn."""
    from vllm.model_executor.models.jamba import JambaForCausalLM

    config = Config.from_config(NVFP4 | {"ignore": ["model.layers.*.self_attn*", "model.layers.0.feed_forward*"]})
    config.dense = ["model.layers.4.self_attn.o_proj"]
    config.apply_vllm_mapper(JambaForCausalLM.hf_to_vllm_mapper)
    assert config.ignores("model.layers.4.o_proj") and config.ignores("model.layers.0.feed_forward.experts")
    assert not config.ignores("model.layers.1.feed_forward.experts")
    assert not config.base.is_layer_excluded("model.layers.1.feed_forward.experts")


def test_files_that_are_on_the_hub(tmp_path, monkeypatch):
    """What stays dense, how a base model names its layers and whether scales are static is known of them, too."""
    from huggingface_hub import HfApi, parse_local_safetensors_file_metadata
    from transformers import AutoConfig

    base = lambda: tiny()().model
    convert_checkpoint(folder(tmp_path, base), tmp_path / "q", Options(linears="attention", activations="nvfp4"))
    hf_config = AutoConfig.from_pretrained(tmp_path / "q")
    file = parse_local_safetensors_file_metadata(tmp_path / "q/model.safetensors")
    asked = []

    def metadata(self, model, revision=None):
        asked.append((model, revision))
        return SimpleNamespace(files_metadata={"model.safetensors": file})

    monkeypatch.setattr(HfApi, "get_safetensors_metadata", metadata)
    here, hub = (Config.from_config(hf_config.quantization_config) for _ in range(2))
    here.maybe_update_config(str(tmp_path / "q"), hf_config)
    hub.maybe_update_config("org/model", hf_config, "v1")
    assert asked == [("org/model", "v1")]
    assert hub.dense == here.dense and sorted(hub.dense) == ["layers.0.mlp.gate", "layers.1.mlp.gate"]
    assert hub.ignore == here.ignore and "model.layers.0.mlp.gate" in hub.ignore
    assert hub.static is here.static is False
    stray = SimpleNamespace(
        tensors=file.tensors | {"layers.0.mlp.experts.0.up_proj.pre_quant_scale": next(iter(file.tensors.values()))}
    )
    monkeypatch.setattr(
        HfApi, "get_safetensors_metadata", lambda *args, **kw: SimpleNamespace(files_metadata={"": stray})
    )
    with pytest.raises(NotImplementedError, match="experts.0.up_proj.pre_quant_scale: vLLM has no place for AWQ's"):
        Config.from_config(hf_config.quantization_config).maybe_update_config("org/model", hf_config)


@pytest.mark.parametrize("part", ["all", "some"])
def test_files_of_the_hub_that_are_in_its_cache(part, folders, tmp_path, monkeypatch):
    """Without a network vLLM reads these, of which a part may be missing, and their metadata is no tensor."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError
    from transformers import AutoConfig

    def offline(*args, **kwargs):
        raise NotASafetensorsRepoError

    monkeypatch.setattr(HfApi, "get_safetensors_metadata", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--org--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("c" * 40)
    shutil.copytree(folders / "modelopt", place / "snapshots" / ("c" * 40))
    file = place / "snapshots" / ("c" * 40) / "model.safetensors"
    files = tensors(file.parent)
    if part == "some":
        files = {name: t for name, t in files.items() if not name.endswith("down_proj.weight_scale_2")}
    save_file(files, file, metadata={"format": "pt"})
    hf_config = AutoConfig.from_pretrained(folders / "modelopt")
    config = Config.from_config(hf_config.quantization_config)
    config.maybe_update_config("org/model", hf_config)
    here = Config.from_config(hf_config.quantization_config)
    here.maybe_update_config(str(folders / "modelopt"), hf_config)
    assert config.dense == here.dense and "model.layers.0.self_attn.q_proj" in config.dense


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_experts_for_two_kinds_of_activations(dialect):
    """In one layer they are refused by name, unless the user chooses."""
    down = "model.layers.1.mlp.experts.0.down_proj"

    def found(one, other, chosen=None, layer=1):
        if dialect == "modelopt":
            names = [f"model.layers.{i}.mlp.experts.0.{part}_proj" for i in (0, 1) for part in ("down", "gate", "up")]
            layers = {name: {"quant_algo": other if name == down else one} for name in names}
            given = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        else:
            numbers = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
            group = lambda kind, target: {"targets": [target], "weights": numbers, "format": "nvfp4-pack-quantized",
                                          "input_activations": None if kind == "W4A16_NVFP4" else numbers | {
                                              "dynamic": "local"}}  # fmt: skip
            rest = "re:.*(layers.0.*_proj|gate_proj|up_proj)$"
            groups = {"a": group(one, rest), "b": group(other, "re:.*1.mlp.*down_proj$")}
            for key in [key for key, kind in zip("ab", (one, other), strict=True) if kind == "FP8"]:
                eight = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
                groups[key] |= {"weights": eight, "format": "float-quantized", "input_activations": None}
            given = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
        module = torch.nn.Module()
        for part in ("gate", "down", "up"):
            setattr(module, f"ckpt_{part}_proj_name", f"{part}_proj")
        prefix = f"model.layers.{layer}.mlp.experts"
        return engine.activations_of(engine.base_config(given), module, prefix, "bf16", chosen)

    assert found("NVFP4", "NVFP4") == "nvfp4" and found("W4A16_NVFP4", "W4A16_NVFP4") == "bf16"
    assert found("NVFP4", "W4A16_NVFP4", layer=0) == "nvfp4"
    for pair in (("NVFP4", "W4A16_NVFP4"), ("W4A16_NVFP4", "NVFP4")):
        assert found(*pair, chosen="bf16") in ("bf16", "nvfp4")
        with pytest.raises(NotImplementedError, match=r"layers.1.mlp.experts: .*for bf16 and others for nvfp4.*choose"):
            found(*pair)
    assert found("FP8", "FP8") is None
    for pair in (("NVFP4", "FP8"), ("FP8", "NVFP4")):
        for chosen in (None, "bf16"):
            with pytest.raises(NotImplementedError, match="layers.1.mlp.experts: .*None: not NVFP4"):
                found(*pair, chosen=chosen)


def test_the_kv_cache_stays_with_vllms_reader():
    """Its scales belong to modules whose linears the ignore list excludes."""
    config = Config.from_config(NVFP4 | {"ignore": ["*self_attn*"]})
    config.base = SimpleNamespace(get_quant_method=lambda layer, prefix: "vLLM's")
    assert config.get_quant_method(torch.nn.Identity(), "model.layers.0.self_attn.attn") == "vLLM's"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config = Config.from_config(CONFIGS["compressed-tensors"] | {"ignore": [], "kv_cache_scheme": scheme})
    for one in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert one.kv_cache_scheme == scheme  # attention reads it to choose the dtype of the cache
    with pytest.raises(AttributeError):
        Config().kv_cache_scheme  # noqa: B018


def test_a_folder_in_mistrals_own_format_has_no_config(tmp_path):
    save_file({"layers.0.w": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        loading.opened(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    assert [*loading.opened(tmp_path).tensors] == ["layers.0.w"]
    loading.check_folder(tmp_path, None, tmp_path)
    (tmp_path / "other").mkdir()
    save_file({"layers.0.w": torch.ones(3)}, tmp_path / "other" / "consolidated.safetensors")
    (tmp_path / "other" / "params.json").write_text("{}")
    with pytest.raises(ValueError, match=r"layers\.0\.w is \[3\]"):
        loading.check_folder(tmp_path / "other", None, tmp_path)


def test_a_linear_that_nvidias_files_leave_dense_without_a_word():
    for dialect, name in (("modelopt", "modelopt_fp4"), ("compressed-tensors", "compressed-tensors")):
        config = Config.from_config(CONFIGS[dialect] | {"ignore": ["lm_head"]})
        config.base = SimpleNamespace(get_name=lambda name=name: name)
        assert config.ignores("mtp.fc") == (dialect == "modelopt")
        assert not config.ignores("mtp.layers.0.mlp.fc")


def test_names_that_ignore_lists_have():
    """Heads of EXAONE and AFMoE have no name in vLLM, and those of a draft model have another prefix."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    config, asked = Config.from_config(NVFP4 | {"ignore": ["model.layers.0*"]}).choose({"linears": "vllm"}), []
    config.base = SimpleNamespace(
        get_quant_method=lambda layer, prefix: asked.append(prefix), is_layer_excluded=lambda prefix: False
    )
    for prefix in ("", "model.lm_head", "draft_model.lm_head"):
        config.get_quant_method(object.__new__(ParallelLMHead), prefix)
    assert asked == ["lm_head", "model.lm_head", "lm_head"]


ALL = SimpleNamespace(target_modules=None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(enable_eplb=True), "EPLB"),
        (dict(use_all2all_kernels=True, all2all_backend="deepep_low_latency"), "deepep_low_latency.*allgather"),
        (
            dict(lora=ALL, older="0.31.2"),
            "vLLM 0.31.2 requests cannot.*vLLM 0.32.*--lora-target.*adapter.*FOLDER",
        ),
        (
            dict(lora=ALL, adapter=True),
            "is for all requests.*leave out the former, or add --lora-target",
        ),
        (dict(lora=SimpleNamespace(target_modules=["a.experts"]), dp_size=2), "tokens of several ranks.*--tensor-par"),
        (dict(lora=ALL, is_sequence_parallel=True), "tokens of several ranks"),
        (dict(lora=ALL, pcp_size=2), "tokens of several ranks"),
        (dict(lora=ALL, dbo=True), "--enable-dbo: leave it out"),
        (dict(fused=1), "shared experts fused"),
        (dict(on_input=True), "router weights on the input, with 2"),
        (dict(width=32), "100 channels.*2 ranks"),
        (dict(backend="marlin"), "--moe-backend marlin.*leave it out"),
        (dict(invariant="1"), "VLLM_BATCH_INVARIANT=1: kernels of 4-bit layers depend on how many.*unset it"),
        (dict(offload=4), "--cpu-offload-gb.*do not find 4-bit weights.*cpu_experts"),
        (dict(groups=2), "--offload-group-size do not find"),
    ],
)
def test_what_is_not_built_is_refused_by_name(monkeypatch, changes, text):
    def layer(
        lora=None,
        fused=0,
        on_input=False,
        width=50,
        dbo=False,
        backend="auto",
        invariant="0",
        offload=0,
        groups=0,
        **changes,
    ):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
        plain = dict(enable_eplb=False, use_all2all_kernels=False, all2all_backend="", use_ag_rs_all2all_kernels=False,
                     dp_size=1, pcp_size=1, is_sequence_parallel=False)  # fmt: skip
        parallel = SimpleNamespace(**plain | changes)
        moe = SimpleNamespace(moe_parallel_config=parallel, experts_per_token=2, intermediate_size=100, tp_size=2,
                              intermediate_size_per_partition=width, moe_backend=backend)  # fmt: skip
        weights = SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=offload),
                                  prefetch=SimpleNamespace(offload_group_size=groups))  # fmt: skip
        monkeypatch.setattr(engine, "get_current_vllm_config", lambda: SimpleNamespace(
            lora_config=lora, parallel_config=SimpleNamespace(use_ubatching=dbo), offload_config=weights,
            kernel_config=None))  # fmt: skip
        return SimpleNamespace(moe_config=moe, layer_name="layer", activation=SimpleNamespace(value="silu"),
                               apply_router_weight_on_input=on_input,
                               expert_map_manager=SimpleNamespace(num_fused_shared_experts=fused))  # fmt: skip

    engine.refuse(layer())
    engine.refuse(layer(lora=SimpleNamespace(target_modules=["q_proj"])))
    changes = dict(changes)
    adapter = changes.pop("adapter", False)
    monkeypatch.setattr(vllm, "__version__", changes.pop("older", "0.33.0"))
    with pytest.raises((NotImplementedError, ValueError), match=f"layer: .*{text}"):
        engine.refuse(layer(**changes), adapter=adapter)
    if changes.keys() & {"invariant", "offload", "groups"}:
        with pytest.raises(NotImplementedError, match=f"q_proj: .*{text}"):
            engine.refuse_linear("q_proj")


# ---------------------------------------------------------------- vLLM without the plug-in
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_vllms_own_reader_leaves_dense_modules_alone(folders, dialect):
    """It fuses q, k and v, and reads every module as 4-bit that the ignore list does not name."""
    quantization = json.loads((folders / dialect / "config.json").read_text())["quantization_config"]
    base, fused = engine.base_config(quantization), {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    base.packed_modules_mapping = fused
    if dialect == "modelopt":
        excluded = base.is_layer_excluded
    else:
        from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

        excluded = lambda module: should_ignore_layer(module, ignore=base.ignore, fused_mapping=fused)
    for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate"):
        assert excluded(f"model.layers.0.{module}"), module
    assert excluded("lm_head") and not excluded("model.layers.0.mlp.experts.0.gate_proj")


def test_vllms_own_kernels_read_the_right_numbers(folders):
    """They use gate's global scale for up too; in our files both are the same."""
    files = tensors(folders / "modelopt")
    stems = [name.removesuffix("gate_proj.weight_scale_2") for name in files if "gate_proj.weight_scale_2" in name]
    assert len(stems) == 16
    for stem in stems:
        assert torch.equal(files[f"{stem}gate_proj.weight_scale_2"], files[f"{stem}up_proj.weight_scale_2"])
    bf16 = tensors(folders / "bf16")
    gate, up = (bf16[f"{stems[0]}{part}.weight"] for part in ("gate_proj", "up_proj"))
    assert torch.equal(quantize_matrix(torch.cat([gate, up]))[2], files[f"{stems[0]}up_proj.weight_scale_2"])


# ---------------------------------------------------------------- the server
IN_VLLM = SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def words(tokens):
    return " ".join(f"t{token}" for token in tokens)


# Half a minute each, and in the engine itself they are tested above: by hand.
OTHERS = [pytest.param(form, marks=pytest.mark.slow) for form in ("bf16", "compressed-tensors")]


@pytest.mark.parametrize("form", ["modelopt", *OTHERS])
def test_serve(folders, form):
    """Tokens and log-probabilities through the openai client, in a stream, and from 32 requests at once."""
    from openai import OpenAI

    tokens, logprobs = by_transformers(folders / ("modelopt" if form == "bf16" else form))
    with Server(folders / form, "--dtype", "float32", "--max-model-len", "64", "--enforce-eager",
                "--served-model-name", "tiny", engine="vllm", env=IN_VLLM) as server:  # fmt: skip
        assert server.wait(), server.log.read_text()[-3000:]
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
            ask = partial(client.completions.create, model="tiny", temperature=0, max_tokens=NEW, seed=0,
                          extra_body={"ignore_eos": True})  # fmt: skip
            whole = ask(prompt=PROMPTS[0], echo=True, logprobs=1).choices[0]
            assert whole.text.split() == words(PROMPTS[0] + tokens[0]).split()
            found = torch.tensor(whole.logprobs.token_logprobs[1 : len(PROMPTS[0])])
            assert torch.allclose(found, torch.tensor(logprobs[0]), atol=1e-4, rtol=0)

            pieces = [event.choices[0].text for event in ask(prompt=PROMPTS[1], stream=True)]
            assert len(pieces) > 1  # on a busy machine tokens that wait for the client come as one piece
            assert "".join(pieces).split() == words(tokens[1]).split()

            if form != "bf16":  # of which there are no files to verify
                (folders / "text").write_text(words(i for prompt in PROMPTS for i in prompt))
                asked = ["verify", "--server", server.url, "--text", folders / "text", "--tokens", 24, folders / form]
                assert cli.main([str(a) for a in asked]) == 0

            with ThreadPoolExecutor(32) as pool:
                answers = list(pool.map(lambda i: ask(prompt=PROMPTS[i % 8]).choices[0].text, range(32)))
        for i, answer in enumerate(answers):
            assert answer.split() == words(tokens[i % 8]).split(), i
        if form == "modelopt":
            _a_killed_worker_ends_the_server(server.process)


def test_serve_on_two_machines(folders):
    """The commands of docs/serving.md, here on one machine, with a rank each."""
    path = folders / "modelopt"
    options = ("--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--tensor-parallel-size", "2",
               "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))  # fmt: skip
    node = partial(Server, path, *options, engine="vllm", env=IN_VLLM)
    with node("--node-rank", "0") as first, node("--node-rank", "1", "--headless", log="second.log") as second:
        assert first.wait(), first.log.read_text()[-3000:] + second.log.read_text()[-3000:]
        ask = {"model": str(path), "prompt": words(PROMPTS[0]), "max_tokens": NEW, "ignore_eos": True}
        text = first.post("/v1/completions", **ask)["choices"][0]["text"]
        assert text.split() == words(by_transformers(path)[0][0]).split()


def _a_killed_worker_ends_the_server(process):
    import psutil

    for child in psutil.Process(process.pid).children(recursive=True):
        if "EngineCore" in " ".join(child.cmdline()):
            child.kill()
            break
    else:
        raise AssertionError("the server has no EngineCore process")
    process.wait(120)


def test_the_server_of_transformers(folders):
    """It reads the same folder, because our package is imported first."""
    path = folders / "modelopt"
    tokens, _ = by_transformers(path)
    with Server(path, "--dtype", "float32") as server:
        assert server.wait(), server.log.read_text()[-3000:]
        for prompt, expected in zip(PROMPTS[:2], tokens[:2], strict=True):
            answer = server.post("/v1/completions", model=str(path), prompt=words(prompt), max_tokens=NEW)
            found = answer["choices"][0]["text"].split()
            assert found == words(expected).split()[: len(found)]
            assert len(found) == NEW or expected[len(found)] == 2  # it stops at the end token


def test_a_broken_folder_is_explained_before_a_worker_starts(folders, tmp_path):
    from safetensors.torch import save_file
    from vllm.engine.arg_utils import EngineArgs

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (folders / "modelopt").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    files = tensors(broken)
    del files["model.layers.1.mlp.experts.5.up_proj.weight_scale_2"]
    save_file(files, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.5\.up_proj\.weight_scale_2 is missing"):
        EngineArgs(str(broken), dtype="float32", skip_tokenizer_init=True).create_engine_config()
