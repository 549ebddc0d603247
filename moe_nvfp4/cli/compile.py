"""moe-nvfp4 compile: compile a model's kernels for a GPU that need not be in this machine."""

from __future__ import annotations

import argparse
import os
from itertools import product
from typing import Any

from moe_nvfp4.cli.known import ARCHS, KNOWN, Sizes
from moe_nvfp4.cli.models import empty_model, model_config, resolve
from moe_nvfp4.cli.options import ACTIVATIONS, ACTIVATIONS_HELP, MODEL_HELP, Commands, command, path, whole
from moe_nvfp4.cli.output import note

ALL = "known"
# In and out features of linears that need, one by one and in pairs, every kernel that an H200's plans have
IN, OUT = (512, 1536, 4096, 16384), (128, 256, 512, 1024, 2048, 4096, 8192, 24576, 151936)


def add(commands: Commands) -> None:
    sub = command(
        commands, "compile", run, "compile a model's kernels for a GPU that need not be here",
        "Compile every kernel that the experts of MODEL can need on a GPU of architecture ARCH, for any number of "
        "tokens. DIR is a cache folder for machines without a compiler: copy it there and name it in MOE_NVFP4_CACHE. "
        "They need the same versions of moe-nvfp4, Triton and CuTe DSL. Sizes of 20 well-known models are built in: "
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
    from torch import nn

    from moe_nvfp4.backends import Gpu
    from moe_nvfp4.cache import cache_folder, own_folder
    from moe_nvfp4.ready import compile_for

    if args.model == ALL:
        layers = [layer for sizes in KNOWN.values() for layer in _known(sizes, args)]
        linears = _usual_linears(args) if args.linears else nn.ModuleList()
    elif args.model in KNOWN and not args.linears:
        layers, linears = _known(KNOWN[args.model], args), nn.ModuleList()
    else:
        layers, linears = _described(args)
    if args.out is not None:
        os.environ["MOE_NVFP4_CACHE"] = str(args.out)  # the processes that compile inherit it
    own_folder("kernels")  # raises if kernels could not be kept there
    arch, count = ARCHS[args.arch], 0
    for multiprocessors in [args.multiprocessors] if args.multiprocessors else arch.multiprocessors:
        gpu = Gpu(arch.capability, multiprocessors)
        count += sum(compile_for(layer, gpu, top_k) for layer, top_k in layers) + compile_for(linears, gpu)
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
    for K, N, bias in product(IN, OUT, (None, torch.bfloat16)):
        pairs.append(pair := nn.Module())
        for name in ("gate_proj", "up_proj"):
            pair.add_module(name, NVFP4Linear(K, N, bias, args.activations, device="meta"))
    return pairs


def _described(args: argparse.Namespace) -> tuple[list[tuple[Any, int]], Any]:
    """(experts on meta, top_k) for each kind of layer in MODEL's config; and with --linears, its linears."""
    from dataclasses import replace

    from torch import nn

    from moe_nvfp4.integrations.huggingface.experts import HFExperts, describe
    from moe_nvfp4.integrations.huggingface.ready import experts_per_token
    from moe_nvfp4.linear import NVFP4Linear

    source = resolve(args.model)
    config = model_config(source)
    model = empty_model(config, source)
    top_ks, layers, shapes = experts_per_token(config), {}, set()
    if not top_ks:
        raise ValueError(f"the config of {args.model} has no known field for the number of experts per token")
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.in_features % 16 == 0 and args.linears:
            shapes.add((module.in_features, module.out_features, module.bias is not None))
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
            layers.update({(here, made.gate, static, top_k): (made, top_k) for top_k in top_ks})
    if not layers:
        raise ValueError(f"{args.model} has no experts that this library can quantize")
    linears = [
        NVFP4Linear(K, N, model.dtype if bias else None, args.activations, device="meta") for K, N, bias in shapes
    ]
    return list(layers.values()), nn.ModuleList(linears)


def _static(args: argparse.Namespace) -> tuple[bool, ...]:
    """The values to compile for of whether activations have static scales: W4A4 may be with or without."""
    return (False, True) if args.activations != "bf16" else (False,)


def _share(number: int, parts: int, what: str) -> int:
    if number % parts:
        raise ValueError(f"{number} {what} cannot be split evenly over {parts} GPUs")
    return number // parts
