"""NVFP4 folders with changed files: a right server of them computes what a server misreads in the original."""

import json
import re
import shutil

import torch
from safetensors.torch import save_file

from tests.models import tensors

GATE, UP = r"\.(gate_proj|w1)\.", r"\.(up_proj|w3)\."


def _other(name):
    """The name of up's tensor beside gate's."""
    return name.replace(".gate_proj.", ".up_proj.").replace(".w1.", ".w3.")


def _scales(change):
    def plant(files):
        for name in files:
            if "experts." in name and name.endswith("weight_scale_2"):
                files[name] = change(files[name])

    return plant


def _gates_for_up(files):
    for name in files:
        if re.search(GATE, name) and name.endswith("weight_scale_2"):
            files[_other(name)] = files[name].clone()


def _by_rows(change):
    """change: the rows of gate and of up -> new ones."""

    def plant(files):
        for name in files:
            if "experts." in name and re.search(GATE, name) and name.endswith((".weight", ".weight_scale")):
                gate, up = (t.view(torch.uint8) for t in (files[name], files[_other(name)]))
                for key, rows in zip((name, _other(name)), change(gate, up), strict=True):
                    files[key] = rows.contiguous().view(files[key].dtype)

    return plant


def _as_interleaved(gate, up):
    """A kernel takes rows 0, 2, ... of what it is given for gate, the others for up, and is given [gate; up]."""
    rows = [*gate, *up]
    return torch.stack(rows[0::2]), torch.stack(rows[1::2])


def _as_concatenated(gate, up):
    """A kernel takes the first half of the rows for gate, and is given gate's and up's in turns."""
    rows = [row for pair in zip(gate, up, strict=True) for row in pair]
    return torch.stack(rows[: len(gate)]), torch.stack(rows[len(gate) :])


def _nibbles(files):
    for name, tensor in files.items():
        if "experts." in name and tensor.dtype == torch.uint8:
            files[name] = (tensor >> 4) | ((tensor & 15) << 4)


PLANTED = {
    "gate's global scale is used for up": _gates_for_up,
    "global scales are ignored": _scales(torch.ones_like),
    "global scales are taken for their reciprocals": _scales(lambda scale: 1 / scale),
    "rows of gate and up, concatenated, are read as interleaved": _by_rows(_as_interleaved),
    "rows of gate and up, interleaved, are read as concatenated": _by_rows(_as_concatenated),
    "gate and up are exchanged": _by_rows(lambda gate, up: (up, gate)),
    "the two codes of a byte are exchanged": _nibbles,
}  # for folders in ModelOpt's dialect
W4A4 = "activations are quantized to NVFP4 (W4A4), not bf16 as asked"


def planted(folder, name, out):
    """A copy of `folder` at `out` with the change `name`."""
    shutil.copytree(folder, out)
    if name == W4A4:
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"].setdefault("moe_nvfp4", {})["activations"] = "nvfp4"
        (out / "config.json").write_text(json.dumps(config))
        return out
    files = tensors(out)
    PLANTED[name](files)
    (path,) = out.glob("*.safetensors")
    save_file(files, path, metadata={"format": "pt"})
    return out
