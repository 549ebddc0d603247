"""The model card of a quantized folder: README.md, as the Hugging Face Hub reads it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_nvfp4._version import __version__
from moe_nvfp4.quantize.dialects import read_config
from moe_nvfp4.quantize.files import Checkpoint, open_checkpoint, read_json, write_text
from moe_nvfp4.quantize.layouts.stacked import STACKS
from moe_nvfp4.quantize.model import UnknownModel, class_of, model_config
from moe_nvfp4.quantize.report import ConversionReport, readable_size, readable_snr
from moe_nvfp4.quantize.verify import VerificationReport

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

ACTIVATIONS = {
    "bf16": "bf16 (W4A16)", "nvfp4": "NVFP4 (W4A4)", "nvfp4_four_over_six": "NVFP4 (W4A4), blocks by four-over-six",
}  # fmt: skip
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")

CARD = """
# {name}

{source} with NVFP4 {what}, made by moe-nvfp4 {version}.

| | |
|---|---|
{rows}

## Use

{use}
{cautions}
## Error of the weights

{errors}
"""
USE = """Where moe-nvfp4 is installed:

```
{answer}moe-nvfp4 serve {name}      # an OpenAI endpoint
```

```python
import moe_nvfp4.integrations.huggingface
from transformers import {loader}

model = {loader}.from_pretrained("{name}", dtype="auto")
```"""
OWN_CODE = """transformers has no class of its own for this model. Where moe-nvfp4 and a vLLM that has it are installed:

```
moe-nvfp4 serve {name}      # an OpenAI endpoint; vLLM's --trust-remote-code runs the repository's code
```"""


def write_card(report: ConversionReport, source: str, folder: Path, verified: VerificationReport | None = None) -> Path:
    """Write README.md of a conversion and return its path.

    source    the source of the conversion, as the user named it
    folder    the new files: `report.destination`, or the place where they are made
    verified  what `verify_checkpoint(destination, source)` found, if it ran
    """
    carried = "{} NVFP4 matrices of the original, the same codes and block scales"
    rows = {
        "experts": f"{report.quantized} matrices in NVFP4, recipe `{report.recipe}`" if report.quantized else
                   carried.format(report.carried - report.carried_linears),
    }  # fmt: skip
    if report.linears:
        rows["linears"] = f"{report.linears} in NVFP4, recipe `{report.recipe}`"
    elif report.carried_linears:
        rows["linears"] = carried.format(report.carried_linears)
    if report.rescaled:
        rows["shared scales"] = f"{report.rescaled} of these (gate or up) quantized again, to share a global scale"
    rows |= {
        "activations": ACTIVATIONS.get(report.activations, report.activations),
        "size": f"{readable_size(report.bytes_after)}, of {readable_size(report.bytes_before)}",
    } | {f"left alone: `{name}`": why for name, why in report.skipped.items()}
    what = "experts and linears" if "linears" in rows else "experts"
    return write_rows(folder, report.destination.name, report.source, source, what, rows, _errors(verified))


def write_rows(
    folder: Path, name: str, files: Path, source: str, what: str, rows: dict[str, str], errors: str = ""
) -> Path:
    """Write README.md and return its path. It keeps the metadata of the source's card, and ends with that one's text.

    folder  the new files; `name` is what their folder is called when they are done
    files   the source's; `source` is what the user named them
    what    what is 4-bit: "experts", or "experts and linears"
    rows    the card's table
    errors  what is known of the error of the weights (default: how to measure it)
    """
    import yaml

    card = folder / "README.md"
    original = _original(text_of_card(files / "README.md") or "")
    data = original.data.to_dict()
    data.pop("model-index", None)  # results of the original, which the Hub would show as this model's
    if data.get("base_model_relation") != "quantized":
        data.pop("base_model", None)  # of which the original was trained, not what this was made from
    data["base_model_relation"] = "quantized"
    if "language" in data:
        data["language"] = _languages(data["language"])
    tags = data.get("tags") or []
    tags = [tag for tag in (tags if isinstance(tags, list) else [tags]) if isinstance(tag, str)]
    data["tags"] = [*dict.fromkeys([*tags, "nvfp4", "moe"])]
    if HUB_NAME.fullmatch(source) and not Path(source).exists():
        data["base_model"] = source
    text = CARD.format(
        use=_use(folder, name), name=name, what=what, version=__version__,
        errors=errors or f"`moe-nvfp4 verify {name} --against ORIGINAL` measures it, layer by layer.",
        source=Path(os.path.abspath(source)).name if Path(source).exists() else source,
        rows="\n".join(f"| {what} | {value} |" for what, value in rows.items()),
        cautions="".join(f"\n{line}.\n" for line in misread_by(folder)),
    )  # fmt: skip
    if original.text.strip():
        text += f"\n---\n\nThe card of the original model:\n\n{original.text.strip()}\n"
    text = f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---\n{text}"
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # names of files, under LC_ALL=C
    part = card.with_name(f".{card.name}.partial")
    write_text(part, text)
    os.replace(part, card)  # whoever stops in between leaves a whole card
    return card


def _use(folder: Path, name: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    kind, loader = None, "AutoModelForCausalLM"
    try:
        kind = class_of(model_config(folder))
    except UnknownModel:  # or it is newer than this transformers
        if "auto_map" in json.loads((folder / "config.json").read_text("utf-8")):
            return OWN_CODE.format(name=name)
    if kind is not None and not (kind.__name__.endswith("ForCausalLM") and kind.__name__ in KNOWN.values()):
        loader = kind.__name__  # Mistral4ForCausalLM is not known to it
    speaks = kind is None or kind.can_generate()
    return USE.format(name=name, loader=loader, answer=_answer(folder, name) if speaks else "")


def _answer(folder: Path, name: str) -> str:
    """The line of a command that lets a model that predicts tokens say something."""
    config = _tokenizer_config(folder)
    if "AutoTokenizer" in (config.get("auto_map") or {}) and not (folder / "tokenizer.json").is_file():
        return ""  # the tokenizer is code, which no command runs
    # a template in the files, or messages as mistral-common writes them
    templates = "chat_template.jinja", "chat_template.json", "tekken.json"
    if config.get("chat_template") or any((folder / file).is_file() for file in templates):
        return f"moe-nvfp4 chat {name}\n"
    return f'moe-nvfp4 generate {name} --raw --prompt "Once upon a time"\n'


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError):  # there is none, or nobody can read it
        return {}


def misread_by(folder: Path) -> list[str]:
    """A line for each program that silently misreads the new files in `folder`, with a remedy (docs/checkpoints.md)."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    q, types = config["quantization_config"], Checkpoint(folder, config, {}).types
    info = read_config(q)
    if info is None:
        return []
    names, packed = open_checkpoint(folder).tensors, f"q_proj.{info.dialect.global_scale}"
    indexed = any(name.replace("index_q_proj.weight", packed) in names for name in names if "index_q_proj" in name)
    return info.dialect.misread_by(q, any(t in STACKS or t == "dbrx" for t in types), indexed)


