"""What a checkpoint is, by its config and headers: dense, FP8, MXFP4 or NVFP4, in which dialect and which dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import ModuleType

import torch

from moe_nvfp4.quantize.dialects import DIALECTS, Dialect, QuantizationInfo, read_config
from moe_nvfp4.quantize.files import TORCH_DTYPES, Checkpoint, TensorSlice, read_json
from moe_nvfp4.quantize.layouts import Matrix, fp8, mxfp4, nvfp4

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # in safetensors -> in a config


def quantized_layouts(q: Mapping) -> tuple[ModuleType, ...]:
    """The layouts of quantized weights in files with this quantization_config; none: they are dense, or unknown."""
    if mxfp4.describes(q):
        return (mxfp4,)
    return (fp8, mxfp4) if q.get("quant_method") == "fp8" else ()  # DeepSeek V4 has both


def quantized_form(config: Mapping) -> str | None:
    """What a checkpoint's config, or its quantization_config, says that the files are: "NVFP4", or "MXFP4" or "FP8",
    which a conversion makes NVFP4; None: dense. ValueError for other formats."""
    q: Mapping = config.get("quantization_config", config if "quant_method" in config else None) or {}
    if not q:
        return None
    if mxfp4.describes(q):
        return "MXFP4"
    if read_config(config) is not None:
        return "NVFP4"
    if not quantized_layouts(q):
        raise ValueError(f"the files are {_not_read(q)}: use the original checkpoint")
    return "FP8"


def _not_read(q: Mapping) -> str:
    """What error messages say of files with this quantization_config, which no layout reads."""
    return (
        f"quantized with {q.get('quant_method')!r}; this library reads fp8 (in blocks), MXFP4, and NVFP4 of "
        f"{' or '.join(DIALECTS)}"
    )


def becomes_nvfp4(config: Mapping) -> str | None:
    """ "MXFP4" or "FP8", if that is the `quantized_form`; else None, for formats that are not read, too."""
    try:
        form = quantized_form(config)
    except ValueError:
        return None
    return form if form in ("MXFP4", "FP8") else None


def quantized_weights(source: Checkpoint, left: Mapping[str, TensorSlice]) -> dict[str, tuple[Matrix, tuple[str, ...]]]:
    """The quantized weights of a source that files keep one by one: stem -> matrix, its tensors' names."""
    layouts = quantized_layouts(source.config.get("quantization_config") or {})
    found = fp8.block_weights(source, left) if fp8 in layouts else {}
    return found | (mxfp4.weights(left) if mxfp4 in layouts else {})


def nvfp4_info(source: Checkpoint) -> QuantizationInfo | None:
    """What the configs say about NVFP4; None for dense, FP8 and MXFP4 sources. ValueError for other formats."""
    q: Mapping = source.config.get("quantization_config") or {}
    hf = source.folder / "hf_quant_config.json"
    if not q and not hf.is_file():
        return None
    if mxfp4.describes(q):
        return None
    info = read_config(source.config, read_json(hf) if hf.is_file() else None)
    if info is None and not quantized_layouts(q):
        raise ValueError(f"{source.folder} is {_not_read(q)}: quantize the original checkpoint")
    return info


def nvfp4_files(checkpoint: Checkpoint) -> tuple[QuantizationInfo, nvfp4.NVFP4Files]:
    """What an NVFP4 checkpoint's config says, and what its files hold. ValueError if it is not NVFP4, is damaged,
    or has names that only from_pretrained reads."""
    info = nvfp4_info(checkpoint)
    if info is None:
        raise ValueError(f"{checkpoint.folder} is not an NVFP4 checkpoint: its config.json has no such "
                         "quantization_config")  # fmt: skip
    return info, read_nvfp4(checkpoint, info.dialect)


def read_nvfp4(checkpoint: Checkpoint, dialect: Dialect) -> nvfp4.NVFP4Files:
    """What the files of an NVFP4 checkpoint in this dialect hold. ValueError as in `nvfp4_files`."""
    files = nvfp4.read(checkpoint, dialect)
    if files.parameters:
        raise ValueError(f"{checkpoint.folder}: the files have the parameters of 4-bit layers under their own names "
                         f"({next(iter(files.parameters))}; torch.save and save_original_format=False write them), "
                         "which only from_pretrained reads: load the model, and save_pretrained it, unless it is "
                         "ERNIE 4.5 VL, which has no other names")  # fmt: skip
    return files


def nothing_there(folder: str, files: nvfp4.NVFP4Files, dialect: Dialect) -> str:
    """The error message for files without an NVFP4 matrix whose config says that they are NVFP4."""
    why = (
        "a shard is missing, or the config is of other files; if they are dense (a model that from_config made of a "
        "4-bit folder's config was saved), remove its quantization_config, and hf_quant_config.json"
    )
    for other in DIALECTS.values():
        if other is not dialect and any(name.endswith(f".{other.global_scale}") for name in files.tensors):
            why = (
                f"they are named as {other.name} names them, and the config is {dialect.name}'s: copy the config that "
                "belongs to the files"
            )
    return f"{folder} says NVFP4 in its config, but no tensor ends in .{dialect.global_scale}: {why}"


def config_dtype(config: Mapping) -> str | None:
    """The dtype that a config names for its weights, as safetensors writes it ("BF16"); None if it names none."""
    known = {name: stored for stored, name in DTYPES.items()}
    named = [c.get("dtype") or c.get("torch_dtype") for c in (config, config.get("text_config") or {})]
    found = [known[d] for d in (str(d).removeprefix("torch.") for d in named) if d in known]
    return found[0] if found else None


def dense_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype of a model with these files: the one that the config names, else that of most bytes of dense weights,
    as safetensors writes it; None if there are none."""
    sizes = Counter[str]()
    for stored in checkpoint.tensors.values():
        if stored.dtype in DTYPES:
            sizes[stored.dtype] += stored.size
    return config_dtype(checkpoint.config) or max(sizes, key=lambda dtype: sizes[dtype], default=None)


def model_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype to load these files in: `dense_dtype`; bf16 if there is none."""
    return TORCH_DTYPES[dense_dtype(checkpoint) or "BF16"]
