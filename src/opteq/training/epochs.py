"""Epochs that depend on nothing but the seed, their number and what a checkpoint holds."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from opteq import native
from opteq.layer import EquilibriumLayer
from opteq.operators.base import forget_norms


class SameEpochs(Callback):
    """Makes an epoch after an interruption the one that would have been.

    Every epoch starts with random numbers of its own, drawn from the seed of the run and the number of the
    epoch, with loaders that start afresh, and without estimates of norms that followed earlier weights. The
    seed goes into the checkpoints. All processes draw the same numbers, so that samplers which are dealt out
    among them agree. Compiled code rounds in another way than PyTorch: where an earlier part of the training
    had the one and there is the other now, the log says so.

    Attributes:
        seed: That of the run; known once the training starts.
        compiled: Whether solves use compiled code; None before the training starts, and where there are none.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.compiled: bool | None = None
        self._is_first = True
        self._generators: dict[torch.Generator, int] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_first = True
        if self.seed is None:
            self.seed = torch.initial_seed()
        if pl_module.device.type != "cpu" or not _solves(pl_module):
            return
        before, self.compiled = self.compiled, native.available()
        if before not in (None, self.compiled):
            rank_zero_info(
                f"The training goes on {'with' if self.compiled else 'without'} compiled code, unlike before,"
                f" and its numbers differ from those of a training without a break: {native.status()}"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seed, numpy_seed = _seeds(self.seed or 0, trainer.current_epoch)
        random.seed(seed)
        np.random.seed(numpy_seed)
        torch.manual_seed(seed)
        forget_norms(pl_module)
        for loader in CombinedLoader([trainer.train_dataloader, trainer.val_dataloaders]).flattened:
            if isinstance(loader, DataLoader):
                self._start_afresh(loader, trainer.current_epoch)
        if self._is_first:
            # Lightning has drawn from the loader already, before it knew which epoch this is.
            iter(trainer.fit_loop._data_fetcher)  # pyright: ignore[reportCallIssue, reportArgumentType]
            self._is_first = False

    def _start_afresh(self, loader: DataLoader, epoch: int) -> None:
        # Workers that persist would go on with the random numbers of the epochs before.
        loader._iterator = None
        for generator in (loader.generator, getattr(loader.sampler, "generator", None)):
            if generator is not None:
                own = self._generators.setdefault(generator, generator.initial_seed())
                generator.manual_seed(_seeds(own, epoch)[0])

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "compiled": self.compiled}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seed = state_dict["seed"]
        self.compiled = state_dict.get("compiled")


def _seeds(seed: int, epoch: int) -> tuple[int, int]:
    """Two numbers that look random, of 32 bits."""
    first, second = np.random.SeedSequence([seed, epoch]).generate_state(2)
    return int(first), int(second)


def _solves(module: LightningModule) -> bool:
    return any(isinstance(part, EquilibriumLayer) for part in module.modules())
