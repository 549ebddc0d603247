"""MXFP4 and FP8 folders load as NVFP4: the model that `moe-nvfp4 quantize` and from_pretrained give, bit for bit."""

import contextlib
import pickle
import sys
import types
import warnings
from functools import cache, partial

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
    MiniMaxM3SparseForConditionalGeneration,
    Mxfp4Config,
    core_model_loading,
)
from transformers.quantizers import auto

from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, register, swap_experts
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize import jobs
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.files import open_checkpoint
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import RECIPES
from moe_nvfp4.quantize.unwritten import unwritten
from moe_nvfp4.weights import ACTIVATIONS
from tests.checkpoints import config_of, converted
from tests.common import THRESHOLDS, relative_error
from tests.folders import change_config, is_expert, quantized
from tests.integrations.test_quantized_sources import IDS, fp8_folder, mxfp4_folder
from tests.models import (
    as_bytes,
    folder,
    gpt_oss,
    load,
    logits,
    make,
    minimax_m3,
    mixtral,
    qwen3_moe,
    same_tensors,
    tensors,
)
from tests.quantize.test_mxfp4 import CONFIGS, random, stored
from tests.quantize.test_mxfp4 import source as small

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def one_by_one(tool, path, family=lambda: qwen3_moe(experts=4, intermediate=64), low=110, high=127):
    """A folder whose experts are MXFP4 as `tool` writes them, one by one, and its twin in fp32."""
    torch.manual_seed(0)
    source, twin = folder(path, family, "source"), folder(path, family, "twin")
    files, dense = tensors(source), {name: tensor.float() for name, tensor in tensors(twin).items()}
    for name in filter(is_expert, dense):
        codes, scales, _ = random(*files.pop(name).shape, low, high)
        files |= stored(tool, name.removesuffix(".weight"), codes, scales)
        dense[name] = by_hand(codes, scales).float()
    put(source, files)
    put(twin, dense)
    change_config(source, quantization_config=CONFIGS[tool])
    return source, twin


def put(path, files):
    save_file({n: t.clone().contiguous() for n, t in files.items()}, path / "model.safetensors", {"format": "pt"})


def by_hand(codes, scales):
    """The values of MXFP4, float64 [N, K]: codes uint8 [N, K], e8m0 scales uint8 [N, K/32]."""
    exponents = scales.to(torch.int32) - 127
    return torch.ldexp(E2M1[codes.long()], exponents.repeat_interleave(32, 1))


def nvfp4_by_hand(codes, sf, scale):
    """The values of NVFP4, float64 [N, K]: codes uint8 [N, K/2], sf as bytes [N, K/16], the global scale."""
    values = E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()]
    return values * sf.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1) * scale.double()


FORMS = {"gpt-oss": mxfp4_folder, "fp8": fp8_folder, **{tool: partial(one_by_one, tool) for tool in CONFIGS}}
forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """form -> its folder and its dense twin, made once and not to be changed."""
    return cache(lambda form: FORMS[form](tmp_path_factory.mktemp(form)))


# of each form: what it is loaded with
CHOICES = {
    "gpt-oss": dict(linears=["attention"]),
    "fp8": dict(linears=["shared", "attention"], activations="nvfp4"),
    "compressed-tensors": dict(dialect="compressed-tensors", activations="nvfp4_four_over_six"),
    "quark": dict(exclude="model.layers.0.*"),
    "modelopt": dict(recipe="max"),
    "deepseek": dict(recipe="four_over_six", linears="all", exclude=["lm_head"]),
}


