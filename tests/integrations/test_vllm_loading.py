"""A layer is filled from tensors as a server's loader passes them on, one by one; vLLM is not needed."""

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4 import Gate, NVFP4Experts
from moe_nvfp4.format import dequantize
from moe_nvfp4.integrations.vllm.loading import ExpertLoader, check_files, check_folder, dense_names, refresh
from moe_nvfp4.integrations.vllm.unwritten import Converted
from moe_nvfp4.integrations.vllm.unwritten import tensors as all_tensors
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import DIALECTS, read_config
from moe_nvfp4.quantize.files import open_checkpoint
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import quantize_matrix
from tests.folders import stored
from tests.integrations.test_quantized_sources import mxfp4_folder
from tests.models import as_bytes, folder, gpt_oss, qwen3_moe, tensors

E, H, I = 3, 64, 96
PARTS = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
KINDS = ("weight", "sf", "global_scale", "input_scale")


def matrices(gated=True):
    return {
        (part, e): torch.randn(shape).bfloat16() * (e + 1) * (5 if part == "up_proj" else 1)
        for part, shape in PARTS.items()
        for e in range(E)
        if gated or part != "gate_proj"
    }


def files(dialect, dense, input_scale=None):
    """(kind, part, expert) -> tensor, as in a checkpoint of `dialect`."""
    found = {}
    for (part, e), matrix in dense.items():
        tensors = stored(dialect, "x", matrix, input_scale)
        for kind in KINDS:
            name = f"x.{getattr(DIALECTS[dialect], kind)}"
            if name in tensors:
                found[kind, part, e] = tensors[name]
    return found


def test_files_of_other_activations(tmp_path):
    """Also where only hf_quant_config.json says them, and where nothing does."""
    source = folder(tmp_path, qwen3_moe)
    for name, activations in (("w4a16", "bf16"), ("w4a4", "nvfp4")):
        convert_checkpoint(source, tmp_path / name, Options(activations=activations), progress=False)
    info = read_config(json.loads((tmp_path / "w4a16/config.json").read_text()))
    check_folder(tmp_path / "w4a16", info, tmp_path / "w4a16", "bf16")
    with pytest.raises(ValueError, match="w4a4 was made for activations 'nvfp4', and the files for 'bf16' with"):
        check_folder(tmp_path / "w4a4", info, tmp_path / "w4a16", "bf16")
    check_folder(tmp_path / "w4a4", info, tmp_path / "w4a16", None)
    config = json.loads((tmp_path / "w4a4/config.json").read_text())
    quantization = config.pop("quantization_config")
    (tmp_path / "w4a4/config.json").write_text(json.dumps(config))
    said = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": quantization["ignore"]}}
    (tmp_path / "w4a4/hf_quant_config.json").write_text(json.dumps(said))
    check_folder(tmp_path / "w4a4", info, tmp_path / "w4a4", "nvfp4")
    with pytest.raises(ValueError, match="w4a4 was made for activations 'nvfp4'"):
        check_folder(tmp_path / "w4a4", info, tmp_path / "w4a16", "bf16")


