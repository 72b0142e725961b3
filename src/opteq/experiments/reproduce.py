"""Training the rows of a table, one run folder each, and going on after a stop."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from opteq.configs import read_yaml
from opteq.data.base import ImageDataModule
from opteq.errors import ConfigError
from opteq.experiments.finished import SCORES
from opteq.experiments.tables import Row, Table, run_name, trainings
from opteq.models.loading import load
from opteq.models.parts import build
from opteq.system.files import read_json, write_json
from opteq.system.locks import exclusive
from opteq.system.progress import Pace, duration
from opteq.training.checkpoints import LAST
from opteq.training.command import run_command
from opteq.training.runs import CHECKPOINTS, CONFIG, write_config
from opteq.training.summary import SUMMARY

PLAN = "plan.json"

Measure = Callable[[nn.Module, ImageDataModule], Mapping[str, float]]


def reproduce(table: Table, output: Path, options: Sequence[str], report: Callable[[str], None]) -> None:
    """Train what is missing of `table` in `output`; each run is that of an `opteq fit` command.

    Runs that are complete are kept, one that was interrupted goes on from its last checkpoint. A run that
    another table in a folder beside `output` has trained, configured alike, is copied. `report` is called
    after every run, with what to tell the user and an estimate of the time that the others take.

    Args:
        table: what to train.
        output: folder of the runs, one per row and seed.
        options: options of `opteq fit` that apply to all rows.
        report: receives one sentence per run.

    Raises:
        ConfigError: `output` belongs to another table or other options, or another process is at work there.
    """
    measures = [_find(path) for path in table.measure]
    output.mkdir(parents=True, exist_ok=True)
    with exclusive(output), _going_on():
        _keep_plan(table, output, options)
        todo = [(row, seed, output / run_name(row, seed)) for row, seed in trainings(table)]
        missing = [(number, *run) for number, run in enumerate(todo, 1) if not (run[2] / SCORES).is_file()]
        pace = Pace(len(missing))
        for number, row, seed, folder in missing:
            twin = None if folder.is_dir() else _twin(row.config_of(seed), output, options)
            if twin is not None:
                shutil.copytree(twin, folder, ignore=shutil.ignore_patterns(SCORES))
            elif not (folder / SUMMARY).is_file():
                _train(table, row, seed, output, options)
            scores = _scores(folder, measures)
            if table.compare not in scores:
                raise ConfigError(
                    f"There is no score {table.compare} to compare in {folder};"
                    f" there are {', '.join(scores)}."
                )
            write_json(folder / SCORES, scores)
            score = f"{table.compare} {scores[table.compare]:.4g}"
            pace.advance()
            left = f"; about {duration(pace.left)} left" if pace.left else ""
            source = f" (of {twin.parent.name}, trained alike)" if twin else ""
            report(f"[{number}/{len(todo)}] {row.name}, seed {seed}: {score}{source}{left}")


@contextmanager
def _going_on() -> Iterator[None]:
    """Let an interrupt say how the table goes on, in place of how the run that it met does."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "Interrupted; finished runs are kept, and the same command goes on."
        ) from None


def _twin(config: Mapping[str, Any], output: Path, options: Sequence[str]) -> Path | None:
    """A finished run of a table beside `output` with this configuration and these options."""
    for plan in sorted(output.resolve().parent.glob(f"*/{PLAN}")):
        if plan.parent == output.resolve():
            continue
        earlier = read_json(plan)
        if earlier.get("options") == list(options):
            for name, known in earlier.get("configs", {}).items():
                if known == config and (plan.parent / name / SUMMARY).is_file():
                    return plan.parent / name
    return None


def _train(table: Table, row: Row, seed: int, output: Path, options: Sequence[str]) -> None:
    name = run_name(row, seed)
    config = output / f"{name}.yaml"
    write_config(config, row.config_of(seed))
    arguments = ["fit", "--config", str(config), "--runs_dir", str(output), "--run", name]
    # A report takes as long as some epochs of a small network; who wants it can ask for it.
    arguments += ["--report", "false", *options]
    folder = output / name
    if (folder / CHECKPOINTS / LAST).is_file():
        arguments += ["--ckpt_path", "last"]
    elif folder.is_dir():
        # Stopped before the first checkpoint: there is nothing to go on from.
        shutil.rmtree(folder)
    run_command(arguments)


def _keep_plan(table: Table, output: Path, options: Sequence[str]) -> None:
    """Write down what `output` is made from; refuse to mix it with something else."""
    configs = {run_name(row, seed): row.config_of(seed) for row, seed in trainings(table)}
    plan = {"table": table.name, "options": list(options), "configs": configs}
    path = output / PLAN
    if path.is_file():
        earlier = read_json(path)
        if not {"options", "configs"} <= earlier.keys():
            raise ConfigError(f"{path} is damaged; choose another --output.")
        changed = [name for name, config in configs.items() if earlier["configs"].get(name, config) != config]
        # A mistake in the options of an earlier call has trained nothing, and is no reason to refuse.
        started = any((output / name).is_dir() for name in earlier["configs"])
        if started and (earlier["options"] != plan["options"] or changed):
            what = f"its row {changed[0]} was" if changed else f"options {' '.join(earlier['options'])} were"
            raise ConfigError(f"{output} was made when {what} different; choose another --output.")
    write_json(path, plan)


def _find(path: str) -> Measure:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"There is no function {path} to measure with.") from error


def _scores(folder: Path, measures: Sequence[Measure]) -> dict[str, Any]:
    """What the training of a run says of itself, and what is measured on its test set."""
    scores = read_json(folder / SUMMARY)
    if measures:
        data = build(read_yaml(folder / CONFIG)["data"], trust=True)  # trained here, from what the user named
        data.prepare_data()
        data.setup("test")
        # A network of its own for each: a training step, timed, moves the statistics of batch norms.
        for measure in measures:
            scores |= measure(load(folder, trust=True), data)
    return scores
