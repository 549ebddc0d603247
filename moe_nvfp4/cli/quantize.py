"""moe-nvfp4 quantize: write a 4-bit checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from moe_nvfp4.cli.models import folder, model_config, text_of, tokenizer_of, windows_of
from moe_nvfp4.cli.options import (
    ACTIVATIONS,
    DEFAULT_RECIPE,
    DIALECTS,
    MODEL_HELP,
    Commands,
    add_device,
    add_quantizing,
    add_texts,
    command,
    path,
    whole,
)
from moe_nvfp4.cli.output import note, say
from moe_nvfp4.cli.verify import show

if TYPE_CHECKING:
    from moe_nvfp4.quantize.options import Options
    from moe_nvfp4.quantize.report import ConversionReport


WINDOWS = 128  # the default for recipes that learn from a text


def add(commands: Commands) -> None:
    sub = command(
        commands, "quantize", run, "write a 4-bit checkpoint",
        "Quantize the experts (and --linears) of the checkpoint SRC (bf16, fp16, fp32, FP8 in blocks, MXFP4) and write "
        "DST, or convert NVFP4 files from one dialect to another. No model is built: memory stays below 1.5 GB. "
        "DST appears when it is complete; the same command resumes an interrupted run; SRC is only read.",
    )  # fmt: skip
    sub.add_argument("source", metavar="SRC", help=MODEL_HELP)
    sub.add_argument("destination", metavar="DST", type=path, help="folder to make; must not exist")
    sub.add_argument("--activations", choices=ACTIVATIONS, help="what DST asks for when loaded (default bf16)")
    add_quantizing(sub)
    sub.add_argument(
        "--importance", type=path, metavar="FILE", help="for --recipe weighted: what moe-nvfp4 importance wrote"
    )
    add_texts(
        sub, WINDOWS, shortest=2, default="for --recipe gptq or distill; it should resemble the model's later use"
    )
    sub.set_defaults(windows=None)  # to tell whether it is given: only recipes with a text take it
    sub.add_argument(
        "--include", action="append", default=None, metavar="NAME",
        help="quantize only these experts modules; may have wildcards (default: all)",
    )  # fmt: skip
    sub.add_argument(
        "--dialect", choices=DIALECTS, default="modelopt", help="tensor names and config of DST (default modelopt)"
    )
    sub.add_argument(
        "--share-scales", action="store_true",
        help="for NVFP4 files whose experts have different global scales for gate and up, which servers misread: "
        "requantize one of the two, so that both share a scale",
    )  # fmt: skip
    sub.add_argument(
        "--verify", action="store_true",
        help="afterwards, compare DST with SRC and write the error of each layer into DST's model card (README.md)",
    )  # fmt: skip
    sub.add_argument("--dry-run", action="store_true", help="print the plan and the sizes, but write nothing")
    sub.add_argument(
        "--workers", type=whole(1, 256), metavar="N", help="threads (default: one per core, at most 4, or 8 with a GPU)"
    )
    add_device(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.quantize.card import misread_by, write_card
    from moe_nvfp4.quantize.convert import convert_checkpoint
    from moe_nvfp4.quantize.files import StagingDir, open_checkpoint
    from moe_nvfp4.quantize.importance import load_importance
    from moe_nvfp4.quantize.options import Options
    from moe_nvfp4.quantize.recipes import recipe_named
    from moe_nvfp4.quantize.report import readable_size
    from moe_nvfp4.quantize.source import nvfp4_info
    from moe_nvfp4.quantize.verify import verify_checkpoint

    source, recipe = folder(args.source, copied=True), args.recipe or DEFAULT_RECIPE
    needs = recipe_named(recipe)
    given = ["--recipe"] * bool(args.recipe and not args.share_scales) + ["--activations"] * bool(args.activations)
    if given and Path(source).is_dir() and nvfp4_info(open_checkpoint(source)):
        raise ValueError(f"{given[0]} would have no effect: {args.source} is NVFP4 already, and another --dialect does "
                         f"not change its numbers; name the original model, or leave out {given[0]}")  # fmt: skip
    of_text = [f"--{name}" for name in ("text", "windows", "window") if getattr(args, name) is not None]
    if of_text and not needs.text:
        raise ValueError(f"{of_text[0]} would have no effect on recipe {recipe}: --recipe gptq and distill learn "
                         "from a text, and moe-nvfp4 importance reads one for --recipe weighted")  # fmt: skip
    if args.importance is not None and not needs.importance:
        raise ValueError(f"--importance would have no effect on recipe {recipe}: it is for --recipe weighted")
    if args.verify and args.dry_run:
        raise ValueError("--verify would have no effect with --dry-run, which writes nothing: leave one of them out")
    options = Options(
        DEFAULT_RECIPE if needs.text else recipe, args.exclude, args.include, args.dialect,
        args.activations or "bf16", args.share_scales, args.device,
        None if args.importance is None else load_importance(args.importance), linears=args.linears or (),
    )  # fmt: skip
    try:
        if needs.text:
            report = _from_text(args, source, options)
        else:
            report = convert_checkpoint(source, args.destination, options, args.workers, args.dry_run, card=args.source)
    except KeyboardInterrupt:
        kept = StagingDir.beside(args.destination)
        if not kept.exists():
            raise KeyboardInterrupt("nothing was written") from None
        raise KeyboardInterrupt(
            f"the same command goes on from here; until then {kept} keeps what is done (remove it to start anew)"
        ) from None
    if args.dry_run:
        for line in report.lines():
            say(line)
        return
    for name, why in report.skipped.items():
        note(f"left alone: {name}: {why}")
    if report.not_compared:
        note(f"tensors that SRC may lack were not noticed: {report.not_compared}")
    before, after = readable_size(report.experts_before), readable_size(report.experts_after)
    made = f"; experts {before} -> {after}" if report.quantized else ""
    if report.linears:
        made += f", linears {readable_size(report.linears_before)} -> {readable_size(report.linears_after)}"
    made += f" ({recipe})" if report.quantized else ""
    resumed = f", {readable_size(report.resumed)} of the source by an earlier run" if report.resumed else ""
    for line in (*report.rescaled_lines(), *report.cast_lines()):
        note(line)
    note(f"wrote {args.destination}: {readable_size(report.bytes_after)}{made} in {report.seconds:.1f} s{resumed}")
    for line in misread_by(report.destination):
        note(f"note: {line}")
    if args.verify:
        try:
            verified = verify_checkpoint(args.destination, source)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{args.destination} is complete; moe-nvfp4 verify {args.destination} --against {args.source} checks it"
            ) from None
        write_card(report, args.source, report.destination, verified)
        show(verified)


def _from_text(args: argparse.Namespace, source: str, options: Options) -> ConversionReport:
    from moe_nvfp4.integrations.huggingface.calibration import in_batches
    from moe_nvfp4.integrations.huggingface.gptq import convert_gptq, plan_gptq

    if args.dry_run:
        return plan_gptq(source, args.destination, options, args.workers, args.recipe)
    if args.text is None:
        raise ValueError(f"--recipe {args.recipe} learns from a text, which should resemble the model's later use: "
                         "name one with --text FILE, or use --recipe weighted, which needs none")  # fmt: skip
    asked, args.windows = args.windows, args.windows or WINDOWS
    windows = windows_of(args, tokenizer_of(source), text_of(args), model_config(source))
    fewer = f", as the text has no more than {len(windows)} windows" if asked and len(windows) < asked else ""
    note(f"learning from {windows.numel()} tokens{fewer}")
    report, found = convert_gptq(
        source, args.destination, in_batches(windows), options, args.workers, recipe=args.recipe, card=args.source
    )
    for line in found.lines():
        note(line)
    return report
