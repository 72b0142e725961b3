"""Evaluations of a checkpoint by name: each leaves a JSON file and figures in the folder of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from opteq.data.facts import Facts, Task
from opteq.errors import ConfigError
from opteq.evaluation.parts import Parts
from opteq.evaluation.suites.attacks import attacks
from opteq.evaluation.suites.case import Case, Outcome, SuiteOptions
from opteq.evaluation.suites.corruptions import corruptions
from opteq.evaluation.suites.equilibrium import equilibrium
from opteq.evaluation.suites.ood import ood
from opteq.evaluation.suites.saliency import saliency
from opteq.evaluation.suites.segmentation import segmentation
from opteq.evaluation.suites.subclasses import subclasses
from opteq.evaluation.table import Table
from opteq.spelling import did_you_mean
from opteq.system.files import write_beside

FOLDER = "evaluation"


class Suite(NamedTuple):
    """An evaluation, the options that it has, and what it is for; None for all."""

    run: Callable[[Case], Outcome]
    options: tuple[str, ...] = ()
    task: Task | None = "classification"


SUITES = {
    "corruptions": Suite(corruptions, ("corrupted",)),
    "attacks": Suite(attacks, ("epsilons", "restarts", "autoattack")),
    "ood": Suite(ood, ("unknown",)),
    "subclasses": Suite(subclasses),
    "saliency": Suite(saliency),
    "equilibrium": Suite(equilibrium, task=None),
    "segmentation": Suite(segmentation, task="segmentation"),
}


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
        names: of the suites, see `suite_names`.
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
        if path is not None and not Path(path).is_dir():
            raise ConfigError(f"The folder {path} does not exist.")
    return "\n\n".join(_run(name, network, data, folder / FOLDER, of, options) for name in names)


def suite_names(text: str) -> list[str]:
    """The suites in a list like `corruptions,attacks`.

    Raises:
        ConfigError: if there is no suite of a name.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SUITES:
            hint = did_you_mean(name, SUITES, f"suites are {', '.join(SUITES)}.")
            raise ConfigError(f"There is no suite {name!r}; {hint}")
    return list(dict.fromkeys(names))


def digest(path: Path) -> str:
    """What tells the content of a file from any other."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(
    name: str, network: nn.Module, data: Facts, folder: Path, of: Mapping[str, Any], options: SuiteOptions
) -> str:
    suite = SUITES[name]
    chosen = {option: getattr(options, option) for option in ("images", *suite.options)}
    parts = Parts(folder / f"{name}.json", {"suite": name, **of, **chosen})
    written = parts.content.get("figures", [])
    if "tables" not in parts.content or not all((folder / file).is_file() for file in written):
        outcome = suite.run(Case(network, data, options, parts))
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
