"""Which layers' experts stay on the CPU beside a GPU (`cpu_experts`): the rule that all engines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_nvfp4.quantize.report import readable_size

SCRATCH = 3 << 30  # bytes that "auto" leaves free: activations, graphs, weights that are copied for long prompts
COPIED = 1 << 30  # of these, for each of the two copies; smaller layers need less


def check_cpu_experts(layers: int | str, model: str = "", there: int | None = None) -> None:
    """ValueError unless `layers` is a number of layers, "all" or "auto", and at most `there`, those of `model`."""
    if layers not in ("all", "auto") and (isinstance(layers, bool) or not isinstance(layers, int) or layers < 0):
        raise ValueError(f"cpu_experts must be a number of layers, 'all' or 'auto', got {layers!r}")
    if there is not None and isinstance(layers, int) and layers > there:
        raise ValueError(f"cpu_experts={layers}: {model} has {there} layers of experts")


def no_gpu() -> ValueError:
    return ValueError("cpu_experts='auto' asks the GPU for its memory, and there is none: say 'all' or a number")


def fewest_on_cpu(sizes: Sequence[int], memory: int, needs: Mapping[str, int]) -> int:
    """How many layers, the first ones, must keep their experts on the CPU.

    sizes   bytes of each layer's experts
    memory  free bytes of the GPU
    needs   what else has to fit there -> its bytes

    ValueError if `needs` alone are more than `memory`.
    """
    room = memory - sum(needs.values())
    if room < 0:
        *names, last = needs
        raise ValueError(
            f"{readable_size(memory)} of free GPU memory are too few even with all experts on the CPU: "
            f"{', '.join(names)} and {last} take {', '.join(map(readable_size, needs.values()))}; take a larger GPU, "
            "or quantize the linears too"
        )
    stay = len(sizes)
    for size in reversed(sizes):
        room -= size
        if room < 0:
            break
        stay -= 1
    return stay
