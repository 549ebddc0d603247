"""Run tests whose failure may kill the process or the GPU's context.

    python -m tests.guarded results.jsonl tests/kernels/test_sm100_gpu.py [more of pytest's arguments]

Each outcome is written at once as a line of JSON: {"test", "outcome", "seconds", "text"}. A test that takes longer than
LIMIT ends its process, and so does one after which the GPU does not answer; a new process continues behind that test.
"""

import faulthandler
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT, RESTARTS, TEXT = 180, 30, 4000  # seconds of a test; processes; characters of what a failure says
CHILD = "MOE_NVFP4_GUARDED"  # set in the process that runs the tests


class Recorder:
    """A pytest plug-in that writes the outcomes."""

    def __init__(self, path, limit):
        self.path, self.limit, self.stderr = path, limit, os.dup(2)
        self.known = set(outcomes(path))

    def write(self, test, outcome, seconds=0.0, text=""):
        line = {"test": test, "outcome": outcome, "seconds": round(seconds, 2), "text": text[-TEXT:]}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid not in self.known]

    def pytest_collectreport(self, report):
        if report.skipped or report.failed:
            self.write(report.nodeid, report.outcome, text=str(report.longrepr))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.write(item.nodeid, "no end")
        faulthandler.dump_traceback_later(self.limit, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.write(report.nodeid, report.outcome, report.duration, str(report.longrepr or ""))
        if report.failed and not gpu_answers():
            os._exit(3)


def gpu_answers():
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def outcomes(path):
    """{test: its last outcome}"""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []
    return {line["test"]: line["outcome"] for line in lines}


def main(path, *arguments, limit=LIMIT):
    """Run all tests. Returns the exit status: 1 if a test failed or did not end, else 0."""
    for _ in range(RESTARTS):
        before = time.time(), len(outcomes(path))
        command = [sys.executable, "-m", "tests.guarded", str(path), *arguments]
        environment = {**os.environ, CHILD: str(limit)}
        status = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode
        found = outcomes(path)
        print(f"--- status {status}, {len(found) - before[1]} tests, {time.time() - before[0]:.0f} s", flush=True)
        new = list(found.values())[before[1] :]
        if not new or status in (0, 1, 5) and "no end" not in new:
            break
    counts = {outcome: list(found.values()).count(outcome) for outcome in sorted(set(found.values()))}
    print(f"{path}: {counts}", *(f"{outcome}: {test}" for test, outcome in found.items() if outcome in WRONG), sep="\n")
    return int(not found or any(outcome in WRONG for outcome in found.values()))


WRONG = "failed", "no end"

if __name__ == "__main__":
    path, *arguments = sys.argv[1:]
    if CHILD in os.environ:
        plugins = [Recorder(path, float(os.environ[CHILD]))]
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", *arguments], plugins=plugins))
    sys.exit(main(path, *arguments))
