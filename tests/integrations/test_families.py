"""Every experts class of the installed transformers, against its own eager forward.

The classes are discovered from the package's source, so a new family is tested the day it appears.
Each is built small, its weights are replaced by what their NVFP4 form holds, and its eager forward
on those dense weights is compared with the 4-bit module's.
"""

import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.integrations.huggingface import swap_experts
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.recognise import describe
from tests.common import THRESHOLDS, relative_error

MODELS = Path(transformers.__file__).parent / "models"
E, H, I, K = 4, 64, 32, 2
DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
ADAPTED = [
    ("step3p7", "Step3p7Experts"), ("longcat_flash", "LongcatFlashExperts"),
    ("llama4", "Llama4TextExperts"), ("dbrx", "DbrxExperts"),
]  # fmt: skip


def decorated_classes():
    found = []
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for name in DECORATED.findall(path.read_text()):
            found.append((path.parent.name, path.stem, name))
    return found


CLASSES = decorated_classes()


class Config(SimpleNamespace):
    """A config with any attribute: sizes are guessed from names, activations come from the real config."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        real = self.__dict__.get("_real")
        if "expert" in name and not re.search("size|dim|intermediate", name):
            return E
        if re.search(r"intermediate|ffn|inter_size|expert_dim|expert_hidden", name):
            return I
        if name == "moe_latent_size":
            return None
        if re.search(r"hidden_size|hidden_dim|d_model|n_embd", name):
            return H
        if real is not None and hasattr(real, name):
            return getattr(real, name)
        raise AttributeError(name)


def real_config(module):
    """A default config of the module's family that names its activation."""
    family = module.__name__.rsplit(".", 1)[0]
    configuration = [m for m in dir(importlib.import_module(family)) if m.endswith("Config")]
    configs = []
    for name in sorted(configuration, key=lambda n: ("Text" not in n, n)):
        try:
            configs.append(getattr(importlib.import_module(family), name)())
        except Exception:  # a config that needs arguments
            continue
    merged = SimpleNamespace()
    for config in reversed(configs):
        for key in dir(config):
            if not key.startswith("_"):
                try:
                    setattr(merged, key, getattr(config, key))
                except Exception:  # a property of another kind of model
                    continue
    return merged


def build(module, name):
    cls = getattr(module, name)
    config = Config(_real=real_config(module), _experts_implementation="eager")
    extra = {}
    for p in list(inspect.signature(inspect.unwrap(cls.__init__)).parameters.values())[2:]:
        if p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD:
            extra[p.name] = Config().__getattr__(p.name)
    torch.manual_seed(0)
    experts = cls(config, **extra)
    with torch.no_grad():
        for p in experts.parameters():
            nn.init.normal_(p, std=0.3)
    return experts.eval()


def dequantized(packed, layout):
    """The dense weights that the 4-bit module stands for, [out, in] per expert."""
    w = packed.weights
    for e in range(w.num_experts):
        parts = [w.w13.global_scale[e]] if w.w13.gate_scale is None else [w.w13.gate_scale[e], w.w13.global_scale[e]]
        rows = w.w13.codes[e].chunk(len(parts)), w.w13.sf[e].chunk(len(parts))
        w13 = torch.cat([nvfp4.dequantize(c, s, g) for c, s, g in zip(*rows, parts, strict=True)])
        w2 = nvfp4.dequantize(w.w2.codes[e], w.w2.sf[e], w.w2.global_scale[e])
        yield w13[:, : layout.hidden_size], w2[:, : layout.intermediate_size]


def write_back(experts, layout, packed):
    """Write dequantized weights into the dense module, in a layout that is written out here independently."""
    with torch.no_grad():
        for e, (w13, w2) in enumerate(dequantized(packed, layout)):
            if hasattr(experts, "mlp"):  # dbrx
                F = layout.intermediate_size
                experts.mlp.w1[e * F : (e + 1) * F] = w13[:F]
                experts.mlp.v1[e * F : (e + 1) * F] = w13[F:]
                experts.mlp.w2[e * F : (e + 1) * F] = w2.T
                continue
            up = experts.gate_up_proj if layout.gated else experts.up_proj
            if type(experts).__name__ == "GptOssExperts":
                half = w13.shape[0] // 2
                up[e, :, 0::2], up[e, :, 1::2] = w13[:half].T, w13[half:].T
            else:
                up[e] = w13.T if layout.transposed else w13
            experts.down_proj[e] = w2.T if layout.transposed else w2


def swapped(experts):
    layout = describe(experts)
    holder = nn.Module()
    holder.experts = experts
    swap_experts(holder, progress=False)
    assert isinstance(holder.experts, HFExperts)
    write_back(experts, layout, holder.experts)
    return holder.experts, layout


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("family, file, name", CLASSES, ids=[c[2] for c in CLASSES])
def test_decorated_class_equals_its_eager_forward(family, file, name):
    module = importlib.import_module(f"transformers.models.{family}.{file}")
    experts = build(module, name)
    packed, layout = swapped(experts)
    assert layout.num_experts == E and {layout.hidden_size, layout.intermediate_size} <= {H, I}
    torch.manual_seed(1)
    width = layout.hidden_size
    x = torch.randn(11, width) * 3
    ids = torch.rand(11, E).topk(K).indices
    ids[:, 1] = torch.where(ids[:, 1] == 3, ids[:, 0], ids[:, 1])  # expert 3 gets fewer tokens
    ids[0] = torch.tensor([0, 1])
    p = torch.rand(11, K)
    with torch.no_grad():
        expected = experts(x, ids, p)
        actual = packed(x, ids, p)
    assert actual.shape == expected.shape and expected.abs().sum() > 0
    assert relative_error(actual, expected) <= THRESHOLDS["fp32"]


