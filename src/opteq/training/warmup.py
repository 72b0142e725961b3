"""A few unrolled iterations in place of solves at the start of a training."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from opteq.gradients.base import GradientMethod
from opteq.gradients.unrolled import Unrolled
from opteq.layer import EquilibriumLayer
from opteq.options import check_counts


class UnrolledWarmup(Callback):
    """For the first steps of the optimizer equilibrium layers run plain iterations, differentiated through.

    Weights at their start need not make a map that contracts, and a few weight-tied layers train all the same
    (Bai et al. 2020, §3). Only training batches are affected: validation, tests and checkpoints see the
    layers as they were configured. Products are as exact as those of the solves that they stand in for.

    Add it with `--trainer.callbacks+=opteq.training.warmup.UnrolledWarmup`.

    It also makes a training cheaper: with `steps=0.7` and `iterations=1` most of it does without solves.

    Args:
        steps: of the optimizer; a number below 1 is their share of the training.
        iterations: that are unrolled.

    Raises:
        ConfigError: for numbers out of range.
    """

    def __init__(self, steps: int | float = 20_000, iterations: int = 10) -> None:
        if not (isinstance(steps, float) and 0 < steps < 1):
            check_counts(steps=steps)
        check_counts(iterations=iterations)
        self.steps, self.iterations = steps, iterations
        self._own: list[tuple[EquilibriumLayer, GradientMethod]] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        whole = trainer.estimated_stepping_batches if self.steps < 1 else 1
        warming = trainer.global_step < self.steps * whole
        layers = [m for m in pl_module.modules() if isinstance(m, EquilibriumLayer)] if warming else []
        self._own = [(layer, layer.gradient) for layer in layers]
        for layer in layers:
            layer.gradient = Unrolled(self.iterations, error=layer.error)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for layer, gradient in self._own:
            layer.gradient = gradient