def fill(tensors, dialect=None, tp=(0, 1), gate=None, activations="bf16", bias=None, finish=True):
    experts = NVFP4Experts(E, H, I // tp[1], gate or Gate(), activations, bias)
    loader = ExpertLoader(experts, "layer", DIALECTS.get(dialect), tp)
    for (kind, part, e), tensor in tensors.items():
        loader.load(kind, part, e, tensor, f"{part}.{kind}")
    if finish:
        loader.finish()
    return experts


def of(experts, part, e):
    """The fp32 values of one matrix of a filled layer."""
    stack, rows = ("down_proj", slice(None)) if part == "down_proj" else (experts.up_name, slice(None))
    if part != "down_proj" and experts.gate.gated:
        half = experts.intermediate_size
        rows = slice(0, half) if part == "gate_proj" else slice(half, None)
    codes, sf = getattr(experts, stack)[e, rows], getattr(experts, f"{stack}_sf")[e, rows]
    return dequantize(codes, sf.view(torch.float8_e4m3fn), getattr(experts, f"{part}_global_scale")[e])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_files_numbers_arrive(dialect):
    dense = matrices()
    experts = fill(files(dialect, dense), dialect)
    for (part, e), matrix in dense.items():
        codes, sf, scale = quantize_matrix(matrix.float(), "max")
        scale = scale if dialect == "modelopt" else 1 / (1 / scale)
        assert torch.equal(of(experts, part, e), dequantize(codes, sf, scale)), (part, e)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_static_scales_are_not_rounded_to_the_models_dtype(dialect):
    """vLLM makes it torch's default while it builds a model."""
    stored = files(dialect, matrices(), 0.0123)
    torch.set_default_dtype(torch.bfloat16)
    try:
        experts = fill(stored, dialect, activations="nvfp4")
    finally:
        torch.set_default_dtype(torch.float32)
    for part in ("up_proj", "down_proj"):
        torch.testing.assert_close(getattr(experts, f"{part}_input_scale"), torch.full((E,), 0.0123), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dialect", [None, *DIALECTS])
@pytest.mark.parametrize("gate", [Gate(), Gate("relu2", gated=False)], ids=["gated", "not gated"])
def test_ranks_hold_the_bytes_of_one_rank(dialect, gate):
    dense = matrices(gate.gated)
    tensors = files(dialect, dense) if dialect else {("weight", *key): matrix for key, matrix in dense.items()}
    whole, *ranks = [fill(tensors, dialect, tp, gate) for tp in ((0, 1), (0, 2), (1, 2))]
    for part, e in dense:
        dim = 1 if part == "down_proj" else 0
        assert torch.equal(torch.cat([of(rank, part, e) for rank in ranks], dim), of(whole, part, e)), (part, e)


@pytest.mark.parametrize("gated", [True, False])
def test_dense_matrices_are_quantized_in_any_order(gated):
    """gate and up of an expert share a global scale, whichever comes first, and whatever comes between them."""
    dense, gate = matrices(gated), Gate() if gated else Gate("relu2", gated=False)
    forward, backward = [
        fill({("weight", *key): dense[key] for key in order}, gate=gate) for order in (list(dense), list(dense)[::-1])
    ]
    for part, e in dense:
        assert torch.equal(of(forward, part, e), of(backward, part, e))
        together = [p for p in ("gate_proj", "up_proj") if gated and part != "down_proj"] or [part]
        rows = torch.cat([dense[p, e] for p in together])
        codes, sf, scale = quantize_matrix(rows)
        at = together.index(part) * len(dense[part, e])
        expected = dequantize(codes, sf, scale)[at : at + len(dense[part, e])]
        assert torch.equal(of(forward, part, e), expected), (part, e)


def test_biases_are_added_by_one_rank():
    """The sum of two ranks' results is the layer's: x [T, H], compared with one rank and with a loop in float64."""
    dense = matrices()
    tensors = {("weight", *key): matrix for key, matrix in dense.items()}
    biases = {("bias", part, e): torch.randn(shape[0]) for part, shape in PARTS.items() for e in range(E)}
    whole, *ranks = [fill(tensors | biases, tp=tp, bias=torch.float32) for tp in ((0, 1), (0, 2), (1, 2))]
    x = torch.randn(5, H) / 1000  # beside larger sums, a bias too many would not be seen
    ids, weights = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]]), torch.rand(5, 2)
    y, parts = whole(x, ids, weights), [rank(x, ids, weights) for rank in ranks]
    loop = torch.zeros(5, H, dtype=torch.float64)
    for t, j in itertools.product(range(5), range(2)):
        e = int(ids[t, j])
        gate, up, down = (of(whole, part, e).double() for part in PARTS)
        b_gate, b_up, b_down = (biases["bias", part, e].double() for part in PARTS)
        row = x[t].double()
        h = torch.nn.functional.silu(gate @ row + b_gate) * (up @ row + b_up)
        loop[t] += weights[t, j] * (down @ h + b_down)
    assert torch.allclose(y.double(), loop, rtol=1e-4, atol=1e-4 * loop.abs().max())
    assert torch.allclose(sum(parts), y, rtol=1e-4, atol=1e-4 * y.abs().max())


