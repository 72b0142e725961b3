"""The learning rate by a range test, before a training."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.seed import isolate_rng

from opteq.errors import ConfigError
from opteq.plots.training import draw_rates
from opteq.system.files import write_beside

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
    with isolate_rng(), _enough_epochs(trainer):
        finder = Tuner(trainer).lr_find(
            model, datamodule=data, min_lr=1e-6, num_training=STEPS, update_attr=False
        )
    rate = finder.suggestion(_SKIPPED) if finder else None
    if finder is None or rate is None:
        raise ConfigError("The losses of --find_lr suggest no learning rate; leave it out and choose one.")
    if trainer.is_global_zero:
        rates, losses = (finder.results[name][_SKIPPED:] for name in ("lr", "loss"))
        figure = draw_rates(rates, losses, rate)
        with write_beside(picture) as file:
            figure.savefig(file, format="png", dpi=150)
    return rate


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
