"""Checkpoints that survive a full disk and are read without executing code."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor

from opteq.errors import ConfigError, NonFiniteError, OpteqError
from opteq.system.files import write_beside
from opteq.training.metrics_csv import MetricsCSV

BEST = "best.ckpt"
LAST = "last.ckpt"
FILE = "file"
"""Where a checkpoint that was read says which file it is from."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside the earlier one and replaces it when the new one is complete."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with write_beside(target) as file:
                file.write(buffer.getbuffer())
        except OSError as error:
            raise OpteqError(
                f"Could not write {target} ({error.strerror}); earlier checkpoints are untouched. "
                "Make room and continue with --ckpt_path last."
            ) from error

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        return read_checkpoint(Path(path))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, executing none of the code it may hold.

    Raises:
        ConfigError: The file is missing, damaged, or not a checkpoint of a training.
    """
    if not path.is_file():
        raise ConfigError(f"There is no checkpoint {path}.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # of the system, about the file; without a name, about a place that it does not have
        raise ConfigError(f"{path} is truncated or not a checkpoint; use another one.") from error
    if not (
        isinstance(checkpoint, dict)
        and isinstance(checkpoint.get("epoch"), int)
        and isinstance(checkpoint.get("state_dict"), dict)
        and all(isinstance(weight, torch.Tensor) for weight in checkpoint["state_dict"].values())
    ):
        raise ConfigError(f"{path} is not a checkpoint of a training run.")
    return checkpoint | {FILE: str(path)}


def _refuse_diverged(trainer: Trainer, module: LightningModule, folder: Path) -> None:
    """Raise a `NonFiniteError` for weights that must not take the place of those in the checkpoints there."""
    bad = next((name for name, weight in module.named_parameters() if not weight.isfinite().all()), None)
    if bad is None:
        return
    last, run = folder / LAST, folder.parent.name
    raise NonFiniteError(
        f"The training diverged in epoch {trainer.current_epoch}: weights are NaN or infinite, among them"
        f" {bad}. "
        + (
            f"{last} is still that of the epoch before: go on from it with the same command, --ckpt_path last"
            f" --run {run} and --trainer.gradient_clip_val 1, or start anew with a lower"
            if last.is_file()
            else "There is no checkpoint before it: start anew with --trainer.gradient_clip_val 1 or a lower"
        )
        + " --model.learning_rate."
    )


class BestCheckpoint(ModelCheckpoint):
    """Keeps `best.ckpt`, the checkpoint of the epoch with the highest score on the validation images.

    Of several with that score, as there are where few images are validated, it is the one with the lowest
    loss. Lightning records absolute paths in its checkpoints, and forgets the best score if they differ.
    Here the folder may be moved; in a folder without a best checkpoint, a new search begins. With
    `StochasticWeightAveraging` the average, which is there at the end alone, takes the place of the best.

    Args:
        folder: Where the file lies.
        score: Name of the score in the logs, such as `"val_accuracy"`.
    """

    def __init__(self, folder: Path, score: str) -> None:
        super().__init__(
            dirpath=str(folder),
            filename=Path(BEST).stem,
            monitor=score,
            mode="max",
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self._loss = float("inf")

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        loss = float(trainer.callback_metrics["val_loss"])
        equal = current is not None and bool(current == self.best_model_score)
        better = super().check_monitor_top_k(trainer, current) or (equal and loss < self._loss)
        if better:
            self._loss = loss
        return better

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_diverged(trainer, pl_module, Path(str(self.dirpath)))
        # There is none where nothing is validated, or not yet.
        if self.monitor in trainer.callback_metrics:
            super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # This average is in the model from now on, and no epoch has been validated with it.
        averages = [c for c in trainer.callbacks if isinstance(c, StochasticWeightAveraging)]  # pyright: ignore[reportAttributeAccessIssue]
        if any(trainer.current_epoch > average.swa_end for average in averages):
            trainer.save_checkpoint(Path(str(self.dirpath)) / BEST)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"loss": self._loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = str(Path(str(self.dirpath)) / BEST)
        if not Path(best).is_file():
            return
        here = {
            "dirpath": self.dirpath,
            "best_model_path": best,
            "kth_best_model_path": best,
            "best_k_models": {best: state_dict["best_model_score"]},
        }
        super().load_state_dict(state_dict | here)
        # One from before losses were kept has none.
        self._loss = state_dict.get("loss", self._loss)


class LastCheckpoint(Checkpoint):
    """Keeps `last.ckpt`, the checkpoint of the last epoch.

    Lightning's own `save_last` leaves out epochs that are not the best so far.

    Args:
        folder: Where the file lies.
        table: What keeps the metrics of the epochs. Lightning logs those of an epoch after its checkpoint, so
            that a training killed between the two would lose them; the table is given them before.
    """

    def __init__(self, folder: Path, table: MetricsCSV | None = None) -> None:
        self.path = folder / LAST
        self.table = table

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_diverged(trainer, pl_module, self.path.parent)
        if self.table is not None:
            metrics = convert_tensors_to_scalars(trainer._logger_connector.metrics["log"])
            self.table.log_metrics(metrics | {"epoch": trainer.current_epoch}, trainer.global_step - 1)
        trainer.save_checkpoint(self.path)
