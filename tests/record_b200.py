"""All that a Blackwell can tell about this library, in one file to send back.

    pip install -e ".[gpu,test]"
    python -m tests.record_b200 b200.zip           # on a B200 or B300
    python -m tests.record_b200 --quick dry.zip    # on any NVIDIA GPU from compute capability 8.0: some of each part

Each part is a process of its own with a limit, and spoils no other: the machine and its software; what the GPU returns
for `blackwell_instructions` (a Hopper for `hopper_instructions`), and where that is not what the emulator returns;
layers beside the reference; every test that needs a GPU; times beside transformers' bf16 experts, and FlashInfer's
where that is installed. The file has each part's text, its arrays (.npz) and its numbers (.json, .xml).
"""

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GPU_TESTS = (
    "tests/kernels/test_sm100_gpu.py", "tests/kernels/test_sm90_gpu.py", "tests/kernels/test_portable_gpu.py",
    "tests/kernels/test_training_gpu.py", "tests/kernels/test_offload.py", "tests/kernels/test_portable.py",
    "tests/kernels/test_training.py", "tests/integrations/test_offload.py", "tests/integrations/test_gpu.py",
    "tests/core/test_layer.py", "tests/core/test_training.py",
    "tests/core/test_format.py", "tests/quantize/test_convert.py", "tests/quantize/test_recipes.py",
)  # fmt: skip
CASES = {9: "tests.kernels.hopper_instructions", 10: "tests.kernels.blackwell_instructions"}  # by compute capability
LAYERS = (1, 1024, 512, 8, 2), (40, 1024, 512, 8, 2), (700, 512, 768, 4, 2), (3, 2880, 2880, 4, 4)  # T, H, I, E, top_k
ROOF = {9: ("4.3", "790"), 10: ("7.7", "2250")}  # TB/s, bf16 TFLOP/s: measured on an H200; NVIDIA's data sheet of B200


def parts(folder, capability, quick):
    """(name, seconds it may take, command)"""
    python = [sys.executable]
    yield "machine", 120, [*python, "-m", "moe_nvfp4", "env"]
    if capability in CASES:
        one = ["--only", "tcgen05, bf16" if capability == 10 else "mma"] * quick
        yield "instructions", 900, [*python, "-m", "tests.record_b200", "--instructions", CASES[capability],
                                    str(folder / "instructions.npz"), *one]  # fmt: skip
    yield "layers", 900, [*python, "-m", "tests.record_b200", "--layers", "1" if quick else str(len(LAYERS)),
                           str(folder / "layers.npz")]  # fmt: skip
    chosen = ["tests/kernels/test_portable_gpu.py", "-k", "illegal"] if quick else [*GPU_TESTS, "-m", ""]
    yield "tests", 3600, [*python, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider",
                          f"--junitxml={folder / 'tests.xml'}", *chosen]  # fmt: skip
    shapes, tokens = ("qwen", "1") if quick else ("qwen,mixtral,deepseek,gptoss", "1,4,16,64,256,1024,4096,16384")
    bandwidth, tflops = ROOF.get(capability, ROOF[9])
    times = [*python, "examples/benchmark.py", "--shapes", shapes, "--tokens", tokens,
             "--bandwidth", bandwidth, "--tflops", tflops]  # fmt: skip
    yield "times", 1800, [*times, "--json", str(folder / "times.json")]
    if importlib.util.find_spec("flashinfer"):
        peer = ["--peer", "tests.kernels.flashinfer_peer", "--json", str(folder / "times_flashinfer.json")]
        yield "times_flashinfer", 1800, [*times, *peer]
    if capability == 10:
        yield "model", 120, [*python, "-m", "moe_nvfp4.kernels.sm100.model"]


# ---- two of the parts ----
def record_instructions(cases, out, only):
    """What the GPU returns for these cases, and how many of them the emulator has the same bits for."""
    import numpy as np

    from tests.kernels.record_h200 import record_all, save

    groups = importlib.import_module(cases).GROUPS
    about, records, failed = record_all([only] if only else list(groups), False, cases)
    save(out, "; ".join(about), records)
    named = {name: case for group in groups.values() for name, case in group.items()}
    equal, lines = 0, [f"failed, {name}: {why[-1500:]}" for name, why in failed.items()]
    for name, (_, found) in records.items():
        try:
            expected = named[name].emulated() if found else []
        except Exception as error:
            lines.append(f"{name}: the emulator stops: {error}")
            continue
        if all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)):
            equal += 1
        else:
            lines.append(f"{name}: {difference(found[0], expected[0])}")
    print(f"{equal} of {len(records)} cases have the emulator's bits, {len(failed)} failed", *lines, sep="\n")
    return bool(failed)


