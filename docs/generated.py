"""Write what pages take from elsewhere; tests compare.

    python docs/generated.py

cli.md, families.md and fits.md come from the code, proven.md from reports of self-tests, conformance.md from those of
moe_nvfp4.conformance. Measured figures come from
results.json: a table between `<!-- results: NAME -->` and `<!-- end -->` in any page is the record of that name
(`rows=0,3`: some of its rows), and
speed.svg is drawn from it. A paragraph after `<!-- quotes: NAME ... -->` has no number that is not in these records.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import re
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
MADE = "<!-- made by docs/generated.py -->\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, with columns of numbers to the right."""
    number = re.compile(r"[*]*[-+]?\d[\d.]*( %)?[*]*|[*]*all[*]*|\d+ of \d+|")
    rule = ["--:" if all(number.fullmatch(row[i]) for row in rows) else "---" for i in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows]) + "\n"


# ---- cli.md ----------------------------------------------------------------------------------------


def command_line() -> str:
    """Every command with its options, from the parsers themselves."""
    from moe_nvfp4 import cli

    parser = cli.make_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    summary = {choice.dest: choice.help for choice in commands._choices_actions}
    page = [
        f"# Command line\n\n{MADE}\nEach command also describes itself: `moe-nvfp4 COMMAND --help`. Exit codes: 0; "
        "1 where `verify --server` finds a wrong server; 2 for an error whose message says what to do; 130 after "
        "Ctrl-C.\n",
        table(["command", "what it does"], [[f"[`{n}`](#{n})", plain(summary[n])] for n in commands.choices]),
    ]
    for name, sub in commands.choices.items():
        actions = [a for a in sub._actions if a.help != argparse.SUPPRESS and a.dest != "help"]
        given = [a for a in actions if not a.option_strings]
        usage = " ".join(["moe-nvfp4", name, *[argument(a) for a in given], "[options]" * (len(actions) > len(given))])
        page.append(f"## {name}\n\n```\n{usage.strip()}\n```\n\n{plain(sub.description)}\n")
        rows = [[f"`{spelled(a)}`", meaning(a)] for a in actions]
        if rows:
            page.append(table(["argument", ""], rows))
    return "\n".join(page)


def argument(action: argparse.Action) -> str:
    name = action.metavar or action.dest.upper()
    return {None: f"{name}", "?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(
        action.nargs, f"{name} ..."
    )


def spelled(action: argparse.Action) -> str:
    """An option with its value, or the name of an argument."""
    if not action.option_strings:
        return argument(action)
    if action.nargs == 0:
        return ", ".join(action.option_strings)
    value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else argument(action)
    return f"{', '.join(action.option_strings)} {value if action.metavar is None else argument(action)}"


def meaning(action: argparse.Action) -> str:
    """Its help, and its default where the help leaves it out."""
    text = (action.help or "") % vars(action)
    if "default" not in text and action.option_strings and action.default not in (None, False, []):
        text += f" (default: {action.default})"
    return plain(text)


def plain(text: str | None) -> str:
    """Help text as Markdown: one line, nothing in it is a sign of the language."""
    return re.sub(r"([*_|<\[\]])", r"\\\1", " ".join((text or "").split()))


# ---- families.md -----------------------------------------------------------------------------------


def families() -> str:
    """What the tests find and test, from the tests themselves."""
    import transformers

    from tests import models
    from tests.integrations import test_families

    layers: dict[str, list[str]] = {}
    for family, _, name in test_families.CLASSES:
        layers.setdefault(family, []).append(name)
    adapted = dict(test_families.ADAPTED)
    whole = {type(make()).__module__.split(".")[2] for make in models.FAMILIES}
    served = {config_family(name) for name in served_families()}
    rows = [
        [
            f"`{family}`",
            ", ".join(f"`{name}`" for name in layers.get(family, [adapted.get(family)])),
            "adapter" if family in adapted else "as it is",
            "yes" if family in whole else "",
            "yes" if family in served else "",
        ]
        for family in sorted({*layers, *adapted})
    ]
    refused = ", ".join(f"`{family}`" for family, *_ in test_families.REFUSED)
    return f"""# Tested model families

{MADE}
The {len(test_families.CLASSES)} experts classes of transformers {transformers.__version__} that share its experts
interface, and {len(adapted)} that are supported by adapters. The tests find them in the installed package.

* **Layer**: for every class, the 4-bit layer equals the class's own eager forward on the dequantized weights to 1e-6 in
  fp32 (`tests/integrations/test_families.py`).
* **Whole model**: also swapped, quantized while loading, saved, loaded and generated from
  (`tests/integrations/test_models.py`). Other families share this code.
* **vLLM**: answers in vLLM are those of the reference (`tests/integrations/test_vllm.py`, by CI, and
  `tests/integrations/test_vllm_families.py`, by hand).

{table(["family", "experts", "how", "whole model", "vLLM"], rows)}
Refused by name, because their experts have another form: {refused}, and models whose experts are a plain list of
modules (`trust_remote_code`).
"""


