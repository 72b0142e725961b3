"""One pass over a test set of scenes, and the record of it that figures are drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opteq.errors import ConfigError, ShapeError
from opteq.evaluation.display import Normalization, displayable
from opteq.evaluation.passes import Best, EvaluationRecord, evaluating, refuse_non_finite, solves_of
from opteq.evaluation.scores import confusion_matrix
from opteq.evaluation.trace import trace
from opteq.layer import solve_log

SHOWN_SCENES = 6
TRACED_SCENES = 3


@dataclass(frozen=True, slots=True)
class Scenes:
    """Test images with what the network said about their pixels.

    Attributes:
        images: `(n, height, width, 3)` in [0, 1], ready to show.
        labels: `(n, height, width)` true classes, negative where there is none.
        predictions: `(n, height, width)` predicted classes.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int16]
    predictions: NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class SegmentationRecord(EvaluationRecord):
    """What a network did on a test set of scenes.

    Attributes:
        confusion: `(classes, classes)` pixels: row = true class, column = predicted class.
        scenes: test images drawn at random.
    """

    confusion: NDArray[np.int64]
    scenes: Scenes

    @property
    def intersection_over_union(self) -> NDArray[np.float64]:
        """`(classes,)` right pixels of a class over all that are or were taken for it; NaN for none."""
        with np.errstate(invalid="ignore"):
            return self._right / (self.confusion.sum(0) + self.confusion.sum(1) - self._right)

    @property
    def class_accuracy(self) -> NDArray[np.float64]:
        """`(classes,)` share of the pixels of a class that were found; NaN for none."""
        with np.errstate(invalid="ignore"):
            return self._right / self.confusion.sum(1)

    @property
    def pixel_accuracy(self) -> float:
        """Share of all pixels that are right."""
        return float(self._right.sum() / self.confusion.sum())

    @property
    def _right(self) -> NDArray[np.int64]:
        return self.confusion.diagonal()


def evaluate_scenes(
    network: nn.Module,
    loader: Iterable[Sequence[Tensor]],
    class_names: Sequence[str],
    normalization: Normalization,
    device: torch.device | str,
) -> SegmentationRecord:
    """Run `network` once over a test set of scenes and record what it did.

    The network is left on `device` and in the mode (train or eval) it was in.

    Args:
        network: maps images `(batch, channels, height, width)` to logits `(batch, classes, height, width)`.
        loader: batches `(images, labels)`; labels `(batch, height, width)` are negative where there is none.
        class_names: one name per class.
        normalization: mean and standard deviation that were applied to the images; undone to show them.
        device: where to run.

    Raises:
        ConfigError: if no pixel of the test set has a class.
        ShapeError: if the logits fit neither the labels nor the class names.
        NonFiniteError: if the network answers NaN or infinity.
    """
    names = tuple(class_names)
    # A generator of its own: the choice of scenes neither depends on nor disturbs global seeds.
    generator = torch.Generator().manual_seed(0)
    shown = Best(SHOWN_SCENES)
    confusion = np.zeros((len(names), len(names)), np.int64)
    with evaluating(network, device) as dtype:
        with solve_log(network) as log:
            for images, labels in loader:
                logits = network(images.to(device=device, dtype=dtype)).float()
                expected = (len(labels), len(names), *labels.shape[1:])
                if logits.shape != expected:
                    raise ShapeError(f"Expected logits of shape {expected}, got {tuple(logits.shape)}.")
                refuse_non_finite(logits)
                predictions, labels = logits.argmax(1).cpu(), labels.cpu()
                known = labels >= 0
                confusion += confusion_matrix(labels[known].numpy(), predictions[known].numpy(), len(names))
                lot = torch.rand(len(labels), generator=generator)
                shown.offer(lot, images.cpu(), labels, predictions)
        if not confusion.any():
            raise ConfigError("The test set is empty: give at least one pixel with a class to evaluate on.")
        _, images, labels, predictions = shown.columns
        traces = trace(network, images[:TRACED_SCENES].to(device, dtype), normalization)
    return SegmentationRecord(
        class_names=names,
        confusion=confusion,
        **solves_of(log),
        scenes=Scenes(
            displayable(images, normalization), labels.short().numpy(), predictions.short().numpy()
        ),
        traces=traces,
    )
