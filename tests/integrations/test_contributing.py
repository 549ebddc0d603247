"""CONTRIBUTING.md, followed to the letter in a copy of the source tree, with toys: what it promises happens."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.common import ROOT

IMPORTS = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from moe_nvfp4.cli import main
from moe_nvfp4.format import dequantize
"""
MODEL = """
from transformers import AutoModelForCausalLM
from tests.models import qwen3_moe
torch.manual_seed(0)
qwen3_moe().bfloat16().save_pretrained("dense")
"""
DIALECT = """
from moe_nvfp4.quantize.dialects.base import Dialect, QuantizationInfo


class Acme(Dialect):
    name, methods = "acme", ("acme",)
    keys = frozenset({"bits", "skip"})
    weight, sf, global_scale, input_scale = "nibbles", "exponents", "divisor", "input_divisor"
    reciprocal = True

    def read(self, q, hf):
        if q["bits"] != 4:
            raise ValueError(f"acme's files have 4 bits, not {q['bits']}")
        return QuantizationInfo(self, tuple(q["skip"]))

    def write(self, ignore, input_scale, own, version, pre_quant_scale=False):
        return {"quant_method": "acme", "bits": 4, "skip": ignore, "moe_nvfp4": own}
"""
DIALECT_WORKS = """
def moe_nvfp4(*args):
    assert main([*args]) == 0, args

def same(a, b):
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))

def tensors(folder):
    return load_file(f"{folder}/model.safetensors")

def model(folder):
    import moe_nvfp4.integrations.huggingface
    return AutoModelForCausalLM.from_pretrained(folder)

moe_nvfp4("quantize", "dense", "first", "--dialect", "acme")
moe_nvfp4("verify", "first", "--against", "dense")
found = tensors("first")
name = "model.layers.1.mlp.experts.3.down_proj"
of_matrix = {key.rpartition(".")[2]: t for key, t in found.items() if key.startswith(f"{name}.")}
assert of_matrix.keys() == {"nibbles", "exponents", "divisor"}
w = tensors("dense")[f"{name}.weight"].float()
read = dequantize(of_matrix["nibbles"], of_matrix["exponents"], 1 / of_matrix["divisor"])
assert 0.05 < (read - w).norm() / w.norm() < 0.12

for other in ("modelopt", "compressed-tensors"):
    moe_nvfp4("quantize", "first", other, "--dialect", other)
    moe_nvfp4("quantize", other, f"{other}-back", "--dialect", "acme")
    back = tensors(f"{other}-back")
    assert back.keys() == found.keys()
    assert all(same(t, back[key]) for key, t in found.items())

ids = torch.arange(12)[None]
loaded = model("first")
assert loaded.get_submodule("model.layers.1.mlp.experts").down_proj.dtype == torch.uint8
assert torch.equal(loaded(ids).logits, model("modelopt")(ids).logits)
loaded.save_pretrained("saved")
saved = tensors("saved")
assert all(same(t, saved[key]) for key, t in found.items())
q = json.loads(Path("saved/config.json").read_text())["quantization_config"]
assert q["quant_method"] == "acme" and "lm_head" in q["skip"]
moe_nvfp4("verify", "saved", "--against", "dense")
"""
RECIPES = """    Recipe("lower", lower),
    Recipe("patient", from_hessians=patient),
)
"""
CANDIDATES = """

def lower(by_max: Tensor, largest: Tensor, global_scale: Tensor) -> Tensor:
    return torch.stack([by_max, by_max - (by_max > 1).to(torch.uint8)])
"""
PATIENT = """

def patient(w, hessian):
    assert (hessian.diagonal(dim1=1, dim2=2) > 0).all()
    return quantize_matrix(w, "mse")


REGISTRY = ("""
RECIPE_WORKS = """
from moe_nvfp4.integrations.huggingface import swap_experts
from moe_nvfp4.quantize.recipes import quantize_matrix

assert main(["quantize", "dense", "lower", "--recipe", "lower"]) == 0
assert main(["verify", "lower", "--against", "dense"]) == 0
w = load_file("dense/model.safetensors")["model.layers.0.mlp.experts.0.down_proj.weight"]
codes, sf, scale = quantize_matrix(w, "lower")
_, by_max, _ = quantize_matrix(w, "max", scale)
steps = by_max.view(torch.uint8).int() - sf.view(torch.uint8).int()
assert steps.unique().tolist() == [0, 1]  # some blocks took the lower scale, where its error is smaller
error = lambda codes, sf: (dequantize(codes, sf, scale) - w.float()).square().view(-1, 16).sum(dim=1)
theirs = quantize_matrix(w, "max", scale)
assert (error(codes, sf)[steps.flatten() == 1] < error(*theirs[:2])[steps.flatten() == 1]).all()
found = load_file("lower/model.safetensors")
assert torch.equal(found["model.layers.0.mlp.experts.0.down_proj.weight"], codes)

def swapped(recipe, **options):
    model = swap_experts(AutoModelForCausalLM.from_pretrained("dense"), recipe=recipe, progress=False, **options)
    return {name: p for name, p in model.named_parameters() if ".experts." in name}

import warnings
warnings.simplefilter("ignore")  # so few tokens
of_text = swapped("patient", calibration=torch.arange(96)[None])
assert all(torch.equal(t, of_text[name]) for name, t in swapped("mse").items())
try:
    swapped("patient")
except ValueError as error:
    assert "recipe 'patient' learns from text" in str(error)
else:
    raise AssertionError
"""
COMMAND = '''"""moe-nvfp4 toy: print a number, doubled."""

from moe_nvfp4.cli.options import command, whole
from moe_nvfp4.cli.output import say


def add(commands):
    sub = command(commands, "toy", run, "double a number", "Print NUMBER, doubled.")
    sub.add_argument("number", type=whole(0), metavar="NUMBER")


def run(args):
    if args.number == 13:
        raise ValueError("13 is not doubled: choose another number")
    say(str(2 * args.number))
'''
TOY_MODEL = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class ToyExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 96) / 8)  # [E, H, 2I]
        self.down_proj = nn.Parameter(torch.randn(4, 48, 64) / 7)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        gate, up = torch.einsum("th,tkhn->tkn", hidden_states, self.gate_up_proj[top_k_index]).chunk(2, dim=-1)
        y = torch.einsum("tki,tkih->tkh", self.act_fn(gate) * up, self.down_proj[top_k_index])
        return (y * top_k_weights[..., None]).sum(dim=1).to(y.dtype)

