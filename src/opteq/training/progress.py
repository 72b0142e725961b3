"""How far a training or an evaluation is: Lightning's bar on a terminal, elsewhere a line now and then."""

import math
import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from opteq.system.progress import Pace, Progress, duration


def progress_bar() -> ProgressBar:
    """The one that suits what stdout is."""
    return TrainingBar() if sys.stdout.isatty() else TrainingLines()


class TrainingBar(TQDMProgressBar):
    """Lightning's bar of an epoch, with the time that the rest of the whole training takes."""

    def __init__(self) -> None:
        super().__init__()
        self._pace = Pace(None)

    def on_train_start(self, *args: Any) -> None:
        self._pace = Pace(_batches_left(args[0]))
        super().on_train_start(*args)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._pace.advance()
        super().on_train_batch_end(*args, **kwargs)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics, left = super().get_metrics(trainer, pl_module), self._pace.left
        return metrics | ({"left": duration(left)} if trainer.training and left is not None else {})


class TrainingLines(ProgressBar):
    """What `Progress` tells, where nobody would see Lightning's bar move."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled, self._progress = True, Progress("", None)

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("Training", _batches_left(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        numbers = [f"{name} {value:.3g}" for name, value in trainer.progress_bar_metrics.items()]
        self._progress.what = ", ".join([f"Epoch {trainer.current_epoch + 1}", *numbers])
        self._advance()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._progress.close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _is_own(trainer):
            self._begin("Validation", sum(trainer.num_val_batches))

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if _is_own(trainer):
            self._advance()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _is_own(trainer):
            self._progress.close()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("Test", sum(trainer.num_test_batches))

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._advance()

    def on_test_end(self, *args: Any, **kwargs: Any) -> None:
        self._progress.close()

    def _begin(self, what: str, batches: float) -> None:
        self._progress.close()
        self._progress = Progress(what, batches if math.isfinite(batches) else None)

    def _advance(self) -> None:
        if self._enabled:
            self._progress.advance()


def _is_own(trainer: Trainer) -> bool:
    """Whether a validation is that of the command and not of a training."""
    return trainer.state.fn == TrainerFn.VALIDATING


def _batches_left(trainer: Trainer) -> float:
    """The training batches that are still to come."""
    return (trainer.estimated_stepping_batches - trainer.global_step) * trainer.accumulate_grad_batches
