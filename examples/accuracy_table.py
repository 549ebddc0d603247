"""All recipes on one model: perplexity, KL, top-1 and changed routing on held-out texts, W4A16 and W4A4.

The KL has its 95 % interval over all windows of all texts. The time is that of quantizing.

The last four numbers are the errors of the experts' outputs, for quarters of each layer's experts: from the experts
with the fewest tokens of the texts to those with the most.

    python examples/accuracy_table.py demo --text demo.txt --text prose.txt --calibration mix.txt --calibration code.txt

The first calibration text is used in several lengths, the others in one. Lines of JSON go to --out.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_nvfp4 import format as nvfp4
from moe_nvfp4.cli.compare import LABELS
from moe_nvfp4.demo import demo_path
from moe_nvfp4.evaluate import Metrics, evaluate
from moe_nvfp4.integrations.huggingface import set_activations, swap_experts
from moe_nvfp4.integrations.huggingface.calibration import cut, dense_modules, in_batches
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.recognise import ModuleLayout, dense_experts, describe, own_gate
from moe_nvfp4.integrations.huggingface.statistics import watch

LENGTHS = (32, 128, 512, 8, 2)  # windows of the first calibration text


class Routing:
    """Which experts a model chooses for its tokens, and how often another model chooses others."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []
        self.expected: list[Tensor] = []
        self.changed: list[float] = []

    @contextmanager
    def watch(self, model) -> Iterator[None]:
        modules = [m for m in model.modules() if isinstance(m, HFExperts) or describe(m) is not None]
        handles = [m.register_forward_pre_hook(lambda m, args: self.ids.append(args[1])) for m in modules]
        yield
        for handle in handles:
            handle.remove()

    def take(self) -> list[Tensor]:
        found, self.ids = self.ids, []
        return found

    def compare(self) -> None:
        for old, new in zip(self.expected, self.take(), strict=True):
            kept = (old[:, :, None] == new[:, None, :]).any(dim=-1)
            self.changed.append(1 - kept.float().mean().item())


@torch.no_grad()
def judge(original, model, windows: Tensor) -> tuple[Metrics, float]:
    """Metrics of `model`, and the share of its assignments to experts that differ from the original's."""
    routing = Routing()

    def run_original(ids: Tensor):
        with routing.watch(original):
            output = original(ids)
        routing.expected = routing.take()
        return output

    def run(ids: Tensor):
        with routing.watch(model):
            output = model(ids)
        routing.compare()
        return output

    found = evaluate(run_original, {"4-bit": run}, windows)["4-bit"]
    return found, sum(routing.changed) / len(routing.changed)


@torch.no_grad()
def errors_by_popularity(original, model, windows: Tensor) -> list[float]:
    """||y' - y|| / ||y|| for the outputs y of an expert, from the quantization of its weights alone; for four quarters
    of each layer's experts, from those with the fewest rows to those with the most."""
    modules = dense_modules(original)
    found = {name: torch.zeros(layout.num_experts, 3) for name, (_, layout) in modules.items()}

    def weight(name: str, part: str, e: int) -> Tensor:
        experts = model.get_submodule(name)
        scale = getattr(experts, f"{part.replace('gate_up', 'gate')}_global_scale")[e]
        return nvfp4.dequantize(getattr(experts, part)[e], getattr(experts, f"{part}_sf")[e], scale, original.dtype)

    def visit(name: str, layout: ModuleLayout, e: int, x: Tensor, h: Tensor) -> None:
        dense = modules[name][0]
        want = h @ list(dense_experts(dense, layout))[e][1].T
        got = own_gate(dense, type(dense), layout, x @ weight(name, layout.up_name, e).T)
        error = got @ weight(name, "down_proj", e).T - want
        found[name][e] += torch.stack([t.float().square().sum().cpu() for t in (torch.ones(len(x)), error, want)])

    with watch(modules, visit):
        for ids in in_batches(windows):
            original(ids)
    quarters = [layer[layer[:, 0].argsort()].chunk(4) for layer in found.values()]
    sums = [torch.cat(parts).sum(dim=0) for parts in zip(*quarters, strict=True)]
    return [(error / norm).sqrt().item() for _, error, norm in sums]


def recipes_of(calibrations: dict[str, Tensor]) -> Iterator[tuple[str, str, dict[str, object]]]:
    """(activations, name, arguments of swap_experts) for each row of the table."""
    (first, whole), *others = calibrations.items()
    cuts = {f"{first} {n}": whole[:n] for n in LENGTHS if n <= len(whole)}
    cuts |= {f"{name} {len(ids)}": ids for name, ids in others}
    for activations in LABELS:
        for recipe in ("max", "four_over_six", "mse"):
            yield activations, recipe, dict(recipe=recipe)
        yield activations, "weighted, random ids", dict(recipe="weighted")
        for name, ids in cuts.items():
            if activations == "bf16" or name.startswith(first) and len(ids) in (32, 512):
                for recipe in ("weighted", "gptq", "distill"):
                    yield activations, f"{recipe}, {name}", dict(recipe=recipe, calibration=in_batches(ids))


