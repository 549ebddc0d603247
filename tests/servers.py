"""`moe-nvfp4 serve` for tests: started on a free port, asked, ended."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.common import ROOT, free_port


class Server:
    """`moe-nvfp4 serve` on loopback, in a process group of its own."""

    def __init__(self, path, *options, engine="transformers", env=None, log="log"):
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", Path(f"{path}.{log}")
        command = [sys.executable, "-m", "moe_nvfp4", "serve", "--engine", engine, str(path)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*command, *options], env=os.environ | {"PYTHONPATH": path} | (env or {}),
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)

    def wait(self, seconds=300):
        """Whether it answers at last; False if it has ended."""
        for _ in range(5 * seconds):
            if self.process.poll() is not None:
                return False
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return True
            except OSError:
                time.sleep(0.2)
        raise TimeoutError(self.log.read_text()[-3000:])

    def post(self, path, **body):
        """The answer to a request of the OpenAI API."""
        data = json.dumps({"temperature": 0, **body}).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
