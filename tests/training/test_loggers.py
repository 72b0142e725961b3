"""The loggers of a training by name, and what TensorBoard is shown."""

from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opteq.errors import ConfigError
from opteq.training.loggers import tensorboard, wandb
from opteq.training.pictures import TAG, ValidationPictures


def events(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_the_metrics_of_a_stage_stand_together(tmp_path):
    logger = tensorboard(tmp_path, {})
    metrics = {"epoch": 0, "train_loss": 0.5, "val_accuracy": 0.75, "val_solver_steps": 7.0}
    logger.log_metrics(metrics | {"learning_rate": 0.1}, 3)
    logger.finalize("success")
    found = events(tmp_path)
    tags = {"epoch", "train/loss", "val/accuracy", "val/solver_steps", "learning_rate"}
    assert set(found.Tags()["scalars"]) == tags
    (event,) = found.Scalars("val/accuracy")
    assert (event.step, event.value) == (3, 0.75)


def test_wandb_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", False)
    sentence = r"^--trainer\.logger wandb needs the package wandb: pip install wandb\.$"
    with pytest.raises(ConfigError, match=sentence):
        wandb(tmp_path)


def show(folder, images, labels, logits, batch_idx=0, loggers=None):
    facts = SimpleNamespace(normalization=(0.25, 0.5), class_names=("zero", "eins", "два"))
    board = tensorboard(folder, {})
    loggers = [board] if loggers is None else loggers
    trainer = SimpleNamespace(loggers=loggers, sanity_checking=False, global_step=5)
    ValidationPictures(facts).on_validation_batch_end(trainer, None, logits, (images, labels), batch_idx)
    board.finalize("success")
    return events(folder)


def picture(found):
    (event,) = found.Images(TAG)
    assert event.step == 5
    return np.asarray(Image.open(BytesIO(event.encoded_image_string))).astype(int)


def test_the_first_images_have_their_predictions(tmp_path):
    images = torch.stack([torch.full((1, 4, 4), value) for value in (-0.5, 1.5)])
    logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    shown = picture(show(tmp_path, images, torch.tensor([0, 1]), logits))
    tile = shown.shape[1] // 2
    # Black and white once the normalisation is undone.
    assert (shown[:tile, :tile] == 0).all()
    assert (shown[:tile, tile:] == 255).all()
    right, wrong = shown[tile:, :tile], shown[tile:, tile:]
    # Green where it is right, orange where it is wrong.
    assert (right[..., 1] > right[..., 0] + 50).any()
    assert not (right[..., 0] > right[..., 1] + 50).any()
    assert (wrong[..., 0] > wrong[..., 1] + 50).any()
    assert not (wrong[..., 1] > wrong[..., 0] + 50).any()


def test_of_scenes_the_classes_of_pixels_are_shown(tmp_path):
    logits = torch.zeros(1, 3, 4, 4)
    logits[:, 1, :, :2], logits[:, 2, :, 2:] = 1, 1
    images, labels = torch.zeros(1, 3, 4, 4), torch.zeros(1, 4, 4).long()
    shown = picture(show(tmp_path, images, labels, logits))
    side = shown.shape[1]
    assert shown.shape[0] == 2 * side
    left, right = shown[side + side // 2, side // 4], shown[side + side // 2, 3 * side // 4]
    assert (left != right).any()
    assert (shown[side:, : side // 2] == left).all()
    assert (shown[side:, side // 2 :] == right).all()


def test_other_batches_and_other_loggers_show_nothing(tmp_path):
    images, labels, logits = torch.zeros(1, 1, 4, 4), torch.zeros(1).long(), torch.zeros(1, 3)
    assert not show(tmp_path / "a", images, labels, logits, batch_idx=1).Tags()["images"]
    other = [CSVLogger(tmp_path)]
    assert not show(tmp_path / "b", images, labels, logits, loggers=other).Tags()["images"]