def test_new_weights_of_another_form_are_refused():
    """Static scales are parameters of a layer: one that has none gets none later."""

    def made(scale):
        return fill(files("modelopt", matrices(), scale), "modelopt", activations="nvfp4")

    static, dynamic = made(0.5), made(None)
    before = {name: p.clone() for name, p in static.named_parameters()}
    for here, new in ((static, dynamic), (dynamic, static)):
        with pytest.raises(NotImplementedError, match=r"layer: .*\(down_proj_input_scale, up_proj_input_scale\)"):
            refresh(here, new, "layer")
    assert all(torch.equal(p, before[name]) for name, p in static.named_parameters())
    for other in (torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 1)):  # copies of which torch would make
        with pytest.raises(NotImplementedError, match=r"layer: .*weight\)"):
            refresh(torch.nn.Linear(4, 4), other, "layer")
    new = made(0.25)
    places = [p.data_ptr() for p in static.parameters()]
    refresh(static, new, "layer")
    assert all(torch.equal(p, new.get_parameter(name)) for name, p in static.named_parameters())
    assert places == [p.data_ptr() for p in static.parameters()]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_layer_is_read_from_its_folder(tmp_path, dialect):
    """As for gpt-oss: the second of two layers, and of its experts the part of the second of two ranks."""
    convert_checkpoint(folder(tmp_path, gpt_oss), tmp_path / "nvfp4", Options(dialect=dialect))
    files, names = tensors(tmp_path / "nvfp4"), DIALECTS[dialect]
    experts = NVFP4Experts(2, 64, 48, Gate(), bias=torch.float32)
    loader = ExpertLoader(experts, "language_model.model.layers.1.mlp.experts", names)
    loader.read(tmp_path / "nvfp4", lambda e: e - 2)
    loader.finish()
    for e in (2, 3):
        for part in PARTS:
            stem = f"model.layers.1.mlp.experts.{e}.{part}"
            rows = slice(None) if part == "down_proj" else slice(0, 48) if part == "gate_proj" else slice(48, None)
            stack = "down_proj" if part == "down_proj" else "gate_up_proj"
            assert torch.equal(getattr(experts, stack)[e - 2, rows], files[f"{stem}.{names.weight}"]), stem
            assert torch.equal(getattr(experts, f"{stack}_bias")[e - 2, rows], files[f"{stem}.bias"].float()), stem
            scale = getattr(experts, f"{part}_global_scale")[e - 2]
            stored = files[f"{stem}.{names.global_scale}"].reshape(())
            assert torch.equal(scale, 1 / stored if names.reciprocal else stored), stem


