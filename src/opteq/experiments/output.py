"""What a reproduction leaves behind: the table as Markdown, its numbers as JSON, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opteq.experiments.comparison import column, markdown, values
from opteq.experiments.finished import scores_in
from opteq.experiments.tables import Table
from opteq.plots.ablation import draw_ablation
from opteq.plots.points import draw_rows
from opteq.plots.style import to_svg
from opteq.system.files import write_file, write_json


def write_results(table: Table, output: Path, options: Sequence[str]) -> Path:
    """Write `table.md`, `table.json`, `table.svg` and `curves.svg` from the runs that are finished.

    Args:
        table: what was trained.
        output: folder of the runs.
        options: options of `opteq fit` that took the place of the table's.

    Returns:
        Path of the Markdown file.
    """
    scores = scores_in(table, output)
    compared = column(table.compare)
    points = {
        name: [compared.scale * value for value in values(runs, table.compare).values()]
        for name, runs in scores.items()
    }
    figure = draw_rows(points, table.reference, compared.heading)
    if table.curves:
        curves = {
            option: {value: points[row] for value, row in rows.items()}
            for option, rows in table.curves.items()
        }
        ablation = draw_ablation(curves, points[table.reference], compared.heading)
        write_file(output / "curves.svg", to_svg(ablation))
    write_json(output / "table.json", scores)
    write_file(output / "table.svg", to_svg(figure))
    path = output / "table.md"
    write_file(path, markdown(table, scores, options).encode())
    return path
