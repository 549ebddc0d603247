"""A Python process that may hang or crash, of which the caller learns how it ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

# `-m` for a package that is not found by its name: one that was loaded from a folder, as a kernel of the Hub
_FROM_FOLDER = """
import importlib.util, runpy, sys
name, folder, module = sys.argv[1:4]
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
sys.argv[1:4] = []
runpy.run_module(module, run_name="__main__")
"""


def interpreter(module: str) -> list[str]:
    """The command that runs `module`, by its name in this process, in another one."""
    package, folder = __package__, Path(__file__).parent
    if package != folder.name and module.partition(".")[0] == package:
        return [sys.executable, "-c", _FROM_FOLDER, package, str(folder), module]
    return [sys.executable, "-m", module]


def run_child(module: str, arguments: list[str], env: Mapping[str, str], limit: float) -> tuple[list[dict], str]:
    """Run a module with these arguments, and with these variables besides this process's own: (the JSON objects that it
    printed, one in a line; how it ended before its time, or "").

    It is killed after `limit` seconds; or, once it prints {"patience": seconds}, after so many more.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    found: list[dict[str, Any]] = []
    late, deadline = "", time.monotonic() + limit
    lines: SimpleQueue[str | None] = SimpleQueue()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            [*interpreter(module), *arguments], env={**os.environ, "PYTHONPATH": path, **env}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        reader = Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                if (one := _object(line)) is not None:
                    found.append(one)
                    if "patience" in one:
                        limit = one["patience"]
                        deadline = time.monotonic() + limit
            process.wait(max(0.0, deadline - time.monotonic()))
        except (Empty, subprocess.TimeoutExpired):
            late = f"not over after {limit:.0f} s: it hangs, or kernels compile very slowly"
        finally:
            _kill(process)
            reader.join()
        errors.seek(0)
        return found, late or _ending(process.returncode, errors.read())


def _object(line: str) -> dict[str, Any] | None:
    """The JSON object in `line`; None for what else the process prints, and for half a line, in which it crashed."""
    try:
        return json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None


def _read(pipe: IO[str], lines: SimpleQueue[str | None]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(None)


def _kill(process: subprocess.Popen) -> None:
    """End the process with all that it started."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _ending(code: int, errors: str) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["it printed nothing"]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]  # others may follow it
    return f"the process ended with exit code {code}: {(raised or lines)[-1]}"
