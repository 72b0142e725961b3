"""Keeps what Lightning prints to what concerns the user's training."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Advertisements for other products, accelerators that are not there, and internal steps.
NOISE = (
    "💡",
    "GPU available",
    "TPU available",
    "HPU available",
    "Loading `train_dataloader` to",
    "`weights_only` was not set",
    # The command says itself what it goes on from, once.
    "Restoring states from the checkpoint",
    "Restored all states from the checkpoint",
    # As the configuration says.
    "Seed set to",
    "`Trainer.fit` stopped: `max_epochs=",
)

LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "lightning.fabric.utilities.seed",
)

# Warnings that no user of the command can act on, or that are wrong here.
IGNORED_WARNINGS = (
    # Data sets live in memory; worker processes would slow them down.
    r"The '\w+' does not have many workers",
    # One row of metrics per epoch is what we want.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    # Resuming goes on in the folder of the run.
    r"Checkpoint directory .* exists and is not empty",
    # What is there twice is not counted twice, see `opteq.training.shares`.
    r"Using `DistributedSampler` with the dataloaders",
    # Data need not be validated on; the outcome says which checkpoint was tested.
    r"You defined a `validation_step` but have no `val_dataloader`",
    # Evaluating a checkpoint needs none of the callbacks of the training.
    r"Be aware that when using `ckpt_path`, callbacks",
    # From where it starts to average, its schedule takes the place of ours.
    r"SWA is currently only supported every epoch",
    # Lightning calls names that its dependencies have deprecated.
    r"(?s).*JsonargparseDeprecationWarning",
    r"(?s).*``instantiate_classes`` was deprecated",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


def quiet_lightning() -> None:
    """Filter Lightning's messages and warnings for the rest of the process."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if _concerns_user not in logger.filters:
            logger.addFilter(_concerns_user)
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def silent_lightning() -> Iterator[None]:
    """Keep back all messages, not warnings, of what is no training of the user's."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _concerns_user(record: logging.LogRecord) -> bool:
    # Of several processes each has its number in front.
    return not re.sub(r"^\[rank: \d+\] ", "", record.getMessage()).startswith(NOISE)
