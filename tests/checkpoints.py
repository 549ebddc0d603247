"""Checkpoints made by hand, and their conversion."""

import json
import os

import torch
from safetensors.torch import save_file

from moe_nvfp4.quantize.convert import convert_checkpoint
from moe_nvfp4.quantize.files import INDEX
from moe_nvfp4.quantize.options import Options
from tests.common import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def converted(source, destination, workers=None, dry_run=False, **options):
    convert_checkpoint(source, destination, Options(**options), workers, dry_run, progress=False)
    return destination


def config_of(path):
    return json.loads((path / "config.json").read_text())


def edit_config(path, **changes):
    (path / "config.json").write_text(json.dumps({**config_of(path), **changes}))


def same_files(a, b):
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    for path in a.iterdir():
        assert path.read_bytes() == (b / path.name).read_bytes(), path.name


def folder(path, files, config=None, shards=1):
    """Write a checkpoint of these tensors, dealt out to shards in turn."""
    path.mkdir(parents=True)
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["MadeByHand"],  # without most of a model's tensors
        "dtype": "bfloat16",
        **(config or {}),
    }
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(files, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(files)}
    for name in set(names.values()):
        save_file({n: t for n, t in files.items() if names[n] == name}, path / name, metadata={"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


def experts(E=4, I=48, H=64, layers=1, parts=("gate_proj", "up_proj", "down_proj"), make=None, stem="mlp.experts"):
    make = make or (lambda *shape: torch.randn(shape).bfloat16())
    found = {
        "model.embed_tokens.weight": torch.randn(32, H).bfloat16(),
        "lm_head.weight": torch.randn(32, H).bfloat16(),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.self_attn.q_proj.weight"] = torch.randn(H, H).bfloat16()
        for e in range(E):
            for part in parts:
                shape = (H, I) if part in ("down_proj", "w2") else (I, H)
                found[f"{prefix}.{stem}.{e}.{part}.weight"] = make(*shape)
    return found
