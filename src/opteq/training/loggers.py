"""The loggers of a training: those that it has anyway, and others by name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from opteq.errors import ConfigError

LoggerName = Literal["csv", "tensorboard", "wandb"]

_STAGES = ("train", "val", "test")


class NamingTrainer(Trainer):
    """Lightning's trainer, whose `logger` in a configuration may be a name as well.

    Args:
        args: of Lightning's trainer.
        logger: those beside `metrics.csv` and TensorBoard; `csv` for that table alone, `tensorboard` for
            both, `wandb` for both and Weights & Biases; false for none.
        kwargs: of Lightning's trainer.
    """

    def __init__(
        self,
        *args: Any,
        logger: LoggerName | Logger | Iterable[Logger] | bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, logger=logger, **kwargs)  # pyright: ignore[reportArgumentType]


class TaggedTensorBoard(TensorBoardLogger):
    """Logs `train_loss` as `train/loss`, so that TensorBoard shows the curves of a stage together."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().log_metrics({_tag(name): value for name, value in metrics.items()}, step)


def tensorboard(folder: Path, last: dict[str, Any]) -> TaggedTensorBoard:
    """The logger for `tensorboard/` in the folder of a run, which goes on after a row of its table.

    What was logged later is hidden, as it will be logged again. The row itself is logged anew: a training
    that was killed after its checkpoint may not have come to that.
    """
    if not last:
        return TaggedTensorBoard(folder, name="tensorboard", version="")
    step = int(last["step"])
    logger = TaggedTensorBoard(folder, name="tensorboard", version="", purge_step=step)
    logger.log_metrics({name: float(value) for name, value in last.items() if name != "step" and value}, step)
    return logger


def wandb(folder: Path) -> WandbLogger:
    """The logger for Weights & Biases, with the name of the run, in the project opteq.

    Raises:
        ConfigError: if the package is missing.
    """
    try:
        return WandbLogger(name=folder.name, save_dir=folder, project="opteq")
    except ModuleNotFoundError as error:
        raise ConfigError("--trainer.logger wandb needs the package wandb: pip install wandb.") from error


def _tag(name: str) -> str:
    stage, _, quantity = name.partition("_")
    return f"{stage}/{quantity}" if stage in _STAGES and quantity else name
