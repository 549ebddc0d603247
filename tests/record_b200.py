"""Record all that a Blackwell GPU can tell about this library, in one file to send back.

    pip install -e ".[gpu,test]"
    python -m tests.record_b200 b200.zip           # on a B200 or B300; --minutes 60 for a part of it
    python -m tests.record_b200 --quick dry.zip    # on any NVIDIA GPU from compute capability 8.0: some of each part
    python -m tests.record_b200 --dry-run dry.zip  # without a GPU: only what needs none

Each part runs in its own process with a time limit, so no part can spoil another. What a part has made before it fails
is kept, and the file is written after each part. First comes what only a Blackwell can tell: the machine and its
software; the results of `blackwell_instructions` (on Hopper `hopper_instructions`), and where the emulator's differ;
layers compared with the reference; the tests of its kernels; times compared with transformers' bf16 experts and, where
it is installed, FlashInfer's. Then come all other tests that need a GPU. The file has each part's text, its arrays
(.npz) and its numbers (.json, .jsonl).
"""

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
GPU_TESTS = (
    "tests/kernels/test_sm100_gpu.py", "tests/kernels/test_sm90_gpu.py", "tests/kernels/test_portable_gpu.py",
    "tests/kernels/test_training_gpu.py", "tests/kernels/test_offload.py", "tests/kernels/test_offload_gpu.py",
    "tests/kernels/test_portable.py", "tests/kernels/test_adapters.py", "tests/kernels/test_training.py",
    "tests/kernels/test_proof_gpu.py", "tests/integrations/test_offload.py", "tests/integrations/test_gpu.py",
    "tests/integrations/test_graphs.py", "tests/integrations/test_vllm_gpu.py", "tests/integrations/test_mergeable.py",
    "tests/integrations/test_finegrained.py", "tests/core/test_layer.py", "tests/core/test_training.py",
    "tests/core/test_router.py", "tests/core/test_format.py", "tests/quantize/test_convert.py",
    "tests/quantize/test_recipes.py", "tests/kernels/test_large_gpu.py",
)  # fmt: skip
CASES = {9: "tests.kernels.hopper_instructions", 10: "tests.kernels.blackwell_instructions"}  # by compute capability
LAYERS = (1, 1024, 512, 8, 2), (40, 1024, 512, 8, 2), (700, 512, 768, 4, 2), (3, 2880, 2880, 4, 4)  # T, H, I, E, top_k
ROOF = {9: ("4.3", "790"), 10: ("7.7", "2250")}  # TB/s, bf16 TFLOP/s: measured on an H200; NVIDIA's data sheet of B200
SHAPES, TOKENS = ("qwen", "mixtral", "deepseek", "gptoss"), "1,4,16,64,256,1024,4096,16384"


def parts(folder, capability, quick):
    """(name, seconds it may take, command)"""
    python = [sys.executable]
    yield "machine", 120, [*python, "-m", "moe_nvfp4", "env"]
    if capability in CASES:
        one = ["--only", "tcgen05, bf16" if capability == 10 else "mma"] * quick
        yield "instructions", 900, [*python, "-m", "tests.record_b200", "--instructions", CASES[capability],
                                    str(folder / "instructions.npz"), *one]  # fmt: skip
    yield "layers", 600, [*python, "-m", "tests.record_b200", "--layers", "1" if quick else str(len(LAYERS)),
                           str(folder / "layers.npz")]  # fmt: skip
    if capability == 10:
        yield "model", 120, [*python, "-m", "moe_nvfp4.kernels.sm100.model"]
    files = ["tests/kernels/test_portable_gpu.py"] if quick else GPU_TESTS
    tests = [("tests_" + Path(file).stem.removeprefix("test_") + "_" + Path(file).parent.name, file) for file in files]

    def guarded(name, file):
        only = ["-k", "illegal"] if quick else ["-m", ""]
        return name, 1200, [*python, "-m", "tests.guarded", str(folder / f"{name}.jsonl"), file, *only]

    yield guarded(*tests[0])
    bandwidth, tflops = ROOF.get(capability, ROOF[9])
    peers = {"times": []}
    if importlib.util.find_spec("flashinfer"):
        peers["times_flashinfer"] = ["--peer", "tests.kernels.flashinfer_peer"]
    for name, peer in peers.items():
        for shape in SHAPES[:1] if quick else SHAPES:
            numbers = ["--tokens", "1" if quick else TOKENS, "--bandwidth", bandwidth, "--tflops", tflops]
            yield f"{name}_{shape}", 600, [*python, "examples/benchmark.py", "--shapes", shape, *numbers, *peer,
                                           "--json", str(folder / f"{name}_{shape}.json")]  # fmt: skip
    yield from (guarded(*test) for test in tests[1:])


