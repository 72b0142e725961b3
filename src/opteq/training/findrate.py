"""The learning rate by a range test, before a training."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray

from opteq.errors import ConfigError
from opteq.plots.training import draw_rates
from opteq.system.files import write_beside
from opteq.training.console import silent_lightning

STEPS = 100
# The first losses, which Lightning's smoothing leaves too low.
_SKIPPED = 10


def find_learning_rate(
    trainer: Trainer, model: LightningModule, data: LightningDataModule, picture: Path
) -> float:
    """The rate at which the loss falls most steeply while the rate rises from 1e-6 to 1 (Smith 2017).

    Lightning's `Tuner` takes 100 steps, fewer if the loss explodes, and undoes them. The losses are drawn
    into `picture`.

    Raises:
        ConfigError: if the losses suggest none.
    """
    with isolate_rng(), _enough_epochs(trainer), _without_bar(), silent_lightning():
        finder = Tuner(trainer).lr_find(
            model, datamodule=data, min_lr=1e-6, num_training=STEPS, update_attr=False
        )
    found = finder.results if finder else {"lr": [], "loss": []}
    rates, losses = (np.array(found[name][_SKIPPED:], np.float64) for name in ("lr", "loss"))
    rate = steepest(rates, losses)
    if trainer.is_global_zero:
        figure = draw_rates(rates, losses, rate)
        with write_beside(picture) as file:
            figure.savefig(file, format="png", dpi=150)
    return rate


def steepest(rates: NDArray[np.float64], losses: NDArray[np.float64]) -> float:
    """The rate at which the loss falls most steeply on a log scale of rates.

    Lightning's own suggestion goes by a linear scale, on which the smallest rates always win.

    Raises:
        ConfigError: if there are too few losses to tell.
    """
    known = np.isfinite(losses)
    if known.sum() < 2:
        raise ConfigError("The losses of --find_lr suggest no learning rate; leave it out and choose one.")
    slopes = np.gradient(losses[known], np.log(rates[known]))
    return float(rates[known][slopes.argmin()])


@contextmanager
def _without_bar() -> Iterator[None]:
    """Lightning's bar, where it is no bar but a line for every step, goes nowhere."""
    if sys.stderr.isatty():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        yield


@contextmanager
def _enough_epochs(trainer: Trainer) -> Iterator[None]:
    """So many that a short training, too, has the steps of the test."""
    loop, epochs = trainer.fit_loop, trainer.fit_loop.max_epochs
    if epochs is not None and epochs >= 0:
        loop.max_epochs = max(epochs, STEPS)
    try:
        yield
    finally:
        loop.max_epochs = epochs
