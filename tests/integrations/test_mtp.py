"""Multi-token prediction layers, which transformers reads from the files for generate(use_mtp=True)."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import matches
from moe_nvfp4.quantize.options import Options
from tests import checkpoints
from tests.folders import CONFIGS, stored, write
from tests.models import IDS, SMALL, as_bytes, load, make, tensors

H, LAYER = SMALL["hidden_size"], "model.layers.2."
GREEDY = dict(max_new_tokens=12, do_sample=False)


def glm4_moe():
    return Glm4MoeForCausalLM(Glm4MoeConfig(
        **SMALL, intermediate_size=96, moe_intermediate_size=48, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, num_mtp_layers=1))  # fmt: skip


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A model with two layers and a third for multi-token prediction, as GLM-4.5 has a 47th after 46."""
    # transformers has the numbers of the published models' layers here
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    make(glm4_moe).save_pretrained(tmp_path / "bf16")
    files = tensors(tmp_path / "bf16")
    files |= {k.replace(".layers.1.", ".layers.2."): t.clone() for k, t in files.items() if ".layers.1." in k}
    for name, shape in {"enorm": (H,), "hnorm": (H,), "eh_proj": (H, 2 * H), "shared_head.norm": (H,)}.items():
        files[f"{LAYER}{name}.weight"] = (0.2 * torch.randn(shape) + (len(shape) == 1)).bfloat16()
    save_file(files, tmp_path / "bf16/model.safetensors", metadata={"format": "pt"})
    return tmp_path / "bf16"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_drafting_decodes_what_plain_decoding_does_and_saving_keeps_the_layers(source, dialect, tmp_path):
    model = load(source, quantization_config=MoeNvfp4Config(dialect=dialect, recipe="max"))
    expected = model.generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, use_mtp=True, **GREEDY), expected)
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    convert_checkpoint(source, tmp_path / "converted", Options("max", dialect=dialect), progress=False)
    files = tensors(source)
    for folder in (tmp_path / "saved", tmp_path / "converted"):
        kept = {name: t for name, t in tensors(folder).items() if name.startswith(LAYER)}
        assert kept.keys() == {name for name in files if name.startswith(LAYER)}
        assert all(as_bytes(kept[name]) == as_bytes(files[name]) for name in kept)
        ignore = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
        # vLLM has "head" for what is shared_head.head in files
        for name in ("mlp.experts.3.up_proj", "self_attn.q_proj", "eh_proj", "mlp.shared_experts.up_proj", "head"):
            assert any(matches(pattern, LAYER + name) for pattern in ignore), name
        again = load(folder)
        assert torch.equal(again.generate(IDS, **GREEDY), expected)
        assert torch.equal(again.generate(IDS, use_mtp=True, **GREEDY), expected)
    again.save_pretrained(folder)  # over the files that it was loaded from
    assert {n: as_bytes(t) for n, t in tensors(folder).items() if n.startswith(LAYER)} == {
        n: as_bytes(t) for n, t in kept.items()
    }


def test_layers_that_are_4_bit_are_named(source, tmp_path, caplog):
    files = tensors(source)
    for name in [n for n, t in files.items() if ".experts." in n]:
        files |= stored("modelopt", name.removesuffix(".weight"), files.pop(name))
    config = json.loads((source / "config.json").read_text())
    model = load(write(tmp_path / "packed", files, config, CONFIGS["modelopt"]))
    assert f"multi-token prediction are 4-bit ({LAYER}mlp.experts.0." in caplog.text and "use_mtp=True" in caplog.text
    model.save_pretrained(tmp_path / "saved")
    kept = tensors(tmp_path / "saved")
    assert {n: as_bytes(t) for n, t in files.items() if n.startswith(LAYER)} == {
        n: as_bytes(t) for n, t in kept.items() if n.startswith(LAYER)
    }


@pytest.mark.parametrize(
    "prefix", ["mtp.layers.0", "model.mtp.layers.0", "model.mtp_block.0", "model.language_model.mtp_layers.0"]
)
def test_conversion_keeps_layers_of_every_name(prefix, tmp_path):
    files = {n.replace("model.layers.1", prefix): t for n, t in checkpoints.experts(layers=2).items()}
    source = checkpoints.folder(tmp_path / "bf16", files)
    convert_checkpoint(source, tmp_path / "converted", Options("max", linears="attention"), progress=False)
    kept = {name: t for name, t in tensors(tmp_path / "converted").items() if name.startswith(prefix)}
    assert len(kept) == 13 and all(as_bytes(t) == as_bytes(files[name]) for name, t in kept.items())


def test_layers_whose_files_are_gone_are_missed_aloud(source, tmp_path, caplog):
    model = load(source, quantization_config=MoeNvfp4Config())
    (source / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "saved")
    assert "27 tensors of multi-token prediction layers are not saved" in caplog.text
    assert not any(name.startswith(LAYER) for name in tensors(tmp_path / "saved"))