def difference(found, expected):
    """How far floats are apart, in units of the last place of the largest; of other types, how many differ."""
    import numpy as np

    if found.dtype != np.float32:
        return f"{(found != expected).sum()} of {found.size} differ"
    unit = np.spacing(np.abs(expected[np.isfinite(expected)]).max(initial=1e-30))
    apart = np.abs(found.astype(np.float64) - expected)
    return f"{(found != expected).mean():.1%} differ, by {apart.max() / unit:.2f} units of the largest's last place"


def record_layers(out, count):
    """Layers as this machine runs them beside the same on the CPU: their outputs, and their relative errors."""
    import numpy as np
    import torch

    from moe_nvfp4 import NVFP4Experts
    from tests.common import THRESHOLDS, reference_layer, relative_error

    outputs, wrong = {}, 0
    for activations, allowed in (("nvfp4", THRESHOLDS["w4a4"]), ("bf16", THRESHOLDS["half"])):
        for T, H, I, E, top_k in LAYERS[:count]:
            generator = torch.Generator().manual_seed(T)
            dense = [torch.randn(*shape, generator=generator) * 0.05 for shape in ((E, 2 * I, H), (E, H, I))]
            x = torch.randn(T, H, generator=generator).bfloat16()
            weights, ids = torch.rand(T, E, generator=generator).topk(top_k)
            layer = NVFP4Experts.from_dense(*dense, activations=activations)
            expected = reference_layer(x, ids, weights, layer.weights)
            found = layer.cuda()(x.cuda(), ids.cuda(), weights.cuda())
            again = layer(x.cuda(), ids.cuda(), weights.cuda())
            error, same = relative_error(found, expected), torch.equal(found, again)
            name = f"{activations} T={T} H={H} I={I} E={E} top_k={top_k}"
            wrong += not (error < allowed and same)
            print(f"{name}: relative error {error:.2e}, allowed {allowed:.0e}, the same again: {same}", flush=True)
            outputs[name] = found.view(torch.int16).cpu().numpy()
    np.savez_compressed(out, **outputs)
    return wrong


# ---- all of them ----
def run(name, limit, command, folder):
    """Its exit status, or why it has none; what it prints goes to the terminal and to a file."""
    start = time.time()
    print(f"\n=== {name}: {' '.join(command[1:])}", flush=True)
    with open(folder / f"{name}.txt", "wb") as file:
        limited, pipe = ["timeout", str(limit), *command], subprocess.PIPE
        process = subprocess.Popen(limited, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT)
        for line in process.stdout:
            file.write(line)
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
        status = process.wait()
    print(f"=== {name}: status {status}{' (no end)' * (status == 124)}, {time.time() - start:.0f} s", flush=True)
    return {"status": status, "seconds": round(time.time() - start, 1), "command": command[1:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--quick", action="store_true", help="a part of each, to try it")
    parser.add_argument("--instructions", metavar="MODULE", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.instructions:
        return record_instructions(options.instructions, options.out, options.only)
    if options.layers:
        return record_layers(options.out, options.layers)
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("tests.record_b200 needs an NVIDIA GPU that torch can use")
    capability, _ = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        summary = {"gpu": torch.cuda.get_device_name(), "commit": commit, "when": time.strftime("%Y-%m-%d %H:%M")}
        summary["parts"] = {}
        for name, limit, command in parts(folder, capability, options.quick):
            summary["parts"][name] = run(name, limit, command, folder)
            (folder / "summary.json").write_text(json.dumps(summary, indent=1))
            with zipfile.ZipFile(
                options.out, "w", zipfile.ZIP_DEFLATED
            ) as file:  # after each part: one may be the last
                for path in sorted(folder.iterdir()):
                    file.write(path, path.name)
    print(f"\n{options.out}: {options.out.stat().st_size / 1e6:.2f} MB; please send it back")
    return any(part["status"] for part in summary["parts"].values())


if __name__ == "__main__":
    sys.exit(main())
