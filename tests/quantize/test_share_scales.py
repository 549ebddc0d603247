"""Gate and up of an expert share a global scale in all files we write, since servers read gate's for both."""

import re

import pytest
import torch

from moe_nvfp4 import cli
from moe_nvfp4.format import dequantize, pack
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, set_activations, swap_experts
from moe_nvfp4.quantize import jobs
from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import DIALECTS
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import config_of, converted, same_files
from tests.common import relative_error
from tests.folders import (
    CONFIGS,
    is_expert,
    projection_first,
    quantized,
    qwen2_moe,
    stacked_by_projection,
    value,
    write,
)
from tests.models import as_bytes, folder, load, logits, mixtral, qwen3_moe, step3p7, tensors

GATES = {"up_proj": "gate_proj", "w3": "w1"}
ROUTES = {
    "quantize": lambda source, path: convert_checkpoint(source, path, progress=False),
    "compressed-tensors": lambda source, path: convert_checkpoint(
        source, path, Options(dialect="compressed-tensors"), progress=False
    ),
    "from_pretrained": lambda source, path: load(source, quantization_config=MoeNvfp4Config()).save_pretrained(path),
    "swap_experts": lambda source, path: swap_experts(load(source), progress=False).save_pretrained(path),
}  # fmt: skip


def test_pieces_of_matrices_give_the_bytes_of_the_whole(tmp_path, monkeypatch):
    source, _ = quantized(tmp_path / "a", qwen3_moe, "modelopt")
    whole = converted(source, tmp_path / "whole", share_scales=True)
    assert tensors(whole).keys() == tensors(source).keys()
    monkeypatch.setattr(jobs, "CHUNK", 64 * 7)
    same_files(converted(source, tmp_path / "pieces", share_scales=True), whole)


def as_a_server_reads(source, path, dialect="modelopt"):
    """A dense fp32 twin of NVFP4 files with experts one by one, with gate's global scale for both gate and up."""
    last, files, twin = DIALECTS[dialect].global_scale, tensors(source), {}
    stems = {n.removesuffix(f".{last}") for n in files if n.endswith(f".{last}")}
    for name, tensor in files.items():
        if not any(name.startswith(f"{stem}.") for stem in stems):
            twin[name] = tensor.float()
    for stem in stems:
        module, _, part = stem.rpartition(".")
        gate = f"{module}.{GATES.get(part, part)}"
        twin[f"{stem}.weight"] = value(dialect, {**files, f"{stem}.{last}": files[f"{gate}.{last}"]}, stem)
    return write(path, twin, {**config_of(source), "dtype": "float32"}, None)


def both_read(source, tmp_path, dialect="modelopt"):
    """Relative error of the server's logits against ours."""
    served = as_a_server_reads(source, tmp_path / f"{source.name}-served", dialect)
    ours = set_activations(load(source, torch.float32), "bf16")
    return relative_error(logits(load(served, torch.float32)), logits(ours))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", [qwen3_moe, mixtral], ids=lambda f: f.__name__)
def test_servers_read_what_is_made(family, route, tmp_path):
    ROUTES[route](folder(tmp_path, family), tmp_path / "nvfp4")
    dialect = route if route in DIALECTS else "modelopt"
    assert both_read(tmp_path / "nvfp4", tmp_path, dialect) < 1e-5
    assert verify_checkpoint(tmp_path / "nvfp4").warnings == []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dialect", CONFIGS)
def test_separate_scales_are_repaired(dialect, tmp_path, capsys):
    """Also in shared experts. The one with the larger scale keeps its bytes; the other changes by a few percent."""
    source, _ = quantized(tmp_path, qwen2_moe, dialect, lambda k: is_expert(k) or "shared_expert." in k, 0.01)
    assert both_read(source, tmp_path, dialect) > 0.05
    for command in ("verify", "info"):
        assert cli.main([command, str(source)]) == 0
        said = capsys.readouterr().out
        assert "10 experts have different global scales" in said and f"quantize {source} DST --share-scales" in said
    there = tmp_path / "there"
    assert cli.main(["quantize", str(source), str(there), "--share-scales", "--dialect", dialect]) == 0
    assert "| shared scales | 10 of these (gate or up) quantized again, to share" in (there / "README.md").read_text()
    said = capsys.readouterr().out
    relative = float(re.search(r" 10 of the carried matrices .* relative error of (0\.\d+)", said)[1])
    assert both_read(there, tmp_path, dialect) < 1e-5
    assert verify_checkpoint(there).warnings == []

    d, old, new = DIALECTS[dialect], tensors(source), tensors(there)
    assert old.keys() == new.keys()
    changed, error, square = set(), 0.0, 0.0
    for stem in (n.removesuffix(f".{d.global_scale}") for n in old if n.endswith(d.global_scale)):
        if any(as_bytes(old[f"{stem}.{s}"]) != as_bytes(new[f"{stem}.{s}"]) for s in d.suffixes):
            changed.add(stem)
            before, after = value(dialect, old, stem), value(dialect, new, stem)
            error, square = error + (after - before).square().sum(), square + before.square().sum()
            gate_up = [f"{stem.rpartition('.')[0]}.{part}.{d.global_scale}" for part in ("gate_proj", "up_proj")]
            scales = [d.decode_scale(old[n]) for n in gate_up]
            assert d.decode_scale(new[f"{stem}.{d.global_scale}"]) == max(scales)
            assert d.decode_scale(old[f"{stem}.{d.global_scale}"]) == min(scales)
    assert len(changed) == 10 and (error / square).sqrt() == pytest.approx(relative, abs=1e-4) and relative < 0.04
    with pytest.raises(ValueError, match="share a global scale already: leave out --share-scales"):
        convert_checkpoint(there, tmp_path / "again", Options(dialect=dialect, share_scales=True), progress=False)
    with pytest.raises(ValueError, match="is not NVFP4 yet"):
        convert_checkpoint(tmp_path / "bf16", tmp_path / "again", Options(share_scales=True), progress=False)
    with pytest.raises(ValueError, match="share_scales is True or False, got 'no'"):
        Options(share_scales="no")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stacks", "AWQ"])