def without_gpu(folder):
    """The parts that need no GPU."""
    python = [sys.executable]
    yield "machine", 120, [*python, "-m", "moe_nvfp4", "env"]
    yield "instructions", 900, [*python, "-m", "tests.record_b200", "--emulate", "--instructions", CASES[10],
                                str(folder / "instructions.npz"), "--only", "tcgen05, bf16"]  # fmt: skip
    yield "layers", 600, [*python, "-m", "tests.record_b200", "--device", "cpu", "--layers", "1",
                          str(folder / "layers.npz")]  # fmt: skip
    yield "model", 120, [*python, "-m", "moe_nvfp4.kernels.sm100.model"]
    for file in GPU_TESTS[:3]:
        name = Path(file).stem
        yield name, 300, [*python, "-m", "tests.guarded", str(folder / f"{name}.jsonl"), file]


# ---- two of the parts ----
def record_instructions(cases, out, only, emulate):
    """Record what the GPU, or with `emulate` the emulator, returns for these cases, and how many of them match the
    emulator bit for bit; written after each group."""
    import numpy as np

    from tests.kernels import record_h200

    groups = importlib.import_module(cases).GROUPS
    about, records, failed = [], {}, {}
    run = lambda group: record_h200.record(group, emulate, cases)
    with ThreadPoolExecutor(2 if emulate else len(groups)) as pool:
        for one, found, wrong in pool.map(run, [only] if only else groups):
            about += [one] * (one not in about)
            records.update(found)
            failed.update(wrong)
            record_h200.save(out, "; ".join(about), records)
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
    """How far floats are apart, in units in the last place of the largest; for other types, how many differ."""
    import numpy as np

    if found.dtype != np.float32:
        return f"{(found != expected).sum()} of {found.size} differ"
    unit = np.spacing(np.abs(expected[np.isfinite(expected)]).max(initial=1e-30))
    apart = np.abs(found.astype(np.float64) - expected)
    return f"{(found != expected).mean():.1%} differ, by {apart.max() / unit:.2f} units of the largest's last place"


def record_layers(out, count, device):
    """Run layers on this machine's device and on the CPU: outputs and relative errors. If one fails, that is recorded,
    and the results of the others are kept."""
    import numpy as np
    import torch

    from moe_nvfp4 import NVFP4Experts
    from tests.common import THRESHOLDS, reference_layer, relative_error

    outputs, wrong = {}, 0
    for activations, allowed in (("bf16", THRESHOLDS["half"]), ("nvfp4", THRESHOLDS["w4a4"])):
        for T, H, I, E, top_k in LAYERS[:count]:
            generator = torch.Generator().manual_seed(T)
            dense = [torch.randn(*shape, generator=generator) * 0.05 for shape in ((E, 2 * I, H), (E, H, I))]
            x = torch.randn(T, H, generator=generator).bfloat16()
            weights, ids = torch.rand(T, E, generator=generator).topk(top_k)
            layer = NVFP4Experts.from_dense(*dense, activations=activations)
            expected = reference_layer(x, ids, weights, layer.weights)
            name = f"{activations} T={T} H={H} I={I} E={E} top_k={top_k}"
            try:
                inputs = [t.to(device) for t in (x, ids, weights)]
                found, again = (layer.to(device)(*inputs).cpu() for _ in range(2))
            except Exception:
                wrong += 1
                print(f"{name}: {traceback.format_exc()}", flush=True)
                continue
            error, same = relative_error(found, expected), torch.equal(found, again)
            wrong += not (error < allowed and same)
            print(f"{name}: relative error {error:.2e}, allowed {allowed:.0e}, the same again: {same}", flush=True)
            outputs[name] = found.view(torch.int16).numpy()
            np.savez_compressed(out, **outputs)
    return wrong