@forms
def test_a_folder_loads_as_quantize_would_write_it(form, folders, tmp_path, monkeypatch):
    """The folder that save_pretrained writes has the bytes and the config of one that was quantized, loaded and saved;
    transformers reads nothing of what is converted itself."""
    source, _ = folders(form)
    read = []
    theirs = core_model_loading._materialize_copy
    monkeypatch.setattr(core_model_loading, "_materialize_copy",
                        lambda t, *args: read.append(t.get_dtype()) or theirs(t, *args))  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        model = load(source, quantization_config=MoeNvfp4Config(**CHOICES[form]))
    assert read and set(read) == {"BF16"}
    monkeypatch.undo()
    wanted = converted(source, tmp_path / "quantized", **CHOICES[form])
    two_steps = load(wanted)
    assert torch.equal(logits(model), logits(two_steps))
    model.save_pretrained(tmp_path / "saved")
    two_steps.save_pretrained(tmp_path / "again")
    same_tensors(tmp_path / "saved", tmp_path / "again")
    assert config_of(tmp_path / "saved") == config_of(tmp_path / "again")
    kept_wide = [n for n, t in tensors(tmp_path / "saved").items() if t.dtype == torch.float32 and ".gate." in n]
    same_tensors(tmp_path / "saved", wanted, kept_wide)
    packed = sum(isinstance(m, NVFP4Linear) for m in model.modules())
    assert sum(isinstance(m, HFExperts) for m in model.modules()) == (1 if form in ("fp8", "quark") else 2)
    assert packed == {"gpt-oss": 8, "fp8": 10 + 3, "deepseek": 8}.get(form, 0)


@forms
@pytest.mark.parametrize("matrices", [3, 100])
def test_a_job_of_several_matrices_stays_in_its_layer(form, matrices, folders, monkeypatch):
    """As on a GPU, which quantizes matrices of one shape together. Layers are made one after the other."""
    source, _ = folders(form)
    options = Options(linears=("all",) if form in ("gpt-oss", "fp8") else (), device="cpu")
    alone = unwritten(open_checkpoint(source), options)
    monkeypatch.setitem(jobs.TOGETHER, "cpu", matrices * 64 * 64)
    together = unwritten(open_checkpoint(source), options)
    count = lambda made: sum(len(unit.jobs) for unit in made.units)
    assert count(together) < count(alone)
    for unit in together.units:
        names = [name for name in unit.names if is_expert(name)]
        assert len({name.partition(".experts.")[0] for name in names}) <= 1
    made = lambda units: {n: as_bytes(t) for unit in units for n, t in unit.make(torch.device("cpu")).items()}
    assert made(together.units) == made(alone.units)


@forms
def test_bytes_and_config_for_every_recipe(form, folders, tmp_path):
    source, _ = small(tmp_path / "source", form, layers=1) if form in CONFIGS else folders(form)
    for i, recipe in enumerate(RECIPES):
        options = Options(recipe, activations=ACTIVATIONS[i % len(ACTIVATIONS)], device="cpu")
        convert_checkpoint(source, tmp_path / recipe, options, progress=False)
        coming, wanted = unwritten(open_checkpoint(source), options), tensors(tmp_path / recipe)
        assert coming.checkpoint.config == config_of(tmp_path / recipe)
        headers = {name: (t.dtype, t.shape) for name, t in coming.checkpoint.tensors.items()}
        assert headers == {n: (t.dtype, t.shape) for n, t in open_checkpoint(tmp_path / recipe).tensors.items()}
        made = coming.make(wanted)
        assert all(as_bytes(tensor) == as_bytes(wanted[name]) for name, tensor in made.items()), recipe
        assert wanted.keys() - made.keys() == wanted.keys() & tensors(source).keys() - {
            name for name in made if name in tensors(source)
        }, "all others are copied"


def test_values_are_those_of_the_files(folders):
    """Bit for bit, and the logits are those of transformers' own dense model."""
    source, twin = folders("gpt-oss")
    model = load(source, torch.float32, quantization_config=MoeNvfp4Config())
    files, state = tensors(source), model.state_dict()
    for name in ("gate_up_proj", "down_proj"):
        stem = f"model.layers.1.mlp.experts.{name}"
        blocks, scales = files[f"{stem}_blocks"].flatten(2), files[f"{stem}_scales"]
        parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        for e in range(len(blocks)):
            codes = torch.stack([blocks[e] & 15, blocks[e] >> 4], dim=-1).flatten(1)
            want = by_hand(codes, scales[e])
            want = torch.cat([want[::2], want[1::2]]) if len(parts) == 2 else want
            scale = state[f"{stem.removesuffix(name)}{parts[0]}_global_scale"][e]
            assert torch.equal(nvfp4_by_hand(state[stem][e], state[f"{stem}_sf"][e], scale), want)
    dense = load(source, torch.float32, quantization_config=Mxfp4Config(dequantize=True))
    assert not any(isinstance(m, HFExperts) for m in dense.modules()), "transformers keeps its own reader"
    assert relative_error(logits(model), logits(dense.float())) < THRESHOLDS["fp32"]
    assert relative_error(logits(model), logits(load(twin, torch.float32))) < THRESHOLDS["fp32"]


