"""Static activation scales after a few prompts, against scales measured by hand on the dense weights."""

import json

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from moe_nvfp4.calibrate import observe
from moe_nvfp4.integrations.huggingface import (
    MoeNvfp4Config,
    calibrate,
    checkpoint_config,
    set_activations,
    swap_experts,
)
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.swap import _without_padding
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.common import relative_error
from tests.folders import is_expert, is_linear, quantized
from tests.models import IDS, diffusion_gemma, gpt_oss, llama4, make, mixtral, nemotron_h, qwen3_moe, tensors

PROMPTS = [IDS, torch.tensor([[5, 6, 7]]), {"input_ids": torch.tensor([[9, 1, 30, 31], [8, 8, 2, 1]])}]


def load(path, **kwargs):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kwargs).eval()


def logits(model, activations):
    with torch.no_grad():
        return set_activations(model, activations)(IDS).logits


def measured(twin, prompts):
    """amax of x and of h of each MoE layer of a dense Qwen3-MoE, expert by expert in float64."""
    found = {}

    def hook(name, module):
        def before(module, args):
            x, ids, _ = (a.double() for a in args)
            seen = found.setdefault(name, [0.0, 0.0])
            seen[0] = max(seen[0], x.abs().max().item())
            for e in range(module.num_experts):
                rows = x[(ids == e).any(dim=1)]
                gate, up = (rows @ module.gate_up_proj[e].double().T).chunk(2, dim=1)
                if len(rows):
                    seen[1] = max(seen[1], (F.silu(gate) * up).abs().max().item())

        module.register_forward_pre_hook(before)

    for name, module in twin.named_modules():
        if name.endswith("mlp.experts"):
            hook(name, module)
    for prompt in prompts:
        with torch.no_grad():
            twin(**(prompt if isinstance(prompt, dict) else {"input_ids": prompt}))
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_scales_are_what_the_prompts_produce(dialect, tmp_path):
    folder, twin = quantized(tmp_path, qwen3_moe, dialect)
    model = calibrate(load(folder), PROMPTS, progress=False)
    for name, amax in measured(load(twin), PROMPTS).items():
        experts = model.get_submodule(name)
        assert experts.activations == "nvfp4" and experts.observer is None
        for projection, largest in zip(("up_proj", "down_proj"), amax, strict=True):
            scales = getattr(experts, f"{projection}_input_scale")
            assert scales.shape == (8,) and not scales.requires_grad
            torch.testing.assert_close(scales, torch.full((8,), largest / 2688), rtol=1e-5, atol=0)

    model.save_pretrained(tmp_path / "static")
    files = tensors(tmp_path / "static")
    last = "input_scale" if dialect == "modelopt" else "input_global_scale"
    assert sum(name.endswith(last) for name in files) == 2 * 8 * 3
    config = json.loads((tmp_path / "static/config.json").read_text())["quantization_config"]
    if dialect == "modelopt":
        assert config["quant_algo"] == "NVFP4"
    else:
        assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    assert torch.equal(logits(load(tmp_path / "static"), "nvfp4"), logits(model, "nvfp4"))


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_linears_get_a_scale_too_where_they_have_none(dialect, tmp_path):
    """Without one the folder would say W4A4 of these layers, and vLLM would read uninitialized memory."""
    which = lambda key: is_expert(key) or is_linear(key)
    folder, twin = quantized(tmp_path, qwen3_moe, dialect, which)
    config = checkpoint_config(folder, activations="bf16")
    model, twin, seen = load(folder, config=config), load(twin), {}
    for name, module in twin.named_modules():
        if isinstance(module, torch.nn.Linear):
            note = lambda m, x, name=name: seen.update({name: max(x[0].abs().max().item(), seen.get(name, 0.0))})
            module.register_forward_pre_hook(note)
    measured(twin, PROMPTS)
    calibrate(model, PROMPTS, progress=False)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, NVFP4Linear)}
    assert len(linears) == 8 and all(m.observer is None for m in linears.values())
    for name, linear in linears.items():
        torch.testing.assert_close(linear.input_scale, torch.tensor([seen[name] / 2688]), rtol=1e-4, atol=0)
    model.save_pretrained(tmp_path / "static")
    assert not any("input" in warning for warning in verify_checkpoint(tmp_path / "static").warnings)
    again = load(tmp_path / "static")
    for name, linear in linears.items():  # a reciprocal's reciprocal may be the next number
        torch.testing.assert_close(again.get_submodule(name).input_scale, linear.input_scale, rtol=2**-23, atol=0)
    assert dialect == "compressed-tensors" or torch.equal(logits(again, "nvfp4"), logits(model, "nvfp4"))
    calibrate(set_activations(again, "nvfp4"), PROMPTS, progress=False)  # linears that have a scale do not round either
    for name, experts in model.named_modules():
        if isinstance(experts, HFExperts):
            for key in ("up_proj_input_scale", "down_proj_input_scale"):
                torch.testing.assert_close(getattr(again.get_submodule(name), key), getattr(experts, key), rtol=2**-23,
                                           atol=0)  # fmt: skip
    seen.clear()  # again, with less: nothing is left of the first time, except where nothing comes
    measured(twin, PROMPTS[1:2])
    last = linears.pop("model.layers.1.self_attn.o_proj")
    last.register_forward_pre_hook(lambda m, args: (args[0] * 0,))
    kept = last.input_scale.clone()
    calibrate(model, PROMPTS[1:2], progress=False)
    for name, linear in linears.items():
        torch.testing.assert_close(linear.input_scale, torch.tensor([seen[name] / 2688]), rtol=1e-4, atol=0)
    assert torch.equal(last.input_scale, kept)


