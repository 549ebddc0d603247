"""The layer as a folder that the Hugging Face library `kernels` loads, without this package.

    python -m moe_nvfp4.integrations.hub FOLDER

    from kernels import get_local_kernel
    experts = get_local_kernel(Path("FOLDER")).NVFP4Experts.from_dense(gate_up_proj, down_proj)

A kernel of the Hub is loaded from a path, and several versions may be in one process. So imports become relative, and
the name of the package, which is also the namespace of its torch ops, contains a hash of its files. The sources are
this package's own: the modules that the layer, its kernels and their self-test import.

If this package brings compiled kernels, as a release does, so does the folder. A kernel's file in the cache folder
has the same name for both.

The layout is that of https://huggingface.co/docs/kernels/kernel-requirements, for kernels without compiled code
(torch-noarch). CPU kernels are compiled on first use, as they are here in a checkout.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import moe_nvfp4
from moe_nvfp4._version import __version__
from moe_nvfp4.ready import share_kernels

NAME = "moe-nvfp4"
VERSION = 1  # of the interface: a number that users of get_kernel name
ROOT = Path(moe_nvfp4.__file__).parent
STARTS = ("experts", "linear", "ops", "ready", "selftest/__main__", "kernels/common/worker")
DATA = ("*.c", "*.h")  # beside the modules that read them
BACKENDS = ("cpu", "cuda")
BUILD = f"""\
[general]
name = "{NAME}"
version = {VERSION}
license = "Apache-2.0"
backends = {json.dumps(BACKENDS)}

[torch-noarch]
"""
README = f"""\
---
library_name: kernels
license: apache-2.0
---

# NVFP4 mixture-of-experts layers

moe_nvfp4 {__version__}, as a kernel:

```python
from kernels import get_kernel

kernel = get_kernel("NAME/{NAME}", version={VERSION}, trust_remote_code=True)
experts = kernel.NVFP4Experts.from_dense(gate_up_proj, down_proj)  # [E, 2 * I, H] and [E, H, I]
y = experts(x, top_k_index, top_k_weights)  # [T, H]
```

Triton's kernels run on every NVIDIA GPU from sm_80 on. Hopper and Blackwell GPUs have kernels of their own, with
`pip install "nvidia-cutlass-dsl>=4.8,<5" "apache-tvm-ffi>=0.1.10"`. CPU kernels need a C compiler, which runs once.
"""


def write(folder: str | os.PathLike) -> list[str]:
    """Write the kernel to the new folder `folder`. Returns the names of its modules, as "kernels/sm90/gemm"."""
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists: name a folder that does not, or remove it first")
    modules = sorted(closure(STARTS))
    files = {f"{name}.py": relative(name) for name in modules}
    for place in {Path(name).parent for name in modules}:
        for pattern in DATA:
            files |= {str(place / found.name): found.read_text("utf-8") for found in (ROOT / place).glob(pattern)}
    digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:12]
    for backend in BACKENDS:
        described = {
            "name": NAME, "id": f"moe_nvfp4_{backend}_{digest}", "version": VERSION, "license": "Apache-2.0",
            "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        texts = {**files, "metadata.json": json.dumps(described, indent=2) + "\n"}
        package = folder / "build" / f"torch-{backend}"
        for name, text in texts.items():
            (file := package / name).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        share_kernels(package / "kernels", backend == "cuda")
    (folder / "build.toml").write_text(BUILD)
    (folder / "README.md").write_text(README)
    return modules


def closure(starts: tuple[str, ...]) -> set[str]:
    """The modules that are imported from `starts`, at any time, and all backends; a package is "NAME/__init__"."""
    backends = [f"kernels/{path.parent.name}/backend" for path in (ROOT / "kernels").glob("*/backend.py")]
    launches = [f"kernels/{path.parent.name}/launch" for path in (ROOT / "kernels").glob("*/launch.py")]
    found, left = set[str](), ["__init__", *starts, *backends, *launches]
    while left:
        if (name := left.pop()) in found:
            continue
        found.add(name)
        parents = name.split("/")[:-1]
        left += ["/".join([*parents[:i], "__init__"]) for i in range(1, len(parents) + 1)]
        left += _imported(name)
    return found


def relative(name: str) -> str:
    """The source of a module with relative imports of this package."""
    source = (ROOT / f"{name}.py").read_text("utf-8")
    lines = source.splitlines(keepends=True)
    for node, inside in _imports(ast.walk(ast.parse(source))):
        line, old = node.lineno - 1, f"from {node.module} import"
        assert lines[line].count(old) == 1, lines[line]
        lines[line] = lines[line].replace(old, f"from {'.' * (1 + name.count('/'))}{'.'.join(inside)} import")
    return "".join(lines)


def _imported(name: str) -> Iterator[str]:
    """The modules of this package that `name` imports, but for those that only type checkers see."""
    tree = ast.parse((ROOT / f"{name}.py").read_text("utf-8"))
    unseen = {
        inner for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body for inner in ast.walk(statement)
    }  # fmt: skip
    for node, inside in _imports(node for node in ast.walk(tree) if node not in unseen):
        names = [_module(inside), *(_module([*inside, alias.name]) for alias in node.names)]
        yield from filter(None, names)


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.ImportFrom, list[str]]]:
    """(node, ["kernels", "cpu"]) for each `from moe_nvfp4.kernels.cpu import ...`."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            top, *inside = node.module.split(".")
            if top == "moe_nvfp4":
                yield node, inside
        assert not (isinstance(node, ast.Import) and any(a.name.startswith("moe_nvfp4") for a in node.names))


def _module(parts: list[str]) -> str | None:
    """ "kernels/cpu/backend", "kernels/cpu/__init__", or None for what is no module."""
    for name in ("/".join(parts), "/".join([*parts, "__init__"])):
        if (ROOT / f"{name}.py").is_file():
            return name
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moe_nvfp4.integrations.hub", description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", help="folder to make; must not exist")
    folder = parser.parse_args().folder
    try:
        print(f"wrote {folder}: {len(write(folder))} modules")
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