def test_the_same_on_disk_and_beside_a_gpu(folders, tmp_path):
    """Experts that stay on the CPU, and layers on disk: transformers reads these back from its folder."""
    source, _ = folders("deepseek")
    expected = logits(load(source, quantization_config=MoeNvfp4Config()))
    beside = load(source, quantization_config=MoeNvfp4Config(cpu_experts=1))
    assert torch.equal(logits(beside), expected)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu",
              "model.layers.0": "disk", "model.layers.1": "cpu"}  # fmt: skip
    places["model.layers.0.self_attn"] = places.pop("model.layers.0")
    places |= {f"model.layers.0.{name}": "disk" for name in ("mlp", "input_layernorm", "post_attention_layernorm")}
    on_disk = load(source, quantization_config=MoeNvfp4Config(), device_map=places, offload_folder=tmp_path / "disk")
    assert torch.equal(logits(on_disk), expected)


def test_fp8_of_prediction_layers_is_saved_dense(tmp_path, monkeypatch, caplog):
    """As quantize writes it. The model does not have these layers; a copy of it is saved, too. transformers would draft
    with their codes, from the files that the model was loaded from."""
    source, twin = fp8_folder(tmp_path)
    files, values = tensors(source), tensors(twin)
    layer = {n: t for n, t in files.items() if n.startswith("model.layers.1.")}
    files |= {n.replace("layers.1.", "layers.2."): t for n, t in layer.items()}
    put(source, files)
    change_config(source, num_nextn_predict_layers=1)
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
    model = load(source, quantization_config=MoeNvfp4Config())
    assert "layers of multi-token prediction are FP8 (model.layers.2." in caplog.text
    pickle.loads(pickle.dumps(model)).save_pretrained(tmp_path / "saved")
    saved, wanted = tensors(tmp_path / "saved"), tensors(converted(source, tmp_path / "quantized"))
    extra = [n for n in wanted if "layers.2." in n]
    assert len(extra) > 20 and {wanted[n].dtype for n in extra} == {torch.bfloat16}
    for name in extra:
        assert torch.equal(saved[name], wanted[name]), name
        assert torch.equal(saved[name], values[name.replace("layers.2.", "layers.1.")]), name


def test_linears_that_transformers_joins(tmp_path):
    """MiniMax-M3's gate and up are two tensors of FP8 files, and one parameter."""
    source, _ = fp8_folder(tmp_path, minimax_m3)
    read = MiniMaxM3SparseForConditionalGeneration.from_pretrained
    model = read(source, dtype=torch.bfloat16, quantization_config=MoeNvfp4Config())
    two_steps = read(converted(source, tmp_path / "quantized"), dtype=torch.bfloat16).state_dict()
    joined = [name for name in two_steps if name.endswith("gate_up_proj.weight")]
    assert len(joined) == 2 and model.state_dict().keys() == two_steps.keys()
    assert [n for n, t in model.state_dict().items() if as_bytes(t) != as_bytes(two_steps[n])] == []


def test_a_recipe_that_measures_activations(folders, tmp_path):
    source, twin = folders("fp8")
    config = MoeNvfp4Config(recipe="weighted", calibration=IDS, linears=["shared"])
    load(source, quantization_config=config).save_pretrained(tmp_path / "a")
    config = MoeNvfp4Config(recipe="weighted", calibration=IDS, linears=["shared"])
    load(twin, quantization_config=config).save_pretrained(tmp_path / "b")
    same_tensors(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match="recipe 'gptq' does not quantize while a model loads"):
        load(source, quantization_config=MoeNvfp4Config(recipe="gptq"))


