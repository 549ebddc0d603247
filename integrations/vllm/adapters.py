"""A LoRA adapter of experts, as PEFT writes it, beside the 4-bit weights. Does not import vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from moe_nvfp4.ops import Adapter, Adapters

# What else PEFT can do to LoRA, and its value in adapters that do not
PLAIN: dict[str, Any] = {
    "use_dora": False, "lora_bias": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {},
    "modules_to_save": None, "layer_replication": None, "alora_invocation_tokens": None,
    "trainable_token_indices": None,
}  # fmt: skip
OF_EXPERTS = re.compile(
    r".*\blayers\.(?P<layer>\d+)\.(?:.*\.)?experts(?P<inner>\.base_layer)?\.lora_(?P<side>[AB])\.weight"
)
LAYER = re.compile(r".*\blayers\.(\d+)\.")


class ExpertsAdapter:
    """The adapter in `folder`, which PEFT has saved with LoraConfig(target_parameters=["experts.gate_up_proj",
    "experts.down_proj"]) or one of the two.

    ValueError or NotImplementedError for a folder without one, and for what is not LoRA on experts alone.
    """

    def __init__(self, folder: str):
        config, self.file = Path(folder, "adapter_config.json"), Path(folder, "adapter_model.safetensors")
        if not config.is_file() or not self.file.is_file():
            raise ValueError(f"adapter {folder!r}: a folder on this machine with adapter_config.json and "
                             "adapter_model.safetensors, as PEFT's save_pretrained writes them")  # fmt: skip
        said = json.loads(config.read_text("utf-8"))
        more = {key: said[key] for key, plain in PLAIN.items() if said.get(key, plain) not in (plain, None)}
        if said.get("peft_type") != "LORA" or more:
            raise NotImplementedError(
                f"adapter {folder!r}: peft_type {said.get('peft_type')} with {more}: plain LoRA only; serve it with "
                "transformers (PEFT)"
            )
        if said.get("nvfp4_mergeable"):
            raise NotImplementedError(
                f"adapter {folder!r} was trained to be merged (nvfp4_mergeable), and is worth nothing beside the "
                "weights: merge_and_unload() and save_pretrained() with PEFT, and serve that folder"
            )
        self.scaling = said["lora_alpha"] / (said["r"] ** 0.5 if said.get("use_rslora") else said["r"])
        self.rank = said["r"]
        self.names: dict[int, dict[tuple[bool, str], str]] = {}  # layer -> (inner, side) -> name
        with safe_open(self.file, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found = OF_EXPERTS.fullmatch(name)
                if found is None:
                    raise NotImplementedError(
                        f"adapter {folder!r}: {name} is not of experts. vLLM serves adapters of linears (--enable-lora "
                        "--lora-target-modules ...): save those apart, or serve with transformers (PEFT)"
                    )
                self.names.setdefault(int(found["layer"]), {})[found["inner"] is not None, found["side"]] = name
        if not self.names:
            raise ValueError(f"adapter {folder!r} has no tensors")

    def check_layers(self, layers: int) -> None:
        """ValueError if it changes a layer that a model with so many has not got."""
        if max(self.names) >= layers:
            raise ValueError(
                f"{self.file} changes layer {max(self.names)}, and the model has {layers} layers: it is of "
                "another model"
            )

    def changes(self, module: str) -> bool:
        """Whether it changes the experts module of this name."""
        return bool(self._names(module))

    def of(
        self, module: str, sizes: tuple[int, int, int], gated: bool, mine: Sequence[int], tp: tuple[int, int]
    ) -> Adapters:
        """The adapters fp32 of an experts module, this rank's part; empty if the adapter does not change it.

        sizes  E, H, I on all ranks
        mine   the numbers of this rank's experts in the files, in order
        tp     (rank, size) of tensor parallelism

        ValueError for tensors of other shapes.
        """
        E, H, I = sizes
        rows = 2 * I if gated else I
        up: tuple[Adapter, ...] = ()
        down: tuple[Adapter, ...] = ()
        names = self._names(module)
        for inner in {inner for inner, _ in names}:
            A, B = (self._tensor(names, inner, side) for side in "AB")
            shapes, a_side, b_side = f"{list(A.shape)} and {list(B.shape)}", A.shape[1], B.shape[0]
            if (
                (a_side, b_side) not in ((H, rows), (I, H))
                or A.shape[0] != E * self.rank
                or B.shape[1] != E * self.rank
            ):
                raise ValueError(
                    f"{self.file}: the adapter of {module} is {shapes}, expected rank * experts = {E * self.rank} by "
                    f"{H}, {rows} or by {I}, {H}: it is of another model, or of one whose experts transformers stores "
                    "transposed, which only transformers serves (PEFT)"
                )
            if a_side == b_side:
                raise NotImplementedError(f"{self.file}: the adapter of {module} is {shapes}, which does not say what "
                                          "is in and what is out: serve it with transformers (PEFT)")  # fmt: skip
            a = A.float().reshape(E, self.rank, a_side)[list(mine)] * self.scaling
            b = B.float().reshape(b_side, self.rank, E).permute(2, 0, 1)[list(mine)]
            rank, size = tp
            if (a_side, b_side) == (H, rows):
                halves = [half.chunk(size, dim=1)[rank] for half in b.chunk(rows // I, dim=1)]
                up = (*up, Adapter(a, torch.cat(halves, dim=1)))
            else:  # the ranks' sums are added
                down = (*down, Adapter(a.chunk(size, dim=2)[rank].contiguous(), b))
        return up, down

    def _names(self, module: str) -> dict[tuple[bool, str], str]:
        """(inner, side) -> name of the tensors that change the experts module of this name."""
        found = LAYER.match(f"{module}.")
        return self.names.get(int(found[1]), {}) if found else {}

    def _tensor(self, names: dict[tuple[bool, str], str], inner: bool, side: str) -> Tensor:
        if (inner, side) not in names:
            raise ValueError(f"{self.file}: {next(iter(names.values()))} has no counterpart lora_{side}: save it again")
        with safe_open(self.file, "pt", device="cpu") as file:
            return file.get_tensor(names[inner, side])
