"""Ceilings on norms that rise in training: near equilibria first, far ones later."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap


class RisingCeiling(Callback):
    """Starts with a `max_norm` of `start` and raises it to that of each map, close to 1.

    With `ζ` for the `max_norm` of a map, it is `1 - (1 - start)((1 - ζ)/(1 - start))^(s/until)` at a share
    `s` of the training steps, and `ζ` itself from `s = until` on. How far an equilibrium can look, about
    `(1 - ζ²)^{-1/2}` pixels, grows at a steady rate, and so does the cost of a solve. Only training batches
    are affected: validation, tests and checkpoints see the maps as they were configured.

    Add it with `--trainer.callbacks+=opteq.training.ceiling.RisingCeiling`.

    Args:
        start: the first ceiling; maps with a `max_norm` that is not above it keep their own.
        until: share of the training after which they all have their own, in (0, 1].

    Raises:
        ConfigError: for numbers out of range; at the start of a training, if no map has a `max_norm` between
            `start` and 1.
    """

    def __init__(self, start: float = 0.97, until: float = 0.7) -> None:
        if not 0 < start < 1 or not 0 < until <= 1:
            raise ConfigError(
                f"Expected `start` between 0 and 1 and `until` in (0, 1], got {start} and {until}."
            )
        self.start, self.until = start, until
        self._own: list[tuple[Any, float]] = []

    def ceiling(self, own: float, share: float) -> float:
        """The ceiling at a share of the training, for maps whose own is `own`."""
        return 1 - (1 - self.start) * ((1 - own) / (1 - self.start)) ** min(1.0, share / self.until)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._maps(pl_module):
            raise ConfigError(
                f"RisingCeiling has nothing to raise: no map has a `max_norm` between {self.start} and 1."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        share = trainer.global_step / trainer.estimated_stepping_batches
        self._own = [(module, module.max_norm) for module in self._maps(pl_module)]
        for module, own in self._own:
            module.max_norm = self.ceiling(own, share)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for module, own in self._own:
            module.max_norm = own

    def _maps(self, network: LightningModule) -> list[Any]:
        maps = [module for module in network.modules() if isinstance(module, EquilibriumMap)]
        return [module for module in maps if self.start < (getattr(module, "max_norm", None) or 0) < 1]