def test_other_layouts_are_repaired(kind, tmp_path):
    """Their input scales and pre_quant_scale are kept."""
    if kind == "stacks":
        source, _ = stacked_by_projection(tmp_path, step3p7, 0.01)
    else:
        source, _ = quantized(
            tmp_path, qwen3_moe, "modelopt", rename=projection_first, input_scale=0.01, quant_algo="NVFP4_AWQ"
        )
        files = tensors(source)
        for stem in [n.removesuffix(".weight_scale_2") for n in files if n.endswith("weight_scale_2")]:
            files[f"{stem}.pre_quant_scale"] = torch.rand(2 * files[f"{stem}.weight"].shape[1]) + 0.5
        for name in [n for n in files if ".up_proj." in n and n.endswith(".pre_quant_scale")]:
            files[name] = files[name.replace("up_proj", "gate_proj")].clone()  # they have one input
        write(source, files, config_of(source), config_of(source)["quantization_config"])
    convert_checkpoint(source, tmp_path / "plain", progress=False)
    report = convert_checkpoint(source, tmp_path / "shared", Options(share_scales=True), progress=False)
    plain, shared = tensors(tmp_path / "plain"), tensors(tmp_path / "shared")
    assert plain.keys() == shared.keys() and report.rescaled == (8 if kind == "stacks" else 16)
    changed = {n.rpartition(".")[0] for n in plain if as_bytes(plain[n]) != as_bytes(shared[n])}
    assert len(changed) == report.rescaled
    for stem in changed:
        assert re.search(r"experts\.\d+\.(gate|up)_proj$", stem)
        assert plain[f"{stem}.input_scale"] == shared[f"{stem}.input_scale"]
        assert relative_error(value("modelopt", shared, stem), value("modelopt", plain, stem)) < 0.05
        if kind == "AWQ":
            assert torch.equal(plain[f"{stem}.pre_quant_scale"], shared[f"{stem}.pre_quant_scale"])
    assert verify_checkpoint(tmp_path / "shared", source).warnings == []


@pytest.mark.parametrize("apart, lossless", [(3, True), (15, True), (19, False)])
def test_mxfp4_halves_of_different_size(apart, lossless, tmp_path, recwarn):
    """gpt-oss: gate and up share the larger power of two. If e4m3 cannot hold the scales of both, a warning says so."""
    E, I, H, stem = 2, 32, 64, "model.layers.0.mlp.experts"
    blocks = pack(torch.randint(0, 16, (E, 2 * I, H // 32, 32), dtype=torch.uint8))
    scales = torch.full((E, 2 * I, H // 32), 120, dtype=torch.uint8)
    scales[:, 1::2] -= apart  # up
    files = {
        f"{stem}.gate_up_proj_blocks": blocks, f"{stem}.gate_up_proj_scales": scales,
        f"{stem}.down_proj_blocks": pack(torch.randint(0, 16, (E, H, I // 32, 32), dtype=torch.uint8)),
        f"{stem}.down_proj_scales": torch.full((E, H, I // 32), 120, dtype=torch.uint8),
        f"{stem}.gate_up_proj_bias": torch.zeros(E, 2 * I), f"{stem}.down_proj_bias": torch.zeros(E, H),
    }  # fmt: skip
    source = write(tmp_path / "mxfp4", files, {"model_type": "gpt_oss"}, {"quant_method": "mxfp4"})
    convert_checkpoint(source, tmp_path / "nvfp4", progress=False)
    found = tensors(tmp_path / "nvfp4")
    dense = dequantize(blocks.flatten(2), torch.full((E, 2 * I, H // 16), 0x38, dtype=torch.uint8), None)
    dense = dense * (scales.float() - 127).exp2().repeat_interleave(32, dim=2)
    for e in range(E):
        gate, up = (value("modelopt", found, f"{stem}.{e}.{part}") for part in ("gate_proj", "up_proj"))
        assert torch.equal(gate, dense[e, 0::2]) and torch.equal(up, dense[e, 1::2]) == lossless
        assert found[f"{stem}.{e}.gate_proj.weight_scale_2"] == found[f"{stem}.{e}.up_proj.weight_scale_2"]
    said = [str(w.message) for w in recwarn if "more powers of two than an e4m3 scale holds" in str(w.message)]
    assert bool(said) != lossless