def served_families() -> Iterator[str]:
    """The families that tests run in vLLM, which is not installed here: read from the sources."""
    folder = ROOT / "tests/integrations"
    for node in ast.walk(ast.parse((folder / "test_vllm_families.py").read_text("utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILIES":
            yield from (ast.literal_eval(key) for key in node.value.keys)  # type: ignore[attr-defined]
    [listed] = re.findall(r'parametrize\("family", \[([\w, ]+)\]\)', (folder / "test_vllm.py").read_text("utf-8"))
    yield from listed.split(", ")


def config_family(name: str) -> str:
    """transformers' module of "Glm4Moe"; names in small letters are modules already."""
    import transformers

    return name if name.islower() else getattr(transformers, f"{name}Config").__module__.split(".")[2]


# ---- fits.md ---------------------------------------------------------------------------------------

# name: (config class of transformers, what differs from its defaults, billions of parameters by the model's card). The
# sizes are those of config.json on the Hugging Face Hub.
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "OLMoE-1B-7B": ("Olmoe", dict(intermediate_size=1024), 6.9),
    "DeepSeek-V2-Lite": ("DeepseekV2", dict(
        vocab_size=102400, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2, n_routed_experts=64, q_lora_rank=None,
        first_k_dense_replace=1, num_experts_per_tok=6), 15.7),
    "gpt-oss-20b": ("GptOss", dict(num_hidden_layers=24, num_local_experts=32), 20.9),
    "ERNIE-4.5-21B-A3B": ("Ernie4_5_Moe", {}, 21.8),
    "Qwen3-30B-A3B": ("Qwen3Moe", dict(
        hidden_size=2048, num_hidden_layers=48, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936, intermediate_size=6144), 30.5),
    "Phi-3.5-MoE": ("Phimoe", {}, 41.9),
    "Mixtral-8x7B": ("Mixtral", {}, 46.7),
    "Qwen3-Next-80B-A3B": ("Qwen3Next", {}, 79.7),
    "GLM-4.5-Air": ("Glm4Moe", dict(
        hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96, num_key_value_heads=8,
        head_dim=128, n_routed_experts=128, moe_intermediate_size=1408, first_k_dense_replace=1, vocab_size=151552,
        attention_bias=True), 106),
    "gpt-oss-120b": ("GptOss", {}, 117),
    "Mixtral-8x22B": ("Mixtral", dict(
        hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
        vocab_size=32768), 141),
    "MiniMax-M2": ("MiniMaxM2", {}, 229),
    "Qwen3-235B-A22B": ("Qwen3Moe", dict(
        hidden_size=4096, num_hidden_layers=94, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=151936), 235),
    "GLM-4.5": ("Glm4Moe", dict(
        hidden_size=5120, intermediate_size=12288, num_hidden_layers=92, num_attention_heads=96, num_key_value_heads=8,
        head_dim=128, n_routed_experts=160, moe_intermediate_size=1536, first_k_dense_replace=3, vocab_size=151552,
        attention_bias=True, use_qk_norm=True), 355),
    "Qwen3-Coder-480B-A35B": ("Qwen3Moe", dict(
        hidden_size=6144, num_hidden_layers=62, num_experts=160, num_experts_per_tok=8, moe_intermediate_size=2560,
        num_attention_heads=96, num_key_value_heads=8, head_dim=128, vocab_size=151936), 480),
    "DeepSeek-R1": ("DeepseekV3", {}, 671),
    "Kimi-K2": ("DeepseekV3", dict(
        vocab_size=163840, num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384,
        first_k_dense_replace=1), 1027),
}  # fmt: skip
DEVICES = {"24 GB": 24, "32 GB": 32, "48 GB": 48, "80 GB": 80, "141 GB": 141}
FREE = 0.97  # of a GPU's memory, before the model


def packed_model(name: str) -> Any:
    """A model of MODELS with 4-bit experts, on meta: sizes only."""
    import torch
    import transformers

    from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
    from moe_nvfp4.integrations.huggingface.experts import experts_for, find_experts

    kind, settings, _ = MODELS[name]
    with torch.device("meta"):
        config = getattr(transformers, f"{kind}Config")(**settings)
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
    model.parameters_in_total = sum(p.numel() for p in model.parameters())
    chosen = MoeNvfp4Config()
    made: dict[str, Any] = {}  # layers of the same sizes are made once
    for place, module, layout in list(find_experts(model, chosen)):
        if repr(layout) not in made:
            made[repr(layout)] = experts_for(module, layout, chosen, "meta")
        model.set_submodule(place, copy.deepcopy(made[repr(layout)]))
    return model


def pack_linears(model: Any) -> Any:
    """Make all linears of a `packed_model` 4-bit, too. Returns the model."""
    from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
    from moe_nvfp4.integrations.huggingface.converters import choose_linears
    from moe_nvfp4.linear import NVFP4Linear

    for fused in choose_linears(model, MoeNvfp4Config(linears="all")).fused:
        for linear in fused:
            dense = model.get_submodule(linear.model)
            bias = None if dense.bias is None else dense.bias.dtype
            packed = NVFP4Linear(dense.in_features, dense.out_features, bias, device="meta")
            model.set_submodule(linear.model, packed)
    return model


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g}" if size < 1e12 else f"{size / 1e9:.0f}"


def fits() -> str:
    """Bytes of each model, and how many layers of experts each GPU has room for, by the rule of cpu_experts="auto"."""
    from moe_nvfp4.integrations.huggingface import offload

    def row(name: str, model: Any) -> list[str]:
        layers = len(offload._layers(model))
        experts = sum(map(offload._bytes, offload._layers(model)))
        rest, cache = offload._bytes(model) - experts, offload.cache_bytes(model, offload.CONTEXT)
        cells = []
        for memory in DEVICES.values():
            try:
                there = layers - offload.layers_on_cpu(model, "auto", memory=int(FREE * (memory << 30)))
                cells.append("**all**" if there == layers else f"{there} of {layers}")
            except ValueError:
                cells.append("")
        sizes = 2 * model.parameters_in_total, experts + rest, experts, rest, cache
        return [name, *map(gigabytes, sizes), *cells]

    dense_linears, packed_linears = [], []
    for name in MODELS:
        dense_linears.append(row(name, model := packed_model(name)))
        _, _, whole, _, rest, _, *cells = row(name, pack_linears(model))
        packed_linears.append([name, whole, rest, *cells])
    head = ["model", "bf16", "4-bit experts", "of which experts", "the rest", "cache", *DEVICES]
    return f"""# Which model fits where

{MADE}
Gigabytes (10^9 bytes) of the weights in bf16 and with 4-bit experts; of the experts alone; of the other weights, which
stay bf16; and of a KV cache of {offload.CONTEXT} tokens as transformers keeps it: layers with sliding windows keep
less, those with linear attention none, and latent attention keeps the latent vectors. Then, for GPUs with this much
memory (in GiB, of which 97 % are free), how many of the model's layers of experts fit into it beside the other weights,
that cache and 3 GiB of scratch. The experts of the other layers stay in host memory, and
[the CPU computes them](small_gpus.md). An empty cell: even the other weights do not fit.

{table(head, dense_linears)}
## With all linears in 4 bits, too

The same with `--linears all`: the rest is then embeddings, routers, norms and biases, and 4-bit attention, shared
experts, dense MLPs and lm_head. How much accuracy that costs: [accuracy](accuracy.md).

{table(["model", "all in 4 bits", "the rest", *DEVICES], packed_linears)}
## On a CPU

On a CPU alone, a model needs host memory for the column "4-bit experts" and the cache, or [leaves its experts in their
files](small_gpus.md#larger-than-the-memory). Several GPUs share a model by `device_map`, tensor or expert parallelism.

The sizes are computed by the library from each model's configuration, by the rule of `cpu_experts="auto"`. For any
other model, `moe-nvfp4 info MODEL` computes the bytes from its configuration and headers, without its weights.
"""


# ---- proven.md -------------------------------------------------------------------------------------


def proven() -> str:
    """What self-tests have shown, from their reports in docs/proven."""
    from moe_nvfp4.selftest.cases import EXPERTS, FIRST_TOKENS, SECONDS

    rows = []
    for path in sorted((DOCS / "proven").glob("*.json")):
        report = json.loads(path.read_text("utf-8"))
        counts: dict[tuple[str, str], list[int]] = {}
        for group in report["groups"]:
            cases = counts.setdefault((group["device"], group["backend"]), [0, 0])
            cases[0] += group["right"]
            cases[1] += len(group["wrong"])
        packages = report["packages"]
        for (device, backend), (right, wrong) in counts.items():
            versions = [f"torch {packages['torch']}"]
            if device != "cpu":
                versions += [f"driver {packages['NVIDIA driver']}"]
                versions += [f"{p} {packages[p]}" for p in ("triton", "nvidia-cutlass-dsl")]
            rows.append(
                [report["names"][device], f"`{backend}`", str(right), str(wrong), ", ".join(versions), report["date"]]
            )
    return f"""# Proven on

{MADE}
Where `moe-nvfp4 selftest` has run, and what it found: cases that gave what the reference gives, and cases that did not.

{table(["device", "backend", "right", "wrong", "with", "date"], rows)}
Is yours missing? Run `moe-nvfp4 selftest --report mine.json`, and attach `mine.md` to an issue ("Hardware report"). It
has no paths and no names.

## On a device that is not in the table

Where the table lacks a GPU, a path of the CPU kernels, or the version of the compiler (Triton, CuTe DSL), the first
layer that would run there is checked: a process of its own compares the backend with the reference, on layers with
{EXPERTS} experts of this layer's sizes, for {", ".join(map(str, FIRST_TOKENS))} tokens. It may take {SECONDS:.0f} s
besides the time to compile kernels.

* Right results are noted in the cache folder, for this device, driver, compiler and version of the library. Neither
  the next process nor another rank checks again. One linear stands for all linears of a model.
* After wrong results, a hang or a crash, the next backend runs (`sm90`, `sm100` or `sm80`, then `portable`, then plain
  torch). A warning names the case and asks for a report.
* Where no check is possible (too little free memory, say), a warning gives the reason, and the backend runs.

`moe-nvfp4 env` shows what is proven and what was checked. [`MOE_NVFP4_CHECK`](environment.md) leaves the check out or
repeats it.
"""


# ---- conformance.md --------------------------------------------------------------------------------


def conformance() -> str:
    """What implementations gave for the cases of moe_nvfp4.conformance, from the reports in docs/conformance."""
    from moe_nvfp4.conformance.vectors import RECIPES

    rows, not_right = [], []
    for path in sorted((DOCS / "conformance").glob("*.json")):
        report = json.loads(path.read_text("utf-8"))
        for result in report["results"]:
            if result["unavailable"]:
                continue
            by = {right: [c for c in result["cases"] if c["right"] is right] for right in (True, False, None)}
            versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
            counts = [str(len(cases)) for cases in by.values()]
            rows.append([result["name"], *counts, result["device"], versions, report["date"]])
            not_right += [[result["name"], c["case"], f"**wrong**: {c['why']}"] for c in by[False]]
            for why in dict.fromkeys(c["why"] for c in by[None]):
                cases = ", ".join(c["case"] for c in by[None] if c["why"] == why)
                not_right.append([result["name"], cases, why])
    head = ["implementation", "right", "wrong", "not run", "device", "with", "date"]
    return f"""# Conformance

{MADE}
`moe_nvfp4.conformance` tests anybody's NVFP4 experts on {len(RECIPES)} small layers, each made for something that goes
wrong elsewhere. The layers are integers from a counter, the same bits on every machine (checksums are compared), and
the expected results come from a loop in float64 that shares nothing with this library's kernels. A result is right if
the relative error of its norm is at most 2^-7, or that of all roundings to bf16 that an implementation may make if it
is more, and each element within 8 standard deviations of these roundings (`moe_nvfp4/conformance/expected.py`). W4A4
may be 6 % off, since a value between two codes may get either.

```
python -m moe_nvfp4.conformance mine:experts --device cuda     # your function, in mine.py
python -m moe_nvfp4.conformance --device cuda --json NAME.json # all below that run there
python -m moe_nvfp4.conformance --write DIR                    # as safetensors, 40 MB
```

The function gets a named tuple of tensors (`Given` of `moe_nvfp4/conformance/vectors.py`) and returns y. What it does
not compute, it raises as NotImplementedError; that is "not run". NAME.json, put into docs/conformance, becomes a part
of the tables by `python docs/generated.py`.

{table(head, rows)}
Not right, or not run:

{table(["implementation", "case", ""], not_right)}
"Dense weights" are the exact values, rounded once to bf16: what is tested is transformers' arithmetic.
"Dequantization" is the library's own, and what follows it a loop in torch; vLLM's is followed by its own experts for
bf16 weights. vLLM's loader uses gate's global scale for up, too, which is what its wrong case is about.

Not connected: triton_kernels, whose published version has blocks of 32 (MXFP4) and whose name on PyPI is another
project's; finegrained-kernels, which transformers 5.24 does not have yet. Not run here: this library's GPU backends
and vLLM's `fused_experts`, which need a GPU.

## Cases

{table(["case", "what it is for"], [[name, recipe.about] for name, recipe in RECIPES.items()])}"""


# ---- results.json ----------------------------------------------------------------------------------

RESULTS: dict[str, Any] = json.loads((DOCS / "results.json").read_text("utf-8"))
FIGURES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])
MARKED = re.compile(r"(<!-- results: (\w+)(?: rows=([\d,]+))? -->\n).*?(<!-- end -->)", re.S)