class ToyConfig(PretrainedConfig):
    model_type = "toy"

class ToyModel(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.experts = ToyExperts(config)
        self.post_init()

    def forward(self, x):
        weights, index = torch.topk(x[:, :4].softmax(dim=-1), 2)
        return self.experts(x, index, weights)
"""
LAYOUT = """def _toy(m: Any) -> ModuleLayout:
    E, I, H = m.down_proj.shape
    return ModuleLayout(E, H, I, transposed=True)


LAYOUTS: """
EXPERTS_WORK = """
sys.path.insert(0, ".")
from toy_model import ToyConfig, ToyModel
from moe_nvfp4.integrations.huggingface import swap_experts
from moe_nvfp4.integrations.huggingface.experts import HFExperts

torch.manual_seed(0)
model, x = ToyModel(ToyConfig()), torch.randn(9, 64)
dense = model(x)
twin = ToyModel(ToyConfig())
swap_experts(model, progress=False)
assert isinstance(model.experts, HFExperts) and model.experts.gate.kind == "silu"
swapped = model(x)
twin.experts = model.experts.to_dense(torch.float32)
assert torch.allclose(swapped, twin(x), atol=1e-2 * float(dense.abs().max()))  # one rounding to bf16 between the GEMMs
assert 0.02 < (swapped - dense).norm() / dense.norm() < 0.25
model.save_pretrained("saved")
loaded = ToyModel.from_pretrained("saved")
assert torch.equal(loaded(x), swapped)
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the source tree. Calling it edits files of a section of CONTRIBUTING.md, which must name each."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "emulator")
    for top in ("moe_nvfp4", "quantize", "integrations", "tests"):
        shutil.copytree(ROOT / top, tree / top, symlinks=True, ignore=ignored)
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S))

    class Copy:
        environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}

        def change(self, section, file, old, new):
            assert file in sections[section] or os.path.dirname(file) in sections[section], f"{section}: {file}"
            path = tree / file
            text = path.read_text() if old else ""
            assert not old or text.count(old) == 1, f"{file}: {old!r} is there {text.count(old)} times"
            path.write_text(text.replace(old, new) if old else new)

        def run(self, *args):
            return subprocess.run([sys.executable, *args], cwd=tmp_path, env=self.environment, capture_output=True,
                                  text=True)  # fmt: skip

        def works(self, code):
            done = self.run("-c", code)
            assert done.returncode == 0, done.stdout + done.stderr

    return Copy()


