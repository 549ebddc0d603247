"""LoRA adapters of experts, as PEFT writes them, beside the 4-bit weights. Does not import vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from moe_nvfp4.integrations.peft_versions import check_order
from moe_nvfp4.ops import Adapter, Adapters
from moe_nvfp4.quantize.names import TOWER

# What else PEFT can do to LoRA, and its value in adapters that do not
PLAIN: dict[str, Any] = {
    "use_dora": False, "lora_bias": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {},
    "modules_to_save": None, "layer_replication": None, "alora_invocation_tokens": None,
    "trainable_token_indices": None,
}  # fmt: skip
OF_EXPERTS = re.compile(
    r"(?P<part>.*)\blayers\.(?P<layer>\d+)\.(?:.*\.)?experts(?P<inner>\.base_layer)?\.lora_(?P<side>[AB])\.weight"
)
OTHERS = re.compile(rf"{TOWER.pattern}|talker|\bmtp")  # parts of a model beside its language model
LAYER = re.compile(r".*\blayers\.(\d+)\.")


class Share(NamedTuple):
    """What a rank has of an experts module.

    sizes        E, H, I on all ranks
    gated        whether there are rows of gate beside those of up
    mine         the numbers of this rank's experts in the files, in order
    tp           (rank, size) of tensor parallelism
    interleaved  whether gate and up are in turn, as in gpt-oss
    transposed   whether transformers has [E, in, out], and tells PEFT so; None: it does not tell
    """

    sizes: tuple[int, int, int]
    gated: bool
    mine: Sequence[int]
    tp: tuple[int, int]
    interleaved: bool = False
    transposed: bool | None = False


class Pair(NamedTuple):
    """One adapter in PEFT's form: of a parameter, A [rank * E, in] and B [out, rank * E]; of a linear, E is 1.

    peft  the version that wrote it, if its config says so
    """

    A: Tensor
    B: Tensor
    rank: int
    scaling: float
    peft: str | None = None


def adapters_of(pairs: Iterable[Pair], share: Share, name: str) -> Adapters:
    """The adapters fp32 of an experts module, this rank's part.

    ValueError or NotImplementedError for tensors of other shapes, which are called `name`.
    """
    E, H, I = share.sizes
    rows = 2 * I if share.gated else I
    up: tuple[Adapter, ...] = ()
    down: tuple[Adapter, ...] = ()
    pairs = list(pairs)
    told = share.gated and any(A.shape[1] != B.shape[0] for A, B, *_ in pairs)  # sizes that differ tell the order
    for A, B, r, scaling, peft in pairs:
        shapes, a_side, b_side = f"{list(A.shape)} and {list(B.shape)}", A.shape[1], B.shape[0]
        fits = (a_side, b_side) in ((H, rows), (I, H))
        either = a_side == b_side or rows == I  # the other order would have these sizes, too
        said = (either or not fits) and share.transposed is not None and check_order(name, peft, share.transposed)
        if not fits or A.shape[0] != E * r or B.shape[1] != E * r:
            raise ValueError(
                f"{name} is {shapes}, expected rank * experts = {E * r} by {H}, {rows} or by {I}, {H}: it is of "
                "another model, or of one whose experts transformers stores transposed, which only transformers serves "
                "(PEFT)"
            )
        known = told or said and not share.transposed  # transformers 4 does not tell PEFT of gpt-oss
        if either and (not known or rows == I == H):
            raise NotImplementedError(f"{name} is {shapes}, which does not say what is in and what is out: serve it "
                                      "with transformers (PEFT)")  # fmt: skip
        a = A.float().reshape(E, r, a_side)[list(share.mine)] * scaling
        b = B.float().reshape(b_side, r, E).permute(2, 0, 1)[list(share.mine)]
        if (a_side, b_side) == (H, rows):
            halves = (b[:, ::2], b[:, 1::2]) if share.interleaved else b.chunk(rows // I, dim=1)
            up = (*up, Adapter(a, torch.cat([_part(half, 1, share) for half in halves], dim=1)))
        else:  # the ranks' sums are added
            down = (*down, Adapter(_part(a, 2, share), b))
    return up, down


def adapters_of_linears(found: Mapping[tuple[int, str], Pair], share: Share, name: str) -> Adapters:
    """The same of linears, as PEFT writes them where each expert is a module (transformers 4): (expert, "gate", "up" or
    "down") -> its adapter. Those of gate and up are two, whose ranks add up in the layer."""
    _, H, I = share.sizes

    def stacked(part: str, N: int, K: int) -> Adapter | None:
        mine = [found.get((e, part)) for e in share.mine]
        if not any(mine):
            return None
        r = max(pair.rank for pair in mine if pair)
        a, b = torch.zeros(len(mine), r, K), torch.zeros(len(mine), N, r)
        for e, pair in enumerate(mine):
            if pair is None:
                continue
            if pair.A.shape != (pair.rank, K) or pair.B.shape != (N, pair.rank):
                raise ValueError(
                    f"{name} has for {part} of expert {share.mine[e]} {list(pair.A.shape)} and {list(pair.B.shape)}, "
                    f"expected {[pair.rank, K]} and {[N, pair.rank]}: it is of another model"
                )
            a[e, : pair.rank] = pair.A.float() * pair.scaling
            b[e, :, : pair.rank] = pair.B
        return Adapter(a, b)

    rows = I // share.tp[1]
    up: tuple[Adapter, ...] = ()
    for part, before, after in (("gate", 0, rows), ("up", rows if share.gated else 0, 0)):
        if adapter := stacked(part, I, H):
            up = (*up, Adapter(adapter.a, F.pad(_part(adapter.b, 1, share), (0, 0, before, after))))
    down = stacked("down", H, I)
    return up, () if down is None else (Adapter(_part(down.a, 2, share), down.b),)


def _part(tensor: Tensor, dim: int, share: Share) -> Tensor:
    rank, size = share.tp
    return tensor.chunk(size, dim)[rank].contiguous()


def check_config(said: dict[str, Any], folder: str) -> None:
    """NotImplementedError for an adapter that is not to be served, by its config."""
    if said.get("nvfp4_mergeable"):
        raise NotImplementedError(
            f"adapter {folder!r} was trained to be merged (nvfp4_mergeable), and is worth nothing beside the "
            "weights: merge_and_unload() and save_pretrained() with PEFT, and serve that folder"
        )


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
        check_config(said, folder)
        self.scaling = said["lora_alpha"] / (said["r"] ** 0.5 if said.get("use_rslora") else said["r"])
        self.rank, self.peft = said["r"], said.get("peft_version")
        self.names: dict[int, dict[tuple[bool, str], str]] = {}  # layer -> (inner, side) -> name
        parts: dict[str, str] = {}  # of the model -> a name
        with safe_open(self.file, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found = OF_EXPERTS.fullmatch(name)
                if found is None:
                    raise NotImplementedError(
                        f"adapter {folder!r}: {name} is not of experts. vLLM serves adapters of linears and of experts "
                        "together by request (--enable-lora), or serve it with transformers (PEFT)"
                    )
                parts.setdefault(found["part"], name)
                self.names.setdefault(int(found["layer"]), {})[found["inner"] is not None, found["side"]] = name
        if len(parts) > 1 or any(map(OTHERS.search, parts)):
            raise NotImplementedError(
                f"adapter {folder!r} changes {' and '.join(parts.values())}: the option serves adapters of the "
                "language model's experts alone. Leave out the other part's, or serve it with transformers (PEFT)"
            )
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

    def of(self, module: str, share: Share) -> Adapters:
        """The adapters fp32 of an experts module, this rank's part; empty if the adapter does not change it.

        ValueError for tensors of other shapes.
        """
        names = self._names(module)
        pairs = [
            Pair(*(self._tensor(names, inner, side) for side in "AB"), self.rank, self.scaling, self.peft)
            for inner in {inner for inner, _ in names}
        ]
        return adapters_of(pairs, share, f"{self.file}: the adapter of {module}")

    def _names(self, module: str) -> dict[tuple[bool, str], str]:
        """(inner, side) -> name of the tensors that change the experts module of this name."""
        found = LAYER.match(f"{module}.")
        drafts = "mtp" in module.split(".")  # layers for multi-token prediction, which count from 0 again
        return self.names.get(int(found[1]), {}) if found and not drafts else {}

    def _tensor(self, names: dict[tuple[bool, str], str], inner: bool, side: str) -> Tensor:
        if (inner, side) not in names:
            raise ValueError(f"{self.file}: {next(iter(names.values()))} has no counterpart lora_{side}: save it again")
        with safe_open(self.file, "pt", device="cpu") as file:
            return file.get_tensor(names[inner, side])
