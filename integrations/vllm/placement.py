"""Which layers' experts stay on the CPU, the option `cpu_experts`. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moe_nvfp4.integrations.placement import check_cpu_experts, fewest_on_cpu
from moe_nvfp4.quantize.report import readable_size


class Placement:
    """Layers are numbered as vLLM makes them. Once all are made and loaded, it is settled where each one stays.

    wanted  a number of layers (the first ones), "all", or "auto": as many as the GPU has no room for
    """

    def __init__(self, wanted: int | str = 0):
        check_cpu_experts(wanted)
        self.wanted = wanted
        self.sizes: list[int] = []  # bytes of each layer's experts
        self.count: int | None = None  # how many stay, once that is settled

    def next_on_cpu(self) -> bool:
        """Whether the next layer is read into host memory. With "auto" all are: how much room the GPU has for them is
        known when everything else is there."""
        return len(self.sizes) < self.wanted if isinstance(self.wanted, int) else True

    def add(self, size: int) -> int:
        """Count a layer whose experts take `size` bytes. Returns its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def stays(self, number: int, model: str, room: Callable[[int], tuple[int, Mapping[str, int]]]) -> bool:
        """Whether the experts of layer `number` stay on the CPU. The first call settles it for all.

        room  called for "auto" with the bytes of the largest layer: bytes of the GPU, and what else takes them -> its
              bytes

        ValueError if `model` has fewer layers than wanted, or does not fit even with all experts on the CPU.
        """
        if self.count is None:
            check_cpu_experts(self.wanted, model, len(self.sizes))
            fixed = len(self.sizes) if self.wanted == "all" else self.wanted
            self.count = fixed if isinstance(fixed, int) else fewest_on_cpu(self.sizes, *room(max(self.sizes)))
        return self.wanted == "all" or number < self.count  # a layer for drafts is made after the others

    def __str__(self) -> str:
        on_cpu, others = sum(self.sizes[: self.count]), sum(self.sizes[self.count :])
        return (
            f"experts of {self.count} of {len(self.sizes)} layers stay on the CPU ({readable_size(on_cpu)}), those of "
            f"the others ({readable_size(others)}) are on the GPU"
        )
