"""The folder that a training leaves behind.

========================= ====================== =======================================
`config.yaml`             resolved configuration `versions.json`    what it ran on
`metrics.csv`             one row per epoch      `tensorboard/`     the same for TensorBoard
`checkpoints/`            best and last          `summary.json`     results
`model.safetensors`       weights of the best    `model.json`       what the weights belong to
`report.html`             results to look at     `equilibrium.json`   what equilibria are worth
`learning_rate.png`       the curve of --find_lr
========================= ====================== =======================================
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from opteq.configs import read_config
from opteq.errors import ConfigError
from opteq.models.parts import check_trusted
from opteq.spelling import run_meant
from opteq.system.files import write_file
from opteq.training.checkpoints import BEST, LAST, read_checkpoint

CONFIG = "config.yaml"
METRICS = "metrics.csv"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class Run:
    """A folder, and what its training continues.

    Attributes:
        folder: The folder.
        checkpoint: The checkpoint whose state the training starts from; None for a fresh start.
        epochs: Number of epochs in the folder's metrics that the training continues.
    """

    folder: Path
    checkpoint: Path | None = None
    epochs: int = 0

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / CHECKPOINTS


def start_run(runs_dir: Path, name: str, checkpoint: Path | None = None) -> Run:
    """Create the folder of a run; if the name is taken, `-2`, `-3`, … is appended.

    Args:
        runs_dir: Folder of all runs.
        name: Name of the run.
        checkpoint: A checkpoint of another run to start from.

    Raises:
        ConfigError: The name is not that of a folder, or the checkpoint cannot be read.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(
            f"Expected --run to be a name of letters, digits, dots and dashes, got {name!r}; "
            "--runs_dir is for folders."
        )
    if checkpoint is not None:
        read_checkpoint(checkpoint)
    for number in count(1):
        folder = runs_dir / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return Run(folder, checkpoint)
    raise AssertionError("count() does not end")


def resume_run(folder: Path, model: Mapping[str, Any]) -> Run:
    """Go on in the folder of a run from its last checkpoint.

    Args:
        folder: The folder.
        model: The model's part of the configuration, which must be that of the run.

    Raises:
        ConfigError: The run has no readable checkpoint, or the model was configured otherwise.
    """
    checkpoint = folder / CHECKPOINTS / LAST
    path = folder / CONFIG
    if not checkpoint.is_file() and path.is_file():
        return Run(folder)  # interrupted in its first epoch
    epochs = read_checkpoint(checkpoint)["epoch"] + 1
    best = folder / CHECKPOINTS / BEST
    if best.is_file():
        # Needed at the end only, but better missed now.
        try:
            read_checkpoint(best)
        except ConfigError as error:
            raise ConfigError(f"{best} is damaged; move it away to resume without it.") from error
    if path.is_file():
        try:
            earlier = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
        except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is damaged; restore it or start a new run.") from error
        changes = _differences(earlier, model, "model")
        if changes:
            raise ConfigError(
                f"Cannot resume {folder} with other options: {'; '.join(changes)}. Leave them as they "
                "were, name another run with --run, or start a new one without --ckpt_path."
            )
    return Run(folder, checkpoint, epochs)


def latest_run(runs_dir: Path, name: str) -> Path:
    """Find the run `name`, `name-2`, … whose last checkpoint is the newest.

    One that was interrupted before its first checkpoint counts as the oldest.

    Raises:
        ConfigError: There is no such run.
    """
    pattern = re.compile(re.escape(name) + r"(-\d+)?")
    folders = [path.parent for path in runs_dir.glob(f"*/{CONFIG}")]
    matching = [folder for folder in folders if pattern.fullmatch(folder.name)]
    if not matching:
        raise ConfigError(
            f"There is no checkpoint {runs_dir / name / CHECKPOINTS / LAST} to resume from; start a new "
            "run without --ckpt_path, or name the run with --run and its folder with --runs_dir."
        )
    last = {folder: folder / CHECKPOINTS / LAST for folder in matching}
    return max(matching, key=lambda folder: last[folder].stat().st_mtime if last[folder].is_file() else 0)


def checkpoint_of(folder: Path) -> Path:
    """What a run is judged by: its best checkpoint or, where nothing was validated, its last."""
    best = folder / CHECKPOINTS / BEST
    return best if best.is_file() else best.with_name(LAST)


def checkpoint_options(folder: Path, trust: bool = False, checkpoint: str | None = None) -> list[str]:
    """The options that make `validate`, `test` or `predict` use a checkpoint of a run.

    Args:
        folder: The folder of the run.
        trust: Whether its configuration may name any class, see `opteq.load`.
        checkpoint: `"best"` or `"last"` for that of the run, or a file; the one that the run is judged by
            unless given.

    Raises:
        ConfigError: The folder is not that of a run, or names a class that is not trusted.
    """
    config = folder / CONFIG
    if not config.is_file():
        hint = run_meant(str(folder), CONFIG, "name one that opteq fit has made.")
        raise ConfigError(f"{folder} is not the folder of a run, for want of {config}; {hint}")
    if not trust:
        check_trusted(read_config(str(config)))
    if checkpoint is None:
        checkpoint = str(checkpoint_of(folder))
    elif f"{checkpoint}.ckpt" in (BEST, LAST):
        checkpoint = str(folder / CHECKPOINTS / f"{checkpoint}.ckpt")
    return ["--config", str(config), "--ckpt_path", checkpoint]


def run_folder(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint belongs to; the checkpoint's own where it lies elsewhere."""
    folder = checkpoint.parent
    return folder.parent if folder.name == CHECKPOINTS else folder


def save_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the resolved configuration, which `--config` reads again."""
    write_config(folder / CONFIG, config)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a configuration as YAML."""
    write_file(path, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).encode())


def _differences(before: Any, now: Any, name: str) -> list[str]:
    """Name the options that differ between two nested configurations."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        if before.get("class_path") != now.get("class_path"):  # their arguments have nothing in common
            before, now = ({"class_path": options.get("class_path")} for options in (before, now))
        keys = [*before, *(key for key in now if key not in before)]
        return [text for key in keys for text in _differences(before.get(key), now.get(key), f"{name}.{key}")]
    return [] if before == now else [f"{name.replace('.init_args', '')} was {before} and is now {now}"]
