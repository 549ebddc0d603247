"""The process that `ahead.build` starts. It reads jobs from stdin and answers each with None or with its traceback."""

from __future__ import annotations

import os
import pickle
import sys
import traceback

from moe_nvfp4.kernels.common.ahead import Build


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # compilers print to stdout, which carries the answers
    while True:
        try:
            job = Build(*pickle.load(sys.stdin.buffer))
        except EOFError:
            return
        try:
            job.variants.build(*job.arguments)
            error = None
        except Exception:
            error = traceback.format_exc()
        pickle.dump(error, answers)
        answers.flush()


if __name__ == "__main__":
    main()
