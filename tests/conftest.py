"""For all tests: seeds, threads, and a Hugging Face that never asks the network."""

import gc
import os
from collections import Counter
from fnmatch import fnmatch

# What torch and transformers define lives to the end, so no garbage collection while modules are imported.
gc.disable()

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Before NumPy is imported: the emulator multiplies many small matrices, and threads would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Workers of pytest-xdist share the cores, and so do the processes that tests start.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max(1, min(4, (os.cpu_count() or 1) // WORKERS))
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

# Backends that tests make up are theirs alone: a process that checks them would not find them.
os.environ.setdefault("MOE_NVFP4_CHECK", "0")
# Models of many sizes, each of them called once or twice: kernels are compiled as calls need them.
os.environ.setdefault("MOE_NVFP4_COMPILE", "lazy")

import pytest  # noqa: E402


def pytest_configure(config):
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return  # this process only hands out tests to workers, and starts them sooner without torch
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run as NumPy


left_out = set()  # files for NVIDIA GPUs in folders that the command line names


def pytest_ignore_collect(collection_path, config):
    """Leave files for NVIDIA GPUs out where there is none, but for those that the command line names itself."""
    import torch

    if fnmatch(collection_path.name, "test_*gpu.py") and not torch.cuda.is_available():
        if any(config.invocation_params.dir / argument in collection_path.parents for argument in config.args):
            left_out.add(str(collection_path))
        return True


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist: what a worker tells the process that prints
        session.config.workeroutput["left_out"] = sorted(left_out)


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is installed
def pytest_testnodedown(node):
    left_out.update(getattr(node, "workeroutput", {}).get("left_out", ()))


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    import torch

    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def hf_home(tmp_path_factory):
    """A Hugging Face cache of the tests' own: nothing is read from, or left in, the user's."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("hf")
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_HUB_CACHE", str(home / "hub"))
        yield home


@pytest.fixture(scope="session")
def sanitized_cache(tmp_path_factory):
    """A folder for C that is compiled with sanitizers, which workers of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sanitized"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.hookimpl(tryfirst=True)  # before -m "not slow" chooses
def pytest_collection_modifyitems(items):
    """Mark tests as slow that compile kernels for the emulator, and all but n cases of tests with `slow_after(n)`."""
    cases = Counter()
    for item in items:
        after = item.get_closest_marker("slow_after")
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        if "emulator" in item.fixturenames or (after is not None and cases[test] > after.args[0]):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # else the kernel language reports leaks when Python exits


def pytest_terminal_summary(terminalreporter):
    """Print what was left out, and what tests have recorded as a "table": workers of pytest-xdist cannot print."""
    if left_out:
        terminalreporter.write_line(f"no NVIDIA GPU here: {len(left_out)} files named test_*gpu.py were left out")
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "table":
                terminalreporter.write_line(f"\n{text}")
