"""What of the tables has been trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opteq.experiments.tables import Table, read_scales, run_name, table_names, trainings
from opteq.system.files import read_json

SCORES = "scores.json"


def scores_in(table: Table, output: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """The scores of every finished run, by row and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {row.name: {} for row in table.rows}
    for row, seed in trainings(table):
        path = output / run_name(row, seed) / SCORES
        if path.is_file():
            found[row.name][seed] = read_json(path)
    return found


def listing(folder: Path) -> list[tuple[str, str, str]]:
    """Name, title, and what `folder` has of every packaged table, at each of its scales."""
    return [(name, *_state(name, folder)) for name in table_names()]


def _state(name: str, folder: Path) -> tuple[str, str]:
    tables, states = read_scales(name), []
    for table in tables:
        finished = sum(map(len, scores_in(table, folder / table.scale / name).values()))
        states.append(f"{table.scale} {finished} of {len(trainings(table))} trainings")
    return f"{tables[0].source}: {tables[0].title}", "; ".join(states)
