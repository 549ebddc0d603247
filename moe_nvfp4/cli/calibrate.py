"""moe-nvfp4 calibrate: add static activation scales."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_nvfp4.cli.models import folder, load, text_of, windows_of
from moe_nvfp4.cli.options import (
    MODEL_HELP,
    Commands,
    add_device,
    add_quantizing,
    add_texts,
    check_writable,
    command,
    path,
)
from moe_nvfp4.cli.output import note

if TYPE_CHECKING:
    from moe_nvfp4.quantize.files import Checkpoint, TensorSlice


def add(commands: Commands) -> None:
    sub = command(
        commands, "calibrate", run, "add static activation scales",
        "Load MODEL with 4-bit experts, run a text through it and write DST: the same weights, plus an input_scale "
        "for every expert and every 4-bit linear. W4A4 then needs no scale per token. Other files "
        "are copied, and the model card says what was done. Takes the memory of the 4-bit model.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("destination", metavar="DST", type=path, help="folder to make; must not exist")
    add_texts(sub, 4, shortest=1)
    add_quantizing(sub)
    add_device(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.integrations.huggingface import calibrate, set_activations
    from moe_nvfp4.linear import NVFP4Linear
    from moe_nvfp4.quantize.card import ACTIVATIONS, misread_by, write_rows
    from moe_nvfp4.quantize.convert import copy_files, other_files, surplus_of
    from moe_nvfp4.quantize.files import StagingDir, open_checkpoint
    from moe_nvfp4.quantize.source import model_dtype

    if args.destination.exists():
        raise ValueError(f"{args.destination} exists: name a folder that does not, or remove it first")
    check_writable(args.destination)
    text = text_of(args)
    source = Path(folder(args.model, copied=True))
    files = open_checkpoint(source)
    state = files.state()
    others, left_out = other_files(files)
    others = [file for file in others if file.name != "README.md"]  # the new card has its text
    with StagingDir(args.destination.absolute(), {"the run": os.urandom(8).hex()}) as place:  # never resumed
        model, tokenizer = load(args, "nvfp4", dtype=model_dtype(files), head=False)
        windows = windows_of(args, tokenizer, text, model.config)
        calibrate(model, windows[:, None])
        config = model.hf_quantizer.quantization_config
        if config.activations == "bf16":
            set_activations(model, "nvfp4")
        model.save_pretrained(place.files, max_shard_size="5GB")  # `_keep_dtypes` writes shards again, one by one
        _keep_dtypes(files, place.files)
        _keep_config(files.config, place.files / "config.json")
        copy_files(others, source, place.files)
        what = "experts and linears" if any(isinstance(m, NVFP4Linear) for m in model.modules()) else "experts"
        kept = model.hf_quantizer.pre_quantized
        rows = {
            "weights": "those of the original" if kept else f"quantized from the original, recipe `{config.recipe}`",
            "activations": f"{ACTIVATIONS[config.activations]}, static scales measured with {windows.numel()} tokens",
        } | {f"left alone: `{name}`": "excluded" for name in config.exclude}
        write_rows(place.files, args.destination.absolute().name, source, args.model, what, rows)
        written = open_checkpoint(place.files).tensors  # with layers for multi-token prediction
        surplus = [name for name in surplus_of(files) if name not in written]
        files.check_state(state)
        place.publish()
    if surplus:
        some = ", ".join(surplus[:3]) + (", ..." if len(surplus) > 3 else "")
        note(f"left out: {len(surplus)} tensors that are none of {type(model).__name__}'s: {some}")
    for name, why in left_out.items():
        note(f"left out: {name}: {why}")
    note(f"wrote {args.destination}: static scales from {windows.numel()} tokens")
    for line in misread_by(args.destination):
        note(f"note: {line}")


def _keep_dtypes(source: Checkpoint, written: Path) -> None:
    """Give the dense tensors of the folder `written` the bytes of `source` where it has them in another dtype: routers
    and biases that are float32 in bf16 models, and those that transformers makes float32."""
    import torch

    from moe_nvfp4.quantize.files import INDEX, ShardWriter, read_json, read_tensors, write_text
    from moe_nvfp4.quantize.names import DENSE

    def kept(name: str, new: TensorSlice) -> TensorSlice:
        """The source's tensor where only its dtype differs from the `new` one, else this."""
        old = source.tensors.get(name)
        if old is None or old.dtype == new.dtype or not {old.dtype, new.dtype} <= {*DENSE} or old.shape != new.shape:
            return new
        value = new.tensor()
        return old if torch.equal(old.tensor().to(value.dtype), value) else new

    size = 0
    for shard in sorted(written.glob("*.safetensors")):
        new = read_tensors([shard])
        tensors = {name: kept(name, tensor) for name, tensor in new.items()}
        size += sum(tensor.size for tensor in tensors.values())
        if tensors != new:
            writer = ShardWriter(shard.with_suffix(".new"), {n: (t.dtype, t.shape) for n, t in tensors.items()})
            for name, tensor in tensors.items():
                writer.write(name, tensor.read())
            os.replace(writer.path, shard)
    if (written / INDEX).exists():
        index = read_json(written / INDEX)
        index["metadata"]["total_size"] = size
        write_text(written / INDEX, json.dumps(index, indent=2) + "\n")


def _keep_config(source: dict[str, Any], file: Path) -> None:
    """Put the `source`'s config, with the new quantization_config, in place of the one that transformers wrote: this
    has the form of its version, in which older programs do not find rope_theta, and take their default."""
    from moe_nvfp4.quantize.files import write_text
    from moe_nvfp4.quantize.plan import config_of_new_files

    written = json.loads(file.read_text("utf-8"))
    if written.get("model_type") != source.get("model_type"):
        return  # a part of the source, whose config is another
    new = config_of_new_files(source, written["quantization_config"], written.get("dtype"))
    write_text(file, json.dumps(new, indent=2, ensure_ascii=False) + "\n")