def test_other_names_of_experts(tmp_path):
    """Mixtral's w1, w3 and w2."""
    source, twin = one_by_one("quark", tmp_path, lambda: mixtral(64))
    model = load(source, torch.float32, quantization_config=MoeNvfp4Config())
    assert relative_error(logits(model), logits(load(twin, torch.float32))) < THRESHOLDS["fp32"]
    with pytest.raises(ValueError, match="the pattern 'nothing' matches no experts module"):
        load(source, quantization_config=MoeNvfp4Config(exclude="nothing"))


# ---------------------------------------------------------------- what does not fit
def test_scales_that_span_too_much_are_counted(tmp_path, caplog):
    source, _ = one_by_one("modelopt", tmp_path, low=90)
    with pytest.warns(UserWarning, match="span more powers of two"):
        model = load(source, quantization_config=MoeNvfp4Config())
    with pytest.warns(UserWarning, match="span more powers of two"):
        report = convert_checkpoint(source, tmp_path / "quantized", Options(device="cpu"), progress=False)
    count, error = f"{report.cast.lost} of {report.cast.matrices}", f"{report.cast.relative:.3g}"
    assert 0 < report.cast.lost and f"{count} MXFP4 matrices lost something" in caplog.text and error in caplog.text
    model.save_pretrained(tmp_path / "saved")
    same_tensors(tmp_path / "saved", tmp_path / "quantized")