def windows_of(file: Path, tokenizer, count: int, window: int) -> Tensor:
    """The first whole windows of a text, at most `count`: [n, window]. As in `compare`, each begins with BOS where the
    tokenizer begins a text with it. ValueError if the text has none."""
    pieces = cut(tokenizer, file.read_text("utf-8", errors="replace"), window)[:count]
    whole = [ids for ids in pieces if len(ids) == window]
    if not whole:
        raise ValueError(f"{file} has {sum(map(len, pieces))} tokens, fewer than a window of {window}")
    return torch.stack(whole)


def by_name(files: list[Path]) -> dict[str, Path]:
    """Files by what the table calls them. ValueError for two of one name."""
    found = {file.stem: file for file in files}
    if len(found) < len(files):
        raise ValueError(f"{', '.join(map(str, files))}: two have one name, and the table would have one row for both")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a dense model, or demo")
    parser.add_argument("--text", type=Path, action="append", required=True, help="file to judge on")
    parser.add_argument("--calibration", type=Path, action="append", required=True, help="file to calibrate on")
    parser.add_argument("--windows", type=int, default=6, help="windows of each text to judge on")
    parser.add_argument("--window", type=int, default=512, help="tokens per window")
    parser.add_argument("--only", action="append", help="only rows whose name contains this; may be repeated")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of all but the 4-bit weights (float32: faster on most CPUs)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    source = demo_path() if args.model == "demo" else args.model
    tokenizer = AutoTokenizer.from_pretrained(source)
    original = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    windows: Callable[[Path, int], Tensor] = lambda file, count: windows_of(file, tokenizer, count, args.window)
    texts = {name: windows(file, args.windows).to(args.device) for name, file in by_name(args.text).items()}
    files = by_name(args.calibration).items()
    calibrations = {name: windows(file, 32 if i else max(LENGTHS)) for i, (name, file) in enumerate(files)}

    print(
        f"{'':34s}{'mean KL':>9s}{'95 %':>16s}{'median':>8s}{'trimmed':>8s}{'top-1':>7s}{'routing':>8s}  "
        + "  ".join(texts)
    )
    for activations, name, settings in recipes_of(calibrations):
        label = f"{LABELS[activations]} {name}"
        if args.only and not any(part in label for part in args.only):
            continue
        began = time.perf_counter()
        model = swap_experts(copy.deepcopy(original), activations, progress=False, **settings)
        seconds = time.perf_counter() - began
        errors = errors_by_popularity(original, model, torch.cat(list(texts.values())))
        set_activations(model, activations)
        found = {text: judge(original, model, windows) for text, windows in texts.items()}
        kls = torch.cat([metrics.kls for metrics, _ in found.values()])
        lengths = sum((metrics.windows for metrics, _ in found.values()), ())
        whole = Metrics(len(kls), 0.0, kls.mean().item(), 0.0, kls, lengths)
        top1 = sum(metrics.top1 * metrics.tokens for metrics, _ in found.values()) / len(kls)
        changed = sum(share * metrics.tokens for metrics, share in found.values()) / len(kls)
        interval = "{:.4f}-{:.4f}".format(*whole.kl_interval) if whole.kl_interval else "-"
        print(f"{label:34s}{whole.kl:9.4f}{interval:>16s}{whole.kl_median:8.4f}{whole.kl_trimmed:8.4f}{top1:7.1%}"
              + f"{changed:8.2%}  " + "  ".join(f"{m.kl:.4f} ({m.perplexity:.2f})" for m, _ in found.values())
              + f"  {seconds:.0f} s  " + " ".join(f"{error:.4f}" for error in errors),
              flush=True)  # fmt: skip
        if args.out:
            line = dict(
                model=args.model, activations=activations, recipe=name, kl=whole.kl, interval=whole.kl_interval,
                median=whole.kl_median,
                trimmed=whole.kl_trimmed, top1=top1, routing_changed=changed, seconds=seconds,
                errors_by_popularity=errors,
                texts={text: dict(kl=m.kl, perplexity=m.perplexity, top1=m.top1, median=m.kl_median)
                       for text, (m, _) in found.items()},
            )  # fmt: skip
            with open(args.out, "a") as out:
                out.write(json.dumps(line) + "\n")
        del model


if __name__ == "__main__":
    main()
