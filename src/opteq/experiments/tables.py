"""Tables of trainings, written in YAML: one configuration and, row by row, what changes in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from opteq.configs import find_file, overlaid, packaged, read_yaml, with_base
from opteq.errors import ConfigError
from opteq.options import check_choice, require, strict_options

_PACKAGE = "opteq.experiments"

SCALES = ("smoke", "small", "full")
"""`"full"` is the setting of the paper, `"small"` one for a few processor cores, `"smoke"` the small one cut
down to a few steps on noise, which shows that everything runs."""

_SHARED = ("config", "seeds", "by_seed", "scales")
_OF_ROWS = ("name", "changes", "seeds", "published", "only", *SCALES[1:])


@strict_options
@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        name: what the row is called, and its runs are named after.
        config: configuration of `opteq fit`, but for the seed.
        seeds: number of trainings, with seeds 0, 1, 2, …
        published: what the paper prints, by score; in the unit of the score, so 0.874 for 87.4 %.
        by_seed: for the dotted name of an option its values for the seeds 0, 1, 2, …, such as the folds of a
            data set.
    """

    name: str
    config: Mapping[str, Any]
    seeds: int = 1
    published: Mapping[str, float] = field(default_factory=dict)
    by_seed: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.seeds >= 1, self, "seeds", "at least 1")
        require(isinstance(self.published, Mapping), self, "published", "a mapping of scores to numbers")
        folds = isinstance(self.by_seed, Mapping) and all(
            isinstance(values, Sequence) and len(values) >= self.seeds for values in self.by_seed.values()
        )
        require(folds, self, "by_seed", f"a mapping of options to lists of {self.seeds} values")

    def config_of(self, seed: int) -> dict[str, Any]:
        """The configuration of one training."""
        config = {**copy.deepcopy(dict(self.config)), "seed_everything": seed}
        for name, values in self.by_seed.items():
            _assign(config, name, values[seed])
        return config


@strict_options
@dataclass(frozen=True)
class Claim:
    """One row is better than another, says the paper.

    Attributes:
        better: name of the one.
        worse: name of the other.
        score: in what; the compared score of the table unless given.
    """

    better: str
    worse: str
    score: str | None = None


@strict_options
@dataclass(frozen=True)
class Table:
    """What is trained and compared, at one scale.

    Attributes:
        name: name of the table.
        title: one line about it.
        source: the table or figure of a paper that it answers.
        rows: the rows, in the order in which they are trained.
        reference: name of the row that the others are compared with, seed by seed.
        compare: the score that is compared.
        columns: scores that are shown, see `opteq.experiments.comparison`.
        measure: functions that score a trained network, by import path, see `opteq.experiments.measures`.
        curves: what is drawn as a curve: for each quantity, the rows for its values.
        claims: the orderings that the paper finds, or that the table asks after.
        scale: one of `SCALES`.
        setting: one line about what is trained at this scale.
        paper: the same of the paper's own setting.
    """

    name: str
    title: str
    source: str
    rows: Sequence[Row]
    reference: str
    compare: str = "test_accuracy"
    columns: Sequence[str] = ("test_accuracy", "parameters", "seconds_train")
    measure: Sequence[str] = ()
    curves: Mapping[str, Mapping[float, str]] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    scale: str = "small"
    setting: str = ""
    paper: str = ""

    def __post_init__(self) -> None:
        curves = isinstance(self.curves, Mapping) and all(
            isinstance(c, Mapping) for c in self.curves.values()
        )
        require(curves, self, "curves", "a mapping of each quantity to its values and their rows")
        names = {slug(row.name): row.name for row in self.rows}
        if len(names) < len(self.rows):
            raise ConfigError("Expected rows with names that differ in letters or digits.")
        curved = [name for curve in self.curves.values() for name in curve.values()]
        claimed = [name for claim in self.claims for name in (claim.better, claim.worse)]
        for name in (self.reference, *curved, *claimed):
            if name not in names.values():
                raise ConfigError(f"Expected the reference, curves and claims to be of rows, got {name}.")


def table_names() -> list[str]:
    """Names of the packaged tables."""
    return sorted(packaged(_PACKAGE))


def scales_of(name_or_file: str) -> list[str]:
    """The scales at which a table can be trained, from the smallest."""
    return _scales_in(_read(name_or_file)[1])


def read_scales(name_or_file: str) -> list[Table]:
    """Read a table at each of its scales, from the smallest, as `read_table` does; not at `smoke`."""
    path, content = _read(name_or_file)
    return [_table(path, content, scale) for scale in _scales_in(content) if scale != "smoke"]


