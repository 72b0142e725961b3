"""How long a training took and how many images it saw."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class TrainingMeter(Callback):
    """Measures the training loop, including validation and checkpoints but not the start-up or test.

    The measurements go into the checkpoints: those of a resumed run include its earlier parts.

    Attributes:
        seconds: Seconds spent so far.
        images: Training images processed so far, by all processes; a `ClassifierModule` says how many.
        began: Whether this process has trained on a batch.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.images = 0
        self.began = False
        self._last: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.images += outputs["images"]
        self.began = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._advance()

    def state_dict(self) -> dict[str, Any]:
        self._advance()
        return {"seconds": self.seconds, "images": self.images}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds = state_dict["seconds"]
        self.images = state_dict["images"]

    def _advance(self) -> None:
        if self._last is None:  # not training yet
            return
        now = time.perf_counter()
        self.seconds += now - self._last
        self._last = now