def test_a_layer_of_files_that_are_converted(tmp_path):
    """gpt-oss in MXFP4: the part of the second of two ranks is that of the folder that quantize writes; and all tensors
    come in the order of its names, or all but the experts'."""
    source, _ = mxfp4_folder(tmp_path)
    convert_checkpoint(source, tmp_path / "nvfp4", Options(device="cpu"))
    coming, wanted = Converted(str(source), Options(device="cpu")).open(), tensors(tmp_path / "nvfp4")
    layers = []
    for files in (tmp_path / "nvfp4", coming):
        experts = NVFP4Experts(2, 64, 64, Gate(), bias=torch.float32)
        loader = ExpertLoader(experts, "language_model.model.layers.1.mlp.experts", DIALECTS["modelopt"])
        loader.read(files, lambda e: e - 2)
        loader.finish()
        layers.append(experts.state_dict())
    assert all(torch.equal(tensor, layers[0][name]) for name, tensor in layers[1].items())
    passed = list(all_tensors(coming))
    assert len(passed) == len(wanted) and all(as_bytes(t) == as_bytes(wanted[name]) for name, t in passed)
    files = tensors(source)  # a later engine of this process finds others at this path
    files["model.norm.weight"] = files["model.norm.weight"] + 1
    save_file(files, source / "model.safetensors", metadata={"format": "pt", "step": "200"})
    (source / "dangling").symlink_to("nowhere")
    found = dict(all_tensors(Converted(str(source), Options(device="cpu")).open()))
    assert torch.equal(found.pop("model.norm.weight"), files["model.norm.weight"])
    assert all(as_bytes(tensor) == as_bytes(wanted[name]) for name, tensor in found.items())
    modules = [name.split(".")[:3] for name, _ in passed]
    assert [key for key, _ in itertools.groupby(modules)] == [list(key) for key in dict.fromkeys(map(tuple, modules))]
    assert [name for name, _ in all_tensors(coming, experts=False)] == [n for n, _ in passed if ".experts." not in n]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_input_scales(dialect):
    """They are static if the files have them; gate and up read the same rows, so the larger scale counts."""
    tensors = files(dialect, matrices(), 0.5)
    larger = 0.75 if dialect == "modelopt" else 1 / 0.75
    tensors["input_scale", "gate_proj", 1] = torch.tensor([larger])
    experts = fill(tensors, dialect, activations="nvfp4")
    assert torch.allclose(experts.up_proj_input_scale, torch.tensor([0.5, 0.75, 0.5]))
    assert torch.allclose(experts.down_proj_input_scale, torch.full((E,), 0.5))
    assert not hasattr(fill(tensors, dialect, activations="bf16"), "up_proj_input_scale")
    dynamic = {key: tensor for key, tensor in tensors.items() if key[0] != "input_scale"}
    assert not hasattr(fill(dynamic, dialect, activations="nvfp4"), "up_proj_input_scale")
    del tensors["input_scale", "down_proj", 2]
    with pytest.raises(ValueError, match=r"down_proj\.input_(global_)?scale of expert 2 .* calibrate"):
        fill(tensors, dialect, activations="nvfp4")


@pytest.mark.parametrize("kind", ["weight", "sf", "global_scale"])
@pytest.mark.parametrize("part", PARTS)
def test_what_is_missing_is_named(kind, part):
    tensors = files("modelopt", matrices())
    del tensors[kind, part, 1]
    name = {"weight": "weight", "sf": "weight_scale", "global_scale": "weight_scale_2"}[kind]
    with pytest.raises(ValueError, match=rf"layer: {part}\.{name} of expert 1 .* moe-nvfp4 verify"):
        fill(tensors, "modelopt")


