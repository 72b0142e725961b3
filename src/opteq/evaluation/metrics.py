"""The curves in a `metrics.csv`."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np

from opteq.errors import ConfigError
from opteq.plots.training import Curve

# Quantities in the order a reader looks for them; others follow by name.
_FIRST = ("loss", "accuracy", "mIoU", "mAcc", "aAcc")


def read_curves(path: Path) -> dict[str, dict[str, Curve]]:
    """Read the training and validation curves that Lightning's CSV logger wrote.

    Columns such as `train_loss` and `val_loss` become two curves of the quantity `loss`; a column
    without such a prefix (`lr-SGD`) is a quantity of its own. Values of one epoch are averaged.
    Where a resumed run repeats a step, its later row counts. Empty columns and those of the final
    test are left out.

    Args:
        path: a CSV file with a header and the columns `epoch` and `step`.

    Returns:
        quantity → stage (`"train"`, `"val"` or `""`) → epochs (counted from 1) and values.

    Raises:
        ConfigError: if the file is not such a table.
    """
    columns: dict[str, dict[tuple[int, int], float]] = {}
    for line, row in _rows(path):
        moment = (int(_number(row["epoch"], path, line)), int(_number(row["step"], path, line)))
        for name, text in row.items():
            if text:
                columns.setdefault(name, {})[moment] = _number(text, path, line)

    curves: dict[str, dict[str, Curve]] = {}
    for name, values in columns.items():
        # Lightning writes a value logged by step and by epoch twice; the epoch's is the mean.
        if name in ("epoch", "step") or name.removesuffix("_step") + "_epoch" in columns:
            continue
        stage, quantity = _split(name.removesuffix("_epoch"))
        curve = _epoch_means(values)
        if stage != "test" and len(curve[0]):
            curves.setdefault(quantity, {})[stage] = curve
    return dict(sorted(curves.items(), key=lambda item: (_place(item[0]), item[0])))


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows that belong to an epoch, with their line numbers."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            if not {"epoch", "step"} <= set(reader.fieldnames or ()):
                raise ConfigError(
                    f"Expected the columns `epoch` and `step` in {path}, got {reader.fieldnames}."
                )
            rows = [(reader.line_num, row) for row in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a CSV table ({error}).") from error
    for line, row in rows:
        if None in row:
            raise ConfigError(f"Line {line} of {path} has more values than the header has names.")
    return [(line, row) for line, row in rows if row["epoch"] and row["step"]]


def _number(text: str, path: Path, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"Expected a number in line {line} of {path}, got {text!r}.") from None


def _split(name: str) -> tuple[str, str]:
    """`"val_loss"` → `("val", "loss")`; the stage is empty where there is none."""
    stage, _, quantity = name.replace("/", "_").partition("_")
    return (stage, quantity) if stage in ("train", "val", "test") and quantity else ("", name)


def _epoch_means(values: dict[tuple[int, int], float]) -> Curve:
    """Mean of the finite values of each epoch, by epoch counted from 1."""
    by_epoch: dict[int, list[float]] = {}
    for (epoch, _), value in values.items():
        if math.isfinite(value):
            by_epoch.setdefault(epoch, []).append(value)
    epochs = sorted(by_epoch)
    means = [np.mean(by_epoch[epoch]) for epoch in epochs]
    return np.array(epochs) + 1.0, np.array(means, dtype=np.float64)


def _place(quantity: str) -> int:
    return _FIRST.index(quantity) if quantity in _FIRST else len(_FIRST)