@pytest.mark.slow
def test_a_dialect(copy):
    here = "Adding a dialect"
    copy.change(here, "quantize/dialects/acme.py", "", DIALECT)
    start = "MODELOPT, COMPRESSED_TENSORS = "
    copy.change(
        here, "quantize/dialects/__init__.py", start, "from moe_nvfp4.quantize.dialects.acme import Acme\n" + start
    )
    copy.change(
        here,
        "quantize/dialects/__init__.py",
        "(MODELOPT, COMPRESSED_TENSORS)}",
        "(MODELOPT, COMPRESSED_TENSORS, Acme())}",
    )
    copy.change(here, "moe_nvfp4/cli/options.py", '"compressed-tensors")', '"compressed-tensors", "acme")')
    copy.works(IMPORTS + MODEL + DIALECT_WORKS)


@pytest.mark.slow
def test_a_recipe(copy):
    here = "Adding a recipe"
    copy.change(here, "quantize/search.py", "\n\ndef scales_of_mse", CANDIDATES + "\n\ndef scales_of_mse")
    copy.change(here, "quantize/recipes.py", "four_over_six, neighbours\n", "four_over_six, lower, neighbours\n")
    copy.change(here, "quantize/recipes.py", "\n\nREGISTRY = (", PATIENT)
    last = '    Recipe("distill", from_hessians=quantize_gptq, learned=True),\n'
    copy.change(here, "quantize/recipes.py", last + ")\n", last + RECIPES)
    copy.change(here, "moe_nvfp4/cli/options.py", '"mse"), "mse"', '"mse", "lower"), "mse"')
    copy.change(here, "moe_nvfp4/cli/options.py", '"gptq", "distill")', '"gptq", "distill", "patient")')
    copy.works(IMPORTS + MODEL + RECIPE_WORKS)


def test_a_command(copy):
    here = "Adding a command"
    copy.change(here, "moe_nvfp4/cli/toy.py", "", COMMAND)
    copy.change(here, "moe_nvfp4/cli/__init__.py", "    serve,\n    verify,\n)", "    serve,\n    toy,\n    verify,\n)")
    copy.change(here, "moe_nvfp4/cli/__init__.py", "    completion,\n)  # as", "    completion,\n    toy,\n)  # as")
    assert re.search(r"^ +toy +double a number$", copy.run("-m", "moe_nvfp4", "--help").stdout, re.M)
    assert copy.run("-m", "moe_nvfp4", "toy", "21").stdout == "42\n"
    done = copy.run("-m", "moe_nvfp4", "toy", "13")
    assert (done.returncode, done.stderr) == (2, "moe-nvfp4 toy: error: 13 is not doubled: choose another number\n")


@pytest.mark.slow
def test_an_experts_class(copy, tmp_path):
    here, file = "Adding an experts class", "integrations/huggingface/recognise.py"
    (tmp_path / "toy_model.py").write_text(TOY_MODEL)
    copy.change(here, file, "LAYOUTS: ", LAYOUT)
    copy.change(
        here, file, '    "DbrxExperts": _dbrx,\n', '    "DbrxExperts": _dbrx,\n    "toy_model.ToyExperts": _toy,\n'
    )
    copy.works(IMPORTS + EXPERTS_WORK)
