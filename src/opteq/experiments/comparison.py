"""What came out: means over seeds, paired differences, and whether they decide anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from opteq.experiments.tables import Table

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Column:
    """How a score is shown: heading, factor, format, and whether more of it is better."""

    heading: str
    scale: float = 1.0
    form: str = ".2f"
    higher_is_better: bool = True


COLUMNS = {
    "test_accuracy": Column("accuracy %", 100),
    "test_mAcc": Column("mean accuracy %", 100),
    "mAcc_32": Column("at 32×32 %", 100),
    "mAcc_48": Column("at 48×48 %", 100),
    "parameters": Column("parameters", form=",.0f"),
    "seconds_train": Column("training s", form=",.0f", higher_is_better=False),
    "solver_steps_mean": Column("solver steps", form=",.1f", higher_is_better=False),
    "unconverged": Column("unconverged", form=",.0f", higher_is_better=False),
    "inference_ms": Column("inference ms", form=",.1f", higher_is_better=False),
    "backward_ms": Column("backward ms", form=",.1f", higher_is_better=False),
    "step_ms": Column("step ms", form=",.1f", higher_is_better=False),
    "diagonal_share": Column("diagonal share %", 100),
    "known_kl": Column("KL known", form=",.3f", higher_is_better=False),
    "unknown_kl": Column("KL unseen", form=",.3f", higher_is_better=False),
    "ece": Column("ECE %", 100, higher_is_better=False),
    "auroc": Column("AUROC %", 100),
    "known_accuracy": Column("known sub-classes %", 100),
    "unseen_accuracy": Column("unseen sub-classes %", 100),
    "corrupted_accuracy": Column("corrupted %", 100),
    "residual": Column("relative residual", form=".1e", higher_is_better=False),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference to the reference over the seeds that both have, with half its confidence interval.

    Attributes:
        mean: mean of the differences.
        half_width: half the width of the 95 % interval of Student's t; infinite for a single pair.
        pairs: number of pairs.
    """

    mean: float
    half_width: float
    pairs: int

    def verdict(self, higher_is_better: bool) -> str:
        """`"better"`, `"worse"`, or `"undecided"` if the interval holds zero or there is one pair."""
        if not abs(self.mean) > self.half_width:
            return "undecided"
        return "better" if (self.mean > 0) == higher_is_better else "worse"


def difference(row: Mapping[int, float], reference: Mapping[int, float]) -> Difference | None:
    """Compare seed by seed; None without a common seed."""
    pairs = [row[seed] - reference[seed] for seed in sorted(row.keys() & reference.keys())]
    if not pairs:
        return None
    if len(pairs) == 1:
        return Difference(pairs[0], math.inf, 1)
    quantile = float(student.ppf(0.5 + CONFIDENCE / 2, len(pairs) - 1))
    return Difference(fmean(pairs), quantile * stdev(pairs) / math.sqrt(len(pairs)), len(pairs))


def markdown(
    table: Table, scores: Mapping[str, Mapping[int, Mapping[str, Any]]], options: Sequence[str] = ()
) -> str:
    """The table as Markdown: mean ± standard deviation over seeds, and the paired difference.

    Args:
        table: what was trained.
        scores: the scores of every run, by row and seed.
        options: options of `opteq fit` that took the place of the table's.
    """
    compared = column(table.compare)
    headings = [column(name).heading for name in table.columns]
    beside = [f"Options beside the table's, which its title does not know: `{' '.join(options)}`.", ""]
    lines = [
        f"# {table.title}",
        "",
        f"{table.source}. Compared with {table.reference} seed by seed: mean difference, 95 % interval of"
        " Student's t, and its verdict; one pair decides nothing.",
        "",
        *(beside if options else []),
        f"| row | seeds | {' | '.join(headings)} | {compared.heading} − {table.reference} | verdict |",
        f"| :-- | --: |{' --: |' * len(headings)} --: | :-- |",
    ]
    reference = values(scores[table.reference], table.compare)
    for row in table.rows:
        runs = scores[row.name]
        cells = [_cell(values(runs, name), column(name)) for name in table.columns]
        comparison = ("–", "reference" if row.name == table.reference else "–")
        found = difference(values(runs, table.compare), reference)
        if found is not None and row.name != table.reference:
            comparison = (_shown(found, compared), found.verdict(compared.higher_is_better))
        lines.append(f"| {row.name} | {len(runs)} | {' | '.join(cells)} | {' | '.join(comparison)} |")
    return "\n".join(lines) + "\n"


def column(name: str) -> Column:
    """How to show the score `name`."""
    return COLUMNS.get(name, Column(name.replace("_", " "), form=".4f"))


def values(runs: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, float]:
    """The score `name` of every run that has it, by seed."""
    return {seed: float(run[name]) for seed, run in runs.items() if run.get(name) is not None}


def _cell(found: Mapping[int, float], column: Column) -> str:
    numbers = [value * column.scale for value in found.values()]
    if not numbers:
        return "–"
    mean = format(fmean(numbers), column.form)
    if len(numbers) == 1 or not stdev(numbers):
        return mean
    return f"{mean} ± {format(stdev(numbers), column.form)}"


def _shown(found: Difference, column: Column) -> str:
    mean = format(found.mean * column.scale, "+" + column.form)
    if math.isinf(found.half_width):
        return mean
    return f"{mean} ± {format(found.half_width * column.scale, column.form)}"
