"""How much the error of each input column of an expert, or of a linear, counts, for the recipe ``weighted``.

An error D of a weight matrix makes the error D x of its outputs. For each row of D its mean square is
sum_jk D_j D_k E[x_j x_k]; without the products of different columns it is sum_k D_k^2 E[x_k^2].
E[x_k^2] is the importance of column k. There is one vector for each expert and GEMM.

    importance = load_importance("importance.safetensors")
    vector = importance.of("model.layers.0.mlp.experts", 5, "down_proj", columns=768)
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_nvfp4.quantize.files import TensorSlice
from moe_nvfp4.quantize.names import PER_EXPERT
from moe_nvfp4.quantize.settings import different, settings

FORMAT = "moe_nvfp4 importance 1"
# For an expert that saw this many rows, its own data and the prior count half each. Measured: `weighted` needs few
# rows (the same KL for 1k and 16k tokens of text), so the prior matters only for experts that hardly any token reaches.
PRIOR_ROWS = 64
COLUMNS = "columns"  # the last part of the names of linears' tensors
SAMPLES = 64  # tensors of which a fingerprint has the first bytes
ANOTHER_MODEL = "it was made with another model; run moe-nvfp4 importance on this one"


@dataclass(frozen=True)
class LayerImportance:
    """The importance of the input columns of one layer's experts.

    x     fp32 [E, H]: of gate and up
    h     fp32 [E, I]: of down
    rows  int64 [E]: how many rows of the calibration data each expert saw
    """

    x: Tensor
    h: Tensor
    rows: Tensor


def layer_importance(x: Tensor, h: Tensor, rows: Tensor) -> LayerImportance:
    """Compute importance from sums of squares over the rows that each expert saw.

    x [E, H] and h [E, I]: the sums, of any floating dtype; rows [E]: how many rows. Few rows say little, so
    `PRIOR_ROWS` rows are added. For x they are the layer's average row, since all experts read the same hidden states.
    For h, whose columns mean something else in each expert, they are rows in which all columns are equal. An expert
    that saw no row gets the layer's average for x, and equal columns for h.
    """
    n = rows[:, None].double().cpu()
    x, h = x.double().cpu(), h.double().cpu()
    average = x.sum(dim=0) / n.sum().clamp(min=1)
    flat = h.mean(dim=1, keepdim=True) / n.clamp(min=1)
    flat = torch.where(flat > 0, flat, 1.0)
    x, h = ((s + PRIOR_ROWS * prior) / (n + PRIOR_ROWS) for s, prior in ((x, average), (h, flat)))
    return LayerImportance(x.float(), h.float(), rows.long().cpu())


def linear_importance(squares: Tensor, rows: int) -> Tensor:
    """The importance of a linear's input columns, fp32 [K], from sums of squares [K] over `rows` rows. The prior is
    that of h."""
    return layer_importance(squares[None], squares[None], torch.tensor([rows])).h[0]


class Importance:
    """The importance of a model's experts and linears, by the names of their modules in transformers.

    layers       of experts
    linears      fp32 [K] of each linear, of those that servers fuse only the first
    source       what it was measured on, for people
    fingerprint  `fingerprint` of the files of that model; None: not known
    settings     `settings` of its config; empty: not known
    """

    def __init__(
        self,
        layers: Mapping[str, LayerImportance],
        source: str = "",
        fingerprint: str | None = None,
        settings: Mapping[str, Any] | None = None,
        linears: Mapping[str, Tensor] | None = None,
    ):
        self.linears = dict(linears or {})
        self.layers, self.source, self.fingerprint, self.settings = dict(layers), source, fingerprint, settings or {}
        self._in_model: Callable[[str], str | None] = lambda module: module

    def renamed(self, in_model: Callable[[str], str | None]) -> Importance:
        """The same importance, found by other names, such as those in files. in_model: such a name of a module -> its
        name in the model that was measured, or None where it is not a part of it."""
        found = Importance(self.layers, self.source, self.fingerprint, self.settings, self.linears)
        found._in_model = in_model
        return found

    def check_model(self, modules: Iterable[str], tensors: Mapping[str, TensorSlice], name: object) -> None:
        """ValueError if there is importance of more than `modules`, all experts of the model `name`. A warning if it
        was measured on files other than those of the model, which have these `tensors` (none: not known)."""
        there = {self._in_model(module) for module in modules}
        if others := [layer for layer in self.layers if layer not in there]:
            raise ValueError(f"the importance has {others[0]}, and {name} does not: {ANOTHER_MODEL}")
        if tensors and self.fingerprint not in (None, fingerprint(tensors)):
            warnings.warn(
                f"the importance was measured on other weights ({self.source}) than those of {name}: run moe-nvfp4 "
                "importance on this model, unless one is a slight change of the other",
                stacklevel=2,
            )

    def check_config(self, config: Any, name: object) -> None:
        """A warning if the importance was measured with other settings than those of `config`, a transformers config of
        the model `name`."""
        if self.settings and (other := list(different(self.settings, settings(config)))):
            said = ", ".join(f"{key} {was!r}, and {name} has {now!r}" for key, was, now in other[:3])
            warnings.warn(
                f"the importance was measured ({self.source}) with {said}{', ...' if len(other) > 3 else ''}: run "
                "moe-nvfp4 importance on this model",
                stacklevel=2,
            )

    def of_matrix(self, stem: str, columns: int) -> Tensor:
        """`of` for a matrix by its name in files, such as experts.5.down_proj."""
        match = PER_EXPERT.fullmatch(stem)
        if match is None:
            raise ValueError(f"{stem} is not named as an expert's matrix: its importance is not known")
        return self.of(match["module"], int(match["e"]), match["part"], columns)

    def digest(self) -> str:
        """A hash: two objects with equal digests lead to the same bytes."""
        hashed = hashlib.sha256()
        for name, layer in sorted(self.layers.items()):
            hashed.update(name.encode())
            for tensor in (layer.x, layer.h):
                hashed.update(tensor.contiguous().numpy().tobytes())
        for name, tensor in sorted(self.linears.items()):
            hashed.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return hashed.hexdigest()

    def of_linear(self, name: str, columns: int) -> Tensor:
        """Importance fp32 [columns] of the linear `name`, of fused ones the first. ValueError if it is unknown, or has
        another shape."""
        # A model may be the body of the one that was measured, or have it as its body
        names = [n for n in self.linears if n == name or f".{n}".endswith(f".{name}") or f".{name}".endswith(f".{n}")]
        found = self.linears[names[0]] if len(names) == 1 else None
        if found is None:
            raise ValueError(f"{name} has no importance: no token reached it, or {ANOTHER_MODEL}")
        if len(found) != columns:
            raise ValueError(f"{name} has {columns} input columns, the importance is of {len(found)}: {ANOTHER_MODEL}")
        return found

    def of(self, module: str, e: int, part: str, columns: int) -> Tensor:
        """Importance fp32 [columns] for the matrix `part` (gate_proj, down_proj, w2, ...) of expert `e`.

        module: the experts' name. ValueError if it is unknown, or has another shape.
        """
        layer = self.layer(module)
        found = layer.h if part in ("down_proj", "w2") else layer.x
        if not 0 <= e < len(found) or found.shape[1] != columns:
            raise ValueError(
                f"{module}.{e}.{part} has {columns} input columns, the importance is of {len(found)} experts with "
                f"{found.shape[1]}: {ANOTHER_MODEL}"
            )
        return found[e]

    def layer(self, module: str, experts: int | None = None) -> LayerImportance:
        """The importance of `module`. ValueError if there is none, or if it is not for `experts` experts."""
        name = self._in_model(module)
        if name is None:
            raise ValueError(f"{module} is not a part of the model that transformers runs, so nothing is known about "
                             f"its inputs: leave it as it is (exclude {module}), or use another recipe")  # fmt: skip
        found = self.layers.get(name)
        if found is None:
            known = ", ".join(list(self.layers)[:2])
            raise ValueError(f"{module} has no importance: no token reached it (exclude it, or use another recipe), or "
                             f"the importance is of another model ({known}, ...); run moe-nvfp4 importance on this one"
                             )  # fmt: skip
        if experts not in (None, len(found.rows)):
            raise ValueError(f"{module} has {experts} experts, the importance is of {len(found.rows)}: {ANOTHER_MODEL}")
        return found


def fingerprint(tensors: Mapping[str, TensorSlice]) -> str:
    """A hash of the names, dtypes and shapes of a model's tensors in files, and of the first bytes of a few."""
    hashed = hashlib.sha256()
    names = sorted(tensors)
    for name in names:
        hashed.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
    for name in names[:: max(1, len(names) // SAMPLES)]:
        hashed.update(tensors[name].read(0, min(64, tensors[name].size)).numpy().tobytes())
    return hashed.hexdigest()


def save_importance(importance: Importance, path: str | os.PathLike) -> None:
    """Write a safetensors file with `module`.x, .h and .rows of experts, and `module`.columns of linears."""
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{n}.{k}": t.contiguous() for n, layer in importance.layers.items() for k, t in vars(layer).items()}
    tensors |= {f"{name}.{COLUMNS}": t.contiguous() for name, t in importance.linears.items()}
    part = path.with_name(f".{path.name}.partial")
    metadata = {"format": FORMAT, "source": importance.source, "settings": json.dumps(importance.settings)}
    if importance.fingerprint is not None:
        metadata["fingerprint"] = importance.fingerprint
    save_file(tensors, part, metadata=metadata)
    os.replace(part, path)


def load_importance(path: str | os.PathLike) -> Importance:
    """Read what `save_importance` wrote. ValueError for another file."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file: make it with moe-nvfp4 importance MODEL {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            known = metadata.get("format") == FORMAT
            tensors = {name: file.get_tensor(name) for name in file.keys()} if known else {}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): make it again with moe-nvfp4 importance") from None
    if not tensors:
        raise ValueError(f"{path} was not written by moe-nvfp4 importance")
    linears = {n.removesuffix(f".{COLUMNS}"): t for n, t in tensors.items() if n.endswith(f".{COLUMNS}")}
    modules = {name.rpartition(".")[0]: None for name in tensors if not name.endswith(f".{COLUMNS}")}
    if missing := [f"{m}.{k}" for m in modules for k in ("x", "h", "rows") if f"{m}.{k}" not in tensors]:
        raise ValueError(f"{path} is damaged ({missing[0]} is missing): make it again with moe-nvfp4 importance")
    for name, tensor in tensors.items():
        if not name.endswith(".rows") and not _is_importance(tensor):
            raise ValueError(f"{path} is damaged ({name} has zeros for all columns of an expert, or numbers that are "
                             "negative, NaN or Inf): make it again with moe-nvfp4 importance")  # fmt: skip
    layers = {m: LayerImportance(**{k: tensors[f"{m}.{k}"] for k in ("x", "h", "rows")}) for m in modules}
    settings = json.loads(metadata.get("settings", "{}"))
    return Importance(layers, metadata.get("source", ""), metadata.get("fingerprint"), settings, linears)


def _is_importance(tensor: Tensor) -> bool:
    return bool(((tensor >= 0) & tensor.isfinite()).all() and (tensor > 0).any(dim=-1).all())
