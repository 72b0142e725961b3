"""Tables of trainings, written in YAML: one configuration and, row by row, what changes in it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opteq.configs import find_file, packaged, read_yaml, with_base
from opteq.errors import ConfigError

_PACKAGE = "opteq.experiments"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table.

    Attributes:
        name: what the row is called, and its runs are named after.
        changes: new values of options, by their dotted names.
        seeds: number of trainings, with seeds 0, 1, 2, …
    """

    name: str
    changes: Mapping[str, Any]
    seeds: int


@dataclass(frozen=True, slots=True)
class Table:
    """What is trained and compared.

    Attributes:
        name: name of the table.
        title: one line about it.
        source: the table or figure of a paper that it answers.
        config: configuration of `opteq fit` that all rows share; its `base`, a preset, is read in.
        rows: the rows, in the order in which they are trained.
        reference: name of the row that the others are compared with, seed by seed.
        compare: the score that is compared.
        columns: scores that are shown, see `opteq.experiments.comparison`.
        measure: functions that score a trained network, by import path, see `opteq.experiments.measures`.
        curves: what is drawn as a curve: for each quantity, the rows for its values.
    """

    name: str
    title: str
    source: str
    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    reference: str
    compare: str
    columns: tuple[str, ...]
    measure: tuple[str, ...]
    curves: Mapping[str, Mapping[float, str]]

    def config_of(self, row: Row, seed: int) -> dict[str, Any]:
        """The configuration of one training of a row."""
        config = copy.deepcopy(dict(self.config))
        for name, value in row.changes.items():
            _assign(config, name, value)
        config["seed_everything"] = seed
        return config


def table_names() -> list[str]:
    """Names of the packaged tables."""
    return sorted(packaged(_PACKAGE))


def read_table(name_or_file: str) -> Table:
    """Read a packaged table, or a file of the same form.

    Raises:
        ConfigError: There is no such table, or it lacks something.
    """
    path = find_file(name_or_file, packaged(_PACKAGE), "table")
    return _table(path, read_yaml(path))


def _table(path: Path, content: Any) -> Table:
    required = {"title", "source", "config", "rows", "reference"}
    allowed = required | {"seeds", "compare", "columns", "measure", "curves"}
    if not isinstance(content, Mapping) or not required <= content.keys() <= allowed:
        raise ConfigError(
            f"Expected {path} to have {', '.join(sorted(required))} and at most"
            f" {', '.join(sorted(allowed - required))} beside them."
        )
    entries = content["rows"]
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"Expected `rows` of {path} to be a list of at least one row.")
    rows = tuple(_row(path, entry, content.get("seeds", 1)) for entry in entries)
    if len({slug(row.name) for row in rows}) < len(rows):
        raise ConfigError(f"Expected the rows of {path} to have names that differ in letters or digits.")
    curves = content.get("curves", {})
    if not isinstance(curves, Mapping) or not all(isinstance(curve, Mapping) for curve in curves.values()):
        raise ConfigError(f"Expected `curves` of {path} to map each quantity to its values and their rows.")
    names = [content["reference"], *(name for curve in curves.values() for name in curve.values())]
    if strange := [name for name in names if name not in [row.name for row in rows]]:
        raise ConfigError(f"Expected the reference and the curves of {path} to be rows, got {strange[0]}.")
    return Table(
        name=path.stem,
        title=content["title"],
        source=content["source"],
        config=with_base(content["config"]),
        rows=rows,
        reference=content["reference"],
        compare=content.get("compare", "test_accuracy"),
        columns=tuple(content.get("columns", ("test_accuracy", "parameters", "seconds_train"))),
        measure=tuple(content.get("measure", ())),
        curves=curves,
    )


def _row(path: Path, entry: Any, seeds: int) -> Row:
    if not isinstance(entry, Mapping) or not {"name"} <= entry.keys() <= {"name", "changes", "seeds"}:
        raise ConfigError(f"Expected the rows of {path} to have a name and at most changes and seeds.")
    row = Row(entry["name"], entry.get("changes") or {}, entry.get("seeds", seeds))
    if not isinstance(row.name, str) or not isinstance(row.changes, Mapping):
        raise ConfigError(
            f"Expected names of rows of {path} to be text and changes a mapping, got {dict(entry)}."
        )
    if not isinstance(row.seeds, int) or row.seeds < 1:
        raise ConfigError(
            f"Expected `seeds` of row {row.name} of {path} to be at least 1, got {row.seeds!r}."
        )
    return row


def _assign(config: dict[str, Any], name: str, value: Any) -> None:
    """Set the option with the dotted `name`, as on the command line; a mapping replaces what was there."""
    *parents, last = (part for part in name.split(".") if part != "init_args")
    for parent in parents:
        config = config.setdefault(parent, {})
        if not isinstance(config, dict):
            raise ConfigError(f"Cannot change {name}: {parent} is {config!r} and has no options of its own.")
        if "class_path" in config:
            config = config.setdefault("init_args", {})
    config[last] = copy.deepcopy(value)


def slug(text: str) -> str:
    """`text` as the name of a folder."""
    kept = "".join(c if (c.isalnum() and c.isascii()) or c == "." else "-" for c in text.lower())
    return "-".join(part for part in kept.split("-") if part)


def run_name(row: Row, seed: int) -> str:
    """Name of the run of one training."""
    return f"{slug(row.name)}-seed{seed}"


def trainings(table: Table) -> Sequence[tuple[Row, int]]:
    """All trainings: first every row once, then the second seeds, and so on."""
    most = max(row.seeds for row in table.rows)
    return [(row, seed) for seed in range(most) for row in table.rows if seed < row.seeds]
