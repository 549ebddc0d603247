"""A folder of modules that a recipe with a text has quantized, one by one; a conversion copies from it.

FOLDER/model.layers.0.mlp.experts.safetensors, named as the module in new files, has the parameters of `NVFP4Experts`,
by their names, and `rows`, int64 [E]: how many rows of the calibration data each expert saw. The file of a linear has
the parameters of `NVFP4Linear`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_nvfp4.quantize.names import PER_EXPERT, PLAIN_NAMES


class CodesFolder:
    """Quantized experts and linears by module, in a folder."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)

    @property
    def modules(self) -> list[str]:
        """The modules that are complete."""
        return sorted(file.name.removesuffix(".safetensors") for file in self.folder.glob("*.safetensors"))

    def save(self, module: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of a module, which is complete from then on."""
        part = self.folder / f".{module}.partial"
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, part)
        os.replace(part, self._file(module))

    def load(self, module: str) -> dict[str, Tensor]:
        """The tensors of a module that is complete."""
        return load_file(self._file(module))

    def rows(self, module: str) -> Tensor:
        with safe_open(self._file(module), framework="pt") as file:
            return file.get_tensor("rows")

    def matrix(self, stem: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Codes uint8 [N, K/2], sf uint8 [N, K/16] and global scale fp32 0-d of the matrix that files name `stem`.

        shape: N and K. ValueError where the folder does not have it, or has it in another shape.
        """
        match = PER_EXPERT.fullmatch(stem)
        module = match["module"] if match else stem
        if not self._file(module).is_file():
            raise ValueError(f"{stem} has not been quantized: the model has other modules than its files")
        if match is None:
            with safe_open(self._file(module), framework="pt") as file:
                codes, sf, scale = (file.get_tensor(f"weight{last}") for last in ("", "_sf", "_global_scale"))
            return _checked(stem, codes, shape), sf, scale.reshape(())
        e, part = int(match["e"]), PLAIN_NAMES.get(match["part"], match["part"])
        with safe_open(self._file(module), framework="pt") as file:
            stacked = part != "down_proj" and "gate_up_proj" in file.keys()
            name = "gate_up_proj" if stacked else part
            codes, sf = (file.get_slice(key)[e] for key in (name, f"{name}_sf"))
            scale = file.get_slice(f"{part}_global_scale")[e]
        if stacked:
            codes, sf = (t.chunk(2)[part == "up_proj"] for t in (codes, sf))
        return _checked(stem, codes, shape).contiguous(), sf.contiguous(), scale.clone()

    def digest(self) -> str:
        """A string that changes when a file does."""
        stats = [(file.name, file.stat()) for file in sorted(self.folder.glob("*.safetensors"))]
        return hashlib.sha256(repr([(n, s.st_size, s.st_mtime_ns) for n, s in stats]).encode()).hexdigest()

    def _file(self, module: str) -> Path:
        return self.folder / f"{module}.safetensors"


def _checked(stem: str, codes: Tensor, shape: tuple[int, int]) -> Tensor:
    """`codes`. ValueError unless they are of a matrix of this shape."""
    N, K = shape
    if codes.shape != (N, -(-K // 16) * 8):
        raise ValueError(f"{stem} is [{N}, {K}], but [{codes.shape[0]}, {codes.shape[1] * 2}] was quantized")
    return codes
