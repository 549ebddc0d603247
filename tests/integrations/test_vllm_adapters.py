"""A LoRA adapter of experts in vLLM: one for all requests answers as PEFT's does under transformers."""

import json

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4.integrations.vllm.adapters import ExpertsAdapter
from tests.models import folder, load, qwen3_moe, tensors

pytest.importorskip("peft")
E, H, I, R = 8, 128, 96, 4
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder in bf16, and adapters of its experts."""
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("adapters")
    folder(root, lambda: qwen3_moe(E, I, head_dim=32, hidden_size=H))
    for name, parameters, more in (("both", BOTH, {}), ("down", BOTH[1:], {"use_rslora": True}),
                                   ("attention", BOTH, {"target_modules": ["q_proj"]})):  # fmt: skip
        config = LoraConfig(**{"r": R, "lora_alpha": 6, "target_modules": [], "target_parameters": parameters,
                               "init_lora_weights": False} | more)  # fmt: skip
        get_peft_model(load(root / "bf16", torch.float32), config).save_pretrained(root / name)
    return root


def whole(adapter, layer=1, **changes):
    given = {"sizes": (E, H, I), "gated": True, "mine": range(E), "tp": (0, 1)} | changes
    return adapter.of(f"model.layers.{layer}.mlp.experts", **given)


def products(adapters):
    return [[a.b.double() @ a.a.double() for a in some] for some in adapters]


def test_what_it_adds_is_what_peft_adds(model):
    """Against PEFT's own sum for a dense parameter (`get_delta_weight`)."""
    from peft import PeftModel

    for name in ("both", "down"):
        peft = PeftModel.from_pretrained(load(model / "bf16", torch.float32), model / name)
        wrapped = peft.base_model.model.model.layers[1].mlp.experts
        want = {}
        while hasattr(wrapped, "parameter_name"):
            want[wrapped.parameter_name] = wrapped.get_delta_weight("default")
            wrapped = wrapped.base_layer
        up, down = products(whole(ExpertsAdapter(str(model / name))))
        found = dict(zip(("gate_up_proj", "down_proj"), (up, down), strict=True))
        assert {key for key, some in found.items() if some} == set(want)
        for key, delta in want.items():
            assert torch.allclose(found[key][0].float(), delta.float(), atol=1e-6, rtol=1e-5), key


def test_parts_of_ranks(model):
    """Channels of each expert, and some of the experts: their sums are parts of the whole's."""
    adapter = ExpertsAdapter(str(model / "both"))
    (up,), (down,) = products(whole(adapter))
    ranks = [products(whole(adapter, tp=(rank, 2))) for rank in range(2)]
    halves = [torch.cat([part[0][0].chunk(2, dim=1)[i] for part in ranks], dim=1) for i in range(2)]
    assert torch.equal(torch.cat(halves, dim=1), up)
    assert torch.equal(torch.cat([part[1][0] for part in ranks], dim=2), down)
    some = products(whole(adapter, mine=[5, 2]))
    assert torch.equal(some[0][0], up[[5, 2]]) and torch.equal(some[1][0], down[[5, 2]])
    assert whole(adapter, layer=7) == ((), ())
    assert adapter.changes("model.layers.1.mlp.experts") and not adapter.changes("model.layers.7.mlp.experts")


def changed(model, path, change, **said):
    path.mkdir()
    files, config = tensors(model / "both"), json.loads((model / "both/adapter_config.json").read_text())
    change(files)
    save_file(files, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config | said))
    return str(path)


A = "base_model.model.model.layers.1.mlp.experts.lora_A.weight"
SAME = lambda files: None  # noqa: E731


@pytest.mark.parametrize(
    ("change", "said", "text"),
    [
        (SAME, {"use_dora": True}, "'use_dora': True.*plain LoRA only.*transformers"),
        (SAME, {"rank_pattern": {"x": 2}}, "rank_pattern"),
        (SAME, {"peft_type": "IA3"}, "peft_type IA3"),
        (lambda files: files.pop(A), {}, "no counterpart lora_A"),
        (
            lambda files: files.update({A: files[A][:-1].clone()}),
            {},
            r"expected rank \* experts = 32 by 128, 192 or by 96",
        ),
        (lambda files: files.update({A: files[A][:, :-1].clone()}), {}, "it is of another model"),
    ],
)
def test_what_it_cannot_be_is_named(model, tmp_path, change, said, text):
    with pytest.raises((ValueError, NotImplementedError), match=text):
        whole(ExpertsAdapter(changed(model, tmp_path / "changed", change, **said)))


def test_other_adapters_are_named(model, tmp_path):
    with pytest.raises(NotImplementedError, match=r"q_proj.*is not of experts.*--enable-lora"):
        ExpertsAdapter(str(model / "attention"))
    with pytest.raises(ValueError, match="adapter 'somewhere': a folder on this machine"):
        ExpertsAdapter("somewhere")
    with pytest.raises(ValueError, match="changes layer 1, and the model has 1 layers"):
        ExpertsAdapter(str(model / "both")).check_layers(1)
    name = "base_model.model.model.layers.1.mlp.experts"
    square = {f"{name}.lora_A.weight": torch.zeros(R * E, H), f"{name}.lora_B.weight": torch.zeros(H, R * E)}
    path = changed(model, tmp_path / "square", lambda files: (files.clear(), files.update(square)))
    with pytest.raises(NotImplementedError, match="does not say what is in and what is out"):
        whole(ExpertsAdapter(path), sizes=(E, H, H // 2))


# ---------------------------------------------------------------- in vLLM
def test_answers(model, tmp_path):
    """As PEFT's: on an NVFP4 folder, on bf16 experts quantized as they load, and on two ranks that split experts'
    channels or the experts. Without the adapter they are others."""
    pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
    from moe_nvfp4.quantize.convert import convert_checkpoint
    from tests.integrations.test_vllm import by_transformers, same
    from tests.integrations.vllm_engine import generate, on_two_ranks

    convert_checkpoint(model / "bf16", tmp_path / "nvfp4", progress=False)
    options = {"hf_overrides": {"moe_nvfp4": {"adapter": str(model / "both")}}}
    want = by_transformers(tmp_path / "nvfp4", adapter=model / "both")
    same(generate(tmp_path / "nvfp4", **options), want)
    same(generate(model / "bf16", quantization="moe_nvfp4", **options), want)
    with pytest.raises(AssertionError):
        same(generate(tmp_path / "nvfp4"), want, prompts=1)
    two = options | {"tensor_parallel_size": 2}
    forms = {
        "tensors": (tmp_path / "nvfp4", two),
        "experts": (tmp_path / "nvfp4", two | {"enable_expert_parallel": True}),
    }
    for ranks in on_two_ranks(forms, tmp_path).values():
        for found in ranks:
            same(found, want)