def test_one_token_is_enough_for_every_expert(tmp_path):
    """It reaches two of eight experts, but all of them get the layer's scale."""
    batches = [{"input_ids": torch.tensor([[3]]), "use_cache": False}]  # inputs need not be tensors
    model = calibrate(swap_experts(make(qwen3_moe).float(), progress=False), batches, progress=False)
    for experts in (m for m in model.modules() if isinstance(m, HFExperts)):
        assert experts.weights.validate().x_scale.unique().numel() == 1
        assert experts.weights.h_scale.unique().numel() == 1


def test_a_model_in_train_mode_is_calibrated_without_dropout():
    """Afterwards every module has its own mode again."""
    models = [swap_experts(make(qwen3_moe).float(), progress=False) for _ in range(2)]
    models[1].train().model.layers[0].eval()
    modes = [m.training for m in models[1].modules()]
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.9
        calibrate(model, PROMPTS, progress=False)
    assert [m.training for m in models[1].modules()] == modes
    for a, b in zip(*(m.state_dict().values() for m in models), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, llama4, gpt_oss], ids=lambda f: f.__name__)
def test_padding_does_not_count(family):
    """Prompts of several lengths in one batch, as a tokenizer pads them, are as good as one by one."""
    models = [swap_experts(make(family).float(), progress=False) for _ in range(3)]
    for model in models:
        with torch.no_grad():
            padding = model.get_input_embeddings().weight[0]
            padding.zero_()[:1] = 1000.0  # one column that is larger than any of the tokens', behind any norm
    ids, mask = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)
    ids[0], ids[1, :3] = IDS[0], torch.tensor([5, 6, 7])
    mask[0], mask[1, :3] = 1, 1
    calibrate(models[0], [IDS, ids[1:, :3]], progress=False)
    calibrate(models[1], [{"input_ids": ids, "attention_mask": mask}], progress=False)
    calibrate(models[2], [ids], progress=False)  # which are tokens, for all that is said
    scales = [{n: p for n, p in model.named_parameters() if n.endswith("input_scale")} for model in models]
    for name, scale in scales[0].items():
        torch.testing.assert_close(scales[1][name], scale, rtol=1e-4, atol=0)
    assert any(not torch.allclose(scales[2][name], scale, rtol=0.1) for name, scale in scales[0].items())


def test_routing_may_be_given_by_name_in_any_order():
    models, scales = [swap_experts(make(qwen3_moe).float(), progress=False) for _ in range(2)], []
    mlp = models[1].model.layers[0].mlp
    mlp.experts = Named(mlp.experts)
    for model in models:
        calibrate(model, PROMPTS, progress=False)
        scales.append([p for n, p in model.named_parameters() if n.endswith("input_scale")])
    assert all(torch.equal(a, b) for a, b in zip(*scales, strict=True)) and len(scales[0]) == 4


