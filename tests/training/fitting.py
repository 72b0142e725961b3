"""A training of a few steps for tests of callbacks."""

import warnings

from lightning.pytorch import Callback, Trainer
from torch import nn

from opteq.data.digits import Digits
from opteq.training.module import ClassifierModule


def fit_eight_steps(network: nn.Module, *callbacks: Callback) -> None:
    """Two epochs of four batches of digits, each epoch followed by a validation."""
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message=".*LeafSpec")
        trainer.fit(ClassifierModule(network), datamodule=Digits(batch_size=32, train_limit=128))