STEM = "model.layers.1.mlp.experts"
DAMAGE = {  # form -> how its files are damaged, and what the error says
    "gpt-oss": [
        (lambda f: f[f"{STEM}.gate_up_proj_scales"][2, 5].fill_(255), "expert 2: an MXFP4 scale is NaN"),
        (lambda f: f.pop(f"{STEM}.down_proj_scales"), "down_proj_scales is missing"),
        (lambda f: f.pop(f"{STEM}.gate_up_proj_bias"), "gate_up_proj_bias is missing"),
        (lambda f: f.pop("model.norm.weight"), "the files lack 1 of .* model.norm.weight"),
        (lambda f: f.update({f"{STEM}.down_proj_scales": f[f"{STEM}.down_proj_scales"][:, :1]}), "are not MXFP4"),
    ],
    "fp8": [
        (lambda f: f.pop(f"{STEM}.1.up_proj.weight_scale_inv"), "up_proj.weight is F8_E4M3 and 3 of 4 experts"),
        (lambda f: f.pop("model.layers.0.self_attn.o_proj.weight_scale_inv"), "o_proj.weight is F8_E4M3 without"),
        (lambda f: f.update({"x.weight_scale": torch.ones(1)}), "x.weight_scale is a scale that nothing reads"),
    ],
    "modelopt": [
        (lambda f: f[f"{STEM}.3.up_proj.weight_scale"].fill_(255), "3.up_proj: an MXFP4 scale is NaN"),
        (lambda f: f.pop(f"{STEM}.3.up_proj.weight"), "up_proj"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", DAMAGE)
def test_damaged_files_are_named_as_quantize_names_them(form, tmp_path):
    source, _ = FORMS[form](tmp_path)
    whole = tensors(source)
    for i, (change, message) in enumerate(DAMAGE[form]):
        files = {name: tensor.clone() for name, tensor in whole.items()}
        change(files)
        put(source, files)
        with pytest.raises(ValueError, match=message) as ours:
            load(source, quantization_config=MoeNvfp4Config())
        with pytest.raises(ValueError) as theirs:
            converted(source, tmp_path / f"new{i}")
        assert str(ours.value) == str(theirs.value)


def test_what_is_not_read_is_refused_by_name(tmp_path):
    source, _ = FORMS["fp8"](tmp_path)
    ask = MoeNvfp4Config()
    with pytest.raises(NotImplementedError, match="map_files: the experts of these files are not NVFP4 yet"):
        load(source, quantization_config=MoeNvfp4Config(map_files=True))
    for config, message in (
        ({"quant_method": "fp8", "weight_block_size": None}, "FP8 without blocks .weight_block_size None. is not read"),
        ({"quant_method": "mxfp4"}, "config.json says MXFP4, and the files hold no MXFP4 weights"),
        ({"quant_method": "mxfp8"}, "is quantized with 'mxfp8'; this library reads fp8 .in blocks., MXFP4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo 'FP8'; this library reads"),
    ):
        change_config(source, quantization_config=config)
        with pytest.raises(ValueError, match=message):
            load(source, quantization_config=ask)
    change_config(source, quantization_config=CONFIGS["modelopt"])
    with pytest.raises(
        ValueError, match="quantized with 'modelopt', not with NVFP4: they become NVFP4 while they load"
    ):
        load(source)
    nvfp4, _ = quantized(tmp_path / "n", qwen3_moe, "modelopt")
    with pytest.raises(ValueError, match="recipe would have no effect: the files are 4-bit already"):
        load(nvfp4, quantization_config=MoeNvfp4Config(recipe="max"))


# ---------------------------------------------------------------- whose folder it is
def test_a_folder_stays_with_its_own_reader_unless_asked(folders):
    """Configs of transformers are what they were, and can be pickled; a user's config is not changed by a load."""
    source, _ = folders("gpt-oss")
    theirs = auto.AutoQuantizationConfig.from_dict(config_of(source)["quantization_config"])
    assert type(theirs) is Mxfp4Config and type(pickle.loads(pickle.dumps(theirs))) is Mxfp4Config
    ask = MoeNvfp4Config(activations="nvfp4")
    before = dict(vars(ask))
    model = load(source, quantization_config=ask)
    assert vars(ask) == before and type(model.config.quantization_config) is MoeNvfp4Config
    assert pickle.loads(pickle.dumps(model.config.quantization_config)).activations == "nvfp4"
    with pytest.raises(ImportError, match="Quark"):
        load(folders("quark")[0])
    assert type(auto.AutoQuantizationConfig.from_dict(CONFIGS["deepseek"])) is FineGrainedFP8Config


def test_programs_that_load_without_asking(folders):
    """As transformers' server, which `moe-nvfp4 serve` starts."""
    register(convert=True)
    try:
        for form in ("gpt-oss", "modelopt"):  # one that transformers reads itself, one that it does not
            assert any(isinstance(m, HFExperts) for m in load(folders(form)[0]).modules()), form
        int4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
        with contextlib.suppress(ImportError):  # transformers' own reader, where compressed-tensors is not installed
            assert not isinstance(auto.AutoQuantizationConfig.from_dict(int4), MoeNvfp4Config), "is not ours to read"
    finally:
        register()


def test_where_quark_is_installed(folders, monkeypatch):
    """transformers would give a folder of Quark to Quark, whatever config is given for it."""
    source, _ = folders("quark")
    for name in ("quark", "quark.torch", "quark.torch.export", "quark.torch.export.config",
                 "quark.torch.quantization", "quark.torch.quantization.config"):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    like = lambda name, **names: monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**names))
    sys.modules["quark"].__version__ = "1.0"
    like("quark.torch.export.config.config", JsonExporterConfig=dict)
    like("quark.torch.export.main_export", quant_config_parser=None)
    like("quark.torch.export.main_export.quant_config_parser", QuantConfigParser=None)
    like("quark.torch.quantization.config.config", QConfig=types.SimpleNamespace(from_dict=dict))
    monkeypatch.setattr("transformers.utils.quantization_config.is_quark_available", lambda: True)
    theirs = auto.AutoQuantizationConfig.from_dict(config_of(source)["quantization_config"])
    assert isinstance(theirs, auto.QuarkConfig) and theirs.quant_method == "quark"
    assert type(pickle.loads(pickle.dumps(theirs))) is auto.QuarkConfig
    model = load(source, quantization_config=MoeNvfp4Config())
    assert any(isinstance(m, HFExperts) for m in model.modules())


def test_a_model_that_transformers_loaded_in_mxfp4_is_not_swapped():
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    model = make(lambda: gpt_oss(intermediate=64))
    model.model.layers[0].mlp.experts = Mxfp4GptOssExperts(model.config)
    with pytest.raises(NotImplementedError, match="Mxfp4GptOssExperts holds experts in a form that is not supported"):
        swap_experts(model, progress=False)
