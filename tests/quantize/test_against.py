"""`verify --against` finds damage of every tensor, one at a time, and lets pass what recipes do."""

import re

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4.integrations.huggingface import swap_experts
from moe_nvfp4.quantize.gptq import quantize_gptq
from moe_nvfp4.quantize.recipes import RECIPES, quantize_matrix
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import config_of, converted, edit_config, experts, folder
from tests.folders import change_config, fp8, fused, is_expert, is_linear, quantized
from tests.models import as_bytes, dbrx, gpt_oss, load, make, qwen3_moe, tensors

MODULE = "model.layers.0.mlp.experts"
UNKNOWN = {"architectures": ["SomethingNew"]}  # so that only the original tells


def small():
    return qwen3_moe(experts=2, num_hidden_layers=1)


def small_oss():
    return gpt_oss(experts=2, intermediate=64, num_hidden_layers=1)


def dense(path):
    make(small).save_pretrained(path)
    return path


def mxfp4(path):
    """gpt-oss, with biases of experts."""
    make(small_oss).save_pretrained(path)
    files = tensors(path)
    for name in [n for n in files if n.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = files.pop(name).shape
        files[f"{name}_blocks"] = torch.randint(256, (E, N, K // 32, 16), dtype=torch.uint8)
        files[f"{name}_scales"] = torch.randint(115, 121, (E, N, K // 32), dtype=torch.uint8)
    for name in [n for n in files if n.endswith("proj_bias")]:
        files[name] = torch.randn_like(files[name])
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    change_config(path, quantization_config={"quant_method": "mxfp4"})
    return path


def fp8_blocks(path):
    make(small).save_pretrained(path)
    files = tensors(path)
    for name in [n for n in files if is_expert(n) or is_linear(n)]:
        files[name], scale, _ = fp8("block", files[name].float())
        files[f"{name}_scale_inv"] = scale.float()
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    change_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    return path


def carried(dialect):
    def make(path):
        source, _ = quantized(path, small, dialect, lambda n: is_expert(n) or is_linear(n), 0.003)
        return source

    return make


MADE = {
    "ModelOpt": (dense, dict(recipe="max")),
    "MXFP4": (mxfp4, {}),
    "compressed-tensors": (dense, dict(dialect="compressed-tensors")),
    "FP8": (fp8_blocks, {}),
    "four_over_six": (dense, dict(recipe="four_over_six")),
    "MXFP4, max": (mxfp4, dict(recipe="max", dialect="compressed-tensors")),
    "FP8, compressed-tensors": (fp8_blocks, dict(dialect="compressed-tensors")),
    "carried from ModelOpt": (carried("modelopt"), dict(dialect="compressed-tensors")),
    "carried from compressed-tensors": (carried("compressed-tensors"), {}),
    "stacks of ModelOpt": (lambda path: fused(path, small_oss, 0.01)[0], {}),
}  # fmt: skip


def times(files, name):
    """The tensor times 1.3, in its own dtype; bytes as numbers."""
    largest = {torch.uint8: 255, torch.float8_e4m3fn: 448}.get(files[name].dtype, torch.inf)
    return (files[name].float() * 1.3).clamp(max=largest).to(files[name].dtype)


def without_row(files, name):
    t = files[name].clone()
    t.view(1, -1)[:, :1].zero_() if t.dim() < 2 else t.view(torch.uint8)[-1].zero_()
    return t


def swapped(files, name):
    """Expert 1's tensor in place of expert 0's, and the other way round."""
    return files.get(other(name))


def other(name):
    return re.sub(r"experts\.([01])\.", lambda m: f"experts.{1 - int(m[1])}.", name) if ".experts." in name else None


def flipped(files, name):
    """One bit of one number's exponent, the lowest or the one above it."""
    t = files[name].clone()
    bits = {torch.float8_e4m3fn: (torch.uint8, 3), torch.float32: (torch.int32, 23), torch.bfloat16: (torch.int16, 7)}
    if t.dtype not in bits:
        return None
    integer, shift = bits[t.dtype]
    t.view(integer).view(-1)[-1] ^= 1 << shift
    return t


DAMAGE = [times, without_row, swapped, flipped]


def test_projections_that_a_tool_renames(tmp_path):
    """llm-compressor writes gate_proj where Mixtral's files have w1."""
    source = folder(tmp_path / "a", experts(E=2))
    path = converted(source, tmp_path / "b")
    files = tensors(source)
    for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        files = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in files.items()}
    assert any(".w1." in name for name in files)
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    verify_checkpoint(path, source)
    name = next(name for name in files if "0.w2." in name)
    save_file(files | {name: files[name].flip(0)}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="0.down_proj"):
        verify_checkpoint(path, source)


def test_a_global_scale_that_a_tool_gave_to_more_matrices(tmp_path):
    """ModelOpt: to all that read the same rows, of which servers fuse only some."""
    source = dense(tmp_path / "source")
    path, originals = converted(source, tmp_path / "new", linears="attention"), tensors(source)
    files, scales = tensors(path), {}
    for name in [n for n in files if n.endswith(("q_proj.weight_scale_2", "o_proj.weight_scale_2"))]:
        module = name.rpartition("self_attn.")[0]
        scales[module] = max(files[name], scales.get(module, torch.tensor(0.0)))
    for name in [n for n in files if ".self_attn." in n and n.endswith("proj.weight_scale_2")]:
        stem, scale = name.removesuffix(".weight_scale_2"), scales[name.rpartition("self_attn.")[0]]
        codes, sf, _ = quantize_matrix(originals[f"{stem}.weight"], "mse", scale)
        files |= {f"{stem}.weight": codes, f"{stem}.weight_scale": sf, name: scale.clone()}
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    verify_checkpoint(path, source)
    files[name] = files[name] * 1.3
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.\d\.self_attn\.\w_proj\.weight_scale_2 stands for"):
        verify_checkpoint(path, source)


@pytest.mark.slow
@pytest.mark.parametrize("made", MADE)
def test_every_tensor_is_compared(made, tmp_path):
    """Each tensor of a converted folder is damaged in four ways, one at a time, and `verify` names it."""
    source, options = MADE[made]
    source = source(tmp_path / "source")
    change_config(source, **UNKNOWN)
    path = converted(source, tmp_path / "new", **options)
    verify_checkpoint(path, source)
    files, missed = tensors(path), []
    for name in (n for n in files if "experts.1." not in n):
        for damage in DAMAGE:
            new = damage(files, name)
            if new is None or as_bytes(new) == as_bytes(files[name]):
                continue
            there = {name: new.contiguous()}
            if damage is swapped:
                there[other(name)] = files[name]
            save_file(files | there, path / "model.safetensors", metadata={"format": "pt"})
            try:
                verify_checkpoint(path, source)
                missed.append(f"{name}, {damage.__name__}: good")
            except ValueError as error:
                stems = tuple(n.rpartition(".")[0] if ".experts." in n else n for n in there)
                if not str(error).startswith(stems):
                    missed.append(f"{name}, {damage.__name__}: {error}")
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("size", [1e-25, 1e21])
def test_sums_of_very_small_and_very_large_numbers(size, tmp_path):
    """Squares of these are beyond float32: block scales of zeros are found, and errors are measured."""
    files = {name: t.float() * size if ".experts." in name else t for name, t in experts(E=2).items()}
    source = folder(tmp_path / "a", files, {"dtype": "float32"})
    path = converted(source, tmp_path / "b")
    assert 0.08 < verify_checkpoint(path, source).layers[MODULE].relative < 0.1
    made = tensors(path)
    made[f"{MODULE}.1.up_proj.weight_scale"].view(torch.uint8).zero_()
    save_file(made, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"^{MODULE}.1.up_proj is damaged in row"):
        verify_checkpoint(path, source)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_recipes_do_is_let_pass(recipe, dtype, tmp_path):
    """Rows of every size, also below the smallest block scale; matrices of zeros; a gate far smaller than its up."""
    rows = torch.exp2(-torch.arange(48.0))[:, None]
    files = experts(E=4, make=lambda N, K: torch.randn(N, K) * rows[:N] if N <= 48 else torch.randn(N, K))
    files[f"{MODULE}.1.gate_proj.weight"] *= 1e-7
    files[f"{MODULE}.2.down_proj.weight"].zero_()
    files[f"{MODULE}.3.up_proj.weight"][5:] = torch.tensor([6.0, *[5.0] * 15]).repeat(4)
    source = folder(tmp_path / "a", {n: t.to(getattr(torch, dtype)) for n, t in files.items()}, {"dtype": dtype})
    assert verify_checkpoint(converted(source, tmp_path / "b", recipe=recipe), source).layers[MODULE].relative < 0.2


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rows", [40, 1, 400])
def test_what_gptq_does_is_let_pass(rows, tmp_path):
    """Few rows of inputs with columns of very different size move blocks most; a row of zeros is found."""
    files = experts(E=2, I=128, H=128)
    source = folder(tmp_path / "a", files)
    path = converted(source, tmp_path / "b")
    made, x = tensors(path), torch.randn(rows, 128) * torch.exp(1.5 * torch.randn(128))
    for e in range(2):
        w = {part: files[f"{MODULE}.{e}.{part}.weight"].float() for part in ("gate_proj", "up_proj", "down_proj")}
        for parts in (("gate_proj", "up_proj"), ("down_proj",)):
            codes, sf, scale = quantize_gptq(torch.cat([w[part] for part in parts])[None], (x.T @ x / rows)[None])
            for i, part in enumerate(parts):
                stem, at = f"{MODULE}.{e}.{part}", slice(128 * i, 128 * (i + 1))
                made |= {f"{stem}.weight": codes[0, at].clone(), f"{stem}.weight_scale": sf[0, at].clone()}
                assert torch.equal(made[f"{stem}.weight_scale_2"], scale[0])
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    config = config_of(path)
    config["quantization_config"]["moe_nvfp4"]["recipe"] = "gptq"
    edit_config(path, **config)
    verify_checkpoint(path, source)
    made[f"{MODULE}.1.up_proj.weight"][70] = 0
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"^{MODULE}.1.up_proj is damaged in row 70, "):
        verify_checkpoint(path, source)


def test_rows_of_zeros_beside_numbers_that_vanish(tmp_path):
    """Rows of a gate that is 1e-30 of its up become zeros, and those that were zeros stay so."""
    files = experts(E=2)
    gate = files[f"{MODULE}.1.gate_proj.weight"]
    gate *= 1e-30
    gate[7] = 0
    source = folder(tmp_path / "a", files)
    path = converted(source, tmp_path / "b")
    config = config_of(path)
    config["quantization_config"]["moe_nvfp4"]["recipe"] = "gptq"  # whose limit is the length of rows
    edit_config(path, **config)
    assert any("1.gate_proj: 1)" in line for line in verify_checkpoint(path, source).warnings)


def test_input_scales_of_a_carried_folder(tmp_path):
    """They are the source's, or were left out for W4A16; a folder that says W4A4 has them."""
    source = carried("modelopt")(tmp_path / "a")
    change_config(source, **UNKNOWN)
    path = converted(source, tmp_path / "b", dialect="compressed-tensors")
    files = tensors(path)
    last = "input_global_scale"
    save_file(
        {n: torch.full((1,), 7.0) if n.endswith(last) else t for n, t in files.items()}, path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=f"{last} is 7, from .* it is "):
        verify_checkpoint(path, source)
    save_file({n: t for n, t in files.items() if not n.endswith(last)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{last} is in .* and not in"):
        verify_checkpoint(path, source)
    config = config_of(path)
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    edit_config(path, **config)
    with pytest.raises(
        ValueError, match="W4A16.*and under moe_nvfp4.*static activation scales: for W4A16 make input_s"
    ):
        verify_checkpoint(path, source)
    config["quantization_config"]["moe_nvfp4"].update(input_scale=False, activations="bf16")
    edit_config(path, **config)
    verify_checkpoint(path, source)


def test_settings_that_differ_are_said(tmp_path):
    """Not those that change no result: names, dtypes, versions."""
    source = dense(tmp_path / "a")
    path = converted(source, tmp_path / "b")
    change_config(path, transformers_version="4.0", pad_token_id=3, dtype="float16")
    assert verify_checkpoint(path, source).warnings == []
    rope = {"rope_type": "default", "rope_theta": 5e5}
    change_config(path, num_experts_per_tok=1, norm_topk_prob=True, rope_parameters=rope)
    (said,) = verify_checkpoint(path, source).warnings
    for setting in (r"num_experts_per_tok 1 \(there 2\)", r"norm_topk_prob True \(there False\)",
                    r"rope_parameters.rope_theta 500000.0 \(there 10000.0\)"):  # fmt: skip
        assert re.search(setting, said), said


def test_a_saved_model_has_the_settings_of_its_source(tmp_path):
    """DBRX's config has a dtype in each of its parts once it was saved."""
    make(dbrx).save_pretrained(tmp_path / "a")
    swap_experts(load(tmp_path / "a"), progress=False).save_pretrained(tmp_path / "b")
    assert verify_checkpoint(tmp_path / "b", tmp_path / "a").warnings == []


def test_tensors_that_the_source_lacks(tmp_path):
    """A model that is loaded from incomplete files has random numbers there, and saves them."""
    files = experts(E=2) | {"model.layers.0.self_attn.o_proj.weight": torch.randn(64, 64)}
    path = converted(folder(tmp_path / "a", files), tmp_path / "b")
    del files["model.layers.0.self_attn.o_proj.weight"]
    with pytest.raises(ValueError, match="o_proj.weight is in .*/b and not in .*/c: .* random numbers"):
        verify_checkpoint(path, folder(tmp_path / "c", files))


def test_linears_alone(tmp_path):
    """With experts that stay dense, as ModelOpt's config for attention leaves them."""
    path, _ = quantized(tmp_path, small, "modelopt", is_linear, 0.003)
    assert verify_checkpoint(path, tmp_path / "bf16").experts
    files = tensors(path)
    name = next(n for n in files if n.endswith("o_proj.weight"))
    save_file(files | {name: files[name].flip(0)}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="o_proj"):
        verify_checkpoint(path, tmp_path / "bf16")


def test_linears_that_another_tool_quantized(tmp_path):
    """NVFP4 linears are compared with the dense ones of the original."""
    source, _ = quantized(tmp_path, small, "modelopt", lambda n: is_expert(n) or is_linear(n))
    found = verify_checkpoint(source, tmp_path / "bf16").layers
    assert 0.05 < found["model.layers.0.self_attn.q_proj"].relative < 0.12
    files = tensors(source)
    files["model.layers.0.self_attn.q_proj.weight_scale_2"] *= 1.3
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="q_proj.weight_scale_2 stands for"):
        verify_checkpoint(source, tmp_path / "bf16")


def test_weights_that_a_cast_rounds_to_zero_are_not_damaged(tmp_path):
    """A dead expert in float32, which config.json's float16 cannot hold: from_pretrained makes zeros of it, too."""
    source = folder(tmp_path / "a", experts(E=2), UNKNOWN | {"dtype": "float16"})
    files = {name: t.float() for name, t in tensors(source).items()}
    for part in ("gate_proj", "up_proj", "down_proj"):
        files[f"{MODULE}.1.{part}.weight"] *= 1e-8
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    made = converted(source, tmp_path / "b")
    assert any("3 matrices are more than" in warning for warning in verify_checkpoint(made, source).warnings)
    codes = tensors(made)
    codes[f"{MODULE}.0.up_proj.weight"][3] = 0  # what is damaged still is
    save_file(codes, made / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{MODULE}.*up_proj is damaged"):
        verify_checkpoint(made, source)


def test_matrices_that_vanish_beside_larger_ones_are_said(tmp_path):
    """Gate and up share a global scale, and block scales reach 2^-18 of the largest only."""
    for factor, warned in ((1e4, False), (3e5, True)):
        source = folder(tmp_path / f"a{factor}", experts(E=2), UNKNOWN | {"dtype": "float32"})
        files = tensors(source)
        files[f"{MODULE}.1.gate_proj.weight"] = files[f"{MODULE}.1.gate_proj.weight"].float() * factor
        save_file(files, source / "model.safetensors", metadata={"format": "pt"})
        found = verify_checkpoint(converted(source, tmp_path / f"b{factor}"), source).warnings
        line = f"1 matrices are more than 0.2 times their norm away from their originals ({MODULE}.1.up_proj: 1)"
        assert any(line in warning for warning in found) == warned


def test_dense_tensors_that_were_rounded(tmp_path):
    """MiniMax-M2's routers are float32 in files, and bf16 in a model that is; to save that is no damage, but told."""
    source, router = dense(tmp_path / "bf16"), "model.layers.0.mlp.gate.weight"
    for wide, lost in ((lambda t: t.float(), []), (lambda t: t.float() * 1.001, [router])):
        files = tensors(source)
        save_file(files | {router: wide(files[router])}, source / "model.safetensors", metadata={"format": "pt"})
        quantized = converted(source, tmp_path / f"nvfp4{len(lost)}")
        assert verify_checkpoint(quantized, against=source).warnings == []
        load(quantized).save_pretrained(tmp_path / f"saved{len(lost)}")
        warnings = verify_checkpoint(tmp_path / f"saved{len(lost)}", against=quantized).warnings
        assert [line for line in warnings if "1 dense tensors are rounded" in line and router in line] == warnings
        assert len(warnings) == len(lost)