# ---- all of them ----
def run(name, limit, command, folder):
    """Run a command. Returns its exit status, or why it has none. What it prints goes to the terminal and to a file.
    After `limit` seconds it is killed, with all processes that it has started."""
    start, ended = time.time(), threading.Event()
    print(f"\n=== {name}, at most {limit:.0f} s: {' '.join(command[1:])}", flush=True)
    try:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    except OSError as error:
        print(f"=== {name}: {error}", flush=True)
        return {"status": str(error), "seconds": 0.0, "command": command[1:]}

    def kill():
        ended.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, kill)
    timer.start()
    with open(folder / f"{name}.txt", "wb") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
    status = process.wait()
    timer.cancel()
    status = "no end" if ended.is_set() else status
    print(f"=== {name}: status {status}, {time.time() - start:.0f} s", flush=True)
    return {"status": status, "seconds": round(time.time() - start, 1), "command": command[1:]}


def record(out, found, folder, minutes, about):
    """Run the parts, and write the file after each. Returns whether one failed. Parts without time left are named."""
    summary, end = {**about, "parts": {}}, time.time() + 60 * minutes
    for name, limit, command in found:
        left = end - time.time()
        if left > 5:
            summary["parts"][name] = run(name, min(limit, left), command, folder)
        else:
            summary["parts"][name] = {"status": f"left out: {minutes} minutes are over"}
        (folder / "summary.json").write_text(json.dumps(summary, indent=1))
        with zipfile.ZipFile(out.with_suffix(".part"), "w", zipfile.ZIP_DEFLATED) as file:
            for path in sorted(folder.iterdir()):
                file.write(path, path.name)
        out.with_suffix(".part").replace(out)
    print(f"\n{out}: {out.stat().st_size / 1e6:.2f} MB; please send it back")
    for name, part in summary["parts"].items():
        print(f"  {name}: {part['status']}")
    return any(part["status"] for part in summary["parts"].values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--quick", action="store_true", help="a part of each, to try it")
    parser.add_argument("--dry-run", action="store_true", help="what goes without a GPU")
    parser.add_argument("--minutes", type=float, default=180, help="the parts that have not begun by then are left out")
    parser.add_argument("--instructions", metavar="MODULE", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--emulate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.instructions:
        return record_instructions(options.instructions, options.out, options.only, options.emulate)
    if options.layers:
        return record_layers(options.out, options.layers, options.device)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    about = {"commit": commit, "when": time.strftime("%Y-%m-%d %H:%M")}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if options.dry_run:
            return record(options.out, without_gpu(folder), folder, options.minutes, {"gpu": None, **about})
        gpu, capability = described()
        found = parts(folder, capability, options.quick)
        return record(options.out, found, folder, options.minutes, {"gpu": gpu, **about})


def described():
    """(name, major compute capability) of the GPU, found in another process, so that no CUDA context stays here."""
    code = "import torch; print(torch.cuda.get_device_name(), torch.cuda.get_device_capability()[0], sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            "tests.record_b200 needs an NVIDIA GPU that torch can use, or --dry-run:\n" + done.stderr[-500:]
        )
    name, capability = done.stdout.split("\n")[:2]
    return name, int(capability)


if __name__ == "__main__":
    sys.exit(main())
