"""What `compare` and `verify` need optional packages for: plots, and tasks of lm-eval."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moe_nvfp4.cli.options import check_beside, check_writable
from moe_nvfp4.evaluate import Metrics
from moe_nvfp4.quantize.layouts import ErrorSums

PICTURES = (".png", ".pdf", ".svg")
PIP = {"lm_eval": "lm-eval", "matplotlib": "matplotlib"}


def need(package: str, option: str) -> None:
    """ValueError unless the package is installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{option} needs a package that is not installed: pip install {PIP[package]}")


# ---- plots ---------------------------------------------------------------------------------------
BY_POSITION, BY_EXPERT = "kl_by_position", "relative_error"  # what plots show: the key of their numbers in JSON


def check_plot(path: Path, key: str) -> None:
    """ValueError if the plot of `key` could not be drawn or written; to be asked before its numbers are computed."""
    need("matplotlib", "--plot")
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {path}: the name of the picture must end in {', '.join(PICTURES)}")
    check_writable(path)
    check_beside(path.with_suffix(".json"), f'{{"{key}"')


def plot_positions(path: Path, found: Mapping[str, Metrics], window: int) -> None:
    """Plot the mean KL of each position of a window and its running mean over 16 positions; JSON beside the picture."""
    from matplotlib.figure import Figure

    numbers = {name: of.kls.view(-1, window - 1).mean(dim=0).tolist() for name, of in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({BY_POSITION: numbers}) + "\n", "utf-8")
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, values) in enumerate(numbers.items()):
        axes.plot(range(1, window), values, color=f"C{i}", alpha=0.25, linewidth=0.8)
        step = min(16, len(values))
        smooth = [sum(values[k : k + step]) / step for k in range(len(values) - step + 1)]
        axes.plot(range(1 + step // 2, 1 + step // 2 + len(smooth)), smooth, color=f"C{i}", label=name)
    axes.set(xlabel="position in the window", ylabel="KL to the original, nats", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_experts(path: Path, errors: Mapping[str, ErrorSums]) -> None:
    """Plot the relative weight error of every expert, one row of the picture per layer; JSON beside the picture."""
    from matplotlib.figure import Figure

    rows: dict[str, list[float]] = {}
    for name, sums in errors.items():
        layer, _, number = name.rpartition(".")
        rows.setdefault(layer if number.isdigit() else name, []).append(sums.relative)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({BY_EXPERT: rows}) + "\n", "utf-8")
    widest = max(map(len, rows.values()))
    figure = Figure(figsize=(2 + min(10, 0.15 * widest + 2), 1.5 + 0.15 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    cells = [[*values, *[float("nan")] * (widest - len(values))] for values in rows.values()]
    figure.colorbar(axes.imshow(cells, aspect="auto", interpolation="nearest"), label="relative weight error")
    axes.set(xlabel="expert", ylabel="layer")
    figure.savefig(path, dpi=150)


# ---- lm-eval -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tasks:
    """Names of lm-eval tasks, lm-eval's manager, which knows them, and the folder that it reads them from."""

    names: list[str]
    manager: Any
    folder: TemporaryDirectory | None

    def run(self, model: Any, tokenizer: Any, limit: int | None) -> dict[str, float]:
        """Run the tasks on a transformers model: "task metric" -> score."""
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        judge = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
        found = simple_evaluate(
            judge, tasks=list(self.names), task_manager=self.manager, limit=limit, bootstrap_iters=0, log_samples=False
        )
        assert found is not None
        scores: dict[str, float] = {}
        for task, of in found["results"].items():
            for metric, value in of.items():
                name = metric.removesuffix(",none")
                if isinstance(value, int | float) and "," in metric and "stderr" not in metric:
                    scores[f"{task} {name}"] = value
        return scores


def _names_in(path: Path, kinds: str = "task|group") -> list[str]:
    """The tasks and groups that a YAML file names. A YAML reader would need lm-eval's tags, such as !function."""
    text = path.read_text("utf-8-sig", errors="replace")
    found = re.findall(rf"^(?:{kinds}):[ \t]*([^\s#].*?)[ \t]*(?:#.*)?$", text, re.MULTILINE)
    return [name.strip("'\"") for name in found]


def tasks_of(text: str) -> Tasks:
    """The tasks of --tasks: comma-separated names, or one YAML file, which may build on others in its folder.
    ValueError for names that lm-eval does not know; to be asked before the models run."""
    need("lm_eval", "--tasks")
    names, own = [name.strip() for name in text.split(",")], None
    if text.endswith(".yml"):
        raise ValueError(f"--tasks {text}: lm-eval reads files whose names end in .yaml: rename it")
    if text.endswith(".yaml"):
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"--tasks {text}: there is no such file")
        if not (found := _names_in(path)):
            raise ValueError(f"--tasks {text}: it has no line 'task: NAME', as the YAML file of a task has")
        names, own = found[:1], TemporaryDirectory()  # lm-eval reads every YAML file below: a virtual environment, too
        for file in path.parent.iterdir():
            if file.suffix in (".yaml", ".yml", ".py") and file.is_file():
                shutil.copy(file, own.name)
                if file.suffix == ".yaml" and file.name != path.name and names[0] in _names_in(file, "task"):
                    raise ValueError(
                        f"--tasks {text}: {file.name} beside it has a task {names[0]!r} too, and lm-eval would run one "
                        "of the two: give it another name, or move one of them to another folder"
                    )
    try:
        from lm_eval.tasks import TaskManager
    except Exception as error:  # lm-eval before 0.4.11 asks transformers 5 for what it no longer has
        raise ValueError(
            f"--tasks: the installed lm-eval cannot be imported ({type(error).__name__}: {error}): "
            "pip install -U lm-eval"
        ) from None
    manager = TaskManager(include_path=None if own is None else own.name)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        near = ", ".join(get_close_matches(unknown[0], manager.all_tasks, n=3)) or "none"
        raise ValueError(
            f"--tasks {text}: lm-eval has no task {unknown[0]!r}; similar names: {near} (lm-eval --tasks list has all)"
        )
    return Tasks(names, manager, own)
