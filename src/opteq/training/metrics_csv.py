"""The table of a run: one row per epoch, kept when the run is resumed."""

import csv
import io
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from opteq.errors import ConfigError
from opteq.system.files import write_beside


class MetricsCSV(Logger):
    """Writes metrics to a CSV file with the columns `epoch`, `step` and one per metric.

    What Lightning logs for the same step, in training and validation, shares a row. The file is
    replaced as a whole, so it is complete at any moment. Results of the final test are left out:
    they belong to the best checkpoint, not to the last epoch.

    Args:
        path: The file.
        epochs: Number of epochs of an earlier part of the run to keep. Later rows, of an epoch that
            did not get into a checkpoint, are dropped.
    """

    def __init__(self, path: Path, epochs: int = 0) -> None:
        super().__init__()
        self.path = path
        self._rows: list[dict[str, Any]] = []
        if epochs and path.exists():
            try:
                with path.open(newline="", encoding="utf-8") as file:
                    self._rows = [row for row in csv.DictReader(file) if int(row["epoch"]) < epochs]
            except (KeyError, TypeError, ValueError, csv.Error) as error:
                raise ConfigError(f"{path} is damaged; move it away to resume without it.") from error

    @property
    def last(self) -> dict[str, Any]:
        """The last row; empty before the first."""
        return self._rows[-1] if self._rows else {}

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the configuration is saved in a file of its own."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {name: value for name, value in metrics.items() if not name.startswith("test_")}
        if "epoch" not in row or len(row) == 1:
            return
        row |= {"epoch": int(row["epoch"]), "step": step}
        if self._rows and (self._rows[-1]["epoch"], self._rows[-1]["step"]) == (row["epoch"], step):
            self._rows[-1] |= row
        else:
            self._rows.append(row)
        self._write()

    def _write(self) -> None:
        names = sorted({name for row in self._rows for name in row} - {"epoch", "step"})
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, ["epoch", "step", *names])
        writer.writeheader()
        writer.writerows(self._rows)
        with write_beside(self.path) as file:
            file.write(text.getvalue().encode())