def with_results(text: str) -> str:
    """A page with its tables of measured figures."""

    def one(found: re.Match[str]) -> str:
        record = RESULTS[found[2]]
        chosen = [int(i) for i in found[3].split(",")] if found[3] else range(len(record["rows"]))
        source = f"`{record['command']}`; {record['where']}; {record['date']}."
        return f"{found[1]}{table(record['head'], [record['rows'][i] for i in chosen])}\n{source}\n{found[4]}"

    return MARKED.sub(one, text)


def speed_plot() -> str:
    """An SVG of bars: how many times as fast as bf16 experts a layer of Qwen3-30B-A3B is, here and elsewhere."""
    layers, peers = RESULTS["layers"], RESULTS["peers"]
    tokens = peers["head"][2:]
    ours = dict(zip(layers["head"][2:], map(float, layers["rows"][2][2:]), strict=True)) | {
        "T = 1": float(layers["rows"][2][2])
    }
    series = [("moe_nvfp4, NVFP4", [ours[T] for T in tokens], "#00897b")]
    for row, color in zip(peers["rows"][:2], ("#8e99a4", "#b9c2ca"), strict=True):
        series.append((row[1], [ours[T] / float(r) for T, r in zip(tokens, row[2:], strict=True)], color))
    width, height, left, bottom = 760, 322, 40, 250
    top = ceil(max(max(values) for _, values, _ in series))
    unit = 224 // top  # pixels for "as fast as bf16"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
        '<text x="14" y="22" font-size="14">One layer of Qwen3-30B-A3B on an H200, T tokens: speed relative to '
        "transformers' bf16 experts</text>",
    ]
    for i in range(top):
        y = bottom - unit * i
        parts.append(
            f'<line x1="{left}" x2="{width - 14}" y1="{y}" y2="{y}" stroke="{"#444" if i == 1 else "#e3e6e8"}"/>'
        )
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{i}</text>')
    for i, T in enumerate(tokens):
        x = left + 14 + i * 100
        parts.append(
            f'<text x="{x + 40}" y="{bottom + 17}" text-anchor="middle">{T if "T" in T else "T = " + T}</text>'
        )
        for j, (_, values, color) in enumerate(series):
            tall = values[i] * unit
            parts.append(
                f'<rect x="{x + 27 * j}" y="{bottom - tall:.0f}" width="24" height="{tall:.0f}" fill="{color}"/>'
            )
            parts.append(
                f'<text x="{x + 27 * j + 12}" y="{bottom - tall - 4:.0f}" text-anchor="middle" font-size="10">'
                f"{values[i]:.1f}</text>"
            )
    for j, (name, _, color) in enumerate(series):
        parts.append(f'<rect x="{left + 14 + 210 * j}" y="280" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{left + 32 + 210 * j}" y="290">{name}</text>')
    caption = (
        f"Two runs: ours of {layers['date']}, and for the other libraries that bar divided by their time relative to "
        f"ours of {peers['date']}"
    )
    parts.append(f'<text x="{left + 14}" y="311" font-size="11" fill="#555">{caption}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def stray_numbers(text: str) -> list[str]:
    """Numbers of paragraphs after a `quotes` mark that are in none of the records that it names."""
    stray = []
    for names, paragraph in re.findall(r"<!-- quotes: ([\w ]+) -->\n(.*?)(?:\n\n|\Z)", text, re.S):
        known = set(re.findall(r"\d[\d.]*\d|\d", " ".join(json.dumps(RESULTS[name]) for name in names.split())))
        stray += [n for n in re.findall(r"(?<![\w.-])(?:\d[\d.]*\d|\d)(?![\w-])", paragraph) if n not in known]
    return stray


PAGES = {
    "cli.md": command_line, "families.md": families, "fits.md": fits, "proven.md": proven,
    "conformance.md": conformance, "speed.svg": speed_plot,
}  # fmt: skip

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for page, make in PAGES.items():
        (DOCS / page).write_text(make(), "utf-8")
        print(f"docs/{page}")
    for path in FIGURES:
        path.write_text(with_results(path.read_text("utf-8")), "utf-8")
