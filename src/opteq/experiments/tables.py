"""Tables of trainings, written in YAML: one configuration and, row by row, what changes in it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opteq.configs import find_file, packaged, read_yaml, with_base
from opteq.errors import ConfigError
from opteq.options import require, strict_options

_PACKAGE = "opteq.experiments"


@strict_options
@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        name: what the row is called, and its runs are named after.
        changes: new values of options, by their dotted names.
        seeds: number of trainings, with seeds 0, 1, 2, …; that of the table unless given.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1

    def __post_init__(self) -> None:
        require(isinstance(self.changes, Mapping), self, "changes", "a mapping")
        require(self.seeds >= 1, self, "seeds", "at least 1")


@strict_options
@dataclass(frozen=True)
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
    rows: Sequence[Row]
    reference: str
    compare: str = "test_accuracy"
    columns: Sequence[str] = ("test_accuracy", "parameters", "seconds_train")
    measure: Sequence[str] = ()
    curves: Mapping[str, Mapping[float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(isinstance(self.config, Mapping), self, "config", "a mapping")
        curves = isinstance(self.curves, Mapping) and all(
            isinstance(c, Mapping) for c in self.curves.values()
        )
        require(curves, self, "curves", "a mapping of each quantity to its values and their rows")
        names = {slug(row.name): row.name for row in self.rows}
        if len(names) < len(self.rows):
            raise ConfigError("Expected rows with names that differ in letters or digits.")
        for name in (self.reference, *(name for curve in self.curves.values() for name in curve.values())):
            if name not in names.values():
                raise ConfigError(f"Expected the reference and the curves to be rows, got {name}.")

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
    content = read_yaml(path)
    if not isinstance(content, Mapping) or not isinstance(content.get("rows"), list) or not content["rows"]:
        raise ConfigError(f"Expected `rows` of {path} to be a list of at least one row.")
    options = {name: value for name, value in content.items() if name != "seeds"}
    try:
        rows = [Row(**{"seeds": content.get("seeds", 1), **entry}) for entry in content["rows"]]
        table = Table(name=path.stem, **{**options, "rows": rows})
        return replace(table, config=with_base(table.config))
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


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
