"""Solver tolerances that follow the training: loose early, tight late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from opteq.errors import ConfigError
from opteq.gradients.implicit import Implicit
from opteq.layer import EquilibriumLayer


class FollowingTolerance(Callback):
    """Starts with tolerances `loosest` times those of the layers and tightens them to their own.

    At a share `s` of the training steps every solver, and every implicit gradient, works with its own
    `tol` times `loosest^(1 - s/until)`, from `s = until` on with its `tol` itself. Only training batches
    are affected: validation, tests and checkpoints see the layers as they were configured.

    Add it with `--trainer.callbacks+=opteq.training.tolerance.FollowingTolerance`.

    Args:
        loosest: factor on the tolerances at the start, at least 1.
        until: share of the training after which the factor is 1, in (0, 1].

    Raises:
        ConfigError: for numbers out of range.
    """

    def __init__(self, loosest: float = 30.0, until: float = 0.7) -> None:
        if not loosest >= 1 or not 0 < until <= 1:
            raise ConfigError(
                f"Expected `loosest` of at least 1 and `until` in (0, 1], got {loosest} and {until}."
            )
        self.loosest, self.until = loosest, until
        self._own: list[tuple[EquilibriumLayer, Any, Any]] = []

    def factor(self, share: float) -> float:
        """The factor on the tolerances at a share of the training, from `loosest` down to 1."""
        return self.loosest ** max(0.0, 1 - share / self.until)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        factor = self.factor(trainer.global_step / trainer.estimated_stepping_batches)
        layers = [layer for layer in pl_module.modules() if isinstance(layer, EquilibriumLayer)]
        self._own = [(layer, layer.solver, layer.gradient) for layer in layers]
        for layer, solver, gradient in self._own:
            if solver is not None:
                layer.solver = _loosened(solver, factor)
            if isinstance(gradient, Implicit):
                layer.gradient = _loosened(gradient, factor)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for layer, solver, gradient in self._own:
            layer.solver, layer.gradient = solver, gradient


def _loosened(method: Any, factor: float) -> Any:
    # A relative residual of 1 is that of no solve at all.
    return replace(method, tol=min(factor * method.tol, 0.5))
