"""Names of tensors in files: experts, the scales of formats, ignore lists."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from moe_nvfp4.quantize.dialects import DIALECTS, Dialect, matches
from moe_nvfp4.quantize.files import TensorSlice
from moe_nvfp4.weights import FUSED_LINEARS

DENSE = ("BF16", "F16", "F32", "F64")
PER_EXPERT = re.compile(r"(?P<module>(?:.+\.)?experts)\.(?P<e>0|[1-9]\d*)\."
                        r"(?P<part>gate_proj|up_proj|down_proj|w[123])")  # fmt: skip
PLAIN_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
GATES = {"up_proj": "gate_proj", "w3": "w1"}  # up -> gate, which have the same input


def by_number(name: str) -> list[int | str]:
    """A key to sort names by, in which numbers are numbers: layer 2 comes before layer 10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def spans(numbers: Iterable[int]) -> str:
    """Numbers in order, 0 1 2 5, as 0-2,5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def projections(name: str) -> tuple[str, ...]:
    """The projections that a tensor of this name holds."""
    return ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)


def gate_of(stem: str) -> str | None:
    """The stem of the gate that belongs to the up projection `stem`; None for other stems."""
    module, _, part = stem.rpartition(".")
    return f"{module}.{GATES[part]}" if part in GATES else None


def up_of(stem: str) -> str | None:
    """The stem of the up projection that belongs to the gate `stem`; None for other stems."""
    module, _, part = stem.rpartition(".")
    return next((f"{module}.{up}" for up, gate in GATES.items() if gate == part), None)


def fused_names(stem: str) -> tuple[str, ...]:
    """The names that linears have which servers fuse into one with the linear `stem`; itself included."""
    above, dot, last = stem.rpartition(".")
    parts = next((parts for parts in FUSED_LINEARS if last in parts), (last,))
    return tuple(f"{above}{dot}{part}" for part in parts)


TOWER = re.compile(r"sam_model|vision|visual|vit\b|audio|speech|code2wav|image|video|encoder|projector")


def mtp_layer(name: str, layers: int | None) -> str | None:
    """The layer of multi-token prediction that `name` is in: mtp, mtp_block (ERNIE) or mtp_layers (MiMo), or one after
    the last of `layers` layers, but for those of towers; None: it is in none."""
    if named := re.match(r"(.*?\.)?mtp(_\w+)?(?=\.)", name):
        return named[0]
    layer = re.match(r"(?:.*?\.)?(?:layers|blocks|h)\.(\d+)(?=\.)", name)
    return layer[0] if layer and layers and int(layer[1]) >= layers and not TOWER.search(layer[0]) else None


def is_mtp(name: str, layers: int | None) -> bool:
    return mtp_layer(name, layers) is not None


# ModelOpt's stacks of NVFP4 experts, [E, in/2, out]
FUSED = re.compile(r"(^|\.)experts\.(gate_up_proj|up_proj|down_proj)$")
# ModelOpt's stacks for each projection, [E, out, in/2]
SEPARATE = re.compile(r"(?<![^.])moe\.(?P<part>gate_proj|up_proj|down_proj)$")
# ModelOpt's older names, with the projection before the expert
PROJECTION_FIRST = re.compile(r"(?P<module>(?:.+\.)?experts)\.(?P<part>gate_proj|up_proj|down_proj|w[123])\."
                              r"(?P<e>0|[1-9]\d*)(?=\.|$)")  # fmt: skip
_LASTS = {last for dialect in DIALECTS.values() for last in dialect.suffixes}
# What 4-bit and 8-bit formats keep next to a weight; the numbers are wrong if one of these is not read
SCALES = re.compile(
    r"(_scale_inv|_scales|_blocks|activation_scale|_global_scale|pre_quant_scale|svdquant_lora_[ab]|[._]g_idx|"
    r"weight_zero_point|smooth_scale|\.(qweight|qzeros|SCB)|absmax|quant_map|quant_state\.\w+|"
    rf"{'|'.join(sorted(_LASTS - {'weight'}))})$"
)
PRE_QUANT_SCALE = "pre_quant_scale"  # AWQ: x is multiplied with it before the layer
MTP = "a multi-token prediction layer, which programs that draft with it read dense"
KV_SCALE = re.compile(r"\.(k|v|q|kv)_((global_)?scale|zero_point)$|\.self_attn\.(q|[kv]_cache)\.scale$")  # HY-V3's last


def is_scale(name: str, tensors: Mapping[str, TensorSlice]) -> bool:
    """Whether tensor `name` of `tensors` is a scale, or another part, of a quantized weight."""
    if name.endswith(".scale"):  # belongs to a norm, unless the weight next to it is not dense
        weight = tensors.get(f"{name.removesuffix('scale')}weight")
        return weight is not None and weight.dtype not in DENSE
    return SCALES.search(name) is not None and KV_SCALE.search(name) is None


def experts_module(name: str) -> str | None:
    """The experts module to which the dense weight `name` belongs, one by one or as a stack; None: to none."""
    stem = name.removesuffix(".weight")
    match = PER_EXPERT.fullmatch(stem)
    return match["module"] if match else stem.rpartition(".")[0] if FUSED.search(stem) else None


# Tables, which are looked up. Others with "embed" in their names are linears: embed_vision.embedding_projection,
# patch_embed.proj, unembed
TABLE = re.compile(r"(^|\.)(?!un|patch)(\w*embed(ding)?s?(_tokens\w*|_in|_positions)?|wte|wpe)\.weight$", re.IGNORECASE)


def is_dense_linear(name: str, stored: TensorSlice) -> bool:
    return name.endswith(".weight") and len(stored.shape) == 2 and not TABLE.search(name)


# Names of modules in files -> in transformers, which matches exclusions against its own names
ALIASES = ((".block_sparse_moe.experts", ".mlp.experts"), (".ffn.experts", ".mlp.experts"),
           (".moe.experts", ".mlp.experts"), ("backbone.", "model."))  # fmt: skip


def aliases(module: str) -> list[str]:
    names = [module]
    for theirs, ours in ALIASES:
        names += [n.replace(theirs, ours) for n in names if theirs in n]
    return names


def is_meant(pattern: str, name: str) -> bool:
    """Whether a user's pattern, a name, a wildcard or `re:` and an expression, matches the module `name` or one that it
    is in."""
    return matches(pattern, name) or fnmatchcase(name, f"{pattern}.*")


def names_experts(pattern: str, module: str) -> bool:
    """Whether a user's pattern matches the experts module `module`, or a projection of its experts, which stands for
    the whole. One for all experts does, and one for expert 0 alone (*.0.*, which means layer 0) does not."""
    parts = [[f"{module}.{e}.{part}" for e in (0, 1)] for names in PLAIN_NAMES.items() for part in names]
    return any(all(is_meant(pattern, name) for name in names) for names in ([module], *parts))


def ignores_experts(pattern: str, module: str) -> bool:
    """Whether an entry of an ignore list matches the experts module `module`. Other tools name experts, and their
    projections, one by one: the down projection of the first stands for all."""
    return any(matches(pattern, name) for name in (module, f"{module}.0.down_proj", f"{module}.0.w2"))


def ignore_patterns(
    dense: set[str], quantized: set[str], excluded: set[str], dialect: Dialect, layers: int | None = None
) -> list[str]:
    """The `ignore` list of a config, which names the `dense` modules and the `excluded` experts.

    Entries are wildcards, in the form of `dialect`. Layers share one entry where no quantized module matches it.
    Linears beside each other are named by their parent where nothing in it is quantized: vLLM fuses them (q_proj,
    k_proj and v_proj become qkv_proj) and matches the fused name. Where something in it is quantized, linears that are
    fused are named one by one, because vLLM looks up their parts by name, not by wildcard.
    Excluded experts are named with everything in them, and also as transformers names them.

    Layers of multi-token prediction, of a model with so many `layers`, are also named as a whole where they are dense:
    vLLM has names of its own for modules in them (layers.61.head for layers.61.shared_head.head).

    Where programs rename modules, which they do with names and not with expressions (`Dialect.renamed`), each module is
    named by itself, too, and of excluded experts number 0, which stands for all.
    """
    few = {re.sub(r"experts\.\d+\.", "experts.0.", name) for name in quantized}
    free = lambda pattern: not any(fnmatchcase(name, pattern) for name in few)
    fused = {part for parts in FUSED_LINEARS for part in parts}
    groups: dict[str, set[str]] = {}
    for module in dense:
        groups.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", module), set()).add(module)
    beside = Counter(name.rpartition(".")[0] for name in {*dense, *groups})

    def parent(module: str) -> str | None:
        above = module.rpartition(".")[0]
        return f"{above}*" if above and above[-1] != "*" and beside[above] > 1 and free(f"{above}*") else None

    found = set()
    for pattern, members in groups.items():
        if (whole := parent(pattern)) is not None:
            found.add(whole)
            continue
        of_members = {member: parent(member) for member in members}
        found |= {p for p in of_members.values() if p is not None}
        left = {member for member, p in of_members.items() if p is None}
        fold = free(pattern) and pattern.rpartition(".")[2] not in fused
        found |= {pattern} if left and fold else left
    if dialect.renamed:
        found |= dense
    mtp = {mtp_layer(name, layers) for name in {*dense, *excluded}}
    found |= {f"{layer}*" for layer in mtp if layer and free(f"{layer}*")}
    found |= {p.removesuffix(".layer") for p in found if p.endswith(".router.layer")}
    found |= {p for name in found if free(p := name.replace(".mamba", ".mixer"))}  # as vLLM names Mamba modules
    found |= {f"{name}*" for module in excluded for name in aliases(module)}
    if dialect.renamed:
        parts = {*PLAIN_NAMES, *PLAIN_NAMES.values()}
        found |= {f"{name}.0.{part}" for module in excluded for name in aliases(module) for part in parts}
    return sorted(map(dialect.pattern, found))
