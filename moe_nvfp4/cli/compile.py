"""moe-nvfp4 compile: compile a model's kernels for a GPU that need not be in this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

from moe_nvfp4.cli.known import ARCHS, KNOWN, Sizes
from moe_nvfp4.cli.models import empty_model, model_config, resolve
from moe_nvfp4.cli.options import ACTIVATIONS, ACTIVATIONS_HELP, MODEL_HELP, Commands, command, path, whole
from moe_nvfp4.cli.output import note

if TYPE_CHECKING:
    import torch

ALL = "known"
# In and out features of linears that need, one by one and in pairs, every kernel that an H200's plans have
IN, OUT = (512, 1536, 4096, 16384, 28672), (128, 1024, 3072, 8192, 24576, 151936)


def add(commands: Commands) -> None:
    sub = command(
        commands, "compile", run, "compile a model's kernels for a GPU that need not be here",
        "Compile every kernel that the experts of MODEL can need on a GPU of architecture ARCH, for any number of "
        "tokens in bf16, and in fp16 if its config says so. DIR is a cache folder for machines without a compiler: "
        "copy it there and name it in MOE_NVFP4_CACHE. They need the same versions of moe-nvfp4, Triton and CuTe DSL. "
        "Sizes of 20 well-known models are built in: "
        + ", ".join(KNOWN) + f". As MODEL, {ALL} stands for them all.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("--arch", choices=ARCHS, required=True, metavar="ARCH", help=", ".join(ARCHS))
    sub.add_argument("--out", type=path, metavar="DIR", help="folder for the kernels (default: this machine's cache)")
    sub.add_argument(
        "--multiprocessors", type=whole(1), metavar="N", help="the GPU's (default: the usual numbers for ARCH)"
    )
    sub.add_argument("--activations", choices=ACTIVATIONS, default="bf16", help=ACTIVATIONS_HELP)
    sub.add_argument(
        "--linears",
        action="store_true",
        help=f"also the kernels of MODEL's linears, as 4-bit ones ({ALL}: of usual sizes)",
    )
    for name, what in (("tensor", "of each expert's channels"), ("expert", "of the experts")):
        sub.add_argument(f"--{name}-parallel", type=whole(1), default=1, metavar="N", help=f"1/N {what} on each GPU")


def run(args: argparse.Namespace) -> None:
    import torch
    from torch import nn

    from moe_nvfp4.backends import Gpu
    from moe_nvfp4.cache import cache_folder, own_folder
    from moe_nvfp4.ready import compile_for

    if args.model == ALL:
        layers = [layer for sizes in KNOWN.values() for layer in _known(sizes, args)]
        linears = _usual_linears(args) if args.linears else nn.ModuleList()
        found = [(torch.bfloat16, layers, linears)]
    elif args.model in KNOWN and not args.linears:
        found = [(torch.bfloat16, _known(KNOWN[args.model], args), nn.ModuleList())]
    else:
        found = _described(args)
    if args.out is not None:
        os.environ["MOE_NVFP4_CACHE"] = str(args.out)  # the processes that compile inherit it
    own_folder("kernels")  # raises if kernels could not be kept there
    arch, count, mapped = ARCHS[args.arch], 0, args.expert_parallel > 1
    for multiprocessors in [args.multiprocessors] if args.multiprocessors else arch.multiprocessors:
        gpu = Gpu(arch.capability, multiprocessors)
        for dtype, layers, linears in found:
            count += sum(compile_for(layer, gpu, top_k, dtype, mapped) for layer, top_k in layers)
            count += compile_for(linears, gpu, dtype=dtype)
    note(f"{args.model} on {args.arch}: {count} kernels compiled, in {cache_folder()}; all others were there already")


def _known(sizes: Sizes, args: argparse.Namespace) -> list[tuple[Any, int]]:
    """(experts on meta, top_k) for each kind of layer that a model of these sizes can have."""
    import torch

    from moe_nvfp4.experts import NVFP4Experts
    from moe_nvfp4.weights import SILU, Gate

    gates = {
        "swiglu": SILU,
        "oai": Gate("silu", alpha=1.702, limit=7.0, up_offset=1.0),
        "relu2": Gate("relu2", gated=False),
    }
    H, I, E, top_k, gate = sizes
    E, I = _share(E, args.expert_parallel, "experts"), _share(I, args.tensor_parallel, "channels")
    bias = torch.bfloat16 if gate == "oai" else None
    return [
        (NVFP4Experts(E, H, I, gates[gate], args.activations, bias, static, "meta"), top_k) for static in _static(args)
    ]


def _usual_linears(args: argparse.Namespace) -> Any:
    """Pairs of linears that read the same rows, of all usual sizes, on meta."""
    import torch
    from torch import nn

    from moe_nvfp4.linear import NVFP4Linear

    pairs = nn.ModuleList()
    for K, N, bias, static in product(IN, OUT, (None, torch.bfloat16), _static(args)):
        pairs.append(pair := nn.Module())
        for name in ("gate_proj", "up_proj"):
            pair.add_module(name, NVFP4Linear(K, N, bias, args.activations, static, device="meta"))
    return pairs


def _described(args: argparse.Namespace) -> list[tuple[torch.dtype, list[tuple[Any, int]], Any]]:
    """(dtype, experts and linears as below) for MODEL's config, in bf16 and, if it says so, in fp16."""
    import torch

    from moe_nvfp4.integrations.huggingface.ready import experts_per_token

    source = resolve(args.model)
    config = model_config(source)
    top_ks = experts_per_token(config)
    if not top_ks:
        raise ValueError(f"the config of {args.model} has no known field for the number of experts per token")
    found = []
    for dtype in dict.fromkeys((torch.bfloat16, *{config.dtype, config.get_text_config().dtype} & {torch.float16})):
        model = empty_model(config, source).to(dtype)
        found.append((dtype, _experts(model, top_ks, args), _linears(model, args)))
    return found


