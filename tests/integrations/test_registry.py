"""Which reader gets which folder: this package's, transformers' own, or that of another package."""

import copy
import importlib.util
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CompressedTensorsConfig, FineGrainedFP8Config
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, register, set_activations, swap_experts, unregister
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.linear import NVFP4Linear
from tests.common import THRESHOLDS, relative_error
from tests.folders import CONFIGS, is_expert, quantized
from tests.models import load, logits, make, qwen3_moe, same_tensors

needs_compressed_tensors = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)


@pytest.fixture
def fresh():
    """transformers' registries as they are before this package is imported; restored afterwards."""
    unregister()
    before = state()
    yield before
    unregister()
    assert state() == before
    register()


def state():
    return (
        dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING), dict(auto.AUTO_QUANTIZER_MAPPING),
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES, dict(ALL_EXPERTS_FUNCTIONS), type(MoeNvfp4Config.__name__),
    )  # fmt: skip


def read(**config):
    return type(auto.AutoQuantizationConfig.from_dict(config)).__mro__


NVFP4 = {
    "modelopt": dict(quant_method="modelopt", quant_algo="NVFP4"),
    "compressed-tensors": dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized", config_groups={}),
    "fp8": dict(quant_method="fp8", moe_quant_algo="NVFP4"),
}


class Theirs(QuantizationConfigMixin):
    """Another package's config."""

    def __init__(self, quant_method="modelopt", **kwargs):
        self.quant_method = quant_method


def test_registering_is_undone_and_may_be_repeated(fresh):
    configs = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    assert not {"modelopt", "moe_nvfp4"} & configs.keys() and configs["fp8"] is FineGrainedFP8Config
    assert configs["compressed-tensors"] is CompressedTensorsConfig
    for _ in range(2):
        register()
        once = state()
        register()
        assert state() == once
        assert all(MoeNvfp4Config in read(**config) for config in NVFP4.values())
        changed = {k for k in configs if configs[k] is not fresh[0].get(k)}
        assert changed == {"modelopt", "moe_nvfp4", "compressed-tensors", "fp8", "mxfp4", "quark"}
        assert MoeNvfp4Config.__name__ == "MoeNvfp4Config", "and that of each config that one may be given in place of"
        assert {"Mxfp4Config", "FineGrainedFP8Config", "QuarkConfig"} <= MoeNvfp4Config.__name__.names
        assert set(auto.AUTO_QUANTIZER_MAPPING) - set(fresh[1]) == {"moe_nvfp4"}
        unregister()
        unregister()
        assert state() == fresh


def test_a_package_that_registered_modelopt_first_keeps_what_is_not_nvfp4(fresh):
    auto.register_quantization_config("modelopt")(Theirs)
    register()
    assert MoeNvfp4Config in read(**NVFP4["modelopt"])
    assert Theirs in read(quant_method="modelopt", quant_algo="FP8")
    unregister()
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop("modelopt") is Theirs


def test_a_package_that_took_a_place_later_keeps_it(fresh):
    register()
    with pytest.raises(ValueError, match="'modelopt' already registered"):
        auto.register_quantization_config("modelopt")(Theirs)
    unregister()
    auto.register_quantization_config("modelopt")(Theirs)  # the way out
    register()
    assert MoeNvfp4Config in read(**NVFP4["modelopt"]) and Theirs in read(quant_method="modelopt", quant_algo="FP8")
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] = Theirs
    unregister()
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop("modelopt") is Theirs
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] is Theirs
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] = CompressedTensorsConfig


def test_a_model_outlives_the_registration(fresh, tmp_path):
    register()
    model = swap_experts(make(qwen3_moe), progress=False)
    expected = logits(model)
    model.save_pretrained(tmp_path / "before")
    unregister()
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "after")
    same_tensors(tmp_path / "before", tmp_path / "after")


@needs_compressed_tensors
def test_a_config_that_a_model_copied_can_be_pickled():
    """GraniteMoeSWA copies its config into a module before the 4-bit one takes its place."""
    config = json.loads(json.dumps(MoeNvfp4Config(dialect="compressed-tensors").to_dict()))
    read = auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"].from_dict(config)
    for copied in (copy.deepcopy(read), pickle.loads(pickle.dumps(read))):
        assert type(copied) is MoeNvfp4Config and copied.to_dict() == read.to_dict() == config


@needs_compressed_tensors
def test_a_config_of_compressed_tensors_may_be_given_for_its_folders(tmp_path):
    which = lambda k: is_expert(k) or "self_attn." in k and "proj" in k
    folder, twin = quantized(tmp_path, qwen3_moe, "compressed-tensors", which)
    expected = logits(load(twin, torch.float32))
    model = load(folder, torch.float32, quantization_config=CompressedTensorsConfig())
    assert any(isinstance(m, HFExperts) for m in model.modules())
    assert type(model.config.quantization_config) is MoeNvfp4Config
    assert relative_error(logits(set_activations(model, "bf16")), expected) < 10 * THRESHOLDS["fp32"]
    dense = load(folder, torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert not any(isinstance(m, (HFExperts, NVFP4Linear)) for m in dense.modules())
    assert not hasattr(dense.config, "quantization_config")
    assert torch.equal(logits(dense), expected)
    with pytest.raises(ValueError, match="use_optimized_inference has no effect on files that are NVFP4"):
        load(folder, quantization_config=CompressedTensorsConfig(use_optimized_inference=True))


# ---------------------------------------------------------------- transformers without this package
ALONE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
assert "moe_nvfp4" not in sys.modules
result = {}
for dialect, path in (("compressed-tensors", sys.argv[1]), ("modelopt", sys.argv[2])):
    try:
        model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
    except Exception as error:
        result[dialect] = {"error": type(error).__name__}
        continue
    norms = {n: p.float().norm().item() for n, p in model.named_parameters() if ".experts." in n}
    complaints = sum(len(v) for v in info.values())
    result[dialect] = {"complaints": complaints, "norms": norms}
print(json.dumps(result))
"""


@pytest.mark.slow
@needs_compressed_tensors
@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="says what transformers 5.23 does")
def test_transformers_alone_reads_experts_wrong_or_not_at_all_and_here_they_are_right(tmp_path):
    """compressed-tensors' are silently wrong (huggingface/transformers#48371), ModelOpt's are refused (#46772)."""
    which = lambda k: is_expert(k) or "self_attn." in k and "proj" in k
    group = CONFIGS["compressed-tensors"]["config_groups"]["group_0"] | {"input_activations": None}
    folders = [quantized(tmp_path, qwen3_moe, "compressed-tensors", which, config_groups={"group_0": group}),
               quantized(tmp_path, qwen3_moe, "modelopt", which)]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ALONE, *(str(folder) for folder, _ in folders)]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    alone = json.loads(run.stdout.splitlines()[-1])
    dense = load(folders[0][1])
    norms = {n: p.float().norm().item() for n, p in dense.named_parameters() if ".experts." in n}
    assert alone["compressed-tensors"]["complaints"] == 0
    ratios = [norm / norms[name] for name, norm in alone["compressed-tensors"]["norms"].items()]
    assert len(ratios) == 4 and min(ratios) > 100
    assert alone["modelopt"] == {"error": "RuntimeError"}
    for folder, _ in folders:
        model = set_activations(load(folder, torch.float32), "bf16")
        assert relative_error(logits(model), logits(load(folders[0][1], torch.float32))) < 10 * THRESHOLDS["fp32"]