def test_hooks_see_the_arguments_as_in_other_calls():
    model, seen = swap_experts(make(qwen3_moe), progress=False), []
    for module in (model.model.layers[0].mlp.experts, Named(model.model.layers[1].mlp.experts).inside):
        module.register_forward_hook(lambda m, args, kwargs, y: seen.append((len(args), [*kwargs])), with_kwargs=True)
    model(PROMPTS[0])
    before = list(seen)
    model.model.layers[1].mlp.experts = Named(model.model.layers[1].mlp.experts)
    calibrate(model, PROMPTS[:1], progress=False)
    assert before == [(3, []), (3, [])]
    assert seen[2] == (3, []) and seen[3][0] == 0 and sorted(seen[3][1]) == [
        "hidden_states", "top_k_index", "top_k_weights",
    ]  # fmt: skip


class Named(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.inside = experts

    def forward(self, x, index, weights):
        return self.inside(top_k_weights=weights, top_k_index=index, hidden_states=x)


def test_what_no_row_reaches_has_no_scale():
    """Rows that are routed to no expert are zeros behind the first product."""
    layer = swap_experts(make(qwen3_moe).float(), progress=False).model.layers[0].mlp.experts
    nowhere = torch.full((4, 2), layer.num_experts)
    with pytest.raises(ValueError, match="experts was not reached by any token"):
        observe({"experts": layer}, lambda: layer(torch.ones(4, 64), nowhere, torch.ones(4, 2)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [qwen3_moe, mixtral, gpt_oss, nemotron_h, llama4], ids=lambda f: f.__name__)
def test_static_w4a4_is_about_as_good_as_dynamic(family, tmp_path):
    make(family).save_pretrained(tmp_path / "bf16")
    model = load(tmp_path / "bf16", quantization_config=MoeNvfp4Config(activations="nvfp4"))
    exact, dynamic = logits(model, "bf16"), logits(model, "nvfp4")
    calibrate(model, PROMPTS, progress=False)
    assert torch.equal(logits(model, "bf16"), exact)
    static = logits(model, "nvfp4")
    assert not torch.equal(static, dynamic)
    assert relative_error(static, exact) < 1.5 * relative_error(dynamic, exact) + 0.02
    model.save_pretrained(tmp_path / "static")
    assert torch.equal(logits(load(tmp_path / "static"), "nvfp4"), static)
    calibrate(model, PROMPTS[:1], progress=False)  # again, with other prompts
    model.save_pretrained(tmp_path / "again")
    assert tensors(tmp_path / "again").keys() == tensors(tmp_path / "static").keys()


def test_a_model_on_disk_is_not_calibrated(tmp_path):
    """Its hooks bring the parameters of the files, which the scales are not."""
    swap_experts(make(qwen3_moe), progress=False).save_pretrained(tmp_path / "nvfp4")
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers.0", "lm_head")
    where = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}
    model = load(tmp_path / "nvfp4", device_map=where, offload_folder=tmp_path / "offload")
    before = logits(model, "bf16")
    with pytest.raises(NotImplementedError, match="weights on disk or on meta is not calibrated: load it without"):
        calibrate(model, PROMPTS, progress=False)
    assert torch.equal(logits(model, "bf16"), before)


def test_what_cannot_be_calibrated_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no 4-bit experts: call swap_experts first"):
        calibrate(make(qwen3_moe), PROMPTS)
    model = swap_experts(make(qwen3_moe), progress=False)
    with pytest.raises(ValueError, match="model.layers.0.mlp.experts was not reached by any token"):
        calibrate(model, [], progress=False)
    for wrong, got in ((PROMPTS[0], r"\[\d+\]"), (["some text"], "str")):
        with pytest.raises(TypeError, match=f"batches has {got}: it is a list of token ids"):
            calibrate(model, wrong, progress=False)
    for wrong in (torch.tensor([[3, 96]]), torch.zeros(1, 129, dtype=torch.int64)):
        with pytest.raises(ValueError, match="token ids from 3 to 96|129 tokens in a row"):
            calibrate(model, [wrong], progress=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[17] = float("nan")
    with pytest.raises(ValueError, match="model.layers.0.mlp.experts got activations with NaN or Inf"):
        calibrate(model, PROMPTS, progress=False)
    assert all(m.observer is None for m in model.modules() if isinstance(m, HFExperts))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_four_over_six_travels_with_the_folder(dialect, tmp_path):
    """It rounds rows by another rule, with or without static scales; other programs read plain W4A4 files."""
    folder, _ = quantized(tmp_path, qwen3_moe, dialect)
    model = load(folder)
    w4a4, better = (logits(model, a) for a in ("nvfp4", "nvfp4_four_over_six"))
    assert 0 < relative_error(better, w4a4) < 0.5
    calibrate(model, PROMPTS, progress=False)
    static, better = (logits(model, a) for a in ("nvfp4", "nvfp4_four_over_six"))
    assert 0 < relative_error(better, static) < 0.5
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]
    assert config.pop("moe_nvfp4")["activations"] == "nvfp4_four_over_six" and "four" not in json.dumps(config)
    again = load(tmp_path / "again")
    assert all(m.activations == "nvfp4_four_over_six" for m in again.modules() if isinstance(m, HFExperts))
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, better)
    chosen = load(tmp_path / "again", quantization_config=MoeNvfp4Config(activations="nvfp4"))
    with torch.no_grad():
        assert torch.equal(chosen(IDS).logits, static)


