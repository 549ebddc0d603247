"""The two commands of the README, on a machine that has only Python and git.

    python3 examples/run.py demo [arguments of `moe-nvfp4 generate demo`]
    python3 examples/run.py test [arguments of pytest]

Both first install the library into .venv in the checkout (minutes once, nothing after that).
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = str(BIN / ("python.exe" if os.name == "nt" else "python"))
STAMP = VENV / "moe_nvfp4.json"
EXTRAS = {"demo": ["demo"], "test": ["demo", "test"]}
TORCH = "torch==2.13.0"
PIP = [PYTHON, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
INSTALL = [*PIP, "install", "--progress-bar=raw"]
AGAIN = "See the lines above; when that is fixed, run the same command again, and it continues from here"


def fail(message: str) -> None:
    sys.exit(f"error: {message}")


def step(title: str, command: list[str], remedy: str | None = AGAIN) -> bool:
    """Run one command of the set-up and show it as one line with its duration; without a remedy it may fail."""
    start, terminal, lines = time.monotonic(), sys.stdout.isatty(), []
    print(f"  {title} ...", end="", flush=True)
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
    )
    for line in filter(None, map(str.strip, run.stdout)):
        if not line.startswith("Progress "):
            lines.append(line)
        if terminal:
            room = max(0, shutil.get_terminal_size().columns - len(title) - 8)
            print(f"\r\033[K  {title} ... {line[:room]}", end="", flush=True)
    code = run.wait()
    print(f"\r\033[K  {title} ..." if terminal else "", f"{time.monotonic() - start:.1f} s", flush=True)
    if code and remedy:
        print("\n".join(lines[-15:]), file=sys.stderr)
        fail(f"{title}: exit code {code}. {remedy}.")
    return code == 0


def has_nvidia_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60).stdout.startswith(b"GPU")
    except (OSError, subprocess.TimeoutExpired):
        return False


def pip_takes_cpu_torch() -> bool:
    """Whether pip, as it is configured on this machine, takes a CPU build of torch by itself."""
    ask = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", TORCH]
    report = subprocess.run([*PIP, *ask], capture_output=True, text=True).stdout
    try:
        return json.loads(report)["install"][0]["metadata"]["version"].endswith("+cpu")
    except (ValueError, LookupError):
        return False


def install_torch(gpu: bool) -> None:
    """Install torch. On Linux the ordinary wheel brings gigabytes of CUDA libraries: without a GPU, the CPU build."""
    if gpu:
        step(f"{TORCH} for the NVIDIA GPU (about 3 GB)", [*INSTALL, TORCH])
    elif not sys.platform.startswith("linux") or pip_takes_cpu_torch():
        step(f"{TORCH}, CPU build", [*INSTALL, TORCH])
    else:
        step("uv (knows where torch's CPU build is)", [*INSTALL, "uv"])
        uv = [PYTHON, "-I", "-m", "uv", "pip", "install", "--python", PYTHON, "--torch-backend=cpu", TORCH]
        if not step(f"{TORCH}, CPU build", uv, remedy=None):
            print("  warning: torch's CPU build cannot be reached; using the ordinary one, of about 3 GB")
            step(TORCH, [*INSTALL, TORCH])


def set_up(job: str) -> None:
    texts = [p.read_bytes() for p in (ROOT / "pyproject.toml", Path(__file__))]
    # An environment contains absolute paths, so it works only in this place and with this Python.
    place = [str(ROOT), sys.base_prefix, sys.version]
    recipe = hashlib.sha256(b"".join(texts)).hexdigest()
    stamp = json.loads(STAMP.read_text("utf-8")) if STAMP.exists() else {}
    done = stamp.get("extras", []) if stamp.get("place") == place else []
    if stamp.get("recipe") == recipe and set(EXTRAS[job]) <= set(done):
        return
    print(f"Setting up {VENV} (minutes, once)")
    if stamp.get("place") != place:
        no_venv = "venv is part of Python, but a separate package on Debian and Ubuntu: sudo apt install python3-venv"
        step("virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)], no_venv)
    STAMP.write_text(json.dumps({"place": place}), "utf-8")
    gpu = sys.platform.startswith("linux") and has_nvidia_gpu()
    extras = sorted({*EXTRAS[job], *done, *(["gpu"] if gpu else [])})
    step("pip", [*PIP, "install", "--upgrade", "pip"])
    install_torch(gpu)
    package = f"moe-nvfp4[{','.join(extras)}]"
    step(package, [*INSTALL, "--editable", package.replace("moe-nvfp4", str(ROOT))])
    STAMP.write_text(json.dumps({"place": place, "recipe": recipe, "extras": extras}), "utf-8")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in EXTRAS:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    if sys.version_info < (3, 11):
        fail(f"Python 3.11 or newer is needed and this is {sys.version.split()[0]}; start it with a newer one")
    job, rest = arguments[0], arguments[1:]
    set_up(job)
    # On a busy machine, torch's threads, which wait by spinning, slow each other down a hundredfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if job == "test":
        workers = ["-n", str(min(4, os.cpu_count() or 1)), "--dist", "worksteal"]  # a worker takes about 2 GB
        return subprocess.call([PYTHON, "-m", "pytest", "-q", *workers, *rest], cwd=ROOT)
    return subprocess.call([str(BIN / "moe-nvfp4"), "generate", "demo", "--bf16", "--max-new-tokens", "40", *rest])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