def test_a_missing_half_and_a_missing_bias_are_named():
    tensors = {("weight", *key): matrix for key, matrix in matrices().items()}
    biases = {("bias", part, e): torch.zeros(shape[0]) for part, shape in PARTS.items() for e in range(E)}
    with pytest.raises(ValueError, match=r"up_proj\.bias of expert 2"):
        fill(tensors | {key: b for key, b in biases.items() if key != ("bias", "up_proj", 2)}, bias=torch.float32)
    with pytest.raises(ValueError, match="experts without biases"):
        fill(tensors | biases)
    del tensors["weight", "gate_proj", 0]
    with pytest.raises(ValueError, match=r"gate_proj\.weight of expert 0"):
        fill(tensors)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (("weight", "up_proj", 0), torch.zeros(I, H, dtype=torch.bfloat16), "bfloat16, expected torch.uint8.*ignore"),
        (("weight", "up_proj", 0), torch.zeros(I, H // 4, dtype=torch.uint8), r"shape \[96, 16\].* needs \[96, 32\]"),
        (("sf", "down_proj", 0), torch.zeros(H, I // 16), "float32, expected torch.float8_e4m3fn"),
        (("global_scale", "gate_proj", 1), torch.tensor(float("nan")), "gate_scale of expert 1 is nan"),
        (
            ("global_scale", "gate_proj", 1),
            torch.ones(2),
            r"float32 \[2\], expected one float32 number.*quantize",
        ),
        (("global_scale", "up_proj", 1), torch.tensor(0.1).bfloat16(), r"bfloat16 \[\], expected one float32.*rounded"),
        (("input_scale", "down_proj", 2), torch.tensor(0.1).half(), r"float16 \[\], expected one float32.*rounded"),
        (("sf", "down_proj", 2), torch.full((H, I // 16), 1).neg().to(torch.float8_e4m3fn), "negative block scales"),
    ],
)
def test_what_is_wrong_is_named(key, value, text):
    with pytest.raises(ValueError, match=text):
        fill(files("modelopt", matrices()) | {key: value}, "modelopt")


def test_what_cannot_be_quantized_or_shared_is_named():
    dense = {("weight", *key): matrix for key, matrix in matrices().items()}
    with pytest.raises(ValueError, match="float8_e4m3fn.*moe-nvfp4 quantize"):
        fill(dense | {("weight", "down_proj", 0): torch.zeros(H, I, dtype=torch.float8_e4m3fn)})
    dense["weight", "down_proj", 1][3, 5] = float("inf")
    with pytest.raises(ValueError, match=r"down_proj\.weight: .*NaN or Inf"):
        fill(dense)
    with pytest.raises(ValueError, match="rank of 4 has 24 channels.* 16.*--enable-expert-parallel"):
        fill({}, tp=(0, 4))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_headers_are_compared_with_the_config(tmp_path, dialect):
    convert_checkpoint(folder(tmp_path, qwen3_moe), tmp_path / "nvfp4", Options(dialect=dialect))
    info = read_config(json.loads((tmp_path / "nvfp4/config.json").read_text()))
    check_files(open_checkpoint(tmp_path / "nvfp4"), info)
    files, file = tensors(tmp_path / "nvfp4"), tmp_path / "nvfp4/model.safetensors"
    stem = "model.layers.1.mlp.experts.5.up_proj"
    for last in (info.dialect.weight, info.dialect.sf, info.dialect.global_scale):
        save_file({name: t for name, t in files.items() if name != f"{stem}.{last}"}, file)
        with pytest.raises(ValueError, match=f"{stem}.{last} is missing: every NVFP4 matrix"):
            check_files(open_checkpoint(tmp_path / "nvfp4"), info)
    save_file(files | {f"{stem}.{info.dialect.sf}": torch.zeros(48, 4)}, file)
    with pytest.raises(ValueError, match=f"{stem}.{info.dialect.sf} has dtype F32, expected F8_E4M3"):
        check_files(open_checkpoint(tmp_path / "nvfp4"), info)
    attention, scale = "model.layers.1.self_attn.k_proj", torch.ones(())
    for name in (f"{stem}.weight_scale_inv", f"{attention}.weight_scale", f"{attention}.pre_quant_scale"):
        save_file(files | {name: scale}, file)
        with pytest.raises(ValueError, match=f"{name} is a scale that nothing reads"):
            check_files(open_checkpoint(tmp_path / "nvfp4"), info)
    save_file(files | {f"{stem}.pre_quant_scale": scale}, file)  # whatever the config says
    with pytest.raises(NotImplementedError, match=f"{stem}.pre_quant_scale: .*--engine transformers"):
        check_files(open_checkpoint(tmp_path / "nvfp4"), info)
    save_file(files | {f"{attention}.k_scale": scale}, file)  # of the KV cache
    check_files(open_checkpoint(tmp_path / "nvfp4"), info)
    # experts of another precision beside them are not ours to judge
    other = {f"{stem}.weight": torch.zeros(48, 64).to(torch.float8_e4m3fn), f"{stem}.weight_scale": torch.ones(())}
    save_file({name: t for name, t in files.items() if not name.startswith(stem)} | other, file)
    check_files(open_checkpoint(tmp_path / "nvfp4"), info)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="truncated"):
        check_files(open_checkpoint(tmp_path / "nvfp4"), info)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_names_of_what_stays_dense(tmp_path, dialect):
    """Those that the ignore list's expressions mean, which vLLM translates into names of its own modules."""
    options = Options(dialect=dialect, linears="attention", exclude="model.layers.1.*")
    convert_checkpoint(folder(tmp_path, qwen3_moe), tmp_path / "nvfp4", options, progress=False)
    info = read_config(json.loads((tmp_path / "nvfp4/config.json").read_text()))
    attention = [f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"]
    routers = [f"model.layers.{i}.mlp.gate" for i in range(2)]
    want = ["lm_head", "model.layers.1.mlp.experts", *attention, *routers]
    assert sorted(dense_names(open_checkpoint(tmp_path / "nvfp4"), info)) == sorted(want)