def read_table(name_or_file: str, scale: str = "small") -> Table:
    """Read a packaged table, or a file of the same form.

    The file holds the fields of `Table`, of which each of its `scales` may replace any, and besides

    - `config`, a configuration of `opteq fit` that all rows share, which may name a `base`; that of a scale
      is laid over it;
    - `seeds`, the number of trainings of a row that says nothing else, and `by_seed`, see `Row`;
    - for each row `changes`, new values of options by their dotted names, and more of them by the name of a
      scale; a `base` among them takes the place of the shared one. A row with `only` is one of that scale.

    Raises:
        ConfigError: There is no such table or scale, or it lacks something.
    """
    check_choice("scale", scale, SCALES)
    path, content = _read(name_or_file)
    return _table(path, content, scale)


def _table(path: Path, content: Mapping[str, Any], scale: str) -> Table:
    scales, read_as = _scales(content), "small" if scale == "smoke" else scale
    if read_as not in scales:
        raise ConfigError(f"{path} has no scale {scale}; it has {', '.join(_scales_in(content))}.")
    own = scales[read_as]
    fields = {**content, **own}
    shared = overlaid(content.get("config", {}), own.get("config", {}))
    if not isinstance(shared, Mapping):
        raise ConfigError(f"{path}: Expected `config` to be a mapping, got {shared!r}.")
    options = {name: value for name, value in fields.items() if name not in _SHARED}
    common = {name: fields[name] for name in ("seeds", "by_seed") if name in fields}

    @cache
    def shared_with(base: str | None) -> Mapping[str, Any]:
        return with_base(shared if base is None else {**shared, "base": base})

    try:
        rows = [
            _row(entry, shared_with, common, read_as)
            for entry in fields["rows"]
            if _mapping(entry).get("only", read_as) == read_as
        ]
        claims = _claims(content["rows"], rows, options.get("claims", ()))
        options |= {"rows": rows, "claims": claims, "scale": scale}
        paper = scales.get("full", {}).get("setting", "")
        return Table(**{"name": path.stem, "paper": paper, **options})
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _claims(entries: Sequence[Any], rows: Sequence[Row], claims: Sequence[Any]) -> list[Claim]:
    """The claims about rows of this scale; those about rows of another are for that."""
    known, here = {entry.get("name") for entry in entries}, {row.name for row in rows}
    made = [Claim(**claim) for claim in claims]
    for name in (name for claim in made for name in (claim.better, claim.worse)):
        if name not in known:
            raise ConfigError(f"Expected the reference, curves and claims to be of rows, got {name}.")
    return [claim for claim in made if {claim.better, claim.worse} <= here]


def _read(name_or_file: str) -> tuple[Path, Mapping[str, Any]]:
    path = find_file(name_or_file, packaged(_PACKAGE), "table")
    content = read_yaml(path)
    if not isinstance(content, Mapping) or not isinstance(content.get("rows"), list) or not content["rows"]:
        raise ConfigError(f"Expected `rows` of {path} to be a list of at least one row.")
    scales = _scales(content)
    known = isinstance(scales, Mapping) and scales and set(scales) <= set(SCALES[1:])
    if not known or not all(isinstance(scale, Mapping) for scale in scales.values()):
        raise ConfigError(f"Expected `scales` of {path} to be a mapping of small, full or both to options.")
    return path, content


def _scales(content: Mapping[str, Any]) -> Mapping[str, Any]:
    return content.get("scales", {"small": {}})


def _scales_in(content: Mapping[str, Any]) -> list[str]:
    return [scale for scale in SCALES if scale == "smoke" or scale in _scales(content)]


def _row(
    entry: Mapping[str, Any],
    shared_with: Callable[[str | None], Mapping[str, Any]],
    common: Mapping[str, Any],
    scale: str,
) -> Row:
    unknown = [name for name in entry if name not in _OF_ROWS]
    if unknown:
        raise ConfigError(f"A row has no {unknown[0]!r}; it has {', '.join(_OF_ROWS)}.")
    own = {name: entry[name] for name in ("name", "seeds", "published") if name in entry}
    changes = {**_mapping(entry.get("changes", {})), **_mapping(entry.get(scale, {}))}
    config = copy.deepcopy(dict(shared_with(changes.pop("base", None))))
    for name, value in changes.items():
        _assign(config, name, value)
    return Row(**{**common, **own, "config": config})


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"Expected rows and their changes to be mappings, got {value!r}.")
    return value


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
    text = text.replace("*", " star ").replace("†", " dagger ").lower()
    kept = "".join(c if (c.isalnum() and c.isascii()) or c == "." else "-" for c in text)
    return "-".join(part for part in kept.split("-") if part)


def run_name(row: Row, seed: int) -> str:
    """Name of the run of one training."""
    return f"{slug(row.name)}-seed{seed}"


def trainings(table: Table) -> Sequence[tuple[Row, int]]:
    """All trainings: first every row once, then the second seeds, and so on."""
    most = max(row.seeds for row in table.rows)
    return [(row, seed) for seed in range(most) for row in table.rows if seed < row.seeds]
