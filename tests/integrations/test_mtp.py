"""Multi-token prediction layers, which transformers reads from the files for generate(use_mtp=True)."""

import copy
import json

import pytest
import safetensors
import torch
import transformers
from safetensors.torch import save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import matches
from moe_nvfp4.quantize.options import Options
from tests import checkpoints
from tests.folders import CONFIGS, as_published, stored, write
from tests.models import IDS, SMALL, as_bytes, load, make, nemotron_h, step3p7, tensors

H, LAYER = SMALL["hidden_size"], "model.layers.2."
GREEDY = dict(max_new_tokens=12, do_sample=False)


def glm4_moe():
    return Glm4MoeForCausalLM(Glm4MoeConfig(
        **SMALL, intermediate_size=96, moe_intermediate_size=48, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, num_mtp_layers=1))  # fmt: skip


def tensors_of(path):
    with safetensors.safe_open(path, "pt") as file:
        return [*file.keys()]


@pytest.fixture
def source(tmp_path):
    """A model with two layers and a third for multi-token prediction, as GLM-4.5 has a 47th after 46: that number is in
    transformers' class, and this one is not."""
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
    again.save_pretrained(folder)  # over the files that it was loaded from, and once more
    again.save_pretrained(folder)
    assert {n: as_bytes(t) for n, t in tensors(folder).items() if n.startswith(LAYER)} == {
        n: as_bytes(t) for n, t in kept.items()
    }


def step3p7_with_a_tall_tower():
    """Two layers and a vision tower of four, as Step-3.7 has 45 and 47. The model itself names what it leaves out."""
    config = step3p7().config.to_dict()
    config["vision_config"]["num_hidden_layers"] = 4
    config["text_config"]["num_nextn_predict_layers"] = 1
    return transformers.Step3p7ForConditionalGeneration(transformers.Step3p7Config(**config))


def hy_v4():
    """Files have other names than the model, for parts of layers too: hc_mlp_layer.hc_pre.hc_fn is ffn_hc.fn."""
    if not hasattr(transformers, "HYV4ForCausalLM"):
        pytest.skip("this transformers does not have HY-V4")
    return transformers.HYV4ForCausalLM(transformers.HYV4Config(
        **SMALL | dict(num_key_value_heads=4), intermediate_size=96, moe_intermediate_size=48, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16))  # fmt: skip


@pytest.mark.parametrize("family, layer", [(step3p7_with_a_tall_tower, LAYER), (hy_v4, "model.mtp_layers.0.")])
def test_conversion_and_saving_keep_every_byte_and_name(family, layer, tmp_path):
    model = make(family)
    model.save_pretrained(tmp_path / "bf16")
    as_published(tmp_path / "bf16")
    files = tensors(tmp_path / "bf16")
    mtp = {layer + n.partition(".layers.1.")[2]: t.clone() for n, t in files.items() if n.startswith("model.layers.1.")}
    save_file(files | mtp, tmp_path / "bf16/model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4", Options("max", linears="all"), progress=False)
    loaded = {"made": dict(quantization_config=MoeNvfp4Config(recipe="max")), "nvfp4": {}}
    for name, kwargs in loaded.items():
        source = tmp_path / ("bf16" if name == "made" else name)
        type(model).from_pretrained(source, dtype=torch.bfloat16, **kwargs).save_pretrained(tmp_path / f"{name} saved")
    assert len(mtp) > 10
    for name in ("nvfp4", "nvfp4 saved", "made saved"):
        kept = {n: as_bytes(t) for n, t in tensors(tmp_path / name).items() if n.startswith(layer)}
        assert kept == {n: as_bytes(t) for n, t in mtp.items()}, name


def test_names_that_saving_would_change_are_missed_aloud(tmp_path, caplog):
    """transformers saves what begins with "model." in a Nemotron-H as "backbone."; real files have "mtp." here."""
    model = make(nemotron_h)
    model.save_pretrained(tmp_path / "bf16")
    files = tensors(tmp_path / "bf16") | {"model.mtp_layers.0.norm.weight": torch.ones(H)}
    save_file(files, tmp_path / "bf16/model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path / "bf16", quantization_config=MoeNvfp4Config(recipe="max"))
    model.save_pretrained(tmp_path / "saved")
    assert "1 tensors of multi-token prediction layers are not saved (model.mtp_layers.0.norm.weight" in caplog.text
    assert not any("mtp" in name for name in tensors(tmp_path / "saved"))


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


@pytest.mark.parametrize("prefix", ["mtp.layers.0", "model.mtp_layers.0"])
def test_saving_keeps_layers_that_the_class_does_not_know(prefix, source, tmp_path):
    """GLM-4.5's are after the last, and transformers' class has no pattern for "mtp"."""
    files = {n.replace(LAYER.removesuffix("."), prefix): t for n, t in tensors(source).items()}
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    load(source, quantization_config=MoeNvfp4Config()).save_pretrained(tmp_path / "saved")
    kept = {name: t for name, t in tensors(tmp_path / "saved").items() if name.startswith(prefix)}
    assert f"{prefix}.eh_proj.weight" in kept and len(kept) == sum(name.startswith(prefix) for name in files)
    assert all(as_bytes(t) == as_bytes(files[name]) for name, t in kept.items())


@pytest.mark.parametrize("now", ["is gone", "holds something else now", "has 3 layers, and had 2"])
def test_layers_whose_files_are_gone_are_missed_aloud(now, source, tmp_path, caplog):
    model, files = load(source, quantization_config=MoeNvfp4Config()), tensors(source)
    if "layers" in now:  # the new one has their number
        model.model.layers.append(copy.deepcopy(model.model.layers[1]))
        model.config.num_hidden_layers = 3
    else:
        (source / "model.safetensors").unlink()
    if "else" in now:  # another version of the model
        save_file({n: t * 2 for n, t in files.items()}, source / "model.safetensors", metadata={"format": "pt"})
    model.save_pretrained(tmp_path / "saved")
    assert "27 tensors of multi-token prediction layers are not saved" in caplog.text and now in caplog.text
    kept = {name: t for name, t in tensors(tmp_path / "saved").items() if name.startswith(LAYER)}
    if "layers" in now:
        assert torch.equal(kept[f"{LAYER}self_attn.q_proj.weight"], model.model.layers[2].self_attn.q_proj.weight)
    assert not any("eh_proj" in name for name in kept) and bool(kept) == ("layers" in now)
    ignore = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]["ignore"]
    packed = [n for n, t in tensors(tmp_path / "saved").items() if t.dtype == torch.uint8]
    assert packed and not any(matches(p, n.removesuffix(".weight")) for n in packed for p in ignore)


def test_layers_stay_in_a_sharded_folder_that_is_saved_over(source, tmp_path, caplog):
    """Again and again, and where a shard without them is gone."""
    load(source, quantization_config=MoeNvfp4Config()).save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    folder = tmp_path / "shards"
    model = load(folder)
    files = {path: tensors_of(path) for path in sorted(folder.glob("*.safetensors"))}
    alone = next(path for path, names in files.items() if not any(name.startswith(LAYER) for name in names))
    alone.unlink()
    for _ in range(3):
        model.save_pretrained(folder)
        assert sum(name.startswith(LAYER) for name in tensors(folder)) == 27
    assert "not saved" not in caplog.text
