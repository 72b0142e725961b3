"""What came out: means over seeds, paired differences, and whether they decide anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from opteq.evaluation.branchstudy import DIRECTIONS, SIZES
from opteq.evaluation.paired import Difference, paired
from opteq.experiments.tables import Table


@dataclass(frozen=True, slots=True)
class Column:
    """How a score is shown: heading, factor, format, and whether more of it is better.

    Differences of up to `margin` are small.
    """

    heading: str
    scale: float = 1.0
    form: str = ".2f"
    higher_is_better: bool = True
    margin: float = 0.0


COLUMNS = {
    "test_accuracy": Column("accuracy %", 100, margin=0.01),
    "test_mAcc": Column("mean accuracy %", 100, margin=0.01),
    "mAcc_32": Column("at 32×32 %", 100, margin=0.01),
    "mAcc_48": Column("at 48×48 %", 100, margin=0.01),
    "test_accuracy_top5": Column("top 5 %", 100, margin=0.01),
    "test_mIoU": Column("mIoU %", 100, margin=0.01),
    "test_aAcc": Column("pixels %", 100, margin=0.01),
    "train_loss": Column("training loss", form=".2g", higher_is_better=False),
    "step_mb": Column("step MB", form=",.1f", higher_is_better=False),
    "images_per_second": Column("images/s", form=",.0f"),
    "mean_l1": Column("mean |z|", form=".3f", higher_is_better=False),
    "mean_square": Column("mean z²", form=".3f", higher_is_better=False),
    "diversity": Column("diversity", form=".3f", higher_is_better=False),
    "heritage": Column("heritage", form=".3f"),
    "largest_norm": Column("largest ‖W‖", form=".3f", higher_is_better=False),
    "residual_20": Column("residual after 20", form=".1e", higher_is_better=False),
    "smallest_alpha": Column("smallest α", form=".2f"),
    "largest_alpha": Column("largest α", form=".2f"),
    "beta_max": Column("β_max", form=".3f", higher_is_better=False),
    "mu": Column("μ", form=".3f", higher_is_better=False),
    "m": Column("m", form=".3f", higher_is_better=False),
    "remark_1": Column("Remark 1 holds", form=".0f"),
    "lipschitz_geq": Column("L of GEQ", form=".3g", higher_is_better=False),
    "lipschitz_opteq": Column("L of OptEq", form=".3g", higher_is_better=False),
    **{f"pgd_{steps}": Column(f"PGD-{steps} %", 100, margin=0.01) for steps in (3, 5, 10, 20)},
    **{
        f"{direction}_{size:g}": Column(f"{direction} {size:g} %", 100, margin=0.01)
        for direction in DIRECTIONS
        for size in SIZES
    },
    "known_kl_scaled": Column("KL known, scaled", form=",.3f", higher_is_better=False),
    "unknown_kl_scaled": Column("KL unseen, scaled", form=",.3f", higher_is_better=False),
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
    "known_accuracy": Column("known sub-classes %", 100, margin=0.01),
    "unseen_accuracy": Column("unseen sub-classes %", 100, margin=0.01),
    "corrupted_accuracy": Column("corrupted %", 100, margin=0.01),
    "residual": Column("relative residual", form=".1e", higher_is_better=False),
}


def verdict(found: Difference, column: Column) -> str:
    """`"better"` or `"worse"` where the interval leaves out zero, else whether it shows it small."""
    if found.decided:
        return "better" if (found.mean > 0) == column.higher_is_better else "worse"
    small = abs(found.mean) + found.half_width <= column.margin
    return f"smaller than {column.margin * column.scale:g} point" if small else "undecided"


def difference(row: Mapping[int, float], reference: Mapping[int, float]) -> Difference | None:
    """Compare seed by seed; None without a common seed."""
    pairs = [row[seed] - reference[seed] for seed in sorted(row.keys() & reference.keys())]
    return paired(pairs) if pairs else None


def markdown(
    table: Table, scores: Mapping[str, Mapping[int, Mapping[str, Any]]], options: Sequence[str] = ()
) -> str:
    """The table as Markdown.

    Of each row it has mean ± standard deviation over seeds, what the paper prints, and the paired difference
    to the reference; of each claim of the paper the paired difference and whether it holds.

    Args:
        table: what was trained.
        scores: the scores of every run, by row and seed.
        options: options of `opteq fit` that took the place of the table's.
    """
    compared = column(table.compare)
    shown = [(name, published) for name in table.columns for published in _kinds(table, name)]
    headings = [f"{'paper: ' if published else ''}{column(name).heading}" for name, published in shown]
    lines = [
        f"# {table.title}",
        "",
        f"{table.source}. Compared with {table.reference} seed by seed: mean difference, 95 % interval of"
        " Student's t, and its verdict; one pair decides nothing.",
        "",
        *_settings(table, options),
        f"| row | seeds | {' | '.join(headings)} | {compared.heading} − {table.reference} | verdict |",
        f"| :-- | --: |{' --: |' * len(headings)} --: | :-- |",
    ]
    for row in table.rows:
        runs = scores[row.name]
        cells = [
            _cell({0: row.published[name]} if name in row.published else {}, column(name))
            if published
            else _cell(values(runs, name), column(name))
            for name, published in shown
        ]
        found, decision = None, "reference" if row.name == table.reference else "–"
        if row.name != table.reference:
            found = difference(values(runs, table.compare), values(scores[table.reference], table.compare))
            decision = verdict(found, compared) if found else "–"
        cells += [_shown(found, compared), decision]
        lines.append(f"| {row.name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_claims(table, scores)]) + "\n"


def _kinds(table: Table, name: str) -> Sequence[bool]:
    """A score has a column of ours, and one of the paper's where that prints any."""
    return (False, True) if any(name in row.published for row in table.rows) else (False,)


def _settings(table: Table, options: Sequence[str]) -> list[str]:
    lines = [f"Here: {table.setting}."] if table.setting else []
    if table.paper and table.scale != "full":
        lines += [f"The paper: {table.paper}."]
    if table.scale == "smoke":
        lines += ["A few steps on noise: the numbers mean nothing, but that everything runs."]
    if options:
        stated = " ".join(options)
        lines += [f"Options beside the table's, which its title does not know: `{stated}`."]
    return [part for line in lines for part in (line, "")]


def _claims(table: Table, scores: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    if not table.claims:
        return []
    words = {"better": "holds", "worse": "contrary"}
    lines = ["", "| expected | in | difference | verdict |", "| :-- | :-- | --: | :-- |"]
    for claim in table.claims:
        name = claim.score or table.compare
        found = difference(values(scores[claim.better], name), values(scores[claim.worse], name))
        decision = verdict(found, column(name)) if found else "not run"
        ordering = f"{claim.better} better than {claim.worse}"
        shown = _shown(found, column(name))
        lines.append(f"| {ordering} | {column(name).heading} | {shown} | {words.get(decision, decision)} |")
    return lines


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


def _shown(found: Difference | None, column: Column) -> str:
    return "–" if found is None else found.text(column.scale, column.form)
