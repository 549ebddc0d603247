"""Numbers that files cannot hold are errors by name, before anything is published."""

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.dialects import COMPRESSED_TENSORS, MODELOPT
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.verify import verify_checkpoint
from tests.checkpoints import converted, experts, folder
from tests.folders import change_config, quantized, value
from tests.models import qwen3_moe, tensors
from tests.quantize.test_against import fp8_blocks, mxfp4

DOWN = "model.layers.0.mlp.experts.0.down_proj"


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_pruned_expert_in_mxfp4(dialect, tmp_path):
    """Zeros with any scale get the global scale 1, and the smallest scales stay exact."""
    source = mxfp4(tmp_path / "source")
    files = tensors(source)
    for part in ("gate_up_proj", "down_proj"):
        files[f"model.layers.0.mlp.experts.{part}_blocks"][0] = 0x80  # zeros, half of them negative
        files[f"model.layers.0.mlp.experts.{part}_scales"][0] = 0
        files[f"model.layers.0.mlp.experts.{part}_scales"][1] = torch.randint(0, 6, (1,), dtype=torch.uint8)
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    path = converted(source, tmp_path / "new", dialect=dialect)
    made = tensors(path)
    last = "weight_scale_2" if dialect == "modelopt" else "weight_global_scale"
    assert float(made[f"{DOWN}.{last}"]) == 1.0 and not value(dialect, made, DOWN).any()
    assert verify_checkpoint(path, source).layers["model.layers.0.mlp.experts"].relative == 0


def test_global_scales_without_a_reciprocal(tmp_path):
    source, _ = quantized(tmp_path, lambda: qwen3_moe(experts=2, num_hidden_layers=1), "modelopt")
    files = tensors(source)
    files[f"{DOWN}.weight_scale_2"] = torch.tensor(2e-39)
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{DOWN}.weight_scale_2: the global scale 2e-39 cannot be written in compr"):
        convert_checkpoint(source, tmp_path / "new", Options(dialect="compressed-tensors"), progress=False)
    assert not (tmp_path / "new").exists()
    assert MODELOPT.encode_scale(torch.tensor(2e-39)) == torch.tensor(2e-39)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        for dialect in (MODELOPT, COMPRESSED_TENSORS):
            with pytest.raises(ValueError, match="cannot be written"):
                dialect.encode_scale(torch.tensor(scale))


@pytest.mark.parametrize(
    "scale, dtype", [(float("nan"), "bfloat16"), (float("inf"), "bfloat16"), (1e38, "bfloat16"), (300.0, "float16")]
)
def test_fp8_linears_beyond_their_dtype(scale, dtype, tmp_path):
    source = fp8_blocks(tmp_path / "source")
    files, name = tensors(source), "model.layers.0.self_attn.q_proj.weight"
    files[f"{name}_scale_inv"].fill_(scale)
    save_file(files, source / "model.safetensors", metadata={"format": "pt"})
    change_config(source, dtype=dtype)
    with pytest.raises(ValueError, match=f"{name} has the value .* not finite in {dtype}"):
        converted(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("last", ["weight_g_idx", "weight_zero_point", "smooth_scale", "anything"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_tensors_beside_nvfp4_weights(dialect, last, tmp_path):
    """What nobody reads beside a matrix is an error wherever its files are read; scales of a KV cache are not its."""
    source, _ = quantized(tmp_path, lambda: qwen3_moe(experts=2, num_hidden_layers=1), dialect)
    files = tensors(source)
    save_file(files | {f"{DOWN}.{last}": torch.arange(48)}, source / "model.safetensors", metadata={"format": "pt"})
    other = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}[dialect]
    for read in (verify_checkpoint, lambda path: converted(path, tmp_path / "new", dialect=other)):
        with pytest.raises(ValueError, match=f"{DOWN}.{last} is a scale that nothing reads"):
            read(source)


@pytest.mark.parametrize("name", [
    "model.layers.0.self_attn.q_proj.weight_g_idx", "model.layers.0.self_attn.q_proj.qzeros",  # GPTQ's, AWQ's
    "model.layers.0.self_attn.q_proj.weight.absmax", f"{DOWN}.g_idx", f"{DOWN}.anything",  # bitsandbytes'
])  # fmt: skip
def test_dense_sources_with_a_part_of_a_quantized_weight(name, tmp_path):
    """Such a name anywhere; beside an expert's matrix that becomes 4-bit, any name."""
    files = experts(E=2) | {name: torch.arange(64)}
    with pytest.raises(ValueError, match=f"{name} is a scale that nothing reads"):
        converted(folder(tmp_path / "a", files), tmp_path / "b")
    assert not (tmp_path / "b").exists()
