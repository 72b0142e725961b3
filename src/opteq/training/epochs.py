"""Epochs that depend on nothing but the seed, their number and what a checkpoint holds."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from opteq.operators.base import forget_norms


class SameEpochs(Callback):
    """Makes an epoch after an interruption the one that would have been.

    Every epoch starts with random numbers of its own, drawn from the seed of the run and the number of the
    epoch, with loaders that start afresh, and without estimates of norms that followed earlier weights. The
    seed goes into the checkpoints. All processes draw the same numbers, so that samplers which are dealt out
    among them agree.

    Attributes:
        seed: That of the run; known once the training starts.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self._is_first = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_first = True
        if self.seed is None:
            self.seed = torch.initial_seed()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seed, numpy_seed = np.random.SeedSequence([self.seed or 0, trainer.current_epoch]).generate_state(2)
        random.seed(int(seed))
        np.random.seed(numpy_seed)
        torch.manual_seed(int(seed))
        forget_norms(pl_module)
        if self._is_first:
            # Lightning has drawn from the loader already, before it knew which epoch this is.
            iter(trainer.fit_loop._data_fetcher)  # pyright: ignore[reportCallIssue, reportArgumentType]
            self._is_first = False

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seed = state_dict["seed"]