def _experts(model: Any, top_ks: Iterable[int], args: argparse.Namespace) -> list[tuple[Any, int]]:
    """(experts on meta, top_k) for each kind of layer in `model`."""
    from dataclasses import replace

    from moe_nvfp4.integrations.huggingface.experts import HFExperts
    from moe_nvfp4.integrations.huggingface.recognise import describe

    awq = (model.config.to_dict().get("quantization_config") or {}).get("quant_algo") == "NVFP4_AWQ"
    layers = {}
    for module in model.modules():
        try:
            layout = describe(module)
        except NotImplementedError:
            continue  # it stays dense
        if layout is None:
            continue
        experts, channels = layout.num_experts, layout.intermediate_size
        here = replace(
            layout, num_experts=_share(experts, args.expert_parallel, "experts"),
            intermediate_size=_share(channels, args.tensor_parallel, "channels"),
        )  # fmt: skip
        for static in _static(args):
            made = HFExperts(module, here, args.activations, static, "meta")
            if awq:
                made.add_pre_quant_scales(model.dtype)
            layers.update({(here, made.gate, static, top_k): (made, top_k) for top_k in top_ks})
    if not layers:
        raise ValueError(f"{args.model} has no experts that this library can quantize")
    return list(layers.values())


def _linears(model: Any, args: argparse.Namespace) -> Any:
    """With --linears, those of `model` as 4-bit ones on meta; those of one module together, as they may run as one."""
    from torch import nn

    from moe_nvfp4.linear import NVFP4Linear

    kinds: dict[tuple, dict[str, Any]] = {}
    for parent in model.modules() if args.linears else ():
        linears = {n: m for n, m in parent.named_children() if isinstance(m, nn.Linear) and _can_be_packed(m)}
        kind = tuple((n, m.in_features, m.out_features, m.bias is None) for n, m in linears.items())
        kinds.setdefault(kind, linears)
    found = nn.ModuleList()
    for linears, static in product(kinds.values(), _static(args)):
        found.append(parent := nn.Module())
        for name, m in linears.items():
            bias = None if m.bias is None else m.bias.dtype
            new = NVFP4Linear(m.in_features, m.out_features, bias, args.activations, static, device="meta")
            parent.add_module(name, new)
    return found


def _can_be_packed(linear: Any) -> bool:
    """Whether a dense linear may be 4-bit: not if it gives a few numbers only, as gates do."""
    return linear.in_features % 16 == 0 and linear.out_features >= 16


def _static(args: argparse.Namespace) -> tuple[bool, ...]:
    """The values to compile for of whether activations have static scales: W4A4 may be with or without."""
    return (False, True) if args.activations != "bf16" else (False,)


def _share(number: int, parts: int, what: str) -> int:
    if number % parts:
        raise ValueError(f"{number} {what} cannot be split evenly over {parts} GPUs")
    return number // parts
