"""Dense experts one by one: a tensor for each expert and projection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from moe_nvfp4.quantize.files import TensorSlice
from moe_nvfp4.quantize.layouts.base import Experts, Matrix, Source, need, row_major
from moe_nvfp4.quantize.names import DENSE, PER_EXPERT


def recognise(source: Source, left: Mapping[str, TensorSlice]) -> Iterator[Experts]:
    modules: dict[str, list[str]] = {}  # -> stems
    for name, stored in left.items():
        match = PER_EXPERT.fullmatch(name.removesuffix(".weight"))
        if match is not None and name.endswith(".weight") and stored.dtype in DENSE:
            modules.setdefault(match["module"], []).append(name.removesuffix(".weight"))

    def matrices(module: str) -> dict[str, Matrix]:
        found = {}
        for stem in modules[module]:
            stored = left[f"{stem}.weight"]
            need(len(stored.shape) == 2, f"{stem}.weight", stored, "a matrix [out, in]")
            N, K = stored.shape
            found[stem] = row_major(stored, N, K)
        check_complete(module, modules[module], source.counts)
        return found

    for module, stems in modules.items():
        yield Experts(module, tuple(f"{stem}.weight" for stem in stems), partial(matrices, module))


def check_complete(module: str, stems: Iterable[str], counts: set[int]) -> None:
    """ValueError unless every expert of `module` has every projection; counts: numbers that the config names."""
    parts: dict[str, set[int]] = {}
    for stem in stems:
        match = PER_EXPERT.fullmatch(stem)
        assert match is not None, stem
        parts.setdefault(match["part"], set()).add(int(match["e"]))
    E = 1 + max(max(experts) for experts in parts.values())
    known = [n for n in counts if n >= E]
    E = E if E in counts or not known else min(known)
    for part, experts in parts.items():
        if len(experts) != E:
            first = next(e for e in range(E) if e not in experts)
            raise ValueError(f"{module}: the checkpoint has {len(experts)} of {E} experts' {part} (not {first}): "
                             "a shard or a tensor is missing; download the checkpoint again")  # fmt: skip
    if set(parts) not in ({"gate_proj", "up_proj", "down_proj"}, {"up_proj", "down_proj"}, {"w1", "w2", "w3"}):
        raise ValueError(f"{module} has {', '.join(sorted(parts))}: a projection is missing; download it again")
