"""A config that stays true: its ignore list and what it says of scales are those of the model's modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from moe_nvfp4.format import is_global_scale
from moe_nvfp4.integrations.huggingface.config import MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.converters import with_names_in_files
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.files import NO_STATIC, MtpTensors, layers_of
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize.dialects import DIALECTS, matches
from moe_nvfp4.quantize.linears import Chosen
from moe_nvfp4.quantize.names import PER_EXPERT, PLAIN_NAMES, PRE_QUANT_SCALE, TABLE, ignore_patterns, is_meant

logger = logging.get_logger(__name__)
INPUT_SCALES = ("up_proj_input_scale", "down_proj_input_scale")


def name_dense(
    model: nn.Module,
    config: MoeNvfp4Config,
    experts: Iterable[str],
    excluded: Iterable[str],
    chosen: Chosen,
    mtp: MtpTensors,
) -> None:
    """Add the modules of `model` that are dense to the config's ignore list.

    experts   names of 4-bit experts modules
    excluded  names of experts modules that stay dense
    chosen    linears that will become 4-bit
    mtp       the files' layers for multi-token prediction, of which some are dense
    """
    # Who sees files only takes a table for a linear, unless its name says what it is
    linears = {n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    linears = {name for name in linears if not TABLE.search(f"{name}.weight")}
    routers = {n for n, m in model.named_modules() if n.endswith((".gate", ".router"))}
    packed = {n for n, m in model.named_modules() if isinstance(m, NVFP4Linear)}
    packed |= {linear.model for fused in chosen.fused for linear in fused}
    linears -= packed
    quantized = packed.union(f"{n}.0.down_proj" for n in experts)
    mtp_experts = {m["module"] for name in mtp.dense if (m := PER_EXPERT.fullmatch(name))}
    mtp_others = {name for name in mtp.dense if PER_EXPERT.fullmatch(name) is None}
    all_names = linears | routers, quantized, set(excluded)
    dense, quantized, left = (with_names_in_files(model, names) for names in all_names)
    layers = layers_of(model) if mtp.dense else None
    dialect = DIALECTS[config.dialect]
    theirs = ignore_patterns(dense | mtp_others, quantized, left | mtp_experts, dialect, layers)
    config.ignore = sorted({*config.ignore, *theirs})


def unname_dense(model: nn.Module, config: MoeNvfp4Config, names: set[str]) -> None:
    """Take what matches modules of these `names`, which are 4-bit now, off the config's lists of what is not."""
    names = with_names_in_files(model, names)
    names |= {f"{name}.0.{part}" for name in names for pair in PLAIN_NAMES.items() for part in pair}
    config.ignore = [p for p in config.ignore if not any(matches(p, name) for name in names)]
    config.exclude = [p for p in config.exclude if not any(is_meant(p, name) for name in names)]


def say_scales(config: MoeNvfp4Config, experts: Mapping[str, HFExperts], linears: Mapping[str, NVFP4Linear]) -> None:
    """Have the config say whether there are AWQ's scales, and static activation scales of experts. Warn of linears that
    have none of these beside them."""
    of_awq = [e.pre_quant_scales[0] for e in experts.values()]
    of_awq += [linear._parameters.get(PRE_QUANT_SCALE) for linear in linears.values()]
    config.pre_quant_scale = any(scale is not None for scale in of_awq)
    if not experts:
        return
    config.input_scale = all(e._parameters.get(INPUT_SCALES[1]) is not None for e in experts.values())
    lacking = sorted(name for name, linear in linears.items() if linear._parameters["input_scale"] is None)
    if config.says_static and lacking:
        logger.warning(
            f"{lacking[0]} has no static activation scale, and experts have: servers read such files as W4A4 "
            "and go on with a number that nobody wrote. calibrate(model, batches) gives all layers one"
        )


def leave_bad_scales(config: MoeNvfp4Config, experts: Mapping[str, HFExperts]) -> None:
    """Drop all static activation scales if some are not valid: W4A16 does not need them."""
    found = [(f"{n}.{k}", e._parameters[k]) for n, e in experts.items() for k in INPUT_SCALES if k in e._parameters]
    bad = [name for name, p in found if p is not None and p.device.type != "meta" and not _are_scales(p)]
    if not bad:
        return
    config.input_scale = False
    logger.warning(NO_STATIC.format(f"{bad[0]} has some that are 0, NaN or Inf"))
    for layer in experts.values():
        for key in INPUT_SCALES:
            layer._parameters.pop(key, None)


def _are_scales(param: Tensor) -> bool:
    here = param.to_local() if isinstance(param, DTensor) else param
    return bool(is_global_scale(here).all())
