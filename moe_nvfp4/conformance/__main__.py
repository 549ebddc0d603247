"""Run the cases: see the package's docstring.

python -m moe_nvfp4.conformance                       every adapter that runs here
python -m moe_nvfp4.conformance MODULE:FUNCTION ...   your functions, or adapters by name
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_nvfp4 import __version__
from moe_nvfp4.conformance.adapters import ADAPTERS, Adapter
from moe_nvfp4.conformance.expected import Expected, expected
from moe_nvfp4.conformance.vectors import RECIPES, Case, Given, make
from moe_nvfp4.devices import usable_device
from moe_nvfp4.environment import cpu_name
from moe_nvfp4.selftest.compare import Finding, Limit, compare
from moe_nvfp4.selftest.report import scrubbed


def judge(case: Case, want: Expected, function: Callable[[Given], Any], device: torch.device) -> Finding:
    """Whether function(given) is within the bounds. Its NotImplementedError is "not run", any other error is wrong."""
    try:
        with torch.no_grad():
            y = function(case.on(device))
    except NotImplementedError as refusal:
        return Finding(case.name, None, scrubbed(str(refusal)))
    except (Exception, SystemExit) as error:
        return Finding(case.name, False, scrubbed(f"{type(error).__name__}: {error}")[:300])
    if not isinstance(y, torch.Tensor) or not y.is_floating_point() or y.layout != torch.strided or y.is_meta:
        got = f"{y.dtype}, {y.layout}, on {y.device}" if isinstance(y, torch.Tensor) else type(y).__name__
        return Finding(case.name, False, f"the result is no dense tensor of floating-point numbers: {got}")
    found = compare(case.name, y, torch.from_numpy(want.y), Limit(want.of_all, np.inf))
    if not found.right:
        return found
    beyond = np.abs(y.detach().double().cpu().numpy() - want.y) - want.bound
    if beyond.size and beyond.max() > 0:
        at = [int(i) for i in np.unravel_index(beyond.argmax(), beyond.shape)]
        why = f"element {at} is {y[tuple(at)].item():.4g}, not {want.y[tuple(at)]:.4g} ± {want.bound[tuple(at)]:.1g}"
        return found._replace(right=False, why=why)
    return found


def named(name: str) -> Adapter:
    """An adapter by its name, or a function by MODULE:FUNCTION. ValueError if there is neither."""
    if name in ADAPTERS:
        return ADAPTERS[name]
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"{name!r} is neither MODULE:FUNCTION nor an adapter: {', '.join(map(repr, ADAPTERS))}")
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), function)
    if not callable(found) or isinstance(found, type):
        raise ValueError(f"{name!r} is {found!r:.100}, no function: name one that takes a Given and returns y")
    return Adapter(found)


def run(names: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """What each implementation gave: {"name", "device", "versions", "unavailable", "cases"}."""
    chosen = {name: named(name) for name in names or ADAPTERS}
    refused = {name: adapter.unavailable(device) for name, adapter in chosen.items()}
    findings: dict[str, list[Finding]] = {name: [] for name, why in refused.items() if why is None}
    for name in RECIPES if findings else ():
        case = make(name)
        want = expected(case)
        for implementation, found in findings.items():
            found.append(judge(case, want, chosen[implementation].function, device))
    where = cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    for name, adapter in chosen.items():
        yield {
            "name": name, "device": where, "unavailable": refused[name],
            "versions": {"torch": torch.__version__, **{k: v for k, v in adapter.versions().items() if v}},
            "cases": [finding._asdict() for finding in findings.get(name, ())],
        }  # fmt: skip


def write(folder: Path) -> None:
    """Each case with its expected result as a safetensors file."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name in RECIPES:
        case = make(name)
        want = expected(case)
        about = {"about": case.about, "gate": json.dumps(case.gate), "of_all": str(want.of_all)}
        file = folder / f"{name.replace(' ', '_')}.safetensors"
        save_file({**case.arrays(), "y": want.y, "bound": want.bound}, file, metadata=about)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_nvfp4.conformance", description=__doc__.splitlines()[0])
    parser.add_argument("implementation", nargs="*", metavar="MODULE:FUNCTION", help="default: all adapters")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the cases as safetensors, and run nothing")
    args = parser.parse_args(argv)
    try:
        if args.write is not None:
            write(args.write)
            return 0
        if args.json is not None and (args.json.is_dir() or not os.access(args.json.parent, os.W_OK)):
            raise ValueError(f"{args.json} cannot be written: name a file in a folder that can")
        results = list(run(args.implementation, usable_device(args.device)))
    except (ValueError, ImportError, AttributeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    wrong = ran = 0
    for result in results:
        counts = {right: sum(case["right"] is right for case in result["cases"]) for right in (True, False, None)}
        wrong, ran = wrong + counts[False], ran + counts[True] + counts[False]
        if result["unavailable"]:
            print(f"{result['name']}: {result['unavailable']}")
            continue
        print(f"{result['name']}: {counts[True]} right, {counts[False]} wrong, {counts[None]} not run")
        for case in result["cases"]:
            if case["right"] is not True:
                print(f"  {'not run' if case['right'] is None else 'WRONG'}: {case['case']}: {case['why']}")
    if args.json is not None:
        found = {"library": __version__, "date": str(date.today()), "results": results}
        args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if not ran:
        print("error: no case was run, so nothing is known", file=sys.stderr)
        return 2
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
