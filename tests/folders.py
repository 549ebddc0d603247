"""4-bit folders as other tools write them, made from the definitions of their formats, and their dense twins."""

import json
import re
import zlib

import torch
from safetensors.torch import save_file

from moe_nvfp4.format import dequantize
from moe_nvfp4.quantize.recipes import quantize_matrix, recipe_global_scale
from tests.models import SMALL, make, tensors


def qwen2_moe():
    """A model with biases in the attention, and a shared expert."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    small = {k: v for k, v in SMALL.items() if k != "head_dim"}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(
        **small, intermediate_size=96, moe_intermediate_size=48, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2))  # fmt: skip


def is_expert(key):
    return ".experts." in key


def is_linear(key):
    return any(part in key for part in ("self_attn.", "shared_expert.", "lm_head")) and key.endswith("proj.weight")


NUMBERS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
CONFIGS = {
    "modelopt": {
        "quant_method": "modelopt", "quant_algo": "NVFP4",
        "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "group_size": 16}, "input_activations": {"num_bits": 4, "group_size": 16},
            "targets": ["Linear"]}},
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {
            "targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": {**NUMBERS, "dynamic": False},
            "input_activations": {**NUMBERS, "dynamic": "local"}, "output_activations": None}},
        "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None,
    },
}  # fmt: skip


def expert_by_hand(gate, up, down, recipe="mse"):
    """projection -> (codes, sf, global scale) of one expert as in new files: gate and up share their global scale."""
    scale = recipe_global_scale(torch.cat([gate, up]).abs().amax().float(), recipe)
    return {"gate_proj": quantize_matrix(gate, recipe, scale), "up_proj": quantize_matrix(up, recipe, scale),
            "down_proj": quantize_matrix(down, recipe)}  # fmt: skip


def stored(dialect, stem, matrix, input_scale=None):
    """The tensors of one NVFP4 matrix as a tool writes them, by the definition of each dialect."""
    codes, sf, scale = quantize_matrix(matrix.float(), "max")
    found = {f"{stem}.weight_scale": sf}
    if dialect == "modelopt":
        found |= {f"{stem}.weight": codes, f"{stem}.weight_scale_2": scale}
        if input_scale:
            found[f"{stem}.input_scale"] = torch.tensor(input_scale)
        return found
    found |= {f"{stem}.weight_packed": codes, f"{stem}.weight_global_scale": (1 / scale).reshape(1)}
    if input_scale:
        found[f"{stem}.input_global_scale"] = torch.tensor([1 / input_scale])
    return found


def value(dialect, files, stem):
    """The values of one NVFP4 matrix of a folder, fp32."""
    if dialect == "modelopt":
        return dequantize(files[f"{stem}.weight"], files[f"{stem}.weight_scale"], files[f"{stem}.weight_scale_2"])
    scale = 1 / files[f"{stem}.weight_global_scale"].reshape(())
    return dequantize(files[f"{stem}.weight_packed"], files[f"{stem}.weight_scale"], scale)


def write(path, files, config, quantization):
    path.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in files.items()}, path / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in config.items() if k != "quantization_config"}
    if quantization is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))
    return path


def quantized(tmp_path, family, dialect, which=is_expert, input_scale=None, rename=lambda stem: stem, **config):
    """A folder of `family` whose weights `which` are NVFP4, and its twin with the dequantized weights in fp32. Each
    input has `input_scale`, or 2 or 4 times as much."""
    source = tmp_path / "bf16"
    if not source.exists():
        make(family).save_pretrained(source)
    files, twin = {}, {}
    for key, tensor in tensors(source).items():
        twin[key] = tensor.float()
        if tensor.dim() != 2 or not which(key):
            files[key] = tensor
            continue
        stem = key.removesuffix(".weight")
        same_input = zlib.crc32(stem.replace("gate_proj", "up_proj").encode())
        new = stored(dialect, rename(stem), tensor, input_scale and input_scale * 2.0 ** (same_input % 3))
        files |= new
        twin[key] = value(dialect, new, rename(stem))
    original = json.loads((source / "config.json").read_text())
    folder = write(tmp_path / dialect, files, original, {**CONFIGS[dialect], **config})
    return folder, write(tmp_path / f"{dialect}-twin", twin, {**original, "dtype": "float32"}, None)


def awq(tmp_path, family, input_scale=None):
    """A folder of NVFP4_AWQ, whose experts and linears multiply their inputs by a vector, and its twin, which has the
    vectors in its weights."""
    folder, twin = quantized(tmp_path, family, "modelopt", lambda k: is_expert(k) or is_linear(k), input_scale,
                             quant_algo="NVFP4_AWQ")  # fmt: skip
    files, dense = tensors(folder), tensors(twin)
    for key in [k for k in files if k.endswith("weight_scale_2")]:
        stem = key.removesuffix(".weight_scale_2")
        K = 2 * files[f"{stem}.weight"].shape[1]
        torch.manual_seed(zlib.crc32(stem.replace("gate_proj", "up_proj").encode()))
        awq_scale = torch.randint(1, 9, (K,)) / 4  # of few bits: products with it are exact
        files[f"{stem}.pre_quant_scale"] = awq_scale.bfloat16()
        dense[f"{stem}.weight"] = dense[f"{stem}.weight"] * awq_scale
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, twin / "model.safetensors", metadata={"format": "pt"})
    return folder, twin


def fused(tmp_path, family, input_scale=None):
    """A folder as ModelOpt exports Llama 4 and gpt-oss, with stacks [E, in/2, out] and one scale for all experts; and
    its twin."""
    make(family).save_pretrained(tmp_path / "bf16")
    files, twin = tensors(tmp_path / "bf16"), {}
    for key in list(files):
        twin[key] = files[key].float()
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        E, K, N = files[key].shape
        codes, sf, scale = quantize_matrix(files.pop(key).transpose(1, 2).reshape(E * N, K), "max")
        twin[key] = dequantize(codes, sf, scale).view(E, N, K).transpose(1, 2)
        files[key] = codes.view(E, N, K // 2).transpose(1, 2)
        files[f"{key}_weight_scale"] = sf.view(E, N, K // 16).transpose(1, 2)
        files[f"{key}_weight_scale_2"] = scale
        if input_scale:
            files[f"{key}_input_scale"] = torch.tensor(input_scale)
    original = json.loads((tmp_path / "bf16/config.json").read_text())
    folder = write(tmp_path / "fused", files, original, CONFIGS["modelopt"])
    return folder, write(tmp_path / "fused-twin", twin, {**original, "dtype": "float32"}, None)


def stacked_by_projection(tmp_path, family, input_scale=None):
    """A folder as ModelOpt exports Step-3, with codes [E, out, in/2], sf [E, out, in/16] and scales [E] for each
    projection; and its twin."""
    make(family).save_pretrained(tmp_path / "bf16")
    files, twin = tensors(tmp_path / "bf16"), {}
    for key in list(files):
        twin[key] = files[key].float()
        if files[key].dim() == 3 and ".moe." in key:
            parts = [stored("modelopt", "x", w, input_scale) for w in files.pop(key)]
            twin[key] = torch.stack([value("modelopt", part, "x") for part in parts])
            for name in parts[0]:
                files[key.replace("weight", name.removeprefix("x."))] = torch.stack([p[name] for p in parts])
    original = json.loads((tmp_path / "bf16/config.json").read_text())
    folder = write(tmp_path / "stacks", files, original, CONFIGS["modelopt"])
    return folder, write(tmp_path / "stacks-twin", twin, {**original, "dtype": "float32"}, None)


def projection_first(stem):
    return re.sub(r"experts\.(\d+)\.(\w+)", r"experts.\2.\1", stem)


def fp8(kind, weight, power_of_two=False):
    """(e4m3 codes, scales, their values in fp32) for a weight [N, K] whose sides are multiples of 32."""
    rows, columns = {"tensor": weight.shape, "row": (1, weight.shape[1]), "mx": (1, 32), "block": (128, 128)}[kind]
    N, K = weight.shape
    grid = -(-N // rows), -(-K // columns)
    padded = torch.zeros(grid[0] * rows, grid[1] * columns)
    padded[:N, :K] = weight
    blocks = padded.view(grid[0], rows, grid[1], columns)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    scale = scale.log2().ceil().exp2() if kind == "mx" or power_of_two else scale
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    worth = (codes.float() * scale).reshape(padded.shape)[:N, :K]
    scale = scale.reshape(grid)
    if kind == "mx":
        scale = (scale.log2() + 127).to(torch.uint8)
    return codes.reshape(padded.shape)[:N, :K].contiguous(), scale.reshape(()) if kind == "tensor" else scale, worth


def as_published(folder):
    """Name the tensors of some models, as transformers 5.24 saves them, as their repositories do."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    files = {}
    for name, tensor in tensors(folder).items():
        if family == "kimi_k25":
            name = name.replace(".model.blocks.", ".model.layers.").replace("model.mm_projector.", "mm_projector.")
            name = name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
        elif family in ("kimi_linear", "minimax_m3_vl"):
            name = re.sub(r"\.block_sparse_moe\.((gate|up|down)_proj\.|fc\d\.)", r".mlp.\1", name)
        elif family == "bailing_hybrid":
            name = name.replace(".0.attention.dense.", ".0.attention.o_proj.")  # of the first layer, linear attention
        elif family == "hy_v4":
            name = re.sub(r"\.hc_pre\.(hc_(?:attn|mlp)_layer)\.", r".\1.hc_pre.", name)
            name = name.replace(".hc_pre.hc_head.", ".hc_head.")
            name = name if "self_attn" in name else name.replace(".linear_gate.", ".gate_proj.")
        elif family == "deepseek_v4":
            name = name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.").replace("hc_head.hc", "hc_head")
            name = name.replace("embed_tokens.", "embed.")
        files[name] = tensor
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
