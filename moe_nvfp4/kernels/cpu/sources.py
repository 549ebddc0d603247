"""What the CPU library is compiled from, and how. setup.py runs this file alone, so it imports nothing of ours."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("cpu.c", "cpu_path.h", "cpu_amx.h", "cpu_threads.h", "cpu_calls.h", "cpu_mapped.h", "cpu_detect.c")
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread")


def checksum(folder: Path = FOLDER) -> str:
    """SHA-256 of SOURCES. The library in a wheel contains the checksum of the sources it was made from."""
    parts = ((folder / name).read_bytes() for name in SOURCES)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