def test_every_family_is_here():
    assert len(CLASSES) >= 50, "the decorator is no longer found in the source: look at DECORATED"


@pytest.mark.parametrize("family, name", ADAPTED, ids=[c[1] for c in ADAPTED])
def test_adapted_class_equals_its_forward(family, name):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    settings = dict(
        hidden_act="silu", num_local_experts=E, hidden_size=H, intermediate_size=I,
        moe_intermediate_size=I, expert_ffn_hidden_size=I, n_routed_experts=E, zero_expert_num=2,
        moe_num_experts=E, ffn_hidden_size=I, ffn_act_fn={"name": "silu"},
    )  # fmt: skip
    extra = [{}, {"swiglu_limit": 0.4}] if name == "Step3p7Experts" else [{}]
    for kwargs in extra:
        torch.manual_seed(0)
        experts = getattr(module, name)(SimpleNamespace(**settings), **kwargs)
        for param in experts.parameters():
            nn.init.normal_(param, std=0.3)
        packed, layout = swapped(experts)
        assert packed.gate.kind == "silu", "the gate should be recognised, and so fused"
        x, p = torch.randn(11, H) * 3, torch.rand(11, K)
        ids = torch.rand(11, E + (2 if name == "LongcatFlashExperts" else 0)).topk(K).indices
        args = (x, ids, p)
        if name == "Llama4TextExperts":
            chosen = torch.zeros(E, 11, 1).scatter_(0, ids.T[:1, :, None], 0.7)
            args = ((x[None] * chosen).reshape(E * 11, H),)
        elif name == "DbrxExperts":  # called with [batch, sequence, hidden]
            args = (x[None], ids, p)
        with torch.no_grad():
            assert relative_error(packed(*args), experts(*args)) <= THRESHOLDS["fp32"]


@pytest.mark.slow
def test_gates_are_recognised_by_what_they_compute():
    kinds = {}
    for family, file, name in CLASSES:
        experts = build(importlib.import_module(f"transformers.models.{family}.{file}"), name)
        packed, _ = swapped(experts)
        kinds[name] = packed.gate
    raw = {name for name, gate in kinds.items() if gate.kind == "raw"}
    assert raw <= {"Inkling2Experts", "Inkling2LoopExperts"}, f"{raw} run unfused"
    oai = {n for n, g in kinds.items() if g.alpha != 1.0}
    assert {"GptOssExperts", "OpenAIPrivacyFilterExperts"} <= oai
    assert kinds["GptOssExperts"].limit == 7.0 and kinds["GptOssExperts"].up_offset == 1.0
    assert kinds["NemotronHExperts"].kind == "relu2"
    assert {n for n, g in kinds.items() if g.kind == "gelu_tanh"} >= {"Gemma4TextExperts"}


REFUSED = [
    ("jetmoe", "JetMoe", dict(num_local_experts=2, intermediate_size=32)),
    ("switch_transformers", "SwitchTransformers", dict(num_experts=2, d_ff=32, d_kv=8, num_layers=2)),
    ("nllb_moe", "NllbMoe", dict(num_experts=2, encoder_ffn_dim=32, decoder_ffn_dim=32, d_model=16,
     encoder_layers=2, decoder_layers=2, encoder_sparse_step=1, decoder_sparse_step=1)),
]  # fmt: skip


@pytest.mark.parametrize("family, prefix, settings", REFUSED, ids=[r[0] for r in REFUSED])
def test_unknown_forms_are_refused_by_name(family, prefix, settings):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config_class = getattr(importlib.import_module(f"transformers.models.{family}"), f"{prefix}Config")
    config = config_class(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, **settings)
    model = getattr(module, f"{prefix}Model")(config)
    with pytest.raises(NotImplementedError, match=rf"{prefix}\w*Experts holds experts in a form.*exclude="):
        swap_experts(model, progress=False)


def test_experts_of_liger_are_refused_with_its_switch():
    class LigerExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = (nn.Parameter(torch.zeros(2, *n)) for n in ((64, 32), (32, 32)))

    LigerExperts.__module__ = "liger_kernel.transformers.swiglu"
    with pytest.raises(NotImplementedError, match=r"LigerExperts holds experts .*'swiglu': False"):
        swap_experts(nn.ModuleDict({"mlp": nn.ModuleDict({"experts": LigerExperts()})}), progress=False)


def test_a_list_of_experts_is_refused_by_name():
    """Models of trust_remote_code have such lists; they must not pass for dense models."""
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(16, 16)])})})
    with pytest.raises(NotImplementedError, match=r"mlp.experts, a list of Linear, holds experts in a form.*exclude="):
        swap_experts(model, progress=False)
    with pytest.raises(ValueError, match="1 experts modules are all excluded"):
        swap_experts(model, exclude="mlp.experts", progress=False)


def test_a_dense_model_is_told_so():
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2)  # fmt: skip
    with pytest.raises(ValueError, match="LlamaModel has no experts to quantize"):
        swap_experts(LlamaModel(config), progress=False)


def test_composite_models_are_walked():
    """A vision-language model's text experts are found, whatever their name."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = dict(vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_experts=4,
                num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                head_dim=16, pad_token_id=0)  # fmt: skip
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32,
                  deepstack_visual_indexes=[0])  # fmt: skip
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))
    names = [n for n, m in model.named_modules() if describe(m) is not None]
    swap_experts(model, progress=False)
    assert names == [n for n, m in model.named_modules() if isinstance(m, HFExperts)] and len(names) == 2
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()
