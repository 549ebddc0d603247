"""moe-nvfp4 importance: measure what the recipe "weighted" needs to know about a model."""

from __future__ import annotations

import argparse

from moe_nvfp4.cli.models import folder, model_config, text_of, tokenizer_of, windows_of
from moe_nvfp4.cli.options import ORIGINAL_HELP, Commands, add_device, add_texts, check_writable, command, path
from moe_nvfp4.cli.output import note


def add(commands: Commands) -> None:
    sub = command(
        commands, "importance", run, "measure how large the inputs of the experts are",
        "Run the dense MODEL over a text, layer by layer (one layer's weights in memory), and write how large each "
        "input column of its experts' matrices, and of its linears, is, for moe-nvfp4 quantize --recipe weighted "
        "--importance OUT. Without --text, random token ids are used, which do nearly as well.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=ORIGINAL_HELP)
    sub.add_argument("out", metavar="OUT", type=path, help="safetensors file to make; must not exist")
    add_texts(sub, 8, shortest=1, default="default: random token ids")
    add_device(sub)


def run(args: argparse.Namespace) -> None:
    from moe_nvfp4.integrations.huggingface.calibration import files_importance, in_batches, random_batches
    from moe_nvfp4.quantize.files import new_file
    from moe_nvfp4.quantize.importance import save_importance

    if args.out.exists():
        raise ValueError(f"{args.out} exists: name a file that does not, or remove it first")
    check_writable(args.out)
    source = folder(args.model)
    config = model_config(source)
    if args.text is None:
        batches = random_batches(config, args.windows, args.window)
    else:
        batches = in_batches(windows_of(args, tokenizer_of(source), text_of(args), config))
    data = "random token ids" if args.text is None else str(args.text)
    tokens = sum(batch.numel() for batch in batches)
    with new_file(args.out) as part:
        importance = files_importance(source, batches, device=args.device)
        importance.source = f"{args.model}, {tokens} tokens: {data}"
        save_importance(importance, part)
    found = f"{len(importance.layers)} layers of experts and {len(importance.linears)} inputs of linears"
    note(f"wrote {args.out}: {found}, from {tokens} tokens of {data}")
    for name, layer in importance.layers.items():
        if unseen := int((layer.rows == 0).sum()):
            note(f"  {name}: {unseen} of {len(layer.rows)} experts had no token, and get their layer's average")
