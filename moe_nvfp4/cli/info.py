"""moe-nvfp4 info: what is in a model."""

from __future__ import annotations

import argparse
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from moe_nvfp4.cli.models import (
    bf16_bytes,
    check_whole,
    empty_model,
    form_of,
    model_config,
    quantization_of,
    resolve,
    weights_of,
)
from moe_nvfp4.cli.options import MODEL_HELP, Commands, add_exclude, add_json, command
from moe_nvfp4.cli.output import say, show_json, table

if TYPE_CHECKING:
    from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout
    from moe_nvfp4.quantize.files import Checkpoint
    from moe_nvfp4.quantize.layouts import ExpertLayout

T = TypeVar("T", bound=Hashable)


def add(commands: Commands) -> None:
    sub = command(
        commands, "info", run, "show what is in a model",
        "List the experts of MODEL: layers, sizes, gate, format, bytes before and after, and which "
        "would be skipped and why; layers of multi-token prediction are not counted. Reads only headers and config.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_exclude(sub, "experts modules")
    add_json(sub)
    sub.set_defaults(recipe=None, linears=None)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
    from moe_nvfp4.integrations.huggingface.files import CheckpointLayout, read_layout
    from moe_nvfp4.quantize.files import open_checkpoint
    from moe_nvfp4.quantize.names import names_experts
    from moe_nvfp4.quantize.plan import scale_warnings
    from moe_nvfp4.quantize.report import readable_size

    source = resolve(args.model)
    config = model_config(source)
    form, quantization = form_of(config, args.model), quantization_of(config, args)
    chosen = MoeNvfp4Config(exclude=args.exclude) if quantization is None else MoeNvfp4Config.from_dict(quantization)
    model = empty_model(config, source)
    modules, skipped = _experts_modules(model)
    dense_files, checkpoint, found = None, None, CheckpointLayout()  # what the files hold, whatever their config says
    files = weights_of(source)
    if files is not None and quantization is None:  # these two refuse what loading refuses
        dense_files = check_whole(model, str(files))
    elif files is not None:
        checkpoint = open_checkpoint(files)
        found = read_layout(checkpoint, model, list(modules), chosen.activations)
    experts = dict[str, _Row]()
    for name, (module, layout) in modules.items():
        if why := _left_as_it_is(found.experts.get(name), chosen.excludes(name)):
            skipped.append((name, why))
        else:
            experts[name] = _row(module, layout, chosen.activations)
    unused = (p[layout.num_experts :] for m, layout in modules.values() for p in m.parameters(recurse=False))
    total = 2 * (sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in unused))  # see `bf16_bytes`
    saved = model.state_dict().keys()
    total += sum(b.nbytes for name, b in model.named_buffers() if name in saved)  # MiniMax has large ones
    dense, packed = (sum(getattr(row, key) for row in experts.values()) for key in ("bytes_bf16", "bytes_nvfp4"))
    linears = [model.get_submodule(name).weight.shape for name, of in found.linears.items() if of.kind == "nvfp4"]
    of_linears = sum(2 * N * K for N, K in linears), sum(N * K // 2 + N * -(-K // 16) + 4 for N, K in linears)
    smaller = total - dense + packed - of_linears[0] + of_linears[1]
    names = [*experts, *(name for name, _ in skipped)]
    unknown = next((p for p in args.exclude if not any(names_experts(p, name) for name in names)), None)
    warnings = [] if checkpoint is None or not experts else list(scale_warnings(checkpoint))
    if dense_files is not None and experts:
        warnings += _refused_by_quantize(dense_files, experts)
    if files is None and quantization is not None:
        warnings.append(
            f"warning: the weights of {args.model} are not on this machine, so this is what its config "
            "says: 4-bit linears are not counted, and experts that are dense in the files count as 4-bit"
        )
    if args.json and experts and unknown is None:
        show_json({
            "model": args.model, "class": type(model).__name__, "dialect": quantization and chosen.dialect,
            "experts": [{"name": name, **row._asdict()} for name, row in experts.items()],
            "linears": len(linears), "left_as_it_is": dict(skipped), "warnings": warnings,
            "bytes": {"experts_bf16": dense, "experts_nvfp4": packed, "linears_bf16": of_linears[0],
                      "linears_nvfp4": of_linears[1], "model_bf16": total, "model_nvfp4": smaller},
        })  # fmt: skip
        return
    if not args.json:
        state = f"{form or 'dense'}, would become NVFP4" if quantization is None else f"NVFP4 of {chosen.dialect}"
        say(f"{args.model}: {type(model).__name__}, {len(experts)} layers of experts, {state}")
        rows = grouped((name, row.cells()) for name, row in experts.items())
        table([""] * 5, [[f"  {name}", *cells] for name, cells in rows], left=4)
        for name, why in grouped(skipped):
            say(f"  {name}  left as it is: {why}")
    if unknown is not None:
        raise ValueError(f"--exclude {unknown!r} matches no experts module of {args.model}"
                         + ("" if args.json else ", see above"))  # fmt: skip
    if not experts:
        if modules and quantization is not None and not linears:
            raise ValueError(
                f"{args.model} has no 4-bit experts, although its config says so: moe-nvfp4 verify names why"
            )
        raise ValueError(f"{args.model} has no experts that this library can quantize")
    for line in warnings:
        say(line)
    sizes = f"experts: {readable_size(dense)} in bf16, {readable_size(packed)} in NVFP4; "
    if linears:
        sizes += f"{len(linears)} linears: {readable_size(of_linears[0])}, {readable_size(of_linears[1])}; "
    say(f"{sizes}whole model {readable_size(total)} -> {readable_size(smaller)}")


def _refused_by_quantize(files: Checkpoint, experts: Iterable[str]) -> Iterator[str]:
    """A warning if `quantize` does not take files that are not NVFP4."""
    from moe_nvfp4.quantize.plan import plan_of

    try:
        why = None if plan_of(files, experts).matrices else "it finds no experts in them"
    except (ValueError, NotImplementedError) as error:
        why = str(error)
    if why is not None:
        yield f"warning: moe-nvfp4 quantize does not take these files: {why}"


class _Row(NamedTuple):
    """One experts module."""

    experts_class: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate: str
    bytes_bf16: int
    bytes_nvfp4: int

    def cells(self) -> tuple[str, ...]:
        """The row of a table that follows the name."""
        from moe_nvfp4.quantize.report import readable_size

        shape = f"E {self.num_experts}  H {self.hidden_size}  I {self.intermediate_size}"
        sizes = f"{readable_size(self.bytes_bf16)} -> {readable_size(self.bytes_nvfp4)}"
        return self.experts_class, shape, self.gate, sizes


def _experts_modules(model: Any) -> tuple[dict[str, tuple[Any, ModuleLayout]], list[tuple[str, str]]]:
    """Experts modules by name, each once; and (name, why) for those that cannot be 4-bit."""
    from moe_nvfp4.integrations.huggingface.experts import experts_modules

    modules: dict[str, tuple[Any, ModuleLayout]] = {}
    refused: list[tuple[str, str]] = []
    seen: set[Any] = set()
    for name, module, layout in experts_modules(model):
        if module in seen:
            continue
        seen.add(module)
        if isinstance(layout, NotImplementedError):
            refused.append((name, str(layout).split(". ")[0]))
        else:
            modules[name] = module, layout
    return modules, refused


def _left_as_it_is(held: ExpertLayout | None, excluded: bool) -> str | None:
    """Why experts will not be 4-bit, or None. held: how 4-bit files store them (None: there are no such files)."""
    from moe_nvfp4.quantize.layouts import ExpertLayout

    dense = (ExpertLayout.DENSE, ExpertLayout.SINGLE)
    if excluded and held in (None, *dense):
        return "excluded"
    if held in dense:
        return "dense in the files, contrary to their config"
    return "FP8 in the files, dense when it is loaded" if held is ExpertLayout.FP8 else None


def _row(module: Any, layout: ModuleLayout, activations: str) -> _Row:
    from moe_nvfp4.integrations.huggingface.experts import HFExperts

    experts = HFExperts(module, layout, activations, device="meta")
    after = sum(p.numel() * p.element_size() for p in experts.parameters())
    gate = "own gate, unfused" if experts.gate.kind == "raw" else experts.gate.kind
    sizes = layout.num_experts, layout.hidden_size, layout.intermediate_size
    return _Row(type(module).__name__, *sizes, gate, bf16_bytes(experts), after)


def grouped(rows: Iterable[tuple[str, T]]) -> Iterable[tuple[str, T]]:
    """(name, what) pairs; those that differ only in the first number of the name as one: "30 x model.layers.0-29"."""
    from moe_nvfp4.quantize.names import spans

    groups: dict[tuple[str, str, T], list[str]] = {}
    for name, text in rows:
        before, number, after = re.findall(r"^(\D*)(\d*)(.*)$", name)[0]
        groups.setdefault((before, after, text), []).append(number)
    for (before, after, text), numbers in groups.items():
        listed = spans(map(int, filter(None, numbers)))
        yield (f"{len(numbers)} x " if len(numbers) > 1 else "") + before + listed + after, text
