"""moe-nvfp4 selftest: whether the kernels compute rightly on this machine, and how fast."""

from __future__ import annotations

import argparse
import json

from moe_nvfp4.cli.options import Commands, add_json, check_beside, check_writable, command, path
from moe_nvfp4.cli.output import note, say, show_json, table


def add(commands: Commands) -> None:
    sub = command(
        commands, "selftest", run, "check the kernels on this machine",
        "Run every backend that could run here on small layers and linears, and compare them with the reference: "
        "gates, biases, dtypes, W4A16 and W4A4, ragged groups, odd sizes, tiny and huge numbers, strides, adapters, "
        "gradients, streams, CUDA graphs. Each group of cases has a process of its own, so that a hang or a crash is a "
        "finding. Then time layers of known models.",
    )  # fmt: skip
    sub.add_argument("--device", help="cpu, cuda or cuda:1 (default: the CPU and the first GPU)")
    sub.add_argument("--quick", action="store_true", help="fewer cases, and the speed of one layer")
    sub.add_argument("--no-speed", action="store_true", help="only the comparison")
    sub.add_argument(
        "--report", type=path, metavar="FILE",
        help="write FILE (JSON) and, beside it, a page (.md) to attach to an issue; neither has paths or names",
    )  # fmt: skip
    add_json(sub)


def run(args: argparse.Namespace) -> None:
    import torch

    from moe_nvfp4.devices import usable_device
    from moe_nvfp4.selftest import report
    from moe_nvfp4.selftest.run import candidates, run, run_speed

    if args.report is not None:
        check_writable(args.report)
        if args.report.suffix.lower() == ".md":
            raise ValueError(f"--report {args.report}: the page beside FILE is called so: name a .json file")
        if not args.report.parent.is_dir():
            raise ValueError(f"--report {args.report}: the folder {args.report.parent} does not exist: create it")
        check_beside(args.report.with_suffix(".md"), report.HEADING)
    if args.device is not None:
        devices = [usable_device(args.device)]
    else:
        devices = [torch.device("cpu"), *[torch.device("cuda", 0)] * torch.cuda.is_available()]
    if not any(map(candidates, devices)):
        raise ValueError(f"no backend runs on {' and '.join(map(str, devices))}: `moe-nvfp4 env` says why")
    groups, speeds = [], {}
    for group in run(devices, args.quick):
        groups.append(group)
        if not args.json:
            counts = f"{len(group.findings)} cases, {len(group.wrong)} wrong"
            note(f"{group.backend} on {group.device}, {group.name}: {counts}, {group.seconds:.1f} s")
        for finding in group.wrong if not args.json else ():
            say(f"  WRONG: {finding.case}: {finding.why}")
    for device in devices if not args.no_speed else ():
        for backend in candidates(device)[:1]:
            rows, crash = run_speed(backend.name, str(device), args.quick)
            speeds[f"{backend.name} on {device}"] = rows
            if crash and not args.json:
                say(f"{backend.name} on {device}, speed: {crash}")
    found = report.make(groups, speeds, args.quick)
    if args.report is not None:
        args.report.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        args.report.with_suffix(".md").write_text("\n".join(report.page(found)) + "\n", "utf-8")
    if args.json:
        show_json(found)
    else:
        _show(found)
    if wrong := found["summary"]["wrong"]:
        raise ValueError(
            f"{wrong} cases are wrong: do not use these kernels on this machine (MOE_NVFP4_BACKEND names others), and "
            "please open an issue with the page that --report writes"
        )


def _show(found: dict) -> None:
    for where, rows in found["speeds"].items():
        say()
        if rows:
            roof = rows[0]
            say(f"{where}: reads {roof['bandwidth'] / 1e9:.0f} GB/s, products {roof['flops'] / 1e12:.2f} TFLOP/s")
        table(
            ["layer", "T", "us", "GB/s", "TFLOP/s", "of roof"],
            [[row["layer"], str(row["tokens"]), f"{row['us']:.1f}", f"{row['GB/s']:.1f}", f"{row['TFLOP/s']:.2f}",
              f"{row['of_roof']:.0%}"] for row in rows[1:]],
        )  # fmt: skip
    counts = found["summary"]
    say()
    line = f"{counts['right']} cases right, {counts['wrong']} wrong, {counts['not run']} not run"
    say(line + (" (a backend does not take them)" if counts["not run"] else ""))