def test_rows_that_are_no_tokens_are_no_padding():
    """Patches of images may be as many as tokens. Of tokens of one kind alone, padding is not known."""
    mask, seen = torch.tensor([[1] * 8, [0] * 5 + [1] * 3]), {}
    layers = {name: nn.Linear(4, 4) for name in ("model.visual.fc", "model.layers.0.fc", "model.layers.0.text")}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda m, args, y, name=name: seen.__setitem__(name, args[0].abs().sum(-1) > 0))
    with _without_padding(layers, mask, {"model.visual.fc"}):
        layers["model.visual.fc"](torch.ones(16, 4))
        layers["model.layers.0.fc"](torch.ones(2, 8, 4))
        with pytest.warns(UserWarning, match="model.layers.0.text gets 12 rows of 16 tokens, and which are padding"):
            layers["model.layers.0.text"](torch.ones(12, 4))
    assert seen["model.visual.fc"].all() and seen["model.layers.0.text"].all()
    assert torch.equal(seen["model.layers.0.fc"], mask.bool())


def test_padding_of_an_encoder_of_text():
    """DiffusionGemma's decoder has inputs of its own, here as many as the prompt has positions."""
    if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
        pytest.skip("this transformers does not have DiffusionGemma")
    models = [swap_experts(make(diffusion_gemma, torch.float32), progress=False) for _ in range(2)]
    prompts = torch.tensor([[5, 6, 7]]), torch.tensor([[9, 1, 30, 31, 8, 22, 2, 1]])
    canvas = torch.arange(16).view(2, 8) + 40
    padded, mask = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        padded[i, 8 - prompt.shape[1] :], mask[i, 8 - prompt.shape[1] :] = prompt[0], 1
    decoder_mask = torch.cat([mask, torch.ones_like(canvas)], dim=1)
    calibrate(models[0], [dict(input_ids=padded, attention_mask=mask, decoder_input_ids=canvas,
                               decoder_attention_mask=decoder_mask)], progress=False)  # fmt: skip
    alone = [dict(input_ids=p, decoder_input_ids=canvas[i : i + 1]) for i, p in enumerate(prompts)]
    calibrate(models[1], alone, progress=False)
    found, want = ({n: p for n, p in m.named_parameters() if n.endswith("_input_scale")} for m in models)
    assert len(want) == 8
    torch.testing.assert_close(found, want, atol=0, rtol=1e-4)


def test_a_towers_scales_count_all_patches():
    """A linear of a tower may have as many rows as there are tokens, of which some are padding."""
    model = swap_experts(make(qwen3_moe, torch.float32), activations="nvfp4", progress=False)
    model.visual = NVFP4Linear(16, 16, activations="nvfp4")
    model.visual.weight_global_scale.fill_(1)
    patches = torch.randn(24, 16)
    patches[0] *= 100
    model.register_forward_pre_hook(lambda m, args: [m.visual(patches)] and None)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :6] = 0
    calibrate(model, [{"input_ids": torch.randint(1, 96, (2, 12)), "attention_mask": mask}], progress=False)
    assert model.visual.input_scale.item() == pytest.approx(patches.abs().max().item() / (6 * 448))


def test_several_models_in_one_are_not_called():
    """Qwen3-Omni has no forward of its own."""
    model = swap_experts(make(qwen3_moe, torch.float32), progress=False)
    model.__class__ = type("Omni", (type(model),), {"forward": nn.Module.forward})
    with pytest.raises(
        NotImplementedError, match=r"Omni has no forward, .* several models in one: model \(Qwen3MoeModel"
    ):
        calibrate(model, [IDS], progress=False)
