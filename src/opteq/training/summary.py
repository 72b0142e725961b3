"""What a finished training writes into its folder."""

import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from opteq.data.facts import Facts
from opteq.evaluation.scores import class_scores
from opteq.layer import EquilibriumLayer
from opteq.system.files import write_json
from opteq.system.hardware import PACKAGES, hardware
from opteq.training.taskscores import SCORES

SUMMARY = "summary.json"
VERSIONS = "versions.json"


def write_versions(folder: Path) -> None:
    """Write `versions.json`: command, date, hardware, Python, the packages that matter, and the platform."""
    versions = {package: version(package) for package in PACKAGES}
    known = {
        **_command(),
        "date": datetime.now().astimezone().isoformat(sep=" ", timespec="minutes"),
        **hardware(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    write_json(folder / VERSIONS, known | versions)


def _command() -> dict[str, str]:
    """The command that was given, where this process runs one."""
    program = Path(sys.argv[0])
    of_opteq = program.stem == "opteq" or program.parts[-2:] == ("opteq", "__main__.py")
    return {"command": shlex.join(["opteq", *sys.argv[1:]])} if of_opteq else {}


def write_summary(
    folder: Path,
    network: nn.Module,
    data: Facts,
    test: Mapping[str, float],
    confusion: NDArray[np.int64],
    seconds: float,
    images: int,
) -> dict[str, Any]:
    """Write and returns `summary.json`.

    Args:
        folder: Folder of the run.
        network: The trained network.
        data: What it was trained on.
        test: Metrics of the best checkpoint on the test set, as `Trainer.test` returns them.
        confusion: Its confusion matrix there, see `opteq.evaluation.scores.class_scores`.
        seconds: Duration of the training loop, including validation.
        images: Training images processed in that time.
    """
    peak = peak_memory_bytes()
    summary = {
        "dataset": data.title,
        "model": _name(network),
        "parameters": sum(p.numel() for p in network.parameters()),
        **{f"test_{score}": test[f"test_{score}"] for score in SCORES[data.task]},
        "solver_steps_mean": test.get("test_solver_steps"),
        "residual_max": test.get("test_residual_max"),
        "unconverged": _whole(test.get("test_unconverged")),
        "seconds_train": round(seconds, 2),
        "images_per_second": round(images / seconds, 1) if seconds else None,
        "peak_memory_mb": None if peak is None else round(peak / 2**20, 1),
        "test_classes": per_class(confusion, data.class_names),
    }
    write_json(folder / SUMMARY, summary)
    return summary


def per_class(confusion: NDArray[np.int64], names: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Count, recall, precision and F1 of each class by its name; None where there is nothing to tell."""
    scores = asdict(class_scores(confusion))
    return {
        name: {score: None if np.isnan(values[c]) else values[c].item() for score, values in scores.items()}
        for c, name in enumerate(names)
    }


def score_table(metrics: Mapping[str, float]) -> str:
    """What `Trainer.test` returns, to four digits, as lines to print."""
    width = max(map(len, metrics))
    texts = {name: f"{v:.0f}" if v.is_integer() else f"{v:.4g}" for name, v in metrics.items()}
    return "\n".join(f"{name:{width}}  {text:>9}" for name, text in texts.items())


def class_table(confusion: NDArray[np.int64], names: Sequence[str]) -> str:
    """What `per_class` gives, as lines to print."""
    rows = per_class(confusion, names)
    width = max(len("class"), *map(len, names))
    lines = [f"{'class':{width}}  {'count':>9}  recall  precision      F1"]
    for name, scores in rows.items():
        shares = [
            "-" if scores[key] is None else f"{scores[key]:.2%}" for key in ("recall", "precision", "f1")
        ]
        lines.append(
            f"{name:{width}}  {scores['counts']:>9,}  {shares[0]:>6}  {shares[1]:>9}  {shares[2]:>6}"
        )
    return "\n".join(lines)


def _name(network: nn.Module) -> str:
    """What tells networks apart: the map of the first equilibrium layer, else the body, else the network."""
    for module in network.modules():
        if isinstance(module, EquilibriumLayer):
            return module.map.title
    return type(getattr(network, "body", network)).__name__


def peak_memory_bytes() -> int | None:
    """Most memory used so far: of the accelerator if there is one, else of this process; None on Windows."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
