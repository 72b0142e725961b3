"""Evaluations of a checkpoint by name: each leaves a JSON file and figures in the folder of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from opteq.data.facts import Facts
from opteq.errors import ConfigError
from opteq.evaluation.parts import Parts
from opteq.evaluation.suites.attacks import attacks
from opteq.evaluation.suites.case import Case, Outcome, SuiteOptions
from opteq.evaluation.suites.corruptions import corruptions
from opteq.evaluation.suites.equilibrium import equilibrium
from opteq.evaluation.suites.names import SUITES
from opteq.evaluation.suites.ood import ood
from opteq.evaluation.suites.saliency import saliency
from opteq.evaluation.suites.segmentation import segmentation
from opteq.evaluation.suites.subclasses import subclasses
from opteq.evaluation.table import Table
from opteq.system.files import check_folder, write_beside

FOLDER = "evaluation"


# Named as in `SUITES`.
_FUNCTIONS = (corruptions, attacks, ood, subclasses, saliency, equilibrium, segmentation)
_RUN: dict[str, Callable[[Case], Outcome]] = {function.__name__: function for function in _FUNCTIONS}


def run_suites(
    names: Sequence[str],
    network: nn.Module,
    data: Facts,
    folder: Path,
    of: Mapping[str, Any],
    options: SuiteOptions,
) -> str:
    """Evaluate a network and write `NAME.json` and `NAME.png` for each suite into `folder/evaluation`.

    What the files hold of the same evaluation is not computed again.

    Args:
        names: of the suites, see `opteq.evaluation.suites.names`.
        network: the network; evaluated where its parameters are, in eval mode.
        data: the data, set up for the test stage.
        folder: of the run.
        of: what is evaluated, in plain values; with others the evaluation starts anew.
        options: what can be chosen.

    Returns:
        The tables, and what was written.

    Raises:
        ConfigError: if a suite is not for such a network or data, or a folder is missing.
    """
    for name in names:
        task = SUITES[name].task
        if task is not None and data.task != task:
            raise ConfigError(f"The suite {name} is for {task}, but {data.title} is for {data.task}.")
    for path in (options.corrupted, options.unknown):
        if path is not None:
            check_folder(Path(path))
    return "\n\n".join(_run(name, network, data, folder / FOLDER, of, options) for name in names)


def digest(path: Path) -> str:
    """What tells the content of a file from any other."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(
    name: str, network: nn.Module, data: Facts, folder: Path, of: Mapping[str, Any], options: SuiteOptions
) -> str:
    chosen = {option: getattr(options, option) for option in ("images", *SUITES[name].options)}
    parts = Parts(folder / f"{name}.json", {"suite": name, **of, **chosen})
    written = parts.content.get("figures", [])
    if "tables" not in parts.content or not all((folder / file).is_file() for file in written):
        outcome = _RUN[name](Case(network, data, options, parts))
        written = [f"{name}{end and f'-{end}'}.png" for end in outcome.figures]
        folder.mkdir(exist_ok=True)
        for path, figure in zip(written, outcome.figures.values(), strict=True):
            with write_beside(folder / path) as file:
                figure.savefig(file, format="png", dpi=150)
        found = [asdict(table) for table in outcome.tables]
        # Last, since with it the evaluation counts as complete.
        parts.write(scores=outcome.scores, figures=written, tables=found)
    texts = [str(Table(**table)) for table in parts.content["tables"]]
    return "\n\n".join([*texts, f"Wrote {name}.json, {', '.join(written)} into {folder}."])
