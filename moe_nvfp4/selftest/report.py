"""What a self-test showed, as one object for a file, and as a page for an issue. Neither has paths or names of the
user."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from datetime import date
from typing import Any

import torch

from moe_nvfp4.environment import Environment, cpu_name
from moe_nvfp4.kernels.backend import Device
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.selftest.run import Group, summary

VERSION = 1
HEADING = "# Self-test"  # how a page begins
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "CUDA of torch", "NVIDIA driver", "C compiler")
VARIABLES = ("MOE_NVFP4_BACKEND", "MOE_NVFP4_CPU", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
SHARED = 2000  # characters of a reason, at most


def make(groups: list[Group], speeds: dict[str, list[dict[str, Any]]], quick: bool) -> dict[str, Any]:
    """speeds: backend and device -> rows of `speed.measure`."""
    here = Environment.here()
    return {
        "version": VERSION,
        "date": str(date.today()),
        "library": here.version,
        "python": here.python,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": here.cpu,
        "threads": here.threads,
        "packages": {name: here.packages[name] for name in PACKAGES if name in here.packages},
        "variables": {name: value for name, value in here.variables.items() if name in VARIABLES},
        "names": {group.device: _named(torch.device(group.device)) for group in groups},
        "backends": {device: sorted(name for name, row in rows.items() if row["runs"])
                     for device, rows in here.backends.items()},
        "quick": quick,
        "summary": summary(groups),
        "groups": [
            {"backend": group.backend, "device": group.device, "name": group.name,
             "seconds": round(group.seconds, 1), "cases": len(group.findings),
             "right": sum(f.right is True for f in group.findings),
             "largest_error": max((f.error for f in group.findings), default=0.0),
             "wrong": [f._asdict() | {"why": scrubbed(f.why)} for f in group.wrong],
             "not_run": sorted({scrubbed(f.why) for f in group.findings if f.right is None})}
            for group in groups
        ],
        "speeds": speeds,
    }  # fmt: skip


def _named(device: torch.device) -> str:
    """A device, and for a CPU the path of the kernels."""
    return f"{cpu_name()} ({cpu.path()})" if device.type == "cpu" else str(Device.of(device))


def scrubbed(text: str) -> str:
    """Without folders, which may have the names of users, and bounded."""
    return re.sub(r"(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\"]+)+[/\\]", "", text)[:SHARED]


def page(report: dict[str, Any]) -> Iterator[str]:
    """The report as Markdown."""
    counts = report["summary"]
    yield f"{HEADING}: {counts['right']} right, {counts['wrong']} wrong, {counts['not run']} not run"
    yield ""
    yield f"moe-nvfp4 {report['library']}, Python {report['python']}, {report['platform']}, {report['date']}"
    yield f"{report['cpu']}, {report['threads']} threads"
    for name, version in report["packages"].items():
        yield f"* {name}: {version}"
    yield ""
    yield "| device | backend | group | cases | wrong | largest error | s |"
    yield "|---|---|---|--:|--:|--:|--:|"
    for g in report["groups"]:
        cells = (g["device"], g["backend"], g["name"], g["cases"], len(g["wrong"]), f"{g['largest_error']:.1e}",
                 g["seconds"])  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"
    for g in report["groups"]:
        for finding in g["wrong"]:
            yield f"\n**wrong**, {g['backend']} on {g['device']}, {finding['case']}: {finding['why']}"
    for where, rows in report["speeds"].items():
        yield ""
        yield f"{where}: {_roof(rows[0])}" if rows else f"{where}: no speeds"
        if len(rows) > 1:
            yield ""
            yield "| layer | T | us | GB/s | TFLOP/s | of the roof |"
            yield "|---|--:|--:|--:|--:|--:|"
        for row in rows[1:]:
            yield (f"| {row['layer']} | {row['tokens']} | {row['us']:.1f} | {row['GB/s']:.1f} | {row['TFLOP/s']:.2f} "
                   f"| {row['of_roof']:.0%} |")  # fmt: skip


def _roof(roof: dict[str, Any]) -> str:
    return f"reads {roof['bandwidth'] / 1e9:.0f} GB/s, matrix products {roof['flops'] / 1e12:.2f} TFLOP/s"
