"""Validation images with what the network takes them for, once an epoch, for TensorBoard."""

from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from opteq.data.facts import Facts
from opteq.evaluation.display import displayable
from opteq.plots.masks import class_colours

TAG = "val/predictions"
_IMAGES = 8
# Pixels of a tile and of the line below it.
_SIDE, _LINE = 96, 16
_BACKGROUND, _RIGHT, _WRONG = (32, 32, 32), (60, 200, 140), (255, 140, 60)


class ValidationPictures(Callback):
    """Shows the first validation images with their predicted classes, green where right, or those of pixels.

    Args:
        facts: what is known of the data.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if batch_idx or outputs is None or not boards or trainer.sanity_checking:
            return
        classes = outputs[:_IMAGES].argmax(1).cpu()
        images, labels = (part[: len(classes)] for part in batch)
        shown = displayable(images, self._facts.normalization)
        picture = self._scenes(shown, classes) if classes.ndim > 1 else self._named(shown, classes, labels)
        for board in boards:
            board.experiment.add_image(TAG, picture, trainer.global_step, dataformats="HWC")

    def _named(self, images: NDArray[np.float32], classes: Tensor, labels: Tensor) -> NDArray[np.uint8]:
        sheet = Image.new("RGB", (_SIDE * len(images), _SIDE + _LINE), _BACKGROUND)
        draw = ImageDraw.Draw(sheet)
        for place, (image, found) in enumerate(zip(images, classes.tolist(), strict=True)):
            sheet.paste(_tile(image), (place * _SIDE, 0))
            # The font that comes with Pillow has no other letters.
            name = self._facts.class_names[found][:14].encode("latin-1", "replace").decode("latin-1")
            colour = _RIGHT if found == labels[place] else _WRONG
            draw.text((place * _SIDE + 4, _SIDE + 2), name, colour)
        return np.asarray(sheet)

    def _scenes(self, images: NDArray[np.float32], classes: Tensor) -> NDArray[np.uint8]:
        palette = class_colours(len(self._facts.class_names))[:, :3]
        sheet = Image.new("RGB", (_SIDE * len(images), 2 * _SIDE), _BACKGROUND)
        for place, (image, found) in enumerate(zip(images, classes.numpy(), strict=True)):
            sheet.paste(_tile(image), (place * _SIDE, 0))
            sheet.paste(_tile(palette[found]), (place * _SIDE, _SIDE))
        return np.asarray(sheet)


def _tile(image: NDArray[Any]) -> Image.Image:
    """`(height, width, 1 or 3)` in [0, 1], as large as fits into a tile."""
    pixels = np.broadcast_to((image * 255).round().astype(np.uint8), (*image.shape[:2], 3))
    scale = _SIDE / max(image.shape[:2])
    size = (max(round(image.shape[1] * scale), 1), max(round(image.shape[0] * scale), 1))
    return Image.fromarray(np.ascontiguousarray(pixels)).resize(size, Image.Resampling.NEAREST)
