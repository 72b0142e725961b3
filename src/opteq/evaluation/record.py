"""One pass over a test set, and the record of it that figures are drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opteq.errors import ConfigError, ShapeError
from opteq.evaluation.branchstudy import STUDIED_SAMPLES, BranchRecord, study_branches
from opteq.evaluation.display import Normalization, displayable
from opteq.evaluation.passes import Best, EvaluationRecord, evaluating, refuse_non_finite, solves_of
from opteq.evaluation.scores import Reliability, confusion_matrix, reliability
from opteq.evaluation.trace import trace
from opteq.layer import solve_log

SHOWN_SAMPLES = 8
TRACED_SAMPLES = 6


@dataclass(frozen=True, slots=True)
class Samples:
    """Test images with what the network said about them.

    Attributes:
        images: `(n, height, width, 1 or 3)` in [0, 1], ready to show.
        labels: `(n,)` true classes.
        predictions: `(n,)` predicted classes.
        confidences: `(n,)` probability of the predicted class.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    predictions: NDArray[np.int64]
    confidences: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TestRecord(EvaluationRecord):
    """What a network did on a test set.

    Attributes:
        labels: `(samples,)` true classes.
        predictions: `(samples,)` predicted classes.
        confidences: `(samples,)` probability of the predicted class.
        ranks: `(samples,)` place of the true class among the sorted logits; 0 is right.
        right: rightly classified samples, drawn at random.
        mistakes: the most confident mistakes, the most confident first.
        branches: how the branches of a multi-branch network relate, on samples drawn at random.
    """

    labels: NDArray[np.int64]
    predictions: NDArray[np.int64]
    confidences: NDArray[np.float32]
    ranks: NDArray[np.int64]
    right: Samples
    mistakes: Samples
    branches: BranchRecord

    def accuracy(self, top: int = 1) -> float:
        """Share of samples whose true class is among the `top` likeliest."""
        return float((self.ranks < top).mean())

    @property
    def confusion(self) -> NDArray[np.int64]:
        """`(classes, classes)` counts: row = true class, column = predicted class."""
        return confusion_matrix(self.labels, self.predictions, len(self.class_names))

    @property
    def reliability(self) -> Reliability:
        """Accuracy as a function of confidence; its `error` is the expected calibration error."""
        return reliability(self.confidences, self.ranks == 0)


def evaluate(
    network: nn.Module,
    loader: Iterable[Sequence[Tensor]],
    class_names: Sequence[str],
    normalization: Normalization,
    device: torch.device | str,
) -> TestRecord:
    """Run `network` once over a test set and record what it did.

    The network is left on `device` and in the mode (train or eval) it was in.

    Args:
        network: maps images `(batch, channels, height, width)` to logits `(batch, classes)`.
        loader: batches `(images, labels)`.
        class_names: one name per class.
        normalization: mean and standard deviation that were applied to the images, each a number
            or one per channel; undone to show them.
        device: where to run.

    Raises:
        ConfigError: if the test set is empty or holds labels without a class name.
        ShapeError: if the logits do not fit the class names.
        NonFiniteError: if the network answers NaN or infinity.
    """
    names = tuple(class_names)
    # A generator of its own: the choice of samples neither depends on nor disturbs global seeds.
    generator = torch.Generator().manual_seed(0)
    right, mistakes, studied = Best(SHOWN_SAMPLES), Best(SHOWN_SAMPLES), Best(STUDIED_SAMPLES)
    rows: list[tuple[Tensor, ...]] = []

    with evaluating(network, device) as dtype:
        with solve_log(network) as log:
            for images, labels in loader:
                logits = network(images.to(device=device, dtype=dtype)).float().cpu()
                labels = labels.cpu()
                _check(logits, labels, names)
                # One stable order for all scores, so that ties cannot make them disagree.
                order = logits.argsort(dim=1, descending=True, stable=True)
                predictions = order[:, 0]
                confidences = logits.softmax(1).gather(1, predictions[:, None])[:, 0]
                ranks = (order == labels[:, None]).int().argmax(1)
                rows.append((labels, predictions, confidences, ranks))

                lot = torch.rand(len(labels), generator=generator)
                hit = ranks == 0
                sample = (images.cpu(), labels, predictions, confidences)
                right.offer(lot[hit], *(column[hit] for column in sample))
                mistakes.offer(confidences[~hit], *(column[~hit] for column in sample))
                studied.offer(lot, images.cpu(), labels)
        if not rows:
            raise ConfigError("The test set is empty: give at least one image to evaluate on.")
        _, images, truth = (column.to(device) for column in studied.columns)
        images = images.to(dtype)
        traces = trace(network, images[:TRACED_SAMPLES], normalization)
        branches = study_branches(network, images, truth)

    labels, predictions, confidences, ranks = (
        torch.cat(column).numpy() for column in zip(*rows, strict=True)
    )
    return TestRecord(
        class_names=names,
        labels=labels,
        predictions=predictions,
        confidences=confidences,
        ranks=ranks,
        **solves_of(log),
        right=_samples(right, normalization),
        mistakes=_samples(mistakes, normalization),
        traces=traces,
        branches=branches,
    )


def _check(logits: Tensor, labels: Tensor, names: tuple[str, ...]) -> None:
    """Refuse answers and labels that no score can be computed from."""
    if logits.shape != (len(labels), len(names)):
        raise ShapeError(
            f"Expected logits of shape ({len(labels)}, {len(names)}), one per class name,"
            f" got {tuple(logits.shape)}."
        )
    refuse_non_finite(logits)
    if labels.min() < 0 or labels.max() >= len(names):
        raise ConfigError(
            f"Expected test labels from 0 to {len(names) - 1}, one per class name,"
            f" got {int(labels.min())} to {int(labels.max())}."
        )


def _samples(best: Best, normalization: Normalization) -> Samples:
    """The kept samples in a form to store."""
    _, images, labels, predictions, confidences = best.columns
    return Samples(
        images=displayable(images, normalization),
        labels=labels.numpy(),
        predictions=predictions.numpy(),
        confidences=confidences.numpy(),
    )
