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
    """Read the training and validation curves in the table of a run.

    Columns such as `train_loss` and `val_loss` become two curves of the quantity `loss`; a column without
    such a prefix is a quantity of its own. The finite values of one epoch are averaged.

    Args:
        path: a CSV file with a header and the column `epoch`.

    Returns:
        quantity → stage (`"train"`, `"val"` or `""`) → epochs (counted from 1) and values.

    Raises:
        ConfigError: if the file is not such a table.
    """
    points: dict[str, dict[str, dict[int, list[float]]]] = {}
    for line, row in _rows(path):
        epoch = 1 + int(_number(row["epoch"], path, line))
        for name, text in row.items():
            if name in ("epoch", "step") or not text or not math.isfinite(value := _number(text, path, line)):
                continue
            prefix, _, quantity = name.partition("_")
            stage, quantity = (prefix, quantity) if prefix in ("train", "val") else ("", name)
            points.setdefault(quantity, {}).setdefault(stage, {}).setdefault(epoch, []).append(value)
    return {
        quantity: {stage: _curve(values) for stage, values in stages.items()}
        for quantity, stages in sorted(points.items(), key=lambda item: (_place(item[0]), item[0]))
    }


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows, with their line numbers."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            if "epoch" not in (reader.fieldnames or ()):
                raise ConfigError(f"Expected a column `epoch` in {path}, got {reader.fieldnames}.")
            rows = [(reader.line_num, row) for row in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a CSV table ({error}).") from error
    for line, row in rows:
        if None in row:
            raise ConfigError(f"Line {line} of {path} has more values than the header has names.")
    return rows


def _number(text: str, path: Path, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"Expected a number in line {line} of {path}, got {text!r}.") from None


def _curve(values: dict[int, list[float]]) -> Curve:
    epochs = sorted(values)
    means = [np.mean(values[epoch]) for epoch in epochs]
    return np.array(epochs, dtype=np.float64), np.array(means, dtype=np.float64)


def _place(quantity: str) -> int:
    return _FIRST.index(quantity) if quantity in _FIRST else len(_FIRST)
