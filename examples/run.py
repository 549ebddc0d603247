"""The two commands of the README, on a machine that has only Python and git.

    python3 examples/run.py demo [arguments of `moe-nvfp4 generate demo`]
    python3 examples/run.py test [--all] [arguments of pytest]

Both first install the library into .venv in the checkout (a minute once, nothing after that). Without --all, the tests
are the quick ones, among them one of everything from a checkpoint to a server's answer.
"""

import ast
import hashlib
import json
import os
import re
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
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
PIP = [PYTHON, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
BY_PIP = [*PIP, "install", "--progress-bar=raw"]
# As pip does it: the newest version of all indexes, and the system's certificates.
BY_UV = [PYTHON, "-I", "-m", "uv", "pip", "install", "--python", PYTHON, "--index-strategy=unsafe-best-match",
         "--system-certs"]  # fmt: skip
SHARED = {"index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert", "constraint"}  # uv has them
UNSHARED = {"break-system-packages", "cache-dir", "config-file", "default-timeout", "disable-pip-version-check",
            "no-cache-dir", "no-color", "no-input", "progress-bar", "quiet", "require-virtualenv", "retries",
            "root-user-action", "timeout"}  # that change nothing in what is installed  # fmt: skip
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
    result = f"{'failed after ' if code else ''}{time.monotonic() - start:.1f} s"
    print(f"\r\033[K  {title} ..." if terminal else "", result, flush=True)
    if code and remedy:
        print("\n".join(lines[-15:]), file=sys.stderr)
        fail(f"{title}: exit code {code}. {remedy}.")
    return code == 0


def has_nvidia_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60).stdout.startswith(b"GPU")
    except (OSError, subprocess.TimeoutExpired):
        return False


def pip_settings() -> dict[str, str]:
    """How pip is configured here: setting -> value. Files come first, then variables, which win."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    found = re.findall(r"^(global|install|:env:)\.([\w-]+)=(.*)$", listed, re.M)
    order = ("global", "install", ":env:")
    return {name: ast.literal_eval(value) for _, name, value in sorted(found, key=lambda row: order.index(row[0]))}


def installer() -> list[str]:
    """The command that installs: uv's, which takes a third of pip's time, if it can do what pip would."""
    settings = pip_settings()
    if unknown := sorted(set(settings) - SHARED - UNSHARED):
        print(f"  pip installs, and not uv, which has no setting like pip's {', '.join(unknown)}")
        return BY_PIP
    if not step("uv", [*BY_PIP, "uv"], remedy=None):
        print("  pip installs, because there is no uv here")
        return BY_PIP
    return [*BY_UV, *uv_options(settings)]


def uv_options(settings: dict[str, str]) -> list[str]:
    shared = {name: settings[name] for name in sorted(SHARED & set(settings))}
    without_index = shared.pop("no-index", "no").lower() in ("1", "true", "yes", "on")
    words = [f"--{name}={word}" for name, value in shared.items() for word in value.split()]
    return [*words, *(["--no-index"] if without_index else [])]


def install(command: list[str], package: str, gpu: bool, remedy: str | None = AGAIN) -> bool:
    """Install torch, then the package. Without a remedy it may fail.

    On Linux, torch's ordinary wheel brings gigabytes of CUDA libraries: without a GPU, the CPU build.
    """
    if gpu or not sys.platform.startswith("linux"):
        done = step(f"{TORCH}{' for the NVIDIA GPU (about 3 GB)' if gpu else ''}", [*command, TORCH], remedy)
    else:
        build = f"{TORCH}+cpu"
        done = step(f"{build} from pip's index", [*command, build], remedy=None) or step(
            f"{build} from pytorch.org", [*command, build, "--extra-index-url", CPU_BUILDS], remedy=None
        )
        if not done:
            print("  warning: torch's CPU build cannot be reached; using the ordinary one, of about 3 GB")
            done = step(TORCH, [*command, TORCH], remedy)
    return done and step(package, [*command, "--editable", package.replace("moe-nvfp4", str(ROOT))], remedy)


def set_up(job: str) -> None:
    texts = [p.read_bytes() for p in (ROOT / "pyproject.toml", Path(__file__))]
    # An environment contains absolute paths, so it works only in this place and with this Python.
    place = [str(ROOT), sys.base_prefix, sys.version]
    recipe = hashlib.sha256(b"".join(texts)).hexdigest()
    stamp = json.loads(STAMP.read_text("utf-8")) if STAMP.exists() else {}
    done = stamp.get("extras", []) if stamp.get("place") == place else []
    if stamp.get("recipe") == recipe and set(EXTRAS[job]) <= set(done):
        return
    print(f"Setting up {VENV} (a minute, once)")
    if stamp.get("place") != place:
        no_venv = "venv is part of Python, but a separate package on Debian and Ubuntu: sudo apt install python3-venv"
        step("virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)], no_venv)
    STAMP.write_text(json.dumps({"place": place}), "utf-8")
    gpu = sys.platform.startswith("linux") and has_nvidia_gpu()
    extras = sorted({*EXTRAS[job], *done, *(["gpu"] if gpu else [])})
    step("pip", [*PIP, "install", "--upgrade", "pip"])
    package, command = f"moe-nvfp4[{','.join(extras)}]", installer()
    if command is BY_PIP or not install(command, package, gpu, remedy=None):
        if command is not BY_PIP:
            print("  pip installs, because uv could not")
        install(BY_PIP, package, gpu)
    STAMP.write_text(json.dumps({"place": place, "recipe": recipe, "extras": extras}), "utf-8")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in EXTRAS:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    if sys.version_info < (3, 11):
        fail(f"Python 3.11 or newer is needed and this is {sys.version.split()[0]}; start it with a newer one")
    job, rest = arguments[0], arguments[1:]
    everything = job == "test" and rest[:1] == ["--all"]
    set_up(job)
    # On a busy machine, torch's threads, which wait by spinning, slow each other down a hundredfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Dozens of processes import the same modules, which are compiled once.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if job == "test":
        workers = ["-n", str(min(4, os.cpu_count() or 1)), "--dist", "worksteal"]  # a worker takes about 2 GB
        chosen = rest[1:] if everything else ["-m", "not slow", *rest]
        code = subprocess.call([PYTHON, "-m", "pytest", "-q", *workers, *chosen], cwd=ROOT)
        if not everything:
            print("These were the quick tests. All: python3 examples/run.py test --all (17 minutes on two cores)")
        return code
    return subprocess.call([str(BIN / "moe-nvfp4"), "generate", "demo", "--bf16", "--max-new-tokens", "40", *rest])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
