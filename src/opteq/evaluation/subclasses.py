"""Accuracy on sub-classes that a classifier of super-classes was trained on, and on others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from opteq.data.base import ImageDataModule
from opteq.errors import ConfigError
from opteq.evaluation.passes import logits_of


@dataclass(frozen=True, slots=True)
class SubclassScores:
    """How often the super-class of images is found (Li et al. 2023, Table 3).

    Attributes:
        names: of the sub-classes, `SUPER.SUB`.
        known: `(sub-classes,)` whether a sub-class was trained on.
        counts: `(sub-classes,)` test images.
        accuracy: `(sub-classes,)` share of them whose super-class is found; NaN without images.
    """

    names: tuple[str, ...]
    known: NDArray[np.bool_]
    counts: NDArray[np.int64]
    accuracy: NDArray[np.float64]

    @property
    def known_accuracy(self) -> float:
        """On all images of sub-classes that were trained on."""
        return self._mean(self.known)

    @property
    def unknown_accuracy(self) -> float:
        """On all images of the others."""
        return self._mean(~self.known)

    def _mean(self, chosen: NDArray[np.bool_]) -> float:
        chosen = chosen & (self.counts > 0)
        return float(np.average(self.accuracy[chosen], weights=self.counts[chosen]))


def subclass_scores(
    network: nn.Module, data: ImageDataModule, loader: Iterable[Sequence[Tensor]] | None = None
) -> SubclassScores:
    """Find the super-classes of all test images.

    Args:
        network: maps images to logits of super-classes.
        data: set up for the test stage, with `superclasses`, and `classes` or `fold`, which leave some out.
        loader: batches of images and places in `data.all_classes`; those of all test images unless given.

    Raises:
        ConfigError: if the data have no super-classes, or no sub-class is left out, or none has images.
    """
    if not data.superclasses or len(data.kept_classes) == len(data.all_classes):
        raise ConfigError(
            "Sub-classes are compared where some were left out of the training: train with"
            " --data.superclasses true and --data.fold 0, or list those to keep in --data.classes."
        )
    logits, labels = logits_of(network, loader if loader is not None else data.subclass_dataloader())
    right = logits.argmax(1) == data.superclass_labels.numpy()[labels]
    classes = len(data.all_classes)
    counts = np.bincount(labels, minlength=classes)
    known = np.isin(data.all_classes, data.kept_classes)
    if not counts[known].any() or not counts[~known].any():
        raise ConfigError("There are no test images of the sub-classes that were left out, or of the others.")
    with np.errstate(invalid="ignore"):
        accuracy = np.bincount(labels, weights=right, minlength=classes) / counts
    return SubclassScores(data.all_classes, known, counts, accuracy)