def _languages(found: Any) -> Any:
    """Language codes, one or a list, with `no` for Norwegian restored: YAML 1.1 reads it as false."""
    return [_languages(code) for code in found] if isinstance(found, list) else "no" if found is False else found


def text_of_card(path: Path) -> str | None:
    """The text of README.md, "" if there is none; None if it is not UTF-8."""
    try:
        return path.read_text("utf-8-sig") if path.is_file() else ""
    except UnicodeDecodeError:
        return None


def _original(text: str) -> ModelCard:
    """Parse a card. Metadata that cannot be read is kept as part of its text."""
    import yaml
    from huggingface_hub import ModelCard

    if not text.lstrip().startswith("---"):
        text = f"---\n{{}}\n---\n{text}"  # without it, ModelCard warns that there is no metadata
    try:
        return ModelCard(text, ignore_metadata_errors=True)
    except (TypeError, ValueError, yaml.YAMLError):
        return ModelCard(f"---\n{{}}\n---\n```\n{text}\n```\n")


def _errors(verified: VerificationReport | None) -> str:
    if verified is None or not verified.layers:
        return ""
    lines = ["| layer | relative error | SNR (dB) |", "|---|--:|--:|"]
    lines += [
        f"| `{layer}` | {sums.relative:.4f} | {readable_snr(sums, 1)} |" for layer, sums in verified.layers.items()
    ]
    return "\n".join(["All weights of a layer against the original's, by `moe-nvfp4 verify`:", "", *lines])
